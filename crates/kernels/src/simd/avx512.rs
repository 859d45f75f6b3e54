//! Sixteen lanes: x86-64 with AVX-512F.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all: an `Avx512` exists only where `detected` saw the features, and every pointer comes from a reference to an array of the vector's size"
)]

use std::arch::x86_64::*;

use super::avx2::Avx2;
use super::{Simd, Step};

/// Proof that the processor has AVX-512F, AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn present() -> bool {
        Avx2::present() && is_x86_feature_detected!("avx512f")
    }
}

super::detected!(Avx512, "avx512");

impl Simd for Avx512 {
    type F = __m512;
    type Chunk = [f32; 16];
    type Half = [u16; 16];
    type Codes = [i8; 16];
    const LANES: usize = 16;
    const ZERO: [f32; 16] = [0.0; 16];

    super::split_by_arrays!(16);

    #[inline(always)]
    fn apart(self, step: impl Step<Self>) {
        #[target_feature(enable = "avx512f,avx2,fma,f16c")]
        #[inline(never)]
        fn wide(simd: Avx512, step: impl Step<Avx512>) {
            step.run(simd);
        }
        unsafe { wide(self, step) }
    }
    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // A prefetch never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, x: &Self::Chunk) -> Self::F {
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }
    #[inline(always)]
    fn load_bf16(self, x: &Self::Half) -> Self::F {
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    fn load_f16(self, x: &Self::Half) -> Self::F {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }
    #[inline(always)]
    fn load_i8(self, x: &Self::Codes) -> Self::F {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut Self::Chunk) {
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    fn exp2i(self, n: Self::F) -> Self::F {
        unsafe {
            let n = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(n))
        }
    }
    #[inline(always)]
    fn reduce4(self, [a, b, c, d]: [Self::F; 4]) -> [f32; 4] {
        unsafe {
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let lo = _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd);
            let hi = _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let sum = _mm512_add_ps(lo, hi);
            let sum = _mm_add_ps(
                _mm_add_ps(_mm512_extractf32x4_ps::<0>(sum), _mm512_extractf32x4_ps::<1>(sum)),
                _mm_add_ps(_mm512_extractf32x4_ps::<2>(sum), _mm512_extractf32x4_ps::<3>(sum)),
            );
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), sum);
            out
        }
    }
}
