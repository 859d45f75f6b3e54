//! What a configuration says of rotary positions, in any of its spellings.

use serde_json::{Map, Value, json};

use crate::checkpoint::ConfigFile;
use crate::checkpoint::gguf::Metadata;
use crate::error::{Error, Result};
use crate::ops::{Rope, RopeScaling, RopeStyle, Yarn};

/// The field of the part of a head that rotates.
const SHARE: &str = "partial_rotary_factor";

/// Rotary positions of a model's attention.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Dimensions of each head that rotate, from its first on; even.
    pub rotary_dim: usize,
    /// How frequencies are stretched for contexts longer than those of training.
    pub scaling: RopeScaling,
}

impl RopeConfig {
    /// Reads `rope_theta`, `rope_scaling` and `partial_rotary_factor`, or what transformers 5 puts in
    /// their place, `rope_parameters`. As there, a `rope_scaling` that is not empty counts where a file has both, and
    /// what it says of the base and of the part that rotates goes before what stands at the top.
    ///
    /// The context that a scaling starts from is what transformers takes. For `dynamic` it is
    /// `max_position_embeddings`, whatever else the file says. For `llama3` and `yarn` it is
    /// `original_max_position_embeddings`: at the top of the file, else of the scaling, else
    /// `max_position_embeddings`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) for an impossible value or an unknown kind of scaling.
    pub fn read(file: &ConfigFile, headdim: usize, partial: f32) -> Result<Self> {
        let new = file.object("rope_parameters")?;
        let old = file.object("rope_scaling")?;
        for scaling in [&old, &new] {
            if let Some((key, _)) = scaling.iter().find(|(_, value)| value.is_object()) {
                return Err(scaling.error(key, "scalings of each kind of layer are not supported"));
            }
        }
        let scaling = if old.iter().next().is_some() { &old } else { &new };
        if let Some(part) = Self::null_base(file)? {
            return Err(part.error("rope_theta", "expected a number, found null"));
        }
        if scaling.states(SHARE) && !scaling.has(SHARE) {
            return Err(scaling.error(SHARE, "expected a number, found null"));
        }
        let mut theta = None;
        for file in [scaling, file, &new] {
            theta = theta.or(file.double(&["rope_theta"], 1e-6..=1e30)?);
        }
        let theta = theta.unwrap_or(10_000.0);
        let fraction = match scaling.float(&["partial_rotary_factor"], 0.0..=1.0)? {
            Some(fraction) => Some(fraction),
            None => file.float(&["partial_rotary_factor"], 0.0..=1.0)?,
        };
        let width = headdim as f32 * fraction.unwrap_or(partial);
        let rotary_dim = match file.usize(&["attn_rotary_emb"], 0..=headdim)? {
            Some(rotary_dim) if fraction.is_some() && (width - rotary_dim as f32).abs() > 0.5 => {
                let reason = format!(
                    "{rotary_dim} of {headdim} dimensions, but {width} by partial_rotary_factor"
                );
                return Err(file.error("attn_rotary_emb", reason));
            }
            Some(rotary_dim) => rotary_dim,
            None => width as usize,
        };
        if !rotary_dim.is_multiple_of(2) {
            let reason = format!("{rotary_dim} of {headdim} dimensions rotate, which is odd");
            return Err(file.error("partial_rotary_factor", reason));
        }
        Ok(Self { theta, rotary_dim, scaling: read_scaling(file, scaling)? })
    }

    /// What a `config.json` says of positions: `rope_scaling` where it is not empty, else `rope_parameters`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) for what is no object.
    pub fn parameters(file: &ConfigFile) -> Result<ConfigFile> {
        let old = file.object("rope_scaling")?;
        let is_old = old.iter().next().is_some();
        if is_old { Ok(old) } else { file.object("rope_parameters") }
    }

