//! `boostr serve`: a model over HTTP.

use std::fs;
use std::io::{self, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
#[cfg(unix)]
use std::time::Instant;

use anyhow::{Context, Result};
use boostr::backend::Cpu;
use boostr::engine::{Draft, Engine, EngineConfig, SpillFolder};
use boostr::load::LanguageModel;
use boostr::models::Model;
use boostr::ops::{KvType, Level};
use boostr::session::{STATES, Sessions};
use boostr::threads::Threads;
use boostr_server::{Config, Keys, Limits, Server};
use clap::{Args, ValueEnum};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tracing_subscriber::filter::LevelFilter;

use crate::exit::{self, NoMemory, usage};
use crate::options::context::ContextArgs;
use crate::options::draft::DraftArgs;
use crate::options::model::{ModelArgs, Switch};
use crate::places;
#[cfg(unix)]
use crate::stream::Asked;
use crate::system;
use crate::term::Term;

const EXAMPLES: &str = "\
Examples:
  boostr serve model.gguf --port 9000 --sessions ./sessions
  boostr serve ./mamba2-370m --host 0.0.0.0 --api-key-file keys.txt";

const NOTES: &str = "\
The first line on stdout is the address. Keys stand in a file, one a line, or in BOOSTR_API_KEY: never on the command \
line, where others can read it. A first SIGTERM or Ctrl-C lets what is running end, a second one does not. Sizes are like \
4MiB or 512M, times like 30s or 2m.";

/// A model over HTTP: the OpenAI API, sessions, a web page
#[derive(Debug, Args)]
#[command(alias = "server", before_help = EXAMPLES, after_help = NOTES)]
pub struct ServeArgs {
    /// The model, unless -m names it
    #[arg(value_name = "MODEL")]
    pub first: Option<PathBuf>,
    /// Address to listen at; one that others can reach needs a key
    #[arg(
        long,
        value_name = "HOST",
        default_value = "127.0.0.1",
        env = "BOOSTR_HOST",
        hide_env = true
    )]
    pub host: String,
    /// Port to listen at; 0 takes one that is free
    #[arg(long, value_name = "PORT", default_value_t = 8080, env = "BOOSTR_PORT", hide_env = true)]
    pub port: u16,
    /// Keys that open the server, one a line; lines that start with # are none
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Serve everyone who can reach a public address
    #[arg(long)]
    pub insecure_no_auth: bool,
    /// What the model is called; its file's name by default
    #[arg(long, value_name = "NAME")]
    pub alias: Option<String>,
    /// Keep conversations in this folder; by default in one of its own, if only this machine can reach the server
    #[arg(long, value_name = "DIR", env = "BOOSTR_SESSIONS", hide_env = true)]
    pub sessions: Option<PathBuf>,
    /// Keep no conversations
    #[arg(long)]
    pub no_sessions: bool,
    /// Conversations that are kept; no more can be begun
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub max_sessions: usize,
    /// Bytes that conversations may take on disk; nothing is added beyond
    #[arg(long, value_name = "BYTES", default_value = "16GiB", value_parser = parse_bytes)]
    pub sessions_quota: usize,
    /// Answers of /v1/responses that are kept for later requests; 0 keeps none
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub responses: usize,
    /// Requests that are computed at once
    #[arg(long, value_name = "N", default_value_t = 16)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub max_running: u16,
    /// Requests that wait; one more is refused
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_queue: usize,
    /// Most tokens of an answer, whatever a request says
    #[arg(long, value_name = "N", default_value_t = 8192)]
    pub max_new_tokens: usize,
    /// Memory of all bodies that are under way; one more is refused. 128MiB by default, and at least 4 of --max-body
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub max_inflight_bytes: Option<usize>,
    /// Longest body of a request
    #[arg(long, value_name = "BYTES", default_value = "4MiB", value_parser = parse_bytes)]
    pub max_body: usize,
    /// Most tokens of a prompt, each with 8 bytes of text at most on average; of a session, of all its turns
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_prompt)]
    pub max_prompt: usize,
    /// Memory for states of prompts that may come again; at most 512MiB and a quarter of what is free by default. One
    /// history whose state alone takes more is kept beside them
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub state_cache: Option<usize>,
    /// Disk for states that leave that memory, found again after a restart; 0 for none. 4GiB by default, and none where
    /// keys, or a public address, may stand for several users
    #[arg(long, value_name = "BYTES", env = "BOOSTR_STATE_CACHE_DISK", hide_env = true)]
    #[arg(value_parser = parse_bytes)]
    pub state_cache_disk: Option<usize>,
    /// Keep those states in this folder; by default in one of its own
    #[arg(long, value_name = "DIR")]
    pub state_cache_dir: Option<PathBuf>,
    /// Refuse requests with fields that are not known, in place of naming those in a header
    #[arg(long)]
    pub strict_fields: bool,
    /// Thoughts of answers of /v1/chat/completions: apart from the text as reasoning_content (auto), or within it (none);
    /// the reasoning_format of a request says otherwise
    #[arg(long, value_name = "HOW", value_enum, default_value_t = Reasoning::Auto)]
    pub reasoning: Reasoning,
    /// Another name that the server goes by; may be given several times
    #[arg(long, value_name = "HOST")]
    pub allowed_host: Vec<String>,
    /// Pages of this origin may use the API, like https://example.org; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,
    /// The web page at /
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = Switch::On)]
    pub ui: Switch,
    /// Counters for Prometheus at /metrics
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = Switch::On)]
    pub metrics: Switch,
    /// How long what is running may take when the server is told to stop
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_time)]
    pub drain: Duration,
    /// Lines for people, or JSON
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Whether a model larger than the machine's memory is refused; by default what does not fit is read as it is used
    #[arg(long, value_name = "HOW", value_enum, default_value_t = Fit::Loose)]
    pub fit: Fit,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub context: ContextArgs,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// Whether a model must fit into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Fit {
    Loose,
    Strict,
}

