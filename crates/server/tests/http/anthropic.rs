//! `/v1/messages`.

use boostr_server::{Config, Keys};
use serde_json::{Value, json};

use crate::server::{Setup, THINK, THINK_END, TestServer, with};
use crate::thoughts::server as thinking;

fn ask(more: Value) -> Value {
    let body = json!({
        "max_tokens": 12, "temperature": 0, "logit_bias": {"0": -100},
        "messages": [{"role": "user", "content": "What is the sea?"}]
    });
    with(body, more)
}

fn post(server: &TestServer, more: Value) -> Value {
    server.post("/v1/messages", &ask(more)).json()
}

fn tools() -> Value {
    let schema = json!({
        "type": "object", "required": ["age"], "additionalProperties": false,
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}
    });
    json!([
        {"type": "web_search_20250305", "name": "web_search"},
        {"name": "look_up", "description": "x", "input_schema": schema}
    ])
}

/// The message that events tell of.
fn told(events: &[Value]) -> Value {
    let kind = |event: &Value| event["type"].as_str().unwrap().to_owned();
    assert_eq!(kind(&events[0]), "message_start");
    assert_eq!(kind(events.last().unwrap()), "message_stop");
    let mut message = events[0]["message"].clone();
    let mut blocks: Vec<Value> = Vec::new();
    let mut json = String::new();
    for event in events {
        match kind(event).as_str() {
            "content_block_start" => {
                assert_eq!(event["index"], blocks.len());
                blocks.push(event["content_block"].clone());
                json.clear();
            }
            "content_block_delta" => {
                assert_eq!(event["index"], blocks.len() - 1);
                let (block, delta) = (blocks.last_mut().unwrap(), &event["delta"]);
                for name in ["text", "thinking"] {
                    if let Some(text) = delta[name].as_str() {
                        assert_eq!(delta["type"], format!("{name}_delta"));
                        block[name] = format!("{}{text}", block[name].as_str().unwrap()).into();
                    }
                }
                json.push_str(delta["partial_json"].as_str().unwrap_or_default());
            }
            "content_block_stop" if !json.is_empty() => {
                blocks.last_mut().unwrap()["input"] = serde_json::from_str(&json).unwrap();
            }
            "message_delta" => {
                for name in ["stop_reason", "stop_sequence"] {
                    message[name] = event["delta"][name].clone();
                }
                message["usage"] = event["usage"].clone();
            }
            _ => {}
        }
    }
    message["content"] = blocks.into();
    message
}

/// A message without what differs from request to request.
fn plain(mut message: Value) -> Value {
    message["id"] = Value::Null;
    message["usage"] = message["usage"]["output_tokens"].clone();
    for block in message["content"].as_array_mut().unwrap() {
        if block["type"] == "tool_use" {
            block["id"] = Value::Null;
        }
    }
    message
}

#[test]
fn a_message_is_the_answer_of_a_chat() {
    let server = TestServer::start();
    let message = post(&server, json!({"system": "Be brief."}));
    assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(
        (&message["stop_reason"], &message["stop_sequence"]),
        (&json!("max_tokens"), &Value::Null)
    );
    let chat = server.post("/v1/chat/completions", &json!({
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the sea?"}],
        "max_tokens": 12, "temperature": 0, "logit_bias": {"0": -100}
    })).json();
    let text = message["content"][0]["text"].as_str().unwrap();
    assert_eq!(
        (&message["content"][0]["type"], text),
        (&json!("text"), chat["choices"][0]["message"]["content"].as_str().unwrap())
    );
    let usage = &message["usage"];
    let read = usage["input_tokens"].as_u64().unwrap()
        + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(
        (json!(read), &usage["output_tokens"]),
        (chat["usage"]["prompt_tokens"].clone(), &json!(12))
    );
    let counted = server.post("/v1/messages/count_tokens", &ask(json!({"system": "Be brief."})));
    assert_eq!(counted.json(), json!({"input_tokens": read}));

    // Blocks say the same.
    let blocks = json!({
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is the sea?"}]}]
    });
    assert_eq!(post(&server, blocks)["content"][0]["text"], text);

    let stop = text.split_whitespace().nth(1).unwrap();
    let stopped = post(&server, json!({"system": "Be brief.", "stop_sequences": ["\u{0}", stop]}));
    assert_eq!(
        (&stopped["stop_reason"], &stopped["stop_sequence"]),
        (&json!("stop_sequence"), &json!(stop))
    );
    let before = stopped["content"][0]["text"].as_str().unwrap();
    assert!(text.starts_with(before) && !before.contains(stop), "{stopped}");
}

