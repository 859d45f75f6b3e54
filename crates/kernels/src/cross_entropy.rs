//! The cross-entropy of a language model's head, and its gradients, without the logits of all tokens.
//!
//! ```text
//! z[t, v]   = scale h[t]·weight[v]
//! loss[t]   = ln(sum over v of exp z[t, v]) - z[t, target[t]]
//! dz[t, v]  = weights[t] (exp(z[t, v]) / sum - [v = target[t]])       of sum over t of weights[t] loss[t]
//! dh        = scale dz weight          dweight += scale dzᵀ h
//! ```
//!
//! What differs from the formulas, and why:
//!
//! 1. Tokens whose target is [`IGNORE`] are left out before anything is computed.
//! 2. The others go block by block: the logits of a block are made, used and overwritten. A block has 192 to
//!    384 tokens, enough for products to be as fast as those of all tokens at once; where that leaves room it
//!    has at most 2^23 logits, 32 MiB.
//! 3. The products are those of a linear layer and of its gradients. Nothing is computed twice.
//! 4. Exponentials are of `z - max z`, so none overflows; they become dz in place.
//!
//! A row's loss and dh have the same bits in any company. Sums over tokens in dweight are made in the
//! blocks' order. Nothing depends on the number of threads.

use rayon::prelude::*;

use crate::linear::{Weights, linear};
use crate::linear_backward::{linear_backward_input, linear_backward_weight};
use crate::math::exp_lanes;
use crate::rows::Rows;
use crate::simd::{Level, Simd, dispatch};

/// A target that counts for nothing: its token has no loss and no gradient.
pub const IGNORE: u32 = u32::MAX;

/// Most logits of a block that has more than the fewest tokens.
const BLOCK_LOGITS: usize = 1 << 23;
/// Most and fewest tokens of a block, but of the last.
const MOST_ROWS: usize = 384;
const FEWEST_ROWS: usize = 192;
/// Blocks are multiples of this, but for the last: whole cache lines where tokens lie side by side.
const ROW_STEP: usize = 16;
/// Exponentials that are summed in f32, before sums are added in f64.
const SUMMED: usize = 1024;

/// The last layer of a language model.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// The instruction set.
    pub level: Level,
    /// `[V, D]`
    pub weight: &'a [f32],
    /// Factor of the logits.
    pub scale: f32,
}

/// Writes the cross-entropy of each token: minus the logarithm of its target's probability, 0 where that
/// is [`IGNORE`].
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `h` | `[T, D]` | what the head gets |
/// | `targets` | `[T]` | ids below V, or [`IGNORE`] |
/// | `losses` | `[T]` | overwritten |
///
/// ```
/// use boostr_kernels::{Level, Rows};
/// use boostr_kernels::cross_entropy::{Head, IGNORE, cross_entropy};
/// let head = Head { level: Level::detect(), weight: &[0.0, 1.0], scale: 1.0 }; // two words, one channel
/// let (h, mut losses) = ([0.0, 100.0, 5.0], [0.0; 3]);
/// cross_entropy(Rows::dense(&h, 1), &head, &[0, 0, IGNORE], &mut losses);
/// assert_eq!(losses, [2.0f32.ln(), 100.0, 0.0]);
/// ```
///
/// # Panics
///
/// If the lengths disagree or a target is not below V.
#[track_caller]
pub fn cross_entropy(h: Rows<'_>, head: &Head<'_>, targets: &[u32], losses: &mut [f32]) {
    let mut block = Block::new(h, head, targets, losses);
    let tokens = counted(targets);
    for tokens in tokens.chunks(block_rows(tokens.len(), block.words)) {
        block.load(tokens);
        block.losses(None, losses);
    }
}

