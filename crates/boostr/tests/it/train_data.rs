//! Training data: tokenizers that are made, documents that are read, files of tokens, batches, and pairs.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::common::{Folder, Random};
use boostr::chat::{self, ChatTemplate, Options};
use boostr::generation_config::SpecialTokens;
use boostr::ops::IGNORE;
use boostr::tokenizer::Tokenizer;
use boostr::train::bpe::{self, END_OF_TEXT, MIN_VOCAB};
use boostr::train::data::{
    Batch, Batches, Content, Cursor, DataFile, Documents, Encoder, Kind, PIECE, Packing, Pass,
    Piece, TokenFile, Truncate, read_pairs,
};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

const WORDS: [&str; 24] = [
    "the", "a", "river", "runs", "to", "sea", "and", "never", "stops", "although", "stones", "lie",
    "in", "its", "bed", "we'll", "see", "42", "of", "them", "Loire", "naïve", "he's", "that",
];

/// Text that is somewhat like language: sentences of words, lines, marks.
fn prose(seed: u64, words: usize) -> String {
    let mut random = Random(seed);
    let mut text = String::new();
    for _ in 0..words {
        text.push_str(WORDS[random.below(WORDS.len())]);
        text.push_str([" ", " ", " ", " ", " ", ", ", ". ", "\n", "\n\n"][random.below(9)]);
    }
    text
}

fn text_file(path: impl AsRef<Path>, separator: Option<&str>) -> DataFile {
    let kind = Kind::Text { separator: separator.map(str::to_owned) };
    DataFile { path: path.as_ref().to_path_buf(), kind }
}

/// A tokenizer of prose, 320 tokens, with the control tokens of chats.
fn tokenizer() -> Tokenizer {
    let folder = Folder::new();
    let path = folder.write("a.txt", prose(1, 4000));
    let json = bpe::train(&[DataFile::new(path).unwrap()], 320, |_, _| {}).unwrap();
    let mut json: Value = serde_json::from_str(&json).unwrap();
    for (i, content) in ["<|im_start|>", "<|im_end|>"].into_iter().enumerate() {
        let mut token = json["added_tokens"][0].clone();
        token["id"] = json!(320 + i);
        token["content"] = json!(content);
        json["added_tokens"].as_array_mut().unwrap().push(token);
    }
    Tokenizer::from_bytes("tokenizer.json", json.to_string().as_bytes()).unwrap()
}

fn contents(files: &[DataFile]) -> Vec<Content> {
    Documents::new(files).map(|document| document.unwrap().content).collect()
}

/// The texts of whole documents of plain text, put together from their pieces.
fn texts(file: DataFile) -> Vec<String> {
    let (mut texts, mut open) = (Vec::new(), None::<String>);
    for content in contents(&[file]) {
        let Content::Text { text, is_first, is_last } = content else { panic!("{content:?}") };
        assert_eq!(is_first, open.is_none());
        assert!(text.len() <= PIECE);
        let all = open.take().unwrap_or_default() + &text;
        if is_last {
            texts.push(all);
        } else {
            open = Some(all);
        }
    }
    assert_eq!(open, None);
    texts
}

// Tokenizers

/// The definition: join the most frequent pair of neighbours, of equals the one with the lowest ids.
fn merges_by_definition(
    words: &BTreeMap<Vec<String>, u64>,
    first: usize,
    vocab: usize,
) -> Vec<(String, String)> {
    let mut words = words.clone();
    let mut symbols: Vec<String> = words.keys().flatten().cloned().collect();
    symbols.sort();
    symbols.dedup();
    // Ids of bytes are in the order of their letters, above those of tokens joined before.
    let mut ids: BTreeMap<String, usize> =
        symbols.into_iter().enumerate().map(|(i, s)| (s, i)).collect();
    let mut merges = Vec::new();
    while first + merges.len() < vocab {
        let mut counts: BTreeMap<(usize, usize, &String, &String), u64> = BTreeMap::new();
        for (word, count) in &words {
            for pair in word.windows(2) {
                *counts.entry((ids[&pair[0]], ids[&pair[1]], &pair[0], &pair[1])).or_default() +=
                    count;
            }
        }
        let most = counts.iter().max_by_key(|&(key, &count)| (count, std::cmp::Reverse(*key)));
        let Some((&(.., a, b), _)) = most.filter(|&(_, &count)| count >= 2) else { break };
        let (a, b) = (a.clone(), b.clone());
        let joined = |word: Vec<String>| {
            let (mut out, mut i) = (Vec::new(), 0);
            while i < word.len() {
                if i + 1 < word.len() && word[i] == a && word[i + 1] == b {
                    out.push(format!("{a}{b}"));
                    i += 2;
                } else {
                    out.push(word[i].clone());
                    i += 1;
                }
            }
            out
        };
        words = words.into_iter().map(|(word, count)| (joined(word), count)).collect();
        let id = 1000 + ids.len();
        ids.insert(format!("{a}{b}"), id);
        merges.push((a, b));
    }
    merges
}

#[test]
fn a_tokenizer_joins_the_most_frequent_pairs() {
    let folder = Folder::new();
    let text = "the other then that thin other father mother hatter the thaw ".repeat(3);
    let files = [DataFile::new(folder.write("a.txt", &text)).unwrap()];

    // A word takes the space before it, which is the letter Ġ.
    let mut words: BTreeMap<Vec<String>, u64> = BTreeMap::new();
    for (i, word) in text.split(' ').filter(|word| !word.is_empty()).enumerate() {
        let word = format!("{}{word}", if i == 0 { "" } else { "Ġ" });
        *words.entry(word.chars().map(String::from).collect()).or_default() += 1;
    }
    for (vocab, merges) in [(MIN_VOCAB, 0), (270, 13), (280, 23), (340, 24)] {
        let json = bpe::train(&files, vocab, |_, _| {}).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        let found: Vec<(String, String)> =
            serde_json::from_value(json["model"]["merges"].clone()).unwrap();
        assert_eq!(found.len(), merges);
        assert_eq!(found, merges_by_definition(&words, MIN_VOCAB, vocab));
    }
}

#[test]
fn a_tokenizer_spells_every_text_and_its_first_token_ends_a_text() {
    let folder = Folder::new();
    let lines = [
        json!({"text": "zzzz ".repeat(50)}),
        json!({"messages": [{"role": "user", "content": "qqqq ".repeat(50)}]}),
        json!({"prompt": "xxxx ".repeat(50), "completion": "kkkk ".repeat(50)}),
    ];
    let files = [
        DataFile::new(folder.write("a.txt", prose(1, 3000))).unwrap(),
        DataFile::new(folder.write("b.jsonl", lines.map(|line| line.to_string()).join("\n")))
            .unwrap(),
    ];
    let reports = RefCell::new(Vec::new());
    let json =
        bpe::train(&files, 340, |done, total| reports.borrow_mut().push((done, total))).unwrap();
    let total: u64 = files.iter().map(|file| fs::metadata(&file.path).unwrap().len()).sum();
    assert_eq!(reports.borrow().last(), Some(&(total, total)));

    let tokenizer = Tokenizer::from_bytes("tokenizer.json", json.as_bytes()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 340);
    assert_eq!(tokenizer.id(END_OF_TEXT), Some(0));
    assert!(tokenizer.is_special(0));
    assert_eq!(tokenizer.encode_control(END_OF_TEXT, true).unwrap(), [0]);
    for text in ["", "the river", " ÿ\u{0}\u{1f469}\r\n\t日本 ", END_OF_TEXT, "  two  spaces"] {
        let ids = tokenizer.encode(text, true).unwrap();
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        assert!(!ids.contains(&0), "{text}");
    }
    // Learnt from each kind of document, and shorter than letters.
    for (text, most) in
        [("zzzz", 2), ("qqqq", 2), ("xxxx", 2), ("kkkk", 2), (" river runs", 2), (" the sea", 2)]
    {
        assert!(tokenizer.encode(text, true).unwrap().len() <= most, "{text}");
    }
    // GPT-2's words: a space is only before a letter, never in a token or after one.
    for id in 257..340 {
        let token = tokenizer.token(id).unwrap();
        assert!(!token.trim_start_matches('Ġ').contains('Ġ'), "{token}");
    }
    for _ in 0..5 {
        assert!(bpe::train(&files, 340, |_, _| {}).unwrap() == json, "not the same bytes");
    }
}

#[test]
fn a_tokenizer_of_nothing_or_without_all_bytes_is_refused() {
    let folder = Folder::new();
    let full = DataFile::new(folder.write("a.txt", "ab ab ab")).unwrap();
    let blank = DataFile::new(folder.write("b.txt", " \n")).unwrap();
    let error =
        |files: &[DataFile], vocab| bpe::train(files, vocab, |_, _| {}).unwrap_err().to_string();
    let small =
        "argument `vocab_size`: expected 257 (the bytes and <|endoftext|>) to 16777216, found 256";
    assert_eq!(error(std::slice::from_ref(&full), 256), small);
    assert!(error(std::slice::from_ref(&full), 1 << 25).contains("found 33554432"));
    let empty = "argument `files`: expected text to make tokens of, found none";
    assert_eq!(error(&[blank], 300), empty);
    assert_eq!(error(&[], 300), empty);
    assert!(error(&[DataFile::new("/none/x.txt").unwrap()], 300).contains("/none/x.txt"));

    // Fewer tokens than asked for where no pair is there twice: `ab` and ` ab`.
    let json = bpe::train(&[full], 300, |_, _| {}).unwrap();
    let tokenizer = Tokenizer::from_bytes("tokenizer.json", json.as_bytes()).unwrap();
    assert_eq!(tokenizer.vocab_size(), MIN_VOCAB + 2);
}