/// The form of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// `4MiB`, `512M`, `1000`: powers of two with an `i`, else of ten.
fn parse_bytes(text: &str) -> Result<usize, String> {
    let expected = || "expected a size like 4MiB, 512M or 1000".to_owned();
    let (number, unit) = split(text).ok_or_else(expected)?;
    let factor = match unit.to_ascii_lowercase().trim_end_matches('b') {
        "" => 1,
        "k" => 1000,
        "m" => 1_000_000,
        "g" => 1_000_000_000,
        "ki" => 1 << 10,
        "mi" => 1 << 20,
        "gi" => 1 << 30,
        _ => return Err(expected()),
    };
    number.checked_mul(factor).and_then(|bytes| bytes.try_into().ok()).ok_or_else(expected)
}

/// `30s`, `2m`, `500ms`; a number alone is in seconds.
fn parse_time(text: &str) -> Result<Duration, String> {
    let expected = || "expected a time like 30s, 2m or 500ms".to_owned();
    let (number, unit) = split(text).ok_or_else(expected)?;
    match unit {
        "" | "s" => Ok(Duration::from_secs(number)),
        "ms" => Ok(Duration::from_millis(number)),
        "m" => number.checked_mul(60).map(Duration::from_secs).ok_or_else(expected),
        _ => Err(expected()),
    }
}

fn split(text: &str) -> Option<(u64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    Some((number.parse().ok()?, unit.trim()))
}

/// Memory for snapshots when the command line does not say.
const STATE_CACHE: u64 = 512 << 20;
/// Disk for those that leave memory when the command line does not say.
const STATE_CACHE_DISK: u64 = 4 << 30;
/// Threads that speak HTTP; those that compute are the engine's.
const HTTP_THREADS: usize = 2;
/// Environment variable with keys, divided by commas.
const KEY_VARIABLE: &str = "BOOSTR_API_KEY";

