//! The zip container of a torch file: where each entry's bytes are.
//!
//! ```text
//! local header, name, extra, bytes      for each entry; torch pads `extra` to align the bytes
//! central directory                     one record an entry, with its sizes and where it starts
//! [zip64 end, zip64 locator]            the same with 64-bit numbers; torch always has it
//! end record                            where the directory is
//! ```
//!
//! Entries must be stored as they are, which is all that torch writes: then nothing is unpacked, no
//! small file can become a large one, and an entry is a range of the map. Names are looked up and
//! never become paths.

use std::collections::BTreeMap;
use std::ops::Range;

use super::entry::quoted;

const MAX_ENTRIES: u64 = 10_000;

/// Smallest size of the end record, and the longest comment that may follow it.
const END_SIZE: usize = 22;
const MAX_COMMENT: usize = 65_535;

/// Value of a field whose real number is in a zip64 record.
const SEE_ZIP64: u32 = u32::MAX;

/// The entries of a zip file: name and range of bytes.
pub(super) fn entries(file: &[u8]) -> Result<BTreeMap<&str, Range<usize>>, String> {
    let directory = find_directory(file)?;
    if directory.count > MAX_ENTRIES {
        let count = directory.count;
        return Err(format!("zip has {count} entries, at most {MAX_ENTRIES} are read"));
    }
    let mut rest =
        Fields(range_of(file, &directory.range).ok_or("zip directory is outside of the file")?);
    let mut entries = BTreeMap::new();
    for _ in 0..directory.count {
        let record = Record::read(&mut rest)?;
        let name = record.name;
        let data = record
            .locate(file, directory.range.start)
            .map_err(|reason| format!("zip entry {}: {reason}", quoted(name)))?;
        if entries.insert(name, data).is_some() {
            return Err(format!("zip entry {} comes twice", quoted(name)));
        }
    }
    if !rest.0.is_empty() {
        return Err(format!("zip directory has {} bytes too many", rest.0.len()));
    }
    Ok(entries)
}

struct Directory {
    range: Range<usize>,
    count: u64,
}

/// Reads the end record, and its 64-bit twin where there is one.
fn find_directory(file: &[u8]) -> Result<Directory, String> {
    let (start, mut end) = find_end(file).ok_or("zip has no end record (truncated file?)")?;
    let [disk, first_disk, here, count] = end.u16s()?;
    let [size, offset] = end.u32s()?;
    if [disk, first_disk] != [0, 0] || here != count {
        return Err("zip is one of several volumes".into());
    }
    let (mut count, mut size, mut offset) = (u64::from(count), u64::from(size), u64::from(offset));
    if let Some(mut twin) = find_zip64_end(file, start)? {
        let wide = [twin.u64()?, twin.u64()?, twin.u64()?];
        let agree = (count == u64::from(u16::MAX) || count == wide[0])
            && (size == u64::from(SEE_ZIP64) || size == wide[1])
            && (offset == u64::from(SEE_ZIP64) || offset == wide[2]);
        if !agree {
            return Err("zip has two end records that disagree".into());
        }
        [count, size, offset] = wide;
    }
    let range = span(offset, size).filter(|range| range.end <= start);
    let range = range.ok_or_else(|| {
        format!("zip directory of {size} bytes at {offset} does not fit in {start} bytes")
    })?;
    Ok(Directory { range, count })
}

/// Where the end record starts, and its fields after the signature.
fn find_end(file: &[u8]) -> Option<(usize, Fields<'_>)> {
    let last = file.len().checked_sub(END_SIZE)?;
    let first = last.saturating_sub(MAX_COMMENT);
    (first..=last).rev().find_map(|start| {
        let mut end = Fields(file.get(start..)?);
        end.signature(*b"PK\x05\x06").ok()?;
        let mut comment = end.clone();
        comment.take(16).ok()?;
        let length = comment.u16().ok()?;
        (comment.0.len() == usize::from(length)).then_some((start, end))
    })
}

/// The three 64-bit numbers (entries, directory's size, its offset) of the zip64 end record.
fn find_zip64_end(file: &[u8], end: usize) -> Result<Option<Fields<'_>>, String> {
    let Some(start) = end.checked_sub(20) else { return Ok(None) };
    let mut locator = Fields(file.get(start..end).unwrap_or_default());
    if locator.signature(*b"PK\x06\x07").is_err() {
        return Ok(None);
    }
    locator.take(4)?;
    let at =
        usize::try_from(locator.u64()?).map_err(|_| "zip64 end record is outside of the file")?;
    let mut twin = Fields(file.get(at..start).ok_or("zip64 end record is outside of the file")?);
    twin.signature(*b"PK\x06\x06").map_err(|_| "zip64 end record is not where it should be")?;
    twin.take(28)?;
    Ok(Some(twin))
}

