//! Odd values in a `config.json` and in GGUF. A null is what the configuration class of transformers 5.24 takes it for: an error where the class
//! wants a number or a truth value, none where it allows none, and false for a flag.

use std::path::Path;

use crate::common::{cpu, delta_models};
use crate::tiny::{fixture, message};
use boostr::backend::Cpu;
use boostr::checkpoint::{Checkpoint, ConfigFile};
use boostr::models::{Config, Model};
use serde_json::{Map, Value, json};

/// The fields of a fixture's configuration where its family reads them.
fn fields(config: &mut Value) -> &mut Map<String, Value> {
    let at = if config.get("text_config").is_some() { "/text_config" } else { "" };
    config.pointer_mut(at).unwrap().as_object_mut().unwrap()
}

fn config(model: &str) -> Value {
    let text = std::fs::read_to_string(fixture(model).join("config.json")).unwrap();
    // Infinity alone is no JSON.
    let text = text.replace(" Infinity", " {\"__float__\": \"Infinity\"}");
    serde_json::from_str(&text).unwrap()
}

/// What a fixture's configuration reads as, with a field that is null, another value, or missing.
fn read(model: &str, key: &str, value: Option<Value>) -> boostr::Result<Config> {
    let mut config = config(model);
    let fields = fields(&mut config);
    fields.remove(key);
    fields.extend(value.map(|value| (key.to_owned(), value)));
    Config::read(&ConfigFile::parse("config.json", &config.to_string())?)
}

#[test]
fn a_null_where_the_class_wants_a_value_is_an_error_that_names_the_field() {
    for (model, keys) in [
        (
            "llama-tiny",
            "rope_theta rms_norm_eps max_position_embeddings attention_bias mlp_bias hidden_size \
             num_hidden_layers vocab_size intermediate_size num_attention_heads",
        ),
        (
            "bamba-tiny",
            "rope_theta rms_norm_eps max_position_embeddings mamba_n_groups mamba_d_state \
             mamba_d_conv mamba_n_heads mamba_expand mamba_d_head attention_bias",
        ),
        (
            "falcon-h1-tiny",
            "rope_theta rms_norm_eps max_position_embeddings mamba_n_groups mamba_d_state \
             mamba_d_conv mamba_n_heads embedding_multiplier lm_head_multiplier key_multiplier \
             attention_in_multiplier attention_out_multiplier ssm_in_multiplier ssm_out_multiplier",
        ),
        (
            "granitehybrid-moe-tiny",
            "rms_norm_eps max_position_embeddings mamba_n_groups mamba_d_state mamba_d_conv \
             mamba_n_heads mamba_expand num_local_experts num_experts_per_tok \
             embedding_multiplier logits_scaling residual_multiplier attention_multiplier \
             shared_intermediate_size",
        ),
        (
            "zamba2-tiny",
            "rope_theta rms_norm_eps max_position_embeddings mamba_ngroups mamba_d_state \
             mamba_d_conv mamba_expand n_mamba_heads num_attention_heads num_mem_blocks \
             adapter_rank use_mem_rope use_long_context add_bias_linear \
             use_shared_attention_adapter",
        ),
        (
            "nemotron-h-moe-tiny",
            "layer_norm_epsilon max_position_embeddings n_groups ssm_state_size conv_kernel \
             mamba_head_dim mamba_num_heads use_conv_bias mlp_bias attention_bias \
             num_key_value_heads head_dim n_group topk_group norm_topk_prob routed_scaling_factor \
             n_routed_experts num_experts_per_tok moe_intermediate_size \
             moe_shared_expert_intermediate_size",
        ),
        (
            "mamba2-tiny",
            "num_heads head_dim state_size conv_kernel expand n_groups use_bias use_conv_bias \
             layer_norm_epsilon",
        ),
        (
            "qwen3_5-tiny",
            "rms_norm_eps max_position_embeddings attention_bias head_dim num_key_value_heads \
             linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim \
             linear_num_key_heads linear_num_value_heads",
        ),
        (
            "qwen3next-tiny",
            "rope_theta partial_rotary_factor rms_norm_eps norm_topk_prob num_experts \
             num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size head_dim \
             num_key_value_heads decoder_sparse_step linear_value_head_dim",
        ),
        (
            "olmo-hybrid-tiny",
            "rms_norm_eps max_position_embeddings linear_conv_kernel_dim linear_allow_neg_eigval",
        ),
    ] {
        for key in keys.split_whitespace() {
            match read(model, key, Some(Value::Null)) {
                Ok(_) => panic!("{model}: {key} may be null"),
                Err(error) => {
                    let text = message(&error);
                    // The field, or `text_config.FIELD`.
                    let named =
                        text.contains(&format!("`{key}`")) || text.contains(&format!(".{key}`"));
                    assert!(named, "{model} {key}: {text}");
                }
            }
        }
    }
}

