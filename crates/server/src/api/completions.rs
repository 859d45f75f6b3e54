//! `POST /v1/completions`: a text goes on.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use boostr::backend::Backend;
use boostr::engine::Request;
use boostr::sample::Choice;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::mpsc;
use utoipa::ToSchema;

use super::alone::alone;
use super::answer::{TextChoice, TextCompletion, TextLogprobs, Timings, Usage};
use super::beams::{self, Beams};
use super::scored::{self, Scored};
use super::{blocking, prompt};
use crate::app::{App, Loaded, unix_seconds};
use crate::auth::Scope;
use crate::body::JsonBody;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, wrong};
use crate::form::Form;
use crate::job::{self, Job, Piece};
use crate::options::{GenerationOptions, MAX_N, MAX_TOP, texts, token_ids};
use crate::sse::{self, Events, Script};

/// Most prompts of one request.
const MAX_PROMPTS: usize = 16;

/// A text, or several, to go on with.
#[derive(Debug, ToSchema)]
pub(crate) struct CompletionFields {
    #[schema(value_type = AnyPrompt)]
    prompt: Vec<Prompt>,
    /// Report the probabilities of the tokens, and of so many of the likeliest with each
    #[schema(minimum = 0, maximum = 20)]
    logprobs: Option<usize>,
    /// Whether names of control tokens in a prompt are those tokens; true unless said otherwise
    parse_special: Option<bool>,
    /// Begin the answer with the prompt, and with `logprobs` report its tokens too
    echo: Option<bool>,
    /// What comes after the hole that is filled in, for models that have tokens for it
    suffix: Option<String>,
    /// So many continuations are made, and of those the `n` with the highest mean logarithm of a token's probability
    /// are given, best first; not with `stream`
    #[schema(minimum = 1, maximum = 8)]
    best_of: Option<usize>,
    /// Look for the likeliest continuations by `best_of` beams, in place of sampling; not with `stream`, `logprobs`, or
    /// options of sampling
    use_beam_search: Option<bool>,
    #[schema(ignore)]
    form: Option<Form>,
}

/// A text, tokens, or several of them
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes what `prompt` and `input` take")]
pub(crate) enum AnyPrompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    ListsOfTokens(Vec<Vec<u32>>),
}

/// A prompt as text or as tokens.
#[derive(Debug, Clone)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    /// A text with a hole.
    Hole {
        prefix: String,
        suffix: String,
    },
}

/// Reads the field `field`: a text, tokens, or up to `most` of either.
pub(crate) fn prompts(fields: &mut Fields, field: &str, most: usize) -> Result<Vec<Prompt>> {
    let value = fields.take(field);
    let value = fields.required(field, value)?;
    let read = |value: &Value| {
        if let Some(texts) = texts(value) {
            return Some(texts.into_iter().map(Prompt::Text).collect());
        }
        if let Some(ids) = token_ids(value) {
            return Some(vec![Prompt::Tokens(ids)]);
        }
        let lists = value.as_array()?.iter();
        lists.map(|ids| token_ids(ids).map(Prompt::Tokens)).collect::<Option<Vec<_>>>()
    };
    let expected = "a string, an array of token ids, or an array of either";
    let prompts = read(&value).ok_or_else(|| wrong(field, expected, &value))?;
    if !(1..=most).contains(&prompts.len()) {
        let reason = format!("expected 1 to {most}, found {}", prompts.len());
        return Err(ApiError::field(field, reason));
    }
    Ok(prompts)
}

impl Prompt {
    /// Its ids and, when the prompt is to be repeated, its text. With `parse_special`, names of control tokens in a text
    /// are those tokens.
    pub(crate) fn encode<B: Backend>(
        self,
        loaded: &Loaded<B>,
        param: &str,
        most: usize,
        parse_special: bool,
    ) -> Result<(Vec<u32>, String)> {
        let (ids, text) = match self {
            Self::Text(text) => {
                let memory = prompt::memory(loaded, text.len(), most, param)?;
                let ids = loaded.lm.encode_prompt(&text, parse_special);
                drop(memory);
                (ids.map_err(|error| ApiError::of_input(param, &error))?, text)
            }
            Self::Hole { prefix, suffix } => {
                let reason = "this model has no tokens to fill in with, it only goes on";
                let hole = loaded.hole.ok_or_else(|| ApiError::field("suffix", reason))?;
                let memory = prompt::memory(loaded, prefix.len() + suffix.len(), most, param)?;
                let ids = hole.encode(&loaded.lm, &prefix, &suffix);
                drop(memory);
                (ids.map_err(|error| ApiError::of_input(param, &error))?, prefix)
            }
            Self::Tokens(ids) => {
                let rows = loaded.lm.model.vocab_rows();
                if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
                    let reason = format!("token id {id} is not below the vocabulary's {rows}");
                    return Err(ApiError::field(param, reason));
                }
                let text = loaded.tokenizer.decode(&ids, false);
                let text = text.map_err(|error| ApiError::of_input(param, &error))?;
                (ids, text)
            }
        };
        prompt::check_context(loaded, &ids, most, param)?;
        Ok((ids, text))
    }
}

