//! From an instruction to its line: the two formats of `co_linetable`.

/// What a table says of one instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// `None` for instructions that the compiler made without a line.
    pub line: Option<u32>,
    /// The answer depends on the first line and on this many bytes from the beginning of the table, on nothing else.
    pub used: usize,
}

/// 3.10: pairs of bytes, how many bytes of code, and by how many lines they are after the last ones; -128: no line.
/// `at` is an offset in bytes. `None` when the table ends before `at` or is broken.
pub fn in_pairs(table: &[u8], first_line: i32, at: usize) -> Option<Found> {
    let (mut line, mut end) = (first_line, 0);
    for (index, pair) in table.chunks_exact(2).enumerate() {
        end += usize::from(pair[0]);
        let delta = pair[1].cast_signed();
        if delta != i8::MIN {
            line = line.checked_add(i32::from(delta))?;
        }
        if at < end {
            let line = if delta == i8::MIN { None } else { u32::try_from(line).ok() };
            return Some(Found { line, used: 2 * (index + 1) });
        }
    }
    None
}

/// Since 3.11: entries of a head byte (its top bit set, a kind, a length in code units) and what the kind needs to say
/// the line and columns. `at` is in code units of two bytes. `None` when the table ends before `at` or is broken.
pub fn in_entries(table: &[u8], first_line: i32, at: usize) -> Option<Found> {
    const NO_LINE: u8 = 15;
    const LONG: u8 = 14;
    const NO_COLUMNS: u8 = 13;
    const ONE_LINE: std::ops::RangeInclusive<u8> = 10..=12;

    let (mut line, mut end) = (first_line, 0);
    let mut rest = table;
    loop {
        let head = take(&mut rest)?;
        let kind = (head >> 3) & 0xf;
        end += usize::from(head & 7) + 1;
        match kind {
            NO_LINE => {}
            LONG => {
                line = line.checked_add(signed(&mut rest)?)?;
                // The end's line, and both columns plus one.
                for _ in 0..3 {
                    number(&mut rest)?;
                }
            }
            NO_COLUMNS => line = line.checked_add(signed(&mut rest)?)?,
            kind if ONE_LINE.contains(&kind) => {
                line = line.checked_add(i32::from(kind - ONE_LINE.start()))?;
                take(&mut rest)?;
                take(&mut rest)?;
            }
            // On the same line, both columns in one byte.
            _ => {
                take(&mut rest)?;
            }
        }
        if at < end {
            let line = if kind == NO_LINE { None } else { u32::try_from(line).ok() };
            return Some(Found { line, used: table.len() - rest.len() });
        }
    }
}

fn take(rest: &mut &[u8]) -> Option<u8> {
    let (byte, behind) = rest.split_first()?;
    *rest = behind;
    Some(*byte)
}

/// Six bits a byte, the lowest first; the seventh bit says that more follow.
fn number(rest: &mut &[u8]) -> Option<u32> {
    let mut value = 0u32;
    for shift in (0..32).step_by(6) {
        let byte = take(rest)?;
        value |= u32::from(byte & 0x3f) << shift;
        if byte & 0x40 == 0 {
            return Some(value);
        }
    }
    None
}

/// The sign is the lowest bit.
fn signed(rest: &mut &[u8]) -> Option<i32> {
    let value = number(rest)?;
    let magnitude = i32::try_from(value >> 1).ok()?;
    Some(if value & 1 == 0 { magnitude } else { -magnitude })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(line: u32, used: usize) -> Option<Found> {
        Some(Found { line: Some(line), used })
    }

    #[test]
    fn pairs_add_up_and_may_go_back_or_have_no_line() {
        let table = [4, 1, 2, 0x80, 2, 0xff, 0, 100, 6, 2];
        assert_eq!(in_pairs(&table, 10, 0), found(11, 2));
        assert_eq!(in_pairs(&table, 10, 3), found(11, 2));
        assert_eq!(in_pairs(&table, 10, 4), Some(Found { line: None, used: 4 }));
        assert_eq!(in_pairs(&table, 10, 6), found(10, 6));
        assert_eq!(in_pairs(&table, 10, 8), found(112, 10), "an empty range still moves the line");
        assert_eq!(in_pairs(&table, 10, 14), None, "behind the end");
        assert_eq!(in_pairs(&[4, 0xf0], 3, 0), Some(Found { line: None, used: 2 }), "no line before the file's first");
    }

    #[test]
    fn entries_of_every_kind() {
        const HEAD: u8 = 0x80;
        let table = [
            // Two units on the same line, one unit a line on, one two lines back, one without a line.
            [HEAD | 1, 0x12].as_slice(),
            &[HEAD | 11 << 3, 1, 2],
            &[HEAD | 13 << 3, 0x05],
            &[HEAD | 15 << 3],
            // Eight units 164 lines on, with the end's line and both columns.
            &[HEAD | 14 << 3 | 7, 0x40 | 8, 5, 0, 1, 1],
        ]
        .concat();
        assert_eq!(in_entries(&table, 7, 1), found(7, 2));
        assert_eq!(in_entries(&table, 7, 2), found(8, 5));
        assert_eq!(in_entries(&table, 7, 3), found(6, 7));
        assert_eq!(in_entries(&table, 7, 4), Some(Found { line: None, used: 8 }));
        assert_eq!(in_entries(&table, 7, 12), found(6 + 164, table.len()));
        assert_eq!(in_entries(&table, 7, 13), None, "behind the end");
    }

    #[test]
    fn a_table_cut_anywhere_is_no_answer_rather_than_a_wrong_one() {
        let table = [0x80 | 14 << 3, 0x40 | 8, 5, 0, 1, 1];
        for cut in 0..table.len() {
            assert_eq!(in_entries(&table[..cut], 1, 0), None);
        }
        assert_eq!(
            in_entries(&[0x80 | 13 << 3, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f], 1, 0),
            None,
            "endless number"
        );
    }
}
