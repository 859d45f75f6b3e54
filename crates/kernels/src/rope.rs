//! Rotary position embedding: pairs of channels turn by angles in proportion to the token's position.
//!
//! ```text
//! angle[i] = position * frequency[i]                  frequency[i] = theta^(-2 i / d), then scaled
//! (x, y)   = a (x cos angle - y sin angle, x sin angle + y cos angle)
//! ```
//!
//! for the pairs i of the first d channels of a head; the others stay as they are. A pair is channels
//! `(i, i + d / 2)` or `(2 i, 2 i + 1)`: [`RopeStyle`]. The factor a is 1 but for YaRN.
//!
//! Paper: *RoFormer* (arXiv 2104.09864). Scalings, which stretch a model's context, are those of the `rope_scaling`
//! of transformers (`modeling_rope_utils.py`, 4.57) under their names there.
//!
//! Angles, sines and cosines are computed in f64 and rounded once, so far positions are as exact as near ones.

use std::f64::consts::PI;

use crate::parallel::for_rows;
use crate::rows::Rows;

/// Picoseconds of an element.
const COST: usize = 1000;

/// Which channels are a pair, of d that turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// `(i, i + d / 2)`: Hugging Face's layout, GGUF's "neox".
    Half,
    /// `(2 i, 2 i + 1)`: the papers' layout, GGUF's "norm".
    Interleaved,
}

/// How frequencies are changed for contexts longer than those a model was first trained on.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Divided by `factor`.
    Linear {
        /// How much longer the context is.
        factor: f64,
    },
    /// theta times `factor^(d / (d - 2))`: the lowest frequency is divided by `factor`, the highest stays.
    Ntk {
        /// How much longer the context is.
        factor: f64,
    },
    /// [`Ntk`](Self::Ntk) whose factor grows with the token's position p beyond `original_max`, to
    /// `factor * (p + 1) / original_max - (factor - 1)`.
    ///
    /// A token's factor is that of the context which ends with it, as if tokens came one by one, so it does
    /// not depend on the call in which the token comes.
    Dynamic {
        /// Growth of the factor.
        factor: f64,
        /// Positions that need no scaling.
        original_max: usize,
    },
    /// By wavelength, between none and linear.
    Yarn(Yarn),
    /// Wavelengths above `original_max / low_freq_factor` are stretched by `factor`, those below
    /// `original_max / high_freq_factor` stay, the others are in between, linear in their frequency.
    Llama3 {
        /// How much longer the context is.
        factor: f64,
        /// Turns in the original context below which a pair is slow.
        low_freq_factor: f64,
        /// Turns in the original context above which a pair is fast; more than `low_freq_factor`.
        high_freq_factor: f64,
        /// Context that the model was first trained on.
        original_max: usize,
    },
    /// Each divided by its own factor: the tensor `rope_freqs.weight` of GGUF.
    PerDim {
        /// `[d / 2]`
        factors: Vec<f32>,
    },
    /// Another scaling with more beside it, as GGUF may have.
    Composed {
        /// The other.
        scaling: Box<RopeScaling>,
        /// Each frequency is then divided by its own factor, `[d / 2]`; none when empty.
        factors: Vec<f32>,
        /// Queries and keys are multiplied by this, too.
        attention_factor: f64,
    },
}

/// YaRN (arXiv 2309.00071): pairs that turn often in the original context stay, those that turn
/// seldom are stretched, and queries and keys grow a little.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// How much longer the context is.
    pub factor: f64,
    /// Context that the model was first trained on.
    pub original_max: usize,
    /// Turns in the original context above which a pair stays.
    pub beta_fast: f64,
    /// Turns in the original context below which a pair is stretched in full.
    pub beta_slow: f64,
    /// The factor of queries and keys, if it is given.
    pub attention_factor: Option<f64>,
    /// Else, with both of these, it is the quotient of `0.1 m ln factor + 1` for these m; else that of m = 1.
    pub mscale: Option<f64>,
    /// See `mscale`.
    pub mscale_all_dim: Option<f64>,
    /// Whether the pairs where the ramp starts and ends are rounded outwards to whole ones.
    pub truncate: bool,
}

