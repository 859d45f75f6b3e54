//! One tensor of a checkpoint: its type, its shape, and the bytes it shares with its file.

use std::fmt;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use boostr_kernels::Level;
use boostr_kernels::quant::{self, Format};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::map::Map;
use crate::error::{Error, Result};

/// Dimensions that a tensor may have. Checkpoints use up to five; the limit keeps a file from
/// spending our memory on shapes.
pub(super) const MAX_RANK: usize = 16;

/// Bytes of a foreign name that an error message shows.
const MAX_SHOWN: usize = 100;

/// Type of a tensor's elements, little-endian in the file.
///
/// The order is the one by which a safetensors file sorts its tensors, largest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dtype {
    /// One byte, 0 or 1; other values are not looked for.
    Bool,
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 8 bits.
    I8,
    /// 8 bits, 5 of exponent: listed and kept, not computed with.
    F8E5M2,
    /// 8 bits, 4 of exponent: as before.
    F8E4M3,
    /// 8 bits of exponent, a scale: as before.
    F8E8M0,
    /// Signed, 16 bits.
    I16,
    /// Unsigned, 16 bits.
    U16,
    /// IEEE half precision.
    F16,
    /// The upper half of an [`Dtype::F32`].
    BF16,
    /// Signed, 32 bits.
    I32,
    /// Unsigned, 32 bits.
    U32,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
    /// Signed, 64 bits.
    I64,
    /// Unsigned, 64 bits.
    U64,
    /// Blocks of a format of ggml; only GGUF files have them. A row is a whole number of blocks.
    Block(Format),
}

impl Dtype {
    /// The types of a safetensors file.
    pub(super) const PLAIN: [Self; 16] = [
        Self::Bool,
        Self::U8,
        Self::I8,
        Self::F8E5M2,
        Self::F8E4M3,
        Self::F8E8M0,
        Self::I16,
        Self::U16,
        Self::F16,
        Self::BF16,
        Self::I32,
        Self::U32,
        Self::F32,
        Self::F64,
        Self::I64,
        Self::U64,
    ];

    /// Elements that are stored together: those of a block, else 1.
    pub fn block_len(self) -> usize {
        match self {
            Self::Block(format) => format.block_len(),
            _ => 1,
        }
    }

    /// The name in a safetensors file, or ggml's: `BF16`, `I64`, `BOOL`, `q4_k`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E8M0 => "F8_E8M0",
            Self::I16 => "I16",
            Self::U16 => "U16",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::F32 => "F32",
            Self::F64 => "F64",
            Self::I64 => "I64",
            Self::U64 => "U64",
            Self::Block(format) => format.name(),
        }
    }

    /// Whether it is a float of 8 bits, which no model computes with.
    pub(crate) fn is_f8(self) -> bool {
        matches!(self, Self::F8E5M2 | Self::F8E4M3 | Self::F8E8M0)
    }

    /// The type that a safetensors file calls `name`.
    pub(super) fn from_name(name: &str) -> Option<Self> {
        Self::PLAIN.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Bytes of a tensor of `shape`; `None` when that is more than a `usize` counts, or when the
    /// last dimension is not a multiple of [`Dtype::block_len`].
    pub fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        let (&row, rows) = shape.split_last().unwrap_or((&1, &[]));
        let row_bytes = match self {
            Self::Bool | Self::U8 | Self::I8 | Self::F8E5M2 | Self::F8E4M3 | Self::F8E8M0 => row,
            Self::I16 | Self::U16 | Self::F16 | Self::BF16 => row.checked_mul(2)?,
            Self::I32 | Self::U32 | Self::F32 => row.checked_mul(4)?,
            Self::F64 | Self::I64 | Self::U64 => row.checked_mul(8)?,
            Self::Block(format) => format.bytes_of(row)?,
        };
        rows.iter().try_fold(row_bytes, |bytes, &dim| bytes.checked_mul(dim))
    }

    /// The bytes of `values`, for F64, F32, F16, BF16 and the blocks that can be written.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for the other types, [`Error::Argument`] unless the values are whole
    /// blocks.
    ///
    /// ```
    /// use boostr::checkpoint::Dtype;
    ///
    /// assert_eq!(Dtype::BF16.encode(&[1.0])?, [0x80, 0x3f]);
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn encode(self, values: &[f32]) -> Result<Vec<u8>> {
        self.encode_weighted(values, &[])
    }

    /// The same, where a block format is to have little weighted error: `weights` has one for each value, or none.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode); [`Error::Argument`] for another number of weights.
    pub(crate) fn encode_weighted(self, values: &[f32], weights: &[f32]) -> Result<Vec<u8>> {
        if !weights.is_empty() && weights.len() != values.len() {
            let reason = format!("expected {}, found {}", values.len(), weights.len());
            return Err(Error::Argument { name: "weights", reason });
        }
        Ok(match self {
            Self::F64 => values.iter().flat_map(|&x| f64::from(x).to_le_bytes()).collect(),
            Self::F32 => {
                // A loop that the compiler makes a copy of.
                let mut bytes = vec![0; size_of_val(values)];
                for (to, x) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                    *to = x.to_le_bytes();
                }
                bytes
            }
            Self::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
            Self::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            Self::Block(format) if format.can_encode() => {
                let size = format.bytes_of(values.len()).ok_or_else(|| Error::Argument {
                    name: "values",
                    reason: format!("{} are no whole blocks of {}", values.len(), format.name()),
                })?;
                let mut blocks = vec![0; size];
                // The bytes do not depend on the level.
                quant::encode_weighted(Level::detect(), format, values, weights, &mut blocks);
                blocks
            }
            other => {
                let what = format!("writing of type {}", other.name());
                return Err(Error::Unsupported { what });
            }
        })
    }
}

