//! Which options of sampling win: those of a request, else the model author's, else the library's.

use crate::error::Result;
use crate::generation_config::GenerationDefaults;
use crate::sample::SamplerConfig;

/// What a request says about the choice of tokens. `None` leaves it to the model's `generation_config.json`, and where that
/// is silent to [`SamplerConfig::default`].
///
/// ```
/// use boostr::generation_config::GenerationDefaults;
/// use boostr::text::Sampling;
///
/// let author = GenerationDefaults { temperature: Some(0.7), ..Default::default() };
/// // Without `do_sample` a model is greedy, until an option asks for sampling.
/// assert_eq!(Sampling::default().config(&author, 1)?.temperature, 0.0);
/// let asked = Sampling { top_k: Some(5), ..Default::default() };
/// assert_eq!(asked.config(&author, 1)?.temperature, 0.7);
/// # Ok::<(), boostr::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token.
    pub temperature: Option<f32>,
    /// Keep this many of the likeliest tokens; 0 keeps all.
    pub top_k: Option<usize>,
    /// Keep the likeliest tokens that together have this probability.
    pub top_p: Option<f32>,
    /// Keep tokens at least this likely relative to the likeliest.
    pub min_p: Option<f32>,
    /// Above 1: tokens of the window become less likely.
    pub repetition_penalty: Option<f32>,
    /// How many of the last tokens that penalty looks at; 0 looks at all.
    pub repetition_window: Option<usize>,
    /// Taken off the logit of a token that was generated.
    pub presence_penalty: Option<f32>,
    /// Taken off the logit of a token for each time that it was generated.
    pub frequency_penalty: Option<f32>,
    /// Token ids, each with what is added to its logit.
    pub logit_bias: Vec<(u32, f32)>,
    /// The same seed gives the same answer.
    pub seed: Option<u64>,
}

impl Sampling {
    /// The sampler's configuration; `seed` serves where none was asked for.
    ///
    /// As in transformers a model is greedy unless its author says `do_sample`. Asking for `top_k`, `top_p` or `min_p`,
    /// which only matter to sampling, asks for sampling. The penalty of repetitions looks at all tokens when it is the
    /// author's, as in transformers, and at the last 64 when it was asked for, as in llama.cpp.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) with the name of the first option that is out of range.
    pub fn config(&self, author: &GenerationDefaults, seed: u64) -> Result<SamplerConfig> {
        let base = SamplerConfig::default();
        let asked = self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        let is_sampled = asked || author.do_sample == Some(true);
        let temperature = if is_sampled { author.temperature.unwrap_or(1.0) } else { 0.0 };
        let window = self.repetition_penalty.map_or(0, |_| base.repetition_window);
        let penalty = self.repetition_penalty.or(author.repetition_penalty);
        let config = SamplerConfig {
            temperature: self.temperature.unwrap_or(temperature),
            top_k: self.top_k.or(author.top_k).unwrap_or(base.top_k),
            top_p: self.top_p.or(author.top_p).unwrap_or(base.top_p),
            min_p: self.min_p.or(author.min_p).unwrap_or(base.min_p),
            repetition_penalty: penalty.unwrap_or(base.repetition_penalty),
            repetition_window: self.repetition_window.unwrap_or(window),
            presence_penalty: self.presence_penalty.unwrap_or(base.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(base.frequency_penalty),
            logit_bias: self.logit_bias.clone(),
            suppression: author.suppression.clone(),
            seed: self.seed.unwrap_or(seed),
        };
        config.validate()?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn author() -> GenerationDefaults {
        GenerationDefaults {
            do_sample: Some(true),
            temperature: Some(0.7),
            top_p: Some(0.95),
            ..Default::default()
        }
    }

    fn config(asked: &Sampling, author: &GenerationDefaults) -> SamplerConfig {
        asked.config(author, 1).unwrap()
    }

    #[test]
    fn a_model_without_do_sample_is_greedy_until_asked() {
        let silent = GenerationDefaults { do_sample: None, ..author() };
        let temperature = |asked: Sampling| config(&asked, &silent).temperature;
        assert_eq!(temperature(Sampling::default()), 0.0);
        assert_eq!(temperature(Sampling { top_k: Some(5), ..Default::default() }), 0.7);
        assert_eq!(temperature(Sampling { temperature: Some(0.2), ..Default::default() }), 0.2);
    }

    #[test]
    fn options_win_over_the_authors_defaults() {
        let got = config(&Sampling::default(), &author());
        assert_eq!((got.temperature, got.top_p, got.top_k), (0.7, 0.95, 0));
        let asked = Sampling { temperature: Some(0.0), top_p: Some(0.5), ..Default::default() };
        let got = config(&asked, &author());
        assert_eq!((got.temperature, got.top_p), (0.0, 0.5));
    }

    #[test]
    fn the_penalty_of_the_author_looks_at_all_tokens_and_one_that_is_asked_for_at_64() {
        let author = GenerationDefaults { repetition_penalty: Some(1.2), ..author() };
        assert_eq!(config(&Sampling::default(), &author).repetition_window, 0);
        let asked = Sampling { repetition_penalty: Some(1.1), ..Default::default() };
        let got = config(&asked, &author);
        assert_eq!((got.repetition_penalty, got.repetition_window), (1.1, 64));
        let asked = Sampling { repetition_window: Some(7), ..asked };
        assert_eq!(config(&asked, &author).repetition_window, 7);
    }

    #[test]
    fn an_impossible_option_is_named() {
        let asked = Sampling { temperature: Some(-1.0), ..Default::default() };
        let error = asked.config(&author(), 1).unwrap_err().to_string();
        assert!(error.contains("temperature"), "{error}");
    }
}