impl CompletionFields {
    fn read(fields: &mut Fields, options: &GenerationOptions) -> Result<Self> {
        let suffix = fields.text("suffix")?.filter(|suffix| !suffix.is_empty());
        let mut prompt = prompts(fields, "prompt", MAX_PROMPTS)?;
        if let Some(suffix) = &suffix {
            let with_hole = |prompt: Prompt| match prompt {
                Prompt::Text(prefix) => Ok(Prompt::Hole { prefix, suffix: suffix.clone() }),
                _ => Err(ApiError::field("prompt", "expected texts beside `suffix`")),
            };
            prompt = prompt.into_iter().map(with_hole).collect::<Result<_>>()?;
        }
        let read = Self {
            prompt,
            suffix,
            logprobs: fields.count("logprobs", 0..=MAX_TOP)?,
            parse_special: fields.boolean("parse_special")?,
            echo: fields.boolean("echo")?,
            best_of: fields.count("best_of", options.count()..=MAX_N)?,
            use_beam_search: fields.boolean("use_beam_search")?,
            form: Form::read(fields)?,
        };
        if read.is_beam_search() {
            let reason = if options.is_stream() {
                "which beams are best is known at the end: not together with `stream`".to_owned()
            } else if read.logprobs.is_some() {
                "not together with `logprobs`".to_owned()
            } else if let Some(option) = options.of_sampling() {
                format!("it does not sample: not together with `{option}`")
            } else if let Some(form) = &read.form {
                format!("beams follow no form: not together with `{}`", form.param())
            } else {
                return Ok(read);
            };
            return Err(ApiError::field("use_beam_search", reason));
        }
        if options.is_stream() && read.best_of.is_some_and(|best_of| best_of > options.count()) {
            return Err(ApiError::field(
                "best_of",
                "which are best is known at the end: not together with `stream`",
            ));
        }
        if read.scores_prompt() && read.suffix.is_some() {
            return Err(ApiError::field("suffix", "not together with `echo` and `logprobs`"));
        }
        Ok(read)
    }

    /// Whether the tokens of the prompt are reported.
    fn scores_prompt(&self) -> bool {
        self.echo == Some(true) && self.logprobs.is_some()
    }

    fn is_beam_search(&self) -> bool {
        self.use_beam_search == Some(true)
    }
}

