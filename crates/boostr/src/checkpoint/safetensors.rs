//! The safetensors format, read strictly and written as its own library writes it.
//!
//! ```text
//! 8 bytes    n, the length of the header, little-endian
//! n bytes    JSON: {"__metadata__": {text: text}, NAME: {"dtype", "shape", "data_offsets"}, ...}
//! the rest   the tensors' bytes, back to back
//! ```
//!
//! Some rules go beyond those of the format's library:
//!
//! - The header starts with `{` at once.
//! - No name comes twice.
//! - A tensor is an object of its three fields and no other, with at most 16 dimensions.
//!
//! NaN and infinity are values like others.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};

use super::entry::{MAX_RANK, cut, quoted};
use super::json::{UniqueMap, duplicate, named};
use super::{Bytes, Contents, Dtype, TensorEntry, atomic_write};
use crate::error::{Error, Result};

/// Bytes of the header's length.
const LENGTH: usize = 8;

/// What the format's library begins the tensors at a multiple of.
const ALIGNMENT: usize = 8;

/// Longest header that the format allows.
const MAX_HEADER: usize = 100_000_000;

/// Bytes of the JSON reader's message that an error repeats; it may quote the file at length.
const MAX_MESSAGE: usize = 400;

const METADATA: &str = "__metadata__";

/// Reads a whole file; the tensors are ranges of `bytes`.
pub(super) fn read(path: &Path, bytes: &Bytes) -> Result<Contents> {
    parse(path, bytes).map_err(|reason| Error::format(path, reason))
}

fn parse(path: &Path, bytes: &Bytes) -> Result<Contents, String> {
    let (header, data) = split(bytes)?;
    let header: Header = serde_json::from_slice(header)
        .map_err(|e| format!("safetensors header: {}", cut(&e.to_string(), MAX_MESSAGE)))?;

    let mut in_order: Vec<(&String, &Info)> = header.tensors.iter().collect();
    in_order.sort_by_key(|(_, info)| info.data_offsets);
    check_layout(&in_order, data.len())?;

    let file: Arc<Path> = path.into();
    let mut tensors = BTreeMap::new();
    for (name, Info { dtype, shape, data_offsets: (begin, end) }) in header.tensors {
        let data = data
            .slice(begin..end)
            .ok_or_else(|| format!("tensor {} is outside of the data", quoted(&name)))?;
        tensors.insert(name, TensorEntry { dtype, shape, data, file: Arc::clone(&file) });
    }
    Ok(Contents { tensors, metadata: header.metadata, gguf: None })
}

/// The metadata of a file, and the bytes of its tensor `name`, empty where there is none. The other tensors are not
/// read, but all sizes are checked against the length of the file. A header or tensor is refused that is longer than
/// `most`, and a tensor that is not of type `dtype`.
pub(crate) fn peek(
    path: &Path,
    file: &mut File,
    (name, dtype): (&str, Dtype),
    most: [usize; 2],
) -> Result<(BTreeMap<String, String>, Vec<u8>)> {
    let io = |error| Error::io(path, error);
    let refuse = |reason: &str| Error::format(path, format!("safetensors header: {reason}"));
    let len = file.metadata().map_err(io)?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(io)?;
    let length = u64::from_le_bytes(length);
    let data = len.checked_sub(8).and_then(|rest| rest.checked_sub(length));
    let data = data.and_then(|data| usize::try_from(data).ok());
    let sizes = usize::try_from(length).ok().filter(|&length| length <= most[0]).zip(data);
    let (length, data) = sizes.ok_or_else(|| refuse("longer than the file or than allowed"))?;
    let mut header = vec![0; length];
    file.read_exact(&mut header).map_err(io)?;
    let header: Header = serde_json::from_slice(&header)
        .map_err(|error| refuse(cut(&error.to_string(), MAX_MESSAGE)))?;
    let mut in_order: Vec<(&String, &Info)> = header.tensors.iter().collect();
    in_order.sort_by_key(|(_, info)| info.data_offsets);
    check_layout(&in_order, data).map_err(|reason| Error::format(path, reason))?;
    let info = header.tensors.get(name);
    if let Some(other) = info.map(|info| info.dtype).filter(|&other| other != dtype) {
        let (expected, found) = (dtype.name(), other.name());
        let reason = format!("tensor `{name}`: expected type {expected}, found {found}");
        return Err(Error::format(path, reason));
    }
    let (begin, end) = info.map_or((0, 0), |info| info.data_offsets);
    if end.saturating_sub(begin) > most[1] {
        let (found, most) = (end.saturating_sub(begin), most[1]);
        let reason = format!("tensor `{name}`: expected at most {most} bytes, found {found}");
        return Err(Error::format(path, reason));
    }
    let mut bytes = vec![0; end.saturating_sub(begin)];
    file.seek_relative(i64::try_from(begin).unwrap_or(i64::MAX)).map_err(io)?;
    file.read_exact(&mut bytes).map_err(io)?;
    Ok((header.metadata, bytes))
}

