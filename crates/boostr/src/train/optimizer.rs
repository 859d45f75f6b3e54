//! AdamW over parameters by name: clipping, decay groups, averaged weights, and a state that is saved
//! exactly.
//!
//! ```text
//! g      = (sum of the gradients of all batches) / divisor
//! norm   = root of the sum of all squares of g, over all parameters
//! g      = g * min(1, max_grad_norm / norm)
//! w m v  = one step of AdamW with g, see `boostr_kernels::adamw`
//! ema   += (1 - min(ema_decay, (1 + t) / (10 + t))) * (w - ema)    after step t, from 1
//! ```
//!
//! Clipping follows Pascanu, Mikolov and Bengio 2013, "On the difficulty of training recurrent neural
//! networks". The average warms up as TensorFlow's does, so it soon forgets the first weights.
//!
//! Parameters are visited in the order of their names, and the order of every sum depends on lengths
//! alone. So the result does not depend on the number of threads, to the bit.

use std::borrow::Cow;
use std::collections::BTreeMap;

use boostr_kernels::{AdamW, Level, adamw, sum_of_squares};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::Gradients;
use super::save::NamedTensor;
use crate::error::{Error, Result};

/// Elements of an average that are one parallel task.
const BLOCK: usize = 1 << 14;

/// A tensor that is trained.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The elements, row-major.
    pub values: Vec<f32>,
}

/// What is trained, by the names of the checkpoint.
pub type Parameters = BTreeMap<String, Parameter>;

/// How weights are moved; the learning rate is the schedule's. The fields are the keys of a configuration file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWConfig {
    /// Decay of the mean of gradients, in 0..1.
    pub beta1: f64,
    /// Decay of the mean of squared gradients, in 0..1.
    pub beta2: f64,
    /// Added to the root of the mean of squares; above 0.
    pub eps: f64,
    /// Share of a weight that a step at learning rate 1 takes away, where [`decays`] says so.
    pub weight_decay: f64,
    /// A gradient that is longer, over all parameters, is scaled to this length; 0 clips nothing.
    pub max_grad_norm: f64,
    /// Decay of the average of the weights, in 0..1; 0 keeps none.
    pub ema_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            max_grad_norm: 1.0,
            ema_decay: 0.0,
        }
    }
}

impl AdamWConfig {
    /// Checks every field's range.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] with the name of the first field that is out of range.
    pub fn validate(&self) -> Result<()> {
        let check = |name, value: f64, ok: bool, range: &str| {
            if ok && value.is_finite() {
                return Ok(());
            }
            Err(Error::Argument { name, reason: format!("expected {range}, found {value}") })
        };
        for (name, value) in
            [("beta1", self.beta1), ("beta2", self.beta2), ("ema_decay", self.ema_decay)]
        {
            check(name, value, (0.0..1.0).contains(&value), "a number >= 0 and < 1")?;
        }
        check("eps", self.eps, self.eps > 0.0, "a finite number > 0")?;
        for (name, value) in
            [("weight_decay", self.weight_decay), ("max_grad_norm", self.max_grad_norm)]
        {
            check(name, value, value >= 0.0, "a finite number >= 0")?;
        }
        Ok(())
    }
}

/// Whether weight decay acts on a parameter: on matrices, those of embeddings and experts too.
///
/// | parameter | decays |
/// |---|---|
/// | two dimensions and more: projections, embeddings, head, router, stacked experts | yes |
/// | one dimension or none: weights of norms, biases, `A_log`, `D`, `dt_bias` | no |
/// | `A_log`, `D` and whatever is called `..bias`, of any shape | no |
/// | `conv1d`, the few taps of each channel | no |
///
/// The first two rows are the usual ones; that `A_log`, `D` and `dt_bias` never decay is said in
/// state-spaces/mamba, where they carry `_no_weight_decay`.
///
/// ```
/// use boostr::train::decays;
///
/// assert!(decays("backbone.layers.0.mixer.in_proj.weight", &[80, 32]));
/// assert!(!decays("backbone.layers.0.mixer.conv1d.weight", &[48, 1, 4]));
/// assert!(!decays("backbone.layers.0.mixer.A_log", &[8]));
/// ```
#[must_use]
pub fn decays(name: &str, shape: &[usize]) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    let is_kept = matches!(last, "A_log" | "D") || last.ends_with("bias");
    let is_convolution = name.split('.').any(|part| part.ends_with("conv1d"));
    shape.len() >= 2 && !is_kept && !is_convolution
}

