//! Text in, text out: completions, stop strings, what is left of a state when a request fails, beams.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use boostr::Error;
use boostr::backend::{Cpu, cpu_at};
use boostr::engine::{Engine, EngineConfig, Event, Finish, Request, generate};
use boostr::load::{LanguageModel, OpenOptions, Progress};
use boostr::models::{Context, Logits, Run, State};
use boostr::ops::Level;
use boostr::sample::{Constraint, TokenSet};
use boostr::text::{self, TextDecoder};
use boostr::threads::Threads;

use crate::common::cpu;
use crate::tiny::{self, fixture};

fn open(name: &str) -> LanguageModel<Cpu> {
    LanguageModel::open(fixture(name), &OpenOptions::default(), cpu()).unwrap()
}

/// Logits of what comes after `ids`, of which the state has seen the first ones.
fn logits(lm: &LanguageModel<Cpu>, state: &State<Cpu>, ids: &[u32]) -> Vec<f32> {
    let rest = &ids[state.position()..];
    let rows = tiny::run(&lm.model, rest, &[rest.len()], &mut state.clone());
    rows[rows.len() - lm.model.vocab_rows()..].to_vec()
}

#[test]
fn the_pieces_of_a_stream_are_the_text_and_the_text_is_that_of_the_ids() {
    for name in ["mamba2-tiny", "bamba-tiny"] {
        let lm = open(name);
        let mut pieces = String::new();
        let answer = lm
            .complete("Once upon a time")
            .max_tokens(24)
            .stream(|piece| pieces.push_str(piece))
            .unwrap();
        assert_eq!(answer.text, pieces, "{name}");
        assert_eq!(answer.text, lm.tokenizer().unwrap().decode(&answer.ids, true).unwrap());
        assert_eq!(answer.prompt, lm.encode("Once upon a time").unwrap());
        assert!(answer.ids.len() <= 24 && answer.tokens.is_empty());
    }
}

#[test]
fn a_stop_string_ends_the_text_before_it_and_says_so() {
    let lm = open("mamba2-tiny");
    let whole = lm.complete("Once").max_tokens(24).run().unwrap();
    assert_eq!(whole.finish, Finish::Length);
    let (at, _) = whole.text.char_indices().nth(whole.text.chars().count() / 2).unwrap();
    let stop: String = whole.text[at..].chars().take(3).collect();
    let cut = lm.complete("Once").max_tokens(24).stop(&*stop).run().unwrap();
    assert_eq!(cut.text, whole.text[..whole.text.find(&stop).unwrap()]);
    assert_eq!((cut.finish, cut.finish.name()), (Finish::StopString, "stop"));
    assert!(whole.ids.starts_with(&cut.ids) && cut.ids.len() < whole.ids.len());
    // The listener of an engine finds it as well.
    let lm = Arc::new(lm);
    let threads = Some(Threads::new(1).unwrap());
    let config = EngineConfig { threads, ..EngineConfig::default() };
    let engine = Engine::start(lm.clone(), config).unwrap();
    let decoder = TextDecoder::new(lm.tokenizer().unwrap().stream(true), &[stop], false).unwrap();
    let (listener, events) = text::channel(vec![decoder]);
    let prompt = lm.encode("Once").unwrap();
    let request = Request { max_tokens: 24, ..Request::new(prompt, lm.vocab_limit()) };
    engine.submit(request, Box::new(listener)).unwrap();
    let (mut text, mut finish) = (String::new(), None);
    for event in events {
        text += &event.delta.text;
        if let Event::Finished { outcome, .. } = event.event {
            finish = Some(outcome.finish);
        }
    }
    assert_eq!((text, finish), (cut.text, Some(Finish::StopString)));
}

#[test]
fn what_follows_an_answer_is_what_follows_all_ids_at_once() {
    for name in ["mamba2-tiny", "bamba-tiny"] {
        let lm = open(name);
        let first = lm.complete("Once upon a time").max_tokens(7).run().unwrap();
        let ids = [first.prompt, first.ids].concat();
        let next = lm.complete(" and then").after(ids, first.state).max_tokens(9).run().unwrap();
        let anew = lm.complete_ids(next.prompt.clone()).max_tokens(9).run().unwrap();
        assert_eq!((next.ids, next.text), (anew.ids, anew.text), "{name}");
    }
}

