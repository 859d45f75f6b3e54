//! What comes over a connection: bytes as they are, or requests of a method, a path and a body each.

use std::fs;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use boostr::backend::Cpu;
use boostr_server::Server;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::{Builder, Runtime};

use super::server::server;

/// A request after which the server ends the connection.
const LAST: &str = "GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

/// Bytes on their way.
const PIPE: usize = 1 << 20;

/// Stands in a file beside the folder of sessions.
const SECRET: &str = "what no client may see";

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("boostr-fuzz-paths-{}", std::process::id()));
    fs::create_dir_all(folder.join("sessions")).expect("a folder");
    fs::write(folder.join("secret"), SECRET).expect("written");
    folder
});

static SERVER: LazyLock<(Runtime, Server<Cpu>)> = LazyLock::new(|| {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    (runtime, server(Some(&FOLDER.join("sessions"))))
});

/// Who looks at the folder of sessions: the tests of both inputs share it.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends `bytes` as they are, and one more request.
pub fn heads(bytes: &[u8]) {
    let _turn = turn();
    let back = exchange(&[bytes, LAST.as_bytes()].concat());
    Answers(&back).for_each(|answer| answer.check());
    clear();
}

/// Sends a request for each line: a method, a path and a body, of which two may be missing.
pub fn paths(text: &str) {
    let _turn = turn();
    let mut sent = String::new();
    for line in text.lines() {
        let mut words = line.splitn(3, ' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let body = words.next().unwrap_or_default();
        let len = body.len();
        sent += &format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             content-length: {len}\r\n\r\n{body}"
        );
    }
    let back = exchange((sent + LAST).as_bytes());
    Answers(&back).for_each(|answer| answer.check());
    assert!(!String::from_utf8_lossy(&back).contains(SECRET));
    let inside = |folder: &str| {
        let entries = fs::read_dir(FOLDER.join(folder)).expect("a folder");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        let mut names: Vec<_> = names.map(|name| name.into_string().expect("a name")).collect();
        names.sort();
        names
    };
    assert_eq!(inside(""), ["secret", "sessions"]);
    assert_eq!(fs::read_to_string(FOLDER.join("secret")).expect("it is there"), SECRET);
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    assert!(inside("sessions").iter().all(|name| name.chars().all(is_plain)));
    clear();
}

/// Sends `bytes` on a connection of its own, and returns all that comes back.
fn exchange(bytes: &[u8]) -> Vec<u8> {
    let (runtime, server) = &*SERVER;
    let (mut client, socket) = tokio::io::duplex(PIPE);
    assert!(bytes.len() < PIPE);
    let talk = async move {
        // Before the server looks, whose time for a silent client is short.
        client.write_all(bytes).await.expect("a pipe");
        let serve = server.connection(socket);
        let read = async {
            let mut back = Vec::new();
            client.read_to_end(&mut back).await.expect("a pipe");
            drop(client);
            back
        };
        tokio::join!(serve, read).1
    };
    runtime.block_on(talk)
}

/// Deletes the sessions that there are.
fn clear() {
    let back = exchange(
        ["GET /v1/sessions HTTP/1.1\r\nhost: localhost\r\n\r\n", LAST].concat().as_bytes(),
    );
    let list = Answers(&back).next().expect("an answer").json();
    for session in list["data"].as_array().expect("a list") {
        let id = session["id"].as_str().expect("a name");
        let delete = format!("DELETE /v1/sessions/{id} HTTP/1.1\r\nhost: localhost\r\n\r\n{LAST}");
        let back = exchange(delete.as_bytes());
        assert_eq!(Answers(&back).next().expect("an answer").status, 200, "{id}");
    }
}

/// An answer of the server.
struct Answer<'a> {
    status: u16,
    head: &'a str,
    body: &'a [u8],
}

impl Answer<'_> {
    /// The body as JSON.
    fn json(&self) -> Value {
        serde_json::from_slice(self.body).expect("JSON")
    }

    /// A refusal says why, and nothing fails.
    fn check(&self) {
        assert!(self.status < 500, "{}", self.head);
        if self.status >= 400 && !self.body.is_empty() {
            let error = &self.json()["error"];
            assert!(error.is_string() || error["message"].is_string(), "{error}");
        }
    }
}

/// The answers that some bytes are, one after another.
struct Answers<'a>(&'a [u8]);

impl<'a> Iterator for Answers<'a> {
    type Item = Answer<'a>;

    fn next(&mut self) -> Option<Answer<'a>> {
        if self.0.is_empty() {
            return None;
        }
        let end = self.0.windows(4).position(|bytes| bytes == b"\r\n\r\n").expect("a head");
        let (head, rest) = self.0.split_at(end + 4);
        let head = std::str::from_utf8(head).expect("a head is ASCII");
        assert!(head.starts_with("HTTP/1.1 ") || head.starts_with("HTTP/1.0 "), "{head}");
        let status = head[9..12].parse().expect("a status");
        let field = |name: &str| {
            let mut fields = head.lines().filter_map(|line| line.split_once(": "));
            fields.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
        };
        let is_next = |at: usize| {
            let next = rest.get(at..);
            next.is_some_and(|next| next.is_empty() || next.starts_with(b"HTTP/1."))
        };
        // An answer to HEAD has the length of a body that is not there.
        let length = field("content-length").map(|len| len.parse().expect("a length"));
        let (len, after) = match length {
            Some(len) if is_next(len) => (len, len),
            None if field("transfer-encoding").is_some() && !is_next(0) => (0, chunked(rest)),
            _ if is_next(0) => (0, 0),
            // It was cut.
            _ => (0, rest.len()),
        };
        self.0 = &rest[after..];
        Some(Answer { status, head, body: &rest[..len] })
    }
}

/// How long a body in chunks is.
fn chunked(body: &[u8]) -> usize {
    let mut at = 0;
    loop {
        let line = body[at..].windows(2).position(|bytes| bytes == b"\r\n");
        // It was cut.
        let Some(line) = line else { return body.len() };
        let size = std::str::from_utf8(&body[at..at + line]).expect("a size");
        let size = usize::from_str_radix(size, 16).expect("a size");
        at = (at + line + 2 + size + 2).min(body.len());
        if size == 0 {
            return at;
        }
    }
}