    /// The part of a `config.json` that says that the base is null, if the one that counts does. As in transformers 5,
    /// a base among the parameters goes before one at the top.
    ///
    /// # Errors
    ///
    /// As [`parameters`](Self::parameters).
    pub fn null_base(file: &ConfigFile) -> Result<Option<ConfigFile>> {
        let parameters = Self::parameters(file)?;
        let states = |file: &&ConfigFile| file.states("rope_theta");
        let stated = [&parameters, file].into_iter().find(states);
        Ok(stated.filter(|file| !file.has("rope_theta")).cloned())
    }

    /// Reads the keys of the architecture `arch`, by the rules of llama.cpp. `factors` are those of frequencies, if
    /// the file has some: a tensor of its own, which is beside any scaling.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) for an impossible value or an unknown kind of scaling.
    pub fn read_gguf(
        metadata: &Metadata,
        arch: &str,
        headdim: usize,
        factors: Option<Vec<f32>>,
    ) -> Result<Self> {
        let key = |name: &str| format!("{arch}.rope.{name}");
        let float = |name: &str| metadata.float(&key(name), f32::MIN_POSITIVE..=f32::MAX);
        // The double that people write for this float: 1e11, not 99999997952.
        let theta = float("freq_base")?.and_then(|theta| theta.to_string().parse().ok());
        let rotary_dim = metadata.usize(&key("dimension_count"), 0..=headdim)?.unwrap_or(headdim);
        if !rotary_dim.is_multiple_of(2) {
            let reason = format!("{rotary_dim} dimensions rotate, which is odd");
            return Err(metadata.error(&key("dimension_count"), reason));
        }
        let scaling = read_gguf_scaling(metadata, arch, factors)?;
        Ok(Self { theta: theta.unwrap_or(10_000.0), rotary_dim, scaling })
    }

    /// Writes the keys of the architecture `arch`. Factors of each pair of dimensions are a tensor of their
    /// own, `rope_freqs.weight`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a scaling that GGUF has no name for.
    pub fn write_gguf(&self, metadata: &mut Metadata, arch: &str) -> Result<()> {
        let key = |name: &str| format!("{arch}.rope.{name}");
        metadata.set(key("freq_base"), self.theta as f32);
        metadata.set(key("dimension_count"), self.rotary_dim as u32);
        let mut write = |scaling: &RopeScaling, attention_factor: f64| -> Result<()> {
            let mut own = attention_factor;
            match scaling {
                RopeScaling::Linear { factor } => {
                    metadata.set(key("scaling.type"), "linear");
                    metadata.set(key("scaling.factor"), *factor as f32);
                }
                RopeScaling::Dynamic { .. } | RopeScaling::Ntk { .. } => {
                    let what = "NTK scaling of positions in GGUF, which has none".into();
                    return Err(Error::Unsupported { what });
                }
                RopeScaling::Yarn(yarn) => {
                    let paper = Yarn::new(yarn.factor, yarn.original_max);
                    let lacking = [
                        (
                            !yarn.truncate,
                            "YaRN whose ramp is not of whole pairs (`truncate: false`)",
                        ),
                        (
                            [yarn.beta_fast, yarn.beta_slow] != [paper.beta_fast, paper.beta_slow],
                            "YaRN with another beta_fast or beta_slow than 32 and 1",
                        ),
                    ];
                    if let Some((_, what)) = lacking.iter().find(|(is_there, _)| *is_there) {
                        let what = format!("{what} in GGUF, whose {arch} is run without it");
                        return Err(Error::Unsupported { what });
                    }
                    metadata.set(key("scaling.type"), "yarn");
                    metadata.set(key("scaling.factor"), yarn.factor as f32);
                    metadata.set(key("scaling.original_context_length"), yarn.original_max as u32);
                    // GGUF has what comes on top of the growth that the paper gives.
                    own *= yarn.final_factor() / yarn.growth(1.0);
                }
                // Factors of pairs are a tensor.
                _ => {}
            }
            if own as f32 != 1.0 {
                metadata.set(key("scaling.attn_factor"), own as f32);
            }
            Ok(())
        };
        match &self.scaling {
            RopeScaling::Composed { scaling, attention_factor, .. } => {
                write(scaling, *attention_factor)
            }
            scaling => write(scaling, 1.0),
        }
    }

