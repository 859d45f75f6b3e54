//! The memory of 64 neighbouring positions, in the order in which the kernel reads it.
//!
//! Head after head, each its keys and then its values, in panels of W columns:
//!
//! ```text
//! keys    [64 / W] panels [d_k, W]     lanes are positions: a score is a sum down a column
//! values  [d_v / W] panels [64, W]     lanes are channels; the last panel is filled up with zeros
//! ```
//!
//! W is two vectors of the instruction set. Elements are stored as [`KvType`] says; the scales of
//! q8_0 lie apart, those of keys as keys with `d_k / 32` rows, those of values `[d_v / 32, 64]`.
//! Where values are the first channels of the keys, they have no memory of their own.

use half::slice::HalfFloatSliceExt;

use super::panels::{Bf16, Code, Elements, F16, F32, PanelRows, Panels, ScaledKeys, ScaledValues};
use crate::rows::Rows;
use crate::simd::{Level, Simd, dispatch};

/// Positions of a page of a [`KvCache`](super::KvCache): a multiple of every W.
pub const PAGE: usize = 64;
/// Values that share a scale in q8_0.
pub(super) const BLOCK: usize = 32;

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvType {
    /// 32-bit floats.
    F32,
    /// IEEE half precision: 11 bits of precision, infinite beyond 65504.
    F16,
    /// bfloat16: 8 bits of precision, the range of f32.
    Bf16,
    /// 8-bit integers with an f16 scale for each 32 neighbouring channels of a head, as ggml's q8_0:
    /// within half a scale, which is 1/127 of the largest of the 32, or within 4e-6 where that is below
    /// 0.008. A block with a NaN or a magnitude beyond 8.3e6 becomes NaN.
    Q8_0,
}

impl KvType {
    /// Every type.
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::Q8_0];

    /// The name that options and files use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
        }
    }

    /// Magnitudes below this stay finite.
    #[must_use]
    pub fn bound(self) -> f32 {
        match self {
            Self::F32 => f32::INFINITY,
            // Half a step above the largest, 65504.
            Self::F16 => 65_520.0,
            Self::Bf16 => 3.396_177e38,
            // A scale is an f16.
            Self::Q8_0 => 65_504.0 * 127.0,
        }
    }
}

/// The sizes of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// The instruction set that reads it.
    pub level: Level,
    pub kind: KvType,
    /// Hk
    pub nheads: usize,
    pub d_k: usize,
    pub d_v: usize,
    /// Whether values are the first `d_v` channels of the keys.
    shared: bool,
    /// W
    width: usize,
}

impl Layout {
    #[track_caller]
    pub(super) fn new(level: Level, nheads: usize, d_k: usize, d_v: usize, kind: KvType) -> Self {
        assert!(nheads > 0, "nheads_kv");
        assert!(d_k > 0, "d_k");
        assert!(d_v > 0, "d_v");
        Self { level, kind, nheads, d_k, d_v, shared: false, width: panel_width(level) }
    }

    /// The same, with values that are the first channels of the keys.
    pub(super) fn sharing(self) -> Self {
        Self { shared: true, ..self }
    }

    /// `d_v` in whole panels.
    pub(super) fn padded_d_v(&self) -> usize {
        self.d_v.next_multiple_of(self.width)
    }

    /// Channels of a head's values that are given apart from its keys.
    pub(super) fn own_d_v(&self) -> usize {
        if self.shared { 0 } else { self.d_v }
    }

    /// Elements of a head's keys.
    fn keys(&self) -> usize {
        self.d_k * PAGE
    }

    /// Elements of a head.
    fn head(&self) -> usize {
        self.keys() + self.own_d_v().next_multiple_of(self.width) * PAGE
    }

    /// Scales of a head's keys.
    fn key_scales(&self) -> usize {
        self.d_k.div_ceil(BLOCK) * PAGE
    }

    /// Scales of a head.
    fn head_scales(&self) -> usize {
        self.key_scales() + self.own_d_v().div_ceil(BLOCK) * PAGE
    }