#[test]
fn a_tokenizer_is_made_of_odd_texts_too() {
    let folder = Folder::new();
    for text in
        ["a".repeat(2 * PIECE), " ".repeat(PIECE) + "a", "\0".repeat(PIECE), "日本語".repeat(9999)]
    {
        let files = [DataFile::new(folder.write("a.txt", &text)).unwrap()];
        let json = bpe::train(&files, 262, |_, _| {}).unwrap();
        let tokenizer = Tokenizer::from_bytes("tokenizer.json", json.as_bytes()).unwrap();
        let ids = tokenizer.encode(&text, true).unwrap();
        assert!(ids.len() < text.len() / 2);
        assert!(tokenizer.decode(&ids, true).unwrap() == text);
    }
}

// Documents

#[test]
fn a_file_of_text_is_one_document_unless_a_line_separates() {
    let folder = Folder::new();
    let text = "\u{feff}one\r\n\r\n\ntwo\n%%\r\n  \n%%\n%%x\n %%\nthree\n%%\nfour";
    let path = folder.write("a.txt", text);
    assert_eq!(texts(text_file(&path, None)), [text.trim_start_matches('\u{feff}')]);
    assert_eq!(
        texts(text_file(&path, Some("%%"))),
        ["one\r\n\r\n\ntwo\n", "%%x\n %%\nthree\n", "four"]
    );
    assert_eq!(
        texts(text_file(&path, Some(""))),
        ["one\r\n", "two\n%%\r\n  \n%%\n%%x\n %%\nthree\n%%\nfour"]
    );
    assert_eq!(texts(text_file(folder.write("b.txt", " \n\t\n"), None)), [""; 0]);
    assert_eq!(texts(text_file(folder.write("c.txt", ""), None)), [""; 0]);
    let lines: Vec<usize> = Documents::new(&[text_file(&path, Some("%%")), text_file(&path, None)])
        .map(|document| document.unwrap().line)
        .collect();
    assert_eq!(lines, [1, 8, 12, 1]);
}

#[test]
fn a_long_text_comes_in_pieces_that_are_the_file() {
    let folder = Folder::new();
    for text in
        [prose(3, 200_000), "é".repeat(PIECE + 3), "a\n".repeat(2 * PIECE), "x".repeat(PIECE)]
    {
        let path = folder.write("a.txt", &text);
        let pieces = contents(&[text_file(&path, None)]).len();
        assert!(pieces <= 2 * (text.len() / PIECE + 1), "{pieces} pieces of {} bytes", text.len());
        assert!(texts(text_file(&path, None)) == [text], "not the file");
    }
    let long = prose(4, 100_000);
    let path = folder.write("a.txt", format!("{long}\n---\nshort\n"));
    assert!(texts(text_file(&path, Some("---"))) == [long + "\n", "short\n".to_owned()]);
}

#[test]
fn lines_of_json_are_texts_completions_or_conversations() {
    let folder = Folder::new();
    let path = folder.write(
        "a.jsonl",
        "\u{feff}{\"text\": \"a\\u00e9\", \"meta\": 1}\r\n\n  \n{\"text\": \"  \"}\n\
         {\"prompt\": \"p\", \"completion\": \"c\", \"text\": \"t\"}\n\
         {\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"prompt\": \"p\", \"tools\": null}\n\
         {\"prompt\": null, \"text\": \"last\"}",
    );
    let file = DataFile::new(&path).unwrap();
    let documents: Vec<(usize, Content)> = Documents::new(std::slice::from_ref(&file))
        .map(|document| document.map(|d| (d.line, d.content)).unwrap())
        .collect();
    let text = |text: &str| Content::Text { text: text.into(), is_first: true, is_last: true };
    let hi = json!({"role": "user", "content": "hi"});
    assert_eq!(
        documents,
        [
            (1, text("aé")),
            (5, Content::Completion { prompt: "p".into(), completion: "c".into() }),
            (
                6,
                Content::Messages { messages: vec![hi], given: 0, tools: None, kwargs: Map::new() }
            ),
            (7, text("last")),
        ]
    );
    let mut all = Documents::new(std::slice::from_ref(&file));
    assert_eq!(all.by_ref().count(), 4);
    assert_eq!(all.bytes_read(), fs::metadata(&path).unwrap().len());
}

#[test]
fn other_forms_of_conversations_are_read_as_messages() {
    let folder = Folder::new();
    let read = |line: Value| {
        let path = folder.path().join("x.jsonl");
        fs::write(&path, format!("{line}\n")).unwrap();
        let files = [DataFile::new(&path).unwrap()];
        Documents::new(&files).next().unwrap().map(|document| document.content)
    };
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let (system, hi, hello) =
        (message("system", "Be kind."), message("user", "Hi"), message("assistant", "Hello"));
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let call = json!({"name": "f", "arguments": {"a": 1}});
    let said = |messages: &[&Value], given, tools: Option<&Value>| Content::Messages {
        messages: messages.iter().map(|&message| message.clone()).collect(),
        given,
        tools: tools.map(|tool| vec![tool.clone()]),
        kwargs: Map::new(),
    };
    let cases = [
        // ShareGPT.
        (
            json!({"conversations": [
                {"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Hello"}], "id": "x"}),
            said(&[&system, &hi, &hello], 0, None),
        ),
        (
            json!({"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}),
            said(&[&hi, &hello], 0, None),
        ),
        (
            json!({"conversations": [{"from": "user", "value": "Hi"}, {"from": "model", "value": "Hello"}],
                "system": "Be kind.", "tools": ""}),
            said(&[&system, &hi, &hello], 0, None),
        ),
        (json!({"conversations": [hi, hello]}), said(&[&hi, &hello], 0, None)),
        (
            json!({"messages": [hi, hello], "system": "Be kind.", "functions": [{"name": "f"}]}),
            said(&[&system, &hi, &hello], 0, Some(&tool)),
        ),
        (
            json!({"prompt": [hi], "completion": [hello], "system": "Be kind.", "label": 1}),
            said(&[&system, &hi, &hello], 2, None),
        ),
        (
            json!({"conversations": [
                {"from": "human", "value": "Hi"}, {"from": "function_call", "value": call.to_string()},
                {"from": "observation", "value": "3"}, {"from": "gpt", "value": "Hello"}],
                "tools": json!([tool]).to_string()}),
            said(
                &[
                    &hi,
                    &json!({"role": "assistant", "content": "",
                        "tool_calls": [{"type": "function", "function": call}]}),
                    &message("tool", "3"),
                    &hello,
                ],
                0,
                Some(&tool),
            ),
        ),
        // Alpaca.
        (
            json!({"instruction": "Hi", "input": "", "output": "Hello", "text": "all of it"}),
            said(&[&hi, &hello], 0, None),
        ),
        (
            json!({"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be kind.",
                "history": [["Hi", "Hello"]]}),
            said(
                &[&system, &hi, &hello, &message("user", "Add.\n1 2"), &message("assistant", "3")],
                0,
                None,
            ),
        ),
        // TRL: what the prompt's assistant says is only read.
        (
            json!({"prompt": [hi, hello, hi], "completion": [hello], "tools": [tool]}),
            said(&[&hi, &hello, &hi, &hello], 3, Some(&tool)),
        ),
    ];
    for (line, want) in cases {
        assert_eq!(read(line.clone()).unwrap(), want, "{line}");
    }
    let errors = [
        (json!({"conversations": []}), "`conversations` is empty"),
        (
            json!({"conversations": [{"from": "narrator", "value": "x"}]}),
            "message 1: `from`: expected human, gpt, system, tool, observation or function_call, found \"narrator\"",
        ),
        (json!({"conversations": [{"value": "x"}]}), "expected `from` with `value`, or `role`"),
        (
            json!({"conversations": [{"from": "gpt"}]}),
            "message 1: `value`: expected a text, found null",
        ),
        (json!({"conversations": [{"from": "function_call", "value": "f()"}]}), "not JSON"),
        (json!({"messages": [hi], "tools": "[oh"}), "`tools`: not JSON"),
        (json!({"instruction": "x"}), "found `instruction` alone"),
        (json!({"output": "x"}), "found `output` alone"),
        (json!({"instruction": "x", "output": ""}), "`output` is empty"),
        (
            json!({"instruction": "x", "output": "y", "history": [["a"]]}),
            "`history`: expected a list of pairs of texts",
        ),
        (
            json!({"prompt": [hi], "completion": "x"}),
            "`completion`: expected a list of objects, found a text",
        ),
        (json!({"prompt": [hi], "completion": []}), "`completion` is empty"),
        (json!({"prompt": "x", "completion": [hi]}), "`completion`: expected a text, found a list"),
    ];
    for (line, want) in errors {
        let error = read(line.clone()).unwrap_err().to_string();
        assert!(error.contains("x.jsonl") && error.contains("line 1"), "{error}");
        assert!(error.contains(want), "{line}: {error}");
    }
}

#[test]
fn p_tune_empty_completion_its_file_and_line_are_named() {
    let folder = Folder::new();
    let path = folder.path().join("e.jsonl");
    fs::write(
        &path,
        "{\"prompt\":\"a\",\"completion\":\"b\"}\n{\"prompt\":\"a\",\"completion\":\"\"}\n",
    )
    .unwrap();
    let files = [DataFile::new(&path).unwrap()];
    let encoder = Encoder::new(&tokenizer(), 0).unwrap();
    let tokens = folder.path().join("x.tokens");
    let error = TokenFile::prepare(&tokens, &files, &encoder, |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("e.jsonl") && error.contains("line 2"), "{error}");
    assert!(error.contains("`completion` is empty"), "{error}");
    assert!(!tokens.exists());
}

#[test]
fn of_a_prompt_of_messages_answers_are_read_and_not_learnt() {
    let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}\
                 {% if add_generation_prompt %}<assistant>{% endif %}";
    let marked = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}\
                  {% generation %}{{ m.content }};{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}";
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let messages = vec![
        message("user", "one"),
        message("assistant", "two"),
        message("user", "three"),
        message("assistant", "four"),
    ];
    let tokenizer = tokenizer();
    for template in [plain, marked] {
        let source = chat::Source::new("t", template, SpecialTokens::default());
        let encoder =
            Encoder::new(&tokenizer, 0).unwrap().with_chat(&source, Options::default()).unwrap();
        let learnt = |given| {
            let content = Content::Messages {
                messages: messages.clone(),
                given,
                tools: None,
                kwargs: Map::new(),
            };
            decoded(&tokenizer, &encoder, &content).0
        };
        assert_eq!(learnt(0), "two;four;", "{template}");
        assert_eq!(learnt(3), "four;", "{template}");
    }
}

