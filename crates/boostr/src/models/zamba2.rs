//! Zamba2 language models (Glorioso et al., 2024, arXiv 2411.15242).
//!
//! Mamba-2 layers, of which some, the hybrid ones, have attention and a feed-forward part before their
//! mixer. Unlike in other hybrids these come from a few blocks that take turns: hybrid layer k, counted
//! among hybrid layers alone, uses block k mod `num_mem_blocks`, whose weights are there once. What is a
//! layer's own are low-rank adapters beside the block's projections, and `linear` behind it.
//!
//! ```text
//! e ─┬──────────────────────────────────────── ...   the embeddings, seen again by each block
//!    │  ┌───────────────────────────────────────────────┐
//! h ─┴─ + ─ block ─ linear ─ + ─ input_layernorm ─ mamba ─ + ─ ...   n_layer times; hybrid layers alone
//!       └────────────────────┘                                      have block and linear
//!
//! block: [h | e] ─ input_layernorm ─ self_attn ─ pre_ff_layernorm ─ feed_forward      nothing is added back
//! ```
//!
//! Loads transformers' `Zamba2ForCausalLM`. GGUF has no architecture for it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use super::fields::{Fields, Need::Or, Need::Required};
use super::{Family, Frame, Layer, Names, expand_of};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{
    Adapter, Attention, AttentionConfig, Batch, LayerSpec, Linear, Mamba2Mixer, MixerConfig,
    MlpConfig, Params, RmsNorm,
};
use crate::ops::{Activation, ActivationOps};

const NAMES: Names = Names {
    embeddings: "model.embed_tokens",
    layers: "model.layers",
    norm: "model.final_layernorm",
    head: "lm_head",
};
/// What stands between a layer and the parameters of its block.
const SHARED: &str = "shared_transformer";
/// Added to the mean of squares of the gated norms, whatever the other norms have.
const GATED_NORM_EPS: f32 = 1e-5;
/// Tokens that `use_long_context` makes a model for.
const LONG_CONTEXT: usize = 16384;

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Ids that the tokenizer may give; the embedding may have more rows.
    pub vocab_size: usize,
    /// Whether the head is the embedding; `None` when the file does not say.
    pub tie_embeddings: Option<bool>,
    /// Added to the mean of squares of norms, but for the gated ones.
    pub norm_eps: f32,
    /// Longest context that the model was made for.
    pub max_position: usize,
    /// Which layers are hybrid.
    pub hybrid: Vec<bool>,
    /// Blocks that hybrid layers take in turn.
    pub num_mem_blocks: usize,
    /// Width of the adapters between their two matrices.
    pub adapter_rank: usize,
    /// Whether queries, keys and values have adapters; the feed-forward part always has.
    pub attention_adapters: bool,
    /// Every layer's mixer.
    pub mixer: MixerConfig,
    /// Every block's attention.
    pub attention: AttentionConfig,
    /// Every block's feed-forward part.
    pub mlp: MlpConfig,
}

impl Config {
    /// The hybrid layers.
    fn hybrid_layers(&self) -> Vec<usize> {
        (0..self.hybrid.len()).filter(|&layer| self.hybrid[layer]).collect()
    }

    /// How many blocks there are: no more than are used.
    fn n_block(&self) -> usize {
        self.hybrid_layers().len().min(self.num_mem_blocks)
    }

    /// The name of a tensor under the first layer that has its block, where that is another.
    fn home(&self, name: &str) -> Option<String> {
        let (layer, rest) = split_layer(name)?;
        let part = rest.strip_prefix(SHARED)?;
        let hybrid = self.hybrid_layers();
        let index = hybrid.iter().position(|&hybrid| hybrid == layer)?;
        let first = hybrid[index % self.n_block()];
        part.starts_with('.').then(|| format!("model.layers.{first}.{SHARED}{part}"))
    }
}

/// The number of the layer that a tensor is of, and its name there.
fn split_layer(name: &str) -> Option<(usize, &str)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

