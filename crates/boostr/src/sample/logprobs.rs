//! The model's own distribution.

/// `log_softmax` of logits, in f64.
pub(crate) struct LogSoftmax {
    largest: f64,
    /// ln of the sum of exp(logit - largest).
    log_sum: f64,
}

impl LogSoftmax {
    /// The distribution of logits of which at least one is finite, and none NaN or +inf.
    pub(crate) fn of(logits: &[f32]) -> Self {
        let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
        Self { largest, log_sum: sum.ln() }
    }

    /// The log-probability of a token of this logit; the most negative number of f32 stands for less.
    pub(crate) fn at(&self, logit: f32) -> f32 {
        (self.exact(logit) as f32).max(f32::MIN)
    }

    /// The same in f64; -inf for a logit of -inf.
    pub(crate) fn exact(&self, logit: f32) -> f64 {
        f64::from(logit) - self.largest - self.log_sum
    }

    /// The `count` likeliest tokens, likeliest first; of equal ones the lower id first. -inf is left out.
    pub(crate) fn top(&self, logits: &[f32], count: usize) -> Vec<(u32, f32)> {
        let mut all: Vec<(u32, f32)> = (0..)
            .zip(logits.iter().map(|&l| l + 0.0))
            .filter(|&(_, l)| l != f32::NEG_INFINITY)
            .collect();
        let likelier = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if count == 0 {
            return Vec::new();
        }
        if count < all.len() {
            all.select_nth_unstable_by(count - 1, likelier);
            all.truncate(count);
        }
        all.sort_unstable_by(likelier);
        all.into_iter().map(|(id, logit)| (id, self.at(logit))).collect()
    }
}
