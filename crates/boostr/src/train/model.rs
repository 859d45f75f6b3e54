//! A model whose parameters can be moved.
//!
//! A [`Model`] never changes; so each step makes one of the parameters as they are, in place, runs it, and
//! takes the parameters back.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::random::Random;
use super::{Gradients, Parameter, Parameters};
use crate::backend::{Backend, CpuClient, cpu};
use crate::checkpoint::{Bytes, Checkpoint, ConfigFile, Dtype, TensorEntry};
use crate::convert::{ModelFiles, in_new_folder};
use crate::error::{Error, Result};
use crate::load::OpenOptions;
use crate::models::{Config, Families, Model};
use crate::nn::Tensors;
use crate::tokenizer::Tokenizer;

/// Parameters, split into those that are trained and those that stay, and the files beside them.
pub struct TrainableModel {
    /// What its steps run on.
    client: CpuClient,
    files: ModelFiles,
    /// What is trained; the rest is in `files`.
    parameters: Parameters,
    /// The rows that move of parameters of which not all do.
    rows: BTreeMap<String, Vec<Range<usize>>>,
}

/// f32 values as bytes.
struct Floats(Vec<f32>);

impl AsRef<[u8]> for Floats {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

struct Shared(Arc<Floats>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

/// Parameters whose values a model has; they get them back when this is dropped.
struct Borrowed<'a> {
    parameters: &'a mut Parameters,
    /// In the order of the parameters.
    values: Vec<Arc<Floats>>,
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        for (parameter, values) in self.parameters.values_mut().zip(self.values.drain(..)) {
            parameter.values = match Arc::try_unwrap(values) {
                Ok(values) => values.0,
                // Somebody kept the model's memory.
                Err(values) => values.0.clone(),
            };
        }
    }
}

impl TrainableModel {
    /// A new model with the `config.json` `config` and random parameters, the same for the same seed.
    ///
    /// # Errors
    ///
    /// What is wrong with the configuration or the tokenizer.
    pub fn new(config: &serde_json::Value, tokenizer: String, seed: u64) -> Result<Self> {
        Self::new_of(&Families::builtin(), config, tokenizer, seed)
    }

