//! A conversation on its way to the engine, whichever door it came by.

use std::slice;
use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use boostr::backend::Backend;
use boostr::chat::{self, Thoughts};
use boostr::engine::Request;
use boostr::models::State;
use boostr::sample::{Constraint, SamplerConfig};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::completions::Prompt;
use super::{blocking, prompt};
use crate::app::{App, Loaded};
use crate::auth::Scope;
use crate::error::{ApiError, Result};
use crate::job::{self, Job, Piece};
use crate::options::GenerationOptions;
use crate::shape::{Finder, Shape};
use crate::sse::{self, Events, Script};
use crate::turn::Turn;

/// A conversation whose next turn is wanted.
pub(crate) struct Conversation {
    pub(crate) options: GenerationOptions,
    pub(crate) messages: Vec<Value>,
    pub(crate) shape: Shape,
    /// More variables of the chat template.
    pub(crate) kwargs: Map<String, Value>,
    /// Whether the thought comes apart from the text.
    pub(crate) is_divided: bool,
    /// A session that it goes on with.
    pub(crate) session: Option<String>,
    /// Whether the session's last answer goes on, in place of an answer to messages; without a session the last message, if
    /// the assistant says it.
    pub(crate) continues: bool,
    /// How many likely tokens to report with each, if any report is wanted.
    pub(crate) top: Option<usize>,
}

/// An answer that has been asked for.
pub(crate) struct Begun<B: Backend> {
    pub(crate) loaded: Arc<Loaded<B>>,
    pub(crate) pieces: mpsc::Receiver<Piece>,
    pub(crate) prompt_tokens: usize,
    /// It has calls of tools and no words.
    pub(crate) is_forced: bool,
}

impl<B: Backend> Begun<B> {
    /// Reads the whole answer, of which there is one; `take` is told each piece of it.
    pub(crate) async fn read(mut self, mut take: impl FnMut(Piece)) -> Result<()> {
        loop {
            let piece = match self.pieces.recv().await {
                Some(Piece::Failed(error)) => return Err(error),
                Some(piece) => piece,
                None => return Err(ApiError::internal(&"an answer was given up")),
            };
            let is_last = matches!(piece, Piece::Finished { .. });
            take(piece);
            if is_last {
                return Ok(());
            }
        }
    }
}

/// Answers by a script: event by event, or at once with what is `whole` in the end. There is one answer.
pub(crate) async fn answer<B: Backend, S: Script>(
    begun: Begun<B>,
    is_stream: bool,
    mut script: S,
    whole: impl FnOnce(S) -> Value,
) -> Result<Response> {
    if is_stream {
        return sse::stream(begun.pieces, 1, script).await;
    }
    begun.read(|piece| script.piece(piece, &mut Events::default())).await?;
    Ok(Json(whole(script)).into_response())
}

/// The field by which an answer goes on.
const CONTINUES: &str = "continue_final_message";

/// Checks that an answer that has begun follows the form that it is held to.
fn check_begun(constraint: Option<&dyn Constraint>, begun: &[u32]) -> Result<()> {
    let Some(mut constraint) = constraint.filter(|_| !begun.is_empty()).map(Constraint::fork)
    else {
        return Ok(());
    };
    begun.iter().try_for_each(|&id| constraint.accept(id)).map_err(|_| {
        let reason = "the answer that goes on does not follow the form that is asked for";
        ApiError::field(CONTINUES, reason)
    })
}

/// Checks that an answer that goes on with a message of the request, the field `param` says so, is held to no form: that
/// would begin anew.
pub(crate) fn check_free(shape: &Shape, param: &str) -> Result<()> {
    if !shape.is_held() {
        return Ok(());
    }
    let reason = "without a session the assistant's last message does not go on where a form of the answer, \
                  or a call of a tool, is asked for";
    Err(ApiError::field(param, reason))
}

/// What the engine is asked for a conversation.
struct Asked<B: Backend> {
    /// The field that the prompt is made of.
    param: &'static str,
    ids: Vec<u32>,
    /// How many of them the answer begins with.
    begun: usize,
    marks: Vec<usize>,
    state: Option<State<B>>,
    constraint: Option<Box<dyn Constraint>>,
    thoughts: Option<Thoughts>,
    finder: Option<Finder>,
    turn: Option<Turn<B>>,
}

