//! A request on its way through the engine: submitted, watched, cancelled when nobody wants it any more.
//!
//! ```text
//! engine's thread ─ TextListener ─ events ─ Driver (a task) ─ pieces ─ response
//! ```
//!
//! The channel of pieces is bounded. A client that does not read fills it, the task waits, events pile up, and the engine
//! computes nothing for the request (backpressure); [`io`](crate::io) ends such a connection. When the response is gone the task cancels.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use boostr::backend::Backend;
use boostr::chat::tools::{self, Call, ToolFormat};
use boostr::chat::{Said, Thoughts};
use boostr::engine::{Event, Finish, Outcome, Rejected, Request, Ticket};
use boostr::sample::Choice;
use boostr::text::{Delta, TextDecoder, TextEvent};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::sleep_until;

use crate::app::{App, Loaded, WorkGuard};
use crate::deadline::after;
use crate::error::{ApiError, Result};
use crate::listener::{self, Events};
use crate::shape::{Called, Finder};
use crate::turn::{SessionTurn, Turn};

/// Pieces that lie ready for a response.
const READY: usize = 64;

/// What a response is made of, in order.
#[derive(Debug)]
pub(crate) enum Piece {
    /// Tokens of the prompt that are done, and all of them.
    Progress { done: usize, total: usize },
    /// Nothing was said for a while.
    Ping,
    /// Text of a continuation, and tokens where they were asked for.
    Text { index: usize, text: String, tokens: Vec<Choice> },
    /// The same of its thought.
    Thought { index: usize, text: String, tokens: Vec<Choice> },
    /// A call of a tool, the `number`-th of its continuation.
    Call { index: usize, number: usize, call: Called },
    /// A continuation ended.
    Finished { index: usize, how: Finished },
    /// The request failed; nothing follows.
    Failed(ApiError),
}

/// How a continuation ended.
#[derive(Debug, Clone)]
pub(crate) struct Finished {
    pub(crate) reason: FinishReason,
    /// The stop string that ended it.
    pub(crate) stop: Option<String>,
    /// Tokens that were generated.
    pub(crate) tokens: usize,
    /// Tokens of the thought's text.
    pub(crate) thought_tokens: usize,
    pub(crate) prompt_tokens: usize,
    pub(crate) cached_tokens: usize,
    pub(crate) prompt_time: Duration,
    pub(crate) decode_time: Duration,
    /// What the state of the sequence takes.
    pub(crate) state_bytes: usize,
    /// Tokens of the sequence, those of the answer among them.
    pub(crate) position: usize,
    /// The turn of a session that it became.
    pub(crate) session: Option<SessionTurn>,
}

/// Why a continuation ended, in OpenAI's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FinishReason {
    Stop,
    Length,
    ToolCalls,
}

/// What to generate, and what to do with it.
pub(crate) struct Job<B: Backend> {
    /// The field of the client's request that the prompt is made of.
    pub(crate) param: &'static str,
    pub(crate) request: Request<B>,
    pub(crate) stops: Vec<String>,
    /// Added to the index of each continuation.
    pub(crate) first_index: usize,
    /// What divides each continuation into thought and text.
    pub(crate) thoughts: Option<Thoughts>,
    /// What finds calls of tools in each continuation.
    pub(crate) finder: Option<Finder>,
    /// The turn of a session that the answer becomes; of a job with one continuation.
    pub(crate) turn: Option<Turn<B>>,
}

