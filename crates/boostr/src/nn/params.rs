//! Parameters of a checkpoint by their names, and the check that all are there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::{Backend, DType, Tensor, Weight};
use crate::checkpoint::{Checkpoint, Dtype, TensorEntry};
use crate::error::{Error, Result};
use crate::ops::{self, Client, Format, HostBytes, LinearOps, QuantTensor};

/// Tensors listed in one error.
const MAX_LISTED: usize = 5;

/// What tensors a model expects: their names and shapes.
#[derive(Debug, Clone, Default)]
pub struct Tensors(BTreeMap<String, Vec<usize>>);

impl Tensors {
    /// Adds a tensor.
    pub fn add(&mut self, name: impl Into<String>, shape: &[usize]) {
        self.0.insert(name.into(), shape.to_vec());
    }

    /// The shape of one of them.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&[usize]> {
        self.0.get(name).map(Vec::as_slice)
    }

    /// All of them with their shapes, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.0.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()))
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
            .filter(|(name, _)| !self.0.contains_key(*name))
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

/// Reads parameters under a prefix of names.
pub struct Params<'a, B: Backend> {
    checkpoint: &'a Checkpoint,
    client: &'a B::Client,
    shared: Option<&'a SharedWeights<B>>,
    prefix: String,
    /// Whether some of all tensors are quantized.
    has_blocks: bool,
}

impl<'a, B: Backend> Params<'a, B> {
    /// All tensors of `checkpoint`.
    pub fn new(checkpoint: &'a Checkpoint, client: &'a B::Client) -> Self {
        let has_blocks = checkpoint.iter().any(|(_, entry)| matches!(entry.dtype, Dtype::Block(_)));
        Self { checkpoint, client, shared: None, prefix: String::new(), has_blocks }
    }

    /// The same; weights that are in `shared` are taken from there, others put there.
    #[must_use]
    pub fn sharing(self, shared: Option<&'a SharedWeights<B>>) -> Self {
        Self { shared, ..self }
    }

    /// Those whose names begin with `name` and a dot.
    #[must_use]
    pub fn under(&self, name: &str) -> Self {
        let prefix = format!("{}{name}.", self.prefix);
        Self { prefix, ..*self }
    }

    /// The client that parameters are made for.
    #[must_use]
    pub fn client(&self) -> &B::Client {
        self.client
    }

    /// An error about the tensor `name`.
    #[must_use]
    pub fn error(&self, name: &str, reason: &str) -> Error {
        Error::Tensors {
            path: self.checkpoint.path().to_path_buf(),
            reason: format!("tensor `{}{name}` {reason}", self.prefix),
        }
    }

    fn entry(&self, name: &str) -> Result<&TensorEntry> {
        let full = format!("{}{name}", self.prefix);
        self.checkpoint.get(&full).ok_or_else(|| self.error(name, "is missing"))
    }

    /// A weight matrix, in its stored type. Floats stay in their place, F64 is narrowed to f32, blocks
    /// are handed to the backend, which may keep them in an order of its own.
    ///
    /// # Errors
    ///
    /// When it is missing, no matrix, or of a type that is no float.
    pub fn weight(&self, name: &str) -> Result<Weight<B>> {
        let make = || self.make_weight(name);
        let weight = match self.shared {
            Some(shared) => shared.get(&format!("{}{name}", self.prefix), make),
            None => make(),
        }?;
        if let Some(floats) = weight.floats() {
            self.client.made(Some(&format!("{}{name}", self.prefix)), floats);
        }
        Ok(weight)
    }

    fn make_weight(&self, name: &str) -> Result<Weight<B>> {
        let entry = self.entry(name)?;
        self.checkpoint.taken(entry)?;
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
            _ => {
                let bytes: Vec<u8> =
                    entry.to_f32()?.into_iter().flat_map(f32::to_ne_bytes).collect();
                let all = 0..bytes.len();
                let bytes = HostBytes::new(Arc::new(bytes), all)?;
                return self.client.weight(bytes, DType::F32, &entry.shape);
            }
        };
        // Blocks are taken from a file's memory, which is not to be kept for the few floats beside them.
        if self.has_blocks && !entry.data.is_mapped() {
            let bytes = entry.data.to_vec();
            let all = 0..bytes.len();
            return self.client.weight(HostBytes::new(Arc::new(bytes), all)?, dtype, &entry.shape);
        }
        self.client.weight(host_bytes(entry)?, dtype, &entry.shape)
    }

    /// Weights `name` under each of `layers`, row under row, where all are blocks of one format.
    ///
    /// # Errors
    ///
    /// When one is missing, no matrix, or of another type or width than the first.
    pub fn joined_blocks(&self, layers: &[&str], name: &str) -> Result<Weight<B>> {
        let make = || self.make_joined(layers, name);
        match self.shared {
            Some(shared) => {
                shared.get(&format!("{}{}.{name}", self.prefix, layers.join("+")), make)
            }
            None => make(),
        }
    }

    fn make_joined(&self, layers: &[&str], name: &str) -> Result<Weight<B>> {
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
            self.checkpoint.taken(entry)?;
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
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.entry(name)?.shape)
    }

    /// The format of a parameter's blocks; `None` for floats.
    ///
    /// # Errors
    ///
    /// When it is missing.
    pub fn format(&self, name: &str) -> Result<Option<Format>> {
        match self.entry(name)?.dtype {
            Dtype::Block(format) => Ok(Some(format)),
            _ => Ok(None),
        }
    }

    /// Whether there is a parameter called `name`.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.entry(name).is_ok()
    }

    /// The elements of a small parameter as f32, whatever its stored type.
    ///
    /// # Errors
    ///
    /// When it is missing, or of a type that is no float.
    pub fn values(&self, name: &str) -> Result<Vec<f32>> {
        self.entry(name)?.to_f32()
    }

    /// A small parameter as an f32 tensor.
    ///
    /// # Errors
    ///
    /// As [`Params::values`].
    pub fn tensor(&self, name: &str) -> Result<Tensor<B>> {
        let x = ops::tensor(self.client, &self.values(name)?, &self.entry(name)?.shape)?;
        self.client.made(Some(&format!("{}{name}", self.prefix)), &x);
        Ok(x)
    }
}

fn host_bytes(entry: &TensorEntry) -> Result<HostBytes> {
    HostBytes::new(entry.data.owner().clone(), entry.data.range())
}