/// AdamW, and what it remembers of each parameter.
///
/// ```
/// use boostr::train::{AdamWConfig, Optimizer, Parameter};
///
/// let weight = Parameter { shape: vec![2], values: vec![1.0, -1.0] };
/// let mut parameters = [("norm.weight".to_owned(), weight)].into();
/// let mut optimizer = Optimizer::new(AdamWConfig::default(), &parameters)?;
/// // The sum of the gradients of four batches.
/// let gradients = [("norm.weight".to_owned(), vec![4.0, 0.0])].into();
/// let norm = optimizer.step(&mut parameters, &gradients, 4.0, 0.25)?;
/// assert_eq!((norm, optimizer.steps()), (1.0, 1));
/// // The first step is the learning rate, whatever the gradient's size.
/// assert!((parameters["norm.weight"].values[0] - 0.75).abs() < 1e-6);
/// # Ok::<(), boostr::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Optimizer {
    config: AdamWConfig,
    steps: u64,
    moments: BTreeMap<String, Moments>,
}

/// What is remembered of one parameter, in its shape.
#[derive(Debug, Clone)]
struct Moments {
    shape: Vec<usize>,
    /// Mean of the gradient.
    m: Vec<f32>,
    /// Mean of the squared gradient.
    v: Vec<f32>,
    /// Average of the weights.
    ema: Option<Vec<f32>>,
}

impl Optimizer {
    /// An optimizer that has taken no step; averages start as the weights.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when `config` is out of range; [`Error::Shape`] when the values of a parameter
    /// are not as many as its shape says.
    pub fn new(config: AdamWConfig, parameters: &Parameters) -> Result<Self> {
        config.validate()?;
        let mut moments = BTreeMap::new();
        for (name, Parameter { shape, values }) in parameters {
            check_len(name, shape, values.len())?;
            let zeros = vec![0.0; values.len()];
            let ema = (config.ema_decay > 0.0).then(|| values.clone());
            let remembered = Moments { shape: shape.clone(), m: zeros.clone(), v: zeros, ema };
            moments.insert(name.clone(), remembered);
        }
        Ok(Self { config, steps: 0, moments })
    }

    /// Moves all parameters one step and returns the norm of the gradient before clipping.
    ///
    /// | argument | meaning |
    /// |---|---|
    /// | `gradients` | one for each parameter: the sum over what is accumulated |
    /// | `divisor` | what makes a mean of the sum: the number of batches, or of predicted tokens |
    /// | `lr` | learning rate of this step |
    ///
    /// # Errors
    ///
    /// Nothing has changed then. [`Error::Argument`] when a gradient is not finite, naming the first such
    /// parameter, when a parameter has no gradient or a gradient no parameter, when the gradient is too
    /// large for its square to be an f32, and when `lr` or `divisor` is out of range; [`Error::Shape`] when
    /// a parameter or its gradient has another size than at the start.
    pub fn step(
        &mut self,
        parameters: &mut Parameters,
        gradients: &Gradients,
        divisor: f64,
        lr: f64,
    ) -> Result<f64> {
        if !(lr.is_finite() && lr >= 0.0) {
            let reason = format!("expected a finite number >= 0, found {lr}");
            return Err(Error::Argument { name: "lr", reason });
        }
        if !(divisor.is_finite() && divisor > 0.0) {
            let reason = format!("expected a finite number > 0, found {divisor}");
            return Err(Error::Argument { name: "divisor", reason });
        }
        let norm = self.sum_of_squares(parameters, gradients)?.sqrt() / divisor;
        let clip = match self.config.max_grad_norm {
            max if max > 0.0 && norm > max => max / norm,
            _ => 1.0,
        };
        if norm * clip > f64::from(f32::MAX).sqrt() {
            let reason = format!("their norm {norm:.1e} is too large to be squared: clip them");
            return Err(Error::Argument { name: "gradients", reason });
        }

        let factor = (clip / divisor) as f32;
        let AdamWConfig { beta1, beta2, eps, weight_decay, ema_decay, .. } = self.config;
        self.steps += 1;
        let t = self.steps as f64;
        let rate = (1.0 - ema_decay.min((1.0 + t) / (10.0 + t))) as f32;
        for ((name, moments), parameter) in self.moments.iter_mut().zip(parameters.values_mut()) {
            let Moments { shape, m, v, ema } = moments;
            let weight_decay = if decays(name, shape) { weight_decay } else { 0.0 };
            // The bits of a step do not depend on the level.
            let config = AdamW { level: Level::detect(), lr, beta1, beta2, eps, weight_decay };
            let w = &mut parameter.values;
            adamw(&config, self.steps, factor, w, &gradients[name.as_str()], m, v);
            if let Some(ema) = ema {
                average(ema, w, rate);
            }
        }
        Ok(norm)
    }

