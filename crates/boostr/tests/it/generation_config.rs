//! The two small JSON files beside a model: published forms are read, wrong ones are named.

use boostr::generation_config::{GenerationDefaults, SpecialTokens};
use boostr::sample::Suppression;

fn defaults(json: &str) -> Result<GenerationDefaults, String> {
    GenerationDefaults::from_json("m/generation_config.json", json).map_err(|e| e.to_string())
}

fn special(json: &str) -> Result<SpecialTokens, String> {
    SpecialTokens::from_json("m/tokenizer_config.json", json).map_err(|e| e.to_string())
}

#[test]
fn the_fixtures_are_read() {
    let tiny = defaults(include_str!("../data/tiny-generation_config.json")).unwrap();
    let expected = GenerationDefaults {
        bos_token_id: Some(1),
        eos_token_id: Some(vec![2]),
        ..GenerationDefaults::default()
    };
    assert_eq!(tiny, expected);
    let demo = defaults(include_str!("../data/demo-generation_config.json")).unwrap();
    assert_eq!((demo.temperature, demo.top_p, demo.do_sample), (Some(0.7), Some(0.95), Some(true)));

    let tiny = special(include_str!("../data/tiny-tokenizer_config.json")).unwrap();
    assert_eq!(tiny.bos_token.as_deref(), Some("<s>"));
    assert_eq!((tiny.eos_token.as_deref(), tiny.add_bos_token), (Some("</s>"), None));
    let demo = special(include_str!("../data/demo-tokenizer_config.json")).unwrap();
    assert_eq!(demo.add_bos_token, Some(false));
}

#[test]
fn every_field_is_read() {
    let json = r#"{"bos_token_id": 16777215, "eos_token_id": [0, 5], "do_sample": false, "temperature": 0,
        "top_k": 50, "top_p": 1, "min_p": 0.5, "repetition_penalty": 1.1, "max_new_tokens": 2147483648,
        "transformers_version": "5", "unknown": {"top_k": -1}}"#;
    let expected = GenerationDefaults {
        bos_token_id: Some(16_777_215),
        eos_token_id: Some(vec![0, 5]),
        do_sample: Some(false),
        temperature: Some(0.0),
        top_k: Some(50),
        top_p: Some(1.0),
        min_p: Some(0.5),
        repetition_penalty: Some(1.1),
        max_new_tokens: Some(2_147_483_648),
        suppression: Suppression::default(),
        not_acted_on: Vec::new(),
    };
    assert_eq!(defaults(json).unwrap(), expected);
}

