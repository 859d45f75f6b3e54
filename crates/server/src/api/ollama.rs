//! `/api`: the API of Ollama, over the one model. Answers are lines of JSON unless `stream` is false.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use boostr::backend::Backend;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::completions::Prompt;
use super::conversation::{self, Begun, Conversation, check_free, goes_on};
use crate::app::{App, Loaded, moment, unix_seconds};
use crate::auth::Scope;
use crate::body::UntypedJson;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, wrong};
use crate::job::{FinishReason, Finished, Piece};
use crate::messages;
use crate::options::{GenerationOptions, unknown_model};
use crate::shape::{Called, Shape};
use crate::sse::{self, Events, Script};

/// What Ollama's clients put behind a name that has no tag.
const TAG: &str = ":latest";

/// A conversation whose next turn is wanted.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct OllamaChatFields {
    model: String,
    /// Messages of `system`, `user`, `assistant` (with `thinking`, `tool_calls`) and `tool`; without one nothing is said
    #[schema(value_type = Option<Vec<Object>>)]
    messages: Option<Vec<Value>>,
    /// Functions that may be called, as OpenAI's API has them
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
}

/// A text to go on with, or a user's message to answer.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct OllamaPromptFields {
    model: String,
    /// Without one nothing is said
    prompt: Option<String>,
    /// What the model is told before it
    system: Option<String>,
    /// What the answer is followed by, for a model that fills in
    suffix: Option<String>,
    /// Go on with the prompt as it is, without the chat template
    raw: Option<bool>,
}

/// How to answer.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct OllamaFields {
    /// Send the answer line by line; true unless said otherwise
    stream: Option<bool>,
    /// `json`, or a JSON schema that the answer follows
    format: Option<Value>,
    /// Whether a model that can thinks: the template's variable `enable_thinking`
    think: Option<Value>,
    /// `num_predict`, `temperature`, `top_k`, `top_p`, `min_p`, `seed`, `stop`, `repeat_penalty`, `presence_penalty`,
    /// `frequency_penalty`; others are not used
    #[schema(value_type = Option<Object>)]
    options: Option<Value>,
}

/// A line of an answer; the last one has `done` and all numbers.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes an answer")]
pub(crate) struct OllamaAnswer {
    model: String,
    created_at: String,
    /// What the assistant says: `content`, `thinking`, `tool_calls`
    #[schema(value_type = Option<Object>)]
    message: Option<Value>,
    /// The same of `/api/generate`
    response: Option<String>,
    done: bool,
    /// `stop`, `length` or `load`
    done_reason: Option<String>,
    /// Nanoseconds, as are the other durations
    total_duration: Option<u64>,
    prompt_eval_count: Option<usize>,
    prompt_eval_duration: Option<u64>,
    eval_count: Option<usize>,
    eval_duration: Option<u64>,
}

/// The models of a server: one.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OllamaTags {
    models: Vec<OllamaModel>,
}

/// A model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OllamaModel {
    name: String,
    model: String,
    modified_at: String,
    /// Bytes of its weights
    size: usize,
    /// Tells weights apart
    digest: String,
    details: OllamaDetails,
}

/// What a model is made of.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OllamaDetails {
    parent_model: String,
    format: &'static str,
    family: String,
    families: Vec<String>,
    /// Like `2.7M`
    parameter_size: String,
    /// The type that most weights have
    quantization_level: String,
}

/// A model whose properties are wanted.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct OllamaShowFields {
    model: String,
}

/// The properties of a model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OllamaShow {
    parameters: String,
    /// The chat template
    template: String,
    details: OllamaDetails,
    /// By the names of GGUF: `general.architecture`, `general.parameter_count`, `ARCHITECTURE.context_length`
    #[schema(value_type = Object)]
    model_info: Map<String, Value>,
    /// `completion`, and what else the model can: `tools`, `thinking`, `insert`
    capabilities: Vec<&'static str>,
    modified_at: String,
}

/// The version of the server.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OllamaVersion {
    version: &'static str,
}

/// An error as Ollama writes it.
pub(crate) fn error(error: &ApiError) -> impl Serialize + use<> {
    json!({"error": error.message})
}

/// What all requests for answers have.
struct Common {
    options: GenerationOptions,
    /// The form of the answer, as chat completions have it.
    format: Option<Value>,
    kwargs: Map<String, Value>,
}

