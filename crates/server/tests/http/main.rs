//! The server over real sockets, spoken to in raw bytes, with the embedded model.

mod anthropic;
mod client;
mod generation;
mod limits;
mod ollama;
mod overload;
mod protocol;
mod responses;
mod scored;
mod server;
mod sessions;
mod shape;
mod stopping;
mod thoughts;
