//! From logits to the next token, and from text to the place where it has to stop.
//!
//! # Order of the filters
//!
//! As in transformers and llama.cpp, each filter works on the result of the one before it:
//!
//! ```text
//! suppressed tokens   are not chosen, see [`Suppression`]
//! repetition penalty  l > 0 ? l / penalty : l * penalty, once per distinct token of the window
//! temperature         p ∝ exp((l - max l) / temperature); 0 takes the largest logit at once
//! top_k               the k largest logits; of equal ones the lowest ids
//! top_p               the shortest head of the sorted rest whose probabilities reach top_p
//! min_p               those with p >= min_p * (largest p)
//! ```
//!
//! transformers keeps *every* token that ties with the k-th logit; here exactly k stay.
//!
//! # Reproducibility
//!
//! The generator is `SplitMix64` (Steele, Lea, Flood 2014). It has 64 bits of state, takes one step per
//! sampled token and none for a greedy one, and gives the same numbers on every platform. Probabilities
//! are computed in f64. Only the C library's `exp` may differ between platforms, by about 1 part in
//! 10^16.

use crate::error::{Error, Result};

mod config;
mod constraint;
mod logprobs;
mod random;
mod range;
mod stops;
mod suppression;

pub use config::SamplerConfig;
pub use constraint::{Constraint, TokenSet};
pub(crate) use logprobs::LogSoftmax;
pub(crate) use random::SplitMix64;
pub use range::{
    FREQUENCY_PENALTY, LOGIT_BIAS, MAX_TOP_K, MIN_P, OPTION_RANGES, OptionRange, PRESENCE_PENALTY,
    REPETITION_PENALTY, TEMPERATURE, TOP_P,
};
pub use stops::{Released, StopStrings};
pub use suppression::Suppression;

/// A token that was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub id: u32,
    /// Its log-probability in the model's own distribution: `log_softmax` of the logits below the limit, before
    /// any filter. 0 when none was asked for.
    pub logprob: f32,
    /// The likeliest tokens of that distribution with their log-probabilities, likeliest first; of equal ones the
    /// lower id first. Tokens of probability 0 are left out.
    pub top: Vec<(u32, f32)>,
}

/// Chooses tokens by a [`SamplerConfig`]. Its buffers are allocated once, for the vocabulary.
///
/// ```
/// use boostr::sample::{Sampler, SamplerConfig};
///
/// let mut sampler = Sampler::new(SamplerConfig::greedy(), 3)?;
/// // The fourth logit belongs to a padding row of the weights.
/// assert_eq!(sampler.sample(&[0.5, 2.0, 1.0, 9.0], &[])?, 1);
/// # Ok::<(), boostr::error::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplerConfig,
    vocab_limit: usize,
    rng: SplitMix64,
    /// Logits after the penalty, for the ids below the limit.
    scores: Vec<f32>,
    /// The call that last penalised each id, so that a repeated token is penalised once.
    penalised: Vec<u64>,
    call: u64,
    /// How often each id was generated; all 0 between calls, and empty without a penalty that needs it.
    counts: Vec<u32>,
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    score: f32,
    /// exp((score - largest score) / temperature), so the likeliest has 1.
    weight: f64,
}

impl Candidate {
    /// Likelier first, then the lower id: a total order, so that an unstable sort has one result.
    fn order(a: &Self, b: &Self) -> std::cmp::Ordering {
        b.score.total_cmp(&a.score).then(a.id.cmp(&b.id))
    }
}

