//! Python's ways to format: `'%5.2f' % x`, `'{:>8}'.format(x)`.

use std::fmt::Write;
use std::sync::Arc;

use super::run::Given;
use super::value::Value;
use super::{Failure, MAX_TEXT, Meter, Result, bounded, escape, methods, text};

/// How a value is laid out: `[[fill]align][sign][#][0][width][grouping][.precision][type]`.
#[derive(Debug)]
struct Spec {
    fill: char,
    align: Option<char>,
    /// What stands before a number that is not negative: nothing, `+` or a space.
    sign: Option<char>,
    is_alternate: bool,
    has_zeros: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            fill: ' ',
            align: None,
            sign: None,
            is_alternate: false,
            has_zeros: false,
            width: 0,
            grouping: None,
            precision: None,
            kind: None,
        }
    }
}

/// Takes digits from the front of `rest` as a number.
fn digits(rest: &mut &str) -> Result<Option<usize>> {
    let len = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (digits, after) = rest.split_at(len);
    *rest = after;
    if digits.is_empty() {
        return Ok(None);
    }
    let number = digits.parse().ok().filter(|&number| number <= MAX_TEXT);
    number.map(Some).ok_or_else(|| Failure::new("a width or precision that is too large"))
}

impl Spec {
    fn read(spec: &str) -> Result<Self> {
        let mut read = Self::default();
        let mut rest = spec;
        let is_align = |c: Option<char>| c.filter(|c| "<>=^".contains(*c));
        let mut chars = spec.chars();
        let (first, second) = (chars.next(), chars.next());
        let mut has_fill = false;
        if let (Some(fill), Some(align)) = (first, is_align(second)) {
            (has_fill, read.fill, read.align) = (true, fill, Some(align));
            rest = &rest[fill.len_utf8() + 1..];
        } else if let Some(align) = is_align(first) {
            read.align = Some(align);
            rest = &rest[1..];
        }
        if let Some(sign) = rest.chars().next().filter(|c| "+- ".contains(*c)) {
            read.sign = Some(sign).filter(|&sign| sign != '-');
            rest = &rest[1..];
        }
        if let Some(after) = rest.strip_prefix('#') {
            (read.is_alternate, rest) = (true, after);
        }
        if let Some(after) = rest.strip_prefix('0') {
            (read.has_zeros, rest) = (true, after);
            read.fill = if has_fill { read.fill } else { '0' };
        }
        read.width = digits(&mut rest)?.unwrap_or(0);
        if let Some(grouping) = rest.chars().next().filter(|c| ",_".contains(*c)) {
            read.grouping = Some(grouping);
            rest = &rest[1..];
        }
        if let Some(after) = rest.strip_prefix('.') {
            rest = after;
            read.precision = Some(
                digits(&mut rest)?.ok_or_else(|| Failure::new("a format without a precision"))?,
            );
        }
        let mut chars = rest.chars();
        read.kind = chars.next();
        if chars.next().is_some() {
            return Err(Failure::new(format!("an invalid format `{}`", spec.escape_debug())));
        }
        Ok(read)
    }

    /// Pads to the width; the text begins with a sign or prefix of so many bytes.
    fn pad(&self, body: String, start: usize, default: char) -> Result<String> {
        let missing = self.width.saturating_sub(body.chars().count());
        if missing == 0 {
            return Ok(body);
        }
        bounded(body.len().saturating_add(missing.saturating_mul(self.fill.len_utf8())))?;
        let pad = |count: usize| std::iter::repeat_n(self.fill, count);
        let mut out = String::new();
        match self.align.unwrap_or(default) {
            '<' => {
                out.push_str(&body);
                out.extend(pad(missing));
            }
            '^' => {
                out.extend(pad(missing / 2));
                out.push_str(&body);
                out.extend(pad(missing - missing / 2));
            }
            '=' => {
                out.push_str(&body[..start]);
                out.extend(pad(missing));
                out.push_str(&body[start..]);
            }
            _ => {
                out.extend(pad(missing));
                out.push_str(&body);
            }
        }
        Ok(out)
    }

