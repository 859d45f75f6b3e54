//! What sessions take on disk, without a walk through all of them each time.

use std::collections::HashMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// All sessions are counted again after this time, as other processes may have changed some.
const RECOUNT: Duration = Duration::from_secs(10);

/// The bytes that sessions take on disk, counted when somebody asks. What this process changes is known at once.
#[derive(Debug, Default)]
pub(super) struct Sizes {
    counted: Mutex<Option<Counted>>,
}

#[derive(Debug)]
struct Counted {
    at: Instant,
    by_name: HashMap<String, u64>,
}

impl Sizes {
    /// The bytes of the sessions in `folder`, of which `names` are all.
    ///
    /// # Errors
    ///
    /// Of `names`; [`Error::Io`] for the folder of a session that cannot be read.
    pub(super) fn sum(
        &self,
        folder: &Path,
        names: impl Fn() -> Result<Vec<String>>,
    ) -> Result<u64> {
        let mut known = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = known.take().filter(|counted| counted.at.elapsed() < RECOUNT);
        let counted = match fresh {
            Some(counted) => counted,
            None => {
                let at = Instant::now();
                let size = |name: String| Ok((size(folder, &name)?, name));
                let sizes = names()?.into_iter().map(size).collect::<Result<Vec<_>>>()?;
                let by_name = sizes.into_iter().map(|(size, name)| (name, size)).collect();
                Counted { at, by_name }
            }
        };
        let sum = counted.by_name.values().fold(0, |sum: u64, size| sum.saturating_add(*size));
        *known = Some(counted);
        Ok(sum)
    }

    /// Counts a session again, which has changed or is gone.
    pub(super) fn changed(&self, folder: &Path, name: &str) {
        let mut known = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(counted) = known.as_mut() else { return };
        match size(folder, name) {
            Ok(size) => {
                counted.by_name.insert(name.to_owned(), size);
            }
            // Who asks next is told.
            Err(_) => *known = None,
        }
    }
}

/// The bytes of a session's files; a file, and the session, may be deleted meanwhile.
fn size(folder: &Path, name: &str) -> Result<u64> {
    let path = folder.join(name);
    let unless_gone = |result: io::Result<u64>| match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
        result => result,
    };
    let sum = || -> io::Result<u64> {
        let mut sum = 0_u64;
        for entry in fs::read_dir(&path)? {
            let len = entry?.metadata().map(|file| file.len());
            sum = sum.saturating_add(unless_gone(len)?);
        }
        Ok(sum)
    };
    unless_gone(sum()).map_err(|error| Error::io(&path, error))
}