    /// Puts `rope_theta`, `rope_scaling` and `partial_rotary_factor` into a `config.json`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for factors of single frequencies, which only GGUF has.
    pub fn write_json(&self, json: &mut Map<String, Value>, headdim: usize) -> Result<()> {
        json.insert("rope_theta".into(), json!(self.theta));
        // Of heads without a dimension, which are of models without attention, no part rotates.
        let share = self.rotary_dim as f64 / headdim.max(1) as f64;
        json.insert("partial_rotary_factor".into(), json!(share));
        let scaling = match &self.scaling {
            RopeScaling::None => Value::Null,
            RopeScaling::PerDim { .. } | RopeScaling::Ntk { .. } | RopeScaling::Composed { .. } => {
                let what = "this scaling of positions in a config.json, which has no name for it";
                return Err(Error::Unsupported { what: what.into() });
            }
            RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
            RopeScaling::Dynamic { factor, original_max } => {
                json.insert("max_position_embeddings".into(), json!(original_max));
                json!({
                    "rope_type": "dynamic", "factor": factor,
                    "original_max_position_embeddings": original_max,
                })
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max } => {
                json!({
                    "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": original_max,
                })
            }
            RopeScaling::Yarn(yarn) => json!({
                "rope_type": "yarn", "factor": yarn.factor, "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow, "attention_factor": yarn.attention_factor,
                "mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim,
                "truncate": yarn.truncate, "original_max_position_embeddings": yarn.original_max,
            }),
        };
        json.insert("rope_scaling".into(), scaling);
        Ok(())
    }

    /// The same positions by Llama 3's settings, where the factors of pairs are what these give.
    ///
    /// GGUF has only the factors. Settings have four numbers, of which `low_freq_factor` 1 and `high_freq_factor` 4
    /// are those of every published model. The factor is that of the slowest pair, and the original context follows
    /// from a pair in between. Where no pair is, contexts that give the same factors are the same.
    #[must_use]
    pub fn llama3(&self) -> Option<Self> {
        const USUAL: [f64; 6] = [8.0, 32.0, 4.0, 16.0, 2.0, 64.0];
        let RopeScaling::PerDim { factors } = &self.scaling else { return None };
        let (low, high) = (1.0, 4.0);
        let plain = Rope::new(self.rotary_dim, self.theta, &RopeScaling::None, RopeStyle::Half);
        let with = |factor: f64, original_max: usize| {
            let (low_freq_factor, high_freq_factor) = (low, high);
            let scaling =
                RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max };
            Self { scaling, ..self.clone() }
        };
        let slowest = factors.iter().copied().fold(1.0, f32::max);
        let slowest = slowest.to_string().parse().unwrap_or(1.0);
        for factor in [slowest].into_iter().chain(USUAL).filter(|&factor: &f64| factor > 1.0) {
            // How much of each frequency is kept says how often the pair turns in the original context.
            let solved = factors.iter().zip(plain.frequencies()).filter_map(|(&f, frequency)| {
                let kept = (1.0 / f64::from(f) - 1.0 / factor) / (1.0 - 1.0 / factor);
                let turns = low + kept * (high - low);
                let is_between = (0.001..0.999).contains(&kept);
                is_between.then(|| (turns * std::f64::consts::TAU / frequency).round() as usize)
            });
            let powers = (4..=22).map(|bits| 1 << bits);
            for original in solved.take(1).chain(powers).filter(|&original| original > 0) {
                let known = with(factor, original);
                let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * a.abs();
                let own = known.factors().unwrap_or_default();
                if own.len() == factors.len() && factors.iter().zip(&own).all(is_near) {
                    return Some(known);
                }
            }
        }
        None
    }

    /// What divides each frequency, `[rotary_dim / 2]`, where GGUF has no name for the scaling but keeps
    /// that.
    #[must_use]
    pub fn factors(&self) -> Option<Vec<f32>> {
        match &self.scaling {
            RopeScaling::PerDim { factors } => Some(factors.clone()),
            RopeScaling::Composed { factors, .. } => (!factors.is_empty()).then(|| factors.clone()),
            RopeScaling::Llama3 { .. } => {
                let plain =
                    Rope::new(self.rotary_dim, self.theta, &RopeScaling::None, RopeStyle::Half);
                let scaled = self.rope();
                let pairs = plain.frequencies().iter().zip(scaled.frequencies());
                Some(pairs.map(|(plain, scaled)| (plain / scaled) as f32).collect())
            }
            _ => None,
        }
    }

    /// Positions that the scaling makes of the `stated` ones, which a file may count with it or without.
    #[must_use]
    pub fn reach(&self, stated: usize) -> usize {
        let scaling = match &self.scaling {
            RopeScaling::Composed { scaling, .. } => scaling,
            scaling => scaling,
        };
        let (length, factor) = match scaling {
            RopeScaling::Linear { factor } => (stated, *factor),
            RopeScaling::Dynamic { factor, original_max } => (*original_max, *factor),
            RopeScaling::Yarn(yarn) => (yarn.original_max, yarn.factor),
            _ => (stated, 1.0),
        };
        stated.max((length as f64 * factor) as usize)
    }

    /// The rotation.
    #[must_use]
    pub fn rope(&self) -> Rope {
        Rope::new(self.rotary_dim, self.theta, &self.scaling, RopeStyle::Half)
    }
}

