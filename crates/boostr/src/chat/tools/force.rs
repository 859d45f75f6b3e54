//! A grammar of which every text is a call.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{Tool, ToolChoice, ToolFormat};
use crate::error::{Error, Result};
use crate::grammar::{Grammar, json_rule};
use crate::tokenizer::Tokenizer;

/// Most calls of one answer, so that a model that likes to call ends.
pub const MAX_CALLS: usize = 8;

/// Behind each value of [`ToolFormat::Functions`].
const PARAMETER_END: &str = "\n</parameter>\n";
const END_OF_PARAMETER: End = End::Text(PARAMETER_END);

impl ToolFormat {
    /// The grammar of calls that a choice asks for; `None` where the model is free.
    ///
    /// Arguments follow the schema of their tool; where it does not say, there are no others than those that it names.
    /// In the format [`Functions`](Self::Functions) an argument of type `string` is any text, or one of `enum`. At most
    /// `most` calls are made at once, of up to [`MAX_CALLS`], and one where the family knows no more.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if there is no tool to call, or its schema is too large for a [`Grammar`].
    pub fn grammar(
        self,
        tools: &[Tool],
        choice: &ToolChoice,
        most: usize,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Grammar>> {
        let (tools, most): (Vec<&Tool>, _) = match choice {
            ToolChoice::Auto | ToolChoice::None => return Ok(None),
            ToolChoice::Required => (tools.iter().collect(), most.clamp(1, MAX_CALLS)),
            ToolChoice::Function(name) => {
                (tools.iter().filter(|tool| tool.name == *name).collect(), 1)
            }
        };
        if tools.is_empty() {
            let reason = match choice {
                ToolChoice::Function(name) => {
                    let shown: String = name.escape_debug().take(100).collect();
                    format!("there is no tool with the name `{shown}`")
                }
                _ => "a call is required, but there are no tools".to_owned(),
            };
            return Err(Error::Argument { name: "tool_choice", reason });
        }
        let marker = |name: &str| match tokenizer.id(name) {
            Some(id) if tokenizer.is_special(id) => format!("<[{id}]>"),
            _ => text(name),
        };
        let all: Vec<String> = (0..tools.len()).map(|index| format!("call_{index}")).collect();
        let mut rules = match self {
            Self::Hermes | Self::Functions => {
                repeated("one", &text("\n"), most)
                    + &format!(
                        "one: {} {} call {} {}\n",
                        marker("<tool_call>"),
                        text("\n"),
                        text("\n"),
                        marker("</tool_call>")
                    )
            }
            Self::Nemotron => {
                let list = repeated("call", &text(", "), most).replacen("start", "list", 1);
                let (open, close) = (marker("<TOOLCALL>"), marker("</TOOLCALL>"));
                format!("start: {open} \"[\" list \"]\" {close}\n{list}")
            }
            Self::Mistral => {
                let list = repeated("call", &text(", "), most).replacen("start", "list", 1);
                format!("start: {} \"[\" list \"]\"\n{list}", marker("[TOOL_CALLS]"))
            }
            Self::MistralArgs { .. } => {
                repeated("one", "", most) + &format!("one: {} call\n", marker("[TOOL_CALLS]"))
            }
            Self::Llama => "start: call\n".to_owned(),
            Self::Kimi => {
                let list = repeated("one", "", most).replacen("start", "list", 1);
                let [open, close] = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"];
                let [begin, end] = ["<|tool_call_begin|>", "<|tool_call_end|>"].map(marker);
                let section = format!("start: {} list {}\n", marker(open), marker(close));
                section + &list + &format!("one: {begin} call {end}\n")
            }
            // The prompt has opened the response.
            Self::KimiTags => {
                let list = repeated("call", "", most).replacen("start", "list", 1);
                let [open, close, before] =
                    [("<|open|>", "tools"), ("<|close|>", "tools"), ("<|close|>", "response")]
                        .map(|(start, name)| tag(&marker, start, name));
                format!("start: {before} {open} list {close}\n{list}")
            }
        };
        rules += &format!("call: {}\n", all.join(" | "));
        for (call, tool) in all.iter().zip(tools) {
            match self {
                Self::Functions => function(&mut rules, call, tool)?,
                Self::Kimi => {
                    let (id, args) = (
                        text(&format!("functions.{}:", tool.name)),
                        marker("<|tool_call_argument_begin|>"),
                    );
                    let _ = writeln!(rules, "{call}: {id} /[0-9]{{1,4}}/ {args} {call}_args");
                    let _ = writeln!(rules, "{call}_args: {}", arguments(tool)?);
                }
                Self::KimiTags => tagged(&mut rules, call, tool, &marker)?,
                Self::MistralArgs { with_id } => {
                    let id = if with_id {
                        format!("{} /[a-zA-Z0-9]{{9}}/ ", marker("[CALL_ID]"))
                    } else {
                        String::new()
                    };
                    let args = marker("[ARGS]");
                    let _ = writeln!(rules, "{call}: {} {id}{args} {call}_args", text(&tool.name));
                    let _ = writeln!(rules, "{call}_args: {}", arguments(tool)?);
                }
                _ => {
                    let key = if self == Self::Llama { "parameters" } else { "arguments" };
                    let start = format!("{{\"name\": {}, \"{key}\": ", json!(tool.name));
                    let _ = writeln!(rules, "{call}: {} {call}_args \"}}\"", text(&start));
                    let _ = writeln!(rules, "{call}_args: {}", arguments(tool)?);
                }
            }
        }
        Grammar::lark(rules).map(Some)
    }
}

/// Rules for 1 to `most` times `rule` with something between.
fn repeated(rule: &str, between: &str, most: usize) -> String {
    match most {
        1 => format!("start: {rule}\n"),
        _ => format!("start: {rule} ({between} {rule}){{0,{}}}\n", most - 1),
    }
}

/// A text in Lark, whose escapes are those of JSON.
fn text(text: &str) -> String {
    json!(text).to_string()
}

/// The arguments as JSON.
fn arguments(tool: &Tool) -> Result<String> {
    let mut schema = tool.parameters.clone();
    if let Some(fields) = schema.as_object_mut() {
        fields.entry("type").or_insert("object".into());
        if fields.contains_key("properties") {
            fields.entry("additionalProperties").or_insert(false.into());
        }
    }
    json_rule(&schema)
}

/// A call whose arguments stand each between tags of their own, in the order of the schema.
fn function(rules: &mut String, call: &str, tool: &Tool) -> Result<()> {
    let mut body = text(&format!("<function={}>\n", tool.name));
    let mut values = String::new();
    for (index, (name, schema)) in tool.properties().enumerate() {
        let value = format!("{call}_{index}");
        let optional = if is_required(tool, name) { "" } else { "?" };
        let open = text(&format!("<parameter={name}>\n"));
        let _ = write!(body, " ({open} {value}){optional}");
        let _ =
            writeln!(values, "{}", parameter(&value, schema, &tool.parameters, &END_OF_PARAMETER)?);
    }
    let _ = writeln!(rules, "{call}: {body} \"</function>\"");
    *rules += &values;
    Ok(())
}

/// The same with the tags of Kimi K3, which say each value's type.
fn tagged(
    rules: &mut String,
    call: &str,
    tool: &Tool,
    marker: &impl Fn(&str) -> String,
) -> Result<()> {
    let [open, separator] = [marker("<|open|>"), marker("<|sep|>")];
    let name = text(&format!("call tool=\"{}\" index=\"", tool.name));
    let mut body = format!("{open} {name} /[0-9]{{1,3}}/ {} {separator}", text("\""));
    let mut values = String::new();
    let end = tag(marker, "<|close|>", "argument");
    // A text cannot hold control tokens; where they are none, it may not hold the tag that ends it.
    let end = if marker("<|close|>").starts_with('<') {
        End::Tokens(end)
    } else {
        End::Text("<|close|>argument<|sep|>")
    };
    for (index, (name, schema)) in tool.properties().enumerate() {
        let value = format!("{call}_{index}");
        let optional = if is_required(tool, name) { "" } else { "?" };
        let kind = match schema.get("type").and_then(Value::as_str) {
            Some("integer") => "number",
            kind => kind.unwrap_or("object"),
        };
        let key = name.replace('&', "&amp;").replace('"', "&quot;");
        let argument = text(&format!("argument key=\"{key}\" type=\"{kind}\""));
        let _ = write!(body, " ({open} {argument} {separator} {value}){optional}");
        let _ = writeln!(values, "{}", parameter(&value, schema, &tool.parameters, &end)?);
    }
    let _ = writeln!(rules, "{call}: {body} {}", tag(marker, "<|close|>", "call"));
    *rules += &values;
    Ok(())
}

/// `<|open|>NAME<|sep|>` and the like.
fn tag(marker: &impl Fn(&str) -> String, start: &str, name: &str) -> String {
    format!("{} {} {}", marker(start), text(name), marker("<|sep|>"))
}

/// What ends a value that stands between tags.
enum End {
    /// A text, which no value holds.
    Text(&'static str),
    /// The rule of control tokens.
    Tokens(String),
}

fn is_required(tool: &Tool, name: &str) -> bool {
    let all = tool.parameters.get("required").and_then(Value::as_array);
    all.is_some_and(|all| all.iter().any(|one| one == name))
}

/// The rule of one argument's value and of the tag behind it.
fn parameter(rule: &str, schema: &Value, root: &Value, end: &End) -> Result<String> {
    let close = match end {
        End::Text(end) => text(end),
        End::Tokens(rule) => rule.clone(),
    };
    if schema.get("type").is_some_and(|kind| kind == "string") {
        let options = schema.get("enum").and_then(Value::as_array);
        let options: Option<Vec<String>> =
            options.map(|all| all.iter().filter_map(Value::as_str).map(text).collect());
        return Ok(match (options, end) {
            (Some(options), _) if !options.is_empty() => {
                format!("{rule}: ({}) {close}", options.join(" | "))
            }
            (_, End::Tokens(_)) => format!("{rule}: /(?s:.*)/ {close}"),
            (_, End::Text(PARAMETER_END)) => {
                let tag = text(PARAMETER_END.trim());
                format!("{rule}: {rule}_text \"\\n\"\n{rule}_text[suffix={tag}]: /(?s:.*)/")
            }
            (_, End::Text(_)) => format!("{rule}[suffix={close}]: /(?s:.*)/"),
        });
    }
    let mut schema = if schema.is_object() { schema.clone() } else { json!({}) };
    if let (Some(fields), Some(root)) = (schema.as_object_mut(), root.as_object()) {
        for key in ["$defs", "definitions"] {
            if let Some(shared) = root.get(key) {
                fields.entry(key).or_insert_with(|| shared.clone());
            }
        }
    }
    Ok(format!("{rule}: {rule}_json {close}\n{rule}_json: {}", json_rule(&schema)?))
}
