//! Where guesses of the next tokens come from: `--draft lookup`, `--draft mtp`, or a model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use boostr::backend::Cpu;
use boostr::engine::Draft;
use boostr::load::LanguageModel;
use clap::Args;

use crate::exit::{BadModel, usage};
use crate::options::model::ModelArgs;

/// Where guesses come from.
#[derive(Debug, Clone, Args)]
pub struct DraftArgs {
    /// Guess tokens before they are computed, which changes no output: `lookup`, from what was said before; `mtp`, by the
    /// model's own block for one token more; or a smaller model of the same vocabulary
    #[arg(long, value_name = "lookup|mtp|MODEL")]
    pub draft: Option<PathBuf>,
}

impl DraftArgs {
    /// The draft that is named, if any is, for `lm`, which was opened by `model`.
    pub fn open(&self, model: &ModelArgs, lm: &LanguageModel<Cpu>) -> Result<Option<Draft<Cpu>>> {
        self.draft.as_deref().map(|named| open(named, model, lm)).transpose()
    }
}

fn open(named: &Path, args: &ModelArgs, lm: &LanguageModel<Cpu>) -> Result<Draft<Cpu>> {
    if named.as_os_str() == "lookup" {
        return Ok(Draft::Lookup);
    }
    if named.as_os_str() == "mtp" {
        let block = lm.mtp().map_err(BadModel::from)?.ok_or_else(|| {
            usage("--draft mtp: the model has no block that predicts one token more".to_owned())
        })?;
        return Ok(Draft::Mtp(Arc::new(block)));
    }
    // It reads no text, and the model's adapters are not for it.
    let (source, mut options) = args.source(Some(named))?;
    (options.tokenizer, options.adapter) = (None, None);
    source.check_exists()?;
    let draft = Draft::Model(source.open(&options, lm.model.client())?.model);
    draft.check(&lm.model).map_err(|error| usage(error.to_string()))?;
    Ok(draft)
}
