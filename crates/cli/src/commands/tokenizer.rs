//! `boostr tokenizer`: text to ids and back, without the model's weights.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use boostr::backend;
use boostr::generation_config::SpecialTokens;
use boostr::load::read_text;
use boostr::tokenizer::{Tokenizer, ensure_bos};
use clap::{Args, Subcommand};
use serde_json::json;

use crate::exit::{BadModel, usage};
use crate::model::Source;
use crate::prompt;
use crate::term::Term;

const EXAMPLES: &str = "\
Examples:
  boostr tokenizer encode ./mamba2-370m \"It is a truth\"
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
    /// One JSON object
    #[arg(long)]
    pub json: bool,
    /// Model folder, or a tokenizer.json [env: BOOSTR_MODEL]
    #[arg(short, long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// A tokenizer.json
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
    let (text_side, text) = text_and_tokenizer(input)?;
    let ids = text_side.encode(&text)?;
    if input.json {
        let tokens: Vec<_> = ids.iter().map(|&id| text_side.tokenizer.token(id)).collect();
        return term.print_json(&json!({ "ids": ids, "tokens": tokens, "count": ids.len() }));
    }
    let words: Vec<String> = ids.iter().map(u32::to_string).collect();
    Ok(writeln!(io::stdout().lock(), "{}", words.join(" "))?)
}

fn count(input: &TokenizerInput, term: &Term) -> Result<()> {
    let (text_side, text) = text_and_tokenizer(input)?;
    let count = text_side.encode(&text)?.len();
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
    let tokenizer = TextSide::open(input, model)?.tokenizer;
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

fn text_and_tokenizer(input: &TokenizerInput) -> Result<(TextSide, String)> {
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
    Ok((TextSide::open(input, model)?, text))
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

/// A tokenizer, and what goes before a prompt.
struct TextSide {
    tokenizer: Tokenizer,
    bos: Option<u32>,
}

impl TextSide {
    fn open(input: &TokenizerInput, model: Option<&Path>) -> Result<Self> {
        if let Some(file) = &input.tokenizer {
            return Self::of_file(file);
        }
        match Source::of(model)?.with_adapter()?.0 {
            Source::Path(path) if path.extension().is_some_and(|ending| ending == "json") => {
                Self::of_file(&path)
            }
            source @ Source::Path(_) => {
                let folder = source.folder().unwrap_or(Path::new("."));
                let file = folder.join("tokenizer.json");
                if !file.exists() {
                    // Says what is wrong with the path, or with the model.
                    source
                        .open(&Default::default(), &backend::cpu())?
                        .tokenizer()
                        .map_err(BadModel::from)?;
                }
                Self::of_file(&file)
            }
            Source::Embedded => {
                let lm = Source::Embedded.open(&Default::default(), &backend::cpu())?;
                let tokenizer = lm.tokenizer().map_err(BadModel::from)?.clone();
                Ok(Self { tokenizer, bos: None })
            }
        }
    }

    /// A `tokenizer.json`, and the `tokenizer_config.json` beside it.
    fn of_file(file: &Path) -> Result<Self> {
        let tokenizer = Tokenizer::from_file(file).map_err(BadModel::from)?;
        let config = file.with_file_name("tokenizer_config.json");
        let bos = match read_text(&config).map_err(BadModel::from)? {
            Some(text) => {
                let special = SpecialTokens::from_json(&config, &text).map_err(BadModel::from)?;
                let token = special.bos_token.filter(|_| special.add_bos_token == Some(true));
                token.and_then(|token| tokenizer.id(&token))
            }
            None => None,
        };
        Ok(Self { tokenizer, bos })
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.tokenizer.encode(text, true)?;
        if let Some(bos) = self.bos {
            ensure_bos(&mut ids, bos);
        }
        Ok(ids)
    }
}
