//! Values as Python writes them: `str(x)`, `repr(x)` and `json.dumps(x)`.
//!
//! Templates were made for Python, and what they print without a filter is what `str` gives there:
//! `True`, `None`, `1e+22`, `{'a': [1]}`.

use std::fmt::Write;

use super::value::{ObjectKind, Value, View};
use super::{Failure, MAX_TEXT, MAX_VALUE_DEPTH, Meter, Result, bounded};

/// `str(value)`.
pub(super) fn str(value: &Value, meter: &Meter) -> Result<String> {
    let mut text = String::new();
    match value {
        Value::Text(content) | Value::Markup(content) => text.push_str(content),
        Value::Undefined(_) => {}
        other => repr_into(other, 0, &mut text, meter)?,
    }
    meter.bytes(text.len())?;
    Ok(text)
}

/// `repr(value)`.
pub(super) fn repr(value: &Value, meter: &Meter) -> Result<String> {
    let mut text = String::new();
    repr_into(value, 0, &mut text, meter)?;
    meter.bytes(text.len())?;
    Ok(text)
}

fn repr_into(value: &Value, depth: usize, text: &mut String, meter: &Meter) -> Result<()> {
    meter.spend(1)?;
    if depth > MAX_VALUE_DEPTH {
        return Err(Failure::new("a value that is nested too deep, a recursion without end"));
    }
    let list = |text: &mut String, [open, close]: [&str; 2], items: &[Value]| {
        text.push_str(open);
        for (i, item) in items.iter().enumerate() {
            text.push_str(if i > 0 { ", " } else { "" });
            repr_into(item, depth + 1, text, meter)?;
        }
        text.push_str(close);
        Ok::<_, Failure>(())
    };
    match value {
        Value::Undefined(_) => text.push_str("Undefined"),
        Value::None => text.push_str("None"),
        Value::Bool(value) => text.push_str(if *value { "True" } else { "False" }),
        Value::Int(value) => {
            let _ = write!(text, "{value}");
        }
        Value::Float(value) => number(*value, text, ["nan", "inf"]),
        Value::Text(content) => quoted(content, text),
        Value::Markup(content) => {
            text.push_str("Markup(");
            quoted(content, text);
            text.push(')');
        }
        Value::List(items) => list(text, ["[", "]"], &items.items())?,
        Value::Tuple(items) => {
            list(text, ["(", if items.len() == 1 { ",)" } else { ")" }], items)?;
        }
        Value::View(view, _) => {
            let name = match view {
                View::Keys => "dict_keys([",
                View::Values => "dict_values([",
                View::Items => "dict_items([",
            };
            list(text, [name, "])"], &value.items(meter)?)?;
        }
        Value::Dict(dict) => {
            text.push('{');
            for (i, (key, value)) in dict.entries.iter().enumerate() {
                text.push_str(if i > 0 { ", " } else { "" });
                repr_into(key, depth + 1, text, meter)?;
                text.push_str(": ");
                repr_into(value, depth + 1, text, meter)?;
            }
            text.push('}');
        }
        Value::Range(range) => {
            let (start, stop) = (range.start, range.get(range.len));
            let _ = match range.step {
                1 => write!(text, "range({start}, {stop})"),
                step => write!(text, "range({start}, {stop}, {step})"),
            };
        }
        Value::Iterator(_) => text.push_str("<generator object>"),
        Value::Function(_) => text.push_str("<function>"),
        Value::Method(method) => {
            let (of, name) = &**method;
            let _ = write!(text, "<built-in method {name} of {} object>", of.kind());
        }
        Value::Macro(macro_value) => {
            text.push_str("<Macro ");
            quoted(&macro_value.node.name, text);
            text.push('>');
        }
        Value::Object(ObjectKind::Namespace, _) => text.push_str("<Namespace>"),
        Value::Object(kind, _) => {
            let _ = write!(text, "<{kind:?}>");
        }
    }
    bounded(text.len())
}

/// A string in quotes: single ones, unless it has those and no double ones.
fn quoted(content: &str, text: &mut String) {
    let quote = if content.contains('\'') && !content.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for c in content.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            c if c == quote => text.extend(['\\', c]),
            c if is_printable(c) => text.push(c),
            c => escaped(c, text),
        }
    }
    text.push(quote);
}

/// A character by its number.
pub(super) fn escaped(c: char, text: &mut String) {
    let code = u32::from(c);
    let _ = match code {
        0..=0xff => write!(text, "\\x{code:02x}"),
        0x100..=0xffff => write!(text, "\\u{code:04x}"),
        _ => write!(text, "\\U{code:08x}"),
    };
}

