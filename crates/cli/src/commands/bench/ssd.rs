//! `boostr bench ssd`: the operation beside matrix products and beside its own definition.

use std::io::Write;

use anyhow::Result;
use boostr_kernels::ssd::{Ssd, recurrence, ssd};
use boostr_kernels::{Level, Rows};
use serde::Serialize;

use super::machine::{Description, Machine, time};
use super::{BenchArgs, median, ratio};

const L: usize = 2048;
const H: usize = 24;
const P: usize = 64;
const G: usize = 1;
const N: usize = 128;

/// Operations that are counted, whatever the kernel takes: those of the form by chunks of 64, both products with the
/// state and those inside chunks.
const OPERATIONS: f64 = (4 * L * H * P * N + L * 64 * (G * N + H * P)) as f64;

#[derive(Debug, Serialize)]
struct Report {
    machine: Description,
    shape: &'static str,
    operations: f64,
    /// One call of the definition, token by token, on one thread.
    recurrence_ms: f64,
    results: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    threads: usize,
    ms: f64,
    gflops: f64,
    gemm_gflops: f64,
    ratio_to_gemm: f64,
    speedup_over_recurrence: f64,
    fma_gflops: f64,
    /// What this many threads gain over the first row's, as a share of what register loops gain.
    share_of_thread_gain: f64,
}

pub(super) fn run(args: &BenchArgs, pools: &[rayon::ThreadPool], level: Level) -> Result<()> {
    let wave = |k: usize, n: usize| -> Vec<f32> {
        (0..n).map(|i| ((i * k) % 17) as f32 / 17.0 - 0.5).collect()
    };
    let width = H * P + 2 * G * N;
    let (xbc, dt, d) = (wave(3, L * width), wave(5, L * H), wave(7, H));
    let a: Vec<f32> = (0..H).map(|h| -(h as f32 + 1.0)).collect();
    let rows = Rows::dense(&xbc, width);
    let input = Ssd {
        level,
        nheads: H,
        headdim: P,
        ngroups: G,
        dstate: N,
        x: rows.columns(0, H * P),
        b: rows.columns(H * P, G * N),
        c: rows.columns(H * P + G * N, G * N),
        dt: Rows::dense(&dt, H),
        a: &a,
        dt_bias: None,
        d: Some(&d),
        z: None,
        dt_softplus: true,
        dt_limit: (0.0, f32::INFINITY),
    };
    let mut machine = Machine::new(level);
    let mut state = vec![0.0; H * P * N];
    let mut y = vec![0.0; L * H * P];
    // [pool][repetition]
    let mut ours = vec![Vec::new(); pools.len()];
    let mut gemm = vec![Vec::new(); pools.len()];
    let mut fma = vec![Vec::new(); pools.len()];
    let mut reference = Vec::new();
    for repetition in 0..=args.repeat {
        for (i, pool) in pools.iter().enumerate() {
            let (f, g, s) = pool.install(|| {
                let f = machine.multiply_adds();
                let g = machine.gemm();
                let s = time(|| ssd(&input, &[L], &mut [&mut state], &mut y));
                (f, f64::midpoint(g, machine.gemm()), s)
            });
            // The first repetition warms up.
            if repetition > 0 {
                fma[i].push(f);
                gemm[i].push(g);
                ours[i].push(OPERATIONS / s);
            }
        }
        if repetition > 0 {
            let mut state = vec![vec![0.0f32; H * P * N]];
            reference.push(time(|| recurrence(&input, &[L], &mut state)));
        }
    }
    let rows = (0..pools.len()).map(|i| {
        let times: Vec<f64> = ours[i].iter().map(|rate| OPERATIONS / rate).collect();
        Row {
            threads: pools[i].current_num_threads(),
            ms: 1e3 * median(&times),
            gflops: median(&ours[i]) / 1e9,
            gemm_gflops: median(&gemm[i]) / 1e9,
            ratio_to_gemm: ratio(&ours[i], &gemm[i]),
            speedup_over_recurrence: ratio(&reference, &times),
            fma_gflops: median(&fma[i]) / 1e9,
            share_of_thread_gain: ratio(&ours[i], &ours[0]) / ratio(&fma[i], &fma[0]),
        }
    });
    let report = Report {
        machine: machine.description(),
        shape: "batch 1, L 2048, H 24, P 64, G 1, N 128, f32",
        operations: OPERATIONS,
        recurrence_ms: 1e3 * median(&reference),
        results: rows.collect(),
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
        return Ok(out.flush()?);
    }
    writeln!(out, "ssd forward, {}: {:.2} GFLOP", report.shape, OPERATIONS / 1e9)?;
    writeln!(out, "{}", report.machine.line())?;
    writeln!(out, "definition, token by token: {:.0} ms", report.recurrence_ms)?;
    writeln!(out, "threads      ms  GFLOP/s   gemm crate   ratio   x definition")?;
    for row in &report.results {
        writeln!(
            out,
            "{:7} {:7.1} {:8.1} {:12.1} {:7.2} {:14.1}",
            row.threads,
            row.ms,
            row.gflops,
            row.gemm_gflops,
            row.ratio_to_gemm,
            row.speedup_over_recurrence
        )?;
    }
    Ok(out.flush()?)
}
