//! Writing a file so that a reader finds the old one or the new one, never a part.
//!
//! The bytes go to a new file in the same folder, are forced to disk, and the new file then takes
//! the old one's name in one step. Last the folder is forced to disk, for the name lives there.
//! Only when all of that has succeeded is the file called saved.

use std::collections::hash_map::RandomState;
use std::fs::{self, File};
#[cfg(target_os = "linux")]
use std::fs::{OpenOptions, TryLockError};
use std::hash::BuildHasher;
use std::io::{self, BufWriter, Write};
#[cfg(target_os = "linux")]
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use super::entry::cut;
use crate::error::{Error, Result};

/// Symbolic links followed before the system is asked what it makes of so many.
const MAX_LINKS: usize = 40;

/// Bytes of the final name kept in the temporary one, which must stay below 255.
const MAX_STEM: usize = 180;

/// Replaces the file at `path` by what `write` writes, or leaves everything as it was.
///
/// A symbolic link is followed: its target is replaced, the link stays. The new file has the mode
/// of the old one, or the one that any new file gets (0666 less the umask). While it is being
/// written it is called `.NAME.tmp-PID-RANDOM`; only a killed process leaves it behind, and on Linux the
/// next write of the same file removes it, also by a process of the same number.
///
/// # Errors
///
/// [`Error::Io`] with the path for whatever fails, `write` included. The old file is then intact,
/// with one exception. If forcing the folder to disk failed, the very last step, the new file is in
/// place but may not survive a power cut.
///
/// ```
/// let path = std::env::temp_dir().join(format!("boostr-doc-{}", std::process::id()));
/// boostr::checkpoint::atomic_write(&path, |out| out.write_all(b"all or nothing"))?;
/// assert_eq!(std::fs::read(&path)?, b"all or nothing");
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn atomic_write(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<()> {
    replace(path, write).map_err(|e| Error::io(path, e))
}

fn replace(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let target = follow_links(path)?;
    let old = match fs::metadata(&target) {
        Ok(old) if old.is_file() => Some(old),
        Ok(old) if old.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Ok(_) => return Err(io::Error::other("not a regular file")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e),
    };
    let create = |path: &Path| File::create_new(path);
    put(&target, true, create, |out| {
        if let Some(old) = old {
            // Before the first byte, so that a private file's successor is never readable by others.
            out.get_ref().set_permissions(old.permissions())?;
        }
        write(out)
    })
}

/// Writes a new file, made by `create`, and gives it the name `target`; forces both to disk if it is to be `lasting`.
pub(super) fn put(
    target: &Path,
    lasting: bool,
    create: impl Fn(&Path) -> io::Result<File>,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<()> {
    let (path, file, _claim) = create_beside(target, create)?;
    let temp = Temp { path: Some(path) };
    let mut out = BufWriter::with_capacity(1 << 18, file);
    write(&mut out)?;
    let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
    if lasting {
        file.sync_all()?;
    }
    drop(file);
    temp.rename_to(target)?;
    if lasting { sync_folder(folder_of(target)) } else { Ok(()) }
}

/// The path that a chain of symbolic links ends at, whether or not there is a file.
pub(crate) fn follow_links(path: &Path) -> io::Result<PathBuf> {
    let mut target = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&target) {
            Ok(next) => target = target.parent().unwrap_or(Path::new("")).join(next),
            Err(_) => return Ok(target),
        }
    }
    fs::metadata(&target).map(|_| target)
}

