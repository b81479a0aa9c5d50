//! `GPUPOOL_LOG`: a level, or directives such as `warn,gpupool::memory=debug`.
//!
//! A process under the library goes on with a setting that is none, since what is said changes nothing else; hence this is
//! no part of [`Settings::read`](crate::Settings::read). `gpupool run` and `gpupool doctor` refuse it.

/// What the filter takes for a level, in any case; numbers count from nothing to everything.
const LEVELS: [&str; 12] = ["off", "error", "warn", "info", "debug", "trace", "0", "1", "2", "3", "4", "5"];

/// What events and notes of the library are about: their targets, behind `gpupool::`. The library's log has no others (a program's own `tracing` is
/// another copy), so that a directive for a dependency matches nothing either.
pub const SUBJECTS: [&str; 14] = [
    "call", "context", "control", "finding", "ipc", "launches", "log", "memory", "metrics", "module", "once", "pinned",
    "process", "python",
];

/// Whether every directive can match something. The filter itself takes any word for the name of a target, so that `dbug`
/// would be accepted and show nothing. Directives on spans (`[…]`) cannot match either, as the library opens none.
///
/// # Errors
/// What is wrong, and what to write instead.
pub fn check_log(asked: &str) -> Result<(), String> {
    let Some(stranger) = asked.split(',').find(|directive| !names_something(directive)) else { return Ok(()) };
    if about(stranger).is_some() {
        return Err(format!(
            "{stranger:?} is about nothing that gpupool logs; behind gpupool:: write one of {}",
            SUBJECTS.join(", ")
        ));
    }
    Err(format!(
        "{stranger:?} is neither a level nor a part of gpupool; write error, warn, info, debug, trace, off or for example \
         gpupool::memory=debug"
    ))
}

/// The part that a directive is about, if it names one; `None` where it is no directive for gpupool.
fn about(directive: &str) -> Option<Option<&str>> {
    let is_level = |word: &str| LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    let is_part = |word: &str| {
        let rest = word.strip_prefix("gpupool");
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
            && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b':')
    };
    match directive.split_once('=') {
        None if is_level(directive) => Some(None),
        None => is_part(directive).then_some(Some(directive)),
        Some((part, level)) => (is_part(part) && is_level(level)).then_some(Some(part)),
    }
}

fn names_something(directive: &str) -> bool {
    // The filter takes what begins like that, so `gpupool` is all of them.
    let begins_like = |part: &str| SUBJECTS.iter().any(|subject| format!("gpupool::{subject}").starts_with(part));
    about(directive).is_some_and(|part| part.is_none_or(begins_like))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_parts_are_taken_and_all_else_is_refused() {
        for good in ["off", "Info", "5", "gpupool", "gpupool::memory", "warn,gpupool::memory=debug", "gpupool=OFF"] {
            assert_eq!(check_log(good), Ok(()), "{good}");
        }
        for bad in [
            "",
            "blah",
            "info,",
            "info, debug",
            "memory=debug",
            "gpupool=loud",
            "gpupool::memory=",
            "gpupools",
            "[[[",
            "gpupool[a]=info",
        ] {
            let reason = check_log(bad).unwrap_err();
            assert!(reason.contains("write error, warn"), "{bad}: {reason}");
        }
    }

    #[test]
    fn a_subject_that_there_is_none_of_is_refused_with_those_that_there_are() {
        for good in ["gpupool::mem=debug", "gpupool::=debug", "gpupool::launches=trace,gpupool::once=off"] {
            assert_eq!(check_log(good), Ok(()), "{good}");
        }
        for bad in ["gpupool::nonsense=trace", "info,gpupool::memory::map=debug", "gpupool::nonsense"] {
            let reason = check_log(bad).unwrap_err();
            assert!(reason.contains("call, context,") && reason.contains("memory, metrics,"), "{bad}: {reason}");
        }
        // Others than gpupool log nothing here.
        assert!(check_log("h2=trace").unwrap_err().contains("nor a part of gpupool"));
    }
}
