//! Calls of tools: found in an answer, or forced by a grammar.
//!
//! How a model writes a call is a matter of its family. The template shows it, as it writes earlier calls in the same way;
//! [`ToolFormat::detect`] looks there. [`Calls`] then takes the calls out of an answer while it comes.
//!
//! ```
//! use boostr::chat::tools::{Calls, Piece, Tool, ToolFormat};
//! use serde_json::json;
//!
//! let tools = Tool::read_all(&[json!({"type": "function", "function": {"name": "sum"}})])?;
//! let mut calls = Calls::new(ToolFormat::Hermes, tools);
//! assert_eq!(calls.push("Let me see.\n<tool"), [Piece::Text("Let me see.".to_owned())]);
//! assert_eq!(calls.push("_call>\n{\"name\": \"sum\", \"arguments\": {\"of\": [1, 2]}}\n"), []);
//! let [Piece::Call(call)] = &calls.push("</tool_call>")[..] else { panic!("no call") };
//! assert_eq!((call.name.as_str(), call.arguments.as_str()), ("sum", r#"{"of":[1,2]}"#));
//! assert_eq!(calls.finish(), []);
//! # Ok::<(), boostr::Error>(())
//! ```

use serde_json::{Map, Value, json};

use super::thoughts::Markers;
use super::{DEFAULT, Source, TOOL_USE};
use crate::error::{Error, Result};

mod calls;
mod force;

pub use calls::{Call, Calls, Piece};
pub use force::MAX_CALLS;

/// Longest name of a tool, in bytes.
const MAX_NAME: usize = 64;

/// How a family of models writes calls of tools.
///
/// Markers like `[TOOL_CALLS]` are control tokens in some tokenizers: an answer in which calls are looked for is made
/// text with control tokens, [`Tokenizer::stream(false)`](crate::tokenizer::Tokenizer::stream).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen, Granite 4, Falcon-H1.
    Hermes,
    /// `<tool_call><function=NAME><parameter=NAME>..</parameter></function></tool_call>`: Nemotron 3, Qwen3-Coder.
    Functions,
    /// `<TOOLCALL>[{"name": .., "arguments": {..}}]</TOOLCALL>`: Nemotron Nano 2.
    Nemotron,
    /// `[TOOL_CALLS][{"name": .., "arguments": {..}}]`: Mistral, up to the third version of its tokenizer.
    Mistral,
    /// `[TOOL_CALLS]NAME[ARGS]{..}`: later Mistral.
    MistralArgs {
        /// An id of nine letters and digits comes before the arguments: `[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{..}`.
        with_id: bool,
    },
    /// The answer is `{"name": .., "parameters": {..}}`, perhaps behind `<|python_tag|>`: Llama 3.
    Llama,
    /// `<|tool_call_begin|>functions.NAME:N<|tool_call_argument_begin|>{..}<|tool_call_end|>` in a section: Kimi K2.
    Kimi,
    /// `<|open|>call tool="NAME" index="N"<|sep|>`, arguments between tags, `<|close|>call<|sep|>`: Kimi K3.
    KimiTags,
}

impl ToolFormat {
    /// The format of a model's template; `None` if it knows no tools, or writes calls in a way that is not known here.
    #[must_use]
    pub fn detect(source: &Source) -> Option<Self> {
        let named = |name| source.templates.iter().find(|(other, _)| other == name);
        let (_, text) = named(TOOL_USE).or_else(|| named(DEFAULT))?;
        let has = |part: &str| text.contains(part);
        let has_key = |key: &str| has(&format!("\"{key}\"")) || has(&format!("\\\"{key}\\\""));
        if !has("tools") {
            None
        } else if has("[TOOL_CALLS]") {
            let with_id = has("[CALL_ID]");
            Some(if has("[ARGS]") { Self::MistralArgs { with_id } } else { Self::Mistral })
        } else if has("<TOOLCALL>") {
            Some(Self::Nemotron)
        } else if has("<|tool_calls_section_begin|>") {
            Some(Self::Kimi)
        } else if has("<|open|>") && has("<|close|>") && has("<|sep|>") {
            Some(Self::KimiTags)
        } else if has("<tool_call>") && has("<function=") {
            Some(Self::Functions)
        } else if has("<tool_call>") && has_key("arguments") {
            Some(Self::Hermes)
        } else if has("tool_calls") && has("{\"name\": ") && has_key("parameters") {
            Some(Self::Llama)
        } else {
            None
        }
    }

    /// What stands around thoughts.
    pub(super) const fn markers(self) -> Markers {
        match self {
            Self::KimiTags => Markers::Tags,
            _ => Markers::Plain,
        }
    }

