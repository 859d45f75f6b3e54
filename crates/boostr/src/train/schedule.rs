//! The learning rate of each step: a linear warm-up to the peak, then one of three ways down to a floor.
//!
//! With W steps of warm-up, T steps in all and a floor f, a share of the peak, step t (from 0) has
//!
//! ```text
//! t < W                  peak * (t + 1) / (W + 1)
//! cosine                 peak * (f + (1 - f) * (1 + cos(pi p)) / 2)    p = (t - W) / (T - W)
//! linear                 peak * (f + (1 - f) * (1 - p))
//! warmup-stable-decay    peak                                          t < D
//!                        peak * (f + (1 - f) * (1 - sqrt(q)))          q = (t - D) / (T - D)
//! t >= T                 peak * f
//! ```
//!
//! where the decay begins at `D = T - decay_share * T`, but not before W. So every step within T has a rate
//! above the floor, the first one too, and there is no jump at W, D or T.
//!
//! The cosine is that of Loshchilov and Hutter 2017, "SGDR", without restarts; warm-up, plateau and decay
//! are those of Hu et al. 2024, "MiniCPM", with the root of Hägele et al. 2024, "Scaling laws and
//! compute-optimal training beyond fixed training durations". Before D the rates do not depend on T, so
//! such a run can be made longer without having been planned so.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How the learning rate goes down after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// Half a period of a cosine.
    #[default]
    Cosine,
    /// A straight line.
    Linear,
    /// The peak for most steps, a root in the last ones. Also called `wsd`.
    #[serde(alias = "wsd")]
    WarmupStableDecay,
}

/// The learning rate of each step; the fields are the keys of a configuration file.
///
/// ```
/// use boostr::train::{Schedule, ScheduleKind};
///
/// let schedule = Schedule {
///     kind: ScheduleKind::Linear, lr: 1e-3, warmup_steps: 9, total_steps: 109, floor: 0.0, ..Schedule::default()
/// };
/// assert_eq!([0, 9, 59, 109].map(|step| schedule.lr(step)), [1e-4, 1e-3, 5e-4, 0.0]);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Schedule {
    /// The way down.
    pub kind: ScheduleKind,
    /// The peak.
    pub lr: f64,
    /// Steps of the warm-up.
    pub warmup_steps: u64,
    /// Steps in all, with those of the warm-up.
    pub total_steps: u64,
    /// What is left of the peak at the end, in 0..=1.
    pub floor: f64,
    /// Share of all steps in which a warmup-stable-decay schedule decays, above 0 and at most 1.
    pub decay_share: f64,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            kind: ScheduleKind::Cosine,
            lr: 1e-3,
            warmup_steps: 100,
            total_steps: 1000,
            floor: 0.1,
            decay_share: 0.2,
        }
    }
}

impl Schedule {
    /// Checks every field's range.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] with the name of the first field that is out of range.
    pub fn validate(&self) -> Result<()> {
        let check = |name, ok: bool, range: &str, found: &dyn std::fmt::Display| {
            if ok {
                return Ok(());
            }
            Err(Error::Argument { name, reason: format!("expected {range}, found {found}") })
        };
        let Self { lr, warmup_steps, total_steps, floor, decay_share, .. } = *self;
        check("lr", lr.is_finite() && lr > 0.0, "a finite number > 0", &lr)?;
        check("total_steps", total_steps > 0, "at least 1 step", &total_steps)?;
        let range = format!("at most the {total_steps} steps in all");
        check("warmup_steps", warmup_steps <= total_steps, &range, &warmup_steps)?;
        check("floor", (0.0..=1.0).contains(&floor), "a number from 0 to 1", &floor)?;
        let is_share = decay_share > 0.0 && decay_share <= 1.0;
        check("decay_share", is_share, "a number > 0 and <= 1", &decay_share)
    }

    /// The learning rate of `step`, counted from 0; the floor for all steps past the end.
    #[must_use]
    pub fn lr(&self, step: u64) -> f64 {
        let Self { kind, lr, warmup_steps, total_steps, floor, .. } = *self;
        if step >= total_steps {
            return lr * floor;
        }
        if step < warmup_steps {
            return lr * ((step + 1) as f64 / (warmup_steps + 1) as f64);
        }
        let since = |start: u64| step.saturating_sub(start) as f64 / (total_steps - start) as f64;
        let left = match kind {
            ScheduleKind::Cosine => f64::midpoint(1.0, (PI * since(warmup_steps)).cos()),
            ScheduleKind::Linear => 1.0 - since(warmup_steps),
            ScheduleKind::WarmupStableDecay => 1.0 - since(self.decay_start()).sqrt(),
        };
        lr * (floor + (1.0 - floor) * left)
    }