/// The scaling of positions in GGUF, as llama.cpp has it:
///
/// | key | when it is missing |
/// |---|---|
/// | `scaling.type` | `linear` |
/// | `scaling.factor` | its old name `scale_linear`, else 1; 0 is 1 |
/// | `scaling.original_context_length` | `context_length`; of 0, too |
/// | `scaling.attn_factor` | 1; a factor of queries and keys on top of what the scaling gives, of any type |
///
/// Other keys (`yarn_beta_fast`, `yarn_ext_factor`, `yarn_log_multiplier`, ..) llama.cpp reads of architectures that
/// are none of ours.
fn read_gguf_scaling(
    metadata: &Metadata,
    arch: &str,
    factors: Option<Vec<f32>>,
) -> Result<RopeScaling> {
    let key = |name: &str| format!("{arch}.{name}");
    let float = |name: &str| -> Result<Option<f64>> {
        let found = metadata.float(&key(&format!("rope.{name}")), 0.0..=f32::MAX)?;
        Ok(found.map(f64::from))
    };
    let length = |name: &str| -> Result<Option<usize>> {
        Ok(metadata.usize(&key(name), 0..=1 << 40)?.filter(|&length| length > 0))
    };
    let (new, old) = (float("scaling.factor")?, float("scale_linear")?);
    let factor = new.or(old).map(|factor| if factor == 0.0 { 1.0 } else { factor });
    let mut attention_factor = float("scaling.attn_factor")?.unwrap_or(1.0);
    let kind = "rope.scaling.type";
    let scaling = match metadata.text(&key(kind))? {
        Some("none") => RopeScaling::None,
        None if factor.is_none_or(|factor| factor == 1.0) => RopeScaling::None,
        None | Some("linear") => RopeScaling::Linear { factor: factor.unwrap_or(1.0) },
        Some("yarn") => {
            let original = match length("rope.scaling.original_context_length")? {
                None => length("context_length")?,
                found => found,
            };
            let original = metadata.required(&key("context_length"), original)?;
            let yarn = Yarn::new(factor.unwrap_or(1.0), original);
            let own = std::mem::replace(&mut attention_factor, 1.0);
            // Of a product of two roundings to f32 the digits of one.
            let all = (own * yarn.growth(1.0)) as f32;
            let all = (own != 1.0).then(|| all.to_string().parse().unwrap_or(f64::from(all)));
            RopeScaling::Yarn(Yarn { attention_factor: all, ..yarn })
        }
        Some(other) => {
            let reason = format!("expected none, linear or yarn, found {other:?}");
            return Err(metadata.error(&key(kind), reason));
        }
    };
    Ok(match factors {
        Some(factors) if scaling == RopeScaling::None && attention_factor == 1.0 => {
            RopeScaling::PerDim { factors }
        }
        None if attention_factor == 1.0 => scaling,
        factors => RopeScaling::Composed {
            scaling: Box::new(scaling),
            factors: factors.unwrap_or_default(),
            attention_factor,
        },
    })
}

