//! The random numbers of training: the same for the same seed, everywhere.

/// SplitMix64 (Steele, Lea and Flood 2014): a state of 64 bits that is saved and restored as a number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Random(u64);

impl Random {
    /// Numbers that belong to `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// What [`new`](Self::new) takes to go on from here.
    #[must_use]
    pub fn state(&self) -> u64 {
        self.0
    }

    /// All 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in 0..1.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `low..high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.uniform()
    }

    /// Normal with mean 0 and deviation 1 (Box and Muller 1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_goes_on_where_it_was() {
        let mut random = Random::new(7);
        random.bits();
        let mut again = Random::new(random.state());
        assert_eq!(random.bits(), again.bits());
        // The published numbers of seed 1234567.
        let mut random = Random::new(1_234_567);
        assert_eq!(random.bits(), 6_457_827_717_110_365_317);
        assert_eq!(random.bits(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let mut random = Random::new(1);
        let count = 100_000;
        let (mut sum, mut squares, mut mean) = (0.0, 0.0, 0.0);
        for _ in 0..count {
            let x = random.normal();
            sum += x;
            squares += x * x;
            mean += random.between(-1.0, 3.0);
        }
        let count = f64::from(count);
        assert!((sum / count).abs() < 0.02 && (squares / count - 1.0).abs() < 0.02);
        assert!((mean / count - 1.0).abs() < 0.02);
    }
}
