//! Tokens that the files beside a `tokenizer.json` name. As transformers does, they are added to those of that file.
//!
//! | file | field | names |
//! |---|---|---|
//! | `tokenizer_config.json` | `added_tokens_decoder` | tokens by id, with their flags |
//! | `added_tokens.json` | all | ids by token |
//! | `tokenizer_config.json`, `special_tokens_map.json` | `eos_token` and what else ends in `_token` | a special token |
//! | the same | `additional_special_tokens`, `extra_special_tokens`, `model_specific_special_tokens` | special tokens |
//!
//! - A token of the vocabulary keeps its id. A new one gets the next free id, if the model has a row for it.
//! - What cannot be added stays text, and a warning names it.
//! - A word of the vocabulary that looks like text (`!` as `pad_token`) stays a word.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Map, Value};
use tokenizers::tokenizer::{AddedToken, Model};

use super::{Inner, MAX_TOKEN_ID, Tokenizer, fail, file, guard};
use crate::checkpoint::ConfigFile;
use crate::error::Result;

/// Characters of a token that a warning shows, and tokens that are named.
const MAX_SHOWN: usize = 60;
const MAX_WARNINGS: usize = 5;

/// Fields with a token of their own, in the order in which transformers adds them.
const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Fields with several special tokens: a list, or an object whose values they are.
const LISTS: [&str; 3] =
    ["additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"];

/// The files beside a `tokenizer.json` that name tokens, where they are there.
#[derive(Debug, Clone, Default)]
pub struct Beside {
    /// `tokenizer_config.json`
    pub tokenizer_config: Option<ConfigFile>,
    /// `added_tokens.json`
    pub added_tokens: Option<ConfigFile>,
    /// `special_tokens_map.json`
    pub special_tokens_map: Option<ConfigFile>,
}

/// A token as a file names it.
struct Named {
    token: AddedToken,
    id: Option<u64>,
    /// The file and the field.
    place: String,
}

impl Beside {
    /// All tokens: those with an id by their ids, then those of roles, then the lists.
    fn tokens(&self) -> Result<Vec<Named>> {
        let mut all = Vec::new();
        if let Some(file) = &self.tokenizer_config {
            let expected = "an object of tokens by their ids";
            let tokens = file.get(&["added_tokens_decoder"], expected, Value::as_object)?;
            for (id, value) in tokens.into_iter().flatten() {
                let field = format!("added_tokens_decoder.{id}");
                let token = token_of(value, false);
                let (Ok(id), Some(token)) = (id.parse(), token) else {
                    let reason = "expected an id and an object with a string `content`";
                    return Err(file.error(&field, reason));
                };
                all.push(Named { token, id: Some(id), place: place(file, &field) });
            }
        }
        if let Some(file) = &self.added_tokens {
            for (name, id) in file.iter() {
                let Some(id) = id.as_u64() else {
                    return Err(file.error(name, format!("expected a token id, found {id}")));
                };
                let named = AddedToken::from(name, false);
                all.push(Named { token: named, id: Some(id), place: place(file, "its tokens") });
            }
        }
        all.sort_by_key(|named| named.id);
        let files = || self.tokenizer_config.iter().chain(&self.special_tokens_map);
        for file in files() {
            let is_other = |name: &str| name.ends_with("_token") && !ROLES.contains(&name);
            let others = file.iter().map(|(name, _)| name).filter(|name| is_other(name));
            for field in ROLES.into_iter().chain(others) {
                let token = file.iter().find(|(name, _)| *name == field);
                let token = token.and_then(|(_, value)| token_of(value, true));
                all.extend(token.map(|token| Named { token, id: None, place: place(file, field) }));
            }
        }
        for file in files() {
            for field in LISTS {
                let expected = "a list of tokens, or an object of them";
                let tokens = file.get(&[field], expected, |value| match value {
                    Value::Array(items) => items.iter().map(|item| token_of(item, true)).collect(),
                    Value::Object(fields) => {
                        Some(fields.values().filter_map(|item| token_of(item, true)).collect())
                    }
                    _ => None,
                });
                let tokens: Vec<AddedToken> = tokens?.unwrap_or_default();
                let named = |token| Named { token, id: None, place: place(file, field) };
                all.extend(tokens.into_iter().map(named));
            }
        }
        all.retain(|named| !named.token.content.is_empty());
        Ok(all)
    }
}

