//! `boostr bench --steps`: the steps of one token, in how many tasks each is cut and how long it takes.

use std::hint::black_box;
use std::io::Write;

use anyhow::Result;
use boostr::backend::{Cpu, CpuClient};
use boostr::models::{Logits, Model, Run};
use boostr_kernels::{awake, parallel};
use serde::Serialize;
use serde_json::json;

use super::machine::time;
use super::{BenchArgs, median, model};

/// Tokens before those that are measured.
const BEFORE: usize = 4;
/// Regions of nothing whose mean is the cost of one.
const REGIONS: usize = 20_000;

/// A token on so many threads; times are medians, in microseconds.
#[derive(Debug, Serialize)]
struct Token {
    threads: usize,
    #[serde(rename = "token_us")]
    whole_us: f64,
    /// Of a region whose tasks do nothing; `None` on one thread, which has none.
    empty_region_us: Option<f64>,
    steps: Vec<Step>,
}

#[derive(Debug, Serialize)]
struct Step {
    tasks: usize,
    is_region: bool,
    us: f64,
}

pub(super) fn run(args: &BenchArgs, pools: &[rayon::ThreadPool], cpu: &CpuClient) -> Result<()> {
    let (name, model) = model::open(args, cpu)?;
    let tokens: Vec<Token> =
        pools.iter().map(|pool| pool.install(|| token(&model, args))).collect::<Result<_>>()?;
    let mut out = std::io::stdout().lock();
    if args.json {
        return Ok(writeln!(out, "{}", json!({ "model": name, "tokens": tokens }))?);
    }
    writeln!(out, "{name}\n")?;
    for token in tokens {
        let regions = token.steps.iter().filter(|step| step.is_region);
        let tasks: usize = regions.clone().map(|step| step.tasks).sum();
        let us = regions.clone().fold(0.0, |us, step| us + step.us);
        let (threads, all, count) = (token.threads, token.whole_us, regions.count());
        writeln!(
            out,
            "{threads} threads: {all:.0} us a token, {us:.0} of them in {count} regions of {tasks} tasks"
        )?;
        if let Some(us) = token.empty_region_us {
            writeln!(out, "a region of nothing: {us:.2} us")?;
        }
    }
    Ok(())
}

fn token(model: &Model<Cpu>, args: &BenchArgs) -> Result<Token> {
    let threads = rayon::current_num_threads();
    let mut state = model.new_state()?;
    let (mut all, mut each) = (Vec::new(), Vec::<Vec<parallel::Step>>::new());
    for i in 0..BEFORE + args.generate.max(1) {
        let tokens = [i as u32 % 32];
        let mut run = [Run { tokens: &tokens, state: &mut state }];
        let mut result = Ok(());
        let (seconds, steps) =
            parallel::steps(|| time(|| result = model.forward(&mut run, Logits::Last).map(|_| ())));
        result?;
        if i >= BEFORE {
            all.push(1e6 * seconds);
            each.push(steps);
        }
    }
    // A layer's steps are the same each time.
    let count = each.iter().map(Vec::len).min().unwrap_or(0);
    let steps = (0..count).map(|i| {
        let us: Vec<f64> = each.iter().map(|steps| 1e6 * steps[i].took.as_secs_f64()).collect();
        let parallel::Step { tasks, is_region, .. } = each[0][i];
        Step { tasks, is_region, us: median(&us) }
    });
    let steps = steps.collect();
    let empty_region_us = (threads > 1).then(|| {
        let seconds = time(|| {
            awake(|| {
                for _ in 0..REGIONS {
                    let tasks = (0..threads).collect();
                    parallel::for_each(tasks, usize::MAX, || (), |(), i: usize| _ = black_box(i));
                }
            });
        });
        1e6 * seconds / REGIONS as f64
    });
    Ok(Token { threads, whole_us: median(&all), empty_region_us, steps })
}
