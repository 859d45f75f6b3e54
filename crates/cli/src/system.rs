//! What the system says about this machine and process. Linux says most; elsewhere it is `None`.

use std::fs;
use std::path::Path;

/// Instruction sets of this processor that matter here.
pub fn cpu_features() -> Vec<&'static str> {
    let mut features: Vec<&'static str> = Vec::new();
    macro_rules! look_for {
        ($detect:ident: $($name:tt)*) => {
            $(if std::arch::$detect!($name) { features.push($name); })*
        };
    }
    #[cfg(target_arch = "x86_64")]
    look_for!(is_x86_feature_detected: "sse4.2" "avx" "avx2" "fma" "f16c" "avx512f" "avx512bw"
        "avx512vnni" "avx512bf16" "avx512fp16");
    #[cfg(target_arch = "aarch64")]
    look_for!(is_aarch64_feature_detected: "neon" "fp16" "dotprod" "i8mm" "bf16" "sve" "sve2");
    features
}

/// Memory of the machine in bytes: all, and what could be taken now.
pub fn memory() -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    Some((kibibytes(&text, "MemTotal:")?, kibibytes(&text, "MemAvailable:")?))
}

/// The most memory this process has held, in bytes.
pub fn peak_memory() -> Option<u64> {
    kibibytes(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// The memory that this process holds, in bytes.
pub fn memory_in_use() -> Option<u64> {
    kibibytes(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// Whether this process was told to live on when its terminal is closed, where that is known.
#[cfg(unix)]
pub fn ignores_hangup() -> bool {
    const SIGHUP: u32 = 1;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (SIGHUP - 1) & 1 == 1)
}

/// The process that listens at a TCP port, by its number and its name, where the system tells.
pub fn listener_at(port: u16) -> Option<(u32, String)> {
    let sockets: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .flat_map(|table| inodes(&table, port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    let holds = |folder: &Path| {
        let files = fs::read_dir(folder.join("fd")).into_iter().flatten().flatten();
        let mut targets = files.filter_map(|file| fs::read_link(file.path()).ok());
        targets.any(|target| sockets.iter().any(|socket| target.as_os_str() == socket.as_str()))
    };
    if sockets.is_empty() {
        return None;
    }
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let process = entry.file_name().to_str()?.parse().ok()?;
        let folder = entry.path();
        let name = holds(&folder).then(|| fs::read(folder.join("comm")).unwrap_or_default())?;
        Some((process, String::from_utf8_lossy(&name).trim_end().escape_debug().to_string()))
    })
}

/// The inodes of sockets that listen at a port, by a table of the system.
fn inodes(table: &str, port: u16) -> Vec<u64> {
    const LISTENS: &str = "0A";
    let inode = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (local, state) = (fields.get(1)?, fields.get(3)?);
        let (_, of_line) = local.rsplit_once(':')?;
        let is_it = u16::from_str_radix(of_line, 16) == Ok(port) && *state == LISTENS;
        is_it.then(|| fields.get(9)?.parse().ok())?
    };
    table.lines().filter_map(inode).collect()
}

fn kibibytes(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    rest.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The control group's limit of memory in bytes, when there is one.
pub fn cgroup_memory() -> Option<u64> {
    let group = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = group.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let files = [
        format!("/sys/fs/cgroup/{own}/memory.max"),
        "/sys/fs/cgroup/memory.max".to_owned(),
        "/sys/fs/cgroup/memory/memory.limit_in_bytes".to_owned(),
    ];
    let limits = files.iter().filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok());
    // Version 1 writes "no limit" as the largest number of pages.
    limits.filter(|&limit: &u64| limit < 1 << 60).min()
}

/// Bytes for people: powers of ten, two digits at least.
pub fn bytes(count: u64) -> String {
    for (unit, size) in [("GB", 1e9), ("MB", 1e6), ("kB", 1e3)] {
        let value = count as f64 / size;
        if value >= 0.9995 {
            return if value < 99.95 {
                format!("{value:.1} {unit}")
            } else {
                format!("{value:.0} {unit}")
            };
        }
    }
    format!("{count} B")
}

/// A count for people: `1.15 M`, `130 M`, `2.70 B`.
pub fn count(count: u64) -> String {
    for (unit, size) in [("B", 1e9), ("M", 1e6), ("k", 1e3)] {
        let value = count as f64 / size;
        if value >= 0.9995 {
            return if value < 99.95 {
                format!("{value:.2} {unit}")
            } else {
                format!("{value:.0} {unit}")
            };
        }
    }
    count.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p_port_in_use_no_advice_who_listens_is_found() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                     0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 77 1 0\n   \
                     1: 0100007F:1F90 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 78 1 0\n";
        assert_eq!((inodes(table, 8080), inodes(table, 8081)), (vec![77], vec![]));
        let own = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let holder = listener_at(own.local_addr().unwrap().port());
        if cfg!(target_os = "linux") {
            assert_eq!(holder.unwrap().0, std::process::id());
        }
    }

    #[test]
    fn sizes_have_the_digits_that_matter() {
        assert_eq!(bytes(4_590_328), "4.6 MB");
        assert_eq!(bytes(999_999), "1.0 MB");
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(258_000_000_000), "258 GB");
        assert_eq!(count(1_146_632), "1.15 M");
        assert_eq!(count(129_000_000), "129 M");
        assert_eq!(count(7), "7");
    }

    #[test]
    fn fields_of_proc_files_are_read_in_bytes() {
        assert_eq!(kibibytes("A: 1 kB\nVmHWM:\t  2048 kB\n", "VmHWM:"), Some(2 << 20));
        assert_eq!(kibibytes("", "VmHWM:"), None);
    }
}
