//! Commands about models: logits against the original's, what is shown, and what is found wrong.

use std::fs;
use std::path::Path;

use boostr::checkpoint::{Checkpoint, ConfigFile, Dtype, safetensors};
use boostr::models::Config;
use boostr::nn::synthetic;
use serde_json::json;

use crate::common::*;

/// The bound that the fixtures suggest for f32 against the original in f64.
const TOLERANCE: f64 = 2e-4;

fn golden_ids() -> Vec<u64> {
    let text = fs::read_to_string(Path::new(&tiny()).join("golden.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    ids(&json["input_ids"])
}

fn tokens() -> String {
    golden_ids().iter().map(u64::to_string).collect::<Vec<_>>().join(",")
}

fn floats(file: &Checkpoint, name: &str) -> Vec<f64> {
    let entry = file.get(name).unwrap_or_else(|| panic!("{name}"));
    match entry.dtype {
        Dtype::F64 => {
            entry.data.as_chunks::<8>().0.iter().map(|&bytes| f64::from_le_bytes(bytes)).collect()
        }
        _ => entry.to_f32().unwrap().into_iter().map(f64::from).collect(),
    }
}

#[track_caller]
fn close(got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(worst <= TOLERANCE, "{worst}");
}

#[test]
fn logits_and_states_are_those_of_the_original_however_the_tokens_are_split() {
    let golden = Checkpoint::open(&Path::new(&tiny()).join("golden.safetensors"), false).unwrap();
    let out = folder("logits").join("out.safetensors");
    let path = out.to_str().unwrap();
    let (model, tokens) = (tiny(), tokens());
    let line = ["logits", "--model", &model, "--tokens", &tokens, "--out", path, "--states"];
    for split in [None, Some("20,17"), Some("1,0,35,1")] {
        let more: Vec<&str> = split.map_or(vec![], |split| vec!["--split", split]);
        let run = boostr(&[&line[..], &more[..]].concat()).ok();
        assert_eq!((run.stdout.as_str(), run.stderr.as_str()), ("", ""));
        let file = Checkpoint::open(&out, false).unwrap();
        assert_eq!(file.len(), 1 + 2 * 2);
        assert_eq!(file.get("logits").unwrap().shape, [37, 512]);
        close(&floats(&file, "logits"), &floats(&golden, "logits_f64"));
        for layer in 0..2 {
            let name = format!("ssm_state.{layer}");
            assert_eq!(file.get(&name).unwrap().shape, [1, 8, 16, 32]);
            close(&floats(&file, &name), &floats(&golden, &format!("prefill.{name}")));
            let name = format!("conv_state.{layer}");
            assert_eq!(file.get(&name).unwrap().shape, [1, 192, 3]);
            // The original keeps one column more than is needed.
            let columns = floats(&golden, &format!("prefill.{name}"));
            let want: Vec<f64> = columns.chunks(4).flat_map(|row| row[1..].to_vec()).collect();
            close(&floats(&file, &name), &want);
        }
    }
}

#[test]
fn a_split_that_is_not_all_tokens_is_wrong_usage() {
    let out = folder("split").join("out.safetensors");
    let line = ["logits", &tiny(), "--tokens", "5,17,3", "--out", out.to_str().unwrap()];
    let run = boostr(&[&line[..], &["--split", "1,1"]].concat()).fails(2);
    assert!(run.stderr.contains("--split is 2 tokens in all, --tokens has 3"), "{}", run.stderr);
    assert!(!out.exists());
    let line = ["logits", &tiny(), "--tokens", "5,512", "--out", out.to_str().unwrap()];
    let run = boostr(&line).fails(2);
    assert!(run.stderr.contains("token id 512"), "{}", run.stderr);
}

#[test]
fn p_kv_f16_overflow_names_the_option() {
    let model = root().join("crates/boostr/tests/data/people/kv-f16-overflow");
    let (model, out) = (model.to_str().unwrap(), folder("kv-f16").join("out.safetensors"));
    let tokens = ["--tokens", "5,9,30,2,17,11,8,25", "--kv-type"];
    let logits = ["logits", model, "--out", out.to_str().unwrap()];
    for line in [[&logits[..], &tokens, &["f16"]], [&["run", model, "-n", "2"], &tokens, &["f16"]]]
    {
        let run = boostr(&line.concat()).fails(1);
        assert!(run.stderr.contains("--kv-type"), "{}", run.stderr);
    }
    assert!(!out.exists());
    boostr(&[&logits[..], &tokens, &["bf16"]].concat()).ok();
}

#[test]
fn logits_that_cannot_be_written_are_a_failure() {
    let out = folder("unwritable").join("no/such/folder/out.safetensors");
    let run = boostr(&["logits", &tiny(), "--tokens", "5", "--out", out.to_str().unwrap()]);
    assert!(run.fails(1).stderr.contains("No such file"));
}

#[test]
fn logits_are_never_written_over_the_model() {
    let model = folder("over");
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(Path::new(&tiny()).join(name), model.join(name)).unwrap();
    }
    let before = fs::read(model.join("model.safetensors")).unwrap();
    std::os::unix::fs::symlink("model.safetensors", model.join("link.safetensors")).unwrap();
    let path = model.to_str().unwrap();
    for name in ["model.safetensors", "link.safetensors", "config.json"] {
        let out = model.join(name);
        let run = boostr(&["logits", path, "--tokens", "5", "--out", out.to_str().unwrap()]);
        assert!(run.fails(2).stderr.contains("a file of the model"));
    }
    assert_eq!(fs::read(model.join("model.safetensors")).unwrap(), before);
    let out = model.join("logits.safetensors");
    for _ in 0..2 {
        boostr(&["logits", path, "--tokens", "5", "--out", out.to_str().unwrap()]).ok();
    }
}

#[test]
fn a_special_file_in_a_models_folder_neither_hangs_nor_fills_memory() {
    let model = folder("special");
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(Path::new(&tiny()).join(name), model.join(name)).unwrap();
    }
    std::os::unix::fs::symlink("/dev/zero", model.join("generation_config.json")).unwrap();
    for command in [&["verify"][..], &["run", "-p", "x"]] {
        let run = boostr(&[command, &[model.to_str().unwrap()]].concat());
        let run = run.fails(3);
        let said = run.stderr.contains("regular file") || run.stdout.contains("regular file");
        assert!(said, "{command:?}");
    }
}

