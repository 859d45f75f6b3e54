//! Calls out of an answer that comes in pieces.

use serde_json::{Map, Value};

use super::super::thoughts::begun;
use super::{Tool, ToolFormat};

mod sections;

const TOOL_CALL: &str = "<tool_call>";
const TOOL_CALL_END: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
const NEMOTRON: &str = "<TOOLCALL>";
const NEMOTRON_END: &str = "</TOOLCALL>";
const MISTRAL: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGS: &str = "[ARGS]";
const PYTHON_TAG: &str = "<|python_tag|>";

/// Longest name of a function or a parameter, in bytes.
const MAX_NAME: usize = 1000;

/// Longest text between `[TOOL_CALLS]` and `[ARGS]`, in bytes.
const MAX_HEAD: usize = 200;

/// Bytes looked at for calls that were none, after which all is text: what may be a call is looked at for calls inside once
/// it is none, and again for those inside of these.
const MAX_VAIN: usize = 1 << 20;

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The id that the model gave it; most give none.
    pub id: Option<String>,
    /// The tool, one of those on offer.
    pub name: String,
    /// The arguments, a JSON object in its shortest form.
    pub arguments: String,
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Text, never empty.
    Text(String),
    /// A call.
    Call(Call),
}

/// Takes calls out of an answer while it comes.
///
/// Text that may be a part of a call is held back, so nothing of a call is ever given as text. What turns out to be none,
/// because it is malformed or names a tool that is not on offer, comes as the text that it is. White space next to a
/// call is dropped. What stands between `<think>` and `</think>`, or the markers that the format has in their place, is
/// text, whatever it looks like; so is all that follows a `<think>` without an end. After a mebibyte that looked like calls and was none, all is text. How the answer is cut into
/// pieces makes no difference, and time is linear in it.
#[derive(Clone, Debug)]
pub struct Calls {
    format: ToolFormat,
    tools: Vec<Tool>,
    /// What is not decided yet.
    held: String,
    /// Bytes of it that were given in this step.
    given: usize,
    /// The call that `held` may be.
    open: Option<Open>,
    /// Bytes of `held` that are white space in front of what may be a call.
    blank: usize,
    /// Bytes that were looked at for calls and were none.
    vain: usize,
    /// `held` begins within a thought.
    in_thought: bool,
    /// Nothing but white space has come since the last call.
    after_call: bool,
    /// Nothing but calls and white space has come at all.
    no_text: bool,
}

/// The start of what may be a call: white space, then a marker, then its body.
#[derive(Clone, Debug)]
struct Open {
    /// Where the body begins.
    body: usize,
    scan: Scan,
}

/// How far a body has been looked at: nothing before `at` is looked at again.
#[derive(Clone, Debug, Default)]
struct Scan {
    at: usize,
    /// Where a value of JSON begins.
    start: usize,
    /// Open objects and lists; in a function 1, behind its name.
    depth: usize,
    /// In a text of JSON, or in a parameter's value.
    in_text: bool,
    escaped: bool,
    /// The body is `<function=..>`, not JSON.
    in_function: bool,
    /// Name and id of the call of a section that is being read.
    head: Option<(String, String)>,
    /// The calls that the body begins with, and where they end; a closing marker may follow.
    found: Option<(Vec<Call>, usize)>,
}

/// What a body is.
enum Body {
    /// It may become a call.
    Unfinished,
    /// It is none.
    Text,
    /// Calls of so many bytes.
    Calls(Vec<Call>, usize),
}

impl Calls {
    /// Looks for calls of these tools.
    #[must_use]
    pub fn new(format: ToolFormat, tools: Vec<Tool>) -> Self {
        Self {
            format,
            tools,
            held: String::new(),
            given: 0,
            open: None,
            blank: 0,
            vain: 0,
            in_thought: false,
            after_call: false,
            no_text: true,
        }
    }

