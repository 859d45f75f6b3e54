//! Calls of tools: the formats of published templates, found in answers however these are cut, and forced.

use std::fs;
use std::path::{Path, PathBuf};

use boostr::chat::tools::{Call, Calls, MAX_CALLS, Piece, Tool, ToolChoice, ToolFormat};
use boostr::chat::{ChatTemplate, Options, Source};
use boostr::generation_config::SpecialTokens;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::constrained::{Setting, valid};

/// Longest text between `[TOOL_CALLS]` and `[ARGS]`, in bytes.
const MAX_HEAD: usize = 200;

const FORMATS: [ToolFormat; 9] = [
    ToolFormat::Hermes,
    ToolFormat::Functions,
    ToolFormat::Nemotron,
    ToolFormat::Mistral,
    ToolFormat::MistralArgs { with_id: false },
    ToolFormat::MistralArgs { with_id: true },
    ToolFormat::Llama,
    ToolFormat::Kimi,
    ToolFormat::KimiTags,
];

fn templates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/templates")
}

fn source(name: &str) -> Source {
    let path = templates().join(format!("{name}.jinja"));
    let text = fs::read_to_string(&path).unwrap();
    let golden: Value =
        serde_json::from_str(&fs::read_to_string(path.with_extension("json")).unwrap()).unwrap();
    let special = SpecialTokens::from_json(&path, &golden["special"].to_string()).unwrap();
    Source::new(path, text, special)
}

/// `weather` and `sum` of the fixtures, and `now` without arguments.
fn offered() -> Vec<Value> {
    let all: Value =
        serde_json::from_str(&fs::read_to_string(templates().join("tools.json")).unwrap()).unwrap();
    let mut tools = all["weather and sum"].as_array().unwrap().clone();
    tools
        .push(json!({"type": "function", "function": {"name": "now", "description": "The time."}}));
    tools
}

fn tools() -> Vec<Tool> {
    Tool::read_all(&offered()).unwrap()
}

/// All pieces of an answer, texts that follow each other joined.
fn pieces<'a>(format: ToolFormat, parts: impl IntoIterator<Item = &'a str>) -> Vec<Piece> {
    let mut calls = Calls::new(format, tools());
    let mut all: Vec<Piece> = Vec::new();
    let mut take = |new: Vec<Piece>| {
        for piece in new {
            match (all.last_mut(), piece) {
                (_, Piece::Text(text)) if text.is_empty() => panic!("an empty text"),
                (Some(Piece::Text(before)), Piece::Text(text)) => before.push_str(&text),
                (_, piece) => all.push(piece),
            }
        }
    };
    for part in parts {
        take(calls.push(part));
    }
    take(calls.finish());
    all
}

fn text(text: &str) -> Piece {
    Piece::Text(text.to_owned())
}

fn call(name: &str, arguments: &Value) -> Piece {
    Piece::Call(Call { id: None, name: name.to_owned(), arguments: arguments.to_string() })
}

#[test]
fn the_format_of_each_published_template_is_known_or_none() {
    let expected = [
        ("GLM-4.6", None),
        ("HuggingFaceTB-SmolLM2-135M-Instruct", None),
        ("HuggingFaceTB-SmolLM3-3B", None),
        ("LFM2-8B-A1B", None),
        ("LFM2.5-8B-A1B", None),
        ("LFM2.5-Instruct", None),
        ("Mistral-Small-3.2-24B-Instruct-2506", Some(ToolFormat::MistralArgs { with_id: true })),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", Some(ToolFormat::Functions)),
        ("NVIDIA-Nemotron-Nano-v2", Some(ToolFormat::Nemotron)),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", Some(ToolFormat::Hermes)),
        ("Qwen-Qwen2.5-7B-Instruct", Some(ToolFormat::Hermes)),
        ("Qwen-Qwen3-0.6B", Some(ToolFormat::Hermes)),
        ("Qwen-Qwen3-Coder", Some(ToolFormat::Functions)),
        ("Qwen-Qwen3.5-4B", Some(ToolFormat::Functions)),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", None),
        ("deepseek-ai-DeepSeek-V3.1", None),
        ("google-gemma-2-2b-it", None),
        ("ibm-granite-granite-3.3-2B-Instruct", None),
        ("ibm-granite-granite-4.0", Some(ToolFormat::Hermes)),
        ("meta-llama-Llama-3.1-8B-Instruct", Some(ToolFormat::Llama)),
        ("meta-llama-Llama-3.2-3B-Instruct", Some(ToolFormat::Llama)),
        ("microsoft-Phi-3.5-mini-instruct", None),
        ("mistralai-Mistral-Nemo-Instruct-2407", Some(ToolFormat::Mistral)),
        ("moonshotai-Kimi-K2", Some(ToolFormat::Kimi)),
        ("moonshotai-Kimi-K2-Instruct", Some(ToolFormat::Kimi)),
        ("moonshotai-Kimi-K2-Thinking", Some(ToolFormat::Kimi)),
        ("moonshotai-Kimi-K3", Some(ToolFormat::KimiTags)),
        ("openai-gpt-oss-120b", None),
    ];
    for (name, format) in expected {
        assert_eq!(ToolFormat::detect(&source(name)), format, "{name}");
    }
    let count = fs::read_dir(templates())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().path().extension().is_some_and(|e| e == "jinja"))
        .count();
    assert_eq!(count, expected.len());
}

