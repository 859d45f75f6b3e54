//! Sessions after kills, torn ends, rotten bytes and other processes: old or new, never neither.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::{Folder, Random, test_name};
use crate::talk::*;
use crate::tiny::message;
use boostr::backend::Cpu;
use boostr::session::{STATES, SessionError, Sessions};
use boostr::state_file::{About, StateFile};

/// Set for processes that another one starts, to the folder of the sessions.
const FOLDER: &str = "BOOSTR_TEST_SESSIONS";

/// Starts this very program with one of the tests below.
fn start(test: &str, folder: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let test = test_name(module_path!(), test);
    child.args(["--ignored", "--exact", &test, "--nocapture", "--test-threads=1"]);
    child.env(FOLDER, folder).env("RAYON_NUM_THREADS", "1");
    child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
#[ignore = "a process that another test starts and kills; does nothing by itself"]
fn talks_until_it_is_killed() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let talk = Talk::tiny();
    let sessions = Sessions::<Cpu>::open(Path::new(&folder)).unwrap();
    let session = sessions.get("a").unwrap();
    println!("\ntalking");
    loop {
        let said = talk.say(&session, &format!("Number {}", session.turns().len()), 3);
        println!("said {}", said.turn);
        if said.turn.is_multiple_of(5) {
            let _ = sessions.delete("b");
            sessions.branch(&session, "b", said.turn).unwrap();
            println!("branched {}", said.turn);
            session.rewind(said.turn.saturating_sub(7)).unwrap();
        }
    }
}

/// Kills a process that talks all the time, again and again, at any moment.
fn kill(times: u32) {
    let talk = Talk::tiny();
    let folder = Folder::new();
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    drop(sessions.create("a", None).unwrap());
    let mut random = Random(0x5eed);
    let (mut least, mut interrupted) = (0, 0);
    for _ in 0..times {
        let mut child = start("talks_until_it_is_killed", folder.path());
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "talking"), "the process did not start");
        std::thread::sleep(Duration::from_micros(random.next() % 80_000));
        child.kill().unwrap();
        child.wait().unwrap();
        let told: Vec<String> = lines.map_while(Result::ok).collect();
        let number = |line: &String| line.strip_prefix("said ")?.parse::<u32>().ok();
        least = told.iter().filter_map(number).next_back().unwrap_or(least);

        // As the next process finds it.
        let is_left = |name: &String| name.contains(".tmp-");
        let mut was_inside = names(&folder.path().join("a")).iter().any(is_left)
            || names(folder.path()).iter().any(is_left);
        let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
        let session = sessions.get("a").unwrap();
        let turns = session.turns();
        // What was said is there, and at most the turn that was being said.
        assert!((least..=least + 1).contains(&(turns.len() as u32)), "{} of {least}", turns.len());
        was_inside |= turns.len() as u32 > least;
        interrupted += u32::from(was_inside);
        least = turns.len() as u32;
        for (turn, id) in turns.iter().zip(1..) {
            assert_eq!((turn.id, turn.messages.len()), (id, 2));
            assert_eq!(turn.messages[0]["content"], format!("Number {}", id - 1));
        }
        let mut files = names(&folder.path().join("a"));
        // What was half written.
        files.retain(|name| name != "log.torn");
        assert!(files.len() <= 1 + STATES, "{files:?}");
        assert!(files.iter().all(|name| name == "log" || name.starts_with("state-")), "{files:?}");
        // A state that is there is the one of its turn.
        if let Some(state) = session.state(&talk.assistant()) {
            let ids = session.ids();
            let mut again = talk.lm.model.new_state().unwrap();
            crate::tiny::run(&talk.lm.model, &ids[..ids.len() - 1], &[ids.len() - 1], &mut again);
            let last = &ids[ids.len() - 1..];
            let (got, want) = (talk.logits(&state, last), talk.logits(&again, last));
            let far = got.iter().zip(&want).any(|(x, y)| (x - y).abs() > 1e-3);
            assert!(!far && state.position() == ids.len() - 1);
        }
        if sessions.summary("b").is_ok() {
            let turns = sessions.get("b").unwrap().turns().len();
            assert!(turns > 0 && turns <= least as usize);
        }
        drop(session);
        let left = names(folder.path());
        assert!(left.iter().all(|name| name == "a" || name == "b"), "{left:?}");
    }
    println!("{interrupted} of {times} kills were inside of a turn's saving; {least} turns");
    assert!(least > 3 && interrupted > 0, "no process came to say something");
}

