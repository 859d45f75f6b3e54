//! What operators give, as in Python. All work is counted.

use std::cmp::Ordering;
use std::rc::Rc;

use super::syntax::{Compare, Math};
use super::value::{Dict, Range, Value, View};
use super::{Failure, MAX_VALUE_DEPTH, Meter, Result, bounded, escape, format};

fn wrong(sign: &str, left: &Value, right: &Value) -> Failure {
    let reason = format!("`{sign}` is not for {} and {}", left.kind(), right.kind());
    Failure::new(reason)
}

fn too_large() -> Failure {
    Failure::new("a number that is too large")
}

/// Whether a number is whole, and one that can be counted to.
pub(super) fn is_whole(value: f64) -> bool {
    value.fract() == 0.0 && value.abs() < 1e38
}

impl Math {
    fn sign(self) -> &'static str {
        match self {
            Self::Add => "+",
            Self::Sub => "-",
            Self::Mul => "*",
            Self::Div => "/",
            Self::FloorDiv => "//",
            Self::Rem => "%",
            Self::Pow => "**",
        }
    }
}

/// `left math right`.
pub(super) fn math(math: Math, left: &Value, right: &Value, meter: &Meter) -> Result {
    if let (Math::Rem, Some(pattern)) = (math, left.as_text()) {
        let is_markup = matches!(left, Value::Markup(_));
        let text = format::percent(pattern, right, is_markup, meter)?;
        return Ok(left.like(text));
    }
    left.defined()?;
    right.defined()?;
    match (math, left, right) {
        (Math::Add, Value::Text(a), Value::Text(b)) => joined(a, b, meter).map(Value::from),
        (Math::Add, Value::Text(_) | Value::Markup(_), Value::Text(_) | Value::Markup(_)) => {
            let part = |value: &Value| match value {
                Value::Markup(text) => text.to_string(),
                other => escape(other.as_text().map_or("", |text| text)),
            };
            Ok(Value::Markup(joined(&part(left), &part(right), meter)?.into()))
        }
        (Math::Add, Value::List(a), Value::List(b)) => {
            let (a, b) = (a.items(), b.items());
            meter.spend(a.len() + b.len())?;
            Ok(a.iter().chain(&*b).cloned().collect::<Vec<_>>().into())
        }
        (Math::Add, Value::Tuple(a), Value::Tuple(b)) => {
            meter.spend(a.len() + b.len())?;
            Ok(Value::tuple(a.iter().chain(&**b).cloned().collect()))
        }
        (Math::Mul, Value::Text(_) | Value::Markup(_) | Value::List(_) | Value::Tuple(_), n)
            if n.as_int().is_some() =>
        {
            repeated(left, n.as_int().unwrap_or(0), meter)
        }
        (Math::Mul, n, Value::Text(_) | Value::Markup(_) | Value::List(_) | Value::Tuple(_))
            if n.as_int().is_some() =>
        {
            repeated(right, n.as_int().unwrap_or(0), meter)
        }
        (Math::Sub, Value::View(..), _) => Err(wrong("-", left, right)),
        _ => match (left.as_int(), right.as_int()) {
            (Some(a), Some(b)) => of_ints(math, a, b),
            _ => match (left.as_float(), right.as_float()) {
                (Some(a), Some(b)) => of_floats(math, a, b),
                _ => Err(wrong(math.sign(), left, right)),
            },
        },
    }
}

fn joined(a: &str, b: &str, meter: &Meter) -> Result<String> {
    bounded(a.len() + b.len())?;
    meter.bytes(a.len() + b.len())?;
    Ok([a, b].concat())
}

fn repeated(value: &Value, times: i128, meter: &Meter) -> Result {
    let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
    if let Some(text) = value.as_text() {
        let len = text.len().saturating_mul(times);
        bounded(len)?;
        meter.bytes(len)?;
        return Ok(value.like(text.repeat(times)));
    }
    let items = value.items(meter)?;
    meter.spend(items.len().saturating_mul(times))?;
    let times = if items.is_empty() { 0 } else { times };
    let all: Vec<Value> = std::iter::repeat_n(&*items, times).flatten().cloned().collect();
    Ok(if matches!(value, Value::Tuple(_)) { Value::tuple(all) } else { all.into() })
}