#[test]
fn with_several_templates_the_one_for_tools_tells_the_format() {
    let qwen = source("Qwen-Qwen2.5-7B-Instruct").templates.remove(0).1;
    let mut source = Source::new("t", "{{ messages }}", SpecialTokens::default());
    assert_eq!(ToolFormat::detect(&source), None);
    source.templates.push(("tool_use".to_owned(), qwen));
    assert_eq!(ToolFormat::detect(&source), Some(ToolFormat::Hermes));
}

/// What templates write for an assistant's calls is read back as these calls.
#[test]
fn calls_that_a_template_writes_are_read_back() {
    let weather = json!({"city": "Łódź \"PL\" </tool_call> [1, {", "units": "celsius", "days": 3});
    let sum = json!({"of": [1, 2.5, -3]});
    let calls = |all: &[(&str, &Value)]| -> Vec<Value> {
        all.iter()
            .zip(1..)
            .map(|((name, arguments), n)| {
                json!({"id": format!("callid00{n}"), "type": "function",
                    "function": {"name": name, "arguments": arguments}})
            })
            .collect()
    };
    let mut read = 0;
    for entry in fs::read_dir(templates()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "jinja") {
            continue;
        }
        let source = source(path.file_stem().unwrap().to_str().unwrap());
        let Some(format) = ToolFormat::detect(&source) else { continue };
        let template: ChatTemplate = source.compile().unwrap();
        let options = Options {
            tools: Some(offered()[..2].to_vec()),
            kwargs: json!({"enable_thinking": false}).as_object().unwrap().clone(),
            ..Options::default()
        };
        let mut all = vec![("weather", &weather), ("sum", &sum)];
        if format == ToolFormat::Llama {
            all.truncate(1); // its template refuses more
        }
        if format == ToolFormat::Functions {
            all[0] = ("sum", &sum); // a text in tags may not hold the closing one
        }
        let messages = [
            json!({"role": "user", "content": "The question."}),
            json!({"role": "assistant", "content": "", "tool_calls": calls(&all)}),
        ];
        let whole = template.render(&messages, &options).unwrap();
        let answer = whole.rsplit_once("The question.").unwrap().1;
        let answer = match format {
            ToolFormat::Llama => answer.rsplit_once("<|end_header_id|>\n\n").unwrap().1,
            _ => answer,
        };
        let found: Vec<(String, Value)> = pieces(format, [answer])
            .into_iter()
            .filter_map(|piece| match piece {
                Piece::Call(call) => {
                    Some((call.name, serde_json::from_str(&call.arguments).unwrap()))
                }
                Piece::Text(text) => {
                    assert!(!text.contains("arguments") && !text.contains("city"), "{text}");
                    None
                }
            })
            .collect();
        let expected: Vec<(String, Value)> =
            all.iter().map(|&(name, arguments)| (name.to_owned(), arguments.clone())).collect();
        assert_eq!(found, expected, "{}: {answer}", path.display());
        read += 1;
    }
    assert!(read >= 12, "{read} templates");
}

