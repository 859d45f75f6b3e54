//! Sums of products of 8-bit integers, and the few operations around them.
//!
//! All vectors have eight lanes whatever the instruction set: eight outputs of a product. Integers
//! are exact and floats run in one order, so instruction sets agree to the bit but for the fused
//! multiply-add, which the baseline has not.
//!
//! A kernel is written once, generic over [`Int8`], as an `#[inline(always)]` function, and compiled by
//! `dispatch_int8!` for each instruction set, as those over [`Simd`](super::Simd) are by `dispatch!`.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all: a value of an instruction set's type exists only where detection saw its features, and every pointer comes from a reference to an array of the vector's size"
)]

/// What the x86-64 instruction sets share: all but the products and their factors.
#[cfg(target_arch = "x86_64")]
macro_rules! avx2_operations {
    () => {
        #[inline(always)]
        fn load(self, x: &[u8; 32]) -> Self::Codes {
            unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
        }
        #[inline(always)]
        fn store(self, x: Self::Codes, to: &mut [u8; 32]) {
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), x) }
        }
        #[inline(always)]
        fn right(self, x: Self::Codes, by: u32, mask: u8) -> Self::Codes {
            unsafe {
                let x = _mm256_srl_epi16(x, _mm_cvtsi32_si128(by.cast_signed()));
                _mm256_and_si256(x, _mm256_set1_epi8(mask.cast_signed()))
            }
        }
        #[inline(always)]
        fn left(self, x: Self::Codes, by: u32, mask: u8) -> Self::Codes {
            unsafe {
                let x = _mm256_sll_epi16(x, _mm_cvtsi32_si128(by.cast_signed()));
                _mm256_and_si256(x, _mm256_set1_epi8(mask.cast_signed()))
            }
        }
        #[inline(always)]
        fn or(self, a: Self::Codes, b: Self::Codes) -> Self::Codes {
            unsafe { _mm256_or_si256(a, b) }
        }
        #[inline(always)]
        fn lookup(self, table: &[i8; 16], x: Self::Codes) -> Self::Codes {
            unsafe {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                _mm256_shuffle_epi8(table, x)
            }
        }
        #[inline(always)]
        fn add_pairs(self, sums: Self::Sums, pairs: Self::Pairs, [a, b]: [i16; 2]) -> Self::Sums {
            let x = i32::from(a.cast_unsigned()) | i32::from(b) << 16;
            unsafe { _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi32(x))) }
        }
        #[inline(always)]
        fn zero_sums(self) -> Self::Sums {
            unsafe { _mm256_setzero_si256() }
        }
        #[inline(always)]
        fn to_float(self, x: Self::Sums) -> Self::F {
            unsafe { _mm256_cvtepi32_ps(x) }
        }
        #[inline(always)]
        fn load_f16(self, x: &[u8; 16]) -> Self::F {
            unsafe { _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())) }
        }
        #[inline(always)]
        fn load_i8(self, x: [u8; 8]) -> Self::F {
            unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast()))) }
        }
        #[inline(always)]
        fn load_float(self, x: &[f32; 8]) -> Self::F {
            unsafe { _mm256_loadu_ps(x.as_ptr()) }
        }
        #[inline(always)]
        fn store_float(self, x: Self::F, to: &mut [f32; 8]) {
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), x) }
        }
        #[inline(always)]
        fn splat(self, x: f32) -> Self::F {
            unsafe { _mm256_set1_ps(x) }
        }
        #[inline(always)]
        fn mul(self, a: Self::F, b: Self::F) -> Self::F {
            unsafe { _mm256_mul_ps(a, b) }
        }
        #[inline(always)]
        fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use avx2_operations;

#[cfg(target_arch = "x86_64")]
mod avx2;
mod baseline;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
#[cfg(target_arch = "x86_64")]
pub(crate) mod vnni;

use crate::simd::Level;