/// Which layers are hybrid: a word for each layer, or the numbers of those that are.
fn hybrid(file: &ConfigFile) -> Result<Vec<bool>> {
    let n_layer = file.required(&["num_hidden_layers"], 1..=10_000)?;
    let ids = file.usizes("hybrid_layer_ids", 0..=n_layer - 1)?;
    let key = if file.has("layers_block_type") { "layers_block_type" } else { "layer_types" };
    let Some(types) = file.texts(key)? else {
        let missing = "missing (looked for layers_block_type, layer_types, hybrid_layer_ids)";
        let ids = ids.ok_or_else(|| file.error("layers_block_type", missing))?;
        return Ok((0..n_layer).map(|layer| ids.contains(&layer)).collect());
    };
    if types.len() != n_layer {
        let reason = format!("{} layers, but num_hidden_layers is {n_layer}", types.len());
        return Err(file.error(key, reason));
    }
    let is_hybrid = |kind: &&str| match *kind {
        "mamba" | "linear_attention" => Ok(false),
        "hybrid" => Ok(true),
        other => {
            let reason = format!("expected mamba, linear_attention or hybrid, found {other:?}");
            Err(file.error(key, reason))
        }
    };
    let hybrid = types.iter().map(is_hybrid).collect::<Result<Vec<bool>>>()?;
    let named: Vec<usize> = (0..n_layer).filter(|&layer| hybrid[layer]).collect();
    if let Some(ids) = ids.filter(|ids| *ids != named) {
        let reason = format!("{ids:?}, but by {key} it is {named:?}");
        return Err(file.error("hybrid_layer_ids", reason));
    }
    Ok(hybrid)
}

/// What hybrid layers share.
struct Block<B: Backend> {
    input_layernorm: RmsNorm<B>,
    self_attn: Attention<B>,
    pre_ff_layernorm: RmsNorm<B>,
    /// `[2 d_ff, d_model]`: gate, then up
    gate_up_proj: Linear<B>,
    down_proj: Linear<B>,
}

impl<B: Backend> Block<B> {
    fn load(config: &Config, params: &Params<'_, B>) -> Result<Self> {
        let MlpConfig { d_model, d_ff, bias, .. } = config.mlp;
        let norm = |name, width| RmsNorm::load(&params.under(name), width, config.norm_eps);
        let mlp = params.under("feed_forward");
        let linear = |name, shape| Linear::load(&mlp.under(name), shape, bias);
        Ok(Self {
            input_layernorm: norm("input_layernorm", config.attention.d_in)?,
            self_attn: Attention::load(&config.attention, &params.under("self_attn"))?,
            pre_ff_layernorm: norm("pre_ff_layernorm", d_model)?,
            gate_up_proj: linear("gate_up_proj", [2 * d_ff, d_model])?,
            down_proj: linear("down_proj", [d_model, d_ff])?,
        })
    }

