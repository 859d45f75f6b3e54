//! Bodies of requests to the server, answered by a model that is small.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use boostr::backend::{Cpu, cpu};
use boostr::chat::Source;
use boostr::engine::{Engine, EngineConfig};
use boostr::generation_config::SpecialTokens;
use boostr::load::LanguageModel;
use boostr::threads::Threads;
use boostr_server::{Config, Limits, Server};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

const PATHS: [&str; 6] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/apply-template",
];

/// With all that a template may be asked for.
const TEMPLATE: &str = "{% for t in tools or [] %}<tools>{{ t | tojson }}</tools>{% endfor %}{% for m in messages %}<s>{{ m.role }}: \
    {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>{% endfor %}\
    {% if add_generation_prompt %}<s>assistant: {% endif %}";

static SERVER: LazyLock<(Runtime, Server<Cpu>)> = LazyLock::new(|| {
    let path = fixtures().join("models/mamba2-tiny");
    let mut lm = LanguageModel::<Cpu>::open(&path, &Default::default(), cpu()).expect("a model");
    lm.chat_template = Some(Source::new("fuzz", TEMPLATE, SpecialTokens::default()));
    let lm = Arc::new(lm);
    let limits = Limits { max_prompt: 300, default_tokens: 1, max_tokens: 2, ..Limits::default() };
    let server = Server::new(Config { limits, ..Config::default() }).expect("a server");
    let threads = Some(Threads::new(1).expect("a thread"));
    let engine = EngineConfig { threads, ..EngineConfig::default() };
    let engine = Engine::start(lm.clone(), engine).expect("an engine");
    server.load(lm, engine, None, None).expect("a model with a tokenizer");
    (Builder::new_current_thread().enable_all().build().expect("a runtime"), server)
});

/// The fixtures of the repository, for whichever crate this file is compiled into.
fn fixtures() -> PathBuf {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.map(|folder| folder.join("fixtures")).find(|path| path.is_dir()).expect("fixtures")
}

/// Asks the server, at the path that the first byte says.
pub fn check(text: &str) {
    let Some(first) = text.bytes().next().filter(u8::is_ascii) else { return };
    let path = PATHS[usize::from(first) % PATHS.len()];
    let body = &text[1..];
    let (runtime, server) = &*SERVER;
    let (status, answer) = runtime.block_on(server.answer(path, body.to_owned()));
    // Events are no JSON, which is what `answer` looks for.
    let streams = serde_json::from_str::<Value>(body).is_ok_and(|body| body["stream"] == true);
    assert!(streams || status < 500, "{status} {answer} for {path} {body}");
    assert!(streams || status == 200 || answer["error"]["message"].is_string(), "{answer}");
}
