//! Floats that start on a cache line.

/// Floats of a cache line.
pub(crate) const LINE: usize = 16;

/// The first float on a cache line.
pub(crate) fn start(data: &[f32]) -> usize {
    data.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE)
}

/// Floats that start on a cache line, so that no vector straddles two.
#[derive(Default)]
pub(crate) struct Aligned(Vec<f32>);

impl Aligned {
    /// The first `len` floats, which there must have been.
    pub(crate) fn get(&self, len: usize) -> &[f32] {
        &self.0[start(&self.0)..][..len]
    }

    /// The first `len` floats, which may be anything.
    pub(crate) fn get_mut(&mut self, len: usize) -> &mut [f32] {
        if self.0.len() < len + LINE {
            self.0.resize(len + LINE, 0.0);
        }
        let start = start(&self.0);
        &mut self.0[start..][..len]
    }
}
