//! The generator of random numbers.

/// Steele, Lea and Flood: <https://doi.org/10.1145/2714064.2660195>.
#[derive(Clone, Debug)]
pub(crate) struct SplitMix64(pub(crate) u64);

impl SplitMix64 {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    /// Goes on by `count` numbers.
    pub(crate) fn skip(&mut self, count: u64) {
        self.0 = self.0.wrapping_add(Self::STEP.wrapping_mul(count));
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.skip(1);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In [0, 1), a multiple of 2^-53.
    pub(crate) fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}
