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
    // In turn, for on a machine that others use speeds change from one moment to the next.
    let (mut tokens, mut forks, mut back) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..TIMES {
        let token = milliseconds(|| next(&mut state))?;
        tokens.push(token);
        forks.push(milliseconds(|| next(&mut state.clone()))? - token);
        let snapshot = state.clone();
        back.push(
            milliseconds(|| {
                next(&mut state)?;
                state = snapshot.clone();
                Ok(())
            })? - token,
        );
    }
    say("a token", tokens);
    say("a fork that goes on, beyond that", forks);
    say("and to go back afterwards", back);

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

fn milliseconds(run: impl FnOnce() -> boostr::Result<()>) -> boostr::Result<f64> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

fn median(what: &str, mut run: impl FnMut() -> boostr::Result<()>) -> boostr::Result<()> {
    let times = (0..TIMES).map(|_| milliseconds(&mut run)).collect::<Result<_, _>>()?;
    say(what, times);
    Ok(())
}

fn say(what: &str, mut times: Vec<f64>) {
    times.sort_by(f64::total_cmp);
    println!("{what:36}{:9.3} ms", times[times.len() / 2]);
}
