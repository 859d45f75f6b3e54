//! IQ4_XS: 256 indices into the table of IQ4_NL in 8 groups, each with a signed scale; 4.25 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | high two bits of scales: bits 2g of a little-endian u16 are group g's |
//! | 4..8 | low four bits of scales: byte j holds group 2j low and group 2j + 1 high |
//! | 8..136 | indices: byte 16g + j holds value 32g + j low and value 32g + 16 + j high |
//!
//! `value = d * (scale - 32) * VALUES[index]`

use super::iq4_nl::VALUES;
use super::parts::{Parts, Scheme, Values, nibbles, put_nibbles, put_u16, u16_at};

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 136;
pub(super) const SCHEME: Scheme =
    Scheme { group: 32, bits: 4, values: Values::Table(&VALUES), has_min: false };

#[inline(always)]
pub(super) fn parts(block: &[u8]) -> Parts {
    let block: &[u8; BYTES] = block.try_into().expect("block: 136 bytes");
    let mut parts = Parts::simple(u16_at(block, 0), 0, 0);
    let high = u16_at(block, 2);
    for g in 0..8 {
        let low = block[4 + g / 2] >> (g % 2 * 4) & 15;
        let high = (high >> (2 * g) & 3) as u8;
        parts.scales[g] = (low | high << 4) as i8 - 32;
        nibbles(&block[8 + 16 * g..][..16], &mut parts.codes[32 * g..][..32]);
    }
    parts
}

#[inline(always)]
pub(super) fn pack(parts: &Parts, block: &mut [u8]) {
    block.fill(0);
    put_u16(block, 0, parts.d);
    let mut high = 0;
    for g in 0..8 {
        let scale = (parts.scales[g] + 32) as u8;
        block[4 + g / 2] |= (scale & 15) << (g % 2 * 4);
        high |= u16::from(scale >> 4) << (2 * g);
        put_nibbles(&parts.codes[32 * g..][..32], &mut block[8 + 16 * g..][..16]);
    }
    put_u16(block, 2, high);
}