#[test]
fn calls_are_told_from_text() {
    let sum = json!({"of": [1]});
    let now = json!({});
    for (format, answer, expected) in [
        (ToolFormat::Hermes, "No call.", vec![text("No call.")]),
        (ToolFormat::Hermes, "", vec![]),
        (ToolFormat::Hermes, " \n", vec![text(" \n")]),
        (
            ToolFormat::Hermes,
            "I add.\n\n<tool_call>\n{\"name\": \"sum\", \"arguments\": {\"of\": [1]}}\n</tool_call>\n\
             <tool_call>{\"name\":\"now\",\"arguments\":{}}</tool_call>\nDone. ",
            vec![text("I add."), call("sum", &sum), call("now", &now), text("Done. ")],
        ),
        // The closing marker may be missing, arguments may be a text or missing.
        (
            ToolFormat::Hermes,
            "<tool_call>{\"name\": \"sum\", \"arguments\": \"{\\\"of\\\": [1]}\"}",
            vec![call("sum", &sum)],
        ),
        (
            ToolFormat::Hermes,
            "<tool_call>{\"name\": \"now\"}<tool_call>{\"name\": \"sum\", \"arguments\": {\"of\": [1]}}",
            vec![call("now", &now), call("sum", &sum)],
        ),
        (
            ToolFormat::Functions,
            "Yes.\n<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n",
            vec![text("Yes."), call("weather", &json!({"city": "12", "days": 3}))],
        ),
        (
            ToolFormat::Functions,
            "<tool_call><function=weather><parameter=city>\ntwo\nlines\n</parameter></function></tool_call>",
            vec![call("weather", &json!({"city": "two\nlines"}))],
        ),
        (
            ToolFormat::Functions,
            "<tool_call><function=weather><parameter=city>a</function></tool_call>b</parameter></function></tool_call>",
            vec![call("weather", &json!({"city": "a</function></tool_call>b"}))],
        ),
        (ToolFormat::Functions, "<tool_call><function=now></function>", vec![call("now", &now)]),
        (
            ToolFormat::Nemotron,
            "<TOOLCALL>[{\"name\": \"sum\", \"arguments\": {\"of\": [1]}}, {\"name\": \"now\", \"arguments\": {}}]</TOOLCALL>",
            vec![call("sum", &sum), call("now", &now)],
        ),
        (
            ToolFormat::Mistral,
            "[TOOL_CALLS] [{\"name\": \"sum\", \"arguments\": {\"of\": [1]}}]",
            vec![call("sum", &sum)],
        ),
        (
            ToolFormat::MistralArgs { with_id: false },
            "[TOOL_CALLS]sum[ARGS]{\"of\": [1]}[TOOL_CALLS]now[ARGS]{}",
            vec![call("sum", &sum), call("now", &now)],
        ),
        (
            ToolFormat::Llama,
            "\n{\"name\": \"sum\", \"parameters\": {\"of\": [1]}}; {\"name\": \"now\", \"parameters\": {}}",
            vec![call("sum", &sum), call("now", &now)],
        ),
        (
            ToolFormat::Llama,
            "<|python_tag|>{\"name\": \"sum\", \"parameters\": {\"of\": [1]}}",
            vec![call("sum", &sum)],
        ),
        (
            ToolFormat::KimiTags,
            "I add.<|open|>tools<|sep|><|open|>call tool=\"sum\" index=\"1\"<|sep|>\
             <|open|>argument key=\"of\" type=\"array\"<|sep|>[1]<|close|>argument<|sep|>\
             <|close|>call<|sep|><|open|>call tool=\"now\" index=\"2\"<|sep|><|close|>call<|sep|>\
             <|close|>tools<|sep|>",
            vec![text("I add."), call("sum", &sum), call("now", &now)],
        ),
        // A number that is a text; an object in place of arguments; an end that is missing.
        (
            ToolFormat::KimiTags,
            "<|open|>tools<|sep|><|open|>call tool=\"weather\" index=\"1\"<|sep|>\
             <|open|>argument key=\"city\" type=\"string\"<|sep|>12<|close|>argument<|sep|>\
             <|open|>argument key=\"a&quot;&amp;b\" type=\"number\"<|sep|>3<|close|>argument<|sep|>\
             <|close|>call<|sep|><|open|>call tool=\"sum\" index=\"2\"<|sep|>\
             <|open|>json type=\"object\"<|sep|>{\"of\": [1]}<|close|>json<|sep|><|close|>call<|sep|>",
            vec![call("weather", &json!({"city": "12", "a\"&b": 3})), call("sum", &sum)],
        ),
    ] {
        assert_eq!(pieces(format, [answer]), expected, "{format:?}: {answer}");
    }
    let kimi = |name: &str, id: &str, arguments: &Value| {
        let Piece::Call(call) = call(name, arguments) else { panic!() };
        Piece::Call(Call { id: Some(id.to_owned()), ..call })
    };
    for (answer, expected) in [
        (
            "I add.<|tool_calls_section_begin|><|tool_call_begin|>functions.sum:0\
             <|tool_call_argument_begin|>{\"of\": [1]}<|tool_call_end|>\n<|tool_call_begin|>functions.now:1\
             <|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|> Done.",
            vec![
                text("I add."),
                kimi("sum", "functions.sum:0", &sum),
                kimi("now", "functions.now:1", &now),
                text("Done."),
            ],
        ),
        // Without a number, without a namespace, without ends.
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>sum<|tool_call_argument_begin|>{\"of\": [1]}\
             <|tool_call_begin|>functions.now:x<|tool_call_argument_begin|>{}",
            vec![
                kimi("sum", "sum", &sum),
                text("<|tool_call_begin|>functions.now:x<|tool_call_argument_begin|>{}"),
            ],
        ),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.sum:3<|tool_call_argument_begin|>{\"of\": [1]}",
            vec![kimi("sum", "functions.sum:3", &sum)],
        ),
    ] {
        assert_eq!(pieces(ToolFormat::Kimi, [answer]), expected, "{answer}");
    }
    let with_id = "[TOOL_CALLS]sum[CALL_ID]abcDEF123[ARGS]{\"of\": [1]}";
    let found = pieces(ToolFormat::MistralArgs { with_id: true }, [with_id]);
    let [Piece::Call(found)] = &found[..] else { panic!("{found:?}") };
    assert_eq!(found.id.as_deref(), Some("abcDEF123"));
}

