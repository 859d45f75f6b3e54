//! Mixtures of experts: a router gives each token a few of many feed-forward layers.

use std::fmt;

use serde_json::{Map, Value, json};

use super::linear::Linear;
use super::mlp::{Mlp, MlpConfig};
use super::params::Params;
use super::part::{Load, Module, Part, module};
use crate::backend::{Backend, Tensor};
use crate::error::{Error, Result};
use crate::ops::{self, Activation, ActivationOps, ExpertWeights, LinearOps, sigmoid, softmax};

pub use crate::ops::Routing;

/// Rows of experts that are computed together.
const TOGETHER: usize = 64;

/// Keeps the sum of weights from being 0, in most models.
const SUM_EPS: f32 = 1e-20;

/// Sizes and options of a mixture of experts.
#[derive(Clone, PartialEq)]
pub struct MoeConfig {
    /// Each expert; its width is that in which experts work.
    pub expert: MlpConfig,
    /// Experts in all.
    pub experts: usize,
    /// Experts of each token.
    pub used: usize,
    /// How they are chosen.
    pub routing: Routing,
    /// Experts come in groups, of which the best `topk_group` are looked at; 1 and 1 for no groups.
    pub ngroups: usize,
    /// See `ngroups`.
    pub topk_group: usize,
    /// Whether the weights of a token's experts are made to sum to 1.
    pub normalized: bool,
    /// Added to their sum before that.
    pub sum_eps: f32,
    /// Whether the router has a bias of each expert, which chooses and does not weigh; with [`Routing::Sigmoid`] alone.
    pub biased: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// Width of the input of the router, and of a latent pair of projections around the experts when
    /// it is not theirs.
    pub d_model: usize,
}

/// As a derived one, without options that most mixtures do not have: fingerprints of models know this text.
impl fmt::Debug for MoeConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("MoeConfig");
        text.field("expert", &self.expert)
            .field("experts", &self.experts)
            .field("used", &self.used)
            .field("routing", &self.routing)
            .field("ngroups", &self.ngroups)
            .field("topk_group", &self.topk_group)
            .field("normalized", &self.normalized)
            .field("scale", &self.scale)
            .field("d_model", &self.d_model);
        if self.sum_eps != SUM_EPS {
            text.field("sum_eps", &self.sum_eps);
        }
        if !self.biased {
            text.field("biased", &false);
        }
        text.finish()
    }
}

impl MoeConfig {
    /// Experts of which `routing` chooses among all, with the weights that it gives; as yet there are none of them.
    #[must_use]
    pub fn new(d_model: usize, expert: MlpConfig, routing: Routing) -> Self {
        Self {
            expert,
            experts: 0,
            used: 0,
            routing,
            ngroups: 1,
            topk_group: 1,
            normalized: false,
            sum_eps: SUM_EPS,
            biased: true,
            scale: 1.0,
            d_model,
        }
    }

    fn has_latent(&self) -> bool {
        self.expert.d_model != self.d_model
    }
}

/// A mixture of experts: a router gives each token a few of many feed-forward layers.
///
/// Only the weights of chosen experts are read; the tokens of one expert are one product. A token's
/// sum is in the order of the experts' numbers, so it is the same in any company.
pub struct Moe<B: Backend> {
    config: MoeConfig,
    gate: Linear<B>,
    /// `[experts]`
    bias: Option<Vec<f32>>,
    experts: Vec<Mlp<B>>,
    /// Into the experts' width and back.
    latent: Option<[Linear<B>; 2]>,
    shared: Option<GatedExpert<B>>,
}

/// An expert that some tokens use.
struct Used {
    number: usize,
    /// The tokens.
    rows: Vec<usize>,
    /// Where they have it among their experts: in `[T, used]`.
    places: Vec<usize>,
}

