//! Generation: ids in, ids out.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::models::{Logits, Model, PIECE, Run, State};
use crate::ops;
use crate::sample::{Sampler, SamplerConfig};

/// What to generate.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// What comes after what the state has seen; at least one token.
    pub prompt: &'a [u32],
    /// What the state has seen, for the sampler's penalty of repetitions; it is not run again.
    pub seen: &'a [u32],
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// Generation ends at any of these, which is not handed on.
    pub eos: &'a [u32],
    /// Ids below this may be sampled.
    pub vocab_limit: usize,
    /// How tokens are chosen.
    pub sampler: SamplerConfig,
}

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A token of the eos list was sampled.
    Eos,
    /// `max_tokens` were generated.
    Length,
    /// The observer asked to stop.
    Stopped,
}

/// What was generated, and how long it took.
#[derive(Debug, Clone)]
pub struct Generated {
    /// The tokens, without the one that ended it.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Time to run the prompt.
    pub prompt: Duration,
    /// Time from the call to the first token.
    pub first_token: Duration,
    /// Time for the tokens after the first.
    pub decode: Duration,
}

/// Is told how generation goes, and may end it.
pub trait Observer {
    /// `done` of the prompt's `total` tokens have been run.
    fn prompt(&mut self, done: usize, total: usize) -> ControlFlow<()> {
        let _ = (done, total);
        ControlFlow::Continue(())
    }

    /// A token was chosen.
    ///
    /// # Errors
    ///
    /// Whatever makes the observer unable to go on; generation returns it.
    fn token(&mut self, id: u32) -> Result<ControlFlow<()>>;
}

/// Generates from `state`, which has seen everything handed on but the last token.
///
/// # Errors
///
/// [`Error::Argument`] for an empty prompt or an unknown id, and whatever the sampler or the observer
/// refuse.
///
/// ```
/// use std::ops::ControlFlow;
/// use boostr::engine::{Observer, Request, generate};
/// use boostr::models::{Config, Model};
/// use boostr::{backend, checkpoint::{ConfigFile, Dtype}, sample::SamplerConfig};
///
/// struct Print;
/// impl Observer for Print {
///     fn token(&mut self, id: u32) -> boostr::Result<ControlFlow<()>> {
///         println!("{id}");
///         Ok(ControlFlow::Continue(()))
///     }
/// }
///
/// let config = Config::read(&ConfigFile::parse("config.json", r#"{
///     "model_type": "mamba2", "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4,
///     "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 32
/// }"#)?)?;
/// let model = Model::<backend::Cpu>::synthetic(config, Dtype::F32, backend::cpu())?;
/// let request = Request {
///     prompt: &[1, 2, 3], seen: &[], max_tokens: 5, eos: &[], vocab_limit: 32,
///     sampler: SamplerConfig::greedy(),
/// };
/// let mut state = model.new_state()?;
/// let generated = generate(&model, &mut state, &request, &mut Print)?;
/// assert_eq!((generated.ids.len(), state.position()), (5, 3 + 4));
/// # Ok::<(), boostr::Error>(())
/// ```
pub fn generate<B: Backend>(
    model: &Model<B>,
    state: &mut State<B>,
    request: &Request<'_>,
    observer: &mut impl Observer,
) -> Result<Generated> {
    let start = Instant::now();
    let mut sampler = Sampler::new(request.sampler.clone(), request.vocab_limit)?;
    let mut out = Generated {
        ids: Vec::new(),
        finish: Finish::Length,
        prompt: Duration::ZERO,
        first_token: Duration::ZERO,
        decode: Duration::ZERO,
    };
    let total = request.prompt.len();
    if total == 0 {
        let reason = "expected at least one token, found none".into();
        return Err(Error::Argument { name: "prompt", reason });
    }
    let rows = model.vocab_rows();
    if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= rows) {
        let reason = format!("token id {id} is not below the vocabulary's {rows} rows");
        return Err(Error::Argument { name: "prompt", reason });
    }

    let mut logits = None;
    let mut done = 0;
    while done < total {
        // Cut on the model's own grid of positions: pieces are those of one long call.
        let len = (PIECE - state.position() % PIECE).min(total - done);
        let tokens = &request.prompt[done..done + len];
        done += len;
        let wanted = if done == total { Logits::Last } else { Logits::None };
        logits = Some(model.forward(&mut [Run { tokens, state }], wanted)?);
        if observer.prompt(done, total).is_break() {
            out.finish = Finish::Stopped;
            break;
        }
    }
    out.prompt = start.elapsed();
    if out.finish == Finish::Stopped {
        return Ok(out);
    }

    let mut history = [request.seen, request.prompt].concat();
    let mut decode_start = Instant::now();
    while let Some(row) = logits.take().filter(|_| out.ids.len() < request.max_tokens) {
        let id = sampler.sample(&ops::to_vec(&row)?, &history)?;
        if request.eos.contains(&id) {
            out.finish = Finish::Eos;
            break;
        }
        if out.ids.is_empty() {
            out.first_token = start.elapsed();
            decode_start = Instant::now();
        }
        history.push(id);
        out.ids.push(id);
        if observer.token(id)?.is_break() {
            out.finish = Finish::Stopped;
            break;
        }
        if out.ids.len() < request.max_tokens {
            logits = Some(model.forward(&mut [Run { tokens: &[id], state }], Logits::Last)?);
        }
    }
    out.decode = decode_start.elapsed();
    Ok(out)
}