/// One record of the central directory.
struct Record<'a> {
    name: &'a str,
    flags: u16,
    method: u16,
    packed: u64,
    size: u64,
    offset: u64,
}

impl<'a> Record<'a> {
    fn read(fields: &mut Fields<'a>) -> Result<Self, String> {
        fields.signature(*b"PK\x01\x02").map_err(|_| "zip directory is cut short or damaged")?;
        let [_made_by, _needed, flags, method, _time, _date] = fields.u16s()?;
        let [_crc, packed, size] = fields.u32s()?;
        let [name, extra, comment, _disk, _attributes] = fields.u16s()?;
        let [_attributes, offset] = fields.u32s()?;
        let name = std::str::from_utf8(fields.take(name.into())?)
            .map_err(|_| "zip has an entry whose name is not UTF-8")?;
        let mut wide = zip64_extra(Fields(fields.take(extra.into())?));
        fields.take(comment.into())?;
        let mut real = |narrow: u32| match (narrow, &mut wide) {
            (SEE_ZIP64, Some(wide)) => wide.u64(),
            _ => Ok(narrow.into()),
        };
        let (size, packed, offset) = (real(size)?, real(packed)?, real(offset)?);
        Ok(Self { name, flags, method, packed, size, offset })
    }

    /// Where the bytes are, by the entry's local header, which must agree with this record.
    fn locate(&self, file: &[u8], directory: usize) -> Result<Range<usize>, String> {
        const ENCRYPTED: u16 = 1 | 1 << 6 | 1 << 13;
        const SIZES_FOLLOW: u16 = 1 << 3;

        if self.flags & ENCRYPTED != 0 {
            return Err("is encrypted".into());
        }
        if self.method != 0 {
            let method = self.method;
            return Err(format!(
                "is compressed (method {method}), torch stores entries as they are"
            ));
        }
        if self.packed != self.size {
            return Err(format!("stores {} bytes in {}", self.size, self.packed));
        }
        let before = file.get(..directory).unwrap_or_default();
        let header = usize::try_from(self.offset).ok().and_then(|at| before.get(at..));
        let mut header =
            Fields(header.ok_or_else(|| format!("starts at {}, too far", self.offset))?);
        header.signature(*b"PK\x03\x04").map_err(|_| "has no local header")?;
        let [_needed, flags, method, _time, _date] = header.u16s()?;
        let [_crc, packed, size] = header.u32s()?;
        let [name, extra] = header.u16s()?;
        let name = header.take(name.into())?;
        header.take(extra.into())?;
        let sizes_agree = flags & SIZES_FOLLOW != 0
            || [packed, size].iter().all(|&n| n == SEE_ZIP64 || u64::from(n) == self.size);
        if name != self.name.as_bytes() || method != 0 || flags & ENCRYPTED != 0 || !sizes_agree {
            return Err("has a local header that disagrees with the directory".into());
        }
        let start = before.len().saturating_sub(header.0.len());
        span(start as u64, self.size).filter(|range| range.end <= directory).ok_or_else(|| {
            format!("has {} bytes at {start}, the directory is at {directory}", self.size)
        })
    }
}

/// The body of the zip64 field among the extra fields of a record.
fn zip64_extra(mut extra: Fields<'_>) -> Option<Fields<'_>> {
    loop {
        let [id, len] = extra.u16s().ok()?;
        let body = extra.take(len.into()).ok()?;
        if id == 1 {
            return Some(Fields(body));
        }
    }
}

fn span(start: u64, len: u64) -> Option<Range<usize>> {
    let (start, len) = (usize::try_from(start).ok()?, usize::try_from(len).ok()?);
    Some(start..start.checked_add(len)?)
}

fn range_of<'a>(file: &'a [u8], range: &Range<usize>) -> Option<&'a [u8]> {
    file.get(range.clone())
}

/// Little-endian fields, one after the other.
#[derive(Clone)]
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let (field, rest) = self.0.split_at_checked(len).ok_or("zip record is cut short")?;
        self.0 = rest;
        Ok(field)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (field, rest) = self.0.split_first_chunk().ok_or("zip record is cut short")?;
        self.0 = rest;
        Ok(*field)
    }

    fn signature(&mut self, expected: [u8; 4]) -> Result<(), String> {
        if self.array()? == expected {
            Ok(())
        } else {
            Err("zip record has another signature".into())
        }
    }

    fn u16(&mut self) -> Result<u16, String> {
        self.array().map(u16::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    fn u16s<const N: usize>(&mut self) -> Result<[u16; N], String> {
        let mut out = [0; N];
        for field in &mut out {
            *field = self.u16()?;
        }
        Ok(out)
    }

    fn u32s<const N: usize>(&mut self) -> Result<[u32; N], String> {
        let mut out = [0; N];
        for field in &mut out {
            *field = self.array().map(u32::from_le_bytes)?;
        }
        Ok(out)
    }
}
