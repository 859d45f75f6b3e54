//! `boostr bench`: speeds beside the limits of the machine, measured in the same run.
//!
//! Machines share their memory and their cores with others. So each speed is measured in turn with the
//! machine's own rate, several times. The report has the median of the ratios of neighbours.

mod attention;
mod machine;
mod model;
mod peer;
mod ssd;
mod together;

use std::path::Path;

use anyhow::Result;

use crate::args::bench::BenchArgs;

/// Runs the benchmark that the arguments name, on each number of threads, and prints its report.
///
/// # Errors
///
/// When the model cannot be opened.
pub fn run(args: &BenchArgs, threads: &[usize]) -> Result<()> {
    let pools = pools(threads)?;
    // A folder of that name is a model.
    let named =
        |name: &str| args.model.as_deref() == Some(Path::new(name)) && !Path::new(name).exists();
    if named("ssd") {
        ssd::run(args, &pools)
    } else if named("attention") {
        attention::run(args, &pools)
    } else {
        model::run(args, &pools)
    }
}

/// Pools of the asked numbers of threads; by default of one thread and of all there are.
fn pools(threads: &[usize]) -> Result<Vec<rayon::ThreadPool>> {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
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
