//! Values of templates: those of Python that a template can make or be given.
//!
//! Tuples and dicts never change once they are made. Lists do, for all who have them; but none gets an item that holds
//! it, so no value holds itself. What else changes (namespaces, loops) is kept by the run, and a value only names it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::syntax::Macro;
use super::{Failure, MAX_VALUE_DEPTH, Meter, Result, operators, text};

#[derive(Clone)]
pub(super) enum Value {
    /// What is not there, by its name.
    Undefined(Arc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Arc<str>),
    /// Text that counts as escaped already.
    Markup(Arc<str>),
    List(Rc<List>),
    Tuple(Rc<Vec<Value>>),
    Dict(Rc<Dict>),
    /// `keys()`, `values()` or `items()` of a dict.
    View(View, Rc<Dict>),
    Range(Range),
    /// What can be passed through once.
    Iterator(Rc<Once>),
    Function(Function),
    /// A method and what it belongs to.
    Method(Rc<(Value, &'static str)>),
    Macro(Rc<MacroValue>),
    Object(ObjectKind, usize),
}

/// A list: all who have it see what becomes of it. What was read of it stays as it was.
pub(super) struct List(RefCell<Rc<Vec<Value>>>);

impl List {
    /// The items at present.
    pub(super) fn items(&self) -> Rc<Vec<Value>> {
        self.0.borrow().clone()
    }

    pub(super) fn len(&self) -> usize {
        self.0.borrow().len()
    }

    /// Changes the items, of which those who read them at present keep a copy.
    pub(super) fn change<T>(
        &self,
        meter: &Meter,
        work: impl FnOnce(&mut Vec<Value>) -> T,
    ) -> Result<T> {
        let mut items = self.0.borrow_mut();
        if Rc::strong_count(&items) > 1 {
            meter.spend(items.len())?;
        }
        Ok(work(Rc::make_mut(&mut items)))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Keys,
    Values,
    Items,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: i64,
    pub(super) step: i64,
    pub(super) len: usize,
}

impl Range {
    pub(super) fn get(self, index: usize) -> i128 {
        i128::from(self.start) + i128::from(self.step) * index as i128
    }
}

pub(super) struct Once {
    items: Rc<Vec<Value>>,
    at: Cell<usize>,
}

impl Once {
    /// The next item.
    pub(super) fn next(&self) -> Option<Value> {
        let item = self.items.get(self.at.get())?;
        self.at.set(self.at.get() + 1);
        Some(item.clone())
    }

    /// All items that are left.
    fn rest(&self) -> Rc<Vec<Value>> {
        let at = self.at.replace(self.items.len());
        if at == 0 { self.items.clone() } else { Rc::new(self.items[at..].to_vec()) }
    }
}

/// A function of the environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Function {
    Range,
    Dict,
    Namespace,
    Cycler,
    Joiner,
    RaiseException,
    StrftimeNow,
}

/// Variables with their values.
pub(super) type Variables = Vec<(Arc<str>, Value)>;

/// A macro with the variables around it, unless these are the template's own.
pub(super) struct MacroValue {
    pub(super) node: Arc<Macro>,
    pub(super) captured: Option<Variables>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObjectKind {
    Namespace,
    Cycler,
    Joiner,
    Loop,
}

/// A dict in the order of its keys' arrival.
#[derive(Default)]
pub(super) struct Dict {
    pub(super) entries: Vec<(Value, Value)>,
    /// Where keys are; empty while there are few.
    index: HashMap<Key, usize>,
}

/// What a value is as a key: 1, 1.0 and true are one.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Undefined,
    None,
    Int(i128),
    Float(u64),
    Text(Arc<str>),
    Tuple(Vec<Key>),
}

/// Most keys of a dict without an index.
const FEW: usize = 8;

impl Dict {
    pub(super) fn get(&self, key: &Value, meter: &Meter) -> Result<Option<&Value>> {
        Ok(self.place(&key.key(meter)?, meter)?.map(|at| &self.entries[at].1))
    }

    pub(super) fn get_text(&self, key: &Arc<str>) -> Option<&Value> {
        if self.index.is_empty() {
            let is_it = |other: &Value| other.as_text().is_some_and(|other| **other == **key);
            return self.entries.iter().find(|(other, _)| is_it(other)).map(|(_, value)| value);
        }
        self.index.get(&Key::Text(key.clone())).map(|&at| &self.entries[at].1)
    }

    fn place(&self, key: &Key, meter: &Meter) -> Result<Option<usize>> {
        if !self.index.is_empty() {
            return Ok(self.index.get(key).copied());
        }
        for (at, (other, _)) in self.entries.iter().enumerate() {
            if other.key(meter)? == *key {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    pub(super) fn insert(&mut self, key: Value, value: Value, meter: &Meter) -> Result<()> {
        let name = key.key(meter)?;
        if let Some(at) = self.place(&name, meter)? {
            self.entries[at].1 = value;
            return Ok(());
        }
        self.entries.push((key, value));
        if self.entries.len() == FEW + 1 {
            for (at, (key, _)) in self.entries.iter().enumerate() {
                self.index.insert(key.key(meter)?, at);
            }
        } else if self.entries.len() > FEW {
            self.index.insert(name, self.entries.len() - 1);
        }
        Ok(())
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Self::Int(value as i128)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(value.into())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Self::Text(value.into())
    }
}

impl From<Vec<Value>> for Value {
    fn from(value: Vec<Value>) -> Self {
        Self::List(Rc::new(List(RefCell::new(Rc::new(value)))))
    }
}

impl Value {
    pub(super) fn tuple(items: Vec<Value>) -> Self {
        Self::Tuple(Rc::new(items))
    }

    /// What can be passed through once.
    pub(super) fn once(items: Vec<Value>) -> Self {
        Self::Iterator(Rc::new(Once { items: Rc::new(items), at: Cell::new(0) }))
    }

    pub(super) fn undefined(name: &str) -> Self {
        Self::Undefined(name.into())
    }

    /// A value of JSON.
    pub(super) fn of_json(json: &serde_json::Value, meter: &Meter) -> Result {
        Ok(match json {
            serde_json::Value::Null => Self::None,
            serde_json::Value::Bool(value) => Self::Bool(*value),
            serde_json::Value::Number(number) => {
                let whole = number.as_i64().map(i128::from);
                match whole.or_else(|| number.as_u64().map(i128::from)) {
                    Some(whole) => Self::Int(whole),
                    None => Self::Float(number.as_f64().unwrap_or(f64::NAN)),
                }
            }
            serde_json::Value::String(value) => value.as_str().into(),
            serde_json::Value::Array(items) => items
                .iter()
                .map(|item| Self::of_json(item, meter))
                .collect::<Result<Vec<_>>>()?
                .into(),
            serde_json::Value::Object(fields) => {
                let mut dict = Dict::default();
                for (name, value) in fields {
                    dict.insert(name.as_str().into(), Self::of_json(value, meter)?, meter)?;
                }
                Self::Dict(Rc::new(dict))
            }
        })
    }

    pub(super) fn as_text(&self) -> Option<&Arc<str>> {
        match self {
            Self::Text(text) | Self::Markup(text) => Some(text),
            _ => None,
        }
    }

    /// The same kind of text as this one.
    pub(super) fn like(&self, text: String) -> Self {
        if matches!(self, Self::Markup(_)) { Self::Markup(text.into()) } else { text.into() }
    }

    /// A whole number; `true` is 1.
    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Self::Int(value) => Some(*value),
            Self::Bool(value) => Some(i128::from(*value)),
            _ => None,
        }
    }

    pub(super) fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(value) => Some(*value),
            other => other.as_int().map(|value| value as f64),
        }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    /// The name of its type in Python.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "undefined",
            Self::None => "none",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Text(_) => "str",
            Self::Markup(_) => "Markup",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::View(View::Keys, _) => "dict_keys",
            Self::View(View::Values, _) => "dict_values",
            Self::View(View::Items, _) => "dict_items",
            Self::Range(_) => "range",
            Self::Iterator(_) => "generator",
            Self::Function(_) => "function",
            Self::Method(_) => "method",
            Self::Macro(_) => "macro",
            Self::Object(ObjectKind::Namespace, _) => "namespace",
            Self::Object(ObjectKind::Cycler, _) => "cycler",
            Self::Object(ObjectKind::Joiner, _) => "joiner",
            Self::Object(ObjectKind::Loop, _) => "loop",
        }
    }

