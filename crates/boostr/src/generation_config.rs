//! What a model's folder says about generation: `generation_config.json` and `tokenizer_config.json`.
//!
//! Both are data of strangers: unknown fields are ignored, known ones are checked for type and range. An
//! absent field and `null` mean the same.

use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::Value;

use crate::checkpoint::ConfigFile;
use crate::error::Result;
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
}

impl GenerationDefaults {
    /// Reads the text of `generation_config.json`; `path` only serves messages.
    ///
    /// # Errors
    /// [`Error`](crate::Error) naming file, field, what was expected and what was found.
    pub fn from_json(path: impl AsRef<Path>, json: &str) -> Result<Self> {
        let file = ConfigFile::parse(path, json)?;
        Ok(Self {
            bos_token_id: file.get(&["bos_token_id"], "a token id below 2^24", token_id)?,
            eos_token_id: file.get(
                &["eos_token_id"],
                "a token id below 2^24 or a list of them",
                |value| match value {
                    Value::Array(ids) if !ids.is_empty() => ids.iter().map(token_id).collect(),
                    Value::Array(_) => None,
                    id => Some(vec![token_id(id)?]),
                },
            )?,
            do_sample: file.get(&["do_sample"], "true or false", Value::as_bool)?,
            temperature: number(&file, "temperature", "a number >= 0", |x| x >= 0.0)?,
            top_k: file
                .get(&["top_k"], "an integer from 0 to 2^24", |v| integer(v, 0..=1 << 24))?,
            top_p: number(&file, "top_p", "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?,
            min_p: number(&file, "min_p", "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?,
            repetition_penalty: number(&file, "repetition_penalty", "a number > 0", |x| x > 0.0)?,
            max_new_tokens: file.get(&["max_new_tokens"], "an integer from 1 to 2^31", |v| {
                integer(v, 1..=1 << 31)
            })?,
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
    /// [`Error`](crate::Error) naming file, field, what was expected and what was found.
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

fn token_id(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok().filter(|&id| id <= MAX_TOKEN_ID)
}

fn integer(value: &Value, range: RangeInclusive<u64>) -> Option<usize> {
    value.as_u64().filter(|number| range.contains(number))?.try_into().ok()
}
