//! Quantized weights in the order in which a product reads them.
//!
//! Sixteen rows of the matrix lie together, so a vector of sixteen lanes holds neighbouring codes of
//! sixteen outputs. Blocks of a format follow one another along the rows. Those of sixteen rows at one
//! place make a *record*, two places where a block has 32 values; and 32 `k` of them a *cell*:
//!
//! ```text
//! [features / 16, width / record] records: d x 16 | m x 16 | group scales | group minima | cells
//! cell: vectors of the low and the high plane in turns, then the rest of the low plane
//! ```
//!
//! A code is cut into planes: 2, 3, 4, 5, 6 and 8 bits are 2, 2 + 1, 4, 4 + 1, 4 + 2 and 8. Step `s` of
//! a cell are `k` in 4s..4s + 4, 64 bytes; a plane of b bits packs 8 steps in b vectors of 64 bytes:
//! step s is in vector s % b, in bits b * (s / b).. of each byte. Vectors lie on cache lines.
//!
//! Nothing is rounded: rows decode to the bits that their blocks decode to. The size is that of the
//! blocks but for scales of six bits, which take a byte each, and ends of cache lines: at most 6 % more.
//! An odd number of blocks of 32 values in a row leaves half a record empty.

use std::ops::Range;
use std::sync::Arc;

use super::{Format, Parts, Scheme, Values, formats, if_multiplied, parts, scheme};
use crate::parallel::{self, PIECES};

/// Bytes of a vector of codes: a cache line.
pub(super) use crate::simd::int8::BYTES;
/// Rows that lie together.
pub(super) use crate::simd::int8::LANES;

/// Neighbouring `k` that are unpacked together.
pub(super) const CELL: usize = 32;

/// Neighbouring groups of sixteen rows that are multiplied in turns at most.
const STREAMS: usize = 4;
/// Nanoseconds of a product with one row that are worth a share of their own.
const SHARE: usize = 4_000;
/// Picoseconds to pack a value.
const PACKING: usize = 500;

/// Where the parts of a record lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub scheme: Scheme,
    /// Values of a block.
    pub block: usize,
    /// Blocks of a row in a record.
    pub blocks: usize,
    /// Bits of the low and the high plane.
    pub low: usize,
    pub high: usize,
    /// Where there is an `m`: its offset. `[blocks, 16]` halves, as those of `d` at the start.
    pub m: usize,
    /// Where groups have scales of their own: their offset. Bytes, `[groups, 16]`.
    pub scales: Option<usize>,
    /// Where groups have minima of their own: their offset; where it is that of the scales, a byte
    /// holds both, minima high.
    pub mins: Option<usize>,
    /// Offset of the cells.
    pub cells: usize,
    /// Bytes of a cell.
    pub cell: usize,
    /// Bytes of a record.
    pub record: usize,
}

impl Layout {
    /// # Panics
    ///
    /// If the format cannot be multiplied.
    pub(super) const fn of(format: Format) -> Self {
        let Some(scheme) = scheme(format) else { panic!("format: no products with it") };
        let block = format.block_len();
        let blocks = if block == CELL { 2 } else { 1 };
        let (low, high) = match scheme.bits {
            2 | 3 => (2, scheme.bits as usize - 2),
            4..=6 => (4, scheme.bits as usize - 4),
            _ => (8, 0),
        };
        let m = blocks * LANES * 2;
        let mut end = if scheme.has_min { 2 * m } else { m };
        let (mut scales, mut mins) = (None, None);
        if block == 256 {
            scales = Some(end);
            end += block / scheme.group * LANES;
            if scheme.has_min && scheme.group == 16 {
                mins = scales;
            } else if scheme.has_min {
                mins = Some(end);
                end += block / scheme.group * LANES;
            }
        }
        let cells = end.next_multiple_of(BYTES);
        let cell = (low + high) * BYTES;
        let record = cells + blocks * block / CELL * cell;
        Self { scheme, block, blocks, low, high, m, scales, mins, cells, cell, record }
    }

