//! A model that talks in sessions.

use std::ops::ControlFlow;
use std::path::Path;

use boostr::backend::Cpu;
use boostr::chat::{ChatTemplate, Options};
use boostr::engine::{Outcome, Request, generate};
use boostr::generation_config::SpecialTokens;
use boostr::load::LanguageModel;
use boostr::models::State;
use boostr::session::{Assistant, Session, TurnId};
use serde_json::{Value, json};

use crate::common::cpu;
use crate::tiny::fixture;

pub const TEMPLATE: &str = "{% for m in messages %}<s>{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}\
    {% if add_generation_prompt %}<s>assistant: {% endif %}";

/// Without what an answer of the past has before `=`.
pub const FORGETFUL: &str = "{% for m in messages %}<s>{{ m.role }}: {{ m.content.split('=')[-1] }}</s>{% endfor %}\
    {% if add_generation_prompt %}<s>assistant: {% endif %}";

pub fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

pub fn assistant(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

/// A model with a template.
pub struct Talk {
    pub lm: LanguageModel<Cpu>,
    pub template: ChatTemplate,
}

/// What one turn took and gave.
pub struct Said {
    pub turn: TurnId,
    pub generated: Vec<u32>,
    /// All ids of the prompt.
    pub ids: Vec<u32>,
    /// Those of them that a state had seen.
    pub reused: usize,
    /// After everything but the last id.
    pub state: State<Cpu>,
}

impl Talk {
    pub fn new(model: &str, template: &str) -> Self {
        let lm = LanguageModel::open(&fixture(model), &Default::default(), cpu()).unwrap();
        let special = SpecialTokens::default();
        Self { lm, template: ChatTemplate::new("template", template, &special).unwrap() }
    }

    pub fn tiny() -> Self {
        Self::new("mamba2-tiny", TEMPLATE)
    }

    pub fn plain() -> Self {
        Self { template: ChatTemplate::plain().unwrap(), ..Self::tiny() }
    }

    pub fn assistant(&self) -> Assistant<'_, Cpu> {
        Assistant { lm: &self.lm, template: &self.template, name: "tiny" }
    }

    pub fn text(&self, ids: &[u32]) -> String {
        self.lm.tokenizer().unwrap().decode(ids, false).unwrap()
    }

    pub fn encode(&self, text: &str) -> Vec<u32> {
        self.lm.tokenizer().unwrap().encode(text, false).unwrap()
    }

    /// The text of a whole conversation that asks for an answer.
    pub fn rendered(&self, messages: &[Value]) -> String {
        let options = Options { add_generation_prompt: true, ..Options::default() };
        self.template.render(messages, &options).unwrap()
    }

    /// A turn in which the user says `text` and the model some tokens.
    pub fn say(&self, session: &Session<Cpu>, text: &str, count: usize) -> Said {
        let mut prompt =
            session.prompt(&self.assistant(), &[user(text)], &Options::default()).unwrap();
        let state = prompt.state.take();
        let mut state = state.unwrap_or_else(|| self.lm.model.new_state().unwrap());
        assert_eq!(prompt.reused, state.position());
        let ids = prompt.ids.clone();
        let generated = self.generate(&mut state, &ids, count).ids;
        let text = self.lm.tokenizer().unwrap().decode(&generated, true).unwrap();
        let (reused, kept) = (prompt.reused, state.clone());
        let committed = session
            .commit(&self.assistant(), prompt, assistant(&text), &generated, Some(state), false)
            .unwrap();
        assert!(committed.unsaved.is_none(), "{committed:?}");
        Said { turn: committed.turn, generated, ids, reused, state: kept }
    }

    /// A turn whose answer is given, and run like one that was made.
    pub fn answer(&self, session: &Session<Cpu>, text: &str, content: &str, made: &str) -> TurnId {
        let mut prompt =
            session.prompt(&self.assistant(), &[user(text)], &Options::default()).unwrap();
        let state = prompt.state.take();
        let mut state = state.unwrap_or_else(|| self.lm.model.new_state().unwrap());
        let generated = self.encode(made);
        let all = [&*prompt.ids, &generated].concat();
        crate::tiny::run(
            &self.lm.model,
            &all[state.position()..all.len() - 1],
            &[all.len() - 1 - state.position()],
            &mut state,
        );
        session
            .commit(&self.assistant(), prompt, assistant(content), &generated, Some(state), false)
            .unwrap()
            .turn
    }

    pub fn generate(&self, state: &mut State<Cpu>, ids: &[u32], max_tokens: usize) -> Outcome<Cpu> {
        let vocab_limit = self.lm.vocab_limit();
        let request = Request { max_tokens, ..Request::new(ids.to_vec(), vocab_limit) };
        generate(&self.lm.model, state, request, &mut |_| ControlFlow::Continue(())).unwrap()
    }

    /// Logits after the next ids.
    pub fn logits(&self, state: &State<Cpu>, ids: &[u32]) -> Vec<f32> {
        crate::tiny::run(&self.lm.model, ids, &[ids.len()], &mut state.clone())
    }
}

/// Files of a folder, sorted.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
