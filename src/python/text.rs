//! Python's strings as Rust's.

/// The longest text that is copied, in code points: no path is longer on Linux, and a name that is says nothing.
pub const LONGEST: usize = 4096;

/// The characters of a Python string, as they lie there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Raw<'a> {
    /// Bytes a code point: 1 (ASCII or Latin-1), 2 or 4.
    pub width: u8,
    pub bytes: &'a [u8],
    /// The string goes on behind these bytes.
    pub cut: bool,
}

impl Raw<'_> {
    /// Code points that are no characters (Python keeps undecodable bytes of file names as lone surrogates) become U+FFFD.
    pub fn decode(&self) -> String {
        let mut text = match self.width {
            1 if self.bytes.is_ascii() => String::from_utf8_lossy(self.bytes).into_owned(),
            1 => self.bytes.iter().copied().map(char::from).collect(),
            2 => self.bytes.as_chunks().0.iter().map(|pair| character(u16::from_ne_bytes(*pair).into())).collect(),
            _ => self.bytes.as_chunks().0.iter().map(|four| character(u32::from_ne_bytes(*four))).collect(),
        };
        if self.cut {
            text.push('…');
        }
        text
    }
}

fn character(code_point: u32) -> char {
    char::from_u32(code_point).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_is_decoded_and_lone_surrogates_are_replaced() {
        let decode = |width, bytes: &[u8]| Raw { width, bytes, cut: false }.decode();
        assert_eq!(decode(1, b"train.py"), "train.py");
        assert_eq!(decode(1, &[b'g', 0xfc]), "gü");
        let two: Vec<u8> = [0x8a13, 0xdc80, 0x7df4u16].iter().flat_map(|unit| unit.to_ne_bytes()).collect();
        assert_eq!(decode(2, &two), "訓\u{fffd}練");
        let four: Vec<u8> = [0x1f40d, 0x0011_0000u32].iter().flat_map(|unit| unit.to_ne_bytes()).collect();
        assert_eq!(decode(4, &four), "🐍\u{fffd}");
        assert_eq!(Raw { width: 1, bytes: b"long", cut: true }.decode(), "long…");
    }
}
