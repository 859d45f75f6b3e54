//! Sampling under a constraint, and what tests it: tokenizers of the repository, and a checker of JSON schemas.

use std::path::Path;

use boostr::checkpoint::{Bytes, gguf};
use boostr::grammar::{Grammar, Vocabulary};
use boostr::sample::Constraint;
use boostr::tokenizer::{GgufTokenizer, Tokenizer};
use regex::Regex;
use serde_json::{Value, json};

/// A tokenizer of the repository, with the ids that end its texts.
pub fn tokenizer(name: &str) -> (Tokenizer, Vec<u32>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (folder, ends): (_, &[&str]) = match name {
        "default" => ("models/default", &["<|endoftext|>"]),
        "qwen2" => ("fixtures/tokenizers/qwen2", &["<|im_end|>", "<|endoftext|>"]),
        "mistral-v3" => ("fixtures/tokenizers/mistral-v3", &["</s>"]),
        other => panic!("{other} is no tokenizer of these tests"),
    };
    let tokenizer = Tokenizer::from_file(root.join(folder).join("tokenizer.json")).unwrap();
    let ends = ends.iter().map(|end| tokenizer.id(end).unwrap()).collect();
    (tokenizer, ends)
}

pub const TOKENIZERS: [&str; 3] = ["default", "qwen2", "mistral-v3"];

pub struct Setting {
    pub tokenizer: Tokenizer,
    pub eos: Vec<u32>,
    pub vocabulary: Vocabulary,
}

impl Setting {
    pub fn new(name: &str) -> Self {
        let (tokenizer, eos) = tokenizer(name);
        let limit = tokenizer.max_id() as usize + 1;
        let vocabulary = Vocabulary::new(&tokenizer, &eos, limit).unwrap();
        Self { tokenizer, eos, vocabulary }
    }

    /// The whole vocabulary of a published model, from `fixtures/vocab`.
    pub fn whole(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/vocab");
        let path = folder.join(format!("{name}.gguf"));
        let bytes = Bytes::new(std::fs::read(&path).unwrap());
        let (metadata, _) = gguf::read(&path, &bytes).unwrap();
        let GgufTokenizer { tokenizer, ends: eos, .. } =
            Tokenizer::from_gguf(&metadata).unwrap().unwrap();
        let limit = tokenizer.max_id() as usize + 1;
        let vocabulary = Vocabulary::new(&tokenizer, &eos, limit).unwrap();
        Self { tokenizer, eos, vocabulary }
    }

    pub fn constraint(&self, grammar: &Grammar) -> Box<dyn Constraint> {
        self.vocabulary.constraint(grammar).unwrap()
    }

    /// What the ids add to a text that has begun.
    pub fn text(&self, ids: &[u32]) -> String {
        String::from_utf8(self.bytes(ids)).unwrap()
    }

