//! Q6_K: 256 codes of six bits in 16 groups, each with a signed scale; 6.5625 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..128 | low four bits: byte 64h + j holds value 128h + j low and value 128h + 64 + j high |
//! | 128..192 | high two bits: bits 2s of byte 32h + j are value 128h + 32s + j's |
//! | 192..208 | scales of groups, i8 |
//! | 208..210 | `d`, f16 |
//!
//! `value = d * scale * (code - 32)`

use super::parts::{
    Parts, Scheme, Values, nibbles, pairs, put_nibbles, put_pairs, put_u16, u16_at,
};

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 210;
pub(super) const SCHEME: Scheme =
    Scheme { group: 16, bits: 6, values: Values::Offset(32), has_min: false };

#[inline(always)]
pub(super) fn parts(block: &[u8]) -> Parts {
    let block: &[u8; BYTES] = block.try_into().expect("block: 210 bytes");
    let mut parts = Parts::simple(u16_at(block, 208), 0, 0);
    for g in 0..16 {
        parts.scales[g] = block[192 + g] as i8;
    }
    for h in 0..2 {
        nibbles(&block[64 * h..][..64], &mut parts.codes[128 * h..][..128]);
    }
    pairs(&block[128..192], 4, &mut parts.codes);
    parts
}

#[inline(always)]
pub(super) fn pack(parts: &Parts, block: &mut [u8]) {
    for h in 0..2 {
        put_nibbles(&parts.codes[128 * h..][..128], &mut block[64 * h..][..64]);
    }
    put_pairs(&parts.codes, 4, &mut block[128..192]);
    for g in 0..16 {
        block[192 + g] = parts.scales[g] as u8;
    }
    put_u16(block, 208, parts.d);
}
