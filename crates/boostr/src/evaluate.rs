//! How well a model predicts a text.

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::models::{Model, PIECE, Run};

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
            let reason = format!("logits near token {} are not finite", i * PIECE);
            return Err(Error::Argument { name: "model", reason });
        }
        progress(i * PIECE + tokens.len(), inputs.len());
    }
    Ok(Score { nats, tokens: targets.len(), bytes })
}