    /// Bytes of a page.
    pub(super) fn bytes(&self) -> usize {
        let elements = self.nheads * self.head();
        match self.kind {
            KvType::F32 => 4 * elements,
            KvType::F16 | KvType::Bf16 => 2 * elements,
            KvType::Q8_0 => elements + 2 * self.nheads * self.head_scales(),
        }
    }
}

dispatch! { fn panel_width = panel_width_body() -> usize }

#[inline(always)]
fn panel_width_body<S: Simd>(_simd: S) -> usize {
    2 * S::LANES
}

/// What [`Page::stored_values`] makes of what a page stores.
#[derive(Default)]
pub(super) struct Buffers {
    /// Keys as floats, and the values that are made of them.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Scales of values as floats.
    scales: Vec<f32>,
}

/// The first `len` elements of a buffer that grows as needed.
#[inline(always)]
fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// Keys and values of [`PAGE`] positions; zeros where nothing was written.
#[derive(Clone)]
pub(super) enum Page {
    F32(Vec<f32>),
    /// Bits of f16 or bf16 values.
    Half(Vec<u16>),
    /// Codes, and bits of f16 scales.
    Q8_0(Vec<i8>, Vec<u16>),
}

impl Page {
    pub(super) fn new(layout: &Layout) -> Self {
        let elements = layout.nheads * layout.head();
        match layout.kind {
            KvType::F32 => Self::F32(vec![0.0; elements]),
            KvType::F16 | KvType::Bf16 => Self::Half(vec![0; elements]),
            KvType::Q8_0 => {
                Self::Q8_0(vec![0; elements], vec![0; layout.nheads * layout.head_scales()])
            }
        }
    }

    /// Writes the keys `[n, Hk * d_k]` and values `[n, Hk * d_v]` of n positions from `slot` on.
    pub(super) fn write(&mut self, layout: &Layout, slot: usize, k: Rows<'_>, v: Rows<'_>) {
        let Layout { d_k, width, .. } = *layout;
        let d_v = layout.own_d_v();
        let rows = move |head: usize| {
            (0..k.len()).map(move |i| {
                let k = &k.row(i)[head * d_k..][..d_k];
                (slot + i, k, &v.row(i)[head * d_v..][..d_v])
            })
        };
        match self {
            Self::F32(data) => {
                for (head, data) in data.chunks_exact_mut(layout.head()).enumerate() {
                    let (keys, values) = data.split_at_mut(layout.keys());
                    for (slot, k, v) in rows(head) {
                        put_key(keys, d_k, width, slot, k);
                        put_value(values, width, slot, v);
                    }
                }
            }
            Self::Half(data) => {
                let (mut k_bits, mut v_bits) = (vec![0; d_k], vec![0; d_v]);
                for (head, data) in data.chunks_exact_mut(layout.head()).enumerate() {
                    let (keys, values) = data.split_at_mut(layout.keys());
                    for (slot, k, v) in rows(head) {
                        narrow(layout.kind, k, &mut k_bits);
                        put_key(keys, d_k, width, slot, &k_bits);
                        narrow(layout.kind, v, &mut v_bits);
                        put_value(values, width, slot, &v_bits);
                    }
                }
            }
            Self::Q8_0(codes, scales) => {
                let mut row = vec![0; d_k.max(d_v)];
                let mut row_scales = vec![0; d_k.max(d_v).div_ceil(BLOCK)];
                let heads = codes
                    .chunks_exact_mut(layout.head())
                    .zip(scales.chunks_exact_mut(layout.head_scales()));
                for (head, (codes, scales)) in heads.enumerate() {
                    let (keys, values) = codes.split_at_mut(layout.keys());
                    let (key_scales, value_scales) = scales.split_at_mut(layout.key_scales());
                    for (slot, k, v) in rows(head) {
                        let blocks = d_k.div_ceil(BLOCK);
                        quantize(layout.level, k, &mut row, &mut row_scales);
                        put_key(keys, d_k, width, slot, &row[..d_k]);
                        put_key(key_scales, blocks, width, slot, &row_scales[..blocks]);
                        quantize(layout.level, v, &mut row, &mut row_scales);
                        put_value(values, width, slot, &row[..d_v]);
                        for (block, scale) in value_scales.chunks_exact_mut(PAGE).zip(&row_scales) {
                            block[slot] = *scale;
                        }
                    }
                }
            }
        }
    }

