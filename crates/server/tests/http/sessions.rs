//! Conversations that are kept.

use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{Reply, read_until};
use crate::server::{Setup, THINK, THINK_END, TestServer, fresh_folder, thinker, with};
use crate::thoughts::template;

fn say(server: &TestServer, session: &str, text: &str) -> Reply {
    let body = json!({
        "session": session, "messages": [{"role": "user", "content": text}],
        "max_tokens": 12, "temperature": 0, "logit_bias": {"0": -100}
    });
    server.post("/v1/chat/completions", &body)
}

fn answer(reply: &Reply) -> String {
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[test]
fn a_session_goes_on_branches_and_rewinds() {
    let server = TestServer::with_sessions();
    let made = server.post("/v1/sessions", &json!({"id": "trip"}));
    assert_eq!((made.status, &made.json()["turns"]), (201, &json!(0)), "{made:?}");
    let first = say(&server, "trip", "The sea was");
    assert_eq!(first.json()["session"], json!({"id": "trip", "turn": 1}));
    let second = say(&server, "trip", "and then");
    let (first, second) = (answer(&first), answer(&second));

    let session = server.get("/v1/sessions/trip").json();
    assert_eq!((&session["turns"], &session["head"]), (&json!(2), &json!(2)));
    assert_eq!((&session["title"], &session["parent"]), (&json!("The sea was"), &Value::Null));
    let tree = session["tree"].as_array().unwrap();
    assert_eq!((&tree[1]["parent"], tree[0]["messages"].as_array().unwrap().len()), (&json!(1), 2));
    assert_eq!(tree[0]["messages"][1]["content"], first);

    // A branch has what was said, and goes its own way.
    let branch = server.post("/v1/sessions/trip/branch", &json!({"id": "paris", "turn": 1}));
    assert_eq!((branch.status, &branch.json()["turns"]), (201, &json!(1)));
    assert_eq!(branch.json()["parent"], json!({"session": "trip", "turn": 1}));
    assert_eq!(answer(&say(&server, "paris", "and then")), second);
    let rewound = server.post("/v1/sessions/trip/rewind", &json!({"turns": 1}));
    assert_eq!((rewound.status, &rewound.json()["head"]), (200, &json!(1)));
    let again = say(&server, "trip", "and then");
    assert_eq!(again.json()["session"]["turn"], 3);
    assert_eq!(answer(&again), second);

    let saved = server.send("POST", "/v1/sessions/trip/save", "", "").json();
    assert!(saved["file"].as_str().unwrap().ends_with(".safetensors"), "{saved}");
    let list = server.get("/v1/sessions").json();
    assert_eq!(list["data"].as_array().unwrap().len(), 2);
    let deleted = server.delete("/v1/sessions/paris");
    assert_eq!(
        deleted.json(),
        json!({"id": "paris", "object": "session.deleted", "deleted": true})
    );
    assert_eq!(server.get("/v1/sessions/paris").status, 404);
}

#[test]
fn a_session_goes_on_after_a_restart_from_its_state() {
    let folder = fresh_folder();
    let start = || TestServer::with(Setup { sessions: Some(folder.clone()), ..Setup::default() });
    let mut server = start();
    assert_eq!(server.post("/v1/sessions", &json!({"id": "s"})).status, 201);
    answer(&say(&server, "s", &"The sea was calm. ".repeat(20)));
    server.join();
    drop(server);
    let server = start();
    let reply = say(&server, "s", "and then");
    answer(&reply);
    let usage = &reply.json()["usage"];
    let computed = usage["prompt_tokens"].as_u64().unwrap()
        - usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(computed < 12, "{usage}");
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_was_said_when_a_client_left_is_kept() {
    let server = TestServer::with_sessions();
    server.post("/v1/sessions", &json!({"id": "s"}));
    let body = json!({
        "session": "s", "messages": [{"role": "user", "content": "Once"}], "stream": true,
        "max_tokens": 8000, "temperature": 0, "logit_bias": {"0": -100}
    });
    let mut stream = server.begin("/v1/chat/completions", &body);
    read_until(&mut stream, "\"content\":\"");
    // Nobody else may speak in it now.
    let busy = say(&server, "s", "Twice");
    assert_eq!(
        (busy.status, &busy.json()["error"]["code"]),
        (409, &json!("session_busy")),
        "{busy:?}"
    );
    drop(stream);
    server.wait(Duration::from_secs(1), |stats| stats.running == 0);
    let mut session = server.get("/v1/sessions/s").json();
    for _ in 0..100 {
        if session["turns"] == 1 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
        session = server.get("/v1/sessions/s").json();
    }
    assert_eq!(session["turns"], 1, "{session}");
    assert!(!session["tree"][0]["messages"][1]["content"].as_str().unwrap().is_empty());
    answer(&say(&server, "s", "Twice"));
}

#[test]
fn r_d12_a_name_is_a_name_and_no_path() {
    let server = TestServer::with_sessions();
    let long = "x".repeat(300);
    for name in
        ["../../etc/passwd", "..", ".", "a/b", "a\\b", "a\0b", "", ".hidden", "a\u{430}b", &long]
    {
        let reply = server.post("/v1/sessions", &json!({"id": name}));
        assert_eq!((reply.status, reply.error().is_empty()), (400, false), "{name:?}");
        let body = json!({"session": name, "messages": [{"role": "user", "content": "x"}]});
        assert_eq!(server.post("/v1/chat/completions", &body).status, 400, "{name:?}");
    }
    for path in ["%2e%2e%2f%2e%2e%2fetc%2fpasswd", "..%2Fx", "a%00b", "%D0%B0", &long, "%ff"] {
        let reply = server.get(&format!("/v1/sessions/{path}"));
        assert_eq!(reply.status, 400, "{path}: {reply:?}");
        reply.error();
    }
    assert_eq!(server.get("/v1/sessions/none").status, 404);
    let missing = say(&server, "none", "x");
    assert_eq!((missing.status, &missing.json()["error"]["param"]), (404, &json!("session")));
}

#[test]
fn what_cannot_be_is_refused() {
    let server = TestServer::with_sessions();
    assert_eq!(server.post("/v1/sessions", &json!({"id": "s"})).status, 201);
    assert_eq!(server.post("/v1/sessions", &json!({"id": "s"})).status, 409);
    assert!(
        server.send("POST", "/v1/sessions", "", "").json()["id"]
            .as_str()
            .unwrap()
            .starts_with("s-")
    );
    assert_eq!(server.post("/v1/sessions/s/rewind", &json!({"turn": 7})).status, 404);
    assert_eq!(server.post("/v1/sessions/s/rewind", &json!({"turn": "x"})).status, 400);
    assert_eq!(server.post("/v1/sessions/s/branch", &json!({"id": "s"})).status, 409);
    assert_eq!(server.post("/v1/sessions/none/branch", &json!({"id": "t"})).status, 404);
    let two = json!({"session": "s", "n": 2, "messages": [{"role": "user", "content": "x"}]});
    assert_eq!(server.post("/v1/chat/completions", &two).json()["error"]["param"], "n");
    let none = TestServer::start();
    assert_eq!(none.get("/v1/sessions").status, 404);
}

#[test]
fn a_damaged_session_is_listed_says_so_and_can_be_deleted() {
    let folder = fresh_folder();
    let server = TestServer::with(Setup { sessions: Some(folder.clone()), ..Setup::default() });
    let made = server.post("/v1/sessions", &json!({"id": "a", "system": "Be kind."}));
    assert_eq!(made.status, 201);
    let log = folder.join("a/log");
    let mut bytes = std::fs::read(&log).unwrap();
    bytes[20] ^= 1;
    std::fs::write(log, bytes).unwrap();
    let messages = json!([{"role": "user", "content": "Hi"}]);
    for reply in [
        server.get("/v1/sessions/a"),
        server.post("/v1/chat/completions", &json!({"session": "a", "messages": messages})),
    ] {
        let error = &reply.json()["error"];
        assert_eq!((reply.status, &error["code"]), (409, &json!("session_damaged")), "{reply:?}");
        assert!(reply.error().contains("record at byte 0 is damaged"), "{reply:?}");
    }
    assert_eq!(server.get("/v1/sessions").json()["data"][0]["id"], "a");
    assert_eq!(server.delete("/v1/sessions/a").status, 200);
    assert_eq!(server.get("/v1/sessions/a").status, 404);
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn no_more_sessions_are_begun_than_there_may_be() {
    let config = boostr_server::Config { max_sessions: 2, ..Default::default() };
    let folder = fresh_folder();
    let setup = Setup { config, sessions: Some(folder.clone()), ..Setup::default() };
    let server = TestServer::with(setup);
    assert_eq!(server.post("/v1/sessions", &json!({"id": "a"})).status, 201);
    let branch = |id: &str| server.post("/v1/sessions/a/branch", &json!({"id": id}));
    assert_eq!(branch("b").status, 201);
    for reply in [server.post("/v1/sessions", &json!({"id": "c"})), branch("c")] {
        let code = &reply.json()["error"]["code"];
        assert_eq!((reply.status, code), (507, &json!("too_many_sessions")), "{reply:?}");
    }
    assert_eq!(server.delete("/v1/sessions/b").status, 200);
    assert_eq!(branch("c").status, 201);
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}

/// A request whose answer begins with a thought and ends in text, or goes on with the last one when `messages` is empty.
fn part(name: &str, messages: &Value, max_tokens: usize, more: &Value) -> Value {
    let goes_on = messages.as_array().unwrap().is_empty();
    let body = json!({
        "session": name, "messages": messages, "max_tokens": max_tokens,
        "continue_final_message": goes_on,
        "logit_bias": {THINK.to_string(): -100, THINK_END.to_string(): 4, "0": -100}
    });
    with(body, more.clone())
}

#[test]
fn an_answer_that_was_cut_goes_on_as_one_longer_run_would_have() {
    let model = Some(thinker(&template("assistant: <think>\n")));
    let folder = fresh_folder();
    let start = || {
        let setup =
            Setup { model: model.clone(), sessions: Some(folder.clone()), ..Setup::default() };
        TestServer::with(setup)
    };
    let mut server = start();
    let user = json!([{"role": "user", "content": "What is the sea?"}]);
    let tree = |server: &TestServer, name: &str| {
        server.get(&format!("/v1/sessions/{name}")).json()["tree"].clone()
    };
    let mut cut_in_thoughts = 0;
    for (i, more) in [
        json!({"temperature": 0}),
        json!({"temperature": 1, "seed": 5}),
        json!({"temperature": 1.5, "seed": 6, "top_p": 0.9, "repetition_penalty": 1.2}),
        json!({"temperature": 1, "seed": 7, "presence_penalty": 1, "frequency_penalty": 1}),
        json!({"temperature": 1, "seed": 8, "reasoning_format": "none"}),
        json!({"temperature": 1, "seed": 9, "response_format": {"type": "json_schema", "json_schema": {
            "name": "numbers", "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 60}
        }}}),
    ]
    .into_iter()
    .enumerate()
    {
        let (whole, parts) = (format!("whole-{i}"), format!("parts-{i}"));
        for name in [&whole, &parts] {
            assert_eq!(server.post("/v1/sessions", &json!({"id": name})).status, 201);
        }
        let post = |server: &TestServer, body: &Value| {
            let reply = server.post("/v1/chat/completions", body);
            assert_eq!(reply.status, 200, "{reply:?}");
            reply.json()
        };
        post(&server, &part(&whole, &user, 30, &more));
        post(&server, &part(&parts, &user, 3, &more));
        let first = tree(&server, &parts)[0].clone();
        assert_eq!((&first["is_cut"], &first["continues"]), (&json!(true), &Value::Null));
        cut_in_thoughts += u32::from(first["messages"][1]["content"] == "");
        // From the state at hand, as a stream, and from the disk.
        post(&server, &part(&parts, &json!([]), 10, &more));
        let stream = with(part(&parts, &json!([]), 7, &more), json!({"stream": true}));
        let reply = server.post("/v1/chat/completions", &stream);
        assert_eq!(reply.status, 200, "{reply:?}");
        server.join();
        server = start();
        let last = post(&server, &part(&parts, &json!([]), 10, &more));
        let (whole, parts) = (tree(&server, &whole), tree(&server, &parts));
        let turn = &parts[3];
        for field in ["messages", "position", "is_cut", "parent"] {
            assert_eq!(turn[field], whole[0][field], "{field}, {more}");
        }
        assert_eq!((&turn["continues"], parts.as_array().unwrap().len()), (&json!(3), 4));
        assert_eq!(last["session"]["turn"], 4);
        let usage = &last["usage"];
        let computed = usage["prompt_tokens"].as_u64().unwrap()
            - usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        assert!(computed <= 2, "{usage}");
    }
    assert!(cut_in_thoughts > 0);
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_parts_of_an_answer_that_goes_on_are_together_what_the_session_has() {
    let server = TestServer::with_sessions();
    let ask = |body: &Value| {
        let reply = server.post("/v1/chat/completions", body);
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.json()["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned()
    };
    let tools = json!([{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]);
    for cut in 1..14 {
        for kind in ["plain", "stop", "tools"] {
            let name = format!("{kind}-{cut}");
            server.post("/v1/sessions", &json!({"id": name}));
            let more = json!({"session": name, "temperature": 0.9, "seed": cut});
            let user =
                json!({"messages": [{"role": "user", "content": "Once"}], "max_tokens": cut});
            let first = ask(&with(more.clone(), user));
            // What ended the first part may begin this, and is held until more is known.
            let end = first.chars().last().unwrap_or('x');
            let how = match kind {
                "stop" => json!({"stop": [format!("{end}\u{1}\u{2}"), "\u{1}"]}),
                "tools" => json!({"tools": tools}),
                _ => json!({}),
            };
            let on = json!({"messages": [], "continue_final_message": true, "max_tokens": 9});
            let second = ask(&with(with(more, on), how));
            let tree = server.get(&format!("/v1/sessions/{name}")).json()["tree"].clone();
            let whole = &tree[1]["messages"][1]["content"];
            let (first, whole) = (first.trim_end_matches('\u{fffd}'), whole.as_str().unwrap());
            assert_eq!(format!("{first}{second}"), whole, "{name}");
        }
    }
}

#[test]
fn what_cannot_go_on_is_refused_by_name() {
    let server = TestServer::with_sessions();
    server.post("/v1/sessions", &json!({"id": "s"}));
    let user = json!([{"role": "user", "content": "Once"}]);
    let ask = |body: &Value| {
        let reply = server.post("/v1/chat/completions", body);
        (reply.status, reply.json()["error"].clone())
    };
    let on =
        json!({"session": "s", "continue_final_message": true, "max_tokens": 3, "temperature": 0});
    let (status, error) = ask(&on);
    assert_eq!((status, &error["param"]), (400, &json!("messages")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("a session at its beginning"), "{error}");
    answer(&say(&server, "s", "Once"));
    let (status, error) = ask(&with(on.clone(), json!({"messages": user})));
    assert_eq!((status, &error["param"]), (400, &json!("messages")), "{error}");
    for (last, more) in [
        (json!({"role": "user", "content": "Once"}), json!({})),
        (json!({"role": "assistant", "content": ""}), json!({})),
        (
            json!({"role": "assistant", "content": "Once"}),
            json!({"response_format": {"type": "json_object"}}),
        ),
    ] {
        let body = with(on.clone(), json!({"session": null, "messages": [last]}));
        let (status, error) = ask(&with(body, more));
        assert_eq!((status, &error["param"]), (400, &json!("continue_final_message")), "{error}");
    }
    assert_eq!(ask(&on).0, 200);
    // A form that the answer so far does not follow, by any of its names.
    let schema = json!({"type": "object"});
    for form in [
        json!({"response_format": {"type": "json_object"}}),
        json!({"guided_json": schema}),
        json!({"grammar": "root ::= \"\\u0001\""}),
        json!({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}),
    ] {
        let (status, error) = ask(&with(on.clone(), form.clone()));
        let param = &error["param"];
        assert_eq!((status, param), (400, &json!("continue_final_message")), "{form} {error}");
    }
    // What was said is in the answer already, so the answer would end before it goes on.
    let text = server.get("/v1/sessions/s").json()["tree"][1]["messages"][1]["content"].clone();
    let word = text.as_str().unwrap().trim().chars().next().unwrap().to_string();
    let (status, error) = ask(&with(on.clone(), json!({"stop": word})));
    assert_eq!((status, &error["param"]), (400, &json!("stop")), "{error}");
    assert_eq!(ask(&on).0, 200);
}

#[test]
fn without_a_session_the_last_message_goes_on() {
    let server = TestServer::start();
    let ask = |messages: &Value, more: Value| {
        let body = json!({"messages": messages, "temperature": 0, "logit_bias": {"0": -100}});
        answer(&server.post("/v1/chat/completions", &with(body, more)))
    };
    let user = json!({"role": "user", "content": "The sea was"});
    let whole = ask(&json!([user]), json!({"max_tokens": 24}));
    // Cut where a word begins, so that the tokens are the same.
    let cut = whole.char_indices().filter(|(_, c)| *c == ' ').nth(4).unwrap().0;
    let (begun, rest) = whole.split_at(cut);
    let messages = json!([user, {"role": "assistant", "content": begun}]);
    let on = ask(&messages, json!({"max_tokens": 24, "continue_final_message": true}));
    assert!(on.starts_with(rest), "{on:?}, expected {rest:?}");
}
