//! The sampler against plain definitions of its filters, and stop strings against a search of the whole text.

use boostr::error::Error;
use boostr::sample::{Released, Sampler, SamplerConfig, StopStrings, TokenSet};
use proptest::prelude::*;

fn sampler(config: SamplerConfig, vocab_limit: usize) -> Sampler {
    Sampler::new(config, vocab_limit).unwrap()
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

/// Probability of each id by the definitions in the module's documentation, everything sorted and in f64.
fn definition(config: &SamplerConfig, logits: &[f32], history: &[u32]) -> Vec<f64> {
    let mut logits: Vec<f32> = logits.to_vec();
    let window = match config.repetition_window {
        0 => history,
        window => &history[history.len().saturating_sub(window)..],
    };
    for (id, logit) in logits.iter_mut().enumerate() {
        if window.contains(&(id as u32)) {
            let penalty = config.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
    }
    let mut kept: Vec<usize> =
        (0..logits.len()).filter(|&id| logits[id] != f32::NEG_INFINITY).collect();
    kept.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
    let scaled = |id: usize| f64::from(logits[id]) / f64::from(config.temperature);
    let top = scaled(kept[0]);
    let weight = |id: usize| (scaled(id) - top).exp();
    if config.top_k > 0 {
        kept.truncate(config.top_k);
    }
    let total: f64 = kept.iter().map(|&id| weight(id)).sum();
    let mut before = 0.0;
    kept.retain(|&id| {
        let keep = config.top_p >= 1.0 || before < f64::from(config.top_p);
        before += weight(id) / total;
        keep
    });
    kept.retain(|&id| weight(id) >= f64::from(config.min_p));
    let total: f64 = kept.iter().map(|&id| weight(id)).sum();
    (0..logits.len()).map(|id| if kept.contains(&id) { weight(id) / total } else { 0.0 }).collect()
}

/// How often each id is drawn.
fn counts(config: &SamplerConfig, logits: &[f32], history: &[u32], draws: usize) -> Vec<usize> {
    let mut sampler = sampler(config.clone(), logits.len());
    let mut counts = vec![0; logits.len()];
    for _ in 0..draws {
        counts[sampler.sample(logits, history).unwrap() as usize] += 1;
    }
    counts
}

/// Pearson's statistic over ids that are expected at least five times, with its degrees of freedom.
fn chi_square(counts: &[usize], expected: &[f64]) -> (f64, usize) {
    let draws: usize = counts.iter().sum();
    let (mut sum, mut cells) = (0.0, 0);
    let (mut rare_count, mut rare_expected) = (0, 0.0);
    for (&count, &p) in counts.iter().zip(expected) {
        let expected = p * draws as f64;
        if p == 0.0 {
            assert_eq!(count, 0, "an excluded token was drawn");
        } else if expected < 5.0 {
            rare_count += count;
            rare_expected += expected;
        } else {
            sum += (count as f64 - expected).powi(2) / expected;
            cells += 1;
        }
    }
    if rare_expected >= 5.0 {
        sum += (rare_count as f64 - rare_expected).powi(2) / rare_expected;
        cells += 1;
    }
    (sum, cells.max(1) - 1)
}

fn some_logits(len: usize) -> Vec<f32> {
    (0..len).map(|id| ((id * 7919 % 101) as f32 - 50.0) / 12.0).collect()
}

#[test]
fn draws_follow_the_definition() {
    let base = SamplerConfig { seed: 7, ..SamplerConfig::default() };
    let configs = [
        base.clone(),
        SamplerConfig { temperature: 0.5, ..base.clone() },
        SamplerConfig { temperature: 3.0, ..base.clone() },
        SamplerConfig { top_k: 5, ..base.clone() },
        SamplerConfig { top_p: 0.8, ..base.clone() },
        SamplerConfig { min_p: 0.2, ..base.clone() },
        SamplerConfig { repetition_penalty: 1.5, ..base.clone() },
        SamplerConfig { repetition_penalty: 0.7, repetition_window: 2, ..base.clone() },
        SamplerConfig {
            temperature: 1.3,
            top_k: 20,
            top_p: 0.9,
            min_p: 0.05,
            repetition_penalty: 1.2,
            ..base
        },
    ];
    let logits = some_logits(40);
    let history = [3, 13, 13, 30, 999];
    for config in configs {
        let expected = definition(&config, &logits, &history);
        let (statistic, freedom) =
            chi_square(&counts(&config, &logits, &history, 20_000), &expected);
        // Mean f, standard deviation sqrt(2f): a right sampler is above this once in a million seeds.
        let bound = freedom as f64 + 6.0 * (2.0 * freedom as f64).sqrt();
        assert!(statistic <= bound, "{statistic} of {freedom} degrees for {config:?}");
    }
}

proptest! {
    #![proptest_config(cases(400))]

    /// Ties and excluded tokens are likely: logits come from few values.
    #[test]
    fn only_tokens_of_the_definition_are_drawn(
        logits in prop::collection::vec(
            prop_oneof![4 => (-6_i8..6).prop_map(f32::from), 1 => Just(f32::NEG_INFINITY), 4 => -9.0_f32..9.0],
            1..300,
        ),
        temperature in 0.05_f32..4.0,
        top_k in 0_usize..80,
        top_p in prop_oneof![Just(1.0_f32), 0.01_f32..1.0],
        min_p in prop_oneof![Just(0.0_f32), 0.0_f32..1.0],
        repetition_penalty in prop_oneof![Just(1.0_f32), 0.5_f32..2.0],
        repetition_window in 0_usize..8,
        history in prop::collection::vec(0_u32..320, 0..20),
        seed in any::<u64>(),
    ) {
        prop_assume!(logits.iter().any(|logit| logit.is_finite()));
        let config = SamplerConfig {
            temperature, top_k, top_p, min_p, repetition_penalty, repetition_window, seed,
            ..SamplerConfig::default()
        };
        let expected = definition(&config, &logits, &history);
        let mut sampler = sampler(config, logits.len());
        let mut seen = vec![0; logits.len()];
        for _ in 0..200 {
            seen[sampler.sample(&logits, &history).unwrap() as usize] += 1;
        }
        for (id, &p) in expected.iter().enumerate() {
            prop_assert!(seen[id] == 0 || p > 0.0, "token {} is cut by the definition", id);
            // (1 - p)^200 < 1e-8.
            prop_assert!(seen[id] > 0 || p < 0.09, "token {} has probability {}", id, p);
        }
    }

    #[test]
    fn greedy_takes_the_lowest_id_of_the_largest_logit(
        logits in prop::collection::vec((-4_i8..4).prop_map(f32::from), 1..50),
    ) {
        let largest = logits.iter().copied().fold(f32::MIN, f32::max);
        let expected = logits.iter().position(|&logit| logit == largest).unwrap();
        let chosen = sampler(SamplerConfig::greedy(), logits.len()).sample(&logits, &[]).unwrap();
        prop_assert_eq!(chosen as usize, expected);
    }

    #[test]
    fn padding_ids_are_never_chosen(
        limit in 1_usize..20, padding in 1_usize..20, temperature in 0.0_f32..2.0, seed in any::<u64>(),
    ) {
        let mut logits = vec![0.0; limit];
        logits.extend(vec![f32::INFINITY; padding]);
        let config = SamplerConfig {
            temperature, seed, repetition_penalty: 1.1, top_p: 0.9, ..SamplerConfig::default()
        };
        let mut sampler = sampler(config, limit);
        for _ in 0..50 {
            let history = [limit as u32, u32::MAX, 0];
            prop_assert!((sampler.sample(&logits, &history).unwrap() as usize) < limit);
        }
    }
}

#[test]
fn a_padding_row_with_the_largest_logit_or_nan_changes_nothing() {
    let logits = some_logits(30);
    let padded: Vec<f32> = logits.iter().copied().chain([1e30, f32::NAN]).collect();
    let mut plain = sampler(SamplerConfig::default(), 30);
    let mut limited = plain.clone();
    for _ in 0..200 {
        assert_eq!(plain.sample(&logits, &[]).unwrap(), limited.sample(&padded, &[]).unwrap());
    }
}

/// Computed by a separate script; a change here changes what every saved seed gives.
#[test]
fn a_seed_gives_this_sequence() {
    let config = SamplerConfig { seed: 1234, top_p: 0.95, ..SamplerConfig::default() };
    let mut sampler = sampler(config, 40);
    let drawn: Vec<u32> = (0..16).map(|_| sampler.sample(&some_logits(40), &[]).unwrap()).collect();
    assert_eq!(drawn, [7, 17, 32, 27, 7, 7, 22, 27, 27, 2, 32, 27, 39, 17, 19, 24]);
}

#[test]
fn a_saved_generator_state_goes_on() {
    let logits = some_logits(40);
    let mut first = sampler(SamplerConfig { seed: 9, ..SamplerConfig::default() }, 40);
    first.sample(&logits, &[]).unwrap();
    let mut second = sampler(SamplerConfig::default(), 40);
    second.set_rng_state(first.rng_state());
    for _ in 0..50 {
        assert_eq!(first.sample(&logits, &[]).unwrap(), second.sample(&logits, &[]).unwrap());
    }
}

#[test]
fn a_repeated_token_is_penalised_once() {
    let config = SamplerConfig { repetition_penalty: 1.5, ..SamplerConfig::greedy() };
    let mut sampler = sampler(config, 3);
    // 4 / 1.5 = 2.67 stays ahead of 2; 4 / 1.5^2 = 1.78 would not.
    assert_eq!(sampler.sample(&[4.0, 2.0, -1.0], &[0, 0, 0]).unwrap(), 0);
    assert_eq!(sampler.sample(&[2.9, 2.0, -1.0], &[0]).unwrap(), 1);
    assert_eq!(sampler.sample(&[-1.0, -1.4, -9.0], &[0]).unwrap(), 1);
}

#[test]
fn tokens_before_the_window_are_not_penalised() {
    let config =
        SamplerConfig { repetition_penalty: 9.0, repetition_window: 2, ..SamplerConfig::greedy() };
    let mut sampler = sampler(config, 3);
    assert_eq!(sampler.sample(&[3.0, 2.0, 1.0], &[0, 1, 2]).unwrap(), 0);
    assert_eq!(sampler.sample(&[3.0, 2.0, 1.0], &[1, 0, 2]).unwrap(), 1);
}

#[test]
fn extreme_logits_and_settings_give_a_token() {
    let extremes = [f32::MAX, f32::MIN, 0.0, -0.0, f32::MIN_POSITIVE, f32::NEG_INFINITY];
    for temperature in [0.0, f32::MIN_POSITIVE, 1e-45, 1.0, f32::MAX] {
        for repetition_penalty in [1e-45, 1.0, f32::MAX] {
            let config = SamplerConfig {
                temperature,
                repetition_penalty,
                top_p: 0.0,
                min_p: 1.0,
                ..SamplerConfig::default()
            };
            let mut sampler = sampler(config, extremes.len());
            for history in [&[][..], &[0, 1, 2, 3, 4, 5]] {
                assert!(sampler.sample(&extremes, history).unwrap() < 5);
            }
        }
    }
}

#[test]
fn minus_zero_ties_with_zero() {
    assert_eq!(sampler(SamplerConfig::greedy(), 2).sample(&[-0.0, 0.0], &[]).unwrap(), 0);
    let config = SamplerConfig { top_k: 1, ..SamplerConfig::default() };
    assert_eq!(sampler(config, 2).sample(&[-0.0, 0.0], &[]).unwrap(), 0);
}

#[test]
fn logits_that_are_no_distribution_are_refused() {
    let message = |logits: &[f32]| {
        let [greedy, drawn] = [SamplerConfig::greedy(), SamplerConfig::default()].map(|config| {
            match sampler(config, 3).sample(logits, &[]) {
                Err(Error::Argument { name: "logits", reason }) => reason,
                other => panic!("expected a refusal of {logits:?}, found {other:?}"),
            }
        });
        assert_eq!(greedy, drawn);
        greedy
    };
    assert_eq!(message(&[0.0, f32::NAN, 1.0]), "expected numbers, found NaN for token 1");
    assert!(message(&[0.0, 1.0, f32::INFINITY]).contains("+inf for token 2"));
    assert!(message(&[f32::NEG_INFINITY; 3]).contains("all 3 are -inf"));
    let short = sampler(SamplerConfig::greedy(), 3).sample(&[1.0], &[]).unwrap_err();
    assert_eq!(short.to_string(), "tensor `logits` has shape [1], expected [3]");
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let base = SamplerConfig::default();
    let nan = f32::NAN;
    let bad = [
        ("temperature", SamplerConfig { temperature: -0.1, ..base.clone() }),
        ("temperature", SamplerConfig { temperature: f32::INFINITY, ..base.clone() }),
        ("temperature", SamplerConfig { temperature: nan, ..base.clone() }),
        ("top_p", SamplerConfig { top_p: -0.1, ..base.clone() }),
        ("top_p", SamplerConfig { top_p: 1.1, ..base.clone() }),
        ("top_p", SamplerConfig { top_p: nan, ..base.clone() }),
        ("min_p", SamplerConfig { min_p: -0.1, ..base.clone() }),
        ("min_p", SamplerConfig { min_p: 1.1, ..base.clone() }),
        ("min_p", SamplerConfig { min_p: nan, ..base.clone() }),
        ("repetition_penalty", SamplerConfig { repetition_penalty: 0.0, ..base.clone() }),
        ("repetition_penalty", SamplerConfig { repetition_penalty: nan, ..base.clone() }),
        ("presence_penalty", SamplerConfig { presence_penalty: 2.1, ..base.clone() }),
        ("presence_penalty", SamplerConfig { presence_penalty: nan, ..base.clone() }),
        ("frequency_penalty", SamplerConfig { frequency_penalty: -2.1, ..base.clone() }),
        ("frequency_penalty", SamplerConfig { frequency_penalty: nan, ..base.clone() }),
        ("logit_bias", SamplerConfig { logit_bias: vec![(1, 0.0), (2, 101.0)], ..base.clone() }),
        ("logit_bias", SamplerConfig { logit_bias: vec![(0, nan)], ..base.clone() }),
    ];
    for (field, config) in bad {
        match config.validate() {
            Err(Error::Argument { name, .. }) => assert_eq!(name, field),
            other => panic!("expected a refusal of {config:?}, found {other:?}"),
        }
        assert!(Sampler::new(config, 10).is_err());
    }
    for limit in [0, (1 << 24) + 1] {
        assert!(matches!(
            Sampler::new(base.clone(), limit),
            Err(Error::Argument { name: "vocab_limit", .. })
        ));
    }
    let biased = SamplerConfig { logit_bias: vec![(9, 1.0), (10, 1.0)], ..base };
    assert!(Sampler::new(biased.clone(), 11).is_ok());
    let error = Sampler::new(biased, 10).unwrap_err();
    assert_eq!(error.to_string(), "argument `logit_bias`: expected token ids below 10, found 10");
}

#[test]
fn settings_are_read_from_json_with_defaults() {
    let config: SamplerConfig = serde_json::from_str(r#"{"top_k": 40}"#).unwrap();
    assert_eq!(config, SamplerConfig { top_k: 40, ..SamplerConfig::default() });
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<SamplerConfig>(&json).unwrap(), config);
}

/// The logits that the filters see, in f64: biased, penalised and masked one token after another.
fn adjusted(
    config: &SamplerConfig,
    logits: &[f32],
    history: &[u32],
    prompt: usize,
    allowed: Option<&TokenSet>,
) -> Vec<f64> {
    let window = match config.repetition_window {
        0 => history,
        window => &history[history.len().saturating_sub(window)..],
    };
    let generated = &history[prompt.min(history.len())..];
    let one = |(id, &logit): (usize, &f32)| {
        let id = id as u32;
        if allowed.is_some_and(|allowed| !allowed.contains(id)) {
            return f64::NEG_INFINITY;
        }
        let mut logit = f64::from(logit);
        for (biased, bias) in &config.logit_bias {
            logit += if *biased == id { f64::from(*bias) } else { 0.0 };
        }
        if window.contains(&id) {
            let penalty = f64::from(config.repetition_penalty);
            logit = if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
        let count = generated.iter().filter(|&&other| other == id).count();
        if count > 0 {
            logit -= f64::from(config.presence_penalty);
            logit -= f64::from(config.frequency_penalty) * count as f64;
        }
        logit
    };
    logits.iter().enumerate().map(one).collect()
}

/// `log_softmax` by its formula.
fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted = logits.iter().map(|&logit| f64::from(logit) - f64::from(largest));
    let sum: f64 = shifted.clone().map(f64::exp).sum();
    shifted.map(|logit| logit - sum.ln()).collect()
}

proptest! {
    #![proptest_config(cases(600))]

    /// With a low temperature the choice is the largest adjusted logit, or one that rounding cannot tell from it.
    #[test]
    fn bias_penalties_and_mask_follow_their_definition(
        logits in prop::collection::vec(prop_oneof![9 => -9.0_f32..9.0, 1 => Just(f32::NEG_INFINITY)], 2..120),
        presence_penalty in -2.0_f32..=2.0,
        frequency_penalty in prop_oneof![Just(0.0_f32), -2.0_f32..=2.0],
        repetition_penalty in prop_oneof![Just(1.0_f32), 0.5_f32..2.0],
        repetition_window in 0_usize..8,
        bias in prop::collection::vec((0_u32..120, -10.0_f32..10.0), 0..6),
        history in prop::collection::vec(0_u32..130, 0..40),
        prompt in 0_usize..50,
        forbidden in prop::collection::vec(0_u32..130, 0..60),
        (masked, greedy) in any::<(bool, bool)>(),
    ) {
        let logit_bias: Vec<_> = bias.into_iter().filter(|&(id, _)| (id as usize) < logits.len()).collect();
        let config = SamplerConfig {
            temperature: if greedy { 0.0 } else { 1e-7 },
            presence_penalty, frequency_penalty, repetition_penalty, repetition_window, logit_bias,
            ..SamplerConfig::default()
        };
        let mut allowed = TokenSet::new(logits.len(), true);
        for &id in &forbidden {
            allowed.forbid(id);
        }
        let allowed = masked.then_some(&allowed);
        let expected = adjusted(&config, &logits, &history, prompt, allowed);
        let largest = expected.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut sampler = sampler(config, logits.len());
        prop_assume!(logits.iter().any(|logit| logit.is_finite()));
        for _ in 0..2 {
            match sampler.choose(&logits, &history, prompt, allowed, None) {
                Ok(choice) => {
                    let found = expected[choice.id as usize];
                    prop_assert!(found >= largest - 3e-5, "token {} has {found}, not {largest}", choice.id);
                    prop_assert_eq!((choice.logprob, choice.top.len()), (0.0, 0));
                }
                Err(error) => {
                    prop_assert_eq!(largest, f64::NEG_INFINITY);
                    prop_assert!(error.to_string().starts_with("argument `allowed`: none of the"), "{}", error);
                }
            }
        }
    }

    #[test]
    fn log_probabilities_are_those_of_the_models_own_distribution(
        logits in prop::collection::vec(
            prop_oneof![4 => -30.0_f32..30.0, 2 => (-2_i8..2).prop_map(f32::from), 1 => Just(f32::NEG_INFINITY)],
            1..200,
        ),
        top in 0_usize..250,
        seed in any::<u64>(),
    ) {
        prop_assume!(logits.iter().any(|logit| logit.is_finite()));
        let config = SamplerConfig {
            seed, temperature: 1.7, top_k: 9, presence_penalty: 1.0, logit_bias: vec![(0, 3.0)],
            ..SamplerConfig::default()
        };
        let padded: Vec<f32> = logits.iter().copied().chain([90.0, f32::NAN]).collect();
        let choice = sampler(config.clone(), logits.len()).choose(&padded, &[0], 0, None, Some(top)).unwrap();
        let bare = sampler(config, logits.len()).choose(&padded, &[0], 0, None, None).unwrap();
        prop_assert_eq!(choice.id, bare.id, "the report changes nothing");
        let expected = log_probabilities(&logits);
        let mut order: Vec<usize> = (0..logits.len()).filter(|&id| logits[id].is_finite()).collect();
        order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
        order.truncate(top);
        let ids: Vec<usize> = choice.top.iter().map(|&(id, _)| id as usize).collect();
        prop_assert_eq!(ids, order);
        for (id, logprob) in choice.top.iter().copied().chain([(choice.id, choice.logprob)]) {
            let expected = expected[id as usize];
            prop_assert!((f64::from(logprob) - expected).abs() <= 1e-5, "{} {} {}", id, logprob, expected);
        }
    }

    /// Old settings draw what they drew: `choose` with nothing of the new is `sample`.
    #[test]
    fn a_mask_of_all_tokens_changes_nothing(
        logits in prop::collection::vec(-9.0_f32..9.0, 1..100), seed in any::<u64>(), top_p in 0.1_f32..1.0,
    ) {
        let config = SamplerConfig { seed, top_p, ..SamplerConfig::default() };
        let (mut plain, mut masked) = (sampler(config.clone(), logits.len()), sampler(config, logits.len()));
        let all = TokenSet::new(logits.len(), true);
        for _ in 0..20 {
            let id = plain.sample(&logits, &[]).unwrap();
            prop_assert_eq!(masked.choose(&logits, &[], 0, Some(&all), Some(3)).unwrap().id, id);
        }
        prop_assert_eq!(plain.rng_state(), masked.rng_state());
    }

    #[test]
    fn a_token_set_is_a_set(
        limit in 0_usize..150, all in any::<bool>(), changes in prop::collection::vec((0_u32..160, any::<bool>()), 0..80),
        words in prop::collection::vec(any::<u32>(), 0..7),
    ) {
        let mut set = TokenSet::new(limit, all);
        let mut expected: Vec<bool> = vec![all; limit];
        for (id, allow) in changes {
            if allow { set.allow(id) } else { set.forbid(id) }
            if let Some(expected) = expected.get_mut(id as usize) {
                *expected = allow;
            }
        }
        let ids: Vec<u32> = (0..limit as u32).filter(|&id| expected[id as usize]).collect();
        prop_assert_eq!(set.iter().collect::<Vec<_>>(), ids.clone());
        prop_assert_eq!((set.len(), set.is_empty(), set.limit()), (ids.len(), ids.is_empty(), limit));
        for id in (0..200).chain([u32::MAX]) {
            prop_assert_eq!(set.contains(id), ids.contains(&id));
        }
        let of_words = TokenSet::from_words(limit, words.clone());
        for id in 0..200_usize {
            let bit = words.get(id / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
            prop_assert_eq!(of_words.contains(id as u32), bit && id < limit);
        }
    }
}

#[test]
fn a_mask_with_no_token_left_is_refused_by_name() {
    let mut sampler = sampler(SamplerConfig::greedy(), 3);
    let mut set = TokenSet::new(3, false);
    let mut refused = |set: &TokenSet| {
        sampler.choose(&[1.0, f32::NEG_INFINITY, 0.0], &[], 0, Some(set), None).unwrap_err()
    };
    let error = refused(&set).to_string();
    assert_eq!(error, "argument `allowed`: none of the 0 allowed tokens has a logit above -inf");
    set.allow(1);
    let error = refused(&set).to_string();
    assert_eq!(error, "argument `allowed`: none of the 1 allowed tokens has a logit above -inf");
    // Tokens that the model has no row for cannot be chosen, however many there are.
    let mut beyond = TokenSet::new(100, true);
    for id in 0..3 {
        beyond.forbid(id);
    }
    assert!(refused(&beyond).to_string().contains("none of the 97 allowed tokens"));
}

#[test]
fn a_shorter_set_allows_nothing_from_its_limit_up() {
    let set = TokenSet::new(2, true);
    let choice =
        sampler(SamplerConfig::greedy(), 3).choose(&[0.0, 1.0, 9.0], &[], 0, Some(&set), None);
    assert_eq!(choice.unwrap().id, 1);
}

#[test]
fn presence_and_frequency_look_at_what_was_generated_only() {
    let config =
        SamplerConfig { presence_penalty: 1.0, frequency_penalty: 0.5, ..SamplerConfig::greedy() };
    let mut sampler = sampler(config, 3);
    let mut chosen = |logits: &[f32], history: &[u32], prompt| {
        sampler.choose(logits, history, prompt, None, None).unwrap().id
    };
    assert_eq!(chosen(&[3.0, 1.4, 0.0], &[0, 0], 2), 0);
    assert_eq!(chosen(&[3.0, 1.4, 0.0], &[0, 0], 1), 0, "3 - 1 - 0.5 = 1.5");
    assert_eq!(chosen(&[3.0, 1.4, 0.0], &[0, 0], 0), 1, "3 - 1 - 2 * 0.5 = 1");
}

/// The text before the stop string that is complete first, the longest of those that end there.
fn before_stop(text: &str, stops: &[String]) -> Option<usize> {
    (0..=text.len()).find_map(|end| {
        let head = text.as_bytes().get(..end)?;
        let ending = stops.iter().filter(|stop| head.ends_with(stop.as_bytes()));
        ending.map(|stop| end - stop.len()).min()
    })
}

fn released(stops: &[String], pieces: &[&str]) -> (String, bool) {
    let mut watch = StopStrings::new(stops).unwrap();
    let mut text = String::new();
    let mut stopped = false;
    for piece in pieces {
        let Released { text: new, stopped: now } = watch.push(piece);
        assert!(!stopped || (new.is_empty() && now), "nothing comes after a stop");
        text.push_str(&new);
        stopped = now;
    }
    text.push_str(&watch.finish());
    (text, stopped)
}

/// `text` cut before every character for which `cuts` says so.
fn split<'a>(text: &'a str, cuts: &[bool]) -> Vec<&'a str> {
    let mut pieces = Vec::new();
    let mut start = 0;
    for ((at, _), &cut) in text.char_indices().zip(cuts.iter().cycle()) {
        if cut {
            pieces.push(&text[start..at]);
            start = at;
        }
    }
    pieces.push(&text[start..]);
    pieces
}

proptest! {
    #![proptest_config(cases(3000))]

    #[test]
    fn released_text_ends_before_the_first_stop_string(
        text in "[abé🦙]{0,40}",
        stops in prop::collection::vec("[abé🦙]{1,5}", 0..4),
        cuts in prop::collection::vec(any::<bool>(), 1..12),
    ) {
        let end = before_stop(&text, &stops);
        let (given, stopped) = released(&stops, &split(&text, &cuts));
        prop_assert_eq!(stopped, end.is_some());
        prop_assert_eq!(given, &text[..end.unwrap_or(text.len())]);
    }

    /// What is released before the end is never more than what is certain, and never less.
    #[test]
    fn only_a_possible_start_of_a_stop_string_is_held_back(
        text in "[ab]{0,20}", stops in prop::collection::vec("[ab]{0,6}c", 1..4),
    ) {
        let certain = StopStrings::new(&stops).unwrap().push(&text).text;
        let held = (0..=text.len())
            .filter(|&at| stops.iter().any(|stop| stop.starts_with(&text[at..])))
            .min()
            .unwrap();
        prop_assert_eq!(certain, &text[..held]);
    }
}

#[test]
fn without_a_common_start_text_passes_at_once() {
    let mut watch = StopStrings::new(["</s>", "\n\n"]).unwrap();
    assert_eq!(watch.push("a < b").text, "a < b");
    assert_eq!(watch.push(" <").text, " ");
    assert_eq!(watch.push("/p>\n").text, "</p>");
    assert_eq!(watch.push("c").text, "\nc");
    assert_eq!(watch.finish(), "");
}

#[test]
fn a_stop_string_may_span_many_tokens() {
    let pieces = ["Hi", "\n", "Us", "er", ":", " more"];
    assert_eq!(released(&["\nUser:".to_owned()], &pieces), ("Hi".to_owned(), true));
    assert_eq!(released(&["\nUser: x".to_owned()], &pieces), (pieces.concat(), false));
}

#[test]
fn an_empty_stop_string_is_refused() {
    let error = StopStrings::new(["a", ""]).unwrap_err();
    assert_eq!(error.to_string(), "argument `stop`: stop string 1 is empty");
}

#[test]
fn stop_strings_take_linear_time() {
    let mut watch = StopStrings::new(["a".repeat(20_000) + "b", "aab".to_owned()]).unwrap();
    let start = std::time::Instant::now();
    let len: usize = (0..200_000).map(|_| watch.push("a").text.len()).sum();
    assert_eq!(len + watch.finish().len(), 200_000);
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}