/// Submits a job whose pieces go to `pieces`.
pub(crate) fn start<B: Backend>(
    app: &Arc<App<B>>,
    loaded: &Arc<Loaded<B>>,
    job: Job<B>,
    pieces: mpsc::Sender<Piece>,
) -> Result<()> {
    let times = (app.metrics.first_token.clone(), app.metrics.inter_token.clone());
    let (count, prompt_tokens) = (job.request.count, job.request.prompt.len());
    // Control tokens may be what calls of tools, and thoughts, are found by.
    let skips = job.finder.is_none() && !(job.thoughts.is_some() && loaded.thinks_by_control);
    let stream = || loaded.tokenizer.stream(skips);
    let with_tokens = job.request.logprobs.is_some();
    let decoders = (0..count).map(|_| TextDecoder::new(stream(), &job.stops, with_tokens));
    let decoders = decoders.collect::<boostr::Result<Vec<_>>>();
    let mut decoders = decoders.map_err(|error| ApiError::of_input("stop", &error))?;
    let mut continuations = vec![Continuation::new(job.thoughts, job.finder); count];
    let given = job.request.prompt.len().saturating_sub(job.request.begun);
    let begun = job.request.prompt.get(given..).unwrap_or_default();
    if !begun.is_empty() {
        for (decoder, said) in decoders.iter_mut().zip(&mut continuations) {
            let plain = TextDecoder::new(stream(), &[""; 0], false);
            let mut plain = plain.map_err(|error| ApiError::failed(&error))?;
            said.begin(decoder, &mut plain, begun, app, loaded)?;
        }
    }
    let (listener, events) = listener::channel(decoders, times);
    let ticket = loaded
        .engine
        .submit(job.request, Box::new(listener))
        .map_err(|rejected| refusal(app, &rejected, job.param))?;
    let driver = Driver {
        app: app.clone(),
        events,
        ticket,
        pieces,
        running: count,
        first_index: job.first_index,
        prompt_tokens,
        param: job.param,
        continuations,
        stops: job.stops,
        turn: job.turn,
        loaded: loaded.clone(),
        _work: app.begin_work(),
    };
    tokio::spawn(driver.run());
    Ok(())
}

/// A channel for the pieces of a response.
pub(crate) fn channel() -> (mpsc::Sender<Piece>, mpsc::Receiver<Piece>) {
    mpsc::channel(READY)
}

fn refusal<B: Backend>(app: &App<B>, rejected: &Rejected, param: &str) -> ApiError {
    let (reason, error) = match rejected {
        Rejected::QueueFull { waiting } => {
            let message = format!("too many requests: {waiting} wait already");
            let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, message);
            ("queue_full", error.with_code("queue_full").with_retry_after(1))
        }
        Rejected::Draining | Rejected::Stopped => {
            let message = "the server is about to stop";
            ("draining", ApiError::unavailable("draining", message))
        }
        Rejected::Invalid(error) => ("invalid", ApiError::of_input(param, error)),
    };
    app.metrics.rejected(reason);
    error
}

/// What a continuation has said so far.
#[derive(Clone)]
struct Continuation {
    thoughts: Option<Thoughts>,
    finder: Option<Finder>,
    thought: String,
    text: String,
    called: Vec<Called>,
    /// Of an answer that goes on: the length of its thought when it did.
    thought_before: usize,
    /// Thought and text that the client got when the answer was cut, and that are held back now for what may follow.
    told: [String; 2],
}

/// A part of what a continuation says.
enum Part {
    Thought(String),
    Text(String),
    Call(Call),
}

impl Continuation {
    fn new(thoughts: Option<Thoughts>, finder: Option<Finder>) -> Self {
        Self {
            thoughts,
            finder,
            thought: String::new(),
            text: String::new(),
            called: Vec::new(),
            thought_before: 0,
            told: Default::default(),
        }
    }

    /// Takes the tokens that the answer begins with: what they say was said before. `plain` decodes without stop strings.
    fn begin<B: Backend>(
        &mut self,
        decoder: &mut TextDecoder,
        plain: &mut TextDecoder,
        ids: &[u32],
        app: &App<B>,
        loaded: &Loaded<B>,
    ) -> Result<()> {
        // All of it, as when it was cut.
        let mut cut = self.clone();
        let said = ids.iter().map(|&id| plain.begin(id)).collect::<boostr::Result<String>>();
        let said = said.and_then(|said| Ok(said + &plain.finish()?.text));
        let mut parts = cut.take(said.map_err(|error| ApiError::failed(&error))?);
        parts.extend(cut.take_rest());
        cut.hear(parts, app, loaded);
        // What is known of it for certain, whatever follows.
        let text = ids.iter().map(|&id| decoder.begin(id)).collect::<boostr::Result<String>>();
        let text = text.map_err(|error| ApiError::failed(&error))?;
        if decoder.is_stopped() {
            return Err(ApiError::field("stop", "the answer that goes on has one already"));
        }
        let parts = self.take(text);
        self.hear(parts, app, loaded);
        let rest = |all: &str, known: &str| all.strip_prefix(known).unwrap_or_default().to_owned();
        self.told = [rest(&cut.thought, &self.thought), rest(&cut.text, &self.text)];
        self.thought_before = self.thought.len();
        Ok(())
    }

