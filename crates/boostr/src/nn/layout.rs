//! The mapping between the tensors of a file and a model's parameters.
//!
//! A model names its parameters once, most as transformers does. A file may keep several of them as one
//! tensor (experts stacked, gate and up projection one after another). It may have their rows in
//! another order, or another function of their values. A [`Layout`] describes this tensor by tensor,
//! and serves both ways: reading cuts parameters out of the file's bytes in place, writing puts tensors
//! together.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::slice::from_ref;
use std::sync::Arc;

use super::params::Tensors;
use crate::checkpoint::{Bytes, Checkpoint, Dtype, TensorEntry};
use crate::error::{Error, Result};

/// Why a tensor of interleaved rows cannot be read or written.
const NOT_INTERLEAVED: &str = "has rows that are not whole heads with two halves that rotate";

/// Why a tensor whose rows or columns are moved cannot be read or written.
const NOT_IN_BANDS: &str = "cannot be cut into the heads whose order differs in this file";

/// The tensors of one kind of file.
#[derive(Debug, Clone, Default)]
pub struct Layout(pub Vec<Stored>);

/// One tensor of a file.
#[derive(Debug, Clone)]
pub struct Stored {
    /// Its name in the file.
    pub name: String,
    /// Its shape in the file.
    pub shape: Vec<usize>,
    /// The parameters that it holds, one after another.
    pub parts: Vec<Parameter>,
    /// What the file has in their place.
    pub change: Change,
    /// How the file orders rows or columns, where it has another order.
    pub order: Option<Order>,
}

/// A parameter: its name and shape in the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// What a file has in place of a parameter's values.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// The values themselves.
    Same,
    /// `-exp(x)`: GGUF's `ssm_a` of `A_log`. Reading gives a parameter called `A`.
    NegExp,
    /// Rows of each of `nheads` heads with the two halves of the first `rotary_dim` interleaved: row
    /// 2 i is the model's row i, row 2 i + 1 its row `rotary_dim / 2 + i`.
    Interleaved {
        /// Heads in all rows.
        nheads: usize,
        /// Rows of a head that rotate.
        rotary_dim: usize,
    },
    /// Bands of rows, each times a factor, which reading leaves in.
    Scaled(Vec<(usize, f32)>),
    /// The matrices of two parameters `[H, rank, k]` and `[H, v, rank]` by heads: k rows of a head are the columns of
    /// its first matrix, then come the v rows of its second.
    Latent {
        /// H
        nheads: usize,
        /// Width of a row.
        rank: usize,
        /// Rows of each head for keys and for values.
        rows: [usize; 2],
    },
    /// `1 + x`, in f32: GGUF's weights of norms that a model keeps zero-centred.
    PlusOne,
    /// Values that no parameter holds; reading leaves them to the configuration.
    Given(Vec<f32>),
}

/// An order of rows or columns: the file has them group by group, with a band of each kind in a group. The model has
/// them band by band, with the groups in each.
///
/// With two groups of bands a and b the file has `a0 b0 a1 b1`, the model `a0 a1 b0 b1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// Whether columns are moved; else rows.
    pub columns: bool,
    /// Rows or columns before all groups, which stay.
    pub first: usize,
    /// How many groups there are.
    pub groups: usize,
    /// The bands of one group: how many neighbours have a width, and that width.
    pub bands: Arc<[(usize, usize)]>,
}

impl Order {
    /// Rows that are bands in groups, all of them.
    #[must_use]
    pub fn rows(groups: usize, bands: &[(usize, usize)]) -> Self {
        Self { columns: false, first: 0, groups, bands: bands.into() }
    }

    /// Of `outer` times `inner` heads of `width` rows the model has the inner ones of each outer side by side, the file
    /// the outer ones of each inner.
    #[must_use]
    pub fn transposed(outer: usize, inner: usize, width: usize) -> Self {
        Self::rows(inner, &[(outer, width)])
    }

    /// The same after so many rows that stay.
    #[must_use]
    pub fn after(self, first: usize) -> Self {
        Self { first, ..self }
    }

    /// The same of columns.
    #[must_use]
    pub fn columns(self) -> Self {
        Self { columns: true, ..self }
    }

    /// The model's place of each piece of the file, of `count` rows or columns in all; `None` when they are not so many.
    fn pieces(&self, count: usize) -> Option<Vec<Range<usize>>> {
        let mut bands = self.bands.iter();
        let group = bands.try_fold(0usize, |sum, (n, w)| sum.checked_add(n.checked_mul(*w)?))?;
        if group.checked_mul(self.groups)?.checked_add(self.first)? != count {
            return None;
        }
        let mut pieces = Vec::from([Range { start: 0, end: self.first }]);
        for index in 0..self.groups {
            let mut band_start = self.first;
            let bands = self.bands.iter();
            for band in bands.flat_map(|&(count, width)| std::iter::repeat_n(width, count)) {
                let start = band_start + index * band;
                pieces.push(start..start + band);
                band_start += band * self.groups;
            }
        }
        Some(pieces)
    }

    /// The elements of a tensor of a shape in the file's order, or from there in the model's; `size` is how many
    /// elements a number of columns takes, if it is a whole number.
    fn moved<T: Copy>(
        &self,
        data: &[T],
        shape: &[usize],
        size: impl Fn(usize) -> Option<usize>,
        to_file: bool,
    ) -> Option<Vec<T>> {
        let rows = shape.first().copied().unwrap_or(1);
        let (lines, count) =
            if self.columns { (rows, shape.iter().skip(1).product()) } else { (1, rows) };
        let line = data.len().checked_div(lines)?;
        let of_rows = |n: usize| n.checked_mul(line / rows.max(1));
        let size = |n: usize| if self.columns { size(n) } else { of_rows(n) };
        if line * lines != data.len() || size(count)? != line {
            return None;
        }
        let pieces = self.pieces(count)?.into_iter();
        let pieces = pieces.map(|piece| Some(size(piece.start)?..size(piece.end)?));
        let pieces: Vec<Range<usize>> = pieces.collect::<Option<_>>()?;
        let mut out = data.to_vec();
        for (from, to) in data.chunks_exact(line.max(1)).zip(out.chunks_exact_mut(line.max(1))) {
            let mut file = 0;
            for model in &pieces {
                let there = file..file + model.len();
                file = there.end;
                let (source, target) =
                    if to_file { (model.clone(), there) } else { (there, model.clone()) };
                to.get_mut(target)?.copy_from_slice(from.get(source)?);
            }
        }
        Some(out)
    }
}