impl<B: Backend> Moe<B> {
    /// Loads the layer.
    ///
    /// # Errors
    ///
    /// When a parameter is missing or no float.
    pub fn load(config: &MoeConfig, params: &Params<'_, B>) -> Result<Self> {
        let experts = params.under("experts").chosen();
        let (width, narrow) = (config.d_model, config.expert.d_model);
        let linear = |name, shape| Linear::load(&params.under(name), shape, false);
        let latent = || -> Result<_> {
            let into = linear("fc1_latent_proj", [narrow, width])?;
            Ok([into, linear("fc2_latent_proj", [width, narrow])?])
        };
        let bias = || params.values("gate.e_score_correction_bias", &[config.experts]);
        Ok(Self {
            gate: linear("gate", [config.experts, width])?,
            bias: (config.routing == Routing::Sigmoid && config.biased).then(bias).transpose()?,
            experts: params.each(config.experts, |i| {
                Mlp::load(&config.expert, &experts.under(&i.to_string()))
            })?,
            latent: config.has_latent().then(latent).transpose()?,
            shared: None,
            config: config.clone(),
        })
    }

    /// What the chosen experts give for each row `[T, d_model]`, and the one for all if there is one, times
    /// `factor`, added to `residual`.
    ///
    /// # Errors
    ///
    /// When the width disagrees or memory is short.
    pub fn forward_onto(
        &self,
        client: &B::Client,
        x: &Tensor<B>,
        residual: Tensor<B>,
        factor: f32,
    ) -> Result<Tensor<B>> {
        let mut first = vec![(&self.gate, x)];
        first.extend(self.latent.iter().map(|[into, _]| (into, x)));
        first.extend(self.shared.iter().flat_map(|shared| shared.first(x)));
        let mut first = Linear::forward_all(client, &first)?.into_iter();
        let scores = next(&mut first)?; // [T, experts]
        let chosen = self.config.choose(&ops::to_vec(&scores)?, self.bias.as_deref());
        let weights = client.expert_weights(&scores, &chosen, self.config.weights())?; // [T, used]
        let weights = weights.reshape(&[chosen.len(), 1])?;
        let x = if self.latent.is_some() { next(&mut first)? } else { x.clone() };
        let shared = self.shared.as_ref().map(|shared| shared.between(client, &mut first));
        let shared = shared.transpose()?;
        // The last projection of the one for all goes with the first ones of the others.
        let down = self.shared.iter().zip(&shared).map(|(of, (_, hidden))| (of.mlp.down(), hidden));
        let (mut down, mut of_shared) = (down.collect::<Vec<_>>(), None);
        let mut sum = ops::zeros(client, &[x.shape()[0], self.config.expert.d_model])?;
        for group in self.config.groups(&chosen) {
            let expert = |used: &Used| &self.experts[used.number];
            let inputs = group.iter().map(|used| client.select_rows(&x, &used.rows));
            let inputs: Vec<Tensor<B>> = inputs.collect::<Result<_>>()?;
            let wide = group.iter().zip(&inputs).flat_map(|(used, x)| expert(used).wide(x));
            let wide: Vec<_> = wide.chain(down.drain(..)).collect();
            let mut outputs = Linear::forward_all(client, &wide)?.into_iter();
            let hidden = group.iter().map(|used| expert(used).between(client, &mut outputs));
            let hidden: Vec<Tensor<B>> = hidden.collect::<Result<_>>()?;
            of_shared = of_shared.or_else(|| outputs.next());
            let last = group.iter().zip(&hidden).map(|(used, x)| (expert(used).down(), x));
            let last = Linear::forward_all(client, &last.collect::<Vec<_>>())?;
            for (used, y) in group.iter().zip(last) {
                let weights = client.select_rows(&weights, &used.places)?;
                sum = client.add_rows(sum, &y, &used.rows, &weights)?;
            }
        }
        let sum = match &self.latent {
            Some([_, back]) => back.forward_onto(client, &sum, residual, factor)?,
            None => client.add_scaled(residual, &sum, factor)?,
        };
        match shared.zip(of_shared) {
            None => Ok(sum),
            Some(((open, _), y)) => add_open::<B>(client, sum, &y, &open, factor),
        }
    }

    /// Bytes that one token's pass over the layer's matrices reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        let linear = |linear: &Linear<B>| linear.weight().size_in_bytes();
        let expert = self.experts.first().map_or(0, Mlp::weight_bytes);
        let latent: usize = self.latent.iter().flatten().map(linear).sum();
        let shared = self.shared.as_ref().map_or(0, GatedExpert::weight_bytes);
        linear(&self.gate) + latent + self.config.used * expert + shared
    }
}