pub fn run(args: &ServeArgs, threads: usize, pin: bool, term: &Term) -> Result<()> {
    let keys = keys(args.api_key_file.as_deref())?;
    let addresses: Vec<SocketAddr> = (args.host.as_str(), args.port)
        .to_socket_addrs()
        .map_err(|error| usage(format!("--host {}: {error}", args.host)))?
        .collect();
    let loopback = addresses.iter().all(|address| address.ip().is_loopback());
    if !loopback && keys.is_empty() && !args.insecure_no_auth {
        let reason = format!(
            "--host {}: others can reach this address, so a key is needed: give --api-key-file FILE or {KEY_VARIABLE}; \
             --insecure-no-auth serves everyone",
            args.host
        );
        return Err(usage(reason));
    }
    if args.max_prompt == 0 {
        return Err(usage("--max-prompt: expected at least 1 token, found 0"));
    }
    let most = args.max_body.saturating_mul(4).max(Limits::default().max_inflight);
    let max_inflight = args.max_inflight_bytes.unwrap_or(most);
    if max_inflight < args.max_body {
        let reason = format!(
            "--max-inflight-bytes: expected at least the {} of --max-body, found {max_inflight}",
            args.max_body
        );
        return Err(usage(reason));
    }
    start_log(args.log_format, term);
    if !loopback && keys.is_empty() && args.allowed_host.is_empty() {
        term.say("everyone who can reach this address may use the server; a name for it needs --allowed-host");
    }
    // Texts are made vectors, and the model is loaded, on threads of the global pool; the engine has its own.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    if pin {
        // Weights are written near the engine's thread of the same number.
        boostr::threads::pin()?;
    }

    let (source, options) =
        args.model.source(args.model.model.as_deref().or(args.first.as_deref()))?;
    let options = args.context.of(options);
    source.check_exists()?;
    if args.fit == Fit::Strict {
        let bytes = source.checkpoint(args.model.allow_pickle)?.summary().bytes as u64;
        check_fit(bytes, system::memory().map(|(all, _)| all), system::cgroup_memory())?;
    }
    let name = args.alias.clone().unwrap_or_else(|| source.name());
    let spill = spill(args, loopback && keys.is_empty(), term)?;
    let disk = spill.as_ref().map(|spill| (spill.limit(), spill.path().to_path_buf()));
    let sessions = sessions(args, loopback, term)?;
    let folder = sessions.as_ref().map(|sessions| sessions.folder().to_path_buf());
    let config = Config {
        model_name: name.clone(),
        keys,
        loopback,
        allowed_hosts: args.allowed_host.clone(),
        cors_origins: args.cors_origin.clone(),
        strict_fields: args.strict_fields,
        divides_thoughts: args.reasoning == Reasoning::Auto,
        page: args.ui == Switch::On,
        metrics: args.metrics == Switch::On,
        max_sessions: args.max_sessions,
        sessions_quota: args.sessions_quota as u64,
        max_responses: args.responses,
        limits: Limits {
            max_body: args.max_body,
            max_inflight,
            max_prompt: args.max_prompt,
            max_tokens: args.max_new_tokens,
            drain_time: args.drain,
            ..Limits::default()
        },
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(HTTP_THREADS)
        .enable_all()
        .build()
        .context("starting threads")?;
    let load = {
        let (draft, model, cpu) = (args.draft.clone(), args.model.clone(), term.cpu.clone());
        let kept = (cpu.level(), KvType::from(model.kv_type));
        let (max_running, max_queue, state_cache) =
            (usize::from(args.max_running), args.max_queue, args.state_cache);
        move || -> Result<Ready> {
            let lm = Arc::new(source.open(&options, &cpu)?);
            let engine = EngineConfig {
                max_running,
                max_queue,
                threads: Some(if pin { Threads::pinned(threads)? } else { Threads::new(threads)? }),
                ..EngineConfig::default()
            };
            let draft = draft.open(&model, &lm)?;
            let plan = Plan::new(&lm, draft.as_ref(), engine, state_cache, kept)?;
            let engine = match spill {
                Some(spill) => Engine::start_with_disk(lm.clone(), plan.engine.clone(), spill)?,
                None => Engine::start(lm.clone(), plan.engine.clone())?,
            };
            Ok(Ready { lm, engine, draft, sessions, plan })
        }
    };
    let result = runtime.block_on(serve(config, &addresses, load, |address, lm, plan| {
        announce(address, &name, lm, plan, term)?;
        if let Some((limit, folder)) = &disk {
            let (limit, folder) = (system::bytes(*limit), folder.display());
            term.say(format!("states that leave memory: at most {limit} in {folder}"));
        }
        if let Some(folder) = &folder {
            term.say(format!(
                "sessions: at most {} and {} in {}, each with up to {STATES} states from {} on",
                args.max_sessions,
                system::bytes(args.sessions_quota as u64),
                folder.display(),
                system::bytes(plan.saved_bytes)
            ));
        }
        Ok(())
    }));
    // A model that is still being loaded holds nobody up.
    runtime.shutdown_background();
    result
}

