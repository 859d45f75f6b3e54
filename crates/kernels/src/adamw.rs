//! One step of Adam with decoupled weight decay, and the sum of squares that clipping asks for.
//!
//! ```text
//! w -= lr * weight_decay * w
//! m += (1 - beta1) * (g - m)
//! v  = beta2 * v + (1 - beta2) * g²
//! w -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)
//! ```
//!
//! Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2, with the learning
//! rate in front of the decay as PyTorch has it. One pass over the four arrays: the step costs what
//! reading and writing them costs. Every element is computed by itself, in the same operations on every
//! instruction set.

use rayon::prelude::*;

use crate::simd::{Level, Simd, dispatch};

/// Elements per parallel task, and per partial sum of squares.
const BLOCK: usize = 1 << 14;
/// Sums of squares that run side by side.
const LANES: usize = 16;

/// What a step is made with. In f64, so that `1 - beta2` keeps its digits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// The instruction set; bits do not depend on it.
    pub level: Level,
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the mean of gradients, in 0..1.
    pub beta1: f64,
    /// Decay of the mean of squared gradients, in 0..1.
    pub beta2: f64,
    /// Added to the root of the mean of squares.
    pub eps: f64,
    /// Share of a weight that a step at learning rate 1 takes away.
    pub weight_decay: f64,
}

/// Moves weights one step against their gradient.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `step` | | number of the step, from 1 |
/// | `factor` | | of the gradient: for clipping, or the mean over accumulated batches |
/// | `w` | `[n]` | weights, updated |
/// | `g` | `[n]` | gradient |
/// | `m`, `v` | `[n]` | means of the gradient and of its square, updated; zeros before step 1 |
///
/// ```
/// use boostr_kernels::{AdamW, Level, adamw};
/// let level = Level::detect();
/// let config = AdamW { level, lr: 0.5, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
/// let (mut w, mut m, mut v) = ([1.0], [0.0], [0.0]);
/// adamw(&config, 1, 1.0, &mut w, &[-3.0], &mut m, &mut v);
/// assert!((w[0] - 1.5).abs() < 1e-6); // the first step is lr, whatever the gradient's size
/// ```
///
/// # Panics
///
/// If the lengths disagree or `step` is 0.
#[track_caller]
pub fn adamw(
    config: &AdamW,
    step: u64,
    factor: f32,
    w: &mut [f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
) {
    assert!(step > 0, "step: counted from 1");
    assert_eq!(g.len(), w.len(), "g");
    assert_eq!(m.len(), w.len(), "m");
    assert_eq!(v.len(), w.len(), "v");
    let AdamW { level, lr, beta1, beta2, eps, weight_decay } = *config;
    let factors = Factors {
        gradient: factor,
        keep: (1.0 - lr * weight_decay) as f32,
        rate1: (1.0 - beta1) as f32,
        beta2: beta2 as f32,
        rate2: (1.0 - beta2) as f32,
        size: (lr / (1.0 - beta1.powf(step as f64))) as f32,
        scale: (1.0 / (1.0 - beta2.powf(step as f64)).sqrt()) as f32,
        eps: eps as f32,
    };
    let weights = w.par_chunks_mut(BLOCK).zip(g.par_chunks(BLOCK));
    let means = m.par_chunks_mut(BLOCK).zip(v.par_chunks_mut(BLOCK));
    weights.zip(means).for_each(|((w, g), (m, v))| update(level, factors, w, g, m, v));
}

/// The numbers that all elements of a step share.
#[derive(Clone, Copy)]
struct Factors {
    gradient: f32,
    keep: f32,
    rate1: f32,
    beta2: f32,
    rate2: f32,
    size: f32,
    scale: f32,
    eps: f32,
}

dispatch! {
    fn update = update_body(factors: Factors, w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32])
}

#[inline(always)]
fn update_body<S: Simd>(
    _simd: S,
    factors: Factors,
    w: &mut [f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
) {
    for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
        let g = factors.gradient * g;
        *m += factors.rate1 * (g - *m);
        *v = factors.beta2 * *v + factors.rate2 * (g * g);
        let step = *m / (v.sqrt() * factors.scale + factors.eps);
        *w = factors.keep * *w - factors.size * step;
    }
}

/// The sum of the squares of all elements, in f64: its root is the norm of a gradient.
///
/// The order of the sum depends on the length alone, so its bits do not depend on `level`.
#[must_use]
pub fn sum_of_squares(level: Level, x: &[f32]) -> f64 {
    let sums: Vec<f64> = x.par_chunks(BLOCK).map(|x| block_of_squares(level, x)).collect();
    sums.iter().sum()
}

dispatch! { fn block_of_squares = block_of_squares_body(x: &[f32]) -> f64 }

