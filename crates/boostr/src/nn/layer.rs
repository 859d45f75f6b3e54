//! What a layer is made of, and the weights of one.
//!
//! ```text
//! h ─┬─ norm ─┬─ part ─┬─ + ─┬─ norm ─ part ─ + ─┬─ part ─ norm ─ + ─ ...   step after step
//!    │        └─ part ─┘  │  └────────────────┘  └────────────────┘
//!    └────────────────────┘
//! ```

use std::any::{Any, TypeId, type_name};
use std::sync::Arc;

use super::batch::Batch;
use super::linear::RmsNorm;
use super::params::Params;
use super::part::{Load, Module, Part};
use super::slots::Slot;
use crate::backend::{Backend, Cpu, Recorded, Tensor};
use crate::error::{Error, Result};
use crate::ops::{self, ActivationOps, KvType, Level};

/// What one layer is made of: norms, and the parts that see what each gives, in the order in which rows pass them.
///
/// ```
/// use boostr::nn::{AttentionConfig, LayerSpec, MlpConfig};
///
/// let layer = LayerSpec::new(64, 1e-5)
///     .norm("input_layernorm")
///     .and("self_attn", AttentionConfig::new(64, 4, 2, 16))
///     .norm("post_attention_layernorm")
///     .and("mlp", MlpConfig::swiglu(64, 128));
/// assert_eq!(layer.kind(), "attention + mlp");
/// assert_eq!(layer.part::<MlpConfig>().unwrap().d_ff, 128);
/// assert_eq!(layer.slots()[0].name(), "kv");
/// ```
#[derive(Debug, Clone)]
pub struct LayerSpec {
    d_model: usize,
    norm_eps: f32,
    zero_centred: bool,
    parts: Vec<Arc<dyn Part>>,
    steps: Vec<Step>,
}

/// Weights side by side: each sees the normed rows, and adds to the residual stream.
#[derive(Debug, Clone, Default)]
struct Step {
    /// The name of the norm; without one the stream itself is seen.
    norm: Option<&'static str>,
    /// The norm is of what the weights give together, before it is added; they see the stream itself.
    is_after: bool,
    /// Its output is in what the norm sees, not in the stream.
    lead: Option<Placed>,
    parts: Vec<Placed>,
}

/// What has weights under a name, and factors of its input and its output.
#[derive(Debug, Clone)]
struct Placed {
    name: &'static str,
    config: Arc<dyn Any + Send + Sync>,
    loader: fn(TypeId) -> Option<Box<dyn Any>>,
    scales: [f32; 2],
}