impl<B: Backend> Asked<B> {
    fn new(loaded: &Loaded<B>, asked: &Conversation, most: usize) -> Result<Self> {
        let template = asked.template_options();
        let (ids, begun, marks, state, turn, within) = match &asked.session {
            Some(name) => {
                let messages = (!asked.continues).then_some(&*asked.messages);
                // Not every template writes thoughts, so they take memory and are no reason to refuse.
                let of = |message: &Value| prompt::text_bytes(slice::from_ref(&message["content"]));
                prompt::needed(asked.messages.iter().map(of).sum(), most, "messages")?;
                let memory = prompt::text_bytes(&asked.messages).saturating_mul(prompt::ENCODING);
                let mut turn = Turn::begin(loaded, name, messages, &template, memory)?;
                let (ids, begun, marks, state) = turn.prompt();
                prompt::check_context(loaded, &ids, most, "messages")?;
                (ids, begun, marks, state, Some(turn), None)
            }
            None => {
                let prompt = prompt::encode(loaded, &asked.messages, &template, most)?;
                (prompt.ids, 0, prompt.marks, None, None, prompt.within)
            }
        };
        let shape = &asked.shape;
        let before = ids.get(..ids.len().saturating_sub(begun)).unwrap_or_default();
        let constraint = shape.constraint(loaded)?;
        check_begun(constraint.as_deref(), ids.get(before.len()..).unwrap_or_default())?;
        let end = within.map_or_else(|| shape.before(loaded, before), str::to_owned);
        // A message that goes on has begun with its text; an answer of a session may be in its thought.
        let is_text = asked.continues && asked.session.is_none() && within.is_none();
        let thoughts = (asked.is_divided && !is_text)
            .then(|| within.map_or_else(|| Thoughts::after(&end), Thoughts::within));
        Ok(Self {
            param: if asked.continues { CONTINUES } else { "messages" },
            constraint,
            finder: shape.finder(loaded, &end, thoughts.is_some()),
            thoughts,
            ids,
            begun,
            marks,
            state,
            turn,
        })
    }

    fn submit(
        self,
        app: &Arc<App<B>>,
        loaded: Arc<Loaded<B>>,
        scope: Scope,
        options: &GenerationOptions,
        sampler: SamplerConfig,
        top: Option<usize>,
    ) -> Result<Begun<B>> {
        let prompt_tokens = self.ids.len();
        let is_forced = self.finder.as_ref().is_some_and(|finder| finder.is_forced);
        let request = Request {
            begun: self.begun,
            state: self.state,
            marks: self.marks,
            logprobs: top,
            constraint: self.constraint,
            ..options.request(&loaded, &app.config.limits, scope, sampler, self.ids)
        };
        let (sender, pieces) = job::channel();
        let job = Job {
            param: self.param,
            request,
            stops: options.stop.clone().unwrap_or_default(),
            first_index: 0,
            thoughts: self.thoughts,
            finder: self.finder,
            turn: self.turn,
        };
        job::start(app, &loaded, job, sender)?;
        Ok(Begun { loaded, pieces, prompt_tokens, is_forced })
    }
}

/// Goes on with a prompt that is no conversation; the answer has the form of `shape`.
pub(crate) async fn go_on<B: Backend>(
    app: &Arc<App<B>>,
    scope: Scope,
    options: GenerationOptions,
    prompt: Prompt,
    shape: Shape,
) -> Result<Begun<B>> {
    let loaded = app.ready()?;
    let sampler =
        options.sampler(&loaded.lm.defaults, loaded.lm.vocab_limit(), app.ids.number())?;
    let asked = {
        let (loaded, most) = (loaded.clone(), app.config.limits.max_prompt);
        let ask = move || {
            let (ids, _) = prompt.encode(&loaded, "prompt", most, true)?;
            let constraint = shape.constraint(&loaded)?;
            Ok(Asked {
                param: "prompt",
                ids,
                begun: 0,
                marks: Vec::new(),
                state: None,
                constraint,
                thoughts: None,
                finder: None,
                turn: None,
            })
        };
        blocking(app, ask).await?
    };
    asked.submit(app, loaded, scope, &options, sampler, None)
}

