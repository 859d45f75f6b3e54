//! Text that follows a grammar: JSON that a schema describes, a regular expression, or rules in Lark's notation.
//!
//! A [`Grammar`] says what a text may be, a [`Vocabulary`] what bytes each token of a tokenizer adds to it. Together
//! they make a [`Constraint`](crate::sample::Constraint): before each token the set of those that keep the text within
//! the grammar, which [`Sampler::choose`](crate::sample::Sampler::choose) takes. The work is done by the llguidance crate.
//!
//! ```no_run
//! use boostr::grammar::{Grammar, Vocabulary};
//! use boostr::sample::{Sampler, SamplerConfig};
//! use boostr::tokenizer::Tokenizer;
//! use serde_json::json;
//!
//! let tokenizer = Tokenizer::from_file("model/tokenizer.json")?;
//! let vocabulary = Vocabulary::new(&tokenizer, &[2], tokenizer.vocab_size())?;
//! let schema = json!({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]});
//! let mut constraint = vocabulary.constraint(&Grammar::json_schema(&schema)?)?;
//! let mut sampler = Sampler::new(SamplerConfig::default(), tokenizer.vocab_size())?;
//! # fn model() -> Vec<f32> { Vec::new() }
//! while !constraint.is_complete() {
//!     let allowed = constraint.allowed()?;
//!     let id = sampler.choose(&model(), &[], 0, Some(&allowed), None)?.id;
//!     constraint.accept(id)?;
//! }
//! # Ok::<(), boostr::Error>(())
//! ```
//!
//! # What is understood
//!
//! - JSON schema, draft 2020-12 and older: types, `properties`, `required`, `additionalProperties`, `patternProperties`,
//!   `items`, `prefixItems`, `minItems`, `maxItems`, `enum`, `const`, `anyOf`, `allOf`, `oneOf` whose options exclude each
//!   other, limits of numbers and lengths, `pattern`, `format`, and `$ref` within the schema. A keyword that would have to
//!   be ignored is an error. Between tokens of the JSON one space, or one or two line ends and an indentation, are allowed.
//!   A schema may recur, as that of a tree does, so long as some value ends.
//! - Regular expressions: those of the regex crate without anchors and word boundaries; the whole text has to match.
//! - Lark: rules in lower case, terminals in upper case, `start` first; `%json {schema}` puts JSON into a rule,
//!   `<[17]>` is the token 17, whatever it is.
//!
//! # Limits
//!
//! Grammars come from strangers. Before one is read its size and nesting are checked; then each step of work is
//! counted, and what takes too many is an error in the place of a mask:
//!
//! | what | at most |
//! |---|---|
//! | a schema, written as JSON | [`MAX_SCHEMA`] bytes, nested [`MAX_DEPTH`] deep |
//! | a text in Lark | [`MAX_LARK`] bytes, brackets nested [`MAX_DEPTH`] deep |
//! | a regular expression | [`MAX_REGEX`] bytes |
//! | symbols of all rules | 100 000 |
//! | work to build the automaton of terminals | 1 000 000 nodes, about 20 ms |
//! | work for one mask | 200 000 nodes and 50 000 items, about 15 ms |
//! | states of the automaton, 1 to 2 kB each | 50 000 |

use serde_json::{Value, json};

use crate::error::{Error, Result};

mod constraint;
mod finite;
mod vocabulary;

pub use vocabulary::Vocabulary;

/// Longest JSON schema, in bytes of its JSON. Published ones of tools and of forms have a few kilobytes.
pub const MAX_SCHEMA: usize = 256 << 10;

/// Deepest nesting of a JSON schema, or of the brackets of a Lark grammar.
pub const MAX_DEPTH: usize = 64;

/// Longest regular expression, in bytes.
pub const MAX_REGEX: usize = 16 << 10;

/// Longest Lark grammar, in bytes.
pub const MAX_LARK: usize = 256 << 10;

/// What errors call a schema.
const SCHEMA: &str = "json_schema";

/// What a text may be.
#[derive(Clone, Debug, PartialEq)]
pub struct Grammar(Kind);

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Json(Value),
    Regex(String),
    Lark(String),
}

impl Grammar {
    /// JSON that a schema describes.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if it is no object, is longer than [`MAX_SCHEMA`], is nested deeper than [`MAX_DEPTH`] or recurs
    /// without end. What else it says is looked at by [`Vocabulary::constraint`].
    pub fn json_schema(schema: &Value) -> Result<Self> {
        check_schema(schema)?;
        Ok(Self(Kind::Json(schema.clone())))
    }

    /// Any JSON object.
    #[must_use]
    pub fn json_object() -> Self {
        Self(Kind::Json(json!({"type": "object"})))
    }

    /// A text that the whole of a regular expression matches.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if it is longer than [`MAX_REGEX`]. Its syntax is looked at by [`Vocabulary::constraint`].
    pub fn regex(regex: impl Into<String>) -> Result<Self> {
        let regex = regex.into();
        check_len("regex", &regex, MAX_REGEX)?;
        Ok(Self(Kind::Regex(regex)))
    }

