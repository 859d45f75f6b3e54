//! Eight lanes: x86-64 with AVX2, FMA and F16C.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all: an `Avx2` exists only where `detected` saw the features, and every pointer comes from a reference to an array of the vector's size"
)]

use std::arch::x86_64::*;

use super::{Simd, Step};

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn present() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }
}

super::detected!(Avx2, "avx2");

impl Simd for Avx2 {
    type F = __m256;
    type Chunk = [f32; 8];
    type Half = [u16; 8];
    type Codes = [i8; 8];
    const LANES: usize = 8;
    const ZERO: [f32; 8] = [0.0; 8];

    super::split_by_arrays!(8);

    #[inline(always)]
    fn apart(self, step: impl Step<Self>) {
        #[target_feature(enable = "avx2,fma,f16c")]
        #[inline(never)]
        fn wide(simd: Avx2, step: impl Step<Avx2>) {
            step.run(simd);
        }
        unsafe { wide(self, step) }
    }
    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // A prefetch never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, x: &Self::Chunk) -> Self::F {
        unsafe { _mm256_loadu_ps(x.as_ptr()) }
    }
    #[inline(always)]
    fn load_bf16(self, x: &Self::Half) -> Self::F {
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    fn load_f16(self, x: &Self::Half) -> Self::F {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())) }
    }
    #[inline(always)]
    fn load_i8(self, x: &Self::Codes) -> Self::F {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut Self::Chunk) {
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), x) }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    fn exp2i(self, n: Self::F) -> Self::F {
        unsafe {
            let n = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n))
        }
    }
    #[inline(always)]
    fn reduce4(self, [a, b, c, d]: [Self::F; 4]) -> [f32; 4] {
        unsafe {
            let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            // a c-pair of 128-bit halves: a0+a2, b0+b2, a1+a3, b1+b3
            let lo = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
            let hi = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let sum = _mm256_add_ps(lo, hi);
            let sum = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps::<1>(sum));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), sum);
            out
        }
    }
}
