//! Parameters of a checkpoint by their names, and the check that all are there.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use super::packs::{Pack, Packs};
use crate::backend::{Backend, DType, Tensor, Weight};
use crate::checkpoint::{Checkpoint, Dtype, TensorEntry};
use crate::error::{Error, Result};
use crate::ops::{self, Client, Format, HostBytes, LinearOps, QuantTensor};

/// Tensors listed in one error.
const MAX_LISTED: usize = 5;

/// What tensors a model expects: their names and shapes.
#[derive(Debug, Clone, Default)]
pub struct Tensors {
    shapes: BTreeMap<String, Vec<usize>>,
    /// Those that are [offsets](Self::are_offsets).
    offsets: BTreeSet<String>,
}

impl Tensors {
    /// Adds a tensor.
    pub fn add(&mut self, name: impl Into<String>, shape: &[usize]) {
        self.shapes.insert(name.into(), shape.to_vec());
    }

    /// Whether a tensor has what factors are above 1, and so begins as zeros.
    #[must_use]
    pub fn are_offsets(&self, name: &str) -> bool {
        self.offsets.contains(name)
    }

    /// The shape of one of them.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&[usize]> {
        self.shapes.get(name).map(Vec::as_slice)
    }

    /// All of them with their shapes, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.shapes.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()))
    }

    /// Checks that the checkpoint has these tensors in these shapes and no others.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] that lists what is missing, misshapen and unexpected.
    pub fn check(&self, checkpoint: &Checkpoint) -> Result<()> {
        let mut missing = Vec::new();
        let mut misshapen = Vec::new();
        for (name, shape) in self.iter() {
            match checkpoint.get(name) {
                None => missing.push(format!("`{name}` {shape:?}")),
                Some(entry) if entry.shape != shape => {
                    misshapen.push(format!("`{name}` {:?}, expected {shape:?}", entry.shape));
                }
                Some(_) => {}
            }
        }
        let unexpected: Vec<String> = checkpoint
            .iter()
            .filter(|(name, _)| !self.shapes.contains_key(*name))
            .map(|(name, entry)| format!("`{}` {:?}", name.escape_debug(), entry.shape))
            .collect();
        let lists: Vec<String> =
            [("missing", missing), ("wrong shape", misshapen), ("unexpected", unexpected)]
                .into_iter()
                .filter(|(_, list)| !list.is_empty())
                .map(|(what, list)| listed(what, &list))
                .collect();
        if lists.is_empty() {
            return Ok(());
        }
        let path = checkpoint.path().to_path_buf();
        Err(Error::Tensors { path, reason: lists.join("; ") })
    }
}

fn listed(what: &str, list: &[String]) -> String {
    let shown = list[..list.len().min(MAX_LISTED)].join(", ");
    let more = match list.len().saturating_sub(MAX_LISTED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{} tensors {what}: {shown}{more}", list.len())
}

/// The weights of a model by their names, for others of the same file. Adapters are not among them.
pub struct SharedWeights<B: Backend>(Mutex<BTreeMap<String, Weight<B>>>);

impl<B: Backend> Default for SharedWeights<B> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<B: Backend> SharedWeights<B> {
    /// The weight `name`, which `make` makes unless it is there.
    fn get(&self, name: &str, make: impl FnOnce() -> Result<Weight<B>>) -> Result<Weight<B>> {
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if name.contains(".lora_") {
            return make();
        }
        if let Some(weight) = known().get(name) {
            return Ok(weight.clone());
        }
        let weight = make()?;
        known().insert(name.to_owned(), weight.clone());
        Ok(weight)
    }
}

/// Parameters under a prefix of names: read from a checkpoint, or only listed.
///
/// A layer names each of its parameters once, with the shape that it has. Of a listing it gets placeholders, and
/// what it named is in the list afterwards.
pub struct Params<'a, B: Backend> {
    source: Source<'a, B>,
    client: &'a B::Client,
    prefix: String,
    /// What several layers share, by its name.
    shared: Rc<RefCell<BTreeMap<String, Arc<dyn Any + Send + Sync>>>>,
    /// Whether they are of experts, of which a token reads few.
    are_chosen: bool,
    /// Bytes of weights that lie in files, and of those in memory.
    placed: Rc<Cell<[usize; 2]>>,
}

enum Source<'a, B: Backend> {
    Checkpoint {
        checkpoint: &'a Checkpoint,
        /// Whether some of all tensors are quantized.
        has_blocks: bool,
        /// Where weights are taken from, and put, for other models of the same file.
        weights: Option<&'a SharedWeights<B>>,
        /// The file of experts that were packed before.
        packs: Option<&'a Packs>,
    },
    List(Rc<Listing<'a, B>>),
}