    /// Values of a row in a record.
    pub(super) const fn values(self) -> usize {
        self.blocks * self.block
    }

    /// Where vector `i` of the low plane is in a cell. Vectors lie in the order in which steps first read them, so
    /// that the processor fetches them ahead.
    pub(super) const fn low_at(self, i: usize) -> usize {
        (if i < self.high { 2 * i } else { self.high + i }) * BYTES
    }

    /// Where vector `i` of the high plane is.
    pub(super) const fn high_at(i: usize) -> usize {
        (2 * i + 1) * BYTES
    }

    /// Groups of a cell.
    pub(super) const fn groups(self) -> usize {
        CELL / self.scheme.group
    }

    /// Whether codes are signed when they are multiplied; else they are unsigned, of at most six bits.
    pub(super) const fn is_signed(self) -> bool {
        !matches!(self.scheme.values, Values::Offset(_))
    }

    /// Records along rows of `width` values.
    const fn along(self, width: usize) -> usize {
        width.div_ceil(self.values())
    }
}

/// A format whose layout is known where it is compiled.
pub(super) trait Packing {
    const LAYOUT: Layout;
    /// Bytes of a block.
    const BYTES: usize;
    /// Takes a block apart.
    fn parts(block: &[u8]) -> Parts;
}

macro_rules! packings {
    ($({ $format:ident $name:literal $module:ident $($fit:tt)* })*) => {
        $(packings! { @row $format $($fit)* })*
    };
    (@row $format:ident) => {};
    (@row $format:ident $($fit:tt)+) => {
        pub(super) struct $format;
        impl Packing for $format {
            const LAYOUT: Layout = Layout::of(Format::$format);
            const BYTES: usize = Format::$format.block_bytes();
            #[inline(always)]
            fn parts(block: &[u8]) -> Parts {
                parts(Format::$format, block)
            }
        }
    };
}
formats! { packings }

/// Runs an expression with `$packing` standing for the type of a format that can be multiplied.
macro_rules! with_packing {
    (@rows $value:expr, $packing:ident => $run:expr;
        $({ $format:ident $name:literal $module:ident $($fit:tt)* })*
    ) => {
        match $value {
            $(Format::$format => if_multiplied!(
                { $($fit)* }
                {
                    type $packing = super::packed::$format;
                    $run
                },
                unreachable!("{} is not packed", $name)
            ),)*
        }
    };
    ($value:expr, $packing:ident => $run:expr) => {
        formats! { with_packing @rows $value, $packing => $run; }
    };
}
pub(super) use with_packing;

