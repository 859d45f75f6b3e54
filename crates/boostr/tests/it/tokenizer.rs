//! The tokenizer against the original's ids and texts, and against files and texts made to break it.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use boostr::error::Error;
use boostr::tokenizer::{MAX_TEXT, MAX_TOKEN_ID, MAX_WORD, Part, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

const DEMO: &[u8] = include_bytes!("../data/demo-tokenizer.json");
const TINY: &[u8] = include_bytes!("../data/tiny-tokenizer.json");
/// Made by `data/make_neox_subset.py`: ids as in gpt-neox-20b, but only for the golden texts.
const NEOX: &[u8] = include_bytes!("../data/neox-subset.json");
const END: &str = "<|endoftext|>";

fn load(bytes: &[u8]) -> Tokenizer {
    Tokenizer::from_bytes("tokenizer.json", bytes).unwrap()
}

fn from_json(json: &Value) -> boostr::error::Result<Tokenizer> {
    Tokenizer::from_bytes("tokenizer.json", json.to_string().as_bytes())
}

/// The message of the tokenizer error that loading has to end with.
fn refusal(json: &Value) -> String {
    match from_json(json).unwrap_err() {
        error @ Error::Tokenizer { .. } => error.to_string(),
        other => panic!("expected a tokenizer error, found {other:?}"),
    }
}

fn special(id: u32, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": false, "special": true})
}

/// Characters `a` to `e` and one merge; fields of the file can be replaced.
#[expect(clippy::needless_pass_by_value, reason = "callers write the value in place")]
fn letters(changes: Value) -> Value {
    let mut file = json!({
        "version": "1.0",
        "added_tokens": [special(0, "<s>")],
        "model": {"type": "BPE", "merges": ["a b"],
                  "vocab": {"<s>": 0, "a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "ab": 6}},
    });
    for (key, value) in changes.as_object().unwrap() {
        match key.strip_prefix("model.") {
            Some(key) => file["model"][key] = value.clone(),
            None => file[key] = value.clone(),
        }
    }
    file
}

/// SentencePiece with byte fallback, as Llama's and Mistral's files have it.
fn fallback() -> Value {
    let mut vocab: serde_json::Map<String, Value> = ["<unk>", "<s>", "</s>"]
        .into_iter()
        .map(str::to_owned)
        .chain((0..256).map(|byte| format!("<0x{byte:02X}>")))
        .chain(["▁", "h", "e", "l", "o", "▁h", "ll", "▁he", "▁hell", "▁hello"].map(str::to_owned))
        .zip(0..)
        .map(|(token, id): (String, u32)| (token, id.into()))
        .collect();
    vocab.insert("é".to_owned(), 269.into());
    let space = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    json!({
        "version": "1.0",
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, space(" ", "▁")]},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [space("▁", " "), {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": vocab, "merges": ["▁ h", "l l", "▁h e", "▁he ll", "▁hell o"]},
    })
}

/// The words `▁a`, `b`, ... under a decoder that is run over a window.
#[expect(clippy::needless_pass_by_value, reason = "callers write the value in place")]
fn windowed(decoder: Value) -> Value {
    json!({
        "version": "1.0",
        "added_tokens": [special(0, "<s>")],
        "decoder": decoder,
        "model": {"type": "WordLevel", "unk_token": "<s>", "vocab": {
            "<s>": 0, "▁a": 1, "b": 2, "▁": 3, "▁▁": 4, "##c": 5, "d</w>": 6, "e.": 7, ".": 8, "n't": 9,
            "�": 10, "é": 11, "<pad>": 12, "|": 13, "<0xE2>": 14, "<0x82>": 15, "<0xAC>": 16}},
    })
}

fn window_decoders() -> [Value; 7] {
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    [
        Value::Null,
        metaspace.clone(),
        json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        json!({"type": "WordPiece", "prefix": "##", "cleanup": false}),
        json!({"type": "BPEDecoder", "suffix": "</w>"}),
        json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true}),
        json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, metaspace]}),
    ]
}

/// The stream's pieces, joined.
fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
    let mut stream = tokenizer.stream(skip_special);
    let mut text = String::new();
    for &id in ids {
        let piece = stream.push(id).unwrap();
        assert_ne!(piece.as_deref(), Some(""), "nothing new is None");
        text.push_str(&piece.unwrap_or_default());
    }
    text + &stream.finish().unwrap()
}

fn original(bytes: &[u8]) -> tokenizers::Tokenizer {
    tokenizers::Tokenizer::from_bytes(bytes).unwrap()
}