/// Refuses weights of more bytes than the machine has, or than the control group may use.
fn check_fit(weights: u64, machine: Option<u64>, group: Option<u64>) -> Result<()> {
    let Some(memory) = machine.into_iter().chain(group).min() else {
        return Err(usage("--fit strict: this system does not say how much memory it has"));
    };
    if weights <= memory {
        return Ok(());
    }
    let [weights, memory] = [weights, memory].map(system::bytes);
    Err(NoMemory(format!(
        "--fit strict: the weights take {weights}, the machine has {memory}; --fit loose reads what does not fit as it \
         is used"
    ))
    .into())
}

/// What a server is made of.
struct Ready {
    lm: Arc<LanguageModel<Cpu>>,
    engine: Engine<Cpu>,
    draft: Option<Draft<Cpu>>,
    sessions: Option<Sessions<Cpu>>,
    plan: Plan,
}

async fn serve(
    config: Config,
    addresses: &[SocketAddr],
    load: impl FnOnce() -> Result<Ready> + Send + 'static,
    announce: impl FnOnce(SocketAddr, &LanguageModel<Cpu>, &Plan) -> Result<()>,
) -> Result<()> {
    let bound = TcpListener::bind(addresses).await;
    let listener = bound.map_err(|error| not_bound(addresses, error))?;
    let address = listener.local_addr().context("listening")?;
    let (stop, mut stopped) = watch::channel(false);
    tokio::spawn(signals(stop)?);
    let server = Server::new(config)?;
    let serving = {
        let (server, mut stopped) = (server.clone(), stopped.clone());
        tokio::spawn(async move {
            // A sender that is gone has told.
            server.serve(listener, async { drop(stopped.wait_for(|stop| *stop).await) }).await;
        })
    };
    tokio::select! {
        ready = tokio::task::spawn_blocking(load) => {
            let Ready { lm, engine, draft, sessions, plan } = ready.context("loading")??;
            server.load(lm.clone(), engine, draft, sessions).map_err(exit::of_server)?;
            announce(address, &lm, &plan)?;
        }
        _ = stopped.wait_for(|stop| *stop) => {}
    }
    serving.await.context("serving")
}

/// Why a server cannot listen, and what to do.
fn not_bound(addresses: &[SocketAddr], error: io::Error) -> anyhow::Error {
    let list: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
    let what = format!("listening at {}", list.join(", "));
    let port = addresses.first().map_or(0, SocketAddr::port);
    if error.kind() != io::ErrorKind::AddrInUse {
        return anyhow::Error::new(error).context(what);
    }
    let who = match system::listener_at(port) {
        Some((process, name)) => format!("`{name}` (process {process})"),
        None => format!("another process (`ss -ltnp 'sport = :{port}'` may name it)"),
    };
    let other = if port == u16::MAX { port - 1 } else { port + 1 };
    let advice = format!("choose another, as --port {other}; --port 0 takes a free one");
    anyhow::anyhow!("{what}: port {port} is in use by {who}: {advice}")
}