/// A weight matrix `[out, in]` of quantized blocks, packed for [`linear_quantized`](super::linear_quantized).
/// Clones share its bytes.
#[derive(Clone)]
pub struct Packed {
    format: Format,
    features: usize,
    width: usize,
    /// What keeps the bytes: a vector, or a file's map.
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl Packed {
    /// Packs rows of `width` values, the blocks of a row one after the other.
    ///
    /// # Panics
    ///
    /// If the format cannot be multiplied ([`Format::can_multiply`]), `width` is not whole blocks, or
    /// `blocks` not whole rows.
    #[track_caller]
    #[must_use]
    pub fn new(format: Format, blocks: &[u8], width: usize) -> Self {
        Self::watched(format, blocks, width, &|_| ())
    }

    /// The same; `watch` hears of each task, on the thread that runs it: its rows.
    #[track_caller]
    pub(crate) fn watched(
        format: Format,
        blocks: &[u8],
        width: usize,
        watch: &(dyn Fn(Range<usize>) + Sync),
    ) -> Self {
        assert!(format.can_multiply(), "format: no products with {}", format.name());
        let row = format.bytes_of(width).unwrap_or_default();
        assert!(row > 0, "width: {width} is not whole blocks of {}", format.name());
        let features = blocks.len() / row;
        assert_eq!(blocks.len(), features * row, "blocks: not whole rows of {width}");
        let layout = Layout::of(format);
        let group = layout.along(width) * layout.record;
        let size = features.div_ceil(LANES) * group;
        // Room to begin on a cache line.
        let mut data = vec![0; size + BYTES - 1];
        let start = data.as_ptr().align_offset(BYTES).min(BYTES - 1);
        let range = start..start + size;
        // Whoever will multiply rows packs them: memory that a thread writes first is near its processor.
        let threads = rayon::current_num_threads();
        let shares: Vec<Range<usize>> =
            (0..threads).map(|i| share([features, width], threads, i)).collect();
        let (mut tasks, mut ends) = (Vec::new(), vec![0]);
        let mut rest = &mut data[range.clone()];
        for share in shares {
            let mut first = share.start;
            for end in Self::cut(share, PIECES) {
                let (groups, after) = rest.split_at_mut((end - first).div_ceil(LANES) * group);
                tasks.push((first..end, groups));
                (first, rest) = (end, after);
            }
            ends.push(tasks.len());
        }
        let ns = (features * width).saturating_mul(PACKING) / 1000;
        let of = |_, i: usize| ends[i]..ends[i + 1];
        parallel::for_each_of(
            tasks,
            of,
            ns,
            || (),
            |(), (of, groups): (Range<usize>, &mut [u8])| {
                watch(of.clone());
                let rows = blocks[of.start * row..of.end * row].chunks(LANES * row);
                for (group, rows) in groups.chunks_exact_mut(group).zip(rows) {
                    with_packing!(format, P => pack_group::<P>(rows, row, group));
                }
            },
        );
        Self { format, features, width, owner: Arc::new(data), range }
    }

    /// The matrix of `features` rows of `width` values that was packed before: the bytes `range` of `owner`, whose
    /// `as_ref` must return the same slice each time.
    ///
    /// # Panics
    ///
    /// If the format cannot be multiplied, or `range` are not the owner's bytes of [`size`](Self::size).
    #[track_caller]
    #[must_use]
    pub fn of_bytes(
        format: Format,
        [features, width]: [usize; 2],
        owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
        range: Range<usize>,
    ) -> Self {
        let size = Self::size(format, [features, width]);
        assert_eq!(Some(range.len()), size, "range: not the size of [{features}, {width}]");
        assert!((*owner).as_ref().get(range.clone()).is_some(), "range: not in owner");
        Self { format, features, width, owner, range }
    }

    /// Bytes of a packed matrix of `features` rows of `width` values; `None` where the format cannot be multiplied, a
    /// row is not whole blocks, or they are too many to count.
    #[must_use]
    pub fn size(format: Format, [features, width]: [usize; 2]) -> Option<usize> {
        if !format.can_multiply() || !width.is_multiple_of(format.block_len()) {
            return None;
        }
        let layout = Layout::of(format);
        let group = layout.along(width).checked_mul(layout.record)?;
        features.div_ceil(LANES).checked_mul(group)
    }

    /// The format of the blocks.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Number of rows: outputs of a product.
    #[must_use]
    pub fn features(&self) -> usize {
        self.features
    }

    /// Length of a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Bytes of the packed weights: those that a product reads.
    #[must_use]
    pub fn size_in_bytes(&self) -> usize {
        self.range.len()
    }

    /// The packed weights, for [`of_bytes`](Self::of_bytes).
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // The range was checked when it was made; an owner that shrinks since then leaves nothing.
        (*self.owner).as_ref().get(self.range.clone()).unwrap_or_default()
    }

    /// Decodes row `n`.
    ///
    /// # Panics
    ///
    /// If there is no such row, or `out` is not as long as one.
    #[track_caller]
    pub fn row(&self, n: usize, out: &mut [f32]) {
        assert!(n < self.features, "n: row {n} of {}", self.features);
        assert_eq!(out.len(), self.width, "out");
        let layout = Layout::of(self.format);
        let records = self.groups(n / LANES, 1).chunks_exact(layout.record);
        for (record, out) in records.zip(out.chunks_mut(layout.values())) {
            for (i, out) in out.chunks_exact_mut(layout.block).enumerate() {
                take_lane(layout, record, i, n % LANES).decode(layout.scheme, out);
            }
        }
    }

