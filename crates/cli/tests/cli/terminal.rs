//! The program at a terminal: a pair of ends of which the test holds one.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::common::*;

/// A process at a terminal.
struct AtTerminal {
    child: Child,
    keys: File,
    shown: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
    /// What was waited for so far.
    seen: usize,
}

impl AtTerminal {
    /// Starts a program at a terminal of a name, or of none.
    fn start(mut command: Command, term: Option<&str>) -> Self {
        match term {
            Some(term) => command.env("TERM", term),
            None => command.env_remove("TERM"),
        };
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap();
        let path = std::ffi::OsStr::from_bytes(name.to_bytes());
        let theirs = OpenOptions::new().read(true).write(true).open(path).unwrap();
        command.stdin(Stdio::from(theirs.try_clone().unwrap()));
        command.stdout(Stdio::from(theirs.try_clone().unwrap()));
        command.stderr(Stdio::from(theirs));
        let child = command.spawn().unwrap();
        // With its copies of the other end: without them reading ends when the program does.
        drop(command);
        let keys = File::from(ours);
        let (mut screen, shown) = (keys.try_clone().unwrap(), Arc::new(Mutex::new(Vec::new())));
        let bytes = Arc::clone(&shown);
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = screen.read(&mut buffer) {
                bytes.lock().unwrap().extend_from_slice(&buffer[..count]);
            }
        });
        Self { child, keys, shown, reader: Some(reader), seen: 0 }
    }

    /// Waits until it shows a text after all that was waited for before.
    #[track_caller]
    fn wait_for(&mut self, text: &str) {
        let start = Instant::now();
        loop {
            let shown = self.shown.lock().unwrap().clone();
            let rest = String::from_utf8_lossy(&shown[self.seen..]).into_owned();
            if let Some(at) = rest.find(text) {
                self.seen += at + text.len();
                return;
            }
            assert!(start.elapsed() < Duration::from_mins(2), "no {text:?} in {rest:?}");
            sleep(Duration::from_millis(5));
        }
    }

    fn type_in(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).unwrap();
    }

    /// How it ends, and all that it showed.
    fn end(mut self) -> (Option<i32>, String) {
        let code = self.child.wait().unwrap().code();
        self.reader.take().unwrap().join().unwrap();
        let shown = self.shown.lock().unwrap().clone();
        (code, String::from_utf8_lossy(&shown).into_owned())
    }
}

#[test]
fn p_dumb_terminal_escapes_there_are_none_without_a_terminal_that_knows_them() {
    let show = |term| {
        let line = ["run", &tiny(), "-p", "It is", "-n", "8", "-s", "1"];
        let (code, shown) = AtTerminal::start(command(&line), term).end();
        assert_eq!(code, Some(0), "{shown}");
        assert!(shown.contains("tokens"), "{shown}");
        shown
    };
    for term in [None, Some(""), Some("dumb")] {
        assert!(!show(term).contains('\u{1b}'), "{term:?}");
    }
    assert!(show(Some("xterm")).contains('\u{1b}'));
}

#[test]
fn p_chat_typed_not_utf8_the_line_is_refused_and_the_chat_goes_on() {
    for term in [Some("xterm"), Some("dumb"), None] {
        let sessions = folder("typed-not-utf8");
        let sessions = sessions.to_str().unwrap();
        let line = ["chat", &tiny(), "--sessions", sessions, "--session", "a", "-n", "4"];
        let mut chat = AtTerminal::start(command(&line), term);
        chat.wait_for("a> ");
        chat.type_in(b"caf\xe9 and more\n");
        chat.wait_for("not UTF-8");
        chat.wait_for("a> ");
        chat.type_in(b"hello\n");
        chat.wait_for("tokens");
        chat.wait_for("a> ");
        chat.type_in(b"/rewind 9\n");
        chat.wait_for("the conversation has 1 turn");
        chat.wait_for("a> ");
        chat.type_in(b"/exit\n");
        let (code, shown) = chat.end();
        assert_eq!(code, Some(0), "{term:?}: {shown}");
        let log = fs::read(format!("{sessions}/a/log")).unwrap();
        let log = String::from_utf8_lossy(&log);
        assert!(log.contains("hello") && !log.contains("more"), "{log}");
        assert!(term == Some("xterm") || !shown.contains('\u{1b}'), "{shown:?}");
    }
}

#[test]
fn p_raise_exception_escapes_no_file_and_no_name_moves_the_terminal() {
    let folder = folder("raise-exception-escapes");
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let check = |ended: &Ended, told: &str| {
        let all = format!("{}{}", ended.stdout, ended.stderr);
        assert!(!all.contains(['\u{1b}', '\u{7}', '\u{9b}']), "{all:?}");
        assert!(all.contains(told), "{all}");
    };
    // A template's own words.
    let template = path("t.jinja");
    fs::write(&template, "{{ raise_exception('a\u{1b}[31mb\u{7}c\u{9b}2J') }}").unwrap();
    let ended = boostr(&["run", &tiny(), "--chat-template", &template, "-p", "x"]);
    assert_ne!(ended.code, Some(0));
    check(&ended, "a\\u{1b}[31mb\\u{7}c\\u{9b}2J");
    // The model's name, as a session has it.
    let model = path("m\u{1b}[31m");
    fs::create_dir(&model).unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(std::path::Path::new(&tiny()).join(file), format!("{model}/{file}")).unwrap();
    }
    let sessions = path("sessions");
    let chat = |model: &str| {
        let line = ["chat", model, "--sessions", &sessions, "--session", "a", "-n", "2"];
        boostr_with_stdin(&line, "hi\n").ok()
    };
    chat(&model);
    check(&chat(&tiny()), "until now with m\\u{1b}[31m");
    check(&boostr(&["show", &model]).ok(), "m\\u{1b}[31m");
    // What adapters name.
    let adapters = path("adapters");
    fs::create_dir(&adapters).unwrap();
    let config = serde_json::json!({
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["in_proj"],
        "base_model_name_or_path": "no\u{1b}[2Jwhere"
    });
    fs::write(format!("{adapters}/adapter_config.json"), config.to_string()).unwrap();
    fs::write(format!("{adapters}/adapter_model.safetensors"), b"\x02\0\0\0\0\0\0\0{}").unwrap();
    check(&boostr(&["run", &adapters, "-p", "x"]).fails(3), "no\\u{1b}[2Jwhere");
}
