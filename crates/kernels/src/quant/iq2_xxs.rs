//! IQ2_XXS: groups of 8 values from a table of 256, with signs, and scales of 32; 2.0625 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2 + 8g .. 6 + 8g | for g in 0..8, indices of the four groups of values 32g.. |
//! | 6 + 8g .. 10 + 8g | little-endian u32: four signs of seven bits, see [`signs7`], then four bits of scale |
//!
//! `value = d * (scale + 0.5) / 4 * entry * sign`

use super::grids::{IQ2_LEVELS, IQ2_XXS, put8, signs7};
use super::parts::{f16_at, u32_at};

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 66;

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let block: &[u8; BYTES] = block.try_into().expect("block: 66 bytes");
    let d = f16_at(block, 0);
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let rest = u32_at(block, 6 + 8 * g);
        let scale = d * (0.5 + (rest >> 28) as f32) * 0.25;
        for (k, out) in out.chunks_exact_mut(8).enumerate() {
            let entry = IQ2_XXS[usize::from(block[2 + 8 * g + k])];
            put8(scale, entry, IQ2_LEVELS, signs7(rest >> (7 * k)), out);
        }
    }
}
