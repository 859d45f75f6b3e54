//! Sums of products of 8-bit integers, and the few operations around them.
//!
//! All vectors have sixteen lanes whatever the instruction set: sixteen outputs of a product, in one
//! register or in several. Integers are exact and floats run in one order, so instruction sets agree to
//! the bit but for the fused multiply-add, which the baseline has not.
//!
//! A kernel is written once, generic over [`Int8`], as an `#[inline(always)]` function, and compiled by
//! `dispatch_int8!` for each instruction set, as those over [`Simd`](super::Simd) are by `dispatch!`.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all: a value of an instruction set's type exists only where detection saw its features, and every pointer comes from a reference to an array of the vector's size"
)]

/// What the x86-64 instruction sets with registers of 256 bits share, two of them to a vector: all but the products.
#[cfg(target_arch = "x86_64")]
macro_rules! avx2_operations {
    () => {
        #[inline(always)]
        fn load(self, x: &[u8; 64]) -> Self::Codes {
            let (x, _) = x.as_chunks::<32>();
            [0, 1].map(|i| unsafe { _mm256_loadu_si256(x[i].as_ptr().cast()) })
        }
        #[inline(always)]
        fn store(self, x: Self::Codes, to: &mut [u8; 64]) {
            let (to, _) = to.as_chunks_mut::<32>();
            for i in 0..2 {
                unsafe { _mm256_storeu_si256(to[i].as_mut_ptr().cast(), x[i]) }
            }
        }
        #[inline(always)]
        fn right(self, mut x: Self::Codes, by: u32, mask: u8) -> Self::Codes {
            for x in &mut x {
                unsafe {
                    let moved = _mm256_srl_epi16(*x, _mm_cvtsi32_si128(by.cast_signed()));
                    *x = _mm256_and_si256(moved, _mm256_set1_epi8(mask.cast_signed()));
                }
            }
            x
        }
        #[inline(always)]
        fn left(self, mut x: Self::Codes, by: u32, mask: u8) -> Self::Codes {
            for x in &mut x {
                unsafe {
                    let moved = _mm256_sll_epi16(*x, _mm_cvtsi32_si128(by.cast_signed()));
                    *x = _mm256_and_si256(moved, _mm256_set1_epi8(mask.cast_signed()));
                }
            }
            x
        }
        #[inline(always)]
        fn or(self, a: Self::Codes, b: Self::Codes) -> Self::Codes {
            unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
        }
        #[inline(always)]
        fn lookup(self, table: &[i8; 16], x: Self::Codes) -> Self::Codes {
            unsafe {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                [_mm256_shuffle_epi8(table, x[0]), _mm256_shuffle_epi8(table, x[1])]
            }
        }
        #[inline(always)]
        fn join(self, high: Self::Sums, mut low: Self::Sums) -> Self::Sums {
            for i in 0..2 {
                unsafe {
                    let high = _mm256_mullo_epi32(high[i], _mm256_set1_epi32(super::TERM));
                    low[i] = _mm256_add_epi32(low[i], high);
                }
            }
            low
        }
        #[inline(always)]
        fn to_float(self, x: Self::Sums) -> Self::F {
            unsafe { [_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])] }
        }
        #[inline(always)]
        fn load_f16(self, x: &[u8; 32]) -> Self::F {
            let (x, _) = x.as_chunks::<16>();
            [0, 1].map(|i| unsafe { _mm256_cvtph_ps(_mm_loadu_si128(x[i].as_ptr().cast())) })
        }
        #[inline(always)]
        fn load_i8(self, x: &[u8; 16]) -> Self::F {
            let (x, _) = x.as_chunks::<8>();
            [0, 1].map(|i| unsafe {
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x[i].as_ptr().cast())))
            })
        }
        #[inline(always)]
        fn load_float(self, x: &[f32; 16]) -> Self::F {
            let (x, _) = x.as_chunks::<8>();
            [0, 1].map(|i| unsafe { _mm256_loadu_ps(x[i].as_ptr()) })
        }
        #[inline(always)]
        fn store_float(self, x: Self::F, to: &mut [f32; 16]) {
            let (to, _) = to.as_chunks_mut::<8>();
            for i in 0..2 {
                unsafe { _mm256_storeu_ps(to[i].as_mut_ptr(), x[i]) }
            }
        }
        #[inline(always)]
        fn splat(self, x: f32) -> Self::F {
            unsafe { [_mm256_set1_ps(x); 2] }
        }
        #[inline(always)]
        fn mul(self, a: Self::F, b: Self::F) -> Self::F {
            unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
            unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use avx2_operations;

/// Runs a block for `$count` steps (a constant, at most 8) from `$from`: written out, so that what depends on the step
/// is known to the compiler whatever it thinks of the loop's size.
#[cfg(target_arch = "x86_64")]
macro_rules! each_step {
    ($step:ident in $from:expr, $count:expr => $body:block) => {
        each_step!(@ $step, $from, $count, $body, 0 1 2 3 4 5 6 7);
    };
    (@ $step:ident, $from:expr, $count:expr, $body:block, $($i:literal)*) => {
        $(if $i < $count {
            let $step = $from + $i;
            $body
        })*
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use each_step;

#[cfg(target_arch = "x86_64")]
mod avx2;
mod baseline;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
#[cfg(target_arch = "x86_64")]
pub(crate) mod vnni;

use crate::simd::Level;

/// Outputs of a vector.
pub(crate) const LANES: usize = 16;
/// Bytes of a vector of codes.
pub(crate) const BYTES: usize = 4 * LANES;
/// What an integer of two terms has its high term multiplied by, so that neither is beyond -127..=127.
pub(crate) const TERM: i32 = 254;

/// 32 integers in -127..=127 taken apart, for instruction sets that multiply unsigned ones by signed ones.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Apart {
    pub sizes: [i8; 32],
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
            let (size, sign) = (integers[i].abs(), integers[i] >> 7);
            apart.sizes[i] = size;
            apart.signs[i] = sign;
            negative += i16::from(size & sign);
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

/// Four neighbouring integers of `x`, as the bits of one.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
fn four(x: &[i8; 32], step: usize) -> i32 {
    i32::from_le_bytes(x.as_chunks().0[step].map(i8::cast_unsigned))
}

/// The codes of 32 `k` of some times sixteen outputs, one step of four `k` after the other.
pub(crate) trait Steps<S: Int8> {
    /// Step `step`, below 8, of outputs `16 v..`.
    fn codes(&self, simd: S, v: usize, step: usize) -> S::Codes;
}

/// What products of 8-bit integers need of an instruction set.
///
/// *Codes* are weights: sixteen lanes of four bytes, the codes of four neighbouring `k` of sixteen outputs.
/// Eight such vectors make 32 `k`. Unsigned codes have at most 6 bits. Signed ones have 8, and go through
/// [`signed`](Self::signed) before they are multiplied.
pub(crate) trait Int8: Copy + Send + Sync {
    /// 16 x 4 bytes.
    type Codes: Copy;
    /// 16 x i32.
    type Sums: Copy;
    /// 16 x f32.
    type F: Copy;
    /// Whether a vector is one of 32 registers; else it takes several.
    const WIDE: bool;
    /// Groups of sixteen outputs that few rows take in turns, unpacking weights in registers; 0 where they are unpacked to
    /// memory for any number of rows.
    const STREAMS: usize = if Self::WIDE { 4 } else { 2 };
    /// Whether products of few bits are faster than those of many.
    const COUNTS_BITS: bool;

    fn load(self, x: &[u8; BYTES]) -> Self::Codes;
    fn store(self, x: Self::Codes, to: &mut [u8; BYTES]);
    /// Byte by byte `x >> by & mask`; what the shift brings in from the neighbour must be masked.
    fn right(self, x: Self::Codes, by: u32, mask: u8) -> Self::Codes;
    /// Byte by byte `x << by & mask`; what the shift brings in from the neighbour must be masked.
    fn left(self, x: Self::Codes, by: u32, mask: u8) -> Self::Codes;
    fn or(self, a: Self::Codes, b: Self::Codes) -> Self::Codes;
    /// `table[x]` byte by byte, for x < 16.
    fn lookup(self, table: &[i8; 16], x: Self::Codes) -> Self::Codes;
    /// Signed codes as they are multiplied: moved by [`Level::signed_offset`].
    fn signed(self, x: Self::Codes) -> Self::Codes;

    /// For `V` times sixteen outputs and `T` rows, `first` and the products of `COUNT` steps from `from` with `x`.
    /// Signed codes have 8 `bits`, and all their steps are taken at once.
    fn dot<C: Steps<Self>, const COUNT: usize, const V: usize, const T: usize>(
        self,
        bits: u32,
        codes: &C,
        from: usize,
        x: [Operand<'_>; T],
        first: [i32; T],
    ) -> [[Self::Sums; T]; V];
    /// `high` times [`TERM`] and `low`.
    fn join(self, high: Self::Sums, low: Self::Sums) -> Self::Sums;

    fn to_float(self, x: Self::Sums) -> Self::F;
    /// Sixteen little-endian halves.
    fn load_f16(self, x: &[u8; 2 * LANES]) -> Self::F;
    fn load_i8(self, x: &[u8; LANES]) -> Self::F;
    fn load_float(self, x: &[f32; LANES]) -> Self::F;
    fn store_float(self, x: Self::F, to: &mut [f32; LANES]);
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

    /// What [`Int8::signed`] adds to a code.
    pub(crate) fn signed_offset(self) -> i32 {
        if matches!(self, Self::AvxVnni | Self::Avx512Vnni) { 128 } else { 0 }
    }

    /// Whether its [`Int8::STREAMS`] are not 0.
    pub(crate) fn unpacks_in_registers(self) -> bool {
        self != Self::Baseline
    }

    /// Its [`Int8::WIDE`].
    pub(crate) fn is_wide(self) -> bool {
        self == Self::Avx512Vnni
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
                Level::Avx512Vnni => wide!(Avx512Vnni, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"),
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

    /// Codes `[8 steps, 16 lanes, 4]` and two rows of `x`.
    struct Problem {
        bits: u32,
        codes: [[u8; BYTES]; 8],
        x: [[i8; 32]; 2],
    }

    impl Problem {
        fn random(rng: &mut Rng, bits: u32) -> Self {
            let mut byte = || rng.next() as u8;
            let mask = ((1u16 << bits) - 1) as u8;
            Self {
                bits,
                codes: std::array::from_fn(|_| std::array::from_fn(|_| byte() & mask)),
                x: std::array::from_fn(|_| std::array::from_fn(|_| (byte() as i8).max(-127))),
            }
        }

        /// The largest sizes of all.
        fn extreme(bits: u32, x: i8) -> Self {
            let code = if bits == 8 { 128 } else { (1 << bits) - 1 };
            Self::of(bits, code, x)
        }

        fn of(bits: u32, code: u8, x: i8) -> Self {
            Self { bits, codes: [[code; BYTES]; 8], x: [[x; 32], [-x; 32]] }
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

        fn sum(&self, r: usize) -> i32 {
            self.x[r].iter().map(|x| i32::from(*x)).sum()
        }
    }

    impl<S: Int8> Steps<S> for Problem {
        #[inline(always)]
        fn codes(&self, simd: S, _: usize, step: usize) -> S::Codes {
            let codes = simd.load(&self.codes[step]);
            if self.bits == 8 { simd.signed(codes) } else { codes }
        }
    }

    dispatch_int8! { fn check_all = check_body(problem: &Problem, offset: i32) }

    fn check(level: Level, problem: &Problem) {
        check_all(level, problem, if problem.bits == 8 { level.signed_offset() } else { 0 });
    }

    #[inline(always)]
    fn check_body<S: Int8>(simd: S, problem: &Problem, offset: i32) {
        let bits = problem.bits;
        let apart = problem.x.map(|x| Apart::of(&x));
        let [a, b] = [0, 1].map(|r| Operand { all: &problem.x[r], apart: &apart[r] });
        // What signed codes are moved by is taken back by where the sums begin.
        let first = [0, 1].map(|r| 1000 - offset * problem.sum(r));
        let [both, again] = simd.dot::<_, 8, 2, 2>(bits, problem, 0, [a, b], first);
        let [[one]] = simd.dot::<_, 8, 1, 1>(bits, problem, 0, [b], [first[1]]);
        for r in 0..2 {
            let got = integers(simd, both[r]);
            for lane in 0..LANES {
                let want = 1000 + problem.reference(r, lane, 0) + problem.reference(r, lane, 1);
                assert_eq!(got[lane], want as f32, "{bits} bits, row {r}, lane {lane}");
            }
            assert_eq!(integers(simd, again[r]), got);
        }
        assert_eq!(integers(simd, one), integers(simd, both[1]));
        let joined = integers(simd, simd.join(both[0], both[1]));
        for lane in 0..LANES {
            let [high, low] = [0, 1]
                .map(|r| 1000 + problem.reference(r, lane, 0) + problem.reference(r, lane, 1));
            assert_eq!(joined[lane], (TERM * high + low) as f32, "{bits} bits, lane {lane}");
        }
        if bits == 8 {
            return;
        }
        for half in 0..2 {
            let [[got]] = simd.dot::<_, 4, 1, 1>(bits, problem, 4 * half, [a], [-5]);
            let got = integers(simd, got);
            for lane in 0..LANES {
                assert_eq!(got[lane], (problem.reference(0, lane, half) - 5) as f32, "half {half}");
            }
        }
    }

    /// As floats, the way kernels see them; sums past 2^24 are rounded alike on both sides.
    #[inline(always)]
    fn integers<S: Int8>(simd: S, sums: S::Sums) -> [f32; LANES] {
        let mut out = [0.0; LANES];
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

    dispatch_int8! { fn move_bytes = move_bytes_body(x: &[u8; BYTES], out: &mut Moved) }

    /// What became of bytes: moved and looked up, and read as numbers.
    #[derive(Debug, Clone, PartialEq)]
    struct Moved {
        bytes: [[u8; BYTES]; 4],
        floats: [[f32; LANES]; 3],
    }

    #[inline(always)]
    fn move_bytes_body<S: Int8>(simd: S, x: &[u8; BYTES], out: &mut Moved) {
        let table = [-127, -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 113];
        let loaded = simd.load(x);
        let moved = [
            simd.right(loaded, 4, 15),
            simd.left(loaded, 3, 0x30),
            simd.or(simd.right(loaded, 0, 15), simd.left(loaded, 4, 16)),
            simd.lookup(&table, simd.right(loaded, 0, 15)),
        ];
        for (moved, out) in moved.into_iter().zip(&mut out.bytes) {
            simd.store(moved, out);
        }
        let (sixteen, _) = x.split_first_chunk().expect("16 bytes");
        simd.store_float(simd.load_i8(sixteen), &mut out.floats[0]);
        let (halves, _) = x.split_first_chunk().expect("32 bytes");
        simd.store_float(simd.load_f16(halves), &mut out.floats[1]);
        let two = simd.mul(simd.load_float(&out.floats[0]), simd.splat(2.0));
        simd.store_float(simd.mul_add(two, simd.splat(3.0), two), &mut out.floats[2]);
    }

    #[test]
    fn bytes_move_alike_on_every_instruction_set() {
        let mut rng = Rng::new(21);
        for _ in 0..200 {
            let mut x = [0; BYTES].map(|_: u8| rng.next() as u8);
            for i in 0..16 {
                x[2 * i + 1] &= 0xbf; // finite halves
            }
            let zeros = Moved { bytes: [[0; BYTES]; 4], floats: [[0.0; LANES]; 3] };
            let mut want = zeros.clone();
            move_bytes(Level::Baseline, &x, &mut want);
            assert_eq!(want.floats[0][3], f32::from(x[3] as i8));
            assert_eq!(want.floats[2][3], 8.0 * f32::from(x[3] as i8));
            assert_eq!(want.bytes[0], x.map(|x| x >> 4));
            for &level in Level::present() {
                let mut got = zeros.clone();
                move_bytes(level, &x, &mut got);
                assert_eq!(got, want, "{level:?}");
            }
        }
    }
}
