//! `/api`: what Ollama's clients speak.

use serde_json::{Value, json};

use crate::server::{MODEL, THINK, THINK_END, TestServer, with};
use crate::thoughts::server as thinking;

fn chat(more: Value) -> Value {
    let body = json!({
        "model": "demo", "messages": [{"role": "user", "content": "What is the sea?"}], "stream": false,
        "options": {"num_predict": 12, "temperature": 0, "num_ctx": 4096}
    });
    with(body, more)
}

/// The texts of lines joined, which all but the last are not done.
fn joined(lines: &[Value], at: &str) -> String {
    let (last, before) = lines.split_last().unwrap();
    assert!(before.iter().all(|line| line["done"] == false));
    assert_eq!(last["done"], true);
    lines.iter().filter_map(|line| line.pointer(at)?.as_str()).collect()
}

#[test]
fn a_chat_is_answered_in_lines_or_at_once() {
    let server = TestServer::start();
    let whole = server.post("/api/chat", &chat(json!({}))).json();
    let openai = server.post("/v1/chat/completions", &json!({
        "messages": [{"role": "user", "content": "What is the sea?"}], "max_tokens": 12, "temperature": 0
    })).json();
    assert_eq!(whole["message"]["role"], "assistant");
    assert_eq!(whole["message"]["content"], openai["choices"][0]["message"]["content"]);
    assert_eq!((&whole["done"], &whole["done_reason"]), (&json!(true), &json!("length")));
    assert_eq!(
        (&whole["eval_count"], &whole["prompt_eval_count"]),
        (&json!(12), &openai["usage"]["prompt_tokens"])
    );
    for name in ["total_duration", "prompt_eval_duration", "eval_duration"] {
        assert!(whole[name].as_u64().is_some(), "{name}: {whole}");
    }
    let total = whole["total_duration"].as_u64().unwrap();
    assert!(total >= whole["eval_duration"].as_u64().unwrap());
    let moment = whole["created_at"].as_str().unwrap();
    assert!(moment.len() == 20 && moment.ends_with('Z') && moment.contains('T'), "{moment}");

    // Streams are what is given unless said otherwise.
    let body = chat(json!({"stream": null, "model": "demo:latest"}));
    let lines = server.post("/api/chat", &body).lines();
    assert_eq!(joined(&lines, "/message/content"), whole["message"]["content"].as_str().unwrap());
    assert_eq!(lines.last().unwrap()["eval_count"], 12);
    let none = server.post("/api/chat", &chat(json!({"messages": []}))).json();
    assert_eq!((&none["done"], &none["done_reason"]), (&json!(true), &json!("load")));
}

#[test]
fn a_text_goes_on_by_the_template_or_as_it_is() {
    let server = TestServer::start();
    let body = json!({
        "model": "demo", "prompt": "The sea was", "stream": false, "options": {"num_predict": 12, "temperature": 0}
    });
    let completion = json!({"prompt": "The sea was", "max_tokens": 12, "temperature": 0});
    let expected = server.post("/v1/completions", &completion).json()["choices"][0]["text"].clone();
    let raw = server.post("/api/generate", &with(body.clone(), json!({"raw": true}))).json();
    assert_eq!(raw["response"], expected, "{raw}");
    let lines = server
        .post("/api/generate", &with(body.clone(), json!({"raw": true, "stream": true})))
        .lines();
    assert_eq!(joined(&lines, "/response"), expected.as_str().unwrap());

    let told = with(body.clone(), json!({"system": "Be brief."}));
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The sea was"}]);
    let chat = server.post("/api/chat", &chat(json!({"messages": messages}))).json();
    assert_eq!(server.post("/api/generate", &told).json()["response"], chat["message"]["content"]);

    let schema = json!({"enum": ["cat"]});
    let held = with(body.clone(), json!({"format": schema, "options": {"num_predict": -1}}));
    assert_eq!(server.post("/api/generate", &held).json()["response"], "\"cat\"");
    let none = server.post("/api/generate", &with(body, json!({"prompt": ""}))).json();
    assert_eq!((&none["response"], &none["done_reason"]), (&json!(""), &json!("load")));
}

