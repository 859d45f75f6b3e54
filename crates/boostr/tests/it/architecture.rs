//! The invariants of ARCHITECTURE.md that a machine can check, on the source text of the workspace.
//!
//! The checks read tokens, not syntax trees. That is enough to find a path or an `unsafe`, and short
//! enough to be read here. Each check is a function from text to a list of violations, and is
//! itself tested on text that breaks its rule.

use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, Spacing, Span, TokenStream, TokenTree};

/// The modules of the library, first to last, each with all the others that it may name.
const MODULES: [(&str, &[&str]); 21] = [
    ("error", &[]),
    ("files", &["error"]),
    ("threads", &["error"]),
    ("ops", &["error"]),
    ("backend", &["error", "ops"]),
    ("checkpoint", &["error", "files"]),
    ("tokenizer", &["error", "files", "checkpoint"]),
    ("sample", &["error"]),
    ("grammar", &["error", "tokenizer", "sample"]),
    ("generation_config", &["error", "checkpoint", "tokenizer", "sample"]),
    ("chat", &["error", "checkpoint", "tokenizer", "grammar", "generation_config"]),
    ("nn", &["error", "ops", "backend", "checkpoint"]),
    ("models", &["error", "threads", "ops", "backend", "checkpoint", "nn"]),
    ("state_file", &["error", "ops", "backend", "checkpoint", "nn", "models"]),
    (
        "load",
        &[
            "error",
            "files",
            "threads",
            "ops",
            "backend",
            "checkpoint",
            "tokenizer",
            "generation_config",
            "chat",
            "nn",
            "models",
        ],
    ),
    (
        "session",
        &["error", "backend", "checkpoint", "tokenizer", "chat", "models", "state_file", "load"],
    ),
    (
        "convert",
        &[
            "error",
            "files",
            "ops",
            "backend",
            "checkpoint",
            "tokenizer",
            "generation_config",
            "chat",
            "nn",
            "models",
            "load",
        ],
    ),
    (
        "engine",
        &["error", "threads", "ops", "backend", "checkpoint", "models", "state_file", "sample"],
    ),
    (
        "text",
        &[
            "error",
            "backend",
            "tokenizer",
            "sample",
            "grammar",
            "generation_config",
            "chat",
            "models",
            "load",
            "session",
            "engine",
        ],
    ),
    ("evaluate", &["error", "ops", "backend", "models", "sample"]),
    (
        "train",
        &[
            "error",
            "files",
            "ops",
            "backend",
            "checkpoint",
            "tokenizer",
            "chat",
            "nn",
            "models",
            "sample",
            "load",
            "convert",
        ],
    ),
];

/// Where the tensor library may be named.
const NAMES_NUMR: [&str; 3] = ["ops", "backend", "error"];

/// What `boostr-kernels` may depend on.
const KERNEL_DEPENDENCIES: [&str; 2] = ["half", "rayon"];

/// Kernels that take rayon's iterators, beside gradients: no forward of a model runs them, or it is where all others go
/// parallel.
const WITH_RAYON: [&str; 10] = [
    "adamw.rs",
    "awake.rs",
    "cross_entropy.rs",
    "parallel.rs",
    "probe.rs",
    "product.rs",
    "ssd/chunk_intra.rs",
    "ssd/chunk_scan.rs",
    "ssd/chunk_state.rs",
    "ssd/cumsum.rs",
];

/// Functions that read or write the environment.
const ENVIRONMENT: [&str; 6] = ["var", "var_os", "vars", "vars_os", "set_var", "remove_var"];

/// Files that ask the clock on the wall, for a moment to show or to keep. It can be set, forwards and back, so no duration and no
/// deadline is of it.
const WALL_CLOCK: [&str; 7] = [
    "boostr/src/chat.rs",
    "boostr/src/chat/answers.rs",
    "boostr/src/checkpoint/private.rs",
    "boostr/src/load/conversation.rs",
    "boostr/src/session.rs",
    "cli/src/options/sampling.rs",
    "server/src/app.rs",
];

// Reading source text

/// A word, `::`, a literal (as `"`), or one other character, and the line it is on.
#[derive(Debug, Clone, PartialEq)]
struct Token {
    text: String,
    line: usize,
}

/// The tokens of Rust source, without comments and without what literals hold.
fn tokens(source: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    flatten(source.parse().unwrap(), &mut tokens);
    tokens
}

