//! Q4_1: 32 codes of four bits, a scale and a minimum; 5 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | `m`, f16 |
//! | 4..20 | codes: byte j holds value j low and value j + 16 high |
//!
//! `value = d * code + m`

use super::parts::{Parts, SIGN, Scheme, Values, nibbles, put_nibbles, put_u16, u16_at};

pub(super) const LEN: usize = 32;
pub(super) const BYTES: usize = 20;
pub(super) const SCHEME: Scheme =
    Scheme { group: 32, bits: 4, values: Values::Offset(0), has_min: true };

#[inline(always)]
pub(super) fn parts(block: &[u8]) -> Parts {
    let block: &[u8; BYTES] = block.try_into().expect("block: 20 bytes");
    let mut parts = Parts::simple(u16_at(block, 0), u16_at(block, 2) ^ SIGN, 1);
    nibbles(&block[4..], &mut parts.codes[..LEN]);
    parts
}

#[inline(always)]
pub(super) fn pack(parts: &Parts, block: &mut [u8]) {
    put_u16(block, 0, parts.d);
    put_u16(block, 2, parts.m ^ SIGN);
    put_nibbles(&parts.codes[..LEN], &mut block[4..]);
}
