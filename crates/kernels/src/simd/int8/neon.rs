//! 64-bit Arm: sums of products in steps of 16 bits, or in one instruction where the processor has dot
//! products.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all: NEON is part of the aarch64 target, a `NeonDot` exists only where `detected` saw the feature, and every pointer comes from a reference to an array of the size that is read"
)]

use std::arch::aarch64::*;

use super::{Int8, Operand};
use crate::simd::neon::Neon;

/// Proof that the processor has dot products.
#[derive(Clone, Copy)]
pub(crate) struct NeonDot(());

impl NeonDot {
    pub(crate) fn present() -> bool {
        std::arch::is_aarch64_feature_detected!("dotprod")
    }

    /// # Panics
    ///
    /// If the processor lacks the feature.
    #[inline(always)]
    pub(crate) fn detected() -> Self {
        assert!(Self::present(), "level: dotprod on a processor without it");
        Self(())
    }
}

/// Four neighbouring bytes of `x` in every lane.
#[inline(always)]
fn four(x: &[i8; 32], step: usize) -> int8x16_t {
    let x: &[i8; 4] = &x.as_chunks().0[step];
    let [a, b, c, d] = x.map(i8::cast_unsigned);
    unsafe { vreinterpretq_s8_u32(vdupq_n_u32(u32::from_le_bytes([a, b, c, d]))) }
}

/// Sums under way: as the instruction set keeps them until they are needed.
trait Products: Copy {
    type Under: Copy;
    fn zero(self) -> Self::Under;
    /// Adds the products of one vector of codes with four `x` in every lane.
    fn add(self, sums: Self::Under, codes: [int8x16_t; 2], x: int8x16_t) -> Self::Under;
    fn finish(self, sums: Self::Under) -> [int32x4_t; 2];
}

impl Products for Neon {
    /// Two sums for each lane.
    type Under = [int32x4_t; 4];

    #[inline(always)]
    fn zero(self) -> Self::Under {
        unsafe { [vdupq_n_s32(0); 4] }
    }
    #[inline(always)]
    fn add(self, mut sums: Self::Under, codes: [int8x16_t; 2], x: int8x16_t) -> Self::Under {
        unsafe {
            for i in 0..2 {
                let low = vmull_s8(vget_low_s8(codes[i]), vget_low_s8(x));
                let high = vmull_high_s8(codes[i], x);
                sums[2 * i] = vpadalq_s16(sums[2 * i], low);
                sums[2 * i + 1] = vpadalq_s16(sums[2 * i + 1], high);
            }
            sums
        }
    }
    #[inline(always)]
    fn finish(self, [a, b, c, d]: Self::Under) -> [int32x4_t; 2] {
        unsafe { [vpaddq_s32(a, b), vpaddq_s32(c, d)] }
    }
}

impl Products for NeonDot {
    type Under = [int32x4_t; 2];

