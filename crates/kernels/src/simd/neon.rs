//! Four lanes: 64-bit Arm, where NEON is always there.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all: NEON is part of the aarch64 target, and every pointer comes from a reference to an array of the vector's size"
)]

use std::arch::aarch64::*;

use super::{Simd, Step};

#[derive(Clone, Copy)]
pub(crate) struct Neon;

impl Simd for Neon {
    type F = float32x4_t;
    type Chunk = [f32; 4];
    type Half = [u16; 4];
    type Codes = [i8; 4];
    const LANES: usize = 4;
    const ZERO: [f32; 4] = [0.0; 4];

    super::split_by_arrays!(4);

    #[inline(never)]
    fn apart(self, step: impl Step<Self>) {
        step.run(self);
    }
    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // The instruction that the unstable intrinsic stands for; it never faults.
        unsafe {
            std::arch::asm!("prfm pldl2keep, [{0}]", in(reg) address, options(nostack, readonly, preserves_flags));
        }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    fn load(self, x: &Self::Chunk) -> Self::F {
        unsafe { vld1q_f32(x.as_ptr()) }
    }
    #[inline(always)]
    fn load_bf16(self, x: &Self::Half) -> Self::F {
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(x.as_ptr()))) }
    }
    #[inline(always)]
    fn load_f16(self, x: &Self::Half) -> Self::F {
        // Widened by integer arithmetic: exponent and mantissa shifted into place, the bias mended
        // by a multiplication that is exact and also normalises subnormals; then infinities and NaN.
        unsafe {
            let bits = vmovl_u16(vld1_u16(x.as_ptr()));
            let magnitude = vandq_u32(bits, vdupq_n_u32(0x7fff));
            let sign = vshlq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000)));
            let bias = vdupq_n_f32(f32::from_bits((254 - 15) << 23));
            let value = vmulq_f32(vreinterpretq_f32_u32(vshlq_n_u32::<13>(magnitude)), bias);
            let special = vcgeq_u32(magnitude, vdupq_n_u32(0x7c00));
            let exponent = vandq_u32(special, vdupq_n_u32(0x7f80_0000));
            vreinterpretq_f32_u32(vorrq_u32(
                vorrq_u32(vreinterpretq_u32_f32(value), exponent),
                sign,
            ))
        }
    }
    #[inline(always)]
    fn load_i8(self, x: &Self::Codes) -> Self::F {
        // Four bytes at once, then twice as wide, and again.
        unsafe {
            let codes = vcreate_s8(u64::from(u32::from_ne_bytes(x.map(i8::cast_unsigned))));
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(codes))))
        }
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut Self::Chunk) {
        unsafe { vst1q_f32(to.as_mut_ptr(), x) }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        unsafe { vrndnq_f32(a) }
    }
    #[inline(always)]
    fn exp2i(self, n: Self::F) -> Self::F {
        unsafe {
            let n = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(n))
        }
    }
    #[inline(always)]
    fn reduce4(self, [a, b, c, d]: [Self::F; 4]) -> [f32; 4] {
        unsafe {
            let sum = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
            let mut out = [0.0; 4];
            vst1q_f32(out.as_mut_ptr(), sum);
            out
        }
    }
}
