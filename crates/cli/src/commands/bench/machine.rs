//! What the machine can do at the moment: matrix products, registers, memory.

use std::hint::black_box;
use std::time::Instant;

use boostr_kernels::{Level, probe};
use serde::Serialize;

use super::peer;

/// Size of the square product that stands for the rate of matrix products.
const GEMM: usize = 1024;
/// Floats that are read for the rate of memory: several times any cache.
const READ: usize = 1 << 26;

/// Buffers of the measurements.
pub(super) struct Machine {
    level: Level,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
    memory: Vec<f32>,
}

impl Machine {
    pub(super) fn new(level: Level) -> Self {
        let wave =
            |k: usize| (0..GEMM * GEMM).map(|i| ((i * k) % 17) as f32 / 17.0 - 0.5).collect();
        Self { level, a: wave(3), b: wave(5), c: vec![0.0; GEMM * GEMM], memory: Vec::new() }
    }

    /// Makes the buffer of [`Machine::read`] and [`Machine::rewrite`].
    pub(super) fn allocate_memory(&mut self) {
        self.memory = vec![1.0; READ];
    }

    /// FLOP/s of the `gemm` crate on 1024 x 1024 matrices.
    pub(super) fn gemm(&mut self) -> f64 {
        let seconds = time(|| peer::square_product(GEMM, &self.a, &self.b, &mut self.c));
        2.0 * (GEMM as f64).powi(3) / seconds
    }

    /// Bytes per second of reading memory.
    pub(super) fn read(&self) -> f64 {
        let seconds = time(|| black_box(probe::read(self.level, black_box(&self.memory))));
        4.0 * self.memory.len() as f64 / seconds
    }

    /// Bytes per second of reading memory and writing it back, both counted.
    pub(super) fn rewrite(&mut self) -> f64 {
        let seconds = time(|| probe::rewrite(self.level, black_box(&mut self.memory)));
        8.0 * self.memory.len() as f64 / seconds
    }

    /// FLOP/s of multiply-adds on registers.
    pub(super) fn multiply_adds(&self) -> f64 {
        let mut operations = 0.0;
        let seconds = time(|| operations = probe::multiply_adds(self.level, 1 << 21));
        operations / seconds
    }

    /// The machine, for a report.
    pub(super) fn description(&self) -> Description {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name =
            info.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
        Description {
            cpu: name.unwrap_or("unknown").to_string(),
            instruction_set: self.level.name(),
            processors: boostr::threads::processors(),
        }
    }
}

/// Seconds that a call takes.
pub(super) fn time<T>(call: impl FnOnce() -> T) -> f64 {
    let start = Instant::now();
    black_box(call());
    start.elapsed().as_secs_f64()
}

/// The machine, as reports name it.
#[derive(Debug, Serialize)]
pub(super) struct Description {
    cpu: String,
    instruction_set: &'static str,
    processors: usize,
}

impl Description {
    pub(super) fn line(&self) -> String {
        format!("{}, {} processors, {}", self.cpu, self.processors, self.instruction_set)
    }
}
