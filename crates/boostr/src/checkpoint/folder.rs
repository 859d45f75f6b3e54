//! Which files make the checkpoint: one file, a model folder, or the shards that its index names.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::entry::{cut, quoted};
use super::json::UniqueMap;
use super::map::{Access, bytes_of, missing};
use super::{Contents, gguf, safetensors, torch};
use crate::error::{Error, Result};
use crate::files::bytes_without_bom;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const PICKLE: &str = "pytorch_model.bin";

/// Names that one error lists.
const MAX_LISTED: usize = 5;

/// Bytes of the JSON reader's message that an error repeats.
const MAX_MESSAGE: usize = 400;

/// Longest index read; the largest models need a hundredth.
const MAX_INDEX: usize = 100_000_000;

/// Reads the checkpoint at `path`, by the rules of [`Checkpoint::open`](super::Checkpoint::open).
pub(super) fn read(path: &Path, allow_pickle: bool, access: Access) -> Result<Contents> {
    if !fs::metadata(path).map_err(|e| missing(path, e))?.is_dir() {
        if path.extension().is_some_and(|ending| ending == "json") {
            let reason = "expected a file of weights, found one of JSON: name its folder";
            return Err(Error::format(path, reason));
        }
        return read_file(path, allow_pickle, access);
    }
    let [index, single, pickle] = [INDEX, SINGLE, PICKLE].map(|name| path.join(name));
    // A whole file wins over an index, which may be left from before it was made, as in transformers.
    if present(&single)? {
        return safetensors::read(&single, &bytes_of(&single, access)?);
    }
    if present(&index)? {
        return read_shards(path, &index, access);
    }
    let files = safetensors_of(path)?;
    if let Some(shards) = shards_by_name(path, &files)? {
        let shards = shards.iter().map(|shard| (shard.as_str(), Vec::new()));
        return join_shards(path, path, shards.collect(), access);
    }
    if let Some(only) = only(path, files)? {
        return safetensors::read(&only, &bytes_of(&only, access)?);
    }
    if let Some(only) = gguf::only_model(path)? {
        return gguf::open(&only, &bytes_of(&only, access)?, access);
    }
    if present(&pickle)? {
        return read_file(&pickle, allow_pickle, access);
    }
    let cached = snapshots(path);
    let hint = if cached.is_empty() {
        format!(": looked for {SINGLE}, {INDEX}, *.safetensors, *.gguf, {PICKLE}")
    } else {
        cached
    };
    Err(Error::format(path, format!("no checkpoint in this folder{hint}")))
}

/// Where the models are in a folder of the cache of Hugging Face's hub, for a message; empty for other folders.
pub(crate) fn snapshots(folder: &Path) -> String {
    let inside = fs::read_dir(folder.join("snapshots")).into_iter().flatten().flatten();
    let mut paths: Vec<String> = inside.map(|entry| entry.path().display().to_string()).collect();
    paths.sort();
    if paths.is_empty() {
        return String::new();
    }
    let names = listed(paths.iter().map(String::as_str));
    format!(", which is one of the hub's cache: its models are below snapshots ({names})")
}

/// Whether there is something of that name, be it a link to nothing.
pub(super) fn present(path: &Path) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io(path, e)),
    }
}