    /// The sum of the squares of all gradients, after checking that they are those of the parameters.
    fn sum_of_squares(&self, parameters: &Parameters, gradients: &Gradients) -> Result<f64> {
        let refuse = |reason| Err(Error::Argument { name: "gradients", reason });
        if !self.moments.keys().eq(parameters.keys()) {
            let reason = "they are not those that the optimizer was made for".to_owned();
            return Err(Error::Argument { name: "parameters", reason });
        }
        if let Some(name) = gradients.places().keys().find(|name| !parameters.contains_key(*name)) {
            return refuse(format!("there is no parameter `{name}`"));
        }
        let mut sum = 0.0;
        for (name, Moments { shape, .. }) in &self.moments {
            check_len(name, shape, parameters[name].values.len())?;
            let Some(gradient) = gradients.get(name) else {
                return refuse(format!("there is none of `{name}`"));
            };
            check_len(name, shape, gradient.len())?;
            // In f64, where no sum of squares of finite f32 overflows.
            let squares = sum_of_squares(Level::detect(), gradient);
            if !squares.is_finite() {
                let at = gradient.iter().position(|g| !g.is_finite()).unwrap_or(0);
                let (found, step) = (gradient.get(at).copied().unwrap_or(f32::NAN), self.steps + 1);
                return refuse(format!("that of `{name}` has {found} at {at} in step {step}"));
            }
            sum += squares;
        }
        Ok(sum)
    }

    /// Steps taken.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// The average of a parameter's weights, when averages are kept.
    #[must_use]
    pub fn average(&self, name: &str) -> Option<&[f32]> {
        self.moments.get(name)?.ema.as_deref()
    }

    /// All that is remembered: `step`, the number of steps in four digits of 16 bits, the lowest first; and
    /// for each parameter `m.NAME`, `v.NAME`, and `ema.NAME` when averages are kept.
    #[must_use]
    pub fn tensors(&self) -> Vec<NamedTensor<'_>> {
        // 16 bits are exact in an f32.
        let digits = (0..4).map(|i| f32::from((self.steps >> (16 * i)) as u16)).collect();
        let mut all = vec![NamedTensor {
            name: "step".to_owned(),
            shape: vec![4],
            values: Cow::Owned(digits),
        }];
        for (name, Moments { shape, m, v, ema }) in &self.moments {
            for (kind, values) in [("m", Some(m)), ("v", Some(v)), ("ema", ema.as_ref())] {
                all.extend(values.map(|values| NamedTensor {
                    name: format!("{kind}.{name}"),
                    shape: shape.clone(),
                    values: Cow::Borrowed(values),
                }));
            }
        }
        all
    }

    /// Puts what [`tensors`](Self::tensors) gave in place of what is remembered, to the bit.
    ///
    /// # Errors
    ///
    /// Nothing has changed then. [`Error::Argument`] when a tensor is missing, comes twice, is of no
    /// parameter, or has values that no step makes; [`Error::Shape`] when one has another shape.
    pub fn restore(&mut self, tensors: Vec<NamedTensor<'_>>) -> Result<()> {
        let refuse = |reason| Error::Argument { name: "tensors", reason };
        let mut given = BTreeMap::new();
        for tensor in tensors {
            if let Some(other) = given.insert(tensor.name.clone(), tensor) {
                return Err(refuse(format!("`{}` comes twice", other.name)));
            }
        }
        let mut take = |name: String, expected: &[usize], lowest: f32| {
            let Some(NamedTensor { shape, values, .. }) = given.remove(&name) else {
                return Err(refuse(format!("`{name}` is missing")));
            };
            if shape != expected {
                return Err(Error::Shape { name, expected: expected.to_vec(), got: shape });
            }
            check_len(&name, &shape, values.len())?;
            match values.iter().find(|x| !(x.is_finite() && **x >= lowest)) {
                Some(bad) => Err(refuse(format!("`{name}` has {bad}, which no step makes"))),
                None => Ok(values.into_owned()),
            }
        };
        let digits = take("step".to_owned(), &[4], 0.0)?;
        if let Some(bad) = digits.iter().find(|x| x.fract() != 0.0 || **x > f32::from(u16::MAX)) {
            return Err(refuse(format!("`step` has {bad}, expected integers of 16 bits")));
        }
        let steps = digits.iter().rev().fold(0, |steps, digit| (steps << 16) | *digit as u64);
        let mut moments = BTreeMap::new();
        for (name, Moments { shape, ema, .. }) in &self.moments {
            let m = take(format!("m.{name}"), shape, f32::MIN)?;
            let v = take(format!("v.{name}"), shape, 0.0)?;
            let ema = ema.is_some().then(|| take(format!("ema.{name}"), shape, f32::MIN));
            let remembered = Moments { shape: shape.clone(), m, v, ema: ema.transpose()? };
            moments.insert(name.clone(), remembered);
        }
        if let Some(name) = given.keys().next() {
            return Err(refuse(format!("`{name}` belongs to no parameter")));
        }
        (self.steps, self.moments) = (steps, moments);
        Ok(())
    }
}