    /// A head's keys.
    #[inline(always)]
    pub(super) fn keys<'a>(&'a self, layout: &Layout, head: usize) -> Keys<'a> {
        let (first, len) = (head * layout.head(), layout.keys());
        let scales = match self {
            Self::Q8_0(_, scales) => &scales[head * layout.head_scales()..][..layout.key_scales()],
            _ => &[],
        };
        Keys { stored: self.stored(layout.kind, first, len), scales }
    }

    /// A head's values; those that are channels of the keys are made in buffers.
    #[inline(always)]
    pub(super) fn values<'a, S: Simd>(
        &'a self,
        simd: S,
        layout: &Layout,
        head: usize,
        buffers: &'a mut Buffers,
    ) -> Values<'a> {
        let len = layout.padded_d_v() * PAGE;
        if layout.shared {
            let keys = self.keys(layout, head).decoded(simd, layout.d_k, &mut buffers.keys);
            let values = sized(&mut buffers.values, len);
            transpose(simd, layout.d_k, keys, values);
            return Values { stored: Stored::F32(values), scales: &[] };
        }
        let first = head * layout.head() + layout.keys();
        let scales: &[f32] = match self {
            Self::Q8_0(_, scales) => {
                let scales = &scales[head * layout.head_scales()..][..layout.head_scales()];
                let scales = Stored::F16(&scales[layout.key_scales()..]);
                scales.floats(simd, &mut buffers.scales)
            }
            _ => &[],
        };
        Values { stored: self.stored(layout.kind, first, len), scales }
    }

    /// Elements of panels.
    #[inline(always)]
    fn stored(&self, kind: KvType, first: usize, len: usize) -> Stored<'_> {
        match self {
            Self::F32(data) => Stored::F32(&data[first..][..len]),
            Self::Half(data) if kind == KvType::Bf16 => Stored::Bf16(&data[first..][..len]),
            Self::Half(data) => Stored::F16(&data[first..][..len]),
            Self::Q8_0(codes, _) => Stored::Code(&codes[first..][..len]),
        }
    }
}

