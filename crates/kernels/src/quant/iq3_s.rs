//! IQ3_S: groups of 4 values from a table of 512, with signs, and scales of 32; 3.4375 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..66 | for each group the low eight bits of its index |
//! | 66..74 | ninth bits: bit k of byte j is group 8j + k's |
//! | 74..106 | signs, bit j of byte i is value 8i + j's |
//! | 106..110 | scales: byte j holds those of values 64j.. low and 64j + 32.. high |
//!
//! `value = d * (2 * scale + 1) * entry * sign`

use super::grids::{IQ3_S, IQ3_S_LEVELS, put4};
use super::parts::f16_at;

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 110;

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let block: &[u8; BYTES] = block.try_into().expect("block: 110 bytes");
    let d = f16_at(block, 0);
    for (i, out) in out.chunks_exact_mut(4).enumerate() {
        let scale = block[106 + i / 16] >> (i / 8 % 2 * 4) & 15;
        let scale = d * f32::from(2 * scale + 1);
        let high = block[66 + i / 8] >> (i % 8) & 1;
        let entry = IQ3_S[usize::from(block[2 + i]) | usize::from(high) << 8];
        put4(scale, entry, IQ3_S_LEVELS, block[74 + i / 2] >> (i % 2 * 4), out);
    }
}
