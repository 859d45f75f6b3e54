//! `config.json` of any family: read, its tensors listed, written again, and run where the model is small.

use boostr::backend::{Cpu, cpu};
use boostr::checkpoint::gguf::Metadata;
use boostr::checkpoint::{ConfigFile, Dtype};
use boostr::models::{Config, Logits, Model, Run};
use boostr::nn::{LayerSpec, Part};

/// Most elements of a model that is made and run.
const MOST: usize = 1 << 16;

/// Most layers and experts of one whose tensors are listed: more of them take time, as they should.
const MOST_PARTS: usize = 200;

/// Reads `text`, and uses the configuration that it is.
pub fn check(text: &str) {
    let Ok(config) = read(text) else { return };
    let (family, rows) = (config.family(), config.family().frame().padded_vocab());
    let limit = config.context_limit();
    assert!(limit.is_none() || limit >= config.trained_length(), "{limit:?}");
    let layers = family.layers();
    let experts = layers.iter().flat_map(LayerSpec::parts).map(Part::experts);
    if experts.fold(layers.len(), usize::saturating_add) > MOST_PARTS {
        return;
    }
    let _ = family.gguf_layout(rows, true).map(|layout| layout.tensors());
    let _ = family.write_gguf(&mut Metadata::new("fuzz.gguf"));
    let _ = family.to_json();
    if let Ok(mut json) = family.folder_json() {
        // Who writes a folder knows these.
        json["vocab_size"] = rows.into();
        json["tie_word_embeddings"] = family.frame().tie_embeddings.into();
        let text = json.to_string();
        match read(&text) {
            Ok(again) => {
                let shown = |config: &Config| format!("{:?}", config.family().layers());
                assert_eq!(shown(&again), shown(&config), "by {text}");
            }
            Err(error) => panic!("what was written is not read: {error} in {text}"),
        }
    }
    let with_head = family.frame().tie_embeddings == Some(false);
    let layout = family.hf_layout(rows, with_head).expect("layers can be listed");
    let elements = |shape: &[usize]| shape.iter().fold(1, |all, &n| usize::saturating_mul(all, n));
    let sizes = layout.0.iter().map(|stored| elements(&stored.shape));
    if sizes.fold(0, usize::saturating_add) <= MOST {
        run(config.clone());
    }
}

fn read(text: &str) -> boostr::Result<Config> {
    Config::read(&ConfigFile::parse("config.json", text)?)
}

/// Makes a model and runs it, at once and token by token, if it runs.
fn run(config: Config) {
    let model = Model::<Cpu>::synthetic(config, Dtype::F32, cpu()).expect("a model of its sizes");
    let tokens = [0, 0, 0];
    let of_cuts = |cuts: &[&[u32]]| {
        let mut state = model.new_state()?;
        let mut last = None;
        for &tokens in cuts {
            let mut run = [Run { tokens, state: &mut state }];
            last = Some(model.forward(&mut run, Logits::Last)?.to_vec::<f32>());
        }
        Ok::<_, boostr::Error>(last)
    };
    let whole = of_cuts(&[&tokens]).ok();
    let cut = of_cuts(&[&tokens[..1], &tokens[1..]]).ok();
    let bits = |logits: Option<Option<Vec<f32>>>| {
        logits.map(|logits| logits.map(|all| all.into_iter().map(f32::to_bits).collect::<Vec<_>>()))
    };
    assert_eq!(bits(whole), bits(cut), "a text cut elsewhere");
}