#[test]
fn logits_that_are_no_numbers_are_the_models_fault() {
    let model = folder("nan-logits");
    for name in ["config.json", "tokenizer.json"] {
        fs::copy(Path::new(&tiny()).join(name), model.join(name)).unwrap();
    }
    let good = Checkpoint::open(Path::new(&tiny()), false).unwrap();
    let nan = f32::NAN.to_le_bytes().repeat(64);
    let tensors: Vec<(&str, Dtype, &[usize], &[u8])> = good
        .iter()
        .map(|(name, t)| {
            let data = if name == "backbone.norm_f.weight" { &nan[..] } else { &t.data[..] };
            (name, t.dtype, &t.shape[..], data)
        })
        .collect();
    let path = model.join("model.safetensors");
    safetensors::write(&path, &tensors, &Default::default()).unwrap();
    let model = model.to_str().unwrap();
    let write = |name: &str, text: String| {
        let path = Path::new(model).join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let text = write("a.txt", "It is a truth universally acknowledged. ".repeat(9));
    let pairs =
        write("a.jsonl", json!({"context": "It is", "continuation": " a truth"}).to_string());
    for command in [
        &["run", model, "--tokens", "5,6"][..],
        &["run", model, "--tokens", "5,6", "--beams", "2"],
        &["eval", model, "--data", &text],
        &["eval", model, "--data", &pairs],
    ] {
        let run = boostr(command).fails(3);
        let is_told = ["NaN", "finite", "no probability"].iter().any(|x| run.stderr.contains(x));
        assert!(is_told && run.stderr.contains("verify"), "{command:?}: {}", run.stderr);
        assert!(!run.stdout.contains("NaN"), "{command:?}: {}", run.stdout);
    }
}

#[test]
fn floats_of_8_bits_are_shown_and_refused_by_every_command() {
    let model = folder("f8");
    for name in ["config.json", "tokenizer.json"] {
        fs::copy(Path::new(&tiny()).join(name), model.join(name)).unwrap();
    }
    let good = Checkpoint::open(Path::new(&tiny()), false).unwrap();
    // As a release with a scale for each block has it.
    let scale = 1f32.to_le_bytes();
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, t) in good.iter() {
        let is_matrix = name.contains("_proj") && t.shape.len() == 2;
        let count = t.shape.iter().product();
        let (dtype, data) =
            if is_matrix { (Dtype::F8E4M3, vec![0x38; count]) } else { (t.dtype, t.data.to_vec()) };
        tensors.push((name.to_owned(), dtype, t.shape.clone(), data));
        if is_matrix {
            tensors.push((format!("{name}_scale_inv"), Dtype::F32, vec![1, 1], scale.to_vec()));
        }
    }
    let table: Vec<(&str, Dtype, &[usize], &[u8])> = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (&**name, *dtype, &**shape, &**data))
        .collect();
    safetensors::write(&model.join("model.safetensors"), &table, &Default::default()).unwrap();
    let path = model.to_str().unwrap();
    let at = |name: &str| model.join(name).to_str().unwrap().to_owned();
    let (out, text) = (at("out.gguf"), at("a.txt"));
    fs::write(&text, "It is a truth universally acknowledged. ".repeat(9)).unwrap();
    let said = |way: &str| {
        for command in [
            &["run", path, "-p", "Hi"][..],
            &["chat", path],
            &["logits", path, "--tokens", "5", "--out", &out],
            &["eval", path, "--data", &text],
            &["convert", path, &out],
            &["quantize", path, &out, "-T", "q8_0"],
            &["imatrix", path, "--text", &text, "--out", &out],
            &["bench", path, "-p", "8", "-g", "2", "-r", "1"],
            &["tune", path, "--data", &text, "--out", &at("tuned"), "--steps", "1"],
            &["verify", path],
        ] {
            let run = boostr(command).fails(3);
            let all = run.stdout + &run.stderr;
            assert!(all.contains(way), "{command:?}: {all}");
            assert!(!Path::new(&out).exists(), "{command:?}");
        }
        let shown = boostr(&["show", path]).ok();
        assert!(shown.stdout.contains("F8_E4M3"), "{}", shown.stdout);
        let warning = shown.stderr.contains("it does not load: ") && shown.stderr.contains(way);
        assert!(warning, "{}", shown.stderr);
    };
    said("mixer.in_proj.weight` is F8_E4M3");
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    fs::write(model.join("config.json"), config.to_string()).unwrap();
    said("quantized by `fp8`");
}

