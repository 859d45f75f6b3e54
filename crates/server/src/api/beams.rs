//! Beam search for `POST /v1/completions`: the likeliest of `best_of` beams, in place of sampling.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::response::{IntoResponse, Response};
use boostr::backend::Backend;
use boostr::engine::Finish;

use super::alone::alone;
use super::answer::{TextChoice, TextCompletion, Usage};
use crate::app::{App, Loaded};
use crate::error::{ApiError, Result};
use crate::job::FinishReason;

/// What to look for.
pub(crate) struct Beams {
    /// Beams of each prompt, and those of them that are given.
    pub(crate) width: usize,
    pub(crate) n: usize,
    pub(crate) max_tokens: usize,
    pub(crate) stops: Vec<String>,
    /// Whether the answer begins with the prompt.
    pub(crate) echo: bool,
}

/// Answers prompts of ids and text, the likeliest beams first.
pub(crate) async fn complete<B: Backend>(
    app: &App<B>,
    loaded: &Arc<Loaded<B>>,
    prompts: Vec<(Vec<u32>, String)>,
    ask: Beams,
    head: TextCompletion,
) -> Result<Response> {
    let (model, most) = (loaded.clone(), app.config.limits.request_time);
    let (choices, usage) = alone(app, loaded, move |waiting| {
        let start = Instant::now();
        let (mut choices, mut usage) = (Vec::new(), Usage::default());
        for (ids, text) in prompts {
            let prompt_tokens = ids.len();
            waiting.count_computed(prompt_tokens);
            let completion =
                model.lm.complete_ids(ids).max_tokens(ask.max_tokens).stops(&ask.stops);
            let is_over = || waiting.is_over() || start.elapsed() > most;
            let beams = completion.beams(ask.width, |_| {
                if is_over() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            let beams = beams.map_err(|error| ApiError::of_input("prompt", &error))?;
            if beams.is_empty() && is_over() {
                break;
            }
            let generated = beams.iter().map(|beam| beam.ids.len()).sum();
            waiting.count_generated(generated);
            usage.count(prompt_tokens, generated);
            let given = beams.into_iter().take(ask.n).map(|beam| {
                let reason = match beam.finish {
                    Finish::Eos | Finish::StopString => FinishReason::Stop,
                    _ => FinishReason::Length,
                };
                let text = if ask.echo { text.clone() + &beam.text } else { beam.text };
                (text, Some(reason.name()))
            });
            choices.extend(given);
        }
        Ok((choices, usage))
    })
    .await?;
    let choices = choices.into_iter().enumerate().map(|(index, (text, finish_reason))| {
        TextChoice { index, text, logprobs: None, finish_reason }
    });
    let choices = choices.collect();
    Ok(Json(TextCompletion { choices, usage: Some(usage), ..head }).into_response())
}