#[test]
fn a_message_without_weight_is_not_learnt_and_a_line_has_its_own_variables() {
    let plain = "{{ mood }}{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}\
                 {% if add_generation_prompt %}<assistant>{% endif %}";
    let marked = "{{ mood }}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}\
                  {% generation %}{{ m.content }};{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}";
    let folder = Folder::new();
    let (tokenizer, path) = (tokenizer(), folder.path().join("x.jsonl"));
    let read = |line: &Value| {
        fs::write(&path, format!("{line}\n")).unwrap();
        let files = [DataFile::new(&path).unwrap()];
        Documents::new(&files).next().unwrap().map(|document| document.content)
    };
    let said = |role: &str, content: &str, weight: Value| {
        if weight.is_null() {
            return json!({"role": role, "content": content});
        }
        json!({"role": role, "content": content, "weight": weight})
    };
    let talk = |one: Value, two: Value| {
        json!([
            said("user", "a", json!(1)),
            said("assistant", "two", one),
            said("user", "b", json!(null)),
            said("assistant", "four", two)
        ])
    };
    for template in [plain, marked] {
        let source = chat::Source::new("t", template, SpecialTokens::default());
        let encoder =
            Encoder::new(&tokenizer, 0).unwrap().with_chat(&source, Options::default()).unwrap();
        let learnt = |line: Value| {
            let content = read(&line).unwrap();
            decoded(&tokenizer, &encoder, &content).0
        };
        for (one, two, expected) in [
            (json!(null), json!(null), "two;four;"),
            (json!(1), json!(1.0), "two;four;"),
            (json!(0), json!(1), "four;"),
            (json!(null), json!(0), "two;"),
        ] {
            assert_eq!(learnt(json!({"messages": talk(one.clone(), two.clone())})), expected);
            let messages = talk(one, two);
            let all = messages.as_array().unwrap();
            let (prompt, completion) = (&all[..2], &all[2..]);
            let expected = expected.strip_prefix("two;").unwrap_or(expected);
            if !expected.is_empty() {
                let line = json!({"prompt": prompt, "completion": completion});
                assert_eq!(learnt(line), expected);
            }
        }
        let content = read(&json!({"messages": talk(json!(0), json!(0))})).unwrap();
        assert!(encoder.encode(&content).unwrap_err().to_string().contains("to be learnt"));
        // Variables of a line go before those of the run, and are gone in the next.
        let line =
            json!({"messages": talk(json!(1), json!(1)), "chat_template_kwargs": {"mood": "glad"}});
        let text = |line: &Value| {
            let encoded = encoder.encode(&read(line).unwrap()).unwrap();
            tokenizer.decode(&encoded.ids, false).unwrap()
        };
        assert!(text(&line).contains("glad"), "{}", text(&line));
        assert!(!text(&json!({"messages": talk(json!(1), json!(1))})).contains("glad"));
    }
    for (line, told) in [
        (json!({"messages": talk(json!(0.5), json!(1))}), "message 2: `weight`: expected 0 or 1"),
        (json!({"messages": talk(json!(1), json!("1"))}), "message 4: `weight`: expected 0 or 1"),
        (
            json!({"messages": talk(json!(1), json!(1)), "chat_template_kwargs": "x"}),
            "`chat_template_kwargs`: expected an object, found a text",
        ),
    ] {
        let error = read(&line).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn a_list_of_objects_is_read_as_lines_of_them_are() {
    let folder = Folder::new();
    let lines = [
        json!({"text": "a, [b] {c} \"d\" \\"}),
        json!({"instruction": "i", "input": "", "output": "o]"}),
        json!({"conversations": [{"from": "human", "value": "Hi\n,"}, {"from": "gpt", "value": "Hello"}]}),
    ];
    let joined = |by: &str| lines.each_ref().map(Value::to_string).join(by);
    let want = contents(&[DataFile::new(folder.write("a.jsonl", joined("\n"))).unwrap()]);
    assert_eq!(want.len(), 3);
    let list = json!(lines);
    for (name, text) in [
        ("a.json", list.to_string()),
        ("a.json", serde_json::to_string_pretty(&list).unwrap()),
        ("a.jsonl", format!("\u{feff}\r\n [\r\n{}\r\n]\r\n\n", joined(" ,\r\n"))),
        ("a.ndjson", format!("[{}]", joined(","))),
        // Lines in a file whose name says otherwise.
        ("a.json", joined("\n")),
    ] {
        let file = DataFile::new(folder.write(name, &text)).unwrap();
        let mut documents = Documents::new(std::slice::from_ref(&file));
        let found: Vec<Content> = documents.by_ref().map(|it| it.unwrap().content).collect();
        assert_eq!(found, want, "{text}");
        assert_eq!(documents.bytes_read(), text.len() as u64, "{text}");
    }
    for empty in ["[]", " [\n]\n"] {
        let path = folder.write("a.json", empty);
        assert_eq!(contents(&[DataFile::new(path).unwrap()]), []);
    }
    for (text, line, reason) in [
        ("[\n{\"text\": \"a\"}\n{\"text\": \"b\"}]", 3, "expected `,` or `]` in a list"),
        ("[{\"text\": \"a\"},\n\n5]", 3, "expected a JSON object, found a number"),
        ("[{\"text\": \"a\"},\n{\"text\": b}]", 2, "not JSON in a list: expected value"),
        (
            "[{\"text\": \"a\"},\n{\"text\": \"b]}",
            2,
            "not JSON in a list: EOF while parsing a string",
        ),
        ("[{\"text\": \"a\"}\n,]", 2, "not JSON in a list: "),
        ("[{\"text\": \"a\"}", 1, "not JSON in a list: EOF"),
        ("[{\"text\": \"a\"}]\n{}", 2, "expected nothing after the list"),
        ("[", 1, "not JSON in a list: EOF"),
        ("[}", 1, "not JSON in a list: expected value"),
    ] {
        let file = DataFile::new(folder.write("a.json", text)).unwrap();
        let all: Vec<_> = Documents::new(std::slice::from_ref(&file)).collect();
        let error = all.last().unwrap().as_ref().unwrap_err().to_string();
        let start = format!("line {line}: {reason}");
        assert!(error.contains(&start), "{text}: {error}");
    }
    let pairs = folder.write(
        "pairs.json",
        r#"[{"text": "the river runs"}, {"prompt": "a b", "completion": " c"}]"#,
    );
    let tokenizer = tokenizer();
    assert_eq!(read_pairs(&pairs, &Encoder::new(&tokenizer, 0).unwrap()).unwrap().len(), 2);
}

#[test]
fn what_is_no_document_is_an_error_with_its_line() {
    let folder = Folder::new();
    for (line, reason) in [
        ("{\"text\": \"a}", "not JSON: EOF while parsing a string at byte 12 of the line"),
        ("[1]", "expected a JSON object, found a list"),
        ("{\"text\": 1}", "`text`: expected a text, found a number"),
        (
            "{\"txt\": \"a\"}",
            "expected `messages`, `conversations`, `prompt` with `completion`, `instruction` with `output`, \
             or `text`, found none of them",
        ),
        (
            "{\"prompt\": \"a\"}",
            "expected `messages`, `conversations`, `prompt` with `completion`, `instruction` with `output`, \
             or `text`, found `prompt` alone",
        ),
        (
            "{\"completion\": \"a\"}",
            "expected `messages`, `conversations`, `prompt` with `completion`, `instruction` with `output`, \
             or `text`, found `completion` alone",
        ),
        (
            "{\"prompt\": [], \"completion\": \"a\"}",
            "`completion`: expected a list of objects, found a text",
        ),
        ("{\"messages\": []}", "`messages` is empty"),
        (
            "{\"prompt\": \"a\", \"completion\": \"b\", \"label\": false}",
            "`label`: preferences are not learnt from",
        ),
        (
            "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}",
            "`chosen`: preferences are not learnt from",
        ),
        (
            "{\"prompt\": \"a\", \"completion\": \"b\", \"system\": \"c\"}",
            "`system`: expected none beside a `prompt` that is a text",
        ),
        ("{\"messages\": [{}], \"system\": 1}", "`system`: expected a text, found a number"),
        ("{\"messages\": \"a\"}", "`messages`: expected a list of objects, found a text"),
        (
            "{\"messages\": [{}, true]}",
            "`messages`: expected a list of objects, found true or false in it",
        ),
        (
            "{\"messages\": [{}], \"tools\": {}}",
            "`tools`: expected a list of objects, found an object",
        ),
    ] {
        let path =
            folder.write("a.jsonl", format!("\n{{\"text\": \"a\"}}\n{line}\n{{\"text\": \"b\"}}"));
        let file = DataFile::new(&path).unwrap();
        let mut documents = Documents::new(std::slice::from_ref(&file));
        assert!(documents.next().unwrap().is_ok());
        let error = documents.next().unwrap().unwrap_err().to_string();
        assert_eq!(error, format!("`{}`: line 3: {reason}", path.display()));
        assert!(documents.next().is_none());
    }
    let bytes = [b"{\"text\": \"".as_slice(), b"\xff\"}"].concat();
    let path = folder.write("a.jsonl", bytes);
    let error = Documents::new(&[DataFile::new(&path).unwrap()]).next().unwrap().unwrap_err();
    assert!(error.to_string().contains("line 1: not JSON: invalid unicode code point"), "{error}");

    for head in ["ab\nc", &"word ".repeat(PIECE)] {
        let path = folder.write("a.txt", [head.as_bytes(), b"d\xc3(\n"].concat());
        let error = Documents::new(&[text_file(&path, None)]).find_map(Result::err).unwrap();
        let line = head.matches('\n').count() + 1;
        let byte = head.len() - head.rfind('\n').map_or(0, |at| at + 1) + 2;
        let reason = format!("line {line}: not UTF-8 text: byte {byte} of the line is wrong");
        if line > 1 {
            assert!(error.to_string().ends_with(&reason), "{error}");
        } else {
            // The line began in a piece before.
            assert!(error.to_string().contains("line 1: not UTF-8 text: byte "), "{error}");
        }
    }
    assert!(matches!(DataFile::new("a.csv"), Err(boostr::Error::Unsupported { .. })));
    let error = Documents::new(&[text_file(folder.path(), None)]).next().unwrap().unwrap_err();
    assert!(matches!(error, boostr::Error::Io { .. }));
}

// Ids, and which of them count

#[test]
fn a_text_in_pieces_has_the_tokens_of_the_whole() {
    let tokenizer = tokenizer();
    let encoder = Encoder::new(&tokenizer, 0).unwrap();
    let folder = Folder::new();
    let text = prose(5, 120_000);
    assert!(text.len() > 2 * PIECE);
    let whole = tokenizer.encode(&text, true).unwrap();

    let path = folder.write("a.txt", &text);
    let tokens =
        TokenFile::prepare(&folder.path().join("t"), &[text_file(path, None)], &encoder, |_, _| {});
    let tokens = tokens.unwrap();
    assert_eq!(tokens.documents(), 1);
    assert!(tokens.document(0) == [&whole[..], &[0]].concat(), "other tokens");
    assert_eq!(tokens.bytes(), text.len() as u64);
    assert_eq!(tokens.counted(), whole.len() + 1);

    let content = Content::Text { text, is_first: true, is_last: true };
    assert!(encoder.encode(&content).unwrap().ids == whole, "other tokens in one");
}

/// The text of the ids that count, and of all.
fn decoded(tokenizer: &Tokenizer, encoder: &Encoder, content: &Content) -> (String, String) {
    let encoded = encoder.encode(content).unwrap();
    assert_eq!(encoded.ids.len(), encoded.counts.len());
    let counted = encoded.ids.iter().zip(&encoded.counts).filter(|&(_, &counts)| counts);
    let counted: Vec<u32> = counted.map(|(&id, _)| id).collect();
    let text = |ids: &[u32]| tokenizer.decode(ids, false).unwrap();
    (text(&counted), text(&encoded.ids))
}

#[test]
fn of_a_completion_only_what_follows_the_prompt_counts() {
    let tokenizer = tokenizer();
    let encoder = Encoder::new(&tokenizer, 0).unwrap();
    for (prompt, completion, counted) in [
        ("the river", " runs to the sea", " runs to the sea"),
        ("the river\n", "runs", "runs"),
        ("", "runs", "runs"),
        // A token across the border is the completion's.
        ("the ri", "ver", " river"),
    ] {
        let content = Content::Completion { prompt: prompt.into(), completion: completion.into() };
        let all = format!("{prompt}{completion}");
        assert_eq!(decoded(&tokenizer, &encoder, &content), (counted.to_owned(), all.clone()));
        assert_eq!(encoder.encode(&content).unwrap().ids, tokenizer.encode(&all, true).unwrap());
        assert_eq!(encoder.encode(&content).unwrap().bytes, all.len());
    }
    let empty = Content::Completion { prompt: "the sea".into(), completion: String::new() };
    let error = encoder.encode(&empty).unwrap_err().to_string();
    assert!(error.contains("no token of its own, so nothing to learn"), "{error}");
    // The start is read, and does not count.
    let encoder = encoder.with_start(vec![320, 321]).unwrap();
    let content = Content::Completion { prompt: "a".into(), completion: " the".into() };
    let encoded = encoder.encode(&content).unwrap();
    assert_eq!(encoded.ids[..2], [320, 321]);
    assert_eq!(encoded.counts, [false, false, false, true]);
    let content = Content::Text { text: " the".into(), is_first: true, is_last: true };
    assert_eq!(encoder.encode(&content).unwrap().counts, [false, false, true]);
    let content = Content::Text { text: " the".into(), is_first: false, is_last: true };
    assert_eq!(encoder.encode(&content).unwrap().counts, [true]);

    assert!(Encoder::new(&tokenizer, 322).unwrap_err().to_string().contains("found 322"));
    assert!(encoder.with_start(vec![0, 322]).unwrap_err().to_string().contains("found 322"));
}

#[test]
fn the_start_of_a_text_is_what_the_tokenizer_puts_before_it() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-tokenizer.json");
    let mut json: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let token = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let text = json["post_processor"]["single"][0].take();
    json["post_processor"]["single"] = json!([token("<s>"), text, token("</s>")]);
    json["post_processor"]["special_tokens"] = json!({
        "<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
        "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}
    });
    let tokenizer = Tokenizer::from_bytes("t", json.to_string().as_bytes()).unwrap();
    let encoder = Encoder::new(&tokenizer, 2).unwrap();
    let content = Content::Text { text: "a b".into(), is_first: true, is_last: true };
    let encoded = encoder.encode(&content).unwrap();
    let framed = tokenizer.encode("a b", true).unwrap();
    assert_eq!((framed[0], framed.last()), (1, Some(&2)));
    assert_eq!([&encoded.ids[..], &[2]].concat(), framed);
    assert_eq!(encoded.counts.iter().position(|&counts| counts), Some(1));
}

fn conversation() -> Vec<Value> {
    vec![
        json!({"role": "system", "content": "the sea"}),
        json!({"role": "user", "content": "a river"}),
        json!({"role": "assistant", "content": "runs to the sea"}),
        json!({"role": "user", "content": "it stops<|im_end|>"}),
        json!({"role": "assistant", "content": "never"}),
    ]
}

#[test]
fn of_a_conversation_only_the_answers_count() {
    let tokenizer = tokenizer();
    let start = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}";
    let end =
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
    let plain = format!("{start}{{{{ m.content + '<|im_end|>\\n' }}}}{end}");
    let marked = format!(
        "{start}{{% if m.role == 'assistant' %}}{{% generation %}}{{{{ m.content }}}}<|im_end|>{{%- endgeneration %}}\
         {{% else %}}{{{{ m.content }}}}<|im_end|>{{% endif %}}{{{{ '\\n' }}}}{end}"
    );
    let all = "<|im_start|>system\nthe sea<|im_end|>\n<|im_start|>user\na river<|im_end|>\n\
               <|im_start|>assistant\nruns to the sea<|im_end|>\n<|im_start|>user\nit stops<|im_end|><|im_end|>\n\
               <|im_start|>assistant\nnever<|im_end|>\n";
    for (template, counted) in [
        (&plain, "runs to the sea<|im_end|>\nnever<|im_end|>\n"),
        (&marked, "runs to the sea<|im_end|>never<|im_end|>"),
    ] {
        let source = chat::Source::new("t.jinja", template.as_str(), SpecialTokens::default());
        let encoder = Encoder::new(&tokenizer, 321).unwrap();
        let encoder = encoder.with_chat(&source, Options::default()).unwrap();
        let content = Content::Messages {
            messages: conversation(),
            given: 0,
            tools: None,
            kwargs: Map::new(),
        };
        let (answers, text) = decoded(&tokenizer, &encoder, &content);
        assert_eq!(answers, counted, "{template}");
        assert_eq!(text, all, "{template}");

        // The ids are those that running the model gives it, and the user ends no turn.
        let encoded = encoder.encode(&content).unwrap();
        let template = source.compile().unwrap();
        let ids = template.encode(&tokenizer, &conversation(), &Options::default()).unwrap();
        assert_eq!(encoded.ids, ids);
        assert_eq!(ids.iter().filter(|&&id| id == 321).count(), 5);
        assert_eq!(encoded.bytes, all.len());
        // What asks for an answer is as it was asked.
        let asked = Options { add_generation_prompt: true, ..Options::default() };
        let asked = template.encode(&tokenizer, &conversation()[..2], &asked).unwrap();
        assert_eq!(encoded.counts.iter().position(|&counts| counts), Some(asked.len()));
        assert_eq!(encoded.ids[..asked.len()], asked);
    }
}

