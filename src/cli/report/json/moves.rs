//! Memory that moved.

use serde_json::{Map, Value, json};

use crate::report::model::Moves;

/// What moved in a process.
pub fn object(moves: &Moves) -> Value {
    let swaps = moves.swaps.iter().map(|(why, sum)| {
        let sum = json!({
            "times": sum.times, "came": sum.came, "left": sum.left, "stayed": sum.stayed, "seconds": sum.seconds,
            "stopped": sum.stopped,
        });
        (why.clone(), sum)
    });
    let by_hand = moves
        .by_hand
        .iter()
        .map(|(place, sum)| (place.clone(), json!({"times": sum.times, "bytes": sum.bytes, "stayed": sum.stayed})));
    let repacks = &moves.repacks;
    json!({
        "total": moves.total, "swaps": swaps.collect::<Map<_, _>>(), "by_hand": by_hand.collect::<Map<_, _>>(),
        "repacks": {
            "times": repacks.times, "freed": repacks.freed, "copied": repacks.copied, "seconds": repacks.seconds,
        },
        "stops": moves.stops,
    })
}
