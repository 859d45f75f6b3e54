//! Tokenizers in GGUF metadata: llama.cpp's vectors, both ways, and metadata made to break them.

use std::fs;
use std::path::Path;

use boostr::checkpoint::gguf::{self, Metadata, Value};
use boostr::checkpoint::{Bytes, ConfigFile};
use boostr::tokenizer::{GgufTokenizer, Tokenizer};
use proptest::prelude::*;
use serde_json::json;

const DEMO: &str = include_str!("../data/demo-tokenizer.json");
const TINY: &str = include_str!("../data/tiny-tokenizer.json");
const NEOX: &str = include_str!("../data/neox-subset.json");

const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
const TYPES: &str = "tokenizer.ggml.token_type";
const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const JSON: &str = "tokenizer.huggingface.json";

/// Other than in the form NFC.
const COMBINED: &str = "a\u{301}\u{0}\u{feff}";

const TEXTS: [&str; 8] = [
    "",
    " ",
    "It is a truth universally acknowledged,\n\n\tthat 1234567 men",
    "  two spaces, it's I'LL\r\n   ",
    "é🦙 नमस्ते 汉字 ½ …",
    "<|endoftext|> <s></s> <0x0A>",
    COMBINED,
    "def f(x):\n        return x ** 2  # ok",
];

fn read(metadata: &Metadata) -> GgufTokenizer {
    Tokenizer::from_gguf(metadata).unwrap().expect("there is a tokenizer")
}

fn refusal(metadata: &Metadata) -> String {
    Tokenizer::from_gguf(metadata).unwrap_err().to_string()
}

/// Byte-level BPE: a control token, some bytes (Ġ is the space), two merges, one unused token.
fn bytes() -> Metadata {
    let mut metadata = Metadata::new("model.gguf");
    metadata.set(MODEL, "gpt2");
    metadata.set(PRE, "gpt-2");
    metadata.set(TOKENS, ["<s>", "a", "b", "c", "Ġ", "<", ">", "s", "ab", "Ġab", "[PAD10]"]);
    metadata.set(TYPES, [3_i32, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5]);
    metadata.set(MERGES, ["a b", "Ġ ab"]);
    metadata.set(BOS, 0_u32);
    metadata
}

/// `SentencePiece` with all bytes; `ab` is better than `bc`, and `▁` before a text.
fn pieces() -> Metadata {
    let named = ["<unk>", "<s>", "</s>"].map(str::to_owned).into_iter();
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let scored = [
        ("▁", -9.0),
        ("a", -8.0),
        ("b", -7.0),
        ("c", -6.0),
        ("ab", -1.0),
        ("bc", -2.0),
        ("▁ab", -3.0),
    ];
    let tokens: Vec<String> =
        named.chain(bytes).chain(scored.map(|(token, _)| token.to_owned())).collect();
    let types: Vec<i32> = (0..tokens.len())
        .map(|id| match id {
            0 => 2,
            1 | 2 => 3,
            3..259 => 6,
            _ => 1,
        })
        .collect();
    let scores: Vec<f32> = [0.0; 259].into_iter().chain(scored.map(|(_, score)| score)).collect();
    let mut metadata = Metadata::new("model.gguf");
    metadata.set(MODEL, "llama");
    metadata.set(TOKENS, tokens.as_slice());
    metadata.set(TYPES, types.as_slice());
    metadata.set(SCORES, scores.as_slice());
    metadata
}

