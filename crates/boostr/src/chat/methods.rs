//! Methods that strings, dicts and lists have in Python, and templates call.
//!
//! Only those that change nothing: transformers renders in a sandbox where `list.append` and the like are
//! refused. Places in strings count characters.

use minijinja::value::{Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};

use super::python;

type Result<T = Value> = std::result::Result<T, Error>;

/// Calls `value.name(*args)` for a method that the engine does not know.
pub(super) fn call(_: &mut State, value: &Value, name: &str, args: &[Value]) -> Result {
    match value.kind() {
        ValueKind::String => of_string(value.as_str().unwrap_or_default(), name, args),
        ValueKind::Map => of_dict(value, name, args),
        ValueKind::Seq => of_list(value, name, args),
        _ => unknown(),
    }
}

fn unknown() -> Result {
    Err(ErrorKind::UnknownMethod.into())
}

fn invalid(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.into())
}

fn of_string(text: &str, name: &str, args: &[Value]) -> Result {
    let none = |result: Value| from_args::<()>(args).map(|()| result);
    let all = |test: fn(char) -> bool| none((!text.is_empty() && text.chars().all(test)).into());
    let has_case = |wanted: fn(char) -> bool, other: fn(char) -> bool| {
        none((text.chars().any(wanted) && !text.chars().any(other)).into())
    };
    Ok(match name {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            let is_cut = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
            let start = if name == "rstrip" { text } else { text.trim_start_matches(is_cut) };
            if name == "lstrip" { start } else { start.trim_end_matches(is_cut) }.into()
        }
        "split" | "rsplit" => {
            let (separator, most): (Option<&str>, Option<i64>) = from_args(args)?;
            // A number below 0 is none.
            let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
            split(text, separator, most, name == "rsplit")?
        }
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            lines(text, keep.unwrap_or(false))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            not_empty(separator)?;
            let found = if name == "partition" {
                text.split_once(separator).ok_or([text, "", ""])
            } else {
                text.rsplit_once(separator).ok_or(["", "", text])
            };
            {
                let pieces = found.map_or_else(|whole| whole, |(a, b)| [a, separator, b]);
                Tuple::from(pieces.map(Value::from)).into()
            }
        }
        "startswith" | "endswith" => {
            let (ends,): (&Value,) = from_args(args)?;
            let has = |end: &str| match name {
                "startswith" => text.starts_with(end),
                _ => text.ends_with(end),
            };
            match end_texts(ends) {
                Some(ends) => ends.iter().any(|end| has(end)).into(),
                None => return Err(invalid(format!("{name}: expected a string, or several"))),
            }
        }
        "removeprefix" | "removesuffix" => {
            let (end,): (&str,) = from_args(args)?;
            let rest = match name {
                "removeprefix" => text.strip_prefix(end),
                _ => text.strip_suffix(end),
            };
            rest.unwrap_or(text).into()
        }
        "replace" => {
            let (old, new, most): (&str, &str, Option<i64>) = from_args(args)?;
            replace(text, old, new, most)?.into()
        }
        "find" | "rfind" | "index" | "rindex" => {
            let (part,): (&str,) = from_args(args)?;
            let at = if name.starts_with('r') { text.rfind(part) } else { text.find(part) };
            match at {
                Some(at) => text[..at].chars().count().into(),
                None if name.ends_with("find") => (-1).into(),
                None => return Err(invalid("substring not found")),
            }
        }
        "count" => {
            let (part,): (&str,) = from_args(args)?;
            // An empty one is before and after every character.
            let count = text.matches(part).count();
            count.into()
        }
        "join" => {
            let (parts,): (&Value,) = from_args(args)?;
            let mut joined = String::new();
            for (i, part) in parts.try_iter()?.enumerate() {
                let part = part.as_str().ok_or_else(|| invalid("join: expected strings"))?;
                joined.push_str(if i > 0 { text } else { "" });
                joined.push_str(part);
                python::bounded(&joined)?;
            }
            joined.into()
        }
        "format" => format(text, args)?.into(),
        "upper" => return none(text.to_uppercase().into()),
        "lower" | "casefold" => return none(text.to_lowercase().into()),
        "title" => return none(title(text).into()),
        "capitalize" => return none(capitalized(text).into()),
        "isspace" => return all(is_space),
        "isdigit" | "isdecimal" | "isnumeric" => return all(char::is_numeric),
        "isalpha" => return all(char::is_alphabetic),
        "isalnum" => return all(char::is_alphanumeric),
        "isascii" => return none(text.is_ascii().into()),
        "islower" => return has_case(char::is_lowercase, char::is_uppercase),
        "isupper" => return has_case(char::is_uppercase, char::is_lowercase),
        _ => return unknown(),
    })
}

