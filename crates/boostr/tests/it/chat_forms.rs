//! Conversations as clients and data sets have them, in the form that each template reads: nothing is lost.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use boostr::chat::{ChatTemplate, Options, Source, normalized};
use boostr::generation_config::SpecialTokens;
use boostr::tokenizer::Tokenizer;
use boostr::train::data::{Content, Encoder};
use serde_json::{Map, Value, json};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/templates")
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new("t.jinja", source, &SpecialTokens::default()).unwrap()
}

fn of_config(json: &str) -> Source {
    Source::from_json("tokenizer_config.json", json).unwrap().unwrap()
}

/// The published template of this name.
fn published(name: &str) -> ChatTemplate {
    let path = fixtures().join(format!("{name}.jinja"));
    let golden = read(&path.with_extension("json"));
    let special = SpecialTokens::from_json(&path, &golden["special"].to_string()).unwrap();
    ChatTemplate::new(&path, &fs::read_to_string(&path).unwrap(), &special).unwrap()
}

fn names() -> Vec<String> {
    let paths = fs::read_dir(fixtures()).unwrap().map(|entry| entry.unwrap().path());
    let templates = paths.filter(|path| path.extension().is_some_and(|e| e == "jinja"));
    let mut names: Vec<String> =
        templates.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

fn parts(texts: &[&str]) -> Value {
    texts.iter().map(|text| json!({"type": "text", "text": text})).collect()
}

fn prompt(template: &ChatTemplate, messages: &Value, tools: Option<&Value>) -> String {
    let options = Options {
        add_generation_prompt: true,
        tools: tools.map(|tools| tools.as_array().unwrap().clone()),
        now: Some(now()),
        ..Options::default()
    };
    let messages = normalized(messages.as_array().unwrap()).unwrap();
    template.prompt(&messages, &options).unwrap()
}

/// The moment of the fixtures' texts.
fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_773_065_107)
}

#[test]
fn p_template_crlf_line_ends_are_those_of_jinja2() {
    let source = of_config(include_str!("../data/people/template-crlf/tokenizer_config.json"));
    assert!(source.templates[0].1.contains("\r\n"));
    let messages = [json!({"role": "user", "content": "x\r\ny"})];
    let text = source.compile().unwrap().render(&messages, &Options::default()).unwrap();
    assert_eq!(text, "<|system|>\nx\r\ny\nx\r\ny\na\nb");
    // In strings, raw text and comments; an escape is what it says, and so is what a message says.
    let source = "a\rb\r\n{{ 'c\rd\r\ne' }}{{ 'f\\r\\ng' }}{% raw %}\rh\r\n{% endraw %}{# \r #}\r{{ messages[0].content }}\r";
    let text = template(source).render(&messages, &Options::default()).unwrap();
    assert_eq!(text, "a\nb\nc\nd\nef\r\ng\nh\nx\r\ny");
}

#[test]
fn p_template_crlf_published_templates_give_the_same_text_with_either_line_end() {
    let conversations = read(&fixtures().join("conversations.json"));
    for name in names() {
        let path = fixtures().join(format!("{name}.jinja"));
        let text = fs::read_to_string(&path).unwrap().replace("\r\n", "\n");
        let [one, two] = ["\n", "\r\n"].map(|end| template(&text.replace('\n', end)));
        for conversation in conversations.as_array().unwrap() {
            let options = Options { now: Some(now()), ..Options::default() };
            let messages = conversation["messages"].as_array().unwrap();
            let [one, two] = [&one, &two].map(|template| template.render(messages, &options));
            assert_eq!(one.ok(), two.ok(), "{name}: {}", conversation["name"]);
        }
    }
}

#[test]
fn p_content_parts_are_given_to_a_template_that_reads_them() {
    let source = of_config(include_str!("../data/people/content-parts/tokenizer_config.json"));
    let messages = json!([{"role": "user", "content": parts(&["Look:", " here"])}]);
    assert_eq!(prompt(&source.compile().unwrap(), &messages, None), "<|user|>Look: here");
    // One that takes texts alone gets them joined, and so does the plain one.
    let texts = template("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}");
    assert_eq!(prompt(&texts, &messages, None), "<|user|>Look:\n here");
    let adds =
        template("{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}");
    assert_eq!(prompt(&adds, &messages, None), "<|user|>Look:\n here");
    let json = template("{% for m in messages %}{{ m.content | tojson }}{% endfor %}");
    assert_eq!(prompt(&json, &messages, None), "\"Look:\\n here\"");
    assert_eq!(prompt(&ChatTemplate::plain().unwrap(), &messages, None), "Look:\n here\n");
    // Of roles, each by itself.
    let user = template(
        "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}|{% endfor %}\
         {% else %}{{ m.content }}{% endif %}{% endfor %}",
    );
    let both = json!([
        {"role": "system", "content": parts(&["a", "b"])},
        {"role": "user", "content": parts(&["c", "d"])},
    ]);
    assert_eq!(prompt(&user, &both, None), "a\nbc|d|");
}

