//! What a system refuses, and what a user should not ask for: one error, and nothing is lost.

use std::fs;

use crate::common::*;

#[test]
fn f4_where_nothing_can_be_written_the_run_says_so_before_it_computes() {
    let work = folder("faults-f4");
    let file = work.join("file");
    fs::write(&file, "not a folder").unwrap();
    for place in ["/nowhere/at/all/s.safetensors", "/proc/s.safetensors"]
        .map(str::to_owned)
        .into_iter()
        .chain([file.join("s.safetensors").to_str().unwrap().to_owned()])
    {
        let run = boostr(&["run", "-p", "x", "-n", "3", "--save-state", &place]).fails(1);
        assert!(run.stderr.contains(&place) && run.stdout.is_empty(), "{}", run.stderr);
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "not a folder");
}

#[test]
fn f6_a_model_is_not_written_over_while_it_is_read() {
    let work = folder("faults-f6");
    let gguf = work.join("m.gguf");
    let gguf = gguf.to_str().unwrap();
    boostr(&["convert", &tiny(), gguf, "-q"]).ok();
    let before = fs::read(gguf).unwrap();
    for args in [["convert", gguf, gguf], ["quantize", gguf, gguf]] {
        let run = boostr(&args).fails(2);
        assert!(run.stderr.contains("is a file of the model itself"), "{}", run.stderr);
    }
    let input = work.join("q.jsonl");
    let input = input.to_str().unwrap();
    fs::write(input, "{\"prompt\": \"x\", \"max_tokens\": 1}\n").unwrap();
    let run = boostr(&["batch", "--in", input, "--out", input]).fails(2);
    assert!(run.stderr.contains("one file"), "{}", run.stderr);
    assert_eq!(fs::read(gguf).unwrap(), before);
    // A state may be: it is read before, and replaced as a whole.
    let state = work.join("s.safetensors");
    let state = state.to_str().unwrap();
    boostr(&["run", "-p", "x", "-n", "3", "--save-state", state]).ok();
    boostr(&["run", "-p", "y", "-n", "3", "--state", state, "--save-state", state]).ok();
}

#[test]
fn f14_as_many_threads_as_make_sense() {
    for threads in ["0", "10000", "many"] {
        let run = boostr(&["run", "-t", threads, "-p", "x", "-n", "1"]).fails(2);
        assert!(run.stderr.contains("--threads"), "{}", run.stderr);
    }
    let ids = |threads: &str| {
        let args = ["run", "-t", threads, "-p", "The sea", "-n", "9", "--temp", "0", "--json"];
        boostr(&args).ok().json()["ids"].clone()
    };
    assert_eq!(ids("1"), ids("64"));
}