/// The files that are checkpoints by their ending.
fn safetensors_of(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for file in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let path = file.map_err(|e| Error::io(folder, e))?.path();
        if path.extension().is_some_and(|ending| ending == "safetensors") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The one file that there is.
fn only(folder: &Path, mut found: Vec<PathBuf>) -> Result<Option<PathBuf>> {
    if found.len() > 1 {
        let names: BTreeSet<_> =
            found.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        let reason = format!(
            "{} safetensors files but no {INDEX}: open one of them by its path ({})",
            found.len(),
            listed(names)
        );
        return Err(Error::format(folder, reason));
    }
    Ok(found.pop())
}

/// The names of all shards, where the files are shards of one model by their names: `STEM-00001-of-00002.safetensors`.
///
/// # Errors
///
/// [`Error::Format`] when some of them are missing.
fn shards_by_name(folder: &Path, files: &[PathBuf]) -> Result<Option<Vec<String>>> {
    let names: Vec<&str> = files.iter().filter_map(|path| path.file_name()?.to_str()).collect();
    let parts = |name: &'_ str| -> Option<(String, usize, usize)> {
        let (rest, of) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let is_number = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
        if !is_number(number) || !is_number(of) {
            return None;
        }
        Some((stem.to_owned(), number.parse().ok()?, of.parse().ok()?))
    };
    let Some((stem, _, total)) = names.first().and_then(|name| parts(name)) else {
        return Ok(None);
    };
    let is_of = |name: &&str| {
        parts(name).is_some_and(|(other, number, of)| {
            other == stem && of == total && (1..=total).contains(&number)
        })
    };
    if names.len() != files.len() || !names.iter().all(is_of) {
        return Ok(None);
    }
    let all: Vec<String> =
        (1..=total).map(|i| format!("{stem}-{i:05}-of-{total:05}.safetensors")).collect();
    let absent: Vec<&str> =
        all.iter().map(String::as_str).filter(|name| !names.contains(name)).collect();
    if absent.is_empty() {
        return Ok(Some(all));
    }
    let (count, absent) = (absent.len(), listed(absent));
    Err(Error::format(folder, format!("{count} of {total} shards are missing: {absent}")))
}

/// Reads one file for what its first bytes say it is.
fn read_file(path: &Path, allow_pickle: bool, access: Access) -> Result<Contents> {
    let bytes = bytes_of(path, access)?;
    match *bytes {
        [b'G', b'G', b'U', b'F', ..] => gguf::open(path, &bytes, access),
        // The header of a safetensors file starts at byte 8; its length may look like anything.
        [_, _, _, _, _, _, _, _, b'{', ..] => safetensors::read(path, &bytes),
        [b'P', b'K', 3, 4, ..] | [0x80, 2..=5, ..] if !allow_pickle => {
            Err(Error::format(path, pickle_advice(path)))
        }
        [b'P', b'K', 3, 4, ..] => torch::read(path, &bytes),
        [0x80, 2..=5, ..] => Err(Error::format(
            path,
            format!(
                "file is in torch's format from before 1.6, which is not read; convert it: {}",
                convert_command(path)
            ),
        )),
        _ if gguf::is_name(path) => gguf::open(path, &bytes, access),
        _ => safetensors::read(path, &bytes),
    }
}

fn pickle_advice(path: &Path) -> String {
    let command = convert_command(path);
    format!(
        "file is a Python pickle, which is a program, and is not read by default. Convert it, in \
         its folder: {command} -- or read it with --allow-pickle, which knows a closed list of \
         types and runs nothing"
    )
}

/// The shell command that makes a safetensors file of a torch file, in its own folder.
fn convert_command(path: &Path) -> String {
    let plain = |name: &&str| {
        name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
    };
    // Any other name would need the quoting of two languages.
    let name = path.file_name().and_then(|name| name.to_str()).filter(plain).unwrap_or(PICKLE);
    format!(
        "python3 -c \"import torch,safetensors.torch as s; \
         s.save_file({{k:v.contiguous().clone() for k,v in \
         torch.load('{name}',map_location='cpu',weights_only=True).items()}},'model.safetensors')\""
    )
}

/// Reads all shards of an index; every tensor it lists must be where it says.
fn read_shards(folder: &Path, index: &Path, access: Access) -> Result<Contents> {
    let refuse = |reason: String| Err(Error::format(index, reason));
    let mut expected: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let weight_map = read_index(index, access)?;
    for (tensor, shard) in &weight_map {
        if !is_plain_name(shard) {
            let (tensor, shard) = (quoted(tensor), quoted(shard));
            return refuse(format!("shard {shard} of tensor {tensor} is not a plain file name"));
        }
        expected.entry(shard).or_default().push(tensor);
    }

    let mut absent = Vec::new();
    for &shard in expected.keys() {
        if !present(&folder.join(shard))? {
            absent.push(shard);
        }
    }
    if !absent.is_empty() {
        let (count, total) = (absent.len(), expected.len());
        return refuse(format!("{count} of {total} shards are missing: {}", listed(absent)));
    }
    join_shards(folder, index, expected, access)
}

