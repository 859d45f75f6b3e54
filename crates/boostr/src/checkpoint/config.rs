//! A model's `config.json`: typed fields by any of their names, each error naming file and field.
//!
//! Python writes floats that JSON does not have: bare `Infinity`, `-Infinity` and `NaN`, which newer
//! transformers spell `{"__float__": "Infinity"}`. Both are read, and the plain string too.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::entry::cut;
use crate::error::{Error, Result};
use crate::files::without_bom;

/// Bytes of a value that an error shows.
const MAX_SHOWN: usize = 60;

/// The fields of a configuration file.
#[derive(Debug, Clone)]
pub struct ConfigFile {
    path: PathBuf,
    /// Keys that lead here, with their dots; empty at the top.
    prefix: String,
    fields: Map<String, Value>,
}

impl ConfigFile {
    /// Parses a JSON object; `path` stands in errors.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] when `text` is no JSON object.
    ///
    /// ```
    /// use boostr::checkpoint::ConfigFile;
    ///
    /// let config = ConfigFile::parse("config.json", r#"{"n": 3, "limit": [0.0, Infinity]}"#)?;
    /// assert_eq!(config.usize(&["num", "n"], 1..=9)?, Some(3));
    /// assert_eq!(config.floats("limit")?, Some(vec![0.0, f32::INFINITY]));
    /// assert!(config.usize(&["n"], 4..=9).is_err());
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn parse(path: impl AsRef<Path>, text: &str) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        match serde_json::from_str(&quote_bare_floats(without_bom(text))) {
            Ok(Value::Object(fields)) => Ok(Self { path, prefix: String::new(), fields }),
            Ok(other) => {
                Err(Error::format(path, format!("expected a JSON object, found {}", shown(&other))))
            }
            Err(e) => Err(Error::format(path, e.to_string())),
        }
    }

    /// The file's path, as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file with a field that says this.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.fields.insert(key.to_owned(), value.into());
        self
    }

    /// The same without a field.
    #[must_use]
    pub fn without(mut self, key: &str) -> Self {
        self.fields.remove(key);
        self
    }

    /// Names and values of all fields.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.fields.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Whether the file has the key, be its value null.
    pub fn states(&self, key: &str) -> bool {
        self.fields.contains_key(key)
    }

    /// Whether there is a value that is not null.
    pub fn has(&self, key: &str) -> bool {
        self.value(&[key]).is_some()
    }

    /// Refuses a null.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when the field is there and null.
    pub fn not_null(&self, key: &str) -> Result<()> {
        if self.states(key) && !self.has(key) {
            return Err(self.error(key, "a value is missing: it is null"));
        }
        Ok(())
    }

    /// The first of `keys` that is there and not null.
    fn value<'a, 'k>(&'a self, keys: &[&'k str]) -> Option<(&'k str, &'a Value)> {
        let present = |key| self.fields.get(key).filter(|value| !value.is_null());
        keys.iter().find_map(|&key| Some((key, present(key)?)))
    }

    /// An error about the value of `key`.
    pub fn error(&self, key: &str, reason: impl Into<String>) -> Error {
        let field = format!("{}{key}", self.prefix);
        Error::Config { path: self.path.clone(), field, reason: reason.into() }
    }

    fn wrong(&self, key: &str, expected: &str, found: &Value) -> Error {
        self.error(key, format!("expected {expected}, found {}", shown(found)))
    }

    /// What `read` makes of the value of the first of `keys` that is there.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] that says what was `expected` when `read` returns `None`.
    pub fn get<'a, T>(
        &'a self,
        keys: &[&str],
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some((key, value)) = self.value(keys) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong(key, expected, value))
    }

    /// A whole number within `range`, under the first of `keys` that is there.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn usize(&self, keys: &[&str], range: RangeInclusive<usize>) -> Result<Option<usize>> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        self.get(keys, &expected, |value| {
            value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| range.contains(n))
        })
    }

    /// As [`ConfigFile::usize`], for a field that must be there.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is missing too.
    pub fn required(&self, keys: &[&str], range: RangeInclusive<usize>) -> Result<usize> {
        let missing = || {
            let key = keys.first().copied().unwrap_or_default();
            self.error(key, format!("missing (looked for {})", keys.join(", ")))
        };
        self.usize(keys, range)?.ok_or_else(missing)
    }

    /// A finite number within `range`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn float(&self, keys: &[&str], range: RangeInclusive<f32>) -> Result<Option<f32>> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        self.get(keys, &expected, |value| number(value).filter(|x| range.contains(x)))
    }

    /// As [`ConfigFile::float`], with the precision of the file.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn double(&self, keys: &[&str], range: RangeInclusive<f64>) -> Result<Option<f64>> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        self.get(keys, &expected, |value| value.as_f64().filter(|x| range.contains(x)))
    }

    /// A list of strings.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&str>>> {
        self.get(&[key], "a list of strings", |value| {
            value.as_array()?.iter().map(Value::as_str).collect()
        })
    }

    /// A list of whole numbers, each within `range`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn usizes(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<Vec<usize>>> {
        let expected = format!("a list of whole numbers from {} to {}", range.start(), range.end());
        let read = |value: &Value| {
            value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| range.contains(n))
        };
        self.get(&[key], &expected, |value| value.as_array()?.iter().map(read).collect())
    }

    /// A list of numbers, infinities included.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.get(&[key], "a list of numbers", |value| {
            value.as_array()?.iter().map(number).collect()
        })
    }

    /// A truth value.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn bool(&self, keys: &[&str]) -> Result<Option<bool>> {
        self.get(keys, "true or false", Value::as_bool)
    }

    /// A string.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.get(&[key], "a string", Value::as_str)
    }

    /// Token ids: a whole number or a list of them; none when missing.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn ids(&self, key: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let ids = self.get(&[key], "a token id or a list of them", |value| match value {
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// The length of a list; `None` when it is missing.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is no list.
    pub fn list_len(&self, key: &str) -> Result<Option<usize>> {
        self.get(&[key], "a list", |value| Some(value.as_array()?.len()))
    }

    /// The fields of a nested object; none when it is missing.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn object(&self, key: &str) -> Result<Self> {
        let fields = match self.value(&[key]) {
            None => Map::new(),
            Some((_, Value::Object(fields))) => fields.clone(),
            Some((_, other)) => return Err(self.wrong(key, "an object", other)),
        };
        let prefix = format!("{}{key}.", self.prefix);
        Ok(Self { path: self.path.clone(), prefix, fields })
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Array(list) if list.is_empty() => "an empty list".into(),
        Value::Object(_) => "an object".into(),
        value => {
            let text = value.to_string();
            match cut(&text, MAX_SHOWN) {
                whole if whole.len() == text.len() => text,
                head => format!("{head}..."),
            }
        }
    }
}

