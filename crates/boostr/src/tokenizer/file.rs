//! What a `tokenizer.json` may not contain, although the tokenizers crate takes it.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::tokenizer::{Encoding, Model, Token, TokenizerImpl};

use super::{MAX_REGEX, MAX_TOKEN_ID, TEXT_SLOT, fail};
use crate::error::Result;

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
    decoder: Value,
    model: WrittenModel,
}

#[derive(Deserialize)]
struct WrittenToken {
    id: u32,
    content: String,
}

#[derive(Deserialize)]
struct WrittenModel {
    #[serde(rename = "type")]
    kind: Option<String>,
    unk_token: Option<String>,
    unk_id: Option<u32>,
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
    pub(super) fn check_memory(&self, path: &Path) -> Result<()> {
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
        Ok(())
    }

    /// The crate gives added tokens the next free ids and only logs if the file says otherwise, which
    /// would make every control token another one than the model knows.
    pub(super) fn check_ids(&self, path: &Path, hf: &tokenizers::Tokenizer) -> Result<()> {
        for WrittenToken { id, content } in &self.added_tokens {
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

    pub(super) fn unk_id(&self, hf: &tokenizers::Tokenizer) -> Option<u32> {
        self.model.unk_id.or_else(|| hf.token_to_id(self.model.unk_token.as_ref()?))
    }
}

/// A `SentencePiece` character map starts with the size of its trie, a little-endian u32; the crate reserves
/// memory for it before it looks for the trie.
fn check_charsmap(path: &Path, base64: &str) -> Result<()> {
    let sextet = |byte| match byte {
        b'A'..=b'Z' => u64::from(byte - b'A'),
        b'a'..=b'z' => u64::from(byte - b'a') + 26,
        b'0'..=b'9' => u64::from(byte - b'0') + 52,
        b'+' => 62,
        _ => 63,
    };
    // Six digits are 36 bits: the four bytes and four bits more.
    let bits = base64.bytes().take(6).fold(0, |bits, byte| bits << 6 | sextet(byte)) >> 4;
    let size = u32::try_from(bits).unwrap_or(u32::MAX).swap_bytes();
    if size as usize > base64.len() {
        let reason =
            format!("`precompiled_charsmap` announces a trie of {size} bytes, but is shorter");
        return fail(path, reason);
    }
    Ok(())
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
