//! `boostr run`: completes a prompt or answers it, and says how fast.

use std::ffi::OsString;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use boostr::backend::Cpu;
use boostr::checkpoint::Summary;
use boostr::engine::{Draft, Finish, Timings};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::{Logits, Run};
use boostr::ops::KvType;
use boostr::sample::{SamplerConfig, StopStrings};
use boostr::state_file::About;
use boostr::text::{Answer, BeamAnswer, Completion};
use clap::Args;
use serde_json::{Value, json};

use crate::cli::parse_max_tokens;
use crate::commands::state;
use crate::exit::{BadModel, Interrupted, usage};
use crate::model::Source;
use crate::options::context::{self, ContextArgs};
use crate::options::draft::DraftArgs;
use crate::options::grammar::{self, GrammarArgs};
use crate::options::model::ModelArgs;
use crate::options::sampling::{self, SamplingArgs};
use crate::options::state::RunStateArgs;
use crate::options::template::{self, TemplateArgs};
use crate::places::StateWord;
use crate::prompt::{self, Prompt};
use crate::stream::{self, Show, Stream};
use crate::system;
use crate::term::{Style, Term};

const EXAMPLES: &str = "\
Examples:
  boostr run ./mamba2-370m -p \"The sea was\" -n 64
  boostr run ./mamba2-370m --temp 0 --json < notes.txt
  boostr run smollm2-instruct.gguf -p \"What is the capital of France?\"
  boostr run smollm2-instruct.gguf --raw -p \"The capital of France is\"
  boostr run ./mamba2-370m -f book.txt -n 0 --save-state book.state
  boostr run ./mamba2-370m --state book.state -p \"The moral is\"";

const NOTES: &str = "\
A model with a chat template is told the prompt as a message of the user and answers it; --raw completes the text as \
it is, as every other model does. The text goes to stdout, everything else to stderr. One newline at the end of a file or of stdin is no \
part of the prompt. Without -n, generation ends at the model's end token or after max_new_tokens of \
generation_config.json, else 128 tokens. Sampling follows generation_config.json: without do_sample \
it is greedy, until --temp, --top-k, --top-p or --min-p ask for more. Each option here is also an \
environment variable (BOOSTR_TEMP, BOOSTR_TOP_K, ...); an option wins over its variable.";

/// Complete a prompt, or answer it
#[derive(Debug, Args)]
#[command(alias = "generate", before_help = EXAMPLES, after_help = NOTES)]
pub struct RunArgs {
    /// The model, unless -m names it; then this is the prompt
    #[arg(value_name = "MODEL")]
    pub first: Option<OsString>,
    /// The prompt
    #[arg(value_name = "PROMPT")]
    pub second: Option<OsString>,
    /// The prompt; - reads it from stdin
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    #[arg(conflicts_with_all = ["file", "tokens"])]
    pub prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(short, long, value_name = "PATH", conflicts_with = "tokens")]
    pub file: Option<PathBuf>,
    /// Token ids as the prompt, like 5,17,3; ids are printed in place of text
    #[arg(long, value_name = "IDS")]
    #[arg(conflicts_with_all = ["system", "chat_template", "chat_template_kwargs"])]
    pub tokens: Option<String>,
    /// Most tokens to generate; -1 for no limit
    #[arg(short = 'n', long, alias = "n-predict", value_name = "N", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_MAX_TOKENS", hide_env = true, value_parser = parse_max_tokens)]
    pub max_tokens: Option<usize>,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Look for the likeliest text by a beam search of N beams, in place of sampling
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    #[arg(conflicts_with_all = ["draft", "json_schema", "grammar", "regex", "save_state"])]
    #[arg(conflicts_with_all = ["temp", "top_k", "top_p", "min_p", "repeat_penalty"])]
    pub beams: Option<u8>,
    #[command(flatten)]
    pub draft: DraftArgs,
    /// One JSON object with text, ids, finish_reason and timings
    #[arg(long)]
    pub json: bool,
    /// Whether names of control tokens, as <|im_start|>, are those tokens in a prompt that is completed as it is; in a
    /// message they are text
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    pub parse_special: bool,
    #[command(flatten)]
    pub state: RunStateArgs,
    #[command(flatten)]
    pub chat: TemplateArgs,
    #[command(flatten)]
    pub grammar: GrammarArgs,
    #[command(flatten)]
    pub context: ContextArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