/// The header's JSON and the bytes after it.
fn split(bytes: &Bytes) -> Result<(&[u8], Bytes), String> {
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(format!(
            "file has {} bytes, a safetensors file starts with the 8 of its header length{}",
            bytes.len(),
            looks_like(bytes)
        ));
    };
    let length = u64::from_le_bytes(*length);
    let Some(length) = usize::try_from(length).ok().filter(|&n| n <= MAX_HEADER) else {
        return Err(format!(
            "safetensors header length is {length}, at most {MAX_HEADER} is allowed{}",
            looks_like(bytes)
        ));
    };
    let Some((header, data)) = rest.split_at_checked(length) else {
        return Err(format!(
            "safetensors header length is {length}, but only {} bytes follow (truncated file?)",
            rest.len()
        ));
    };
    if header.first() != Some(&b'{') {
        let found = header.first().map_or("nothing".into(), |b| format!("byte 0x{b:02x}"));
        return Err(format!("safetensors header: expected `{{` at byte 8, found {found}"));
    }
    let start = bytes.len().saturating_sub(data.len());
    let data = bytes.slice(start..bytes.len()).ok_or("safetensors data is outside of the file")?;
    Ok((header, data))
}

/// What a file that is not safetensors seems to be instead.
fn looks_like(bytes: &[u8]) -> &'static str {
    match bytes {
        [b'P', b'K', 3, 4, ..] => "; it looks like a zip file (a torch pickle?)",
        [b'G', b'G', b'U', b'F', ..] => "; it looks like a GGUF file",
        [b'v', b'e', b'r', b's', b'i', b'o', b'n', b' ', ..] => {
            "; it looks like a Git LFS pointer: incomplete download"
        }
        [b'<', ..] => "; it looks like a web page",
        _ => "",
    }
}

/// Checks that the tensors, sorted by offset, fill `len` bytes without a hole or an overlap.
fn check_layout(tensors: &[(&String, &Info)], len: usize) -> Result<(), String> {
    let (mut at, mut before) = (0, "the start of the data".to_string());
    for (name, info) in tensors {
        let (begin, end) = info.data_offsets;
        let tensor = format!("tensor {}", quoted(name));
        if end < begin {
            return Err(format!("{tensor}: data_offsets [{begin}, {end}] run backwards"));
        }
        if begin > at {
            return Err(format!("hole: {before} ends at {at}, {tensor} begins at {begin}"));
        }
        if begin < at {
            return Err(format!("overlap: {before} ends at {at}, {tensor} begins at {begin}"));
        }
        let (dtype, shape) = (info.dtype.name(), &info.shape);
        let Some(need) = info.dtype.bytes_of(shape) else {
            return Err(format!("{tensor}: {dtype} {shape:?} is more bytes than memory has"));
        };
        let have = end.saturating_sub(begin);
        if need != have {
            return Err(format!(
                "{tensor}: {dtype} {shape:?} is {need} bytes, \
                 data_offsets [{begin}, {end}] have {have}"
            ));
        }
        if end > len {
            return Err(format!("{tensor} ends at {end}, the data at {len} (truncated file?)"));
        }
        (at, before) = (end, tensor);
    }
    if at != len {
        return Err(format!("trailing bytes: {before} ends at {at}, the data at {len}"));
    }
    Ok(())
}

struct Header {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, Info>,
}

struct Info {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut metadata: Option<Option<UniqueMap<String>>> = None;
                let mut tensors = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    if key == METADATA {
                        if metadata.is_some() {
                            return Err(duplicate("key", METADATA));
                        }
                        metadata = Some(named("key", METADATA, map.next_value())?);
                        continue;
                    }
                    match tensors.entry(key) {
                        Entry::Vacant(slot) => {
                            let info = named("tensor", slot.key(), map.next_value())?;
                            slot.insert(info);
                        }
                        Entry::Occupied(slot) => return Err(duplicate("tensor", slot.key())),
                    }
                }
                let metadata = metadata.flatten().map(|map| map.0).unwrap_or_default();
                Ok(Header { metadata, tensors })
            }
        }
        deserializer.deserialize_map(Object)
    }
}

