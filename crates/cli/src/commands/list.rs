//! `boostr list`: the models that are on this machine, in the folders of `BOOSTR_MODELS` and in the cache of the
//! Hugging Face hub.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};

use crate::system;
use crate::term::{Style, Term, shown_in_line};

const EXAMPLES: &str = "\
Examples:
  boostr list
  boostr list --json";

const NOTES: &str = "\
A model is a GGUF file, or a folder with config.json and weights. BOOSTR_MODELS names folders that are looked into, and the folders \
in these; several are separated as in PATH. The hub's cache is HF_HUB_CACHE (or HUGGINGFACE_HUB_CACHE), else HF_HOME/hub, else ~/.cache/huggingface/hub. \
Every command takes the path of a model.";

/// Folders below a named one in which models are looked for.
const DEPTH: usize = 2;

/// Models on this machine
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, after_help = NOTES)]
pub struct ListArgs {
    /// One JSON object
    #[arg(long)]
    pub json: bool,
}

/// A model that was found.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Found {
    /// For people: its path below the folder, or what the hub calls it.
    name: String,
    path: PathBuf,
    /// Of its weights.
    bytes: u64,
}

pub fn run(args: &ListArgs, term: &Term) -> Result<()> {
    let mut folders = Vec::new();
    let mut found = BTreeSet::new();
    let named = env::var_os("BOOSTR_MODELS").filter(|value| !value.is_empty());
    for folder in named.iter().flat_map(env::split_paths) {
        below(&folder, &folder, DEPTH, &mut found);
        folders.push(folder);
    }
    if let Some(cache) = hub_cache() {
        in_hub(&cache, &mut found);
        folders.push(cache);
    }
    if args.json {
        let models = found.iter().map(|Found { name, path, bytes }| {
            json!({"name": name, "path": path.display().to_string(), "bytes": bytes})
        });
        let folders = folders.iter().map(|folder| folder.display().to_string());
        let (models, folders) = (models.collect::<Vec<Value>>(), folders.collect::<Vec<_>>());
        return term.print_json(&json!({"models": models, "folders": folders}));
    }
    let mut out = io::stdout().lock();
    for Found { name, path, bytes } in &found {
        let name = term.on_stdout(Style::Bold, &format!("{:40}", shown_in_line(name)));
        let path = path.display().to_string();
        writeln!(out, "{name}  {:>9}  {}", system::bytes(*bytes), shown_in_line(&path))?;
    }
    if found.is_empty() {
        let looked: Vec<String> =
            folders.iter().map(|folder| format!("`{}`", folder.display())).collect();
        let looked = if looked.is_empty() { "nowhere".into() } else { looked.join(", ") };
        term.say(format_args!(
            "no models found: looked in {looked}; BOOSTR_MODELS names folders of models"
        ));
    }
    Ok(())
}

/// Where the hub's programs keep what they downloaded.
fn hub_cache() -> Option<PathBuf> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("HF_HUB_CACHE")
        .or_else(|| variable("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| variable("HF_HOME").map(|home| home.join("hub")))
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("huggingface/hub")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/huggingface/hub")))
}

/// Adds the models of a cache of the hub: of each of its models the versions that are there.
fn in_hub(cache: &Path, found: &mut BTreeSet<Found>) {
    for model in entries(cache) {
        let Some(name) = model.file_name().and_then(|name| name.to_str()) else { continue };
        let Some(name) = name.strip_prefix("models--").map(|name| name.replace("--", "/")) else {
            continue;
        };
        for version in entries(&model.join("snapshots")) {
            let mut models = BTreeSet::new();
            below(&version, &version, 1, &mut models);
            found.extend(models.into_iter().map(|model| {
                let is_whole = model.path == version;
                let name = if is_whole { name.clone() } else { format!("{name}/{}", model.name) };
                Found { name, ..model }
            }));
        }
    }
}

/// Adds the model that a folder is, the GGUF files in it, and what is in the folders below.
fn below(folder: &Path, root: &Path, depth: usize, found: &mut BTreeSet<Found>) {
    let name = |path: &Path| match path.strip_prefix(root) {
        Ok(rest) if rest.as_os_str().is_empty() => {
            root.file_name().unwrap_or(root.as_os_str()).to_string_lossy().into_owned()
        }
        rest => rest.unwrap_or(path).to_string_lossy().into_owned(),
    };
    let size = |path: &Path| fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|m| m.len());
    let mut weights = 0;
    for path in entries(folder) {
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let ends = |ending: &str| file.to_ascii_lowercase().ends_with(ending);
        match size(&path) {
            // Of a file in parts the first is opened.
            Some(bytes) if ends(".gguf") && (part_of(&file).is_none_or(|part| part == 1)) => {
                found.insert(Found { name: name(&path), path, bytes });
            }
            Some(bytes) if ends(".safetensors") && !file.starts_with("adapter_") => {
                weights += bytes;
            }
            Some(bytes) if file == "pytorch_model.bin" && weights == 0 => weights += bytes,
            None if depth > 0 && !file.starts_with('.') && path.is_dir() => {
                below(&path, root, depth - 1, found);
            }
            _ => {}
        }
    }
    if weights > 0 && size(&folder.join("config.json")).is_some() {
        let path = folder.to_path_buf();
        found.insert(Found { name: name(folder), path, bytes: weights });
    }
}

/// The number of a part in `NAME-00002-of-00003.gguf`.
fn part_of(file: &str) -> Option<u32> {
    let stem = file.rsplit_once('.')?.0;
    let (rest, of) = stem.rsplit_once("-of-")?;
    let (_, part) = rest.rsplit_once('-')?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    part.parse().ok().filter(|_| is_number(part) && is_number(of))
}

/// Paths of what is in a folder, sorted; none when it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let read = fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = read.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_part_of_a_file_is_a_model() {
        assert_eq!(part_of("m-q4-00001-of-00003.gguf"), Some(1));
        assert_eq!(part_of("m-q4-00002-of-00003.gguf"), Some(2));
        for name in ["m.gguf", "one-of-many.gguf", "m-1-of-3.gguf", "m-0000a-of-00003.gguf"] {
            assert_eq!(part_of(name), None, "{name}");
        }
    }
}
