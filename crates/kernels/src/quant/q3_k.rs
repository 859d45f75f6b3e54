//! Q3_K: 256 codes of three bits in 16 groups, each with a signed scale; 3.4375 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..32 | third bits: bit h of byte j is value 32h + j's |
//! | 32..96 | low two bits: bits 2s of byte 32h + j are value 128h + 32s + j's |
//! | 96..104 | low four bits of scales: byte g holds group g low and group g + 8 high |
//! | 104..108 | high two bits of scales: bits 2s of byte j are group 4s + j's |
//! | 108..110 | `d`, f16 |
//!
//! `value = d * (scale - 32) * (code - 4)`

use super::parts::{Parts, Scheme, Values, add_bit, pairs, put_bit, put_pairs, put_u16, u16_at};

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 110;
pub(super) const SCHEME: Scheme =
    Scheme { group: 16, bits: 3, values: Values::Offset(4), has_min: false };

#[inline(always)]
pub(super) fn parts(block: &[u8]) -> Parts {
    let block: &[u8; BYTES] = block.try_into().expect("block: 110 bytes");
    let mut parts = Parts::simple(u16_at(block, 108), 0, 0);
    for g in 0..16 {
        let low = block[96 + g % 8] >> (g / 8 * 4) & 15;
        let high = block[104 + g % 4] >> (g / 4 * 2) & 3;
        parts.scales[g] = (low | high << 4) as i8 - 32;
    }
    pairs(&block[32..96], 0, &mut parts.codes);
    for h in 0..8 {
        add_bit(&block[..32], h, 2, &mut parts.codes[32 * h..][..32]);
    }
    parts
}

#[inline(always)]
pub(super) fn pack(parts: &Parts, block: &mut [u8]) {
    block.fill(0);
    for g in 0..16 {
        let scale = (parts.scales[g] + 32) as u8;
        block[96 + g % 8] |= (scale & 15) << (g / 8 * 4);
        block[104 + g % 4] |= (scale >> 4) << (g / 4 * 2);
    }
    put_pairs(&parts.codes, 0, &mut block[32..96]);
    for h in 0..8 {
        put_bit(&parts.codes[32 * h..][..32], 2, h, &mut block[..32]);
    }
    put_u16(block, 108, parts.d);
}