    /// Nanoseconds that a product with so many rows of one term takes one core, about.
    pub(crate) fn ns(&self, rows: usize) -> usize {
        ns([self.features, self.width], rows)
    }

    /// The rows that thread `i` of `threads` packs, and multiplies first: the same in every product.
    pub(crate) fn share(&self, threads: usize, i: usize) -> Range<usize> {
        share([self.features, self.width], threads, i)
    }

    /// Cuts a share in at most `count` pieces of about equal length: where each ends.
    pub(crate) fn cut(share: Range<usize>, count: usize) -> impl Iterator<Item = usize> {
        let groups = share.len().div_ceil(LANES);
        let piece = groups.div_ceil(count).next_multiple_of(STREAMS) * LANES;
        (0..share.len().div_ceil(piece.max(1)))
            .map(move |i| share.end.min(share.start + (i + 1) * piece))
    }

    /// The records of `count` groups of sixteen rows, from group `first`.
    pub(super) fn groups(&self, first: usize, count: usize) -> &[u8] {
        let layout = Layout::of(self.format);
        let group = layout.along(self.width) * layout.record;
        &self.bytes()[first * group..][..count * group]
    }
}

impl std::fmt::Debug for Packed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Packed({}, [{}, {}])", self.format.name(), self.features, self.width)
    }
}

/// Nanoseconds that a product of `[features, width]` weights with so many rows takes one core, about.
fn ns([features, width]: [usize; 2], rows: usize) -> usize {
    (features.div_ceil(LANES) * width.div_ceil(CELL)).saturating_mul(20 + 5 * rows)
}

/// The rows of `[features, width]` weights that are the share of thread `i`: whole groups of sixteen. Small matrices
/// have fewer shares than there are threads.
fn share(shape: [usize; 2], threads: usize, i: usize) -> Range<usize> {
    let features = shape[0];
    let groups = features.div_ceil(LANES);
    let parts = (ns(shape, 1) / SHARE).clamp(1, threads.min(groups.max(1)));
    if i >= parts {
        return features..features;
    }
    let unit = if groups >= 2 * STREAMS * parts { STREAMS } else { 1 };
    let of = parallel::share(groups.div_ceil(unit), parts, i);
    features.min(of.start * unit * LANES)..features.min(of.end * unit * LANES)
}

/// Packs up to sixteen rows of `row` bytes; the lanes of those that are not there stay zero, and so does the second
/// block of the last record where there is none.
fn pack_group<P: Packing>(rows: &[u8], row: usize, group: &mut [u8]) {
    for (lane, row) in rows.chunks_exact(row).enumerate() {
        for (i, block) in row.chunks_exact(P::BYTES).enumerate() {
            let (record, i) = (i / P::LAYOUT.blocks, i % P::LAYOUT.blocks);
            let record = &mut group[record * P::LAYOUT.record..][..P::LAYOUT.record];
            put_lane(P::LAYOUT, &P::parts(block), record, i, lane);
        }
    }
}