/// A list that grows, and what stands for each of its parameters.
struct Listing<'a, B: Backend> {
    tensors: RefCell<Tensors>,
    weight: Weight<B>,
    tensor: Tensor<B>,
    /// Where the experts are whose blocks are listed, and those found so far.
    blocks: Option<(&'a Checkpoint, RefCell<Vec<Pack>>)>,
}

impl<B: Backend> Clone for Source<'_, B> {
    fn clone(&self) -> Self {
        match self {
            Self::List(listing) => Self::List(listing.clone()),
            &Self::Checkpoint { checkpoint, has_blocks, weights, packs } => {
                Self::Checkpoint { checkpoint, has_blocks, weights, packs }
            }
        }
    }
}

impl<'a, B: Backend> Params<'a, B> {
    /// All tensors of `checkpoint`.
    pub fn new(checkpoint: &'a Checkpoint, client: &'a B::Client) -> Self {
        let has_blocks = checkpoint.iter().any(|(_, entry)| matches!(entry.dtype, Dtype::Block(_)));
        Self::of(Source::Checkpoint { checkpoint, has_blocks, weights: None, packs: None }, client)
    }

    fn of(source: Source<'a, B>, client: &'a B::Client) -> Self {
        let (shared, placed) = (Rc::default(), Rc::default());
        Self { source, client, prefix: String::new(), shared, are_chosen: false, placed }
    }

    /// The same; weights that are in `shared` are taken from there, others put there.
    #[must_use]
    pub fn sharing(mut self, shared: Option<&'a SharedWeights<B>>) -> Self {
        if let Source::Checkpoint { weights, .. } = &mut self.source {
            *weights = shared;
        }
        self
    }

    /// The same; experts' blocks that are in `packs` are taken from there.
    #[must_use]
    pub fn packed_in(mut self, file: Option<&'a Packs>) -> Self {
        if let Source::Checkpoint { packs, .. } = &mut self.source {
            *packs = file;
        }
        self
    }

    /// Names and shapes of all that `load` asks for.
    ///
    /// # Errors
    ///
    /// What `load` returns.
    pub fn list(client: &'a B::Client, load: impl FnOnce(&Self) -> Result<()>) -> Result<Tensors> {
        Ok(Self::listing(client, None, load)?.tensors.take())
    }

