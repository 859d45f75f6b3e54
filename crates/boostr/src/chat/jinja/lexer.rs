//! A template as tokens: text, tags, and the words of expressions.

use std::sync::Arc;

use super::{Failure, Result};

/// A word of a template.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    /// Text outside of tags.
    Data(String),
    /// `{{`
    VariableStart,
    /// `}}`
    VariableEnd,
    /// `{%`
    BlockStart,
    /// `%}`
    BlockEnd,
    Name(Arc<str>),
    Text(String),
    Int(i128),
    Float(f64),
    /// An operator or a bracket.
    Sign(&'static str),
    End,
}

impl Token {
    /// The token for messages.
    pub(super) fn shown(&self) -> String {
        match self {
            Self::Data(_) => "text".to_owned(),
            Self::VariableStart => "`{{`".to_owned(),
            Self::VariableEnd => "`}}`".to_owned(),
            Self::BlockStart => "`{%`".to_owned(),
            Self::BlockEnd => "`%}`".to_owned(),
            Self::Name(name) => format!("`{}`", name.escape_debug()),
            Self::Text(_) => "a string".to_owned(),
            Self::Int(_) | Self::Float(_) => "a number".to_owned(),
            Self::Sign(sign) => format!("`{sign}`"),
            Self::End => "the end of the template".to_owned(),
        }
    }
}

/// The longer ones first.
const SIGNS: [&str; 27] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
    ">", "<", "=", ".", ":", "|", ",", ";", "!",
];

struct Lexer<'a> {
    source: &'a str,
    at: usize,
    line: u32,
    tokens: Vec<(u32, Token)>,
    /// Text begins a line: spaces before a block there are not kept.
    at_line_start: bool,
}