#[cfg(target_os = "linux")]
#[test]
fn r_f1_a_killed_process_loses_at_most_the_turn_it_was_in() {
    kill(25);
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "a minute of kills"]
fn r_f1_two_hundred_killed_processes_lose_at_most_the_turn_they_were_in() {
    kill(200);
}

/// A session of a few turns, a system message and a rewind: its folder, log, and the end of each record.
fn talked(folder: &Folder) -> (Vec<u8>, Vec<usize>) {
    let talk = Talk::tiny();
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    let session = sessions.create("a", None).unwrap();
    talk.say(&session, "One", 2);
    session.set_system(Some("Be brief.")).unwrap();
    talk.say(&session, "Two", 2);
    session.rewind(1).unwrap();
    talk.say(&session, "Three", 2);
    drop(session);
    let log = fs::read(folder.path().join("a/log")).unwrap();
    let mut ends = vec![0];
    while *ends.last().unwrap() < log.len() {
        let at = *ends.last().unwrap();
        let len = u32::from_le_bytes(log[at..at + 4].try_into().unwrap()) as usize;
        ends.push(at + 8 + len);
    }
    assert_eq!((*ends.last().unwrap(), ends.len()), (log.len(), 7));
    (log, ends)
}

/// Turns after so many records of `talked`.
const TURNS: [usize; 7] = [0, 0, 1, 1, 2, 2, 3];

#[test]
fn a_log_torn_at_any_byte_ends_at_its_last_whole_record_and_goes_on_there() {
    let folder = Folder::new();
    let (log, ends) = talked(&folder);
    let path = folder.path().join("a/log");
    let torn = folder.path().join("a/log.torn");
    let talk = Talk::tiny();
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    for len in 0..log.len() {
        // What a power cut may leave after it, too.
        for more in [&b""[..], &[0; 64]] {
            fs::write(&path, [&log[..len], more].concat()).unwrap();
            let records = ends.iter().filter(|&&end| end > 0 && end <= len).count();
            if records == 0 {
                let error = sessions.get("a").unwrap_err();
                assert!(
                    error.to_string().contains("begins with no whole record"),
                    "{len}: {error}"
                );
                // It may be anything, so it stays as it is.
                assert_eq!(fs::read(&path).unwrap(), [&log[..len], more].concat());
                assert!(!torn.exists());
                continue;
            }
            assert_eq!(sessions.summary("a").unwrap().head > 0, TURNS[records] > 0);
            let session = sessions.get("a").unwrap();
            assert_eq!(session.turns().len(), TURNS[records], "{len}");
            assert_eq!(sessions.summary("a").unwrap(), session.summary(), "{len}");
            assert_eq!(fs::read(&path).unwrap(), log[..ends[records]]);
            let rest = [&log[ends[records]..len], more].concat();
            match fs::read(&torn) {
                Ok(aside) => assert!(aside == rest && !rest.is_empty(), "{len}"),
                Err(_) => assert!(rest.is_empty(), "{len}"),
            }
            let _ = fs::remove_file(&torn);
            if len % 101 == 0 {
                let turn = talk.say(&session, "On", 1).turn;
                drop(session);
                let session = sessions.get("a").unwrap();
                assert_eq!((session.head(), session.turns().len()), (turn, TURNS[records] + 1));
            }
        }
    }
}

