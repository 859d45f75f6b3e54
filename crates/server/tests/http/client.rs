//! Just enough of HTTP to see what a server really sends.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Nothing here takes longer.
const PATIENCE: Duration = Duration::from_secs(20);

/// An answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    head: String,
    pub body: String,
}

impl Reply {
    /// The value of a header, whose name is in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The message of an error, which has the form that every error has.
    #[track_caller]
    pub fn error(&self) -> String {
        let json = self.json();
        let error = json["error"].as_object().unwrap_or_else(|| panic!("no error: {self:?}"));
        for key in ["message", "type", "param", "code"] {
            assert!(error.contains_key(key), "no {key}: {self:?}");
        }
        error["message"].as_str().unwrap().to_owned()
    }

    /// The JSON of the events, without the mark of the end, which has to be there if `is_whole`.
    #[track_caller]
    pub fn events(&self, is_whole: bool) -> Vec<Value> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"), "{self:?}");
        let mut events: Vec<&str> =
            self.body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        assert_eq!(events.last() == Some(&"[DONE]"), is_whole, "{self:?}");
        events.retain(|event| *event != "[DONE]");
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

impl Reply {
    /// The named events, each with its JSON, which has the name as type.
    #[track_caller]
    pub fn named_events(&self) -> Vec<Value> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"), "{self:?}");
        let events = self.body.split_terminator("\n\n").filter(|event| !event.starts_with(':'));
        let named = events.map(|event| {
            let (name, data) = event.split_once('\n').unwrap_or_else(|| panic!("{event}"));
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(name.strip_prefix("event: "), data["type"].as_str(), "{event}");
            data
        });
        named.collect()
    }

    /// The lines of JSON.
    #[track_caller]
    pub fn lines(&self) -> Vec<Value> {
        assert_eq!(self.header("content-type"), Some("application/x-ndjson"), "{self:?}");
        self.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends bytes and reads one answer.
pub fn raw(address: SocketAddr, request: impl AsRef<[u8]>) -> Reply {
    let mut stream = connect(address);
    // A server may answer and close before it has read everything.
    let _ = stream.write_all(request.as_ref());
    read(&mut stream).expect("an answer")
}

/// The bytes of a request.
pub fn request(method: &str, path: &str, headers: &str, body: &str) -> String {
    let length = if body.is_empty() && method == "GET" {
        String::new()
    } else {
        format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len())
    };
    format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}{length}\r\n{body}")
}

/// Reads one answer; `None` when the connection ends before its head is complete.
pub fn read(stream: &mut TcpStream) -> Option<Reply> {
    let mut buffer = Vec::new();
    let end = loop {
        if let Some(at) = find(&buffer, b"\r\n\r\n") {
            break at + 4;
        }
        if !more(stream, &mut buffer) {
            return None;
        }
    };
    let head = String::from_utf8(buffer[..end].to_vec()).unwrap();
    let mut body = buffer.split_off(end);
    let mut reply =
        Reply { status: head.split(' ').nth(1)?.parse().ok()?, head, body: String::new() };
    if reply.header("transfer-encoding") == Some("chunked") {
        let mut text = Vec::new();
        // A connection that is cut ends a body early.
        while let Some(chunk) = chunk(stream, &mut body) {
            if chunk.is_empty() {
                break;
            }
            text.extend(chunk);
        }
        body = text;
    } else if let Some(length) = reply.header("content-length") {
        let length: usize = length.parse().unwrap();
        while body.len() < length && more(stream, &mut body) {}
    } else {
        while more(stream, &mut body) {}
    }
    reply.body = String::from_utf8(body).unwrap();
    Some(reply)
}

/// Reads until what was read contains `text`.
pub fn read_until(stream: &mut TcpStream, text: &str) -> String {
    let mut buffer = Vec::new();
    while find(&buffer, text.as_bytes()).is_none() {
        assert!(more(stream, &mut buffer), "it ended: {}", String::from_utf8_lossy(&buffer));
    }
    String::from_utf8_lossy(&buffer).into_owned()
}

/// The next chunk of a body; the last one is empty.
fn chunk(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Vec<u8>> {
    let at = loop {
        match find(buffer, b"\r\n") {
            Some(at) => break at,
            None if more(stream, buffer) => {}
            None => return None,
        }
    };
    let size = usize::from_str_radix(std::str::from_utf8(&buffer[..at]).ok()?, 16).ok()?;
    while buffer.len() < at + size + 4 {
        if !more(stream, buffer) {
            return None;
        }
    }
    let rest = buffer.split_off(at + size + 4);
    let chunk = buffer[at + 2..at + 2 + size].to_vec();
    *buffer = rest;
    Some(chunk)
}

fn more(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> bool {
    let mut part = [0; 16 << 10];
    match stream.read(&mut part) {
        Ok(0) | Err(_) => false,
        Ok(n) => {
            buffer.extend_from_slice(&part[..n]);
            true
        }
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}