#[test]
fn a_window_that_the_file_does_not_state_is_shown_as_the_classs() {
    let folder = folder("class-window");
    let path = folder.to_str().unwrap();
    let mut config = json!({
        "model_type": "mistral", "hidden_size": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24, "num_hidden_layers": 1,
        "vocab_size": 32, "tie_word_embeddings": true,
    });
    let file = ConfigFile::parse("config.json", &config.to_string()).unwrap();
    let tensors = Config::read(&file).unwrap().family().parameters(32, false).unwrap();
    let checkpoint = synthetic::checkpoint(&tensors, Dtype::F32).unwrap();
    let tensors: Vec<_> =
        checkpoint.iter().map(|(name, t)| (name, t.dtype, &t.shape[..], &*t.data)).collect();
    safetensors::write(&folder.join("model.safetensors"), &tensors, &Default::default()).unwrap();
    let says = "4096 tokens, of transformers' class";
    for (window, is_of_class) in
        [(None, true), (Some(json!(4096)), false), (Some(json!(null)), false)]
    {
        if let Some(window) = window {
            config["sliding_window"] = window;
        }
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let shown = boostr(&["show", path]).ok().stdout;
        assert_eq!(shown.contains(says), is_of_class, "{shown}");
    }
}

#[test]
fn show_counts_what_is_there() {
    let json = boostr(&["show", "--json", "--tensors"]).ok().json();
    assert_eq!(json["parameters"], 2_684_664);
    assert_eq!(json["parameters_non_embedding"], 2_684_664 - 2048 * 256);
    for (field, value) in [("n_layer", 5), ("d_model", 256), ("nheads", 8), ("headdim", 64)] {
        assert_eq!(json[field], value, "{field}");
    }
    for (field, value) in [("ngroups", 1), ("d_state", 64), ("vocab_rows", 2048)] {
        assert_eq!(json[field], value, "{field}");
    }
    assert_eq!(json["state_bytes"], 693_760);
    assert_eq!(json["file_bytes"], 5_414_328);
    assert_eq!(json["tensors"].as_array().unwrap().len(), 47);
    let first = &json["tensors"][0];
    assert_eq!(first["name"], "backbone.embeddings.weight");
    assert_eq!((&first["dtype"], &first["bytes"]), (&json!("BF16"), &json!(2048 * 256 * 2)));
    assert_eq!(boostr(&["inspect", &demo(), "--json"]).ok().json()["file_bytes"], 5_414_328);
}

