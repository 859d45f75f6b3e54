//! Bugs that users of other implementations reported, as properties of whole models. Any partition, any
//! batch, any history equals one clean run in f64. Ids in names: `fixtures/CASES.md`.

use crate::common::{Folder, cpu};
use crate::tiny::{
    F32, Oracle, Tiny, close, converted, fixture, message, states, tokens, widened, with,
};
use boostr::backend::Cpu;
use boostr::checkpoint::{Checkpoint, Dtype};
use boostr::models::{Logits, Model, PIECE, Run, State};
use boostr::ops::{tensor, to_vec};

/// One call over several sequences: all their logits, one after another.
fn batch(model: &Model<Cpu>, prompts: &[&[u32]], states: &mut [State<Cpu>]) -> Vec<f32> {
    let mut runs: Vec<Run<'_, Cpu>> =
        prompts.iter().zip(states).map(|(tokens, state)| Run { tokens, state }).collect();
    to_vec(&model.forward(&mut runs, Logits::All).unwrap()).unwrap()
}

#[test]
fn case_5_a_short_prompt_after_other_runs_starts_clean() {
    let used = Tiny::m("");
    let long = tokens(1, 300, 80);
    for len in [1, 2, 3] {
        let short = tokens(2, len, 80);
        let mut before = used.state();
        used.run(&long, &[300], &mut before);
        drop(before);
        let mut state = used.state();
        let logits = used.run(&short, &[len], &mut state);
        let fresh = Tiny::m("");
        let mut clean = fresh.state();
        assert_eq!(logits, fresh.run(&short, &[len], &mut clean));
        assert_eq!(states(&state), states(&clean));
        let (want, want_states) = fresh.oracle(&short);
        close(&logits, &want, F32);
        close(&states(&state), &want_states, F32);
    }
}

#[test]
fn case_5_a_state_of_nan_stays_in_its_run() {
    let tiny = Tiny::m("");
    let prompts = [1, 70, 1, 20, 2].map(|len| tokens(len, len as usize, 80));
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    for spoiled in 0..prompts.len() {
        let mut batched: Vec<_> = prompts.iter().map(|_| tiny.state()).collect();
        for layer in 0..2 {
            let state = &mut batched[spoiled];
            for (shape, is_conv) in [
                (state.conv(layer).unwrap().shape().to_vec(), true),
                (state.ssm(layer).unwrap().shape().to_vec(), false),
            ] {
                let nan = vec![f32::NAN; shape.iter().product()];
                let nan = tensor(&cpu(), &nan, &shape).unwrap();
                if is_conv { state.set_conv(layer, nan) } else { state.set_ssm(layer, nan) }
                    .unwrap();
            }
        }
        let logits = batch(&tiny.model, &prompts, &mut batched);
        let mut first = 0;
        for (i, prompt) in prompts.iter().enumerate() {
            let got = &logits[first * 80..(first + prompt.len()) * 80];
            first += prompt.len();
            if i == spoiled {
                assert!(got.iter().all(|x| x.is_nan()), "run {i} forgot its state");
                continue;
            }
            let mut state = tiny.state();
            assert_eq!(got, tiny.run(prompt, &[prompt.len()], &mut state), "run {i} of {spoiled}");
            assert_eq!(states(&batched[i]), states(&state), "run {i} of {spoiled}");
        }
    }
}

#[test]
fn case_7_rows_of_a_ragged_batch_are_each_alone_in_pieces_and_steps() {
    let tiny = Tiny::m("");
    let lengths = [1, 3, 4, 7, 20];
    // A prompt, cut in two, then ten tokens one by one.
    let all: Vec<Vec<u32>> = lengths.iter().map(|&len| tokens(len as u64, len + 10, 80)).collect();
    for in_two in [false, true] {
        let pieces = |len: usize| {
            let first = if in_two { len / 2 } else { 0 };
            let mut pieces = vec![first, len - first];
            pieces.extend([1; 10]);
            pieces
        };
        let mut batched: Vec<_> = all.iter().map(|_| tiny.state()).collect();
        let mut logits = vec![Vec::new(); all.len()];
        let mut done = [0; 5];
        for round in 0..12 {
            let prompts: Vec<&[u32]> =
                (0..5).map(|i| &all[i][done[i]..done[i] + pieces(lengths[i])[round]]).collect();
            let mut rest = &batch(&tiny.model, &prompts, &mut batched)[..];
            for (i, prompt) in prompts.iter().enumerate() {
                let (row, others) = rest.split_at(prompt.len() * 80);
                logits[i].extend(row);
                rest = others;
                done[i] += prompt.len();
            }
        }
        for (i, ids) in all.iter().enumerate() {
            let mut state = tiny.state();
            let alone = tiny.run(ids, &pieces(lengths[i]), &mut state);
            assert_eq!(logits[i], alone, "row {i}");
            assert_eq!(states(&batched[i]), states(&state), "row {i}");
            let (want, want_states) = tiny.oracle(ids);
            close(&logits[i], &want, F32);
            close(&states(&batched[i]), &want_states, F32);
        }
    }
}

