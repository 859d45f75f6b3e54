//! A list of checks and how each went: what `doctor` and `verify` print.

use std::io::{self, Write};

use anyhow::Result;
use boostr::error::chain;
use serde_json::{Value, json};

use crate::exit::ChecksFailed;
use crate::term::{Style, Term, shown};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Ok,
    Warn,
    Fail,
}

#[derive(Debug)]
pub struct Check {
    pub status: Status,
    /// What was looked at.
    pub name: String,
    /// What was found.
    pub detail: String,
}

#[derive(Debug, Default)]
pub struct Checks(Vec<Check>);

impl Checks {
    pub fn ok(&mut self, name: impl Into<String>, detail: impl Into<String>) {
        self.push(Status::Ok, name, detail);
    }

    pub fn warn(&mut self, name: impl Into<String>, detail: impl Into<String>) {
        self.push(Status::Warn, name, detail);
    }

    pub fn fail(&mut self, name: impl Into<String>, detail: impl Into<String>) {
        self.push(Status::Fail, name, detail);
    }

    pub fn push(&mut self, status: Status, name: impl Into<String>, detail: impl Into<String>) {
        self.0.push(Check { status, name: name.into(), detail: detail.into() });
    }

    /// Takes a result's description, or its error as a failure; gives the value.
    pub fn record<T, E: std::error::Error>(
        &mut self,
        name: impl Into<String>,
        result: Result<T, E>,
        describe: impl FnOnce(&T) -> String,
    ) -> Option<T> {
        match result {
            Ok(value) => {
                self.ok(name, describe(&value));
                Some(value)
            }
            Err(error) => {
                self.fail(name, chain(&error));
                None
            }
        }
    }

    /// Takes all of another list, under a name.
    pub fn append(&mut self, name: &str, other: Self) {
        let named = |check: Check| Check { name: format!("{name}: {}", check.name), ..check };
        self.0.extend(other.0.into_iter().map(named));
    }

    /// Whether none has failed.
    pub fn passed(&self) -> bool {
        self.0.iter().all(|check| check.status != Status::Fail)
    }

    /// Prints all, as lines or as one JSON object with the fields of `more`.
    pub fn print(&self, is_json: bool, more: Value, term: &Term) -> Result<()> {
        if is_json {
            let checks: Vec<Value> = self.0.iter().map(Check::json).collect();
            let mut object = json!({ "ok": self.passed(), "checks": checks });
            if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
                object.extend(more);
            }
            return term.print_json(&object);
        }
        let width = self.0.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
        let mut stdout = io::stdout().lock();
        for Check { status, name, detail } in &self.0 {
            let word = term.on_stdout(status.style(), &format!("{:4}", status.word()));
            writeln!(stdout, "{word}  {:width$}  {}", shown(name), shown(detail))?;
        }
        Ok(())
    }

    /// An error if one has failed.
    pub fn conclude(&self, bad_model: bool) -> Result<()> {
        let failed: Vec<&Check> =
            self.0.iter().filter(|check| check.status == Status::Fail).collect();
        let Some(first) = failed.first() else { return Ok(()) };
        Err(ChecksFailed {
            failed: failed.len(),
            total: self.0.len(),
            first: format!("{}: {}", first.name, first.detail),
            bad_model,
        }
        .into())
    }
}

impl Check {
    fn json(&self) -> Value {
        json!({ "name": self.name, "status": self.status.word(), "detail": self.detail })
    }
}

impl Status {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }

    fn style(self) -> Style {
        match self {
            Self::Ok => Style::Good,
            Self::Warn => Style::Careful,
            Self::Fail => Style::Bad,
        }
    }
}
