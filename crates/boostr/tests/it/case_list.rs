//! Ids that names of tests begin with, and their list, `fixtures/CASES.md`. Each has all that the other
//! has.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The lists whose cases have numbers, with or without a letter before them.
const NUMBERED: [&str; 4] = ["case", "r", "d", "g"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The ids in the first column of the tables, in their order.
fn listed(cases: &str) -> Vec<&str> {
    let is_id = |cell: &&str| {
        let (list, rest) = cell.split_once('_').unwrap_or_default();
        (NUMBERED.contains(&list) || list == "p") && !rest.is_empty()
    };
    cases
        .lines()
        .filter_map(|line| Some(line.strip_prefix("| ")?.split_once(" |")?.0))
        .filter(is_id)
        .collect()
}

/// Names of the functions that are tests.
fn tests(source: &str) -> impl Iterator<Item = &str> {
    let mut is_test = false;
    source.lines().map(str::trim).filter_map(move |line| {
        is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        let (before, after) = line.split_once("fn ")?;
        let is_function = is_test && (before.is_empty() || before == "async ");
        is_test &= !is_function;
        is_function.then(|| after.split(['(', '<']).next().unwrap_or(after))
    })
}

/// The ids that a name begins with. Those of people are words, so they are looked up: the longest that fits.
fn ids(name: &str, listed: &[&str]) -> Vec<String> {
    let mut words = name.split('_');
    let list = words.next().unwrap_or_default();
    if list == "p" {
        let fits = |id: &&&str| name.strip_prefix(**id).is_some_and(|rest| rest.starts_with('_'));
        let longest = listed.iter().filter(fits).max_by_key(|id| id.len());
        return vec![longest.map_or(name, |id| id).to_owned()];
    }
    if !NUMBERED.contains(&list) {
        return Vec::new();
    }
    let has_number = |word: &&str| word.ends_with(|c: char| c.is_ascii_digit());
    words.take_while(has_number).map(|word| format!("{list}_{word}")).collect()
}

/// Every Rust file below a folder.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn every_id_in_a_name_is_listed_once_and_every_listed_id_has_a_test() {
    let cases = fs::read_to_string(root().join("fixtures/CASES.md")).unwrap();
    let listed = listed(&cases);
    let unique: BTreeSet<String> = listed.iter().map(|&id| id.to_owned()).collect();
    assert_eq!(unique.len(), listed.len(), "fixtures/CASES.md lists an id twice");

    let mut files = Vec::new();
    sources(&root().join("crates"), &mut files);
    let mut used = BTreeSet::new();
    for file in files {
        let source = fs::read_to_string(&file).unwrap();
        used.extend(tests(&source).flat_map(|name| ids(name, &listed)));
    }
    let unlisted: Vec<_> = used.difference(&unique).collect();
    assert!(unlisted.is_empty(), "in names of tests, but not in fixtures/CASES.md: {unlisted:?}");
    let unused: Vec<_> = unique.difference(&used).collect();
    assert!(unused.is_empty(), "in fixtures/CASES.md, but in no test's name: {unused:?}");
}

#[test]
fn ids_are_the_words_with_numbers_after_the_lists_prefix() {
    let listed = ["p_tied", "p_tied_head"];
    assert_eq!(ids("r_a26_a27_lists_of_another_kind", &listed), ["r_a26", "r_a27"]);
    assert_eq!(ids("case_2_of_500_tokens_one_is_evaluated", &listed), ["case_2"]);
    assert_eq!(ids("p_tied_head_is_refused", &listed), ["p_tied_head"]);
    assert_eq!(ids("p_unknown_report", &listed), ["p_unknown_report"]);
    assert!(ids("rows_of_one_batch", &listed).is_empty());
}

#[test]
fn tests_are_the_functions_with_the_attribute() {
    let source = "#[test]\n#[ignore = \"long\"]\nfn r_a1_one() {\n}\nfn r_a2_helper() {}\n\
                  #[tokio::test(flavor = \"current_thread\")]\nasync fn d_3_two() {\n}\n";
    assert_eq!(tests(source).collect::<Vec<_>>(), ["r_a1_one", "d_3_two"]);
}
