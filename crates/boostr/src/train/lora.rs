//! Low-rank adapters: thin matrices beside the weights of a model that stays as it is.
//!
//! ```text
//! y = x Wᵀ + (alpha / r) (x Aᵀ) Bᵀ        A: [r, in], B: [out, r]
//! ```
//!
//! Paper: *LoRA* (Hu et al. 2021). A begins uniform in ±`in^-1/2`, B as zeros, so that training begins at the
//! model. Saved as PEFT saves them, see [`Adapters`].

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::random::Random;
use super::{Parameter, TrainableModel};
use crate::checkpoint::{Dtype, atomic_write, safetensors};
use crate::error::{Error, Result};
use crate::load::adapters::{Adapter, Adapters, CONFIG, PREFIX, WEIGHTS};
use crate::nn::{MixerConfig, layer_of};

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
    /// The layers that get adapters if none are named: projections of mixers, attention and
    /// feed-forward layers. Two are left out: experts, whose adapters have another form in PEFT,
    /// and `out_proj`, which PEFT refuses beside Mamba-2, Falcon-H1 and Nemotron-H.
    pub const USUAL: [&str; 10] = [
        "in_proj",
        "in_proj_qkv",
        "in_proj_z",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ];

    /// Adapters of rank `r` beside the usual layers, with the factor 2.
    #[must_use]
    pub fn of_rank(r: usize) -> Self {
        Self { r, alpha: 2.0 * r as f64, targets: Vec::new() }
    }

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

/// The last `count` parts of a name.
fn last_parts(name: &str, count: usize) -> &str {
    name.rmatch_indices('.').nth(count - 1).map_or(name, |(dot, _)| &name[dot + 1..])
}

