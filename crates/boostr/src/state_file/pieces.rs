//! A state in several files: keys and values of a whole history in segments, which all states have in common that go the
//! same way, and a file for each state with the rest.
//!
//! Each is a file of a state. That of a segment has the keys and values of its positions alone. The rest has the last
//! rows, from the end of the last segment on, and all of layers that see a window.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use super::parts::Parts;
use super::{About, Extent, KEYS, Part, SavedState, StateType, file_of, rows_of};
use crate::backend::{Backend, KvCache};
use crate::checkpoint::{Dtype, safetensors};
use crate::error::{Error, Result};
use crate::models::{Model, State};
use crate::nn::{Kept, Slot, SlotSize, Slots};
use crate::ops::{AttentionOps, KvSizes, KvType};

/// Positions of a segment; whole pages of a KV cache.
pub(crate) const SEGMENT: usize = 256;

/// Bytes of the ids of a state in pieces, at most.
pub(crate) const MAX_IDS: usize = 16 << 20;

/// Longest header of a file that is looked into.
const MAX_HEADER: usize = 16 << 20;

/// A state that is to be written in pieces.
pub(crate) struct Pieces<B: Backend> {
    state: State<B>,
    /// Layers whose keys and values go to segments.
    layers: Vec<usize>,
}

impl<B: Backend> Pieces<B> {
    /// # Errors
    ///
    /// As [`Model::check_state`].
    pub(crate) fn new(model: &Model<B>, state: State<B>) -> Result<Self> {
        model.check_state(&state)?;
        let kind = model.kv_type();
        let is_other =
            |kept: &Kept<B>| matches!(kept, Kept::Rows(cache) if cache.sizes().kind != kind);
        if state.slots().any(|(_, _, kept)| is_other(kept)) {
            let reason =
                format!("expected keys and values of type {}, as the model's", kind.name());
            return Err(Error::Argument { name: "state", reason });
        }
        let layers = shared_layers(&state);
        Ok(Self { state, layers })
    }

    /// Bytes of the data of the rest, and of those of a segment, without ids.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        let kind = self.state.slots().find_map(|(_, _, kept)| match kept {
            Kept::Rows(cache) => Some(cache.sizes().kind),
            Kept::Tensor(_) => None,
        });
        let (mut own, mut segment) = (0_usize, 0_usize);
        for (part, shape) in self.state.parts() {
            let dtype = StateType::F32.of(&part, kind);
            let of = |rows: usize| {
                let shape: Vec<usize> =
                    [rows].into_iter().chain(shape.iter().skip(1).copied()).collect();
                dtype.bytes_of(&shape).unwrap_or(usize::MAX)
            };
            if part.is_kv() && self.layers.contains(&part.layer) {
                let rows = self.state.position().checked_rem(SEGMENT).unwrap_or(0);
                own = own.saturating_add(of(rows));
                segment = segment.saturating_add(of(SEGMENT));
            } else {
                own = own.saturating_add(dtype.bytes_of(&shape).unwrap_or(usize::MAX));
            }
        }
        (own, segment)
    }

    /// How many segments it has.
    pub(crate) fn segments(&self) -> usize {
        if self.layers.is_empty() { 0 } else { self.state.position() / SEGMENT }
    }

    /// The file of its `index`-th segment; `ids` are all that the state has seen.
    pub(crate) fn segment(&self, model: &Model<B>, index: usize, ids: &[u32]) -> Result<Vec<u8>> {
        let first = index.saturating_mul(SEGMENT);
        let end = first.saturating_add(SEGMENT);
        let state = self.between(first, end)?;
        let about = About { ids: ids.get(..end), ..About::new("") };
        let extent = Extent { layers: Some(&self.layers), more: &[] };
        file_of(model, &state, &about, &extent, |tensors, metadata, data| {
            safetensors::to_bytes(tensors, metadata, data)
        })
    }

    /// The file of the rest, with more metadata.
    pub(crate) fn rest(
        &self,
        model: &Model<B>,
        ids: &[u32],
        more: &[(&str, String)],
    ) -> Result<Vec<u8>> {
        let first = self.segments().saturating_mul(SEGMENT);
        let state = self.between(first, self.state.position())?;
        let about = About { ids: Some(ids), ..About::new("") };
        let extent = Extent { layers: None, more };
        file_of(model, &state, &about, &extent, |tensors, metadata, data| {
            safetensors::to_bytes(tensors, metadata, data)
        })
    }

    /// The state as if it ended at `end`, with rows of the layers that have segments from `first` on.
    fn between(&self, first: usize, end: usize) -> Result<State<B>> {
        let mut state = self.state.clone();
        for &layer in &self.layers {
            let rows = self.state.layer(layer).into_iter().flat_map(Slots::iter);
            for (slot, kept) in rows {
                if let Kept::Rows(cache) = kept {
                    let mut cache = cache.clone();
                    cache.cut(end);
                    cache.forget(first);
                    state.set(layer, slot.name(), Kept::Rows(cache))?;
                }
            }
        }
        state.set_position(end);
        Ok(state)
    }
}

/// The layers whose keys and values are the same pages for all states that go a state's way, and are there from the first
/// position on.
fn shared_layers<B: Backend>(state: &State<B>) -> Vec<usize> {
    let shares = |(layer, slot, kept): (usize, &Slot, &Kept<B>)| {
        let (SlotSize::Rows { window: None, .. }, Kept::Rows(cache)) = (slot.size(), kept) else {
            return None;
        };
        // A cache of tensors keeps all.
        let mut without = cache.clone();
        without.forget(SEGMENT);
        (cache.len() >= SEGMENT && without.first() == SEGMENT).then_some(layer)
    };
    state.slots().filter_map(shares).collect()
}

