//! What an answer has to look like: JSON, or calls of tools.

use boostr::backend::Backend;
use boostr::chat::tools::{Calls, MAX_CALLS, Tool, ToolChoice, ToolFormat};
use boostr::grammar::Grammar;
use boostr::sample::Constraint;
use serde_json::Value;
use utoipa::ToSchema;

use crate::app::Loaded;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::form::{self, Fault, Form, unsupported};

const MAX_TOOLS: usize = 128;
/// Tokens of a prompt in which it is seen whether it begins a thought.
const PROMPT_END: usize = 16;

/// Checks how many tools there are.
pub(crate) fn check_count(tools: usize) -> Result<()> {
    if tools <= MAX_TOOLS {
        return Ok(());
    }
    Err(ApiError::field("tools", format!("expected at most {MAX_TOOLS}, found {tools}")))
}

/// Fields about the form of an answer.
#[derive(Debug, ToSchema)]
#[schema(as = ShapeFields)]
pub(crate) struct Shape {
    #[schema(ignore)]
    form: Option<Form>,
    /// Functions that may be called, each with the JSON schema of its arguments
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Vec<Value>,
    #[schema(ignore)]
    read_tools: Vec<Tool>,
    /// `auto`, `none`, `required`, or `{"type": "function", "function": {"name"}}`
    #[schema(value_type = Option<Value>)]
    tool_choice: ToolChoice,
    /// Whether several functions may be called at once
    parallel_tool_calls: Option<bool>,
}

impl Shape {
    pub(crate) fn read(fields: &mut Fields) -> Result<Self> {
        let tools = fields.list("tools")?.unwrap_or_default();
        check_count(tools.len())?;
        let of = |error| ApiError::of_input("tools", &error);
        let choice = fields.take("tool_choice").map(|choice| ToolChoice::read(&choice)).transpose();
        let shape = Self {
            form: Form::read(fields)?,
            read_tools: Tool::read_all(&tools).map_err(of)?,
            tools,
            tool_choice: choice
                .map_err(|error| ApiError::of_input("tool_choice", &error))?
                .unwrap_or_default(),
            parallel_tool_calls: fields.boolean("parallel_tool_calls")?,
        };
        if shape.is_forced() { shape.without_form() } else { Ok(shape) }
    }

    /// The same, where the text is the input of a tool that has to be called, and has its form.
    pub(crate) fn with_input(self, form: Option<Form>) -> Result<Self> {
        Ok(Self { form, ..self.without_form()? })
    }

    fn without_form(self) -> Result<Self> {
        let Some(form) = &self.form else { return Ok(self) };
        let reason = "not together with a `tool_choice` that asks for a call";
        Err(ApiError::field(form.param(), reason))
    }

    fn is_forced(&self) -> bool {
        matches!(self.tool_choice, ToolChoice::Required | ToolChoice::Function(_))
    }

    /// Whether the answer is held to a form.
    pub(crate) fn is_held(&self) -> bool {
        self.is_forced() || self.form.is_some()
    }

    fn has_tools(&self) -> bool {
        !self.tools.is_empty() && self.tool_choice != ToolChoice::None
    }

    /// The tools that the template is told of.
    pub(crate) fn template_tools(&self) -> Option<Vec<Value>> {
        self.has_tools().then(|| self.tools.clone())
    }

    /// Most calls of an answer.
    fn most_calls(&self) -> usize {
        if self.parallel_tool_calls == Some(false) { 1 } else { MAX_CALLS }
    }

    /// What finds calls in an answer to a prompt that ends with `before`; one `is_divided` has no thoughts.
    pub(crate) fn finder<B: Backend>(
        &self,
        loaded: &Loaded<B>,
        before: &str,
        is_divided: bool,
    ) -> Option<Finder> {
        if !self.has_tools() {
            return None;
        }
        let calls = Calls::new(tool_format(loaded), self.read_tools.clone());
        let calls = if is_divided { calls } else { calls.after(before) };
        Some(Finder { calls, most: self.most_calls(), is_forced: self.is_forced() })
    }

    /// The end of a prompt, in which it is seen whether an answer begins in a thought. One that a grammar holds never does.
    /// Without a template a prompt ends with what a user says.
    pub(crate) fn before<B: Backend>(&self, loaded: &Loaded<B>, prompt: &[u32]) -> String {
        if self.is_held() || loaded.template.is_plain() {
            return String::new();
        }
        let last = prompt.get(prompt.len().saturating_sub(PROMPT_END)..).unwrap_or_default();
        loaded.tokenizer.decode(last, false).unwrap_or_default()
    }