#[test]
fn a_byte_that_rots_in_a_log_is_found_and_nothing_whole_is_thrown_away() {
    let folder = Folder::new();
    let (log, ends) = talked(&folder);
    let path = folder.path().join("a/log");
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    let last = ends[ends.len() - 2];
    let list = sessions.list().unwrap();
    assert_eq!((list.len(), list[0].turns), (1, 2));
    for at in 0..log.len() {
        let mut rotten = log.clone();
        rotten[at] ^= 1 << (at % 8);
        fs::write(&path, &rotten).unwrap();
        match sessions.get("a") {
            Ok(session) => {
                assert!(at >= last, "{at}");
                assert_eq!(session.turns().len(), 2);
            }
            Err(SessionError::Other(error)) => {
                assert!(at < last, "{at}: {error}");
                assert!(message(&error).contains("is damaged"), "{error}");
                assert_eq!(fs::read(&path).unwrap(), rotten);
                // A list looks at the last record alone, so this one can be seen, and deleted.
                assert_eq!(sessions.list().unwrap(), list);
            }
            Err(other) => panic!("{other}"),
        }
    }
    // One that is damaged can be deleted.
    fs::write(&path, [&log[..20], &log[21..]].concat()).unwrap();
    sessions.delete("a").unwrap();
    assert_eq!(folder.names(), [""; 0]);
}

/// An error with what caused it.
fn told(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[test]
fn a_log_whose_records_contradict_each_other_keeps_its_torn_end() {
    let folder = Folder::new();
    let (log, ends) = talked(&folder);
    let path = folder.path().join("a/log");
    // The turn twice, and then half a record.
    let bytes = [&log[..], &log[ends[1]..ends[2]], &[16, 0, 0, 0, b'a', b'b', b'c', b'd']].concat();
    fs::write(&path, &bytes).unwrap();
    let error = told(&Sessions::<Cpu>::open(folder.path()).unwrap().get("a").unwrap_err());
    assert!(error.contains("a/log"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert!(!folder.path().join("a/log.torn").exists());
}

#[cfg(unix)]
#[test]
fn p_session_log_link_truncates_file_what_is_no_log_is_left_alone() {
    let folder = Folder::new();
    let (log, ends) = talked(&folder);
    let (path, other) = (folder.path().join("a/log"), folder.path().join("notes.txt"));
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    let notes = "Do not lose me. ".repeat(7000);
    // A link, though it leads to a log, and a pipe, which nobody writes.
    for text in [notes.as_bytes(), &log, &log[..log.len() - 3]] {
        fs::remove_file(&path).unwrap();
        fs::write(&other, text).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        let error = told(&sessions.get("a").unwrap_err());
        assert!(error.contains("a/log") && error.contains("found a link"), "{error}");
        assert!(sessions.list().unwrap().is_empty());
        assert_eq!(fs::read(&other).unwrap(), text);
    }
    // Another file, and a log of which no record is whole.
    let mut damaged = log.clone();
    for end in &ends[..ends.len() - 1] {
        damaged[end + 9] ^= 1;
    }
    for text in [notes.as_bytes(), &damaged] {
        fs::remove_file(&path).unwrap();
        fs::write(&path, text).unwrap();
        let error = told(&sessions.get("a").unwrap_err());
        assert!(error.contains("begins with no whole record"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), text);
        assert!(!folder.path().join("a/log.torn").exists());
    }
    // It can be deleted all the same, and what a link leads to stays.
    fs::remove_file(&path).unwrap();
    fs::write(&other, &notes).unwrap();
    std::os::unix::fs::symlink(&other, &path).unwrap();
    sessions.delete("a").unwrap();
    assert_eq!(fs::read_to_string(&other).unwrap(), notes);
}

#[test]
fn p_log_quadratic_a_tail_that_looks_like_records_is_read_in_a_moment() {
    let folder = Folder::new();
    let (log, ends) = talked(&folder);
    let path = folder.path().join("a/log");
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    let start = std::time::Instant::now();
    // Each fourth byte is the length of a mebibyte that begins like JSON; lengths that end where the file does; and
    // letters alone.
    let size: usize = 8 << 20;
    let lengths: Vec<u8> = (0..size / 4)
        .rev()
        .flat_map(|left| ((4 * left).wrapping_sub(4) as u32).to_le_bytes())
        .collect();
    for tail in [b"{\0\x10\0".repeat(size / 4), lengths, vec![b'{'; size]] {
        fs::write(&path, [&log[..], &tail].concat()).unwrap();
        assert_eq!(sessions.list().unwrap()[0].turns, 2);
        let session = sessions.get("a").unwrap();
        assert_eq!(session.turns().len(), 3);
        drop(session);
        assert_eq!(fs::read(&path).unwrap(), log);
        fs::remove_file(folder.path().join("a/log.torn")).unwrap();
        // A whole record after it is found, wherever.
        fs::write(&path, [&log[..], &tail, &log[..ends[1]]].concat()).unwrap();
        let error = told(&sessions.get("a").unwrap_err());
        let place = format!("a whole one follows at {}", log.len() + tail.len());
        assert!(error.contains(&place), "{error}");
    }
    // Minutes, where each length is followed.
    assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
}

#[test]
fn p_hands_blocked_by_a_log_lists_beside_a_hostile_one_take_a_moment() {
    let folder = Folder::new();
    let (log, _) = talked(&folder);
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    drop(sessions.create("b", None).unwrap());
    // What the fixture has: each fourth byte is the length of a mebibyte.
    let tail = b"{\0\x10\0".repeat(600_000);
    fs::write(folder.path().join("a/log"), [&log[..], &tail].concat()).unwrap();
    let start = std::time::Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert_eq!(sessions.list().unwrap().len(), 2));
        }
    });
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}