/// What a file says of itself, looked at without its tensors.
pub(crate) struct Seen {
    /// Its metadata.
    pub(crate) metadata: BTreeMap<String, String>,
    /// The ids.
    pub(crate) ids: Vec<u32>,
}

/// Looks into the file of a state, which is not checked further than for its length.
///
/// # Errors
///
/// [`Error::Io`] when the system refuses, [`Error::Format`] for a header that is none or not that of this length, and for
/// ids that are none or too many.
pub(crate) fn peek(path: &Path, mut file: File) -> Result<Seen> {
    let wanted = (super::IDS, Dtype::U32);
    let (metadata, bytes) = safetensors::peek(path, &mut file, wanted, [MAX_HEADER, MAX_IDS])?;
    let ids = bytes.as_chunks().0.iter().map(|&id| u32::from_le_bytes(id)).collect();
    Ok(Seen { metadata, ids })
}

/// Puts a state together again, for the ids that it has seen. `read` gives the file of the rest, then those of
/// segments by their index.
///
/// # Errors
///
/// As [`SavedState::restore`]; [`Error::Format`] for a file of other ids, or one that is no such piece.
pub(crate) fn restore<B: Backend>(
    model: &Model<B>,
    ids: &[u32],
    rest: &SavedState,
    mut read: impl FnMut(usize) -> Result<SavedState>,
) -> Result<State<B>> {
    check(rest, model, ids)?;
    let mut before = BTreeMap::new();
    let count = segments(model, rest)?;
    for index in 0..count {
        let saved = read(index)?;
        let end = index.saturating_add(1).saturating_mul(SEGMENT);
        check(&saved, model, ids.get(..end).unwrap_or_default())?;
        if saved.kv_type != rest.kv_type {
            return Err(saved.error("metadata `kv_type`: another than that of the state"));
        }
        add(model, &saved, &mut before)?;
    }
    rest.restore_onto(model, &mut before)
}

/// Refuses a piece of another model, or of other ids.
fn check<B: Backend>(saved: &SavedState, model: &Model<B>, ids: &[u32]) -> Result<()> {
    saved.check_model(model)?;
    if saved.kv_type.is_some_and(|kind| kind != model.kv_type()) {
        return Err(saved.error("metadata `kv_type`: another than that of the model"));
    }
    if saved.ids() != Some(ids) {
        return Err(
            saved.error(format!("tensor `ids`: expected {} that were asked for", ids.len()))
        );
    }
    Ok(())
}

/// The first layer whose keys and values go to segments.
fn first_shared<B: Backend>(model: &Model<B>) -> Option<usize> {
    let is_shared = |size: &SlotSize| matches!(size, SlotSize::Rows { window: None, .. });
    let mut layers = model.family().layers().into_iter();
    layers.position(|spec| spec.slots().iter().any(|slot| is_shared(slot.size())))
}

/// Whether states of a model have segments.
pub(crate) fn has_segments<B: Backend>(model: &Model<B>) -> bool {
    first_shared(model).is_some()
}

/// Whether states of a model are keys and values alone, none of which are ever forgotten.
pub(crate) fn is_rows_alone<B: Backend>(model: &Model<B>) -> bool {
    let is_shared = |size: &SlotSize| matches!(size, SlotSize::Rows { window: None, .. });
    let mut layers = model.family().layers().into_iter();
    layers.all(|spec| spec.slots().iter().all(|slot| is_shared(slot.size())))
}

/// How many segments come before the rest of a state.
fn segments<B: Backend>(model: &Model<B>, rest: &SavedState) -> Result<usize> {
    let Some(layer) = first_shared(model) else { return Ok(0) };
    let name = Part::new(layer, KEYS).to_string();
    let rows = rest.checkpoint.get(&name).and_then(|entry| entry.shape.first().copied());
    let first = rest.position.saturating_sub(rows.unwrap_or(0));
    if first.is_multiple_of(SEGMENT) {
        return Ok(first.checked_div(SEGMENT).unwrap_or(0));
    }
    Err(rest.error(format!("tensor `{name}`: begins at {first}, expected the end of a segment")))
}

/// Adds the rows of a segment to those before.
fn add<B: Backend>(
    model: &Model<B>,
    saved: &SavedState,
    before: &mut BTreeMap<usize, KvCache<B>>,
) -> Result<()> {
    for (layer, spec) in model.family().layers().iter().enumerate() {
        for slot in spec.slots() {
            let SlotSize::Rows { sizes, window: None } = slot.size() else { continue };
            let sizes = KvSizes { kind: saved.kv_type.unwrap_or(KvType::F32), ..*sizes };
            let mut read =
                |part: &Part, expected: &[Option<usize>]| saved.read(&part.to_string(), expected);
            let (keys, values) = rows_of(layer, sizes, &mut read)?;
            let mut cache = match before.remove(&layer) {
                Some(cache) => cache,
                None => model.client().new_cache(sizes)?,
            };
            cache.extend(&keys, &values).map_err(|error| saved.error(error.to_string()))?;
            if cache.len() != saved.position {
                let found = cache.len();
                return Err(saved.error(format!(
                    "layer {layer}: expected a segment, found rows up to {found}"
                )));
            }
            before.insert(layer, cache);
        }
    }
    Ok(())
}