impl Common {
    fn read<B: Backend>(app: &App<B>, fields: &mut Fields) -> Result<Self> {
        check_model(app, fields)?;
        let mut inner = match fields.fields("options")? {
            Some(options) => options,
            None => Fields::at("options", json!({}))?,
        };
        // Below 0 there is no limit but the server's.
        let most = inner.integer("num_predict", i64::from(i32::MIN)..=i64::from(i32::MAX))?;
        let mut options = GenerationOptions::read(&mut inner)?;
        if options.count() > 1 {
            return Err(ApiError::field("options.n", "there is one answer"));
        }
        options.max_tokens = most.map(|most| usize::try_from(most).unwrap_or(usize::MAX));
        options.stream = Some(fields.boolean("stream")?.unwrap_or(true));
        let format = match fields.take("format") {
            None => None,
            Some(Value::String(text)) if text.is_empty() => None,
            Some(Value::String(text)) if text == "json" => Some(json!({"type": "json_object"})),
            Some(schema @ Value::Object(_)) => {
                Some(json!({"type": "json_schema", "json_schema": {"schema": schema}}))
            }
            Some(other) => return Err(wrong("format", "`json` or a JSON schema", &other)),
        };
        let mut kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
        match fields.take("think") {
            None => {}
            Some(Value::Bool(thinks)) => {
                kwargs.entry("enable_thinking").or_insert(thinks.into());
            }
            Some(Value::String(effort)) => {
                kwargs.entry("reasoning_effort").or_insert(effort.into());
            }
            Some(other) => return Err(wrong("think", "true, false or a level", &other)),
        }
        fields.take("keep_alive");
        Ok(Self { options, format, kwargs })
    }

    fn shape(&mut self, tools: Vec<Value>) -> Result<Shape> {
        let mut shape = Map::new();
        shape.insert("tools".into(), tools.into());
        if let Some(format) = self.format.take() {
            shape.insert("response_format".into(), format);
        }
        Shape::read(&mut Fields::of(shape.into())?)
    }
}

fn check_model<B: Backend>(app: &App<B>, fields: &mut Fields) -> Result<()> {
    let (model, name) = (fields.text("model")?, fields.text("name")?);
    let model = fields.required("model", model.or(name))?;
    let known = &app.config.model_name;
    if model != *known && model.strip_suffix(TAG) != Some(known) {
        return Err(unknown_model(known));
    }
    Ok(())
}

fn renamed(error: ApiError) -> ApiError {
    error.renamed("response_format", "format")
}

pub(crate) async fn chat<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(scope): Extension<Scope>,
    UntypedJson(mut fields): UntypedJson,
) -> Result<Response> {
    let start = Instant::now();
    let mut common = Common::read(&app, &mut fields)?;
    let messages = fields.list("messages")?.unwrap_or_default();
    let tools = fields.list("tools")?.unwrap_or_default();
    fields.finish()?;
    let messages = messages.into_iter().enumerate();
    let messages = messages.map(|(i, given)| message(&format!("messages[{i}]"), given));
    let messages = messages.collect::<Result<Vec<_>>>()?;
    let script = AnswerScript::new(&app, start, true);
    if messages.is_empty() {
        app.ready()?;
        return Ok(Json(script.loaded()).into_response());
    }
    let is_stream = common.options.is_stream();
    let continues = goes_on(&messages);
    let shape = common.shape(tools).map_err(renamed)?;
    if continues {
        check_free(&shape, "messages")?;
    }
    let conversation = Conversation {
        messages,
        shape,
        options: common.options,
        kwargs: common.kwargs,
        is_divided: true,
        session: None,
        continues,
        top: None,
    };
    let begun = conversation.begin(&app, scope).await.map_err(renamed)?;
    script.answer(begun, is_stream).await
}

