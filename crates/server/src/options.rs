//! What requests for text have in common: how long an answer may be and how its tokens are chosen.

use boostr::backend::Backend;
use boostr::engine::Request;
use boostr::generation_config::GenerationDefaults;
use boostr::sample::{self, OptionRange, SamplerConfig};
use boostr::text::Sampling;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::app::Loaded;
use crate::auth::Scope;
use crate::config::Limits;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, token, wrong};

/// Most continuations of one request.
pub(crate) const MAX_N: usize = 8;
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
const MAX_BIASES: usize = 1024;
/// Most likely tokens that are reported with each.
pub(crate) const MAX_TOP: usize = 20;

/// How to generate. What is left out is the model author's choice, else as said here.
#[derive(Debug, Default, ToSchema)]
pub(crate) struct GenerationOptions {
    /// The model's name; it may be left out, as there is one
    model: Option<String>,
    /// Send the answer piece by piece, as server-sent events
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<StreamOptions>,
    /// Most tokens of the answer; 512 unless the model says, at most 8192; -1 for no other limit
    #[schema(minimum = -1)]
    pub(crate) max_tokens: Option<usize>,
    /// The same; wins over `max_tokens`
    #[schema(minimum = -1)]
    max_completion_tokens: Option<usize>,
    /// 0 takes the likeliest token
    #[schema(minimum = 0, maximum = 2)]
    pub(crate) temperature: Option<f32>,
    /// Keep the likeliest tokens that together have this probability; 0 keeps the likeliest alone
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) top_p: Option<f32>,
    /// Keep this many of the likeliest tokens; 0 and -1 keep all
    #[schema(minimum = -1, maximum = 16_777_216)]
    top_k: Option<usize>,
    /// Keep tokens at least this likely relative to the likeliest
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f32>,
    /// Above 1: tokens of the last 64 become less likely
    #[schema(minimum = 0.01, maximum = 100)]
    repetition_penalty: Option<f32>,
    /// The name of the same in llama.cpp
    #[schema(minimum = 0.01, maximum = 100)]
    repeat_penalty: Option<f32>,
    /// Taken off the logit of a token that was generated
    #[schema(minimum = -2, maximum = 2)]
    presence_penalty: Option<f32>,
    /// Taken off the logit of a token for each time that it was generated
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f32>,
    /// Token ids, as strings, each with what is added to its logit, from -100 to 100
    #[schema(value_type = Option<std::collections::BTreeMap<String, f32>>)]
    logit_bias: Option<Vec<(u32, f32)>>,
    /// The answer ends before any of these
    #[schema(value_type = Option<StringOrList>)]
    pub(crate) stop: Option<Vec<String>>,
    /// Go on from snapshots of earlier requests, by default; the answer is the same without
    cache_prompt: Option<bool>,
    /// The same seed gives the same answer
    seed: Option<i64>,
    /// Number of answers; the i-th has the seed plus i
    #[schema(minimum = 1, maximum = 8)]
    n: Option<usize>,
    /// Taken and not used
    #[expect(dead_code, reason = "describes a field that is taken")]
    user: Option<String>,
}

/// What is sent besides the answer.
#[derive(Debug, Default, ToSchema)]
pub(crate) struct StreamOptions {
    /// A last event with the counts of tokens
    pub(crate) include_usage: Option<bool>,
}

/// A text, or several.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes what `stop` takes")]
enum StringOrList {
    Text(String),
    Texts(Vec<String>),
}

impl GenerationOptions {
    /// Takes the fields of a request; those that are left are its own.
    pub(crate) fn read(fields: &mut Fields) -> Result<Self> {
        let stream_options = match fields.fields("stream_options")? {
            Some(mut inner) => {
                Some(StreamOptions { include_usage: inner.boolean("include_usage")? })
            }
            None => None,
        };
        Ok(Self {
            model: fields.text("model")?,
            stream: fields.boolean("stream")?,
            stream_options,
            max_tokens: or_all(fields, "max_tokens", i32::MAX as usize, usize::MAX)?,
            max_completion_tokens: or_all(
                fields,
                "max_completion_tokens",
                i32::MAX as usize,
                usize::MAX,
            )?,
            temperature: number(fields, &sample::TEMPERATURE)?,
            top_p: number(fields, &sample::TOP_P)?,
            top_k: or_all(fields, "top_k", sample::MAX_TOP_K, 0)?,
            min_p: number(fields, &sample::MIN_P)?,
            repetition_penalty: number(fields, &sample::REPETITION_PENALTY)?,
            repeat_penalty: fields.number("repeat_penalty", sample::REPETITION_PENALTY.served)?,
            presence_penalty: number(fields, &sample::PRESENCE_PENALTY)?,
            frequency_penalty: number(fields, &sample::FREQUENCY_PENALTY)?,
            logit_bias: logit_bias(fields)?,
            stop: stops(fields)?,
            cache_prompt: fields.boolean("cache_prompt")?,
            seed: fields.integer("seed", i64::MIN..=i64::MAX)?,
            n: fields.count("n", 1..=MAX_N)?,
            user: fields.text("user")?,
        })
    }

