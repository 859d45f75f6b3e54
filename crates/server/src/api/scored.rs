//! Prompts whose tokens are reported with what the model gives them.

use std::ops::ControlFlow;

use boostr::backend::Backend;
use boostr::evaluate::choices;
use boostr::models::State;
use boostr::sample::Choice;

use super::alone::Waiting;
use crate::app::Loaded;
use crate::error::{ApiError, Result};

/// What a model gives a prompt.
pub(crate) struct Scored<B: Backend> {
    /// The tokens from the second on.
    pub(crate) tokens: Vec<Choice>,
    /// A state that has seen all tokens but the last.
    pub(crate) state: State<B>,
}

/// Scores prompts, with `top` of the likeliest tokens beside each; beside the engine, as it has no place for this.
pub(crate) fn score<B: Backend>(
    loaded: &Loaded<B>,
    prompts: &[Vec<u32>],
    top: usize,
    waiting: &Waiting,
) -> Result<Vec<Scored<B>>> {
    let model = &loaded.lm.model;
    let failed = |error| ApiError::of_input("prompt", &error);
    let one = |ids: &Vec<u32>| {
        let mut state = model.new_state().map_err(failed)?;
        let go_on = |_, _| {
            if waiting.is_over() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let limit = loaded.lm.vocab_limit();
        let tokens = choices(model, ids, limit, top, &mut state, go_on).map_err(failed)?;
        if waiting.is_over() {
            waiting.count_computed(state.position());
            return Err(ApiError::invalid("the client is gone"));
        }
        Ok(Scored { tokens, state })
    };
    prompts.iter().map(one).collect()
}
