//! One sequence of a request: what it has, what it needs next, and what it makes of logits.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::backend::Backend;
use crate::error::Result;
use crate::models::{Model, State};
use crate::sample::{Choice, Constraint, Sampler, SamplerConfig};

use super::draft::{Drafter, MAX_GUESS};
use super::{Finish, Request, STEP_PIECE};

/// One continuation.
pub(super) struct Sequence<B: Backend> {
    /// Which continuation of its request it is.
    pub(super) index: usize,
    /// The prompt, then what was generated.
    pub(super) ids: Vec<u32>,
    /// How many of `ids` are the prompt.
    pub(super) prompt: usize,
    /// How many of those are no part of the answer.
    given: usize,
    /// How many of `ids` the state has seen.
    pub(super) seen: usize,
    pub(super) state: State<B>,
    sampler: Sampler,
    constraint: Option<Box<dyn Constraint>>,
    pub(super) drafter: Option<Drafter<B>>,
    /// Tokens that were guessed so far, and those of them that were right.
    pub(super) drafted: usize,
    pub(super) accepted: usize,
    pub(super) finish: Option<Finish>,
    pub(super) first_token: Option<Instant>,
    pub(super) last_token: Option<Instant>,
    /// What it had seen before a step failed.
    target: usize,

    // Of the step that is being computed:
    /// Rows of logits to choose from: of the next token, then of those after guesses.
    pub(super) logits: Vec<f32>,
    /// The tokens to run, guesses last; empty when it is not its turn.
    pub(super) input: Vec<u32>,
    /// How many of `input` are guesses.
    pub(super) guesses: usize,
    /// Hidden states of `input`, where who guesses wants them.
    pub(super) hidden: Vec<f32>,
    /// State, and how much of `ids` it has seen, before guesses were run.
    backup: Option<(State<B>, usize)>,
    /// Tokens that were chosen.
    pub(super) chosen: Vec<Choice>,
    /// Whether they could be.
    pub(super) result: Result<()>,
}

impl<B: Backend> Sequence<B> {
    /// The `index`-th continuation of a request, with a generator of its own; `state` has seen `seen` tokens of the prompt.
    pub(super) fn new(
        request: &Request<B>,
        index: usize,
        state: State<B>,
        seen: usize,
    ) -> Result<Self> {
        let seed = request.sampler.seed.wrapping_add(index as u64);
        let sampler = SamplerConfig { seed, ..request.sampler.clone() };
        let given = request.prompt.len() - request.begun;
        let mut sampler = Sampler::new(sampler, request.vocab_limit)?;
        sampler.skip(request.begun);
        let mut constraint = request.constraint.clone();
        if let Some(constraint) = &mut constraint {
            request.prompt[given..].iter().try_for_each(|&id| constraint.accept(id))?;
        }
        Ok(Self {
            index,
            ids: request.prompt.clone(),
            prompt: request.prompt.len(),
            seen,
            state,
            given,
            sampler,
            constraint,
            drafter: None,
            drafted: 0,
            accepted: 0,
            finish: None,
            first_token: None,
            last_token: None,
            target: 0,
            logits: Vec::new(),
            input: Vec::new(),
            guesses: 0,
            hidden: Vec::new(),
            backup: None,
            chosen: Vec::new(),
            result: Ok(()),
        })
    }

    /// Whether the prompt is still to be computed.
    pub(super) fn is_in_prompt(&self) -> bool {
        self.seen < self.prompt
    }

    /// Tokens generated so far.
    pub(super) fn generated(&self) -> &[u32] {
        &self.ids[self.prompt..]
    }

    /// How long it is, whatever its state has seen of what was generated.
    pub(super) fn position(&self) -> usize {
        let unseen = if self.is_in_prompt() { 0 } else { self.ids.len() - self.seen };
        self.state.position() + unseen
    }

    /// Takes for the next run a piece of the prompt, which ends where a snapshot is to be kept, if it has no more than
    /// `room` tokens. Returns how many are run.
    pub(super) fn plan_piece(&mut self, marks: &[usize], every: usize, room: usize) -> usize {
        let seen = self.seen;
        let most = self.prompt.min(seen + STEP_PIECE);
        let grid = if every > 0 { seen - seen % every + every } else { most };
        let mark = marks.iter().copied().find(|&mark| mark > seen).unwrap_or(most);
        let piece = &self.ids[seen..most.min(grid).min(mark)];
        if piece.len() > room {
            return 0;
        }
        self.guesses = 0;
        self.input.clear();
        self.input.extend_from_slice(piece);
        self.input.len()
    }

