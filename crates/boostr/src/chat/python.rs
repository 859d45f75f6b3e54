//! Values as Python writes them: `str(x)`, `repr(x)` and `json.dumps(x)`.
//!
//! Templates were made for Python, and what they print without a filter is what `str` gives there:
//! `True`, `None`, `1e+22`, `{'a': [1]}`.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Longest text that a template may make, in bytes.
pub(super) const MAX_TEXT: usize = 16 << 20;

/// `str(value)`.
pub(super) fn str(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let mut text = String::new();
    if !value.is_undefined() {
        repr(value, &mut text)?;
    }
    Ok(text)
}

/// Appends `repr(value)`.
fn repr(value: &Value, text: &mut String) -> Result<(), Error> {
    bounded(text)?;
    match value.kind() {
        ValueKind::Undefined => text.push_str("Undefined"),
        ValueKind::None => text.push_str("None"),
        ValueKind::Bool => text.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => number(value, text, ["nan", "inf"]),
        ValueKind::String => quoted(value.as_str().unwrap_or_default(), text),
        ValueKind::Seq | ValueKind::Iterable => {
            let [open, close] = if value.is_tuple() { ['(', ')'] } else { ['[', ']'] };
            text.push(open);
            for (i, item) in value.try_iter()?.enumerate() {
                text.push_str(if i > 0 { ", " } else { "" });
                repr(&item, text)?;
            }
            text.push_str(if value.is_tuple() && value.len() == Some(1) { "," } else { "" });
            text.push(close);
        }
        ValueKind::Map => {
            text.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                text.push_str(if i > 0 { ", " } else { "" });
                repr(&key, text)?;
                text.push_str(": ");
                repr(&value.get_item(&key)?, text)?;
            }
            text.push('}');
        }
        _ => write!(text, "{value}").map_err(|_| Error::from(ErrorKind::WriteFailure))?,
    }
    bounded(text)
}

/// An error for a text that is too long.
pub(super) fn bounded(text: &str) -> Result<(), Error> {
    if text.len() <= MAX_TEXT {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidOperation, format!("a text of more than {MAX_TEXT} bytes")))
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
            c => {
                let code = u32::from(c);
                text.push_str(&match code {
                    0..=0xff => format!("\\x{code:02x}"),
                    0x100..=0xffff => format!("\\u{code:04x}"),
                    _ => format!("\\U{code:08x}"),
                });
            }
        }
    }
    text.push(quote);
}

fn is_printable(c: char) -> bool {
    // Debug text escapes what cannot be printed; a letter in front keeps it from escaping accents.
    let shown = ['a', c].iter().collect::<String>().escape_debug().nth(1);
    matches!(c, ' ' | '"' | '\'') || !c.is_whitespace() && shown == Some(c)
}

