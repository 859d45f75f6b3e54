//! How a run ends: the kinds of failure, their exit codes, and what is said about them.

use std::error::Error;
use std::fmt;
use std::io;
use std::process::ExitCode;

use crate::term::Term;

pub const FAILURE: u8 = 1;
const USAGE: u8 = 2;
const BAD_MODEL: u8 = 3;
const NO_MEMORY: u8 = 4;
const INTERRUPTED: u8 = 130;

/// The command line asks for something that cannot be.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// A wrong usage as an error.
pub fn usage(reason: impl Into<String>) -> anyhow::Error {
    Usage(reason.into()).into()
}

/// A model could not be opened, or is not what it should be.
#[derive(Debug)]
pub struct BadModel {
    /// What the library says; shown as if it stood here itself.
    pub error: boostr::Error,
    /// What to do, in lines of their own.
    pub help: Option<String>,
}

impl fmt::Display for BadModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl Error for BadModel {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}

impl From<boostr::Error> for BadModel {
    fn from(error: boostr::Error) -> Self {
        Self { error, help: None }
    }
}

/// What is asked for takes more memory than there is.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NoMemory(pub String);

/// A model that a server does not take is a bad model.
pub fn of_server(error: boostr_server::Error) -> anyhow::Error {
    match error {
        boostr_server::Error::Model(error) => BadModel::from(error).into(),
        other => other.into(),
    }
}

/// Checks have failed; all were printed.
#[derive(Debug, thiserror::Error)]
#[error("{failed} of {total} checks failed: {first}")]
pub struct ChecksFailed {
    pub failed: usize,
    pub total: usize,
    /// What the first of them found.
    pub first: String,
    /// Whether it is a model that is wrong, or this machine.
    pub bad_model: bool,
}

/// The user pressed Ctrl-C; what there was has been written.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Says what is wrong, in one message on stderr, and gives the exit code.
pub fn report(error: &anyhow::Error, term: &Term) -> ExitCode {
    if is_broken_pipe(error) {
        return ExitCode::SUCCESS;
    }
    if error.is::<Interrupted>() {
        return ExitCode::from(INTERRUPTED);
    }
    term.error(&format!("{error:#}"));
    if let Some(help) = error.downcast_ref::<BadModel>().and_then(|bad| bad.help.as_deref()) {
        term.help(help);
    }
    if is_context(error) {
        term.help("--context N allows more, --no-context-limit any number; beyond its length a model talks nonsense");
    }
    if error.is::<Usage>() {
        term.help("for more, try `boostr --help`");
    }
    ExitCode::from(code(error))
}

fn code(error: &anyhow::Error) -> u8 {
    if error.is::<Usage>() || is_context(error) {
        USAGE
    } else if error.is::<BadModel>()
        || error.downcast_ref::<ChecksFailed>().is_some_and(|failed| failed.bad_model)
    {
        BAD_MODEL
    } else if error.is::<NoMemory>() {
        NO_MEMORY
    } else {
        FAILURE
    }
}

/// Whether a sequence is too long for its model.
pub fn is_context(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<boostr::Error>());
    causes.any(|cause| matches!(cause, boostr::Error::Context { .. }))
}

/// Whoever read our output has enough of it.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}