#[test]
fn malformed_calls_are_the_text_that_they_are() {
    for (format, answer) in [
        (ToolFormat::Hermes, "<tool_call>"),
        (ToolFormat::Hermes, "a <tool_call> b </tool_call> c"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"unknown\", \"arguments\": {}}</tool_call>"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"sum\", \"arguments\": [1]}</tool_call>"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"sum\", \"arguments\": {\"of\": [1"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"sum\" \"arguments\": {}}</tool_call>"),
        (ToolFormat::Hermes, "<tool_call>[]</tool_call>"),
        (ToolFormat::Hermes, "\n<tool_call>}{</tool_call>\n"),
        (ToolFormat::Hermes, "<tool_ca"),
        (ToolFormat::Functions, "<tool_call><function=unknown></function></tool_call>"),
        (
            ToolFormat::Functions,
            "<tool_call><function=sum><parameter=of>[1]</function></tool_call>",
        ),
        (ToolFormat::Functions, "<tool_call><function=sum>text</function></tool_call>"),
        (ToolFormat::Functions, "<tool_call><func"),
        (
            ToolFormat::Nemotron,
            "<TOOLCALL>[{\"name\": \"now\"}, {\"name\": \"unknown\"}]</TOOLCALL>",
        ),
        (ToolFormat::Mistral, "[TOOL_CALLS] are made so"),
        (ToolFormat::Mistral, "[TOOL_CALLS][{\"name\": \"sum\", \"arguments\": 1}]"),
        (ToolFormat::MistralArgs { with_id: false }, "[TOOL_CALLS]unknown[ARGS]{}"),
        (ToolFormat::MistralArgs { with_id: false }, "[TOOL_CALLS]sum[ARGS]text"),
        (ToolFormat::MistralArgs { with_id: false }, "[TOOL_CALLS]sum!"),
        (ToolFormat::Llama, "{\"answer\": 42}"),
        (ToolFormat::Llama, "{\"name\": \"unknown\", \"parameters\": {}}"),
        (ToolFormat::Llama, "It is {\"name\": \"sum\", \"parameters\": {}}"),
        (ToolFormat::Llama, "<|python_tag|>weather.call(city=\"Oslo\")"),
        (ToolFormat::Llama, "<|pyth"),
        (ToolFormat::Kimi, "<|tool_calls_section_begin|>"),
        (ToolFormat::Kimi, "a <|tool_calls_section_begin|><|tool_calls_section_end|> b"),
        (
            ToolFormat::Kimi,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.unknown:0<|tool_call_argument_begin|>{}",
        ),
        (
            ToolFormat::Kimi,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.sum:0<|tool_call_argument_begin|>[1]",
        ),
        (
            ToolFormat::Kimi,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.sum:0<|tool_call_argument_begin|>{\"of",
        ),
        (ToolFormat::Kimi, "<|tool_call_begin|>functions.sum:0<|tool_call_argument_begin|>{}"),
        (ToolFormat::KimiTags, "<|open|>tools<|sep|>x<|close|>tools<|sep|>"),
        (ToolFormat::KimiTags, "<|open|>tools<|sep|><|open|>call tool=\"x\" index=\"1\"<|sep|>"),
        (
            ToolFormat::KimiTags,
            "<|open|>tools<|sep|><|open|>call tool=\"now\" index=\"1\"<|sep|>text<|close|>call<|sep|>",
        ),
        (
            ToolFormat::KimiTags,
            "<|open|>tools<|sep|><|open|>call tool=\"now\" index=\"1\"<|sep|><|open|>argument key=\"",
        ),
    ] {
        assert_eq!(pieces(format, [answer]), [text(answer)], "{format:?}: {answer}");
    }
}

/// What makes up answers that are nearly calls, in each format.
fn fragments() -> Vec<String> {
    [
        "<tool_call>",
        "</tool_call>",
        "<function=now>",
        "<function=sum>",
        "</function>",
        "<parameter=of>",
        "</parameter>",
        "[1, 2]",
        "<TOOLCALL>[",
        "]</TOOLCALL>",
        "[TOOL_CALLS]",
        "[TOOL_CALLS][",
        "]",
        "sum",
        "[ARGS]",
        "[CALL_ID]",
        "{\"of\": [1]}",
        "<|python_tag|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "functions.sum:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        "<|open|>call tool=\"sum\" index=\"1\"<|sep|>",
        "<|close|>call<|sep|>",
        "<|open|>argument key=\"of\" type=\"array\"<|sep|>",
        "<|close|>argument<|sep|>",
        "<|open|>json type=\"object\"<|sep|>",
        "<|close|>json<|sep|>",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        "<|sep|>",
        "<think>",
        "</think>",
        "; ",
        "{\"name\": \"sum\", \"arguments\": {\"of\": [2, \"}\\\"]\"]}}",
        "{\"name\": \"sum\", \"parameters\": {}}",
        "{\"name\": \"x\"}",
        "{",
        "}",
        "\"",
        "\\",
        "\n",
        " ",
        "Łódź 🦙",
        "text",
        "<",
        "[",
        "</",
        "<th",
        "ink>",
        "[CALL_ID]abcdefghi[ARGS]",
        "\0",
        "\u{1b}[31m",
        "\u{b}",
        "\u{85}",
        "\u{2028}",
        "\r\n",
        "\u{fdd0}",
    ]
    .map(str::to_owned)
    .into_iter()
    .chain([180, 190, 197, 200, 210].map(|len| "a".repeat(len)))
    .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4000) })]

    #[test]
    fn how_an_answer_is_cut_makes_no_difference(
        parts in prop::collection::vec(prop::sample::select(fragments()), 0..12),
        cuts in prop::collection::vec(any::<bool>(), 1..20),
        format in prop::sample::select(FORMATS.to_vec()),
    ) {
        let answer = parts.concat();
        let whole = pieces(format, [answer.as_str()]);
        let mut cut = Vec::new();
        let mut start = 0;
        for ((at, _), &here) in answer.char_indices().zip(cuts.iter().cycle()) {
            if here {
                cut.push(&answer[start..at]);
                start = at;
            }
        }
        cut.push(&answer[start..]);
        prop_assert_eq!(&pieces(format, cut), &whole, "{:?}", answer);
        // Without a call the answer comes as it is, and with one no text is made up.
        let texts: Vec<&str> = whole
            .iter()
            .filter_map(|piece| match piece { Piece::Text(text) => Some(text.as_str()), Piece::Call(_) => None })
            .collect();
        if texts.len() == whole.len() {
            prop_assert_eq!(texts.concat(), answer);
        } else {
            let mut rest = answer.as_str();
            for text in texts {
                let at = rest.find(text);
                prop_assert!(at.is_some(), "{:?} is not in {:?}", text, answer);
                rest = &rest[at.unwrap() + text.len()..];
            }
        }
    }
}

