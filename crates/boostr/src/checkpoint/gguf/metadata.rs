//! The metadata of a GGUF file: keys in the order of the file, each with a value.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use super::value::{Array, Value};
use crate::error::{Error, Result};

/// Keys with their values, read from a file or to be written to one.
///
/// A getter returns `None` for a key that is not there, and an [`Error::Config`] that names file,
/// key, what was expected and what was found for one that holds something else.
///
/// ```
/// use boostr::checkpoint::gguf::Metadata;
///
/// let mut metadata = Metadata::new("model.gguf");
/// metadata.set("mamba2.block_count", 24_u32);
/// metadata.set("tokenizer.ggml.tokens", ["a", "b"]);
/// assert_eq!(metadata.usize("mamba2.block_count", 1..=1000)?, Some(24));
/// assert_eq!(metadata.strings("tokenizer.ggml.tokens")?, Some(vec!["a", "b"]));
/// assert_eq!(metadata.text("general.name")?, None);
/// let error = metadata.usize("mamba2.block_count", 1..=9).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "`model.gguf`: field `mamba2.block_count`: expected a whole number from 1 to 9, found 24 (u32)"
/// );
/// # Ok::<(), boostr::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Metadata {
    path: PathBuf,
    entries: Vec<(String, Value)>,
    /// Where each key is among the entries.
    index: HashMap<String, usize>,
}

impl Metadata {
    /// No key yet; `path` stands in errors.
    pub fn new(path: impl AsRef<Path>) -> Self {
        let path = path.as_ref().to_path_buf();
        Self { path, entries: Vec::new(), index: HashMap::new() }
    }

    /// The file's path, as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All keys with their values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of `key`, whatever it is.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(*self.index.get(key)?).map(|(_, value)| value)
    }

    /// Whether there is such a key.
    pub fn has(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// Gives `key` a value, in its place or, when it is new, at the end; returns the old value.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) -> Option<Value> {
        let (key, value) = (key.into(), value.into());
        let at = *self.index.entry(key.clone()).or_insert(self.entries.len());
        match self.entries.get_mut(at) {
            Some((_, old)) => Some(std::mem::replace(old, value)),
            None => {
                self.entries.push((key, value));
                None
            }
        }
    }

    /// Keeps the keys for which `keep` is true.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        self.entries.retain(|(key, _)| keep(key));
        let places = self.entries.iter().enumerate();
        self.index = places.map(|(at, (key, _))| (key.clone(), at)).collect();
    }

    /// An error about the value of `key`.
    pub fn error(&self, key: &str, reason: impl Into<String>) -> Error {
        Error::Config { path: self.path.clone(), field: key.into(), reason: reason.into() }
    }

    fn wrong(&self, key: &str, expected: &str, found: &Value) -> Error {
        self.error(key, format!("expected {expected}, found {found}"))
    }

    fn read<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong(key, expected, value))
    }

    /// `value`, which a getter found for `key`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is none.
    ///
    /// ```
    /// # let metadata = boostr::checkpoint::gguf::Metadata::new("model.gguf");
    /// let error = metadata.required("general.name", metadata.text("general.name")?).unwrap_err();
    /// assert_eq!(error.to_string(), "`model.gguf`: field `general.name`: missing");
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.error(key, "missing"))
    }

    /// A text.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.read(key, "a string", |value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// A truth value.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "true or false", |value| match value {
            Value::Bool(truth) => Some(*truth),
            _ => None,
        })
    }

    /// A whole number within `range`, of whatever width.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn usize(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>> {
        self.read(key, &within(&range), |value| whole(value, &range))
    }

    /// As [`Metadata::usize`], for a key that must be there.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is missing too.
    pub fn required_usize(&self, key: &str, range: RangeInclusive<usize>) -> Result<usize> {
        self.required(key, self.usize(key, range)?)
    }

    /// A float within `range`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn float(&self, key: &str, range: RangeInclusive<f32>) -> Result<Option<f32>> {
        let expected = format!("a float from {} to {}", range.start(), range.end());
        self.read(key, &expected, |value| value.float().filter(|x| range.contains(x)))
    }

    /// `count` whole numbers within `range`: an array of so many, or one number for all of them.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn per_layer(
        &self,
        key: &str,
        count: usize,
        range: RangeInclusive<usize>,
    ) -> Result<Option<Vec<usize>>> {
        let numbers = within(&range);
        let expected = format!("{numbers}, or an array of {count} such numbers");
        let Some(value) = self.get(key) else { return Ok(None) };
        let Value::Array(array) = value else {
            return match whole(value, &range) {
                Some(number) => Ok(Some(vec![number; count])),
                None => Err(self.wrong(key, &expected, value)),
            };
        };
        if array.len() != count {
            return Err(self.wrong(key, &expected, value));
        }
        let mut all = Vec::with_capacity(count);
        for (index, element) in array.iter().enumerate() {
            let number = whole(&element, &range).ok_or_else(|| {
                self.error(key, format!("element {index}: expected {numbers}, found {element}"))
            })?;
            all.push(number);
        }
        Ok(Some(all))
    }

    /// Whole numbers, of whatever width.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else, or one is above `i64::MAX`.
    pub fn ints(&self, key: &str) -> Result<Option<Vec<i64>>> {
        self.read(key, "an array of whole numbers", |value| {
            array(value)?.iter().map(|n| i64::try_from(n.int()?).ok()).collect()
        })
    }

    /// Truth values.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn bools(&self, key: &str) -> Result<Option<Vec<bool>>> {
        let truth = |value: Value| match value {
            Value::Bool(truth) => Some(truth),
            _ => None,
        };
        self.read(key, "an array of truth values", |value| {
            array(value)?.iter().map(truth).collect()
        })
    }

    /// Floats, of either width.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.read(key, "an array of floats", |value| {
            array(value)?.iter().map(|x| x.float()).collect()
        })
    }

    /// The number of elements of an array.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn array_len(&self, key: &str) -> Result<Option<usize>> {
        self.read(key, "an array", |value| array(value).map(Array::len))
    }

    /// Texts.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>> {
        self.read(key, "an array of strings", |value| array(value)?.strings())
    }
}

/// The same keys and values in the same order.
impl PartialEq for Metadata {
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

fn array(value: &Value) -> Option<&Array> {
    match value {
        Value::Array(array) => Some(array),
        _ => None,
    }
}

fn within(range: &RangeInclusive<usize>) -> String {
    match (range.start(), range.end()) {
        (start, end) if start == end => format!("{start}"),
        (start, end) => format!("a whole number from {start} to {end}"),
    }
}

fn whole(value: &Value, range: &RangeInclusive<usize>) -> Option<usize> {
    usize::try_from(value.int()?).ok().filter(|n| range.contains(n))
}
