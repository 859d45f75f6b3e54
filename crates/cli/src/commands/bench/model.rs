//! `boostr bench [MODEL]`: prompts beside matrix products, decoding beside reading memory.

use std::io::Write;
use std::sync::Arc;

use anyhow::{Context, Result};
use boostr::backend::{Cpu, CpuClient};
use boostr::checkpoint::{ConfigFile, Dtype};
use boostr::convert::Types;
use boostr::models::{Config, Logits, Model, Run};
use serde::Serialize;
use serde_json::json;

use super::machine::{Description, Machine, time};
use super::{BenchArgs, Geometry, median, ratio, together};
use crate::exit::usage;
use crate::model::Source;
use crate::system::peak_memory;

#[derive(Debug, Serialize)]
struct Report {
    machine: Description,
    model: String,
    parameters: usize,
    non_embedding_parameters: usize,
    weight_bytes: usize,
    state_bytes: usize,
    prompt: Vec<PromptRow>,
    decode: Vec<DecodeRow>,
    together: Vec<together::Row>,
    peak_memory_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct PromptRow {
    tokens: usize,
    threads: usize,
    tokens_per_second: f64,
    /// Counting two operations for each non-embedding parameter and token.
    gflops: f64,
    gemm_gflops: f64,
    ratio_to_gemm: f64,
    /// What this many threads gain over the first count, as a share of what register loops gain.
    share_of_thread_gain: f64,
}

#[derive(Debug, Serialize)]
struct DecodeRow {
    tokens: usize,
    threads: usize,
    tokens_per_second: f64,
    /// Counting the weights once and the state twice for each token.
    gigabytes_per_second: f64,
    read_gigabytes_per_second: f64,
    ratio_to_read: f64,
    share_of_thread_gain: f64,
}

/// Tokens that are decoded between two measurements of memory.
const DECODE_STEP: usize = 8;

pub(super) fn run(args: &BenchArgs, pools: &[rayon::ThreadPool], cpu: &CpuClient) -> Result<()> {
    let (name, model) = open(args, cpu)?;
    let counts: Vec<usize> = pools.iter().map(rayon::ThreadPool::current_num_threads).collect();
    let mut machine = Machine::new(cpu.level());

    let (parameters, non_embedding) = model.parameters();

    let mut prompt_rows = Vec::new();
    for &len in &args.prompt {
        let len = len as usize;
        let tokens: Vec<u32> = ids(len, model.vocab_limit());
        let mut series = Series::new(pools.len());
        for repetition in 0..=args.repeat {
            for (i, pool) in pools.iter().enumerate() {
                let (f, g, s) = pool.install(|| -> Result<_> {
                    let (f, g) = (machine.multiply_adds(), machine.gemm());
                    let mut state = model.new_state()?;
                    let mut run = [Run { tokens: &tokens, state: &mut state }];
                    let mut result = Ok(());
                    let s = time(|| result = model.forward(&mut run, Logits::Last).map(|_| ()));
                    result?;
                    Ok((f, f64::midpoint(g, machine.gemm()), s))
                })?;
                if repetition > 0 {
                    series.push(i, len as f64 / s, g, f);
                }
            }
        }
        let operations = 2.0 * non_embedding as f64;
        for (i, &threads) in counts.iter().enumerate() {
            let flops: Vec<f64> = series.ours[i].iter().map(|rate| rate * operations).collect();
            prompt_rows.push(PromptRow {
                tokens: len,
                threads,
                tokens_per_second: median(&series.ours[i]),
                gflops: median(&flops) / 1e9,
                gemm_gflops: median(&series.limit[i]) / 1e9,
                ratio_to_gemm: ratio(&flops, &series.limit[i]),
                share_of_thread_gain: series.share_of_gain(i),
            });
        }
    }

    // Before the buffer that memory is measured with.
    let peak_memory_bytes = peak_memory();
    if args.generate > 0 {
        machine.allocate_memory();
    }
    let bytes = (model.weight_bytes() + 2 * model.new_state()?.size_in_bytes()) as f64;
    let mut decode_rows = Vec::new();
    if args.generate > 0 {
        let mut series = Series::new(pools.len());
        let mut state = model.new_state()?;
        let steps = args.generate.div_ceil(DECODE_STEP);
        let tokens = ids(DECODE_STEP, model.vocab_limit());
        for repetition in 0..=steps {
            for (i, pool) in pools.iter().enumerate() {
                let (f, g, s) = pool.install(|| -> Result<_> {
                    let (f, g) = (machine.multiply_adds(), machine.read());
                    let mut result = Ok(());
                    let s = time(|| {
                        for token in &tokens {
                            let tokens = std::slice::from_ref(token);
                            let mut run = [Run { tokens, state: &mut state }];
                            if let Err(e) = model.forward(&mut run, Logits::Last) {
                                result = Err(e);
                            }
                        }
                    });
                    result?;
                    Ok((f, f64::midpoint(g, machine.read()), s))
                })?;
                if repetition > 0 {
                    series.push(i, DECODE_STEP as f64 / s, g, f);
                }
            }
        }
        for (i, &threads) in counts.iter().enumerate() {
            let rates: Vec<f64> = series.ours[i].iter().map(|rate| rate * bytes).collect();
            decode_rows.push(DecodeRow {
                tokens: steps * DECODE_STEP,
                threads,
                tokens_per_second: median(&series.ours[i]),
                gigabytes_per_second: median(&rates) / 1e9,
                read_gigabytes_per_second: median(&series.limit[i]) / 1e9,
                ratio_to_read: ratio(&rates, &series.limit[i]),
                share_of_thread_gain: series.share_of_gain(i),
            });
        }
    }

    let together = if args.parallel.is_empty() {
        Vec::new()
    } else {
        let counts: Vec<usize> = args.parallel.iter().map(|&count| count as usize).collect();
        together::measure(&model, &counts, args.generate.max(2), args.repeat, pools)?
    };

    let report = Report {
        machine: machine.description(),
        model: name,
        parameters,
        non_embedding_parameters: non_embedding,
        weight_bytes: model.weight_bytes(),
        state_bytes: model.new_state()?.size_in_bytes(),
        prompt: prompt_rows,
        decode: decode_rows,
        together,
        peak_memory_bytes,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        report.print(&mut out)?;
    }
    Ok(out.flush()?)
}

/// Ours, the machine's limit and its register rate, `[pool][repetition]`.
struct Series {
    ours: Vec<Vec<f64>>,
    limit: Vec<Vec<f64>>,
    fma: Vec<Vec<f64>>,
}

impl Series {
    fn new(pools: usize) -> Self {
        let empty = vec![Vec::new(); pools];
        Self { ours: empty.clone(), limit: empty.clone(), fma: empty }
    }

