//! A folder whose files are its owner's alone.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use super::atomic::{clean, put, sync_folder};
use super::lock::open_own;
use crate::error::{Error, Result};
use crate::files;

/// A folder that nobody but its owner may enter, with files that are written whole or not at all.
///
/// ```
/// use boostr::checkpoint::PrivateFolder;
///
/// let path = std::env::temp_dir().join(format!("boostr-doc-private-{}", std::process::id()));
/// let folder = PrivateFolder::open(&path)?;
/// folder.write("note", b"mine")?;
/// assert_eq!(folder.read("note", 100)?, b"mine");
/// assert_eq!(folder.files()?.next().unwrap().name, "note");
/// assert!(folder.remove("note")? && !folder.remove("note")?);
/// # std::fs::remove_dir_all(&path).unwrap();
/// # Ok::<(), boostr::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PrivateFolder {
    path: PathBuf,
    exposed: Option<String>,
}

/// A file of a [`PrivateFolder`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrivateFile {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub len: u64,
    /// When it was written, or [touched](PrivateFolder::touch).
    pub modified: SystemTime,
}

impl PrivateFolder {
    /// The folder at `path`, made if need be, with mode 0700. One that is there and empty gets that mode.
    ///
    /// # Errors
    ///
    /// As [`open_of`](Self::open_of).
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_of(path, |_| false)
    }

    /// The folder at `path`, made if need be, with mode 0700. One that is there gets that mode if it is this user's and
    /// all in it `is_ours`, which is asked about paths; else it keeps its own, see [`exposed`](Self::exposed). What killed
    /// processes left half written in it is removed.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] when all may write into it, or its mode cannot be changed; [`Error::Io`] when the system refuses.
    pub fn open_of(path: &Path, is_ours: impl Fn(&Path) -> bool) -> Result<Self> {
        let io = |error| Error::io(path, error);
        private().recursive(true).create(path).map_err(io)?;
        // One folder, wherever the process goes.
        let path = fs::canonicalize(path).map_err(io)?;
        clean(&path);
        let exposed = close(&path, is_ours)?;
        Ok(Self { path, exposed })
    }

    /// Why others may look into the folder, if they may: its mode stays where not all in it is ours.
    #[must_use]
    pub fn exposed(&self) -> Option<&str> {
        self.exposed.as_deref()
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn at(&self, name: &str) -> Result<PathBuf> {
        let mut parts = Path::new(name).components();
        match (parts.next(), parts.next()) {
            (Some(Component::Normal(one)), None) if one == name => Ok(self.path.join(name)),
            _ => {
                let reason = format!("expected the name of a file, found {name:?}");
                Err(Error::Argument { name: "name", reason })
            }
        }
    }

    /// Writes a file, in place of one that is there. It is on disk when this returns.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for what is no name of a file; [`Error::Io`] when the system refuses: what was there stays.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.put(name, bytes, true)
    }

    /// The same, but not forced to disk: after a power cut the file may be torn, so who reads it checks it.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub(crate) fn write_soon(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.put(name, bytes, false)
    }

    fn put(&self, name: &str, bytes: &[u8], lasting: bool) -> Result<()> {
        let path = self.at(name)?;
        let create = |path: &Path| open_own(path, OpenOptions::new().write(true).create_new(true));
        put(&path, lasting, create, |out| out.write_all(bytes))
            .map_err(|error| Error::io(&path, error))
    }

    /// A file that is there, to be read. A link is not followed.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub(crate) fn file(&self, name: &str) -> Result<File> {
        let path = self.at(name)?;
        open_own(&path, OpenOptions::new().read(true)).map_err(|error| Error::io(&path, error))
    }

    /// All bytes of a file of at most `most`. A link is not followed.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write); [`Error::Format`] when it is longer.
    pub fn read(&self, name: &str, most: u64) -> Result<Vec<u8>> {
        files::read_from(self.file(name)?, self.at(name)?, most)
    }

    /// Removes a file; `false` when there is none.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn remove(&self, name: &str) -> Result<bool> {
        let path = self.at(name)?;
        match fs::remove_file(&path).and_then(|()| sync_folder(&self.path)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(Error::io(&path, error)),
        }
    }

    /// Says that a file was used now.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn touch(&self, name: &str) -> Result<()> {
        let path = self.at(name)?;
        let touch = |file: File| file.set_modified(SystemTime::now());
        let opened = open_own(&path, OpenOptions::new().write(true));
        opened.and_then(touch).map_err(|error| Error::io(&path, error))
    }

    /// All [`files`](Self::files).
    ///
    /// # Errors
    ///
    /// As [`files`](Self::files).
    pub fn list(&self) -> Result<Vec<PrivateFile>> {
        Ok(self.files()?.collect())
    }

    /// The regular files in it, in no order, but those whose names begin with a dot.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the folder cannot be read.
    pub fn files(&self) -> Result<impl Iterator<Item = PrivateFile>> {
        let entries = fs::read_dir(&self.path).map_err(|error| Error::io(&self.path, error))?;
        let file = |entry: io::Result<fs::DirEntry>| {
            let entry = entry.ok()?;
            let metadata = entry.metadata().ok().filter(fs::Metadata::is_file)?;
            let name = entry.file_name().into_string().ok()?;
            let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            Some(PrivateFile { name, len: metadata.len(), modified })
        };
        Ok(entries.filter_map(file).filter(|file| !file.name.starts_with('.')))
    }
}

/// Makes folders for this user alone.
pub(crate) fn private() -> fs::DirBuilder {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
}

/// Closes a folder to all but its owner, or says why it stays open.
#[cfg(unix)]
fn close(path: &Path, is_ours: impl Fn(&Path) -> bool) -> Result<Option<String>> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    const OTHERS: u32 = 0o077;
    const WRITABLE: u32 = 0o002;
    const STICKY: u32 = 0o1000;
    let io = |error| Error::io(path, error);
    let metadata = fs::metadata(path).map_err(io)?;
    let mode = metadata.permissions().mode() & 0o7777;
    let open = |why: &str| format!("its mode {mode:04o} lets others in{why}");
    let refuse = |why: &str| Err(Error::format(path, open(why)));
    if mode & OTHERS == 0 {
        return Ok(None);
    }
    if mode & STICKY != 0 {
        return refuse(", as all share it: name a folder of its own in it");
    }
    let strange = || -> io::Result<Option<String>> {
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            if !is_ours(&entry.path()) {
                return Ok(Some(format!(
                    "`{}` in it is not ours",
                    entry.file_name().to_string_lossy().escape_debug()
                )));
            }
        }
        Ok(None)
    };
    let kept = if path.parent().is_none() {
        Some("it is the root of all folders".to_owned())
    } else if metadata.uid() != rustix::process::geteuid().as_raw() {
        Some("it is another user's".to_owned())
    } else {
        strange().map_err(io)?
    };
    match kept {
        Some(kept) if mode & WRITABLE != 0 => {
            refuse(&format!(" to write, and stays, as {kept}: name a folder of its own"))
        }
        Some(kept) => Ok(Some(open(&format!(", and stays, as {kept}")))),
        None => match fs::set_permissions(path, fs::Permissions::from_mode(0o700)) {
            Ok(()) => Ok(None),
            Err(error) => {
                let shown = path.display();
                refuse(&format!(
                    ", and it cannot be changed ({error}): its owner can, by `chmod 700 {shown}`"
                ))
            }
        },
    }
}

/// Elsewhere a folder has the rights of the one that it is in.
#[cfg(not(unix))]
fn close(_path: &Path, _is_ours: impl Fn(&Path) -> bool) -> Result<Option<String>> {
    Ok(None)
}
