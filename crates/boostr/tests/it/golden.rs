//! The models against the original implementations' outputs (fixtures/models).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::{Folder, cpu, models};
use boostr::backend::{Cpu, Tensor};
use boostr::checkpoint::Checkpoint;
use boostr::load::LanguageModel;
use boostr::models::{Logits, Model, Run, State};
use boostr::nn::Kept;
use boostr::ops::to_vec;

/// The bound that the fixtures suggest for f32.
const TOLERANCE: f64 = 2e-4;
/// The same for states of delta rules, of their largest entry.
const STATES: f64 = 1e-4;
/// Models with a configuration of each generation of transformers.
const TWO_GENERATIONS: usize = 13;
/// Those of all models whose original clamps the steps of a prompt, but not of decoding.
const CLAMPING: usize = 3;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

struct Golden {
    model: Arc<Model<Cpu>>,
    file: Checkpoint,
    /// Before the names of what the original gives without limits of the steps, where those differ.
    prefix: &'static str,
}

impl Golden {
    fn open(name: &'static str) -> Self {
        let lm = LanguageModel::open(&folder(name), &Default::default(), cpu()).unwrap();
        let file = Checkpoint::open(&folder(name).join("golden.safetensors"), false).unwrap();
        let clamps = file.get("noclamp.logits_f64").is_some();
        Self { model: lm.model, file, prefix: if clamps { "noclamp." } else { "" } }
    }

    fn clamps(&self) -> bool {
        !self.prefix.is_empty()
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        let data = &self.file.get(name).unwrap().data;
        data.as_chunks::<8>()
            .0
            .iter()
            .map(|b| u32::try_from(i64::from_le_bytes(*b)).unwrap())
            .collect()
    }

    fn floats(&self, name: &str) -> Vec<f64> {
        let entry = self.file.get(name).unwrap_or_else(|| panic!("{name}"));
        match entry.dtype {
            boostr::checkpoint::Dtype::F64 => {
                entry.data.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
            }
            _ => entry.to_f32().unwrap().into_iter().map(f64::from).collect(),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.file.get(name).is_some()
    }

    /// A second prompt, and what the original says after each of the two, greedily.
    fn second(&self) -> (Vec<u32>, [Vec<u32>; 2]) {
        let greedy = self.ids("b2_greedy_ids");
        if self.has("b2_ids") {
            return (self.ids("b2_ids"), [self.ids("greedy_ids"), greedy]);
        }
        let (first, second) = greedy.split_at(16);
        (self.ids("b2_right_ids")[37..37 + 23].to_vec(), [first.to_vec(), second.to_vec()])
    }

    /// Logits of every token, fed in pieces.
    fn run(&self, tokens: &[u32], pieces: &[usize], state: &mut State<Cpu>) -> Vec<f32> {
        assert_eq!(pieces.iter().sum::<usize>(), tokens.len());
        let mut first = 0;
        let mut logits = Vec::new();
        for &len in pieces {
            let mut run = [Run { tokens: &tokens[first..first + len], state }];
            logits.extend(to_vec(&self.model.forward(&mut run, Logits::All).unwrap()).unwrap());
            first += len;
        }
        logits
    }

    /// Compares with the states whose names begin with `prefix`; returns how many there were.
    #[track_caller]
    fn check_state(&self, prefix: &str, state: &State<Cpu>) -> usize {
        let mut found = 0;
        for layer in 0..state.n_layer() {
            let mut want = |name: &str| {
                let name = format!("{prefix}.{name}.{layer}");
                let is_there = self.file.get(&name).is_some();
                found += usize::from(is_there);
                is_there.then(|| self.floats(&name))
            };
            if let Some(want) = want("ssm_state") {
                close(&to_vec(state.ssm(layer).unwrap()).unwrap(), &want, TOLERANCE);
            }
            if let Some(want) = want("delta_state") {
                let largest = want.iter().fold(0f64, |most, x| most.max(x.abs()));
                let Some(Kept::Tensor(got)) = state.layer(layer).unwrap().get("delta") else {
                    panic!("layer {layer} keeps no delta state");
                };
                close(&to_vec(got).unwrap(), &want, STATES * largest);
            }
            if let Some(want) = want("conv_state") {
                // The original keeps d_conv columns of [conv_dim]; d_conv - 1 rows are needed.
                let window = state.conv(layer).unwrap();
                let (kept, channels) = (window.shape()[0], window.shape()[1]);
                let columns = want.len() / channels;
                let want: Vec<f64> = (0..kept * channels)
                    .map(|i| want[i % channels * columns + (columns - kept) + i / channels])
                    .collect();
                close(&to_vec(window).unwrap(), &want, TOLERANCE);
            }
            // A latent and then a shared key for each token.
            for (name, is_last) in [("mla_latent", false), ("mla_shared_key", true)] {
                let Some(want) = want(name) else { continue };
                let cache = state.kv(layer).unwrap();
                let width = want.len() / cache.len();
                let first = if is_last { cache.sizes().d_key - width } else { 0 };
                let keys = cache.keys().unwrap();
                let rows = keys.chunks_exact(cache.sizes().d_key);
                let got: Vec<f32> =
                    rows.flat_map(|row| &row[first..first + width]).copied().collect();
                close(&got, &want, STATES);
            }
            for name in ["k_cache", "v_cache"] {
                let Some(want) = want(name) else { continue };
                let cache = state.kv(layer).unwrap();
                let got = if name == "k_cache" { cache.keys() } else { cache.values() }.unwrap();
                // The original's [Hk, L, D] as our [L, Hk, D].
                let (len, heads) = (cache.len(), cache.sizes().nheads);
                let width = got.len() / (len * heads);
                let of = |i: usize| {
                    let (token, head) = (i / width / heads, i / width % heads);
                    want[(head * len + token) * width + i % width]
                };
                close(&got, &(0..got.len()).map(of).collect::<Vec<_>>(), TOLERANCE);
            }
        }
        found
    }
}

#[track_caller]
fn close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "lengths");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(got) - want).abs() <= tolerance, "element {i}: {got} is not {want}");
    }
}

