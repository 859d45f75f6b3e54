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

use serde_json::{Value, json};

use super::{
    Decoder, Family, Frame, MAX_SIZE, Names, expand_of, expect_activation, limit_json, read_limit,
    shortest,
};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{
    Adapter, Attention, AttentionConfig, Batch, LayerSpec, Linear, Mamba2Mixer, MixerConfig,
    MlpConfig, Params, RmsNorm, RopeConfig, Row, Tensors,
};
use crate::ops::{Activation, ActivationOps};

/// What `config.json` calls this family.
pub(super) const MODEL_TYPES: &[&str] = &["zamba2"];
/// What GGUF calls it: it has no name for it.
pub(super) const ARCHS: &[&str] = &[];

const NAMES: Names =
    Names { embeddings: "model.embed_tokens", norm: "model.final_layernorm", head: "lm_head" };
/// What stands between a layer and the parameters of its block.
const SHARED: &str = "shared_transformer";
/// The projections of attention that may have adapters, by the middle of the adapters' names.
const QKV: [&str; 3] = ["q", "k", "v"];
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
    pub(super) fn read(file: &ConfigFile) -> Result<Self> {
        let size = |keys: &[&str], default| -> Result<usize> {
            Ok(file.usize(keys, 1..=MAX_SIZE)?.unwrap_or(default))
        };
        expect_activation(file, "hidden_act", &["gelu"])?;
        let d_model = file.required(&["hidden_size"], 1..=MAX_SIZE)?;
        let bias = file.bool(&["add_bias_linear"])?.unwrap_or(false);
        let d_inner = d_model.saturating_mul(size(&["mamba_expand"], 2)?);
        let mamba_heads = size(&["n_mamba_heads"], 8)?;
        if !d_inner.is_multiple_of(mamba_heads) {
            let reason = format!(
                "{mamba_heads} heads do not divide mamba_expand * hidden_size = {d_inner} channels"
            );
            return Err(file.error("n_mamba_heads", reason));
        }
        let (nheads, width) = (size(&["num_attention_heads"], 32)?, 2 * d_model);
        if !width.is_multiple_of(nheads) {
            let reason = format!("{nheads} heads do not divide 2 * hidden_size = {width} channels");
            return Err(file.error("num_attention_heads", reason));
        }
        let headdim = width / nheads;
        let nheads_kv = size(&["num_key_value_heads"], nheads)?;
        let is_long = file.bool(&["use_long_context"])?.unwrap_or(false);
        let max_position = file.usize(&["max_position_embeddings"], 1..=1 << 40)?.unwrap_or(4096);
        let has_rope = file.bool(&["use_mem_rope"])?.unwrap_or(false);
        Ok(Self {
            vocab_size: file.required(&["vocab_size"], 1..=MAX_SIZE)?,
            tie_embeddings: Some(file.bool(&["tie_word_embeddings"])?.unwrap_or(true)),
            norm_eps: file.float(&["rms_norm_eps"], f32::MIN_POSITIVE..=1.0)?.unwrap_or(1e-5),
            max_position: if is_long { LONG_CONTEXT } else { max_position },
            hybrid: hybrid(file)?,
            num_mem_blocks: size(&["num_mem_blocks"], 1)?,
            adapter_rank: size(&["adapter_rank", "lora_rank"], 128)?,
            attention_adapters: file
                .bool(&["use_shared_attention_adapter", "use_shared_attention_lora"])?
                .unwrap_or(false),
            mixer: MixerConfig {
                ngroups: size(&["mamba_ngroups"], 1)?,
                d_state: size(&["mamba_d_state"], 64)?,
                d_conv: size(&["mamba_d_conv"], 4)?,
                in_bias: bias,
                out_bias: bias,
                dt_limit: read_limit(file, "time_step_limit")?,
                norm_eps: GATED_NORM_EPS,
                ..MixerConfig::new(d_model, mamba_heads, d_inner / mamba_heads)
            },
            attention: AttentionConfig {
                d_in: width,
                rope: has_rope.then(|| read_rope(file, headdim, is_long)).transpose()?,
                scale: (headdim as f32 / 2.0).sqrt().recip(),
                ..AttentionConfig::new(d_model, nheads, nheads_kv, headdim)
            },
            mlp: MlpConfig {
                act: Activation::Gelu,
                bias,
                ..MlpConfig::swiglu(
                    d_model,
                    size(&["intermediate_size"], d_model.saturating_mul(4))?,
                )
            },
        })
    }

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