/// [`cross_entropy`], and the gradients of `sum over t of weights[t] loss[t]`.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `h`, `targets`, `losses` | | as there |
/// | `weights` | `[T]` | gradient of each loss: 1 / T for the gradient of the mean |
/// | `dh` | `[T, D]` | overwritten |
/// | `dweight` | `[V, D]` | added to |
///
/// # Panics
///
/// If the lengths disagree or a target is not below V.
#[track_caller]
pub fn cross_entropy_backward(
    h: Rows<'_>,
    head: &Head<'_>,
    targets: &[u32],
    weights: &[f32],
    losses: &mut [f32],
    dh: &mut [f32],
    dweight: &mut [f32],
) {
    assert_eq!(weights.len(), h.len(), "weights");
    assert_eq!(dh.len(), h.len() * h.width(), "dh");
    assert_eq!(dweight.len(), head.weight.len(), "dweight");
    let mut block = Block::new(h, head, targets, losses);
    dh.fill(0.0);
    let tokens = counted(targets);
    for tokens in tokens.chunks(block_rows(tokens.len(), block.words)) {
        block.load(tokens);
        block.losses(Some(weights), losses);
        block.gradients(dh, dweight);
    }
}

/// The tokens that count.
fn counted(targets: &[u32]) -> Vec<usize> {
    targets.iter().enumerate().filter(|(_, target)| **target != IGNORE).map(|(t, _)| t).collect()
}

/// The length of blocks, but for the last, of so many tokens: about equal ones.
fn block_rows(tokens: usize, words: usize) -> usize {
    let most = (BLOCK_LOGITS / words.max(1)).clamp(FEWEST_ROWS, MOST_ROWS) / ROW_STEP * ROW_STEP;
    let blocks = tokens.div_ceil(most).max(1);
    tokens.div_ceil(blocks).next_multiple_of(ROW_STEP).max(ROW_STEP)
}

/// Tokens that go through the head together.
struct Block<'a> {
    all: Rows<'a>,
    head: Head<'a>,
    targets: &'a [u32],
    /// V
    words: usize,
    /// Which tokens: R of them
    tokens: Vec<usize>,
    /// Their `[R, D]`
    h: Vec<f32>,
    /// `[R, V]`: h·weight, and then scale dz
    logits: Vec<f32>,
    /// Their `[R, D]`
    dh: Vec<f32>,
}

impl<'a> Block<'a> {
    /// An empty block; fills `losses` with zeros.
    #[track_caller]
    fn new(h: Rows<'a>, head: &Head<'a>, targets: &'a [u32], losses: &mut [f32]) -> Self {
        assert!(h.width() > 0, "h: no channels");
        let words = head.weight.len() / h.width();
        assert_eq!(head.weight.len(), words * h.width(), "weight: not whole rows of {}", h.width());
        assert_eq!(targets.len(), h.len(), "targets");
        if let Some(target) = targets.iter().find(|t| **t != IGNORE && **t as usize >= words) {
            panic!("targets: {target} of {words} words");
        }
        assert_eq!(losses.len(), h.len(), "losses");
        losses.fill(0.0);
        let (tokens, block_h, logits, dh) = Default::default();
        Self { all: h, head: *head, targets, words, tokens, h: block_h, logits, dh }
    }

    /// Makes it that of `tokens`, with their products.
    fn load(&mut self, tokens: &[usize]) {
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        self.h.clear();
        for &t in tokens {
            self.h.extend_from_slice(self.all.row(t));
        }
        self.logits.resize(tokens.len() * self.words, 0.0);
        self.logits.par_chunks_mut(self.words).for_each(|row| row.fill(0.0));
        let h = Rows::dense(&self.h, self.all.width());
        linear(self.head.level, h, Weights::F32(self.head.weight), &mut self.logits);
    }

    /// Writes the losses; with weights also turns logits into `scale dz`.
    fn losses(&mut self, weights: Option<&[f32]>, losses: &mut [f32]) {
        let (level, scale, targets) = (self.head.level, self.head.scale, self.targets);
        let rows = self.logits.par_chunks_mut(self.words).zip(&self.tokens);
        let block: Vec<f32> = rows
            .map(|(z, &t)| {
                let target = targets[t] as usize;
                let of_target = scale * z[target];
                let (max, sum) = weigh(level, scale, z);
                if let Some(weights) = weights {
                    let factor = scale * weights[t];
                    times(level, (f64::from(factor) / sum) as f32, z);
                    z[target] -= factor;
                }
                (f64::from(max) - f64::from(of_target) + sum.ln()) as f32
            })
            .collect();
        for (t, loss) in self.tokens.iter().zip(block) {
            losses[*t] = loss;
        }
    }