pub(super) fn is_printable(c: char) -> bool {
    // Debug text escapes what cannot be printed; a letter in front keeps it from escaping accents.
    let shown = ['a', c].iter().collect::<String>().escape_debug().nth(1);
    matches!(c, ' ' | '"' | '\'') || !c.is_whitespace() && shown == Some(c)
}

/// A number that is not whole; `names` are those of what is no number and of infinity.
fn number(value: f64, text: &mut String, names: [&str; 2]) {
    if value.is_nan() {
        text.push_str(names[0]);
    } else if value.is_infinite() {
        text.push_str(if value < 0.0 { "-" } else { "" });
        text.push_str(names[1]);
    } else {
        float(value, text);
    }
}

/// The shortest digits that read back as the same number, with an exponent below 1e-4 and from 1e16 on.
fn float(value: f64, text: &mut String) {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse() {
        Ok(-4..=15) => {
            let plain = value.to_string();
            text.push_str(&plain);
            text.push_str(if plain.contains('.') { "" } else { ".0" });
        }
        Ok(exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            let _ = write!(text, "{digits}e{sign}{:02}", i32::unsigned_abs(exponent));
        }
        Err(_) => text.push_str(&scientific),
    }
}

/// How `json.dumps` writes.
#[derive(Debug, Clone)]
pub(super) struct Json {
    /// Everything beyond ASCII as `\u....`.
    pub(super) ensure_ascii: bool,
    /// White space of one level; without it all is on one line.
    pub(super) indent: Option<String>,
    /// Between two items, and between a key and its value.
    pub(super) separators: [String; 2],
    /// Keys in order, not as they come.
    pub(super) sort_keys: bool,
}

impl Json {
    /// `json.dumps(value)`; a value that JSON does not have is an error.
    pub(super) fn dumps(&self, value: &Value, meter: &Meter) -> Result<String> {
        let mut text = String::new();
        self.value(value, 0, &mut text, meter)?;
        meter.bytes(text.len())?;
        Ok(text)
    }

    fn value(&self, value: &Value, depth: usize, text: &mut String, meter: &Meter) -> Result<()> {
        meter.spend(1)?;
        if depth > MAX_VALUE_DEPTH {
            return Err(Failure::new("a value that is nested too deep, a recursion without end"));
        }
        match value {
            Value::None => text.push_str("null"),
            Value::Bool(value) => text.push_str(if *value { "true" } else { "false" }),
            Value::Int(value) => {
                let _ = write!(text, "{value}");
            }
            Value::Float(value) => number(*value, text, ["NaN", "Infinity"]),
            Value::Text(content) | Value::Markup(content) => self.string(content, text),
            Value::List(_) | Value::Tuple(_) => {
                let items = value.items(meter)?;
                text.push('[');
                for (i, item) in items.iter().enumerate() {
                    self.before_item(i, depth, text)?;
                    self.value(item, depth + 1, text, meter)?;
                }
                self.end(items.len(), depth, ']', text)?;
            }
            Value::Dict(dict) => {
                text.push('{');
                let mut entries: Vec<&(Value, Value)> = dict.entries.iter().collect();
                if self.sort_keys {
                    let less = |a: &&(Value, Value), b: &&(Value, Value)| {
                        super::operators::less(&a.0, &b.0, meter)
                    };
                    super::operators::sort(&mut entries, less)?;
                }
                for (i, (key, value)) in entries.into_iter().enumerate() {
                    self.before_item(i, depth, text)?;
                    self.key(key, text, meter)?;
                    text.push_str(&self.separators[1]);
                    self.value(value, depth + 1, text, meter)?;
                }
                self.end(dict.entries.len(), depth, '}', text)?;
            }
            other => {
                return Err(Failure::new(format!("a value of type {} has no JSON", other.kind())));
            }
        }
        bounded(text.len())
    }

    fn before_item(&self, index: usize, depth: usize, text: &mut String) -> Result<()> {
        if index > 0 {
            text.push_str(&self.separators[0]);
        }
        self.new_line(depth + 1, text)
    }

    fn end(&self, count: usize, depth: usize, bracket: char, text: &mut String) -> Result<()> {
        if count > 0 {
            self.new_line(depth, text)?;
        }
        text.push(bracket);
        Ok(())
    }

