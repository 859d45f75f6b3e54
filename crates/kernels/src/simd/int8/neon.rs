//! 64-bit Arm: sums of products in steps of 16 bits, or in one instruction where the processor has dot
//! products.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all: NEON is part of the aarch64 target, a `NeonDot` exists only where `detected` saw the feature, and every pointer comes from a reference to an array of the size that is read"
)]

use std::arch::aarch64::*;

use super::{Int8, Operand, Steps, TERM, four};
use crate::simd::neon::Neon;

/// Proof that the processor has dot products.
#[derive(Clone, Copy)]
pub(crate) struct NeonDot(());

impl NeonDot {
    pub(crate) fn present() -> bool {
        std::arch::is_aarch64_feature_detected!("dotprod")
    }
}

crate::simd::detected!(NeonDot, "dotprod");

/// Four neighbouring integers of `x` in every lane.
#[inline(always)]
fn fours(x: &[i8; 32], step: usize) -> int8x16_t {
    unsafe { vreinterpretq_s8_s32(vdupq_n_s32(four(x, step))) }
}

/// Sums under way: as the instruction set keeps them until they are needed.
trait Products: Copy {
    type Under: Copy;
    fn zero(self) -> Self::Under;
    /// Adds the products of four outputs' codes with four `x` in every lane.
    fn add(self, sums: Self::Under, codes: int8x16_t, x: int8x16_t) -> Self::Under;
    fn finish(self, sums: Self::Under) -> int32x4_t;
}

impl Products for Neon {
    /// Two sums for each lane.
    type Under = [int32x4_t; 2];

    #[inline(always)]
    fn zero(self) -> Self::Under {
        unsafe { [vdupq_n_s32(0); 2] }
    }
    #[inline(always)]
    fn add(self, [a, b]: Self::Under, codes: int8x16_t, x: int8x16_t) -> Self::Under {
        unsafe {
            let low = vmull_s8(vget_low_s8(codes), vget_low_s8(x));
            let high = vmull_high_s8(codes, x);
            [vpadalq_s16(a, low), vpadalq_s16(b, high)]
        }
    }
    #[inline(always)]
    fn finish(self, [a, b]: Self::Under) -> int32x4_t {
        unsafe { vpaddq_s32(a, b) }
    }
}

impl Products for NeonDot {
    type Under = int32x4_t;