    /// What the block makes of `x` `[T, 2 d_model]` for a layer with these adapters: `[T, d_model]`.
    fn forward(
        &self,
        client: &B::Client,
        x: &Tensor<B>,
        own: &Hybrid<B>,
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>> {
        let x = self.input_layernorm.forward(client, x)?;
        let mut qkv = self.self_attn.project(client, &x)?; // [T, H D], twice [T, Hk D]
        if let Some([of_q, of_k, of_v]) = &own.qkv_adapters {
            let [q, k, v] = qkv;
            qkv = [
                of_q.add_to(client, q, &x)?,
                of_k.add_to(client, k, &x)?,
                of_v.add_to(client, v, &x)?,
            ];
        }
        let y = self.self_attn.attend(client, qkv, batch)?;
        let y = self.self_attn.output(client, &y)?; // [T, d_model]

        let y = self.pre_ff_layernorm.forward(client, &y)?;
        let gate_up = self.gate_up_proj.forward(client, &y)?; // [T, 2 d_ff]
        let gate_up = own.gate_up_adapter.add_to(client, gate_up, &y)?;
        let d_ff = gate_up.shape()[1] / 2;
        let [gate, up] = [gate_up.narrow(1, 0, d_ff)?, gate_up.narrow(1, d_ff, d_ff)?];
        self.down_proj.forward(client, &client.glu(Activation::Gelu, &gate, &up)?)
    }

    fn weight_bytes(&self) -> usize {
        self.self_attn.weight_bytes()
            + self.gate_up_proj.weight().size_in_bytes()
            + self.down_proj.weight().size_in_bytes()
    }
}

/// What a hybrid layer has beside its mixer.
struct Hybrid<B: Backend> {
    block: Arc<Block<B>>,
    /// Beside the projections to queries, keys and values.
    qkv_adapters: Option<[Adapter<B>; 3]>,
    gate_up_adapter: Adapter<B>,
    linear: Linear<B>,
}

impl<B: Backend> Hybrid<B> {
    /// Loads the hybrid layer numbered `index` among them, whose own parameters are `params`. The adapters
    /// are under the name of the block, which is the first layer's that has it.
    fn load(config: &Config, index: usize, params: &Params<'_, B>) -> Result<Self> {
        let home = config.hybrid_layers()[index % config.n_block()];
        let shared = params.root().under(&format!("model.layers.{home}")).under(SHARED);
        let adapter = |name: &str, out, width| {
            let params = shared.under(name).under(&index.to_string());
            Adapter::load(&params, ["0", "1"], [out, config.adapter_rank, width], 1.0)
        };
        let AttentionConfig { d_in, nheads, nheads_kv, headdim, .. } = config.attention;
        let of = |part: &str, nheads| {
            adapter(&format!("self_attn.linear_{part}_adapter_list"), nheads * headdim, d_in)
        };
        let qkv =
            || -> Result<_> { Ok([of("q", nheads)?, of("k", nheads_kv)?, of("v", nheads_kv)?]) };
        let MlpConfig { d_model, d_ff, .. } = config.mlp;
        let gate_up = "feed_forward.gate_up_proj_adapter_list";
        Ok(Self {
            block: shared.once(|params| Block::load(config, params))?,
            qkv_adapters: config.attention_adapters.then(qkv).transpose()?,
            gate_up_adapter: adapter(gate_up, 2 * d_ff, d_model)?,
            linear: Linear::load(&params.under("linear"), [d_model; 2], false)?,
        })
    }

    fn weight_bytes(&self) -> usize {
        let adapters = self.qkv_adapters.iter().flatten().chain([&self.gate_up_adapter]);
        let own = adapters.map(Adapter::weight_bytes).sum::<usize>();
        own + self.linear.weight().size_in_bytes() + self.block.weight_bytes()
    }
}

struct MambaLayer<B: Backend> {
    hybrid: Option<Hybrid<B>>,
    input_layernorm: RmsNorm<B>,
    mamba: Mamba2Mixer<B>,
}

impl<B: Backend> Layer<B> for MambaLayer<B> {
    fn forward(&self, client: &B::Client, h: Tensor<B>, batch: &mut Batch<B>) -> Result<Tensor<B>> {
        let mut u = h.clone();
        if let Some(hybrid) = &self.hybrid {
            let x = client.concat_columns(&h, batch.embeddings())?; // [T, 2 d_model]
            let t = hybrid.block.forward(client, &x, hybrid, batch)?; // [T, d_model]
            u = hybrid.linear.forward_onto(client, &t, u, 1.0)?;
        }
        let u = self.input_layernorm.forward(client, &u)?;
        self.mamba.forward_onto(client, &u, (h, 1.0), batch)
    }

    /// A block counts for every layer that uses it.
    fn weight_bytes(&self) -> usize {
        self.mamba.weight_bytes() + self.hybrid.as_ref().map_or(0, Hybrid::weight_bytes)
    }
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &["zamba2"]
    }