    /// The same for a model of one of `families`.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn new_of(
        families: &Families,
        config: &serde_json::Value,
        tokenizer: String,
        seed: u64,
    ) -> Result<Self> {
        let file = ConfigFile::parse("config.json", &config.to_string())?;
        let config = families.read(&file)?;
        let frame = config.family().frame();
        let tied = frame.tie_embeddings.unwrap_or(true);
        let tensors = config.family().parameters(frame.padded_vocab(), !tied)?;
        let n_layer = config.family().layers().len();
        let mut random = Random::new(seed);
        let shared: Arc<Path> = Path::new("memory").into();
        let entries = tensors.iter().map(|(name, shape)| {
            let values = if tensors.are_offsets(name) {
                vec![0.0; shape.iter().product()]
            } else {
                initial(name, shape, n_layer, &mut random)
            };
            let data = Bytes::new(Dtype::F32.encode(&values)?);
            let entry = TensorEntry {
                dtype: Dtype::F32,
                shape: shape.to_vec(),
                data,
                file: shared.clone(),
            };
            Ok((name.to_owned(), entry))
        });
        let checkpoint = Checkpoint::from_entries("memory", entries.collect::<Result<_>>()?);
        let eos = file.ids("eos_token_id")?;
        let files = ModelFiles::new(config, checkpoint, tied, tokenizer, eos)?;
        let mut model = Self::of(files);
        model.unfreeze(|_| true)?;
        Ok(model)
    }

    /// The model at `path`, nothing of it to be trained yet.
    ///
    /// # Errors
    ///
    /// As [`LanguageModel::open`](crate::load::LanguageModel::open).
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Self> {
        let mut files = ModelFiles::open(path, options)?;
        files.restore_a_log()?;
        Ok(Self::of(files))
    }

    fn of(files: ModelFiles) -> Self {
        Self { client: cpu(), files, parameters: Parameters::new(), rows: BTreeMap::new() }
    }

    /// The same model, whose steps run on `client`; without, on [`cpu`].
    #[must_use]
    pub fn on(self, client: CpuClient) -> Self {
        Self { client, ..self }
    }

    /// What its steps run on.
    #[must_use]
    pub fn client(&self) -> &CpuClient {
        &self.client
    }

    /// Makes the parameters that `trains` names f32, to be trained.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for one in quantized blocks, [`Error::Tensors`] for one that is no float.
    pub fn unfreeze(&mut self, trains: impl Fn(&str) -> bool) -> Result<()> {
        for (name, entry) in self.files.checkpoint.iter() {
            // That bias is moved by how often an expert is chosen, not by a gradient.
            if !trains(name) || name.ends_with("e_score_correction_bias") {
                continue;
            }
            if let Dtype::Block(format) = entry.dtype {
                let what = format!(
                    "training of `{name}` in quantized blocks ({}): train adapters, or convert the \
                     model to a folder of floats first",
                    format.name()
                );
                return Err(Error::Unsupported { what });
            }
            let parameter = Parameter { shape: entry.shape.clone(), values: entry.to_f32()? };
            self.parameters.insert(name.to_owned(), parameter);
        }
        self.files.checkpoint.check_unchanged()?;
        let parameters = &self.parameters;
        self.files.checkpoint.retain(|name| !parameters.contains_key(name));
        Ok(())
    }

    /// Adds a parameter that is trained.
    pub(super) fn add(&mut self, name: String, parameter: Parameter) {
        self.parameters.insert(name, parameter);
    }

    /// Adds a tensor that is not trained.
    pub(super) fn add_constant(
        &mut self,
        name: &str,
        shape: &[usize],
        values: &[f32],
    ) -> Result<()> {
        let mut tensors = self.entries();
        let data = Bytes::new(Dtype::F32.encode(values)?);
        let file: Arc<Path> = Path::new("memory").into();
        let entry = TensorEntry { dtype: Dtype::F32, shape: shape.to_vec(), data, file };
        tensors.insert(name.to_owned(), entry);
        self.files.checkpoint.replace(tensors);
        Ok(())
    }

    /// Lets only these rows of a parameter move; the others must be zeros, which decay leaves as they are.
    pub(super) fn train_rows(&mut self, name: String, rows: Vec<Range<usize>>) {
        self.rows.insert(name, rows);
    }

    /// Makes the gradients of rows that are not to move zero.
    pub(super) fn hold_rows(&self, gradients: &mut Gradients) {
        for (name, moved) in &self.rows {
            let Some(gradient) = gradients.get_mut(name) else { continue };
            let rows = self.parameters.get(name).map_or(1, |parameter| parameter.shape[0]);
            let width = (gradient.len() / rows.max(1)).max(1);
            for (row, values) in gradient.chunks_mut(width).enumerate() {
                if !moved.iter().any(|rows| rows.contains(&row)) {
                    values.fill(0.0);
                }
            }
        }
    }

    /// Takes a parameter away.
    pub(super) fn take(&mut self, name: &str) -> Option<Parameter> {
        self.rows.remove(name);
        self.parameters.remove(name)
    }

    /// Takes a tensor of one value away; 1 where there is none.
    pub(super) fn take_constant(&mut self, name: &str) -> Result<f32> {
        let value = match self.files.checkpoint.get(name) {
            Some(entry) => entry.to_f32()?.first().copied().unwrap_or(1.0),
            None => 1.0,
        };
        self.files.checkpoint.retain(|other| other != name);
        Ok(value)
    }

    fn entries(&self) -> BTreeMap<String, TensorEntry> {
        let entries = self.files.checkpoint.iter();
        entries.map(|(name, entry)| (name.to_owned(), entry.clone())).collect()
    }

    /// What is not trained.
    pub(super) fn checkpoint(&self) -> &Checkpoint {
        &self.files.checkpoint
    }

    /// What is trained.
    #[must_use]
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// What is trained, to be moved: values may change, shapes and names not.
    pub fn parameters_mut(&mut self) -> &mut Parameters {
        &mut self.parameters
    }

    /// Sizes of the model.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.files.config
    }

    /// Text to ids and back.
    #[must_use]
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.files.tokenizer()
    }

    /// Shapes of all tensors, trained or not.
    #[must_use]
    pub fn tensors(&self) -> Tensors {
        let mut tensors = Tensors::default();
        for (name, entry) in self.files.checkpoint.iter() {
            tensors.add(name, &entry.shape);
        }
        for (name, parameter) in &self.parameters {
            tensors.add(name.as_str(), &parameter.shape);
        }
        tensors
    }

    /// Runs `work` with a model of the parameters as they are, made on `client`. The parameters are back
    /// when it returns, or panics.
    ///
    /// # Errors
    ///
    /// When the model cannot be made, and what `work` returns.
    pub fn with_model<B: Backend, T>(
        &mut self,
        client: B::Client,
        work: impl FnOnce(&Model<B>) -> Result<T>,
    ) -> Result<T> {
        let mut tensors = self.entries();
        let file: Arc<Path> = Path::new("memory").into();
        let Self { files, parameters, .. } = self;
        // Made before all that shares the values, so dropped after it.
        let mut borrowed = Borrowed { parameters, values: Vec::new() };
        for (name, parameter) in borrowed.parameters.iter_mut() {
            let values = Arc::new(Floats(std::mem::take(&mut parameter.values)));
            let entry = TensorEntry {
                dtype: Dtype::F32,
                shape: parameter.shape.clone(),
                data: Bytes::new(Shared(values.clone())),
                file: file.clone(),
            };
            tensors.insert(name.clone(), entry);
            borrowed.values.push(values);
        }
        let checkpoint = Checkpoint::from_entries("memory", tensors);
        let config = files.config.clone();
        let model = Model::of_params(config, &checkpoint, files.tied, client, (None, None))?;
        work(&model)
    }

    /// Writes the model to a new folder: whole or not at all.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn write_new(&self, folder: &Path) -> Result<()> {
        in_new_folder(folder, |folder| self.write(folder))
    }

    /// Writes the model to `folder`, which is there, as transformers reads it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the system refuses, [`Error::Unsupported`] for a family without such files.
    pub fn write(&self, folder: &Path) -> Result<()> {
        self.write_with(folder, |_| None)
    }

    /// The same, with other values of the parameters that `values` has some of, as averages.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn write_with<'a>(
        &self,
        folder: &Path,
        values: impl Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<()> {
        let mut tensors = self.entries();
        for (name, parameter) in &self.parameters {
            let entry = TensorEntry {
                dtype: Dtype::F32,
                shape: parameter.shape.clone(),
                data: Bytes::new(Dtype::F32.encode(values(name).unwrap_or(&parameter.values))?),
                file: Path::new("memory").into(),
            };
            tensors.insert(name.clone(), entry);
        }
        self.files.write_folder(folder, tensors)
    }
}