/// A row of a family's table of names: a tensor of the file, and the parameters that make it up.
///
/// `#` stands for the number of a layer. A part with `@` stands for as many as there are, one for each
/// number of an expert; several parts with `@` alternate. Where the file's name has an `@`, it has a tensor for each
/// number.
#[derive(Debug, Clone)]
pub struct Row {
    /// The tensor in the file.
    pub file: String,
    /// The parameters.
    pub parts: Vec<String>,
    /// How the file has them.
    pub how: How,
    /// The order of rows or columns in the file, where it is another.
    pub order: Option<Order>,
}

/// How a file has a parameter.
#[derive(Debug, Clone)]
pub enum How {
    /// As it is.
    Same,
    /// `[C, 1, K]` as `[C, K]`.
    Taps,
    /// `[H]` as `[H, 1]`.
    Column,
    /// `[H]` as `[H, 1]`, and `-exp(x)` of it.
    Rates,
    /// As [`Change::NegExp`], in its own shape.
    NegExp,
    /// `[width]` as `[groups, width / groups]`.
    Groups(usize),
    /// As [`Change::Interleaved`].
    Interleaved {
        /// Heads in all rows.
        nheads: usize,
        /// Rows of a head that rotate.
        rotary_dim: usize,
    },
    /// As [`Change::Scaled`].
    Scaled(Vec<(usize, f32)>),
    /// All of it times a factor.
    Times(f32),
    /// As [`Change::Latent`].
    Latent,
    /// With so many dimensions of 1 before its own and after them.
    Padded([usize; 2]),
    /// As [`Change::PlusOne`].
    PlusOne,
}

impl Row {
    /// A parameter under another name.
    pub fn new(file: impl Into<String>, part: impl Into<String>) -> Self {
        Self { file: file.into(), parts: vec![part.into()], how: How::Same, order: None }
    }

    /// Several parameters as one tensor.
    pub fn joined(file: impl Into<String>, parts: &[String]) -> Self {
        Self { file: file.into(), parts: parts.to_vec(), how: How::Same, order: None }
    }

    /// The same, had in another way.
    #[must_use]
    pub fn how(mut self, how: How) -> Self {
        self.how = how;
        self
    }

    /// The same, with rows or columns in another order.
    #[must_use]
    pub fn order(mut self, order: Order) -> Self {
        self.order = Some(order);
        self
    }

    /// The tensors for one layer; none where the layer has no such parameter.
    fn stored(&self, layer: usize, parameters: &Tensors) -> Vec<Stored> {
        if !self.file.contains('@') {
            return self.stored_one(layer, parameters).into_iter().collect();
        }
        let of = |number: usize| {
            let named = |pattern: &str| pattern.replace('@', &number.to_string());
            let parts = self.parts.iter().map(|part| named(part)).collect();
            let row = Self {
                file: named(&self.file),
                parts,
                how: self.how.clone(),
                order: self.order.clone(),
            };
            row.stored_one(layer, parameters)
        };
        (0..).map_while(of).collect()
    }

    fn stored_one(&self, layer: usize, parameters: &Tensors) -> Option<Stored> {
        let named = |pattern: &str| pattern.replace('#', &layer.to_string());
        let find = |name: String| {
            let shape = parameters.get(&name)?.to_vec();
            Some(Parameter { name, shape })
        };
        let is_stack = self.parts.iter().any(|part| part.contains('@'));
        let mut parts = Vec::new();
        let mut stacked = 0;
        if is_stack {
            loop {
                let of = |part: &String| find(named(part).replace('@', &stacked.to_string()));
                let Some(next) = self.parts.iter().map(of).collect::<Option<Vec<_>>>() else {
                    break;
                };
                parts.extend(next);
                stacked += 1;
            }
        } else {
            parts = self.parts.iter().map(|part| find(named(part))).collect::<Option<_>>()?;
        }
        let own = parts.first()?.shape.clone();
        let rows: usize = parts.iter().map(|part| part.shape.first().copied().unwrap_or(1)).sum();
        let (shape, change) = match (&self.how, own.as_slice()) {
            (How::Latent, &[nheads, rank, k]) => {
                let v = parts.get(1).and_then(|part| part.shape.get(1)).copied().unwrap_or(0);
                let shape = vec![nheads * (k + v), rank];
                (shape, Change::Latent { nheads, rank, rows: [k, v] })
            }
            (&How::Padded([before, after]), own) => {
                ([&vec![1; before], own, &vec![1; after]].concat(), Change::Same)
            }
            (_, [_, columns]) if is_stack => {
                (vec![stacked, rows / stacked, *columns], Change::Same)
            }
            (How::Taps, &[channels, _, taps]) => (vec![channels, taps], Change::Same),
            (How::Column, &[heads]) => (vec![heads, 1], Change::Same),
            (How::Rates, &[heads]) => (vec![heads, 1], Change::NegExp),
            (How::NegExp, _) => (own, Change::NegExp),
            (&How::Groups(groups), &[width]) => (vec![groups, width / groups.max(1)], Change::Same),
            (&How::Interleaved { nheads, rotary_dim }, _) => {
                (own, Change::Interleaved { nheads, rotary_dim })
            }
            (&How::Times(1.0), _) => (own, Change::Same),
            (&How::Times(factor), _) => (own, Change::Scaled(vec![(rows, factor)])),
            (How::Scaled(bands), _) if bands.iter().all(|&(_, factor)| factor == 1.0) => {
                (own, Change::Same)
            }
            (How::Scaled(bands), _) => (own, Change::Scaled(bands.clone())),
            (How::PlusOne, _) => (own, Change::PlusOne),
            (_, [_, rest @ ..]) => ([&[rows], rest].concat(), Change::Same),
            (_, []) => (own, Change::Same),
        };
        Some(Stored { name: named(&self.file), shape, parts, change, order: self.order.clone() })
    }
}

