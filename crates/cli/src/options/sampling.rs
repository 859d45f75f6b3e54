//! How tokens are chosen: options over the model's own defaults over those of the library.

use std::process;
use std::time::SystemTime;

use anyhow::Result;
use boostr::generation_config::GenerationDefaults;
use boostr::sample::SamplerConfig;
use clap::Args;

use crate::exit::usage;

/// How tokens are chosen.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Seed of the random choice; from the clock by default
    #[arg(short, long, value_name = "N", env = "BOOSTR_SEED", hide_env = true)]
    pub seed: Option<u64>,
    /// Temperature; 0 takes the likeliest token each time
    #[arg(long, alias = "temperature", value_name = "X", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_TEMP", hide_env = true)]
    pub temp: Option<f32>,
    /// Choose among the N likeliest; 0 for all
    #[arg(long, value_name = "N", env = "BOOSTR_TOP_K", hide_env = true)]
    pub top_k: Option<usize>,
    /// Choose among the likeliest that together reach X; 1 for all
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_TOP_P", hide_env = true)]
    pub top_p: Option<f32>,
    /// Choose among those at least X times as likely as the likeliest; 0 for all
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_MIN_P", hide_env = true)]
    pub min_p: Option<f32>,
    /// Make tokens less likely that have come already; 1 is off
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_REPEAT_PENALTY", hide_env = true)]
    pub repeat_penalty: Option<f32>,
    /// How many of the last tokens --repeat-penalty looks at; 0 for all [default: 64]
    #[arg(long, value_name = "N", env = "BOOSTR_REPEAT_LAST_N", hide_env = true)]
    pub repeat_last_n: Option<usize>,
}

/// Most tokens of a model that does not say.
pub const MAX_TOKENS: usize = 128;

impl SamplingArgs {
    /// The sampler's configuration.
    ///
    /// As in transformers, a model is greedy unless its `generation_config.json` says `do_sample`;
    /// an option that only matters when sampling asks for sampling.
    pub fn config(&self, defaults: &GenerationDefaults) -> Result<SamplerConfig> {
        let asked = self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        let sampled = asked || defaults.do_sample == Some(true);
        let default = SamplerConfig::default();
        let temperature = if sampled { defaults.temperature.unwrap_or(1.0) } else { 0.0 };
        // transformers looks at all tokens, llama.cpp's option at the last 64.
        let window = match self.repeat_penalty {
            Some(_) => default.repetition_window,
            None => 0,
        };
        let config = SamplerConfig {
            temperature: self.temp.unwrap_or(temperature),
            top_k: self.top_k.or(defaults.top_k).unwrap_or(default.top_k),
            top_p: self.top_p.or(defaults.top_p).unwrap_or(default.top_p),
            min_p: self.min_p.or(defaults.min_p).unwrap_or(default.min_p),
            repetition_penalty: self
                .repeat_penalty
                .or(defaults.repetition_penalty)
                .unwrap_or(default.repetition_penalty),
            repetition_window: self.repeat_last_n.unwrap_or(window),
            seed: self.seed.unwrap_or_else(seed_of_the_clock),
            ..default
        };
        config.validate().map_err(|error| usage(error.to_string()))?;
        Ok(config)
    }
}

/// Most tokens to generate when the command line does not say.
pub fn max_tokens(defaults: &GenerationDefaults) -> usize {
    defaults.max_new_tokens.unwrap_or(MAX_TOKENS)
}

/// The configuration for people.
pub fn describe(config: &SamplerConfig) -> String {
    let mut text = if config.temperature == 0.0 {
        "greedy".to_owned()
    } else {
        let SamplerConfig { temperature, top_k, top_p, min_p, seed, .. } = config;
        let mut text = format!("temperature {temperature}");
        if *top_k > 0 {
            text += &format!(", top-k {top_k}");
        }
        if *top_p < 1.0 {
            text += &format!(", top-p {top_p}");
        }
        if *min_p > 0.0 {
            text += &format!(", min-p {min_p}");
        }
        text + &format!(", seed {seed}")
    };
    if config.repetition_penalty != 1.0 {
        text += &format!(", repeat penalty {}", config.repetition_penalty);
    }
    text
}

/// A seed that differs from run to run, short enough to type again.
fn seed_of_the_clock() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mixed = (now.as_nanos() as u64 ^ u64::from(process::id()) << 40)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: SamplingArgs = SamplingArgs {
        seed: Some(1),
        temp: None,
        top_k: None,
        top_p: None,
        min_p: None,
        repeat_penalty: None,
        repeat_last_n: None,
    };

    fn defaults() -> GenerationDefaults {
        GenerationDefaults {
            do_sample: Some(true),
            temperature: Some(0.7),
            top_p: Some(0.95),
            ..Default::default()
        }
    }

    #[test]
    fn a_model_without_do_sample_is_greedy_until_asked() {
        let silent = GenerationDefaults { do_sample: None, ..defaults() };
        assert_eq!(NONE.config(&silent).unwrap().temperature, 0.0);
        assert_eq!(
            SamplingArgs { top_k: Some(5), ..NONE }.config(&silent).unwrap().temperature,
            0.7
        );
        assert_eq!(
            SamplingArgs { temp: Some(0.2), ..NONE }.config(&silent).unwrap().temperature,
            0.2
        );
    }

    #[test]
    fn options_win_over_the_models_defaults() {
        let config = NONE.config(&defaults()).unwrap();
        assert_eq!((config.temperature, config.top_p, config.top_k), (0.7, 0.95, 0));
        let config = SamplingArgs { temp: Some(0.0), top_p: Some(0.5), ..NONE };
        let config = config.config(&defaults()).unwrap();
        assert_eq!((config.temperature, config.top_p), (0.0, 0.5));
    }

    #[test]
    fn the_penalty_of_a_model_looks_at_all_tokens_and_that_of_the_option_at_64() {
        let defaults = GenerationDefaults { repetition_penalty: Some(1.2), ..defaults() };
        assert_eq!(NONE.config(&defaults).unwrap().repetition_window, 0);
        let config = SamplingArgs { repeat_penalty: Some(1.1), ..NONE }.config(&defaults).unwrap();
        assert_eq!((config.repetition_penalty, config.repetition_window), (1.1, 64));
    }

    #[test]
    fn impossible_options_are_wrong_usage() {
        let error = SamplingArgs { temp: Some(-1.0), ..NONE }.config(&defaults()).unwrap_err();
        assert!(error.is::<crate::exit::Usage>());
        assert!(error.to_string().contains("temperature"), "{error}");
    }
}
