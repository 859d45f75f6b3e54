//! Q5_K: 256 codes of five bits in 8 groups, each with a scale and a minimum; 5.5 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | `m`, f16 |
//! | 4..16 | scales and minima of groups, as in Q4_K |
//! | 16..48 | fifth bits: bit h of byte j is value 32h + j's |
//! | 48..176 | low four bits: byte 32c + j holds value 64c + j low and value 64c + 32 + j high |
//!
//! `value = d * scale * code - m * minimum`

use super::parts::{
    Parts, Scheme, Values, add_bit, nibbles, put_bit, put_nibbles, put_u16, u16_at,
};
use super::q4_k::{group_scales, put_group_scales};

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 176;
pub(super) const SCHEME: Scheme =
    Scheme { group: 32, bits: 5, values: Values::Offset(0), has_min: true };

#[inline(always)]
pub(super) fn parts(block: &[u8]) -> Parts {
    let block: &[u8; BYTES] = block.try_into().expect("block: 176 bytes");
    let mut parts = Parts::simple(u16_at(block, 0), u16_at(block, 2), 0);
    group_scales(&block[4..16], &mut parts);
    for c in 0..4 {
        nibbles(&block[48 + 32 * c..][..32], &mut parts.codes[64 * c..][..64]);
    }
    for h in 0..8 {
        add_bit(&block[16..48], h, 4, &mut parts.codes[32 * h..][..32]);
    }
    parts
}

#[inline(always)]
pub(super) fn pack(parts: &Parts, block: &mut [u8]) {
    block.fill(0);
    put_u16(block, 0, parts.d);
    put_u16(block, 2, parts.m);
    put_group_scales(parts, &mut block[4..16]);
    for h in 0..8 {
        put_bit(&parts.codes[32 * h..][..32], 4, h, &mut block[16..48]);
    }
    for c in 0..4 {
        put_nibbles(&parts.codes[64 * c..][..64], &mut block[48 + 32 * c..][..32]);
    }
}
