//! Many requests at once: each gets the answer that it gets alone, to the bit, whatever the others do.
//! Ids in names: `fixtures/CASES.md`.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use crate::common::{Random, cpu, delta_models, models};
use crate::tiny::{Tiny, fixture, tokens};
use boostr::Result;
use boostr::backend::Cpu;
use boostr::engine::{
    BeamSearch, Draft, Engine, EngineConfig, Event, Finish, Guess, Listener, Rejected, Request,
    STEP_PIECE, Scheduler, beam_search,
};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::{Logits, Model, Run, State};
use boostr::nn::Kept;
use boostr::ops::to_vec;
use boostr::sample::{Constraint, SamplerConfig, Suppression, TokenSet};
use boostr::threads::Threads;

fn model(name: &str) -> Arc<Model<Cpu>> {
    LanguageModel::<Cpu>::open(&fixture(name), &OpenOptions::default(), cpu()).unwrap().model
}

/// No snapshots: nothing is reused.
fn forgetful() -> EngineConfig {
    EngineConfig { snapshot_bytes: 0, snapshot_every: 0, ..EngineConfig::default() }
}

// The definition

/// What a request is to give: tokens and their log probabilities, by single calls of one sequence.
#[derive(Debug, Clone, PartialEq)]
struct Answer {
    ids: Vec<u32>,
    logprobs: Vec<f32>,
}

/// The greedy answer to a prompt that is one call.
fn clean(model: &Model<Cpu>, prompt: &[u32], max_tokens: usize) -> (Answer, State<Cpu>) {
    let mut state = model.new_state().unwrap();
    let run = Run { tokens: prompt, state: &mut state };
    let mut logits = to_vec(&model.forward(&mut [run], Logits::Last).unwrap()).unwrap();
    let mut answer = Answer { ids: Vec::new(), logprobs: Vec::new() };
    for i in 0..max_tokens {
        let row = &logits[..model.vocab_limit()];
        let best = (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
        let top = f64::from(row[best]);
        let sum: f64 = row.iter().map(|&x| (f64::from(x) - top).exp()).sum();
        answer.ids.push(best as u32);
        answer.logprobs.push(-sum.ln() as f32);
        if i + 1 < max_tokens {
            let run = Run { tokens: &[best as u32], state: &mut state };
            logits = to_vec(&model.forward(&mut [run], Logits::Last).unwrap()).unwrap();
        }
    }
    (answer, state)
}

// What listeners are told

/// All that is told of a request.
#[derive(Default)]
struct Recorded {
    answers: BTreeMap<usize, Answer>,
    pieces: Vec<(usize, usize)>,
    finished: BTreeMap<usize, (Finish, Option<State<Cpu>>)>,
    failed: Option<String>,
}

#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Recorded>>);

impl Recorder {
    fn listener(&self) -> Box<dyn Listener<Cpu>> {
        let recorded = self.0.clone();
        Box::new(move |event: Event<Cpu>| {
            let mut recorded = recorded.lock().unwrap();
            match event {
                Event::Prompt { cached, done, .. } => recorded.pieces.push((cached, done)),
                Event::Token { index, id, logprob, .. } => {
                    let empty = Answer { ids: Vec::new(), logprobs: Vec::new() };
                    let answer = recorded.answers.entry(index).or_insert(empty);
                    answer.ids.push(id);
                    answer.logprobs.push(logprob);
                }
                Event::Finished { index, outcome } => {
                    let ids = recorded.answers.get(&index).map_or(&[][..], |answer| &answer.ids);
                    assert_eq!(outcome.ids, ids, "all tokens were told");
                    let old = recorded.finished.insert(index, (outcome.finish, outcome.state));
                    assert!(old.is_none() && recorded.failed.is_none(), "it ends once");
                }
                Event::Failed { error } => {
                    let old = recorded.failed.replace(crate::tiny::message(&error));
                    assert!(old.is_none(), "it fails once");
                }
            }
            ControlFlow::Continue(())
        })
    }

    fn answer(&self) -> Answer {
        self.0.lock().unwrap().answers[&0].clone()
    }

    fn finish(&self) -> Finish {
        self.0.lock().unwrap().finished[&0].0
    }

    fn state(&self) -> State<Cpu> {
        self.0.lock().unwrap().finished[&0].1.clone().unwrap()
    }

    /// Tokens of the prompt that were known.
    fn cached(&self) -> usize {
        self.0.lock().unwrap().pieces[0].0
    }
}

fn request(prompt: &[u32], max_tokens: usize, model: &Model<Cpu>) -> Request<Cpu> {
    let logprobs = Some(0);
    Request { max_tokens, logprobs, ..Request::new(prompt.to_vec(), model.vocab_limit()) }
}

/// One request after another in one scheduler.
fn ask(scheduler: &mut Scheduler<'_, Cpu>, request: Request<Cpu>) -> Recorder {
    let recorder = Recorder::default();
    scheduler.submit(request, recorder.listener()).unwrap();
    while scheduler.step() {}
    recorder
}

// Exactness

#[test]
fn a_text_cut_anywhere_into_calls_has_the_same_logits_and_states_to_the_bit() {
    let mut random = Random(0xc07);
    for name in models() {
        let model = model(name);
        let ids = tokens(8, 300, model.vocab_limit());
        let run = |cuts: &[usize]| {
            let (mut state, mut logits, mut first) = (model.new_state().unwrap(), Vec::new(), 0);
            for &cut in cuts.iter().chain([&ids.len()]) {
                let run = Run { tokens: &ids[first..cut], state: &mut state };
                logits.extend(to_vec(&model.forward(&mut [run], Logits::All).unwrap()).unwrap());
                first = cut;
            }
            (logits, everything(&state))
        };
        let want = run(&[]);
        let singles: Vec<usize> = (1..ids.len()).collect();
        assert!(run(&singles) == want, "{name}, token by token");
        for _ in 0..8 {
            let mut cuts: Vec<usize> = (0..12).map(|_| 1 + random.below(298)).collect();
            cuts.sort_unstable();
            cuts.dedup();
            assert!(run(&cuts) == want, "{name}, cut at {cuts:?}");
        }
    }
}

#[test]
fn any_partition_any_batch_any_slot_history_is_one_clean_run() {
    among_others_each_is_alone(&models());
}

#[test]
fn d_17_21_freed_states_of_others_that_came_and_went_leave_no_trace() {
    among_others_each_is_alone(&delta_models());
}

fn among_others_each_is_alone(names: &[&str]) {
    let mut random = Random(0x5eed);
    for &name in names {
        let model = model(name);
        let vocab = model.vocab_limit();
        let asked: Vec<(Vec<u32>, usize)> = (0..12)
            .map(|i| {
                let len = [1, 2, 3, 17, 128, 129, 1 + random.below(300)][random.below(7)];
                (tokens(1 + i, len, vocab), 1 + random.below(20))
            })
            .collect();
        let want: Vec<Answer> = asked.iter().map(|(ids, n)| clean(&model, ids, *n).0).collect();
        for round in 0..4 {
            let config = EngineConfig {
                max_running: 4,
                step_tokens: [1, 64, 200, 1000][round],
                ..forgetful()
            };
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1 + round % 3).build().unwrap();
            pool.install(|| {
                let mut scheduler = Scheduler::new(&model, config);
                let mut order: Vec<usize> = (0..asked.len()).collect();
                let mut recorders = Vec::new();
                // They come while others run; finished ones leave their memory full of NaN.
                while !order.is_empty() || !scheduler.is_idle() {
                    if !order.is_empty() && random.below(3) == 0 {
                        let i = order.swap_remove(random.below(order.len()));
                        let (ids, n) = &asked[i];
                        let recorder = Recorder::default();
                        scheduler.submit(request(ids, *n, &model), recorder.listener()).unwrap();
                        recorders.push((i, recorder));
                    }
                    scheduler.step();
                }
                for (i, recorder) in &recorders {
                    assert_eq!(recorder.answer(), want[*i], "{name}, request {i}, round {round}");
                }
            });
        }
    }
}

