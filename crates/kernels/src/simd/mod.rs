//! One vector type per instruction set, and the choice among them.
//!
//! A kernel is written once, generic over [`Simd`], as an `#[inline(always)]` function. The macro
//! `dispatch!` compiles it for every instruction set of the target and calls the one of the caller's
//! [`Level`]. A value of an instruction set's type is the proof that the processor has it.

/// The methods of [`Simd`] that cut slices into arrays of a number of lanes.
macro_rules! split_by_arrays {
    ($lanes:literal) => {
        #[inline(always)]
        fn chunks(x: &[f32]) -> (&[Self::Chunk], &[f32]) {
            x.as_chunks()
        }
        #[inline(always)]
        fn chunks_mut(x: &mut [f32]) -> (&mut [Self::Chunk], &mut [f32]) {
            x.as_chunks_mut()
        }
        #[inline(always)]
        fn halves(x: &[u16]) -> (&[Self::Half], &[u16]) {
            x.as_chunks()
        }
        #[inline(always)]
        fn codes(x: &[i8]) -> (&[Self::Codes], &[i8]) {
            x.as_chunks()
        }
        #[inline(always)]
        fn tail(x: &[f32]) -> Self::Chunk {
            let mut chunk = [0.0; $lanes];
            chunk[..x.len()].copy_from_slice(x);
            chunk
        }
        #[inline(always)]
        fn write_tail(tail: &Self::Chunk, to: &mut [f32]) {
            to.copy_from_slice(&tail[..to.len()]);
        }
        #[inline(always)]
        fn tail_half(x: &[u16]) -> Self::Half {
            let mut half = [0; $lanes];
            half[..x.len()].copy_from_slice(x);
            half
        }
    };
}
pub(crate) use split_by_arrays;

/// The only maker of a proof that the processor has what the type's `present` looks for.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! detected {
    ($proof:ident, $level:literal) => {
        impl $proof {
            /// # Panics
            ///
            /// If the processor lacks one of the features.
            #[inline(always)]
            pub(crate) fn detected() -> Self {
                assert!(Self::present(), concat!("level: ", $level, " on a processor without it"));
                Self(())
            }
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use detected;

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod baseline;
pub(crate) mod int8;
mod level;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

pub use level::{Level, UnknownLevel};

/// A part of a kernel that is worth a function of its own: the compiler's time grows faster than a function does.
pub(crate) trait Step<S: Simd> {
    /// Must be `#[inline(always)]`.
    fn run(self, simd: S);
}

/// What kernels need of an instruction set; `Copy` so that it can be passed everywhere for free.
///
/// `max` and `min` return their second operand when either is NaN. `reduce4` sums each vector in a
/// fixed tree, the same for each of the four.
pub(crate) trait Simd: Copy + Send + Sync {
    /// A vector of `LANES` floats.
    type F: Copy;
    /// `[f32; LANES]`.
    type Chunk: Copy + Send + Sync;
    /// `[u16; LANES]`, bits of bf16 or f16 values.
    type Half: Copy + Send + Sync;
    /// `[i8; LANES]`, small integers.
    type Codes: Copy + Send + Sync;
    const LANES: usize;
    const ZERO: Self::Chunk;

    /// Runs a step, compiled for the instruction set as a function of its own.
    fn apart(self, step: impl Step<Self>);
    /// Splits into whole chunks and the rest.
    fn chunks(x: &[f32]) -> (&[Self::Chunk], &[f32]);
    fn chunks_mut(x: &mut [f32]) -> (&mut [Self::Chunk], &mut [f32]);
    fn halves(x: &[u16]) -> (&[Self::Half], &[u16]);
    fn codes(x: &[i8]) -> (&[Self::Codes], &[i8]);
    /// The rest of a split, filled up with zeros.
    fn tail(x: &[f32]) -> Self::Chunk;
    fn tail_half(x: &[u16]) -> Self::Half;
    /// The first lanes of `tail`, as many as `to` has.
    fn write_tail(tail: &Self::Chunk, to: &mut [f32]);

    /// Asks for the cache line at an address, which need not be one of the program's.
    fn prefetch(self, address: *const u8);
    /// Asks for all cache lines of a slice.
    #[inline(always)]
    fn prefetch_slice(self, x: &[f32]) {
        for i in (0..x.len()).step_by(16) {
            self.prefetch(x.as_ptr().wrapping_add(i).cast());
        }
    }
    fn splat(self, x: f32) -> Self::F;
    fn load(self, x: &Self::Chunk) -> Self::F;
    fn load_bf16(self, x: &Self::Half) -> Self::F;
    fn load_f16(self, x: &Self::Half) -> Self::F;
    fn load_i8(self, x: &Self::Codes) -> Self::F;
    fn store(self, x: Self::F, to: &mut Self::Chunk);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, fused where the instruction set can.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// Nearest integer.
    fn round(self, a: Self::F) -> Self::F;
    /// 2^n for integers n in -126..=127.
    fn exp2i(self, n: Self::F) -> Self::F;
    fn reduce4(self, x: [Self::F; 4]) -> [f32; 4];
    #[inline(always)]
    fn reduce(self, x: Self::F) -> f32 {
        let zero = self.splat(0.0);
        self.reduce4([x, zero, zero, zero])[0]
    }
}

/// Compiles an `#[inline(always)] fn name<S: Simd>(simd: S, args..)` for each instruction set and
/// defines `fn name(level, args..)` that calls the one of `level`.
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident = $body:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments, reason = "mirrors the body's own arguments")]
        $vis fn $name(level: crate::simd::Level, $($arg: $ty),*) $(-> $ret)? {
            use crate::simd::Level;
            match level {
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 | Level::Avx512Vnni => {
                    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
                    fn wide(simd: crate::simd::avx512::Avx512, $($arg: $ty),*) $(-> $ret)? {
                        $body(simd, $($arg),*)
                    }
                    let simd = crate::simd::avx512::Avx512::detected();
                    // SAFETY: `detected` panics unless the processor has these features.
                    unsafe { wide(simd, $($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 | Level::AvxVnni => {
                    #[target_feature(enable = "avx2,fma,f16c")]
                    fn wide(simd: crate::simd::avx2::Avx2, $($arg: $ty),*) $(-> $ret)? {
                        $body(simd, $($arg),*)
                    }
                    let simd = crate::simd::avx2::Avx2::detected();
                    // SAFETY: `detected` panics unless the processor has these features.
                    unsafe { wide(simd, $($arg),*) }
                }
                #[cfg(target_arch = "aarch64")]
                Level::Neon | Level::NeonDotprod => $body(crate::simd::neon::Neon, $($arg),*),
                Level::Baseline => $body(crate::simd::baseline::Baseline, $($arg),*),
                absent => absent.refuse(),
            }
        }
    };
}
pub(crate) use dispatch;