    fn text(&self, content: &str) -> Result<String> {
        let is_for_numbers = self.sign.is_some() || self.is_alternate || self.grouping.is_some();
        if !matches!(self.kind, None | Some('s')) || is_for_numbers || self.align == Some('=') {
            return Err(Failure::new("a format that is not for a text"));
        }
        let cut: String = match self.precision {
            Some(precision) => content.chars().take(precision).collect(),
            None => content.to_owned(),
        };
        let fill = if self.has_zeros && self.align.is_none() { '0' } else { self.fill };
        Self { fill, ..Self { align: self.align, width: self.width, ..Self::default() } }
            .pad(cut, 0, '<')
    }

    /// A number: its sign, a prefix like `0x`, digits before the point, and the rest.
    fn number(&self, is_negative: bool, prefix: &str, whole: &str, rest: &str) -> Result<String> {
        let sign = match self.sign {
            _ if is_negative => "-",
            Some('+') => "+",
            Some(_) => " ",
            None => "",
        };
        let start = sign.len() + prefix.len();
        let (group, size) = match (self.grouping, self.kind) {
            (None, _) => (None, 3),
            (Some(c), Some('b' | 'o' | 'x' | 'X')) => (Some(c), 4),
            (Some(c), _) => (Some(c), 3),
        };
        let grouped = |digits: &str| match group {
            None => digits.to_owned(),
            Some(separator) => {
                let mut out = String::new();
                for (i, c) in digits.chars().enumerate() {
                    if i > 0 && (digits.len() - i).is_multiple_of(size) {
                        out.push(separator);
                    }
                    out.push(c);
                }
                out
            }
        };
        let mut whole = whole.to_owned();
        if self.has_zeros && self.align.is_none() && !whole.is_empty() {
            bounded(self.width)?;
            // As many zeros as it takes, with the separators that they take.
            while start + grouped(&whole).len() + rest.len() < self.width {
                let missing = self.width - start - grouped(&whole).len() - rest.len();
                let zeros = if group.is_some() { missing.div_ceil(2) } else { missing };
                whole.insert_str(0, &"0".repeat(zeros));
                if group.is_some() && start + grouped(&whole).len() + rest.len() > self.width + 1 {
                    while start + grouped(&whole[1..]).len() + rest.len() >= self.width {
                        whole.remove(0);
                    }
                }
            }
        }
        self.pad(format!("{sign}{prefix}{}{rest}", grouped(&whole)), start, '>')
    }

    fn int(&self, value: i128) -> Result<String> {
        let magnitude = value.unsigned_abs();
        let (prefix, digits) = match self.kind {
            None | Some('d' | 'n' | 'i' | 'u') => ("", magnitude.to_string()),
            Some('b') => ("0b", format!("{magnitude:b}")),
            Some('o') => ("0o", format!("{magnitude:o}")),
            Some('x') => ("0x", format!("{magnitude:x}")),
            Some('X') => ("0X", format!("{magnitude:X}")),
            Some('c') => {
                let c = u32::try_from(value).ok().and_then(char::from_u32);
                let c = c.ok_or_else(|| Failure::new("a number that is no character"))?;
                return self.pad(c.to_string(), 0, '<');
            }
            Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%') => return self.float(value as f64),
            Some(_) => return Err(Failure::new("a format that is not for a whole number")),
        };
        if self.precision.is_some() {
            return Err(Failure::new("a precision is not for a whole number"));
        }
        let prefix = if self.is_alternate { prefix } else { "" };
        self.number(value < 0, prefix, &digits, "")
    }

    fn float(&self, value: f64) -> Result<String> {
        let is_negative = value.is_sign_negative() && !value.is_nan();
        let magnitude = value.abs();
        let kind = self.kind.unwrap_or('r');
        let precision = self.precision.unwrap_or(6).min(1_000);
        let mut body = if value.is_nan() {
            "nan".to_owned()
        } else if value.is_infinite() {
            "inf".to_owned()
        } else {
            match kind {
                'f' | 'F' => fixed(magnitude, precision, self.is_alternate),
                '%' => fixed(magnitude * 100.0, precision, self.is_alternate) + "%",
                'e' | 'E' => exponential(magnitude, precision, self.is_alternate),
                'g' | 'G' | 'n' => general(magnitude, precision, self.is_alternate),
                'r' if self.precision.is_none() => {
                    text::repr(&Value::Float(magnitude), &Meter::new(u64::MAX >> 8))?
                }
                'r' => {
                    let text = general(magnitude, precision.max(1), false);
                    // There is a digit behind the point, or an exponent.
                    if text.contains(['.', 'e']) { text } else { text + ".0" }
                }
                _ => return Err(Failure::new("a format that is not for a number")),
            }
        };
        if matches!(kind, 'F' | 'E' | 'G') {
            body.make_ascii_uppercase();
        }
        let point = body.find(|c: char| !c.is_ascii_digit()).unwrap_or(body.len());
        self.number(is_negative, "", &body[..point], &body[point..])
    }
}

