//! Q2_K: 256 codes of two bits in 16 groups, each with a scale and a minimum; 2.625 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..16 | group g: scale in the low four bits, minimum in the high four |
//! | 16..80 | codes: bits 2s of byte 32h + j are value 128h + 32s + j's |
//! | 80..82 | `d`, f16 |
//! | 82..84 | `m`, f16 |
//!
//! `value = d * scale * code - m * minimum`

use super::parts::{Parts, Scheme, Values, pairs, put_pairs, put_u16, u16_at};

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 84;
pub(super) const SCHEME: Scheme =
    Scheme { group: 16, bits: 2, values: Values::Offset(0), has_min: true };

#[inline(always)]
pub(super) fn parts(block: &[u8]) -> Parts {
    let block: &[u8; BYTES] = block.try_into().expect("block: 84 bytes");
    let mut parts = Parts::simple(u16_at(block, 80), u16_at(block, 82), 0);
    for g in 0..16 {
        parts.scales[g] = (block[g] & 15) as i8;
        parts.mins[g] = block[g] >> 4;
    }
    pairs(&block[16..80], 0, &mut parts.codes);
    parts
}

#[inline(always)]
pub(super) fn pack(parts: &Parts, block: &mut [u8]) {
    for g in 0..16 {
        block[g] = parts.scales[g] as u8 | parts.mins[g] << 4;
    }
    put_pairs(&parts.codes, 0, &mut block[16..80]);
    put_u16(block, 80, parts.d);
    put_u16(block, 82, parts.m);
}
