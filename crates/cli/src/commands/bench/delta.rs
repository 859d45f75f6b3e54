//! `boostr bench delta`: a prompt's gated delta rule beside matrix products, a token's beside reading and writing
//! memory.

use std::io::Write;

use anyhow::Result;
use boostr_kernels::delta::{Delta, delta_rule};
use boostr_kernels::{Level, Rows};
use serde::Serialize;

use super::machine::{Description, Machine, time};
use super::{BenchArgs, median, ratio};

/// Tokens of the prompt.
const L: usize = 512;
/// Key heads.
const HK: usize = 16;
/// Value heads.
const HV: usize = 32;
/// Width of a head, of keys as of values.
const D: usize = 128;
/// States that a token meets in turn, as in layers: so that none stays in the processor's cache.
const STATES: usize = 64;
/// Floats of a state.
const STATE: usize = HV * D * D;

/// Operations that are counted, whatever the kernel takes: read, write and read-out of each element of the state.
const OPERATIONS: f64 = (6 * L * STATE) as f64;

#[derive(Debug, Serialize)]
struct Report {
    machine: Description,
    shape: &'static str,
    operations: f64,
    results: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    /// `gated_delta`, with a decay for each head, or `kda`, with one for each key channel.
    operation: &'static str,
    threads: usize,
    prompt_ms: f64,
    gflops: f64,
    gemm_gflops: f64,
    ratio_to_gemm: f64,
    us_per_token: f64,
    gigabytes_per_second: f64,
    read_and_write_gigabytes_per_second: f64,
    ratio_to_read_and_write: f64,
}

pub(super) fn run(args: &BenchArgs, pools: &[rayon::ThreadPool], level: Level) -> Result<()> {
    let wave = |k: usize, n: usize| -> Vec<f32> {
        (0..n).map(|i| ((i * k) % 101) as f32 / 500.0 - 0.1).collect()
    };
    let (q, k, v) = (wave(3, L * HK * D), wave(5, L * HK * D), wave(7, L * HV * D));
    let beta = vec![0.5; L * HV];
    let mut machine = Machine::new(level);
    machine.allocate_memory();
    let mut states = vec![vec![0.1; STATE]; STATES];
    let mut out = vec![0.0; L * HV * D];
    let mut results = Vec::new();
    for (operation, decays) in [("gated_delta", HV), ("kda", HV * D)] {
        let g = vec![-0.05; L * decays];
        let tokens = |n: usize| Delta {
            level,
            key_heads: HK,
            value_heads: HV,
            key_dim: D,
            value_dim: D,
            q: Rows::dense(&q[..n * HK * D], HK * D),
            k: Rows::dense(&k[..n * HK * D], HK * D),
            v: Rows::dense(&v[..n * HV * D], HV * D),
            g: Rows::dense(&g[..n * decays], decays),
            beta: Rows::dense(&beta[..n * HV], HV),
            scale: (D as f32).sqrt().recip(),
        };
        let (prompt, one) = (tokens(L), tokens(1));
        for pool in pools {
            let (mut ours, mut gemm) = (Vec::new(), Vec::new());
            let (mut rates, mut rewrites) = (Vec::new(), Vec::new());
            for repetition in 0..=args.repeat {
                let measured = pool.install(|| {
                    let before = machine.gemm();
                    let whole = time(|| delta_rule(&prompt, &[L], &mut [&mut states[0]], &mut out));
                    let gemm = f64::midpoint(before, machine.gemm());
                    let before = machine.rewrite();
                    let token = time(|| {
                        for state in &mut states {
                            delta_rule(&one, &[1], &mut [state], &mut out[..HV * D]);
                        }
                    });
                    (gemm, whole, f64::midpoint(before, machine.rewrite()), token)
                });
                // The first repetition warms up.
                if repetition > 0 {
                    let (product, whole, rewrite, token) = measured;
                    gemm.push(product);
                    ours.push(OPERATIONS / whole);
                    rewrites.push(rewrite);
                    rates.push((8 * STATE * STATES) as f64 / token);
                }
            }
            results.push(Row {
                operation,
                threads: pool.current_num_threads(),
                prompt_ms: 1e3 * OPERATIONS / median(&ours),
                gflops: median(&ours) / 1e9,
                gemm_gflops: median(&gemm) / 1e9,
                ratio_to_gemm: ratio(&ours, &gemm),
                us_per_token: 1e6 * (8 * STATE) as f64 / median(&rates),
                gigabytes_per_second: median(&rates) / 1e9,
                read_and_write_gigabytes_per_second: median(&rewrites) / 1e9,
                ratio_to_read_and_write: ratio(&rates, &rewrites),
            });
        }
    }
    let report = Report {
        machine: machine.description(),
        shape: "batch 1, 16 key heads and 32 value heads of 128, f32",
        operations: OPERATIONS,
        results,
    };
    print(args, &report)
}

fn print(args: &BenchArgs, report: &Report) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(report)?)?;
        return Ok(out.flush()?);
    }
    writeln!(out, "gated delta rule, {}", report.shape)?;
    writeln!(out, "{}", report.machine.line())?;
    writeln!(out, "\nprompt of {L}: {:.2} GFLOP", report.operations / 1e9)?;
    writeln!(out, "  operation  threads      ms  GFLOP/s   gemm crate   ratio")?;
    for row in &report.results {
        writeln!(
            out,
            "{:>11} {:8} {:7.1} {:8.1} {:12.1} {:7.2}",
            row.operation,
            row.threads,
            row.prompt_ms,
            row.gflops,
            row.gemm_gflops,
            row.ratio_to_gemm
        )?;
    }
    writeln!(out, "\none token: a state of {} MiB is read and written", (4 * STATE) >> 20)?;
    writeln!(out, "  operation  threads      us     GB/s   GB/s read and written   ratio")?;
    for row in &report.results {
        writeln!(
            out,
            "{:>11} {:8} {:7.0} {:8.1} {:23.1} {:7.2}",
            row.operation,
            row.threads,
            row.us_per_token,
            row.gigabytes_per_second,
            row.read_and_write_gigabytes_per_second,
            row.ratio_to_read_and_write
        )?;
    }
    Ok(out.flush()?)
}