fn fixed(value: f64, precision: usize, with_point: bool) -> String {
    let text = format!("{value:.precision$}");
    if precision == 0 && with_point { text + "." } else { text }
}

fn exponential(value: f64, precision: usize, with_point: bool) -> String {
    let text = format!("{value:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let point = if precision == 0 && with_point { "." } else { "" };
    let number: i32 = exponent.parse().unwrap_or(0);
    let sign = if number < 0 { '-' } else { '+' };
    format!("{digits}{point}e{sign}{:02}", number.abs())
}

fn general(value: f64, precision: usize, keeps_zeros: bool) -> String {
    let precision = precision.max(1);
    let text = format!("{value:.*e}", precision - 1);
    let exponent: i64 = text.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
    let is_plain = (-4..precision as i64).contains(&exponent);
    let text = if is_plain {
        fixed(value, (precision as i64 - 1 - exponent) as usize, keeps_zeros)
    } else {
        exponential(value, precision - 1, keeps_zeros)
    };
    if keeps_zeros || !text.contains('.') {
        return text;
    }
    let (digits, exponent) = match text.split_once('e') {
        Some((digits, exponent)) => (digits, format!("e{exponent}")),
        None => (&text[..], String::new()),
    };
    format!("{}{exponent}", digits.trim_end_matches('0').trim_end_matches('.'))
}

/// `repr` with all beyond ASCII by number.
fn ascii(value: &Value, meter: &Meter) -> Result<String> {
    let mut out = String::new();
    for c in text::repr(value, meter)?.chars() {
        if c.is_ascii() { out.push(c) } else { text::escaped(c, &mut out) }
    }
    Ok(out)
}

/// `format(value, spec)`.
fn formatted(value: &Value, spec: &str, meter: &Meter) -> Result<String> {
    if spec.is_empty() {
        return text::str(value, meter);
    }
    let read = Spec::read(spec)?;
    match value {
        Value::Text(content) | Value::Markup(content) => read.text(content),
        Value::Float(number) => read.float(*number),
        other => match other.as_int() {
            Some(number) => read.int(number),
            None => {
                let reason = format!("a value of type {} takes no format", other.kind());
                Err(Failure::new(reason))
            }
        },
    }
}

/// `pattern % values`.
pub(super) fn percent(
    pattern: &str,
    values: &Value,
    is_markup: bool,
    meter: &Meter,
) -> Result<String> {
    meter.bytes(pattern.len())?;
    let one = [values.clone()];
    let all: &[Value] = match values {
        Value::Tuple(items) => items,
        _ => &one,
    };
    let mut given = all.iter();
    let mut next = || given.next().ok_or_else(|| Failure::new("`%`: fewer values than places"));
    let (mut out, mut rest) = (String::new(), pattern);
    let mut by_name = false;
    while let Some(at) = rest.find('%') {
        meter.spend(1)?;
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let mut named = None;
        if let Some(after) = rest.strip_prefix('(') {
            let (mut depth, mut len) = (1, 0);
            for (i, c) in after.char_indices() {
                depth += i32::from(c == '(') - i32::from(c == ')');
                len = i;
                if depth == 0 {
                    break;
                }
            }
            if depth > 0 {
                return Err(Failure::new("`%`: a name without an end, `)`"));
            }
            let Value::Dict(dict) = values else {
                return Err(Failure::new("`%`: places with names need a dict"));
            };
            let name: Arc<str> = after[..len].into();
            let value = dict.get_text(&name);
            named = Some(value.cloned().ok_or_else(|| {
                Failure::new(format!("`%`: no value for `{}`", name.escape_debug()))
            })?);
            by_name = true;
            rest = &after[len + 1..];
        }
        let mut spec = Spec::default();
        while let Some(flag) = rest.chars().next().filter(|c| "-+ #0".contains(*c)) {
            match flag {
                '-' => spec.align = Some('<'),
                '+' => spec.sign = Some('+'),
                ' ' => spec.sign = spec.sign.or(Some(' ')),
                '#' => spec.is_alternate = true,
                _ => spec.has_zeros = true,
            }
            rest = &rest[1..];
        }
        let mut star = |rest: &mut &str| -> Result<Option<i128>> {
            let Some(after) = rest.strip_prefix('*') else {
                return Ok(digits(rest)?.map(|number| number as i128));
            };
            *rest = after;
            let number =
                next()?.as_int().filter(|number| number.unsigned_abs() <= MAX_TEXT as u128);
            number.map(Some).ok_or_else(|| Failure::new("`%`: `*` needs a whole number"))
        };
        if let Some(width) = star(&mut rest)? {
            if width < 0 {
                spec.align = Some('<');
            }
            spec.width = width.unsigned_abs() as usize;
        }
        if let Some(after) = rest.strip_prefix('.') {
            rest = after;
            spec.precision = Some(star(&mut rest)?.unwrap_or(0).max(0) as usize);
        }
        rest = rest.trim_start_matches(['h', 'l', 'L']);
        let Some(kind) = rest.chars().next() else {
            return Err(Failure::new("`%`: an incomplete place"));
        };
        rest = &rest[kind.len_utf8()..];
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match named {
            Some(value) => value,
            None => next()?.clone(),
        };
        if spec.align.is_some() {
            spec.has_zeros = false;
        }
        spec.kind = Some(kind);
        let part = placed(&mut spec, kind, &value, is_markup, meter)?;
        out.push_str(&part);
        bounded(out.len())?;
    }
    out.push_str(rest);
    let takes_any = by_name || matches!(values, Value::Dict(_) | Value::List(_) | Value::Range(_));
    if given.next().is_some() && !takes_any {
        return Err(Failure::new("`%`: more values than places"));
    }
    bounded(out.len())?;
    meter.bytes(out.len())?;
    Ok(out)
}

fn placed(
    spec: &mut Spec,
    kind: char,
    value: &Value,
    is_markup: bool,
    meter: &Meter,
) -> Result<String> {
    match kind {
        's' | 'r' | 'a' => {
            let content = match kind {
                's' => text::str(value, meter)?,
                'r' => text::repr(value, meter)?,
                _ => ascii(value, meter)?,
            };
            let content = match value {
                Value::Markup(_) => content,
                _ if is_markup => escape(&content),
                _ => content,
            };
            let cut = match spec.precision {
                Some(precision) => content.chars().take(precision).collect(),
                None => content,
            };
            spec.pad(cut, 0, '>')
        }
        'c' => match value.as_text() {
            Some(content) if content.chars().count() == 1 => spec.pad(content.to_string(), 0, '>'),
            Some(_) => Err(Failure::new("`%c` needs one character")),
            None => {
                let c = value.as_int().and_then(|code| u32::try_from(code).ok());
                let c = c.and_then(char::from_u32);
                let c = c.ok_or_else(|| Failure::new("`%c` needs a character or its number"))?;
                spec.pad(c.to_string(), 0, '>')
            }
        },
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
            let number = match value {
                Value::Float(number) if number.is_finite() && !"xXo".contains(kind) => {
                    Some(number.trunc() as i128)
                }
                other => other.as_int(),
            };
            let number = number.ok_or_else(|| {
                Failure::new(format!("`%{kind}` needs a number, found {}", value.kind()))
            })?;
            let least = spec.precision.take().unwrap_or(0);
            bounded(least)?;
            let magnitude = number.unsigned_abs();
            let (prefix, digits) = match kind {
                'x' => ("0x", format!("{magnitude:x}")),
                'X' => ("0X", format!("{magnitude:X}")),
                'o' => ("0o", format!("{magnitude:o}")),
                _ => ("", magnitude.to_string()),
            };
            let prefix = if spec.is_alternate { prefix } else { "" };
            spec.number(number < 0, prefix, &format!("{digits:0>least$}"), "")
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            let number = value.as_float().ok_or_else(|| {
                Failure::new(format!("`%{kind}` needs a number, found {}", value.kind()))
            })?;
            spec.float(number)
        }
        other => Err(Failure::new(format!("`%`: an unknown place `{}`", other.escape_debug()))),
    }
}

