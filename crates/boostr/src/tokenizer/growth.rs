//! How much longer the steps of a `tokenizer.json` may make a text, told from the file alone.
//!
//! A step that replaces `a` by a hundred of them is harmless, six of them are 10^12. So the factors of all steps are
//! multiplied, each the largest that its step can reach. Steps are known by their fields, since the file need not
//! name their types.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::Value;

/// Largest product of a file's normalizers. Published files reach about 1500 (ALBERT), most 12.
const MAX_NORMALIZERS: u64 = 1 << 12;

/// The same of pre-tokenizers, whose text is not measured when it is made. Published files reach 21.
const MAX_PRE_TOKENIZERS: u64 = 1 << 8;

/// The same of decoders. Published files reach 3.
const MAX_DECODERS: u64 = 1 << 8;

/// Most steps of a kind. Published files have about ten.
const MAX_STEPS: usize = 256;

/// Most tokens that post-processors put around a text. Published files have up to four.
const MAX_FRAME: u64 = 1024;

/// Longest sum of the strings that steps look for, in bytes. They are compiled as regular expressions are.
const MAX_PATTERNS: usize = 1 << 16;

/// Parts of a `tokenizer.json` as they are written.
pub(super) struct Steps<'a> {
    pub(super) normalizer: &'a Value,
    pub(super) pre_tokenizer: &'a Value,
    pub(super) post_processor: &'a Value,
    pub(super) decoder: &'a Value,
}

/// The largest factors of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Growth {
    /// Of the normalizers.
    pub(super) text: u64,
    /// Of the decoders.
    pub(super) token: u64,
}

impl Growth {
    /// No step makes a text longer than those of GGUF files do: a `▁` before it, and one for each space.
    pub(super) const GGUF: Self = Self { text: 12, token: 1 };
}

impl Steps<'_> {
    /// The factors, or a reason to refuse the file.
    pub(super) fn growth(&self) -> Result<Growth, String> {
        let within = |name: &str, value: &Value, most: u64| {
            let mut steps = 0;
            let factor = product(value, &mut steps);
            if steps > MAX_STEPS {
                return Err(format!("`{name}` has {steps} steps, expected at most {MAX_STEPS}"));
            }
            if factor > most {
                let reason = format!("expected steps that make it at most {most} times as long");
                return Err(format!("`{name}` may make a text {factor} times as long, {reason}"));
            }
            Ok(factor)
        };
        let text = within("normalizer", self.normalizer, MAX_NORMALIZERS)?;
        within("pre_tokenizer", self.pre_tokenizer, MAX_PRE_TOKENIZERS)?;
        if cuts_nothing(self.pre_tokenizer) {
            return Err("`pre_tokenizer`: expected a `length` of at least 1, found 0".to_owned());
        }
        within("post_processor", self.post_processor, u64::MAX)?;
        let token = within("decoder", self.decoder, MAX_DECODERS)?;
        let patterns = [self.normalizer, self.pre_tokenizer, self.decoder].map(patterns);
        let patterns = patterns.iter().fold(0_usize, |sum, len| sum.saturating_add(*len));
        if patterns > MAX_PATTERNS {
            let reason = format!("expected strings to look for of at most {MAX_PATTERNS} bytes");
            return Err(format!("{reason}, found {patterns}"));
        }
        let frame = frame(self.post_processor)?;
        if frame > MAX_FRAME {
            let reason = format!("expected at most {MAX_FRAME}");
            return Err(format!("`post_processor` puts {frame} tokens around a text, {reason}"));
        }
        Ok(Growth { text, token })
    }
}

/// Whether a step cuts a text into pieces of no characters, over which the tokenizers crate panics.
fn cuts_nothing(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().any(cuts_nothing),
        Value::Object(fields) => {
            value["type"] == "FixedLength" && value["length"] == 0
                || fields.get("pretokenizers").is_some_and(cuts_nothing)
        }
        _ => false,
    }
}

/// The product of all steps in `value`, and their number.
fn product(value: &Value, steps: &mut usize) -> u64 {
    match value {
        Value::Array(items) => {
            items.iter().fold(1, |factor, item| factor.saturating_mul(product(item, steps)))
        }
        Value::Object(fields) => {
            *steps += 1;
            let lists = ["normalizers", "pretokenizers", "processors", "decoders"];
            let inside = lists.iter().filter_map(|list| fields.get(*list));
            inside.fold(step(value), |factor, list| factor.saturating_mul(product(list, steps)))
        }
        _ => 1,
    }
}

