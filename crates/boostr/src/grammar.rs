//! Text that follows a grammar: JSON that a schema describes, a regular expression, or rules in Lark's
//! notation.
//!
//! A [`Grammar`] describes a text; a [`Vocabulary`] holds the bytes that each token of a tokenizer adds
//! to it. Together they make a [`Constraint`](crate::sample::Constraint). Before each token it gives
//! the set of allowed tokens, and [`Sampler::choose`](crate::sample::Sampler::choose) takes one of
//! them. The llguidance crate does the work.
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
//! # Syntax
//!
//! - JSON schema, draft 2020-12 and older.
//!   - Keywords: `type`, `properties`, `required`, `additionalProperties`, `patternProperties`,
//!     `items`, `prefixItems`, `minItems`, `maxItems`, `enum`, `const`, `anyOf`, `allOf`, limits of
//!     numbers and lengths, `pattern`, `format`. `oneOf` needs options that exclude each other, `$ref`
//!     stays within the schema.
//!   - A keyword that would have to be ignored is an error, which names its place. An unknown `format` is an
//!     annotation; `propertyNames` is read as `properties` or `patternProperties`.
//!   - Between tokens of the JSON one space is allowed, or one or two line ends and an indentation.
//!   - A schema may recur, as a tree's does, if some value of it ends.
//! - Regular expressions: those of the regex crate without anchors and word boundaries. The whole text
//!   has to match.
//! - GBNF, the notation of llama.cpp: rules such as `root ::= [0-9]+`.
//! - Lark: rules in lower case, terminals in upper case, `start` first. `%json {schema}` puts JSON into
//!   a rule, `<[17]>` is the token 17.
//!
//! # Limits
//!
//! Grammars come from strangers. The size and nesting of one are checked before it is read. Then each
//! step of work is counted, and too many are an error instead of a mask:
//!
//! | what | at most |
//! |---|---|
//! | a schema | [`MAX_SCHEMA`] bytes of JSON, [`MAX_VALUES`] values, [`MAX_KEYS`] in an object, nested [`MAX_DEPTH`] deep |
//! | a schema with `minProperties` or `maxProperties` | [`MAX_COUNTED`] values |
//! | a schema with `allOf`, `$ref` or `patternProperties` | [`MAX_PATTERNS`] patterns and formats |
//! | all `multipleOf` of a schema | [`MAX_REMAINDERS`] remainders |
//! | a text in Lark | [`MAX_LARK`] bytes, brackets nested [`MAX_DEPTH`] deep, [`MAX_PATTERNS`] times `&` |
//! | a regular expression | [`MAX_REGEX`] bytes |
//! | symbols of all rules | 100 000 |
//! | work to build the automaton of terminals | 1 000 000 nodes, about 20 ms |
//! | work for one mask | 200 000 nodes and 50 000 items, about 15 ms |
//! | states of the automaton, 1 to 2 kB each | 50 000 |

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::error::{Error, Result};

mod annotations;
mod constraint;
mod finite;
mod gbnf;
mod vocabulary;

pub use vocabulary::Vocabulary;

/// Longest JSON schema, in bytes of its JSON. Published ones of tools and of forms have a few kilobytes.
pub const MAX_SCHEMA: usize = 256 << 10;

/// Deepest nesting of a JSON schema, or of the brackets of a Lark grammar.
pub const MAX_DEPTH: usize = 64;

/// Most values in a JSON schema, those in others counted too; OpenAI's limit of properties is the same number.
pub const MAX_VALUES: usize = 5000;

/// Most keys of one object in a JSON schema.
pub const MAX_KEYS: usize = 500;

/// Most values in a schema with `minProperties` or `maxProperties`, whose grammar has a size of their number squared.
pub const MAX_COUNTED: usize = 100;

/// Most patterns and formats in a schema with `allOf`, `$ref` or `patternProperties`, by which all may have to match at
/// once; and most `&` in a Lark grammar.
pub const MAX_PATTERNS: usize = 16;

/// Most remainders that all `multipleOf` of a schema have; with `allOf`, `$ref` or `patternProperties` their product counts.
///
/// A number in decimal digits has as many as it has left without its factors 2 and 5: 7 of 7 and of 0.07, 27 of 86400.
pub const MAX_REMAINDERS: u64 = 10_000;

/// Longest regular expression, in bytes.
pub const MAX_REGEX: usize = 16 << 10;