#[test]
fn case_40_snapshots_drafts_forks_and_rewinds_work_on_every_family() {
    snapshots_are_clean_runs(&models());
}

#[test]
fn d_24_a_prompt_that_was_known_costs_what_is_new_alone() {
    snapshots_are_clean_runs(&delta_models());
}

fn snapshots_are_clean_runs(names: &[&str]) {
    for &name in names {
        let model = model(name);
        let ids = tokens(5, 150, model.vocab_limit());
        let want = clean(&model, &ids, 12).0;
        let config = EngineConfig { snapshot_every: 64, ..EngineConfig::default() };
        let mut scheduler = Scheduler::new(&model, config);
        let request = |ids: &[u32], max_tokens, model: &Model<Cpu>| Request {
            draft: Some(Draft::Lookup),
            ..request(ids, max_tokens, model)
        };
        assert_eq!(ask(&mut scheduler, request(&ids, 12, &model)).answer(), want, "{name}");
        // Again, from its own end; then a conversation that went on, and one that was rewound.
        let again = ask(&mut scheduler, request(&ids, 12, &model));
        assert_eq!(again.cached(), 150, "{name}");
        assert_eq!(again.answer(), want, "{name}");
        let longer = [&ids[..], &want.ids, &[3, 1, 4]].concat();
        let longer_want = clean(&model, &longer, 5).0;
        let recorder = ask(&mut scheduler, request(&longer, 5, &model));
        assert!(recorder.cached() >= 150, "{name}: {}", recorder.cached());
        assert_eq!(recorder.answer(), longer_want, "{name}");
        let shorter = [&ids[..140], &[2, 7]].concat();
        let recorder = ask(&mut scheduler, request(&shorter, 5, &model));
        let known = if name == "llama-tiny" { 140 } else { 128 };
        assert_eq!(recorder.cached(), known, "{name}");
        assert_eq!(recorder.answer(), clean(&model, &shorter, 5).0, "{name}");
        // Forks.
        let sampler = SamplerConfig { seed: 9, ..SamplerConfig::default() };
        let forked = Request { count: 3, sampler: sampler.clone(), ..request(&ids, 8, &model) };
        let forks = ask(&mut scheduler, forked);
        for index in 0..3 {
            let sampler = SamplerConfig { seed: 9 + index as u64, ..sampler.clone() };
            let alone = Request { sampler, ..request(&ids, 8, &model) };
            let alone = ask(&mut Scheduler::new(&model, EngineConfig::default()), alone).answer();
            assert_eq!(forks.0.lock().unwrap().answers[&index].ids, alone.ids, "{name}");
        }
    }
}

/// One who takes no more while told so.
struct Slow(Box<dyn Listener<Cpu>>, Arc<Mutex<bool>>);

impl Listener<Cpu> for Slow {
    fn event(&mut self, event: Event<Cpu>) -> ControlFlow<()> {
        self.0.event(event)
    }
    fn is_ready(&self) -> bool {
        *self.1.lock().unwrap()
    }
}

#[test]
fn requests_in_flight_compute_what_their_prompts_share_once() {
    for name in ["mamba2-tiny", "bamba-tiny", "llama-tiny", "qwen3_5-tiny"] {
        let model = model(name);
        let limit = model.vocab_limit();
        let shared = tokens(3, 700, limit);
        let mut prompts: Vec<Vec<u32>> = (0..6)
            .map(|i| [&shared[..], &tokens(40 + i, 20 + i as usize, limit)].concat())
            .collect();
        // One that begins like another, one that parts earlier, and two that are equal.
        prompts.push(shared[..500].to_vec());
        prompts.push([&shared[..300], &tokens(77, 30, limit)].concat());
        prompts.push(prompts[0].clone());
        let config = EngineConfig { max_running: 16, ..EngineConfig::default() };
        let mut scheduler = Scheduler::new(&model, config);
        let listeners: Vec<Recorder> = prompts
            .iter()
            .map(|ids| {
                let recorder = Recorder::default();
                scheduler.submit(request(ids, 6, &model), recorder.listener()).unwrap();
                recorder
            })
            .collect();
        while scheduler.step() {}
        for (ids, recorder) in prompts.iter().zip(&listeners) {
            assert_eq!(recorder.answer(), clean(&model, ids, 6).0, "{name}: {}", ids.len());
        }
        // The shared part once, and of each its own: 6 ends of 20 to 25, one of 30, the last of the prefix, and what lies
        // between a place and the mark before it.
        let computed = scheduler.stats().prompt_tokens;
        assert!(computed <= 700 + 135 + 30 + 3 * 32, "{name}: {computed} tokens");
    }
}

