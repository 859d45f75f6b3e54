//! How tokens are chosen: the options of the command line.

use std::process;
use std::time::SystemTime;

use anyhow::Result;
use boostr::generation_config::GenerationDefaults;
use boostr::sample::{self, OptionRange, SamplerConfig};
use boostr::text::Sampling;
use clap::Args;

use crate::exit::usage;

/// How tokens are chosen.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Seed of the random choice; from the clock by default
    #[arg(short, long, value_name = "N", env = "BOOSTR_SEED", hide_env = true)]
    pub seed: Option<u64>,
    #[arg(help = ranged("Temperature; 0 takes the likeliest token each time", &sample::TEMPERATURE))]
    #[arg(long, alias = "temperature", value_name = "X", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_TEMP", hide_env = true)]
    pub temp: Option<f32>,
    /// Choose among the N likeliest; 0 or -1 for all
    #[arg(long, value_name = "N", env = "BOOSTR_TOP_K", hide_env = true)]
    #[arg(allow_negative_numbers = true, value_parser = parse_top_k)]
    pub top_k: Option<usize>,
    #[arg(help = ranged("Choose among the likeliest that together reach X; 1 for all, 0 for one", &sample::TOP_P))]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_TOP_P", hide_env = true)]
    pub top_p: Option<f32>,
    #[arg(help = ranged("Choose among those at least X times as likely as the likeliest; 0 for all", &sample::MIN_P))]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_MIN_P", hide_env = true)]
    pub min_p: Option<f32>,
    #[arg(help = ranged("Make tokens less likely that have come already; 1 is off", &sample::REPETITION_PENALTY))]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_REPEAT_PENALTY", hide_env = true)]
    pub repeat_penalty: Option<f32>,
    /// How many of the last tokens --repeat-penalty looks at; 0 for all [default: 64]
    #[arg(long, value_name = "N", env = "BOOSTR_REPEAT_LAST_N", hide_env = true)]
    pub repeat_last_n: Option<usize>,
}

/// The help of an option, with the values that it takes.
fn ranged(text: &str, range: &OptionRange) -> String {
    format!("{text}. Takes {}", range.text())
}

/// Most tokens of a model that does not say.
pub const MAX_TOKENS: usize = 128;

impl SamplingArgs {
    /// The options, with a seed of the clock where none is given.
    pub fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repeat_penalty,
            repetition_window: self.repeat_last_n,
            seed: Some(self.seed.unwrap_or_else(seed_of_the_clock)),
            ..Sampling::default()
        }
    }
}

/// A number, or -1, by which other programs mean all.
fn parse_top_k(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(0),
        _ => text.parse().map_err(|_| "expected a whole number, or -1 for all".to_owned()),
    }
}

/// What the options come to, for a model with these defaults.
pub fn config(sampling: &Sampling, defaults: &GenerationDefaults) -> Result<SamplerConfig> {
    sampling.config(defaults, 0).map_err(|error| usage(error.to_string()))
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
    if !config.suppression.is_empty() {
        text += ", without the tokens that the author suppresses";
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

    #[test]
    fn the_help_tells_the_values_that_an_option_takes() {
        let mut command = SamplingArgs::augment_args(clap::Command::new("test"));
        let help = command.render_help().to_string();
        for (option, range) in [
            ("--temp", sample::TEMPERATURE),
            ("--top-p", sample::TOP_P),
            ("--min-p", sample::MIN_P),
            ("--repeat-penalty", sample::REPETITION_PENALTY),
        ] {
            let line = help.lines().find(|line| line.contains(&format!("{option} <X>"))).unwrap();
            assert!(line.ends_with(&range.text()), "{line}");
        }
    }

    #[test]
    fn impossible_options_are_wrong_usage() {
        let asked = SamplingArgs { temp: Some(-1.0), ..NONE }.sampling();
        let error = config(&asked, &GenerationDefaults::default()).unwrap_err();
        assert!(error.is::<crate::exit::Usage>());
        assert!(error.to_string().contains("temperature"), "{error}");
    }
}
