//! IQ2_XS: groups of 8 values from a table of 512, with signs, and scales of 16; 2.3125 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..66 | for each group a little-endian u16: nine bits of index, seven of signs, see [`signs7`] |
//! | 66..74 | scales: byte j holds those of values 32j.. low and 32j + 16.. high |
//!
//! `value = d * (scale + 0.5) / 4 * entry * sign`

use super::grids::{IQ2_LEVELS, IQ2_XS, put8, signs7};
use super::parts::{f16_at, u16_at};

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 74;

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let block: &[u8; BYTES] = block.try_into().expect("block: 74 bytes");
    let d = f16_at(block, 0);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let scale = block[66 + i / 4] >> (i / 2 % 2 * 4) & 15;
        let scale = d * (0.5 + f32::from(scale)) * 0.25;
        let code = u16_at(block, 2 + 2 * i);
        let entry = IQ2_XS[usize::from(code & 511)];
        put8(scale, entry, IQ2_LEVELS, signs7(u32::from(code >> 9)), out);
    }
}