#[test]
fn show_counts_what_a_model_does_without() {
    let fixture = |name: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
        folder.join(name).to_str().unwrap().to_owned()
    };
    let parameters = |name: &str| {
        let json = boostr(&["show", "--json", &fixture(name)]).ok().json();
        let left_out: Vec<(String, u64, u64)> = json["left_out"]
            .as_array()
            .unwrap()
            .iter()
            .map(|it| {
                let number = |key: &str| it[key].as_u64().unwrap();
                (it["what"].as_str().unwrap().to_owned(), number("tensors"), number("bytes"))
            })
            .collect();
        (json["parameters"].as_u64().unwrap(), left_out)
    };
    let (folder, left_out) = parameters("models/qwen3_5-tiny");
    let what = ["the vision tower", "the block for more than the next token"];
    let names: Vec<&str> = left_out.iter().map(|(what, ..)| what.as_str()).collect();
    assert_eq!(names, what);
    assert_eq!(left_out[0].1, 4);
    let (file, in_file) = parameters("gguf/qwen3_5-tiny.gguf");
    assert_eq!(file, folder);
    assert_eq!(in_file.len(), 1);
    assert_eq!((in_file[0].0.as_str(), in_file[0].1, in_file[0].2), {
        let (what, tensors, bytes) = &left_out[1];
        (what.as_str(), *tensors, *bytes)
    });
    let text = boostr(&["show", &fixture("models/qwen3_5-tiny")]).ok().stdout;
    assert!(text.contains("not read        4 tensors of the vision tower, "), "{text}");
    assert!(text.contains("512 ids, 512 rows"), "{text}");
    assert!(text.contains("for more than the next token, ") && text.contains("--draft mtp"));
    assert_eq!(parameters("models/olmo-hybrid-tiny").1, []);

    // The numbers are those of the model in every command that says them.
    let count = format!("{folder} parameters");
    let thousands = format!("{:.2} k parameters", folder as f64 / 1e3);
    for name in ["models/qwen3_5-tiny", "gguf/qwen3_5-tiny.gguf"] {
        let text = boostr(&["verify", &fixture(name)]).ok().stdout;
        assert!(text.contains(&count) || text.contains(&thousands), "{name}: {text}");
    }
}

#[test]
fn a_block_for_one_token_more_that_lacks_a_tensor_is_said_to_be_of_no_use() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/qwen3_5-tiny");
    let folder = folder("half-a-block");
    fs::copy(fixture.join("config.json"), folder.join("config.json")).unwrap();
    fs::copy(fixture.join("tokenizer.json"), folder.join("tokenizer.json")).unwrap();
    let mut file = Checkpoint::open(&fixture, false).unwrap();
    for lacking in ["mtp.norm.weight", "mtp.fc.weight"] {
        file.retain(|name| name != lacking);
        let tensors: Vec<(&str, Dtype, &[usize], &[u8])> = file
            .iter()
            .map(|(name, entry)| (name, entry.dtype, &entry.shape[..], &entry.data[..]))
            .collect();
        safetensors::write(&folder.join("model.safetensors"), &tensors, &Default::default())
            .unwrap();
        let path = folder.to_str().unwrap();
        let text = boostr(&["show", path]).ok().stdout;
        let says = format!("--draft mtp cannot: `{path}`: ");
        assert!(text.contains(&says) && text.contains(lacking), "{text}");
        let text = boostr(&["verify", path]).fails(3).stdout;
        assert!(text.contains("draft") && text.contains(lacking), "{text}");
        boostr(&["run", path, "-p", "a", "-n", "2"]).ok();
        boostr(&["run", path, "-p", "a", "-n", "2", "--draft", "mtp"]).fails(3);
    }
}

