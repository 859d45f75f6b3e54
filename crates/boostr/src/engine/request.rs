//! What an engine is asked, and what it answers.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::models::{Model, State};
use crate::sample::{Constraint, SamplerConfig};

use super::Draft;

/// A prompt, and how to continue it. [`Request::new`] fills in the usual rest.
pub struct Request<B: Backend> {
    /// All tokens before the answer; at least one. The engine itself looks for a snapshot of a prefix of them.
    pub prompt: Vec<u32>,
    /// How many tokens at the end of the prompt are an answer's beginning already. It goes on as if it had not ended
    /// there: penalties, generator and constraint take them as generated. `max_tokens` counts new ones alone.
    pub begun: usize,
    /// A state that has seen the first tokens of the prompt, fewer than all. It serves unless a snapshot has seen more.
    pub state: Option<State<B>>,
    /// How many tokens of the prompt the state has seen; its [`position`](State::position) when `None`. Fewer where the
    /// tokens before the prompt are not known, as those of a state from a file without ids.
    pub seen: Option<usize>,
    /// How many of those were computed for this request alone, before it came here: they count as computed, not as kept.
    pub computed: usize,
    /// Numbers of tokens of the prompt after which a snapshot is kept: the ends of messages. A mark less than 32 tokens
    /// after another is passed over. A prompt in many short pieces would cost more than the snapshots save. The engine
    /// adds its own: where the prompt leaves the way of an earlier one, and near the end of a long prompt.
    pub marks: Vec<usize>,
    /// Only requests of the same scope see each other's snapshots. `None` sees none and leaves none.
    pub scope: Option<u64>,
    /// Continuations. The prompt is computed once; the i-th has the seed of the sampler plus i. 1 to 64.
    pub count: usize,
    /// Most tokens of each continuation; with 0 only the prompt is computed. A continuation also ends where the sequence
    /// is as long as the model's [context](Model::context_limit).
    pub max_tokens: usize,
    /// A continuation ends at any of these, which is not handed on.
    pub eos: Vec<u32>,
    /// Ids below this may be sampled.
    pub vocab_limit: usize,
    /// How tokens are chosen.
    pub sampler: SamplerConfig,
    /// How many of the likeliest tokens are reported with each, and their log probabilities.
    pub logprobs: Option<usize>,
    /// Which tokens may come next.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Where guesses of the next tokens come from, for the first continuation.
    pub draft: Option<Draft<B>>,
}

/// Most continuations of a request.
const MAX_COUNT: usize = 64;

impl<B: Backend> Request<B> {
    /// One greedy continuation of up to 512 tokens.
    #[must_use]
    pub fn new(prompt: Vec<u32>, vocab_limit: usize) -> Self {
        Self {
            prompt,
            begun: 0,
            state: None,
            seen: None,
            computed: 0,
            marks: Vec::new(),
            scope: Some(0),
            count: 1,
            max_tokens: 512,
            eos: Vec::new(),
            vocab_limit,
            sampler: SamplerConfig::greedy(),
            logprobs: None,
            constraint: None,
            draft: None,
        }
    }

    /// How many tokens of the prompt `state` has seen.
    pub(super) fn covered(&self, state: Option<&State<B>>) -> usize {
        state.map_or(0, |state| self.seen.unwrap_or_else(|| state.position()))
    }

    /// Checks all that can be checked before it is computed, for a sequence that goes on from `state`. Returns how many
    /// tokens it may have, by `max_tokens` and by the model's context.
    pub(super) fn check(&self, model: &Model<B>, state: Option<&State<B>>) -> Result<usize> {
        let refuse = |name, reason| Err(Error::Argument { name, reason });
        check_prompt(&self.prompt, model)?;
        if self.begun > self.prompt.len() {
            let (most, found) = (self.prompt.len(), self.begun);
            return refuse("begun", format!("expected at most the prompt's {most}, found {found}"));
        }
        if !(1..=MAX_COUNT).contains(&self.count) {
            return refuse("count", format!("expected 1 to {MAX_COUNT}, found {}", self.count));
        }
        if !(1..=model.vocab_rows()).contains(&self.vocab_limit) {
            let rows = model.vocab_rows();
            return refuse(
                "vocab_limit",
                format!("expected 1 to {rows}, found {}", self.vocab_limit),
            );
        }
        self.sampler.validate()?;
        if let Some(state) = state {
            model.check_state(state)?;
            let (covered, len) = (self.covered(Some(state)), self.prompt.len());
            if covered >= len {
                let reason =
                    format!("it has seen {covered} tokens of a prompt of {len}: expected fewer");
                return refuse("state", reason);
            }
        }
        self.draft.as_ref().map_or(Ok(()), |draft| draft.check(model))?;
        // What a state has seen may be more than the tokens that are known of it.
        let unknown =
            state.map_or(0, |state| state.position().saturating_sub(self.covered(Some(state))));
        Ok(model.room_after(self.prompt.len() + unknown)?.min(self.max_tokens))
    }
}