#[test]
fn null_and_absent_are_the_same() {
    let null =
        r#"{"bos_token_id": null, "eos_token_id": null, "top_p": null, "max_new_tokens": null}"#;
    assert_eq!(defaults(null).unwrap(), defaults("{}").unwrap());
    assert_eq!(special(r#"{"bos_token": null, "add_bos_token": null}"#), special("{}"));
}

#[test]
fn what_other_programs_write_for_none_is_none() {
    let json = r#"{"bos_token_id": -1, "eos_token_id": -1, "top_k": -1, "max_new_tokens": -1}"#;
    let none = GenerationDefaults { top_k: Some(0), ..GenerationDefaults::default() };
    assert_eq!(defaults(json).unwrap(), none);
    for (ids, want) in [("[]", None), ("[-1]", None), ("[2, -1, 5]", Some(vec![2, 5]))] {
        let json = format!(r#"{{"eos_token_id": {ids}}}"#);
        assert_eq!(defaults(&json).unwrap().eos_token_id, want, "{ids}");
    }
}

#[test]
fn what_is_not_acted_on_is_named() {
    let json = r#"{"suppress_tokens": [7], "no_repeat_ngram_size": 3, "forced_eos_token_id": 2,
        "num_beams": 4, "stop_strings": "END"}"#;
    let named = ["forced_eos_token_id", "no_repeat_ngram_size", "num_beams", "stop_strings"];
    assert_eq!(defaults(json).unwrap().not_acted_on, named);
    let off = r#"{"min_length": 0, "sequence_bias": null, "num_beams": 1,
        "typical_p": 1.0, "no_repeat_ngram_size": 0, "constraints": {}, "max_length": 20}"#;
    assert_eq!(defaults(off).unwrap().not_acted_on, [""; 0]);
}

#[test]
fn tokens_that_the_author_keeps_out_are_read() {
    let read = |json: &str| defaults(json).unwrap().suppression;
    let suppression = |always: &[u32], first: &[u32], words: &[&[u32]]| {
        let words = words.iter().map(|word| word.to_vec()).collect();
        Suppression::new(always.to_vec(), first.to_vec(), words).unwrap()
    };
    let json = r#"{"suppress_tokens": [7, 9, 7], "begin_suppress_tokens": [220, 50256],
        "bad_words_ids": [[3], [4, 5], [4, 5, 6]]}"#;
    assert_eq!(read(json), suppression(&[3, 7, 9], &[220, 50256], &[&[4, 5], &[4, 5, 6]]));
    assert_eq!(read(r#"{"suppress_tokens": 7}"#), suppression(&[7], &[], &[]));
    // An end of the file is no bad word, but it may be suppressed.
    let ends = r#"{"eos_token_id": [2, 3], "bad_words_ids": [[2], [3], [4], [4, 2]]"#;
    assert_eq!(read(&format!("{ends}}}")), suppression(&[4], &[], &[&[4, 2]]));
    let both = format!(r#"{ends}, "suppress_tokens": [2]}}"#);
    assert_eq!(read(&both), suppression(&[2, 4], &[], &[&[4, 2]]));
    for none in [
        r#"{"suppress_tokens": [], "begin_suppress_tokens": [], "bad_words_ids": []}"#,
        r#"{"suppress_tokens": null, "begin_suppress_tokens": null, "bad_words_ids": null}"#,
        r#"{"suppress_tokens": [-1], "begin_suppress_tokens": -1}"#,
    ] {
        assert!(read(none).is_empty(), "{none}");
    }
    // A list as long as a vocabulary is no problem; a million sequences are.
    let all: Vec<u32> = (0..300_000).collect();
    assert_eq!(read(&format!(r#"{{"suppress_tokens": {all:?}}}"#)), suppression(&all, &[], &[]));
    for (words, found) in [
        (vec![vec![1, 2]; 1_000_000], "expected at most 65536, found 1000000"),
        (vec![vec![1; 1000]; 2000], "expected at most 1048576 tokens in all, found 2000000"),
    ] {
        let error = defaults(&format!(r#"{{"bad_words_ids": {words:?}}}"#)).unwrap_err();
        assert!(error.contains("`bad_words_ids`") && error.contains(found), "{error}");
    }
}

#[test]
fn wrong_values_are_named_with_file_and_field() {
    let cases = [
        (r#"{"suppress_tokens": "7"}"#, "suppress_tokens", "\"7\""),
        (r#"{"suppress_tokens": [-2]}"#, "suppress_tokens", "[-2]"),
        (r#"{"begin_suppress_tokens": [[1]]}"#, "begin_suppress_tokens", "[[1]]"),
        (r#"{"bad_words_ids": [1, 2]}"#, "bad_words_ids", "[1,2]"),
        (r#"{"bad_words_ids": [[]]}"#, "bad_words_ids", "[[]]"),
        (r#"{"bad_words_ids": [[-1]]}"#, "bad_words_ids", "[[-1]]"),
        (r#"{"bad_words_ids": 5}"#, "bad_words_ids", "5"),
        (r#"{"eos_token_id": "2"}"#, "eos_token_id", "\"2\""),
        (r#"{"eos_token_id": [2, -2]}"#, "eos_token_id", "[2,-2]"),
        (r#"{"bos_token_id": -2}"#, "bos_token_id", "-2"),
        (r#"{"eos_token_id": 16777216}"#, "eos_token_id", "16777216"),
        (r#"{"eos_token_id": 2.5}"#, "eos_token_id", "2.5"),
        (r#"{"bos_token_id": [1]}"#, "bos_token_id", "[1]"),
        (r#"{"temperature": "hot"}"#, "temperature", "\"hot\""),
        (r#"{"temperature": -0.5}"#, "temperature", "-0.5"),
        (r#"{"temperature": 1e200}"#, "temperature", "1e+200"),
        (r#"{"top_p": -0.5}"#, "top_p", "-0.5"),
        (r#"{"top_p": 1.5}"#, "top_p", "1.5"),
        (r#"{"top_k": -2}"#, "top_k", "-2"),
        (r#"{"top_k": 1.5}"#, "top_k", "1.5"),
        (r#"{"min_p": 2}"#, "min_p", "2"),
        (r#"{"repetition_penalty": 0}"#, "repetition_penalty", "0"),
        (r#"{"max_new_tokens": 0}"#, "max_new_tokens", "0"),
        (r#"{"max_new_tokens": 1e30}"#, "max_new_tokens", "1e+30"),
        (r#"{"do_sample": 1}"#, "do_sample", "1"),
        (r#"{"do_sample": {}}"#, "do_sample", "an object"),
    ];
    for (json, field, found) in cases {
        let message = defaults(json).unwrap_err();
        let start = format!("`m/generation_config.json`: field `{field}`: expected ");
        assert!(message.starts_with(&start), "{message}");
        assert!(message.ends_with(&format!(", found {found}")), "{message}");
    }
}

#[test]
fn a_number_that_is_zero_as_an_f32_is_zero() {
    assert!(defaults(r#"{"repetition_penalty": 1e-60}"#).is_err());
    assert_eq!(defaults(r#"{"temperature": 1e-60}"#).unwrap().temperature, Some(0.0));
}

#[test]
fn a_token_is_a_string_or_an_object_with_content() {
    let json = r#"{"bos_token": {"content": "<s>", "lstrip": false}, "pad_token": "", "unk_token": "<unk>"}"#;
    let tokens = special(json).unwrap();
    assert_eq!(tokens.bos_token.as_deref(), Some("<s>"));
    assert_eq!((tokens.pad_token.as_deref(), tokens.eos_token), (Some(""), None));
    for json in [r#"{"bos_token": 1}"#, r#"{"bos_token": {}}"#, r#"{"bos_token": {"content": 1}}"#]
    {
        let message = special(json).unwrap_err();
        assert!(message.starts_with("`m/tokenizer_config.json`: field `bos_token`: "), "{message}");
    }
    assert!(special(r#"{"add_bos_token": "yes"}"#).unwrap_err().contains("found \"yes\""));
}

#[test]
fn files_that_are_no_object_are_refused() {
    for json in ["", "[]", "null", "{", &"[".repeat(100_000)] {
        let message = defaults(json).unwrap_err();
        assert!(message.starts_with("`m/generation_config.json`: "), "{message}");
    }
    let long = format!("[{}]", "\"é\",".repeat(100_000) + "1");
    assert!(defaults(&long).unwrap_err().len() < 250);
}
