//! The shapes of answers: what OpenAI's clients read, and a little more.

use boostr::sample::Choice;
use boostr::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::job::{FinishReason, Finished};
use crate::shape::Called;
use crate::turn::SessionTurn;

/// An answer to a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatCompletion {
    pub(crate) id: String,
    /// `chat.completion`
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: String,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) usage: Usage,
    pub(crate) timings: Timings,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) session: Option<SessionTurn>,
}

/// One of its answers.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    pub(crate) message: AnswerMessage,
    pub(crate) logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`
    pub(crate) finish_reason: &'static str,
}

/// What the assistant says.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AnswerMessage {
    pub(crate) role: &'static str,
    /// `null` when it only calls tools
    pub(crate) content: Option<String>,
    /// The thought before it, without `<think>` and `</think>`
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCall>,
}

/// A tool that the assistant calls.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct ToolCall {
    /// Its place among the calls of the answer; in pieces alone
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    id: String,
    /// `function`
    r#type: &'static str,
    function: CalledFunction,
}

/// A function with its arguments.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct CalledFunction {
    name: String,
    /// A JSON object as text
    arguments: String,
}

impl ToolCall {
    pub(crate) fn new(call: Called, index: Option<usize>) -> Self {
        let Called { id, name, arguments } = call;
        Self { index, id, r#type: "function", function: CalledFunction { name, arguments } }
    }
}

/// A piece of a streamed answer.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct ChatChunk {
    pub(crate) id: String,
    /// `chat.completion.chunk`
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: String,
    pub(crate) choices: Vec<DeltaChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timings: Option<Timings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) session: Option<SessionTurn>,
}

/// What is new of one answer.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct DeltaChoice {
    pub(crate) index: usize,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
}

/// What is added to the message.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool_calls: Option<Vec<ToolCall>>,
}

/// The tokens of an answer.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<TokenLogprob>,
}

/// A token and others that were likely.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct TokenLogprob {
    #[serde(flatten)]
    token: LikelyToken,
    top_logprobs: Vec<LikelyToken>,
}

/// A token with the logarithm of its probability by the model.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct LikelyToken {
    token: String,
    logprob: f32,
    /// Its text in UTF-8, which may be a part of a character
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    pub(crate) fn new(tokenizer: &Tokenizer, tokens: &[Choice]) -> Self {
        let likely = |id, logprob| {
            let token = text_of(tokenizer, id);
            let bytes = tokenizer.bytes(id).ok().flatten();
            let bytes = bytes.unwrap_or_else(|| token.as_bytes().to_vec());
            LikelyToken { bytes, token, logprob: finite(logprob) }
        };
        let content = tokens.iter().map(|token| TokenLogprob {
            token: likely(token.id, token.logprob),
            top_logprobs: token.top.iter().map(|&(id, logprob)| likely(id, logprob)).collect(),
        });
        Self { content: content.collect() }
    }
}

/// A text that goes on.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct TextCompletion {
    pub(crate) id: String,
    /// `text_completion`, also for pieces
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: String,
    pub(crate) choices: Vec<TextChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timings: Option<Timings>,
}

/// One continuation, or what is new of it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct TextChoice {
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) logprobs: Option<TextLogprobs>,
    /// `stop` or `length`
    pub(crate) finish_reason: Option<&'static str>,
}

/// The tokens of a continuation, as lists of equal length.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub(crate) struct TextLogprobs {
    tokens: Vec<String>,
    /// `null` for the first token of a prompt
    token_logprobs: Vec<Option<f32>>,
    #[schema(value_type = Vec<Option<Object>>)]
    top_logprobs: Vec<Value>,
    /// Where each token begins, in characters of the text
    text_offset: Vec<usize>,
}

impl TextLogprobs {
    /// Adds tokens that stand from character `offset` on.
    pub(crate) fn add(&mut self, tokenizer: &Tokenizer, tokens: &[Choice], offset: &mut usize) {
        for token in tokens {
            let text = text_of(tokenizer, token.id);
            let length = text.chars().count();
            self.tokens.push(text);
            self.token_logprobs.push(Some(finite(token.logprob)));
            let mut top = Map::new();
            for &(id, logprob) in &token.top {
                // Of tokens of one text the likeliest stays.
                top.entry(text_of(tokenizer, id)).or_insert_with(|| decimal(logprob).into());
            }
            self.top_logprobs.push(top.into());
            self.text_offset.push(*offset);
            *offset += length;
        }
    }

    /// Those of a prompt, of which the first comes after nothing and `tokens` are the rest.
    pub(crate) fn of_prompt(
        tokenizer: &Tokenizer,
        ids: &[u32],
        text: &str,
        tokens: &[Choice],
    ) -> Self {
        let mut all = Self::default();
        let Some(&first) = ids.first() else { return all };
        let first = text_of(tokenizer, first);
        // The token that begins a text is put before it by the tokenizer.
        let mut offset = if text.starts_with(&first) { first.chars().count() } else { 0 };
        all.tokens.push(first);
        all.token_logprobs.push(None);
        all.top_logprobs.push(Value::Null);
        all.text_offset.push(0);
        all.add(tokenizer, tokens, &mut offset);
        all
    }

    /// Adds the tokens that come after these.
    pub(crate) fn append(&mut self, mut other: Self) {
        self.tokens.append(&mut other.tokens);
        self.token_logprobs.append(&mut other.token_logprobs);
        self.top_logprobs.append(&mut other.top_logprobs);
        self.text_offset.append(&mut other.text_offset);
    }
}

/// JSON has no infinity.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// It as a value that is written as the number of 32 bits is, so that equal ones are equal to whoever reads them.
fn decimal(logprob: f32) -> f64 {
    let logprob = finite(logprob);
    logprob.to_string().parse().unwrap_or(f64::from(logprob))
}

fn text_of(tokenizer: &Tokenizer, id: u32) -> String {
    tokenizer.decode(&[id], false).unwrap_or_default()
}

/// Counts of tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
    pub(crate) prompt_tokens_details: PromptDetails,
    pub(crate) completion_tokens_details: CompletionDetails,
}

/// What the prompt's tokens were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct PromptDetails {
    /// Those that were not computed again
    pub(crate) cached_tokens: usize,
}

/// What the answer's tokens were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct CompletionDetails {
    /// Those of its thought, by its text
    pub(crate) reasoning_tokens: usize,
}

impl Usage {
    /// Counts a prompt and all of its continuations.
    pub(crate) fn count(&mut self, prompt_tokens: usize, completion_tokens: usize) {
        self.prompt_tokens += prompt_tokens;
        self.completion_tokens += completion_tokens;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }

    /// Counts another continuation; a prompt counts once however many it has.
    pub(crate) fn add(&mut self, how: &Finished, is_first_of_prompt: bool) {
        if is_first_of_prompt {
            self.prompt_tokens += how.prompt_tokens;
            self.prompt_tokens_details.cached_tokens += how.cached_tokens;
        }
        self.completion_tokens += how.tokens;
        self.completion_tokens_details.reasoning_tokens += how.thought_tokens;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }
}

/// Where the time went, by llama.cpp's names.
#[derive(Debug, Clone, Copy, Default, Serialize, ToSchema)]
pub(crate) struct Timings {
    /// Tokens of the prompt that were known
    cache_n: usize,
    /// Tokens of the prompt that were computed
    prompt_n: usize,
    prompt_ms: f64,
    prompt_per_token_ms: f64,
    prompt_per_second: f64,
    /// Tokens that were generated
    predicted_n: usize,
    predicted_ms: f64,
    predicted_per_token_ms: f64,
    predicted_per_second: f64,
    /// Memory of the sequence's state
    state_bytes: usize,
    /// Tokens of the sequence: the prompt's and the answer's
    position: usize,
}

impl From<&Finished> for Timings {
    fn from(how: &Finished) -> Self {
        let prompt_n = how.prompt_tokens.saturating_sub(how.cached_tokens);
        let prompt_ms = how.prompt_time.as_secs_f64() * 1e3;
        let predicted_ms = how.decode_time.as_secs_f64() * 1e3;
        // The first token comes of the prompt.
        let decoded = how.tokens.saturating_sub(1);
        let per = |ms: f64, n: usize| if n == 0 { 0.0 } else { ms / n as f64 };
        let rate = |ms: f64, n: usize| if ms == 0.0 { 0.0 } else { n as f64 * 1e3 / ms };
        Self {
            cache_n: how.cached_tokens,
            prompt_n,
            prompt_ms,
            prompt_per_token_ms: per(prompt_ms, prompt_n),
            prompt_per_second: rate(prompt_ms, prompt_n),
            predicted_n: how.tokens,
            predicted_ms,
            predicted_per_token_ms: per(predicted_ms, decoded),
            predicted_per_second: rate(predicted_ms, decoded),
            state_bytes: how.state_bytes,
            position: how.position,
        }
    }
}

impl FinishReason {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}