#[test]
fn a_null_activation_is_an_error_in_every_class() {
    // LFM2 has one activation, and no field for it.
    let models = crate::common::models().into_iter();
    for model in models.filter(|name| !name.starts_with("lfm2")) {
        let key = if model.starts_with("nemotron-h") { "mlp_hidden_act" } else { "hidden_act" };
        let text = message(&read(model, key, Some(Value::Null)).expect_err(model));
        assert!(text.contains(key) && text.contains("null"), "{model}: {text}");
    }
}

#[test]
fn a_null_interval_is_an_error_unless_a_list_of_layers_makes_it_needless() {
    const KEY: &str = "full_attention_interval";
    for model in ["qwen3next-tiny", "qwen3_5-tiny", "qwen3_5-moe-tiny"] {
        let with = |interval: Option<Value>, layers: Value| {
            let mut config = config(model);
            let fields = fields(&mut config);
            fields.remove(KEY);
            fields.extend(interval.map(|value| (KEY.to_owned(), value)));
            fields.insert("layer_types".into(), layers);
            Config::read(&ConfigFile::parse("config.json", &config.to_string()).unwrap())
        };
        let layers =
            json!(["linear_attention", "full_attention", "linear_attention", "full_attention"]);
        let text = message(&with(Some(Value::Null), Value::Null).unwrap_err());
        assert!(text.contains(KEY) && text.contains("null"), "{model}: {text}");
        let read =
            |interval: Option<Value>, layers: &Value| with(interval, layers.clone()).unwrap();
        assert_eq!(read(Some(Value::Null), &layers), read(None, &layers), "{model}");
        assert_eq!(read(Some(json!(4)), &Value::Null), read(None, &Value::Null), "{model}");
    }
}

#[test]
fn a_null_where_the_class_allows_none_is_what_the_class_makes_of_it() {
    // As many heads of keys and values as of queries, whatever the class has where the file says nothing.
    for (model, heads) in [("llama-tiny", 4), ("bamba-tiny", 4), ("falcon-h1-tiny", 4)] {
        let null = read(model, "num_key_value_heads", Some(Value::Null)).unwrap();
        assert_eq!(
            null,
            read(model, "num_key_value_heads", Some(heads.into())).unwrap(),
            "{model}"
        );
    }
    for (model, keys) in [
        ("llama-tiny", "head_dim rope_scaling"),
        ("zamba2-tiny", "intermediate_size num_key_value_heads"),
        (
            "olmo-hybrid-tiny",
            "num_key_value_heads linear_num_key_heads linear_num_value_heads linear_key_head_dim \
             linear_value_head_dim layer_types",
        ),
        ("nemotron-h-moe-tiny", "moe_latent_size sliding_window"),
        ("qwen3next-tiny", "mlp_only_layers layer_types rope_scaling"),
        ("kimi-linear-tiny", "q_lora_rank num_key_value_heads"),
    ] {
        for key in keys.split_whitespace() {
            let null = read(model, key, Some(Value::Null)).unwrap();
            assert_eq!(null, read(model, key, None).unwrap(), "{model} {key}");
        }
    }
}

#[test]
fn a_flag_that_may_be_null_is_false_then() {
    for (model, keys) in [
        ("bamba-tiny", "mamba_conv_bias mamba_proj_bias"),
        ("falcon-h1-tiny", "mamba_conv_bias mamba_proj_bias projectors_bias mamba_rms_norm"),
        ("falcon-h1-rms-tiny", "mamba_norm_before_gate"),
        ("granitehybrid-dense-tiny", "mamba_conv_bias mamba_proj_bias"),
        ("kimi-linear-tiny", "moe_renormalize use_grouped_topk"),
    ] {
        for key in keys.split_whitespace() {
            let null = read(model, key, Some(Value::Null)).unwrap();
            assert_eq!(null, read(model, key, Some(false.into())).unwrap(), "{model} {key}");
        }
    }
}

