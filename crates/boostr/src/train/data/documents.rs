//! What files of training data hold, read as a stream.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::lines::{Line, Lines, at};
use crate::error::{Error, Result};

/// Longest piece of a text that is given, and tokenized, at once, in bytes: tokenizing takes memory of about a
/// hundred times the text.
pub const PIECE: usize = 256 << 10;

/// How a file holds documents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// Plain text.
    Text {
        /// The line that stands between two documents; all is one document when there is none. An empty one makes
        /// each empty line end a document.
        separator: Option<String>,
    },
    /// A JSON object a line, or one list of objects, each with the first of these that it has:
    ///
    /// - `messages`, as a chat template takes them, or as below;
    /// - `conversations`: `from` and `value` of each message (ShareGPT), or messages as above;
    /// - `prompt` and `completion`: two texts, or two lists of messages (TRL);
    /// - `instruction`, `output`, and maybe `input`, `system` and `history` (Alpaca);
    /// - `text`.
    ///
    /// `tools` go with messages, as a list or as its JSON, or `functions`; so do `system`, which comes before them, and
    /// `chat_template_kwargs`, an object of the template's variables. A message of the assistant whose `weight` is 0 is read and not learnt; 1 is as none. Other keys are left
    /// alone, and so are empty lines.
    Jsonl,
}

/// A file of documents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFile {
    /// Where it is.
    pub path: PathBuf,
    /// How it is to be read.
    pub kind: Kind,
}

impl DataFile {
    /// A file whose name says how it is to be read: `.txt` and `.md` are one document of plain text, `.jsonl`,
    /// `.ndjson` and `.json` are lines of JSON or a list.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for another name.
    ///
    /// ```
    /// use boostr::train::data::{DataFile, Kind};
    ///
    /// assert_eq!(DataFile::new("a/chat.jsonl")?.kind, Kind::Jsonl);
    /// assert_eq!(DataFile::new("a/book.TXT")?.kind, Kind::Text { separator: None });
    /// assert!(DataFile::new("a/table.csv").is_err());
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn new(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
        let kind = match extension.to_str() {
            Some("txt" | "md") => Kind::Text { separator: None },
            Some("jsonl" | "ndjson" | "json") => Kind::Jsonl,
            _ => {
                let what = format!(
                    "data file `{}`: its name should end in .txt or .md (plain text), .jsonl or .json (a JSON \
                     object a line, or a list of them), or its kind be given",
                    path.display()
                );
                return Err(Error::Unsupported { what });
            }
        };
        Ok(Self { path, kind })
    }
}

/// A document, or a piece of one, with where it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    /// What it says.
    pub content: Content,
    /// Its file.
    pub path: Arc<Path>,
    /// The line that it starts on, from 1.
    pub line: usize,
}

/// What a document says.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Text: all of a document, or, of a file of plain text, a piece that is not much longer than [`PIECE`].
    Text {
        /// The text.
        text: String,
        /// Whether a document starts with it.
        is_first: bool,
        /// Whether a document ends with it.
        is_last: bool,
    },
    /// A conversation, from which the assistant's answers are to be learnt.
    Messages {
        /// The messages, at least one.
        messages: Vec<Value>,
        /// So many of them are only read, answers among them.
        given: usize,
        /// The tools on offer.
        tools: Option<Vec<Value>>,
        /// More variables of the chat template.
        kwargs: Map<String, Value>,
    },
    /// A text of which the second part is to be learnt.
    Completion {
        /// What is given.
        prompt: String,
        /// What is to follow.
        completion: String,
    },
}

impl Content {
    /// Whether a document ends with it.
    pub(super) fn is_last(&self) -> bool {
        !matches!(self, Self::Text { is_last: false, .. })
    }

    /// The texts in it.
    pub(in crate::train) fn texts(&self) -> Vec<&str> {
        match self {
            Self::Text { text, .. } => vec![text],
            Self::Completion { prompt, completion } => vec![prompt, completion],
            Self::Messages { messages, .. } => messages
                .iter()
                .filter_map(|message| message.get("content"))
                .flat_map(|content| match content {
                    Value::Array(parts) => {
                        parts.iter().filter_map(|part| part.get("text")?.as_str()).collect()
                    }
                    other => other.as_str().into_iter().collect::<Vec<&str>>(),
                })
                .collect(),
        }
    }

