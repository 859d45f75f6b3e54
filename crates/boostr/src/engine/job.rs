//! One request that is computed or waits: its sequences, and its listener.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::models::{Model, State};

use super::draft::Draft;
use super::sequence::{Rules, Sequence};
use super::store::{Known, Store};
use super::{Event, Finish, Listener, Outcome, Request, STEP_PIECE, Stats, Ticket, Timings};

/// Least distance from one mark of a prompt to the next.
const MIN_MARK: usize = 32;
/// Tokens before the end of a long prompt after which a snapshot is kept: those of the last piece.
const NEAR_END: usize = STEP_PIECE;
/// Times that a request may lose its states to a step that failed.
const MAX_STRIKES: usize = 3;

pub(super) struct Job<'a, B: Backend> {
    /// What was asked for; its prompt, state and constraint move to the sequence when it begins.
    request: Request<B>,
    /// How many tokens of the prompt the given state has seen.
    covered: usize,
    /// Whether the given state is needed no more once it has begun: there is nobody whose step could fail it.
    is_lent: bool,
    listener: Box<dyn Listener<B> + 'a>,
    pub(super) ticket: Ticket,
    submitted: Instant,
    begun: Option<Instant>,
    prompt_end: Option<Instant>,
    cached: usize,
    /// Tokens of the prompt that an earlier one began with.
    shared: usize,
    /// Tokens of the prompt that the listener knows to be done.
    told: usize,
    /// Those that have not ended.
    pub(super) sequences: Vec<Sequence<B>>,
    is_forked: bool,
    /// A state on disk that it waits for before it begins.
    awaited: Option<usize>,
    /// Whether it began with one.
    is_from_disk: bool,
    /// Tells it from others.
    number: u64,
    /// The number of a request whose prompt begins like its own and is being computed, and how many tokens of it that one
    /// is to have seen before this one begins.
    behind: Option<(u64, usize)>,
    /// Is computed alone until it is where it was, after a step of several failed.
    pub(super) is_alone: bool,
    strikes: usize,
    /// The state of a request that failed, as far as it got; `None` where a failed step made it unusable.
    pub(super) remains: Option<State<B>>,
    /// There is nothing more to say to the listener.
    pub(super) is_over: bool,
}

impl<'a, B: Backend> Job<'a, B> {
    pub(super) fn new(
        request: Request<B>,
        is_lent: bool,
        listener: Box<dyn Listener<B> + 'a>,
        ticket: Ticket,
        number: u64,
    ) -> Self {
        let covered = request.covered(request.state.as_ref());
        Self {
            request,
            covered,
            is_lent,
            listener,
            ticket,
            submitted: Instant::now(),
            begun: None,
            prompt_end: None,
            cached: 0,
            shared: 0,
            told: 0,
            sequences: Vec::new(),
            is_forked: false,
            awaited: None,
            is_from_disk: false,
            number,
            behind: None,
            is_alone: false,
            strikes: 0,
            remains: None,
            is_over: false,
        }
    }

    /// Sequences that it takes.
    pub(super) fn count(&self) -> usize {
        self.request.count
    }

    pub(super) fn is_ready(&self) -> bool {
        catch_unwind(AssertUnwindSafe(|| self.listener.is_ready())).unwrap_or(true)
    }

    /// Whether a piece of its prompt comes next.
    pub(super) fn is_in_prompt(&self) -> bool {
        self.sequences.iter().any(Sequence::is_in_prompt)
    }

    // Its course

    /// How many tokens of its prompt it would begin with once `leader` has seen them, whose prompt is being computed;
    /// `None` where waiting would not pay.
    fn shared_with(&self, leader: &Self, known: usize) -> Option<usize> {
        let first = leader.sequences.first().filter(|it| !leader.is_over && it.is_in_prompt())?;
        let is_kept = leader.request.scope.is_some() && first.state.position() == first.seen;
        if !is_kept || leader.request.scope != self.request.scope || !leader.is_ready() {
            return None;
        }
        let (own, way) = (&self.request.prompt, &first.ids[..first.prompt]);
        let alike = own.iter().zip(way).take_while(|(a, b)| a == b).count();
        // The logits of what comes next are kept where the prompt of the other ends.
        let is_same = alike == own.len() && alike == way.len();
        let until = if is_same { alike } else { alike.min(own.len().saturating_sub(1)) };
        (until > first.seen && until >= known.max(self.covered) + MIN_MARK).then_some(until)
    }

