//! `GPUPOOL_LOG`: a level, or directives such as `warn,gpupool::memory=debug`.

use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

/// The filter asked for, or `default` with a complaint.
pub(super) fn parse(asked: Option<&str>, default: LevelFilter, complaints: &mut Vec<String>) -> EnvFilter {
    let Some(asked) = asked else {
        return plain(default);
    };
    let parsed = match asked.split(',').find(|directive| !names_something(directive)) {
        Some(stranger) => Err(format!("{:?} is neither a level nor a part of gpupool", stranger.trim())),
        None => EnvFilter::builder().with_default_directive(default.into()).parse(asked).map_err(|e| e.to_string()),
    };
    parsed.unwrap_or_else(|reason| {
        complaints.push(format!(
            "GPUPOOL_LOG={asked}: {reason}; write error, warn, info, debug, trace, off or for example \
             gpupool::memory=debug. Using {default}"
        ));
        plain(default)
    })
}

/// Everything down to `level`.
pub(super) fn plain(level: LevelFilter) -> EnvFilter {
    EnvFilter::builder().with_default_directive(level.into()).parse_lossy("")
}

/// Whether a directive can ever match. `EnvFilter` takes any word for the name of a target, so that `dbug` would be
/// accepted and show nothing. Directives on spans (`[…]`) can not match either, as the library opens none; with one of
/// them the filter would also keep state per thread, which is gone by the time the exit summary is logged.
fn names_something(directive: &str) -> bool {
    let target = directive.trim().split('=').next().unwrap_or_default();
    target.parse::<LevelFilter>().is_ok() || (target.starts_with("gpupool") && !directive.contains('['))
}