fn flatten(stream: TokenStream, tokens: &mut Vec<Token>) {
    let token = |text: String, span: Span| Token { text, line: span.start().line };
    let mut stream = stream.into_iter().peekable();
    while let Some(tree) = stream.next() {
        match tree {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::Parenthesis | Delimiter::None => ("(", ")"),
                };
                tokens.push(token(open.into(), group.span_open()));
                flatten(group.stream(), tokens);
                tokens.push(token(close.into(), group.span_close()));
            }
            TokenTree::Ident(word) => tokens.push(token(word.to_string(), word.span())),
            TokenTree::Literal(literal) => tokens.push(token("\"".into(), literal.span())),
            TokenTree::Punct(mark) => {
                let is_colon =
                    |tree: &TokenTree| matches!(tree, TokenTree::Punct(p) if p.as_char() == ':');
                let mut text = mark.to_string();
                if text == ":"
                    && mark.spacing() == Spacing::Joint
                    && stream.next_if(is_colon).is_some()
                {
                    text.push(':');
                }
                tokens.push(token(text, mark.span()));
            }
        }
    }
}

/// A path of at least two names, with how many inline modules it stands in.
#[derive(Debug, PartialEq)]
struct Named {
    names: Vec<String>,
    inline: usize,
    line: usize,
}

/// All paths of the source, groups of `use` taken apart.
fn paths(tokens: &[Token]) -> Vec<Named> {
    let text = |i: usize| tokens.get(i).map_or("", |t: &Token| t.text.as_str());
    let mut found = Vec::new();
    let (mut braces, mut modules) = (0, Vec::new());
    let mut i = 0;
    while i < tokens.len() {
        match text(i) {
            "{" => {
                braces += 1;
                if i >= 2 && text(i - 2) == "mod" {
                    modules.push(braces);
                }
            }
            "}" => {
                if modules.last() == Some(&braces) {
                    modules.pop();
                }
                braces -= 1;
            }
            word if is_word(word) && text(i + 1) == "::" => {
                i = path(tokens, i, &[], modules.len(), &mut found);
                continue;
            }
            _ => {}
        }
        i += 1;
    }
    found
}

/// Adds the path that begins at `i` and returns where it ends.
fn path(
    tokens: &[Token],
    mut i: usize,
    prefix: &[String],
    inline: usize,
    found: &mut Vec<Named>,
) -> usize {
    let text = |i: usize| tokens.get(i).map_or("", |t: &Token| t.text.as_str());
    let mut names = prefix.to_vec();
    let line = tokens[i].line;
    loop {
        if text(i) == "{" {
            i += 1;
            while !matches!(text(i), "}" | "") {
                i = if text(i) == "," { i + 1 } else { path(tokens, i, &names, inline, found) };
            }
            return i + 1;
        }
        names.push(text(i).into());
        i += 1;
        // Not a generic argument: `f::<T>`.
        if text(i) != "::" || !(is_word(text(i + 1)) || matches!(text(i + 1), "{" | "*")) {
            break;
        }
        i += 1;
    }
    if text(i) == "as" {
        i += 2;
    }
    found.push(Named { names, inline, line });
    i
}

fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

// The rules

/// Whether module `from` may name module `to`; `None` when one of them is not in the table.
fn may_name(from: &str, to: &str) -> Option<bool> {
    MODULES.iter().find(|(name, _)| *name == to)?;
    let (_, all) = MODULES.iter().find(|(name, _)| *name == from)?;
    Some(from == to || all.contains(&to))
}

/// The top module of a file of the library's source, and how deep in the tree the file's module is.
fn place(file: &str) -> (&str, usize) {
    let path = file.strip_suffix(".rs").unwrap_or(file);
    let path = path.strip_suffix("/mod").unwrap_or(path);
    match path.split('/').next() {
        Some("lib") | None => ("", 0),
        Some(top) => (top, path.split('/').count()),
    }
}

/// Paths of a library's file against the order of modules.
fn against_the_order(file: &str, source: &str) -> Vec<String> {
    let (from, depth) = place(file);
    if depth == 0 {
        return Vec::new(); // lib.rs declares them all
    }
    let mut violations = Vec::new();
    for Named { names, inline, line } in paths(&tokens(source)) {
        let supers = names.iter().take_while(|name| *name == "super").count();
        let to = match names[0].as_str() {
            "crate" => names.get(1),
            "super" if supers >= depth + inline => names.get(supers),
            _ => None,
        };
        let Some(to) = to else { continue };
        let to = match to.as_str() {
            "Error" | "Result" => "error", // lib.rs exports them again
            other => other,
        };
        match may_name(from, to) {
            Some(true) => {}
            Some(false) => violations.push(format!("{file}:{line}: `{from}` names `{to}`")),
            None => violations
                .push(format!("{file}:{line}: `{from}` or `{to}` has no place in the order")),
        }
    }
    violations.dedup();
    violations
}

