//! `boostr chat`, by a pipe, and the named states of `boostr state`.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::*;

const TEMPLATE: &str = "{% for m in messages %}<s>{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}\
    {% if add_generation_prompt %}<s>assistant: {% endif %}";

/// A copy of the tiny model with a chat template.
fn model(name: &str) -> PathBuf {
    let folder = copy_of_tiny(name);
    fs::write(folder.join("chat_template.jinja"), TEMPLATE).unwrap();
    folder
}

/// A chat with these lines.
fn talk(model: &Path, sessions: &Path, more: &[&str], lines: &str) -> Ended {
    let (model, sessions) = (model.to_str().unwrap(), sessions.to_str().unwrap());
    let line = ["chat", model, "--sessions", sessions, "--temp", "0", "-n", "5", "-v"];
    boostr_with_stdin(&[&line, more].concat(), lines)
}

/// Tokens read and reused, of each answer.
fn read(run: &Ended) -> Vec<(usize, usize)> {
    let number = |words: &[&str], label: &str| -> usize {
        let at = words.iter().position(|word| word.trim_end_matches(',') == label).unwrap();
        words[at - 1].parse().unwrap()
    };
    let lines = run.stderr.lines().filter(|line| line.contains(" tokens/s "));
    let words = lines.map(|line| line.split_whitespace().collect::<Vec<_>>());
    words.map(|words| (number(&words, "read"), number(&words, "reused"))).collect()
}

#[test]
fn a_conversation_goes_on_in_the_next_process_and_reads_only_what_is_new() {
    let model = model("talk-on");
    let sessions = model.join("sessions");
    let whole = talk(&model, &sessions, &["--session", "a"], "Hello\nAnd you?\nBye\n").ok();
    let answers: Vec<&str> = whole.stdout.lines().collect();
    let all = read(&whole);
    assert_eq!(all.len(), 3);

    let first = talk(&model, &sessions, &["--session", "b"], "Hello\nAnd you?\n").ok();
    let second = talk(&model, &sessions, &["--session", "b"], "Bye\n").ok();
    assert_eq!(first.stdout + &second.stdout, whole.stdout);
    assert_eq!(read(&second), all[2..]);
    assert!(all[2].1 > all[2].0 && all[1].1 > 0 && all[0].1 == 0, "{all:?}");
    assert!(second.stderr.contains("b: 2 turns"), "{}", second.stderr);

    // Rewound, the same again; in a branch too.
    let again = talk(&model, &sessions, &["--session", "b"], "/rewind\nBye\n").ok();
    assert_eq!(
        (again.stdout.lines().last(), read(&again)),
        (answers.last().copied(), all[2..].to_vec())
    );
    let branch =
        talk(&model, &sessions, &["--session", "b"], "/branch c\n/rewind 2\nAnd you?\n").ok();
    assert_eq!(read(&branch), all[1..2]);
    let list = talk(&model, &sessions, &[], "/sessions\n").ok();
    for (name, turns) in [("a", "3 turns"), ("b", "3 turns"), ("c", "2 turns")] {
        let line = list.stdout.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
        assert!(line.contains(turns) && line.ends_with("Hello"), "{line}");
    }
}

#[test]
fn guesses_change_no_answer_and_the_conversation_goes_on_without_them() {
    let model = model("talk-draft");
    let lines = "one two one two one two one\nAnd one two one two?\n";
    let sessions = model.join("sessions");
    let say = |name: &str, more: &[&str], lines: &str| {
        let (model, sessions) = (model.to_str().unwrap(), sessions.to_str().unwrap());
        let line = ["chat", model, "--sessions", sessions, "--temp", "0", "-n", "40", "-v"];
        boostr_with_stdin(&[&line, &["--session", name][..], more].concat(), lines).ok()
    };
    let plain = say("plain", &[], lines);
    assert!(!plain.stderr.contains("guesses right"), "{}", plain.stderr);
    let own = model.to_str().unwrap();
    for draft in ["lookup", own] {
        let name = if draft == own { "model" } else { draft };
        let drafted = say(name, &["--draft", draft], lines);
        assert_eq!(drafted.stdout, plain.stdout, "{draft}");
        assert!(drafted.stderr.contains("guesses right"), "{draft}: {}", drafted.stderr);
    }
    // What a state of guesses has not seen yet is read in the next turn.
    let on = say("plain", &[], "Bye\n").stdout;
    assert_eq!(say("lookup", &[], "Bye\n").stdout, on);
    let ended = talk(&model, &sessions, &["--draft", &demo()], "Hello\n").fails(2);
    assert!(ended.stderr.contains("cannot guess for each other"), "{}", ended.stderr);
}

