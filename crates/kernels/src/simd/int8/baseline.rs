//! Plain loops over eight lanes: what every processor can run, and what Miri checks.

use super::{Int8, Operand};
use crate::simd::baseline::Baseline;

/// Adds the products of one vector of codes with four `x`.
#[inline(always)]
fn add_products(sums: &mut [i32; 8], codes: &[u8; 32], x: &[i8]) {
    for lane in 0..8 {
        for i in 0..4 {
            // Codes of 6 bits and less are the same number as signed ones.
            let code = i32::from(codes[lane * 4 + i].cast_signed());
            sums[lane] = add_product(sums[lane], code, i32::from(x[i]));
        }
    }
}

/// `sum + a * b`. It never overflows here, and checks for it would keep the compiler from vectors.
#[inline(always)]
fn add_product(sum: i32, a: i32, b: i32) -> i32 {
    sum.wrapping_add(a.wrapping_mul(b))
}

#[inline(always)]
fn dot<const N: usize, const R: usize>(
    codes: [&[[u8; 32]; 8]; N],
    x: [&[i8; 32]; R],
) -> [[[i32; 8]; R]; N] {
    let mut sums = [[[0; 8]; R]; N];
    for n in 0..N {
        for r in 0..R {
            for step in 0..8 {
                add_products(&mut sums[n][r], &codes[n][step], &x[r][step * 4..][..4]);
            }
        }
    }
    sums
}

impl Int8 for Baseline {
    type Codes = [u8; 32];
    type Sums = [i32; 8];
    type F = [f32; 8];
    type Factors = [i32; 8];
    type Pairs = [[i32; 8]; 2];
    const SIGNED_OFFSET: i32 = 0;

    #[inline(always)]
    fn load(self, x: &[u8; 32]) -> Self::Codes {
        *x
    }
    #[inline(always)]
    fn right(self, mut x: Self::Codes, by: u32, mask: u8) -> Self::Codes {
        for x in &mut x {
            *x = *x >> by & mask;
        }
        x
    }
    #[inline(always)]
    fn left(self, mut x: Self::Codes, by: u32, mask: u8) -> Self::Codes {
        for x in &mut x {
            *x = *x << by & mask;
        }
        x
    }
    #[inline(always)]
    fn or(self, mut a: Self::Codes, b: Self::Codes) -> Self::Codes {
        for i in 0..32 {
            a[i] |= b[i];
        }
        a
    }
    #[inline(always)]
    fn lookup(self, table: &[i8; 16], mut x: Self::Codes) -> Self::Codes {
        for x in &mut x {
            *x = table[usize::from(*x & 15)].cast_unsigned();
        }
        x
    }
    #[inline(always)]
    fn store(self, x: Self::Codes, to: &mut [u8; 32]) {
        *to = x;
    }

    #[inline(always)]
    fn dot_signed<const N: usize, const R: usize>(
        self,
        codes: [&[[u8; 32]; 8]; N],
        x: [Operand<'_>; R],
    ) -> [[Self::Sums; R]; N] {
        let mut all = [x[0].all; R];
        for r in 0..R {
            all[r] = x[r].all;
        }
        dot(codes, all)
    }
    #[inline(always)]
    fn dot<const N: usize, const R: usize>(
        self,
        _bits: u32,
        codes: [&[Self::Codes; 8]; N],
        x: [&[i8; 32]; R],
    ) -> [[Self::Sums; R]; N] {
        dot(codes, x)
    }
    #[inline(always)]
    fn dot_halves<const N: usize, const R: usize>(
        self,
        _bits: u32,
        codes: [&[Self::Codes; 8]; N],
        x: [&[i8; 32]; R],
        factors: [[Self::Factors; 2]; N],
    ) -> [[Self::Sums; R]; N] {
        let mut sums = [[[0; 8]; R]; N];
        for n in 0..N {
            for r in 0..R {
                let mut halves = [[0; 8]; 2];
                for step in 0..8 {
                    add_products(&mut halves[step / 4], &codes[n][step], &x[r][step * 4..][..4]);
                }
                for half in 0..2 {
                    for lane in 0..8 {
                        let sum = &mut sums[n][r][lane];
                        *sum = add_product(*sum, halves[half][lane], factors[n][half][lane]);
                    }
                }
            }
        }
        sums
    }

    #[inline(always)]
    fn factors(self, x: [u8; 8]) -> Self::Factors {
        let mut factors = [0; 8];
        for lane in 0..8 {
            factors[lane] = i32::from(x[lane].cast_signed());
        }
        factors
    }
    #[inline(always)]
    fn pairs(self, by: i16, mut factors: [Self::Factors; 2]) -> Self::Pairs {
        for factors in &mut factors {
            for factor in factors {
                *factor = factor.wrapping_mul(i32::from(by));
            }
        }
        factors
    }
    #[inline(always)]
    fn add_pairs(self, mut sums: Self::Sums, pairs: Self::Pairs, x: [i16; 2]) -> Self::Sums {
        for lane in 0..8 {
            for half in 0..2 {
                sums[lane] = add_product(sums[lane], pairs[half][lane], i32::from(x[half]));
            }
        }
        sums
    }
    #[inline(always)]
    fn zero_sums(self) -> Self::Sums {
        [0; 8]
    }

    #[inline(always)]
    fn to_float(self, x: Self::Sums) -> Self::F {
        let mut float = [0.0; 8];
        for lane in 0..8 {
            float[lane] = x[lane] as f32;
        }
        float
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8; 16]) -> Self::F {
        let mut float = [0.0; 8];
        for lane in 0..8 {
            float[lane] = half::f16::from_le_bytes([x[2 * lane], x[2 * lane + 1]]).to_f32();
        }
        float
    }
    #[inline(always)]
    fn load_i8(self, x: [u8; 8]) -> Self::F {
        let mut float = [0.0; 8];
        for lane in 0..8 {
            float[lane] = f32::from(x[lane].cast_signed());
        }
        float
    }
    #[inline(always)]
    fn load_float(self, x: &[f32; 8]) -> Self::F {
        *x
    }
    #[inline(always)]
    fn store_float(self, x: Self::F, to: &mut [f32; 8]) {
        *to = x;
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; 8]
    }
    #[inline(always)]
    fn mul(self, mut a: Self::F, b: Self::F) -> Self::F {
        for lane in 0..8 {
            a[lane] *= b[lane];
        }
        a
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, mut c: Self::F) -> Self::F {
        for lane in 0..8 {
            c[lane] += a[lane] * b[lane];
        }
        c
    }
}
