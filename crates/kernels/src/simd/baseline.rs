//! Four lanes in plain Rust: what every processor can run, and what Miri checks.

use super::{Simd, Step};

#[derive(Clone, Copy)]
pub(crate) struct Baseline;

#[inline(always)]
fn map2(a: [f32; 4], b: [f32; 4], f: impl Fn(f32, f32) -> f32) -> [f32; 4] {
    [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
}

impl Simd for Baseline {
    type F = [f32; 4];
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
    fn prefetch(self, _address: *const u8) {}
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; 4]
    }
    #[inline(always)]
    fn load(self, x: &Self::Chunk) -> Self::F {
        *x
    }
    #[inline(always)]
    fn load_bf16(self, x: &Self::Half) -> Self::F {
        x.map(|x| f32::from_bits(u32::from(x) << 16))
    }
    #[inline(always)]
    fn load_f16(self, x: &Self::Half) -> Self::F {
        x.map(|x| half::f16::from_bits(x).to_f32())
    }
    #[inline(always)]
    fn load_i8(self, x: &Self::Codes) -> Self::F {
        x.map(f32::from)
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut Self::Chunk) {
        *to = x;
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        // Adding and taking away 1.5 * 2^23 rounds |a| < 2^22 without a library call.
        a.map(|a| (a + 12_582_912.0) - 12_582_912.0)
    }
    #[inline(always)]
    fn exp2i(self, n: Self::F) -> Self::F {
        n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn reduce4(self, x: [Self::F; 4]) -> [f32; 4] {
        x.map(|x| (x[0] + x[1]) + (x[2] + x[3]))
    }
}
