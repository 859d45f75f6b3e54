//! A run of a template: its statements, expressions and calls.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use super::syntax::{Arguments, Expr, For, Link, Macro, Math, Node, Statement, Target};
use super::value::{Dict, Function, List, MacroValue, ObjectKind, Range, Value, Variables};
use super::{Failure, MAX_RANGE, Meter, Result, bounded, methods, operators};
use crate::chat::{clock, marks};

/// Deepest nesting of macros, loops and expressions in each other while a template runs.
const MAX_DEPTH: usize = 4_000;

/// The arguments of a call.
#[derive(Clone, Default)]
pub(super) struct Given {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Arc<str>, Value)>,
}

impl Given {
    /// The arguments by the names of parameters, of which the first `required` must be there. One without a name is
    /// given by its place alone.
    pub(super) fn bind<const N: usize>(
        self,
        what: &str,
        names: [&str; N],
        required: usize,
    ) -> Result<[Option<Value>; N]> {
        if self.positional.len() > N {
            let found = self.positional.len();
            return Err(Failure::new(format!(
                "{what}: expected at most {N} values, found {found}"
            )));
        }
        let mut bound = [const { None }; N];
        for (place, value) in bound.iter_mut().zip(self.positional) {
            *place = Some(value);
        }
        for (name, value) in self.named {
            let at = names.iter().position(|other| *other == &*name);
            let Some(at) = at.filter(|_| !name.is_empty()) else {
                let reason = format!("{what}: there is no argument `{}`", name.escape_debug());
                return Err(Failure::new(reason));
            };
            if bound[at].is_some() {
                return Err(Failure::new(format!("{what}: the argument `{name}` is given twice")));
            }
            bound[at] = Some(value);
        }
        if let Some(at) = (0..required).find(|&at| bound[at].is_none()) {
            let name = match names[at] {
                "" => format!("{}", at + 1),
                name => format!("`{name}`"),
            };
            return Err(Failure::new(format!("{what}: the argument {name} is missing")));
        }
        Ok(bound)
    }
}

/// What a run keeps and changes.
enum Object {
    Namespace(HashMap<Arc<str>, Value>),
    Cycler { items: Rc<Vec<Value>>, at: usize },
    Joiner { separator: Value, is_used: bool },
    Loop(Loop),
}

/// What a loop goes through.
#[derive(Clone)]
enum Items {
    /// These, whatever becomes of where they are from.
    Fixed(Rc<Vec<Value>>),
    /// Those that a list has when the loop is there.
    Of(Rc<List>),
}

impl Items {
    fn now(&self) -> Rc<Vec<Value>> {
        match self {
            Self::Fixed(items) => items.clone(),
            Self::Of(list) => list.items(),
        }
    }
}

struct Loop {
    items: Items,
    at: usize,
    depth: usize,
    changed: Option<Vec<Value>>,
    /// Of a loop that may run itself.
    node: Option<Arc<For>>,
}

/// What comes after a statement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

type Scope = HashMap<Arc<str>, Value>;

pub(super) struct Run<'a> {
    pub(super) meter: &'a Meter,
    now: SystemTime,
    /// Whether what the assistant says is marked.
    marks_answers: bool,
    /// What the template is given, and what it sets outside of loops and macros.
    globals: Scope,
    scopes: Vec<Scope>,
    objects: Vec<Object>,
    out: Vec<String>,
    depth: usize,
}

/// A dict with these texts as keys.
pub(super) fn dict_of(entries: Vec<(Arc<str>, Value)>, meter: &Meter) -> Result {
    let mut dict = Dict::default();
    for (name, value) in entries {
        dict.insert(Value::Text(name), value, meter)?;
    }
    Ok(Value::Dict(Rc::new(dict)))
}

