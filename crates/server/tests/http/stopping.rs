//! Answers of a server that is told to stop.

use std::thread;
use std::time::{Duration, Instant};

use boostr_server::{Config, Limits};
use serde_json::json;

use crate::client::{read, read_until};
use crate::server::{Setup, TestServer, endless, with};

fn draining(time: Duration) -> TestServer {
    let limits = Limits { drain_time: time, ..Limits::default() };
    TestServer::with(Setup { config: Config { limits, ..Config::default() }, ..Setup::default() })
}

#[test]
fn r_f11_an_idle_server_stops_at_once() {
    let mut server = draining(Duration::from_secs(10));
    let mut idle = server.begin("/tokenize", &json!({"content": "a"}));
    assert_eq!(read(&mut idle).unwrap().status, 200);
    let start = Instant::now();
    server.join();
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert!(read(&mut idle).is_none());
}

#[test]
fn r_f11_what_is_running_may_end_and_nothing_new_begins() {
    let mut server = draining(Duration::from_secs(20));
    let body = with(endless(1500), json!({"stream": true}));
    let mut streams: Vec<_> = (0..2).map(|_| server.begin("/v1/completions", &body)).collect();
    server.wait(Duration::from_secs(5), |stats| stats.running == 2);
    server.stop();
    thread::sleep(Duration::from_millis(50));
    let health = server.get("/health");
    assert_eq!((health.status, &health.json()["status"]), (503, &json!("draining")), "{health:?}");
    assert_eq!(health.json()["error"]["code"], "draining");
    let refused = server.post("/v1/completions", &endless(1));
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (503, &json!("draining")));
    for stream in &mut streams {
        let events = read(stream).unwrap().events(true);
        assert!(events.iter().any(|event| event["choices"][0]["finish_reason"] == "length"));
    }
    server.join();
}

#[test]
fn r_f11_at_the_deadline_every_client_is_told() {
    let mut server = draining(Duration::from_millis(300));
    let body = with(endless(8000), json!({"stream": true}));
    let mut streams: Vec<_> = (0..8).map(|_| server.begin("/v1/completions", &body)).collect();
    let whole = server.begin("/v1/completions", &endless(8000));
    server.wait(Duration::from_secs(5), |stats| stats.running == 9);
    let readers: Vec<_> = streams
        .drain(..)
        .map(|mut stream| {
            thread::spawn(move || {
                read_until(&mut stream, "\"error\"");
            })
        })
        .collect();
    let answer = thread::spawn(move || {
        let mut whole = whole;
        read(&mut whole)
    });
    let start = Instant::now();
    server.join();
    assert!(start.elapsed() < Duration::from_millis(1500), "{:?}", start.elapsed());
    for reader in readers {
        reader.join().unwrap();
    }
    let answer = answer.join().unwrap().unwrap();
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (503, &json!("stopped")));
}