impl Layout {
    /// The tensors by `table` of a model's `parameters`; those that no row names keep their names.
    #[must_use]
    pub fn new(parameters: &Tensors, table: &[Row], n_layer: usize) -> Self {
        let mut layout = Self::default();
        let mut named = BTreeSet::new();
        for row in table {
            let layers = if row.file.contains('#') { n_layer } else { 1 };
            for layer in 0..layers {
                for stored in row.stored(layer, parameters) {
                    named.extend(stored.parts.iter().map(|part| part.name.clone()));
                    layout.0.push(stored);
                }
            }
        }
        for (name, shape) in parameters.iter().filter(|(name, _)| !named.contains(*name)) {
            let parts = vec![Parameter { name: name.into(), shape: shape.to_vec() }];
            let (name, shape) = (name.to_owned(), shape.to_vec());
            layout.0.push(Stored { name, shape, parts, change: Change::Same, order: None });
        }
        // Layer by layer, as a forward reads them.
        let layer = |name: &str| name.split('.').find_map(|part| part.parse::<usize>().ok());
        layout.0.sort_by_key(|stored| layer(&stored.name));
        layout
    }

    /// What the file calls the tensor that holds a parameter.
    #[must_use]
    pub fn stored_as(&self, parameter: &str) -> Option<&str> {
        let holds = |stored: &&Stored| stored.parts.iter().any(|part| part.name == parameter);
        self.0.iter().find(holds).map(|stored| stored.name.as_str())
    }

    /// What the file calls the tensor of each parameter, and its shape there.
    #[must_use]
    pub fn by_parameter(&self) -> BTreeMap<&str, (&str, &[usize])> {
        let parts = self.0.iter().flat_map(|stored| stored.parts.iter().map(move |p| (p, stored)));
        parts.map(|(part, of)| (&*part.name, (&*of.name, &*of.shape))).collect()
    }

    /// Adds a tensor that holds no parameter but these values.
    pub fn given(&mut self, name: impl Into<String>, values: Vec<f32>) {
        let shape = vec![values.len()];
        let (name, parts) = (name.into(), Vec::new());
        self.0.push(Stored { name, shape, parts, change: Change::Given(values), order: None });
    }

    /// The first parameter that has the same name in the file, if any: the file has no name for it.
    #[must_use]
    pub fn unnamed(&self) -> Option<&str> {
        let keeps = |stored: &&Stored| stored.parts.iter().any(|part| part.name == stored.name);
        self.0.iter().find(keeps).map(|stored| stored.name.as_str())
    }

    /// Names and shapes of the file's tensors.
    #[must_use]
    pub fn tensors(&self) -> Tensors {
        let mut tensors = Tensors::default();
        for stored in &self.0 {
            tensors.add(stored.name.clone(), &stored.shape);
        }
        tensors
    }

    /// Names and shapes of the parameters.
    #[must_use]
    pub fn parameters(&self) -> Tensors {
        let mut tensors = Tensors::default();
        for part in self.0.iter().flat_map(|stored| &stored.parts) {
            tensors.add(part.name.clone(), &part.shape);
        }
        tensors
    }

    /// The parameters in the tensors of `checkpoint`, once these are found to be just those of the
    /// layout; dimensions of 1 do not count. A file may have the parameters of a joined tensor one by one.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] that lists what is missing, misshapen and unexpected.
    pub fn read(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        let layout = self.as_in(checkpoint);
        for stored in &layout.0 {
            let entry = checkpoint.get(&stored.name);
            if entry.is_some_and(|entry| stored.is_of(entry)) {
                checkpoint.reshape(&stored.name, &stored.shape)?;
            }
        }
        layout.tensors().check(checkpoint)?;
        layout.cut(checkpoint)
    }

    /// The same for a file that has some parameters one by one which others have joined.
    fn as_in(&self, checkpoint: &Checkpoint) -> Self {
        let has = |part: &Parameter| checkpoint.get(&part.name).is_some();
        let apart = |stored: &Stored| {
            stored.change == Change::Same
                && stored.order.is_none()
                && checkpoint.get(&stored.name).is_none()
                && !stored.parts.is_empty()
                && stored.parts.iter().all(has)
        };
        let one = |part: &Parameter| Stored {
            name: part.name.clone(),
            shape: part.shape.clone(),
            parts: vec![part.clone()],
            change: Change::Same,
            order: None,
        };
        let of = |stored: &Stored| {
            if apart(stored) {
                return stored.parts.iter().map(one).collect();
            }
            vec![stored.clone()]
        };
        Self(self.0.iter().flat_map(of).collect())
    }

    /// The parameters in those tensors of `checkpoint` that are of the layout, beside its other tensors: for files
    /// that hold some parameters in another way than most. Dimensions of 1 do not count.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] for rows that cannot be put in the model's order, and for a tensor of another shape.
    /// A parameter under its own name is left to [`read`](Self::read).
    pub fn cut(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        let mut tensors: BTreeMap<String, TensorEntry> =
            checkpoint.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
        let mut parameters = BTreeMap::new();
        for stored in &self.0 {
            let Some(entry) = checkpoint.get(&stored.name) else { continue };
            if stored.is_of(entry) {
                let entry = TensorEntry { shape: stored.shape.clone(), ..entry.clone() };
                stored.cut(&entry, &mut parameters)?;
                tensors.remove(&stored.name);
            } else if stored.parts.iter().all(|part| part.name != stored.name) {
                let reason = format!("{:?}, expected {:?}", entry.shape, stored.shape);
                return Err(stored.error(from_ref(entry), &reason));
            }
        }
        parameters.extend(tensors);
        checkpoint.replace(parameters);
        Ok(())
    }
}

