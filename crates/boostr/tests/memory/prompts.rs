//! Memory of a long prompt: bounded by one piece of it, whatever its length.

use crate::common::cpu;
use crate::counting::{HEAP, alone};
use crate::tiny::tokens;
use boostr::backend::Cpu;
use boostr::checkpoint::Dtype;
use boostr::models::{Logits, Model, Run};

#[test]
fn case_22_a_prompt_of_any_length_takes_the_memory_of_one_piece() {
    let _alone = alone();
    let config = crate::tiny::m("");
    let model: Model<Cpu> = Model::synthetic(config, Dtype::F32, cpu()).unwrap();
    let mut size = None;
    let mut peak = |len: usize| {
        let ids = tokens(22, len, 80);
        let mut state = model.new_state().unwrap();
        let before = HEAP.restart();
        let mut run = [Run { tokens: &ids, state: &mut state }];
        let logits = model.forward(&mut run, Logits::Last).unwrap();
        assert_eq!(logits.shape(), [1, 80]);
        let peak = HEAP.peak() - before;
        let bytes = state.size_in_bytes();
        assert_eq!(*size.get_or_insert(bytes), bytes, "state");
        drop(logits);
        // All of it is given back, but for the states that replace those there were.
        assert!(HEAP.now().saturating_sub(before) <= 2 * bytes, "kept {}", HEAP.now() - before);
        peak
    };
    peak(4096); // the pool's threads start here
    let (short, long) = (peak(4096), peak(32768));
    let growth = long.abs_diff(short);
    assert!(growth < 2 << 20, "4096 tokens take {short} bytes, 32768 take {long}");

    // Steps allocate no more from one to the next.
    let mut state = model.new_state().unwrap();
    let mut kept = [0; 2];
    for (round, kept) in kept.iter_mut().enumerate() {
        for id in tokens(23 + round as u64, 500, 80) {
            let mut run = [Run { tokens: &[id], state: &mut state }];
            model.forward(&mut run, Logits::Last).unwrap();
        }
        *kept = HEAP.now();
    }
    assert!(kept[1].abs_diff(kept[0]) < 64 << 10, "{kept:?}");
}