    /// An error for one that is not there.
    pub(super) fn defined(&self) -> Result<()> {
        match self {
            Self::Undefined(name) => {
                let shown: String = name.escape_debug().take(100).collect();
                Err(Failure::new(format!("`{shown}` is undefined")))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(value) => *value,
            Self::Int(value) => *value != 0,
            Self::Float(value) => *value != 0.0,
            Self::Text(text) | Self::Markup(text) => !text.is_empty(),
            Self::List(list) => list.len() > 0,
            Self::Tuple(items) => !items.is_empty(),
            Self::Dict(dict) | Self::View(_, dict) => !dict.entries.is_empty(),
            Self::Range(range) => range.len > 0,
            _ => true,
        }
    }

    /// How many items it has; `None` for what has no length.
    pub(super) fn len(&self, meter: &Meter) -> Result<Option<usize>> {
        Ok(Some(match self {
            Self::Undefined(_) => 0,
            Self::Text(text) | Self::Markup(text) => {
                meter.bytes(text.len())?;
                text.chars().count()
            }
            Self::List(list) => list.len(),
            Self::Tuple(items) => items.len(),
            Self::Dict(dict) | Self::View(_, dict) => dict.entries.len(),
            Self::Range(range) => range.len,
            _ => return Ok(None),
        }))
    }

    /// All its items; what can be passed through once is passed then.
    pub(super) fn items(&self, meter: &Meter) -> Result<Rc<Vec<Value>>> {
        let new: Vec<Value> = match self {
            Self::List(list) => return Ok(list.items()),
            Self::Tuple(items) => return Ok(items.clone()),
            Self::Iterator(once) => {
                let rest = once.rest();
                meter.spend(rest.len())?;
                return Ok(rest);
            }
            Self::Undefined(_) => Vec::new(),
            Self::Text(text) | Self::Markup(text) => {
                // A byte is a character at least.
                meter.spend(text.len())?;
                text.chars().map(|c| c.to_string().into()).collect()
            }
            Self::Dict(dict) | Self::View(_, dict) => {
                meter.spend(dict.entries.len() * 2)?;
                let entries = dict.entries.iter();
                match self {
                    Self::View(View::Values, _) => entries.map(|(_, v)| v.clone()).collect(),
                    Self::View(View::Items, _) => {
                        entries.map(|(k, v)| Self::tuple(vec![k.clone(), v.clone()])).collect()
                    }
                    _ => entries.map(|(key, _)| key.clone()).collect(),
                }
            }
            Self::Range(range) => {
                meter.spend(range.len)?;
                (0..range.len).map(|at| Self::Int(range.get(at))).collect()
            }
            other => {
                return Err(Failure::new(format!("a value of type {} has no items", other.kind())));
            }
        };
        Ok(Rc::new(new))
    }

    /// Whether `list` is somewhere in it.
    pub(super) fn holds(&self, list: &Rc<List>, meter: &Meter) -> Result<bool> {
        let mut rest = vec![self.clone()];
        while let Some(value) = rest.pop() {
            meter.spend(1)?;
            match value {
                Self::List(other) if Rc::ptr_eq(&other, list) => return Ok(true),
                Self::List(other) => rest.extend(other.items().iter().cloned()),
                Self::Tuple(items) => rest.extend(items.iter().cloned()),
                // Keys hold no lists.
                Self::Dict(dict) | Self::View(_, dict) => {
                    rest.extend(dict.entries.iter().map(|(_, value)| value.clone()));
                }
                Self::Iterator(once) => rest.extend(once.items.iter().cloned()),
                Self::Method(method) => rest.push(method.0.clone()),
                Self::Macro(called) => {
                    let captured = called.captured.iter().flatten();
                    rest.extend(captured.map(|(_, value)| value.clone()));
                }
                _ => {}
            }
        }
        Ok(false)
    }

    pub(super) fn is_iterable(&self) -> bool {
        !matches!(
            self,
            Self::None
                | Self::Bool(_)
                | Self::Int(_)
                | Self::Float(_)
                | Self::Function(_)
                | Self::Method(_)
                | Self::Macro(_)
                | Self::Object(ObjectKind::Namespace | ObjectKind::Joiner | ObjectKind::Cycler, _)
        )
    }

    pub(super) fn is_callable(&self) -> bool {
        matches!(
            self,
            Self::Undefined(_)
                | Self::Function(_)
                | Self::Method(_)
                | Self::Macro(_)
                | Self::Object(ObjectKind::Joiner | ObjectKind::Loop, _)
        )
    }

    /// What it is as a key of a dict.
    pub(super) fn key(&self, meter: &Meter) -> Result<Key> {
        self.key_at(0, meter)
    }

    fn key_at(&self, depth: usize, meter: &Meter) -> Result<Key> {
        Ok(match self {
            Self::Undefined(_) => Key::Undefined,
            Self::None => Key::None,
            Self::Bool(value) => Key::Int(i128::from(*value)),
            Self::Int(value) => Key::Int(*value),
            Self::Float(value) if operators::is_whole(*value) => Key::Int(*value as i128),
            Self::Float(value) => Key::Float(value.to_bits()),
            Self::Text(text) | Self::Markup(text) => {
                meter.bytes(text.len())?;
                Key::Text(text.clone())
            }
            Self::Tuple(items) if depth < MAX_VALUE_DEPTH => {
                meter.spend(items.len() + 1)?;
                let keys = items.iter().map(|item| item.key_at(depth + 1, meter));
                Key::Tuple(keys.collect::<Result<Vec<_>>>()?)
            }
            other => {
                return Err(Failure::new(format!("a value of type {} is no key", other.kind())));
            }
        })
    }

    /// `str(value)`.
    pub(super) fn text(&self, meter: &Meter) -> Result<Arc<str>> {
        match self {
            Self::Text(text) | Self::Markup(text) => Ok(text.clone()),
            other => Ok(text::str(other, meter)?.into()),
        }
    }
}