    fn new_line(&self, depth: usize, text: &mut String) -> Result<()> {
        if let Some(indent) = &self.indent {
            let len = indent.len().saturating_mul(depth).saturating_add(text.len());
            bounded(len.min(MAX_TEXT + 1))?;
            text.push('\n');
            text.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
        Ok(())
    }

    fn key(&self, key: &Value, text: &mut String, meter: &Meter) -> Result<()> {
        match key {
            Value::Text(content) | Value::Markup(content) => {
                self.string(content, text);
                Ok(())
            }
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
                text.push('"');
                self.value(key, 0, text, meter)?;
                text.push('"');
                Ok(())
            }
            other => {
                let reason = format!("a value of type {} is no key in JSON", other.kind());
                Err(Failure::new(reason))
            }
        }
    }

    fn string(&self, content: &str, text: &mut String) {
        text.push('"');
        for c in content.chars() {
            match c {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                c if c < ' ' || self.ensure_ascii && c > '~' => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(text, "\\u{unit:04x}");
                    }
                }
                c => text.push(c),
            }
        }
        text.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meter() -> Meter {
        Meter::new(1_000_000)
    }

    fn value(json: &str) -> Value {
        Value::of_json(&serde_json::from_str(json).unwrap(), &meter()).unwrap()
    }

    fn str(value: &Value) -> Result<String> {
        super::str(value, &meter())
    }

    #[test]
    fn numbers_are_written_as_python_does() {
        for (json, text) in [
            ("0", "0"),
            ("-7", "-7"),
            ("18446744073709551615", "18446744073709551615"),
            ("1.0", "1.0"),
            ("-0.0", "-0.0"),
            ("0.1", "0.1"),
            ("0.0001", "0.0001"),
            ("0.00001", "1e-05"),
            ("-1.5e-7", "-1.5e-07"),
            ("123456789012345.6", "123456789012345.6"),
            ("1e15", "1000000000000000.0"),
            ("9999999999999998.0", "9999999999999998.0"),
            ("1e16", "1e+16"),
            ("1.25e22", "1.25e+22"),
            ("1e300", "1e+300"),
            ("5e-324", "5e-324"),
        ] {
            assert_eq!(str(&value(json)).unwrap(), text, "{json}");
        }
        for (float, text) in
            [(f64::NAN, "nan"), (f64::INFINITY, "inf"), (f64::NEG_INFINITY, "-inf")]
        {
            assert_eq!(str(&Value::Float(float)).unwrap(), text);
        }
    }

    #[test]
    fn values_in_values_are_written_as_literals_of_python() {
        let json = r#"{"z": [null, true, false, "a'b", "a'\"b", "é\n\t\\\u0001\u00a0\u2028\u200d"], "a": {}, "b": []}"#;
        let text = r#"{'z': [None, True, False, "a'b", 'a\'"b', 'é\n\t\\\x01\xa0\u2028\u200d'], 'a': {}, 'b': []}"#;
        assert_eq!(str(&value(json)).unwrap(), text);
        assert_eq!(str(&value("\"a\\n'\"")).unwrap(), "a\n'");
        assert_eq!(str(&Value::undefined("x")).unwrap(), "");
        assert_eq!(str(&value("[\"e\u{301}{}\u{10ffff}\"]")).unwrap(), "['e\u{301}{}\\U0010ffff']");
    }

    fn json() -> Json {
        let separators = [", ", ": "].map(str::to_owned);
        Json { ensure_ascii: false, indent: None, separators, sort_keys: false }
    }

    #[test]
    fn json_keeps_order_and_letters_and_escapes_only_what_it_must() {
        let text = r#"{"z": [1, 2.0, -1.5e-07, null, true], "a": {"é": "<&'日\u0001\b\f\n\r\t\"\\"}, "e": {}, "l": []}"#;
        assert_eq!(json().dumps(&value(text), &meter()).unwrap(), text);
        let sorted = Json { sort_keys: true, ..json() };
        assert_eq!(
            sorted.dumps(&value(r#"{"b": 1, "a": 2}"#), &meter()).unwrap(),
            r#"{"a": 2, "b": 1}"#
        );
        let ascii = Json { ensure_ascii: true, ..json() };
        let text = r#""a\u00e9\ud83d\ude00\u007f""#;
        assert_eq!(ascii.dumps(&value(text), &meter()).unwrap(), text);
    }

    #[test]
    fn json_with_an_indent_has_a_line_for_each_item() {
        let separators = [",", ": "].map(str::to_owned);
        let pretty = Json { indent: Some("  ".into()), separators, ..json() };
        let text = "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}";
        assert_eq!(pretty.dumps(&value(text), &meter()).unwrap(), text);
    }

    #[test]
    fn what_json_does_not_have_is_an_error() {
        for value in [Value::undefined("x"), Value::once(Vec::new())] {
            let error = json().dumps(&value, &meter()).unwrap_err();
            assert!(format!("{error:?}").contains("has no JSON"), "{error:?}");
        }
    }
}
