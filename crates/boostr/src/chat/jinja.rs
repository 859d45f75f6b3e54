//! The engine, set up as transformers sets up Jinja.

use std::borrow::Cow;
use std::error::Error as _;
use std::fmt;
use std::io::{self, Write};
use std::sync::LazyLock;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use regex::{Captures, Regex};
use serde_json::Map;

use super::{clock, marks, methods, python};

/// What a template says by `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// The words of `raise_exception`, if it is what ended the rendering.
pub(super) fn raised(error: &Error) -> Option<String> {
    Some(error.source()?.downcast_ref::<Raised>()?.0.clone())
}

/// An environment without templates, in which a rendering may take `fuel` steps.
pub(super) fn environment(fuel: u64) -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_fuel(Some(fuel));
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(methods::call);
    env.set_formatter(|out, _, value| match value.as_str() {
        Some(text) => Ok(out.write_str(text)?),
        None => Ok(out.write_str(&python::str(value)?)?),
    });
    env.remove_global("debug");
    env.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        let words = python::str(&message)?;
        Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(words)))
    });
    env.add_filter("string", |value: Value| python::str(&value));
    env.add_filter("join", join);
    env.add_filter("tojson", to_json);
    env.add_filter(ANSWER, |text: &str| {
        python::bounded(text)?;
        Ok::<_, Error>(marks::answer(text))
    });
    // In Python what has a length and items is a sequence, and what can be looped over is iterable.
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
    });
    env.add_test("iterable", |value: &Value| {
        use ValueKind::{Iterable, Map, Seq, String, Undefined};
        matches!(value.kind(), Seq | Map | String | Iterable | Undefined)
    });
    Ok(env)
}

/// `join(separator="", attribute=None)`: the items, or an attribute of each, as texts.
#[expect(clippy::needless_pass_by_value, reason = "the signature of a filter")]
fn join(list: &Value, separator: Option<String>, options: Kwargs) -> Result<String, Error> {
    let separator = separator.or(options.get("d")?).unwrap_or_default();
    let attribute: Option<String> = options.get("attribute")?;
    options.assert_all_used()?;
    let mut joined = String::new();
    for (i, mut item) in list.try_iter()?.enumerate() {
        for name in attribute.iter().flat_map(|path| path.split('.')) {
            item = item.get_attr(name)?;
        }
        joined.push_str(if i > 0 { &separator } else { "" });
        joined.push_str(&python::str(&item)?);
        python::bounded(&joined)?;
    }
    Ok(joined)
}

/// `tojson`, with the options of `json.dumps` that transformers gives it.
#[expect(clippy::needless_pass_by_value, reason = "the signature of a filter")]
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?.min(MAX_INDENT)),
        }),
    };
    let separators: Option<Vec<String>> = options.get("separators")?;
    let separators = match separators.as_deref() {
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => {
            let reason = "tojson: expected two separators";
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
        None => [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned),
    };
    let json = python::Json {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent,
        separators,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    json.dumps(value)
}

/// Widest indent of JSON.
const MAX_INDENT: usize = 64;

/// The filter that marks what the assistant says.
const ANSWER: &str = "boostr_answer";

static GENERATION: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})").expect("the pattern is valid")
});

/// `source` with blocks that show what they enclose in place of `{% generation %}`, which only marks what the
/// assistant says. Variables that are set inside are not seen after it, as in Python.
pub(super) fn without_generation(source: &str) -> String {
    GENERATION.replace_all(source, "${1}${2}with${3}").into_owned()
}

/// The same, with what they enclose put between marks; `None` when there is no such block.
pub(super) fn with_answers(source: &str) -> Option<String> {
    let marked = GENERATION.replace_all(source, |tag: &Captures<'_>| {
        let (open, close) = (&tag[1], &tag[3]);
        match tag.get(2) {
            None => format!("{open}with %}}{{% filter {ANSWER}{close}"),
            Some(_) => format!("{open}endfilter %}}{{% endwith{close}"),
        }
    });
    matches!(marked, Cow::Owned(_)).then(|| marked.into_owned())
}

/// The text of the template `name` with these variables, at this moment.
pub(super) fn render(
    env: &Environment<'_>,
    name: &str,
    variables: &Map<String, serde_json::Value>,
    now: SystemTime,
) -> Result<String, Error> {
    let clock = Value::from_function(move |format: &str| clock::strftime(now, format));
    let variables = variables.iter().map(|(name, value)| (name.clone(), Value::from(Serde(value))));
    let context = Value::from_pairs(variables.chain([("strftime_now".to_owned(), clock)]));
    let mut text = Bounded(Vec::new());
    env.get_template(name)?.render_captured_to(context, &mut text)?;
    String::from_utf8(text.0).map_err(|error| {
        Error::new(ErrorKind::InvalidOperation, "text is not UTF-8").with_source(error)
    })
}

/// Takes as many bytes as a text may have.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > python::MAX_TEXT {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
