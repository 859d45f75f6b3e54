//! Grammars over real tokenizers: what is sampled under one follows it, and hostile ones are refused in time.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use boostr::Error;
use boostr::grammar::{
    Grammar, MAX_COUNTED, MAX_DEPTH, MAX_KEYS, MAX_LARK, MAX_PATTERNS, MAX_REGEX, MAX_SCHEMA,
    MAX_VALUES, Vocabulary,
};
use boostr::sample::{Constraint, Sampler, SamplerConfig};
use boostr::tokenizer::Tokenizer;
use regex::Regex;
use serde_json::{Map, Value, json};

use crate::constrained::{Setting, TOKENIZERS, tokenizer, valid};

fn schemas() -> Vec<Value> {
    vec![
        json!({"type": "object"}),
        json!({
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 12},
                "age": {"type": "integer", "minimum": 0, "maximum": 130},
                "score": {"type": "number"},
                "tags": {"type": "array", "items": {"enum": ["red", "green", "blue \"quoted\" é"]}, "minItems": 1, "maxItems": 3},
                "ok": {"type": "boolean"},
            },
            "required": ["name", "age", "tags"],
            "additionalProperties": false,
        }),
        json!({"anyOf": [
            {"type": "null"},
            {"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind", "x"], "additionalProperties": false},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
        ]}),
        json!({
            "type": "object",
            "properties": {"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"}},
            "required": ["code"],
            "additionalProperties": {"type": "integer"},
        }),
        // A tree: it recurs, and it ends.
        json!({
            "$ref": "#/$defs/node",
            "$defs": {"node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": -5, "maximum": 5},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": false,
            }},
        }),
    ]
}

#[test]
fn what_is_sampled_under_a_schema_is_json_that_validates() {
    for name in TOKENIZERS {
        let setting = Setting::new(name);
        for schema in schemas() {
            let grammar = Grammar::json_schema(&schema).unwrap();
            let start = setting.constraint(&grammar);
            let mut texts = HashSet::new();
            for seed in 0..25 {
                let ids = setting.sampled(&mut *start.fork(), seed);
                let text = setting.text(&ids);
                let value: Value = serde_json::from_str(&text)
                    .unwrap_or_else(|error| panic!("{name}, seed {seed}: {error}: {text}"));
                assert!(
                    valid(&schema, &schema, &value),
                    "{name}, seed {seed}: {text} for {schema}"
                );
                texts.insert(text);
            }
            assert!(texts.len() > 5, "{schema} gives always the same: {texts:?}");
        }
    }
}

