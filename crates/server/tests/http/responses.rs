//! `/v1/responses`.

use boostr_server::Config;
use serde_json::{Value, json};

use crate::server::{Setup, THINK, THINK_END, TestServer, thinker, with};
use crate::thoughts::{server as thinking, template};

fn ask(more: Value) -> Value {
    let body = json!({
        "input": "What is the sea?", "max_output_tokens": 12, "temperature": 0, "logit_bias": {"0": -100}
    });
    with(body, more)
}

fn post(server: &TestServer, more: Value) -> Value {
    server.post("/v1/responses", &ask(more)).json()
}

/// The text of the item that is a message.
fn text(response: &Value) -> &str {
    let items = response["output"].as_array().unwrap();
    let message = items.iter().find(|item| item["type"] == "message").unwrap();
    message["content"][0]["text"].as_str().unwrap()
}

fn tools() -> Value {
    let parameters = json!({
        "type": "object", "required": ["age"], "additionalProperties": false,
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}
    });
    json!([
        {"type": "web_search"},
        {"type": "function", "name": "look_up", "description": "x", "strict": true, "parameters": parameters}
    ])
}

#[test]
fn a_response_is_the_answer_of_a_chat() {
    let server = TestServer::start();
    let response = post(&server, json!({"instructions": "Be brief.", "metadata": {"a": "b"}}));
    assert_eq!(response["object"], "response");
    assert!(response["id"].as_str().unwrap().starts_with("resp_"), "{response}");
    assert_eq!((&response["status"], &response["store"]), (&json!("incomplete"), &json!(true)));
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(
        (&response["instructions"], &response["metadata"]),
        (&json!("Be brief."), &json!({"a": "b"}))
    );
    assert_eq!(response["max_output_tokens"], 12);
    let message = &response["output"][0];
    assert_eq!((&message["role"], &message["status"]), (&json!("assistant"), &json!("incomplete")));
    assert_eq!(message["content"][0]["type"], "output_text");

    let chat = server.post("/v1/chat/completions", &json!({
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the sea?"}],
        "max_tokens": 12, "temperature": 0, "logit_bias": {"0": -100}
    })).json();
    assert_eq!(text(&response), chat["choices"][0]["message"]["content"]);
    let usage = &response["usage"];
    assert_eq!(usage["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(usage["output_tokens"], 12);
    assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], 0);

    // Items, and a text that is held.
    let items = json!([
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is the sea?"}]}
    ]);
    assert_eq!(text(&post(&server, json!({"input": items}))), text(&response));
    let format =
        json!({"type": "json_schema", "name": "x", "strict": true, "schema": {"enum": ["cat"]}});
    let held = post(&server, json!({"text": {"format": format}, "max_output_tokens": 40}));
    assert_eq!((text(&held), &held["status"]), ("\"cat\"", &json!("completed")));
}

