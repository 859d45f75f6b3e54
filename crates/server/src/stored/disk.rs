//! Answers in files: `SCOPE-ID.jsonl` in a folder of their own, with the checksum of the rest, the answer, and the items
//! before it, each in a line.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use boostr::Error;
use boostr::checkpoint::{PrivateFolder, crc32};
use boostr::error::chain;
use serde_json::Value;

use super::{Key, MAX_BYTES, Stored};

const ENDING: &str = ".jsonl";
/// Longest file that is read: the checksum and the ends of lines are not among the bytes of an answer.
const MAX_FILE: u64 = 2 * MAX_BYTES as u64;

/// How many bytes answers may take on disk; `None` where that cannot be counted now.
pub(crate) type Left = Box<dyn Fn() -> Option<u64> + Send + Sync>;

/// The files of answers. What fails is said in the log, and the answer is in memory.
pub(super) struct Disk {
    folder: PrivateFolder,
    left: Left,
    /// Who reads or writes files.
    turn: Mutex<()>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl Disk {
    pub(super) fn new(folder: PrivateFolder, left: Left) -> Self {
        Self { folder, left, turn: Mutex::default() }
    }

    /// Who works with files, until this is dropped.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn left(&self) -> Option<u64> {
        (self.left)()
    }

    /// The answers that are there with their bytes, the least recently used first. Of more than `most` these are removed.
    /// What no server wrote here is left alone.
    pub(super) fn list(&self, most: usize) -> boostr::Result<Vec<(Key, usize)>> {
        let (mut found, mut strange) = (BTreeMap::new(), 0_usize);
        for file in self.folder.files()? {
            let Some(key) = key(&file.name).filter(|_| file.len <= MAX_FILE) else {
                strange += 1;
                continue;
            };
            found.insert((file.modified, file.name), (key, file.len as usize));
            if found.len() > most
                && let Some((_, (oldest, _))) = found.pop_first()
            {
                self.drop_all(&[oldest]);
            }
        }
        if strange > 0 {
            let folder = self.folder.path().display();
            tracing::warn!(%folder, files = strange, "files that are no answers are ignored");
        }
        Ok(found.into_values().collect())
    }

    /// An answer and its bytes, if there is one.
    ///
    /// # Errors
    ///
    /// Why it cannot be read, without the names of folders.
    pub(super) fn read(&self, key: &Key) -> Result<Option<(Stored, usize)>, String> {
        let name = name(key);
        let read = self.folder.read(&name, MAX_FILE);
        let bytes = match read {
            Ok(bytes) => bytes,
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Ok(None);
            }
            Err(error) => {
                tracing::warn!(error = chain(&error), "an answer cannot be read");
                return Err(format!("the file `{name}` of this response cannot be read"));
            }
        };
        match decode(&bytes).filter(|stored| stored.response["id"] == key.id.as_str()) {
            Some(stored) => Ok(Some((stored, bytes.len()))),
            None => {
                let path = self.folder.path().join(&name);
                tracing::warn!(path = %path.display(), "an answer is damaged");
                Err(format!("the file `{name}` of this response is damaged"))
            }
        }
    }

    /// Writes an answer; whether it is there.
    pub(super) fn write(&self, key: &Key, text: &[u8]) -> bool {
        let written = self.folder.write(&name(key), text);
        let say = |error: &Error| tracing::warn!(error = chain(error), "an answer is not on disk");
        written.inspect_err(say).is_ok()
    }

    /// Removes an answer; `false` when there is none.
    ///
    /// # Errors
    ///
    /// Why it stays, without the names of folders.
    pub(super) fn remove(&self, key: &Key) -> Result<bool, String> {
        let name = name(key);
        self.folder.remove(&name).map_err(|error| {
            tracing::warn!(error = chain(&error), "an answer that is dropped stays on disk");
            format!("the file `{name}` of this response cannot be removed")
        })
    }

    /// Removes answers that have to make room. What stays is in the log.
    pub(super) fn drop_all(&self, keys: &[Key]) {
        for key in keys {
            let _ = self.remove(key);
        }
    }

    /// Says that an answer was used. One that is not there yet, or no more, was used too.
    pub(super) fn touch(&self, key: &Key) {
        let _ = self.folder.touch(&name(key));
    }
}

fn name(key: &Key) -> String {
    format!("{:016x}-{}{ENDING}", key.scope, key.id)
}

/// Whether a file in the folder is an answer.
pub(crate) fn is_ours(path: &Path) -> bool {
    path.file_name().and_then(|name| key(name.to_str()?)).is_some()
}

fn key(name: &str) -> Option<Key> {
    let (scope, id) = name.strip_suffix(ENDING)?.split_once('-')?;
    let key = Key::new(u64::from_str_radix(scope, 16).ok()?, id)?;
    (self::name(&key) == name).then_some(key)
}

/// An answer as a file.
pub(super) fn encode(stored: &Stored) -> Vec<u8> {
    let mut lines = Vec::new();
    for value in std::iter::once(&stored.response).chain(&stored.input) {
        lines.extend(value.to_string().bytes());
        lines.push(b'\n');
    }
    [format!("{:08x}\n", crc32(0, &lines)).as_bytes(), &lines].concat()
}

fn decode(bytes: &[u8]) -> Option<Stored> {
    let (sum, lines) = std::str::from_utf8(bytes).ok()?.split_once('\n')?;
    if u32::from_str_radix(sum, 16).ok()? != crc32(0, lines.as_bytes()) {
        return None;
    }
    let values = lines.lines().map(serde_json::from_str::<Value>);
    let mut values = values.collect::<Result<Vec<_>, _>>().ok()?.into_iter();
    Some(Stored { response: values.next()?, input: values.collect() })
}