impl Stored {
    /// An error about the tensor, or what is to be one of `parts`.
    fn error(&self, parts: &[TensorEntry], reason: &str) -> Error {
        let path = parts.first().map(|part| part.file.to_path_buf()).unwrap_or_default();
        let reason = format!("tensor `{}` {reason}", self.name.escape_debug());
        Error::Tensors { path, reason }
    }

    /// Whether a tensor has the shape, dimensions of 1 apart.
    fn is_of(&self, entry: &TensorEntry) -> bool {
        let counts = |dim: &&usize| **dim != 1;
        entry.shape.iter().filter(counts).eq(self.shape.iter().filter(counts))
    }

    /// Cuts the parameters out of the file's tensor.
    fn cut(
        &self,
        entry: &TensorEntry,
        parameters: &mut BTreeMap<String, TensorEntry>,
    ) -> Result<()> {
        let turned = self.turned(entry)?;
        let entry = turned.as_ref().unwrap_or(entry);
        let mut is_tiled = false;
        let entry = &match self.in_model_order(entry) {
            Err(_) if self.is_tiled_blocks(entry) => {
                is_tiled = true;
                entry.clone()
            }
            ordered => ordered?,
        };
        let mut first = 0;
        for part in &self.parts {
            let size = entry.dtype.bytes_of(&part.shape);
            let end = size.and_then(|size| size.checked_add(first));
            let data = end.and_then(|end| entry.data.slice(first..end));
            let (Some(mut data), Some(end)) = (data, end) else {
                return Err(self.error(from_ref(entry), "cannot be cut into its parts"));
            };
            first = end;
            if let &Change::Interleaved { nheads, rotary_dim } = &self.change {
                data = interleaved(part.shape.first().copied(), nheads, rotary_dim)
                    .and_then(|order| permuted(&data, &inverse(&order)))
                    .ok_or_else(|| self.error(from_ref(entry), NOT_INTERLEAVED))?;
            }
            let name = match self.change {
                Change::NegExp => part.name.replace("A_log", "A"),
                _ => tiled(&part.name).filter(|_| is_tiled).unwrap_or_else(|| part.name.clone()),
            };
            let mut entry = TensorEntry { data, shape: part.shape.clone(), ..entry.clone() };
            if self.change == Change::PlusOne {
                let values: Vec<f32> = entry.to_f32()?.iter().map(|x| x - 1.0).collect();
                entry.data = Bytes::new(Dtype::F32.encode(&values)?);
                entry.dtype = Dtype::F32;
            }
            parameters.insert(name, entry);
        }
        Ok(())
    }

    /// The elements of matrices by heads in the order of the parameters, blocks as f32; `None` where nothing is turned.
    fn turned(&self, entry: &TensorEntry) -> Result<Option<TensorEntry>> {
        let &Change::Latent { nheads, rank, rows } = &self.change else { return Ok(None) };
        let (dtype, data) = match entry.dtype {
            Dtype::Block(_) => (Dtype::F32, Bytes::new(Dtype::F32.encode(&entry.to_f32()?)?)),
            dtype => (dtype, entry.data.clone()),
        };
        let data = permuted(&data, &inverse(&by_heads(nheads, rank, rows)))
            .ok_or_else(|| self.error(from_ref(entry), "cannot be cut into heads"))?;
        Ok(Some(TensorEntry { dtype, data, ..entry.clone() }))
    }

    /// Whether heads share quantized blocks, so that their columns stay in the order of the file.
    fn is_tiled_blocks(&self, entry: &TensorEntry) -> bool {
        matches!(entry.dtype, Dtype::Block(_)) && self.order.as_ref().is_some_and(|of| of.columns)
    }

    /// The file's tensor, or one with as many rows, in the order of the model.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] when it cannot be cut into the pieces that are moved.
    pub fn in_model_order(&self, entry: &TensorEntry) -> Result<TensorEntry> {
        let Some(order) = &self.order else { return Ok(entry.clone()) };
        let size = |columns: usize| entry.dtype.bytes_of(&[columns]);
        let data = order.moved(&entry.data, &entry.shape, size, false);
        let data = data.ok_or_else(|| self.error(from_ref(entry), NOT_IN_BANDS))?;
        Ok(TensorEntry { data: Bytes::new(data), ..entry.clone() })
    }

    /// Values of the parameters' tensor, or of one with as many rows or columns, in the order of the file.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] when they cannot be cut into the pieces that are moved.
    pub fn in_file_order(&self, values: Vec<f32>, shape: &[usize]) -> Result<Vec<f32>> {
        let Some(order) = &self.order else { return Ok(values) };
        order.moved(&values, shape, Some, true).ok_or_else(|| self.error(&[], NOT_IN_BANDS))
    }

    /// The type of the file's tensor when nothing is asked for: that of its parameters, f32 where they
    /// differ.
    #[must_use]
    pub fn dtype(&self, parts: &[TensorEntry]) -> Dtype {
        if self.change == Change::PlusOne {
            return Dtype::F32;
        }
        match parts {
            [first, rest @ ..] if rest.iter().all(|part| part.dtype == first.dtype) => first.dtype,
            _ => Dtype::F32,
        }
    }