#[test]
fn show_is_for_people_too() {
    let run = boostr(&["show", &tiny()]).ok();
    for part in ["layers", "8 of 16", "512 ids, 512 rows", "2 x F32", "backbone.layers.*.mixer.D"] {
        assert!(run.stdout.contains(part), "{part}: {}", run.stdout);
    }
    let all = boostr(&["show", &tiny(), "--tensors"]).ok();
    assert!(all.stdout.contains("backbone.layers.1.mixer.D "), "{}", all.stdout);
}

#[test]
fn weights_that_layers_share_count_once() {
    let tiny = root().join("fixtures/models/zamba2-tiny");
    let checkpoint = Checkpoint::open(&tiny, false).unwrap();
    // Layer 6 has the block of layer 2.
    let shared = |name: &str| name.contains(".2.shared_transformer");
    let copy = |name: &str| name.replace(".2.shared_transformer", ".6.shared_transformer");
    let copies = checkpoint.iter().filter(|(name, _)| shared(name));
    let copies: Vec<_> = copies.map(|(name, entry)| (copy(name), entry)).collect();
    let own = checkpoint.iter().map(|(name, entry)| (name.to_owned(), entry));
    let all: Vec<_> = own.chain(copies).collect();
    let tensors: Vec<_> =
        all.iter().map(|(name, t)| (name.as_str(), t.dtype, &t.shape[..], &*t.data)).collect();
    let often = folder("often");
    fs::copy(tiny.join("config.json"), often.join("config.json")).unwrap();
    safetensors::write(&often.join("model.safetensors"), &tensors, &Default::default()).unwrap();

    let elements: usize =
        checkpoint.iter().map(|(_, entry)| entry.shape.iter().product::<usize>()).sum();
    for model in [&tiny, &often] {
        let json = boostr(&["show", model.to_str().unwrap(), "--json"]).ok().json();
        assert_eq!(json["parameters"], elements);
        assert_eq!(json["weight_bytes"], 4 * elements);
        assert_eq!(json["layers"][2], "mamba2 + attention + mlp");
    }
    assert!(tensors.len() > checkpoint.len());
}

#[test]
fn memory_of_layers_with_a_window_does_not_grow_past_it() {
    let folder = folder("window");
    let path = folder.to_str().unwrap();
    // Keys and values of 2 heads of 32 in f32.
    let per_token = 2 * 2 * 32 * 4;
    for (kinds, says) in [
        (["sliding_attention"; 2], "1.0 kB for each token of the window (f32)"),
        (
            ["sliding_attention", "full_attention"],
            "1.0 kB for each token, 512 B of it only within the window (f32)",
        ),
    ] {
        let config = json!({
            "model_type": "mistral", "hidden_size": 16, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 24, "num_hidden_layers": 2,
            "vocab_size": 32, "tie_word_embeddings": true, "sliding_window": 100,
            "layer_types": kinds,
        });
        let config = config.to_string();
        fs::write(folder.join("config.json"), &config).unwrap();
        let config = Config::read(&ConfigFile::parse("config.json", &config).unwrap()).unwrap();
        let tensors = config.family().parameters(32, false).unwrap();
        let checkpoint = synthetic::checkpoint(&tensors, Dtype::F32).unwrap();
        let tensors: Vec<_> =
            checkpoint.iter().map(|(name, t)| (name, t.dtype, &t.shape[..], &*t.data)).collect();
        safetensors::write(&folder.join("model.safetensors"), &tensors, &Default::default())
            .unwrap();
        let memory = |context: &str| {
            let json = boostr(&["show", path, "--json", "--context", context]).ok().json();
            json["memory_bytes"].as_u64().unwrap()
        };
        // A window of 100 lies in 3 pages of 64 at most.
        for (context, windowed, full) in
            [("100", 128, 128), ("129", 192, 192), ("1000", 192, 1024), ("6400000", 192, 6_400_000)]
        {
            let kept = if kinds[1] == kinds[0] { 2 * windowed } else { windowed + full };
            let growth = memory(context) - memory("1");
            assert_eq!(growth, per_token * (kept - 2 * 64), "{kinds:?} at {context}");
        }
        let text = boostr(&["show", path]).ok().stdout;
        assert!(text.contains(says), "{text}");
    }
}