#[test]
fn case_12_every_cut_into_two_and_three_pieces_equals_one_pass() {
    for changes in ["", r#", "conv_kernel": 2, "n_groups": 4, "use_bias": true"#] {
        let tiny = Tiny::m(changes);
        let ids = tokens(3, 13, 80);
        let (want, want_states) = tiny.oracle(&ids);
        let cuts = (0..13).flat_map(|first| (first..13).map(move |second| (first, second)));
        for (first, second) in cuts {
            let mut state = tiny.state();
            let logits = tiny.run(&ids, &[first, second - first, 13 - second], &mut state);
            close(&logits, &want, F32);
            close(&states(&state), &want_states, F32);
        }
    }
}

#[test]
fn case_13_sixty_four_steps_equal_one_forward_with_a_limit_and_bf16_weights() {
    let config = crate::tiny::m(r#", "time_step_limit": [0.01, 0.1]"#);
    let weights = converted(&crate::tiny::checkpoint(&config, 13), Dtype::BF16);
    let tiny = Tiny::new(config, weights);
    let ids = tokens(4, 64, 80);
    let (mut stepped, mut whole) = (tiny.state(), tiny.state());
    let steps = tiny.run(&ids, &[1; 64], &mut stepped);
    let forward = tiny.run(&ids, &[64], &mut whole);
    let (want, want_states) = tiny.oracle(&ids);
    assert_eq!(steps, forward);
    close(&forward, &want, F32);
    assert_eq!(states(&stepped), states(&whole));
    close(&states(&whole), &want_states, F32);
    // The limit is active: without it the output is another.
    let free = Tiny::new(crate::tiny::m(""), tiny.checkpoint.clone());
    let other = free.run(&ids, &[64], &mut free.state());
    assert!(other.iter().zip(&forward).any(|(a, b)| (a - b).abs() > 0.01));
}

#[test]
fn case_15_a_checkpoint_saved_and_loaded_again_is_the_same_to_the_bit() {
    for name in ["mamba2-tiny", "mamba2-tiny-g2"] {
        let original = Checkpoint::open(&fixture(name), false).unwrap();
        let folder = Folder::new();
        let path = folder.path().join("model.safetensors");
        crate::tiny::save(&path, &original);
        let again = Checkpoint::open(&path, false).unwrap();
        assert_eq!(again.names().collect::<Vec<_>>(), original.names().collect::<Vec<_>>());
        for (name, tensor) in original.iter() {
            let saved = again.get(name).unwrap();
            assert_eq!((saved.dtype, &saved.shape), (tensor.dtype, &tensor.shape), "{name}");
            assert_eq!(*saved.data, *tensor.data, "{name}");
        }
    }
}

#[test]
fn case_15_no_tensor_may_be_missing_none_is_made_up() {
    for changes in [r#", "use_bias": true, "tie_word_embeddings": false"#, ""] {
        let tiny = Tiny::m(changes);
        for lost in tiny.checkpoint.names() {
            let less =
                crate::tiny::edited(&tiny.checkpoint, |name, t| (name != lost).then(|| t.clone()));
            let error = Model::<Cpu>::load(tiny.config.clone(), less, cpu()).err().unwrap();
            let text = message(&error);
            assert!(text.contains("1 tensors missing") && text.contains(lost), "{text}");
        }
    }
}

#[test]
fn case_16_four_thousand_steps_stay_with_the_definition() {
    let config = crate::tiny::m(
        r#", "hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 8, "vocab_size": 32"#,
    );
    // Slow decay, so that errors have thousands of steps to add up in.
    let weights = with(&crate::tiny::checkpoint(&config, 16), "A_log", |x| x - 6.0);
    let tiny = Tiny::new(config, weights);
    let mut oracle = Oracle::new(&tiny.config, &tiny.checkpoint);
    let mut state = tiny.state();
    for id in tokens(5, 4096, 32) {
        let logits = tiny.run(&[id], &[1], &mut state);
        close(&logits, &oracle.step(id), 1e-4);
    }
    let want: Vec<f64> = oracle.layers.into_iter().flatten().flatten().collect();
    close(&states(&state), &want, 1e-4);
    let largest = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    assert!(largest > 1.0, "the state is too small to show an error: {largest}");
}

#[test]
fn case_17_a_log_becomes_a_decay_once() {
    // Projections of zero leave a state to decay alone.
    let config = crate::tiny::m("");
    let weights = with(&crate::tiny::checkpoint(&config, 17), "in_proj.weight", |_| 0.0);
    let weights = with(&weights, "conv1d.bias", |_| 0.0);
    let tiny = Tiny::new(config, weights);
    let mut state = tiny.state();
    let ones = tensor(&cpu(), &[1.0; 4 * 32 * 16], &[4, 32, 16]).unwrap();
    state.set_ssm(1, ones).unwrap();
    tiny.run(&[5], &[1], &mut state);
    let values = |name: &str| {
        let name = format!("backbone.layers.1.mixer.{name}");
        widened(&tiny.checkpoint.get(&name).unwrap().to_f32().unwrap())
    };
    let (a_log, dt_bias) = (values("A_log"), values("dt_bias"));
    let want: Vec<f64> = (0..4 * 32 * 16)
        .map(|i| i / (32 * 16))
        .map(|head| (-crate::tiny::softplus(dt_bias[head]) * a_log[head].exp()).exp())
        .collect();
    close(&to_vec(state.ssm(1).unwrap()).unwrap(), &want, 1e-6);
}

#[test]
fn case_17_an_a_log_that_is_not_finite_is_refused_by_name() {
    let tiny = Tiny::m("");
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 89.0] {
        let weights = with(&tiny.checkpoint, "layers.1.mixer.A_log", |_| bad);
        let error = Model::<Cpu>::load(tiny.config.clone(), weights, cpu()).err();
        let text = message(&error.unwrap_or_else(|| panic!("{bad} was taken")));
        assert!(text.contains("layers.1.mixer.A_log") && text.contains("head 0"), "{text}");
    }
}

