//! Tokenizers of strangers: loaded with the files beside them, then used on texts and ids.

use boostr::checkpoint::ConfigFile;
use boostr::checkpoint::gguf::Metadata;
use boostr::tokenizer::{Beside, Part, Tokenizer};

/// Ends one file of an input and begins the next.
const NEXT: char = '\u{1e}';

const TEXTS: [&str; 6] = [
    "",
    "It is a truth, 12345 don't\n\n  we'll",
    "<s>a</s><unk> <|im_start|>b<|im_end|>[SEP]",
    "é🦙 नमस्ते 汉字 ½ \u{fdfa} a\u{301}\u{0}\u{feff}",
    "aaaaaaaaaaaaaaaa bbbb",
    "<0x41><0xff> ▁▁ Ġ",
];

/// Takes `input` for a `tokenizer.json`, and after each separator for one of the files beside it.
pub fn check(input: &str) {
    let mut files = input.split(NEXT);
    let json = files.next().unwrap_or_default();
    let Ok(tokenizer) = Tokenizer::from_bytes("tokenizer.json", json.as_bytes()) else { return };
    let mut file = |name| ConfigFile::parse(name, files.next()?).ok();
    let beside = Beside {
        tokenizer_config: file("tokenizer_config.json"),
        added_tokens: file("added_tokens.json"),
        special_tokens_map: file("special_tokens_map.json"),
    };
    let Ok(tokenizer) = tokenizer.beside(&beside, Some(1 << 16)) else { return };
    let markers = tokenizer.markers_in(TEXTS[2]);
    let tokenizer = tokenizer.with_control(&markers);
    for text in TEXTS {
        for add_special in [false, true] {
            let _ = tokenizer.encode(text, add_special).map(|ids| used(&tokenizer, &ids));
            let _ = tokenizer.encode_control(text, add_special).map(|ids| used(&tokenizer, &ids));
        }
        let parts = [Part::Control("<s>"), Part::Text(text), Part::Control("</s>")];
        let _ = tokenizer.encode_parts(&parts, false).map(|ids| used(&tokenizer, &ids));
        // Some post-processors put tokens around every text.
        let is_bare = tokenizer.encode("", false).is_ok_and(|ids| ids.is_empty());
        if let Ok(ids) = tokenizer.encode(text, false)
            && is_bare
        {
            assert!(!ids.iter().any(|&id| tokenizer.is_control(id)), "{text:?} became control");
        }
    }
    let all: Vec<u32> = (0..tokenizer.max_id().saturating_add(2).min(2000)).collect();
    used(&tokenizer, &all);
    let _ = all.iter().map(|&id| tokenizer.bytes(id)).find(Result::is_err);
    let _ = tokenizer.to_gguf(json, None, tokenizer.max_id() as usize + 1, &mut Metadata::new("m"));
}

/// Turns ids into text, at once and one by one.
fn used(tokenizer: &Tokenizer, ids: &[u32]) {
    for skip_special in [false, true] {
        let Ok(text) = tokenizer.decode(ids, skip_special) else { continue };
        let mut stream = tokenizer.stream(skip_special);
        let pieces = ids.iter().map(|&id| stream.push(id)).collect::<Result<Vec<_>, _>>();
        let Ok(pieces) = pieces else { continue };
        let Ok(rest) = stream.finish() else { continue };
        let streamed: String = pieces.into_iter().flatten().chain([rest]).collect();
        // A decoder that looks further than the window is streamed as far as it goes.
        if tokenizer.bytes(0).is_ok() {
            assert_eq!(streamed, text);
        }
    }
}
