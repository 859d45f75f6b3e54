//! What it costs to branch, rewind, save and load a state of the sizes of mamba2-130m.
//!
//! ```sh
//! cargo run --release -p boostr --example fork_state
//! ```

use std::time::Instant;

use boostr::backend::{Cpu, cpu};
use boostr::checkpoint::{ConfigFile, Dtype};
use boostr::models::{Config, Logits, Model, Run, State};
use boostr::state_file::{About, SavedState, StateFile, StateType};

const MAMBA2_130M: &str = r#"{"d_model": 768, "n_layer": 24, "vocab_size": 50277,
    "ssm_cfg": {"layer": "Mamba2"}, "pad_vocab_size_multiple": 16, "tie_embeddings": true}"#;

/// Each thing is done so many times; the median counts.
const TIMES: usize = 11;

fn main() -> boostr::Result<()> {
    let config = Config::read(&ConfigFile::parse("config.json", MAMBA2_130M)?)?;
    let model = Model::<Cpu>::synthetic(config, Dtype::BF16, cpu())?;
    let next = |state: &mut State<Cpu>| -> boostr::Result<()> {
        model.forward(&mut [Run { tokens: &[7], state }], Logits::Last).map(drop)
    };
    let mut state = model.new_state()?;
    model.forward(&mut [Run { tokens: &[5, 17, 3, 9], state: &mut state }], Logits::None)?;
    println!("state of {:.1} MB, median of {TIMES}", state.size_in_bytes() as f64 / 1e6);

    median("fork", || {
        drop(state.clone());
        Ok(())
    })?;
    let token = median("a token", || next(&mut state))?;
    let forked = median("a fork, and a token in it", || next(&mut state.clone()))?;
    println!("{:32}{:9.3} ms", "so a fork that is written to", forked - token);
    let snapshot = state.clone();
    median("a token, and back to before it", || {
        next(&mut state)?;
        state = snapshot.clone();
        Ok(())
    })?;

    let path = std::env::temp_dir().join(format!("boostr-fork-{}.state", std::process::id()));
    let file = StateFile::lock(&path)?;
    for dtype in StateType::ALL {
        let about = About { dtype, ..About::new("synthetic") };
        median(&format!("save as {}", dtype.name()), || file.save(&model, &state, &about))?;
        median(&format!("load from {}", dtype.name()), || {
            SavedState::open(&path)?.restore(&model).map(drop)
        })?;
    }
    let lock = path.with_file_name(format!(".boostr-fork-{}.state.lock", std::process::id()));
    for path in [path, lock] {
        std::fs::remove_file(&path).map_err(|e| boostr::Error::io(&path, e))?;
    }
    Ok(())
}

/// Milliseconds of the median, which are printed.
fn median(what: &str, mut run: impl FnMut() -> boostr::Result<()>) -> boostr::Result<f64> {
    let mut times = Vec::new();
    for _ in 0..TIMES {
        let start = Instant::now();
        run()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    let median = times[TIMES / 2];
    println!("{what:32}{median:9.3} ms");
    Ok(median)
}
