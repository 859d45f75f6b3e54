//! `boostr batch`: answers a file of requests, many at once, in their order.
//!
//! A line of the input is a request of the server's API, a line of the output its answer, both as in
//! OpenAI's batch files. The output is its own record of progress: a stopped run resumes after the last
//! whole line. A line has a checksum of its request, so the answers of another input are not resumed.
//!
//! Requests that failed are asked again into a file beside, `OUT.retry`, which takes over the other
//! answers and then the name.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use boostr::backend::Cpu;
use boostr::engine::{Engine, EngineConfig};
use boostr::files;
use boostr::load;
use boostr::threads::Threads;
use boostr_server::{Config, Limits, Server};
use clap::Args;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::task::JoinSet;

use crate::exit::{self, Interrupted, usage};
use crate::options::context::ContextArgs;
use crate::options::draft::DraftArgs;
use crate::options::model::ModelArgs;
use crate::stream;
use crate::term::Term;

const EXAMPLES: &str = "\
Examples:
  boostr batch model.gguf --in questions.jsonl --out answers.jsonl
  boostr batch ./mamba2-370m --in prompts.jsonl --out texts.jsonl --parallel 16";

const NOTES: &str = "\
A line of the input is the body of a request to the server, {\"messages\": [..], \"max_tokens\": 64} or {\"prompt\": ..} \
or {\"input\": ..}, or a line of OpenAI's batch files with custom_id, url and body. Answers are in the order of the lines. \
The same command goes on where a run was stopped, killed or not. A request that failed has its status and error in `response`, \
as in OpenAI's batch files; while there are any, the exit code is 1, and --retry-failed asks them again.";

/// Answer a file of requests, many at once
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, after_help = NOTES)]
pub struct BatchArgs {
    /// The model, unless -m names it
    #[arg(value_name = "MODEL")]
    pub first: Option<PathBuf>,
    /// Requests, one JSON object a line
    #[arg(long = "in", value_name = "FILE", required = true)]
    pub input: PathBuf,
    /// Answers; what is there already is gone on with
    #[arg(long, value_name = "FILE", required = true)]
    pub out: PathBuf,
    /// Requests that are computed at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub parallel: u16,
    /// Ask those again that failed
    #[arg(long)]
    pub retry_failed: bool,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub context: ContextArgs,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// Longest line of an input, in bytes.
const MAX_LINE: u64 = 64 << 20;
/// For each request that is computed, so many lines are read before their turn, and answers kept for theirs.
const AHEAD: usize = 4;

/// Lines of one name that are told at once; all have an error of their own.
const MAX_TOLD: usize = 3;

/// Nobody waits.
const NO_LIMIT: Duration = Duration::from_hours(8760);

/// A line of the input.
struct Line {
    /// From 1.
    number: usize,
    text: String,
    /// An earlier line that has its `custom_id`.
    same: Option<usize>,
}

impl Line {
    fn checksum(&self) -> String {
        format!("{:08x}", boostr::checkpoint::crc32(0, self.text.as_bytes()))
    }
}

pub fn run(args: &BatchArgs, threads: usize, pin: bool, term: &Term) -> Result<()> {
    let (source, options) =
        args.model.source(args.model.model.as_deref().or(args.first.as_deref()))?;
    let options = args.context.of(options);
    source.check_exists()?;
    if args.input == args.out {
        return Err(usage("--in and --out are one file"));
    }
    let mut input = Input::open(&args.input)?;
    let total = input.count()?;
    for (line, (first, name)) in input.repeated.iter().take(MAX_TOLD) {
        term.warn(format_args!(
            "--in: lines {first} and {line} have one `custom_id`, {name}: the second is refused"
        ));
    }
    let mut output = Output::open(&args.out)?;
    let mut answered = output.resume(&mut input, args.retry_failed)?;
    let mut before = None;
    let retry = beside(&args.out);
    if args.retry_failed && (failed_of(&answered) > 0 || retry.exists()) {
        input.rewind()?;
        let mut again = Output::open(&retry)?;
        let asked = again.resume(&mut input, true)?;
        before = Some((std::mem::replace(&mut output, again), answered));
        answered = asked;
    }
    let (done, failed_before) = (answered.len(), failed_of(&answered));
    if done > 0 && before.is_none() {
        term.say(format_args!("{done} of {total} lines are answered already"));
    }
    if done == total {
        return finish(before.is_some(), &retry, args, (failed_before, total));
    }

    let threads = if pin { Threads::pinned(threads)? } else { Threads::new(threads)? };
    // The threads that multiply weights pack them.
    let options =
        load::OpenOptions { progress: term.opening(), threads: Some(threads.clone()), ..options };
    let lm = Arc::new(source.open(&options, &term.cpu)?);
    term.warn_all(&lm.warnings);
    let draft = args.draft.open(&args.model, &lm)?;
    let parallel = usize::from(args.parallel);
    let sizes = EngineConfig {
        max_running: parallel,
        max_queue: parallel,
        threads: Some(threads),
        ..EngineConfig::default()
    };
    let engine = Engine::<Cpu>::start(lm.clone(), sizes)?;
    let limits = Limits {
        max_body: usize::MAX,
        max_inflight: usize::MAX,
        waiting_prompts: usize::MAX,
        waiting_texts: usize::MAX,
        max_prompt: usize::MAX,
        max_tokens: usize::MAX,
        queue_time: NO_LIMIT,
        request_time: NO_LIMIT,
        ..Limits::default()
    };
    let server = Server::new(Config { model_name: source.name(), limits, ..Config::default() })?;
    server.load(lm, engine, draft, None).map_err(exit::of_server)?;

    stream::catch_signals();
    let bar = term.bar("{bar:32} {pos}/{len} requests, {eta} left {msg}");
    bar.set_length(total as u64);
    bar.set_position(done as u64);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting threads")?;
    let failed = runtime.block_on(answer_all(
        &server,
        input,
        &mut output,
        before.as_mut(),
        done,
        parallel,
        |failed| {
            bar.inc(1);
            if failed > 0 {
                bar.set_message(format!("({failed} failed)"));
            }
        },
    ))?;
    output.sync()?;
    bar.finish_and_clear();
    if stream::is_interrupted() {
        term.say("stopped: the same command goes on where this one ended");
        return Err(Interrupted.into());
    }
    term.say(format_args!("{} answers in {}", total, args.out.display()));
    finish(before.is_some(), &retry, args, (failed + failed_before, total))
}

/// Gives the answers of a second try their name, and says whether some requests failed.
fn finish(
    is_retry: bool,
    retry: &Path,
    args: &BatchArgs,
    (failed, total): (usize, usize),
) -> Result<()> {
    if is_retry {
        fs::rename(retry, &args.out).with_context(|| format!("`{}`", args.out.display()))?;
    }
    if failed > 0 {
        bail!(
            "{failed} of {total} requests failed: their lines have the status and the error in `response`; \
             --retry-failed asks them again"
        );
    }
    Ok(())
}

/// Where requests are asked again before the answers take the name of the first.
fn beside(out: &Path) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push(".retry");
    name.into()
}