impl Sampler {
    /// A sampler that never chooses ids of `vocab_limit` and above: weights may be padded to more rows
    /// than there are tokens.
    ///
    /// # Errors
    /// [`Error::Argument`] if `config` is out of range, `vocab_limit` is 0 or above 2^24, or a token of the bias is
    /// not below it.
    pub fn new(config: SamplerConfig, vocab_limit: usize) -> Result<Self> {
        config.validate()?;
        if !(1..=1 << 24).contains(&vocab_limit) {
            let reason = format!("expected 1 to 2^24 tokens, found {vocab_limit}");
            return Err(Error::Argument { name: "vocab_limit", reason });
        }
        if let Some((id, _)) = config.logit_bias.iter().find(|&&(id, _)| id as usize >= vocab_limit)
        {
            let reason = format!("expected token ids below {vocab_limit}, found {id}");
            return Err(Error::Argument { name: "logit_bias", reason });
        }
        let counts = if counts_tokens(&config) { vocab_limit } else { 0 };
        Ok(Self {
            rng: SplitMix64(config.seed),
            config,
            vocab_limit,
            scores: Vec::with_capacity(vocab_limit),
            penalised: vec![0; vocab_limit],
            call: 0,
            counts: vec![0; counts],
            candidates: Vec::with_capacity(vocab_limit),
        })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &SamplerConfig {
        &self.config
    }

    /// State of the generator; with [`set_rng_state`](Self::set_rng_state) a saved session goes on
    /// with the tokens that it would have got uninterrupted.
    #[must_use]
    pub fn rng_state(&self) -> u64 {
        self.rng.0
    }

    /// Continues from a state that [`rng_state`](Self::rng_state) gave.
    pub fn set_rng_state(&mut self, state: u64) {
        self.rng.0 = state;
    }

    /// Takes the generator to where it is after choosing `count` tokens.
    pub fn skip(&mut self, count: usize) {
        if self.config.temperature > 0.0 {
            self.rng.skip(count as u64);
        }
    }

    /// Chooses the next token.
    ///
    /// | argument | shape | meaning |
    /// |---|---|---|
    /// | `logits` | at least `[vocab_limit]` | scores of the next token; -inf excludes one |
    /// | `history` | any | the tokens so far, the newest last, all taken as generated; read by penalties only |
    ///
    /// Ids of `history` from `vocab_limit` up are ignored. Costs O(vocab) plus sorting what the filters
    /// may keep.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are too few logits; [`Error::Argument`] if one below the limit is NaN
    /// or +inf, or if all are -inf.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32> {
        Ok(self.choose(logits, history, 0, None, None)?.id)
    }

    /// Chooses the next token of a text that started with a prompt, among those that are allowed.
    ///
    /// | argument | shape | meaning |
    /// |---|---|---|
    /// | `logits` | at least `[vocab_limit]` | scores of the next token; -inf excludes one |
    /// | `history` | any | the tokens so far, the newest last |
    /// | `prompt` | | the first so many of them were given: the presence and frequency penalties look at the others only |
    /// | `allowed` | | the tokens that may be chosen; without a set all of them |
    /// | `top` | | how many likeliest tokens to report; `None`: no log-probabilities are computed |
    ///
    /// # Errors
    /// As [`sample`](Self::sample), and [`Error::Argument`] if none of the allowed tokens can be chosen.
    ///
    /// ```
    /// use boostr::sample::{Sampler, SamplerConfig, TokenSet};
    ///
    /// let mut sampler = Sampler::new(SamplerConfig::greedy(), 3)?;
    /// let mut allowed = TokenSet::new(3, true);
    /// allowed.forbid(1);
    /// let choice = sampler.choose(&[0.0, 2.0, 1.0], &[], 0, Some(&allowed), Some(2))?;
    /// assert_eq!(choice.id, 2);
    /// // e^1 / (e^0 + e^2 + e^1)
    /// assert!((choice.logprob.exp() - 0.2447).abs() < 1e-4);
    /// assert_eq!([choice.top[0].0, choice.top[1].0], [1, 2]);
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn choose(
        &mut self,
        logits: &[f32],
        history: &[u32],
        prompt: usize,
        allowed: Option<&TokenSet>,
        top: Option<usize>,
    ) -> Result<Choice> {
        let Some(logits) = logits.get(..self.vocab_limit) else {
            return Err(Error::Shape {
                name: "logits".to_owned(),
                expected: vec![self.vocab_limit],
                got: vec![logits.len()],
            });
        };
        check_logits(logits)?;
        let id = self.id(logits, history, history.get(prompt..).unwrap_or_default(), allowed)?;
        let Some(count) = top else {
            return Ok(Choice { id, logprob: 0.0, top: Vec::new() });
        };
        let distribution = LogSoftmax::of(logits);
        let logprob = logits.get(id as usize).map_or(f32::MIN, |&logit| distribution.at(logit));
        Ok(Choice { id, logprob, top: distribution.top(logits, count) })
    }