/// Rotary positions; `is_long` changes their base.
///
/// The authors' code and transformers 4 multiply `rope_theta` where `use_long_context` is set;
/// transformers 5 does not, and writes the base that it uses into `rope_parameters`.
fn read_rope(file: &ConfigFile, headdim: usize, is_long: bool) -> Result<RopeConfig> {
    let mut rope = RopeConfig::read(file, headdim, 1.0)?;
    if is_long && !file.has("rope_parameters") && headdim > 2 {
        let headdim = headdim as f64;
        rope.theta *= 8f64.powf(headdim / (headdim - 2.0));
    }
    Ok(rope)
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

/// What a hybrid layer has of its own beside its mixer.
struct Hybrid<B: Backend> {
    /// Which of the blocks it uses.
    block: usize,
    /// Beside the projections to queries, keys and values.
    qkv_adapters: Option<[Adapter<B>; 3]>,
    gate_up_adapter: Adapter<B>,
    linear: Linear<B>,
}

struct Layer<B: Backend> {
    hybrid: Option<Hybrid<B>>,
    input_layernorm: RmsNorm<B>,
    mamba: Mamba2Mixer<B>,
}

/// The layers of a model, and the blocks that they share.
pub(super) struct Zamba2<B: Backend> {
    blocks: Vec<Block<B>>,
    layers: Vec<Layer<B>>,
}

impl<B: Backend> Zamba2<B> {
    pub(super) fn load(config: &Config, params: &Params<'_, B>) -> Result<Self> {
        let params = params.under("model").under("layers");
        let layer = |layer: usize| params.under(&layer.to_string());
        let hybrid = config.hybrid_layers();
        let homes = &hybrid[..config.n_block()];
        let blocks = homes.iter().map(|&home| Block::load(config, &layer(home).under(SHARED)));
        let layers = (0..config.hybrid.len()).map(|i| {
            let params = layer(i);
            let index = hybrid.iter().position(|&hybrid| hybrid == i);
            let own = index.map(|index| {
                let block = index % homes.len();
                Hybrid::load(config, [index, block], &params, &layer(homes[block]).under(SHARED))
            });
            let params = if index.is_some() { params.under("mamba_decoder") } else { params };
            Ok(Layer {
                hybrid: own.transpose()?,
                input_layernorm: RmsNorm::load(&params.under("input_layernorm"), config.norm_eps)?,
                mamba: Mamba2Mixer::load(&config.mixer, &params.under("mamba"))?,
            })
        });
        Ok(Self { blocks: blocks.collect::<Result<_>>()?, layers: layers.collect::<Result<_>>()? })
    }
}

impl<B: Backend> Block<B> {
    fn load(config: &Config, params: &Params<'_, B>) -> Result<Self> {
        let norm = |name| RmsNorm::load(&params.under(name), config.norm_eps);
        let mlp = params.under("feed_forward");
        let linear = |name| Linear::load(&mlp.under(name), config.mlp.bias);
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            self_attn: Attention::load(&config.attention, &params.under("self_attn"))?,
            pre_ff_layernorm: norm("pre_ff_layernorm")?,
            gate_up_proj: linear("gate_up_proj")?,
            down_proj: linear("down_proj")?,
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

impl<B: Backend> Hybrid<B> {
    /// Loads what the hybrid layer numbered `index` among them has under `own`, and its adapters, which
    /// are under its block's name, `shared`.
    fn load(
        config: &Config,
        [index, block]: [usize; 2],
        own: &Params<'_, B>,
        shared: &Params<'_, B>,
    ) -> Result<Self> {
        let adapter = |part: &str, list: &str| {
            let params = shared.under(part).under(list).under(&index.to_string());
            Adapter::load(&params, ["0", "1"], 1.0)
        };
        let qkv_adapters = || -> Result<_> {
            let [q, k, v] =
                QKV.map(|of| adapter("self_attn", &format!("linear_{of}_adapter_list")));
            Ok([q?, k?, v?])
        };
        Ok(Self {
            block,
            qkv_adapters: config.attention_adapters.then(qkv_adapters).transpose()?,
            gate_up_adapter: adapter("feed_forward", "gate_up_proj_adapter_list")?,
            linear: Linear::load(&own.under("linear"), false)?,
        })
    }

    fn weight_bytes(&self) -> usize {
        let adapters = self.qkv_adapters.iter().flatten().chain([&self.gate_up_adapter]);
        adapters.map(Adapter::weight_bytes).sum::<usize>() + self.linear.weight().size_in_bytes()
    }
}

impl<B: Backend> Decoder<B> for Zamba2<B> {
    fn n_layer(&self) -> usize {
        self.layers.len()
    }

    fn forward_layer(
        &self,
        client: &B::Client,
        i: usize,
        mut h: Tensor<B>,
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>> {
        let layer = &self.layers[i];
        let mut u = h.clone();
        if let Some(hybrid) = &layer.hybrid {
            let x = client.concat_columns(&h, batch.embeddings())?; // [T, 2 d_model]
            let block = &self.blocks[hybrid.block];
            let t = block.forward(client, &x, hybrid, batch)?; // [T, d_model]
            u = hybrid.linear.forward_onto(client, &t, u, 1.0)?;
        }
        let u = layer.input_layernorm.forward(client, &u)?;
        h = layer.mamba.forward_onto(client, &u, (h, 1.0), batch)?;
        Ok(h)
    }

    fn weight_bytes(&self) -> usize {
        let layer = |layer: &Layer<B>| {
            let hybrid = layer.hybrid.as_ref();
            let hybrid =
                hybrid.map(|own| own.weight_bytes() + self.blocks[own.block].weight_bytes());
            layer.mamba.weight_bytes() + hybrid.unwrap_or(0)
        };
        self.layers.iter().map(layer).sum()
    }
}

// Layouts of files

impl Family for Config {
    fn name(&self) -> &'static str {
        "zamba2"
    }

    fn arch(&self) -> Option<&'static str> {
        None
    }

    fn frame(&self) -> Frame {
        Frame {
            names: NAMES,
            d_model: self.mixer.d_model,
            vocab_size: self.vocab_size,
            pad_vocab_size_multiple: 1,
            tie_embeddings: self.tie_embeddings,
            norm_eps: self.norm_eps,
            embedding_scale: 1.0,
            logits_scale: 1.0,
        }
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let layer = |&is_hybrid: &bool| {
            let layer = LayerSpec::of(self.mixer.clone());
            if is_hybrid { layer.and(self.attention.clone()).and(self.mlp.clone()) } else { layer }
        };
        self.hybrid.iter().map(layer).collect()
    }

    fn parameters(&self, rows: usize, with_head: bool) -> Tensors {
        let mut tensors = Tensors::default();
        let width = self.mixer.d_model;
        NAMES.expect(&mut tensors, rows, width, with_head);
        for (layer, &is_hybrid) in self.hybrid.iter().enumerate() {
            let mut name = format!("model.layers.{layer}");
            if is_hybrid {
                tensors.add(format!("{name}.linear.weight"), &[width, width]);
                name.push_str(".mamba_decoder");
            }
            tensors.add(format!("{name}.input_layernorm.weight"), &[width]);
            self.mixer.expect(&mut tensors, &format!("{name}.mamba"));
        }
        let (hybrid, n_block) = (self.hybrid_layers(), self.n_block());
        for (index, &layer) in hybrid.iter().enumerate() {
            let name = format!("model.layers.{}.{SHARED}", hybrid[index % n_block]);
            if hybrid[index % n_block] == layer {
                self.expect_block(&mut tensors, &name);
            }
            self.expect_adapters(&mut tensors, &name, index);
        }
        tensors
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        Err(no_gguf())
    }

    fn write_gguf(&self, _: &mut Metadata) -> Result<()> {
        Err(no_gguf())
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

    fn to_json(&self) -> Result<Value> {
        let Self { mixer, attention, .. } = self;
        let expand = expand_of(mixer)?;
        let kind = |&is_hybrid: &bool| if is_hybrid { "hybrid" } else { "mamba" };
        let mut json = json!({
            "architectures": ["Zamba2ForCausalLM"],
            "model_type": "zamba2",
            "hidden_size": mixer.d_model,
            "num_hidden_layers": self.hybrid.len(),
            "layers_block_type": self.hybrid.iter().map(kind).collect::<Vec<_>>(),
            "hybrid_layer_ids": self.hybrid_layers(),
            "num_mem_blocks": self.num_mem_blocks,
            "use_shared_attention_adapter": self.attention_adapters,
            "adapter_rank": self.adapter_rank,
            "num_attention_heads": attention.nheads,
            "num_key_value_heads": attention.nheads_kv,
            "attention_hidden_size": attention.d_in,
            "attention_head_dim": attention.headdim,
            "use_mem_rope": attention.rope.is_some(),
            "use_long_context": false,
            "max_position_embeddings": self.max_position,
            "intermediate_size": self.mlp.d_ff,
            "hidden_act": "gelu",
            "add_bias_linear": self.mlp.bias,
            "rms_norm_eps": shortest(self.norm_eps),
            "mamba_expand": expand,
            "n_mamba_heads": mixer.nheads,
            "mamba_headdim": mixer.headdim,
            "mamba_ngroups": mixer.ngroups,
            "mamba_d_state": mixer.d_state,
            "mamba_d_conv": mixer.d_conv,
            "use_conv_bias": mixer.conv_bias,
            "time_step_limit": limit_json(mixer.dt_limit),
        });
        if let Some(rope) = &attention.rope {
            rope.write_json(&mut json, attention.headdim)?;
        }
        Ok(json)
    }
}

impl Config {
    /// Adds a block's parameters to `tensors`, under `name`.
    fn expect_block(&self, tensors: &mut Tensors, name: &str) {
        let MlpConfig { d_model, d_ff, bias, .. } = self.mlp;
        tensors.add(format!("{name}.input_layernorm.weight"), &[self.attention.d_in]);
        self.attention.expect(tensors, &format!("{name}.self_attn"));
        tensors.add(format!("{name}.pre_ff_layernorm.weight"), &[d_model]);
        for (projection, shape) in
            [("gate_up_proj", [2 * d_ff, d_model]), ("down_proj", [d_model, d_ff])]
        {
            let name = format!("{name}.feed_forward.{projection}");
            tensors.add(format!("{name}.weight"), &shape);
            if bias {
                tensors.add(format!("{name}.bias"), &shape[..1]);
            }
        }
    }

    /// Adds the adapters of a hybrid layer, by its number among them, under its block's `name`.
    fn expect_adapters(&self, tensors: &mut Tensors, name: &str, index: usize) {
        let mut add = |name: String, d_in: usize, d_out: usize| {
            tensors.add(format!("{name}.{index}.0.weight"), &[self.adapter_rank, d_in]);
            tensors.add(format!("{name}.{index}.1.weight"), &[d_out, self.adapter_rank]);
        };
        let AttentionConfig { d_in, nheads, nheads_kv, headdim, .. } = self.attention;
        for (of, nheads) in QKV.into_iter().zip([nheads, nheads_kv, nheads_kv]) {
            if self.attention_adapters {
                add(format!("{name}.self_attn.linear_{of}_adapter_list"), d_in, nheads * headdim);
            }
        }
        let MlpConfig { d_model, d_ff, .. } = self.mlp;
        add(format!("{name}.feed_forward.gate_up_proj_adapter_list"), d_model, 2 * d_ff);
    }
}

fn no_gguf() -> Error {
    let what = "file: GGUF has no architecture for zamba2; write a folder".into();
    Error::Unsupported { what }
}
