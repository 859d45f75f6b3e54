//! What the commands of a chat do.

use std::ops::ControlFlow;

use anyhow::Result;
use boostr::backend::Cpu;
use boostr::models::State;
use boostr::session::{Session, SessionError, Summary};
use boostr::state_file;

use super::words::{self, HELP, Line};
use super::{Chat, is_unnamed, refused};
use crate::commands::state;
use crate::exit::usage;
use crate::options::sampling;
use crate::system::{self, counted};
use crate::term::shown_in_line;

impl Chat<'_> {
    pub(super) fn obey(&mut self, line: Line) -> Result<ControlFlow<()>> {
        match line {
            Line::Nothing => {}
            Line::Say(text) => self.answer(&text)?,
            Line::Help => Self::print(HELP)?,
            Line::Save(name) => self.save(&name)?,
            Line::Load(name) => self.load(&name)?,
            Line::Branch(name) => self.branch(&name)?,
            Line::Rewind(count) => self.rewind(count)?,
            Line::Mix(parts) => self.mix(&parts)?,
            Line::Diff(name) => self.diff(&name)?,
            Line::Sessions => self.list()?,
            Line::System(text) => self.tell(text)?,
            Line::Set(pairs) => self.set(&pairs)?,
            Line::Stats => self.stats()?,
            Line::Clear => self.clear()?,
            Line::Exit => return Ok(ControlFlow::Break(())),
        }
        Ok(ControlFlow::Continue(()))
    }

    /// A conversation without a name gets one and goes on as that; one with a name is copied.
    fn save(&mut self, name: &str) -> Result<()> {
        let session = self.begun()?;
        let copy = self.sessions.branch(&session, name, session.head()).map_err(refused)?;
        let is_named = !is_unnamed(session.name());
        let words = if is_named { "copied to" } else { "kept as" };
        self.dim(&format!("{words} {name}: {}", numbers(&copy.summary())));
        if !is_named {
            self.session = Some(copy);
        }
        Ok(())
    }

    fn load(&mut self, name: &str) -> Result<()> {
        let session = self.open(name)?;
        self.dim(&format!("{name}: {}", numbers(&session.summary())));
        self.session = Some(session);
        Ok(())
    }

    fn branch(&mut self, name: &str) -> Result<()> {
        let session = self.begun()?;
        let branch = self.sessions.branch(&session, name, session.head()).map_err(refused)?;
        self.dim(&format!("on in {name}; {} stays as it is", session.name()));
        self.session = Some(branch);
        Ok(())
    }

    fn rewind(&mut self, count: usize) -> Result<()> {
        let session = self.begun()?;
        let turns = session.summary().turns;
        if count > turns {
            let turns = counted(turns, "turn");
            return Err(usage(format!("/rewind {count}: the conversation has {turns}")));
        }
        session.rewind(session.before_head(count)).map_err(refused)?;
        self.dim(&format!("back: {}", numbers(&session.summary())));
        Ok(())
    }

    fn clear(&mut self) -> Result<()> {
        if let Some(session) = &self.session {
            session.rewind(0).map_err(refused)?;
        }
        self.dim("from the beginning");
        Ok(())
    }

    /// A copy of the first, with the mixture of the states of all.
    fn mix(&mut self, parts: &[(String, f32)]) -> Result<()> {
        let sessions: Vec<Session<Cpu>> =
            parts.iter().map(|(name, _)| self.open(name)).collect::<Result<_>>()?;
        let states: Vec<State<Cpu>> =
            sessions.iter().map(|session| self.state_of(session)).collect::<Result<_>>()?;
        let weighted: Vec<(&State<Cpu>, f32)> =
            states.iter().zip(parts).map(|(state, (_, weight))| (state, *weight)).collect();
        let mixed = state_file::mix(&self.lm.model, &weighted)?;
        let Some(first) = sessions.first() else { return Ok(()) };
        let mut names = (1..).map(|i| if i == 1 { "mix".into() } else { format!("mix-{i}") });
        let branch = loop {
            let name: String = names.next().unwrap_or_default();
            match self.sessions.branch(first, &name, first.head()) {
                Err(SessionError::Exists { .. } | SessionError::Busy { .. }) => {}
                made => break made.map_err(refused)?,
            }
        };
        branch.set_state(&self.assistant(), mixed).map_err(refused)?;
        let told = "experimental: nobody knows what a model makes of a mixture";
        self.dim(&format!("on in {}, with the text of {} ({told})", branch.name(), first.name()));
        self.session = Some(branch);
        Ok(())
    }

    fn diff(&mut self, name: &str) -> Result<()> {
        let own = self.state_of(&self.open(".")?)?;
        let other = self.state_of(&self.open(name)?)?;
        let difference = state_file::diff(&own, &other)?;
        state::print_differences(&difference, &state_file::norms(&own)?)
    }

    fn list(&self) -> Result<()> {
        let list = self.sessions.list().map_err(refused)?;
        if list.is_empty() {
            return Self::print("no conversations yet");
        }
        let current = self.session.as_ref().map(Session::name);
        for summary in &list {
            let mark = if Some(&*summary.id) == current { '*' } else { ' ' };
            Self::print(&format!(
                "{mark} {:20} {:40} {}",
                summary.id,
                numbers(summary),
                shown_in_line(&summary.title)
            ))?;
        }
        Ok(())
    }

    /// What the model is told before everything.
    fn tell(&mut self, text: Option<String>) -> Result<()> {
        let Some(text) = text else {
            let system = self.session.as_ref().map_or_else(|| self.system.clone(), Session::system);
            return Self::print(&system.unwrap_or_else(|| "nothing".into()));
        };
        let text = Some(text).filter(|text| !text.is_empty());
        if let Some(session) = &self.session {
            session.set_system(text.as_deref()).map_err(refused)?;
        }
        self.system = text;
        Ok(())
    }

    fn set(&mut self, pairs: &[(String, String)]) -> Result<()> {
        if pairs.is_empty() {
            let words = sampling::describe(&self.sampler);
            return Self::print(&format!("{words}, max_tokens {}", self.max_tokens));
        }
        // All of them or none.
        let (mut sampler, mut max_tokens) = (self.sampler.clone(), self.max_tokens);
        for (key, value) in pairs {
            words::set(&mut sampler, &mut max_tokens, key, value)?;
        }
        (self.sampler, self.max_tokens) = (sampler, max_tokens);
        Ok(())
    }

    fn stats(&self) -> Result<()> {
        let mut lines = vec![("model", self.model.clone())];
        if let Some(session) = &self.session {
            let summary = session.summary();
            let all = session.turns().len();
            lines.push(("session", format!("{}, turn {} of {all}", summary.id, summary.head)));
            lines.push(("position", numbers(&summary)));
        }
        if let Some(last) = &self.last {
            let position = self.session.as_ref().map_or(0, |session| session.summary().position);
            lines.push(("last answer", last.line(position)));
        }
        lines.push(("sampling", sampling::describe(&self.sampler)));
        lines.push(("folder", self.folder().display().to_string()));
        for (label, text) in lines {
            Self::print(&format!("{label:12} {text}"))?;
        }
        Ok(())
    }

    /// The session of a name; `.` is the one that is talked in.
    fn open(&self, name: &str) -> Result<Session<Cpu>> {
        match (name, &self.session) {
            (".", Some(session)) => Ok(session.clone()),
            (".", None) => Err(usage("nothing was said yet")),
            _ => self.sessions.get(name).map_err(refused),
        }
    }

    fn state_of(&self, session: &Session<Cpu>) -> Result<State<Cpu>> {
        let state = session.replayed_state(&self.assistant()).map_err(refused)?;
        state.ok_or_else(|| usage(format!("{}: nothing was said in it yet", session.name())))
    }
}

pub(super) fn numbers(summary: &Summary) -> String {
    let Summary { turns, position, state_bytes, .. } = summary;
    let (turns, tokens) = (counted(*turns, "turn"), counted(*position, "token"));
    format!("{turns}, {tokens}, state {}", system::bytes(*state_bytes))
}
