//! The values of metadata: numbers, text, and arrays, which stay encoded until they are asked for.

use std::fmt;

use super::cursor::{Cursor, What};
use crate::checkpoint::Bytes;
use crate::checkpoint::entry::quoted;

/// What a value is; the order is that of the numbers in the file, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl Kind {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    pub(super) fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// Bytes of a value, of the smallest one for text and arrays.
    pub(super) fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }

    /// The name in messages: `u32`, `string`.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }
}

/// One value.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

impl Value {
    /// What it is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::U8(_) => Kind::U8,
            Self::I8(_) => Kind::I8,
            Self::U16(_) => Kind::U16,
            Self::I16(_) => Kind::I16,
            Self::U32(_) => Kind::U32,
            Self::I32(_) => Kind::I32,
            Self::U64(_) => Kind::U64,
            Self::I64(_) => Kind::I64,
            Self::F32(_) => Kind::F32,
            Self::F64(_) => Kind::F64,
            Self::Bool(_) => Kind::Bool,
            Self::String(_) => Kind::String,
            Self::Array(_) => Kind::Array,
        }
    }

    /// A whole number of any width; `None` for other kinds.
    pub fn int(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(n) => n.into(),
            Self::I8(n) => n.into(),
            Self::U16(n) => n.into(),
            Self::I16(n) => n.into(),
            Self::U32(n) => n.into(),
            Self::I32(n) => n.into(),
            Self::U64(n) => n.into(),
            Self::I64(n) => n.into(),
            _ => return None,
        })
    }

    /// A float of either width; `None` for other kinds.
    pub fn float(&self) -> Option<f32> {
        match *self {
            Self::F32(x) => Some(x),
            Self::F64(x) => Some(x as f32),
            _ => None,
        }
    }

    /// Appends the value as the file has it, without its kind.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::U8(n) => out.push(*n),
            Self::I8(n) => out.extend(n.to_le_bytes()),
            Self::U16(n) => out.extend(n.to_le_bytes()),
            Self::I16(n) => out.extend(n.to_le_bytes()),
            Self::U32(n) => out.extend(n.to_le_bytes()),
            Self::I32(n) => out.extend(n.to_le_bytes()),
            Self::U64(n) => out.extend(n.to_le_bytes()),
            Self::I64(n) => out.extend(n.to_le_bytes()),
            Self::F32(x) => out.extend(x.to_le_bytes()),
            Self::F64(x) => out.extend(x.to_le_bytes()),
            Self::Bool(truth) => out.push((*truth).into()),
            Self::String(text) => encode_text(text, out),
            Self::Array(array) => array.encode(out),
        }
    }
}

/// The value and what it is, short: `3 (u32)`, `array of 5 string`.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32(x) => write!(f, "{x}")?,
            Self::F64(x) => write!(f, "{x}")?,
            Self::Bool(truth) => write!(f, "{truth}")?,
            Self::String(text) => f.write_str(&quoted(text))?,
            Self::Array(array) => {
                return write!(f, "array of {} {}", array.len, array.kind.name());
            }
            whole => write!(f, "{}", whole.int().unwrap_or_default())?,
        }
        write!(f, " ({})", self.kind().name())
    }
}

/// Values of one kind, encoded as in the file.
///
/// That of a file is a range of it: the texts of a vocabulary cost nothing until they are used.
#[derive(Clone)]
pub struct Array {
    pub(super) kind: Kind,
    pub(super) len: usize,
    /// Checked by the reader; a file that was changed since then yields less, or empty texts.
    pub(super) bytes: Bytes,
}

impl Array {
    /// What each element is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements.
    pub fn iter(&self) -> impl Iterator<Item = Value> {
        let mut cursor = Cursor::new(&self.bytes, What::Element);
        (0..self.len).map_while(move |_| cursor.value(self.kind, 0).ok())
    }

    /// The texts; `None` when the elements are something else.
    pub fn strings(&self) -> Option<Vec<&str>> {
        let mut cursor = Cursor::new(&self.bytes, What::Element);
        let text = |_| cursor.text("text", super::MAX_TEXT).unwrap_or_default();
        (self.kind == Kind::String).then(|| (0..self.len).map(text).collect())
    }

    fn new(kind: Kind, len: usize, bytes: Vec<u8>) -> Self {
        Self { kind, len, bytes: Bytes::new(bytes) }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend((self.kind as u32).to_le_bytes());
        out.extend((self.len as u64).to_le_bytes());
        out.extend(&*self.bytes);
    }
}

impl PartialEq for Array {
    fn eq(&self, other: &Self) -> bool {
        (self.kind, self.len, &*self.bytes) == (other.kind, other.len, &*other.bytes)
    }
}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({} {})", self.len, self.kind.name())
    }
}

pub(super) fn encode_text(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

macro_rules! numbers {
    ($($type:ident $kind:ident),*) => {$(
        impl From<$type> for Value {
            fn from(value: $type) -> Self {
                Self::$kind(value)
            }
        }

        impl From<&[$type]> for Array {
            fn from(values: &[$type]) -> Self {
                let bytes = values.iter().flat_map(|n| n.to_le_bytes()).collect();
                Self::new(Kind::$kind, values.len(), bytes)
            }
        }
    )*};
}

numbers!(u8 U8, i8 I8, u16 U16, i16 I16, u32 U32, i32 I32, u64 U64, i64 I64, f32 F32, f64 F64);

macro_rules! texts {
    ($($type:ty),*) => {$(
        impl From<$type> for Value {
            fn from(text: $type) -> Self {
                Self::String(text.into())
            }
        }

        impl From<&[$type]> for Array {
            fn from(texts: &[$type]) -> Self {
                let mut bytes = Vec::new();
                for text in texts {
                    encode_text(text, &mut bytes);
                }
                Self::new(Kind::String, texts.len(), bytes)
            }
        }
    )*};
}

texts!(&str, String);

impl From<bool> for Value {
    fn from(truth: bool) -> Self {
        Self::Bool(truth)
    }
}

impl From<&[bool]> for Array {
    fn from(truths: &[bool]) -> Self {
        Self::new(Kind::Bool, truths.len(), truths.iter().map(|&truth| truth.into()).collect())
    }
}

impl From<&[Array]> for Array {
    fn from(arrays: &[Array]) -> Self {
        let mut bytes = Vec::new();
        for array in arrays {
            array.encode(&mut bytes);
        }
        Self::new(Kind::Array, arrays.len(), bytes)
    }
}

impl<T> From<&[T]> for Value
where
    for<'a> Array: From<&'a [T]>,
{
    fn from(values: &[T]) -> Self {
        Self::Array(values.into())
    }
}

impl<T, const N: usize> From<[T; N]> for Value
where
    for<'a> Array: From<&'a [T]>,
{
    fn from(values: [T; N]) -> Self {
        Self::Array(values.as_slice().into())
    }
}