fn of_dict(dict: &Value, name: &str, args: &[Value]) -> Result {
    match name {
        "get" => {
            let (key, default): (&Value, Option<&Value>) = from_args(args)?;
            let found = dict.get_item(key)?;
            let default = || default.cloned().unwrap_or_else(|| Value::from(()));
            return Ok(if found.is_undefined() { default() } else { found });
        }
        "keys" | "values" | "items" | "copy" => from_args::<()>(args)?,
        _ => return unknown(),
    }
    if name == "copy" {
        return Ok(dict.clone());
    }
    let entries = dict.try_iter()?.map(|key| {
        let value = dict.get_item(&key)?;
        Ok(match name {
            "keys" => key,
            "values" => value,
            _ => Tuple::from([key, value]).into(),
        })
    });
    entries.collect::<Result<Vec<Value>>>().map(Value::from)
}

fn of_list(list: &Value, name: &str, args: &[Value]) -> Result {
    match name {
        "count" => {
            let (wanted,): (&Value,) = from_args(args)?;
            Ok(list.try_iter()?.filter(|item| item == wanted).count().into())
        }
        "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let at = list.try_iter()?.position(|item| item == *wanted);
            at.map(Value::from).ok_or_else(|| invalid("index: not in the list"))
        }
        "copy" => from_args::<()>(args).map(|()| list.clone()),
        _ => unknown(),
    }
}

/// What Python takes for white space.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn not_empty(separator: &str) -> Result<()> {
    if separator.is_empty() { Err(invalid("empty separator")) } else { Ok(()) }
}

/// A string as one, a list of strings as all.
fn end_texts(value: &Value) -> Option<Vec<String>> {
    match value.as_str() {
        Some(text) => Some(vec![text.to_owned()]),
        None if value.kind() == ValueKind::Seq => {
            value.try_iter().ok()?.map(|item| Some(item.as_str()?.to_owned())).collect()
        }
        None => None,
    }
}

/// The pieces between separators, at most `most` cuts from the left, or from the right; without a separator those
/// between white space, of which none is left at the ends.
fn split(text: &str, separator: Option<&str>, most: usize, from_right: bool) -> Result {
    let cuts = most.saturating_add(1);
    Ok(match (separator, from_right) {
        (Some(separator), false) => {
            not_empty(separator)?;
            text.splitn(cuts, separator).collect()
        }
        (Some(separator), true) => {
            not_empty(separator)?;
            let mut pieces: Vec<&str> = text.rsplitn(cuts, separator).collect();
            pieces.reverse();
            pieces.into_iter().collect()
        }
        (None, _) => {
            let mut pieces = Vec::new();
            let mut rest = text.trim_matches(is_space);
            while !rest.is_empty() {
                let cut = if pieces.len() == most {
                    None
                } else if from_right {
                    rest.rfind(is_space)
                } else {
                    rest.find(is_space)
                };
                let Some(at) = cut else {
                    pieces.push(rest);
                    break;
                };
                if from_right {
                    let space = rest[at..].chars().next().map_or(0, char::len_utf8);
                    pieces.push(&rest[at + space..]);
                    rest = rest[..at].trim_end_matches(is_space);
                } else {
                    pieces.push(&rest[..at]);
                    rest = rest[at..].trim_start_matches(is_space);
                }
            }
            if from_right {
                pieces.reverse();
            }
            pieces.into_iter().collect()
        }
    })
}

