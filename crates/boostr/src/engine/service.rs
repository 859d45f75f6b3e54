//! A scheduler on a thread of its own.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::Duration;

use crate::backend::Backend;
use crate::error::Result;
use crate::models::Model;
use crate::threads::{self, Threads};

use super::request::Ticket;
use super::spill::{Found, Spill};
use super::{EngineConfig, Listener, Rejected, Request, Scheduler, SpillFolder, Stats};

/// How long to wait before listeners are asked again whether they are ready.
const PATIENCE: Duration = Duration::from_millis(2);
/// How long nothing is asked for before states in memory are written to disk, and the time between two of them.
const QUIET: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(20);

/// Computes the requests of many threads together, on threads of its own.
///
/// A clone is another handle of the same engine; with the last one it ends, and cancels what is left.
///
/// ```
/// use std::ops::ControlFlow;
/// use std::sync::{Arc, mpsc};
/// use boostr::engine::{Engine, EngineConfig, Event, Request};
/// use boostr::models::{Config, Model};
/// use boostr::{backend, checkpoint::{ConfigFile, Dtype}};
///
/// let config = Config::read(&ConfigFile::parse("config.json", r#"{
///     "model_type": "mamba2", "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4,
///     "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 32
/// }"#)?)?;
/// let model = Model::<backend::Cpu>::synthetic(config, Dtype::F32, backend::cpu())?;
/// let engine = Engine::start(Arc::new(model), EngineConfig::default())?;
/// let (sender, events) = mpsc::channel();
/// let listener = move |event| match sender.send(event) {
///     Ok(()) => ControlFlow::Continue(()),
///     Err(_) => ControlFlow::Break(()), // nobody listens any more
/// };
/// let request = Request { max_tokens: 3, ..Request::new(vec![1, 2], 32) };
/// engine.submit(request, Box::new(listener))?;
/// let tokens = events.iter().filter(|event| matches!(event, Event::Token { .. }));
/// assert_eq!(tokens.count(), 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Engine<B: Backend> {
    shared: Arc<Shared<B>>,
}

impl<B: Backend> Clone for Engine<B> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

struct Shared<B: Backend> {
    gate: Arc<Gate<B>>,
    sender: Mutex<Option<Sender<Arrival<B>>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    config: EngineConfig,
}

/// What both sides look at.
struct Gate<B: Backend> {
    model: Arc<dyn AsRef<Model<B>> + Send + Sync>,
    stats: Mutex<Stats>,
    /// Requests that were taken and are not over.
    open: AtomicUsize,
    is_draining: AtomicBool,
    is_stopping: AtomicBool,
    /// The thread that computes, and calls listeners.
    serving: Mutex<Option<ThreadId>>,
}

struct Arrival<B: Backend> {
    request: Request<B>,
    listener: Box<dyn Listener<B>>,
    ticket: Ticket,
}

impl<B: Backend> Engine<B> {
    /// Starts an engine over a model, or over what holds one.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) when threads cannot be started.
    pub fn start<M>(model: Arc<M>, config: EngineConfig) -> Result<Self>
    where
        M: AsRef<Model<B>> + Send + Sync + 'static,
    {
        Self::with(model, config, None)
    }

    /// The same with a folder for states that leave memory: it finds again what it had kept when it ended.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start); [`Error::Io`](crate::Error::Io) when the folder cannot be read,
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a model without a fingerprint.
    pub fn start_with_disk<M>(
        model: Arc<M>,
        config: EngineConfig,
        folder: SpillFolder,
    ) -> Result<Self>
    where
        M: AsRef<Model<B>> + Send + Sync + 'static,
    {
        Self::with(model, config, Some(folder))
    }

    fn with<M>(model: Arc<M>, config: EngineConfig, folder: Option<SpillFolder>) -> Result<Self>
    where
        M: AsRef<Model<B>> + Send + Sync + 'static,
    {
        let spill = folder.map(|folder| Spill::start(folder, model.clone())).transpose()?;
        let threads = config.threads.clone().or_else(|| (*model).as_ref().threads().cloned());
        let threads = threads.map_or_else(|| Threads::new(0), Ok)?;
        let of_model = (*model).as_ref().threads();
        let is_shared = of_model.is_some_and(|of_model| of_model.is_same(&threads));
        let (sender, arrivals) = mpsc::channel();
        let gate = Arc::new(Gate {
            model,
            stats: Mutex::default(),
            open: AtomicUsize::new(0),
            is_draining: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
            serving: Mutex::default(),
        });
        let own = gate.clone();
        let thread = thread::Builder::new()
            .name("engine".into())
            .spawn({
                let config = config.clone();
                move || serve(&own, config, spill, (&threads, is_shared), arrivals)
            })
            .map_err(|error| threads::cannot_start(&error))?;
        let (sender, thread) = (Mutex::new(Some(sender)), Mutex::new(Some(thread)));
        Ok(Self { shared: Arc::new(Shared { gate, sender, thread, config }) })
    }

