//! Plain loops over sixteen lanes: what every processor can run, and what Miri checks.

use super::{BYTES, Int8, LANES, Operand, Steps, TERM};
use crate::simd::baseline::Baseline;

/// Adds the products of one vector of codes with four `x`.
#[inline(always)]
fn add_products(sums: &mut [i32; LANES], codes: &[u8; BYTES], x: &[i8]) {
    for lane in 0..LANES {
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

impl Int8 for Baseline {
    type Codes = [u8; BYTES];
    type Sums = [i32; LANES];
    type F = [f32; LANES];
    const WIDE: bool = false;
    // Without vector registers there is nothing to win, and the code would be long.
    const STREAMS: usize = 0;
    const COUNTS_BITS: bool = false;

    #[inline(always)]
    fn load(self, x: &[u8; BYTES]) -> Self::Codes {
        *x
    }
    #[inline(always)]
    fn store(self, x: Self::Codes, to: &mut [u8; BYTES]) {
        *to = x;
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
        for i in 0..BYTES {
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
        let mut sums = [first.map(|first| [first; LANES]); V];
        for step in from..from + COUNT {
            for v in 0..V {
                let codes = codes.codes(self, v, step);
                for t in 0..T {
                    add_products(&mut sums[v][t], &codes, &x[t].all[step * 4..][..4]);
                }
            }
        }
        sums
    }
    #[inline(always)]
    fn join(self, high: Self::Sums, mut low: Self::Sums) -> Self::Sums {
        for lane in 0..LANES {
            low[lane] = add_product(low[lane], high[lane], TERM);
        }
        low
    }

    #[inline(always)]
    fn to_float(self, x: Self::Sums) -> Self::F {
        x.map(|x| x as f32)
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8; 2 * LANES]) -> Self::F {
        let mut float = [0.0; LANES];
        for lane in 0..LANES {
            float[lane] = half::f16::from_le_bytes([x[2 * lane], x[2 * lane + 1]]).to_f32();
        }
        float
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; LANES]) -> Self::F {
        x.map(|x| f32::from(x.cast_signed()))
    }
    #[inline(always)]
    fn load_float(self, x: &[f32; LANES]) -> Self::F {
        *x
    }
    #[inline(always)]
    fn store_float(self, x: Self::F, to: &mut [f32; LANES]) {
        *to = x;
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    fn mul(self, mut a: Self::F, b: Self::F) -> Self::F {
        for lane in 0..LANES {
            a[lane] *= b[lane];
        }
        a
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, mut c: Self::F) -> Self::F {
        for lane in 0..LANES {
            c[lane] += a[lane] * b[lane];
        }
        c
    }
}
