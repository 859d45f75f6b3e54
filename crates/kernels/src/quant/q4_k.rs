//! Q4_K: 256 codes of four bits in 8 groups, each with a scale and a minimum; 4.5 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | `m`, f16 |
//! | 4..16 | scales and minima of groups, six bits each, see [`group_scales`] |
//! | 16..144 | codes: byte 32c + j holds value 64c + j low and value 64c + 32 + j high |
//!
//! `value = d * scale * code - m * minimum`

use super::parts::{Parts, Scheme, Values, nibbles, put_nibbles, put_u16, u16_at};

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 144;
pub(super) const SCHEME: Scheme =
    Scheme { group: 32, bits: 4, values: Values::Offset(0), has_min: true };

#[inline(always)]
pub(super) fn parts(block: &[u8]) -> Parts {
    let block: &[u8; BYTES] = block.try_into().expect("block: 144 bytes");
    let mut parts = Parts::simple(u16_at(block, 0), u16_at(block, 2), 0);
    group_scales(&block[4..16], &mut parts);
    for c in 0..4 {
        nibbles(&block[16 + 32 * c..][..32], &mut parts.codes[64 * c..][..64]);
    }
    parts
}

/// Reads the scales and minima of 8 groups from 12 bytes, as Q4_K and Q5_K keep them.
///
/// With g in 0..4: byte g holds group g's scale in the low six bits, byte 4 + g its minimum; byte 8 + g
/// holds the low four bits of group 4 + g's scale (low) and minimum (high), whose high two bits are
/// the top of bytes g and 4 + g.
#[inline(always)]
pub(super) fn group_scales(packed: &[u8], parts: &mut Parts) {
    for g in 0..4 {
        let (scale, min, both) = (packed[g], packed[4 + g], packed[8 + g]);
        parts.scales[g] = (scale & 63) as i8;
        parts.mins[g] = min & 63;
        parts.scales[4 + g] = (both & 15 | scale >> 6 << 4) as i8;
        parts.mins[4 + g] = both >> 4 | min >> 6 << 4;
    }
}

#[inline(always)]
pub(super) fn pack(parts: &Parts, block: &mut [u8]) {
    put_u16(block, 0, parts.d);
    put_u16(block, 2, parts.m);
    put_group_scales(parts, &mut block[4..16]);
    for c in 0..4 {
        put_nibbles(&parts.codes[64 * c..][..64], &mut block[16 + 32 * c..][..32]);
    }
}

/// Writes what [`group_scales`] reads.
#[inline(always)]
pub(super) fn put_group_scales(parts: &Parts, packed: &mut [u8]) {
    for g in 0..4 {
        let (scale, min) = (parts.scales[4 + g] as u8, parts.mins[4 + g]);
        packed[g] = parts.scales[g] as u8 | scale >> 4 << 6;
        packed[4 + g] = parts.mins[g] | min >> 4 << 6;
        packed[8 + g] = scale & 15 | min << 4;
    }
}
