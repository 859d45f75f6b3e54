//! Calls that stand in a section of their own, as Kimi's models write them.
//!
//! ```text
//! K2   <|tool_calls_section_begin|> call .. <|tool_calls_section_end|>
//!      <|tool_call_begin|>functions.NAME:N<|tool_call_argument_begin|>{..}<|tool_call_end|>
//! K3   <|open|>tools<|sep|> call .. <|close|>tools<|sep|>
//!      <|open|>call tool="NAME" index="N"<|sep|> argument .. <|close|>call<|sep|>
//!      <|open|>argument key="KEY" type="TYPE"<|sep|>..<|close|>argument<|sep|>
//! ```

use serde_json::{Map, Value};

use super::{Body, Call, Calls, MAX_HEAD, Scan, ToolFormat, floor};

pub(super) const SECTION: &str = "<|tool_calls_section_begin|>";
const SECTION_END: &str = "<|tool_calls_section_end|>";
const CALL: &str = "<|tool_call_begin|>";
const ARGUMENTS: &str = "<|tool_call_argument_begin|>";
const CALL_END: &str = "<|tool_call_end|>";
/// Before a function's name in the id of a call.
const NAMESPACE: &str = "functions.";

pub(super) const TOOLS: &str = "<|open|>tools<|sep|>";
const TOOLS_END: &str = "<|close|>tools<|sep|>";
const TAG: &str = "<|open|>call";
const TAG_END: &str = "<|close|>call<|sep|>";
const ARGUMENT: &str = "<|open|>argument";
const ARGUMENT_END: &str = "<|close|>argument<|sep|>";
const JSON: &str = "<|open|>json";
const JSON_END: &str = "<|close|>json<|sep|>";
const SEPARATOR: &str = "<|sep|>";

/// What the next part of a section is.
enum Next {
    Unfinished,
    /// Nothing of a call.
    Other,
    Call(Call),
}

impl Calls {
    /// The calls of a section whose marker was there. Where one is none, those before it are calls.
    pub(super) fn section(&self, body: &str, scan: &mut Scan, last: bool) -> Body {
        let is_tagged = self.format == ToolFormat::KimiTags;
        let (begin, separator, close, end) = if is_tagged {
            (TAG, SEPARATOR, "", TOOLS_END)
        } else {
            (CALL, ARGUMENTS, CALL_END, SECTION_END)
        };
        loop {
            if let Some((name, id)) = scan.head.take() {
                let next = if is_tagged {
                    self.tagged(&name, body, scan)
                } else {
                    self.with_arguments(&name, &id, body, scan)
                };
                match next {
                    Next::Call(call) => scan.take(call),
                    Next::Other => return scan.section(),
                    Next::Unfinished => {
                        scan.head = Some((name, id));
                        return scan.cut(last);
                    }
                }
                continue;
            }
            let rest = scan.pass_blank(body);
            let is_after_call = scan.found.is_some() && !close.is_empty();
            if rest.starts_with(end) {
                scan.at += end.len();
                scan.pass();
                return scan.section();
            } else if is_after_call && rest.starts_with(close) {
                scan.at += close.len();
                scan.pass();
            } else if let Some(head) = rest.strip_prefix(begin) {
                let seen = head.get(..floor(head, MAX_HEAD + separator.len())).unwrap_or_default();
                let Some((seen, _)) = seen.split_once(separator) else {
                    let is_long = head.len() >= MAX_HEAD + separator.len();
                    return if is_long { scan.section() } else { scan.cut(last) };
                };
                let (name, id) = if is_tagged { tool_of_tag(seen) } else { tool_of_id(seen) };
                if !self.tools.iter().any(|tool| tool.name == name) {
                    return scan.section();
                }
                scan.at += begin.len() + seen.len() + separator.len();
                scan.start = scan.at;
                scan.head = Some((name, id));
            } else if [begin, end].iter().any(|marker| marker.starts_with(rest))
                || is_after_call && close.starts_with(rest)
            {
                return scan.cut(last);
            } else {
                return scan.section();
            }
        }
    }

