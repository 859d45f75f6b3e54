//! Chat templates of strangers: compiled, and run on a conversation with all that one can have.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use boostr::chat::{ChatTemplate, Options};
use boostr::generation_config::SpecialTokens;
use boostr::tokenizer::Tokenizer;
use serde_json::{Value, json};

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let path = fixtures().join("models/mamba2-tiny/tokenizer.json");
    Tokenizer::from_file(path).expect("a tokenizer")
});

static MESSAGES: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let call = json!({"name": "weather", "arguments": {"place": "Rome", "days": [1, null]}});
    let call = json!({"type": "function", "id": "1", "function": call});
    vec![
        json!({"role": "system", "content": "Be <s> brief."}),
        json!({"role": "user", "content": [{"type": "text", "text": "Hi </s>"}]}),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        json!({"role": "tool", "content": "{\"sun\": 0.5}", "tool_call_id": "1"}),
        json!({"role": "assistant", "content": "<think>x</think>Sunny é\u{1f600}."}),
        json!({"role": "user", "content": ""}),
    ]
});

/// The fixtures of the repository, for whichever crate this file is compiled into.
fn fixtures() -> PathBuf {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.map(|folder| folder.join("fixtures")).find(|path| path.is_dir()).expect("fixtures")
}

/// Takes `source` for a template.
pub fn check(source: &str) {
    let special = SpecialTokens {
        bos_token: Some("<s>".into()),
        eos_token: Some("</s>".into()),
        ..SpecialTokens::default()
    };
    let Ok(template) = ChatTemplate::new("fuzz", source, &special) else { return };
    let function = json!({"name": "weather", "parameters": {"type": "object", "properties": {}}});
    let options = Options {
        add_generation_prompt: true,
        tools: Some(vec![json!({"type": "function", "function": function})]),
        now: Some(std::time::UNIX_EPOCH),
        ..Options::default()
    };
    let Ok(text) = template.render(&MESSAGES, &options) else { return };
    assert_eq!(template.render(&MESSAGES, &options).ok(), Some(text), "it is the same again");
    let _ = template.encode(&TOKENIZER, &MESSAGES, &options);
    let _ = template.render(&[], &Options::default());
}
