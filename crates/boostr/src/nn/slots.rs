//! What a sequence remembers of a layer: named slots, whatever the parts are that keep them.

use std::sync::Arc;

use crate::backend::{Backend, DType, KvCache, Tensor};
use crate::error::{Error, Result};
use crate::ops::{self, AttentionOps, KvSizes, KvType, Level};

/// One thing that a sequence remembers of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    name: &'static str,
    size: SlotSize,
}

/// How large a slot is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SlotSize {
    /// An f32 tensor of this shape, zeros before the first token. With three dimensions the first is heads.
    Fixed(Vec<usize>),
    /// A key and a value for each token.
    Rows {
        /// Heads and widths; their type is the model's choice.
        sizes: KvSizes,
        /// How many tokens a token sees, itself included; `None` for all.
        window: Option<usize>,
    },
}

impl Slot {
    /// A tensor of a shape that does not change.
    #[must_use]
    pub fn fixed(name: &'static str, shape: Vec<usize>) -> Self {
        Self { name, size: SlotSize::Fixed(shape) }
    }

    /// A key and a value for each token, within a window if there is one. A layer has one such slot at most.
    #[must_use]
    pub fn rows(name: &'static str, sizes: KvSizes, window: Option<usize>) -> Self {
        let sizes = KvSizes { kind: KvType::F32, ..sizes };
        Self { name, size: SlotSize::Rows { sizes, window } }
    }

    /// Its name, which is one of a kind within the layer.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// How large it is.
    #[must_use]
    pub fn size(&self) -> &SlotSize {
        &self.size
    }

    /// Whether it grows with each token.
    #[must_use]
    pub fn grows(&self) -> bool {
        matches!(self.size, SlotSize::Rows { .. })
    }

    /// Bytes of a tensor of fixed shape, 0 for rows; `None` when that is more than a `usize` counts.
    #[must_use]
    pub fn fixed_bytes(&self) -> Option<usize> {
        match &self.size {
            SlotSize::Fixed(shape) => shape.iter().try_fold(4usize, |n, &dim| n.checked_mul(dim)),
            SlotSize::Rows { .. } => Some(0),
        }
    }

    /// Bytes that each token adds, its elements of type `kind`, on the CPU at `level`.
    #[must_use]
    pub fn bytes_per_token(&self, level: Level, kind: KvType) -> usize {
        match self.size {
            SlotSize::Fixed(_) => 0,
            SlotSize::Rows { sizes, .. } => KvSizes { kind, ..sizes }.bytes_per_token(level),
        }
    }

    /// Bytes of rows after `tokens`, at most.
    #[must_use]
    pub fn row_bytes(&self, level: Level, kind: KvType, tokens: usize) -> usize {
        match self.size {
            SlotSize::Fixed(_) => 0,
            SlotSize::Rows { sizes, window } => {
                KvSizes { kind, ..sizes }.bytes(level, tokens, window)
            }
        }
    }
}

/// What is in a slot.
#[derive(Debug, Clone)]
pub enum Kept<B: Backend> {
    /// Of a fixed shape.
    Tensor(Tensor<B>),
    /// Keys and values.
    Rows(KvCache<B>),
}

impl<B: Backend> Kept<B> {
    /// What is in `slot` before the first token, rows as `kind`.
    fn new(slot: &Slot, kind: KvType, client: &B::Client) -> Result<Self> {
        Ok(match &slot.size {
            SlotSize::Fixed(shape) => Self::Tensor(ops::zeros(client, shape)?),
            SlotSize::Rows { sizes, .. } => {
                Self::Rows(client.new_cache(KvSizes { kind, ..*sizes })?)
            }
        })
    }

    /// The tensors that it is made of.
    fn tensors(&self) -> &[Tensor<B>] {
        match self {
            Self::Tensor(x) => std::slice::from_ref(x),
            Self::Rows(cache) => cache.rows(),
        }
    }

    /// The pieces of memory that it holds, each as its address and its bytes.
    fn blocks(&self) -> Vec<(usize, usize)> {
        match self {
            Self::Tensor(x) => vec![ops::block(x)],
            Self::Rows(cache) => cache.blocks(),
        }
    }

    fn size_in_bytes(&self) -> usize {
        match self {
            Self::Tensor(x) => 4 * x.numel(),
            Self::Rows(cache) => cache.size_in_bytes(),
        }
    }

    /// Refuses what is not for `slot`; rows may be of any type.
    fn check(&self, slot: &Slot) -> Result<()> {
        match (self, &slot.size) {
            (Self::Tensor(x), SlotSize::Fixed(shape)) if x.dtype() != DType::F32 => {
                let reason = format!("expected F32 {shape:?}, found {:?}", x.dtype());
                Err(Error::Argument { name: slot.name, reason })
            }
            (Self::Tensor(x), SlotSize::Fixed(shape)) if x.shape() == shape => {
                ops::check_layout(slot.name, x)
            }
            (Self::Tensor(x), SlotSize::Fixed(shape)) => {
                let (expected, got) = (shape.clone(), x.shape().to_vec());
                Err(Error::Shape { name: format!("state {}", slot.name), expected, got })
            }
            (Self::Rows(cache), SlotSize::Rows { sizes, .. }) => {
                let found = cache.sizes();
                if found == (KvSizes { kind: found.kind, ..*sizes }) {
                    return Ok(());
                }
                let shape = |sizes: KvSizes| vec![sizes.nheads, sizes.d_key, sizes.d_value];
                let (expected, got) = (shape(*sizes), shape(found));
                Err(Error::Shape { name: format!("state {}", slot.name), expected, got })
            }
            _ => {
                let what =
                    format!("state of another model: slot `{}` keeps something else", slot.name);
                Err(Error::Unsupported { what })
            }
        }
    }
}