/// 32 integers in -127..=127 taken apart, for instruction sets that multiply unsigned ones by signed ones.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Apart {
    pub sizes: [u8; 32],
    /// -1 where the integer is negative, else 0.
    pub signs: [i8; 32],
    /// The sum of the sizes of the negative ones.
    pub negative: i32,
}

impl Apart {
    pub(crate) const ZERO: Self = Self { sizes: [0; 32], signs: [0; 32], negative: 0 };

    #[inline(always)]
    pub(crate) fn of(integers: &[i8; 32]) -> Self {
        let mut apart = Self::ZERO;
        let mut negative = 0;
        for i in 0..32 {
            let (size, sign) = (integers[i].unsigned_abs(), integers[i] >> 7);
            apart.sizes[i] = size;
            apart.signs[i] = sign;
            negative += u16::from(size & sign.cast_unsigned());
        }
        apart.negative = i32::from(negative);
        apart
    }
}

/// 32 integers, whole and, where the level [takes them so](Level::takes_apart), apart.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub all: &'a [i8; 32],
    #[cfg_attr(
        not(any(test, target_arch = "x86_64")),
        expect(dead_code, reason = "AVX2 alone reads it")
    )]
    pub apart: &'a Apart,
}

/// What products of 8-bit integers need of an instruction set.
///
/// *Codes* are weights: eight lanes of four bytes, the codes of four neighbouring `k` of eight outputs.
/// Eight such vectors make 32 `k`. Unsigned codes have at most 6 bits and are unpacked into registers;
/// signed ones have 8 and are multiplied from memory.
pub(crate) trait Int8: Copy + Send + Sync {
    /// 8 x 4 bytes.
    type Codes: Copy;
    /// 8 x i32.
    type Sums: Copy;
    /// 8 x f32.
    type F: Copy;
    /// Eight factors in -128..=127 of the sums of 16 products.
    type Factors: Copy;
    /// Eight pairs of factors of the two sums of 16 activations.
    type Pairs: Copy;
    /// What `dot_signed` adds to a code.
    const SIGNED_OFFSET: i32;

    fn load(self, x: &[u8; 32]) -> Self::Codes;
    /// Byte by byte `x >> by & mask`; what the shift brings in from the neighbour must be masked.
    fn right(self, x: Self::Codes, by: u32, mask: u8) -> Self::Codes;
    /// Byte by byte `x << by & mask`; what the shift brings in from the neighbour must be masked.
    fn left(self, x: Self::Codes, by: u32, mask: u8) -> Self::Codes;
    fn or(self, a: Self::Codes, b: Self::Codes) -> Self::Codes;
    /// `table[x]` byte by byte, for x < 16.
    fn lookup(self, table: &[i8; 16], x: Self::Codes) -> Self::Codes;
    fn store(self, x: Self::Codes, to: &mut [u8; 32]);

