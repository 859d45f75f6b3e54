//! `POST /v1/embeddings`: texts as vectors, the mean of the model's last normed hidden states, of length 1.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use boostr::backend::Backend;
use boostr::models::{PIECE, Run};
use boostr::ops;
use serde::Serialize;
use utoipa::ToSchema;

use super::alone::{Waiting, alone};
use super::completions::{AnyPrompt, Prompt, prompts};
use crate::app::{App, Loaded};
use crate::body::JsonBody;
use crate::error::{ApiError, Result};
use crate::options::unknown_model;

const MAX_INPUTS: usize = 256;
/// Tokens of all inputs together.
const MAX_TOKENS: usize = 1 << 17;

/// Texts whose vectors are wanted.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct EmbeddingFields {
    model: Option<String>,
    input: AnyPrompt,
    /// `float` or `base64`: little-endian f32
    encoding_format: Option<String>,
    /// The width that the model has; no other can be had
    dimensions: Option<usize>,
    user: Option<String>,
}

/// Vectors of texts.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Embeddings {
    /// `list`
    object: &'static str,
    model: String,
    data: Vec<Embedding>,
    usage: EmbeddingUsage,
}

/// The vector of a text.
#[expect(clippy::struct_field_names, reason = "the names are OpenAI's")]
#[derive(Debug, Serialize, ToSchema)]
struct Embedding {
    /// `embedding`
    object: &'static str,
    index: usize,
    embedding: Vector,
}

/// Numbers, or their bytes as base64.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum Vector {
    Float(Vec<f32>),
    Base64(String),
}

/// Counts of tokens.
#[derive(Debug, Serialize, ToSchema)]
struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

pub(crate) async fn embed<B: Backend>(
    State(app): State<Arc<App<B>>>,
    JsonBody(mut fields): JsonBody,
) -> Result<Json<Embeddings>> {
    let loaded = app.ready()?;
    let model = fields.text("model")?;
    let inputs = prompts(&mut fields, "input", MAX_INPUTS)?;
    let format = fields.word("encoding_format", &["float", "base64"])?;
    let width = loaded.lm.model.width();
    let dimensions = fields.count("dimensions", 1..=1 << 20)?;
    fields.take("user");
    fields.finish()?;
    if model.is_some_and(|model| model != app.config.model_name) {
        return Err(unknown_model(&app.config.model_name));
    }
    if dimensions.is_some_and(|dimensions| dimensions != width) {
        return Err(ApiError::field("dimensions", format!("expected {width}, the model's width")));
    }
    let (vectors, tokens) = {
        let model = loaded.clone();
        alone(&app, &loaded, move |waiting| vectors(&model, inputs, waiting)).await?
    };
    let data = vectors.into_iter().enumerate().map(|(index, vector)| {
        let embedding = match format {
            Some("base64") => Vector::Base64(base64(&vector)),
            _ => Vector::Float(vector),
        };
        Embedding { object: "embedding", index, embedding }
    });
    Ok(Json(Embeddings {
        object: "list",
        model: app.config.model_name.clone(),
        data: data.collect(),
        usage: EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens },
    }))
}

/// The mean of the hidden states of each input, scaled to length 1; and the number of tokens.
fn vectors<B: Backend>(
    loaded: &Loaded<B>,
    inputs: Vec<Prompt>,
    waiting: &Waiting,
) -> Result<(Vec<Vec<f32>>, usize)> {
    let model = &loaded.lm.model;
    let failed = |error| ApiError::of_input("input", &error);
    let (mut vectors, mut tokens) = (Vec::with_capacity(inputs.len()), 0);
    for input in inputs {
        let (ids, _) = input.encode(loaded, "input", MAX_TOKENS.saturating_sub(tokens), false)?;
        tokens += ids.len();
        let mut state = model.new_state().map_err(failed)?;
        let mut sum = vec![0.0_f64; model.width()];
        for piece in ids.chunks(PIECE) {
            if waiting.is_over() {
                return Err(ApiError::invalid("the client is gone"));
            }
            let run = Run { tokens: piece, state: &mut state };
            waiting.count_computed(piece.len());
            let hidden = model.hidden(&mut [run]).and_then(|rows| ops::to_vec(&rows));
            for row in hidden.map_err(failed)?.chunks(sum.len()) {
                sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
            }
        }
        let length = sum.iter().map(|x| x * x).sum::<f64>().sqrt().max(f64::MIN_POSITIVE);
        vectors.push(sum.iter().map(|x| (x / length) as f32).collect());
    }
    Ok((vectors, tokens))
}

/// The bytes of a vector in the letters of RFC 4648.
fn base64(vector: &[f32]) -> String {
    STANDARD.encode(vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_written_as_base64() {
        assert_eq!(base64(&[]), "");
        assert_eq!(base64(&[1.0]), "AACAPw==");
        assert_eq!(base64(&[1.0, -2.5]), "AACAPwAAIMA=");
        assert_eq!(base64(&[1.0, -2.5, 0.0]), "AACAPwAAIMAAAAAA");
    }
}