/// Writes block `i` of a lane into a record of zeros.
#[inline(always)]
fn put_lane(layout: Layout, parts: &Parts, record: &mut [u8], i: usize, lane: usize) {
    let (head, cells) = record.split_at_mut(layout.cells);
    let at = 2 * (i * LANES + lane);
    head[at..][..2].copy_from_slice(&parts.d.to_le_bytes());
    if layout.scheme.has_min {
        head[layout.m + at..][..2].copy_from_slice(&parts.m.to_le_bytes());
    }
    for g in 0..layout.block / layout.scheme.group {
        if let Some(scales) = layout.scales {
            head[scales + LANES * g + lane] = parts.scales[g].cast_unsigned();
        }
        if let Some(mins) = layout.mins {
            let high = if layout.mins == layout.scales { 4 } else { 0 };
            head[mins + LANES * g + lane] |= parts.mins[g] << high;
        }
    }
    let codes = parts.codes[..layout.block].as_chunks::<CELL>().0;
    let cells = &mut cells[i * codes.len() * layout.cell..];
    for (cell, codes) in cells.chunks_exact_mut(layout.cell).zip(codes) {
        match layout.low {
            2 => put_plane::<2>(codes, 0, cell, |i| layout.low_at(i), lane),
            4 => put_plane::<4>(codes, 0, cell, |i| layout.low_at(i), lane),
            _ => put_plane::<8>(codes, 0, cell, |i| layout.low_at(i), lane),
        }
        match layout.high {
            0 => (),
            1 => put_plane::<1>(codes, layout.low, cell, Layout::high_at, lane),
            _ => put_plane::<2>(codes, layout.low, cell, Layout::high_at, lane),
        }
    }
}

/// Writes bits `from..from + BITS` of the codes of a cell, four codes at a time, to vectors that lie at `at`.
#[inline(always)]
fn put_plane<const BITS: usize>(
    codes: &[u8; CELL],
    from: usize,
    cell: &mut [u8],
    at: impl Fn(usize) -> usize,
    lane: usize,
) {
    let mask = u32::from_le_bytes([((1u32 << BITS) - 1) as u8; 4]);
    let steps = codes.as_chunks::<4>().0;
    for vector in 0..BITS {
        let mut four = 0;
        for field in 0..8 / BITS {
            let step = u32::from_le_bytes(steps[vector + BITS * field]);
            four |= (step >> from & mask) << (BITS * field);
        }
        cell[at(vector) + lane * 4..][..4].copy_from_slice(&four.to_le_bytes());
    }
}

/// Reads block `i` of a lane of a record back.
fn take_lane(layout: Layout, record: &[u8], i: usize, lane: usize) -> Parts {
    let of_block = 2 * (i * LANES + lane);
    let half = |at: usize| u16::from_le_bytes([record[at + of_block], record[at + of_block + 1]]);
    let (m, min) = if layout.scheme.has_min { (half(layout.m), 1) } else { (0, 0) };
    let mut parts = Parts::simple(half(0), m, min);
    for g in 0..layout.block / layout.scheme.group {
        let both = layout.mins == layout.scales;
        if let Some(scales) = layout.scales {
            let scale = record[scales + LANES * g + lane];
            let scale = if layout.mins == Some(scales) { scale & 15 } else { scale };
            parts.scales[g] = scale.cast_signed();
        }
        if let Some(mins) = layout.mins {
            let min = record[mins + LANES * g + lane];
            parts.mins[g] = if both { min >> 4 } else { min };
        }
    }
    let codes = parts.codes[..layout.block].chunks_exact_mut(CELL);
    let cells = &record[layout.cells + i * codes.len() * layout.cell..];
    for (cell, codes) in cells.chunks_exact(layout.cell).zip(codes) {
        take_plane(cell, |i| layout.low_at(i), layout.low, 0, lane, codes);
        take_plane(cell, Layout::high_at, layout.high, layout.low, lane, codes);
    }
    parts
}

