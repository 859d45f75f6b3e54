//! `boostr serve` as a process: where it listens, what it refuses, how it stops.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::*;

/// A server, which ends with the test.
struct Running {
    child: Child,
    address: String,
}

impl Running {
    fn start(args: &[&str]) -> Self {
        Self::of(command(&[&["serve", "--port", "0", "-q"], args].concat()))
    }

    fn of(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("http://").unwrap_or_else(|| panic!("{line}"));
        Self { address: address.to_owned(), child }
    }

    fn connect(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    fn get(&self, path: &str, headers: &str) -> String {
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n");
        let mut answer = String::new();
        self.connect(&request).read_to_string(&mut answer).unwrap();
        answer
    }

    /// An answer that goes on for a while.
    fn stream(&self) -> TcpStream {
        let body =
            r#"{"prompt": "a", "stream": true, "max_tokens": 8000, "logit_bias": {"0": -100}}"#;
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
        let mut stream =
            self.connect(&format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()));
        let mut start = [0; 400];
        stream.read_exact(&mut start).unwrap();
        stream
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &id]).status().unwrap().success());
    }

    /// The code that it ends with, before `time` is over.
    fn code(&mut self, time: Duration) -> i32 {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap();
            }
            assert!(start.elapsed() < time, "it goes on after {time:?}");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn it_serves_the_built_in_model_and_stops_when_told() {
    for signal in ["TERM", "INT"] {
        let mut server = Running::start(&["--no-sessions"]);
        assert!(server.get("/v1/sessions", "").starts_with("HTTP/1.1 404 "));
        assert!(server.get("/health", "").starts_with("HTTP/1.1 200 "));
        assert!(server.get("/v1/models", "").contains("\"demo-mamba2\""));
        server.signal(signal);
        assert_eq!(server.code(Duration::from_secs(5)), 0, "{signal}");
    }
}

/// Of a closed terminal, unless it was started to outlive it.
#[cfg(target_os = "linux")]
#[test]
fn r_f11_a_hangup_stops_it_but_under_nohup() {
    let under = |how: &str| {
        let serve = ["serve", "--port", "0", "-q"];
        let args = [&[how, env!("CARGO_BIN_EXE_boostr")], &serve[..]].concat();
        Running::of(command_under("env", &args))
    };
    let mut server = under("--default-signal=HUP");
    server.signal("HUP");
    assert_eq!(server.code(Duration::from_secs(5)), 0);
    let mut server = under("--ignore-signal=HUP");
    server.signal("HUP");
    thread::sleep(Duration::from_millis(200));
    assert!(server.get("/health", "").starts_with("HTTP/1.1 200 "));
    server.signal("TERM");
    assert_eq!(server.code(Duration::from_secs(5)), 0);
}

#[test]
fn it_keeps_conversations_in_a_folder_of_its_own_or_none_where_it_cannot() {
    let home = folder("serve-home");
    let serve = || command(&["serve", "--port", "0"]);
    let mut at_home = serve();
    at_home.env("XDG_STATE_HOME", &home);
    let server = Running::of(at_home);
    assert!(server.get("/v1/sessions", "").starts_with("HTTP/1.1 200 "));
    assert!(home.join("boostr/served").is_dir());
    let mut homeless = serve();
    homeless.env_remove("XDG_STATE_HOME").env_remove("HOME").env_remove("LOCALAPPDATA");
    let mut server = Running::of(homeless);
    assert!(server.get("/v1/sessions", "").starts_with("HTTP/1.1 404 "));
    server.signal("TERM");
    assert_eq!(server.code(Duration::from_secs(5)), 0);
    let mut log = String::new();
    server.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(log.contains("no conversations are kept"), "{log}");
}

