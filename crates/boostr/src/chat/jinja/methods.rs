//! Attributes, items, and the methods that strings, dicts and lists have in Python.
//!
//! Lists may change, as in the plain sandbox of jinja2: templates of Kimi K2 append to lists, which the one of
//! transformers refuses. Dicts may not. Places in strings count characters.

use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use regex::Regex;

use super::lexer::is_space;
use super::run::Given;
use super::value::{List, Value, View};
use super::{Failure, MAX_TEXT, Meter, Result, bounded, format, operators};

const OF_TEXT: [&str; 44] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];
const OF_DICT: [&str; 5] = ["copy", "get", "items", "keys", "values"];
const OF_LIST: [&str; 3] = ["copy", "count", "index"];
/// Methods of a list that change it.
const CHANGES: [&str; 8] =
    ["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"];
const OF_TUPLE: [&str; 2] = ["count", "index"];
const OF_FLOAT: [&str; 1] = ["is_integer"];
/// Methods that change a dict: the sandbox of transformers has none of them.
const REFUSED_OF_DICT: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];

/// `value.name` of what does not change: a method, or an item of that name.
pub(super) fn attribute(value: &Value, name: &Arc<str>, meter: &Meter) -> Result {
    value.defined()?;
    if let Some(method) = method(value, name) {
        return Ok(Value::Method(Rc::new((value.clone(), method))));
    }
    match value {
        Value::Dict(dict) if !REFUSED_OF_DICT.contains(&&**name) => {
            meter.spend(1)?;
            if let Some(found) = dict.get_text(name) {
                return Ok(found.clone());
            }
        }
        // What `groupby` gives.
        Value::Tuple(items) if items.len() == 2 => match &**name {
            "grouper" => return Ok(items[0].clone()),
            "list" => return Ok(items[1].clone()),
            _ => {}
        },
        _ => {}
    }
    Ok(Value::Undefined(name.clone()))
}

fn method(value: &Value, name: &str) -> Option<&'static str> {
    let names: &[&'static str] = match value {
        Value::Text(_) | Value::Markup(_) => &OF_TEXT,
        Value::Dict(_) => &OF_DICT,
        Value::List(_) => {
            let all = OF_LIST.iter().chain(&CHANGES);
            return all.copied().find(|method| *method == name);
        }
        Value::Tuple(_) | Value::Range(_) => &OF_TUPLE,
        Value::Float(_) => &OF_FLOAT,
        _ => return None,
    };
    names.iter().find(|method| **method == name).copied()
}

/// `value[key]` of what does not change: an item, or a method of that name.
pub(super) fn item(value: &Value, key: &Value, meter: &Meter) -> Result {
    value.defined()?;
    let found = match value {
        Value::Dict(dict) => {
            meter.spend(1)?;
            // A list is no key, and Jinja takes that for one that is not there.
            match key.key(meter) {
                Ok(_) => dict.get(key, meter)?.cloned(),
                Err(_) => None,
            }
        }
        other => match key.as_int() {
            Some(index) => operators::item_at(other, index, meter)?,
            None => None,
        },
    };
    match (found, key) {
        (Some(found), _) => Ok(found),
        (None, Value::Text(name) | Value::Markup(name)) => Ok(match method(value, name) {
            Some(method) => Value::Method(Rc::new((value.clone(), method))),
            None => Value::Undefined(name.clone()),
        }),
        (None, Value::Int(index)) => Ok(Value::Undefined(index.to_string().into())),
        (None, other) => Ok(Value::undefined(other.kind())),
    }
}