    /// The file's tensor from its parameters, bytes as they are; `None` when values change and so have to
    /// be written anew from [`Stored::values`].
    #[must_use]
    pub fn bytes(&self, parts: &[TensorEntry]) -> Option<Bytes> {
        let first = parts.first()?;
        if parts.iter().any(|part| part.dtype != first.dtype) {
            return None;
        }
        let whole = match parts {
            [one] => one.data.clone(),
            many => Bytes::new(many.iter().map(|part| &*part.data).collect::<Vec<_>>().concat()),
        };
        let whole = match &self.order {
            None => whole,
            Some(order) => {
                let size = |columns: usize| first.dtype.bytes_of(&[columns]);
                Bytes::new(order.moved(&whole, &self.shape, size, true)?)
            }
        };
        match &self.change {
            Change::Same => Some(whole),
            &Change::Interleaved { nheads, rotary_dim } => {
                permuted(&whole, &interleaved(self.shape.first().copied(), nheads, rotary_dim)?)
            }
            &Change::Latent { nheads, rank, rows } => {
                permuted(&whole, &by_heads(nheads, rank, rows))
            }
            _ => None,
        }
    }

    /// The values of the file's tensor from its parameters.
    ///
    /// # Errors
    ///
    /// When a parameter is no float, or rows are not those of the change.
    pub fn values(&self, parts: &[TensorEntry]) -> Result<Vec<f32>> {
        if let Change::Given(values) = &self.change {
            return Ok(values.clone());
        }
        let mut values = Vec::new();
        for part in parts {
            values.extend(part.to_f32()?);
        }
        values = self.in_file_order(values, &self.shape)?;
        match &self.change {
            Change::PlusOne => values.iter_mut().for_each(|x| *x += 1.0),
            Change::NegExp => values.iter_mut().for_each(|x| *x = super::decay_rate(*x)),
            &Change::Interleaved { nheads, rotary_dim } => {
                let order = interleaved(self.shape.first().copied(), nheads, rotary_dim)
                    .ok_or_else(|| self.error(parts, NOT_INTERLEAVED))?;
                let width = values.len() / order.len().max(1);
                values = order
                    .iter()
                    .flat_map(|&row| values[row * width..(row + 1) * width].iter().copied())
                    .collect();
            }
            Change::Scaled(bands) => {
                let rows = self.shape.first().copied().unwrap_or(1).max(1);
                if bands.iter().map(|(rows, _)| rows).sum::<usize>() != rows {
                    return Err(self.error(parts, "has other rows than its bands of factors"));
                }
                let width = values.len() / rows;
                let mut first = 0;
                for &(rows, factor) in bands {
                    let band = first * width..(first + rows) * width;
                    values[band].iter_mut().for_each(|x| *x *= factor);
                    first += rows;
                }
            }
            &Change::Latent { nheads, rank, rows } => {
                let order = by_heads(nheads, rank, rows);
                if order.len() != values.len() {
                    return Err(self.error(parts, "has other matrices than its heads"));
                }
                values = order.into_iter().map(|at| values[at]).collect();
            }
            Change::Same | Change::Given(_) => {}
        }
        Ok(values)
    }
}

/// What a matrix is called whose columns are in the order of the file, since heads share quantized blocks there.
#[must_use]
pub fn tiled(parameter: &str) -> Option<String> {
    parameter.strip_suffix(".weight").map(|layer| format!("{layer}_tiled.weight"))
}

/// The layer of the model whose weight is called so in [that](tiled) order, or in the model's own.
#[must_use]
pub fn layer_of(parameter: &str) -> Option<&str> {
    let layer = parameter.strip_suffix(".weight")?;
    Some(layer.strip_suffix("_tiled").unwrap_or(layer))
}

/// The model's row that each row of the file is; `None` unless heads divide the rows and an even number of
/// each head's rows, or none, rotates.
fn interleaved(rows: Option<usize>, nheads: usize, rotary_dim: usize) -> Option<Vec<usize>> {
    let rows = rows?;
    let headdim = rows.checked_div(nheads)?;
    if !rows.is_multiple_of(nheads) || !rotary_dim.is_multiple_of(2) || rotary_dim > headdim {
        return None;
    }
    let of = |row: usize| match row % headdim {
        within if within < rotary_dim => {
            row - within + (within % 2) * (rotary_dim / 2) + within / 2
        }
        _ => row,
    };
    Some((0..rows).map(of).collect())
}

/// The element of both parameters, one after the other, that each element of [`Change::Latent`] is.
fn by_heads(nheads: usize, rank: usize, [k, v]: [usize; 2]) -> Vec<usize> {
    let values = nheads * rank * k;
    let key = |head: usize, row: usize| (0..rank).map(move |i| (head * rank + i) * k + row);
    let value =
        |head: usize, row: usize| (0..rank).map(move |i| values + (head * v + row) * rank + i);
    let head = |head: usize| {
        let keys = (0..k).flat_map(move |row| key(head, row));
        keys.chain((0..v).flat_map(move |row| value(head, row)))
    };
    (0..nheads).flat_map(head).collect()
}

fn inverse(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    for (to, &from) in order.iter().enumerate() {
        inverse[from] = to;
    }
    inverse
}