/// Whatever keeps the bytes of a checkpoint: a memory map, a vector, a static array.
pub type Owner = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A range of the bytes of an [`Owner`]: cloning and slicing copy no byte.
#[derive(Clone)]
pub struct Bytes {
    owner: Owner,
    range: Range<usize>,
    /// The owner, when it is a file's map.
    map: Option<Arc<Map>>,
}

impl Bytes {
    /// All bytes of `owner`, whose `as_ref` must return the same slice each time.
    ///
    /// ```
    /// use boostr::checkpoint::Bytes;
    ///
    /// let bytes = Bytes::new(vec![1, 2, 3, 4]);
    /// assert_eq!(bytes.slice(1..3).as_deref(), Some(&[2, 3][..]));
    /// assert!(bytes.slice(1..5).is_none());
    /// ```
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        let range = 0..owner.as_ref().len();
        Self { owner: Arc::new(owner), range, map: None }
    }

    /// All bytes of a file.
    pub(super) fn mapped(map: Map) -> Self {
        let range = 0..map.as_ref().len();
        let map = Arc::new(map);
        Self { owner: Arc::clone(&map) as Owner, range, map: Some(map) }
    }

    /// Says that these bytes will not be needed soon. The memory of a mapped file is given back,
    /// and read again from the file if it is touched. Others stay as they are.
    pub fn release(&self) {
        if let Some(map) = &self.map {
            map.release(self.range.clone());
        }
    }

    /// Checks that the file in whose map these bytes lie is as long, and was last written, as when it was mapped.
    /// Others cannot change.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] with the file and both lengths; [`Error::Io`] when the system refuses.
    pub fn check_unchanged(&self) -> Result<()> {
        self.map.as_deref().map_or(Ok(()), Map::check_unchanged)
    }

    /// Whether they lie in the map of a file.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        self.map.is_some()
    }

    /// The bytes at `range` of these; `None` when they do not reach so far or it runs backwards.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        self.get(range.clone())?;
        let start = self.range.start.checked_add(range.start)?;
        let end = self.range.start.checked_add(range.end)?;
        Some(Self { owner: Arc::clone(&self.owner), range: start..end, map: self.map.clone() })
    }

    /// What keeps the bytes alive; usually it holds more than these, see [`Bytes::range`].
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Where in the owner these bytes are.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let owner: &(dyn AsRef<[u8]> + Send + Sync) = &*self.owner;
        // The range was checked when it was made; an owner that shrinks since then leaves nothing.
        owner.as_ref().get(self.range.clone()).unwrap_or_default()
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({:?})", self.range)
    }
}

