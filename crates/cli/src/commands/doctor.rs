//! `boostr doctor`: whether this machine and this program do what they should.

use std::path::PathBuf;

use anyhow::Result;
use boostr::backend::{CpuClient, Level};
use boostr::error::chain;
use clap::Args;
use serde_json::json;

use crate::checks::Checks;
use crate::commands::verify;
use crate::model::Source;
use crate::system;
use crate::term::Term;

const EXAMPLES: &str = "\
Examples:
  boostr doctor
  boostr doctor ./mamba2-370m --json";

/// Check this machine and the built-in model
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct DoctorArgs {
    /// A model to check too
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub path: Option<PathBuf>,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
    /// A model to check too [env: BOOSTR_MODEL]
    #[arg(short, long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Read pytorch_model.bin, with a closed list of types and without running it
    #[arg(long)]
    pub allow_pickle: bool,
}

/// Memory below which even a small model may not fit.
const LITTLE_MEMORY: u64 = 256 << 20;

pub fn run(args: &DoctorArgs, term: &Term) -> Result<()> {
    let mut checks = Checks::default();
    check_processor(&mut checks, &term.cpu);
    check_memory(&mut checks);
    check_demo(&mut checks, &term.cpu);
    if let Some(source) = Source::named(args.path.as_deref().or(args.model.as_deref())) {
        let name = source.name();
        match verify::check(&source, args.allow_pickle, false, &term.cpu) {
            Ok(found) => checks.append(&name, found),
            Err(error) => checks.fail(name, chain(&error)),
        }
    }
    let facts = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "level": term.cpu.level().name(),
        "levels": Level::present().iter().map(|level| level.name()).collect::<Vec<_>>(),
        "numerics": term.cpu.numerics(),
        "threads": rayon::current_num_threads(),
        "cpu_features": system::cpu_features(),
        "memory_bytes": system::memory().map(|(total, _)| total),
        "memory_available_bytes": system::memory().map(|(_, available)| available),
        "cgroup_memory_bytes": system::cgroup_memory(),
    });
    checks.print(args.json, facts, term)?;
    checks.conclude(false)
}

fn check_processor(checks: &mut Checks, cpu: &CpuClient) {
    let version = env!("CARGO_PKG_VERSION");
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    checks.ok("program", format!("boostr {version}, {arch} {os}"));
    let features = system::cpu_features().join(" ");
    let level = cpu.level();
    let found = format!("using {level} (found: {features})");
    if level == Level::Baseline {
        checks.warn("instructions", format!("{found}: slow; AVX2 with FMA or Neon is faster"));
    } else {
        checks.ok("instructions", found);
    }
    checks.ok("numerics", cpu.numerics());
    let present = boostr::threads::processors();
    let used = rayon::current_num_threads();
    let threads = format!("{used} used, {present} processors to use");
    if used > present {
        checks.warn("threads", format!("{threads}: more threads than processors are slower"));
    } else {
        checks.ok("threads", threads);
    }
}

fn check_memory(checks: &mut Checks) {
    let Some((total, available)) = system::memory() else {
        return checks.warn("memory", "this system does not say");
    };
    let limit = system::cgroup_memory().filter(|&limit| limit < total);
    let mut found = format!("{}, {} available", system::bytes(total), system::bytes(available));
    if let Some(limit) = limit {
        found += &format!(", limit of the control group {}", system::bytes(limit));
    }
    if available.min(limit.unwrap_or(u64::MAX)) < LITTLE_MEMORY {
        checks.warn("memory", format!("{found}: little"));
    } else {
        checks.ok("memory", found);
    }
}

#[cfg(not(feature = "demo"))]
fn check_demo(checks: &mut Checks, _: &CpuClient) {
    checks.ok("built-in model", "none in this build");
}

/// The built-in model must say what the original implementation makes of it.
#[cfg(feature = "demo")]
fn check_demo(checks: &mut Checks, cpu: &CpuClient) {
    use crate::model::demo;

    let opened = Source::Embedded.open(&Default::default(), cpu);
    let lm = checks.record("built-in model", opened, |lm| {
        format!("{}, {} layers", demo::FILES.name, lm.model.family().layers().len())
    });
    let (Some(lm), Ok(expected)) = (lm, demo::expected()) else { return };
    match lm.encode(&expected.prompt) {
        Ok(ids) if ids == expected.prompt_ids => checks.ok("tokenizer", "ids as expected"),
        Ok(ids) => {
            let wanted = &expected.prompt_ids;
            checks.fail("tokenizer", format!("expected ids {wanted:?}, found {ids:?}"));
        }
        Err(error) => checks.fail("tokenizer", chain(&error)),
    }
    match greedy(&lm, &expected.prompt_ids, expected.greedy_ids.len()) {
        Ok(ids) if ids == expected.greedy_ids => {
            checks.ok("greedy text", format!("{} ids as the original gives", ids.len()));
        }
        Ok(ids) => {
            let wanted = &expected.greedy_ids;
            checks.fail("greedy text", format!("expected ids {wanted:?}, found {ids:?}"));
        }
        Err(error) => checks.fail("greedy text", chain(&error)),
    }
}

#[cfg(feature = "demo")]
fn greedy(
    lm: &boostr::load::LanguageModel<boostr::backend::Cpu>,
    prompt: &[u32],
    max_tokens: usize,
) -> boostr::Result<Vec<u32>> {
    use boostr::engine::{Request, generate};
    use std::ops::ControlFlow;

    let request = Request { max_tokens, ..Request::new(prompt.to_vec(), lm.vocab_limit()) };
    let silent = &mut |_| ControlFlow::Continue(());
    Ok(generate(&lm.model, &mut lm.model.new_state()?, request, silent)?.ids)
}
