//! Logs of sessions: lines of which those that begin like JSON become whole records, and the others are bytes.

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use boostr::backend::Cpu;
use boostr::checkpoint::crc32;
use boostr::session::Sessions;

/// The folder of sessions of this process.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("boostr-fuzz-sessions-{}", std::process::id()));
    fs::create_dir_all(folder.join("a")).expect("a folder");
    folder
});

/// A record with its length and its checksum.
fn record(json: &str) -> Vec<u8> {
    let len = (json.len() as u32).to_le_bytes();
    let sum = crc32(crc32(0, &len), json.as_bytes()).to_le_bytes();
    [&len[..], &sum, json.as_bytes()].concat()
}

/// Reads a log, lists it, opens it to be written, and uses what was opened.
pub fn check(text: &str) {
    let pieces = text.split('\n').map(|line| match line.strip_prefix('{') {
        Some(_) => record(line),
        None => line.as_bytes().to_vec(),
    });
    let bytes = pieces.collect::<Vec<_>>().concat();
    let (log, torn) = (FOLDER.join("a/log"), FOLDER.join("a/log.torn"));
    let _ = fs::remove_file(&torn);
    fs::write(&log, &bytes).expect("written");
    let sessions = Sessions::<Cpu>::open(&FOLDER).expect("a folder");
    sessions.list().expect("a list");
    let listed = sessions.summary("a").ok();
    match sessions.get("a") {
        Ok(session) => {
            let summary = session.summary();
            assert!(listed.is_some(), "what opens is listed");
            assert_eq!(session.ids().len(), summary.position);
            assert!(session.turns().iter().all(|turn| turn.parent < turn.id));
            let _ = session.messages();
            // What is cut off is kept.
            let kept = [fs::read(&log).expect("a log"), fs::read(&torn).unwrap_or_default()];
            assert!(!kept[0].is_empty() && kept.concat() == bytes);
        }
        Err(_) => {
            assert_eq!(fs::read(&log).expect("a log"), bytes, "what is refused stays as it was");
            assert!(!torn.exists());
        }
    }
}