    /// What an object of JSON says.
    fn read(value: Value) -> Result<Self, String> {
        let Value::Object(mut object) = value else {
            return Err(format!("expected a JSON object, found {}", kind_of(&value)));
        };
        let mut take = |key: &str| object.remove(key).filter(|value| !value.is_null());
        for key in ["chosen", "rejected"] {
            if take(key).is_some() {
                return Err(format!("`{key}`: preferences are not learnt from"));
            }
        }
        let is_judged = matches!(take("label"), Some(Value::Bool(_)));
        let kwargs = take("chat_template_kwargs");
        let functions = take("functions").map(functions).transpose()?;
        for key in ["messages", "conversations"] {
            let Some(messages) = take(key) else { continue };
            let mut messages = objects(key, messages)?;
            let is_sharegpt = |message: &Value| message.get("from").is_some();
            if key == "conversations" || messages.iter().any(is_sharegpt) {
                messages = sharegpt(key, messages)?;
            }
            instruct(&mut messages, take("system"))?;
            return conversation(key, messages, 0, (tools(take("tools"))?.or(functions), kwargs));
        }
        match (take("prompt"), take("completion")) {
            (Some(_), Some(_)) if is_judged => {
                Err("`label`: preferences are not learnt from".into())
            }
            (Some(prompt @ Value::Array(_)), Some(completion)) => {
                let mut messages = objects("prompt", prompt)?;
                instruct(&mut messages, take("system"))?;
                let given = messages.len();
                let completion = objects("completion", completion)?;
                if completion.is_empty() {
                    return Err("`completion` is empty".into());
                }
                messages.extend(completion);
                conversation(
                    "prompt",
                    messages,
                    given,
                    (tools(take("tools"))?.or(functions), kwargs),
                )
            }
            (Some(prompt), Some(completion)) => {
                let prompt = text("prompt", prompt)?;
                if take("system").is_some_and(|system| system != "") {
                    return Err("`system`: expected none beside a `prompt` that is a text".into());
                }
                Ok(Self::Completion { prompt, completion: filled("completion", completion)? })
            }
            (prompt, completion) => match (take("instruction"), take("output"), take("text")) {
                (Some(instruction), Some(output), _) => {
                    let input = (take("system"), take("history"), take("input"));
                    let messages = alpaca(input, instruction, output)?;
                    let tools = tools(take("tools"))?.or(functions);
                    conversation("instruction", messages, 0, (tools, kwargs))
                }
                (_, _, Some(value)) => {
                    Ok(Self::Text { text: text("text", value)?, is_first: true, is_last: true })
                }
                (instruction, output, None) => {
                    let found = [
                        (prompt.is_some(), "`prompt` alone"),
                        (completion.is_some(), "`completion` alone"),
                        (instruction.is_some(), "`instruction` alone"),
                        (output.is_some(), "`output` alone"),
                        (true, "none of them"),
                    ];
                    let found = found.into_iter().find(|(is_found, _)| *is_found);
                    Err(format!(
                        "expected `messages`, `conversations`, `prompt` with `completion`, `instruction` with \
                         `output`, or `text`, found {}",
                        found.unwrap_or_default().1
                    ))
                }
            },
        }
    }
}

fn conversation(
    key: &str,
    messages: Vec<Value>,
    given: usize,
    (tools, kwargs): (Option<Vec<Value>>, Option<Value>),
) -> Result<Content, String> {
    if messages.is_empty() {
        return Err(format!("`{key}` is empty"));
    }
    for (i, message) in messages.iter().enumerate() {
        weight(message).map_err(|reason| format!("`{key}`: message {}: {reason}", i + 1))?;
    }
    let kwargs = match kwargs {
        None => Map::new(),
        Some(Value::Object(kwargs)) => kwargs,
        Some(other) => {
            let found = kind_of(&other);
            return Err(format!("`chat_template_kwargs`: expected an object, found {found}"));
        }
    };
    Ok(Content::Messages { messages, given, tools, kwargs })
}

/// Whether a message is learnt, as far as it says so itself: its `weight` is 1 or 0, as OpenAI has it.
pub(super) fn weight(message: &Value) -> Result<bool, String> {
    match message.get("weight") {
        None | Some(Value::Null) => Ok(true),
        Some(weight) => match weight.as_f64() {
            Some(1.0) => Ok(true),
            Some(0.0) => Ok(false),
            _ => Err(format!("`weight`: expected 0 or 1, found {weight}")),
        },
    }
}

