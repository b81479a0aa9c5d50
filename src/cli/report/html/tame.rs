//! Words of a log as a page shows them: without what would steer a terminal or turn the text around, and of a length that leaves room
//! for other words. That they are no HTML either is the templates' affair.

use serde_json::Value;

use crate::terminal::{clean, columns, shorten};

/// Columns of the longest word that is shown whole.
const LONGEST: usize = 400;
/// Bytes of the longest name of a field that is kept.
const LONGEST_NAME: usize = 200;

/// Every text in a value.
pub fn tame(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(tame_text(&text)),
        Value::Array(items) => items.into_iter().map(tame).collect(),
        // Names of fields stay as they are, since they are looked up by them; no place and no reason has a name so long.
        Value::Object(fields) => {
            let fields = fields.into_iter().filter(|(name, _)| name.len() <= LONGEST_NAME);
            Value::Object(fields.map(|(name, value)| (name, tame(value))).collect())
        }
        other => other,
    }
}

/// A text of the page, which may have several lines: names of fields are shown as well, and are as the log has them.
pub fn tame_lines(text: &str) -> String {
    text.split('\n').map(clean).collect::<Vec<_>>().join("\n")
}

/// One text.
pub fn tame_text(text: &str) -> String {
    // Not all of a text of a megabyte is looked at.
    let text: String = if text.len() > LONGEST * 8 {
        let (head, tail) = (text.chars().take(LONGEST), text.chars().rev().take(LONGEST));
        let tail: String = tail.collect::<Vec<_>>().into_iter().rev().collect();
        head.chain(['…']).chain(tail.chars()).collect()
    } else {
        text.to_owned()
    };
    let text = clean(&text);
    if columns(&text) > LONGEST { shorten(&text, LONGEST) } else { text }
}
