//! `boostr bench`: speeds beside the limits of the machine, measured in the same run.
//!
//! Machines share their memory and their cores with others. So each speed is measured in turn with the
//! machine's own rate, several times. The report has the median of the ratios of neighbours.

mod attention;
mod delta;
mod machine;
mod model;
mod peer;
mod ssd;
mod steps;
mod together;

use std::path::{Path, PathBuf};

use anyhow::Result;
use boostr::backend::CpuClient;
use clap::{Args, ValueEnum};

const EXAMPLES: &str = "\
Examples:
  boostr bench --synthetic mamba2-130m -p 512 -g 64 -t 1,2
  boostr bench ssd -t 1,2 --json
  boostr bench attention -t 1,2
  boostr bench delta -t 1,2";

/// Speeds, beside what this machine can do
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct BenchArgs {
    /// Model, or `ssd`, `attention` or `delta` for that operation alone; the built-in model by default
    #[arg(value_name = "MODEL|ssd|attention|delta", env = "BOOSTR_MODEL", hide_env = true)]
    pub model: Option<PathBuf>,
    /// Weights made in memory, in the geometry of a published model
    #[arg(long, value_name = "NAME", conflicts_with = "model")]
    pub synthetic: Option<Geometry>,
    /// Type of synthetic weights, as `quantize --type` has them: f32, bf16, q8_0, q4_k_m
    #[arg(long, value_name = "TYPE", default_value = "f32", requires = "synthetic")]
    pub dtype: String,
    /// Lengths of prompts
    #[arg(short, long, value_name = "N,..", value_delimiter = ',', default_value = "512")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub prompt: Vec<u32>,
    /// Tokens to generate; 0 for none
    #[arg(short, long, value_name = "N", default_value_t = 128)]
    pub generate: usize,
    /// Requests that are decoded together, each with --generate tokens: 1,8
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub parallel: Vec<u32>,
    /// Times that everything is measured
    #[arg(short, long, value_name = "N", default_value_t = 7)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub repeat: u32,
    /// Only so many of the layers of synthetic weights
    #[arg(long, value_name = "N", requires = "synthetic")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub layers: Option<u32>,
    /// The steps of a token instead: their tasks and times
    #[arg(long)]
    pub steps: bool,
    /// One JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// Published models whose sizes can be measured without their weights.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Geometry {
    #[value(name = "mamba2-130m")]
    Mamba2_130m,
    #[value(name = "mamba2-370m")]
    Mamba2_370m,
    #[value(name = "mamba2-780m")]
    Mamba2_780m,
    #[value(name = "mamba2-1.3b")]
    Mamba2_1_3b,
    #[value(name = "mamba2-2.7b")]
    Mamba2_2_7b,
    #[value(name = "qwen3.5-0.8b")]
    Qwen3_5_0_8b,
    #[value(name = "qwen3.5-9b")]
    Qwen3_5_9b,
    #[value(name = "lfm2-350m")]
    Lfm2_350m,
}

/// Runs the benchmark that the arguments name, on each number of threads, and prints its report.
///
/// # Errors
///
/// When the model cannot be opened.
pub fn run(args: &BenchArgs, threads: &[usize], pin: bool, cpu: &CpuClient) -> Result<()> {
    let pools = pools(threads)?;
    if pin {
        pools.iter().try_for_each(|pool| pool.install(boostr::threads::pin))?;
    }
    // A folder of that name is a model.
    let named =
        |name: &str| args.model.as_deref() == Some(Path::new(name)) && !Path::new(name).exists();
    if named("ssd") {
        ssd::run(args, &pools, cpu.level())
    } else if named("attention") {
        attention::run(args, &pools, cpu.level())
    } else if named("delta") {
        delta::run(args, &pools, cpu.level())
    } else if args.steps {
        steps::run(args, &pools, cpu)
    } else {
        model::run(args, &pools, cpu)
    }
}

/// Pools of the asked numbers of threads; by default of one thread and of all there are.
fn pools(threads: &[usize]) -> Result<Vec<rayon::ThreadPool>> {
    let all = boostr::threads::processors();
    let both = if all > 1 { vec![1, all] } else { vec![1] };
    let counts = if threads.is_empty() { &both } else { threads };
    counts.iter().map(|&n| Ok(rayon::ThreadPoolBuilder::new().num_threads(n).build()?)).collect()
}

/// The middle value; of an even number the upper one of the two.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The median of the ratios of neighbours.
fn ratio(ours: &[f64], theirs: &[f64]) -> f64 {
    let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect();
    median(&ratios)
}