    /// Checks that the model is the one that is there.
    pub(crate) fn check_model(&self, name: &str) -> Result<()> {
        match &self.model {
            Some(asked) if asked != name => Err(unknown_model(name)),
            _ => Ok(()),
        }
    }

    pub(crate) fn is_stream(&self) -> bool {
        self.stream == Some(true)
    }

    /// Whether a stream ends with the counts of tokens.
    pub(crate) fn includes_usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|options| options.include_usage == Some(true))
    }

    /// The first option that only matters to sampling.
    pub(crate) fn of_sampling(&self) -> Option<&'static str> {
        let options = [
            ("temperature", self.temperature.is_some_and(|temperature| temperature > 0.0)),
            ("top_p", self.top_p.is_some()),
            ("top_k", self.top_k.is_some()),
            ("min_p", self.min_p.is_some()),
            ("repetition_penalty", self.repetition_penalty.is_some()),
            ("repeat_penalty", self.repeat_penalty.is_some()),
            ("presence_penalty", self.presence_penalty.is_some()),
            ("frequency_penalty", self.frequency_penalty.is_some()),
            ("logit_bias", self.logit_bias.is_some()),
        ];
        options.into_iter().find(|(_, is_given)| *is_given).map(|(name, _)| name)
    }

    /// Number of continuations.
    pub(crate) fn count(&self) -> usize {
        self.n.unwrap_or(1)
    }

    /// Most tokens of each.
    pub(crate) fn tokens(&self, defaults: &GenerationDefaults, limits: &Limits) -> usize {
        let asked = self.max_completion_tokens.or(self.max_tokens);
        let tokens = asked.or(defaults.max_new_tokens).unwrap_or(limits.default_tokens);
        tokens.min(limits.max_tokens)
    }

    /// What the engine is asked for a prompt.
    pub(crate) fn request<B: Backend>(
        &self,
        loaded: &Loaded<B>,
        limits: &Limits,
        scope: Scope,
        sampler: SamplerConfig,
        ids: Vec<u32>,
    ) -> Request<B> {
        Request {
            scope: (self.cache_prompt != Some(false)).then_some(scope.0),
            count: self.count(),
            max_tokens: self.tokens(&loaded.lm.defaults, limits),
            eos: loaded.lm.eos.clone(),
            sampler,
            draft: loaded.draft.clone(),
            ..Request::new(ids, loaded.lm.vocab_limit())
        }
    }

    /// How tokens are chosen; `seed` serves where none was asked for.
    pub(crate) fn sampler(
        &self,
        defaults: &GenerationDefaults,
        vocabulary: usize,
        seed: u64,
    ) -> Result<SamplerConfig> {
        let logit_bias = self.logit_bias.clone().unwrap_or_default();
        if let Some((id, _)) = logit_bias.iter().find(|&&(id, _)| id as usize >= vocabulary) {
            let reason = format!("token id {id} is not below the vocabulary's {vocabulary}");
            return Err(ApiError::field("logit_bias", reason));
        }
        let sampling = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty.or(self.repeat_penalty),
            repetition_window: None,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias,
            seed: self.seed.map(|seed| seed as u64),
        };
        sampling.config(defaults, seed).map_err(|error| ApiError::of_input("sampling", &error))
    }
}

/// A number up to `most`, or -1, by which many servers mean no limit: that is `all` here.
pub(crate) fn or_all(
    fields: &mut Fields,
    field: &str,
    most: usize,
    all: usize,
) -> Result<Option<usize>> {
    let number = fields.integer(field, -1..=most as i64)?;
    Ok(number.map(|number| usize::try_from(number).unwrap_or(all)))
}

/// The error of a model that is not there.
pub(crate) fn unknown_model(known: &str) -> ApiError {
    let error =
        ApiError::not_found(format!("`model`: there is no such model here; there is `{known}`"));
    ApiError { param: Some("model".into()), ..error.with_code("model_not_found") }
}

/// An option of sampling that is one number.
fn number(fields: &mut Fields, range: &OptionRange) -> Result<Option<f32>> {
    let (name, served) = (range.name, range.served.clone());
    if served.contains(&range.min) && range.excludes_min {
        let expected = format!("a number above {} and up to {}", range.min, served.end());
        return fields.get(name, &expected, |value| {
            value.as_f64().map(|x| x as f32).filter(|&x| x > range.min && served.contains(&x))
        });
    }
    fields.number(name, served)
}

