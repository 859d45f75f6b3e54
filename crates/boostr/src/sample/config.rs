//! The settings of a sampler.

use serde::{Deserialize, Serialize};

use super::{Suppression, range};
use crate::error::{Error, Result};

/// How the next token is chosen. The default draws from the model's own distribution.
///
/// ```
/// use boostr::sample::SamplerConfig;
///
/// let config = SamplerConfig { temperature: 0.7, top_p: 0.95, ..SamplerConfig::default() };
/// assert!(config.validate().is_ok());
/// assert!(SamplerConfig { top_p: 1.5, ..config }.validate().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplerConfig {
    /// Divides the logits; 0 means greedy. Finite, not negative.
    pub temperature: f32,
    /// Keep this many tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the likeliest tokens that together reach this probability, at least one; 1 keeps all. In [0, 1].
    pub top_p: f32,
    /// Keep tokens at least this likely relative to the likeliest; 0 keeps all. In [0, 1].
    pub min_p: f32,
    /// Makes tokens of the window less likely (above 1) or likelier (below 1); 1 is off.
    pub repetition_penalty: f32,
    /// How many of the last tokens the penalty looks at; 0 looks at all of them.
    pub repetition_window: usize,
    /// Taken off a token's logit once it was generated; OpenAI's definition. In [-2, 2].
    pub presence_penalty: f32,
    /// Taken off a token's logit for each time that it was generated. In [-2, 2].
    pub frequency_penalty: f32,
    /// Token ids, each with what is added to its logit; what is given twice is added twice. In [-100, 100].
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that are never chosen. They are the model's, so that no settings on disk have them.
    #[serde(skip)]
    pub suppression: Suppression,
    /// Seed of the generator.
    pub seed: u64,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            repetition_window: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            suppression: Suppression::default(),
            seed: 0,
        }
    }
}

impl SamplerConfig {
    /// Always the likeliest token.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Checks every field's range.
    ///
    /// # Errors
    /// [`Error::Argument`] with the name of the first field that is out of range.
    pub fn validate(&self) -> Result<()> {
        range::TEMPERATURE.check(self.temperature)?;
        range::TOP_P.check(self.top_p)?;
        range::MIN_P.check(self.min_p)?;
        range::REPETITION_PENALTY.check(self.repetition_penalty)?;
        range::PRESENCE_PENALTY.check(self.presence_penalty)?;
        range::FREQUENCY_PENALTY.check(self.frequency_penalty)?;
        for &(id, bias) in &self.logit_bias {
            let range = range::LOGIT_BIAS;
            if !range.contains(bias) {
                let reason = format!("expected for token {id} {}, found {bias}", range.text());
                return Err(Error::Argument { name: range.name, reason });
            }
        }
        Ok(())
    }
}
