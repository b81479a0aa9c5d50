//! What becomes of a request or a free, by what the pool said to it: decided here, done by who asks.

use crate::bypass::Bypass;
use gpupool_cuda::{CuResult, Device};
use gpupool_pool::{Allocation, Block, Free, FreeError, Place, Refusal};
use std::borrow::Cow;

/// What the program is told of a request, what is said of it, and whether the pool is asked again.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The program has a block.
    Made(Allocation),
    /// The context ended meanwhile, and what belonged to it was dropped: this came too late for that.
    TooLate,
    /// The program is told OUT_OF_MEMORY, once, and that was said.
    Refused,
    /// The program returns no cache, so it gains nothing by being refused: the pool is asked for memory anywhere.
    AskAgain,
    /// The pool is asked again once half-used chunks there have given so many bytes, or could not.
    HalfUsed {
        /// Where.
        place: Place,
        /// How many.
        bytes: u64,
    },
    /// The pool is asked again once others have given so many bytes of the GPU, or did not.
    Lacks {
        /// How many.
        bytes: u64,
    },
    /// The pool is asked again once more GPUs lend, or none does.
    Far {
        /// How many bytes no GPU that lends has room for.
        bytes: u64,
    },
    /// No place has room, which is said, and the driver is asked.
    Full {
        /// How many bytes there are too few of.
        missing: u64,
    },
    /// There was room and no block could be made, which is said with this text, and the driver is asked.
    NoBlock(Bypass, Cow<'static, str>),
    /// The driver is asked, and there is nothing to say.
    Left(Bypass),
}

/// What becomes of a request for memory on `device`. The rest is asked only where it matters: whether the request's context
/// `is_gone` once there is a block, and whether the program `is_refused_softly`, which takes a look at its libraries and says
/// that it was.
#[inline]
pub(super) fn of_request(
    from_pool: Result<Allocation, Refusal<CuResult>>,
    device: Device,
    is_gone: impl FnOnce() -> bool,
    is_refused_softly: impl FnOnce() -> bool,
) -> Outcome {
    match from_pool {
        Ok(_) if is_gone() => Outcome::TooLate,
        Ok(allocation) => Outcome::Made(allocation),
        Err(Refusal::Soft) if is_refused_softly() => Outcome::Refused,
        Err(Refusal::Soft) => Outcome::AskAgain,
        Err(Refusal::HalfUsed { place, bytes }) => Outcome::HalfUsed { place, bytes },
        Err(Refusal::Lacks { bytes }) => Outcome::Lacks { bytes },
        Err(Refusal::Far { bytes }) => Outcome::Far { bytes },
        Err(Refusal::Full { missing }) => Outcome::Full { missing },
        Err(Refusal::NotOurs) => Outcome::Left(Bypass::LeftOut(device)),
        // The process is exiting, and the driver is gone.
        Err(Refusal::Backend(gone @ CuResult::DEINITIALIZED)) => Outcome::Left(Bypass::Declined(gone)),
        Err(Refusal::AddressSpace) => {
            Outcome::NoBlock(Bypass::NoAddresses, "no address range of that size is left".into())
        }
        Err(Refusal::Backend(result)) => Outcome::NoBlock(Bypass::Declined(result), result.to_string().into()),
    }
}

/// The program's answer for a free that freed nothing.
#[inline]
pub(super) fn of_failed_free(error: FreeError<CuResult>) -> CuResult {
    match error {
        // Freed twice, or an inner pointer: the driver's answer for either.
        FreeError::NotABlock => CuResult::INVALID_VALUE,
        FreeError::Backend(result) => result,
    }
}

/// The context that a free has waited for.
#[inline]
pub(super) fn waited_for(outcome: &Result<Block, FreeError<CuResult>>, when: Free) -> Option<u64> {
    outcome.as_ref().ok().filter(|_| when == Free::Strict).map(|block| block.owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU_1: Device = Device::of(1);
    const BLOCK: Block = Block { address: 0x7000_0000, bytes: 4 << 20, home: 1, owner: 7, id: 3 };
    const ALLOCATION: Allocation = Allocation { block: BLOCK, reused: false, on_peers: 2 << 20, on_host: 0 };

    /// What becomes of a request whose context lives, of a program that is not asked about its caches.
    fn of(refusal: Refusal<CuResult>) -> Outcome {
        of_request(Err(refusal), GPU_1, || panic!("nothing was made"), || panic!("not refused softly"))
    }

    #[test]
    fn a_block_is_the_programs_while_its_context_lives() {
        let of = |is_gone| of_request(Ok(ALLOCATION), GPU_1, || is_gone, || panic!("not refused"));
        assert_eq!(of(false), Outcome::Made(ALLOCATION));
        assert_eq!(of(true), Outcome::TooLate, "it is taken back, and nobody hears of it");
    }

    #[test]
    fn a_program_that_caches_is_refused_and_any_other_asked_again_for() {
        let of = |caches| of_request(Err(Refusal::Soft), GPU_1, || panic!("nothing was made"), || caches);
        assert_eq!(of(true), Outcome::Refused);
        assert_eq!(of(false), Outcome::AskAgain);
    }

    #[test]
    fn a_full_pool_says_how_much_is_missing() {
        assert_eq!(of(Refusal::Full { missing: 5 << 20 }), Outcome::Full { missing: 5 << 20 });
    }

    #[test]
    fn a_block_for_which_there_was_room_is_said_to_have_failed() {
        let text = "no address range of that size is left".into();
        assert_eq!(of(Refusal::AddressSpace), Outcome::NoBlock(Bypass::NoAddresses, text));
        // The pool found room, and the driver has less than it said: no refusal of ours.
        for result in [CuResult::OUT_OF_MEMORY, CuResult::INVALID_VALUE, CuResult(719)] {
            let Outcome::NoBlock(Bypass::Declined(why), text) = of(Refusal::Backend(result)) else {
                panic!("{result} is not said");
            };
            assert_eq!((why, text), (result, result.to_string().into()));
        }
    }

    #[test]
    fn what_is_no_failure_is_left_to_the_driver_without_a_word() {
        assert_eq!(of(Refusal::NotOurs), Outcome::Left(Bypass::LeftOut(GPU_1)));
        let gone = CuResult::DEINITIALIZED;
        assert_eq!(of(Refusal::Backend(gone)), Outcome::Left(Bypass::Declined(gone)), "the process is exiting");
    }

    #[test]
    fn a_free_that_fails_answers_as_the_driver_does() {
        assert_eq!(of_failed_free(FreeError::NotABlock), CuResult::INVALID_VALUE);
        // A sticky error of the wait: the program sees it as it is.
        for result in [CuResult(700), CuResult(719), CuResult::DEINITIALIZED] {
            assert_eq!(of_failed_free(FreeError::Backend(result)), result);
        }
    }

    #[test]
    fn only_a_strict_free_that_freed_has_waited_for_the_owner() {
        assert_eq!(waited_for(&Ok(BLOCK), Free::Strict), Some(7));
        assert_eq!(waited_for(&Ok(BLOCK), Free::Lazy), None);
        assert_eq!(waited_for(&Err(FreeError::NotABlock), Free::Strict), None);
        assert_eq!(waited_for(&Err(FreeError::Backend(CuResult(700))), Free::Strict), None);
    }
}
