//! What the user types, or a pipe says, line by line.

use std::env;
use std::io::{self, BufRead, ErrorKind, IsTerminal, Lines, StdinLock, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use boostr::files::BOM;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Config, Editor};

use crate::term::is_plain;

/// Encloses a text of several lines.
const QUOTES: &str = "\"\"\"";

/// Lines that are remembered from one chat to the next.
const HISTORY: usize = 1000;

/// Where lines come from.
pub enum Input {
    /// A terminal that knows no escape sequences: lines as it edits them itself.
    Plain,
    /// A terminal, with the file of its history.
    Terminal(Box<Editor<(), FileHistory>>, PathBuf),
    /// A pipe or a file, and whether nothing of it is read yet.
    Pipe(Lines<StdinLock<'static>>, bool),
}

/// What was read.
#[derive(Debug, PartialEq, Eq)]
pub enum Entry {
    Text(String),
    /// A line that is not UTF-8.
    NotText,
    /// Ctrl-C.
    Interrupt,
    End,
}

impl Input {
    pub fn new(history: &Path) -> Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Pipe(io::stdin().lines(), true));
        }
        if is_plain(env::var_os("TERM").as_deref()) {
            return Ok(Self::Plain);
        }
        let config = Config::builder().max_history_size(HISTORY)?.build();
        let mut editor = Editor::with_config(config).context("terminal")?;
        // There is none at first.
        let _ = editor.load_history(history);
        Ok(Self::Terminal(Box::new(editor), history.to_path_buf()))
    }

    pub fn is_terminal(&self) -> bool {
        !matches!(self, Self::Pipe(..))
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
            Self::Plain => return plain_line(prompt),
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
            // At once, at the byte that is none. What was typed with it is gone.
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                Ok(Entry::NotText)
            }
            Err(ReadlineError::Interrupted) => Ok(Entry::Interrupt),
            Err(ReadlineError::Eof) => Ok(Entry::End),
            Err(error) => Err(error).context("terminal"),
        }
    }
}

/// A line of a terminal that edits lines itself.
fn plain_line(prompt: &str) -> Result<Entry> {
    let mut stdout = io::stdout().lock();
    write!(stdout, "{prompt}").and_then(|()| stdout.flush()).context("stdout")?;
    drop(stdout);
    let mut bytes = Vec::new();
    if io::stdin().lock().read_until(b'\n', &mut bytes).context("terminal")? == 0 {
        return Ok(Entry::End);
    }
    let Ok(mut line) = String::from_utf8(bytes) else { return Ok(Entry::NotText) };
    line.truncate(line.trim_end_matches(['\n', '\r']).len());
    Ok(Entry::Text(line))
}