/// The largest factor of one step, in bytes of UTF-8. What is put before a text is counted for each of its bytes: added
/// tokens and words cut a text into as many pieces.
fn step(value: &Value) -> u64 {
    let len = |field: &str| value[field].as_str().map(|text| text.len() as u64);
    let named = match value["type"].as_str().unwrap_or_default() {
        "NFD" | "NFC" => 3,
        "NFKD" | "NFKC" => 11,
        "Lowercase" => 2,
        "BertNormalizer" => 6,
        // Two bytes for one, and a space before the text.
        "ByteLevel" => 4,
        "Metaspace" => 7,
        _ => 1,
    };
    let replaced = match (len("content"), value["pattern"]["String"].as_str()) {
        (Some(content), Some(pattern)) if !pattern.is_empty() => {
            content.div_ceil(pattern.len() as u64).max(1)
        }
        // An expression may match between any two characters.
        (Some(content), _) if !value["pattern"].is_null() => content + 1,
        _ => 1,
    };
    let before = len("prepend").map_or(1, |prepend| prepend + 1);
    let mapped = value["precompiled_charsmap"].as_str().map_or(1, longest_mapped);
    [replaced, before, mapped].into_iter().fold(named, u64::saturating_mul)
}

/// The longest text that a character map of `SentencePiece` has for a character.
fn longest_mapped(base64: &str) -> u64 {
    let Some((size, rest)) = charsmap(base64) else { return 1 };
    let texts = rest.get(size..).unwrap_or_default();
    let longest = texts.split(|&byte| byte == 0).map(<[u8]>::len).max();
    longest.unwrap_or(1).max(1) as u64
}

/// A character map of `SentencePiece`: the size that it announces for a trie, a little-endian u32, and what comes after:
/// the trie, and texts that end with a zero byte.
pub(super) fn charsmap(base64: &str) -> Option<(usize, Vec<u8>)> {
    // What the tokenizers crate takes, and more.
    let config = GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let mut bytes = GeneralPurpose::new(&STANDARD, config).decode(base64).ok()?;
    let size = u32::from_le_bytes(*bytes.first_chunk()?);
    bytes.drain(..size_of::<u32>());
    Some((size as usize, bytes))
}

/// Bytes of all strings that are looked for.
fn patterns(value: &Value) -> usize {
    let all = |values: &mut dyn Iterator<Item = &Value>| {
        values.fold(0_usize, |sum, value| sum.saturating_add(patterns(value)))
    };
    match value {
        Value::Array(items) => all(&mut items.iter()),
        Value::Object(fields) => {
            let own = value["pattern"]["String"].as_str().map_or(0, str::len);
            own.saturating_add(all(&mut fields.values()))
        }
        _ => 0,
    }
}

/// Tokens that templates put around a text.
fn frame(value: &Value) -> Result<u64, String> {
    match value {
        Value::Array(items) => {
            items.iter().try_fold(0, |sum: u64, item| Ok(sum.saturating_add(frame(item)?)))
        }
        Value::Object(fields) => {
            let pieces = value["single"].as_array().map(Vec::as_slice).unwrap_or_default();
            let texts = pieces.iter().filter(|piece| piece.get("Sequence").is_some()).count();
            if texts > 1 {
                return Err("the post-processor does not keep the text exactly once".to_owned());
            }
            let count = |piece: &Value| {
                let name = piece["SpecialToken"]["id"].as_str()?;
                Some(value["special_tokens"][name]["ids"].as_array()?.len() as u64)
            };
            let own = pieces.iter().filter_map(count).fold(0, u64::saturating_add);
            let inside = fields.get("processors").map_or(Ok(0), frame)?;
            Ok(own.saturating_add(inside))
        }
        _ => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn factor(normalizer: &Value) -> u64 {
        product(normalizer, &mut 0)
    }

    #[test]
    fn factors_of_steps_multiply() {
        let replace = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"});
        assert_eq!(factor(&replace), 4);
        assert_eq!(factor(&json!({"normalizers": [replace, {"type": "NFD"}, replace]})), 48);
        assert_eq!(factor(&json!({"pattern": {"Regex": " *"}, "content": "bc"})), 3);
        assert_eq!(factor(&json!({"type": "Prepend", "prepend": "▁"})), 4);
        assert_eq!(factor(&json!({"pattern": {"String": "aaaa"}, "content": "b"})), 1);
    }

    #[test]
    fn the_longest_text_of_a_character_map_counts() {
        // A trie of four bytes, then "ab", "cdefg" and "h".
        let base64 = "BAAAAAAAAABhYgBjZGVmZwBoAA==";
        assert_eq!(charsmap(base64), Some((4, b"\0\0\0\0ab\0cdefg\0h\0".to_vec())));
        assert_eq!(longest_mapped(base64), 5);
        assert_eq!(longest_mapped(""), 1);
        assert_eq!(longest_mapped("/////w=="), 1);
    }

    #[test]
    fn templates_have_one_text_and_few_tokens() {
        let template = |pieces: Value| json!({"single": pieces, "special_tokens": {"x": {"id": "x", "ids": [1, 2, 3]}}});
        let [text, special] =
            [json!({"Sequence": {"id": "A"}}), json!({"SpecialToken": {"id": "x"}})];
        let twice = json!({"processors": [template(json!([text, special])), template(json!([special, text]))]});
        assert_eq!(frame(&twice), Ok(6));
        assert!(frame(&template(json!([text, text]))).is_err());
    }
}
