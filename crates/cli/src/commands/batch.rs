//! `boostr batch`: answers a file of requests, many at once, in their order.
//!
//! A line of the input is a request of the server's API, a line of the output its answer, both as in
//! OpenAI's batch files. The output is its own record of progress: a stopped run resumes after the last
//! whole line. A line has a checksum of its request, so the answers of another input are not resumed.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use boostr::backend::Cpu;
use boostr::engine::{Engine, EngineConfig};
use boostr::load;
use boostr::threads::Threads;
use boostr_server::{Config, Limits, Server};
use clap::Args;
use serde_json::{Map, Value, json};
use tokio::task::JoinSet;

use crate::exit::{self, Interrupted, usage};
use crate::options::context::ContextArgs;
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
The same command goes on where a run was stopped, killed or not.";

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
    #[command(flatten)]
    pub context: ContextArgs,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// Longest line of an input, in bytes.
const MAX_LINE: u64 = 64 << 20;
/// For each request that is computed, so many lines are read before their turn, and answers kept for theirs.
const AHEAD: usize = 4;

/// Nobody waits.
const NO_LIMIT: Duration = Duration::from_hours(8760);

/// A line of the input.
struct Line {
    /// From 1.
    number: usize,
    text: String,
}

impl Line {
    fn checksum(&self) -> String {
        format!("{:08x}", boostr::checkpoint::crc32(0, self.text.as_bytes()))
    }
}

pub fn run(args: &BatchArgs, threads: usize, term: &Term) -> Result<()> {
    let (source, options) =
        args.model.source(args.model.model.as_deref().or(args.first.as_deref()))?;
    let options = args.context.of(options);
    source.check_exists()?;
    if args.input == args.out {
        return Err(usage("--in and --out are one file"));
    }
    let mut input = Input::open(&args.input)?;
    let total = input.count()?;
    let mut output = Output::open(&args.out)?;
    let done = output.resume(&mut input)?;
    if done > 0 {
        term.say(format_args!("{done} of {total} lines are answered already"));
    }
    if done == total {
        return Ok(());
    }

    let lm = Arc::new(
        source.open(&load::OpenOptions { progress: term.opening(), ..options }, &term.cpu)?,
    );
    let parallel = usize::from(args.parallel);
    let sizes = EngineConfig {
        max_running: parallel,
        max_queue: parallel,
        threads: Some(Threads::new(threads)?),
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
    server.load(lm, engine, None, None).map_err(exit::of_server)?;

    stream::catch_interrupt();
    let bar = term.bar("{bar:32} {pos}/{len} requests, {eta} left {msg}");
    bar.set_length(total as u64);
    bar.set_position(done as u64);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting threads")?;
    let failed =
        runtime.block_on(answer_all(&server, input, &mut output, done, parallel, |failed| {
            bar.inc(1);
            if failed > 0 {
                bar.set_message(format!("({failed} failed)"));
            }
        }))?;
    output.sync()?;
    bar.finish_and_clear();
    if stream::is_interrupted() {
        term.say("stopped: the same command goes on where this one ended");
        return Err(Interrupted.into());
    }
    term.say(format_args!("{} answers in {}", total, args.out.display()));
    if failed > 0 {
        bail!("{failed} of {} requests failed: their lines have `error`", total - done);
    }
    Ok(())
}

/// Answers what is left of `input`, and writes the answers in its order. Returns how many failed.
async fn answer_all(
    server: &Server<Cpu>,
    mut input: Input,
    output: &mut Output,
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
                    let server = server.clone();
                    running.spawn(async move { (line.number, answer(&server, &line).await) });
                }
                None => is_end = true,
            }
            continue;
        }
        // What runs is finished after an interrupt too, so that no answer is computed for nothing; a second one ends all.
        let Some(result) = running.join_next().await else { return Ok(failed) };
        let (number, answer) = result.context("answering")?;
        ready.insert(number, answer);
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
    let (custom_id, response) = match request(&line.text) {
        Ok((custom_id, url, body)) => (custom_id, server.answer(&url, body.to_string()).await),
        Err(reason) => {
            let message = format!("line {}: {reason}", line.number);
            let error = json!({"message": message, "type": "invalid_request_error", "param": null, "code": null});
            (Value::Null, (400, json!({"error": error})))
        }
    };
    let (status, body) = response;
    let is_failure = status != 200;
    let error =
        if is_failure { body.get("error").cloned().unwrap_or_default() } else { Value::Null };
    let line = json!({
        "id": format!("line-{}", line.number),
        "custom_id": custom_id,
        "response": if is_failure { Value::Null } else { json!({"status_code": status, "body": body}) },
        "error": error,
        "request_crc32": line.checksum(),
    });
    (line.to_string(), is_failure)
}

/// What a line asks: the name that it has for its answer, the path, and the body.
fn request(text: &str) -> Result<(Value, String, Value), String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("no JSON: {error}"))?;
    let Value::Object(mut line) = value else {
        return Err("expected an object with `messages`, `prompt`, or `body`".into());
    };
    let custom_id = line.remove("custom_id").unwrap_or_default();
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
    Ok((custom_id, url, Value::Object(body)))
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
}

impl Input {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("`{}`", path.display()))?;
        if !file.metadata()?.is_file() {
            bail!("`{}`: expected a file: it is read twice", path.display());
        }
        Ok(Self { file: BufReader::new(file), number: 0 })
    }

    /// How many lines there are; the next is the first again.
    fn count(&mut self) -> Result<usize> {
        let mut count = 0;
        while self.next()?.is_some() {
            count += 1;
        }
        self.file.seek(SeekFrom::Start(0))?;
        self.number = 0;
        Ok(count)
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
            if !text.trim().is_empty() {
                self.number += 1;
                return Ok(Some(Line { number: self.number, text: text.trim().to_owned() }));
            }
        }
    }
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
        match file.try_lock() {
            Err(std::fs::TryLockError::WouldBlock) => bail!("{name}: another process writes it"),
            Err(std::fs::TryLockError::Error(error))
                if error.kind() != io::ErrorKind::Unsupported =>
            {
                Err(error).context(name)
            }
            _ => Ok(Self { file, name }),
        }
    }

    /// Cuts off what was not written to its end, checks that the rest answers `input`, and leaves both at the first line
    /// that is not answered. Returns how many are.
    fn resume(&mut self, input: &mut Input) -> Result<usize> {
        let (mut done, mut end) = (0, 0);
        let mut reader = BufReader::new(&self.file);
        loop {
            let mut text = Vec::new();
            let read = reader.read_until(b'\n', &mut text)?;
            if text.last() != Some(&b'\n') {
                break;
            }
            done += 1;
            let answered: Option<Value> = serde_json::from_slice(&text).ok();
            let checksum = answered.as_ref().and_then(|line| line.get("request_crc32")?.as_str());
            let line = input.next()?;
            let expected = line.as_ref().map(Line::checksum);
            if checksum.is_none() || checksum != expected.as_deref() {
                let of = if line.is_some() { "line of --in" } else { "line: --in has no more" };
                bail!(
                    "{}: line {done} is not the answer to that {of}; give another --out, or remove it",
                    self.name
                );
            }
            end += read as u64;
        }
        drop(reader);
        self.file.set_len(end)?;
        self.file.seek(SeekFrom::Start(end))?;
        Ok(done)
    }

    fn write(&mut self, line: &str) -> Result<()> {
        // One call, so that a process that is killed leaves whole lines.
        self.file.write_all(format!("{line}\n").as_bytes()).with_context(|| self.name.clone())
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_all().with_context(|| self.name.clone())
    }
}
