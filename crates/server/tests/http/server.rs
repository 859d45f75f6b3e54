//! A server of a test, on a port of its own.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use boostr::backend::{self, Cpu};
use boostr::chat::Source;
use boostr::engine::{Engine, EngineConfig, SpillFolder, Stats};
use boostr::generation_config::SpecialTokens;
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::Context;
use boostr::session::Sessions;
use boostr::threads::Threads;
use boostr_server::{Config, Server};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::client::{self, Reply};

/// The embedded model, read from its folder.
pub static MODEL: LazyLock<Arc<LanguageModel<Cpu>>> = LazyLock::new(|| open(Context::Model));

fn open(context: Context) -> Arc<LanguageModel<Cpu>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/default");
    let options = OpenOptions { context, ..OpenOptions::default() };
    Arc::new(LanguageModel::open(path, &options, backend::cpu()).unwrap())
}

/// The embedded model with other names for its last tokens, as a model has them that thinks and fills in.
pub const THINK: u32 = 2046;
pub const THINK_END: u32 = 2047;
const RENAMED: [(&str, u32); 5] = [
    ("<|fim_prefix|>", 2043),
    ("<|fim_suffix|>", 2044),
    ("<|fim_middle|>", 2045),
    ("<think>", THINK),
    ("</think>", THINK_END),
];

/// That model with this chat template.
pub fn thinker(template: &str) -> Arc<LanguageModel<Cpu>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/default");
    let text = std::fs::read_to_string(format!("{path}/tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    let model = &mut json["model"];
    for (name, id) in RENAMED {
        let vocab = model["vocab"].as_object_mut().unwrap();
        vocab.retain(|_, old| *old != id);
        vocab.insert(name.into(), id.into());
    }
    // The last merges are those that made them.
    let merges = model["merges"].as_array_mut().unwrap();
    merges.truncate(merges.len() - RENAMED.len());
    for (content, id) in RENAMED {
        let is_special = content.contains('|');
        json["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": is_special
        }));
    }
    let folder = fresh_folder();
    std::fs::create_dir(&folder).unwrap();
    let tokenizer = folder.join("tokenizer.json");
    std::fs::write(&tokenizer, json.to_string()).unwrap();
    let options = OpenOptions { tokenizer: Some(tokenizer), ..OpenOptions::default() };
    let mut lm = LanguageModel::open(path, &options, backend::cpu()).unwrap();
    std::fs::remove_dir_all(folder).unwrap();
    lm.chat_template = Some(Source::new("template", template, SpecialTokens::default()));
    Arc::new(lm)
}

/// A server that is running, until it is dropped.
pub struct TestServer {
    pub address: SocketAddr,
    pub engine: Option<Engine<Cpu>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    folder: Option<PathBuf>,
}

/// What is special about a server of a test.
#[derive(Default)]
pub struct Setup {
    pub config: Config,
    pub engine: EngineConfig,
    /// A folder for sessions, kept afterwards by whoever names it.
    pub sessions: Option<PathBuf>,
    /// A folder for states that leave memory, and how many bytes it may have.
    pub states: Option<(PathBuf, u64)>,
    pub without_model: bool,
    /// Tokens that a sequence may have.
    pub context: Option<usize>,
    /// Another model than the embedded one.
    pub model: Option<Arc<LanguageModel<Cpu>>>,
}

impl TestServer {
    pub fn start() -> Self {
        Self::with(Setup::default())
    }

    /// The same with a folder of its own for sessions.
    pub fn with_sessions() -> Self {
        let folder = fresh_folder();
        let mut server = Self::with(Setup { sessions: Some(folder.clone()), ..Setup::default() });
        server.folder = Some(folder);
        server
    }

    pub fn with(mut setup: Setup) -> Self {
        setup.config.model_name = "demo".into();
        setup.engine.threads = Some(Threads::new(1).unwrap());
        let server = Server::<Cpu>::new(setup.config).unwrap();
        let mut engine = None;
        if !setup.without_model {
            let given = setup.model.unwrap_or_else(|| MODEL.clone());
            let model = setup.context.map_or(given, |tokens| open(Context::Tokens(tokens)));
            let started = match setup.states {
                Some((folder, limit)) => {
                    let folder = SpillFolder::open(&folder, limit).unwrap().unwrap();
                    Engine::start_with_disk(model.clone(), setup.engine, folder).unwrap()
                }
                None => Engine::start(model.clone(), setup.engine).unwrap(),
            };
            let sessions = setup.sessions.map(|folder| Sessions::open(&folder).unwrap());
            server.load(model, started.clone(), None, sessions).unwrap();
            engine = Some(started);
        }
        let (stop, stopped) = oneshot::channel();
        let (tell, told) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            runtime.worker_threads(2).enable_all().build().unwrap().block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                server.serve(listener, async { drop(stopped.await) }).await;
            });
        });
        let address = told.recv().unwrap();
        Self { address, engine, stop: Some(stop), thread: Some(thread), folder: None }
    }

    pub fn get(&self, path: &str) -> Reply {
        client::raw(self.address, client::request("GET", path, "Connection: close\r\n", ""))
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.send("POST", path, "Connection: close\r\n", &body.to_string())
    }

    pub fn delete(&self, path: &str) -> Reply {
        self.send("DELETE", path, "Connection: close\r\n", "")
    }

    pub fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> Reply {
        client::raw(self.address, client::request(method, path, headers, body))
    }

    /// Sends a request and leaves the answer unread.
    pub fn begin(&self, path: &str, body: &Value) -> std::net::TcpStream {
        use std::io::Write;
        let mut stream = client::connect(self.address);
        let request = client::request("POST", path, "", &body.to_string());
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    pub fn stats(&self) -> Stats {
        self.engine.as_ref().unwrap().stats()
    }

    /// Waits until the engine's numbers are as wanted; panics when that takes longer than `time`.
    #[track_caller]
    pub fn wait(&self, time: Duration, wanted: impl Fn(&Stats) -> bool) -> Duration {
        let start = Instant::now();
        while !wanted(&self.stats()) {
            assert!(start.elapsed() < time, "after {time:?}: {:?}", self.stats());
            thread::sleep(Duration::from_millis(2));
        }
        start.elapsed()
    }

    /// Tells the server to stop.
    pub fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    /// Tells the server to stop and waits until it has.
    pub fn join(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(engine) = &self.engine {
            engine.stop();
        }
        self.join();
        if let Some(folder) = self.folder.take() {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

/// A folder that is not there yet.
pub fn fresh_folder() -> PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name =
        format!("boostr-http-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    std::env::temp_dir().join(name)
}

/// A completion that goes on for `tokens` tokens, greedily.
pub fn endless(tokens: usize) -> Value {
    json!({
        "prompt": "It is a truth universally acknowledged", "max_tokens": tokens, "temperature": 0,
        "logit_bias": {"0": -100}
    })
}

/// The same with fields added or replaced.
pub fn with(mut body: Value, more: Value) -> Value {
    let (Some(object), Value::Object(more)) = (body.as_object_mut(), more) else {
        panic!("two objects are needed");
    };
    object.extend(more);
    body
}