#[test]
fn p_tool_call_depends_on_pieces_no_more_whatever_stands_in_a_head() {
    for with_id in [false, true] {
        let format = ToolFormat::MistralArgs { with_id };
        for head in [
            "sum[CALL_ID]abcdefghi",
            "sum[CALL_ID]abcdefghi\0\0",
            "sum\u{1b}",
            "sum\n",
            "sum\u{85}",
            "s\u{e9}m",
        ] {
            let answer = format!("[TOOL_CALLS]{head}[ARGS]{{\"of\":[1]}}");
            let whole = pieces(format, [answer.as_str()]);
            let letters: Vec<String> = answer.chars().map(String::from).collect();
            assert_eq!(pieces(format, letters.iter().map(String::as_str)), whole, "{answer:?}");
            let is_call = matches!(whole[..], [Piece::Call(_)]);
            assert_eq!(is_call, head.chars().all(|c| c.is_ascii_graphic()), "{answer:?}");
        }
        // A head as long as may be, and one byte more.
        for (len, is_text) in [(MAX_HEAD, false), (MAX_HEAD + 1, true)] {
            let name = "sum ".to_owned() + &" ".repeat(len - 4);
            let answer = format!("[TOOL_CALLS]{name}[ARGS]{{}}");
            let whole = pieces(format, [answer.as_str()]);
            let letters: Vec<String> = answer.chars().map(String::from).collect();
            assert_eq!(pieces(format, letters.iter().map(String::as_str)), whole);
            assert_eq!(matches!(whole[..], [Piece::Text(_)]), is_text, "{whole:?}");
        }
    }
}

