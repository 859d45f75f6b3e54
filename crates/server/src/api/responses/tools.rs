//! Tools of a request as chat completions have them: functions, and what stands for those of other kinds.
//!
//! A custom tool, whose input is any text, is on offer as a function with one argument, `input`. Where it has to be called,
//! the whole answer is its input, held to its grammar. The functions of a namespace have its name before theirs.

use std::collections::HashMap;

use boostr::grammar::Grammar;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::error::{ApiError, Result};
use crate::fields::{self, Fields};
use crate::form::Form;
use crate::shape::check_count;

/// Longest name that a model is told.
const MAX_NAME: usize = 64;

/// The tools on offer, by the names that the model knows.
#[derive(Debug, Default)]
pub(super) struct Offer {
    all: HashMap<String, Offered>,
    /// As chat completions have them.
    pub(super) functions: Vec<Value>,
    /// What chat completions call the choice.
    pub(super) choice: Value,
    /// The custom tool whose input the answer is.
    pub(super) answer: Option<String>,
    /// What that input has to be.
    pub(super) form: Option<Form>,
}

/// A tool as its client knows it.
#[derive(Debug, Default)]
struct Offered {
    name: String,
    namespace: Option<String>,
    is_custom: bool,
    /// Where it stands in the request, and the grammar of its input.
    path: String,
    grammar: Option<Grammar>,
    /// Whether that is told the model, and a call in its own words is not held to it.
    is_told: bool,
}

/// The name of a tool that the model knows. In one that would be too long a hash stands for the namespace, and where the
/// name alone is too long for that, for its end too: two tools keep two names.
pub(super) fn full_name(namespace: Option<&str>, name: &str) -> String {
    let Some(namespace) = namespace else { return name.to_owned() };
    let full = format!("{namespace}.{name}");
    // A name that no tool may have is refused as its client wrote it.
    if full.len() <= MAX_NAME || !(1..=MAX_NAME).contains(&name.len()) || !name.is_ascii() {
        return full;
    }
    let hash = Sha256::digest(&full);
    let hash = hash.iter().take(4).fold(0, |hash: u32, byte| hash << 8 | u32::from(*byte));
    let mut short = format!("{hash:08x}.{name}");
    short.truncate(MAX_NAME);
    short
}

/// The arguments that stand for the input of a custom tool.
pub(super) fn arguments(input: &str) -> Value {
    json!({"input": input})
}

impl Offer {
    /// Reads the tools and the choice among them. Tools of other kinds are left out: nobody here would run them.
    pub(super) fn read(tools: Vec<Value>, choice: Value) -> Result<Self> {
        // Before the grammar of any is made.
        let inner = |tool: &Value| tool["tools"].as_array().map_or(1, Vec::len);
        check_count(tools.iter().map(inner).sum())?;
        let mut offer = Self::default();
        for (i, tool) in tools.into_iter().enumerate() {
            offer.add(&format!("tools[{i}]"), tool, None)?;
        }
        offer.choose(choice)?;
        Ok(offer)
    }

    fn add(&mut self, path: &str, tool: Value, namespace: Option<&Namespace>) -> Result<()> {
        let mut fields = Fields::at(path, tool)?;
        let kind = fields.text("type")?;
        match fields.required("type", kind)?.as_str() {
            "function" => self.function(fields, namespace),
            "custom" => self.custom(path, fields, namespace),
            "namespace" if namespace.is_none() => self.namespace(fields),
            _ => {
                fields::ignore(vec![path.to_owned()]);
                Ok(())
            }
        }
    }

    fn function(&mut self, mut fields: Fields, namespace: Option<&Namespace>) -> Result<()> {
        let mut function = match fields.object("function")? {
            Some(function) => function,
            None => {
                let of = |name: &str, value: Option<Value>| Some((name.to_owned(), value?));
                let names = ["name", "description", "parameters", "strict"];
                names.iter().filter_map(|name| of(name, fields.take(name))).collect::<Map<_, _>>()
            }
        };
        // All of them are known to the model from the beginning.
        fields.take("defer_loading");
        fields.finish()?;
        // A name that is none is refused with the rest of them.
        if let Some(name) = function.get("name").and_then(Value::as_str).map(str::to_owned) {
            let full = self.know(name, namespace, Offered::default());
            function.insert("name".into(), full.into());
        }
        describe(&mut function, namespace);
        self.functions.push(json!({"type": "function", "function": function}));
        Ok(())
    }

    fn custom(
        &mut self,
        path: &str,
        mut fields: Fields,
        namespace: Option<&Namespace>,
    ) -> Result<()> {
        let name = fields.text("name")?;
        let name = fields.required("name", name)?;
        let mut description = fields.text("description")?.unwrap_or_default();
        let mut input = json!({"type": "string"});
        let (mut grammar, mut is_told) = (None, false);
        if let Some(mut format) = fields.fields("format")?
            && let kind = format.word("type", &["text", "grammar"])?
            && format.required("type", kind)? == "grammar"
        {
            let (syntax, rules) =
                (format.word("syntax", &["lark", "regex"])?, format.text("definition")?);
            let (syntax, rules) =
                (format.required("syntax", syntax)?, format.required("definition", rules)?);
            let made = match syntax {
                "lark" => Grammar::lark(rules.as_str()),
                _ => Grammar::regex(rules.as_str()),
            };
            let of = |error| ApiError::of_input(&format.name("definition"), &error);
            grammar = Some(made.map_err(of)?);
            is_told = syntax == "lark";
            let what = if is_told { "grammar in Lark" } else { "regular expression" };
            if !is_told {
                input["pattern"] = format!("^(?:{rules})$").into();
            }
            if !description.is_empty() {
                description.push('\n');
            }
            description += &format!("The input follows this {what}:\n{rules}");
            format.finish()?;
        }
        fields.take("defer_loading");
        fields.finish()?;
        let offered = Offered {
            is_custom: true,
            path: path.to_owned(),
            grammar,
            is_told,
            ..Offered::default()
        };
        let full = self.know(name, namespace, offered);
        let parameters = json!({
            "type": "object", "properties": {"input": input}, "required": ["input"], "additionalProperties": false
        });
        let function = json!({"name": full, "description": description, "parameters": parameters});
        let Value::Object(mut function) = function else { return Ok(()) };
        describe(&mut function, namespace);
        self.functions.push(json!({"type": "function", "function": function}));
        Ok(())
    }

