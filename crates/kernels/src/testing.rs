//! What tests of several kernels share: a small generator and a comparison.

/// A seeded generator (splitmix64): the same numbers on every machine.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

/// Asserts `|got - want| <= tolerance * (1 + max |want|)` for every element.
#[track_caller]
pub(crate) fn close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "lengths");
    let bound = tolerance * (1.0 + want.iter().fold(0.0f64, |m, w| m.max(w.abs())));
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= bound, "element {i}: {got} is not {want} within {bound:e}");
    }
}
