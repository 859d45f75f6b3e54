//! The one error type of the library.
//!
//! Variants are chosen by what the reader can do about them; each message names the thing, what was
//! expected and what was found.

use std::path::{Path, PathBuf};

/// Result with the library's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong in the library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a file operation.
    #[error("`{}`", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what its format says.
    #[error("`{}`: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Where in the file, what was expected, what was found.
        reason: String,
    },
    /// A file was cut short or changed since it was written.
    #[error("`{}`: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where in the file, what was expected, what was found.
        reason: String,
    },
    /// The state of a sequence is of another model.
    #[error("`{}`: {reason}", path.display())]
    StateOfAnotherModel {
        /// The state's file.
        path: PathBuf,
        /// Both models, or what differs.
        reason: String,
    },
    /// It was asked to stop.
    #[error("`{}`: operation interrupted", path.display())]
    Interrupted {
        /// The file or folder that was read or written.
        path: PathBuf,
    },
    /// A value of a model's configuration is missing or impossible.
    #[error("`{}`: field `{field}`: {reason}", path.display())]
    Config {
        /// The configuration file.
        path: PathBuf,
        /// The key.
        field: String,
        /// What was expected and what was found.
        reason: String,
    },
    /// A checkpoint's tensors are not those that its configuration asks for.
    #[error("`{}`: {reason}", path.display())]
    Tensors {
        /// The checkpoint.
        path: PathBuf,
        /// Missing, unexpected and misshapen tensors, up to five of each, with their shapes.
        reason: String,
    },
    /// A tensor has another shape than expected.
    #[error("tensor `{name}` has shape {got:?}, expected {expected:?}")]
    Shape {
        /// The tensor or argument.
        name: String,
        /// The shape that was expected.
        expected: Vec<usize>,
        /// The shape that was found.
        got: Vec<usize>,
    },
    /// A value outside of what the library can do.
    #[error("unsupported {what}")]
    Unsupported {
        /// The thing, and what is supported in its place.
        what: String,
    },
    /// An argument of a call is out of its range.
    #[error("argument `{name}`: {reason}")]
    Argument {
        /// The argument.
        name: &'static str,
        /// What was expected and what was found.
        reason: String,
    },
    /// A sequence is longer than the model's context.
    #[error("maximum context length: it is {limit} tokens, and the sequence has {tokens}")]
    Context {
        /// Tokens of the sequence.
        tokens: usize,
        /// Tokens that it may have.
        limit: usize,
    },
    /// The tokenizer could not be read, or refused a text.
    #[error("`{}`: tokenizer: {reason}", path.display())]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// What it said.
        reason: String,
    },
    /// A bug: something panicked, and the panic was caught so that others may go on.
    #[error("{what} panicked: {reason}")]
    Panic {
        /// What was being done.
        what: String,
        /// What the panic said.
        reason: String,
    },
    /// The tensor library failed, for instance to allocate.
    #[error("tensor library")]
    Backend(#[from] numr::error::Error),
}

impl Error {
    /// [`Error::Io`] for `path`.
    pub fn io(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io { path: path.as_ref().to_path_buf(), source }
    }

    /// [`Error::Format`] for `path`.
    pub fn format(path: impl AsRef<Path>, reason: impl Into<String>) -> Self {
        Self::Format { path: path.as_ref().to_path_buf(), reason: reason.into() }
    }

    /// [`Error::Damaged`] for `path`.
    pub fn damaged(path: impl AsRef<Path>, reason: impl Into<String>) -> Self {
        Self::Damaged { path: path.as_ref().to_path_buf(), reason: reason.into() }
    }
}

/// An error with all that caused it, in one line: what an [`Error::Io`] says is its file, and its cause is what the
/// system said.
///
/// ```
/// use boostr::error::{Error, chain};
///
/// let cause = std::io::Error::other("the disk is full");
/// assert_eq!(chain(&Error::io("log", cause)), "`log`: the disk is full");
/// ```
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

const _: () = {
    const fn shareable<T: Send + Sync + 'static>() {}
    shareable::<Error>();
};