    fn namespace(&mut self, mut fields: Fields) -> Result<()> {
        let name = fields.text("name")?;
        let name = fields.required("name", name)?;
        let description = fields.text("description")?;
        let tools = fields.list("tools")?.unwrap_or_default();
        let path = fields.name("tools");
        fields.finish()?;
        let mut namespace = Namespace { name, description };
        for (i, tool) in tools.into_iter().enumerate() {
            self.add(&format!("{path}[{i}]"), tool, Some(&namespace))?;
            // It is told once.
            namespace.description = None;
        }
        Ok(())
    }

    fn know(&mut self, name: String, namespace: Option<&Namespace>, tool: Offered) -> String {
        let namespace = namespace.map(|namespace| namespace.name.clone());
        let full = full_name(namespace.as_deref(), &name);
        self.all.insert(full.clone(), Offered { name, namespace, ..tool });
        full
    }

    /// Reads the choice: a custom tool that has to be called is no call in the words of the model, but the whole answer.
    fn choose(&mut self, choice: Value) -> Result<()> {
        let kind = choice["type"].as_str().unwrap_or_default();
        if kind == "allowed_tools" {
            return self.allow(choice);
        }
        let named = choice["name"].as_str().filter(|_| matches!(kind, "function" | "custom"));
        let named = named.map(|name| full_name(choice["namespace"].as_str(), name));
        let only = match (self.functions.as_slice(), choice.as_str()) {
            ([one], Some("required")) => one["function"]["name"].as_str().map(str::to_owned),
            _ => named.clone(),
        };
        let custom = only.filter(|name| self.all.get(name).is_some_and(|tool| tool.is_custom));
        if let Some(tool) = custom.as_ref().and_then(|name| self.all.get_mut(name)) {
            let param = format!("{}.format.definition", tool.path);
            self.form = tool.grammar.take().map(|grammar| Form::new(param, grammar));
            self.answer = custom;
            self.choice = "auto".into();
            return Ok(());
        }
        if kind == "custom" {
            let name = named.unwrap_or_default();
            let reason = format!("there is no custom tool with the name `{}`", name.escape_debug());
            return Err(ApiError::field("tool_choice", reason));
        }
        if choice == "required" {
            // A call of one of several is written as the model writes calls.
            let unheld = self.all.values().filter(|tool| tool.is_told);
            fields::ignore(unheld.map(|tool| format!("{}.format", tool.path)).collect());
        }
        self.choice = match named {
            Some(name) => json!({"type": "function", "function": {"name": name}}),
            None => choice,
        };
        Ok(())
    }

    /// Only some of the tools may be called.
    fn allow(&mut self, choice: Value) -> Result<()> {
        let mut fields = Fields::at("tool_choice", choice)?;
        fields.take("type");
        let mode = fields.word("mode", &["auto", "required"])?.unwrap_or("auto");
        let tools = fields.list("tools")?;
        let tools = fields.required("tools", tools)?;
        fields.finish()?;
        let name =
            |tool: &Value| Some(full_name(tool["namespace"].as_str(), tool["name"].as_str()?));
        let names: Vec<String> = tools.iter().filter_map(name).collect();
        let is_allowed = |name: &str| names.iter().any(|allowed| allowed == name);
        self.functions.retain(|tool| tool["function"]["name"].as_str().is_some_and(is_allowed));
        self.all.retain(|name, _| is_allowed(name));
        self.choose(mode.into())
    }

    /// A call as an item of the answer, without id and status.
    pub(super) fn item(&self, name: &str, arguments: &str, call_id: &str) -> Map<String, Value> {
        let tool = self.all.get(name);
        let is_custom = tool.is_some_and(|tool| tool.is_custom);
        let mut item = Map::new();
        let kind = if is_custom { "custom_tool_call" } else { "function_call" };
        item.insert("type".into(), kind.into());
        item.insert("call_id".into(), call_id.into());
        if let Some(namespace) = tool.and_then(|tool| tool.namespace.as_deref()) {
            item.insert("namespace".into(), namespace.into());
        }
        item.insert("name".into(), tool.map_or(name, |tool| &tool.name).into());
        if is_custom {
            let read = serde_json::from_str::<Value>(arguments).unwrap_or_default();
            // A model that is free may write something else.
            let input = read["input"].as_str().unwrap_or(arguments);
            item.insert("input".into(), input.into());
        } else {
            item.insert("arguments".into(), arguments.into());
        }
        item
    }
}

/// A group of tools.
struct Namespace {
    name: String,
    description: Option<String>,
}

/// Tells of a group before the first of its tools.
fn describe(function: &mut Map<String, Value>, namespace: Option<&Namespace>) {
    let Some(of_all) = namespace.and_then(|namespace| namespace.description.as_deref()) else {
        return;
    };
    let own = function.get("description").and_then(Value::as_str).unwrap_or_default();
    let both = format!("{of_all}\n{own}");
    function.insert("description".into(), both.trim_end().into());
}
