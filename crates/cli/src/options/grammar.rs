//! What a text has to be: JSON of a schema, or what an expression or rules say.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use boostr::backend::Cpu;
use boostr::grammar::{Grammar, Vocabulary};
use boostr::load::LanguageModel;
use boostr::sample::Constraint;
use clap::Args;
use serde_json::Value;

use crate::exit::{BadModel, usage};

/// What the text has to be.
#[derive(Debug, Args)]
#[command(next_help_heading = "Grammar")]
pub struct GrammarArgs {
    /// The text is JSON of this schema: a file, or the schema itself
    #[arg(long, value_name = "FILE|JSON", conflicts_with_all = ["grammar", "regex"])]
    pub json_schema: Option<String>,
    /// The text follows the rules of this file, in Lark's notation or in GBNF
    #[arg(long, value_name = "FILE", conflicts_with = "regex")]
    pub grammar: Option<PathBuf>,
    /// The text is one that this regular expression matches, all of it
    #[arg(long, value_name = "REGEX", allow_hyphen_values = true)]
    pub regex: Option<String>,
}

impl GrammarArgs {
    /// The grammar that was asked for.
    pub fn read(&self) -> Result<Option<Grammar>> {
        let grammar = if let Some(schema) = &self.json_schema {
            let (name, text) = match schema.trim_start() {
                text if text.starts_with('{') => ("--json-schema", schema.clone()),
                _ => (schema.as_str(), text_of(schema.as_ref())?),
            };
            let schema: Value = serde_json::from_str(&text)
                .map_err(|error| usage(format!("`{name}` is not JSON: {error}")))?;
            Grammar::json_schema(&schema)
        } else if let Some(file) = &self.grammar {
            Grammar::rules(&text_of(file)?)
        } else if let Some(regex) = &self.regex {
            Grammar::regex(regex)
        } else {
            return Ok(None);
        };
        grammar.map(Some).map_err(|error| usage(error.to_string()))
    }
}

/// The start of a text by a grammar, in the tokens of a model.
pub fn constraint(grammar: &Grammar, lm: &LanguageModel<Cpu>) -> Result<Box<dyn Constraint>> {
    let tokenizer = lm.tokenizer().map_err(BadModel::from)?;
    let vocabulary = Vocabulary::new(tokenizer, &lm.eos, lm.vocab_limit())?;
    vocabulary.constraint(grammar).map_err(|error| usage(error.to_string()))
}

fn text_of(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("`{}`", file.display()))
}