/// `pattern.format(..)`.
pub(super) fn braces(pattern: &str, given: &Given, meter: &Meter) -> Result<String> {
    braces_at(pattern, given, &mut Numbering::default(), 0, meter)
}

/// Whether places are counted or have numbers.
#[derive(Default)]
struct Numbering {
    next: usize,
    is_counted: bool,
    is_numbered: bool,
}

fn braces_at(
    pattern: &str,
    given: &Given,
    numbering: &mut Numbering,
    depth: usize,
    meter: &Meter,
) -> Result<String> {
    if depth > 2 {
        return Err(Failure::new("format: places in places in places"));
    }
    meter.bytes(pattern.len())?;
    let (mut out, mut rest) = (String::new(), pattern);
    while let Some(at) = rest.find(['{', '}']) {
        meter.spend(1)?;
        out.push_str(&rest[..at]);
        let brace = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(brace).filter(|_| depth == 0) {
            out.push_str(brace);
            rest = after;
            continue;
        }
        if brace == "}" {
            return Err(Failure::new("format: a single `}`"));
        }
        let (mut open, mut end) = (1, None);
        for (i, c) in rest.char_indices() {
            open += i32::from(c == '{') - i32::from(c == '}');
            if open == 0 {
                end = Some(i);
                break;
            }
        }
        let end = end.ok_or_else(|| Failure::new("format: a single `{`"))?;
        let place = &rest[..end];
        rest = &rest[end + 1..];
        let (name, spec) = match place.find([':', '!']) {
            Some(at) if place[at..].starts_with(':') => (&place[..at], ("", &place[at + 1..])),
            Some(at) => {
                let after = &place[at + 1..];
                (&place[..at], after.split_once(':').unwrap_or((after, "")))
            }
            None => (place, ("", "")),
        };
        let mut value = place_value(name, given, numbering, meter)?;
        let (conversion, spec) = spec;
        match conversion {
            "" if !place.contains('!')
                || place.find(':') < place.find('!') && place.contains(':') => {}
            "s" => value = text::str(&value, meter)?.into(),
            "r" => value = text::repr(&value, meter)?.into(),
            "a" => value = ascii(&value, meter)?.into(),
            _ => return Err(Failure::new("format: expected `!s`, `!r` or `!a`")),
        }
        let spec = if spec.contains(['{', '}']) {
            braces_at(spec, given, numbering, depth + 1, meter)?
        } else {
            spec.to_owned()
        };
        out.push_str(&formatted(&value, &spec, meter)?);
        bounded(out.len())?;
    }
    out.push_str(rest);
    bounded(out.len())?;
    meter.bytes(out.len())?;
    Ok(out)
}