#[test]
fn what_is_thought_is_no_call_in_any_format() {
    let now = json!({});
    for (format, call_text) in [
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>"),
        (ToolFormat::Functions, "<tool_call><function=now></function></tool_call>"),
        (ToolFormat::Nemotron, "<TOOLCALL>[{\"name\": \"now\", \"arguments\": {}}]</TOOLCALL>"),
        (ToolFormat::Mistral, "[TOOL_CALLS][{\"name\": \"now\", \"arguments\": {}}]"),
        (ToolFormat::MistralArgs { with_id: false }, "[TOOL_CALLS]now[ARGS]{}"),
        (ToolFormat::Llama, "{\"name\": \"now\", \"parameters\": {}}"),
    ] {
        let thought = format!("<think>\n{call_text} or\n<think>{call_text}</think>");
        let answer = format!("{thought}\n\n{call_text}");
        let found = [text(&thought), call("now", &now)];
        assert_eq!(pieces(format, [answer.as_str()]), found, "{format:?}");
        // A letter at a time, and a thought that does not end.
        let letters = answer.split_inclusive(|_| true);
        assert_eq!(pieces(format, letters), found, "{format:?}");
        let endless = format!("<think>{call_text}");
        assert_eq!(pieces(format, [endless.as_str()]), [text(&endless)], "{format:?}");

        // The prompt begins the thought; a message that mentions one does not.
        let after = |prompt: &str| {
            let mut calls = Calls::new(format, tools()).after(prompt);
            let mut all = calls.push(call_text);
            all.extend(calls.finish());
            all
        };
        assert_eq!(after("<assistant>\n<think>\n"), [text(call_text)], "{format:?}");
        assert_eq!(after("What is <think>?\n<assistant>"), [call("now", &now)], "{format:?}");
        assert_eq!(
            after("<assistant>\n<think>\n\n</think>\n\n"),
            [call("now", &now)],
            "{format:?}"
        );
    }
    // A tag in an argument is a part of it.
    let args = json!({"city": "<think>"});
    let answer =
        format!("<tool_call>{}</tool_call>", json!({"name": "weather", "arguments": args}));
    assert_eq!(pieces(ToolFormat::Hermes, [answer.as_str()]), [call("weather", &args)]);
}

#[test]
fn many_thoughts_or_calls_at_once_take_time_that_is_linear() {
    let start = std::time::Instant::now();
    let thoughts = "<think></think>".repeat(100_000);
    assert_eq!(pieces(ToolFormat::Hermes, [thoughts.as_str()]), [text(&thoughts)]);
    let calls = "<tool_call>{\"name\": \"now\"}</tool_call>".repeat(50_000);
    assert_eq!(pieces(ToolFormat::Hermes, [calls.as_str()]).len(), 50_000);
    // Quadratic time took 50 seconds.
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}

#[test]
fn any_answer_takes_linear_time_letter_by_letter() {
    let start = std::time::Instant::now();
    let call = "<tool_call>{\"name\": \"now\"}";
    let function = "<tool_call><function=weather>";
    let args = ToolFormat::MistralArgs { with_id: false };
    for (format, before, unit) in [
        // White space that may stand in front of a call, in it, or behind it.
        (ToolFormat::Hermes, "", "\n"),
        (ToolFormat::Llama, "", " "),
        (ToolFormat::Hermes, "<tool_call>", "\n"),
        (ToolFormat::Hermes, call, "\n"),
        (ToolFormat::Nemotron, "<TOOLCALL>[{\"name\": \"now\"}]", "\n"),
        (args, "[TOOL_CALLS]now[ARGS]", "\n"),
        (ToolFormat::Functions, function, "\n"),
        // What may be a call at each marker, and is none.
        (ToolFormat::Hermes, "", "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \""),
        (ToolFormat::Hermes, "", "<tool_call>{"),
        (ToolFormat::Kimi, "", "<|tool_calls_section_begin|>\n"),
        (
            ToolFormat::Kimi,
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>now<|tool_call_argument_begin|>{}",
        ),
        (ToolFormat::Kimi, "<|tool_calls_section_begin|><|tool_call_begin|>", "a"),
        (
            ToolFormat::KimiTags,
            "<|open|>tools<|sep|><|open|>call tool=\"now\"<|sep|>",
            "<|close|>call<|",
        ),
        (ToolFormat::KimiTags, "", "<|open|>tools<|sep|><|open|>call tool=\"now\"<|sep|>"),
        (ToolFormat::Functions, "", "<tool_call><function=weather><parameter=city>"),
        (ToolFormat::Functions, function, "<parameter=city></function></parameter>"),
        (ToolFormat::Functions, "<tool_call><function=", "a"),
    ] {
        let answer = format!("{before}{}", unit.repeat((1 << 17) / unit.len()));
        let letters = answer.char_indices().map(|(at, c)| &answer[at..at + c.len_utf8()]);
        assert_eq!(pieces(format, letters), pieces(format, [answer.as_str()]), "{format:?} {unit}");
    }
    // Quadratic time took minutes.
    assert!(start.elapsed().as_secs() < 30, "{:?}", start.elapsed());
}

