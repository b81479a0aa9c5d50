//! One thing that was looked at, and how it went.

use serde_json::Value;

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// As it should be.
    Fine,
    /// Something is less than it could be.
    Finding,
    /// The pool cannot work.
    Broken,
}

/// One thing that was looked at.
pub struct Check {
    /// A word: `driver`.
    pub name: &'static str,
    pub state: State,
    /// One sentence.
    pub words: String,
    /// What to do; there is one unless the state is fine.
    pub advice: Option<String>,
    /// Lines that belong to it, already as wide as they may be.
    pub below: Vec<String>,
    /// What was seen, for programs.
    pub facts: Value,
}

impl Check {
    /// A check with nothing to complain about.
    pub fn fine(name: &'static str, words: impl Into<String>) -> Check {
        let words = words.into();
        Check { name, state: State::Fine, words, advice: None, below: Vec::new(), facts: Value::Null }
    }

    /// Something that could be better, and how.
    pub fn finding(name: &'static str, words: impl Into<String>, advice: impl Into<String>) -> Check {
        Check { state: State::Finding, advice: Some(advice.into()), ..Check::fine(name, words) }
    }

    /// Something without which the pool cannot work, and what to do.
    pub fn broken(name: &'static str, words: impl Into<String>, advice: impl Into<String>) -> Check {
        Check { state: State::Broken, ..Check::finding(name, words, advice) }
    }

    /// With these lines below it.
    pub fn below(mut self, lines: Vec<String>) -> Check {
        self.below = lines;
        self
    }

    /// With these facts.
    pub fn facts(mut self, facts: Value) -> Check {
        self.facts = facts;
        self
    }
}

impl State {
    /// In JSON.
    pub fn word(self) -> &'static str {
        match self {
            State::Fine => "fine",
            State::Finding => "finding",
            State::Broken => "broken",
        }
    }

    /// The exit code of the command.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// In the text: the mark at the line's start and its colour.
    pub fn mark(self) -> (&'static str, &'static str) {
        match self {
            State::Fine => ("ok     ", "32"),
            State::Finding => ("look   ", "1;33"),
            State::Broken => ("BROKEN ", "1;31"),
        }
    }
}
