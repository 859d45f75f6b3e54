//! What the terminal can show, and what the user wants to see of it.

use std::env;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use anyhow::Result;
use boostr::backend::{self, CpuClient};
use boostr::load::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;

use crate::cli::{Color, Common};

/// What a bar shows of things that are counted.
pub const COUNT: &str = "{msg} {bar:32} {pos}/{len} {eta}";
/// And of bytes.
pub const BYTES: &str = "{msg} {bar:32} {bytes}/{total_bytes} {eta}";

/// What takes longer gets a bar.
const A_WHILE: Duration = Duration::from_millis(500);

/// What the user wants of every command: the use of this process's streams and of its CPU.
#[derive(Debug)]
pub struct Term {
    /// Whether stderr is a terminal.
    pub stderr_tty: bool,
    /// Whether stdout is a terminal.
    pub stdout_tty: bool,
    pub quiet: bool,
    pub verbose: bool,
    /// What models run on.
    pub cpu: CpuClient,
    color: Color,
}

/// A style as the number of its escape sequence.
#[derive(Debug, Clone, Copy)]
pub enum Style {
    Good = 32,
    Careful = 33,
    Bad = 31,
    Dim = 2,
    Bold = 1,
}

impl Term {
    pub fn new(common: &Common) -> Self {
        Self {
            stderr_tty: io::stderr().is_terminal(),
            stdout_tty: io::stdout().is_terminal(),
            quiet: common.quiet,
            verbose: common.verbose > 0,
            cpu: common.isa.clone().unwrap_or_else(backend::cpu),
            color: chosen(common.color, |name| env::var(name).unwrap_or_default()),
        }
    }

    /// Whether timings and other remarks are wanted on stderr.
    pub fn chatty(&self) -> bool {
        !self.quiet && (self.stderr_tty || self.verbose)
    }

    /// Writes a line to stderr unless it is to be quiet. A stderr that is gone is no failure.
    pub fn say(&self, line: impl Display) {
        if !self.quiet {
            let _ = writeln!(io::stderr(), "{line}");
        }
    }

    /// Writes what is odd about a model to stderr.
    pub fn warn(&self, warnings: &[String]) {
        for warning in warnings {
            self.say(format_args!("{} {warning}", self.on_stderr(Style::Careful, "warning:")));
        }
    }

    /// Writes text to stderr, without a newline.
    #[cfg(feature = "demo")]
    pub fn say_part(&self, text: impl Display) {
        if !self.quiet {
            let mut stderr = io::stderr();
            let _ = write!(stderr, "{text}").and_then(|()| stderr.flush());
        }
    }

    /// A progress bar on stderr, hidden where that is no terminal or is to be quiet: [`COUNT`], or a template of its own.
    pub fn bar(&self, template: &str) -> ProgressBar {
        let target = if self.stderr_tty && !self.quiet {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(None, target);
        let style = ProgressStyle::with_template(template);
        style.map(|style| bar.clone().with_style(style)).unwrap_or(bar)
    }

    /// Shows how far opening a model is, once it has taken a while.
    pub fn opening(&self) -> Option<Progress> {
        if !self.stderr_tty || self.quiet {
            return None;
        }
        let (bar, start) = (self.bar(BYTES), Instant::now());
        bar.set_message("opening");
        Some(Progress::new(move |done, total| {
            if done == total {
                bar.finish_and_clear();
            } else if start.elapsed() > A_WHILE {
                bar.set_length(total as u64);
                bar.set_position(done as u64);
            }
            ControlFlow::Continue(())
        }))
    }

    pub fn error(&self, message: &str) {
        let _ = writeln!(io::stderr(), "{} {message}", self.on_stderr(Style::Bad, "error:"));
    }

    pub fn help(&self, message: &str) {
        for line in message.lines() {
            let _ = writeln!(io::stderr(), "  {} {line}", self.on_stderr(Style::Bold, "help:"));
        }
    }

    /// Text in a style, if stderr shows any.
    pub fn on_stderr(&self, style: Style, text: &str) -> String {
        styled(style, text, self.color, self.stderr_tty)
    }

    /// Whether stderr shows styles.
    pub fn colours_stderr(&self) -> bool {
        !self.on_stderr(Style::Bold, "").is_empty()
    }

    /// Text in a style, if stdout shows any.
    pub fn on_stdout(&self, style: Style, text: &str) -> String {
        styled(style, text, self.color, self.stdout_tty)
    }

    /// Writes one JSON object to stdout: on one line, or for reading at a terminal.
    pub fn print_json(&self, value: &Value) -> Result<()> {
        let text = if self.stdout_tty { format!("{value:#}") } else { value.to_string() };
        Ok(writeln!(io::stdout().lock(), "{text}")?)
    }
}

fn styled(style: Style, text: &str, color: Color, is_terminal: bool) -> String {
    if color == Color::On || color == Color::Auto && is_terminal {
        format!("\x1b[{}m{text}\x1b[0m", style as u8)
    } else {
        text.to_owned()
    }
}

/// The option wins over the variables, and `NO_COLOR` over `CLICOLOR_FORCE`.
fn chosen(option: Color, variable: impl Fn(&str) -> String) -> Color {
    if option != Color::Auto {
        option
    } else if !variable("NO_COLOR").is_empty() {
        Color::Off
    } else if !matches!(variable("CLICOLOR_FORCE").as_str(), "" | "0") {
        Color::On
    } else {
        Color::Auto
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_wins_over_variables_and_no_color_over_force() {
        let with = |set: &'static [&str]| {
            move |name: &str| if set.contains(&name) { "1".to_owned() } else { String::new() }
        };
        assert_eq!(chosen(Color::Auto, with(&[])), Color::Auto);
        assert_eq!(chosen(Color::Auto, with(&["NO_COLOR", "CLICOLOR_FORCE"])), Color::Off);
        assert_eq!(chosen(Color::Auto, with(&["CLICOLOR_FORCE"])), Color::On);
        assert_eq!(chosen(Color::On, with(&["NO_COLOR"])), Color::On);
        assert_eq!(chosen(Color::Off, with(&["CLICOLOR_FORCE"])), Color::Off);
        assert_eq!(chosen(Color::Auto, |_| "0".to_owned()), Color::Off);
    }
}
