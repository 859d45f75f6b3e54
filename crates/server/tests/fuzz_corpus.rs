//! The fuzzer's corpus of requests, once more: each is answered or refused. `fuzz/README.md` says how
//! the file is made.

#[path = "../../../fuzz/src/request.rs"]
mod request;

#[test]
fn requests_of_the_fuzzer_are_answered_or_refused() {
    let lines = include_str!("corpus/requests.jsonl").lines();
    let texts: Vec<String> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(texts.len() > 50, "{}", texts.len());
    for text in texts {
        request::check(&text);
    }
}
