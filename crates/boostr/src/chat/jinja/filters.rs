//! Filters, as Jinja has them.

use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use regex::Regex;

use super::conversions::{
    file_size, number_of, python_float, quoted, rounded, title, truncated, whole,
};
use super::run::{Given, Run};
use super::text::Json;
use super::value::Value;
use super::{Failure, Meter, Result, bounded, escape, format, methods, operators};

/// Widest indent of JSON.
const MAX_JSON_INDENT: i128 = 64;

/// Those of Jinja but for what is for web pages: `pprint`, `random`, `striptags`, `urlize`, `wordwrap`, `xmlattr`.
const FILTERS: [&str; 48] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
];

pub(super) fn has_filter(name: &str) -> bool {
    FILTERS.contains(&name)
}

static WORD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\w+").expect("the pattern is valid"));

fn text_or(value: Option<Value>, default: &str, meter: &Meter) -> Result<Arc<str>> {
    value.map_or_else(|| Ok(default.into()), |value| value.text(meter))
}

fn is_set(value: Option<&Value>) -> bool {
    value.is_some_and(Value::is_true)
}

fn int_or(value: Option<&Value>, default: i128, name: &str) -> Result<i128> {
    match value {
        None => Ok(default),
        Some(value) => value.as_int().ok_or_else(|| {
            Failure::new(format!("{name}: expected a whole number, found {}", value.kind()))
        }),
    }
}

