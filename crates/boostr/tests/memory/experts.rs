//! Large mixtures of experts: only those that are chosen are read.
#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::ControlFlow::Continue;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use crate::common::{Folder, Random, cpu};
use crate::counting::alone;
use crate::tiny::{fixture, message};
use boostr::backend::Cpu;
use boostr::checkpoint::{Checkpoint, ConfigFile, Dtype, safetensors};
use boostr::convert::{Options, Types, convert};
use boostr::load::{LanguageModel, OpenOptions, placed};
use boostr::models::{Config, Logits, Model, Mtp, Run};
use boostr::ops::to_vec;

const PAGE: usize = 4096;
/// The system may map pages around one that is touched, within so many bytes.
const AROUND: usize = 64 << 10;
const LAYERS: usize = 2;
const EXPERTS: usize = 48;
const USED: usize = 2;
const TOKENS: [u32; 3] = [5, 17, 300];

/// Attention and 48 experts a layer, each of 1.5 MiB in bf16: 144 MiB in all.
const CONFIG: &str = r#"{"model_type": "granitemoehybrid", "hidden_size": 256, "num_hidden_layers": 2,
    "layer_types": ["attention", "attention"], "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 1024, "shared_intermediate_size": 64, "num_local_experts": 48,
    "num_experts_per_tok": 2, "vocab_size": 512, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "position_embedding_type": "rope", "mamba_n_heads": 8, "tie_word_embeddings": true,
    "embedding_multiplier": 12.0, "attention_multiplier": 0.125, "logits_scaling": 4.0,
    "residual_multiplier": 0.22}"#;

/// One layer of attention with 84 experts, before a block for one token more: experts of over 64 MiB in q8_0 each.
const WITH_BLOCK: &str = r#"{"model_type": "qwen3_next", "hidden_size": 256, "num_hidden_layers": 1,
    "layer_types": ["full_attention"], "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "intermediate_size": 1024,
    "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 64, "num_experts": 84,
    "num_experts_per_tok": 2, "norm_topk_prob": true, "vocab_size": 512, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "partial_rotary_factor": 0.25, "tie_word_embeddings": true}"#;

/// A folder with the model in bf16.
fn folder() -> Folder {
    folder_of(CONFIG, &[])
}

/// A folder with a model in bf16, and with `more` tensors, of values that repeat at no expert's place.
fn folder_of(config_text: &str, more: &[(String, Vec<usize>)]) -> Folder {
    let folder = Folder::new();
    folder.write("config.json", config_text);
    fs::copy(
        fixture("granitehybrid-moe-tiny").join("tokenizer.json"),
        folder.path().join("tokenizer.json"),
    )
    .unwrap();
    let tensors = tensors_of(config_text);
    let (mut header, mut end) = (String::from("{"), 0);
    for (name, shape) in tensors.iter().chain(more) {
        let size = 2 * shape.iter().product::<usize>();
        let comma = if end > 0 { "," } else { "" };
        header += &format!(
            r#"{comma}"{name}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{end},{}]}}"#,
            end + size
        );
        end += size;
    }
    header.push('}');
    // Experts begin on pages of their own.
    while !(8 + header.len()).is_multiple_of(AROUND) {
        header.push(' ');
    }
    let mut random = Random(0x5eed);
    let values: Vec<u8> = (0..1_000_003)
        .flat_map(|_| {
            let x = (random.below(2001) as f32 - 1000.0) * 6e-5;
            [x.to_bits().to_le_bytes()[2], x.to_bits().to_le_bytes()[3]]
        })
        .collect();
    let mut file = BufWriter::with_capacity(
        AROUND / 2,
        File::create(folder.path().join("model.safetensors")).unwrap(),
    );
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    // In small pieces: the system keeps and maps as one what was written as one.
    let mut pieces = values.chunks(AROUND / 2).cycle();
    while end > 0 {
        let piece = pieces.next().unwrap();
        let piece = &piece[..end.min(piece.len())];
        file.write_all(piece).unwrap();
        end -= piece.len();
    }
    folder
}