fn check_len(name: &str, shape: &[usize], len: usize) -> Result<()> {
    if shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim)) == Some(len) {
        return Ok(());
    }
    Err(Error::Shape { name: name.to_owned(), expected: shape.to_vec(), got: vec![len] })
}

/// Moves the average a part of the way to the weights.
fn average(ema: &mut [f32], w: &[f32], rate: f32) {
    ema.par_chunks_mut(BLOCK).zip(w.par_chunks(BLOCK)).for_each(|(ema, w)| {
        for (ema, w) in ema.iter_mut().zip(w) {
            *ema += rate * (w - *ema);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const LR: f64 = 1e-2;

    /// Numbers between -1 and 1 that are about as good as random ones.
    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    fn parameters(n: usize) -> Parameters {
        let parameter = |shape: &[usize], seed| Parameter {
            shape: shape.to_vec(),
            values: numbers(shape.iter().product(), seed),
        };
        [
            ("embeddings.weight".to_owned(), parameter(&[n, 3], 1)),
            ("layers.0.mixer.A_log".to_owned(), parameter(&[5], 2)),
            ("layers.0.mixer.conv1d.weight".to_owned(), parameter(&[4, 1, 3], 3)),
        ]
        .into()
    }

    fn gradients(parameters: &Parameters, seed: u32) -> Gradients {
        let of = |(name, p): (&String, &Parameter)| (name.clone(), numbers(p.values.len(), seed));
        parameters.iter().map(of).collect()
    }

    fn config() -> AdamWConfig {
        AdamWConfig { max_grad_norm: 0.5, ema_decay: 0.9, ..AdamWConfig::default() }
    }

    /// All steps of one weight by definition, in f64, with the gradients already divided and clipped.
    fn reference(config: &AdamWConfig, decay: f64, w: f32, gradients: &[f64]) -> (f64, f64) {
        let (mut w, mut m, mut v) = (f64::from(w), 0.0, 0.0);
        let mut ema = w;
        for (t, g) in (1i32..).zip(gradients) {
            m = config.beta1 * m + (1.0 - config.beta1) * g;
            v = config.beta2 * v + (1.0 - config.beta2) * g * g;
            w -= LR * decay * w;
            let mean = m / (1.0 - config.beta1.powi(t));
            let square = v / (1.0 - config.beta2.powi(t));
            w -= LR * mean / (square.sqrt() + config.eps);
            let keep = config.ema_decay.min(f64::from(1 + t) / f64::from(10 + t));
            ema = keep * ema + (1.0 - keep) * w;
        }
        (w, ema)
    }

    #[test]
    fn steps_equal_the_definition() {
        let (divisor, config) = (3.0, config());
        let start = parameters(7);
        let mut moved = start.clone();
        let mut optimizer = Optimizer::new(config.clone(), &start).unwrap();
        let mut used: Vec<BTreeMap<String, Vec<f64>>> = Vec::new();
        for t in 0..40 {
            let mut gradients = gradients(&start, 100 + t);
            if t % 2 == 1 {
                // Short enough not to be clipped.
                gradients.values_mut().iter_mut().for_each(|g| *g *= 0.01);
            }
            let norm = optimizer.step(&mut moved, &gradients, divisor, LR).unwrap();
            let squares = gradients.values().iter().map(|g| (f64::from(*g) / divisor).powi(2));
            let want = squares.sum::<f64>().sqrt();
            assert!((norm - want).abs() < 1e-9 * want);
            assert_eq!(want > config.max_grad_norm, t % 2 == 0);
            let factor = (config.max_grad_norm / want).min(1.0) / divisor;
            let scaled = |g: &[f32]| g.iter().map(|g| f64::from(*g) * factor).collect();
            used.push(gradients.iter().map(|(name, g)| (name.to_owned(), scaled(g))).collect());
        }
        for (name, decay) in [
            ("embeddings.weight", 0.1),
            ("layers.0.mixer.A_log", 0.0),
            ("layers.0.mixer.conv1d.weight", 0.0),
        ] {
            for (i, w) in start[name].values.iter().enumerate() {
                let gradients: Vec<f64> = used.iter().map(|step| step[name][i]).collect();
                let (want, want_ema) = reference(&config, decay, *w, &gradients);
                // Forty roundings of numbers below 2.
                assert!((f64::from(moved[name].values[i]) - want).abs() < 5e-6, "{name} {i}");
                let ema = optimizer.average(name).unwrap()[i];
                assert!((f64::from(ema) - want_ema).abs() < 5e-6, "average of {name} {i}");
            }
        }
    }

    #[test]
    fn matrices_decay_and_nothing_else() {
        for (name, shape, want) in [
            ("backbone.embeddings.weight", &[64, 16][..], true),
            ("lm_head.weight", &[64, 16], true),
            ("model.layers.0.mamba.in_proj.weight", &[80, 16], true),
            ("model.layers.0.block_sparse_moe.input_linear.weight", &[4, 32, 16], true),
            ("model.layers.0.block_sparse_moe.router.layer.weight", &[4, 16], true),
            ("model.layers.0.self_attn.q_proj.lora_A.weight", &[2, 16], true),
            ("backbone.layers.0.mixer.A_log", &[8], false),
            ("backbone.layers.0.mixer.D", &[8], false),
            ("backbone.layers.0.mixer.D", &[8, 4], false),
            ("layers.0.A_log", &[1, 1, 8, 1], false),
            ("backbone.layers.0.mixer.dt_bias", &[8], false),
            ("backbone.layers.0.mixer.B_bias", &[8, 1, 4], false),
            ("backbone.layers.0.mixer.norm.weight", &[32], false),
            ("backbone.norm_f.weight", &[16], false),
            ("model.layers.0.input_layernorm.weight", &[16], false),
            ("backbone.layers.0.mixer.in_proj.bias", &[80], false),
            ("backbone.layers.0.mixer.conv1d.weight", &[48, 1, 4], false),
            ("backbone.layers.0.mixer.conv1d.bias", &[48], false),
            ("model.layers.0.self_attn.q_conv1d.weight", &[48, 1, 4], false),
            ("scale", &[], false),
        ] {
            assert_eq!(decays(name, shape), want, "{name}");
        }
    }

    #[test]
    fn a_restored_optimizer_goes_on_with_the_same_bits() {
        let start = parameters(7);
        let mut moved = start.clone();
        let mut optimizer = Optimizer::new(config(), &start).unwrap();
        let step = |optimizer: &mut Optimizer, moved: &mut Parameters, t| {
            optimizer.step(moved, &gradients(&start, t), 1.0, LR).unwrap();
        };
        (0..3).for_each(|t| step(&mut optimizer, &mut moved, t));

        let mut resumed_moved = moved.clone();
        let mut resumed = Optimizer::new(config(), &start).unwrap();
        resumed.restore(optimizer.tensors()).unwrap();
        for t in 3..23 {
            step(&mut optimizer, &mut moved, t);
            step(&mut resumed, &mut resumed_moved, t);
        }
        assert_eq!(moved, resumed_moved);
        assert_eq!(optimizer.tensors(), resumed.tensors());
        assert_eq!(resumed.steps(), 23);
    }

    #[test]
    fn any_number_of_steps_is_saved_exactly() {
        let start = parameters(1);
        let mut optimizer = Optimizer::new(config(), &start).unwrap();
        for steps in [0, 1, 65_535, 65_536, (1 << 24) + 1, u64::MAX] {
            optimizer.steps = steps;
            let mut other = Optimizer::new(config(), &start).unwrap();
            other.restore(optimizer.tensors()).unwrap();
            assert_eq!(other.steps(), steps);
        }
    }

    #[test]
    fn what_is_not_finite_is_named_and_changes_nothing() {
        let start = parameters(7);
        let mut optimizer = Optimizer::new(config(), &start).unwrap();
        let mut moved = start.clone();
        optimizer.step(&mut moved, &gradients(&start, 1), 1.0, LR).unwrap();
        let (before, weights) = (optimizer.clone(), moved.clone());
        for (bad, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")]
        {
            let mut gradients = gradients(&start, 2);
            gradients.get_mut("layers.0.mixer.conv1d.weight").unwrap()[0] = f32::NAN;
            gradients.get_mut("layers.0.mixer.A_log").unwrap()[3] = bad;
            let error = optimizer.step(&mut moved, &gradients, 1.0, LR).unwrap_err().to_string();
            let want = format!(
                "argument `gradients`: that of `layers.0.mixer.A_log` has {shown} at 3 in step 2"
            );
            assert_eq!(error, want);
        }
        assert_eq!(moved, weights);
        assert_eq!(optimizer.tensors(), before.tensors());
    }

    #[test]
    fn a_gradient_whose_square_is_no_float_is_clipped_or_refused() {
        let start = parameters(1);
        let mut gradients = gradients(&start, 1);
        gradients.get_mut("embeddings.weight").unwrap()[0] = 1e30;
        let mut moved = start.clone();
        let mut clipping = Optimizer::new(config(), &start).unwrap();
        clipping.step(&mut moved, &gradients, 1.0, LR).unwrap();
        assert!(clipping.tensors().iter().all(|t| t.values.iter().all(|x| x.is_finite())));
        let plain = AdamWConfig { max_grad_norm: 0.0, ..config() };
        let mut plain = Optimizer::new(plain, &start).unwrap();
        let error = plain.step(&mut moved, &gradients, 1.0, LR).unwrap_err().to_string();
        assert_eq!(
            error,
            "argument `gradients`: their norm 1.0e30 is too large to be squared: clip them"
        );
    }

    #[test]
    fn gradients_must_be_those_of_the_parameters() {
        type ByName = BTreeMap<String, Vec<f32>>;
        let start = parameters(7);
        let mut optimizer = Optimizer::new(config(), &start).unwrap();
        let mut message = |change: &dyn Fn(&mut Parameters, &mut ByName)| {
            let gradients = gradients(&start, 1);
            let own = |(name, values): (&str, &[f32])| (name.to_owned(), values.to_vec());
            let (mut parameters, mut gradients) =
                (start.clone(), gradients.iter().map(own).collect());
            change(&mut parameters, &mut gradients);
            optimizer.step(&mut parameters, &gradients.into(), 1.0, LR).unwrap_err().to_string()
        };
        let name = "layers.0.mixer.A_log";
        assert_eq!(
            message(&|_, g| drop(g.remove(name))),
            format!("argument `gradients`: there is none of `{name}`")
        );
        assert_eq!(
            message(&|_, g| drop(g.insert("other".into(), vec![]))),
            "argument `gradients`: there is no parameter `other`"
        );
        assert_eq!(
            message(&|_, g| assert!(g.get_mut(name).unwrap().pop().is_some())),
            format!("tensor `{name}` has shape [4], expected [5]")
        );
        assert_eq!(
            message(&|p, _| assert!(p.get_mut(name).unwrap().values.pop().is_some())),
            format!("tensor `{name}` has shape [4], expected [5]")
        );
        assert_eq!(
            message(&|p, _| drop(p.remove(name))),
            "argument `parameters`: they are not those that the optimizer was made for"
        );
        let mut refused = |divisor, lr| {
            let error = optimizer.step(&mut start.clone(), &gradients(&start, 1), divisor, lr);
            error.unwrap_err().to_string()
        };
        assert_eq!(refused(0.0, LR), "argument `divisor`: expected a finite number > 0, found 0");
        assert_eq!(
            refused(1.0, f64::NAN),
            "argument `lr`: expected a finite number >= 0, found NaN"
        );
        assert_eq!(optimizer.steps(), 0);
    }

    #[test]
    fn a_state_that_is_not_its_own_is_refused_whole() {
        let start = parameters(7);
        let mut optimizer = Optimizer::new(config(), &start).unwrap();
        let mut moved = start.clone();
        optimizer.step(&mut moved, &gradients(&start, 1), 1.0, LR).unwrap();
        let saved = optimizer.clone();
        let mut other = Optimizer::new(config(), &start).unwrap();
        let fresh = other.clone();
        let mut message = |change: &dyn Fn(&mut Vec<NamedTensor<'_>>)| {
            let mut tensors = saved.tensors();
            change(&mut tensors);
            other.restore(tensors).unwrap_err().to_string()
        };
        let at = |tensors: &[NamedTensor<'_>], name: &str| {
            tensors.iter().position(|t| t.name == name).unwrap()
        };
        let m = "m.layers.0.mixer.A_log";
        let set = |name: &'static str, value: f32| {
            move |tensors: &mut Vec<NamedTensor<'_>>| {
                let at = at(tensors, name);
                tensors[at].values.to_mut()[0] = value;
            }
        };
        assert_eq!(
            message(&|t| drop(t.remove(at(t, m)))),
            format!("argument `tensors`: `{m}` is missing")
        );
        assert_eq!(
            message(&|t| t.push(t[at(t, m)].clone())),
            format!("argument `tensors`: `{m}` comes twice")
        );
        assert_eq!(
            message(&|t| t.push(NamedTensor { name: "m.x".into(), ..t[0].clone() })),
            "argument `tensors`: `m.x` belongs to no parameter"
        );
        assert_eq!(
            message(&|t| {
                let i = at(t, m);
                t[i].shape = vec![1, 5];
            }),
            format!("tensor `{m}` has shape [1, 5], expected [5]")
        );
        assert_eq!(
            message(&|t| {
                let i = at(t, m);
                assert!(t[i].values.to_mut().pop().is_some());
            }),
            format!("tensor `{m}` has shape [4], expected [5]")
        );
        assert_eq!(
            message(&set(m, f32::NAN)),
            format!("argument `tensors`: `{m}` has NaN, which no step makes")
        );
        assert_eq!(
            message(&set("v.embeddings.weight", -1.0)),
            "argument `tensors`: `v.embeddings.weight` has -1, which no step makes"
        );
        for bad in [0.5, 65_536.0] {
            let want =
                format!("argument `tensors`: `step` has {bad}, expected integers of 16 bits");
            assert_eq!(message(&set("step", bad)), want);
        }
        assert_eq!(other.tensors(), fresh.tensors());
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let start = parameters(20_000);
                let mut moved = start.clone();
                let mut optimizer = Optimizer::new(config(), &start).unwrap();
                let norms: Vec<f64> = (0..3)
                    .map(|t| optimizer.step(&mut moved, &gradients(&start, t), 1.0, LR).unwrap())
                    .collect();
                let ema = optimizer.average("embeddings.weight").unwrap().to_vec();
                (norms, moved, ema)
            })
        };
        assert!(run(1) == run(2) && run(1) == run(5));
    }

    #[test]
    fn what_is_out_of_range_is_named() {
        let good = AdamWConfig::default();
        good.validate().unwrap();
        for (bad, want) in [
            (
                AdamWConfig { beta1: 1.0, ..good.clone() },
                "argument `beta1`: expected a number >= 0 and < 1, found 1",
            ),
            (
                AdamWConfig { beta2: -0.1, ..good.clone() },
                "argument `beta2`: expected a number >= 0 and < 1, found -0.1",
            ),
            (
                AdamWConfig { eps: 0.0, ..good.clone() },
                "argument `eps`: expected a finite number > 0, found 0",
            ),
            (
                AdamWConfig { weight_decay: f64::INFINITY, ..good.clone() },
                "argument `weight_decay`: expected a finite number >= 0, found inf",
            ),
            (
                AdamWConfig { max_grad_norm: f64::NAN, ..good.clone() },
                "argument `max_grad_norm`: expected a finite number >= 0, found NaN",
            ),
            (
                AdamWConfig { ema_decay: 1.0, ..good.clone() },
                "argument `ema_decay`: expected a number >= 0 and < 1, found 1",
            ),
        ] {
            assert_eq!(bad.validate().unwrap_err().to_string(), want);
        }
        let read: AdamWConfig =
            serde_json::from_str(r#"{"beta2": 0.99, "ema_decay": 0.5}"#).unwrap();
        assert_eq!(read, AdamWConfig { beta2: 0.99, ema_decay: 0.5, ..good });
        assert!(serde_json::from_str::<AdamWConfig>(r#"{"betas": 1}"#).is_err());
    }
}
