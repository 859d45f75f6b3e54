//! Q4_0: 32 codes of four bits and a scale; 4.5 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..18 | codes: byte j holds value j low and value j + 16 high |
//!
//! `value = d * (code - 8)`

use super::parts::{Parts, Scheme, Values, nibbles, put_nibbles, put_u16, u16_at};

pub(super) const LEN: usize = 32;
pub(super) const BYTES: usize = 18;
pub(super) const SCHEME: Scheme =
    Scheme { group: 32, bits: 4, values: Values::Offset(8), has_min: false };

#[inline(always)]
pub(super) fn parts(block: &[u8]) -> Parts {
    let block: &[u8; BYTES] = block.try_into().expect("block: 18 bytes");
    let mut parts = Parts::simple(u16_at(block, 0), 0, 0);
    nibbles(&block[2..], &mut parts.codes[..LEN]);
    parts
}

#[inline(always)]
pub(super) fn pack(parts: &Parts, block: &mut [u8]) {
    put_u16(block, 0, parts.d);
    put_nibbles(&parts.codes[..LEN], &mut block[2..]);
}