#[test]
fn states_leave_memory_for_a_folder_of_one_server_but_not_where_keys_protect_users() {
    let home = folder("serve-states");
    let states = home.join("boostr/state-cache");
    let serve = |args: &[&str]| {
        let mut serve = command(&[&["serve", "--port", "0", "--no-sessions"], args].concat());
        serve.env("XDG_STATE_HOME", &home).env_remove("BOOSTR_STATE_CACHE_DISK");
        serve
    };
    let ended = |mut server: Running| {
        server.signal("TERM");
        assert_eq!(server.code(Duration::from_secs(10)), 0);
        let mut log = String::new();
        server.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        log
    };
    let mut keyed = serve(&[]);
    keyed.env("BOOSTR_API_KEY", "secret");
    assert!(!ended(Running::of(keyed)).contains("states that leave memory"));
    ended(Running::of(serve(&["--state-cache-disk", "0"])));
    ended(Running::of(serve(&["--state-cache", "0"])));
    assert!(!states.exists());
    // A key and a size: it was told.
    let mut told = serve(&["--state-cache-disk", "64MiB"]);
    told.env("BOOSTR_API_KEY", "secret");
    assert!(ended(Running::of(told)).contains("states that leave memory: at most 67.1 MB"));
    assert!(states.is_dir());

    let first = Running::of(serve(&[]));
    let second = ended(Running::of(serve(&[])));
    assert!(
        second.contains("no states are kept on disk: another server keeps its states in"),
        "{second}"
    );
    let refused = end(serve(&["--state-cache-dir", states.to_str().unwrap()]), "");
    assert!(refused.fails(2).stderr.contains("another server keeps its states in"));
    assert!(ended(first).contains("states that leave memory: at most 4.3 GB"));
}

#[test]
fn p_sessions_folder_others_read_a_home_folder_is_none_of_sessions() {
    let home = folder("sessions-home");
    for line in [&["serve", "--port", "0"][..], &["chat"]] {
        let mut at_home = command(&[line, &["--sessions", home.to_str().unwrap()]].concat());
        let output = at_home.env("HOME", &home).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("--sessions") && error.contains("a home folder"), "{error}");
    }
    assert!(fs::read_dir(&home).unwrap().next().is_none());
}

#[test]
fn r_f12_no_time_is_too_long_to_be_waited_for() {
    let mut server = Running::start(&["--drain", &u64::MAX.to_string()]);
    server.signal("TERM");
    assert_eq!(server.code(Duration::from_secs(5)), 0);
}

#[test]
fn r_f11_streams_are_told_at_the_deadline_and_a_second_signal_ends_it() {
    let mut server = Running::start(&["--drain", "300ms"]);
    let mut stream = server.stream();
    let reader = thread::spawn(move || {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    });
    server.signal("TERM");
    assert_eq!(server.code(Duration::from_secs(5)), 0);
    let text = reader.join().unwrap();
    assert!(text.contains("data: {\"error\":") || text.contains("[DONE]"), "{text}");

    let mut server = Running::start(&["--drain", "60s"]);
    let _streams: Vec<TcpStream> = (0..4).map(|_| server.stream()).collect();
    server.signal("TERM");
    thread::sleep(Duration::from_millis(200));
    server.signal("TERM");
    assert_eq!(server.code(Duration::from_secs(5)), 1);
}

#[test]
fn r_f8_more_memory_than_there_is_is_refused_with_the_sum() {
    let run = boostr(&["serve", "--port", "0", "--state-cache", "100000GiB"]).fails(4);
    for part in ["16 running sequences of 694 kB", "are free", "lower --max-running"] {
        assert!(run.stderr.contains(part), "{part}: {}", run.stderr);
    }
    // Guessing keeps the state before the guesses, and that of the draft.
    for (draft, bytes) in [("lookup", "1.4 MB"), (&demo(), "2.1 MB")] {
        let args = ["serve", "--port", "0", "--state-cache", "100000GiB", "--draft", draft];
        let run = boostr(&args).fails(4);
        for part in [&format!("16 running sequences of {bytes}"), "or leave out --draft"] {
            assert!(run.stderr.contains(part), "{part}: {}", run.stderr);
        }
    }
}

#[test]
fn memory_of_a_sequence_counts_the_block_that_guesses() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    let path = fixtures.join("qwen3_5-tiny");
    // Bytes that attention keeps of a token: a layer of the model's, and one of the block's.
    let per_token = |more: &[&str]| {
        let args = ["serve", path.to_str().unwrap(), "--port", "0", "--no-sessions"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_boostr"));
        command.args(args).args(more).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut server = Running::of(command);
        server.signal("TERM");
        assert_eq!(server.code(Duration::from_secs(10)), 0);
        let mut log = String::new();
        server.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        let (_, rest) = log.split_once("a running sequence, and ").expect("growth");
        let (number, _) = rest.split_once(" B for each token").expect("bytes");
        number.parse::<f64>().unwrap()
    };
    assert_eq!(per_token(&["--draft", "mtp"]), 2.0 * per_token(&[]));
}

