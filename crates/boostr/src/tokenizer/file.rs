//! What a `tokenizer.json` may not contain, although the tokenizers crate takes it.

use std::collections::HashSet;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::tokenizer::{
    AddedToken, Encoding, Model, NormalizedString, Normalizer, Token, TokenizerImpl,
};

use super::growth::{Growth, Steps, charsmap};
use super::{MAX_ADDED, MAX_ADDED_TOKEN, MAX_REGEX, MAX_TOKEN_ID, TEXT_SLOT, fail};
use crate::error::Result;

/// Longest piece of a Unigram model, in bytes, and longest word of a `WordPiece` model: both are tried at each place of
/// a text. Published pieces have up to 48 bytes, published words up to 200 characters.
const MAX_PIECE: u64 = 1000;

/// Longest text of a token, in bytes, once steps that make it longer have run.
const MAX_DECODED_TOKEN: u64 = 1 << 16;

/// What is checked before, or read beside, the crate's own reading of the file.
#[derive(Deserialize)]
pub(super) struct Written {
    #[serde(default)]
    added_tokens: Vec<WrittenToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: WrittenModel,
}

#[derive(Deserialize)]
struct WrittenToken {
    id: u32,
    content: String,
    #[serde(default)]
    normalized: bool,
}

#[derive(Deserialize)]
struct WrittenModel {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    unk_token: Option<String>,
    unk_id: Option<u32>,
    max_input_chars_per_word: Option<u64>,
}

type WithBpe = TokenizerImpl<
    BPE,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

impl Written {
    pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes).or_else(|error| fail(path, error.to_string()))
    }

    /// The crate's own reading. Told that the model is BPE, it takes half the time: it does not have to try
    /// one kind after the other.
    pub(super) fn parse(&self, path: &Path, bytes: &[u8]) -> Result<tokenizers::Tokenizer> {
        if self.model.kind.as_deref() == Some("BPE")
            && let Ok(bpe) = serde_json::from_slice::<WithBpe>(bytes)
        {
            return Ok(bpe.into());
        }
        tokenizers::Tokenizer::from_bytes(bytes).or_else(|error| fail(path, error.to_string()))
    }

    /// Refuses what makes the crate ask for so much memory that the process is ended: no panic to catch.
    pub(super) fn check_memory(&self, path: &Path) -> Result<Growth> {
        let mut regex_bytes = 0_usize;
        let mut todo = vec![&self.normalizer, &self.pre_tokenizer, &self.decoder];
        while let Some(value) = todo.pop() {
            match value {
                Value::Array(items) => todo.extend(items),
                Value::Object(fields) => {
                    for (key, value) in fields {
                        match (key.as_str(), value) {
                            ("Regex", Value::String(regex)) => {
                                regex_bytes = regex_bytes.saturating_add(regex.len());
                            }
                            ("precompiled_charsmap", Value::String(base64)) => {
                                check_charsmap(path, base64)?;
                            }
                            _ => todo.push(value),
                        }
                    }
                }
                _ => {}
            }
        }
        if regex_bytes > MAX_REGEX {
            let reason = format!(
                "expected regular expressions of at most {MAX_REGEX} bytes, found {regex_bytes}"
            );
            return fail(path, reason);
        }
        let Self { normalizer, pre_tokenizer, post_processor, decoder, .. } = self;
        let steps = Steps { normalizer, pre_tokenizer, post_processor, decoder };
        let growth = steps.growth().or_else(|reason| fail(path, reason))?;
        let own: Option<NormalizerWrapper> = serde_json::from_value(normalizer.clone()).ok();
        let added = |token: &WrittenToken| {
            AddedToken::from(token.content.as_str(), false).normalized(token.normalized)
        };
        let added: Vec<AddedToken> = self.added_tokens.iter().map(added).collect();
        check_added(own.as_ref(), &added).or_else(|reason| fail(path, reason))?;
        if let Some(found) = self.model.max_input_chars_per_word.filter(|&most| most > MAX_PIECE) {
            let reason = "expected `max_input_chars_per_word`";
            return fail(path, format!("{reason} of at most {MAX_PIECE}, found {found}"));
        }
        Ok(growth)
    }

    /// Refuses tokens that take more time or memory than a text may.
    pub(super) fn check_tokens(
        path: &Path,
        hf: &tokenizers::Tokenizer,
        growth: Growth,
    ) -> Result<()> {
        let refuse = |token: &str, most: u64| {
            let start: String = token.chars().take(20).collect();
            let (start, len) = (start.escape_debug(), token.len());
            fail(path, format!("token `{start}..` has {len} bytes, expected at most {most}"))
        };
        if let ModelWrapper::Unigram(unigram) = hf.get_model()
            && let Some((piece, _)) =
                unigram.iter().find(|(piece, _)| piece.len() as u64 > MAX_PIECE)
        {
            return refuse(piece, MAX_PIECE);
        }
        // Most decoders make no token longer.
        let longest = MAX_DECODED_TOKEN / growth.token;
        if growth.token > 1
            && let Some(token) =
                hf.get_vocab(true).into_keys().find(|token| token.len() as u64 > longest)
        {
            return refuse(&token, longest);
        }
        Ok(())
    }

    /// The crate gives added tokens the next free ids and only logs if the file says otherwise, which
    /// would make every control token another one than the model knows.
    pub(super) fn check_ids(&self, path: &Path, hf: &tokenizers::Tokenizer) -> Result<()> {
        for WrittenToken { id, content, .. } in &self.added_tokens {
            if let Some(given) = hf.token_to_id(content)
                && given != *id
            {
                let reason =
                    format!("added token `{content}` has id {id}, but its place gives it {given}");
                return fail(path, reason);
            }
        }
        Ok(())
    }

    /// What is wrong with the tokens for single bytes, where the model has some.
    pub(super) fn byte_tokens(&self, hf: &tokenizers::Tokenizer) -> Option<String> {
        let names: Vec<String> = (0..=255_u8).map(|byte| format!("<0x{byte:02X}>")).collect();
        let mut missing = names.clone();
        missing.retain(|name| hf.token_to_id(name).is_none());
        if !self.model.byte_fallback || missing.is_empty() || missing.len() == names.len() {
            return None;
        }
        let is_like_byte =
            |name: &String| name.starts_with("<0x") && name.ends_with('>') && name.len() <= 10;
        let mut odd: Vec<String> = hf.get_vocab(true).into_keys().filter(is_like_byte).collect();
        odd.retain(|name| !names.contains(name));
        odd.sort();
        Some(missing_bytes(&missing, &odd))
    }

    pub(super) fn unk_id(&self, hf: &tokenizers::Tokenizer) -> Option<u32> {
        self.model.unk_id.or_else(|| hf.token_to_id(self.model.unk_token.as_ref()?))
    }
}

