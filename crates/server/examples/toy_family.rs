//! A family of models that the library does not know, as one description. The program trains, saves,
//! opens, runs and serves it, and keeps its state in a file.
//!
//! ```sh
//! cargo run --release -p boostr-server --example toy_family
//! ```
//!
//! ```text
//! h ─┬─ norm ─ short causal convolution, silu ─ out_proj ─ + ─ ...   n_layer times
//!    └─────────────────────────────────────────────────────┘
//! ```

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use boostr::Result;
use boostr::backend::{Backend, Cpu, Tensor, cpu};
use boostr::engine::{Engine, EngineConfig};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::fields::Need::{Or, Required};
use boostr::models::{Entry, Families, Family, Fields, Frame, Logits, Names, Run};
use boostr::nn::{Batch, LayerSpec, Linear, Load, Module, Params, Part, Slot};
use boostr::ops::{CausalConv, CausalConvOps, LinearOps, to_vec};
use boostr::state_file::{About, SavedState, StateFile};
use boostr::train::data::{self, Piece};
use boostr::train::{AdamWConfig, Schedule, TrainableModel, Trainer};
use serde_json::{Map, Value, json};

// A part: a convolution whose last inputs a sequence remembers.

#[derive(Debug, Clone, PartialEq)]
struct ShortConv {
    d_model: usize,
    taps: usize,
}

impl Part for ShortConv {
    fn kind(&self) -> &'static str {
        "short_conv"
    }

    fn slots(&self) -> Vec<Slot> {
        vec![Slot::fixed("window", vec![self.taps - 1, self.d_model])]
    }

    fn sizes(&self) -> Vec<(&'static str, usize)> {
        vec![("taps", self.taps)]
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        vec![("convolution", format!("{} taps", self.taps))]
    }

    fn to_json(&self) -> Map<String, Value> {
        [("taps".to_owned(), json!(self.taps))].into_iter().collect()
    }

    fn work_width(&self) -> usize {
        2 * self.d_model
    }
}

// Its weights.

struct ShortConvWeights<B: Backend> {
    /// `[taps, d_model]`
    taps: Tensor<B>,
    out_proj: Linear<B>,
}

impl Load for ShortConv {
    fn load<B: Backend>(&self, params: &Params<'_, B>) -> Result<Box<dyn Module<B>>> {
        let conv = params.tensor("weight", &[self.d_model, self.taps])?;
        Ok(Box::new(ShortConvWeights {
            taps: params.computed(|client| client.transpose(&conv))?,
            out_proj: Linear::load(&params.under("out_proj"), [self.d_model; 2], false)?,
        }))
    }
}

impl<B: Backend> Module<B> for ShortConvWeights<B> {
    fn add_to(
        &self,
        client: &B::Client,
        u: &Tensor<B>,
        (residual, factor): (Tensor<B>, f32),
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>> {
        let conv = CausalConv { weight: &self.taps, bias: None, silu: true };
        let (runs, mut windows) = batch.tensors("window")?;
        let u = client.causal_conv1d(u, &conv, runs, &mut windows)?;
        self.out_proj.forward_onto(client, &u, residual, factor)
    }

    fn weight_bytes(&self) -> usize {
        self.out_proj.weight().size_in_bytes()
    }
}

// The family: fields and layers.

const NAMES: Names = Names {
    embeddings: "toy.embeddings",
    layers: "toy.layers",
    norm: "toy.norm",
    head: "toy.head",
};

#[derive(Debug, Clone, PartialEq)]
struct Toy {
    n_layer: usize,
    vocab_size: usize,
    tie_embeddings: Option<bool>,
    mixer: ShortConv,
}

impl Family for Toy {
    fn model_types() -> &'static [&'static str] {
        &["toy"]
    }

    fn blank() -> Self {
        let mixer = ShortConv { d_model: 0, taps: 0 };
        Self { n_layer: 0, vocab_size: 0, tie_embeddings: None, mixer }
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        f.constant("model_type", "toy");
        f.size(["hidden_size", ""], &mut self.mixer.d_model, Required)?;
        f.n_layer("num_hidden_layers", &mut self.n_layer)?;
        f.size(["taps", ""], &mut self.mixer.taps, Or(3))?;
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)
    }

    fn frame(&self) -> Frame {
        Frame::new(NAMES, self.mixer.d_model, self.vocab_size, 1e-5).tied(self.tie_embeddings)
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let layer = LayerSpec::new(self.mixer.d_model, 1e-5);
        vec![layer.norm("norm").and("conv", self.mixer.clone()); self.n_layer]
    }
}

