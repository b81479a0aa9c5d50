//! The warning that comes before a GPU overflows: a caller that caches is refused once, gives its cache back and asks again.

/// Whether such a caller will be, is being, or was told that its home GPU overflows.
///
/// There are three states and not two because the retry must be served whatever other threads do in between. A refusal
/// is *owed* an allocation until one goes off home (the retry did not fit) or an equally large one fits at home (the
/// caller's cache was given back).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SoftRefusal {
    /// The next overflow is refused.
    #[default]
    Armed,
    /// A block of so many bytes was refused.
    Owed {
        /// The bytes.
        bytes: u64,
    },
    /// An overflow was served.
    Spent,
}

impl SoftRefusal {
    /// Asked before a block of `bytes` overflows the GPU: whether the caller is to be told.
    pub fn refuse(&mut self, bytes: u64) -> bool {
        let armed = *self == Self::Armed;
        if armed {
            *self = Self::Owed { bytes };
        }
        armed
    }

    /// A block overflowed the GPU.
    pub fn overflowed(&mut self) {
        *self = Self::Spent;
    }

    /// Everything that had overflowed the GPU is gone, where that is known.
    pub fn all_gone(&mut self) {
        *self = Self::Armed;
    }

    /// A block of `bytes` was served at the GPU, and `room` is left there. The warning is armed again once a sixteenth of
    /// the `limit` is free, so that a program at the brink is not told at every request.
    pub fn served_at_home(&mut self, bytes: u64, limit: u64, room: u64) {
        let settled = match *self {
            Self::Armed => return,
            Self::Owed { bytes: owed } => bytes >= owed,
            Self::Spent => true,
        };
        if settled && room >= limit / 16 {
            *self = Self::Armed;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::SoftRefusal;

    #[test]
    fn it_is_made_once_until_the_gpu_has_room_again_or_nothing_is_elsewhere() {
        let mut soft = SoftRefusal::default();
        assert!(soft.refuse(10) && !soft.refuse(10), "the retry is served");
        soft.served_at_home(9, 160, 160);
        assert!(!soft.refuse(10), "a smaller block that fits is not the one that is owed");
        soft.served_at_home(10, 160, 9);
        assert!(!soft.refuse(10), "less than a sixteenth is free");
        soft.served_at_home(10, 160, 10);
        assert!(soft.refuse(10));
        soft.overflowed();
        assert!(!soft.refuse(10));
        soft.served_at_home(1, 160, 10);
        assert!(soft.refuse(10));
        soft.overflowed();
        soft.all_gone();
        assert!(soft.refuse(10));
    }
}
