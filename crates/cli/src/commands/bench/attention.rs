//! `boostr bench attention`: a prompt's attention beside matrix products, a token's beside reading memory.

use std::io::Write;

use anyhow::Result;
use boostr_kernels::attention::{Attention, KvCache, KvType, attention};
use boostr_kernels::{Level, Rows};
use serde::Serialize;

use super::machine::{Description, Machine, time};
use super::{BenchArgs, median, ratio};

/// Tokens of the prompt.
const L: usize = 1024;
/// Heads, of queries as of keys and values.
const H: usize = 8;
/// Width of a head.
const D: usize = 64;
/// Tokens before the one that is decoded.
const CONTEXT: usize = 16_384;
/// Caches that are decoded in turn, so that none stays in the processor's cache.
const CACHES: usize = 2;

/// Multiplications and additions of the causal half: both products of each query and the keys up to it.
const OPERATIONS: f64 = (4 * H * D * (L * (L + 1) / 2)) as f64;

#[derive(Debug, Serialize)]
struct Report {
    machine: Description,
    shape: &'static str,
    operations: f64,
    context: usize,
    results: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    threads: usize,
    prompt_ms: f64,
    gflops: f64,
    gemm_gflops: f64,
    ratio_to_gemm: f64,
    decode: Vec<Decode>,
}

#[derive(Debug, Serialize)]
struct Decode {
    kv_type: &'static str,
    us_per_token: f64,
    gigabytes_per_second: f64,
    read_gigabytes_per_second: f64,
    ratio_to_read: f64,
}

pub(super) fn run(args: &BenchArgs, pools: &[rayon::ThreadPool], level: Level) -> Result<()> {
    let wave = |k: usize, n: usize| -> Vec<f32> {
        (0..n).map(|i| ((i * k) % 101) as f32 / 50.0 - 1.0).collect()
    };
    let width = H * D;
    let (q, k, v) = (wave(3, L * width), wave(5, L * width), wave(7, L * width));
    let rows = |x| Rows::dense(x, width);
    let scale = (D as f32).sqrt().recip();
    let kernel = Attention { level, nheads: H, scale, window: None, softcap: None };
    let long: Vec<Vec<KvCache>> = KvType::ALL
        .into_iter()
        .map(|kind| {
            let filled = |_| {
                let mut cache = KvCache::new(level, H, D, D, kind);
                for _ in 0..CONTEXT / L {
                    cache.append(rows(&k), rows(&v));
                }
                cache
            };
            (0..CACHES).map(filled).collect()
        })
        .collect();
    let mut machine = Machine::new(level);
    machine.allocate_memory();
    let mut out = vec![0.0; L * width];
    let mut report = Vec::new();
    for pool in pools {
        let (mut ours, mut gemm) = (Vec::new(), Vec::new());
        for repetition in 0..=args.repeat {
            let (g, s) = pool.install(|| {
                let g = machine.gemm();
                let mut cache = KvCache::new(level, H, D, D, KvType::F32);
                let s = time(|| {
                    attention(
                        &kernel,
                        rows(&q),
                        rows(&k),
                        rows(&v),
                        &[L],
                        &mut [&mut cache],
                        &mut out,
                    );
                });
                (f64::midpoint(g, machine.gemm()), s)
            });
            // The first repetition warms up.
            if repetition > 0 {
                gemm.push(g);
                ours.push(OPERATIONS / s);
            }
        }
        let mut decode = Vec::new();
        for (kind, caches) in KvType::ALL.into_iter().zip(&long) {
            let bytes = CONTEXT * KvCache::bytes_per_token(level, H, D, D, kind);
            let (mut rates, mut reads) = (Vec::new(), Vec::new());
            for repetition in 0..=args.repeat {
                let (read, seconds) = pool.install(|| {
                    let read = machine.read();
                    let mut seconds = 0.0;
                    for cache in caches {
                        let mut fork = cache.clone();
                        let row = |x| Rows::dense(x, width);
                        seconds += time(|| {
                            let (q, k, v) = (&q[..width], &k[..width], &v[..width]);
                            attention(
                                &kernel,
                                row(q),
                                row(k),
                                row(v),
                                &[1],
                                &mut [&mut fork],
                                &mut out[..width],
                            );
                        });
                    }
                    (f64::midpoint(read, machine.read()), seconds / CACHES as f64)
                });
                if repetition > 0 {
                    rates.push(bytes as f64 / seconds);
                    reads.push(read);
                }
            }
            decode.push(Decode {
                kv_type: kind.name(),
                us_per_token: 1e6 * bytes as f64 / median(&rates),
                gigabytes_per_second: median(&rates) / 1e9,
                read_gigabytes_per_second: median(&reads) / 1e9,
                ratio_to_read: ratio(&rates, &reads),
            });
        }
        report.push(Row {
            threads: pool.current_num_threads(),
            prompt_ms: 1e3 * OPERATIONS / median(&ours),
            gflops: median(&ours) / 1e9,
            gemm_gflops: median(&gemm) / 1e9,
            ratio_to_gemm: ratio(&ours, &gemm),
            decode,
        });
    }
    let report = Report {
        machine: machine.description(),
        shape: "batch 1, 8 heads of 64, causal, f32",
        operations: OPERATIONS,
        context: CONTEXT,
        results: report,
    };
    print(args, &report)
}

fn print(args: &BenchArgs, report: &Report) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(report)?)?;
        return Ok(out.flush()?);
    }
    writeln!(out, "attention, {}", report.shape)?;
    writeln!(out, "{}", report.machine.line())?;
    writeln!(out, "\nprompt of {L}: {:.2} GFLOP in the causal half", report.operations / 1e9)?;
    writeln!(out, "threads      ms  GFLOP/s   gemm crate   ratio")?;
    for row in &report.results {
        let Row { threads, prompt_ms, gflops, gemm_gflops, ratio_to_gemm, .. } = row;
        writeln!(
            out,
            "{threads:7} {prompt_ms:7.2} {gflops:8.1} {gemm_gflops:12.1} {ratio_to_gemm:7.2}"
        )?;
    }
    writeln!(out, "\none token after {} others", report.context)?;
    writeln!(out, "threads  kept as      us     GB/s   GB/s read   ratio")?;
    for row in &report.results {
        for d in &row.decode {
            writeln!(
                out,
                "{:7} {:>8} {:7.0} {:8.1} {:11.1} {:7.2}",
                row.threads,
                d.kv_type,
                d.us_per_token,
                d.gigabytes_per_second,
                d.read_gigabytes_per_second,
                d.ratio_to_read
            )?;
        }
    }
    Ok(out.flush()?)
}
