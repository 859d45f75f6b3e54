//! `/v1/responses`.

use boostr_server::{Config, Keys};
use serde_json::{Value, json};

use crate::server::{Setup, THINK, THINK_END, TestServer, fresh_folder, thinker, with};
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
fn items_of_responses_that_are_kept_are_referred_to() {
    let server = TestServer::start();
    let first = post(&server, json!({}));
    let id = &first["output"][0]["id"];
    let user = json!({"role": "user", "content": "What is the sea?"});
    let more = json!({"role": "user", "content": "And the land?"});
    let answer = json!({"role": "assistant", "content": text(&first)});
    let whole = post(&server, json!({"input": [user, answer, more]}));
    for reference in [json!({"type": "item_reference", "id": id}), json!({"id": id})] {
        let body = json!({"input": [user, reference, more]});
        let next = post(&server, body);
        assert_eq!(text(&next), text(&whole));
        // It goes on from there, with the item itself.
        let path = format!("/v1/responses/{}/input_items", next["id"].as_str().unwrap());
        let items = server.get(&path).json();
        assert_eq!((&items["data"][1]["id"], &items["data"][1]["role"]), (id, &json!("assistant")));
    }
    let reference = json!({"type": "item_reference", "id": id});
    let twice = json!({"input": [user, reference, reference]});
    let known = json!({"input": [reference], "previous_response_id": first["id"]});
    for (body, param) in [(twice, "input[2].id"), (known, "input[0].id")] {
        let reply = server.post("/v1/responses", &ask(body));
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)));
    }
    server.delete(&format!("/v1/responses/{}", first["id"].as_str().unwrap()));
    for id in [id.clone(), json!("msg_0123456789abcdef_0"), json!("msg_x_y"), json!("\u{e9}")] {
        let body = ask(json!({"input": [user, {"type": "item_reference", "id": id}]}));
        let reply = server.post("/v1/responses", &body);
        let error = reply.json()["error"].clone();
        assert_eq!((reply.status, &error["code"]), (404, &json!("item_not_found")), "{error}");
        assert_eq!(error["param"], "input[1].id");
    }
}