/// One tensor: row-major, contiguous, its bytes where the file has them (not always aligned).
#[derive(Debug, Clone)]
pub struct TensorEntry {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Dimensions, outermost first; empty for a single number.
    pub shape: Vec<usize>,
    /// The elements, little-endian: `dtype.bytes_of(&shape)` bytes.
    pub data: Bytes,
    /// The file that holds it.
    pub file: Arc<Path>,
}

impl TensorEntry {
    /// The elements as `f32`, for `F64` (rounded to nearest), `F32`, `F16`, `BF16` (all exact) and
    /// blocks.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for the other types; [`Error::Format`] when `data` has not the bytes
    /// of `shape`, as after a file was cut short.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let data = &*self.data;
        Ok(match self.dtype {
            Dtype::F32 => data.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
            Dtype::F64 => {
                data.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b) as f32).collect()
            }
            Dtype::BF16 => {
                let wide = |&b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16);
                data.as_chunks().0.iter().map(wide).collect()
            }
            Dtype::F16 => f16_to_f32(data),
            Dtype::Block(format) => {
                if self.dtype.bytes_of(&self.shape) != Some(data.len()) {
                    let (name, len) = (format.name(), data.len());
                    let reason = format!("{name} of shape {:?} has {len} bytes", self.shape);
                    return Err(Error::format(&self.file, reason));
                }
                let mut out = vec![0.0; self.shape.iter().product()];
                quant::decode(format, data, &mut out);
                out
            }
            other => {
                let what = format!(
                    "tensor type {} as f32 in `{}` (F64, F32, F16, BF16 and blocks are)",
                    other.name(),
                    self.file.display()
                );
                return Err(Error::Unsupported { what });
            }
        })
    }
}

/// Converts by the block, so that the processor's own instruction is looked for once a block.
fn f16_to_f32(data: &[u8]) -> Vec<f32> {
    let halves = data.as_chunks::<2>().0;
    let mut out = Vec::with_capacity(halves.len());
    for block in halves.chunks(1024) {
        let block: Vec<f16> = block.iter().map(|&b| f16::from_le_bytes(b)).collect();
        out.extend(block.to_f32_vec());
    }
    out
}

/// A name from a file, fit for a message: in backticks, escaped, and cut when it is long.
pub(crate) fn quoted(name: &str) -> String {
    let mut out = String::from("`");
    for c in cut(name, MAX_SHOWN).chars() {
        match c {
            '\'' | '"' => out.push(c),
            _ => out.extend(c.escape_debug()),
        }
    }
    out.push_str(if cut(name, MAX_SHOWN).len() < name.len() { "...`" } else { "`" });
    out
}