    /// A call whose arguments are an object of JSON.
    fn with_arguments(&self, name: &str, id: &str, body: &str, scan: &mut Scan) -> Next {
        if scan.depth == 0 {
            match scan.pass_blank(body).bytes().next() {
                None => return Next::Unfinished,
                Some(b'{') => scan.start = scan.at,
                Some(_) => return Next::Other,
            }
        }
        if !scan.pass_value(body) {
            return Next::Unfinished;
        }
        let value = body.get(scan.start..scan.at).unwrap_or_default();
        let call = serde_json::from_str(value)
            .ok()
            .and_then(|value: Value| self.call_of(name, Some(id.to_owned()), Some(&value)));
        call.map_or(Next::Other, Next::Call)
    }

    /// A call whose arguments stand each between tags, up to the tag that closes it.
    fn tagged(&self, name: &str, body: &str, scan: &mut Scan) -> Next {
        let Some(len) = body.get(scan.at..).unwrap_or_default().find(TAG_END) else {
            // The start of a tag is looked at again.
            scan.at = scan.at.max(floor(body, (body.len() + 1).saturating_sub(TAG_END.len())));
            return Next::Unfinished;
        };
        let inner = body.get(scan.start..scan.at + len).unwrap_or_default();
        scan.at += len + TAG_END.len();
        let arguments = arguments(inner);
        let call = arguments.and_then(|arguments| self.call_of(name, None, Some(&arguments)));
        call.map_or(Next::Other, Next::Call)
    }
}

impl Scan {
    /// Takes a call that ends here.
    fn take(&mut self, call: Call) {
        self.found.get_or_insert_default().0.push(call);
        self.pass();
    }

    /// What was passed belongs to the calls that were found.
    fn pass(&mut self) {
        if let Some((_, end)) = &mut self.found {
            *end = self.at;
        }
    }

    /// The calls that were found, now that nothing more belongs to them.
    fn section(&mut self) -> Body {
        self.found.take().map_or(Body::Text, |(calls, end)| Body::Calls(calls, end))
    }

    /// The same where the answer may go on.
    fn cut(&mut self, last: bool) -> Body {
        if last && self.found.is_some() { self.section() } else { Body::Unfinished }
    }
}

/// Name and id of `functions.NAME:N`.
fn tool_of_id(head: &str) -> (String, String) {
    let id = head.trim();
    let name = id.strip_prefix(NAMESPACE).unwrap_or(id);
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let name = name.rsplit_once(':').filter(|(_, n)| is_number(n)).map_or(name, |(name, _)| name);
    (name.to_owned(), id.to_owned())
}

/// Name of ` tool="NAME" index="N"`, which has no id.
fn tool_of_tag(head: &str) -> (String, String) {
    (attribute(head, "tool").unwrap_or_default(), String::new())
}

/// The value of an attribute in a tag.
fn attribute(tag: &str, name: &str) -> Option<String> {
    let mut rest = tag.trim_start();
    while !rest.is_empty() {
        let (key, after) = rest.split_once("=\"")?;
        let (value, after) = after.split_once('"')?;
        if key.trim() == name {
            return Some(value.replace("&quot;", "\"").replace("&amp;", "&"));
        }
        rest = after.trim_start();
    }
    None
}

/// The arguments of a call, each between tags, or one object between tags.
fn arguments(inner: &str) -> Option<Value> {
    let mut all = Map::new();
    let mut rest = inner.trim_start();
    while !rest.is_empty() {
        if let Some(tag) = rest.strip_prefix(JSON) {
            let (_, value) = tag.split_once(SEPARATOR)?;
            let (value, after) = value.split_once(JSON_END)?;
            all.extend(serde_json::from_str::<Map<String, Value>>(value).ok()?);
            rest = after.trim_start();
            continue;
        }
        let (tag, value) = rest.strip_prefix(ARGUMENT)?.split_once(SEPARATOR)?;
        let (value, after) = value.split_once(ARGUMENT_END)?;
        let is_text = attribute(tag, "type").is_none_or(|kind| kind == "string");
        let json = if is_text { None } else { serde_json::from_str(value).ok() };
        all.insert(attribute(tag, "key")?, json.unwrap_or_else(|| value.into()));
        rest = after.trim_start();
    }
    Some(all.into())
}
