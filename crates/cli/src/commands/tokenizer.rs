//! `boostr tokenizer`: text to ids and back, without the model's weights.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use boostr::load::{OpenOptions, TextSide};
use boostr::tokenizer::Tokenizer;
use clap::{Args, Subcommand};
use serde_json::json;

use crate::exit::usage;
use crate::model::Source;
use crate::prompt;
use crate::term::Term;

const EXAMPLES: &str = "\
Examples:
  boostr tokenizer encode ./mamba2-370m \"It is a truth\"
  boostr tokenizer count smollm2-instruct.gguf -f notes.txt
  boostr tokenizer decode ./mamba2-370m 1147,310,247,5083";

/// Text to ids, ids to text, and counts
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct TokenizerArgs {
    #[command(subcommand)]
    pub command: TokenizerCommand,
}

#[derive(Debug, Subcommand)]
pub enum TokenizerCommand {
    /// Ids of a text, as a prompt of it would have
    Encode(TokenizerInput),
    /// Text of ids
    Decode(TokenizerInput),
    /// Number of ids of a text
    Count(TokenizerInput),
}

#[derive(Debug, Args)]
pub struct TokenizerInput {
    /// The model (a path that exists), then the text or the ids; stdin when there is no more
    #[arg(value_name = "[MODEL] TEXT|IDS")]
    pub words: Vec<OsString>,
    /// The text; - reads it from stdin
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "file")]
    pub prompt: Option<String>,
    /// Read the text from a file
    #[arg(short, long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// Whether names of control tokens, as <|im_start|>, are those tokens
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    pub parse_special: bool,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
    /// Any model that `boostr run` takes, or a tokenizer.json [env: BOOSTR_MODEL]
    #[arg(short, long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Use this tokenizer.json in place of the model's
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
}

pub fn run(args: &TokenizerArgs, term: &Term) -> Result<()> {
    match &args.command {
        TokenizerCommand::Encode(input) => encode(input, term),
        TokenizerCommand::Decode(input) => decode(input, term),
        TokenizerCommand::Count(input) => count(input, term),
    }
}

fn encode(input: &TokenizerInput, term: &Term) -> Result<()> {
    let (side, text) = text_and_tokenizer(input, term)?;
    let tokenizer = tokenizer_of(&side)?;
    let ids = side.encode(&text, input.parse_special)?;
    if input.json {
        let tokens: Vec<_> = ids.iter().map(|&id| tokenizer.token(id)).collect();
        return term.print_json(&json!({ "ids": ids, "tokens": tokens, "count": ids.len() }));
    }
    let words: Vec<String> = ids.iter().map(u32::to_string).collect();
    Ok(writeln!(io::stdout().lock(), "{}", words.join(" "))?)
}

fn count(input: &TokenizerInput, term: &Term) -> Result<()> {
    let (side, text) = text_and_tokenizer(input, term)?;
    tokenizer_of(&side)?;
    let count = side.encode(&text, input.parse_special)?.len();
    if input.json {
        return term.print_json(&json!({ "count": count, "bytes": text.len() }));
    }
    Ok(writeln!(io::stdout().lock(), "{count}")?)
}

fn decode(input: &TokenizerInput, term: &Term) -> Result<()> {
    let (model, words) = split_words(input);
    let mut words = words.iter().map(prompt::text_of).collect::<Result<Vec<_>>>()?;
    words.extend(input.prompt.clone());
    let ids = match (words.as_slice(), &input.file) {
        ([], file) => prompt::read_text(None, file.as_deref())?.unwrap_or_default(),
        (words, None) => words.join(" "),
        (_, Some(_)) => return Err(usage("ids are given twice")),
    };
    let ids = prompt::parse_ids(&ids)?;
    let side = open(input, model, term)?;
    let tokenizer = tokenizer_of(&side)?;
    if let Some(&id) = ids.iter().find(|&&id| tokenizer.token(id).is_none()) {
        let largest = tokenizer.max_id();
        return Err(usage(format!("id {id} has no token (the largest is {largest})")));
    }
    let text = tokenizer.decode(&ids, false)?;
    if input.json {
        return term.print_json(&json!({ "text": text, "count": ids.len() }));
    }
    let (text, end) = (term.text(&text), if text.ends_with('\n') { "" } else { "\n" });
    Ok(write!(io::stdout().lock(), "{text}{end}")?)
}

fn text_and_tokenizer(input: &TokenizerInput, term: &Term) -> Result<(TextSide, String)> {
    let (model, words) = split_words(input);
    let word = match (words, input.prompt.is_some() || input.file.is_some()) {
        ([], _) => None,
        ([word], false) => Some(prompt::text_of(word)?),
        (_, true) => return Err(usage("two texts are given")),
        (_, false) => return Err(usage("more than one text is given: put it in quotes")),
    };
    let text = prompt::read_text(word.as_ref().or(input.prompt.as_ref()).map(String::as_str), {
        input.file.as_deref()
    })?;
    let text = text.ok_or_else(|| usage("no text: give one as a word, with -f, or on stdin"))?;
    Ok((open(input, model, term)?, text))
}

/// The model among the words of the command line, and the others.
fn split_words(input: &TokenizerInput) -> (Option<&Path>, &[OsString]) {
    if input.model.is_some() || input.tokenizer.is_some() {
        return (input.model.as_deref(), &input.words);
    }
    match input.words.split_first() {
        Some((first, rest))
            if Path::new(first).exists() || !rest.is_empty() && has_slash(first) =>
        {
            (Some(Path::new(first)), rest)
        }
        _ => (None, &input.words),
    }
}

/// A first word that looks like a path is one, so that a wrong path is not taken for text.
fn has_slash(word: &OsString) -> bool {
    word.to_string_lossy().contains('/') && !word.to_string_lossy().contains(char::is_whitespace)
}

/// The tokenizer that a command line names, and what goes before a prompt.
fn open(input: &TokenizerInput, model: Option<&Path>, term: &Term) -> Result<TextSide> {
    // A tokenizer.json needs no model beside it.
    let source = match (Source::named(model), &input.tokenizer) {
        (None, Some(file)) => Source::Path(file.clone()),
        _ => Source::of(model)?,
    };
    let options = OpenOptions { tokenizer: input.tokenizer.clone(), ..OpenOptions::default() };
    let text = source.text_side(&options)?;
    term.warn_all(&text.warnings);
    Ok(text)
}

/// The tokenizer of a model.
fn tokenizer_of(text: &TextSide) -> Result<&Tokenizer> {
    let reason = "this model has no tokenizer: give one with --tokenizer FILE";
    text.tokenizer.as_ref().ok_or_else(|| usage(reason))
}
