//! Low-rank adapters: thin matrices beside the weights of a model that stays as it is.
//!
//! ```text
//! y = x Wᵀ + (alpha / r) (x Aᵀ) Bᵀ        A: [r, in], B: [out, r]
//! ```
//!
//! Paper: *LoRA* (Hu et al. 2021). A begins uniform in ±`in^-1/2`, B as zeros, so that training begins at the
//! model. Saved as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors` with names
//! `base_model.model.NAME.lora_A.weight`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::random::Random;
use super::{Parameter, TrainableModel};
use crate::checkpoint::{Checkpoint, Dtype, atomic_write, safetensors};
use crate::error::{Error, Result};

/// What stands before the names of a PEFT file.
const PREFIX: &str = "base_model.model.";
const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Which layers get adapters, and how wide.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// r, at least 1.
    pub r: usize,
    /// The factor is `alpha / r`.
    pub alpha: f64,
    /// Last parts of the names of layers: `in_proj`, `q_proj`, ..
    pub targets: Vec<String>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        let targets = ["in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"];
        let mlp = ["gate_proj", "up_proj", "down_proj"];
        Self {
            r: 8,
            alpha: 16.0,
            targets: targets.iter().chain(&mlp).map(|x| (*x).into()).collect(),
        }
    }
}

impl LoraConfig {
    fn scale(&self) -> f32 {
        (self.alpha / self.r as f64) as f32
    }
}

/// The layer that `name` is the weight of, where it is one of `targets`.
fn layer_of<'a>(name: &'a str, targets: &[String]) -> Option<&'a str> {
    let layer = name.strip_suffix(".weight")?;
    let last = layer.rsplit('.').next()?;
    targets.iter().any(|target| target == last).then_some(layer)
}

impl TrainableModel {
    /// Puts new adapters beside all layers that `config` names; they alone are trained.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when r is 0, or a target is no layer of the model.
    pub fn add_adapters(&mut self, config: &LoraConfig, seed: u64) -> Result<()> {
        if config.r == 0 || !config.alpha.is_finite() {
            let reason = format!("expected r of at least 1, found {} {}", config.r, config.alpha);
            return Err(Error::Argument { name: "lora", reason });
        }
        let mut random = Random::new(seed);
        let tensors = self.tensors();
        let mut used = BTreeSet::new();
        for (name, shape) in tensors.iter() {
            let (Some(layer), &[out, width]) = (layer_of(name, &config.targets), shape) else {
                continue;
            };
            used.extend(layer.rsplit('.').next());
            let most = (width as f64).powf(-0.5);
            let a = (0..config.r * width).map(|_| random.between(-most, most) as f32).collect();
            let b = vec![0.0; out * config.r];
            self.add_adapter(
                layer,
                [(vec![config.r, width], a), (vec![out, config.r], b)],
                config,
            )?;
        }
        if let Some(target) = config.targets.iter().find(|target| !used.contains(target.as_str()))
            && used.is_empty()
        {
            let reason = format!("no layer of the model is called `{target}`");
            return Err(Error::Argument { name: "lora.targets", reason });
        }
        Ok(())
    }

    fn add_adapter(
        &mut self,
        layer: &str,
        matrices: [(Vec<usize>, Vec<f32>); 2],
        config: &LoraConfig,
    ) -> Result<()> {
        for (which, (shape, values)) in ["lora_A", "lora_B"].iter().zip(matrices) {
            self.add(format!("{layer}.{which}.weight"), Parameter { shape, values });
        }
        self.add_constant(&format!("{layer}.lora_scale"), &[1], &[config.scale()])
    }

