//! Packed weights as a product reads them: straight from their records, or unpacked once for many rows.

use super::Values;
use super::packed::{BYTES, CELL, LANES, Layout, Packing};
use super::tile::{Cell, Cells, Sums};
use crate::simd::int8::{Int8, Steps, dispatch_int8};

#[inline(always)]
fn bytes<const N: usize>(from: &[u8], at: usize) -> &[u8; N] {
    from[at..][..N].try_into().expect("a slice of its length")
}

/// Records of `V` groups of sixteen outputs.
pub(super) struct Records<'a, P, const V: usize> {
    groups: [&'a [u8]; V],
    packing: std::marker::PhantomData<P>,
}

impl<'a, P: Packing, const V: usize> Records<'a, P, V> {
    #[inline(always)]
    pub(super) fn new(groups: [&'a [u8]; V]) -> Self {
        Self { groups, packing: std::marker::PhantomData }
    }
}

/// 32 `k` of them.
pub(super) struct RecordCell<'a, S: Int8, P, const V: usize> {
    records: [&'a [u8]; V],
    /// The cell within its record.
    c: usize,
    /// `d` of the block, and minus `m`.
    d: [S::F; V],
    m: [S::F; V],
    packing: std::marker::PhantomData<P>,
}

impl<'a, S: Int8, P: Packing, const V: usize> Cells<S> for Records<'a, P, V> {
    type Cell = RecordCell<'a, S, P, V>;

    #[inline(always)]
    fn cell(&self, simd: S, c: usize) -> Self::Cell {
        let layout = P::LAYOUT;
        let in_record = layout.values() / CELL;
        let (record, c) = (c / in_record, c % in_record);
        let mut records = self.groups;
        let (mut d, mut m) = ([simd.splat(0.0); V], [simd.splat(0.0); V]);
        let block = c / (layout.block / CELL) * LANES * 2;
        for v in 0..V {
            records[v] = &self.groups[v][record * layout.record..][..layout.record];
            d[v] = simd.load_f16(bytes(records[v], block));
            if layout.scheme.has_min {
                let of_block = simd.load_f16(bytes(records[v], layout.m + block));
                m[v] = simd.mul(of_block, simd.splat(-1.0));
            }
        }
        RecordCell { records, c, d, m, packing: std::marker::PhantomData }
    }
}

impl<S: Int8, P: Packing, const V: usize> Steps<S> for RecordCell<'_, S, P, V> {
    #[inline(always)]
    fn codes(&self, simd: S, v: usize, step: usize) -> S::Codes {
        let Layout { low, high, scheme, .. } = P::LAYOUT;
        let cell = &self.records[v][P::LAYOUT.cells + self.c * P::LAYOUT.cell..][..P::LAYOUT.cell];
        // Step s has its low bits in vector s % low of the low plane, from bit low * (s / low) on.
        let mut codes = simd.load(bytes(cell, P::LAYOUT.low_at(step % low)));
        if low < 8 {
            codes = simd.right(codes, (low * (step / low)) as u32, (1u8 << low) - 1);
        }
        // Its high bits are in the high plane in the same way, and are moved to stand above the low ones.
        if high > 0 {
            let mask = ((1u8 << high) - 1) << low;
            let (from, to) = (high * (step / high), low);
            let bits = simd.load(bytes(cell, Layout::high_at(step % high)));
            let bits = if from > to {
                simd.right(bits, (from - to) as u32, mask)
            } else {
                simd.left(bits, (to - from) as u32, mask)
            };
            codes = simd.or(codes, bits);
        }
        match scheme.values {
            Values::Offset(_) => codes,
            Values::Signed => simd.signed(codes),
            Values::Table(table) => simd.signed(simd.lookup(table, codes)),
        }
    }
}

impl<S: Int8, P: Packing, const V: usize> RecordCell<'_, S, P, V> {
    /// Bytes of group `g` of this cell, one for each of sixteen outputs, of those that begin at `at`.
    #[inline(always)]
    fn of_group(&self, at: usize, v: usize, g: usize) -> &[u8; LANES] {
        bytes(self.records[v], at + (self.c * P::LAYOUT.groups() + g) * LANES)
    }
}

