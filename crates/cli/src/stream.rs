//! What is shown of a generation while it goes on.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use boostr::backend::Cpu;
use boostr::engine::{Event, Finish, Listener};
use boostr::sample::StopStrings;
use boostr::tokenizer::TextStream;
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

/// Decodes and shows a generation.
pub struct Stream {
    show: Show,
    decoder: Option<TextStream>,
    stops: StopStrings,
    stopped: bool,
    /// The text so far, up to a stop string.
    text: String,
    count: usize,
    bar: Option<ProgressBar>,
    /// An error, kept until the engine has returned.
    failed: Option<anyhow::Error>,
}

impl Stream {
    /// For a prompt of `prompt` tokens; without a decoder there are only ids.
    pub fn new(
        show: Show,
        decoder: Option<TextStream>,
        stops: StopStrings,
        prompt: usize,
        term: &Term,
    ) -> Self {
        let wants_bar = prompt > LONG_PROMPT && term.stderr_tty && !term.quiet;
        let bar = wants_bar.then(|| {
            let bar = term.bar("{bar:32} {pos}/{len} tokens of the prompt, {eta} left");
            bar.set_length(prompt as u64);
            bar
        });
        let (text, failed) = (String::new(), None);
        Self { show, decoder, stops, stopped: false, text, count: 0, bar, failed }
    }

    /// Shows what was held back, and ends the line. The text, if there is a decoder.
    pub fn finish(mut self) -> Result<(Option<String>, bool)> {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        if let Some(decoder) = &mut self.decoder {
            let last = self.stops.push(&decoder.finish()?);
            self.stopped |= last.stopped;
            let text = last.text + &self.stops.finish();
            self.release(&text);
        }
        let line_is_open = match self.show {
            Show::Text => !self.text.ends_with('\n'),
            Show::Ids => true,
            Show::Nothing => false,
        };
        if line_is_open {
            self.write("\n");
        }
        match self.failed {
            Some(error) => Err(error),
            None => Ok((self.decoder.is_some().then_some(self.text), self.stopped)),
        }
    }

    fn prompt(&mut self, done: usize, total: usize) {
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
            if done == total {
                bar.finish_and_clear();
            }
        }
    }

    fn token(&mut self, id: u32) -> boostr::Result<()> {
        if self.show == Show::Ids {
            let space = if self.count > 0 { " " } else { "" };
            self.write(&format!("{space}{id}"));
        }
        self.count += 1;
        if let Some(decoder) = &mut self.decoder
            && let Some(text) = decoder.push(id)?
        {
            let released = self.stops.push(&text);
            self.stopped |= released.stopped;
            self.release(&released.text);
        }
        Ok(())
    }

    fn release(&mut self, text: &str) {
        self.text.push_str(text);
        if self.show == Show::Text {
            self.write(text);
        }
    }

    fn write(&mut self, text: &str) {
        if text.is_empty() || self.failed.is_some() {
            return;
        }
        let mut stdout = io::stdout().lock();
        let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
        self.failed = written.context("stdout").err();
    }
}

impl Listener<Cpu> for Stream {
    fn event(&mut self, event: Event<Cpu>) -> ControlFlow<()> {
        match event {
            Event::Prompt { cached, done, total } => self.prompt(done - cached, total - cached),
            Event::Token { id, .. } => {
                if let Err(error) = self.token(id) {
                    self.failed.get_or_insert(error.into());
                }
            }
            Event::Finished { .. } | Event::Failed { .. } => {}
        }
        let ends = self.stopped || self.failed.is_some() || is_interrupted();
        if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// Why generation ended, in one word.
pub fn reason(finish: Finish, stopped: bool) -> &'static str {
    if stopped && finish != Finish::Eos { Finish::StopString.name() } else { finish.name() }
}
