//! How the tensors of a file are made of a model's parameters.
//!
//! A model names its parameters once, most as transformers does. A file may keep several of them as
//! one tensor (experts stacked, gate and up projection one after another), in another order of rows, or
//! as another function of the values. A [`Layout`] says so tensor by tensor, and serves both ways:
//! reading cuts parameters out of the file's bytes where they lie, writing puts tensors together.

use std::collections::{BTreeMap, BTreeSet};

use super::params::Tensors;
use crate::checkpoint::{Bytes, Checkpoint, Dtype, TensorEntry};
use crate::error::{Error, Result};

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
    pub parts: Vec<Part>,
    /// What the file has in their place.
    pub change: Change,
}

/// A parameter: its name and shape in the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
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
    /// Values that no parameter holds; reading leaves them to the configuration.
    Given(Vec<f32>),
}

/// A row of a family's table of names: a tensor of the file, and the parameters that make it up.
///
/// `#` stands for the number of a layer. A part with `@` stands for as many as there are, one for each
/// number of an expert; several parts with `@` alternate.
#[derive(Debug, Clone)]
pub struct Row {
    /// The tensor in the file.
    pub file: String,
    /// The parameters.
    pub parts: Vec<String>,
    /// How the file has them.
    pub how: How,
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
}

impl Row {
    /// A parameter under another name.
    pub fn new(file: impl Into<String>, part: impl Into<String>) -> Self {
        Self { file: file.into(), parts: vec![part.into()], how: How::Same }
    }

    /// Several parameters as one tensor.
    pub fn joined(file: impl Into<String>, parts: &[String]) -> Self {
        Self { file: file.into(), parts: parts.to_vec(), how: How::Same }
    }

    /// The same, had in another way.
    #[must_use]
    pub fn how(mut self, how: How) -> Self {
        self.how = how;
        self
    }

