//! Chat templates: a conversation as the text that its model was trained on.
//!
//! A template is a program in Jinja, part of a model's files, and so written by a stranger. It runs as jinja2 3.1 runs
//! it in the environment that transformers gives it; the tests compare with version 5.24:
//!
//! - blocks trimmed, `tojson`, `strftime_now`, `raise_exception`, `{% break %}`;
//! - `{% generation %}`, whose content is the assistant's for [`ChatTemplate::encode_answers`];
//! - methods of strings and dicts, and values printed as Python prints them.
//!
//! One thing differs: a loop over `none` is one over nothing, and no error. `docs/templates.md` lists what is left out.
//!
//! A template reaches only its conversation, and it ends: steps are counted (`FUEL`) and texts are
//! bounded. It runs on a stack of its own, deep enough for any value that so many steps can build.
//!
//! ```
//! use boostr::chat::{ChatTemplate, Options};
//! use boostr::generation_config::SpecialTokens;
//! use serde_json::json;
//!
//! let source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}\
//!               {% if add_generation_prompt %}<assistant>{% endif %}";
//! let template = ChatTemplate::new("chat_template.jinja", source, &SpecialTokens::default())?;
//! let messages = [json!({"role": "user", "content": " Hello! "})];
//! let options = Options { add_generation_prompt: true, ..Options::default() };
//! assert_eq!(template.render(&messages, &options)?, "<user>Hello!<assistant>");
//! # Ok::<(), boostr::Error>(())
//! ```

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use crate::checkpoint::ConfigFile;
use crate::checkpoint::gguf::Metadata;
use crate::error::{Error, Result};
use crate::generation_config::SpecialTokens;
use crate::tokenizer::Tokenizer;

mod answers;
mod clock;
mod fit;
mod jinja;
mod marks;
mod messages;
mod rendered;
mod thoughts;
pub mod tools;

pub use answers::Answers;
pub(crate) use answers::Counted;
use fit::{Reads, with_tools};
use jinja::{Failure, MAX_TEXT, Meter, Reason, Template};
use marks::Marks;
pub use messages::{MessageError, normalized};
pub use rendered::Rendered;
pub use thoughts::{Said, Thoughts};

/// Longest template, in bytes; the longest published ones have about 30 000.
pub const MAX_SOURCE: usize = 256 << 10;

/// Steps that one rendering may take; 64 bytes of text count as one. A message takes 50 to 500 of them.
const FUEL: u64 = 4_000_000;

/// Stack of a rendering, in bytes, of which only what is used is ever taken from the system. A value that FUEL steps
/// nest, or an expression as deep as `MAX_SOURCE` bytes can spell, is dropped by recursion.
const STACK: usize = 512 << 20;

/// The template that is used when there are tools, where a model has several.
const TOOL_USE: &str = "tool_use";
const DEFAULT: &str = "default";

/// What stands for the template of a model without one: the texts of all messages, each on lines of its own.
const PLAIN: &str = "{% for m in messages %}{{ m.content }}{{ '\\n' }}{% endfor %}";

/// Where a GGUF file has the template named `default`, with `.NAME` another one, and the names of these.
const GGUF_TEMPLATE: &str = "tokenizer.chat_template";
const GGUF_NAMES: &str = "tokenizer.chat_templates";

/// Longest reason of an error, in characters.
const MAX_REASON: usize = 500;

/// The templates of a model as its files have them, not looked into yet.
///
/// A model without a template that can be used can still complete a text, so a template is compiled when a
/// conversation comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The file, for messages.
    pub path: PathBuf,
    /// Name and text; a single one is named `default`.
    pub templates: Vec<(String, String)>,
    /// The tokens that templates name: `bos_token` and so on.
    pub special: SpecialTokens,
}

impl Source {
    /// A single template.
    pub fn new(path: impl AsRef<Path>, text: impl Into<String>, special: SpecialTokens) -> Self {
        let path = path.as_ref().to_path_buf();
        Self { path, templates: vec![(DEFAULT.to_owned(), text.into())], special }
    }