/// Calls `value.name(..)`.
pub(super) fn call(value: &Value, name: &str, given: Given, meter: &Meter) -> Result {
    match value {
        Value::Text(text) | Value::Markup(text) => of_text(value, text, name, given, meter),
        Value::Dict(dict) => match name {
            "get" => {
                let [key, default] = given.bind(name, ["", ""], 1)?;
                meter.spend(1)?;
                let found = dict.get(&key.unwrap_or(Value::None), meter)?.cloned();
                Ok(found.or(default).unwrap_or(Value::None))
            }
            _ => {
                given.bind(name, [], 0)?;
                Ok(match name {
                    "keys" => Value::View(View::Keys, dict.clone()),
                    "values" => Value::View(View::Values, dict.clone()),
                    "items" => Value::View(View::Items, dict.clone()),
                    _ => value.clone(),
                })
            }
        },
        Value::Float(number) => {
            given.bind(name, [], 0)?;
            Ok(Value::Bool(number.fract() == 0.0))
        }
        list => {
            if let Value::List(list) = list
                && CHANGES.contains(&name)
            {
                return change(list, name, given, meter);
            }
            let items = list.items(meter)?;
            match name {
                "count" => {
                    let [wanted] = given.bind(name, [""], 1)?;
                    let wanted = wanted.unwrap_or(Value::None);
                    let mut count = 0_usize;
                    for item in &*items {
                        count += usize::from(operators::equal(item, &wanted, meter)?);
                    }
                    Ok(count.into())
                }
                "index" => {
                    let [wanted, start, end] = given.bind(name, ["", "", ""], 1)?;
                    let wanted = wanted.unwrap_or(Value::None);
                    let (start, end) = window(items.len(), start.as_ref(), end.as_ref())?;
                    for at in start..end {
                        if operators::equal(&items[at], &wanted, meter)? {
                            return Ok(at.into());
                        }
                    }
                    Err(Failure::new("index: not in the list"))
                }
                "copy" => {
                    given.bind(name, [], 0)?;
                    meter.spend(items.len())?;
                    Ok(items.to_vec().into())
                }
                _ => Err(Failure::new(format!("a value of type {} has no {name}", list.kind()))),
            }
        }
    }
}

/// Calls a method of a list that changes it.
fn change(list: &Rc<List>, name: &str, given: Given, meter: &Meter) -> Result {
    let checked = |item: Option<Value>| -> Result {
        let item = item.unwrap_or(Value::None);
        if item.holds(list, meter)? {
            return Err(Failure::new(format!("{name}: a list cannot hold itself")));
        }
        Ok(item)
    };
    let number = |value: &Value| {
        let found = value.kind();
        let wrong = || Failure::new(format!("{name}: expected a whole number, found {found}"));
        value.as_int().ok_or_else(wrong)
    };
    // All items behind a place move.
    let moved = || meter.spend(list.len() / 64 + 1);
    match name {
        "append" => {
            let [item] = given.bind(name, [""], 1)?;
            let item = checked(item)?;
            list.change(meter, |items| items.push(item))?;
        }
        "extend" => {
            let [more] = given.bind(name, [""], 1)?;
            let more = more.unwrap_or(Value::None).items(meter)?;
            meter.spend(more.len())?;
            more.iter().try_for_each(|item| checked(Some(item.clone())).map(drop))?;
            list.change(meter, |items| items.extend(more.iter().cloned()))?;
        }
        "insert" => {
            let [at, item] = given.bind(name, ["", ""], 2)?;
            let at = number(&at.unwrap_or(Value::None))?;
            let item = checked(item)?;
            moved()?;
            let len = list.len() as i128;
            let at = if at < 0 { (at + len).max(0) } else { at.min(len) };
            list.change(meter, |items| items.insert(at as usize, item))?;
        }
        "pop" => {
            let [at] = given.bind(name, [""], 0)?;
            let at = number(&at.unwrap_or(Value::Int(-1)))?;
            moved()?;
            let len = list.len();
            let at = if at < 0 { at + len as i128 } else { at };
            let at = usize::try_from(at).ok().filter(|&at| at < len);
            let at = at.ok_or_else(|| Failure::new(format!("pop: no such place among {len}")))?;
            return list.change(meter, |items| items.remove(at));
        }
        "remove" => {
            let [wanted] = given.bind(name, [""], 1)?;
            let wanted = wanted.unwrap_or(Value::None);
            moved()?;
            let mut at = None;
            for (place, item) in list.items().iter().enumerate() {
                if operators::equal(item, &wanted, meter)? {
                    at = Some(place);
                    break;
                }
            }
            let at = at.ok_or_else(|| Failure::new("remove: not in the list"))?;
            list.change(meter, |items| items.remove(at))?;
        }
        "clear" => {
            given.bind(name, [], 0)?;
            list.change(meter, Vec::clear)?;
        }
        "reverse" => {
            given.bind(name, [], 0)?;
            moved()?;
            list.change(meter, |items| items.reverse())?;
        }
        _ => {
            if !given.positional.is_empty() {
                return Err(Failure::new("sort: expected arguments by name alone"));
            }
            let [key, reverse] = given.bind(name, ["key", "reverse"], 0)?;
            if key.is_some_and(|key| !matches!(key, Value::None)) {
                return Err(Failure::new("sort: a key is not supported: use the filter `sort`"));
            }
            let mut items = list.items().to_vec();
            meter.spend(items.len())?;
            let is_reversed = reverse.is_some_and(|reverse| reverse.is_true());
            // What is equal stays in its order, also in reverse.
            if is_reversed {
                items.reverse();
            }
            operators::sort(&mut items, |a, b| operators::less(a, b, meter))?;
            if is_reversed {
                items.reverse();
            }
            list.change(meter, |old| *old = items)?;
        }
    }
    Ok(Value::None)
}