    /// The same for an answer that follows `prompt`, or the end of one: templates of models that think may end it with
    /// the start of a thought.
    ///
    /// ```
    /// use boostr::chat::tools::{Calls, Piece, Tool, ToolFormat};
    /// use serde_json::json;
    ///
    /// let tools = Tool::read_all(&[json!({"type": "function", "function": {"name": "now"}})])?;
    /// let mut calls = Calls::new(ToolFormat::Hermes, tools).after("<|assistant|>\n<think>\n");
    /// let call = r#"<tool_call>{"name": "now"}</tool_call>"#;
    /// let mut pieces = calls.push(&format!("Perhaps {call}?</think>{call}"));
    /// assert!(matches!(pieces.pop(), Some(Piece::Call(_))));
    /// assert_eq!(pieces, [Piece::Text(format!("Perhaps {call}?</think>"))]);
    /// # Ok::<(), boostr::Error>(())
    /// ```
    #[must_use]
    pub fn after(self, prompt: &str) -> Self {
        Self { in_thought: prompt.trim_end().ends_with(self.format.markers().open()), ..self }
    }

    /// Takes the next piece of the answer and gives what is now known.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        self.advance(false)
    }

    /// The rest, now that no more comes: a call whose closing marker is missing is a call.
    pub fn finish(&mut self) -> Vec<Piece> {
        let pieces = self.advance(true);
        *self = Self::new(self.format, std::mem::take(&mut self.tools));
        pieces
    }

    fn advance(&mut self, last: bool) -> Vec<Piece> {
        let mut pieces = Vec::new();
        self.find_all(last, &mut pieces);
        self.held.drain(..std::mem::take(&mut self.given));
        pieces
    }

    /// What is held and was not given.
    fn rest(&self) -> &str {
        self.held.get(self.given..).unwrap_or_default()
    }

    fn find_all(&mut self, last: bool, pieces: &mut Vec<Piece>) {
        loop {
            let Some(mut open) = self.open.take() else {
                match self.opening() {
                    Opening::At { start, body } => {
                        self.release(start, pieces);
                        self.open = Some(Open { body: body - start, scan: Scan::default() });
                        continue;
                    }
                    Opening::Thought { len } => {
                        self.think(len, pieces);
                        self.in_thought = !self.in_thought;
                        continue;
                    }
                    Opening::None { decided, blank } => {
                        let len = if last { self.rest().len() } else { decided };
                        if self.in_thought {
                            self.think(len, pieces);
                        } else {
                            self.release(len, pieces);
                        }
                        self.blank = blank;
                        return;
                    }
                }
            };
            let body = self.rest().get(open.body..).unwrap_or_default();
            let looked_at = match self.body(body, &mut open.scan, last) {
                Body::Unfinished if !last => {
                    self.open = Some(open);
                    return;
                }
                Body::Unfinished => body.len(),
                Body::Text => open.scan.at,
                Body::Calls(calls, len) => {
                    self.after_call = true;
                    self.given += open.body + len;
                    pieces.extend(calls.into_iter().map(Piece::Call));
                    continue;
                }
            };
            self.vain = self.vain.saturating_add(looked_at);
            self.no_text = false;
            self.release(open.body, pieces);
        }
    }

    /// Gives the first `len` bytes of what is held as text.
    fn release(&mut self, len: usize, pieces: &mut Vec<Piece>) {
        let text = self.rest().get(..len).unwrap_or_default().to_owned();
        self.given += text.len();
        self.blank = 0;
        let text = if self.after_call { text.trim_start() } else { &text };
        if text.is_empty() {
            return;
        }
        self.after_call = false;
        self.no_text &= text.trim().is_empty();
        match pieces.last_mut() {
            Some(Piece::Text(before)) => before.push_str(text),
            _ => pieces.push(Piece::Text(text.to_owned())),
        }
    }

    /// The same for a thought, or blank text before one: the answer after it still counts as not begun, so that a call
    /// may be all of it.
    fn think(&mut self, len: usize, pieces: &mut Vec<Piece>) {
        let no_text = self.no_text;
        self.release(len, pieces);
        self.no_text = no_text;
    }

    /// Where a call, or a thought, may begin in what is held; in a thought, where that ends.
    fn opening(&self) -> Opening {
        let held = self.rest();
        let markers = self.format.markers();
        let (think, think_end) = (markers.open(), markers.close());
        if self.vain > MAX_VAIN {
            return Opening::None { decided: held.len(), blank: 0 };
        }
        if self.in_thought {
            return match held.find(think_end) {
                Some(at) => Opening::Thought { len: at + think_end.len() },
                None => Opening::None { decided: held.len() - begun(held, think_end), blank: 0 },
            };
        }
        let marker = match self.format {
            ToolFormat::Hermes | ToolFormat::Functions => TOOL_CALL,
            ToolFormat::Nemotron => NEMOTRON,
            ToolFormat::Mistral | ToolFormat::MistralArgs { .. } => MISTRAL,
            ToolFormat::Kimi => sections::SECTION,
            ToolFormat::KimiTags => sections::TOOLS,
            ToolFormat::Llama => return self.opening_of_llama(),
        };
        // The first of both in one pass: time is linear however many there are of one and none of the other.
        let starts = [think, marker].map(|marker| marker.chars().next().unwrap_or('<'));
        let fresh = held.get(self.blank..).unwrap_or_default();
        let mut places = fresh.match_indices(starts).map(|(at, _)| self.blank + at);
        let is_one = |at: &usize| {
            let rest = held.get(*at..).unwrap_or_default();
            rest.starts_with(think) || rest.starts_with(marker)
        };
        match places.find(is_one) {
            Some(at) if held.get(at..).is_some_and(|rest| rest.starts_with(think)) => {
                Opening::Thought { len: at + think.len() }
            }
            Some(at) => {
                let start = held.get(..at).unwrap_or_default().trim_end().len();
                Opening::At { start, body: at + marker.len() }
            }
            None => {
                let possible = begun(fresh, marker).max(begun(fresh, think));
                let before = fresh.get(..fresh.len() - possible).unwrap_or_default();
                match before.trim_end().len() {
                    0 => Opening::None { decided: 0, blank: self.blank + before.len() },
                    text => {
                        Opening::None { decided: self.blank + text, blank: before.len() - text }
                    }
                }
            }
        }
    }

    /// A call is all of the answer, or comes behind another one.
    fn opening_of_llama(&self) -> Opening {
        let held = self.rest();
        let think = self.format.markers().open();
        let all = Opening::None { decided: held.len(), blank: 0 };
        if !self.no_text {
            return all;
        }
        let space = |c: char| c.is_whitespace() || (self.after_call && c == ';');
        let rest = held.get(self.blank..).unwrap_or_default().trim_start_matches(space);
        let at = held.len() - rest.len();
        if rest.starts_with('{') {
            Opening::At { start: 0, body: at }
        } else if rest.starts_with(PYTHON_TAG) {
            Opening::At { start: 0, body: at + PYTHON_TAG.len() }
        } else if rest.starts_with(think) {
            Opening::Thought { len: at + think.len() }
        } else if PYTHON_TAG.starts_with(rest) || think.starts_with(rest) {
            Opening::None { decided: 0, blank: at }
        } else {
            all
        }
    }

    fn body(&self, body: &str, scan: &mut Scan, last: bool) -> Body {
        match self.format {
            ToolFormat::Hermes | ToolFormat::Functions => {
                if scan.is_before_value() {
                    let start = scan.pass_blank(body);
                    scan.in_function = start.starts_with(FUNCTION);
                    if !scan.in_function && FUNCTION.starts_with(start) {
                        return Body::Unfinished;
                    }
                }
                if scan.in_function {
                    self.function(body, scan, last)
                } else {
                    scan.json(body, TOOL_CALL_END, last, |value| self.call(value))
                }
            }
            ToolFormat::Nemotron => scan.json(body, NEMOTRON_END, last, |value| self.call(value)),
            ToolFormat::Kimi | ToolFormat::KimiTags => self.section(body, scan, last),
            ToolFormat::Mistral | ToolFormat::Llama => {
                scan.json(body, "", last, |value| self.call(value))
            }
            ToolFormat::MistralArgs { .. } => {
                // A head is a name and an id; a text goes on with other characters, or for longer. What is seen of it so
                // far is judged as the whole is.
                let most = MAX_HEAD + ARGS.len();
                let begin = body.get(..floor(body, most)).unwrap_or_default();
                let head = begin.split_once(ARGS).map(|(head, _)| head);
                let plain = |c: char| c.is_ascii_alphanumeric() || "_-. []".contains(c);
                let seen = head.unwrap_or(body.get(..floor(body, most + 1)).unwrap_or_default());
                let most = MAX_HEAD + if head.is_some() { 0 } else { ARGS.len() - 1 };
                if seen.len() > most || !seen.chars().all(plain) {
                    return Body::Text;
                }
                let Some(head) = head else { return Body::Unfinished };
                let (name, id) = match head.split_once(CALL_ID) {
                    Some((name, id)) => (name.trim(), Some(id.trim().to_owned())),
                    None => (head.trim(), None),
                };
                scan.at = scan.at.max(head.len() + ARGS.len());
                if scan.is_before_value() && scan.pass_blank(body).starts_with('[') {
                    return Body::Text;
                }
                scan.json(body, "", last, |arguments| {
                    self.call_of(name, id.clone(), Some(arguments))
                })
            }
        }
    }

    /// `<function=NAME>`, parameters, `</function>`; that may stand in a parameter's value too.
    fn function(&self, body: &str, scan: &mut Scan, last: bool) -> Body {
        while scan.found.is_none() {
            if scan.in_text {
                let value = body.get(scan.at..).unwrap_or_default();
                let Some(len) = value.find(PARAMETER_END) else {
                    // The start of a marker is looked at again.
                    let again = (body.len() + 1).saturating_sub(PARAMETER_END.len());
                    scan.at = scan.at.max(floor(body, again));
                    return Body::Unfinished;
                };
                scan.at += len + PARAMETER_END.len();
                scan.in_text = false;
                continue;
            }
            let rest = scan.pass_blank(body);
            let is_named = scan.depth > 0;
            if is_named && rest.starts_with(FUNCTION_END) {
                let inner = body.get(..scan.at).unwrap_or_default();
                let Some(call) = self.call_of_function(inner) else { return Body::Text };
                scan.at += FUNCTION_END.len();
                scan.found = Some((vec![call], scan.at));
                continue;
            }
            let open = if is_named { PARAMETER } else { FUNCTION };
            let Some(name) = rest.strip_prefix(open) else {
                let is_begun = open.starts_with(rest) || is_named && FUNCTION_END.starts_with(rest);
                return if is_begun { Body::Unfinished } else { Body::Text };
            };
            let most = floor(name, MAX_NAME + 1);
            let Some((name, _)) = name.get(..most).and_then(|name| name.split_once('>')) else {
                return if name.len() > MAX_NAME { Body::Text } else { Body::Unfinished };
            };
            // Where that is the end of the function, the name has none.
            if FUNCTION_END.strip_suffix('>').is_some_and(|end| name.ends_with(end)) {
                return Body::Text;
            }
            if !is_named && !self.tools.iter().any(|tool| tool.name == name.trim()) {
                return Body::Text;
            }
            scan.at += open.len() + name.len() + 1;
            scan.in_text = is_named;
            scan.depth = 1;
        }
        scan.closed(body, TOOL_CALL_END, last)
    }

    /// The call that stands before `</function>`, all of whose parameters are closed.
    fn call_of_function(&self, inner: &str) -> Option<Call> {
        let tag = |text: &'_ str, open: &str| -> Option<(String, usize)> {
            let (name, _) = text.trim_start().strip_prefix(open)?.split_once('>')?;
            let space = text.len() - text.trim_start().len();
            Some((name.trim().to_owned(), space + open.len() + name.len() + 1))
        };
        let (name, len) = tag(inner, FUNCTION)?;
        let tool = self.tools.iter().find(|tool| tool.name == name)?;
        let mut rest = inner.get(len..).unwrap_or_default();
        let mut arguments = Map::new();
        while !rest.trim_start().is_empty() {
            let (key, len) = tag(rest, PARAMETER)?;
            let (value, after) = rest.get(len..)?.split_once(PARAMETER_END)?;
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let is_text = tool.parameter(&key).get("type").is_some_and(|kind| kind == "string");
            let json = if is_text { None } else { serde_json::from_str(value).ok() };
            arguments.insert(key, json.unwrap_or_else(|| value.into()));
            rest = after;
        }
        self.call_of(&name, None, Some(&Value::Object(arguments)))
    }

    /// `{"name": .., "arguments": {..}}`; Llama says `parameters`.
    fn call(&self, value: &Value) -> Option<Call> {
        let name = value.get("name")?.as_str()?;
        let id = value.get("id").and_then(Value::as_str).map(str::to_owned);
        self.call_of(name, id, value.get("arguments").or_else(|| value.get("parameters")))
    }

    fn call_of(&self, name: &str, id: Option<String>, arguments: Option<&Value>) -> Option<Call> {
        self.tools.iter().find(|tool| tool.name == name)?;
        let arguments = match arguments {
            None | Some(Value::Null) => Value::Object(Map::new()),
            // Some models write the object as a text.
            Some(Value::String(text)) => serde_json::from_str(text).ok()?,
            Some(value) => value.clone(),
        };
        let arguments = arguments.is_object().then(|| arguments.to_string())?;
        Some(Call { id, name: name.to_owned(), arguments })
    }
}