/// Tells `stop` of the first signal; a second one ends the process. A terminal that is closed sends HUP more than once,
/// so these never do; signals that come together are one.
#[cfg(unix)]
fn signals(stop: watch::Sender<bool>) -> Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).context("waiting for signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("waiting for signals")?;
    // Who was started to outlive its terminal (`nohup`) does.
    let hangup = (!system::ignores_hangup()).then(|| signal(SignalKind::hangup()));
    let mut hangup = hangup.transpose().context("waiting for signals")?;
    Ok(async move {
        let mut asked = Asked::default();
        loop {
            let hung_up = async {
                match &mut hangup {
                    Some(hangup) => hangup.recv().await,
                    None => std::future::pending().await,
                }
            };
            let is_hangup = tokio::select! {
                _ = terminate.recv() => false,
                _ = interrupt.recv() => false,
                _ = hung_up => true,
            };
            stop.send_replace(true);
            if asked.again(is_hangup, Instant::now()) {
                std::process::exit(i32::from(exit::FAILURE));
            }
        }
    })
}

/// The same, where there is Ctrl-C alone.
#[cfg(not(unix))]
fn signals(stop: watch::Sender<bool>) -> Result<impl Future<Output = ()>> {
    Ok(async move {
        while tokio::signal::ctrl_c().await.is_ok() {
            if stop.send_replace(true) {
                std::process::exit(i32::from(exit::FAILURE));
            }
        }
    })
}

/// How much memory is for what.
struct Plan {
    engine: EngineConfig,
    /// Bytes of a sequence that has seen nothing, with all that guessing takes, and how it grows.
    state_bytes: u64,
    growth: String,
    /// Bytes of a state that a session keeps, at least.
    saved_bytes: u64,
}

impl Plan {
    /// # Errors
    ///
    /// When there is not so much memory.
    fn new(
        lm: &LanguageModel<Cpu>,
        draft: Option<&Draft<Cpu>>,
        engine: EngineConfig,
        cache: Option<usize>,
        (level, kind): (Level, KvType),
    ) -> Result<Self> {
        let bytes =
            |model: &Model<Cpu>| model.new_state().map(|state| state.size_in_bytes() as u64);
        let saved_bytes = bytes(&lm.model)?;
        let mut state_bytes = saved_bytes;
        // Who guesses goes back to the state before wrong guesses.
        if draft.is_some() {
            state_bytes += saved_bytes;
        }
        // All layers that see a sequence, those of who guesses among them.
        let mut layers = lm.model.family().layers();
        match draft {
            Some(Draft::Model(draft)) => {
                state_bytes += bytes(draft)?;
                layers.extend(draft.family().layers());
            }
            Some(Draft::Mtp(block)) => {
                state_bytes += block.new_state(&lm.model)?.size_in_bytes() as u64;
                let block = lm.model.family().next_block();
                layers.extend(block.into_iter().flat_map(|block| block.family().layers()));
            }
            Some(Draft::Lookup | Draft::With(_)) | None => {}
        }
        // Bytes of what attention keeps of one token, and of so many.
        let token_bytes: u64 =
            layers.iter().map(|layer| layer.state_bytes(level, kind).1 as u64).sum();
        let kept = |tokens: usize| -> u64 {
            layers.iter().map(|layer| layer.kv_bytes(level, kind, tokens) as u64).sum()
        };
        let growth = match lm.model.context_limit() {
            _ if token_bytes == 0 => "whatever its length".to_owned(),
            Some(limit) => format!(
                "and {} for each token that attention keeps, {} for the {limit} of its context",
                system::bytes(token_bytes),
                system::bytes(kept(limit))
            ),
            None => {
                format!("and {} for each token that attention keeps", system::bytes(token_bytes))
            }
        };
        let running = state_bytes.saturating_mul(engine.max_running as u64);
        let free = free_memory();
        let most = STATE_CACHE.min(free.map_or(STATE_CACHE, |free| free / 4));
        let cache = cache.map_or(most, |bytes| bytes as u64);
        let sum = running.saturating_add(cache);
        if let Some(free) = free.filter(|free| sum > *free) {
            let reason = format!(
                "{} running sequences of {} and {} of --state-cache are {}, but {} are free: lower --max-running or \
                 --state-cache{}",
                engine.max_running,
                system::bytes(state_bytes),
                system::bytes(cache),
                system::bytes(sum),
                system::bytes(free),
                if draft.is_some() { ", or leave out --draft" } else { "" }
            );
            return Err(NoMemory(reason).into());
        }
        let snapshot_bytes = usize::try_from(cache).unwrap_or(usize::MAX);
        let engine = EngineConfig { snapshot_bytes, ..engine };
        Ok(Self { engine, state_bytes, growth, saved_bytes })
    }
}

