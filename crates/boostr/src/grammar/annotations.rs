//! What a schema says beyond what a grammar knows, where the answer is valid all the same.
//!
//! - An unknown `format` is an annotation, as JSON Schema has it since its draft 2019-09. Its `pattern`, if it has one,
//!   still counts.
//! - `propertyNames` of any text says nothing. One of few names is `properties`, and one of a pattern or a length is
//!   `patternProperties`.

use serde_json::{Map, Value, json};

/// Formats that a grammar knows.
const FORMATS: [&str; 11] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "unknown",
];

/// Keywords that say nothing about a value.
const ANNOTATIONS: [&str; 8] = [
    "$comment",
    "default",
    "deprecated",
    "description",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
];

/// Keywords whose value is a schema, or a list of them.
const SCHEMAS: [&str; 13] = [
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "oneOf",
    "prefixItems",
    "propertyNames",
    "then",
];

/// Keywords whose value has schemas by names.
const NAMED: [&str; 5] =
    ["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"];

/// The schemas that stand directly in one, each with its place there.
pub(super) fn parts(schema: &Value) -> Vec<(String, &Value)> {
    let mut parts = Vec::new();
    for (key, value) in schema.as_object().into_iter().flatten() {
        match value {
            Value::Object(named) if NAMED.contains(&key.as_str()) => {
                parts.extend(named.iter().map(|(name, part)| (format!("{key}.{name}"), part)));
            }
            Value::Array(list) if SCHEMAS.contains(&key.as_str()) => {
                parts
                    .extend(list.iter().enumerate().map(|(i, part)| (format!("{key}[{i}]"), part)));
            }
            Value::Object(_) if SCHEMAS.contains(&key.as_str()) => parts.push((key.clone(), value)),
            _ => {}
        }
    }
    parts
}

/// Takes out what says nothing, and says otherwise what can be.
pub(super) fn simplify(schema: &mut Value) {
    let Value::Object(fields) = schema else { return };
    if fields.get("format").and_then(Value::as_str).is_some_and(|name| !FORMATS.contains(&name)) {
        fields.remove("format");
    }
    property_names(fields);
    for (key, value) in fields {
        match value {
            Value::Object(named) if NAMED.contains(&key.as_str()) => {
                named.values_mut().for_each(simplify);
            }
            Value::Array(list) if SCHEMAS.contains(&key.as_str()) => {
                list.iter_mut().for_each(simplify);
            }
            Value::Object(_) if SCHEMAS.contains(&key.as_str()) => simplify(value),
            _ => {}
        }
    }
}

fn property_names(fields: &mut Map<String, Value>) {
    let Some(names) = fields.get("propertyNames") else { return };
    let empty = Map::new();
    let says: Vec<(&str, &Value)> = match names {
        Value::Bool(true) => Vec::new(),
        Value::Object(names) => names.iter().map(|(key, value)| (key.as_str(), value)).collect(),
        _ => return,
    };
    let is_known_format = |value: &Value| value.as_str().is_none_or(|name| FORMATS.contains(&name));
    let says: Vec<(&str, &Value)> = says
        .into_iter()
        .filter(|(key, value)| {
            let is_type = *key == "type" && *value == "string";
            !is_type && !ANNOTATIONS.contains(key) && (*key != "format" || is_known_format(value))
        })
        .collect();
    let properties = fields.get("properties").and_then(Value::as_object).unwrap_or(&empty);
    let has_patterns = fields.contains_key("patternProperties");
    let rest = || fields.get("additionalProperties").cloned().unwrap_or(true.into());
    let replaced = match says[..] {
        [] => None,
        [("enum", Value::Array(names))] if !has_patterns => {
            let names: Option<Vec<&str>> = names.iter().map(Value::as_str).collect();
            let Some(names) = names else { return };
            if !properties.keys().all(|name| names.contains(&name.as_str())) {
                return;
            }
            let of = |name: &str| properties.get(name).cloned().unwrap_or_else(rest);
            let all: Map<String, Value> =
                names.into_iter().map(|name| (name.into(), of(name))).collect();
            Some(("properties", Value::Object(all)))
        }
        [("pattern", Value::String(pattern))] if !has_patterns && properties.is_empty() => {
            Some(("patternProperties", json!({ pattern: rest() })))
        }
        _ if !has_patterns && properties.is_empty() => {
            let (mut least, mut most) = (0, None);
            for (key, value) in says {
                match (key, value.as_u64()) {
                    ("minLength", Some(length)) => least = length,
                    ("maxLength", Some(length)) => most = Some(length),
                    _ => return,
                }
            }
            let most = most.map_or_else(String::new, |most| most.to_string());
            let pattern = format!("^[\\s\\S]{{{least},{most}}}$");
            Some(("patternProperties", json!({ pattern: rest() })))
        }
        _ => return,
    };
    if let Some((key, value)) = replaced {
        fields.insert(key.into(), value);
        fields.insert("additionalProperties".into(), false.into());
    }
    fields.remove("propertyNames");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn simple(mut schema: Value) -> Value {
        simplify(&mut schema);
        schema
    }

    #[test]
    fn p_schema_format_unknown_annotations_are_taken_out() {
        for format in ["nanoid", "cuid2", "base64", "jwt", "e164", "path", "color", "int32"] {
            let schema =
                json!({"properties": {"v": {"type": "string", "format": format, "pattern": "^a"}}});
            let expected = json!({"properties": {"v": {"type": "string", "pattern": "^a"}}});
            assert_eq!(simple(schema), expected);
        }
        let kept = json!({"anyOf": [{"format": "uuid"}], "enum": [{"format": "x"}], "const": {"format": "x"}});
        assert_eq!(simple(kept.clone()), kept);
        let inner = json!({"items": [{"format": "x"}], "$defs": {"format": {"format": "x"}}});
        assert_eq!(simple(inner), json!({"items": [{}], "$defs": {"format": {}}}));
    }

    #[test]
    fn p_schema_format_unknown_names_of_properties_are_said_otherwise() {
        let record = |names: Value| json!({"propertyNames": names, "additionalProperties": {"type": "null"}});
        let plain = json!({"additionalProperties": {"type": "null"}});
        for names in [
            json!({"type": "string"}),
            json!({}),
            json!(true),
            json!({"format": "nanoid", "title": "x"}),
        ] {
            assert_eq!(simple(record(names)), plain);
        }
        let nothing = json!({"type": "null"});
        assert_eq!(
            simple(record(json!({"type": "string", "enum": ["a", "b"]}))),
            json!({"properties": {"a": nothing, "b": nothing}, "additionalProperties": false})
        );
        assert_eq!(
            simple(record(json!({"pattern": "^x"}))),
            json!({"patternProperties": {"^x": nothing}, "additionalProperties": false})
        );
        assert_eq!(
            simple(record(json!({"minLength": 1}))),
            json!({"patternProperties": {"^[\\s\\S]{1,}$": nothing}, "additionalProperties": false})
        );
        // What cannot be said otherwise stays, and is refused.
        let hard = json!({"propertyNames": {"pattern": "^x"}, "properties": {"y": {}}});
        assert_eq!(simple(hard.clone()), hard);
    }
}
