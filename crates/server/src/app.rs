//! What all requests share: choices, the model once it is there, and counters.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use boostr::backend::Backend;
use boostr::chat::ChatTemplate;
use boostr::chat::tools::ToolFormat;
use boostr::engine::{Draft, Engine};
use boostr::grammar::Vocabulary;
use boostr::load::LanguageModel;
use boostr::session::Sessions;
use boostr::tokenizer::Tokenizer;
use jiff::Timestamp;
use tokio::sync::Semaphore;

use crate::config::Config;
use crate::desk::{Desks, Room};
use crate::error::{ApiError, Result};
use crate::hole::Hole;
use crate::ids::Ids;
use crate::inflight::InFlight;
use crate::metrics::Metrics;
use crate::stored::Responses;
use crate::turn::Kept;

/// Memory for texts that are being encoded, and for sessions that are being read.
const TEXT_MEMORY: usize = 160 << 20;

/// What a server knows. Handlers have no state of their own.
pub(crate) struct App<B: Backend> {
    pub(crate) config: Config,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) ids: Ids,
    /// Answers that later requests may go on from.
    pub(crate) responses: Responses,
    /// When the server was made.
    pub(crate) begun: Instant,
    /// The queues of work outside of the engine.
    pub(crate) desks: Desks,
    /// The bodies under way.
    pub(crate) inflight: InFlight,
    loaded: OnceLock<Arc<Loaded<B>>>,
    draining: AtomicBool,
    work: Work,
}

impl<B: Backend> App<B> {
    pub(crate) fn new(config: Config) -> Result<Self, prometheus::Error> {
        Ok(Self {
            desks: Desks::new(&config.limits),
            inflight: InFlight::new(config.limits.max_inflight),
            responses: Responses::new(config.max_responses),
            config,
            metrics: Metrics::new()?.into(),
            ids: Ids::new(),
            begun: Instant::now(),
            loaded: OnceLock::new(),
            draining: AtomicBool::new(false),
            work: Work::default(),
        })
    }

    /// The model is there; one that came before it stays.
    pub(crate) fn load(&self, loaded: Loaded<B>) {
        let _ = self.loaded.set(Arc::new(loaded));
    }

    /// The model, if it is there.
    pub(crate) fn loaded(&self) -> Option<&Arc<Loaded<B>>> {
        self.loaded.get()
    }

    /// The model, for a request that needs it.
    pub(crate) fn ready(&self) -> Result<Arc<Loaded<B>>> {
        if self.is_draining() {
            return Err(ApiError::unavailable("draining", "the server is about to stop"));
        }
        let loading = || ApiError::unavailable("loading", "the model is being loaded");
        self.loaded.get().cloned().ok_or_else(loading)
    }

    /// From now on requests for work are refused.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        if let Some(loaded) = self.loaded.get() {
            loaded.engine.drain();
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Something that a stop has to wait for begins; it ends when this is dropped.
    pub(crate) fn begin_work(&self) -> WorkGuard {
        self.work.begin()
    }

    /// Whether nothing is being done that a stop has to wait for.
    pub(crate) fn is_idle(&self) -> bool {
        self.work.is_idle()
    }
}

/// How many pieces of work are under way.
#[derive(Debug, Default)]
pub(crate) struct Work(Arc<AtomicUsize>);

impl Work {
    pub(crate) fn begin(&self) -> WorkGuard {
        self.0.fetch_add(1, Ordering::SeqCst);
        WorkGuard(self.0.clone())
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.0.load(Ordering::SeqCst) == 0
    }
}

/// A piece of work that is under way.
#[derive(Debug)]
pub(crate) struct WorkGuard(Arc<AtomicUsize>);