/// Rows of equal size in another order: row i becomes the old row `order[i]`. `None` when the rows are no
/// whole bytes.
fn permuted(data: &Bytes, order: &[usize]) -> Option<Bytes> {
    let size = data.len().checked_div(order.len())?;
    if size * order.len() != data.len() {
        return None;
    }
    let mut out = Vec::with_capacity(data.len());
    for &row in order {
        out.extend_from_slice(&data[row * size..(row + 1) * size]);
    }
    Some(Bytes::new(out))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::ops::Format;

    fn entry(values: &[f32], shape: &[usize]) -> TensorEntry {
        TensorEntry {
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            data: Bytes::new(Dtype::F32.encode(values).unwrap()),
            file: Path::new("memory").into(),
        }
    }

    fn values(count: usize) -> Vec<f32> {
        (0..count).map(|i| i as f32).collect()
    }

    #[test]
    fn interleaving_pairs_the_halves_of_each_head_and_leaves_what_does_not_rotate() {
        let interleaved =
            |rows, nheads, rotary_dim| interleaved(Some(rows), nheads, rotary_dim).unwrap();
        assert_eq!(interleaved(8, 2, 4), [0, 2, 1, 3, 4, 6, 5, 7]);
        assert_eq!(interleaved(6, 1, 4), [0, 2, 1, 3, 4, 5]);
        let order = interleaved(24, 2, 8);
        let back: Vec<usize> = inverse(&order).iter().map(|&i| order[i]).collect();
        assert_eq!(back, (0..24).collect::<Vec<_>>());
    }

    #[test]
    fn bands_that_a_file_has_group_by_group_are_moved_and_moved_back() {
        let size = |n: usize| Some(n);
        let order = Order::rows(2, &[(1, 1), (1, 2)]).after(1);
        let model: Vec<u8> = vec![9, 0, 1, 20, 21, 30, 31];
        let file = order.moved(&model, &[7], size, true).unwrap();
        assert_eq!(file, [9, 0, 20, 21, 1, 30, 31]);
        assert_eq!(order.moved(&file, &[7], size, false).unwrap(), model);
        // Three copies of each of two key heads: the file has the copies of a key apart.
        let order = Order::transposed(2, 3, 1).columns();
        let model: Vec<u8> = vec![0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32];
        let file = order.moved(&model, &[2, 6], size, true).unwrap();
        assert_eq!(file, [0, 10, 1, 11, 2, 12, 20, 30, 21, 31, 22, 32]);
        assert_eq!(order.moved(&file, &[2, 6], size, false).unwrap(), model);
        // Other rows than the bands, and columns that are no whole blocks.
        assert!(order.moved(&model, &[3, 4], size, true).is_none());
        let blocks = |n: usize| n.is_multiple_of(2).then_some(n);
        assert!(order.moved(&model, &[2, 6], blocks, true).is_none());
    }

    #[test]
    fn zero_centred_weights_are_one_more_in_the_file_in_f32() {
        let layout = layout_of(&[("n", &[2])], Row::new("norm", "n").how(How::PlusOne));
        let part = [encoded(Dtype::BF16, &[0.5, -0.25], &[2])];
        assert!(layout.0[0].bytes(&part).is_none());
        assert_eq!(layout.0[0].dtype(&part), Dtype::F32);
        let written = layout.0[0].values(&part).unwrap();
        assert_eq!(written, [1.5, 0.75]);
        let back = read(&layout, entry(&written, &[2])).unwrap();
        assert_eq!(back.get("n").unwrap().to_f32().unwrap(), [0.5, -0.25]);
    }

    #[test]
    fn what_is_written_reads_back_as_the_parameters() {
        let mut tensors = Tensors::default();
        for (name, shape) in
            [("gate", &[2, 3][..]), ("up", &[2, 3]), ("q_proj", &[8, 3]), ("A_log", &[2])]
        {
            tensors.add(name, shape);
        }
        let table = [
            Row::joined("both", &["gate".into(), "up".into()]),
            Row::new("q", "q_proj").how(How::Interleaved { nheads: 2, rotary_dim: 4 }),
            Row::new("ssm_a", "A_log").how(How::Rates),
        ];
        let layout = Layout::new(&tensors, &table, 1);
        assert_eq!(layout.unnamed(), None);
        let parameters = BTreeMap::from([
            ("gate", entry(&values(6), &[2, 3])),
            ("up", entry(&values(6)[..].iter().map(|x| -x).collect::<Vec<_>>(), &[2, 3])),
            ("q_proj", entry(&values(24), &[8, 3])),
            ("A_log", entry(&[0.0, 1.0], &[2])),
        ]);
        let stored = layout.0.iter().map(|stored| {
            let parts: Vec<TensorEntry> =
                stored.parts.iter().map(|part| parameters[part.name.as_str()].clone()).collect();
            let written = entry(&stored.values(&parts).unwrap(), &stored.shape);
            if let Some(bytes) = stored.bytes(&parts) {
                assert_eq!(*bytes, *written.data, "{}", stored.name);
            }
            (stored.name.clone(), written)
        });
        let mut file = Checkpoint::from_entries("file", stored.collect());
        assert_eq!(file.get("q").unwrap().to_f32().unwrap()[3..6], [6.0, 7.0, 8.0]);
        layout.read(&mut file).unwrap();
        for name in ["gate", "up", "q_proj"] {
            let got = file.get(name).unwrap();
            assert_eq!(got.to_f32().unwrap(), parameters[name].to_f32().unwrap(), "{name}");
        }
        let rates = file.get("A").unwrap().to_f32().unwrap();
        assert_eq!(rates, [super::super::decay_rate(0.0), super::super::decay_rate(1.0)]);
    }

    #[test]
    fn bands_of_rows_are_scaled_each_by_its_factor() {
        let mut tensors = Tensors::default();
        tensors.add("w", &[3, 2]);
        let row = Row::new("v", "w").how(How::Scaled(vec![(1, 2.0), (2, 10.0)]));
        let layout = Layout::new(&tensors, &[row], 1);
        let part = entry(&values(6), &[3, 2]);
        assert_eq!(layout.0[0].values(&[part]).unwrap(), [0.0, 2.0, 20.0, 30.0, 40.0, 50.0]);
    }

    #[test]
    fn experts_are_stacked_in_their_order_layer_by_layer() {
        let mut tensors = Tensors::default();
        for (layer, expert) in [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2)] {
            tensors.add(format!("l.{layer}.e.{expert}.gate"), &[2, 4]);
            tensors.add(format!("l.{layer}.e.{expert}.up"), &[2, 4]);
        }
        let row = Row::joined("blk.#.both", &["l.#.e.@.gate".into(), "l.#.e.@.up".into()]);
        let layout = Layout::new(&tensors, &[row], 3);
        assert_eq!(layout.0.len(), 2);
        let stored = &layout.0[1];
        assert_eq!((stored.name.as_str(), &stored.shape[..]), ("blk.2.both", &[3, 4, 4][..]));
        let names: Vec<&str> = stored.parts.iter().map(|part| part.name.as_str()).collect();
        assert_eq!(names[..3], ["l.2.e.0.gate", "l.2.e.0.up", "l.2.e.1.gate"]);
    }

    /// An entry of `dtype` of these values.
    fn encoded(dtype: Dtype, values: &[f32], shape: &[usize]) -> TensorEntry {
        let data = Bytes::new(dtype.encode(values).unwrap());
        TensorEntry { dtype, data, ..entry(&[], shape) }
    }

    /// A layout of one row for parameters of these names and shapes.
    fn layout_of(parameters: &[(&str, &[usize])], row: Row) -> Layout {
        let mut tensors = Tensors::default();
        for (name, shape) in parameters {
            tensors.add(*name, shape);
        }
        Layout::new(&tensors, &[row], 1)
    }

    fn read(layout: &Layout, file: TensorEntry) -> Result<Checkpoint> {
        let tensors = BTreeMap::from([(layout.0[0].name.clone(), file)]);
        let mut checkpoint = Checkpoint::from_entries("file", tensors);
        layout.read(&mut checkpoint).map(|()| checkpoint)
    }

    const Q8_0: Dtype = Dtype::Block(Format::Q8_0);

    #[test]
    fn a_stack_of_blocks_is_cut_between_rows_and_put_together_again() {
        let names = ["e.0.up", "e.1.up", "e.2.up"];
        let parameters = names.map(|name| (name, &[2, 64][..]));
        let layout = layout_of(&parameters, Row::new("stack", "e.@.up"));
        let values = values(3 * 2 * 64);
        let file = encoded(Q8_0, &values, &[3, 2, 64]);
        let read = read(&layout, file.clone()).unwrap();
        for (name, values) in names.iter().zip(values.chunks_exact(2 * 64)) {
            let part = read.get(name).unwrap();
            assert_eq!((part.dtype, &part.shape[..]), (Q8_0, &[2, 64][..]));
            assert_eq!(*part.data, Q8_0.encode(values).unwrap(), "{name}");
        }
        let parts = names.map(|name| read.get(name).unwrap().clone());
        assert_eq!(*layout.0[0].bytes(&parts).unwrap(), *file.data);
    }

    #[test]
    fn interleaving_moves_biases_and_rows_of_blocks_as_it_moves_rows() {
        let how = How::Interleaved { nheads: 2, rotary_dim: 4 };
        for (dtype, width) in [(Dtype::F32, 1), (Dtype::BF16, 1), (Dtype::F32, 3), (Q8_0, 32)] {
            let shape = if width == 1 { vec![8] } else { vec![8, width] };
            let layout = layout_of(&[("q", &shape)], Row::new("attn_q", "q").how(how.clone()));
            let rows = |order: [u8; 8]| -> Vec<f32> {
                order.iter().flat_map(|&row| vec![f32::from(row); width]).collect()
            };
            let q = encoded(dtype, &rows([0, 1, 2, 3, 4, 5, 6, 7]), &shape);
            let file = encoded(dtype, &rows([0, 2, 1, 3, 4, 6, 5, 7]), &shape);
            let parts = from_ref(&q);
            assert_eq!(*layout.0[0].bytes(parts).unwrap(), *file.data, "{dtype:?} {width}");
            assert_eq!(layout.0[0].values(parts).unwrap(), file.to_f32().unwrap());
            let back = read(&layout, file).unwrap();
            assert_eq!(*back.get("q").unwrap().data, *q.data, "{dtype:?} {width}");
        }
    }

    #[test]
    fn heads_that_do_not_divide_the_rows_are_an_error() {
        for (rows, nheads, rotary_dim) in
            [(10, 4, 2), (9, 2, 4), (8, 2, 3), (8, 2, 6), (8, 0, 2), (8, 16, 2), (8, 2, usize::MAX)]
        {
            let row = Row::new("attn_q", "q").how(How::Interleaved { nheads, rotary_dim });
            let layout = layout_of(&[("q", &[rows, 3])], row);
            let q = entry(&values(rows * 3), &[rows, 3]);
            let error = read(&layout, q.clone()).unwrap_err().to_string();
            assert!(error.contains("`attn_q`") && error.contains("whole heads"), "{error}");
            let stored = &layout.0[0];
            assert!(stored.bytes(from_ref(&q)).is_none());
            assert!(stored.values(&[q]).is_err(), "{rows} {nheads} {rotary_dim}");
        }
    }

    #[test]
    fn blocks_that_are_no_rows_are_an_error() {
        // 64 biases are two blocks: nothing that could be put into another order.
        let row = Row::new("bias", "b").how(How::Interleaved { nheads: 4, rotary_dim: 8 });
        let layout = layout_of(&[("b", &[64])], row);
        let file = encoded(Q8_0, &values(64), &[64]);
        assert!(read(&layout, file.clone()).is_err());
        assert!(layout.0[0].bytes(&[file]).is_none());

        let row = Row::joined("both", &["gate".into(), "up".into()]);
        let layout = layout_of(&[("gate", &[16]), ("up", &[16])], row);
        let error = read(&layout, encoded(Q8_0, &values(32), &[32])).unwrap_err().to_string();
        assert!(error.contains("`both` cannot be cut"), "{error}");
    }

    #[test]
    fn parameters_of_different_types_are_joined_as_f32() {
        let row = Row::joined("both", &["gate".into(), "up".into()]);
        let layout = layout_of(&[("gate", &[2, 3]), ("up", &[1, 3])], row);
        let stored = &layout.0[0];
        assert_eq!(stored.shape, [3, 3]);
        let parts =
            [encoded(Dtype::F32, &[0.1; 6], &[2, 3]), encoded(Dtype::BF16, &[2.5; 3], &[1, 3])];
        assert_eq!(stored.dtype(&parts), Dtype::F32);
        assert!(stored.bytes(&parts).is_none());
        assert_eq!(stored.values(&parts).unwrap(), [[0.1; 3], [0.1; 3], [2.5; 3]].concat());
        let alike = [parts[1].clone(), parts[1].clone()];
        assert_eq!(stored.dtype(&alike), Dtype::BF16);
    }

    #[test]
    fn factors_of_1_leave_the_bytes_and_bands_must_be_all_rows() {
        let stored = |how: How| {
            let layout = layout_of(&[("w", &[4, 32])], Row::new("v", "w").how(how));
            layout.0.into_iter().next().unwrap()
        };
        let w = encoded(Q8_0, &values(4 * 32), &[4, 32]);
        for how in [How::Times(1.0), How::Scaled(vec![(1, 1.0), (3, 1.0)])] {
            assert_eq!(*stored(how).bytes(from_ref(&w)).unwrap(), *w.data);
        }
        assert!(stored(How::Times(2.0)).bytes(from_ref(&w)).is_none());
        for bands in [vec![(1, 2.0), (2, 1.0)], vec![(1, 2.0), (4, 1.0)], vec![(usize::MAX, 2.0)]] {
            let error = stored(How::Scaled(bands)).values(from_ref(&w)).unwrap_err();
            assert!(error.to_string().contains("`v` has other rows"), "{error}");
        }
        let bias = layout_of(
            &[("b", &[3])],
            Row::new("c", "b").how(How::Scaled(vec![(1, 2.0), (2, 3.0)])),
        );
        assert_eq!(bias.0[0].values(&[entry(&[1.0; 3], &[3])]).unwrap(), [2.0, 3.0, 3.0]);
    }

    #[test]
    fn groups_that_do_not_divide_the_width_are_an_error() {
        for groups in [0, 5] {
            let layout = layout_of(&[("n", &[12])], Row::new("norm", "n").how(How::Groups(groups)));
            assert!(read(&layout, entry(&values(12), &[12])).is_err(), "{groups}");
        }
        let layout = layout_of(&[("n", &[12])], Row::new("norm", "n").how(How::Groups(4)));
        let file = entry(&values(12), &[4, 3]);
        assert_eq!(read(&layout, file).unwrap().get("n").unwrap().shape, [12]);
    }

    #[test]
    fn matrices_by_heads_are_two_parameters_of_which_one_is_turned() {
        // Two heads, of two rows for keys and one for values; a row is three wide.
        let parameters: [(&str, &[usize]); 2] = [("k", &[2, 3, 2]), ("v", &[2, 1, 3])];
        let mut tensors = Tensors::default();
        for (name, shape) in parameters {
            tensors.add(name, shape);
        }
        let row = Row::joined("kv_b_proj", &["k".into(), "v".into()]).how(How::Latent);
        let layout = Layout::new(&tensors, &[row], 1);
        assert_eq!(layout.0[0].shape, [6, 3]);
        let keys = [0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 9.0, 12.0, 10.0, 13.0, 11.0, 14.0];
        let own = [6.0, 7.0, 8.0, 15.0, 16.0, 17.0];
        for dtype in [Dtype::F32, Dtype::BF16] {
            let file = encoded(dtype, &values(18), &[6, 3]);
            let read = read(&layout, file.clone()).unwrap();
            let parts = ["k", "v"].map(|name| read.get(name).unwrap().clone());
            assert_eq!(parts.clone().map(|part| part.to_f32().unwrap()), [&keys[..], &own[..]]);
            assert_eq!(parts.each_ref().map(|part| &part.shape[..]), parameters.map(|of| of.1));
            assert_eq!(*layout.0[0].bytes(&parts).unwrap(), *file.data);
            assert_eq!(layout.0[0].values(&parts).unwrap(), values(18));
        }
    }

    #[test]
    fn blocks_of_matrices_by_heads_become_floats_as_columns_cannot_be_cut_out_of_them() {
        let mut tensors = Tensors::default();
        tensors.add("k", &[2, 32, 3]);
        tensors.add("v", &[2, 4, 32]);
        let row = Row::joined("kv_b_proj", &["k".into(), "v".into()]).how(How::Latent);
        let layout = Layout::new(&tensors, &[row], 1);
        let file = encoded(Q8_0, &values(14 * 32), &[14, 32]);
        let decoded = file.to_f32().unwrap();
        let read = read(&layout, file).unwrap();
        let parts = ["k", "v"].map(|name| read.get(name).unwrap().clone());
        assert_eq!(parts[0].dtype, Dtype::F32);
        assert_eq!(layout.0[0].values(&parts).unwrap(), decoded);
    }

    #[test]
    fn experts_may_be_tensors_of_their_own_under_another_name_and_have_dimensions_of_1() {
        let mut tensors = Tensors::default();
        for name in ["l.1.e.0.gate", "l.1.e.1.gate", "l.1.a"] {
            tensors.add(name, if name == "l.1.a" { &[4] } else { &[2, 3][..] });
        }
        let table = [
            Row::new("l.#.e.@.w1", "l.#.e.@.gate"),
            Row::new("l.#.a", "l.#.a").how(How::Padded([2, 1])),
        ];
        let layout = Layout::new(&tensors, &table, 2);
        let names: Vec<&str> = layout.0.iter().map(|stored| stored.name.as_str()).collect();
        assert_eq!(names, ["l.1.e.0.w1", "l.1.e.1.w1", "l.1.a"]);
        assert_eq!(layout.0[2].shape, [1, 1, 4, 1]);
        assert_eq!(layout.stored_as("l.1.e.1.gate"), Some("l.1.e.1.w1"));
    }

    #[test]
    fn a_parameter_may_be_two_tensors_of_a_file() {
        let mut tensors = Tensors::default();
        tensors.add("embed", &[2, 2]);
        let table = [
            Row::new("token_embd", "embed").how(How::Times(2.0)),
            Row::new("output", "embed").how(How::Times(3.0)),
        ];
        let layout = Layout::new(&tensors, &table, 1);
        let part = [entry(&[1.0; 4], &[2, 2])];
        let of = |i: usize| (layout.0[i].name.as_str(), layout.0[i].values(&part).unwrap());
        assert_eq!(of(0), ("token_embd", vec![2.0; 4]));
        assert_eq!(of(1), ("output", vec![3.0; 4]));
    }
}
