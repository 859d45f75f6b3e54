//! Rules in GBNF, the notation of llama.cpp, as rules in Lark's.
//!
//! ```text
//! root ::= "[" (item ("," item)*)? "]"      start: "[" (r1 ("," r1)*)? "]"
//! item ::= [0-9]+                           r1: /[0-9]+/
//! ```
//!
//! What needs no recursion becomes a regular expression, so that a mask is found by an automaton. A longest match wins
//! where one expression follows another, so that some texts of an ambiguous grammar are not made; none is made that the
//! grammar does not have.

use std::collections::HashMap;
use std::fmt::Write;
use std::iter::Peekable;
use std::str::Chars;

/// Deepest nesting of brackets.
const MAX_DEPTH: usize = super::MAX_DEPTH;
/// Longest regular expression that stands for a rule.
const MAX_EXPRESSION: usize = 4 << 10;

/// What a rule is made of.
#[derive(Debug, Clone)]
enum Node {
    Text(String),
    /// A class of characters, as in a regular expression.
    Class(String),
    Rule(String),
    All(Vec<Node>),
    Any(Vec<Node>),
    Times(Box<Node>, usize, Option<usize>),
}

/// The rules as Lark's.
///
/// # Errors
///
/// What was expected and what was found.
pub(super) fn to_lark(gbnf: &str) -> Result<String, String> {
    let tokens = tokens(gbnf)?;
    let mut parser = Parser { tokens: &tokens };
    let mut rules: Vec<(String, Node)> = Vec::new();
    while let Some(token) = parser.next() {
        let Token::Define(name) = token else {
            return Err(format!("expected `name ::=`, found {token:?}"));
        };
        let node = parser.any(MAX_DEPTH)?;
        rules.push((name.clone(), node));
    }
    let mut names: HashMap<&str, usize> = HashMap::new();
    for (index, (name, _)) in rules.iter().enumerate() {
        if names.insert(name, index).is_some() {
            return Err(format!("rule `{name}` is there twice"));
        }
    }
    let root = *names.get("root").ok_or("expected a rule `root`, found none")?;
    let expressions = expressions(&rules, &names)?;
    let mut lark = format!("start: r{root}\n");
    for (index, (_, node)) in rules.iter().enumerate() {
        let writer = Writer { names: &names, expressions: &expressions };
        let _ = write!(lark, "r{index}: ");
        match expressions.get(&index) {
            Some(Expression { text, .. }) if text.is_empty() => lark.push_str("\"\""),
            // A terminal never matches nothing, so this one has all texts but the empty one. An intersection needs a name.
            Some(Expression { text, is_nullable: true }) => {
                let _ = write!(lark, "T{index}?\nT{index}: /(?:{text})/ & /(?s:.+)/");
            }
            Some(expression) => lark.push_str(&terminal(expression)),
            None => writer.write(node, &mut lark),
        }
        lark.push('\n');
    }
    Ok(lark)
}

/// A regular expression, and whether it matches nothing.
#[derive(Debug, Clone)]
struct Expression {
    text: String,
    is_nullable: bool,
}

/// Those of the rules that need no recursion. A rule that is not there is an error.
fn expressions(
    rules: &[(String, Node)],
    names: &HashMap<&str, usize>,
) -> Result<HashMap<usize, Expression>, String> {
    for (name, node) in rules {
        check(node, names)
            .map_err(|missing| format!("rule `{name}` names `{missing}`, which is not there"))?;
    }
    let mut found = HashMap::new();
    // From below: first those that name no other.
    loop {
        let before = found.len();
        for (index, (_, node)) in rules.iter().enumerate() {
            if !found.contains_key(&index)
                && let Some(expression) = expression(node, names, &found)
            {
                found.insert(index, expression);
            }
        }
        if found.len() == before {
            return Ok(found);
        }
    }
}

