//! Models that are larger than memory would like: what opening one costs.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::ops::ControlFlow::Continue;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, UNIX_EPOCH};

use crate::common::{Folder, cpu};
use crate::counting::alone;
use boostr::backend::Cpu;
use boostr::convert::{Options, convert};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::{Config, Model};
use boostr::{checkpoint::ConfigFile, nn::Tensors};

/// The sizes of a Llama with 7 billion parameters.
const CONFIG: &str = r#"{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": false}"#;
const SHARDS: usize = 4;

/// Memory of this process that is in RAM, in bytes.
fn resident() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    4096 * pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap()
}

/// Shards of zeros in bf16, as files with holes, and their index.
fn write_shards(folder: &Folder, tensors: &Tensors) -> u64 {
    let mut headers = vec![(String::from("{"), 0u64); SHARDS];
    let mut index = String::from(r#"{"metadata": {}, "weight_map": {"#);
    for (i, (name, shape)) in tensors.iter().enumerate() {
        let shard = i % SHARDS;
        let (header, end) = &mut headers[shard];
        let bytes = 2 * shape.iter().product::<usize>() as u64;
        let comma = if *end > 0 { "," } else { "" };
        write!(
            header,
            r#"{comma}"{name}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{end},{}]}}"#,
            *end + bytes
        )
        .unwrap();
        *end += bytes;
        let comma = if i > 0 { "," } else { "" };
        write!(index, r#"{comma}"{name}": "{}""#, file_of(shard)).unwrap();
    }
    index.push_str("}}");
    folder.write("model.safetensors.index.json", index);
    let mut total = 0;
    for (shard, (mut header, end)) in headers.into_iter().enumerate() {
        header.push('}');
        while !header.len().is_multiple_of(8) {
            header.push(' ');
        }
        let mut file = File::create(folder.path().join(file_of(shard))).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.set_len(8 + header.len() as u64 + end).unwrap();
        total += end;
    }
    total
}

fn file_of(shard: usize) -> String {
    format!("model-{:05}-of-{SHARDS:05}.safetensors", shard + 1)
}

#[test]
#[cfg(target_os = "linux")]
fn a_folder_of_seven_billion_parameters_opens_within_a_second_and_is_not_read() {
    let _alone = alone();
    let folder = Folder::new();
    folder.write("config.json", CONFIG);
    let config = Config::read(&ConfigFile::parse("config.json", CONFIG).unwrap()).unwrap();
    let bytes = write_shards(&folder, &config.family().hf_layout(32_000, true).unwrap().tensors());
    assert!(bytes > 13_000_000_000, "{bytes}");

    let (start, before) = (Instant::now(), resident());
    let lm = LanguageModel::<Cpu>::open(folder.path(), &Default::default(), cpu()).unwrap();
    let (took, grown) = (start.elapsed(), resident().saturating_sub(before));
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(grown < 64 << 20, "{grown} bytes");
    assert_eq!(Model::parameters(&lm.model).0, 6_738_415_616);

    fs::remove_file(folder.path().join(file_of(2))).unwrap();
    let error = LanguageModel::<Cpu>::open(folder.path(), &Default::default(), cpu()).err();
    let text = error.unwrap().to_string();
    assert!(text.contains(&file_of(2)), "{text}");
}

/// A folder with a model of a few layers and many words, one of whose files is large enough to be mapped, and that file.
#[cfg(target_os = "linux")]
fn of_many_words() -> (Folder, PathBuf) {
    let config = r#"{"model_type": "mamba2", "hidden_size": 64, "num_heads": 4, "head_dim": 32, "state_size": 16,
        "n_groups": 2, "conv_kernel": 4, "num_hidden_layers": 2, "vocab_size": 600000}"#;
    let folder = Folder::new();
    folder.write("config.json", config);
    let read = Config::read(&ConfigFile::parse("config.json", config).unwrap()).unwrap();
    write_shards(&folder, &read.family().hf_layout(600_000, false).unwrap().tensors());
    let files = (0..SHARDS).map(|shard| folder.path().join(file_of(shard)));
    let largest = files.max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    assert!(fs::metadata(&largest).unwrap().len() > 64 << 20);
    (folder, largest)
}

#[test]
#[cfg(target_os = "linux")]
fn r_f7_a_mapped_file_that_changes_while_it_is_loaded_is_an_error() {
    let _alone = alone();
    let (folder, largest) = of_many_words();
    let open = |no_mmap| {
        let options = OpenOptions { no_mmap, ..OpenOptions::default() };
        LanguageModel::<Cpu>::open(folder.path(), &options, cpu()).err().map(|e| e.to_string())
    };
    assert_eq!((open(false), open(true)), (None, None));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (file, is_over) = (File::options().write(true).open(&largest).unwrap(), &is_over);
        scope.spawn(move || {
            for second in (1..).take_while(|_| !is_over.load(Ordering::Relaxed)) {
                file.set_modified(UNIX_EPOCH + Duration::from_secs(second)).unwrap();
            }
        });
        // How often depends on who runs when.
        let error = (0..1000).find_map(|_| open(false));
        is_over.store(true, Ordering::Relaxed);
        let error = error.unwrap();
        let name = largest.file_name().unwrap().to_str().unwrap();
        assert!(error.contains(name) && error.contains("was changed"), "{error}");
    });
}

#[test]
#[cfg(target_os = "linux")]
fn r_f7_of_a_mapped_file_that_changes_while_it_is_converted_nothing_is_made() {
    let _alone = alone();
    let (folder, largest) = of_many_words();
    let file = File::options().write(true).open(&largest).unwrap();
    let before = file.metadata().unwrap().len();
    let outs = Folder::new();
    for name in ["m.gguf", "m"] {
        let out = outs.path().join(name);
        // What is cut off is missed by nothing but a look at the file: it is zeros, as before.
        let mut cut = |done: usize, _| {
            if done == 1 {
                file.set_len(before - 1).unwrap();
            }
            Continue(())
        };
        let error = convert(folder.path(), &out, &Options::default(), &mut cut).err().unwrap();
        let (text, name) = (error.to_string(), largest.file_name().unwrap().to_str().unwrap());
        assert!(text.contains(name) && text.contains("was changed"), "{text}");
        assert_eq!(outs.names(), [""; 0]);
        file.set_len(before).unwrap();
    }
}
