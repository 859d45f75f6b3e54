//! What is shown of a generation while it goes on.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
#[cfg(unix)]
use std::{
    future::poll_fn,
    sync::{Mutex, PoisonError, mpsc},
    task::Poll,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use boostr::backend::Cpu;
use boostr::engine::Event;
use boostr::text::TextEvent;
use indicatif::ProgressBar;
#[cfg(unix)]
use rustix::{
    process::getpgrp,
    termios::{self, LocalModes, OptionalActions, Termios},
};
use tokio::runtime::Builder;
#[cfg(unix)]
use tokio::signal::unix::{SignalKind, signal};

#[cfg(unix)]
use crate::system;
use crate::term::Term;

/// Prompts of more tokens get a progress bar.
const LONG_PROMPT: usize = 2000;

/// Signals that come within this time are one: `timeout` sends its own to the process, and then to the group of processes.
#[cfg(unix)]
const ONE_SIGNAL: Duration = Duration::from_millis(100);

/// When the process was first asked to end. A terminal that is closed sends HUP, more than once: that ends the work, but
/// asks for nothing, so a signal after it is the first.
#[cfg(unix)]
#[derive(Default)]
pub struct Asked {
    first: Option<Instant>,
}

#[cfg(unix)]
impl Asked {
    /// Notes a signal; whether it asks again.
    pub fn again(&mut self, is_hangup: bool, now: Instant) -> bool {
        !is_hangup && now - *self.first.get_or_insert(now) > ONE_SIGNAL
    }
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// How the terminal was before an answer, while there is one.
#[cfg(unix)]
static TERMINAL: Mutex<Option<Termios>> = Mutex::new(None);

/// Lets the first Ctrl-C end the generation, and the second one the process.
pub fn catch_interrupt() {
    #[cfg(unix)]
    watch(&[SignalKind::interrupt()]);
    #[cfg(not(unix))]
    watch();
}

/// The same, where TERM and HUP end the work as the first Ctrl-C does: what there is gets saved. A second TERM ends the
/// process as a second Ctrl-C does. A terminal that is closed sends HUP more than once, so these never do.
pub fn catch_signals() {
    #[cfg(unix)]
    {
        let mut kinds = vec![SignalKind::interrupt(), SignalKind::terminate()];
        // Who was started to outlive its terminal (`nohup`) does.
        if !system::ignores_hangup() {
            kinds.push(SignalKind::hangup());
        }
        watch(&kinds);
    }
    #[cfg(not(unix))]
    watch();
}

/// Notes signals on a thread of its own. Where there can be none they end the process, only less cleanly.
#[cfg(unix)]
fn watch(kinds: &[SignalKind]) {
    let kinds = kinds.to_vec();
    let (ready, is_ready) = mpsc::channel();
    let spawned = thread::Builder::new().name("signals".into()).spawn(move || -> io::Result<()> {
        Builder::new_current_thread().enable_all().build()?.block_on(note(&kinds, &ready))
    });
    if spawned.is_ok() {
        // An error is that the thread ended, and nothing is caught.
        let _ = is_ready.recv();
    }
}

/// Notes signals as long as the process lives.
#[cfg(unix)]
async fn note(kinds: &[SignalKind], ready: &mpsc::Sender<()>) -> io::Result<()> {
    let signals = kinds.iter().map(|&kind| Ok((kind, signal(kind)?)));
    let mut signals = signals.collect::<io::Result<Vec<_>>>()?;
    let _ = ready.send(());
    let mut asked = Asked::default();
    loop {
        let next = poll_fn(|context| {
            let caught = signals
                .iter_mut()
                .find_map(|(kind, signal)| signal.poll_recv(context).is_ready().then_some(*kind));
            caught.map_or(Poll::Pending, Poll::Ready)
        });
        let kind = next.await;
        if !INTERRUPTED.swap(true, Ordering::Relaxed) {
            asked = Asked::default();
        }
        if asked.again(kind == SignalKind::hangup(), Instant::now()) {
            drop(QuietKeys);
            std::process::exit(130);
        }
    }
}

/// The same, where there is Ctrl-C alone.
#[cfg(not(unix))]
fn watch() {
    let _ = thread::Builder::new().name("signals".into()).spawn(|| -> io::Result<()> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            loop {
                tokio::signal::ctrl_c().await?;
                if INTERRUPTED.swap(true, Ordering::Relaxed) {
                    std::process::exit(130);
                }
            }
        })
    });
}

/// Lets the next Ctrl-C be the first one again.
pub fn forget_interrupt() {
    INTERRUPTED.store(false, Ordering::Relaxed);
}

pub fn is_interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Keeps the terminal from writing `^C` into an answer, as long as this is.
#[cfg(unix)]
struct QuietKeys;

#[cfg(unix)]
impl QuietKeys {
    fn new() -> Option<Self> {
        let stdin = io::stdin();
        // Who is in the background is stopped for changing a terminal.
        let front = termios::tcgetpgrp(&stdin).ok()?;
        let old = termios::tcgetattr(&stdin).ok().filter(|_| front == getpgrp())?;
        let mut new = old.clone();
        new.local_modes.remove(LocalModes::ECHOCTL);
        termios::tcsetattr(&stdin, OptionalActions::Now, &new).ok()?;
        *TERMINAL.lock().unwrap_or_else(PoisonError::into_inner) = Some(old);
        Some(Self)
    }
}

#[cfg(unix)]
impl Drop for QuietKeys {
    fn drop(&mut self) {
        let old = TERMINAL.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(old) = old {
            // A terminal that is gone needs nothing.
            let _ = termios::tcsetattr(io::stdin(), OptionalActions::Now, &old);
        }
    }
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
    #[cfg(unix)]
    _keys: Option<QuietKeys>,
}

impl<'a> Stream<'a> {
    pub fn new(show: Show, term: &'a Term) -> Self {
        let line_is_open = show != Show::Nothing;
        Self {
            show,
            term,
            line_is_open,
            count: 0,
            bar: None,
            failed: None,
            #[cfg(unix)]
            _keys: if term.stdout_tty { QuietKeys::new() } else { None },
        }
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
        if total > LONG_PROMPT && self.term.has_bars() {
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
            let text = self.term.text(text);
            let mut stdout = io::stdout().lock();
            self.failed = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).err();
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_hangup_is_not_the_first_of_two_signals() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        // Closed terminal, then TERM: the work ends in its own time. A second TERM ends the process.
        let mut asked = Asked::default();
        assert!(!asked.again(true, at(0)) && !asked.again(true, at(500)));
        assert!(!asked.again(false, at(1000)) && !asked.again(false, at(1050)));
        assert!(!asked.again(true, at(3000)) && asked.again(false, at(3001)));
    }
}