/// The first `max` bytes of a text, or a little less for a whole character.
pub(super) fn cut(text: &str, max: usize) -> &str {
    text.get(..text.floor_char_boundary(max)).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(dtype: Dtype, data: impl AsRef<[u8]> + Send + Sync + 'static) -> TensorEntry {
        let data = Bytes::new(data);
        let shape = vec![data.len() / dtype.bytes_of(&[]).unwrap()];
        TensorEntry { dtype, shape, data, file: Path::new("f").into() }
    }

    #[test]
    fn every_half_converts_to_the_float_of_its_definition() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let halves = entry(Dtype::F16, all.clone()).to_f32().unwrap();
        let brains = entry(Dtype::BF16, all).to_f32().unwrap();
        for bits in 0..=u16::MAX {
            let (sign, exponent, fraction) = (bits >> 15, i32::from(bits >> 10 & 31), bits & 1023);
            let fraction = f32::from(fraction) / 1024.0;
            let size = match exponent {
                0 => fraction * 2f32.powi(-14),
                31 if fraction > 0.0 => f32::NAN,
                31 => f32::INFINITY,
                _ => (1.0 + fraction) * 2f32.powi(exponent - 15),
            };
            let expected = if sign == 1 { -size } else { size };
            let got = halves[usize::from(bits)];
            assert!(
                got == expected && got.is_sign_negative() == (sign == 1)
                    || got.is_nan() && expected.is_nan()
            );
            assert_eq!(brains[usize::from(bits)].to_bits() >> 16, u32::from(bits));
        }
    }

    #[test]
    fn floats_of_both_widths_convert_from_unaligned_bytes() {
        let bytes: Vec<u8> = [[9].to_vec(), 1.5f32.to_le_bytes().to_vec()].concat();
        let data = Bytes::new(bytes).slice(1..5).unwrap();
        assert_eq!(TensorEntry { data, ..entry(Dtype::F32, []) }.to_f32().unwrap(), [1.5]);
        assert_eq!(entry(Dtype::F64, (0.1f64).to_le_bytes()).to_f32().unwrap(), [0.1f32]);
        assert_eq!(entry(Dtype::F64, f64::MAX.to_le_bytes()).to_f32().unwrap(), [f32::INFINITY]);
    }

    #[test]
    fn integers_are_not_taken_for_floats() {
        let message = entry(Dtype::I64, [0; 8]).to_f32().unwrap_err().to_string();
        assert_eq!(
            message,
            "unsupported tensor type I64 as f32 in `f` (F64, F32, F16, BF16 and blocks are)"
        );
    }

    #[test]
    fn slices_of_slices_stay_inside_them() {
        let bytes = Bytes::new(*b"0123456789").slice(2..8).unwrap();
        assert_eq!(&*bytes, b"234567");
        assert_eq!(&*bytes.slice(1..3).unwrap(), b"34");
        assert_eq!(bytes.slice(1..3).unwrap().range(), 3..5);
        assert!(bytes.slice(0..7).is_none());
        assert!(bytes.slice(usize::MAX - 1..usize::MAX).is_none());
        #[expect(clippy::reversed_empty_ranges, reason = "the case under test")]
        let backwards = bytes.slice(3..2);
        assert!(backwards.is_none());
        assert_eq!((**bytes.owner()).as_ref().len(), 10);
    }

    #[test]
    fn a_shape_of_more_bytes_than_memory_counts_has_no_size() {
        assert_eq!(Dtype::F32.bytes_of(&[]), Some(4));
        assert_eq!(Dtype::F32.bytes_of(&[3, 0, 5]), Some(0));
        assert_eq!(Dtype::U8.bytes_of(&[1 << 32, 1 << 32]), None);
        assert_eq!(Dtype::F64.bytes_of(&[(1 << 61) + 1]), None);
        let max_blocks = usize::MAX / 144;
        assert_eq!(Dtype::Block(Format::Q4K).bytes_of(&[max_blocks + 1, 256]), None);
    }

    #[test]
    fn rows_are_whole_blocks() {
        let dtype = Dtype::Block(Format::Q4K);
        assert_eq!(dtype.bytes_of(&[3, 512]), Some(3 * 2 * 144));
        assert_eq!(dtype.bytes_of(&[512, 3]), None);
        assert_eq!(dtype.bytes_of(&[256, 0]), Some(0));
        assert_eq!(dtype.bytes_of(&[]), None);
    }

    #[test]
    fn blocks_are_decoded_and_only_whole_ones() {
        // A half of 2.0, then codes 0 to 31.
        let block: Vec<u8> = [0, 0x40].into_iter().chain(0..32).collect();
        let dtype = Dtype::Block(Format::Q8_0);
        let entry = TensorEntry {
            dtype,
            shape: vec![1, 32],
            data: Bytes::new(block),
            file: Path::new("f").into(),
        };
        let expected: Vec<f32> = (0..32u8).map(|n| 2.0 * f32::from(n)).collect();
        assert_eq!(entry.to_f32().unwrap(), expected);
        let short = TensorEntry { data: entry.data.slice(0..33).unwrap(), ..entry };
        let message = short.to_f32().unwrap_err().to_string();
        assert_eq!(message, "`f`: q8_0 of shape [1, 32] has 33 bytes");
    }

    #[test]
    fn names_in_messages_are_escaped_and_cut() {
        assert_eq!(quoted("a\x1b[31m\u{202e}'b'"), r"`a\u{1b}[31m\u{202e}'b'`");
        assert_eq!(quoted(&"x".repeat(101)), format!("`{}...`", "x".repeat(100)));
    }
}