#[inline(always)]
fn block_of_squares_body<S: Simd>(_simd: S, x: &[f32]) -> f64 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        for i in 0..LANES {
            sums[i] += f64::from(chunk[i]) * f64::from(chunk[i]);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += f64::from(*x) * f64::from(*x);
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradcheck::assert_threads_do_not_matter;
    use crate::testing::{Rng, close};

    const CONFIG: AdamW = AdamW {
        level: Level::Baseline,
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
    };

    /// One element's step by definition, in f64.
    fn reference(config: &AdamW, step: i32, (w, m, v): (f64, f64, f64), g: f64) -> (f64, f64, f64) {
        let w = w - config.lr * config.weight_decay * w;
        let m = config.beta1 * m + (1.0 - config.beta1) * g;
        let v = config.beta2 * v + (1.0 - config.beta2) * g * g;
        let mean = m / (1.0 - config.beta1.powi(step));
        let square = v / (1.0 - config.beta2.powi(step));
        (w - config.lr * mean / (square.sqrt() + config.eps), m, v)
    }

    #[test]
    fn many_steps_equal_the_definition_with_the_same_bits_on_every_instruction_set() {
        // More than a block, and no multiple of any number of lanes.
        let n = BLOCK + 37;
        let mut results = Vec::new();
        for &level in Level::present() {
            let mut rng = Rng::new(40);
            let mut w = rng.floats(n);
            let (mut m, mut v) = (vec![0.0; n], vec![0.0; n]);
            let mut want: Vec<_> = w.iter().map(|w| (f64::from(*w), 0.0, 0.0)).collect();
            for step in 1..=8 {
                let g = rng.floats(n);
                // Clipped to some other length at each step.
                let factor = 1.0 / step as f32;
                adamw(&AdamW { level, ..CONFIG }, step, factor, &mut w, &g, &mut m, &mut v);
                for (want, g) in want.iter_mut().zip(&g) {
                    let g = f64::from(*g) * f64::from(factor);
                    *want = reference(&CONFIG, step as i32, *want, g);
                }
            }
            let part = |f: fn(&(f64, f64, f64)) -> f64| want.iter().map(f).collect::<Vec<f64>>();
            close(&w, &part(|want| want.0), 1e-6);
            close(&m, &part(|want| want.1), 1e-7);
            close(&v, &part(|want| want.2), 1e-9);
            results.push((w, m, v));
        }
        for result in &results {
            assert!(*result == results[0]);
        }
    }

    #[test]
    fn steps_of_all_sizes_keep_their_relative_precision() {
        // Gradients from 1e-12 to 1e6: the step is about lr for each of them.
        let g: Vec<f32> = (-12..7).map(|e| 10f32.powi(e)).collect();
        let n = g.len();
        let config = AdamW { eps: 1e-20, weight_decay: 0.0, ..CONFIG };
        let (mut w, mut m, mut v) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
        for step in 1..=3 {
            adamw(&config, step, 1.0, &mut w, &g, &mut m, &mut v);
        }
        for (w, g) in w.iter().zip(&g) {
            assert!((f64::from(*w) / (-3.0 * config.lr) - 1.0).abs() < 1e-4, "{w} at {g}");
        }
    }

    #[test]
    fn without_a_gradient_only_the_decay_acts() {
        let (mut w, mut m, mut v) = ([2.0, -4.0], [0.0; 2], [0.0; 2]);
        adamw(&CONFIG, 1, 1.0, &mut w, &[0.0; 2], &mut m, &mut v);
        let keep = (1.0 - CONFIG.lr * CONFIG.weight_decay) as f32;
        assert_eq!(w, [2.0 * keep, -4.0 * keep]);
    }

    #[test]
    fn squares_are_summed_as_defined_on_every_instruction_set() {
        let mut rng = Rng::new(41);
        for n in [0, 1, 15, 16, 17, 100, BLOCK, 3 * BLOCK + 5] {
            let x = rng.floats(n);
            let want: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
            for &level in Level::present() {
                let got = sum_of_squares(level, &x);
                assert_eq!(got, sum_of_squares(Level::Baseline, &x));
                assert!((got - want).abs() <= 1e-12 * want, "{got} is not {want}");
            }
        }
        // What would overflow or vanish in f32.
        assert_eq!(sum_of_squares(Level::detect(), &[1e30, 0.0]), f64::from(1e30f32).powi(2));
        assert_eq!(sum_of_squares(Level::detect(), &[1e-30]), f64::from(1e-30f32).powi(2));
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let mut rng = Rng::new(42);
        let n = 5 * BLOCK + 3;
        let (w, g) = (rng.floats(n), rng.floats(n));
        assert_threads_do_not_matter(|| {
            let (mut w, mut m, mut v) = (w.clone(), vec![0.0; n], vec![0.0; n]);
            adamw(&CONFIG, 1, 0.5, &mut w, &g, &mut m, &mut v);
            (w, m, v, sum_of_squares(Level::detect(), &g))
        });
    }

    #[test]
    #[should_panic(expected = "step")]
    fn step_zero_panics() {
        adamw(&CONFIG, 0, 1.0, &mut [1.0], &[1.0], &mut [0.0], &mut [0.0]);
    }
}
