//! `boostr chat`: a conversation that is kept, branched and rewound.

mod commands;
mod input;
pub mod words;

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use boostr::backend::Cpu;
use boostr::chat::{ChatTemplate, Options, message};
use boostr::engine::Draft;
use boostr::load::{LanguageModel, OpenOptions};
use boostr::sample::{SamplerConfig, StopStrings};
use boostr::session::{Assistant, Session, SessionError, Sessions};
use boostr::text::{Sampling, SessionAnswer};
use clap::Args;

use crate::cli::parse_max_tokens;
use crate::commands::run::bad_logits;
use crate::exit::{BadModel, Interrupted, is_context, usage};
use crate::model::Source;
use crate::options::context::{self, ContextArgs};
use crate::options::draft::DraftArgs;
use crate::options::model::ModelArgs;
use crate::options::sampling::{self, SamplingArgs};
use crate::options::template::{self, TemplateArgs};
use crate::places;
use crate::stream::{self, Show, Stream};
use crate::system;
use crate::term::{Style, Term, shown, shown_in_line};
use commands::numbers;
use input::{Entry, Input};
use words::Line;

const EXAMPLES: &str = "\
Examples:
  boostr chat smollm2-instruct.gguf
  boostr chat smollm2-instruct.gguf --session trip --system \"You know Paris.\"
  boostr chat smollm2-instruct.gguf --session trip < questions.txt";

const NOTES: &str = "\
A conversation is on disk after each answer, so the next chat in --session NAME goes on where this one ended, however it \
ended, and evaluates only what is new. Without --session it is kept as `last` until the next one without. /help at \
the prompt lists what can be done: save, load, branch, rewind, mix, diff. Lines come from a pipe as well: then the first \
command that fails ends the chat. Sessions are in $XDG_STATE_HOME/boostr/sessions, or ~/.local/state/boostr/sessions; more: \
docs/chat.md.";

/// Talk: answers in turn, kept under a name, branched and rewound
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, after_help = NOTES)]
pub struct ChatArgs {
    /// The model; the built-in one by default
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub path: Option<PathBuf>,
    /// The conversation to go on with, or to begin
    #[arg(long, value_name = "NAME")]
    pub session: Option<String>,
    /// Folder of all conversations
    #[arg(long, value_name = "DIR", env = "BOOSTR_SESSIONS", hide_env = true)]
    pub sessions: Option<PathBuf>,
    /// Most tokens of an answer; -1 for no limit
    #[arg(short = 'n', long, alias = "n-predict", value_name = "N", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_MAX_TOKENS", hide_env = true, value_parser = parse_max_tokens)]
    pub max_tokens: Option<usize>,
    /// End an answer before this text; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub chat: TemplateArgs,
    #[command(flatten)]
    pub context: ContextArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// What a conversation without a name is kept as until the next one.
const UNNAMED: &str = "last";
/// So many of them at once.
const MAX_UNNAMED: usize = 9;

/// Whether a session was not named by anybody.
fn is_unnamed(name: &str) -> bool {
    let number = name.strip_prefix(UNNAMED).map(|rest| rest.strip_prefix('-').unwrap_or(rest));
    number.is_some_and(|number| number.is_empty() || number.parse::<usize>().is_ok())
}

/// Most tokens of an answer, of a model that was trained to end one.
const MAX_ANSWER: usize = 1024;

/// What is left to do when a conversation is as long as it may be.
const FULL: &str =
    "/rewind N takes turns back, /clear begins again; `boostr chat --context N` allows more";

/// All that a chat needs.
struct Chat<'a> {
    term: &'a Term,
    lm: LanguageModel<Cpu>,
    template: ChatTemplate,
    model: String,
    sessions: Sessions<Cpu>,
    /// `None` until something is said in a conversation without a name.
    session: Option<Session<Cpu>>,
    /// For that one, when it begins.
    system: Option<String>,
    options: Options,
    sampling: Sampling,
    /// What it comes to.
    sampler: SamplerConfig,
    max_tokens: usize,
    stops: Vec<String>,
    draft: Option<Draft<Cpu>>,
    last: Option<Answered>,
}

/// The last answer in numbers.
struct Answered {
    tokens: usize,
    decode: Duration,
    /// Those of them that were guessed, and guesses in all.
    accepted: usize,
    guessed: usize,
    /// Tokens of the prompt that a state had seen, and those that were run.
    reused: usize,
    evaluated: usize,
    state_bytes: usize,
}