    /// For `N` times eight outputs and `R` rows, sums of 32 products of signed codes, each moved by
    /// [`SIGNED_OFFSET`](Self::SIGNED_OFFSET), with `x`.
    fn dot_signed<const N: usize, const R: usize>(
        self,
        codes: [&[[u8; 32]; 8]; N],
        x: [Operand<'_>; R],
    ) -> [[Self::Sums; R]; N];
    /// The same for unsigned codes of at most six `bits`.
    fn dot<const N: usize, const R: usize>(
        self,
        bits: u32,
        codes: [&[Self::Codes; 8]; N],
        x: [&[i8; 32]; R],
    ) -> [[Self::Sums; R]; N];
    /// The same, with sums of the first 16 products times `factors[0]` and the others' times `factors[1]`.
    fn dot_halves<const N: usize, const R: usize>(
        self,
        bits: u32,
        codes: [&[Self::Codes; 8]; N],
        x: [&[i8; 32]; R],
        factors: [[Self::Factors; 2]; N],
    ) -> [[Self::Sums; R]; N];

    fn factors(self, x: [u8; 8]) -> Self::Factors;
    /// `by * factors`, which must fit 16 bits.
    fn pairs(self, by: i16, factors: [Self::Factors; 2]) -> Self::Pairs;
    /// `sums + pairs[0] * x[0] + pairs[1] * x[1]`.
    fn add_pairs(self, sums: Self::Sums, pairs: Self::Pairs, x: [i16; 2]) -> Self::Sums;
    fn zero_sums(self) -> Self::Sums;

    fn to_float(self, x: Self::Sums) -> Self::F;
    /// Eight little-endian halves.
    fn load_f16(self, x: &[u8; 16]) -> Self::F;
    fn load_i8(self, x: [u8; 8]) -> Self::F;
    fn load_float(self, x: &[f32; 8]) -> Self::F;
    fn store_float(self, x: Self::F, to: &mut [f32; 8]);
    fn splat(self, x: f32) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, fused where the instruction set can.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
}

impl Level {
    /// Whether signed codes are multiplied with activations that are taken [`Apart`].
    pub(crate) fn takes_apart(self) -> bool {
        cfg!(target_arch = "x86_64") && matches!(self, Self::Avx2 | Self::Avx512)
    }
}

/// Compiles an `#[inline(always)] fn name<S: Int8>(simd: S, args..)` for each instruction set and
/// defines `fn name(level, args..)` that calls the one of `level`; a second type parameter is passed on.
macro_rules! dispatch_int8 {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident $(<$type:ident: $bound:path>)? =
            $body:ident($($arg:ident: $ty:ty),* $(,)?)
    ) => {
        $(#[$meta])*
        $vis fn $name $(<$type: $bound>)? (
            level: crate::simd::Level,
            $($arg: $ty),*
        ) {
            use crate::simd::{Level, baseline::Baseline};
            #[cfg(target_arch = "x86_64")]
            use crate::simd::{avx2::Avx2, int8::vnni::{Avx512Vnni, AvxVnni}};
            #[cfg(target_arch = "aarch64")]
            use crate::simd::{int8::neon::NeonDot, neon::Neon};
            /// Calls the body compiled for a type of proof with its features.
            macro_rules! wide {
                ($simd:ty, $features:literal) => {{
                    #[target_feature(enable = $features)]
                    fn wide $(<$type: $bound>)? (simd: $simd, $($arg: $ty),*) {
                        $body::<_ $(, $type)?>(simd, $($arg),*);
                    }
                    let simd = <$simd>::detected();
                    // SAFETY: `detected` panics unless the processor has these features.
                    unsafe { wide $(::<$type>)? (simd, $($arg),*) }
                }};
            }
            match level {
                Level::Baseline => $body::<_ $(, $type)?>(Baseline, $($arg),*),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 | Level::Avx512 => wide!(Avx2, "avx2,fma,f16c"),
                #[cfg(target_arch = "x86_64")]
                Level::AvxVnni => wide!(AvxVnni, "avx2,fma,f16c,avxvnni"),
                #[cfg(target_arch = "x86_64")]
                Level::Avx512Vnni => wide!(Avx512Vnni, "avx2,fma,f16c,avx512vnni,avx512vl"),
                #[cfg(target_arch = "aarch64")]
                Level::Neon => $body::<_ $(, $type)?>(Neon, $($arg),*),
                #[cfg(target_arch = "aarch64")]
                Level::NeonDotprod => wide!(NeonDot, "dotprod"),
                absent => absent.refuse(),
            }
        }
    };
}
pub(crate) use dispatch_int8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    /// Codes `[8 steps, 8 lanes, 4]`, two rows of `x`, and factors of both halves.
    struct Problem {
        bits: u32,
        codes: [[u8; 32]; 8],
        x: [[i8; 32]; 2],
        factors: [[u8; 8]; 2],
    }

    impl Problem {
        fn random(rng: &mut Rng, bits: u32) -> Self {
            let mut byte = || rng.next() as u8;
            let mask = ((1u16 << bits) - 1) as u8;
            Self {
                bits,
                codes: std::array::from_fn(|_| std::array::from_fn(|_| byte() & mask)),
                x: std::array::from_fn(|_| std::array::from_fn(|_| (byte() as i8).max(-127))),
                factors: std::array::from_fn(|_| std::array::from_fn(|_| byte())),
            }
        }