impl Yarn {
    /// The paper's choice of all but the two numbers that each model has of its own.
    #[must_use]
    pub fn new(factor: f64, original_max: usize) -> Self {
        Self {
            factor,
            original_max,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        }
    }

    /// `0.1 m ln factor + 1`, and 1 for a factor that does not stretch: with an m of 1 what the paper multiplies
    /// queries and keys by.
    #[must_use]
    pub fn growth(&self, m: f64) -> f64 {
        if self.factor > 1.0 { 0.1 * m * self.factor.ln() + 1.0 } else { 1.0 }
    }

    /// What queries and keys are multiplied by.
    #[must_use]
    pub fn final_factor(&self) -> f64 {
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(factor), ..) => factor,
            // A zero counts as absent.
            (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => {
                self.growth(m) / self.growth(all)
            }
            _ => self.growth(1.0),
        }
    }

    /// Scales the frequencies of `d` channels with base `theta`.
    fn scale(&self, d: usize, theta: f64, frequencies: &mut [f64]) {
        let d = d as f64;
        // The pair, not whole, that turns so often in the original context.
        let pair = |turns: f64| {
            d * (self.original_max as f64 / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(d - 1.0));
        if low == high {
            high += 0.001;
        }
        for (i, frequency) in frequencies.iter_mut().enumerate() {
            let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            *frequency *= stretched / self.factor + (1.0 - stretched);
        }
    }
}

/// The turning of each pair, made once for a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    frequencies: Vec<f64>,
    style: RopeStyle,
    attention_factor: f64,
    dynamic: Option<Dynamic>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Dynamic {
    factor: f64,
    original_max: usize,
}

