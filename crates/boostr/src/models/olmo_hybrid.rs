//! OLMo-Hybrid language models (Ai2, 2026): gated delta mixers whose states may change sign, and attention at a few
//! places, each followed by a gated feed-forward part.
//!
//! Layers of mixers have their norms before their parts. Layers of attention have them after, and see the stream
//! itself; queries and keys are normalised over the whole projection. Attention rotates with the position or knows none.
//!
//! ```text
//! mixer      h ─┬─ attention_layer_norm ─ linear_attn ─ + ─┬─ feedforward_layer_norm ─ mlp ─ + ─ ...
//!               └──────────────────────────────────────┘ └─────────────────────────────┘
//! attention  h ─┬─ self_attn ─ post_attention_layernorm ─ + ─┬─ mlp ─ post_feedforward_layernorm ─ + ─ ...
//!               └─────────────────────────────────────────┘ └────────────────────────────────────┘
//! ```
//!
//! Loads transformers' `OlmoHybridForCausalLM`, as published or saved again by transformers 5, which names some
//! tensors otherwise. GGUF has no architecture for it.

use serde_json::{Value, json};

use super::delta_hybrid::layer_list;
use super::fields::{Fields, Need::Missing, Need::Or};
use super::{Family, Frame, MAX_SIZE, Names};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::Result;
use crate::nn::{
    AttentionConfig, Change, DeltaConfig, LayerSpec, Layout, MlpConfig, Parameter, QkNorm,
    RopeConfig, Row, Stored,
};

/// What the mixers' norms add to the mean of squares, whatever the other norms add.
const MIXER_EPS: f32 = 1e-5;

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Ids that the tokenizer may give; the embedding may have more rows.
    pub vocab_size: usize,
    /// Whether the head is the embedding; `None` when the file does not say.
    pub tie_embeddings: Option<bool>,
    /// Added to the mean of squares of norms but for those of the mixers' outputs.
    pub norm_eps: f32,
    /// Longest context that the model was made for.
    pub max_position: usize,
    /// Every mixer.
    pub mixer: DeltaConfig,
    /// Every attention.
    pub attention: AttentionConfig,
    /// Which layers are attention; the others are mixers.
    pub is_attention: Vec<bool>,
    /// Every layer's feed-forward part.
    pub mlp: MlpConfig,
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &["olmo_hybrid"]
    }

    fn blank() -> Self {
        Self {
            vocab_size: 0,
            tie_embeddings: None,
            norm_eps: 1e-6,
            max_position: 65_536,
            mixer: DeltaConfig::new(0, [0; 2], [0; 2]),
            attention: AttentionConfig::new(0, 0, 0, 0),
            is_attention: Vec::new(),
            mlp: MlpConfig::swiglu(0, 0),
        }
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        let (a, m) = (&mut self.attention, &mut self.mixer);
        f.model("OlmoHybridForCausalLM", "olmo_hybrid");
        let mut n_layer = self.is_attention.len();
        f.transformer(
            (a, &mut self.mlp),
            &mut n_layer,
            &mut self.norm_eps,
            &mut self.max_position,
        )?;
        m.d_model = a.d_model;
        f.biases(false, (a, &mut self.mlp))?;
        let heads = a.nheads;
        f.size(["linear_num_key_heads", ""], &mut m.nheads_key, Or(heads))?;
        f.size(["linear_num_value_heads", ""], &mut m.nheads, Or(heads))?;
        // Three quarters of the model's width are keys.
        let d_key = 3 * m.d_model / (4 * m.nheads_key.max(1));
        f.size(["linear_key_head_dim", ""], &mut m.d_key, Or(d_key))?;
        f.size(["linear_value_head_dim", ""], &mut m.d_value, Or(2 * m.d_key))?;
        f.size(["linear_conv_kernel_dim", ""], &mut m.d_conv, Missing(4))?;
        let mut is_signed = m.beta_scale == 2.0;
        f.flag(["linear_allow_neg_eigval", ""], &mut is_signed, Missing(true))?;
        if f.reads() {
            m.beta_scale = if is_signed { 2.0 } else { 1.0 };
            (m.norm_eps, m.separate) = (MIXER_EPS, true);
            (a.qk_norm_eps, a.qk_norm) = (Some(self.norm_eps), QkNorm::Whole);
        }
        if let Some(file) = f.json() {
            // Each fourth, or the last where there are less.
            let every = n_layer.min(4);
            let by_class = || (1..=n_layer).map(|layer| layer.is_multiple_of(every)).collect();
            let layers = layer_list(file, n_layer)?.unwrap_or_else(by_class);
            for (kind, name) in [(true, "full_attention"), (false, "linear_attention")] {
                if !layers.contains(&kind) {
                    let reason = format!("expected one or more of {name}, found none of {n_layer}");
                    return Err(file.error("layer_types", reason));
                }
            }
            self.is_attention = layers;
        }
        let kind = |&is: &bool| if is { "full_attention" } else { "linear_attention" };
        let kinds: Vec<&str> = self.is_attention.iter().map(kind).collect();
        f.constant("layer_types", json!(kinds));
        // A base that is null is no positions; one that is not there at all is that of the class.
        let null_base = f.json().map(RopeConfig::null_base).transpose()?.flatten();
        if null_base.is_some() {
            a.rope = None;
        } else {
            if let Some(file) = f.json() {
                check_whole(file, a.headdim)?;
            }
            f.rope(&mut a.rope, a.headdim, 1.0)?;
        }
        if let Some(json) = f.json_mut() {
            let mut parameters = match json.get("rope_scaling") {
                None | Some(Value::Null) => json!({ "rope_type": "default" }),
                Some(scaling) => scaling.clone(),
            };
            parameters["rope_theta"] = json.get("rope_theta").cloned().unwrap_or_default();
            for key in ["rope_theta", "rope_scaling", "partial_rotary_factor"] {
                json.remove(key);
            }
            json.insert("rope_parameters".into(), parameters);
        }
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)
    }

    fn frame(&self) -> Frame {
        let names = Names::model("model.norm");
        Frame::new(names, self.attention.d_model, self.vocab_size, self.norm_eps)
            .tied(self.tie_embeddings)
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let layer = |&is_attention: &bool| {
            let layer = LayerSpec::new(self.attention.d_model, self.norm_eps);
            if is_attention {
                layer
                    .norm_after("post_attention_layernorm")
                    .and("self_attn", self.attention.clone())
                    .norm_after("post_feedforward_layernorm")
                    .and("mlp", self.mlp.clone())
            } else {
                layer
                    .norm("attention_layer_norm")
                    .and("linear_attn", self.mixer.clone())
                    .norm("feedforward_layer_norm")
                    .and("mlp", self.mlp.clone())
            }
        };
        self.is_attention.iter().map(layer).collect()
    }

    fn hf_table(&self) -> Vec<Row> {
        let row = |(file, part): (&str, &str)| {
            let name = |part| format!("model.layers.#.linear_attn.{part}.weight");
            Row::new(name(file), name(part))
        };
        [
            ("a_proj", "in_proj_a"),
            ("b_proj", "in_proj_b"),
            ("g_proj", "in_proj_z"),
            ("o_norm", "norm"),
            ("o_proj", "out_proj"),
        ]
        .map(row)
        .into()
    }

    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        checkpoint.rename(|name| {
            let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
            let norm = match rest.strip_suffix(".weight")? {
                "input_layernorm" => "attention_layer_norm",
                "post_attention_layernorm" => "feedforward_layer_norm",
                _ => return None,
            };
            let is_mixer = self.is_attention.get(layer.parse::<usize>().ok()?) == Some(&false);
            is_mixer.then(|| format!("model.layers.{layer}.{norm}.weight"))
        })?;
        self.split_convolutions(checkpoint)
    }
}