    /// Takes for the next run what was generated and not seen, and guesses of what follows; `left` more may be
    /// generated.
    pub(super) fn plan_token(&mut self, model: &Model<B>, left: usize) {
        let end = self.ids.len().min(self.seen + STEP_PIECE);
        self.guesses = 0;
        self.input.clear();
        self.input.extend_from_slice(&self.ids[self.seen..end]);
        // Not while much of what was guessed right before is to be run again.
        if end == self.ids.len()
            && self.input.len() <= MAX_GUESS
            && let Some(drafter) = &mut self.drafter
        {
            // A guess for the last token would be computed for nothing.
            let guess = || drafter.guess(model, &self.ids, left.saturating_sub(1));
            // Nothing depends on guesses: a draft that fails is one that guesses no more.
            let guesses = catch_unwind(AssertUnwindSafe(guess)).ok().and_then(Result::ok);
            if guesses.is_none() {
                self.drafter = None;
            }
            let guesses = guesses.unwrap_or_default();
            self.guesses = guesses.len();
            self.drafted += guesses.len();
            self.input.extend(guesses);
            if self.guesses > 0 {
                self.backup = Some((self.state.clone(), self.seen));
            }
        }
    }

    /// Rows of logits that the run needs: none inside the prompt, else one for its last token and one for each guess.
    pub(super) fn wanted(&self) -> usize {
        let is_last = self.seen + self.input.len() - self.guesses == self.ids.len();
        if is_last { 1 + self.guesses } else { 0 }
    }

    /// Whether who guesses wants hidden states.
    pub(super) fn keeps_hidden(&self) -> bool {
        self.drafter.as_ref().is_some_and(Drafter::wants_hidden)
    }

    /// Rows of hidden states that are computed of the run.
    pub(super) fn kept(&self) -> usize {
        if self.keeps_hidden() { self.input.len() } else { self.wanted() }
    }

    /// Counts what was run as seen.
    pub(super) fn advance(&mut self) {
        let first = self.seen;
        self.seen += self.input.len();
        if let Some(drafter) = self.drafter.as_mut().filter(|_| !self.hidden.is_empty()) {
            let width = self.hidden.len() / self.input.len();
            drafter.see(first, &self.hidden, width);
        }
        self.hidden.clear();
    }

    /// Chooses tokens from `rows` of logits of width `width`, the next token's first, for as long as they are what was
    /// guessed.
    pub(super) fn choose(&mut self, rows: &[f32], width: usize, rules: Rules<'_>) -> Result<()> {
        self.chosen.clear();
        let guesses = self.input[self.input.len() - self.guesses..].to_vec();
        for (i, row) in rows.chunks(width).enumerate() {
            let allowed = self.constraint.as_mut().map(|it| it.allowed()).transpose()?;
            let choice = self.sampler.choose(
                row,
                &self.ids,
                self.given,
                allowed.as_ref(),
                rules.logprobs,
            )?;
            let id = choice.id;
            if rules.eos.contains(&id) {
                self.finish = Some(Finish::Eos);
                break;
            }
            if let Some(constraint) = &mut self.constraint {
                constraint.accept(id)?;
            }
            self.ids.push(id);
            self.chosen.push(choice);
            if self.constraint.as_ref().is_some_and(|constraint| constraint.is_complete()) {
                self.finish = Some(Finish::Eos);
            } else if self.generated().len() >= rules.max_tokens {
                self.finish = Some(Finish::Length);
            }
            if self.finish.is_some() || guesses.get(i).is_some_and(|&guess| guess != id) {
                break;
            }
        }
        Ok(())
    }

    /// Counts what was run as seen, or goes back if guesses were wrong. Returns how many were right.
    pub(super) fn settle(&mut self) -> usize {
        let right = self.input[self.input.len() - self.guesses..]
            .iter()
            .zip(&self.chosen)
            .take_while(|(guess, choice)| **guess == choice.id)
            .count();
        if right < self.guesses
            && let Some((state, _)) = self.backup.take()
        {
            self.state = state;
            self.hidden.clear();
        } else {
            self.advance();
        }
        if let Some(drafter) = &mut self.drafter {
            drafter.learn(self.guesses, right);
        }
        self.input.clear();
        self.guesses = 0;
        self.accepted += right;
        right
    }

    /// Ends after `len` generated tokens, though more were chosen and perhaps seen.
    pub(super) fn cut(&mut self, len: usize, finish: Finish) {
        self.finish = Some(finish);
        self.ids.truncate(self.prompt + len);
        if self.seen > self.ids.len()
            && let Some((state, seen)) = self.backup.take()
        {
            (self.state, self.seen) = (state, seen);
        }
    }

    /// Goes on from `state`, which has seen `seen` tokens, with what is known already.
    pub(super) fn start_over(&mut self, state: State<B>, seen: usize) {
        self.target = self.target.max(self.seen);
        (self.state, self.seen) = (state, seen);
        self.backup = None;
        self.guesses = 0;
        self.input.clear();
        self.hidden.clear();
        self.logits.clear();
    }

    /// Whether it is where it was when a step failed.
    pub(super) fn is_up_to_date(&self) -> bool {
        self.seen >= self.target
    }

    /// Its state, which has seen no guess that was not checked.
    pub(super) fn into_state(self) -> State<B> {
        self.backup.map_or(self.state, |(state, _)| state)
    }

    /// Forgets what could be gone back to.
    pub(super) fn forget_backup(&mut self) {
        self.backup = None;
    }
}

/// What the sequences of a request have in common when tokens are chosen.
#[derive(Clone, Copy)]
pub(super) struct Rules<'a> {
    pub(super) eos: &'a [u32],
    pub(super) max_tokens: usize,
    pub(super) logprobs: Option<usize>,
}
