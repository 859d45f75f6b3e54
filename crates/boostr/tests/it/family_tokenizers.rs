//! Each family's tokenizer against Python: `fixtures/tokenizers`, or the folder that `BOOSTR_TOKENIZERS` names, as
//! `scripts/tokenizer_goldens.py` makes them.

use std::path::{Path, PathBuf};
use std::{env, fs};

use boostr::backend::Cpu;
use boostr::chat::{Options, Source};
use boostr::checkpoint::ConfigFile;
use boostr::checkpoint::gguf::Metadata;
use boostr::generation_config::SpecialTokens;
use boostr::load::LanguageModel;
use boostr::tokenizer::{GgufTokenizer, Tokenizer};
use serde_json::Value;

use crate::common::cpu;

/// The text of the goldens that Unicode's form NFC would change.
const COMBINING: char = '\u{301}';

/// What GGUF cannot tell of newer `SentencePiece` tokenizers.
const METASPACE: &str = "a space before a text that starts with one too, and before the text after";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn folder() -> PathBuf {
    env::var_os("BOOSTR_TOKENIZERS")
        .map_or_else(|| root().join("fixtures/tokenizers"), PathBuf::from)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// A tokenizer with its files, and what Python makes of texts.
struct Family {
    name: String,
    json: String,
    config: String,
    tokenizer: Tokenizer,
    golden: Value,
}

impl Family {
    fn all() -> Vec<Self> {
        let mut paths: Vec<PathBuf> =
            fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.retain(|path| path.is_dir());
        paths.sort();
        assert!(paths.len() >= 10, "{paths:?}");
        let family = |path: &PathBuf| Self {
            name: path.file_name().unwrap().to_string_lossy().into_owned(),
            json: read(&path.join("tokenizer.json")),
            config: read(&path.join("tokenizer_config.json")),
            tokenizer: Tokenizer::from_file(path.join("tokenizer.json")).unwrap(),
            golden: serde_json::from_str(&read(&path.join("golden.json"))).unwrap(),
        };
        paths.iter().map(family).collect()
    }

    /// What is put before a text.
    fn start(&self) -> Vec<u32> {
        ids(&self.golden["start"])
    }

    fn special(&self) -> SpecialTokens {
        SpecialTokens::from_json("tokenizer_config.json", &self.config).unwrap()
    }

    fn bos(&self) -> Option<u32> {
        self.tokenizer.id(&self.special().bos_token?)
    }

    /// The tokenizer as GGUF without its `tokenizer.json`, as other programs read it; and what they lose.
    fn as_gguf(&self) -> (GgufTokenizer, Vec<String>) {
        let mut metadata = Metadata::new(format!("{}.gguf", self.name));
        let config = ConfigFile::parse("tokenizer_config.json", &self.config).unwrap();
        let rows = (self.tokenizer.max_id() as usize + 1).next_multiple_of(16);
        let lost = self.tokenizer.to_gguf(&self.json, Some(&config), rows, &mut metadata).unwrap();
        metadata.retain(|key| key != "tokenizer.huggingface.json");
        (Tokenizer::from_gguf(&metadata).unwrap().unwrap(), lost)
    }

    /// The conversations with the ids that transformers has for them.
    fn chats(&self) -> impl Iterator<Item = (Vec<Value>, Vec<u32>)> {
        let chats = self.golden["chat"].as_array().into_iter().flatten();
        chats.map(|chat| (chat["messages"].as_array().unwrap().clone(), ids(&chat["ids"])))
    }

    fn encode_chat(&self, tokenizer: &Tokenizer, messages: &[Value]) -> Vec<u32> {
        let template = &self.golden["template"];
        let text = match template["file"].as_str() {
            Some(file) => read(&root().join("fixtures/templates").join(file)),
            None => template["text"].as_str().unwrap().to_owned(),
        };
        let template = Source::new("chat_template.jinja", text, self.special()).compile().unwrap();
        let options = Options { add_generation_prompt: true, ..Options::default() };
        template.encode(tokenizer, messages, &options).unwrap()
    }
}

fn texts() -> Vec<String> {
    serde_json::from_str(&read(&folder().join("texts.json"))).unwrap()
}

#[test]
fn case_42_texts_have_the_ids_of_python() {
    for family in Family::all() {
        let (name, tokenizer) = (&family.name, &family.tokenizer);
        for (n, text) in texts().iter().enumerate() {
            let expected = ids(&family.golden["ids"][n]);
            assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{name}: {text:?}");
            let whole = [family.start(), expected.clone()].concat();
            assert_eq!(tokenizer.encode(text, true).unwrap(), whole, "{name}: {text:?}");
            let decoded = family.golden["decoded"][n.to_string()].as_str().unwrap_or(text);
            assert_eq!(tokenizer.decode(&expected, false).unwrap(), decoded, "{name}");
        }
    }
}

#[test]
fn case_42_control_tokens_have_the_ids_of_python() {
    for family in Family::all() {
        for control in family.golden["control"].as_array().unwrap() {
            let text = control["text"].as_str().unwrap();
            let got = family.tokenizer.encode_control(text, false).unwrap();
            assert_eq!(got, ids(&control["ids"]), "{}: {text:?}", family.name);
        }
    }
}

#[test]
fn case_42_conversations_have_the_ids_of_transformers() {
    let mut count = 0;
    for family in Family::all() {
        let name = &family.name;
        for (messages, expected) in family.chats() {
            let got = family.encode_chat(&family.tokenizer, &messages);
            assert_eq!(got, expected, "{name}: {messages:?}");
            count += 1;
        }
    }
    assert!(count >= 16, "{count}");
}

#[test]
fn case_42_a_text_starts_with_one_token_for_the_start_whoever_writes_it() {
    let mut written = 0;
    let model = root().join("fixtures/models/mamba2-tiny");
    for family in Family::all() {
        let name = &family.name;
        // The template writes it, and the tokenizer would.
        for (messages, _) in family.chats().filter(|_| !family.start().is_empty()) {
            let ids = family.encode_chat(&family.tokenizer, &messages);
            let bos = family.bos().unwrap();
            let starts = ids.iter().take_while(|&&id| id == bos).count();
            // Nemotron's template begins with another token.
            assert_eq!(starts, usize::from(name != "nemotron"), "{name}: {ids:?}");
            written += starts;
        }
        // The configuration asks for it, and the tokenizer adds it.
        for asks in [None, Some(false), Some(true)] {
            let folder =
                env::temp_dir().join(format!("boostr-family-{name}-{}", std::process::id()));
            fs::create_dir(&folder).unwrap();
            let mut config: Value = serde_json::from_str(&family.config).unwrap();
            config["add_bos_token"] = asks.into();
            for file in ["config.json", "model.safetensors"] {
                fs::copy(model.join(file), folder.join(file)).unwrap();
            }
            fs::write(folder.join("tokenizer.json"), &family.json).unwrap();
            fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
            let lm = LanguageModel::<Cpu>::open(&folder, &Default::default(), cpu()).unwrap();
            let bos = if asks == Some(true) { family.bos() } else { None };
            let start = bos.map_or_else(|| family.start(), |bos| vec![bos]);
            let plain = family.tokenizer.encode("Hello world", false).unwrap();
            assert_eq!(lm.encode("Hello world").unwrap(), [start, plain].concat(), "{name}");
            fs::remove_dir_all(&folder).unwrap();
        }
    }
    assert!(written >= 8, "{written}");
}

#[test]
fn as_gguf_the_ids_are_the_same_or_the_difference_was_told() {
    for family in Family::all() {
        let name = &family.name;
        let (read, lost) = family.as_gguf();
        let told = |words: &str| lost.iter().any(|what| what.contains(words));
        let expected = match name.as_str() {
            "gpt-neox" | "qwen2" => &["NFC"][..],
            "mistral-v3" => &[METASPACE],
            "falcon-h1" => &["rules for words"],
            _ => &[],
        };
        assert!(lost.len() == expected.len() && expected.iter().all(|what| told(what)), "{lost:?}");
        assert_eq!(read.bos, family.bos(), "{name}");
        let eos = family.special().eos_token.unwrap();
        assert_eq!(read.eos, family.tokenizer.id(&eos), "{name}");
        assert!(read.ends.contains(&read.eos.unwrap()), "{name}");
        if told("rules for words") {
            continue;
        }
        let tokenizer = &read.tokenizer;
        for (n, text) in texts().iter().enumerate() {
            if told("NFC") && text.contains(COMBINING) || told(METASPACE) && text.starts_with(' ') {
                continue;
            }
            let plain = ids(&family.golden["ids"][n]);
            assert_eq!(tokenizer.encode(text, false).unwrap(), plain, "{name}: {text:?}");
            let whole = [family.start(), plain].concat();
            assert_eq!(tokenizer.encode(text, true).unwrap(), whole, "{name}: {text:?}");
        }
        if told(METASPACE) {
            continue;
        }
        for control in family.golden["control"].as_array().unwrap() {
            let text = control["text"].as_str().unwrap();
            let got = tokenizer.encode_control(text, false).unwrap();
            assert_eq!(got, ids(&control["ids"]), "{name}: {text:?}");
        }
        for (messages, expected) in family.chats() {
            assert_eq!(family.encode_chat(tokenizer, &messages), expected, "{name}");
        }
    }
}