    /// The field `chat_template` of `tokenizer_config.json`, whose text is `json`: a template, or a list of
    /// `{"name": .., "template": ..}`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is something else.
    ///
    /// ```
    /// let json = r#"{"bos_token": "<s>", "chat_template": "{{ bos_token }}"}"#;
    /// let source = boostr::chat::Source::from_json("tokenizer_config.json", json)?.unwrap();
    /// assert_eq!(source.templates, [("default".to_owned(), "{{ bos_token }}".to_owned())]);
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn from_json(path: impl AsRef<Path>, json: &str) -> Result<Option<Self>> {
        let path = path.as_ref();
        let expected = "a text, or a list of objects with a text `name` and a text `template`";
        let file = ConfigFile::parse(path, json)?;
        let templates = file.get(&["chat_template"], expected, |value| match value {
            Value::String(text) => Some(vec![(DEFAULT.to_owned(), text.clone())]),
            Value::Array(named) => named
                .iter()
                .map(|one| {
                    let field = |name| Some(one.get(name)?.as_str()?.to_owned());
                    Some((field("name")?, field("template")?))
                })
                .collect(),
            _ => None,
        })?;
        let Some(templates) = templates else { return Ok(None) };
        let special = SpecialTokens::from_json(path, json)?;
        Ok(Some(Self { path: path.to_path_buf(), templates, special }))
    }

    /// What [`Source::from_json`] reads: one text, or a list where there are names to tell.
    pub fn to_json(&self) -> Value {
        match self.templates.as_slice() {
            [(name, text)] if name == DEFAULT => text.as_str().into(),
            all => all.iter().map(|(name, text)| json!({"name": name, "template": text})).collect(),
        }
    }

    /// The templates of a GGUF file: `tokenizer.chat_template`, and each `tokenizer.chat_template.NAME`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when one is no text.
    ///
    /// ```
    /// use boostr::chat::Source;
    /// use boostr::checkpoint::gguf::Metadata;
    /// use boostr::generation_config::SpecialTokens;
    ///
    /// let mut metadata = Metadata::new("model.gguf");
    /// metadata.set("tokenizer.chat_template", "{{ messages }}");
    /// metadata.set("tokenizer.chat_template.tool_use", "{{ tools }}");
    /// let source = Source::from_gguf(&metadata, SpecialTokens::default())?.unwrap();
    /// assert_eq!(source.templates[1], ("tool_use".to_owned(), "{{ tools }}".to_owned()));
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn from_gguf(metadata: &Metadata, special: SpecialTokens) -> Result<Option<Self>> {
        let mut templates = Vec::new();
        for (key, _) in metadata.iter() {
            let name = match key.strip_prefix(GGUF_TEMPLATE) {
                Some("") => DEFAULT,
                Some(rest) if rest.starts_with('.') => &rest[1..],
                _ => continue,
            };
            if let Some(text) = metadata.text(key)? {
                templates.push((name.to_owned(), text.to_owned()));
            }
        }
        let path = metadata.path().to_path_buf();
        Ok((!templates.is_empty()).then_some(Self { path, templates, special }))
    }

    /// Writes the templates into the metadata of a GGUF file, as llama.cpp's converter does: what is no letter, digit
    /// or `_` of ASCII in a name becomes `_`.
    ///
    /// Returns what is not in it: templates whose names are the same then.
    pub fn to_gguf(&self, metadata: &mut Metadata) -> Vec<String> {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
        let (mut names, mut lost) = (Vec::new(), Vec::new());
        for (name, text) in &self.templates {
            let plain: String = name.chars().map(plain).collect();
            if name == DEFAULT {
                metadata.set(GGUF_TEMPLATE, text.as_str());
            } else if plain.is_empty() || plain == DEFAULT || names.contains(&plain) {
                lost.push(format!(
                    "GGUF has no name for the chat template `{}`",
                    name.escape_debug()
                ));
            } else {
                metadata.set(format!("{GGUF_TEMPLATE}.{plain}"), text.as_str());
                names.push(plain);
            }
        }
        if !names.is_empty() {
            metadata.set(GGUF_NAMES, names.as_slice());
        }
        lost
    }