    fn bytes(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|&id| self.tokenizer.bytes(id).unwrap().unwrap()).collect()
    }

    /// A text that is sampled uniformly from what is allowed, with a growing wish for short tokens and ends, so that
    /// texts end. Every step checks that an allowed set is right about where the text may end.
    pub fn sampled(&self, constraint: &mut dyn Constraint, seed: u64) -> Vec<u32> {
        self.sampled_towards(constraint, seed, "")
    }

    /// The same, with a wish for a text too, which random tokens would never hit.
    pub fn sampled_towards(
        &self,
        constraint: &mut dyn Constraint,
        seed: u64,
        wish: &str,
    ) -> Vec<u32> {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut ids = Vec::new();
        while !constraint.is_complete() {
            let allowed = constraint.allowed().unwrap();
            let all: Vec<u32> = allowed.iter().collect();
            assert!(!all.is_empty(), "nothing may follow {:?}", self.text(&ids));
            let text = self.bytes(&ids);
            let begun = (0..wish.len()).rev().find(|&len| text.ends_with(&wish.as_bytes()[..len]));
            let wished = &wish.as_bytes()[begun.unwrap_or(0)..];
            let bytes = |id: u32| self.tokenizer.bytes(id).unwrap().unwrap();
            let those = |wanted: &dyn Fn(&[u8]) -> bool| -> Vec<u32> {
                all.iter().copied().filter(|&id| wanted(&bytes(id))).collect()
            };
            let mut closing = those(&|bytes| !bytes.is_empty() && wished.starts_with(bytes));
            if closing.is_empty() {
                closing = those(&|bytes| matches!(bytes, [b'"' | b'}' | b']' | b',' | b'.']));
                closing.extend(self.eos.iter().filter(|&&id| allowed.contains(id)));
            }
            let from = match &closing {
                closing if !closing.is_empty() && random.below(60) < 5 + ids.len() => closing,
                _ => &all,
            };
            let id = from[random.below(from.len())];
            constraint.accept(id).unwrap();
            if self.eos.contains(&id) {
                assert!(constraint.is_complete());
                break;
            }
            ids.push(id);
            assert!(ids.len() < 3000, "no end in sight: {}", self.text(&ids));
        }
        ids
    }

    /// Whether a text follows the grammar, as far as single bytes' tokens can tell.
    pub fn follows(&self, grammar: &Grammar, text: &str) -> bool {
        let mut constraint = self.constraint(grammar);
        let ids = self.tokenizer.encode(text, false).unwrap();
        if !ids.iter().all(|&id| constraint.accept(id).is_ok()) {
            return false;
        }
        constraint.is_complete()
            || constraint
                .allowed()
                .is_ok_and(|allowed| self.eos.iter().all(|&id| allowed.contains(id)))
    }
}

pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }
}

/// Whether a value is what a schema describes, by the words of JSON schema 2020-12 that these tests use.
pub fn valid(root: &Value, schema: &Value, value: &Value) -> bool {
    let Some(schema) = schema.as_object() else { return schema != &json!(false) };
    schema.iter().all(|(key, expected)| match (key.as_str(), value) {
        ("$ref", _) => {
            let pointer = expected.as_str().unwrap().strip_prefix('#').unwrap();
            valid(root, root.pointer(pointer).unwrap(), value)
        }
        ("type", _) => match expected.as_str().unwrap() {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
            "number" => value.is_number(),
            "boolean" => value.is_boolean(),
            "null" => value.is_null(),
            other => panic!("type {other}"),
        },
        ("enum", _) => expected.as_array().unwrap().contains(value),
        ("const", _) => expected == value,
        ("anyOf", _) => expected.as_array().unwrap().iter().any(|one| valid(root, one, value)),
        ("properties", Value::Object(fields)) => fields
            .iter()
            .all(|(name, field)| expected.get(name).is_none_or(|one| valid(root, one, field))),
        ("required", Value::Object(fields)) => expected
            .as_array()
            .unwrap()
            .iter()
            .all(|name| fields.contains_key(name.as_str().unwrap())),
        ("additionalProperties", Value::Object(fields)) => fields.iter().all(|(name, field)| {
            schema.get("properties").is_some_and(|known| known.get(name).is_some())
                || valid(root, expected, field)
        }),
        ("items", Value::Array(items)) => items.iter().all(|item| valid(root, expected, item)),
        ("minItems", Value::Array(items)) => items.len() as u64 >= expected.as_u64().unwrap(),
        ("maxItems", Value::Array(items)) => items.len() as u64 <= expected.as_u64().unwrap(),
        ("minLength", Value::String(text)) => {
            text.chars().count() as u64 >= expected.as_u64().unwrap()
        }
        ("maxLength", Value::String(text)) => {
            text.chars().count() as u64 <= expected.as_u64().unwrap()
        }
        ("pattern", Value::String(text)) => {
            Regex::new(expected.as_str().unwrap()).unwrap().is_match(text)
        }
        ("minimum", Value::Number(number)) => number.as_f64() >= expected.as_f64(),
        ("maximum", Value::Number(number)) => number.as_f64() <= expected.as_f64(),
        (
            "$defs"
            | "description"
            | "title"
            | "properties"
            | "required"
            | "additionalProperties"
            | "items"
            | "minItems"
            | "maxItems"
            | "minLength"
            | "maxLength"
            | "pattern"
            | "minimum"
            | "maximum",
            _,
        ) => true,
        (other, _) => panic!("keyword {other}"),
    })
}
