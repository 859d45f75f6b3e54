//! `/v1/completions`: prompts whose tokens are reported, and holes that are filled in.

use std::thread::sleep;
use std::time::Duration;

use boostr::evaluate::score;
use serde_json::{Value, json};

use crate::server::{MODEL, Setup, TestServer, thinker, with};

const PROMPT: &str = "It is a truth universally acknowledged, that a single man";

fn ask(more: Value) -> Value {
    with(
        json!({"prompt": PROMPT, "max_tokens": 1, "logprobs": 2, "echo": true, "temperature": 0}),
        more,
    )
}

#[test]
fn the_tokens_of_a_prompt_have_the_numbers_of_eval() {
    let server = TestServer::start();
    let ids = MODEL.encode(PROMPT).unwrap();
    let expected = score(&MODEL.model, &ids, PROMPT.len(), |_, _| {}).unwrap();
    for prompt in [json!(PROMPT), json!(ids), json!([ids]), json!([PROMPT])] {
        let reply = server.post("/v1/completions", &ask(json!({"prompt": prompt}))).json();
        let choice = &reply["choices"][0];
        let given = &choice["logprobs"];
        let list = |name: &str| given[name].as_array().unwrap().clone();
        assert_eq!(list("token_logprobs").len(), ids.len() + 1, "{reply}");
        assert_eq!(
            (&given["token_logprobs"][0], &given["top_logprobs"][0]),
            (&Value::Null, &Value::Null)
        );
        let of_prompt = &list("token_logprobs")[1..ids.len()];
        let sum: f64 = of_prompt.iter().map(|x| x.as_f64().unwrap()).sum();
        assert!((sum + expected.nats).abs() < 1e-3, "{sum} and {}", expected.nats);
        // The texts of tokens stand where it is said that they do.
        let text = choice["text"].as_str().unwrap();
        assert!(text.starts_with(PROMPT));
        for (token, offset) in list("tokens").iter().zip(list("text_offset")) {
            let rest: String = text.chars().skip(offset.as_u64().unwrap() as usize).collect();
            assert!(rest.starts_with(token.as_str().unwrap()), "{token} at {offset}");
        }
        let mut greedy = 0;
        for (logprob, top) in list("token_logprobs").iter().zip(list("top_logprobs")).skip(1) {
            let best = top.as_object().unwrap().values().map(|x| x.as_f64().unwrap());
            let (best, logprob) =
                (best.fold(f64::NEG_INFINITY, f64::max), logprob.as_f64().unwrap());
            assert!(logprob <= best, "{logprob} and {best}");
            greedy += u32::from(logprob == best);
        }
        // Equal numbers are written alike: the last token was the likeliest, and others were.
        assert!(greedy > 1, "{given}");
    }
    assert_eq!(reply_of_zero(&server), ids.len());
}

#[test]
fn tokens_that_were_computed_to_be_reported_do_not_count_as_kept() {
    let server = TestServer::start();
    let len = MODEL.encode(PROMPT).unwrap().len();
    let reply = server.post("/v1/completions", &ask(json!({}))).json();
    assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "{reply}");
    let timings = &reply["timings"];
    assert_eq!((&timings["cache_n"], &timings["prompt_n"]), (&json!(0), &json!(len)), "{reply}");
    let counted = |name: &str| {
        let metrics = server.get("/metrics").body;
        let line = metrics.lines().find_map(|line| line.strip_prefix(&format!("boostr_{name} ")));
        line.expect(name).parse::<usize>().unwrap()
    };
    // The engine publishes its counts after a step, which the answer may be ahead of.
    let wait_for = |all: usize| {
        for _ in 0..200 {
            if counted("prompt_tokens_total") == all {
                return;
            }
            sleep(Duration::from_millis(10));
        }
        panic!("{} of {all}", counted("prompt_tokens_total"));
    };
    wait_for(len);
    assert_eq!(counted("tokens_skipped_total"), 0);
    // The prompt is known now.
    let longer = [&MODEL.encode(PROMPT).unwrap()[..], &[5, 6, 7]].concat();
    let reply = server.post("/v1/completions", &json!({"prompt": longer, "max_tokens": 1})).json();
    assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], len, "{reply}");
    let len_before = len + 3;
    // So do those of vectors and of beams, which are computed beside the engine.
    server.post("/v1/embeddings", &json!({"input": PROMPT}));
    wait_for(len_before + len);
    let beams = json!({"prompt": PROMPT, "max_tokens": 1, "use_beam_search": true, "best_of": 2});
    assert_eq!(server.post("/v1/completions", &beams).status, 200);
    wait_for(len_before + 2 * len);
}

