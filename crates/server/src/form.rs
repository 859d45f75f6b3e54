//! What the text of an answer has to be, by the names of several servers.
//!
//! | field | of | |
//! |---|---|---|
//! | `response_format` | OpenAI | `json_object`, also with a `schema` beside it (llama.cpp); `json_schema`; `regex` with a `pattern`; `grammar` with a `grammar` |
//! | `json_schema`, `grammar` | llama.cpp | a schema; rules in GBNF or Lark |
//! | `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar` | vLLM | |
//! | `structured_outputs` | vLLM | the same without `guided_`, and `json_object` |
//! | `regex`, `ebnf` | SGLang | |

use axum::http::StatusCode;
use boostr::backend::Backend;
use boostr::grammar::Grammar;
use boostr::sample::Constraint;
use serde_json::Value;
use utoipa::ToSchema;

use crate::app::Loaded;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, wrong};
use crate::options::texts;

/// Fields about the form of the text, of which one may be given.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct FormFields {
    /// `{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"name", "schema"}}`
    #[schema(value_type = Option<Object>)]
    response_format: Option<Value>,
    /// The JSON schema of the text, by llama.cpp's name
    #[schema(value_type = Option<Object>)]
    json_schema: Option<Value>,
    /// Rules in GBNF or Lark, by llama.cpp's name
    grammar: Option<String>,
    /// The JSON schema, by vLLM's name
    #[schema(value_type = Option<Value>)]
    guided_json: Option<Value>,
    /// A regular expression that matches all of the text
    guided_regex: Option<String>,
    /// The texts that it may be
    guided_choice: Option<Vec<String>>,
    /// Rules in GBNF or Lark
    guided_grammar: Option<String>,
    /// One of `json`, `regex`, `choice`, `grammar`, `json_object`
    #[schema(value_type = Option<Object>)]
    structured_outputs: Option<Value>,
}

/// The form of a text.
#[derive(Debug)]
pub(crate) struct Form {
    /// The field that asks for it.
    param: String,
    grammar: Grammar,
}

impl Form {
    /// Takes the fields that ask for a form; there may be one.
    pub(crate) fn read(fields: &mut Fields) -> Result<Option<Self>> {
        let mut found = Vec::new();
        found.extend(response_format(fields)?);
        for (field, kind) in [
            ("json_schema", Kind::Json),
            ("grammar", Kind::Rules),
            ("regex", Kind::Regex),
            ("ebnf", Kind::Rules),
            ("guided_json", Kind::Json),
            ("guided_regex", Kind::Regex),
            ("guided_choice", Kind::Choice),
            ("guided_grammar", Kind::Rules),
        ] {
            found.extend(kind.read(fields, field)?);
        }
        if let Some(mut inner) = fields.fields("structured_outputs")? {
            for (field, kind) in [
                ("json", Kind::Json),
                ("regex", Kind::Regex),
                ("choice", Kind::Choice),
                ("grammar", Kind::Rules),
            ] {
                found.extend(kind.read(&mut inner, field)?);
            }
            if inner.boolean("json_object")? == Some(true) {
                found.push(Self {
                    param: inner.name("json_object"),
                    grammar: Grammar::json_object(),
                });
            }
            inner.finish()?;
        }
        let mut found = found.into_iter();
        let first = found.next();
        match (&first, found.next()) {
            (Some(first), Some(second)) => {
                Err(ApiError::field(second.param, format!("not together with `{}`", first.param)))
            }
            _ => Ok(first),
        }
    }

    /// The form of a grammar that the field `param` has.
    pub(crate) fn new(param: String, grammar: Grammar) -> Self {
        Self { param, grammar }
    }

    /// The field that asks for it.
    pub(crate) fn param(&self) -> &str {
        &self.param
    }

    /// What holds an answer to it. Takes a while.
    pub(crate) fn constraint<B: Backend>(&self, loaded: &Loaded<B>) -> Result<Box<dyn Constraint>> {
        constraint(loaded, &self.grammar).map_err(|error| unsupported(&self.param, &error))
    }
}

/// What holds an answer to a grammar, if the grammar can be done.
pub(crate) fn constraint<B: Backend>(
    loaded: &Loaded<B>,
    grammar: &Grammar,
) -> Result<Box<dyn Constraint>, Fault> {
    loaded.vocabulary().map_err(Fault::Vocabulary)?.constraint(grammar).map_err(Fault::Grammar)
}

/// Why an answer cannot be held to a grammar.
pub(crate) enum Fault {
    Vocabulary(ApiError),
    Grammar(boostr::Error),
}

/// 422: it is written as it should be, and more than can be done.
pub(crate) fn unsupported(param: &str, fault: &Fault) -> ApiError {
    let error = match fault {
        Fault::Vocabulary(error) => return error.clone(),
        Fault::Grammar(boostr::Error::Argument { reason, .. }) => ApiError::field(param, reason),
        Fault::Grammar(error) => ApiError::field(param, error.to_string()),
    };
    let status = StatusCode::UNPROCESSABLE_ENTITY;
    ApiError { status, ..error.with_code("unsupported_schema") }
}

#[derive(Clone, Copy)]
enum Kind {
    Json,
    Regex,
    Choice,
    Rules,
}