#[test]
fn who_waits_for_a_request_that_is_cancelled_or_not_listened_to_goes_on_alone() {
    let model = model("mamba2-tiny");
    let ids = tokens(3, 3000, model.vocab_limit());
    let second = [&ids[..2900], &[1, 2, 3]].concat();
    let want = clean(&model, &second, 4).0;
    for cancels in [true, false] {
        let mut scheduler = Scheduler::new(&model, EngineConfig::default());
        let (first, other) = (Recorder::default(), Recorder::default());
        let is_ready = Arc::new(Mutex::new(true));
        let listener = Slow(first.listener(), is_ready.clone());
        let ticket = scheduler.submit(request(&ids, 4, &model), Box::new(listener)).unwrap();
        scheduler.submit(request(&second, 4, &model), other.listener()).unwrap();
        assert!(scheduler.step());
        assert_eq!(other.0.lock().unwrap().pieces, [(0, 0)], "it waits");
        if cancels {
            ticket.cancel();
        } else {
            *is_ready.lock().unwrap() = false;
        }
        while scheduler.step() {}
        assert_eq!(other.answer(), want, "{cancels}");
    }
}

#[test]
fn case_1_a_prompt_that_leaves_another_after_150_of_200_tokens_computes_no_more_than_94() {
    for name in ["bamba-tiny", "granitehybrid-dense-tiny", "nemotron-h-tiny", "mamba2-tiny"] {
        let model = model(name);
        let first = tokens(3, 200, model.vocab_limit());
        let second = [&first[..150], &tokens(4, 30, model.vocab_limit())].concat();
        let config = EngineConfig { snapshot_every: 64, ..EngineConfig::default() };
        let mut scheduler = Scheduler::new(&model, config);
        ask(&mut scheduler, request(&first, 1, &model));
        let before = scheduler.stats();
        let recorder = ask(&mut scheduler, request(&second, 6, &model));
        let after = scheduler.stats();
        assert!(after.prompt_tokens - before.prompt_tokens <= 64 + 30, "{name}");
        assert_eq!(after.skipped_tokens - before.skipped_tokens, recorder.cached() as u64);
        assert_eq!(recorder.answer(), clean(&model, &second, 6).0, "{name}");
    }
}

#[test]
fn case_3_a_snapshot_at_every_length_goes_on_as_a_clean_run_also_among_four_sessions() {
    for name in ["mamba2-tiny-g2", "bamba-tiny"] {
        let model = model(name);
        let vocab = model.vocab_limit();
        for p in 1..3 * 36 + 2 {
            let ids = tokens(p as u64, p + 9, vocab);
            let mut scheduler = Scheduler::new(&model, EngineConfig::default());
            ask(&mut scheduler, request(&ids[..p], 0, &model));
            // Three others are computed in the same steps.
            let others: Vec<Vec<u32>> =
                (0..3).map(|i| tokens(900 + i, 7 * p % 80 + 1, vocab)).collect();
            let recorders: Vec<Recorder> = others
                .iter()
                .chain([&ids])
                .map(|ids| {
                    let recorder = Recorder::default();
                    scheduler.submit(request(ids, 4, &model), recorder.listener()).unwrap();
                    recorder
                })
                .collect();
            while scheduler.step() {}
            assert_eq!(recorders[3].cached(), p, "{name}");
            for (recorder, ids) in recorders.iter().zip(others.iter().chain([&ids])) {
                assert_eq!(recorder.answer(), clean(&model, ids, 4).0, "{name}, {p}");
            }
        }
    }
}

#[test]
fn case_4_after_k_of_8_guesses_were_right_the_state_is_that_of_a_run_of_k_tokens() {
    refused_guesses_leave_no_trace(&models());
}

#[test]
fn d_2_3_4_refused_guesses_leave_windows_and_states_as_they_were() {
    refused_guesses_leave_no_trace(&delta_models());
}

fn refused_guesses_leave_no_trace(names: &[&str]) {
    for &name in names {
        let model = model(name);
        let vocab = model.vocab_limit();
        let prompt = tokens(11, 40, vocab);
        let (want, _) = clean(&model, &prompt, 24);
        for right in 0..=8 {
            let truth = [&prompt[..], &want.ids].concat();
            let guess = move |ids: &[u32], most: usize| -> Vec<u32> {
                let next = &truth[ids.len().min(truth.len())..];
                let wrong =
                    |(i, &id): (usize, &u32)| if i < right { id } else { (id + 1) % vocab as u32 };
                next.iter().take(most).enumerate().map(wrong).collect()
            };
            let draft = Some(Draft::With(Arc::new(guess)));
            let mut scheduler = Scheduler::new(&model, forgetful());
            let recorder = ask(&mut scheduler, Request { draft, ..request(&prompt, 24, &model) });
            assert_eq!(recorder.answer(), want, "{name}, {right} right");
            let stats = scheduler.stats();
            assert!(stats.drafted_tokens > 0 && (stats.accepted_tokens > 0) == (right > 0));
            // Conv windows, SSM states, keys and values, to the bit.
            let state = recorder.state();
            let seen = state.position() - prompt.len();
            let (_, plain) = clean(&model, &prompt, seen + 1);
            assert_eq!(plain.position(), state.position());
            assert_eq!(everything(&state), everything(&plain), "{name}, {right} right");
        }
    }
}

/// All that a state holds.
fn everything(state: &State<Cpu>) -> Vec<f32> {
    let of = |kept: &Kept<Cpu>| match kept {
        Kept::Tensor(x) => to_vec(x).unwrap(),
        Kept::Rows(cache) => [cache.keys().unwrap(), cache.values().unwrap()].concat(),
    };
    state.slots().flat_map(|(_, _, kept)| of(kept)).collect()
}