/// Checks that there are tokens and that the model has a row for each.
pub(super) fn check_prompt<B: Backend>(prompt: &[u32], model: &Model<B>) -> Result<()> {
    let rows = model.vocab_rows();
    let reason = if prompt.is_empty() {
        "expected at least one token, found none".into()
    } else if let Some(id) = prompt.iter().find(|&&id| id as usize >= rows) {
        format!("token id {id} is not below the vocabulary's {rows} rows")
    } else {
        return Ok(());
    };
    Err(Error::Argument { name: "prompt", reason })
}

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A token of the eos list was sampled, or the constraint is complete.
    Eos,
    /// `max_tokens` were generated, or the sequence has the length of the model's context.
    Length,
    /// The listener asked to stop.
    Stopped,
    /// A stop string was found. The engine knows no text: a listener that decodes says so.
    StopString,
    /// The request was cancelled.
    Cancelled,
}

impl Finish {
    /// It in one word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::Length => "length",
            Self::StopString => "stop",
            Self::Stopped | Self::Cancelled => "interrupted",
        }
    }
}

/// Where time went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timings {
    /// From the request to its first step.
    pub queued: Duration,
    /// From there to the end of the prompt.
    pub prompt: Duration,
    /// From the request to the first token.
    pub first_token: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Tokens of the prompt that were not computed.
    pub cached: usize,
    /// Tokens that the prompt and an earlier one of the same scope begin with, as far as that is remembered.
    pub shared: usize,
    /// Whether the state that it began with was read from disk.
    pub is_from_disk: bool,
}

/// How a continuation ended.
#[derive(Debug)]
pub struct Outcome<B: Backend> {
    /// Why.
    pub finish: Finish,
    /// Its tokens, without the one that ended it.
    pub ids: Vec<u32>,
    /// A state that has seen the first [`position`](State::position) of the prompt's tokens and these: most often all but
    /// the last, which nobody needed yet. `None` when nothing was begun.
    pub state: Option<State<B>>,
    /// Tokens of the sequence: those that the state has seen, and those of the answer that it has not.
    pub position: usize,
    /// Where time went.
    pub timings: Timings,
    /// Tokens that the draft guessed.
    pub drafted: usize,
    /// Those of them that the model chose as well.
    pub accepted: usize,
}

/// What a listener is told.
#[derive(Debug)]
pub enum Event<B: Backend> {
    /// A piece of the prompt was computed; the first time nothing yet.
    Prompt {
        /// Tokens that were known.
        cached: usize,
        /// Tokens that the state has seen, known ones among them.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// A token was chosen.
    Token {
        /// Which continuation.
        index: usize,
        /// The token.
        id: u32,
        /// Its log probability by the model, before any filter; 0 unless asked for.
        logprob: f32,
        /// The likeliest tokens and theirs, as many as asked for.
        top: Vec<(u32, f32)>,
    },
    /// A continuation ended; each does once, unless the request fails.
    Finished {
        /// Which continuation.
        index: usize,
        /// How.
        outcome: Outcome<B>,
    },
    /// The request failed: there is no more to come.
    Failed {
        /// Why.
        error: Error,
    },
}

/// Is told how a request goes, on the thread that computes: must be quick and never wait.
pub trait Listener<B: Backend>: Send {
    /// Something happened. `Break` ends what it happened to: after a token its continuation, after a piece of the
    /// prompt the request, both with [`Finish::Stopped`].
    fn event(&mut self, event: Event<B>) -> ControlFlow<()>;

    /// Whether more is wanted now; while it is not, nothing is computed for this request.
    fn is_ready(&self) -> bool {
        true
    }
}

/// A function is told each event.
impl<B: Backend, F: FnMut(Event<B>) -> ControlFlow<()> + Send> Listener<B> for F {
    fn event(&mut self, event: Event<B>) -> ControlFlow<()> {
        self(event)
    }
}

/// A request that was taken. To drop it does not cancel.
#[derive(Debug, Clone, Default)]
pub struct Ticket(Arc<AtomicBool>);

impl Ticket {
    /// Ends the request before its next step, with [`Finish::Cancelled`]; one that is over is not touched.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why a request was not taken.
#[derive(Debug, thiserror::Error)]
pub enum Rejected {
    /// The queue is full.
    #[error("the queue is full: {waiting} requests wait")]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
    },
    /// No new requests are taken, because the engine is about to end.
    #[error("no new requests are taken")]
    Draining,
    /// The engine has ended.
    #[error("the engine has ended")]
    Stopped,
    /// The request cannot be computed.
    #[error(transparent)]
    Invalid(#[from] Error),
}