impl Tokenizer {
    /// The tokenizer with the tokens that the files beside it name. `rows` are those of the model's embedding,
    /// where they are known: a token without a row is not added. [`warnings`](Self::warnings) names what is not.
    ///
    /// # Errors
    /// [`Error::Config`](crate::error::Error::Config) for fields of another form;
    /// [`Error::Tokenizer`](crate::error::Error::Tokenizer) for tokens that are too long.
    ///
    /// ```no_run
    /// use boostr::checkpoint::ConfigFile;
    /// use boostr::tokenizer::{Beside, Tokenizer};
    ///
    /// let json = r#"{"additional_special_tokens": ["<|im_end|>"]}"#;
    /// let map = ConfigFile::parse("special_tokens_map.json", json)?;
    /// let files = Beside { special_tokens_map: Some(map), ..Beside::default() };
    /// let tokenizer = Tokenizer::from_file("tokenizer.json")?.beside(&files, Some(50_288))?;
    /// assert_eq!(tokenizer.encode_control("<|im_end|>", false)?.len(), 1);
    /// # Ok::<(), boostr::error::Error>(())
    /// ```
    pub fn beside(self, files: &Beside, rows: Option<usize>) -> Result<Self> {
        let mut new = Additions::of(&self.inner, rows.unwrap_or(usize::MAX));
        for named in files.tokens()? {
            new.add(named);
        }
        let Additions { tokens, mut warnings, .. } = new;
        let more = warnings.len().saturating_sub(MAX_WARNINGS);
        if more > 0 {
            warnings.truncate(MAX_WARNINGS);
            warnings.push(format!("and {more} more tokens like these"));
        }
        if tokens.is_empty() && warnings.is_empty() {
            return Ok(self);
        }
        let inner = Arc::unwrap_or_clone(self.inner);
        if tokens.is_empty() {
            warnings.splice(..0, inner.warnings);
            return Ok(Self { inner: Arc::new(Inner { warnings, ..inner }) });
        }
        let Inner { path, mut hf, unk_id, growth, warnings: earlier, .. } = inner;
        guard(&path.clone(), "adding tokens", || {
            file::check_added(hf.get_normalizer(), &tokens)
                .or_else(|reason| fail(&path, reason))?;
            hf.add_tokens(&tokens);
            let size = file::check_vocabulary(&path, &hf)?;
            warnings.splice(..0, earlier);
            let inner = Inner {
                warnings,
                is_extended: true,
                ..Inner::new(&path, hf, size, unk_id, growth)?
            };
            Ok(Self { inner: Arc::new(inner) })
        })
    }
}

/// What is added to a tokenizer.
struct Additions<'a> {
    inner: &'a Inner,
    rows: u64,
    /// The id that the next new token gets.
    next: u64,
    tokens: Vec<AddedToken>,
    /// Of each of them its place in the list, and its id.
    known: HashMap<String, (usize, u64)>,
    warnings: Vec<String>,
}

impl<'a> Additions<'a> {
    fn of(inner: &'a Inner, rows: usize) -> Self {
        let count = inner.hf.get_model().get_vocab_size() as u64;
        let added = inner.hf.get_added_vocabulary().get_added_tokens_decoder();
        // As the tokenizers crate counts.
        let after = added.keys().max().map_or(0, |&id| u64::from(id) + 1);
        let next = if after > count { after } else { count };
        let (tokens, known, warnings) = (Vec::new(), HashMap::new(), Vec::new());
        Self { inner, rows: rows as u64, next, tokens, known, warnings }
    }

    fn add(&mut self, named: Named) {
        let Named { token, id, place } = named;
        let shown: String = token.content.chars().take(MAX_SHOWN).collect();
        let shown = shown.escape_debug();
        let hf = &self.inner.hf;
        if let Some(&(at, given)) = self.known.get(&token.content) {
            if let Some(id) = id.filter(|&id| id != given) {
                let reason =
                    format!("token `{shown}` has id {id} here, but another file gives it {given}");
                self.warnings.push(format!("{place}: {reason}, which counts"));
            }
            if let Some(earlier) = self.tokens.get_mut(at) {
                earlier.special |= token.special;
            }
            return;
        }
        if let Some(given) = hf.token_to_id(&token.content) {
            if let Some(id) = id.filter(|&id| id != u64::from(given)) {
                let reason =
                    format!("token `{shown}` has id {id} here, but the tokenizer gives it {given}");
                self.warnings.push(format!("{place}: {reason}, which counts"));
            }
            let added = hf.get_added_vocabulary().get_added_tokens_decoder();
            let token = match added.get(&given) {
                Some(added) if added.special || !token.special => return,
                Some(added) => added.clone().special(true),
                None if id.is_none() && !is_marker(&token.content) => return,
                None => token,
            };
            self.push(token, given.into());
            return;
        }
        let next = self.next;
        let is_taken = u32::try_from(next).is_ok_and(|next| hf.id_to_token(next).is_some());
        let reason = match id {
            Some(id) if id >= self.rows => {
                format!("the model has {} rows, none for id {id}", self.rows)
            }
            Some(id) if id != next => format!("it has id {id}, but the next free one is {next}"),
            None if next >= self.rows => format!("the model has {} rows, none is free", self.rows),
            _ if is_taken || next > u64::from(MAX_TOKEN_ID) => format!("id {next} is not free"),
            _ => {
                self.next += 1;
                return self.push(token, next);
            }
        };
        self.warnings
            .push(format!("{place}: token `{shown}` is not used, its text stays text: {reason}"));
    }

    fn push(&mut self, token: AddedToken, id: u64) {
        self.known.insert(token.content.clone(), (self.tokens.len(), id));
        self.tokens.push(token);
    }
}

fn place(file: &ConfigFile, field: &str) -> String {
    format!("`{}`: `{field}`", file.path().display())
}

/// A token as a text, or as an object with its flags.
fn token_of(value: &Value, is_special: bool) -> Option<AddedToken> {
    let fields = match value {
        Value::String(text) => return Some(AddedToken::from(text, is_special)),
        Value::Object(fields) => fields,
        _ => return None,
    };
    let flag = |fields: &Map<String, Value>, name| fields.get(name).and_then(Value::as_bool);
    let is_special = is_special || flag(fields, "special") == Some(true);
    let token = AddedToken::from(fields.get("content")?.as_str()?, is_special);
    let normalized = flag(fields, "normalized").unwrap_or(token.normalized);
    let is = |name| flag(fields, name) == Some(true);
    let token = token.normalized(normalized).single_word(is("single_word"));
    Some(token.lstrip(is("lstrip")).rstrip(is("rstrip")))
}

/// Whether a word of the vocabulary looks like a control token: letters, and something around them.
fn is_marker(name: &str) -> bool {
    name.contains(char::is_alphabetic) && name.contains(|c: char| !c.is_alphanumeric())
}