    /// The tensor for one layer; `None` where the layer has no such parameter.
    fn stored(&self, layer: usize, parameters: &Tensors) -> Option<Stored> {
        let named = |pattern: &str| pattern.replace('#', &layer.to_string());
        let find = |name: String| {
            let shape = parameters.get(&name)?.to_vec();
            Some(Part { name, shape })
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
            (_, [_, columns]) if is_stack => {
                (vec![stacked, rows / stacked, *columns], Change::Same)
            }
            (How::Taps, &[channels, _, taps]) => (vec![channels, taps], Change::Same),
            (How::Column, &[heads]) => (vec![heads, 1], Change::Same),
            (How::Rates, &[heads]) => (vec![heads, 1], Change::NegExp),
            (&How::Groups(groups), &[width]) => (vec![groups, width / groups], Change::Same),
            (&How::Interleaved { nheads, rotary_dim }, _) => {
                (own, Change::Interleaved { nheads, rotary_dim })
            }
            (How::Scaled(bands), _) => (own, Change::Scaled(bands.clone())),
            (&How::Times(factor), _) => (own, Change::Scaled(vec![(rows, factor)])),
            (_, [_, rest @ ..]) => ([&[rows], rest].concat(), Change::Same),
            (_, []) => (own, Change::Same),
        };
        Some(Stored { name: named(&self.file), shape, parts, change })
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
                if let Some(stored) = row.stored(layer, parameters) {
                    named.extend(stored.parts.iter().map(|part| part.name.clone()));
                    layout.0.push(stored);
                }
            }
        }
        for (name, shape) in parameters.iter().filter(|(name, _)| !named.contains(*name)) {
            let parts = vec![Part { name: name.into(), shape: shape.to_vec() }];
            let (name, shape) = (name.to_owned(), shape.to_vec());
            layout.0.push(Stored { name, shape, parts, change: Change::Same });
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

    /// Adds a tensor that holds no parameter but these values.
    pub fn given(&mut self, name: impl Into<String>, values: Vec<f32>) {
        let shape = vec![values.len()];
        let (name, parts) = (name.into(), Vec::new());
        self.0.push(Stored { name, shape, parts, change: Change::Given(values) });
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
    /// layout; dimensions of 1 do not count.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] that lists what is missing, misshapen and unexpected.
    pub fn read(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        let without_ones = |shape: &[usize]| -> Vec<usize> {
            shape.iter().copied().filter(|&dim| dim != 1).collect()
        };
        for stored in &self.0 {
            let entry = checkpoint.get(&stored.name);
            if entry.is_some_and(|e| without_ones(&e.shape) == without_ones(&stored.shape)) {
                checkpoint.reshape(&stored.name, &stored.shape)?;
            }
        }
        self.tensors().check(checkpoint)?;
        let mut parameters = BTreeMap::new();
        for stored in &self.0 {
            if let Some(entry) = checkpoint.get(&stored.name) {
                stored.cut(entry, &mut parameters)?;
            }
        }
        checkpoint.replace(parameters);
        Ok(())
    }
}

impl Stored {
    fn error(&self, entry: &TensorEntry, reason: &str) -> Error {
        let reason = format!("tensor `{}` {reason}", self.name.escape_debug());
        Error::Tensors { path: entry.file.to_path_buf(), reason }
    }

    /// Cuts the parameters out of the file's tensor.
    fn cut(
        &self,
        entry: &TensorEntry,
        parameters: &mut BTreeMap<String, TensorEntry>,
    ) -> Result<()> {
        let mut first = 0;
        for part in &self.parts {
            let size = entry.dtype.bytes_of(&part.shape);
            let end = size.and_then(|size| size.checked_add(first));
            let data = end.and_then(|end| entry.data.slice(first..end));
            let (Some(mut data), Some(end)) = (data, end) else {
                return Err(self.error(entry, "cannot be cut into its parts"));
            };
            first = end;
            if let &Change::Interleaved { nheads, rotary_dim } = &self.change {
                let order =
                    interleaved(part.shape.first().copied().unwrap_or(0), nheads, rotary_dim);
                data = permuted(&data, &inverse(&order));
            }
            let name = match self.change {
                Change::NegExp => part.name.replace("A_log", "A"),
                _ => part.name.clone(),
            };
            let entry = TensorEntry { data, shape: part.shape.clone(), ..entry.clone() };
            parameters.insert(name, entry);
        }
        Ok(())
    }

    /// The type of the file's tensor when nothing is asked for: that of its parameters, f32 where they
    /// differ.
    #[must_use]
    pub fn dtype(&self, parts: &[TensorEntry]) -> Dtype {
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
        match &self.change {
            Change::Same => Some(whole),
            &Change::Interleaved { nheads, rotary_dim } => {
                let order = interleaved(self.shape.first().copied()?, nheads, rotary_dim);
                Some(permuted(&whole, &order))
            }
            _ => None,
        }
    }

    /// The values of the file's tensor from its parameters.
    ///
    /// # Errors
    ///
    /// When a parameter is no float.
    pub fn values(&self, parts: &[TensorEntry]) -> Result<Vec<f32>> {
        if let Change::Given(values) = &self.change {
            return Ok(values.clone());
        }
        let mut values = Vec::new();
        for part in parts {
            values.extend(part.to_f32()?);
        }
        match &self.change {
            Change::NegExp => values.iter_mut().for_each(|x| *x = super::decay_rate(*x)),
            &Change::Interleaved { nheads, rotary_dim } => {
                let rows = self.shape.first().copied().unwrap_or(0);
                let width = values.len() / rows.max(1);
                let order = interleaved(rows, nheads, rotary_dim);
                values = order
                    .iter()
                    .flat_map(|&row| values[row * width..(row + 1) * width].iter().copied())
                    .collect();
            }
            Change::Scaled(bands) => {
                let rows = self.shape.first().copied().unwrap_or(1).max(1);
                let width = values.len() / rows;
                let mut first = 0;
                for &(rows, factor) in bands {
                    let band = first * width..(first + rows) * width;
                    values[band].iter_mut().for_each(|x| *x *= factor);
                    first += rows;
                }
            }
            Change::Same | Change::Given(_) => {}
        }
        Ok(values)
    }
}

/// The model's row that each row of the file is.
fn interleaved(rows: usize, nheads: usize, rotary_dim: usize) -> Vec<usize> {
    let headdim = rows / nheads.max(1);
    let of = |row: usize| match row % headdim {
        within if within < rotary_dim => {
            row - within + (within % 2) * (rotary_dim / 2) + within / 2
        }
        _ => row,
    };
    (0..rows).map(of).collect()
}

fn inverse(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    for (to, &from) in order.iter().enumerate() {
        inverse[from] = to;
    }
    inverse
}

/// Rows of equal size in another order: row i becomes the old row `order[i]`.
fn permuted(data: &Bytes, order: &[usize]) -> Bytes {
    let size = data.len() / order.len().max(1);
    let mut out = Vec::with_capacity(data.len());
    for &row in order {
        out.extend_from_slice(&data[row * size..(row + 1) * size]);
    }
    Bytes::new(out)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

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
        assert_eq!(interleaved(8, 2, 4), [0, 2, 1, 3, 4, 6, 5, 7]);
        assert_eq!(interleaved(6, 1, 4), [0, 2, 1, 3, 4, 5]);
        let order = interleaved(24, 2, 8);
        let back: Vec<usize> = inverse(&order).iter().map(|&i| order[i]).collect();
        assert_eq!(back, (0..24).collect::<Vec<_>>());
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
}