fn lines(text: &str, keep_ends: bool) -> Value {
    let is_end = |c: char| matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let at = rest.find(is_end).unwrap_or(rest.len());
        let end = match rest[at..].chars().next() {
            Some('\r') if rest[at + 1..].starts_with('\n') => at + 2,
            Some(c) => at + c.len_utf8(),
            None => at,
        };
        lines.push(&rest[..if keep_ends { end } else { at }]);
        rest = &rest[end..];
    }
    lines.into_iter().collect()
}

/// `text` with `new` for `old`, the first `most` times if there is a number from 0 on.
pub(super) fn replace(text: &str, old: &str, new: &str, most: Option<i64>) -> Result<String> {
    let most = most.and_then(|most| usize::try_from(most).ok());
    // Counted first: the result may be longer than there is memory.
    let count = text.matches(old).count().min(most.unwrap_or(usize::MAX));
    if text.len().saturating_add(count.saturating_mul(new.len())) > python::MAX_TEXT {
        return Err(invalid(format!("replace: a text of more than {} bytes", python::MAX_TEXT)));
    }
    Ok(match most {
        Some(most) => text.replacen(old, new, most),
        None => text.replace(old, new),
    })
}

/// Letters after a letter in lower case, others in upper case.
pub(super) fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        if in_word {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        in_word = c.is_alphabetic();
    }
    out
}

fn capitalized(text: &str) -> String {
    let mut rest = text.chars();
    let first = rest.next().into_iter().flat_map(char::to_uppercase);
    first.chain(rest.as_str().to_lowercase().chars()).collect()
}