    /// Waits for the one of `others` that will have seen the most of its prompt, if that is more than is known. Otherwise
    /// it has to [start](Self::start).
    pub(super) fn wait_behind(
        &mut self,
        others: &mut [Self],
        store: &Store<B>,
        stats: &mut Stats,
    ) -> bool {
        self.behind = None;
        if !self.is_plain() || !store.keeps() {
            return false;
        }
        let known = store.known(self.request.scope, &self.request.prompt);
        let shared = others.iter().enumerate();
        let shared = shared.filter_map(|(i, leader)| Some((self.shared_with(leader, known)?, i)));
        let Some((until, i)) = shared.max() else { return false };
        let leader = &mut others[i];
        self.behind = Some((leader.number, leader.mark(until)));
        // It has a place, and others work for it.
        let total = self.request.prompt.len();
        let event = Event::Prompt { cached: self.covered, done: self.covered, total };
        if self.tell(event, stats).is_break() {
            self.end(Finish::Stopped, stats);
        }
        true
    }

    /// Keeps a snapshot after so many tokens of its prompt, or shortly before. Returns after how many.
    fn mark(&mut self, at: usize) -> usize {
        let (seen, len) = self.sequences.first().map_or((0, 0), |it| (it.seen, it.prompt));
        let marks = &mut self.request.marks;
        let near = |mark: &usize| *mark > seen && *mark <= at && at - mark < MIN_MARK;
        if at < len
            && let Some(near) = marks.iter().copied().rfind(near)
        {
            return near;
        }
        if let Err(place) = marks.binary_search(&at) {
            marks.insert(place, at);
        }
        at
    }

    /// Whether it waits for one of `others` to see more of the prompt that they share.
    pub(super) fn is_behind(&self, others: &[Self]) -> bool {
        let Some((number, until)) = self.behind.filter(|_| !self.is_over) else { return false };
        let mut leader = others.iter().filter(|it| it.number == number && !it.is_over);
        let first = leader.find_map(|it| it.sequences.first().filter(|_| it.is_ready()));
        first.is_some_and(|it| it.is_in_prompt() && it.seen < until)
    }

    /// Whether it waits for one of others.
    pub(super) fn waits_behind(&self) -> bool {
        self.behind.is_some() && !self.is_over
    }

    /// Whether the state that it waited for was read.
    pub(super) fn is_read(&self, store: &Store<B>) -> bool {
        self.awaited.is_some_and(|at| !self.is_over && !store.is_reading(at))
    }

    /// Begins, or waits for a state that is read from disk.
    pub(super) fn start(&mut self, model: &Model<B>, store: &mut Store<B>, stats: &mut Stats) {
        self.is_from_disk = self.awaited.is_some_and(|at| store.is_held(at));
        if self.is_from_disk {
            self.begin(model, store, stats);
            self.forget_awaited(store);
            return;
        }
        // Where its file was no use, and is gone, another may serve.
        self.forget_awaited(store);
        if self.is_plain() {
            self.awaited = store.fetch(self.request.scope, &self.request.prompt, self.covered);
        }
        if self.awaited.is_none() {
            self.begin(model, store, stats);
        }
    }

    /// Waits no more.
    pub(super) fn forget_awaited(&mut self, store: &mut Store<B>) {
        if let Some(at) = self.awaited.take() {
            store.release(at);
        }
    }

    /// Begins from the longest prefix that is known.
    fn begin(&mut self, model: &Model<B>, store: &mut Store<B>, stats: &mut Stats) {
        self.begun = Some(Instant::now());
        let mut has_given = false;
        let first = self.known(model, store, &self.request.prompt, true).and_then(|known| {
            let computed = self.request.computed.min(known.seen);
            self.cached = known.seen - computed;
            stats.skipped_tokens += self.cached as u64;
            stats.prompt_tokens += computed as u64;
            stats.snapshot_hits += u64::from(known.is_snapshot);
            has_given = !known.is_snapshot && self.covered > computed;
            let mut first = Sequence::new(&self.request, 0, known.state, known.seen)?;
            first.drafter = self.request.draft.as_ref().map(Draft::drafter).transpose()?;
            first.logits = known.logits;
            Ok(first)
        });
        // After the search, which it must not take a snapshot from.
        if self.is_plain() {
            self.shared = store.visit(self.request.scope, &self.request.prompt);
        }
        match first {
            Ok(first) => {
                if self.is_lent {
                    self.request.state = None;
                }
                if has_given {
                    // What was given may be of another type of cache, or edited: it is no state of these ids for others.
                    self.request.scope = None;
                }
                self.mark_way(first.seen, first.prompt);
                self.sequences.push(first);
                self.tell_prompt(self.sequences[0].seen, stats);
                self.end_prompt(stats);
            }
            Err(error) => self.fail(error, stats),
        }
    }

