//! Gradients of what is in memory, by where it lies.

use std::collections::{BTreeMap, HashMap};

use numr::runtime::cpu::CpuRuntime;
use numr::tensor::Tensor;
use rayon::prelude::*;

use crate::error::{Error, Result};

type Cpu = Tensor<CpuRuntime>;

/// Elements that are worth a task of their own.
const TASK: usize = 1 << 15;

/// Elements of the smallest buffer that is kept for later.
const KEPT: usize = 1 << 12;

/// What is known of one storage.
struct Slot {
    address: u64,
    /// Elements of the storage.
    len: usize,
    needs: bool,
    name: Option<String>,
    /// `None` is all zeros.
    gradient: Option<Vec<f32>>,
}

/// The gradient of each storage that needs one.
///
/// Gradients that have been passed on leave their memory to later ones: layers have the same sizes, and
/// fresh memory costs a page fault for each of its pages.
#[derive(Default)]
pub(super) struct Gradients {
    slots: Vec<Slot>,
    /// The slot of the storage at an address.
    places: HashMap<u64, usize>,
    /// Memory of gradients that have been passed on, by its length.
    free: HashMap<usize, Vec<Vec<f32>>>,
}

impl Gradients {
    /// Makes `x`'s storage known, in place of what lay there before.
    pub(super) fn add(&mut self, x: &Cpu, needs: bool, name: Option<&str>) {
        let len = x.storage().len();
        if len == 0 {
            return;
        }
        let address = x.storage().ptr();
        let slot = Slot { address, len, needs, name: name.map(str::to_owned), gradient: None };
        self.places.insert(address, self.slots.len());
        self.slots.push(slot);
    }

    /// How many storages were made known.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Forgets all but the first `count` storages.
    pub(super) fn truncate(&mut self, count: usize) {
        for slot in self.slots.drain(count.min(self.slots.len())..) {
            self.places.remove(&slot.address);
        }
    }

    /// Whether `x` is of none of the first `count` storages.
    pub(super) fn is_after(&self, count: usize, x: &Cpu) -> bool {
        let place = self.places.get(&x.storage().ptr());
        x.numel() > 0 && place.is_some_and(|&place| place >= count)
    }

    fn slot(&mut self, x: &Cpu) -> Option<&mut Slot> {
        let place = *self.places.get(&x.storage().ptr())?;
        self.slots.get_mut(place).filter(|slot| slot.needs)
    }

    /// Whether `x` has a gradient; `None` for what is not known.
    pub(super) fn needs(&self, x: &Cpu) -> Option<bool> {
        if x.numel() == 0 {
            return Some(false);
        }
        let place = *self.places.get(&x.storage().ptr())?;
        Some(self.slots[place].needs)
    }

    /// Whether `x` has a gradient.
    pub(super) fn wants(&self, x: &Cpu) -> bool {
        self.needs(x) == Some(true)
    }

    /// Whether a gradient has arrived at `x`.
    pub(super) fn has(&self, x: &Cpu) -> bool {
        let place = self.places.get(&x.storage().ptr());
        place.is_some_and(|&place| self.slots[place].gradient.is_some())
    }

    /// Takes the gradient of an operation's output, a whole storage; `None` where nothing depends on it.
    pub(super) fn take(&mut self, out: &Cpu) -> Option<Vec<f32>> {
        self.slot(out)?.gradient.take()
    }

    /// Makes `dout` the gradient of an operation's output, a whole storage; `None` where that has one already, needs
    /// none or has not as many elements.
    pub(super) fn put(&mut self, out: &Cpu, dout: Vec<f32>) -> Option<()> {
        let slot = self.slot(out)?;
        if slot.len != dout.len() || slot.gradient.is_some() {
            return None;
        }
        slot.gradient = Some(dout);
        Some(())
    }

    /// As [`take`](Self::take), with zeros where nothing depends on it.
    pub(super) fn take_or_zeros(&mut self, out: &Cpu) -> Vec<f32> {
        self.take(out).unwrap_or_else(|| self.zeros(out.numel()))
    }

    /// `len` floats, which may be anything, to be overwritten.
    pub(super) fn buffer(&mut self, len: usize) -> Vec<f32> {
        self.free.get_mut(&len).and_then(Vec::pop).unwrap_or_else(|| vec![0.0; len])
    }

    /// `len` zeros.
    pub(super) fn zeros(&mut self, len: usize) -> Vec<f32> {
        let Some(mut buffer) = self.free.get_mut(&len).and_then(Vec::pop) else {
            return vec![0.0; len];
        };
        buffer.par_chunks_mut(TASK).for_each(|part| part.fill(0.0));
        buffer
    }

    /// Keeps the memory of a gradient that has been passed on.
    pub(super) fn keep(&mut self, buffer: Vec<f32>) {
        if buffer.len() >= KEPT {
            self.free.entry(buffer.len()).or_default().push(buffer);
        }
    }