#[test]
fn no_limit_of_a_response_is_minus_one() {
    let server = TestServer::start();
    let response = post(&server, json!({"max_output_tokens": -1, "input": "Hi"}));
    assert_eq!(response["max_output_tokens"], Value::Null);
    let reply = server.post("/v1/responses", &ask(json!({"max_output_tokens": -2})));
    assert_eq!(reply.json()["error"]["param"], "max_output_tokens");
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
        (json!({"input": [{"type": "item_reference"}]}), "input[0].id"),
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

/// A server with this folder for sessions, started again and again.
fn restarted(folder: &std::path::Path, config: Config) -> TestServer {
    TestServer::with(Setup { config, sessions: Some(folder.to_owned()), ..Setup::default() })
}

fn path(response: &Value) -> String {
    format!("/v1/responses/{}", response["id"].as_str().unwrap())
}

#[test]
fn a_response_goes_on_after_a_restart_where_sessions_are_kept() {
    let folder = fresh_folder();
    let mut server = restarted(&folder, Config::default());
    let first = post(&server, json!({"instructions": "Be brief."}));
    let next = json!({"input": "And the land?", "previous_response_id": first["id"]});
    let second = post(&server, next.clone());
    let unkept = post(&server, json!({"store": false}));
    let gone = post(&server, json!({}));
    assert_eq!(server.delete(&path(&gone)).json()["deleted"], true);
    server.join();
    drop(server);

    let server = restarted(&folder, Config::default());
    assert_eq!(server.get(&path(&first)).json(), first);
    assert_eq!(server.get(&path(&second)).json(), second);
    assert_eq!(text(&post(&server, next.clone())), text(&second));
    for response in [&unkept, &gone] {
        assert_eq!(server.get(&path(response)).status, 404);
    }
    // They are no sessions.
    assert_eq!(server.get("/v1/sessions").json()["data"], json!([]));

    // A damaged file is named, ends nothing, and can be deleted.
    let file = |response: &Value| {
        let files = std::fs::read_dir(folder.join(".responses"))
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let id = response["id"].as_str().unwrap();
        files.into_iter().find(|file| file.to_str().unwrap().contains(id)).unwrap()
    };
    let damaged = file(&first);
    std::fs::write(&damaged, "{}").unwrap();
    drop(server);
    let server = restarted(&folder, Config::default());
    let reply = server.get(&path(&first));
    assert_eq!(
        (reply.status, reply.json()["error"]["code"].clone()),
        (404, json!("response_not_found"))
    );
    let name = damaged.file_name().unwrap().to_str().unwrap();
    assert!(reply.error().contains(name) && reply.error().contains("damaged"), "{}", reply.error());
    let reply = server.post("/v1/responses", &ask(next));
    assert_eq!(
        (reply.status, reply.json()["error"]["code"].clone()),
        (404, json!("previous_response_not_found"))
    );
    assert!(reply.error().contains(name), "{}", reply.error());
    assert_eq!(server.get(&path(&second)).json(), second);
    assert_eq!(server.delete(&path(&first)).status, 200);
    assert!(!damaged.exists());
    drop(server);

    // Another key sees nothing of it.
    let keys = || Config { keys: Keys::new(["one", "two"]), ..Config::default() };
    let server = restarted(&folder, keys());
    let of = |key: &str| format!("Connection: close\r\nAuthorization: Bearer {key}\r\n");
    let mine = server.send("POST", "/v1/responses", &of("one"), &ask(json!({})).to_string()).json();
    drop(server);
    let server = restarted(&folder, keys());
    for (key, response, status) in [("one", &mine, 200), ("two", &mine, 404), ("one", &second, 404)]
    {
        assert_eq!(server.send("GET", &path(response), &of(key), "").status, status);
        let more = json!({"input": "And?", "previous_response_id": response["id"]});
        let body = ask(more).to_string();
        assert_eq!(server.send("POST", "/v1/responses", &of(key), &body).status, status);
    }
    assert_eq!(server.send("DELETE", &path(&mine), &of("two"), "").status, 404);
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn responses_share_the_quota_of_sessions() {
    let folder = fresh_folder();
    let config = || Config { sessions_quota: 4000, ..Config::default() };
    let mut server = restarted(&folder, config());
    let made: Vec<Value> = (0..6).map(|_| post(&server, json!({}))).collect();
    server.join();
    drop(server);
    let files = std::fs::read_dir(folder.join(".responses")).unwrap();
    let bytes: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert!(bytes > 1000 && bytes <= 4000, "{bytes}");
    let server = restarted(&folder, config());
    let there = made.iter().map(|response| server.get(&path(response)).status == 200);
    let there: Vec<bool> = there.collect();
    assert!(!there[0] && there[5] && there.is_sorted(), "{there:?}");
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_items_before_a_response_have_pages() {
    let server = TestServer::start();
    let input = json!([
        {"role": "user", "content": "One"},
        {"type": "message", "id": "msg_mine", "role": "assistant", "content": [{"type": "output_text", "text": "Two", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Three"}]}
    ]);
    let first = post(&server, json!({"input": input}));
    let second = post(&server, json!({"input": "And?", "previous_response_id": first["id"]}));
    let list = |response: &Value, query: &str| {
        let reply = server.get(&format!("{}/input_items{query}", path(response)));
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.json()
    };
    let all = list(&second, "?order=asc");
    assert_eq!((&all["object"], &all["has_more"]), (&json!("list"), &json!(false)));
    let texts = |page: &Value| -> Vec<String> {
        let items = page["data"].as_array().unwrap().iter();
        items.map(|item| item["content"][0]["text"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(texts(&all), ["One", "Two", "Three", text(&first), "And?"]);
    let item = &all["data"][0];
    assert_eq!(
        (&item["type"], &item["status"], &item["role"]),
        (&json!("message"), &json!("completed"), &json!("user"))
    );
    assert_eq!(item["content"], json!([{"type": "input_text", "text": "One"}]));
    assert_eq!((&all["data"][1]["id"], &all["data"][3]), (&json!("msg_mine"), &first["output"][0]));
    let backwards: Vec<String> = texts(&all).into_iter().rev().collect();
    assert_eq!(texts(&list(&second, "")), backwards);
    // Page by page it is the same.
    for (order, want) in [("asc", texts(&all)), ("desc", backwards)] {
        let (mut got, mut after) = (Vec::new(), String::new());
        loop {
            let page = list(&second, &format!("?order={order}&limit=2{after}"));
            got.extend(texts(&page));
            let data = page["data"].as_array().unwrap();
            assert_eq!(
                (&page["first_id"], &page["last_id"]),
                (&data[0]["id"], &data[data.len() - 1]["id"])
            );
            if page["has_more"] == false {
                break;
            }
            // As clients may write it: any character by its number.
            let escapes = page["last_id"].as_str().unwrap().bytes().map(|b| format!("%{b:02X}"));
            after = format!("&after={}", escapes.collect::<String>());
        }
        assert_eq!(got, want);
    }
    for (query, param) in [
        ("?limit=0", "limit"),
        ("?limit=101", "limit"),
        ("?order=up", "order"),
        ("?after=x", "after"),
        ("?after=%FF", "after"),
    ] {
        let reply = server.get(&format!("{}/input_items{query}", path(&second)));
        assert_eq!(
            (reply.status, &reply.json()["error"]["param"]),
            (400, &json!(param)),
            "{query}"
        );
    }
    assert_eq!(server.get("/v1/responses/resp_none/input_items").status, 404);
    // There is nothing to cancel.
    let cancelled = server.post(&format!("{}/cancel", path(&first)), &json!({}));
    assert_eq!(
        (cancelled.status, &cancelled.json()["error"]["code"]),
        (400, &json!("response_not_cancellable"))
    );
    assert_eq!(server.post("/v1/responses/resp_none/cancel", &json!({})).status, 404);
}

/// A custom tool, as Codex has them.
fn custom(format: &Value) -> Value {
    json!({"type": "custom", "name": "patch", "description": "Changes files.", "format": format})
}

#[test]
fn a_custom_tool_is_called_with_a_text_that_follows_its_grammar() {
    let server = TestServer::start();
    let lark = "start: \"*** Begin\" LF line{1,3} \"*** End\"\nline: /[+-] \"[a-z]{1,4}\"/ LF\n%import common.LF\n";
    let grammars = [
        json!({"type": "grammar", "syntax": "lark", "definition": lark}),
        json!({"type": "grammar", "syntax": "regex", "definition": "\\*\\*\\* Begin\n([+-] \"[a-z]{1,4}\"\n){1,3}\\*\\*\\* End"}),
    ];
    for format in &grammars {
        for choice in [json!({"type": "custom", "name": "patch"}), json!("required")] {
            let more = json!({
                "tools": [custom(format)], "tool_choice": choice, "max_output_tokens": 200, "logit_bias": {},
                "temperature": 1, "seed": 3
            });
            let response = post(&server, more.clone());
            let call = &response["output"][0];
            assert_eq!(
                (&call["type"], &call["name"], &call["status"], &response["status"]),
                (
                    &json!("custom_tool_call"),
                    &json!("patch"),
                    &json!("completed"),
                    &json!("completed")
                ),
                "{response}"
            );
            let input = call["input"].as_str().unwrap();
            assert!(
                input.starts_with("*** Begin\n")
                    && input.ends_with("\n*** End")
                    && input.contains('"'),
                "{input}"
            );
            assert_eq!(response["output"].as_array().unwrap().len(), 1);
            assert!(call["call_id"].as_str().unwrap().starts_with("call_"), "{call}");

            let events = server
                .post("/v1/responses", &ask(with(more, json!({"stream": true}))))
                .named_events();
            let of = |kind: &str| {
                events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>()
            };
            let said: String = of("response.custom_tool_call_input.delta")
                .iter()
                .map(|event| event["delta"].as_str().unwrap())
                .collect();
            assert_eq!(said, input);
            assert_eq!(of("response.custom_tool_call_input.done")[0]["input"], input);
            assert_eq!(of("response.output_item.added")[0]["item"]["input"], "");
            assert_eq!(of("response.output_item.done")[0]["item"]["input"], input);

            // What it gives comes after it, by the id of the response or in one request.
            let output = json!({"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."});
            let by_id =
                post(&server, json!({"input": [output], "previous_response_id": response["id"]}));
            let user = json!({"role": "user", "content": "What is the sea?"});
            let whole = post(&server, json!({"input": [user, call, output]}));
            assert_eq!(by_id["usage"]["input_tokens"], whole["usage"]["input_tokens"]);
            assert_eq!(text(&by_id), text(&whole));
        }
    }
    // One without a format says anything.
    let more = json!({"tools": [custom(&json!({"type": "text"}))], "tool_choice": {"type": "custom", "name": "patch"}});
    let call = &post(&server, more)["output"][0];
    assert_eq!(
        (&call["type"], &call["status"]),
        (&json!("custom_tool_call"), &json!("incomplete")),
        "{call}"
    );

    for (tool, choice, param) in [
        (
            custom(&json!({"type": "grammar", "syntax": "peg", "definition": "x"})),
            json!("auto"),
            "tools[0].format.syntax",
        ),
        (
            custom(&json!({"type": "grammar", "syntax": "lark"})),
            json!("auto"),
            "tools[0].format.definition",
        ),
        (
            custom(&json!({"type": "grammar", "syntax": "lark", "definition": "start: other"})),
            json!("required"),
            "tools[0].format.definition",
        ),
        (custom(&json!({"type": "json"})), json!("auto"), "tools[0].format.type"),
        (custom(&json!(null)), json!({"type": "custom", "name": "other"}), "tool_choice"),
        (json!({"type": "custom"}), json!("auto"), "tools[0].name"),
    ] {
        let reply =
            server.post("/v1/responses", &ask(json!({"tools": [tool], "tool_choice": choice})));
        assert!(matches!(reply.status, 400 | 422), "{reply:?}");
        assert_eq!(reply.json()["error"]["param"], param, "{}", reply.error());
    }
}

#[test]
fn tools_of_a_namespace_are_called_by_their_own_names() {
    let server = TestServer::start();
    let function = |name: &str| {
        let parameters = json!({
            "type": "object", "required": ["age"], "additionalProperties": false,
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}
        });
        json!({"type": "function", "name": name, "description": "x", "parameters": parameters, "defer_loading": true})
    };
    let tools = json!([
        {"type": "namespace", "name": "one", "description": "Of one.", "tools": [function("find"), custom(&json!(null))]},
        {"type": "namespace", "name": "two", "tools": [function("find")]},
        {"type": "tool_search"}, function("find")
    ]);
    let ask_for = |choice: Value| {
        let more = json!({"tools": tools, "tool_choice": choice, "max_output_tokens": 100, "temperature": 1, "seed": 2});
        let reply = server.post("/v1/responses", &ask(more));
        assert_eq!(reply.header("x-boostr-ignored"), Some("tools[2]"), "{reply:?}");
        reply.json()["output"][0].clone()
    };
    let named =
        |namespace: Value| json!({"type": "function", "name": "find", "namespace": namespace});
    for namespace in [json!("one"), json!("two"), json!(null)] {
        let call = ask_for(named(namespace.clone()));
        assert_eq!((&call["name"], &call["namespace"]), (&json!("find"), &namespace), "{call}");
        // It is read again as it is.
        let input = json!([{"role": "user", "content": "Hi"}, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}]);
        assert_eq!(server.post("/v1/responses", &ask(json!({"input": input}))).status, 200);
    }
    let call = ask_for(json!({"type": "custom", "name": "patch", "namespace": "one"}));
    assert_eq!(
        (&call["type"], &call["name"], &call["namespace"]),
        (&json!("custom_tool_call"), &json!("patch"), &json!("one"))
    );
    let allowed =
        json!({"type": "allowed_tools", "mode": "required", "tools": [named(json!("two"))]});
    assert_eq!(ask_for(allowed)["namespace"], "two");
}

#[test]
fn functions_of_long_namespaces_keep_their_namespaces() {
    let server = TestServer::start();
    let parameters = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let function = |name: &str| json!({"type": "function", "name": name, "parameters": parameters});
    let long = |end: &str| format!("{}{end}", "mcp__a_server_with_a_long_name_".repeat(3));
    let wide = "f".repeat(64);
    let of = |end: &str| json!({"type": "namespace", "name": long(end), "tools": [function("find"), function(&wide)]});
    let tools = json!([of("one"), of("two"), function("find"), function(&wide)]);
    for (namespace, name) in [
        (json!(long("one")), "find"),
        (json!(long("two")), "find"),
        (json!(null), "find"),
        (json!(long("one")), &*wide),
        (json!(long("two")), &*wide),
        (json!(null), &*wide),
    ] {
        let choice = json!({"type": "function", "name": name, "namespace": namespace});
        let more = json!({"tools": tools, "tool_choice": choice, "max_output_tokens": 150, "temperature": 1, "seed": 2});
        let response = post(&server, more);
        let call = response["output"][0].clone();
        assert_eq!((&call["name"], &call["namespace"]), (&json!(name), &namespace), "{response}");
        let input = json!([{"role": "user", "content": "Hi"}, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}]);
        assert_eq!(server.post("/v1/responses", &ask(json!({"input": input}))).status, 200);
    }
}

#[test]
fn too_many_tools_are_refused_before_one_is_looked_at() {
    let server = TestServer::start();
    // A grammar that is none: its error would come first if it were read.
    let broken =
        custom(&json!({"type": "grammar", "syntax": "lark", "definition": "start: other"}));
    let in_one = json!({"type": "namespace", "name": "n", "tools": vec![broken.clone(); 129]});
    for tools in [vec![broken.clone(); 129], vec![in_one]] {
        let reply = server.post("/v1/responses", &ask(json!({"tools": tools})));
        assert_eq!(reply.status, 400);
        let error = &reply.json()["error"];
        assert_eq!(error["param"], "tools", "{error}");
        assert!(error["message"].as_str().unwrap().contains("at most 128, found 129"), "{error}");
    }
}

#[test]
fn a_custom_tool_that_has_to_be_called_is_called_after_a_thought_too() {
    let server = thinking("assistant: <think>\n");
    // One that never ends its thought, and one that ends its answer in it.
    let more = |tokens: usize, bias: Value| {
        json!({
            "tools": [custom(&json!(null))], "tool_choice": "required", "max_output_tokens": tokens, "temperature": 1,
            "seed": 1, "logit_bias": bias
        })
    };
    let cut = more(6, json!({"0": -100, THINK_END.to_string(): -100}));
    let ended = more(60, json!({"0": 100, THINK_END.to_string(): -100}));
    for (more, status) in [(cut, "incomplete"), (ended, "completed")] {
        let response = post(&server, more.clone());
        assert_eq!(response["status"], status, "{response}");
        let call = response["output"].as_array().unwrap().last().unwrap();
        assert_eq!(
            (&call["type"], &call["name"], &call["status"]),
            (&json!("custom_tool_call"), &json!("patch"), &json!(status)),
            "{response}"
        );
        let streamed = server.post("/v1/responses", &ask(with(more, json!({"stream": true}))));
        let events = streamed.named_events();
        let added = events.iter().filter(|event| event["type"] == "response.output_item.added");
        let kinds: Vec<&str> = added.map(|event| event["item"]["type"].as_str().unwrap()).collect();
        assert_eq!(kinds.last(), Some(&"custom_tool_call"), "{kinds:?}");
    }
}
