//! `boostr eval`: how well a model predicts a text, or continuations of contexts.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use boostr::Error;
use boostr::backend::Cpu;
use boostr::evaluate::score;
use boostr::files;
use boostr::load::LanguageModel;
use boostr::models::{Logits, Run};
use boostr::ops;
use boostr::tokenizer::MAX_TEXT;
use boostr::train::data::{DataFile, Encoder, Kind, read_pairs};
use clap::Args;
use serde_json::json;

use crate::commands::run::bad_logits;
use crate::exit::usage;
use crate::options::context;
use crate::options::model::ModelArgs;
use crate::term::{COUNT, Term};

const EXAMPLES: &str = "\
Examples:
  boostr eval runs/a --data valid.txt
  boostr eval runs/a --data lambada.jsonl --json";

/// How well a model predicts a text, or continuations
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct EvalArgs {
    /// Folder, weight file or GGUF file; the built-in model by default
    #[arg(value_name = "MODEL")]
    pub path: Option<PathBuf>,
    /// Text (.txt, .md), or .jsonl or .json with context and continuation
    #[arg(short, long, value_name = "FILE", required = true)]
    pub data: PathBuf,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

pub fn run(args: &EvalArgs, term: &Term) -> Result<()> {
    let named = args.path.as_deref().or(args.model.model.as_deref());
    let (source, options) = args.model.source(named)?;
    let lm: LanguageModel<Cpu> = source.open(&options, &term.cpu)?;
    term.warn_all(&lm.warnings);
    let kind = DataFile::new(&args.data).map_err(|error| usage(error.to_string()))?.kind;
    match kind {
        Kind::Text { .. } => text(args, &lm, &source.name(), term)?,
        Kind::Jsonl => pairs(args, &lm, &source.name(), term)?,
    }
    term.warn_all(&lm.notices());
    Ok(())
}

fn print(text: &str) -> Result<()> {
    Ok(io::stdout().lock().write_all(text.as_bytes())?)
}

fn text(args: &EvalArgs, lm: &LanguageModel<Cpu>, name: &str, term: &Term) -> Result<()> {
    let path = args.data.display();
    let text = files::read_text(&args.data, MAX_TEXT as u64)?;
    let ids = lm.encode(&text)?;
    if ids.len() < 2 {
        return Err(usage(format!("`{path}`: expected two tokens or more, found {}", ids.len())));
    }
    context::note(&lm.model, ids.len(), term);
    let bar = term.bar(COUNT).with_message("tokens");
    let score = score(&lm.model, &ids, text.len(), |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    let score = score.map_err(|error| bad_logits(lm, error))?;
    let nats = score.nats / score.tokens as f64;
    if args.json {
        return term.print_json(&json!({
            "model": name,
            "data": args.data.display().to_string(),
            "tokens": score.tokens,
            "bytes": score.bytes,
            "nats_per_token": nats,
            "bits_per_byte": score.bits_per_byte(),
            "perplexity": score.perplexity(),
        }));
    }
    print(&format!(
        "{name} on {path}: {} tokens, {} bytes\n  {nats:.4} nats per token\n  {:.4} bits per byte\n  \
         {:.2} perplexity\n",
        score.tokens,
        score.bytes,
        score.bits_per_byte(),
        score.perplexity()
    ))
}

/// What a model gives one continuation.
struct Given {
    nats: f64,
    /// Whether each of its tokens is the likeliest.
    is_greedy: bool,
}

fn pairs(args: &EvalArgs, lm: &LanguageModel<Cpu>, name: &str, term: &Term) -> Result<()> {
    let end = lm.eos.first().copied().unwrap_or(0);
    let encoder = Encoder::new(lm.tokenizer()?, end)?;
    let pairs = read_pairs(&args.data, &encoder)?;
    let path = args.data.display();
    if pairs.is_empty() {
        return Err(usage(format!("`{path}`: expected continuations, found none")));
    }
    let bar = term.bar(COUNT).with_message("contexts");
    bar.set_length(pairs.len() as u64);
    let (mut nats, mut greedy, mut tokens, mut bytes) = (0.0, 0usize, 0usize, 0usize);
    // Pairs of one context are choices, the first of which is the right one.
    let (mut choices, mut by_sum, mut by_byte) = (0usize, 0usize, 0usize);
    let mut rest = &pairs[..];
    while let Some(first) = rest.first() {
        let count = rest.iter().take_while(|pair| pair.context == first.context).count();
        let (group, after) = rest.split_at(count);
        rest = after;
        let mut given = Vec::with_capacity(count);
        for pair in group {
            given.push(continuation(lm, &pair.context, &pair.continuation)?);
            bar.inc(1);
        }
        nats += given[0].nats;
        greedy += usize::from(given[0].is_greedy);
        tokens += first.continuation.len();
        bytes += first.bytes;
        if count > 1 {
            choices += 1;
            let best = |of: &dyn Fn(usize) -> f64| (1..count).all(|i| of(0) <= of(i));
            by_sum += usize::from(best(&|i| given[i].nats));
            by_byte += usize::from(best(&|i| given[i].nats / group[i].bytes.max(1) as f64));
        }
    }
    bar.finish_and_clear();
    let contexts = pairs.chunk_by(|a, b| a.context == b.context).count();
    let share = |count: usize, of: usize| count as f64 / of.max(1) as f64;
    let of_choices = (choices > 0).then(|| (share(by_sum, choices), share(by_byte, choices)));
    if args.json {
        return term.print_json(&json!({
            "model": name,
            "data": path.to_string(),
            "contexts": contexts,
            "accuracy": share(greedy, contexts),
            "nats_per_token": nats / tokens as f64,
            "perplexity": (nats / tokens as f64).exp(),
            "nats_per_byte": nats / bytes.max(1) as f64,
            "choice_accuracy": of_choices.map(|(sum, _)| sum),
            "choice_accuracy_per_byte": of_choices.map(|(_, byte)| byte),
        }));
    }
    let mut text = format!(
        "{name} on {path}: {contexts} contexts\n  {:.2} % of continuations are what greedy decoding gives\n  \
         {:.4} nats per token, perplexity {:.2}\n",
        100.0 * share(greedy, contexts),
        nats / tokens as f64,
        (nats / tokens as f64).exp()
    );
    if let Some((sum, byte)) = of_choices {
        text.push_str(&format!(
            "  {:.2} % of {choices} choices right, {:.2} % by nats per byte\n",
            100.0 * sum,
            100.0 * byte
        ));
    }
    print(&text)
}

fn continuation(lm: &LanguageModel<Cpu>, context: &[u32], next: &[u32]) -> Result<Given> {
    let mut state = lm.model.new_state()?;
    if context.len() > 1 {
        let tokens = &context[..context.len() - 1];
        lm.model.forward(&mut [Run { tokens, state: &mut state }], Logits::None)?;
    }
    let mut tokens = context[context.len() - 1..].to_vec();
    tokens.extend_from_slice(&next[..next.len() - 1]);
    let logits =
        lm.model.forward(&mut [Run { tokens: &tokens, state: &mut state }], Logits::All)?;
    let logits = ops::to_vec(&logits)?;
    let mut given = Given { nats: 0.0, is_greedy: true };
    for (row, &id) in logits.chunks_exact(lm.model.vocab_rows()).zip(next) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
        let Some(&logit) = row.get(id as usize) else {
            return Err(usage(format!("token {id} is none of the model's")));
        };
        given.nats += sum.ln() - f64::from(logit - max);
        given.is_greedy &= logit >= max;
        if !given.nats.is_finite() {
            let reason = format!("they give token {id} no probability that is a number");
            return Err(bad_logits(lm, Error::Argument { name: "logits", reason }));
        }
    }
    Ok(given)
}
