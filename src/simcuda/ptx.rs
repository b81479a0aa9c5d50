//! What a PTX text declares: its kernels with their parameters, and its global variables. The code itself is not read.

/// A `.entry`, with offset and size of each parameter in the argument buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    pub params: Vec<(usize, usize)>,
}

/// A `.global` variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Global {
    pub name: String,
    pub bytes: usize,
    /// It has an initial value, which is not simulated.
    pub initialised: bool,
}

/// Whether this is PTX at all: every PTX text has to name its version.
pub fn is_ptx(text: &str) -> bool {
    text.contains(".version")
}

pub fn entries(text: &str) -> Vec<Entry> {
    without_comments(text)
        .split(".entry")
        .skip(1)
        .filter_map(|rest| {
            let rest = rest.trim_start();
            let name: String = rest.chars().take_while(|&c| is_name(c)).collect();
            let params = match rest[name.len()..].trim_start().strip_prefix('(') {
                Some(list) => layout(&list[..list.find(')')?])?,
                None => Vec::new(),
            };
            (!name.is_empty()).then_some(Entry { name, params })
        })
        .collect()
}

pub fn globals(text: &str) -> Vec<Global> {
    without_comments(text)
        .split(';')
        .filter_map(|statement| {
            // The statement may follow the end of a function body.
            let statement =
                statement.rsplit(['}', '{']).next().filter(|_| !statement.contains('=')).unwrap_or(statement);
            let (_, rest) = statement.split_once(".global")?;
            // Inside code, `.global` is part of an instruction (`ld.global.u32 %r1, …`).
            if !rest.starts_with(char::is_whitespace) {
                return None;
            }
            let (declaration, initialised) = match rest.split_once('=') {
                Some((declaration, _)) => (declaration, true),
                None => (rest, false),
            };
            let (_, element, name, count) = variable(declaration)?;
            Some(Global { name, bytes: element * count, initialised })
        })
        .collect()
}

fn layout(list: &str) -> Option<Vec<(usize, usize)>> {
    let mut end: usize = 0;
    let params = list.split(',').filter(|param| !param.trim().is_empty());
    params
        .map(|param| {
            let (align, element, _, count) = variable(param.trim().strip_prefix(".param")?)?;
            let offset = end.next_multiple_of(align);
            end = offset + element * count;
            Some((offset, element * count))
        })
        .collect()
}

/// `.align 8 .b8 name[16]` → alignment, element size, name, count.
fn variable(text: &str) -> Option<(usize, usize, String, usize)> {
    let mut align = 0;
    let mut element = 0;
    let mut words = text.split_whitespace();
    let name = loop {
        let word = words.next()?;
        match word {
            ".align" => align = words.next()?.parse().ok()?,
            ".ptr" | ".global" | ".const" | ".shared" | ".local" | ".volatile" => {}
            _ => match word.strip_prefix('.') {
                Some(kind) => {
                    element =
                        kind.trim_start_matches(|c: char| c.is_ascii_alphabetic()).parse::<usize>().ok()?.div_ceil(8)
                }
                None => break word.to_owned() + &words.collect::<String>(),
            },
        }
    };
    let (name, count) = match name.split_once('[') {
        Some((name, rest)) => (name.to_owned(), rest.strip_suffix(']')?.parse().ok()?),
        None => (name, 1),
    };
    (element > 0).then_some((if align == 0 { element } else { align }, element, name, count))
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '$'
}

fn without_comments(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        kept.push_str(&rest[..at]);
        rest = &rest[at..];
        let (end, skip) = match rest.as_bytes().get(1) {
            Some(b'/') => (rest.find('\n'), 0),
            Some(b'*') => (rest.find("*/"), 2),
            _ => {
                kept.push('/');
                (Some(1), 0)
            }
        };
        rest = end.map_or("", |end| &rest[end + skip..]);
    }
    kept + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
//  .entry commented(.param .u64 x)
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .b8 table[128];
.global .u32 counter = 7;
.visible .entry fill_u32(
    .param .u64 fill_u32_param_0, /* pointer */
    .param .u64 fill_u32_param_1,
    .param .u32 fill_u32_param_2
)
{ ld.global.u32 %r1, [%rd1]; ret; }
.entry none() { ret; }
.entry mixed(.param .u8 a, .param .align 8 .b8 b[20], .param .u64 .ptr .global .align 4 c) { ret; }
";

    #[test]
    fn parameters_are_laid_out_as_c_does() {
        let entries = entries(TEXT);
        let names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["fill_u32", "none", "mixed"]);
        assert_eq!(entries[0].params, [(0, 8), (8, 8), (16, 4)]);
        assert_eq!(entries[1].params, []);
        assert_eq!(entries[2].params[..2], [(0, 1), (8, 20)]);
    }

    #[test]
    fn globals_are_declarations_and_not_instructions() {
        let expected = [
            Global { name: "table".into(), bytes: 128, initialised: false },
            Global { name: "counter".into(), bytes: 4, initialised: true },
        ];
        assert_eq!(globals(TEXT), expected);
    }
}
