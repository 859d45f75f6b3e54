//! The options of `boostr bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

pub const EXAMPLES: &str = "\
Examples:
  boostr bench --synthetic mamba2-130m -p 512 -g 64 -t 1,2
  boostr bench ssd -t 1,2 --json
  boostr bench attention -t 1,2";

/// Arguments of `boostr bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Model, or `ssd` or `attention` for that operation alone; the built-in model by default
    #[arg(value_name = "MODEL|ssd|attention", env = "BOOSTR_MODEL", hide_env = true)]
    pub model: Option<PathBuf>,
    /// Weights made in memory, in the geometry of a published model
    #[arg(long, value_name = "NAME", conflicts_with = "model")]
    pub synthetic: Option<Geometry>,
    /// Type of synthetic weights: f32, f16, bf16, or a block type like q8_0
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
}