#[test]
fn guesses_change_no_output_of_any_sampler_and_save_forwards_where_text_repeats() {
    let model = model("mamba2-tiny");
    let vocab = model.vocab_limit();
    let draft = self::model("mamba2-tiny");
    for draft in [Draft::Lookup, Draft::Model(draft)] {
        for seed in 0..4 {
            let prompt = tokens(seed + 1, 9, vocab).repeat(5);
            let sampler = if seed == 0 {
                SamplerConfig::greedy()
            } else {
                let base = SamplerConfig { seed, top_k: 3, ..SamplerConfig::default() };
                SamplerConfig { temperature: 0.3, repetition_penalty: 1.1, ..base }
            };
            let plain = Request { sampler: sampler.clone(), ..request(&prompt, 60, &model) };
            let mut alone = Scheduler::new(&model, forgetful());
            let want = ask(&mut alone, plain).answer();
            let draft = Some(draft.clone());
            let drafted = Request { sampler, draft, ..request(&prompt, 60, &model) };
            let mut scheduler = Scheduler::new(&model, forgetful());
            assert_eq!(ask(&mut scheduler, drafted).answer(), want);
        }
    }
}

#[test]
fn case_5_what_ran_before_in_a_slot_leaves_no_trace() {
    for name in models() {
        let model = model(name);
        let vocab = model.vocab_limit();
        let mut scheduler = Scheduler::new(&model, EngineConfig { max_running: 1, ..forgetful() });
        for len in [1, 2, 3, 20] {
            ask(&mut scheduler, request(&tokens(1, 200, vocab), 3, &model));
            let ids = tokens(len as u64, len, vocab);
            let recorder = ask(&mut scheduler, request(&ids, 6, &model));
            assert_eq!(recorder.answer(), clean(&model, &ids, 6).0, "{name}, {len} tokens");
        }
    }
}

#[test]
fn case_18_a_beam_search_finds_what_running_every_prefix_anew_finds() {
    for name in ["mamba2-tiny", "bamba-tiny"] {
        let model = model(name);
        let prompt = tokens(8, 12, model.vocab_limit());
        let (width, rounds) = (3, 5);
        let mut state = model.new_state().unwrap();
        model
            .forward(&mut [Run { tokens: &prompt[..4], state: &mut state }], Logits::None)
            .unwrap();
        let before = everything(&state);
        let ends = [clean(&model, &prompt, 2).0.ids[1]];
        for eos in [&[][..], &ends] {
            let vocab_limit = model.vocab_limit();
            let suppression = &Suppression::default();
            let (max_tokens, before) = (rounds, &[][..]);
            let search = BeamSearch { width, max_tokens, eos, vocab_limit, suppression, before };
            let go_on = |_| ControlFlow::Continue(());
            let beams = beam_search(&model, &state, &prompt[4..], search, go_on).unwrap();
            let want = brute_force(&model, &prompt, width, rounds, eos);
            assert_eq!(
                beams.iter().map(|beam| &beam.ids).collect::<Vec<_>>(),
                want.iter().map(|(ids, _)| ids).collect::<Vec<_>>(),
                "{name}"
            );
            for (beam, (_, logprob)) in beams.iter().zip(&want) {
                assert!((beam.logprob - logprob).abs() < 1e-4);
                assert_eq!(beam.state.position(), prompt.len() + beam.ids.len() - 1);
            }
        }
        assert_eq!(everything(&state), before, "forks do not touch where they came from");
    }
}

#[test]
fn suppressed_tokens_come_in_no_answer_whatever_is_drafted_cut_or_searched() {
    for name in ["mamba2-tiny", "bamba-tiny"] {
        let model = model(name);
        let (prompt, vocab_limit) = (tokens(8, 12, model.vocab_limit()), model.vocab_limit());
        let free = clean(&model, &prompt, 12).0.ids;
        // The first token is not to begin, the second not to come, and the last of the prompt not to be gone on so.
        let [first, second] = [free[0], free[1]];
        let bad = vec![vec![prompt[11], free[2]], vec![free[3], free[4]], vec![free[2], free[5]]];
        let suppression = Suppression::new(vec![second], vec![first], bad.clone()).unwrap();
        // The definition, by a run of the whole text for each token.
        let mut want = Vec::new();
        for _ in 0..12 {
            let mut state = model.new_state().unwrap();
            let text = [&*prompt, &want].concat();
            let run = Run { tokens: &text, state: &mut state };
            let logits = to_vec(&model.forward(&mut [run], Logits::Last).unwrap()).unwrap();
            let is_out = |id: u32| {
                let ends = |word: &Vec<u32>| text.ends_with(&word[..1]) && word[1] == id;
                id == second || want.is_empty() && id == first || bad.iter().any(ends)
            };
            let left = (0..vocab_limit as u32).rev().filter(|&id| !is_out(id));
            let best = left.max_by(|&a, &b| logits[a as usize].total_cmp(&logits[b as usize]));
            want.push(best.unwrap());
        }
        assert_ne!(want, free);
        let sampler = SamplerConfig { suppression: suppression.clone(), ..SamplerConfig::greedy() };
        let wrong = free.clone();
        let wrong: Arc<Guess> = Arc::new(move |_: &[u32], _: usize| wrong.clone());
        let (all, start) = (want.clone(), prompt.len());
        let right: Arc<Guess> =
            Arc::new(move |ids: &[u32], _: usize| all[ids.len() - start..].to_vec());
        for draft in [None, Some(wrong), Some(right)] {
            let draft = draft.map(Draft::With);
            let mut scheduler = Scheduler::new(&model, forgetful());
            let asked = Request { sampler: sampler.clone(), draft, ..request(&prompt, 12, &model) };
            assert_eq!(ask(&mut scheduler, asked).answer().ids, want, "{name}");
        }
        // The first beam of one is the greedy answer, also where the prompt was seen before.
        let mut state = model.new_state().unwrap();
        model
            .forward(&mut [Run { tokens: &prompt[..11], state: &mut state }], Logits::None)
            .unwrap();
        let search = BeamSearch {
            width: 1,
            max_tokens: 12,
            eos: &[],
            vocab_limit,
            suppression: &suppression,
            before: &prompt[..11],
        };
        let go_on = |_| ControlFlow::Continue(());
        let beams = beam_search(&model, &state, &prompt[11..], search, go_on).unwrap();
        assert_eq!(beams[0].ids, want, "{name}");
    }
}