/// Vocabularies of 32,000 and 50,257 tokens: made in time, masks in time.
#[test]
fn whole_vocabularies_of_published_models_take_little_time() {
    for name in ["llama-spm", "gpt-2"] {
        let start = Instant::now();
        let setting = Setting::whole(name);
        println!("{name}: made in {:?}", start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        let schema = &schemas()[1];
        let grammar = Grammar::json_schema(schema).unwrap();
        let start = Instant::now();
        let mut tokens = 0;
        for seed in 0..5 {
            let ids = setting.sampled(&mut *setting.constraint(&grammar), seed);
            let value: Value = serde_json::from_str(&setting.text(&ids)).unwrap();
            assert!(valid(schema, schema, &value), "{value}");
            tokens += ids.len();
        }
        println!("{name}: {tokens} tokens in {:?}", start.elapsed());
    }
    let setting = Setting::whole("gpt-2");
    let grammar = Grammar::json_schema(&schemas()[1]).unwrap();
    assert!(setting.follows(&grammar, r#"{"name": "Ann Lee", "age": 17, "tags": ["red"]}"#));
    assert!(!setting.follows(&grammar, r#"{"name": "Ann Lee", "age": 170, "tags": ["red"]}"#));
}

#[test]
fn texts_that_break_a_schema_are_refused() {
    let setting = Setting::new("qwen2");
    let schemas = schemas();
    let person = Grammar::json_schema(&schemas[1]).unwrap();
    for (text, expected) in [
        (r#"{"name": "Ann", "age": 7, "tags": ["red"]}"#, true),
        (r#"{"name":"Ann","age":7,"score":-1.5e3,"tags":["red"],"ok":true}"#, true),
        ("{\n  \"name\": \"Ann\",\n  \"age\": 7,\n  \"tags\": [\"red\"]\n}", true),
        (r#"{"name": "Ann", "age": 131, "tags": ["red"]}"#, false),
        (r#"{"name": "Ann", "age": 7, "tags": []}"#, false),
        (r#"{"name": "Ann", "age": 7, "tags": ["pink"]}"#, false),
        (r#"{"name": "", "age": 7, "tags": ["red"]}"#, false),
        (r#"{"name": "Ann", "age": 7, "tags": ["red"], "more": 1}"#, false),
        (r#"{"name": "Ann", "age": 7"#, false),
        (r#" {"name": "Ann", "age": 7, "tags": ["red"]}"#, false),
        (r#"{"name":   "Ann", "age": 7, "tags": ["red"]}"#, false),
        ("null", false),
    ] {
        assert_eq!(setting.follows(&person, text), expected, "{text}");
    }
    let tree = Grammar::json_schema(&schemas[4]).unwrap();
    assert!(setting.follows(&tree, r#"{"value": 1, "children": [{"value": 2}, {"value": -3}]}"#));
    assert!(!setting.follows(&tree, r#"{"value": 1, "children": [{"value": 9}]}"#));
    let object = Grammar::json_object();
    assert!(setting.follows(&object, r#"{"any": [1, {"thing": null}], "": "é🦙\n"}"#));
    assert!(!setting.follows(&object, "[1]"));
}

#[test]
fn a_regular_expression_matches_the_whole_text() {
    for name in TOKENIZERS {
        let setting = Setting::new(name);
        for pattern in [
            "[0-9]{4}-[0-9]{2}-[0-9]{2}",
            "(yes|no|perhaps not)",
            r"a{2,5}(b|ç)*\.",
            r"[\p{Greek}]{1,6} = -?[0-9]+(\.[0-9]{1,3})?",
        ] {
            let whole = Regex::new(&format!("^(?:{pattern})$")).unwrap();
            let start = setting.constraint(&Grammar::regex(pattern).unwrap());
            for seed in 0..20 {
                let text = setting.text(&setting.sampled(&mut *start.fork(), seed));
                assert!(whole.is_match(&text), "{name}: {text:?} for {pattern}");
            }
        }
    }
}

#[test]
fn lark_rules_are_followed() {
    let rules = r#"
        start: sum "=" NUMBER
        sum: term ("+" term)*
        term: NUMBER | "(" sum ")"
        NUMBER: /[1-9][0-9]{0,2}/
    "#;
    let grammar = Grammar::lark(rules).unwrap();
    for name in ["default", "qwen2"] {
        let setting = Setting::new(name);
        for (text, expected) in [
            ("1+2=3", true),
            ("(1+(20))+300=4", true),
            ("1+=3", false),
            ("((1)=1", false),
            ("0=1", false),
        ] {
            assert_eq!(setting.follows(&grammar, text), expected, "{name}: {text}");
        }
    }
}

#[test]
fn rules_of_llama_cpp_are_followed_those_that_may_be_empty_too() {
    let json = r#"
        root   ::= ws value
        value  ::= (object | "[" ws (value ("," ws value)*)? "]" | word | number | "true") ws
        object ::= "{" ws (word ws ":" ws value ("," ws word ws ":" ws value)*)? "}"
        word   ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\nt] | "u" [0-9a-fA-F]{4}))* "\""
        number ::= "-"? ("0" | [1-9] [0-9]{0,5}) ("." [0-9]+)?
        ws     ::= | " " | "\n" [ \t]{0,20}
    "#;
    let sums = "root ::= (sum \"=\" ws term \"\\n\")+\nsum ::= term ([-+] ws term)*\n\
        term ::= (\"(\" ws sum \")\" | [a-z] [a-z0-9]*) ws\nws ::= [ \\t]*";
    let empty =
        "root ::= none a{0} \"x\" (none | b)\nnone ::= \"\"\na ::= \"a\" a?\nb ::= [b]{0,2}";
    let chain = "root ::= a b a\na ::= b? [x]*\nb ::= c*\nc ::= [y]?";
    for name in ["default", "qwen2"] {
        let setting = Setting::new(name);
        for (rules, text, expected) in [
            (json, r#"{"a": [1, -2.5, "x\ny"],"b":{}}"#, true),
            (json, "\n\t [true\n,true ]", true),
            (json, "[]", true),
            (json, "[  1]", false),
            (json, r#"{"a" 1}"#, false),
            (sums, "a+(b1 - c)= d\nx=y\n", true),
            (sums, "a=\tb\n", true),
            (sums, "a=b", false),
            (empty, "x", true),
            (empty, "xbb", true),
            (empty, "ax", false),
            (empty, "xbbb", false),
            (chain, "", true),
            (chain, "yxyyx", true),
            (chain, "z", false),
        ] {
            let grammar = Grammar::rules(rules).unwrap();
            assert_eq!(setting.follows(&grammar, text), expected, "{name}: {text} of {rules}");
        }
    }
}

#[test]
fn a_text_that_may_end_allows_every_end_and_one_that_must_is_complete() {
    let setting = Setting::new("qwen2");
    let mut constraint = setting.constraint(&Grammar::regex("ab?").unwrap());
    let id = |text: &str| setting.tokenizer.encode(text, false).unwrap()[0];
    let ends = |constraint: &mut Box<dyn Constraint>| {
        let allowed = constraint.allowed().unwrap();
        setting.eos.iter().filter(|&&id| allowed.contains(id)).count()
    };
    assert_eq!(ends(&mut constraint), 0);
    constraint.accept(id("a")).unwrap();
    assert_eq!(ends(&mut constraint), setting.eos.len());
    assert!(!constraint.is_complete());

    let mut ended = constraint.fork();
    ended.accept(setting.eos[1]).unwrap();
    assert!(ended.is_complete());

    constraint.accept(id("b")).unwrap();
    assert!(constraint.is_complete());
    let mut ids = setting.eos.clone();
    ids.sort_unstable();
    assert_eq!(constraint.allowed().unwrap().iter().collect::<Vec<_>>(), ids);
    let error = constraint.accept(id("b")).unwrap_err().to_string();
    assert!(error.starts_with("argument `regex`: token "), "{error}");
}

#[test]
fn a_vocabulary_without_an_end_is_complete_only_where_nothing_may_follow() {
    let (tokenizer, _) = tokenizer("qwen2");
    let vocabulary = Vocabulary::new(&tokenizer, &[], tokenizer.max_id() as usize + 1).unwrap();
    let mut constraint = vocabulary.constraint(&Grammar::regex("ab?").unwrap()).unwrap();
    let ids = tokenizer.encode("a", false).unwrap();
    constraint.accept(ids[0]).unwrap();
    let allowed: Vec<u32> = constraint.allowed().unwrap().iter().collect();
    assert_eq!(allowed, tokenizer.encode("b", false).unwrap());
    constraint.accept(allowed[0]).unwrap();
    assert!(constraint.is_complete());
}

#[test]
fn forks_go_their_own_way() {
    let setting = Setting::new("default");
    let grammar = Grammar::json_schema(&schemas()[1]).unwrap();
    let alone = setting.sampled(&mut *setting.constraint(&grammar), 3);
    let mut first = setting.constraint(&grammar);
    for &id in &alone[..4] {
        first.accept(id).unwrap();
    }
    let before: Vec<u32> = first.allowed().unwrap().iter().collect();
    let mut second = first.fork();
    setting.sampled(&mut *second, 8);
    assert!(second.is_complete());
    assert_eq!(first.allowed().unwrap().iter().collect::<Vec<_>>(), before);
    drop(second);
    for &id in &alone[4..] {
        first.accept(id).unwrap();
    }
    let json: Value = serde_json::from_str(&setting.text(&alone)).unwrap();
    assert!(valid(&schemas()[1], &schemas()[1], &json));
}

/// As many constraints of one vocabulary as there are threads, each with the results that it has alone.
#[test]
fn a_vocabulary_is_shared_by_threads() {
    let setting = Setting::new("mistral-v3");
    let schemas = schemas();
    let run = |seed: usize| {
        let grammar = Grammar::json_schema(&schemas[seed % schemas.len()]).unwrap();
        setting.sampled(&mut *setting.constraint(&grammar), seed as u64)
    };
    let alone: Vec<_> = (0..8).map(run).collect();
    let together: Vec<_> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..8).map(|seed| scope.spawn(move || run(seed))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
}

#[test]
fn special_tokens_are_no_text_and_other_added_ones_are() {
    let setting = Setting::new("qwen2");
    let id = |token: &str| setting.tokenizer.id(token).unwrap();
    let mut any = setting.constraint(&Grammar::regex("(?s:.)*").unwrap());
    let allowed = any.allowed().unwrap();
    for token in ["<|im_start|>", "<|vision_pad|>"] {
        assert!(!allowed.contains(id(token)), "{token}");
        assert!(any.accept(id(token)).is_err(), "{token}");
    }
    for token in ["<tool_call>", "</tool_call>"] {
        assert!(allowed.contains(id(token)), "{token}");
    }
    // The characters of a control token's name are text.
    let spelled = Grammar::regex(r"<\|im_start\|>").unwrap();
    assert!(setting.follows(&spelled, "<|im_start|>"));
    // Lark can ask for one by its number.
    let start = id("<|im_start|>");
    let rules = format!("start: <[{start}]> \"a\"");
    let mut control = setting.constraint(&Grammar::lark(rules).unwrap());
    assert_eq!(control.allowed().unwrap().iter().collect::<Vec<_>>(), [start]);
    control.accept(start).unwrap();
    control.accept(setting.tokenizer.encode("a", false).unwrap()[0]).unwrap();
    assert!(control.is_complete());
}

#[test]
fn byte_tokens_spell_what_no_other_token_does() {
    let setting = Setting::new("mistral-v3");
    let grammar = Grammar::regex("🦙ў").unwrap();
    let ids = setting.sampled(&mut *setting.constraint(&grammar), 1);
    assert_eq!(setting.text(&ids), "🦙ў");
    let byte = setting.tokenizer.id("<0xF0>").unwrap();
    assert_eq!(setting.tokenizer.bytes(byte).unwrap(), Some(vec![0xf0]));
    let space = setting.tokenizer.id("▁").unwrap();
    assert_eq!(setting.tokenizer.bytes(space).unwrap(), Some(vec![b' ']));
    assert_eq!(setting.tokenizer.bytes(setting.tokenizer.max_id() + 1).unwrap(), None);
}

/// For all tokens but control ones, the bytes are what a stream gives in the middle of a text.
#[test]
fn the_bytes_of_a_token_are_those_that_it_adds_to_a_text() {
    for name in TOKENIZERS {
        let (tokenizer, _) = tokenizer(name);
        let before = tokenizer.encode("a", false).unwrap();
        let mut whole = 0;
        for id in 0..=tokenizer.max_id() {
            let Some(bytes) = tokenizer.bytes(id).unwrap() else { continue };
            let Ok(text) = String::from_utf8(bytes) else { continue };
            let all = tokenizer.decode(&[&before[..], &[id]].concat(), false).unwrap();
            let start = tokenizer.decode(&before, false).unwrap();
            assert_eq!(all, start + &text, "{name}: {:?}", tokenizer.token(id));
            whole += 1;
        }
        assert!(whole > 300, "{name}: {whole} tokens");
    }
}

#[test]
fn ids_beyond_the_limit_are_never_allowed() {
    let (tokenizer, eos) = tokenizer("default");
    let vocabulary = Vocabulary::new(&tokenizer, &eos, 300).unwrap();
    let mut constraint = vocabulary.constraint(&Grammar::regex("(?s:.)+").unwrap()).unwrap();
    let allowed = constraint.allowed().unwrap();
    assert!(allowed.len() > 100 && allowed.limit() == 300);
    assert!(constraint.accept(300).is_err() && constraint.accept(u32::MAX).is_err());
    // One refusal does not spoil what follows.
    constraint.accept(allowed.iter().next().unwrap()).unwrap();
}

#[test]
fn a_sampler_draws_from_what_a_grammar_allows() {
    let setting = Setting::new("default");
    let limit = setting.tokenizer.max_id() as usize + 1;
    let grammar = Grammar::regex("[a-z]{3} [a-z]{3}").unwrap();
    let config = SamplerConfig { seed: 4, temperature: 2.0, ..SamplerConfig::default() };
    let mut sampler = Sampler::new(config, limit).unwrap();
    let mut constraint = setting.constraint(&grammar);
    let (mut ids, logits) = (Vec::new(), vec![0.0; limit]);
    while !constraint.is_complete() {
        let allowed = constraint.allowed().unwrap();
        let id = sampler.choose(&logits, &ids, 0, Some(&allowed), None).unwrap().id;
        constraint.accept(id).unwrap();
        ids.push(id);
    }
    assert!(Regex::new("^[a-z]{3} [a-z]{3}$").unwrap().is_match(&setting.text(&ids)));
}

#[test]
fn a_vocabulary_that_cannot_spell_a_text_is_an_error_and_no_hang() {
    let (tokenizer, eos) = tokenizer("mistral-v3");
    // Without the ids of letters, `q` has a byte token; without those too there is nothing.
    let vocabulary = Vocabulary::new(&tokenizer, &eos, 3).unwrap();
    let started = Instant::now();
    let outcome = vocabulary
        .constraint(&Grammar::regex("q").unwrap())
        .and_then(|mut constraint| constraint.allowed());
    let error = outcome.unwrap_err().to_string();
    assert_eq!(error, "argument `regex`: no token of the vocabulary can go on with the text");
    assert!(started.elapsed() < Duration::from_secs(1));
}

#[test]
fn a_tokenizer_whose_tokens_have_no_bytes_of_their_own_is_unsupported() {
    let json = r###"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
        "vocab": {"a": 0, "##b": 1}}}"###;
    let tokenizer = Tokenizer::from_bytes("tokenizer.json", json.as_bytes()).unwrap();
    let error = Vocabulary::new(&tokenizer, &[], 2).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }));
    assert!(error.to_string().contains("ByteLevel and ByteFallback"), "{error}");
}

fn fields(count: usize) -> Map<String, Value> {
    (0..count).map(|i| (format!("f{i}"), json!({"type": "string"}))).collect()
}

fn patterns(count: usize) -> Vec<Value> {
    (0..count).map(|i| json!({"pattern": format!("a{{{i}}}b")})).collect()
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("f{i}")).collect()
}

/// Definitions of which each is made of references to the next.
fn chain(link: &dyn Fn(String) -> Value) -> Value {
    let definitions: Map<String, Value> = (0..400)
        .map(|i| (format!("d{i}"), link(format!("#/$defs/d{}", i + 1))))
        .chain([("d400".to_owned(), json!({"type": "object"}))])
        .collect();
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

/// The reason for which a schema cannot be used, in less than a second.
fn refused(setting: &Setting, schema: &Value) -> String {
    let start = Instant::now();
    let outcome = Grammar::json_schema(schema).and_then(|g| setting.vocabulary.constraint(&g));
    let shown = schema.to_string().chars().take(100).collect::<String>();
    assert!(start.elapsed() < Duration::from_secs(1), "{:?} for {shown}", start.elapsed());
    match outcome {
        Err(Error::Argument { name: "json_schema", reason }) => {
            assert!(!reason.contains("panic") && reason.len() < 1000, "{reason}");
            reason
        }
        Err(other) => panic!("{other} for {shown}"),
        Ok(_) => panic!("{shown} is taken"),
    }
}

#[test]
fn r_d15_hostile_schemas_are_refused_by_name() {
    let setting = Setting::new("default");
    let deep = |levels: usize| (0..levels).fold(json!(true), |inner, _| json!({"items": inner}));
    let string = |more: Value| json!({"type": "string", "pattern": more});
    let wide: Vec<Value> = (0..400_000).map(|i| json!(format!("value number {i}"))).collect();
    for (schema, expected) in [
        (json!([]), "expected an object, found a list"),
        (json!("text"), "expected an object, found a text"),
        (json!(null), "expected an object, found null"),
        (json!({"type": 7}), ""),
        (json!({"type": "wrong"}), ""),
        (json!({"properties": [1]}), ""),
        (json!({"$ref": "http://example.com/schema.json"}), "$ref"),
        (json!({"$ref": "file:///etc/passwd"}), "$ref"),
        (json!({"properties": {"a": {"$ref": "../other.json#/a"}}}), "$ref"),
        (json!({"$ref": "#/$defs/nothing"}), "not found"),
        (json!({"$ref": "#"}), ""),
        (
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
            "",
        ),
        (
            json!({"type": "object", "properties": {"self": {"$ref": "#"}}, "required": ["self"]}),
            "",
        ),
        (json!({"enum": []}), ""),
        (json!({"type": "integer", "minimum": 5, "maximum": 3}), "nsatisfiable"),
        (json!({"allOf": [{"type": "string"}, {"type": "integer"}]}), "nsatisfiable"),
        (json!({"type": "object", "properties": {"a": false}, "required": ["a"]}), "nsatisfiable"),
        (json!({"type": "array", "minItems": 3, "maxItems": 2}), "nsatisfiable"),
        (json!({"type": "object", "if": {}, "then": {}}), ""),
        (string(json!("(unclosed")), ""),
        (string(json!("(?=look)ahead")), ""),
        (string(json!("(a)\\1")), ""),
        (string(json!({"not": "text"})), ""),
        (deep(MAX_DEPTH + 1), "64 levels of nesting"),
        (json!({"properties": fields(MAX_KEYS + 1)}), "500 keys"),
        (json!({"enum": vec![0; MAX_VALUES]}), "5000 values"),
        (json!({"allOf": patterns(MAX_PATTERNS + 1)}), "16 patterns"),
        (json!({"properties": fields(MAX_COUNTED), "minProperties": 1}), "100 values"),
        (json!({"type": "integer", "multipleOf": 1_000_003}), "10000 remainders"),
        (json!({"type": "number", "multipleOf": 99_999.989}), "10000 remainders"),
        (
            json!({"anyOf": [{"type": "integer", "multipleOf": 9973}, {"type": "integer", "multipleOf": 9967}]}),
            "found 19940",
        ),
        (
            json!({"type": "integer", "allOf": [{"multipleOf": 101}, {"multipleOf": 103}]}),
            "found 10403",
        ),
        (json!({"description": "x".repeat(10 << 20)}), "at most 262144 bytes"),
        (json!({"enum": wide}), "at most 262144 bytes"),
    ] {
        let reason = refused(&setting, &schema);
        assert!(reason.contains(expected), "{reason}, not {expected}");
        // The vocabulary goes on as before.
        setting.constraint(&Grammar::json_object());
    }
    const { assert!(MAX_SCHEMA < 10 << 20) };
}

/// Patterns that make other engines backtrack, and limits that look absurd, are fine or refused; both in time, and a mask too.
#[test]
fn r_d15_hostile_patterns_take_no_time() {
    let setting = Setting::new("default");
    let string = |pattern: &str| json!({"type": "string", "pattern": pattern});
    let nested = (0..MAX_DEPTH / 2 - 2).fold(
        json!({"type": "null"}),
        |inner, _| json!({"anyOf": [inner, {"type": "array", "items": {}}]}),
    );
    let mut slow = Vec::new();
    for schema in [
        string("(a+)+"),
        string("^(a+)+$"),
        string("^(([a-z])+.)+[A-Z]([a-z])+$"),
        string("(a|aa)+b"),
        string(&"(".repeat(300)),
        string(&format!("{}a{}", "(".repeat(200), ")*".repeat(200))),
        string("(.*a){30}"),
        string(".{1,1000}{1,1000}{1,1000}x"),
        string("(((a{1,500}){1,500}){1,500}){1,500}"),
        string(&"[a-z]?".repeat(2000)),
        string(&(0..3000).map(|i| format!("w{i}|")).collect::<Vec<_>>().concat()),
        string("[a-z]*[^a]{200}.*b"),
        json!({"type": "string", "minLength": 1_000_000_000_u64}),
        json!({"type": "string", "maxLength": 1_000_000_000_u64}),
        json!({"type": "array", "minItems": 1_000_000_000_u64}),
        json!({"type": "array", "items": {"type": "integer"}, "maxItems": 100_000}),
        json!({"type": "number", "multipleOf": 1e-300}),
        json!({"type": "integer", "multipleOf": 9973}),
        json!({"type": "number", "multipleOf": 1_000_000_000_000_u64}),
        json!({"type": "integer", "allOf": [{"multipleOf": 97}, {"multipleOf": 101}]}),
        json!({"type": "integer", "minimum": -1e300, "maximum": 1e300}),
        json!({"type": "number", "minimum": 1e-300, "maximum": 2e-300}),
        json!({"type": "object", "properties": fields(MAX_KEYS)}),
        json!({"type": "object", "properties": fields(MAX_KEYS), "required": names(MAX_KEYS)}),
        json!({"type": "object", "properties": fields(45), "minProperties": 1, "additionalProperties": false}),
        json!({"type": "object", "properties": (0..9).map(|i| {
            (format!("o{i}"), json!({"type": "object", "properties": fields(270)}))
        }).collect::<Map<_, _>>()}),
        json!({"anyOf": (0..1200).map(|i| json!({"properties": {format!("f{i}"): {}}})).collect::<Vec<_>>()}),
        json!({"enum": (0..4990).map(|i| format!("word{i}")).collect::<Vec<_>>()}),
        json!({"type": "array", "prefixItems": (0..2400).map(|i| json!({"const": i})).collect::<Vec<_>>()}),
        chain(&|next| json!({"$ref": next})),
        chain(&|next| json!({"allOf": [{"$ref": next}, {"$ref": next}]})),
        chain(&|next| json!({"anyOf": [{"$ref": next}, {"$ref": next}]})),
        chain(
            &|next| json!({"type": "object", "properties": {"a": {"$ref": next}, "b": {"$ref": next}}, "required": ["a"]}),
        ),
        json!({"allOf": (0..12).map(|i| json!({"anyOf": [
            {"properties": {format!("a{i}"): {}}}, {"properties": {format!("b{i}"): {}}}, {"properties": {format!("c{i}"): {}}},
        ]})).collect::<Vec<_>>()}),
        json!({"type": "string", "allOf": patterns(MAX_PATTERNS)}),
        json!({"type": "string", "allOf": (1..=MAX_PATTERNS).map(|i| json!({"pattern": format!("a.{{{i}}}b")})).collect::<Vec<_>>()}),
        json!({"type": "object", "patternProperties": {"(a+)+": {}, "(a*)*b": {"type": "null"}}}),
        nested,
        json!({"allOf": vec![json!({"anyOf": vec![json!({"type": "object"}), json!({"type": "array"})]}); 12]}),
    ] {
        let start = Instant::now();
        let shown = schema.to_string().chars().take(100).collect::<String>();
        let outcome = Grammar::json_schema(&schema).and_then(|g| setting.vocabulary.constraint(&g));
        if let Ok(mut constraint) = outcome {
            println!("  made in {:?}", start.elapsed());
            for _ in 0..20 {
                let Ok(allowed) = constraint.allowed() else { break };
                let Some(id) = allowed.iter().last() else { break };
                if constraint.accept(id).is_err() {
                    break;
                }
            }
        }
        println!("{:?} {shown}", start.elapsed());
        if start.elapsed() > Duration::from_secs(3) {
            slow.push(format!("{:?} for {shown}", start.elapsed()));
        }
    }
    assert!(slow.is_empty(), "{slow:?}");
}

#[test]
fn r_d15_hostile_rules_and_expressions_are_refused_by_name() {
    let setting = Setting::new("default");
    let lark = |rules: &str| {
        Grammar::lark(rules).and_then(|grammar| setting.vocabulary.constraint(&grammar))
    };
    let regex = |text: &str| {
        Grammar::regex(text).and_then(|grammar| setting.vocabulary.constraint(&grammar))
    };
    let start = Instant::now();
    for rules in [
        String::new(),
        "start: nothing".to_owned(),
        "start: start".to_owned(),
        "other: \"a\"".to_owned(),
        "start: \"unclosed".to_owned(),
        format!("start: {}\"a\"{}", "(".repeat(100_000), ")".repeat(100_000)),
        "(".repeat(MAX_LARK + 1),
        "start: %json {\"$ref\": \"http://example.com\"}".to_owned(),
        "start: %json {\"type\": \"integer\", \"multipleOf\": 1000003}".to_owned(),
        "start: %json {\"multipleOf\": 9973} | %json {\"multiple\\u004ff\": 9967}".to_owned(),
        "%import common.NUMBER\nstart: \u{0}".to_owned(),
    ] {
        let shown: String = rules.chars().take(60).collect();
        match lark(&rules) {
            Err(Error::Argument { name: "grammar", reason }) => {
                assert!(!reason.contains("panic"), "{reason}");
            }
            Err(other) => panic!("{other} for {shown}"),
            Ok(_) => panic!("{shown:?} is taken"),
        }
    }
    for text in [
        String::new(),
        "(".to_owned(),
        "(".repeat(5_000),
        "a".repeat(MAX_REGEX + 1),
        "(?=a)".to_owned(),
    ] {
        let shown: String = text.chars().take(60).collect();
        match regex(&text) {
            Err(Error::Argument { name: "regex", reason }) => {
                assert!(!reason.contains("panic"), "{reason}");
            }
            Err(other) => panic!("{other} for {shown}"),
            Ok(_) => panic!("{shown:?} is taken"),
        }
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn r_d15_long_rules_take_no_time_and_no_stack() {
    let setting = Setting::new("default");
    let nested = (0..6000).map(|i| format!("r{i}: r{}\n", i + 1)).collect::<Vec<_>>().concat();
    let optional = (0..4000).map(|i| format!("r{i}: \"a\"? r{}\n", i + 1));
    let optional = optional.collect::<Vec<_>>().concat();
    for rules in [
        format!("start: r0\n{nested}r6000: \"a\"\n"),
        format!("start: r0\n{optional}r4000: \"a\"\n"),
        format!("start: {}", "\"a\" ".repeat(20_000)),
        format!("start: {}\"a\"", "\"a\" | ".repeat(15_000)),
        format!("start: A\nA: {}\"a\"", "\"b\" | ".repeat(15_000)),
        format!("start: A\nA: {}", ["/[^b]*a.{9}/"; MAX_PATTERNS + 1].join(" & ")),
        format!(
            "start: A\nA: {}",
            (0..=MAX_PATTERNS).map(|i| format!("/.*a.{{{i}}}/")).collect::<Vec<_>>().join(" & ")
        ),
        format!("start: A\nA: {}", vec!["/a/"; 10_000].join(" & ")),
        format!("start: {}a{}", "(".repeat(60), ")?".repeat(60)),
        format!("start: {}\"a\"{}", "(".repeat(60), "){1,9}".repeat(60)),
        "start: start start | \"a\" | \"\"".to_owned(),
    ] {
        let start = Instant::now();
        let shown: String = rules.chars().take(60).collect();
        let made = Grammar::lark(rules.as_str()).and_then(|g| setting.vocabulary.constraint(&g));
        println!(
            "{:?} {:?} {shown}",
            start.elapsed(),
            made.as_ref().err().map(ToString::to_string)
        );
        if let Ok(mut constraint) = made {
            for _ in 0..20 {
                let Ok(allowed) = constraint.allowed() else { break };
                let Some(id) = allowed.iter().last() else { break };
                if constraint.accept(id).is_err() {
                    break;
                }
            }
        }
        assert!(start.elapsed() < Duration::from_secs(5), "{:?} for {shown}", start.elapsed());
    }
}
