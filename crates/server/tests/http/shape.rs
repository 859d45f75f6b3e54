//! Answers that have to look like something.

use std::time::Instant;

use serde_json::{Value, json};

use crate::server::{TestServer, with};

fn ask(schema: &Value) -> Value {
    json!({
        "messages": [{"role": "user", "content": "Who is it?"}], "max_tokens": 200, "temperature": 1.2, "seed": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}}
    })
}

fn person() -> Value {
    json!({
        "type": "object", "required": ["age", "kind"], "additionalProperties": false,
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["cat", "dog"]}}
    })
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "look_up", "parameters": person()}}])
}

#[test]
fn an_answer_follows_its_schema() {
    let server = TestServer::start();
    let reply = server.post("/v1/chat/completions", &ask(&person())).json();
    let text = reply["choices"][0]["message"]["content"].as_str().unwrap();
    let value: Value =
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {reply}"));
    assert!(value["age"].as_u64().is_some_and(|age| age < 100), "{value}");
    assert!(value["kind"] == "cat" || value["kind"] == "dog", "{value}");
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");

    let many =
        server.post("/v1/chat/completions", &with(ask(&person()), json!({"n": 3, "stream": true})));
    for index in 0..3 {
        let pieces = many.events(true);
        let of = pieces.iter().filter(|event| event["choices"][0]["index"] == index);
        let text: String =
            of.filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
        assert!(serde_json::from_str::<Value>(&text).unwrap()["age"].is_u64(), "{text}");
    }
}

#[test]
fn r_d15_schemas_that_do_harm_are_refused_and_the_engine_lives() {
    let server = TestServer::start();
    let large = json!({"type": "object", "properties": {"x": {"enum": ["y".repeat(1 << 20)]}}});
    for schema in [
        json!({"type": "object", "properties": {"a": {"$ref": "http://evil.com/x"}}}),
        json!({"type": "object", "properties": {"a": {"$ref": "file:///etc/passwd"}}}),
        json!({"$ref": "#"}),
        json!({"type": "object", "required": ["x"], "properties": {"x": false}}),
        json!({"type": "nonsense"}),
        json!({"type": "string", "pattern": "("}),
        large,
    ] {
        let start = Instant::now();
        let reply = server.post("/v1/chat/completions", &ask(&schema));
        assert!(matches!(reply.status, 400 | 422), "{schema:.60}: {reply:?}");
        assert_eq!(reply.json()["error"]["param"], "response_format", "{}", reply.error());
        assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
    }
    for wrong in [json!([]), json!("x"), json!(1), Value::Null] {
        let reply = server.post("/v1/chat/completions", &ask(&wrong));
        assert_eq!(reply.status, 400, "{wrong}: {reply:?}");
    }
    // What backtracks elsewhere is only a pattern here.
    let start = Instant::now();
    let nested = json!({"type": "string", "pattern": "^(a+)+b$", "maxLength": 20});
    let reply = server.post("/v1/chat/completions", &ask(&nested));
    assert!(matches!(reply.status, 200 | 400 | 422), "{reply:?}");
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
    assert_eq!(server.post("/v1/chat/completions", &ask(&person())).status, 200);
}

#[test]
fn p_json_object_schema_ignored_a_schema_holds_by_whatever_name() {
    let server = TestServer::start();
    let schema = json!({
        "type": "object", "required": ["a"], "additionalProperties": false,
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}
    });
    let ask = |path: &str, form: &Value| {
        let prompt = json!({
            "messages": [{"role": "user", "content": "Answer in JSON: a number a."}],
            "prompt": "Answer in JSON: a number a.", "max_tokens": 40, "temperature": 0
        });
        server.post(path, &with(prompt, form.clone()))
    };
    for form in [
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        json!({"guided_json": schema}),
        json!({"structured_outputs": {"json": schema}}),
        json!({"json_schema": schema}),
        json!({"grammar": "root ::= \"{\\\"a\\\": \" [0-9] \"}\""}),
    ] {
        let chat =
            ask("/v1/chat/completions", &form).json()["choices"][0]["message"]["content"].clone();
        let text = ask("/v1/completions", &form).json()["choices"][0]["text"].clone();
        for answer in [chat, text] {
            let value: Value = serde_json::from_str(answer.as_str().unwrap()).unwrap();
            assert!(value["a"].as_u64().is_some_and(|a| a < 10), "{form}: {answer}");
        }
    }
    let choice = ask("/v1/completions", &json!({"guided_choice": ["sea.", "s(k)y"]})).json();
    let choice = choice["choices"][0]["text"].as_str().unwrap();
    assert!(["sea.", "s(k)y"].contains(&choice), "{choice}");
    let both = ask("/v1/completions", &json!({"guided_regex": "a", "guided_json": schema}));
    assert_eq!((both.status, &both.json()["error"]["param"]), (400, &json!("guided_regex")));
}

