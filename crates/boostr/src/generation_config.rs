//! What a model's folder says about generation: `generation_config.json` and `tokenizer_config.json`.
//!
//! Both are data of strangers: unknown fields are ignored, known ones are checked for type and range. An
//! absent field and `null` mean the same. So do values that other programs take for it: an id of -1, an empty list
//! of ids, `top_k` -1. What would change an answer in transformers and does not here is named.

use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::Value;

use crate::checkpoint::ConfigFile;
use crate::error::{Error, Result};
use crate::sample::Suppression;
use crate::tokenizer::MAX_TOKEN_ID;

/// Defaults that a model's author set in `generation_config.json`.
///
/// ```
/// use boostr::generation_config::GenerationDefaults;
///
/// let json = r#"{"eos_token_id": [2, 11], "top_p": 0.95}"#;
/// let defaults = GenerationDefaults::from_json("generation_config.json", json)?;
/// assert_eq!(defaults.eos_token_id, Some(vec![2, 11]));
/// assert_eq!(defaults.temperature, None);
/// # Ok::<(), boostr::error::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// The token that starts a text.
    pub bos_token_id: Option<u32>,
    /// Generation ends at any of these; the file has a number or a list.
    pub eos_token_id: Option<Vec<u32>>,
    /// Whether to sample; otherwise greedy.
    pub do_sample: Option<bool>,
    /// Finite, not negative.
    pub temperature: Option<f32>,
    /// 0 keeps all tokens.
    pub top_k: Option<usize>,
    /// In [0, 1]; 0 keeps the likeliest token alone.
    pub top_p: Option<f32>,
    /// In [0, 1].
    pub min_p: Option<f32>,
    /// Finite and above 0.
    pub repetition_penalty: Option<f32>,
    /// Upper bound of generated tokens, at least 1.
    pub max_new_tokens: Option<usize>,
    /// Tokens that answers do not have: `suppress_tokens`, `begin_suppress_tokens`, `bad_words_ids`. As in transformers,
    /// an end of `eos_token_id` is no bad word.
    pub suppression: Suppression,
    /// Fields of the file that transformers' `generate` acts on and this program does not.
    pub not_acted_on: Vec<String>,
}

