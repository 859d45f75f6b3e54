//! How well a model predicts a text.

use std::ops::ControlFlow;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::models::{Logits, Model, PIECE, Run, State};
use crate::ops;
use crate::sample::{Choice, LogSoftmax};

/// What a model gives a text: the sum over its tokens, from the second on, of -ln of their probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// The sum, in nats.
    pub nats: f64,
    /// Tokens that were predicted: all but the first.
    pub tokens: usize,
    /// Bytes of the text.
    pub bytes: usize,
}

impl Score {
    /// Bits that the model needs for each byte of the text: comparable between tokenizers.
    ///
    /// ```
    /// let score = boostr::evaluate::Score { nats: 2f64.ln() * 24.0, tokens: 3, bytes: 12 };
    /// assert_eq!(score.bits_per_byte(), 2.0);
    /// ```
    #[must_use]
    pub fn bits_per_byte(&self) -> f64 {
        self.nats / std::f64::consts::LN_2 / self.bytes as f64
    }

    /// The exponential of the mean of nats: as unsure as a choice among so many tokens.
    #[must_use]
    pub fn perplexity(&self) -> f64 {
        (self.nats / self.tokens as f64).exp()
    }
}

/// Scores the `ids` of a text of `bytes` bytes; `progress` is told `(done, total)` tokens.
///
/// # Errors
///
/// [`Error::Argument`] for fewer than two ids, an unknown one, or logits that are not finite.
///
/// ```
/// use boostr::evaluate::score;
/// use boostr::models::{Config, Model};
/// use boostr::{backend, checkpoint::{ConfigFile, Dtype}};
///
/// let config = Config::read(&ConfigFile::parse("config.json", r#"{
///     "model_type": "mamba2", "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4,
///     "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 32
/// }"#)?)?;
/// let model = Model::<backend::Cpu>::synthetic(config, Dtype::F32, backend::cpu())?;
/// let score = score(&model, &[1, 2, 3, 4], 4, |_, _| {})?;
/// assert_eq!(score.tokens, 3);
/// assert!(score.perplexity() > 1.0);
/// # Ok::<(), boostr::Error>(())
/// ```
pub fn score<B: Backend>(
    model: &Model<B>,
    ids: &[u32],
    bytes: usize,
    mut progress: impl FnMut(usize, usize),
) -> Result<Score> {
    if ids.len() < 2 {
        let reason = format!("expected at least two tokens, found {}", ids.len());
        return Err(Error::Argument { name: "ids", reason });
    }
    let (inputs, targets) = (&ids[..ids.len() - 1], &ids[1..]);
    let mut state = model.new_state()?;
    let mut nats = 0.0;
    for (i, (tokens, next)) in inputs.chunks(PIECE).zip(targets.chunks(PIECE)).enumerate() {
        let losses = model.losses(&mut [Run { tokens, state: &mut state }], &[next], None)?;
        nats += losses[0].iter().map(|&loss| f64::from(loss)).sum::<f64>();
        if !nats.is_finite() {
            let reason = format!("near token {} they are not finite", i * PIECE);
            return Err(Error::Argument { name: "logits", reason });
        }
        progress(i * PIECE + tokens.len(), inputs.len());
    }
    Ok(Score { nats, tokens: targets.len(), bytes })
}

/// Most logits in memory at once.
const MAX_LOGITS: usize = 8 << 20;

/// What a model gives each token of a text, from the second on: its log-probability among the ids below `vocab_limit`,
/// and the `top` likeliest beside it. These are the numbers that generation reports.
///
/// `state` has seen nothing before, and all ids but the last after. `progress` is told `(done, total)` tokens and may end
/// the work: then there are fewer choices.
///
/// # Errors
///
/// [`Error::Argument`] for an unknown id, a limit that is not in 1..=rows, or logits that are not finite.
///
/// ```
/// use std::ops::ControlFlow;
/// use boostr::evaluate::choices;
/// use boostr::load::{LanguageModel, OpenOptions};
/// use boostr::backend;
///
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
/// let lm = LanguageModel::open(path, &OpenOptions::default(), backend::cpu())?;
/// let ids = lm.encode("Once upon a time")?;
/// let mut state = lm.model.new_state()?;
/// let go_on = |_, _| ControlFlow::Continue(());
/// let given = choices(&lm.model, &ids, lm.vocab_limit(), 1, &mut state, go_on)?;
/// assert_eq!((given.len(), state.position()), (ids.len() - 1, ids.len() - 1));
/// assert!(given.iter().zip(&ids[1..]).all(|(choice, id)| choice.id == *id));
/// assert!(given.iter().all(|choice| choice.logprob <= choice.top[0].1));
/// # Ok::<(), boostr::Error>(())
/// ```
pub fn choices<B: Backend>(
    model: &Model<B>,
    ids: &[u32],
    vocab_limit: usize,
    top: usize,
    state: &mut State<B>,
    mut progress: impl FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Vec<Choice>> {
    let rows = model.vocab_rows();
    if !(1..=rows).contains(&vocab_limit) {
        let reason = format!("expected 1 to {rows}, found {vocab_limit}");
        return Err(Error::Argument { name: "vocab_limit", reason });
    }
    let (Some((_, targets)), Some((_, inputs))) = (ids.split_first(), ids.split_last()) else {
        return Ok(Vec::new());
    };
    let piece = (MAX_LOGITS / rows).clamp(1, PIECE);
    let mut choices = Vec::with_capacity(targets.len());
    for (tokens, next) in inputs.chunks(piece).zip(targets.chunks(piece)) {
        let logits = model.forward(&mut [Run { tokens, state }], Logits::All)?;
        for (row, &id) in ops::to_vec(&logits)?.chunks_exact(rows).zip(next) {
            let (Some(&logit), Some(row)) = (row.get(id as usize), row.get(..vocab_limit)) else {
                let reason = format!("token id {id} is not below the vocabulary's {rows} rows");
                return Err(Error::Argument { name: "ids", reason });
            };
            let is_wrong = |x: &f32| x.is_nan() || *x == f32::INFINITY;
            if row.iter().any(is_wrong) || row.iter().all(|&x| x == f32::NEG_INFINITY) {
                let reason = format!("after token {} they are not finite", choices.len());
                return Err(Error::Argument { name: "logits", reason });
            }
            let distribution = LogSoftmax::of(row);
            let top = distribution.top(row, top);
            choices.push(Choice { id, logprob: distribution.at(logit), top });
        }
        if progress(choices.len(), targets.len()).is_break() {
            break;
        }
    }
    Ok(choices)
}