/// Paths of which `forbidden` is true.
fn forbidden_paths(file: &str, source: &str, forbidden: impl Fn(&[String]) -> bool) -> Vec<String> {
    paths(&tokens(source))
        .into_iter()
        .filter(|named| forbidden(&named.names))
        .map(|named| format!("{file}:{}: `{}`", named.line, named.names.join("::")))
        .collect()
}

fn names_numr(names: &[String]) -> bool {
    names[0] == "numr"
}

fn names_files(names: &[String]) -> bool {
    matches!(&names[0][..], "std" | "core") && matches!(&names[1][..], "fs" | "io" | "net" | "*")
}

fn reads_the_environment(names: &[String]) -> bool {
    names.windows(2).any(|w| w[0] == "env" && (ENVIRONMENT.contains(&&*w[1]) || w[1] == "*"))
}

fn asks_the_wall_clock(names: &[String]) -> bool {
    names.ends_with(&["SystemTime".to_owned(), "now".to_owned()])
}

fn has_unsafe(source: &str) -> bool {
    tokens(source).iter().any(|token| token.text == "unsafe")
}

/// The files that ARCHITECTURE.md names in its list of unsafe code, each with the reason.
fn listed_unsafe(architecture: &str) -> Vec<(&str, &str)> {
    architecture
        .lines()
        .skip_while(|line| *line != "## Unsafe code")
        .skip(1)
        .take_while(|line| !line.starts_with('#'))
        .filter_map(|line| line.strip_prefix("- `")?.split_once('`'))
        .collect()
}

/// The packages that a Cargo.toml depends on outside of tests.
fn dependencies(manifest: &str) -> Vec<&str> {
    let mut section = "";
    let mut found = Vec::new();
    for line in manifest.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']');
            found.extend(section.strip_prefix("dependencies."));
        } else if section == "dependencies" && !line.starts_with('#') {
            found.extend(line.split(['.', '=', ' ']).next().filter(|name| !name.is_empty()));
        }
    }
    found
}

// The workspace

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// All files below a folder, but for build folders and hidden ones other than `.ci`.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap().to_string_lossy();
        if path.is_symlink() || (name.starts_with('.') && name != ".ci") || name == "target" {
            continue;
        }
        if path.is_file() {
            found.push(path);
        } else if !path.join("CACHEDIR.TAG").exists() {
            files(&path, found);
        }
    }
}

/// The Rust files below a folder of the repository: path from that folder, and text.
fn sources(folder: &str) -> Vec<(String, String)> {
    let folder = root().join(folder);
    let mut found = Vec::new();
    files(&folder, &mut found);
    let sources: Vec<(String, String)> = found
        .into_iter()
        .filter(|path| path.extension().is_some_and(|e| e == "rs"))
        .map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            (path.strip_prefix(&folder).unwrap().to_string_lossy().replace('\\', "/"), text)
        })
        .collect();
    assert!(!sources.is_empty(), "no sources in {}", folder.display());
    sources
}

/// Paths in the Rust files below `folder` of which `forbidden` is true.
fn forbidden_below(folder: &str, forbidden: fn(&[String]) -> bool) -> Vec<String> {
    sources(folder)
        .into_iter()
        .flat_map(|(file, text)| forbidden_paths(&format!("{folder}/{file}"), &text, forbidden))
        .collect()
}

#[track_caller]
fn none(violations: impl IntoIterator<Item = String>, rule: &str) {
    let violations: Vec<String> = violations.into_iter().collect();
    assert!(violations.is_empty(), "{rule}:\n{}", violations.join("\n"));
}

#[test]
fn modules_name_only_those_before_them() {
    let violations = sources("crates/boostr/src")
        .into_iter()
        .flat_map(|(file, text)| against_the_order(&file, &text));
    none(violations, "imports against the order of modules");
}

#[test]
fn the_order_is_one_and_the_document_states_it() {
    for (i, (name, all)) in MODULES.iter().enumerate() {
        for other in *all {
            let before = MODULES[..i].iter().any(|(name, _)| name == other);
            assert!(before, "`{name}` names `{other}`, which does not come before it");
        }
    }
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let order = "error < ops < backend < checkpoint < nn < models < state_file < load < session < convert < engine < text < evaluate < train";
    assert!(text.contains(order), "ARCHITECTURE.md does not state `{order}`");
}