impl GenerationDefaults {
    /// Reads the text of `generation_config.json`; `path` only serves messages.
    ///
    /// # Errors
    /// [`Error`] naming file, field, what was expected and what was found.
    pub fn from_json(path: impl AsRef<Path>, json: &str) -> Result<Self> {
        let file = ConfigFile::parse(path, json)?;
        let list = |field| -> Result<Option<Vec<u32>>> {
            let found = file.get(&[field], "a token id below 2^24 or a list of them", list_of_ids);
            Ok(found?.filter(|ids| !ids.is_empty()))
        };
        let eos_token_id = list("eos_token_id")?;
        Ok(Self {
            bos_token_id: file
                .get(&["bos_token_id"], "a token id below 2^24", ids)?
                .and_then(|ids| ids.first().copied()),
            suppression: suppression(
                &file,
                list("suppress_tokens")?.unwrap_or_default(),
                list("begin_suppress_tokens")?.unwrap_or_default(),
                eos_token_id.as_deref().unwrap_or_default(),
            )?,
            eos_token_id,
            do_sample: file.get(&["do_sample"], "true or false", Value::as_bool)?,
            temperature: number(&file, "temperature", "a number >= 0", |x| x >= 0.0)?,
            top_k: file.get(&["top_k"], "an integer from 0 to 2^24, or -1", |v| {
                if is_minus_1(v) { Some(0) } else { integer(v, 0..=1 << 24) }
            })?,
            top_p: number(&file, "top_p", "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?,
            min_p: number(&file, "min_p", "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?,
            repetition_penalty: number(&file, "repetition_penalty", "a number > 0", |x| x > 0.0)?,
            max_new_tokens: file
                .get(&["max_new_tokens"], "an integer from 1 to 2^31, or -1", |v| {
                    if is_minus_1(v) { Some(None) } else { integer(v, 1..=1 << 31).map(Some) }
                })?
                .flatten(),
            not_acted_on: not_acted_on(&file),
        })
    }
}

/// What `tokenizer_config.json` says about the tokens with a meaning.
///
/// ```
/// use boostr::generation_config::SpecialTokens;
///
/// let json = r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": true}"#;
/// let special = SpecialTokens::from_json("tokenizer_config.json", json)?;
/// assert_eq!(special.bos_token.as_deref(), Some("<s>"));
/// assert_eq!(special.add_bos_token, Some(true));
/// # Ok::<(), boostr::error::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// The token that starts a text.
    pub bos_token: Option<String>,
    /// The token that ends a text.
    pub eos_token: Option<String>,
    /// The token that fills a batch.
    pub pad_token: Option<String>,
    /// The token for what the vocabulary cannot spell.
    pub unk_token: Option<String>,
    /// Whether a prompt starts with `bos_token`; `None` leaves it to `tokenizer.json`.
    pub add_bos_token: Option<bool>,
    /// Whether a prompt ends with `eos_token`; `None` leaves it to `tokenizer.json`.
    pub add_eos_token: Option<bool>,
}

impl SpecialTokens {
    /// Reads the text of `tokenizer_config.json`; `path` only serves messages.
    ///
    /// # Errors
    /// [`Error`] naming file, field, what was expected and what was found.
    pub fn from_json(path: impl AsRef<Path>, json: &str) -> Result<Self> {
        let file = ConfigFile::parse(path, json)?;
        let token = |field| {
            file.get(&[field], "a string or an object with a string `content`", |value| {
                match value {
                    Value::Object(object) => object.get("content")?.as_str(),
                    value => value.as_str(),
                }
                .map(str::to_owned)
            })
        };
        Ok(Self {
            bos_token: token("bos_token")?,
            eos_token: token("eos_token")?,
            pad_token: token("pad_token")?,
            unk_token: token("unk_token")?,
            add_bos_token: file.get(&["add_bos_token"], "true or false", Value::as_bool)?,
            add_eos_token: file.get(&["add_eos_token"], "true or false", Value::as_bool)?,
        })
    }
}

fn number(
    file: &ConfigFile,
    field: &str,
    expected: &str,
    in_range: impl Fn(f32) -> bool,
) -> Result<Option<f32>> {
    file.get(&[field], expected, |value| {
        // Checked as the f32 that is used: 1e-60 would pass as an f64 and then be 0.
        let number = value.as_f64()? as f32;
        (number.is_finite() && in_range(number)).then_some(number)
    })
}

/// What other programs write for "none".
fn is_minus_1(value: &Value) -> bool {
    value.as_i64() == Some(-1)
}

/// A token id, and none for -1.
fn ids(value: &Value) -> Option<Vec<u32>> {
    if is_minus_1(value) { Some(Vec::new()) } else { token_id(value).map(|id| vec![id]) }
}

/// Ids, of which -1 is none.
fn list_of_ids(value: &Value) -> Option<Vec<u32>> {
    match value {
        Value::Array(list) => Some(list.iter().map(ids).collect::<Option<Vec<_>>>()?.concat()),
        id => ids(id),
    }
}

/// The tokens that are kept out always and first, with `bad_words_ids`.
fn suppression(
    file: &ConfigFile,
    always: Vec<u32>,
    first: Vec<u32>,
    eos: &[u32],
) -> Result<Suppression> {
    const FIELD: &str = "bad_words_ids";
    let expected = "a list of lists of token ids below 2^24, none of them empty";
    let sequences = file.get(&[FIELD], expected, |value| {
        let words = value.as_array()?.iter().map(|word| {
            let ids = word.as_array()?.iter().map(token_id).collect::<Option<Vec<u32>>>()?;
            (!ids.is_empty()).then_some(ids)
        });
        words.collect::<Option<Vec<_>>>()
    })?;
    let mut sequences = sequences.unwrap_or_default();
    sequences.retain(|word| !matches!(word.as_slice(), [id] if eos.contains(id)));
    Suppression::new(always, first, sequences).map_err(|error| match error {
        Error::Argument { reason, .. } => file.error(FIELD, reason),
        other => other,
    })
}

/// Fields that transformers acts on, each with the number that turns it off where there is one.
const OTHERS: [(&str, Option<f64>); 21] = [
    ("constraints", None),
    ("diversity_penalty", Some(0.0)),
    ("encoder_no_repeat_ngram_size", Some(0.0)),
    ("encoder_repetition_penalty", Some(1.0)),
    ("epsilon_cutoff", Some(0.0)),
    ("eta_cutoff", Some(0.0)),
    ("exponential_decay_length_penalty", None),
    ("force_words_ids", None),
    ("forced_bos_token_id", None),
    ("forced_decoder_ids", None),
    ("forced_eos_token_id", None),
    ("guidance_scale", Some(1.0)),
    ("min_length", Some(0.0)),
    ("min_new_tokens", Some(0.0)),
    ("no_repeat_ngram_size", Some(0.0)),
    ("num_beams", Some(1.0)),
    ("penalty_alpha", Some(0.0)),
    ("sequence_bias", None),
    ("stop_strings", None),
    ("typical_p", Some(1.0)),
    ("watermarking_config", None),
];

fn not_acted_on(file: &ConfigFile) -> Vec<String> {
    let is_on = |&(field, off): &(&str, Option<f64>)| {
        let read = |value: &Value| match value {
            Value::Array(list) => Some(!list.is_empty()),
            Value::Object(object) => Some(!object.is_empty()),
            Value::Bool(truth) => Some(*truth),
            value => Some(off.is_none() || value.as_f64() != off),
        };
        file.get(&[field], "anything", read).ok().flatten() == Some(true)
    };
    OTHERS.iter().filter(|field| is_on(field)).map(|(field, _)| (*field).to_owned()).collect()
}

fn token_id(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok().filter(|&id| id <= MAX_TOKEN_ID)
}

fn integer(value: &Value, range: RangeInclusive<u64>) -> Option<usize> {
    value.as_u64().filter(|number| range.contains(number))?.try_into().ok()
}