pub fn run(args: &RunArgs, bare: bool, term: &Term) -> Result<()> {
    let (source, options, text) = model_and_text(args)?;
    let options = args.context.of(options);
    source.check_exists()?;
    let prompt = prompt_of(args, bare, text)?;
    let is_own_prompt = prompt.is_none();
    let prompt = match prompt {
        Some(prompt) => prompt,
        None if args.state.state.is_some() => {
            return Err(usage("no prompt: --state goes on with what -p, -f or stdin says"));
        }
        None => Prompt::Text(built_in_prompt(&source)?),
    };
    StopStrings::new(&args.stop).map_err(|error| usage(error.to_string()))?;
    let grammar = args.grammar.read()?;

    // Before the model: what cannot be saved need not be computed.
    let word = |word: &Option<PathBuf>| {
        let folder = args.state.states.as_deref();
        word.as_deref().map(|word| StateWord::new(word, folder)).transpose()
    };
    let (from, to) = (word(&args.state.state)?, word(&args.state.save_state)?);
    let out = to.as_ref().map(StateWord::lock).transpose()?;

    let start = Instant::now();
    let saved = from.as_ref().map(|word| state::open(word.path())).transpose()?;
    let mut lm = source.open(&OpenOptions { progress: term.opening(), ..options }, &term.cpu)?;
    template::apply(&args.chat, &mut lm)?;
    term.warn_all(&lm.warnings);
    let (state, seen) = match &saved {
        Some(saved) => (saved.restore(&lm.model).map_err(BadModel::from)?, saved.ids()),
        None => (lm.model.new_state()?, Some(&[][..])),
    };
    let reused = state.position();
    let load = start.elapsed();
    let message = match &prompt {
        Prompt::Text(text) if saved.is_none() => template::ids(&args.chat, &lm, text)?,
        _ => None,
    };
    let is_chat = message.is_some();
    let ids = match message {
        Some(ids) => prompt.check(&ids, &lm).map(|()| ids)?,
        None if saved.is_some() => prompt.ids_after(&lm, args.parse_special)?,
        None => prompt.ids(&lm, args.parse_special)?,
    };
    let sampling = args.sampling.sampling();
    let sampler = sampling::config(&sampling, &lm.defaults)?;
    let constraint =
        grammar.as_ref().map(|grammar| grammar::constraint(grammar, &lm)).transpose()?;
    if !args.stop.is_empty() {
        lm.tokenizer().map_err(BadModel::from)?;
    }
    let summary = lm.files.clone();
    if source == Source::Embedded && term.chatty() && !args.json {
        banner(&source, &summary, is_own_prompt, term);
    }

    // What is to be saved is saved however the process is asked to end.
    if out.is_some() {
        stream::catch_signals();
    } else {
        stream::catch_interrupt();
    }
    let show = match (&prompt, args.json) {
        (_, true) => Show::Nothing,
        (Prompt::Text(_), _) => Show::Text,
        (Prompt::Ids(_), _) => Show::Ids,
    };
    let draft = args.draft.open(&args.model, &lm)?;
    let of_draft = draft.as_ref().map_or([0; 2], Draft::placed);
    let placed = [0, 1].map(|at| lm.model.placed()[at] + of_draft[at]);
    let completion = lm
        .complete_ids(ids.clone())
        .after(seen.unwrap_or(&[]).to_vec(), state)
        .max_tokens(args.max_tokens.unwrap_or_else(|| sampling::max_tokens(&lm.defaults)))
        .sampling(sampling)
        .stops(&args.stop)
        .constraint(constraint)
        .draft(draft);
    if let Some(width) = args.beams {
        return beams(&lm, completion, usize::from(width), show, term);
    }
    let mut stream = Stream::new(show, term);
    let mut answer =
        completion.listen(|event| stream.take(event)).map_err(|error| bad_logits(&lm, error))?;
    stream.end();
    term.warn_all(&lm.notices());
    stream.check()?;
    if let Some(out) = &out {
        let all = [&*ids, &answer.ids].concat();
        let computed = answer.state.position() - reused;
        if computed < ids.len() {
            term.say("note: interrupted in the prompt: no state is saved");
        } else {
            // The last token was shown, and not needed yet.
            let (tokens, state) = (&all[computed..], &mut answer.state);
            lm.model.forward(&mut [Run { tokens, state }], Logits::None)?;
            let ids = seen.map(|seen| [seen, &all].concat());
            let (model, dtype) = (&*source.name(), args.state.state_type.into());
            out.save(&lm.model, &answer.state, &About { model, ids: ids.as_deref(), dtype })?;
        }
    }

    context::note(&lm.model, answer.position, term);
    let report = Report {
        source: &source,
        summary,
        sampler,
        load,
        is_chat,
        prompt_n: ids.len(),
        reused,
        context: context::describe(&lm.model),
        placed,
        grows: lm.model.family().layers().iter().any(|layer| {
            let (_, of_a_token) = layer.state_bytes(term.cpu.level(), KvType::F32);
            of_a_token > 0
        }),
        answer,
    };
    if args.json {
        term.print_json(&report.json(&lm))?;
    }
    if term.chatty() {
        report.say(term);
    } else if bare {
        term.say(report.line());
    }
    if source == Source::Embedded && term.chatty() {
        term.say(format_args!("next: {NEXT}"));
    }
    if stream::is_interrupted() { Err(Interrupted.into()) } else { Ok(()) }
}