fn of_ints(math: Math, a: i128, b: i128) -> Result {
    let whole = match math {
        Math::Add => a.checked_add(b),
        Math::Sub => a.checked_sub(b),
        Math::Mul => a.checked_mul(b),
        Math::Div => return of_floats(math, a as f64, b as f64),
        Math::FloorDiv | Math::Rem if b == 0 => return Err(Failure::new("division by zero")),
        Math::FloorDiv => a
            .checked_div(b)
            .map(|whole| if a % b != 0 && (a < 0) != (b < 0) { whole - 1 } else { whole }),
        Math::Rem => a
            .checked_rem(b)
            .map(|rest| if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }),
        Math::Pow if b < 0 => return of_floats(math, a as f64, b as f64),
        Math::Pow => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
    };
    whole.map(Value::Int).ok_or_else(too_large)
}

fn of_floats(math: Math, a: f64, b: f64) -> Result {
    if b == 0.0 && matches!(math, Math::Div | Math::FloorDiv | Math::Rem) {
        return Err(Failure::new("division by zero"));
    }
    // The rest has the sign of the divisor.
    let rest = || {
        let rest = a % b;
        if rest != 0.0 && (rest < 0.0) != (b < 0.0) {
            rest + b
        } else {
            rest.abs().copysign(if rest == 0.0 { b } else { rest })
        }
    };
    Ok(Value::Float(match math {
        Math::Add => a + b,
        Math::Sub => a - b,
        Math::Mul => a * b,
        Math::Div => a / b,
        Math::FloorDiv => {
            let whole = (a - rest()) / b;
            let floor = whole.floor();
            if whole - floor > 0.5 { floor + 1.0 } else { floor }
        }
        Math::Rem => rest(),
        Math::Pow if a == 0.0 && b < 0.0 => return Err(Failure::new("division by zero")),
        Math::Pow if a < 0.0 && b.fract() != 0.0 => {
            return Err(Failure::new("a power that is no real number"));
        }
        Math::Pow => a.powf(b),
    }))
}

/// `-value` or `+value`.
pub(super) fn sign(is_minus: bool, value: &Value) -> Result {
    value.defined()?;
    match value {
        Value::Float(number) => Ok(Value::Float(if is_minus { -number } else { *number })),
        other => {
            let number = other.as_int().ok_or_else(|| {
                Failure::new(format!("a value of type {} has no sign", other.kind()))
            })?;
            let number = if is_minus { number.checked_neg() } else { Some(number) };
            number.map(Value::Int).ok_or_else(too_large)
        }
    }
}

/// `left compare right`.
pub(super) fn compare(
    compare: Compare,
    left: &Value,
    right: &Value,
    meter: &Meter,
) -> Result<bool> {
    match compare {
        Compare::Eq => equal(left, right, meter),
        Compare::Ne => Ok(!equal(left, right, meter)?),
        Compare::Lt => less(left, right, meter),
        Compare::Gt => less(right, left, meter),
        Compare::Le => ordered(left, right, "<=", meter),
        Compare::Ge => ordered(right, left, ">=", meter),
        Compare::In => contains(right, left, meter),
        Compare::NotIn => Ok(!contains(right, left, meter)?),
    }
}

pub(super) fn equal(left: &Value, right: &Value, meter: &Meter) -> Result<bool> {
    equal_at(left, right, 0, meter)
}

fn equal_at(left: &Value, right: &Value, depth: usize, meter: &Meter) -> Result<bool> {
    meter.spend(1)?;
    if depth > MAX_VALUE_DEPTH {
        return Err(Failure::new("a value that is nested too deep, a recursion without end"));
    }
    let all = |a: &[Value], b: &[Value]| {
        if a.len() != b.len() {
            return Ok(false);
        }
        for (a, b) in a.iter().zip(b) {
            if !equal_at(a, b, depth + 1, meter)? {
                return Ok(false);
            }
        }
        Ok(true)
    };
    Ok(match (left, right) {
        (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
        (Value::Text(a) | Value::Markup(a), Value::Text(b) | Value::Markup(b)) => {
            meter.bytes(a.len().min(b.len()))?;
            a == b
        }
        (Value::List(a), Value::List(b)) => Rc::ptr_eq(a, b) || all(&a.items(), &b.items())?,
        (Value::Tuple(a), Value::Tuple(b)) => Rc::ptr_eq(a, b) || all(a, b)?,
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b) || equal_dicts(a, b, depth, meter)?,
        (Value::View(View::Values, _), _) | (_, Value::View(View::Values, _)) => false,
        (Value::View(a, _), Value::View(b, _)) if a == b => {
            let (a, b) = (left.items(meter)?, right.items(meter)?);
            a.len() == b.len() && all_in(&a, &b, meter)?
        }
        (Value::Range(a), Value::Range(b)) => {
            a.len == b.len && (a.len == 0 || a.start == b.start) && (a.len < 2 || a.step == b.step)
        }
        (Value::Function(a), Value::Function(b)) => a == b,
        (Value::Macro(a), Value::Macro(b)) => Rc::ptr_eq(a, b),
        (Value::Iterator(a), Value::Iterator(b)) => Rc::ptr_eq(a, b),
        (Value::Object(_, a), Value::Object(_, b)) => a == b,
        (Value::Method(a), Value::Method(b)) => {
            a.1 == b.1 && equal_at(&a.0, &b.0, depth + 1, meter)?
        }
        _ => numbers(left, right) == Some(Ordering::Equal),
    })
}