/// Where a start and an end are, of so many items.
fn window(len: usize, start: Option<&Value>, end: Option<&Value>) -> Result<(usize, usize)> {
    let place = |bound: Option<&Value>, default: usize| match bound {
        None | Some(Value::None) => Ok(default),
        Some(value) => {
            let at = value.as_int().ok_or_else(|| {
                Failure::new(format!("expected a whole number, found {}", value.kind()))
            })?;
            let at = if at < 0 { (at + len as i128).max(0) } else { at };
            Ok(usize::try_from(at).unwrap_or(usize::MAX))
        }
    };
    Ok((place(start, 0)?, place(end, len)?.min(len)))
}

fn text_of(value: Option<&Value>, name: &str) -> Result<Arc<str>> {
    let found = value.and_then(Value::as_text).cloned();
    found.ok_or_else(|| {
        let kind = value.map_or("nothing", Value::kind);
        Failure::new(format!("{name}: expected a string, found {kind}"))
    })
}

fn int_of(value: Option<&Value>, name: &str) -> Result<i128> {
    let found = value.and_then(Value::as_int);
    found.ok_or_else(|| {
        let kind = value.map_or("nothing", Value::kind);
        Failure::new(format!("{name}: expected a whole number, found {kind}"))
    })
}

/// A number of times; `None` for one below 0, or none.
fn most_of(value: Option<&Value>, name: &str) -> Result<usize> {
    match value {
        None => Ok(usize::MAX),
        given => Ok(usize::try_from(int_of(given, name)?).unwrap_or(usize::MAX)),
    }
}

macro_rules! class {
    ($name:ident, $pattern:literal) => {
        static $name: LazyLock<Regex> =
            LazyLock::new(|| Regex::new($pattern).expect("the pattern is valid"));
    };
}

class!(DECIMAL, r"^\p{Nd}+$");
// Those of the property Numeric_Type=Digit that are no decimal digits come behind.
class!(DIGIT, r"^[\p{Nd}²³¹⁰⁴-⁹₀-₉①-⑨⑴-⑼⒈-⒐⓪⓵-⓽⓿❶-❾➀-➈➊-➒፩-፱᧚]+$");
class!(NUMERIC, r"^\p{N}+$");
class!(ALPHA, r"^\p{L}+$");
class!(ALNUM, r"^[\p{L}\p{N}]+$");
class!(IDENTIFIER, r"^[\p{XID_Start}_]\p{XID_Continue}*$");