/// Longest Lark grammar, in bytes.
pub const MAX_LARK: usize = 128 << 10;

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
    /// [`Error::Argument`] if it is no object, is larger than the [limits](self#limits) or recurs without end. What else it says is looked at by [`Vocabulary::constraint`].
    pub fn json_schema(schema: &Value) -> Result<Self> {
        check_schema(schema)?;
        let mut schema = schema.clone();
        annotations::simplify(&mut schema);
        Ok(Self(Kind::Json(schema)))
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
        let (depth, intersections) = shape_of_rules(&rules);
        let refuse = |reason| Err(Error::Argument { name: "grammar", reason });
        if depth > MAX_DEPTH {
            return refuse(format!(
                "expected brackets nested at most {MAX_DEPTH} deep, found more"
            ));
        }
        if intersections > MAX_PATTERNS {
            return refuse(format!("expected at most {MAX_PATTERNS} times `&`, found more"));
        }
        let mut room = Room::default();
        let mut schemas = rules.split("%json").skip(1).filter_map(|rest| {
            serde_json::Deserializer::from_str(rest).into_iter::<Value>().next()?.ok()
        });
        let fits = schemas.try_for_each(|schema| room.take(&schema, MAX_DEPTH));
        if let Err(reason) = fits.and_then(|()| room.check_products()) {
            return refuse(format!("in the schemas of `%json`: {reason}"));
        }
        Ok(Self(Kind::Lark(rules)))
    }

    /// A text by rules in either notation: GBNF, which has `::=`, or Lark's.
    ///
    /// # Errors
    ///
    /// As [`lark`](Self::lark); [`Error::Argument`] for rules that are no GBNF.
    ///
    /// ```
    /// use boostr::grammar::Grammar;
    ///
    /// assert!(Grammar::rules("root ::= [0-9]+ (\",\" [0-9]+)*").is_ok());
    /// let error = Grammar::rules("root ::= item").unwrap_err();
    /// assert_eq!(error.to_string(), "argument `grammar`: rule `root` names `item`, which is not there");
    /// ```
    pub fn rules(rules: &str) -> Result<Self> {
        if !rules.contains("::=") {
            return Self::lark(rules);
        }
        check_len("grammar", rules, MAX_LARK)?;
        let lark = gbnf::to_lark(rules);
        Self::lark(lark.map_err(|reason| Error::Argument { name: "grammar", reason })?)
    }

    /// One of a few texts.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if there is none, or if they are longer together than [`MAX_REGEX`].
    pub fn choice<T: AsRef<str>>(texts: &[T]) -> Result<Self> {
        if texts.is_empty() {
            let reason = "expected at least one text, found none".to_owned();
            return Err(Error::Argument { name: "choice", reason });
        }
        let escaped = |text: &T| {
            let mut out = String::new();
            for c in text.as_ref().chars() {
                if c.is_alphanumeric() || c == ' ' {
                    out.push(c);
                } else {
                    let _ = write!(out, "\\x{{{:x}}}", u32::from(c));
                }
            }
            out
        };
        let texts: Vec<String> = texts.iter().map(escaped).collect();
        Self::regex(format!("(?:{})", texts.join("|")))
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
    annotations::simplify(&mut schema);
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
    let mut room = Room::default();
    if let Err(reason) = room.take(schema, MAX_DEPTH).and_then(|()| room.check_products()) {
        return refuse(reason);
    }
    if !finite::is_finite(schema) {
        return refuse("it refers to itself in a way that no value ends".to_owned());
    }
    Ok(())
}

fn check_len(name: &'static str, text: &str, most: usize) -> Result<()> {
    if text.is_empty() || text.len() > most {
        let reason = format!("expected 1 to {most} bytes, found {}", text.len());
        return Err(Error::Argument { name, reason });
    }
    Ok(())
}

/// What a schema may still have, and what it has.
struct Room {
    /// Bytes, about those of its JSON.
    bytes: usize,
    values: usize,
    /// Regular expressions, those of formats too.
    patterns: usize,
    /// Whether a value may have to match several of them.
    has_intersections: bool,
    /// Whether it says how many properties an object has.
    counts_properties: bool,
    /// The sum and the product of the remainders of each `multipleOf`.
    remainders: (u64, u64),
}

impl Default for Room {
    fn default() -> Self {
        Self {
            bytes: MAX_SCHEMA,
            values: MAX_VALUES,
            patterns: 0,
            has_intersections: false,
            counts_properties: false,
            remainders: (0, 1),
        }
    }
}

impl Room {
    /// Checks the numbers that work grows with faster than in proportion.
    fn check_products(&self) -> Result<(), String> {
        if self.counts_properties && MAX_VALUES.saturating_sub(self.values) > MAX_COUNTED {
            return Err(format!(
                "expected at most {MAX_COUNTED} values with minProperties or maxProperties, found more"
            ));
        }
        if self.has_intersections && self.patterns > MAX_PATTERNS {
            return Err(format!(
                "expected at most {MAX_PATTERNS} patterns and formats with allOf, $ref or \
                 patternProperties, found {}",
                self.patterns
            ));
        }
        let (sum, product) = self.remainders;
        let remainders = if self.has_intersections { product } else { sum };
        if remainders > MAX_REMAINDERS {
            return Err(format!(
                "expected numbers in multipleOf that have at most {MAX_REMAINDERS} remainders together, found {remainders}"
            ));
        }
        Ok(())
    }