    /// Compiles the templates.
    ///
    /// # Errors
    ///
    /// As [`ChatTemplate::new`], for the `default` one or a single one; another one that is wrong is an error when a
    /// conversation needs it.
    pub fn compile(&self) -> Result<ChatTemplate> {
        let SpecialTokens { bos_token, eos_token, pad_token, unk_token, .. } = &self.special;
        let special = [
            ("bos_token", bos_token),
            ("eos_token", eos_token),
            ("pad_token", pad_token),
            ("unk_token", unk_token),
        ];
        let special = special
            .into_iter()
            .filter_map(|(name, token)| Some((name.to_owned(), Value::String(token.clone()?))));
        let mut template = ChatTemplate {
            path: self.path.clone(),
            templates: HashMap::new(),
            special: special.collect(),
            reads: Mutex::default(),
            broken: HashMap::new(),
            is_plain: false,
        };
        let is_single = self.templates.len() == 1;
        for (name, text) in &self.templates {
            match template.add(name, text) {
                Err(Error::Format { reason, .. }) if !is_single && name != DEFAULT => {
                    template.broken.insert(name.clone(), reason);
                }
                added => added?,
            }
        }
        Ok(template)
    }
}

/// A message of a conversation: `role` is `system`, `user`, `assistant` or `tool`.
///
/// ```
/// use boostr::chat::message;
///
/// assert_eq!(message("user", "Hi!"), serde_json::json!({"role": "user", "content": "Hi!"}));
/// ```
#[must_use]
pub fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// What a conversation is rendered with.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// End with what starts an answer of the assistant.
    pub add_generation_prompt: bool,
    /// Go on with the last message, if the assistant thinks or says some text in it and calls nothing: the text ends where that
    /// does, in the thought if nothing was said yet. Of [`rendered`](ChatTemplate::rendered) alone.
    pub continue_last: bool,
    /// Close a thought that the text begins at its end, for an answer that a grammar holds to a form. Of
    /// [`rendered`](ChatTemplate::rendered) alone.
    pub skip_thought: bool,
    /// Tools on offer, each as JSON schema: `{"type": "function", "function": {"name": .., ..}}`.
    pub tools: Option<Vec<Value>>,
    /// Documents to answer from, each with `title` and `text`.
    pub documents: Option<Vec<Value>>,
    /// More variables, like `enable_thinking`; they may replace special tokens, not the fields above.
    pub kwargs: Map<String, Value>,
    /// The moment that `strftime_now` tells, in UTC; that of the rendering by default.
    pub now: Option<SystemTime>,
}

/// What stands for an answer where its beginning is looked for: one of Unicode's noncharacters, which no text has.
const BEGINNING: &str = "\u{fdd4}";

/// A compiled template, or several with names.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    templates: HashMap<String, Template>,
    special: Map<String, Value>,
    /// What each template reads, once it was tried.
    reads: Mutex<HashMap<&'static str, Reads>>,
    /// Why templates could not be compiled, by name.
    broken: HashMap<String, String>,
    is_plain: bool,
}

impl ChatTemplate {
    /// Compiles the text of one template; `path` only serves messages.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] with the line that is wrong, or when it is longer than [`MAX_SOURCE`].
    pub fn new(path: impl AsRef<Path>, source: &str, special: &SpecialTokens) -> Result<Self> {
        Source::new(path, source, special.clone()).compile()
    }

