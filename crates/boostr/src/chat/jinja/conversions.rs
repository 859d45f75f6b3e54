//! Numbers and texts as filters make them of values.

use super::value::Value;
use super::{Failure, Result};

/// A value that is a number, or that of a truth.
pub(super) fn number_of(value: &Value) -> Result<&Value> {
    value.defined()?;
    match value.as_float() {
        Some(_) => Ok(value),
        None => Err(Failure::new(format!("expected a number, found {}", value.kind()))),
    }
}

/// `int(value, base)`, or that of a float's text.
pub(super) fn whole(value: &Value, base: i128) -> Option<i128> {
    match value {
        Value::Text(text) | Value::Markup(text) => {
            let trimmed = text.trim();
            let (sign, digits) = match trimmed.strip_prefix('-') {
                Some(digits) => (-1, digits),
                None => (1, trimmed.strip_prefix('+').unwrap_or(trimmed)),
            };
            let prefix = match base {
                2 => Some(["0b", "0B"]),
                8 => Some(["0o", "0O"]),
                16 => Some(["0x", "0X"]),
                _ => None,
            };
            let digits = prefix
                .and_then(|[a, b]| digits.strip_prefix(a).or_else(|| digits.strip_prefix(b)))
                .unwrap_or(digits);
            let is_plain =
                !digits.starts_with('_') && !digits.ends_with('_') && !digits.contains("__");
            let plain = digits.replace('_', "");
            let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base));
            let is_digits =
                !plain.is_empty() && plain.bytes().all(|byte| byte.is_ascii_alphanumeric());
            let read = base
                .filter(|_| is_plain && is_digits)
                .and_then(|base| i128::from_str_radix(&plain, base).ok());
            read.map(|number| number * sign).or_else(|| {
                let float = python_float(text)?;
                (float.is_finite() && float.abs() < 1e38).then_some(float.trunc() as i128)
            })
        }
        Value::Float(number) => {
            (number.is_finite() && number.abs() < 1e38).then_some(number.trunc() as i128)
        }
        other => other.as_int(),
    }
}

/// `float(text)`.
pub(super) fn python_float(text: &str) -> Option<f64> {
    let text = text.trim();
    if text.starts_with('_') || text.ends_with('_') || text.contains("__") {
        return None;
    }
    text.replace('_', "").parse().ok()
}

/// `round(value, precision, method)`.
pub(super) fn rounded(value: &Value, precision: i128, method: &str) -> Result {
    let Ok(precision) = i32::try_from(precision) else {
        return Err(Failure::new("round: a precision that is too large"));
    };
    let precision = precision.clamp(-400, 400);
    let number = value.as_float().unwrap_or(0.0);
    match method {
        "common" => {
            if let Some(whole) = value.as_int() {
                if !(-38..0).contains(&precision) {
                    return Ok(Value::Int(if precision >= 0 { whole } else { 0 }));
                }
                let unit = 10_i128.pow(precision.unsigned_abs());
                let (down, rest) = (whole.div_euclid(unit), whole.rem_euclid(unit));
                let up = rest * 2 > unit || rest * 2 == unit && down % 2 != 0;
                let rounded = (down + i128::from(up)).checked_mul(unit);
                return rounded
                    .map(Value::Int)
                    .ok_or_else(|| Failure::new("a number that is too large"));
            }
            if !number.is_finite() {
                return Ok(Value::Float(number));
            }
            Ok(Value::Float(if precision >= 0 {
                format!("{number:.*}", precision as usize).parse().unwrap_or(number)
            } else {
                let unit = 10_f64.powi(-precision);
                if unit.is_finite() { (number / unit).round_ties_even() * unit } else { 0.0 }
            }))
        }
        "ceil" | "floor" => {
            let unit = 10_f64.powi(precision);
            let scaled = number * unit;
            let whole = if method == "ceil" { scaled.ceil() } else { scaled.floor() };
            Ok(Value::Float(whole / unit))
        }
        _ => Err(Failure::new("round: method must be common, ceil or floor")),
    }
}

/// Words begin in upper case, behind spaces, `-`, `(`, `{`, `[` and `<`.
pub(super) fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        let is_between = c.is_whitespace() || "-({[<".contains(c);
        if in_word {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        in_word = !is_between;
    }
    out
}

/// `truncate(text, length, kill, end, leeway)`.
pub(super) fn truncated(
    text: &str,
    length: i128,
    kill: bool,
    end: &str,
    leeway: i128,
) -> Result<String> {
    let end_len = end.chars().count() as i128;
    if length < end_len || leeway < 0 {
        return Err(Failure::new("truncate: expected a length of at least that of the end"));
    }
    if text.chars().count() as i128 <= length.saturating_add(leeway) {
        return Ok(text.to_owned());
    }
    let cut: String = text.chars().take((length - end_len) as usize).collect();
    if kill {
        return Ok(cut + end);
    }
    Ok(cut.rsplit_once(' ').map_or(&*cut, |(before, _)| before).to_owned() + end)
}

/// As `urllib.parse.quote` writes it; a part of a query has `+` for a space and no plain `/`.
pub(super) fn quoted(text: &str, is_query: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                out.push(char::from(byte));
            }
            b'/' if !is_query => out.push('/'),
            b' ' if is_query => out.push('+'),
            other => out.push_str(&format!("%{other:02X}")),
        }
    }
    out
}

/// `filesizeformat(bytes, is_binary)`.
pub(super) fn file_size(bytes: f64, is_binary: bool) -> String {
    let base = if is_binary { 1024.0 } else { 1000.0 };
    let units = if is_binary {
        ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"]
    } else {
        ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"]
    };
    if bytes == 1.0 {
        return "1 Byte".to_owned();
    }
    if bytes < base {
        return format!("{} Bytes", bytes.trunc());
    }
    let mut unit = base;
    for (i, name) in units.iter().enumerate() {
        unit *= base;
        if bytes < unit || i + 1 == units.len() {
            return format!("{:.1} {name}", base * bytes / unit);
        }
    }
    String::new()
}
