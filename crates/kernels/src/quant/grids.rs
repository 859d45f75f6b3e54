//! What the IQ1, IQ2 and IQ3 formats share: tables of groups of levels, and signs.

mod tables;

pub(super) use tables::{IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};

/// Magnitudes of the IQ2 formats.
pub(super) const IQ2_LEVELS: [f32; 4] = [8.0, 25.0, 43.0, 0.0];
/// Magnitudes of IQ3_XXS.
pub(super) const IQ3_XXS_LEVELS: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];
/// Magnitudes of IQ3_S.
pub(super) const IQ3_S_LEVELS: [f32; 8] = [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0];

/// Eight signs from the low seven bits of a word: the eighth makes the number of negative ones even.
#[inline(always)]
pub(super) fn signs7(word: u32) -> u8 {
    let seven = word & 127;
    (seven | (seven.count_ones() & 1) << 7) as u8
}

/// `scale * level`, with its sign from a bit.
#[inline(always)]
fn signed(scale: f32, level: f32, negative: u8) -> f32 {
    f32::from_bits((scale * level).to_bits() ^ u32::from(negative) << 31)
}

/// Writes the 8 values of an entry with two bits each.
#[inline(always)]
pub(super) fn put8(scale: f32, entry: u16, levels: [f32; 4], signs: u8, out: &mut [f32]) {
    for (k, out) in out.iter_mut().enumerate() {
        let level = levels[usize::from(entry >> (2 * k) & 3)];
        *out = signed(scale, level, signs >> k & 1);
    }
}

/// Writes the 4 values of an entry with four bits each.
#[inline(always)]
pub(super) fn put4(scale: f32, entry: u16, levels: [f32; 8], signs: u8, out: &mut [f32]) {
    for (k, out) in out.iter_mut().enumerate() {
        let level = levels[usize::from(entry >> (4 * k) & 7)];
        *out = signed(scale, level, signs >> k & 1);
    }
}

/// Writes the 8 values of an index of IQ1: levels -1, 0 and 1, shifted by an eighth.
#[inline(always)]
pub(super) fn put_ternary(scale: f32, index: u16, down: bool, out: &mut [f32]) {
    let entry = tables::IQ1_S[usize::from(index & 2047)];
    let shift = if down { -1.125 } else { -0.875 };
    for (k, out) in out.iter_mut().enumerate() {
        *out = scale * (f32::from(entry >> (2 * k) & 3) + shift);
    }
}