fn failed_of(answered: &[Answered]) -> usize {
    answered.iter().filter(|line| line.is_failure).count()
}

/// Answers what is left of `input`, and writes the answers in its order. Returns how many failed.
async fn answer_all(
    server: &Server<Cpu>,
    mut input: Input,
    output: &mut Output,
    mut before: Option<&mut (Output, Vec<Answered>)>,
    done: usize,
    parallel: usize,
    mut progress: impl FnMut(usize),
) -> Result<usize> {
    let mut running = JoinSet::new();
    let mut ready: BTreeMap<usize, (String, bool)> = BTreeMap::new();
    let (mut next, mut failed, mut is_end) = (done + 1, 0, false);
    loop {
        let ahead = running.len() + ready.len();
        if !is_end
            && running.len() < parallel
            && ahead < AHEAD * parallel
            && !stream::is_interrupted()
        {
            match input.next()? {
                Some(line) => {
                    let kept =
                        before.as_mut().map(|(output, lines)| output.answer(lines, line.number));
                    if let Some(text) = kept.transpose()?.flatten() {
                        ready.insert(line.number, (text, false));
                        continue;
                    }
                    let server = server.clone();
                    running.spawn(async move { (line.number, answer(&server, &line).await) });
                }
                None => is_end = true,
            }
            continue;
        }
        // What runs is finished after a signal too, so that no answer is computed for nothing; a second one ends all.
        if let Some(result) = running.join_next().await {
            let (number, answer) = result.context("answering")?;
            ready.insert(number, answer);
        } else if !ready.contains_key(&next) {
            return Ok(failed);
        }
        while let Some((text, is_failure)) = ready.remove(&next) {
            output.write(&text)?;
            failed += usize::from(is_failure);
            next += 1;
            progress(failed);
        }
    }
}

