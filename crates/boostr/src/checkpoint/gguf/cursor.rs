//! Reading fields one after the other; whatever fails says at which byte, and of what.

use std::fmt;

use super::value::{Array, Kind, Value};
use super::{MAX_DEPTH, MAX_TEXT};
use crate::checkpoint::Bytes;
use crate::checkpoint::entry::quoted;

/// A file that needs more bytes than this was not cut short: a length in it is wrong.
const MAX_PLAUSIBLE: u128 = 1 << 44;

/// What is being read.
#[derive(Debug, Clone, Copy)]
pub(super) enum What<'a> {
    Header,
    /// The name of a key, not yet known.
    Key {
        index: u64,
        count: u64,
    },
    Value(&'a str),
    /// The name of a tensor, not yet known.
    Name {
        index: u64,
        count: u64,
    },
    Tensor(&'a str),
    /// Of an array that was checked before.
    Element,
}

impl fmt::Display for What<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ordinal = |index: u64| index.saturating_add(1);
        match *self {
            Self::Header => f.write_str("header"),
            Self::Key { index, count } => write!(f, "key {} of {count}", ordinal(index)),
            Self::Value(key) => write!(f, "key {}", quoted(key)),
            Self::Name { index, count } => write!(f, "tensor {} of {count}", ordinal(index)),
            Self::Tensor(name) => write!(f, "tensor {}", quoted(name)),
            Self::Element => f.write_str("array"),
        }
    }
}

