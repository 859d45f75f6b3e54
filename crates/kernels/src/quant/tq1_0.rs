//! TQ1_0: 256 values of three levels, five to a byte, and a scale; 1.6875 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..32 | values 32k + j, k in 0..5, in byte j |
//! | 32..48 | values 160 + 16k + j, k in 0..5, in byte 32 + j |
//! | 48..52 | values 240 + 4k + j, k in 0..4, in byte 48 + j |
//! | 52..54 | `d`, f16 |
//!
//! A byte is a fraction of 256, whose digits to the base of three are the levels: digit k of byte b is
//! `(3^k b mod 256) * 3 / 256`, rounded down. `value = d * (digit - 1)`

use super::parts::f16_at;

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 54;

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let block: &[u8; BYTES] = block.try_into().expect("block: 54 bytes");
    let d = f16_at(block, 52);
    let mut out = out;
    for (bytes, digits) in [(&block[..32], 5), (&block[32..48], 5), (&block[48..52], 4)] {
        let mut power = 1u8;
        for _ in 0..digits {
            let (now, rest) = out.split_at_mut(bytes.len());
            for (&byte, out) in bytes.iter().zip(now) {
                let digit = (u16::from(byte.wrapping_mul(power)) * 3) >> 8;
                *out = d * (f32::from(digit) - 1.0);
            }
            out = rest;
            power = power.wrapping_mul(3);
        }
    }
}