/// [`Load::load`] of a type that is not known here.
type Loader<B> = fn(&dyn Any, &Params<'_, B>) -> Result<Box<dyn Module<B>>>;

/// The [`Loader`] of `T` for the backend of a type; `None` for a backend that models are not built for.
fn loader<T: Load>(backend: TypeId) -> Option<Box<dyn Any>> {
    // The backends that models are built for: one line each.
    if backend == TypeId::of::<Cpu>() {
        return Some(Box::new(load::<T, Cpu> as Loader<Cpu>));
    }
    if backend == TypeId::of::<Recorded>() {
        return Some(Box::new(load::<T, Recorded> as Loader<Recorded>));
    }
    None
}

fn load<T: Load, B: Backend>(
    config: &dyn Any,
    params: &Params<'_, B>,
) -> Result<Box<dyn Module<B>>> {
    let what = || Error::Unsupported { what: "weights of another type".into() };
    config.downcast_ref::<T>().ok_or_else(what)?.load(params)
}

/// Equal when the parts are.
impl PartialEq for LayerSpec {
    fn eq(&self, other: &Self) -> bool {
        let is_equal = |(a, b): (&Arc<dyn Part>, &Arc<dyn Part>)| a.is_equal(&**b);
        self.parts.len() == other.parts.len() && self.parts.iter().zip(&other.parts).all(is_equal)
    }
}

impl LayerSpec {
    /// A layer of nothing, whose norms are of rows of `d_model` and add `norm_eps` to the mean of squares.
    #[must_use]
    pub fn new(d_model: usize, norm_eps: f32) -> Self {
        Self { d_model, norm_eps, zero_centred: false, parts: Vec::new(), steps: Vec::new() }
    }

    /// The same, whose norms' weights are what their factors are above 1.
    #[must_use]
    pub fn zero_centred(self) -> Self {
        Self { zero_centred: true, ..self }
    }

    /// The same with one norm more, for the parts that come next.
    #[must_use]
    pub fn norm(mut self, name: &'static str) -> Self {
        self.steps.push(Step { norm: Some(name), ..Step::default() });
        self
    }

    /// The same with one norm more, of what the parts that come next give. They see the stream itself.
    #[must_use]
    pub fn norm_after(self, name: &'static str) -> Self {
        let mut layer = self.norm(name);
        layer.step().is_after = true;
        layer
    }

    /// The same with one part more. Its parameters are under `name`; parts of one norm stand side by side.
    #[must_use]
    pub fn and(self, name: &'static str, part: impl Part + Load + Clone) -> Self {
        self.described(part.clone()).beside(name, part)
    }

    /// The same with the description of a part that other weights of the layer have within them.
    #[must_use]
    pub fn described(mut self, part: impl Part) -> Self {
        self.parts.push(Arc::new(part));
        self
    }

    /// The same with weights beside the part before, in whose description they are.
    #[must_use]
    pub fn beside(mut self, name: &'static str, config: impl Load) -> Self {
        self.step().parts.push(Placed::new(name, config));
        self
    }

    /// The same with weights that see the stream before the last norm. The norm sees the sum of both.
    #[must_use]
    pub fn lead(mut self, name: &'static str, config: impl Load) -> Self {
        self.step().lead = Some(Placed::new(name, config));
        self
    }

    /// The same with factors of the input and the output of the last weights.
    #[must_use]
    pub fn scaled(mut self, input: f32, output: f32) -> Self {
        if let Some(placed) = self.step().parts.last_mut() {
            placed.scales = [input, output];
        }
        self
    }

    /// The step that weights are added to.
    fn step(&mut self) -> &mut Step {
        if self.steps.is_empty() {
            self.steps.push(Step::default());
        }
        let last = self.steps.len() - 1;
        &mut self.steps[last]
    }

    /// The layer with the weights of `params`.
    ///
    /// # Errors
    ///
    /// What [`Load::load`] returns; [`Error::Unsupported`] for a backend that models are not built for.
    pub fn load<B: Backend>(&self, params: &Params<'_, B>) -> Result<Layer<B>> {
        let place = |placed: &Placed| placed.load(self.d_model, params);
        let (eps, zero_centred) = (self.norm_eps, self.zero_centred);
        let norm = |name| RmsNorm::load(&params.under(name), self.d_model, eps, zero_centred);
        let step = |step: &Step| -> Result<_> {
            Ok(LoadedStep {
                lead: step.lead.as_ref().map(place).transpose()?,
                norm: step.norm.map(norm).transpose()?,
                is_after: step.is_after,
                parts: step.parts.iter().map(place).collect::<Result<_>>()?,
            })
        };
        Ok(Layer(self.steps.iter().map(step).collect::<Result<_>>()?))
    }

    /// The parts.
    pub fn parts(&self) -> impl Iterator<Item = &dyn Part> {
        self.parts.iter().map(|part| &**part)
    }

    /// The first part of a type.
    #[must_use]
    pub fn part<T: Part>(&self) -> Option<&T> {
        self.parts().find_map(|part| part.as_any().downcast_ref())
    }

    /// What the layer is, in a word for each part.
    #[must_use]
    pub fn kind(&self) -> String {
        self.parts().map(Part::kind).collect::<Vec<_>>().join(" + ")
    }

    /// What a sequence remembers of the layer, part by part.
    #[must_use]
    pub fn slots(&self) -> Vec<Slot> {
        self.parts().flat_map(Part::slots).collect()
    }

    /// Bytes of a sequence's state of this layer: the constant part, and what each token adds, up to the
    /// window if there is one.
    #[must_use]
    pub fn state_bytes(&self, level: Level, kind: KvType) -> (usize, usize) {
        let slots = self.slots();
        let constant = slots.iter().map(|slot| slot.fixed_bytes().unwrap_or(usize::MAX));
        let growing = slots.iter().map(|slot| slot.bytes_per_token(level, kind));
        (constant.fold(0, usize::saturating_add), growing.fold(0, usize::saturating_add))
    }

    /// Bytes of the growing part after `tokens`, at most.
    #[must_use]
    pub fn kv_bytes(&self, level: Level, kind: KvType, tokens: usize) -> usize {
        let slots = self.slots();
        slots.iter().map(|slot| slot.row_bytes(level, kind, tokens)).fold(0, usize::saturating_add)
    }

    /// Whether a sequence's state of the layer grows with each token.
    #[must_use]
    pub fn grows(&self) -> bool {
        self.slots().iter().any(Slot::grows)
    }

    /// Floats of one row that the layer keeps at once while it computes.
    #[must_use]
    pub fn work_width(&self) -> usize {
        self.parts().map(Part::work_width).max().unwrap_or(0)
    }
}

impl Placed {
    fn new<T: Load>(name: &'static str, config: T) -> Self {
        Self { name, config: Arc::new(config), loader: loader::<T>, scales: [1.0; 2] }
    }

    fn load<B: Backend>(&self, d_model: usize, params: &Params<'_, B>) -> Result<LoadedPart<B>> {
        let loader = (self.loader)(TypeId::of::<B>());
        let Some(load) = loader.as_ref().and_then(|of| of.downcast_ref::<Loader<B>>()) else {
            let what = format!("models on the backend {}", type_name::<B>());
            return Err(Error::Unsupported { what });
        };
        let [input, output] = self.scales;
        Ok(LoadedPart {
            module: load(&*self.config, &params.under(self.name))?,
            in_scale: params.factors(&[(d_model, input)])?,
            out_scale: output,
        })
    }
}

/// The weights of one layer: what it does between embedding and head.
pub struct Layer<B: Backend>(Vec<LoadedStep<B>>);

struct LoadedStep<B: Backend> {
    lead: Option<LoadedPart<B>>,
    norm: Option<RmsNorm<B>>,
    is_after: bool,
    parts: Vec<LoadedPart<B>>,
}

struct LoadedPart<B: Backend> {
    module: Box<dyn Module<B>>,
    /// `[d_model]`, all one factor; `None` where that is 1.
    in_scale: Option<Tensor<B>>,
    out_scale: f32,
}

impl<B: Backend> Layer<B> {
    /// Rows `h` `[T, d_model]` through the layer, whose states are in `batch`.
    ///
    /// # Errors
    ///
    /// When shapes disagree or memory is short.
    pub fn forward(
        &self,
        client: &B::Client,
        h: Tensor<B>,
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>> {
        self.0.iter().try_fold(h, |h, step| {
            if step.is_after {
                let zeros = ops::zeros(client, h.shape())?;
                let mut parts = step.parts.iter();
                let y = parts.try_fold(zeros, |y, part| part.add_to(client, &h, y, batch))?;
                return client.add_scaled(h, &step.normed(client, &y)?, 1.0);
            }
            let u = match &step.lead {
                None => step.normed(client, &h)?,
                Some(lead) => step.normed(client, &lead.add_to(client, &h, h.clone(), batch)?)?,
            };
            step.parts.iter().try_fold(h, |h, part| part.add_to(client, &u, h, batch))
        })
    }

    /// Bytes of matrices that one token's pass reads; those that layers share count for each.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        let parts = self.0.iter().flat_map(|step| step.lead.iter().chain(&step.parts));
        parts.map(|part| part.module.weight_bytes()).sum()
    }
}

impl<B: Backend> LoadedStep<B> {
    fn normed(&self, client: &B::Client, x: &Tensor<B>) -> Result<Tensor<B>> {
        self.norm.as_ref().map_or_else(|| Ok(x.clone()), |norm| norm.forward(client, x))
    }
}

impl<B: Backend> LoadedPart<B> {
    fn add_to(
        &self,
        client: &B::Client,
        u: &Tensor<B>,
        h: Tensor<B>,
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>> {
        let scaled = match &self.in_scale {
            None => None,
            Some(factors) => Some(client.scale_columns(u, factors)?),
        };
        self.module.add_to(client, scaled.as_ref().unwrap_or(u), (h, self.out_scale), batch)
    }
}