/// Bytes that could be taken now, where that is known.
fn free_memory() -> Option<u64> {
    let (_, free) = system::memory()?;
    let group = system::cgroup_memory();
    let in_use = system::memory_in_use().unwrap_or(0);
    Some(group.map_or(free, |group| free.min(group.saturating_sub(in_use))))
}

/// Says where the server is, and what it may take.
fn announce(
    address: SocketAddr,
    name: &str,
    lm: &LanguageModel<Cpu>,
    plan: &Plan,
    term: &Term,
) -> Result<()> {
    term.warn_all(&lm.warnings);
    let Plan { engine, state_bytes, growth, .. } = plan;
    let parameters = system::count(lm.model.parameters().0 as u64);
    term.say(format!("boostr {}  {name} ({parameters} parameters)", env!("CARGO_PKG_VERSION")));
    term.say(format!(
        "memory: {} a running sequence, {growth}; {} at once: {}; snapshots: at most {}, and one larger",
        system::bytes(*state_bytes),
        engine.max_running,
        system::bytes(state_bytes.saturating_mul(engine.max_running as u64)),
        system::bytes(engine.snapshot_bytes as u64)
    ));
    let mut out = io::stdout().lock();
    writeln!(out, "http://{address}")?;
    Ok(out.flush()?)
}

/// Where thoughts of answers go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Reasoning {
    Auto,
    None,
}

/// The folder for states that leave memory. Without an option there is one if the server is for one user, who alone
/// reaches it, and no other server has it.
fn spill(args: &ServeArgs, is_for_one: bool, term: &Term) -> Result<Option<SpillFolder>> {
    let (disk, named) = (args.state_cache_disk, args.state_cache_dir.as_ref());
    let default = if is_for_one || named.is_some() { STATE_CACHE_DISK } else { 0 };
    let limit = disk.map_or(default, |bytes| bytes as u64);
    if limit == 0 || args.state_cache == Some(0) {
        if disk.is_some_and(|bytes| bytes > 0) {
            term.warn("--state-cache-disk is not used: states come from disk to memory, and --state-cache is 0");
        }
        return Ok(None);
    }
    let open = |folder: &Path| {
        let taken = || format!("another server keeps its states in `{}`", folder.display());
        SpillFolder::open(folder, limit)?.ok_or_else(|| usage(taken()))
    };
    let opened = match named {
        Some(folder) => open(folder).map(Some),
        None => match places::state_cache().and_then(|folder| open(&folder)) {
            Ok(folder) => Ok(Some(folder)),
            Err(error) => {
                term.say(format!("no states are kept on disk: {error:#}"));
                Ok(None)
            }
        },
    };
    let opened = opened?;
    if let Some((folder, why)) =
        opened.as_ref().and_then(|opened| Some((opened.path(), opened.exposed()?)))
    {
        term.warn(format_args!("--state-cache-dir {}: {why}", folder.display()));
    }
    let log = |line: &str| tracing::warn!("{line}");
    Ok(opened.map(|folder| folder.numerics(term.cpu.numerics()).log(log)))
}

