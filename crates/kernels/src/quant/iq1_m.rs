//! IQ1_M: groups of 8 values from the table of IQ1_S, with shifts, and scales of 16; 1.75 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..32 | for each group the low eight bits of its index |
//! | 32..48 | four bits for each group, byte j of group 2j low and of 2j + 1 high: three of index, and one that makes the shift negative |
//! | 48..56 | four little-endian u16: each four scales of three bits, then four bits of `d`, f16, lowest first |
//!
//! `value = d * (2 * scale + 1) * (entry ± 1/8)`

use half::f16;

use super::grids::put_ternary;
use super::parts::u16_at;

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 56;

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let block: &[u8; BYTES] = block.try_into().expect("block: 56 bytes");
    let mut d = 0;
    for k in 0..4 {
        d |= u16_at(block, 48 + 2 * k) >> 12 << (4 * k);
    }
    let d = f16::from_bits(d).to_f32();
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let scale = u16_at(block, 48 + 2 * (i / 8)) >> (i / 2 % 4 * 3) & 7;
        let scale = d * f32::from(2 * scale + 1);
        let rest = u16::from(block[32 + i / 2] >> (i % 2 * 4) & 15);
        put_ternary(scale, u16::from(block[i]) | (rest & 7) << 8, rest >> 3 != 0, out);
    }
}