fn folder_of(target: &Path) -> &Path {
    target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Forces the names in a folder to disk.
#[cfg(unix)]
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Elsewhere a folder cannot be opened as a file, and the system keeps its names safe by itself.
#[cfg(not(unix))]
pub(crate) fn sync_folder(_folder: &Path) -> io::Result<()> {
    Ok(())
}

/// What all temporary names of this process have, and those of another with its number have not.
static RUN: LazyLock<u32> = LazyLock::new(|| RandomState::new().hash_one(0_u8) as u32);

/// A lock on what is being made: who holds it is alive, wherever it runs. Without one the number of the process has to do.
pub(crate) struct Claim(#[expect(dead_code, reason = "held until it is dropped")] Option<File>);

impl Claim {
    #[cfg(unix)]
    fn on(path: &Path) -> Self {
        Self(File::open(path).ok().filter(|file| file.try_lock().is_ok()))
    }

    /// Elsewhere a lock would keep the file from being written.
    #[cfg(not(unix))]
    fn on(_path: &Path) -> Self {
        Self(None)
    }
}

/// Makes what is to become `target` beside it, as `.NAME.tmp-PID-RANDOM`; returns that path, and a claim to be held as
/// long as it has that name.
///
/// On Linux, what killed processes left beside `target` under such names is removed first. `create` must
/// fail with `AlreadyExists` where something is.
pub(crate) fn create_beside<T>(
    target: &Path,
    create: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(PathBuf, T, Claim)> {
    let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    let prefix = format!(".{}.tmp-", cut(&name, MAX_STEM));
    #[cfg(target_os = "linux")]
    remove_abandoned(folder_of(target), |name| name.strip_prefix(&prefix));
    let mut attempts = 0..8;
    loop {
        let random = RandomState::new().hash_one(attempts.start) as u32;
        let name = format!("{prefix}{}-{:08x}{random:08x}", std::process::id(), *RUN);
        let path = target.with_file_name(name);
        match create(&path) {
            Ok(created) => {
                let claim = Claim::on(&path);
                return Ok((path, created, claim));
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && attempts.next().is_some() => {}
            Err(e) => return Err(e),
        }
    }
}

/// Removes from a folder what killed processes of this user left in it under the names of [`create_beside`]; does
/// nothing where there is no /proc.
pub(crate) fn clean(folder: &Path) {
    #[cfg(target_os = "linux")]
    remove_abandoned(folder, |name| {
        name.strip_prefix('.')?.rsplit_once(".tmp-").map(|(_, rest)| rest)
    });
    #[cfg(not(target_os = "linux"))]
    let _ = folder;
}

/// Removes this user's files and folders in whose names `rest` finds `PID-RANDOM`, of which the process is dead: there is
/// none of that number, or it is this one, which did not make them. The first process of a container has the same number
/// each time.
///
/// Everything else stays, and so does what cannot be removed: nothing depends on it. A process in another container that
/// shares the folder, but not the numbers of processes, claims what it makes.
#[cfg(target_os = "linux")]
fn remove_abandoned(folder: &Path, rest: impl Fn(&str) -> Option<&str>) {
    use std::os::unix::fs::MetadataExt;

    // Without /proc every process would seem dead, and it may hide those of other users.
    let (Ok(own), Ok(entries)) = (fs::metadata("/proc/self"), fs::read_dir(folder)) else { return };
    for entry in entries.map_while(io::Result::ok) {
        let name = entry.file_name();
        let Some(maker) = name.to_str().and_then(|name| Maker::of(rest(name)?)) else { continue };
        // Those of a link are its own.
        let (true, Ok(metadata)) = (maker.is_gone(), entry.metadata()) else { continue };
        if metadata.uid() != own.uid() || metadata.is_symlink() || is_claimed(&entry.path()) {
            continue;
        }
        let _ = match metadata.file_type() {
            kind if kind.is_file() => fs::remove_file(entry.path()),
            kind if kind.is_dir() => fs::remove_dir_all(entry.path()),
            _ => Ok(()),
        };
    }
}

/// Whether somebody makes it now.
#[cfg(target_os = "linux")]
fn is_claimed(path: &Path) -> bool {
    use std::os::unix::fs::OpenOptionsExt;

    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let locked = options.open(path).map(|file| file.try_lock());
    matches!(locked, Ok(Err(TryLockError::WouldBlock)))
}

/// Who made what has a temporary name.
#[cfg(target_os = "linux")]
struct Maker<'a> {
    pid: &'a str,
    run: &'a str,
}

#[cfg(target_os = "linux")]
impl<'a> Maker<'a> {
    /// By `PID-RANDOM`, if that is all there is.
    fn of(name: &'a str) -> Option<Self> {
        let (pid, random) = name.split_once('-')?;
        let is_pid = pid.parse::<NonZeroU32>().is_ok_and(|number| number.to_string() == pid);
        let is_hex = random.bytes().all(|b| b"0123456789abcdef".contains(&b));
        (is_pid && is_hex && random.len() == 16).then_some(Self { pid, run: random.get(..8)? })
    }

    fn is_gone(&self) -> bool {
        if self.pid == std::process::id().to_string() {
            return self.run != format!("{:08x}", *RUN);
        }
        matches!(Path::new("/proc").join(self.pid).try_exists(), Ok(false))
    }
}

/// A file that is removed when it is dropped before it got its final name.
struct Temp {
    path: Option<PathBuf>,
}

impl Temp {
    fn rename_to(mut self, target: &Path) -> io::Result<()> {
        if let Some(path) = &self.path {
            fs::rename(path, target)?;
        }
        self.path = None;
        Ok(())
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // The first error is the one to report; this one has nobody to tell.
            let _ = fs::remove_file(path);
        }
    }
}
