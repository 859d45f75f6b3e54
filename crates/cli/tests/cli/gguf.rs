//! GGUF files on the command line: converting, quantizing, showing, checking and running them.

use std::fs;
use std::path::PathBuf;

use crate::common::*;

fn path(folder: &std::path::Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().to_owned()
}

fn made_by_llama_cpp(name: &str) -> PathBuf {
    root().join("fixtures/gguf").join(name)
}

#[test]
fn a_converted_model_continues_as_the_folder_does() {
    let folder = folder("gguf-convert");
    let out = path(&folder, "demo.gguf");
    let run = boostr(&["convert", &demo(), &out]).ok();
    assert!(
        run.stdout.contains("token_embd.weight") && run.stdout.contains("exact"),
        "{}",
        run.stdout
    );
    assert_eq!(run.stderr, "");
    let expected = expected();
    let (prompt, count) =
        (expected["prompt"].as_str().unwrap(), ids(&expected["greedy_ids"]).len());
    let count = count.to_string();
    let run =
        boostr(&["run", &out, "-p", prompt, "-n", &count, "--temp", "0", "--json"]).ok().json();
    assert_eq!(ids(&run["ids"]), ids(&expected["greedy_ids"]));

    let back = path(&folder, "back");
    boostr(&["convert", &out, &back]).ok();
    let run =
        boostr(&["run", &back, "-p", prompt, "-n", &count, "--temp", "0", "--json"]).ok().json();
    assert_eq!(ids(&run["ids"]), ids(&expected["greedy_ids"]));
}

#[test]
fn quantize_tells_types_errors_sizes_and_what_a_text_costs() {
    let folder = folder("gguf-quantize");
    let text = path(&folder, "text.txt");
    let words = "It is a truth universally acknowledged, that a single man in possession of a good fortune, \
                 must be in want of a wife. ";
    fs::write(&text, words.repeat(3)).unwrap();
    let out = path(&folder, "demo-q8_0.gguf");
    let line = ["quantize", &demo(), &out, "-T", "q8_0", "--measure", &text, "--json"];
    let json = boostr(&line).ok().json();
    let tensors = json["tensors"].as_array().unwrap();
    let embedding = tensors.iter().find(|t| t["name"] == "token_embd.weight").unwrap();
    assert_eq!((&embedding["from"], &embedding["to"]), (&"bf16".into(), &"q8_0".into()));
    let error = embedding["relative_rms_error"].as_f64().unwrap();
    assert!(error > 0.0 && error < 0.01, "{error}");
    let [before, after] = ["bits_per_byte_before", "bits_per_byte"]
        .map(|field| json["measured"][field].as_f64().unwrap());
    assert!(before > 0.5 && (after / before - 1.0).abs() < 0.01, "{before} {after}");
    assert!(json["bytes"].as_u64().unwrap() * 17 < json["bytes_before"].as_u64().unwrap() * 10);
    assert_eq!(fs::metadata(&out).unwrap().len() / 1_000_000, 3);

    let out = path(&folder, "demo-q4.gguf");
    let run =
        boostr(&["quantize", &demo(), &out, "--tensor-type", "ssm_in=q8_0", "--embedding", "f16"]);
    let table = run.ok().stdout;
    let line = |name: &str| table.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(line("blk.*.ssm_in.weight").contains("q8_0"), "{table}");
    assert!(line("token_embd.weight").contains("f16"), "{table}");
    assert!(line("blk.*.ssm_out.weight").contains("q5_k"), "{table}");
    assert!(line("blk.*.ssm_conv1d.weight").contains("exact"), "{table}");
    boostr(&["verify", &out, "--values"]).ok();
}

#[test]
fn what_cannot_be_converted_is_said_and_leaves_nothing() {
    let folder = folder("gguf-refused");
    let out = path(&folder, "out.gguf");
    for (line, words) in [
        (vec!["quantize", &tiny(), &path(&folder, "out")], "out.gguf"),
        (vec!["quantize", &tiny(), &out, "-T", "q3"], "q4_k_m"),
        (vec!["quantize", &tiny(), &out, "--tensor-type", "ssm_in"], "REGEX=TYPE"),
        (vec!["quantize", &tiny(), &out, "--tensor-type", "(=q8_0"], "regular expression"),
        (vec!["convert", &tiny(), &path(&folder, "x"), "-T", "q8_0"], "q8_0"),
        (vec!["quantize", &tiny(), &out, "--measure", "/nowhere"], "/nowhere"),
    ] {
        let run = boostr(&line);
        assert!([Some(1), Some(2), Some(3)].contains(&run.code), "{line:?}: {}", run.stderr);
        assert!(run.stderr.contains(words), "{line:?}: {}", run.stderr);
    }
    boostr(&["quantize", &tiny(), &out, "--tensor-type", "nothing=q8_0"]).fails(2);
    boostr(&["convert", &path(&folder, "missing"), &out]).fails(3);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    fs::write(&out, "precious").unwrap();
    let run = boostr(&["convert", &tiny(), &out]).fails(2);
    assert!(run.stderr.contains("--force"), "{}", run.stderr);
    assert_eq!(fs::read(&out).unwrap(), b"precious");
    boostr(&["convert", &tiny(), &out, "--force"]).ok();
    boostr(&["verify", &out]).ok();
}

#[test]
fn show_lists_what_a_gguf_file_holds() {
    let file = made_by_llama_cpp("mamba2-tiny-q8_0.gguf");
    let json = boostr(&["show", file.to_str().unwrap(), "--json"]).ok().json();
    assert_eq!(json["architecture"], "mamba2");
    assert_eq!((&json["dtype"], &json["vocab_rows"]), (&"q8_0".into(), &512.into()));
    assert_eq!(json["parameters"], 93552);
    let text = boostr(&["show", file.to_str().unwrap(), "--tensors"]).ok().stdout;
    assert!(text.contains("blk.1.ssm_in.weight") && text.contains("q8_0"), "{text}");
}

#[test]
fn verify_names_the_byte_at_which_a_file_is_wrong_and_what_to_do() {
    let folder = folder("gguf-verify");
    let good = fs::read(made_by_llama_cpp("mamba2-tiny-f32.gguf")).unwrap();
    boostr(&["verify", made_by_llama_cpp("mamba2-tiny-f32.gguf").to_str().unwrap()]).ok();
    let file = path(&folder, "x.gguf");
    for (bytes, words) in [
        (good[..good.len() / 2].to_vec(), "incomplete"),
        (good[..60].to_vec(), "byte"),
        (b"GGUF".to_vec(), "byte 4"),
        (Vec::new(), "empty"),
        (b"<!DOCTYPE html><html>sign in</html>".to_vec(), "web page"),
    ] {
        fs::write(&file, bytes).unwrap();
        let run = boostr(&["verify", &file]).fails(3);
        assert!(run.stdout.contains(words), "{words}: {}", run.stdout);
        boostr(&["run", &file, "-p", "x"]).fails(3);
    }
    // The last value of the file is a weight of the last norm: NaN.
    let mut bad = good;
    let end = bad.len();
    bad[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, &bad).unwrap();
    boostr(&["verify", &file]).ok();
    let run = boostr(&["verify", &file, "--values"]).fails(3);
    let place = format!("(byte {})", end - 4);
    assert!(
        run.stdout.contains("output_norm.weight") && run.stdout.contains(&place),
        "{}",
        run.stdout
    );
    let run = boostr(&["run", &file, "-p", "x", "-n", "2"]).fails(3);
    assert!(run.stderr.contains("finite") || run.stderr.contains("NaN"), "{}", run.stderr);
}