#[test]
fn a_conversation_without_a_name_is_kept_until_the_next_or_gets_one() {
    let model = model("talk-unnamed");
    let sessions = model.join("sessions");
    talk(&model, &sessions, &[], "One\n").ok();
    // Nothing said, nothing lost.
    talk(&model, &sessions, &[], "/stats\n").ok();
    let on = talk(&model, &sessions, &["--session", "last"], "Two\n").ok();
    assert!(read(&on)[0].1 > 0 && on.stderr.contains("last: 1 turn,"), "{}", on.stderr);
    let saved = talk(&model, &sessions, &[], "Three\n/save kept\nFour\n/stats\n").ok();
    assert!(saved.stdout.contains("kept, turn 2 of 2"), "{}", saved.stdout);
    let next = talk(&model, &sessions, &[], "Five\n/load kept\nSix\n/clear\nSeven\n").ok();
    let seen = read(&next);
    assert!(seen[0].1 == 0 && seen[1].1 > 0 && seen[2].1 == 0, "{seen:?}");
    talk(&model, &sessions, &["--session", "kept"], "/load none\n").fails(2);
    talk(&model, &sessions, &["--session", "../x"], "").fails(2);
    assert!(!model.join("x").exists());
}

#[test]
fn text_of_several_lines_settings_and_a_system_message_reach_the_model() {
    let model = model("talk-text");
    let sessions = model.join("sessions");
    let lines =
        "/system Be brief.\n\"\"\"\nOne\n  two\n\"\"\"\n/set temp=0 n=2\n//etc\n/system\n/set\n";
    let run = talk(&model, &sessions, &["--session", "a"], lines).ok();
    assert!(
        run.stdout.contains("Be brief.\n") && run.stdout.contains("max_tokens 2"),
        "{}",
        run.stdout
    );
    let log = String::from_utf8_lossy(&fs::read(sessions.join("a/log")).unwrap()).into_owned();
    for said in [r#""content":"One\n  two""#, r#""content":"/etc""#, "system: Be brief."] {
        assert!(log.contains(said), "{said}: {log}");
    }
    // The command line says it as well, to the same ids as a run of that conversation.
    let one = talk(&model, &sessions, &["--session", "b", "--system", "Be"], "Hi\n").ok();
    let path = model.to_str().unwrap();
    let run = boostr(&["run", path, "--system", "Be", "-p", "Hi", "-n", "5", "--temp", "0"]).ok();
    assert_eq!(one.stdout, run.stdout);
}

#[test]
fn a_command_that_fails_ends_a_chat_of_a_pipe() {
    let model = model("talk-fails");
    let sessions = model.join("sessions");
    for line in
        ["/nothing", "/save", "/save a/b", "/set temp=hot", "/diff .", "/mix .:1", "/load x"]
    {
        let run = talk(&model, &sessions, &[], &format!("{line}\nHi\n")).fails(2);
        assert_eq!(run.stdout, "", "{line}");
    }
    assert!(talk(&model, &sessions, &[], "/help\n").ok().stdout.contains("/rewind"));
}

#[test]
fn a_full_context_refuses_a_turn_and_the_chat_goes_on() {
    let model = model("talk-full");
    let sessions = model.join("sessions");
    let long = "word ".repeat(60);
    let limited = |session: &str, lines: &str| {
        talk(&model, &sessions, &["--session", session, "--context", "90"], lines)
    };
    let free = limited("a", "Hello\nBye\n").ok();
    // What is refused is not said: what follows is as if it had not been there.
    let run = limited("b", &format!("Hello\n{long}\nBye\n")).ok();
    assert_eq!((&run.stdout, read(&run)), (&free.stdout, read(&free)));
    let told = "not said: maximum context length: it is 90 tokens";
    for part in [told, "/rewind N", "/clear", "--context N"] {
        assert_eq!(run.stderr.matches(part).count(), 1, "{part}: {}", run.stderr);
    }
    // Room is made by hand. A chat that ends with a refused turn says so by its code.
    let run = limited("c", &format!("Hello\n{long}\n/rewind\nHello\nBye\n")).ok();
    let hello = free.stdout.lines().next().unwrap();
    assert_eq!(run.stdout, format!("{hello}\n{}", free.stdout));
    let run = limited("d", &format!("Hello\n{long}\n/stats\n")).fails(2);
    assert!(run.stderr.contains("the last turn was not said: maximum context"), "{}", run.stderr);
    // So it does however it is left.
    let run = limited("e", &format!("Hello\n{long}\n/exit\n")).fails(2);
    assert!(run.stderr.contains("the last turn was not said: maximum context"), "{}", run.stderr);
    assert_eq!(read(&limited("d", "Bye\n").ok()), read(&free)[1..]);
}