fn logit_bias(fields: &mut Fields) -> Result<Option<Vec<(u32, f32)>>> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(None) };
    if map.len() > MAX_BIASES {
        let reason = format!("expected at most {MAX_BIASES} tokens, found {}", map.len());
        return Err(ApiError::field("logit_bias", reason));
    }
    let mut biases = Vec::with_capacity(map.len());
    for (id, bias) in &map {
        let Ok(id) = id.parse() else {
            return Err(ApiError::field("logit_bias", "expected token ids as keys"));
        };
        let served = sample::LOGIT_BIAS.served;
        let is_in =
            |bias: &f64| (f64::from(*served.start())..=f64::from(*served.end())).contains(bias);
        let Some(bias) = bias.as_f64().filter(is_in) else {
            return Err(wrong(&format!("logit_bias.{id}"), "a number from -100 to 100", bias));
        };
        biases.push((id, bias as f32));
    }
    Ok(Some(biases))
}

fn stops(fields: &mut Fields) -> Result<Option<Vec<String>>> {
    let Some(value) = fields.take("stop") else { return Ok(None) };
    let Some(stops) = texts(&value) else {
        return Err(wrong(&fields.name("stop"), "a string or an array of strings", &value));
    };
    if stops.len() > MAX_STOPS {
        let reason = format!("expected at most {MAX_STOPS} strings, found {}", stops.len());
        return Err(ApiError::field(fields.name("stop"), reason));
    }
    if stops.iter().any(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
        let reason = format!("expected strings of 1 to {MAX_STOP_BYTES} bytes");
        return Err(ApiError::field(fields.name("stop"), reason));
    }
    Ok(Some(stops))
}

/// A string, or an array of them.
pub(crate) fn texts(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Array(all) => all.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
        _ => None,
    }
}

/// An array of token ids.
pub(crate) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use utoipa::PartialSchema;

    fn read(body: Value) -> Result<GenerationOptions> {
        GenerationOptions::read(&mut Fields::of(body)?)
    }

    #[test]
    fn what_is_out_of_range_is_named() {
        for (body, field) in [
            (json!({"temperature": -1}), "temperature"),
            (json!({"temperature": 2.5}), "temperature"),
            (json!({"top_p": -0.1}), "top_p"),
            (json!({"top_k": -2}), "top_k"),
            (json!({"min_p": 1.5}), "min_p"),
            (json!({"max_tokens": -2}), "max_tokens"),
            (json!({"n": 9}), "n"),
            (json!({"stop": [1]}), "stop"),
            (json!({"stop": ""}), "stop"),
            (json!({"stop": vec!["a"; 17]}), "stop"),
            (json!({"logit_bias": {"x": 1}}), "logit_bias"),
            (json!({"logit_bias": {"5": 101}}), "logit_bias.5"),
            (json!({"stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
        ] {
            let error = read(body.clone()).err().unwrap_or_else(|| panic!("{body} was taken"));
            assert_eq!(error.param.as_deref(), Some(field), "{body}");
        }
    }

    #[test]
    fn the_schema_has_the_ranges_that_are_checked() {
        let schema = serde_json::to_value(GenerationOptions::schema()).unwrap();
        let property = |name: &str| schema["properties"][name].clone();
        let as_number = |value: &Value| value.as_f64().map(|x| x as f32);
        for range in &sample::OPTION_RANGES {
            let property = property(range.name);
            let (low, high) = (range.served.start(), range.served.end());
            let is_open = range.excludes_min && *low == range.min;
            let key = if is_open { "exclusiveMinimum" } else { "minimum" };
            assert_eq!(as_number(&property[key]), Some(*low), "{}", range.name);
            assert_eq!(as_number(&property["maximum"]), Some(*high), "{}", range.name);
        }
        assert_eq!(property("top_k")["maximum"], sample::MAX_TOP_K);
        assert_eq!(
            property("repeat_penalty")["maximum"],
            property("repetition_penalty")["maximum"]
        );
    }

    #[test]
    fn the_answer_has_a_hard_limit() {
        let (defaults, limits) = (GenerationDefaults::default(), Limits::default());
        let tokens = |body| read(body).unwrap().tokens(&defaults, &limits);
        assert_eq!(tokens(json!({})), 512);
        assert_eq!(tokens(json!({"max_tokens": 1 << 20})), 8192);
        assert_eq!(tokens(json!({"max_tokens": 7, "max_completion_tokens": 3})), 3);
    }

    #[test]
    fn p_max_tokens_minus_1_conventional_values_mean_no_limit() {
        let (defaults, limits) = (GenerationDefaults::default(), Limits::default());
        for field in ["max_tokens", "max_completion_tokens"] {
            assert_eq!(read(json!({field: -1})).unwrap().tokens(&defaults, &limits), 8192);
        }
        let sampler = |body| read(body).unwrap().sampler(&defaults, 10, 0).unwrap();
        assert_eq!(sampler(json!({"top_k": -1, "temperature": 1})).top_k, 0);
        assert_eq!(sampler(json!({"top_p": 0, "temperature": 1})).top_p, 0.0);
    }

    #[test]
    fn a_bias_of_no_token_is_refused() {
        let options = read(json!({"logit_bias": {"10": 1}})).unwrap();
        assert!(options.sampler(&GenerationDefaults::default(), 10, 0).is_err());
    }
}