    /// The blocks of `checkpoint` that are [experts'](Self::chosen), as `load` asks for them.
    ///
    /// # Errors
    ///
    /// What `load` returns.
    pub fn list_packs(
        checkpoint: &'a Checkpoint,
        client: &'a B::Client,
        load: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<Vec<Pack>> {
        let listing = Self::listing(client, Some(checkpoint), load)?;
        Ok(listing.blocks.as_ref().map(|(_, blocks)| blocks.take()).unwrap_or_default())
    }

    fn listing(
        client: &'a B::Client,
        blocks: Option<&'a Checkpoint>,
        load: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<Rc<Listing<'a, B>>> {
        let bytes = HostBytes::new(Arc::new(0f32.to_ne_bytes()), 0..4)?;
        let listing = Rc::new(Listing {
            tensors: RefCell::default(),
            weight: client.weight(bytes, DType::F32, &[1, 1])?,
            tensor: ops::zeros(client, &[1])?,
            blocks: blocks.map(|checkpoint| (checkpoint, RefCell::default())),
        });
        load(&Self::of(Source::List(listing.clone()), client))?;
        Ok(listing)
    }

    /// The same parameters, of which a token reads those of few experts.
    #[must_use]
    pub fn chosen(&self) -> Self {
        Self { are_chosen: true, ..self.at(self.prefix.clone()) }
    }

    /// Bytes of the weights made so far that lie in files, which the system reads where they are touched, and of those
    /// that are in memory.
    #[must_use]
    pub fn placed(&self) -> [usize; 2] {
        self.placed.get()
    }

    /// Those whose names begin with `name` and a dot.
    #[must_use]
    pub fn under(&self, name: &str) -> Self {
        self.at(format!("{}{name}.", self.prefix))
    }

    /// All of them again, whatever the prefix.
    #[must_use]
    pub fn root(&self) -> Self {
        self.at(String::new())
    }

    fn at(&self, prefix: String) -> Self {
        let (source, shared) = (self.source.clone(), self.shared.clone());
        let (are_chosen, placed) = (self.are_chosen, self.placed.clone());
        Self { source, client: self.client, prefix, shared, are_chosen, placed }
    }

    /// What `load` makes of these parameters, made once however many layers ask for it.
    ///
    /// # Errors
    ///
    /// What `load` returns.
    pub fn once<T: Any + Send + Sync>(
        &self,
        load: impl FnOnce(&Self) -> Result<T>,
    ) -> Result<Arc<T>> {
        let made = self.shared.borrow().get(&self.prefix).cloned();
        if let Some(made) = made.and_then(|made| made.downcast().ok()) {
            return Ok(made);
        }
        let made = Arc::new(load(self)?);
        self.shared.borrow_mut().insert(self.prefix.clone(), made.clone());
        Ok(made)
    }

    /// What `load` makes of each number below `count`. Of a listing the first alone is kept.
    ///
    /// # Errors
    ///
    /// What `load` returns.
    pub fn each<T>(&self, count: usize, load: impl Fn(usize) -> Result<T>) -> Result<Vec<T>> {
        let mut all = Vec::new();
        for i in 0..count {
            let made = load(i)?;
            if i == 0 || !self.is_list() {
                all.push(made);
            }
        }
        Ok(all)
    }

    /// A tensor that is computed of others, which a listing does without.
    ///
    /// # Errors
    ///
    /// What `make` returns.
    pub fn computed(
        &self,
        make: impl FnOnce(&B::Client) -> Result<Tensor<B>>,
    ) -> Result<Tensor<B>> {
        match &self.source {
            Source::List(listing) => Ok(listing.tensor.clone()),
            Source::Checkpoint { .. } => make(self.client),
        }
    }

    /// Rows of `widths`, all of a band times one factor, as a tensor; `None` where all factors are 1.
    ///
    /// # Errors
    ///
    /// When memory is short.
    pub fn factors(&self, bands: &[(usize, f32)]) -> Result<Option<Tensor<B>>> {
        if bands.iter().all(|&(width, factor)| width == 0 || factor == 1.0) {
            return Ok(None);
        }
        let factors = self.computed(|client| {
            let all: Vec<f32> =
                bands.iter().flat_map(|&(width, factor)| vec![factor; width]).collect();
            ops::tensor(client, &all, &[all.len()])
        });
        factors.map(Some)
    }

    /// What a layer computes of its configuration alone; `None` where parameters are only listed, which takes no time
    /// whatever the sizes.
    pub fn when_loaded<T>(&self, compute: impl FnOnce() -> T) -> Option<T> {
        (!self.is_list()).then(compute)
    }

    fn is_list(&self) -> bool {
        matches!(self.source, Source::List(_))
    }

    /// Adds a parameter to the list, if this is one.
    fn listed(&self, name: &str, shape: &[usize]) -> Option<&Listing<'a, B>> {
        let Source::List(listing) = &self.source else { return None };
        listing.tensors.borrow_mut().add(format!("{}{name}", self.prefix), shape);
        Some(listing)
    }

    /// The client that parameters are made for.
    #[must_use]
    pub fn client(&self) -> &B::Client {
        self.client
    }

    /// An error about the tensor `name`.
    #[must_use]
    pub fn error(&self, name: &str, reason: &str) -> Error {
        let path = match &self.source {
            Source::Checkpoint { checkpoint, .. } => checkpoint.path().to_path_buf(),
            Source::List(_) => PathBuf::new(),
        };
        Error::Tensors { path, reason: format!("tensor `{}{name}` {reason}", self.prefix) }
    }

