//! Speculative decoding: cheap guesses of the next tokens, which the model checks in one forward.
//!
//! Output is bit-identical to decoding without a draft, whatever the sampler: a token's logits do not depend on how many
//! tokens share its run. The sampler takes row after row of the logits, for as long as it chooses what was guessed.
//! A wrong guess is undone by going back to a fork of the state. Right guesses are computed again with the next ones.
//!
//! Leviathan, Kalman, Matias 2023 (draft models), Saxena 2023 (lookup in the prompt), Gloeckle et al. 2024 (a block of the
//! model itself).

use std::sync::Arc;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::models::{Model, Mtp, State};
use crate::ops;
use crate::sample::argmax;

use super::run;

/// Most tokens that are guessed at once.
pub(super) const MAX_GUESS: usize = 8;
/// Hidden states that are kept for a block that has not seen them.
const MAX_HIDDEN: usize = 1024;
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
    /// The greedy continuation by the model's own block for one token more.
    Mtp(Arc<Mtp<B>>),
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
            Self::Mtp(block) => Self::Mtp(block.clone()),
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

    /// Bytes of the weights of who guesses that lie in files, and of those in memory.
    #[must_use]
    pub fn placed(&self) -> [usize; 2] {
        match self {
            Self::Model(model) => model.placed(),
            Self::Mtp(block) => block.placed(),
            Self::Lookup | Self::With(_) => [0; 2],
        }
    }

    /// Guesses for one sequence.
    pub(super) fn drafter(&self) -> Result<Drafter<B>> {
        let source = match self {
            Self::Lookup => Source::Lookup,
            Self::Model(model) => Source::Model(model.clone(), model.new_state()?),
            Self::Mtp(block) => Source::Mtp(Box::new(Ahead::new(block.clone()))),
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
    Mtp(Box<Ahead<B>>),
    With(Arc<Guess>),
}

/// A block for one token more, and what it has seen of the sequence.
struct Ahead<B: Backend> {
    block: Arc<Mtp<B>>,
    /// Of the tokens whose hidden states it has seen; `None` before the first of them, or after a gap.
    state: Option<State<B>>,
    /// What it gave for the last of them.
    last: Vec<f32>,
    /// Hidden states that it has not seen, of the tokens before `end`.
    rows: Vec<f32>,
    end: usize,
}

impl<B: Backend> Drafter<B> {
    /// Up to `most` tokens that may follow `ids`.
    pub(super) fn guess(&mut self, model: &Model<B>, ids: &[u32], most: usize) -> Result<Vec<u32>> {
        if self.pause > 0 {
            self.pause -= 1;
            return Ok(Vec::new());
        }
        let len = self.len.min(most);
        match &mut self.source {
            _ if len == 0 => Ok(Vec::new()),
            Source::Lookup => Ok(lookup(ids, len)),
            Source::Model(draft, state) => continuation(draft, state, ids, len),
            Source::Mtp(ahead) => ahead.guess(model, ids, len),
            Source::With(guess) => Ok(guess(ids, len).into_iter().take(len).collect()),
        }
    }

    /// Whether it is to [see](Self::see) hidden states.
    pub(super) fn wants_hidden(&self) -> bool {
        matches!(self.source, Source::Mtp(_))
    }

    /// Takes the hidden states, rows of `width`, of the tokens from `first` on.
    pub(super) fn see(&mut self, first: usize, hidden: &[f32], width: usize) {
        if let Source::Mtp(ahead) = &mut self.source {
            ahead.see(first, hidden, width);
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

impl<B: Backend> Ahead<B> {
    fn new(block: Arc<Mtp<B>>) -> Self {
        Self { block, state: None, last: Vec::new(), rows: Vec::new(), end: 0 }
    }

    fn see(&mut self, first: usize, hidden: &[f32], width: usize) {
        // What is computed again has the bits that it had. After a gap nothing before it counts.
        let known = match self.end.checked_sub(first) {
            Some(known) => (known * width).min(hidden.len()),
            None => {
                (self.state, self.end) = (None, first);
                self.rows.clear();
                0
            }
        };
        self.rows.extend_from_slice(&hidden[known..]);
        self.end = self.end.max(first + hidden.len() / width);
        // Of a long prompt the end is enough to guess by.
        if let Some(excess) = self.rows.len().checked_sub(MAX_HIDDEN * width) {
            self.rows.drain(..excess);
            if excess > 0 {
                self.state = None;
            }
        }
    }

    /// Up to `len` tokens that may follow `ids`, of which hidden states are known up to one at least.
    fn guess(&mut self, model: &Model<B>, ids: &[u32], len: usize) -> Result<Vec<u32>> {
        let (width, client) = (model.width(), model.client());
        // A row needs the token after its own.
        let left = (self.end + 1).saturating_sub(ids.len()) * width;
        let count = self.rows.len().saturating_sub(left) / width;
        if count > 0 {
            let first = self.end - self.rows.len() / width;
            let rows: Vec<f32> = self.rows.drain(..count * width).collect();
            let mut state = match self.state.take() {
                Some(state) => state,
                None => self.block.new_state(model)?,
            };
            let hidden = ops::tensor(client, &rows, &[count, width])?;
            let next = &ids[first + 1..=first + count];
            let given = ops::to_vec(&self.block.forward(model, &mut state, &hidden, next)?)?;
            self.last = given[(count - 1) * width..].to_vec();
            self.state = Some(state);
        }
        let Some(mut fork) = self.state.clone() else { return Ok(Vec::new()) };
        let seen = self.end - self.rows.len() / width;
        if ids.len() > seen + 1 + MAX_GUESS {
            return Ok(Vec::new());
        }
        // Where hidden states are not known yet, those that it gives itself stand for them.
        let mut hidden = ops::tensor(client, &self.last, &[1, width])?;
        for &id in &ids[(seen + 1).min(ids.len())..] {
            hidden = self.block.forward(model, &mut fork, &hidden, &[id])?;
        }
        let mut guesses = Vec::new();
        loop {
            let logits = ops::to_vec(&model.logits(&hidden)?)?;
            guesses.push(argmax(&logits[..model.vocab_limit()]).0);
            if guesses.len() == len {
                return Ok(guesses);
            }
            let last = &guesses[guesses.len() - 1..];
            hidden = self.block.forward(model, &mut fork, &hidden, last)?;
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
        let model = super::super::scheduler::tests::model();
        let mut drafter = Draft::<crate::backend::Cpu>::Lookup.drafter().unwrap();
        let ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2];
        assert_eq!(drafter.guess(&model, &ids, 99).unwrap(), [3, 4, 5, 6]);
        drafter.learn(4, 4);
        assert_eq!(drafter.guess(&model, &ids, 99).unwrap().len(), 8);
        assert_eq!(drafter.guess(&model, &ids, 3).unwrap().len(), 3);
        drafter.learn(8, 0);
        for _ in 0..PAUSE {
            assert!(drafter.guess(&model, &ids, 99).unwrap().is_empty());
        }
        assert_eq!(drafter.guess(&model, &ids, 99).unwrap(), [3]);
    }
}