impl Conversation {
    fn template_options(&self) -> chat::Options {
        chat::Options {
            add_generation_prompt: true,
            continue_last: self.continues && self.session.is_none(),
            skip_thought: self.shape.is_held(),
            tools: self.shape.template_tools(),
            kwargs: self.kwargs.clone(),
            ..chat::Options::default()
        }
    }

    /// Checks it and hands it to the engine.
    pub(crate) async fn begin<B: Backend>(
        self,
        app: &Arc<App<B>>,
        scope: Scope,
    ) -> Result<Begun<B>> {
        let loaded = app.ready()?;
        let options = &self.options;
        options.check_model(&app.config.model_name)?;
        let sampler =
            options.sampler(&loaded.lm.defaults, loaded.lm.vocab_limit(), app.ids.number())?;
        if self.session.is_some() && options.count() > 1 {
            return Err(ApiError::field("n", "a session has one answer to each turn"));
        }
        let (asked, conversation) = {
            let (loaded, most) = (loaded.clone(), app.config.limits.max_prompt);
            let desk =
                if self.session.is_some() { &app.desks.sessions } else { &app.desks.prompts };
            desk.blocking(app, move || Ok((Asked::new(&loaded, &self, most)?, self))).await?
        };
        asked.submit(app, loaded, scope, &conversation.options, sampler, conversation.top)
    }

    /// How many tokens it has.
    pub(crate) async fn count<B: Backend>(self, app: &Arc<App<B>>) -> Result<usize> {
        let loaded = app.ready()?;
        self.options.check_model(&app.config.model_name)?;
        let most = app.config.limits.max_prompt;
        let count = move || {
            let template = self.template_options();
            Ok(prompt::encode(&loaded, &self.messages, &template, most)?.ids.len())
        };
        blocking(app, count).await
    }
}

/// Whether the last message is one of the assistant that can go on: with some text or a thought, and no calls.
pub(crate) fn goes_on(messages: &[Value]) -> bool {
    let Some(last) = messages.last().filter(|last| last["role"] == "assistant") else {
        return false;
    };
    let has_text = |part: &Value| part["text"].as_str().is_some_and(|text| !text.is_empty());
    let is_said = match &last["content"] {
        Value::String(text) => !text.is_empty(),
        Value::Array(parts) => parts.iter().any(has_text),
        _ => false,
    };
    let thoughts = ["reasoning_content", "reasoning", "thinking"].map(|name| &last[name]);
    let is_thought = thoughts.iter().any(|thought| thought.as_str().is_some_and(|t| !t.is_empty()));
    (is_said || is_thought) && last["tool_calls"].as_array().is_none_or(Vec::is_empty)
}

/// Messages after instructions. What instructs the model at the beginning is one message, as templates have it.
pub(crate) fn instructed(messages: Vec<Value>, instructions: Option<String>) -> Vec<Value> {
    let first = messages.iter().take_while(|message| message["role"] == "system").count();
    if first + usize::from(instructions.is_some()) < 2 {
        let system = instructions.map(|text| json!({"role": "system", "content": text}));
        return system.into_iter().chain(messages).collect();
    }
    let mut texts: Vec<String> = instructions.into_iter().collect();
    let text = |message: &Value| message["content"].as_str().unwrap_or_default().to_owned();
    texts.extend(messages.iter().take(first).map(text));
    let system = json!({"role": "system", "content": texts.join("\n\n")});
    std::iter::once(system).chain(messages.into_iter().skip(first)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_instructs_the_model_is_one_message() {
        let system = |text: &str| json!({"role": "system", "content": text});
        let user = json!({"role": "user", "content": "Hi"});
        let all = instructed(vec![system("b"), system("c"), user.clone()], Some("a".to_owned()));
        assert_eq!(all, [system("a\n\nb\n\nc"), user.clone()]);
        let all = instructed(vec![user.clone(), system("b")], Some("a".to_owned()));
        assert_eq!(all, [system("a"), user.clone(), system("b")]);
        assert_eq!(instructed(vec![user.clone()], None), [user]);
    }
}
