//! Files of `torch.save`: `P` and a pickle, put into a zip with three storages, or `Z` and a zip.

use boostr::checkpoint::{Checkpoint, Dtype, not_finite};

use super::weight_files::torch_zip;

/// Opens the file that `bytes` stand for, and uses every tensor.
pub fn check(bytes: &[u8]) {
    let file = match bytes.split_first() {
        Some((b'P', pickle)) => torch_zip(pickle, &[&[1; 48], &[2; 24], &[]]),
        Some((b'Z', zip)) => zip.to_vec(),
        _ => return,
    };
    let len = file.len();
    let Ok(checkpoint) = Checkpoint::from_torch_zip("fuzz", file) else { return };
    assert!(!checkpoint.is_empty());
    let mut copied = 0;
    for (_, entry) in checkpoint.iter() {
        assert_eq!(entry.dtype.bytes_of(&entry.shape), Some(entry.data.len()));
        let is_float = matches!(entry.dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
        assert_eq!(entry.to_f32().is_ok(), is_float);
        copied = copied.max(entry.data.len());
    }
    assert!(copied <= len, "no tensor is larger than its file");
    not_finite(&checkpoint, |_| {}).expect("all tensors are whole");
}