impl Rope {
    /// For the first `rotary_dim` channels of each head.
    ///
    /// ```
    /// use boostr_kernels::{Rope, RopeScaling, RopeStyle};
    /// let rope = Rope::new(4, 10_000.0, &RopeScaling::Linear { factor: 2.0 }, RopeStyle::Half);
    /// assert_eq!(rope.frequencies(), [0.5, 0.005]);
    /// ```
    ///
    /// # Panics
    ///
    /// If `rotary_dim` is odd, or there are not `rotary_dim / 2` factors.
    #[track_caller]
    #[must_use]
    pub fn new(rotary_dim: usize, theta: f64, scaling: &RopeScaling, style: RopeStyle) -> Self {
        assert!(rotary_dim.is_multiple_of(2), "rotary_dim: {rotary_dim} is odd");
        let d = rotary_dim as f64;
        let of_base = |theta: f64| -> Vec<f64> {
            (0..rotary_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / d)).collect()
        };
        let mut frequencies = of_base(theta);
        let (mut attention_factor, mut dynamic) = (1.0, None);
        match scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                for frequency in &mut frequencies {
                    *frequency /= factor;
                }
            }
            RopeScaling::Ntk { factor } => frequencies = of_base(theta * ntk(*factor, rotary_dim)),
            RopeScaling::Dynamic { factor, original_max } => {
                dynamic = Some(Dynamic { factor: *factor, original_max: *original_max });
            }
            RopeScaling::Yarn(yarn) => {
                yarn.scale(rotary_dim, theta, &mut frequencies);
                attention_factor = yarn.final_factor();
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max } => {
                for frequency in &mut frequencies {
                    let turns = *original_max as f64 * *frequency / (2.0 * PI);
                    let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let kept = kept.clamp(0.0, 1.0);
                    *frequency *= kept + (1.0 - kept) / factor;
                }
            }
            RopeScaling::PerDim { factors } => divide(&mut frequencies, factors),
            RopeScaling::Composed { scaling, factors, attention_factor: more } => {
                let other = Self::new(rotary_dim, theta, scaling, style);
                (frequencies, dynamic) = (other.frequencies, other.dynamic);
                attention_factor = other.attention_factor * more;
                if !factors.is_empty() {
                    divide(&mut frequencies, factors);
                }
            }
        }
        Self { frequencies, style, attention_factor, dynamic }
    }

    /// Channels of a head that turn.
    #[must_use]
    pub fn rotary_dim(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Radians by which each pair turns from a position to the next, `[rotary_dim / 2]`.
    #[must_use]
    pub fn frequencies(&self) -> &[f64] {
        &self.frequencies
    }

    /// What turned channels are multiplied by.
    #[must_use]
    pub fn attention_factor(&self) -> f64 {
        self.attention_factor
    }

    /// Which channels are a pair.
    #[must_use]
    pub fn style(&self) -> RopeStyle {
        self.style
    }

    /// Writes cosines and sines of the pairs at a position, times the attention factor; both
    /// `[rotary_dim / 2]`.
    pub fn turns(&self, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        let ratio = self.dynamic.map_or(1.0, |dynamic| {
            let beyond = (position + 1).max(dynamic.original_max) as f64;
            let grown = dynamic.factor * beyond / dynamic.original_max as f64;
            // theta times this to the power of -2 i / d: this to the power of -1 / (pairs - 1), i times
            let ratio = grown - (dynamic.factor - 1.0);
            ratio.powf(-2.0 / (self.rotary_dim() as f64 - 2.0).max(1.0))
        });
        let mut scale = 1.0;
        for ((frequency, cos), sin) in self.frequencies.iter().zip(cos).zip(sin) {
            let (s, c) = (position as f64 * (frequency * scale)).sin_cos();
            *cos = (self.attention_factor * c) as f32;
            *sin = (self.attention_factor * s) as f32;
            scale *= ratio;
        }
    }
}

/// Divides each frequency by its own factor.
#[track_caller]
fn divide(frequencies: &mut [f64], factors: &[f32]) {
    assert_eq!(factors.len(), frequencies.len(), "factors");
    for (frequency, factor) in frequencies.iter_mut().zip(factors) {
        *frequency /= f64::from(*factor);
    }
}

/// What multiplies theta so that the lowest frequency of `d` channels is divided by `factor`.
fn ntk(factor: f64, d: usize) -> f64 {
    if d > 2 { factor.powf(d as f64 / (d as f64 - 2.0)) } else { 1.0 }
}

/// Turns each head of each token by its position.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `x` | `[T, H * headdim]` | queries or keys |
/// | `nheads`, `headdim` | | H and the width of a head |
/// | `positions` | `[T]` | position of each token |
/// | `out` | `[T, H * headdim]` | overwritten |
///
/// # Panics
///
/// If the lengths disagree or a head is narrower than `rope.rotary_dim()`.
#[track_caller]
pub fn rope(
    x: Rows<'_>,
    nheads: usize,
    headdim: usize,
    positions: &[usize],
    rope: &Rope,
    out: &mut [f32],
) {
    assert_eq!(x.width(), nheads * headdim, "x");
    assert_eq!(out.len(), x.len() * x.width(), "out");
    turn(x, headdim, positions, rope, false, out);
}

/// The gradient of what [`rope`] turned: the gradient of the result, turned back.
///
/// A rotation's transpose is the rotation by the opposite angle; the attention factor stays a factor.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `dout` | `[T, H * headdim]` | gradient of `rope`'s result |
/// | `nheads`, `headdim`, `positions`, `rope` | | as `rope` got them |
/// | `dx` | `[T, H * headdim]` | overwritten |
///
/// # Panics
///
/// If the lengths disagree or a head is narrower than `rope.rotary_dim()`.
#[track_caller]
pub fn rope_backward(
    dout: Rows<'_>,
    nheads: usize,
    headdim: usize,
    positions: &[usize],
    rope: &Rope,
    dx: &mut [f32],
) {
    assert_eq!(dout.width(), nheads * headdim, "dout");
    assert_eq!(dx.len(), dout.len() * dout.width(), "dx");
    turn(dout, headdim, positions, rope, true, dx);
}