#[test]
fn the_tensor_library_is_named_in_three_modules() {
    let library = sources("crates/boostr/src")
        .into_iter()
        .filter(|(file, _)| !NAMES_NUMR.contains(&place(file).0))
        .flat_map(|(file, text)| forbidden_paths(&file, &text, names_numr));
    none(library, "numr named outside of ops, backend and error");
    none(forbidden_below("crates/cli/src", names_numr), "numr named in the command line");
    none(forbidden_below("crates/server/src", names_numr), "numr named in the server");
}

#[test]
fn kernels_know_no_tensor_and_no_files() {
    let manifest = fs::read_to_string(root().join("crates/kernels/Cargo.toml")).unwrap();
    let others: Vec<&str> = dependencies(&manifest)
        .into_iter()
        .filter(|name| !KERNEL_DEPENDENCIES.contains(name))
        .collect();
    assert!(others.is_empty(), "boostr-kernels depends on {others:?}");
    none(forbidden_below("crates/kernels/src", names_files), "kernels that do input or output");
}

#[test]
fn kernels_of_a_forward_go_parallel_in_one_place() {
    let sources = sources("crates/kernels/src").into_iter();
    let with_rayon = sources.filter(|(_, text)| text.contains("rayon::prelude"));
    // The gates of the delta rule have their gradients beside them.
    let is_gradient = |file: &String| file.contains("backward") || file == "delta/gates.rs";
    let mut found: Vec<String> = with_rayon.map(|(file, _)| file).collect();
    found.retain(|file| !is_gradient(file));
    found.sort();
    assert_eq!(found, WITH_RAYON);
}

#[test]
fn models_open_no_file() {
    let files = forbidden_below("crates/boostr/src/models", names_files);
    none(files, "models that do input or output");
}

#[test]
fn the_environment_is_read_by_the_command_line_alone() {
    let reads = ["crates/kernels/src", "crates/boostr/src", "crates/server/src"]
        .into_iter()
        .flat_map(|folder| forbidden_below(folder, reads_the_environment));
    none(reads, "environment variables read below the command line");
}

#[test]
fn r_f12_durations_are_of_the_clock_that_is_never_set() {
    let asks = forbidden_below("crates", asks_the_wall_clock);
    let of_sources: Vec<&String> = asks.iter().filter(|place| place.contains("/src/")).collect();
    assert!(of_sources.len() >= WALL_CLOCK.len(), "{of_sources:?}");
    let is_listed =
        |place: &str| WALL_CLOCK.iter().any(|file| place.starts_with(&format!("crates/{file}:")));
    let others = of_sources.into_iter().filter(|place| !is_listed(place)).cloned();
    none(others, "the clock on the wall asked where none of its moments is shown or kept");
}

#[test]
fn unsafe_code_is_where_the_document_says() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let listed = listed_unsafe(&text);
    assert!(!listed.is_empty(), "ARCHITECTURE.md has no list under `## Unsafe code`");
    for (file, why) in &listed {
        assert!(why.len() > 10, "ARCHITECTURE.md does not say why `{file}` is unsafe");
    }
    let sources: Vec<(String, String)> = sources("crates")
        .into_iter()
        .map(|(file, text)| (format!("crates/{file}"), text))
        .filter(|(_, text)| has_unsafe(text))
        .collect();
    let unlisted = sources
        .iter()
        .filter(|(file, _)| !listed.iter().any(|(name, _)| name == file))
        .map(|(file, _)| file.clone());
    none(unlisted, "unsafe code in files that ARCHITECTURE.md does not list");
    let stale = listed
        .iter()
        .filter(|(name, _)| !sources.iter().any(|(file, _)| file == name))
        .map(|(name, _)| (*name).to_string());
    none(stale, "listed in ARCHITECTURE.md, but without unsafe code");
}

#[test]
fn no_file_needs_what_lies_outside_of_the_repository() {
    let needle = concat!("..", "/shared");
    let mut all = Vec::new();
    files(&root(), &mut all);
    let found = all
        .into_iter()
        .filter(|path| path.extension().is_none_or(|e| e != "md"))
        .filter_map(|path| Some((fs::read_to_string(&path).ok()?, path)))
        .filter(|(text, _)| text.contains(needle))
        .map(|(_, path)| path.display().to_string());
    none(found, "files that name a folder outside of the repository");
}

// The checks themselves

