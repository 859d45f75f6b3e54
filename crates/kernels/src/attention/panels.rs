//! Panels of keys or values as products read them: rows of two vectors, of what a page stores.
//!
//! Few queries read a page about once, so its elements become floats in registers, on the way into the product.
//! Many queries share panels that were widened into a buffer before. Both give the same floats. Scales of codes
//! are applied to sums of keys and to weights of values, where they are few.

use std::ops::Range;

use super::page::{BLOCK, PAGE};
use crate::simd::Simd;

/// Neighbouring rows of a panel.
pub(super) trait PanelRows<S: Simd>: Copy {
    fn len(self) -> usize;
    /// The two vectors of a row.
    fn row(self, simd: S, row: usize) -> [S::F; 2];
}

/// Panels of one height.
pub(super) trait Panels<S: Simd>: Copy {
    type Rows: PanelRows<S>;
    /// Rows that share the scales of their lanes, from a multiple of it on; divides [`PAGE`].
    const SPAN: usize = PAGE;

    /// Some rows of a panel.
    fn rows(self, panel: usize, rows: Range<usize>) -> Self::Rows;

    /// Factors of the lanes, in the span that starts at a row.
    #[inline(always)]
    fn lane_scales(self, _simd: S, _panel: usize, _first: usize) -> Option<[S::F; 2]> {
        None
    }

    /// Factors of the rows of a panel.
    #[inline(always)]
    fn row_scales<'a>(self, _panel: usize) -> Option<&'a [f32]>
    where
        Self: 'a,
    {
        None
    }
}

/// A type of elements.
pub(super) trait Element<S: Simd>: Copy {
    /// A vector of them in memory.
    type Vector: Copy;
    /// The vector as floats.
    fn load(simd: S, x: &Self::Vector) -> S::F;
}

#[derive(Clone, Copy)]
pub(super) struct F32;
/// Bits of f16.
#[derive(Clone, Copy)]
pub(super) struct F16;
/// Bits of bf16.
#[derive(Clone, Copy)]
pub(super) struct Bf16;
#[derive(Clone, Copy)]
pub(super) struct Code;

impl<S: Simd> Element<S> for F32 {
    type Vector = S::Chunk;

    #[inline(always)]
    fn load(simd: S, x: &S::Chunk) -> S::F {
        simd.load(x)
    }
}

impl<S: Simd> Element<S> for F16 {
    type Vector = S::Half;

    #[inline(always)]
    fn load(simd: S, x: &S::Half) -> S::F {
        simd.load_f16(x)
    }
}

impl<S: Simd> Element<S> for Bf16 {
    type Vector = S::Half;

    #[inline(always)]
    fn load(simd: S, x: &S::Half) -> S::F {
        simd.load_bf16(x)
    }
}

impl<S: Simd> Element<S> for Code {
    type Vector = S::Codes;

    #[inline(always)]
    fn load(simd: S, x: &S::Codes) -> S::F {
        simd.load_i8(x)
    }
}

/// Panels `[panels][height, W]` of one type of elements; or some rows of a panel.
#[derive(Clone, Copy)]
pub(super) struct Elements<'a, S: Simd, E: Element<S>> {
    rows: &'a [[E::Vector; 2]],
    height: usize,
}

impl<'a, S: Simd, E: Element<S>> Elements<'a, S, E> {
    /// Of vectors, as [`Simd::chunks`] and its like cut them.
    #[inline(always)]
    pub(super) fn new<T>((vectors, _): (&'a [E::Vector], &'a [T]), height: usize) -> Self {
        Self { rows: vectors.as_chunks::<2>().0, height }
    }
}

impl<S: Simd, E: Element<S>> Panels<S> for Elements<'_, S, E> {
    type Rows = Self;

    #[inline(always)]
    fn rows(self, panel: usize, rows: Range<usize>) -> Self {
        Self { rows: &self.rows[panel * self.height + rows.start..][..rows.len()], ..self }
    }
}

impl<S: Simd, E: Element<S>> PanelRows<S> for Elements<'_, S, E> {
    #[inline(always)]
    fn len(self) -> usize {
        self.rows.len()
    }

    #[inline(always)]
    fn row(self, simd: S, row: usize) -> [S::F; 2] {
        let [a, b] = &self.rows[row];
        [E::load(simd, a), E::load(simd, b)]
    }
}

/// Codes of keys, with the f16 scales `[panels][d_k / 32, W]` of their positions.
#[derive(Clone, Copy)]
pub(super) struct ScaledKeys<'a, S: Simd, P> {
    panels: P,
    scales: Elements<'a, S, F16>,
}

impl<'a, S: Simd, P> ScaledKeys<'a, S, P> {
    #[inline(always)]
    pub(super) fn new(panels: P, scales: &'a [u16], d_k: usize) -> Self {
        Self { panels, scales: Elements::new(S::halves(scales), d_k.div_ceil(BLOCK)) }
    }
}

impl<S: Simd, P: Panels<S>> Panels<S> for ScaledKeys<'_, S, P> {
    type Rows = P::Rows;
    const SPAN: usize = BLOCK;

    #[inline(always)]
    fn rows(self, panel: usize, rows: Range<usize>) -> P::Rows {
        self.panels.rows(panel, rows)
    }

    #[inline(always)]
    fn lane_scales(self, simd: S, panel: usize, first: usize) -> Option<[S::F; 2]> {
        let span = first / BLOCK;
        Some(self.scales.rows(panel, span..span + 1).row(simd, 0))
    }
}

/// Codes of values, with the scales `[d_v / 32, 64]` of their positions.
#[derive(Clone, Copy)]
pub(super) struct ScaledValues<'a, P> {
    panels: P,
    scales: &'a [f32],
}

impl<'a, P> ScaledValues<'a, P> {
    #[inline(always)]
    pub(super) fn new(panels: P, scales: &'a [f32]) -> Self {
        Self { panels, scales }
    }
}

impl<S: Simd, P: Panels<S>> Panels<S> for ScaledValues<'_, P> {
    type Rows = P::Rows;

    #[inline(always)]
    fn rows(self, panel: usize, rows: Range<usize>) -> P::Rows {
        self.panels.rows(panel, rows)
    }

    #[inline(always)]
    fn row_scales<'a>(self, panel: usize) -> Option<&'a [f32]>
    where
        Self: 'a,
    {
        let block = panel * 2 * S::LANES / BLOCK;
        Some(&self.scales[block * PAGE..][..PAGE])
    }
}
