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

use crate::rows::Rows;
use crate::simd::{Level, Simd, dispatch};

/// Positions of a page of a [`KvCache`](super::KvCache): a multiple of every W.
pub const PAGE: usize = 64;
/// Values that share a scale in q8_0.
const BLOCK: usize = 32;

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

/// Panels of f32 that are made of what a page stores.
#[derive(Default)]
pub(super) struct Buffers {
    panels: Vec<f32>,
    /// Values that are made of keys.
    values: Vec<f32>,
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

    /// The panels of a head's keys: the page's own if it stores f32.
    #[inline(always)]
    pub(super) fn keys<'a, S: Simd>(
        &'a self,
        simd: S,
        layout: &Layout,
        head: usize,
        buffers: &'a mut Buffers,
    ) -> &'a [f32] {
        let (first, len) = (head * layout.head(), layout.keys());
        match self {
            Self::F32(data) => &data[first..][..len],
            Self::Half(data) => {
                let panels = sized(&mut buffers.panels, len);
                widen(simd, layout.kind, &data[first..][..len], panels);
                panels
            }
            Self::Q8_0(codes, scales) => {
                let panels = sized(&mut buffers.panels, len);
                let scales = &scales[head * layout.head_scales()..][..layout.key_scales()];
                let panel = layout.d_k * layout.width;
                let codes = codes[first..][..len].chunks_exact(panel);
                let scales = scales.chunks_exact(scales.len() * layout.width / PAGE);
                for ((codes, scales), to) in codes.zip(scales).zip(panels.chunks_exact_mut(panel)) {
                    decode_keys(simd, codes, scales, to);
                }
                panels
            }
        }
    }

    /// The panels of a head's values: the page's own if it stores f32.
    #[inline(always)]
    pub(super) fn values<'a, S: Simd>(
        &'a self,
        simd: S,
        layout: &Layout,
        head: usize,
        buffers: &'a mut Buffers,
    ) -> &'a [f32] {
        let len = layout.padded_d_v() * PAGE;
        if layout.shared {
            let mut values = std::mem::take(&mut buffers.values);
            let keys = self.keys(simd, layout, head, buffers);
            transpose(simd, layout.d_k, keys, sized(&mut values, len));
            buffers.values = values;
            return &buffers.values[..len];
        }
        let first = head * layout.head() + layout.keys();
        match self {
            Self::F32(data) => &data[first..][..len],
            Self::Half(data) => {
                let panels = sized(&mut buffers.panels, len);
                widen(simd, layout.kind, &data[first..][..len], panels);
                panels
            }
            Self::Q8_0(codes, scales) => {
                let panels = sized(&mut buffers.panels, len);
                let scales = &scales[head * layout.head_scales() + layout.key_scales()..];
                let panel = layout.width * PAGE;
                let codes = codes[first..][..len].chunks_exact(panel);
                for ((i, codes), to) in codes.enumerate().zip(panels.chunks_exact_mut(panel)) {
                    let scales = &scales[i * layout.width / BLOCK * PAGE..][..PAGE];
                    decode_values(simd, codes, scales, to);
                }
                panels
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

/// Widens bits of f16 or bf16, whole chunks of them.
#[inline(always)]
fn widen<S: Simd>(simd: S, kind: KvType, bits: &[u16], to: &mut [f32]) {
    let (bits, to) = (S::halves(bits).0, S::chunks_mut(to).0);
    if kind == KvType::Bf16 {
        for (bits, to) in bits.iter().zip(to) {
            simd.store(simd.load_bf16(bits), to);
        }
    } else {
        for (bits, to) in bits.iter().zip(to) {
            simd.store(simd.load_f16(bits), to);
        }
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

/// Two vectors of codes as floats.
#[inline(always)]
fn floats<S: Simd>(simd: S, codes: &[i8]) -> [S::F; 2] {
    // A copy of its own, which the compiler can make in vectors.
    let mut wide = [0.0; 32];
    let codes = &codes[..2 * S::LANES];
    for i in 0..2 * S::LANES {
        wide[i] = f32::from(codes[i]);
    }
    let chunks = S::chunks(&wide).0;
    [simd.load(&chunks[0]), simd.load(&chunks[1])]
}

/// Decodes a panel of keys: row d is multiplied by row d / 32 of the scales.
#[inline(always)]
fn decode_keys<S: Simd>(simd: S, codes: &[i8], scales: &[u16], to: &mut [f32]) {
    let width = 2 * S::LANES;
    let blocks = codes.chunks(BLOCK * width).zip(to.chunks_mut(BLOCK * width));
    for ((codes, to), scales) in blocks.zip(S::halves(scales).0.as_chunks::<2>().0) {
        let scales = [simd.load_f16(&scales[0]), simd.load_f16(&scales[1])];
        let to = S::chunks_mut(to).0.as_chunks_mut::<2>().0;
        for (codes, to) in codes.chunks_exact(width).zip(to) {
            let x = floats(simd, codes);
            simd.store(simd.mul(scales[0], x[0]), &mut to[0]);
            simd.store(simd.mul(scales[1], x[1]), &mut to[1]);
        }
    }
}

/// Decodes a panel of values: row j is multiplied by the scale of position j.
#[inline(always)]
fn decode_values<S: Simd>(simd: S, codes: &[i8], scales: &[u16], to: &mut [f32]) {
    let mut wide = [0.0; PAGE];
    widen(simd, KvType::F16, scales, &mut wide);
    let to = S::chunks_mut(to).0.as_chunks_mut::<2>().0;
    for ((codes, to), scale) in codes.chunks_exact(2 * S::LANES).zip(to).zip(wide) {
        let (scale, x) = (simd.splat(scale), floats(simd, codes));
        simd.store(simd.mul(scale, x[0]), &mut to[0]);
        simd.store(simd.mul(scale, x[1]), &mut to[1]);
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
    let mut buffers = Buffers::default();
    let key_panels = page.keys(simd, layout, head, &mut buffers);
    for (slot, row) in keys.chunks_exact_mut(nheads * d_k).enumerate() {
        let panel = &key_panels[slot / width * width * d_k..][..width * d_k];
        for (to, x) in row[head * d_k..][..d_k].iter_mut().zip(panel.chunks_exact(width)) {
            *to = x[slot % width];
        }
    }
    let value_panels = page.values(simd, layout, head, &mut buffers);
    for (slot, row) in values.chunks_exact_mut(nheads * d_v).enumerate() {
        let row = row[head * d_v..][..d_v].chunks_mut(width);
        for (to, panel) in row.zip(value_panels.chunks_exact(PAGE * width)) {
            to.copy_from_slice(&panel[slot * width..][..to.len()]);
        }
    }
}