pub fn run(args: &ChatArgs, term: &Term) -> Result<()> {
    let (source, options) =
        args.model.source(args.path.as_deref().or(args.model.model.as_deref()))?;
    let options = args.context.of(options);
    source.check_exists()?;
    StopStrings::new(&args.stop).map_err(|error| usage(error.to_string()))?;
    let folder = places::sessions(args.sessions.as_deref())?;
    // Before the model: a conversation that is not to be had needs none.
    let sessions = Sessions::open(&folder).map_err(refused)?;
    if let Some(why) = sessions.exposed() {
        term.warn(format_args!("--sessions {}: {why}", folder.display()));
    }
    let session = match &args.session {
        None => None,
        Some(name) => Some(
            match sessions.get(name) {
                Err(SessionError::Missing { .. }) => {
                    sessions.create(name, args.chat.system.as_deref())
                }
                found => found,
            }
            .map_err(refused)?,
        ),
    };

    let mut lm = source.open(&OpenOptions { progress: term.opening(), ..options }, &term.cpu)?;
    template::apply(&args.chat, &mut lm)?;
    term.warn_all(&lm.warnings);
    lm.tokenizer().map_err(BadModel::from)?;
    let own = if args.chat.raw { None } else { template::template(&lm)? };
    let has_template = own.is_some();
    let template = own.map_or_else(ChatTemplate::plain, Ok)?;
    let sampling = args.sampling.sampling();
    let sampler = sampling::config(&sampling, &lm.defaults)?;
    let usual = if has_template { MAX_ANSWER } else { sampling::MAX_TOKENS };
    let max_tokens = args.max_tokens.or(lm.defaults.max_new_tokens).unwrap_or(usual);
    let mut chat = Chat {
        term,
        template,
        model: source.name(),
        sessions,
        session,
        system: args.chat.system.clone(),
        options: Options { kwargs: args.chat.kwargs()?, ..Options::default() },
        sampling,
        sampler,
        max_tokens,
        stops: args.stop.clone(),
        draft: args.draft.open(&args.model, &lm)?,
        last: None,
        lm,
    };
    let mut input = Input::new(&folder.join(".history"))?;
    chat.greet(&source, has_template, input.is_terminal())?;
    stream::catch_interrupt();
    chat.talk(&mut input)
}

/// How a conversation ends: a pipe's with the error of its last turn, if that was not said.
fn left(refused: Option<anyhow::Error>, input: &Input) -> Result<()> {
    refused.filter(|_| !input.is_terminal()).map_or(Ok(()), Err)
}

/// What sessions refuse is wrong usage, unless it is the system or a file that is to blame.
pub fn refused(error: SessionError) -> anyhow::Error {
    match error {
        SessionError::Other(boostr::Error::Argument { name: "messages", reason }) => {
            usage(format!("the chat template refuses this: {reason}"))
        }
        SessionError::Other(error) => error.into(),
        error => usage(error.to_string()),
    }
}