#[test]
fn a_long_way_back_to_the_base_of_many_turns_is_short() {
    let folder = Folder::new();
    let (log, ends) = talked(&folder);
    let mut turn: serde_json::Value = serde_json::from_str(&json_of(&log, &ends, 1)).unwrap();
    turn.as_object_mut().unwrap().remove("stand");
    let (own, position) =
        (turn["ids"].as_array().unwrap().len(), turn["position"].as_u64().unwrap());
    let mut long = log[..ends[2]].to_vec();
    for id in 2..20_000_u64 {
        // All stand on the first one's ids.
        let after = serde_json::json!({"id": id, "parent": id - 1, "base": 1, "position": position + own as u64});
        turn.as_object_mut().unwrap().extend(after.as_object().unwrap().clone());
        long.extend(encoded(&turn.to_string()));
    }
    let path = folder.path().join("a/log");
    fs::write(&path, &long).unwrap();
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    assert_eq!(sessions.get("a").unwrap().turns().len(), 19_999);
    // A base that is no turn before it, but one aside.
    turn["id"] = 20_001.into();
    turn["parent"] = 1.into();
    turn["base"] = 9.into();
    fs::write(&path, [&long[..], &encoded(&turn.to_string())].concat()).unwrap();
    let error = told(&sessions.get("a").unwrap_err());
    assert!(error.contains("its base 9 is not before it"), "{error}");
}

#[cfg(unix)]
#[test]
fn p_sessions_folder_others_read_what_was_open_to_others_is_closed() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    talked(&folder);
    let inside = folder.path().join("a");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let open = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let check = || {
        assert_eq!(mode(&inside), 0o700);
        let files = names(&inside);
        assert!(files.len() > 1, "{files:?}");
        for file in files {
            assert_eq!(mode(&inside.join(&file)), 0o600, "{file}");
        }
    };
    check();
    open(folder.path(), 0o755);
    open(&inside, 0o777);
    for file in names(&inside) {
        open(&inside.join(file), 0o644);
    }
    let talk = Talk::tiny();
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    assert_eq!(mode(folder.path()), 0o700);
    let session = sessions.get("a").unwrap();
    check();
    talk.say(&session, "Four", 2);
    check();
    let branch = sessions.branch(&session, "b", session.head()).unwrap();
    assert_eq!(mode(&folder.path().join("b")), 0o700);
    assert_eq!(mode(&folder.path().join("b/log")), 0o600);
    drop((session, branch));
}