#[test]
fn states_of_conversations_are_compared_and_mixed() {
    let model = model("talk-mix");
    let sessions = model.join("sessions");
    talk(&model, &sessions, &["--session", "a"], "One\n").ok();
    talk(&model, &sessions, &["--session", "b"], "Another thing\n").ok();
    let run =
        talk(&model, &sessions, &["--session", "a"], "/diff b\n/mix a:0.5,b:0.5\nOn\n/diff a\n")
            .ok();
    assert!(run.stdout.contains("norms of the difference"), "{}", run.stdout);
    assert!(run.stderr.contains("experimental") && read(&run)[0].1 > 0, "{}", run.stderr);
    // Also where no state is kept any more.
    let lines = "2\n3\n4\n5\n6\n/branch long\n/rewind 5\n/diff long\n";
    let long = talk(&model, &sessions, &["--session", "c"], &format!("1\n{lines}")).ok();
    assert!(long.stdout.contains("norms of the difference"), "{}", long.stdout);
    // All of one is that one.
    let same = talk(&model, &sessions, &["--session", "a"], "/mix a:1,b:0\n/diff a\n").ok();
    assert!(same.stdout.contains("0.0 %") && !same.stdout.contains(" 1.0 %"), "{}", same.stdout);
    assert!(sessions.join("mix-2").is_dir());
}

#[test]
fn a_model_without_a_template_says_so_once_and_goes_on() {
    let sessions = folder("talk-plain").join("sessions");
    let run = talk(Path::new(&tiny()), &sessions, &[], "One\nTwo\n").ok();
    assert_eq!(run.stderr.matches("without a chat template").count(), 1, "{}", run.stderr);
    assert!(read(&run)[1].1 > 0);
    let raw = talk(&model("talk-raw"), &sessions, &["--raw"], "One\nTwo\n").ok();
    assert_eq!(raw.stdout, run.stdout);
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_the_answer_and_what_was_said_is_kept() {
    let sessions = folder("talk-interrupt").join("sessions");
    let mut child =
        command(&["chat", "--sessions", sessions.to_str().unwrap(), "--session", "a", "-n", "-1"]);
    let mut child = child.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"The sea\n").unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut begin = [0; 20];
    stdout.read_exact(&mut begin).unwrap();
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let log = String::from_utf8_lossy(&fs::read(sessions.join("a/log")).unwrap()).into_owned();
    let begin = serde_json::to_string(std::str::from_utf8(&begin[..10]).unwrap()).unwrap();
    assert!(log.contains(begin.trim_matches('"')), "{begin}: {log}");
    let run = boostr(&["chat", "--sessions", sessions.to_str().unwrap(), "--session", "a"]).ok();
    assert!(run.stderr.contains("without a chat template"), "{}", run.stderr);
}

