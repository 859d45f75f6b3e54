//! How often the threads of a forward meet: parallel regions a layer, by kind of mixer.

use boostr::backend::{self, Cpu};
use boostr::checkpoint::{ConfigFile, Dtype};
use boostr::models::{Config, Logits, Model, Run};
use boostr::ops::Format;
use boostr_kernels::parallel;
use serde_json::{Value, json};

/// Holds each of two layers alike to `most` regions for a token after others.
fn check(config: &Value, most: usize) {
    let config = Config::read(&ConfigFile::parse("config.json", &config.to_string()).unwrap());
    let config = config.unwrap();
    for dtype in [Dtype::Block(Format::Q8_0), Dtype::BF16] {
        let model = Model::<Cpu>::synthetic(config.clone(), dtype, backend::cpu()).unwrap();
        for threads in [2, 64] {
            let mut state = model.new_state().unwrap();
            let mut step = |tokens: &[u32]| {
                let mut run = [Run { tokens, state: &mut state }];
                parallel::steps(|| model.forward(&mut run, Logits::Last).unwrap()).1
            };
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let steps = pool.install(|| {
                step(&[1, 2, 3, 4]);
                step(&[5])
            });
            let regions = steps.iter().filter(|step| step.is_region).count();
            // The head is one.
            assert!(
                (2..=2 * most + 1).contains(&regions),
                "{dtype:?}, {threads} threads: {regions} regions"
            );
        }
    }
}

#[test]
fn a_token_takes_a_mamba2_layer_at_most_three_regions() {
    let config = json!({
        "model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128,
        "n_groups": 1, "expand": 2, "vocab_size": 512,
    });
    check(&config, 3);
}

#[test]
fn a_token_takes_a_layer_of_attention_and_mlp_at_most_five_regions() {
    let config = json!({
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2816,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "hidden_act": "silu",
    });
    check(&config, 5);
}

/// Two layers of `kind`, but for the feed-forward parts with the sizes of Qwen3.5-0.8B.
fn qwen3_5(model_type: &str, kind: &str) -> Value {
    json!({
        "model_type": model_type, "num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2048,
        "layer_types": [kind, kind], "vocab_size": 512, "tie_word_embeddings": true,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
        "rope_parameters": { "rope_theta": 1e7, "partial_rotary_factor": 0.25 },
        "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    })
}

#[test]
fn a_token_takes_a_layer_of_gated_delta_or_gated_attention_and_mlp_at_most_five_regions() {
    check(&qwen3_5("qwen3_5_text", "linear_attention"), 5);
    check(&qwen3_5("qwen3_5_text", "full_attention"), 5);
}

#[test]
fn a_token_takes_a_layer_with_a_mixture_of_experts_at_most_six_regions() {
    check(&qwen3_5("qwen3_5_moe_text", "linear_attention"), 6);
    check(&qwen3_5("qwen3_5_moe_text", "full_attention"), 6);
}
