//! A server whose model is small, with sessions in a folder of its own.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use boostr::backend::{Cpu, cpu};
use boostr::chat::Source;
use boostr::engine::{Engine, EngineConfig};
use boostr::generation_config::SpecialTokens;
use boostr::load::LanguageModel;
use boostr::session::Sessions;
use boostr::threads::Threads;
use boostr_server::{Config, Limits, Server};

/// With all that a template may be asked for.
const TEMPLATE: &str = "{% for t in tools or [] %}<tools>{{ t | tojson }}</tools>{% endfor %}{% for m in messages %}<s>{{ m.role }}: \
    {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>{% endfor %}\
    {% if add_generation_prompt %}<s>assistant: {% endif %}";

/// How long a client may be silent, in any phase.
const SILENCE: Duration = Duration::from_millis(20);

/// A server that keeps sessions in `folder`, if one is given.
pub fn server(folder: Option<&Path>) -> Server<Cpu> {
    let path = fixtures().join("models/mamba2-tiny");
    let mut lm = LanguageModel::<Cpu>::open(&path, &Default::default(), cpu()).expect("a model");
    lm.chat_template = Some(Source::new("fuzz", TEMPLATE, SpecialTokens::default()));
    let lm = Arc::new(lm);
    let limits = Limits {
        max_prompt: 300,
        default_tokens: 1,
        max_tokens: 2,
        header_time: SILENCE,
        body_time: SILENCE,
        idle_time: SILENCE,
        ..Limits::default()
    };
    let server = Server::new(Config { limits, ..Config::default() }).expect("a server");
    let threads = Some(Threads::new(1).expect("a thread"));
    let engine = EngineConfig { threads, ..EngineConfig::default() };
    let engine = Engine::start(lm.clone(), engine).expect("an engine");
    let sessions = folder.map(|folder| Sessions::open(folder).expect("a folder"));
    server.load(lm, engine, None, sessions).expect("a model with a tokenizer");
    server
}

/// The fixtures of the repository, for whichever crate this file is compiled into.
fn fixtures() -> PathBuf {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.map(|folder| folder.join("fixtures")).find(|path| path.is_dir()).expect("fixtures")
}
