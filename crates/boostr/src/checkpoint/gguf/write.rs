//! Writing a file: the header at once, then one tensor after the other.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use super::read::{Header, check_alignment};
use super::value::encode_text;
use super::{ALIGNMENT, DEFAULT_ALIGNMENT, MAGIC, Metadata, types};
use crate::checkpoint::entry::quoted;
use crate::checkpoint::{Bytes, Dtype, atomic_write};
use crate::error::{Error, Result};

const VERSION: u32 = 3;

/// Longest name of a tensor that ggml reads.
const MAX_NAME: usize = 63;

/// Writes a file through [`atomic_write`]; each tensor is `(name, type, shape)`.
///
/// `data` is called once for each tensor, in order, with its index: only one tensor is in memory
/// at a time. The file is laid out as ggml's own: each tensor right after the other, padded to
/// `general.alignment` if the metadata has it, or 32.
///
/// # Errors
///
/// [`Error::Argument`] when a name, a type, a shape or the metadata cannot be in such a file, or
/// the bytes of a tensor are not what its type and shape need; [`Error::Config`] for an alignment
/// that is none; whatever `data` returns; [`Error::Io`] as [`atomic_write`]. An old file is then left as it was.
///
/// ```
/// use boostr::checkpoint::{Bytes, Checkpoint, Dtype, gguf};
///
/// let path = std::env::temp_dir().join(format!("boostr-doc-{}.gguf", std::process::id()));
/// let mut metadata = gguf::Metadata::new(&path);
/// metadata.set("general.architecture", "mamba2");
/// gguf::write(&path, &metadata, &[("bias", Dtype::F32, &[2])], |_| {
///     Ok(Bytes::new([0, 0, 128, 63, 0, 0, 0, 64]))
/// })?;
/// let back = Checkpoint::open(&path, false)?;
/// assert_eq!(back.get("bias").unwrap().to_f32()?, [1.0, 2.0]);
/// assert_eq!(back.gguf(), Some(&metadata));
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write(
    path: &Path,
    metadata: &Metadata,
    tensors: &[(&str, Dtype, &[usize])],
    mut data: impl FnMut(usize) -> Result<Bytes>,
) -> Result<()> {
    let alignment = match metadata.get(ALIGNMENT).map(check_alignment) {
        Some(Ok(alignment)) => alignment,
        Some(Err(reason)) => return Err(metadata.error(ALIGNMENT, reason)),
        None => DEFAULT_ALIGNMENT,
    };
    let (header, sizes) = header(path, metadata, tensors, alignment)?;
    let mut failure = None;
    let result = atomic_write(path, |out| {
        out.write_all(&header)?;
        for (index, (&size, &(name, ..))) in sizes.iter().zip(tensors).enumerate() {
            let bytes = data(index).and_then(|bytes| match bytes.len() {
                len if len == size => Ok(bytes),
                len => Err(argument(name, &format!("{len} bytes are given, it takes {size}"))),
            });
            match bytes {
                Ok(bytes) => out.write_all(&bytes)?,
                Err(error) => {
                    failure = Some(error);
                    return Err(io::ErrorKind::InvalidData.into());
                }
            }
            out.write_all(&vec![0; padding(size, alignment)])?;
        }
        Ok(())
    });
    match failure {
        Some(error) => Err(error),
        None => result,
    }
}

/// The header with its padding, and the bytes of each tensor.
fn header(
    path: &Path,
    metadata: &Metadata,
    tensors: &[(&str, Dtype, &[usize])],
    alignment: usize,
) -> Result<(Bytes, Vec<usize>)> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata.iter() {
        encode_text(key, &mut out);
        out.extend((value.kind() as u32).to_le_bytes());
        value.encode(&mut out);
    }
    let mut sizes = Vec::with_capacity(tensors.len());
    let mut names = BTreeSet::new();
    let mut offset = 0usize;
    for &(name, dtype, shape) in tensors {
        if name.is_empty() || name.len() > MAX_NAME || !names.insert(name) {
            let reason = format!("expected a name of its own, of 1 to {MAX_NAME} bytes");
            return Err(argument(name, &reason));
        }
        let Some(number) = types::number_of(dtype) else {
            let (type_name, known) = (dtype.name(), types::supported());
            return Err(argument(name, &format!("GGUF has no type {type_name}; it has {known}")));
        };
        let size = dtype.bytes_of(shape).ok_or_else(|| {
            argument(name, &format!("{} {shape:?} is no whole number of bytes", dtype.name()))
        })?;
        encode_text(name, &mut out);
        out.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&dim| out.extend((dim as u64).to_le_bytes()));
        out.extend(number.to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset = size
            .checked_add(padding(size, alignment))
            .and_then(|padded| offset.checked_add(padded))
            .ok_or_else(|| argument(name, "more bytes than a file holds"))?;
        sizes.push(size);
    }
    out.resize(out.len().saturating_add(padding(out.len(), alignment)), 0);
    // The reader has all other rules, and the last word.
    let out = Bytes::new(out);
    match Header::read(path, &out) {
        Ok(_) => Ok((out.clone(), sizes)),
        Err(reason) => Err(Error::Argument { name: "metadata", reason }),
    }
}

fn argument(tensor: &str, reason: &str) -> Error {
    Error::Argument { name: "tensors", reason: format!("tensor {}: {reason}", quoted(tensor)) }
}

/// Zeros after `len` bytes.
fn padding(len: usize, alignment: usize) -> usize {
    len.checked_next_multiple_of(alignment).map_or(0, |next| next.saturating_sub(len))
}
