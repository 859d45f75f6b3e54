//! Keys of GGUF metadata that families share.

use crate::checkpoint::gguf::{Metadata, Value};
use crate::checkpoint::{Checkpoint, TensorEntry};
use crate::error::{Error, Result};
use crate::nn::{AttentionConfig, DeltaConfig, How, MixerConfig, Order, QkNorm, RopeConfig, Row};

use super::MAX_SIZE;

pub(super) const ARCHITECTURE: &str = "general.architecture";
pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
pub(super) const EMBEDDING: &str = "token_embd.weight";
pub(super) const NORM: &str = "output_norm.weight";
pub(super) const HEAD: &str = "output.weight";
/// Number of layers at the end that predict more than the next token.
pub(super) const NEXT: &str = "nextn_predict_layers";
/// What divides the frequency of each pair of dimensions.
const ROPE_FREQS: &str = "rope_freqs.weight";

/// Metadata under the prefix of an architecture.
pub struct Keys<'a> {
    /// All of it.
    pub metadata: &'a Metadata,
    /// The architecture.
    pub arch: &'a str,
}

impl<'a> Keys<'a> {
    pub(super) fn new(metadata: &'a Metadata, arch: &'a str) -> Self {
        Self { metadata, arch }
    }

    /// The whole name of a key.
    #[must_use]
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    /// An error about a key.
    pub fn error(&self, name: &str, reason: impl Into<String>) -> Error {
        self.metadata.error(&self.key(name), reason)
    }

    /// A size, 1 to [`MAX_SIZE`], that must be there: one number, or an array of equal ones, one for each layer.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is missing or something else.
    pub fn size(&self, name: &str) -> Result<usize> {
        match self.of_all_layers(name)? {
            Some(size) if size > 0 => Ok(size),
            _ => self.metadata.required_usize(&self.key(name), 1..=MAX_SIZE),
        }
    }