#[test]
fn the_events_of_a_message_are_the_message() {
    let server = thinking("assistant: <think>\n");
    let mut both = 0;
    for seed in 0..8 {
        let more = json!({
            "temperature": 1, "seed": seed, "max_tokens": 24,
            "logit_bias": {THINK.to_string(): -100, THINK_END.to_string(): 7, "0": -100}
        });
        let whole = post(&server, more.clone());
        let reply =
            server.post("/v1/messages?beta=true", &ask(with(more, json!({"stream": true}))));
        let events = reply.named_events();
        assert!(events.iter().any(|event| event["type"] == "ping"));
        assert_eq!(plain(told(&events)), plain(whole.clone()));
        let blocks = whole["content"].as_array().unwrap();
        both += u32::from(blocks.len() == 2 && blocks[0]["type"] == "thinking");
    }
    assert!(both > 0, "no answer had a thought and a text");
}

#[test]
fn tools_are_used_and_what_they_give_is_read() {
    let server = TestServer::start();
    let more = json!({
        "tools": tools(), "tool_choice": {"type": "any", "disable_parallel_tool_use": true}, "max_tokens": 400,
        "temperature": 1, "seed": 2
    });
    let message = post(&server, more.clone());
    assert_eq!(message["stop_reason"], "tool_use", "{message}");
    let block = &message["content"][0];
    assert_eq!((&block["type"], &block["name"]), (&json!("tool_use"), &json!("look_up")));
    assert!(block["input"]["age"].is_u64(), "{message}");
    let events =
        server.post("/v1/messages", &ask(with(more, json!({"stream": true})))).named_events();
    assert_eq!(plain(told(&events)), plain(message.clone()));

    let history = json!([
        {"role": "user", "content": "What is the sea?"},
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "41"}]}
        ]}
    ]);
    let next = post(
        &server,
        json!({"messages": history, "tools": tools(), "tool_choice": {"type": "none"}}),
    );
    assert_eq!(next["content"][0]["type"], "text", "{next}");
}

#[test]
fn errors_have_the_form_of_anthropic() {
    let config = Config { keys: Keys::new(["secret"]), ..Config::default() };
    let server = TestServer::with(Setup { config, ..Setup::default() });
    let send = |headers: &str, body: &Value| {
        server.send(
            "POST",
            "/v1/messages",
            &format!("Connection: close\r\n{headers}"),
            &body.to_string(),
        )
    };
    let kind = |reply: &crate::client::Reply| {
        let json = reply.json();
        assert_eq!(json["type"], "error", "{json}");
        assert!(json["error"]["message"].is_string());
        json["error"]["type"].as_str().unwrap().to_owned()
    };
    let reply = send("", &ask(json!({})));
    assert_eq!((reply.status, kind(&reply).as_str()), (401, "authentication_error"));
    let key = "x-api-key: secret\r\nanthropic-version: 2023-06-01\r\n";
    assert_eq!(send(key, &ask(json!({}))).status, 200);
    for (more, status, error, field) in [
        (json!({"messages": []}), 400, "invalid_request_error", "messages"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            400,
            "invalid_request_error",
            "messages[0].content[0].type",
        ),
        (json!({"max_tokens": "x"}), 400, "invalid_request_error", "max_tokens"),
        (json!({"stop_sequences": [""]}), 400, "invalid_request_error", "stop_sequences"),
        (json!({"tools": [{"name": "x"}]}), 400, "invalid_request_error", "tools[0].input_schema"),
        (
            json!({"tool_choice": {"type": "some"}}),
            400,
            "invalid_request_error",
            "tool_choice.type",
        ),
        (json!({"thinking": {"type": "loud"}}), 400, "invalid_request_error", "thinking.type"),
        (json!({"model": "claude"}), 404, "not_found_error", "model"),
    ] {
        let reply = send(key, &ask(more.clone()));
        assert_eq!((reply.status, kind(&reply).as_str()), (status, error), "{more}: {reply:?}");
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(&format!("`{field}`")), "{message}");
    }
    let reply = server.send("GET", "/v1/messages", &format!("Connection: close\r\n{key}"), "");
    assert_eq!((reply.status, kind(&reply).as_str()), (405, "invalid_request_error"));
}