pub(crate) async fn generate<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(scope): Extension<Scope>,
    UntypedJson(mut fields): UntypedJson,
) -> Result<Response> {
    let start = Instant::now();
    let mut common = Common::read(&app, &mut fields)?;
    let prompt = fields.text("prompt")?.unwrap_or_default();
    let (system, suffix) = (fields.text("system")?, fields.text("suffix")?);
    let suffix = suffix.filter(|suffix| !suffix.is_empty());
    let is_raw = fields.boolean("raw")?.unwrap_or(false);
    no_images(&mut fields)?;
    for name in ["template", "context"] {
        if fields.take(name).is_some_and(|value| value != "" && value != json!([])) {
            return Err(ApiError::field(name, "expected none: it is no part of a request here"));
        }
    }
    fields.finish()?;
    let script = AnswerScript::new(&app, start, false);
    if prompt.is_empty() && suffix.is_none() {
        app.ready()?;
        return Ok(Json(script.loaded()).into_response());
    }
    let is_stream = common.options.is_stream();
    let shape = common.shape(Vec::new()).map_err(renamed)?;
    let begun = if is_raw || suffix.is_some() {
        let prompt = match suffix {
            Some(suffix) => Prompt::Hole { prefix: prompt, suffix },
            None => Prompt::Text(prompt),
        };
        conversation::go_on(&app, scope, common.options, prompt, shape).await
    } else {
        let system = system.filter(|system| !system.is_empty());
        let system = system.map(|text| json!({"role": "system", "content": text}));
        let user = json!({"role": "user", "content": prompt});
        let conversation = Conversation {
            messages: system.into_iter().chain([user]).collect(),
            shape,
            options: common.options,
            kwargs: common.kwargs,
            is_divided: true,
            session: None,
            continues: false,
            top: None,
        };
        conversation.begin(&app, scope).await
    };
    let begun = begun.map_err(|error| renamed(error.renamed("messages", "prompt")))?;
    script.answer(begun, is_stream).await
}

/// A message as templates expect it.
fn message(path: &str, given: Value) -> Result<Value> {
    let mut fields = Fields::at(path, given)?;
    no_images(&mut fields)?;
    let mut message = Map::new();
    let names = [
        ("role", "role"),
        ("content", "content"),
        ("thinking", "reasoning_content"),
        ("tool_calls", "tool_calls"),
        ("tool_name", "name"),
        ("tool_call_id", "tool_call_id"),
    ];
    for (here, there) in names {
        if let Some(value) = fields.take(here) {
            message.insert(there.into(), value);
        }
    }
    fields.finish()?;
    let of = |error: ApiError| {
        error.renamed(&format!("{path}.reasoning_content"), &format!("{path}.thinking"))
    };
    messages::one(path, message.into()).map_err(of)
}

fn no_images(fields: &mut Fields) -> Result<()> {
    if fields.list("images")?.is_some_and(|images| !images.is_empty()) {
        return Err(ApiError::field(fields.name("images"), "this model takes text only"));
    }
    Ok(())
}

/// Writes the lines of an answer.
struct AnswerScript {
    model: String,
    start: Instant,
    /// Whether it is of `/api/chat`.
    is_chat: bool,
    thought: String,
    text: String,
    calls: Vec<Value>,
    end: Option<Finished>,
}

impl AnswerScript {
    fn new<B: Backend>(app: &App<B>, start: Instant, is_chat: bool) -> Self {
        let (thought, text, calls) = (String::new(), String::new(), Vec::new());
        let model = app.config.model_name.clone();
        Self { model, start, is_chat, thought, text, calls, end: None }
    }

    async fn answer<B: Backend>(mut self, begun: Begun<B>, is_stream: bool) -> Result<Response> {
        if is_stream {
            return sse::stream(begun.pieces, 1, self).await;
        }
        begun.read(|piece| self.take(piece)).await?;
        Ok(Json(self.last()).into_response())
    }

    /// An answer to nothing: the model is there.
    fn loaded(&self) -> Value {
        let mut line = self.line("", "", Vec::new());
        line["done"] = true.into();
        line["done_reason"] = "load".into();
        line
    }

    fn line(&self, thought: &str, text: &str, calls: Vec<Value>) -> Value {
        let mut said = Map::new();
        let name = if self.is_chat { "content" } else { "response" };
        said.insert(name.into(), text.into());
        if !thought.is_empty() {
            said.insert("thinking".into(), thought.into());
        }
        if !calls.is_empty() {
            said.insert("tool_calls".into(), calls.into());
        }
        let mut line =
            json!({"model": self.model, "created_at": moment(unix_seconds()), "done": false});
        if self.is_chat {
            said.insert("role".into(), "assistant".into());
            line["message"] = said.into();
        } else if let Some(line) = line.as_object_mut() {
            line.extend(said);
        }
        line
    }

    fn take(&mut self, piece: Piece) {
        match piece {
            Piece::Text { text, .. } => self.text.push_str(&text),
            Piece::Thought { text, .. } => self.thought.push_str(&text),
            Piece::Call { call, .. } => self.calls.push(called(&call)),
            Piece::Finished { how, .. } => self.end = Some(how),
            Piece::Progress { .. } | Piece::Ping | Piece::Failed(_) => {}
        }
    }