/// A number; `names` are those of what is no number and of infinity.
fn number(value: &Value, text: &mut String, names: [&str; 2]) {
    if value.is_integer() {
        let _ = write!(text, "{value}");
        return;
    }
    let float = f64::try_from(value.clone()).unwrap_or(f64::NAN);
    if float.is_nan() {
        text.push_str(names[0]);
    } else if float.is_infinite() {
        text.push_str(if float < 0.0 { "-" } else { "" });
        text.push_str(names[1]);
    } else {
        self::float(float, text);
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
    pub(super) fn dumps(&self, value: &Value) -> Result<String, Error> {
        let mut text = String::new();
        self.value(value, 0, &mut text)?;
        Ok(text)
    }

    fn value(&self, value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => number(value, text, ["NaN", "Infinity"]),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), text),
            ValueKind::Seq => {
                text.push('[');
                let mut count = 0;
                for item in value.try_iter()? {
                    self.before_item(count, depth, text);
                    self.value(&item, depth + 1, text)?;
                    count += 1;
                }
                self.end(count, depth, ']', text);
            }
            ValueKind::Map => {
                text.push('{');
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                let count = keys.len();
                for (i, key) in keys.into_iter().enumerate() {
                    self.before_item(i, depth, text);
                    self.key(&key, text)?;
                    text.push_str(&self.separators[1]);
                    self.value(&value.get_item(&key)?, depth + 1, text)?;
                }
                self.end(count, depth, '}', text);
            }
            kind => {
                let reason = format!("a value of type {kind} has no JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
        }
        bounded(text)
    }

    fn before_item(&self, index: usize, depth: usize, text: &mut String) {
        if index > 0 {
            text.push_str(&self.separators[0]);
        }
        self.new_line(depth + 1, text);
    }

    fn end(&self, count: usize, depth: usize, bracket: char, text: &mut String) {
        if count > 0 {
            self.new_line(depth, text);
        }
        text.push(bracket);
    }

    fn new_line(&self, depth: usize, text: &mut String) {
        if let Some(indent) = &self.indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn key(&self, key: &Value, text: &mut String) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => {
                self.string(key.as_str().unwrap_or_default(), text);
                Ok(())
            }
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                text.push('"');
                self.value(key, 0, text)?;
                text.push('"');
                Ok(())
            }
            kind => {
                let reason = format!("a value of type {kind} is no key in JSON");
                Err(Error::new(ErrorKind::InvalidOperation, reason))
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
    use minijinja::value::Serde;

    use super::*;

    fn value(json: &str) -> Value {
        Value::from(Serde(serde_json::from_str::<serde_json::Value>(json).unwrap()))
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
            assert_eq!(str(&Value::from(float)).unwrap(), text);
        }
    }

    #[test]
    fn values_in_values_are_written_as_literals_of_python() {
        let json = r#"{"z": [null, true, false, "a'b", "a'\"b", "é\n\t\\\u0001\u00a0\u2028\u200d"], "a": {}, "b": []}"#;
        let text = r#"{'z': [None, True, False, "a'b", 'a\'"b', 'é\n\t\\\x01\xa0\u2028\u200d'], 'a': {}, 'b': []}"#;
        assert_eq!(str(&value(json)).unwrap(), text);
        assert_eq!(str(&value("\"a\\n'\"")).unwrap(), "a\n'");
        assert_eq!(str(&Value::UNDEFINED).unwrap(), "");
        assert_eq!(str(&value("[\"e\u{301}{}\u{10ffff}\"]")).unwrap(), "['e\u{301}{}\\U0010ffff']");
    }

    fn json() -> Json {
        let separators = [", ", ": "].map(str::to_owned);
        Json { ensure_ascii: false, indent: None, separators, sort_keys: false }
    }

    #[test]
    fn json_keeps_order_and_letters_and_escapes_only_what_it_must() {
        let text = r#"{"z": [1, 2.0, -1.5e-07, null, true], "a": {"é": "<&'日\u0001\b\f\n\r\t\"\\"}, "e": {}, "l": []}"#;
        assert_eq!(json().dumps(&value(text)).unwrap(), text);
        let sorted = Json { sort_keys: true, ..json() };
        assert_eq!(sorted.dumps(&value(r#"{"b": 1, "a": 2}"#)).unwrap(), r#"{"a": 2, "b": 1}"#);
        let ascii = Json { ensure_ascii: true, ..json() };
        let text = r#""a\u00e9\ud83d\ude00\u007f""#;
        assert_eq!(ascii.dumps(&value(text)).unwrap(), text);
    }

    #[test]
    fn json_with_an_indent_has_a_line_for_each_item() {
        let separators = [",", ": "].map(str::to_owned);
        let pretty = Json { indent: Some("  ".into()), separators, ..json() };
        let text = "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}";
        assert_eq!(pretty.dumps(&value(text)).unwrap(), text);
    }

    #[test]
    fn what_json_does_not_have_is_an_error() {
        for value in [Value::UNDEFINED, Value::from_bytes(vec![1])] {
            assert!(json().dumps(&value).unwrap_err().to_string().contains("has no JSON"));
        }
    }
}
