//! A block taken apart into integers: what products compute with, and one way to decode.

use half::f16;

/// The integers of one block. Value `i`, of group `g = i / group`, is
///
/// ```text
/// d * scales[g] * q(codes[i]) - m * mins[g]
/// ```
///
/// with `group` and `q` of the format's [`Scheme`]. Entries past the block's length are zero.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    /// A code for each value, as stored.
    pub codes: [u8; 256],
    /// Bits of the f16 scale of the block.
    pub d: u16,
    /// Bits of the f16 scale of what is subtracted; where the format adds it, with the sign flipped.
    pub m: u16,
    /// For each group, what `d` is multiplied by: 1 where the format has no scales of groups.
    pub scales: [i8; 16],
    /// For each group, what `m` is multiplied by: 1 where one `m` is for all, 0 where there is none.
    pub mins: [u8; 16],
}

impl Parts {
    /// A block with one scale, and an `m` of factor `min` for all groups.
    #[inline(always)]
    pub(super) fn simple(d: u16, m: u16, min: u8) -> Self {
        Self { codes: [0; 256], d, m, scales: [1; 16], mins: [min; 16] }
    }

    /// The values, in the order of operations of PyPI's `gguf`: its bits.
    #[inline(always)]
    pub(super) fn decode(&self, scheme: Scheme, out: &mut [f32]) {
        let (d, m) = (f16::from_bits(self.d).to_f32(), f16::from_bits(self.m).to_f32());
        let groups = self.codes.chunks_exact(scheme.group).zip(out.chunks_exact_mut(scheme.group));
        for (g, (codes, out)) in groups.enumerate() {
            let scale = d * f32::from(self.scales[g]);
            let min = m * f32::from(self.mins[g]);
            for (&code, out) in codes.iter().zip(out) {
                *out = scale * f32::from(scheme.values.of(code)) - min;
            }
        }
    }
}

/// How a format's codes are laid out and what they stand for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scheme {
    /// Values that share a scale: 16 or 32.
    pub group: usize,
    /// Width of a code.
    pub bits: u32,
    /// What a code stands for.
    pub values: Values,
    /// Whether something is subtracted from (or added to) each group.
    pub has_min: bool,
}

/// What a code stands for, before any scale.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Values {
    /// The code less this.
    Offset(i32),
    /// The code read as a signed byte.
    Signed,
    /// The entry of a table.
    Table(&'static [i8; 16]),
}

impl Values {
    /// The value of a code.
    #[inline(always)]
    pub(crate) fn of(self, code: u8) -> i16 {
        match self {
            Self::Offset(offset) => i16::from(code) - offset as i16,
            Self::Signed => i16::from(code as i8),
            Self::Table(table) => i16::from(table[usize::from(code & 15)]),
        }
    }
}

/// The sign of an f16.
pub(super) const SIGN: u16 = 0x8000;

/// Little-endian u16 at `at`.
#[inline(always)]
pub(super) fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// Little-endian u32 at `at`.
#[inline(always)]
pub(super) fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// The value of the f16 at `at`.
#[inline(always)]
pub(super) fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_bits(u16_at(block, at)).to_f32()
}

/// Writes `value` at `at`, little-endian.
#[inline(always)]
pub(super) fn put_u16(block: &mut [u8], at: usize, value: u16) {
    block[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

/// Two codes of four bits to a byte: the low ones are the first half of `codes`.
#[inline(always)]
pub(super) fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((&byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = byte & 15;
        *high = byte >> 4;
    }
}

/// Four codes of two bits to a byte, added to 256 `codes` as bits from `to` on: bits 2s of byte 32h + j
/// are code 128h + 32s + j's.
#[inline(always)]
pub(super) fn pairs(bytes: &[u8], to: usize, codes: &mut [u8; 256]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (s, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (&byte, code) in bytes.iter().zip(codes) {
                *code |= (byte >> (2 * s) & 3) << to;
            }
        }
    }
}

/// Adds bit j of a little-endian u32 to each of 32 codes, as their fifth.
#[inline(always)]
pub(super) fn fifth_bits(bytes: &[u8], codes: &mut [u8]) {
    for (j, code) in codes.iter_mut().enumerate() {
        *code |= (bytes[j / 8] >> (j % 8) & 1) << 4;
    }
}

/// Adds to each code the bit `shift` of its byte, as bit `to`.
#[inline(always)]
pub(super) fn add_bit(bytes: &[u8], shift: usize, to: usize, codes: &mut [u8]) {
    for (&byte, code) in bytes.iter().zip(codes) {
        *code |= (byte >> shift & 1) << to;
    }
}

/// Packs what [`nibbles`] reads; higher bits of the codes are left out.
#[inline(always)]
pub(super) fn put_nibbles(codes: &[u8], bytes: &mut [u8]) {
    let (low, high) = codes.split_at(bytes.len());
    for ((byte, &low), &high) in bytes.iter_mut().zip(low).zip(high) {
        *byte = low & 15 | high << 4;
    }
}

/// Packs what [`pairs`] reads.
#[inline(always)]
pub(super) fn put_pairs(codes: &[u8; 256], from: usize, bytes: &mut [u8]) {
    bytes.fill(0);
    for (bytes, codes) in bytes.chunks_exact_mut(32).zip(codes.chunks_exact(128)) {
        for (s, codes) in codes.chunks_exact(32).enumerate() {
            for (byte, &code) in bytes.iter_mut().zip(codes) {
                *byte |= (code >> from & 3) << (2 * s);
            }
        }
    }
}

/// Packs what [`fifth_bits`] reads.
#[inline(always)]
pub(super) fn put_fifth_bits(codes: &[u8], bytes: &mut [u8]) {
    bytes.fill(0);
    for (j, &code) in codes.iter().enumerate() {
        bytes[j / 8] |= (code >> 4 & 1) << (j % 8);
    }
}

/// Adds bit `from` of each code to its byte, as bit `shift`: what [`add_bit`] reads.
#[inline(always)]
pub(super) fn put_bit(codes: &[u8], from: usize, shift: usize, bytes: &mut [u8]) {
    for (&code, byte) in codes.iter().zip(bytes) {
        *byte |= (code >> from & 1) << shift;
    }
}
