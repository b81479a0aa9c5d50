//! `GPUPOOL_LOG`: a level, or directives such as `warn,gpupool::memory=debug`.
//!
//! A process under the library goes on with a setting that is none, since what is said changes nothing else; hence this is
//! no part of [`Settings::read`](crate::Settings::read). `gpupool run` and `gpupool doctor` refuse it.

/// What the filter takes for a level, in any case; numbers count from nothing to everything.
const LEVELS: [&str; 12] = ["off", "error", "warn", "info", "debug", "trace", "0", "1", "2", "3", "4", "5"];

/// Whether every directive can match something. The filter itself takes any word for the name of a target, so that `dbug`
/// would be accepted and show nothing. Directives on spans (`[…]`) cannot match either, as the library opens none.
///
/// # Errors
/// What is wrong, and what to write instead.
pub fn check_log(asked: &str) -> Result<(), String> {
    match asked.split(',').find(|directive| !names_something(directive)) {
        None => Ok(()),
        Some(stranger) => Err(format!(
            "{:?} is neither a level nor a part of gpupool; write error, warn, info, debug, trace, off or for example \
             gpupool::memory=debug",
            stranger
        )),
    }
}

fn names_something(directive: &str) -> bool {
    let is_level = |word: &str| LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    let is_part = |word: &str| {
        let rest = word.strip_prefix("gpupool");
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
            && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b':')
    };
    match directive.split_once('=') {
        None => is_level(directive) || is_part(directive),
        Some((part, level)) => is_part(part) && is_level(level),
    }
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
}