#[cfg(unix)]
#[test]
fn p_sessions_folder_others_read_a_folder_that_all_share_is_refused_as_it_is() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    let mode = || fs::metadata(folder.path()).unwrap().permissions().mode() & 0o7777;
    for (open, closed) in [(0o777, true), (0o750, true), (0o1777, false), (0o1755, false)] {
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(open)).unwrap();
        let opened = Sessions::<Cpu>::open(folder.path());
        assert_eq!((opened.is_ok(), mode()), (closed, if closed { 0o700 } else { open }));
        let Err(error) = opened else { continue };
        let error = told(&error);
        assert!(error.contains(&format!("{open:04o}")) && error.contains("folder"), "{error}");
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
    // One that is not there yet is made closed, with the folders above it.
    let inside = folder.path().join("new/sessions");
    Sessions::<Cpu>::open(&inside).unwrap();
    for made in [folder.path().join("new"), inside] {
        assert_eq!(fs::metadata(made).unwrap().permissions().mode() & 0o777, 0o700);
    }
}

#[cfg(unix)]
#[test]
fn p_sessions_folder_others_read_one_with_other_files_keeps_its_mode_and_says_so() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    talked(&folder);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let open = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let inside = folder.path().join("a");
    for strange in ["notes.txt", ".git", "notes"] {
        let path = folder.path().join(strange);
        if strange == "notes.txt" { fs::write(&path, "mine") } else { fs::create_dir(&path) }
            .unwrap();
        for exposed in [0o755, 0o710, 0o770] {
            open(folder.path(), exposed);
            open(&inside, 0o755);
            let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
            let why = sessions.exposed().unwrap();
            assert!(why.contains(strange) && why.contains(&format!("{exposed:04o}")), "{why}");
            // What is in it is closed all the same.
            assert_eq!((mode(folder.path()), mode(&inside)), (exposed, 0o700));
            sessions.create("b", None).unwrap();
            assert_eq!(mode(&folder.path().join("b")), 0o700);
            sessions.delete("b").unwrap();
        }
        // Others could put sessions in place of those that are there.
        open(folder.path(), 0o757);
        let error = told(&Sessions::<Cpu>::open(folder.path()).unwrap_err());
        assert!(error.contains("0757") && error.contains(strange), "{error}");
        assert_eq!(mode(folder.path()), 0o757);
        fs::remove_file(&path).or_else(|_| fs::remove_dir(&path)).unwrap();
    }
    // What a server and killed processes have there is ours.
    fs::create_dir(folder.path().join(".responses")).unwrap();
    fs::write(folder.path().join(".a.lock"), "").unwrap();
    open(folder.path(), 0o755);
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    assert_eq!((sessions.exposed(), mode(folder.path())), (None, 0o700));
    // The root of all folders stays as it is, whoever asks.
    let before = mode(Path::new("/"));
    drop(boostr::checkpoint::PrivateFolder::open_of(Path::new("/"), |_| true));
    assert_eq!(mode(Path::new("/")), before);
}

#[test]
fn what_sessions_take_on_disk_is_known_after_each_change() {
    let folder = Folder::new();
    let (talk, quota) = (Talk::tiny(), 1 << 40);
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap().within(quota);
    let check = |what: &str| {
        let mut bytes = 0;
        for name in names(folder.path()) {
            let path = folder.path().join(name);
            for file in if path.is_dir() { names(&path) } else { Vec::new() } {
                bytes += fs::metadata(path.join(file)).unwrap().len();
            }
        }
        assert_eq!(sessions.left().unwrap(), quota - bytes, "{what}");
    };
    check("nothing");
    let session = sessions.create("a", Some("Be brief.")).unwrap();
    check("a session");
    for text in ["One", "Two", "Three", "Four", "Five", "Six"] {
        talk.say(&session, text, 2);
        check(text);
    }
    session.set_system(None).unwrap();
    check("another system message");
    session.rewind(2).unwrap();
    check("a turn back");
    let branch = sessions.branch(&session, "b", 2).unwrap();
    check("a branch");
    talk.say(&branch, "So?", 2);
    check("a turn of it");
    drop(branch);
    sessions.delete("a").unwrap();
    check("without the first");
    sessions.delete("b").unwrap();
    check("without both");
}