#[test]
fn show_reads_a_weight_file_without_a_configuration() {
    let file = folder("lonely").join("weights.safetensors");
    fs::copy(Path::new(&tiny()).join("model.safetensors"), &file).unwrap();
    let json = boostr(&["show", file.to_str().unwrap(), "--json"]).ok().json();
    assert!(json["parameters"].as_u64().unwrap() > 0);
    assert_eq!(json.get("n_layer"), None);
}

#[test]
fn verify_finds_nothing_wrong_with_good_models() {
    let tokenizer = Path::new(&tiny()).join("tokenizer.json");
    let weights = Path::new(&tiny()).join("model.safetensors");
    for path in [&demo(), &tiny(), tokenizer.to_str().unwrap(), weights.to_str().unwrap()] {
        let run = boostr(&["verify", path, "--values"]).ok();
        assert!(run.stdout.lines().all(|line| line.starts_with("ok")), "{}", run.stdout);
        assert_eq!(run.stderr, "");
    }
    let json = boostr(&["verify", "--json"]).ok().json();
    assert_eq!(json["ok"], true);
}

/// Verifies and runs a broken model: both say it, and end with the code of a bad model.
#[track_caller]
fn is_bad(model: &Path, says: &str) {
    let path = model.to_str().unwrap();
    let run = boostr(&["verify", path, "--values"]).fails(3);
    assert!(run.stdout.contains("fail") && run.stdout.contains(says), "{}", run.stdout);
    assert!(run.stderr.contains("checks failed"), "{}", run.stderr);
    let json = boostr(&["verify", path, "--values", "--json"]).fails(3).json();
    assert_eq!(json["ok"], false);
}

#[test]
fn a_truncated_file_is_found_with_its_byte() {
    let model = copy_of_tiny("truncated");
    let file = model.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 1000]).unwrap();
    is_bad(&model, "truncated file?");
    is_bad(&file, "truncated file?");
    let path = model.to_str().unwrap();
    assert!(boostr(&["run", path, "--tokens", "5"]).fails(3).stderr.contains("truncated file?"));
    assert!(boostr(&["show", path]).fails(3).stderr.contains("model.safetensors"));
    assert!(boostr(&["doctor", path]).fails(1).stdout.contains("truncated file?"));
}

#[test]
fn a_missing_tensor_and_an_unexpected_one_are_found_by_name() {
    let model = copy_of_tiny("missing-tensor");
    rewrite(&model, |tensors| {
        for (name, ..) in tensors.iter_mut().filter(|t| t.0 == "backbone.layers.1.mixer.D") {
            *name = "backbone.layers.1.mixer.E".to_owned();
        }
    });
    is_bad(&model, "missing: `backbone.layers.1.mixer.D`");
    let run = boostr(&["run", model.to_str().unwrap(), "--tokens", "5"]).fails(3);
    assert!(run.stderr.contains("unexpected: `backbone.layers.1.mixer.E`"), "{}", run.stderr);
}

