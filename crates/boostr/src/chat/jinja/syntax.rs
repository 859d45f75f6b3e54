//! A template as a tree of statements and expressions.
//!
//! Chains of operators, of attributes and of filters are lists: what is deep in the tree is deep in the source,
//! and that is bounded. Nothing here depends on a conversation.

use std::sync::Arc;

use super::lexer::{Token, tokens};
use super::{Failure, Result};

/// Deepest nesting of brackets and blocks.
const MAX_DEPTH: usize = 250;

/// An expression and the line that it starts on.
#[derive(Debug)]
pub(super) struct Expr {
    pub(super) line: u32,
    pub(super) node: Node,
}

#[derive(Debug)]
pub(super) enum Node {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Arc<str>),
    Name(Arc<str>),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Not(Box<Expr>),
    Sign {
        is_minus: bool,
        value: Box<Expr>,
    },
    /// Operators of one rank, from left to right.
    Math(Box<Expr>, Vec<(Math, Expr)>),
    /// `a ~ b ~ c`
    Concat(Vec<Expr>),
    And(Vec<Expr>),
    Or(Vec<Expr>),
    /// `a < b < c`: each with the next.
    Compare(Box<Expr>, Vec<(Compare, Expr)>),
    If {
        test: Box<Expr>,
        yes: Box<Expr>,
        no: Option<Box<Expr>>,
    },
    /// What stands behind a value: attributes, items, calls, filters, tests.
    Chain(Box<Expr>, Vec<(u32, Link)>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Math {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Rem,
    Pow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

#[derive(Debug)]
pub(super) enum Link {
    Attribute(Arc<str>),
    Item(Box<Expr>),
    Slice(Box<[Option<Expr>; 3]>),
    Call(Arguments),
    Filter(Arc<str>, Arguments),
    Test { name: Arc<str>, arguments: Arguments, is_not: bool },
}

#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Expr>,
    pub(super) named: Vec<(Arc<str>, Expr)>,
    /// `*list`
    pub(super) list: Option<Box<Expr>>,
    /// `**dict`
    pub(super) dict: Option<Box<Expr>>,
}

/// What is assigned to.
#[derive(Debug)]
pub(super) enum Target {
    Name(Arc<str>),
    /// `namespace.name`
    Field(Arc<str>, Arc<str>),
    Tuple(Vec<Target>),
}

#[derive(Debug)]
pub(super) enum Statement {
    Data(String),
    Print(Expr),
    If(Vec<(Expr, Vec<Statement>)>, Vec<Statement>),
    For(Arc<For>),
    Set {
        line: u32,
        target: Target,
        value: Expr,
    },
    SetBlock {
        line: u32,
        target: Target,
        filters: Vec<(u32, Link)>,
        body: Vec<Statement>,
    },
    Macro(Arc<Macro>),
    /// A call of a macro that is given a block.
    Call {
        line: u32,
        call: Expr,
        body: Arc<Macro>,
    },
    Filter {
        line: u32,
        filters: Vec<(u32, Link)>,
        body: Vec<Statement>,
    },
    With {
        line: u32,
        values: Vec<(Target, Expr)>,
        body: Vec<Statement>,
    },
    /// What may be replaced elsewhere, and sees the template's own variables alone.
    Block(Vec<Statement>),
    /// What the assistant says.
    Generation(Vec<Statement>),
    Do(Expr),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct For {
    pub(super) line: u32,
    pub(super) target: Target,
    pub(super) list: Expr,
    pub(super) test: Option<Expr>,
    pub(super) is_recursive: bool,
    pub(super) body: Vec<Statement>,
    pub(super) otherwise: Vec<Statement>,
}

#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: Arc<str>,
    pub(super) parameters: Vec<(Arc<str>, Option<Expr>)>,
    pub(super) body: Vec<Statement>,
    /// Whether the body names them; only then may there be more arguments than parameters.
    pub(super) uses: Uses,
}

/// Which of the names that only macros have a body uses.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Uses {
    pub(super) varargs: bool,
    pub(super) kwargs: bool,
    pub(super) caller: bool,
}

