//! Generation: ids in, ids out.
//!
//! ```text
//! generate     one sequence, on the caller's thread, its state lent
//! Scheduler    many requests, step by step, on the caller's thread; says nothing of time or threads
//! Engine       a Scheduler on a thread of its own, with a bounded queue
//! beam_search  the likeliest continuations, by forks
//! ```
//!
//! # Steps
//!
//! A step is one forward of the model. It has the next token of each sequence that is decoding, then pieces of prompts
//! (prefill), each sequence in its turn, up to [`EngineConfig::step_tokens`] rows. So a long prompt delays others by one
//! piece at most, and ends within one when its client is gone.
//!
//! # Exact
//!
//! The answer to a request depends on its tokens alone. A row of a forward has the same bits in any batch and on any number
//! of threads. It has them however the tokens before it were computed: in a prompt, in a piece of one, as guesses or one by
//! one. So neither the size of a step nor the snapshot that a request begins with changes an answer.
//!
//! # Snapshots
//!
//! Snapshots are the prefix cache. A state cannot be cut back to a shorter prefix, so it is kept where a later request may
//! begin: at the end of each prompt and near it, at its marks, each [`EngineConfig::snapshot_every`] tokens, where it left
//! the way of an earlier prompt, and where generation ended. A state of keys and values alone can be cut back: one serves
//! all its prefixes. A request begins at the longest snapshot that is a prefix of it. Forks share memory, and shared memory
//! is counted once against [`EngineConfig::snapshot_bytes`]. The snapshot is dropped first without which the fewest tokens
//! would be computed again, as often as it was used; and of those the one that was used longest ago.
//!
//! An [`Engine`] may have a [`SpillFolder`]: a snapshot that is dropped then goes to disk. A request that would begin there
//! waits until it is read, while others go on.

use crate::backend::Backend;
use crate::error::Result;
use crate::models::{Logits, Model, Run, State};
use crate::ops;
use crate::threads::Threads;

mod draft;
mod generate;
mod job;
mod request;
mod scheduler;
mod search;
mod sequence;
mod service;
mod spill;
mod store;

pub use draft::{Draft, Guess};
pub use generate::generate;
pub use request::{Event, Finish, Listener, Outcome, Rejected, Request, Ticket, Timings};
pub use scheduler::Scheduler;
pub use search::{Beam, BeamSearch, beam_search};
pub use service::Engine;
pub use spill::SpillFolder;

/// Runs `tokens`, at least one; returns the logits of what comes next.
fn run<B: Backend>(model: &Model<B>, state: &mut State<B>, tokens: &[u32]) -> Result<Vec<f32>> {
    ops::to_vec(&model.forward(&mut [Run { tokens, state }], Logits::Last)?)
}

/// Most tokens of one prompt in a step. A step cannot be interrupted.
pub const STEP_PIECE: usize = 128;

/// Sizes of an engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Requests that are computed at once; at least 1.
    pub max_running: usize,
    /// Requests that wait; one more is refused.
    pub max_queue: usize,
    /// Rows of a step. Sequences past their prompts always have theirs, and one prompt always goes on by a piece.
    pub step_tokens: usize,
    /// Memory for snapshots, in bytes; 0 keeps none.
    pub snapshot_bytes: usize,
    /// A snapshot is kept each so many tokens of a prompt; 0 for none but those at marks and ends.
    pub snapshot_every: usize,
    /// Threads that compute. When `None` the model's own, else a new pool of as many as there are processors.
    pub threads: Option<Threads>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_running: 16,
            max_queue: 64,
            step_tokens: 256,
            snapshot_bytes: 512 << 20,
            snapshot_every: 512,
            threads: None,
        }
    }
}

/// What an engine has done and is doing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that are computed.
    pub running: usize,
    /// Requests that wait.
    pub queued: usize,
    /// Requests that came to an end, whichever.
    pub finished: u64,
    /// Those of them that were cancelled.
    pub cancelled: u64,
    /// Those of them that failed.
    pub failed: u64,
    /// Panics that were caught.
    pub panics: u64,
    /// Forwards of the model.
    pub steps: u64,
    /// Tokens of prompts that were computed.
    pub prompt_tokens: u64,
    /// Tokens that were generated.
    pub generated_tokens: u64,
    /// Tokens of prompts that were not computed, thanks to a snapshot or a given state.
    pub skipped_tokens: u64,
    /// Requests that began at a snapshot.
    pub snapshot_hits: u64,
    /// Snapshots that are kept.
    pub snapshots: usize,
    /// Memory of the snapshots, in bytes; what they share is counted once.
    pub snapshot_bytes: usize,
    /// States on disk.
    pub files: usize,
    /// Bytes of all files there.
    pub file_bytes: u64,
    /// States that were read from there.
    pub file_reads: u64,
    /// Memory of the states of running sequences, in bytes, as if they shared nothing.
    pub state_bytes: usize,
    /// Tokens that were drafted.
    pub drafted_tokens: u64,
    /// Those of them that the model would have chosen itself.
    pub accepted_tokens: u64,
}