impl<S: Int8, P: Packing, const V: usize> Cell<S> for RecordCell<'_, S, P, V> {
    #[inline(always)]
    fn scale(&self, simd: S, v: usize, g: usize) -> S::F {
        let layout = P::LAYOUT;
        let Some(scales) = layout.scales else { return self.d[v] };
        let mut of_group = *self.of_group(scales, v, g);
        // Four bits of scale and four of minimum share a byte.
        if layout.mins == layout.scales {
            of_group = (u128::from_le_bytes(of_group) & LOW).to_le_bytes();
        }
        simd.mul(self.d[v], simd.load_i8(&of_group))
    }
    #[inline(always)]
    fn min(&self, simd: S, v: usize, g: usize) -> S::F {
        let layout = P::LAYOUT;
        let Some(mins) = layout.mins else { return self.m[v] };
        let mut of_group = *self.of_group(mins, v, g);
        if layout.mins == layout.scales {
            of_group = (u128::from_le_bytes(of_group) >> 4 & LOW).to_le_bytes();
        }
        simd.mul(self.m[v], simd.load_i8(&of_group))
    }
}

/// The low four bits of each byte.
const LOW: u128 = u128::from_le_bytes([15; LANES]);

/// A vector of codes, on a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Line([u8; BYTES]);

/// Unpacked weights of some times sixteen outputs.
#[derive(Default)]
pub(crate) struct Panel {
    /// `[cells, 8 steps, groups of outputs]`.
    codes: Vec<Line>,
    /// `[cells, groups of a cell, groups of outputs]`.
    scales: Vec<Sums>,
    /// The same, or none.
    mins: Vec<Sums>,
}

impl Panel {
    /// Makes room.
    pub(super) fn reset(&mut self, layout: Layout, cells: usize, outputs: usize) {
        let scales = cells * layout.groups() * outputs;
        self.codes.resize(cells * 8 * outputs, Line([0; BYTES]));
        self.scales.resize(scales, Sums::ZERO);
        self.mins.resize(if layout.scheme.has_min { scales } else { 0 }, Sums::ZERO);
    }
}

dispatch_int8! {
    /// Unpacks the records of group `v` of `outputs` groups of sixteen outputs.
    pub(super) fn unpack<P: Packing> =
        unpack_body(records: &[u8], cells: usize, panel: &mut Panel, v: usize, outputs: usize)
}

#[inline(always)]
fn unpack_body<S: Int8, P: Packing>(
    simd: S,
    records: &[u8],
    cells: usize,
    panel: &mut Panel,
    v: usize,
    outputs: usize,
) {
    let records = Records::<P, 1>::new([records]);
    let groups = P::LAYOUT.groups();
    for c in 0..cells {
        let cell = records.cell(simd, c);
        let codes = &mut panel.codes[c * 8 * outputs..][..8 * outputs];
        for step in 0..8 {
            simd.store(cell.codes(simd, 0, step), &mut codes[step * outputs + v].0);
        }
        for g in 0..groups {
            let at = (c * groups + g) * outputs + v;
            simd.store_float(cell.scale(simd, 0, g), &mut panel.scales[at].0);
            if P::LAYOUT.scheme.has_min {
                simd.store_float(cell.min(simd, 0, g), &mut panel.mins[at].0);
            }
        }
    }
}

/// A panel of `V` groups of sixteen outputs, `G` groups of scales a cell.
pub(super) struct Unpacked<'a, const V: usize, const G: usize>(pub &'a Panel);

/// 32 `k` of it.
pub(super) struct UnpackedCell<'a, const V: usize> {
    codes: &'a [[Line; V]; 8],
    scales: &'a [[Sums; V]],
    mins: &'a [[Sums; V]],
}

impl<'a, S: Int8, const V: usize, const G: usize> Cells<S> for Unpacked<'a, V, G> {
    type Cell = UnpackedCell<'a, V>;

    #[inline(always)]
    fn cell(&self, _simd: S, c: usize) -> Self::Cell {
        let codes = self.0.codes.as_chunks::<V>().0.as_chunks::<8>().0;
        let scales = &self.0.scales.as_chunks::<V>().0[c * G..][..G];
        let mins = self.0.mins.as_chunks::<V>().0;
        let mins = if mins.is_empty() { mins } else { &mins[c * G..][..G] };
        UnpackedCell { codes: &codes[c], scales, mins }
    }
}

impl<S: Int8, const V: usize> Steps<S> for UnpackedCell<'_, V> {
    #[inline(always)]
    fn codes(&self, simd: S, v: usize, step: usize) -> S::Codes {
        simd.load(&self.codes[step][v].0)
    }
}

impl<S: Int8, const V: usize> Cell<S> for UnpackedCell<'_, V> {
    #[inline(always)]
    fn scale(&self, simd: S, v: usize, g: usize) -> S::F {
        simd.load_float(&self.scales[g][v].0)
    }
    #[inline(always)]
    fn min(&self, simd: S, v: usize, g: usize) -> S::F {
        simd.load_float(&self.mins[g][v].0)
    }
}