/// Names and shapes of a folder's tensors.
fn tensors_of(config: &str) -> Vec<(String, Vec<usize>)> {
    let config = Config::read(&ConfigFile::parse("config.json", config).unwrap()).unwrap();
    let tensors = config.family().hf_layout(512, false).unwrap().tensors();
    tensors.iter().map(|(name, shape)| (name.to_owned(), shape.to_vec())).collect()
}

/// A file of the model in q8_0.
fn quantized(folder: &Folder) -> PathBuf {
    let out = folder.path().join("model.gguf");
    let options = Options { types: Types::named("q8_0").unwrap(), ..Options::default() };
    convert(folder.path(), &out, &options, &mut |_, _| Continue(())).unwrap();
    fs::remove_file(folder.path().join("config.json")).unwrap();
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    out
}

fn anonymous() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    1024 * line.split_whitespace().next().unwrap().parse::<usize>().unwrap()
}

/// Which pages of a mapped file this process has in memory.
fn present(path: &Path) -> Vec<bool> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut pages = vec![false; fs::metadata(path).unwrap().len().div_ceil(PAGE as u64) as usize];
    let mut pagemap = File::open("/proc/self/pagemap").unwrap();
    let number = |text: &str| usize::from_str_radix(text, 16).unwrap();
    let lines: Vec<&str> =
        maps.lines().filter(|line| line.ends_with(path.to_str().unwrap())).collect();
    assert!(!lines.is_empty(), "{} is not mapped", path.display());
    for line in lines {
        let mut fields = line.split_whitespace();
        let (start, end) = fields.next().unwrap().split_once('-').unwrap();
        let offset = number(fields.nth(1).unwrap());
        let (start, end) = (number(start), number(end));
        let mut entries = vec![0; (end - start) / PAGE * 8];
        pagemap.seek(SeekFrom::Start((start / PAGE * 8) as u64)).unwrap();
        pagemap.read_exact(&mut entries).unwrap();
        for (page, entry) in entries.as_chunks::<8>().0.iter().enumerate() {
            pages[offset / PAGE + page] |= u64::from_le_bytes(*entry) >> 63 == 1;
        }
    }
    pages
}

/// How many of these ranges of a file, each of one expert, have pages in memory that are no neighbour's.
fn touched(pages: &[bool], experts: impl Iterator<Item = Range<usize>>) -> usize {
    let within = |range: Range<usize>| {
        let inner = (range.start + AROUND).div_ceil(PAGE)..(range.end - AROUND) / PAGE;
        assert!(inner.len() > 8);
        inner
    };
    experts.filter(|range| pages[within(range.clone())].iter().any(|&is| is)).count()
}

fn logits(model: &Model<Cpu>) -> boostr::Result<Vec<f32>> {
    let mut state = model.new_state()?;
    to_vec(&model.forward(&mut [Run { tokens: &TOKENS, state: &mut state }], Logits::All)?)
}

fn open(path: &Path, no_pack_cache: bool) -> LanguageModel<Cpu> {
    let options = OpenOptions { no_pack_cache, ..OpenOptions::default() };
    LanguageModel::open(path, &options, cpu()).unwrap()
}

