//! Memory of a step of training, with and without layers that are run again on the way back.

use crate::common::cpu;
use crate::counting::{HEAP, alone};
use boostr::backend::Recorded;
use boostr::models::Run;
use boostr::ops::Tape;
use boostr::train::TrainableModel;
use serde_json::json;

const WIDTH: usize = 64;
const TOKENS: usize = 448;

/// Bytes that the tape holds before the way back, and the most that a step takes.
fn bytes(n_layer: usize, recomputes: bool) -> [usize; 2] {
    let config = json!({
        "model_type": "mamba2", "hidden_size": WIDTH, "num_heads": 4, "head_dim": 32, "state_size": 16,
        "n_groups": 1, "num_hidden_layers": n_layer, "vocab_size": 64, "tie_word_embeddings": true
    });
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
    let tokenizer = std::fs::read_to_string(format!("{path}/tokenizer.json")).unwrap();
    let mut model = TrainableModel::new(&config, tokenizer, 1).unwrap();
    let tape = Tape::new(cpu(), |_| true).recomputing(recomputes);
    let ids: Vec<u32> = (0..=TOKENS).map(|i| u32::try_from(i * 7919 % 64).unwrap()).collect();
    model
        .with_model::<Recorded, _>(tape.clone(), |model| {
            let mut state = model.new_state()?;
            let before = HEAP.restart();
            let mut runs = [Run { tokens: &ids[..TOKENS], state: &mut state }];
            model.losses(&mut runs, &[&ids[1..]], None)?;
            let held = HEAP.now() - before;
            tape.backward()?;
            Ok([held, HEAP.peak() - before])
        })
        .unwrap()
}

#[test]
fn a_layer_that_is_run_again_keeps_its_rows_and_states_and_no_more() {
    let _alone = alone();
    bytes(4, false); // the pool's threads start here
    let per_layer = |recomputes| {
        let [held, peak] = bytes(4, recomputes);
        let [held_more, peak_more] = bytes(12, recomputes);
        [(held_more - held) / 8, (peak_more - peak) / 8]
    };
    let [held, peak] = per_layer(true);
    let [plain_held, plain_peak] = per_layer(false);
    let rows = 4 * TOKENS * WIDTH;
    let states = 4 * (4 * 32 * 16 + 3 * 160);
    // What keeps them, and positions, which all layers share.
    let more = 8 << 10;
    assert!((rows..rows + states + more).contains(&held), "{held} for {rows} and {states}");
    // The gradients of a layer's parameters are there at the end.
    let parameters = 4 * (292 * WIDTH + WIDTH * 128 + 5 * 160 + 128 + WIDTH + 12);
    assert!(peak <= held + parameters, "{peak} {held}");
    // Nine widths and more of what each layer computes.
    assert!(plain_held > 9 * rows, "{plain_held}");
    assert!(plain_peak > 9 * peak, "{plain_peak} {peak}");
}