/// Where a call may begin.
enum Opening {
    /// White space and a marker from `start` to `body`.
    At { start: usize, body: usize },
    /// None before a thought begins, or ends, in the first `len` bytes.
    Thought { len: usize },
    /// Not in the first `decided` bytes; so many behind them are white space in front of what may come.
    None { decided: usize, blank: usize },
}

impl Scan {
    /// Whether all that was seen is white space.
    fn is_before_value(&self) -> bool {
        self.depth == 0 && !self.in_function && self.found.is_none()
    }

    /// Passes over white space, and gives what follows.
    fn pass_blank<'a>(&mut self, body: &'a str) -> &'a str {
        let rest = body.get(self.at..).unwrap_or_default();
        let after = rest.trim_start();
        self.at += rest.len() - after.len();
        after
    }

    /// A body that is a call or a list of calls in JSON, and then perhaps a closing marker.
    fn json(
        &mut self,
        body: &str,
        close: &str,
        last: bool,
        call: impl Fn(&Value) -> Option<Call>,
    ) -> Body {
        if self.found.is_none() {
            if self.depth == 0 {
                match self.pass_blank(body).bytes().next() {
                    None => return Body::Unfinished,
                    Some(b'{' | b'[') => self.start = self.at,
                    Some(_) => return Body::Text,
                }
            }
            if !self.pass_value(body) {
                return Body::Unfinished;
            }
            let value = body.get(self.start..self.at).unwrap_or_default();
            let calls = match serde_json::from_str(value) {
                Ok(Value::Array(items)) => items.iter().map(call).collect(),
                Ok(one) => call(&one).map(|call| vec![call]),
                Err(_) => None,
            };
            let Some(calls) = calls.filter(|calls: &Vec<Call>| !calls.is_empty()) else {
                return Body::Text;
            };
            self.found = Some((calls, self.at));
        }
        self.closed(body, close, last)
    }

    /// The calls that were found, with a closing marker that follows.
    fn closed(&mut self, body: &str, close: &str, last: bool) -> Body {
        let rest = if close.is_empty() { "" } else { self.pass_blank(body) };
        let is_closed = rest.starts_with(close);
        if !is_closed && close.starts_with(rest) && !last {
            return Body::Unfinished;
        }
        let (calls, mut end) = self.found.take().unwrap_or_default();
        if is_closed && !close.is_empty() {
            end = self.at + close.len();
        }
        Body::Calls(calls, end)
    }

    /// Passes over the object or list that begins where `depth` is 0; whether its end is there.
    fn pass_value(&mut self, body: &str) -> bool {
        for byte in body.bytes().skip(self.at) {
            self.at += 1;
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_text => self.escaped = true,
                b'"' => self.in_text = !self.in_text,
                _ if self.in_text => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return true;
                    }
                }
                _ => {}
            }
        }
        false
    }
}

/// The last boundary of a character at or before `at`.
fn floor(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}