fn of_text(value: &Value, text: &Arc<str>, name: &str, given: Given, meter: &Meter) -> Result {
    meter.bytes(text.len())?;
    let like = |text: String| Ok(value.like(text));
    let is = |pattern: &Regex| Ok(Value::Bool(pattern.is_match(text)));
    Ok(match name {
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = given.bind(name, [""], 0)?;
            let chars = match chars {
                None | Some(Value::None) => None,
                given => Some(text_of(given.as_ref(), name)?),
            };
            return like(stripped(text, chars.as_deref(), name, meter)?.to_owned());
        }
        "split" | "rsplit" => {
            let [separator, most] = given.bind(name, ["sep", "maxsplit"], 0)?;
            let separator = match separator {
                None | Some(Value::None) => None,
                given => Some(text_of(given.as_ref(), name)?),
            };
            let most = most_of(most.as_ref(), name)?;
            let pieces = split(text, separator.as_deref(), most, name == "rsplit")?;
            meter.spend(pieces.len())?;
            pieces.into_iter().map(|piece| value.like(piece.to_owned())).collect::<Vec<_>>().into()
        }
        "splitlines" => {
            let [keep] = given.bind(name, ["keepends"], 0)?;
            let lines = lines(text, keep.is_some_and(|keep| keep.is_true()));
            meter.spend(lines.len())?;
            lines.into_iter().map(|line| value.like(line.to_owned())).collect::<Vec<_>>().into()
        }
        "partition" | "rpartition" => {
            let [separator] = given.bind(name, [""], 1)?;
            let separator = text_of(separator.as_ref(), name)?;
            not_empty(&separator)?;
            let found = if name == "partition" {
                text.split_once(&*separator).ok_or([text, "", ""])
            } else {
                text.rsplit_once(&*separator).ok_or(["", "", text])
            };
            let pieces = found.map_or_else(|whole| whole, |(a, b)| [a, &separator, b]);
            Value::tuple(pieces.into_iter().map(|piece| value.like(piece.to_owned())).collect())
        }
        "startswith" | "endswith" => {
            let [ends, start, end] = given.bind(name, ["", "", ""], 1)?;
            let ends: Vec<Arc<str>> = match &ends {
                Some(Value::Tuple(all)) => {
                    meter.spend(all.len())?;
                    all.iter().map(|one| text_of(Some(one), name)).collect::<Result<_>>()?
                }
                one => vec![text_of(one.as_ref(), name)?],
            };
            let Some(part) = part_of(text, start.as_ref(), end.as_ref())? else {
                return Ok(Value::Bool(false));
            };
            let has = |end: &Arc<str>| match name {
                "startswith" => part.1.starts_with(&**end),
                _ => part.1.ends_with(&**end),
            };
            ends.iter().any(has).into()
        }
        "removeprefix" | "removesuffix" => {
            let [end] = given.bind(name, [""], 1)?;
            let end = text_of(end.as_ref(), name)?;
            let rest = match name {
                "removeprefix" => text.strip_prefix(&*end),
                _ => text.strip_suffix(&*end),
            };
            return like(rest.unwrap_or(text).to_owned());
        }
        "replace" => {
            let [old, new, most] = given.bind(name, ["", "", "count"], 2)?;
            let (old, new) = (text_of(old.as_ref(), name)?, text_of(new.as_ref(), name)?);
            return like(replace(text, &old, &new, most_of(most.as_ref(), name)?, meter)?);
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let [part, start, end] = given.bind(name, ["", "", ""], 1)?;
            let part = text_of(part.as_ref(), name)?;
            let window = part_of(text, start.as_ref(), end.as_ref())?;
            if name == "count" {
                // An empty one is before and after every character.
                return Ok(window.map_or(0, |(_, text)| text.matches(&*part).count()).into());
            }
            let found = window.and_then(|(skipped, text)| {
                let at = if name.starts_with('r') { text.rfind(&*part) } else { text.find(&*part) };
                Some(skipped + text[..at?].chars().count())
            });
            match found {
                Some(at) => at.into(),
                None if name.ends_with("find") => Value::Int(-1),
                None => return Err(Failure::new(format!("{name}: substring not found"))),
            }
        }
        "join" => {
            let [parts] = given.bind(name, [""], 1)?;
            let mut joined = String::new();
            for (i, part) in parts.unwrap_or(Value::None).items(meter)?.iter().enumerate() {
                meter.spend(1)?;
                joined.push_str(if i > 0 { text } else { "" });
                joined.push_str(&text_of(Some(part), name)?);
                bounded(joined.len())?;
            }
            meter.bytes(joined.len())?;
            return like(joined);
        }
        "format" => return like(format::braces(text, &given, meter)?),
        "format_map" => {
            let [fields] = given.bind(name, [""], 1)?;
            let mut by_name = Given::default();
            if let Some(Value::Dict(dict)) = &fields {
                meter.spend(dict.entries.len())?;
                let texts = dict.entries.iter();
                by_name.named = texts
                    .filter_map(|(key, value)| Some((key.as_text()?.clone(), value.clone())))
                    .collect();
            }
            return like(format::braces(text, &by_name, meter)?);
        }
        "center" | "ljust" | "rjust" => {
            let [width, fill] = given.bind(name, ["", ""], 1)?;
            let width = int_of(width.as_ref(), name)?;
            let fill = fill.map_or_else(|| Ok(" ".into()), |fill| text_of(Some(&fill), name))?;
            let mut one = fill.chars();
            let (Some(fill), None) = (one.next(), one.next()) else {
                return Err(Failure::new(format!("{name}: expected one character to fill with")));
            };
            return like(padded(text, width, fill, name, meter)?);
        }
        "zfill" => {
            let [width] = given.bind(name, [""], 1)?;
            let width = int_of(width.as_ref(), name)?;
            let sign = usize::from(text.starts_with(['+', '-']));
            let missing = width.saturating_sub(text.chars().count() as i128);
            let missing =
                usize::try_from(missing).unwrap_or(if missing < 0 { 0 } else { usize::MAX });
            bounded(missing.saturating_add(text.len()))?;
            meter.bytes(missing)?;
            return like(format!("{}{}{}", &text[..sign], "0".repeat(missing), &text[sign..]));
        }
        "expandtabs" => {
            let [size] = given.bind(name, ["tabsize"], 0)?;
            let size = size.map_or(Ok(8), |size| int_of(Some(&size), name))?;
            return like(without_tabs(text, size, meter)?);
        }
        _ => {
            given.bind(name, [], 0)?;
            match name {
                "upper" => return like(text.to_uppercase()),
                "lower" => return like(text.to_lowercase()),
                "casefold" => return like(text.to_lowercase().replace('ß', "ss")),
                "swapcase" => {
                    let mut out = String::with_capacity(text.len());
                    for c in text.chars() {
                        if c.is_uppercase() {
                            out.extend(c.to_lowercase());
                        } else {
                            out.extend(c.to_uppercase());
                        }
                    }
                    return like(out);
                }
                "title" => return like(title(text)),
                "capitalize" => return like(capitalized(text)),
                "isspace" => (!text.is_empty() && text.chars().all(is_space)).into(),
                "isdecimal" => return is(&DECIMAL),
                "isdigit" => return is(&DIGIT),
                "isnumeric" => return is(&NUMERIC),
                "isalpha" => return is(&ALPHA),
                "isalnum" => return is(&ALNUM),
                "isidentifier" => return is(&IDENTIFIER),
                "isascii" => text.is_ascii().into(),
                "isprintable" => text.chars().all(super::text::is_printable).into(),
                "islower" => is_lower(text).into(),
                "isupper" => is_upper(text).into(),
                "istitle" => is_title(text).into(),
                _ => return Err(Failure::new(format!("strings have no method `{name}`"))),
            }
        }
    })
}

