//! A checkpoint in numbers.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::Checkpoint;

/// What a checkpoint holds, in numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// Numbers in all tensors.
    pub parameters: usize,
    /// Bytes that they take in the files.
    pub bytes: usize,
    /// The type that most bytes have, in lower case; `empty` without tensors.
    pub dtype: String,
    /// Bytes of each type, in lower case, most first.
    pub by_dtype: Vec<(String, usize)>,
}

impl Checkpoint {
    /// What is in it.
    ///
    /// ```
    /// use boostr::checkpoint::Checkpoint;
    ///
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
    /// let summary = Checkpoint::open(path.as_ref(), false)?.summary();
    /// assert_eq!((summary.dtype.as_str(), summary.bytes), ("f32", summary.parameters * 4));
    /// # Ok::<(), boostr::error::Error>(())
    /// ```
    #[must_use]
    pub fn summary(&self) -> Summary {
        let mut sums: BTreeMap<&str, usize> = BTreeMap::new();
        let (mut parameters, mut bytes) = (0_usize, 0_usize);
        for (_, entry) in self.iter() {
            parameters = parameters.saturating_add(entry.shape.iter().product::<usize>());
            bytes = bytes.saturating_add(entry.data.len());
            let sum = sums.entry(entry.dtype.name()).or_default();
            *sum = sum.saturating_add(entry.data.len());
        }
        let mut by_dtype: Vec<(String, usize)> =
            sums.into_iter().map(|(name, sum)| (name.to_lowercase(), sum)).collect();
        by_dtype.sort_by_key(|&(_, sum)| Reverse(sum));
        let dtype = by_dtype.first().map_or_else(|| "empty".to_owned(), |(name, _)| name.clone());
        Summary { parameters, bytes, dtype, by_dtype }
    }
}