    fn id(
        &mut self,
        logits: &[f32],
        history: &[u32],
        generated: &[u32],
        allowed: Option<&TokenSet>,
    ) -> Result<u32> {
        self.scores.clear();
        // Adding zero turns -0 into +0, which `total_cmp` would otherwise put after it.
        self.scores.extend(logits.iter().map(|&logit| logit + 0.0));
        self.bias();
        self.penalise(history);
        self.penalise_generated(generated);
        let suppression = &self.config.suppression;
        let left = if suppression.is_empty() {
            None
        } else {
            Some(suppression.leave(allowed, self.vocab_limit, history, generated.is_empty())?)
        };
        let allowed = left.as_ref().or(allowed);
        if let Some(allowed) = allowed {
            allowed.mask(&mut self.scores);
        }

        let (best, top) = argmax(&self.scores);
        if top == f32::NEG_INFINITY {
            let count = allowed.map_or(0, TokenSet::len);
            let reason = format!("none of the {count} allowed tokens has a logit above -inf");
            return Err(Error::Argument { name: "allowed", reason });
        }
        if self.config.temperature == 0.0 {
            return Ok(best);
        }
        self.collect_candidates(top);
        self.keep_top_k();
        self.keep_top_p();
        self.keep_min_p();
        Ok(self.draw().unwrap_or(best))
    }

    fn bias(&mut self) {
        for &(id, bias) in &self.config.logit_bias {
            if let Some(score) = self.scores.get_mut(id as usize) {
                add(score, bias);
            }
        }
    }

    fn penalise(&mut self, history: &[u32]) {
        let Self { config, scores, penalised, .. } = self;
        let penalty = config.repetition_penalty;
        if penalty == 1.0 {
            return;
        }
        let skipped = match config.repetition_window {
            0 => 0,
            window => history.len().saturating_sub(window),
        };
        self.call += 1;
        for &id in history.iter().skip(skipped) {
            let id = id as usize;
            let (Some(score), Some(mark)) = (scores.get_mut(id), penalised.get_mut(id)) else {
                continue;
            };
            if *mark == self.call || *score == f32::NEG_INFINITY {
                continue;
            }
            *mark = self.call;
            let changed = if *score > 0.0 { *score / penalty } else { *score * penalty };
            // An extreme penalty must not turn a finite logit into an infinity.
            *score = changed.clamp(f32::MIN, f32::MAX) + 0.0;
        }
    }

    fn penalise_generated(&mut self, generated: &[u32]) {
        let Self { config, scores, counts, .. } = self;
        if !counts_tokens(config) {
            return;
        }
        for &id in generated {
            if let Some(count) = counts.get_mut(id as usize) {
                *count += 1;
            }
        }
        for &id in generated {
            let id = id as usize;
            let (Some(score), Some(count)) = (scores.get_mut(id), counts.get_mut(id)) else {
                continue;
            };
            match std::mem::take(count) {
                0 => {} // was met before
                n => add(score, -(config.presence_penalty + config.frequency_penalty * n as f32)),
            }
        }
    }

    fn collect_candidates(&mut self, top: f32) {
        let temperature = f64::from(self.config.temperature);
        let weight = |score| ((f64::from(score) - f64::from(top)) / temperature).exp();
        self.candidates.clear();
        self.candidates.extend(
            (0..)
                .zip(&self.scores)
                .filter(|&(_, &score)| score != f32::NEG_INFINITY)
                .map(|(id, &score)| Candidate { id, score, weight: weight(score) }),
        );
    }

    /// Leaves the candidates sorted if it removes any.
    fn keep_top_k(&mut self) {
        let k = self.config.top_k;
        if k == 0 || k >= self.candidates.len() {
            return;
        }
        self.candidates.select_nth_unstable_by(k - 1, Candidate::order);
        self.candidates.truncate(k);
        self.candidates.sort_unstable_by(Candidate::order);
    }