pub(super) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}

pub(super) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

/// Upper case begins words, and nothing else does.
fn is_title(text: &str) -> bool {
    let (mut in_word, mut any) = (false, false);
    for c in text.chars() {
        if c.is_uppercase() && in_word || c.is_lowercase() && !in_word {
            return false;
        }
        in_word = c.is_uppercase() || c.is_lowercase();
        any |= in_word;
    }
    any
}

/// `strip`, `lstrip` or `rstrip`.
pub(super) fn stripped<'a>(
    text: &'a str,
    chars: Option<&str>,
    name: &str,
    meter: &Meter,
) -> Result<&'a str> {
    if let Some(chars) = chars {
        // Each character is looked for in all of them.
        meter.bytes(text.len().saturating_mul(chars.len() / 8))?;
    }
    let is_cut = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let start = if name == "rstrip" { text } else { text.trim_start_matches(is_cut) };
    Ok(if name == "lstrip" { start } else { start.trim_end_matches(is_cut) })
}

/// The characters from `start` to `end`, and how many come before; `None` when the start is beyond the text.
fn part_of<'a>(
    text: &'a str,
    start: Option<&Value>,
    end: Option<&Value>,
) -> Result<Option<(usize, &'a str)>> {
    if start.is_none() && end.is_none() {
        return Ok(Some((0, text)));
    }
    let len = text.chars().count();
    let (start, end) = window(len, start, end)?;
    if start > end {
        return Ok(None);
    }
    let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
    Ok(Some((start, &text[byte(start)..byte(end)])))
}

