//! Saved states: one that is whole, changed, and sealed again with a checksum that is right.

use std::sync::LazyLock;

use arbitrary::Arbitrary;
use boostr::backend::{Cpu, cpu};
use boostr::checkpoint::{ConfigFile, Dtype};
use boostr::models::{Config, Logits, Model, Run};
use boostr::ops::KvType;
use boostr::state_file::{About, SavedState, StateFile};

#[path = "../../crates/boostr/tests/it/sealed.rs"]
mod sealed;

use sealed::Sealed;

/// A model with a mixer and attention, as small as they can be.
static MODEL: LazyLock<Model<Cpu>> = LazyLock::new(|| {
    let text = r#"{"model_type": "bamba", "hidden_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 8, "num_hidden_layers": 2,
        "attn_layer_indices": [1], "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4,
        "mamba_n_groups": 1, "mamba_expand": 2, "vocab_size": 32}"#;
    let config = Config::read(&ConfigFile::parse("config.json", text).expect("JSON"));
    let model = Model::synthetic(config.expect("a configuration"), Dtype::F32, cpu());
    model.expect("a model").with_kv_type(KvType::F16)
});

/// What has been seen in the whole state.
const IDS: [u32; 6] = [0, 1, 2, 3, 4, 5];

/// The file of a state of the model, whole.
pub static WHOLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut state = MODEL.new_state().expect("a state");
    let mut run = [Run { tokens: &IDS, state: &mut state }];
    MODEL.forward(&mut run, Logits::None).expect("it runs");
    let path = std::env::temp_dir().join(format!("boostr-fuzz-{}.state", std::process::id()));
    let about = About { ids: Some(&IDS), ..About::new("fuzz") };
    StateFile::lock(&path).expect("a file").save(&MODEL, &state, &about).expect("saved");
    let bytes = std::fs::read(&path).expect("it is there");
    std::fs::remove_file(path).expect("it is there");
    bytes
});

/// Opens `file` as a state, and uses what was opened.
pub fn check(file: Vec<u8>) {
    let Ok(saved) = SavedState::from_bytes("fuzz", file) else { return };
    saved.norms().expect("a state that is whole has norms");
    let _ = (saved.rest_of(&IDS), saved.diff(&saved), saved.size_in_bytes());
    if let Ok(mut state) = saved.restore(&MODEL) {
        assert_eq!(state.position(), saved.position());
        let mut run = [Run { tokens: &[1], state: &mut state }];
        MODEL.forward(&mut run, Logits::Last).expect("what was restored runs on");
    }
}

/// Changes of a whole file, or bytes in its place.
#[derive(Arbitrary, Debug)]
pub enum State {
    Bytes(Vec<u8>),
    Changed(Vec<Change>),
}

/// Fields are chosen by numbers, which go round.
#[derive(Arbitrary, Debug)]
pub enum Change {
    Text(u8, Word),
    NoText(u8),
    MoreText(String, Word),
    Size(u8, u8, Number),
    /// Another shape of as many elements, or of none.
    Shape(u8, Vec<Number>),
    Type(u8, u8),
    Name(u8, Word),
    NoTensor(u8),
    Byte(u8, u16, u8),
    Cut(u8, u16),
    Longer(u8, u8),
}

#[derive(Arbitrary, Debug)]
pub enum Word {
    Known(u8),
    Number(Number),
    Any(String),
}

#[derive(Arbitrary, Debug, Clone, Copy)]
pub enum Number {
    Small(u8),
    Any(u64),
    Power(u8),
    Most,
}

const WORDS: [&str; 16] = [
    "boostr.state",
    "1",
    "2",
    "f32",
    "bf16",
    "f16",
    "q8_0",
    "layers.0.ssm",
    "layers.0.conv",
    "layers.1.keys",
    "layers.1.values",
    "layers.2.ssm",
    "layers.18446744073709551615.keys",
    "ids",
    "position",
    "kv_type",
];

const TYPES: [&str; 8] = ["F32", "F16", "BF16", "U32", "F64", "U8", "I64", "BOOL"];

impl Number {
    fn value(self) -> usize {
        match self {
            Self::Small(n) => n.into(),
            Self::Any(n) => n as usize,
            Self::Power(n) => 1 << (n % 64),
            Self::Most => usize::MAX,
        }
    }
}

impl Word {
    fn text(self) -> String {
        match self {
            Self::Known(n) => WORDS[usize::from(n) % WORDS.len()].to_owned(),
            Self::Number(n) => n.value().to_string(),
            Self::Any(text) => text,
        }
    }
}

impl State {
    /// The file's bytes.
    pub fn encode(self) -> Vec<u8> {
        let changes = match self {
            Self::Bytes(bytes) => return bytes,
            Self::Changed(changes) => changes,
        };
        let mut sealed = Sealed::read(&WHOLE);
        for change in changes {
            change.make(&mut sealed);
        }
        sealed.seal();
        sealed.bytes()
    }
}

impl Change {
    fn make(self, sealed: &mut Sealed) {
        let key = |n: u8| sealed.metadata.keys().nth(usize::from(n) % sealed.metadata.len().max(1));
        let name = |n: u8| sealed.tensors.keys().nth(usize::from(n) % sealed.tensors.len().max(1));
        let (at, rest) = match self {
            Self::Text(n, word) => {
                if let Some(key) = key(n).cloned() {
                    sealed.metadata.insert(key, word.text());
                }
                return;
            }
            Self::NoText(n) => {
                if let Some(key) = key(n).cloned() {
                    sealed.metadata.remove(&key);
                }
                return;
            }
            Self::MoreText(key, word) => {
                sealed.metadata.insert(key, word.text());
                return;
            }
            Self::Name(n, word) => {
                if let Some(name) = name(n).cloned() {
                    let tensor = sealed.tensors.remove(&name).expect("it was found");
                    sealed.tensors.insert(word.text(), tensor);
                }
                return;
            }
            Self::NoTensor(n) => {
                if let Some(name) = name(n).cloned() {
                    sealed.tensors.remove(&name);
                }
                return;
            }
            Self::Size(n, ..)
            | Self::Shape(n, _)
            | Self::Type(n, _)
            | Self::Byte(n, ..)
            | Self::Cut(n, _)
            | Self::Longer(n, _) => (name(n).cloned(), self),
        };
        let Some((dtype, shape, data)) = at.and_then(|name| sealed.tensors.get_mut(&name)) else {
            return;
        };
        match rest {
            Self::Size(_, dim, size) => {
                if let Some(last) = shape.len().checked_sub(1) {
                    shape[usize::from(dim) % (last + 1)] = size.value();
                }
            }
            Self::Shape(_, sizes) => *shape = sizes.into_iter().map(Number::value).collect(),
            Self::Type(_, n) => TYPES[usize::from(n) % TYPES.len()].clone_into(dtype),
            Self::Byte(_, at, byte) => {
                if let Some(last) = data.len().checked_sub(1) {
                    data[usize::from(at) % (last + 1)] = byte;
                }
            }
            Self::Cut(_, at) => data.truncate(usize::from(at)),
            Self::Longer(_, n) => data.extend(std::iter::repeat_n(0, usize::from(n) * 4)),
            _ => {}
        }
    }
}