    /// Adds `dx`, row-major, to the gradient of `x`, which may be rows of a wider tensor.
    ///
    /// # Errors
    ///
    /// When `x` is no rows of contiguous elements.
    pub(super) fn give(&mut self, x: &Cpu, dx: Vec<f32>) -> Result<()> {
        let Some(slot) = self.slot(x) else {
            self.keep(dx);
            return Ok(());
        };
        let (len, is_first) = (slot.len, slot.gradient.is_none());
        if x.is_contiguous() && len == dx.len() && is_first {
            slot.gradient = Some(dx);
            return Ok(());
        }
        let (width, stride, offset) = rows(x)?;
        if is_first {
            let mut gradient = self.buffer(len);
            gradient[..offset].fill(0.0);
            self.put(x, gradient);
        }
        if let Some(gradient) = self.slot(x).and_then(|slot| slot.gradient.as_mut()) {
            let many = (TASK / width.max(1)).max(1);
            let tasks = gradient[offset..].par_chunks_mut(stride * many).enumerate();
            tasks.for_each(|(task, gradient)| {
                // Cleared where it is added to next, so that it is in the cache.
                if is_first {
                    gradient.fill(0.0);
                }
                let dx = dx.get(task * width * many..).unwrap_or_default();
                for (gradient, dx) in gradient.chunks_mut(stride).zip(dx.chunks_exact(width.max(1)))
                {
                    gradient.iter_mut().zip(dx).for_each(|(gradient, dx)| *gradient += dx);
                }
            });
        }
        self.keep(dx);
        Ok(())
    }

    /// The gradient of a parameter, to be added to; `None` where none is wanted.
    pub(super) fn of(&mut self, x: &Cpu) -> Option<&mut [f32]> {
        let (offset, len) = (x.offset(), x.numel());
        let is_contiguous = x.is_contiguous();
        let slot = self.slot(x)?;
        debug_assert!(is_contiguous, "a parameter is contiguous");
        let size = slot.len;
        slot.gradient.get_or_insert_with(|| vec![0.0; size]).get_mut(offset..offset + len)
    }

    /// As [`of`](Self::of), or somewhere else where none is wanted.
    pub(super) fn of_or<'a>(&'a mut self, x: &Cpu, other: &'a mut Vec<f32>) -> &'a mut [f32] {
        if self.wants(x) {
            self.of(x).unwrap_or_default()
        } else {
            other.resize(x.numel(), 0.0);
            other
        }
    }

    /// Gradients by name; zeros for parameters that nothing depends on.
    pub(super) fn into_parameters(self) -> BTreeMap<String, Vec<f32>> {
        let named = self.slots.into_iter().filter_map(|slot| {
            Some((slot.name?, slot.gradient.unwrap_or_else(|| vec![0.0; slot.len])))
        });
        named.collect()
    }
}

/// `(width, stride, offset)` of `x` as rows: all last dimensions that lie one in another, of what is a row of
/// the others.
fn rows(x: &Cpu) -> Result<(usize, usize, usize)> {
    let refuse = || {
        let reason = "expected contiguous rows".into();
        Error::Argument { name: "x", reason }
    };
    if x.numel() == 0 {
        return Ok((0, 1, x.offset()));
    }
    // The size and the stride of each dimension, from the last on.
    let mut dims = x.shape().iter().zip(x.strides()).rev().filter(|(size, _)| **size != 1);
    let (mut width, mut row) = (1usize, None);
    for (&size, &stride) in dims.by_ref() {
        if stride != width.cast_signed() {
            row = Some((size, stride));
            break;
        }
        width *= size;
    }
    let Some((mut count, stride)) = row else {
        let width = width / x.shape().first().copied().unwrap_or(1).max(1);
        return Ok((width, width.max(1), x.offset()));
    };
    for (&size, &outer) in dims {
        if outer != stride * count.cast_signed() {
            return Err(refuse());
        }
        count *= size;
    }
    let stride = usize::try_from(stride).ok().filter(|&stride| stride >= width);
    Ok((width, stride.ok_or_else(refuse)?, x.offset()))
}

#[cfg(test)]
mod tests {
    use numr::runtime::cpu::CpuDevice;

    use super::*;

    /// A gradient of a part of `[64, 128]`, with memory to use again that is all NaN.
    fn given(part: impl Fn(&Cpu) -> Cpu) -> Vec<f32> {
        let whole =
            Tensor::from_slice(&vec![0.0f32; 64 * 128], &[64, 128], &CpuDevice::new()).unwrap();
        let part = part(&whole);
        let mut gradients = Gradients::default();
        gradients.add(&whole, true, None);
        gradients.keep(vec![f32::NAN; whole.numel()]);
        gradients.give(&part, vec![1.0; part.numel()]).unwrap();
        gradients.give(&part, vec![2.0; part.numel()]).unwrap();
        gradients.take(&whole).unwrap()
    }

    #[test]
    fn memory_that_is_used_again_leaves_no_trace() {
        let of_columns = given(|x| x.narrow(1, 32, 64).unwrap());
        for (i, dx) in of_columns.iter().enumerate() {
            assert_eq!(*dx, if (32..96).contains(&(i % 128)) { 3.0 } else { 0.0 }, "{i}");
        }
        let of_rows = given(|x| x.narrow(0, 5, 7).unwrap());
        for (i, dx) in of_rows.iter().enumerate() {
            assert_eq!(*dx, if (5..12).contains(&(i / 128)) { 3.0 } else { 0.0 }, "{i}");
        }
        let mut gradients = Gradients::default();
        gradients.keep(vec![f32::NAN; KEPT]);
        assert_eq!(gradients.zeros(KEPT), vec![0.0; KEPT]);
        assert!(gradients.free[&KEPT].is_empty());
    }
}