fn check(node: &Node, names: &HashMap<&str, usize>) -> Result<(), String> {
    match node {
        Node::Text(_) | Node::Class(_) => Ok(()),
        Node::Rule(name) if names.contains_key(name.as_str()) => Ok(()),
        Node::Rule(name) => Err(name.clone()),
        Node::All(nodes) | Node::Any(nodes) => nodes.iter().try_for_each(|node| check(node, names)),
        Node::Times(node, ..) => check(node, names),
    }
}

fn expression(
    node: &Node,
    names: &HashMap<&str, usize>,
    known: &HashMap<usize, Expression>,
) -> Option<Expression> {
    let part = |node| expression(node, names, known);
    let made = match node {
        Node::Text(text) => Expression { text: escaped(text), is_nullable: text.is_empty() },
        Node::Class(class) => Expression { text: class.clone(), is_nullable: false },
        Node::Rule(name) => {
            let Expression { text, is_nullable } = known.get(names.get(name.as_str())?)?;
            Expression { text: format!("(?:{text})"), is_nullable: *is_nullable }
        }
        Node::All(nodes) => {
            let parts: Vec<Expression> = nodes.iter().map(part).collect::<Option<_>>()?;
            let text = parts.iter().map(|part| part.text.as_str()).collect();
            Expression { text, is_nullable: parts.iter().all(|part| part.is_nullable) }
        }
        Node::Any(nodes) => {
            let parts: Vec<Expression> = nodes.iter().map(part).collect::<Option<_>>()?;
            let texts: Vec<&str> = parts.iter().map(|part| part.text.as_str()).collect();
            let text = format!("(?:{})", texts.join("|"));
            Expression { text, is_nullable: parts.iter().any(|part| part.is_nullable) }
        }
        Node::Times(_, _, Some(0)) => Expression { text: String::new(), is_nullable: true },
        Node::Times(node, least, most) => {
            let Expression { text, is_nullable } = part(node)?;
            let text = format!("(?:{text}){}", times(*least, *most));
            Expression { text, is_nullable: is_nullable || *least == 0 }
        }
    };
    (made.text.len() <= MAX_EXPRESSION).then_some(made)
}

/// An expression that does not match nothing, as what stands in a rule.
fn terminal(expression: &Expression) -> String {
    format!("/{}/", expression.text)
}

struct Writer<'a> {
    names: &'a HashMap<&'a str, usize>,
    expressions: &'a HashMap<usize, Expression>,
}

impl Writer<'_> {
    fn write(&self, node: &Node, out: &mut String) {
        match node {
            Node::Text(text) => out.push_str(&serde_json::Value::from(text.as_str()).to_string()),
            Node::Rule(name) => {
                let _ = write!(out, "r{}", self.names.get(name.as_str()).copied().unwrap_or(0));
            }
            _ if let Some(expression) = expression(node, self.names, self.expressions)
                && !expression.is_nullable =>
            {
                out.push_str(&terminal(&expression));
            }
            Node::Class(class) => {
                let _ = write!(out, "/{class}/");
            }
            Node::All(nodes) => {
                for (i, node) in nodes.iter().enumerate() {
                    out.push_str(if i == 0 { "(" } else { " " });
                    self.write(node, out);
                }
                out.push_str(if nodes.is_empty() { "\"\"" } else { ")" });
            }
            Node::Any(nodes) => {
                for (i, node) in nodes.iter().enumerate() {
                    out.push_str(if i == 0 { "(" } else { " | " });
                    self.write(node, out);
                }
                out.push(')');
            }
            Node::Times(_, _, Some(0)) => out.push_str("\"\""),
            Node::Times(node, least, most) => {
                out.push('(');
                self.write(node, out);
                out.push(')');
                out.push_str(&times(*least, *most));
            }
        }
    }
}

fn times(least: usize, most: Option<usize>) -> String {
    match (least, most) {
        (0, None) => "*".into(),
        (1, None) => "+".into(),
        (0, Some(1)) => "?".into(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    }
}

/// Characters as they stand in a regular expression between slashes.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if c.is_alphanumeric() {
            out.push(c);
        } else {
            let _ = write!(out, "\\x{{{:x}}}", u32::from(c));
        }
    }
    out
}