#[test]
fn a_message_of_the_assistant_at_the_end_goes_on() {
    let server = TestServer::start();
    let question = json!({"role": "user", "content": "What is the sea?"});
    let whole = post(&server, json!({"max_tokens": 24}));
    let text = whole["content"][0]["text"].as_str().unwrap();
    let begun = &text[..text.char_indices().filter(|(_, c)| *c == ' ').nth(5).unwrap().0];
    // The prompt that asks for an answer, and then the text.
    let asked = server.post("/apply-template", &json!({"messages": [question]})).json();
    let prompt = format!("{}{begun}", asked["prompt"].as_str().unwrap());
    let raw =
        json!({"prompt": prompt, "max_tokens": 24, "temperature": 0, "logit_bias": {"0": -100}});
    let raw = server.post("/v1/completions", &raw).json();
    for content in [
        json!(begun),
        json!([{"type": "text", "text": begun, "cache_control": {"type": "ephemeral"}}]),
    ] {
        let messages = json!([question, {"role": "assistant", "content": content}]);
        let more = json!({"messages": messages, "max_tokens": 24});
        let on = post(&server, more.clone());
        let said = on["content"][0]["text"].as_str().unwrap();
        assert_eq!(raw["choices"][0]["text"], said);
        let count = |value: &Value| {
            value["usage"]["input_tokens"].as_u64().unwrap()
                + value["usage"]["cache_read_input_tokens"].as_u64().unwrap()
        };
        assert!(count(&on) > count(&whole));
        let streamed =
            server.post("/v1/messages", &ask(with(more.clone(), json!({"stream": true}))));
        assert_eq!(plain(told(&streamed.named_events())), plain(on.clone()));
        let counted =
            server.post("/v1/messages/count_tokens", &json!({"messages": messages})).json();
        assert_eq!(counted["input_tokens"], count(&on));
        // So it does by Ollama's API.
        let ollama = json!({
            "model": "demo", "stream": false, "messages": [question, {"role": "assistant", "content": begun}],
            "options": {"num_predict": 24, "temperature": 0, "logit_bias": {"0": -100}}
        });
        assert_eq!(server.post("/api/chat", &ollama).json()["message"]["content"], said);
    }
    // An answer that begins with a form of its own does not.
    let messages = json!([question, {"role": "assistant", "content": "{"}]);
    for more in [
        json!({"tools": tools(), "tool_choice": {"type": "any"}}),
        json!({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
    ] {
        let reply = server.post("/v1/messages", &ask(with(more, json!({"messages": messages}))));
        assert_eq!(reply.status, 400, "{reply:?}");
        assert!(reply.body.contains("`messages`"), "{reply:?}");
    }
    for format in [json!("json"), json!({"type": "object"})] {
        let ollama =
            json!({"model": "demo", "stream": false, "messages": messages, "format": format});
        let reply = server.post("/api/chat", &ollama);
        assert_eq!(reply.status, 400, "{reply:?}");
        assert!(reply.body.contains("`messages`"), "{reply:?}");
    }
    // Neither does one that says nothing, or calls.
    for content in
        [json!(""), json!([{"type": "tool_use", "id": "t", "name": "look_up", "input": {}}])]
    {
        let messages = json!([question, {"role": "assistant", "content": content}]);
        assert_eq!(server.post("/v1/messages", &ask(json!({"messages": messages}))).status, 200);
    }
}

#[test]
fn what_goes_on_stands_after_its_thought() {
    let server = thinking("assistant: <think>\n");
    let prompt = |content: Value| {
        let messages =
            json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]);
        server.post("/v1/messages/count_tokens", &json!({"messages": messages})).json()["input_tokens"].as_u64().unwrap()
    };
    let tokens = |text: &str| {
        server.post("/tokenize", &json!({"content": text})).json()["count"].as_u64().unwrap()
    };
    let thought = |text: &str| json!([{"type": "thinking", "thinking": text, "signature": ""}, {"type": "text", "text": "So"}]);
    // Without a thought an empty one ends before the text.
    let (none, some) = (prompt(json!("So")), prompt(thought("A long, long thought.")));
    assert!(some >= none + tokens("A long, long thought.") - 1, "{none} {some}");
    let more = json!({
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}],
        "logit_bias": {THINK.to_string(): -100, THINK_END.to_string(): -100, "0": -100}
    });
    let on = post(&server, more);
    assert_eq!(
        (&on["content"][0]["type"], on["content"].as_array().unwrap().len()),
        (&json!("text"), 1)
    );
}