    /// Hands in a request; its listener is told of it on the engine's thread. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Rejected`], and the listener is never told.
    pub fn submit(
        &self,
        mut request: Request<B>,
        listener: Box<dyn Listener<B>>,
    ) -> Result<Ticket, Rejected> {
        let Shared { gate, sender, config, .. } = &*self.shared;
        if gate.is_stopping.load(Ordering::Acquire) {
            return Err(Rejected::Stopped);
        }
        if gate.is_draining.load(Ordering::Acquire) {
            return Err(Rejected::Draining);
        }
        request.max_tokens = request.check((*gate.model).as_ref(), request.state.as_ref())?;
        let room = config.max_running.max(1) + config.max_queue;
        let taken = gate.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, |open| {
            (open < room).then_some(open + 1)
        });
        if let Err(open) = taken {
            return Err(Rejected::QueueFull { waiting: open.saturating_sub(config.max_running) });
        }
        let ticket = Ticket::default();
        let arrival = Arrival { request, listener, ticket: ticket.clone() };
        let sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
        let is_sent = sender.as_ref().is_some_and(|sender| sender.send(arrival).is_ok());
        if is_sent { Ok(ticket) } else { Err(Rejected::Stopped) }
    }

    /// What was done up to the last step.
    #[must_use]
    pub fn stats(&self) -> Stats {
        *self.shared.gate.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes no more requests; what runs and waits goes on.
    pub fn drain(&self) {
        self.shared.gate.is_draining.store(true, Ordering::Release);
    }

    /// Whether no more requests are taken.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.shared.gate.is_draining.load(Ordering::Acquire)
    }

    /// Whether nothing runs or waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.shared.gate.open.load(Ordering::Acquire) == 0
    }

    /// Cancels all requests, ends the thread, and waits for it: no longer than a step, or with a folder for states 5 s more.
    pub fn stop(&self) {
        self.shared.stop();
    }
}

impl<B: Backend> Shared<B> {
    fn stop(&self) {
        self.gate.is_stopping.store(true, Ordering::Release);
        self.sender.lock().unwrap_or_else(PoisonError::into_inner).take();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The last handle may be dropped by a listener, on the engine's own thread.
        let serving = *self.gate.serving.lock().unwrap_or_else(PoisonError::into_inner);
        let is_own = serving == Some(thread::current().id());
        if let Some(thread) = thread.filter(|_| !is_own) {
            // It does not panic but by a bug, of which it has told then.
            let _ = thread.join();
        }
    }
}

impl<B: Backend> Drop for Shared<B> {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Takes requests and computes them, until there are no more handles.
fn serve<B: Backend>(
    gate: &Gate<B>,
    config: EngineConfig,
    spill: Option<(Spill<B>, Vec<Found>)>,
    (threads, is_shared): (&Threads, bool),
    mut arrivals: Receiver<Arrival<B>>,
) {
    // The gate has counted; it is the only one that refuses.
    let config = EngineConfig { max_queue: usize::MAX, ..config };
    let mut scheduler = Scheduler::new((*gate.model).as_ref(), config);
    let is_spilling = spill.is_some();
    if let Some((spill, found)) = spill {
        scheduler.spill_to(spill, found);
    }
    let mut over = 0;
    // While there is nothing to compute the threads are free for others. One of them serves, so that the others wait for its
    // work awake; of a pool that the model's other callers use too, for a step at a time.
    while !gate.is_stopping.load(Ordering::Acquire)
        && let Ok(first) = wait(&arrivals, &mut scheduler, is_spilling)
    {
        let compute =
            |by_step| compute(gate, &mut scheduler, first, &mut arrivals, &mut over, by_step);
        let is_left =
            if is_shared { compute(Some(threads)) } else { threads.install(|| compute(None)) };
        if !is_left {
            break;
        }
    }
    // Until the last handle is gone, so that nothing that was handed in is lost.
    for Arrival { request, listener, ticket } in arrivals {
        scheduler.submit_checked(request, listener, ticket);
    }
    scheduler.cancel_all();
    publish(gate, &scheduler, &mut over);
    scheduler.end();
}

/// Waits for a request; while there is none for a time, writes states to disk.
fn wait<B: Backend>(
    arrivals: &Receiver<Arrival<B>>,
    scheduler: &mut Scheduler<'_, B>,
    is_spilling: bool,
) -> Result<Arrival<B>, RecvTimeoutError> {
    let mut pause = is_spilling.then_some(QUIET);
    while let Some(time) = pause {
        match arrivals.recv_timeout(time) {
            Err(RecvTimeoutError::Timeout) => pause = scheduler.file_one().then_some(PAUSE),
            come => return come,
        }
    }
    arrivals.recv().map_err(RecvTimeoutError::from)
}

/// Computes until nothing runs or waits, each step on the threads of `by_step` if there are some. `false` when it is to end before, as there are no more handles.
fn compute<B: Backend>(
    gate: &Gate<B>,
    scheduler: &mut Scheduler<'_, B>,
    first: Arrival<B>,
    arrivals: &mut Receiver<Arrival<B>>,
    over: &mut u64,
    by_step: Option<&Threads>,
) -> bool {
    let mut next = Some(first);
    loop {
        // All that have come belong to the next step.
        for Arrival { request, listener, ticket } in
            next.take().into_iter().chain(arrivals.try_iter())
        {
            scheduler.submit_checked(request, listener, ticket);
        }
        let is_stuck = Threads::install_on(by_step, || {
            *gate.serving.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(thread::current().id());
            !scheduler.step()
        });
        publish(gate, scheduler, over);
        if gate.is_stopping.load(Ordering::Acquire) {
            return false;
        }
        if scheduler.is_idle() {
            return true;
        }
        match arrivals.recv_timeout(if is_stuck { PATIENCE } else { Duration::ZERO }) {
            Ok(arrival) => next = Some(arrival),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
        }
    }
}

/// Lets the handles see what was done.
fn publish<B: Backend>(gate: &Gate<B>, scheduler: &Scheduler<'_, B>, over: &mut u64) {
    let stats = scheduler.stats();
    *gate.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    let ended = stats.finished - *over;
    *over = stats.finished;
    gate.open.fetch_sub(ended as usize, Ordering::AcqRel);
}
