//! `boostr bench --parallel 1,8`: requests that are decoded together, beside one alone.

use std::io::Write;
use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::Result;
use boostr::backend::Cpu;
use boostr::engine::{EngineConfig, Event, Request, Scheduler};
use boostr::models::Model;
use serde::Serialize;

use super::{median, ratio};

/// Tokens of each prompt: a step or two.
const PROMPT: usize = 16;

#[derive(Debug, Serialize)]
pub(super) struct Row {
    requests: usize,
    threads: usize,
    /// Of all requests.
    tokens_per_second: f64,
    tokens_per_second_each: f64,
    /// To the first count of requests, by the same threads in the same round.
    ratio_to_first: f64,
}

/// The rows as a table, if there are any.
pub(super) fn print(rows: &[Row], out: &mut impl Write) -> Result<()> {
    if !rows.is_empty() {
        writeln!(out, "\nrequests  threads    tok/s  tok/s each  ratio to the first")?;
    }
    for row in rows {
        writeln!(
            out,
            "{:8} {:8} {:8.1} {:11.1} {:19.2}",
            row.requests,
            row.threads,
            row.tokens_per_second,
            row.tokens_per_second_each,
            row.ratio_to_first
        )?;
    }
    Ok(())
}

/// Decodes `tokens` for each of so many requests at once, by each pool, in turn.
pub(super) fn measure(
    model: &Model<Cpu>,
    counts: &[usize],
    tokens: usize,
    repeat: u32,
    pools: &[rayon::ThreadPool],
) -> Result<Vec<Row>> {
    let mut rates = vec![vec![Vec::new(); counts.len()]; pools.len()];
    for round in 0..=repeat {
        for (pool, rates) in pools.iter().zip(&mut rates) {
            for (&count, rates) in counts.iter().zip(rates) {
                let rate = pool.install(|| rate(model, count, tokens))?;
                if round > 0 {
                    rates.push(rate);
                }
            }
        }
    }
    let rows = pools.iter().zip(&rates).flat_map(|(pool, rates)| {
        counts.iter().zip(rates).map(|(&requests, own)| Row {
            requests,
            threads: pool.current_num_threads(),
            tokens_per_second: median(own),
            tokens_per_second_each: median(own) / requests as f64,
            ratio_to_first: ratio(own, &rates[0]),
        })
    });
    Ok(rows.collect())
}

/// Tokens a second of all requests, once the last has begun to decode.
fn rate(model: &Model<Cpu>, requests: usize, tokens: usize) -> Result<f64> {
    let sizes =
        EngineConfig { max_running: requests, max_queue: requests, ..EngineConfig::default() };
    let mut scheduler = Scheduler::new(model, EngineConfig { snapshot_bytes: 0, ..sizes });
    for i in 0..requests {
        let vocab = model.vocab_limit() as u32;
        let prompt = (0..PROMPT as u32).map(|k| (97 * k + 31 * i as u32 + 1) % vocab).collect();
        let request = Request { max_tokens: tokens, ..Request::new(prompt, vocab as usize) };
        scheduler.submit(request, Box::new(|_: Event<Cpu>| ControlFlow::Continue(())))?;
    }
    while scheduler.stats().prompt_tokens < (requests * PROMPT) as u64 {
        scheduler.step();
    }
    let before = scheduler.stats().generated_tokens;
    let start = Instant::now();
    while scheduler.step() {}
    Ok((scheduler.stats().generated_tokens - before) as f64 / start.elapsed().as_secs_f64())
}
