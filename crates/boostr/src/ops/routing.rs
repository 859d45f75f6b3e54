//! The weights of a token's experts, from the scores that a router gives it.

/// How scores become weights of the experts that are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routing {
    /// The `used` largest scores, softmax over them.
    TopKSoftmax,
    /// Softmax over all scores, the `used` largest of it as they are.
    SoftmaxTopK,
    /// Sigmoid of the scores; chosen by it plus a bias of each expert, weighted without.
    Sigmoid,
}

/// What is done with the scores of the chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertWeights {
    /// The function of the scores.
    pub routing: Routing,
    /// Whether the weights of a token's experts are made to sum to 1.
    pub normalized: bool,
    /// Added to their sum before.
    pub sum_eps: f32,
    /// Factor of the weights.
    pub scale: f32,
}

impl ExpertWeights {
    /// Weights of `experts` of one token whose scores are `scores`.
    #[must_use]
    pub fn of(self, scores: &[f32], experts: &[usize]) -> Vec<f32> {
        let mut weights = self.raw(scores, experts);
        if self.normalized {
            let sum = weights.iter().sum::<f32>() + self.sum_eps;
            for weight in &mut weights {
                *weight /= sum;
            }
        }
        for weight in &mut weights {
            *weight *= self.scale;
        }
        weights
    }

    /// Weights before they are normalized and scaled.
    fn raw(self, scores: &[f32], experts: &[usize]) -> Vec<f32> {
        let chosen = |of: &[f32]| experts.iter().map(|&expert| of[expert]).collect::<Vec<f32>>();
        match self.routing {
            Routing::TopKSoftmax => softmax(&chosen(scores)),
            Routing::SoftmaxTopK => chosen(&softmax(scores)),
            Routing::Sigmoid => chosen(scores).into_iter().map(sigmoid).collect(),
        }
    }

    /// The gradient of the scores from that of the weights, `dout`.
    #[must_use]
    pub fn backward(self, scores: &[f32], experts: &[usize], dout: &[f32]) -> Vec<f32> {
        let raw = self.raw(scores, experts);
        let mut dweights: Vec<f32> = dout.iter().map(|dout| dout * self.scale).collect();
        if self.normalized {
            let sum = raw.iter().sum::<f32>() + self.sum_eps;
            let dot: f32 = raw.iter().zip(&dweights).map(|(weight, dw)| weight * dw).sum();
            for dw in &mut dweights {
                *dw = (*dw - dot / sum) / sum;
            }
        }
        let mut dscores = vec![0.0; scores.len()];
        let of_chosen = raw.iter().zip(&dweights);
        let dot: f32 = of_chosen.clone().map(|(weight, dw)| weight * dw).sum();
        match self.routing {
            Routing::TopKSoftmax => {
                for (&expert, (weight, dw)) in experts.iter().zip(of_chosen) {
                    dscores[expert] += weight * (dw - dot);
                }
            }
            Routing::SoftmaxTopK => {
                for (dscore, weight) in dscores.iter_mut().zip(softmax(scores)) {
                    *dscore = -weight * dot;
                }
                for (&expert, (weight, dw)) in experts.iter().zip(of_chosen) {
                    dscores[expert] += weight * dw;
                }
            }
            Routing::Sigmoid => {
                for (&expert, (weight, dw)) in experts.iter().zip(of_chosen) {
                    dscores[expert] += dw * weight * (1.0 - weight);
                }
            }
        }
        dscores
    }
}

/// `1 / (1 + exp(-x))`
#[must_use]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `exp(x) / sum of exp(x)`
#[must_use]
pub fn softmax(values: &[f32]) -> Vec<f32> {
    let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exps: Vec<f32> = values.iter().map(|x| (x - max).exp()).collect();
    let sum: f32 = exps.iter().sum();
    exps.iter().map(|x| x / sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_finite_differences() {
        let scores = [0.3f32, -1.2, 2.0, 0.7, -0.4];
        let (experts, dout) = ([0usize, 2, 4], [0.5f32, -1.5, 0.25]);
        for routing in [Routing::TopKSoftmax, Routing::SoftmaxTopK, Routing::Sigmoid] {
            for normalized in [false, true] {
                let weights = ExpertWeights { routing, normalized, sum_eps: 1e-20, scale: 2.5 };
                let value = |scores: &[f32]| -> f64 {
                    let of = weights.of(scores, &experts);
                    of.iter().zip(dout).map(|(w, d)| f64::from(*w) * f64::from(d)).sum()
                };
                let got = weights.backward(&scores, &experts, &dout);
                for i in 0..scores.len() {
                    let step = 1.0 / 64.0;
                    let (mut more, mut less) = (scores, scores);
                    more[i] += step;
                    less[i] -= step;
                    let want = (value(&more) - value(&less)) / f64::from(2.0 * step);
                    let error = (f64::from(got[i]) - want).abs();
                    assert!(error < 3e-4, "{weights:?} {i}: {} {want}", got[i]);
                }
            }
        }
    }
}