#[test]
fn the_events_of_a_response_are_the_response() {
    let server = thinking("assistant: <think>\n");
    let mut both = 0;
    for seed in 0..8 {
        let more = json!({
            "temperature": 1, "seed": seed, "max_output_tokens": 24, "top_p": 0.9,
            "logit_bias": {THINK.to_string(): -100, THINK_END.to_string(): 7, "0": -100}
        });
        let whole = post(&server, more.clone());
        let streamed = server.post("/v1/responses", &ask(with(more, json!({"stream": true}))));
        let events = streamed.named_events();
        for (number, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], number, "{event}");
        }
        let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!(kinds[..2], ["response.created", "response.in_progress"]);
        let last = events.last().unwrap();
        let status = last["response"]["status"].as_str().unwrap();
        assert_eq!(last["type"], format!("response.{status}"));
        // Pieces, the whole at their end, and the items are the same.
        let mut output = Vec::new();
        let mut said = String::new();
        for event in &events {
            match event["type"].as_str().unwrap() {
                "response.output_item.added" => {
                    assert_eq!(event["output_index"], output.len());
                    said.clear();
                }
                "response.output_text.delta" | "response.reasoning_text.delta" => {
                    said.push_str(event["delta"].as_str().unwrap());
                    assert_eq!(event["output_index"], output.len());
                }
                "response.output_text.done" | "response.reasoning_text.done" => {
                    assert_eq!(event["text"], said);
                }
                "response.output_item.done" => {
                    assert_eq!(event["item"]["content"][0]["text"], said);
                    output.push(event["item"].clone());
                }
                _ => {}
            }
        }
        assert_eq!(last["response"]["output"], Value::from(output.clone()));
        let plain = |items: &Value| -> Vec<(String, String)> {
            let of = |value: &Value| value.as_str().unwrap().to_owned();
            let items = items.as_array().unwrap().iter();
            items.map(|item| (of(&item["type"]), of(&item["content"][0]["text"]))).collect()
        };
        assert_eq!(plain(&whole["output"]), plain(&last["response"]["output"]));
        both += u32::from(output.len() == 2 && output[0]["type"] == "reasoning");
    }
    assert!(both > 0, "no answer had a thought and a text");
}

#[test]
fn functions_are_called_and_what_they_give_is_read() {
    let server = TestServer::start();
    let more = json!({
        "tools": tools(), "tool_choice": {"type": "function", "name": "look_up"}, "max_output_tokens": 100,
        "temperature": 1, "seed": 2
    });
    let response = post(&server, more.clone());
    let told = server.post("/v1/responses", &ask(with(more.clone(), json!({"odd": 1}))));
    assert_eq!(told.header("x-boostr-ignored"), Some("odd, tools[0]"), "{told:?}");
    let call = &response["output"][0];
    assert_eq!(
        (&call["type"], &call["name"], &call["status"]),
        (&json!("function_call"), &json!("look_up"), &json!("completed")),
        "{response}"
    );
    assert_eq!(response["output"].as_array().unwrap().len(), 1);
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["age"].is_u64(), "{arguments}");
    assert_eq!(response["tools"], tools());

    let events =
        server.post("/v1/responses", &ask(with(more, json!({"stream": true})))).named_events();
    let of = |kind: &str| events.iter().find(|event| event["type"] == kind).unwrap();
    assert_eq!(of("response.output_item.added")["item"]["arguments"], "");
    assert_eq!(of("response.function_call_arguments.delta")["delta"], call["arguments"]);
    let done = of("response.function_call_arguments.done");
    assert_eq!((&done["arguments"], &done["name"]), (&call["arguments"], &call["name"]));
    assert_eq!(of("response.output_item.done")["item"]["arguments"], call["arguments"]);

    // Its output comes after it, in one request or by the id of the response.
    let output =
        json!({"type": "function_call_output", "call_id": call["call_id"], "output": "41"});
    let by_id = post(&server, json!({"input": [output], "previous_response_id": response["id"]}));
    let user = json!({"role": "user", "content": "What is the sea?"});
    let whole = post(&server, json!({"input": [user, call, output]}));
    assert_eq!(by_id["usage"]["input_tokens"], whole["usage"]["input_tokens"]);
    assert_eq!(text(&by_id), text(&whole));
}

