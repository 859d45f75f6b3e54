//! What a server is told when it starts.

use std::time::Duration;

use crate::auth::Keys;

/// Choices for a server. The defaults are those of a server for the person at this machine.
#[derive(Debug, Clone)]
pub struct Config {
    /// What the model is called in `/v1/models` and in answers.
    pub model_name: String,
    /// Who may ask; everyone when there are none.
    pub keys: Keys,
    /// Whether only this machine can reach the server: then the `Host` of a request is checked, and `/health` and
    /// `/metrics` need no key.
    pub loopback: bool,
    /// More names that a `Host` may have. On a public address the check is made only if there are any, or no keys: then
    /// numbers and `localhost` pass too.
    pub allowed_hosts: Vec<String>,
    /// Origins of other pages that may use the API from a browser, like `https://example.org`.
    pub cors_origins: Vec<String>,
    /// Refuse requests with fields that are not known.
    pub strict_fields: bool,
    /// Give the thought of a chat's answer apart from its text, where a request's `reasoning_format` says nothing.
    pub divides_thoughts: bool,
    /// Serve the web page.
    pub page: bool,
    /// Serve `/metrics`.
    pub metrics: bool,
    /// Conversations that are kept; no more can be begun.
    pub max_sessions: usize,
    /// Bytes of all of them on disk; nothing is added once there are so many.
    pub sessions_quota: u64,
    /// Answers of `/v1/responses` that are kept for later requests, at most 64 MiB of them; the least recently used make
    /// room. They are on disk too where sessions are, as far as these leave room of their quota.
    pub max_responses: usize,
    /// Limits of sizes and times.
    pub limits: Limits,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            model_name: "model".into(),
            keys: Keys::default(),
            loopback: true,
            allowed_hosts: Vec::new(),
            cors_origins: Vec::new(),
            strict_fields: false,
            divides_thoughts: true,
            page: true,
            metrics: true,
            max_sessions: 1000,
            sessions_quota: 16 << 30,
            max_responses: 1000,
            limits: Limits::default(),
        }
    }
}

/// How much and how long a client may.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Longest body of a request, in bytes.
    pub max_body: usize,
    /// Memory of all bodies under way, in bytes. The first 64 KiB of each are not counted.
    pub max_inflight: usize,
    /// Longest prompt, in tokens.
    pub max_prompt: usize,
    /// Tokens of an answer when neither the request nor the model says.
    pub default_tokens: usize,
    /// Most tokens of an answer, whatever a request says.
    pub max_tokens: usize,
    /// Connections at once; further ones wait to be accepted.
    pub connections: usize,
    /// Requests whose prompts wait to be encoded; one more is refused.
    pub waiting_prompts: usize,
    /// Requests to tokenize, detokenize or render that wait.
    pub waiting_texts: usize,
    /// Requests about sessions that wait.
    pub waiting_sessions: usize,
    /// For the head of a request.
    pub header_time: Duration,
    /// For the body of a request. It must also come with at least 1 KiB a second, after the first five.
    pub body_time: Duration,
    /// How long a connection may be idle between requests.
    pub idle_time: Duration,
    /// How long a client may read nothing of what is sent to it.
    pub write_time: Duration,
    /// How long a request may wait for its turn.
    pub queue_time: Duration,
    /// For a whole answer, after its turn has come: then it ends as if it had the tokens that it may have.
    pub request_time: Duration,
    /// Silence of a stream after which a comment is sent.
    pub ping_time: Duration,
    /// For what is running when the server is told to stop.
    pub drain_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_body: 4 << 20,
            max_inflight: 128 << 20,
            max_prompt: 1 << 17,
            default_tokens: 512,
            max_tokens: 8192,
            connections: 1024,
            waiting_prompts: 256,
            waiting_texts: 16,
            waiting_sessions: 32,
            header_time: Duration::from_secs(10),
            body_time: Duration::from_secs(30),
            idle_time: Duration::from_mins(1),
            write_time: Duration::from_secs(30),
            queue_time: Duration::from_mins(1),
            request_time: Duration::from_mins(10),
            ping_time: Duration::from_secs(15),
            drain_time: Duration::from_secs(30),
        }
    }
}