pub fn states(state: &State<Cpu>) -> Vec<f32> {
    let mut all = Vec::new();
    for (_, _, kept) in state.slots() {
        match kept {
            Kept::Tensor(tensor) => all.extend(to_vec(tensor).unwrap()),
            Kept::Rows(cache) => {
                all.extend(cache.keys().unwrap());
                all.extend(cache.values().unwrap());
            }
        }
    }
    all
}

fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
    u32::try_from(best).unwrap()
}

#[test]
fn logits_and_states_equal_the_original_at_every_position() {
    for name in models() {
        let golden = Golden::open(name);
        let ids = golden.ids("input_ids");
        let mut state = golden.model.new_state().unwrap();
        let logits = golden.run(&ids, &[ids.len()], &mut state);
        let prefix = golden.prefix;
        close(&logits, &golden.floats(&format!("{prefix}logits_f64")), TOLERANCE);
        assert!(golden.check_state(&format!("{prefix}prefill"), &state) > 0, "{name}");
        assert_eq!(state.position(), ids.len());
    }
}

#[test]
fn long_prompts_equal_the_original_around_the_edges_of_its_chunks() {
    let mut tested = 0;
    for name in models() {
        let golden = Golden::open(name);
        if golden.file.get("long_ids").is_none() {
            continue;
        }
        tested += 1;
        let ids = golden.ids("long_ids");
        let vocab = golden.model.vocab_rows();
        let want = golden.floats("long_logits_f64");
        let mut state = golden.model.new_state().unwrap();
        let logits = golden.run(&ids, &[ids.len()], &mut state);
        for (row, &position) in golden.ids("long_positions").iter().enumerate() {
            let first = position as usize * vocab;
            close(&logits[first..first + vocab], &want[row * vocab..][..vocab], TOLERANCE);
        }
        assert!(golden.check_state("long", &state) > 0, "{name}");
    }
    assert!(tested >= 2);
}