/// The conversations of the server. Without `--sessions` it has a folder for them if only this
/// machine can reach it. It has none if that folder cannot be made.
fn sessions(args: &ServeArgs, loopback: bool, term: &Term) -> Result<Option<Sessions<Cpu>>> {
    if let Some(folder) = args.sessions.as_ref().filter(|_| !args.no_sessions) {
        let sessions = Sessions::open(&places::sessions(Some(folder))?)?;
        if let Some(why) = sessions.exposed() {
            term.warn(format_args!("--sessions {}: {why}", folder.display()));
        }
        return Ok(Some(sessions));
    }
    if args.no_sessions || !loopback {
        return Ok(None);
    }
    let sessions = places::served_sessions().and_then(|folder| Ok(Sessions::open(&folder)?));
    Ok(sessions.inspect_err(|error| term.say(format!("no conversations are kept: {error:#}"))).ok())
}

/// The keys of a file and of the environment.
fn keys(file: Option<&Path>) -> Result<Keys> {
    let from_env = std::env::var(KEY_VARIABLE).unwrap_or_default();
    let keys = Keys::new(from_env.split(',').map(str::trim));
    let Some(path) = file else { return Ok(keys) };
    let text = boostr::files::read_text(path, boostr::files::MAX_CONFIG)?;
    let of_file = Keys::from_lines(&text);
    if of_file.is_empty() {
        return Err(usage(format!("--api-key-file: no key in `{}`", path.display())));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = fs::metadata(path)
            .with_context(|| format!("`{}`", path.display()))?
            .permissions()
            .mode();
        if mode & 0o077 != 0 {
            let path = path.display();
            let reason = format!("--api-key-file: others may read `{path}`: chmod 600 {path}");
            return Err(usage(reason));
        }
    }
    Ok(keys.and(of_file))
}

fn start_log(format: LogFormat, term: &Term) {
    let level = match (term.quiet, term.verbose) {
        (true, _) => LevelFilter::ERROR,
        (false, false) => LevelFilter::INFO,
        (false, true) => LevelFilter::DEBUG,
    };
    let log = tracing_subscriber::fmt().with_writer(io::stderr).with_max_level(level);
    let log = log.with_target(false).with_ansi(term.colours_stderr());
    // Another log of this process stays.
    let _ = match format {
        LogFormat::Text => log.try_init(),
        LogFormat::Json => log.json().try_init(),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_must_fit_into_the_machine_and_into_its_control_group() {
        assert!(check_fit(8 << 30, Some(8 << 30), None).is_ok());
        for (machine, group) in [(Some(7 << 30), None), (Some(64 << 30), Some(7 << 30))] {
            let error = check_fit(8 << 30, machine, group).unwrap_err();
            assert!(error.is::<NoMemory>());
            let text = error.to_string();
            assert!(text.contains("8.6 GB") && text.contains("7.5 GB"), "{text}");
        }
        assert!(check_fit(1, None, None).unwrap_err().to_string().contains("does not say"));
    }

    #[test]
    fn sizes_and_times_are_read() {
        assert_eq!(parse_bytes("4MiB"), Ok(4 << 20));
        assert_eq!(parse_bytes("512M"), Ok(512_000_000));
        assert_eq!(parse_bytes("1 kb"), Ok(1000));
        assert_eq!(parse_bytes("0"), Ok(0));
        for wrong in ["", "x", "-1", "4 MiBs", "99999999999999G"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_time("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(parse_time("2m"), Ok(Duration::from_mins(2)));
        assert_eq!(parse_time("500ms"), Ok(Duration::from_millis(500)));
        assert!(parse_time("1h").is_err());
    }
}