    /// Writes the adapters to `folder`, as PEFT reads them.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the system refuses.
    pub fn write_adapters(&self, folder: &Path, base: &str, config: &LoraConfig) -> Result<()> {
        let about = serde_json::json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": config.r,
            "lora_alpha": config.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "target_modules": config.targets,
        });
        let adapters: Vec<(String, &Parameter)> = self
            .parameters()
            .iter()
            .filter(|(name, _)| name.contains(".lora_"))
            .map(|(name, parameter)| (format!("{PREFIX}{name}"), parameter))
            .collect();
        let tensors: Vec<(&str, Dtype, &[usize])> = adapters
            .iter()
            .map(|(name, parameter)| (name.as_str(), Dtype::F32, &parameter.shape[..]))
            .collect();
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        safetensors::write_each(&folder.join(WEIGHTS), &tensors, &metadata, &mut |i: usize| {
            Dtype::F32.encode(&adapters[i].1.values)
        })?;
        let text = serde_json::to_string_pretty(&about)
            .map_err(|e| Error::format(folder.join(CONFIG), e.to_string()))?;
        atomic_write(&folder.join(CONFIG), |file| std::io::Write::write_all(file, text.as_bytes()))
    }

    /// Reads adapters that [`write_adapters`](Self::write_adapters) or PEFT wrote, to be trained on or
    /// [merged](Self::merge_adapters).
    ///
    /// # Errors
    ///
    /// [`Error::Format`] for another kind of adapter, [`Error::Tensors`] for one of no layer of the model or
    /// of another shape.
    pub fn read_adapters(&mut self, folder: &Path) -> Result<LoraConfig> {
        #[derive(Deserialize)]
        struct Peft {
            #[serde(rename = "peft_type")]
            kind: String,
            r: usize,
            lora_alpha: f64,
            target_modules: Vec<String>,
            #[serde(default)]
            use_rslora: bool,
            #[serde(default)]
            use_dora: bool,
        }
        let path = folder.join(CONFIG);
        let text = std::fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        let about: Peft =
            serde_json::from_str(&text).map_err(|e| Error::format(&path, e.to_string()))?;
        if about.kind != "LORA" || about.use_dora || about.use_rslora || about.r == 0 {
            let reason = format!("expected plain LoRA, found {} of r {}", about.kind, about.r);
            return Err(Error::format(&path, reason));
        }
        let config =
            LoraConfig { r: about.r, alpha: about.lora_alpha, targets: about.target_modules };
        let path = folder.join(WEIGHTS);
        let file = Checkpoint::open(&path, false)?;
        let tensors = self.tensors();
        let bad = |reason: String| Error::Tensors { path: path.clone(), reason };
        for name in file.names().filter(|name| name.ends_with(".lora_A.weight")) {
            let layer = name.trim_end_matches(".lora_A.weight");
            let known = layer.strip_prefix(PREFIX).unwrap_or(layer);
            let shape = tensors.get(&format!("{known}.weight"));
            let Some(&[out, width]) = shape else {
                return Err(bad(format!("tensor `{name}` is of no layer of the model")));
            };
            let expected = [("lora_A", [about.r, width]), ("lora_B", [out, about.r])];
            let mut matrices = Vec::new();
            for (which, shape) in expected {
                let name = format!("{layer}.{which}.weight");
                let entry = file.get(&name).filter(|entry| entry.shape == shape);
                let Some(entry) = entry else {
                    return Err(bad(format!("expected `{name}` of shape {shape:?}")));
                };
                matrices.push((shape.to_vec(), entry.to_f32()?));
            }
            let [Some(b), Some(a)] = [matrices.pop(), matrices.pop()] else { continue };
            self.add_adapter(known, [a, b], &config)?;
        }
        Ok(config)
    }

    /// Adds `scale · B · A` to each weight that has an adapter, and takes the adapters away.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a weight in quantized blocks.
    pub fn merge_adapters(&mut self) -> Result<()> {
        let layers: Vec<String> = self
            .parameters()
            .keys()
            .filter_map(|name| Some(name.strip_suffix(".lora_A.weight")?.to_owned()))
            .collect();
        let of_adapters: BTreeSet<String> =
            layers.iter().map(|layer| format!("{layer}.weight")).collect();
        self.unfreeze(|name| of_adapters.contains(name))?;
        for layer in layers {
            let [a, b] = ["A", "B"].map(|which| self.take(&format!("{layer}.lora_{which}.weight")));
            let scale = self.take_constant(&format!("{layer}.lora_scale"))?;
            let (Some(a), Some(b)) = (a, b) else { continue };
            let Some(weight) = self.parameters_mut().get_mut(&format!("{layer}.weight")) else {
                continue;
            };
            let (r, width) = (a.shape[0], a.shape[1]);
            let rows = weight.values.chunks_exact_mut(width).zip(b.values.chunks_exact(r));
            for (row, b) in rows {
                for (i, w) in row.iter_mut().enumerate() {
                    let terms = b
                        .iter()
                        .enumerate()
                        .map(|(k, b)| f64::from(*b) * f64::from(a.values[k * width + i]));
                    *w = (f64::from(*w) + f64::from(scale) * terms.sum::<f64>()) as f32;
                }
            }
        }
        Ok(())
    }
}