    #[inline(always)]
    fn zero(self) -> Self::Under {
        unsafe { [vdupq_n_s32(0); 2] }
    }
    #[inline(always)]
    fn add(self, [mut a, mut b]: Self::Under, codes: [int8x16_t; 2], x: int8x16_t) -> Self::Under {
        // The instruction that the unstable intrinsic `vdotq_s32` stands for.
        unsafe {
            std::arch::asm!(
                "sdot {a:v}.4s, {c:v}.16b, {x:v}.16b",
                "sdot {b:v}.4s, {d:v}.16b, {x:v}.16b",
                a = inout(vreg) a,
                b = inout(vreg) b,
                c = in(vreg) codes[0],
                d = in(vreg) codes[1],
                x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        [a, b]
    }
    #[inline(always)]
    fn finish(self, sums: Self::Under) -> [int32x4_t; 2] {
        sums
    }
}

macro_rules! neon {
    ($name:ident) => {
        impl Int8 for $name {
            type Codes = [int8x16_t; 2];
            type Sums = [int32x4_t; 2];
            type F = [float32x4_t; 2];
            type Factors = [int32x4_t; 2];
            type Pairs = [[int32x4_t; 2]; 2];
            const SIGNED_OFFSET: i32 = 0;

            #[inline(always)]
            fn load(self, x: &[u8; 32]) -> Self::Codes {
                let (x, _) = x.as_chunks::<16>();
                unsafe {
                    [
                        vreinterpretq_s8_u8(vld1q_u8(x[0].as_ptr())),
                        vreinterpretq_s8_u8(vld1q_u8(x[1].as_ptr())),
                    ]
                }
            }
            #[inline(always)]
            fn right(self, mut x: Self::Codes, by: u32, mask: u8) -> Self::Codes {
                unsafe {
                    for x in &mut x {
                        let bits = vshlq_u8(vreinterpretq_u8_s8(*x), vdupq_n_s8(-(by as i8)));
                        *x = vreinterpretq_s8_u8(vandq_u8(bits, vdupq_n_u8(mask)));
                    }
                }
                x
            }
            #[inline(always)]
            fn left(self, mut x: Self::Codes, by: u32, mask: u8) -> Self::Codes {
                unsafe {
                    for x in &mut x {
                        let bits = vshlq_u8(vreinterpretq_u8_s8(*x), vdupq_n_s8(by as i8));
                        *x = vreinterpretq_s8_u8(vandq_u8(bits, vdupq_n_u8(mask)));
                    }
                }
                x
            }
            #[inline(always)]
            fn or(self, a: Self::Codes, b: Self::Codes) -> Self::Codes {
                unsafe { [vorrq_s8(a[0], b[0]), vorrq_s8(a[1], b[1])] }
            }
            #[inline(always)]
            fn lookup(self, table: &[i8; 16], x: Self::Codes) -> Self::Codes {
                unsafe {
                    let table = vld1q_s8(table.as_ptr());
                    [
                        vqtbl1q_s8(table, vreinterpretq_u8_s8(x[0])),
                        vqtbl1q_s8(table, vreinterpretq_u8_s8(x[1])),
                    ]
                }
            }
            #[inline(always)]
            fn store(self, x: Self::Codes, to: &mut [u8; 32]) {
                let (to, _) = to.as_chunks_mut::<16>();
                unsafe {
                    vst1q_u8(to[0].as_mut_ptr(), vreinterpretq_u8_s8(x[0]));
                    vst1q_u8(to[1].as_mut_ptr(), vreinterpretq_u8_s8(x[1]));
                }
            }

            #[inline(always)]
            fn dot_signed<const N: usize, const R: usize>(
                self,
                codes: [&[[u8; 32]; 8]; N],
                x: [Operand<'_>; R],
            ) -> [[Self::Sums; R]; N] {
                let mut sums = [[self.zero_sums(); R]; N];
                for n in 0..N {
                    // The sums of one cell fill up to half of the registers.
                    let mut under = [self.zero(); R];
                    for step in 0..8 {
                        let codes = self.load(&codes[n][step]);
                        for r in 0..R {
                            under[r] = self.add(under[r], codes, four(x[r].all, step));
                        }
                    }
                    for r in 0..R {
                        sums[n][r] = self.finish(under[r]);
                    }
                }
                sums
            }
            #[inline(always)]
            fn dot<const N: usize, const R: usize>(
                self,
                _bits: u32,
                codes: [&[Self::Codes; 8]; N],
                x: [&[i8; 32]; R],
            ) -> [[Self::Sums; R]; N] {
                let mut under = [[self.zero(); R]; N];
                for step in 0..8 {
                    for n in 0..N {
                        for r in 0..R {
                            under[n][r] = self.add(under[n][r], codes[n][step], four(x[r], step));
                        }
                    }
                }
                let mut sums = [[self.zero_sums(); R]; N];
                for n in 0..N {
                    for r in 0..R {
                        sums[n][r] = self.finish(under[n][r]);
                    }
                }
                sums
            }
            #[inline(always)]
            fn dot_halves<const N: usize, const R: usize>(
                self,
                _bits: u32,
                codes: [&[Self::Codes; 8]; N],
                x: [&[i8; 32]; R],
                factors: [[Self::Factors; 2]; N],
            ) -> [[Self::Sums; R]; N] {
                let mut sums = [[self.zero_sums(); R]; N];
                for half in 0..2 {
                    for n in 0..N {
                        for r in 0..R {
                            let mut under = self.zero();
                            for step in half * 4..half * 4 + 4 {
                                under = self.add(under, codes[n][step], four(x[r], step));
                            }
                            let part = self.finish(under);
                            for i in 0..2 {
                                let (sum, factors) = (&mut sums[n][r][i], factors[n][half][i]);
                                *sum = unsafe { vmlaq_s32(*sum, part[i], factors) };
                            }
                        }
                    }
                }
                sums
            }

            #[inline(always)]
            fn factors(self, x: [u8; 8]) -> Self::Factors {
                unsafe {
                    let x = vmovl_s8(vreinterpret_s8_u8(vld1_u8(x.as_ptr())));
                    [vmovl_s16(vget_low_s16(x)), vmovl_high_s16(x)]
                }
            }
            #[inline(always)]
            fn pairs(self, by: i16, mut factors: [Self::Factors; 2]) -> Self::Pairs {
                for factors in &mut factors {
                    for factors in factors {
                        *factors = unsafe { vmulq_n_s32(*factors, i32::from(by)) };
                    }
                }
                factors
            }
            #[inline(always)]
            fn add_pairs(
                self,
                mut sums: Self::Sums,
                pairs: Self::Pairs,
                x: [i16; 2],
            ) -> Self::Sums {
                for half in 0..2 {
                    for i in 0..2 {
                        let pairs = pairs[half][i];
                        sums[i] = unsafe { vmlaq_n_s32(sums[i], pairs, i32::from(x[half])) };
                    }
                }
                sums
            }
            #[inline(always)]
            fn zero_sums(self) -> Self::Sums {
                unsafe { [vdupq_n_s32(0); 2] }
            }

            #[inline(always)]
            fn to_float(self, x: Self::Sums) -> Self::F {
                unsafe { [vcvtq_f32_s32(x[0]), vcvtq_f32_s32(x[1])] }
            }
            #[inline(always)]
            fn load_f16(self, x: &[u8; 16]) -> Self::F {
                let (x, _) = x.as_chunks::<2>();
                let mut halves = [[0; 4]; 2];
                for lane in 0..8 {
                    halves[lane / 4][lane % 4] = u16::from_le_bytes(x[lane]);
                }
                // Both traits of `Neon` have an operation of this name.
                [
                    crate::simd::Simd::load_f16(Neon, &halves[0]),
                    crate::simd::Simd::load_f16(Neon, &halves[1]),
                ]
            }
            #[inline(always)]
            fn load_i8(self, x: [u8; 8]) -> Self::F {
                self.to_float(self.factors(x))
            }
            #[inline(always)]
            fn load_float(self, x: &[f32; 8]) -> Self::F {
                let (x, _) = x.as_chunks::<4>();
                unsafe { [vld1q_f32(x[0].as_ptr()), vld1q_f32(x[1].as_ptr())] }
            }
            #[inline(always)]
            fn store_float(self, x: Self::F, to: &mut [f32; 8]) {
                let (to, _) = to.as_chunks_mut::<4>();
                unsafe {
                    vst1q_f32(to[0].as_mut_ptr(), x[0]);
                    vst1q_f32(to[1].as_mut_ptr(), x[1]);
                }
            }
            #[inline(always)]
            fn splat(self, x: f32) -> Self::F {
                unsafe { [vdupq_n_f32(x); 2] }
            }
            #[inline(always)]
            fn mul(self, a: Self::F, b: Self::F) -> Self::F {
                unsafe { [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])] }
            }
            #[inline(always)]
            fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
                unsafe { [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])] }
            }
        }
    };
}
neon!(Neon);
neon!(NeonDot);
