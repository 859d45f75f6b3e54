//! x86-64 with AVX-VNNI or AVX-512 VNNI: four unsigned by signed products added in one instruction.
//!
//! Signed codes are moved by 128 to be unsigned, and the sums of the activations make up for it.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all: the types exist only where `detected` saw the features, and every pointer comes from a reference to an array of the vector's size"
)]

use std::arch::x86_64::*;

use super::{Int8, Operand, Steps, TERM, four};
use crate::simd::avx2::Avx2;

/// Proof that the processor has AVX-VNNI, AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct AvxVnni(());

/// Proof that the processor has AVX-512 F, BW, VL and VNNI, AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Vnni(());

impl AvxVnni {
    pub(crate) fn present() -> bool {
        Avx2::present() && is_x86_feature_detected!("avxvnni")
    }
}

impl Avx512Vnni {
    pub(crate) fn present() -> bool {
        Avx2::present()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
    }
}

crate::simd::detected!(AvxVnni, "vnni");
crate::simd::detected!(Avx512Vnni, "vnni");

impl Int8 for AvxVnni {
    type Codes = [__m256i; 2];
    type Sums = [__m256i; 2];
    type F = [__m256; 2];
    const WIDE: bool = false;
    const COUNTS_BITS: bool = false;

    super::avx2_operations!();

    #[inline(always)]
    fn signed(self, x: Self::Codes) -> Self::Codes {
        x.map(|x| unsafe { _mm256_xor_si256(x, _mm256_set1_epi8(-128)) })
    }
    #[inline(always)]
    fn dot<C: Steps<Self>, const COUNT: usize, const V: usize, const T: usize>(
        self,
        _bits: u32,
        codes: &C,
        from: usize,
        x: [Operand<'_>; T],
        first: [i32; T],
    ) -> [[Self::Sums; T]; V] {
        unsafe {
            let mut sums = [[[_mm256_setzero_si256(); 2]; T]; V];
            for v in 0..V {
                for t in 0..T {
                    sums[v][t] = [_mm256_set1_epi32(first[t]); 2];
                }
            }
            super::each_step!(step in from, COUNT => {
                for v in 0..V {
                    let codes = codes.codes(self, v, step);
                    for t in 0..T {
                        let x = _mm256_set1_epi32(four(x[t].all, step));
                        for i in 0..2 {
                            sums[v][t][i] = _mm256_dpbusd_avx_epi32(sums[v][t][i], codes[i], x);
                        }
                    }
                }
            });
            sums
        }
    }
}

impl Int8 for Avx512Vnni {
    type Codes = __m512i;
    type Sums = __m512i;
    type F = __m512;
    const WIDE: bool = true;
    const COUNTS_BITS: bool = false;

    #[inline(always)]
    fn load(self, x: &[u8; 64]) -> Self::Codes {
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }
    #[inline(always)]
    fn store(self, x: Self::Codes, to: &mut [u8; 64]) {
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), x) }
    }
    #[inline(always)]
    fn right(self, x: Self::Codes, by: u32, mask: u8) -> Self::Codes {
        unsafe {
            let x = _mm512_srl_epi16(x, _mm_cvtsi32_si128(by.cast_signed()));
            _mm512_and_si512(x, _mm512_set1_epi8(mask.cast_signed()))
        }
    }
    #[inline(always)]
    fn left(self, x: Self::Codes, by: u32, mask: u8) -> Self::Codes {
        unsafe {
            let x = _mm512_sll_epi16(x, _mm_cvtsi32_si128(by.cast_signed()));
            _mm512_and_si512(x, _mm512_set1_epi8(mask.cast_signed()))
        }
    }
    #[inline(always)]
    fn or(self, a: Self::Codes, b: Self::Codes) -> Self::Codes {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    fn lookup(self, table: &[i8; 16], x: Self::Codes) -> Self::Codes {
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, x)
        }
    }
    #[inline(always)]
    fn signed(self, x: Self::Codes) -> Self::Codes {
        unsafe { _mm512_xor_si512(x, _mm512_set1_epi8(-128)) }
    }
    #[inline(always)]
    fn dot<C: Steps<Self>, const COUNT: usize, const V: usize, const T: usize>(
        self,
        _bits: u32,
        codes: &C,
        from: usize,
        x: [Operand<'_>; T],
        first: [i32; T],
    ) -> [[Self::Sums; T]; V] {
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); T]; V];
            for v in 0..V {
                for t in 0..T {
                    sums[v][t] = _mm512_set1_epi32(first[t]);
                }
            }
            super::each_step!(step in from, COUNT => {
                let mut four_of = [_mm512_setzero_si512(); T];
                for t in 0..T {
                    four_of[t] = _mm512_set1_epi32(four(x[t].all, step));
                }
                for v in 0..V {
                    let codes = codes.codes(self, v, step);
                    for t in 0..T {
                        sums[v][t] = _mm512_dpbusd_epi32(sums[v][t], codes, four_of[t]);
                    }
                }
            });
            sums
        }
    }
    #[inline(always)]
    fn join(self, high: Self::Sums, low: Self::Sums) -> Self::Sums {
        unsafe { _mm512_add_epi32(_mm512_mullo_epi32(high, _mm512_set1_epi32(TERM)), low) }
    }

    #[inline(always)]
    fn to_float(self, x: Self::Sums) -> Self::F {
        unsafe { _mm512_cvtepi32_ps(x) }
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> Self::F {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; 16]) -> Self::F {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn load_float(self, x: &[f32; 16]) -> Self::F {
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }
    #[inline(always)]
    fn store_float(self, x: Self::F, to: &mut [f32; 16]) {
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
}
