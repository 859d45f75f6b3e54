//! What a pickle of weights can hold.
//!
//! Values live in one list and refer to each other by number, so neither deep nesting nor a cycle
//! costs any of the program's stack. Strings stay where they are in the file.

use super::Dtype;

/// A value; containers are numbers into [`Values`].
#[derive(Debug, Clone, Copy)]
pub(super) enum Value<'a> {
    None,
    Bool,
    Int(i64),
    Str(&'a str),
    /// A float, a large integer or bytes: no weight needs its content.
    Opaque,
    Global(Global),
    Node(usize),
}

/// The names that a pickle may load.
#[derive(Debug, Clone, Copy)]
pub(super) enum Global {
    RebuildTensor,
    RebuildParameter,
    OrderedDict,
    Storage(Dtype),
}

impl Global {
    /// The value of a name; `None` for all but these thirteen.
    pub(super) fn named(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            ("torch._utils", "_rebuild_tensor_v2") => Self::RebuildTensor,
            ("torch._utils", "_rebuild_parameter") => Self::RebuildParameter,
            ("collections", "OrderedDict") => Self::OrderedDict,
            ("torch", "DoubleStorage") => Self::Storage(Dtype::F64),
            ("torch", "FloatStorage") => Self::Storage(Dtype::F32),
            ("torch", "HalfStorage") => Self::Storage(Dtype::F16),
            ("torch", "BFloat16Storage") => Self::Storage(Dtype::BF16),
            ("torch", "LongStorage") => Self::Storage(Dtype::I64),
            ("torch", "IntStorage") => Self::Storage(Dtype::I32),
            ("torch", "ShortStorage") => Self::Storage(Dtype::I16),
            ("torch", "CharStorage") => Self::Storage(Dtype::I8),
            ("torch", "ByteStorage") => Self::Storage(Dtype::U8),
            ("torch", "BoolStorage") => Self::Storage(Dtype::Bool),
            _ => return None,
        })
    }
}

/// A value that others refer to by number.
#[derive(Debug)]
pub(super) enum Node<'a> {
    Tuple(Vec<Value<'a>>),
    List(Vec<Value<'a>>),
    Dict(Vec<(Value<'a>, Value<'a>)>),
    Storage(Storage<'a>),
    Tensor(Tensor<'a>),
}

/// A flat array in the archive's entry `data/<key>`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Storage<'a> {
    pub(super) dtype: Dtype,
    pub(super) key: &'a str,
    pub(super) numel: usize,
}

/// A view into a storage. Shape and strides count elements and are not checked against it yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tensor<'a> {
    pub(super) storage: Storage<'a>,
    pub(super) offset: usize,
    /// The numbers of two tuples; see [`Values::layout`].
    pub(super) shape: usize,
    pub(super) strides: usize,
}

/// All values of a pickle, and the one it stands for.
#[derive(Debug)]
pub(super) struct Values<'a> {
    nodes: Vec<Node<'a>>,
    pub(super) root: Value<'a>,
}

impl<'a> Values<'a> {
    pub(super) fn new(nodes: Vec<Node<'a>>, root: Value<'a>) -> Self {
        Self { nodes, root }
    }

    /// The pairs of a dictionary, repeated keys and all.
    pub(super) fn dict(&self, value: Value<'a>) -> Option<&[(Value<'a>, Value<'a>)]> {
        match self.node(value)? {
            Node::Dict(pairs) => Some(pairs),
            _ => None,
        }
    }

    /// The tensor that a value is.
    pub(super) fn tensor(&self, value: Value<'a>) -> Option<Tensor<'a>> {
        match self.node(value)? {
            Node::Tensor(tensor) => Some(*tensor),
            _ => None,
        }
    }

    /// The shape and the strides of a tensor; `None` if one is negative or not an integer, if they
    /// have not the same length, or if they are longer than `max`.
    pub(super) fn layout(
        &self,
        tensor: &Tensor<'a>,
        max: usize,
    ) -> Option<(Vec<usize>, Vec<usize>)> {
        let sizes = |tuple| match self.nodes.get(tuple)? {
            Node::Tuple(items) if items.len() <= max => items.iter().map(count).collect(),
            _ => None,
        };
        let (shape, strides): (Vec<_>, Vec<_>) = (sizes(tensor.shape)?, sizes(tensor.strides)?);
        (shape.len() == strides.len()).then_some((shape, strides))
    }

    fn node(&self, value: Value<'a>) -> Option<&Node<'a>> {
        match value {
            Value::Node(id) => self.nodes.get(id),
            _ => None,
        }
    }
}

/// A length, an offset or a dimension.
pub(super) fn count(value: &Value<'_>) -> Option<usize> {
    match *value {
        Value::Int(n) => usize::try_from(n).ok(),
        _ => None,
    }
}
