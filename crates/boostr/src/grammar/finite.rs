//! Whether a schema that recurs describes a value that ends.

use std::collections::HashSet;

use serde_json::Value;

/// Most passes over the references; a schema that needs more is given the benefit of the doubt.
const MAX_PASSES: usize = 50;

/// Whether some value of finite size may be what the schema describes, as far as recursion goes: `{"$ref": "#"}` has none.
///
/// The set of references with a finite value is built from below: those that need no other, then those that need only
/// these, and so on.
pub(super) fn is_finite(root: &Value) -> bool {
    let mut open = HashSet::new();
    references(root, &mut open);
    let mut finite = HashSet::new();
    for _ in 0..MAX_PASSES {
        let before = finite.len();
        open.retain(|&reference| {
            let ends = target(root, reference).is_none_or(|schema| ends(schema, &finite));
            if ends {
                finite.insert(reference);
            }
            !ends
        });
        if open.is_empty() || finite.len() == before {
            return ends(root, &finite);
        }
    }
    true
}

fn references<'a>(schema: &'a Value, found: &mut HashSet<&'a str>) {
    match schema {
        Value::Object(fields) => {
            found.extend(fields.get("$ref").and_then(Value::as_str));
            fields.values().for_each(|value| references(value, found));
        }
        Value::Array(items) => items.iter().for_each(|value| references(value, found)),
        _ => {}
    }
}

fn target<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    match reference {
        "#" | "#/" => Some(root),
        _ => root.pointer(reference.strip_prefix('#')?),
    }
}

fn ends(schema: &Value, finite: &HashSet<&str>) -> bool {
    let Some(fields) = schema.as_object() else { return true };
    if fields.contains_key("enum") || fields.contains_key("const") {
        return true;
    }
    let list = |key: &str| fields.get(key).and_then(Value::as_array);
    if let Some(Value::String(reference)) = fields.get("$ref")
        && !finite.contains(reference.as_str())
    {
        return false;
    }
    if list("allOf").is_some_and(|all| !all.iter().all(|one| ends(one, finite))) {
        return false;
    }
    for any in [list("anyOf"), list("oneOf")].into_iter().flatten() {
        if !any.iter().any(|one| ends(one, finite)) {
            return false;
        }
    }
    let ends_as = |kind: &Value| match kind.as_str() {
        Some("object") => {
            list("required").into_iter().flatten().filter_map(Value::as_str).all(|name| {
                let field = fields.get("properties").and_then(|all| all.get(name));
                field.is_none_or(|field| ends(field, finite))
            })
        }
        Some("array") => {
            let needed = fields.get("minItems").and_then(Value::as_f64).unwrap_or(0.0) > 0.0;
            !needed || fields.get("items").is_none_or(|items| ends(items, finite))
        }
        _ => true,
    };
    match fields.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(ends_as),
        Some(kind) => ends_as(kind),
        None => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn recursion_ends_where_something_is_optional() {
        let node = |required: Value| json!({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": required});
        assert!(is_finite(&node(json!([]))));
        assert!(!is_finite(&node(json!(["next"]))));
        let list = |least: u32| json!({"type": "array", "items": {"$ref": "#"}, "minItems": least});
        assert!(is_finite(&list(0)));
        assert!(!is_finite(&list(1)));
        assert!(!is_finite(&json!({"$ref": "#"})));
        assert!(is_finite(&json!({"anyOf": [{"$ref": "#"}, {"type": "null"}]})));
        assert!(!is_finite(&json!({"allOf": [{"$ref": "#"}, {"type": "null"}]})));
        assert!(is_finite(
            &json!({"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1})
        ));
    }

    #[test]
    fn references_are_followed_from_one_to_the_next() {
        let chain = |last: Value| {
            json!({"$ref": "#/$defs/a", "$defs": {
                "a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 2},
                "b": {"type": "object", "properties": {"c": {"$ref": "#/$defs/c"}}, "required": ["c"]},
                "c": last,
            }})
        };
        assert!(is_finite(&chain(json!({"type": "integer"}))));
        assert!(is_finite(&chain(json!({"anyOf": [{"$ref": "#/$defs/a"}, {"const": 1}]}))));
        assert!(!is_finite(&chain(json!({"$ref": "#/$defs/a"}))));
        // What cannot be found is for others to say.
        assert!(is_finite(&json!({"$ref": "http://example.com"})));
    }
}