/// A number in any of its spellings.
fn number(value: &Value) -> Option<f32> {
    let named = |name: &str| match name {
        "Infinity" | "inf" => Some(f32::INFINITY),
        "-Infinity" | "-inf" => Some(f32::NEG_INFINITY),
        "NaN" | "nan" => Some(f32::NAN),
        _ => None,
    };
    match value {
        Value::Number(x) => x.as_f64().map(|x| x as f32),
        Value::String(name) => named(name),
        Value::Object(object) => named(object.get("__float__")?.as_str()?),
        _ => None,
    }
}

/// Puts quotes around `Infinity`, `-Infinity` and `NaN` outside of strings.
fn quote_bare_floats(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut in_string = false;
    while let Some(c) = rest.chars().next() {
        if !in_string
            && let Some(name) =
                ["Infinity", "-Infinity", "NaN"].into_iter().find(|name| rest.starts_with(name))
        {
            out.push('"');
            out.push_str(name);
            out.push('"');
            rest = rest.get(name.len()..).unwrap_or_default();
            continue;
        }
        // An escape and what it escapes go together, so that \" does not end a string.
        let taken = match c {
            '\\' if in_string => rest.chars().take(2).map(char::len_utf8).sum(),
            _ => c.len_utf8(),
        };
        in_string ^= c == '"';
        let (head, tail) = rest.split_at_checked(taken).unwrap_or((rest, ""));
        out.push_str(head);
        rest = tail;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_infinity_is_read() {
        for text in ["Infinity", r#"{"__float__": "Infinity"}"#, r#""Infinity""#, r#""inf""#] {
            let config = ConfigFile::parse("c", &format!(r#"{{"x": [0.0, {text}]}}"#)).unwrap();
            assert_eq!(config.floats("x").unwrap(), Some(vec![0.0, f32::INFINITY]), "{text}");
        }
        assert_eq!(ConfigFile::parse("c", r#"{"x": null}"#).unwrap().floats("x").unwrap(), None);
    }

    #[test]
    fn strings_that_speak_of_infinity_stay_as_they_are() {
        let config = ConfigFile::parse("c", r#"{"x": "to \" Infinity \\", "NaN": 1}"#).unwrap();
        assert_eq!(config.text("x").unwrap(), Some(r#"to " Infinity \"#));
        assert_eq!(config.usize(&["NaN"], 0..=1).unwrap(), Some(1));
    }

    #[test]
    fn errors_name_file_field_expected_and_found() {
        let config =
            ConfigFile::parse("dir/config.json", r#"{"a": "64", "b": {"c": -1}}"#).unwrap();
        let message = config.usize(&["a"], 1..=9).unwrap_err().to_string();
        assert_eq!(
            message,
            "`dir/config.json`: field `a`: expected a whole number from 1 to 9, found \"64\""
        );
        let nested = config.object("b").unwrap();
        let message = nested.usize(&["c"], 1..=9).unwrap_err().to_string();
        assert!(message.contains("field `b.c`"), "{message}");
        assert!(config.float(&["a"], 0.0..=1.0).is_err());
        assert!(config.required(&["x", "y"], 0..=1).unwrap_err().to_string().contains("x, y"));
    }

    #[test]
    fn no_prefix_and_no_flipped_byte_panics() {
        let text = r#"{"x": [0.0, -Infinity, NaN], "é\u00e9": {"__float__": "NaN"}, "s": "\\\""}"#;
        for end in (0..text.len()).filter(|&end| text.is_char_boundary(end)) {
            assert!(ConfigFile::parse("c", &text[..end]).is_err(), "{end}");
        }
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut bytes = text.as_bytes().to_vec();
                bytes[at] ^= 1 << bit;
                let _ = ConfigFile::parse("c", &String::from_utf8_lossy(&bytes));
            }
        }
    }
}