    /// A size, 0 to [`MAX_SIZE`]: one number, or an array of equal ones, one for each layer.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn optional(&self, name: &str) -> Result<Option<usize>> {
        match self.of_all_layers(name)? {
            None => self.metadata.usize(&self.key(name), 0..=MAX_SIZE),
            found => Ok(found),
        }
    }

    /// What all numbers of an array are; `None` where the key is no array.
    fn of_all_layers(&self, name: &str) -> Result<Option<usize>> {
        let key = self.key(name);
        if !matches!(self.metadata.get(&key), Some(Value::Array(_))) {
            return Ok(None);
        }
        let sizes = self.per_layer(name, self.n_layer()?)?;
        let Some(&first) = sizes.first() else { return Ok(None) };
        match sizes.iter().find(|&&size| size != first) {
            None => Ok(Some(first)),
            Some(other) => {
                let reason = format!("some layers have {other}, others {first}: not supported");
                Err(self.error(name, reason))
            }
        }
    }

    /// A finite number.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn float(&self, name: &str) -> Result<Option<f32>> {
        self.metadata.float(&self.key(name), f32::MIN..=f32::MAX)
    }

    /// A truth value.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn bool(&self, name: &str) -> Result<Option<bool>> {
        self.metadata.bool(&self.key(name))
    }

    /// Number of layers.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is missing or impossible.
    pub fn n_layer(&self) -> Result<usize> {
        self.metadata.required_usize(&self.key("block_count"), 1..=10_000)
    }

    /// Layers at the end that predict more than the next token, less than all.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when no layer is left.
    pub fn next_layers(&self) -> Result<usize> {
        let next = self.metadata.usize(&self.key(NEXT), 0..=MAX_SIZE)?.unwrap_or(0);
        let all = self.n_layer()?;
        if next >= all {
            return Err(self.error(NEXT, format!("{next} of {all} blocks leave no layer")));
        }
        Ok(next)
    }

    /// A number for each layer: a list of them, or one for all.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is missing, something else, or not of `n_layer` numbers.
    pub fn per_layer(&self, name: &str, n_layer: usize) -> Result<Vec<usize>> {
        let key = self.key(name);
        self.metadata.required(&key, self.metadata.per_layer(&key, n_layer, 0..=MAX_SIZE)?)
    }

    /// Heads of keys and values where a layer is attention, and which layers are: the others have 0 heads.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when layers of attention differ.
    pub fn heads_kv(&self, n_layer: usize, nheads: usize) -> Result<(usize, Vec<bool>)> {
        const NAME: &str = "attention.head_count_kv";
        let of_layers = self.per_layer(NAME, n_layer)?;
        let heads = of_layers.iter().copied().max().filter(|&most| most > 0).unwrap_or(nheads);
        if let Some(other) = of_layers.iter().find(|&&n| n != 0 && n != heads) {
            let reason = format!("some layers have {other} heads, others {heads}");
            return Err(self.error(NAME, reason));
        }
        Ok((heads, of_layers.iter().map(|&n| n > 0).collect()))
    }

    /// Refuses routers whose scores are no sigmoids.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for another number than that of sigmoids.
    pub fn check_sigmoid_gating(&self) -> Result<()> {
        const SIGMOID: usize = 2;
        const NAME: &str = "expert_gating_func";
        match self.optional(NAME)?.filter(|&found| found != SIGMOID) {
            None => Ok(()),
            Some(found) => Err(self.error(NAME, format!("expected 2 (sigmoid), found {found}"))),
        }
    }

    /// The epsilon of RMS norms; some files keep it as that of layer norms.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is missing, or no small positive number.
    pub fn norm_eps(&self) -> Result<f32> {
        const OWN: &str = "attention.layer_norm_rms_epsilon";
        let eps = |name: &str| self.metadata.float(&self.key(name), f32::MIN_POSITIVE..=1.0);
        let found = match eps(OWN)? {
            None => eps("attention.layer_norm_epsilon")?,
            found => found,
        };
        self.metadata.required(&self.key(OWN), found)
    }

    /// Ids below this are tokens, by the list of tokens or, when there is none, its size.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when neither is there.
    pub fn vocab_size(&self) -> Result<usize> {
        /// A token that only fills up the table.
        const UNUSED: i64 = 5;
        let Some(tokens) = self.metadata.array_len(TOKENS)? else {
            return self.size("vocab_size");
        };
        let types = self.metadata.ints("tokenizer.ggml.token_type")?.unwrap_or_default();
        let unused = types.iter().rev().take_while(|&&kind| kind == UNUSED).count();
        Ok(if types.len() == tokens { tokens - unused } else { tokens })
    }

    /// Rotary positions of heads of `headdim`, by `{arch}.rope.*` and the file's factors of frequencies.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] or [`Error::Tensors`] for an impossible value.
    pub fn rope(&self, checkpoint: &Checkpoint, headdim: usize) -> Result<RopeConfig> {
        let factors = checkpoint.get(ROPE_FREQS).map(TensorEntry::to_f32).transpose()?;
        let rope = RopeConfig::read_gguf(self.metadata, self.arch, headdim, factors.clone())?;
        let pairs = rope.rotary_dim / 2;
        if let Some(factors) =
            factors.filter(|f| f.len() != pairs || f.iter().any(|f| !f.is_normal()))
        {
            let found = factors.len();
            let reason = format!("`{ROPE_FREQS}`: expected {pairs} finite factors, found {found}");
            return Err(Error::Tensors { path: checkpoint.path().into(), reason });
        }
        Ok(rope)
    }

    /// The Mamba-2 mixer that `{arch}.ssm.*` describes.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when a key is missing or impossible.
    pub fn mixer(&self) -> Result<MixerConfig> {
        let (d_inner, nheads) = (self.size("ssm.inner_size")?, self.size("ssm.time_step_rank")?);
        if !d_inner.is_multiple_of(nheads) {
            let reason = format!("{nheads} heads do not divide {d_inner} channels");
            return Err(self.error("ssm.time_step_rank", reason));
        }
        Ok(MixerConfig {
            ngroups: self.size("ssm.group_count")?,
            d_state: self.size("ssm.state_size")?,
            d_conv: self.size("ssm.conv_kernel")?,
            norm_eps: self.norm_eps()?,
            ..MixerConfig::new(self.size("embedding_length")?, nheads, d_inner / nheads)
        })
    }
}

/// Writes keys under the prefix of an architecture.
pub struct KeysMut<'a> {
    metadata: &'a mut Metadata,
    arch: &'static str,
}

impl<'a> KeysMut<'a> {
    /// Names the architecture.
    pub fn new(metadata: &'a mut Metadata, arch: &'static str) -> Self {
        metadata.set(ARCHITECTURE, arch);
        Self { metadata, arch }
    }

