//! Many requests, step by step.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rayon::prelude::*;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::models::{Model, Run, State};
use crate::ops;

use super::job::{Job, panicked};
use super::sequence::{Rules, Sequence};
use super::spill::{Found, Spill};
use super::store::Store;
use super::{EngineConfig, Finish, Listener, Rejected, Request, Stats, Ticket};

/// Computes requests together, a step at a time, each with the result that it has alone.
///
/// ```
/// use std::ops::ControlFlow;
/// use boostr::engine::{EngineConfig, Event, Request, Scheduler};
/// use boostr::models::{Config, Model};
/// use boostr::{backend, checkpoint::{ConfigFile, Dtype}};
///
/// let config = Config::read(&ConfigFile::parse("config.json", r#"{
///     "model_type": "mamba2", "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4,
///     "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 32
/// }"#)?)?;
/// let model = Model::<backend::Cpu>::synthetic(config, Dtype::F32, backend::cpu())?;
/// let mut scheduler = Scheduler::new(&model, EngineConfig::default());
/// let (sender, events) = std::sync::mpsc::channel();
/// for prompt in [vec![1, 2, 3], vec![4]] {
///     let sender = sender.clone();
///     let listener = move |event| {
///         if let Event::Finished { outcome, .. } = event {
///             sender.send(outcome.ids.len()).ok();
///         }
///         ControlFlow::Continue(())
///     };
///     let request = Request { max_tokens: 5, ..Request::new(prompt, 32) };
///     scheduler.submit(request, Box::new(listener)).unwrap();
/// }
/// while scheduler.step() {}
/// drop((scheduler, sender));
/// assert_eq!(events.iter().collect::<Vec<_>>(), [5, 5]);
/// # Ok::<(), boostr::Error>(())
/// ```
pub struct Scheduler<'a, B: Backend> {
    model: &'a Model<B>,
    config: EngineConfig,
    /// What a request that failed left of a state that was lent.
    remains: Option<State<B>>,
    waiting: VecDeque<Job<'a, B>>,
    running: Vec<Job<'a, B>>,
    store: Store<B>,
    stats: Stats,
    /// Requests that came so far.
    count: u64,
    /// Steps that are made to panic.
    #[cfg(test)]
    faults: Vec<u64>,
}

impl<'a, B: Backend> Scheduler<'a, B> {
    /// A scheduler without requests.
    #[must_use]
    pub fn new(model: &'a Model<B>, config: EngineConfig) -> Self {
        let store = Store::new(config.snapshot_bytes);
        Self {
            model,
            config,
            remains: None,
            waiting: VecDeque::new(),
            running: Vec::new(),
            store,
            stats: Stats::default(),
            count: 0,
            #[cfg(test)]
            faults: Vec::new(),
        }
    }

    /// Lets states that leave memory go to disk, where those were `found`.
    pub(super) fn spill_to(&mut self, spill: Spill<B>, found: Vec<Found>) {
        self.store.spill_to(spill, found);
    }

    /// Writes a state to disk that is in memory alone; `false` when there is none that is worth it.
    pub(super) fn file_one(&mut self) -> bool {
        self.store.file_one()
    }

    /// Writes the states in memory to disk, as far as there is time; nothing is read from there any more.
    pub(super) fn end(&mut self) {
        self.store.end();
    }

    /// Takes a request. Its listener is told of it by [`step`](Self::step).
    ///
    /// # Errors
    ///
    /// [`Rejected`], and nothing was told.
    pub fn submit(
        &mut self,
        mut request: Request<B>,
        listener: Box<dyn Listener<B> + 'a>,
    ) -> Result<Ticket, Rejected> {
        let waiting = self.waiting.len();
        if waiting >= self.config.max_queue.max(1) {
            return Err(Rejected::QueueFull { waiting });
        }
        request.max_tokens = request.check(self.model, request.state.as_ref())?;
        let ticket = Ticket::default();
        self.submit_checked(request, listener, ticket.clone());
        Ok(ticket)
    }

    /// Takes a request that was checked, and may have been cancelled.
    pub(super) fn submit_checked(
        &mut self,
        request: Request<B>,
        listener: Box<dyn Listener<B> + 'a>,
        ticket: Ticket,
    ) {
        self.push(request, false, listener, ticket);
    }

    /// Takes the only request, checked. Its state is not copied, and comes back in its outcome or by
    /// [`remains`](Self::remains).
    pub(super) fn submit_alone(
        &mut self,
        request: Request<B>,
        listener: Box<dyn Listener<B> + 'a>,
    ) {
        self.push(request, true, listener, Ticket::default());
    }