    /// What the answer may be, unless it may be any text. Takes a while.
    pub(crate) fn constraint<B: Backend>(
        &self,
        loaded: &Loaded<B>,
    ) -> Result<Option<Box<dyn Constraint>>> {
        if !self.is_forced() {
            return self.form.as_ref().map(|form| form.constraint(loaded)).transpose();
        }
        let (tools, choice) = (&self.read_tools, &self.tool_choice);
        let (format, most) = (tool_format(loaded), self.most_calls());
        let grammar = format.grammar(tools, choice, most, &loaded.tokenizer);
        let grammar = grammar.map_err(|error| ApiError::of_input("tool_choice", &error))?;
        let Some(grammar) = grammar else { return Ok(None) };
        let made = form::constraint(loaded, &grammar);
        made.map(Some)
            .map_err(|fault| self.at_fault(loaded).unwrap_or_else(|| unsupported("tools", &fault)))
    }

    /// The error of the first tool that may have to be called and cannot be for itself.
    fn at_fault<B: Backend>(&self, loaded: &Loaded<B>) -> Option<ApiError> {
        let is_meant = |tool: &&Tool| match &self.tool_choice {
            ToolChoice::Function(name) => tool.name == *name,
            _ => true,
        };
        self.read_tools.iter().filter(is_meant).find_map(|tool| {
            let grammar = Grammar::json_schema(&tool.parameters).ok()?;
            let Fault::Grammar(error) = form::constraint(loaded, &grammar).err()? else {
                return None;
            };
            let reason = match &error {
                boostr::Error::Argument { reason, .. } => reason.clone(),
                other => other.to_string(),
            };
            let reason =
                format!("the parameters of function `{}`: {reason}", tool.name.escape_debug());
            let fault = Fault::Grammar(boostr::Error::Argument { name: "tools", reason });
            Some(unsupported("tools", &fault))
        })
    }
}

/// How the model writes calls; as most do, where its template does not show it.
fn tool_format<B: Backend>(loaded: &Loaded<B>) -> ToolFormat {
    loaded.tool_format.unwrap_or(ToolFormat::Hermes)
}

/// Finds calls in an answer.
#[derive(Debug, Clone)]
pub(crate) struct Finder {
    pub(crate) calls: Calls,
    /// Most calls of the answer; what a model that is free makes beyond is left out.
    pub(crate) most: usize,
    /// There is nothing but calls, so what looks like text is one that was cut off.
    pub(crate) is_forced: bool,
}

/// A call as the API writes it, and as templates read it.
#[derive(Debug, Clone)]
pub(crate) struct Called {
    pub(crate) id: String,
    pub(crate) name: String,
    /// A JSON object as text.
    pub(crate) arguments: String,
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use boostr::backend::{self, Cpu};
    use boostr::chat::ChatTemplate;
    use boostr::chat::tools::Piece;
    use boostr::engine::{Engine, EngineConfig};
    use boostr::generation_config::SpecialTokens;
    use boostr::load::{LanguageModel, OpenOptions};
    use boostr::threads::Threads;
    use serde_json::json;

    use super::*;

    #[test]
    fn an_answer_that_begins_in_a_thought_is_known_by_the_end_of_its_prompt() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/default");
        let (path, options) = (Path::new(path), OpenOptions::default());
        let lm = Arc::new(LanguageModel::<Cpu>::open(path, &options, backend::cpu()).unwrap());
        let config =
            EngineConfig { threads: Some(Threads::new(1).unwrap()), ..EngineConfig::default() };
        let engine = Engine::start(lm.clone(), config).unwrap();
        let mut loaded = Loaded::new(lm, engine.clone(), None, None).unwrap();
        let plain = std::mem::replace(
            &mut loaded.template,
            ChatTemplate::new("template", "{{ messages }}", &SpecialTokens::default()).unwrap(),
        );
        let call = "<tool_call>{\"name\": \"now\"}</tool_call>";
        let is_found_by = |loaded: &Loaded<Cpu>, choice: &str, prompt: &str| {
            let tools = json!([{"type": "function", "function": {"name": "now"}}]);
            let fields = json!({"tools": tools, "tool_choice": choice});
            let shape = Shape::read(&mut Fields::of(fields).unwrap()).unwrap();
            let prompt = loaded.lm.encode(prompt).unwrap();
            let mut calls =
                shape.finder(loaded, &shape.before(loaded, &prompt), false).unwrap().calls;
            matches!(calls.push(call)[..], [Piece::Call(_)])
        };
        let is_found = |choice: &str, prompt: &str| is_found_by(&loaded, choice, prompt);
        assert!(is_found("auto", "What time is it?\n"));
        assert!(is_found("auto", "What is <think>? Once more: what time is it in Paris today?\n"));
        assert!(is_found("auto", "What time is it?\n<think>\nHm.\n</think>\n\n"));
        assert!(!is_found("auto", "What time is it?\n<think>\n"));
        // A call that is forced comes at once.
        assert!(is_found("required", "What time is it?\n<think>\n"));
        // Without a template it is the user who says so.
        loaded.template = plain;
        assert!(is_found_by(&loaded, "auto", "What time is it?\n<think>\n"));
        engine.stop();
    }
}
