//! Where a prompt comes from: the command line, a file, stdin, or ids.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Read};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use boostr::files;
use boostr::load::LanguageModel;
use boostr::tokenizer::MAX_TEXT;

use crate::exit::{BadModel, usage};

/// What to go on from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

impl Prompt {
    /// Ids of the prompt; an empty text is the token that starts a text. With `parse_special`, names of control tokens
    /// in it are those tokens.
    pub fn ids(
        &self,
        lm: &LanguageModel<boostr::backend::Cpu>,
        parse_special: bool,
    ) -> Result<Vec<u32>> {
        let ids = match self {
            Self::Ids(ids) => ids.clone(),
            Self::Text(text) => {
                lm.tokenizer().map_err(BadModel::from)?;
                lm.encode_prompt(text, parse_special)?
            }
        };
        self.check(&ids, lm)?;
        match lm.defaults.bos_token_id {
            Some(bos) if ids.is_empty() => Ok(vec![bos]),
            None if ids.is_empty() => Err(usage("the prompt is empty: give some text with -p")),
            _ => Ok(ids),
        }
    }

    /// Ids of the prompt as what comes next in a text that has begun.
    pub fn ids_after(
        &self,
        lm: &LanguageModel<boostr::backend::Cpu>,
        parse_special: bool,
    ) -> Result<Vec<u32>> {
        let ids = match self {
            Self::Ids(ids) => ids.clone(),
            Self::Text(text) => {
                let tokenizer = lm.tokenizer().map_err(BadModel::from)?;
                if parse_special {
                    tokenizer.encode_control(text, false)?
                } else {
                    tokenizer.encode(text, false)?
                }
            }
        };
        self.check(&ids, lm)?;
        if ids.is_empty() {
            return Err(usage("the prompt is empty: --state goes on with what -p says"));
        }
        Ok(ids)
    }

    /// Checks that the model knows the ids made of this prompt.
    pub fn check(&self, ids: &[u32], lm: &LanguageModel<boostr::backend::Cpu>) -> Result<()> {
        let rows = lm.model.vocab_rows();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
            let reason = format!("token id {id} is not below the vocabulary's {rows} rows");
            return Err(match self {
                Self::Ids(_) => usage(format!("--tokens: {reason}")),
                Self::Text(_) => {
                    let path = lm.path.clone();
                    let reason = format!("of another model: {reason}");
                    BadModel::from(boostr::Error::Tokenizer { path, reason }).into()
                }
            });
        }
        Ok(())
    }
}

/// Reads ids like `5,17,3` or `5 17 3`; `-` reads them from stdin.
pub fn parse_ids(text: &str) -> Result<Vec<u32>> {
    if text == "-" {
        return parse_ids_of(&read_stdin()?);
    }
    parse_ids_of(text)
}

fn parse_ids_of(text: &str) -> Result<Vec<u32>> {
    let wrong = |found: &str| {
        usage(format!("expected token ids like 5,17,3, found {}", found.escape_debug()))
    };
    let text = text.trim();
    let inside =
        text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text).trim();
    if inside.is_empty() {
        return Err(wrong("none"));
    }
    let id = |word: &str| word.parse().map_err(|_| wrong(&format!("`{word}`")));
    let mut ids = Vec::new();
    for part in inside.split(',') {
        if part.trim().is_empty() {
            return Err(wrong("nothing between two commas, or at an end"));
        }
        for word in part.split_whitespace() {
            ids.push(id(word)?);
        }
    }
    Ok(ids)
}

/// The text of an option, a file or stdin, by the first that is there; `None` when stdin is a
/// terminal.
pub fn read_text(text: Option<&str>, file: Option<&Path>) -> Result<Option<String>> {
    match (text, file) {
        (Some("-"), _) => read_stdin().map(Some),
        (Some(text), _) => Ok(Some(text.to_owned())),
        (None, Some(path)) => {
            let file = files::open(path)?;
            read_all(file, &format!("`{}`", path.display())).map(Some)
        }
        (None, None) if io::stdin().is_terminal() => Ok(None),
        (None, None) => read_stdin().map(Some),
    }
}

/// Text of a word of the command line.
pub fn text_of(word: &OsString) -> Result<String> {
    let text = word.to_str().map(str::to_owned);
    text.ok_or_else(|| usage(format!("`{}` is not UTF-8 text", word.to_string_lossy())))
}

fn read_stdin() -> Result<String> {
    read_all(io::stdin().lock(), "stdin")
}

/// All text of a reader, without a byte order mark before it and one newline at its end.
fn read_all(reader: impl Read, name: &str) -> Result<String> {
    let mut bytes = Vec::new();
    // One byte more than the longest text with a newline, to tell that there is more.
    let limit = MAX_TEXT as u64 + 3;
    reader.take(limit).read_to_end(&mut bytes).with_context(|| name.to_owned())?;
    if bytes.len() as u64 == limit {
        bail!("{name}: text is longer than {MAX_TEXT} bytes");
    }
    let mut text = files::utf8(bytes).map_err(|reason| anyhow!("{name}: {reason}"))?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_separated_by_commas_or_spaces() {
        assert_eq!(parse_ids("5,17, 3").unwrap(), [5, 17, 3]);
        assert_eq!(parse_ids("[5 17\t3]").unwrap(), [5, 17, 3]);
        for bad in [
            "",
            ",",
            "5,x",
            "-1",
            "4294967296",
            "1.5",
            "5,,3",
            ",5",
            "5,",
            "5, ,3",
            "[",
            "[]",
            "[5",
            "5]",
            "[[5]]",
            "5;3",
        ] {
            assert!(parse_ids(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn one_newline_at_the_end_is_no_part_of_the_text() {
        for (bytes, text) in [
            ("\u{feff}a\n", "a"),
            ("a\n", "a"),
            ("a\r\n", "a"),
            ("a\n\n", "a\n"),
            ("a", "a"),
            ("", ""),
        ] {
            assert_eq!(read_all(bytes.as_bytes(), "x").unwrap(), text);
        }
    }

    #[test]
    fn text_that_is_not_utf8_is_an_error_with_its_place() {
        let error = read_all(&b"ab\xff"[..], "stdin").unwrap_err().to_string();
        assert_eq!(error, "stdin: not UTF-8 text: byte 2 is wrong");
    }
}
