//! What many clients may take together: connections, memory, turns at a queue, disk.

use std::io::Write;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use boostr_server::{Config, Limits};
use serde_json::{Value, json};

use crate::client::{connect, read, request};
use crate::server::{Setup, TestServer, endless, fresh_folder};

fn limited(limits: Limits) -> TestServer {
    TestServer::with(Setup { config: Config { limits, ..Config::default() }, ..Setup::default() })
}

/// Sends the head of a request for text and so much of its body.
fn begin(server: &TestServer, body: &str, sent: usize) -> TcpStream {
    let whole = request("POST", "/tokenize", "", body);
    let mut stream = connect(server.address);
    let end = whole.len() - body.len() + sent;
    stream.write_all(&whole.as_bytes()[..end]).unwrap();
    stream
}

fn gauge(server: &TestServer, name: &str) -> usize {
    let text = server.get("/metrics").body;
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

#[track_caller]
fn wait(what: impl Fn() -> bool) {
    let start = Instant::now();
    while !what() {
        assert!(start.elapsed() < Duration::from_secs(10), "it did not happen");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn p_idle_keepalive_never_closed_idle_connections_end_whatever_was_sent_before() {
    let limits =
        Limits { idle_time: Duration::from_millis(500), connections: 60, ..Limits::default() };
    let server = limited(limits);
    let ask = |stream: &mut TcpStream, method: &str, path: &str, body: &str| {
        stream.write_all(request(method, path, "", body).as_bytes()).unwrap();
        read(stream).unwrap().status
    };
    let mut idle: Vec<TcpStream> = (0..60).map(|_| connect(server.address)).collect();
    for (i, stream) in idle.iter_mut().enumerate() {
        // One request, or several, of which some are refused or have bodies.
        for _ in 0..=(i % 3) {
            match i % 4 {
                0 => assert_eq!(ask(stream, "GET", "/livez", ""), 200),
                1 => assert_eq!(ask(stream, "GET", "/nothing", ""), 404),
                2 => assert_eq!(ask(stream, "POST", "/tokenize", "{\"content\": \"a\"}"), 200),
                _ => assert_eq!(ask(stream, "GET", "/openapi.json", ""), 200),
            }
        }
    }
    let start = Instant::now();
    // Nobody else is accepted before they have ended.
    assert_eq!(server.get("/livez").status, 200);
    for mut stream in idle {
        assert!(read(&mut stream).is_none());
    }
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[test]
fn p_slow_bodies_memory_bodies_under_way_are_bounded_together() {
    let server = limited(Limits { max_body: 1 << 20, max_inflight: 1 << 20, ..Limits::default() });
    let body = json!({"content": "a ".repeat(400_000)}).to_string();
    let slow = begin(&server, &body, 700_000);
    wait(|| gauge(&server, "boostr_inflight_bytes") > 600_000);
    let refused = server.send("POST", "/tokenize", "Connection: close\r\n", &body);
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")), "{refused:?}");
    assert_eq!(refused.json()["error"]["code"], "inflight_bytes");
    // What is small passes.
    assert_eq!(server.post("/tokenize", &json!({"content": "a"})).status, 200);
    drop(slow);
    wait(|| gauge(&server, "boostr_inflight_bytes") == 0);
    assert_eq!(server.send("POST", "/tokenize", "Connection: close\r\n", &body).status, 200);
    wait(|| gauge(&server, "boostr_inflight_bytes") == 0);
}

#[test]
fn p_slow_bodies_memory_a_body_whose_values_would_fill_the_memory_is_refused() {
    let server = limited(Limits { max_body: 1 << 20, max_inflight: 4 << 20, ..Limits::default() });
    for part in ["[0],", "{},", "0,", "\"\","] {
        let body = format!("{{\"tokens\": [{}0]}}", part.repeat((1 << 19) / part.len()));
        let reply = server.send("POST", "/detokenize", "Connection: close\r\n", &body);
        assert_eq!((reply.status, reply.error().contains("memory")), (413, true), "{reply:?}");
    }
    assert_eq!(gauge(&server, "boostr_inflight_bytes"), 0);
}

#[test]
fn p_tokenize_starves_others_texts_have_a_queue_of_their_own() {
    let server = limited(Limits { waiting_texts: 2, ..Limits::default() });
    let body = json!({"content": "a".repeat(300_000)});
    thread::scope(|scope| {
        let many: Vec<_> =
            (0..16).map(|_| scope.spawn(|| server.post("/tokenize", &body))).collect();
        wait(|| gauge(&server, "boostr_waiting_texts") > 0);
        assert_eq!(server.post("/v1/completions", &endless(1)).status, 200);
        let statuses: Vec<u16> = many
            .into_iter()
            .map(|one| {
                let reply = one.join().unwrap();
                if reply.status == 429 {
                    assert_eq!(reply.header("retry-after"), Some("1"), "{reply:?}");
                    assert_eq!(reply.json()["error"]["code"], "queue_full");
                }
                reply.status
            })
            .collect();
        assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
        assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");
    });
    let long = json!({"content": "a".repeat((1 << 20) + 1)});
    let reply = server.post("/tokenize", &long);
    assert_eq!((reply.status, reply.error().contains("1048576 bytes")), (400, true), "{reply:?}");
    // With longer prompts texts may be longer, here one of few words.
    let limits = Limits { max_prompt: 1 << 18, ..Limits::default() };
    let server = limited(limits);
    let reply = server.post("/tokenize", &json!({"content": "sea ".repeat((1 << 18) + 1)}));
    let words = reply.json()["count"].as_u64();
    assert!(words.is_some_and(|count| count > 1 << 18), "{}", reply.status);
}

#[test]
fn a_text_that_is_too_long_is_refused_in_a_session_too() {
    let setup = Setup { sessions: Some(fresh_folder()), ..Setup::default() };
    let folder = setup.sessions.clone().unwrap();
    let server = TestServer::with(setup);
    assert_eq!(server.post("/v1/sessions", &json!({"id": "s"})).status, 201);
    let long = "a".repeat((1 << 20) + 1);
    for content in [json!(long), json!([{"type": "text", "text": long}])] {
        let body = json!({"session": "s", "messages": [{"role": "user", "content": content}]});
        let reply = server.post("/v1/chat/completions", &body);
        let code = &reply.json()["error"]["code"];
        assert_eq!((reply.status, code), (400, &json!("context_length_exceeded")), "{reply:?}");
        assert!(reply.error().contains("1048576 bytes"), "{}", reply.error());
    }
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}

fn say(server: &TestServer, thoughts: usize) {
    let messages = json!([
        {"role": "assistant", "content": "Hm.", "reasoning_content": "x".repeat(thoughts)},
        {"role": "user", "content": "Hi"}
    ]);
    let body = json!({"session": "s", "messages": messages, "max_tokens": 2});
    let reply = server.post("/v1/chat/completions", &body);
    assert_eq!(reply.status, 200, "{reply:?}");
}

#[test]
fn p_tree_get_memory_trees_and_lists_come_in_pages() {
    let server = TestServer::with_sessions();
    for name in ["s", "t", "u"] {
        assert_eq!(server.post("/v1/sessions", &json!({"id": name})).status, 201);
    }
    let ids = |tree: &Value| -> Vec<u64> {
        tree["tree"].as_array().unwrap().iter().map(|turn| turn["id"].as_u64().unwrap()).collect()
    };
    for thoughts in [10, 10, 700_000, 700_000, 10] {
        say(&server, thoughts);
    }
    let tree = server.get("/v1/sessions/s?limit=2").json();
    assert_eq!(
        (ids(&tree), &tree["has_more"], &tree["turns"]),
        (vec![1, 2], &json!(true), &json!(5))
    );
    // A page ends before it is too large, and has a turn at least.
    let tree = server.get("/v1/sessions/s?after=2").json();
    assert_eq!((ids(&tree), &tree["has_more"]), (vec![3], &json!(true)));
    let tree = server.get("/v1/sessions/s?after=3").json();
    assert_eq!((ids(&tree), &tree["has_more"]), (vec![4, 5], &json!(false)));
    assert_eq!(ids(&server.get("/v1/sessions/s?after=5").json()), Vec::<u64>::new());

    let first = server.get("/v1/sessions?limit=2").json();
    assert_eq!((&first["data"][0]["id"], &first["has_more"]), (&json!("s"), &json!(true)));
    let last = first["data"][1]["id"].as_str().unwrap();
    let rest = server.get(&format!("/v1/sessions?limit=2&after={last}")).json();
    assert_eq!((rest["data"].as_array().unwrap().len(), &rest["has_more"]), (1, &json!(false)));
    for (path, param) in [
        ("/v1/sessions?limit=0", "limit"),
        ("/v1/sessions?limit=x", "limit"),
        ("/v1/sessions/s?after=x", "after"),
    ] {
        let reply = server.get(path);
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{path}");
    }
}

#[test]
fn p_hands_blocked_by_a_log_sessions_have_a_queue_of_their_own() {
    let server = TestServer::with_sessions();
    assert_eq!(server.post("/v1/sessions", &json!({"id": "s"})).status, 201);
    for _ in 0..4 {
        say(&server, 3_000_000);
    }
    thread::scope(|scope| {
        let ask = || server.get("/v1/sessions/s").status;
        let many: Vec<_> = (0..50).map(|_| scope.spawn(ask)).collect();
        wait(|| gauge(&server, "boostr_waiting_sessions") > 0);
        assert_eq!(server.post("/v1/completions", &endless(1)).status, 200);
        assert_eq!(server.post("/tokenize", &json!({"content": "a"})).status, 200);
        let statuses: Vec<u16> = many.into_iter().map(|one| one.join().unwrap()).collect();
        assert!(statuses.contains(&200), "{statuses:?}");
        // The queue was full, or others held the memory.
        assert!(statuses.iter().all(|status| [200, 429, 503].contains(status)), "{statuses:?}");
    });
}

#[test]
fn sessions_take_no_more_of_the_disk_than_they_may() {
    let config = Config { sessions_quota: 1, ..Config::default() };
    let folder = fresh_folder();
    let setup = Setup { config, sessions: Some(folder.clone()), ..Setup::default() };
    let server = TestServer::with(setup);
    assert_eq!(server.post("/v1/sessions", &json!({"id": "a"})).status, 201);
    let turn = json!({"session": "a", "messages": [{"role": "user", "content": "x"}]});
    for reply in [
        server.post("/v1/sessions", &json!({"id": "b"})),
        server.post("/v1/sessions/a/branch", &json!({"id": "b"})),
        server.post("/v1/chat/completions", &turn),
    ] {
        let code = &reply.json()["error"]["code"];
        assert_eq!((reply.status, code), (507, &json!("sessions_quota")), "{reply:?}");
    }
    assert_eq!(server.get("/v1/sessions/a").status, 200);
    assert_eq!(server.delete("/v1/sessions/a").status, 200);
    assert_eq!(server.post("/v1/sessions", &json!({"id": "b"})).status, 201);
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn p_context_overflow_silent_a_sequence_is_held_to_the_models_context() {
    let setup = Setup { context: Some(64), sessions: Some(fresh_folder()), ..Setup::default() };
    let folder = setup.sessions.clone().unwrap();
    let server = TestServer::with(setup);
    let card = server.get("/v1/models").json()["data"][0].clone();
    assert_eq!((&card["max_model_len"], &card["meta"]["n_ctx_train"]), (&json!(64), &Value::Null));
    let ids = |count: usize| json!({"prompt": vec![40; count], "max_tokens": -1, "logit_bias": {"0": -100}});
    let words = "word ".repeat(200);
    for (path, body) in [
        ("/v1/completions", ids(65)),
        ("/v1/completions", json!({"prompt": ids(65)["prompt"], "use_beam_search": true})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": words}]})),
        ("/v1/embeddings", json!({"input": words})),
    ] {
        let reply = server.post(path, &body);
        let code = &reply.json()["error"]["code"];
        assert_eq!(
            (reply.status, code),
            (400, &json!("context_length_exceeded")),
            "{path}: {reply:?}"
        );
        assert!(reply.error().contains("maximum context length is 64 tokens"), "{}", reply.error());
    }
    for (count, n) in [(60, 1), (62, 3), (64, 1)] {
        let mut body = ids(count);
        body["n"] = n.into();
        let reply = server.post("/v1/completions", &body).json();
        assert_eq!(reply["usage"]["completion_tokens"], (64 - count) * n, "{reply}");
        assert!(
            reply["choices"].as_array().unwrap().iter().all(|one| one["finish_reason"] == "length")
        );
    }
    let beams = json!({"prompt": ids(60)["prompt"], "use_beam_search": true, "best_of": 2, "max_tokens": 50});
    let reply = server.post("/v1/completions", &beams).json();
    assert_eq!(reply["choices"][0]["finish_reason"], "length", "{reply}");

    // The state of a session counts.
    assert_eq!(server.post("/v1/sessions", &json!({"id": "s"})).status, 201);
    let turn = json!({
        "session": "s", "messages": [{"role": "user", "content": "The sea was calm and the sky was clear"}],
        "max_tokens": 8, "logit_bias": {"0": -100}
    });
    let statuses: Vec<u16> =
        (0..8).map(|_| server.post("/v1/chat/completions", &turn).status).collect();
    assert_eq!((statuses[0], statuses[7]), (200, 400), "{statuses:?}");
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}