/// The crate reserves memory for the trie of a character map before it looks for it.
fn check_charsmap(path: &Path, base64: &str) -> Result<()> {
    if let Some((size, rest)) = charsmap(base64)
        && size > rest.len()
    {
        let reason =
            format!("`precompiled_charsmap` announces a trie of {size} bytes, but is shorter");
        return fail(path, reason);
    }
    Ok(())
}

/// That there are no tokens for some bytes, and which tokens may have been meant.
pub(super) fn missing_bytes(missing: &[String], odd: &[String]) -> String {
    let first = |names: &[String]| {
        let shown: Vec<String> = names.iter().take(5).map(|name| format!("`{name}`")).collect();
        let more = names.len().saturating_sub(shown.len());
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{more}", shown.join(", "))
    };
    let odd = match odd {
        [] => String::new(),
        odd => format!("; it has {}", first(odd)),
    };
    format!(
        "the tokenizer has no token {}{odd}: characters with these bytes are unknown",
        first(missing)
    )
}

/// A reason to refuse added tokens: they are longer, as they are looked for in a text, than what is built to find
/// them bears.
pub(super) fn check_added<'a>(
    normalizer: Option<&NormalizerWrapper>,
    tokens: impl IntoIterator<Item = &'a AddedToken>,
) -> Result<(), String> {
    let mut sum = 0_usize;
    for token in tokens {
        let mut len = token.content.len();
        if let Some(normalizer) = normalizer.filter(|_| token.normalized && len <= MAX_ADDED_TOKEN)
        {
            let mut content = NormalizedString::from(token.content.as_str());
            if let Err(error) = normalizer.normalize(&mut content) {
                return Err(error.to_string());
            }
            len = content.get().len();
        }
        if len > MAX_ADDED_TOKEN {
            let start: String = token.content.chars().take(20).collect();
            let start = start.escape_debug();
            return Err(format!(
                "added token `{start}..` has {len} bytes, expected at most {MAX_ADDED_TOKEN}"
            ));
        }
        sum = sum.saturating_add(len);
    }
    if sum > MAX_ADDED {
        return Err(format!("the added tokens have {sum} bytes, expected at most {MAX_ADDED}"));
    }
    Ok(())
}

