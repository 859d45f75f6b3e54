//! Matrices whose rows need not be adjacent, and the cutting of an output into column blocks.

/// A read-only `[rows, width]` matrix; row `i` starts at `i * stride`.
///
/// A band of columns of a wider matrix is a `Rows` too, so projections are split without a copy.
///
/// ```
/// use boostr_kernels::Rows;
/// let wide = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]; // [2, 3]
/// let band = Rows::new(&wide, 2, 3, 1, 2); // columns 1 and 2
/// assert_eq!(band.row(1), [5.0, 6.0]);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    data: &'a [f32],
    count: usize,
    stride: usize,
    offset: usize,
    width: usize,
}

impl<'a> Rows<'a> {
    /// Columns `offset..offset + width` of the `[rows, stride]` matrix `data`.
    ///
    /// # Panics
    ///
    /// If `data` is shorter than that, or the band is wider than `stride`.
    #[track_caller]
    #[must_use]
    pub fn new(data: &'a [f32], rows: usize, stride: usize, offset: usize, width: usize) -> Self {
        assert!(offset + width <= stride, "width: band ends past the stride {stride}");
        assert!(
            rows == 0 || data.len() >= (rows - 1) * stride + offset + width,
            "data: {} elements for {rows} rows of stride {stride}",
            data.len()
        );
        Self { data, count: rows, stride, offset, width }
    }

    /// All of a `[rows, width]` matrix.
    #[track_caller]
    #[must_use]
    pub fn dense(data: &'a [f32], width: usize) -> Self {
        let rows = data.len().checked_div(width).unwrap_or(0);
        assert_eq!(data.len(), rows * width, "data: not whole rows of {width}");
        Self::new(data, rows, width, 0, width)
    }

    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Length of a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Row `i`, of `width` elements.
    #[inline]
    #[must_use]
    pub fn row(&self, i: usize) -> &'a [f32] {
        debug_assert!(i < self.count);
        &self.data[i * self.stride + self.offset..][..self.width]
    }

    /// Rows `first..first + count`.
    #[must_use]
    pub fn slice(&self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.count, "slice: past the last row");
        let data = if count == 0 { &[] } else { &self.data[first * self.stride..] };
        Self { data, count, ..*self }
    }

    /// Columns `offset..offset + width` of these rows.
    #[must_use]
    pub fn columns(&self, offset: usize, width: usize) -> Self {
        assert!(offset + width <= self.width, "columns: past the last column");
        Self { offset: self.offset + offset, width, ..*self }
    }
}

/// Cuts a `[rows, width]` matrix into bands of `block` columns: for each band, its piece of each row.
pub(crate) fn column_blocks(out: &mut [f32], width: usize, block: usize) -> Vec<Vec<&mut [f32]>> {
    columns_to(out, width, &(1..=width.div_ceil(block)).map(|i| width.min(i * block)))
}

/// Cuts a `[rows, width]` matrix into bands of columns, each up to one of `ends`: for each band, its piece of each
/// row.
pub(crate) fn columns_to<'a>(
    out: &'a mut [f32],
    width: usize,
    ends: &(impl Iterator<Item = usize> + Clone),
) -> Vec<Vec<&'a mut [f32]>> {
    let rows = out.len() / width;
    let mut bands: Vec<Vec<&'a mut [f32]>> =
        ends.clone().map(|_| Vec::with_capacity(rows)).collect();
    for mut row in out.chunks_exact_mut(width) {
        let mut first = 0;
        for (end, band) in ends.clone().zip(&mut bands) {
            let (piece, rest) = row.split_at_mut(end - first);
            band.push(piece);
            (first, row) = (end, rest);
        }
    }
    bands
}
