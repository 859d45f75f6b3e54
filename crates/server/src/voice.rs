//! From ids to text, on the thread that computes: the listener of a request.
//!
//! It never waits: what it says goes into a channel that grows. It is not ready while too much lies there, and then
//! nothing is computed for it.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use boostr::backend::Backend;
use boostr::engine::{Event, Finish, Listener, Outcome};
use boostr::sample::StopStrings;
use boostr::tokenizer::{TextStream, Tokenizer};
use prometheus::Histogram;
use tokio::sync::mpsc;

/// Updates that may lie unread before nothing more is computed.
const MAX_WAITING: usize = 64;

/// What became of a request since the last update.
pub(crate) enum Update<B: Backend> {
    /// Tokens of the prompt that are done, and all of them.
    Prompt { done: usize, total: usize },
    /// Text of a continuation, of whole characters, and the tokens that begin in it, if they were asked for.
    Text { index: usize, text: String, tokens: Vec<Spoken> },
    /// A continuation ended.
    Finished { index: usize, outcome: Outcome<B> },
    /// The request failed.
    Failed { error: boostr::Error },
}

/// A token with its probability.
#[derive(Debug, Clone)]
pub(crate) struct Spoken {
    pub(crate) id: u32,
    pub(crate) logprob: f32,
    pub(crate) top: Vec<(u32, f32)>,
}

/// Speaks for the continuations of a request.
pub(crate) struct Voice<B: Backend> {
    throats: Vec<Throat>,
    updates: mpsc::UnboundedSender<Update<B>>,
    waiting: Arc<AtomicUsize>,
    start: Instant,
    first_token: Histogram,
    inter_token: Histogram,
}

/// Where [`Voice`] is heard.
pub(crate) struct Updates<B: Backend> {
    updates: mpsc::UnboundedReceiver<Update<B>>,
    waiting: Arc<AtomicUsize>,
}

impl<B: Backend> Updates<B> {
    /// The next update; `None` when there is no more.
    pub(crate) async fn next(&mut self) -> Option<Update<B>> {
        let update = self.updates.recv().await?;
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Some(update)
    }
}

impl<B: Backend> Voice<B> {
    /// A listener for `count` continuations, and where it is heard. Control tokens are text if `with_control`. `times` are
    /// told the time to the first token and between tokens.
    pub(crate) fn new(
        tokenizer: &Tokenizer,
        count: usize,
        stops: &[String],
        with_tokens: bool,
        with_control: bool,
        times: (Histogram, Histogram),
    ) -> boostr::Result<(Self, Updates<B>)> {
        let throat = |_| {
            let stops = StopStrings::new(stops)?;
            Ok::<_, boostr::Error>(Throat::new(tokenizer.stream(!with_control), stops, with_tokens))
        };
        let (sender, receiver) = mpsc::unbounded_channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let voice = Self {
            throats: (0..count).map(throat).collect::<boostr::Result<_>>()?,
            updates: sender,
            waiting: waiting.clone(),
            start: Instant::now(),
            first_token: times.0,
            inter_token: times.1,
        };
        Ok((voice, Updates { updates: receiver, waiting }))
    }

    /// Nobody listening ends what it is about.
    fn say(&self, update: Update<B>) -> ControlFlow<()> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        match self.updates.send(update) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }

    fn token(&mut self, index: usize, spoken: Spoken) -> ControlFlow<()> {
        let now = Instant::now();
        let Some(throat) = self.throats.get_mut(index) else { return ControlFlow::Break(()) };
        match throat.last.replace(now) {
            Some(last) => self.inter_token.observe((now - last).as_secs_f64()),
            None => self.first_token.observe((now - self.start).as_secs_f64()),
        }
        match throat.push(spoken) {
            Ok((text, tokens)) => {
                let stopped = throat.stopped;
                if !text.is_empty() || !tokens.is_empty() {
                    self.say(Update::Text { index, text, tokens })?;
                }
                if stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            }
            Err(error) => {
                let _ = self.say(Update::Failed { error });
                ControlFlow::Break(())
            }
        }
    }

    fn finished(&mut self, index: usize, mut outcome: Outcome<B>) -> ControlFlow<()> {
        let Some(throat) = self.throats.get_mut(index) else { return ControlFlow::Break(()) };
        match throat.finish() {
            Ok((text, tokens)) => {
                if throat.stopped && outcome.finish != Finish::Cancelled {
                    outcome.finish = Finish::Stopped;
                }
                if !text.is_empty() || !tokens.is_empty() {
                    self.say(Update::Text { index, text, tokens })?;
                }
                self.say(Update::Finished { index, outcome })
            }
            Err(error) => self.say(Update::Failed { error }),
        }
    }
}

impl<B: Backend> Listener<B> for Voice<B> {
    fn event(&mut self, event: Event<B>) -> ControlFlow<()> {
        match event {
            Event::Prompt { done, total, .. } => self.say(Update::Prompt { done, total }),
            Event::Token { index, id, logprob, top } => {
                self.token(index, Spoken { id, logprob, top })
            }
            Event::Finished { index, outcome } => self.finished(index, outcome),
            Event::Failed { error } => self.say(Update::Failed { error }),
        }
    }

    fn is_ready(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) < MAX_WAITING
    }
}

/// The text of one continuation.
struct Throat {
    stream: TextStream,
    stops: StopStrings,
    stopped: bool,
    /// Bytes of text that the tokens have made, and of those that were released.
    made: usize,
    released: usize,
    /// Tokens whose text is not released yet, each with where it begins; `None` when nobody asked for tokens.
    tokens: Option<VecDeque<(usize, Spoken)>>,
    last: Option<Instant>,
}

impl Throat {
    fn new(stream: TextStream, stops: StopStrings, with_tokens: bool) -> Self {
        let tokens = with_tokens.then(VecDeque::new);
        Self { stream, stops, stopped: false, made: 0, released: 0, tokens, last: None }
    }

    fn push(&mut self, spoken: Spoken) -> boostr::Result<(String, Vec<Spoken>)> {
        let text = self.stream.push(spoken.id)?.unwrap_or_default();
        if let Some(tokens) = &mut self.tokens {
            tokens.push_back((self.made, spoken));
        }
        self.made += text.len();
        let released = self.stops.push(&text);
        self.stopped = released.stopped;
        Ok(self.release(released.text, false))
    }

    fn finish(&mut self) -> boostr::Result<(String, Vec<Spoken>)> {
        if self.stopped {
            return Ok(Default::default());
        }
        let rest = self.stream.finish()?;
        self.made += rest.len();
        let released = self.stops.push(&rest);
        self.stopped = released.stopped;
        let text = released.text + &self.stops.finish();
        Ok(self.release(text, !released.stopped))
    }

    /// Text that is known to come before any stop string, with the tokens that begin in it; with all of them at the end.
    fn release(&mut self, text: String, all: bool) -> (String, Vec<Spoken>) {
        self.released += text.len();
        let released = self.released;
        let Some(waiting) = &mut self.tokens else { return (text, Vec::new()) };
        let begun = waiting.iter().take_while(|(at, _)| all || *at < released).count();
        (text, waiting.drain(..begun).map(|(_, spoken)| spoken).collect())
    }
}
