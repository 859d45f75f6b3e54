//! Which instruction sets there are, which of them this processor has, and their names.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// An instruction set that kernels are compiled for.
///
/// One level names both kinds of vectors: floats, and products of 8-bit integers. Levels differ in the
/// order of a sum, so results agree within rounding between levels, and to the bit on any one of them.
///
/// ```
/// use boostr_kernels::Level;
/// assert_eq!("avx2".parse(), Ok(Level::Avx2));
/// assert!(Level::present().contains(&Level::detect()));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Level {
    /// What the compiler may assume of any processor of the target.
    Baseline,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// The same with AVX-VNNI: products of 8-bit integers in one instruction.
    AvxVnni,
    /// x86-64 with AVX-512F, AVX2, FMA and F16C.
    Avx512,
    /// The same with AVX-512 BW, VL and VNNI: products of 8-bit integers in one instruction.
    Avx512Vnni,
    /// 64-bit Arm.
    Neon,
    /// The same with dot products of 8-bit integers.
    NeonDotprod,
}

impl Level {
    /// Every level of every processor, narrowest first.
    pub const ALL: [Self; 7] = [
        Self::Baseline,
        Self::Avx2,
        Self::AvxVnni,
        Self::Avx512,
        Self::Avx512Vnni,
        Self::Neon,
        Self::NeonDotprod,
    ];

    /// The levels of this processor, the best last.
    #[must_use]
    pub fn present() -> &'static [Self] {
        static PRESENT: OnceLock<Vec<Level>> = OnceLock::new();
        PRESENT.get_or_init(|| Self::ALL.into_iter().filter(|level| level.is_present()).collect())
    }

    /// The best level of this processor.
    #[must_use]
    pub fn detect() -> Self {
        Self::present().last().copied().unwrap_or(Self::Baseline)
    }

    /// Whether this processor has it.
    #[must_use]
    pub fn is_present(self) -> bool {
        match self {
            Self::Baseline => true,
            _ if cfg!(miri) => false,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => super::avx2::Avx2::present(),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => super::int8::vnni::AvxVnni::present(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::avx512::Avx512::present(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                super::avx512::Avx512::present() && super::int8::vnni::Avx512Vnni::present()
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => true,
            #[cfg(target_arch = "aarch64")]
            Self::NeonDotprod => super::int8::neon::NeonDot::present(),
            #[allow(unreachable_patterns, reason = "no target has every level")]
            _ => false,
        }
    }

    /// The name that options and reports use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avx-vnni",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512-vnni",
            Self::Neon => "neon",
            Self::NeonDotprod => "neon-dotprod",
        }
    }

    /// For a level that no code of this target is compiled for.
    ///
    /// # Panics
    ///
    /// Always.
    #[cold]
    #[track_caller]
    pub(crate) fn refuse(self) -> ! {
        panic!("level: {self} on a processor without it")
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that no [`Level`] has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownLevel(pub String);

impl fmt::Display for UnknownLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Level::present().iter().map(|level| level.name()).collect::<Vec<_>>();
        write!(
            f,
            "level: expected one that this machine has ({}), found `{}`",
            names.join(", "),
            self.0
        )
    }
}

impl std::error::Error for UnknownLevel {}

impl FromStr for Level {
    type Err = UnknownLevel;

    fn from_str(name: &str) -> Result<Self, UnknownLevel> {
        let level = Self::ALL.into_iter().find(|level| level.name() == name);
        level.ok_or_else(|| UnknownLevel(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_to_what_they_print() {
        for level in Level::ALL {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
        let error = "avx".parse::<Level>().unwrap_err().to_string();
        assert!(error.contains("baseline") && error.ends_with("found `avx`"), "{error}");
    }

    #[test]
    fn the_baseline_is_always_there_and_the_best_is_the_last() {
        let present = Level::present();
        assert_eq!(present.first(), Some(&Level::Baseline));
        assert_eq!(present.last(), Some(&Level::detect()));
        assert!(Level::ALL.into_iter().all(|l| l.is_present() == present.contains(&l)));
    }
}
