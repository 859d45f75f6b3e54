//! A pickle machine that can only build weights.
//!
//! A pickle is a program for a stack machine; `GLOBAL` loads any Python function and `REDUCE` calls
//! it, which is why opening one with Python runs what its author wrote. This machine has no
//! functions. It knows the instructions that `torch.save` emits (protocols 2 to 4) and thirteen
//! names, each of which stands for a fixed kind of value; anything else is an error.
//!
//! What may be asked for is bounded: the stack, the memo, open marks, and values in all.

use std::collections::HashMap;

use super::entry::quoted;
use super::values::{Global, Node, Storage, Tensor, Value, Values, count};

const MAX_STACK: usize = 1 << 17;
const MAX_MARKS: usize = 1000;
const MAX_MEMO: usize = 1 << 19;
const MAX_VALUES: usize = 1 << 20;

const NOTHING_RAN: &str = "nothing was executed";

/// Runs a pickle. An error names the byte, and the global or instruction that was refused.
pub(super) fn run(pickle: &[u8]) -> Result<Values<'_>, String> {
    let mut machine = Machine::new(pickle);
    match machine.run() {
        Ok(root) => Ok(Values::new(machine.nodes, root)),
        Err(reason) => {
            let at = pickle.len().saturating_sub(machine.rest.len());
            Err(format!("pickle, before byte {at}: {reason}"))
        }
    }
}

struct Machine<'a> {
    rest: &'a [u8],
    stack: Vec<Value<'a>>,
    /// Heights of the stack at the open marks; nothing is popped from below the last.
    marks: Vec<usize>,
    memo: HashMap<u32, Value<'a>>,
    nodes: Vec<Node<'a>>,
    values: usize,
}

type Step<T> = Result<T, String>;

impl<'a> Machine<'a> {
    fn new(pickle: &'a [u8]) -> Self {
        Self {
            rest: pickle,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
            nodes: Vec::new(),
            values: 0,
        }
    }

