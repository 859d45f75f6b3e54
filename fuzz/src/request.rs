//! Bodies of requests to the server, answered by a model that is small.

use std::sync::LazyLock;

use boostr::backend::Cpu;
use boostr_server::Server;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

use super::server::server;

const PATHS: [&str; 6] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/apply-template",
];

static SERVER: LazyLock<(Runtime, Server<Cpu>)> = LazyLock::new(|| {
    (Builder::new_current_thread().enable_all().build().expect("a runtime"), server(None))
});

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