#[test]
fn limits_of_the_steps_give_what_the_original_gives_with_them() {
    let mut tested = 0;
    for name in models() {
        let golden = Golden::open(name);
        if !golden.clamps() {
            continue;
        }
        tested += 1;
        let limited = Folder::new();
        for file in ["model.safetensors", "tokenizer.json"] {
            std::fs::copy(folder(name).join(file), limited.path().join(file)).unwrap();
        }
        let text = std::fs::read_to_string(folder(name).join("config.json")).unwrap();
        let text = text.replacen('{', r#"{"time_step_limit": [0.001, Infinity],"#, 1);
        limited.write("config.json", text);
        let lm = LanguageModel::open(limited.path(), &Default::default(), cpu()).unwrap();
        let golden = Golden { model: lm.model, ..golden };
        let ids = golden.ids("input_ids");
        let mut state = golden.model.new_state().unwrap();
        let logits = golden.run(&ids, &[ids.len()], &mut state);
        close(&logits, &golden.floats("logits"), TOLERANCE);
        assert!(golden.check_state("prefill", &state) > 0, "{name}");
    }
    assert_eq!(tested, CLAMPING);
}

#[test]
fn both_generations_of_a_configuration_are_one_model() {
    let mut tested = 0;
    for name in models() {
        let golden = Golden::open(name);
        if !folder(name).join("config.hf5.json").exists() {
            continue;
        }
        tested += 1;
        let newer = Folder::new();
        for file in ["model.safetensors", "tokenizer.json"] {
            std::fs::copy(folder(name).join(file), newer.path().join(file)).unwrap();
        }
        std::fs::copy(folder(name).join("config.hf5.json"), newer.path().join("config.json"))
            .unwrap();
        let lm = LanguageModel::<Cpu>::open(newer.path(), &Default::default(), cpu()).unwrap();
        assert_eq!(lm.model.config(), golden.model.config(), "{name}");
    }
    assert_eq!(tested, TWO_GENERATIONS);
}

#[test]
fn greedy_continuation_equals_the_original() {
    for name in models() {
        let golden = Golden::open(name);
        let named = |name: &str| format!("{}{name}", golden.prefix);
        let (ids, want) = (golden.ids("input_ids"), golden.ids(&named("greedy_ids")));
        let vocab = golden.model.vocab_rows();
        let newest = "greedy_logits_f64";
        let logits = named("greedy_logits");
        let want_logits = golden.floats(if golden.has(newest) { newest } else { &logits });
        let mut state = golden.model.new_state().unwrap();
        let mut run = [Run { tokens: &ids, state: &mut state }];
        let mut logits = to_vec(&golden.model.forward(&mut run, Logits::Last).unwrap()).unwrap();
        // Newer fixtures have the states before the last of these ids.
        let is_new = golden.has("long_ids") || golden.has(newest);
        let fed = want.len() - usize::from(is_new);
        for (i, &id) in want.iter().enumerate() {
            if i == fed {
                assert!(golden.check_state("after_greedy", &state) > 0, "{name}");
            }
            close(&logits, &want_logits[i * vocab..(i + 1) * vocab], TOLERANCE);
            assert_eq!(argmax(&logits), id, "{name}: token {i}");
            logits = golden.run(&[id], &[1], &mut state);
        }
        if !golden.clamps() && fed == want.len() {
            golden.check_state("after_greedy", &state);
        }
    }
}

#[test]
fn d_18_every_split_into_pieces_has_the_bits_of_one_pass() {
    for name in models() {
        let golden = Golden::open(name);
        let ids = golden.ids("input_ids");
        let len = ids.len();
        let mut state = golden.model.new_state().unwrap();
        let whole = golden.run(&ids, &[len], &mut state);
        let whole_state = states(&state);
        let mut splits: Vec<Vec<usize>> = (1..len).map(|cut| vec![cut, len - cut]).collect();
        splits.extend((1..len - 2).map(|cut| vec![cut, 1, len - cut - 1]));
        splits.extend([vec![1; len], vec![2, 3, 1, len - 6], vec![len - 17, 16, 1]]);
        for pieces in splits {
            let mut state = golden.model.new_state().unwrap();
            assert_eq!(golden.run(&ids, &pieces, &mut state), whole, "{name}: {pieces:?}");
            assert_eq!(states(&state), whole_state, "{name}: {pieces:?}");
            assert_eq!(state.position(), len);
        }
    }
}

#[test]
fn d_7_23_batched_rows_have_the_bits_of_each_alone_and_equal_the_original() {
    for name in models() {
        let golden = Golden::open(name);
        let ids = golden.ids("input_ids");
        let (row1, want) = golden.second();
        let prompts: [&[u32]; 5] = [&ids, &row1, &ids[..1], &ids[..3], &ids[..4]];
        let mut batch: Vec<State<Cpu>> =
            prompts.iter().map(|_| golden.model.new_state().unwrap()).collect();
        let mut runs: Vec<Run<'_, Cpu>> =
            prompts.iter().zip(&mut batch).map(|(tokens, state)| Run { tokens, state }).collect();
        let logits = to_vec(&golden.model.forward(&mut runs, Logits::All).unwrap()).unwrap();
        let vocab = golden.model.vocab_rows();
        let mut first = 0;
        for (prompt, batched) in prompts.iter().zip(&batch) {
            let mut state = golden.model.new_state().unwrap();
            let alone = golden.run(prompt, &[prompt.len()], &mut state);
            assert_eq!(logits[first * vocab..(first + prompt.len()) * vocab], alone[..]);
            assert_eq!(states(batched), states(&state));
            first += prompt.len();
        }
        if golden.clamps() {
            continue; // The original clamps in these.
        }
        if golden.has("b2_logits_row1") {
            let rows = ids.len() * vocab..(ids.len() + row1.len()) * vocab;
            close(&logits[rows], &golden.floats("b2_logits_row1"), TOLERANCE);
        }

        // The greedy ids of each are the original's.
        for (prompt, want) in [&ids[..], &row1[..]].into_iter().zip(want) {
            let mut state = golden.model.new_state().unwrap();
            let mut logits = golden.run(prompt, &[prompt.len()], &mut state);
            for (i, want) in want.into_iter().enumerate() {
                let id = argmax(&logits[logits.len() - vocab..]);
                assert_eq!(id, want, "{name}: {} tokens, then {i}", prompt.len());
                logits = golden.run(&[id], &[1], &mut state);
            }
        }
    }
}

#[test]
fn a_fork_goes_its_own_way_and_leaves_its_parent() {
    for name in models() {
        let golden = Golden::open(name);
        let ids = golden.ids("input_ids");
        let mut parent = golden.model.new_state().unwrap();
        golden.run(&ids, &[ids.len()], &mut parent);
        let before = states(&parent);
        let mut fork = parent.clone();
        golden.run(&[7, 8], &[2], &mut fork);
        assert_eq!(states(&parent), before, "{name}");
        assert_ne!(states(&fork), before, "{name}");
        assert_eq!((parent.position(), fork.position()), (ids.len(), ids.len() + 2));
    }
    let golden = Golden::open("mamba2-tiny");
    let ids = golden.ids("input_ids");
    let mut parent = golden.model.new_state().unwrap();
    golden.run(&ids, &[37], &mut parent);
    let mut fork = parent.clone();
    golden.run(&[7, 8], &[2], &mut fork);
    let size = 2 * 4 * (8 * 16 * 32 + 3 * 192);
    assert_eq!((parent.size_in_bytes(), fork.size_in_bytes()), (size, size));
}

#[test]
fn a_state_is_readable_and_writable_as_tensors() {
    let golden = Golden::open("mamba2-tiny-g2");
    let ids = golden.ids("input_ids");
    let mut state = golden.model.new_state().unwrap();
    golden.run(&ids[..20], &[20], &mut state);
    let mut copy = golden.model.new_state().unwrap();
    for layer in 0..2 {
        copy.set_conv(layer, state.conv(layer).unwrap().clone()).unwrap();
        copy.set_ssm(layer, state.ssm(layer).unwrap().clone()).unwrap();
    }
    let (a, b) =
        (golden.run(&ids[20..], &[17], &mut state), golden.run(&ids[20..], &[17], &mut copy));
    assert_eq!(a, b);
    let wrong: Tensor<Cpu> = boostr::ops::zeros(&cpu(), &[1, 2, 3]).unwrap();
    assert!(copy.set_ssm(0, wrong.clone()).is_err());
    assert!(copy.set_ssm(2, wrong).is_err());
    assert!(copy.ssm(2).is_none());
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for name in models() {
        let golden = Golden::open(name);
        let ids = golden.ids("input_ids");
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let mut state = golden.model.new_state().unwrap();
                (golden.run(&ids, &[20, ids.len() - 20], &mut state), states(&state))
            })
        };
        let one = with(1);
        assert_eq!(with(2), one, "{name}");
        assert_eq!(with(5), one, "{name}");
    }
}
