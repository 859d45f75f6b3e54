//! What the user types, or a pipe says, line by line.

use std::io::{self, IsTerminal, Lines, StdinLock};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use boostr::files::BOM;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Config, Editor};

/// Encloses a text of several lines.
const QUOTES: &str = "\"\"\"";

/// Lines that are remembered from one chat to the next.
const HISTORY: usize = 1000;

/// Where lines come from.
pub enum Input {
    /// A terminal, with the file of its history.
    Terminal(Box<Editor<(), FileHistory>>, PathBuf),
    /// A pipe or a file, and whether nothing of it is read yet.
    Pipe(Lines<StdinLock<'static>>, bool),
}

/// What was read.
#[derive(Debug, PartialEq, Eq)]
pub enum Entry {
    Text(String),
    /// Ctrl-C.
    Interrupt,
    End,
}

impl Input {
    pub fn new(history: &Path) -> Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Pipe(io::stdin().lines(), true));
        }
        let config = Config::builder().max_history_size(HISTORY)?.build();
        let mut editor = Editor::with_config(config).context("terminal")?;
        // There is none at first.
        let _ = editor.load_history(history);
        Ok(Self::Terminal(Box::new(editor), history.to_path_buf()))
    }

    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(..))
    }

    /// The next line, or all lines between two `"""`.
    pub fn read(&mut self, prompt: &str) -> Result<Entry> {
        let first = match self.line(prompt)? {
            Entry::Text(first) => first,
            other => return Ok(other),
        };
        let Some(rest) = first.trim_start().strip_prefix(QUOTES) else {
            return Ok(Entry::Text(first));
        };
        let mut text = rest.to_owned();
        // The first three quotes are not those at the end.
        while !text.trim_end().ends_with(QUOTES) {
            match self.line("... ")? {
                Entry::Text(line) => text = text + "\n" + &line,
                other => return Ok(other),
            }
        }
        let text = text.trim_end().trim_end_matches(QUOTES);
        Ok(Entry::Text(text.strip_prefix('\n').unwrap_or(text).trim_end_matches('\n').to_owned()))
    }

    fn line(&mut self, prompt: &str) -> Result<Entry> {
        let (editor, history) = match self {
            Self::Terminal(editor, history) => (editor, history),
            Self::Pipe(lines, is_start) => {
                let is_first = std::mem::take(is_start);
                let line = lines.next().transpose().context("stdin")?;
                let line = line.map(|line| match line.strip_prefix(BOM) {
                    Some(rest) if is_first => rest.to_owned(),
                    _ => line,
                });
                return Ok(line.map_or(Entry::End, Entry::Text));
            }
        };
        match editor.readline(prompt) {
            Ok(line) => {
                // A history that cannot be kept is no reason to stop.
                if editor.add_history_entry(line.as_str()).is_ok_and(|is_new| is_new) {
                    let _ = editor.append_history(history);
                }
                Ok(Entry::Text(line))
            }
            Err(ReadlineError::Interrupted) => Ok(Entry::Interrupt),
            Err(ReadlineError::Eof) => Ok(Entry::End),
            Err(error) => Err(error).context("terminal"),
        }
    }
}