        /// The largest sizes of all.
        fn extreme(bits: u32, x: i8) -> Self {
            let code = if bits == 8 { 128 } else { (1 << bits) - 1 };
            Self::of(bits, code, x)
        }

        fn of(bits: u32, code: u8, x: i8) -> Self {
            Self { bits, codes: [[code; 32]; 8], x: [[x; 32], [-x; 32]], factors: [[128; 8]; 2] }
        }

        /// Sums of the products of half a row, in plain integers.
        fn reference(&self, r: usize, lane: usize, half: usize) -> i32 {
            (half * 16..half * 16 + 16)
                .map(|k| {
                    let code = self.codes[k / 4][lane * 4 + k % 4];
                    let code = if self.bits == 8 { i32::from(code as i8) } else { code.into() };
                    code * i32::from(self.x[r][k])
                })
                .sum()
        }

        fn sums(&self, r: usize) -> [i16; 2] {
            [0, 16].map(|from| self.x[r][from..from + 16].iter().map(|x| i16::from(*x)).sum())
        }
    }

    dispatch_int8! { fn check = check_body(problem: &Problem) }

    #[inline(always)]
    fn check_body<S: Int8>(simd: S, problem: &Problem) {
        let bits = problem.bits;
        let mut codes = [simd.load(&[0; 32]); 8];
        for step in 0..8 {
            codes[step] = simd.load(&problem.codes[step]);
        }
        let ones = simd.factors([1; 8]);
        let factors = [simd.factors(problem.factors[0]), simd.factors(problem.factors[1])];
        let [a, b] = &problem.x;
        let apart = problem.x.map(|x| Apart::of(&x));
        let [c, d] = [0, 1].map(|r| Operand { all: &problem.x[r], apart: &apart[r] });
        let ([mut both], [[mut one], _]);
        if bits < 8 {
            [both] = simd.dot(bits, [&codes], [a, b]);
            [[one], _] = simd.dot(bits, [&codes, &codes], [a]);
        } else {
            [both] = simd.dot_signed([&problem.codes], [c, d]);
            [[one], _] = simd.dot_signed([&problem.codes, &problem.codes], [c]);
            let pairs = simd.pairs(-(S::SIGNED_OFFSET as i16), [ones, ones]);
            for r in 0..2 {
                both[r] = simd.add_pairs(both[r], pairs, problem.sums(r));
            }
            one = simd.add_pairs(one, pairs, problem.sums(0));
            // As kernels call it: four cells, two rows.
            let four = simd.dot_signed([&problem.codes; 4], [d, c]);
            for [second, first] in four {
                let first = simd.add_pairs(first, pairs, problem.sums(0));
                let second = simd.add_pairs(second, pairs, problem.sums(1));
                assert_eq!(integers(simd, first), integers(simd, both[0]));
                assert_eq!(integers(simd, second), integers(simd, both[1]));
            }
        }
        for r in 0..2 {
            let got = integers(simd, both[r]);
            for lane in 0..8 {
                let want = problem.reference(r, lane, 0) + problem.reference(r, lane, 1);
                assert_eq!(got[lane], want as f32, "{bits} bits, row {r}, lane {lane}");
            }
        }
        assert_eq!(integers(simd, one), integers(simd, both[0]));
        if bits == 8 {
            return;
        }
        let [halves] = simd.dot_halves(bits, [&codes], [a, b], [factors]);
        let pairs = simd.pairs(-32, factors);
        for r in 0..2 {
            let got = integers(simd, halves[r]);
            let sums = problem.sums(r);
            let moved = integers(simd, simd.add_pairs(halves[r], pairs, sums));
            for lane in 0..8 {
                let factor = |half: usize| i32::from(problem.factors[half][lane] as i8);
                let want = [0, 1].map(|half| problem.reference(r, lane, half) * factor(half));
                assert_eq!(got[lane], (want[0] + want[1]) as f32, "{bits} bits, halves");
                let offset = [0, 1].map(|half| 32 * factor(half) * i32::from(sums[half]));
                let want = want[0] + want[1] - offset[0] - offset[1];
                assert_eq!(moved[lane], want as f32, "{bits} bits, with an offset");
            }
        }
    }