#[test]
fn nothing_of_a_call_is_given_before_it_is_whole() {
    for (format, before, marked) in [
        (
            ToolFormat::Hermes,
            "See:",
            "\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
        ),
        (ToolFormat::Functions, "See:", " <tool_call>\n<function=now>\n</function>\n</tool_call>"),
        (
            ToolFormat::Nemotron,
            "See:",
            "<TOOLCALL>[{\"name\": \"now\", \"arguments\": {}}]</TOOLCALL>",
        ),
        (ToolFormat::Mistral, "See:", "[TOOL_CALLS][{\"name\": \"now\", \"arguments\": {}}]"),
        (ToolFormat::MistralArgs { with_id: false }, "See:", "[TOOL_CALLS]now[ARGS]{}"),
        (ToolFormat::Llama, "", "<|python_tag|>{\"name\": \"now\", \"parameters\": {}}"),
        (
            ToolFormat::Kimi,
            "See:",
            " <|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}\
             <|tool_call_end|><|tool_calls_section_end|>",
        ),
        (
            ToolFormat::KimiTags,
            "See:",
            "<|open|>tools<|sep|><|open|>call tool=\"now\" index=\"1\"<|sep|><|close|>call<|sep|>\
             <|close|>tools<|sep|>",
        ),
    ] {
        let mut calls = Calls::new(format, tools());
        let mut given = Vec::new();
        for character in format!("{before}{marked}").chars() {
            given.extend(calls.push(character.encode_utf8(&mut [0; 4])));
        }
        let texts: String = given
            .iter()
            .map(|piece| match piece {
                Piece::Text(text) => text.as_str(),
                Piece::Call(_) => "!",
            })
            .collect();
        assert_eq!(texts, format!("{before}!"), "{format:?}");
        assert_eq!(calls.finish(), []);
    }
}

#[test]
fn text_that_cannot_become_a_call_is_given_at_once() {
    let mut calls = Calls::new(ToolFormat::Hermes, tools());
    for word in ["One", " two", " three <b", "old>", " 1 < 2"] {
        assert_eq!(calls.push(word), [text(word)], "{word}");
    }
    assert_eq!(calls.push(" <tool_"), []);
    assert_eq!(calls.push("box>"), [text(" <tool_box>")]);
    let mut calls = Calls::new(ToolFormat::Llama, tools());
    assert_eq!(calls.push("Yes"), [text("Yes")]);
    assert_eq!(calls.push(" {\"a\""), [text(" {\"a\"")]);
}

#[test]
fn a_long_call_takes_linear_time() {
    for format in [ToolFormat::Hermes, ToolFormat::Functions, ToolFormat::Mistral] {
        let start = std::time::Instant::now();
        let mut calls = Calls::new(format, tools());
        let open = match format {
            ToolFormat::Functions => "<tool_call><function=weather><parameter=city>",
            ToolFormat::Mistral => {
                "[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"city\": \""
            }
            _ => "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"",
        };
        calls.push(open);
        for _ in 0..200_000 {
            assert_eq!(calls.push("}]<"), []);
        }
        assert!(start.elapsed().as_secs() < 5, "{format:?}: {:?}", start.elapsed());
    }
}

/// Whatever is sampled under the grammar is a call, and nothing else, with arguments that validate.
#[test]
fn a_forced_call_is_a_call_whatever_is_sampled() {
    for name in ["qwen2", "mistral-v3"] {
        let setting = Setting::new(name);
        for format in FORMATS {
            for choice in [ToolChoice::Required, ToolChoice::Function("weather".to_owned())] {
                let grammar = format
                    .grammar(&tools(), &choice, MAX_CALLS, &setting.tokenizer)
                    .unwrap()
                    .unwrap();
                let constraint = setting.constraint(&grammar);
                for seed in 0..12 {
                    let wish = match format {
                        ToolFormat::Functions => "</parameter>\n</function>",
                        ToolFormat::KimiTags => "<|close|>argument<|sep|><|close|>call<|sep|>",
                        _ => "",
                    };
                    let ids = setting.sampled_towards(&mut *constraint.fork(), seed, wish);
                    let answer = setting.tokenizer.decode(&ids, false).unwrap();
                    // The prompt opens the response, and the calls stand behind it.
                    let calls = match format {
                        ToolFormat::KimiTags => {
                            answer.strip_prefix("<|close|>response<|sep|>").unwrap()
                        }
                        _ => &answer,
                    };
                    let found = pieces(format, [calls]);
                    assert!((1..=8).contains(&found.len()), "{name}, {format:?}: {answer}");
                    for piece in &found {
                        let Piece::Call(call) = piece else {
                            panic!("{name}, {format:?}: {piece:?} in {answer}")
                        };
                        let all = tools();
                        let tool = all.iter().find(|tool| tool.name == call.name).unwrap();
                        let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
                        let mut schema = tool.parameters.clone();
                        let city = &mut schema["properties"]["city"];
                        if city.is_object() {
                            *city = json!({"type": "string"});
                        }
                        if let Some(units) = schema["properties"].get_mut("units") {
                            *units = json!({"enum": ["celsius", "fahrenheit"]});
                        }
                        assert!(valid(&schema, &schema, &arguments), "{format:?}: {answer}");
                        let has_id = match format {
                            ToolFormat::MistralArgs { with_id: true } => |id: &str| id.len() == 9,
                            ToolFormat::Kimi => |id: &str| id.starts_with("functions."),
                            _ => |_: &str| false,
                        };
                        let with_id = [ToolFormat::MistralArgs { with_id: true }, ToolFormat::Kimi];
                        assert_eq!(
                            call.id.as_deref().is_some_and(has_id),
                            with_id.contains(&format)
                        );
                    }
                    if choice != ToolChoice::Required {
                        assert!(
                            matches!(&found[..], [Piece::Call(call)] if call.name == "weather")
                        );
                    }
                }
            }
        }
    }
}