    /// Leaves the candidates sorted unless it is off.
    ///
    /// The nucleus is mostly a handful of a large vocabulary, so only growing heads get sorted.
    fn keep_top_p(&mut self) {
        let top_p = f64::from(self.config.top_p);
        if top_p >= 1.0 {
            return;
        }
        let wanted = top_p * self.candidates.iter().map(|c| c.weight).sum::<f64>();
        let mut sorted = 0;
        let mut head = 64;
        let mut reached = 0.0;
        while sorted < self.candidates.len() {
            let rest = self.candidates.get_mut(sorted..).unwrap_or_default();
            if head < rest.len() {
                rest.select_nth_unstable_by(head - 1, Candidate::order);
            }
            let len = head.min(rest.len());
            let part = rest.get_mut(..len).unwrap_or_default();
            part.sort_unstable_by(Candidate::order);
            for candidate in part.iter() {
                sorted += 1;
                reached += candidate.weight;
                if reached >= wanted {
                    self.candidates.truncate(sorted);
                    return;
                }
            }
            head = head.saturating_mul(4);
        }
    }

    /// Keeps the order.
    fn keep_min_p(&mut self) {
        let min_p = f64::from(self.config.min_p);
        if min_p > 0.0 {
            self.candidates.retain(|candidate| candidate.weight >= min_p);
        }
    }

    /// `None` only if there is no candidate.
    fn draw(&mut self) -> Option<u32> {
        let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
        let wanted = self.rng.uniform() * total;
        let mut reached = 0.0;
        for candidate in &self.candidates {
            reached += candidate.weight;
            if reached > wanted {
                return Some(candidate.id);
            }
        }
        // Only rounding leads here: the product above may come out as the total.
        self.candidates.iter().rev().find(|c| c.weight > 0.0).map(|c| c.id)
    }
}

/// Whether a penalty needs to know how often tokens were generated.
fn counts_tokens(config: &SamplerConfig) -> bool {
    config.presence_penalty != 0.0 || config.frequency_penalty != 0.0
}

/// Adds to a score: -inf stays what it is, and a finite one stays finite.
fn add(score: &mut f32, change: f32) {
    if *score != f32::NEG_INFINITY {
        *score = (*score + change).clamp(f32::MIN, f32::MAX) + 0.0;
    }
}

#[expect(
    clippy::needless_bitwise_bool,
    reason = "without an early exit the two folds are a few vector instructions per eight logits"
)]
pub(crate) fn check_logits(logits: &[f32]) -> Result<()> {
    let bad =
        logits.iter().fold(false, |bad, &logit| bad | logit.is_nan() | (logit == f32::INFINITY));
    let some = logits.iter().fold(false, |some, &logit| some | (logit > f32::NEG_INFINITY));
    let refuse = |reason| Err(Error::Argument { name: "logits", reason });
    if bad && let Some(id) = logits.iter().position(|logit| logit.is_nan()) {
        return refuse(format!("expected numbers, found NaN for token {id}"));
    }
    if bad && let Some(id) = logits.iter().position(|&logit| logit == f32::INFINITY) {
        return refuse(format!("expected finite numbers or -inf, found +inf for token {id}"));
    }
    if !some {
        return refuse(format!("all {} are -inf: no token is allowed", logits.len()));
    }
    Ok(())
}

/// The lowest id of the largest score, and the score.
pub(crate) fn argmax(scores: &[f32]) -> (u32, f32) {
    const LANES: usize = 16;
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = scores.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &score) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, score);
        }
    }
    let top = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger);
    let best = (0..).zip(scores).find(|&(_, &score)| score == top);
    (best.map_or(0, |(id, _)| id), top)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs of the authors' C code for seed 1234567.
    #[test]
    fn splitmix64_gives_its_published_numbers() {
        let mut rng = SplitMix64(1_234_567);
        let expected: [u64; 5] = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(expected.map(|_| rng.next()), expected);
    }

    #[test]
    fn uniform_numbers_stay_below_one() {
        let mut rng = SplitMix64(0);
        assert!((0..100_000).map(|_| rng.uniform()).all(|u| (0.0..1.0).contains(&u)));
    }

    #[test]
    fn buffers_never_grow() {
        let config = SamplerConfig { top_p: 0.9, repetition_penalty: 1.1, ..Default::default() };
        let mut sampler = Sampler::new(config, 1000).unwrap();
        let capacities = |s: &Sampler| (s.scores.capacity(), s.candidates.capacity());
        let before = capacities(&sampler);
        let logits: Vec<f32> = (0..1000).map(|id| (id % 37) as f32 / 9.0).collect();
        let mut history = Vec::new();
        for _ in 0..500 {
            history.push(sampler.sample(&logits, &history).unwrap());
        }
        assert_eq!(capacities(&sampler), before);
    }
}
