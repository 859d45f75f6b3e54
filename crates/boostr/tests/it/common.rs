//! Shared by the tests of checkpoints: a folder that removes itself, random numbers, mutations, and
//! writers of small files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use boostr::backend::{self, CpuClient};

#[path = "weight_files.rs"]
pub mod weight_files;

pub use weight_files::{safetensors_file, torch_zip};

/// The folders of fixtures/models, sorted: a model is tested by its folder alone.
pub fn models() -> Vec<&'static str> {
    static NAMES: LazyLock<Vec<String>> = LazyLock::new(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let folders = entries.filter(|path| path.join("golden.safetensors").is_file());
        let name = |path: PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        let mut names: Vec<String> = folders.map(name).collect();
        names.sort();
        assert!(names.len() >= 13, "{names:?}");
        names
    });
    NAMES.iter().map(String::as_str).collect()
}

/// Those whose layers have delta rules.
pub fn delta_models() -> Vec<&'static str> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    let is_delta = |name: &&str| {
        let config = fs::read_to_string(folder.join(name).join("config.json")).unwrap();
        ["linear_key_head_dim", "linear_attn_config"].iter().any(|key| config.contains(key))
    };
    let names: Vec<_> = models().into_iter().filter(is_delta).collect();
    assert!(names.len() >= 2, "{names:?}");
    names
}

/// What `--exact` takes for the test `name` of the module whose `module_path!()` is given.
pub fn test_name(module: &str, name: &str) -> String {
    let (_binary, module) = module.split_once("::").expect("a module of a test binary");
    format!("{module}::{name}")
}

/// A client of the CPU at the level that `BOOSTR_TEST_ISA` names, else at the best.
pub fn cpu() -> CpuClient {
    match std::env::var("BOOSTR_TEST_ISA") {
        Ok(name) => backend::cpu_at(name.parse().unwrap()).unwrap(),
        Err(_) => backend::cpu(),
    }
}

/// A new folder for one test.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("boostr-checkpoint-{}-{count}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(&self.0)
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// Marsaglia's xorshift64: the same numbers on every run and every machine.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `bound`, or 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % (bound as u64).max(1)) as usize
    }

    /// One to four changes: flipped bytes, cuts, splices of `other`, repeats, extreme lengths.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        const EXTREME: [u64; 8] =
            [0, 1, 0x7fff_ffff, 0xffff_ffff, 1 << 32, i64::MAX as u64, u64::MAX - 7, u64::MAX];
        const TELLING: &[u8] = b"\x00\x01\x7f\x80\xff{}[]\",:(0123456789tuaeQRbcq.X";
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            match self.below(8) {
                0 => bytes.truncate(at),
                1 => bytes.iter_mut().skip(at).take(1).for_each(|b| *b ^= 1 << (at % 8)),
                2 | 3 => {
                    let byte = TELLING[self.below(TELLING.len())];
                    bytes.iter_mut().skip(at).take(1).for_each(|b| *b = byte);
                }
                4 => {
                    let from = self.below(other.len());
                    let len = self.below(24).min(other.len() - from);
                    bytes.splice(at..at, other[from..from + len].iter().copied());
                }
                5 => {
                    let end = (at + self.below(24)).min(bytes.len());
                    bytes.drain(at..end);
                }
                6 => {
                    let value = EXTREME[self.below(EXTREME.len())].to_le_bytes();
                    let size = [1, 2, 4, 8][self.below(4)];
                    bytes.iter_mut().skip(at).zip(&value[..size]).for_each(|(b, &v)| *b = v);
                }
                _ => {
                    let end = (at + self.below(24)).min(bytes.len());
                    let part = bytes[at..end].to_vec();
                    bytes.splice(at..at, part);
                }
            }
        }
    }
}