/// The value that a place names: `0`, `name`, `name.field[key]`, or the next one.
fn place_value(place: &str, given: &Given, numbering: &mut Numbering, meter: &Meter) -> Result {
    let missing = || {
        let mut shown = String::new();
        let _ = write!(shown, "format: no value for `{{{}}}`", place.escape_debug());
        Failure::new(shown)
    };
    let len = place.find(['.', '[']).unwrap_or(place.len());
    let (name, mut rest) = place.split_at(len);
    let mut value = if name.is_empty() {
        numbering.is_counted = true;
        numbering.next += 1;
        given.positional.get(numbering.next - 1).ok_or_else(missing)?.clone()
    } else if name.bytes().all(|byte| byte.is_ascii_digit()) {
        numbering.is_numbered = true;
        let index = name.parse::<usize>().ok();
        index.and_then(|index| given.positional.get(index)).ok_or_else(missing)?.clone()
    } else {
        let named = given.named.iter().find(|(other, _)| **other == *name);
        named.ok_or_else(missing)?.1.clone()
    };
    if numbering.is_counted && numbering.is_numbered {
        return Err(Failure::new("format: places with numbers and without"));
    }
    while !rest.is_empty() {
        meter.spend(1)?;
        if let Some(after) = rest.strip_prefix('.') {
            let len = after.find(['.', '[']).unwrap_or(after.len());
            value = methods::attribute(&value, &after[..len].into(), meter)?;
            rest = &after[len..];
        } else {
            let inner = rest.strip_prefix('[').and_then(|rest| rest.split_once(']'));
            let (key, after) = inner.ok_or_else(missing)?;
            let key = key.parse::<i64>().map_or_else(|_| key.into(), |n| Value::Int(n.into()));
            value = methods::item(&value, &key, meter)?;
            rest = after;
        }
    }
    Ok(value)
}
