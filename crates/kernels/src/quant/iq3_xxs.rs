//! IQ3_XXS: groups of 4 values from a table of 256, with signs, and scales of 32; 3.0625 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..66 | for each group its index |
//! | 66..98 | for each 32 values a little-endian u32: signs of each 8 in seven bits, see [`signs7`], then four bits of scale |
//!
//! `value = d * (scale + 0.5) / 2 * entry * sign`

use super::grids::{IQ3_XXS, IQ3_XXS_LEVELS, put4, signs7};
use super::parts::{f16_at, u32_at};

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 98;

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let block: &[u8; BYTES] = block.try_into().expect("block: 98 bytes");
    let d = f16_at(block, 0);
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let rest = u32_at(block, 66 + 4 * g);
        let scale = d * (0.5 + (rest >> 28) as f32) * 0.5;
        for (k, out) in out.chunks_exact_mut(4).enumerate() {
            let entry = IQ3_XXS[usize::from(block[2 + 8 * g + k])];
            let signs = signs7(rest >> (7 * (k / 2))) >> (k % 2 * 4);
            put4(scale, entry, IQ3_XXS_LEVELS, signs, out);
        }
    }
}