/// The slots of one layer of one sequence; a clone shares memory until one of the two is written.
#[derive(Debug, Clone)]
pub struct Slots<B: Backend> {
    slots: Arc<[Slot]>,
    kept: Vec<Kept<B>>,
}

impl<B: Backend> Slots<B> {
    /// The slots before the first token, rows as `kind`.
    ///
    /// # Errors
    ///
    /// When memory is short.
    pub fn new(slots: Arc<[Slot]>, kind: KvType, client: &B::Client) -> Result<Self> {
        let kept = slots.iter().map(|slot| Kept::new(slot, kind, client)).collect::<Result<_>>()?;
        Ok(Self { slots, kept })
    }

    /// What stands where the slots of a layer were taken out.
    pub(crate) fn nothing() -> Self {
        Self { slots: Arc::from([]), kept: Vec::new() }
    }

    /// All of them, in the order of the layer's parts.
    pub fn iter(&self) -> impl Iterator<Item = (&Slot, &Kept<B>)> {
        self.slots.iter().zip(&self.kept)
    }

    /// What the slot `name` keeps.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Kept<B>> {
        self.iter().find(|(slot, _)| slot.name == name).map(|(_, kept)| kept)
    }

    /// The tensor in the slot `name` of a fixed shape.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&Tensor<B>> {
        match self.get(name)? {
            Kept::Tensor(x) => Some(x),
            Kept::Rows(_) => None,
        }
    }

    /// The keys and values in the slot `name`.
    #[must_use]
    pub fn rows(&self, name: &str) -> Option<&KvCache<B>> {
        match self.get(name)? {
            Kept::Rows(cache) => Some(cache),
            Kept::Tensor(_) => None,
        }
    }

    /// The tensors in slots of fixed shapes, to be replaced.
    pub(super) fn tensor_mut(&mut self, name: &str) -> Option<&mut Tensor<B>> {
        self.kept_mut(name).and_then(|kept| match kept {
            Kept::Tensor(x) => Some(x),
            Kept::Rows(_) => None,
        })
    }

    pub(super) fn rows_mut(&mut self, name: &str) -> Option<&mut KvCache<B>> {
        self.kept_mut(name).and_then(|kept| match kept {
            Kept::Rows(cache) => Some(cache),
            Kept::Tensor(_) => None,
        })
    }

    fn kept_mut(&mut self, name: &str) -> Option<&mut Kept<B>> {
        let at = self.slots.iter().position(|slot| slot.name == name)?;
        self.kept.get_mut(at)
    }

    /// Replaces what the slot `name` keeps; `false` when there is no such slot.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for another shape, other heads or widths; [`Error::Unsupported`] for rows in place of
    /// a tensor. The type of rows may be another.
    pub fn set(&mut self, name: &str, kept: Kept<B>) -> Result<bool> {
        let Some(at) = self.slots.iter().position(|slot| slot.name == name) else {
            return Ok(false);
        };
        kept.check(&self.slots[at])?;
        self.kept[at] = kept;
        Ok(true)
    }

    /// Refuses what is not for a layer with these slots.
    pub(crate) fn check(&self, layer: usize, slots: &Arc<[Slot]>) -> Result<()> {
        // A state that the model made has its slots themselves: nothing to compare for each token.
        if !Arc::ptr_eq(&self.slots, slots) {
            let names = |slots: &[Slot]| slots.iter().map(|slot| slot.name).collect::<Vec<_>>();
            if names(&self.slots) != names(slots) {
                let what = format!("state of another model: layer {layer} keeps something else");
                return Err(Error::Unsupported { what });
            }
            self.kept.iter().zip(slots.iter()).try_for_each(|(kept, slot)| kept.check(slot))?;
        }
        for (kept, slot) in self.kept.iter().zip(slots.iter()) {
            if let (Kept::Rows(cache), SlotSize::Rows { window, .. }) = (kept, &slot.size) {
                cache.check_window(*window)?;
            }
        }
        Ok(())
    }

    /// All tensors, in an order that is the same for all states of a model.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor<B>> {
        self.kept.iter().flat_map(Kept::tensors)
    }

    /// Whether all are rows, one for each of `position` tokens, that can go back to the first `len` of them.
    pub(crate) fn can_cut(&self, position: usize, len: usize) -> bool {
        self.iter().all(|(slot, kept)| match (&slot.size, kept) {
            (SlotSize::Rows { window, .. }, Kept::Rows(cache)) => {
                cache.len() == position && cache.can_cut(len, *window)
            }
            _ => false,
        })
    }

    /// Goes back to the first `len` tokens, which [can be done](Self::can_cut).
    pub(crate) fn cut(&mut self, len: usize) {
        for kept in &mut self.kept {
            if let Kept::Rows(cache) = kept {
                cache.cut(len);
            }
        }
    }

    /// The pieces of memory that they hold, each as its address and its bytes: forks share some.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        self.kept.iter().flat_map(Kept::blocks)
    }

    pub(crate) fn size_in_bytes(&self) -> usize {
        self.kept.iter().map(Kept::size_in_bytes).sum()
    }
}