    /// The architecture.
    #[must_use]
    pub fn arch(&self) -> &'static str {
        self.arch
    }

    /// Sets any value.
    pub fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.metadata.set(format!("{}.{name}", self.arch), value);
    }

    /// Sets a size.
    pub fn size(&mut self, name: &str, size: usize) {
        self.set(name, size as u32);
    }

    /// Sets a number for each layer.
    pub fn per_layer(&mut self, name: &str, sizes: &[usize]) {
        let sizes: Vec<i32> = sizes.iter().map(|&size| size as i32).collect();
        self.set(name, sizes.as_slice());
    }

    /// Describes attention: heads of queries, their width, and rotary positions where it has them. Heads of
    /// keys and values are one number in some files and a list in others.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what GGUF has no key for.
    pub fn attention(&mut self, attention: &AttentionConfig) -> Result<()> {
        self.size("attention.head_count", attention.nheads);
        self.size("attention.key_length", attention.headdim);
        self.size("attention.value_length", attention.headdim);
        attention.rope.as_ref().map_or(Ok(()), |rope| self.rope(rope))
    }

    /// Describes rotary positions.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what GGUF has no key for.
    pub fn rope(&mut self, rope: &RopeConfig) -> Result<()> {
        rope.write_gguf(self.metadata, self.arch)
    }

    /// Describes a Mamba-2 mixer.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what GGUF has no key for.
    pub fn mixer(&mut self, mixer: &MixerConfig) -> Result<()> {
        let lacking = [
            (mixer.in_bias || mixer.out_bias, "biases of the projections"),
            (mixer.dt_limit != (0.0, f32::INFINITY), "limits of the steps"),
            (mixer.norm_before_gate, "norms before the gate"),
        ];
        if let Some((_, what)) = lacking.iter().find(|(is_there, _)| *is_there) {
            let what = format!("{what} in GGUF, whose {} has no way to say so", self.arch);
            return Err(Error::Unsupported { what });
        }
        for (name, size) in [
            ("ssm.conv_kernel", mixer.d_conv),
            ("ssm.inner_size", mixer.d_inner()),
            ("ssm.state_size", mixer.d_state),
            ("ssm.time_step_rank", mixer.nheads),
            ("ssm.group_count", mixer.ngroups),
        ] {
            self.size(name, size);
        }
        Ok(())
    }
}

/// Drops the tensors of layers that predict more than the next token, which come after the `n_layer` others.
pub(super) fn drop_next_layers(checkpoint: &mut Checkpoint, n_layer: usize) -> Result<()> {
    let Some(metadata) = checkpoint.gguf() else { return Ok(()) };
    let arch = metadata.text(ARCHITECTURE)?.unwrap_or_default();
    let keys = Keys::new(metadata, arch);
    let next = keys.next_layers()?;
    // One with tensors of a layer alone is one of the model, which it lacks when it is left out.
    let has = |start: &str| checkpoint.names().any(|name| name.starts_with(start));
    let is_layer = |i: &usize| has(&format!("blk.{i}.")) && !has(&format!("blk.{i}.nextn."));
    if let Some(i) = (n_layer..n_layer + next).find(is_layer) {
        let reason = format!(
            "{next}: the last {next} blocks would predict more than the next token, but block {i} has no tensor \
             `blk.{i}.nextn.*`"
        );
        return Err(keys.error(NEXT, reason));
    }
    let next: Vec<String> = (n_layer..n_layer + next).map(|i| format!("blk.{i}.")).collect();
    checkpoint.retain(|name| !next.iter().any(|block| name.starts_with(block)));
    Ok(())
}

/// Whether a tensor is of a layer after the `n_layer` of the model.
pub(super) fn is_next_layer(name: &str, n_layer: usize) -> bool {
    let number = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next());
    number.and_then(|number| number.parse().ok()).is_some_and(|number: usize| number >= n_layer)
}

/// The tensor of factors of frequencies that rotary positions need, if any, for
/// [`Family::gguf_given`](super::Family::gguf_given).
pub fn rope_factors(rope: Option<&RopeConfig>) -> Vec<(&'static str, Vec<f32>)> {
    let factors = rope.and_then(RopeConfig::factors);
    factors.map(|factors| (ROPE_FREQS, factors)).into_iter().collect()
}

/// The rows of a mixer whose parameters are under `name`, a pattern with `#`.
pub fn mixer_table(mixer: &MixerConfig, name: &str) -> Vec<Row> {
    let row = |file: &str, part: &str| Row::new(format!("blk.#.{file}"), format!("{name}.{part}"));
    vec![
        row("ssm_in.weight", "in_proj.weight"),
        row("ssm_conv1d.weight", "conv1d.weight").how(How::Taps),
        row("ssm_conv1d.bias", "conv1d.bias"),
        row("ssm_dt.bias", "dt_bias"),
        row("ssm_a", "A_log").how(How::Rates),
        row("ssm_d", "D").how(How::Column),
        row("ssm_norm.weight", "norm.weight").how(How::Groups(mixer.ngroups)),
        row("ssm_out.weight", "out_proj.weight"),
    ]
}