    fn run(&mut self) -> Step<Value<'a>> {
        match self.array()? {
            [0x80, 2..=4] => {}
            [0x80, protocol] => return Err(format!("protocol {protocol}, 2 to 4 are read")),
            _ => return Err("does not start with its protocol".into()),
        }
        loop {
            let [opcode] = self.array()?;
            if opcode == b'.' {
                break;
            }
            self.step(opcode)?;
        }
        let root = self.pop()?;
        if !(self.stack.is_empty() && self.marks.is_empty() && self.rest.is_empty()) {
            return Err("something is left over at its end".into());
        }
        Ok(root)
    }

    /// One instruction; the letters are those of Python's `pickle.py`.
    fn step(&mut self, opcode: u8) -> Step<()> {
        match opcode {
            // FRAME: a hint for buffering.
            0x95 => self.array::<8>().map(drop),
            b'N' => self.push(Value::None),
            0x88 | 0x89 => self.push(Value::Bool),
            b'K' => self.array().and_then(|b| self.push(Value::Int(u8::from_le_bytes(b).into()))),
            b'M' => self.array().and_then(|b| self.push(Value::Int(u16::from_le_bytes(b).into()))),
            b'J' => self.array().and_then(|b| self.push(Value::Int(i32::from_le_bytes(b).into()))),
            0x8a => self.long(),
            // BINFLOAT
            b'G' => self.array::<8>().and_then(|_| self.push(Value::Opaque)),
            // SHORT_BINBYTES, BINBYTES
            b'C' => self.short_bytes().and_then(|_| self.push(Value::Opaque)),
            b'B' => self.bytes().and_then(|_| self.push(Value::Opaque)),
            // BINUNICODE, SHORT_BINUNICODE
            b'X' => self.bytes().and_then(text).and_then(|s| self.push(Value::Str(s))),
            0x8c => self.short_bytes().and_then(text).and_then(|s| self.push(Value::Str(s))),

            b'(' => self.mark(),
            b')' => self.push_node(Node::Tuple(Vec::new())),
            b']' => self.push_node(Node::List(Vec::new())),
            b'}' => self.push_node(Node::Dict(Vec::new())),
            b't' => self.pop_mark().and_then(|items| self.push_node(Node::Tuple(items))),
            0x85 => self.tuple::<1>(),
            0x86 => self.tuple::<2>(),
            0x87 => self.tuple::<3>(),
            b'a' => self.pop().and_then(|item| self.append(vec![item])),
            b'e' => self.pop_mark().and_then(|items| self.append(items)),
            b's' => self.pop_n::<2>().and_then(|pair| self.set_items(&pair)),
            b'u' => self.pop_mark().and_then(|items| self.set_items(&items)),

            b'q' => self.array().and_then(|b| self.remember(u8::from_le_bytes(b).into())),
            b'r' => self.array().and_then(|b| self.remember(u32::from_le_bytes(b))),
            // MEMOIZE; the memo has fewer than 2^32 values.
            0x94 => self.remember(self.memo.len() as u32),
            b'h' => self.array().and_then(|b| self.recall(u8::from_le_bytes(b).into())),
            b'j' => self.array().and_then(|b| self.recall(u32::from_le_bytes(b))),

            b'c' => self.global_lines().and_then(|(module, name)| self.global(module, name)),
            0x93 => self.stack_global(),
            b'Q' => self.storage(),
            b'R' => self.reduce(),
            b'b' => self.build(),
            // INST, which loads and calls at once.
            b'i' => self.global_lines().and_then(|(module, name)| Err(refusal(module, name))),
            _ => Err(format!(
                "instruction 0x{opcode:02x} is not among those of weights; {NOTHING_RAN}"
            )),
        }
    }

    fn array<const N: usize>(&mut self) -> Step<[u8; N]> {
        let (field, rest) = self.rest.split_first_chunk().ok_or("is cut short")?;
        self.rest = rest;
        Ok(*field)
    }

    fn take(&mut self, len: usize) -> Step<&'a [u8]> {
        let (field, rest) = self.rest.split_at_checked(len).ok_or("is cut short")?;
        self.rest = rest;
        Ok(field)
    }

    fn bytes(&mut self) -> Step<&'a [u8]> {
        let len = self.array().map(u32::from_le_bytes)?;
        self.take(usize::try_from(len).map_err(|_| "is cut short")?)
    }

    fn short_bytes(&mut self) -> Step<&'a [u8]> {
        let [len] = self.array()?;
        self.take(len.into())
    }

    /// LONG1: a little-endian signed integer of any length.
    fn long(&mut self) -> Step<()> {
        let bytes = self.short_bytes()?;
        let negative = bytes.last().is_some_and(|&b| b >= 0x80);
        let mut wide = [if negative { 0xff } else { 0 }; 8];
        let value = match wide.get_mut(..bytes.len()) {
            Some(low) => {
                low.copy_from_slice(bytes);
                Value::Int(i64::from_le_bytes(wide))
            }
            None => Value::Opaque,
        };
        self.push(value)
    }

    fn line(&mut self) -> Step<&'a str> {
        let end = self.rest.iter().position(|&b| b == b'\n').ok_or("is cut short")?;
        let line = self.take(end)?;
        self.array::<1>()?;
        text(line)
    }

    fn charge(&mut self, values: usize) -> Step<()> {
        self.values = self.values.saturating_add(values);
        if self.values > MAX_VALUES {
            return Err(format!("makes more than {MAX_VALUES} values"));
        }
        Ok(())
    }

    fn push(&mut self, value: Value<'a>) -> Step<()> {
        if self.stack.len() == MAX_STACK {
            return Err(format!("has more than {MAX_STACK} values on its stack"));
        }
        self.stack.push(value);
        Ok(())
    }

    fn push_node(&mut self, node: Node<'a>) -> Step<()> {
        self.charge(1)?;
        let id = self.nodes.len();
        self.nodes.push(node);
        self.push(Value::Node(id))
    }

    fn mark(&mut self) -> Step<()> {
        if self.marks.len() == MAX_MARKS {
            return Err(format!("is nested deeper than {MAX_MARKS}"));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    fn pop(&mut self) -> Step<Value<'a>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err("takes from an empty stack".into());
        }
        self.stack.pop().ok_or_else(|| "takes from an empty stack".into())
    }

    /// The last `N` values, in the order they were pushed.
    fn pop_n<const N: usize>(&mut self) -> Step<[Value<'a>; N]> {
        let mut items = [Value::None; N];
        for item in items.iter_mut().rev() {
            *item = self.pop()?;
        }
        Ok(items)
    }

    fn pop_mark(&mut self) -> Step<Vec<Value<'a>>> {
        let height = self.marks.pop().ok_or("closes a mark that is not open")?;
        let height = height.min(self.stack.len());
        let items: Vec<_> = self.stack.drain(height..).collect();
        self.charge(items.len())?;
        Ok(items)
    }

    fn tuple<const N: usize>(&mut self) -> Step<()> {
        self.charge(N)?;
        let items = self.pop_n::<N>()?;
        self.push_node(Node::Tuple(items.to_vec()))
    }

    /// The container on top of the stack, which stays there.
    fn top(&mut self) -> Step<&mut Node<'a>> {
        let value = self.pop()?;
        self.push(value)?;
        match value {
            Value::Node(id) => self.nodes.get_mut(id).ok_or_else(|| "lost a value".into()),
            _ => Err("fills something that is not a container".into()),
        }
    }

    fn append(&mut self, items: Vec<Value<'a>>) -> Step<()> {
        self.charge(items.len())?;
        match self.top()? {
            Node::List(list) => list.extend(items),
            _ => return Err("appends to something that is not a list".into()),
        }
        Ok(())
    }

    fn set_items(&mut self, items: &[Value<'a>]) -> Step<()> {
        self.charge(items.len())?;
        let (pairs, odd) = items.as_chunks::<2>();
        match self.top()? {
            Node::Dict(dict) if odd.is_empty() => dict.extend(pairs.iter().map(|&[k, v]| (k, v))),
            Node::Dict(_) => return Err("sets a key without a value".into()),
            _ => return Err("sets items of something that is not a dictionary".into()),
        }
        Ok(())
    }

    fn remember(&mut self, slot: u32) -> Step<()> {
        let value = self.pop()?;
        self.push(value)?;
        if self.memo.len() >= MAX_MEMO {
            return Err(format!("remembers more than {MAX_MEMO} values"));
        }
        self.memo.insert(slot, value);
        Ok(())
    }

    fn recall(&mut self, slot: u32) -> Step<()> {
        let value = self.memo.get(&slot).copied();
        self.push(value.ok_or_else(|| format!("recalls value {slot}, which it did not remember"))?)
    }

    fn global_lines(&mut self) -> Step<(&'a str, &'a str)> {
        Ok((self.line()?, self.line()?))
    }

    fn stack_global(&mut self) -> Step<()> {
        match self.pop_n()? {
            [Value::Str(module), Value::Str(name)] => self.global(module, name),
            _ => Err(format!("loads a global whose name is not text; {NOTHING_RAN}")),
        }
    }

    fn global(&mut self, module: &str, name: &str) -> Step<()> {
        let global = Global::named(module, name).ok_or_else(|| refusal(module, name))?;
        self.push(Value::Global(global))
    }

    /// BINPERSID: a storage, named by `("storage", type, key, location, numel)`.
    fn storage(&mut self) -> Step<()> {
        let id = self.pop()?;
        let items = self.tuple_items(id)?;
        let &[
            Value::Str("storage"),
            Value::Global(Global::Storage(dtype)),
            Value::Str(key),
            Value::Str(_location),
            ref numel,
        ] = items
        else {
            return Err("refers to something that is not a storage".into());
        };
        let numel = count(numel).ok_or("has a storage whose length is not a count")?;
        self.push_node(Node::Storage(Storage { dtype, key, numel }))
    }

    /// REDUCE: where Python calls, this makes the value that the call is known to return.
    fn reduce(&mut self) -> Step<()> {
        let [callable, arguments] = self.pop_n()?;
        let arguments = self.tuple_items(arguments)?;
        match (callable, arguments) {
            (Value::Global(Global::OrderedDict), []) => self.push_node(Node::Dict(Vec::new())),
            (
                Value::Global(Global::RebuildTensor),
                // The hooks are an empty dictionary; newer files add one of metadata.
                &[Value::Node(storage), ref offset, Value::Node(shape), Value::Node(strides), _, _]
                | &[
                    Value::Node(storage),
                    ref offset,
                    Value::Node(shape),
                    Value::Node(strides),
                    _,
                    _,
                    _,
                ],
            ) => {
                let offset = count(offset).ok_or("has a tensor whose offset is not a count")?;
                let Some(&Node::Storage(storage)) = self.nodes.get(storage) else {
                    return Err("has a tensor without a storage".into());
                };
                self.push_node(Node::Tensor(Tensor { storage, offset, shape, strides }))
            }
            (Value::Global(Global::RebuildParameter), &[data @ Value::Node(id), _, _])
                if matches!(self.nodes.get(id), Some(Node::Tensor(_))) =>
            {
                self.push(data)
            }
            (Value::Global(global), _) => {
                Err(format!("calls {global:?} with other arguments than torch does; {NOTHING_RAN}"))
            }
            _ => Err(format!("calls something that is not a global; {NOTHING_RAN}")),
        }
    }

    /// BUILD: attributes for an object. Only the dictionary of a `state_dict` has any, `_metadata`.
    fn build(&mut self) -> Step<()> {
        self.pop()?;
        match self.top()? {
            Node::Dict(_) => Ok(()),
            _ => Err(format!("sets attributes of something else than a dictionary; {NOTHING_RAN}")),
        }
    }

    fn tuple_items(&self, value: Value<'a>) -> Step<&[Value<'a>]> {
        match value {
            Value::Node(id) => match self.nodes.get(id) {
                Some(Node::Tuple(items)) => Ok(items),
                _ => Err("has something else where a tuple belongs".into()),
            },
            _ => Err("has something else where a tuple belongs".into()),
        }
    }
}

fn text(bytes: &[u8]) -> Step<&str> {
    std::str::from_utf8(bytes).map_err(|_| "has text that is not UTF-8".into())
}

fn refusal(module: &str, name: &str) -> String {
    let global = quoted(&format!("{module}.{name}"));
    format!("global {global} is not among those of weights; {NOTHING_RAN}")
}
