//! What a system refuses, and what a user should not ask for: one error, and nothing is lost.

use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::common::*;

#[cfg(unix)]
#[test]
fn r_f2_a_write_that_finds_no_room_names_the_file_and_leaves_the_old_one() {
    let work = folder("faults-f2");
    let (state, model) = (work.join("full.state"), work.join("full.gguf"));
    let (state, model) = (state.to_str().unwrap(), model.to_str().unwrap());
    let save = ["run", &tiny(), "--tokens", "1", "-n", "0", "--save-state", state];
    let quantize = ["quantize", &tiny(), model, "-T", "q8_0", "--force", "-q"];
    for (args, file) in [(&save[..], state), (&quantize, model)] {
        boostr(args).ok();
        let old = fs::read(file).unwrap();
        // No file may grow above so many blocks, which fails a write as a full disk does.
        for blocks in ["0", "1", "50"] {
            let limited = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
            let mut command = command_under("sh", &["-c", &limited]);
            command.arg(env!("CARGO_BIN_EXE_boostr")).args(args);
            let run = end(command, "").fails(1);
            assert!(run.stderr.contains(file) && run.stderr.contains("os error"), "{}", run.stderr);
            assert!(fs::read(file).unwrap() == old);
        }
    }
    let mut names: Vec<_> = fs::read_dir(&work).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [".full.state.lock", "full.gguf", "full.state"]);
}

#[test]
fn r_f4_where_nothing_can_be_written_the_run_says_so_before_it_computes() {
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
fn r_f6_a_model_is_not_written_over_while_it_is_read() {
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
fn r_f12_files_from_before_1970_and_from_the_future_are_files() {
    let work = folder("faults-f12");
    let states = work.to_str().unwrap();
    let model = copy_of_tiny("faults-f12-model");
    let text = model.to_str().unwrap();
    let years = Duration::from_hours(100 * 365 * 24);
    let later = SystemTime::now() + years;
    let seconds = later.duration_since(UNIX_EPOCH).unwrap().as_secs();
    for (time, shown) in [(UNIX_EPOCH - years / 2, None), (later, Some(seconds))] {
        let run =
            ["run", text, "--tokens", "1,2", "-n", "1", "--states", states, "--save-state", "s"];
        boostr(&run).ok();
        for path in [work.join("s.safetensors"), model.join("model.safetensors")] {
            fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
        }
        let list = boostr(&["state", "ls", "--json", "--states", states]).ok().json();
        assert_eq!(list["states"][0]["modified"].as_u64(), shown, "{list}");
        let on = ["run", text, "--tokens", "3", "-n", "1", "--states", states, "--state", "s"];
        assert!(!boostr(&on).ok().stdout.is_empty());
    }
}

#[test]
fn r_f14_as_many_threads_as_make_sense() {
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

/// Processors of the emulator, and what `doctor` says of their instructions.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
const PROCESSORS: [(&str, &str); 4] =
    [("qemu64", "baseline"), ("Nehalem", "baseline"), ("SandyBridge", "baseline"), ("max", "avx2")];

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
#[ignore = "needs qemu-x86_64 (Debian's qemu-user or qemu-user-static); seconds for each processor"]
fn r_f16_on_a_processor_without_avx2_the_answer_is_the_same() {
    let found = ["qemu-x86_64", "qemu-x86_64-static"]
        .into_iter()
        .find(|emulator| std::process::Command::new(emulator).arg("--version").output().is_ok());
    let emulator = found.expect("no emulator: install qemu-user");
    let work = folder("faults-f16");
    let quantized = ["q8_0", "q4_k_m", "iq4_nl"].map(|kind| {
        let file = work.join(format!("{kind}.gguf")).to_str().unwrap().to_owned();
        boostr(&["quantize", &demo(), &file, "-T", kind, "-q"]).ok();
        file
    });
    for (processor, instructions) in PROCESSORS {
        let on = |args: &[&str]| {
            let mut command = command_under(emulator, &["-cpu", processor]);
            command.arg(env!("CARGO_BIN_EXE_boostr")).args(args);
            // A signal, such as that of an instruction that is none, has no code.
            end(command, "")
        };
        let doctor = on(&["doctor"]).ok().stdout;
        assert!(doctor.contains(&format!("using {instructions}")), "{processor}: {doctor}");
        let greedy = ["-p", "The sea", "-n", "12", "--temp", "0", "--json"];
        let ids = |ended: Ended| ids(&ended.ok().json()["ids"]);
        // The built-in model, a prompt of several blocks of tokens, and blocks of every kind of width.
        assert_eq!(ids(on(&greedy)), ids(boostr(&greedy)), "{processor}");
        let long = "It was a bright cold day in April, and the sea was calm. ".repeat(4);
        assert!(!on(&["run", "-p", &long, "-n", "4", "--temp", "0"]).ok().stdout.is_empty());
        for model in &quantized {
            let run = ["run", model, "-p", "The sea", "-n", "4", "--temp", "0", "--json"];
            assert_eq!(ids(on(&run)).len(), 4, "{processor}, {model}");
        }
    }
}