/// The tokens of a template with their lines, counted from 1. Blocks are trimmed.
pub(super) fn tokens(source: &str) -> Result<Vec<(u32, Token)>> {
    // Line ends are those of Jinja: it reads CR LF and a lone CR as LF, in strings and raw text too.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer { source, at: 0, line: 1, tokens: Vec::new(), at_line_start: true };
    lexer.run().map_err(|error| error.at(lexer.line))?;
    Ok(lexer.tokens)
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    fn push(&mut self, token: Token) {
        self.tokens.push((self.line, token));
    }

    fn skip(&mut self, len: usize) {
        let passed = &self.source[self.at..self.at + len];
        self.line += passed.matches('\n').count() as u32;
        self.at += len;
    }

    fn skip_space(&mut self) {
        let rest = self.rest();
        self.skip(rest.len() - rest.trim_start().len());
    }

    /// Whether what was passed last ends a line.
    fn note_line_start(&mut self) {
        self.at_line_start = self.source[..self.at].ends_with('\n');
    }

    fn run(&mut self) -> Result<()> {
        loop {
            let rest = self.rest();
            let starts = ["{{", "{%", "{#"];
            let found = rest
                .match_indices('{')
                .find(|(at, _)| starts.iter().any(|start| rest[*at..].starts_with(start)));
            let Some((at, _)) = found else {
                if !rest.is_empty() {
                    self.push(Token::Data(rest.to_owned()));
                }
                self.skip(rest.len());
                self.push(Token::End);
                return Ok(());
            };
            let start = &rest[at..at + 2];
            let sign = rest[at + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
            self.data(at, sign, start != "{{");
            self.skip(at + 2 + usize::from(sign.is_some()));
            match start {
                "{#" => self.comment()?,
                "{%" => match self.raw_start() {
                    Some(len) => {
                        self.skip(len);
                        self.raw()?;
                    }
                    None => {
                        self.push(Token::BlockStart);
                        self.inside(&Token::BlockEnd)?;
                    }
                },
                _ => {
                    self.push(Token::VariableStart);
                    self.inside(&Token::VariableEnd)?;
                }
            }
        }
    }

    /// The next `len` bytes as text, without the white space that the tag behind it takes.
    fn data(&mut self, len: usize, sign: Option<char>, is_block: bool) {
        let text = &self.rest()[..len];
        let text = match sign {
            Some('-') => text.trim_end_matches(is_space),
            None if is_block => {
                let line = text.rfind('\n').map_or(0, |at| at + 1);
                let is_blank = text[line..].chars().all(is_space);
                if is_blank && (line > 0 || self.at_line_start) { &text[..line] } else { text }
            }
            _ => text,
        };
        if !text.is_empty() {
            self.push(Token::Data(text.to_owned()));
        }
    }

    /// Passes what ends a tag, and the white space that it takes.
    fn end_tag(&mut self, sign: Option<char>, len: usize, trims: bool) {
        self.skip(len);
        match sign {
            Some('-') => self.skip_space(),
            None if trims && self.rest().starts_with('\n') => self.skip(1),
            _ => {}
        }
        self.note_line_start();
    }

    fn comment(&mut self) -> Result<()> {
        let rest = self.rest();
        let end = rest.find("#}").ok_or_else(|| Failure::new("a comment without an end, `#}`"))?;
        let sign = rest[..end].chars().next_back().filter(|c| matches!(c, '-' | '+'));
        self.end_tag(sign, end + 2, true);
        Ok(())
    }

    /// How long the rest of a tag `{% raw %}` is, if it is one.
    fn raw_start(&self) -> Option<usize> {
        let rest = self.rest();
        let after = rest.trim_start().strip_prefix("raw")?.trim_start();
        let (sign, after) = match after.strip_prefix('-') {
            Some(after) => (true, after),
            None => (false, after),
        };
        let after = after.strip_prefix("%}")?;
        let after = if sign { after.trim_start() } else { after };
        Some(rest.len() - after.len())
    }

    fn raw(&mut self) -> Result<()> {
        self.note_line_start();
        let rest = self.rest();
        for (at, _) in rest.match_indices("{%") {
            let sign = rest[at + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
            let inner = &rest[at + 2 + usize::from(sign.is_some())..];
            let Some(after) = inner.trim_start().strip_prefix("endraw") else { continue };
            let after = after.trim_start();
            let end_sign = after.chars().next().filter(|c| matches!(c, '-' | '+'));
            let after = &after[usize::from(end_sign.is_some())..];
            let Some(after) = after.strip_prefix("%}") else { continue };
            self.data(at, sign, true);
            self.end_tag(end_sign, rest.len() - after.len(), true);
            return Ok(());
        }
        Err(Failure::new("a block `raw` without an end, `{% endraw %}`"))
    }

    /// The words of a tag up to its end.
    fn inside(&mut self, end: &Token) -> Result<()> {
        let closing = if *end == Token::BlockEnd { "%}" } else { "}}" };
        let mut open: Vec<&'static str> = Vec::new();
        loop {
            self.skip_space();
            let rest = self.rest();
            if open.is_empty() {
                let sign = rest
                    .chars()
                    .next()
                    .filter(|&c| c == '-' || c == '+' && *end == Token::BlockEnd);
                let len = usize::from(sign.is_some());
                if rest[len..].starts_with(closing) {
                    self.push(end.clone());
                    self.end_tag(sign, len + 2, *end == Token::BlockEnd);
                    return Ok(());
                }
                if rest.starts_with(closing) {
                    self.push(end.clone());
                    self.end_tag(None, 2, *end == Token::BlockEnd);
                    return Ok(());
                }
            }
            let Some(first) = rest.chars().next() else {
                return Err(Failure::new(format!("a tag without an end, `{closing}`")));
            };
            match first {
                '\'' | '"' => self.string(first)?,
                '0'..='9' => self.number()?,
                c if c == '_' || c.is_alphanumeric() => {
                    let is_word = |c: char| c == '_' || c.is_alphanumeric();
                    let len = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
                    self.push(Token::Name(rest[..len].into()));
                    self.skip(len);
                }
                _ => {
                    let sign = SIGNS.into_iter().find(|sign| rest.starts_with(sign));
                    let Some(sign) = sign.filter(|&sign| sign != "!") else {
                        let reason = format!("an unexpected character `{}`", first.escape_debug());
                        return Err(Failure::new(reason));
                    };
                    match sign {
                        "(" => open.push(")"),
                        "[" => open.push("]"),
                        "{" => open.push("}"),
                        ")" | "]" | "}" if open.pop() != Some(sign) => {
                            return Err(Failure::new(format!("an unexpected `{sign}`")));
                        }
                        _ => {}
                    }
                    self.push(Token::Sign(sign));
                    self.skip(sign.len());
                }
            }
        }
    }

    fn number(&mut self) -> Result<()> {
        let rest = self.rest();
        let lower = |at: usize| rest.as_bytes().get(at).map(u8::to_ascii_lowercase);
        let radix = match (lower(0), lower(1)) {
            (Some(b'0'), Some(b'x')) => 16,
            (Some(b'0'), Some(b'o')) => 8,
            (Some(b'0'), Some(b'b')) => 2,
            _ => 10,
        };
        let too_large = || Failure::new("a number that is too large");
        if radix != 10 {
            let is_digit = |c: char| c == '_' || c.is_digit(radix);
            let len = rest[2..].find(|c| !is_digit(c)).map_or(rest.len(), |at| at + 2);
            let digits = rest[2..len].replace('_', "");
            let number = i128::from_str_radix(&digits, radix).map_err(|_| too_large())?;
            self.push(Token::Int(number));
            self.skip(len);
            return Ok(());
        }
        // Digits with single `_` between them.
        let digits = |from: usize| {
            let mut at = from;
            while let Some(byte) = rest.as_bytes().get(at) {
                let goes_on = rest.as_bytes().get(at + 1).is_some_and(u8::is_ascii_digit);
                if byte.is_ascii_digit() || at > from && *byte == b'_' && goes_on {
                    at += 1;
                } else {
                    break;
                }
            }
            at
        };
        let whole = digits(0);
        // In `x.1.2` the numbers are whole.
        let after_dot = matches!(self.tokens.last(), Some((_, Token::Sign("."))));
        let mut end = whole;
        if !after_dot {
            if lower(end) == Some(b'.') && digits(end + 1) > end + 1 {
                end = digits(end + 1);
            }
            if lower(end) == Some(b'e') {
                let sign = usize::from(matches!(lower(end + 1), Some(b'+' | b'-')));
                let exponent = digits(end + 1 + sign);
                end = if exponent > end + 1 + sign { exponent } else { end };
            }
        }
        let text = rest[..end].replace('_', "");
        self.push(if end > whole {
            Token::Float(text.parse().map_err(|_| too_large())?)
        } else {
            Token::Int(text.parse().map_err(|_| too_large())?)
        });
        self.skip(end);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<()> {
        let rest = self.rest();
        let (mut text, mut chars) = (String::new(), rest[1..].char_indices());
        let unfinished = || Failure::new("a string without an end");
        loop {
            let (at, c) = chars.next().ok_or_else(unfinished)?;
            match c {
                c if c == quote => {
                    self.push(Token::Text(text));
                    self.skip(at + 2);
                    return Ok(());
                }
                '\\' => {
                    let (_, c) = chars.next().ok_or_else(unfinished)?;
                    let mut code = |len: usize| {
                        let digits: String = chars.by_ref().take(len).map(|(_, c)| c).collect();
                        let code = u32::from_str_radix(&digits, 16).ok();
                        let code = code.filter(|_| digits.len() == len).and_then(char::from_u32);
                        code.ok_or_else(|| Failure::new("a string with a malformed escape"))
                    };
                    match c {
                        '\n' => {}
                        'n' => text.push('\n'),
                        't' => text.push('\t'),
                        'r' => text.push('\r'),
                        'a' => text.push('\u{7}'),
                        'b' => text.push('\u{8}'),
                        'f' => text.push('\u{c}'),
                        'v' => text.push('\u{b}'),
                        '\\' | '\'' | '"' => text.push(c),
                        'x' => text.push(code(2)?),
                        'u' => text.push(code(4)?),
                        'U' => text.push(code(8)?),
                        '0'..='7' => {
                            let mut code = c.to_digit(8).unwrap_or(0);
                            for _ in 0..2 {
                                let digit = chars.clone().next().and_then(|(_, c)| c.to_digit(8));
                                let Some(digit) = digit else { break };
                                code = code * 8 + digit;
                                chars.next();
                            }
                            text.extend(char::from_u32(code));
                        }
                        other => text.extend(['\\', other]),
                    }
                }
                c => text.push(c),
            }
        }
    }
}

/// What Python takes for white space.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}
