//! Which settings would have made room for a request that was refused. Pure: told of the places as they were, and of the settings.

use gpupool_config::{Devices, FarLimit, Mode, Move, Settings};
use gpupool_events::{PlaceAtRefusal, Remedy};
use gpupool_lending::CONTEXT;

/// Words of [`PlaceAtRefusal::out`].
pub const NOT_LISTED: &str = "not listed";
pub const ANOTHERS: &str = "another rank's";
pub const OUT_OF_REACH: &str = "out of reach";
pub const NOT_LENT: &str = "not lent";
pub const TOO_LARGE: &str = "too large";
pub const DRAINED: &str = "drained";

const MIB: u64 = 1 << 20;

/// The request.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Bytes.
    pub bytes: u64,
    /// Bytes of the largest request that there was room for; of a handle, on the GPUs.
    pub fits: u64,
    /// The same of a handle on the host, which has no part of it but all; else as [`Asked::fits`].
    pub fits_on_host: u64,
    /// `GPUPOOL_FAR_LIMIT` refused it.
    pub is_far: bool,
}

/// Those that would have helped: first those that would have been enough alone.
pub fn remedies(asked: Asked, places: &[PlaceAtRefusal], settings: &Settings) -> Vec<Remedy> {
    let short = asked.bytes.saturating_sub(asked.fits);
    let short_on_host = asked.bytes.saturating_sub(asked.fits_on_host);
    let remedy = |setting: &str, value: String, gain: u64, note: &str| Remedy {
        setting: setting.to_owned(),
        value,
        gain,
        enough: gain >= short,
        note: note.to_owned(),
    };
    if settings.mode == Mode::Trace {
        let room = places.iter().filter_map(|place| place.free).fold(0, u64::saturating_add);
        return vec![remedy("GPUPOOL_MODE", "pool".to_owned(), room, "in mode trace the driver alone serves")];
    }
    if asked.is_far {
        let share = settings.far_limit.map_or(0, |limit| limit.share);
        let value = FarLimit { share, refuses: false }.to_string();
        let note = "the request was refused because far memory cost too much of the time, not for want of room";
        return vec![Remedy { enough: true, ..remedy("GPUPOOL_FAR_LIMIT", value, asked.bytes, note) }];
    }
    let lent = || places.iter().filter(|place| place.out.is_none());
    let gpus = || lent().filter(|place| place.total.is_some());
    let mut found = Vec::new();

    if settings.limit.is_set() {
        let raised: Vec<(&PlaceAtRefusal, u64)> =
            gpus().map(|place| (place, beyond_limit(place))).filter(|(_, gain)| *gain > 0).collect();
        let value = raised.iter().map(|(place, gain)| Some(format!("{}:{}", number(place)?, size(place.limit + gain))));
        let gain = raised.iter().map(|(_, gain)| gain).sum();
        found.push(remedy(
            "GPUPOOL_LIMIT",
            value.flatten().collect::<Vec<_>>().join(","),
            gain,
            "the limit kept memory from being used that was free",
        ));
    }
    let left_out = || places.iter().filter(|place| matches!(place.out.as_deref(), Some(NOT_LISTED | ANOTHERS)));
    let gain = left_out().map(|place| place.free.unwrap_or(0).saturating_sub(place.kept_free())).sum();
    let mut all: Vec<u32> = gpus().chain(left_out()).filter_map(number).collect();
    all.sort_unstable();
    let all = all.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let note = match settings.devices {
        Devices::Auto => {
            "the process is one rank of several, which keep to their own GPU; others of the job may want that memory"
        }
        Devices::List(_) => "those GPUs do not lend",
    };
    found.push(remedy("GPUPOOL_DEVICES", all, gain, note));

    let drained = || places.iter().filter(|place| place.out.as_deref() == Some(DRAINED));
    let gain = drained().map(|place| place.free.unwrap_or(0).saturating_sub(place.kept_free())).sum();
    let mut numbers = drained().filter_map(number).map(|gpu| gpu.to_string());
    found.push(remedy(
        "gpupool undrain",
        numbers.next().into_iter().chain(numbers.map(|gpu| format!("; gpupool undrain {gpu}"))).collect(),
        gain,
        "nothing goes to a drained GPU until that is taken back",
    ));

    let reserve = gpus().map(|place| place.reserve).max().unwrap_or(0);
    let gain = if settings.limit.is_set() {
        0
    } else {
        // What is kept for somebody's context stays free whatever the reserve.
        let gain = |place: &PlaceAtRefusal| {
            let still_kept = CONTEXT.min(place.reserve).max(place.for_context);
            place.kept_free().min(place.free.unwrap_or(0)).saturating_sub(still_kept)
        };
        gpus().map(gain).sum()
    };
    found.push(remedy(
        "GPUPOOL_RESERVE",
        size(reserve.min(CONTEXT)),
        gain,
        "less room for contexts of other programs and for what the driver makes by itself",
    ));

    if settings.moving == Move::Off && short == 0 {
        // There is room, in pieces that no block can have as they are.
        let gain = lent().map(|place| place.held.saturating_sub(place.used)).sum();
        found.push(remedy(
            "GPUPOOL_MOVE",
            "auto".to_owned(),
            gain,
            "freed parts of chunks in use are put together for a request",
        ));
    }

    let hosts = || {
        places.iter().filter(|place| place.total.is_none() && place.out.as_deref().is_none_or(|out| out == NOT_LENT))
    };
    let gain: u64 = hosts().map(beyond_limit).sum();
    // What would have been enough, and a little: the rest of the host is for others.
    let gain = gain.min((short_on_host + short_on_host / 8).next_multiple_of(1 << 28));
    let value = hosts().map(|place| place.limit).sum::<u64>() + gain;
    let note = "memory of the host is read over PCIe, many times more slowly than a GPU's";
    found.push(Remedy { enough: gain >= short_on_host, ..remedy("GPUPOOL_HOST_LIMIT", size(value), gain, note) });

    found.retain(|remedy| remedy.gain > 0);
    found.sort_by_key(|remedy| !remedy.enough);
    found
}