/// Reads shards with the tensors that each must have; errors name `index`.
fn join_shards(
    folder: &Path,
    index: &Path,
    expected: BTreeMap<&str, Vec<&str>>,
    access: Access,
) -> Result<Contents> {
    let refuse = |reason: String| Err(Error::format(index, reason));
    let mut all = Contents::default();
    for (shard, tensors) in expected {
        let path = folder.join(shard);
        let contents = safetensors::read(&path, &bytes_of(&path, access)?)?;
        let absent: Vec<_> =
            tensors.into_iter().filter(|&name| !contents.tensors.contains_key(name)).collect();
        if !absent.is_empty() {
            let count = absent.len();
            let names = listed(absent);
            return refuse(format!("shard {} lacks {count} tensors: {names}", quoted(shard)));
        }
        for (name, entry) in contents.tensors {
            match all.tensors.entry(name) {
                Entry::Vacant(slot) => {
                    slot.insert(entry);
                }
                Entry::Occupied(slot) => {
                    let (name, shard) = (quoted(slot.key()), quoted(shard));
                    let first = slot.get().file.display();
                    return refuse(format!("tensor {name} is in `{first}` and again in {shard}"));
                }
            }
        }
        for (key, value) in contents.metadata {
            all.metadata.entry(key).or_insert(value);
        }
    }
    Ok(all)
}

/// The index: which shard each tensor is in.
fn read_index(index: &Path, access: Access) -> Result<BTreeMap<String, String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: UniqueMap<String>,
    }

    let bytes = bytes_of(index, access)?;
    if bytes.len() > MAX_INDEX {
        let reason = format!("index has {} bytes, at most {MAX_INDEX} are read", bytes.len());
        return Err(Error::format(index, reason));
    }
    let parsed: Index = serde_json::from_slice(bytes_without_bom(&bytes))
        .map_err(|e| Error::format(index, cut(&e.to_string(), MAX_MESSAGE)))?;
    let weight_map = parsed.weight_map.0;
    if weight_map.is_empty() {
        return Err(Error::format(index, "weight_map lists no tensor"));
    }
    Ok(weight_map)
}

/// Whether a name from the index can only be a file of the folder itself, on any system.
fn is_plain_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\\', ':', '\0'])
}

/// The first few names, for a message.
pub(super) fn listed<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let mut names = names.into_iter();
    let mut out: Vec<String> = names.by_ref().take(MAX_LISTED).map(quoted).collect();
    match names.count() {
        0 => {}
        more => out.push(format!("and {more} more")),
    }
    out.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_inside_the_folder_are_plain() {
        for name in ["a.safetensors", "model-00001-of-00002.safetensors", "...", "é"] {
            assert!(is_plain_name(name), "{name}");
        }
        for name in ["", ".", "..", "/etc/passwd", "../x", "a/b", "a\\b", "C:x", "a\0b"] {
            assert!(!is_plain_name(name), "{name}");
        }
    }

    #[test]
    fn long_lists_say_how_many_more() {
        assert_eq!(listed(["a", "b"]), "`a`, `b`");
        assert_eq!(
            listed(["1", "2", "3", "4", "5", "6", "7"]),
            "`1`, `2`, `3`, `4`, `5`, and 2 more"
        );
    }

    #[test]
    fn the_command_never_carries_a_name_that_a_shell_would_read() {
        assert!(convert_command(Path::new("x/model.pt")).contains("torch.load('model.pt',"));
        let hostile = Path::new("x/';rm -rf ~;'.bin");
        assert!(convert_command(hostile).contains("torch.load('pytorch_model.bin',"));
    }
}