/// `"{} {0} {{".format(..)`: places by order or number, without format specifications.
fn format(text: &str, args: &[Value]) -> Result<String> {
    let mut out = String::new();
    let mut next = 0;
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let brace = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(brace) {
            out.push_str(brace);
            rest = after;
            continue;
        }
        let place = match rest.split_once('}') {
            Some((place, after)) if brace == "{" => {
                rest = after;
                place
            }
            _ => return Err(invalid("format: a single brace")),
        };
        let index = if place.is_empty() {
            next += 1;
            Some(next - 1)
        } else {
            place.parse().ok()
        };
        let value = index.and_then(|index: usize| args.get(index));
        let value = value.ok_or_else(|| invalid(format!("format: no value for `{{{place}}}`")))?;
        out.push_str(&python::str(value)?);
        python::bounded(&out)?;
    }
    Ok(out + rest)
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;

    /// What the expression gives, as Python writes it.
    fn eval(expression: &str) -> std::result::Result<String, String> {
        let mut env = Environment::new();
        env.set_unknown_method_callback(call);
        let value =
            env.compile_expression(expression).unwrap().eval(()).map_err(|e| e.to_string())?;
        let text = python::str(&Value::from(vec![value])).map_err(|e| e.to_string())?;
        Ok(text[1..text.len() - 1].to_owned())
    }

    #[test]
    fn methods_of_strings_give_what_python_gives() {
        for (expression, value) in [
            ("' \\n\\u001c a \\t'.strip()", "'a'"),
            ("'xxabcxx'.strip('x')", "'abc'"),
            ("'xxabcxx'.lstrip('x')", "'abcxx'"),
            ("'xxabcxx'.rstrip('x')", "'xxabc'"),
            ("'a,b,c'.split(',')", "['a', 'b', 'c']"),
            ("'a,b,c'.split(',', 1)", "['a', 'b,c']"),
            ("'a,b,c'.split(',', -1)", "['a', 'b', 'c']"),
            ("'a,b,c'.rsplit(',', 1)", "['a,b', 'c']"),
            ("''.split(',')", "['']"),
            ("''.split()", "[]"),
            ("'  a  b c '.split()", "['a', 'b', 'c']"),
            ("'  a  b c '.split(none, 1)", "['a', 'b c']"),
            ("'  a  b c '.rsplit(none, 1)", "['a  b', 'c']"),
            ("'a\\nb\\r\\nc\\n'.splitlines()", "['a', 'b', 'c']"),
            ("'a\\n\\nb'.splitlines(true)", "['a\\n', '\\n', 'b']"),
            ("'a=b=c'.partition('=')", "('a', '=', 'b=c')"),
            ("'a=b=c'.rpartition('=')", "('a=b', '=', 'c')"),
            ("'abc'.partition('=')", "('abc', '', '')"),
            ("'abc'.rpartition('=')", "('', '', 'abc')"),
            ("'abc'.startswith('ab')", "True"),
            ("'abc'.startswith(['x', 'ab'])", "True"),
            ("'abc'.endswith('b')", "False"),
            ("'abc'.endswith(('c', 'd'))", "True"),
            ("'abc'.removeprefix('a')", "'bc'"),
            ("'abc'.removesuffix('a')", "'abc'"),
            ("'aaa'.replace('a', 'b')", "'bbb'"),
            ("'aaa'.replace('a', 'b', 2)", "'bba'"),
            ("'aaa'.replace('a', 'b', -1)", "'bbb'"),
            ("'éab'.find('b')", "2"),
            ("'éab'.find('x')", "-1"),
            ("'ébab'.rfind('b')", "3"),
            ("'éab'.index('a')", "1"),
            ("'banana'.count('an')", "2"),
            ("'ab'.count('')", "3"),
            ("', '.join(['a', 'b'])", "'a, b'"),
            ("'{}-{}{{}}'.format('a', 1)", "'a-1{}'"),
            ("'{1}{0}'.format('a', none)", "'Nonea'"),
            ("'straße'.upper()", "'STRASSE'"),
            ("'ÄB'.lower()", "'äb'"),
            ("\"they're bill's 3d\".title()", "\"They'Re Bill'S 3D\""),
            ("'hELLO World'.capitalize()", "'Hello world'"),
            ("''.capitalize()", "''"),
            ("' \\t'.isspace()", "True"),
            ("''.isspace()", "False"),
            ("'12'.isdigit()", "True"),
            ("'a1'.isalpha()", "False"),
            ("'a1'.isalnum()", "True"),
            ("'a1'.islower()", "True"),
            ("'11'.isupper()", "False"),
            ("'é'.isascii()", "False"),
        ] {
            assert_eq!(eval(expression).as_deref(), Ok(value), "{expression}");
        }
    }

    #[test]
    fn methods_of_dicts_and_lists_give_what_python_gives() {
        for (expression, value) in [
            ("{'b': 1, 'a': 2}.items()", "[('b', 1), ('a', 2)]"),
            ("{'b': 1, 'a': 2}.keys()", "['b', 'a']"),
            ("{'b': 1, 'a': 2}.values()", "[1, 2]"),
            ("{'b': 1}.get('b')", "1"),
            ("{'b': none}.get('b', 2)", "None"),
            ("{'b': 1}.get('c')", "None"),
            ("{'b': 1}.get('c', 2)", "2"),
            ("{'b': 1}.copy()", "{'b': 1}"),
            ("[1, 2, 1].count(1)", "2"),
            ("[1, 2, 1].index(2)", "1"),
        ] {
            assert_eq!(eval(expression).as_deref(), Ok(value), "{expression}");
        }
    }

    #[test]
    fn what_python_refuses_is_an_error() {
        for expression in [
            "'a'.split('')",
            "'a'.partition('')",
            "'a'.index('b')",
            "'a'.upper(1)",
            "'a'.startswith(1)",
            "', '.join([1])",
            "'{'.format(1)",
            "'}'.format(1)",
            "'{} {}'.format(1)",
            "'{x}'.format(1)",
            "'a'.no_such_method()",
            "[1].append(2)",
            "[1].index(2)",
            "{}.update({})",
            "{}.pop('a')",
        ] {
            assert!(eval(expression).is_err(), "{expression}");
        }
    }
}
