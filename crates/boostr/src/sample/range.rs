//! The ranges of the options of sampling: one table, by which samplers check and servers read and describe.

use std::ops::RangeInclusive;

use crate::error::{Error, Result};

/// The values that an option of sampling takes.
#[derive(Clone, Debug, PartialEq)]
pub struct OptionRange {
    /// Its name, as in [`SamplerConfig`](super::SamplerConfig) and in the API of OpenAI.
    pub name: &'static str,
    /// The lowest value.
    pub min: f32,
    /// Whether `min` itself is out of range.
    pub excludes_min: bool,
    /// The highest value; infinite where every finite number is taken.
    pub max: f32,
    /// What of it a server takes, with `min` excluded as above.
    pub served: RangeInclusive<f32>,
}

/// The largest `top_k`.
pub const MAX_TOP_K: usize = 1 << 24;

/// 0 takes the likeliest token.
pub const TEMPERATURE: OptionRange = from("temperature", 0.0, f32::INFINITY, 0.0..=2.0);
/// The probability that the likeliest tokens reach together; 0 is that of the likeliest alone.
pub const TOP_P: OptionRange = from("top_p", 0.0, 1.0, 0.0..=1.0);
/// A probability relative to the likeliest token's.
pub const MIN_P: OptionRange = from("min_p", 0.0, 1.0, 0.0..=1.0);
/// 1 is off.
pub const REPETITION_PENALTY: OptionRange =
    above("repetition_penalty", 0.0, f32::INFINITY, 0.01..=100.0);
/// 0 is off.
pub const PRESENCE_PENALTY: OptionRange = from("presence_penalty", -2.0, 2.0, -2.0..=2.0);
/// 0 is off.
pub const FREQUENCY_PENALTY: OptionRange = from("frequency_penalty", -2.0, 2.0, -2.0..=2.0);
/// Of one token.
pub const LOGIT_BIAS: OptionRange = from("logit_bias", -100.0, 100.0, -100.0..=100.0);

/// All of the options that are one number.
pub const OPTION_RANGES: [OptionRange; 6] =
    [TEMPERATURE, TOP_P, MIN_P, REPETITION_PENALTY, PRESENCE_PENALTY, FREQUENCY_PENALTY];

const fn from(name: &'static str, min: f32, max: f32, served: RangeInclusive<f32>) -> OptionRange {
    OptionRange { name, min, excludes_min: false, max, served }
}

const fn above(name: &'static str, min: f32, max: f32, served: RangeInclusive<f32>) -> OptionRange {
    OptionRange { name, min, excludes_min: true, max, served }
}

impl OptionRange {
    /// Checks a value.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] with the name, the range and the value.
    ///
    /// ```
    /// use boostr::sample::TOP_P;
    ///
    /// assert!(TOP_P.check(0.95).is_ok());
    /// let error = TOP_P.check(1.5).unwrap_err();
    /// assert_eq!(error.to_string(), "argument `top_p`: expected a number from 0 to 1, found 1.5");
    /// ```
    pub fn check(&self, value: f32) -> Result<()> {
        if self.contains(value) {
            return Ok(());
        }
        let reason = format!("expected {}, found {value}", self.text());
        Err(Error::Argument { name: self.name, reason })
    }

    /// Whether a value is in it.
    #[must_use]
    pub fn contains(&self, value: f32) -> bool {
        let is_low = if self.excludes_min { value <= self.min } else { value < self.min };
        value.is_finite() && !is_low && value <= self.max
    }

    /// It in words.
    #[must_use]
    pub fn text(&self) -> String {
        let (min, max) = (self.min, self.max);
        match (self.excludes_min, max.is_finite()) {
            (true, true) => format!("a number > {min} and <= {max}"),
            (true, false) => format!("a finite number > {min}"),
            (false, true) => format!("a number from {min} to {max}"),
            (false, false) => format!("a finite number >= {min}"),
        }
    }
}
