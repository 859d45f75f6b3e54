//! A prompt of an open model, continued on the caller's thread.

use std::ops::ControlFlow;

use serde_json::Value;

use crate::backend::Backend;
use crate::chat::{ChatTemplate, Options};
use crate::engine::{
    Beam, BeamSearch, Draft, Event, Finish, Request, Timings, beam_search, generate,
};
use crate::error::{Error, Result};
use crate::load::LanguageModel;
use crate::models::State;
use crate::sample::{Choice, Constraint};

use super::{Sampling, TextDecoder, TextEvent, TextListener};

/// Most tokens of an answer where neither the caller nor the author says.
const MAX_TOKENS: usize = 512;

/// A prompt, and how to continue it. What is not said is the model author's choice.
pub struct Completion<'a, B: Backend> {
    lm: &'a LanguageModel<B>,
    prompt: Prompt<'a>,
    /// Tokens before the prompt, and a state that has seen them.
    past: Option<(Vec<u32>, State<B>)>,
    max_tokens: Option<usize>,
    sampling: Sampling,
    stops: Vec<String>,
    constraint: Option<Box<dyn Constraint>>,
    draft: Option<Draft<B>>,
    logprobs: Option<usize>,
    parse_special: bool,
}

enum Prompt<'a> {
    Text(&'a str),
    Ids(Vec<u32>),
    Messages { messages: &'a [Value], template: Option<&'a ChatTemplate>, options: Options },
}

/// One of the likeliest answers, by [`Completion::beams`].
#[derive(Debug, Clone, PartialEq)]
pub struct BeamAnswer {
    /// The text, up to a stop string; empty for a model without a tokenizer.
    pub text: String,
    /// The tokens, without the one that ended it.
    pub ids: Vec<u32>,
    /// Sum of the log probabilities of the tokens, with that of the one that ended it.
    pub logprob: f64,
    /// Why it ended; [`Finish::Stopped`] when the search was ended before.
    pub finish: Finish,
}

/// What a prompt was continued with.
#[derive(Debug)]
pub struct Answer<B: Backend> {
    /// The text, up to a stop string; empty for a model without a tokenizer.
    pub text: String,
    /// The tokens, without the one that ended it. After a stop string their text goes on beyond [`text`](Self::text).
    pub ids: Vec<u32>,
    /// The tokens with their log probabilities, if [`Completion::logprobs`] asked for them.
    pub tokens: Vec<Choice>,
    /// Why it ended.
    pub finish: Finish,
    /// Where time went.
    pub timings: Timings,
    /// All tokens before the answer.
    pub prompt: Vec<u32>,
    /// A state that has seen the prompt and the answer but its last token, or with a draft its last few.
    pub state: State<B>,
    /// Tokens of the sequence: those that the state has seen, and those of the answer that it has not.
    pub position: usize,
    /// Tokens that the draft guessed.
    pub drafted: usize,
    /// Those of them that the model chose as well.
    pub accepted: usize,
}

impl<B: Backend> LanguageModel<B> {
    /// A text to go on with. An empty one is the token that begins a text.
    #[must_use]
    pub fn complete<'a>(&'a self, prompt: &'a str) -> Completion<'a, B> {
        Completion::new(self, Prompt::Text(prompt))
    }

    /// Tokens to go on with. Needs no tokenizer; without one the answer has ids and no text.
    #[must_use]
    pub fn complete_ids(&self, prompt: Vec<u32>) -> Completion<'_, B> {
        Completion::new(self, Prompt::Ids(prompt))
    }

    /// A conversation to answer, by the model's chat template, or the plain one where it has none.
    ///
    /// ```
    /// use boostr::load::{LanguageModel, OpenOptions};
    /// use boostr::{backend, chat::message};
    ///
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
    /// let lm = LanguageModel::open(path, &OpenOptions::default(), backend::cpu())?;
    /// let messages = [message("user", "Who was Ada Lovelace?")];
    /// let answer = lm.chat(&messages).max_tokens(8).run()?;
    /// assert!(answer.ids.len() <= 8);
    /// # Ok::<(), boostr::Error>(())
    /// ```
    #[must_use]
    pub fn chat<'a>(&'a self, messages: &'a [Value]) -> Completion<'a, B> {
        let options = Options::default();
        Completion::new(self, Prompt::Messages { messages, template: None, options })
    }

    /// The same by a template that was compiled, with options for it.
    #[must_use]
    pub fn chat_with<'a>(
        &'a self,
        template: &'a ChatTemplate,
        messages: &'a [Value],
        options: Options,
    ) -> Completion<'a, B> {
        let template = Some(template);
        Completion::new(self, Prompt::Messages { messages, template, options })
    }
}

