//! `metrics.jsonl`: the measurements of a run, one JSON object a line.
//!
//! A line is handed to the system in one piece, at the file's end. Readers find whole lines, and at
//! most one half line after a power cut. This is the one file that is not replaced whole. It grows with
//! every step, and a lost tail costs no more than a piece of a curve.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::checkpoint::atomic_write;
use crate::error::{Error, Result};
use crate::files;

/// What was measured when a step was done. Keys that a later version adds are ignored.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Metrics {
    /// Steps done, from 1.
    pub step: u64,
    /// Tokens trained on so far, in all steps.
    pub tokens: u64,
    /// Seconds of training so far, over all resumptions.
    pub seconds: f64,
    /// Mean loss of the step's batch, in nats per predicted token.
    pub loss: f64,
    /// Mean loss on the validation data, in nats per predicted token, when it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub valid_loss: Option<f64>,
    /// The same in bits per byte of text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Tokens per second lately.
    pub tokens_per_second: f64,
    /// Bytes of memory that the process holds.
    pub memory: u64,
}

/// The file of a run's metrics, open for more.
///
/// ```
/// use boostr::train::{Metrics, MetricsLog, read_metrics};
///
/// # let folder = std::env::temp_dir().join(format!("boostr-doc-log-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// let path = folder.join("metrics.jsonl");
/// let mut log = MetricsLog::create(&path)?;
/// log.append(&Metrics { step: 1, loss: 6.9, ..Metrics::default() })?;
/// log.append(&Metrics { step: 2, loss: 6.5, ..Metrics::default() })?;
/// // Killed, and resumed from a checkpoint after step 1.
/// let mut log = MetricsLog::resume(&path, 1)?;
/// log.append(&Metrics { step: 2, loss: 6.4, ..Metrics::default() })?;
/// let losses: Vec<f64> = read_metrics(&path)?.iter().map(|line| line.loss).collect();
/// assert_eq!(losses, [6.9, 6.4]);
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines; whatever follows them is from a write that failed.
    len: u64,
}

impl MetricsLog {
    /// A log without lines, in place of what is there.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] as [`atomic_write`].
    pub fn create(path: &Path) -> Result<Self> {
        Self::with(path, &[])
    }

    /// The log of a run that goes on after `step`: later lines are dropped, and a half one at the end. A
    /// missing file is as one without lines.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] as [`read_metrics`], and then the file is left as it was; [`Error::Io`] as
    /// [`atomic_write`].
    pub fn resume(path: &Path, step: u64) -> Result<Self> {
        let bytes = match read(path) {
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read?,
        };
        let mut kept = Vec::new();
        for (line, metrics) in parse(path, &bytes)? {
            if metrics.step <= step {
                kept.extend_from_slice(line);
            }
        }
        Self::with(path, &kept)
    }

    fn with(path: &Path, lines: &[u8]) -> Result<Self> {
        atomic_write(path, |out| out.write_all(lines))?;
        let file = OpenOptions::new().write(true).open(path).map_err(|e| Error::io(path, e))?;
        Ok(Self { path: path.to_path_buf(), file, len: lines.len() as u64 })
    }

    /// Adds a line. It is the system's when this returns: it survives the process, but not a power cut.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when a number is not finite, which JSON cannot say. [`Error::Io`] when the
    /// system refuses, as when the disk is full: the lines before are whole, and later ones may be added.
    pub fn append(&mut self, metrics: &Metrics) -> Result<()> {
        let refuse = |reason| Error::Argument { name: "metrics", reason };
        let value = serde_json::to_value(metrics).map_err(|e| refuse(e.to_string()))?;
        // What is absent is left out, so a null is a number that is not finite.
        let mut fields = value.as_object().into_iter().flatten();
        if let Some((name, _)) = fields.find(|(_, value)| value.is_null()) {
            return Err(refuse(format!("`{name}` is not a finite number")));
        }
        let line = format!("{value}\n");
        let written = self.cut().and_then(|()| self.file.write_all(line.as_bytes()));
        if let Err(e) = written {
            // Where even this fails, the next line begins with it.
            let _ = self.cut();
            return Err(Error::io(&self.path, e));
        }
        self.len += line.len() as u64;
        Ok(())
    }

    /// Goes to the end of the whole lines and removes what follows them.
    fn cut(&mut self) -> io::Result<()> {
        let found = self.file.metadata()?.len();
        if found > self.len {
            self.file.set_len(self.len)?;
        }
        // Someone else may have cut more.
        self.len = self.len.min(found);
        self.file.seek(SeekFrom::Start(self.len))?;
        Ok(())
    }
}

/// All lines of a log, without a half one at the end.
///
/// # Errors
///
/// [`Error::Io`] when the system refuses, [`Error::Format`] naming the first line that is not one of a log.
pub fn read_metrics(path: &Path) -> Result<Vec<Metrics>> {
    let bytes = read(path)?;
    Ok(parse(path, &bytes)?.into_iter().map(|(_, metrics)| metrics).collect())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    files::open(path)?.read_to_end(&mut bytes).map_err(|e| Error::io(path, e))?;
    Ok(bytes)
}

/// The whole lines, with their ends, and what they say.
fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<Vec<(&'a [u8], Metrics)>> {
    let mut lines = Vec::new();
    for (i, line) in bytes.split_inclusive(|&b| b == b'\n').enumerate() {
        if !line.ends_with(b"\n") {
            break;
        }
        let metrics = serde_json::from_slice(line).map_err(|e| {
            let said = e.to_string();
            // Where it says so is a place within the line.
            let reason = said.split(" at line ").next().unwrap_or(&said);
            Error::format(path, format!("line {}, column {}: {reason}", i + 1, e.column()))
        })?;
        lines.push((line, metrics));
    }
    Ok(lines)
}