#[test]
fn of_float_experts_only_the_chosen_are_read_from_the_file() {
    let _alone = alone();
    let folder = folder();
    let path = folder.path().join("model.safetensors");
    let size = fs::metadata(&path).unwrap().len() as usize;
    let before = anonymous();
    let lm = open(folder.path(), false);
    logits(&lm.model).unwrap();
    let grown = anonymous().saturating_sub(before);
    assert!(grown < size / 5, "{grown} of {size}");
    let [in_files, in_memory] = lm.model.placed();
    assert!(in_files > size / 10 * 9 && in_memory == 0, "{in_files} {in_memory} of {size}");

    let file = Checkpoint::open(&path, false).unwrap();
    let stacks = file.iter().filter(|(_, entry)| entry.shape.len() == 3);
    let experts: Vec<Range<usize>> = stacks
        .flat_map(|(_, entry)| {
            let (first, size) = (entry.data.range().start, entry.data.len() / EXPERTS);
            (0..EXPERTS).map(move |expert| first + expert * size..first + (expert + 1) * size)
        })
        .collect();
    assert_eq!(experts.len(), 2 * LAYERS * EXPERTS);
    let touched = touched(&present(&path), experts.into_iter());
    let most = 2 * LAYERS * USED * TOKENS.len();
    assert!((2 * LAYERS * USED..=most).contains(&touched), "{touched} of at most {most}");
    let config = lm.model.config();
    assert_eq!(placed(config, &file).unwrap(), [size - (8 + header_of(&path)), 0]);
}

fn header_of(path: &Path) -> usize {
    let mut length = [0; 8];
    File::open(path).unwrap().read_exact(&mut length).unwrap();
    u64::from_le_bytes(length) as usize
}

fn packed_of(folder: &Folder) -> Vec<PathBuf> {
    let names = folder.names().into_iter().filter(|name| name.ends_with(".packed"));
    names.map(|name| folder.path().join(name)).collect()
}

/// Adapters of an attention's output that change nothing.
fn adapters(folder: &Folder) -> PathBuf {
    let path = folder.path().join("adapters");
    fs::create_dir_all(&path).unwrap();
    let config = r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["o_proj"]}"#;
    fs::write(path.join("adapter_config.json"), config).unwrap();
    let bytes = [0; 4 * 256];
    let names = ["A", "B"]
        .map(|of| format!("base_model.model.model.layers.0.self_attn.o_proj.lora_{of}.weight"));
    let tensors = [
        (&names[0][..], Dtype::F32, &[1, 256][..], &bytes[..]),
        (&names[1][..], Dtype::F32, &[256, 1][..], &bytes[..]),
    ];
    safetensors::write(&path.join("adapter_model.safetensors"), &tensors, &BTreeMap::new())
        .unwrap();
    path
}