/// `text` in the middle, or at a side, of so many characters.
pub(super) fn padded(
    text: &str,
    width: i128,
    fill: char,
    name: &str,
    meter: &Meter,
) -> Result<String> {
    let missing = width.saturating_sub(text.chars().count() as i128);
    if missing <= 0 {
        return Ok(text.to_owned());
    }
    let missing = usize::try_from(missing).unwrap_or(usize::MAX);
    let width = width as usize;
    let len = missing.saturating_mul(fill.len_utf8()).saturating_add(text.len());
    bounded(len)?;
    meter.bytes(len)?;
    let left = match name {
        "ljust" => 0,
        "rjust" => missing,
        // As Python has it: the odd one goes to the left of an odd width.
        _ => missing / 2 + (missing & width & 1),
    };
    let pad = |count| std::iter::repeat_n(fill, count);
    let mut out = String::with_capacity(len);
    out.extend(pad(left));
    out.push_str(text);
    out.extend(pad(missing - left));
    Ok(out)
}

fn without_tabs(text: &str, size: i128, meter: &Meter) -> Result<String> {
    let size = usize::try_from(size.max(0)).unwrap_or(MAX_TEXT + 1);
    let (mut out, mut column) = (String::new(), 0);
    for c in text.chars() {
        match c {
            '\t' if size > 0 => {
                let count = size - column % size;
                bounded(out.len().saturating_add(count))?;
                meter.bytes(count)?;
                out.extend(std::iter::repeat_n(' ', count));
                column += count;
            }
            '\t' => {}
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    Ok(out)
}

fn not_empty(separator: &str) -> Result<()> {
    if separator.is_empty() { Err(Failure::new("empty separator")) } else { Ok(()) }
}

/// The pieces between separators, at most `most` cuts from the left, or from the right; without a separator those
/// between white space, of which none is left at the ends.
fn split<'a>(
    text: &'a str,
    separator: Option<&str>,
    most: usize,
    from_right: bool,
) -> Result<Vec<&'a str>> {
    let cuts = most.saturating_add(1);
    Ok(match (separator, from_right) {
        (Some(separator), false) => {
            not_empty(separator)?;
            text.splitn(cuts, separator).collect()
        }
        (Some(separator), true) => {
            not_empty(separator)?;
            let mut pieces: Vec<&str> = text.rsplitn(cuts, separator).collect();
            pieces.reverse();
            pieces
        }
        (None, _) => {
            let mut pieces = Vec::new();
            let mut rest = if from_right {
                text.trim_end_matches(is_space)
            } else {
                text.trim_start_matches(is_space)
            };
            while !rest.is_empty() {
                if pieces.len() == most {
                    let last = if from_right {
                        rest.trim_end_matches(is_space)
                    } else {
                        rest.trim_start_matches(is_space)
                    };
                    pieces.push(last);
                    break;
                }
                let cut = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
                let Some(at) = cut else {
                    pieces.push(rest);
                    break;
                };
                if from_right {
                    let space = rest[at..].chars().next().map_or(0, char::len_utf8);
                    pieces.push(&rest[at + space..]);
                    rest = rest[..at].trim_end_matches(is_space);
                } else {
                    pieces.push(&rest[..at]);
                    rest = rest[at..].trim_start_matches(is_space);
                }
            }
            if from_right {
                pieces.reverse();
            }
            pieces
        }
    })
}

pub(super) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let is_end = |c: char| matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let at = rest.find(is_end).unwrap_or(rest.len());
        let end = match rest[at..].chars().next() {
            Some('\r') if rest[at + 1..].starts_with('\n') => at + 2,
            Some(c) => at + c.len_utf8(),
            None => at,
        };
        lines.push(&rest[..if keep_ends { end } else { at }]);
        rest = &rest[end..];
    }
    lines
}

/// `text` with `new` for `old`, the first `most` times.
pub(super) fn replace(
    text: &str,
    old: &str,
    new: &str,
    most: usize,
    meter: &Meter,
) -> Result<String> {
    meter.bytes(text.len())?;
    // Counted first: the result may be longer than there is memory.
    let count = text.matches(old).count().min(most);
    let len = text.len().saturating_add(count.saturating_mul(new.len()));
    bounded(len)?;
    meter.bytes(len)?;
    Ok(text.replacen(old, new, most))
}

/// Letters after a letter in lower case, others in upper case.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        if in_word {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        in_word = c.is_alphabetic();
    }
    out
}

pub(super) fn capitalized(text: &str) -> String {
    let mut rest = text.chars();
    let first = rest.next().into_iter().flat_map(char::to_uppercase);
    first.chain(rest.as_str().to_lowercase().chars()).collect()
}