/// A beam search whose every sum is of a run of the whole text from the start.
fn brute_force(
    model: &Model<Cpu>,
    prompt: &[u32],
    width: usize,
    rounds: usize,
    eos: &[u32],
) -> Vec<(Vec<u32>, f64)> {
    let ended = |ids: &[u32]| ids.last().is_some_and(|id| eos.contains(id));
    let mut beams = vec![(Vec::new(), 0.0)];
    for _ in 0..rounds {
        let mut all = Vec::new();
        for (ids, sum) in &beams {
            if ended(ids) {
                all.push((ids.clone(), *sum));
                continue;
            }
            let mut state = model.new_state().unwrap();
            let text = [prompt, ids].concat();
            let run = Run { tokens: &text, state: &mut state };
            let row = to_vec(&model.forward(&mut [run], Logits::Last).unwrap()).unwrap();
            let row = &row[..model.vocab_limit()];
            let total: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            for (id, &x) in row.iter().enumerate() {
                let next = [&ids[..], &[id as u32]].concat();
                all.push((next, sum + f64::from(x) - total.ln()));
            }
        }
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all.truncate(width);
        beams = all;
    }
    beams
}

#[test]
fn case_33_35_a_state_is_never_cut_back_and_a_longer_one_than_the_prompt_is_refused() {
    for name in models() {
        let model = model(name);
        let ids = tokens(2, 30, model.vocab_limit());
        let mut state = model.new_state().unwrap();
        model.forward(&mut [Run { tokens: &ids, state: &mut state }], Logits::None).unwrap();
        let mut scheduler = Scheduler::new(&model, EngineConfig::default());
        for len in [1, 29, 30] {
            let asked = Request { state: Some(state.clone()), ..request(&ids[..len], 3, &model) };
            let refused = scheduler.submit(asked, Recorder::default().listener()).unwrap_err();
            let text = refused.to_string();
            let expected = format!("it has seen 30 tokens of a prompt of {len}: expected fewer");
            assert!(text.contains(&expected), "{name}: {text}");
        }
        // What a context shift would do, to drop the oldest tokens, is another prompt: computed anew, and right.
        ask(&mut scheduler, request(&ids, 3, &model));
        let shifted = ask(&mut scheduler, request(&ids[10..], 3, &model));
        assert_eq!(shifted.cached(), 0);
        assert_eq!(shifted.answer(), clean(&model, &ids[10..], 3).0, "{name}");
        let cut = ask(&mut scheduler, request(&ids[..20], 3, &model));
        assert_eq!(cut.answer(), clean(&model, &ids[..20], 3).0, "{name}");
    }
}

#[test]
fn a_given_state_is_gone_on_from_and_stays_its_owners() {
    for name in ["mamba2-tiny", "bamba-tiny"] {
        let model = model(name);
        let ids = tokens(6, 60, model.vocab_limit());
        let mut state = model.new_state().unwrap();
        model.forward(&mut [Run { tokens: &ids[..59], state: &mut state }], Logits::None).unwrap();
        let before = everything(&state);
        let mut scheduler = Scheduler::new(&model, forgetful());
        let asked = Request { state: Some(state.clone()), ..request(&ids, 5, &model) };
        let recorder = ask(&mut scheduler, asked);
        assert_eq!((recorder.cached(), scheduler.stats().prompt_tokens), (59, 1));
        assert_eq!(recorder.answer(), clean(&model, &ids, 5).0);
        assert_eq!(everything(&state), before);
    }
}

// Snapshots

#[test]
fn snapshots_stay_under_their_limit_and_go_by_last_use() {
    let tiny = Tiny::m("");
    let model = &tiny.model;
    let one = tiny.state().size_in_bytes();
    let config = EngineConfig { snapshot_bytes: 4 * one, ..EngineConfig::default() };
    let mut scheduler = Scheduler::new(model, config);
    let prompts: Vec<Vec<u32>> = (0..6).map(|i| tokens(50 + i, 10, 80)).collect();
    for prompt in &prompts {
        ask(&mut scheduler, request(prompt, 0, model));
        // The first is used again and again.
        assert_eq!(ask(&mut scheduler, request(&prompts[0], 0, model)).cached(), 10);
        let stats = scheduler.stats();
        assert!(stats.snapshot_bytes <= 4 * one && stats.snapshots <= 4, "{stats:?}");
    }
    for (i, cached, why) in [(0, 10, "was used"), (5, 10, "is new"), (1, 0, "was not used")] {
        let recorder = ask(&mut scheduler, request(&prompts[i], 0, model));
        assert_eq!(recorder.cached(), cached, "{i} {why}");
    }
}

#[test]
fn pages_that_snapshots_share_are_counted_once() {
    let model = model("llama-tiny");
    let ids = tokens(5, 1024, model.vocab_limit());
    let mut scheduler = Scheduler::new(&model, EngineConfig::default());
    let mut own = 0;
    for i in 0..4 {
        let prompt = [&ids[..], &tokens(60 + i, 20, model.vocab_limit())].concat();
        own = ask(&mut scheduler, request(&prompt, 1, &model)).state().size_in_bytes();
    }
    let stats = scheduler.stats();
    assert_eq!(stats.snapshots, 4);
    assert!(stats.snapshot_bytes < own + own / 4 + 100_000, "{} for {own}", stats.snapshot_bytes);
}

#[test]
fn questions_that_leave_a_long_message_within_it_compute_it_once() {
    for name in ["mamba2-tiny", "bamba-tiny", "llama-tiny"] {
        let model = model(name);
        let one = model.new_state().unwrap().size_in_bytes();
        let text = tokens(5, 1500, model.vocab_limit());
        let pages = 1600 * 2 * 3 * 256;
        let config = EngineConfig { snapshot_bytes: 8 * one + pages, ..EngineConfig::default() };
        let mut scheduler = Scheduler::new(&model, config);
        let mut total = 0;
        for i in 0..12 {
            let prompt = [&text[..], &tokens(70 + i, 40, model.vocab_limit())].concat();
            let recorder = ask(&mut scheduler, request(&prompt, 3, &model));
            total += prompt.len() - recorder.cached();
            if i > 1 {
                assert!(recorder.cached() > 1500 - 32, "{name} {i}: {}", recorder.cached());
            }
            if i % 5 == 1 {
                assert_eq!(recorder.answer(), clean(&model, &prompt, 3).0, "{name} {i}");
            }
        }
        // Those that any way must be computed: the text once, and each question.
        assert!(total * 10 <= (1500 + 12 * 40) * 11, "{name}: {total}");
    }
}