impl Drop for WorkGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A model with what answers requests for it.
pub(crate) struct Loaded<B: Backend> {
    pub(crate) lm: Arc<LanguageModel<B>>,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) engine: Engine<B>,
    /// What guesses the next tokens of each answer.
    pub(crate) draft: Option<Draft<B>>,
    /// The model's, else the plain one.
    pub(crate) template: ChatTemplate,
    /// How the model calls tools, if its template shows it.
    pub(crate) tool_format: Option<ToolFormat>,
    /// How the model fills in, if it does.
    pub(crate) hole: Option<Hole>,
    /// Whether thoughts end with a control token.
    pub(crate) thinks_by_control: bool,
    /// Made when an answer first has to follow a grammar.
    vocabulary: OnceLock<boostr::Result<Vocabulary>>,
    /// Conversations that are kept, if any are.
    pub(crate) sessions: Option<Kept<B>>,
    /// The memory that work outside of the engine shares.
    pub(crate) room: Room,
    /// Tells builds and weights apart, for `system_fingerprint`.
    pub(crate) fingerprint: String,
    /// When the model was loaded, in seconds since 1970.
    pub(crate) created: u64,
    /// Bytes of a state that has seen nothing.
    pub(crate) state_bytes: usize,
    /// Whether it was said that a sequence is longer than the model was made for.
    long: AtomicBool,
    /// Held by the request that computes beside the engine: vectors, beams.
    pub(crate) alone: Arc<Semaphore>,
}

impl<B: Backend> Loaded<B> {
    pub(crate) fn new(
        lm: Arc<LanguageModel<B>>,
        engine: Engine<B>,
        draft: Option<Draft<B>>,
        sessions: Option<Sessions<B>>,
    ) -> boostr::Result<Self> {
        draft.as_ref().map_or(Ok(()), |draft| draft.check(&lm.model))?;
        let template = match &lm.chat_template {
            Some(source) => source.compile()?,
            None => {
                tracing::info!("the model has no chat template: messages are joined by newlines");
                ChatTemplate::plain()?
            }
        };
        let tokenizer = lm.tokenizer()?.clone();
        let closing = tokenizer.id("</think>").or_else(|| tokenizer.id("<|close|>"));
        let version = env!("CARGO_PKG_VERSION");
        let weights = lm.model.fingerprint().unwrap_or("none");
        Ok(Self {
            hole: Hole::of(&tokenizer),
            thinks_by_control: closing.is_some_and(|id| tokenizer.is_special(id)),
            tokenizer,
            fingerprint: format!("boostr-{version}-{weights}"),
            created: unix_seconds(),
            state_bytes: lm.model.new_state()?.size_in_bytes(),
            long: AtomicBool::new(false),
            alone: Arc::new(Semaphore::new(1)),
            tool_format: lm.chat_template.as_ref().and_then(ToolFormat::detect),
            vocabulary: OnceLock::new(),
            sessions: sessions.map(Kept::new),
            room: Room::new(TEXT_MEMORY),
            engine,
            draft,
            template,
            lm,
        })
    }
}

impl<B: Backend> Loaded<B> {
    /// Says once that a sequence is longer than the model was made for, where nothing holds it to that.
    pub(crate) fn note_length(&self, tokens: usize) {
        if let Some(made) = self.lm.model.trained_length().filter(|made| tokens > *made)
            && !self.long.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                tokens,
                made,
                "a sequence is longer than the model was made for, and goes on"
            );
        }
    }

    /// The vocabulary that grammars need. The first call takes half a second for a large one.
    pub(crate) fn vocabulary(&self) -> Result<&Vocabulary> {
        let new = || Vocabulary::new(&self.tokenizer, &self.lm.eos, self.lm.vocab_limit());
        self.vocabulary.get_or_init(new).as_ref().map_err(|error| {
            let status = StatusCode::UNPROCESSABLE_ENTITY;
            ApiError::new(status, error.to_string()).with_code("unsupported_tokenizer")
        })
    }
}

/// A moment in seconds since 1970, in the form of RFC 3339.
pub(crate) fn moment(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or_default();
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX).to_string()
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