    fn push(&mut self, pool: usize, ours: f64, limit: f64, fma: f64) {
        self.ours[pool].push(ours);
        self.limit[pool].push(limit);
        self.fma[pool].push(fma);
    }

    fn share_of_gain(&self, pool: usize) -> f64 {
        ratio(&self.ours[pool], &self.ours[0]) / ratio(&self.fma[pool], &self.fma[0])
    }
}

impl Report {
    fn print(&self, out: &mut impl Write) -> Result<()> {
        let mb = |bytes: usize| bytes as f64 / 1e6;
        writeln!(
            out,
            "{}: {:.1} M parameters ({:.1} M without embeddings), {:.1} MB read a token, state {:.2} MB",
            self.model,
            self.parameters as f64 / 1e6,
            self.non_embedding_parameters as f64 / 1e6,
            mb(self.weight_bytes),
            mb(self.state_bytes)
        )?;
        writeln!(out, "{}", self.machine.line())?;
        writeln!(
            out,
            "\nprompt  threads    tok/s  GFLOP/s  gemm crate  ratio  share of thread gain"
        )?;
        for row in &self.prompt {
            writeln!(
                out,
                "{:6} {:8} {:8.1} {:8.1} {:11.1} {:6.2} {:21.2}",
                row.tokens,
                row.threads,
                row.tokens_per_second,
                row.gflops,
                row.gemm_gflops,
                row.ratio_to_gemm,
                row.share_of_thread_gain
            )?;
        }
        if !self.decode.is_empty() {
            writeln!(
                out,
                "\ndecode  threads    tok/s     GB/s   GB/s read  ratio  share of thread gain"
            )?;
        }
        for row in &self.decode {
            writeln!(
                out,
                "{:6} {:8} {:8.1} {:8.1} {:11.1} {:6.2} {:21.2}",
                row.tokens,
                row.threads,
                row.tokens_per_second,
                row.gigabytes_per_second,
                row.read_gigabytes_per_second,
                row.ratio_to_read,
                row.share_of_thread_gain
            )?;
        }
        together::print(&self.together, out)?;
        if let Some(peak) = self.peak_memory_bytes {
            writeln!(out, "\npeak memory after the prompts: {:.0} MB", peak as f64 / 1e6)?;
        }
        Ok(())
    }
}

/// Token ids that jump about, as those of texts do.
fn ids(len: usize, vocab: usize) -> Vec<u32> {
    let vocab = u32::try_from(vocab).unwrap_or(u32::MAX);
    (0..len).map(|i| (i as u32).wrapping_mul(2_654_435_761) % vocab).collect()
}

pub(super) fn open(args: &BenchArgs, cpu: &CpuClient) -> Result<(String, Arc<Model<Cpu>>)> {
    let Some(geometry) = args.synthetic else {
        let source = Source::of(args.model.as_deref())?;
        let lm = source.open(&Default::default(), cpu)?;
        return Ok((source.name(), lm.model));
    };
    let mamba2 = |layers, width| {
        json!({
            "d_model": width, "n_layer": layers, "vocab_size": 50_277, "tie_embeddings": true,
            "pad_vocab_size_multiple": 16, "ssm_cfg": { "layer": "Mamba2" },
        })
    };
    let (name, mut json) = match geometry {
        Geometry::Mamba2_130m => ("mamba2-130m", mamba2(24, 768)),
        Geometry::Mamba2_370m => ("mamba2-370m", mamba2(48, 1024)),
        Geometry::Mamba2_780m => ("mamba2-780m", mamba2(48, 1536)),
        Geometry::Mamba2_1_3b => ("mamba2-1.3b", mamba2(48, 2048)),
        Geometry::Mamba2_2_7b => ("mamba2-2.7b", mamba2(64, 2560)),
        Geometry::Qwen3_5_0_8b => ("qwen3.5-0.8b", qwen3_5([1024, 24, 3584], [8, 2], 16, true)),
        Geometry::Qwen3_5_9b => ("qwen3.5-9b", qwen3_5([4096, 32, 12_288], [16, 4], 32, false)),
        Geometry::Lfm2_350m => ("lfm2-350m", lfm2()),
    };
    if let Some(layers) = args.layers {
        let field = if json["n_layer"].is_null() { "num_hidden_layers" } else { "n_layer" };
        json[field] = layers.into();
    }
    let types = Types::named(&args.dtype).map_err(|error| usage(format!("--dtype: {error}")))?;
    let of = |name: &str, shape: &[usize]| types.of(name, shape).unwrap_or(Dtype::F32);
    let config = Config::read(&ConfigFile::parse(name, &json.to_string())?)?;
    let model = Model::synthetic_as(config, of, cpu.clone()).context("synthetic model")?;
    Ok((format!("{name} (synthetic, {})", args.dtype.to_lowercase()), Arc::new(model)))
}

/// Ten convolutions and six layers of attention. Width, heads and places of attention are assumed: with the known width of
/// feed-forward parts they make 354 M parameters.
fn lfm2() -> serde_json::Value {
    json!({
        "model_type": "lfm2", "hidden_size": 1024, "num_hidden_layers": 16, "vocab_size": 65_536,
        "block_ff_dim": 4608, "block_auto_adjust_ff_dim": false, "num_attention_heads": 16,
        "num_key_value_heads": 8, "conv_L_cache": 3, "norm_eps": 1e-5, "rope_theta": 1e6,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    })
}

/// Three of four layers are gated delta mixers. The width of the feed-forward parts follows from the number of
/// parameters.
fn qwen3_5(
    [width, layers, d_ff]: [usize; 3],
    [heads, heads_kv]: [usize; 2],
    value_heads: usize,
    is_tied: bool,
) -> serde_json::Value {
    json!({
        "model_type": "qwen3_5_text", "hidden_size": width, "num_hidden_layers": layers,
        "intermediate_size": d_ff, "vocab_size": 248_320, "tie_word_embeddings": is_tied,
        "num_attention_heads": heads, "num_key_value_heads": heads_kv, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
        "rope_parameters": { "rope_theta": 1e7, "partial_rotary_factor": 0.25 },
    })
}
