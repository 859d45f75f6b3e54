//! IQ4_NL: 32 indices into a table of 16 uneven values, and a scale; 4.5 bits a value.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..18 | indices: byte j holds value j low and value j + 16 high |
//!
//! `value = d * VALUES[index]`

use super::fit::Codebook;
use super::parts::{Parts, Scheme, Values, nibbles, put_nibbles, put_u16, u16_at};
use crate::simd::Simd;

pub(super) const LEN: usize = 32;
pub(super) const BYTES: usize = 18;
pub(super) const SCHEME: Scheme =
    Scheme { group: 32, bits: 4, values: Values::Table(&VALUES), has_min: false };

/// What an index stands for (ggml's `kvalues_iq4nl`).
pub(super) const VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

#[inline(always)]
pub(super) fn parts(block: &[u8]) -> Parts {
    let block: &[u8; BYTES] = block.try_into().expect("block: 18 bytes");
    let mut parts = Parts::simple(u16_at(block, 0), 0, 0);
    nibbles(&block[2..], &mut parts.codes[..LEN]);
    parts
}

#[inline(always)]
pub(super) fn pack(parts: &Parts, block: &mut [u8]) {
    put_u16(block, 0, parts.d);
    put_nibbles(&parts.codes[..LEN], &mut block[2..]);
}

/// The table as levels to fit.
pub(super) struct Uneven;

impl Codebook for Uneven {
    const LOW: f32 = VALUES[0] as f32;
    const HIGH: f32 = VALUES[15] as f32;

    #[inline(always)]
    fn nearest<S: Simd>(simd: S, y: S::F) -> S::F {
        // 1.5 * 2^21, added, leaves y in quarters in the low bits.
        let y = simd.min(simd.max(y, simd.splat(Self::LOW)), simd.splat(Self::HIGH));
        let mut lanes = [0.0; 16];
        let (chunks, _) = S::chunks_mut(&mut lanes);
        simd.store(simd.add(y, simd.splat(3_145_728.0)), &mut chunks[0]);
        for lane in &mut lanes[..S::LANES] {
            *lane = f32::from(NEAREST[lane.to_bits() as usize % 1024]);
        }
        let (chunks, _) = S::chunks(&lanes);
        simd.load(&chunks[0])
    }

    #[inline(always)]
    fn code(y: f32) -> u8 {
        let mut code = 0;
        for i in 1..16 {
            let (below, above) = (f32::from(VALUES[i - 1]), f32::from(VALUES[i]));
            code += u8::from(y > (below + above) * 0.5);
        }
        code
    }
}

/// The level nearest to y, at the low ten bits of 4 y.
static NEAREST: [i8; 1024] = {
    let mut nearest = [0; 1024];
    let mut quarters = -512;
    while quarters < 512 {
        let mut i = 0;
        while i < 15 && quarters > 2 * (VALUES[i] as i32 + VALUES[i + 1] as i32) {
            i += 1;
        }
        nearest[quarters as usize % 1024] = VALUES[i];
        quarters += 1;
    }
    nearest
};
