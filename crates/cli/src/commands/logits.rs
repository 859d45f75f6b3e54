//! `boostr logits`: what the model computes for given tokens, to compare with other runtimes.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::Result;
use boostr::backend::Cpu;
use boostr::checkpoint::{Dtype, safetensors};
use boostr::models::{Logits, Run, State};
use boostr::ops;
use clap::Args;

use super::run::bad_logits;
use crate::exit::usage;
use crate::model::Source;
use crate::options::context;
use crate::options::model::ModelArgs;
use crate::prompt::{self, Prompt};
use crate::term::Term;

const EXAMPLES: &str = "\
Examples:
  boostr logits -m ./mamba2-370m --tokens 5,17,3 --out logits.safetensors
  boostr logits -m ./mamba2-370m --tokens 5,17,3 --split 2,1 --states --out F.safetensors";

/// Logits, and states, of given tokens, to a safetensors file
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct LogitsArgs {
    /// The model; the built-in one by default
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub path: Option<PathBuf>,
    /// Token ids, like 5,17,3; - reads them from stdin
    #[arg(long, value_name = "IDS")]
    pub tokens: String,
    /// The safetensors file to write: `logits` [T, V] in f32
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// Also write `conv_state.i` [1, conv_dim, d_conv - 1] and `ssm_state.i` [1, H, P, N]
    #[arg(long)]
    pub states: bool,
    /// Feed the tokens in pieces of these lengths, like 20,17
    #[arg(long, value_name = "LENGTHS", value_delimiter = ',')]
    pub split: Vec<usize>,
    #[command(flatten)]
    pub model: ModelArgs,
}

pub fn run(args: &LogitsArgs, term: &Term) -> Result<()> {
    let (source, options) =
        args.model.source(args.path.as_deref().or(args.model.model.as_deref()))?;
    let tokens = prompt::parse_ids(&args.tokens)?;
    let pieces = pieces(&args.split, tokens.len())?;

    check_out(args, &source)?;
    let lm = source.open(&options, &term.cpu)?;
    let tokens = Prompt::Ids(tokens).ids(&lm, false)?;
    context::note(&lm.model, tokens.len(), term);
    let vocab = lm.model.vocab_rows();
    let mut state = lm.model.new_state()?;
    let mut logits: Vec<u8> = Vec::with_capacity(4 * vocab * tokens.len());
    let mut rest = tokens.as_slice();
    for len in pieces {
        let (tokens, after) = rest.split_at(len.min(rest.len()));
        rest = after;
        let rows = lm.model.forward(&mut [Run { tokens, state: &mut state }], Logits::All)?;
        let rows = ops::to_vec(&rows)?;
        if let Some(i) = rows.iter().position(|x| !x.is_finite()) {
            let at = logits.len() / 4 + i;
            let (position, token, found) = (at / vocab, at % vocab, rows[i]);
            let reason =
                format!("position {position}, token {token}: expected a number, found {found}");
            return Err(bad_logits(&lm, boostr::Error::Argument { name: "logits", reason }));
        }
        logits.extend(le_bytes(&rows));
    }

    let mut written = Written::default();
    written.add("logits", vec![tokens.len(), vocab], logits);
    if args.states {
        written.add_states(&state)?;
    }
    written.save(args, &source)?;
    if term.chatty() {
        let states = if args.states {
            format!(", states of {} layers", state.n_layer())
        } else {
            String::new()
        };
        let shape = format!("[{}, {vocab}]", tokens.len());
        term.say(format_args!("{}: logits {shape}{states}", args.out.display()));
    }
    Ok(())
}

/// Files of a model folder beside its weights.
const MODEL_FILES: [&str; 7] = [
    "config.json",
    "params.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "pytorch_model.bin",
];