/// Turns each head of each token by its position's angles, or back by them.
#[track_caller]
fn turn(
    x: Rows<'_>,
    headdim: usize,
    positions: &[usize],
    rope: &Rope,
    back: bool,
    out: &mut [f32],
) {
    let width = x.width();
    assert!(rope.rotary_dim() <= headdim, "headdim: narrower than {}", rope.rotary_dim());
    assert_eq!(positions.len(), x.len(), "positions");
    if width == 0 {
        return;
    }
    let pairs = rope.frequencies.len();
    for_rows(out, width, COST, |first, out| {
        let mut turns = vec![0.0; 2 * pairs];
        let (cos, sin) = turns.split_at_mut(pairs);
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let t = first + i;
            rope.turns(positions[t], cos, sin);
            if back {
                for sin in sin.iter_mut() {
                    *sin = -*sin;
                }
            }
            let heads = x.row(t).chunks_exact(headdim).zip(out.chunks_exact_mut(headdim));
            for (x, out) in heads {
                match rope.style {
                    RopeStyle::Half => turn_halves(x, cos, sin, out),
                    RopeStyle::Interleaved => turn_neighbours(x, cos, sin, out),
                }
            }
        }
    });
}

/// Plain loops, which the compiler makes vectors of.
fn turn_halves(x: &[f32], cos: &[f32], sin: &[f32], out: &mut [f32]) {
    let pairs = cos.len();
    let sin = &sin[..pairs];
    let (first, rest) = x.split_at(pairs);
    let (second, rest) = rest.split_at(pairs);
    let (first_out, rest_out) = out.split_at_mut(pairs);
    let (second_out, rest_out) = rest_out.split_at_mut(pairs);
    for i in 0..pairs {
        first_out[i] = first[i] * cos[i] - second[i] * sin[i];
        second_out[i] = first[i] * sin[i] + second[i] * cos[i];
    }
    rest_out.copy_from_slice(rest);
}

