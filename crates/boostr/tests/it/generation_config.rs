//! The two small JSON files beside a model: published forms are read, wrong ones are named.

use boostr::generation_config::{GenerationDefaults, SpecialTokens};

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
fn wrong_values_are_named_with_file_and_field() {
    let cases = [
        (r#"{"eos_token_id": "2"}"#, "eos_token_id", "\"2\""),
        (r#"{"eos_token_id": [2, -1]}"#, "eos_token_id", "[2,-1]"),
        (r#"{"eos_token_id": []}"#, "eos_token_id", "an empty list"),
        (r#"{"eos_token_id": 16777216}"#, "eos_token_id", "16777216"),
        (r#"{"eos_token_id": 2.5}"#, "eos_token_id", "2.5"),
        (r#"{"bos_token_id": [1]}"#, "bos_token_id", "[1]"),
        (r#"{"temperature": "hot"}"#, "temperature", "\"hot\""),
        (r#"{"temperature": -0.5}"#, "temperature", "-0.5"),
        (r#"{"temperature": 1e200}"#, "temperature", "1e+200"),
        (r#"{"top_p": -0.5}"#, "top_p", "-0.5"),
        (r#"{"top_p": 1.5}"#, "top_p", "1.5"),
        (r#"{"top_k": -1}"#, "top_k", "-1"),
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