impl Chat<'_> {
    fn greet(&mut self, source: &Source, has_template: bool, at_terminal: bool) -> Result<()> {
        if at_terminal {
            let head = format!("boostr {}  {}", env!("CARGO_PKG_VERSION"), self.model);
            self.term.say_in(Style::Bold, &head);
            self.dim("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves");
        }
        if *source == Source::Embedded && self.term.chatty() {
            self.dim(
                "a demo, not an assistant: it writes prose like its sources, and knows nothing",
            );
        }
        if !has_template {
            let words =
                "note: without a chat template what is said is one plain text, line after line";
            self.term.say(words);
        }
        let Some(session) = &self.session else { return Ok(()) };
        let summary = session.summary();
        if summary.turns > 0 {
            let of = if summary.model == self.model {
                String::new()
            } else {
                format!(", until now with {}: it is read again", summary.model)
            };
            self.dim(&format!(
                "{}: {}{of}: {}",
                summary.id,
                numbers(&summary),
                shown_in_line(&summary.title)
            ));
        }
        if self.system.is_some() && session.system() != self.system {
            session.set_system(self.system.as_deref()).map_err(refused)?;
        }
        Ok(())
    }

    /// Until the user leaves.
    fn talk(&mut self, input: &mut Input) -> Result<()> {
        let mut interrupts = 0;
        // A turn that the context had no room for, until one is answered.
        let mut refused = None;
        loop {
            let name = self.session.as_ref().map(Session::name);
            let name = name.filter(|name| !is_unnamed(name)).unwrap_or_default();
            let line = match input.read(&format!("{name}> "))? {
                Entry::Text(line) => line,
                Entry::NotText => {
                    self.term.error("that line is not UTF-8 text, so it was not said");
                    continue;
                }
                Entry::End => return left(refused, input),
                Entry::Interrupt if interrupts > 0 => return Ok(()),
                Entry::Interrupt => {
                    interrupts += 1;
                    self.dim("once more, or Ctrl-D, leaves");
                    continue;
                }
            };
            interrupts = 0;
            let line = Line::parse(&line);
            let is_said = matches!(line, Ok(Line::Say(_)));
            match line.and_then(|line| self.obey(line)) {
                Ok(ControlFlow::Break(())) => return left(refused, input),
                Ok(ControlFlow::Continue(())) if is_said => refused = None,
                Ok(ControlFlow::Continue(())) => {}
                Err(error) if is_context(&error) => {
                    let words = format!("not said: {error:#}: {FULL}");
                    // A pipe's error is said at its end.
                    if input.is_terminal() {
                        self.term.error(&words);
                    } else {
                        self.term.say(words);
                    }
                    refused = Some(error.context("the last turn was not said"));
                }
                Err(error) if input.is_terminal() && !error.is::<io::Error>() => {
                    self.term.error(&format!("{error:#}"));
                }
                Err(error) => return Err(error),
            }
            if stream::is_interrupted() && !input.is_terminal() {
                return Err(Interrupted.into());
            }
            stream::forget_interrupt();
        }
    }

    /// Lets the model answer, and keeps what it says.
    fn answer(&mut self, text: &str) -> Result<()> {
        let session = self.begun()?;
        let assistant = self.assistant();
        let user = [message("user", text)];
        // The same every time, and another in each turn.
        let turns = session.turns().len() as u64;
        let seed = Some(self.sampler.seed.wrapping_add(turns));
        let mut stream = Stream::new(Show::Text, self.term);
        let said = session.answer(&assistant, &user, &self.options, |completion| {
            let completion = completion
                .max_tokens(self.max_tokens)
                .sampling(Sampling { seed, ..self.sampling.clone() })
                .stops(&self.stops)
                .draft(self.draft.clone());
            let answer = completion.listen(|event| stream.take(event))?;
            stream.end();
            if stream.has_failed() {
                return Err(boostr::Error::Interrupted { path: "stdout".into() });
            }
            Ok(answer)
        });
        stream.check()?;
        let SessionAnswer { answer, reused, committed } = said.map_err(|error| match error {
            SessionError::Other(error @ boostr::Error::Argument { name: "logits", .. }) => {
                bad_logits(&self.lm, error)
            }
            error => refused(error),
        })?;
        let Some(committed) = committed else {
            self.term.say("note: stopped before the answer began: nothing is kept");
            return Ok(());
        };
        if let Some(error) = committed.unsaved {
            let error = anyhow::Error::from(error);
            self.term.say(format!("note: the text is kept, the state is not: {error:#}"));
        }
        context::note(&self.lm.model, answer.position, self.term);
        let answered = Answered {
            tokens: answer.ids.len(),
            guessed: answer.drafted,
            accepted: answer.accepted,
            decode: answer.timings.decode,
            reused,
            evaluated: answer.prompt.len() - reused,
            state_bytes: answer.state.size_in_bytes(),
        };
        if self.term.chatty() {
            self.dim(&answered.line(session.summary().position));
        }
        self.last = Some(answered);
        Ok(())
    }

    /// The session, which begins now if it has not yet.
    fn begun(&mut self) -> Result<Session<Cpu>> {
        if let Some(session) = &self.session {
            return Ok(session.clone());
        }
        let names = (1..=MAX_UNNAMED).map(|i| match i {
            1 => UNNAMED.to_owned(),
            i => format!("{UNNAMED}-{i}"),
        });
        for name in names {
            match self.sessions.delete(&name) {
                Ok(()) | Err(SessionError::Missing { .. }) => {}
                // Another chat has it.
                Err(SessionError::Busy { .. }) => continue,
                Err(error) => return Err(refused(error)),
            }
            let session = self.sessions.create(&name, self.system.as_deref()).map_err(refused)?;
            self.session = Some(session.clone());
            return Ok(session);
        }
        Err(usage(format!(
            "{MAX_UNNAMED} conversations without a name at once: name one by --session"
        )))
    }

    fn assistant(&self) -> Assistant<'_, Cpu> {
        Assistant { lm: &self.lm, template: &self.template, name: &self.model }
    }

    fn dim(&self, text: &str) {
        self.term.say_in(Style::Dim, text);
    }

    /// What was asked for.
    fn print(text: &str) -> Result<()> {
        Ok(writeln!(io::stdout().lock(), "{}", shown(text))?)
    }

    fn folder(&self) -> PathBuf {
        self.sessions.folder().to_path_buf()
    }
}

impl Answered {
    fn line(&self, position: usize) -> String {
        let Self { tokens, decode, reused, evaluated, state_bytes, .. } = self;
        // The first token comes from the prompt's pass.
        let rate = tokens.saturating_sub(1) as f64 / decode.as_secs_f64().max(1e-9);
        let guessed = if self.guessed > 0 {
            format!(", {} of {} guesses right", self.accepted, self.guessed)
        } else {
            String::new()
        };
        format!(
            "{rate:.1} tokens/s  {tokens} tokens, {evaluated} read, {reused} reused{guessed}  state {}  position {position}",
            system::bytes(*state_bytes as u64),
        )
    }
}
