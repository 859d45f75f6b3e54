//! `strftime_now`: a moment as text, by the directives of C.
//!
//! Moments are in UTC: the library does not ask the system for its time zone.

use std::time::{SystemTime, UNIX_EPOCH};

const DAY: u64 = 86_400;
const WEEKDAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A day of the Gregorian calendar and the time on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Moment {
    year: u64,
    /// From 1.
    month: u64,
    /// From 1.
    day: u64,
    /// Day of the year, from 1.
    yearday: u64,
    /// From 0, Sunday.
    weekday: u64,
    seconds: u64,
    micros: u32,
}

/// `time` by `format`; what is no directive stays as it is. A time before 1970 counts as the start of it.
pub(super) fn strftime(time: SystemTime, format: &str) -> String {
    let moment = Moment::of(time);
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
        match letter.and_then(|letter| moment.directive(letter)) {
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

impl Moment {
    fn of(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let days = since.as_secs() / DAY;
        // Years that start in March, in eras of 400: then the leap day is the last of its year.
        let shifted = days + 719_468;
        let (era, of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let from_march = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let fifth = (5 * from_march + 2) / 153;
        let day = from_march - (153 * fifth + 2) / 5 + 1;
        let month = if fifth < 10 { fifth + 3 } else { fifth - 9 };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
        Self {
            year,
            month,
            day,
            yearday: before + day + u64::from(is_leap && month > 2),
            weekday: (days + 4) % 7,
            seconds: since.as_secs() % DAY,
            micros: since.subsec_micros(),
        }
    }

    /// The text of `%c` for a letter c, in the C locale.
    fn directive(&self, letter: char) -> Option<String> {
        let Self { year, month, day, yearday, weekday, seconds, micros } = *self;
        let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        let hour12 = (hour + 11) % 12 + 1;
        let (weekday_name, month_name) = (WEEKDAYS[weekday as usize], MONTHS[month as usize - 1]);
        let several = |letters: &str| -> Option<String> {
            let parts = letters.chars().map(|c| match c {
                ' ' | '/' | ':' | '-' => Some(c.to_string()),
                c => self.directive(c),
            });
            parts.collect()
        };
        Some(match letter {
            'Y' => format!("{year:04}"),
            'C' => format!("{:02}", year / 100),
            'y' => format!("{:02}", year % 100),
            'm' => format!("{month:02}"),
            'B' => month_name.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'd' => format!("{day:02}"),
            'e' => format!("{day:2}"),
            'j' => format!("{yearday:03}"),
            'A' => weekday_name.to_owned(),
            'a' => weekday_name[..3].to_owned(),
            'w' => weekday.to_string(),
            'u' => ((weekday + 6) % 7 + 1).to_string(),
            'U' => format!("{:02}", (yearday + 6 - weekday) / 7),
            'W' => format!("{:02}", (yearday + 6 - (weekday + 6) % 7) / 7),
            'H' => format!("{hour:02}"),
            'I' => format!("{hour12:02}"),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'f' => format!("{micros:06}"),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            // As of a Python datetime without a time zone.
            'z' | 'Z' => String::new(),
            'F' => several("Y-m-d")?,
            'T' | 'X' => several("H:M:S")?,
            'R' => several("H:M")?,
            'D' | 'x' => several("m/d/y")?,
            'c' => several("a b e H:M:S Y")?,
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
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
