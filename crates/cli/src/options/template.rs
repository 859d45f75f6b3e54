//! A prompt as a message: for models that were trained on conversations.

use std::path::PathBuf;

use anyhow::{Context, Result};
use boostr::backend::Cpu;
use boostr::chat::{ChatTemplate, Options, Source, message};
use boostr::load::{self, LanguageModel};
use clap::Args;
use serde_json::{Map, Value};

use crate::exit::{BadModel, usage};

/// How a prompt becomes a message, for models with a chat template.
#[derive(Debug, Args)]
#[command(next_help_heading = "Chat")]
pub struct TemplateArgs {
    /// Complete the prompt as it is, without the model's chat template
    #[arg(long)]
    pub raw: bool,
    /// What the model is told before the prompt, as a system message
    #[arg(long, alias = "system-prompt", value_name = "TEXT", allow_hyphen_values = true)]
    #[arg(conflicts_with = "raw")]
    pub system: Option<String>,
    /// Use this chat template in place of the model's
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    pub chat_template: Option<PathBuf>,
    /// More variables of the template, as a JSON object: {"enable_thinking": false}
    #[arg(long, value_name = "JSON", conflicts_with = "raw")]
    pub chat_template_kwargs: Option<String>,
}

/// The ids of a conversation in which the user says `text` and it is the assistant's turn; `None` when the model has
/// no chat template, or the text is to be completed as it is.
pub fn ids(args: &TemplateArgs, lm: &LanguageModel<Cpu>, text: &str) -> Result<Option<Vec<u32>>> {
    if args.raw {
        return Ok(None);
    }
    let Some(template) = template(lm)? else {
        if args.system.is_some() || args.chat_template_kwargs.is_some() {
            let reason = "this model has no chat template: without one there are no messages, only \
                          text; give one with --chat-template FILE";
            return Err(usage(reason));
        }
        return Ok(None);
    };
    let system = args.system.iter().map(|system| message("system", system));
    let messages: Vec<Value> = system.chain([message("user", text)]).collect();
    let options =
        Options { add_generation_prompt: true, kwargs: args.kwargs()?, ..Options::default() };
    let tokenizer = lm.tokenizer().map_err(BadModel::from)?;
    match template.encode(tokenizer, &messages, &options) {
        Ok(ids) => Ok(Some(ids)),
        Err(boostr::Error::Argument { name: "messages", reason }) => {
            Err(usage(format!("the chat template refuses this: {reason}")))
        }
        Err(error) => Err(BadModel {
            error,
            help: Some("--raw completes the text without the chat template".into()),
        }
        .into()),
    }
}

/// Puts the template that is named in place of the model's.
pub fn apply(args: &TemplateArgs, lm: &mut LanguageModel<Cpu>) -> Result<()> {
    if let Some(path) = &args.chat_template {
        let text = load::read_text(path).map_err(BadModel::from)?;
        let text = text.with_context(|| format!("`{}`: no such file", path.display()))?;
        let special = lm.chat_template.take().map(|own| own.special);
        lm.set_chat_template(Source::new(path, text, special.unwrap_or_default()));
    }
    Ok(())
}

/// The model's template.
pub fn template(lm: &LanguageModel<Cpu>) -> Result<Option<ChatTemplate>> {
    let source = lm.chat_template.as_ref();
    let help =
        || Some("--raw completes the text without it, --chat-template FILE uses another".into());
    source
        .map(|source| source.compile().map_err(|error| BadModel { error, help: help() }.into()))
        .transpose()
}

impl TemplateArgs {
    /// The variables that are given to the template.
    pub fn kwargs(&self) -> Result<Map<String, Value>> {
        let Some(text) = &self.chat_template_kwargs else { return Ok(Map::new()) };
        serde_json::from_str(text).map_err(|error| {
            usage(format!("--chat-template-kwargs: expected a JSON object: {error}"))
        })
    }
}