    /// An id for a call, of a number that no other call has: the templates of Mistral insist on nine letters and digits.
    ///
    /// ```
    /// use boostr::chat::tools::ToolFormat;
    ///
    /// assert_eq!(ToolFormat::Mistral.call_id(63), "000000011");
    /// assert_eq!(ToolFormat::Hermes.call_id(63), "call_000000011");
    /// ```
    #[must_use]
    pub fn call_id(self, number: u64) -> String {
        const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        let digit = |place| DIGITS[(number / 62_u64.pow(place) % 62) as usize];
        let id: String = (0..9).rev().map(|place| char::from(digit(place))).collect();
        match self {
            Self::Mistral | Self::MistralArgs { .. } => id,
            _ => format!("call_{id}"),
        }
    }
}

/// A tool on offer.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// 1 to 64 letters, digits, `_`, `-` or `.`.
    pub name: String,
    /// The JSON schema of its arguments, of an object.
    pub parameters: Value,
}

impl Tool {
    /// Reads tools as the API of OpenAI has them: `{"type": "function", "function": {"name": .., "parameters": {..}}}`.
    /// Without parameters there are no arguments.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if one is something else, or has a name that no model could be trusted with; or if two have the
    /// same name.
    pub fn read_all(tools: &[Value]) -> Result<Vec<Self>> {
        let mut all: Vec<Self> = Vec::new();
        for (index, value) in tools.iter().enumerate() {
            let refuse = |reason: String| {
                Err(Error::Argument { name: "tools", reason: format!("tool {index}: {reason}") })
            };
            let function = match value.get("type").and_then(Value::as_str) {
                Some("function") => value.get("function"),
                _ => None,
            };
            let Some(function) = function else {
                return refuse("expected type `function` and a field `function`".to_owned());
            };
            let Some(name) = function.get("name").and_then(Value::as_str) else {
                return refuse("expected a text as name".to_owned());
            };
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
            if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(plain) {
                let shown: String = name.escape_debug().take(MAX_NAME).collect();
                return refuse(format!(
                    "expected a name of 1 to {MAX_NAME} letters, digits, `_`, `-` or `.`, found `{shown}`"
                ));
            }
            if all.iter().any(|tool| tool.name == name) {
                return refuse(format!("there is another tool with the name `{name}`"));
            }
            let parameters = match function.get("parameters") {
                None | Some(Value::Null) => {
                    json!({"type": "object", "properties": {}, "additionalProperties": false})
                }
                Some(schema @ Value::Object(_)) => schema.clone(),
                Some(_) => {
                    return refuse(format!("parameters of `{name}`: expected a JSON schema"));
                }
            };
            all.push(Self { name: name.to_owned(), parameters });
        }
        Ok(all)
    }

    /// The schema of one argument, an empty one if the tool does not know it.
    fn parameter(&self, name: &str) -> &Value {
        self.parameters.get("properties").and_then(|all| all.get(name)).unwrap_or(&Value::Null)
    }

    /// The arguments that the tool knows, with their schemas.
    fn properties(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.parameters.get("properties").and_then(Value::as_object).into_iter().flat_map(Map::iter)
    }
}

/// Whether the model may, must or must not call a tool.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// As it likes.
    #[default]
    Auto,
    /// It must not; tools are best kept out of the template too.
    None,
    /// It must call one or more, and say nothing else.
    Required,
    /// It must call this one, once.
    Function(String),
}

impl ToolChoice {
    /// Reads OpenAI's `tool_choice`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for anything but `"auto"`, `"none"`, `"required"` and
    /// `{"type": "function", "function": {"name": ..}}`.
    ///
    /// ```
    /// use boostr::chat::tools::ToolChoice;
    /// use serde_json::json;
    ///
    /// assert_eq!(ToolChoice::read(&json!("required"))?, ToolChoice::Required);
    /// let named = json!({"type": "function", "function": {"name": "sum"}});
    /// assert_eq!(ToolChoice::read(&named)?, ToolChoice::Function("sum".to_owned()));
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn read(value: &Value) -> Result<Self> {
        match (value.as_str(), value.pointer("/function/name").and_then(Value::as_str)) {
            (Some("auto"), _) => Ok(Self::Auto),
            (Some("none"), _) => Ok(Self::None),
            (Some("required"), _) => Ok(Self::Required),
            (None, Some(name)) if value.get("type") == Some(&json!("function")) => {
                Ok(Self::Function(name.to_owned()))
            }
            _ => {
                let shown: String = value.to_string().chars().take(100).collect();
                let reason = format!(
                    "expected `auto`, `none`, `required` or a function by its name, found {shown}"
                );
                Err(Error::Argument { name: "tool_choice", reason })
            }
        }
    }
}