/// Where the marker is a control token of the tokenizer, that token is forced, not its letters.
#[test]
fn a_forced_call_begins_with_the_control_token_of_its_marker() {
    let setting = Setting::new("mistral-v3");
    let grammar = ToolFormat::Mistral
        .grammar(&tools(), &ToolChoice::Required, MAX_CALLS, &setting.tokenizer)
        .unwrap()
        .unwrap();
    let mut constraint = setting.constraint(&grammar);
    let marker = setting.tokenizer.id("[TOOL_CALLS]").unwrap();
    assert_eq!(constraint.allowed().unwrap().iter().collect::<Vec<_>>(), [marker]);
}

#[test]
fn a_free_model_needs_no_grammar_and_an_impossible_choice_is_refused() {
    let tokenizer = crate::constrained::tokenizer("qwen2").0;
    for choice in [ToolChoice::Auto, ToolChoice::None] {
        assert_eq!(
            ToolFormat::Hermes.grammar(&tools(), &choice, MAX_CALLS, &tokenizer).unwrap(),
            None
        );
    }
    let unknown = ToolChoice::Function("unknown\n".to_owned());
    let error = ToolFormat::Hermes.grammar(&tools(), &unknown, MAX_CALLS, &tokenizer).unwrap_err();
    assert_eq!(
        error.to_string(),
        "argument `tool_choice`: there is no tool with the name `unknown\\n`"
    );
    let error =
        ToolFormat::Hermes.grammar(&[], &ToolChoice::Required, MAX_CALLS, &tokenizer).unwrap_err();
    assert!(error.to_string().contains("there are no tools"), "{error}");
    for value in [
        json!("any"),
        json!({"type": "function"}),
        json!(1),
        json!({"type": "x", "function": {"name": "sum"}}),
    ] {
        let error = ToolChoice::read(&value).unwrap_err().to_string();
        assert!(error.starts_with("argument `tool_choice`: expected `auto`, `none`"), "{error}");
    }
}

#[test]
fn tools_that_are_none_are_refused_by_number() {
    let function = |function: Value| json!({"type": "function", "function": function});
    for (tool, expected) in [
        (json!("text"), "expected type `function`"),
        (json!({"type": "retrieval"}), "expected type `function`"),
        (function(json!({})), "expected a text as name"),
        (function(json!({"name": ""})), "a name of 1 to 64 letters"),
        (function(json!({"name": "a b"})), "found `a b`"),
        (function(json!({"name": "x".repeat(65)})), "a name of 1 to 64 letters"),
        (function(json!({"name": "f", "parameters": []})), "parameters of `f`"),
        (function(json!({"name": "ok"})), "another tool with the name `ok`"),
    ] {
        let error =
            Tool::read_all(&[function(json!({"name": "ok"})), tool]).unwrap_err().to_string();
        assert!(
            error.starts_with("argument `tools`: tool 1: ") && error.contains(expected),
            "{error}"
        );
    }
}

#[test]
fn ids_of_calls_differ_and_have_the_form_of_the_family() {
    let ids: std::collections::HashSet<String> =
        (0..5000).map(|n| ToolFormat::Mistral.call_id(n * 977)).collect();
    assert_eq!(ids.len(), 5000);
    for id in ids {
        assert!(id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()), "{id}");
    }
    assert_eq!(ToolFormat::Llama.call_id(u64::MAX).len(), "call_".len() + 9);
}
