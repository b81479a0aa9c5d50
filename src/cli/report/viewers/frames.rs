//! Places in the program as viewers want them: one frame by one.

use gpupool_events::Site;

/// One function on a stack, as every viewer has it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    pub file: String,
    /// 0 where there is none.
    pub line: u32,
    pub function: String,
}

impl Frame {
    /// A frame that is no code but says something.
    pub fn words(words: &str) -> Frame {
        Frame { file: String::new(), line: 0, function: words.to_owned() }
    }
}

/// The frames of a place, the innermost first: Python's where there are any, else native ones.
pub fn frames(site: &Site) -> Vec<Frame> {
    let python = site.python.iter().map(|frame| Frame {
        file: frame.file.clone(),
        line: frame.line,
        function: frame.function.clone(),
    });
    if !site.python.is_empty() {
        return python.collect();
    }
    let native = site.native.iter().map(|frame| Frame {
        file: frame.object.clone(),
        line: 0,
        function: frame.symbol.clone().unwrap_or_else(|| format!("{:#x}", frame.offset)),
    });
    native.collect()
}
