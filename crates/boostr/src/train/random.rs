//! The random numbers of training: the same for the same seed, everywhere.

use crate::sample::SplitMix64;

/// The generator of [`sample`](crate::sample), with the distributions that first parameters have.
#[derive(Debug, Clone)]
pub struct Random(SplitMix64);

impl Random {
    /// Numbers that belong to `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64(seed))
    }

    /// Uniform in `low..high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.0.uniform()
    }

    /// Normal with mean 0 and deviation 1 (Box and Muller 1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.0.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.0.uniform()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