#[test]
fn a_state_of_keys_and_values_serves_all_its_prefixes_to_the_bit() {
    let windows = crate::windows::mistral(70, &["sliding_attention", "full_attention"]);
    for model in [model("llama-tiny"), Arc::new(windows)] {
        let has_window = model.new_state().unwrap().n_layer() == 2;
        let vocab = model.vocab_limit();
        let ids = tokens(5, 300, vocab);
        for len in [1, 2, 63, 64, 65, 127, 128, 129, 200, 255, 299] {
            let mut scheduler = Scheduler::new(&model, EngineConfig::default());
            ask(&mut scheduler, request(&ids, 4, &model));
            let other = [&ids[..len], &tokens(len as u64, 20, vocab)].concat();
            // The first may have an id in common by chance.
            let alike = other.iter().zip(&ids).take_while(|(a, b)| a == b).count();
            let recorder = ask(&mut scheduler, request(&other, 6, &model));
            // Through a window of 70 the next token sees a page that was forgotten; a snapshot before it is there.
            let known = if has_window && len < 260 { len / 172 * 172 } else { alike };
            assert_eq!(recorder.cached(), known, "{len}");
            assert_eq!(recorder.answer(), clean(&model, &other, 6).0, "{len}");
            // The state that was cut is as it was.
            let longer = [&ids[..], &tokens(9, 5, vocab)].concat();
            let recorder = ask(&mut scheduler, request(&longer, 6, &model));
            assert!(recorder.cached() >= 300);
            assert_eq!(recorder.answer(), clean(&model, &longer, 6).0, "{len}");
            // A part of it without anything new.
            let recorder = ask(&mut scheduler, request(&ids[..len], 6, &model));
            assert_eq!(recorder.answer(), clean(&model, &ids[..len], 6).0, "{len}");
        }
    }
}

#[test]
fn ten_conversations_keep_the_latest_of_each_and_edits_go_back_exactly() {
    for name in ["mamba2-tiny", "bamba-tiny", "llama-tiny"] {
        let model = model(name);
        let vocab = model.vocab_limit();
        let random = &mut Random(77);
        let one = model.new_state().unwrap().size_in_bytes();
        let snapshot_bytes = 30 * (one + 200_000);
        let config = EngineConfig { snapshot_bytes, ..EngineConfig::default() };
        let mut scheduler = Scheduler::new(&model, config);
        let mut histories = vec![Vec::new(); 10];
        for turn in 0..60 {
            let history = &mut histories[random.below(10)];
            if turn % 9 == 8 {
                let cut = random.below(history.len() + 1);
                history.truncate(cut);
            }
            history.extend(tokens(turn, 1 + random.below(90), vocab));
            let recorder = ask(&mut scheduler, request(history, 5, &model));
            let (answer, _) = clean(&model, history, 5);
            assert_eq!(recorder.answer(), answer, "{name} {turn}");
            history.extend(&answer.ids);
        }
        let stats = scheduler.stats();
        assert!(stats.skipped_tokens > 2 * stats.prompt_tokens, "{name}: {stats:?}");
    }
}

#[test]
fn scopes_do_not_see_each_others_snapshots() {
    let tiny = Tiny::m("");
    let ids = tokens(5, 50, 80);
    let mut scheduler = Scheduler::new(&tiny.model, EngineConfig::default());
    let of = |scope| Request { scope: Some(scope), ..request(&ids, 2, &tiny.model) };
    assert_eq!(ask(&mut scheduler, of(1)).cached(), 0);
    assert_eq!(ask(&mut scheduler, of(2)).cached(), 0);
    assert_eq!(ask(&mut scheduler, of(1)).cached(), 50);
}

#[test]
fn a_request_without_a_scope_sees_and_leaves_no_snapshots() {
    for name in models() {
        let model = model(name);
        let ids = tokens(5, 150, model.vocab_limit());
        let asked = |len: usize, scope| Request { scope, ..request(&ids[..len], 6, &model) };
        let mut scheduler = Scheduler::new(&model, EngineConfig::default());
        // Snapshots of parts of it, and of all.
        for len in [37, 90, 150] {
            ask(&mut scheduler, asked(len, Some(0)));
        }
        let before = scheduler.stats().snapshots;
        let recorder = ask(&mut scheduler, asked(150, None));
        assert_eq!(recorder.cached(), 0, "{name}");
        assert_eq!(recorder.answer(), clean(&model, &ids, 6).0, "{name}");
        assert_eq!(scheduler.stats().snapshots, before, "{name}");
    }
}

#[test]
fn marks_are_where_a_rewound_conversation_goes_on_to_the_bit() {
    let tiny = Tiny::m("");
    let ids = tokens(5, 100, 80);
    let marks = vec![45, 50, 90];
    let mut scheduler = Scheduler::new(&tiny.model, EngineConfig::default());
    let marked = |ids: &[u32]| Request { marks: marks.clone(), ..request(ids, 4, &tiny.model) };
    ask(&mut scheduler, marked(&ids));
    let other = [&ids[..46], &tokens(6, 20, 80)].concat();
    let recorder = ask(&mut scheduler, marked(&other));
    assert_eq!(recorder.cached(), 45);
    let cold = ask(&mut Scheduler::new(&tiny.model, forgetful()), marked(&other));
    assert_eq!(recorder.answer(), cold.answer());
}

// Scheduling

#[test]
fn a_long_prompt_holds_a_decoding_request_up_for_no_more_than_a_step() {
    let tiny = Tiny::m("");
    let log = Arc::new(Mutex::new(Vec::new()));
    let listener = |name: &'static str| {
        let log = log.clone();
        Box::new(move |event: Event<Cpu>| {
            match event {
                Event::Prompt { cached, done, .. } if done > cached => {
                    log.lock().unwrap().push(name);
                }
                Event::Token { .. } if name == "short" => log.lock().unwrap().push(name),
                _ => {}
            }
            ControlFlow::Continue(())
        })
    };
    let config = EngineConfig { step_tokens: STEP_PIECE + 10, ..forgetful() };
    let mut scheduler = Scheduler::new(&tiny.model, config);
    scheduler.submit(request(&[1], 30, &tiny.model), listener("short")).unwrap();
    scheduler.step();
    for name in ["long", "longer"] {
        scheduler
            .submit(request(&tokens(1, 10 * STEP_PIECE, 80), 1, &tiny.model), listener(name))
            .unwrap();
    }
    while scheduler.step() {}
    let log = log.lock().unwrap();
    let last = log.iter().rposition(|&name| name == "short").unwrap();
    let (mut since, mut turns) = (0, Vec::new());
    for name in &log[..last] {
        since = if *name == "short" { 0 } else { since + 1 };
        assert!(since <= 1, "one piece between two tokens: {log:?}");
        turns.extend((*name != "short").then_some(*name));
    }
    // And the two long ones take turns.
    assert!(turns.windows(2).all(|pair| pair[0] != pair[1]), "{turns:?}");
}

