//! Turns of a session: prompt, answer, and the record of both.

use serde_json::Value;

use crate::backend::Backend;
use crate::chat::{self, Options};
use crate::engine::Finish;
use crate::session::{Assistant, Committed, Session, SessionError};

use super::{Answer, Completion};

/// An answer in a session.
#[derive(Debug)]
pub struct SessionAnswer<B: Backend> {
    /// What was said.
    pub answer: Answer<B>,
    /// How many tokens of the prompt a state of the session had seen.
    pub reused: usize,
    /// The turn that it became. `None` when it was stopped within the prompt, and nothing is kept.
    pub committed: Option<Committed>,
}

impl<B: Backend> Session<B> {
    /// Answers `messages` after the head, and keeps them with the answer as a turn. `run` says how to answer, and starts
    /// it.
    ///
    /// # Errors
    ///
    /// As [`prompt`](Self::prompt), `run` and [`commit`](Self::commit). The session is then as it was.
    ///
    /// ```
    /// use boostr::chat::{ChatTemplate, Options, message};
    /// use boostr::load::{LanguageModel, OpenOptions};
    /// use boostr::session::{Assistant, Sessions};
    /// use boostr::backend;
    ///
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
    /// let lm = LanguageModel::open(path, &OpenOptions::default(), backend::cpu())?;
    /// let template = ChatTemplate::plain()?;
    /// let assistant = Assistant { lm: &lm, template: &template, name: "tiny" };
    ///
    /// let folder = std::env::temp_dir().join(format!("boostr-doc-answer-{}", std::process::id()));
    /// let session = Sessions::open(&folder)?.create("trip", Some("You know Paris."))?;
    /// let user = [message("user", "Where is it?")];
    /// let said = session.answer(&assistant, &user, &Options::default(), |completion| {
    ///     completion.max_tokens(8).stream(|piece| print!("{piece}"))
    /// })?;
    /// assert_eq!(said.committed.map(|turn| turn.turn), Some(1));
    /// # drop(session);
    /// # std::fs::remove_dir_all(&folder)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn answer(
        &self,
        assistant: &Assistant<'_, B>,
        messages: &[Value],
        options: &Options,
        run: impl FnOnce(Completion<'_, B>) -> crate::Result<Answer<B>>,
    ) -> Result<SessionAnswer<B>, SessionError> {
        let mut prompt = self.prompt(assistant, messages, options)?;
        let state = prompt.state.take().map_or_else(|| assistant.lm.model.new_state(), Ok)?;
        let reused = prompt.reused;
        let (seen, new) = prompt.ids.split_at(reused.min(prompt.ids.len()));
        let completion = assistant.lm.complete_ids(new.to_vec()).after(seen.to_vec(), state);
        let answer = run(completion)?;
        if answer.state.position() < prompt.ids.len() {
            return Ok(SessionAnswer { answer, reused, committed: None });
        }
        let message = chat::message("assistant", &answer.text);
        let state = Some(answer.state.clone());
        let is_cut = !matches!(answer.finish, Finish::Eos | Finish::StopString);
        let committed = self.commit(assistant, prompt, message, &answer.ids, state, is_cut)?;
        Ok(SessionAnswer { answer, reused, committed: Some(committed) })
    }
}