    /// Writes dh of the block's tokens and adds what they give to dweight.
    fn gradients(&mut self, dh: &mut [f32], dweight: &mut [f32]) {
        let d = self.all.width();
        let dz = Rows::dense(&self.logits, self.words);
        self.dh.resize(self.h.len(), 0.0);
        linear_backward_input(self.head.level, dz, Weights::F32(self.head.weight), &mut self.dh);
        linear_backward_weight(self.head.level, dz, Rows::dense(&self.h, d), dweight);
        for (t, row) in self.tokens.iter().zip(self.dh.chunks_exact(d)) {
            dh[t * d..][..d].copy_from_slice(row);
        }
    }
}

dispatch! { fn weigh = weigh_body(scale: f32, z: &mut [f32]) -> (f32, f64) }

/// Turns z into `exp(scale z - max)`; returns the largest `scale z`, and the sum.
#[inline(always)]
fn weigh_body<S: Simd>(simd: S, scale: f32, z: &mut [f32]) -> (f32, f64) {
    let factor = simd.splat(scale);
    let (chunks, rest) = S::chunks(z);
    let mut largest = simd.splat(f32::NEG_INFINITY);
    for chunk in chunks {
        largest = simd.max(largest, simd.mul(factor, simd.load(chunk)));
    }
    let mut lanes = [f32::NEG_INFINITY; 16];
    simd.store(largest, &mut S::chunks_mut(&mut lanes).0[0]);
    let mut max = f32::NEG_INFINITY;
    for lane in lanes {
        max = max.max(lane);
    }
    for z in rest {
        max = max.max(scale * z);
    }
    let mut sum = 0.0f64;
    for z in z.chunks_mut(SUMMED) {
        let (chunks, rest) = S::chunks_mut(z);
        let mut added = simd.splat(0.0);
        for chunk in chunks {
            let z = simd.mul(factor, simd.load(chunk));
            let exp = exp_lanes(simd, simd.sub(z, simd.splat(max)));
            added = simd.add(added, exp);
            simd.store(exp, chunk);
        }
        sum += f64::from(simd.reduce(added));
        let mut tail = S::tail(rest);
        let z = simd.mul(factor, simd.load(&tail));
        simd.store(exp_lanes(simd, simd.sub(z, simd.splat(max))), &mut tail);
        S::write_tail(&tail, rest);
        for exp in rest {
            sum += f64::from(*exp);
        }
    }
    (max, sum)
}

dispatch! { fn times = times_body(factor: f32, x: &mut [f32]) }