    /// Notes the keywords of an object, or the properties of these names.
    fn note(&mut self, fields: &Map<String, Value>) {
        for (key, value) in fields {
            match key.as_str() {
                "minProperties" | "maxProperties" => self.counts_properties = true,
                "allOf" | "$ref" => self.has_intersections = true,
                "pattern" | "format" => self.patterns += 1,
                "multipleOf" => {
                    let (sum, product) = self.remainders;
                    let own = remainders(value);
                    self.remainders = (sum.saturating_add(own), product.saturating_mul(own));
                }
                "patternProperties" => {
                    self.has_intersections = true;
                    self.patterns += value.as_object().map_or(0, Map::len);
                }
                _ => {}
            }
        }
    }

    /// Takes the room of a value that may be nested so deep.
    fn take(&mut self, value: &Value, depth: usize) -> Result<(), String> {
        let more = |most, what| format!("expected at most {most} {what}, found more");
        let depth = depth.checked_sub(1).ok_or_else(|| more(MAX_DEPTH, "levels of nesting"))?;
        self.values = self.values.checked_sub(1).ok_or_else(|| more(MAX_VALUES, "values"))?;
        let bytes = match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => 4,
            Value::String(text) => text.len() + 2,
            Value::Array(values) => values.len() + 2,
            Value::Object(fields) if fields.len() > MAX_KEYS => {
                return Err(more(MAX_KEYS, "keys of one object"));
            }
            Value::Object(fields) => {
                self.note(fields);
                fields.keys().fold(2, |sum, key| sum + key.len() + 4)
            }
        };
        self.bytes = self.bytes.checked_sub(bytes).ok_or_else(|| more(MAX_SCHEMA, "bytes"))?;
        match value {
            Value::Array(values) => values.iter().try_for_each(|value| self.take(value, depth)),
            Value::Object(fields) => fields.values().try_for_each(|value| self.take(value, depth)),
            _ => Ok(()),
        }
    }
}

/// How many remainders a decimal number has by another: what is left of its digits without the factors 2 and 5, which
/// the last few digits tell.
fn remainders(value: &Value) -> u64 {
    let Value::Number(number) = value else { return 1 };
    let number = number.to_string();
    let digits = number.split(['e', 'E']).next().unwrap_or_default();
    let digits: String = digits.chars().filter(char::is_ascii_digit).collect();
    // Of more digits than fit there are too many; 0 is refused for itself.
    let mut left: u64 = digits.parse().unwrap_or(u64::MAX);
    for factor in [2, 5] {
        while left > 0 && left.is_multiple_of(factor) {
            left /= factor;
        }
    }
    left.max(1)
}

/// How deep round, square and curly brackets are nested, and the number of `&`, outside of texts, regular expressions and
/// comments.
fn shape_of_rules(rules: &str) -> (usize, usize) {
    let (mut depth, mut deepest, mut intersections) = (0_usize, 0, 0);
    let mut bytes = rules.bytes().peekable();
    while let Some(byte) = bytes.next() {
        match byte {
            b'#' => while bytes.next_if(|&b| b != b'\n').is_some() {},
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
            b'&' => intersections += 1,
            _ => {}
        }
    }
    (deepest, intersections)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_in_texts_and_comments_do_not_nest() {
        assert_eq!(shape_of_rules("start: (\"(&([[\" /((&/ [a] {b}) & C"), (2, 1));
        assert_eq!(shape_of_rules("// (((((\nstart: \"\\\"((\" (a)\n\"(("), (1, 0));
        assert_eq!(shape_of_rules(")))((a # (((&"), (2, 0));
        assert_eq!(shape_of_rules(&"(".repeat(1000)), (1000, 0));
    }

    #[test]
    fn remainders_are_those_of_the_digits_without_2_and_5() {
        for (number, expected) in [
            ("1", 1),
            ("7", 7),
            ("0.07", 7),
            ("86400", 27),
            ("1e-9", 1),
            ("1e300", 1),
            ("0", 1),
            ("1000003", 1_000_003),
        ] {
            assert_eq!(remainders(&serde_json::from_str(number).unwrap()), expected, "{number}");
        }
    }

    #[test]
    fn the_room_of_a_schema_is_about_its_json() {
        let schema = json!({"a": [1, true, null, "text"], "bc": {"d": []}});
        let room =
            |bytes, values, depth| Room { bytes, values, ..Room::default() }.take(&schema, depth);
        let len = schema.to_string().len();
        assert_eq!(room(len + 12, 8, 3), Ok(()));
        assert!(room(len - 12, 8, 3).unwrap_err().contains("bytes"));
        assert!(room(1000, 7, 3).unwrap_err().contains("5000 values"));
        assert!(room(1000, 8, 2).unwrap_err().contains("64 levels"));
    }
}
