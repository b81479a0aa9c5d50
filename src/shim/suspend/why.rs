//! Why memory could not leave.

use super::kept::Refused;
use crate::backing::terms;
use crate::process;
use crate::serve::handles::by_hand::Unstored;
use crate::serve::memory::by_hand::Unplaced;
use gpupool_config::format_size;
use gpupool_cuda::CuResult;
use gpupool_pool::{MoveError, Place};

/// Why memory stayed: one word for each cause, and words for people, which name places and sizes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Why {
    pub cause: &'static str,
    pub text: String,
}

pub const FREED: &str = "freed";
/// No place has room, for several reasons or for one that is no setting.
const ROOM: &str = "room";
/// Of `GPUPOOL_HOST_LIMIT` alone.
const HOST_LIMIT: &str = "host_limit";
/// Of `GPUPOOL_LIMIT` alone.
const GPU_LIMIT: &str = "gpu_limit";
/// Of what the program made itself.
const OWN: &str = "own";
/// Of what was not there yet when all of it was copied.
const CAME: &str = "came";
/// Of what others know by its pages.
pub const PAGES: &str = "pages";
/// Of what was not tried any more, since the time was over.
pub const LATE: &str = "late";

impl Why {
    pub fn new(cause: &'static str, text: impl Into<String>) -> Self {
        Self { cause, text: text.into() }
    }

    pub fn full(place: Place, missing: u64) -> Self {
        Self::new(ROOM, format!("{place} lacks {} for it", format_size(missing)))
    }

    /// The limit of a place leaves no room for this, or so much less than it would take: the setting is named that says so, where one does.
    pub fn limited(place: Place, missing: Option<u64>) -> Self {
        let lacks = match missing {
            Some(missing) => format!("{place} lacks {} for it", format_size(missing)),
            None => format!("{place} has no room for it"),
        };
        match (place, terms::said_limit(place)) {
            (Place::Host(_), Some(limit)) => Self::new(
                HOST_LIMIT,
                format!("{lacks}: GPUPOOL_HOST_LIMIT allows {} of the host in all", format_size(limit)),
            ),
            (Place::Host(_), None) => Self::new(
                HOST_LIMIT,
                format!("{lacks}: without GPUPOOL_HOST_LIMIT, half of the memory is lent that the host had free"),
            ),
            (Place::Gpu(gpu), Some(limit)) => {
                Self::new(GPU_LIMIT, format!("{lacks}: GPUPOOL_LIMIT allows {} of GPU {gpu}", format_size(limit)))
            }
            _ => Self::new(ROOM, lacks),
        }
    }

    /// This of one place, and that of the next one: where none has room, all are named.
    pub fn and(self, next: Self) -> Self {
        let lacks_room = |why: &Self| [ROOM, HOST_LIMIT, GPU_LIMIT].contains(&why.cause);
        if !lacks_room(&self) || !lacks_room(&next) || self.text.contains(&next.text) {
            return next;
        }
        // One setting is named where it is the only one that would help.
        let cause = match (self.cause, next.cause) {
            (one, other) if one == other => one,
            (ROOM, setting) | (setting, ROOM) => setting,
            _ => ROOM,
        };
        Self::new(cause, format!("{}, and {}", self.text, next.text))
    }

    pub fn refused(Refused { error, is_limited, .. }: Refused, missing: u64) -> Self {
        let lacks = format_size(missing);
        match is_limited {
            true => Self::new(
                "addresses",
                format!("the process may map so little more (RLIMIT_AS, ulimit -v) that {lacks} for it are lacking"),
            ),
            false => Self::new(ROOM, format!("the system gives the process {lacks} less than that ({error})")),
        }
    }

    pub fn ill() -> Self {
        Self::new("ill", "it lies on a GPU that had a grave error")
    }