#[test]
fn p_gguf_without_pre_warns_that_the_rules_for_words_are_guessed() {
    let mut metadata = bytes();
    assert!(read(&metadata).tokenizer.warnings().is_empty());
    metadata.retain(|key| key != PRE);
    let warnings = read(&metadata).tokenizer.warnings().to_vec();
    let [warning] = warnings.as_slice() else { panic!("{warnings:?}") };
    assert!(warning.contains("`model.gguf`: `tokenizer.ggml.pre` is missing"), "{warning}");
    // llama.cpp takes an empty name for none.
    metadata.set(PRE, "");
    assert_eq!(read(&metadata).tokenizer.warnings(), warnings);
    // No rules are needed where a whole tokenizer.json is there, nor for text without words.
    let (mut metadata, _) = written(DEMO, None, 1024);
    metadata.retain(|key| key != PRE);
    assert!(read(&metadata).is_copy && read(&metadata).tokenizer.warnings().is_empty());
    assert!(read(&pieces()).tokenizer.warnings().is_empty());
}

#[test]
fn p_byte_token_malformed_is_refused_by_its_name_and_id() {
    let names = [
        "<0x-1>", "<0xZZ>", "<0x100>", "<0x+1>", "<0x1>", "<0xff>", "0xFF", "<0xFF", "A", "<0X41>",
        "< 0x41>",
    ];
    for name in names {
        let mut metadata = pieces();
        let mut tokens: Vec<String> =
            metadata.strings(TOKENS).unwrap().unwrap().into_iter().map(str::to_owned).collect();
        name.clone_into(&mut tokens[68]);
        metadata.set(TOKENS, tokens.as_slice());
        let message = refusal(&metadata);
        assert!(message.contains("token 68 is of type 6 (byte)"), "{message}");
        assert!(
            message.contains(name) && message.contains("expected `<0x00>` to `<0xFF>`"),
            "{message}"
        );
    }
    // A byte whose token is of another kind by its type is missing.
    let mut metadata = pieces();
    let mut tokens: Vec<String> =
        metadata.strings(TOKENS).unwrap().unwrap().into_iter().map(str::to_owned).collect();
    let mut types = metadata.ints(TYPES).unwrap().unwrap();
    "xyz".clone_into(&mut tokens[68]);
    types[68] = 1;
    metadata.set(TOKENS, tokens.as_slice());
    metadata.set(TYPES, types.iter().map(|&kind| kind as i32).collect::<Vec<_>>().as_slice());
    let warnings = read(&metadata).tokenizer.warnings().to_vec();
    assert!(warnings[0].contains("no token `<0x41>`"), "{warnings:?}");
}

/// The same as a `tokenizer.json`.
fn pieces_json() -> String {
    let metadata = pieces();
    let vocab: serde_json::Map<String, serde_json::Value> = metadata
        .strings(TOKENS)
        .unwrap()
        .unwrap()
        .into_iter()
        .zip(0..)
        .map(|(token, id): (&str, u32)| (token.to_owned(), id.into()))
        .collect();
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    json!({
        "version": "1.0",
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [replace("▁", " "), {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": vocab, "merges": ["a b", "b c", "▁ ab"]},
    })
    .to_string()
}

/// What `json` becomes as GGUF, and what others lose.
fn written(json: &str, config: Option<&str>, rows: usize) -> (Metadata, Vec<String>) {
    let tokenizer = Tokenizer::from_bytes("tokenizer.json", json.as_bytes()).unwrap();
    let config = config.map(|text| ConfigFile::parse("tokenizer_config.json", text).unwrap());
    let mut metadata = Metadata::new("model.gguf");
    let lost = tokenizer.to_gguf(json, config.as_ref(), rows, &mut metadata).unwrap();
    (metadata, lost)
}

#[test]
fn the_texts_of_llama_cpp_have_the_originals_ids() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/vocab");
    for name in ["llama-spm", "gpt-2", "mpt", "deepseek-coder"] {
        let path = folder.join(format!("{name}.gguf"));
        let text =
            |ending: &str| fs::read_to_string(folder.join(format!("{name}.gguf{ending}"))).unwrap();
        let (metadata, _) = gguf::read(&path, &Bytes::new(fs::read(&path).unwrap())).unwrap();
        let tokenizer = read(&metadata).tokenizer;
        let (texts, ids) = (text(".inp"), text(".out"));
        let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
        assert!(texts.len() > 40 && ids.lines().count() >= texts.len() - 1);
        for (text, line) in texts.into_iter().zip(ids.lines()) {
            let expected: Vec<u32> =
                line.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&expected, false).unwrap(), text, "{name}");
        }
    }
}

