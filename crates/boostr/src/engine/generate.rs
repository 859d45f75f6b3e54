//! One sequence, on the caller's thread.

use std::ops::ControlFlow;
use std::time::Duration;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::models::{Model, State};
use crate::sample::{Constraint, Sampler, SamplerConfig};

use super::request::check_prompt;
use super::{Draft, EngineConfig, Event, Finish, Outcome, Request, Scheduler, Timings};

/// What to generate. [`Generation::new`] fills in the usual rest.
pub struct Generation<'a, B: Backend> {
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
    /// What may come next.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Where guesses of the next tokens come from.
    pub draft: Option<Draft<B>>,
}

impl<'a, B: Backend> Generation<'a, B> {
    /// Up to 512 greedy tokens.
    #[must_use]
    pub fn new(prompt: &'a [u32], vocab_limit: usize) -> Self {
        Self {
            prompt,
            seen: &[],
            max_tokens: 512,
            eos: &[],
            vocab_limit,
            sampler: SamplerConfig::greedy(),
            constraint: None,
            draft: None,
        }
    }
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
    /// Tokens that were guessed, and those of them that were right.
    pub guessed: (u64, u64),
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

/// Generates from `state`, which afterwards has seen all that was handed on, but the last token, or with a draft a few.
///
/// # Errors
///
/// [`Error::Argument`] for an empty prompt or an unknown id, and whatever the sampler or the observer
/// refuse. `state` is as it was if nothing was computed; it is not to be used any more if the forward itself failed.
///
/// ```
/// use std::ops::ControlFlow;
/// use boostr::engine::{Generation, Observer, generate};
/// use boostr::models::{Config, Model};
/// use boostr::{backend, checkpoint::{ConfigFile, Dtype}};
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
/// let mut state = model.new_state()?;
/// let generation = Generation { max_tokens: 5, ..Generation::new(&[1, 2, 3], 32) };
/// let generated = generate(&model, &mut state, generation, &mut Print)?;
/// assert_eq!((generated.ids.len(), state.position()), (5, 3 + 4));
/// # Ok::<(), boostr::Error>(())
/// ```
pub fn generate<B: Backend>(
    model: &Model<B>,
    state: &mut State<B>,
    generation: Generation<'_, B>,
    observer: &mut (impl Observer + Send),
) -> Result<Generated> {
    let Generation { prompt, seen, max_tokens, eos, vocab_limit, sampler, constraint, draft } =
        generation;
    Sampler::new(sampler.clone(), vocab_limit)?;
    check_prompt(prompt, model)?;
    model.check_state(state)?;
    let (mut refused, mut end) = (None, None);
    let config = EngineConfig { snapshot_bytes: 0, snapshot_every: 0, ..EngineConfig::default() };
    let mut scheduler = Scheduler::new(model, config);
    if let Some(draft) = draft {
        scheduler = scheduler.with_draft(draft)?;
    }
    let request = Request {
        state: Some(std::mem::replace(state, State::nothing())),
        max_tokens,
        eos: eos.to_vec(),
        sampler,
        constraint,
        ..Request::new([seen, prompt].concat(), vocab_limit)
    };
    let known = seen.len();
    let listener = |event: Event<B>| match event {
        Event::Prompt { done, .. } if done == known => ControlFlow::Continue(()),
        Event::Prompt { done, total, .. } => observer.prompt(done - known, total - known),
        Event::Token { id, .. } => observer.token(id).unwrap_or_else(|error| {
            refused = Some(error);
            ControlFlow::Break(())
        }),
        Event::Finished { outcome, .. } => {
            end = Some(outcome);
            ControlFlow::Break(())
        }
        Event::Failed { error } => {
            refused = Some(error);
            ControlFlow::Break(())
        }
    };
    scheduler.submit_alone(request, known, Box::new(listener));
    while scheduler.step() {}
    let stats = scheduler.stats();
    drop(scheduler);
    let outcome = end.map(|Outcome { finish, ids, state: after, timings }| {
        *state = after.unwrap_or_else(State::nothing);
        let Timings { prompt, first_token, decode, .. } = timings;
        let guessed = (stats.drafted_tokens, stats.accepted_tokens);
        Generated { ids, finish, prompt, first_token, decode, guessed }
    });
    match (refused, outcome) {
        (Some(error), _) => Err(error),
        (None, Some(generated)) => Ok(generated),
        (None, None) => {
            let reason = "it has said why on stderr".to_owned();
            Err(Error::Panic { what: "the observer of a generation".into(), reason })
        }
    }
}
