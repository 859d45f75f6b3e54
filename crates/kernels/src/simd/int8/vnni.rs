//! x86-64 with AVX-VNNI or AVX-512 VNNI: four unsigned by signed products added in one instruction.
//!
//! Signed codes are moved by 128 to be unsigned, and the sums of the activations make up for it.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all: the types exist only where `detected` saw the features, and every pointer comes from a reference to an array of the vector's size"
)]

use std::arch::x86_64::*;

use super::avx2::four;
use super::{Int8, Operand};
use crate::simd::avx2::Avx2;

/// Proof that the processor has AVX-VNNI, AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct AvxVnni(());

/// Proof that the processor has AVX-512 VNNI and VL, AVX2, FMA and F16C.
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
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx512vl")
    }
}

macro_rules! vnni {
    ($name:ident, $dpbusd:ident) => {
        impl $name {
            /// # Panics
            ///
            /// If the processor lacks one of the features.
            #[inline(always)]
            pub(crate) fn detected() -> Self {
                assert!(Self::present(), "level: vnni on a processor without it");
                Self(())
            }
        }

        impl Int8 for $name {
            type Codes = __m256i;
            type Sums = __m256i;
            type F = __m256;
            /// 8 x i32.
            type Factors = __m256i;
            /// 8 x 2 x i16.
            type Pairs = __m256i;
            const SIGNED_OFFSET: i32 = 128;

            super::avx2_operations!();

            #[inline(always)]
            fn dot_signed<const N: usize, const R: usize>(
                self,
                codes: [&[[u8; 32]; 8]; N],
                x: [Operand<'_>; R],
            ) -> [[Self::Sums; R]; N] {
                unsafe {
                    let mut sums = [[_mm256_setzero_si256(); R]; N];
                    for step in 0..8 {
                        for n in 0..N {
                            let code = self.load(&codes[n][step]);
                            let code = _mm256_xor_si256(code, _mm256_set1_epi8(-128));
                            for r in 0..R {
                                sums[n][r] = $dpbusd(sums[n][r], code, four(x[r].all, step));
                            }
                        }
                    }
                    sums
                }
            }
            #[inline(always)]
            fn dot<const N: usize, const R: usize>(
                self,
                _bits: u32,
                codes: [&[Self::Codes; 8]; N],
                x: [&[i8; 32]; R],
            ) -> [[Self::Sums; R]; N] {
                unsafe {
                    let mut sums = [[_mm256_setzero_si256(); R]; N];
                    for step in 0..8 {
                        for n in 0..N {
                            for r in 0..R {
                                let x = four(x[r], step);
                                sums[n][r] = $dpbusd(sums[n][r], codes[n][step], x);
                            }
                        }
                    }
                    sums
                }
            }
            #[inline(always)]
            fn dot_halves<const N: usize, const R: usize>(
                self,
                _bits: u32,
                codes: [&[Self::Codes; 8]; N],
                x: [&[i8; 32]; R],
                factors: [[Self::Factors; 2]; N],
            ) -> [[Self::Sums; R]; N] {
                unsafe {
                    let mut sums = [[_mm256_setzero_si256(); R]; N];
                    for half in 0..2 {
                        let mut part = [[_mm256_setzero_si256(); R]; N];
                        for step in half * 4..half * 4 + 4 {
                            for n in 0..N {
                                for r in 0..R {
                                    let x = four(x[r], step);
                                    part[n][r] = $dpbusd(part[n][r], codes[n][step], x);
                                }
                            }
                        }
                        for n in 0..N {
                            for r in 0..R {
                                let scaled = _mm256_mullo_epi32(part[n][r], factors[n][half]);
                                sums[n][r] = _mm256_add_epi32(sums[n][r], scaled);
                            }
                        }
                    }
                    sums
                }
            }

            #[inline(always)]
            fn factors(self, x: [u8; 8]) -> Self::Factors {
                unsafe { _mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast())) }
            }
            #[inline(always)]
            fn pairs(self, by: i16, [a, b]: [Self::Factors; 2]) -> Self::Pairs {
                unsafe {
                    let b = _mm256_slli_epi32::<16>(b);
                    let both = _mm256_blend_epi16::<0b1010_1010>(a, b);
                    _mm256_mullo_epi16(both, _mm256_set1_epi16(by))
                }
            }
        }
    };
}
vnni!(AvxVnni, _mm256_dpbusd_avx_epi32);
vnni!(Avx512Vnni, _mm256_dpbusd_epi32);
