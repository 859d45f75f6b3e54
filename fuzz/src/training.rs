//! What training reads: `D` and lines of data, `T` and the words of a file of tokens, `C` and the `trainer.json` of a
//! checkpoint.

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use boostr::chat::{Options, Source};
use boostr::checkpoint::crc32;
use boostr::generation_config::SpecialTokens;
use boostr::tokenizer::Tokenizer;
use boostr::train::data::{Batches, Cursor, DataFile, Encoder, Packing, Pass, TokenFile, Truncate};
use boostr::train::{RunConfig, latest};

const TOKENIZER: &str = include_str!("../../fixtures/models/mamba2-tiny/tokenizer.json");
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls }}\
    {% endif %};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

static ENCODER: LazyLock<Encoder> = LazyLock::new(|| {
    let tokenizer = Tokenizer::from_bytes("tokenizer.json", TOKENIZER.as_bytes()).expect("one");
    let source = Source::new("t", TEMPLATE, SpecialTokens::default());
    let encoder = Encoder::new(&tokenizer, 0).expect("an end");
    encoder.with_chat(&source, Options::default()).expect("a template")
});

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("boostr-fuzz-training-{}", std::process::id()));
    fs::create_dir_all(folder.join("step-000001")).expect("a folder");
    folder
});

const KINDS: [Truncate; 6] = [
    Truncate::Split,
    Truncate::KeepStart,
    Truncate::KeepEnd,
    Truncate::Drop,
    Truncate::Refuse,
    Truncate::Anywhere,
];

/// Reads the input as what its first letter says.
pub fn check(text: &str) {
    match text.split_at_checked(1) {
        Some(("D", lines)) => data(lines),
        Some(("T", words)) => tokens(words),
        Some(("C", json)) => checkpoint(json),
        _ => {}
    }
}

/// Lines of data become a file of tokens, or an error.
fn data(lines: &str) {
    let (path, tokens) = (FOLDER.join("d.jsonl"), FOLDER.join("d.tokens"));
    fs::write(&path, lines).expect("written");
    let _ = fs::remove_file(&tokens);
    let files = [DataFile::new(&path).expect("lines of JSON")];
    match TokenFile::prepare(&tokens, &files, &ENCODER, |_, _| {}) {
        Ok(file) => use_tokens(&file),
        Err(_) => assert!(!tokens.exists(), "half a file"),
    }
}

/// Hexadecimal words, after a head and before counts that fit them, or bytes as they are.
fn tokens(words: &str) {
    let mut bytes = Vec::new();
    if let Some(raw) = words.strip_prefix('=') {
        bytes.extend_from_slice(raw.as_bytes());
    } else {
        let words: Vec<u32> =
            words.split_whitespace().map_while(|w| u32::from_str_radix(w, 16).ok()).collect();
        bytes.extend_from_slice(b"boostrTK");
        bytes.extend([1_u32, 0, 64, 0].iter().flat_map(|field| field.to_le_bytes()));
        bytes.extend([0; 16]);
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        let documents = words.iter().filter(|&&word| word & 1 << 30 != 0).count();
        let counts = [documents as u64, words.len() as u64, 0];
        bytes.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
    }
    if let Ok(file) = TokenFile::from_bytes("fuzz", bytes) {
        use_tokens(&file);
    }
}

/// In an epoch each input is read at most once, and no document that fits in a row is cut.
fn use_tokens(file: &TokenFile) {
    for len in [1, 5, 64] {
        for truncate in KINDS {
            let Ok(pass) = Pass::new(file, Packing::Documents(truncate), 2, len) else { continue };
            let mut read = 0;
            for batch in pass {
                read += batch.tokens();
                for piece in &batch.pieces {
                    let inputs = file.document(piece.document).len() - 1;
                    let is_whole = piece.tokens.len() == inputs;
                    assert!(is_whole || inputs > len || truncate == Truncate::Anywhere);
                }
            }
            assert!(read <= file.inputs());
        }
    }
}

/// A checkpoint of files that are those of its manifest.
fn checkpoint(json: &str) {
    let folder = FOLDER.join("step-000001");
    let optimizer = b"\x02\0\0\0\0\0\0\0{}";
    let mut files = Vec::new();
    for (name, bytes) in [("trainer.json", json.as_bytes()), ("optimizer.safetensors", optimizer)] {
        fs::write(folder.join(name), bytes).expect("written");
        let (len, sum) = (bytes.len(), crc32(0, bytes));
        files.push(format!(r#""{name}": {{"bytes": {len}, "crc32": {sum}}}"#));
    }
    let manifest = format!(r#"{{"format": 1, "files": {{{}}}}}"#, files.join(", "));
    fs::write(folder.join("manifest.json"), manifest).expect("written");
    let Ok(Some(found)) = latest(&FOLDER) else { return };
    let saved = found.checkpoint;
    let config = RunConfig::of_checkpoint(&saved);
    let _ = (saved.optimizer(), saved.check_config(&saved.state.config, &[]));
    let Ok(cursor) = serde_json::from_value::<Cursor>(saved.state.cursor.clone()) else { return };
    let truncate = config.map_or(Truncate::Anywhere, |config| config.truncate);
    let file = TokenFile::of_documents(&[vec![5, 6, 7, 8, 9], vec![5, 6]], 0, 64).expect("tokens");
    if let Ok(mut batches) = Batches::new(&file, Packing::Documents(truncate), 2, 4, 1)
        && batches.seek(cursor).is_ok()
    {
        assert!(!batches.next().pieces.is_empty());
    }
}
