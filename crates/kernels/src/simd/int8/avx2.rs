//! x86-64 with AVX2: pairs of products in 16 bits, added there as long as they fit.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all: an `Avx2` exists only where `detected` saw the features, and every pointer comes from a reference to an array of the vector's size"
)]

use std::arch::x86_64::*;

use super::{Int8, Operand, Steps, four};
use crate::simd::avx2::Avx2;

/// Four neighbouring integers of `x` in every lane.
#[inline(always)]
fn fours(x: &[i8; 32], step: usize) -> __m256i {
    unsafe { _mm256_set1_epi32(four(x, step)) }
}

/// Adds the products of `PER` steps from `first` to sums.
///
/// They are added in 16 bits: `PER * 2 * 127 * largest code` must be below 2^15.
#[inline(always)]
fn add_products<C: Steps<Avx2>, const V: usize, const T: usize, const PER: usize>(
    simd: Avx2,
    sums: &mut [[[__m256i; 2]; T]; V],
    codes: &C,
    x: [Operand<'_>; T],
    first: usize,
) {
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut pairs = [[[_mm256_setzero_si256(); 2]; T]; V];
        super::each_step!(step in first, PER => {
            for v in 0..V {
                let codes = codes.codes(simd, v, step);
                for t in 0..T {
                    let x = fours(x[t].all, step);
                    for i in 0..2 {
                        let products = _mm256_maddubs_epi16(codes[i], x);
                        pairs[v][t][i] = _mm256_add_epi16(pairs[v][t][i], products);
                    }
                }
            }
        });
        for v in 0..V {
            for t in 0..T {
                for i in 0..2 {
                    let products = _mm256_madd_epi16(pairs[v][t][i], ones);
                    sums[v][t][i] = _mm256_add_epi32(sums[v][t][i], products);
                }
            }
        }
    }
}

/// Adds the products of one step of signed codes to sums.
///
/// |x| * code where x >= 0, |x| * !code = -|x| * code - |x| elsewhere: two are at most 2 * 127 * 128, which fits, and
/// sums begin with what they lack.
#[inline(always)]
fn add_signed<C: Steps<Avx2>, const V: usize, const T: usize>(
    simd: Avx2,
    sums: &mut [[[__m256i; 2]; T]; V],
    codes: &C,
    x: [Operand<'_>; T],
    step: usize,
) {
    unsafe {
        let ones = _mm256_set1_epi16(1);
        for v in 0..V {
            let codes = codes.codes(simd, v, step);
            for t in 0..T {
                let size = fours(&x[t].apart.sizes, step);
                let sign = fours(&x[t].apart.signs, step);
                for i in 0..2 {
                    let products = _mm256_maddubs_epi16(size, _mm256_xor_si256(codes[i], sign));
                    let products = _mm256_madd_epi16(products, ones);
                    sums[v][t][i] = _mm256_add_epi32(sums[v][t][i], products);
                }
            }
        }
    }
}

impl Int8 for Avx2 {
    type Codes = [__m256i; 2];
    type Sums = [__m256i; 2];
    type F = [__m256; 2];
    const WIDE: bool = false;
    const COUNTS_BITS: bool = true;

    super::avx2_operations!();

    #[inline(always)]
    fn signed(self, x: Self::Codes) -> Self::Codes {
        x
    }
    #[inline(always)]
    fn dot<C: Steps<Self>, const COUNT: usize, const V: usize, const T: usize>(
        self,
        bits: u32,
        codes: &C,
        from: usize,
        x: [Operand<'_>; T],
        first: [i32; T],
    ) -> [[Self::Sums; T]; V] {
        unsafe {
            let mut sums = [[[_mm256_setzero_si256(); 2]; T]; V];
            for v in 0..V {
                for t in 0..T {
                    let lacks = if bits == 8 { x[t].apart.negative } else { 0 };
                    sums[v][t] = [_mm256_set1_epi32(first[t] + lacks); 2];
                }
            }
            match bits {
                ..=4 => add_products::<C, V, T, COUNT>(self, &mut sums, codes, x, from),
                5 => {
                    super::each_step!(i in 0, COUNT / 4 => {
                        add_products::<C, V, T, 4>(self, &mut sums, codes, x, from + 4 * i);
                    });
                }
                6 => {
                    super::each_step!(i in 0, COUNT / 2 => {
                        add_products::<C, V, T, 2>(self, &mut sums, codes, x, from + 2 * i);
                    });
                }
                _ => {
                    debug_assert_eq!(COUNT, 8, "the sum of negative x is that of all steps");
                    super::each_step!(step in from, COUNT => {
                        add_signed::<C, V, T>(self, &mut sums, codes, x, step);
                    });
                }
            }
            sums
        }
    }
}
