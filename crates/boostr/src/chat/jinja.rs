//! Jinja: the language of chat templates, as jinja2 3.1 runs it in the environment of transformers.
//!
//! A template is read once ([`Template`]) and run for each conversation. A run takes steps from a [`Meter`]: one for
//! each statement, expression and item, and one for 64 bytes of text. So a run ends, and its memory is bounded, whatever
//! the template does. Values are those of Python; what has no steps to count, like a sum of two numbers, is one step.

use std::cell::Cell;
use std::sync::Arc;
use std::time::SystemTime;

use serde_json::Map;

mod conversions;
mod filters;
mod format;
mod lexer;
mod methods;
mod operators;
mod predicates;
mod run;
mod syntax;
mod text;
mod value;

/// Longest text that a template may make, in bytes.
pub(super) const MAX_TEXT: usize = 16 << 20;

/// Bytes of text that count as one step.
const BYTES: u64 = 64;

/// Longest range, as in the sandbox of jinja2.
const MAX_RANGE: usize = 100_000;

/// Deepest value that is compared or written.
const MAX_VALUE_DEPTH: usize = 100_000;

type Result<T = value::Value> = std::result::Result<T, Failure>;

/// Why a template cannot be read, or a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    /// The line that it happened in, from 1 on.
    pub(super) line: Option<u32>,
    pub(super) reason: Reason,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reason {
    /// The template's own words, by `raise_exception`.
    Raised(String),
    /// There are no more steps.
    Steps,
    /// A text of more than [`MAX_TEXT`] bytes.
    Length,
    Other(String),
}

impl Failure {
    fn new(reason: impl Into<String>) -> Self {
        Self { line: None, reason: Reason::Other(reason.into()) }
    }

    fn raised(words: &str) -> Self {
        Self { line: None, reason: Reason::Raised(words.to_owned()) }
    }

    /// The same, of this line unless it has one.
    fn at(self, line: u32) -> Self {
        Self { line: self.line.or(Some(line)), ..self }
    }
}

/// The steps that are left.
#[derive(Debug)]
pub(super) struct Meter {
    /// In parts, of which [`BYTES`] are a step.
    left: Cell<u64>,
}

impl Meter {
    pub(super) fn new(steps: u64) -> Self {
        Self { left: Cell::new(steps.saturating_mul(BYTES)) }
    }

    fn take(&self, parts: u64) -> Result<()> {
        match self.left.get().checked_sub(parts) {
            Some(left) => {
                self.left.set(left);
                Ok(())
            }
            None => {
                self.left.set(0);
                Err(Failure { line: None, reason: Reason::Steps })
            }
        }
    }

    fn spend(&self, steps: usize) -> Result<()> {
        self.take((steps as u64).saturating_mul(BYTES))
    }

    fn bytes(&self, len: usize) -> Result<()> {
        self.take(len as u64)
    }
}

/// An error for a text that is too long.
fn bounded(len: usize) -> Result<()> {
    if len <= MAX_TEXT { Ok(()) } else { Err(Failure { line: None, reason: Reason::Length }) }
}

/// A text for HTML, as markupsafe escapes it.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A template that was read.
#[derive(Debug, Clone)]
pub(super) struct Template {
    body: Arc<Vec<syntax::Statement>>,
    /// Whether it says what the assistant says, by `{% generation %}`.
    pub(super) marks_answers: bool,
}

impl Template {
    pub(super) fn new(source: &str) -> Result<Self> {
        let (body, marks_answers) = syntax::parse(source)?;
        Ok(Self { body: Arc::new(body), marks_answers })
    }

    /// The text of a run with these variables, at this moment; what the assistant says is between marks if it is asked
    /// for.
    pub(super) fn render(
        &self,
        variables: &Map<String, serde_json::Value>,
        now: SystemTime,
        with_answers: bool,
        meter: &Meter,
    ) -> Result<String> {
        run::Run::new(variables, now, with_answers, meter)?.render(&self.body)
    }
}