#[test]
fn a_key_of_gguf_that_is_missing_or_odd_is_named_or_does_no_harm() {
    use boostr::checkpoint::gguf;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/gguf");
    let mut refused = 0;
    for name in ["kimi-linear-tiny", "qwen3_5-tiny", "qwen3_5-moe-tiny", "qwen3next-tiny"] {
        let file = Checkpoint::open(&folder.join(format!("{name}.gguf")), false).unwrap();
        let metadata = file.gguf().unwrap().clone();
        let arch = metadata.text("general.architecture").unwrap().unwrap().to_owned();
        let prefix = format!("{arch}.");
        let keys: Vec<String> = metadata
            .iter()
            .map(|(key, _)| key.to_owned())
            .filter(|key| key.starts_with(&prefix))
            .collect();
        assert!(keys.len() > 12, "{name}");
        for key in keys {
            let odd: [Option<gguf::Value>; 8] = [
                None,
                Some(0u32.into()),
                Some(3u32.into()),
                Some((-1i32).into()),
                Some(u32::MAX.into()),
                Some(1e30f32.into()),
                Some("x".into()),
                Some((&[-1i32, 1 << 30][..]).into()),
            ];
            for value in odd {
                let mut changed = metadata.clone();
                let what = format!("{name}: {key} {value:?}");
                match value {
                    None => changed.retain(|other| other != key),
                    Some(value) => drop(changed.set(key.clone(), value)),
                }
                let read = Config::read_gguf(&file, &changed);
                let loaded = read.and_then(|it| Model::<Cpu>::load(it, file.clone(), cpu()));
                let Err(error) = loaded else { continue };
                let text = message(&error);
                refused += 1;
                // The key, another that it contradicts, or a tensor.
                let names = ["field `", "`blk.", "layers."].iter().any(|it| text.contains(it));
                assert!(names && text.len() < 1500, "{what}: {text}");
            }
        }
    }
    assert!(refused > 150, "{refused}");
}

#[test]
fn a_field_of_a_delta_model_that_is_missing_or_odd_is_named_or_does_no_harm() {
    let mut refused = 0;
    for name in delta_models() {
        let weights = Checkpoint::open(&fixture(name).join("model.safetensors"), false).unwrap();
        let whole = config(name);
        let mut places = vec![(String::new(), whole.clone())];
        let mut fields = Vec::new();
        while let Some((at, value)) = places.pop() {
            let below = value.as_object().into_iter().flatten();
            for (key, value) in below.filter(|(key, _)| *key != "vision_config") {
                fields.push(format!("{at}/{key}"));
                places.push((format!("{at}/{key}"), value.clone()));
            }
        }
        assert!(fields.len() > 20, "{name}");
        let odd = json!([null, -1, 0, 3, 1e30, 1u64 << 62, "x", [], [-1, 2], {}, true, 0.5]);
        for field in fields {
            let (at, key) = field.rsplit_once('/').unwrap();
            for value in odd.as_array().unwrap().iter().map(Some).chain([None]) {
                let mut changed = whole.clone();
                let fields = changed.pointer_mut(at).unwrap().as_object_mut().unwrap();
                fields.remove(key);
                fields.extend(value.map(|value| (key.to_owned(), value.clone())));
                let file = ConfigFile::parse("config.json", &changed.to_string()).unwrap();
                let read = Config::read(&file);
                let loaded = read.and_then(|it| Model::<Cpu>::load(it, weights.clone(), cpu()));
                let Err(error) = loaded else { continue };
                let text = message(&error);
                refused += 1;
                // The field, another that it contradicts, or a tensor.
                let of_others = ["field `", "layers.", "norm.weight", "lm_head", "embed_tokens"];
                let names = text.contains(key) || of_others.iter().any(|it| text.contains(it));
                assert!(names && text.len() < 1500, "{name}: {field} {value:?}: {text}");
            }
        }
    }
    assert!(refused > 500, "{refused}");
}