#[cfg(unix)]
#[test]
fn p_lock_fifo_hangs_a_lock_that_is_no_file_is_an_error_at_once() {
    let folder = Folder::new();
    talked(&folder);
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    let lock = folder.path().join(".a.lock");
    let fifo = Command::new("mkfifo").arg(&lock).status().unwrap();
    assert!(fifo.success());
    let error = told(&sessions.get("a").unwrap_err());
    assert!(error.contains(".a.lock") && error.contains("not a regular file"), "{error}");
    fs::remove_file(&lock).unwrap();
    let elsewhere = folder.path().join("elsewhere");
    std::os::unix::fs::symlink(&elsewhere, &lock).unwrap();
    let error = told(&sessions.get("a").unwrap_err());
    assert!(error.contains(".a.lock") && error.contains("found a link"), "{error}");
    assert!(!elsewhere.exists());

    // So with the file of a state.
    let path = folder.path().join("x.state");
    let lock = folder.path().join(".x.state.lock");
    Command::new("mkfifo").arg(&lock).status().unwrap();
    let error = told(&StateFile::lock(&path).unwrap_err());
    assert!(error.contains(".x.state.lock") && error.contains("not a regular file"), "{error}");
}

#[cfg(unix)]
#[test]
fn p_save_by_dangling_link_it_is_the_file_that_it_leads_to() {
    let folder = Folder::new();
    let (file, link) = (folder.path().join("trip.state"), folder.path().join("alias.state"));
    std::os::unix::fs::symlink("trip.state", &link).unwrap();
    let first = StateFile::lock(&file).unwrap();
    let error = told(&StateFile::lock(&link).unwrap_err());
    assert!(error.contains("another process is about to write"), "{error}");
    drop(first);
    // Through a folder that is a link, and relative to it.
    let aside = folder.path().join("aside");
    std::os::unix::fs::symlink(folder.path(), &aside).unwrap();
    let first = StateFile::lock(&link).unwrap();
    assert!(StateFile::lock(&aside.join("trip.state")).is_err());
    let talk = Talk::tiny();
    first.save(&talk.lm.model, &talk.lm.model.new_state().unwrap(), &About::new("tiny")).unwrap();
    assert!(file.is_file() && fs::symlink_metadata(&link).unwrap().is_symlink());
}

/// A log whose records do not say how the session stands, as they once did not.
fn without_stands(log: &[u8], ends: &[usize]) -> Vec<u8> {
    let mut old = Vec::new();
    for range in ends.windows(2) {
        let mut record: serde_json::Value =
            serde_json::from_slice(&log[range[0] + 8..range[1]]).unwrap();
        assert!(record.as_object_mut().unwrap().remove("stand").is_some());
        let json = record.to_string();
        let len = (json.len() as u32).to_le_bytes();
        let sum = crc32(&[&len[..], json.as_bytes()].concat()).to_le_bytes();
        old.extend([&len[..], &sum, json.as_bytes()].concat());
    }
    old
}

#[test]
fn a_log_that_does_not_say_how_it_ends_is_listed_all_the_same() {
    let folder = Folder::new();
    let (log, ends) = talked(&folder);
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    let list = sessions.list().unwrap();
    assert_eq!(list[0], sessions.get("a").unwrap().summary());
    let old = without_stands(&log, &ends);
    fs::write(folder.path().join("a/log"), &old).unwrap();
    assert_eq!(sessions.list().unwrap(), list);
    // Without them it has to be read whole, so what is damaged is not listed.
    fs::write(folder.path().join("a/log"), [&old[..20], b"~", &old[21..]].concat()).unwrap();
    assert!(sessions.list().unwrap().is_empty());
}