    /// The state of the only request, which failed, as far as it got.
    pub(super) fn remains(&mut self) -> Option<State<B>> {
        self.remains.take()
    }

    fn push(
        &mut self,
        request: Request<B>,
        is_lent: bool,
        listener: Box<dyn Listener<B> + 'a>,
        ticket: Ticket,
    ) {
        self.count += 1;
        self.waiting.push_back(Job::new(request, is_lent, listener, ticket, self.count));
        self.stats.queued = self.waiting.len();
    }

    /// Whether nothing runs or waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// What was done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Ends all requests with [`Finish::Cancelled`].
    pub fn cancel_all(&mut self) {
        for job in self.running.iter().chain(&self.waiting) {
            job.ticket.cancel();
        }
        self.drop_cancelled();
        self.drop_over();
    }

    /// Computes the next step. `false` if there was nothing to do: all is done, or no listener is ready.
    pub fn step(&mut self) -> bool {
        let cancelled = self.drop_cancelled();
        self.store.settle();
        let resumed = self.resume();
        let began = self.admit() || resumed;
        let planned = self.plan();
        if planned > 0 {
            self.compute();
        }
        let is_choosing = |job: &Job<'_, B>| job.sequences.iter().any(|it| !it.logits.is_empty());
        let chose = self.running.iter().any(is_choosing);
        self.choose();
        for job in &mut self.running {
            job.deliver(&mut self.store, &mut self.stats);
        }
        let ended = self.drop_over();
        cancelled || began || planned > 0 || chose || ended
    }

    fn drop_cancelled(&mut self) -> bool {
        let mut any = false;
        for job in self.running.iter_mut().chain(&mut self.waiting) {
            if job.ticket.is_cancelled() && !job.is_over {
                job.end(Finish::Cancelled, &mut self.stats);
                self.stats.cancelled += 1;
                any = true;
            }
        }
        any
    }

    /// Begins those whose states were read, or computed by others.
    fn resume(&mut self) -> bool {
        let mut any = false;
        for i in 0..self.running.len() {
            let job = &self.running[i];
            let is_free = job.waits_behind() && !job.is_behind(&self.running);
            if is_free || job.is_read(&self.store) {
                let job = self.running.remove(i);
                let job = self.start(job);
                self.running.insert(i, job);
                any = true;
            }
        }
        any
    }

