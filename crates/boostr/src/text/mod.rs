//! Text in, text out.
//!
//! ```
//! use boostr::load::{LanguageModel, OpenOptions};
//! use boostr::backend;
//!
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
//! let lm = LanguageModel::open(path, &OpenOptions::default(), backend::cpu())?;
//! let answer = lm
//!     .complete("Once upon a time")
//!     .max_tokens(64)
//!     .temperature(0.8)
//!     .stop("\n")
//!     .stream(|piece| print!("{piece}"))?;
//! assert!(!answer.text.contains('\n'));
//! # Ok::<(), boostr::Error>(())
//! ```
//!
//! | type | what it is |
//! |---|---|
//! | [`Completion`] | a prompt and how to continue it, by [`LanguageModel::complete`](crate::load::LanguageModel::complete), [`chat`](crate::load::LanguageModel::chat) or [`Session::answer`](crate::session::Session::answer) |
//! | [`Answer`] | what came of it |
//! | [`Sampling`] | which options of sampling win: the request's, the author's, the library's |
//! | [`TextDecoder`] | ids to text, up to a stop string |
//! | [`TextListener`] | a decoder for each continuation of an engine's request |

mod completion;
mod decoder;
mod listener;
mod sampling;
mod session;

pub use completion::{Answer, BeamAnswer, Completion};
pub use decoder::{Delta, TextDecoder};
pub use listener::{MAX_BACKLOG, TextEvent, TextEvents, TextListener, TextSink, channel};
pub use sampling::Sampling;
pub use session::SessionAnswer;
