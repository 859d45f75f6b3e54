//! The server over real sockets, spoken to in raw bytes, with the embedded model.

mod client;
mod generation;
mod limits;
mod overload;
mod protocol;
mod server;
mod sessions;
mod shape;
mod stopping;
