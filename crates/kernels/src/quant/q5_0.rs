//! Q5_0: 32 codes of five bits and a scale; 5.5 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..6 | fifth bits: bit j of a little-endian u32 is value j's |
//! | 6..22 | low four bits: byte j holds value j low and value j + 16 high |
//!
//! `value = d * (code - 16)`

use super::parts::{
    Parts, Scheme, Values, fifth_bits, nibbles, put_fifth_bits, put_nibbles, put_u16, u16_at,
};

pub(super) const LEN: usize = 32;
pub(super) const BYTES: usize = 22;
pub(super) const SCHEME: Scheme =
    Scheme { group: 32, bits: 5, values: Values::Offset(16), has_min: false };

#[inline(always)]
pub(super) fn parts(block: &[u8]) -> Parts {
    let block: &[u8; BYTES] = block.try_into().expect("block: 22 bytes");
    let mut parts = Parts::simple(u16_at(block, 0), 0, 0);
    nibbles(&block[6..], &mut parts.codes[..LEN]);
    fifth_bits(&block[2..6], &mut parts.codes[..LEN]);
    parts
}

#[inline(always)]
pub(super) fn pack(parts: &Parts, block: &mut [u8]) {
    put_u16(block, 0, parts.d);
    put_fifth_bits(&parts.codes[..LEN], &mut block[2..6]);
    put_nibbles(&parts.codes[..LEN], &mut block[6..]);
}
