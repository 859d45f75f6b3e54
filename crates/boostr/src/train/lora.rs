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
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::random::Random;
use super::{Parameter, TrainableModel};
use crate::checkpoint::{Checkpoint, Dtype, atomic_write, safetensors};
use crate::error::{Error, Result};
use crate::nn::MixerConfig;

/// What stands before the names of a PEFT file.
const PREFIX: &str = "base_model.model.";
const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// The layer whose rows are sections.
const SECTIONED: &str = "in_proj";

/// Which layers get adapters, and how wide.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// r, at least 1.
    pub r: usize,
    /// The factor is `alpha / r`.
    pub alpha: f64,
    /// Last parts of the names of layers: `in_proj`, `q_proj`, ..; or a section of a mixer's `in_proj`, one of
    /// [`MixerConfig::SECTIONS`]: `in_proj.dt` has an adapter of in_proj that changes these rows alone. When
    /// empty: those of [`USUAL`](Self::USUAL) that the model has.
    pub targets: Vec<String>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self { r: 8, alpha: 16.0, targets: Vec::new() }
    }
}

impl LoraConfig {
    /// The layers that get adapters where none are named: projections of mixers, attention and
    /// feed-forward layers.
    pub const USUAL: [&str; 9] = [
        "in_proj",
        "out_proj",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ];

    fn scale(&self) -> f32 {
        (self.alpha / self.r as f64) as f32
    }

    fn names(&self, target: &str) -> bool {
        match &self.targets[..] {
            [] => Self::USUAL.contains(&target),
            targets => targets.iter().any(|name| name == target),
        }
    }
}

/// A layer that can have an adapter.
struct Layer {
    /// Its name: that of its weight without `.weight`.
    name: String,
    /// Rows of its weight.
    out: usize,
    /// Columns of its weight.
    width: usize,
    /// What targets call it, and what they call bands of its rows.
    targets: Vec<(String, Range<usize>)>,
}

impl Layer {
    /// The rows that a configuration's targets name, if any.
    fn rows(&self, config: &LoraConfig) -> Vec<Range<usize>> {
        let named = self.targets.iter().filter(|(target, _)| config.names(target));
        named.map(|(_, rows)| rows.clone()).collect()
    }
}

impl TrainableModel {
    /// The matrices that a layer multiplies with, but for the embedding and the head: the loss is fused with
    /// the head, without its adapter.
    fn layers(&self) -> Vec<Layer> {
        let family = self.config().family();
        let (names, specs) = (family.frame().names, family.layers());
        let mut layers = Vec::new();
        for (name, shape) in self.tensors().iter() {
            let (Some(name), &[out, width]) = (name.strip_suffix(".weight"), shape) else {
                continue;
            };
            let last = name.rsplit('.').next().unwrap_or(name);
            let is_adapter = last.starts_with("lora_");
            if is_adapter || [names.embeddings, names.head].contains(&name) {
                continue;
            }
            let mut targets = vec![(last.to_owned(), 0..out)];
            let mut parts = name.split('.').skip_while(|part| *part != "layers").skip(1);
            let number = parts.next().and_then(|part| part.parse::<usize>().ok());
            let mixer = number.and_then(|number| specs.get(number)?.mixer.as_ref());
            if let Some(mixer) = mixer.filter(|_| last == SECTIONED) {
                let sections = MixerConfig::SECTIONS.iter().zip(mixer.section_rows());
                targets.extend(sections.map(|(of, rows)| (format!("{SECTIONED}.{of}"), rows)));
            }
            layers.push(Layer { name: name.to_owned(), out, width, targets });
        }
        layers
    }

    /// Puts new adapters beside all layers that `config` names; they alone are trained.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when r is 0, or a target is no layer of the model: with those that are.
    pub fn add_adapters(&mut self, config: &LoraConfig, seed: u64) -> Result<()> {
        if config.r == 0 || !config.alpha.is_finite() {
            let reason = format!("expected r of at least 1, found {} {}", config.r, config.alpha);
            return Err(Error::Argument { name: "lora", reason });
        }
        let layers = self.layers();
        let known: BTreeSet<&str> = layers
            .iter()
            .flat_map(|layer| &layer.targets)
            .map(|(target, _)| target.as_str())
            // Numbers of lists.
            .filter(|target| target.parse::<usize>().is_err())
            .collect();
        let known_list = || known.iter().copied().collect::<Vec<_>>().join(", ");
        if let Some(target) = config.targets.iter().find(|target| !known.contains(target.as_str()))
        {
            let reason = format!("the model has no `{target}`, it has {}", known_list());
            return Err(Error::Argument { name: "lora.targets", reason });
        }
        if !known.iter().any(|target| config.names(target)) {
            let reason = format!("expected one or more of what the model has: {}", known_list());
            return Err(Error::Argument { name: "lora.targets", reason });
        }
        let mut random = Random::new(seed);
        for layer in layers.iter().filter(|layer| !layer.rows(config).is_empty()) {
            let (out, width) = (layer.out, layer.width);
            let most = (width as f64).powf(-0.5);
            let a = (0..config.r * width).map(|_| random.between(-most, most) as f32).collect();
            let b = vec![0.0; out * config.r];
            let matrices = [(vec![config.r, width], a), (vec![out, config.r], b)];
            self.add_adapter(&layer.name, matrices, config)?;
        }
        self.hold_untargeted(config);
        Ok(())
    }

    /// Keeps the rows of adapters that the targets do not name as they are: B's are zeros, so the weight's are
    /// not changed.
    pub(super) fn hold_untargeted(&mut self, config: &LoraConfig) {
        for layer in self.layers() {
            let rows = layer.rows(config);
            if !rows.is_empty() && !rows.contains(&(0..layer.out)) {
                self.train_rows(format!("{}.lora_B.weight", layer.name), rows);
            }
        }
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
        // PEFT knows layers, no rows of them.
        let targets: BTreeSet<&str> = self
            .parameters()
            .keys()
            .filter_map(|name| name.strip_suffix(".lora_A.weight")?.rsplit('.').next())
            .collect();
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
            "target_modules": targets,
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
