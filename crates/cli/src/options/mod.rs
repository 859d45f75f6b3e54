//! Groups of options that several commands share, and what each means.

pub mod context;
pub mod draft;
pub mod grammar;
pub mod model;
pub mod sampling;
pub mod state;
pub mod template;
