//! The thought of an answer, apart from its text.

use boostr_server::Config;
use serde_json::{Value, json};

use crate::server::{Setup, THINK, THINK_END, TestServer, thinker, with};

/// A template that shows thoughts of the history, and ends with `end`.
pub fn template(end: &str) -> String {
    let message = "{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n";
    format!("{{% for m in messages %}}{message}{{% endfor %}}{end}")
}

pub fn server(end: &str) -> TestServer {
    TestServer::with(Setup { model: Some(thinker(&template(end))), ..Setup::default() })
}

/// A request whose answer is likely to end a thought soon, and to begin none.
pub fn ask(seed: u64) -> Value {
    json!({
        "messages": [{"role": "user", "content": "What is the sea?"}], "max_tokens": 24, "temperature": 1, "seed": seed,
        "logit_bias": {THINK.to_string(): -100, THINK_END.to_string(): 7, "0": -100}
    })
}

fn message(reply: &Value) -> (String, String) {
    let message = &reply["choices"][0]["message"];
    let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
    (text("reasoning_content"), text("content"))
}

#[test]
fn a_server_that_does_not_divide_thoughts_does_so_where_a_request_wants_it() {
    let config = Config { divides_thoughts: false, ..Config::default() };
    let model = Some(thinker(&template("assistant: <think>\n")));
    let plain = TestServer::with(Setup { config, model, ..Setup::default() });
    let usual = server("assistant: <think>\n");
    let asked = |server: &TestServer, format: Option<&str>| {
        let more = format.map_or_else(|| json!({}), |it| json!({"reasoning_format": it}));
        message(&server.post("/v1/chat/completions", &with(ask(1), more)).json())
    };
    assert_eq!(asked(&plain, None), asked(&usual, Some("none")));
    assert_eq!(asked(&plain, Some("auto")), asked(&usual, None));
    assert_eq!(asked(&plain, None).0, "");
    assert_ne!(asked(&usual, None).0, "");
}

#[test]
fn a_thought_is_given_apart_from_the_text() {
    let server = server("assistant: <think>\n");
    let mut both = 0;
    for seed in 0..8 {
        let raw = with(ask(seed), json!({"reasoning_format": "none"}));
        let raw = server.post("/v1/chat/completions", &raw).json();
        let (nothing, all) = message(&raw);
        assert_eq!(nothing, "", "{raw}");
        let whole = server.post("/v1/chat/completions", &ask(seed)).json();
        let (thought, text) = message(&whole);
        let (expected, rest) = all.split_once("</think>").unwrap_or((&all, ""));
        assert_eq!(
            (thought.as_str(), text.as_str()),
            (expected.trim(), rest.trim_start()),
            "{raw}"
        );
        both += u32::from(!thought.is_empty() && !text.is_empty());
        let counted = &whole["usage"]["completion_tokens_details"]["reasoning_tokens"];
        assert!((1..=24).contains(&counted.as_u64().unwrap()) || thought.is_empty(), "{whole}");

        let body = with(ask(seed), json!({"stream": true, "logprobs": true}));
        let (mut streamed, mut tokens) = ((String::new(), String::new()), 0);
        for event in server.post("/v1/chat/completions", &body).events(true) {
            let choice = &event["choices"][0];
            let delta = &choice["delta"];
            if let Some(part) = delta["reasoning_content"].as_str() {
                assert!(streamed.1.is_empty(), "a thought after the text");
                streamed.0.push_str(part);
            }
            streamed.1.push_str(delta["content"].as_str().unwrap_or_default());
            tokens += choice["logprobs"]["content"].as_array().map_or(0, Vec::len);
        }
        assert_eq!(streamed, (thought, text));
        assert_eq!(tokens, whole["usage"]["completion_tokens"].as_u64().unwrap() as usize);
    }
    assert!(both > 0, "no answer had a thought and a text");
}

#[test]
fn a_thought_that_was_cut_goes_on_without_a_session() {
    let server = server("assistant: <think>\n");
    let (mut gone_on, mut spoken) = (0, 0);
    for seed in 0..8 {
        let cut = with(ask(seed), json!({"max_tokens": 2}));
        let (thought, text) = message(&server.post("/v1/chat/completions", &cut).json());
        if thought.is_empty() || !text.is_empty() {
            continue;
        }
        let begun = json!({"role": "assistant", "content": text, "reasoning_content": thought});
        let messages = json!([{"role": "user", "content": "What is the sea?"}, begun]);
        let on = json!({"messages": messages, "continue_final_message": true});
        let on = with(ask(seed), on);
        let raw = with(on.clone(), json!({"reasoning_format": "none"}));
        let (nothing, all) = message(&server.post("/v1/chat/completions", &raw).json());
        assert_eq!(nothing, "");
        let (thought, text) = message(&server.post("/v1/chat/completions", &on).json());
        let (expected, rest) = all.split_once("</think>").unwrap_or((&all, ""));
        let expected = (expected.trim_end(), rest.trim_start());
        assert_eq!((thought.as_str(), text.as_str()), expected, "{all}");
        gone_on += 1;
        spoken += u32::from(!text.is_empty());
        // Ollama's API goes on with a last message of the assistant unasked.
        let begun = json!({"role": "assistant", "content": "", "thinking": on["messages"][1]["reasoning_content"]});
        let options = json!({"num_predict": 24, "seed": seed, "temperature": 1, "logit_bias": on["logit_bias"]});
        let body = json!({
            "model": server.get("/v1/models").json()["data"][0]["id"], "stream": false, "options": options,
            "messages": [{"role": "user", "content": "What is the sea?"}, begun]
        });
        let reply = server.post("/api/chat", &body).json();
        let said = |name: &str| reply["message"][name].as_str().unwrap_or_default().to_owned();
        assert_eq!((said("thinking"), said("content")), (thought, text), "{reply}");
    }
    assert!(gone_on > 0 && spoken > 0, "{gone_on} {spoken}");
    let nothing = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]);
    let body = with(ask(1), json!({"messages": nothing, "continue_final_message": true}));
    let reply = server.post("/v1/chat/completions", &body);
    assert_eq!(reply.json()["error"]["param"], "continue_final_message");
}

#[test]
fn an_answer_without_a_thought_has_no_field_for_one() {
    let server = server("assistant:");
    let body = with(ask(1), json!({"logit_bias": {}}));
    let reply = server.post("/v1/chat/completions", &body).json();
    let message = reply["choices"][0]["message"].as_object().unwrap();
    assert!(!message.contains_key("reasoning_content"), "{reply}");
    // One that a grammar holds begins with what the grammar says, whatever the prompt ends with.
    let server = self::server("assistant: <think>\n");
    let body = with(
        body,
        json!({"max_tokens": 40, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["cat"]}}}}),
    );
    let reply = server.post("/v1/chat/completions", &body).json();
    assert_eq!(reply["choices"][0]["message"]["content"], "\"cat\"", "{reply}");
    let wrong = with(ask(1), json!({"reasoning_format": "loud"}));
    let reply = server.post("/v1/chat/completions", &wrong);
    assert_eq!(reply.json()["error"]["param"], "reasoning_format");
}

#[test]
fn thoughts_of_the_history_reach_the_template() {
    let server = server("assistant:");
    let messages = json!([
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "Hm."},
        {"role": "user", "content": "Three?"}
    ]);
    let reply = server.post("/apply-template", &json!({"messages": messages}));
    let prompt = "user: One?\nassistant: <think>Hm.</think>Two.\nuser: Three?\nassistant:";
    assert_eq!(reply.json()["prompt"], prompt);
}