#[test]
fn prompts_take_turns_however_many_of_them_fit_in_a_step() {
    let tiny = Tiny::m("");
    for count in 2..=5 {
        for fit in 1..=3 {
            let config = EngineConfig { step_tokens: fit * STEP_PIECE, ..forgetful() };
            let mut scheduler = Scheduler::new(&tiny.model, config);
            let done = Arc::new(Mutex::new(vec![0; count]));
            for i in 0..count {
                let done = done.clone();
                let listener = move |event: Event<Cpu>| {
                    if let Event::Prompt { done: now, .. } = event {
                        done.lock().unwrap()[i] = now;
                    }
                    ControlFlow::Continue(())
                };
                let asked = request(&tokens(i as u64, 6 * STEP_PIECE, 80), 0, &tiny.model);
                scheduler.submit(asked, Box::new(listener)).unwrap();
            }
            while scheduler.step() {
                let done = done.lock().unwrap();
                let (least, most) = (done.iter().min().unwrap(), done.iter().max().unwrap());
                assert!(most - least <= STEP_PIECE, "{fit} of {count}: {done:?}");
            }
        }
    }
}

#[test]
fn r_d9_a_cancelled_request_ends_within_a_piece_and_touches_no_other() {
    let tiny = Tiny::m("");
    let (short, long) = (tokens(1, 20, 80), tokens(2, 3000, 80));
    let want = clean(&tiny.model, &short, 40).0;
    let mut scheduler = Scheduler::new(&tiny.model, EngineConfig { max_running: 2, ..forgetful() });
    let (kept, cut, queued) = (Recorder::default(), Recorder::default(), Recorder::default());
    scheduler.submit(request(&short, 40, &tiny.model), kept.listener()).unwrap();
    let ticket = scheduler.submit(request(&long, 5, &tiny.model), cut.listener()).unwrap();
    let waiting = scheduler.submit(request(&long, 5, &tiny.model), queued.listener()).unwrap();
    for _ in 0..3 {
        scheduler.step();
    }
    waiting.cancel();
    scheduler.step();
    assert_eq!(queued.finish(), Finish::Cancelled);
    assert!(queued.0.lock().unwrap().finished[&0].1.is_none(), "it had no state");
    assert!(cut.0.lock().unwrap().finished.is_empty(), "the running one is not touched");
    let before = scheduler.stats().prompt_tokens;
    ticket.cancel();
    scheduler.step();
    assert_eq!(cut.finish(), Finish::Cancelled);
    assert_eq!(scheduler.stats().prompt_tokens, before);
    assert_eq!(scheduler.stats().running, 1);
    ticket.cancel();
    while scheduler.step() {}
    assert_eq!(kept.answer(), want);
    let stats = scheduler.stats();
    assert_eq!((stats.finished, stats.cancelled, stats.failed), (3, 2, 0));
}

#[test]
fn a_listener_that_is_not_ready_waits_alone_and_gets_the_same() {
    let tiny = Tiny::m("");
    let ids = tokens(1, 20, 80);
    let want = clean(&tiny.model, &ids, 10).0;
    let mut scheduler = Scheduler::new(&tiny.model, forgetful());
    let (slow, quick, is_ready) =
        (Recorder::default(), Recorder::default(), Arc::new(Mutex::new(true)));
    let listener = Slow(slow.listener(), is_ready.clone());
    scheduler.submit(request(&ids, 10, &tiny.model), Box::new(listener)).unwrap();
    for _ in 0..3 {
        assert!(scheduler.step());
    }
    *is_ready.lock().unwrap() = false;
    scheduler.submit(request(&ids, 10, &tiny.model), quick.listener()).unwrap();
    while scheduler.step() {}
    assert_eq!(quick.answer(), want);
    assert!(slow.0.lock().unwrap().finished.is_empty());
    assert!(!scheduler.is_idle());
    *is_ready.lock().unwrap() = true;
    while scheduler.step() {}
    assert_eq!(slow.answer(), want);
}

