//! More than a server can do.

use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use boostr::engine::EngineConfig;
use boostr_server::{Config, Limits};
use serde_json::json;

use crate::client::{connect, read};
use crate::server::{Setup, TestServer, endless, with};

#[test]
fn r_d11_a_full_queue_refuses_at_once() {
    let engine = EngineConfig { max_running: 1, max_queue: 1, ..EngineConfig::default() };
    let server = TestServer::with(Setup { engine, ..Setup::default() });
    let running = server.begin("/v1/completions", &endless(8000));
    server.wait(Duration::from_secs(5), |stats| stats.running == 1);
    let waiting = server.begin("/v1/completions", &endless(8000));
    server.wait(Duration::from_secs(5), |stats| stats.queued == 1);
    let start = Instant::now();
    let reply = server.post("/v1/completions", &endless(1));
    assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
    assert_eq!((reply.status, reply.header("retry-after")), (429, Some("1")), "{reply:?}");
    assert_eq!(reply.json()["error"]["type"], "rate_limit_error");
    assert!(server.get("/metrics").body.contains("boostr_rejected_total{reason=\"queue_full\"} 1"));
    drop((running, waiting));
    server.wait(Duration::from_secs(2), |stats| stats.running + stats.queued == 0);
    assert_eq!(server.post("/v1/completions", &endless(1)).status, 200);
}

#[test]
fn a_request_does_not_wait_for_its_turn_for_ever() {
    let engine = EngineConfig { max_running: 1, ..EngineConfig::default() };
    let limits = Limits { queue_time: Duration::from_millis(200), ..Limits::default() };
    let config = Config { limits, ..Config::default() };
    let server = TestServer::with(Setup { config, engine, ..Setup::default() });
    let running = server.begin("/v1/completions", &endless(8000));
    server.wait(Duration::from_secs(5), |stats| stats.running == 1);
    for stream in [false, true] {
        let reply = server.post("/v1/completions", &with(endless(1), json!({"stream": stream})));
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (503, &json!("queue_time")));
    }
    drop(running);
}

#[test]
fn an_answer_ends_when_its_time_is_over() {
    let limits = Limits { request_time: Duration::from_millis(200), ..Limits::default() };
    let server = TestServer::with(Setup {
        config: Config { limits, ..Config::default() },
        ..Setup::default()
    });
    let reply = server.post("/v1/completions", &endless(8000));
    assert_eq!(reply.status, 200, "{reply:?}");
    let reply = reply.json();
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    let tokens = reply["usage"]["completion_tokens"].as_u64().unwrap();
    assert!((1..8000).contains(&tokens), "{tokens}");
}

#[test]
fn r_d10_a_client_that_never_reads_is_cut() {
    let limits = Limits { write_time: Duration::from_millis(300), ..Limits::default() };
    let server = TestServer::with(Setup {
        config: Config { limits, ..Config::default() },
        ..Setup::default()
    });
    let body = json!({"stream": true, "n": 8, "logprobs": 20});
    let silent = server.begin("/v1/completions", &with(endless(8000), body));
    server.wait(Duration::from_secs(5), |stats| stats.running > 0);
    // It fills the system's buffers, is left alone, and then cut.
    server.wait(Duration::from_secs(20), |stats| stats.running == 0);
    assert_eq!(server.stats().cancelled, 1);
    drop(silent);
    assert_eq!(server.post("/v1/completions", &endless(1)).status, 200);
}

#[test]
fn two_hundred_slow_clients_do_not_slow_the_good_ones() {
    let server = TestServer::start();
    let ask = || {
        let start = Instant::now();
        assert_eq!(server.post("/v1/completions", &endless(8)).status, 200);
        start.elapsed()
    };
    let round = || {
        let mut times: Vec<Duration> = thread::scope(|scope| {
            let clients: Vec<_> = (0..16)
                .map(|_| scope.spawn(|| (0..10).map(|_| ask()).collect::<Vec<_>>()))
                .collect();
            clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
        });
        times.sort();
        times[times.len() * 99 / 100]
    };
    ask();
    let alone = round();
    let slow: Vec<_> = (0..200)
        .map(|i| {
            let mut stream = connect(server.address);
            stream.write_all(&b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"[..=(i % 30)]).unwrap();
            stream
        })
        .collect();
    let beside = round();
    // Twice as long, and what a busy machine makes of it.
    assert!(beside < alone * 2 + Duration::from_millis(200), "{alone:?} alone, {beside:?} beside");
    drop(slow);
}

#[test]
fn ten_times_too_much_is_answered_or_refused() {
    let engine = EngineConfig { max_running: 2, max_queue: 4, ..EngineConfig::default() };
    let server = TestServer::with(Setup { engine, ..Setup::default() });
    let expected =
        server.post("/v1/completions", &endless(20)).json()["choices"][0]["text"].clone();
    let statuses: Vec<u16> = thread::scope(|scope| {
        let clients: Vec<_> = (0..60)
            .map(|i| {
                let (server, expected) = (&server, &expected);
                scope.spawn(move || {
                    let mut statuses = Vec::new();
                    for j in 0..5 {
                        if (i + j) % 10 == 0 {
                            drop(server.begin("/v1/completions", &endless(20)));
                            continue;
                        }
                        let reply = server.post("/v1/completions", &endless(20));
                        if reply.status == 200 {
                            assert_eq!(reply.json()["choices"][0]["text"], *expected);
                        } else {
                            reply.error();
                        }
                        statuses.push(reply.status);
                    }
                    statuses
                })
            })
            .collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    assert!(statuses.iter().all(|status| [200, 429, 503].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");
    server.wait(Duration::from_secs(5), |stats| stats.running + stats.queued == 0);
}

#[test]
fn connections_beyond_the_limit_wait() {
    let limits =
        Limits { connections: 2, header_time: Duration::from_millis(500), ..Limits::default() };
    let server = TestServer::with(Setup {
        config: Config { limits, ..Config::default() },
        ..Setup::default()
    });
    let held: Vec<_> = (0..2).map(|_| connect(server.address)).collect();
    thread::sleep(Duration::from_millis(50));
    let start = Instant::now();
    // It is accepted when the first are cut.
    assert_eq!(server.get("/livez").status, 200);
    assert!(start.elapsed() > Duration::from_millis(200), "{:?}", start.elapsed());
    drop(held);
}

#[test]
fn r_d11_a_server_without_its_model_says_so() {
    let server = TestServer::with(Setup { without_model: true, ..Setup::default() });
    let health = server.get("/health");
    assert_eq!((health.status, &health.json()["status"]), (503, &json!("loading")));
    // As llama.cpp has it, and as every error is.
    assert_eq!(health.header("retry-after"), Some("1"), "{health:?}");
    assert!(health.error().contains("being loaded") && health.json()["seconds"].is_u64());
    assert_eq!(health.json()["error"]["type"], "unavailable_error");
    let reply = server.post("/v1/completions", &endless(1));
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")), "{reply:?}");
    assert_eq!(reply.json()["error"]["code"], "loading");
    assert_eq!(server.get("/livez").status, 200);
    let mut unread = connect(server.address);
    assert!(unread.write_all(b"\r\n").is_ok() && read(&mut unread).is_none());
}