#[test]
fn p_content_parts_published_templates_write_what_they_write_in_python() {
    let conversations = read(&fixtures().join("conversations.json"));
    let name = "content in parts";
    let conversation =
        conversations.as_array().unwrap().iter().find(|c| c["name"] == name).unwrap();
    let mut as_in_python = 0;
    for file in names() {
        let golden = read(&fixtures().join(format!("{file}.json")));
        let want = golden["rendered"][name].as_str();
        if golden["rendered"][name].get("raises").is_some() && file.starts_with("google-gemma-2") {
            continue; // It refuses system messages.
        }
        let text = prompt(&published(&file), &conversation["messages"], None);
        // Python shows a list to a template that knows texts alone, or fails.
        let shows_list = |want: &str| want.contains("'text': ") || want.contains("\"text\": ");
        if let Some(want) = want.filter(|want| !shows_list(want)) {
            assert_eq!(text, want, "{file}");
            as_in_python += 1;
        }
        for part in ["Be kind.", "First part.", "Second part."] {
            assert!(text.contains(part), "{file}: {part} is not in {text}");
        }
        assert!(!text.contains("'text'") && !text.contains("\"text\""), "{file}: {text}");
    }
    assert!(as_in_python >= 5, "{as_in_python}");
}

/// A call, its result and the tools that they are of.
fn called() -> (Value, Value) {
    let tools = json!([{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]);
    let call = json!({"id": "abcdefghi", "type": "function",
        "function": {"name": "get_weather", "arguments": "{\"city\": \"Rome\"}"}});
    let messages = json!([
        {"role": "user", "content": "Weather in Rome?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "21 degrees"},
        {"role": "assistant", "content": "It is warm."},
        {"role": "user", "content": "Thanks."},
    ]);
    (messages, tools)
}

#[test]
fn p_tools_dropped_no_more_by_a_template_that_knows_none() {
    let template = published("HuggingFaceTB-SmolLM2-135M-Instruct");
    let (messages, tools) = called();
    let text = prompt(&template, &messages, Some(&tools));
    let tool = tools[0].to_string();
    let system = format!(
        "<|im_start|>system\nYou can call these functions:\n<tools>\n{tool}\n</tools>\nTo call one, write its name and \
         its arguments as JSON:\n<tool_call>\n{{\"name\": NAME, \"arguments\": {{..}}}}\n</tool_call><|im_end|>\n"
    );
    let talk = "<|im_start|>user\nWeather in Rome?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n\
        {\"name\": \"get_weather\", \"arguments\": {\"city\":\"Rome\"}}\n</tool_call><|im_end|>\n<|im_start|>user\n\
        <tool_response>\n21 degrees\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is warm.<|im_end|>\n\
        <|im_start|>user\nThanks.<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(text, system.clone() + talk);
    // The calls of the history are there without the tools too, and a system message stays.
    assert!(prompt(&template, &messages, None).ends_with(talk));
    let mut with_system = messages.as_array().unwrap().clone();
    with_system.insert(0, json!({"role": "system", "content": "Be brief."}));
    let text = prompt(&template, &with_system.into(), Some(&tools));
    assert!(text.starts_with("<|im_start|>system\nBe brief.\n\nYou can call"), "{text}");
    // Without a template the lines say it.
    let text = prompt(&ChatTemplate::plain().unwrap(), &messages, Some(&tools));
    assert!(text.contains(&tool) && text.contains("21 degrees"), "{text}");
}

#[test]
fn p_tools_dropped_no_more_by_any_published_template() {
    let (messages, tools) = called();
    for name in names() {
        let template = published(&name);
        let without = prompt(&template, &json!([messages[0]]), None);
        let with = prompt(&template, &json!([messages[0]]), Some(&tools));
        assert!(!without.contains("get_weather") && with.contains("get_weather"), "{name}: {with}");
        for tools in [None, Some(&tools)] {
            let text = prompt(&template, &messages, tools);
            for part in ["get_weather", "city", "Rome", "21 degrees", "It is warm.", "Thanks."] {
                assert!(text.contains(part), "{name}: {part} is not in {text}");
            }
            assert!(!text.contains("{'city'"), "{name}: {text}");
        }
    }
}

#[test]
fn a_template_without_a_system_message_is_told_of_tools_by_the_user() {
    let source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\
        <{{ m.role }}>{{ m.content }}{% endfor %}";
    let (_, tools) = called();
    let text = prompt(&template(source), &json!([{"role": "user", "content": "Hi"}]), Some(&tools));
    assert!(
        text.starts_with("<user>You can call") && text.ends_with("</tool_call>\n\nHi"),
        "{text}"
    );
}

#[test]
fn arguments_are_texts_for_a_template_that_adds_them() {
    let source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}\
        {{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}";
    let (messages, _) = called();
    let text = prompt(&template(source), &json!([messages[0], messages[1]]), None);
    assert_eq!(text, "Weather in Rome?get_weather{\"city\":\"Rome\"}");
}

#[test]
fn p_assistant_null_content_reaches_any_template() {
    let user = json!({"role": "user", "content": "Hi"});
    for name in names() {
        let template = published(&name);
        for message in [
            json!({"role": "assistant", "content": null}),
            json!({"role": "assistant"}),
            json!({"role": "assistant", "content": null, "reasoning_content": "hm"}),
            json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot"}]}),
            json!({"role": "assistant", "content": null, "refusal": "I cannot"}),
            json!({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ok"}]}),
            json!({"role": "assistant", "content": null, "audio": {"id": "a"}, "tool_calls": []}),
        ] {
            let text = prompt(&template, &json!([user, message, user]), None);
            assert!(!text.contains("None"), "{name}: {message}: {text}");
            let refuses = message.to_string().contains("cannot");
            assert_eq!(text.contains("I cannot"), refuses, "{name}: {message}: {text}");
        }
    }
    // A key is absent, as transformers has it, and a text where the template needs one.
    let shows = template("{% for m in messages %}{{ m.content is defined }}{% endfor %}");
    assert_eq!(prompt(&shows, &json!([{"role": "assistant", "content": null}]), None), "False");
    let adds = template("{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}");
    assert_eq!(prompt(&adds, &json!([{"role": "assistant", "content": null}]), None), "<>");
}

#[test]
fn a_malformed_call_of_the_history_is_passed_on() {
    for name in names() {
        let template = published(&name);
        for arguments in ["{\"city\": \"Ro", "[]", "null", "Rome"] {
            let (mut messages, tools) = called();
            messages[1]["tool_calls"][0]["function"]["arguments"] = arguments.into();
            let text = prompt(&template, &messages, Some(&tools));
            assert!(text.contains("21 degrees"), "{name}: {text}");
            if arguments.starts_with('{') {
                assert!(text.contains("Ro"), "{name}: {text}");
            }
        }
    }
}

#[test]
fn reasoning_of_the_history_reaches_a_template_that_reads_it() {
    let source = "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}\
        {{ m.content }}{% endfor %}";
    for name in ["reasoning_content", "reasoning", "thinking"] {
        let mut message = json!({"role": "assistant", "content": "4"});
        message[name] = "2 + 2".into();
        assert_eq!(prompt(&template(source), &json!([message]), None), "<think>2 + 2</think>4");
    }
}

#[test]
fn p_tune_tool_arguments_are_learned_as_the_server_writes_them() {
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-tokenizer.json");
    let tokenizer = Tokenizer::from_file(tokenizer).unwrap();
    let config = include_str!("../data/people/tune-tool-arguments/tokenizer_config.json");
    let published = fixtures().join("HuggingFaceTB-SmolLM2-135M-Instruct.jinja");
    let sources = [
        of_config(config),
        Source::new("t", fs::read_to_string(published).unwrap(), SpecialTokens::default()),
    ];
    for source in sources {
        let encoder = Encoder::new(&tokenizer, 2).unwrap();
        let encoder = encoder.with_chat(&source, Options::default()).unwrap();
        let learned = |line: &str| {
            let line: Value = serde_json::from_str(line).unwrap();
            let messages = line["messages"].as_array().unwrap().clone();
            let tools = line["tools"].as_array().cloned();
            let content = Content::Messages {
                messages: messages.clone(),
                given: 0,
                tools: tools.clone(),
                kwargs: Map::new(),
            };
            let ids = encoder.encode(&content).unwrap().ids;
            // What is asked for these messages.
            let options = Options { tools, now: Some(UNIX_EPOCH), ..Options::default() };
            let messages = normalized(&messages).unwrap();
            let asked = source.compile().unwrap().encode(&tokenizer, &messages, &options).unwrap();
            assert_eq!(ids, asked);
            tokenizer.decode(&ids, false).unwrap()
        };
        let object = learned(include_str!("../data/people/tune-tool-arguments/t_obj.jsonl"));
        assert!(object.contains("{\"name\": \"f\", \"arguments\": {\"a\""), "{object}");
        assert!(!object.contains("\\\""), "{object}");
        for line in [
            include_str!("../data/people/tune-tool-arguments/t_str.jsonl"),
            include_str!("../data/people/tune-tool-arguments/t_null.jsonl"),
        ] {
            assert_eq!(learned(line), object);
        }
        let parts = learned(include_str!("../data/people/tune-tool-arguments/t_parts.jsonl"));
        assert!(parts.contains("yes") && !parts.contains("'type'"), "{parts}");
    }
}

#[test]
fn p_template_concat_quadratic_takes_time_as_its_length() {
    for (source, len) in [
        (format!("{{{{ 1{} }}}}", "~1".repeat(32_000)), 32_001),
        (format!("{{{{ \"a\"{} }}}}", "+\"a\"".repeat(32_000)), 32_001),
        (format!("{{{{ ('a' * 60){} }}}}", "~'b'".repeat(60_000)), 60_060),
    ] {
        let start = Instant::now();
        let text = template(&source).render(&[], &Options::default()).unwrap();
        assert_eq!(text.len(), len);
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    }
}

/// Templates whose work grows faster than they do.
fn growing() -> Vec<String> {
    let lists = "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(28) %}{% set n.a = [n.a, n.a] %}\
        {% set n.b = [n.b, n.b] %}{% endfor %}";
    let long = "{% set x = 'a' * 8000000 %}{% for i in range(99999) %}";
    let mut all: Vec<String> = [
        "(n.a ~ '') | length",
        "n.a == n.b",
        "n.a < n.b",
        "n.a in [n.b]",
        "[n.a, n.b] | sort | length",
        "[n.a, n.b] | max | length",
        "n.a | tojson | length",
        "n.a | string | length",
        "[n.a] | join | length",
        "'%s' % n.a",
        "'%r' | format(n.a)",
        "'{}'.format(n.a)",
        "[n.a].index(n.b)",
        "[n.a].count(n.b)",
        "n.a is eq n.b",
        "[n.a] | select('eq', n.b) | list",
    ]
    .map(|value| format!("{lists}{{{{ {value} }}}}"))
    .to_vec();
    all.extend(
        [
            "x[5:6]",
            "x[::-1]",
            "x[7999999]",
            "x | length",
            "x | upper",
            "'b' in x",
            "x.find('b')",
            "x.split('a', 3)",
            "x == x ~ ''",
            "x is lower",
            "x | int",
            "x % ()",
            "x.format()",
            "x.count('b')",
            "x | wordcount",
            "x.strip('a')",
            "x.replace('b', '')",
            "x.startswith('b')",
            "x | trim",
            "{x: 1}[x]",
            "x.isalpha()",
            "x | e",
            "x.splitlines()",
        ]
        .map(|value| format!("{long}{{% set y = {value} %}}{{% endfor %}}")),
    );
    all.push(
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else 'x' }}{% endmacro %}{{ f(40) }}".into(),
    );
    all.push(
        "{% set n = namespace(l=[1]) %}{% for i in range(40) %}{% set n.l = n.l + n.l %}{% endfor %}".into(),
    );
    all.push(
        "{% set n = namespace(t=(1, 2)) %}{% for i in range(40) %}{% set n.t = (n.t, n.t) %}{% endfor %}{{ {n.t: 1} }}".into(),
    );
    all.push(
        "{% set l = range(99999) | list %}{% for i in range(99999) %}{{ 99998 in l }}{% endfor %}"
            .into(),
    );
    all.push("{% for i in range(99999) %}{% set l = range(99999) | sort %}{% endfor %}".into());
    all
}

#[test]
fn p_template_tilde_nested_list_and_all_work_that_grows_is_counted() {
    for source in growing() {
        let start = Instant::now();
        let error = template(&source).render(&[], &Options::default()).expect_err(&source);
        assert!(
            error.to_string().contains("steps") || error.to_string().contains("bytes"),
            "{source}: {error}"
        );
        assert!(start.elapsed() < Duration::from_secs(5), "{source}: {:?}", start.elapsed());
    }
}