    /// What was not said yet, and the numbers.
    fn last(&mut self) -> Value {
        let calls = std::mem::take(&mut self.calls);
        let mut line = self.line(&self.thought, &self.text, calls);
        let Some(how) = &self.end else { return line };
        line["done"] = true.into();
        let is_cut = how.reason == FinishReason::Length;
        line["done_reason"] = if is_cut { "length" } else { "stop" }.into();
        line["total_duration"] = (self.start.elapsed().as_nanos() as u64).into();
        line["load_duration"] = 0.into();
        line["prompt_eval_count"] = how.prompt_tokens.into();
        line["prompt_eval_duration"] = (how.prompt_time.as_nanos() as u64).into();
        line["eval_count"] = how.tokens.into();
        line["eval_duration"] = (how.decode_time.as_nanos() as u64).into();
        line
    }
}

fn called(call: &Called) -> Value {
    let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
    json!({"id": call.id, "function": {"name": call.name, "arguments": arguments}})
}

impl Script for AnswerScript {
    const IS_LINES: bool = true;

    fn begin(&mut self, _: &mut Events) {}

    fn piece(&mut self, piece: Piece, out: &mut Events) {
        match piece {
            Piece::Text { text, .. } if !text.is_empty() => {
                out.line(&self.line("", &text, Vec::new()));
            }
            Piece::Thought { text, .. } => out.line(&self.line(&text, "", Vec::new())),
            Piece::Call { call, .. } => out.line(&self.line("", "", vec![called(&call)])),
            piece => {
                if let Piece::Finished { .. } = piece {
                    self.take(piece);
                }
            }
        }
    }

    fn finish(&mut self, out: &mut Events) {
        out.line(&self.last());
    }

    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        out.line(&self::error(error));
    }
}

/// What GGUF calls the family of a model.
fn architecture<B: Backend>(loaded: &Loaded<B>) -> String {
    let family = loaded.lm.model.family();
    family.arch().unwrap_or_else(|| family.name()).to_owned()
}

fn details<B: Backend>(loaded: &Loaded<B>) -> OllamaDetails {
    let count = loaded.lm.model.parameters().0 as f64;
    let parameter_size = match count {
        1e9.. => format!("{:.1}B", count / 1e9),
        1e6.. => format!("{:.1}M", count / 1e6),
        _ => format!("{:.1}K", count / 1e3),
    };
    let family = architecture(loaded);
    OllamaDetails {
        parent_model: String::new(),
        format: if loaded.lm.path.extension().is_some_and(|kind| kind == "gguf") {
            "gguf"
        } else {
            "safetensors"
        },
        families: vec![family.clone()],
        family,
        parameter_size,
        quantization_level: loaded.lm.files.dtype.to_uppercase(),
    }
}

pub(crate) async fn tags<B: Backend>(State(app): State<Arc<App<B>>>) -> Result<Json<OllamaTags>> {
    let loaded = app.ready()?;
    let name = app.config.model_name.clone();
    let model = OllamaModel {
        model: name.clone(),
        name,
        modified_at: moment(loaded.created),
        size: loaded.lm.files.bytes,
        digest: loaded.fingerprint.clone(),
        details: details(&loaded),
    };
    Ok(Json(OllamaTags { models: vec![model] }))
}

pub(crate) async fn show<B: Backend>(
    State(app): State<Arc<App<B>>>,
    UntypedJson(mut fields): UntypedJson,
) -> Result<Json<OllamaShow>> {
    check_model(&app, &mut fields)?;
    fields.take("verbose");
    fields.finish()?;
    let loaded = app.ready()?;
    let name = architecture(&loaded);
    let mut info = Map::new();
    info.insert("general.architecture".into(), name.clone().into());
    info.insert("general.parameter_count".into(), loaded.lm.model.parameters().0.into());
    let model = &loaded.lm.model;
    if let Some(length) = model.context_limit().or(model.trained_length()) {
        info.insert(format!("{name}.context_length"), length.into());
    }
    info.insert(format!("{name}.embedding_length"), model.width().into());
    let template = loaded.lm.chat_template.as_ref();
    let template = template.and_then(|source| Some(source.templates.first()?.1.clone()));
    let template = template.unwrap_or_default();
    let mut capabilities = vec!["completion"];
    capabilities.extend(loaded.tool_format.is_some().then_some("tools"));
    capabilities.extend(template.contains("<think>").then_some("thinking"));
    capabilities.extend(loaded.hole.is_some().then_some("insert"));
    Ok(Json(OllamaShow {
        parameters: String::new(),
        template,
        details: details(&loaded),
        model_info: info,
        capabilities,
        modified_at: moment(loaded.created),
    }))
}

pub(crate) async fn version() -> Json<OllamaVersion> {
    Json(OllamaVersion { version: env!("CARGO_PKG_VERSION") })
}