fn turn_neighbours(x: &[f32], cos: &[f32], sin: &[f32], out: &mut [f32]) {
    let (x, rest) = x.split_at(2 * cos.len());
    let (out, rest_out) = out.split_at_mut(2 * cos.len());
    let pairs = x.as_chunks::<2>().0.iter().zip(out.as_chunks_mut::<2>().0);
    for ((([x, y], out), cos), sin) in pairs.zip(cos).zip(sin) {
        *out = [x * cos - y * sin, x * sin + y * cos];
    }
    rest_out.copy_from_slice(rest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, close};

    const STYLES: [RopeStyle; 2] = [RopeStyle::Half, RopeStyle::Interleaved];

    /// The definition, in f64: one head, frequencies given.
    fn reference(
        x: &[f32],
        position: usize,
        frequencies: &[f64],
        factor: f64,
        style: RopeStyle,
    ) -> Vec<f64> {
        let d = 2 * frequencies.len();
        let mut out: Vec<f64> = x.iter().copied().map(f64::from).collect();
        for (i, frequency) in frequencies.iter().enumerate() {
            let (a, b) = match style {
                RopeStyle::Half => (i, i + d / 2),
                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            };
            let angle = position as f64 * frequency;
            let (x, y) = (f64::from(x[a]), f64::from(x[b]));
            out[a] = factor * (x * angle.cos() - y * angle.sin());
            out[b] = factor * (x * angle.sin() + y * angle.cos());
        }
        out
    }

    #[test]
    fn equals_the_definition_for_any_width_style_and_position() {
        let mut rng = Rng::new(50);
        let positions = [0, 1, 2, 1023, 131_072, (1 << 24) + 1];
        for (nheads, headdim, rotary_dim) in
            [(1, 2, 2), (3, 8, 8), (2, 20, 14), (4, 64, 32), (2, 5, 0)]
        {
            for style in STYLES {
                let yarn = RopeScaling::Yarn(Yarn::new(4.0, 4096));
                for scaling in [RopeScaling::None, yarn] {
                    let turning = Rope::new(rotary_dim, 1e4, &scaling, style);
                    let width = nheads * headdim;
                    let x = rng.floats(positions.len() * width);
                    let mut out = vec![f32::NAN; x.len()];
                    rope(Rows::dense(&x, width), nheads, headdim, &positions, &turning, &mut out);
                    let heads = x.chunks(headdim).zip(out.chunks(headdim)).enumerate();
                    for (i, (x, out)) in heads {
                        let (frequencies, factor) =
                            (turning.frequencies(), turning.attention_factor());
                        let want = reference(x, positions[i / nheads], frequencies, factor, style);
                        close(out, &want, 2e-7);
                    }
                }
            }
        }
    }

    /// The transpose of [`reference`], column by column: that is linear in `x`.
    fn reference_backward(
        dout: &[f32],
        position: usize,
        frequencies: &[f64],
        factor: f64,
        style: RopeStyle,
    ) -> Vec<f64> {
        let mut unit = vec![0.0; dout.len()];
        (0..dout.len())
            .map(|i| {
                unit[i] = 1.0;
                let column = reference(&unit, position, frequencies, factor, style);
                unit[i] = 0.0;
                column.iter().zip(dout).map(|(c, d)| c * f64::from(*d)).sum()
            })
            .collect()
    }

    #[test]
    fn the_gradient_is_that_of_the_definition_for_any_width_style_and_position() {
        let mut rng = Rng::new(54);
        let positions = [0, 1, 77, 131_072];
        for (nheads, headdim, rotary_dim) in [(1, 2, 2), (3, 8, 8), (2, 20, 14), (2, 5, 0)] {
            for style in STYLES {
                let yarn = RopeScaling::Yarn(Yarn::new(4.0, 4096));
                for scaling in [RopeScaling::None, yarn] {
                    let turning = Rope::new(rotary_dim, 1e4, &scaling, style);
                    let width = nheads * headdim;
                    let dout = rng.floats(positions.len() * width);
                    let mut dx = vec![f32::NAN; dout.len()];
                    let rows = Rows::dense(&dout, width);
                    rope_backward(rows, nheads, headdim, &positions, &turning, &mut dx);
                    let heads = dout.chunks(headdim).zip(dx.chunks(headdim)).enumerate();
                    for (i, (dout, dx)) in heads {
                        let (frequencies, factor) =
                            (turning.frequencies(), turning.attention_factor());
                        let position = positions[i / nheads];
                        let want = reference_backward(dout, position, frequencies, factor, style);
                        close(dx, &want, 2e-7);
                    }
                }
            }
        }
    }

    #[test]
    fn the_gradient_of_a_dynamic_scaling_turns_back_by_the_same_angles() {
        let mut rng = Rng::new(55);
        let scaling = RopeScaling::Dynamic { factor: 2.0, original_max: 100 };
        for style in STYLES {
            let turning = Rope::new(16, 1e4, &scaling, style);
            let x = rng.floats(16);
            let (mut out, mut back) = ([0.0; 16], [0.0; 16]);
            rope(Rows::dense(&x, 16), 1, 16, &[399], &turning, &mut out);
            rope_backward(Rows::dense(&out, 16), 1, 16, &[399], &turning, &mut back);
            let want: Vec<f64> = x.iter().copied().map(f64::from).collect();
            close(&back, &want, 2e-7);
        }
    }

    #[test]
    #[should_panic(expected = "dx")]
    fn a_gradient_of_the_wrong_length_panics() {
        let turning = Rope::new(2, 1e4, &RopeScaling::None, RopeStyle::Half);
        rope_backward(Rows::dense(&[0.0; 2], 2), 1, 2, &[0], &turning, &mut [0.0; 3]);
    }

    #[test]
    fn scores_depend_on_the_distance_of_positions_alone() {
        let mut rng = Rng::new(51);
        let (q, k) = (rng.floats(32), rng.floats(32));
        for style in STYLES {
            let turning = Rope::new(32, 1e4, &RopeScaling::None, style);
            let score = |i: usize, j: usize| -> f64 {
                let mut turned = [[0.0; 32]; 2];
                for (x, position, out) in [(&q, i, 0), (&k, j, 1)] {
                    rope(Rows::dense(x, 32), 1, 32, &[position], &turning, &mut turned[out]);
                }
                turned[0].iter().zip(turned[1]).map(|(q, k)| f64::from(*q) * f64::from(k)).sum()
            };
            let near = score(7, 3);
            assert!((score(1_000_007, 1_000_003) - near).abs() < 1e-5);
            assert!((score(8, 3) - near).abs() > 1e-3);
        }
    }

    #[test]
    fn a_band_of_columns_turns_as_a_matrix_of_its_own() {
        let mut rng = Rng::new(52);
        let x = rng.floats(3 * 24);
        let turning = Rope::new(4, 1e4, &RopeScaling::None, RopeStyle::Half);
        let band = Rows::new(&x, 3, 24, 8, 16);
        let dense: Vec<f32> = (0..3).flat_map(|t| band.row(t).to_vec()).collect();
        let (mut a, mut b) = ([0.0; 48], [0.0; 48]);
        rope(band, 2, 8, &[5, 6, 7], &turning, &mut a);
        rope(Rows::dense(&dense, 16), 2, 8, &[5, 6, 7], &turning, &mut b);
        assert_eq!(a, b);
    }

    fn frequencies(d: usize, theta: f64, scaling: &RopeScaling) -> Vec<f64> {
        Rope::new(d, theta, scaling, RopeStyle::Half).frequencies().to_vec()
    }

    #[track_caller]
    fn near(got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= 1e-6 * want.abs(), "{got} is not {want}");
        }
    }

    /// Values of transformers 5.24.0, `ROPE_INIT_FUNCTIONS`, which computes in f32.
    #[test]
    fn scalings_are_those_of_transformers() {
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max: 8192,
        };
        near(
            &frequencies(16, 5e5, &llama3),
            &[
                1.0,
                0.193_922_76,
                0.037_606_031,
                0.007_292_665_1,
                5.248_460_2e-4,
                3.428_102_4e-5,
                6.647_869_7e-6,
                1.289_173_2e-6,
            ],
        );
        let plain = Yarn::new(4.0, 4096);
        let deepseek =
            Yarn { mscale: Some(0.707), mscale_all_dim: Some(1.0), ..Yarn::new(40.0, 4096) };
        let gpt_oss = Yarn { truncate: false, ..Yarn::new(32.0, 4096) };
        for (yarn, theta, factor, want) in [
            (
                plain,
                1e4,
                1.138_629_436,
                [
                    1.0,
                    0.316_227_76,
                    0.1,
                    0.025_693_506,
                    0.006_249_999_6,
                    0.001_383_496_6,
                    2.500_000_1e-4,
                    7.905_694_7e-5,
                ],
            ),
            (
                deepseek,
                1e4,
                0.921_042_355,
                [
                    1.0,
                    0.316_227_76,
                    0.1,
                    0.023_914_725,
                    0.005_124_999_7,
                    8.498_621_8e-4,
                    2.499_999_9e-5,
                    7.905_694_5e-6,
                ],
            ),
            (
                gpt_oss,
                150_000.0,
                1.346_573_590,
                [
                    1.0,
                    0.225_418,
                    0.050_813_273,
                    0.006_794_959_3,
                    4.564_839_3e-4,
                    1.818_833_7e-5,
                    4.099_978_5e-6,
                    9.242_089_6e-7,
                ],
            ),
        ] {
            let rope = Rope::new(16, theta, &RopeScaling::Yarn(yarn), RopeStyle::Half);
            near(rope.frequencies(), &want);
            near(&[rope.attention_factor()], &[factor]);
        }
        let given = Yarn { attention_factor: Some(1.5), ..plain };
        assert_eq!(
            Rope::new(16, 1e4, &RopeScaling::Yarn(given), RopeStyle::Half).attention_factor(),
            1.5
        );
    }

    #[test]
    fn ntk_divides_the_lowest_frequency_by_its_factor_and_keeps_the_highest() {
        let (plain, scaled) = (
            frequencies(64, 1e4, &RopeScaling::None),
            frequencies(64, 1e4, &RopeScaling::Ntk { factor: 8.0 }),
        );
        near(&[scaled[0], scaled[31]], &[plain[0], plain[31] / 8.0]);
    }

    #[test]
    fn dynamic_scaling_starts_beyond_the_original_context() {
        let (factor, original_max) = (2.0, 100);
        let scaling = RopeScaling::Dynamic { factor, original_max };
        let dynamic = Rope::new(16, 1e4, &scaling, RopeStyle::Half);
        let x = Rng::new(53).floats(16);
        for (position, factor) in [(0, 1.0), (99, 1.0), (149, 2.0), (399, 7.0)] {
            let mut out = [0.0; 16];
            rope(Rows::dense(&x, 16), 1, 16, &[position], &dynamic, &mut out);
            let fixed = frequencies(16, 1e4, &RopeScaling::Ntk { factor });
            close(&out, &reference(&x, position, &fixed, 1.0, RopeStyle::Half), 2e-7);
        }
    }

    #[test]
    fn factors_of_dimensions_divide_their_frequencies() {
        let scaling = RopeScaling::PerDim { factors: vec![1.0, 2.0, 8.0] };
        let plain = frequencies(6, 5e5, &RopeScaling::None);
        near(&frequencies(6, 5e5, &scaling), &[plain[0], plain[1] / 2.0, plain[2] / 8.0]);
    }

    #[test]
    fn composed_scalings_are_one_after_another() {
        let plain = frequencies(6, 5e5, &RopeScaling::None);
        let scaling = RopeScaling::Composed {
            scaling: Box::new(RopeScaling::Yarn(Yarn::new(4.0, 8))),
            factors: vec![1.0, 2.0, 8.0],
            attention_factor: 0.5,
        };
        let rope = Rope::new(6, 5e5, &scaling, RopeStyle::Half);
        let yarn = frequencies(6, 5e5, &RopeScaling::Yarn(Yarn::new(4.0, 8)));
        near(rope.frequencies(), &[yarn[0], yarn[1] / 2.0, yarn[2] / 8.0]);
        assert!(yarn != plain);
        near(&[rope.attention_factor()], &[0.5 * (1.0 + 0.1 * 4f64.ln())]);
        let linear = RopeScaling::Composed {
            scaling: Box::new(RopeScaling::Linear { factor: 4.0 }),
            factors: Vec::new(),
            attention_factor: 1.5,
        };
        let rope = Rope::new(6, 5e5, &linear, RopeStyle::Half);
        near(rope.frequencies(), &[plain[0] / 4.0, plain[1] / 4.0, plain[2] / 4.0]);
        near(&[rope.attention_factor()], &[1.5]);
    }

    #[test]
    #[should_panic(expected = "factors")]
    fn too_few_factors_panic() {
        frequencies(6, 1e4, &RopeScaling::PerDim { factors: vec![1.0] });
    }
}