/// Values of a new parameter, as mamba_ssm and PyTorch's layers begin. Products keep the size of
/// their input, and additions to the residual stream are small.
///
/// | name | value |
/// |---|---|
/// | `A_log` | ln of uniform 1..16 |
/// | `D`, norms | 1; 0 where the weight is what the factors are above 1 |
/// | `dt_bias` | softplus of it is log-uniform in 0.001..0.1 |
/// | biases | 0 |
/// | embeddings, head | normal, deviation 0.02 |
/// | matrices, convolutions | uniform, at most `in^-1/2`; into the stream times `n_layer^-1/2` |
fn initial(name: &str, shape: &[usize], n_layer: usize, random: &mut Random) -> Vec<f32> {
    let count = shape.iter().product::<usize>();
    let last = name.rsplit('.').next().unwrap_or(name);
    let has = |parts: &[&str]| parts.iter().any(|part| name.split('.').any(|of| of == *part));
    let mut draw = |of: &mut dyn FnMut(&mut Random) -> f64| -> Vec<f32> {
        (0..count).map(|_| of(random) as f32).collect()
    };
    match (last, shape) {
        ("A_log", _) => draw(&mut |random| random.between(1.0, 16.0).ln()),
        ("dt_bias", _) => draw(&mut |random| {
            let dt = random.between(0.001f64.ln(), 0.1f64.ln()).exp();
            dt + (-(-dt).exp_m1()).ln()
        }),
        (last, _) if last.ends_with("bias") => vec![0.0; count],
        (_, [_]) => vec![1.0; count],
        _ if has(&["embeddings", "embed_tokens", "lm_head"]) => {
            draw(&mut |random| 0.02 * random.normal())
        }
        (_, [.., width]) => {
            let mut most = (*width as f64).powf(-0.5);
            if has(&["out_proj", "o_proj", "down_proj"]) {
                most /= (n_layer.max(1) as f64).sqrt();
            }
            draw(&mut |random| random.between(-most, most))
        }
        (_, []) => vec![1.0; count],
    }
}