module!(Moe of MoeConfig, |self, client, u, onto, _| self.forward_onto(client, u, onto.0, onto.1));

/// A mixture and an expert that every token gets beside it, times a factor of its own:
/// `sigmoid(shared_expert_gate · x) · shared_expert(x)`.
#[derive(Debug, Clone, PartialEq)]
pub struct GatedMixture {
    /// Those that are chosen from.
    pub moe: MoeConfig,
    /// The one that every token gets.
    pub shared: MlpConfig,
}

impl Load for GatedMixture {
    fn load<B: Backend>(&self, params: &Params<'_, B>) -> Result<Box<dyn Module<B>>> {
        let moe = Moe::load(&self.moe, params)?;
        let shared = Some(GatedExpert::load(&self.shared, params)?);
        Ok(Box::new(Moe { shared, ..moe }))
    }
}

/// The weights of the expert that every token gets: `shared_expert`, and the row `shared_expert_gate` `[1, d_model]`.
struct GatedExpert<B: Backend> {
    gate: Linear<B>,
    mlp: Mlp<B>,
}

impl<B: Backend> GatedExpert<B> {
    fn load(mlp: &MlpConfig, params: &Params<'_, B>) -> Result<Self> {
        Ok(Self {
            gate: Linear::load(&params.under("shared_expert_gate"), [1, mlp.d_model], false)?,
            mlp: Mlp::load(mlp, &params.under("shared_expert"))?,
        })
    }

    /// Its first products, of `x`.
    fn first<'a>(&'a self, x: &'a Tensor<B>) -> Vec<(&'a Linear<B>, &'a Tensor<B>)> {
        [vec![(&self.gate, x)], self.mlp.wide(x)].concat()
    }

    /// The factor of each row, `[T, 1]`, and what the last projection gets, of what the first products gave.
    fn between(
        &self,
        client: &B::Client,
        outputs: &mut impl Iterator<Item = Tensor<B>>,
    ) -> Result<(Tensor<B>, Tensor<B>)> {
        let open = client.activate(Activation::Sigmoid, &next(outputs)?)?;
        Ok((open, self.mlp.between(client, outputs)?))
    }

    fn weight_bytes(&self) -> usize {
        self.gate.weight().size_in_bytes() + self.mlp.weight_bytes()
    }
}

/// `residual + factor * open * y`, where `open` is `[T, 1]`.
fn add_open<B: Backend>(
    client: &B::Client,
    residual: Tensor<B>,
    y: &Tensor<B>,
    open: &Tensor<B>,
    factor: f32,
) -> Result<Tensor<B>> {
    let rows: Vec<usize> = (0..y.shape()[0]).collect();
    if factor == 1.0 {
        return client.add_rows(residual, y, &rows, open);
    }
    let none = ops::zeros(client, y.shape())?;
    client.add_scaled(residual, &client.add_rows(none, y, &rows, open)?, factor)
}

/// What the next product gave.
fn next<T>(outputs: &mut impl Iterator<Item = T>) -> Result<T> {
    let shape = || Error::Shape { name: "products".into(), expected: vec![1], got: vec![0] };
    outputs.next().ok_or_else(shape)
}

/// A mixture of experts as a part of a layer. Those that are chosen from are loaded as this part; the other stands
/// [beside](super::LayerSpec::beside) them.
#[derive(Debug, Clone, PartialEq)]
pub struct MoePart {
    /// Those that are chosen from.
    pub moe: MoeConfig,
    /// The one that every token gets beside them.
    pub shared: Option<MlpConfig>,
}

impl Load for MoePart {
    fn load<B: Backend>(&self, params: &Params<'_, B>) -> Result<Box<dyn Module<B>>> {
        self.moe.load(params)
    }
}

