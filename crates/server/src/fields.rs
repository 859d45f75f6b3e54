//! A JSON object read field by field: an error names the field, the expected value and the found one.
//!
//! A field that is `null` counts as absent. Of a key that is there twice the last value counts. Fields
//! that nobody asks for are ignored, and named to the client, or refused.

use std::cell::RefCell;
use std::future::Future;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::{ApiError, Result};

/// Longest value that an error repeats, in characters.
const MAX_SHOWN: usize = 40;

/// The fields of an object that have not been taken yet.
pub(crate) struct Fields {
    /// Where the object is in the body, with a dot at its end, or nothing.
    path: String,
    map: Map<String, Value>,
    /// Whether there may be no others than those that are asked for.
    is_strict: bool,
}

/// Longest name and most names of ignored fields that a client is told.
const MAX_NAME: usize = 64;
const MAX_NAMES: usize = 20;

tokio::task_local! {
    /// The fields that this task's request has and nobody asked for.
    static IGNORED: RefCell<Vec<String>>;
}

/// Answers a request, and tells which of its fields were ignored.
pub(crate) async fn scope<T>(answer: impl Future<Output = T>) -> (T, Vec<String>) {
    let answer = async {
        let answer = answer.await;
        (answer, IGNORED.with(RefCell::take))
    };
    IGNORED.scope(RefCell::default(), answer).await
}

impl Fields {
    /// The fields of a body.
    pub(crate) fn of(body: Value) -> Result<Self> {
        match body {
            Value::Object(map) => Ok(Self { path: String::new(), map, is_strict: false }),
            other => {
                let found = found(&other);
                Err(ApiError::invalid(format!("body: expected a JSON object, found {found}")))
            }
        }
    }

    /// Those of a value at `path`.
    pub(crate) fn at(path: &str, value: Value) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Self { path: format!("{path}."), map, is_strict: false }),
            other => Err(wrong(path, "an object", &other)),
        }
    }

    /// The same, where a field that nobody asks for is an error.
    pub(crate) fn strict(self, is_strict: bool) -> Self {
        Self { is_strict, ..self }
    }

    /// The path of a field.
    pub(crate) fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    /// The value of a field, whatever it is.
    pub(crate) fn take(&mut self, field: &str) -> Option<Value> {
        self.map.remove(field).filter(|value| !value.is_null())
    }

    /// `read` makes a value of it, or `None` when it is not what is `expected`.
    pub(crate) fn get<T>(
        &mut self,
        field: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.take(field) else { return Ok(None) };
        match read(&value) {
            Some(read) => Ok(Some(read)),
            None => Err(wrong(&self.name(field), expected, &value)),
        }
    }

    pub(crate) fn text(&mut self, field: &str) -> Result<Option<String>> {
        self.get(field, "a string", |value| value.as_str().map(str::to_owned))
    }

    pub(crate) fn boolean(&mut self, field: &str) -> Result<Option<bool>> {
        self.get(field, "true or false", Value::as_bool)
    }

    pub(crate) fn integer(
        &mut self,
        field: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>> {
        let expected = format!("an integer from {} to {}", range.start(), range.end());
        self.get(field, &expected, |value| integer(value).filter(|x| range.contains(x)))
    }

    pub(crate) fn count(
        &mut self,
        field: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>> {
        let signed = *range.start() as i64..=*range.end() as i64;
        Ok(self.integer(field, signed)?.map(|x| x as usize))
    }

    pub(crate) fn number(
        &mut self,
        field: &str,
        range: RangeInclusive<f32>,
    ) -> Result<Option<f32>> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        self.get(field, &expected, |value| {
            // Checked as the f32 that is used.
            value.as_f64().map(|x| x as f32).filter(|x| range.contains(x))
        })
    }

    pub(crate) fn list(&mut self, field: &str) -> Result<Option<Vec<Value>>> {
        self.get(field, "an array", |value| value.as_array().cloned())
    }

    pub(crate) fn object(&mut self, field: &str) -> Result<Option<Map<String, Value>>> {
        self.get(field, "an object", |value| value.as_object().cloned())
    }

    /// The fields of an object in this one.
    pub(crate) fn fields(&mut self, field: &str) -> Result<Option<Self>> {
        let Some(value) = self.take(field) else { return Ok(None) };
        Self::at(&self.name(field), value).map(|fields| Some(fields.strict(self.is_strict)))
    }

    /// One of several words.
    pub(crate) fn word(
        &mut self,
        field: &str,
        words: &[&'static str],
    ) -> Result<Option<&'static str>> {
        let expected = format!("one of {words:?}");
        self.get(field, &expected, |value| {
            let given = value.as_str()?;
            words.iter().copied().find(|word| *word == given)
        })
    }

    /// What has to be there.
    pub(crate) fn required<T>(&self, field: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| ApiError::field(self.name(field), "this field is required"))
    }

    /// Says which fields nobody asked for, in the log and to the client; it is an error if there may be none.
    pub(crate) fn finish(self) -> Result<()> {
        let names = self.map.iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name);
        let names: Vec<String> =
            names.take(MAX_NAMES).map(|name| format!("{}{}", self.path, plain(name))).collect();
        if let Some(first) = names.first().filter(|_| self.is_strict) {
            let error = ApiError::field(
                first,
                "this field is not known, and the server runs with --strict-fields",
            );
            return Err(error.with_code("unknown_field"));
        }
        if !names.is_empty() {
            tracing::debug!(fields = ?names, "ignored");
        }
        ignore(names);
        Ok(())
    }
}

