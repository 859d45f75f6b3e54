//! IQ1_S: groups of 8 values from a table of 2048, and scales and shifts of 32; 1.5625 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..34 | for each group the low eight bits of its index |
//! | 34..50 | for each 32 values a little-endian u16: high three bits of four indices, three bits of scale, and one that makes the shift negative |
//!
//! `value = d * (2 * scale + 1) * (entry ± 1/8)`

use super::grids::put_ternary;
use super::parts::{f16_at, u16_at};

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 50;

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let block: &[u8; BYTES] = block.try_into().expect("block: 50 bytes");
    let d = f16_at(block, 0);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let rest = u16_at(block, 34 + 2 * (i / 4));
        let scale = d * f32::from(2 * (rest >> 12 & 7) + 1);
        let high = rest >> (i % 4 * 3) & 7;
        put_ternary(scale, u16::from(block[2 + i]) | high << 8, rest >> 15 != 0, out);
    }
}