#[test]
fn answers_of_published_templates_are_found_or_refused() {
    let tokenizer = tokenizer();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/templates");
    let messages = [
        json!({"role": "user", "content": "question one"}),
        json!({"role": "assistant", "content": "answer ONE"}),
        json!({"role": "user", "content": "question two"}),
        json!({"role": "assistant", "content": "answer TWO"}),
    ];
    let (mut found, mut refused) = (0, BTreeSet::new());
    let mut paths: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|e| e == "jinja")) {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let golden: Value =
            serde_json::from_slice(&fs::read(path.with_extension("json")).unwrap()).unwrap();
        let special = SpecialTokens::from_json(path, &golden["special"].to_string()).unwrap();
        let template =
            ChatTemplate::new(path, &fs::read_to_string(path).unwrap(), &special).unwrap();
        let now = Some(std::time::UNIX_EPOCH);
        let options = Options { now, ..Options::default() };
        match template.encode_answers(&tokenizer, &messages, &options) {
            Ok(answers) => {
                let counted = answers.ids.iter().zip(&answers.is_answer).filter(|&(_, &is)| is);
                let counted: Vec<u32> = counted.map(|(&id, _)| id).collect();
                let text = tokenizer.decode(&counted, false).unwrap();
                assert!(
                    text.contains("answer ONE") && text.contains("answer TWO"),
                    "{name}: {text:?}"
                );
                assert!(!text.contains("question"), "{name}: {text:?}");
                assert_eq!(answers.ids, template.encode(&tokenizer, &messages, &options).unwrap());
                found += 1;
            }
            Err(error) => {
                assert!(error.to_string().contains("{% generation %}"), "{name}: {error}");
                // Whether a single answer is found.
                let last = template.encode_answers(&tokenizer, &messages[..2], &options);
                refused.insert((name, last.is_ok()));
            }
        }
    }
    // The first four leave out what the assistant thought before its last answer; the last one ends each
    // conversation with a token that is not there once it goes on.
    let known = [
        ("NVIDIA-Nemotron-Nano-v2", true),
        ("Qwen-Qwen3-0.6B", true),
        ("Qwen-Qwen3.5-4B", true),
        ("openai-gpt-oss-120b", true),
        ("microsoft-Phi-3.5-mini-instruct", false),
    ];
    assert_eq!(refused, known.map(|(name, last)| (name.to_owned(), last)).into());
    assert!(found >= 15, "{found}");
}

