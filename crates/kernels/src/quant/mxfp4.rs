//! MXFP4: 32 floats of four bits (E2M1) and a power of two; 4.25 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0 | exponent e |
//! | 1..17 | codes: byte 1 + j holds value j low and value j + 16 high |
//!
//! `value = 2^(e - 128) * DOUBLED[code]`
//!
//! Source of the element format: Open Compute Project, Microscaling Formats (MX) v1.0.

use super::parts::nibbles;

pub(super) const LEN: usize = 32;
pub(super) const BYTES: usize = 17;

/// Twice the value of an E2M1 code.
const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let block: &[u8; BYTES] = block.try_into().expect("block: 17 bytes");
    let exponent = u32::from(block[0]);
    // The two smallest scales are below the normal numbers of f32.
    let bits = if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 };
    let d = f32::from_bits(bits);
    let mut codes = [0; LEN];
    nibbles(&block[1..], &mut codes);
    for (&code, out) in codes.iter().zip(out) {
        *out = d * f32::from(DOUBLED[usize::from(code & 15)]);
    }
}