impl Run<'_> {
    /// `value | name(..)`.
    pub(super) fn filter(&mut self, name: &str, value: &Value, given: Given) -> Result {
        let meter = self.meter;
        if let Some(text) = value.as_text() {
            meter.bytes(text.len())?;
        }
        let soft = || value.text(meter);
        let like = |text: String| Ok(value.like(text));
        Ok(match name {
            "default" | "d" => {
                let [default, is_boolean] = given.bind(name, ["default_value", "boolean"], 0)?;
                let is_missing =
                    value.is_undefined() || is_set(is_boolean.as_ref()) && !value.is_true();
                if is_missing { default.unwrap_or_else(|| "".into()) } else { value.clone() }
            }
            "upper" | "lower" | "capitalize" => {
                given.bind(name, [], 0)?;
                let text = soft()?;
                return like(match name {
                    "upper" => text.to_uppercase(),
                    "lower" => text.to_lowercase(),
                    _ => methods::capitalized(&text),
                });
            }
            "title" => {
                given.bind(name, [], 0)?;
                return like(title(&soft()?));
            }
            "trim" => {
                let [chars] = given.bind(name, ["chars"], 0)?;
                let chars = match chars {
                    None | Some(Value::None) => None,
                    Some(chars) => Some(chars.text(meter)?),
                };
                return like(
                    methods::stripped(&soft()?, chars.as_deref(), name, meter)?.to_owned(),
                );
            }
            "replace" => {
                let [old, new, count] = given.bind(name, ["old", "new", "count"], 2)?;
                let (old, new) = (text_or(old, "", meter)?, text_or(new, "", meter)?);
                let most = match count {
                    None | Some(Value::None) => usize::MAX,
                    count => {
                        usize::try_from(int_or(count.as_ref(), -1, name)?).unwrap_or(usize::MAX)
                    }
                };
                methods::replace(&soft()?, &old, &new, most, meter)?.into()
            }
            "string" => {
                given.bind(name, [], 0)?;
                match value {
                    Value::Markup(_) => value.clone(),
                    _ => soft()?.to_string().into(),
                }
            }
            "safe" => {
                given.bind(name, [], 0)?;
                Value::Markup(soft()?)
            }
            "escape" | "e" | "forceescape" => {
                given.bind(name, [], 0)?;
                match value {
                    Value::Markup(_) if name != "forceescape" => value.clone(),
                    _ => {
                        let escaped = escape(&soft()?);
                        bounded(escaped.len())?;
                        Value::Markup(escaped.into())
                    }
                }
            }
            "center" => {
                let [width] = given.bind(name, ["width"], 0)?;
                let width = int_or(width.as_ref(), 80, name)?;
                return like(methods::padded(&soft()?, width, ' ', name, meter)?);
            }
            "indent" => return self.indent(value, given),
            "truncate" => {
                let names = ["length", "killwords", "end", "leeway"];
                let [length, kill, end, leeway] = given.bind(name, names, 0)?;
                let length = int_or(length.as_ref(), 255, name)?;
                let leeway = match leeway {
                    None | Some(Value::None) => 5,
                    leeway => int_or(leeway.as_ref(), 5, name)?,
                };
                let end = text_or(end, "...", meter)?;
                let text = soft()?;
                return like(truncated(&text, length, is_set(kill.as_ref()), &end, leeway)?);
            }
            "wordcount" => {
                given.bind(name, [], 0)?;
                WORD.find_iter(&soft()?).count().into()
            }
            "urlencode" => {
                given.bind(name, [], 0)?;
                self.url_encoded(value)?.into()
            }
            "format" => {
                let text = soft()?;
                if !given.positional.is_empty() && !given.named.is_empty() {
                    return Err(Failure::new("format: values by place or by name, not both"));
                }
                let values = if given.named.is_empty() {
                    Value::tuple(given.positional)
                } else {
                    super::run::dict_of(given.named, meter)?
                };
                return like(format::percent(
                    &text,
                    &values,
                    matches!(value, Value::Markup(_)),
                    meter,
                )?);
            }
            "filesizeformat" => {
                let [binary] = given.bind(name, ["binary"], 0)?;
                file_size(number_of(value)?.as_float().unwrap_or(0.0), is_set(binary.as_ref()))
                    .into()
            }
            "length" | "count" => {
                given.bind(name, [], 0)?;
                let len = value.len(meter)?;
                len.ok_or_else(|| {
                    Failure::new(format!("a value of type {} has no length", value.kind()))
                })?
                .into()
            }
            "int" => {
                let [default, base] = given.bind(name, ["default", "base"], 0)?;
                let base = int_or(base.as_ref(), 10, name)?;
                value.defined()?;
                whole(value, base).map_or_else(|| default.unwrap_or(Value::Int(0)), Value::Int)
            }
            "float" => {
                let [default] = given.bind(name, ["default"], 0)?;
                value.defined()?;
                let float = match value.as_text() {
                    Some(text) => python_float(text),
                    None => value.as_float(),
                };
                float.map_or_else(|| default.unwrap_or(Value::Float(0.0)), Value::Float)
            }
            "abs" => {
                given.bind(name, [], 0)?;
                match value {
                    Value::Float(number) => Value::Float(number.abs()),
                    other => {
                        let number = number_of(other)?.as_int().unwrap_or(0);
                        Value::Int(number.checked_abs().unwrap_or(i128::MAX))
                    }
                }
            }
            "round" => {
                let [precision, method] = given.bind(name, ["precision", "method"], 0)?;
                let precision = int_or(precision.as_ref(), 0, name)?;
                rounded(number_of(value)?, precision, &text_or(method, "common", meter)?)?
            }
            "list" => {
                given.bind(name, [], 0)?;
                value.items(meter)?.to_vec().into()
            }
            "items" => {
                given.bind(name, [], 0)?;
                match value {
                    Value::Undefined(_) => Value::once(Vec::new()),
                    Value::Dict(_) => {
                        let items = methods::call(value, "items", Given::default(), meter)?;
                        Value::once(items.items(meter)?.to_vec())
                    }
                    other => {
                        let reason = format!("items: expected a dict, found {}", other.kind());
                        return Err(Failure::new(reason));
                    }
                }
            }
            "first" => {
                given.bind(name, [], 0)?;
                let first = match value {
                    Value::Iterator(once) => once.next(),
                    Value::Text(text) | Value::Markup(text) => {
                        text.chars().next().map(|c| value.like(c.to_string()))
                    }
                    other => other.items(meter)?.first().cloned(),
                };
                first.unwrap_or_else(|| Value::undefined("first"))
            }
            "last" => {
                given.bind(name, [], 0)?;
                if matches!(value, Value::Iterator(_)) {
                    return Err(Failure::new("last: a generator cannot be reversed"));
                }
                let last = match value {
                    Value::Text(text) | Value::Markup(text) => {
                        text.chars().next_back().map(|c| value.like(c.to_string()))
                    }
                    other => other.items(meter)?.last().cloned(),
                };
                last.unwrap_or_else(|| Value::undefined("last"))
            }
            "reverse" => {
                given.bind(name, [], 0)?;
                if value.as_text().is_some() {
                    return like(soft()?.chars().rev().collect());
                }
                let items = value.items(meter)?;
                meter.spend(items.len())?;
                Value::once(items.iter().rev().cloned().collect())
            }
            "join" => {
                let [separator, attribute] = given.bind(name, ["d", "attribute"], 0)?;
                let separator = text_or(separator, "", meter)?;
                let mut joined = String::new();
                for (i, item) in value.items(meter)?.iter().enumerate() {
                    meter.spend(1)?;
                    joined.push_str(if i > 0 { &separator } else { "" });
                    let item = self.attribute_path(item, attribute.as_ref())?;
                    joined.push_str(&item.text(meter)?);
                    bounded(joined.len())?;
                }
                meter.bytes(joined.len())?;
                joined.into()
            }
            "tojson" => return to_json(value, given, meter).map(Value::from),
            "sort" => {
                let names = ["reverse", "case_sensitive", "attribute"];
                let [reverse, case, attribute] = given.bind(name, names, 0)?;
                let sorted = self.sorted(
                    value,
                    is_set(case.as_ref()),
                    attribute.as_ref(),
                    is_set(reverse.as_ref()),
                )?;
                sorted.into_iter().map(|(_, item)| item).collect::<Vec<_>>().into()
            }
            "dictsort" => {
                let names = ["case_sensitive", "by", "reverse"];
                let [case, by, reverse] = given.bind(name, names, 0)?;
                let by = match &*text_or(by, "key", meter)? {
                    "key" => 0,
                    "value" => 1,
                    _ => return Err(Failure::new("dictsort: `by` is either `key` or `value`")),
                };
                let Value::Dict(_) = value else {
                    return Err(Failure::new(format!(
                        "dictsort: expected a dict, found {}",
                        value.kind()
                    )));
                };
                let items = methods::call(value, "items", Given::default(), meter)?;
                let sorted = self.sorted(
                    &items,
                    is_set(case.as_ref()),
                    Some(&Value::Int(by)),
                    is_set(reverse.as_ref()),
                )?;
                sorted.into_iter().map(|(_, item)| item).collect::<Vec<_>>().into()
            }
            "unique" => {
                let [case, attribute] = given.bind(name, ["case_sensitive", "attribute"], 0)?;
                let mut seen = super::value::Dict::default();
                let mut all = Vec::new();
                for item in value.items(meter)?.iter() {
                    let key = self.sort_key(item, is_set(case.as_ref()), attribute.as_ref())?;
                    meter.spend(1)?;
                    if seen.get(&key, meter)?.is_none() {
                        seen.insert(key, Value::None, meter)?;
                        all.push(item.clone());
                    }
                }
                Value::once(all)
            }
            "min" | "max" => {
                let [case, attribute] = given.bind(name, ["case_sensitive", "attribute"], 0)?;
                let mut best: Option<(Value, Value)> = None;
                for item in value.items(meter)?.iter() {
                    let key = self.sort_key(item, is_set(case.as_ref()), attribute.as_ref())?;
                    let is_better = match &best {
                        None => true,
                        Some((other, _)) if name == "min" => operators::less(&key, other, meter)?,
                        Some((other, _)) => operators::less(other, &key, meter)?,
                    };
                    if is_better {
                        best = Some((key, item.clone()));
                    }
                }
                best.map_or_else(|| Value::undefined(name), |(_, item)| item)
            }
            "groupby" => {
                let names = ["attribute", "default", "case_sensitive"];
                let [attribute, default, case] = given.bind(name, names, 1)?;
                let default = default.filter(|default| !matches!(default, Value::None));
                return self.grouped(
                    value,
                    attribute.as_ref(),
                    default.as_ref(),
                    is_set(case.as_ref()),
                );
            }
            "sum" => {
                let [attribute, start] = given.bind(name, ["attribute", "start"], 0)?;
                let mut sum = start.unwrap_or(Value::Int(0));
                for item in value.items(meter)?.iter() {
                    let item = self.attribute_path(item, attribute.as_ref())?;
                    sum = operators::math(super::syntax::Math::Add, &sum, &item, meter)?;
                }
                sum
            }
            "batch" => {
                let [size, fill] = given.bind(name, ["linecount", "fill_with"], 1)?;
                let size = int_or(size.as_ref(), 0, name)?;
                let size = usize::try_from(size).ok().filter(|&size| size > 0);
                let size = size.ok_or_else(|| Failure::new("batch: expected a number above 0"))?;
                let items = value.items(meter)?;
                meter.spend(items.len())?;
                let mut all: Vec<Vec<Value>> = items.chunks(size).map(<[_]>::to_vec).collect();
                if let (Some(fill), Some(last)) =
                    (fill.filter(|f| !matches!(f, Value::None)), all.last_mut())
                {
                    meter.spend(size)?;
                    last.resize(size, fill);
                }
                Value::once(all.into_iter().map(Value::from).collect())
            }
            "slice" => {
                let [slices, fill] = given.bind(name, ["slices", "fill_with"], 1)?;
                let slices = int_or(slices.as_ref(), 0, name)?;
                let slices = usize::try_from(slices).ok().filter(|&slices| slices > 0);
                let slices =
                    slices.ok_or_else(|| Failure::new("slice: expected a number above 0"))?;
                let items = value.items(meter)?;
                meter.spend(items.len().saturating_add(slices))?;
                let (each, more) = (items.len() / slices, items.len() % slices);
                let fill = fill.filter(|fill| !matches!(fill, Value::None));
                let (mut all, mut at) = (Vec::new(), 0);
                for i in 0..slices {
                    let len = each + usize::from(i < more);
                    let mut part = items[at..at + len].to_vec();
                    at += len;
                    if let Some(fill) = fill.as_ref().filter(|_| i >= more) {
                        part.push(fill.clone());
                    }
                    all.push(Value::from(part));
                }
                Value::once(all)
            }
            "attr" => {
                let [field] = given.bind(name, ["name"], 1)?;
                let field = text_or(field, "", meter)?;
                value.defined()?;
                // Only what is an attribute in Python, and no item.
                match value {
                    Value::Dict(dict) if dict.get_text(&field).is_some() => {
                        match methods::attribute(&Value::Dict(Rc::default()), &field, meter)? {
                            Value::Undefined(name) => Value::Undefined(name),
                            _ => methods::attribute(value, &field, meter)?,
                        }
                    }
                    _ => self.attribute(value, &field)?,
                }
            }
            "map" => return self.mapped(value, given),
            "select" | "reject" | "selectattr" | "rejectattr" => {
                return self.selected(name, value, given);
            }
            _ => return Err(Failure::new(format!("an unknown filter `{}`", name.escape_debug()))),
        })
    }

    /// The attribute of an item that `path` names (`a.b.0`), or the item itself.
    fn attribute_path(&mut self, item: &Value, path: Option<&Value>) -> Result {
        let path = match path {
            None | Some(Value::None) => return Ok(item.clone()),
            Some(path) => path,
        };
        let Some(text) = path.as_text() else { return self.item(item, path) };
        let mut value = item.clone();
        for part in text.split('.') {
            self.meter.spend(1)?;
            let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
            let key = match part.parse::<i64>() {
                Ok(number) if is_number => Value::Int(number.into()),
                _ => part.into(),
            };
            value = self.item(&value, &key)?;
        }
        Ok(value)
    }

    /// What an item is sorted by.
    fn sort_key(&mut self, item: &Value, with_case: bool, attribute: Option<&Value>) -> Result {
        let key = self.attribute_path(item, attribute)?;
        match key.as_text() {
            Some(text) if !with_case => {
                self.meter.bytes(text.len())?;
                Ok(text.to_lowercase().into())
            }
            _ => Ok(key),
        }
    }

    fn sorted(
        &mut self,
        list: &Value,
        with_case: bool,
        attribute: Option<&Value>,
        is_reversed: bool,
    ) -> Result<Vec<(Vec<Value>, Value)>> {
        // Several attributes with commas between them: the first counts most.
        let paths: Vec<Option<Value>> = match attribute.and_then(Value::as_text) {
            Some(text) => text.split(',').map(|path| Some(path.into())).collect(),
            None => vec![attribute.cloned()],
        };
        let items = list.items(self.meter)?;
        let mut all = Vec::with_capacity(items.len());
        for item in items.iter() {
            let mut keys = Vec::with_capacity(paths.len());
            for path in &paths {
                keys.push(self.sort_key(item, with_case, path.as_ref())?);
            }
            all.push((keys, item.clone()));
        }
        let meter = self.meter;
        let before = |a: &[Value], b: &[Value]| {
            for (a, b) in a.iter().zip(b) {
                if !operators::equal(a, b, meter)? {
                    return operators::less(a, b, meter);
                }
            }
            Ok(false)
        };
        operators::sort(&mut all, |a: &(Vec<Value>, Value), b: &(Vec<Value>, Value)| {
            if is_reversed { before(&b.0, &a.0) } else { before(&a.0, &b.0) }
        })?;
        Ok(all)
    }

    fn grouped(
        &mut self,
        list: &Value,
        attribute: Option<&Value>,
        default: Option<&Value>,
        with_case: bool,
    ) -> Result {
        let mut items = Vec::new();
        for item in list.items(self.meter)?.iter() {
            let mut key = self.attribute_path(item, attribute)?;
            if let Some(default) = default.filter(|_| key.is_undefined()) {
                key = default.clone();
            }
            let sort = self.sort_key(&key, with_case, None)?;
            items.push((sort, key, item.clone()));
        }
        let meter = self.meter;
        operators::sort(&mut items, |a: &(Value, Value, Value), b: &(Value, Value, Value)| {
            operators::less(&a.0, &b.0, meter)
        })?;
        let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
        for (sort, key, item) in items {
            match groups.last_mut() {
                Some((other, _, group)) if operators::equal(other, &sort, meter)? => {
                    group.push(item);
                }
                _ => groups.push((sort, key, vec![item])),
            }
        }
        let groups = groups.into_iter();
        Ok(groups
            .map(|(_, key, group)| Value::tuple(vec![key, group.into()]))
            .collect::<Vec<_>>()
            .into())
    }

    /// `map('filter', ..)` or `map(attribute=.., default=..)`.
    fn mapped(&mut self, list: &Value, mut given: Given) -> Result {
        let mut all = Vec::new();
        if given.positional.is_empty() {
            let [attribute, default] = given.bind("map", ["attribute", "default"], 1)?;
            // As in Jinja, `none` is no default.
            let default = default.filter(|default| !matches!(default, Value::None));
            for item in list.items(self.meter)?.iter() {
                let value = self.attribute_path(item, attribute.as_ref())?;
                all.push(match &default {
                    Some(default) if value.is_undefined() => default.clone(),
                    _ => value,
                });
            }
        } else {
            let name = given.positional.remove(0).text(self.meter)?;
            for item in list.items(self.meter)?.iter() {
                self.meter.spend(1)?;
                all.push(self.filter(&name, item, given.clone())?);
            }
        }
        Ok(Value::once(all))
    }

    fn selected(&mut self, name: &str, list: &Value, mut given: Given) -> Result {
        let is_wanted = name.starts_with("select");
        let attribute = if name.ends_with("attr") {
            if given.positional.is_empty() {
                return Err(Failure::new(format!("{name}: the attribute is missing")));
            }
            Some(given.positional.remove(0))
        } else {
            None
        };
        let test = if given.positional.is_empty() {
            None
        } else {
            Some(given.positional.remove(0).text(self.meter)?)
        };
        let mut all = Vec::new();
        for item in list.items(self.meter)?.iter() {
            self.meter.spend(1)?;
            let value = self.attribute_path(item, attribute.as_ref())?;
            let holds = match &test {
                Some(test) => self.test(test, &value, given.clone())?,
                None => value.is_true(),
            };
            if holds == is_wanted {
                all.push(item.clone());
            }
        }
        Ok(Value::once(all))
    }

    fn indent(&mut self, value: &Value, given: Given) -> Result {
        let meter = self.meter;
        let [width, first, blank] = given.bind("indent", ["width", "first", "blank"], 0)?;
        let margin = match &width {
            Some(Value::Text(text) | Value::Markup(text)) => text.to_string(),
            width => {
                let width = usize::try_from(int_or(width.as_ref(), 4, "indent")?).unwrap_or(0);
                bounded(width)?;
                " ".repeat(width)
            }
        };
        let text = value.as_text().ok_or_else(|| {
            Failure::new(format!("indent: expected a string, found {}", value.kind()))
        })?;
        let text = format!("{text}\n");
        let lines = methods::lines(&text, false);
        let (first, blank) = (is_set(first.as_ref()), is_set(blank.as_ref()));
        let len = margin.len().saturating_mul(lines.len()).saturating_add(text.len());
        bounded(len)?;
        meter.bytes(len)?;
        let mut out = String::with_capacity(len);
        for (i, line) in lines.into_iter().enumerate() {
            out.push_str(if i > 0 { "\n" } else { "" });
            let is_indented = if i == 0 { first } else { blank || !line.is_empty() };
            out.push_str(if is_indented { &margin } else { "" });
            out.push_str(line);
        }
        Ok(value.like(out))
    }

    fn url_encoded(&mut self, value: &Value) -> Result<String> {
        let meter = self.meter;
        let is_list = !matches!(value, Value::Text(_) | Value::Markup(_)) && value.is_iterable();
        if !is_list {
            return Ok(quoted(&value.text(meter)?, false));
        }
        let pairs = match value {
            Value::Dict(_) => methods::call(value, "items", Given::default(), meter)?,
            other => other.clone(),
        };
        let mut out = String::new();
        for pair in pairs.items(meter)?.iter() {
            let pair = pair.items(meter)?;
            let [name, value] = &pair[..] else {
                return Err(Failure::new("urlencode: expected pairs"));
            };
            out.push_str(if out.is_empty() { "" } else { "&" });
            out.push_str(&quoted(&name.text(meter)?, true));
            out.push('=');
            out.push_str(&quoted(&value.text(meter)?, true));
            bounded(out.len())?;
        }
        Ok(out)
    }
}

/// `tojson`, with the options of `json.dumps` that transformers gives it.
fn to_json(value: &Value, given: Given, meter: &Meter) -> Result<String> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ensure_ascii, indent, separators, sort_keys] = given.bind("tojson", names, 0)?;
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Text(text) | Value::Markup(text)) => Some(text.to_string()),
        indent => {
            let width = int_or(indent.as_ref(), 0, "tojson")?.clamp(0, MAX_JSON_INDENT);
            Some(" ".repeat(width as usize))
        }
    };
    let separators = match separators {
        None | Some(Value::None) => {
            [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned)
        }
        Some(pair) => {
            let pair = pair.items(meter)?;
            let texts: Vec<&Arc<str>> = pair.iter().filter_map(Value::as_text).collect();
            let [item, key] = texts[..] else {
                return Err(Failure::new("tojson: expected two separators"));
            };
            [item.to_string(), key.to_string()]
        }
    };
    let json = Json {
        ensure_ascii: is_set(ensure_ascii.as_ref()),
        indent,
        separators,
        sort_keys: is_set(sort_keys.as_ref()),
    };
    json.dumps(value, meter)
}