/// Shows the likeliest of `width` beams, or with `--json` all of them.
fn beams(
    lm: &LanguageModel<Cpu>,
    completion: Completion<'_, Cpu>,
    width: usize,
    show: Show,
    term: &Term,
) -> Result<()> {
    let answers = completion.beams(width, |_| {
        if stream::is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let answers = answers.map_err(|error| bad_logits(lm, error))?;
    term.warn_all(&lm.notices());
    let best = answers.first();
    match show {
        Show::Nothing => {
            let beams = answers.iter().map(|beam| {
                let BeamAnswer { text, ids, logprob, finish } = beam;
                json!({"text": text, "ids": ids, "logprob": logprob, "finish_reason": finish.name()})
            });
            term.print_json(&json!({"beams": beams.collect::<Vec<_>>()}))?;
        }
        Show::Text => {
            let text = term.text(best.map(|beam| &*beam.text).unwrap_or_default());
            write!(io::stdout().lock(), "{text}{}", if text.ends_with('\n') { "" } else { "\n" })?;
        }
        Show::Ids => {
            let ids = best.into_iter().flat_map(|beam| &beam.ids).map(u32::to_string);
            writeln!(io::stdout().lock(), "{}", ids.collect::<Vec<_>>().join(" "))?;
        }
    }
    if stream::is_interrupted() { Err(Interrupted.into()) } else { Ok(()) }
}

/// Logits that are no numbers come from weights that are none: an error about the model's file.
pub fn bad_logits(lm: &LanguageModel<Cpu>, error: boostr::Error) -> anyhow::Error {
    match error {
        boostr::Error::Argument { name: "logits", reason } => BadModel {
            error: boostr::Error::Format {
                path: lm.path.clone(),
                reason: format!("its logits are not to be used: {reason}"),
            },
            help: Some("`boostr verify MODEL --values` looks for the tensors that cause it".into()),
        }
        .into(),
        other => other.into(),
    }
}

const NEXT: &str = "boostr MODEL -p TEXT | boostr show | boostr doctor | boostr --help";

/// The model that a command line means, and the text it has as a word.
fn model_and_text(args: &RunArgs) -> Result<(Source, OpenOptions, Option<&OsString>)> {
    let (model, text) = match (&args.model.model, &args.first, &args.second) {
        (Some(_), Some(_), Some(extra)) => {
            let extra = extra.to_string_lossy();
            return Err(usage(format!("unexpected `{extra}`: the model is named by -m already")));
        }
        (Some(model), text, _) => (Some(model.as_path()), text),
        (None, first, second) => (first.as_ref().map(Path::new), second),
    };
    let (source, options) = args.model.source(model)?;
    Ok((source, options, text.as_ref()))
}

/// The prompt that the user gives; `None` when there is none.
fn prompt_of(args: &RunArgs, bare: bool, text: Option<&OsString>) -> Result<Option<Prompt>> {
    if let Some(ids) = &args.tokens {
        if text.is_some() {
            return Err(usage("both a prompt and --tokens are given"));
        }
        return Ok(Some(Prompt::Ids(prompt::parse_ids(ids)?)));
    }
    let given = match (text, &args.prompt, &args.file) {
        (Some(text), None, None) => Some(prompt::text_of(text)?),
        (Some(_), ..) => return Err(usage("two prompts are given")),
        (None, text, _) => text.clone(),
    };
    if bare {
        // Alone it must end whatever stdin is, be it a pipe that nobody closes.
        return Ok(None);
    }
    let is_given = given.is_some() || args.file.is_some();
    let text = prompt::read_text(given.as_deref(), args.file.as_deref())?;
    Ok(text.filter(|text| is_given || !text.is_empty()).map(Prompt::Text))
}

fn built_in_prompt(source: &Source) -> Result<String> {
    match source {
        #[cfg(feature = "demo")]
        Source::Embedded => Ok(crate::model::demo::PROMPT.to_owned()),
        _ => Err(usage(
            "no prompt: give one with -p TEXT, -f FILE, or on stdin; `boostr chat` talks",
        )),
    }
}

/// Says what the built-in model is, before it speaks.
fn banner(source: &Source, summary: &Summary, is_own_prompt: bool, term: &Term) {
    let threads = rayon::current_num_threads();
    let head = format!(
        "boostr {}  {} (embedded, {} params, {}, {})  {threads} threads {}",
        env!("CARGO_PKG_VERSION"),
        source.name(),
        system::count(summary.parameters as u64),
        summary.dtype,
        system::bytes(summary.bytes as u64),
        term.cpu.level(),
    );
    term.say_in(Style::Bold, &head);
    let words = "a demo, not an assistant: it writes prose like its sources, and knows nothing";
    term.say_in(Style::Dim, words);
    #[cfg(feature = "demo")]
    if is_own_prompt {
        let prompt = crate::model::demo::PROMPT;
        if term.stderr_tty && term.stdout_tty {
            // On one screen the prompt and its continuation read as one text.
            term.say_part_in(Style::Dim, prompt);
        } else {
            term.say(format_args!("> {prompt}"));
        }
    }
    #[cfg(not(feature = "demo"))]
    let _ = is_own_prompt;
}

/// What there is to say of a run when it is over.
struct Report<'a> {
    source: &'a Source,
    summary: Summary,
    sampler: SamplerConfig,
    load: Duration,
    /// Whether the prompt was a message in the model's chat template.
    is_chat: bool,
    prompt_n: usize,
    /// Tokens that came with the state.
    reused: usize,
    /// How long a sequence may be, in words.
    context: String,
    /// Bytes of weights in files and in memory.
    placed: [usize; 2],
    /// Whether the state grows with each token.
    grows: bool,
    answer: Answer<Cpu>,
}

impl Report<'_> {
    /// Tokens that the time of `decode` is for: the first comes from the prompt's pass.
    fn decoded(&self) -> usize {
        let sampled = self.answer.ids.len() + usize::from(self.answer.finish == Finish::Eos);
        sampled.saturating_sub(1)
    }

    /// Lines with the labels of other runtimes.
    fn say(&self, term: &Term) {
        let Timings { prompt, first_token, decode, .. } = self.answer.timings;
        let ids = &self.answer.ids;
        let Summary { parameters, bytes, ref dtype, .. } = self.summary;
        let place = if *self.source == Source::Embedded { "embedded" } else { "from disk" };
        let mut lines = vec![
            format!(
                "load time:           {:8.0} ms  ({}, {} params, {dtype}, {}, {place})",
                milliseconds(self.load),
                self.source.name(),
                system::count(parameters as u64),
                system::bytes(bytes as u64),
            ),
            format!(
                "prompt eval rate:    {:8.2} tokens/s  ({} tokens{})",
                rate(self.prompt_n, prompt),
                self.prompt_n,
                if self.reused > 0 {
                    format!(", {} more reused from the state", self.reused)
                } else {
                    String::new()
                }
            ),
            format!(
                "eval rate:           {:8.2} tokens/s  ({} tokens)",
                rate(self.decoded(), decode),
                ids.len()
            ),
        ];
        let Answer { drafted: guessed, accepted: right, .. } = self.answer;
        if guessed > 0 {
            lines.push(format!("guesses:             {guessed} tokens, {right} were right"));
        }
        if !ids.is_empty() {
            lines.push(format!("time to first token: {:8.1} ms", milliseconds(first_token)));
        }
        lines.push(format!("state:               {}", self.state()));
        if let Some(peak) = system::peak_memory() {
            lines.push(format!("peak memory:         {}", system::bytes(peak)));
        }
        if term.verbose {
            let prompt = if self.is_chat { "a message, by the chat template" } else { "as it is" };
            lines.push(format!("prompt:              {prompt}"));
            lines.push(format!("context:             {}", self.context));
            let [in_files, in_memory] = self.placed.map(|bytes| system::bytes(bytes as u64));
            lines.push(format!(
                "weights:             {in_files} in files, read where they are used, {in_memory} in memory"
            ));
            lines.push(format!("sampling:            {}", sampling::describe(&self.sampler)));
        }
        for line in lines {
            term.say_in(Style::Dim, &line);
        }
    }

    /// The same in one line.
    fn line(&self) -> String {
        let (decode, ids) = (self.answer.timings.decode, &self.answer.ids);
        format!(
            "{}, a demo and no assistant: {} tokens, {:.0} tokens/s, state {}; next: {NEXT}",
            self.source.name(),
            ids.len(),
            rate(self.decoded(), decode),
            self.state(),
        )
    }

    fn state(&self) -> String {
        let state = &self.answer.state;
        let bytes = system::bytes(state.size_in_bytes() as u64);
        let kind = if self.grows { "grows with the text" } else { "constant" };
        format!("{bytes}, {kind} (position {})", self.answer.position)
    }

    fn json(&self, lm: &LanguageModel<Cpu>) -> Value {
        let text = lm.tokenizer.as_ref().map(|_| &self.answer.text);
        let Timings { prompt, first_token, decode, .. } = self.answer.timings;
        let ids = &self.answer.ids;
        let path = (*self.source != Source::Embedded).then(|| lm.path.display().to_string());
        json!({
            "model": self.source.name(),
            "path": path,
            "chat": self.is_chat,
            "text": text,
            "ids": ids,
            "prompt_tokens": self.prompt_n,
            "completion_tokens": ids.len(),
            "finish_reason": self.answer.finish.name(),
            "seed": self.sampler.seed,
            "sampling": {
                "temperature": short(self.sampler.temperature),
                "top_k": self.sampler.top_k,
                "top_p": short(self.sampler.top_p),
                "min_p": short(self.sampler.min_p),
                "repeat_penalty": short(self.sampler.repetition_penalty),
                "repeat_last_n": self.sampler.repetition_window,
            },
            "timings": {
                "load_ms": milliseconds(self.load),
                "cache_n": self.reused,
                "prompt_n": self.prompt_n,
                "prompt_ms": milliseconds(prompt),
                "prompt_per_token_ms": per_token(self.prompt_n, prompt),
                "prompt_per_second": rate(self.prompt_n, prompt),
                "predicted_n": ids.len(),
                "draft_n": self.answer.drafted,
                "draft_n_accepted": self.answer.accepted,
                "predicted_ms": milliseconds(decode),
                "predicted_per_token_ms": per_token(self.decoded(), decode),
                "predicted_per_second": rate(self.decoded(), decode),
                "time_to_first_token_ms": (!ids.is_empty()).then(|| milliseconds(first_token)),
            },
            "state_bytes": self.answer.state.size_in_bytes(),
            "position": self.answer.position,
            "threads": rayon::current_num_threads(),
            "peak_memory_bytes": system::peak_memory(),
        })
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn per_token(tokens: usize, time: Duration) -> f64 {
    if tokens == 0 { 0.0 } else { milliseconds(time) / tokens as f64 }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if tokens == 0 || time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

/// The f64 that is written as the f32 is: 0.7 and not 0.699999988.
fn short(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}