impl<'de> Deserialize<'de> for Info {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Info;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with dtype, shape and data_offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Info, A::Error> {
                let (mut dtype, mut shape, mut data_offsets) = (None, None, None);
                while let Some(key) = map.next_key::<String>()? {
                    let again = match key.as_str() {
                        "dtype" => dtype.replace(map.next_value()?).is_some(),
                        "shape" => shape.replace(map.next_value()?).is_some(),
                        "data_offsets" => data_offsets.replace(map.next_value()?).is_some(),
                        other => {
                            return Err(de::Error::custom(format_args!(
                                "unknown field {}",
                                quoted(other)
                            )));
                        }
                    };
                    if again {
                        return Err(duplicate("field", &key));
                    }
                }
                let dtype: DtypeName = dtype.ok_or(de::Error::missing_field("dtype"))?;
                let shape: Shape = shape.ok_or(de::Error::missing_field("shape"))?;
                let data_offsets = data_offsets.ok_or(de::Error::missing_field("data_offsets"))?;
                Ok(Info { dtype: dtype.0, shape: shape.0, data_offsets })
            }
        }
        deserializer.deserialize_map(Object)
    }
}

struct DtypeName(Dtype);

impl<'de> Deserialize<'de> for DtypeName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Dtype::from_name(&name).map(Self).ok_or_else(|| {
            let known = Dtype::PLAIN.map(Dtype::name).join(", ");
            de::Error::custom(format_args!("unsupported dtype {} ({known})", quoted(&name)))
        })
    }
}

struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dims;

        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = seq.next_element()? {
                    if dims.len() == MAX_RANK {
                        return Err(de::Error::custom(format_args!(
                            "shape has more than {MAX_RANK} dimensions"
                        )));
                    }
                    dims.push(dim);
                }
                Ok(Shape(dims))
            }
        }
        deserializer.deserialize_seq(Dims)
    }
}

/// Writes a safetensors file through [`atomic_write`]; each tensor is `(name, type, shape, bytes)`.
///
/// The file is byte for byte that of the format's own library. The widest type comes first, then
/// the order is by name, so each tensor is aligned to its type. Spaces pad the header to a multiple
/// of 8.
///
/// # Errors
///
/// [`Error::Argument`] when two tensors have one name or one is called `__metadata__`, when one is
/// of blocks, when the bytes of one are not what its type and shape need, or when the header is longer
/// than the format allows; [`Error::Io`] as [`atomic_write`].
///
/// ```
/// use boostr::checkpoint::{Checkpoint, Dtype, safetensors};
///
/// let path = std::env::temp_dir().join(format!("boostr-doc-{}.safetensors", std::process::id()));
/// let tensors = [("bias", Dtype::F32, &[2][..], &[0, 0, 128, 63, 0, 0, 0, 64][..])];
/// safetensors::write(&path, &tensors, &[("format".into(), "pt".into())].into())?;
/// let back = Checkpoint::open(&path, false)?;
/// assert_eq!(back.get("bias").unwrap().to_f32()?, [1.0, 2.0]);
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write(
    path: &Path,
    tensors: &[(&str, Dtype, &[usize], &[u8])],
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let (infos, data): (Vec<_>, Vec<_>) =
        tensors.iter().map(|&(name, dtype, shape, data)| ((name, dtype, shape), data)).unzip();
    for (&info, data) in infos.iter().zip(&data) {
        check_size(info, data.len())?;
    }
    write_each(path, &infos, metadata, |index| Ok(data.get(index).copied().unwrap_or_default()))
}

/// As [`write()`], but the bytes of each tensor are asked for, by its index, when it is their turn: only
/// one tensor is in memory at a time.
///
/// # Errors
///
/// As [`write()`], and whatever `data` returns. An old file is then left as it was.
pub fn write_each<D: Deref<Target = [u8]>>(
    path: &Path,
    tensors: &[(&str, Dtype, &[usize])],
    metadata: &BTreeMap<String, String>,
    data: impl FnMut(usize) -> Result<D>,
) -> Result<()> {
    write_aligned(path, ALIGNMENT, tensors, metadata, data)
}

/// As [`write_each`]; the tensors begin at a multiple of `alignment` in the file.
pub(crate) fn write_aligned<D: Deref<Target = [u8]>>(
    path: &Path,
    alignment: usize,
    tensors: &[(&str, Dtype, &[usize])],
    metadata: &BTreeMap<String, String>,
    mut data: impl FnMut(usize) -> Result<D>,
) -> Result<()> {
    let mut failure = None;
    let written = plan(tensors, metadata, alignment).and_then(|plan| {
        atomic_write(path, |out| {
            plan.write(out, &mut data).unwrap_or_else(|error| {
                failure = Some(error);
                Err(io::ErrorKind::InvalidData.into())
            })
        })
    });
    failure.map_or(written, Err)
}