    /// For models without a template: the contents of the messages, each ended by a newline, whoever says them.
    ///
    /// # Errors
    ///
    /// None that is known.
    ///
    /// ```
    /// use boostr::chat::{ChatTemplate, Options};
    /// use serde_json::json;
    ///
    /// let messages = [json!({"role": "user", "content": "Hello!"})];
    /// assert_eq!(ChatTemplate::plain()?.render(&messages, &Options::default())?, "Hello!\n");
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn plain() -> Result<Self> {
        let mut plain = Self::new("plain text", PLAIN, &SpecialTokens::default())?;
        plain.is_plain = true;
        Ok(plain)
    }

    /// Whether this is [`plain`](Self::plain): roles are not marked, and BOS has not been added yet.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.is_plain
    }

    fn add(&mut self, name: &str, text: &str) -> Result<()> {
        if text.len() > MAX_SOURCE {
            let reason =
                format!("chat template has {} bytes, expected at most {MAX_SOURCE}", text.len());
            return Err(Error::format(&self.path, reason));
        }
        let read = Template::new(text).map_err(|failure| self.error(name, failure))?;
        self.templates.insert(name.to_owned(), read);
        Ok(())
    }

    /// The text of a conversation. A message is an object with `role`, `content` (a text, or a list of parts) and what
    /// else its template knows: `tool_calls`, `reasoning_content`, ...; a key that is `null` counts as absent, and
    /// reasoning is given under both names in use, as transformers does.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when the template refuses the conversation, in its own words; [`Error::Format`] when it
    /// fails otherwise, takes too many steps or makes too long a text.
    pub fn render(&self, messages: &[Value], options: &Options) -> Result<String> {
        self.render_in(messages, options, false)
    }

    /// The text that the template of this conversation makes, what the assistant says between marks if it is asked for.
    fn render_in(
        &self,
        messages: &[Value],
        options: &Options,
        with_answers: bool,
    ) -> Result<String> {
        if let Some(other) = messages.iter().find(|message| !message.is_object()) {
            let reason = format!("expected objects, found {other}");
            return Err(Error::Argument { name: "messages", reason });
        }
        let variables = variables(&self.special, messages, options);
        let (name, template) = self.template(options.tools.is_some())?;
        let now = options.now.unwrap_or_else(SystemTime::now);
        let run = || template.render(&variables, now, with_answers, &Meter::new(FUEL));
        deep(&self.path, run)?.map_err(|failure| self.error(name, failure))
    }

    /// The ids of a conversation's text. Control tokens that the template writes are control tokens; those that stand
    /// in a message, a tool, a document or a variable are text, so that none of them can end a turn or start another.
    /// The tokenizer adds nothing: a token that starts a text is the template's to write.
    ///
    /// Roles become part of control tokens in some templates (`'<|' + role + '|>'`): whoever lets strangers choose
    /// them checks them first.
    ///
    /// # Errors
    ///
    /// As [`render`](Self::render) and [`Tokenizer::encode_parts`]; [`Error::Argument`] when the parts of a message's
    /// content make up a control token between them.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
        options: &Options,
    ) -> Result<Vec<u32>> {
        self.rendered(tokenizer, messages, options)?.encode_from(tokenizer, 0)
    }

    /// The text of a conversation, of which any part can be encoded as [`encode`](Self::encode) does.
    ///
    /// # Errors
    ///
    /// As [`render`](Self::render); [`Error::Argument`] when the parts of a message's content make up a control token
    /// between them.
    pub fn rendered(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
        options: &Options,
    ) -> Result<Rendered> {
        let (messages, options) = marked(tokenizer, messages, options)?;
        let last = messages.split_last().filter(|_| options.continue_last);
        let Some((begun, before)) =
            last.and_then(|(last, before)| Some((Begun::of(last)?, before)))
        else {
            let text = self.prompt(&messages, &options)?;
            let markers = thoughts::opened(&text).filter(|_| options.skip_thought);
            let end = markers.map_or_else(String::new, |markers| format!("\n{}", markers.end()));
            return Ok(Rendered::new(text + &end));
        };
        let text =
            self.before_answer(before, &Options { add_generation_prompt: true, ..options })?;
        Ok(begun.after(text))
    }

    /// The text of messages up to where an answer begins.
    fn before_answer(&self, messages: &[Value], options: &Options) -> Result<String> {
        if !messages.is_empty() {
            return self.prompt(messages, options);
        }
        let head = self.head(options).unwrap_or_default();
        let bare = Options { add_generation_prompt: false, ..options.clone() };
        let asked = Options { tools: None, ..options.clone() };
        let tools = options.tools.as_deref().unwrap_or_default();
        let told = |reads_system| self.prompt(&with_tools(Vec::new(), tools, reads_system), &asked);
        let forms: [&dyn Fn() -> Result<String>; 4] = [
            // Some begin an answer only after a user's words.
            &|| {
                let text = self.prompt(&[], options)?;
                Ok(if text.ends_with(&head) { text } else { text + &head })
            },
            // Some fail over nobody's words; the assistant's have the same beginning.
            &|| {
                let text = self.prompt(&[message("assistant", BEGINNING)], &bare)?;
                Ok(text.rsplit_once(BEGINNING).map_or(text.clone(), |(text, _)| text.to_owned()))
            },
            // Some tell of tools with what a user says first.
            &|| told(true),
            &|| told(false),
        ];
        let name = tools.first().and_then(|tool| tool["function"]["name"].as_str());
        let role = head.lines().next().unwrap_or_default();
        let is_whole = |text: &String| text.contains(role) && text.contains(name.unwrap_or(""));
        let mut found = Vec::new();
        for form in forms.into_iter().take(if tools.is_empty() { 2 } else { 4 }) {
            match form() {
                Ok(text) if is_whole(&text) => return Ok(text),
                text => found.push(text),
            }
        }
        // What a template says of nobody, or why it says nothing.
        let at = found.iter().position(Result::is_ok).unwrap_or(0);
        found.swap_remove(at)
    }

    /// What asks for an answer, if the template has such a text.
    fn head(&self, options: &Options) -> Option<String> {
        let user = [message("user", BEGINNING)];
        let without = Options { add_generation_prompt: false, ..options.clone() };
        let (asked, without) =
            (self.prompt(&user, options).ok()?, self.prompt(&user, &without).ok()?);
        asked.strip_prefix(&without).map(str::to_owned)
    }

    /// The template for a conversation, by whether it has tools.
    fn template(&self, has_tools: bool) -> Result<(&'static str, &Template)> {
        let names = if has_tools { &[TOOL_USE, DEFAULT][..] } else { &[DEFAULT] };
        for &name in names {
            if let Some(reason) = self.broken.get(name) {
                return Err(Error::format(&self.path, reason.as_str()));
            }
            if let Some(template) = self.templates.get(name) {
                return Ok((name, template));
            }
        }
        let mut names: Vec<&str> = self.templates.keys().map(String::as_str).collect();
        names.sort_unstable();
        let reason = format!("chat templates have the names {names:?}, none is `{DEFAULT}`");
        Err(Error::format(&self.path, reason))
    }

    fn error(&self, name: &str, failure: Failure) -> Error {
        let what = match failure.reason {
            Reason::Raised(reason) => return Error::Argument { name: "messages", reason },
            Reason::Steps => {
                format!("it takes more than {FUEL} steps, of which 64 bytes of text are one")
            }
            Reason::Length => format!("a text of more than {MAX_TEXT} bytes"),
            Reason::Other(what) => what,
        };
        // Some show the values that they are about.
        let what: String = what.chars().take(MAX_REASON).collect();
        let line = failure.line.map_or_else(String::new, |line| format!(" line {line}:"));
        let name = Some(name).filter(|&name| name != DEFAULT);
        let name = name.map_or_else(String::new, |name| format!(" `{}`", name.escape_debug()));
        Error::format(&self.path, format!("chat template{name}:{line} {what}"))
    }
}