#[derive(Debug, Clone, PartialEq)]
enum Token {
    /// `name ::=`
    Define(String),
    Name(String),
    Text(String),
    Class(String),
    Open,
    Close,
    Or,
    Times(usize, Option<usize>),
}

struct Parser<'a> {
    tokens: &'a [Token],
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a Token> {
        self.tokens.first()
    }

    fn next(&mut self) -> Option<&'a Token> {
        let (first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        Some(first)
    }

    fn any(&mut self, depth: usize) -> Result<Node, String> {
        let Some(depth) = depth.checked_sub(1) else {
            return Err(format!("expected brackets nested at most {MAX_DEPTH} deep, found more"));
        };
        let mut options = vec![self.all(depth)?];
        while self.peek() == Some(&Token::Or) {
            self.next();
            options.push(self.all(depth)?);
        }
        Ok(if options.len() == 1 { options.swap_remove(0) } else { Node::Any(options) })
    }

    fn all(&mut self, depth: usize) -> Result<Node, String> {
        let mut nodes = Vec::new();
        loop {
            let mut node = match self.peek() {
                Some(Token::Name(name)) => Node::Rule(name.clone()),
                Some(Token::Text(text)) => Node::Text(text.clone()),
                Some(Token::Class(class)) => Node::Class(class.clone()),
                Some(Token::Open) => {
                    self.next();
                    let inner = self.any(depth)?;
                    if self.peek() != Some(&Token::Close) {
                        return Err("expected `)`".into());
                    }
                    inner
                }
                Some(Token::Times(..)) => {
                    return Err("expected something before a number of times".into());
                }
                None | Some(Token::Define(_) | Token::Close | Token::Or) => break,
            };
            self.next();
            while let Some(Token::Times(least, most)) = self.peek() {
                node = Node::Times(Box::new(node), *least, *most);
                self.next();
            }
            nodes.push(node);
        }
        Ok(if nodes.len() == 1 { nodes.swap_remove(0) } else { Node::All(nodes) })
    }
}

