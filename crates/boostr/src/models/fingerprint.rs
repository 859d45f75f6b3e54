//! The identity of a model, by a hash that costs next to nothing.
//!
//! A state belongs to one set of weights: with others it is noise, and nothing would tell. Hashing
//! every weight would page in the whole memory-mapped file. But training, merging and quantizing change
//! all elements of the matrices that they touch. So the hash covers:
//!
//! - the configuration;
//! - every tensor's name, type and shape;
//! - small tensors whole, and two parts of each larger one: about a kilobyte for each tensor.
//!
//! It may miss a change of a few elements, for example of single rows of the embedding. A state of such
//! a model is one of nearly the same model. The hash is no help against intent. What is kept without being asked for goes
//! by the lengths and times of the files too.
//!
//! Mapped files are read when somebody asks for the fingerprint: the system reads ahead around each
//! part that is touched.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use super::Config;
use crate::checkpoint::{Bytes, Checkpoint, Fnv, stamp};

/// Tensors of up to so many bytes are hashed whole: norms, biases, `A_log`, `D`.
const WHOLE: usize = 4096;
/// Bytes of each part of a larger tensor.
const PART: usize = 256;

/// The fingerprint of a model, computed once.
pub(crate) struct Fingerprint {
    /// Of all but the values.
    shapes: u64,
    parts: Vec<Bytes>,
    text: OnceLock<String>,
    /// Name, length and time of each file with weights, when it was loaded; weights in memory have none.
    files: String,
}

impl Fingerprint {
    /// Of a model whose `checkpoint` has the model's own names, `tied` where the embedding is the head.
    pub(crate) fn new(config: &Config, checkpoint: &Checkpoint, tied: bool) -> Self {
        let mut hash = Fnv::default();
        let family = config.family();
        hash.text(family.name());
        // Such a file is the same for later versions of this program; not every configuration has one.
        let json = family.to_json().map(|json| json.to_string());
        hash.text(&json.unwrap_or_else(|_| format!("{config:?}")));
        hash.text(if tied { "tied" } else { "head" });
        let mut parts = Vec::new();
        for (name, entry) in checkpoint.iter() {
            hash.text(name);
            hash.text(entry.dtype.name());
            hash.text(&format!("{:?}", entry.shape));
            let len = entry.data.len();
            let (firsts, size) = match len {
                0..=WHOLE => (vec![0], len),
                _ => (vec![len / 3, len / 3 * 2], PART),
            };
            let ranges = firsts.into_iter().map(|first| first..first + size);
            let data = &entry.data;
            parts.extend(ranges.filter_map(|range| data.slice(range)).map(|part| {
                // Memory that only the loader needs is not to be kept by this.
                if part.is_mapped() { part } else { Bytes::new(part.to_vec()) }
            }));
        }
        let files: BTreeSet<_> = checkpoint.iter().map(|(_, entry)| &*entry.file).collect();
        let stamps: Vec<_> = files.into_iter().filter_map(stamp).collect();
        Self { shapes: hash.0, parts, text: OnceLock::new(), files: stamps.join("\n") }
    }

    /// The files that the weights are in, a line for each: others once one was replaced.
    pub(crate) fn files(&self) -> &str {
        &self.files
    }

    /// Sixteen hexadecimal digits.
    pub(crate) fn text(&self) -> &str {
        self.text.get_or_init(|| {
            let mut hash = Fnv(self.shapes);
            self.parts.iter().for_each(|part| hash.bytes(part));
            format!("{:016x}", hash.0)
        })
    }
}