#[test]
fn a_stop_in_the_middle_of_guesses_leaves_tokens_and_state_as_without_guesses() {
    let model = model("bamba-tiny");
    let prompt = tokens(11, 20, model.vocab_limit());
    let (want, _) = clean(&model, &prompt, 12);
    for stop in 1..10 {
        let truth = [&prompt[..], &want.ids].concat();
        let guess = move |ids: &[u32], most: usize| -> Vec<u32> {
            truth[ids.len().min(truth.len())..].iter().take(most).copied().collect()
        };
        let draft = Some(Draft::With(Arc::new(guess)));
        let mut scheduler = Scheduler::new(&model, forgetful());
        let end = Arc::new(Mutex::new(None));
        let (slot, mut count) = (end.clone(), 0);
        let listener = move |event: Event<Cpu>| {
            match event {
                Event::Token { .. } => count += 1,
                Event::Finished { outcome, .. } => *slot.lock().unwrap() = Some(outcome),
                _ => {}
            }
            if count == stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let request = Request { draft, ..request(&prompt, 12, &model) };
        scheduler.submit(request, Box::new(listener)).unwrap();
        while scheduler.step() {}
        let outcome = end.lock().unwrap().take().unwrap();
        assert_eq!((outcome.finish, &outcome.ids[..]), (Finish::Stopped, &want.ids[..stop]));
        assert_eq!(outcome.position, prompt.len() + stop, "the sequence is as long as without");
        let state = outcome.state.unwrap();
        assert!(state.position() <= prompt.len() + stop);
        let (_, plain) = clean(&model, &prompt, state.position() - prompt.len() + 1);
        assert_eq!(everything(&state), everything(&plain), "stopped after {stop}");
    }
}

// What goes wrong

#[test]
fn r_f13_a_listener_or_constraint_that_panics_fails_alone() {
    struct Panics;
    impl Constraint for Panics {
        fn allowed(&mut self) -> Result<TokenSet> {
            panic!("no tokens today")
        }
        fn accept(&mut self, _: u32) -> Result<()> {
            Ok(())
        }
        fn is_complete(&self) -> bool {
            false
        }
        fn fork(&self) -> Box<dyn Constraint> {
            Box::new(Self)
        }
    }
    std::panic::set_hook(Box::new(|_| {}));
    let tiny = Tiny::m("");
    let ids = tokens(1, 20, 80);
    let want = clean(&tiny.model, &ids, 10).0;
    let mut scheduler = Scheduler::new(&tiny.model, forgetful());
    let (good, constrained) = (Recorder::default(), Recorder::default());
    let panics = |_: Event<Cpu>| -> ControlFlow<()> { panic!("not my day") };
    scheduler.submit(request(&ids, 10, &tiny.model), Box::new(panics)).unwrap();
    scheduler.submit(request(&ids, 10, &tiny.model), good.listener()).unwrap();
    let asked = Request { constraint: Some(Box::new(Panics)), ..request(&ids, 10, &tiny.model) };
    scheduler.submit(asked, constrained.listener()).unwrap();
    while scheduler.step() {}
    let _ = std::panic::take_hook();
    assert_eq!(good.answer(), want);
    let recorded = constrained.0.lock().unwrap();
    assert_eq!(recorded.failed.as_deref(), Some("the choice of a token panicked: no tokens today"));
    let stats = scheduler.stats();
    assert_eq!((stats.finished, stats.failed, stats.panics), (3, 2, 2));
}

#[test]
fn logits_that_are_no_numbers_fail_their_request_alone() {
    let tiny = Tiny::m("");
    let ids = tokens(1, 20, 80);
    let mut bad = tiny.state();
    tiny.run(&ids[..5], &[5], &mut bad);
    let shape = bad.ssm(0).unwrap().shape().to_vec();
    let nan = vec![f32::NAN; shape.iter().product()];
    bad.set_ssm(0, boostr::ops::tensor(&cpu(), &nan, &shape).unwrap()).unwrap();
    let mut scheduler = Scheduler::new(&tiny.model, forgetful());
    let (spoiled, good) = (Recorder::default(), Recorder::default());
    let asked = Request { state: Some(bad), ..request(&ids, 5, &tiny.model) };
    scheduler.submit(asked, spoiled.listener()).unwrap();
    scheduler.submit(request(&ids, 5, &tiny.model), good.listener()).unwrap();
    while scheduler.step() {}
    assert!(spoiled.0.lock().unwrap().failed.as_ref().unwrap().contains("NaN"));
    assert_eq!(good.answer(), clean(&tiny.model, &ids, 5).0);
}

#[test]
fn requests_that_cannot_be_computed_are_refused_before_they_wait() {
    let tiny = Tiny::m("");
    let model = &tiny.model;
    let mut scheduler = Scheduler::new(model, EngineConfig::default());
    let other = Tiny::m(r#", "num_hidden_layers": 3"#);
    let hot = SamplerConfig { temperature: f32::NAN, ..SamplerConfig::default() };
    let bad: Vec<(Request<Cpu>, &str)> = vec![
        (request(&[], 5, model), "at least one token"),
        (request(&[80], 5, model), "token id 80 is not below"),
        (Request { count: 0, ..request(&[1], 5, model) }, "count"),
        (Request { count: 65, ..request(&[1], 5, model) }, "count"),
        (Request { vocab_limit: 81, ..request(&[1], 5, model) }, "vocab_limit"),
        (Request { sampler: hot, ..request(&[1], 5, model) }, "temperature"),
        (Request { state: Some(other.state()), ..request(&[1], 5, model) }, "state layers"),
    ];
    for (request, expected) in bad {
        let refused = scheduler.submit(request, Recorder::default().listener()).unwrap_err();
        assert!(refused.to_string().contains(expected), "{refused}");
    }
    assert!(scheduler.is_idle());
}

// The engine's thread

#[test]
fn r_d11_the_engine_refuses_what_its_queue_cannot_hold_and_drains() {
    let tiny = Tiny::m("");
    let want = clean(&tiny.model, &[1, 2, 3], 30).0;
    let config = EngineConfig {
        max_running: 2,
        max_queue: 3,
        threads: Some(Threads::new(2).unwrap()),
        ..forgetful()
    };
    let engine = Engine::start(Arc::new(tiny.model), config).unwrap();
    let ask = |recorder: &Recorder| {
        let asked =
            Request { logprobs: Some(0), max_tokens: 30, ..Request::new(vec![1, 2, 3], 80) };
        engine.submit(asked, recorder.listener())
    };
    let recorders: Vec<Recorder> = (0..100).map(|_| Recorder::default()).collect();
    let (mut taken, mut full) = (Vec::new(), 0);
    for recorder in &recorders {
        match ask(recorder) {
            Ok(_) => taken.push(recorder),
            Err(Rejected::QueueFull { waiting }) => (full, ()) = (full + 1, assert!(waiting >= 3)),
            Err(other) => panic!("{other}"),
        }
    }
    assert!(full > 0 && taken.len() >= 5, "{full} {}", taken.len());
    engine.drain();
    assert!(matches!(ask(&recorders[0]), Err(Rejected::Draining)));
    while !engine.is_idle() {
        std::thread::yield_now();
    }
    for recorder in &taken {
        assert_eq!(recorder.answer(), want);
    }
    let stats = engine.stats();
    assert_eq!((stats.finished as usize, stats.running, stats.queued), (taken.len(), 0, 0));
    engine.stop();
    assert!(matches!(ask(&recorders[0]), Err(Rejected::Stopped)));
}

#[test]
fn an_engine_that_is_stopped_or_dropped_ends_every_request() {
    for is_dropped in [false, true] {
        let tiny = Tiny::m("");
        let engine = Engine::start(Arc::new(tiny.model), EngineConfig::default()).unwrap();
        let recorders: Vec<Recorder> = (0..40).map(|_| Recorder::default()).collect();
        for recorder in &recorders {
            let asked = Request { max_tokens: 1 << 40, ..Request::new(vec![1, 2, 3], 80) };
            engine.submit(asked, recorder.listener()).unwrap();
        }
        if is_dropped {
            drop(engine);
        } else {
            engine.stop();
        }
        for recorder in &recorders {
            assert_eq!(recorder.finish(), Finish::Cancelled);
        }
    }
}