/// What the assistant has said of a message that goes on.
struct Begun {
    thought: String,
    text: String,
}

impl Begun {
    /// `None` where there is nothing to go on with.
    fn of(message: &Value) -> Option<Self> {
        let text = match message.get("content").unwrap_or(&Value::Null) {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            Value::Array(parts) => {
                parts.iter().filter_map(|part| part.get("text")?.as_str()).collect()
            }
            _ => return None,
        };
        let thought = reasoning(message).and_then(Value::as_str).unwrap_or_default().to_owned();
        let calls = message.get("tool_calls").and_then(Value::as_array);
        let is_begun = message.get("role")? == "assistant"
            && !(text.is_empty() && thought.is_empty())
            && calls.is_none_or(Vec::is_empty);
        is_begun.then_some(Self { thought, text })
    }

    /// It after a text that asks for an answer, which may begin a thought, or hold an empty one.
    fn after(&self, mut prompt: String) -> Rendered {
        let markers = thoughts::opened(&prompt);
        if markers.is_none() && self.thought.is_empty() {
            return Rendered::new(prompt + &self.text);
        }
        if markers.is_none() {
            prompt.truncate(thoughts::without_empty(&prompt).len());
            prompt.push_str("<think>\n");
        }
        let markers = markers.unwrap_or_default();
        prompt.push_str(&self.thought);
        if self.text.is_empty() {
            return Rendered::new(prompt).in_thought(markers.open());
        }
        Rendered::new(format!("{prompt}\n{}{}", markers.end(), self.text))
    }
}