fn tokens(gbnf: &str) -> Result<Vec<Token>, String> {
    let mut chars = gbnf.chars().peekable();
    let mut tokens = Vec::new();
    while let Some(c) = chars.next() {
        match c {
            c if c.is_whitespace() => {}
            '#' => while chars.next_if(|&c| c != '\n').is_some() {},
            '|' => tokens.push(Token::Or),
            '(' => tokens.push(Token::Open),
            ')' => tokens.push(Token::Close),
            '*' => tokens.push(Token::Times(0, None)),
            '+' => tokens.push(Token::Times(1, None)),
            '?' => tokens.push(Token::Times(0, Some(1))),
            '.' => tokens.push(Token::Class("(?s:.)".into())),
            '{' => tokens.push(bounds(&mut chars)?),
            '"' => tokens.push(Token::Text(text(&mut chars)?)),
            '[' => tokens.push(Token::Class(class(&mut chars)?)),
            ':' => match (chars.next(), chars.next(), tokens.pop()) {
                (Some(':'), Some('='), Some(Token::Name(name))) => tokens.push(Token::Define(name)),
                _ => return Err("expected `name ::=`".into()),
            },
            c if is_of_name(c) => {
                let mut name = c.to_string();
                while let Some(c) = chars.next_if(|&c| is_of_name(c)) {
                    name.push(c);
                }
                tokens.push(Token::Name(name));
            }
            other => return Err(format!("`{}` means nothing here", other.escape_debug())),
        }
    }
    Ok(tokens)
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// What stands after `{`: `n}`, `n,}`, `,m}` or `n,m}`.
fn bounds(chars: &mut Peekable<Chars<'_>>) -> Result<Token, String> {
    let mut inner = String::new();
    while let Some(c) = chars.next_if(|&c| c != '}') {
        inner.push(c);
    }
    chars.next();
    let number = |text: &str| -> Result<usize, String> {
        let number = text.trim().parse().ok().filter(|&n: &usize| n <= 10_000);
        number.ok_or_else(|| "expected a number of times up to 10000 in `{}`".to_owned())
    };
    let (least, most) = match inner.split_once(',') {
        None => (number(&inner)?, Some(number(&inner)?)),
        Some((least, most)) => {
            let least = if least.trim().is_empty() { 0 } else { number(least)? };
            let most = if most.trim().is_empty() { None } else { Some(number(most)?) };
            (least, most)
        }
    };
    if most.is_some_and(|most| most < least) {
        return Err(format!("expected at least {least} times after `,`"));
    }
    Ok(Token::Times(least, most))
}

fn text(chars: &mut Peekable<Chars<'_>>) -> Result<String, String> {
    let mut text = String::new();
    loop {
        match chars.next() {
            Some('"') => return Ok(text),
            Some('\\') => text.push(escape(chars)?),
            Some(c) if c != '\n' => text.push(c),
            _ => return Err("expected `\"` at the end of a text".into()),
        }
    }
}

fn class(chars: &mut Peekable<Chars<'_>>) -> Result<String, String> {
    let mut class = String::from("[");
    if chars.next_if_eq(&'^').is_some() {
        class.push('^');
    }
    let start = class.len();
    loop {
        match chars.next() {
            Some(']') if class.len() > start => {
                class.push(']');
                return Ok(class);
            }
            Some('-') if class.len() > start && chars.peek().is_some_and(|&c| c != ']') => {
                class.push('-');
            }
            Some('\\') => class.push_str(&format!("\\x{{{:x}}}", u32::from(escape(chars)?))),
            Some(c) if c != ']' => class.push_str(&format!("\\x{{{:x}}}", u32::from(c))),
            _ => return Err("expected characters and `]` at the end of a class".into()),
        }
    }
}

/// The character that stands after a backslash.
fn escape(chars: &mut Peekable<Chars<'_>>) -> Result<char, String> {
    let digits = match chars.next() {
        Some('n') => return Ok('\n'),
        Some('r') => return Ok('\r'),
        Some('t') => return Ok('\t'),
        Some('x') => 2,
        Some('u') => 4,
        Some('U') => 8,
        Some(c) if c.is_ascii_punctuation() => return Ok(c),
        _ => return Err("expected an escape such as `\\n`, `\\x41` or `\\\"`".into()),
    };
    let hex: String = chars.by_ref().take(digits).collect();
    let code = u32::from_str_radix(&hex, 16).ok().filter(|_| hex.len() == digits);
    code.and_then(char::from_u32).ok_or_else(|| format!("`\\{hex}` is no character"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_become_those_of_lark() {
        let gbnf = "root ::= \"[\" (item (\",\" item)*)? \"]\" # a list\nitem ::= [0-9]+ | root";
        let lark = to_lark(gbnf).unwrap();
        assert!(lark.starts_with("start: r0\nr0: (\"[\" "), "{lark}");
        assert!(lark.contains("r1: (/(?:[\\x{30}-\\x{39}])+/ | r0)"), "{lark}");
    }

    #[test]
    fn what_is_no_gbnf_is_named() {
        for (gbnf, reason) in [
            ("item ::= \"a\"", "`root`"),
            ("root ::= item", "`item`"),
            ("root ::= \"a", "end of a text"),
            ("root ::= [a", "end of a class"),
            ("root ::= (\"a\"", "`)`"),
            ("root ::= * \"a\"", "number of times"),
            ("root ::= \"a\"{2,1}", "at least 2"),
            ("root ::= \"\\q\"", "escape"),
            ("root ::= \"\\ud800\"", "no character"),
            ("root ::= \"a\"\nroot ::= \"b\"", "twice"),
            ("root ::= %", "`%`"),
            ("\"a\" ::= \"b\"", "name ::="),
        ] {
            let error = to_lark(gbnf).unwrap_err();
            assert!(error.contains(reason), "{gbnf}: {error}");
        }
        assert!(to_lark(&format!("root ::= {}", "(".repeat(10_000))).unwrap_err().contains("deep"));
    }
}
