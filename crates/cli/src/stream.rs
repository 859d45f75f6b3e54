//! What is shown of a generation while it goes on.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use boostr::backend::Cpu;
use boostr::engine::Event;
use boostr::text::TextEvent;
use indicatif::ProgressBar;

use crate::term::Term;

/// Prompts of more tokens get a progress bar.
const LONG_PROMPT: usize = 2000;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Lets the first Ctrl-C end the generation, and the second one the process.
pub fn catch_interrupt() {
    // Without a handler Ctrl-C still ends the process, only less cleanly.
    let _ = ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
}

/// Lets the next Ctrl-C be the first one again.
pub fn forget_interrupt() {
    INTERRUPTED.store(false, Ordering::Relaxed);
}

pub fn is_interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// What goes to stdout as it comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Show {
    Text,
    Ids,
    Nothing,
}

/// Shows a generation.
pub struct Stream<'a> {
    show: Show,
    term: &'a Term,
    /// Whether there is something on the last line.
    line_is_open: bool,
    count: usize,
    bar: Option<ProgressBar>,
    failed: Option<io::Error>,
}

impl<'a> Stream<'a> {
    pub fn new(show: Show, term: &'a Term) -> Self {
        let line_is_open = show != Show::Nothing;
        Self { show, term, line_is_open, count: 0, bar: None, failed: None }
    }

    /// Shows an event; nothing more is wanted after an interrupt, or when stdout is gone.
    pub fn take(&mut self, event: &TextEvent<Cpu>) -> ControlFlow<()> {
        match event.event {
            Event::Prompt { cached, done, total } => self.prompt(done - cached, total - cached),
            Event::Token { id, .. } if self.show == Show::Ids => {
                let space = if self.count > 0 { " " } else { "" };
                self.write(&format!("{space}{id}"));
                self.count += 1;
            }
            _ => {}
        }
        let text = &event.delta.text;
        if self.show == Show::Text && !text.is_empty() {
            self.line_is_open = !text.ends_with('\n');
            self.write(text);
        }
        let ends = self.failed.is_some() || is_interrupted();
        if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Ends the line.
    pub fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        if self.line_is_open {
            self.write("\n");
        }
    }

    /// What stdout refused.
    pub fn check(self) -> Result<()> {
        self.failed.map_or(Ok(()), |error| Err(error).context("stdout"))
    }

    /// Whether stdout has refused something.
    pub fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    fn prompt(&mut self, done: usize, total: usize) {
        if total > LONG_PROMPT && self.term.stderr_tty && !self.term.quiet {
            let template = "{bar:32} {pos}/{len} tokens of the prompt, {eta} left";
            let bar = self.bar.get_or_insert_with(|| self.term.bar(template));
            bar.set_length(total as u64);
            bar.set_position(done as u64);
            if done == total {
                bar.finish_and_clear();
            }
        }
    }

    fn write(&mut self, text: &str) {
        if self.failed.is_none() {
            let mut stdout = io::stdout().lock();
            self.failed = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).err();
        }
    }
}
