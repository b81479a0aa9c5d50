//! Why memory could not leave.

use super::kept::Refused;
use crate::backing::terms;
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
/// Of what was not there yet when all of it was copied.
const CAME: &str = "came";
/// Of what was not tried any more, since the time was over.
pub const LATE: &str = "late";

impl Why {
    pub fn new(cause: &'static str, text: impl Into<String>) -> Self {
        Self { cause, text: text.into() }
    }

    pub fn full(place: Place, missing: u64) -> Self {
        Self::new("room", format!("{place} lacks {} for it", format_size(missing)))
    }

    /// This of one place, and that of the next one: where none has room, all are named.
    pub fn and(self, next: Self) -> Self {
        let lack_room = self.cause == "room" && next.cause == "room";
        if !lack_room || self.text.contains(&next.text) {
            return next;
        }
        Self::new("room", format!("{}, and {}", self.text, next.text))
    }

    pub fn refused(Refused { error, is_limited, .. }: Refused, missing: u64) -> Self {
        let lacks = format_size(missing);
        match is_limited {
            true => Self::new(
                "addresses",
                format!("the process may map so little more (RLIMIT_AS, ulimit -v) that {lacks} for it are lacking"),
            ),
            false => Self::new("room", format!("the system gives the process {lacks} less than that ({error})")),
        }
    }

    pub fn ill() -> Self {
        Self::new("ill", "it lies on a GPU that had a grave error")
    }

    pub fn own(unplaced: &Unplaced) -> Self {
        Self::new("own", unplaced.in_words())
    }

    pub fn pages() -> Self {
        Self::new(
            "pages",
            "others know it by its pages: another process has it open, a network card or a library has it registered, or gpupool_anchor holds \
             it",
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
            "of the GPUs that it does not work on none lends to this program and is in reach; --to host has the host take it"
        };
        Self::new("no_peer", text)
    }

    pub fn nowhere() -> Self {
        Self::new("nowhere", "there is no other place that it may lie at")
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
