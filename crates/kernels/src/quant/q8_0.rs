//! Q8_0: 32 signed bytes and a scale; 8.5 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..34 | `q`, i8, in order |
//!
//! `value = d * q`, and -128 is read, but never written

use super::parts::{Parts, Scheme, Values, put_u16, u16_at};

pub(super) const LEN: usize = 32;
pub(super) const BYTES: usize = 34;
pub(super) const SCHEME: Scheme =
    Scheme { group: 32, bits: 8, values: Values::Signed, has_min: false };

#[inline(always)]
pub(super) fn parts(block: &[u8]) -> Parts {
    let block: &[u8; BYTES] = block.try_into().expect("block: 34 bytes");
    let mut parts = Parts::simple(u16_at(block, 0), 0, 0);
    parts.codes[..LEN].copy_from_slice(&block[2..]);
    parts
}

#[inline(always)]
pub(super) fn pack(parts: &Parts, block: &mut [u8]) {
    put_u16(block, 0, parts.d);
    block[2..].copy_from_slice(&parts.codes[..LEN]);
}