#[test]
fn a_conversation_that_teaches_nothing_is_an_error_with_its_line() {
    let tokenizer = tokenizer();
    let folder = Folder::new();
    let path = folder.write(
        "a.jsonl",
        "{\"text\": \"a\"}\n{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n",
    );
    let files = [DataFile::new(&path).unwrap()];
    let out = folder.path().join("tokens");
    let encoder = Encoder::new(&tokenizer, 0).unwrap();
    let error = TokenFile::prepare(&out, &files, &encoder, |_, _| {}).unwrap_err().to_string();
    let at = format!("`{}`: line 2: argument `messages`: ", path.display());
    assert_eq!(error, format!("{at}conversations need a chat template, and the model has none"));
    let source = chat::Source::new(
        "t",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        SpecialTokens::default(),
    );
    let encoder = encoder.with_chat(&source, Options::default()).unwrap();
    let error = TokenFile::prepare(&out, &files, &encoder, |_, _| {}).unwrap_err().to_string();
    assert_eq!(error, format!("{at}no message of the assistant that is to be learnt"));
    assert_eq!(folder.names(), ["a.jsonl"]);
}

// Files of tokens

/// Three documents in two files.
fn sample(folder: &Folder) -> Vec<DataFile> {
    let a = folder.write("a.txt", "the river\n--\nruns to the sea");
    let b = folder.write("b.jsonl", "{\"prompt\": \"the\", \"completion\": \" sea\"}\n");
    vec![text_file(a, Some("--")), DataFile::new(b).unwrap()]
}

#[test]
fn a_file_of_tokens_is_as_documented() {
    let (folder, tokenizer) = (Folder::new(), tokenizer());
    let encoder = Encoder::new(&tokenizer, 0).unwrap();
    let files = sample(&folder);
    let path = folder.path().join("tokens");
    let reports = RefCell::new(Vec::new());
    let tokens = TokenFile::prepare(&path, &files, &encoder, |done, total| {
        reports.borrow_mut().push((done, total));
    });
    let tokens = tokens.unwrap();
    let total: u64 = files.iter().map(|file| fs::metadata(&file.path).unwrap().len()).sum();
    assert_eq!(reports.borrow().last(), Some(&(total, total)));

    let texts = ["the river\n", "runs to the sea", "the sea"];
    let documents: Vec<Vec<u32>> = texts
        .iter()
        .map(|text| [tokenizer.encode(text, true).unwrap(), vec![0]].concat())
        .collect();
    assert_eq!(tokens.documents(), 3);
    for (i, ids) in documents.iter().enumerate() {
        assert_eq!(tokens.document(i), *ids);
    }
    let count: usize = documents.iter().map(Vec::len).sum();
    let (last, given) = (count - documents[2].len(), tokenizer.encode("the", true).unwrap().len());
    assert_eq!(
        (tokens.tokens(), tokens.inputs(), tokens.counted()),
        (count, count - 3, count - given)
    );
    assert_eq!((tokens.end(), tokens.vocab_size()), (0, 322));
    assert_eq!(tokens.bytes(), texts.concat().len() as u64);
    assert_eq!(tokens.path(), path);

    let bytes = fs::read(&path).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!(&bytes[..8], b"boostrTK");
    assert_eq!([8, 12, 16, 20].map(u32_at), [1, 0, 322, 0]);
    assert_eq!(bytes.len(), 40 + 4 * count + 24);
    let trailer = [0, 8, 16].map(|at| u64_at(40 + 4 * count + at));
    assert_eq!(trailer, [3, count as u64, tokens.bytes()]);
    let mut words = documents.concat();
    for (i, word) in words.iter_mut().enumerate() {
        // The prompt of the completion does not count.
        *word |= if (last..last + given).contains(&i) { 0 } else { 1 << 31 };
        *word |= if word.is_multiple_of(1 << 24) { 1 << 30 } else { 0 };
    }
    assert_eq!((0..count).map(|i| u32_at(40 + 4 * i)).collect::<Vec<_>>(), words);
}

#[test]
fn a_file_of_tokens_is_made_once_and_again_when_something_changed() {
    let (folder, tokenizer) = (Folder::new(), tokenizer());
    let encoder = Encoder::new(&tokenizer, 0).unwrap();
    let files = sample(&folder);
    let path = folder.path().join("tokens");
    let prepare = |files: &[DataFile], encoder: &Encoder| {
        let mut is_new = false;
        TokenFile::prepare(&path, files, encoder, |_, _| is_new = true).map(|_| is_new)
    };
    assert!(prepare(&files, &encoder).unwrap());
    let bytes = fs::read(&path).unwrap();
    assert!(!prepare(&files, &encoder).unwrap());

    // The same bytes at another place and time.
    let other = folder.path().join("other");
    TokenFile::prepare(&other, &files, &encoder, |_, _| {}).unwrap();
    assert!(fs::read(&other).unwrap() == bytes);

    // Order, kind, number of the files.
    let turned: Vec<DataFile> = files.iter().rev().cloned().collect();
    let whole = [text_file(&files[0].path, None), files[1].clone()];
    for files in [&turned[..], &whole, &files[..1], &files] {
        assert!(prepare(files, &encoder).unwrap());
        assert!(!prepare(files, &encoder).unwrap());
    }
    assert!(fs::read(&path).unwrap() == bytes);
    // Tokenizer, end, start, template.
    let template = |text: &str| chat::Source::new("t", text, SpecialTokens::default());
    let new = |end| Encoder::new(&tokenizer, end).unwrap();
    for encoder in [
        new(321),
        new(0).with_start(vec![320]).unwrap(),
        new(0).with_chat(&template("a"), Options::default()).unwrap(),
        new(0).with_chat(&template("b"), Options::default()).unwrap(),
        Encoder::new(&Tokenizer::from_bytes("t", BYTES.as_bytes()).unwrap(), 0).unwrap(),
    ] {
        assert!(prepare(&files, &encoder).unwrap());
        assert!(!prepare(&files, &encoder).unwrap());
    }
    // Size, and time of modification.
    assert!(prepare(&files, &encoder).unwrap());
    fs::write(&files[0].path, "the river stops").unwrap();
    assert!(prepare(&files, &encoder).unwrap());
    let file = fs::File::options().write(true).open(&files[0].path).unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    assert!(prepare(&files, &encoder).unwrap());
    assert!(!prepare(&files, &encoder).unwrap());
    // Long ago and far ahead, as after a clock that was set.
    let years = std::time::Duration::from_hours(100 * 365 * 24);
    for time in [std::time::UNIX_EPOCH - years / 2, std::time::SystemTime::now() + years] {
        file.set_modified(time).unwrap();
        assert!(prepare(&files, &encoder).unwrap());
        assert!(!prepare(&files, &encoder).unwrap());
    }

    // A damaged one is made again; what is none is left alone, and so is a good one when the data are bad.
    let good = fs::read(&path).unwrap();
    for damaged in [&good[..good.len() - 1], &good[..5], &[]] {
        fs::write(&path, damaged).unwrap();
        assert!(prepare(&files, &encoder).unwrap());
        assert!(fs::read(&path).unwrap() == good);
    }
    fs::write(&files[1].path, "{\"text\": 1}").unwrap();
    assert!(prepare(&files, &encoder).is_err());
    assert!(fs::read(&path).unwrap() == good);
    fs::write(&path, "my diary").unwrap();
    let error = prepare(&files, &encoder).unwrap_err().to_string();
    assert!(error.contains("no file of tokens, so it is not replaced"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"my diary");
    assert!(prepare(&[], &encoder).is_err());
    assert_eq!(folder.names(), ["a.txt", "b.jsonl", "other", "tokens"]);
}

/// A tokenizer of two tokens and a few letters.
const BYTES: &str = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
    "post_processor": null, "decoder": null, "truncation": null, "padding": null,
    "model": {"type": "BPE", "vocab": {"<e>": 0, "t": 1, "h": 2, "e": 3, " ": 4}, "merges": []}}"#;