#[test]
fn states_have_names_that_runs_know() {
    let folder = folder("talk-states");
    let states = folder.join("states");
    let states = states.to_str().unwrap();
    let model = tiny();
    let run = |more: &[&str]| {
        let line = ["run", &model, "--temp", "0", "--json", "--states", states];
        boostr(&[&line, more].concat())
    };
    let state = |more: &[&str]| boostr(&[&["state"], more, &["--states", states]].concat());
    let none = state(&["ls", "--json"]).ok().json();
    assert_eq!(none["states"].as_array().unwrap().len(), 0);
    run(&["-p", "Hello", "-n", "3", "--save-state", "one"]).ok();
    run(&["-p", "Bye", "-n", "3", "--save-state", "two"]).ok();
    let on = run(&["-p", " there", "-n", "3", "--state", "one"]).ok().json();
    assert!(on["timings"]["cache_n"].as_u64().unwrap() > 3);

    state(&["branch", "one", "three"]).ok();
    assert_eq!(run(&["-p", " there", "-n", "3", "--state", "three"]).ok().json()["ids"], on["ids"]);
    state(&["branch", "two", "three"]).fails(2);
    state(&["branch", "two", "three", "--force"]).ok();
    assert_ne!(run(&["-p", " there", "-n", "3", "--state", "three"]).ok().json()["ids"], on["ids"]);

    let file = folder.join("out.state");
    let file = file.to_str().unwrap();
    state(&["load", "one", file]).ok();
    state(&["load", "one", file]).fails(2);
    state(&["save", "four", file]).ok();
    assert!(state(&["diff", "one", "four"]).ok().stdout.contains("0.0 %"));
    state(&["mix", "one:0.5", "two:0.5", "--out", "mixed", "-m", &model]).ok();
    let mixed = state(&["show", "mixed", "--json"]).ok().json();
    assert_eq!((&mixed["has_ids"], &mixed["family"]), (&false.into(), &"mamba2".into()));
    state(&["mix", "one:0", "--out", "zero", "-m", &model]).fails(1);
    state(&["mix", "one", "--out", "zero", "-m", &model]).fails(2);

    // A broken one is listed, and can be removed; what is no state cannot.
    fs::write(Path::new(states).join("broken.safetensors"), "no state").unwrap();
    let list = state(&["ls", "--json"]).ok().json();
    let names: Vec<&str> =
        list["states"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["broken", "four", "mixed", "one", "three", "two"]);
    assert!(list["states"][0]["error"].is_string() && list["states"][3]["position"].is_u64());
    assert!(state(&["ls"]).ok().stdout.contains("broken"));
    state(&["rm", "broken", "four", file]).ok();
    state(&["rm", "none"]).fails(1);
    let other = folder.join("model.safetensors");
    fs::copy(Path::new(&model).join("model.safetensors"), &other).unwrap();
    state(&["rm", other.to_str().unwrap()]).fails(3);
    assert!(other.exists() && !Path::new(file).exists());
    for wrong in ["a b", "tríp", &"x".repeat(65)] {
        state(&["show", wrong]).fails(2);
        run(&["-p", "x", "--save-state", wrong]).fails(2);
    }
    run(&["-p", "x", "--state", "none"]).fails(3);
}

#[test]
fn the_state_of_a_conversation_gets_a_name() {
    let model = model("talk-state");
    let (sessions, states) = (model.join("sessions"), model.join("states"));
    talk(&model, &sessions, &["--session", "a"], "Hello\n").ok();
    let (sessions, states) = (sessions.to_str().unwrap(), states.to_str().unwrap());
    let save = |session: &str| {
        boostr(&[
            "state",
            "save",
            "x",
            "--session",
            session,
            "--sessions",
            sessions,
            "--states",
            states,
        ])
    };
    save("a").ok();
    save("a").fails(2);
    save("b").fails(2);
    boostr(&["state", "rm", "--session", "b", "--sessions", sessions]).fails(2);
    boostr(&["state", "rm", "--session", "a", "--sessions", sessions]).ok();
    assert!(!Path::new(sessions).join("a").exists());
    boostr(&["state", "rm"]).fails(2);
    let shown = boostr(&["state", "show", "x", "--states", states, "--json"]).ok().json();
    assert_eq!((shown["has_ids"].as_bool(), shown["dtype"].as_str()), (Some(true), Some("f32")));
}

#[test]
fn folders_are_found_by_the_environment() {
    let home = folder("talk-home");
    let mut chat = command(&["chat", &tiny(), "-n", "2"]);
    chat.env("XDG_STATE_HOME", &home).stdin(Stdio::piped());
    end(chat, "Hi\n/save trip\n").ok();
    assert!(home.join("boostr/sessions/trip/log").is_file());
    let mut run = command(&["run", &tiny(), "-p", "x", "-n", "0", "--save-state", "one"]);
    run.env_remove("XDG_STATE_HOME").env("HOME", &home);
    end(run, "").ok();
    assert!(home.join(".local/state/boostr/states/one.safetensors").is_file());
    let mut list = command(&["state", "ls"]);
    list.env("BOOSTR_STATES", home.join(".local/state/boostr/states"));
    assert!(end(list, "").ok().stdout.contains("one"));
    let mut none = command(&["state", "ls"]);
    none.env_remove("XDG_STATE_HOME").env_remove("HOME").env_remove("LOCALAPPDATA");
    end(none, "").fails(2);
}