/// The rows of a gated delta mixer whose parameters are under `name`, a pattern with `#`. Where `is_tiled`, the file has
/// the value heads of one key head apart: the first of each key head, then the second of each.
pub fn delta_table(mixer: &DeltaConfig, name: &str, is_tiled: bool) -> Vec<Row> {
    let copies = mixer.nheads / mixer.nheads_key.max(1);
    let heads = |width| Order::transposed(mixer.nheads_key, copies, width);
    let (values, channels) =
        (heads(mixer.d_value), heads(mixer.d_value).after(2 * mixer.key_width()));
    let rows = [
        ("attn_qkv.weight", "in_proj_qkv.weight", How::Same, Some(channels.clone())),
        ("attn_gate.weight", "in_proj_z.weight", How::Same, Some(values.clone())),
        ("ssm_beta.weight", "in_proj_b.weight", How::Same, Some(heads(1))),
        ("ssm_alpha.weight", "in_proj_a.weight", How::Same, Some(heads(1))),
        ("ssm_conv1d.weight", "conv1d.weight", How::Taps, Some(channels)),
        ("ssm_dt.bias", "dt_bias", How::Same, Some(heads(1))),
        ("ssm_a", "A_log", How::NegExp, Some(heads(1))),
        ("ssm_norm.weight", "norm.weight", How::Same, None),
        ("ssm_out.weight", "out_proj.weight", How::Same, Some(values.columns())),
    ];
    let row = |(file, part, how, order): (&str, &str, How, Option<Order>)| {
        let row = Row::new(format!("blk.#.{file}"), format!("{name}.{part}")).how(how);
        match order.filter(|_| is_tiled && copies > 1) {
            Some(order) => row.order(order),
            None => row,
        }
    };
    rows.map(row).into()
}

/// The rows of attention whose parameters are under `name`, a pattern with `#`.
///
/// `interleaved`: queries and keys lie as llama.cpp's converter of Llama leaves them, for rotations of
/// neighbouring rows; it does so to all rows of attention that does not rotate.
pub fn attention_table(attention: &AttentionConfig, name: &str, interleaved: bool) -> Vec<Row> {
    let all = attention.headdim / 2 * 2;
    let rotary_dim = attention.rope.as_ref().map_or(all, |rope| rope.rotary_dim);
    let mut rows = Vec::new();
    for end in ["weight", "bias"] {
        let projections = [
            ("attn_q", "q_proj", Some(attention.nheads)),
            ("attn_k", "k_proj", Some(attention.nheads_kv)),
            ("attn_v", "v_proj", None),
            ("attn_output", "o_proj", None),
        ];
        for (file, part, nheads) in projections {
            let row = Row::new(format!("blk.#.{file}.{end}"), format!("{name}.{part}.{end}"));
            rows.push(match nheads.filter(|_| interleaved) {
                Some(nheads) => row.how(How::Interleaved { nheads, rotary_dim }),
                None => row,
            });
        }
    }
    for (file, part) in [("attn_q_norm", "q_norm"), ("attn_k_norm", "k_norm")] {
        let row = Row::new(format!("blk.#.{file}.weight"), format!("{name}.{part}.weight"));
        let is_offset = attention.qk_norm == QkNorm::HeadZeroCentred;
        rows.push(if is_offset { row.how(How::PlusOne) } else { row });
    }
    rows
}

/// The rows of a feed-forward layer whose parameters are under `name`, a pattern with `#`; `suffix`
/// comes after GGUF's names (`_shexp` for an expert that every token gets).
pub fn mlp_table(name: &str, suffix: &str) -> Vec<Row> {
    let projections = [("ffn_gate", "gate_proj"), ("ffn_up", "up_proj"), ("ffn_down", "down_proj")];
    let row = |(file, part): (&str, &str), end: &str| {
        Row::new(format!("blk.#.{file}{suffix}.{end}"), format!("{name}.{part}.{end}"))
    };
    projections.iter().flat_map(|&p| [row(p, "weight"), row(p, "bias")]).collect()
}

/// The rows of a mixture of experts whose parameters are under `name`, a pattern with `#`.
pub fn moe_table(name: &str) -> Vec<Row> {
    let row = |file: &str, part: &str| Row::new(format!("blk.#.{file}"), format!("{name}.{part}"));
    vec![
        row("ffn_gate_inp.weight", "gate.weight"),
        row("exp_probs_b.bias", "gate.e_score_correction_bias"),
        row("ffn_gate_exps.weight", "experts.@.gate_proj.weight"),
        row("ffn_up_exps.weight", "experts.@.up_proj.weight"),
        row("ffn_down_exps.weight", "experts.@.down_proj.weight"),
        row("ffn_latent_down.weight", "fc1_latent_proj.weight"),
        row("ffn_latent_up.weight", "fc2_latent_proj.weight"),
    ]
}
