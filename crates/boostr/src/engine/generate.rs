//! One request on the caller's thread, with a state that the caller lends.

use std::ops::ControlFlow;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::models::{Model, State};
use crate::sample::Sampler;

use super::{EngineConfig, Event, Listener, Outcome, Request, Scheduler};

/// Continues the prompt of `request` from `state`, which has seen its beginning ([`Request::seen`]). Afterwards the state
/// has seen all tokens but the last one, or with a draft but the last few.
///
/// The listener is told of the prompt, the tokens and the end, and is always taken for ready. The outcome is returned,
/// with its state in `state`.
///
/// # Errors
///
/// [`Error::Argument`] for an empty prompt, an unknown id or more than one continuation, [`Error::Context`] for a sequence
/// that is too long, and whatever the sampler, the
/// constraint or the model refuse. The state is then where it was when that happened, which its
/// [`position`](State::position) says. Only a forward that fails midway leaves none: every later use of `state` is refused.
///
/// ```
/// use std::ops::ControlFlow;
/// use boostr::engine::{Event, Request, generate};
/// use boostr::models::{Config, Model};
/// use boostr::{backend, checkpoint::{ConfigFile, Dtype}};
///
/// let config = Config::read(&ConfigFile::parse("config.json", r#"{
///     "model_type": "mamba2", "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4,
///     "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 32
/// }"#)?)?;
/// let model = Model::<backend::Cpu>::synthetic(config, Dtype::F32, backend::cpu())?;
/// let mut state = model.new_state()?;
/// let request = Request { max_tokens: 5, ..Request::new(vec![1, 2, 3], 32) };
/// let outcome = generate(&model, &mut state, request, &mut |event| {
///     if let Event::Token { id, .. } = event {
///         println!("{id}");
///     }
///     ControlFlow::Continue(())
/// })?;
/// assert_eq!((outcome.ids.len(), state.position()), (5, 3 + 4));
/// # Ok::<(), boostr::Error>(())
/// ```
pub fn generate<B: Backend>(
    model: &Model<B>,
    state: &mut State<B>,
    mut request: Request<B>,
    listener: &mut impl Listener<B>,
) -> Result<Outcome<B>> {
    Sampler::new(request.sampler.clone(), request.vocab_limit)?;
    request.max_tokens = request.check(model, Some(state))?;
    if request.count != 1 {
        let reason = format!("expected 1, found {}", request.count);
        return Err(Error::Argument { name: "count", reason });
    }
    request.state = Some(std::mem::replace(state, State::nothing()));
    let mut result = None;
    let config = EngineConfig { snapshot_bytes: 0, snapshot_every: 0, ..EngineConfig::default() };
    let mut scheduler = Scheduler::new(model, config);
    scheduler.submit_alone(request, Box::new(Lender { listener, state, result: &mut result }));
    while scheduler.step() {}
    let remains = scheduler.remains();
    drop(scheduler);
    if let Some(remains) = remains {
        *state = remains;
    }
    result.unwrap_or_else(|| {
        let reason = "it has said why on stderr".to_owned();
        Err(Error::Panic { what: "the listener of a generation".into(), reason })
    })
}

/// Takes the state and the outcome of the request that `listener` is told of.
struct Lender<'a, B: Backend, L> {
    listener: &'a mut L,
    state: &'a mut State<B>,
    result: &'a mut Option<Result<Outcome<B>>>,
}

impl<B: Backend, L: Listener<B>> Listener<B> for Lender<'_, B, L> {
    fn event(&mut self, event: Event<B>) -> ControlFlow<()> {
        let event = match event {
            Event::Finished { index, mut outcome } => {
                *self.state = outcome.state.take().unwrap_or_else(State::nothing);
                let told = Outcome { ids: outcome.ids.clone(), state: None, ..outcome };
                *self.result = Some(Ok(outcome));
                Event::Finished { index, outcome: told }
            }
            Event::Failed { error } => {
                *self.result = Some(Err(error));
                return ControlFlow::Break(());
            }
            event => event,
        };
        self.listener.event(event)
    }
}
