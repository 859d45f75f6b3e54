//! Starting the program, and models to start it on.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

/// How a run ended.
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self
    }

    /// Checks the code, and that the error is one message.
    #[track_caller]
    pub fn fails(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{}{}", self.stdout, self.stderr);
        assert_eq!(self.stderr.matches("error:").count(), 1, "{}", self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }
}

/// The program with arguments, without the variables that it reads, and with nothing on stdin.
pub fn command(args: &[&str]) -> Command {
    command_under(env!("CARGO_BIN_EXE_boostr"), args)
}

/// The same of another program, which is to start it.
pub fn command_under(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("BOOSTR_") {
            command.env_remove(name);
        }
    }
    command.env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE");
    command.env("XDG_STATE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("state-home"));
    // Servers of tests that run together would have one folder.
    command.env("BOOSTR_STATE_CACHE_DISK", "0");
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub fn boostr(args: &[&str]) -> Ended {
    end(command(args), "")
}

pub fn boostr_with_stdin(args: &[&str], stdin: &str) -> Ended {
    let mut command = command(args);
    command.stdin(Stdio::piped());
    end(command, stdin)
}

pub fn end(mut command: Command, stdin: &str) -> Ended {
    let mut child = command.spawn().unwrap();
    if let Some(mut pipe) = child.stdin.take() {
        // A child that does not read its stdin closes it early.
        let _ = pipe.write_all(stdin.as_bytes());
    }
    let output = child.wait_with_output().unwrap();
    Ended {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub fn demo() -> String {
    root().join("models/default").to_str().unwrap().to_owned()
}

pub fn tiny() -> String {
    root().join("fixtures/models/mamba2-tiny").to_str().unwrap().to_owned()
}

/// The pinned greedy continuation of the demo model.
pub fn expected() -> Value {
    let text = fs::read_to_string(root().join("models/default/expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

pub fn ids(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

pub fn joined(value: &Value, separator: &str) -> String {
    let words: Vec<String> = ids(value).iter().map(u64::to_string).collect();
    words.join(separator)
}

/// A fresh empty folder; `name` is the test's.
pub fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cli-{name}"));
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// A copy of the tiny model in a fresh folder.
pub fn copy_of_tiny(name: &str) -> PathBuf {
    let to = folder(name);
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(Path::new(&tiny()).join(file), to.join(file)).unwrap();
    }
    to
}
