//! What the terminal can show, and what the user wants to see of it.

use std::borrow::Cow;
use std::env;
use std::ffi::OsStr;
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
    /// Whether escape sequences mean nothing there.
    is_plain: bool,
}

/// Whether a terminal of that name knows no escape sequences.
pub fn is_plain(term: Option<&OsStr>) -> bool {
    match term.and_then(OsStr::to_str) {
        Some("dumb" | "emacs" | "cons25") => true,
        Some(name) => name.is_empty(),
        // Where there are names at all, none is that of a terminal that knows nothing.
        None => cfg!(unix),
    }
}

/// Text as it is shown at a terminal, or in a log: of characters that would move the cursor, change the terminal or
/// turn the direction of the text, only line ends and tabs stay. The others are spelled, as `\u{1b}`.
///
/// Whatever comes from a file, a model or a client goes through this.
pub fn shown(text: &str) -> Cow<'_, str> {
    if !text.contains(is_spelled) {
        return Cow::Borrowed(text);
    }
    let spell = |c: char| if is_spelled(c) { c.escape_unicode().collect() } else { c.to_string() };
    Cow::Owned(text.chars().map(spell).collect())
}

/// The same where it is to stay on its line.
pub fn shown_in_line(text: &str) -> String {
    shown(text).replace('\n', "\\n").replace('\t', "\\t")
}

fn is_spelled(c: char) -> bool {
    let turns = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() && c != '\n' && c != '\t' || turns
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
            cpu: common
                .isa
                .clone()
                .unwrap_or_else(backend::cpu)
                .with_activations(common.activations.into()),
            color: chosen(common.color, |name| env::var(name).unwrap_or_default()),
            is_plain: is_plain(env::var_os("TERM").as_deref()),
        }
    }

    /// Whether timings and other remarks are wanted on stderr.
    pub fn chatty(&self) -> bool {
        !self.quiet && (self.stderr_tty || self.verbose)
    }

    /// Writes a line to stderr unless it is to be quiet. A stderr that is gone is no failure.
    pub fn say(&self, line: impl Display) {
        if !self.quiet {
            let _ = writeln!(io::stderr(), "{}", shown(&line.to_string()));
        }
    }

    /// The same in a style, if stderr shows any.
    pub fn say_in(&self, style: Style, line: &str) {
        if !self.quiet {
            let _ = writeln!(io::stderr(), "{}", self.on_stderr(style, line));
        }
    }

    /// The same after `warning:`.
    pub fn warn(&self, line: impl Display) {
        if !self.quiet {
            let word = self.on_stderr(Style::Careful, "warning:");
            let _ = writeln!(io::stderr(), "{word} {}", shown(&line.to_string()));
        }
    }

    /// The same for each of what is odd about a model.
    pub fn warn_all(&self, warnings: &[String]) {
        for warning in warnings {
            self.warn(warning);
        }
    }

    /// Writes text to stderr, without a newline.
    #[cfg(feature = "demo")]
    pub fn say_part_in(&self, style: Style, text: &str) {
        if !self.quiet {
            let mut stderr = io::stderr();
            let text = self.on_stderr(style, text);
            let _ = write!(stderr, "{text}").and_then(|()| stderr.flush());
        }
    }

    /// A progress bar on stderr, hidden where that is no terminal or is to be quiet: [`COUNT`], or a template of its own.
    pub fn bar(&self, template: &str) -> ProgressBar {
        let target = if self.has_bars() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(None, target);
        let style = ProgressStyle::with_template(template);
        style.map(|style| bar.clone().with_style(style)).unwrap_or(bar)
    }

    /// Whether bars are shown that move: they take escape sequences.
    pub fn has_bars(&self) -> bool {
        self.stderr_tty && !self.quiet && !self.is_plain
    }

    /// Shows how far opening a model is, once it has taken a while.
    pub fn opening(&self) -> Option<Progress> {
        if !self.has_bars() {
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
        let word = self.on_stderr(Style::Bad, "error:");
        let _ = writeln!(io::stderr(), "{word} {}", shown(message));
    }

    pub fn help(&self, message: &str) {
        for line in message.lines() {
            let word = self.on_stderr(Style::Bold, "help:");
            let _ = writeln!(io::stderr(), "  {word} {}", shown(line));
        }
    }

    /// Text in a style, if stderr shows any.
    pub fn on_stderr(&self, style: Style, text: &str) -> String {
        styled(style, text, self.color, self.stderr_tty && !self.is_plain)
    }

    /// Whether stderr shows styles.
    pub fn colours_stderr(&self) -> bool {
        !self.on_stderr(Style::Bold, "").is_empty()
    }

    /// Text in a style, if stdout shows any.
    pub fn on_stdout(&self, style: Style, text: &str) -> String {
        styled(style, text, self.color, self.stdout_tty && !self.is_plain)
    }

    /// Text of a model for stdout: as it is, but at a terminal as it is [`shown`].
    pub fn text<'a>(&self, text: &'a str) -> Cow<'a, str> {
        if self.stdout_tty { shown(text) } else { Cow::Borrowed(text) }
    }

    /// Writes one JSON object to stdout: on one line, or for reading at a terminal.
    pub fn print_json(&self, value: &Value) -> Result<()> {
        if !self.stdout_tty {
            return Ok(writeln!(io::stdout().lock(), "{value}")?);
        }
        // Outside of strings there is none that is spelled.
        let mut text = String::new();
        for c in format!("{value:#}").chars() {
            if is_spelled(c) {
                text.push_str(&format!("\\u{:04x}", c as u32));
            } else {
                text.push(c);
            }
        }
        Ok(writeln!(io::stdout().lock(), "{text}")?)
    }
}

fn styled(style: Style, text: &str, color: Color, is_terminal: bool) -> String {
    let text = shown(text);
    if color == Color::On || color == Color::Auto && is_terminal {
        format!("\x1b[{}m{text}\x1b[0m", style as u8)
    } else {
        text.into_owned()
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
    fn only_line_ends_and_tabs_stay_of_what_moves_a_terminal() {
        assert_eq!(shown("naïve\tline\nמילה 終"), "naïve\tline\nמילה 終");
        let hostile = "\u{1b}[31m\u{7}\r\u{9b}2J\u{202e}\u{7f}\0";
        let spelled = "\\u{1b}[31m\\u{7}\\u{d}\\u{9b}2J\\u{202e}\\u{7f}\\u{0}";
        assert_eq!(shown(hostile), spelled);
        // In a style too, and the style is still one.
        assert_eq!(styled(Style::Bold, "\u{1b}", Color::On, false), "\u{1b}[1m\\u{1b}\u{1b}[0m");
    }

    #[test]
    fn p_dumb_terminal_escapes_no_style_where_the_terminal_has_no_name_or_is_dumb() {
        for (name, expected) in
            [("dumb", true), ("", true), ("xterm-256color", false), ("vt100", false)]
        {
            assert_eq!(is_plain(Some(OsStr::new(name))), expected, "{name}");
        }
        assert_eq!(is_plain(None), cfg!(unix));
    }

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
