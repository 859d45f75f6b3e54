//! Where guesses of the next tokens come from: `--draft lookup`, or a model.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use boostr::backend::Cpu;
use boostr::engine::Draft;
use boostr::load::LanguageModel;

use crate::args::ModelArgs;
use crate::exit::usage;
use crate::model::Source;

/// The draft that is named, for `lm`.
pub fn open(named: &Path, args: &ModelArgs, lm: &LanguageModel<Cpu>) -> Result<Draft<Cpu>> {
    if named.as_os_str() == "lookup" {
        return Ok(Draft::Lookup);
    }
    let (_, mut options) = args.source(Some(named))?;
    options.tokenizer = None;
    options.adapter = None;
    let source = Source::of(Some(named))?;
    source.check_exists()?;
    let draft = source.open(&options)?;
    let (own, other) = (lm.vocab_limit(), draft.vocab_limit());
    if own != other {
        let name = named.display();
        let reason = format!(
            "--draft: `{name}` has {other} tokens, the model {own}: they cannot guess for each other"
        );
        return Err(usage(reason));
    }
    Ok(Draft::Model(Arc::new(draft.model)))
}
