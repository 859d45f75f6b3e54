//! A `tokenizer.json` as the metadata of a GGUF file.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::*;
use crate::checkpoint::ConfigFile;
use crate::error::Error;
use crate::tokenizer::TEXT_SLOT;
use crate::tokenizer::stream::{Pieces, byte_token};

impl Tokenizer {
    /// Writes the tokenizer into `metadata`, as llama.cpp and [`Tokenizer::from_gguf`] read it: byte-level
    /// BPE as `gpt2`, BPE with byte tokens as `llama`.
    ///
    /// | argument | what it is |
    /// |---|---|
    /// | `json` | the `tokenizer.json` that this tokenizer was read from; it goes into the metadata too, so that reading it back gives the same tokenizer |
    /// | `config` | the `tokenizer_config.json` beside it, which names the tokens for the start and the end of a text |
    /// | `rows` | rows of the embedding; those without a token get an unused one, `[PAD7]` |
    ///
    /// Returns what programs that do not use the copy will do differently; empty if nothing.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if GGUF has no way to write it (it is no BPE, or
    /// a merge holds a space), or if a token has an id of `rows` or more;
    /// [`Error::Config`] for a wrong field of `config`.
    pub fn to_gguf(
        &self,
        json: &str,
        config: Option<&ConfigFile>,
        rows: usize,
        metadata: &mut Metadata,
    ) -> Result<Vec<String>> {
        let inner = &*self.inner;
        let refuse = |reason: String| Error::Tokenizer {
            path: inner.path.clone(),
            reason: format!("cannot be written as GGUF: {reason}"),
        };
        let max_id = self.max_id();
        if max_id as usize >= rows {
            let token = self.token(max_id).unwrap_or_default();
            let reason = format!("token `{token}` has id {max_id}, but the model has {rows} rows");
            return Err(refuse(reason));
        }
        let file: Value = serde_json::from_str(json).map_err(|e| refuse(e.to_string()))?;
        let merges = read_merges(&file["model"]).map_err(refuse)?;
        let spaced = match &inner.pieces {
            Pieces::ByteLevel => false,
            Pieces::ByteFallback { .. } => true,
            Pieces::Other => {
                let known = "byte-level BPE and SentencePiece";
                let reason = format!("its decoder is not one of {known}: {}", file["decoder"]);
                return Err(refuse(reason));
            }
        };

        let mut lost = Vec::new();
        let types: Vec<Type> = (0..rows as u32).map(|id| self.type_of(id, spaced)).collect();
        let texts = (0..).zip(&types).map(|(id, kind)| match (self.token(id), kind) {
            (None, _) => padding(id),
            // Tokens of this type are looked for in the text itself.
            (Some(token), Type::UserDefined) if spaced => token.replace('▁', " "),
            (Some(token), _) => token,
        });
        let texts: Vec<String> = texts.collect();
        if spaced {
            metadata.set(MODEL, "llama");
            metadata.set(PRE, "default");
            let (is_before, more) = spaces(&file);
            metadata.set(ADD_SPACE, is_before);
            lost.extend(more);
            let scores = scores(&merges, &texts, &types);
            metadata.set(SCORES, scores.as_slice());
        } else {
            metadata.set(MODEL, "gpt2");
            let ignore_merges = file["model"]["ignore_merges"] == true;
            match Pre::name_of(&file["pre_tokenizer"], ignore_merges) {
                Some(name) => {
                    metadata.set(PRE, name);
                }
                None => lost.push(format!(
                    "its rules for words have no name in GGUF, `{PRE}` is left out: {}",
                    file["pre_tokenizer"]
                )),
            }
            if !file["normalizer"].is_null() {
                lost.push(format!("GGUF has no place for its normalizer: {}", file["normalizer"]));
            }
            let merges: Vec<String> =
                merges.iter().map(|(left, right)| format!("{left} {right}")).collect();
            metadata.set(MERGES, merges.as_slice());
        }
        metadata.set(TOKENS, texts.as_slice());
        let types: Vec<i32> = types.into_iter().map(Type::number).collect();
        metadata.set(TYPES, types.as_slice());
        if spaced && !merge_alike(&merges, metadata)? {
            lost.push("scores cannot make its merges in their order".to_owned());
        }
        lost.extend(self.write_roles(config, metadata)?);
        metadata.set(HUGGINGFACE, json);
        Ok(lost)
    }

    fn type_of(&self, id: u32, spaced: bool) -> Type {
        let added = self.inner.hf.get_added_vocabulary().get_added_tokens_decoder();
        let Some(token) = self.token(id) else { return Type::Unused };
        match added.get(&id) {
            _ if spaced && self.inner.unk_id == Some(id) => Type::Unknown,
            Some(added) if added.special => Type::Control,
            Some(_) => Type::UserDefined,
            None if spaced && byte_token(&token).is_some() => Type::Byte,
            None => Type::Normal,
        }
    }