#[inline(always)]
fn times_body<S: Simd>(_simd: S, factor: f32, x: &mut [f32]) {
    for x in x {
        *x *= factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradcheck::slopes;
    use crate::testing::{Rng, close};

    /// f32 against f64, of logits up to about ten and sums of some hundred terms.
    const TOLERANCE: f64 = 2e-6;

    /// Losses and both gradients by the formulas, in f64.
    fn reference(
        h: &[f32],
        head: &Head<'_>,
        d: usize,
        targets: &[u32],
        weights: &[f32],
    ) -> [Vec<f64>; 3] {
        let scale = f64::from(head.scale);
        let mut losses = vec![0.0; targets.len()];
        let mut dh = vec![0.0; h.len()];
        let mut dweight = vec![0.0; head.weight.len()];
        for (t, &target) in targets.iter().enumerate() {
            if target == IGNORE {
                continue;
            }
            let h = &h[t * d..][..d];
            let z: Vec<f64> = head
                .weight
                .chunks(d)
                .map(|w| {
                    let terms = w.iter().zip(h).map(|(w, h)| f64::from(*w) * f64::from(*h));
                    scale * terms.sum::<f64>()
                })
                .collect();
            let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = z.iter().map(|z| (z - max).exp()).sum();
            losses[t] = max + sum.ln() - z[target as usize];
            for (v, z) in z.iter().enumerate() {
                let p = (z - max).exp() / sum - f64::from(u8::from(v == target as usize));
                let dz = f64::from(weights[t]) * p;
                for c in 0..d {
                    dh[t * d + c] += scale * dz * f64::from(head.weight[v * d + c]);
                    dweight[v * d + c] += scale * dz * f64::from(h[c]);
                }
            }
        }
        [losses, dh, dweight]
    }

    #[test]
    fn the_formulas_are_the_slopes_of_the_definition() {
        let mut rng = Rng::new(90);
        let (d, words) = (3, 5);
        let (h, weight) = (rng.floats(4 * d), rng.floats(words * d));
        let (targets, weights) = ([4, 0, IGNORE, 2], [0.5, 1.0, 7.0, -2.0]);
        let loss = |h: &[f32], weight: &[f32]| -> f64 {
            let [losses, ..] = reference(
                h,
                &Head { level: Level::Baseline, weight, scale: 1.7 },
                d,
                &targets,
                &weights,
            );
            losses.iter().zip(weights).map(|(loss, w)| loss * f64::from(w)).sum()
        };
        let head = Head { level: Level::Baseline, weight: &weight, scale: 1.7 };
        let [_, dh, dweight] = reference(&h, &head, d, &targets, &weights);
        // The slopes are rounded to f32.
        close(&slopes(&h, |h| loss(h, &weight)), &dh, 1e-7);
        close(&slopes(&weight, |weight| loss(&h, weight)), &dweight, 1e-7);
    }

    /// Inputs of sizes that divide nothing.
    struct Problem {
        d: usize,
        h: Vec<f32>,
        weight: Vec<f32>,
        scale: f32,
        targets: Vec<u32>,
        weights: Vec<f32>,
    }

    impl Problem {
        fn new(tokens: usize, d: usize, words: usize, seed: u64) -> Self {
            let mut rng = Rng::new(seed);
            let target =
                |r: u64| if r.is_multiple_of(4) { IGNORE } else { (r % words as u64) as u32 };
            Self {
                d,
                h: rng.floats(tokens * d),
                weight: rng.floats(words * d),
                scale: 4.0 / (d as f32).sqrt(),
                targets: (0..tokens).map(|_| target(rng.next() >> 9)).collect(),
                weights: rng.floats(tokens),
            }
        }

        fn head(&self, level: Level) -> Head<'_> {
            Head { level, weight: &self.weight, scale: self.scale }
        }

        /// Losses, dh and what is added to `dweight`.
        fn gradients(&self, level: Level, dweight: &[f32]) -> [Vec<f32>; 3] {
            let tokens = self.targets.len();
            let mut losses = vec![f32::NAN; tokens];
            let mut dh = vec![f32::NAN; self.h.len()];
            let mut dweight = dweight.to_vec();
            cross_entropy_backward(
                Rows::new(&self.h, tokens, self.d, 0, self.d),
                &self.head(level),
                &self.targets,
                &self.weights,
                &mut losses,
                &mut dh,
                &mut dweight,
            );
            [losses, dh, dweight]
        }

        fn losses(&self, level: Level) -> Vec<f32> {
            let mut losses = vec![f32::NAN; self.targets.len()];
            let h = Rows::new(&self.h, self.targets.len(), self.d, 0, self.d);
            cross_entropy(h, &self.head(level), &self.targets, &mut losses);
            losses
        }
    }

    #[test]
    fn equals_the_definition_for_any_sizes_on_every_instruction_set() {
        for (i, (tokens, d, words)) in [
            (0, 3, 2),
            (1, 1, 1),
            (2, 17, 3),
            (5, 8, 50),
            (70, 33, 130),
            (13, 5, 1024),
            (30, 20, 1101),
            (MOST_ROWS + 60, 16, 40),
        ]
        .into_iter()
        .enumerate()
        {
            let problem = Problem::new(tokens, d, words, 91 + i as u64);
            let before = Rng::new(92).floats(words * d);
            let head = problem.head(Level::Baseline);
            let [losses, dh, mut dweight] =
                reference(&problem.h, &head, d, &problem.targets, &problem.weights);
            dweight.iter_mut().zip(&before).for_each(|(to, x)| *to += f64::from(*x));
            for &level in Level::present() {
                let got = problem.gradients(level, &before);
                close(&got[0], &losses, TOLERANCE);
                close(&got[1], &dh, TOLERANCE);
                close(&got[2], &dweight, TOLERANCE);
                assert_eq!(problem.losses(level), got[0]);
            }
        }
    }

    #[test]
    fn huge_logits_neither_overflow_nor_lose_the_loss() {
        let weight = [1e30, -1e30, 0.0];
        let head = Head { level: Level::detect(), weight: &weight, scale: 2.0 };
        let (h, targets) = ([1.0, 1.0, -1.0, 0.0], [0, 2, 0, 1]);
        let (mut losses, mut dh, mut dweight) = ([0.0; 4], [0.0; 4], [0.0; 3]);
        let h = Rows::dense(&h, 1);
        cross_entropy_backward(h, &head, &targets, &[1.0; 4], &mut losses, &mut dh, &mut dweight);
        assert_eq!(losses, [0.0, 2e30, 4e30, 3.0f32.ln()]);
        assert_eq!(dh[..3], [0.0, 2e30, -4e30]);
        // Of the second token 2 and -2, of the third 2 and -2 times its h of -1.
        assert_eq!(dweight, [4.0, -2.0, -2.0]);
    }

    #[test]
    fn ignored_tokens_change_nothing_to_the_bit() {
        let mut problem = Problem::new(30, 20, 100, 93);
        problem.targets[3] = IGNORE;
        let before = vec![0.0; problem.weight.len()];
        let [losses, dh, dweight] = problem.gradients(Level::detect(), &before);
        for (t, target) in problem.targets.iter().enumerate() {
            if *target == IGNORE {
                assert_eq!(losses[t], 0.0);
                assert!(dh[t * 20..][..20].iter().all(|x| *x == 0.0));
                problem.h[t * 20..][..20].fill(f32::NAN);
                problem.weights[t] = f32::NAN;
            }
        }
        assert_eq!(problem.gradients(Level::detect(), &before), [losses, dh, dweight]);
    }

    #[test]
    fn a_token_has_the_same_bits_in_any_company() {
        let problem = Problem::new(60, 24, 90, 94);
        let [losses, dh, _] = problem.gradients(Level::detect(), &vec![0.0; 90 * 24]);
        for (first, count) in [(0, 1), (7, 2), (20, 5), (59, 1)] {
            let part = Problem {
                h: problem.h[first * 24..][..count * 24].to_vec(),
                weight: problem.weight.clone(),
                targets: problem.targets[first..][..count].to_vec(),
                weights: problem.weights[first..][..count].to_vec(),
                ..problem
            };
            let [part_losses, part_dh, _] = part.gradients(Level::detect(), &vec![0.0; 90 * 24]);
            assert_eq!(part_losses, losses[first..][..count]);
            assert_eq!(part_dh, dh[first * 24..][..count * 24]);
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let problem = Problem::new(MOST_ROWS + 100, 20, 150, 95);
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| problem.gradients(Level::detect(), &problem.weight))
        };
        let one = with(1);
        assert_eq!(with(2), one);
        assert_eq!(with(3), one);
    }

    #[test]
    fn blocks_have_bounded_logits_and_no_token_is_left_over() {
        for words in [1, 1024, 32_000, 50_257, 262_144] {
            for tokens in [1, 15, 16, 385, 512, 4096, 100_000] {
                let rows = block_rows(tokens, words);
                assert!(rows <= MOST_ROWS && rows * words <= BLOCK_LOGITS.max(FEWEST_ROWS * words));
                // Of about equal length: no block is mostly empty while others are full.
                let blocks = tokens.div_ceil(rows);
                assert!(blocks * rows < tokens + ROW_STEP * blocks, "{tokens} in blocks of {rows}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "targets: 2 of 2 words")]
    fn a_target_beyond_the_vocabulary_panics() {
        let head = Head { level: Level::detect(), weight: &[0.0; 2], scale: 1.0 };
        cross_entropy(Rows::dense(&[1.0], 1), &head, &[2], &mut [0.0]);
    }

    #[test]
    #[should_panic(expected = "dweight")]
    fn a_gradient_of_the_wrong_length_panics() {
        let head = Head { level: Level::detect(), weight: &[0.0; 2], scale: 1.0 };
        let h = Rows::dense(&[1.0], 1);
        cross_entropy_backward(h, &head, &[0], &[1.0], &mut [0.0], &mut [0.0], &mut [0.0; 3]);
    }
}
