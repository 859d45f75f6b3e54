//! How BPE tokenizers cut text into words: the names that `tokenizer.ggml.pre` may have.
//!
//! A name stands for regular expressions that are applied one after the other. Each cuts the rest of
//! the one before at the edges of its matches. The meaning of a name is a fact of llama.cpp
//! (`src/llama-vocab.cpp`, as in the release llama-cpp-python 0.3.36). The expressions are those of the
//! models' own `tokenizer.json` where these are known, not llama.cpp's versions for its own engine. So
//! a `tokenizer.json` finds its name by them.

use serde_json::Value;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

/// Names that cut text in the same way.
#[derive(Debug)]
pub(super) struct Pre {
    /// The first is the one to write.
    names: &'static [&'static str],
    patterns: &'static [&'static str],
    /// A word that is itself in the vocabulary is one token, whatever the merges give.
    pub(super) ignore_merges: bool,
    /// A text starts with BOS unless the file says otherwise.
    pub(super) add_bos: bool,
}

const fn plain(names: &'static [&'static str], patterns: &'static [&'static str]) -> Pre {
    Pre { names, patterns, ignore_merges: false, add_bos: false }
}

const fn whole_words(names: &'static [&'static str], patterns: &'static [&'static str]) -> Pre {
    Pre { names, patterns, ignore_merges: true, add_bos: false }
}

/// The expression of GPT-2, which the ByteLevel pre-tokenizer has built in.
pub(super) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// One digit, all digits of a number, up to three from the left, three by three from the right.
const DIGIT: &str = r"\p{N}";
const DIGITS: &str = r"\p{N}+";
const DIGITS_1_3: &str = r"\p{N}{1,3}";
const THOUSANDS: &str = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))";

const CJK: &str = r"[一-龥ࠀ-一가-퟿]+";
const CJK_KANA: &str = r"[一-龥぀-ゟ゠-ヿ]+";
/// Letters with a case, of the Unicode version of the models' time.
#[expect(clippy::unicode_not_nfc, reason = "the models' files have the Kelvin and Ohm signs")]
const CASED: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const NEWLINE: &str = r"[\r\n]";
const LINES: &str = r"[^\n]+|[\n]+";
const UP_TO_PUNCTUATION: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