    /// Lets a request wait for another that computes what their prompts share, or begin.
    fn start(&mut self, mut job: Job<'a, B>) -> Job<'a, B> {
        if job.wait_behind(&mut self.running, &self.store, &mut self.stats) {
            job.forget_awaited(&mut self.store);
        } else {
            job.start(self.model, &mut self.store, &mut self.stats);
        }
        job
    }

    /// Takes requests out of the queue, in their order, while there is room.
    fn admit(&mut self) -> bool {
        let mut any = false;
        let mut taken: usize = self.running.iter().filter(|job| !job.is_over).map(Job::count).sum();
        while let Some(job) = self.waiting.front() {
            if !job.is_over && taken > 0 && taken + job.count() > self.config.max_running {
                break;
            }
            let Some(mut job) = self.waiting.pop_front() else { break };
            if !job.is_over {
                taken += job.count();
                job = self.start(job);
            }
            self.running.push(job);
            any = true;
        }
        any
    }

    /// Decides which tokens are run in this step; returns how many.
    fn plan(&mut self) -> usize {
        let every = self.config.snapshot_every;
        if let Some(job) = self.running.iter_mut().find(|job| job.is_alone && !job.is_over) {
            // Its sequences one after another, if they are at different places.
            let rows = job.plan_piece(every, usize::MAX);
            return if rows > 0 { rows } else { job.plan_tokens(self.model, &mut self.stats) };
        }
        let ready: Vec<bool> =
            self.running.iter().map(|job| !job.is_over && job.is_ready()).collect();
        let mut rows = 0;
        for (job, _) in self.running.iter_mut().zip(&ready).filter(|(_, ready)| **ready) {
            rows += job.plan_tokens(self.model, &mut self.stats);
        }
        let mut served = Vec::new();
        for (i, job) in self.running.iter_mut().enumerate().filter(|(i, _)| ready[*i]) {
            // The first piece is computed whatever its length: prompts go on beside any number of other sequences.
            let left = self.config.step_tokens.saturating_sub(rows);
            let piece = job.plan_piece(every, if served.is_empty() { usize::MAX } else { left });
            if piece > 0 {
                rows += piece;
                served.push(i);
            }
        }
        // Next time it is others' turn.
        for (moved, i) in served.into_iter().enumerate() {
            let job = self.running.remove(i - moved);
            self.running.push(job);
        }
        rows
    }

    /// Runs what is planned, and gives sequences the logits that they want.
    fn compute(&mut self) {
        let model = self.model;
        let (mut wanted, mut kept) = (Vec::new(), Vec::new());
        let mut is_kept = false;
        let mut runs = Vec::new();
        let mut logits = Vec::new();
        for job in &mut self.running {
            for sequence in job.sequences.iter_mut().filter(|it| !it.input.is_empty()) {
                wanted.push(sequence.wanted());
                kept.push(sequence.kept());
                is_kept |= sequence.keeps_hidden();
                runs.push(Run { tokens: &sequence.input, state: &mut sequence.state });
                logits.push((&mut sequence.logits, &mut sequence.hidden));
            }
        }
        self.stats.steps += 1;
        #[cfg(test)]
        let is_fault = self.faults.contains(&self.stats.steps);
        let result = catch_unwind(AssertUnwindSafe(|| {
            #[cfg(test)]
            assert!(!is_fault, "as the test wants");
            if !is_kept {
                return Ok([ops::to_vec(&model.forward_wanted(&mut runs, &wanted)?)?, Vec::new()]);
            }
            let [logits, hidden] = model.forward_kept(&mut runs, &wanted, &kept)?;
            Ok([ops::to_vec(&logits)?, ops::to_vec(&hidden)?])
        }));
        let result = result.unwrap_or_else(|payload| {
            self.stats.panics += 1;
            Err(panicked("a forward of the model", &*payload))
        });
        match result {
            Ok([rows, states]) => {
                let (mut rest, mut states) = (&rows[..], &states[..]);
                for ((logits, hidden), (wanted, kept)) in
                    logits.into_iter().zip(wanted.iter().zip(&kept))
                {
                    let (own, others) = rest.split_at(wanted * model.vocab_rows());
                    logits.clear();
                    logits.extend_from_slice(own);
                    rest = others;
                    let (own, others) = states.split_at((kept * model.width()).min(states.len()));
                    hidden.clear();
                    hidden.extend_from_slice(own);
                    states = others;
                }
                for job in &mut self.running {
                    let every = self.config.snapshot_every;
                    job.settle_pieces(&mut self.store, every, &mut self.stats);
                }
            }
            Err(error) => self.recover(error),
        }
    }

    /// A failed step leaves its states unusable. If it held one request, that request fails. Otherwise each is
    /// recomputed alone, so that it ends as if the others had not been.
    fn recover(&mut self, error: Error) {
        let is_in = |job: &Job<'_, B>| job.sequences.iter().any(|it| !it.input.is_empty());
        let mut jobs: Vec<_> = self.running.iter_mut().filter(|job| is_in(job)).collect();
        if let [job] = &mut jobs[..] {
            return job.fail_step(error, &mut self.stats);
        }
        for job in jobs {
            job.start_over(self.model, &mut self.store, &mut self.stats);
        }
    }

    /// Chooses tokens for all sequences that have logits, side by side.
    fn choose(&mut self) {
        let width = self.model.vocab_rows();
        let mut all = Vec::new();
        for job in self.running.iter_mut().filter(|job| !job.is_over) {
            let (rules, sequences) = job.choosing();
            let own = sequences.iter_mut().filter(|it| !it.logits.is_empty());
            all.extend(own.map(|sequence| (sequence, rules)));
        }
        let choose = |(sequence, rules): (&mut Sequence<B>, Rules<'_>)| {
            let logits = std::mem::take(&mut sequence.logits);
            let result = catch_unwind(AssertUnwindSafe(|| sequence.choose(&logits, width, rules)));
            sequence.result =
                result.unwrap_or_else(|payload| Err(panicked("the choice of a token", &*payload)));
        };
        if all.len() == 1 {
            all.into_iter().for_each(choose);
        } else {
            all.into_par_iter().for_each(choose);
        }
    }

    fn drop_over(&mut self) -> bool {
        let before = self.running.len() + self.waiting.len();
        let lent =
            self.running.iter_mut().filter(|job| job.is_over).find_map(|job| job.remains.take());
        self.remains = self.remains.take().or(lent);
        for job in self.running.iter_mut().filter(|job| job.is_over) {
            job.forget_awaited(&mut self.store);
        }
        self.running.retain(|job| !job.is_over);
        self.waiting.retain(|job| !job.is_over);
        let ended = before - self.running.len() - self.waiting.len();
        let states = self.running.iter().flat_map(|job| &job.sequences);
        let state_bytes = states.map(|it| it.state.size_in_bytes()).sum();
        let stats = &mut self.stats;
        stats.finished += ended as u64;
        (stats.running, stats.queued) = (self.running.len(), self.waiting.len());
        (stats.snapshots, stats.snapshot_bytes) = (self.store.len(), self.store.bytes());
        (stats.files, stats.file_bytes, stats.file_reads) = self.store.files();
        stats.state_bytes = state_bytes;
        ended > 0
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::ops::ControlFlow;
    use std::sync::mpsc;

    use super::super::{Event, Request};
    use super::*;
    use crate::backend::{self, Cpu};
    use crate::checkpoint::{ConfigFile, Dtype};
    use crate::models::Config;

    pub(in super::super) fn model() -> Model<Cpu> {
        let json = r#"{"model_type": "mamba2", "hidden_size": 32, "num_heads": 4, "head_dim": 16,
            "state_size": 8, "n_groups": 1, "num_hidden_layers": 2, "vocab_size": 64}"#;
        let config = Config::read(&ConfigFile::parse("config.json", json).unwrap()).unwrap();
        Model::synthetic(config, Dtype::F32, backend::cpu()).unwrap()
    }

    /// What a request of a schedule gets: tokens and log probabilities, or why it failed.
    type Got = (Vec<(u32, f32)>, Option<String>);

    fn run(model: &Model<Cpu>, config: &EngineConfig, faults: Vec<u64>) -> (Vec<Got>, Stats) {
        let mut scheduler = Scheduler::new(model, config.clone());
        scheduler.faults = faults;
        let receivers: Vec<_> = [5_usize, 200, 40]
            .into_iter()
            .map(|len| {
                let (sender, receiver) = mpsc::channel();
                let listener = move |event: Event<Cpu>| {
                    sender.send(event).unwrap();
                    ControlFlow::Continue(())
                };
                let prompt = (0..len as u32).map(|i| (7 * i + len as u32) % 64).collect();
                let logprobs = Some(0);
                let request = Request { max_tokens: 12, logprobs, ..Request::new(prompt, 64) };
                scheduler.submit(request, Box::new(listener)).unwrap();
                receiver
            })
            .collect();
        while scheduler.step() {}
        let stats = scheduler.stats();
        drop(scheduler);
        let got = receivers.into_iter().map(|receiver| {
            let (mut tokens, mut failed) = (Vec::new(), None);
            for event in receiver {
                match event {
                    Event::Token { id, logprob, .. } => tokens.push((id, logprob)),
                    Event::Failed { error } => failed = Some(error.to_string()),
                    _ => {}
                }
            }
            (tokens, failed)
        });
        (got.collect(), stats)
    }

    #[test]
    fn r_f13_a_step_of_several_that_panics_is_computed_again_to_the_bit() {
        std::panic::set_hook(Box::new(|_| {}));
        let model = model();
        let bare = EngineConfig { snapshot_bytes: 0, ..EngineConfig::default() };
        let snapshots = EngineConfig { snapshot_every: 64, ..EngineConfig::default() };
        let want = run(&model, &bare, Vec::new()).0;
        assert!(want.iter().all(|(tokens, failed)| tokens.len() == 12 && failed.is_none()));
        for fault in 1..10 {
            for config in [&bare, &snapshots] {
                let (got, stats) = run(&model, config, vec![fault]);
                assert_eq!((stats.panics, stats.failed), (1, 0), "step {fault}");
                if config.snapshot_bytes == bare.snapshot_bytes {
                    assert_eq!(got, want, "step {fault}");
                }
                for (got, want) in got.iter().zip(&want) {
                    let ids = |got: &Got| got.0.iter().map(|(id, _)| *id).collect::<Vec<_>>();
                    assert_eq!(ids(got), ids(want), "step {fault}");
                }
            }
        }
        // A step that always panics, with whom it is computed: that one fails, in the end.
        let (got, stats) = run(&model, &bare, (4..1000).collect());
        assert!(
            got.iter().all(|(_, failed)| failed.as_ref().unwrap().contains("as the test wants"))
        );
        assert_eq!(stats.failed, 3);
        let _ = std::panic::take_hook();
    }
}
