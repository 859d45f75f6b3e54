//! A published model from its file to its answer: SmolLM2-135M-Instruct, in 4 bits, as people have it.
//!
//! The file has 98 MB and is not part of this repository: `scripts/fetch_smollm2.sh` fetches it, to where this looks, or
//! `BOOSTR_SMOLLM2` names it. `.ci/run` does both.

use std::env;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use boostr::backend::Cpu;
use boostr::chat::Options;
use boostr::engine::{Finish, Request, generate};
use boostr::load::{LanguageModel, OpenOptions};
use serde_json::json;

use crate::common::cpu;

fn file() -> PathBuf {
    let default = "../../target/models/SmolLM2-135M-Instruct.Q4_1.gguf";
    let path = env::var_os("BOOSTR_SMOLLM2")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(default), PathBuf::from);
    assert!(path.exists(), "`{}` is missing: run scripts/fetch_smollm2.sh", path.display());
    path
}

/// The prompt's ids, and what the model says after them, at most `max_tokens`.
fn answer(lm: &LanguageModel<Cpu>, max_tokens: usize) -> (Vec<u32>, Vec<u32>, Finish) {
    let template = lm.chat_template.as_ref().unwrap().compile().unwrap();
    let tokenizer = lm.tokenizer().unwrap();
    let messages = [json!({"role": "user", "content": "What is the capital of France?"})];
    let options = Options { add_generation_prompt: true, ..Options::default() };
    let text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\
                <|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(template.render(&messages, &options).unwrap(), text);
    let prompt = template.encode(tokenizer, &messages, &options).unwrap();
    assert_eq!(tokenizer.decode(&prompt, false).unwrap(), text);
    let request = Request {
        max_tokens,
        eos: lm.eos.clone(),
        ..Request::new(prompt.clone(), lm.vocab_limit())
    };
    let mut state = lm.model.new_state().unwrap();
    let silent = &mut |_| ControlFlow::Continue(());
    let outcome = generate(&lm.model, &mut state, request, silent).unwrap();
    (prompt, outcome.ids, outcome.finish)
}

#[test]
#[ignore = "needs the 98 MB that scripts/fetch_smollm2.sh fetches"]
fn it_answers_that_the_capital_of_france_is_paris_and_stops() {
    for exact in [false, true] {
        let options = OpenOptions { exact, ..OpenOptions::default() };
        let lm = LanguageModel::<Cpu>::open(&file(), &options, cpu()).unwrap();
        let (prompt, ids, finish) = answer(&lm, 64);
        // As llama-cpp-python 0.3.36 encodes the text, with control tokens.
        let theirs = [
            1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411,
            407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1,
            520, 9531, 198,
        ];
        assert_eq!(prompt, theirs);
        let answer = lm.tokenizer().unwrap().decode(&ids, true).unwrap();
        assert_eq!(answer, "The capital of France is Paris.");
        assert_eq!(finish, Finish::Eos);
    }
}