/// The bytes of the file that [`write_each`] would write.
///
/// # Errors
///
/// As [`write_each`], but for the system.
pub fn to_bytes<D: Deref<Target = [u8]>>(
    tensors: &[(&str, Dtype, &[usize])],
    metadata: &BTreeMap<String, String>,
    mut data: impl FnMut(usize) -> Result<D>,
) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let written = plan(tensors, metadata, ALIGNMENT)?.write(&mut bytes, &mut data)?;
    written.map_err(|error| argument(error.to_string()))?;
    Ok(bytes)
}

/// What a file begins with, and the tensors that follow, by their indices.
struct Plan<'a> {
    header: Vec<u8>,
    order: Vec<(usize, Item<'a>)>,
}

/// The file of `tensors`, once it is found that they have one. Spaces after the header align them.
fn plan<'a>(
    tensors: &[Item<'a>],
    metadata: &BTreeMap<String, String>,
    alignment: usize,
) -> Result<Plan<'a>> {
    let mut names = BTreeSet::from([METADATA]);
    for &(name, dtype, _) in tensors {
        if !names.insert(name) {
            return Err(argument(format!("the name {} is taken", quoted(name))));
        }
        if let Dtype::Block(format) = dtype {
            return Err(argument(format!(
                "tensor {}: safetensors has no type {}, write it as a float or as GGUF",
                quoted(name),
                format.name()
            )));
        }
    }
    let mut order: Vec<(usize, Item<'_>)> = tensors.iter().copied().enumerate().collect();
    order.sort_by_key(|&(_, (name, dtype, _))| (Reverse(dtype), name));

    let infos: Vec<Item<'_>> = order.iter().map(|&(_, info)| info).collect();
    let mut header = serde_json::to_vec(&Written { tensors: &infos, metadata })
        .map_err(|e| argument(e.to_string()))?;
    let begin = header.len().saturating_add(LENGTH).next_multiple_of(alignment);
    header.resize(begin.saturating_sub(LENGTH), b' ');
    if header.len() > MAX_HEADER {
        return Err(argument(format!(
            "the header would have {} bytes, at most {MAX_HEADER} are allowed",
            header.len()
        )));
    }
    Ok(Plan { header, order })
}

impl Plan<'_> {
    /// Writes header and tensors: what the system says, unless a tensor cannot be had.
    fn write<D: Deref<Target = [u8]>>(
        &self,
        out: &mut (impl Write + ?Sized),
        data: &mut impl FnMut(usize) -> Result<D>,
    ) -> Result<io::Result<()>> {
        let mut write = |bytes: &[u8]| out.write_all(bytes);
        let begun = write(&(self.header.len() as u64).to_le_bytes());
        let mut written = begun.and_then(|()| write(&self.header));
        for &(index, info) in &self.order {
            if written.is_err() {
                break;
            }
            let data = data(index)?;
            check_size(info, data.len())?;
            written = write(&data);
        }
        Ok(written)
    }
}

/// A tensor to be written: `(name, type, shape)`.
type Item<'a> = (&'a str, Dtype, &'a [usize]);

fn argument(reason: String) -> Error {
    Error::Argument { name: "tensors", reason }
}

fn check_size((name, dtype, shape): Item<'_>, len: usize) -> Result<()> {
    if dtype.bytes_of(shape) == Some(len) {
        return Ok(());
    }
    let (name, dtype) = (quoted(name), dtype.name());
    Err(argument(format!("tensor {name}: {len} bytes are given for {dtype} {shape:?}")))
}

/// The header of the tensors in the order of the file.
struct Written<'a> {
    tensors: &'a [Item<'a>],
    metadata: &'a BTreeMap<String, String>,
}

impl Serialize for Written<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(serde::Serialize)]
        struct Fields<'a> {
            dtype: &'a str,
            shape: &'a [usize],
            data_offsets: (usize, usize),
        }

        let mut map = serializer.serialize_map(None)?;
        if !self.metadata.is_empty() {
            map.serialize_entry(METADATA, self.metadata)?;
        }
        let mut begin = 0usize;
        for &(name, dtype, shape) in self.tensors {
            let end = dtype
                .bytes_of(shape)
                .and_then(|size| begin.checked_add(size))
                .ok_or_else(|| serde::ser::Error::custom("more bytes than a file holds"))?;
            let fields = Fields { dtype: dtype.name(), shape, data_offsets: (begin, end) };
            map.serialize_entry(name, &fields)?;
            begin = end;
        }
        map.end()
    }
}