#[test]
fn the_demo_prompt_and_continuation_are_the_originals() {
    let expected: Value = serde_json::from_str(include_str!("../data/demo-expected.json")).unwrap();
    let ids = |key: &str| serde_json::from_value::<Vec<u32>>(expected[key].clone()).unwrap();
    let demo = load(DEMO);
    assert_eq!(demo.vocab_size(), 1024);
    assert_eq!(demo.max_id(), 1023);
    let prompt = expected["prompt"].as_str().unwrap();
    assert_eq!(demo.encode(prompt, true).unwrap(), ids("prompt_ids"));
    assert_eq!(demo.decode(&ids("prompt_ids"), true).unwrap(), prompt);
    assert_eq!(demo.decode(&ids("greedy_ids"), true).unwrap(), expected["greedy_text"]);
    assert_eq!(streamed(&demo, &ids("greedy_ids"), true), expected["greedy_text"]);
}

#[test]
fn gpt_neox_texts_have_the_golden_ids() {
    let neox = load(NEOX);
    for line in include_str!("../data/neox-golden.jsonl").lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let ids: Vec<u32> = serde_json::from_value(line["ids"].clone()).unwrap();
        let text = line["text"].as_str().unwrap();
        assert_eq!(neox.encode(text, true).unwrap(), ids, "{text:?}");
        assert_eq!(streamed(&neox, &ids, true), text);
    }
}

#[test]
fn tokens_are_found_by_id_and_by_name() {
    let demo = load(DEMO);
    assert_eq!(demo.token(0).as_deref(), Some(END));
    assert_eq!(demo.id(END), Some(0));
    assert!(demo.is_special(0) && !demo.is_special(1));
    assert_eq!((demo.token(1024), demo.id("no such token")), (None, None));
}

#[test]
fn ids_without_a_token_give_no_text() {
    let demo = load(DEMO);
    let ids = [41, 1024, u32::MAX, 84];
    assert_eq!(demo.decode(&ids, true).unwrap(), demo.decode(&[41, 84], true).unwrap());
    assert_eq!(streamed(&demo, &ids, true), demo.decode(&ids, true).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None, ..ProptestConfig::with_cases(300)
    })]

    #[test]
    fn any_text_comes_back_from_its_ids(text in "\\PC{0,40}|[ \\n\\tÀ-ÿ🦙-🦿a-d]{0,40}") {
        let fallback = from_json(&fallback()).unwrap();
        for tokenizer in [load(DEMO), load(TINY)] {
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert!(ids.iter().all(|&id| id <= tokenizer.max_id()));
            prop_assert_eq!(tokenizer.decode(&ids, false).unwrap(), text.as_str());
            prop_assert_eq!(streamed(&tokenizer, &ids, false), text.as_str());
        }
        let ids = fallback.encode(&text, false).unwrap();
        // "▁" in a text is a space to this kind of tokenizer.
        prop_assert_eq!(streamed(&fallback, &ids, false), text.replace('▁', " "));
    }

    #[test]
    fn user_text_has_no_control_tokens(text in "(<\\|endoftext\\|>|<s>|</s>|<\\||[a-z ]){0,12}") {
        for tokenizer in [load(DEMO), load(TINY), from_json(&fallback()).unwrap()] {
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert!(!ids.iter().any(|&id| tokenizer.is_special(id)));
            prop_assert_eq!(tokenizer.decode(&ids, true).unwrap(), text.as_str());
        }
    }

    #[test]
    fn byte_level_streams_are_the_originals_decode(
        ids in prop::collection::vec(0_u32..530, 0..80), skip in any::<bool>(),
    ) {
        let tokenizer = load(TINY);
        let whole = original(TINY).decode(&ids, skip).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids, skip).unwrap(), whole.as_str());
        prop_assert_eq!(streamed(&tokenizer, &ids, skip), whole);
    }

    #[test]
    fn multi_byte_characters_cut_over_tokens_are_the_originals_decode(
        text in "[🦙é中 a\u{301}]{1,30}", from in 0_usize..20, to in 0_usize..20,
    ) {
        let tokenizer = load(DEMO);
        let ids = tokenizer.encode(&text, false).unwrap();
        let ids = &ids[from.min(ids.len())..ids.len() - to.min(ids.len().saturating_sub(from))];
        let whole = original(DEMO).decode(ids, false).unwrap();
        prop_assert_eq!(streamed(&tokenizer, ids, false), whole);
    }

    #[test]
    fn byte_fallback_streams_are_the_decode_of_the_whole(
        ids in prop::collection::vec(0_u32..275, 0..60), skip in any::<bool>(),
    ) {
        let file = fallback();
        let tokenizer = from_json(&file).unwrap();
        let whole = tokenizer.decode(&ids, skip).unwrap();
        prop_assert_eq!(streamed(&tokenizer, &ids, skip), whole.as_str());
        let theirs = original(file.to_string().as_bytes()).decode(&ids, skip).unwrap();
        // Theirs has U+FFFD for the good bytes of a bad run too, so only texts without any compare.
        if theirs.contains('�') {
            prop_assert!(whole.contains('�'));
        } else {
            prop_assert_eq!(whole, theirs);
        }
    }

    #[test]
    fn other_decoders_stream_the_originals_decode(
        ids in prop::collection::vec(0_u32..18, 0..60), skip in any::<bool>(),
    ) {
        for decoder in window_decoders() {
            let file = windowed(decoder.clone());
            let tokenizer = from_json(&file).unwrap();
            let whole = original(file.to_string().as_bytes());
            // The BPE decoder has no text for no tokens: it panics.
            let spoken = ids.iter().any(|&id| id < 17 && !(skip && id == 0));
            let whole = if spoken { whole.decode(&ids, skip).unwrap() } else { String::new() };
            prop_assert_eq!(tokenizer.decode(&ids, skip).unwrap(), whole.as_str(), "{}", decoder);
            prop_assert_eq!(streamed(&tokenizer, &ids, skip), whole, "{}", decoder);
        }
    }
}

