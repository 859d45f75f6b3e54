//! The commands of a chat: lines that begin with a slash.

use std::str::FromStr;

use anyhow::Result;
use boostr::sample::SamplerConfig;

use crate::exit::usage;

pub const HELP: &str = "\
/save NAME        keep this conversation under a name
/load NAME        go on with another one
/branch NAME      a copy of this one under a name, and on in the copy
/rewind [N]       take back the last N turns; without N one
/mix A:w,B:w      a new conversation from the weighted states of others (experimental)
/diff A           how far the state of this one is from that of another
/sessions         all conversations
/system [TEXT]    what the model is told before everything; \"\" for nothing
/set [temp=0.7 ..]  how tokens are chosen: temp top_k top_p min_p repeat_penalty repeat_last_n seed max_tokens
/stats            this conversation in numbers
/clear            begin again; what was said stays in the tree
/help             this
/exit             leave, as Ctrl-D does; Ctrl-C stops an answer
\"\"\" begins and ends a text of several lines; // begins one that begins with /. \".\" stands for this conversation.";

/// A line, and what it asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Line {
    Nothing,
    Say(String),
    Help,
    Save(String),
    Load(String),
    Branch(String),
    Rewind(usize),
    Mix(Vec<(String, f32)>),
    Diff(String),
    Sessions,
    /// `None` asks what it is, an empty text takes it away.
    System(Option<String>),
    Set(Vec<(String, String)>),
    Stats,
    Clear,
    Exit,
}

impl Line {
    pub fn parse(line: &str) -> Result<Self> {
        let Some(words) = line.strip_prefix('/').filter(|rest| !rest.starts_with('/')) else {
            let text = line.strip_prefix('/').unwrap_or(line);
            let is_empty = text.trim().is_empty();
            return Ok(if is_empty { Self::Nothing } else { Self::Say(text.to_owned()) });
        };
        let (command, rest) = words.split_once(char::is_whitespace).unwrap_or((words, ""));
        let rest = rest.trim();
        let name = || match rest.split_whitespace().collect::<Vec<_>>()[..] {
            [name] => Ok(name.to_owned()),
            _ => Err(usage(format!("/{command}: expected one name, found `{rest}`"))),
        };
        let alone = |line: Self| {
            let refuse = || usage(format!("/{command}: expected nothing after it, found `{rest}`"));
            if rest.is_empty() { Ok(line) } else { Err(refuse()) }
        };
        match command {
            "help" | "?" => alone(Self::Help),
            "save" => Ok(Self::Save(name()?)),
            "load" => Ok(Self::Load(name()?)),
            "branch" => Ok(Self::Branch(name()?)),
            "rewind" if rest.is_empty() => Ok(Self::Rewind(1)),
            "rewind" => rest
                .parse()
                .map(Self::Rewind)
                .map_err(|_| usage(format!("/rewind: expected a number of turns, found `{rest}`"))),
            "mix" => weights(rest.split([',', ' ']).filter(|part| !part.is_empty())).map(Self::Mix),
            "diff" => Ok(Self::Diff(name()?)),
            "sessions" => alone(Self::Sessions),
            "system" => Ok(Self::System(match rest {
                "" => None,
                "\"\"" => Some(String::new()),
                text => Some(text.to_owned()),
            })),
            "set" => pairs(rest).map(Self::Set),
            "stats" => alone(Self::Stats),
            "clear" => alone(Self::Clear),
            "exit" | "quit" | "bye" => alone(Self::Exit),
            _ => Err(usage(format!("there is no command `/{command}`; /help lists them"))),
        }
    }
}

/// Names with weights, each `NAME:WEIGHT`.
pub fn weights<'a>(parts: impl Iterator<Item = &'a str>) -> Result<Vec<(String, f32)>> {
    let parts: Result<Vec<(String, f32)>> = parts
        .map(|part| {
            let (name, weight) = part.rsplit_once(':').unwrap_or((part, ""));
            match weight.parse::<f32>() {
                Ok(weight) if weight.is_finite() => Ok((name.to_owned(), weight)),
                _ => Err(usage(format!("mix: expected NAME:WEIGHT, found `{part}`"))),
            }
        })
        .collect();
    let parts = parts?;
    if parts.is_empty() {
        return Err(usage("mix: expected names with weights, like a:0.6,b:0.4"));
    }
    Ok(parts)
}

