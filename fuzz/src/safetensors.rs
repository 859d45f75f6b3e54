//! Safetensors files: a header alone, or an index, and after each line `---` the name of a file and its header.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use boostr::checkpoint::{Checkpoint, Dtype, not_finite, safetensors};
use serde_json::Value;

use super::weight_files::safetensors_file;

/// Most bytes of data behind a header.
const MOST: u64 = 1 << 16;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let name = format!("boostr-fuzz-safetensors-{}", std::process::id());
    std::env::temp_dir().join(name)
});

/// Opens what `text` stands for.
pub fn check(text: &str) {
    let mut pieces = text.split("\n---\n");
    let first = pieces.next().unwrap_or_default();
    let files: Vec<_> = pieces.filter_map(|piece| piece.split_once('\n')).collect();
    if files.is_empty() {
        if let Ok(checkpoint) = Checkpoint::from_safetensors("fuzz", file(first)) {
            used(&checkpoint);
            round_trip(&checkpoint);
        }
        return;
    }
    let _ = fs::remove_dir_all(&*FOLDER);
    fs::create_dir_all(&*FOLDER).expect("a folder");
    // An empty index is none: then the names of the files tell.
    if !first.is_empty() {
        fs::write(FOLDER.join("model.safetensors.index.json"), first).expect("written");
    }
    for (name, header) in files {
        // Written where the name leads only if that is the folder itself.
        if Path::new(name).file_name().is_some_and(|file| file == name) {
            let _ = fs::write(FOLDER.join(name), file(header));
        }
    }
    if let Ok(checkpoint) = Checkpoint::open(&FOLDER, true) {
        used(&checkpoint);
    }
}

/// A header with as many bytes behind it as it wants, or bytes as they are.
fn file(header: &str) -> Vec<u8> {
    if let Some(bytes) = header.strip_prefix('=') {
        return bytes.as_bytes().to_vec();
    }
    let json: Value = serde_json::from_str(header).unwrap_or_default();
    let tensors = json.as_object().into_iter().flatten();
    let ends = tensors.filter_map(|(_, info)| info["data_offsets"].get(1)?.as_u64());
    let len = ends.max().unwrap_or_default().min(MOST);
    safetensors_file(header, &vec![1; len as usize])
}

/// Every tensor is as large as its shape, and has values if it has such.
fn used(checkpoint: &Checkpoint) {
    for (_, entry) in checkpoint.iter() {
        assert_eq!(entry.dtype.bytes_of(&entry.shape), Some(entry.data.len()));
        let is_float = matches!(entry.dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
        assert_eq!(entry.to_f32().is_ok(), is_float);
    }
    not_finite(checkpoint, |_| {}).expect("all tensors are whole");
}

/// What was read is written, and read as the same.
fn round_trip(checkpoint: &Checkpoint) {
    let tensors: Vec<_> = checkpoint
        .iter()
        .map(|(name, entry)| (name, entry.dtype, &entry.shape[..], &entry.data[..]))
        .collect();
    fs::create_dir_all(&*FOLDER).expect("a folder");
    let path = FOLDER.join("written");
    safetensors::write(&path, &tensors, checkpoint.metadata()).expect("what was read is written");
    let back = Checkpoint::open(&path, false).expect("what was written is read");
    assert_eq!(back.metadata(), checkpoint.metadata());
    let shown = |checkpoint: &Checkpoint| -> Vec<_> {
        let all = checkpoint.iter();
        all.map(|(name, entry)| (name.to_owned(), entry.dtype, entry.shape.clone())).collect()
    };
    assert_eq!(shown(&back), shown(checkpoint));
}