#[test]
fn a_missing_configuration_is_found() {
    let model = copy_of_tiny("no-config");
    fs::remove_file(model.join("config.json")).unwrap();
    is_bad(&model, "no config.json");
    fs::write(model.join("config.json"), r#"{"model_type": "gpt2"}"#).unwrap();
    is_bad(&model, "model_type `gpt2`");
    fs::write(model.join("config.json"), "{").unwrap();
    is_bad(&model, "config.json");
}

#[test]
fn every_problem_is_told_not_only_the_first() {
    let model = copy_of_tiny("many-problems");
    fs::write(model.join("config.json"), "[]").unwrap();
    fs::write(model.join("model.safetensors"), "hello").unwrap();
    fs::write(model.join("tokenizer.json"), "{}").unwrap();
    fs::write(model.join("generation_config.json"), r#"{"top_p": 7}"#).unwrap();
    let run = boostr(&["verify", model.to_str().unwrap()]).fails(3);
    assert_eq!(run.stdout.matches("fail").count(), 4, "{}", run.stdout);
}

#[test]
fn bad_values_are_found_when_looked_for() {
    let model = copy_of_tiny("nan");
    rewrite(&model, |tensors| {
        let (.., bytes) = tensors.iter_mut().find(|t| t.0.ends_with("norm_f.weight")).unwrap();
        bytes[12..16].copy_from_slice(&f32::NAN.to_le_bytes());
        bytes[20..24].copy_from_slice(&f32::NEG_INFINITY.to_le_bytes());
    });
    let path = model.to_str().unwrap();
    boostr(&["verify", path]).ok();
    is_bad(&model, "`backbone.norm_f.weight` has 1 NaN and 1 infinite values, the first at 3");
    assert!(boostr(&["run", path, "--tokens", "5"]).fails(3).stderr.contains("NaN"));
    let out = folder("no-numbers").join("out.safetensors");
    let run = boostr(&["logits", path, "--tokens", "5", "--out", out.to_str().unwrap()]).fails(3);
    assert!(run.stderr.contains("its logits are not to be used: position 0"), "{}", run.stderr);
    assert!(!out.exists());
}

type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

/// Changes the tensors of a model's file.
fn rewrite(model: &Path, change: impl FnOnce(&mut Tensors)) {
    let file = model.join("model.safetensors");
    let mut tensors: Tensors = Checkpoint::open(&file, false)
        .unwrap()
        .iter()
        .map(|(name, e)| (name.to_owned(), e.dtype, e.shape.clone(), e.data.to_vec()))
        .collect();
    change(&mut tensors);
    let views: Vec<_> =
        tensors.iter().map(|(n, d, s, b)| (n.as_str(), *d, s.as_slice(), b.as_slice())).collect();
    safetensors::write(&file, &views, &Default::default()).unwrap();
}

#[test]
fn text_becomes_ids_and_ids_text() {
    let expected = expected();
    let text = expected["prompt"].as_str().unwrap();
    let spaced = joined(&expected["prompt_ids"], " ");
    let line = format!("{spaced}\n");
    assert_eq!(boostr(&["tokenizer", "encode", text]).ok().stdout, line);
    assert_eq!(boostr(&["tokenizer", "encode", &demo(), text]).ok().stdout, line);
    assert_eq!(boostr(&["tokenizer", "encode", "-m", &demo(), "-p", text]).ok().stdout, line);
    assert_eq!(boostr_with_stdin(&["tokenizer", "encode"], text).ok().stdout, line);
    assert_eq!(boostr_with_stdin(&["tokenizer", "count"], text).ok().stdout, "15\n");
    let with_commas = joined(&expected["prompt_ids"], ",");
    assert_eq!(boostr(&["tokenizer", "decode", &with_commas]).ok().stdout, format!("{text}\n"));
    assert_eq!(
        boostr_with_stdin(&["tokenizer", "decode", &demo()], &spaced).ok().stdout,
        format!("{text}\n")
    );
    let json = boostr(&["tokenizer", "encode", text, "--json"]).ok().json();
    assert_eq!((&json["ids"], &json["count"]), (&expected["prompt_ids"], &json!(15)));
}

#[test]
fn wrong_ids_and_texts_are_wrong_usage() {
    boostr(&["tokenizer", "decode", "9999"]).fails(2);
    boostr(&["tokenizer", "decode", "five"]).fails(2);
    boostr(&["tokenizer", "encode", "two", "words"]).fails(2);
    boostr(&["tokenizer", "encode", "-m", "/no/such/model", "text"]).fails(3);
}

#[test]
fn the_doctor_finds_this_machine_and_the_built_in_model_well() {
    let run = boostr(&["doctor"]).ok();
    assert!(run.stdout.contains("greedy text"), "{}", run.stdout);
    assert!(run.stdout.lines().all(|line| line.starts_with("ok") || line.starts_with("warn")));
    let json = boostr(&["doctor", &tiny(), "--json"]).ok().json();
    assert_eq!(json["ok"], true);
    assert_eq!(json["level"], boostr_kernels::Level::detect().name());
    let names: Vec<&str> =
        json["checks"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"mamba2-tiny: tensors"), "{names:?}");
}

#[test]
fn every_level_of_the_machine_can_be_chosen_and_says_what_the_built_in_model_should() {
    for level in boostr_kernels::Level::present() {
        let json = boostr(&["doctor", "--json", "--isa", level.name()]).ok().json();
        assert_eq!((&json["ok"], &json["level"]), (&true.into(), &level.name().into()));
        assert!(json["numerics"].as_str().unwrap().ends_with(level.name()), "{json}");
        let mut by_variable = command(&["doctor", "--json"]);
        by_variable.env("BOOSTR_ISA", level.name());
        assert_eq!(end(by_variable, "").ok().json()["level"], level.name());
    }
    let refused = boostr(&["doctor", "--isa", "avx3"]).fails(2);
    assert!(refused.stderr.contains("expected one that this machine has (baseline"));
    assert!(refused.stderr.contains("found `avx3`"), "{}", refused.stderr);
}

#[test]
fn a_wrong_path_suggests_what_is_near() {
    let parent = root().join("models");
    let wrong = parent.join("defalt");
    let run = boostr(&["run", wrong.to_str().unwrap(), "-p", "x"]).fails(3);
    let first = format!("error: `{}`: No such file or directory", wrong.display());
    assert!(run.stderr.starts_with(&first), "{}", run.stderr);
    assert!(run.stderr.contains("models/default`"), "{}", run.stderr);
    let run = boostr(&["show", parent.to_str().unwrap()]).fails(3);
    assert!(run.stderr.contains("models in this folder"), "{}", run.stderr);
    for (word, command) in [("shwo", "show"), ("rnu", "run"), ("ps", "list"), ("ls", "list")] {
        let run = boostr(&[word]).fails(3);
        let told = format!("did you mean the command `boostr {command}`");
        assert!(run.stderr.contains(&told), "{}", run.stderr);
    }
    assert!(boostr(&["pull"]).fails(3).stderr.contains("boostr downloads nothing"));
    assert!(boostr(&["qqqq"]).fails(3).stderr.contains("`boostr --help` lists the commands"));
}

#[test]
fn p_help_all_error_the_help_of_all_commands_is_no_error() {
    let all = boostr(&["--help-all"]).ok();
    let first = all.stdout.lines().next().unwrap();
    assert!(
        first.starts_with("boostr ") && first.ends_with("language models on your CPU"),
        "{first}"
    );
    for command in ["run", "list", "batch", "completions"] {
        assert!(all.stdout.contains(&format!("\nboostr {command}\n")), "{command}");
    }
    assert!(all.stderr.is_empty());
}

#[test]
fn the_models_of_named_folders_and_of_the_hubs_cache_are_listed() {
    let folder = folder("list");
    let make = |path: &str, bytes: usize| {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, vec![0; bytes]).unwrap();
    };
    make("models/one.gguf", 10);
    make("models/big-00001-of-00002.gguf", 5);
    make("models/big-00002-of-00002.gguf", 5);
    make("models/group/two/config.json", 2);
    make("models/group/two/model-00001-of-00002.safetensors", 30);
    make("models/group/two/model-00002-of-00002.safetensors", 12);
    make("models/empty/config.json", 2);
    make("models/notes.txt", 9);
    let hub = "home/hub/models--state-spaces--mamba2-130m/snapshots/0123abc";
    make(&format!("{hub}/config.json"), 2);
    make(&format!("{hub}/model.safetensors"), 70);
    make("home/hub/models--a--b-GGUF/snapshots/9/b-q8_0.gguf", 8);
    make("home/hub/datasets--c--d/snapshots/9/x.gguf", 8);
    let list = |json: bool, models: &str| {
        let mut command = command(if json { &["list", "--json"] } else { &["list"] });
        command.env("BOOSTR_MODELS", folder.join(models)).env("HF_HOME", folder.join("home"));
        command.env_remove("HF_HUB_CACHE");
        end(command, "").ok()
    };
    let found = list(true, "models").json();
    let found: Vec<(&str, u64)> = found["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| (model["name"].as_str().unwrap(), model["bytes"].as_u64().unwrap()))
        .collect();
    let want = [
        ("a/b-GGUF/b-q8_0.gguf", 8),
        ("big-00001-of-00002.gguf", 5),
        ("group/two", 42),
        ("one.gguf", 10),
        ("state-spaces/mamba2-130m", 70),
    ];
    assert_eq!(found, want);
    let shown = list(false, "models").stdout;
    assert_eq!(shown.lines().count(), want.len());
    let path = folder.join(hub);
    assert!(shown.contains(path.to_str().unwrap()), "{shown}");
    fs::remove_dir_all(folder.join("home")).unwrap();
    assert!(list(false, "nowhere").stderr.contains("no models found: looked in"));
}