#[test]
fn quantized_experts_are_packed_once_into_a_file_of_which_the_chosen_are_read() {
    let _alone = alone();
    let folder = folder();
    let path = quantized(&folder);
    let size = fs::metadata(&path).unwrap().len() as usize;

    let in_memory = open(&path, true);
    // The router is of floats.
    let routers = 4 * LAYERS * EXPERTS * 256;
    assert_eq!(in_memory.model.placed()[0], routers);
    let want = logits(&in_memory.model).unwrap();
    let name = |lm: &LanguageModel<Cpu>| {
        let fingerprint = lm.model.fingerprint().unwrap().to_owned();
        format!("model.gguf.{fingerprint}.{}.packed", cpu().level().name())
    };
    let name = name(&in_memory);
    drop(in_memory);
    assert_eq!(packed_of(&folder), [""; 0].map(PathBuf::from));

    // Written by the first, mapped by both.
    let file = folder.path().join(&name);
    let mut written = None;
    for is_first in [true, false] {
        let before = anonymous();
        let lm = open(&path, false);
        assert_eq!(packed_of(&folder), std::slice::from_ref(&file));
        let own = fs::metadata(&file).unwrap();
        assert_eq!(
            *written.get_or_insert((own.ino(), own.mtime_nsec())),
            (own.ino(), own.mtime_nsec())
        );
        let experts: Vec<Range<usize>> = {
            let packs = Checkpoint::from_safetensors("packs", fs::read(&file).unwrap()).unwrap();
            let of = packs.iter().filter(|(name, _)| name.contains("experts"));
            of.map(|(_, entry)| entry.data.range()).collect()
        };
        assert_eq!(experts.len(), 2 * LAYERS * EXPERTS);
        assert!(experts.iter().all(|range| range.start.is_multiple_of(64)), "cache lines");
        assert_eq!(touched(&present(&file), experts.iter().cloned()), 0);
        assert_eq!(logits(&lm.model).unwrap(), want);
        let most = 2 * LAYERS * USED * TOKENS.len();
        let touched = touched(&present(&file), experts.into_iter());
        assert!((2 * LAYERS * USED..=most).contains(&touched), "{touched} of at most {most}");
        let grown = anonymous().saturating_sub(before);
        assert!(grown < size / 5, "{grown} of {size}");
        let [in_files, in_memory] = lm.model.placed();
        assert!(in_files > 10 * in_memory, "{in_files} {in_memory}");
        let checkpoint = Checkpoint::open(&path, false).unwrap();
        let [stays, _] = placed(lm.model.config(), &checkpoint).unwrap();
        assert!(stays.abs_diff(in_files) < in_files / 20, "{stays} {in_files}");
        // The size is said once, by who writes it.
        let said: Vec<_> = lm.warnings.iter().map(|text| text.contains(&name)).collect();
        assert_eq!(said, if is_first { vec![true] } else { vec![] }, "{:?}", lm.warnings);
        let size = format!("{} MiB", fs::metadata(&file).unwrap().len() >> 20);
        assert!(lm.warnings.iter().all(|text| text.ends_with(&size)), "{:?}", lm.warnings);
    }

    // One of another state of the model's file does not count.
    // Those of models that were in this one's place go, and nothing else does.
    File::options().write(true).open(&path).unwrap().set_modified(UNIX_EPOCH).unwrap();
    let level = cpu().level().name();
    let beside = |name: &str| folder.path().join(name);
    let former = beside(&format!("model.gguf.0123456789abcdef.{level}.packed"));
    fs::copy(&file, &former).unwrap();
    let others = [
        format!("model.gguf.fedcba9876543210.{level}.packed"),
        format!("another.gguf.0123456789abcdef.{level}.packed"),
    ];
    fs::write(beside(&others[0]), "of the user").unwrap();
    fs::copy(&file, beside(&others[1])).unwrap();
    assert_eq!(logits(&open(&path, false).model).unwrap(), want);
    let again = fs::metadata(&file).unwrap();
    assert_ne!(written, Some((again.ino(), again.mtime_nsec())));
    assert!(!former.exists());
    for name in &others {
        fs::remove_file(beside(name)).unwrap();
    }

    // A damaged one is noticed where it is used.
    let packs = Checkpoint::from_safetensors("packs", fs::read(&file).unwrap()).unwrap();
    let damaged: BTreeMap<String, usize> = packs
        .iter()
        .filter(|(name, _)| *name != "~crc32")
        .map(|(name, entry)| (name.to_owned(), entry.data.range().start))
        .collect();
    let write = |bytes: [u8; 3]| {
        let mut out = File::options().write(true).open(&file).unwrap();
        for at in damaged.values() {
            out.seek(SeekFrom::Start(*at as u64 + 100)).unwrap();
            out.write_all(&bytes).unwrap();
        }
    };
    write([0x5a; 3]);
    let lm = open(&path, false);
    assert_eq!(logits(&lm.model).unwrap(), want);
    let [line] = &lm.notices()[..] else { panic!("one line") };
    assert!(line.contains(&name) && line.contains("checksum") && line.contains("anew"), "{line}");
    assert_eq!(logits(&lm.model).unwrap(), want);
    assert_eq!(lm.notices(), [""; 0]);
    // It is gone, and the next load writes it anew.
    assert!(!file.exists());
    let lm = open(&path, false);
    assert_eq!((logits(&lm.model).unwrap(), lm.notices()), (want.clone(), vec![]));

    // One that is damaged after it was used is noticed as well.
    write([0x5a; 3]);
    assert_eq!(logits(&lm.model).unwrap(), want);
    assert_eq!(lm.notices().len(), 1);
    // So it is where weights are shared with a model that has adapters, whichever is asked.
    for is_adapted in [false, true] {
        let lm = open(&path, false);
        let with = lm.with_adapters(adapters(&folder)).unwrap();
        assert_eq!(logits(&lm.model).unwrap(), want);
        assert_eq!(logits(&with.model).unwrap(), want);
        write([0x5a; 3]);
        let model = if is_adapted { &with.model } else { &lm.model };
        assert_eq!(logits(model).unwrap(), want);
        assert_eq!(lm.notices().len(), 1);
    }
    // Where the model's file is another too, there is nothing to go back to.
    assert_eq!(logits(&open(&path, false).model).unwrap(), want);
    let lm = open(&path, false);
    write([0xa5; 3]);
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    let source = File::options().write(true).open(&path).unwrap();
    source.set_modified(modified + Duration::from_secs(1)).unwrap();
    let text = message(&logits(&lm.model).unwrap_err());
    assert!(text.contains("checksum") && text.contains("written to since"), "{text}");
    source.set_modified(modified).unwrap();
    assert_eq!(logits(&open(&path, false).model).unwrap(), want);

    // What is cut short is written anew; where it cannot be written, memory serves.
    File::options().write(true).open(&file).unwrap().set_len(70 << 20).unwrap();
    assert_eq!(logits(&open(&path, false).model).unwrap(), want);
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    let lm = open(&path, false);
    assert_eq!(logits(&lm.model).unwrap(), want);
    assert!(
        lm.warnings.iter().any(|text| text.contains(&name) && text.contains("in memory")),
        "{:?}",
        lm.warnings
    );
    assert_eq!(lm.model.placed()[0], routers);
}