#[test]
fn thoughts_and_calls_are_apart_from_the_text() {
    let server = thinking("assistant: <think>\n");
    let mut both = 0;
    for seed in 0..8 {
        let options = json!({
            "num_predict": 24, "temperature": 1, "seed": seed,
            "logit_bias": {THINK.to_string(): -100, THINK_END.to_string(): 7, "0": -100}
        });
        let body = chat(json!({"options": options, "think": true}));
        let whole = server.post("/api/chat", &body).json();
        let lines = server.post("/api/chat", &with(body, json!({"stream": true}))).lines();
        let part = |name: &str| whole["message"][name].as_str().unwrap_or_default().to_owned();
        assert_eq!(joined(&lines, "/message/thinking"), part("thinking"));
        assert_eq!(joined(&lines, "/message/content"), part("content"));
        both += u32::from(!part("thinking").is_empty() && !part("content").is_empty());
    }
    assert!(both > 0, "no answer had a thought and a text");

    // A history with calls, as Ollama's clients write it.
    let history = json!([
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "tool_name": "f", "content": "2"}
    ]);
    let reply = server.post("/api/chat", &chat(json!({"messages": history})));
    assert_eq!(reply.status, 200, "{reply:?}");
}

#[test]
fn the_model_is_listed_with_its_properties() {
    let server = thinking("");
    let tags = server.get("/api/tags").json();
    let model = &tags["models"][0];
    assert_eq!((&model["name"], &model["details"]["family"]), (&json!("demo"), &json!("mamba2")));
    assert_eq!(model["details"]["parameter_size"], "2.7M");
    let shown = server.post("/api/show", &json!({"model": "demo"})).json();
    let info = &shown["model_info"];
    assert_eq!(info["general.architecture"], "mamba2");
    assert_eq!(info["general.parameter_count"], MODEL.model.parameters().0);
    assert_eq!(info["mamba2.embedding_length"], 256);
    assert_eq!(shown["capabilities"], json!(["completion", "thinking", "insert"]));
    assert!(shown["template"].as_str().unwrap().contains("messages"));
    assert!(server.get("/api/version").json()["version"].is_string());
}

#[test]
fn errors_have_the_form_of_ollama() {
    let server = TestServer::start();
    for (path, body, status, word) in [
        ("/api/chat", chat(json!({"model": "other"})), 404, "`model`"),
        ("/api/chat", chat(json!({"model": null})), 400, "`model`"),
        (
            "/api/chat",
            chat(json!({"options": {"temperature": "hot"}})),
            400,
            "`options.temperature`",
        ),
        ("/api/chat", chat(json!({"options": {"stop": 1}})), 400, "`options.stop`"),
        (
            "/api/chat",
            chat(json!({"messages": [{"role": "user", "content": "x", "images": ["x"]}]})),
            400,
            "`messages[0].images`",
        ),
        ("/api/chat", chat(json!({"format": "xml"})), 400, "`format`"),
        ("/api/generate", json!({"model": "demo", "prompt": "x", "suffix": "y"}), 400, "`suffix`"),
        (
            "/api/generate",
            json!({"model": "demo", "prompt": "x", "context": [1]}),
            400,
            "`context`",
        ),
        ("/api/show", json!({}), 400, "`model`"),
    ] {
        let reply = server.post(path, &body);
        let message =
            reply.json()["error"].as_str().unwrap_or_else(|| panic!("{reply:?}")).to_owned();
        assert_eq!(reply.status, status, "{body}: {message}");
        assert!(message.contains(word), "{body}: {message}");
    }
    // A body without a type, and one that a page of another site could send.
    let body = chat(json!({})).to_string();
    let send = |headers: &str| {
        let head =
            format!("POST /api/chat HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}");
        crate::client::raw(
            server.address,
            format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()),
        )
    };
    assert_eq!(send("").status, 200);
    assert_eq!(send("Content-Type: application/x-www-form-urlencoded\r\n").status, 200);
    let own = "Origin: http://localhost\r\nContent-Type: text/plain\r\n";
    assert_eq!((send("Origin: http://evil.example\r\n").status, send(own).status), (403, 415));
    assert!(server.get("/api/nothing").json()["error"].is_string());
}
