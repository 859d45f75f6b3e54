//! IQ2_S: groups of 8 values from a table of 1024, with signs, and scales of 16; 2.5625 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..34 | for each group the low eight bits of its index |
//! | 34..66 | for each group its signs, bit j of value j |
//! | 66..74 | high two bits of indices: bits 2k of byte j are group 4j + k's |
//! | 74..82 | scales: byte j holds those of values 32j.. low and 32j + 16.. high |
//!
//! `value = d * (scale + 0.5) / 4 * entry * sign`

use super::grids::{IQ2_LEVELS, IQ2_S, put8};
use super::parts::f16_at;

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 82;

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let block: &[u8; BYTES] = block.try_into().expect("block: 82 bytes");
    let d = f16_at(block, 0);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let scale = block[74 + i / 4] >> (i / 2 % 2 * 4) & 15;
        let scale = d * (0.5 + f32::from(scale)) * 0.25;
        let high = block[66 + i / 4] >> (i % 4 * 2) & 3;
        let entry = IQ2_S[usize::from(block[2 + i]) | usize::from(high) << 8];
        put8(scale, entry, IQ2_LEVELS, block[34 + i], out);
    }
}