#[test]
fn records_that_contradict_each_other_are_errors() {
    let folder = Folder::new();
    let (log, ends) = talked(&folder);
    let path = folder.path().join("a/log");
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    // Whole records with other values in them.
    let with = |record: usize, from: &str, to: &str| {
        let json = json_of(&log, &ends, record);
        assert!(json.contains(from), "{json}");
        let record_of = encoded(&json.replacen(from, to, 1));
        [&log[..ends[record]], &record_of, &log[ends[record + 1]..]].concat()
    };
    for (bytes, words) in [
        (with(0, r#""version":1"#, r#""version":2"#), "version: expected 1, found 2"),
        (with(0, r#""type":"session""#, r#""type":"other""#), "none of a session"),
        (with(1, r#""id":1"#, r#""id":0"#), "turn 0: expected a number above 0"),
        (with(3, r#""id":2"#, r#""id":1"#), "turn 1: expected a number above 1"),
        (with(3, r#""parent":1"#, r#""parent":9"#), "parent 9 is not there"),
        (with(3, r#""base":0"#, r#""base":3"#), "base 3 is not before it"),
        (with(1, r#""position":"#, r#""position":1"#), "position: expected"),
        (with(1, r#""generated":2"#, r#""generated":99999"#), "generated: expected at most"),
        (with(4, r#""turn":1"#, r#""turn":7"#), "there is no turn 7"),
        (with(4, r#""turn":1"#, r#""turn":-1"#), "none of a session"),
        (log[ends[1]..].to_vec(), "first record of type `session`"),
        ([&log[..], &log[..ends[1]]].concat(), "a second record"),
    ] {
        fs::write(&path, bytes).unwrap();
        let error = sessions.get("a").unwrap_err().to_string();
        assert!(error.contains(words), "`{words}` is not in: {error}");
        assert!(error.contains("log"), "{error}");
    }
}

/// The JSON of a record.
fn json_of(log: &[u8], ends: &[usize], record: usize) -> String {
    String::from_utf8(log[ends[record] + 8..ends[record + 1]].to_vec()).unwrap()
}

/// A record with its length and its checksum.
fn encoded(json: &str) -> Vec<u8> {
    let len = (json.len() as u32).to_le_bytes();
    let sum = crc32(&[&len[..], json.as_bytes()].concat()).to_le_bytes();
    [&len[..], &sum, json.as_bytes()].concat()
}

#[test]
fn r_f12_times_that_run_backwards_or_are_no_times_change_nothing_but_what_is_shown() {
    let folder = Folder::new();
    let (log, ends) = talked(&folder);
    let path = folder.path().join("a/log");
    let talk = Talk::new("mamba2-tiny", &format!("{{{{ strftime_now('%Y') }}}}{TEMPLATE}"));
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    drop(sessions.create("b", None).unwrap());
    let plain = sessions.get("a").unwrap();
    let (turns, ids) = (plain.turns(), plain.ids());
    drop(plain);
    let at_1970 = [0; 6];
    let backwards = [5_000_000_000, 4_000_000_000, 3_000_000_000, 2, 1, 0];
    // The last second that the system can tell, and some that it cannot.
    let beyond = [i64::MAX as u64, u64::MAX, 0, i64::MAX as u64 + 1, 7, u64::MAX];
    for times in [at_1970, backwards, beyond] {
        let latest = *times.iter().max().unwrap();
        let mut other = Vec::new();
        for (record, time) in times.iter().enumerate() {
            let mut json: serde_json::Value =
                serde_json::from_str(&json_of(&log, &ends, record)).unwrap();
            assert!(json["created"].is_u64(), "{json}");
            json["created"] = (*time).into();
            if let Some(stand) = json.get_mut("stand") {
                (stand["created"], stand["updated"]) = (times[0].into(), latest.into());
            }
            other.extend(encoded(&json.to_string()));
        }
        fs::write(&path, other).unwrap();
        let session = sessions.get("a").unwrap();
        assert_eq!(session.ids(), ids);
        for (turn, before) in session.turns().iter().zip(&turns) {
            assert_eq!((turn.id, &turn.messages), (before.id, &before.messages));
        }
        let summary = session.summary();
        assert_eq!((summary.created, summary.updated), (times[0], latest));
        // The one that was used last first, as far as its times tell.
        let names: Vec<String> = sessions.list().unwrap().into_iter().map(|s| s.id).collect();
        assert_eq!(names, if latest == 0 { ["b", "a"] } else { ["a", "b"] });
        // The clock that the template is told is that of the session's beginning.
        let said = talk.say(&session, "Now", 1);
        assert_eq!(session.head(), said.turn);
        let branch = sessions.branch(&session, "c", said.turn).unwrap();
        assert_eq!(branch.turns().len(), 3);
        drop((session, branch));
        assert_eq!(sessions.get("a").unwrap().head(), said.turn);
        sessions.delete("c").unwrap();
    }
}

/// CRC-32 by its definition.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 * (crc & 1)))
    })
}

#[test]
#[ignore = "a process that another test starts; does nothing by itself"]
fn keeps_a_session_open_until_stdin_ends() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let session = Sessions::<Cpu>::open(Path::new(&folder)).unwrap().get("a").unwrap();
    println!("\nopen");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    drop(session);
}

#[test]
fn a_session_that_another_process_has_open_is_left_alone() {
    let folder = Folder::new();
    talked(&folder);
    let mut child = start("keeps_a_session_open_until_stdin_ends", folder.path());
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "open"));

    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    let busy = |error: SessionError| {
        assert!(matches!(error, SessionError::Busy { .. }), "{error}");
        assert!(error.to_string().contains("another process"));
    };
    busy(sessions.get("a").unwrap_err());
    busy(sessions.delete("a").unwrap_err());
    // To look at it needs no lock.
    assert_eq!(sessions.list().unwrap()[0].head, 3);
    assert!(matches!(sessions.create("a", None), Err(SessionError::Exists { .. })));

    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"go").unwrap();
    drop(stdin);
    assert!(child.wait().unwrap().success());
    assert_eq!(sessions.get("a").unwrap().head(), 3);
    assert_eq!(folder.names(), ["a"]);
}

/// Files may not grow above a limit, which fails every write beyond it as a full disk does.
#[test]
#[ignore = "a process that another test starts with a limit; does nothing by itself"]
fn says_something_once() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let talk = Talk::tiny();
    let session = Sessions::<Cpu>::open(Path::new(&folder)).unwrap().get("a").unwrap();
    let text = "long ".repeat(300);
    let prompt = session.prompt(&talk.assistant(), &[user(&text)], &Default::default()).unwrap();
    let state = talk.logits(&talk.lm.model.new_state().unwrap(), &[1]);
    assert!(!state.is_empty());
    let mut state = talk.lm.model.new_state().unwrap();
    crate::tiny::run(&talk.lm.model, &prompt.ids, &[prompt.ids.len()], &mut state);
    match session.commit(
        &talk.assistant(),
        prompt,
        assistant("x"),
        &talk.encode("x"),
        Some(state),
        false,
    ) {
        Ok(committed) => println!("\nsaid, state {}", committed.unsaved.is_none()),
        Err(SessionError::Other(error)) => println!("\nnot said: {}", message(&error)),
        Err(other) => println!("\n{other}"),
    }
}

#[cfg(unix)]
#[test]
fn r_f2_a_turn_that_finds_no_room_changes_nothing() {
    let folder = Folder::new();
    let (log, _) = talked(&folder);
    let run = |blocks: &str| {
        let limited = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
        let mut child = Command::new("sh");
        child.args(["-c", &limited]).arg(std::env::current_exe().unwrap());
        let test = test_name(module_path!(), "says_something_once");
        child.args(["--ignored", "--exact", &test, "--nocapture"]);
        child.env(FOLDER, folder.path());
        String::from_utf8(child.output().unwrap().stdout).unwrap()
    };
    // Blocks of 512 bytes: none for the log, and then enough for the log but not for a state.
    let told = run(&(log.len() / 512 + 1).to_string());
    assert!(told.contains("\nnot said: ") && told.contains("log"), "{told}");
    assert_eq!(fs::read(folder.path().join("a/log")).unwrap(), log);
    let told = run(&(log.len() / 512 + 20).to_string());
    assert!(told.contains("\nsaid, state false"), "{told}");
    let sessions = Sessions::<Cpu>::open(folder.path()).unwrap();
    let session = sessions.get("a").unwrap();
    assert_eq!((session.head(), session.state_file()), (4, None));
    let files = names(&folder.path().join("a"));
    assert_eq!(files, ["log", "state-1.safetensors", "state-2.safetensors", "state-3.safetensors"]);
    drop(session);
    assert!(run("unlimited").contains("\nsaid, state true"));
}