fn read_scaling(file: &ConfigFile, scaling: &ConfigFile) -> Result<RopeScaling> {
    let kind = match scaling.text("rope_type")? {
        Some(kind) => Some(kind),
        None => scaling.text("type")?,
    };
    let float = |key: &str| scaling.double(&[key], 1e-9..=1e9);
    let needed = |key: &str| -> Result<f64> {
        float(key)?.ok_or_else(|| scaling.error(key, "missing, and the scaling needs it"))
    };
    let max = || -> Result<usize> {
        let stated = file.usize(&["max_position_embeddings"], 1..=1 << 40)?;
        Ok(stated.unwrap_or(class_context(file.text("model_type")?.unwrap_or_default())))
    };
    let original = || -> Result<usize> {
        for file in [file, scaling] {
            let key = "original_max_position_embeddings";
            if let Some(length) = file.get(&[key], "a whole number from 1 to 2^40", length)? {
                return Ok(length);
            }
        }
        max()
    };
    Ok(match kind {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: needed("factor")? },
        Some("dynamic") => RopeScaling::Dynamic { factor: needed("factor")?, original_max: max()? },
        Some("llama3") => RopeScaling::Llama3 {
            factor: needed("factor")?,
            low_freq_factor: needed("low_freq_factor")?,
            high_freq_factor: needed("high_freq_factor")?,
            original_max: original()?,
        },
        Some("yarn") => {
            let yarn = Yarn::new(needed("factor")?, original()?);
            RopeScaling::Yarn(Yarn {
                beta_fast: float("beta_fast")?.unwrap_or(yarn.beta_fast),
                beta_slow: float("beta_slow")?.unwrap_or(yarn.beta_slow),
                attention_factor: float("attention_factor")?,
                mscale: scaling.double(&["mscale"], 0.0..=1e9)?,
                mscale_all_dim: scaling.double(&["mscale_all_dim"], 0.0..=1e9)?,
                truncate: scaling.bool(&["truncate"])?.unwrap_or(true),
                ..yarn
            })
        }
        Some(other) => {
            let reason =
                format!("expected default, linear, dynamic, llama3 or yarn, found {other:?}");
            return Err(scaling.error("rope_type", reason));
        }
    })
}

/// Tokens of a context, which some files have as a float: 8192.0.
fn length(value: &Value) -> Option<usize> {
    let whole = |x: f64| (x.fract() == 0.0 && x >= 0.0).then_some(x as u64);
    let length = value.as_u64().or_else(|| value.as_f64().and_then(whole))?;
    usize::try_from(length).ok().filter(|length| (1..=1 << 40).contains(length))
}

/// `max_position_embeddings` of a class of transformers, for files without it.
fn class_context(model_type: &str) -> usize {
    match model_type {
        "bamba" => 262_144,
        "mistral" => 131_072,
        "olmo_hybrid" => 65_536,
        "qwen2" | "qwen3" | "qwen3_next" => 32_768,
        kind if kind.starts_with("qwen3_5") => 32_768,
        "falcon_h1" => 8192,
        "nemotron_h" | "zamba2" => 4096,
        _ => 2048,
    }
}
