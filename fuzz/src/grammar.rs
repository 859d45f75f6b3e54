//! Grammars of strangers: made into a constraint, and followed for a few tokens.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use boostr::grammar::{Grammar, Vocabulary};
use boostr::tokenizer::Tokenizer;

/// Tokens that are taken under one grammar.
const STEPS: usize = 12;

static VOCABULARY: LazyLock<Vocabulary> = LazyLock::new(|| {
    let tokenizer = Tokenizer::from_file(fixtures().join("models/mamba2-tiny/tokenizer.json"));
    let tokenizer = tokenizer.expect("a tokenizer");
    Vocabulary::new(&tokenizer, &[2], tokenizer.vocab_size()).expect("a vocabulary")
});

/// The fixtures of the repository, for whichever crate this file is compiled into.
fn fixtures() -> PathBuf {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.map(|folder| folder.join("fixtures")).find(|path| path.is_dir()).expect("fixtures")
}

/// Takes `text` for a grammar, of the kind that its first byte says.
pub fn check(text: &str) {
    let Some(kind) = text.bytes().next().filter(u8::is_ascii) else { return };
    let rest = &text[1..];
    let grammar = match kind {
        b'R' => Grammar::regex(rest),
        b'L' => Grammar::lark(rest),
        _ => match serde_json::from_str(rest) {
            Ok(schema) => Grammar::json_schema(&schema),
            Err(_) => return,
        },
    };
    let Ok(mut constraint) = grammar.and_then(|grammar| VOCABULARY.constraint(&grammar)) else {
        return;
    };
    for step in 0..STEPS {
        // What took too much work is an error in the place of a mask.
        let Ok(allowed) = constraint.allowed() else { return };
        let ids: Vec<u32> = allowed.iter().collect();
        if ids.is_empty() {
            return;
        }
        let id = ids[(step * 31 + rest.len()) % ids.len()];
        let before = constraint.fork();
        if constraint.accept(id).is_err() {
            return;
        }
        drop(before);
    }
}