    /// As floats, the way kernels see them; sums past 2^24 are rounded alike on both sides.
    #[inline(always)]
    fn integers<S: Int8>(simd: S, sums: S::Sums) -> [f32; 8] {
        let mut out = [0.0; 8];
        simd.store_float(simd.to_float(sums), &mut out);
        out
    }

    #[test]
    fn sums_are_exact_to_the_largest_codes_on_every_instruction_set() {
        let mut rng = Rng::new(20);
        for &level in Level::present() {
            for bits in [2, 3, 4, 5, 6, 8] {
                check(level, &Problem::extreme(bits, 127));
                check(level, &Problem::extreme(bits, -127));
                if bits == 8 {
                    check(level, &Problem::of(8, 127, 127));
                }
                for _ in 0..20 {
                    check(level, &Problem::random(&mut rng, bits));
                }
            }
        }
    }

    dispatch_int8! { fn move_bytes = move_bytes_body(x: &[u8; 32], out: &mut [[f32; 8]]) }

    /// Bytes that are moved, looked up and read as numbers, seen through products with 1.
    #[inline(always)]
    fn move_bytes_body<S: Int8>(simd: S, x: &[u8; 32], out: &mut [[f32; 8]]) {
        let table = [-127, -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 113];
        let loaded = simd.load(x);
        let zero = simd.load(&[0; 32]);
        let moved = [
            simd.right(loaded, 4, 15),
            simd.left(loaded, 3, 0x30),
            simd.or(simd.right(loaded, 0, 15), simd.left(loaded, 4, 16)),
        ];
        for (i, moved) in moved.into_iter().enumerate() {
            let codes = [zero, zero, zero, moved, zero, zero, zero, zero];
            let [[sums]] = simd.dot(6, [&codes], [&[1; 32]]);
            simd.store_float(simd.to_float(sums), &mut out[i]);
        }
        let ones = Operand { all: &[1; 32], apart: &Apart::of(&[1; 32]) };
        let mut codes = [[0; 32]; 8];
        simd.store(simd.lookup(&table, simd.right(loaded, 0, 15)), &mut codes[2]);
        let [[sums]] = simd.dot_signed([&codes], [ones]);
        let ones = simd.factors([1; 8]);
        let pairs = simd.pairs(-(S::SIGNED_OFFSET as i16), [ones, ones]);
        simd.store_float(simd.to_float(simd.add_pairs(sums, pairs, [16, 16])), &mut out[3]);
        let (&eight, _) = x.split_first_chunk().expect("32 bytes");
        simd.store_float(simd.load_i8(eight), &mut out[4]);
        let (sixteen, _) = x.split_first_chunk().expect("32 bytes");
        simd.store_float(simd.load_f16(sixteen), &mut out[5]);
    }

    #[test]
    fn bytes_move_alike_on_every_instruction_set() {
        let mut rng = Rng::new(21);
        for _ in 0..200 {
            let mut x = [0; 32].map(|_: u8| rng.next() as u8);
            for i in 0..8 {
                x[2 * i + 1] &= 0xbf; // finite halves
            }
            let mut want = [[0.0; 8]; 6];
            move_bytes(Level::Baseline, &x, &mut want);
            assert_eq!(want[4][3], f32::from(x[3] as i8));
            let high: u8 = x[4..8].iter().map(|x| x >> 4).sum();
            assert_eq!(want[0][1], f32::from(high));
            for &level in Level::present() {
                let mut got = [[0.0; 8]; 6];
                move_bytes(level, &x, &mut got);
                assert_eq!(got, want, "{level:?}");
            }
        }
    }
}