impl<'a, B: Backend> Completion<'a, B> {
    fn new(lm: &'a LanguageModel<B>, prompt: Prompt<'a>) -> Self {
        Self {
            lm,
            prompt,
            past: None,
            max_tokens: None,
            sampling: Sampling::default(),
            stops: Vec::new(),
            constraint: None,
            draft: None,
            logprobs: None,
            parse_special: true,
        }
    }

    /// The prompt follows `ids`, the first of which `state` has seen, as many as its
    /// [`position`](State::position). Ids are empty where they are not known; the state is then gone on with as it is.
    ///
    /// ```
    /// use boostr::load::{LanguageModel, OpenOptions};
    /// use boostr::backend;
    ///
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
    /// let lm = LanguageModel::open(path, &OpenOptions::default(), backend::cpu())?;
    /// let first = lm.complete("Once upon a time").max_tokens(8).run()?;
    /// let ids = [first.prompt, first.ids].concat();
    /// let next = lm.complete(" And then").after(ids, first.state).max_tokens(8).run()?;
    /// assert!(next.prompt.len() > next.ids.len());
    /// # Ok::<(), boostr::Error>(())
    /// ```
    #[must_use]
    pub fn after(self, ids: Vec<u32>, state: State<B>) -> Self {
        Self { past: Some((ids, state)), ..self }
    }

    /// Most tokens of the answer; 512 unless the author says.
    #[must_use]
    pub fn max_tokens(self, count: usize) -> Self {
        Self { max_tokens: Some(count), ..self }
    }

    /// All options of sampling at once.
    #[must_use]
    pub fn sampling(self, sampling: Sampling) -> Self {
        Self { sampling, ..self }
    }