impl Kind {
    fn read(self, fields: &mut Fields, field: &str) -> Result<Option<Form>> {
        let Some(value) = fields.take(field) else { return Ok(None) };
        // Some clients send what they do not use.
        if value == "" {
            return Ok(None);
        }
        let param = fields.name(field);
        let grammar = match self {
            Self::Json => match &value {
                Value::Object(_) => Grammar::json_schema(&value),
                Value::String(text) => {
                    let schema = serde_json::from_str(text);
                    let schema = schema
                        .map_err(|error| ApiError::field(&param, format!("not JSON: {error}")))?;
                    Grammar::json_schema(&schema)
                }
                other => return Err(wrong(&param, "a JSON schema", other)),
            },
            Self::Regex => Grammar::regex(text(&param, &value)?),
            Self::Rules => Grammar::rules(text(&param, &value)?),
            Self::Choice => match texts(&value).filter(|_| value.is_array()) {
                Some(texts) => Grammar::choice(&texts),
                None => return Err(wrong(&param, "an array of strings", &value)),
            },
        };
        match grammar {
            Ok(grammar) => Ok(Some(Form { param, grammar })),
            Err(error) => Err(ApiError::of_input(&param, &error)),
        }
    }
}

fn text<'a>(param: &str, value: &'a Value) -> Result<&'a str> {
    value.as_str().ok_or_else(|| wrong(param, "a string", value))
}

fn response_format(fields: &mut Fields) -> Result<Option<Form>> {
    let param = fields.name("response_format");
    let Some(mut format) = fields.fields("response_format")? else { return Ok(None) };
    let kind = format.word("type", &["text", "json_object", "json_schema", "regex", "grammar"])?;
    let form = match format.required("type", kind)? {
        "json_object" => match Kind::Json.read(&mut format, "schema")? {
            None => Some(Form { param: param.clone(), grammar: Grammar::json_object() }),
            form => form,
        },
        "json_schema" => match Kind::Json.read(&mut format, "schema")? {
            None => {
                let inner = format.fields("json_schema")?;
                let mut inner = format.required("json_schema", inner)?;
                inner.text("name")?;
                inner.text("description")?;
                inner.boolean("strict")?;
                let schema = inner.object("schema")?;
                let schema = inner.required("schema", schema)?;
                inner.finish()?;
                let grammar = Grammar::json_schema(&schema.into());
                let grammar = grammar.map_err(|error| ApiError::of_input(&param, &error))?;
                Some(Form { param: param.clone(), grammar })
            }
            form => form,
        },
        "regex" => {
            let form = Kind::Regex.read(&mut format, "pattern")?;
            Some(format.required("pattern", form)?)
        }
        "grammar" => {
            let form = Kind::Rules.read(&mut format, "grammar")?;
            Some(format.required("grammar", form)?)
        }
        _ => None,
    };
    format.finish()?;
    // Errors are about the whole of it, as OpenAI has them.
    Ok(form.map(|form| Form { param, ..form }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: Value) -> Result<Option<Form>> {
        Form::read(&mut Fields::of(body).unwrap())
    }

    #[test]
    fn p_json_object_schema_ignored_forms_have_the_names_of_several_servers() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let grammar = Grammar::json_schema(&schema).unwrap();
        for body in [
            json!({"response_format": {"type": "json_object", "schema": schema}}),
            json!({"response_format": {"type": "json_schema", "schema": schema}}),
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
            json!({"json_schema": schema}),
            json!({"json_schema": schema.to_string()}),
            json!({"guided_json": schema}),
            json!({"guided_json": schema.to_string(), "guided_regex": null, "grammar": ""}),
            json!({"structured_outputs": {"json": schema}}),
        ] {
            assert_eq!(read(body.clone()).unwrap().unwrap().grammar, grammar, "{body}");
        }
        for body in [
            json!({"guided_choice": ["yes", "no"]}),
            json!({"structured_outputs": {"choice": ["yes", "no"]}}),
        ] {
            assert_eq!(
                read(body).unwrap().unwrap().grammar,
                Grammar::choice(&["yes", "no"]).unwrap()
            );
        }
        for body in [
            json!({"guided_regex": "a+"}),
            json!({"regex": "a+"}),
            json!({"structured_outputs": {"regex": "a+"}}),
            json!({"response_format": {"type": "regex", "pattern": "a+"}}),
        ] {
            assert_eq!(read(body).unwrap().unwrap().grammar, Grammar::regex("a+").unwrap());
        }
        for name in ["grammar", "guided_grammar", "ebnf"] {
            let rules = "start: \"a\"";
            assert_eq!(
                read(json!({name: rules})).unwrap().unwrap().grammar,
                Grammar::lark(rules).unwrap()
            );
        }
        let object = read(json!({"structured_outputs": {"json_object": true}})).unwrap().unwrap();
        assert_eq!(object.grammar, Grammar::json_object());
        assert!(read(json!({"response_format": {"type": "text"}})).unwrap().is_none());
    }

    #[test]
    fn what_is_no_form_is_named() {
        for (body, param) in [
            (json!({"guided_json": 1}), "guided_json"),
            (json!({"guided_json": "{"}), "guided_json"),
            (json!({"guided_choice": []}), "guided_choice"),
            (json!({"guided_choice": "yes"}), "guided_choice"),
            (json!({"structured_outputs": {"choice": [1]}}), "structured_outputs.choice"),
            (json!({"guided_regex": "a", "grammar": "start: \"a\""}), "guided_regex"),
            (json!({"response_format": {"type": "regex"}}), "response_format.pattern"),
        ] {
            let error = read(body.clone()).err().unwrap_or_else(|| panic!("{body} was taken"));
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
        }
    }
}