    /// Which tokens are for the start, the end, and so on, and whether a text gets them.
    fn write_roles(
        &self,
        config: Option<&ConfigFile>,
        metadata: &mut Metadata,
    ) -> Result<Option<String>> {
        let mut ids = [None; 4];
        let mut flags = [false; 2];
        let fields = ["bos_token", "eos_token", "unk_token", "pad_token"];
        let keys = [BOS, EOS, UNKNOWN, PADDING];
        if let Some(config) = config {
            for (id, field) in ids.iter_mut().zip(fields) {
                let expected = "a string or an object with a string `content`";
                let token = config.get(&[field], expected, |value| {
                    value.as_str().or_else(|| value.get("content")?.as_str())
                })?;
                *id = token.and_then(|token| self.id(token));
            }
            for (flag, field) in flags.iter_mut().zip(["add_bos_token", "add_eos_token"]) {
                *flag = config.bool(&[field])? == Some(true);
            }
        }
        let [bos, eos, unk, _] = &mut ids;
        *unk = unk.or(self.inner.unk_id);
        let frame = &self.inner.frame;
        *bos = bos.or(frame.first().copied().filter(|&id| id != TEXT_SLOT));
        let at_start = bos.is_some() && frame.first().copied() == *bos;
        let at_end = eos.is_some() && frame.last().copied() == *eos;
        let [add_bos, add_eos] = flags;
        metadata.set(ADD_BOS, at_start || (add_bos && bos.is_some()));
        metadata.set(ADD_EOS, at_end || (add_eos && eos.is_some()));
        for (key, id) in keys.into_iter().zip(ids) {
            if let Some(id) = id {
                metadata.set(key, id);
            }
        }
        let known = 1 + usize::from(at_start) + usize::from(at_end);
        Ok((frame.len() > known).then(|| {
            let tokens = frame.iter().filter(|&&id| id != TEXT_SLOT);
            let tokens: Vec<String> = tokens.filter_map(|&id| self.token(id)).collect();
            format!("GGUF has no way to put around a text all of: {}", tokens.join(" "))
        }))
    }
}

/// Whether a text gets a `▁` before it, for a `tokenizer.json` with spaces written so; and what else it does to a text,
/// of which GGUF cannot tell.
fn spaces(file: &Value) -> (bool, Vec<String>) {
    let (mut is_before, mut lost) = (false, Vec::new());
    for step in steps(&file["normalizer"], "normalizers") {
        match step["type"].as_str() {
            Some("Prepend") if step["prepend"] == "▁" => is_before = true,
            Some("Replace") if step["pattern"]["String"] == " " && step["content"] == "▁" => {}
            _ => lost.push(format!("GGUF has no place for its normalizer: {step}")),
        }
    }
    for step in steps(&file["pre_tokenizer"], "pretokenizers") {
        match step["type"].as_str() {
            Some("Metaspace") if step["replacement"] == "▁" && step["split"] == false => {
                let scheme = step["prepend_scheme"].as_str().unwrap_or("always");
                is_before |= scheme != "never";
                let too = match scheme {
                    "never" => continue,
                    "first" => ", and before the text after each control token",
                    _ => "",
                };
                lost.push(format!("GGUF puts a space before a text that starts with one too{too}"));
            }
            // No space is left to be found.
            Some("Split") if step["pattern"]["String"] == " " => {}
            _ => lost.push(format!("its rules for words have no name in GGUF: {step}")),
        }
    }
    (is_before, lost)
}

/// The steps of a sequence, of a single one, or of none.
fn steps<'a>(value: &'a Value, name: &str) -> Vec<&'a Value> {
    match value {
        Value::Null => Vec::new(),
        value if value["type"] == "Sequence" => {
            let own = value[name].as_array().into_iter().flatten();
            own.flat_map(|step| steps(step, name)).collect()
        }
        value => vec![value],
    }
}

/// The merges of a BPE model, which the file has as pairs or as texts with a space between.
fn read_merges(model: &Value) -> Result<Vec<(&str, &str)>, String> {
    let kind = model["type"].as_str().unwrap_or("BPE");
    let (Some(merges), "BPE") = (model["merges"].as_array(), kind) else {
        return Err(format!("its model is {kind}, expected BPE"));
    };
    for option in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model[option].as_str().is_some_and(|text| !text.is_empty()) {
            return Err(format!("its model has `{option}`"));
        }
    }
    let one_space = |merge| {
        pair(merge)
            .filter(|(left, right)| !left.contains(' ') && !right.contains(' '))
            .ok_or_else(|| format!("merge {merge} has no place for the space between two tokens"))
    };
    merges.iter().map(one_space).collect()
}

/// Scores that make the same merges: the earlier a token is made, the higher. Tokens that are made by turns have one
/// score. Single characters follow.
fn scores(merges: &[(&str, &str)], texts: &[String], types: &[Type]) -> Vec<f32> {
    let made = || merges.iter().map(|(left, right)| [*left, *right].concat()).enumerate();
    let last: HashMap<String, usize> = made().map(|(at, text)| (text, at)).collect();
    let (mut order, mut rank, mut end) = (HashMap::new(), 0, 0);
    for (at, text) in made() {
        if at > end {
            rank += 1;
        }
        end = end.max(last[&text]);
        order.insert(text, rank);
    }
    let scores = (rank + 1..).zip(texts).zip(types).map(|((next, text), kind)| match kind {
        Type::Normal => -(order.get(text).copied().unwrap_or(next) as f32),
        _ => 0.0,
    });
    scores.collect()
}

/// The two tokens of a merge.
fn pair(merge: &Value) -> Option<(&str, &str)> {
    match merge {
        Value::String(text) => text.split_once(' '),
        pair => Some((pair[0].as_str()?, pair[1].as_str()?)),
    }
}

/// Whether the scores in the metadata make these merges, token by token in this order.
fn merge_alike(merges: &[(&str, &str)], metadata: &Metadata) -> Result<bool> {
    let tokens = metadata.strings(TOKENS)?.unwrap_or_default();
    let made = Vocabulary::read(metadata, Kind::SentencePiece, tokens)?.merges_by_score()?;
    let one_by_one = made.iter().zip(merges).all(|((left, right), (l, r))| {
        left.len() + right.len() == l.len() + r.len()
            && left.chars().chain(right.chars()).eq(l.chars().chain(r.chars()))
    });
    let made: HashSet<(&str, &str)> = made.iter().map(|(l, r)| (&**l, &**r)).collect();
    let all = made.len() == merges.len() && merges.iter().all(|merge| made.contains(merge));
    Ok(one_by_one && all)
}
