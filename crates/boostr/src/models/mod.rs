//! One architecture, one file. Models open no file and hold no state of a sequence.

pub mod mamba2;