struct Parser {
    tokens: Vec<(u32, Token)>,
    at: usize,
    depth: usize,
    loops: usize,
    /// Of the macros that enclose this place.
    uses: Vec<Uses>,
    has_generation: bool,
}

/// The statements of a template, and whether it says what the assistant says.
pub(super) fn parse(source: &str) -> Result<(Vec<Statement>, bool)> {
    let tokens = tokens(source)?;
    let mut parser =
        Parser { tokens, at: 0, depth: 0, loops: 0, uses: Vec::new(), has_generation: false };
    let parsed = parser.statements(&[]);
    let (body, _) = parsed.map_err(|error| error.at(parser.line()))?;
    Ok((body, parser.has_generation))
}

impl Parser {
    fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |(line, _)| *line)
    }

    fn peek(&self) -> &Token {
        self.tokens.get(self.at).map_or(&Token::End, |(_, token)| token)
    }

    fn next(&mut self) -> Token {
        let token = self.peek().clone();
        self.at += 1;
        token
    }

    fn is_sign(&self, sign: &str) -> bool {
        matches!(self.peek(), Token::Sign(other) if *other == sign)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Token::Name(other) if **other == *name)
    }

    fn skip_sign(&mut self, sign: &str) -> bool {
        let is_it = self.is_sign(sign);
        self.at += usize::from(is_it);
        is_it
    }

    fn skip_name(&mut self, name: &str) -> bool {
        let is_it = self.is_name(name);
        self.at += usize::from(is_it);
        is_it
    }

    fn unexpected<T>(&self, expected: &str) -> Result<T> {
        Err(Failure::new(format!("expected {expected}, found {}", self.peek().shown())))
    }

    fn expect_sign(&mut self, sign: &str) -> Result<()> {
        if self.skip_sign(sign) { Ok(()) } else { self.unexpected(&format!("`{sign}`")) }
    }

    fn expect(&mut self, token: &Token) -> Result<()> {
        if self.peek() == token {
            self.at += 1;
            return Ok(());
        }
        self.unexpected(&token.shown())
    }

    fn name(&mut self) -> Result<Arc<str>> {
        match self.peek() {
            Token::Name(name) => {
                let name = name.clone();
                self.at += 1;
                Ok(name)
            }
            _ => self.unexpected("a name"),
        }
    }

    fn deeper<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(Failure::new(format!("it is nested more than {MAX_DEPTH} deep")));
        }
        let result = work(self);
        self.depth -= 1;
        result
    }

    /// Statements up to a tag with one of these names, which is passed; up to the end where there are none.
    fn statements(&mut self, ends: &[&'static str]) -> Result<(Vec<Statement>, &'static str)> {
        self.deeper(|parser| {
            let mut all = Vec::new();
            loop {
                match parser.next() {
                    Token::Data(text) => all.push(Statement::Data(text)),
                    Token::VariableStart => {
                        all.push(Statement::Print(parser.tuple()?));
                        parser.expect(&Token::VariableEnd)?;
                    }
                    Token::BlockStart => {
                        let end = ends.iter().find(|end| parser.is_name(end));
                        if let Some(end) = end {
                            parser.at += 1;
                            return Ok((all, *end));
                        }
                        all.push(parser.statement()?);
                    }
                    Token::End if ends.is_empty() => return Ok((all, "")),
                    _ => {
                        parser.at -= 1;
                        let reason =
                            format!("the end of block is missing, `{}`", ends.join("` or `"));
                        return Err(Failure::new(reason));
                    }
                }
            }
        })
    }

    /// What a tag encloses, up to the one that ends it.
    fn body(&mut self, end: &'static str) -> Result<Vec<Statement>> {
        self.expect(&Token::BlockEnd)?;
        let (body, _) = self.statements(&[end])?;
        self.expect(&Token::BlockEnd)?;
        Ok(body)
    }

    fn statement(&mut self) -> Result<Statement> {
        let line = self.line();
        let tag = self.name()?;
        let statement = match &*tag {
            "if" => return self.branches(),
            "for" => return self.for_loop(line),
            "set" => return self.set(line),
            "macro" => {
                let name = self.name()?;
                let parameters = self.parameters()?;
                return Ok(Statement::Macro(self.macro_of(name, parameters, "endmacro")?));
            }
            "call" => {
                let parameters = if self.is_sign("(") { self.parameters()? } else { Vec::new() };
                let call = self.expression()?;
                if !matches!(&call.node, Node::Chain(_, links) if matches!(links.last(), Some((_, Link::Call(_)))))
                {
                    return Err(Failure::new("expected a call of a macro"));
                }
                let body = self.macro_of("caller".into(), parameters, "endcall")?;
                return Ok(Statement::Call { line, call, body });
            }
            "filter" => {
                let filters = self.filters(true)?;
                return Ok(Statement::Filter { line, filters, body: self.body("endfilter")? });
            }
            "with" => {
                let mut values = Vec::new();
                while *self.peek() != Token::BlockEnd {
                    if !values.is_empty() {
                        self.expect_sign(",")?;
                    }
                    let target = self.target(false)?;
                    self.expect_sign("=")?;
                    values.push((target, self.expression()?));
                }
                return Ok(Statement::With { line, values, body: self.body("endwith")? });
            }
            "block" => {
                let name = self.name()?;
                self.expect(&Token::BlockEnd)?;
                let (body, _) = self.statements(&["endblock"])?;
                self.skip_name(&name);
                self.expect(&Token::BlockEnd)?;
                return Ok(Statement::Block(body));
            }
            "generation" => {
                self.has_generation = true;
                return Ok(Statement::Generation(self.body("endgeneration")?));
            }
            "break" | "continue" if self.loops == 0 => {
                return Err(Failure::new(format!("`{tag}` outside of a loop")));
            }
            "break" => Statement::Break,
            "continue" => Statement::Continue,
            "do" => Statement::Do(self.tuple()?),
            "print" => Statement::Print(self.tuple()?),
            _ => {
                self.at -= 1;
                return Err(Failure::new(format!("an unknown tag `{}`", tag.escape_debug())));
            }
        };
        self.expect(&Token::BlockEnd)?;
        Ok(statement)
    }

    fn branches(&mut self) -> Result<Statement> {
        let mut branches = Vec::new();
        loop {
            let test = self.tuple_without_condition()?;
            self.expect(&Token::BlockEnd)?;
            let (body, end) = self.statements(&["elif", "else", "endif"])?;
            branches.push((test, body));
            match end {
                "elif" => {}
                "else" => return Ok(Statement::If(branches, self.body("endif")?)),
                _ => {
                    self.expect(&Token::BlockEnd)?;
                    return Ok(Statement::If(branches, Vec::new()));
                }
            }
        }
    }

    fn for_loop(&mut self, line: u32) -> Result<Statement> {
        let target = self.target(false)?;
        if !self.skip_name("in") {
            return self.unexpected("`in`");
        }
        let list = self.tuple_without_condition()?;
        let test = if self.skip_name("if") { Some(self.expression()?) } else { None };
        let is_recursive = self.skip_name("recursive");
        self.expect(&Token::BlockEnd)?;
        self.loops += 1;
        let (body, end) = self.statements(&["endfor", "else"])?;
        self.loops -= 1;
        let otherwise = if end == "else" {
            self.body("endfor")?
        } else {
            self.expect(&Token::BlockEnd)?;
            Vec::new()
        };
        let node = For { line, target, list, test, is_recursive, body, otherwise };
        Ok(Statement::For(Arc::new(node)))
    }

    fn set(&mut self, line: u32) -> Result<Statement> {
        let target = self.target(true)?;
        if self.skip_sign("=") {
            let value = self.tuple()?;
            self.expect(&Token::BlockEnd)?;
            return Ok(Statement::Set { line, target, value });
        }
        let filters = self.filters(false)?;
        Ok(Statement::SetBlock { line, target, filters, body: self.body("endset")? })
    }

    /// A target, or several with commas.
    fn target(&mut self, with_fields: bool) -> Result<Target> {
        let mut all = Vec::new();
        let mut is_tuple = false;
        loop {
            if self.skip_sign("(") {
                let inner = self.deeper(|parser| parser.target(false))?;
                self.expect_sign(")")?;
                all.push(inner);
            } else {
                let name = self.name()?;
                if with_fields && self.skip_sign(".") {
                    all.push(Target::Field(name, self.name()?));
                } else if matches!(&*name, "true" | "false" | "none" | "True" | "False" | "None") {
                    return Err(Failure::new(format!("`{name}` cannot be assigned to")));
                } else {
                    all.push(Target::Name(name));
                }
            }
            if !self.skip_sign(",") {
                break;
            }
            is_tuple = true;
            if self.is_sign("=") || self.is_name("in") || self.is_sign(")") {
                break;
            }
        }
        match all.pop() {
            Some(one) if !is_tuple => Ok(one),
            last => {
                all.extend(last);
                Ok(Target::Tuple(all))
            }
        }
    }

    fn parameters(&mut self) -> Result<Vec<(Arc<str>, Option<Expr>)>> {
        self.expect_sign("(")?;
        let mut all: Vec<(Arc<str>, Option<Expr>)> = Vec::new();
        while !self.is_sign(")") {
            if !all.is_empty() {
                self.expect_sign(",")?;
            }
            let name = self.name()?;
            let default = if self.skip_sign("=") { Some(self.expression()?) } else { None };
            if default.is_none() && all.last().is_some_and(|(_, default)| default.is_some()) {
                let reason =
                    format!("the parameter `{name}` needs a default, as the one before it has one");
                return Err(Failure::new(reason));
            }
            all.push((name, default));
        }
        self.expect_sign(")")?;
        Ok(all)
    }

    fn macro_of(
        &mut self,
        name: Arc<str>,
        parameters: Vec<(Arc<str>, Option<Expr>)>,
        end: &'static str,
    ) -> Result<Arc<Macro>> {
        self.uses.push(Uses::default());
        let loops = std::mem::take(&mut self.loops);
        let body = self.body(end)?;
        self.loops = loops;
        let uses = self.uses.pop().unwrap_or_default();
        Ok(Arc::new(Macro { name, parameters, body, uses }))
    }

    /// Filters with `|` between them, one at least if it must be.
    fn filters(&mut self, must: bool) -> Result<Vec<(u32, Link)>> {
        let mut all = Vec::new();
        while self.skip_sign("|") || must && all.is_empty() {
            all.push(self.filter()?);
        }
        Ok(all)
    }

    fn filter(&mut self) -> Result<(u32, Link)> {
        let line = self.line();
        let name = self.dotted_name()?;
        let arguments = if self.skip_sign("(") { self.arguments()? } else { Arguments::default() };
        Ok((line, Link::Filter(name, arguments)))
    }

    fn dotted_name(&mut self) -> Result<Arc<str>> {
        let mut name = self.name()?;
        while self.skip_sign(".") {
            name = format!("{name}.{}", self.name()?).into();
        }
        Ok(name)
    }

    /// An expression, or a tuple of several.
    fn tuple(&mut self) -> Result<Expr> {
        self.tuple_of(Self::expression)
    }

    fn tuple_without_condition(&mut self) -> Result<Expr> {
        self.tuple_of(Self::or)
    }

    fn tuple_of(&mut self, one: fn(&mut Self) -> Result<Expr>) -> Result<Expr> {
        let line = self.line();
        let first = one(self)?;
        if !self.is_sign(",") {
            return Ok(first);
        }
        let mut all = vec![first];
        while self.skip_sign(",") && !self.ends_tuple() {
            all.push(one(self)?);
        }
        Ok(Expr { line, node: Node::Tuple(all) })
    }

    fn ends_tuple(&self) -> bool {
        matches!(self.peek(), Token::VariableEnd | Token::BlockEnd | Token::Sign(")"))
            || self.is_name("recursive")
    }

    fn expression(&mut self) -> Result<Expr> {
        self.deeper(Self::condition)
    }

    fn condition(&mut self) -> Result<Expr> {
        let line = self.line();
        let mut value = self.or()?;
        let mut count = 0;
        while self.skip_name("if") {
            count += 1;
            if self.depth + count > MAX_DEPTH {
                return Err(Failure::new(format!("it is nested more than {MAX_DEPTH} deep")));
            }
            let test = Box::new(self.or()?);
            let no = if self.skip_name("else") { Some(Box::new(self.expression()?)) } else { None };
            value = Expr { line, node: Node::If { test, yes: Box::new(value), no } };
        }
        Ok(value)
    }

    fn or(&mut self) -> Result<Expr> {
        self.chain("or", Self::and, Node::Or)
    }

    fn and(&mut self) -> Result<Expr> {
        self.chain("and", Self::not, Node::And)
    }

    /// Expressions with `word` between them, or a single one.
    fn chain(
        &mut self,
        word: &str,
        next: fn(&mut Self) -> Result<Expr>,
        node: fn(Vec<Expr>) -> Node,
    ) -> Result<Expr> {
        let (line, first) = (self.line(), next(self)?);
        if !self.is_name(word) {
            return Ok(first);
        }
        let mut all = vec![first];
        while self.skip_name(word) {
            all.push(next(self)?);
        }
        Ok(Expr { line, node: node(all) })
    }

    fn not(&mut self) -> Result<Expr> {
        let line = self.line();
        if self.skip_name("not") {
            let value = Box::new(self.deeper(Self::not)?);
            return Ok(Expr { line, node: Node::Not(value) });
        }
        self.compare()
    }

    fn compare(&mut self) -> Result<Expr> {
        let (line, first) = (self.line(), self.sum()?);
        let mut all = Vec::new();
        loop {
            let compare = match self.peek() {
                Token::Sign("==") => Compare::Eq,
                Token::Sign("!=") => Compare::Ne,
                Token::Sign("<") => Compare::Lt,
                Token::Sign("<=") => Compare::Le,
                Token::Sign(">") => Compare::Gt,
                Token::Sign(">=") => Compare::Ge,
                Token::Name(name) if **name == *"in" => Compare::In,
                Token::Name(name)
                    if **name == *"not"
                        && matches!(self.tokens.get(self.at + 1), Some((_, Token::Name(next))) if **next == *"in") =>
                {
                    self.at += 1;
                    Compare::NotIn
                }
                _ => break,
            };
            self.at += 1;
            all.push((compare, self.sum()?));
        }
        if all.is_empty() {
            return Ok(first);
        }
        Ok(Expr { line, node: Node::Compare(Box::new(first), all) })
    }

    fn math(
        &mut self,
        operand: fn(&mut Self) -> Result<Expr>,
        operator: fn(&str) -> Option<Math>,
    ) -> Result<Expr> {
        let (line, first) = (self.line(), operand(self)?);
        let mut all = Vec::new();
        while let Token::Sign(sign) = self.peek() {
            let Some(math) = operator(sign) else { break };
            self.at += 1;
            all.push((math, operand(self)?));
        }
        if all.is_empty() {
            return Ok(first);
        }
        Ok(Expr { line, node: Node::Math(Box::new(first), all) })
    }

    fn sum(&mut self) -> Result<Expr> {
        self.math(Self::concat, |sign| match sign {
            "+" => Some(Math::Add),
            "-" => Some(Math::Sub),
            _ => None,
        })
    }

    fn concat(&mut self) -> Result<Expr> {
        let (line, first) = (self.line(), self.product()?);
        if !self.is_sign("~") {
            return Ok(first);
        }
        let mut all = vec![first];
        while self.skip_sign("~") {
            all.push(self.product()?);
        }
        Ok(Expr { line, node: Node::Concat(all) })
    }

    fn product(&mut self) -> Result<Expr> {
        self.math(Self::power, |sign| match sign {
            "*" => Some(Math::Mul),
            "/" => Some(Math::Div),
            "//" => Some(Math::FloorDiv),
            "%" => Some(Math::Rem),
            _ => None,
        })
    }

    fn power(&mut self) -> Result<Expr> {
        self.math(|parser| parser.unary(true), |sign| (sign == "**").then_some(Math::Pow))
    }

    fn unary(&mut self, with_filters: bool) -> Result<Expr> {
        let line = self.line();
        let value = match self.peek() {
            Token::Sign(sign @ ("-" | "+")) => {
                let is_minus = *sign == "-";
                self.at += 1;
                let value = Box::new(self.deeper(|parser| parser.unary(false))?);
                Expr { line, node: Node::Sign { is_minus, value } }
            }
            _ => self.primary()?,
        };
        let mut links = Vec::new();
        self.postfix(&mut links)?;
        if with_filters {
            self.filters_and_tests(&mut links)?;
        }
        if links.is_empty() {
            return Ok(value);
        }
        Ok(Expr { line, node: Node::Chain(Box::new(value), links) })
    }

    fn primary(&mut self) -> Result<Expr> {
        let line = self.line();
        let node = match self.next() {
            Token::Name(name) => match &*name {
                "true" | "True" => Node::Bool(true),
                "false" | "False" => Node::Bool(false),
                "none" | "None" => Node::None,
                special => {
                    for uses in &mut self.uses {
                        uses.varargs |= special == "varargs";
                        uses.kwargs |= special == "kwargs";
                        uses.caller |= special == "caller";
                    }
                    Node::Name(name)
                }
            },
            Token::Text(mut text) => {
                while let Token::Text(more) = self.peek() {
                    text.push_str(more);
                    self.at += 1;
                }
                Node::Text(text.into())
            }
            Token::Int(number) => Node::Int(number),
            Token::Float(number) => Node::Float(number),
            Token::Sign("(") => {
                if self.skip_sign(")") {
                    Node::Tuple(Vec::new())
                } else {
                    let inner = self.tuple()?;
                    self.expect_sign(")")?;
                    return Ok(inner);
                }
            }
            Token::Sign("[") => Node::List(self.items("]")?),
            Token::Sign("{") => {
                let mut all = Vec::new();
                while !self.is_sign("}") {
                    if !all.is_empty() {
                        self.expect_sign(",")?;
                        if self.is_sign("}") {
                            break;
                        }
                    }
                    let key = self.expression()?;
                    self.expect_sign(":")?;
                    all.push((key, self.expression()?));
                }
                self.expect_sign("}")?;
                Node::Dict(all)
            }
            _ => {
                self.at -= 1;
                return self.unexpected("an expression");
            }
        };
        Ok(Expr { line, node })
    }

    fn items(&mut self, end: &str) -> Result<Vec<Expr>> {
        let mut all = Vec::new();
        while !self.is_sign(end) {
            if !all.is_empty() {
                self.expect_sign(",")?;
                if self.is_sign(end) {
                    break;
                }
            }
            all.push(self.expression()?);
        }
        self.expect_sign(end)?;
        Ok(all)
    }

    /// Attributes, items and calls.
    fn postfix(&mut self, links: &mut Vec<(u32, Link)>) -> Result<()> {
        loop {
            let line = self.line();
            if self.skip_sign(".") {
                let link = match self.next() {
                    Token::Name(name) => Link::Attribute(name),
                    Token::Int(number) => {
                        Link::Item(Box::new(Expr { line, node: Node::Int(number) }))
                    }
                    _ => {
                        self.at -= 1;
                        return self.unexpected("a name or a number");
                    }
                };
                links.push((line, link));
            } else if self.skip_sign("[") {
                let link = self.subscript()?;
                links.push((line, link));
            } else if self.skip_sign("(") {
                let arguments = self.arguments()?;
                links.push((line, Link::Call(arguments)));
            } else {
                return Ok(());
            }
        }
    }

    fn subscript(&mut self) -> Result<Link> {
        let line = self.line();
        let mut parts: [Option<Expr>; 3] = [None, None, None];
        let (mut part, mut is_slice) = (0, false);
        while !self.is_sign("]") {
            if self.skip_sign(":") {
                is_slice = true;
                part += 1;
                if part > 2 {
                    return self.unexpected("`]`");
                }
            } else if self.is_sign(",") && !is_slice && parts[0].is_some() {
                let mut all: Vec<Expr> = parts[0].take().into_iter().collect();
                while self.skip_sign(",") && !self.is_sign("]") {
                    all.push(self.expression()?);
                }
                parts[0] = Some(Expr { line, node: Node::Tuple(all) });
            } else if parts[part].is_some() {
                return self.unexpected("`]`");
            } else {
                parts[part] = Some(self.expression()?);
            }
        }
        self.expect_sign("]")?;
        match parts {
            parts if is_slice => Ok(Link::Slice(Box::new(parts))),
            [Some(item), ..] => Ok(Link::Item(Box::new(item))),
            _ => Err(Failure::new("expected an index, found `[]`")),
        }
    }

    fn filters_and_tests(&mut self, links: &mut Vec<(u32, Link)>) -> Result<()> {
        loop {
            let line = self.line();
            if self.skip_sign("|") {
                links.push(self.filter()?);
            } else if self.skip_name("is") {
                let is_not = self.skip_name("not");
                let name = self.dotted_name()?;
                let arguments = self.test_arguments()?;
                links.push((line, Link::Test { name, arguments, is_not }));
            } else if self.skip_sign("(") {
                let arguments = self.arguments()?;
                links.push((line, Link::Call(arguments)));
            } else {
                return Ok(());
            }
        }
    }

    /// Arguments in parentheses, or one value without.
    fn test_arguments(&mut self) -> Result<Arguments> {
        if self.skip_sign("(") {
            return self.arguments();
        }
        let is_value = match self.peek() {
            Token::Name(name) if **name == *"is" => {
                return Err(Failure::new("a test behind a test needs parentheses"));
            }
            Token::Name(name) => !matches!(&**name, "else" | "or" | "and"),
            Token::Text(_) | Token::Int(_) | Token::Float(_) | Token::Sign("[" | "{") => true,
            _ => false,
        };
        if !is_value {
            return Ok(Arguments::default());
        }
        let line = self.line();
        let value = self.primary()?;
        let mut links = Vec::new();
        self.postfix(&mut links)?;
        let value = if links.is_empty() {
            value
        } else {
            Expr { line, node: Node::Chain(Box::new(value), links) }
        };
        Ok(Arguments { positional: vec![value], ..Arguments::default() })
    }

    /// The arguments of a call, whose parenthesis is open.
    fn arguments(&mut self) -> Result<Arguments> {
        let mut arguments = Arguments::default();
        let mut is_first = true;
        while !self.is_sign(")") {
            if !std::mem::take(&mut is_first) {
                self.expect_sign(",")?;
                if self.is_sign(")") {
                    break;
                }
            }
            let is_named = matches!(
                (self.peek(), self.tokens.get(self.at + 1)),
                (Token::Name(_), Some((_, Token::Sign("="))))
            );
            if self.skip_sign("*") {
                arguments.list = Some(Box::new(self.expression()?));
            } else if self.skip_sign("**") {
                arguments.dict = Some(Box::new(self.expression()?));
            } else if is_named {
                let name = self.name()?;
                self.expect_sign("=")?;
                arguments.named.push((name, self.expression()?));
            } else if arguments.named.is_empty() && arguments.dict.is_none() {
                arguments.positional.push(self.expression()?);
            } else {
                return self.unexpected("an argument by name, as the one before it");
            }
        }
        self.expect_sign(")")?;
        Ok(arguments)
    }
}