pub(crate) async fn complete<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(scope): Extension<Scope>,
    JsonBody(mut fields): JsonBody,
) -> Result<Response> {
    let loaded = app.ready()?;
    let options = GenerationOptions::read(&mut fields)?;
    let completion = CompletionFields::read(&mut fields, &options)?;
    fields.finish()?;
    options.check_model(&app.config.model_name)?;
    let sampler =
        options.sampler(&loaded.lm.defaults, loaded.lm.vocab_limit(), app.ids.number())?;
    let is_beam_search = completion.is_beam_search();
    let is_scored = completion.scores_prompt();
    let (prompts, constraint) = {
        let (loaded, most) = (loaded.clone(), app.config.limits.max_prompt);
        let (prompts, form) = (completion.prompt, completion.form);
        let parse_special = completion.parse_special.unwrap_or(true);
        let encode = move || {
            let prompts = prompts.into_iter();
            let encoded =
                prompts.map(|prompt| prompt.encode(&loaded, "prompt", most, parse_special));
            let encoded = encoded.collect::<Result<Vec<_>>>()?;
            let constraint = form.map(|form| form.constraint(&loaded)).transpose()?;
            Ok((encoded, constraint))
        };
        blocking(&app, encode).await?
    };
    let (n, top) = (options.count(), completion.logprobs);
    let tries = completion.best_of.unwrap_or(n);
    let is_choosing = tries > n;
    let head = TextCompletion {
        id: app.ids.name("cmpl-"),
        object: "text_completion",
        created: unix_seconds(),
        model: app.config.model_name.clone(),
        system_fingerprint: loaded.fingerprint.clone(),
        choices: Vec::new(),
        usage: None,
        timings: None,
    };
    if is_beam_search {
        let max_tokens = options.tokens(&loaded.lm.defaults, &app.config.limits);
        let stops = options.stop.clone().unwrap_or_default();
        let echo = completion.echo == Some(true);
        let ask = Beams { width: tries, n, max_tokens, stops, echo };
        return beams::complete(&app, &loaded, prompts, ask, head).await;
    }
    let count = tries * prompts.len();
    let scored: Vec<_> = match top {
        Some(top) if is_scored => {
            let ids: Vec<_> = prompts.iter().map(|(ids, _)| ids.clone()).collect();
            let model = loaded.clone();
            let score = move |waiting: &_| scored::score(&model, &ids, top, waiting);
            alone(&app, &loaded, score).await?.into_iter().map(Some).collect()
        }
        _ => prompts.iter().map(|_| None).collect(),
    };
    let (sender, mut pieces) = job::channel();
    let mut echoes = Vec::with_capacity(count);
    for (i, ((ids, text), scored)) in prompts.into_iter().zip(scored).enumerate() {
        let limits = &app.config.limits;
        let mut echo = Echo::default();
        let computed = if scored.is_some() { ids.len() - 1 } else { 0 };
        let state = scored.map(|Scored { tokens, state }| {
            echo.logprobs = Some(TextLogprobs::of_prompt(&loaded.tokenizer, &ids, &text, &tokens));
            state
        });
        if completion.echo == Some(true) {
            echo.text = text;
        }
        let request = options.request(&loaded, limits, scope, sampler.clone(), ids);
        let logprobs = top.or(is_choosing.then_some(0));
        let constraint = constraint.as_ref().map(|constraint| constraint.fork());
        let mut request =
            Request { count: tries, logprobs, constraint, state, computed, ..request };
        if is_scored && request.max_tokens == 1 {
            // Who wants one token beside those of the prompt counts on it, also where it would end the text.
            request.eos.clear();
        }
        let stops = options.stop.clone().unwrap_or_default();
        let job = Job {
            param: "prompt",
            request,
            stops,
            first_index: i * tries,
            thoughts: None,
            finder: None,
            turn: None,
        };
        // Those that were started before one is refused end when `pieces` is dropped.
        job::start(&app, &loaded, job, sender.clone())?;
        echoes.extend(std::iter::repeat_n(echo, tries));
    }
    drop(sender);

    let answer = Answer {
        head,
        loaded,
        with_tokens: top.is_some(),
        with_usage: options.includes_usage(),
        n,
        tries,
        offsets: echoes.iter().map(Echo::length).collect(),
        scores: vec![Score::default(); count],
        ended: vec![false; count],
        echoes,
        usage: Usage::default(),
        timings: Timings::default(),
    };
    if !options.is_stream() {
        return answer.collect(count, &mut pieces).await;
    }
    sse::stream(pieces, count, answer).await
}

/// The prompt in front of a continuation.
#[derive(Debug, Clone, Default)]
struct Echo {
    text: String,
    /// Its tokens, where they are reported.
    logprobs: Option<TextLogprobs>,
}

impl Echo {
    /// Where the continuation begins, in characters of what is reported.
    fn length(&self) -> usize {
        if self.logprobs.is_some() { self.text.chars().count() } else { 0 }
    }
}

/// How likely the tokens of a continuation were.
#[derive(Debug, Clone, Copy, Default)]
struct Score {
    logprobs: f64,
    tokens: usize,
}

impl Score {
    fn add(&mut self, tokens: &[Choice]) {
        self.logprobs += tokens.iter().map(|token| f64::from(token.logprob)).sum::<f64>();
        self.tokens += tokens.len();
    }

    /// The mean over tokens; of none, that of an impossible one.
    fn mean(self) -> f64 {
        if self.tokens == 0 { f64::NEG_INFINITY } else { self.logprobs / self.tokens as f64 }
    }
}

/// The `n` best of each `tries` choices, best first; of equals, the first.
fn best(choices: Vec<TextChoice>, scores: &[Score], n: usize, tries: usize) -> Vec<TextChoice> {
    let mut scored: Vec<(TextChoice, f64)> =
        choices.into_iter().zip(scores.iter().map(|score| score.mean())).collect();
    for of_prompt in scored.chunks_mut(tries) {
        of_prompt.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    }
    let kept = scored.into_iter().enumerate().filter(|(i, _)| i % tries < n);
    let kept = kept.enumerate().map(|(index, (_, (choice, _)))| TextChoice { index, ..choice });
    kept.collect()
}