/// How many tokens are reported where none are generated.
fn reply_of_zero(server: &TestServer) -> usize {
    let reply = server.post("/v1/completions", &ask(json!({"max_tokens": 0}))).json();
    assert_eq!(reply["choices"][0]["text"], PROMPT);
    assert_eq!(reply["usage"]["completion_tokens"], 0);
    reply["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len()
}

#[test]
fn what_goes_on_is_what_it_is_without_the_prompt() {
    let server = TestServer::start();
    let more = json!({"prompt": [PROMPT, "She was"], "max_tokens": 8, "n": 2, "temperature": 1, "seed": 3});
    let echoed = server.post("/v1/completions", &ask(more.clone())).json();
    let alone =
        server.post("/v1/completions", &ask(with(more.clone(), json!({"echo": false})))).json();
    for index in 0..4 {
        let (with_prompt, without) = (&echoed["choices"][index], &alone["choices"][index]);
        let prompt = if index < 2 { PROMPT } else { "She was" };
        assert_eq!(with_prompt["text"], format!("{prompt}{}", without["text"].as_str().unwrap()));
        let of = |choice: &Value| choice["logprobs"]["token_logprobs"].as_array().unwrap().clone();
        let (all, tail) = (of(with_prompt), of(without));
        assert_eq!(all[all.len() - tail.len()..], tail, "the numbers differ");
    }
    // Piece by piece the prompt is the first one.
    let events =
        server.post("/v1/completions", &ask(with(more, json!({"stream": true})))).events(true);
    for index in 0..4 {
        let (mut text, mut tokens) = (String::new(), Vec::new());
        for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
            if choice["index"] == index {
                text.push_str(choice["text"].as_str().unwrap());
                tokens.extend(choice["logprobs"]["tokens"].as_array().cloned().unwrap_or_default());
            }
        }
        let whole = &echoed["choices"][index];
        assert_eq!(
            (json!(text), json!(tokens)),
            (whole["text"].clone(), whole["logprobs"]["tokens"].clone())
        );
    }
}

#[test]
fn one_token_is_reported_beside_the_prompt_where_it_ends_the_text() {
    let server = TestServer::start();
    // `<|endoftext|>` is the likeliest here.
    let ids = MODEL.encode(PROMPT).unwrap();
    let reply = server.post("/v1/completions", &ask(json!({"logit_bias": {"0": 100}}))).json();
    let given = reply["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
    assert_eq!(given.len(), ids.len() + 1, "{reply}");
    assert_eq!(reply["choices"][0]["text"], PROMPT);
}

#[test]
fn a_hole_is_filled_in_by_a_model_that_has_tokens_for_it() {
    let model = Some(thinker("{{ messages }}"));
    let server = TestServer::with(Setup { model, ..Setup::default() });
    let ask = |more: Value| {
        let body = json!({"prompt": "The sea", "suffix": " was <|fim_middle|> calm.", "max_tokens": 8, "temperature": 0});
        server.post("/v1/completions", &with(body, more))
    };
    let filled = ask(json!({})).json();
    // The same by ids: control tokens around texts, in which none is read.
    let text = |text: &str| {
        let reply =
            server.post("/tokenize", &json!({"content": text, "parse_special": false})).json();
        reply["tokens"].as_array().unwrap().clone()
    };
    let ids = [
        vec![json!(2043)],
        text("The sea"),
        vec![json!(2044)],
        text(" was <|fim_middle|> calm."),
        vec![json!(2045)],
    ];
    let by_ids = ask(json!({"prompt": ids.concat(), "suffix": null})).json();
    assert_eq!(filled["choices"][0]["text"], by_ids["choices"][0]["text"]);
    assert_eq!(filled["usage"]["prompt_tokens"], ids.concat().len());
    let echoed = ask(json!({"echo": true})).json();
    assert!(echoed["choices"][0]["text"].as_str().unwrap().starts_with("The sea"), "{echoed}");
    for more in [json!({"prompt": [1, 2]}), json!({"echo": true, "logprobs": 1})] {
        assert_eq!(ask(more.clone()).status, 400, "{more}");
    }
    let server = TestServer::start();
    let reply = server.post("/v1/completions", &json!({"prompt": "a", "suffix": "b"}));
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("suffix")));
    assert!(reply.error().contains("no tokens to fill in"), "{}", reply.error());
}