impl Part for MoePart {
    fn kind(&self) -> &'static str {
        "moe"
    }

    fn sizes(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("num_experts", self.moe.experts),
            ("num_experts_per_tok", self.moe.used),
            ("n_group", self.moe.ngroups),
            ("topk_group", self.moe.topk_group),
            ("expert intermediate_size", self.moe.expert.d_ff),
        ]
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        self.moe.check()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let shared = match &self.shared {
            Some(mlp) => format!(", and one of {} for all", mlp.d_ff),
            None => String::new(),
        };
        let MoeConfig { used, experts, expert, .. } = &self.moe;
        let text = format!("{used} of {experts} experts of width {}{shared}", expert.d_ff);
        vec![("feed-forward", text)]
    }

    fn to_json(&self) -> Map<String, Value> {
        let experts = json!({
            "experts": self.moe.experts,
            "used": self.moe.used,
            "width": self.moe.expert.d_ff,
            "shared": self.shared.as_ref().map(|mlp| mlp.d_ff),
        });
        [("feed_forward".to_owned(), experts)].into_iter().collect()
    }

    fn work_width(&self) -> usize {
        let shared = self.shared.as_ref().map_or(0, |mlp| mlp.d_ff);
        3 * self.moe.expert.d_ff.max(shared) + self.moe.d_model
    }

    fn experts(&self) -> usize {
        self.moe.experts
    }
}

impl MoeConfig {
    /// Refuses groups that do not divide the experts, and fewer experts to choose from than are chosen.
    fn check(&self) -> Result<(), (&'static str, String)> {
        let &Self { experts, used, ngroups, topk_group, .. } = self;
        if ngroups == 0 || !experts.is_multiple_of(ngroups) {
            return Err(("n_group", format!("{ngroups} groups do not divide {experts} experts")));
        }
        if topk_group > ngroups {
            return Err(("topk_group", format!("{topk_group} of {ngroups} groups")));
        }
        let open = experts / ngroups * topk_group;
        if used > open {
            let of = if topk_group < ngroups {
                format!(" of the best {topk_group} groups")
            } else {
                String::new()
            };
            return Err(("num_experts_per_tok", format!("{used} of {open} experts{of}")));
        }
        Ok(())
    }

    /// The experts that are used, in the order of their numbers, in groups that are computed together: small ones, while
    /// they have few rows. At least one group.
    fn groups(&self, chosen: &[usize]) -> Vec<Vec<Used>> {
        let mut of_expert: Vec<Vec<usize>> = vec![Vec::new(); self.experts];
        for (place, &number) in chosen.iter().enumerate() {
            of_expert[number].push(place);
        }
        let (mut groups, mut group, mut count) = (Vec::new(), Vec::new(), 0);
        for (number, places) in of_expert.into_iter().enumerate() {
            if places.is_empty() {
                continue;
            }
            if count > 0 && count + places.len() > TOGETHER {
                groups.push(std::mem::take(&mut group));
                count = 0;
            }
            count += places.len();
            let rows = places.iter().map(|place| place / self.used).collect();
            group.push(Used { number, rows, places });
        }
        groups.push(group);
        groups
    }

    /// What becomes of the scores of chosen experts.
    fn weights(&self) -> ExpertWeights {
        let &Self { routing, normalized, sum_eps, scale, .. } = self;
        ExpertWeights { routing, normalized, sum_eps, scale }
    }

    /// The experts of each token, in the order of their numbers, by the router's `scores`
    /// `[T, experts]`; the lower number wins among equals.
    fn choose(&self, scores: &[f32], bias: Option<&[f32]>) -> Vec<usize> {
        scores.chunks(self.experts.max(1)).flat_map(|scores| self.choose_of(scores, bias)).collect()
    }

    fn choose_of(&self, scores: &[f32], bias: Option<&[f32]>) -> Vec<usize> {
        let mut ranks: Vec<f32> = match self.routing {
            Routing::TopKSoftmax => scores.to_vec(),
            Routing::SoftmaxTopK => softmax(scores),
            Routing::Sigmoid => scores.iter().copied().map(sigmoid).collect(),
        };
        for (rank, bias) in ranks.iter_mut().zip(bias.unwrap_or_default()) {
            *rank += bias;
        }
        let per_group = self.experts / self.ngroups.max(1);
        if self.ngroups > self.topk_group && per_group > 0 {
            // A group counts as much as its two best.
            let sums: Vec<f32> = ranks
                .chunks(per_group)
                .map(|group| largest(group, 2).into_iter().map(|i| group[i]).sum())
                .collect();
            let kept = largest(&sums, self.topk_group);
            for (expert, rank) in ranks.iter_mut().enumerate() {
                if !kept.contains(&(expert / per_group)) {
                    *rank = f32::NEG_INFINITY;
                }
            }
        }
        let mut experts = largest(&ranks, self.used);
        experts.sort_unstable();
        experts
    }
}

