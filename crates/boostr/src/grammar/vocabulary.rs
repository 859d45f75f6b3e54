//! What the tokens of a tokenizer add to a text.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use serde_json::Value;
use toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

use super::constraint::{Parser, refusal};
use super::{Grammar, Kind, annotations};
use crate::error::{Error, Result};
use crate::sample::Constraint;
use crate::tokenizer::Tokenizer;

/// Between the tokens of JSON: nothing, this, or nothing else. A model that likes white space cannot go on with it forever.
const WHITE_SPACE: &str = r" |\n\n?[ \t]{0,40}";

/// Longest token that can be a part of a text, in bytes; toktrie has no room for longer ones.
const MAX_TOKEN: usize = 1000;

/// Most bytes of all tokens; toktrie has room for 2^22 nodes.
const MAX_BYTES: usize = 4_000_000;

/// For how long parts of a schema are tried alone to find the one at fault.
const SEARCH: Duration = Duration::from_millis(300);

/// Stack for the making of a parser, in bytes, of which only what is used is ever taken from the system.
const STACK: usize = 256 << 20;

/// Puts a token's bytes apart from those of all texts.
const SPECIAL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// The bytes of all tokens of a tokenizer, as a tree: made once for a model, and shared by all its constraints.
///
/// Tokens that are special, and those that end a text, are no text: a grammar never allows one for the characters that
/// its name is spelled with. Other added tokens are.
///
/// Making it takes about 0.15 s for 50 000 tokens.
pub struct Vocabulary {
    factory: ParserFactory,
    limit: usize,
    eos: Vec<u32>,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { limit, eos, .. } = self;
        f.debug_struct("Vocabulary").field("limit", limit).field("eos", eos).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// The vocabulary of a tokenizer, of which `eos` end a text, and ids from `vocab_limit` up are never chosen.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the bytes of a token depend on its neighbours, as they do with the decoders of BERT's kind,
    /// or if the tokens have too many bytes.
    pub fn new(tokenizer: &Tokenizer, eos: &[u32], vocab_limit: usize) -> Result<Self> {
        let limit = vocab_limit.min(tokenizer.max_id() as usize + 1);
        let eos: Vec<u32> = eos.iter().copied().filter(|&id| (id as usize) < limit).collect();
        let mut words = vec![Vec::new(); limit];
        for (id, word) in (0..).zip(&mut words) {
            let Some(bytes) = tokenizer.bytes(id)? else { continue };
            if bytes.len() > MAX_TOKEN {
                continue;
            }
            if eos.contains(&id) || tokenizer.is_special(id) {
                word.push(SPECIAL);
            }
            word.extend(bytes);
        }
        let bytes: usize = words.iter().map(Vec::len).sum();
        if bytes > MAX_BYTES {
            let what = format!(
                "vocabulary of {bytes} bytes in a grammar, at most {MAX_BYTES} are supported"
            );
            return Err(Error::Unsupported { what });
        }
        let made = catch_unwind(AssertUnwindSafe(|| {
            let end = eos.first().copied().unwrap_or(toktrie::INVALID_TOKEN);
            let mut trie = TokTrie::from(&TokRxInfo::new(limit as u32, end), &words);
            if !eos.is_empty() {
                trie = trie.with_eos_tokens(&eos);
            }
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = llguidance::earley::SlicedBiasComputer::general_slices();
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
        }));
        let unsupported = |reason: String| Error::Unsupported {
            what: format!("vocabulary of this tokenizer in a grammar: {reason}"),
        };
        let mut factory = match made {
            Ok(made) => made.map_err(|error| unsupported(error.to_string()))?,
            Err(_) => return Err(unsupported("toktrie cannot hold it".to_owned())),
        };
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { factory, limit, eos })
    }

    /// A text by a grammar, at its start.
    ///
    /// It takes milliseconds, and for large or hostile grammars up to a few hundred of them.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] with the name `json_schema`, `regex` or `grammar`: if it is written wrong, uses what is not
    /// supported, allows no text at all, or takes more work than the [limits](super#limits).
    pub fn constraint(&self, grammar: &Grammar) -> Result<Box<dyn Constraint>> {
        let made = self.make(grammar);
        match (&grammar.0, made) {
            (Kind::Json(schema), Err(Error::Argument { name, reason })) => {
                let until = Instant::now() + SEARCH;
                let (place, reason) = self.fault(schema, schema, reason, until);
                let reason =
                    if place.is_empty() { reason } else { format!("at `{place}`: {reason}") };
                Err(Error::Argument { name, reason })
            }
            (_, made) => made,
        }
    }

    /// The innermost part of a schema that is refused for itself, as its place, and why.
    fn fault(
        &self,
        root: &Value,
        schema: &Value,
        reason: String,
        until: Instant,
    ) -> (String, String) {
        for (place, part) in annotations::parts(schema) {
            // llguidance takes no other alone.
            if !part.is_object() {
                continue;
            }
            let mut alone = part.clone();
            for key in ["$defs", "definitions"] {
                if let (Some(fields), Some(shared)) = (alone.as_object_mut(), root.get(key)) {
                    fields.entry(key).or_insert_with(|| shared.clone());
                }
            }
            if Instant::now() > until {
                break;
            }
            if let Err(Error::Argument { reason, .. }) = self.make(&Grammar(Kind::Json(alone))) {
                let (inner, reason) = self.fault(root, part, reason, until);
                let place = if inner.is_empty() { place } else { format!("{place}.{inner}") };
                return (place, reason);
            }
        }
        (String::new(), reason)
    }

    fn make(&self, grammar: &Grammar) -> Result<Box<dyn Constraint>> {
        let top = match &grammar.0 {
            Kind::Json(schema) => {
                let mut schema = schema.clone();
                json_options().apply_to(&mut schema);
                TopLevelGrammar::from_json_schema(schema)
            }
            Kind::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Kind::Lark(rules) => TopLevelGrammar::from_lark(rules.clone()),
        };
        let make = || {
            let parser =
                self.factory.create_parser(top).map_err(|e| refusal(grammar.name(), &e))?;
            Parser::new(Matcher::new(Ok(parser)), grammar, self.limit, self.eos.clone())
        };
        // llguidance recurses once for each field of an object and for each rule that stands in another.
        let made = thread::scope(|scope| {
            let maker = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, make);
            maker.map(|maker| maker.join().unwrap_or_else(|panic| resume_unwind(panic)))
        });
        Ok(Box::new(made.map_err(|error| Error::io("a thread for the grammar", error))??))
    }
}

/// Those of the module's documentation; and errors tell nothing of a text.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 50_000,
        max_grammar_size: 100_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// How all JSON is written.
pub(super) fn json_options() -> JsonCompileOptions {
    JsonCompileOptions {
        whitespace_pattern: Some(WHITE_SPACE.to_owned()),
        ..JsonCompileOptions::default()
    }
}

const _: () = {
    const fn shareable<T: Send + Sync + 'static>() {}
    shareable::<Vocabulary>();
};