    fn hear<B: Backend>(&mut self, parts: Vec<Part>, app: &App<B>, loaded: &Loaded<B>) {
        for part in parts {
            match part {
                Part::Thought(text) => self.thought.push_str(&text),
                Part::Text(text) => self.text.push_str(&text),
                Part::Call(call) => {
                    self.call(call, app, loaded);
                }
            }
        }
    }

    /// Takes a call; returns its number, and it with an id.
    fn call<B: Backend>(
        &mut self,
        call: Call,
        app: &App<B>,
        loaded: &Loaded<B>,
    ) -> (usize, Called) {
        let format = loaded.tool_format.unwrap_or(ToolFormat::Hermes);
        let id = call.id.unwrap_or_else(|| format.call_id(app.ids.number()));
        let called = Called { id, name: call.name, arguments: call.arguments };
        self.called.push(called.clone());
        (self.called.len() - 1, called)
    }

    /// What the next text is, as far as it is known.
    fn take(&mut self, text: String) -> Vec<Part> {
        let said = match &mut self.thoughts {
            Some(thoughts) => thoughts.push(&text),
            None => vec![Said::Text(text)],
        };
        self.find_calls(said)
    }

    /// The rest of it.
    fn take_rest(&mut self) -> Vec<Part> {
        let said = self.thoughts.as_mut().map(Thoughts::finish).unwrap_or_default();
        let mut parts = self.find_calls(said);
        if let Some(finder) = &mut self.finder {
            parts.extend(finder.calls.finish().into_iter().map(Part::from));
        }
        parts
    }

    fn find_calls(&mut self, said: Vec<Said>) -> Vec<Part> {
        let mut parts = Vec::new();
        for said in said {
            match (said, &mut self.finder) {
                (Said::Thought(text), _) => parts.push(Part::Thought(text)),
                (Said::Text(text), None) => parts.push(Part::Text(text)),
                (Said::Text(text), Some(finder)) => {
                    parts.extend(finder.calls.push(&text).into_iter().map(Part::from));
                }
            }
        }
        parts
    }

    /// Whether there may be no other call.
    fn is_full(&self) -> bool {
        self.finder.as_ref().is_some_and(|finder| self.called.len() >= finder.most)
    }

    /// It as a message that templates understand.
    fn message(&self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.text});
        if !self.thought.is_empty() {
            message["reasoning_content"] = self.thought.as_str().into();
        }
        if !self.called.is_empty() {
            let calls = self.called.iter().map(|call| {
                let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_default();
                let function = json!({"name": call.name, "arguments": arguments});
                json!({"id": call.id, "type": "function", "function": function})
            });
            message["tool_calls"] = calls.collect();
        }
        message
    }
}

/// What of a text is not `told`, which this takes it from.
fn untold(told: &mut String, text: String) -> String {
    if told.is_empty() {
        return text;
    }
    let alike = told.chars().zip(text.chars()).take_while(|(a, b)| a == b);
    let len = alike.map(|(c, _)| c.len_utf8()).sum();
    if len == text.len() {
        told.drain(..len);
    } else {
        // A part of a character was told as U+FFFD; what follows is new.
        told.clear();
    }
    text.get(len..).unwrap_or_default().to_owned()
}

impl From<tools::Piece> for Part {
    fn from(piece: tools::Piece) -> Self {
        match piece {
            tools::Piece::Text(text) => Self::Text(text),
            tools::Piece::Call(call) => Self::Call(call),
        }
    }
}

