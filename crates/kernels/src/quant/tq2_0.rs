//! TQ2_0: 256 values of three levels, four to a byte, and a scale; 2.0625 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..64 | codes: bits 2s of byte 32h + j are value 128h + 32s + j's |
//! | 64..66 | `d`, f16 |
//!
//! `value = d * (code - 1)`

use super::parts::{f16_at, pairs};

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 66;

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let block: &[u8; BYTES] = block.try_into().expect("block: 66 bytes");
    let d = f16_at(block, 64);
    let mut codes = [0; LEN];
    pairs(&block[..64], 0, &mut codes);
    for (&code, out) in codes.iter().zip(out) {
        *out = d * (f32::from(code) - 1.0);
    }
}