#[test]
fn case_31_prefill_in_pieces_of_any_size_equals_one_prefill() {
    let tiny = Tiny::m("");
    let ids = tokens(6, 250, 80);
    let (want, want_states) = tiny.oracle(&ids);
    for size in [1, 7, 60, 61, 64, 65, 100, 250] {
        let mut pieces = vec![size; 250 / size];
        pieces.push(250 % size);
        let mut state = tiny.state();
        // Positions are asserted after each piece.
        let logits = tiny.run(&ids, &pieces, &mut state);
        close(&logits, &want, F32);
        close(&states(&state), &want_states, F32);
    }
}

#[test]
fn case_31_prompts_longer_than_a_piece_are_one_call_to_the_bit_alone_and_together() {
    let tiny = Tiny::m(r#", "num_hidden_layers": 1, "hidden_size": 16, "expand": 8"#);
    let prompts = [2 * PIECE + 70, PIECE - 1, PIECE, 3].map(|len| tokens(len as u64, len, 80));
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let mut batched: Vec<_> = prompts.iter().map(|_| tiny.state()).collect();
    let logits = batch(&tiny.model, &prompts, &mut batched);
    let mut first = 0;
    for (prompt, batched) in prompts.iter().zip(&batched) {
        let len = prompt.len();
        let row = &logits[first * 80..(first + len) * 80];
        first += len;
        let mut pieces = vec![PIECE; len / PIECE];
        pieces.push(len % PIECE);
        for pieces in [vec![len], pieces] {
            let mut state = tiny.state();
            assert_eq!(tiny.run(prompt, &pieces, &mut state), row, "{pieces:?}");
            assert_eq!(states(&state), states(batched), "{pieces:?}");
        }
        let (want, want_states) = tiny.oracle(prompt);
        close(row, &want, F32);
        close(&states(batched), &want_states, F32);
    }
}

#[test]
fn case_32_a_limit_acts_alike_in_prefill_and_decode_and_the_default_does_nothing() {
    let free = Tiny::m("");
    let ids = tokens(7, 40, 80);
    let clear = free.run(&ids, &[40], &mut free.state());
    let explicit = Tiny::m(r#", "time_step_limit": [0.0, Infinity]"#);
    assert_eq!(clear, explicit.run(&ids, &[40], &mut explicit.state()));
    assert_eq!(
        free.run(&ids, &[1; 40], &mut free.state()),
        explicit.run(&ids, &[1; 40], &mut explicit.state())
    );

    let tiny = Tiny::m(r#", "time_step_limit": [0.05, 0.06]"#);
    let (want, _) = tiny.oracle(&ids);
    let prefill = tiny.run(&ids, &[40], &mut tiny.state());
    let decode = tiny.run(&ids, &[1; 40], &mut tiny.state());
    close(&prefill, &want, F32);
    close(&decode, &want, F32);
    for token in 1..40 {
        let at = token * 80..(token + 1) * 80;
        let moved = clear[at.clone()].iter().zip(&prefill[at]).any(|(a, b)| (a - b).abs() > 1e-3);
        assert!(moved, "the limit did nothing to token {token}");
    }
}