    /// The first step of the decay of a warmup-stable-decay schedule (D); at most `total_steps`.
    fn decay_start(&self) -> u64 {
        let decay_steps = (self.decay_share * self.total_steps as f64).round() as u64;
        self.total_steps.saturating_sub(decay_steps.max(1)).max(self.warmup_steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ScheduleKind::{Cosine, Linear, WarmupStableDecay};

    fn schedule(kind: ScheduleKind, warmup_steps: u64, total_steps: u64, floor: f64) -> Schedule {
        Schedule { kind, lr: 2.0, warmup_steps, total_steps, floor, decay_share: 0.25 }
    }

    #[test]
    fn the_ends_are_those_of_the_formula() {
        for kind in [Cosine, Linear, WarmupStableDecay] {
            for floor in [0.0, 0.1, 1.0] {
                let schedule = schedule(kind, 19, 100, floor);
                schedule.validate().unwrap();
                assert_eq!(schedule.lr(0), 2.0 / 20.0);
                assert_eq!(schedule.lr(9), 1.0);
                assert_eq!(schedule.lr(19), 2.0);
                for past in [100, 101, u64::MAX] {
                    assert_eq!(schedule.lr(past), 2.0 * floor);
                }
            }
        }
    }

    #[test]
    fn between_the_ends_each_kind_has_its_form() {
        let half_way = 60;
        assert!((schedule(Cosine, 20, 100, 0.1).lr(half_way) - 2.0 * 0.55).abs() < 1e-12);
        assert!((schedule(Linear, 20, 100, 0.1).lr(half_way) - 2.0 * 0.55).abs() < 1e-12);
        // A quarter into the cosine: (1 + cos(pi / 4)) / 2.
        let quarter = 0.1 + 0.9 * (1.0 + 0.5f64.sqrt()) / 2.0;
        assert!((schedule(Cosine, 20, 100, 0.1).lr(40) - 2.0 * quarter).abs() < 1e-12);

        let wsd = schedule(WarmupStableDecay, 20, 100, 0.1);
        assert!((20..=75).all(|step| wsd.lr(step) == 2.0));
        assert!((wsd.lr(84) - 2.0 * (0.1 + 0.9 * 0.4)).abs() < 1e-12); // q = 9 / 25
    }

    #[test]
    fn rates_rise_to_the_peak_then_fall_and_never_jump() {
        for (warmup, total) in [(0, 1), (0, 2), (1, 2), (5, 5), (3, 4), (10, 400), (399, 400)] {
            for (kind, floor) in [(Cosine, 0.0), (Linear, 0.1), (WarmupStableDecay, 0.05)] {
                let schedule = schedule(kind, warmup, total, floor);
                // The steepest step of each form, as a share of the peak.
                let steepest = match kind {
                    Cosine => PI / 2.0 / (total - warmup).max(1) as f64,
                    Linear => 1.0 / (total - warmup).max(1) as f64,
                    WarmupStableDecay => {
                        (1.0 / (total - schedule.decay_start()).max(1) as f64).sqrt()
                    }
                };
                for step in 0..total + 3 {
                    let (now, next) = (schedule.lr(step), schedule.lr(step + 1));
                    assert!(now > 0.0 || step >= total, "{schedule:?} at {step}");
                    if step < warmup {
                        // A warm-up to the very end meets the floor there.
                        let to_peak = next - now - 2.0 / (warmup + 1) as f64;
                        assert!(
                            to_peak.abs() < 1e-12 || step + 1 == total,
                            "{schedule:?} at {step}"
                        );
                    } else {
                        let fall = now - next;
                        assert!(
                            fall >= 0.0 && fall <= 2.0 * steepest + 1e-12,
                            "{schedule:?} at {step}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_longer_plan_has_the_same_rates_before_the_decay() {
        let (short, long) =
            (schedule(WarmupStableDecay, 10, 100, 0.1), schedule(WarmupStableDecay, 10, 900, 0.1));
        assert!((0..75).all(|step| short.lr(step) == long.lr(step)));
    }

    #[test]
    fn configuration_files_have_these_names() {
        let text =
            r#"{"kind": "warmup-stable-decay", "lr": 0.5, "warmup_steps": 1, "total_steps": 8}"#;
        let read: Schedule = serde_json::from_str(text).unwrap();
        let defaults = Schedule::default();
        assert_eq!(
            read,
            Schedule {
                kind: WarmupStableDecay,
                lr: 0.5,
                warmup_steps: 1,
                total_steps: 8,
                ..defaults
            }
        );
        let kind = |name: &str| serde_json::from_str::<ScheduleKind>(&format!("\"{name}\""));
        assert_eq!(kind("cosine").unwrap(), Cosine);
        assert_eq!(kind("linear").unwrap(), Linear);
        assert_eq!(kind("wsd").unwrap(), WarmupStableDecay);
        assert!(kind("Cosine").is_err());
        let typo = serde_json::from_str::<Schedule>(r#"{"warmup": 1}"#).unwrap_err().to_string();
        assert!(typo.contains("unknown field `warmup`") && typo.contains("warmup_steps"), "{typo}");
    }

    #[test]
    fn a_schedule_comes_back_from_json_with_the_same_bits() {
        // Numbers of 17 digits, as computed ones have.
        for i in 1..2000 {
            let x = 1.0 / f64::from(i).powf(1.3);
            let schedule = Schedule { lr: x, floor: x, decay_share: x, ..Schedule::default() };
            let text = serde_json::to_string(&schedule).unwrap();
            assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), schedule);
        }
    }

    #[test]
    fn what_is_out_of_range_is_named() {
        let good = Schedule::default();
        for (bad, want) in [
            (
                Schedule { lr: 0.0, ..good.clone() },
                "argument `lr`: expected a finite number > 0, found 0",
            ),
            (
                Schedule { lr: f64::NAN, ..good.clone() },
                "argument `lr`: expected a finite number > 0, found NaN",
            ),
            (
                Schedule { total_steps: 0, ..good.clone() },
                "argument `total_steps`: expected at least 1 step, found 0",
            ),
            (
                Schedule { warmup_steps: 1001, ..good.clone() },
                "argument `warmup_steps`: expected at most the 1000 steps in all, found 1001",
            ),
            (
                Schedule { floor: 1.5, ..good.clone() },
                "argument `floor`: expected a number from 0 to 1, found 1.5",
            ),
            (
                Schedule { decay_share: 0.0, ..good.clone() },
                "argument `decay_share`: expected a number > 0 and <= 1, found 0",
            ),
        ] {
            assert_eq!(bad.validate().unwrap_err().to_string(), want);
        }
        good.validate().unwrap();
    }
}