#[test]
fn p_schema_format_unknown_what_cannot_be_done_names_its_place_or_its_tool() {
    let server = TestServer::start();
    for schema in [
        json!({"type": "object", "properties": {"v": {
            "type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}
        }}, "required": ["v"], "additionalProperties": false}),
        json!({"type": "object", "properties": {"v": {"type": "string", "format": "nanoid", "maxLength": 3}}, "required": ["v"]}),
    ] {
        let reply = server.post("/v1/chat/completions", &ask(&schema));
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    let lookaround = json!({"type": "string", "pattern": "^(?=a)b$"});
    let bad =
        json!({"type": "object", "properties": {"w": {"type": "array", "items": lookaround}}});
    let reply = server.post("/v1/chat/completions", &ask(&bad));
    assert_eq!(reply.status, 422, "{reply:?}");
    assert!(reply.error().contains("`properties.w.items`"), "{}", reply.error());
    let keyword =
        json!({"type": "object", "properties": {"w": {"type": "array", "uniqueItems": true}}});
    let error = server.post("/v1/chat/completions", &ask(&keyword)).error();
    assert!(error.contains("`properties.w`") && error.contains("`uniqueItems`"), "{error}");
    let options =
        json!({"oneOf": [{"type": "object"}, {"type": "object", "properties": {"x": {}}}]});
    let error = server.post("/v1/chat/completions", &ask(&options)).error();
    assert!(error.contains("`oneOf` needs options that exclude each other"), "{error}");

    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let body = json!({
        "messages": [{"role": "user", "content": "x"}], "tool_choice": "required",
        "tools": [tool("innocent", person()), tool("guilty", bad)]
    });
    let reply = server.post("/v1/chat/completions", &body);
    let error = reply.error();
    assert_eq!((reply.status, error.contains("`guilty`")), (422, true), "{error}");
    assert!(error.contains("`properties.w.items`") && !error.contains("call_"), "{error}");
}

#[test]
fn a_tool_that_has_to_be_called_is_called() {
    let server = TestServer::start();
    let body = json!({
        "messages": [{"role": "user", "content": "Who is it?"}], "tools": tools(), "max_tokens": 200,
        "tool_choice": {"type": "function", "function": {"name": "look_up"}}, "temperature": 1, "seed": 2
    });
    let reply = server.post("/v1/chat/completions", &body).json();
    let choice = &reply["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &Value::Null),
        "{reply}"
    );
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("look_up")));
    assert!(call["id"].as_str().unwrap().starts_with("call_"));
    let arguments: Value =
        serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["age"].is_u64(), "{arguments}");

    let events =
        server.post("/v1/chat/completions", &with(body, json!({"stream": true}))).events(true);
    let calls: Vec<&Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["tool_calls"].get(0))
        .collect();
    assert_eq!(
        (calls.len(), &calls[0]["index"], &calls[0]["function"]),
        (1, &json!(0), &call["function"])
    );
    assert!(events.iter().all(|event| !event.to_string().contains("<tool_call>")));
}

#[test]
fn one_call_is_one_and_a_call_that_is_cut_off_is_no_text() {
    let server = TestServer::start();
    let two = json!([tools()[0], {"type": "function", "function": {"name": "other", "parameters": person()}}]);
    let body = json!({
        "messages": [{"role": "user", "content": "Who is it?"}], "tools": two, "tool_choice": "required",
        "temperature": 1, "seed": 2, "max_tokens": 200
    });
    let single = with(body.clone(), json!({"parallel_tool_calls": false}));
    let reply = server.post("/v1/chat/completions", &single).json();
    let choice = &reply["choices"][0];
    assert_eq!(choice["message"]["tool_calls"].as_array().map(Vec::len), Some(1), "{reply}");
    assert_eq!(choice["finish_reason"], "tool_calls");

    let cut = with(body, json!({"max_tokens": 8}));
    let choice = server.post("/v1/chat/completions", &cut).json()["choices"][0].clone();
    assert_eq!(choice["message"]["content"], Value::Null, "{choice}");
    assert_eq!(choice["finish_reason"], "length");
    let events =
        server.post("/v1/chat/completions", &with(cut, json!({"stream": true}))).events(true);
    assert!(!events.iter().any(|event| event.to_string().contains("tool_call>")), "{events:?}");
}

#[test]
fn tools_that_are_none_are_refused() {
    let server = TestServer::start();
    let body =
        json!({"messages": [{"role": "user", "content": "x"}], "tools": tools(), "max_tokens": 4});
    for (more, param) in [
        (json!({"tools": [{"type": "function"}]}), "tools"),
        (json!({"tools": "x"}), "tools"),
        (json!({"tool_choice": "maybe"}), "tool_choice"),
        (
            json!({"tool_choice": {"type": "function", "function": {"name": "other"}}}),
            "tool_choice",
        ),
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
        (
            json!({"tool_choice": "required", "response_format": {"type": "json_object"}}),
            "response_format",
        ),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
    ] {
        let reply = server.post("/v1/chat/completions", &with(body.clone(), more.clone()));
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{more}");
    }
    for choice in ["auto", "none"] {
        let reply = server
            .post("/v1/chat/completions", &with(body.clone(), json!({"tool_choice": choice})));
        assert_eq!(reply.status, 200, "{reply:?}");
    }
}
