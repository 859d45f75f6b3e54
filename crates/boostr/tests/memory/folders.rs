//! Thousands of damaged model folders. Each is opened or refused within a second, without a panic
//! and without memory that the files do not account for.

use std::fs;
use std::time::{Duration, Instant};

use crate::common::{Folder, Random, cpu};
use crate::counting::{HEAP, alone};
use crate::tiny::fixture;
use boostr::backend::Cpu;
use boostr::load::LanguageModel;

const MUTATIONS: usize = 2000;

/// Files of 0.4 MB in all: a size that was believed would ask for gigabytes.
const MAX_HEAP: usize = 16 << 20;

fn read(name: &str) -> Vec<u8> {
    fs::read(fixture("mamba2-tiny").join(name)).unwrap()
}

/// Numbers of a JSON text replaced by extreme ones: what random bytes rarely hit.
fn renumber(random: &mut Random, text: &mut Vec<u8>) {
    const NUMBERS: [&str; 8] =
        ["0", "-1", "1", "16777216", "4294967297", "18446744073709551615", "1e999", "0.5"];
    let digits: Vec<usize> = (0..text.len()).filter(|&i| text[i].is_ascii_digit()).collect();
    let start = digits[random.below(digits.len())];
    let end = (start..text.len()).find(|&i| !text[i].is_ascii_digit()).unwrap_or(text.len());
    text.splice(start..end, NUMBERS[random.below(NUMBERS.len())].bytes());
}

#[test]
fn r_b9_damaged_models_cost_neither_a_panic_nor_memory_nor_time() {
    let _alone = alone();
    let [config, weights] = ["config.json", "model.safetensors"].map(read);
    let header_len = u64::from_le_bytes(*weights.first_chunk().unwrap()) as usize;
    let (header, data) = weights[8..].split_at(header_len);
    let folder = Folder::new();
    folder.write("config.json", &config);
    folder.write("model.safetensors", &weights);

    let mut random = Random(0x0bad_c0de_0bad_c0de);
    let mut opened = [0; 2];
    let mut open = |what: &str, kind: usize| {
        let (before, start) = (HEAP.restart(), Instant::now());
        let result = LanguageModel::<Cpu>::open(folder.path(), &Default::default(), cpu());
        let (peak, took) = (HEAP.peak() - before, start.elapsed());
        let text = result.as_ref().err().map(crate::tiny::message);
        assert!(peak < MAX_HEAP, "{peak} bytes for {text:?}: {what}");
        assert!(took < Duration::from_secs(1), "{took:?} for {text:?}: {what}");
        if let Ok(lm) = result {
            opened[kind] += 1;
            // What was opened can be asked.
            assert!(lm.model.vocab_limit() <= lm.model.vocab_rows());
        }
    };
    for i in 0..MUTATIONS {
        let mut text = config.clone();
        if i % 2 == 0 {
            random.mutate(&mut text, header);
        } else {
            renumber(&mut random, &mut text);
        }
        folder.write("config.json", &text);
        open(&String::from_utf8_lossy(&text), 0);
    }
    folder.write("config.json", &config);
    for i in 0..MUTATIONS {
        let mut text = header.to_vec();
        if i % 2 == 0 {
            random.mutate(&mut text, &config);
        } else {
            renumber(&mut random, &mut text);
        }
        // Half of them with the length that belongs to the header.
        let length = if i % 4 < 2 { text.len() } else { header.len() };
        let file = [&(length as u64).to_le_bytes(), &text[..], data].concat();
        folder.write("model.safetensors", file);
        open(&String::from_utf8_lossy(&text), 1);
    }
    assert!(opened.iter().all(|&n| n > 10), "{opened:?} were opened: mutations too rough");
}
