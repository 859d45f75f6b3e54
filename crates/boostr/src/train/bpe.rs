//! Makes a tokenizer for texts: byte-level byte pair encoding, as GPT-2's.
//!
//! Texts are split into words as GPT-2 does, a word with the space before it. A word is its bytes. The
//! most frequent pair of neighbours becomes a token, again and again (Sennrich, Haddow and Birch 2016,
//! <https://arxiv.org/abs/1508.07909>). Since every byte is a token, every text can be spelled.
//!
//! The tokenizers crate does it. Here are its limits, and its input.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rayon::prelude::*;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::tokenizer::{
    AddedToken, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
};

use super::data::{DataFile, Documents, pieces};
use crate::error::{Error, Result};
use crate::tokenizer::MAX_TOKEN_ID;

/// The token that ends a text; its id is 0.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// The fewest tokens: the end of a text and the bytes.
pub const MIN_VOCAB: usize = 257;

/// Bytes of text that are counted, more or less; what follows is left out. So no count is above 2^31.
pub const MAX_COUNTED: u64 = 1 << 30;

/// Tokens are made of pairs that are there at least so often.
const MIN_FREQUENCY: u64 = 2;

/// Longest word that is looked at whole, in bytes: time is quadratic in it. A longer one is cut.
const MAX_WORD: usize = 256;

/// Text whose words are counted at once, in bytes.
const BLOCK: usize = 4 << 20;

/// The text of a `tokenizer.json` of at most `vocab_size` tokens for the texts of `files`; fewer when no pair is
/// there twice. [`Tokenizer::from_bytes`](crate::tokenizer::Tokenizer::from_bytes) reads it. Of conversations, the
/// contents of all messages are texts. `progress` is told `(done, total)` bytes that are read; the last, short part
/// of the work comes after that.
///
/// The same texts give the same tokenizer: of pairs that are equally frequent the one of older tokens comes first.
///
/// # Errors
///
/// [`Error::Argument`] when `vocab_size` is below [`MIN_VOCAB`] or above 2^24, or there is no text; what
/// [`Documents`] gives for a file.
pub fn train(
    files: &[DataFile],
    vocab_size: usize,
    mut progress: impl FnMut(u64, u64),
) -> Result<String> {
    let max = MAX_TOKEN_ID as usize + 1;
    if !(MIN_VOCAB..=max).contains(&vocab_size) {
        let reason = format!(
            "expected {MIN_VOCAB} (the bytes and {END_OF_TEXT}) to {max}, found {vocab_size}"
        );
        return Err(Error::Argument { name: "vocab_size", reason });
    }
    let words = count_words(files, &mut progress)?;
    if words.is_empty() {
        let reason = "expected text to make tokens of, found none".into();
        return Err(Error::Argument { name: "files", reason });
    }
    guard(|| merge(&words, vocab_size))
}

/// Runs what calls the tokenizers crate; a panic in it becomes an error.
fn guard<T>(body: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let failed = |reason| Error::Tokenizer { path: "tokenizer.json".into(), reason };
    catch_unwind(AssertUnwindSafe(body))
        .map_err(|_| failed("training failed inside the tokenizers crate".to_owned()))?
        .map_err(|error| failed(error.to_string()))
}

/// How often each word occurs, in the letters that stand for bytes.
fn count_words(
    files: &[DataFile],
    progress: &mut impl FnMut(u64, u64),
) -> Result<HashMap<String, u64>> {
    let mut total = 0;
    for DataFile { path, .. } in files {
        total += std::fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
    }
    let mut documents = Documents::new(files);
    let mut words: HashMap<String, u64> = HashMap::new();
    let mut counted = 0;
    while counted < MAX_COUNTED {
        let (mut texts, mut bytes) = (Vec::new(), 0);
        while bytes < BLOCK {
            let Some(document) = documents.next().transpose()? else { break };
            for piece in document.content.texts().into_iter().flat_map(pieces) {
                texts.push(piece.to_owned());
                bytes += piece.len();
            }
        }
        if texts.is_empty() && bytes == 0 {
            break;
        }
        let counts: Vec<Result<HashMap<String, u64>>> =
            texts.par_iter().map(|text| guard(|| words_of(text))).collect();
        for count in counts {
            for (word, count) in count? {
                *words.entry(word).or_default() += count;
            }
        }
        counted += bytes as u64;
        progress(documents.bytes_read(), total);
    }
    Ok(words)
}

fn words_of(text: &str) -> tokenizers::Result<HashMap<String, u64>> {
    let mut split = PreTokenizedString::from(text);
    ByteLevel::new(false, true, true).pre_tokenize(&mut split)?;
    let mut words = HashMap::new();
    for (mut word, ..) in split.get_splits(OffsetReferential::Original, OffsetType::Byte) {
        while !word.is_empty() {
            let (head, rest) = word.split_at(word.floor_char_boundary(MAX_WORD));
            match words.get_mut(head) {
                Some(count) => *count += 1,
                None => drop(words.insert(head.to_owned(), 1)),
            }
            word = rest;
        }
    }
    Ok(words)
}

fn merge(words: &HashMap<String, u64>, vocab_size: usize) -> tokenizers::Result<String> {
    let end = AddedToken::from(END_OF_TEXT, true);
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(vocab_size)
        .min_frequency(MIN_FREQUENCY)
        .special_tokens(vec![end.clone()])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let words = words.iter().map(|(word, &count)| (word.as_str().into(), count)).collect();
    let mut model = BPE::default();
    trainer.do_train(&words, &mut model)?;

    let bytes = ByteLevel::new(false, true, true);
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(bytes));
    tokenizer.with_decoder(Some(bytes));
    tokenizer.add_special_tokens(&[end]);
    tokenizer.to_string(true)
}
