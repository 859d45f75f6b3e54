//! Beam search: the likeliest continuations, found by forks.

use std::ops::ControlFlow;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::models::{Logits, Model, PIECE, Run, State};
use crate::ops;
use crate::sample::{LogSoftmax, Suppression, check_logits};

use super::request::check_prompt;
use super::run;

/// Most beams of a search.
const MAX_WIDTH: usize = 64;

/// Which continuations to look for.
#[derive(Debug, Clone, Copy)]
pub struct BeamSearch<'a> {
    /// Beams, 1 to 64.
    pub width: usize,
    /// Most tokens of each, and no more than the model's context has room for.
    pub max_tokens: usize,
    /// A beam ends at any of these.
    pub eos: &'a [u32],
    /// Ids below this may be chosen; at most the model's own [limit](Model::vocab_limit).
    pub vocab_limit: usize,
    /// Tokens that no beam has. The log probabilities of the others stay the model's own.
    pub suppression: &'a Suppression,
    /// The tokens before the prompt, where they are known: a sequence that is never completed may begin there.
    pub before: &'a [u32],
}

/// A continuation that was found.
#[derive(Debug, Clone)]
pub struct Beam<B: Backend> {
    /// Its tokens, with the one of `eos` that ended it.
    pub ids: Vec<u32>,
    /// Sum of their log probabilities.
    pub logprob: f64,
    /// Whether it ended by a token of `eos`.
    pub is_ended: bool,
    /// The state after all of its tokens but the last.
    pub state: State<B>,
}

/// The likeliest continuations that a beam search finds, the likeliest first.
///
/// Each round extends all beams by one token and keeps the `width` extensions of the highest sums of log
/// probabilities; of equal ones the earlier beam's, then the lower id. Beams that ended keep their place. `state` has seen
/// what comes before `prompt`, and is not changed. Rows of all beams are one forward. `progress` is told how many tokens
/// the beams have; after `Break` they are given as they are.
///
/// # Errors
///
/// [`Error::Argument`] for an empty prompt, an unknown id, a width that is not in 1..=64, logits that are no numbers.
///
/// ```
/// use std::ops::ControlFlow;
/// use boostr::engine::{BeamSearch, beam_search};
/// use boostr::models::{Config, Model};
/// use boostr::{backend, checkpoint::{ConfigFile, Dtype}};
///
/// let config = Config::read(&ConfigFile::parse("config.json", r#"{
///     "model_type": "mamba2", "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4,
///     "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 32
/// }"#)?)?;
/// let model = Model::<backend::Cpu>::synthetic(config, Dtype::F32, backend::cpu())?;
/// let suppression = &Default::default();
/// let search =
///     BeamSearch { width: 3, max_tokens: 5, eos: &[], vocab_limit: 32, suppression, before: &[] };
/// let state = model.new_state()?;
/// let beams = beam_search(&model, &state, &[1, 2, 3], search, |_| ControlFlow::Continue(()))?;
/// assert_eq!(beams.len(), 3);
/// assert!(beams[0].logprob >= beams[1].logprob && beams[0].ids.len() == 5);
/// # Ok::<(), boostr::Error>(())
/// ```
pub fn beam_search<B: Backend>(
    model: &Model<B>,
    state: &State<B>,
    prompt: &[u32],
    search: BeamSearch<'_>,
    mut progress: impl FnMut(usize) -> ControlFlow<()>,
) -> Result<Vec<Beam<B>>> {
    let BeamSearch { width, max_tokens, .. } = search;
    check_prompt(prompt, model)?;
    let max_tokens = max_tokens.min(model.room_after(state.position() + prompt.len())?);
    if !(1..=MAX_WIDTH).contains(&width) {
        let reason = format!("expected 1 to {MAX_WIDTH} beams, found {width}");
        return Err(Error::Argument { name: "width", reason });
    }
    let mut state = state.clone();
    let mut logits = Vec::new();
    for piece in prompt.chunks(PIECE) {
        if progress(0).is_break() {
            return Ok(Vec::new());
        }
        logits = run(model, &mut state, piece)?;
    }
    let mut beams = vec![Beam { ids: Vec::new(), logprob: 0.0, is_ended: false, state }];
    for round in 0..max_tokens {
        if progress(round).is_break() {
            break;
        }
        if round > 0 {
            let open = beams.iter_mut().filter(|beam| !beam.is_ended);
            let mut runs: Vec<Run<'_, B>> = open
                .map(|Beam { ids, state, .. }| Run { tokens: &ids[ids.len() - 1..], state })
                .collect();
            if runs.is_empty() {
                break;
            }
            logits = ops::to_vec(&model.forward(&mut runs, Logits::Last)?)?;
        }
        beams = extended(prompt, &beams, &logits, model, search)?;
    }
    Ok(beams)
}

/// The best `width` of all extensions of `beams`, which follow `prompt`, by one token; `logits` are those of the beams
/// that have not ended.
fn extended<B: Backend>(
    prompt: &[u32],
    beams: &[Beam<B>],
    logits: &[f32],
    model: &Model<B>,
    search: BeamSearch<'_>,
) -> Result<Vec<Beam<B>>> {
    let BeamSearch { width, eos, vocab_limit, suppression, before, .. } = search;
    let limit = vocab_limit.min(model.vocab_limit());
    let mut rows = logits.chunks(model.vocab_rows());
    // Sum, beam, and the token that is added.
    let mut best: Vec<(f64, usize, Option<u32>)> = Vec::new();
    for (i, beam) in beams.iter().enumerate() {
        if beam.is_ended {
            best.push((beam.logprob, i, None));
            continue;
        }
        let row = &rows.next().unwrap_or_default()[..limit];
        check_logits(row)?;
        let distribution = LogSoftmax::of(row);
        let of = |logit| beam.logprob + distribution.exact(logit);
        let extensions = (0..).zip(row).map(|(id, &logit)| (of(logit), i, Some(id)));
        if suppression.is_empty() {
            best.extend(extensions);
        } else {
            let history = [before, prompt, &beam.ids].concat();
            let left = suppression.leave(None, limit, &history, beam.ids.is_empty())?;
            best.extend(extensions.filter(|(_, _, id)| id.is_some_and(|id| left.contains(id))));
        }
    }
    let order = |a: &(f64, usize, Option<u32>), b: &(f64, usize, Option<u32>)| {
        b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2))
    };
    if width < best.len() {
        best.select_nth_unstable_by(width, order);
        best.truncate(width);
    }
    best.sort_unstable_by(order);
    let beams = best.into_iter().map(|(logprob, i, id)| {
        let Beam { mut ids, is_ended, state, .. } = beams[i].clone();
        ids.extend(id);
        let is_ended = is_ended || id.is_some_and(|id| eos.contains(&id));
        Beam { ids, logprob, is_ended, state }
    });
    Ok(beams.collect())
}