/// Watches a request from its submission to its end.
struct Driver<B: Backend> {
    app: Arc<App<B>>,
    events: Events<B>,
    ticket: Ticket,
    pieces: mpsc::Sender<Piece>,
    /// Continuations that have not ended.
    running: usize,
    first_index: usize,
    prompt_tokens: usize,
    param: &'static str,
    stops: Vec<String>,
    turn: Option<Turn<B>>,
    loaded: Arc<Loaded<B>>,
    continuations: Vec<Continuation>,
    _work: WorkGuard,
}

impl<B: Backend> Driver<B> {
    async fn run(mut self) {
        let limits = self.app.config.limits.clone();
        let mut deadline = after(limits.queue_time);
        let (mut has_begun, mut is_late, mut is_gone) = (false, false, false);
        while self.running > 0 {
            let ping = after(limits.ping_time);
            let event = tokio::select! {
                event = self.events.next() => event,
                () = self.pieces.closed(), if !is_gone => {
                    self.ticket.cancel();
                    tracing::info!(code = 499, "the client is gone");
                    is_gone = true;
                    continue;
                }
                () = sleep_until(deadline), if !is_late => {
                    self.ticket.cancel();
                    if !has_begun {
                        self.app.metrics.rejected("queue_time");
                        let message = "the request waited too long for its turn";
                        self.send(Piece::Failed(ApiError::unavailable("queue_time", message))).await;
                        return;
                    }
                    is_late = true;
                    continue;
                }
                () = sleep_until(ping), if !is_gone => {
                    let _ = self.pieces.try_send(Piece::Ping);
                    continue;
                }
            };
            // The engine drops a listener without a word when that panicked.
            let Some(TextEvent { event, delta }) = event else {
                self.send(Piece::Failed(ApiError::internal(&"the engine gave up"))).await;
                return;
            };
            match event {
                Event::Prompt { done, total, .. } => {
                    if !has_begun {
                        has_begun = true;
                        deadline = after(limits.request_time);
                    }
                    self.send(Piece::Progress { done, total }).await;
                }
                Event::Token { index, .. } => self.say(index, delta).await,
                Event::Finished { index, outcome } => {
                    self.running -= 1;
                    self.say(index, delta).await;
                    self.say_rest(index).await;
                    let how = self.finished(index, &outcome, is_late);
                    let index = self.first_index + index;
                    let session = self.commit(outcome).await;
                    let stopped = || ApiError::unavailable("stopped", "the server stops");
                    let piece = match (how, session) {
                        (Some(how), Ok(session)) => {
                            Piece::Finished { index, how: Finished { session, ..how } }
                        }
                        (_, Err(error)) => Piece::Failed(error),
                        (None, _) => Piece::Failed(stopped()),
                    };
                    self.send(piece).await;
                }
                Event::Failed { error } => {
                    self.send(Piece::Failed(ApiError::of_input(self.param, &error))).await;
                    return;
                }
            }
        }
    }

    /// Passes text on, and what of it is calls.
    async fn say(&mut self, index: usize, delta: Delta) {
        let Some(said) = self.continuations.get_mut(index) else { return };
        if delta.is_empty() {
            return;
        }
        let parts = said.take(delta.text);
        self.pass(index, parts, delta.tokens).await;
    }

    /// The same at the end of a continuation.
    async fn say_rest(&mut self, index: usize) {
        if let Some(said) = self.continuations.get_mut(index) {
            let parts = said.take_rest();
            self.pass(index, parts, Vec::new()).await;
        }
    }

    async fn pass(&mut self, index: usize, parts: Vec<Part>, mut tokens: Vec<Choice>) {
        let id = self.first_index + index;
        if parts.is_empty() && !tokens.is_empty() {
            let text = String::new();
            return self.send(Piece::Text { index: id, text, tokens }).await;
        }
        for part in parts {
            let Some(said) = self.continuations.get_mut(index) else { return };
            let piece = match part {
                Part::Thought(text) => {
                    said.thought.push_str(&text);
                    let text = untold(&mut said.told[0], text);
                    Piece::Thought { index: id, text, tokens: std::mem::take(&mut tokens) }
                }
                Part::Text(_) if said.finder.as_ref().is_some_and(|finder| finder.is_forced) => {
                    if tokens.is_empty() {
                        continue;
                    }
                    let tokens = std::mem::take(&mut tokens);
                    Piece::Text { index: id, text: String::new(), tokens }
                }
                Part::Text(text) => {
                    if self.turn.is_some() {
                        said.text.push_str(&text);
                    }
                    let text = untold(&mut said.told[1], text);
                    Piece::Text { index: id, text, tokens: std::mem::take(&mut tokens) }
                }
                Part::Call(_) if said.is_full() => continue,
                Part::Call(call) => {
                    let (number, call) = said.call(call, &self.app, &self.loaded);
                    Piece::Call { index: id, number, call }
                }
            };
            self.send(piece).await;
        }
    }