impl<'a> Run<'a> {
    pub(super) fn new(
        variables: &serde_json::Map<String, serde_json::Value>,
        now: SystemTime,
        marks_answers: bool,
        meter: &'a Meter,
    ) -> Result<Self> {
        let functions = [
            ("range", Function::Range),
            ("dict", Function::Dict),
            ("namespace", Function::Namespace),
            ("cycler", Function::Cycler),
            ("joiner", Function::Joiner),
            ("raise_exception", Function::RaiseException),
            ("strftime_now", Function::StrftimeNow),
        ];
        let mut globals: Scope =
            functions.map(|(name, function)| (name.into(), Value::Function(function))).into();
        for (name, value) in variables {
            globals.insert(name.as_str().into(), Value::of_json(value, meter)?);
        }
        Ok(Self {
            meter,
            now,
            marks_answers,
            globals,
            scopes: Vec::new(),
            objects: Vec::new(),
            out: vec![String::new()],
            depth: 0,
        })
    }

    /// The text that the statements of a template make.
    pub(super) fn render(mut self, body: &[Statement]) -> Result<String> {
        self.all(body)?;
        Ok(self.out.pop().unwrap_or_default())
    }

    fn deeper<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(Failure::new(format!("a recursion of more than {MAX_DEPTH} steps")));
        }
        let result = work(self);
        self.depth -= 1;
        result
    }

    fn write(&mut self, text: &str) -> Result<()> {
        self.meter.bytes(text.len())?;
        let Some(out) = self.out.last_mut() else { return Ok(()) };
        bounded(out.len() + text.len())?;
        out.push_str(text);
        Ok(())
    }

    /// The text that `work` writes.
    fn captured(&mut self, work: impl FnOnce(&mut Self) -> Result<Flow>) -> Result<(String, Flow)> {
        self.out.push(String::new());
        let flow = work(self)?;
        Ok((self.out.pop().unwrap_or_default(), flow))
    }

    /// Runs statements with variables of their own.
    fn scoped(&mut self, scope: Scope, body: &[Statement]) -> Result<Flow> {
        self.scopes.push(scope);
        let flow = self.all(body)?;
        self.scopes.pop();
        Ok(flow)
    }

    fn all(&mut self, body: &[Statement]) -> Result<Flow> {
        for statement in body {
            let flow = self.deeper(|run| run.statement(statement))?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&mut self, statement: &Statement) -> Result<Flow> {
        self.meter.spend(1)?;
        match statement {
            Statement::Data(text) => self.write(text)?,
            Statement::Print(expr) => {
                let value = self.eval(expr)?;
                let text = value.text(self.meter).map_err(|error| error.at(expr.line))?;
                self.write(&text).map_err(|error| error.at(expr.line))?;
            }
            Statement::If(branches, otherwise) => {
                for (test, body) in branches {
                    if self.eval(test)?.is_true() {
                        return self.all(body);
                    }
                }
                return self.all(otherwise);
            }
            Statement::For(node) => {
                return self.for_loop(node, None, 0).map_err(|error| error.at(node.line));
            }
            Statement::Set { line, target, value } => {
                let value = self.eval(value)?;
                self.assign(target, value).map_err(|error| error.at(*line))?;
            }
            Statement::SetBlock { line, target, filters, body } => {
                let (text, flow) = self.captured(|run| run.scoped(Scope::new(), body))?;
                let value = self.links(text.into(), filters, None)?;
                self.assign(target, value).map_err(|error| error.at(*line))?;
                return Ok(flow);
            }
            Statement::Macro(node) => {
                let captured = self.captured_variables()?;
                let value = Value::Macro(Rc::new(MacroValue { node: node.clone(), captured }));
                self.set(&node.name, value);
            }
            Statement::Call { line, call, body } => {
                let captured = self.captured_variables()?;
                let caller = MacroValue { node: body.clone(), captured };
                let caller = Value::Macro(Rc::new(caller));
                let value = match &call.node {
                    Node::Chain(first, links) => {
                        let first = self.eval(first)?;
                        self.links(first, links, Some(caller))?
                    }
                    _ => Value::None,
                };
                let text = value.text(self.meter).map_err(|error| error.at(*line))?;
                self.write(&text).map_err(|error| error.at(*line))?;
            }
            Statement::Filter { line, filters, body } => {
                let (text, flow) = self.captured(|run| run.scoped(Scope::new(), body))?;
                let value = self.links(text.into(), filters, None)?;
                let text = value.text(self.meter).map_err(|error| error.at(*line))?;
                self.write(&text).map_err(|error| error.at(*line))?;
                return Ok(flow);
            }
            Statement::With { line, values, body } => {
                let values = values
                    .iter()
                    .map(|(target, value)| Ok((target, self.eval(value)?)))
                    .collect::<Result<Vec<_>>>()?;
                self.scopes.push(Scope::new());
                for (target, value) in values {
                    self.assign(target, value).map_err(|error| error.at(*line))?;
                }
                let flow = self.all(body)?;
                self.scopes.pop();
                return Ok(flow);
            }
            Statement::Block(body) => {
                let scopes = std::mem::take(&mut self.scopes);
                let flow = self.scoped(Scope::new(), body)?;
                self.scopes = scopes;
                return Ok(flow);
            }
            Statement::Generation(body) if self.marks_answers => {
                let (text, flow) = self.captured(|run| run.scoped(Scope::new(), body))?;
                self.write(&marks::answer(&text))?;
                return Ok(flow);
            }
            Statement::Generation(body) => return self.scoped(Scope::new(), body),
            Statement::Do(expr) => {
                self.eval(expr)?;
            }
            Statement::Break => return Ok(Flow::Break),
            Statement::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn for_loop(&mut self, node: &Arc<For>, list: Option<&Value>, depth: usize) -> Result<Flow> {
        let list = match list {
            Some(list) => list.clone(),
            None => self.eval(&node.list)?,
        };
        // The one thing that Python alone refuses.
        let mut items = match list {
            Value::None => Items::Fixed(Rc::default()),
            Value::List(list) => Items::Of(list),
            list => Items::Fixed(list.items(self.meter)?),
        };
        if let Some(test) = &node.test {
            let mut kept = Vec::new();
            for item in &*items.now() {
                self.meter.spend(1)?;
                self.scopes.push(Scope::new());
                self.assign(&node.target, item.clone())?;
                if self.eval(test)?.is_true() {
                    kept.push(item.clone());
                }
                self.scopes.pop();
            }
            items = Items::Fixed(Rc::new(kept));
        }
        if items.now().is_empty() {
            return self.scoped(Scope::new(), &node.otherwise);
        }
        let index = self.objects.len();
        let recursive = node.is_recursive.then(|| node.clone());
        // What a run keeps is kept to its end.
        self.meter.spend(4)?;
        self.objects.push(Object::Loop(Loop {
            items: items.clone(),
            at: 0,
            depth,
            changed: None,
            node: recursive,
        }));
        let (name, mut scope): (Arc<str>, _) = ("loop".into(), Scope::new());
        for at in 0.. {
            let Some(item) = items.now().get(at).cloned() else { break };
            self.meter.spend(1)?;
            if let Some(Object::Loop(state)) = self.objects.get_mut(index) {
                state.at = at;
            }
            scope.insert(name.clone(), Value::Object(ObjectKind::Loop, index));
            self.scopes.push(scope);
            self.assign(&node.target, item)?;
            let flow = self.all(&node.body)?;
            scope = self.scopes.pop().unwrap_or_default();
            scope.clear();
            if flow == Flow::Break {
                break;
            }
        }
        if let Some(Object::Loop(state)) = self.objects.get_mut(index) {
            state.items = Items::Fixed(Rc::default());
            state.changed = None;
        }
        Ok(Flow::Next)
    }

    fn set(&mut self, name: &Arc<str>, value: Value) {
        self.scopes.last_mut().unwrap_or(&mut self.globals).insert(name.clone(), value);
    }

    fn assign(&mut self, target: &Target, value: Value) -> Result<()> {
        match target {
            Target::Name(name) => self.set(name, value),
            Target::Field(name, field) => {
                let namespace = self.variable(name);
                let object = match namespace {
                    Value::Object(ObjectKind::Namespace, index) => self.objects.get_mut(index),
                    _ => None,
                };
                let Some(Object::Namespace(fields)) = object else {
                    let reason =
                        format!("`{name}` is no namespace, so `{name}.{field}` cannot be set");
                    return Err(Failure::new(reason));
                };
                fields.insert(field.clone(), value);
            }
            Target::Tuple(targets) => {
                let items = value.items(self.meter)?;
                if items.len() != targets.len() {
                    let (expected, found) = (targets.len(), items.len());
                    let reason = format!("expected {expected} values to assign, found {found}");
                    return Err(Failure::new(reason));
                }
                for (target, item) in targets.iter().zip(items.iter()) {
                    self.assign(target, item.clone())?;
                }
            }
        }
        Ok(())
    }

    fn variable(&self, name: &Arc<str>) -> Value {
        let mut scopes = self.scopes.iter().rev().chain([&self.globals]);
        let found = scopes.find_map(|scope| scope.get(name));
        found.cloned().unwrap_or_else(|| Value::Undefined(name.clone()))
    }

    /// What a macro sees of the variables around it, unless they are the template's own.
    fn captured_variables(&self) -> Result<Option<Variables>> {
        if self.scopes.is_empty() {
            return Ok(None);
        }
        let mut all = Scope::new();
        for scope in &self.scopes {
            self.meter.spend(scope.len() + 1)?;
            all.extend(scope.iter().map(|(name, value)| (name.clone(), value.clone())));
        }
        Ok(Some(all.into_iter().collect()))
    }

    pub(super) fn eval(&mut self, expr: &Expr) -> Result {
        self.meter.spend(1)?;
        self.deeper(|run| run.node(&expr.node)).map_err(|error| error.at(expr.line))
    }

    fn list(&mut self, items: &[Expr]) -> Result<Vec<Value>> {
        self.meter.spend(items.len())?;
        items.iter().map(|item| self.eval(item)).collect()
    }

    fn node(&mut self, node: &Node) -> Result {
        Ok(match node {
            Node::None => Value::None,
            Node::Bool(value) => Value::Bool(*value),
            Node::Int(value) => Value::Int(*value),
            Node::Float(value) => Value::Float(*value),
            Node::Text(text) => Value::Text(text.clone()),
            Node::Name(name) => self.variable(name),
            Node::List(items) => self.list(items)?.into(),
            Node::Tuple(items) => Value::tuple(self.list(items)?),
            Node::Dict(entries) => {
                let mut dict = Dict::default();
                self.meter.spend(2 * entries.len())?;
                for (key, value) in entries {
                    let key = self.eval(key)?;
                    dict.insert(key, self.eval(value)?, self.meter)?;
                }
                Value::Dict(Rc::new(dict))
            }
            Node::Not(value) => (!self.eval(value)?.is_true()).into(),
            Node::Sign { is_minus, value } => operators::sign(*is_minus, &self.eval(value)?)?,
            Node::Math(first, rest) => self.math(first, rest)?,
            Node::Concat(parts) => {
                let mut text = String::new();
                for part in parts {
                    let value = self.eval(part)?;
                    text.push_str(&value.text(self.meter)?);
                    bounded(text.len())?;
                }
                self.meter.bytes(text.len())?;
                text.into()
            }
            Node::And(parts) => return self.first_that(parts, false),
            Node::Or(parts) => return self.first_that(parts, true),
            Node::Compare(first, rest) => {
                let mut left = self.eval(first)?;
                for (compare, right) in rest {
                    let right = self.eval(right)?;
                    if !operators::compare(*compare, &left, &right, self.meter)? {
                        return Ok(false.into());
                    }
                    left = right;
                }
                true.into()
            }
            Node::If { test, yes, no } => match (self.eval(test)?.is_true(), no) {
                (true, _) => self.eval(yes)?,
                (false, Some(no)) => self.eval(no)?,
                (false, None) => Value::undefined("if"),
            },
            Node::Chain(first, links) => {
                let value = self.eval(first)?;
                self.links(value, links, None)?
            }
        })
    }

    /// The first value whose truth is `wanted`, else the last.
    fn first_that(&mut self, parts: &[Expr], wanted: bool) -> Result {
        let mut last = Value::None;
        for part in parts {
            last = self.eval(part)?;
            if last.is_true() == wanted {
                break;
            }
        }
        Ok(last)
    }

    /// Operators of one rank. A sum of texts is made in one pass: it takes time as its length.
    fn math(&mut self, first: &Expr, rest: &[(Math, Expr)]) -> Result {
        let mut left = self.eval(first)?;
        let mut sum: Option<String> = None;
        for (math, right) in rest {
            let right = self.eval(right)?;
            let is_sum =
                *math == Math::Add && matches!((&left, &right), (Value::Text(_), Value::Text(_)));
            if let (true, Some(part)) = (is_sum, right.as_text()) {
                let start = left.as_text().map_or("", |text| &**text);
                let sum = sum.get_or_insert_with(|| start.to_owned());
                bounded(sum.len() + part.len())?;
                self.meter.bytes(part.len())?;
                sum.push_str(part);
                continue;
            }
            if let Some(sum) = sum.take() {
                left = sum.into();
            }
            left = operators::math(*math, &left, &right, self.meter)?;
        }
        Ok(sum.map_or(left, Value::from))
    }

    /// What links make of a value; `caller` is an argument of the last one.
    fn links(&mut self, mut value: Value, links: &[(u32, Link)], caller: Option<Value>) -> Result {
        let mut caller = caller;
        for (i, (line, link)) in links.iter().enumerate() {
            self.meter.spend(1)?;
            let last = if i + 1 == links.len() { caller.take() } else { None };
            value = self.link(&value, link, last).map_err(|error| error.at(*line))?;
        }
        Ok(value)
    }

    fn link(&mut self, value: &Value, link: &Link, caller: Option<Value>) -> Result {
        match link {
            Link::Attribute(name) => self.attribute(value, name),
            Link::Item(key) => {
                let key = self.eval(key)?;
                self.item(value, &key)
            }
            Link::Slice(bounds) => {
                let mut values = [None, None, None];
                for (value, bound) in values.iter_mut().zip(&**bounds) {
                    *value = bound.as_ref().map(|bound| self.eval(bound)).transpose()?;
                }
                operators::slice(value, values.each_ref().map(Option::as_ref), self.meter)
            }
            Link::Call(arguments) => {
                let mut given = self.given(arguments)?;
                given.named.extend(caller.map(|caller| ("caller".into(), caller)));
                self.deeper(|run| run.call(value, given))
            }
            Link::Filter(name, arguments) => {
                let given = self.given(arguments)?;
                self.deeper(|run| run.filter(name, value, given))
            }
            Link::Test { name, arguments, is_not } => {
                let given = self.given(arguments)?;
                let holds = self.deeper(|run| run.test(name, value, given))?;
                Ok((holds != *is_not).into())
            }
        }
    }

    fn given(&mut self, arguments: &Arguments) -> Result<Given> {
        let mut given = Given { positional: self.list(&arguments.positional)?, named: Vec::new() };
        for (name, value) in &arguments.named {
            given.named.push((name.clone(), self.eval(value)?));
        }
        if let Some(list) = &arguments.list {
            let list = self.eval(list)?.items(self.meter)?;
            self.meter.spend(list.len())?;
            given.positional.extend(list.iter().cloned());
        }
        if let Some(dict) = &arguments.dict {
            let Value::Dict(dict) = self.eval(dict)? else {
                return Err(Failure::new("`**` needs a dict"));
            };
            self.meter.spend(dict.entries.len())?;
            for (key, value) in &dict.entries {
                let name = key.as_text().ok_or_else(|| Failure::new("`**` needs texts as keys"))?;
                given.named.push((name.clone(), value.clone()));
            }
        }
        Ok(given)
    }

    /// `value.name`
    pub(super) fn attribute(&mut self, value: &Value, name: &Arc<str>) -> Result {
        let Value::Object(_, index) = value else {
            return methods::attribute(value, name, self.meter);
        };
        let method = |name: &'static str| Value::Method(Rc::new((value.clone(), name)));
        let found = match self.objects.get(*index) {
            Some(Object::Namespace(fields)) => fields.get(name).cloned(),
            Some(Object::Cycler { items, at }) => match &**name {
                "current" => items.get(*at).cloned(),
                "next" => Some(method("next")),
                "reset" => Some(method("reset")),
                _ => None,
            },
            Some(Object::Loop(state)) => {
                let (at, items) = (state.at, state.items.now());
                let len = items.len();
                match &**name {
                    "index" => Some((at + 1).into()),
                    "index0" => Some(at.into()),
                    "revindex" => Some(len.saturating_sub(at).into()),
                    "revindex0" => Some(len.saturating_sub(at + 1).into()),
                    "first" => Some((at == 0).into()),
                    "last" => Some((at + 1 == len).into()),
                    "length" => Some(len.into()),
                    "depth" => Some((state.depth + 1).into()),
                    "depth0" => Some(state.depth.into()),
                    "previtem" => at.checked_sub(1).and_then(|at| items.get(at)).cloned(),
                    "nextitem" => items.get(at + 1).cloned(),
                    "cycle" => Some(method("cycle")),
                    "changed" => Some(method("changed")),
                    _ => None,
                }
            }
            _ => None,
        };
        Ok(found.unwrap_or_else(|| Value::Undefined(name.clone())))
    }

    /// `value[key]`
    pub(super) fn item(&mut self, value: &Value, key: &Value) -> Result {
        match (value, key) {
            (Value::Object(..), Value::Text(name) | Value::Markup(name)) => {
                self.attribute(value, name)
            }
            _ => methods::item(value, key, self.meter),
        }
    }

    fn call(&mut self, callee: &Value, given: Given) -> Result {
        match callee {
            Value::Method(method) => match &**method {
                (Value::Object(_, index), name) => self.call_object(*index, name, given),
                (value, name) => methods::call(value, name, given, self.meter),
            },
            Value::Function(function) => self.call_function(*function, given),
            Value::Macro(macro_value) => self.call_macro(&macro_value.clone(), given),
            Value::Object(_, index) => self.call_object(*index, "", given),
            other => {
                other.defined()?;
                Err(Failure::new(format!("a value of type {} cannot be called", other.kind())))
            }
        }
    }

    fn call_object(&mut self, index: usize, name: &str, given: Given) -> Result {
        let meter = self.meter;
        match (self.objects.get_mut(index), name) {
            (Some(Object::Cycler { items, at }), "next") => {
                given.bind(name, [], 0)?;
                let item = items.get(*at).cloned();
                *at = (*at + 1) % items.len().max(1);
                Ok(item.unwrap_or(Value::None))
            }
            (Some(Object::Cycler { at, .. }), "reset") => {
                given.bind(name, [], 0)?;
                *at = 0;
                Ok(Value::None)
            }
            (Some(Object::Joiner { separator, is_used }), "") => {
                given.bind("joiner", [], 0)?;
                let is_first = !std::mem::replace(is_used, true);
                Ok(if is_first { "".into() } else { separator.clone() })
            }
            (Some(Object::Loop(state)), "cycle") => {
                let len = given.positional.len();
                if len == 0 {
                    return Err(Failure::new("cycle: no values to cycle through"));
                }
                Ok(given.positional[state.at % len].clone())
            }
            (Some(Object::Loop(state)), "changed") => {
                let new = Value::tuple(given.positional);
                let old = state.changed.take().map(Value::tuple);
                let is_same = match &old {
                    Some(old) => operators::equal(old, &new, meter)?,
                    None => false,
                };
                state.changed = Some(new.items(meter)?.to_vec());
                Ok((!is_same).into())
            }
            (Some(Object::Loop(state)), "") => {
                let Some(node) = state.node.clone() else {
                    return Err(Failure::new("a loop that runs itself must be marked `recursive`"));
                };
                let depth = state.depth + 1;
                let [list] = given.bind("loop", [""], 1)?;
                let list = list.unwrap_or(Value::None);
                let (text, _) = self.captured(|run| run.for_loop(&node, Some(&list), depth))?;
                Ok(text.into())
            }
            _ => Err(Failure::new("it cannot be called")),
        }
    }

    fn call_function(&mut self, function: Function, given: Given) -> Result {
        match function {
            Function::Range => range(given),
            Function::Dict => Ok(Value::Dict(Rc::new(self.dict("dict", given)?))),
            Function::Namespace => {
                let dict = self.dict("namespace", given)?;
                let fields = dict.entries.into_iter();
                let fields = fields.filter_map(|(k, v)| Some((k.as_text()?.clone(), v))).collect();
                self.object(ObjectKind::Namespace, Object::Namespace(fields))
            }
            Function::Cycler => {
                if given.positional.is_empty() || !given.named.is_empty() {
                    return Err(Failure::new("cycler: expected values to cycle through"));
                }
                let items = Rc::new(given.positional);
                self.object(ObjectKind::Cycler, Object::Cycler { items, at: 0 })
            }
            Function::Joiner => {
                let [separator] = given.bind("joiner", ["sep"], 0)?;
                let separator = separator.unwrap_or_else(|| ", ".into());
                self.object(ObjectKind::Joiner, Object::Joiner { separator, is_used: false })
            }
            Function::RaiseException => {
                let [message] = given.bind("raise_exception", ["message"], 1)?;
                let message = message.unwrap_or(Value::None).text(self.meter)?;
                Err(Failure::raised(&message))
            }
            Function::StrftimeNow => {
                let [format] = given.bind("strftime_now", ["format"], 1)?;
                let format = format.as_ref().and_then(Value::as_text);
                let format = format.ok_or_else(|| Failure::new("strftime_now: expected a text"))?;
                // A directive may make far more than its two bytes.
                bounded(format.len().saturating_mul(16))?;
                self.meter.spend(format.len())?;
                Ok(clock::strftime(self.now, format).into())
            }
        }
    }

    fn object(&mut self, kind: ObjectKind, object: Object) -> Result {
        self.meter.spend(4)?;
        self.objects.push(object);
        Ok(Value::Object(kind, self.objects.len() - 1))
    }

    /// `dict(pairs, name=..)`
    fn dict(&mut self, what: &str, given: Given) -> Result<Dict> {
        let mut dict = Dict::default();
        if given.positional.len() > 1 {
            return Err(Failure::new(format!("{what}: expected one value, and others by name")));
        }
        match given.positional.first() {
            None => {}
            Some(Value::Dict(other)) => {
                self.meter.spend(2 * other.entries.len())?;
                for (key, value) in &other.entries {
                    dict.insert(key.clone(), value.clone(), self.meter)?;
                }
            }
            Some(pairs) => {
                for pair in pairs.items(self.meter)?.iter() {
                    self.meter.spend(2)?;
                    let pair = pair.items(self.meter)?;
                    let [key, value] = &pair[..] else {
                        return Err(Failure::new(format!("{what}: expected pairs")));
                    };
                    dict.insert(key.clone(), value.clone(), self.meter)?;
                }
            }
        }
        for (name, value) in given.named {
            dict.insert(Value::Text(name), value, self.meter)?;
        }
        Ok(dict)
    }

    fn call_macro(&mut self, called: &Rc<MacroValue>, given: Given) -> Result {
        let node: &Macro = &called.node;
        let name = &node.name;
        let mut scope = Scope::new();
        let mut positional = given.positional.into_iter();
        let mut missing = Vec::new();
        for (parameter, default) in &node.parameters {
            match positional.next() {
                Some(value) => {
                    scope.insert(parameter.clone(), value);
                }
                None => missing.push((parameter, default)),
            }
        }
        let more: Vec<Value> = positional.collect();
        if node.uses.varargs {
            scope.insert("varargs".into(), Value::tuple(more));
        } else if !more.is_empty() {
            let most = node.parameters.len();
            return Err(Failure::new(format!("{name}: expected at most {most} values")));
        }
        let mut kwargs = Vec::new();
        for (key, value) in given.named {
            let is_parameter = node.parameters.iter().any(|(parameter, _)| *parameter == key);
            if is_parameter {
                if scope.contains_key(&key) {
                    return Err(Failure::new(format!(
                        "{name}: the argument `{key}` is given twice"
                    )));
                }
                missing.retain(|(parameter, _)| **parameter != key);
                scope.insert(key, value);
            } else if &*key == "caller" && node.uses.caller {
                scope.insert(key, value);
            } else if node.uses.kwargs {
                kwargs.push((key, value));
            } else {
                let reason = format!("{name}: there is no argument `{}`", key.escape_debug());
                return Err(Failure::new(reason));
            }
        }
        if node.uses.kwargs {
            scope.insert("kwargs".into(), dict_of(kwargs, self.meter)?);
        }
        if node.uses.caller && !scope.contains_key("caller") {
            scope.insert("caller".into(), Value::undefined("caller"));
        }

        let mut scopes = Vec::new();
        if let Some(captured) = &called.captured {
            self.meter.spend(captured.len())?;
            let mut around: Scope = captured.iter().cloned().collect();
            around.insert(name.clone(), Value::Macro(called.clone()));
            scopes.push(around);
        }
        scopes.push(scope);
        let caller = std::mem::replace(&mut self.scopes, scopes);
        for (parameter, default) in missing {
            let value = match default {
                Some(default) => self.eval(default)?,
                None => Value::Undefined(parameter.clone()),
            };
            self.set(parameter, value);
        }
        let (text, _) = self.captured(|run| run.all(&node.body))?;
        self.scopes = caller;
        Ok(text.into())
    }
}

fn range(given: Given) -> Result {
    let [a, b, c] = given.bind("range", ["", "", ""], 1)?;
    let number = |value: Option<Value>| {
        let value = value.unwrap_or(Value::None);
        let number = value.as_int().and_then(|number| i64::try_from(number).ok());
        number.ok_or_else(|| {
            Failure::new(format!("range: expected a whole number, found {}", value.kind()))
        })
    };
    let (start, stop) = if b.is_some() { (number(a)?, number(b)?) } else { (0, number(a)?) };
    let step = if c.is_some() { number(c)? } else { 1 };
    if step == 0 {
        return Err(Failure::new("range: the step must not be 0"));
    }
    let span = i128::from(stop) - i128::from(start);
    let span = if step > 0 { span } else { -span };
    let len = if span <= 0 { 0 } else { (span - 1) / i128::from(step).abs() + 1 };
    let len = usize::try_from(len).ok().filter(|&len| len <= MAX_RANGE);
    let len =
        len.ok_or_else(|| Failure::new(format!("a range of more than {MAX_RANGE} numbers")))?;
    Ok(Value::Range(Range { start, step, len }))
}
