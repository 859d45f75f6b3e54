//! Filling in: what a model is given for a text with a hole, by the control tokens that it was trained with.

use boostr::backend::Backend;
use boostr::load::LanguageModel;
use boostr::tokenizer::{Part, Tokenizer};

/// The control tokens of a model that fills in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hole {
    prefix: &'static str,
    suffix: &'static str,
    /// Comes last; Mistral's models have none, and read the suffix first.
    middle: Option<&'static str>,
}

const fn hole(prefix: &'static str, suffix: &'static str, middle: &'static str) -> Hole {
    Hole { prefix, suffix, middle: Some(middle) }
}

/// Qwen and Granite; StarCoder; SantaCoder; DeepSeek; Code Llama; Codestral.
const KNOWN: [Hole; 6] = [
    hole("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    hole("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    hole("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    hole(
        "<\u{ff5c}fim\u{2581}begin\u{ff5c}>",
        "<\u{ff5c}fim\u{2581}hole\u{ff5c}>",
        "<\u{ff5c}fim\u{2581}end\u{ff5c}>",
    ),
    hole("\u{2581}<PRE>", "\u{2581}<SUF>", "\u{2581}<MID>"),
    Hole { prefix: "[PREFIX]", suffix: "[SUFFIX]", middle: None },
];

impl Hole {
    /// How a model fills in, if its tokenizer has all the tokens of one way.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let has = |token: &&str| tokenizer.id(token).is_some();
        let has_all = |hole: &&Self| {
            [Some(hole.prefix), Some(hole.suffix), hole.middle].iter().flatten().all(has)
        };
        KNOWN.iter().find(has_all).copied()
    }

    /// The ids of a text with a hole between `before` and `after`, whose control tokens are text.
    pub(crate) fn encode<B: Backend>(
        self,
        lm: &LanguageModel<B>,
        before: &str,
        after: &str,
    ) -> boostr::Result<Vec<u32>> {
        let prefix = [Part::Control(self.prefix), Part::Text(before)];
        let suffix = [Part::Control(self.suffix), Part::Text(after)];
        let parts = match self.middle {
            Some(middle) => [&prefix[..], &suffix, &[Part::Control(middle)]].concat(),
            None => [suffix, prefix].concat(),
        };
        lm.encode_parts(&parts)
    }
}