/// What a message says was thought, under the names in use.
fn reasoning(message: &Value) -> Option<&Value> {
    let names = ["reasoning_content", "thinking", "reasoning"];
    names.iter().filter_map(|name| message.get(name)).find(|value| !value.is_null())
}

/// What a template is given.
fn variables(
    special: &Map<String, Value>,
    messages: &[Value],
    options: &Options,
) -> Map<String, Value> {
    let mut variables = special.clone();
    variables.extend(options.kwargs.clone());
    for (name, value) in [
        ("messages", messages.iter().map(prepared).collect()),
        ("tools", options.tools.clone().map_or(Value::Null, Value::from)),
        ("documents", options.documents.clone().map_or(Value::Null, Value::from)),
        ("add_generation_prompt", options.add_generation_prompt.into()),
    ] {
        variables.insert(name.to_owned(), value);
    }
    variables
}

/// A conversation with the control tokens in it marked, but for the template's own.
fn marked(
    tokenizer: &Tokenizer,
    messages: &[Value],
    options: &Options,
) -> Result<(Vec<Value>, Options)> {
    let marks = Marks::of(tokenizer);
    let messages: Result<Vec<Value>> =
        messages.iter().map(|message| marks.message(message)).collect();
    let all = |values: &Option<Vec<Value>>| {
        values.as_ref().map(|values| values.iter().map(|value| marks.value(value)).collect())
    };
    let options = Options {
        tools: all(&options.tools),
        documents: all(&options.documents),
        kwargs: options.kwargs.iter().map(|(k, v)| (k.clone(), marks.value(v))).collect(),
        ..options.clone()
    };
    Ok((messages?, options))
}

/// A message as templates expect it: without what is `null`, its reasoning under the names that they know.
fn prepared(message: &Value) -> Value {
    let fields = message.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    let fields: Map<String, Value> = fields.map(|(k, v)| (k.clone(), v.clone())).collect();
    let Some(reasoning) = reasoning(message).cloned() else { return fields.into() };
    let mut all = Map::new();
    all.insert("thinking".to_owned(), reasoning.clone());
    all.extend(fields);
    all.insert("reasoning_content".to_owned(), reasoning);
    all.into()
}

/// Runs what may recurse as deep as a stranger's template makes it.
fn deep<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> Result<T> {
    thread::scope(|scope| {
        let worker = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work);
        let result = worker.map_err(|error| Error::io(path, error))?.join();
        Ok(result.unwrap_or_else(|panic| resume_unwind(panic)))
    })
}
