//! Durations as people write them: `30s`, `5min`, `500ms`, `1.5h`.

use std::fmt;
use std::time::Duration;

/// Why a text is no duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DurationError {
    /// No number, or a unit nobody uses.
    NotADuration,
    /// A bare number other than 0: seconds to one reader, milliseconds to the next.
    NoUnit,
    /// Below zero.
    Negative,
    /// Above a thousand years.
    TooLong,
}

impl fmt::Display for DurationError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            DurationError::NotADuration => "not a duration in ms, s, min or h",
            DurationError::NoUnit => "a duration needs a unit: ms, s, min or h",
            DurationError::Negative => "a duration cannot be negative",
            DurationError::TooLong => "longer than a thousand years",
        })
    }
}

/// Milliseconds per unit. `m` is missing: it is a minute to one reader and a metre or a million to others.
const UNITS: &[(&str, u64)] = &[("ms", 1), ("s", 1_000), ("min", 60_000), ("h", 3_600_000)];

const LONGEST: u64 = 1000 * 366 * 24 * 3_600_000;

/// The duration that `text` stands for, in whole milliseconds; what is below one is cut off.
///
/// # Errors
/// [`DurationError`] says what is wrong with the text.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    let text = text.trim();
    if text.starts_with('-') {
        return Err(DurationError::Negative);
    }
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim_start().to_ascii_lowercase();
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.contains('.') {
        return Err(DurationError::NotADuration);
    }
    // Only digits are left, so a failed parse means too many of them.
    let whole: u64 = whole.parse().map_err(|_| DurationError::TooLong)?;
    // Nine digits of an hour are microseconds; more would overflow the product below.
    let fraction = &fraction[..fraction.len().min(9)];
    let part: u64 = fraction.parse().map_err(|_| DurationError::NotADuration)?;
    if unit.is_empty() {
        return if whole == 0 && part == 0 { Ok(Duration::ZERO) } else { Err(DurationError::NoUnit) };
    }
    let scale = UNITS.iter().find(|(name, _)| *name == unit).ok_or(DurationError::NotADuration)?.1;
    let part = part * scale / 10u64.pow(fraction.len() as u32);
    let sum = whole.checked_mul(scale).and_then(|ms| ms.checked_add(part)).filter(|ms| *ms <= LONGEST);
    sum.map(Duration::from_millis).ok_or(DurationError::TooLong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_unit_has_its_length() {
        for (text, ms) in [
            ("0", 0),
            ("0.0", 0),
            ("500ms", 500),
            ("30s", 30_000),
            (" 30 S ", 30_000),
            ("1.5s", 1_500),
            ("0.0005s", 0),
            ("5min", 300_000),
            ("0.25h", 900_000),
            ("1.000000000000000001h", 3_600_000),
            ("8784000h", LONGEST),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
    }

    #[test]
    fn what_is_no_duration_says_why() {
        for (text, error) in [
            ("", DurationError::NotADuration),
            ("s", DurationError::NotADuration),
            (".5s", DurationError::NotADuration),
            ("1.s", DurationError::NotADuration),
            ("1.2.3s", DurationError::NotADuration),
            ("5m", DurationError::NotADuration),
            ("3d", DurationError::NotADuration),
            ("1e3s", DurationError::NotADuration),
            ("30", DurationError::NoUnit),
            ("-1s", DurationError::Negative),
            ("8784001h", DurationError::TooLong),
            ("99999999999999999999s", DurationError::TooLong),
        ] {
            assert_eq!(parse_duration(text), Err(error), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[0-9.]{0,30}[a-z]{0,3}|.*") {
            let _ = parse_duration(&text);
        }
    }
}