#[test]
fn a_response_goes_on_from_one_that_is_kept() {
    let server = TestServer::start();
    let first = post(&server, json!({"instructions": "Be brief."}));
    let next = json!({"input": "And the land?", "previous_response_id": first["id"]});
    let second = post(&server, next.clone());
    // Instructions are those of their request alone.
    let whole = json!([
        {"role": "user", "content": "What is the sea?"},
        {"role": "assistant", "content": text(&first)},
        {"role": "user", "content": "And the land?"}
    ]);
    assert_eq!(text(&second), text(&post(&server, json!({"input": whole}))));
    assert_eq!(second["previous_response_id"], first["id"]);
    let path = format!("/v1/responses/{}", first["id"].as_str().unwrap());
    assert_eq!(server.get(&path).json(), first);

    assert_eq!(server.delete(&path).json()["deleted"], true);
    for reply in [server.get(&path), server.delete(&path)] {
        assert_eq!(
            (reply.status, &reply.json()["error"]["code"]),
            (404, &json!("response_not_found"))
        );
    }
    let gone = server.post("/v1/responses", &ask(next));
    assert_eq!(gone.status, 404);
    assert_eq!(gone.json()["error"]["code"], "previous_response_not_found");
    assert_eq!(gone.json()["error"]["param"], "previous_response_id");

    let unkept = post(&server, json!({"store": false}));
    let path = format!("/v1/responses/{}", unkept["id"].as_str().unwrap());
    assert_eq!((server.get(&path).status, &unkept["store"]), (404, &json!(false)));
}

#[test]
fn the_response_that_was_not_used_for_longest_makes_room() {
    let config = Config { max_responses: 2, ..Config::default() };
    let server = TestServer::with(Setup { config, ..Setup::default() });
    let made: Vec<Value> = (0..3).map(|_| post(&server, json!({"stream": false}))).collect();
    let status = |response: &Value| {
        server.get(&format!("/v1/responses/{}", response["id"].as_str().unwrap())).status
    };
    assert_eq!(made.iter().map(status).collect::<Vec<_>>(), [404, 200, 200]);
}

#[test]
fn what_cannot_be_answered_is_named() {
    let server = TestServer::start();
    for (more, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
        (json!({"input": [{"role": "user"}]}), "input[0].content"),
        (json!({"max_output_tokens": "many"}), "max_output_tokens"),
        (json!({"background": true}), "background"),
        (json!({"conversation": "x"}), "conversation"),
        (json!({"tools": [{"name": "x"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), "tools"),
        (json!({"tool_choice": {"type": "function", "name": "other"}}), "tool_choice"),
        (
            json!({"text": {"format": {"type": "json_schema", "name": "x"}}}),
            "text.format.json_schema.schema",
        ),
        (
            json!({"text": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}),
            "text.format",
        ),
        (json!({"n": 2}), "n"),
    ] {
        let reply = server.post("/v1/responses", &ask(more.clone()));
        assert!(matches!(reply.status, 400 | 422), "{more}: {reply:?}");
        assert_eq!(reply.json()["error"]["param"], param, "{more}: {}", reply.error());
        assert!(reply.error().contains(&format!("`{param}")), "{}", reply.error());
    }
}

#[test]
fn a_thought_of_a_kept_response_reaches_the_template() {
    let model = Some(thinker(&template("assistant: <think>\n")));
    let server = TestServer::with(Setup { model, ..Setup::default() });
    // All of it is a thought.
    let first = post(&server, json!({"logit_bias": {THINK_END.to_string(): -100, "0": -100}}));
    let thought = &first["output"][0]["content"][0]["text"];
    assert_eq!(first["output"][0]["type"], "reasoning", "{first}");
    let second = post(&server, json!({"input": "So?", "previous_response_id": first["id"]}));
    let messages = json!([
        {"role": "user", "content": "What is the sea?"},
        {"role": "assistant", "content": "", "reasoning_content": thought},
        {"role": "user", "content": "So?"}
    ]);
    let prompt = server.post("/apply-template", &json!({"messages": messages})).json();
    let tokens = server.post("/tokenize", &json!({"content": prompt["prompt"]})).json();
    // `<think>` is a token in the prompt, and text for `/tokenize`.
    let spelled = server.post("/tokenize", &json!({"content": "<think></think><think>"})).json();
    let count = |reply: &Value| reply["count"].as_u64().unwrap();
    let used = second["usage"]["input_tokens"].as_u64().unwrap();
    assert!(used <= count(&tokens) && used + count(&spelled) >= count(&tokens), "{second}");
}
