//! From logits to the next token, and from text to the place where it has to stop.
//!
//! # Order of the filters
//!
//! As in transformers and llama.cpp, each filter works on what the one before it left:
//!
//! ```text
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
//! The generator is `SplitMix64` (Steele, Lea, Flood 2014): 64 bits of state, one step per sampled token,
//! none for a greedy one, the same numbers on every platform. Probabilities are computed in f64; the only
//! operation that may differ between platforms is the C library's `exp`, by about 1 part in 10^16.

use serde::{Deserialize, Serialize};

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
    /// Keep the likeliest tokens that together reach this probability; 1 keeps all. In (0, 1].
    pub top_p: f32,
    /// Keep tokens at least this likely relative to the likeliest; 0 keeps all. In [0, 1].
    pub min_p: f32,
    /// Makes tokens of the window less likely (above 1) or likelier (below 1); 1 is off.
    pub repetition_penalty: f32,
    /// How many of the last tokens the penalty looks at; 0 looks at all of them.
    pub repetition_window: usize,
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
        let check = |name, value: f32, ok: bool, range: &str| {
            if ok {
                Ok(())
            } else {
                Err(Error::Argument { name, reason: format!("expected {range}, found {value}") })
            }
        };
        let Self { temperature: t, top_p, min_p, repetition_penalty: penalty, .. } = *self;
        check("temperature", t, t.is_finite() && t >= 0.0, "a finite number >= 0")?;
        check("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "a number > 0 and <= 1")?;
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "a number from 0 to 1")?;
        check(
            "repetition_penalty",
            penalty,
            penalty.is_finite() && penalty > 0.0,
            "a finite number > 0",
        )
    }
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
    /// [`Error::Argument`] if `config` is out of range or `vocab_limit` is 0 or above 2^24.
    pub fn new(config: SamplerConfig, vocab_limit: usize) -> Result<Self> {
        config.validate()?;
        if !(1..=1 << 24).contains(&vocab_limit) {
            let reason = format!("expected 1 to 2^24 tokens, found {vocab_limit}");
            return Err(Error::Argument { name: "vocab_limit", reason });
        }
        Ok(Self {
            rng: SplitMix64(config.seed),
            config,
            vocab_limit,
            scores: Vec::with_capacity(vocab_limit),
            penalised: vec![0; vocab_limit],
            call: 0,
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

    /// Chooses the next token.
    ///
    /// | argument | shape | meaning |
    /// |---|---|---|
    /// | `logits` | at least `[vocab_limit]` | scores of the next token; -inf excludes one |
    /// | `history` | any | the tokens so far, the newest last; read by the penalty only |
    ///
    /// Ids of `history` from `vocab_limit` up are ignored. Costs O(vocab) plus sorting what the filters
    /// may keep.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are too few logits; [`Error::Argument`] if one below the limit is NaN
    /// or +inf, or if all are -inf.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32> {
        let Some(logits) = logits.get(..self.vocab_limit) else {
            return Err(Error::Shape {
                name: "logits".to_owned(),
                expected: vec![self.vocab_limit],
                got: vec![logits.len()],
            });
        };
        check_logits(logits)?;
        self.scores.clear();
        // Adding zero turns -0 into +0, which `total_cmp` would otherwise put after it.
        self.scores.extend(logits.iter().map(|&logit| logit + 0.0));
        self.penalise(history);

        let (best, top) = argmax(&self.scores);
        if self.config.temperature == 0.0 {
            return Ok(best);
        }
        self.collect_candidates(top);
        self.keep_top_k();
        self.keep_top_p();
        self.keep_min_p();
        Ok(self.draw().unwrap_or(best))
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

#[expect(
    clippy::needless_bitwise_bool,
    reason = "without an early exit the two folds are a few vector instructions per eight logits"
)]
fn check_logits(logits: &[f32]) -> Result<()> {
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
fn argmax(scores: &[f32]) -> (u32, f32) {
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

/// Steele, Lea and Flood: <https://doi.org/10.1145/2714064.2660195>.
#[derive(Clone, Debug)]
pub(crate) struct SplitMix64(pub(crate) u64);

impl SplitMix64 {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In [0, 1), a multiple of 2^-53.
    pub(crate) fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Cuts a stream of text before the first stop string.
///
/// Text that could still become a stop string is held back, so no part of one is ever released. The first
/// stop string is the one that is complete first; of several that end at the same byte, the longest. The
/// result does not depend on how the text is cut into pieces, and time is linear in the text.
///
/// ```
/// use boostr::sample::StopStrings;
///
/// let mut stop = StopStrings::new(["\nUser:"])?;
/// assert_eq!(stop.push("Yes.\nUs").text, "Yes.");
/// let last = stop.push("er: and");
/// assert!(last.stopped && last.text.is_empty());
/// # Ok::<(), boostr::error::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
    /// The end of the text so far, as long as it may be the start of a stop string.
    held: String,
    stopped: bool,
}

/// What [`StopStrings::push`] releases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// Text that belongs to no stop string.
    pub text: String,
    /// Whether a stop string was found; from then on nothing is released.
    pub stopped: bool,
}

impl StopStrings {
    /// Watches for any of `stops`; without one all text passes.
    ///
    /// # Errors
    /// [`Error::Argument`] if one of them is empty.
    pub fn new<I>(stops: I) -> Result<Self>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let patterns = stops
            .into_iter()
            .enumerate()
            .map(|(index, stop)| match stop.as_ref() {
                "" => Err(Error::Argument {
                    name: "stop",
                    reason: format!("stop string {index} is empty"),
                }),
                stop => Ok(Pattern::new(stop)),
            })
            .collect::<Result<_>>()?;
        Ok(Self { patterns, held: String::new(), stopped: false })
    }

    /// Takes the next piece of text and gives what is now known to come before any stop string.
    pub fn push(&mut self, text: &str) -> Released {
        if self.stopped {
            return Released { text: String::new(), stopped: true };
        }
        let held = self.held.len();
        self.held.push_str(text);
        for (index, byte) in text.bytes().enumerate() {
            let end = held + index + 1;
            // Every pattern has to see the byte, or the longest of those that end here is missed.
            let complete = self.patterns.iter_mut().filter_map(|p| p.advance(byte)).max();
            if let Some(len) = complete {
                self.stopped = true;
                let mut text = std::mem::take(&mut self.held);
                text.truncate(end.saturating_sub(len));
                return Released { text, stopped: true };
            }
        }
        let possible = self.patterns.iter().map(|p| p.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len().saturating_sub(possible));
        Released { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// The text that was held back, now that no more follows; empty after a stop.
    pub fn finish(&mut self) -> String {
        for pattern in &mut self.patterns {
            pattern.matched = 0;
        }
        std::mem::take(&mut self.held)
    }
}

/// A stop string as a Knuth-Morris-Pratt automaton over bytes. UTF-8 synchronises itself, so a match of
/// bytes starts and ends between characters.
#[derive(Clone, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// For each prefix the length of its longest proper border: a prefix that is also its suffix.
    border: Vec<usize>,
    /// How many bytes of the pattern the text so far ends with.
    matched: usize,
}

impl Pattern {
    fn new(stop: &str) -> Self {
        let bytes = stop.as_bytes().to_vec();
        let mut pattern = Self { border: vec![0], bytes, matched: 0 };
        for &byte in stop.as_bytes().iter().skip(1) {
            pattern.step(byte);
            pattern.border.push(pattern.matched);
        }
        pattern.matched = 0;
        pattern
    }

    fn step(&mut self, byte: u8) {
        while self.matched > 0 && self.bytes.get(self.matched) != Some(&byte) {
            self.matched = self.border.get(self.matched - 1).copied().unwrap_or(0);
        }
        if self.bytes.get(self.matched) == Some(&byte) {
            self.matched += 1;
        }
    }

    /// The pattern's length once the text ends with all of it.
    fn advance(&mut self, byte: u8) -> Option<usize> {
        self.step(byte);
        (self.matched == self.bytes.len()).then_some(self.matched)
    }
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