#[test]
fn without_tokens_there_is_no_tokenizer() {
    // A26
    let mut metadata = bytes();
    metadata.retain(|key| key != TOKENS);
    assert!(Tokenizer::from_gguf(&metadata).unwrap().is_none());
    for none in ["none", "no_vocab"] {
        let mut metadata = bytes();
        metadata.set(MODEL, none);
        assert!(Tokenizer::from_gguf(&metadata).unwrap().is_none());
    }
}

#[test]
fn what_is_wrong_is_named_with_its_key() {
    let cases: [(&str, Value, &str); 16] = [
        (MODEL, "rwkv".into(), "`rwkv` is not supported; supported: gpt2, gemma4, llama, none"),
        (MODEL, 3_u32.into(), "expected a string, found 3 (u32)"),
        (PRE, "nonsense".into(), "`nonsense` is not supported; supported: gpt-2, "),
        (TOKENS, ([] as [&str; 0]).into(), "expected 1 to 2097152 tokens, found 0"),
        (TOKENS, [1_i32].into(), "expected an array of strings"),
        (TOKENS, ["a", "b", "a"].into(), "tokens 0 and 2 are both `a`"),
        (TYPES, [1_i32].into(), "expected 11 elements, one for each token, found 1"),
        (TYPES, [5_i32; 11].into(), "all tokens are unused"),
        (
            MERGES,
            ["a b", "ab"].into(),
            "merge 1: expected two tokens with a space between, found `ab`",
        ),
        (MERGES, ["a c"].into(), "Token `ac` out of vocabulary"),
        (MERGES, ["a 🦙"].into(), "Token `🦙` out of vocabulary"),
        (MERGES, 1_u32.into(), "expected an array of strings"),
        // A27
        (BOS, 11_u32.into(), "expected a whole number from 0 to 10, found 11 (u32)"),
        (EOS, u32::MAX.into(), "expected a whole number from 0 to 10, found 4294967295 (u32)"),
        (
            "tokenizer.ggml.padding_token_id",
            (-1_i32).into(),
            "expected a whole number from 0 to 10",
        ),
        (ADD_EOS, true.into(), "is true, but `tokenizer.ggml.eos_token_id` is missing"),
    ];
    for (key, value, expected) in cases {
        let mut metadata = bytes();
        if key == TOKENS {
            metadata.retain(|key| key != TYPES);
        }
        metadata.set(key, value);
        let message = refusal(&metadata);
        let start = format!("`model.gguf`: field `{key}`: ");
        assert!(message.starts_with(&(start + expected)), "{key}: {message}");
    }
    for key in [MODEL, MERGES] {
        let mut metadata = bytes();
        metadata.retain(|other| other != key);
        assert_eq!(refusal(&metadata), format!("`model.gguf`: field `{key}`: missing"));
    }
    let mut metadata = pieces();
    metadata.set(SCORES, [0.0_f32; 2]);
    assert!(refusal(&metadata).contains("`tokenizer.ggml.scores`: expected 266 elements"));
    metadata.retain(|key| key != SCORES);
    assert_eq!(refusal(&metadata), "`model.gguf`: field `tokenizer.ggml.scores`: missing");
}

#[test]
fn control_tokens_are_text_to_users_and_unused_ones_are_nothing() {
    let read = read(&bytes());
    let tokenizer = &read.tokenizer;
    assert_eq!(tokenizer.encode("<s>ab", false).unwrap(), [5, 7, 6, 8]);
    assert_eq!(tokenizer.encode_control("<s>ab", false).unwrap(), [0, 8]);
    assert_eq!(tokenizer.decode(&[0, 1, 10], true).unwrap(), "a");
    assert_eq!(tokenizer.token(10), None);
    assert_eq!((tokenizer.max_id(), tokenizer.vocab_size()), (9, 10));
}