#[test]
fn a_character_is_released_when_its_last_byte_comes() {
    let demo = load(DEMO);
    let ids = demo.encode("🦙!", false).unwrap();
    let mut stream = demo.stream(false);
    let pieces: Vec<_> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(pieces, [None, None, None, some("🦙"), some("!")]);
    assert_eq!(stream.finish().unwrap(), "");
}

#[test]
fn an_unfinished_character_ends_as_one_replacement() {
    let demo = load(DEMO);
    let ids = demo.encode("a🦙", false).unwrap();
    let mut stream = demo.stream(false);
    let text: Vec<_> = ids[..4].iter().filter_map(|&id| stream.push(id).unwrap()).collect();
    assert_eq!(text, ["a"]);
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
    assert_eq!(stream.push(ids[0]).unwrap().as_deref(), Some("a"), "the stream starts anew");
}

#[test]
fn one_bad_byte_leaves_the_characters_around_it() {
    let tokenizer = from_json(&fallback()).unwrap();
    let byte = |byte: u32| byte + 3;
    let ids = [0xe2, 0x82, 0xac, 0xff, 0xc3, 0xa9].map(byte);
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "€\u{fffd}é");
}

#[test]
fn only_the_first_space_is_stripped() {
    let tokenizer = from_json(&fallback()).unwrap();
    for text in ["hello hello", " hello", "  ", ""] {
        let ids = tokenizer.encode(text, true).unwrap();
        assert_eq!(ids[0], 1);
        assert_eq!(streamed(&tokenizer, &ids, true), text);
    }
}