    /// Adds marks to those of the request, whose prompt is computed from `seen` on: where it leaves the way of earlier
    /// prompts, since others may leave it there too, and near its end.
    fn mark_way(&mut self, seen: usize, len: usize) {
        let marks = &mut self.request.marks;
        space(marks, seen);
        if (seen + MIN_MARK..len).contains(&self.shared) {
            marks.retain(|mark| mark.abs_diff(self.shared) >= MIN_MARK);
            marks.push(self.shared);
        }
        // Where a client changes the end of a long message, the next prompt leaves this one there.
        let near = len.saturating_sub(NEAR_END);
        if near > seen + NEAR_END && marks.iter().all(|mark| mark.abs_diff(near) >= MIN_MARK) {
            marks.push(near);
        }
        marks.sort_unstable();
    }

    /// Whether the given state, if there is one, has seen what the prompt begins with, and nothing before.
    fn is_plain(&self) -> bool {
        let given = self.request.state.as_ref();
        given.is_none_or(|state| state.position() == self.covered)
    }

    /// The best that there is to compute `ids` from.
    fn known(
        &self,
        model: &Model<B>,
        store: &mut Store<B>,
        ids: &[u32],
        to_the_end: bool,
    ) -> Result<Known<B>> {
        // Where the given state has seen more than the prompt tells of, positions of snapshots are not its own.
        let given = self.request.state.as_ref();
        if self.is_plain()
            && let Some(known) = store.longest(self.request.scope, ids, to_the_end)
            && known.seen > self.covered
        {
            return Ok(known);
        }
        let state = given.map_or_else(|| model.new_state(), |state| Ok(state.clone()))?;
        Ok(Known { state, seen: self.covered, logits: Vec::new(), is_snapshot: false })
    }

    /// Takes for this step the next piece of the prompt, if it has no more than `room` tokens; returns how many it has.
    pub(super) fn plan_piece(&mut self, every: usize, room: usize) -> usize {
        let marks = &self.request.marks;
        let in_prompt = self.sequences.iter_mut().filter(|it| it.is_in_prompt());
        in_prompt.map(|it| it.plan_piece(marks, every, room)).sum()
    }

    /// Takes for this step what follows the prompt.
    pub(super) fn plan_tokens(&mut self, model: &Model<B>, stats: &mut Stats) -> usize {
        let max_tokens = self.request.max_tokens;
        let mut rows = 0;
        for i in 0..self.sequences.len() {
            let sequence = &mut self.sequences[i];
            if sequence.is_in_prompt() || !sequence.logits.is_empty() {
                continue;
            }
            let left = max_tokens - sequence.generated().len();
            sequence.plan_token(model, left);
            stats.drafted_tokens += sequence.guesses as u64;
            rows += sequence.input.len();
        }
        rows
    }

    /// After a step was computed: counts what it saw, keeps snapshots, and makes forks where the prompt ends.
    pub(super) fn settle_pieces(&mut self, store: &mut Store<B>, every: usize, stats: &mut Stats) {
        let mut done = None;
        for sequence in &mut self.sequences {
            if !sequence.is_in_prompt() || sequence.input.is_empty() {
                continue;
            }
            sequence.advance();
            stats.prompt_tokens += sequence.input.len() as u64;
            sequence.input.clear();
            let seen = sequence.seen;
            let is_end = seen == sequence.prompt;
            let is_kept = is_end
                || self.request.marks.binary_search(&seen).is_ok()
                || (every > 0 && seen.is_multiple_of(every));
            if is_kept && sequence.state.position() == seen {
                let logits = (is_end && !sequence.logits.is_empty()).then_some(&*sequence.logits);
                store.keep(self.request.scope, &sequence.ids[..seen], &sequence.state, logits);
            }
            done = Some(seen);
        }
        if let Some(done) = done {
            if done > self.told {
                self.tell_prompt(done, stats);
            }
            self.end_prompt(stats);
        }
    }

