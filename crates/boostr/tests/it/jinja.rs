//! Jinja as jinja2 runs it: expressions and statements of templates, with Python's results.
//!
//! `tests/data/jinja.jsonl` is made by `scripts/jinja_goldens.py`.

use boostr::chat::{ChatTemplate, Options};
use boostr::generation_config::SpecialTokens;
use serde_json::{Value, json};

fn render(template: &str, request: &Value) -> Result<String, String> {
    let template = ChatTemplate::new("t", template, &SpecialTokens::default());
    let template = template.map_err(|error| error.to_string())?;
    let options = Options { tools: request["tools"].as_array().cloned(), ..Options::default() };
    let messages = request["messages"].as_array().unwrap();
    template.render(messages, &options).map_err(|error| error.to_string())
}

/// The lines of a file with the template and what jinja2 makes of it; `null` where it fails.
fn check(lines: &str, request: &Value) {
    let mut differ = Vec::new();
    let mut count = 0;
    for line in lines.lines().filter(|line| !line.is_empty()) {
        let case: Value = serde_json::from_str(line).unwrap();
        let source = case["template"].as_str().unwrap();
        let got = render(source, request);
        count += 1;
        let is_same = match &case["jinja2"] {
            Value::String(want) => got.as_ref() == Ok(want),
            _ => got.is_err(),
        };
        if !is_same {
            differ.push(format!("{source}\n  got  {got:?}\n  want {}", case["jinja2"]));
        }
    }
    assert!(differ.is_empty(), "{} of {count}:\n{}", differ.len(), differ.join("\n"));
    assert!(count > 0);
}

#[test]
fn templates_give_what_jinja2_gives() {
    let request = json!({
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi <b>\"é😀\n"},
            {"role": "assistant", "content": "ok", "tool_calls": [{"id": "abc123456", "type": "function",
                "function": {"name": "f", "arguments": {"x": 1, "y": [1.0, null, true], "items": "q"}}}]},
            {"role": "tool", "content": "42", "tool_call_id": "abc123456"},
            {"role": "user", "content": "Bye"},
        ],
        "tools": [{"type": "function", "function": {"name": "get", "description": "Temp > 10 & 'x'",
            "parameters": {"type": "object", "properties": {
                "items": {"type": "array", "items": {"type": "string"}}, "keys": {"type": "string"},
                "values": {"type": "number"}, "get": {"type": ["string", "null"]},
            }, "required": ["items"]}}}],
    });
    check(include_str!("../data/jinja.jsonl"), &request);
}

#[test]
fn p_template_python_arguments_are_bound_as_in_python() {
    let request = include_str!("../data/people/template-python-arguments/request.json");
    let cases = include_str!("../data/people/template-python-arguments/cases.jsonl");
    check(cases, &serde_json::from_str(request).unwrap());
}