/// Tools as a list, or as a text that is its JSON; a blank one is none.
fn tools(value: Option<Value>) -> Result<Option<Vec<Value>>, String> {
    let value = match value {
        Some(Value::String(json)) if json.trim().is_empty() => None,
        Some(Value::String(json)) => Some(
            serde_json::from_str(&json).map_err(|error| format!("`tools`: not JSON: {error}"))?,
        ),
        other => other,
    };
    value.map(|tools| objects("tools", tools)).transpose()
}

/// Tools in OpenAI's older form, `functions`.
fn functions(value: Value) -> Result<Vec<Value>, String> {
    let functions = objects("functions", value)?.into_iter();
    Ok(functions.map(|function| json!({"type": "function", "function": function})).collect())
}

/// Puts what stands beside messages as `system` before them.
fn instruct(messages: &mut Vec<Value>, system: Option<Value>) -> Result<(), String> {
    let system = system.map(|system| text("system", system)).transpose()?.unwrap_or_default();
    if !system.is_empty() {
        messages.insert(0, json!({"role": "system", "content": system}));
    }
    Ok(())
}

/// Messages of ShareGPT's form. Those that say `role` are left as they are.
fn sharegpt(key: &str, turns: Vec<Value>) -> Result<Vec<Value>, String> {
    let mut messages = Vec::with_capacity(turns.len());
    for (i, turn) in turns.into_iter().enumerate() {
        let at = |reason: String| format!("`{key}`: message {}: {reason}", i + 1);
        let Some(from) = turn.get("from") else {
            if turn.get("role").is_none() {
                return Err(at("expected `from` with `value`, or `role`".into()));
            }
            messages.push(turn);
            continue;
        };
        let value = turn.get("value").cloned().unwrap_or_default();
        let role = match from.as_str().unwrap_or_default() {
            "human" | "user" => "user",
            "gpt" | "assistant" | "model" | "chatgpt" | "bing" | "bard" => "assistant",
            "system" => "system",
            "tool" | "observation" | "function_response" => "tool",
            "function_call" => {
                messages.push(calls(&text("value", value).map_err(at)?).map_err(at)?);
                continue;
            }
            _ => {
                return Err(at(format!(
                    "`from`: expected human, gpt, system, tool, observation or function_call, found {from}"
                )));
            }
        };
        let content = text("value", value).map_err(at)?;
        let mut message = json!({"role": role, "content": content});
        if let Some(weight) = turn.get("weight") {
            message["weight"] = weight.clone();
        }
        messages.push(message);
    }
    Ok(messages)
}

/// An assistant's message of the JSON of a call, or of a list of calls.
fn calls(text: &str) -> Result<Value, String> {
    let calls: Value =
        serde_json::from_str(text).map_err(|error| format!("`value`: not JSON: {error}"))?;
    let calls = match calls {
        Value::Array(calls) => calls,
        call => vec![call],
    };
    let calls = calls.into_iter().map(|call| match call.get("name") {
        Some(Value::String(_)) => Ok(json!({"type": "function", "function": call})),
        _ => Err("`value`: expected a call with `name` and `arguments`".to_owned()),
    });
    let calls = calls.collect::<Result<Vec<_>, _>>()?;
    Ok(json!({"role": "assistant", "content": "", "tool_calls": calls}))
}

/// The messages of an instruction of Alpaca's form.
fn alpaca(
    (system, history, input): (Option<Value>, Option<Value>, Option<Value>),
    instruction: Value,
    output: Value,
) -> Result<Vec<Value>, String> {
    let mut messages = Vec::new();
    let mut say = |role: &str, content: String| {
        messages.push(json!({"role": role, "content": content}));
    };
    let system = system.map(|system| text("system", system)).transpose()?;
    if let Some(system) = system.filter(|system| !system.is_empty()) {
        say("system", system);
    }
    let expected = "`history`: expected a list of pairs of texts";
    match history {
        None => {}
        Some(Value::Array(turns)) => {
            for turn in turns {
                let pair = turn.as_array().map(Vec::as_slice);
                let Some([Value::String(question), Value::String(answer)]) = pair else {
                    return Err(expected.into());
                };
                say("user", question.clone());
                say("assistant", answer.clone());
            }
        }
        Some(other) => return Err(format!("{expected}, found {}", kind_of(&other))),
    }
    let mut question = text("instruction", instruction)?;
    let input = input.map(|input| text("input", input)).transpose()?;
    if let Some(input) = input.filter(|input| !input.is_empty()) {
        question.push('\n');
        question.push_str(&input);
    }
    say("user", question);
    say("assistant", filled("output", output)?);
    Ok(messages)
}