    /// Where the prompt ends for the first time: forks it, or ends if nothing is to be generated.
    fn end_prompt(&mut self, stats: &mut Stats) {
        if self.is_over || self.is_forked || self.is_in_prompt() || self.sequences.is_empty() {
            return;
        }
        self.is_forked = true;
        self.prompt_end = Some(Instant::now());
        for index in 1..self.request.count {
            let first = &self.sequences[0];
            match Sequence::new(&self.request, index, first.state.clone(), first.seen) {
                Ok(mut fork) => {
                    fork.logits.clone_from(&first.logits);
                    self.sequences.push(fork);
                }
                Err(error) => return self.fail(error, stats),
            }
        }
        if self.request.max_tokens == 0 {
            for sequence in &mut self.sequences {
                sequence.logits.clear();
                sequence.finish = Some(Finish::Length);
            }
        }
    }

    /// What choosing tokens goes by, and the sequences that do.
    pub(super) fn choosing(&mut self) -> (Rules<'_>, &mut [Sequence<B>]) {
        let Request { eos, max_tokens, logprobs, .. } = &self.request;
        let rules = Rules { eos, max_tokens: *max_tokens, logprobs: *logprobs };
        (rules, &mut self.sequences)
    }

    /// Hands on what was chosen, and ends what has ended.
    pub(super) fn deliver(&mut self, store: &mut Store<B>, stats: &mut Stats) {
        if self.is_over {
            return;
        }
        for sequence in &mut self.sequences {
            if let Err(error) = std::mem::replace(&mut sequence.result, Ok(())) {
                stats.panics += u64::from(is_panic(&error));
                return self.fail(error, stats);
            }
        }
        for i in 0..self.sequences.len() {
            let sequence = &mut self.sequences[i];
            let index = sequence.index;
            stats.accepted_tokens += sequence.settle() as u64;
            let before = sequence.generated().len() - sequence.chosen.len();
            let chosen = std::mem::take(&mut sequence.chosen);
            for (k, choice) in chosen.into_iter().enumerate() {
                let now = Instant::now();
                let sequence = &mut self.sequences[i];
                sequence.first_token.get_or_insert(now);
                sequence.last_token = Some(now);
                stats.generated_tokens += 1;
                let (id, logprob, top) = (choice.id, choice.logprob, choice.top);
                let flow = self.tell(Event::Token { index, id, logprob, top }, stats);
                if self.is_over {
                    return;
                }
                if flow.is_break() {
                    self.sequences[i].cut(before + k + 1, Finish::Stopped);
                    break;
                }
            }
            if self.is_over {
                return;
            }
            self.sequences[i].forget_backup();
        }
        let ended = self.sequences.extract_if(.., |it| it.finish.is_some());
        for sequence in ended.collect::<Vec<_>>() {
            if sequence.seen > sequence.prompt && sequence.state.position() == sequence.seen {
                let seen = &sequence.ids[..sequence.seen];
                store.keep(self.request.scope, seen, &sequence.state, None);
            }
            let finish = sequence.finish.unwrap_or(Finish::Stopped);
            self.finish(sequence.index, Some(sequence), finish, stats);
        }
        if self.sequences.is_empty() && self.awaited.is_none() && self.behind.is_none() {
            self.is_over = true;
        }
        if self.is_alone && self.sequences.iter().all(Sequence::is_up_to_date) {
            self.is_alone = false;
        }
    }

    /// Ends all that has not ended, also what was to be a fork of it.
    pub(super) fn end(&mut self, finish: Finish, stats: &mut Stats) {
        if self.is_over {
            return;
        }
        let sequences = std::mem::take(&mut self.sequences);
        let count = if self.is_forked { 0 } else { self.request.count };
        let missing = (sequences.len()..count).map(|index| (index, None));
        let sequences = sequences.into_iter().map(|it| (it.index, Some(it)));
        for (index, sequence) in sequences.chain(missing).collect::<Vec<_>>() {
            if !self.is_over {
                self.finish(index, sequence, finish, stats);
            }
        }
        self.is_over = true;
    }

