//! Python's pickle, as far as dictionaries, lists, strings and whole numbers need it (protocol 2).
//!
//! Not by a crate: those that write pickles build the value first and put down each string and each list as often as it occurs. A trace
//! names the same few stacks a hundred thousand times, and is written as it comes. PyTorch's viewer in the browser reads these opcodes.

use std::collections::HashMap;
use std::io::{self, Write};

/// Items of a list that are put down together: as many as Python does, since readers in JavaScript take them as arguments of one call.
const BATCH: usize = 1000;

/// Writes one value.
pub struct Pickle<W> {
    out: W,
    strings: HashMap<String, u32>,
    remembered: u32,
}

/// A list or dictionary that is being filled.
#[must_use = "a list ends with `end`"]
pub struct Items {
    count: usize,
    ends_with: u8,
}

impl<W: Write> Pickle<W> {
    /// Begins the value.
    pub fn new(mut out: W) -> io::Result<Self> {
        out.write_all(&[0x80, 2])?;
        Ok(Pickle { out, strings: HashMap::new(), remembered: 0 })
    }

    /// Ends it.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.write_all(b".")?;
        Ok(self.out)
    }

    /// Begins a dictionary: keys and values follow in turn, [`Pickle::key`] in front of each value.
    pub fn dictionary(&mut self) -> io::Result<Items> {
        self.out.write_all(b"}(")?;
        Ok(Items { count: 0, ends_with: b'u' })
    }

    /// Begins a list: its items follow, [`Pickle::item`] in front of each.
    pub fn list(&mut self) -> io::Result<Items> {
        self.out.write_all(b"](")?;
        Ok(Items { count: 0, ends_with: b'e' })
    }

    /// The next value of a dictionary is under this name.
    pub fn key(&mut self, items: &mut Items, name: &str) -> io::Result<()> {
        self.item(items)?;
        self.string(name)
    }

    /// Another item of a list follows.
    pub fn item(&mut self, items: &mut Items) -> io::Result<()> {
        if items.count == BATCH {
            self.out.write_all(&[items.ends_with, b'('])?;
            items.count = 0;
        }
        items.count += 1;
        Ok(())
    }

    /// The list or dictionary is complete.
    pub fn end(&mut self, items: Items) -> io::Result<()> {
        self.out.write_all(&[items.ends_with])
    }

    /// What was just completed gets a number, and [`Pickle::again`] puts it down another time.
    pub fn remember(&mut self) -> io::Result<u32> {
        let number = self.remembered;
        self.remembered += 1;
        self.with_number(b'r', number)?;
        Ok(number)
    }

    /// The very value of this number.
    pub fn again(&mut self, number: u32) -> io::Result<()> {
        self.with_number(b'j', number)
    }

    /// A string; the second time only its number.
    pub fn string(&mut self, text: &str) -> io::Result<()> {
        if let Some(number) = self.strings.get(text) {
            return self.again(*number);
        }
        // Longer ones than that are in no record.
        let length = u32::try_from(text.len()).map_err(io::Error::other)?;
        self.with_number(b'X', length)?;
        self.out.write_all(text.as_bytes())?;
        let number = self.remember()?;
        self.strings.insert(text.to_owned(), number);
        Ok(())
    }

    /// A whole number.
    pub fn number(&mut self, number: u64) -> io::Result<()> {
        match u8::try_from(number) {
            Ok(small) => self.out.write_all(&[b'K', small]),
            // A number of bytes, the highest bit being the sign.
            Err(_) => {
                let length = (64 - number.leading_zeros()) / 8 + 1;
                self.out.write_all(&[0x8a, length as u8])?;
                self.out.write_all(&u128::from(number).to_le_bytes()[..length as usize])
            }
        }
    }

    fn with_number(&mut self, code: u8, number: u32) -> io::Result<()> {
        self.out.write_all(&[code])?;
        self.out.write_all(&number.to_le_bytes())
    }
}