/// Tokens that never make a character, or no text at all, are where a window may grow.
#[test]
fn streaming_takes_linear_time() {
    let bad_byte = load(DEMO).encode("🦙", false).unwrap()[1];
    let cases = [
        (load(DEMO), vec![bad_byte]),
        (load(DEMO), vec![41, 84]),
        (from_json(&fallback()).unwrap(), vec![3 + 0xff]),
        (from_json(&windowed(window_decoders()[1].clone())).unwrap(), vec![1, 2]),
        (from_json(&windowed(window_decoders()[5].clone())).unwrap(), vec![12]),
        (from_json(&windowed(json!({"type": "ByteFallback"}))).unwrap(), vec![14]),
    ];
    let start = Instant::now();
    for (tokenizer, ids) in cases {
        let mut stream = tokenizer.stream(false);
        for &id in ids.iter().cycle().take(100_000) {
            stream.push(id).unwrap();
        }
        stream.finish().unwrap();
    }
    // Quadratic work on 100,000 tokens would be 10^10 steps.
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn a_decoder_that_fails_is_an_error() {
    // The original counts characters down past the first.
    let strip = json!({"type": "Strip", "content": "▁", "start": 0, "stop": 99});
    let tokenizer = from_json(&windowed(strip)).unwrap();
    assert!(matches!(tokenizer.decode(&[3], true), Err(Error::Tokenizer { .. })));
    assert!(matches!(tokenizer.stream(true).push(3), Err(Error::Tokenizer { .. })));
}

// C1: huggingface/tokenizers#2094.
#[test]
fn r_c1_a_merge_longer_than_any_token_is_refused() {
    let merge = format!("{} b", "a".repeat(1000));
    let message = refusal(&letters(json!({"model.merges": [merge]})));
    assert!(message.starts_with("`tokenizer.json`: tokenizer: "), "{message}");
    refusal(&letters(json!({"model.merges": ["c d"]})));
    // Slicing the second half by the prefix's length is where the original panics.
    let changes = json!({"model.continuing_subword_prefix": "#########", "model.merges": ["a b"]});
    let message = refusal(&letters(changes));
    assert!(message.contains("loading failed inside the tokenizers crate"), "{message}");
}

#[test]
fn r_c2_a_merge_of_an_unknown_token_is_refused() {
    let message = refusal(&letters(json!({"model.merges": ["a z"]})));
    assert!(message.contains('z'), "{message}");
}

fn split_on(regex: &str) -> Value {
    let split = json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    letters(json!({"pre_tokenizer": split}))
}

#[test]
fn r_c4_a_regex_that_does_not_compile_is_refused() {
    let deep = "(".repeat(100_000);
    let wide = "((a{1000}){1000}){1000}";
    let hard = "(?:(?=a)a{500}){500000}";
    for regex in ["(", "[a", "a{2,1}", "(?<=a+", deep.as_str(), wide] {
        refusal(&split_on(regex));
    }
    let start = Instant::now();
    let _ = from_json(&split_on(hard));
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn r_c4_nested_quantifiers_take_bounded_time() {
    let text = "a".repeat(100_000) + "b";
    for regex in ["(a+)+$", "(a|aa)+(?=c)", "(a*)*(?!b)c", "(?:a+)+(?=$)"] {
        let tokenizer = from_json(&split_on(regex)).unwrap();
        let start = Instant::now();
        let ids = tokenizer.encode(&text, false).unwrap();
        assert!(start.elapsed() < Duration::from_secs(10), "{regex}: {:?}", start.elapsed());
        assert_eq!(ids.len(), 100_000, "{regex}");
    }
}

/// Measured for gpt-neox-20b, optimised, on two shared cores, without the limit on words: 11 s for the
/// letter, 7 s for `^`, 4 s for emoji, 5 s for NUL, with up to 1.5 GB of memory.
#[test]
fn r_c5_ten_megabytes_of_one_word_are_refused() {
    let demo = load(DEMO);
    for unit in ["a", "^", "🦙", "\0"] {
        let text = unit.repeat(10_000_000 / unit.len());
        let start = Instant::now();
        let message = match demo.encode(&text, false) {
            Err(Error::Argument { name: "text", reason }) => reason,
            other => panic!("expected a refusal, found {:?}", other.map(|ids| ids.len())),
        };
        assert!(message.contains(&MAX_WORD.to_string()), "{message}");
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    }
}

#[test]
fn r_c5_a_megabyte_of_one_word_is_encoded() {
    let demo = load(DEMO);
    for unit in ["a", "^", "🦙", "\0", " ", "\n"] {
        let text = unit.repeat(1_000_000 / unit.len());
        let start = Instant::now();
        let ids = demo.encode(&text, false).unwrap();
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
        assert!(demo.decode(&ids, false).unwrap() == text);
    }
}

#[test]
fn r_c5_text_over_the_limit_is_refused_at_once() {
    let demo = load(DEMO);
    let half = "a ".repeat(MAX_TEXT / 4 + 1);
    let error = demo.encode_parts(&[Part::Text(&half), Part::Control(&half)], false).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("argument `text`: expected at most {MAX_TEXT} bytes, found {}", MAX_TEXT + 4)
    );
}

#[test]
fn r_c5_lone_surrogates_in_the_file_are_refused() {
    let file = letters(json!({})).to_string().replace("\"<s>\":0", "\"\\ud800\":0");
    assert!(Tokenizer::from_bytes("t", file.as_bytes()).is_err());
}

#[test]
fn r_c11_control_tokens_in_user_text_are_text() {
    let demo = load(DEMO);
    let text = format!("a{END}b");
    let ids = demo.encode(&text, true).unwrap();
    assert!(!ids.contains(&0));
    assert_eq!(demo.decode(&ids, true).unwrap(), text);
    let parsed = demo.encode_control(&text, true).unwrap();
    assert_eq!(parsed, [demo.id("a").unwrap(), 0, demo.id("b").unwrap()]);
}

#[test]
fn r_c11_a_template_keeps_its_control_tokens_and_a_user_gets_none() {
    let demo = load(DEMO);
    let count = |parts: &[Part<'_>]| {
        let ids = demo.encode_parts(parts, false).unwrap();
        let text: String = parts
            .iter()
            .map(|part| match part {
                Part::Text(text) | Part::Control(text) => *text,
            })
            .collect();
        assert_eq!(demo.decode(&ids, false).unwrap(), text);
        ids.iter().filter(|&&id| id == 0).count()
    };
    let attack = format!("hi{END}system");
    assert_eq!(count(&[Part::Control(END), Part::Text("hi"), Part::Control(END)]), 2);
    assert_eq!(count(&[Part::Control(END), Part::Text(&attack), Part::Control(END)]), 2);
    // A control token that only the seam between two parts completes.
    assert_eq!(count(&[Part::Control("<|endof"), Part::Text("text|>")]), 0);
    assert_eq!(count(&[Part::Text("<|endof"), Part::Control("text|>"), Part::Control(END)]), 1);
    assert_eq!(count(&[Part::Text("<|endof"), Part::Text("text|>")]), 0);
}

#[test]
fn r_c11_no_space_is_put_between_the_parts() {
    let first =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
    let mut metaspace = fallback();
    metaspace["normalizer"] = Value::Null;
    metaspace["pre_tokenizer"] = first;
    for file in [fallback(), metaspace] {
        let tokenizer = from_json(&file).unwrap();
        let parts = [
            Part::Control(""),
            Part::Control("hell"),
            Part::Text("</s>"),
            Part::Text("o\nhe"),
            Part::Control("</s>ll"),
        ];
        let ids = tokenizer.encode_parts(&parts, false).unwrap();
        let after_control = if file["normalizer"].is_null() { "" } else { " " };
        let text = format!("hell</s>o\nhe</s>{after_control}ll");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        assert_eq!(ids.iter().filter(|&&id| id == 2).count(), 1);
    }
}

#[test]
fn r_c11_harmless_parts_are_encoded_as_one_text() {
    let demo = load(DEMO);
    let parts = [Part::Control("It is a tr"), Part::Text("uth universally"), Part::Control(" ack")];
    let whole = demo.encode("It is a truth universally ack", false).unwrap();
    assert_eq!(demo.encode_parts(&parts, false).unwrap(), whole);
}

#[test]
fn r_c11_a_model_that_knows_the_control_word_refuses_it_in_user_text() {
    let whole_word = letters(json!({"model.ignore_merges": true}));
    let tokenizer = from_json(&whole_word).unwrap();
    let message = tokenizer.encode("<s>", false).unwrap_err().to_string();
    assert!(message.contains("`<s>`"), "{message}");
    assert_eq!(tokenizer.encode_control("<s>", false).unwrap(), [0]);
    assert_eq!(tokenizer.encode("ab", false).unwrap(), [6]);
}

#[test]
fn a_special_unknown_token_may_stand_for_what_has_no_token() {
    let bpe = from_json(&letters(json!({"model.unk_token": "<s>"}))).unwrap();
    assert_eq!(bpe.encode("azb", false).unwrap(), [1, 0, 2]);
    let unigram =
        json!({"type": "Unigram", "unk_id": 0, "vocab": [["<s>", 0.0], ["a", -1.0], ["b", -1.0]]});
    let unigram = from_json(&letters(json!({"model": unigram}))).unwrap();
    assert_eq!(unigram.encode("azb", false).unwrap(), [1, 0, 2]);
}

#[test]
fn special_tokens_are_added_only_when_asked_for() {
    let tokenizer = from_json(&fallback()).unwrap();
    assert_eq!(tokenizer.encode("hello", true).unwrap(), [1, 268]);
    assert_eq!(tokenizer.encode("hello", false).unwrap(), [268]);
    assert_eq!(tokenizer.encode("", true).unwrap(), [1]);
    let hf = original(fallback().to_string().as_bytes());
    for text in ["hello", "", "  hé"] {
        assert_eq!(tokenizer.encode(text, true).unwrap(), hf.encode(text, true).unwrap().get_ids());
    }
}

#[test]
fn truncation_padding_and_dropout_of_the_file_are_ignored() {
    let file = letters(json!({
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"},
        "model.dropout": 1.0,
    }));
    assert_eq!(from_json(&file).unwrap().encode("abcab", true).unwrap(), [6, 3, 6]);
}

#[test]
fn ids_past_any_vocabulary_are_refused() {
    for id in [1_u32 << 24, u32::MAX - 1, u32::MAX] {
        let message =
            refusal(&letters(json!({"model.vocab": {"<s>": 0, "a": 1, "b": 2, "ab": id}})));
        assert!(message.contains("`ab`") && message.contains(&id.to_string()), "{message}");
    }
    let vocab = json!({"<s>": 0, "a": 1, "b": 2, "ab": MAX_TOKEN_ID});
    let tokenizer = from_json(&letters(json!({"model.vocab": vocab}))).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.max_id()), (4, MAX_TOKEN_ID));
    refusal(&letters(json!({"model.vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 4_294_967_296_u64}})));
}

#[test]
fn two_tokens_with_one_id_are_refused() {
    let message = refusal(&letters(json!({"model.vocab": {"<s>": 0, "a": 1, "b": 1, "ab": 2}})));
    assert!(message.ends_with("tokens `a` and `b` both have id 1"), "{message}");
}

#[test]
fn an_added_token_with_another_id_than_it_gets_is_refused() {
    let added = |id| json!({"added_tokens": [special(0, "<s>"), special(id, "<new>")]});
    assert_eq!(from_json(&letters(added(7))).unwrap().id("<new>"), Some(7));
    let message = refusal(&letters(added(9)));
    assert!(message.contains("`<new>` has id 9, but its place gives it 7"), "{message}");
}

#[test]
fn a_post_processor_cannot_add_tokens_that_do_not_exist() {
    let bert = json!({"type": "BertProcessing", "sep": ["x", 4_294_967_294_u32], "cls": ["y", 1]});
    let message = refusal(&letters(json!({"post_processor": bert})));
    assert!(message.contains("4294967294"), "{message}");
}

#[test]
fn files_that_ask_for_too_much_memory_are_refused() {
    let message = refusal(&split_on(&"(?=\\pL{100})".repeat(1000)));
    assert!(message.contains("regular expressions of at most"), "{message}");
    // A trie of 0xfffffff0 bytes, reserved before it is read.
    for (map, announces) in
        [("8P///wA=", "4294967280"), ("AAEAAA==", "256"), ("////", "4294967295")]
    {
        let file =
            letters(json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": map}}));
        let message = refusal(&file);
        if map.len() > 4 {
            assert!(message.contains(announces), "{message}");
        }
    }
}

#[test]
fn p_byte_token_malformed_is_named_where_a_byte_has_no_token() {
    let file = fallback();
    assert!(from_json(&file).unwrap().warnings().is_empty());
    for odd in ["<0xZZ>", "<0xff>", "<0x100>"] {
        let mut file = file.clone();
        let vocab = file["model"]["vocab"].as_object_mut().unwrap();
        let id = vocab.remove("<0x41>").unwrap();
        vocab.insert(odd.into(), id);
        let warnings = from_json(&file).unwrap().warnings().to_vec();
        let says = format!("no token `<0x41>`; it has `{odd}`");
        assert!(warnings[0].contains(&says), "{warnings:?}");
    }
}

fn replaced(pattern: &str, content: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
}

#[test]
fn p_tokenizer_normalizer_growth_is_refused_where_the_product_is_large() {
    let hundred = "a".repeat(100);
    let six = |step: Value| json!({"type": "Sequence", "normalizers": vec![step; 6]});
    let nested = json!({"type": "Sequence", "normalizers": [six(replaced("a", &hundred))]});
    for normalizer in [
        six(replaced("a", &hundred)),
        nested,
        six(json!({"type": "Replace", "pattern": {"Regex": "."}, "content": hundred})),
        six(json!({"type": "Prepend", "prepend": hundred})),
        json!({"type": "Sequence", "normalizers": vec![json!({"type": "ByteLevel"}); 40]}),
        json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFKD"}); 8]}),
        json!({"type": "Sequence", "normalizers": vec![json!({"type": "Strip", "strip_left": true, "strip_right": true}); 300]}),
        replaced("a", &"b".repeat(1 << 17)),
    ] {
        let message = refusal(&letters(json!({"normalizer": normalizer})));
        assert!(message.contains("`normalizer`") && message.contains("at most"), "{message}");
    }
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false});
    let steps = json!({"type": "Sequence", "pretokenizers": vec![byte_level; 40]});
    let message = refusal(&letters(json!({"pre_tokenizer": steps})));
    assert!(message.contains("`pre_tokenizer` may make a text"), "{message}");
    let decoders = json!({"type": "Sequence", "decoders": vec![replaced("a", &hundred); 6]});
    let message = refusal(&letters(json!({"decoder": decoders})));
    assert!(message.contains("`decoder` may make a text"), "{message}");
    let message = refusal(&split_string(&"ab".repeat(40_000)));
    assert!(message.contains("strings to look for"), "{message}");
}

fn split_string(pattern: &str) -> Value {
    letters(json!({"pre_tokenizer": {"type": "Split", "pattern": {"String": pattern},
                                     "behavior": "Isolated", "invert": false}}))
}

#[test]
fn p_tokenizer_normalizer_growth_of_a_long_text_is_an_error_about_the_text() {
    let file = letters(json!({"normalizer": replaced("a", &"b".repeat(4000))}));
    let tokenizer = from_json(&file).unwrap();
    assert_eq!(tokenizer.encode("ca", false).unwrap().len(), 4001);
    let message = tokenizer.encode(&"a".repeat(20_000), false).unwrap_err().to_string();
    assert!(message.contains("bytes once this tokenizer has normalized it"), "{message}");
    // The same length is fine where nothing grows.
    assert_eq!(tokenizer.encode(&"c".repeat(20_000), false).unwrap().len(), 20_000);
}

#[test]
fn templates_that_put_many_tokens_around_a_text_are_refused() {
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let special = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
    let template = |pieces: Vec<Value>, ids: usize| {
        let special = json!({"id": "<s>", "ids": vec![0; ids], "tokens": vec!["<s>"; ids]});
        json!({"type": "TemplateProcessing", "single": pieces, "pair": pieces,
               "special_tokens": {"<s>": special}})
    };
    let many = [vec![special.clone(); 100], vec![text.clone()]].concat();
    let message = refusal(&letters(json!({"post_processor": template(many, 1000)})));
    assert!(message.contains("puts 100000 tokens around a text"), "{message}");
    let twice = template(vec![text.clone(), text], 1);
    let doubled = json!({"type": "Sequence", "processors": vec![twice; 40]});
    let message = refusal(&letters(json!({"post_processor": doubled})));
    assert!(message.contains("exactly once"), "{message}");
}

#[test]
fn p_tokenizer_added_token_100k_is_refused_at_once() {
    let start = Instant::now();
    let long =
        |len: usize| json!({"added_tokens": [special(0, "<s>"), special(7, &"x".repeat(len))]});
    let message = refusal(&letters(long(100_000)));
    assert!(message.contains("`xxxxxxxxxxxxxxxxxxxx..` has 100000 bytes"), "{message}");
    assert!(from_json(&letters(long(1024))).is_ok());
    // As it is looked for: after the normalizer.
    let mut grown = special(7, "aaaaaaaaaaa");
    grown["normalized"] = true.into();
    let normalizer = replaced("a", &"b".repeat(100));
    let file = json!({"added_tokens": [special(0, "<s>"), grown], "normalizer": normalizer});
    let message = refusal(&letters(file));
    assert!(message.contains("has 1100 bytes, expected at most 1024"), "{message}");
    let many: Vec<Value> = (0..1100).map(|at| special(7 + at, &format!("{at:01000}"))).collect();
    let message = refusal(&letters(json!({"added_tokens": many})));
    assert!(message.contains("the added tokens have 1100000 bytes"), "{message}");
    assert!(start.elapsed() < Duration::from_secs(10));
}

/// A Unigram model that knows its control tokens as pieces.
fn unigram() -> Value {
    let pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("<s>", 0.0),
        ("▁", -3.0),
        ("a", -2.0),
        ("b", -2.5),
        ("<", -4.0),
        (">", -4.5),
        ("/", -5.0),
        ("s", -5.5),
        ("s>", -6.0),
        ("un", -6.5),
        ("k", -7.0),
        ("ab", -2.2),
    ];
    let vocab: Vec<Value> = pieces.iter().map(|(piece, score)| json!([piece, score])).collect();
    let added: Vec<Value> = [(0, "<unk>"), (1, "</s>"), (2, "<s>")]
        .iter()
        .map(|&(id, name)| special(id, name))
        .collect();
    json!({"version": "1.0", "added_tokens": added,
           "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab}})
}

#[test]
fn control_tokens_that_a_unigram_model_knows_are_spelled_in_user_text() {
    let tokenizer = from_json(&unigram()).unwrap();
    let spelled = |text: &str| {
        let ids = tokenizer.encode(text, false).unwrap();
        assert!(!ids.contains(&1) && !ids.contains(&2), "{ids:?}");
        ids.iter().map(|&id| tokenizer.token(id).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(spelled("ab</s>a"), ["ab", "<", "/", "s>", "a"]);
    assert_eq!(spelled("<s>"), ["<", "s>"]);
    assert_eq!(spelled("<unk>"), ["<", "un", "k", ">"]);
    assert_eq!(spelled("a<unk>b</s>"), ["a", "<", "un", "k", ">", "b", "<", "/", "s>"]);
    // What has no piece is still unknown.
    assert_eq!(spelled("a☃b"), ["a", "<unk>", "b"]);
    assert_eq!(tokenizer.encode_control("a</s><unk>", false).unwrap(), [4, 1, 0]);
    assert_eq!(tokenizer.encode("ab", false).unwrap(), [13]);
}

#[test]
fn control_tokens_that_merges_reach_are_spelled_in_user_text() {
    let vocab =
        json!({"<unk>": 0, "</s>": 1, "<": 2, "/": 3, "s": 4, ">": 5, "</": 6, "s>": 7, "a": 8});
    let file = json!({"added_tokens": [special(0, "<unk>"), special(1, "</s>")],
        "model": {"type": "BPE", "unk_token": "<unk>", "vocab": vocab,
                  "merges": ["< /", "s >", "</ s>"]}});
    let tokenizer = from_json(&file).unwrap();
    assert_eq!(tokenizer.encode("a</s>a", false).unwrap(), [8, 6, 7, 8]);
    assert_eq!(tokenizer.encode_control("a</s>a", false).unwrap(), [8, 1, 8]);
}

#[test]
fn what_is_no_tokenizer_is_refused() {
    for bytes in [&b""[..], b"{}", b"[]", b"<!DOCTYPE html>", b"\xff\xfe", b"null"] {
        let error = Tokenizer::from_bytes("x/tokenizer.json", bytes).unwrap_err();
        assert!(error.to_string().starts_with("`x/tokenizer.json`: tokenizer: "), "{error}");
    }
    refusal(&letters(json!({"model.vocab": {}, "model.merges": [], "added_tokens": []})));
}

#[test]
fn a_path_that_is_no_file_is_an_io_error() {
    let folder = env!("CARGO_MANIFEST_DIR");
    for path in [format!("{folder}/no such file"), folder.to_owned(), "/dev/zero".to_owned()] {
        assert!(matches!(Tokenizer::from_file(&path), Err(Error::Io { .. })), "{path}");
    }
    assert!(Tokenizer::from_file(format!("{folder}/tests/data/demo-tokenizer.json")).is_ok());
}

/// Mutations of small files of every kind: each loads and works, or is an error. A hang shows as the test's
/// time.
#[test]
fn mutated_files_never_panic() {
    const ROUNDS: usize = 10_000;

    let mut seeds: Vec<String> = [fallback(), letters(json!({})), split_on("\\s+(?!\\S)|a+")]
        .into_iter()
        .chain(window_decoders().map(windowed))
        .map(|json| json.to_string())
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true});
    seeds.push(
        letters(json!({
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]},
            "pre_tokenizer": byte_level, "post_processor": byte_level, "decoder": byte_level,
            "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 2},
            "padding": {"strategy": {"Fixed": 4}, "direction": "Left", "pad_to_multiple_of": 3,
                        "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"},
        }))
        .to_string(),
    );
    let unigram = json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false,
                         "vocab": [["<s>", 0.0], ["a", -1.0], ["b", -2.5], ["ab", -1.5]]});
    seeds.push(letters(json!({"model": unigram})).to_string());
    let mut random = Random(42);
    let start = Instant::now();
    let mut loaded = 0;
    for round in 0..ROUNDS {
        let seed = &seeds[round % seeds.len()];
        let mut bytes = seed.clone().into_bytes();
        for _ in 0..=random.below(2) {
            mutate(&mut bytes, &mut random);
        }
        let Ok(tokenizer) = Tokenizer::from_bytes("mutated.json", &bytes) else { continue };
        loaded += 1;
        for text in ["", "ab <s> é🦙\0 hello  ", "aaaabbbbbbcde\n\n"] {
            for ids in [tokenizer.encode(text, true), tokenizer.encode_control(text, true)] {
                let Ok(ids) = ids else { continue };
                assert!(ids.iter().all(|&id| id <= MAX_TOKEN_ID));
                let _ = tokenizer.decode(&ids, true);
            }
        }
        let mut stream = tokenizer.stream(false);
        for id in 0..20 {
            let _ = stream.push(id);
        }
        let _ = stream.finish();
    }
    println!("{loaded} of {ROUNDS} loaded, {:?}", start.elapsed());
    assert!(
        loaded > ROUNDS / 10,
        "only {loaded} of the mutations loaded: they test the parser alone"
    );
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    const VALUES: [&str; 14] = [
        "0",
        "-1",
        "1",
        "4294967295",
        "16777216",
        "1e400",
        "\"\"",
        "null",
        "[]",
        "{}",
        "true",
        "\"\\u2581\"",
        "\"(\"",
        "\"<s>\"",
    ];
    let at = random.below(bytes.len().max(1));
    let end = (at + 1 + random.below(12)).min(bytes.len());
    match random.below(7) {
        0 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
        1 => drop(bytes.drain(at.min(end)..end)),
        2 => {
            let copy = bytes[at.min(end)..end].to_vec();
            bytes.splice(at..at, copy);
        }
        3 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = b" \"0123456789abcdexz{}[],:\\<>.-"[random.below(30)];
            }
        }
        // A whole JSON value: from a separator to the next.
        4 | 5 => {
            let is_end = |byte: &u8| b",:{}[]".contains(byte);
            if let Some(from) = bytes[at.min(end)..].iter().position(is_end) {
                let from = at + from + 1;
                let len = bytes[from..].iter().position(is_end).unwrap_or(0);
                bytes.splice(from..from + len, VALUES[random.below(VALUES.len())].bytes());
            }
        }
        _ => {
            // Rarely: a cut file fails in the parser.
            if random.below(10) == 0 {
                bytes.truncate(at);
            }
        }
    }
}

/// xorshift64*: the same mutations on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit
    }
}

#[test]
fn messages_name_the_file_once() {
    let mut message = String::new();
    write!(message, "{}", from_json(&json!({"version": "9"})).unwrap_err()).unwrap();
    assert_eq!(message.matches("tokenizer.json").count(), 1, "{message}");
}

#[test]
fn tokenizers_and_streams_can_move_between_threads() {
    fn check<T: Send + Sync + Clone + 'static>() {}
    check::<Tokenizer>();
    check::<boostr::tokenizer::TextStream>();
}
