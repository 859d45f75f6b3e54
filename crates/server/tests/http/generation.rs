//! What is generated, whole and piece by piece.

use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{read, read_until};
use crate::server::{MODEL, Setup, TestServer, endless, fresh_folder, with};

const SLOT: Duration = Duration::from_millis(400);

fn text(reply: &Value, index: usize) -> String {
    let choices = reply["choices"].as_array().unwrap();
    let choice = choices.iter().find(|choice| choice["index"] == index).unwrap();
    let text = choice.get("text").unwrap_or_else(|| &choice["message"]["content"]);
    text.as_str().unwrap().to_owned()
}

/// The pieces of continuation `index` joined, and why it ended.
fn joined(events: &[Value], index: usize) -> (String, String) {
    let (mut joined, mut reason) = (String::new(), String::new());
    let choices = events.iter().filter_map(|event| event["choices"].as_array()).flatten();
    for choice in choices.filter(|choice| choice["index"] == index) {
        assert!(reason.is_empty(), "something came after the end");
        let piece = choice.get("text").unwrap_or_else(|| &choice["delta"]["content"]);
        joined.push_str(piece.as_str().unwrap_or_default());
        reason.push_str(choice["finish_reason"].as_str().unwrap_or_default());
    }
    (joined, reason)
}

#[test]
fn a_completion_is_what_the_model_says() {
    let server = TestServer::start();
    let reply = server.post("/v1/completions", &endless(12)).json();
    assert_eq!((&reply["object"], &reply["model"]), (&json!("text_completion"), &json!("demo")));
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    let prompt = MODEL.encode("It is a truth universally acknowledged").unwrap();
    let usage = &reply["usage"];
    assert_eq!(usage["prompt_tokens"], prompt.len());
    assert_eq!(usage["completion_tokens"], 12);
    assert_eq!(usage["total_tokens"], prompt.len() + 12);
    assert_eq!(reply["timings"]["predicted_n"], 12);
    assert!(reply["timings"]["state_bytes"].as_u64().unwrap() > 0);

    // The same by ids, and beside another prompt.
    let by_ids = with(endless(12), json!({"prompt": prompt}));
    assert_eq!(text(&server.post("/v1/completions", &by_ids).json(), 0), text(&reply, 0));
    let both = with(
        endless(12),
        json!({"prompt": ["The sea", "It is a truth universally acknowledged"], "n": 2}),
    );
    let both = server.post("/v1/completions", &both).json();
    assert_eq!((text(&both, 2), text(&both, 3)), (text(&reply, 0), text(&reply, 0)));
    assert_eq!(both["usage"]["completion_tokens"], 48);

    let echo = with(endless(12), json!({"echo": true}));
    let echoed = text(&server.post("/v1/completions", &echo).json(), 0);
    assert_eq!(echoed, format!("It is a truth universally acknowledged{}", text(&reply, 0)));
}

#[test]
fn r_d3_zero_and_seeds_are_reproducible() {
    let server = TestServer::start();
    let ask = |more: Value| {
        let body = with(json!({"prompt": "She was", "max_tokens": 16}), more);
        text(&server.post("/v1/completions", &body).json(), 0)
    };
    assert_eq!(ask(json!({"temperature": 0})), ask(json!({"temperature": 0, "seed": 5})));
    let warm = |seed| json!({"temperature": 1.5, "top_p": 1, "top_k": 0, "seed": seed});
    assert_eq!(ask(warm(1)), ask(warm(1)));
    assert_ne!(ask(warm(1)), ask(warm(2)));
}

#[test]
fn a_stream_is_the_whole_answer() {
    let server = TestServer::start();
    for (path, more) in [
        (
            "/v1/completions",
            json!({"prompt": "He said: caf\u{e9} \u{1f600}", "temperature": 1.2, "seed": 3}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "He said"}], "temperature": 1.2, "seed": 3}),
        ),
    ] {
        let body = with(with(endless(64), more), json!({"n": 2}));
        let whole = server.post(path, &body).json();
        let reply = server.post(
            path,
            &with(body, json!({"stream": true, "stream_options": {"include_usage": true}})),
        );
        assert_eq!(reply.header("cache-control"), Some("no-cache"));
        assert_eq!(reply.header("x-accel-buffering"), Some("no"));
        assert!(reply.body.contains(": prefill "), "{reply:?}");
        let events = reply.events(true);
        for index in 0..2 {
            let reason = whole["choices"][index]["finish_reason"].as_str().unwrap();
            assert_eq!(joined(&events, index), (text(&whole, index), reason.to_owned()), "{path}");
        }
        let last = events.last().unwrap();
        assert_eq!(
            (&last["choices"], &last["usage"]["completion_tokens"]),
            (&json!([]), &whole["usage"]["completion_tokens"])
        );
        if path.contains("chat") {
            assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
            assert_eq!(events[0]["object"], "chat.completion.chunk");
        }
        assert!(events.iter().any(|event| event["timings"]["predicted_n"].is_u64()));
    }
}