/// A text that is to be learnt.
fn filled(key: &str, value: Value) -> Result<String, String> {
    let text = text(key, value)?;
    if text.is_empty() {
        return Err(format!("`{key}` is empty"));
    }
    Ok(text)
}

pub(super) fn text(key: &str, value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(format!("`{key}`: expected a text, found {}", kind_of(&other))),
    }
}

fn objects(key: &str, value: Value) -> Result<Vec<Value>, String> {
    let Value::Array(items) = value else {
        return Err(format!("`{key}`: expected a list of objects, found {}", kind_of(&value)));
    };
    match items.iter().find(|item| !item.is_object()) {
        Some(other) => {
            Err(format!("`{key}`: expected a list of objects, found {} in it", kind_of(other)))
        }
        None => Ok(items),
    }
}

pub(super) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The documents of files, one file after another. After an error there is none.
///
/// Texts are what the files hold, to the byte, but for a byte order mark at the start of a file. Texts of white
/// space alone are left out.
pub struct Documents<'a> {
    files: std::slice::Iter<'a, DataFile>,
    reader: Option<Reader>,
    read: u64,
}

impl<'a> Documents<'a> {
    /// Reads `files`.
    pub fn new(files: &'a [DataFile]) -> Self {
        Self { files: files.iter(), reader: None, read: 0 }
    }

    /// Bytes of the files that were read so far.
    pub fn bytes_read(&self) -> u64 {
        self.read + self.reader.as_ref().map_or(0, |reader| reader.lines.read)
    }

    fn step(&mut self) -> Result<Option<Document>> {
        loop {
            if let Some(reader) = &mut self.reader {
                if let Some(document) = reader.step()? {
                    return Ok(Some(document));
                }
                self.read = self.bytes_read();
                self.reader = None;
            }
            let Some(file) = self.files.next() else { return Ok(None) };
            self.reader = Some(Reader::open(file)?);
        }
    }
}

impl Iterator for Documents<'_> {
    type Item = Result<Document>;

    fn next(&mut self) -> Option<Self::Item> {
        let document = self.step().transpose();
        if matches!(document, Some(Err(_))) {
            self.files = [].iter();
            self.reader = None;
        }
        document
    }
}

/// One file.
struct Reader {
    path: Arc<Path>,
    kind: Kind,
    lines: Lines,
    /// Text of a document of which no more than a piece is known yet.
    pending: Vec<u8>,
    /// The line that `pending` starts on.
    line: usize,
    /// Whether a document starts with `pending`.
    is_first: bool,
}

impl Reader {
    fn open(file: &DataFile) -> Result<Self> {
        Ok(Self {
            path: file.path.as_path().into(),
            kind: file.kind.clone(),
            lines: Lines::open(&file.path)?,
            pending: Vec::new(),
            line: 1,
            is_first: true,
        })
    }

    fn step(&mut self) -> Result<Option<Document>> {
        match self.kind.clone() {
            Kind::Jsonl => self.json(),
            Kind::Text { separator } => self.text(separator.as_deref()),
        }
    }

    fn json(&mut self) -> Result<Option<Document>> {
        while let Some(line) = self.lines.json(&self.path)? {
            self.line = self.lines.line;
            let content =
                Content::read(line).map_err(|reason| at(&self.path, self.line, &reason))?;
            let is_blank = matches!(&content, Content::Text { text, .. } if text.trim().is_empty());
            if !is_blank {
                return Ok(Some(self.document(content)));
            }
        }
        Ok(None)
    }