fn all_in(a: &[Value], b: &[Value], meter: &Meter) -> Result<bool> {
    for item in a {
        if !any_equal(b, item, meter)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn any_equal(items: &[Value], wanted: &Value, meter: &Meter) -> Result<bool> {
    for item in items {
        if equal(item, wanted, meter)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn equal_dicts(a: &Dict, b: &Dict, depth: usize, meter: &Meter) -> Result<bool> {
    if a.entries.len() != b.entries.len() {
        return Ok(false);
    }
    for (key, value) in &a.entries {
        match b.get(key, meter)? {
            Some(other) if equal_at(value, other, depth + 1, meter)? => {}
            _ => return Ok(false),
        }
    }
    Ok(true)
}

/// How two numbers are ordered, exactly; `None` for what is no number.
fn numbers(left: &Value, right: &Value) -> Option<Ordering> {
    match (left.as_int(), right.as_int()) {
        (Some(a), Some(b)) => Some(a.cmp(&b)),
        (Some(a), None) => int_and_float(a, right.as_float()?),
        (None, Some(b)) => int_and_float(b, left.as_float()?).map(Ordering::reverse),
        (None, None) => left.as_float()?.partial_cmp(&right.as_float()?),
    }
}

fn int_and_float(a: i128, b: f64) -> Option<Ordering> {
    // Beyond this no whole number of ours is larger.
    if b.is_nan() {
        None
    } else if b.abs() >= 1.7e38 {
        Some(if b > 0.0 { Ordering::Less } else { Ordering::Greater })
    } else {
        let whole = b.trunc();
        Some(
            a.cmp(&(whole as i128))
                .then_with(|| 0.0_f64.partial_cmp(&(b - whole)).unwrap_or(Ordering::Equal)),
        )
    }
}

/// `left < right`.
pub(super) fn less(left: &Value, right: &Value, meter: &Meter) -> Result<bool> {
    Ok(order(left, right, "<", 0, meter)? == Some(Ordering::Less))
}

fn ordered(left: &Value, right: &Value, sign: &str, meter: &Meter) -> Result<bool> {
    let order = order(left, right, sign, 0, meter)?;
    Ok(matches!(order, Some(Ordering::Less | Ordering::Equal)))
}

fn order(
    left: &Value,
    right: &Value,
    sign: &str,
    depth: usize,
    meter: &Meter,
) -> Result<Option<Ordering>> {
    meter.spend(1)?;
    if depth > MAX_VALUE_DEPTH {
        return Err(Failure::new("a value that is nested too deep, a recursion without end"));
    }
    left.defined()?;
    right.defined()?;
    match (left, right) {
        (Value::Text(a) | Value::Markup(a), Value::Text(b) | Value::Markup(b)) => {
            meter.bytes(a.len().min(b.len()))?;
            Ok(Some(a.cmp(b)))
        }
        (Value::List(_), Value::List(_)) | (Value::Tuple(_), Value::Tuple(_)) => {
            let (a, b) = (left.items(meter)?, right.items(meter)?);
            for (a, b) in a.iter().zip(&*b) {
                if !equal_at(a, b, depth + 1, meter)? {
                    return order(a, b, sign, depth + 1, meter);
                }
            }
            Ok(Some(a.len().cmp(&b.len())))
        }
        _ if left.as_float().is_some() && right.as_float().is_some() => Ok(numbers(left, right)),
        _ => Err(wrong(sign, left, right)),
    }
}

/// Sorts, and leaves what is equal in its order.
pub(super) fn sort<T: Clone>(
    items: &mut Vec<T>,
    less: impl Fn(&T, &T) -> Result<bool> + Copy,
) -> Result<()> {
    if items.len() < 2 {
        return Ok(());
    }
    let mut right = items.split_off(items.len() / 2);
    let mut left = std::mem::take(items);
    sort(&mut left, less)?;
    sort(&mut right, less)?;
    let (mut left, mut right) = (left.into_iter().peekable(), right.into_iter().peekable());
    while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
        let next = if less(b, a)? { right.next() } else { left.next() };
        items.extend(next);
    }
    items.extend(left);
    items.extend(right);
    Ok(())
}

/// `item in container`.
pub(super) fn contains(container: &Value, item: &Value, meter: &Meter) -> Result<bool> {
    match container {
        Value::Text(text) | Value::Markup(text) => {
            let Some(part) = item.as_text() else { return Err(wrong("in", item, container)) };
            meter.bytes(text.len() + part.len())?;
            Ok(text.contains(&**part))
        }
        Value::Dict(dict) | Value::View(View::Keys, dict) => {
            meter.spend(1)?;
            Ok(dict.get(item, meter)?.is_some())
        }
        Value::Iterator(once) => {
            while let Some(next) = once.next() {
                if equal(&next, item, meter)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        other if other.is_iterable() => any_equal(&other.items(meter)?, item, meter),
        other => Err(wrong("in", item, other)),
    }
}

/// `value[index]` for a number; `None` where there is none.
pub(super) fn item_at(value: &Value, index: i128, meter: &Meter) -> Result<Option<Value>> {
    let len = match value {
        Value::Text(text) | Value::Markup(text) if text.is_ascii() => {
            meter.bytes(text.len())?;
            text.len()
        }
        Value::Text(_) | Value::Markup(_) | Value::List(_) | Value::Tuple(_) | Value::Range(_) => {
            value.len(meter)?.unwrap_or(0)
        }
        _ => return Ok(None),
    };
    let index = if index < 0 { index + len as i128 } else { index };
    let Some(index) = usize::try_from(index).ok().filter(|&index| index < len) else {
        return Ok(None);
    };
    Ok(match value {
        Value::Text(text) | Value::Markup(text) => {
            let c = if text.len() == len {
                text.get(index..=index).map(str::to_owned)
            } else {
                meter.bytes(index)?;
                text.chars().nth(index).map(String::from)
            };
            c.map(|c| value.like(c))
        }
        Value::List(list) => list.items().get(index).cloned(),
        Value::Tuple(items) => items.get(index).cloned(),
        Value::Range(range) => Some(Value::Int(range.get(index))),
        _ => None,
    })
}

/// `value[start:stop:step]`.
pub(super) fn slice(value: &Value, bounds: [Option<&Value>; 3], meter: &Meter) -> Result {
    value.defined()?;
    let mut numbers = [None; 3];
    for (number, bound) in numbers.iter_mut().zip(bounds) {
        *number = match bound {
            None | Some(Value::None) => None,
            Some(bound) => {
                bound.defined()?;
                let reason = || Failure::new(format!("a bound of type {}", bound.kind()));
                Some(bound.as_int().ok_or_else(reason)?)
            }
        };
    }
    let [start, stop, step] = numbers;
    // No value has more items than this.
    let most = i128::from(i64::MAX);
    let step = step.unwrap_or(1).clamp(-most, most);
    if step == 0 {
        return Err(Failure::new("a slice cannot have a step of 0"));
    }
    let len = match value {
        Value::Text(_) | Value::Markup(_) | Value::List(_) | Value::Tuple(_) | Value::Range(_) => {
            value.len(meter)?.unwrap_or(0) as i128
        }
        // Python has no such item, and Jinja takes that for one that is undefined.
        _ => return Ok(Value::undefined("slice")),
    };
    let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let place = |bound: Option<i128>, default| match bound {
        None => default,
        Some(at) if at < 0 => (at.saturating_add(len)).clamp(lowest, highest),
        Some(at) => at.min(highest),
    };
    let (start, stop) = if step > 0 {
        (place(start, 0), place(stop, len))
    } else {
        (place(start, len - 1), place(stop, -1))
    };
    let span = if step > 0 { stop - start } else { start - stop };
    let count = if span <= 0 { 0 } else { ((span - 1) / step.abs() + 1) as usize };
    meter.spend(count / 64)?;
    let at = |i: usize| (start + step * i as i128) as usize;
    Ok(match value {
        Value::Text(text) | Value::Markup(text) => {
            meter.bytes(text.len())?;
            let taken: String = if count == 0 {
                String::new()
            } else if step == 1 {
                text.chars().skip(at(0)).take(count).collect()
            } else {
                let chars: Vec<char> = text.chars().collect();
                (0..count).map(|i| chars[at(i)]).collect()
            };
            value.like(taken)
        }
        Value::Range(range) => Value::Range(Range {
            start: if count == 0 { range.start } else { range.get(at(0)) as i64 },
            step: range.step.saturating_mul(step as i64),
            len: count,
        }),
        other => {
            meter.spend(count)?;
            let items = other.items(meter)?;
            let taken: Vec<Value> = (0..count).map(|i| items[at(i)].clone()).collect();
            if matches!(other, Value::Tuple(_)) { Value::tuple(taken) } else { taken.into() }
        }
    })
}