#[test]
fn a_path_against_the_order_is_found_wherever_it_stands() {
    for (file, source) in [
        ("sample.rs", "use crate::engine::generate;"),
        ("sample.rs", "use crate::{\n    error::Error,\n    engine::{self, Request},\n};"),
        ("sample.rs", "fn f() { crate::engine::generate(); }"),
        ("sample.rs", "use super::engine;"),
        ("sample.rs", "mod tests { mod inner { use super::super::super::engine; } }"),
        ("checkpoint/zip.rs", "use super::super::nn::Linear;"),
        ("checkpoint/mod.rs", "use crate::ops::Weight;"),
        ("checkpoint/mod.rs", "use crate::backend::DType;"),
        ("checkpoint/mod.rs", "mod tests { use crate::nn::Linear; }"),
        ("nn/linear.rs", "use crate::models::mamba2::Config;"),
        ("models/mamba2.rs", "type T = crate::tokenizer::Tokenizer;"),
        ("ops/mod.rs", "use super::backend::Tensor;"),
        ("extra.rs", "use crate::error::Error;"),
        ("error.rs", "use crate::extra::Thing;"),
    ] {
        assert_eq!(against_the_order(file, source).len(), 1, "{file}: {source}");
    }
    let found = against_the_order("nn/linear.rs", "\n\nuse crate::{error::Error, engine};\n");
    assert_eq!(found, ["nn/linear.rs:3: `nn` names `engine`"]);
}

#[test]
fn a_path_along_the_order_is_not_found() {
    for (file, source) in [
        ("engine.rs", "use crate::models::mamba2::Mamba2; use crate::{ops, sample::Sampler};"),
        ("engine.rs", "use crate::Result; use crate::Error;"),
        ("nn/linear.rs", "use super::params::Params;"),
        ("nn/linear.rs", "mod tests { use super::super::params; use super::*; }"),
        ("checkpoint/zip.rs", "pub(super) fn f() {} use super::Bytes;"),
        ("sample.rs", "mod tests { use super::*; use super::Sampler; }"),
        ("error.rs", "//! [`crate::engine`]\n/* crate::engine /* crate::nn */ */"),
        ("error.rs", "const A: &str = \"crate::engine\"; const B: &str = r#\"\" crate::nn\"#;"),
        ("error.rs", "const Q: char = '\"'; const L: &'static str = \"crate::nn\";"),
        ("lib.rs", "pub use crate::engine::generate;"),
    ] {
        assert_eq!(against_the_order(file, source), [""; 0], "{file}");
    }
}

#[test]
fn forbidden_names_are_found() {
    let count =
        |source: &str, rule: fn(&[String]) -> bool| forbidden_paths("f", source, rule).len();
    assert_eq!(count("use numr::tensor::Tensor; fn f(x: numr::X) {}", names_numr), 2);
    assert_eq!(count("// numr::tensor\nlet numr = 1; x::numr::y();", names_numr), 0);
    assert_eq!(count("use std::{fs::File, io}; fn f() { std::net::g() }", names_files), 3);
    assert_eq!(count("use std::collections::BTreeMap; self.fs.io;", names_files), 0);
    assert_eq!(count("use std::env; fn f() { env::var(\"A\"); }", reads_the_environment), 1);
    assert_eq!(
        count("std::env::var_os(\"A\"); use std::env::{args, vars};", reads_the_environment),
        2
    );
    assert_eq!(
        count("env!(\"A\"); std::env::args(); std::env::temp_dir();", reads_the_environment),
        0
    );
}

#[test]
fn unsafe_code_is_found() {
    assert!(has_unsafe("unsafe fn f() {}") && has_unsafe("fn f() { unsafe { g() } }"));
    assert!(!has_unsafe("#![deny(unsafe_code)] // unsafe\nlet x = \"unsafe {\";"));
}

#[test]
fn lists_are_read() {
    let document = "## Unsafe code\n\nText `x`.\n\n- `a.rs`: why\n- `b.rs`: why not\n\n## Next\n- `c.rs`: no\n";
    assert_eq!(listed_unsafe(document), [("a.rs", ": why"), ("b.rs", ": why not")]);
    let manifest = "[package]\nname = \"x\"\n[dependencies]\nhalf.workspace = true\n# numr = \"1\"\n\
                    serde = { version = \"1\" }\n[dependencies.numr]\nversion = \"1\"\n\
                    [dev-dependencies]\nproptest = \"1\"\n";
    assert_eq!(dependencies(manifest), ["half", "serde", "numr"]);
}

#[test]
fn tokens_keep_their_lines() {
    let found: Vec<(String, usize)> = tokens("a /* \n */ b\n\"x\ny\" c::d '\\'' 'e' f")
        .into_iter()
        .map(|token| (token.text, token.line))
        .collect();
    let want = [
        ("a", 1),
        ("b", 2),
        ("\"", 3),
        ("c", 4),
        ("::", 4),
        ("d", 4),
        ("\"", 4),
        ("\"", 4),
        ("f", 4),
    ]
    .map(|(s, n)| (s.to_string(), n));
    assert_eq!(found, want);
}
