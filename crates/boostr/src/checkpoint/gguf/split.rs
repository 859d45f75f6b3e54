//! Models in several files, `NAME-00001-of-00003.gguf`, and the GGUF model of a folder.
//!
//! Each part is a whole file with `split.no` (from 0), `split.count` and `split.tensors.count` (of
//! all parts); the other keys are in the first.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use super::{Metadata, is_name, read};
use crate::checkpoint::entry::quoted;
use crate::checkpoint::folder::{listed, present};
use crate::checkpoint::map::{Access, bytes_of};
use crate::checkpoint::{Bytes, Contents, TensorEntry};
use crate::error::{Error, Result};

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// Parts of a model. Their names have five digits; real ones have a few dozen.
const MAX_PARTS: usize = 1000;

/// Reads the file at `path`, whose bytes are there, with the other parts of its model.
pub(in crate::checkpoint) fn open(path: &Path, bytes: &Bytes, access: Access) -> Result<Contents> {
    let (metadata, tensors) = read(path, bytes)?;
    let count = metadata.usize(COUNT, 0..=MAX_PARTS)?.unwrap_or(1);
    if count <= 1 {
        return Ok(Contents { tensors, gguf: Some(metadata), ..Contents::default() });
    }
    let index = metadata.required_usize(NUMBER, 0..=count.saturating_sub(1))?;
    let number = index.saturating_add(1);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = match PartName::parse(&name) {
        Some(part) if (part.number, part.count) == (number, count) => part.stem,
        _ => {
            let reason = format!(
                "file is part {number} of {count} of a model: to find the others, its name must be \
                 {}",
                quoted(&PartName { stem: "NAME", number, count }.to_string())
            );
            return Err(Error::format(path, reason));
        }
    };
    let names: Vec<String> =
        (1..=count).map(|number| PartName { stem, number, count }.to_string()).collect();
    let paths: Vec<PathBuf> = names.iter().map(|name| path.with_file_name(name)).collect();
    let mut absent = Vec::new();
    for (name, path) in names.iter().zip(&paths) {
        if !present(path)? {
            absent.push(name.as_str());
        }
    }
    if !absent.is_empty() {
        let missing = absent.len();
        let reason = format!("{missing} of {count} parts are missing: {}", listed(absent));
        return Err(Error::format(path, reason));
    }
    let parts = paths.iter().map(|path| read(path, &bytes_of(path, access)?));
    merge(&paths, parts.collect::<Result<_>>()?)
}

/// What [`read`] returns.
type Part = (Metadata, BTreeMap<String, TensorEntry>);

/// The tensors of all parts, which must agree on how many there are.
fn merge(paths: &[PathBuf], parts: Vec<Part>) -> Result<Contents> {
    let total = parts.iter().map(|(_, tensors)| tensors.len()).sum();
    let count = parts.len();
    let mut all = Contents::default();
    for (index, ((mut metadata, tensors), path)) in parts.into_iter().zip(paths).enumerate() {
        metadata.required_usize(NUMBER, index..=index)?;
        metadata.required_usize(COUNT, count..=count)?;
        metadata.usize(TENSORS, total..=total)?;
        for (name, entry) in tensors {
            match all.tensors.entry(name) {
                Entry::Vacant(slot) => {
                    slot.insert(entry);
                }
                Entry::Occupied(slot) => {
                    let (name, first) = (quoted(slot.key()), slot.get().file.display());
                    let reason = format!("tensor {name} is in `{first}` too");
                    return Err(Error::format(path, reason));
                }
            }
        }
        if all.gguf.is_none() {
            // What is one model now is not written as a part.
            metadata.retain(|key| ![NUMBER, COUNT, TENSORS].contains(&key));
            all.gguf = Some(metadata);
        }
    }
    Ok(all)
}

/// The GGUF model of a folder, by one of its files: the only one, or the parts of the only one.
pub(in crate::checkpoint) fn only_model(folder: &Path) -> Result<Option<PathBuf>> {
    let mut names = Vec::new();
    for file in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let name = file.map_err(|e| Error::io(folder, e))?.file_name();
        if is_name(Path::new(&name)) {
            names.push(name);
        }
    }
    names.sort();
    let texts: Vec<String> = names.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    let models = texts.iter().map(|name| PartName::parse(name).map(|part| (part.stem, part.count)));
    let mut models: Vec<_> = models.collect();
    let files = models.len();
    models.dedup_by(|a, b| a.is_some() && a == b);
    if models.len() > 1 {
        let reason = format!(
            "{files} GGUF files of several models: open one of them by its path ({})",
            listed(texts.iter().map(String::as_str))
        );
        return Err(Error::format(folder, reason));
    }
    Ok(names.first().map(|name| folder.join(name)))
}

/// `STEM-00001-of-00003.gguf`, counted from 1.
#[derive(Debug, PartialEq)]
struct PartName<'a> {
    stem: &'a str,
    number: usize,
    count: usize,
}

impl<'a> PartName<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            let is_number = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
            if is_number { text.parse().ok() } else { None }
        };
        Some(Self { stem, number: digits(number)?, count: digits(count)? })
    }
}

impl fmt::Display for PartName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:05}-of-{:05}.gguf", self.stem, self.number, self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_read_and_written() {
        let name = "a-of-b-00002-of-00012.gguf";
        let part = PartName { stem: "a-of-b", number: 2, count: 12 };
        assert_eq!(PartName::parse(name), Some(part));
        assert_eq!(PartName::parse(name).unwrap().to_string(), name);
        for other in [
            "model.gguf",
            "model-1-of-2.gguf",
            "model-00001-of-00002.bin",
            "00001-of-00002.gguf",
            "model-0000x-of-00002.gguf",
            "model-+0001-of-00002.gguf",
        ] {
            assert_eq!(PartName::parse(other), None, "{other}");
        }
    }
}