/// The line of the output for one of the input, and whether it is an error.
async fn answer(server: &Server<Cpu>, line: &Line) -> (String, bool) {
    let value = serde_json::from_str(&line.text).map_err(|error| format!("no JSON: {error}"));
    // Whatever is wrong with the rest, the answer has its name.
    let custom_id = value.as_ref().ok().and_then(|value: &Value| value.get("custom_id"));
    let custom_id = custom_id.cloned().unwrap_or_default();
    let value = match line.same {
        Some(first) => Err(format!(
            "`custom_id` {custom_id} is that of line {first} too: expected another for each line"
        )),
        None => value,
    };
    let (status, body) = match value.and_then(request) {
        Ok((url, body)) => server.answer(&url, body.to_string()).await,
        Err(reason) => {
            let message = format!("line {}: {reason}", line.number);
            let error = json!({"message": message, "type": "invalid_request_error", "param": null, "code": null});
            (400, json!({"error": error}))
        }
    };
    let answer = json!({
        "id": format!("line-{}", line.number),
        "custom_id": custom_id,
        "response": {"status_code": status, "body": body},
        "error": null,
        "request_crc32": line.checksum(),
    });
    (answer.to_string(), status != 200)
}

/// What a line asks: the path and the body.
fn request(value: Value) -> Result<(String, Value), String> {
    let Value::Object(mut line) = value else {
        return Err("expected an object with `messages`, `prompt`, or `body`".into());
    };
    line.remove("custom_id");
    let url = line.remove("url");
    let method = line.remove("method");
    if method.as_ref().is_some_and(|method| method != "POST") {
        return Err(format!("`method`: expected \"POST\", found {}", method.unwrap_or_default()));
    }
    let mut body = match line.remove("body") {
        Some(Value::Object(body)) => body,
        Some(other) => return Err(format!("`body`: expected an object, found {other}")),
        None => line,
    };
    // There is nobody to stream to.
    body.remove("stream");
    let url = match url {
        Some(Value::String(url)) => url,
        Some(other) => return Err(format!("`url`: expected a path, found {other}")),
        None => path_for(&body)?.to_owned(),
    };
    if !matches!(&*url, "/v1/chat/completions" | "/v1/completions" | "/v1/embeddings") {
        let paths = "/v1/chat/completions, /v1/completions or /v1/embeddings";
        return Err(format!("`url`: expected {paths}, found \"{url}\""));
    }
    Ok((url, Value::Object(body)))
}

fn path_for(body: &Map<String, Value>) -> Result<&'static str, String> {
    let has = |name| body.contains_key(name);
    match (has("messages"), has("prompt"), has("input")) {
        (true, false, false) => Ok("/v1/chat/completions"),
        (false, true, false) => Ok("/v1/completions"),
        (false, false, true) => Ok("/v1/embeddings"),
        _ => Err("expected one of `messages`, `prompt` and `input`".into()),
    }
}

/// The lines of a file that are not empty.
struct Input {
    file: BufReader<File>,
    number: usize,
    /// Nothing is read yet.
    is_start: bool,
    /// Of lines whose `custom_id` an earlier one has, that line and the name.
    repeated: BTreeMap<usize, (usize, String)>,
}

impl Input {
    fn open(path: &Path) -> Result<Self> {
        let file = files::open(path)?;
        if !file.metadata()?.is_file() {
            bail!("`{}`: expected a file: it is read twice", path.display());
        }
        Ok(Self {
            file: BufReader::new(file),
            number: 0,
            is_start: true,
            repeated: BTreeMap::new(),
        })
    }

    /// How many lines there are, and which have the `custom_id` of another; the next is the first again.
    fn count(&mut self) -> Result<usize> {
        let mut names: HashMap<String, usize> = HashMap::new();
        let mut count = 0;
        while let Some(line) = self.next()? {
            count += 1;
            let Ok(Named { custom_id: Some(name) }) = serde_json::from_str(&line.text) else {
                continue;
            };
            match names.entry(name.to_string()) {
                Entry::Occupied(first) => {
                    let same = (*first.get(), first.key().clone());
                    self.repeated.insert(line.number, same);
                }
                Entry::Vacant(free) => {
                    free.insert(line.number);
                }
            }
        }
        self.rewind()?;
        Ok(count)
    }

    fn rewind(&mut self) -> Result<()> {
        self.file.seek(SeekFrom::Start(0))?;
        (self.number, self.is_start) = (0, true);
        Ok(())
    }

