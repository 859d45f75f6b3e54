//! Calls of tools in an answer: the same however it is cut.

use boostr::chat::tools::{Calls, Piece, Tool, ToolFormat};
use serde_json::json;

const FORMATS: [ToolFormat; 7] = [
    ToolFormat::Hermes,
    ToolFormat::Functions,
    ToolFormat::Nemotron,
    ToolFormat::Mistral,
    ToolFormat::MistralArgs { with_id: false },
    ToolFormat::MistralArgs { with_id: true },
    ToolFormat::Llama,
];

/// All pieces of an answer, texts that follow each other joined.
fn pieces<'a>(format: ToolFormat, parts: impl IntoIterator<Item = &'a str>) -> Vec<Piece> {
    let parameters = json!({"type": "object", "properties": {"a": {"type": "string"}, "b": {}}});
    let tools =
        ["f", "g"].map(|name| Tool { name: name.to_owned(), parameters: parameters.clone() });
    let mut calls = Calls::new(format, tools.to_vec());
    let mut all: Vec<Piece> = Vec::new();
    let mut take = |new: Vec<Piece>| {
        for piece in new {
            match (all.last_mut(), piece) {
                (Some(Piece::Text(before)), Piece::Text(text)) => before.push_str(&text),
                (_, piece) => all.push(piece),
            }
        }
    };
    for part in parts {
        take(calls.push(part));
    }
    take(calls.finish());
    all
}

/// Takes the first byte of `text` for a format and the second for a length of pieces, the rest for an answer.
pub fn check(text: &str) {
    let mut chars = text.chars();
    let (Some(format), Some(len)) = (chars.next(), chars.next()) else { return };
    let format = FORMATS[format as usize % FORMATS.len()];
    let answer = chars.as_str();
    let whole = pieces(format, [answer]);
    let by_letter = answer.char_indices().map(|(at, c)| &answer[at..at + c.len_utf8()]);
    assert_eq!(pieces(format, by_letter), whole, "{format:?}, letter by letter");
    let mut places: Vec<usize> =
        answer.char_indices().map(|(at, _)| at).step_by(len as usize % 32 + 1).collect();
    places.push(answer.len());
    let parts = places.windows(2).map(|ends| &answer[ends[0]..ends[1]]);
    assert_eq!(pieces(format, parts), whole, "{format:?}, in pieces");
}
