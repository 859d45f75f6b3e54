//! JSON objects in which a repeated key is an error.
//!
//! serde_json takes the last of two equal keys. Another reader takes the first, and then one file
//! is two models; so our files may not have them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

use super::entry::quoted;

/// An object whose keys are distinct; errors of a value name its key.
pub(super) struct UniqueMap<V>(pub(super) BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object<V>(PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for Object<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
                let mut map = BTreeMap::new();
                while let Some(key) = access.next_key::<String>()? {
                    match map.entry(key) {
                        Entry::Vacant(slot) => {
                            let value = named("key", slot.key(), access.next_value())?;
                            slot.insert(value);
                        }
                        Entry::Occupied(slot) => return Err(duplicate("key", slot.key())),
                    }
                }
                Ok(UniqueMap(map))
            }
        }
        deserializer.deserialize_map(Object(PhantomData))
    }
}

/// Puts in front of an error whose value it is about.
pub(super) fn named<T, E: Error>(what: &str, name: &str, result: Result<T, E>) -> Result<T, E> {
    result.map_err(|e| E::custom(format_args!("{what} {}: {e}", quoted(name))))
}

/// The error for a second `name`.
pub(super) fn duplicate<E: Error>(what: &str, name: &str) -> E {
    E::custom(format_args!("duplicate {what} {}", quoted(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<BTreeMap<String, u8>, String> {
        serde_json::from_str::<UniqueMap<u8>>(json).map(|map| map.0).map_err(|e| e.to_string())
    }

    #[test]
    fn distinct_keys_are_kept() {
        assert_eq!(parse(r#"{"a":1,"b":2}"#), Ok([("a".into(), 1), ("b".into(), 2)].into()));
    }

    #[test]
    fn equal_keys_are_refused_however_they_are_spelled() {
        let message = parse(r#"{"a":1,"\u0061":1}"#).unwrap_err();
        assert_eq!(message, "duplicate key `a` at line 1 column 15");
    }

    #[test]
    fn an_error_names_the_key_of_the_value() {
        assert!(parse(r#"{"a":1,"b":"2"}"#).unwrap_err().starts_with("key `b`: invalid type"));
        assert!(parse("[]").unwrap_err().contains("expected an object"));
    }
}
