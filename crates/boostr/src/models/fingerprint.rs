//! Which model it is, by a hash that costs next to nothing.
//!
//! A state belongs to one set of weights: with others it is noise, and nothing would tell. To hash all weights
//! would read all of a file that is mapped so that only what is used is read. But what makes another model of
//! the same shape (other training, merging, quantizing) changes all elements of the matrices that it
//! touches. So the hash is of the configuration, of every tensor's name, type and shape, of small tensors whole, and of
//! two parts of each larger one: about a kilobyte for each tensor, under a millisecond for a model of 130 million
//! parameters. What it may miss is a change of a few elements, such as single rows of the embedding: a
//! state of such a model is one of nearly the same model. It is no help against intent.

use super::Config;
use crate::checkpoint::{Checkpoint, Fnv};

/// Tensors of up to so many bytes are hashed whole: norms, biases, `A_log`, `D`.
const WHOLE: usize = 4096;
/// Bytes of each part of a larger tensor.
const PART: usize = 256;

/// The fingerprint of a model whose `checkpoint` has the model's own names, `tied` where the embedding is the head.
pub(super) fn of(config: &Config, checkpoint: &Checkpoint, tied: bool) -> String {
    let mut hash = Fnv::default();
    let family = config.family();
    hash.text(family.name());
    // Such a file is the same for later versions of this program; not every configuration has one.
    let json = family.to_json().map(|json| json.to_string());
    hash.text(&json.unwrap_or_else(|_| format!("{config:?}")));
    hash.text(if tied { "tied" } else { "head" });
    for (name, entry) in checkpoint.iter() {
        hash.text(name);
        hash.text(entry.dtype.name());
        hash.text(&format!("{:?}", entry.shape));
        let data = &*entry.data;
        if data.len() <= WHOLE {
            hash.bytes(data);
            continue;
        }
        for third in [1, 2] {
            let first = data.len() / 3 * third;
            hash.bytes(&data[first..first + PART]);
        }
    }
    format!("{:016x}", hash.0)
}
