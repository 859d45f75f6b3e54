//! What a configuration says of rotary positions, in any of its spellings.

use serde_json::{Map, Value, json};

use crate::checkpoint::ConfigFile;
use crate::checkpoint::gguf::Metadata;
use crate::error::{Error, Result};
use crate::ops::{Rope, RopeScaling, RopeStyle, Yarn};

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
    /// their place, `rope_parameters`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) for an impossible value or an unknown kind of scaling.
    pub fn read(file: &ConfigFile, headdim: usize, partial: f32) -> Result<Self> {
        let new = file.object("rope_parameters")?;
        let old = file.object("rope_scaling")?;
        let theta = match new.double(&["rope_theta"], 1e-6..=1e30)? {
            Some(theta) => theta,
            None => file.double(&["rope_theta"], 1e-6..=1e30)?.unwrap_or(10_000.0),
        };
        let fraction = match new.float(&["partial_rotary_factor"], 0.0..=1.0)? {
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
        let max = file.usize(&["max_position_embeddings"], 1..=1 << 40)?;
        let scaling = if new.has("rope_type") { &new } else { &old };
        Ok(Self { theta, rotary_dim, scaling: read_scaling(scaling, max)? })
    }

    /// Reads the keys of the architecture `arch`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) for an impossible value or an unknown kind of scaling.
    pub fn read_gguf(metadata: &Metadata, arch: &str, headdim: usize) -> Result<Self> {
        let key = |name: &str| format!("{arch}.rope.{name}");
        let float = |name: &str| metadata.float(&key(name), f32::MIN_POSITIVE..=f32::MAX);
        // The double that people write for this float: 1e11, not 99999997952.
        let theta = float("freq_base")?.and_then(|theta| theta.to_string().parse().ok());
        let rotary_dim = metadata.usize(&key("dimension_count"), 0..=headdim)?.unwrap_or(headdim);
        if !rotary_dim.is_multiple_of(2) {
            let reason = format!("{rotary_dim} dimensions rotate, which is odd");
            return Err(metadata.error(&key("dimension_count"), reason));
        }
        let factor = float("scaling.factor")?.map(f64::from);
        let original = metadata.usize(&key("scaling.original_context_length"), 1..=1 << 40)?;
        let scaling = match metadata.text(&key("scaling.type"))? {
            None | Some("none") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: factor.unwrap_or(1.0) },
            Some("yarn") => {
                let yarn = Yarn::new(factor.unwrap_or(1.0), original.unwrap_or(4096));
                RopeScaling::Yarn(Yarn {
                    beta_fast: float("scaling.yarn_beta_fast")?.map_or(32.0, f64::from),
                    beta_slow: float("scaling.yarn_beta_slow")?.map_or(1.0, f64::from),
                    attention_factor: float("scaling.attn_factor")?.map(f64::from),
                    ..yarn
                })
            }
            Some(other) => {
                let reason = format!("expected none, linear or yarn, found {other:?}");
                return Err(metadata.error(&key("scaling.type"), reason));
            }
        };
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
        match &self.scaling {
            RopeScaling::None | RopeScaling::Llama3 { .. } | RopeScaling::PerDim { .. } => {}
            RopeScaling::Linear { factor } => {
                metadata.set(key("scaling.type"), "linear");
                metadata.set(key("scaling.factor"), *factor as f32);
            }
            RopeScaling::Dynamic { .. } | RopeScaling::Ntk { .. } => {
                let what = "NTK scaling of positions in GGUF, which has none".into();
                return Err(Error::Unsupported { what });
            }
            RopeScaling::Yarn(yarn) => {
                metadata.set(key("scaling.type"), "yarn");
                metadata.set(key("scaling.factor"), yarn.factor as f32);
                metadata.set(key("scaling.original_context_length"), yarn.original_max as u32);
                metadata.set(key("scaling.yarn_beta_fast"), yarn.beta_fast as f32);
                metadata.set(key("scaling.yarn_beta_slow"), yarn.beta_slow as f32);
                if let Some(factor) = yarn.attention_factor {
                    metadata.set(key("scaling.attn_factor"), factor as f32);
                }
            }
        }
        Ok(())
    }

    /// Puts `rope_theta`, `rope_scaling` and `partial_rotary_factor` into a `config.json`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for factors of single frequencies, which only GGUF has.
    pub fn write_json(&self, json: &mut Map<String, Value>, headdim: usize) -> Result<()> {
        json.insert("rope_theta".into(), json!(self.theta));
        let share = self.rotary_dim as f64 / headdim as f64;
        json.insert("partial_rotary_factor".into(), json!(share));
        let scaling = match &self.scaling {
            RopeScaling::None => Value::Null,
            RopeScaling::PerDim { .. } | RopeScaling::Ntk { .. } => {
                let what = "this scaling of positions in a config.json, which has no name for it";
                return Err(Error::Unsupported { what: what.into() });
            }
            RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
            RopeScaling::Dynamic { factor, original_max } => json!({
                "rope_type": "dynamic", "factor": factor,
                "original_max_position_embeddings": original_max,
            }),
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

    /// What divides each frequency, `[rotary_dim / 2]`, where GGUF has no name for the scaling but keeps
    /// that.
    #[must_use]
    pub fn factors(&self) -> Option<Vec<f32>> {
        match &self.scaling {
            RopeScaling::PerDim { factors } => Some(factors.clone()),
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

    /// The rotation.
    #[must_use]
    pub fn rope(&self) -> Rope {
        Rope::new(self.rotary_dim, self.theta, &self.scaling, RopeStyle::Half)
    }
}

fn read_scaling(scaling: &ConfigFile, max: Option<usize>) -> Result<RopeScaling> {
    let kind = match scaling.text("rope_type")? {
        Some(kind) => Some(kind),
        None => scaling.text("type")?,
    };
    let float = |key: &str| scaling.double(&[key], 1e-9..=1e9);
    let needed = |key: &str| -> Result<f64> {
        float(key)?.ok_or_else(|| scaling.error(key, "missing, and the scaling needs it"))
    };
    let original = scaling.usize(&["original_max_position_embeddings"], 1..=1 << 40)?.or(max);
    Ok(match kind {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: needed("factor")? },
        Some("dynamic") => RopeScaling::Dynamic {
            factor: needed("factor")?,
            original_max: original.unwrap_or(2048),
        },
        Some("llama3") => RopeScaling::Llama3 {
            factor: needed("factor")?,
            low_freq_factor: needed("low_freq_factor")?,
            high_freq_factor: needed("high_freq_factor")?,
            original_max: original.unwrap_or(8192),
        },
        Some("yarn") => {
            let yarn = Yarn::new(needed("factor")?, original.unwrap_or(4096));
            RopeScaling::Yarn(Yarn {
                beta_fast: float("beta_fast")?.unwrap_or(yarn.beta_fast),
                beta_slow: float("beta_slow")?.unwrap_or(yarn.beta_slow),
                attention_factor: float("attention_factor")?,
                mscale: float("mscale")?,
                mscale_all_dim: float("mscale_all_dim")?,
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