#[test]
fn r_f9_without_descriptors_it_goes_on_when_there_are_some() {
    let mut limited = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_boostr");
    limited.args(["-c", "ulimit -n 40 && exec \"$0\" serve --port 0 --no-sessions", program]);
    limited.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut server = Running::of(limited);
    let idle: Vec<TcpStream> =
        (0..80).filter_map(|_| TcpStream::connect(&server.address).ok()).collect();
    thread::sleep(Duration::from_millis(300));
    drop(idle);
    assert!(server.get("/health", "").starts_with("HTTP/1.1 200 "));
    server.signal("TERM");
    assert_eq!(server.code(Duration::from_secs(10)), 0);
    let mut log = String::new();
    server.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert_eq!(log.matches("no connection could be accepted").count(), 1, "{log}");
}

#[test]
fn sessions_are_there_after_a_kill() {
    let folder = folder("serve-sessions");
    let sessions = folder.to_str().unwrap();
    let mut server = Running::start(&["--sessions", sessions]);
    let post = "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 13\r\nConnection: close\r\n\r\n{\"id\":\"trip\"}";
    let mut answer = String::new();
    server.connect(post).read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let server = Running::start(&["--sessions", sessions]);
    assert!(server.get("/v1/sessions/trip", "").starts_with("HTTP/1.1 200 "));
}

#[test]
fn a_public_address_needs_a_key() {
    let run = boostr(&["serve", "--host", "0.0.0.0", "--port", "0"]).fails(2);
    assert!(run.stderr.contains("--api-key-file"), "{}", run.stderr);
    let folder = folder("serve-keys");
    let (keys, none) = (folder.join("keys.txt"), folder.join("none.txt"));
    fs::write(&none, "# nothing\n").unwrap();
    let run = boostr(&["serve", "--api-key-file", none.to_str().unwrap()]).fails(2);
    assert!(run.stderr.contains("no key"), "{}", run.stderr);
    fs::write(&keys, "# for tests\nsecret\n").unwrap();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let chmod = |mode| fs::set_permissions(&keys, fs::Permissions::from_mode(mode)).unwrap();
        chmod(0o644);
        let run = boostr(&["serve", "--api-key-file", keys.to_str().unwrap()]).fails(2);
        assert!(run.stderr.contains("chmod 600"), "{}", run.stderr);
        chmod(0o600);
    }
    let mut server =
        Running::start(&["--host", "0.0.0.0", "--api-key-file", keys.to_str().unwrap()]);
    server.address = server.address.replace("0.0.0.0", "127.0.0.1");
    assert!(server.get("/v1/models", "").starts_with("HTTP/1.1 401 "));
    assert!(
        server.get("/v1/models", "Authorization: Bearer secret\r\n").starts_with("HTTP/1.1 200 ")
    );
}

#[test]
fn what_cannot_be_served_is_said() {
    boostr(&["serve", "/no/such/model", "--port", "0"]).fails(3);
    boostr(&["serve", "--host", "no.such.host.invalid"]).fails(2);
    boostr(&["serve", "--max-body", "much"]).fails(2);
    let run = boostr(&["serve", "--port", "0", "--state-cache", "100000GiB"]).fails(4);
    assert!(run.stderr.contains("--state-cache"), "{}", run.stderr);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let run = boostr(&["serve", "--port", &port]).fails(1);
    assert!(run.stderr.contains("in use"), "{}", run.stderr);
}

#[test]
fn guesses_change_no_answer_and_are_counted() {
    let answer = |server: &Running| {
        let body = r#"{"prompt": "one two one two one two one two one", "max_tokens": 60, "temperature": 0}"#;
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n";
        let mut answer = String::new();
        server
            .connect(&format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()))
            .read_to_string(&mut answer)
            .unwrap();
        let json = answer.split_once("\r\n\r\n").unwrap().1;
        let json: serde_json::Value = serde_json::from_str(json).unwrap();
        json["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let counted = |server: &Running| {
        let metrics = server.get("/metrics", "");
        let line = metrics.lines().find_map(|it| it.strip_prefix("boostr_drafted_tokens_total "));
        line.unwrap().parse::<u64>().unwrap()
    };
    let (plain, drafting) = (Running::start(&[]), Running::start(&["--draft", "lookup"]));
    assert_eq!(answer(&plain), answer(&drafting));
    assert!(counted(&plain) == 0 && counted(&drafting) > 0);
    let other = boostr(&["serve", "--port", "0", "--draft", &tiny()]).fails(2);
    assert!(other.stderr.contains("cannot guess for each other"), "{}", other.stderr);
}