/// The numbers of the `count` largest values, the first of equals first.
fn largest(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    order.truncate(count);
    order
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::backend::{Cpu, Recorded, cpu};
    use crate::checkpoint::{Bytes, Checkpoint, Dtype, TensorEntry};
    use crate::nn::Tensors;
    use crate::ops::Tape;

    /// Sums of at most 33 terms, four of them one after another, as a share of the largest result.
    const TOLERANCE: f64 = 2e-5;

    fn config(routing: Routing, used: usize) -> MoeConfig {
        MoeConfig { experts: 4, used, ..MoeConfig::new(4, MlpConfig::swiglu(4, 4), routing) }
    }

    impl MoeConfig {
        /// The experts of one token and their weights.
        fn route(&self, scores: &[f32], bias: Option<&[f32]>) -> Vec<(usize, f32)> {
            let experts = self.choose(scores, bias);
            let weights = self.weights().of(scores, &experts);
            experts.into_iter().zip(weights).collect()
        }
    }

    #[test]
    fn softmax_comes_after_the_choice_or_before_it() {
        let scores = [0.0, 2.0, 1.0, -1.0];
        let after = config(Routing::TopKSoftmax, 2).route(&scores, None);
        assert_eq!(after.iter().map(|e| e.0).collect::<Vec<_>>(), [1, 2]);
        assert!((after[0].1 - 1.0 / (1.0 + (-1.0f32).exp())).abs() < 1e-6);
        let before = config(Routing::SoftmaxTopK, 2).route(&scores, None);
        let all: f32 = scores.iter().map(|x| x.exp()).sum();
        assert!((before[0].1 - 2.0f32.exp() / all).abs() < 1e-6);
    }

    #[test]
    fn the_bias_chooses_and_does_not_weigh() {
        let config = MoeConfig { normalized: true, scale: 2.5, ..config(Routing::Sigmoid, 2) };
        let chosen = config.route(&[0.0, 2.0, 1.0, -1.0], Some(&[0.0, 0.0, -1.0, 1.0]));
        assert_eq!(chosen.iter().map(|e| e.0).collect::<Vec<_>>(), [1, 3]);
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let sum = sigmoid(2.0) + sigmoid(-1.0);
        assert!((chosen[1].1 - 2.5 * sigmoid(-1.0) / sum).abs() < 1e-6);
    }

    #[test]
    fn only_experts_of_the_best_groups_are_chosen() {
        let config = MoeConfig { ngroups: 2, topk_group: 1, ..config(Routing::Sigmoid, 2) };
        let chosen = config.route(&[3.0, -9.0, 2.0, 2.0], Some(&[0.0; 4]));
        assert_eq!(chosen.iter().map(|e| e.0).collect::<Vec<_>>(), [2, 3]);
    }

    /// Xorshift64: the same numbers everywhere.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }

        /// In 1..=most.
        fn size(&mut self, most: usize) -> usize {
            1 + (self.next() >> 33) as usize % most
        }

        fn coin(&mut self) -> bool {
            self.size(2) == 1
        }

        /// Uniform in -1..1.
        fn floats(&mut self, count: usize) -> Vec<f32> {
            let mut float = || (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
            (0..count).map(|_| float()).collect()
        }

        fn config(&mut self, routing: Routing) -> MoeConfig {
            let (d_model, d_ff) = (self.size(33), self.size(33));
            let width = if self.coin() { d_model } else { self.size(33) };
            let (ngroups, per_group) = (self.size(4), self.size(5));
            let topk_group = self.size(ngroups);
            let plain = MlpConfig::swiglu(width, d_ff);
            MoeConfig {
                expert: if self.coin() { plain } else { MlpConfig::relu2(width, d_ff) },
                experts: ngroups * per_group,
                used: self.size(topk_group * per_group),
                routing,
                ngroups,
                topk_group,
                normalized: self.coin(),
                sum_eps: if self.coin() { SUM_EPS } else { 1e-6 },
                biased: true,
                scale: if self.coin() { 1.0 } else { 2.5 },
                d_model,
            }
        }

        fn checkpoint(&mut self, config: &MoeConfig) -> Checkpoint {
            let load = |params: &Params<'_, Cpu>| Moe::load(config, &params.under("moe")).map(drop);
            let tensors = Params::list(&cpu(), load).unwrap();
            self.values_of(&tensors)
        }

        fn values_of(&mut self, tensors: &Tensors) -> Checkpoint {
            let entries = tensors.iter().map(|(name, shape)| {
                let spread = (3.0 / *shape.last().unwrap() as f32).sqrt();
                let values = self.floats(shape.iter().product());
                let values: Vec<f32> = values.iter().map(|x| spread * x).collect();
                let entry = TensorEntry {
                    dtype: Dtype::F32,
                    shape: shape.to_vec(),
                    data: Bytes::new(Dtype::F32.encode(&values).unwrap()),
                    file: Path::new("memory").into(),
                };
                (name.to_owned(), entry)
            });
            Checkpoint::from_entries("memory", entries.collect())
        }
    }

    /// What a mixture gives one token, in f64 and as its words have it: an expert is chosen when fewer
    /// than `used` are better. Also how near a choice was.
    fn defined(config: &MoeConfig, checkpoint: &Checkpoint, x: &[f32]) -> (Vec<f64>, f64) {
        let values = |name: &str| -> Vec<f64> {
            let entry = checkpoint.get(&format!("moe.{name}")).unwrap();
            entry.to_f32().unwrap().into_iter().map(f64::from).collect()
        };
        let product = |name: &str, x: &[f64]| -> Vec<f64> {
            let dot = |row: &[f64]| row.iter().zip(x).map(|(w, x)| w * x).sum();
            values(name).chunks_exact(x.len()).map(dot).collect()
        };
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let x: Vec<f64> = x.iter().copied().map(f64::from).collect();
        let scores = product("gate.weight", &x);
        let all: f64 = scores.iter().map(|x| x.exp()).sum();
        let weights: Vec<f64> = match config.routing {
            Routing::TopKSoftmax => scores.iter().map(|x| x.exp()).collect(),
            Routing::SoftmaxTopK => scores.iter().map(|x| x.exp() / all).collect(),
            Routing::Sigmoid => scores.iter().map(|&x| sigmoid(x)).collect(),
        };
        let mut ranks = match config.routing {
            Routing::TopKSoftmax => scores,
            Routing::SoftmaxTopK | Routing::Sigmoid => weights.clone(),
        };
        if config.routing == Routing::Sigmoid {
            let bias = values("gate.e_score_correction_bias");
            ranks.iter_mut().zip(bias).for_each(|(rank, bias)| *rank += bias);
        }
        let mut near = f64::INFINITY;
        let mut best = |ranks: &[f64], count: usize| -> Vec<usize> {
            for (i, a) in ranks.iter().enumerate() {
                near = ranks[..i].iter().fold(near, |near, b| near.min((a - b).abs()));
            }
            let is_best =
                |&i: &usize| ranks.iter().filter(|&&rank| rank > ranks[i]).count() < count;
            (0..ranks.len()).filter(is_best).collect()
        };
        let per_group = config.experts / config.ngroups;
        let groups: Vec<f64> = ranks
            .chunks_exact(per_group)
            .map(|group| best(group, 2).into_iter().map(|i| group[i]).sum())
            .collect();
        let groups = best(&groups, config.topk_group);
        let open: Vec<usize> =
            (0..config.experts).filter(|expert| groups.contains(&(expert / per_group))).collect();
        let ranks: Vec<f64> = open.iter().map(|&expert| ranks[expert]).collect();
        let chosen: Vec<usize> = best(&ranks, config.used).into_iter().map(|i| open[i]).collect();

        let sum: f64 = chosen.iter().map(|&expert| weights[expert]).sum();
        let is_share = config.normalized || config.routing == Routing::TopKSoftmax;
        let into = if config.has_latent() { product("fc1_latent_proj.weight", &x) } else { x };
        let mut y = vec![0.0; into.len()];
        for expert in chosen {
            let part =
                |part: &str, x: &[f64]| product(&format!("experts.{expert}.{part}.weight"), x);
            let up = part("up_proj", &into);
            let hidden: Vec<f64> = if config.expert.gated {
                let gate = part("gate_proj", &into);
                gate.iter().zip(up).map(|(gate, up)| gate * sigmoid(*gate) * up).collect()
            } else {
                up.iter().map(|x| x.max(0.0).powi(2)).collect()
            };
            let weight = weights[expert] / if is_share { sum } else { 1.0 };
            let weight = weight * f64::from(config.scale);
            y.iter_mut().zip(part("down_proj", &hidden)).for_each(|(y, part)| *y += weight * part);
        }
        let y = if config.has_latent() { product("fc2_latent_proj.weight", &y) } else { y };
        (y, near)
    }

    #[test]
    fn products_by_expert_equal_the_definition_by_token_and_a_token_has_the_same_bits_in_any_company()
     {
        let client = cpu();
        let mut random = Random(0x0123_4567_89ab_cdef);
        for trial in 0..120 {
            let routing = [Routing::TopKSoftmax, Routing::SoftmaxTopK, Routing::Sigmoid][trial % 3];
            let config = random.config(routing);
            let checkpoint = random.checkpoint(&config);
            let params = Params::<Cpu>::new(&checkpoint, &client);
            let moe = Moe::load(&config, &params.under("moe")).unwrap();
            let (width, tokens, factor) = (config.d_model, random.size(20), 0.75);
            let run = |x: &[f32], residual: &[f32]| {
                let shape = [x.len() / width, width];
                let [x, residual] = [x, residual].map(|x| ops::tensor(&client, x, &shape).unwrap());
                ops::to_vec(&moe.forward_onto(&client, &x, residual, factor).unwrap()).unwrap()
            };
            let [x, residual] = [(); 2].map(|()| random.floats(tokens * width));
            let batch = run(&x, &residual);
            for row in 0..tokens {
                let row = row * width..(row + 1) * width;
                assert_eq!(run(&x[row.clone()], &residual[row.clone()]), batch[row.clone()]);
                let (want, near) = defined(&config, &checkpoint, &x[row.clone()]);
                assert!(near > 1e-6, "a choice too near to compare: {near:e} in trial {trial}");
                let most = want.iter().fold(1.0f64, |most, y| most.max(y.abs()));
                for (i, want) in row.clone().zip(want) {
                    let want = f64::from(residual[i]) + f64::from(factor) * want;
                    let error = (f64::from(batch[i]) - want).abs();
                    assert!(error < TOLERANCE * most, "{config:?}: {error:e}");
                }
            }
            // Some of the rows, in another order and some of them twice.
            let picked: Vec<usize> = (0..23).map(|_| random.size(tokens) - 1).collect();
            let gather = |from: &[f32]| -> Vec<f32> {
                picked
                    .iter()
                    .flat_map(|&row| &from[row * width..(row + 1) * width])
                    .copied()
                    .collect()
            };
            assert_eq!(run(&gather(&x), &gather(&residual)), gather(&batch), "{config:?}");
        }
    }

    const ROWS: usize = 5;

    impl<B: Backend> GatedExpert<B> {
        /// What it gives alone, times `factor`, added to `residual`.
        fn forward_onto(
            &self,
            client: &B::Client,
            x: &Tensor<B>,
            residual: Tensor<B>,
            factor: f32,
        ) -> Result<Tensor<B>> {
            let mut first = Linear::forward_all(client, &self.first(x))?.into_iter();
            let (open, hidden) = self.between(client, &mut first)?;
            let y = self.mlp.down().forward(client, &hidden)?;
            add_open::<B>(client, residual, &y, &open, factor)
        }
    }

    /// An expert for all of width 6 between, and a head, of random weights.
    fn shared(random: &mut Random) -> (MlpConfig, Checkpoint) {
        let config = MlpConfig::swiglu(8, 6);
        let load = |params: &Params<'_, Cpu>| {
            params.under("head").weight("weight", [8, 8])?;
            GatedExpert::load(&config, &params.under("mlp")).map(drop)
        };
        let tensors = Params::list(&cpu(), load).unwrap();
        (config, random.values_of(&tensors))
    }

    #[test]
    fn an_expert_for_all_is_weighed_by_the_sigmoid_of_its_gate() {
        let mut random = Random(0x5eed);
        let (config, checkpoint) = shared(&mut random);
        let client = cpu();
        let params = Params::<Cpu>::new(&checkpoint, &client);
        let expert = GatedExpert::load(&config, &params.under("mlp")).unwrap();
        let [x, residual] = [(); 2].map(|()| random.floats(ROWS * 8));
        let product = |name: &str, x: &[f64]| -> Vec<f64> {
            let w = checkpoint.get(&format!("mlp.{name}.weight")).unwrap().to_f32().unwrap();
            let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
            w.chunks_exact(x.len()).map(dot).collect()
        };
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        for factor in [1.0, 0.75] {
            let [x, onto] =
                [&x, &residual].map(|values| ops::tensor(&client, values, &[ROWS, 8]).unwrap());
            let got = expert.forward_onto(&client, &x, onto, factor).unwrap();
            let (x, got) = (ops::to_vec(&x).unwrap(), ops::to_vec(&got).unwrap());
            for (t, x) in x.chunks_exact(8).enumerate() {
                let x: Vec<f64> = x.iter().copied().map(f64::from).collect();
                let open = sigmoid(product("shared_expert_gate", &x)[0]);
                let gate = product("shared_expert.gate_proj", &x);
                let up = product("shared_expert.up_proj", &x);
                let hidden = gate.iter().zip(up).map(|(gate, up)| gate * sigmoid(*gate) * up);
                let y = product("shared_expert.down_proj", &hidden.collect::<Vec<_>>());
                for (i, y) in (t * 8..).zip(y) {
                    let want = f64::from(residual[i]) + f64::from(factor) * open * y;
                    assert!((f64::from(got[i]) - want).abs() < TOLERANCE, "{i}: {} {want}", got[i]);
                }
            }
        }
    }

    #[test]
    fn along_each_gradient_of_an_expert_for_all_a_loss_changes_by_its_length() {
        let mut random = Random(0x5eed);
        let (config, checkpoint) = shared(&mut random);
        let [x, residual] = [(); 2].map(|()| random.floats(ROWS * 8));
        let loss = |checkpoint: &Checkpoint| {
            let tape = Tape::new(cpu(), |_| true);
            let params = Params::<Recorded>::new(checkpoint, &tape);
            let head = params.under("head").weight("weight", [8, 8]).unwrap();
            let expert = GatedExpert::load(&config, &params.under("mlp")).unwrap();
            let [x, onto] =
                [&x, &residual].map(|values| ops::tensor(&tape, values, &[ROWS, 8]).unwrap());
            let h = expert.forward_onto(&tape, &x, onto, 0.75).unwrap();
            let (targets, weights) = ([1, 0, 7, 3, 2], [1.0; ROWS]);
            let losses = tape.cross_entropy(&h, &head, 1.0, (&targets, &weights), false).unwrap();
            let sum: f64 = ops::to_vec(&losses).unwrap().into_iter().map(f64::from).sum();
            (sum, tape.backward().unwrap())
        };
        let (_, gradients) = loss(&checkpoint);
        let names: Vec<&str> = checkpoint.iter().map(|(name, _)| name).collect();
        assert_eq!(gradients.keys().collect::<Vec<_>>(), names);
        for (name, gradient) in gradients {
            let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            let moved = |step: f64| {
                let entries = checkpoint.iter().map(|(of, entry)| {
                    let mut values = entry.to_f32().unwrap();
                    if of == name {
                        let steps = gradient.iter().map(|g| (step * f64::from(*g) / norm) as f32);
                        values.iter_mut().zip(steps).for_each(|(x, step)| *x += step);
                    }
                    let data = Bytes::new(Dtype::F32.encode(&values).unwrap());
                    (of.to_owned(), TensorEntry { data, ..entry.clone() })
                });
                loss(&Checkpoint::from_entries("memory", entries.collect())).0
            };
            let step = 1.0 / 64.0;
            let slope = (moved(step) - moved(-step)) / (2.0 * step);
            assert!((slope - norm).abs() < 2e-3 * norm.max(0.05), "{name}: {slope} {norm}");
        }
    }
}
