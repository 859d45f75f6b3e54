//! x86-64 with AVX2: pairs of products in 16 bits, added there as long as they fit.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all: an `Avx2` exists only where `detected` saw the features, and every pointer comes from a reference to an array of the vector's size"
)]

use std::arch::x86_64::*;

use super::{Int8, Operand};
use crate::simd::avx2::Avx2;

/// Four neighbouring bytes of `x` in every lane.
#[inline(always)]
pub(super) fn four(x: &[i8; 32], step: usize) -> __m256i {
    let x = x.as_chunks::<4>().0[step];
    four_bytes(x.map(i8::cast_unsigned))
}

#[inline(always)]
fn four_bytes(x: [u8; 4]) -> __m256i {
    unsafe { _mm256_set1_epi32(i32::from_le_bytes(x)) }
}

/// Adds the products of steps `from..from + COUNT`, times a factor for each pair of products, to sums.
///
/// `PER` steps are added in 16 bits: `PER * 2 * 127 * largest code` must be below 2^15.
#[inline(always)]
fn add_products<const N: usize, const R: usize, const COUNT: usize, const PER: usize>(
    sums: &mut [[__m256i; R]; N],
    codes: [&[__m256i; 8]; N],
    x: [&[i8; 32]; R],
    from: usize,
    factors: [__m256i; N],
) {
    unsafe {
        for i in 0..COUNT / PER {
            let first = from + i * PER;
            let mut pairs = [[_mm256_setzero_si256(); R]; N];
            for step in first..first + PER {
                // Outputs and rows take turns, so that no instruction waits for the one before it.
                for n in 0..N {
                    for r in 0..R {
                        let products = _mm256_maddubs_epi16(codes[n][step], four(x[r], step));
                        pairs[n][r] = _mm256_add_epi16(pairs[n][r], products);
                    }
                }
            }
            for n in 0..N {
                for r in 0..R {
                    let products = _mm256_madd_epi16(pairs[n][r], factors[n]);
                    sums[n][r] = _mm256_add_epi32(sums[n][r], products);
                }
            }
        }
    }
}

impl Int8 for Avx2 {
    type Codes = __m256i;
    type Sums = __m256i;
    type F = __m256;
    /// 8 x 2 equal i16.
    type Factors = __m256i;
    type Pairs = __m256i;
    const SIGNED_OFFSET: i32 = 0;

    super::avx2_operations!();

    #[inline(always)]
    fn dot_signed<const N: usize, const R: usize>(
        self,
        codes: [&[[u8; 32]; 8]; N],
        x: [Operand<'_>; R],
    ) -> [[Self::Sums; R]; N] {
        let mut sums = [[self.zero_sums(); R]; N];
        unsafe {
            // |x| * code where x >= 0, |x| * !code = -|x| * code - |x| elsewhere: two are at most
            // 2 * 127 * 128, which fits, and sums begin with what they lack.
            for r in 0..R {
                for n in 0..N {
                    sums[n][r] = _mm256_set1_epi32(x[r].apart.negative);
                }
            }
            let ones = _mm256_set1_epi16(1);
            for step in 0..8 {
                for r in 0..R {
                    let size = four_bytes(x[r].apart.sizes.as_chunks().0[step]);
                    let sign = four(&x[r].apart.signs, step);
                    for n in 0..N {
                        let code = _mm256_xor_si256(self.load(&codes[n][step]), sign);
                        let products = _mm256_madd_epi16(_mm256_maddubs_epi16(size, code), ones);
                        sums[n][r] = _mm256_add_epi32(sums[n][r], products);
                    }
                }
            }
        }
        sums
    }
    #[inline(always)]
    fn dot<const N: usize, const R: usize>(
        self,
        bits: u32,
        codes: [&[Self::Codes; 8]; N],
        x: [&[i8; 32]; R],
    ) -> [[Self::Sums; R]; N] {
        debug_assert!(bits <= 6, "more do not fit");
        let mut sums = [[self.zero_sums(); R]; N];
        let ones = [self.factors([1; 8]); N];
        match bits {
            ..=4 => add_products::<N, R, 8, 8>(&mut sums, codes, x, 0, ones),
            5 => add_products::<N, R, 8, 4>(&mut sums, codes, x, 0, ones),
            _ => add_products::<N, R, 8, 2>(&mut sums, codes, x, 0, ones),
        }
        sums
    }
    #[inline(always)]
    fn dot_halves<const N: usize, const R: usize>(
        self,
        bits: u32,
        codes: [&[Self::Codes; 8]; N],
        x: [&[i8; 32]; R],
        factors: [[Self::Factors; 2]; N],
    ) -> [[Self::Sums; R]; N] {
        debug_assert!(bits <= 6, "more do not fit");
        let mut sums = [[self.zero_sums(); R]; N];
        for half in 0..2 {
            let mut of_half = [factors[0][half]; N];
            for n in 0..N {
                of_half[n] = factors[n][half];
            }
            if bits <= 5 {
                add_products::<N, R, 4, 4>(&mut sums, codes, x, half * 4, of_half);
            } else {
                add_products::<N, R, 4, 2>(&mut sums, codes, x, half * 4, of_half);
            }
        }
        sums
    }

    #[inline(always)]
    fn factors(self, x: [u8; 8]) -> Self::Factors {
        unsafe {
            let x = _mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast()));
            _mm256_blend_epi16::<0b1010_1010>(x, _mm256_slli_epi32::<16>(x))
        }
    }
    #[inline(always)]
    fn pairs(self, by: i16, [a, b]: [Self::Factors; 2]) -> Self::Pairs {
        unsafe {
            let both = _mm256_blend_epi16::<0b1010_1010>(a, b);
            _mm256_mullo_epi16(both, _mm256_set1_epi16(by))
        }
    }
}