#[test]
fn user_defined_tokens_are_found_in_any_text() {
    let mut metadata = bytes();
    metadata.set(TYPES, [3_i32, 1, 1, 1, 1, 1, 1, 1, 4, 1, 5]);
    metadata.set(MERGES, ["Ġ ab"]);
    assert_eq!(read(&metadata).tokenizer.encode(" ab c", false).unwrap(), [4, 8, 4, 3]);
}

#[test]
fn the_ends_are_known_by_id_and_by_name_whatever_their_type() {
    let mut metadata = bytes();
    metadata.set(TOKENS, ["<s>", "a", "b", "c", "Ġ", "<", ">", "s", "ab", "Ġab", "<|im_end|>"]);
    metadata.set(TYPES, [3_i32, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
    metadata.set(EOS, 0_u32);
    metadata.set("tokenizer.ggml.eot_token_id", 3_u32);
    let read = read(&metadata);
    assert_eq!((read.bos, read.eos, read.ends), (Some(0), Some(0), vec![0, 3, 10]));
    assert!(read.tokenizer.is_special(10));
}

#[test]
fn the_file_says_what_is_put_around_a_text() {
    for (start, end, expected) in [
        (None, None, vec![1]),
        (Some(true), None, vec![0, 1]),
        (Some(true), Some(true), vec![0, 1, 3]),
    ] {
        let mut metadata = bytes();
        metadata.set(EOS, 3_u32);
        for (key, flag) in [(ADD_BOS, start), (ADD_EOS, end)] {
            if let Some(flag) = flag {
                metadata.set(key, flag);
            }
        }
        let tokenizer = read(&metadata).tokenizer;
        assert_eq!(tokenizer.encode("a", true).unwrap(), expected);
        assert_eq!(tokenizer.encode("a", false).unwrap(), [1]);
    }
    // These start with the first token unless the file says otherwise.
    let mut llama3 = bytes();
    llama3.set(PRE, "llama-bpe");
    assert_eq!(read(&llama3).tokenizer.encode("a", true).unwrap(), [0, 1]);
    assert_eq!(read(&pieces()).tokenizer.encode("ab", true).unwrap(), [1, 265]);
    let mut bare = pieces();
    bare.set(ADD_BOS, false);
    assert_eq!(read(&bare).tokenizer.encode("ab", true).unwrap(), [265]);
}

#[test]
fn pieces_are_joined_by_score_and_what_is_left_becomes_bytes() {
    let read = read(&pieces());
    let tokenizer = &read.tokenizer;
    assert_eq!((read.bos, read.eos, read.unk, read.pad), (Some(1), Some(2), Some(0), None));
    for (text, ids) in [
        ("abc", vec![265, 262]),
        ("bc", vec![259, 264]),
        (" ab", vec![259, 265]),
        ("é", vec![259, 3 + 0xc3, 3 + 0xa9]),
        // Neither a control nor a byte token.
        (
            "a<0x0A>",
            [259, 260].into_iter().chain("<0x0A>".bytes().map(|b| 3 + u32::from(b))).collect(),
        ),
        ("</s>", [259].into_iter().chain("</s>".bytes().map(|b| 3 + u32::from(b))).collect()),
    ] {
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{text}");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    }
    let mut bare = pieces();
    bare.set("tokenizer.ggml.add_space_prefix", false);
    let tokenizer = self::read(&bare).tokenizer;
    assert_eq!(tokenizer.encode("ab", false).unwrap(), [263]);
    assert_eq!(tokenizer.decode(&[265], false).unwrap(), " ab");
}

#[test]
fn sizes_and_messages_are_bounded() {
    let mut metadata = bytes();
    metadata.set(MODEL, "\u{1b}x".repeat(1000));
    assert!(refusal(&metadata).len() < 600 && !refusal(&metadata).contains('\u{1b}'));
    let mut metadata = bytes();
    let long = "a".repeat(1 << 20);
    metadata.set(MERGES, [format!("b {long}")]);
    assert!(refusal(&metadata).len() < 300);
    metadata.set(TOKENS, ["<s>", &*long]);
    metadata.set(TYPES, [3_i32; 2]);
    metadata.set(MERGES, [] as [&str; 0]);
    assert!(refusal(&metadata).ends_with("has 1048576 bytes, expected at most 1024"));
    // Each of these can be cut in two wherever.
    let runs: Vec<String> = ('a'..='~')
        .chain('α'..='ω')
        .flat_map(|c| (1..129).map(move |n| String::from(c).repeat(n)))
        .collect();
    let mut metadata = Metadata::new("model.gguf");
    metadata.set(MODEL, "llama");
    metadata.set(TOKENS, runs.as_slice());
    metadata.set(SCORES, vec![0.0_f32; runs.len()].as_slice());
    assert_eq!(read(&metadata).tokenizer.vocab_size(), runs.len());
    metadata.set(TOKENS, vec!["a"; (1 << 21) + 1].as_slice());
    assert!(refusal(&metadata).ends_with("expected 1 to 2097152 tokens, found 2097153"));
}

#[test]
fn a_token_without_text_has_no_text_to_be_found_by() {
    let mut metadata = bytes();
    metadata.set(TOKENS, ["<s>", "a", "b", "c", "Ġ", "<", ">", "s", "ab", "Ġab", ""]);
    metadata.set(TYPES, [1_i32; 11]);
    assert_eq!(read(&metadata).tokenizer.token(10).as_deref(), Some("[EMPTY_10]"));
}

#[test]
fn a_tokenizer_json_comes_back_as_it_was() {
    let config = r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}"#;
    for (json, config, rows) in [
        (DEMO, None, 1024),
        (TINY, None, 600),
        (NEOX, None, 50432),
        (&*pieces_json(), Some(config), 270),
    ] {
        let original = Tokenizer::from_bytes("tokenizer.json", json.as_bytes()).unwrap();
        let (metadata, lost) = written(json, config, rows);
        assert_eq!(metadata.strings(TOKENS).unwrap().unwrap().len(), rows);
        let mut others = metadata.clone();
        others.retain(|key| key != JSON);
        // With the copy of the file, and from what other programs read.
        for (metadata, lost) in [(metadata, vec![]), (others, lost)] {
            let read = read(&metadata);
            for text in TEXTS {
                if lost == [r#"GGUF has no place for its normalizer: {"type":"NFC"}"#]
                    && text == COMBINED
                {
                    continue;
                }
                for special in [false, true] {
                    let ids = original.encode(text, special).unwrap();
                    assert_eq!(read.tokenizer.encode(text, special).unwrap(), ids, "{text:?}");
                    assert_eq!(
                        read.tokenizer.decode(&ids, true).unwrap(),
                        original.decode(&ids, true).unwrap()
                    );
                }
            }
            assert_eq!(read.tokenizer.max_id(), original.max_id());
            if config.is_some() {
                assert_eq!((read.bos, read.eos, read.unk), (Some(1), Some(2), Some(0)));
            }
        }
    }
}

#[test]
fn a_copy_of_another_tokenizer_is_not_used() {
    let mut metadata = bytes();
    for other in [DEMO, "{}", "no json"] {
        metadata.set(JSON, other);
        assert_eq!(read(&metadata).tokenizer.encode(" ab", false).unwrap(), [9]);
    }
}

#[test]
fn what_gguf_has_no_way_to_say_is_told() {
    let change = |pointer: &str, value: serde_json::Value| {
        let mut json: serde_json::Value = serde_json::from_str(DEMO).unwrap();
        *json.pointer_mut(pointer).unwrap() = value;
        json.to_string()
    };
    let (metadata, lost) = written(DEMO, None, 1024);
    assert_eq!((lost, metadata.text(PRE).unwrap()), (vec![], Some("gpt-2")));

    let split = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]});
    let (metadata, lost) = written(&change("/pre_tokenizer", split), None, 1024);
    assert_eq!(metadata.text(PRE).unwrap(), None);
    assert!(lost[0].starts_with(
        "its rules for words have no name in GGUF, `tokenizer.ggml.pre` is left out: "
    ));

    let (_, lost) = written(&change("/normalizer", json!({"type": "NFC"})), None, 1024);
    assert_eq!(lost, [r#"GGUF has no place for its normalizer: {"type":"NFC"}"#]);

    let json = pieces_json().replace(r#"["a b","b c","▁ ab"]"#, r#"["b c","a b"]"#);
    assert_eq!(written(&json, None, 266).1[0], "scores cannot make its merges in their order");
}

#[test]
fn the_ways_to_write_spaces_in_a_tokenizer_json_are_read_and_what_gguf_lacks_is_told() {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prepend = json!({"type": "Prepend", "prepend": "▁"});
    let normalizers =
        |steps: &[serde_json::Value]| json!({"type": "Sequence", "normalizers": steps});
    let nfc = normalizers(&[json!({"type": "NFC"}), prepend.clone(), replace.clone()]);
    let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
    let metaspace = |scheme: &str, split: bool| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split});
    let null = || serde_json::Value::Null;
    for (normalizer, pre_tokenizer, is_before, told) in [
        (normalizers(&[prepend, replace.clone()]), null(), true, None),
        (replace.clone(), null(), false, None),
        (replace, split, false, None),
        (null(), metaspace("never", false), false, None),
        (null(), metaspace("always", false), true, Some("starts with one too")),
        (null(), metaspace("first", false), true, Some("after each control token")),
        (null(), metaspace("never", true), false, Some("no name in GGUF: {\"type\":\"Metaspace\"")),
        (nfc, null(), true, Some("no place for its normalizer: {\"type\":\"NFC\"}")),
    ] {
        let mut json: serde_json::Value = serde_json::from_str(&pieces_json()).unwrap();
        (json["normalizer"], json["pre_tokenizer"]) = (normalizer, pre_tokenizer);
        let json = json.to_string();
        let original = Tokenizer::from_bytes("t", json.as_bytes()).unwrap();
        let (mut metadata, lost) = written(&json, None, 266);
        let before = metadata.bool("tokenizer.ggml.add_space_prefix").unwrap();
        assert_eq!(before, Some(is_before), "{json}");
        assert_eq!(lost.len(), usize::from(told.is_some()), "{lost:?}");
        assert!(told.is_none_or(|told| lost[0].contains(told)), "{lost:?}");
        metadata.retain(|key| key != JSON);
        for text in ["ab", "a b", "", "c  ab"] {
            let ids = original.encode(text, true).unwrap();
            assert_eq!(read(&metadata).tokenizer.encode(text, true).unwrap(), ids, "{text}");
        }
        let ids = original.encode(" ab", true).unwrap();
        let same = read(&metadata).tokenizer.encode(" ab", true).unwrap() == ids;
        assert!(
            same
                || told.is_some_and(
                    |told| told.contains("starts with one") || told.contains("after each")
                ),
            "{json}"
        );
    }
}

#[test]
fn a_token_before_each_text_starts_a_text_though_no_configuration_says_so() {
    for config in [None, Some("{}"), Some(r#"{"bos_token": null, "eos_token": "</s>"}"#)] {
        let (mut metadata, lost) = written(&pieces_json(), config, 270);
        assert_eq!(lost, [""; 0]);
        metadata.retain(|key| key != JSON);
        let read = read(&metadata);
        assert_eq!((read.bos, read.tokenizer.encode("ab", true).unwrap()), (Some(1), vec![1, 265]));
    }
}

#[test]
fn rows_without_a_token_are_known_by_their_name() {
    // As user-defined tokens in the files of mamba2 models, as unknown ones in those of Phi-3.
    for kind in [1_i32, 2, 3, 4, 5] {
        let mut metadata = bytes();
        metadata.set(TYPES, [3_i32, 1, 1, 1, 1, 1, 1, 1, 1, 1, kind]);
        let tokenizer = read(&metadata).tokenizer;
        assert_eq!((tokenizer.token(10), tokenizer.max_id()), (None, 9));
        assert!(!tokenizer.encode_control("<[PAD10]", false).unwrap().contains(&10));
    }
    // Another row's name is a name.
    let mut metadata = bytes();
    metadata.set(TOKENS, ["<s>", "a", "b", "c", "Ġ", "<", ">", "s", "ab", "Ġab", "[PAD9]"]);
    metadata.set(TYPES, [3_i32, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4]);
    assert_eq!(read(&metadata).tokenizer.id("[PAD9]"), Some(10));
}

#[test]
fn what_gguf_cannot_hold_is_refused() {
    let refusal = |json: &str, rows| {
        let tokenizer = Tokenizer::from_bytes("tokenizer.json", json.as_bytes()).unwrap();
        tokenizer.to_gguf(json, None, rows, &mut Metadata::new("x")).unwrap_err().to_string()
    };
    let start = "`tokenizer.json`: tokenizer: cannot be written as GGUF: ";
    assert!(refusal(DEMO, 1023).starts_with(&format!("{start}token `")));
    assert!(refusal(DEMO, 1023).ends_with("` has id 1023, but the model has 1023 rows"));
    let words = json!({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}});
    assert_eq!(
        refusal(&words.to_string(), 1),
        format!("{start}its model is WordLevel, expected BPE")
    );
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None, ..ProptestConfig::with_cases(400)
    })]

    #[test]
    fn hostile_metadata_gives_a_tokenizer_or_an_error(
        model in "gpt2|llama|gemma4",
        pre in "gpt-2|default|llama-bpe|qwen2",
        tokens in prop::collection::vec("[ab▁Ġ ]{0,4}|<0x[0-9A-F]{2}>|\\PC{0,3}", 0..30),
        merges in prop::collection::vec("[ab▁Ġ]{0,2} [ab▁Ġ]{0,2}|\\PC{0,3}", 0..6),
        types in prop::collection::vec(-1_i32..8, 0..30),
        scores in prop::collection::vec(any::<f32>(), 30),
        ids in prop::collection::vec(any::<u8>(), 3),
        text in "[ab▁Ġ <>]{0,12}|\\PC{0,6}",
    ) {
        let mut metadata = Metadata::new("model.gguf");
        metadata.set(MODEL, model);
        metadata.set(PRE, pre);
        metadata.set(TOKENS, tokens.as_slice());
        metadata.set(MERGES, merges.as_slice());
        metadata.set(SCORES, &scores[..tokens.len()]);
        if types.len() >= tokens.len() {
            metadata.set(TYPES, &types[..tokens.len()]);
        }
        for (key, &id) in [BOS, EOS, "tokenizer.ggml.unknown_token_id"].into_iter().zip(&ids) {
            if id < 40 {
                metadata.set(key, u32::from(id));
            }
        }
        if let Ok(Some(read)) = Tokenizer::from_gguf(&metadata) {
            let tokenizer = read.tokenizer;
            prop_assert!((tokenizer.max_id() as usize) < tokens.len());
            if let Ok(ids) = tokenizer.encode(&text, true) {
                prop_assert!(ids.iter().all(|&id| (id as usize) < tokens.len()));
                tokenizer.decode(&ids, false).unwrap();
            }
        }
    }
}