/// A place in a file.
pub(super) struct Cursor<'a> {
    shared: &'a Bytes,
    /// All of `shared`.
    bytes: &'a [u8],
    pub(super) at: usize,
    pub(super) what: What<'a>,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(shared: &'a Bytes, what: What<'a>) -> Self {
        Self { shared, bytes: shared, at: 0, what }
    }

    fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// A message about the field at byte `at`.
    pub(super) fn error(&self, at: usize, reason: impl fmt::Display) -> String {
        format!("byte {at}: {}: {reason}", self.what)
    }

    /// The message for `part`, which needs more bytes than there are.
    pub(super) fn too_short(&self, part: impl fmt::Display, need: u128) -> String {
        let rest = self.rest().len();
        self.error(self.at, format_args!("{part} needs {need} bytes, found {rest}; {}", why(need)))
    }

    fn take(&mut self, len: usize, part: &str) -> Result<&'a [u8], String> {
        let taken = self.rest().get(..len).ok_or_else(|| self.too_short(part, len as u128))?;
        self.at = self.at.saturating_add(len);
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, part: &str) -> Result<[u8; N], String> {
        let taken = self.rest().first_chunk().ok_or_else(|| self.too_short(part, N as u128))?;
        self.at = self.at.saturating_add(N);
        Ok(*taken)
    }

    pub(super) fn u32(&mut self, part: &str) -> Result<u32, String> {
        self.array(part).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, part: &str) -> Result<u64, String> {
        self.array(part).map(u64::from_le_bytes)
    }

    /// How many of `part` follow: at most `max`, and not more than the file has room for when each
    /// takes at least `size` bytes.
    pub(super) fn count(&mut self, part: &str, size: usize, max: u64) -> Result<u64, String> {
        let at = self.at;
        let count = self.u64(part)?;
        let need = u128::from(count).saturating_mul(size as u128);
        let rest = self.rest().len();
        if need > rest as u128 {
            let (least, why) = ("of at least", why(need));
            return Err(self.error(
                at,
                format_args!("{part} is {count} {least} {size} bytes, found {rest} bytes; {why}"),
            ));
        }
        if count > max {
            return Err(self.error(at, format_args!("{part} is {count}, at most {max} are read")));
        }
        Ok(count)
    }

    pub(super) fn text(&mut self, part: &str, max: usize) -> Result<&'a str, String> {
        let at = self.at;
        let length = self.u64("length of its text")?;
        let Some(length) = usize::try_from(length).ok().filter(|&n| n <= max) else {
            return Err(self.error(
                at,
                format_args!("{part} of {length} bytes, at most {max} are read; {DAMAGED}"),
            ));
        };
        let start = self.at;
        let bytes = self.take(length, part)?;
        str::from_utf8(bytes).map_err(|e| {
            self.error(start.saturating_add(e.valid_up_to()), format_args!("{part} is not UTF-8"))
        })
    }

    pub(super) fn kind(&mut self, part: &str) -> Result<Kind, String> {
        let at = self.at;
        let number = self.u32(part)?;
        Kind::from_number(number).ok_or_else(|| {
            self.error(at, format_args!("{part} is {number}, expected 0 to 12; {DAMAGED}"))
        })
    }

    /// A value inside of `depth` arrays.
    pub(super) fn value(&mut self, kind: Kind, depth: usize) -> Result<Value, String> {
        Ok(match kind {
            Kind::U8 => Value::U8(u8::from_le_bytes(self.array("u8")?)),
            Kind::I8 => Value::I8(i8::from_le_bytes(self.array("i8")?)),
            Kind::U16 => Value::U16(u16::from_le_bytes(self.array("u16")?)),
            Kind::I16 => Value::I16(i16::from_le_bytes(self.array("i16")?)),
            Kind::U32 => Value::U32(self.u32("u32")?),
            Kind::I32 => Value::I32(i32::from_le_bytes(self.array("i32")?)),
            Kind::U64 => Value::U64(self.u64("u64")?),
            Kind::I64 => Value::I64(i64::from_le_bytes(self.array("i64")?)),
            Kind::F32 => Value::F32(f32::from_le_bytes(self.array("f32")?)),
            Kind::F64 => Value::F64(f64::from_le_bytes(self.array("f64")?)),
            Kind::Bool => Value::Bool(self.bools(1)?),
            Kind::String => Value::String(self.text("text", MAX_TEXT)?.to_owned()),
            Kind::Array => Value::Array(self.elements(depth)?),
        })
    }

    /// Truth values, each 0 or 1; the last one.
    fn bools(&mut self, count: usize) -> Result<bool, String> {
        let at = self.at;
        let bytes = self.take(count, "bool")?;
        if let Some(index) = bytes.iter().position(|&byte| byte > 1) {
            let found = bytes.get(index).copied().unwrap_or_default();
            let at = at.saturating_add(index);
            return Err(self.error(at, format_args!("bool is {found}, expected 0 or 1")));
        }
        Ok(bytes.last() == Some(&1))
    }

    /// An array inside of `depth` others: its elements are walked over, and stay where they are.
    fn elements(&mut self, depth: usize) -> Result<Array, String> {
        if depth == MAX_DEPTH {
            return Err(self.error(
                self.at,
                format_args!("arrays in arrays are more than {MAX_DEPTH} deep; {DAMAGED}"),
            ));
        }
        let kind = self.kind("kind of elements")?;
        let len = self.count("number of elements", kind.size(), u64::MAX)?;
        let len = usize::try_from(len).map_err(|e| e.to_string())?;
        let start = self.at;
        match kind {
            Kind::String => {
                for _ in 0..len {
                    self.text("text", MAX_TEXT)?;
                }
            }
            Kind::Array => {
                for _ in 0..len {
                    self.elements(depth.saturating_add(1))?;
                }
            }
            Kind::Bool => {
                self.bools(len)?;
            }
            // `count` has seen that they are there.
            _ => self.at = start.saturating_add(len.saturating_mul(kind.size())),
        }
        let bytes = self.shared.slice(start..self.at).ok_or("array is outside of the file")?;
        Ok(Array { kind, len, bytes })
    }
}

pub(super) const DAMAGED: &str = "the file is damaged";

/// What probably happened to a file that lacks bytes.
pub(super) fn why(need: u128) -> &'static str {
    if need < MAX_PLAUSIBLE { "the download is probably incomplete" } else { DAMAGED }
}
