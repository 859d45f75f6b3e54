//! Tests, as Jinja calls them: what stands after `is`.

use std::rc::Rc;

use super::filters::has_filter;
use super::run::{Given, Run};
use super::syntax::{Compare, Math};
use super::value::{ObjectKind, Value};
use super::{Failure, Meter, Result, methods, operators};

const TESTS: [&str; 36] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
];

pub(super) fn has_test(name: &str) -> bool {
    TESTS.contains(&name) || matches!(name, "true" | "undefined" | "upper")
}

impl Run<'_> {
    /// `value is name(..)`.
    pub(super) fn test(&mut self, name: &str, value: &Value, given: Given) -> Result<bool> {
        let meter = self.meter;
        if let Some(text) = value.as_text() {
            meter.bytes(text.len())?;
        }
        let compare = match name {
            "eq" | "==" | "equalto" => Some(Compare::Eq),
            "ne" | "!=" => Some(Compare::Ne),
            "lt" | "<" | "lessthan" => Some(Compare::Lt),
            "le" | "<=" => Some(Compare::Le),
            "gt" | ">" | "greaterthan" => Some(Compare::Gt),
            "ge" | ">=" => Some(Compare::Ge),
            "in" => Some(Compare::In),
            _ => None,
        };
        if let Some(compare) = compare {
            let [other] = given.bind(name, [""], 1)?;
            return operators::compare(compare, value, &other.unwrap_or(Value::None), meter);
        }
        match name {
            "sameas" => {
                let [other] = given.bind(name, ["other"], 1)?;
                return same(value, &other.unwrap_or(Value::None), meter);
            }
            "divisibleby" => {
                let [number] = given.bind(name, ["num"], 1)?;
                let number = number.unwrap_or(Value::None);
                let rest = operators::math(Math::Rem, value, &number, meter)?;
                return Ok(!rest.is_true());
            }
            _ => {}
        }
        given.bind::<0>(name, [], 0)?;
        let rest_of_two = || {
            let rest = operators::math(Math::Rem, value, &Value::Int(2), meter)?;
            operators::equal(&rest, &Value::Int(1), meter)
        };
        Ok(match name {
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "integer" => matches!(value, Value::Int(_)),
            "float" => matches!(value, Value::Float(_)),
            "number" => matches!(value, Value::Int(_) | Value::Float(_) | Value::Bool(_)),
            "string" => value.as_text().is_some(),
            "mapping" => matches!(value, Value::Dict(_)),
            "sequence" => matches!(
                value,
                Value::Undefined(_)
                    | Value::Text(_)
                    | Value::Markup(_)
                    | Value::List(_)
                    | Value::Tuple(_)
                    | Value::Dict(_)
                    | Value::Range(_)
            ),
            "iterable" => value.is_iterable(),
            "callable" => value.is_callable(),
            "escaped" => matches!(value, Value::Markup(_)),
            "odd" => rest_of_two()?,
            "even" => !rest_of_two()?,
            "lower" => methods::is_lower(&value.text(meter)?),
            "upper" => methods::is_upper(&value.text(meter)?),
            "filter" => value.as_text().is_some_and(|name| has_filter(name)),
            "test" => value.as_text().is_some_and(|name| has_test(name)),
            _ => return Err(Failure::new(format!("an unknown test `{}`", name.escape_debug()))),
        })
    }
}

/// Whether two values are one object in Python, as far as that can be told.
fn same(a: &Value, b: &Value, meter: &Meter) -> Result<bool> {
    Ok(match (a, b) {
        (Value::List(a), Value::List(b)) => Rc::ptr_eq(a, b),
        (Value::Tuple(a), Value::Tuple(b)) => Rc::ptr_eq(a, b),
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
        (Value::Object(ObjectKind::Namespace, a), Value::Object(ObjectKind::Namespace, b)) => {
            a == b
        }
        _ => a.kind() == b.kind() && operators::equal(a, b, meter)?,
    })
}