#[test]
fn stop_strings_never_show() {
    let server = TestServer::start();
    let whole = text(&server.post("/v1/completions", &endless(40)).json(), 0);
    // In the middle of the text, across tokens.
    let start = whole.char_indices().nth(20).unwrap().0;
    let stop: String = whole[start..].chars().take(9).collect();
    let before = &whole[..whole.find(&stop).unwrap()];
    let body = with(endless(40), json!({"stop": ["never there", stop.clone()], "logprobs": 0}));
    let reply = server.post("/v1/completions", &body).json();
    assert_eq!(text(&reply, 0), before);
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    let tokens = reply["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
    let spelled: String = tokens.iter().map(|token| token.as_str().unwrap()).collect();
    assert!(spelled.starts_with(before) && tokens.len() < 40, "{spelled}");
    let events = server.post("/v1/completions", &with(body, json!({"stream": true}))).events(true);
    assert_eq!(joined(&events, 0), (before.to_owned(), "stop".to_owned()));
}

#[test]
fn probabilities_are_reported() {
    let server = TestServer::start();
    let chat = json!({
        "messages": [{"role": "user", "content": "It is"}], "max_tokens": 5, "temperature": 0,
        "logprobs": true, "top_logprobs": 3, "logit_bias": {"0": -100}
    });
    let reply = server.post("/v1/chat/completions", &chat).json();
    let content = reply["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 5);
    let spelled: String = content.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(spelled, text(&reply, 0));
    for token in content {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        let logprobs: Vec<f64> = top.iter().map(|top| top["logprob"].as_f64().unwrap()).collect();
        assert!(logprobs.is_sorted_by(|a, b| a >= b) && logprobs[0] <= 0.0, "{logprobs:?}");
        assert!(!token["bytes"].as_array().unwrap().is_empty());
    }
    let completion = with(endless(5), json!({"logprobs": 2}));
    let reply = server.post("/v1/completions", &completion).json();
    let logprobs = &reply["choices"][0]["logprobs"];
    assert_eq!(logprobs["text_offset"][0], 0);
    assert_eq!(logprobs["top_logprobs"][4].as_object().unwrap().len(), 2);
    let needs = with(chat, json!({"logprobs": false}));
    assert_eq!(server.post("/v1/chat/completions", &needs).status, 400);
}

#[test]
fn the_best_of_several_are_those_whose_tokens_are_the_likeliest() {
    let server = TestServer::start();
    let prompts = json!({"prompt": ["The sea", "It is"], "temperature": 1.0, "seed": 5});
    let body = with(endless(6), prompts);
    let all = with(body.clone(), json!({"n": 5, "logprobs": 0}));
    let all = server.post("/v1/completions", &all).json();
    let mean = |index: usize| {
        let tokens = all["choices"][index]["logprobs"]["token_logprobs"].as_array().unwrap();
        tokens.iter().map(|logprob| logprob.as_f64().unwrap()).sum::<f64>() / tokens.len() as f64
    };
    let best = with(body, json!({"n": 2, "best_of": 5, "echo": true}));
    let best = server.post("/v1/completions", &best).json();
    assert_eq!(best["choices"].as_array().unwrap().len(), 4);
    assert_eq!(best["usage"]["completion_tokens"], 60);
    for (prompt, words) in ["The sea", "It is"].into_iter().enumerate() {
        let mut order: Vec<usize> = (prompt * 5..prompt * 5 + 5).collect();
        order.sort_by(|&a, &b| mean(b).total_cmp(&mean(a)));
        for place in 0..2 {
            let want = format!("{words}{}", text(&all, order[place]));
            assert_eq!(text(&best, prompt * 2 + place), want, "{order:?}");
        }
        assert_ne!(text(&all, order[0]), text(&all, order[1]));
    }
    assert!(best["choices"][0]["logprobs"].is_null());
}

#[test]
fn beams_are_the_likeliest_texts_and_one_beam_is_the_greedy_one() {
    let server = TestServer::start();
    let body = json!({"prompt": "The sea", "max_tokens": 6});
    let post = |more: Value| server.post("/v1/completions", &with(body.clone(), more));
    let greedy = post(json!({"temperature": 0})).json();
    let one = post(json!({"use_beam_search": true})).json();
    assert_eq!(text(&one, 0), text(&greedy, 0));
    for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(one["usage"][count], greedy["usage"][count], "{count}");
    }
    assert_eq!(one["choices"][0]["finish_reason"], greedy["choices"][0]["finish_reason"]);
    let all = post(json!({"use_beam_search": true, "n": 4})).json();
    let texts: Vec<String> = (0..4).map(|index| text(&all, index)).collect();
    assert!(texts.iter().all(|text| texts.iter().filter(|x| *x == text).count() == 1), "{texts:?}");
    let two = post(json!({"use_beam_search": true, "n": 2, "best_of": 4, "echo": true})).json();
    assert_eq!(two["choices"].as_array().unwrap().len(), 2);
    for index in 0..2 {
        assert_eq!(text(&two, index), format!("The sea{}", texts[index]));
    }
    for more in [
        json!({"stream": true}),
        json!({"logprobs": 1}),
        json!({"temperature": 0.5}),
        json!({"top_p": 0.9}),
        json!({"logit_bias": {"5": 1}}),
    ] {
        let reply = post(with(json!({"use_beam_search": true}), more.clone()));
        assert_eq!(reply.status, 400, "{more}: {reply:?}");
        assert_eq!(reply.json()["error"]["param"], "use_beam_search", "{more}: {reply:?}");
    }
}

#[test]
fn a_prompt_that_was_seen_is_not_computed_again() {
    let server = TestServer::start();
    let body = with(endless(4), json!({"prompt": "word ".repeat(300)}));
    let first = server.post("/v1/completions", &body).json();
    let second = server.post("/v1/completions", &body).json();
    assert_eq!(text(&first, 0), text(&second, 0));
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached > 200, "{second}");
    assert_eq!(second["timings"]["cache_n"], cached);
    assert!(server.get("/metrics").body.contains(&format!("boostr_tokens_skipped_total {cached}")));
}

