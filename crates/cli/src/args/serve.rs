//! The options of `boostr serve`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{DraftArgs, ModelArgs};

pub const EXAMPLES: &str = "\
Examples:
  boostr serve model.gguf --port 9000 --sessions ./sessions
  boostr serve ./mamba2-370m --host 0.0.0.0 --api-key-file keys.txt";

pub const NOTES: &str = "\
The first line on stdout is the address. Keys stand in a file, one a line, or in BOOSTR_API_KEY: never on the command \
line, where others can read it. A first SIGTERM or Ctrl-C lets what is running end, a second one does not. Sizes are like \
4MiB or 512M, times like 30s or 2m.";

#[derive(Debug, Args)]
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
    /// Longest body of a request
    #[arg(long, value_name = "BYTES", default_value = "4MiB", value_parser = parse_bytes)]
    pub max_body: usize,
    /// Memory for states of prompts that may come again; at most 512MiB and a quarter of what is free by default
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub state_cache: Option<usize>,
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
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// Whether something is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
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

#[cfg(test)]
mod tests {
    use super::*;

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
