//! A grammar followed token by token.

use llguidance::Matcher;

use super::Grammar;
use crate::error::{Error, Result};
use crate::sample::{Constraint, TokenSet};

/// Longest reason of an error, in characters.
const MAX_REASON: usize = 500;

/// What llguidance adds to messages where it would otherwise tell the text and the grammar.
const NOT_VERBOSE: &str = "<non-verbose/>";
const BACKTRACE: &str = "<backtrace>";
/// What it says of schemas, in words of its own options.
const ONE_OF: &str = "coerce_one_of";
const KEYWORDS: &str = "Unimplemented keys: [";
/// What it says where a set is empty.
const NO_TOKEN: &str = "NoExtensionBias";

/// The place in a text that follows a grammar.
pub(super) struct Parser {
    matcher: Matcher,
    /// Number of ids that a set is about.
    limit: usize,
    /// Ids that end a text.
    eos: Vec<u32>,
    /// What errors are about.
    name: &'static str,
}

impl Parser {
    /// The start of a text. Its first set is computed, so that a grammar without any text is an error here.
    pub(super) fn new(
        mut matcher: Matcher,
        grammar: &Grammar,
        limit: usize,
        eos: Vec<u32>,
    ) -> Result<Self> {
        let name = grammar.name();
        // Of no token: finds out whether the empty text is all that there is.
        matcher.consume_tokens(&[]).map_err(|error| refusal(name, &error))?;
        let mut parser = Self { matcher, limit, eos, name };
        parser.allowed()?;
        Ok(parser)
    }
}

impl Constraint for Parser {
    fn allowed(&mut self) -> Result<TokenSet> {
        if self.is_complete() {
            let mut ends = TokenSet::new(self.limit, false);
            for &id in &self.eos {
                ends.allow(id);
            }
            return Ok(ends);
        }
        match self.matcher.compute_mask() {
            Ok(mask) => Ok(TokenSet::from_words(self.limit, mask.as_slice().to_vec())),
            Err(error) => Err(refusal(self.name, &error)),
        }
    }

    fn accept(&mut self, id: u32) -> Result<()> {
        let known = (id as usize) < self.limit;
        match if known { self.matcher.try_consume_tokens(&[id]) } else { Ok(0) } {
            Ok(1) => Ok(()),
            Ok(_) => {
                let reason = format!("token {id} cannot go on with the text");
                Err(Error::Argument { name: self.name, reason })
            }
            Err(error) => Err(refusal(self.name, &error)),
        }
    }

    fn is_complete(&self) -> bool {
        self.matcher.is_stopped() && self.matcher.stop_reason().is_ok()
    }

    fn fork(&self) -> Box<dyn Constraint> {
        let matcher = self.matcher.deep_clone();
        Box::new(Self { matcher, limit: self.limit, eos: self.eos.clone(), name: self.name })
    }
}

/// What llguidance says, without what is for its authors.
pub(super) fn refusal(name: &'static str, error: &dyn std::fmt::Display) -> Error {
    let text = error.to_string();
    let text = text.split(BACKTRACE).next().unwrap_or_default().replace(NOT_VERBOSE, "");
    // One message is one error.
    let text = text.replace("regex parse error:", "").replace("\nerror: ", "\n");
    let reason = match text.trim() {
        NO_TOKEN => "no token of the vocabulary can go on with the text".to_owned(),
        text if text.contains(ONE_OF) => "`oneOf` needs options that exclude each other".to_owned(),
        text if text.contains(KEYWORDS) => {
            let (_, names) = text.split_once(KEYWORDS).unwrap_or_default();
            let names = names.split(']').next().unwrap_or_default().replace('"', "`");
            format!("keywords that are not supported: {names}").chars().take(MAX_REASON).collect()
        }
        text => text.chars().take(MAX_REASON).collect(),
    };
    Error::Argument { name, reason }
}
