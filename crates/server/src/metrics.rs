//! What is counted, as Prometheus reads it.
//!
//! Requests and times are counted here; what the engine counts is copied when someone looks.

use std::fmt::{Display, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use boostr::engine::Stats;
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry, TextEncoder,
};

/// Upper bounds of whole requests, in seconds.
const REQUEST: &[f64] = &[0.005, 0.02, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0];
/// Of times to the first token.
const FIRST: &[f64] = &[0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
/// Of times between tokens.
const BETWEEN: &[f64] = &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];

/// The counters of a server, which share nothing with those of another.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    request_seconds: HistogramVec,
    rejected: IntCounterVec,
    pub(crate) first_token: Histogram,
    pub(crate) inter_token: Histogram,
    /// Tokens of prompts that were computed beside the engine
    pub(crate) beside: AtomicU64,
    /// Tokens that were generated there
    pub(crate) generated_beside: AtomicU64,
    /// Panics of handlers; the engine counts its own
    pub(crate) panics: AtomicU64,
}

impl Metrics {
    pub(crate) fn new() -> prometheus::Result<Self> {
        let histogram = |name: &str, help: &str, buckets: &[f64]| {
            HistogramOpts::new(name, help).buckets(buckets.to_vec())
        };
        let metrics = Self {
            registry: Registry::new(),
            requests: IntCounterVec::new(
                Opts::new("boostr_requests_total", "Requests that were answered"),
                &["route", "code"],
            )?,
            request_seconds: HistogramVec::new(
                histogram(
                    "boostr_request_seconds",
                    "From a request to the end of its answer",
                    REQUEST,
                ),
                &["route"],
            )?,
            rejected: IntCounterVec::new(
                Opts::new("boostr_rejected_total", "Requests that the engine did not take"),
                &["reason"],
            )?,
            first_token: Histogram::with_opts(histogram(
                "boostr_time_to_first_token_seconds",
                "From a request to the first token of its answer",
                FIRST,
            ))?,
            inter_token: Histogram::with_opts(histogram(
                "boostr_inter_token_seconds",
                "Between two tokens of an answer",
                BETWEEN,
            ))?,
            beside: AtomicU64::new(0),
            generated_beside: AtomicU64::new(0),
            panics: AtomicU64::new(0),
        };
        metrics.registry.register(Box::new(metrics.requests.clone()))?;
        metrics.registry.register(Box::new(metrics.request_seconds.clone()))?;
        metrics.registry.register(Box::new(metrics.rejected.clone()))?;
        metrics.registry.register(Box::new(metrics.first_token.clone()))?;
        metrics.registry.register(Box::new(metrics.inter_token.clone()))?;
        Ok(metrics)
    }

    /// An answer has its status. `route` is a pattern of ours, no text of a client.
    pub(crate) fn answered(&self, route: &str, code: u16) {
        self.requests.with_label_values(&[route, &code.to_string()]).inc();
    }

    /// An answer has ended.
    pub(crate) fn ended(&self, route: &str, time: Duration) {
        self.request_seconds.with_label_values(&[route]).observe(time.as_secs_f64());
    }

    /// The engine did not take a request.
    pub(crate) fn rejected(&self, reason: &str) {
        self.rejected.with_label_values(&[reason]).inc();
    }

    /// All of it as text, and other gauges: each with its name, its help and its value.
    pub(crate) fn text(
        &self,
        engine: Option<Stats>,
        own: &[(&str, &str, usize)],
    ) -> prometheus::Result<String> {
        let mut text = String::new();
        TextEncoder::new().encode_utf8(&self.registry.gather(), &mut text)?;
        if let Some(stats) = engine {
            let mut line = |name: &str, kind: &str, help: &str, value: &dyn Display| {
                let name = format!("boostr_{name}");
                let _ =
                    writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
            };
            let counter = "counter";
            line(
                "prompt_tokens_total",
                counter,
                "Tokens of prompts that were computed",
                &(stats.prompt_tokens + self.beside.load(Ordering::Relaxed)),
            );
            line(
                "generated_tokens_total",
                counter,
                "Tokens that were generated",
                &(stats.generated_tokens + self.generated_beside.load(Ordering::Relaxed)),
            );
            let skipped = "Tokens not computed again thanks to a state or a snapshot";
            line("tokens_skipped_total", counter, skipped, &stats.skipped_tokens);
            line(
                "state_cache_hits_total",
                counter,
                "Requests that began at a snapshot",
                &stats.snapshot_hits,
            );
            line(
                "drafted_tokens_total",
                counter,
                "Tokens that were guessed",
                &stats.drafted_tokens,
            );
            let accepted = "Guesses that were right";
            line("accepted_tokens_total", counter, accepted, &stats.accepted_tokens);
            line("cancelled_total", counter, "Requests that were cancelled", &stats.cancelled);
            line("failed_total", counter, "Requests that failed", &stats.failed);
            let panics = stats.panics + self.panics.load(Ordering::Relaxed);
            line("panics_total", counter, "Panics that were caught", &panics);
            line("steps_total", counter, "Forwards of the model", &stats.steps);
            line("queue_depth", "gauge", "Requests that wait", &stats.queued);
            line("running", "gauge", "Requests that are computed", &stats.running);
            line("state_bytes", "gauge", "Memory of running states", &stats.state_bytes);
            line("snapshots", "gauge", "Snapshots that are kept", &stats.snapshots);
            line("snapshot_bytes", "gauge", "Memory of snapshots", &stats.snapshot_bytes);
            line("state_cache_files", "gauge", "States on disk", &stats.files);
            line(
                "state_cache_disk_bytes",
                "gauge",
                "Bytes of all states on disk",
                &stats.file_bytes,
            );
            let reads = "States that were read from disk";
            line("state_cache_disk_reads_total", counter, reads, &stats.file_reads);
        }
        for (name, help, value) in own {
            let _ = writeln!(
                text,
                "# HELP boostr_{name} {help}\n# TYPE boostr_{name} gauge\nboostr_{name} {value}"
            );
        }
        if let Some(bytes) = resident_bytes() {
            let name = "process_resident_memory_bytes";
            let _ = writeln!(
                text,
                "# HELP {name} Memory of the process\n# TYPE {name} gauge\n{name} {bytes}"
            );
        }
        Ok(text)
    }
}

/// The memory that this process holds, where Linux says so.
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let rest = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    rest.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_in_the_text() {
        let metrics = Metrics::new().unwrap();
        metrics.answered("/v1/models", 200);
        metrics.answered("/v1/models", 200);
        metrics.rejected("queue_full");
        metrics.first_token.observe(0.01);
        let text =
            metrics.text(Some(Stats { running: 3, ..Stats::default() }), &[("x", "X", 5)]).unwrap();
        for line in [
            "boostr_requests_total{code=\"200\",route=\"/v1/models\"} 2",
            "boostr_rejected_total{reason=\"queue_full\"} 1",
            "boostr_time_to_first_token_seconds_count 1",
            "boostr_running 3",
            "boostr_x 5",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
    }
}