/// The model without the words of `names`: no text becomes one. `None` where the model cannot be made so.
pub(super) fn without(model: &ModelWrapper, names: &HashSet<String>) -> Option<ModelWrapper> {
    if let ModelWrapper::BPE(bpe) = model
        && bpe
            .get_vocab()
            .into_values()
            .max()
            .is_none_or(|max| max as usize >= bpe.get_vocab_size())
    {
        // The crate writes one with gaps to stdout too.
        return None;
    }
    // A noncharacter, which no text has, hides a name.
    let hidden = |name: &str| format!("\u{fdd4}{name}");
    let is_hidden = |name: &str| names.contains(name);
    let mut json = serde_json::to_value(model).ok()?;
    match json.get_mut("vocab")? {
        Value::Object(vocab) => {
            let renamed = std::mem::take(vocab).into_iter();
            *vocab = renamed
                .map(|(name, id)| if is_hidden(&name) { (hidden(&name), id) } else { (name, id) })
                .collect();
        }
        Value::Array(pieces) => {
            for name in pieces.iter_mut().filter_map(|piece| piece.get_mut(0)) {
                if let Some(hidden) = name.as_str().filter(|name| is_hidden(name)).map(hidden) {
                    *name = hidden.into();
                }
            }
        }
        _ => return None,
    }
    if let Some(merges) = json.get_mut("merges").and_then(Value::as_array_mut) {
        merges.retain(|merge| {
            let pair = [0, 1].map(|at| merge.get(at).and_then(Value::as_str).unwrap_or_default());
            !(pair.iter().any(|name| is_hidden(name)) || is_hidden(&pair.concat()))
        });
    }
    if let Some(unknown) = json.get_mut("unk_token")
        && let Some(hidden) = unknown.as_str().filter(|name| is_hidden(name)).map(hidden)
    {
        *unknown = hidden.into();
    }
    serde_json::from_value(json).ok()
}

/// The number of tokens and the largest id.
pub(super) fn check_vocabulary(path: &Path, hf: &tokenizers::Tokenizer) -> Result<(usize, u32)> {
    // As many ids in a row as there are tokens, the usual case: then no two have the same one.
    let model = hf.get_model();
    let added = hf.get_added_vocabulary().get_vocab();
    let beside = added.keys().filter(|token| model.token_to_id(token).is_none()).count();
    let count = model.get_vocab_size() + beside;
    if let Some(max_id @ 0..=MAX_TOKEN_ID) = (count as u32).checked_sub(1)
        && (0..=max_id).all(|id| hf.id_to_token(id).is_some())
    {
        return Ok((count, max_id));
    }
    let mut tokens: Vec<(u32, String)> =
        hf.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
    tokens.sort_unstable();
    let Some((max_id, last)) = tokens.last() else {
        return fail(path, "the vocabulary is empty");
    };
    if *max_id > MAX_TOKEN_ID {
        let reason = format!("token `{last}` has id {max_id}, expected at most {MAX_TOKEN_ID}");
        return fail(path, reason);
    }
    for pair in tokens.windows(2) {
        if let [(id, first), (same, second)] = pair
            && id == same
        {
            return fail(path, format!("tokens `{first}` and `{second}` both have id {id}"));
        }
    }
    Ok((tokens.len(), *max_id))
}

/// What the post-processor makes of a text of one token, [`TEXT_SLOT`].
pub(super) fn frame(
    path: &Path,
    hf: &tokenizers::Tokenizer,
    add_special: bool,
) -> Result<Vec<u32>> {
    let slot = Encoding::from_tokens(vec![Token::new(TEXT_SLOT, "a".to_owned(), (0, 1))], 0);
    let framed = match hf.post_process(slot, None, add_special) {
        Ok(encoding) => encoding.get_ids().to_vec(),
        Err(error) => return fail(path, format!("post-processor: {error}")),
    };
    for &id in &framed {
        if id != TEXT_SLOT && hf.id_to_token(id).is_none() {
            return fail(path, format!("the post-processor adds token {id}, which does not exist"));
        }
    }
    if framed.iter().filter(|&&id| id == TEXT_SLOT).count() != 1 {
        return fail(path, "the post-processor does not keep the text exactly once");
    }
    Ok(framed)
}