/// An answer in the making.
struct Answer<B: Backend> {
    head: TextCompletion,
    loaded: Arc<Loaded<B>>,
    with_tokens: bool,
    with_usage: bool,
    /// Continuations that are given of each prompt, and those that are made.
    n: usize,
    tries: usize,
    /// Characters of the continuations so far.
    offsets: Vec<usize>,
    scores: Vec<Score>,
    ended: Vec<bool>,
    echoes: Vec<Echo>,
    usage: Usage,
    timings: Timings,
}

impl<B: Backend> Answer<B> {
    /// What a piece adds to its continuation.
    fn choice(&mut self, piece: Piece) -> Option<TextChoice> {
        match piece {
            Piece::Text { index, text, tokens } => {
                self.scores.get_mut(index)?.add(&tokens);
                let mut logprobs = None;
                if self.with_tokens {
                    let offset = self.offsets.get_mut(index)?;
                    let mut all = TextLogprobs::default();
                    all.add(&self.loaded.tokenizer, &tokens, offset);
                    logprobs = Some(all);
                }
                Some(TextChoice { index, text, logprobs, finish_reason: None })
            }
            Piece::Finished { index, how } => {
                let of_prompt = index / self.tries * self.tries;
                let is_first = !self.ended.get(of_prompt..of_prompt + self.tries)?.contains(&true);
                self.usage.add(&how, is_first);
                self.timings = Timings::from(&how);
                *self.ended.get_mut(index)? = true;
                let finish_reason = Some(how.reason.name());
                Some(TextChoice { index, text: String::new(), logprobs: None, finish_reason })
            }
            Piece::Thought { .. }
            | Piece::Call { .. }
            | Piece::Progress { .. }
            | Piece::Ping
            | Piece::Failed(_) => None,
        }
    }

    async fn collect(
        mut self,
        count: usize,
        pieces: &mut mpsc::Receiver<Piece>,
    ) -> Result<Response> {
        let mut choices: Vec<TextChoice> = std::mem::take(&mut self.echoes)
            .into_iter()
            .enumerate()
            .map(|(index, Echo { text, logprobs })| {
                let logprobs = logprobs.or_else(|| self.with_tokens.then(TextLogprobs::default));
                TextChoice { index, text, logprobs, finish_reason: None }
            })
            .collect();
        while self.ended.iter().filter(|ended| **ended).count() < count {
            let piece = match pieces.recv().await {
                Some(Piece::Failed(error)) => return Err(error),
                Some(piece) => piece,
                None => return Err(ApiError::internal(&"an answer was given up")),
            };
            let Some(new) = self.choice(piece) else { continue };
            let Some(choice) = choices.get_mut(new.index) else { continue };
            choice.text.push_str(&new.text);
            choice.finish_reason = choice.finish_reason.or(new.finish_reason);
            if let (Some(all), Some(new)) = (&mut choice.logprobs, new.logprobs) {
                all.append(new);
            }
        }
        if self.tries > self.n {
            choices = best(choices, &self.scores, self.n, self.tries);
        }
        let (usage, timings) = (Some(self.usage), Some(self.timings));
        Ok(Json(TextCompletion { choices, usage, timings, ..self.head }).into_response())
    }
}

impl<B: Backend> Script for Answer<B> {
    fn begin(&mut self, out: &mut Events) {
        let echoes = std::mem::take(&mut self.echoes).into_iter().enumerate();
        for (index, Echo { text, logprobs }) in echoes {
            if !text.is_empty() || logprobs.is_some() {
                let choice = TextChoice { index, text, logprobs, finish_reason: None };
                out.data(&TextCompletion { choices: vec![choice], ..self.head.clone() });
            }
        }
    }

    fn piece(&mut self, piece: Piece, out: &mut Events) {
        let Some(choice) = self.choice(piece) else { return };
        let is_last = !self.ended.contains(&false);
        let timings = is_last.then_some(self.timings);
        out.data(&TextCompletion { choices: vec![choice], timings, ..self.head.clone() });
    }

    fn finish(&mut self, out: &mut Events) {
        if self.with_usage {
            out.data(&TextCompletion { usage: Some(self.usage), ..self.head.clone() });
        }
        out.done();
    }
}
