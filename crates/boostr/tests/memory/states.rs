//! Tens of thousands of damaged states. Each is refused, or a state that can be used. None is a panic,
//! and none takes memory that its bytes do not account for.

use crate::common::{Folder, Random, cpu};
use crate::counting::{HEAP, alone};
use crate::sealed::Sealed;
use boostr::backend::Cpu;
use boostr::checkpoint::{ConfigFile, Dtype};
use boostr::models::{Config, Logits, Model, Run};
use boostr::ops::KvType;
use boostr::state_file::{About, SavedState, StateFile};

const MUTATIONS: usize = 20_000;

/// Files of some thousand bytes: a size that was believed would ask for gigabytes.
const MAX_HEAP: usize = 4 << 20;

fn model() -> Model<Cpu> {
    let text = r#"{"model_type": "bamba", "hidden_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 8, "num_hidden_layers": 2,
        "attn_layer_indices": [1], "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4,
        "mamba_n_groups": 1, "mamba_expand": 2, "vocab_size": 32}"#;
    let config = Config::read(&ConfigFile::parse("config.json", text).unwrap()).unwrap();
    Model::synthetic(config, Dtype::F32, cpu()).unwrap().with_kv_type(KvType::F16)
}

/// Numbers, names and shapes replaced by extreme ones: what random bytes rarely hit.
fn change(random: &mut Random, sealed: &mut Sealed) {
    const TEXTS: [&str; 12] = [
        "",
        "0",
        "1",
        "2",
        "65",
        "9223372036854775807",
        "18446744073709551615",
        "f16",
        "bf16",
        "q8_0",
        "boostr.state",
        "\0",
    ];
    const SIZES: [usize; 8] = [0, 1, 2, 3, 64, 1 << 32, usize::MAX / 2, usize::MAX];
    const NAMES: [&str; 6] = [
        "layers.0.ssm",
        "layers.1.keys",
        "layers.9.conv",
        "layers.18446744073709551615.values",
        "layers.99999999999999999999.ssm",
        "ids",
    ];
    for _ in 0..=random.below(3) {
        let key = sealed.metadata.keys().nth(random.below(9)).cloned();
        let name = sealed.tensors.keys().nth(random.below(5)).cloned();
        let text = TEXTS[random.below(TEXTS.len())].to_owned();
        let tensor = name.as_ref().and_then(|name| sealed.tensors.get_mut(name));
        match (random.below(8), key, name, tensor) {
            (0, Some(key), ..) => drop(sealed.metadata.insert(key, text)),
            (1, Some(key), ..) => drop(sealed.metadata.remove(&key)),
            (2 | 3, .., Some((_, shape, _))) => {
                let at = random.below(shape.len());
                shape.iter_mut().skip(at).take(1).for_each(|n| *n = SIZES[random.below(8)]);
            }
            // Of no bytes, so that any other dimension is possible.
            (4, .., Some((_, shape, data))) => {
                data.clear();
                let zero = random.below(shape.len());
                for (i, n) in shape.iter_mut().enumerate() {
                    *n = if i == zero { 0 } else { SIZES[random.below(8)] };
                }
            }
            (5, .., Some((dtype, ..))) => {
                ["F32", "F16", "BF16", "U32", "F64"][random.below(5)].clone_into(dtype);
            }
            (6, _, Some(name), _) => {
                let tensor = sealed.tensors.remove(&name).unwrap();
                sealed.tensors.insert(NAMES[random.below(6)].to_owned(), tensor);
            }
            (_, _, Some(name), _) => drop(sealed.tensors.remove(&name)),
            _ => {}
        }
    }
}

#[test]
fn r_e1_damaged_states_cost_neither_a_panic_nor_memory() {
    let _alone = alone();
    let model = model();
    let ids: Vec<u32> = (0..6).collect();
    let mut state = model.new_state().unwrap();
    model.forward(&mut [Run { tokens: &ids, state: &mut state }], Logits::None).unwrap();
    let folder = Folder::new();
    let path = folder.path().join("a.state");
    let about = About { ids: Some(&ids), ..About::new("fuzz") };
    StateFile::lock(&path).unwrap().save(&model, &state, &about).unwrap();
    let valid = std::fs::read(&path).unwrap();
    SavedState::open(&path).unwrap().restore(&model).unwrap();

    let mut random = Random(0x57a7_ef11_e000_0001);
    let (mut opened, mut restored) = (0, 0);
    for i in 0..MUTATIONS {
        let file = match i % 4 {
            0 => {
                let mut file = valid.clone();
                random.mutate(&mut file, &valid);
                file
            }
            1 => {
                let header = 8 + u64::from_le_bytes(*valid.first_chunk().unwrap()) as usize;
                let mut head = valid[..header].to_vec();
                random.mutate(&mut head, &valid);
                [&head, &valid[header..]].concat()
            }
            _ => {
                let mut sealed = Sealed::read(&valid);
                change(&mut random, &mut sealed);
                // Forged, so that the checks behind the checksum are reached.
                sealed.seal();
                sealed.bytes()
            }
        };
        let before = HEAP.restart();
        if let Ok(saved) = SavedState::from_bytes("fuzz", file) {
            opened += 1;
            saved.norms().unwrap();
            let _ = saved.rest_of(&ids);
            if let Ok(mut state) = saved.restore(&model) {
                restored += 1;
                let run = &mut [Run { tokens: &[1], state: &mut state }];
                model.forward(run, Logits::Last).unwrap();
            }
        }
        let growth = HEAP.peak() - before;
        assert!(growth < MAX_HEAP, "file {i}: {growth} bytes");
    }
    assert!(opened > 500 && restored > 50, "{opened} opened, {restored} restored: too rough");
}