#[test]
fn quantized_experts_of_the_block_for_one_token_more_have_a_packed_file_of_their_own() {
    let _alone = alone();
    let layer = tensors_of(WITH_BLOCK).into_iter();
    let mut block: Vec<(String, Vec<usize>)> = layer
        .filter_map(|(name, shape)| {
            let part = name.strip_prefix("model.layers.0.")?;
            Some((format!("mtp.layers.0.{part}"), shape))
        })
        .collect();
    block.push(("mtp.fc.weight".into(), vec![256, 512]));
    for norm in ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"] {
        block.push((format!("mtp.{norm}.weight"), vec![256]));
    }
    let folder = folder_of(WITH_BLOCK, &block);
    let path = quantized(&folder);

    let said = |lm: &LanguageModel<Cpu>, block: &Mtp<Cpu>| {
        let mut state = lm.model.new_state().unwrap();
        let hidden = lm.model.hidden(&mut [Run { tokens: &TOKENS, state: &mut state }]).unwrap();
        let mut state = block.new_state(&lm.model).unwrap();
        let given = block.forward(&lm.model, &mut state, &hidden, &TOKENS).unwrap();
        to_vec(&lm.model.logits(&given).unwrap()).unwrap()
    };
    let in_memory = open(&path, true);
    let block = in_memory.mtp().unwrap().unwrap();
    assert!(block.placed()[1] > 64 << 20, "{:?}", block.placed());
    let want = said(&in_memory, &block);
    drop((in_memory, block));

    let mut written = None;
    for is_first in [true, false] {
        let lm = open(&path, false);
        let before = anonymous();
        let block = lm.mtp().unwrap().unwrap();
        assert!(said(&lm, &block) == want);
        let grown = anonymous().saturating_sub(before);
        let [in_files, in_memory] = block.placed();
        assert!(in_files > 64 << 20 && in_memory < 4 << 20, "{in_files} {in_memory}");
        assert!(grown < 16 << 20, "{grown}");
        let files = packed_of(&folder);
        let own = files.iter().find(|file| file.to_string_lossy().ends_with("-mtp.packed"));
        assert_eq!(files.len(), 2, "{files:?}");
        let own = fs::metadata(own.expect("a file of the block")).unwrap();
        let stamp = (own.ino(), own.mtime_nsec());
        assert_eq!(*written.get_or_insert(stamp), stamp);
        let said = lm.notices().iter().filter(|line| line.contains("-mtp.packed")).count();
        assert_eq!(said, usize::from(is_first));
    }
}