/// One adapter of rank up to `n r` of `n` layers whose weights stand one under another, each with the number of
/// its rows: matrices A under one another, matrices B along the diagonal.
fn join(parts: &[(Option<[&Parameter; 2]>, usize)], r: usize) -> [Parameter; 2] {
    let adapted = parts.iter().filter_map(|(adapter, _)| *adapter);
    let a: Vec<f32> = adapted.flat_map(|[a, _]| &a.values).copied().collect();
    let width = parts.iter().find_map(|(adapter, _)| Some(adapter.as_ref()?[0].shape[1]));
    let width = width.unwrap_or(1);
    let rank = a.len() / width;
    let out: usize = parts.iter().map(|(_, rows)| rows).sum();
    let mut b = vec![0.0; out * rank];
    let (mut row, mut column) = (0, 0);
    for (adapter, rows) in parts {
        if let Some([_, own]) = adapter {
            let places = b.chunks_exact_mut(rank).skip(row);
            for (to, from) in places.zip(own.values.chunks_exact(r)) {
                to[column..column + r].copy_from_slice(from);
            }
            column += r;
        }
        row += rows;
    }
    let matrix = |shape: [usize; 2], values| Parameter { shape: shape.to_vec(), values };
    [matrix([rank, width], a), matrix([out, rank], b)]
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
        if config.targets.is_empty() && self.name.contains(".experts.") {
            return Vec::new();
        }
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
            let (Some(name), &[out, width]) = (layer_of(name), shape) else {
                continue;
            };
            let last = last_parts(name, 1);
            let is_adapter = last.starts_with("lora_");
            if is_adapter || [names.embeddings, names.head].contains(&name) {
                continue;
            }
            let mut targets = vec![(last.to_owned(), 0..out)];
            let mut parts = name.split('.').skip_while(|part| *part != "layers").skip(1);
            let number = parts.next().and_then(|part| part.parse::<usize>().ok());
            let mixer = number.and_then(|number| specs.get(number)?.part::<MixerConfig>());
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
    /// [`Error::Argument`] when r is 0 or larger than all layers, when alpha is not finite, or when a target is no layer of the
    /// model: with those that are.
    pub fn add_adapters(&mut self, config: &LoraConfig, seed: u64) -> Result<()> {
        let layers = self.layers();
        let most = layers.iter().map(|layer| layer.out.max(layer.width)).max().unwrap_or(0);
        if !(1..=most).contains(&config.r) {
            let reason = format!(
                "expected a rank from 1 to {most}, the largest width of a layer, found {}",
                config.r
            );
            return Err(Error::Argument { name: "lora.r", reason });
        }
        if !config.alpha.is_finite() {
            let reason = format!("expected a finite number, found {}", config.alpha);
            return Err(Error::Argument { name: "lora.alpha", reason });
        }
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
        if layers.iter().all(|layer| layer.rows(config).is_empty()) {
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
            self.add_adapter(&layer.name, matrices, config.scale())?;
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
        scale: f32,
    ) -> Result<()> {
        for (which, (shape, values)) in ["lora_A", "lora_B"].iter().zip(matrices) {
            self.add(format!("{layer}.{which}.weight"), Parameter { shape, values });
        }
        self.add_constant(&format!("{layer}.lora_scale"), &[1], &[scale])
    }

    /// Writes the adapters to `folder`, as PEFT reads them: by the names that transformers has for layers, and
    /// as one where it has several of ours as one. (Those of experts it cannot read: they keep our names.)
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the system refuses, [`Error::Tensors`] for rows that the file orders in a way that the
    /// model's do not fit.
    pub fn write_adapters(&self, folder: &Path, base: &str, config: &LoraConfig) -> Result<()> {
        let family = self.config().family();
        let mut written = Vec::new();
        for stored in family.hf_layout(family.frame().padded_vocab(), true)?.0 {
            let of = |name: &str| -> Option<[&Parameter; 2]> {
                let layer = name.strip_suffix(".weight")?;
                let of = |which| self.parameters().get(&format!("{layer}.lora_{which}.weight"));
                Some([of("A")?, of("B")?])
            };
            let parts: Vec<_> = stored.parts.iter().map(|part| (of(&part.name), part)).collect();
            if stored.shape.len() != 2 || parts.len() == 1 {
                let is_renamed = parts.len() == 1;
                for (adapter, part) in parts {
                    let name = if is_renamed { &stored.name } else { &part.name };
                    written.extend(adapter.map(|of| (name.clone(), of.map(Clone::clone))));
                }
            } else if parts.iter().any(|(adapter, _)| adapter.is_some()) {
                let parts: Vec<_> = parts.iter().map(|(of, part)| (*of, part.shape[0])).collect();
                let mut matrices = join(&parts, config.r);
                // Columns of a weight are those of A, rows those of B.
                let is_of_b = stored.order.as_ref().is_some_and(|order| !order.columns);
                let Parameter { shape, values } = &mut matrices[usize::from(is_of_b)];
                *values = stored.in_file_order(std::mem::take(values), shape)?;
                written.push((stored.name, matrices));
            }
        }
        let written = written.into_iter().flat_map(|(name, matrices)| {
            let layer = name.trim_end_matches(".weight");
            family.shared_as(layer).into_iter().map(move |layer| (layer, matrices.clone()))
        });
        self.write_matrices(folder, base, config, &written.collect::<Vec<_>>())
    }

    /// Writes the adapters by our own names, one for each of our layers, to train on.
    pub(super) fn save_adapters(
        &self,
        folder: &Path,
        base: &str,
        config: &LoraConfig,
    ) -> Result<()> {
        let layers = self.parameters().iter().filter_map(|(name, a)| {
            let layer = name.strip_suffix(".lora_A.weight")?;
            let b = self.parameters().get(&format!("{layer}.lora_B.weight"))?;
            Some((layer.to_owned(), [a.clone(), b.clone()]))
        });
        self.write_matrices(folder, base, config, &layers.collect::<Vec<_>>())
    }

    fn write_matrices(
        &self,
        folder: &Path,
        base: &str,
        config: &LoraConfig,
        layers: &[(String, [Parameter; 2])],
    ) -> Result<()> {
        let ours = self.tensors();
        let (mut targets, mut patterns) = (BTreeSet::new(), [BTreeMap::new(), BTreeMap::new()]);
        for (layer, [a, _]) in layers {
            let is_ours = ours.get(&format!("{layer}.weight")).is_some();
            // PEFT knows no rows; and the last part of a name that is not ours may be that of other layers too.
            let target = last_parts(layer, if is_ours { 1 } else { 2 });
            let r = a.shape[0];
            if r != config.r {
                patterns[0].insert(target, r as f64);
                patterns[1].insert(target, config.alpha * r as f64 / config.r as f64);
            }
            targets.insert(target);
        }
        let [ranks, alphas] = patterns;
        let ranks: BTreeMap<&str, usize> =
            ranks.into_iter().map(|(k, r)| (k, r as usize)).collect();
        let about = serde_json::json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": config.r,
            "lora_alpha": config.alpha,
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "target_modules": targets,
        });
        let mut tensors = Vec::new();
        for (layer, matrices) in layers {
            for (which, matrix) in ["A", "B"].iter().zip(matrices) {
                tensors.push((format!("{PREFIX}{layer}.lora_{which}.weight"), matrix));
            }
        }
        let table: Vec<(&str, Dtype, &[usize])> =
            tensors.iter().map(|(name, of)| (name.as_str(), Dtype::F32, &of.shape[..])).collect();
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        safetensors::write_each(&folder.join(WEIGHTS), &table, &metadata, &mut |i: usize| {
            Dtype::F32.encode(&tensors[i].1.values)
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
    /// As [`Adapters::read`] and [`Adapters::beside`].
    pub fn read_adapters(&mut self, folder: &Path) -> Result<LoraConfig> {
        let adapters = Adapters::read(folder)?;
        let layers = adapters.beside(self.config(), self.checkpoint())?;
        let targets: BTreeSet<&str> = layers.keys().map(|layer| last_parts(layer, 1)).collect();
        let targets = targets.into_iter().map(str::to_owned).collect();
        let (r, alpha) = adapters.rank();
        for (layer, Adapter { a, b, scale }) in &layers {
            let matrices = [(a.shape.clone(), a.to_f32()?), (b.shape.clone(), b.to_f32()?)];
            self.add_adapter(layer, matrices, *scale)?;
        }
        adapters.check_unchanged()?;
        Ok(LoraConfig { r, alpha, targets })
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
        let adapted: BTreeSet<&str> = layers.iter().map(String::as_str).collect();
        self.unfreeze(|name| layer_of(name).is_some_and(|layer| adapted.contains(layer)))?;
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