#[test]
fn a_request_may_ask_for_all_to_be_computed() {
    let server = TestServer::start();
    for words in [20, 45] {
        server.post("/v1/completions", &with(endless(4), json!({"prompt": "word ".repeat(words)})));
    }
    // The end of each prompt and of each answer.
    server.wait(SLOT, |stats| stats.snapshots == 4);
    let all = json!({"prompt": "word ".repeat(90), "cache_prompt": false, "logprobs": 0});
    let all = server.post("/v1/completions", &with(endless(6), all)).json();
    assert_eq!(all["timings"]["cache_n"], 0);
    let fresh = json!({"prompt": "word ".repeat(90), "logprobs": 0});
    let fresh = TestServer::start().post("/v1/completions", &with(endless(6), fresh)).json();
    assert_eq!(all["choices"], fresh["choices"]);
    assert_eq!(server.stats().snapshots, 4);
    let body = with(endless(1), json!({"cache_prompt": "no"}));
    assert_eq!(server.post("/v1/completions", &body).json()["error"]["param"], "cache_prompt");
}

/// A chat without a session: the messages are those of the user and the assistant in turns.
fn chat(texts: &[&str]) -> Value {
    let roles = ["user", "assistant"].into_iter().cycle();
    let messages = texts.iter().zip(roles);
    let messages: Vec<Value> =
        messages.map(|(text, role)| json!({"role": role, "content": text})).collect();
    with(endless(24), json!({"messages": messages}))
}

fn cached(reply: &Value) -> usize {
    reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() as usize
}

#[test]
fn a_conversation_that_is_edited_goes_on_from_the_last_message_that_stayed() {
    let long =
        |what: &str| format!("The {what} was seen from the old house by the sea. ").repeat(4);
    let (ship, storm, light, boat) = (long("ship"), long("storm"), long("light"), long("boat"));
    let before = ["Tell me.", &ship, &storm, &light, "And then?"];
    let edited = ["Tell me.", &ship, &boat];

    let server = TestServer::start();
    let path = "/v1/chat/completions";
    let first = server.post(path, &chat(&before)).json();
    assert_eq!(cached(&first), 0, "{first}");
    let reply = server.post(path, &chat(&edited)).json();
    let stayed = MODEL.encode(&format!("Tell me.\n{ship}\n")).unwrap().len();
    // No other snapshot could be there: those of the grid begin at 512.
    assert!(stayed > 32 && first["usage"]["prompt_tokens"].as_u64().unwrap() < 512, "{first}");
    assert_eq!(cached(&reply), stayed, "{reply}");
    let cold = TestServer::start().post(path, &chat(&edited)).json();
    assert_eq!((cached(&cold), text(&cold, 0)), (0, text(&reply, 0)));
    assert_eq!(cold["usage"]["prompt_tokens"], reply["usage"]["prompt_tokens"]);
}

