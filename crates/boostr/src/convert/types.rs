//! Which type each tensor of a new file has.

use regex::Regex;

use crate::checkpoint::Dtype;
use crate::error::{Error, Result};
use crate::ops::Format;

/// Names of small tensors in GGUF files, wherever they stand in a name: never quantized.
const SMALL: [&str; 7] =
    ["conv1d", "ssm_a", "ssm_d", "_norm", "ffn_gate_inp", "shortconv.conv", "exp_probs_b"];

/// What a name of a type stands for: the type of matrices, and of those that stay wider.
///
/// The mixes keep the table of tokens in 6 bits, since each logit and each input is a row of it, and the
/// projections back into the residual stream a step wider than those out of it. The gates of delta rules are wider
/// still.
const MIXES: [(&str, Format, &[Wider]); 2] = [
    ("q4_k_m", Format::Q4K, &[(TABLES, Format::Q6K), (OUTPUTS, Format::Q5K), GATES]),
    ("q5_k_m", Format::Q5K, &[(TABLES, Format::Q6K), (OUTPUTS, Format::Q6K), GATES]),
];
/// Few rows, whose results decays are made of: they compound from token to token.
const GATES: Wider = (r"\.ssm_(alpha|beta|ba|[fg]_[ab])\.weight$", Format::Q8_0);
/// A pattern of GGUF names, and the type of what it finds.
type Wider = (&'static str, Format);
const TABLES: &str = r"^(token_embd|output)\.weight$";
const OUTPUTS: &str = r"\.(ssm_out|attn_output|ffn_down(_exps|_shexp)?)\.weight$";

/// Which type each tensor of a new file has.
#[derive(Debug, Clone, Default)]
pub struct Types {
    /// For matrices; `None` keeps what they have.
    matrices: Option<Dtype>,
    /// A pattern of GGUF names and the type of the matrices that have one; the first that fits counts.
    rules: Vec<(Regex, Dtype)>,
    /// How many of them, the first ones, were asked for; those of a mix are of some families only.
    asked: usize,
}

impl Types {
    /// Every matrix as it is.
    #[must_use]
    pub fn kept() -> Self {
        Self::default()
    }

    /// The types that `name` stands for: `f32`, `f16`, `bf16`, one of the block formats that can be
    /// written, or a mix, `q4_k_m` or `q5_k_m`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for another name, with all that there are.
    ///
    /// ```
    /// use boostr::convert::Types;
    ///
    /// assert!(Types::named("q4_k_m").is_ok());
    /// assert!(Types::named("q4").unwrap_err().to_string().contains("q4_k_m"));
    /// ```
    pub fn named(name: &str) -> Result<Self> {
        let lower = name.to_ascii_lowercase();
        if let Some((_, matrices, wider)) = MIXES.iter().find(|(mix, ..)| *mix == lower) {
            let rule = |(pattern, format): &(&str, Format)| {
                Ok((compiled(pattern)?, Dtype::Block(*format)))
            };
            let rules = wider.iter().map(rule).collect::<Result<_>>()?;
            return Ok(Self { matrices: Some(Dtype::Block(*matrices)), rules, asked: 0 });
        }
        let Some(matrices) = find_type(name) else {
            let mixes: Vec<&str> = MIXES.iter().map(|(name, ..)| *name).collect();
            return Err(unknown_type(name, &format!("; mixes: {}", mixes.join(", "))));
        };
        Ok(Self { matrices: Some(matrices), ..Self::default() })
    }

    /// The same, but `dtype` for matrices whose GGUF name the regular expression `pattern` finds;
    /// what was said before yields.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when the pattern is no regular expression.
    pub fn with(mut self, pattern: &str, dtype: Dtype) -> Result<Self> {
        self.rules.insert(0, (compiled(pattern)?, dtype));
        self.asked += 1;
        Ok(self)
    }

    /// The type of the tensor called `name` in GGUF, of `shape`; `None` when it keeps its own.
    #[must_use]
    pub fn of(&self, name: &str, shape: &[usize]) -> Option<Dtype> {
        if !is_matrix(name, shape) {
            return Some(Dtype::F32);
        }
        let rule = self.rules.iter().find(|(pattern, _)| pattern.is_match(name));
        let wanted = rule.map(|&(_, dtype)| dtype).or(self.matrices)?;
        Some(fitting(wanted, shape.last().copied().unwrap_or(0)))
    }

    /// The first rule that was asked for and fits none of the `names`.
    pub(super) fn unused(&self, names: &[String]) -> Option<&str> {
        let fits = |pattern: &Regex| names.iter().any(|name| pattern.is_match(name));
        let asked = self.rules.iter().take(self.asked).map(|(pattern, _)| pattern);
        asked.into_iter().find(|pattern| !fits(pattern)).map(Regex::as_str)
    }
}

fn compiled(pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|error| Error::Argument {
        name: "pattern",
        reason: format!("{pattern:?} is no regular expression: {error}"),
    })
}

/// The type called `name`: a float, or a block format that can be written.
///
/// # Errors
///
/// [`Error::Unsupported`] for another name, with all that there are.
pub fn type_named(name: &str) -> Result<Dtype> {
    find_type(name).ok_or_else(|| unknown_type(name, ""))
}