    fn blank() -> Self {
        Self {
            vocab_size: 0,
            tie_embeddings: None,
            norm_eps: 1e-5,
            max_position: 0,
            hybrid: Vec::new(),
            num_mem_blocks: 1,
            adapter_rank: 128,
            attention_adapters: false,
            mixer: MixerConfig { norm_eps: GATED_NORM_EPS, ..MixerConfig::new(0, 0, 0) },
            attention: AttentionConfig::new(0, 0, 0, 0),
            mlp: MlpConfig { act: Activation::Gelu, ..MlpConfig::swiglu(0, 0) },
        }
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        let hybrid_layers = self.hybrid_layers();
        let (m, a, mlp) = (&mut self.mixer, &mut self.attention, &mut self.mlp);
        let mut expand = if f.writes_json() { expand_of(m)? } else { 2 };
        f.constant("architectures", vec!["Zamba2ForCausalLM"]);
        f.constant("model_type", "zamba2");
        f.size(["hidden_size", ""], &mut m.d_model, Required)?;
        if let Some(file) = f.json() {
            self.hybrid = hybrid(file)?;
            (a.d_in, a.d_model, mlp.d_model) = (2 * m.d_model, m.d_model, m.d_model);
        }
        f.constant("num_hidden_layers", self.hybrid.len());
        let kind = |&is_hybrid: &bool| if is_hybrid { "hybrid" } else { "mamba" };
        f.constant("layers_block_type", self.hybrid.iter().map(kind).collect::<Vec<_>>());
        f.constant("hybrid_layer_ids", hybrid_layers);
        f.size(["num_mem_blocks", ""], &mut self.num_mem_blocks, Or(1))?;
        let adapters = ["use_shared_attention_adapter|use_shared_attention_lora", ""];
        f.flag(adapters, &mut self.attention_adapters, Or(false))?;
        f.size(["adapter_rank|lora_rank", ""], &mut self.adapter_rank, Or(128))?;
        f.size(["num_attention_heads", ""], &mut a.nheads, Or(32))?;
        f.size(["num_key_value_heads", ""], &mut a.nheads_kv, Or(a.nheads))?;
        if let Some(file) = f.json() {
            let (nheads, width) = (a.nheads, a.d_in);
            if !width.is_multiple_of(nheads) {
                let reason =
                    format!("{nheads} heads do not divide 2 * hidden_size = {width} channels");
                return Err(file.error("num_attention_heads", reason));
            }
            a.headdim = width / nheads;
            a.scale = (a.headdim as f32 / 2.0).sqrt().recip();
        }
        f.constant("attention_hidden_size", a.d_in);
        f.constant("attention_head_dim", a.headdim);
        let (mut has_rope, mut is_long) = (a.rope.is_some(), false);
        f.flag(["use_mem_rope", ""], &mut has_rope, Or(false))?;
        f.flag(["use_long_context", ""], &mut is_long, Or(false))?;
        f.context(&mut self.max_position, 4096)?;
        self.max_position = if is_long { LONG_CONTEXT } else { self.max_position };
        let wide = m.d_model.saturating_mul(4);
        f.size(["intermediate_size", ""], &mut mlp.d_ff, Or(wide))?;
        f.activation("hidden_act", &["gelu"])?;
        f.flag(["add_bias_linear", ""], &mut mlp.bias, Or(false))?;
        f.norm_eps("rms_norm_eps", &mut self.norm_eps, 1e-5)?;
        f.size(["mamba_expand", ""], &mut expand, Or(2))?;
        f.size(["n_mamba_heads", ""], &mut m.nheads, Or(8))?;
        if let Some(file) = f.json() {
            let (heads, d_inner) = (m.nheads, m.d_model.saturating_mul(expand));
            if !d_inner.is_multiple_of(heads) {
                let reason = format!(
                    "{heads} heads do not divide mamba_expand * hidden_size = {d_inner} channels"
                );
                return Err(file.error("n_mamba_heads", reason));
            }
            m.headdim = d_inner / heads;
            (m.in_bias, m.out_bias) = (mlp.bias, mlp.bias);
        }
        f.constant("mamba_headdim", m.headdim);
        f.size(["mamba_ngroups", ""], &mut m.ngroups, Or(1))?;
        f.size(["mamba_d_state", ""], &mut m.d_state, Or(64))?;
        f.size(["mamba_d_conv", ""], &mut m.d_conv, Or(4))?;
        f.constant("use_conv_bias", m.conv_bias);
        f.limits("time_step_limit", &mut m.dt_limit)?;
        if has_rope {
            f.rope(&mut a.rope, a.headdim, 1.0)?;
        }
        // The authors' code and transformers 4 have another base where `use_long_context` is set.
        // transformers 5 does not, and writes the base that it uses into `rope_parameters`.
        let is_old = f.json().is_some_and(|file| !file.has("rope_parameters"));
        if let Some(rope) = a.rope.as_mut().filter(|_| is_long && is_old && a.headdim > 2) {
            let headdim = a.headdim as f64;
            rope.theta *= 8f64.powf(headdim / (headdim - 2.0));
        }
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)?;
        self.tie_embeddings = self.tie_embeddings.or(Some(true));
        Ok(())
    }

    fn name(&self) -> &'static str {
        "zamba2"
    }

    fn frame(&self) -> Frame {
        Frame {
            tie_embeddings: self.tie_embeddings,
            ..Frame::new(NAMES, self.mixer.d_model, self.vocab_size, self.norm_eps)
        }
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let layer = |&is_hybrid: &bool| {
            let layer = LayerSpec::of(self.mixer.clone());
            if is_hybrid { layer.and(self.attention.clone()).and(self.mlp.clone()) } else { layer }
        };
        self.hybrid.iter().map(layer).collect()
    }

    fn layer<B: Backend>(&self, i: usize, params: &Params<'_, B>) -> Result<Box<dyn Layer<B>>> {
        let index = self.hybrid_layers().iter().position(|&hybrid| hybrid == i);
        let hybrid = index.map(|index| Hybrid::load(self, index, params)).transpose()?;
        let inner = params.under("mamba_decoder");
        let params = if hybrid.is_some() { &inner } else { params };
        let (norm, width) = (params.under("input_layernorm"), self.mixer.d_model);
        Ok(Box::new(MambaLayer {
            hybrid,
            input_layernorm: RmsNorm::load(&norm, width, self.norm_eps)?,
            mamba: Mamba2Mixer::load(&self.mixer, &params.under("mamba"))?,
        }))
    }

    /// A layer of a block is one of every hybrid layer that uses it.
    fn shared_as(&self, layer: &str) -> Vec<String> {
        let hybrid = self.hybrid_layers();
        let name = self.home(layer).unwrap_or_default();
        let of = split_layer(&name)
            .and_then(|(home, rest)| Some((hybrid.iter().position(|&i| i == home)?, rest)));
        let Some((first, rest)) = of else { return vec![layer.to_owned()] };
        let users = hybrid.iter().skip(first).step_by(self.n_block());
        users.map(|user| format!("model.layers.{user}.{rest}")).collect()
    }

    /// Leaves each shared weight once, under the first layer that has it.
    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        let mut tensors = BTreeMap::new();
        for (name, entry) in checkpoint.iter() {
            match tensors.entry(self.home(name).unwrap_or_else(|| name.to_owned())) {
                Entry::Vacant(place) => {
                    place.insert((name, entry.clone()));
                }
                Entry::Occupied(place) => {
                    let (first, known) = place.get();
                    let is_same = known.dtype == entry.dtype
                        && known.shape == entry.shape
                        && *known.data == *entry.data;
                    if !is_same {
                        let [first, name] = [*first, name].map(str::escape_debug);
                        let reason =
                            format!("`{first}` and `{name}` are one shared weight, but not equal");
                        return Err(Error::Tensors { path: checkpoint.path().into(), reason });
                    }
                }
            }
        }
        let tensors = tensors.into_iter().map(|(name, (_, entry))| (name, entry)).collect();
        checkpoint.replace(tensors);
        Ok(())
    }
}
