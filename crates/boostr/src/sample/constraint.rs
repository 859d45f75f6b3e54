//! What a text may go on with.

use crate::error::Result;

/// Bits of a word of a [`TokenSet`].
const BITS: usize = u32::BITS as usize;

/// A set of token ids below a limit, one bit each.
///
/// ```
/// use boostr::sample::TokenSet;
///
/// let mut set = TokenSet::new(100, false);
/// set.allow(7);
/// set.allow(100); // not below the limit
/// assert!(set.contains(7) && !set.contains(100));
/// assert_eq!(set.len(), 1);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenSet {
    limit: usize,
    /// Bit `id % 32` of word `id / 32`; bits from the limit up are 0.
    words: Vec<u32>,
}

impl TokenSet {
    /// All ids below `limit`, or none of them.
    #[must_use]
    pub fn new(limit: usize, all: bool) -> Self {
        let word = if all { u32::MAX } else { 0 };
        Self::from_words(limit, vec![word; limit.div_ceil(BITS)])
    }

    /// The ids below `limit` whose bit is set: bit `id % 32` of word `id / 32`. Words that are missing are 0.
    #[must_use]
    pub fn from_words(limit: usize, mut words: Vec<u32>) -> Self {
        words.resize(limit.div_ceil(BITS), 0);
        if let Some(last) = words.last_mut()
            && !limit.is_multiple_of(BITS)
        {
            *last &= (1 << (limit % BITS)) - 1;
        }
        Self { limit, words }
    }

    /// Ids from here up are never in the set.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Puts an id into the set; one that is not below the limit stays out.
    pub fn allow(&mut self, id: u32) {
        if (id as usize) < self.limit
            && let Some(word) = self.words.get_mut(id as usize / BITS)
        {
            *word |= 1 << (id % u32::BITS);
        }
    }

    /// Takes an id out of the set.
    pub fn forbid(&mut self, id: u32) {
        if let Some(word) = self.words.get_mut(id as usize / BITS) {
            *word &= !(1 << (id % u32::BITS));
        }
    }

    /// Whether an id is in the set.
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        self.words.get(id as usize / BITS).is_some_and(|word| word >> (id % u32::BITS) & 1 == 1)
    }

    /// How many ids are in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether no id is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// The ids in the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.words).flat_map(|(index, &word)| {
            (0..u32::BITS).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index * 32 + bit)
        })
    }

    /// Makes the score of each id that is not in the set -inf.
    pub(super) fn mask(&self, scores: &mut [f32]) {
        let covered = self.limit.min(scores.len());
        let (inside, outside) = scores.split_at_mut(covered);
        outside.fill(f32::NEG_INFINITY);
        for (&word, scores) in self.words.iter().zip(inside.chunks_mut(BITS)) {
            if word == u32::MAX {
                continue;
            }
            for (bit, score) in scores.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
    }
}

/// What a text may go on with, token by token: a grammar, for instance.
///
/// ```
/// use boostr::sample::{Constraint, TokenSet};
///
/// /// Any text of a number of tokens.
/// #[derive(Clone)]
/// struct Exactly(usize);
///
/// impl Constraint for Exactly {
///     fn allowed(&mut self) -> boostr::Result<TokenSet> {
///         Ok(TokenSet::new(100, self.0 > 0))
///     }
///     fn accept(&mut self, _: u32) -> boostr::Result<()> {
///         self.0 = self.0.saturating_sub(1);
///         Ok(())
///     }
///     fn is_complete(&self) -> bool {
///         self.0 == 0
///     }
///     fn fork(&self) -> Box<dyn Constraint> {
///         Box::new(self.clone())
///     }
/// }
///
/// let mut text: Box<dyn Constraint> = Box::new(Exactly(2));
/// let mut other = text.fork();
/// other.accept(5)?;
/// other.accept(6)?;
/// assert!(other.is_complete() && !text.is_complete());
/// assert_eq!(text.allowed()?.len(), 100);
/// # Ok::<(), boostr::Error>(())
/// ```
pub trait Constraint: Send {
    /// The ids that may come next. One that ends the text is among them only where the text may end.
    ///
    /// # Errors
    ///
    /// Whatever makes the constraint unable to tell; a set that is empty is an error of its own when a
    /// token is chosen.
    fn allowed(&mut self) -> Result<TokenSet>;

    /// Goes on by a token that was chosen.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) when the token is not among the allowed ones.
    fn accept(&mut self, id: u32) -> Result<()>;

    /// Whether nothing may follow, not even a token that ends the text.
    fn is_complete(&self) -> bool;

    /// A copy that goes its own way.
    fn fork(&self) -> Box<dyn Constraint>;
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Self {
        self.fork()
    }
}