#[test]
fn log_probabilities_come_with_the_tokens_that_were_chosen() {
    let lm = open("mamba2-tiny");
    let answer = lm.complete("Once").max_tokens(8).logprobs(2).run().unwrap();
    let ids: Vec<u32> = answer.tokens.iter().map(|token| token.id).collect();
    assert_eq!(ids, answer.ids);
    for token in &answer.tokens {
        assert_eq!(token.top.len(), 2);
        assert_eq!(token.top[0], (token.id, token.logprob), "greedy takes the likeliest");
    }
}

/// Allows everything `left` times, and then nothing.
#[derive(Clone, Debug)]
struct Allows {
    left: usize,
    vocabulary: usize,
}

impl Constraint for Allows {
    fn allowed(&mut self) -> boostr::Result<TokenSet> {
        self.left = self.left.saturating_sub(1);
        Ok(TokenSet::new(self.vocabulary, self.left > 0))
    }

    fn accept(&mut self, _: u32) -> boostr::Result<()> {
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

#[test]
fn a_request_that_fails_gives_the_state_back_where_it_was() {
    for name in ["mamba2-tiny", "bamba-tiny"] {
        let lm = open(name);
        let prompt = tiny::tokens(3, 20, lm.vocab_limit());
        for left in [0, 1, 4] {
            let mut state = lm.model.new_state().unwrap();
            let constraint = Allows { left, vocabulary: lm.vocab_limit() };
            let request = Request {
                max_tokens: 9,
                constraint: Some(Box::new(constraint)),
                ..Request::new(prompt.clone(), lm.vocab_limit())
            };
            let mut ids = prompt.clone();
            let failed = generate(&lm.model, &mut state, request, &mut |event| {
                if let Event::Token { id, .. } = event {
                    ids.push(id);
                }
                ControlFlow::Continue(())
            });
            assert!(failed.is_err(), "{name}: nothing was allowed after {left}");
            assert_eq!(state.position(), ids.len(), "{name}, {left}");
            ids.push(1);
            let fresh = lm.model.new_state().unwrap();
            let is_same = logits(&lm, &state, &ids) == logits(&lm, &fresh, &ids);
            assert!(is_same, "{name}, {left}");
        }
    }
}

#[test]
fn a_listener_that_panics_leaves_the_state_too() {
    let lm = open("mamba2-tiny");
    let prompt = tiny::tokens(3, 20, lm.vocab_limit());
    let mut state = lm.model.new_state().unwrap();
    let request = Request { max_tokens: 5, ..Request::new(prompt, lm.vocab_limit()) };
    let failed = generate(&lm.model, &mut state, request, &mut |event| {
        assert!(!matches!(event, Event::Token { .. }), "as the test wants");
        ControlFlow::Continue(())
    });
    assert!(matches!(failed, Err(Error::Panic { .. })), "{failed:?}");
    assert_eq!(state.position(), 20);
}

#[test]
fn one_beam_is_the_greedy_answer_and_more_are_no_less_likely() {
    let lm = open("mamba2-tiny");
    let go_on = |_| ControlFlow::Continue(());
    let greedy = lm.complete("Once").temperature(0.0).max_tokens(8).run().unwrap();
    let one = lm.complete("Once").max_tokens(8).beams(1, go_on).unwrap();
    assert_eq!((&one[0].ids, &one[0].text), (&greedy.ids, &greedy.text));
    assert_eq!(one[0].finish, greedy.finish);
    let many = lm.complete("Once").max_tokens(8).beams(4, go_on).unwrap();
    assert_eq!(many.len(), 4);
    assert!(many.windows(2).all(|pair| pair[0].logprob >= pair[1].logprob));
    assert!(many[0].logprob >= one[0].logprob);
    // From a state that has seen the beginning.
    let ids = lm.encode("Once").unwrap();
    let before = lm.complete_ids(ids[..1].to_vec()).max_tokens(0).run().unwrap();
    let after = lm.complete_ids(ids[1..].to_vec()).after(before.prompt, before.state);
    assert_eq!(after.max_tokens(8).beams(4, go_on).unwrap(), many);
    // Ended after three tokens.
    let stop = |done| if done == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let short = lm.complete("Once").max_tokens(8).beams(2, stop).unwrap();
    assert!(short.iter().all(|beam| beam.ids.len() == 3 && beam.finish == Finish::Stopped));
    for width in [0, 65] {
        assert!(lm.complete("Once").beams(width, go_on).is_err());
    }
    let drafted = lm.complete("Once").draft(boostr::engine::Draft::Lookup);
    assert!(drafted.beams(2, go_on).is_err());
}

#[test]
fn opening_tells_how_far_it_is_and_can_be_ended() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let told = seen.clone();
    let progress = Progress::new(move |done, total| {
        told.lock().unwrap().push((done, total));
        ControlFlow::Continue(())
    });
    let options = OpenOptions { progress: Some(progress), ..OpenOptions::default() };
    LanguageModel::open(fixture("mamba2-tiny"), &options, cpu()).unwrap();
    let seen = seen.lock().unwrap();
    let total = seen[0].1;
    assert!(seen.len() > 2 && seen.windows(2).all(|pair| pair[0].0 <= pair[1].0), "{seen:?}");
    assert_eq!(seen.last(), Some(&(total, total)));

    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let progress = Progress::new(move |_, _| {
        let is_second = counted.fetch_add(1, Ordering::Relaxed) == 1;
        if is_second { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let options = OpenOptions { progress: Some(progress), ..OpenOptions::default() };
    let error = LanguageModel::open(fixture("mamba2-tiny"), &options, cpu()).err().unwrap();
    assert!(matches!(error, Error::Interrupted { .. }), "{error}");
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

#[test]
fn one_pool_serves_a_model_and_its_engine_with_the_same_bits() {
    let threads = Threads::new(1).unwrap();
    let options = OpenOptions { threads: Some(threads.clone()), ..OpenOptions::default() };
    let lm = Arc::new(LanguageModel::open(fixture("bamba-tiny"), &options, cpu()).unwrap());
    let want = open("bamba-tiny").complete("Once").max_tokens(9).run().unwrap();
    let engine = Engine::start(lm.clone(), EngineConfig::default()).unwrap();
    for _ in 0..3 {
        let (listener, events) = text::channel(Vec::new());
        let prompt = lm.encode("Once").unwrap();
        let request = Request { max_tokens: 9, ..Request::new(prompt, lm.vocab_limit()) };
        engine.submit(request, Box::new(listener)).unwrap();
        let ids: Vec<u32> = events
            .filter_map(|event| match event.event {
                Event::Token { id, .. } => Some(id),
                _ => None,
            })
            .collect();
        assert_eq!(ids, want.ids);
        // While the engine is idle, and has no thread of the pool.
        assert_eq!(lm.complete("Once").max_tokens(9).run().unwrap().ids, want.ids);
    }
    assert_eq!(threads.count(), 1);
}

#[test]
fn a_request_whose_events_are_dropped_unread_ends() {
    let lm = Arc::new(open("mamba2-tiny"));
    let threads = Some(Threads::new(1).unwrap());
    let config = EngineConfig { threads, max_running: 1, ..EngineConfig::default() };
    let engine = Engine::start(lm.clone(), config).unwrap();
    for _ in 0..3 {
        let (listener, events) = text::channel(Vec::new());
        let prompt = lm.encode("Once").unwrap();
        let request = Request { max_tokens: 1_000_000, ..Request::new(prompt, lm.vocab_limit()) };
        engine.submit(request, Box::new(listener)).unwrap();
        // Long enough for as many events as may lie unread.
        std::thread::sleep(Duration::from_millis(300));
        drop(events);
        let start = Instant::now();
        while !engine.is_idle() {
            assert!(start.elapsed() < Duration::from_secs(20), "the request goes on");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn others_may_use_a_model_while_an_engine_of_the_same_threads_has_requests() {
    let threads = Threads::new(1).unwrap();
    let options = OpenOptions { threads: Some(threads), ..OpenOptions::default() };
    let lm = Arc::new(LanguageModel::open(fixture("mamba2-tiny"), &options, cpu()).unwrap());
    let want = open("mamba2-tiny").complete("Once").max_tokens(9).run().unwrap();
    let engine = Engine::start(lm.clone(), EngineConfig::default()).unwrap();
    let (listener, events) = text::channel(Vec::new());
    let request = Request {
        max_tokens: 1_000_000,
        ..Request::new(lm.encode("Once").unwrap(), lm.vocab_limit())
    };
    engine.submit(request, Box::new(listener)).unwrap();
    // Nobody reads the events, so the request waits for ever and the engine is never idle.
    assert_eq!(lm.complete("Once").max_tokens(9).run().unwrap().ids, want.ids);
    assert!(!engine.is_idle());
    drop(events);
}

#[test]
fn beams_may_be_ended_before_the_prompt_is_read() {
    let lm = open("mamba2-tiny");
    let prompt = vec![5; 3000];
    let mut asked = 0;
    let beams = lm.complete_ids(prompt).max_tokens(4).beams(2, |_| {
        asked += 1;
        if asked > 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!((beams.unwrap().len(), asked), (0, 3));
}

#[test]
fn a_state_of_another_level_is_refused_before_it_is_changed() {
    let lm = open("bamba-tiny");
    let own = lm.model.client().level();
    for level in Level::present().iter().copied().filter(|level| *level != own) {
        let other = cpu_at(level).unwrap();
        let other =
            LanguageModel::open(fixture("bamba-tiny"), &OpenOptions::default(), other).unwrap();
        let mut state = other.model.new_state().unwrap();
        tiny::run(&other.model, &[5, 17, 3], &[3], &mut state);
        let before = state.position();
        assert!(lm.model.check_state(&state).is_err(), "{level}");
        let mut run = [Run { tokens: &[7], state: &mut state }];
        assert!(lm.model.forward(&mut run, Logits::Last).is_err(), "{level}");
        // It goes on where it belongs.
        tiny::run(&other.model, &[7], &[1], &mut state);
        assert_eq!(state.position(), before + 1);
    }
}

#[test]
fn p_context_overflow_silent_state_and_prompt_together_are_held_to_the_context() {
    let open = |name: &str, context| {
        let options = OpenOptions { context, ..OpenOptions::default() };
        LanguageModel::<Cpu>::open(fixture(name), &options, cpu()).unwrap()
    };
    let limit = |name: &str, context| open(name, context).model.context_limit();
    assert_eq!(limit("llama-tiny", Context::Model), Some(2048));
    assert_eq!(limit("llama-tiny", Context::Unlimited), None);
    assert_eq!(limit("mamba2-tiny", Context::Model), None);
    assert_eq!(limit("mamba2-tiny", Context::Tokens(5)), Some(5));

    for name in ["llama-tiny", "mamba2-tiny"] {
        let lm = open(name, Context::Tokens(10));
        let complete = |count: u32| lm.complete_ids((3..3 + count).collect()).max_tokens(1000);
        let refused = |result: boostr::Result<_>, found: usize| match result.map(drop) {
            Err(Error::Context { tokens, limit: 10 }) => assert_eq!(tokens, found),
            other => panic!("{other:?}"),
        };
        refused(complete(11).run(), 11);
        assert!(matches!(
            complete(11).beams(2, |_| ControlFlow::Continue(())),
            Err(Error::Context { tokens: 11, limit: 10 })
        ));
        assert_eq!(complete(10).run().unwrap().ids.len(), 0);
        let beams = complete(7).beams(2, |_| ControlFlow::Continue(())).unwrap();
        assert!(beams.iter().all(|beam| beam.ids.len() <= 3), "{beams:?}");

        // Also where the tokens that a state has seen are not known.
        let before = complete(6).max_tokens(2).run().unwrap();
        let after = |count| complete(count).after(Vec::new(), before.state.clone());
        let seen = before.state.position();
        refused(after(4).run(), seen + 4);
        let answer = after(1).run().unwrap();
        assert!(answer.ids.len() < 10 - seen, "{name}: {:?}", answer.ids);
        if answer.ids.len() == 10 - seen - 1 {
            assert_eq!(answer.finish, Finish::Length);
        }
    }
}