    /// 0 takes the likeliest token.
    #[must_use]
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.sampling.temperature = Some(temperature);
        self
    }

    /// Keeps this many of the likeliest tokens; 0 keeps all.
    #[must_use]
    pub fn top_k(mut self, count: usize) -> Self {
        self.sampling.top_k = Some(count);
        self
    }

    /// Keeps the likeliest tokens that together have this probability.
    #[must_use]
    pub fn top_p(mut self, probability: f32) -> Self {
        self.sampling.top_p = Some(probability);
        self
    }

    /// Another seed gives another sample; 0 unless it is set.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.sampling.seed = Some(seed);
        self
    }

    /// The answer ends before this text; may be called for several.
    #[must_use]
    pub fn stop(mut self, text: impl Into<String>) -> Self {
        self.stops.push(text.into());
        self
    }

    /// The answer ends before any of these texts.
    #[must_use]
    pub fn stops<S: AsRef<str>>(mut self, texts: &[S]) -> Self {
        self.stops.extend(texts.iter().map(|text| text.as_ref().to_owned()));
        self
    }

    /// Which tokens may come next, as a [`Grammar`](crate::grammar::Grammar) says.
    #[must_use]
    pub fn constraint(self, constraint: impl Into<Option<Box<dyn Constraint>>>) -> Self {
        Self { constraint: constraint.into(), ..self }
    }

    /// Where guesses of the next tokens come from.
    #[must_use]
    pub fn draft(self, draft: impl Into<Option<Draft<B>>>) -> Self {
        Self { draft: draft.into(), ..self }
    }

    /// Whether the name of a control token (`<|im_start|>`) in a text to go on with is that token, as it is unless said
    /// otherwise: then the text of a chat template can be gone on with. `false` is for text of strangers. In messages
    /// the names are text whatever this says.
    ///
    /// ```
    /// use boostr::load::{LanguageModel, OpenOptions};
    /// use boostr::backend;
    ///
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
    /// let lm = LanguageModel::open(path, &OpenOptions::default(), backend::cpu())?;
    /// let end = "</s>";
    /// let parsed = lm.complete(end).max_tokens(1).run()?;
    /// let spelled = lm.complete(end).parse_special(false).max_tokens(1).run()?;
    /// assert!(parsed.prompt.len() < spelled.prompt.len());
    /// # Ok::<(), boostr::Error>(())
    /// ```
    #[must_use]
    pub fn parse_special(self, parse_special: bool) -> Self {
        Self { parse_special, ..self }
    }

    /// Reports the tokens with their log probabilities, and of `count` of the likeliest beside each.
    #[must_use]
    pub fn logprobs(self, count: usize) -> Self {
        Self { logprobs: Some(count), ..self }
    }

    /// Computes the answer.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for an option out of range or an empty prompt;
    /// [`Error::Format`] when the model came without a tokenizer and text is asked for; whatever the
    /// template, the constraint or the model refuse.
    pub fn run(self) -> Result<Answer<B>> {
        self.listen(|_| ControlFlow::Continue(()))
    }

    /// The same; `piece` is told the text as it comes.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub fn stream(self, mut piece: impl FnMut(&str) + Send) -> Result<Answer<B>> {
        self.listen(|event| {
            if !event.delta.text.is_empty() {
                piece(&event.delta.text);
            }
            ControlFlow::Continue(())
        })
    }

    /// The same; `listener` is told of the prompt, the tokens and the end, each with the text that is known with it, and
    /// may end the answer.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub fn listen(
        self,
        mut listener: impl FnMut(&TextEvent<B>) -> ControlFlow<()> + Send,
    ) -> Result<Answer<B>> {
        let new = self.prompt_ids()?;
        let Self { lm, past, max_tokens, sampling, stops, constraint, draft, logprobs, .. } = self;
        if !stops.is_empty() {
            lm.tokenizer()?;
        }
        let decoder = lm
            .tokenizer
            .as_ref()
            .map(|tokenizer| TextDecoder::new(tokenizer.stream(true), &stops, logprobs.is_some()));
        let (before, mut state) = match past {
            Some(past) => past,
            None => (Vec::new(), lm.model.new_state()?),
        };
        let prompt = [&*before, &new].concat();
        let author = &lm.defaults;
        let request = Request {
            seen: Some(state.position().min(before.len())),
            max_tokens: max_tokens.or(author.max_new_tokens).unwrap_or(MAX_TOKENS),
            eos: lm.eos.clone(),
            sampler: sampling.config(author, 0)?,
            logprobs,
            constraint,
            draft,
            ..Request::new(prompt.clone(), lm.vocab_limit())
        };
        let (mut text, mut tokens) = (String::new(), Vec::new());
        let (mut finish, mut failed) = (Finish::Stopped, None);
        let mut decode = TextListener::new(
            decoder.transpose()?.into_iter().collect(),
            |mut event: TextEvent<B>| {
                let flow = listener(&event);
                text.push_str(&event.delta.text);
                tokens.append(&mut event.delta.tokens);
                match event.event {
                    Event::Finished { outcome, .. } => finish = outcome.finish,
                    Event::Failed { error } => failed = Some(error),
                    Event::Prompt { .. } | Event::Token { .. } => {}
                }
                flow
            },
        );
        let outcome = generate(&lm.model, &mut state, request, &mut decode)?;
        drop(decode);
        if let Some(error) = failed {
            return Err(error);
        }
        Ok(Answer {
            text,
            ids: outcome.ids,
            tokens,
            finish,
            timings: outcome.timings,
            prompt,
            state,
            position: outcome.position,
            drafted: outcome.drafted,
            accepted: outcome.accepted,
        })
    }

    /// The likeliest answers, the likeliest first, by a [beam search](beam_search) of `width` beams in place of sampling.
    /// `progress` is told how many tokens the beams have, and may end the search.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run); [`Error::Argument`] for a width that is not in 1..=64, and where a
    /// constraint, a draft or log probabilities are asked for too.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    /// use boostr::load::{LanguageModel, OpenOptions};
    /// use boostr::backend;
    ///
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
    /// let lm = LanguageModel::open(path, &OpenOptions::default(), backend::cpu())?;
    /// let completion = lm.complete("Once upon a time").max_tokens(8);
    /// let answers = completion.beams(3, |_| ControlFlow::Continue(()))?;
    /// assert!(answers.len() == 3 && answers[0].logprob >= answers[1].logprob);
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn beams(
        self,
        width: usize,
        progress: impl FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Vec<BeamAnswer>> {
        let prompt = self.prompt_ids()?;
        let Self { lm, past, max_tokens, stops, constraint, draft, logprobs, .. } = self;
        if constraint.is_some() || draft.is_some() || logprobs.is_some() {
            let reason = "expected none of a constraint, a draft and log probabilities, found one";
            return Err(Error::Argument { name: "beams", reason: reason.into() });
        }
        if !stops.is_empty() {
            lm.tokenizer()?;
        }
        // The tokens before the prompt that the state has not seen are run with it.
        let (before, state) = match past {
            None => (Vec::new(), lm.model.new_state()?),
            Some(past) => past,
        };
        let (before, unseen) = before.split_at(state.position().min(before.len()));
        let prompt = [unseen, &prompt].concat();
        let max_tokens = max_tokens.or(lm.defaults.max_new_tokens).unwrap_or(MAX_TOKENS);
        let room = lm.model.room_after(state.position() + prompt.len())?;
        let max_tokens = max_tokens.min(room);
        let vocab_limit = lm.vocab_limit();
        let suppression = &lm.defaults.suppression;
        let eos = &lm.eos;
        let search = BeamSearch { width, max_tokens, eos, vocab_limit, suppression, before };
        let beams = beam_search(&lm.model, &state, &prompt, search, progress)?;
        let answers = beams.into_iter().map(|Beam { mut ids, logprob, is_ended, .. }| {
            let mut finish = match ids.len() {
                _ if is_ended => Finish::Eos,
                len if len == max_tokens => Finish::Length,
                _ => Finish::Stopped,
            };
            if is_ended {
                ids.pop();
            }
            let mut text = String::new();
            if let Some(tokenizer) = &lm.tokenizer {
                let mut decoder = TextDecoder::new(tokenizer.stream(true), &stops, false)?;
                for &id in &ids {
                    let token = Choice { id, logprob: 0.0, top: Vec::new() };
                    text += &decoder.push(token)?.text;
                }
                text += &decoder.finish()?.text;
                if decoder.is_stopped() {
                    finish = Finish::StopString;
                }
            }
            Ok(BeamAnswer { text, ids, logprob, finish })
        });
        answers.collect()
    }

    /// The ids of the prompt, without those before it.
    fn prompt_ids(&self) -> Result<Vec<u32>> {
        let lm = self.lm;
        let ids = match &self.prompt {
            Prompt::Ids(ids) => ids.clone(),
            Prompt::Text(text) if self.past.is_none() => {
                lm.encode_prompt(text, self.parse_special)?
            }
            Prompt::Text(text) if self.parse_special => {
                lm.tokenizer()?.encode_control(text, false)?
            }
            Prompt::Text(text) => lm.tokenizer()?.encode(text, false)?,
            Prompt::Messages { messages, template, options } => {
                let own = match (template, &lm.chat_template) {
                    (Some(_), _) => None,
                    (None, Some(source)) => Some(source.compile()?),
                    (None, None) => Some(ChatTemplate::plain()?),
                };
                let template = template.or(own.as_ref()).into_iter();
                let ids = template
                    .map(|template| lm.conversation(template, messages, options)?.encode_from(0));
                ids.collect::<Result<Vec<_>>>()?.concat()
            }
        };
        let bos = lm.defaults.bos_token_id.filter(|_| ids.is_empty() && self.past.is_none());
        Ok(bos.map_or(ids, |bos| vec![bos]))
    }
}