fn pairs(text: &str) -> Result<Vec<(String, String)>> {
    text.split_whitespace()
        .map(|word| {
            let pair = word.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
            pair.ok_or_else(|| usage(format!("/set: expected like temp=0.7, found `{word}`")))
        })
        .collect()
}

/// Changes one setting; `max_tokens` is beside the others.
pub fn set(
    config: &mut SamplerConfig,
    max_tokens: &mut usize,
    key: &str,
    value: &str,
) -> Result<()> {
    fn number<T: FromStr>(key: &str, value: &str) -> Result<T> {
        value.parse().map_err(|_| usage(format!("/set: {key}: expected a number, found `{value}`")))
    }
    match key {
        "temp" | "temperature" => config.temperature = number(key, value)?,
        "top_k" => config.top_k = number(key, value)?,
        "top_p" => config.top_p = number(key, value)?,
        "min_p" => config.min_p = number(key, value)?,
        "repeat_penalty" => config.repetition_penalty = number(key, value)?,
        "repeat_last_n" => config.repetition_window = number(key, value)?,
        "seed" => config.seed = number(key, value)?,
        "max_tokens" | "n" => *max_tokens = number(key, value)?,
        _ => return Err(usage(format!("/set: there is no `{key}`; /help lists what there is"))),
    }
    config.validate().map_err(|error| usage(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_said_unless_they_begin_with_one_slash() {
        let say = |text: &str| Line::Say(text.to_owned());
        for (line, means) in [
            ("", Line::Nothing),
            ("  ", Line::Nothing),
            ("Hi /help", say("Hi /help")),
            ("//etc is a folder", say("/etc is a folder")),
            ("/help", Line::Help),
            ("/rewind", Line::Rewind(1)),
            ("/rewind 3 ", Line::Rewind(3)),
            ("/save  trip", Line::Save("trip".into())),
            ("/mix a:0.6,b:-1", Line::Mix(vec![("a".into(), 0.6), ("b".into(), -1.0)])),
            ("/system", Line::System(None)),
            ("/system \"\"", Line::System(Some(String::new()))),
            ("/system Be  brief.", Line::System(Some("Be  brief.".into()))),
            (
                "/set temp=0 n=5",
                Line::Set(vec![("temp".into(), "0".into()), ("n".into(), "5".into())]),
            ),
            ("/quit", Line::Exit),
        ] {
            assert_eq!(Line::parse(line).unwrap(), means, "{line}");
        }
        for wrong in [
            "/",
            "/save",
            "/save a b",
            "/rewind x",
            "/rewind -1",
            "/mix",
            "/mix a",
            "/mix a:x",
            "/mix a:inf",
            "/set temp",
            "/exit now",
            "/Help",
            "/nothing",
        ] {
            assert!(Line::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn settings_are_checked() {
        let (mut config, mut max_tokens) = (SamplerConfig::default(), 1);
        for (key, value) in [("temp", "0.5"), ("top_k", "4"), ("seed", "9"), ("max_tokens", "7")] {
            set(&mut config, &mut max_tokens, key, value).unwrap();
        }
        assert_eq!((config.temperature, config.top_k, config.seed, max_tokens), (0.5, 4, 9, 7));
        for (key, value) in
            [("temp", "hot"), ("temp", "-1"), ("top_p", "2"), ("top_k", "-1"), ("x", "1")]
        {
            assert!(set(&mut config.clone(), &mut max_tokens, key, value).is_err(), "{key}");
        }
    }

    #[test]
    fn the_help_names_every_command() {
        for command in [
            "save", "load", "branch", "rewind", "mix", "diff", "sessions", "system", "set",
            "stats", "clear", "exit",
        ] {
            assert!(HELP.contains(&format!("/{command}")), "{command}");
        }
    }
}