/// Tells the client of these names that they were ignored.
pub(crate) fn ignore(names: Vec<String>) {
    // Outside of a request there is nobody to tell.
    let _ = IGNORED.try_with(|ignored| {
        let mut ignored = ignored.borrow_mut();
        let room = MAX_NAMES.saturating_sub(ignored.len());
        ignored.extend(names.into_iter().take(room));
    });
}

/// An integer, also one that is written as `5.0`.
pub(crate) fn integer(value: &Value) -> Option<i64> {
    let whole = |x: &f64| x.fract() == 0.0 && x.abs() < 9e15;
    value.as_i64().or_else(|| value.as_f64().filter(whole).map(|x| x as i64))
}

/// A token id.
pub(crate) fn token(value: &Value) -> Option<u32> {
    u32::try_from(integer(value)?).ok()
}

/// The error of a value that is not what it should be.
pub(crate) fn wrong(path: &str, expected: &str, value: &Value) -> ApiError {
    ApiError::field(path, format!("expected {expected}, found {}", found(value)))
}

fn found(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) => shown(&number.to_string()),
        Value::String(text) => format!("the string {:?}", shown(text)),
        Value::Array(items) => format!("an array of {}", items.len()),
        Value::Object(_) => "an object".into(),
    }
}

/// A name as it may stand in a header, among others.
fn plain(name: &str) -> String {
    let name = name.chars().take(MAX_NAME);
    name.map(|c| if c.is_ascii_graphic() && c != ',' { c } else { '?' }).collect()
}

/// The start of a text that a client chose.
fn shown(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn message<T: std::fmt::Debug>(result: Result<T>) -> String {
        result.unwrap_err().message
    }

    #[test]
    fn a_wrong_value_is_named_with_what_was_expected_and_found() {
        let mut fields = Fields::of(json!({
            "temperature": "hot", "n": 1e9, "stop": [1], "stream": 0, "options": {"usage": "yes"}
        }))
        .unwrap();
        assert_eq!(
            message(fields.number("temperature", 0.0..=2.0)),
            "`temperature`: expected a number from 0 to 2, found the string \"hot\""
        );
        assert_eq!(
            message(fields.count("n", 1..=8)),
            "`n`: expected an integer from 1 to 8, found 1000000000.0"
        );
        assert_eq!(message(fields.text("stop")), "`stop`: expected a string, found an array of 1");
        assert_eq!(message(fields.boolean("stream")), "`stream`: expected true or false, found 0");
        let mut options = fields.fields("options").unwrap().unwrap();
        assert_eq!(options.boolean("usage").unwrap_err().param.as_deref(), Some("options.usage"));
        assert_eq!(
            message(Fields::of(json!([])).map(|_| ())),
            "body: expected a JSON object, found an array of 0"
        );
    }

    #[test]
    fn null_is_absent_and_whole_floats_are_integers() {
        let mut fields = Fields::of(json!({"a": null, "b": 5.0, "c": 5.5})).unwrap();
        assert_eq!(fields.text("a").unwrap(), None);
        assert_eq!(fields.count("b", 0..=9).unwrap(), Some(5));
        assert!(fields.count("c", 0..=9).is_err());
        assert!(fields.required::<()>("d", None).unwrap_err().message.contains("`d`"));
    }

    #[tokio::test]
    async fn p_json_object_schema_ignored_fields_that_nobody_asks_for_are_told_or_refused() {
        let fields =
            || Fields::of(json!({"x": 1, "gone": null, "a\nb,c": [], "known": 5})).unwrap();
        let read = |mut fields: Fields| {
            fields.count("known", 0..=9)?;
            fields.finish()
        };
        let (result, ignored) = scope(async { read(fields()) }).await;
        assert!(result.is_ok());
        assert_eq!(ignored, ["x", "a?b?c"]);
        let error = read(fields().strict(true)).unwrap_err();
        assert_eq!((error.param.as_deref(), error.code), (Some("x"), Some("unknown_field")));
        assert!(read(Fields::of(json!({"known": 5, "x": null})).unwrap().strict(true)).is_ok());
    }

    #[test]
    fn an_error_repeats_the_start_of_a_long_value() {
        let mut fields = Fields::of(json!({"role": "x".repeat(1000)})).unwrap();
        assert!(message(fields.word("role", &["user"])).len() < 120);
    }
}