#[test]
fn a_stateless_chat_goes_on_after_a_restart_from_a_state_on_disk() {
    let folder = fresh_folder();
    let start =
        || TestServer::with(Setup { states: Some((folder.clone(), 1 << 30)), ..Setup::default() });
    let path = "/v1/chat/completions";
    let long =
        |what: &str| format!("The {what} was seen from the old house by the sea. ").repeat(4);
    let mut server = start();
    let first = server.post(path, &chat(&["Tell me.", &long("ship"), &long("storm")])).json();
    assert_eq!(cached(&first), 0, "{first}");
    server.join();
    drop(server);

    let server = start();
    let more = ["Tell me.", &long("ship"), &long("storm"), "It was.", "And then?"];
    let reply = server.post(path, &chat(&more)).json();
    let computed = reply["usage"]["prompt_tokens"].as_u64().unwrap() as usize - cached(&reply);
    assert!(cached(&reply) > 100 && computed < 30, "{reply}");
    assert_eq!(reply["timings"]["cache_n"], cached(&reply));
    let cold = TestServer::start().post(path, &chat(&more)).json();
    assert_eq!((cached(&cold), text(&cold, 0)), (0, text(&reply, 0)));
    let metrics = server.get("/metrics").body;
    assert!(metrics.contains("\nboostr_state_cache_disk_reads_total 1\n"), "{metrics}");
    assert!(!metrics.contains("\nboostr_state_cache_disk_bytes 0\n"), "{metrics}");
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn of_a_long_conversation_the_last_messages_alone_are_kept() {
    let server = TestServer::start();
    let text = "The ship was seen from the old house by the sea, and the light too. ".repeat(2);
    let texts: Vec<String> = (0..9).map(|i| format!("{i}. {text}")).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let reply = server.post("/v1/chat/completions", &chat(&texts)).json();
    let tokens = reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!((9 * 33..512).contains(&tokens), "{tokens}");
    // The prompt, the answer, and at most three ends of messages, as the last one ends with the prompt; an end that is
    // less than 32 tokens after another cut is none.
    let snapshots = server.stats().snapshots;
    assert!((3..=5).contains(&snapshots), "{snapshots}");
}

#[test]
fn text_and_tokens_go_both_ways() {
    let server = TestServer::start();
    let tokens = server.post("/tokenize", &json!({"content": "It is a truth"})).json();
    let ids = MODEL.tokenizer().unwrap().encode("It is a truth", false).unwrap();
    assert_eq!((&tokens["tokens"], &tokens["count"]), (&json!(ids), &json!(ids.len())));
    let back = server.post("/detokenize", &json!({"tokens": ids})).json();
    assert_eq!(back["content"], "It is a truth");
    let messages = json!([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]);
    let end = "<|endoftext|>";
    let counted = |more: Value| {
        let mut body = json!({"content": end});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/tokenize", &body).json()["count"].as_u64().unwrap()
    };
    assert_eq!((counted(json!({})), counted(json!({"parse_special": true}))), (1, 1));
    let spelled = counted(json!({"parse_special": false}));
    assert!(spelled > 1);
    let prompt_tokens = |more: Value| {
        let mut body = json!({"prompt": end, "max_tokens": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", &body).json()["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!(prompt_tokens(json!({})), 1);
    assert_eq!(prompt_tokens(json!({"parse_special": false})), spelled);
    let marked = "\u{feff}{\"content\": \"It is a truth\"}";
    let headers = "Connection: close\r\n";
    assert_eq!(server.send("POST", "/tokenize", headers, marked).json(), tokens);
    let prompt = server.post("/apply-template", &json!({"messages": messages})).json();
    assert_eq!(prompt["prompt"].as_str().unwrap().trim_end(), "a\nb");
    assert_eq!(server.post("/tokenize", &json!({})).status, 400);
    assert_eq!(server.post("/detokenize", &json!({"tokens": ["a"]})).status, 400);
}

#[test]
fn texts_become_vectors_of_length_one() {
    let server = TestServer::start();
    let body = json!({"input": ["the sea", "the sea", "a letter"], "model": "demo"});
    let reply = server.post("/v1/embeddings", &body).json();
    let vectors: Vec<Vec<f64>> = reply["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| {
            one["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
        })
        .collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    assert_eq!(vectors[0].len(), MODEL.model.width());
    assert!((dot(&vectors[0], &vectors[0]) - 1.0).abs() < 1e-5);
    assert_eq!(vectors[0], vectors[1]);
    assert!(dot(&vectors[0], &vectors[2]) < 0.999);
    assert_eq!(reply["usage"]["prompt_tokens"], reply["usage"]["total_tokens"]);

    let base64 = with(body, json!({"input": "the sea", "encoding_format": "base64"}));
    let text = server.post("/v1/embeddings", &base64).json()["data"][0]["embedding"].clone();
    assert_eq!(text.as_str().unwrap().len(), (MODEL.model.width() * 4).div_ceil(3) * 4);
    for (wrong, param) in [
        (json!({"input": []}), "input"),
        (json!({"input": ""}), "input"),
        (json!({"input": "a", "dimensions": 3}), "dimensions"),
        (json!({"input": "a", "encoding_format": "hex"}), "encoding_format"),
    ] {
        let reply = server.post("/v1/embeddings", &wrong);
        assert_eq!(
            (reply.status, &reply.json()["error"]["param"]),
            (400, &json!(param)),
            "{wrong}"
        );
    }
}

#[test]
fn models_and_properties_are_told() {
    let server = TestServer::start();
    let models = server.get("/v1/models").json();
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("demo")));
    let model = server.get("/v1/models/demo").json();
    assert_eq!((&model["object"], &model["type"]), (&json!("model"), &json!("model")));
    assert_eq!(model, models["data"][0]);
    // As Anthropic's clients read it.
    assert_eq!((&model["display_name"], &models["first_id"]), (&json!("demo"), &json!("demo")));
    assert_eq!((&models["last_id"], &models["has_more"]), (&json!("demo"), &json!(false)));
    assert!(model["created_at"].as_str().is_some_and(|at| at.ends_with('Z')), "{model}");
    let props = server.get("/props").json();
    assert_eq!((&props["model"], &props["sessions"]), (&json!("demo"), &json!(false)));
    assert!(props["parameters"].as_u64().unwrap() > 1_000_000);
    assert_eq!(props["defaults"]["max_tokens"], 512);
    assert_eq!(server.get("/health").json()["status"], "ok");
}

#[test]
fn r_d9_a_client_that_leaves_frees_its_slot() {
    let server = TestServer::start();
    let running = |n| move |stats: &boostr::engine::Stats| stats.running == n;
    // Before the first token of a whole answer.
    let whole = server.begin("/v1/completions", &endless(8000));
    server.wait(Duration::from_secs(5), running(1));
    drop(whole);
    server.wait(SLOT, running(0));
    // In the middle of a stream.
    let mut stream = server.begin("/v1/completions", &with(endless(8000), json!({"stream": true})));
    read_until(&mut stream, "\"text\":");
    drop(stream);
    server.wait(SLOT, running(0));
    // In a long prompt.
    let long = with(endless(10), json!({"prompt": "word ".repeat(60_000), "stream": true}));
    let mut prompt = server.begin("/v1/completions", &long);
    read_until(&mut prompt, ": prefill ");
    drop(prompt);
    server.wait(SLOT, |stats| stats.finished == 3);
    let stats = server.stats();
    assert!(stats.cancelled == 3 && stats.prompt_tokens < 60_000, "{stats:?}");
}

#[test]
fn r_d9_a_client_that_leaves_the_queue_does_not_touch_the_others() {
    let engine = boostr::engine::EngineConfig { max_running: 1, ..Default::default() };
    let server = TestServer::with(Setup { engine, ..Default::default() });
    let alone = text(&server.post("/v1/completions", &endless(300)).json(), 0);
    let mut first = server.begin("/v1/completions", &endless(300));
    server.wait(Duration::from_secs(5), |stats| stats.running == 1);
    let second = server.begin("/v1/completions", &endless(300));
    let mut third = server.begin("/v1/completions", &endless(300));
    drop(second);
    assert_eq!(text(&read(&mut first).unwrap().json(), 0), alone);
    assert_eq!(text(&read(&mut third).unwrap().json(), 0), alone);
}
