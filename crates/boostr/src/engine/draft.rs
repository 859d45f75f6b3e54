//! Speculative decoding: cheap guesses of the next tokens, which the model checks in one forward.
//!
//! Output is bit-identical to decoding without a draft, whatever the sampler: a token's logits do not depend on how many
//! tokens share its run. The sampler takes row after row of the logits, for as long as it chooses what was guessed.
//! A wrong guess is undone by going back to a fork of the state. Right guesses are computed again with the next ones.
//!
//! Leviathan, Kalman, Matias 2023 (draft models), Saxena 2023 (lookup in the prompt).

use std::sync::Arc;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::models::{Model, State};
use crate::sample::argmax;

use super::run;

/// Most tokens that are guessed at once.
pub(super) const MAX_GUESS: usize = 8;
/// Tokens without a guess after guesses that were wrong.
const PAUSE: usize = 16;
/// Shortest and longest end of the text that is looked for in what came before.
const NGRAM: std::ops::RangeInclusive<usize> = 2..=4;

/// Where guesses come from.
pub enum Draft<B: Backend> {
    /// What followed the last time that the text ended like this: for answers that quote their prompt.
    Lookup,
    /// The greedy continuation by a smaller model of the same vocabulary.
    Model(Arc<Model<B>>),
    /// What a function of the tokens so far says, of which at most so many are used.
    With(Arc<Guess>),
}

/// From the tokens so far, and how many may be guessed, to guesses.
pub type Guess = dyn Fn(&[u32], usize) -> Vec<u32> + Send + Sync;

impl<B: Backend> Clone for Draft<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Lookup => Self::Lookup,
            Self::Model(model) => Self::Model(model.clone()),
            Self::With(guess) => Self::With(guess.clone()),
        }
    }
}

impl<B: Backend> Draft<B> {
    /// Checks that guesses are tokens of `model`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when a draft model has another vocabulary.
    pub fn check(&self, model: &Model<B>) -> Result<()> {
        match self {
            Self::Model(draft) if draft.vocab_limit() != model.vocab_limit() => {
                let (expected, found) = (model.vocab_limit(), draft.vocab_limit());
                let reason = format!(
                    "expected a vocabulary of {expected} tokens, found {found}: they cannot guess for each other"
                );
                Err(Error::Argument { name: "draft", reason })
            }
            _ => Ok(()),
        }
    }

    /// Guesses for one sequence.
    pub(super) fn drafter(&self) -> Result<Drafter<B>> {
        let source = match self {
            Self::Lookup => Source::Lookup,
            Self::Model(model) => Source::Model(model.clone(), model.new_state()?),
            Self::With(guess) => Source::With(guess.clone()),
        };
        Ok(Drafter { source, len: MAX_GUESS / 2, pause: 0 })
    }
}

/// The guesses for one sequence.
pub(super) struct Drafter<B: Backend> {
    source: Source<B>,
    /// How many are guessed at once: more while they are right.
    len: usize,
    pause: usize,
}

enum Source<B: Backend> {
    Lookup,
    /// The draft model, and what it has seen of the sequence.
    Model(Arc<Model<B>>, State<B>),
    With(Arc<Guess>),
}

impl<B: Backend> Drafter<B> {
    /// Up to `most` tokens that may follow `ids`.
    pub(super) fn guess(&mut self, ids: &[u32], most: usize) -> Result<Vec<u32>> {
        if self.pause > 0 {
            self.pause -= 1;
            return Ok(Vec::new());
        }
        let len = self.len.min(most);
        match &mut self.source {
            _ if len == 0 => Ok(Vec::new()),
            Source::Lookup => Ok(lookup(ids, len)),
            Source::Model(model, state) => continuation(model, state, ids, len),
            Source::With(guess) => Ok(guess(ids, len).into_iter().take(len).collect()),
        }
    }

    /// Learns how many of the guesses were right.
    pub(super) fn learn(&mut self, guessed: usize, right: usize) {
        if guessed == 0 {
            return;
        }
        if right == guessed {
            self.len = (2 * self.len).min(MAX_GUESS);
        } else {
            self.len = right.max(1);
            self.pause = if right == 0 { PAUSE } else { 0 };
        }
    }
}

/// What followed the last time that `ids` ended as they end now; of several ends the longest.
fn lookup(ids: &[u32], len: usize) -> Vec<u32> {
    for n in NGRAM.rev() {
        let Some(start) = ids.len().checked_sub(n).filter(|&start| start > 0) else { continue };
        let end = &ids[start..];
        if let Some(found) = ids[..ids.len() - 1].windows(n).rposition(|window| window == end) {
            let next = &ids[found + n..];
            return next[..len.min(next.len())].to_vec();
        }
    }
    Vec::new()
}

/// The greedy continuation of `ids` by `model`, whose `state` has seen some of them.
fn continuation<B: Backend>(
    model: &Model<B>,
    state: &mut State<B>,
    ids: &[u32],
    len: usize,
) -> Result<Vec<u32>> {
    let best = |logits: &[f32]| argmax(&logits[..model.vocab_limit()]).0;
    let new = &ids[state.position()..];
    if new.is_empty() {
        return Ok(Vec::new());
    }
    let mut guesses = vec![best(&run(model, state, new)?)];
    let mut fork = state.clone();
    while guesses.len() < len {
        let logits = run(model, &mut fork, &guesses[guesses.len() - 1..])?;
        guesses.push(best(&logits));
    }
    Ok(guesses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookup_finds_what_followed_the_longest_end_the_last_time() {
        // "2 3" was followed by 4 first and by 9 later; "1 2 3" by 4 only.
        let ids = [1, 2, 3, 4, 5, 2, 3, 9, 1, 2, 3];
        assert_eq!(lookup(&ids, 2), [4, 5]);
        assert_eq!(lookup(&[7, 2, 3, 4, 5, 2, 3, 9, 6, 2, 3], 3), [9, 6, 2]);
        assert_eq!(lookup(&[5, 5, 5], 4), [5]);
        for none in [&[][..], &[1], &[1, 2], &[1, 2, 3]] {
            assert!(lookup(none, 4).is_empty());
        }
    }

    #[test]
    fn guesses_get_longer_while_they_are_right_and_pause_when_all_are_wrong() {
        let mut drafter = Draft::<crate::backend::Cpu>::Lookup.drafter().unwrap();
        let ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2];
        assert_eq!(drafter.guess(&ids, 99).unwrap(), [3, 4, 5, 6]);
        drafter.learn(4, 4);
        assert_eq!(drafter.guess(&ids, 99).unwrap().len(), 8);
        assert_eq!(drafter.guess(&ids, 3).unwrap().len(), 3);
        drafter.learn(8, 0);
        for _ in 0..PAUSE {
            assert!(drafter.guess(&ids, 99).unwrap().is_empty());
        }
        assert_eq!(drafter.guess(&ids, 99).unwrap(), [3]);
    }
}
