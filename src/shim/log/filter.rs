//! `GPUPOOL_LOG`: a level, or directives such as `warn,gpupool::memory=debug`.

use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

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
