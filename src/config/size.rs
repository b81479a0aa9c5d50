//! Sizes as people write them: `30GiB`, `1.5G`, `64MB`, `4096`.

use std::fmt;

/// Why a text is no size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeError {
    /// No number, or a unit nobody uses.
    NotASize,
    /// Below zero.
    Negative,
    /// Above 2^64 − 1 bytes.
    TooLarge,
    /// A fraction of a byte, such as `1.5` without a unit.
    Fraction,
}

impl fmt::Display for SizeError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            SizeError::NotASize => "not a size in bytes or with a unit (K, M, G, T, P, E, alone or with iB or B)",
            SizeError::Negative => "a size cannot be negative",
            SizeError::TooLarge => "larger than 16 EiB",
            SizeError::Fraction => "a fraction needs a unit",
        })
    }
}

/// Bytes per unit. A lone letter is binary, as in `nvidia-smi` and `ulimit`; `MB` is decimal, as on a data sheet.
/// Case is not looked at: nobody who writes `64gib` means something else.
const UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("b", 1),
    ("k", 1 << 10),
    ("kib", 1 << 10),
    ("kb", 1_000),
    ("m", 1 << 20),
    ("mib", 1 << 20),
    ("mb", 1_000_000),
    ("g", 1 << 30),
    ("gib", 1 << 30),
    ("gb", 1_000_000_000),
    ("t", 1 << 40),
    ("tib", 1 << 40),
    ("tb", 1_000_000_000_000),
    ("p", 1 << 50),
    ("pib", 1 << 50),
    ("pb", 1_000_000_000_000_000),
    ("e", 1 << 60),
    ("eib", 1 << 60),
    ("eb", 1_000_000_000_000_000_000),
];

/// Bytes that `text` stands for; a fraction is rounded down to whole bytes.
///
/// Decimal digits are multiplied out in integers: through `f64`, sizes above 2^53 bytes would not survive.
///
/// # Errors
/// [`SizeError`] says what is wrong with the text.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    if text.starts_with('-') {
        return Err(SizeError::Negative);
    }
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim_start().to_ascii_lowercase();
    let unit = UNITS.iter().find(|(name, _)| *name == unit).ok_or(SizeError::NotASize)?.1;

    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) if !fraction.is_empty() => (whole, fraction),
        Some(_) => return Err(SizeError::NotASize),
        None => (number, ""),
    };
    if whole.is_empty() || fraction.contains('.') {
        return Err(SizeError::NotASize);
    }
    if !fraction.is_empty() && unit == 1 {
        return Err(SizeError::Fraction);
    }
    // Only digits are left, so a failed parse means too many of them.
    let whole: u64 = whole.parse().map_err(|_| SizeError::TooLarge)?;
    // 18 digits of a TiB are far below a byte; more would overflow the power of ten below.
    let fraction = &fraction[..fraction.len().min(18)];
    let scale = 10u128.pow(fraction.len() as u32);
    let part: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| SizeError::NotASize)? };
    let bytes = u128::from(whole) * u128::from(unit) + part * u128::from(unit) / scale;
    u64::try_from(bytes).map_err(|_| SizeError::TooLarge)
}

/// `bytes` for people, in the largest binary unit that gives at least 1: `30.0 GiB`, `512 B`.
pub fn format_size(bytes: u64) -> String {
    const NAMES: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would print as "1024.0", so the step up happens where rounding does.
    while value >= 1023.95 && unit + 1 < NAMES.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", NAMES[unit])
}

/// `bytes` as a setting is written, not rounded: in the largest unit of which it is a whole number, `1900MiB`.
pub fn exact_size(bytes: u64) -> String {
    const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let whole = UNITS.iter().find(|(bits, _)| bytes > 0 && bytes.trailing_zeros() >= *bits);
    whole.map_or_else(|| bytes.to_string(), |(bits, name)| format!("{}{name}", bytes >> bits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_size_that_is_written_exactly_reads_as_the_same() {
        for text in ["0", "1", "1025", "1900MiB", "1536MiB", "20GiB", "4KiB", "3TiB"] {
            assert_eq!(exact_size(parse_size(text).unwrap()), text);
        }
        assert_eq!(exact_size(parse_size("1.5GiB").unwrap()), "1536MiB");
    }

    #[test]
    fn every_unit_has_its_size() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("7 B", 7),
            ("1K", 1024),
            ("1kB", 1000),
            ("1KiB", 1024),
            ("2M", 2 << 20),
            ("2MB", 2_000_000),
            ("2MiB", 2 << 20),
            ("1.5GiB", 3 << 29),
            ("0.5 g", 1 << 29),
            ("80GB", 80_000_000_000),
            ("1TiB", 1 << 40),
            ("1T", 1 << 40),
            ("18446744073709551615", u64::MAX),
            (" 64MiB ", 64 << 20),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_says_why() {
        for (text, error) in [
            ("", SizeError::NotASize),
            ("GiB", SizeError::NotASize),
            ("70XB", SizeError::NotASize),
            ("1e9", SizeError::NotASize),
            ("1.", SizeError::NotASize),
            (".5GiB", SizeError::NotASize),
            ("1.2.3GiB", SizeError::NotASize),
            ("0x10", SizeError::NotASize),
            ("+1", SizeError::NotASize),
            ("-1GiB", SizeError::Negative),
            ("1.5", SizeError::Fraction),
            ("18446744073709551616", SizeError::TooLarge),
            ("16777216TiB", SizeError::TooLarge),
            ("99999999999999999999999999GiB", SizeError::TooLarge),
        ] {
            assert_eq!(parse_size(text), Err(error), "{text}");
        }
    }

    #[test]
    fn people_read_round_numbers() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (30 << 30, "30.0 GiB"),
            (100 << 40, "100.0 TiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(format_size(bytes), text);
        }
    }

    proptest! {
        #[test]
        fn plain_bytes_survive(bytes: u64) {
            prop_assert_eq!(parse_size(&bytes.to_string()), Ok(bytes));
        }

        #[test]
        fn a_whole_number_of_any_unit_survives(count in 0u64..16_000_000, unit in 0..UNITS.len()) {
            let (name, bytes) = UNITS[unit];
            let size = count.checked_mul(bytes).ok_or(SizeError::TooLarge);
            prop_assert_eq!(parse_size(&format!("{count}{name}")), size);
            prop_assert_eq!(parse_size(&format!("{count} {}", name.to_uppercase())), size);
        }

        #[test]
        fn what_people_read_is_a_size_again_and_at_most_half_a_tenth_off(bytes in 0u64..1 << 60) {
            let shown = format_size(bytes);
            let again = parse_size(&shown).unwrap();
            let unit = parse_size(&format!("1{}", shown.split(' ').nth(1).unwrap())).unwrap();
            prop_assert!(again.abs_diff(bytes) <= unit / 20 + 1, "{bytes} shown as {shown} read as {again}");
        }

        #[test]
        fn no_text_makes_it_panic(text in ".*") {
            let _ = parse_size(&text);
        }
    }
}