    fn entry(&self, name: &str) -> Result<&'a TensorEntry> {
        let full = format!("{}{name}", self.prefix);
        let entry = match &self.source {
            Source::Checkpoint { checkpoint, .. } => checkpoint.get(&full),
            Source::List(listing) => listing.blocks.as_ref().and_then(|(of, _)| of.get(&full)),
        };
        entry.ok_or_else(|| self.error(name, "is missing"))
    }

    /// Tells how much of the file was taken.
    fn taken(&self, entry: &TensorEntry) -> Result<()> {
        match self.source {
            Source::Checkpoint { checkpoint, .. } => checkpoint.taken(entry),
            Source::List(_) => Ok(()),
        }
    }

    /// A weight matrix of a shape, in its stored type. Floats stay in their place, F64 is narrowed to f32, blocks
    /// are handed to the backend, which may keep them in an order of its own.
    ///
    /// # Errors
    ///
    /// When it is missing, no matrix, or of a type that is no float.
    pub fn weight(&self, name: &str, shape: [usize; 2]) -> Result<Weight<B>> {
        self.made_weight(name, &shape, || self.make_weight(name))
    }

    /// The weight that `make` makes, unless it is only listed or there already.
    fn made_weight(
        &self,
        name: &str,
        shape: &[usize],
        make: impl FnOnce() -> Result<Weight<B>>,
    ) -> Result<Weight<B>> {
        if let Some(listing) = self.listed(name, shape) {
            self.add_pack(name, &[""])?;
            return Ok(listing.weight.clone());
        }
        let weight = match self.source {
            Source::Checkpoint { weights: Some(shared), .. } => {
                shared.get(&format!("{}{name}", self.prefix), make)
            }
            _ => make(),
        }?;
        if let Some(floats) = weight.floats() {
            self.client.made(Some(&format!("{}{name}", self.prefix)), floats);
        }
        self.place(&weight, name);
        Ok(weight)
    }

    /// Counts a weight that was made of `name`, or of several like it.
    fn place(&self, weight: &Weight<B>, name: &str) {
        let [mut in_files, mut in_memory] = self.placed.get();
        let is_mapped = self.entry(name).is_ok_and(|entry| entry.data.is_mapped());
        let is_in_file = weight.is_borrowed() && is_mapped;
        let bytes = if is_in_file { &mut in_files } else { &mut in_memory };
        *bytes += weight.size_in_bytes();
        self.placed.set([in_files, in_memory]);
    }

    /// The blocks `name` under each of `layers`, row under row, if they are experts'.
    fn pack(&self, name: &str, layers: &[&str]) -> Result<Option<Pack>> {
        if !self.are_chosen {
            return Ok(None);
        }
        let mut parts = Vec::new();
        for layer in layers {
            let params =
                if layer.is_empty() { self.at(self.prefix.clone()) } else { self.under(layer) };
            parts.push(params.entry(name)?.clone());
        }
        let joined = layers.join("+");
        let dot = if joined.is_empty() { "" } else { "." };
        let full = format!("{}{joined}{dot}{name}", self.prefix);
        Ok(Pack::new(full, parts))
    }

    /// Adds experts' blocks to the list, if this is one of them.
    fn add_pack(&self, name: &str, layers: &[&str]) -> Result<()> {
        let Source::List(listing) = &self.source else { return Ok(()) };
        let Some((_, blocks)) = &listing.blocks else { return Ok(()) };
        blocks.borrow_mut().extend(self.pack(name, layers)?);
        Ok(())
    }

    /// Experts' blocks where they were packed before, if they were.
    fn packed_before(&self, name: &str, layers: &[&str]) -> Result<Option<Weight<B>>> {
        let Source::Checkpoint { packs: Some(packs), .. } = self.source else { return Ok(None) };
        match self.pack(name, layers)? {
            Some(pack) => packs.weight::<B>(&pack, self.client),
            None => Ok(None),
        }
    }

    fn make_weight(&self, name: &str) -> Result<Weight<B>> {
        if let Some(weight) = self.packed_before(name, &[""])? {
            return Ok(weight);
        }
        let entry = self.entry(name)?;
        self.taken(entry)?;
        let dtype = match entry.dtype {
            Dtype::F32 => DType::F32,
            Dtype::BF16 => DType::BF16,
            Dtype::F16 => DType::F16,
            Dtype::Block(format) => {
                let &[features, width] = entry.shape.as_slice() else {
                    return Err(self.error(name, &format!("{:?} is no matrix", entry.shape)));
                };
                let blocks = QuantTensor::new(host_bytes(entry)?, format, [features, width])?;
                let weight = self.client.quantized(&blocks)?;
                entry.data.release();
                return Ok(weight);
            }
            _ => return self.widened(entry),
        };
        // Blocks are taken from a file's memory, which is not to be kept for the few floats beside them.
        let has_blocks = matches!(self.source, Source::Checkpoint { has_blocks: true, .. });
        if has_blocks && !entry.data.is_mapped() {
            let bytes = entry.data.to_vec();
            let all = 0..bytes.len();
            return self.client.weight(HostBytes::new(Arc::new(bytes), all)?, dtype, &entry.shape);
        }
        self.client.weight(host_bytes(entry)?, dtype, &entry.shape)
    }

    /// Several matrices of one shape as a weight, one after another. Floats stay in their place, blocks become f32.
    ///
    /// # Errors
    ///
    /// When it is missing, or of a type that is no float.
    pub fn matrices(&self, name: &str, shape: [usize; 3]) -> Result<Weight<B>> {
        self.made_weight(name, &shape, || {
            let entry = self.entry(name)?;
            if !matches!(entry.dtype, Dtype::Block(_)) {
                return self.make_weight(name);
            }
            self.taken(entry)?;
            let weight = self.widened(entry)?;
            entry.data.release();
            Ok(weight)
        })
    }

    /// A weight of what an entry has, as f32.
    fn widened(&self, entry: &TensorEntry) -> Result<Weight<B>> {
        let bytes: Vec<u8> = entry.to_f32()?.into_iter().flat_map(f32::to_ne_bytes).collect();
        let all = 0..bytes.len();
        self.client.weight(HostBytes::new(Arc::new(bytes), all)?, DType::F32, &entry.shape)
    }

    /// Weights `name` under each of `layers`, row under row, where all are blocks of one format.
    ///
    /// # Errors
    ///
    /// When one is missing, no matrix, or of another type or width than the first.
    pub fn joined_blocks(&self, layers: &[&str], name: &str) -> Result<Weight<B>> {
        if let Source::List(listing) = &self.source {
            self.add_pack(name, layers)?;
            return Ok(listing.weight.clone());
        }
        let make = || self.make_joined(layers, name);
        let weight = match self.source {
            Source::Checkpoint { weights: Some(shared), .. } => {
                shared.get(&format!("{}{}.{name}", self.prefix, layers.join("+")), make)
            }
            _ => make(),
        }?;
        self.under(layers.first().copied().unwrap_or_default()).place(&weight, name);
        Ok(weight)
    }

    fn make_joined(&self, layers: &[&str], name: &str) -> Result<Weight<B>> {
        if let Some(weight) = self.packed_before(name, layers)? {
            return Ok(weight);
        }
        let (mut bytes, mut rows, mut first) = (Vec::new(), 0, None);
        for layer in layers {
            let params = self.under(layer);
            let entry = params.entry(name)?;
            let (Dtype::Block(format), &[features, width]) = (entry.dtype, &entry.shape[..]) else {
                let reason = format!("{:?} {:?} is no matrix of blocks", entry.dtype, entry.shape);
                return Err(params.error(name, &reason));
            };
            if *first.get_or_insert((format, width)) != (format, width) {
                return Err(params.error(name, "has other blocks than those it is joined with"));
            }
            self.taken(entry)?;
            bytes.extend_from_slice(&entry.data);
            rows += features;
            entry.data.release();
        }
        let Some((format, width)) = first else {
            return Err(self.error(name, "is missing"));
        };
        let all = 0..bytes.len();
        let bytes = HostBytes::new(Arc::new(bytes), all)?;
        self.client.quantized(&QuantTensor::new(bytes, format, [rows, width])?)
    }

    /// The shape of a parameter.
    ///
    /// # Errors
    ///
    /// When it is missing.
    pub fn shape(&self, name: &str) -> Result<&'a [usize]> {
        Ok(&self.entry(name)?.shape)
    }

    /// The format of a parameter's blocks; `None` for floats.
    ///
    /// # Errors
    ///
    /// When it is missing.
    pub fn format(&self, name: &str) -> Result<Option<Format>> {
        match self.entry(name) {
            Ok(TensorEntry { dtype: Dtype::Block(format), .. }) => Ok(Some(*format)),
            Err(missing) if !self.is_list() => Err(missing),
            _ => Ok(None),
        }
    }

    /// Whether there is a parameter called `name`.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.entry(name).is_ok()
    }

    /// The elements of a small parameter of a shape as f32, whatever its stored type; none of a listing.
    ///
    /// # Errors
    ///
    /// When it is missing, or of a type that is no float.
    pub fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        match self.listed(name, shape) {
            Some(_) => Ok(Vec::new()),
            None => self.entry(name)?.to_f32(),
        }
    }

    /// A small parameter as [`tensor`](Self::tensor) gives it, of what factors are above 1.
    ///
    /// # Errors
    ///
    /// As [`Params::values`].
    pub fn offsets(&self, name: &str, shape: &[usize]) -> Result<Tensor<B>> {
        if let Source::List(listing) = &self.source {
            listing.tensors.borrow_mut().offsets.insert(format!("{}{name}", self.prefix));
        }
        self.tensor(name, shape)
    }

    /// A small parameter of a shape as an f32 tensor.
    ///
    /// # Errors
    ///
    /// As [`Params::values`].
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<B>> {
        if let Some(listing) = self.listed(name, shape) {
            return Ok(listing.tensor.clone());
        }
        let entry = self.entry(name)?;
        let x = ops::tensor(self.client, &entry.to_f32()?, &entry.shape)?;
        self.client.made(Some(&format!("{}{name}", self.prefix)), &x);
        Ok(x)
    }
}

fn host_bytes(entry: &TensorEntry) -> Result<HostBytes> {
    HostBytes::new(entry.data.owner().clone(), entry.data.range())
}