const ALL: &[Pre] = &[
    plain(
        &[
            "gpt-2",
            "mpt",
            "olmo",
            "phi-2",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
            "roberta-bpe",
        ],
        &[GPT2],
    ),
    Pre {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        patterns: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
    },
    plain(&["smaug-bpe", "dbrx", "chatglm-bpe"], &[LLAMA3]),
    whole_words(&["glm4", "glm5"], &[LLAMA3]),
    plain(
        &[
            "qwen2",
            "stablelm2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        &[QWEN2],
    ),
    plain(&["qwen35"], &[QWEN35]),
    plain(
        &[
            "starcoder",
            "refact",
            "command-r",
            "smollm",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        &[DIGIT, GPT2],
    ),
    Pre { names: &["tekken"], patterns: &[TEKKEN], ignore_merges: true, add_bos: true },
    plain(&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], &[GPT4O]),
    whole_words(&["granite-embed-multi-97m"], &[GPT4O]),
    plain(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"]),
    plain(&["default"], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, DIGITS, r"[0-9][0-9][0-9]"]),
    plain(
        &["deepseek-llm"],
        &[NEWLINE, CASED, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK, DIGITS],
    ),
    plain(&["deepseek-coder"], &[NEWLINE, r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT]),
    plain(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        &[DIGITS_1_3, CJK_KANA, DEEPSEEK3],
    ),
    plain(
        &["spark2_5"],
        &[
            DIGITS_1_3,
            CJK_KANA,
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##,
            DIGIT,
        ],
    ),
    plain(
        &["afmoe"],
        &[THOUSANDS, r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+", DEEPSEEK3],
    ),
    whole_words(
        &["youtu"],
        &[
            r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
    ),
    plain(&["bloom", "poro-chat", "gpt3-finnish"], &[UP_TO_PUNCTUATION]),
    plain(&["viking"], &[UP_TO_PUNCTUATION, DIGIT]),
    plain(&["tiny_aya", "cohere2moe"], &[r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O]),
    plain(&["superbpe"], &[DIGITS, r"(?=(\d{3})+(?!\d))"]),
    plain(
        &["bailingmoe", "bailingmoe2", "llada-moe"],
        &[
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ],
    ),
    plain(
        &["seed-coder"],
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
    ),
    plain(&["kimi-k2"], &[KIMI]),
    plain(
        &["ufakzeka"],
        &[r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    ),
    plain(&["laguna"], &[LINES, QWEN2]),
    plain(
        &["exaone-moe"],
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        ],
    ),
    whole_words(
        &["minicpm5"],
        &[
            DIGITS_1_3,
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
    ),
    plain(
        &["jais-2"],
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
        ],
    ),
    plain(
        &["chameleon"],
        &[
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ],
    ),
];

impl Pre {
    /// The rules of a name.
    pub(super) fn of_name(name: &str) -> Option<&'static Self> {
        ALL.iter().find(|pre| pre.names.contains(&name))
    }

    /// The name for the pre-tokenizer of a `tokenizer.json`.
    pub(super) fn name_of(pre_tokenizer: &Value, ignore_merges: bool) -> Option<&'static str> {
        let mut patterns = Vec::new();
        collect(pre_tokenizer, &mut patterns)?;
        let same = |pre: &&Self| pre.patterns == patterns && pre.ignore_merges == ignore_merges;
        ALL.iter().find(same)?.names.first().copied()
    }

    /// The pre-tokenizer that cuts words, then writes them as byte-level characters.
    pub(super) fn build(&self) -> tokenizers::Result<PreTokenizerWrapper> {
        let mut steps = Vec::new();
        for &pattern in self.patterns {
            let pattern = SplitPattern::Regex(pattern.to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?;
            steps.push(PreTokenizerWrapper::Split(split));
        }
        let bytes_only = ByteLevel::new(false, true, false);
        steps.push(PreTokenizerWrapper::ByteLevel(bytes_only));
        Ok(PreTokenizerWrapper::Sequence(Sequence::new(steps)))
    }
}

/// Appends the expressions of a pre-tokenizer; `None` if it does something else than to cut at their matches.
fn collect<'a>(pre_tokenizer: &'a Value, patterns: &mut Vec<&'a str>) -> Option<()> {
    match pre_tokenizer["type"].as_str()? {
        "Sequence" => {
            let steps = pre_tokenizer["pretokenizers"].as_array()?;
            steps.iter().try_for_each(|step| collect(step, patterns))?;
        }
        "Split" => {
            let pattern = pre_tokenizer["pattern"]["Regex"].as_str()?;
            let behavior = pre_tokenizer["behavior"].as_str()?;
            match (behavior, pre_tokenizer["invert"] == true) {
                ("Isolated", _) => {}
                // Removes what is between the matches: nothing, for an expression that matches any text.
                ("Removed", true) if pattern.ends_with(r"|\s+") => {}
                _ => return None,
            }
            patterns.push(pattern);
        }
        "Digits" if pre_tokenizer["individual_digits"] == true => patterns.push(DIGIT),
        "Digits" => patterns.push(DIGITS),
        "ByteLevel" if pre_tokenizer["add_prefix_space"] != true => {
            if pre_tokenizer["use_regex"] != false {
                patterns.push(GPT2);
            }
        }
        _ => return None,
    }
    Some(())
}

/// All names, for messages.
pub(super) fn names() -> String {
    let names: Vec<&str> = ALL.iter().flat_map(|pre| pre.names).copied().collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    /// The words of a text, as pieces of it.
    fn words<'a>(name: &str, text: &'a str) -> Vec<&'a str> {
        let pre = Pre::of_name(name).unwrap().build().unwrap();
        let mut split = PreTokenizedString::from(text);
        pre.pre_tokenize(&mut split).unwrap();
        let words = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
        words.into_iter().map(|(_, (start, end), _)| &text[start..end]).collect()
    }

    #[test]
    fn a_name_stands_for_one_thing_and_loses_no_text() {
        let text = "It's\u{a0}12345 naïve İstanbul's  \n\n x=汉字かな, 가나 (🦙) ½\t\t<sentinel:1>IMGIMGAZ ";
        let names: Vec<&str> = ALL.iter().flat_map(|pre| pre.names).copied().collect();
        for (at, name) in names.iter().enumerate() {
            assert!(!names[..at].contains(name), "{name}");
            assert_eq!(words(name, text).concat(), text, "{name}");
        }
    }

    #[test]
    fn names_cut_as_their_models_do() {
        for (name, text, expected) in [
            ("gpt-2", "it's  12345\n", "it|'s| | 12345|\n"),
            ("llama-bpe", "IT'S  12345!\n", "IT|'S| | |123|45|!\n"),
            ("qwen2", "x 12", "x| |1|2"),
            ("starcoder", "a 12 b", "a| |1|2| b"),
            ("gpt-4o", "camelCase's ABCd", "camel|Case's| ABCd"),
            ("tekken", "camelCase's 12", "camel|Case|'s| |1|2"),
            ("deepseek-v3", "a1234.b汉字c", "a|123|4|.b|汉字|c"),
            ("afmoe", "x1234567y", "x|1|234|567|y"),
            ("superbpe", "x1234567y", "x|1|234|567|y"),
            ("tiny_aya", "1234567", "1|234|567"),
            ("bloom", "to be, 12", "to| be|,| 12"),
            ("kimi-k2", "汉字ab中", "汉字|ab|中"),
            ("falcon", "x=12345", "x|=|123|45"),
        ] {
            assert_eq!(words(name, text).join("|"), expected, "{name}");
        }
    }

    #[test]
    fn a_tokenizer_json_finds_its_name() {
        let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": use_regex});
        let split = |regex: &str, behavior: &str, invert: bool| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert});
        let sequence = |steps: &[Value]| json!({"type": "Sequence", "pretokenizers": steps});
        let digits = json!({"type": "Digits", "individual_digits": true});
        for (file, ignore_merges, expected) in [
            (byte_level(true), false, Some("gpt-2")),
            (byte_level(true), true, None),
            (byte_level(false), false, None),
            (sequence(&[digits.clone(), byte_level(true)]), false, Some("starcoder")),
            (
                sequence(&[split(LLAMA3, "Isolated", false), byte_level(false)]),
                true,
                Some("llama-bpe"),
            ),
            (
                sequence(&[split(LLAMA3, "Removed", true), byte_level(false)]),
                false,
                Some("smaug-bpe"),
            ),
            (sequence(&[split(LLAMA3, "Removed", false), byte_level(false)]), true, None),
            (sequence(&[split(QWEN2, "Isolated", false), byte_level(false)]), false, Some("qwen2")),
            (
                json!({"type": "ByteLevel", "add_prefix_space": true, "use_regex": true}),
                false,
                None,
            ),
            (json!({"type": "Metaspace"}), false, None),
            (Value::Null, false, None),
        ] {
            assert_eq!(Pre::name_of(&file, ignore_merges), expected, "{file}");
        }
    }
}
