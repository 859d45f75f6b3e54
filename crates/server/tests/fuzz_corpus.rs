//! The fuzzer's corpora of requests and connections, once more: each is answered or refused. `fuzz/README.md` says how
//! the files are made.

#[path = "../../../fuzz/src/connection.rs"]
mod connection;
#[path = "../../../fuzz/src/request.rs"]
mod request;
#[path = "../../../fuzz/src/server.rs"]
mod server;

/// The texts of a corpus.
fn texts(lines: &str) -> Vec<String> {
    let texts: Vec<String> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(texts.len() > 50, "{}", texts.len());
    texts
}

#[test]
fn requests_of_the_fuzzer_are_answered_or_refused() {
    for text in texts(include_str!("corpus/requests.jsonl")) {
        request::check(&text);
    }
}

#[test]
fn bytes_of_the_fuzzer_over_a_connection_are_answered_or_refused() {
    for text in texts(include_str!("corpus/heads.jsonl")) {
        // A letter for each byte.
        let bytes: Vec<u8> = text.chars().map(|c| u8::try_from(c).unwrap()).collect();
        connection::heads(&bytes);
    }
}

#[test]
fn paths_of_the_fuzzer_lead_nowhere_but_to_sessions() {
    for text in texts(include_str!("corpus/paths.jsonl")) {
        connection::paths(&text);
    }
}