/// Refuses rotations of a part of each head, which transformers' class does not know.
fn check_whole(file: &ConfigFile, headdim: usize) -> Result<()> {
    const SHARE: &str = "partial_rotary_factor";
    const WIDTH: &str = "attn_rotary_emb";
    for file in [&RopeConfig::parameters(file)?, file] {
        if let Some(share) = file.float(&[SHARE], 0.0..=1.0)?.filter(|&share| share != 1.0) {
            return Err(file.error(SHARE, format!("expected 1, found {share}")));
        }
    }
    match file.usize(&[WIDTH], 0..=MAX_SIZE)?.filter(|&width| width != headdim) {
        Some(width) => Err(file.error(WIDTH, format!("expected {headdim}, found {width}"))),
        None => Ok(()),
    }
}

impl Config {
    /// Cuts the convolutions of queries, keys and values out of the one that transformers 5 makes of them.
    fn split_convolutions(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        let mixer = &self.mixer;
        let shape = |channels| vec![channels, 1, mixer.d_conv];
        let widths =
            [("q", mixer.key_width()), ("k", mixer.key_width()), ("v", mixer.value_width())];
        let joined = |(i, _): (usize, &bool)| {
            let name = |part: &str| format!("model.layers.{i}.linear_attn.{part}conv1d.weight");
            let part = |(part, width): (&str, usize)| Parameter {
                name: name(&format!("{part}_")),
                shape: shape(width),
            };
            let parts = widths.map(part).into();
            let (change, order) = (Change::Same, None);
            Stored { name: name(""), shape: shape(mixer.conv_dim()), parts, change, order }
        };
        let mixers = self.is_attention.iter().enumerate().filter(|(_, is)| !**is);
        Layout(mixers.map(joined).collect()).cut(checkpoint)
    }
}
