//! What commands did to a program while it ran.

use serde_json::{Value, json};

use crate::report::model::{Commands, Suspension};

pub fn object(commands: &Commands) -> Value {
    let images: Vec<Value> = commands
        .images
        .iter()
        .map(|(folder, images)| {
            json!({
                "folder": folder, "times": images.times, "last": images.last, "fresh": images.fresh,
                "stopped_microseconds": images.stopped_microseconds,
                "longest_stop_microseconds": images.longest_stop_microseconds,
            })
        })
        .collect();
    let drains: Vec<Value> = commands
        .drains
        .iter()
        .map(|drain| {
            let word = if drain.is_drained { "drain" } else { "undrain" };
            json!({"seconds": drain.at, "device": drain.device, "what": word, "bytes": drain.bytes, "stayed": drain.stayed})
        })
        .collect();
    json!({
        "suspensions": commands.suspensions.iter().map(suspension).collect::<Vec<_>>(), "images": images, "drains": drains,
    })
}

fn suspension(suspension: &Suspension) -> Value {
    let resumed = suspension.resumed.as_ref().map(|(seconds, told)| json!({"seconds": seconds, "told": told}));
    json!({
        "seconds": suspension.at, "told": suspension.told, "resumed": resumed, "stood_still_seconds": suspension.seconds(),
    })
}
