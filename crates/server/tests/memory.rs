//! How much memory there is at once, under what many clients send and do not read. One test, so that what is counted is
//! its own.

#[path = "http/client.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod client;
#[path = "../../boostr/tests/memory/counting.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod counting;
#[path = "http/server.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod server;

use std::io::Write;
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use serde_json::json;

use client::{connect, request};
use counting::HEAP;
use server::TestServer;

/// What there may be above the start.
const MOST: usize = 512_000_000;
/// The longest body.
const BODY: usize = 4 << 20;

/// Sends `bytes` on so many connections at once; what is refused is not sent whole.
fn send(server: &TestServer, count: usize, bytes: &[u8]) -> Vec<TcpStream> {
    let mut streams: Vec<TcpStream> = (0..count).map(|_| connect(server.address)).collect();
    thread::scope(|scope| {
        for part in streams.chunks_mut(count.div_ceil(16)) {
            scope.spawn(|| part.iter_mut().for_each(|stream| drop(stream.write_all(bytes))));
        }
    });
    streams
}

#[track_caller]
fn check(what: &str, server: &TestServer, start: usize) {
    thread::sleep(Duration::from_millis(500));
    let peak = HEAP.peak().saturating_sub(start);
    println!("{what}: {} MB", peak / 1_000_000);
    assert!(peak < MOST, "{what}: {peak} bytes above the start");
    // Small requests are answered beside it.
    let body = json!({"prompt": "a", "max_tokens": 1});
    assert_eq!(server.post("/v1/completions", &body).status, 200, "{what}");
    HEAP.restart();
}

#[test]
fn p_slow_bodies_memory_many_bodies_and_unread_trees_stay_within_their_memory() {
    let server = TestServer::with_sessions();
    assert_eq!(server.post("/v1/sessions", &json!({"id": "s"})).status, 201);
    let start = HEAP.restart();

    let text = json!({"content": "a ".repeat(BODY / 2 - 10)}).to_string();
    let whole = request("POST", "/tokenize", "", &text);
    let slow = send(&server, 400, &whole.as_bytes()[..whole.len() - 1]);
    check("400 bodies that lack a byte", &server, start);
    drop(slow);

    for (path, body) in [
        ("/tokenize", text),
        ("/v1/completions", json!({"prompt": "word ".repeat(200_000)}).to_string()),
        ("/detokenize", format!("{{\"tokens\": [{}0]}}", "[0],".repeat(BODY / 4 - 10))),
        ("/detokenize", format!("{{\"tokens\": [{}0]}}", "12345,".repeat(BODY / 6 - 10))),
    ] {
        let streams = send(&server, 40, request("POST", path, "", &body).as_bytes());
        check(path, &server, start);
        drop(streams);
    }

    let messages = json!([
        {"role": "assistant", "content": "Hm.", "reasoning_content": "x".repeat(BODY - 1000)},
        {"role": "user", "content": "Hi"}
    ]);
    let turn = json!({"session": "s", "messages": messages, "max_tokens": 1});
    let mut statuses: Vec<u16> =
        (0..10).map(|_| server.post("/v1/chat/completions", &turn).status).collect();
    assert_eq!((statuses[0], statuses.pop()), (200, Some(507)), "{statuses:?}");
    check("turns with long thoughts", &server, start);
    let unread = send(&server, 40, request("GET", "/v1/sessions/s", "", "").as_bytes());
    check("40 trees that nobody reads", &server, start);
    drop(unread);
}