// What the library then does with it.

const TEXT: &str = "the sea is wide and the sea is deep and ";
const TOKENIZER: &str = include_str!("../../../fixtures/models/mamba2-tiny/tokenizer.json");

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let folder = std::env::temp_dir().join(format!("boostr-toy-{}", std::process::id()));
    let result = train(&folder).and_then(|loss| {
        println!("trained to a loss of {loss:.3} nats a token");
        let families = Families::builtin().with(Entry::of::<Toy>());
        let options = OpenOptions { families, ..OpenOptions::default() };
        let lm = LanguageModel::<Cpu>::open(&folder, &options, cpu())?;
        state(&lm, &folder)?;
        serve(lm)
    });
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    result
}

/// Trains a new model on one sentence and writes its folder; returns the last loss.
fn train(folder: &Path) -> std::result::Result<f64, Box<dyn Error>> {
    let families = Families::builtin().with(Entry::of::<Toy>());
    let config = json!({
        "model_type": "toy", "hidden_size": 32, "num_hidden_layers": 2, "taps": 4, "vocab_size": 512,
        "tie_word_embeddings": true
    });
    let model = TrainableModel::new_of(&families, &config, TOKENIZER.to_owned(), 1)?;
    let tokenizer = model.tokenizer().ok_or("no tokenizer")?;
    let ids = tokenizer.encode(&TEXT.repeat(4), false)?;
    let schedule = Schedule { lr: 0.02, warmup_steps: 0, total_steps: 60, ..Schedule::default() };
    let mut trainer = Trainer::new(model, AdamWConfig::default(), schedule, 1024, false)?;
    let piece = Piece {
        tokens: ids[..ids.len() - 1].to_vec(),
        targets: ids[1..].to_vec(),
        slot: 0,
        is_start: true,
        document: 0,
    };
    let batch = data::Batch { pieces: vec![piece] };
    let mut loss = f64::INFINITY;
    for _ in 0..60 {
        loss = trainer.step(&batch)?.loss;
    }
    trainer.model().write_new(folder)?;
    Ok(loss)
}

/// Saves the state of a text and goes on from the file with the bits of the one in memory.
fn state(lm: &LanguageModel<Cpu>, folder: &Path) -> std::result::Result<(), Box<dyn Error>> {
    let ids = lm.encode(TEXT)?;
    let mut state = lm.model.new_state()?;
    lm.model.forward(&mut [Run { tokens: &ids, state: &mut state }], Logits::None)?;
    let path = folder.join("sea.state");
    StateFile::lock(&path)?.save(&lm.model, &state, &About::new("toy"))?;
    let mut restored = SavedState::open(&path)?.restore(&lm.model)?;
    let next = |state| -> Result<Vec<f32>> {
        to_vec(&lm.model.forward(&mut [Run { tokens: &ids[..1], state }], Logits::Last)?)
    };
    if next(&mut state)? != next(&mut restored)? {
        return Err("the state changed in its file".into());
    }
    println!("state of {} bytes saved and restored", state.size_in_bytes());
    Ok(())
}

/// Serves one request of this process.
fn serve(lm: LanguageModel<Cpu>) -> std::result::Result<(), Box<dyn Error>> {
    let lm = Arc::new(lm);
    let server = boostr_server::Server::new(boostr_server::Config::default())?;
    let engine = Engine::start(lm.clone(), EngineConfig::default())?;
    server.load(lm, engine, None, None)?;
    let body = json!({ "prompt": "the sea is wide", "max_tokens": 16, "temperature": 0 });
    let runtime = tokio::runtime::Runtime::new()?;
    let (status, answer) = runtime.block_on(server.answer("/v1/completions", body.to_string()));
    let text = answer["choices"][0]["text"].as_str().unwrap_or_default();
    println!("served: {status}, \"the sea is wide{text}\"");
    if status != 200 || !text.contains("sea") {
        return Err(format!("expected the sea again, found {answer}").into());
    }
    Ok(())
}
