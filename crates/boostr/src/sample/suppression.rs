//! Tokens that an author keeps out of answers.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::TokenSet;
use crate::error::{Error, Result};

/// Most sequences, and most tokens of all of them.
const MAX_SEQUENCES: usize = 1 << 16;
const MAX_TOKENS: usize = 1 << 20;

/// Tokens that an answer does not have, whatever their logits are. A clone shares them.
///
/// | field of transformers | kept out |
/// |---|---|
/// | `suppress_tokens` | the token, always |
/// | `begin_suppress_tokens` | the token, as the first of an answer |
/// | `bad_words_ids` | the last token of a sequence, where the text ends with those before it |
///
/// ```
/// use boostr::sample::{Sampler, SamplerConfig, Suppression};
///
/// // Never token 0, not token 1 first, and not 2 after 1.
/// let suppression = Suppression::new(vec![0], vec![1], vec![vec![1, 2]])?;
/// let config = SamplerConfig { suppression, ..SamplerConfig::greedy() };
/// let mut sampler = Sampler::new(config, 4)?;
/// let logits = [9.0, 8.0, 7.0, 6.0];
/// let mut answer = Vec::new();
/// for _ in 0..3 {
///     answer.push(sampler.sample(&logits, &answer)?);
/// }
/// assert_eq!(answer, [2, 1, 1]);
/// # Ok::<(), boostr::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Suppression(Arc<Lists>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Lists {
    /// Ascending.
    always: Vec<u32>,
    /// Ascending.
    first: Vec<u32>,
    /// Sequences of two tokens and more, each without its last two: by the last but one, with the last.
    after: BTreeMap<u32, Vec<(Vec<u32>, u32)>>,
}

impl Suppression {
    /// Tokens that never come, those that do not come first, and sequences that are never completed. A sequence of one
    /// token never comes.
    ///
    /// # Errors
    /// [`Error::Argument`] for a sequence without tokens, more than 2^16 sequences, or more than 2^20 tokens in them.
    pub fn new(
        mut always: Vec<u32>,
        mut first: Vec<u32>,
        sequences: Vec<Vec<u32>>,
    ) -> Result<Self> {
        let refuse = |reason| Err(Error::Argument { name: "sequences", reason });
        let (count, tokens) = (sequences.len(), sequences.iter().map(Vec::len).sum::<usize>());
        if count > MAX_SEQUENCES {
            return refuse(format!("expected at most {MAX_SEQUENCES}, found {count}"));
        }
        if tokens > MAX_TOKENS {
            return refuse(format!("expected at most {MAX_TOKENS} tokens in all, found {tokens}"));
        }
        let mut after = BTreeMap::<_, Vec<_>>::new();
        for mut sequence in sequences {
            match (sequence.pop(), sequence.pop()) {
                (None, _) => return refuse("expected token ids, found an empty sequence".into()),
                (Some(last), None) => always.push(last),
                (Some(last), Some(before)) => {
                    after.entry(before).or_default().push((sequence, last));
                }
            }
        }
        for ids in [&mut always, &mut first] {
            ids.sort_unstable();
            ids.dedup();
        }
        Ok(Self(Arc::new(Lists { always, first, after })))
    }

    /// Whether it keeps nothing out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Lists { always, first, after } = &*self.0;
        always.is_empty() && first.is_empty() && after.is_empty()
    }

    /// What it has without the tokens that are not below `limit`, and the sequences that they are in: no answer has
    /// those. With the tokens that were left out, ascending.
    #[must_use]
    pub fn below(&self, limit: usize) -> (Self, Vec<u32>) {
        let is_out = |id: &u32| *id as usize >= limit;
        let Lists { mut always, mut first, mut after } = (*self.0).clone();
        let mut out: Vec<u32> = always.iter().chain(&first).copied().filter(is_out).collect();
        always.retain(|id| !is_out(id));
        first.retain(|id| !is_out(id));
        for (before, ends) in &mut after {
            ends.retain(|(start, last)| {
                let ids = start.iter().chain([before, last]);
                let missing: Vec<u32> = ids.copied().filter(is_out).collect();
                out.extend(&missing);
                missing.is_empty()
            });
        }
        after.retain(|_, ends| !ends.is_empty());
        out.sort_unstable();
        out.dedup();
        (Self(Arc::new(Lists { always, first, after })), out)
    }

    /// Checks that of `limit` tokens one may begin an answer, and one may follow any.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if nothing is left somewhere.
    pub fn check(&self, limit: usize) -> Result<()> {
        let Lists { always, after, .. } = &*self.0;
        self.leave(None, limit, &[], true)?;
        // Only there so many sequences end that none may be left.
        let may_end = after.iter().filter(|(_, ends)| always.len() + ends.len() >= limit);
        may_end
            .map(|(before, _)| *before)
            .try_for_each(|before| self.leave(None, limit, &[before], false).map(drop))
    }

    /// Of the tokens `allowed`, those that may follow `history`, `is_first` in their answer. If none would be left of a
    /// constraint's, all of them: what a request asks for goes before what an author keeps out.
    ///
    /// # Errors
    /// [`Error::Argument`] if nothing is left of a vocabulary of `limit` tokens without a constraint.
    pub(crate) fn leave(
        &self,
        allowed: Option<&TokenSet>,
        limit: usize,
        history: &[u32],
        is_first: bool,
    ) -> Result<TokenSet> {
        let Lists { always, first, after } = &*self.0;
        let mut left = allowed.cloned().unwrap_or_else(|| TokenSet::new(limit, true));
        let first = if is_first { &first[..] } else { &[] };
        for &id in always.iter().chain(first) {
            left.forbid(id);
        }
        if let Some((before, head)) = history.split_last() {
            for (start, last) in after.get(before).into_iter().flatten() {
                if head.ends_with(start) {
                    left.forbid(*last);
                }
            }
        }
        match allowed {
            _ if !left.is_empty() => Ok(left),
            Some(allowed) => Ok(allowed.clone()),
            None => {
                let reason = format!(
                    "suppress_tokens, begin_suppress_tokens and bad_words_ids leave none of {limit} tokens"
                );
                Err(Error::Argument { name: "suppression", reason })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_that_leave_no_token_are_known_before_an_answer_is_asked_for() {
        let all: Vec<u32> = (0..4).collect();
        let after = |before: u32| all.iter().map(|id| vec![before, *id]).collect::<Vec<_>>();
        let none = || (Vec::new(), Vec::new(), Vec::new());
        for (suppression, is_fit) in [
            (none(), true),
            ((all.clone(), Vec::new(), Vec::new()), false),
            ((vec![0, 1, 2], Vec::new(), Vec::new()), true),
            ((vec![0, 1], vec![2, 3], Vec::new()), false),
            ((Vec::new(), all.clone(), Vec::new()), false),
            ((Vec::new(), Vec::new(), all.iter().map(|&id| vec![id]).collect()), false),
            ((Vec::new(), Vec::new(), after(2)), false),
            ((vec![3], Vec::new(), after(2)[..3].to_vec()), false),
            ((Vec::new(), vec![3], after(2)[..3].to_vec()), true),
        ] {
            let (always, first, sequences) = suppression.clone();
            let lists = Suppression::new(always, first, sequences).unwrap();
            assert_eq!(lists.check(4).is_ok(), is_fit, "{suppression:?}");
        }
    }
}