    fn next(&mut self) -> Result<Option<Line>> {
        loop {
            let mut bytes = Vec::new();
            let read = (&mut self.file).take(MAX_LINE + 1).read_until(b'\n', &mut bytes)?;
            if read == 0 {
                return Ok(None);
            }
            if read as u64 > MAX_LINE {
                bail!("--in: line {} is longer than {MAX_LINE} bytes", self.number + 1);
            }
            let text = String::from_utf8(bytes);
            let text =
                text.with_context(|| format!("--in: line {} is not UTF-8", self.number + 1))?;
            let is_first = std::mem::take(&mut self.is_start);
            let text = if is_first { files::without_bom(&text) } else { &text }.trim();
            if !text.is_empty() {
                self.number += 1;
                let same = self.repeated.get(&self.number).map(|(first, _)| *first);
                return Ok(Some(Line { number: self.number, text: text.to_owned(), same }));
            }
        }
    }
}

/// The name that a line has for its answer.
#[derive(Deserialize)]
struct Named {
    custom_id: Option<Value>,
}

/// A line of answers.
struct Answered {
    start: u64,
    len: u64,
    is_failure: bool,
}

/// The answers so far.
struct Output {
    file: File,
    name: String,
}

impl Output {
    /// Opens it for this process alone.
    fn open(path: &Path) -> Result<Self> {
        let name = format!("`{}`", path.display());
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let file = file.with_context(|| name.clone())?;
        // It is read before it is written, and cut.
        if !file.metadata().with_context(|| name.clone())?.is_file() {
            bail!("{name}: expected a regular file for the answers");
        }
        match file.try_lock() {
            Err(fs::TryLockError::WouldBlock) => bail!("{name}: another process writes it"),
            Err(fs::TryLockError::Error(error)) if error.kind() != io::ErrorKind::Unsupported => {
                Err(error).context(name)
            }
            _ => Ok(Self { file, name }),
        }
    }

    /// Cuts off what was not written to its end, checks that the rest answers `input`, and leaves both at the first line
    /// that is not answered. Returns those that are. With `is_retry` a line whose answer failed may be another now.
    fn resume(&mut self, input: &mut Input, is_retry: bool) -> Result<Vec<Answered>> {
        let (mut answers, mut end) = (Vec::new(), 0);
        let mut reader = BufReader::new(&self.file);
        loop {
            let mut text = Vec::new();
            let read = reader.read_until(b'\n', &mut text)?;
            if text.last() != Some(&b'\n') {
                break;
            }
            let done = answers.len() + 1;
            let answered: Option<Value> = serde_json::from_slice(&text).ok();
            let checksum = answered.as_ref().and_then(|line| line.get("request_crc32")?.as_str());
            let line = input.next()?;
            let expected = line.as_ref().map(Line::checksum);
            let is_failure = answered.as_ref().is_none_or(is_failure);
            let is_mended = is_failure && checksum.is_some() && line.is_some();
            let is_answer = checksum.is_some() && checksum == expected.as_deref();
            if !(is_answer || is_mended && is_retry) {
                let of = if line.is_some() { "line of --in" } else { "line: --in has no more" };
                let how = if is_mended { "; --retry-failed asks it again" } else { "" };
                bail!(
                    "{}: line {done} is not the answer to that {of}{how}; give another --out, or remove it",
                    self.name
                );
            }
            let (start, len) = (end, read as u64);
            answers.push(Answered { start, len, is_failure });
            end += len;
        }
        drop(reader);
        self.file.set_len(end)?;
        self.file.seek(SeekFrom::Start(end))?;
        Ok(answers)
    }

    /// The answer to a line of the input, unless it failed or there is none.
    fn answer(&mut self, lines: &[Answered], number: usize) -> Result<Option<String>> {
        let line = number.checked_sub(1).and_then(|index| lines.get(index));
        let Some(line) = line.filter(|line| !line.is_failure) else { return Ok(None) };
        let mut text = String::new();
        self.file.seek(SeekFrom::Start(line.start))?;
        (&mut self.file)
            .take(line.len)
            .read_to_string(&mut text)
            .with_context(|| self.name.clone())?;
        Ok(Some(text.trim_end().to_owned()))
    }

    fn write(&mut self, line: &str) -> Result<()> {
        // One call, so that a process that is killed leaves whole lines.
        self.file.write_all(format!("{line}\n").as_bytes()).with_context(|| self.name.clone())
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_all().with_context(|| self.name.clone())
    }
}

/// Whether an answer is none: of another status, or as earlier versions wrote it, with an error.
fn is_failure(answer: &Value) -> bool {
    let status = answer.pointer("/response/status_code").and_then(Value::as_u64);
    status != Some(200) || answer.get("error").is_some_and(|error| !error.is_null())
}