/// Adds a plane of `bits` bits of a lane, whose vectors lie at `at`, to its codes, as bits `to..`.
fn take_plane(
    cell: &[u8],
    at: impl Fn(usize) -> usize,
    bits: usize,
    to: usize,
    lane: usize,
    codes: &mut [u8],
) {
    if bits == 0 {
        return;
    }
    let mask = ((1u16 << bits) - 1) as u8;
    for (k, code) in codes.iter_mut().enumerate() {
        let (step, byte) = (k / 4, k % 4);
        let (vector, field) = (step % bits, step / bits);
        let stored = cell[at(vector) + lane * 4 + byte] >> (bits * field);
        *code |= (stored & mask) << to;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::quant::decode;
    use crate::testing::Rng;

    /// The formats that can be multiplied.
    pub(crate) fn formats() -> impl Iterator<Item = Format> {
        Format::ALL.into_iter().filter(|format| format.can_multiply())
    }

    /// Blocks of random codes and group scales, and scales of blocks between 2^-9 and 2^-6 of either sign.
    pub(crate) fn random_blocks(rng: &mut Rng, format: Format, values: usize) -> Vec<u8> {
        let mut blocks: Vec<u8> =
            (0..format.bytes_of(values).unwrap()).map(|_| rng.next() as u8).collect();
        let halves: &[usize] = match format {
            Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[0, 2],
            Format::Q2K => &[80, 82],
            Format::Q3K => &[108],
            Format::Q6K => &[208],
            _ => &[0],
        };
        for block in blocks.chunks_exact_mut(format.block_bytes()) {
            for &at in halves {
                let scale = (2.0f32).powf(rng.float() * 1.5 - 7.5) * rng.float().signum();
                block[at..at + 2].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
            }
        }
        blocks
    }

    #[test]
    fn rows_decode_to_the_bits_that_their_blocks_decode_to() {
        let mut rng = Rng::new(30);
        for format in formats() {
            for (features, blocks) in [(1, 1), (7, 2), (16, 1), (17, 3), (37, 2)] {
                let width = blocks * format.block_len();
                // All bits random: scales of any size, infinities and NaN too.
                let mut bytes = random_blocks(&mut rng, format, features * width);
                bytes.fill_with(|| rng.next() as u8);
                let mut want = vec![0.0; features * width];
                decode(format, &bytes, &mut want);
                let packed = Packed::new(format, &bytes, width);
                assert_eq!((packed.features(), packed.width()), (features, width));
                let mut row = vec![0.0f32; width];
                for n in 0..features {
                    packed.row(n, &mut row);
                    for (got, want) in row.iter().zip(&want[n * width..]) {
                        assert!(
                            got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                            "{} row {n}: {got} is not {want}",
                            format.name()
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn bytes_that_were_packed_before_are_the_same_matrix() {
        let mut rng = Rng::new(31);
        for format in formats() {
            let width = 2 * format.block_len();
            let blocks = random_blocks(&mut rng, format, 11 * width);
            let packed = Packed::new(format, &blocks, width);
            assert_eq!(Packed::size(format, [11, width]), Some(packed.size_in_bytes()));
            let kept = [&[7; 3], packed.bytes()].concat();
            let range = 3..kept.len();
            let again = Packed::of_bytes(format, [11, width], Arc::new(kept), range);
            let [mut row, mut want] = [(); 2].map(|()| vec![0.0f32; width]);
            for n in 0..11 {
                again.row(n, &mut row);
                packed.row(n, &mut want);
                assert_eq!(row, want, "{} row {n}", format.name());
            }
        }
        assert_eq!(Packed::size(Format::Q8_0, [8, 33]), None);
        assert_eq!(Packed::size(Format::Q8_0, [usize::MAX, 64]), None);
        assert_eq!(Packed::size(Format::Q8K, [8, 256]), None);
    }

    #[test]
    #[should_panic(expected = "range: not the size of [8, 32]")]
    fn bytes_of_another_size_panic() {
        let _ = Packed::of_bytes(Format::Q8_0, [8, 32], Arc::new(vec![0; 300]), 0..300);
    }

    #[test]
    fn packing_adds_at_most_six_percent() {
        for format in formats() {
            let blocks = vec![0; format.bytes_of(16 * 512).unwrap()];
            let packed = Packed::new(format, &blocks, 512);
            let ratio = packed.size_in_bytes() as f64 / blocks.len() as f64;
            assert!((1.0..1.06).contains(&ratio), "{}: {ratio}", format.name());
        }
    }

    #[test]
    #[should_panic(expected = "width: 48 is not whole blocks of q8_0")]
    fn a_width_of_part_of_a_block_panics() {
        let _ = Packed::new(Format::Q8_0, &[0; 102], 48);
    }
}