#[test]
fn a_document_that_ends_with_the_end_gets_no_second_one() {
    let tokens = TokenFile::of_documents(&[vec![3, 0, 4], vec![5, 0], vec![0, 1]], 0, 8).unwrap();
    let documents: Vec<Vec<u32>> = (0..3).map(|i| tokens.document(i)).collect();
    assert_eq!(documents, [vec![3, 0, 4, 0], vec![5, 0], vec![0, 1, 0]]);
    let error = |documents: &[Vec<u32>], vocab| {
        TokenFile::of_documents(documents, 0, vocab).unwrap_err().to_string()
    };
    assert!(error(&[vec![1], vec![0]], 8).contains("document 1 has no token but its end"));
    assert!(error(&[vec![1], vec![]], 8).contains("document 1 has no token but its end"));
    assert!(error(&[vec![1, 8]], 8).contains("expected ids below 8, found 8"));
    assert!(error(&[], 8).contains("expected whole documents, there is none"));
    assert!(error(&[], 0).contains("vocabulary is 0"));
}

/// The bytes of a file of tokens.
fn token_bytes(words: &[u32], counts: [u64; 3]) -> Vec<u8> {
    let mut bytes = b"boostrTK".to_vec();
    bytes.extend([1_u32, 0, 8, 0].map(u32::to_le_bytes).concat());
    bytes.extend([7_u64, 9].map(u64::to_le_bytes).concat());
    for word in words {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(counts.map(u64::to_le_bytes).concat());
    bytes
}

const GOOD: [u32; 5] = [5, 6 | 1 << 31, 3 << 30, 7, 1 << 30];

#[test]
fn every_field_of_a_file_of_tokens_is_checked() {
    let good = token_bytes(&GOOD, [2, 5, 30]);
    let tokens = TokenFile::from_bytes("x", good.clone()).unwrap();
    assert_eq!((tokens.documents(), tokens.counted(), tokens.bytes()), (2, 2, 30));
    let changed = |at: usize, value: u32| {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    for (bytes, reason) in [
        (good[..63].to_vec(), "file has 63 bytes, a file of tokens has at least 64"),
        (changed(4, 0), "no file of tokens"),
        (changed(8, 2), "version is 2, expected 1"),
        (changed(12, 8), "end-of-text token is 8, the vocabulary has 8"),
        (changed(16, 0), "vocabulary is 0, expected 1 to 2^24"),
        (changed(16, 1 << 25), "vocabulary is 33554432, expected 1 to 2^24"),
        (changed(20, 1), "bytes 20 to 23 are 1, expected 0"),
        (changed(40, 8), "token 0 has id 8, the vocabulary has 8"),
        (changed(40, 1 << 24), "token 0 is 0x01000000: bits 24 to 29 should be 0"),
        (changed(44, 1 << 30 | 6), "token 1 ends a document, but is 6, not 0"),
        (changed(40, 1 << 30), "document 0 has no token but its end"),
        (changed(52, 1 << 30), "document 1 has no token but its end"),
        (changed(56, 0), "expected whole documents, the last one does not end"),
        (changed(60, 3), "number of documents is 3, but 2 end"),
        (changed(68, 6), "number of tokens is 6, but there are 20 bytes of them, 4 each"),
        (changed(72, 1 << 30), "number of tokens is 4611686018427387909"),
        (token_bytes(&[], [0; 3]), "expected whole documents, there is none"),
        ([&good[..], &[0]].concat(), "but there are 21 bytes of them"),
    ] {
        let error = TokenFile::from_bytes("x", bytes).unwrap_err().to_string();
        assert!(error.starts_with("`x`: ") && error.contains(reason), "{error}, expected {reason}");
    }
}

#[test]
fn no_damaged_file_of_tokens_does_harm() {
    let good = token_bytes(&GOOD, [2, 5, 30]);
    let mut random = Random(0x005e_ed0f_dada);
    let mut accepted = 0;
    for _ in 0..20_000 {
        let mut bytes = good.clone();
        random.mutate(&mut bytes, &good);
        let Ok(tokens) = TokenFile::from_bytes("x", bytes) else { continue };
        accepted += 1;
        let all: Vec<u32> = (0..tokens.documents()).flat_map(|i| tokens.document(i)).collect();
        assert_eq!(all.len(), tokens.tokens());
        assert!(all.iter().all(|&id| id < tokens.vocab_size()));
        for packing in [CUT, Packing::Carried] {
            let batch = Batches::new(&tokens, packing, 1, 7, random.next()).unwrap().next();
            assert_eq!(batch.tokens(), 7);
        }
    }
    assert!(accepted > 500, "{accepted} accepted: mutations too rough");
}

// Batches

/// Rows that are cut from one stream.
const CUT: Packing = Packing::Documents(Truncate::Anywhere);

/// Documents of these lengths, no id twice but the end.
fn distinct(lens: &[usize]) -> TokenFile {
    let mut next = 0;
    let documents: Vec<Vec<u32>> = lens
        .iter()
        .map(|&len| {
            next += len as u32;
            (next - len as u32 + 1..=next).collect()
        })
        .collect();
    TokenFile::of_documents(&documents, 0, next + 1).unwrap()
}

/// The document that each id of `distinct` is in, its place in it, and the id that follows.
fn places(file: &TokenFile) -> Vec<(usize, usize, u32)> {
    let mut places = vec![(usize::MAX, 0, 0)];
    for document in 0..file.documents() {
        let ids = file.document(document);
        places.extend(ids.windows(2).enumerate().map(|(i, pair)| (document, i, pair[1])));
    }
    places
}

/// What holds for every piece: a run of one document's ids, each with the one after it.
fn check_piece(piece: &Piece, places: &[(usize, usize, u32)]) {
    assert!(!piece.tokens.is_empty() && piece.tokens.len() == piece.targets.len());
    let first = places[piece.tokens[0] as usize].1;
    for (i, (&id, &target)) in piece.tokens.iter().zip(&piece.targets).enumerate() {
        assert_eq!(places[id as usize], (piece.document, first + i, target));
    }
}

/// `[document, first place in it, tokens, slot]` of each piece, and whether it is a start.
fn shown(batches: &[Batch], file: &TokenFile) -> Vec<([usize; 4], bool)> {
    let places = places(file);
    let show = |piece: &Piece| {
        check_piece(piece, &places);
        let first = places[piece.tokens[0] as usize].1;
        ([piece.document, first, piece.tokens.len(), piece.slot], piece.is_start)
    };
    batches.iter().flat_map(|batch| &batch.pieces).map(show).collect()
}

#[test]
fn documents_are_packed_in_rows_and_what_is_cut_starts_afresh() {
    let file = distinct(&[5, 3, 8, 1, 15]);
    let batches: Vec<Batch> = Pass::new(&file, CUT, 2, 8).unwrap().collect();
    assert_eq!(batches.iter().map(Batch::tokens).collect::<Vec<_>>(), [16, 16]);
    let want = [[0, 0, 5, 0], [1, 0, 3, 0], [2, 0, 8, 1], [3, 0, 1, 0], [4, 0, 7, 0], [4, 7, 8, 1]];
    assert_eq!(shown(&batches, &file), want.map(|piece| (piece, true)));

    // The rest of a cut document has the row before as no context; a last row may be short.
    let batches: Vec<Batch> = Pass::new(&file, CUT, 1, 10).unwrap().collect();
    let want = [
        [0, 0, 5, 0],
        [1, 0, 3, 0],
        [2, 0, 2, 0],
        [2, 2, 6, 0],
        [3, 0, 1, 0],
        [4, 0, 3, 0],
        [4, 3, 10, 0],
        [4, 13, 2, 0],
    ];
    assert_eq!(shown(&batches, &file), want.map(|piece| (piece, true)));
}

#[test]
fn documents_that_fit_stand_whole_in_the_fullest_row_that_has_room() {
    let file = distinct(&[5, 3, 8, 1, 15, 2]);
    let packing = |truncate| Packing::Documents(truncate);
    let rows = |truncate| {
        let batches: Vec<Batch> = Pass::new(&file, packing(truncate), 1, 8).unwrap().collect();
        shown(&batches, &file).into_iter().map(|(piece, _)| piece).collect::<Vec<_>>()
    };
    let rest = [[0, 0, 5, 0], [1, 0, 3, 0]];
    let short = [[5, 0, 2, 0], [3, 0, 1, 0]];
    let split = [&[[2, 0, 8, 0], [4, 0, 8, 0], [4, 8, 7, 0]][..], &short[1..], &rest, &short[..1]];
    assert_eq!(rows(Truncate::Split), split.concat());
    let start = [&[[2, 0, 8, 0], [4, 0, 8, 0]][..], &rest, &short];
    assert_eq!(rows(Truncate::KeepStart), start.concat());
    let end = [&[[2, 0, 8, 0], [4, 7, 8, 0]][..], &rest, &short];
    assert_eq!(rows(Truncate::KeepEnd), end.concat());
    assert_eq!(rows(Truncate::Drop), [&[[2, 0, 8, 0]][..], &rest, &short].concat());

    let error = |truncate, len| {
        Batches::new(&file, packing(truncate), 1, len, 0).err().map(|error| error.to_string())
    };
    let refused = error(Truncate::Refuse, 8).unwrap();
    assert!(refused.contains("document 5 of 6 has 15 tokens, a row has 8"), "{refused}");
    assert_eq!(error(Truncate::Refuse, 15), None);
    assert_eq!((file.longer_than(8), file.longer_than(15)), (1, 0));
    let short = distinct(&[5, 3]);
    let none = Batches::new(&short, packing(Truncate::Drop), 1, 2, 0).err().unwrap().to_string();
    assert!(none.contains("all 2 documents are longer than a row of 2 tokens"), "{none}");
}

#[test]
fn streams_carry_their_state_until_a_document_or_a_share_starts() {
    let file = distinct(&[5, 3, 8, 1, 15]);
    let batches: Vec<Batch> = Pass::new(&file, Packing::Carried, 2, 6).unwrap().collect();
    // 32 inputs, so that the second stream starts at input 16, where document 3 does.
    let want = [
        ([0, 0, 5, 0], true),
        ([1, 0, 1, 0], true),
        ([3, 0, 1, 1], true),
        ([4, 0, 5, 1], true),
        ([1, 1, 2, 0], false),
        ([2, 0, 4, 0], true),
        ([4, 5, 6, 1], false),
        ([2, 4, 4, 0], false),
        ([4, 11, 4, 1], false),
    ];
    assert_eq!(shown(&batches, &file), want);

    // Three streams: the second starts within document 2, the third within document 4.
    let batches: Vec<Batch> = Pass::new(&file, Packing::Carried, 3, 11).unwrap().collect();
    let want = [
        ([0, 0, 5, 0], true),
        ([1, 0, 3, 0], true),
        ([2, 0, 2, 0], true),
        ([2, 2, 6, 1], true),
        ([3, 0, 1, 1], true),
        ([4, 0, 4, 1], true),
        ([4, 4, 11, 2], true),
    ];
    assert_eq!(shown(&batches, &file), want);
}

#[test]
fn only_what_counts_is_a_target() {
    let file = TokenFile::from_bytes("x", token_bytes(&GOOD, [2, 5, 0])).unwrap();
    let batch = Pass::new(&file, CUT, 1, 8).unwrap().next().unwrap();
    let pieces: Vec<(&[u32], &[u32])> =
        batch.pieces.iter().map(|piece| (&piece.tokens[..], &piece.targets[..])).collect();
    assert_eq!(pieces, [(&[5, 6][..], &[6, 0][..]), (&[7], &[IGNORE])]);
    assert_eq!((batch.tokens(), batch.counted()), (3, 2));
}

#[test]
fn the_order_is_the_seeds_and_the_epochs() {
    let file = distinct(&[1; 40]);
    let epochs = |seed, packing, rows| {
        let mut batches = Batches::new(&file, packing, rows, 40 / rows, seed).unwrap();
        (0..4)
            .map(|_| batches.next().pieces.iter().map(|p| p.document).collect())
            .collect::<Vec<Vec<_>>>()
    };
    let all = epochs(1, CUT, 1);
    let distinct: BTreeSet<&Vec<usize>> = all.iter().collect();
    assert_eq!(distinct.len(), 4);
    for epoch in &all {
        assert_eq!(epoch.iter().copied().collect::<BTreeSet<_>>(), (0..40).collect());
        assert_ne!(*epoch, (0..40).collect::<Vec<_>>());
    }
    assert_eq!(epochs(1, CUT, 1), all);
    // However streams are cut, and rows but for their own order.
    assert_eq!(epochs(1, Packing::Carried, 5), all);
    for (rows, all) in epochs(1, CUT, 4).iter().zip(&all) {
        let sorted = |epoch: &[usize]| epoch.chunks(10).map(<[_]>::to_vec).collect::<BTreeSet<_>>();
        assert_eq!(sorted(rows), sorted(all));
    }
    assert!(epochs(2, CUT, 1).iter().all(|epoch| !all.contains(epoch)));

    // The file of one version is to give the same batches in the next.
    assert_eq!(all[0][..6], [30, 25, 33, 26, 38, 17]);
    assert_eq!(epochs(1, CUT, 4)[0][..6], [1, 4, 9, 28, 36, 12]);
}

#[test]
fn the_parts_of_a_long_document_are_shuffled_and_each_is_read_once() {
    let file = distinct(&[998]);
    let mut batches = Batches::new(&file, CUT, 4, 10, 3).unwrap();
    // 499 batches of 40 are 20 epochs of 998, whose rows are cut elsewhere each time.
    let pieces: Vec<Piece> = (0..499).flat_map(|_| batches.next().pieces).collect();
    let mut counts = BTreeMap::new();
    for token in pieces.iter().flat_map(|piece| &piece.tokens) {
        *counts.entry(*token).or_insert(0) += 1;
    }
    assert_eq!(counts.len(), 998);
    assert!(counts.values().all(|&count| count == 20), "{counts:?}");
    let is_next = |pair: &&[Piece]| pair[0].targets.last() == pair[1].tokens.first();
    let neighbours = pieces.windows(2).filter(is_next).count();
    assert!(neighbours < pieces.len() / 20, "{neighbours} of {}", pieces.len());
}

#[test]
fn every_place_in_an_order_is_equally_likely() {
    let file = distinct(&[1; 8]);
    let mut batches = Batches::new(&file, CUT, 1, 8, 7).unwrap();
    let mut counts = [[0_i32; 8]; 8];
    for _ in 0..8000 {
        for (place, piece) in batches.next().pieces.iter().enumerate() {
            counts[place][piece.document] += 1;
        }
    }
    // 1000 each, standard deviation 30: five of them.
    assert!(counts.iter().flatten().all(|count| (count - 1000).abs() < 150), "{counts:?}");
}

#[test]
fn what_makes_no_batches_is_refused() {
    let file = distinct(&[5, 3]);
    let error =
        |packing, rows, len| Batches::new(&file, packing, rows, len, 0).err().unwrap().to_string();
    assert_eq!(error(CUT, 0, 4), "argument `batch_size`: expected at least 1, found 0");
    assert_eq!(error(CUT, 4, 0), "argument `seq_len`: expected at least 1, found 0");
    assert!(error(CUT, 1 << 40, 1 << 40).contains("more than 2^32 - 1"));
    assert!(error(Packing::Carried, 9, 4).contains("9 streams, but the data has 8 tokens"));
    assert!(Batches::new(&file, CUT, 9, 4, 0).is_ok());

    let mut batches = Batches::new(&file, Packing::Carried, 2, 4, 0).unwrap();
    let cursor = batches.cursor();
    let refused =
        |batches: &mut Batches<&TokenFile>, cursor| batches.seek(cursor).unwrap_err().to_string();
    let other = refused(&mut batches, Cursor { inputs: 9, ..cursor });
    assert!(other.contains("data of 2 documents with 9 tokens, `memory` has 2 with 8"), "{other}");
    let checksum = cursor.checksum.map(|checksum| checksum ^ 1);
    assert!(refused(&mut batches, Cursor { checksum, ..cursor }).contains("another checksum"));
    // Runs of earlier versions kept none.
    batches.seek(Cursor { checksum: None, ..cursor }).unwrap();
    assert!(refused(&mut batches, Cursor { documents: 3, ..cursor }).contains("3 documents"));
    assert!(
        refused(&mut batches, Cursor { read: 12, ..cursor }).contains("12 tokens are no whole")
    );
    assert_eq!(batches.cursor(), cursor);
}

/// Lengths of documents, rows and tokens of a row.
fn shapes() -> impl Strategy<Value = (Vec<usize>, usize, usize, u64)> {
    (prop::collection::vec(1_usize..20, 1..12), 1_usize..5, 1_usize..24, any::<u64>())
        .prop_filter("as many tokens as streams", |(lens, rows, ..)| {
            lens.iter().sum::<usize>() >= *rows
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_token_is_a_target_once_an_epoch((lens, rows, len, seed) in shapes()) {
        let file = distinct(&lens);
        let (places, inputs) = (places(&file), file.inputs());
        for packing in [CUT, Packing::Carried] {
            let mut batches = Batches::new(&file, packing, rows, len, seed).unwrap();
            let count = 3 * inputs.div_ceil(rows * len);
            let all: Vec<Batch> = (0..=count).map(|_| batches.next()).collect();
            // What each stream reads: one of all rows, or one of each.
            let mut streams: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
            for batch in &all {
                prop_assert_eq!(batch.tokens(), rows * len);
                for slot in 0..rows {
                    let row = batch.pieces.iter().filter(|piece| piece.slot == slot);
                    prop_assert_eq!(row.map(|piece| piece.tokens.len()).sum::<usize>(), len);
                }
                for piece in &batch.pieces {
                    check_piece(piece, &places);
                    let stream = if packing == CUT { 0 } else { piece.slot };
                    streams.entry(stream).or_default().extend(&piece.tokens);
                }
            }
            // In each of the epochs that are whole, every input, and so every target, once.
            let starts: Vec<usize> =
                (0..=streams.len()).map(|i| inputs * i / streams.len()).collect();
            let shares: Vec<usize> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let whole = streams.values().zip(&shares).map(|(ids, share)| ids.len() / share);
            let whole = whole.min().unwrap();
            prop_assert!(whole >= 2);
            for epoch in 0..whole {
                let mut seen: Vec<u32> = streams
                    .values()
                    .zip(&shares)
                    .flat_map(|(ids, &share)| ids[epoch * share..(epoch + 1) * share].to_vec())
                    .collect();
                seen.sort_unstable();
                prop_assert_eq!(seen, (1..=inputs as u32).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_state_is_fresh_exactly_where_nothing_is_to_be_carried((lens, rows, len, seed) in shapes()) {
        let file = distinct(&lens);
        let (places, inputs) = (places(&file), file.inputs());
        let mut batches = Batches::new(&file, CUT, rows, len, seed).unwrap();
        for _ in 0..4 {
            prop_assert!(batches.next().pieces.iter().all(|piece| piece.is_start));
        }
        let mut batches = Batches::new(&file, Packing::Carried, rows, len, seed).unwrap();
        // Of each stream, the place that its last piece stopped at, and how much it read.
        let mut stopped = vec![(usize::MAX, 0); rows];
        let mut read = vec![0; rows];
        for _ in 0..3 * inputs / (rows * len) + 3 {
            for piece in batches.next().pieces {
                let place = places[piece.tokens[0] as usize];
                let share = inputs * (piece.slot + 1) / rows - inputs * piece.slot / rows;
                let starts = place.1 == 0 || read[piece.slot] % share == 0;
                prop_assert_eq!(piece.is_start, starts);
                if !starts {
                    prop_assert_eq!(stopped[piece.slot], (place.0, place.1));
                }
                stopped[piece.slot] = (piece.document, place.1 + piece.tokens.len());
                read[piece.slot] += piece.tokens.len();
            }
        }
    }

    #[test]
    fn a_document_that_fits_in_a_row_is_never_cut((lens, rows, len, seed) in shapes()) {
        let file = distinct(&lens);
        let places = places(&file);
        for (truncate, kept) in [
            (Truncate::Split, None),
            (Truncate::KeepStart, Some(true)),
            (Truncate::KeepEnd, Some(true)),
            (Truncate::Drop, Some(false)),
        ] {
            let packing = Packing::Documents(truncate);
            let Ok(mut batches) = Batches::new(&file, packing, rows, len, seed) else {
                prop_assert!(truncate == Truncate::Drop && lens.iter().all(|&inputs| inputs > len));
                continue;
            };
            // Batches of all rows of an epoch, by those of one row.
            let mut single = Batches::new(&file, packing, 1, len, seed).unwrap();
            let (mut seen, mut count) = (BTreeSet::new(), 0);
            let wanted = lens.iter().map(|&inputs| match kept {
                _ if inputs <= len => inputs,
                None => inputs,
                Some(is_kept) => if is_kept { len } else { 0 },
            });
            let wanted: usize = wanted.sum();
            let mut tokens = 0;
            while tokens < wanted {
                let batch = single.next();
                prop_assert!(batch.tokens() <= len && !batch.pieces.is_empty());
                for piece in &batch.pieces {
                    check_piece(piece, &places);
                    prop_assert!(piece.is_start);
                    let (inputs, first) =
                        (lens[piece.document], places[piece.tokens[0] as usize].1);
                    let is_whole = piece.tokens.len() == inputs;
                    prop_assert!(is_whole || inputs > len, "{truncate:?}: {piece:?}");
                    match truncate {
                        Truncate::KeepStart => prop_assert_eq!(first, 0),
                        Truncate::KeepEnd => prop_assert_eq!(first + piece.tokens.len(), inputs),
                        Truncate::Drop => prop_assert!(is_whole),
                        _ => prop_assert_eq!(first % len, 0),
                    }
                    for &id in &piece.tokens {
                        prop_assert!(seen.insert(id), "twice in an epoch");
                    }
                }
                (tokens, count) = (tokens + batch.tokens(), count + 1);
            }
            prop_assert_eq!(tokens, wanted);
            // No two rows would fit in one.
            prop_assert!(count == 1 || 2 * tokens > (count - 1) * len);
            // Rows do not depend on how many are in a batch.
            let mut single = Batches::new(&file, packing, 1, len, seed).unwrap();
            for _ in 0..5 {
                let one: Vec<Vec<Piece>> = (0..rows).map(|_| single.next().pieces).collect();
                let batch = batches.next();
                for (slot, one) in one.iter().enumerate() {
                    let row = batch.pieces.iter().filter(|piece| piece.slot == slot);
                    let row: Vec<Piece> = row.map(|piece| Piece { slot: 0, ..piece.clone() }).collect();
                    prop_assert_eq!(&row, one);
                }
            }
        }
    }

    #[test]
    fn a_cursor_goes_on_as_if_nothing_had_been((lens, rows, len, seed) in shapes()) {
        let file = distinct(&lens);
        for packing in [CUT, Packing::Documents(Truncate::Split), Packing::Carried] {
            let mut batches = Batches::new(&file, packing, rows, len, seed).unwrap();
            let steps: Vec<(String, Batch)> = (0..12)
                .map(|_| (serde_json::to_string(&batches.cursor()).unwrap(), batches.next()))
                .collect();
            for (i, (cursor, _)) in steps.iter().enumerate() {
                let mut batches = Batches::new(&file, packing, rows, len, seed).unwrap();
                batches.seek(serde_json::from_str(cursor).unwrap()).unwrap();
                for (_, want) in steps.iter().skip(i) {
                    prop_assert_eq!(&batches.next(), want);
                }
            }
            // Back and forth in one.
            for &i in &[7, 2, 11, 0] {
                batches.seek(serde_json::from_str(&steps[i].0).unwrap()).unwrap();
                prop_assert_eq!(&batches.next(), &steps[i].1);
            }
            prop_assert!(steps[0].0.len() < 100);
        }
    }

    #[test]
    fn a_pass_reads_every_input_once_and_ends((lens, rows, len, _) in shapes()) {
        let file = distinct(&lens);
        for packing in [CUT, Packing::Documents(Truncate::Split), Packing::Carried] {
            let all: Vec<Batch> = Pass::new(&file, packing, rows, len).unwrap().collect();
            let mut ids: Vec<u32> =
                all.iter().flat_map(|b| &b.pieces).flat_map(|p| p.tokens.clone()).collect();
            if packing != CUT {
                ids.sort_unstable();
            }
            prop_assert_eq!(ids, (1..=file.inputs() as u32).collect::<Vec<_>>());
            let is_full = |batch: &Batch| batch.tokens() == rows * len;
            prop_assert!(packing == Packing::Documents(Truncate::Split) || all.iter().rev().skip(1).all(is_full));
        }
    }
}

// Pairs

#[test]
fn pairs_are_tokenized_as_one_text() {
    let (folder, tokenizer) = (Folder::new(), tokenizer());
    let encoder = Encoder::new(&tokenizer, 0).unwrap();
    let path = folder.write(
        "a.jsonl",
        "{\"context\": \"the river runs to\", \"continuation\": \" the sea\"}\n\n\
         {\"prompt\": \"the river \", \"completion\": \"runs\"}\n\
         {\"text\": \"the river runs to the sea \\n\"}\n\
         {\"text\": \"the river\\n\\nstops\"}\n",
    );
    let pairs = read_pairs(&path, &encoder).unwrap();
    let texts = [
        ("the river runs to", " the sea", 8, 1),
        // The space is part of the token that follows.
        ("the river", " runs", 4, 3),
        ("the river runs to the", " sea", 4, 4),
        ("the river\n", "\nstops", 6, 5),
    ];
    assert_eq!(pairs.len(), texts.len());
    for (pair, (context, continuation, bytes, line)) in pairs.iter().zip(texts) {
        assert_eq!(tokenizer.decode(&pair.context, false).unwrap(), context);
        assert_eq!(tokenizer.decode(&pair.continuation, false).unwrap(), continuation);
        assert_eq!((pair.bytes, pair.line), (bytes, line));
        let whole = tokenizer.encode(&format!("{context}{continuation}"), true).unwrap();
        assert_eq!([&pair.context[..], &pair.continuation].concat(), whole);
    }
    let started = read_pairs(&path, &encoder.with_start(vec![320]).unwrap()).unwrap();
    assert_eq!(started[0].context, [&[320], &pairs[0].context[..]].concat());
    assert_eq!(started[0].continuation, pairs[0].continuation);
}

#[test]
fn what_is_no_pair_is_an_error_with_its_line() {
    let (folder, tokenizer) = (Folder::new(), tokenizer());
    let encoder = Encoder::new(&tokenizer, 0).unwrap();
    for (line, reason) in [
        ("{\"context\": \"a\"}", "expected `context` with `continuation`"),
        (
            "{\"context\": \"a\", \"continuation\": 1}",
            "`continuation`: expected a text, found a number",
        ),
        ("{\"context\": \"\", \"continuation\": \"a\"}", "the context has no token"),
        ("{\"context\": \"a\", \"continuation\": \"\"}", "the continuation has no token"),
        ("{\"text\": \" word \"}", "the context has no token"),
        ("{\"text\": \"word\"}", "`text`: expected at least two words"),
        ("1", "expected a JSON object, found a number"),
        ("{", "not JSON: EOF while parsing an object"),
    ] {
        let path = folder.write("a.jsonl", format!("{{\"text\": \"a b\"}}\n{line}"));
        let error = read_pairs(&path, &encoder).unwrap_err().to_string();
        let want = format!("`{}`: line 2: {reason}", path.display());
        assert!(error.starts_with(&want), "{error}");
    }
    let path = folder.write("a.jsonl", "\n");
    assert!(read_pairs(&path, &encoder).unwrap_err().to_string().contains("found none"));
}
