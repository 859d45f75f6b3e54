//! `boostr bench`: speeds beside what the machine can do, measured in the same run.
//!
//! Machines share their memory and their cores with others, so each speed is taken in turn with the
//! machine's own rate, several times, and what is reported is the median of the ratios of neighbours.

mod machine;
mod model;
mod peer;
mod ssd;

use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};

/// Arguments of `boostr bench`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    before_help = "Examples:\n  boostr bench --synthetic mamba2-130m -p 512 -g 64 -t 1,2\n  boostr bench ssd --json"
)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: Option<What>,
    /// Model folder; the embedded model when neither this nor --synthetic is given
    model: Option<String>,
    /// Measure weights made in memory, in the geometry of a published model
    #[arg(long, value_name = "NAME", conflicts_with = "model")]
    synthetic: Option<Geometry>,
    /// Type of synthetic weights
    #[arg(long, value_name = "TYPE", default_value = "f32", requires = "synthetic")]
    dtype: WeightType,
    /// Lengths of prompts
    #[arg(short = 'p', long, value_name = "N,..", value_delimiter = ',', default_value = "512")]
    prompt: Vec<usize>,
    /// Tokens to generate; 0 for none
    #[arg(short = 'g', long, value_name = "N", default_value_t = 128)]
    generate: usize,
    #[command(flatten)]
    common: Common,
}

/// What every benchmark takes.
#[derive(Debug, Clone, Args)]
struct Common {
    /// Numbers of threads
    #[arg(short = 't', long, value_name = "N,..", value_delimiter = ',')]
    threads: Vec<usize>,
    /// Times that everything is measured
    #[arg(short = 'r', long, value_name = "N", default_value_t = 7)]
    repeat: usize,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum What {
    /// The SSD operation alone: batch 1, L 2048, H 24, P 64, G 1, N 128
    Ssd(Common),
}

/// Published models whose sizes can be measured without their weights.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Geometry {
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
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum WeightType {
    F32,
    Bf16,
    F16,
}

/// Runs the benchmark that the arguments name and prints its report.
///
/// # Errors
///
/// When arguments are out of range or the model cannot be opened.
pub fn run(args: &BenchArgs) -> Result<()> {
    match &args.what {
        Some(What::Ssd(common)) => ssd::run(common),
        None => model::run(args),
    }
}

impl Common {
    /// Pools of the asked numbers of threads; by default one thread, and all there are.
    fn pools(&self) -> Result<Vec<rayon::ThreadPool>> {
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        let mut counts = self.threads.clone();
        if counts.is_empty() {
            counts = if all > 1 { vec![1, all] } else { vec![1] };
        }
        anyhow::ensure!(self.repeat > 0, "--repeat: expected at least 1, found 0");
        counts
            .into_iter()
            .map(|n| {
                anyhow::ensure!((1..=1024).contains(&n), "--threads: expected 1 to 1024, found {n}");
                Ok(rayon::ThreadPoolBuilder::new().num_threads(n).build()?)
            })
            .collect()
    }
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