    fn text(&mut self, separator: Option<&str>) -> Result<Option<Document>> {
        loop {
            if self.pending.len() > PIECE {
                return self.piece().map(Some);
            }
            let line = self.lines.next(&self.path, PIECE)?;
            let ends = match line {
                Some(Line { bytes, is_whole }) => {
                    is_whole && separator.is_some_and(|s| line_is(bytes, s))
                }
                None => true,
            };
            if !ends {
                self.pending.extend_from_slice(line.map_or(&[], |line| line.bytes));
                continue;
            }
            let is_end = line.is_none();
            let document = self.rest()?;
            self.line = self.lines.line + 1;
            if document.is_some() || is_end {
                return Ok(document);
            }
        }
    }

    /// The first part of a text that goes on.
    fn piece(&mut self) -> Result<Document> {
        let is_first = std::mem::take(&mut self.is_first);
        // What is cut off at the end may be the start of a character.
        let known = match str::from_utf8(&self.pending) {
            Ok(text) => text,
            Err(error) if error.error_len().is_none() => {
                str::from_utf8(&self.pending[..error.valid_up_to()]).unwrap_or_default()
            }
            Err(error) => return Err(self.not_utf8(error.valid_up_to())),
        };
        let text = known[..place_to_cut(known)].to_owned();
        self.pending.drain(..text.len());
        let lines = text.matches('\n').count();
        let document = self.document(Content::Text { text, is_first, is_last: false });
        self.line += lines;
        Ok(document)
    }

    /// The last part of a text, unless the text is blank.
    fn rest(&mut self) -> Result<Option<Document>> {
        let is_first = std::mem::replace(&mut self.is_first, true);
        let text = match String::from_utf8(std::mem::take(&mut self.pending)) {
            Ok(text) => text,
            Err(error) => {
                let at = error.utf8_error().valid_up_to();
                self.pending = error.into_bytes();
                return Err(self.not_utf8(at));
            }
        };
        if is_first && text.trim().is_empty() {
            return Ok(None);
        }
        Ok(Some(self.document(Content::Text { text, is_first, is_last: true })))
    }

    fn document(&self, content: Content) -> Document {
        Document { content, path: Arc::clone(&self.path), line: self.line }
    }

    /// The error for a byte of `pending` that is none of UTF-8.
    fn not_utf8(&self, byte: usize) -> Error {
        let before = &self.pending[..byte];
        let line = self.line + before.split(|&b| b == b'\n').count() - 1;
        let column = before.iter().rev().take_while(|&&b| b != b'\n').count() + 1;
        at(&self.path, line, &format!("not UTF-8 text: byte {column} of the line is wrong"))
    }
}

fn line_is(bytes: &[u8], line: &str) -> bool {
    let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    bytes.strip_suffix(b"\r").unwrap_or(bytes) == line.as_bytes()
}

/// The pieces of a text, none much longer than [`PIECE`].
pub(in crate::train) fn pieces(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        if text.is_empty() {
            return None;
        }
        let end = if text.len() > PIECE { place_to_cut(text) } else { text.len() };
        let (piece, rest) = text.split_at(end);
        text = rest;
        Some(piece)
    })
}

/// Where to cut a text that is longer than [`PIECE`], so that each half has the tokens that it has in the whole: before
/// a space between two letters, where every tokenizer that splits texts does so. Else after a line, else anywhere.
fn place_to_cut(text: &str) -> usize {
    let end = text.floor_char_boundary(PIECE);
    let head = &text[..end];
    let is_between_letters = |space: usize| {
        head[..space].chars().next_back().is_some_and(char::is_alphabetic)
            && head[space + 1..].chars().next().is_some_and(char::is_alphabetic)
    };
    let space = head.rmatch_indices(' ').map(|(at, _)| at).find(|&at| is_between_letters(at));
    space.or_else(|| head.rfind('\n').map(|at| at + 1)).unwrap_or(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_before_a_space_between_letters() {
        let long = "word. ".repeat(PIECE / 6) + "some words, " + &"x".repeat(50);
        let all: Vec<&str> = pieces(&long).collect();
        assert_eq!(all.concat(), long);
        assert!(all.len() == 2 && all[1].starts_with(" words, "), "{:?}", all[1]);
        for text in ["\u{e9}".repeat(PIECE), "a\n".repeat(PIECE), " ".repeat(3 * PIECE)] {
            let all: Vec<&str> = pieces(&text).collect();
            assert_eq!(all.concat(), text);
            assert!(all.iter().all(|piece| piece.len() <= PIECE && piece.len() > PIECE / 3));
        }
        assert_eq!(pieces("").count(), 0);
    }
}