/// Elements of panels.
#[derive(Clone, Copy)]
pub(super) enum Stored<'a> {
    F32(&'a [f32]),
    /// Bits of f16.
    F16(&'a [u16]),
    /// Bits of bf16.
    Bf16(&'a [u16]),
    Code(&'a [i8]),
}

/// Panels, and the scales of codes.
#[derive(Clone, Copy)]
pub(super) struct Scaled<'a, T> {
    pub stored: Stored<'a>,
    pub scales: &'a [T],
}

/// Keys `[64 / W][d_k, W]`, and bits of the f16 scales `[64 / W][d_k / 32, W]`.
pub(super) type Keys<'a> = Scaled<'a, u16>;
/// Values `[d_v / W][64, W]`, and the scales `[d_v / 32, 64]`.
pub(super) type Values<'a> = Scaled<'a, f32>;

/// Evaluates an expression with the panels of keys or values; where they are codes, or floats of them, with what
/// another expression makes of those.
macro_rules! with_panels {
    ($simd:ident, $of:expr, $height:expr, $codes:ident => $scaled:expr, $panels:ident => $body:expr) => {
        match $of.stored {
            Stored::F32(x) if $of.scales.is_empty() => {
                let $panels = Elements::<$simd, F32>::new($simd::chunks(x), $height);
                $body
            }
            Stored::F32(x) => {
                let $codes = Elements::<$simd, F32>::new($simd::chunks(x), $height);
                let $panels = $scaled;
                $body
            }
            Stored::F16(x) => {
                let $panels = Elements::<$simd, F16>::new($simd::halves(x), $height);
                $body
            }
            Stored::Bf16(x) => {
                let $panels = Elements::<$simd, Bf16>::new($simd::halves(x), $height);
                $body
            }
            Stored::Code(x) => {
                let $codes = Elements::<$simd, Code>::new($simd::codes(x), $height);
                let $panels = $scaled;
                $body
            }
        }
    };
}
/// [`with_panels`] of keys.
macro_rules! with_keys {
    ($simd:ident, $keys:expr, $d_k:expr, $panels:ident => $body:expr) => {
        with_panels!($simd, $keys, $d_k, codes => ScaledKeys::new(codes, $keys.scales, $d_k), $panels => $body)
    };
}
/// [`with_panels`] of values.
macro_rules! with_values {
    ($simd:ident, $values:expr, $panels:ident => $body:expr) => {
        with_panels!($simd, $values, PAGE, codes => ScaledValues::new(codes, $values.scales), $panels => $body)
    };
}
pub(super) use {with_keys, with_panels, with_values};

impl<'a> Stored<'a> {
    /// The elements as floats: themselves, or made in a buffer.
    #[inline(always)]
    fn floats<S: Simd>(self, simd: S, buffer: &'a mut Vec<f32>) -> &'a [f32] {
        let len = match self {
            Self::F32(x) => return x,
            Self::F16(x) | Self::Bf16(x) => x.len(),
            Self::Code(x) => x.len(),
        };
        let to = sized(buffer, len);
        let plain = Keys { stored: self, scales: &[] };
        // One panel of as many rows as there are.
        let height = len / (2 * S::LANES);
        with_panels!(S, plain, height, codes => codes, panels => decode(simd, panels, height, to));
        to
    }
}

impl<'a, T> Scaled<'a, T> {
    /// The same with floats in place of other elements.
    #[inline(always)]
    pub(super) fn widened<S: Simd>(self, simd: S, buffer: &'a mut Vec<f32>) -> Self {
        Self { stored: Stored::F32(self.stored.floats(simd, buffer)), ..self }
    }
}

impl<'a> Keys<'a> {
    /// What they stand for.
    #[inline(always)]
    fn decoded<S: Simd>(self, simd: S, d_k: usize, buffer: &'a mut Vec<f32>) -> &'a [f32] {
        if self.scales.is_empty() {
            return self.stored.floats(simd, buffer);
        }
        let to = sized(buffer, d_k * PAGE);
        with_keys!(S, self, d_k, panels => decode(simd, panels, d_k, to));
        to
    }
}

impl<'a> Values<'a> {
    /// What they stand for.
    #[inline(always)]
    fn decoded<S: Simd>(self, simd: S, len: usize, buffer: &'a mut Vec<f32>) -> &'a [f32] {
        if self.scales.is_empty() {
            return self.stored.floats(simd, buffer);
        }
        let to = sized(buffer, len);
        with_values!(S, self, panels => decode(simd, panels, PAGE, to));
        to
    }
}

/// Makes floats of panels of so many rows.
#[inline(always)]
fn decode<S: Simd, P: Panels<S>>(simd: S, panels: P, height: usize, to: &mut [f32]) {
    let to = S::chunks_mut(to).0.as_chunks_mut::<2>().0;
    for (panel, to) in to.chunks_exact_mut(height).enumerate() {
        let of_rows = panels.row_scales(panel);
        for (span, to) in to.chunks_mut(P::SPAN).enumerate() {
            let first = span * P::SPAN;
            let of_lanes = panels.lane_scales(simd, panel, first);
            let rows = panels.rows(panel, first..first + to.len());
            for (row, to) in to.iter_mut().enumerate() {
                let mut x = rows.row(simd, row);
                for i in 0..2 {
                    if let Some(scales) = of_lanes {
                        x[i] = simd.mul(scales[i], x[i]);
                    }
                    if let Some(scales) = of_rows {
                        x[i] = simd.mul(simd.splat(scales[first + row]), x[i]);
                    }
                    simd.store(x[i], &mut to[i]);
                }
            }
        }
    }
}

/// Writes a row as column `slot` of panels `[d_k, W]`.
pub(super) fn put_key<T: Copy>(panels: &mut [T], d_k: usize, width: usize, slot: usize, row: &[T]) {
    let panel = &mut panels[slot / width * width * d_k..][..width * d_k];
    for (to, x) in panel.chunks_exact_mut(width).zip(row) {
        to[slot % width] = *x;
    }
}

/// Writes a row as row `slot` of panels `[64, W]`.
fn put_value<T: Copy>(panels: &mut [T], width: usize, slot: usize, row: &[T]) {
    for (panel, row) in panels.chunks_exact_mut(PAGE * width).zip(row.chunks(width)) {
        panel[slot * width..][..row.len()].copy_from_slice(row);
    }
}

/// Rounds to bits of f16 or bf16.
fn narrow(kind: KvType, x: &[f32], to: &mut [u16]) {
    use half::slice::HalfBitsSliceExt;
    if kind == KvType::Bf16 {
        to.reinterpret_cast_mut::<half::bf16>().convert_from_f32_slice(x);
    } else {
        to.reinterpret_cast_mut::<half::f16>().convert_from_f32_slice(x);
    }
}

/// Rounds |x| < 2^22 to the nearest integer, ties to even, where it is added and taken away.
const ROUND: f32 = 12_582_912.0;

dispatch! { fn quantize = quantize_body(x: &[f32], codes: &mut [i8], scales: &mut [u16]) }

/// Rounds a row to codes and bits of scales, a scale for each 32 values.
///
/// A decoded row gives the same codes and scales again. Plain loops, which the compiler makes vectors of.
#[inline(always)]
fn quantize_body<S: Simd>(_simd: S, x: &[f32], codes: &mut [i8], scales: &mut [u16]) {
    for ((x, codes), to) in x.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(scales) {
        // Without their sign, bits of floats are in the order of the floats; those of NaN come last.
        let mut largest = 0;
        for x in x {
            largest = largest.max(x.to_bits().cast_signed() & i32::MAX);
        }
        let scale = half::f16::from_f32(f32::from_bits(largest.cast_unsigned()) / 127.0);
        *to = scale.to_bits();
        let scale = scale.to_f32();
        for (x, code) in x.iter().zip(codes) {
            // 0 / 0 is a NaN, and that a code of 0.
            let rounded = (x / scale).clamp(-127.0, 127.0) + ROUND;
            *code = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i8;
        }
    }
}

/// Fills the panels of values from those of keys, whose first channels they are.
#[inline(always)]
fn transpose<S: Simd>(_simd: S, d_k: usize, keys: &[f32], values: &mut [f32]) {
    let width = 2 * S::LANES;
    for (i, keys) in keys.chunks_exact(d_k * width).enumerate() {
        for (values, keys) in values.chunks_exact_mut(PAGE * width).zip(keys.chunks(width * width))
        {
            let values = &mut values[i * width * width..][..width * width];
            for (d, keys) in keys.chunks_exact(width).enumerate() {
                for slot in 0..width {
                    values[slot * width + d] = keys[slot];
                }
            }
        }
    }
}

dispatch! {
    pub(super) fn unpack = unpack_body(
        page: &Page, layout: &Layout, head: usize, keys: &mut [f32], values: &mut [f32],
    )
}

/// Writes a head's keys and values to its columns of `[n, Hk * d_k]` and `[n, Hk * d_v]`, n <= 64.
#[inline(always)]
fn unpack_body<S: Simd>(
    simd: S,
    page: &Page,
    layout: &Layout,
    head: usize,
    keys: &mut [f32],
    values: &mut [f32],
) {
    let Layout { nheads, d_k, d_v, width, .. } = *layout;
    let (mut buffers, mut panels) = (Buffers::default(), Vec::new());
    let key_panels = page.keys(layout, head).decoded(simd, d_k, &mut panels);
    for (slot, row) in keys.chunks_exact_mut(nheads * d_k).enumerate() {
        let panel = &key_panels[slot / width * width * d_k..][..width * d_k];
        for (to, x) in row[head * d_k..][..d_k].iter_mut().zip(panel.chunks_exact(width)) {
            *to = x[slot % width];
        }
    }
    let stored = page.values(simd, layout, head, &mut buffers);
    let value_panels = stored.decoded(simd, layout.padded_d_v() * PAGE, &mut panels);
    for (slot, row) in values.chunks_exact_mut(nheads * d_v).enumerate() {
        let row = row[head * d_v..][..d_v].chunks_mut(width);
        for (to, panel) in row.zip(value_panels.chunks_exact(PAGE * width)) {
            to.copy_from_slice(&panel[slot * width..][..to.len()]);
        }
    }
}