    /// A text by rules in Lark's notation.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if it is longer than [`MAX_LARK`] or its brackets are nested deeper than [`MAX_DEPTH`]. Its
    /// syntax is looked at by [`Vocabulary::constraint`].
    pub fn lark(rules: impl Into<String>) -> Result<Self> {
        let rules = rules.into();
        check_len("grammar", &rules, MAX_LARK)?;
        if depth_of_brackets(&rules) > MAX_DEPTH {
            let reason = format!("expected brackets nested at most {MAX_DEPTH} deep, found more");
            return Err(Error::Argument { name: "grammar", reason });
        }
        Ok(Self(Kind::Lark(rules)))
    }

    /// The argument's name for messages.
    fn name(&self) -> &'static str {
        match self.0 {
            Kind::Json(_) => SCHEMA,
            Kind::Regex(_) => "regex",
            Kind::Lark(_) => "grammar",
        }
    }
}

/// A schema as what a rule in Lark can be: `rule: %json {..}`.
pub(crate) fn json_rule(schema: &Value) -> Result<String> {
    check_schema(schema)?;
    let mut schema = schema.clone();
    vocabulary::json_options().apply_to(&mut schema);
    Ok(format!("%json {schema}"))
}

fn check_schema(schema: &Value) -> Result<()> {
    let refuse = |reason| Err(Error::Argument { name: SCHEMA, reason });
    if !schema.is_object() {
        let what = match schema {
            Value::Null => "null",
            Value::Bool(_) => "a boolean",
            Value::Number(_) => "a number",
            Value::String(_) => "a text",
            Value::Array(_) | Value::Object(_) => "a list",
        };
        return refuse(format!("expected an object, found {what}"));
    }
    match size(schema, MAX_DEPTH, MAX_SCHEMA) {
        Some(bytes) if bytes > MAX_SCHEMA => {
            refuse(format!("expected at most {MAX_SCHEMA} bytes, found more"))
        }
        None => refuse(format!("expected nesting of at most {MAX_DEPTH}, found more")),
        Some(_) if !finite::is_finite(schema) => {
            refuse("it refers to itself in a way that no value ends".to_owned())
        }
        Some(_) => Ok(()),
    }
}

fn check_len(name: &'static str, text: &str, most: usize) -> Result<()> {
    if text.is_empty() || text.len() > most {
        let reason = format!("expected 1 to {most} bytes, found {}", text.len());
        return Err(Error::Argument { name, reason });
    }
    Ok(())
}

/// About the bytes of a value's JSON, counted until they are more than `most`; `None` if it is nested deeper than `depth`.
fn size(value: &Value, depth: usize, most: usize) -> Option<usize> {
    let depth = depth.checked_sub(1)?;
    let inner = |sum: usize, value: &Value| match sum {
        sum if sum > most => Some(sum),
        sum => Some(sum + 1 + size(value, depth, most - sum)?),
    };
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => Some(4),
        Value::String(text) => Some(text.len() + 2),
        Value::Array(values) => values.iter().try_fold(2, inner),
        Value::Object(fields) => {
            fields.iter().try_fold(2, |sum, (key, value)| inner(sum + key.len() + 3, value))
        }
    }
}

/// How deep round, square and curly brackets are nested, outside of texts, regular expressions and comments.
fn depth_of_brackets(rules: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let mut bytes = rules.bytes().peekable();
    while let Some(byte) = bytes.next() {
        match byte {
            b'/' if bytes.peek() == Some(&b'/') => {
                while bytes.next_if(|&b| b != b'\n').is_some() {}
            }
            quote @ (b'"' | b'/') => {
                while let Some(inner) = bytes.next_if(|&b| b != quote && b != b'\n') {
                    if inner == b'\\' {
                        bytes.next();
                    }
                }
                bytes.next_if_eq(&quote);
            }
            b'(' | b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_in_texts_and_comments_do_not_nest() {
        assert_eq!(depth_of_brackets("start: (\"((([[\" /(((/ [a] {b})"), 2);
        assert_eq!(depth_of_brackets("// (((((\nstart: \"\\\"((\" (a)\n\"(("), 1);
        assert_eq!(depth_of_brackets(")))((a"), 2);
        assert_eq!(depth_of_brackets(&"(".repeat(1000)), 1000);
    }

    #[test]
    fn a_size_is_about_that_of_the_json() {
        let schema = json!({"a": [1, true, null, "text"], "bc": {"d": []}});
        let found = size(&schema, 10, 1000).unwrap();
        assert!(found.abs_diff(schema.to_string().len()) < 12, "{found}");
        assert_eq!(size(&schema, 2, 1000), None);
        assert!(size(&json!(vec!["x"; 1000]), 10, 100).unwrap() > 100);
    }
}
