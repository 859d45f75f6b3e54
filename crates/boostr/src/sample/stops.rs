//! Stop strings in a stream of text.

use crate::error::{Error, Result};

/// Cuts a stream of text before the first stop string.
///
/// Text that could still become a stop string is held back, so no part of one is ever released. The first
/// stop string is the one that is complete first; of several that end at the same byte, the longest. The
/// result does not depend on how the text is cut into pieces, and time is linear in the text.
///
/// ```
/// use boostr::sample::StopStrings;
///
/// let mut stop = StopStrings::new(["\nUser:"])?;
/// assert_eq!(stop.push("Yes.\nUs").text, "Yes.");
/// let last = stop.push("er: and");
/// assert!(last.stopped && last.text.is_empty());
/// # Ok::<(), boostr::error::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
    /// The end of the text so far, as long as it may be the start of a stop string.
    held: String,
    stopped: bool,
}

/// What [`StopStrings::push`] releases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// Text that belongs to no stop string.
    pub text: String,
    /// Whether a stop string was found; from then on nothing is released.
    pub stopped: bool,
}

impl StopStrings {
    /// Watches for any of `stops`; without one all text passes.
    ///
    /// # Errors
    /// [`Error::Argument`] if one of them is empty.
    pub fn new<I>(stops: I) -> Result<Self>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let patterns = stops
            .into_iter()
            .enumerate()
            .map(|(index, stop)| match stop.as_ref() {
                "" => Err(Error::Argument {
                    name: "stop",
                    reason: format!("stop string {index} is empty"),
                }),
                stop => Ok(Pattern::new(stop)),
            })
            .collect::<Result<_>>()?;
        Ok(Self { patterns, held: String::new(), stopped: false })
    }

    /// Takes the next piece of text and gives what is now known to come before any stop string.
    pub fn push(&mut self, text: &str) -> Released {
        if self.stopped {
            return Released { text: String::new(), stopped: true };
        }
        let held = self.held.len();
        self.held.push_str(text);
        for (index, byte) in text.bytes().enumerate() {
            let end = held + index + 1;
            // Every pattern has to see the byte, or the longest of those that end here is missed.
            let complete = self.patterns.iter_mut().filter_map(|p| p.advance(byte)).max();
            if let Some(len) = complete {
                self.stopped = true;
                let mut text = std::mem::take(&mut self.held);
                text.truncate(end.saturating_sub(len));
                return Released { text, stopped: true };
            }
        }
        let possible = self.patterns.iter().map(|p| p.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len().saturating_sub(possible));
        Released { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// The text that was held back, now that no more follows; empty after a stop.
    pub fn finish(&mut self) -> String {
        for pattern in &mut self.patterns {
            pattern.matched = 0;
        }
        std::mem::take(&mut self.held)
    }
}

/// A stop string as a Knuth-Morris-Pratt automaton over bytes. UTF-8 synchronises itself, so a match of
/// bytes starts and ends between characters.
#[derive(Clone, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// For each prefix the length of its longest proper border: a prefix that is also its suffix.
    border: Vec<usize>,
    /// How many bytes of the pattern the text so far ends with.
    matched: usize,
}

impl Pattern {
    fn new(stop: &str) -> Self {
        let bytes = stop.as_bytes().to_vec();
        let mut pattern = Self { border: vec![0], bytes, matched: 0 };
        for &byte in stop.as_bytes().iter().skip(1) {
            pattern.step(byte);
            pattern.border.push(pattern.matched);
        }
        pattern.matched = 0;
        pattern
    }

    fn step(&mut self, byte: u8) {
        while self.matched > 0 && self.bytes.get(self.matched) != Some(&byte) {
            self.matched = self.border.get(self.matched - 1).copied().unwrap_or(0);
        }
        if self.bytes.get(self.matched) == Some(&byte) {
            self.matched += 1;
        }
    }

    /// The pattern's length once the text ends with all of it.
    fn advance(&mut self, byte: u8) -> Option<usize> {
        self.step(byte);
        (self.matched == self.bytes.len()).then_some(self.matched)
    }
}
