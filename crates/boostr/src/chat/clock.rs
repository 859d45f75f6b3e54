//! `strftime_now`: a moment as text, by the directives of C.
//!
//! Moments are in UTC: the library does not ask the system for its time zone.

use std::time::{SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

/// `time` by `format`; what is no directive stays as it is. A time before 1970 counts as the start of it.
pub(super) fn strftime(time: SystemTime, format: &str) -> String {
    let time = Timestamp::try_from(time.max(UNIX_EPOCH)).unwrap_or(Timestamp::MAX);
    let time = TimeZone::UTC.to_datetime(time);
    let mut text = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        text.push_str(&rest[..at]);
        // `%-d`: without zeros in front.
        let (letter, bare) = match rest[at + 1..].strip_prefix('-') {
            Some(after) => (after.chars().next(), true),
            None => (rest[at + 1..].chars().next(), false),
        };
        let end = at + 1 + usize::from(bare) + letter.map_or(0, char::len_utf8);
        match letter.and_then(|letter| directive(time, letter)) {
            Some(number) if bare && !number.is_empty() => {
                let zeros = number.len() - number.trim_start_matches('0').len();
                text.push_str(&number[zeros.min(number.len() - 1)..]);
            }
            Some(words) => text.push_str(&words),
            None => text.push_str(&rest[at..end]),
        }
        rest = &rest[end..];
    }
    text + rest
}

/// The text of `%c` for a letter c, in the C locale and as of a Python datetime without a time zone;
/// `None` for what is no directive there.
fn directive(time: DateTime, letter: char) -> Option<String> {
    let format = match letter {
        'z' | 'Z' => return Some(String::new()),
        // jiff's are of 1969 to 2068.
        'y' => return Some(format!("{:02}", time.year() % 100)),
        'D' | 'x' => return Some(format!("{}{:02}", time.strftime("%m/%d/"), time.year() % 100)),
        // jiff's has no zeros at the end.
        'f' => "%6f".to_owned(),
        'X' => "%T".to_owned(),
        'c' => "%a %b %e %H:%M:%S %Y".to_owned(),
        letter if "YCmBbhdejAawuUWHIMSpFTRnt%".contains(letter) => format!("%{letter}"),
        _ => return None,
    };
    Some(time.strftime(&format).to_string())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64, format: &str) -> String {
        strftime(UNIX_EPOCH + Duration::from_secs(seconds), format)
    }

    #[test]
    fn every_directive_is_as_in_python() {
        // datetime(2026, 3, 9, 14, 5, 7).strftime(..)
        let now = 1_773_065_107;
        for (format, text) in [
            ("%Y-%m-%d", "2026-03-09"),
            ("%d %b %Y", "09 Mar 2026"),
            ("%B %d, %Y", "March 09, 2026"),
            ("%-d/%-m/%y, %e", "9/3/26,  9"),
            ("%H:%M:%S.%f|%I:%M %p", "14:05:07.000000|02:05 PM"),
            ("%A %a %w %u %j %U %W", "Monday Mon 1 1 068 10 10"),
            ("%F %T %R %D %x %X", "2026-03-09 14:05:07 14:05 03/09/26 03/09/26 14:05:07"),
            ("%c|%C|%h|%n|%t|%%|%z%Z|", "Mon Mar  9 14:05:07 2026|20|Mar|\n|\t|%||"),
        ] {
            assert_eq!(at(now, format), text, "{format}");
        }
    }

    #[test]
    fn leap_days_and_the_ends_of_years_are_days_like_others() {
        for (seconds, text) in [
            (0, "1970-01-01 4 001"),
            (951_782_400, "2000-02-29 2 060"),
            (1_709_164_800, "2024-02-29 4 060"),
            (1_709_251_199, "2024-02-29 4 060"),
            (1_709_251_200, "2024-03-01 5 061"),
            (1_735_689_599, "2024-12-31 2 366"),
            (1_735_689_600, "2025-01-01 3 001"),
            (4_107_542_400, "2100-03-01 1 060"),
        ] {
            assert_eq!(at(seconds, "%Y-%m-%d %w %j"), text);
        }
    }

    #[test]
    fn what_is_no_directive_stays() {
        for format in ["%Q", "at %-é!", "%", "100 %-", "日%本"] {
            assert_eq!(at(0, format), format);
        }
    }
}