    /// Tells how a continuation ended, which may not have begun.
    fn finish(
        &mut self,
        index: usize,
        sequence: Option<Sequence<B>>,
        finish: Finish,
        stats: &mut Stats,
    ) {
        let since = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Duration::ZERO,
        };
        let now = Some(Instant::now());
        let (first, last) =
            sequence.as_ref().map_or((None, None), |it| (it.first_token, it.last_token));
        let timings = Timings {
            queued: since(Some(self.submitted), self.begun.or(now)),
            prompt: since(self.begun, self.prompt_end.or(now)),
            first_token: since(Some(self.submitted), first),
            decode: since(first, last),
            cached: self.cached,
            shared: self.shared,
            is_from_disk: self.is_from_disk,
        };
        let (drafted, accepted) = sequence.as_ref().map_or((0, 0), |it| (it.drafted, it.accepted));
        let position = sequence.as_ref().map_or(0, Sequence::position);
        let (ids, state) = match sequence {
            Some(it) => (it.generated().to_vec(), Some(it.state)),
            None => (Vec::new(), None),
        };
        let outcome = Outcome { finish, ids, state, position, timings, drafted, accepted };
        // There is nothing left that it could end.
        let _ = self.tell(Event::Finished { index, outcome }, stats);
    }

    /// Ends with an error.
    pub(super) fn fail(&mut self, error: Error, stats: &mut Stats) {
        if self.is_over {
            return;
        }
        stats.failed += 1;
        self.leave_state();
        let _ = self.tell(Event::Failed { error }, stats);
        self.is_over = true;
    }

    /// Fails because of a step that left the states of its sequences unusable.
    pub(super) fn fail_step(&mut self, error: Error, stats: &mut Stats) {
        self.sequences.clear();
        self.fail(error, stats);
    }

    /// Ends all sequences, and keeps the state of the first one.
    fn leave_state(&mut self) {
        let first = self.sequences.drain(..).next().map(Sequence::into_state);
        let given = if self.is_lent { self.request.state.take() } else { None };
        self.remains = self.remains.take().or(first).or(given);
    }

    fn tell_prompt(&mut self, done: usize, stats: &mut Stats) {
        self.told = done;
        let (cached, total) = (self.cached, self.sequences[0].prompt);
        if self.tell(Event::Prompt { cached, done, total }, stats).is_break() {
            self.end(Finish::Stopped, stats);
        }
    }

    /// Tells the listener; one that panics is not told any more, and its request is over.
    fn tell(&mut self, event: Event<B>, stats: &mut Stats) -> ControlFlow<()> {
        catch_unwind(AssertUnwindSafe(|| self.listener.event(event))).unwrap_or_else(|_| {
            stats.panics += 1;
            stats.failed += 1;
            self.leave_state();
            self.is_over = true;
            ControlFlow::Break(())
        })
    }

    // When a step has failed

    /// Brings the sequences of a step that failed back to states from which they are computed again, each as it was.
    pub(super) fn start_over(&mut self, model: &Model<B>, store: &mut Store<B>, stats: &mut Stats) {
        self.strikes += 1;
        if self.strikes > MAX_STRIKES {
            let what = "request: the steps that it was part of failed".to_owned();
            return self.fail_step(Error::Unsupported { what }, stats);
        }
        self.is_alone = true;
        let mut sequences = std::mem::take(&mut self.sequences);
        for sequence in sequences.iter_mut().filter(|it| !it.input.is_empty()) {
            match self.known(model, store, &sequence.ids, false) {
                Ok(known) => sequence.start_over(known.state, known.seen),
                Err(error) => return self.fail(error, stats),
            }
        }
        self.sequences = sequences;
    }
}

/// The error of a panic that was caught.
pub(super) fn panicked(what: &str, payload: &(dyn std::any::Any + Send)) -> Error {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    Error::Panic { what: what.to_owned(), reason: text.unwrap_or_else(|| "no message".into()) }
}

fn is_panic(error: &Error) -> bool {
    matches!(error, Error::Panic { .. })
}

/// Sorts marks, and gives up those less than [`MIN_MARK`] after `start` or another.
fn space(marks: &mut Vec<usize>, start: usize) {
    marks.sort_unstable();
    let mut last = start;
    marks.retain(|&mark| {
        let is_far = mark.saturating_sub(last) >= MIN_MARK;
        last = if is_far { mark } else { last };
        is_far
    });
}
