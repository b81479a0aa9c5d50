//! `GPUPOOL_LOG`: a level, or directives such as `warn,gpupool::memory=debug`.

use tracing::Level;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;

/// The filter asked for, or `default` with a complaint.
pub(super) fn parse(asked: Option<&str>, default: LevelFilter, complaints: &mut Vec<String>) -> EnvFilter {
    let Some(asked) = asked else {
        return plain(default);
    };
    let parsed = gpupool_config::check_log(asked).and_then(|()| {
        EnvFilter::builder().with_default_directive(default.into()).parse(asked).map_err(|error| error.to_string())
    });
    parsed.unwrap_or_else(|reason| {
        complaints.push(format!("GPUPOOL_LOG={asked}: {reason}. Using {default}"));
        plain(default)
    })
}

/// Everything down to `level`.
pub(super) fn plain(level: LevelFilter) -> EnvFilter {
    EnvFilter::builder().with_default_directive(level.into()).parse_lossy("")
}

/// Whether a filter lets events about memory through, at level debug and at level info.
pub(super) fn takes_of_memory(filter: EnvFilter) -> (bool, bool) {
    const TARGET: &str = "gpupool::memory";
    // By itself, and so without marks in the layers of the log.
    tracing::subscriber::with_default(tracing_subscriber::registry().with(filter), || {
        (tracing::enabled!(target: TARGET, Level::DEBUG), tracing::enabled!(target: TARGET, Level::INFO))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_of_memory_is_what_was_asked_for_it() {
        for (asked, expected) in [
            ("debug", (true, true)),
            ("info", (false, true)),
            ("warn", (false, false)),
            ("warn,gpupool::memory=debug", (true, true)),
            ("trace,gpupool::memory=info", (false, true)),
            ("gpupool::ipc=debug", (false, false)),
        ] {
            let mut complaints = Vec::new();
            assert_eq!(takes_of_memory(parse(Some(asked), LevelFilter::WARN, &mut complaints)), expected, "{asked}");
            assert!(complaints.is_empty(), "{complaints:?}");
        }
    }
}