    #[inline(always)]
    fn zero(self) -> Self::Under {
        unsafe { vdupq_n_s32(0) }
    }
    #[inline(always)]
    fn add(self, mut sums: Self::Under, codes: int8x16_t, x: int8x16_t) -> Self::Under {
        // The instruction that the unstable intrinsic `vdotq_s32` stands for.
        unsafe {
            std::arch::asm!(
                "sdot {sums:v}.4s, {codes:v}.16b, {x:v}.16b",
                sums = inout(vreg) sums,
                codes = in(vreg) codes,
                x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sums
    }
    #[inline(always)]
    fn finish(self, sums: Self::Under) -> int32x4_t {
        sums
    }
}

macro_rules! neon {
    ($name:ident) => {
        impl Int8 for $name {
            type Codes = [int8x16_t; 4];
            type Sums = [int32x4_t; 4];
            type F = [float32x4_t; 4];
            const WIDE: bool = false;
            const COUNTS_BITS: bool = false;

            #[inline(always)]
            fn load(self, x: &[u8; 64]) -> Self::Codes {
                let (x, _) = x.as_chunks::<16>();
                [0, 1, 2, 3].map(|i| unsafe { vreinterpretq_s8_u8(vld1q_u8(x[i].as_ptr())) })
            }
            #[inline(always)]
            fn store(self, x: Self::Codes, to: &mut [u8; 64]) {
                let (to, _) = to.as_chunks_mut::<16>();
                for i in 0..4 {
                    unsafe { vst1q_u8(to[i].as_mut_ptr(), vreinterpretq_u8_s8(x[i])) }
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
            fn or(self, mut a: Self::Codes, b: Self::Codes) -> Self::Codes {
                for i in 0..4 {
                    a[i] = unsafe { vorrq_s8(a[i], b[i]) };
                }
                a
            }
            #[inline(always)]
            fn lookup(self, table: &[i8; 16], x: Self::Codes) -> Self::Codes {
                let table = unsafe { vld1q_s8(table.as_ptr()) };
                x.map(|x| unsafe { vqtbl1q_s8(table, vreinterpretq_u8_s8(x)) })
            }
            #[inline(always)]
            fn signed(self, x: Self::Codes) -> Self::Codes {
                x
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
                let mut under = [[[self.zero(); 4]; T]; V];
                for step in from..from + COUNT {
                    for v in 0..V {
                        let codes = codes.codes(self, v, step);
                        for t in 0..T {
                            let x = fours(x[t].all, step);
                            for i in 0..4 {
                                under[v][t][i] = self.add(under[v][t][i], codes[i], x);
                            }
                        }
                    }
                }
                let mut sums = [[unsafe { [vdupq_n_s32(0); 4] }; T]; V];
                for v in 0..V {
                    for t in 0..T {
                        for i in 0..4 {
                            let all = self.finish(under[v][t][i]);
                            sums[v][t][i] = unsafe { vaddq_s32(all, vdupq_n_s32(first[t])) };
                        }
                    }
                }
                sums
            }
            #[inline(always)]
            fn join(self, high: Self::Sums, mut low: Self::Sums) -> Self::Sums {
                for i in 0..4 {
                    low[i] = unsafe { vmlaq_n_s32(low[i], high[i], TERM) };
                }
                low
            }

            #[inline(always)]
            fn to_float(self, x: Self::Sums) -> Self::F {
                x.map(|x| unsafe { vcvtq_f32_s32(x) })
            }
            #[inline(always)]
            fn load_f16(self, x: &[u8; 32]) -> Self::F {
                let (x, _) = x.as_chunks::<2>();
                let mut halves = [[0; 4]; 4];
                for lane in 0..16 {
                    halves[lane / 4][lane % 4] = u16::from_le_bytes(x[lane]);
                }
                // Both traits of `Neon` have an operation of this name.
                halves.map(|halves| crate::simd::Simd::load_f16(Neon, &halves))
            }
            #[inline(always)]
            fn load_i8(self, x: &[u8; 16]) -> Self::F {
                unsafe {
                    let x = vreinterpretq_s8_u8(vld1q_u8(x.as_ptr()));
                    let (low, high) = (vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x));
                    let low = [vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low)];
                    let high = [vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)];
                    self.to_float([low[0], low[1], high[0], high[1]])
                }
            }
            #[inline(always)]
            fn load_float(self, x: &[f32; 16]) -> Self::F {
                let (x, _) = x.as_chunks::<4>();
                [0, 1, 2, 3].map(|i| unsafe { vld1q_f32(x[i].as_ptr()) })
            }
            #[inline(always)]
            fn store_float(self, x: Self::F, to: &mut [f32; 16]) {
                let (to, _) = to.as_chunks_mut::<4>();
                for i in 0..4 {
                    unsafe { vst1q_f32(to[i].as_mut_ptr(), x[i]) }
                }
            }
            #[inline(always)]
            fn splat(self, x: f32) -> Self::F {
                unsafe { [vdupq_n_f32(x); 4] }
            }
            #[inline(always)]
            fn mul(self, mut a: Self::F, b: Self::F) -> Self::F {
                for i in 0..4 {
                    a[i] = unsafe { vmulq_f32(a[i], b[i]) };
                }
                a
            }
            #[inline(always)]
            fn mul_add(self, a: Self::F, b: Self::F, mut c: Self::F) -> Self::F {
                for i in 0..4 {
                    c[i] = unsafe { vfmaq_f32(c[i], a[i], b[i]) };
                }
                c
            }
        }
    };
}
neon!(Neon);
neon!(NeonDot);
