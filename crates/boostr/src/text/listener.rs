//! The listener of a request whose answer is text.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};

use crate::backend::Backend;
use crate::engine::{Event, Finish, Listener};
use crate::sample::Choice;

use super::{Delta, TextDecoder};

/// Events that may lie unread before no more is computed.
pub const MAX_BACKLOG: usize = 64;

/// An event of the engine, with the text that it releases.
#[derive(Debug)]
pub struct TextEvent<B: Backend> {
    /// The event. A continuation that a stop string ended has [`Finish::StopString`].
    pub event: Event<B>,
    /// What a token, or the end of a continuation, adds to its text.
    pub delta: Delta,
}

/// Where the events of a [`TextListener`] go.
pub trait TextSink<B: Backend>: Send {
    /// Takes an event; must be quick and never wait. `Break` as in [`Listener::event`].
    fn take(&mut self, event: TextEvent<B>) -> ControlFlow<()>;

    /// As [`Listener::is_ready`].
    fn is_ready(&self) -> bool {
        true
    }
}

/// A function takes each event.
impl<B: Backend, F: FnMut(TextEvent<B>) -> ControlFlow<()> + Send> TextSink<B> for F {
    fn take(&mut self, event: TextEvent<B>) -> ControlFlow<()> {
        self(event)
    }
}

/// Decodes the tokens of a request on the thread that computes, so that a stop string ends it at once.
pub struct TextListener<S> {
    /// One for each continuation; one without has no text.
    decoders: Vec<TextDecoder>,
    sink: S,
    /// Whether a token had no text: nothing more is told.
    has_failed: bool,
}

impl<S> TextListener<S> {
    /// A listener for continuations that are decoded by `decoders`.
    pub fn new(decoders: Vec<TextDecoder>, sink: S) -> Self {
        Self { decoders, sink, has_failed: false }
    }
}

impl<B: Backend, S: TextSink<B>> Listener<B> for TextListener<S> {
    fn event(&mut self, mut event: Event<B>) -> ControlFlow<()> {
        if self.has_failed {
            return ControlFlow::Break(());
        }
        let mut is_stopped = false;
        let delta = match &mut event {
            Event::Token { index, id, logprob, top } => {
                let choice = Choice { id: *id, logprob: *logprob, top: std::mem::take(top) };
                self.decoders.get_mut(*index).map(|decoder| {
                    let delta = decoder.push(choice)?;
                    is_stopped = decoder.is_stopped();
                    Ok(delta)
                })
            }
            Event::Finished { index, outcome } => self.decoders.get_mut(*index).map(|decoder| {
                let delta = decoder.finish()?;
                let is_cut = matches!(outcome.finish, Finish::Length | Finish::Stopped);
                if decoder.is_stopped() && is_cut {
                    outcome.finish = Finish::StopString;
                }
                Ok(delta)
            }),
            Event::Prompt { .. } | Event::Failed { .. } => None,
        };
        let delta = match delta.transpose() {
            Ok(delta) => delta.unwrap_or_default(),
            Err(error) => {
                self.has_failed = true;
                event = Event::Failed { error };
                Delta::default()
            }
        };
        self.sink.take(TextEvent { event, delta })?;
        if is_stopped || self.has_failed {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    fn is_ready(&self) -> bool {
        self.sink.is_ready()
    }
}

/// A listener for [`Engine::submit`](crate::engine::Engine::submit), and the events that it hears, for another thread to
/// read. While [`MAX_BACKLOG`] of them lie unread nothing is computed for the request. Dropping the events ends it.
///
/// ```
/// use std::sync::Arc;
/// use boostr::engine::{Engine, EngineConfig, Request};
/// use boostr::load::{LanguageModel, OpenOptions};
/// use boostr::text::{self, TextDecoder};
/// use boostr::backend;
///
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
/// let lm = Arc::new(LanguageModel::open(path, &OpenOptions::default(), backend::cpu())?);
/// let engine = Engine::start(lm.clone(), EngineConfig::default())?;
/// let decoder = TextDecoder::new(lm.tokenizer()?.stream(true), &["\n"], false)?;
/// let (listener, events) = text::channel(vec![decoder]);
/// let prompt = lm.encode("Once upon a time")?;
/// let request = Request { max_tokens: 8, ..Request::new(prompt, lm.vocab_limit()) };
/// engine.submit(request, Box::new(listener))?;
/// let text: String = events.map(|event| event.delta.text).collect();
/// assert!(!text.contains('\n'));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn channel<B: Backend>(
    decoders: Vec<TextDecoder>,
) -> (TextListener<impl TextSink<B>>, TextEvents<B>) {
    let (sender, receiver) = mpsc::channel();
    let backlog = Arc::new(AtomicUsize::new(0));
    let sink = Channel { sender, backlog: backlog.clone() };
    (TextListener::new(decoders, sink), TextEvents { receiver, backlog })
}

struct Channel<B: Backend> {
    sender: Sender<TextEvent<B>>,
    backlog: Arc<AtomicUsize>,
}

impl<B: Backend> TextSink<B> for Channel<B> {
    fn take(&mut self, event: TextEvent<B>) -> ControlFlow<()> {
        self.backlog.fetch_add(1, Ordering::Relaxed);
        match self.sender.send(event) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }

    fn is_ready(&self) -> bool {
        self.backlog.load(Ordering::Relaxed) < MAX_BACKLOG
    }
}

/// The events of a request, until it ends. The iterator waits for the next one.
pub struct TextEvents<B: Backend> {
    receiver: Receiver<TextEvent<B>>,
    backlog: Arc<AtomicUsize>,
}

/// The next event finds nobody, and so ends the request.
impl<B: Backend> Drop for TextEvents<B> {
    fn drop(&mut self) {
        self.backlog.store(0, Ordering::Relaxed);
    }
}

impl<B: Backend> Iterator for TextEvents<B> {
    type Item = TextEvent<B>;

    fn next(&mut self) -> Option<TextEvent<B>> {
        let event = self.receiver.recv().ok()?;
        self.backlog.fetch_sub(1, Ordering::Relaxed);
        Some(event)
    }
}