    /// Of what the program made itself and was to go to a place.
    pub fn own(unplaced: &Unplaced, place: Place) -> Self {
        match unplaced {
            // What one of several handles lacks is not what all of them do, which are told together.
            Unplaced::NoRoom => Self::limited(place, None),
            Unplaced::Refused(CuResult::OUT_OF_MEMORY) => {
                Self::new(ROOM, format!("the driver has no room for it on {place}"))
            }
            _ => Self::new(OWN, unplaced.in_words()),
        }
    }

    /// Of what the program made itself, and was not stored.
    pub fn unstored(why: Option<Unstored>) -> Self {
        match why {
            Some(Unstored::Stays) => Self::new(OWN, Unplaced::Stayed.in_words()),
            Some(Unstored::OutOfReach) => Self::new(
                "reach",
                "no GPU that the program works on reaches it where it lies, so that none can copy it",
            ),
            None => Self::came(),
        }
    }

    pub fn pages() -> Self {
        Self::new(
            PAGES,
            "others know it by its pages: another process has it open, a network card or a library has it registered, or gpupool_anchor holds \
             it",
        )
    }

    /// Of what is on a chunk with memory that goes elsewhere, or stays.
    pub fn shared() -> Self {
        Self::new(
            "shared",
            "it stands on one piece of memory together with what stays, and there is no room for both beside each other",
        )
    }

    /// Of what nobody but the driver can place.
    pub fn driver(text: &str) -> Self {
        Self::new("streams", text)
    }

    /// Of what the pool would have had.
    pub fn unpooled() -> Self {
        Self::new("unpooled", "the driver made it, as the pool had no room for it when it was asked for")
    }

    /// Of what the program asked for in a way that only the driver can serve.
    pub fn of_kind() -> Self {
        Self::new(
            "kind",
            "it is of a kind that only the driver can place: compressed, shared over a fabric, for sparse textures or for hardware decompression",
        )
    }

    /// Of what no GPU reaches as one whole.
    pub fn not_whole() -> Self {
        Self::new(
            "unmapped",
            "it is memory of cuMemCreate that the program has mapped nowhere, or not as one whole, so that no GPU can copy it",
        )
    }

    /// Of what a call was given that was under way when the program was stopped: nobody has copied it.
    pub fn came() -> Self {
        Self::new(CAME, "the program was given it while the rest left")
    }

    /// Of what is to go to other GPUs alone.
    pub fn no_peer() -> Self {
        let text = if terms::keeps_to_its_own() {
            "no other GPU lends to this program, which keeps to its own as one of several ranks on this host; gpupool set PID devices=0,1 has GPU 0 and 1 \
             lend to it, and --to host has the host take it"
        } else {
            "no other GPU can take it: those that the program does not work on do not lend to it or are out of its GPUs' reach; --to host has the host take \
             it"
        };
        Self::new("no_peer", text)
    }

    pub fn nowhere() -> Self {
        match process::settings().host_limit {
            Some(0) => {
                Self::new(HOST_LIMIT, "GPUPOOL_HOST_LIMIT=0 leaves it no place on the host, and there is no other one")
            }
            _ => Self::new("nowhere", "there is no other place that it may lie at"),
        }
    }
}

/// Memory that could not leave, and why.
pub type Stayed = Vec<(u64, Why)>;

/// Whether memory stayed only because it was not there yet when the rest was copied.
pub fn has_come(stayed: &Stayed) -> bool {
    stayed.iter().any(|(_, why)| why.cause == CAME)
}

/// Whether memory stayed only because there was no time for it.
pub fn is_late(why: &Why) -> bool {
    why.cause == LATE
}

pub fn in_words(error: &MoveError<CuResult>) -> Why {
    match error {
        MoveError::Full { place, missing } => Why::full(*place, *missing),
        MoveError::NoPlace | MoveError::OutOfReach => Why::nowhere(),
        MoveError::NotABlock => Why::new(FREED, "it was freed meanwhile"),
        MoveError::NotNow => Why::new("ending", "the process is ending, or a context of it"),
        MoveError::NotQuiet => Why::new("past", "work was submitted past gpupool"),
        MoveError::Backend(result) => Why::new("driver", format!("the driver answered {result}")),
    }
}