    /// A response that is gone is noticed by the loop.
    async fn send(&self, piece: Piece) {
        let _ = self.pieces.send(piece).await;
    }

    /// `None` when the engine was told to stop.
    fn finished(&self, index: usize, outcome: &Outcome<B>, is_late: bool) -> Option<Finished> {
        let said = self.continuations.get(index);
        let has_called = said.is_some_and(|said| !said.called.is_empty());
        let thought = said.map_or("", |said| &said.thought[said.thought_before..]);
        let tokenizer = &self.loaded.tokenizer;
        let reason = match outcome.finish {
            Finish::Cancelled if is_late => FinishReason::Length,
            Finish::Cancelled => return None,
            Finish::Length => FinishReason::Length,
            Finish::Eos | Finish::StopString | Finish::Stopped if has_called => {
                FinishReason::ToolCalls
            }
            Finish::Eos | Finish::StopString | Finish::Stopped => FinishReason::Stop,
        };
        let stop = (outcome.finish == Finish::StopString).then(|| {
            // Its text as the decoder had it, which holds the string that was complete first.
            let text = tokenizer.decode(&outcome.ids, false).unwrap_or_default();
            let found = |stop: &&String| Some(text.find(*stop)? + stop.len());
            let found = self.stops.iter().filter_map(|stop| Some((found(&stop)?, stop)));
            found.min_by_key(|(end, stop)| (*end, usize::MAX - stop.len())).map(|(_, s)| s.clone())
        });
        let timings = &outcome.timings;
        if index == 0 {
            let (prompt, cached, shared) = (self.prompt_tokens, timings.cached, timings.shared);
            let from = if timings.is_from_disk { "disk" } else { "memory" };
            tracing::info!(shared, from, "kept {cached} of {prompt} tokens");
        }
        for line in self.loaded.lm.notices() {
            tracing::warn!("{line}");
        }
        let state = outcome.state.as_ref();
        self.loaded.note_length(self.prompt_tokens + outcome.ids.len());
        Some(Finished {
            reason,
            stop: stop.flatten(),
            tokens: outcome.ids.len(),
            thought_tokens: match thought {
                "" => 0,
                text => tokenizer.encode(text, false).map_or(0, |ids| ids.len()),
            },
            prompt_tokens: self.prompt_tokens,
            cached_tokens: timings.cached,
            prompt_time: timings.prompt,
            decode_time: timings.decode,
            state_bytes: state.map_or(0, boostr::models::State::size_in_bytes),
            position: outcome.position,
            session: None,
        })
    }

    /// Makes a turn of its session of an answer, also of one that was cancelled, if anything was said.
    async fn commit(&mut self, outcome: Outcome<B>) -> Result<Option<SessionTurn>> {
        let Some(turn) = self.turn.take() else { return Ok(None) };
        if outcome.finish == Finish::Cancelled && outcome.ids.is_empty() {
            return Ok(None);
        }
        let (app, loaded) = (self.app.clone(), self.loaded.clone());
        let answer = self.continuations.first().map(Continuation::message).unwrap_or_default();
        let is_cut = matches!(outcome.finish, Finish::Length | Finish::Cancelled);
        let committed = tokio::task::spawn_blocking(move || {
            let name = &app.config.model_name;
            let turn = turn.commit(&loaded, name, answer, &outcome.ids, outcome.state, is_cut);
            app.responses.make_room();
            turn
        });
        committed.await.unwrap_or_else(|error| Err(ApiError::failed(&error))).map(Some)
    }
}