/// What a place could have given beyond its limit: what is free there, and what the pool holds there unused, less what the limit allows.
fn beyond_limit(place: &PlaceAtRefusal) -> u64 {
    let idle = place.held.saturating_sub(place.used);
    let free = place.free.unwrap_or(0).saturating_sub(place.kept_free());
    (free + idle).saturating_sub(place.room)
}

/// The GPU's number.
fn number(place: &PlaceAtRefusal) -> Option<u32> {
    place.place.strip_prefix("gpu")?.parse().ok()
}

/// As a setting takes it: whole MiB, rounded down.
fn size(bytes: u64) -> String {
    match bytes {
        gib if gib > 0 && gib.is_multiple_of(1 << 30) => format!("{}GiB", gib >> 30),
        bytes => format!("{}MiB", bytes / MIB),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_config::Limits;

    const GIB: u64 = 1 << 30;

    fn gpu(number: u32, free: u64) -> PlaceAtRefusal {
        PlaceAtRefusal {
            place: format!("gpu{number}"),
            total: Some(32 * GIB),
            limit: 31 * GIB,
            reserve: GIB,
            free: Some(free),
            ..PlaceAtRefusal::default()
        }
    }

    fn host(limit: u64, free: u64) -> PlaceAtRefusal {
        let out = (limit == 0).then(|| NOT_LENT.to_owned());
        PlaceAtRefusal { place: "host0".to_owned(), limit, free: Some(free), out, ..PlaceAtRefusal::default() }
    }

    fn told(asked: Asked, places: &[PlaceAtRefusal], settings: &Settings) -> Vec<(String, String, u64, bool)> {
        let found = remedies(asked, places, settings).into_iter();
        found.map(|remedy| (remedy.setting, remedy.value, remedy.gain / GIB, remedy.enough)).collect()
    }

    fn asked(bytes: u64, fits: u64) -> Asked {
        Asked { bytes: bytes * GIB, fits: fits * GIB, fits_on_host: fits * GIB, is_far: false }
    }

    #[test]
    fn a_limit_below_what_is_free_comes_first_if_it_is_enough() {
        let settings = Settings { limit: Limits::Every(10 * GIB), host_limit: Some(0), ..Settings::default() };
        let full = PlaceAtRefusal { limit: 10 * GIB, held: 10 * GIB, used: 10 * GIB, ..gpu(0, 22 * GIB) };
        let places = [full, host(0, 8 * GIB)];
        let found = told(asked(12, 0), &places, &settings);
        assert_eq!(found[0], ("GPUPOOL_LIMIT".to_owned(), "0:31GiB".to_owned(), 21, true));
        assert_eq!(found[1], ("GPUPOOL_HOST_LIMIT".to_owned(), "8GiB".to_owned(), 8, false));
        let roomy = told(asked(7, 4), &[host(4 * GIB, 300 * GIB)], &settings);
        assert_eq!(roomy[0].1, "7680MiB", "what would have been enough, and no more of the host than that");
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn what_is_not_enough_alone_is_told_behind_what_is() {
        let settings = Settings { devices: Devices::List(vec![0]), ..Settings::default() };
        let idle = PlaceAtRefusal { out: Some(NOT_LISTED.to_owned()), ..gpu(1, 31 * GIB) };
        let found = told(asked(20, 2), &[gpu(0, GIB), idle, host(4 * GIB, 4 * GIB + (3 << 28))], &settings);
        assert_eq!(found[0], ("GPUPOOL_DEVICES".to_owned(), "0,1".to_owned(), 30, true));
        assert!(found[1..].iter().all(|(.., enough)| !enough), "{found:?}");
    }

    /// What a GPU keeps free for somebody's context no setting makes room of: with the reserve alone reckoned, each of these would be said to be enough.
    #[test]
    fn what_is_kept_for_a_context_is_nobodys_room() {
        let lent = |free| PlaceAtRefusal { reserve: GIB / 4, for_context: 2 * GIB, ..gpu(1, free) };
        let settings = Settings { limit: Limits::Every(GIB), ..Settings::default() };
        let full = PlaceAtRefusal { limit: GIB, held: GIB, used: GIB, ..lent(6 * GIB) };
        let found = told(asked(5, 0), &[full], &settings);
        assert_eq!(found[0], ("GPUPOOL_LIMIT".to_owned(), "1:5GiB".to_owned(), 4, false));
        let settings = Settings { devices: Devices::List(vec![0]), ..Settings::default() };
        let idle = PlaceAtRefusal { out: Some(NOT_LISTED.to_owned()), ..lent(6 * GIB) };
        assert_eq!(told(asked(5, 0), &[gpu(0, GIB), idle], &settings)[0].2, 4);
        let reserved = PlaceAtRefusal { reserve: 3 * GIB, ..lent(3 * GIB) };
        let found = told(asked(2, 0), &[reserved], &Settings::default());
        assert_eq!(found, [("GPUPOOL_RESERVE".to_owned(), "523MiB".to_owned(), 1, false)]);
    }

    #[test]
    fn what_a_drain_keeps_from_use_is_had_by_taking_it_back() {
        let settings = Settings { host_limit: Some(0), ..Settings::default() };
        let drained = |number| PlaceAtRefusal { out: Some(DRAINED.to_owned()), limit: 0, ..gpu(number, 31 * GIB) };
        let found = told(asked(20, 2), &[gpu(0, GIB), drained(1), host(0, 64 * GIB)], &settings);
        assert_eq!(found[0], ("gpupool undrain".to_owned(), "1".to_owned(), 30, true));
        assert_eq!(found[1].0, "GPUPOOL_HOST_LIMIT");
        let found = told(asked(50, 2), &[gpu(0, GIB), drained(1), drained(2)], &settings);
        assert_eq!(found[0], ("gpupool undrain".to_owned(), "1; gpupool undrain 2".to_owned(), 60, true));
    }

    /// The host has no part of a handle, so that it has to have room for all of it.
    #[test]
    fn a_handle_lies_on_the_host_whole() {
        let handle = Asked { fits_on_host: 2 * GIB, ..asked(8, 5) };
        let of = |free: u64| PlaceAtRefusal { room: 2 * GIB, ..host(2 * GIB, free * GIB) };
        let found = |host: PlaceAtRefusal| told(handle, &[gpu(0, 0), host], &Settings::default());
        assert_eq!(found(of(64)), [("GPUPOOL_HOST_LIMIT".to_owned(), "8960MiB".to_owned(), 6, true)]);
        assert_eq!(found(of(6)), [("GPUPOOL_HOST_LIMIT".to_owned(), "6GiB".to_owned(), 4, false)]);
        assert_eq!(found(PlaceAtRefusal { out: Some(TOO_LARGE.to_owned()), ..of(64) }), []);
    }

    #[test]
    fn where_there_was_room_in_pieces_only_moving_helps() {
        let half = PlaceAtRefusal { held: 31 * GIB, used: 20 * GIB, room: 11 * GIB, ..gpu(0, 0) };
        let found = told(asked(8, 11), &[half], &Settings::default());
        assert_eq!(found, [("GPUPOOL_MOVE".to_owned(), "auto".to_owned(), 11, true)]);
    }

    #[test]
    fn nothing_is_promised_that_is_not_there() {
        let full = PlaceAtRefusal { held: 31 * GIB, used: 31 * GIB, others: Some(GIB), ..gpu(0, 0) };
        assert_eq!(told(asked(8, 0), &[full, host(GIB, 0)], &Settings::default()), []);
        let settings = Settings { far_limit: Some(FarLimit { share: 200, refuses: true }), ..Settings::default() };
        let far = Asked { is_far: true, ..asked(8, 8) };
        assert_eq!(told(far, &[], &settings), [("GPUPOOL_FAR_LIMIT".to_owned(), "20%".to_owned(), 8, true)]);
    }
}