fn find_type(name: &str) -> Option<Dtype> {
    written_types().find(|dtype| dtype.name().eq_ignore_ascii_case(name))
}

/// Every type that a matrix can be written in.
fn written_types() -> impl Iterator<Item = Dtype> {
    let blocks = Format::ALL.into_iter().filter(|format| format.can_encode());
    [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().chain(blocks.map(Dtype::Block))
}

fn unknown_type(name: &str, also: &str) -> Error {
    let names: Vec<String> =
        written_types().map(|dtype| dtype.name().to_ascii_lowercase()).collect();
    let (name, names) = (name.escape_debug(), names.join(", "));
    Error::Unsupported { what: format!("type `{name}` (supported: {names}{also})") }
}

/// Whether the tensor is one of a model's large matrices.
pub(super) fn is_matrix(name: &str, shape: &[usize]) -> bool {
    let is_small = SMALL.iter().any(|part| name.contains(part));
    shape.len() >= 2 && name.ends_with(".weight") && !is_small
}

/// `wanted`, or the nearest type that is not narrower and whose blocks fill rows of `width`.
fn fitting(wanted: Dtype, width: usize) -> Dtype {
    let Dtype::Block(format) = wanted else {
        return wanted;
    };
    if width > 0 && width.is_multiple_of(format.block_len()) {
        return wanted;
    }
    let instead = match format {
        Format::Q2K | Format::Q3K => Format::Q4_0,
        Format::Q4K => Format::Q5_0,
        Format::Q5K => Format::Q5_1,
        Format::Iq4Xs => Format::Iq4Nl,
        _ => Format::Q8_0,
    };
    if width > 0 && width.is_multiple_of(instead.block_len()) {
        return Dtype::Block(instead);
    }
    Dtype::F16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_tensors_stay_f32_whatever_is_asked_for() {
        let types = Types::named("q4_0").unwrap().with(".", Dtype::Block(Format::Q8_0)).unwrap();
        for (name, shape) in [
            ("blk.0.ssm_conv1d.weight", &[256, 4][..]),
            ("blk.0.ssm_a", &[64, 1]),
            ("blk.0.ssm_d", &[64, 1]),
            ("blk.0.ssm_dt.bias", &[64]),
            ("blk.0.ssm_norm.weight", &[2, 256]),
            ("blk.0.attn_norm.weight", &[256]),
            ("blk.0.ffn_gate_inp.weight", &[64, 256]),
            ("output_norm.weight", &[256]),
        ] {
            assert_eq!(types.of(name, shape), Some(Dtype::F32), "{name}");
        }
        let is = types.of("blk.0.ssm_in.weight", &[512, 256]);
        assert_eq!(is, Some(Dtype::Block(Format::Q8_0)));
        assert_eq!(Types::kept().of("blk.0.ssm_in.weight", &[512, 256]), None);
    }

    #[test]
    fn a_mix_names_what_stays_wider_and_a_rule_wins_over_it() {
        let mix = Types::named("Q4_K_M").unwrap();
        let of = |types: &Types, name: &str| types.of(name, &[512, 256]).unwrap();
        assert_eq!(of(&mix, "blk.3.ssm_in.weight"), Dtype::Block(Format::Q4K));
        assert_eq!(of(&mix, "blk.3.ssm_out.weight"), Dtype::Block(Format::Q5K));
        assert_eq!(of(&mix, "token_embd.weight"), Dtype::Block(Format::Q6K));
        let ruled = mix.with("ssm_in", Dtype::F16).unwrap();
        assert_eq!(of(&ruled, "blk.3.ssm_in.weight"), Dtype::F16);
        // A mix has rules for matrices that a model need not have; one that was asked for is for some.
        let names = ["blk.0.ssm_in.weight", "token_embd.weight"].map(String::from);
        assert_eq!(ruled.unused(&names), None);
        assert_eq!(ruled.unused(&names[1..]), Some("ssm_in"));
    }

    #[test]
    fn rows_that_are_not_whole_blocks_get_a_type_that_is_not_narrower() {
        let of = |format, width| fitting(Dtype::Block(format), width);
        assert_eq!(of(Format::Q4K, 512), Dtype::Block(Format::Q4K));
        assert_eq!(of(Format::Q4K, 192), Dtype::Block(Format::Q5_0));
        assert_eq!(of(Format::Q5K, 192), Dtype::Block(Format::Q5_1));
        assert_eq!(of(Format::Q6K, 192), Dtype::Block(Format::Q8_0));
        assert_eq!(of(Format::Q6K, 48), Dtype::F16);
        assert_eq!(of(Format::Q4_0, 0), Dtype::F16);
        assert_eq!(fitting(Dtype::BF16, 7), Dtype::BF16);
    }

    #[test]
    fn names_of_types_are_listed_when_one_is_unknown() {
        let message = type_named("q3").unwrap_err().to_string();
        assert!(message.contains("f32, f16, bf16") && message.contains("q6_k"), "{message}");
        assert!(Types::kept().with("(", Dtype::F32).is_err());
    }
}
