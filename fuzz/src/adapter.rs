//! Folders of adapters: the text of `adapter_config.json`, and after a line `---` the header of the weights' file.

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use boostr::load::adapters::Adapters;
use boostr::train::{LoraConfig, Shape, TrainableModel};

const TOKENIZER: &str = include_str!("../../fixtures/models/mamba2-tiny/tokenizer.json");

/// Bytes of data behind a header.
const DATA: usize = 1 << 12;

fn model() -> TrainableModel {
    let shape = Shape { d_model: 16, n_layer: 1, d_state: 4, headdim: 8, ..Shape::default() };
    TrainableModel::new(&shape.to_config(96, 0), TOKENIZER.to_owned(), 0).expect("a model")
}

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("boostr-fuzz-adapters-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    folder
});

/// The weights of whole adapters of the model.
static WHOLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let (mut model, config) = (model(), LoraConfig::of_rank(2));
    model.add_adapters(&config, 1).expect("adapters");
    model.write_adapters(&FOLDER, "base", &config).expect("written");
    fs::read(FOLDER.join("adapter_model.safetensors")).expect("it is there")
});

/// Reads adapters, and merges those that are the model's.
pub fn check(text: &str) {
    let (config, header) = text.split_once("\n---\n").map_or((text, None), |(c, h)| (c, Some(h)));
    let weights = header.map_or_else(
        || WHOLE.clone(),
        |header| {
            let len = (header.len() as u64).to_le_bytes();
            [&len[..], header.as_bytes(), &[0; DATA]].concat()
        },
    );
    fs::write(FOLDER.join("adapter_config.json"), config).expect("written");
    fs::write(FOLDER.join("adapter_model.safetensors"), weights).expect("written");
    let _ = Adapters::read(&FOLDER);
    let mut model = model();
    if model.read_adapters(&FOLDER).is_ok() {
        let _ = model.merge_adapters();
    }
}