/// Refuses to write over a file of the model, by whatever name it is called.
fn check_out(args: &LogitsArgs, source: &Source) -> Result<()> {
    let (Ok(out), Some(folder)) = (fs::canonicalize(&args.out), source.folder()) else {
        return Ok(());
    };
    let checkpoint = source.checkpoint(args.model.allow_pickle)?;
    let weights = checkpoint.iter().map(|(_, entry)| entry.file.to_path_buf());
    let mut files = weights.chain(MODEL_FILES.iter().map(|name| folder.join(name)));
    if let Some(file) = files.find(|file| fs::canonicalize(file).is_ok_and(|file| file == out)) {
        let reason = format!("--out is `{}`, a file of the model: name another", file.display());
        return Err(usage(reason));
    }
    Ok(())
}

/// Lengths of the pieces, which are all of the `total` tokens.
fn pieces(split: &[usize], total: usize) -> Result<Vec<usize>> {
    if split.is_empty() {
        return Ok(vec![total]);
    }
    let sum = split.iter().fold(0_usize, |sum, &len| sum.saturating_add(len));
    if sum != total {
        let reason = format!("--split is {sum} tokens in all, --tokens has {total}");
        return Err(usage(reason));
    }
    Ok(split.to_vec())
}

fn le_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Tensors for the file: name, shape, bytes.
#[derive(Default)]
struct Written(Vec<(String, Vec<usize>, Vec<u8>)>);

impl Written {
    fn add(&mut self, name: impl Into<String>, shape: Vec<usize>, bytes: Vec<u8>) {
        self.0.push((name.into(), shape, bytes));
    }

    /// States as transformers lays them out, for a batch of one.
    fn add_states(&mut self, state: &State<Cpu>) -> Result<()> {
        for layer in 0..state.n_layer() {
            if let Some(conv) = state.conv(layer) {
                let values = ops::to_vec(conv)?; // [d_conv - 1, conv_dim]
                let &[rows, channels] = conv.shape() else { continue };
                let mut columns = Vec::with_capacity(values.len());
                for channel in 0..channels {
                    columns.extend(values.iter().skip(channel).step_by(channels));
                }
                let shape = vec![1, channels, rows];
                self.add(format!("conv_state.{layer}"), shape, le_bytes(&columns));
            }
            if let Some(ssm) = state.ssm(layer) {
                let shape = [&[1], ssm.shape()].concat(); // [1, H, P, N]
                self.add(format!("ssm_state.{layer}"), shape, le_bytes(&ops::to_vec(ssm)?));
            }
            if let Some(cache) = state.kv(layer) {
                let sizes = cache.sizes();
                for (name, rows, width) in [
                    ("k_cache", cache.keys()?, sizes.d_key),
                    ("v_cache", cache.values()?, sizes.d_value),
                ] {
                    // [L, Hk, D] to [1, Hk, L, D]
                    let (len, heads) = (cache.len(), sizes.nheads);
                    let row = |i: usize| (i % len) * heads + i / len;
                    let by_head: Vec<f32> = (0..heads * len)
                        .flat_map(|i| &rows[row(i) * width..(row(i) + 1) * width])
                        .copied()
                        .collect();
                    let shape = vec![1, heads, len, width];
                    self.add(format!("{name}.{layer}"), shape, le_bytes(&by_head));
                }
            }
        }
        Ok(())
    }

    fn save(&self, args: &LogitsArgs, source: &Source) -> Result<()> {
        let tensors: Vec<(&str, Dtype, &[usize], &[u8])> = self
            .0
            .iter()
            .map(|(name, shape, bytes)| {
                (name.as_str(), Dtype::F32, shape.as_slice(), bytes.as_slice())
            })
            .collect();
        let metadata = BTreeMap::from([
            ("format".to_owned(), "pt".to_owned()),
            ("model".to_owned(), source.name()),
            ("made_with".to_owned(), format!("boostr {}", env!("CARGO_PKG_VERSION"))),
        ]);
        Ok(safetensors::write(&args.out, &tensors, &metadata)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_must_be_all_of_the_tokens() {
        assert_eq!(pieces(&[], 3).unwrap(), [3]);
        assert_eq!(pieces(&[1, 2], 3).unwrap(), [1, 2]);
        let error = pieces(&[1, 1], 3).unwrap_err().to_string();
        assert_eq!(error, "--split is 2 tokens in all, --tokens has 3");
        assert!(pieces(&[usize::MAX, 4], 3).is_err());
    }
}
