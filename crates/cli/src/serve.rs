//! `boostr serve`: a model over HTTP.

use std::fs;
use std::io::{self, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use boostr::backend::Cpu;
use boostr::engine::{Draft, Engine, EngineConfig};
use boostr::load::LanguageModel;
use boostr::models::Model;
use boostr::nn::LayerSpec;
use boostr::session::{STATES, Sessions};
use boostr_server::{Config, Keys, Limits, Server};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tracing_subscriber::filter::LevelFilter;

use crate::args::serve::{LogFormat, ServeArgs, Switch};
use crate::exit::{self, usage};
use crate::places;
use crate::system;
use crate::term::Term;

/// Memory for snapshots when the command line does not say.
const STATE_CACHE: u64 = 512 << 20;
/// Threads that speak HTTP; those that compute are the engine's.
const HTTP_THREADS: usize = 2;
/// Environment variable with keys, divided by commas.
const KEY_VARIABLE: &str = "BOOSTR_API_KEY";

pub fn run(args: &ServeArgs, threads: usize, term: &Term) -> Result<()> {
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
    start_log(args.log_format, term);
    // Texts are made vectors, and the model is loaded, on threads of the global pool; the engine has its own.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();

    let (source, options) =
        args.model.source(args.model.model.as_deref().or(args.first.as_deref()))?;
    source.check_exists()?;
    let name = args.alias.clone().unwrap_or_else(|| source.name());
    let sessions = sessions(args, loopback, term)?;
    let folder = sessions.as_ref().map(|sessions| sessions.folder().to_path_buf());
    let config = Config {
        model_name: name.clone(),
        keys,
        loopback,
        allowed_hosts: args.allowed_host.clone(),
        cors_origins: args.cors_origin.clone(),
        page: args.ui == Switch::On,
        metrics: args.metrics == Switch::On,
        max_sessions: args.max_sessions,
        limits: Limits {
            max_body: args.max_body,
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
        let (draft, model) = (args.draft.clone(), args.model.clone());
        let (max_running, max_queue, state_cache) =
            (usize::from(args.max_running), args.max_queue, args.state_cache);
        move || -> Result<Ready> {
            let lm = Arc::new(source.open(&options)?);
            let engine =
                EngineConfig { max_running, max_queue, threads, ..EngineConfig::default() };
            let draft = draft.open(&model, &lm)?;
            let plan = Plan::new(&lm, draft.as_ref(), engine, state_cache)?;
            let engine = Engine::start_with(lm.clone(), plan.engine, draft)?;
            Ok(Ready { lm, engine, sessions, plan })
        }
    };
    let result = runtime.block_on(serve(config, &addresses, load, |address, lm, plan| {
        announce(address, &name, lm, plan, term)?;
        if let Some(folder) = &folder {
            term.say(format!(
                "sessions: at most {} in {}, each with up to {STATES} states from {} on",
                args.max_sessions,
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

/// What a server is made of.
struct Ready {
    lm: Arc<LanguageModel<Cpu>>,
    engine: Engine<Cpu>,
    sessions: Option<Sessions<Cpu>>,
    plan: Plan,
}

async fn serve(
    config: Config,
    addresses: &[SocketAddr],
    load: impl FnOnce() -> Result<Ready> + Send + 'static,
    announce: impl FnOnce(SocketAddr, &LanguageModel<Cpu>, &Plan) -> Result<()>,
) -> Result<()> {
    let listener = TcpListener::bind(addresses)
        .await
        .with_context(|| format!("listening at {addresses:?}"))?;
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
            let Ready { lm, engine, sessions, plan } = ready.context("loading")??;
            server.load(lm.clone(), engine, sessions).map_err(exit::of_server)?;
            announce(address, &lm, &plan)?;
        }
        _ = stopped.wait_for(|stop| *stop) => {}
    }
    serving.await.context("serving")
}

/// Tells `stop` of the first signal; a second one ends the process.
#[cfg(unix)]
fn signals(stop: watch::Sender<bool>) -> Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).context("waiting for signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("waiting for signals")?;
    // Who was started to outlive its terminal (`nohup`) does.
    let hangup = (!system::ignores_hangup()).then(|| signal(SignalKind::hangup()));
    let mut hangup = hangup.transpose().context("waiting for signals")?;
    Ok(async move {
        loop {
            let hung_up = async {
                match &mut hangup {
                    Some(hangup) => hangup.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                _ = hung_up => {}
            }
            if stop.send_replace(true) {
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
    /// Bytes of a sequence that has seen nothing, with all that guessing takes, and whether it grows.
    state_bytes: u64,
    grows: bool,
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
    ) -> Result<Self> {
        let bytes =
            |model: &Model<Cpu>| model.new_state().map(|state| state.size_in_bytes() as u64);
        let grows = |model: &Model<Cpu>| model.family().layers().iter().any(LayerSpec::grows);
        let saved_bytes = bytes(&lm.model)?;
        let (mut state_bytes, mut grow) = (saved_bytes, grows(&lm.model));
        // Who guesses goes back to the state before wrong guesses.
        if draft.is_some() {
            state_bytes += saved_bytes;
        }
        if let Some(Draft::Model(draft)) = draft {
            state_bytes += bytes(draft)?;
            grow |= grows(draft);
        }
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
            return Err(exit::NoMemory(reason).into());
        }
        let snapshot_bytes = usize::try_from(cache).unwrap_or(usize::MAX);
        let engine = EngineConfig { snapshot_bytes, ..engine };
        Ok(Self { engine, state_bytes, grows: grow, saved_bytes })
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
    let Plan { engine, state_bytes, grows, .. } = plan;
    let parameters = system::count(lm.model.parameters().0 as u64);
    let growth = if *grows {
        ", and more for each token that attention keeps"
    } else {
        ", whatever its length"
    };
    term.say(format!("boostr {}  {name} ({parameters} parameters)", env!("CARGO_PKG_VERSION")));
    term.say(format!(
        "memory: {} a running sequence{growth}; {} at once: {}; snapshots: at most {}",
        system::bytes(*state_bytes),
        engine.max_running,
        system::bytes(state_bytes.saturating_mul(engine.max_running as u64)),
        system::bytes(engine.snapshot_bytes as u64)
    ));
    let mut out = io::stdout().lock();
    writeln!(out, "http://{address}")?;
    Ok(out.flush()?)
}

/// The conversations of the server. One that was not told where has a folder for them if only this machine can reach it, or none
/// where that cannot be.
fn sessions(args: &ServeArgs, loopback: bool, term: &Term) -> Result<Option<Sessions<Cpu>>> {
    if let Some(folder) = args.sessions.as_ref().filter(|_| !args.no_sessions) {
        return Ok(Some(Sessions::open(folder)?));
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
    let text = fs::read_to_string(path).with_context(|| format!("`{}`", path.display()))?;
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
