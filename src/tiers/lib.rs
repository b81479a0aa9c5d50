//! What should lie near, and which swap is worth it now?
//!
//! A program whose memory does not fit on its GPU has some of it far: on another GPU or on the host, read over a link. This crate
//! decides, for one home GPU, what of it should change places with what. It is told of blocks, launches, copies and measured times,
//! and asked what to do; it knows no driver, reads no clock, moves nothing itself, and holds no `unsafe`. Where memory lies is asked
//! of [`Whereabouts`], what links and moves cost is in [`Links`], times are nanoseconds and sizes bytes throughout.
//!
//! # By which reasons
//! - **What a launch reads is known by its function.** Frameworks hand other memory out in each step: in PyTorch two of three launches of a
//!   training step have words that were never seen. So how far an operand reaches and how often it crosses the link is learnt for each
//!   pointer of a function and shape, over all its launches (`operands.rs`), and a cycle goes from wait to wait where the program waits
//!   regularly (`cycle.rs`).
//! - **What moves at once is planned at once.** Chunks come and go whole; a swap that leaves half of one behind pays for all of it.
//! - **What counts is reuse, not recency.** A kernel that reads each far byte once waits for as long as copying it would take; one
//!   that reads it thirty times waits thirty times as long. So a launch's time is measured now and then with its operands far and
//!   near, and the value of having a byte near is what its uses in a cycle would save. Before any measurement all is taken to be
//!   read once, which moves nothing on a cycle; what seems to be read more often is tried twice, and measured.
//! - **On a cycle a static choice is best** for all that is read once between two visits: a swap costs the link twice (in and out),
//!   a read once. Only a use, or several until the victim's next, that saves more than the swap and the victim's own loss is worth
//!   a swap in the middle of a cycle; the victim is then what the cycle needs last.
//! - **A stop is made for more than one launch.** Where the launches behind the last one of the same kind are known (`ahead.rs`), what they read
//!   often comes in the same swap, in place of what none of them uses.
//! - **Where a framework gives the same things other addresses in each cycle**, as PyTorch's cache does with a step's results, what an address was used for says little, and what is
//!   never given anew says much: the state of an optimizer is read once a step, whatever else the step does. So where a cycle uses all memory, what it reads seldom leaves first, some of it
//!   ahead of what comes next, and no more is kept for its way back than it loses in eight cycles.
//! - **Bytes are chosen by density**, gain a cycle for each byte. An extent is read as a whole, so its bytes are worth the same, and
//!   part of it can be moved: greedy is exact but for the last frame.
//! - **What was so for n cycles is expected to last n more.** A swap has to pay within as many, at most 32 at an idle point and 8
//!   before a launch. When what the launches use is no longer what was expected, all begins anew.
//! - **Moving is an investment with a limit.** It is paid from 2 % of the time and from measured gains, with what bringing everything
//!   back would take reserved (`account.rs`). Who cannot pay moves nothing; who is slower by the clock than before anything moved
//!   stops.
//!
//! # How it is used
//! ```text
//! let mut tiers = Tiers::new(Settings::new(Links::measured(vec![FarLink::PEER, FarLink::HOST])));   // one a GPU that computes
//! tiers.block_began(address, bytes);                              // every block of that GPU, near ones too; block_ended(address)
//!
//! // before the driver's call of each launch, once something is far; `words`: parameters that lie in the pool
//! let launch = tiers.launched(function, shape, &words, &places);  // copies and fills: copied(&ranges, &places)
//! if launch.tell_time { tiers.time_is(now, &places); }
//! let mut time_it = launch.time_it;
//! if launch.ask && let Some(swap) = tiers.before(launch.id, now, &places) {
//!     time_it |= swap.time_it;
//!     carry_out(&swap);                                           // as below
//! }
//! if time_it { tiers.timing(launch.id, &places); }                // then bracket it with events, and when they are complete:
//! tiers.timed(launch.id, nanoseconds);                            // launch.hear_it: before anything else is launched, if that can be had soon
//!
//! // where the program has just waited for the device; budget: the share of the time, less what was spent of it
//! tiers.waited(now, &places);
//! for swap in tiers.when_idle(budget, now, &places) { carry_out(&swap); }
//!
//! // carry_out: swap.far leaves, swap.near comes, in one go; whatever happened is told
//! tiers.placed(range);                                            // each range that lies elsewhere now, whoever moved it
//! tiers.stayed(range);                                            // each that was to move and did not
//! tiers.moved(bytes_in, bytes_out, took, made);                   // what making memory for it took is no part of its price
//! tiers.not_begun(&swap);                                         // instead, where nothing was tried
//! if let Some(why) = tiers.stopped() { /* a finding */ }          // after time_is, before and when_idle
//! ```
//!
//! # What it costs
//! Memory: at most 2^16 extents (about 130 bytes each), 2^16 kinds of launches (about 200 bytes and 12 for each pointer), 2^20 uses
//! in the timeline (12 bytes each) and a ring of 2^17 launches (8 bytes each). A launch that was seen before allocates nothing, unless it is charged
//! with something of which nothing was measured. What
//! is worked out at a cycle's end takes about 10 ns for each use of an extent in it, and is done for each eighth to sixty-fourth
//! cycle while nothing changes. A question whether to move ([`Tiers::before`]) looks at every extent only where something may be worth it.
//!
//! Architecture Invariant: nothing here is a second truth of where memory lies; what was asked is forgotten when it is named by
//! [`Tiers::placed`].

#![forbid(unsafe_code)]

mod account;
mod ahead;
mod cycle;
mod extents;
mod idle;
mod interface;
mod kinds;
mod links;
mod operands;
mod plan;
mod samples;
mod search;
mod tiers;
mod timeline;
mod units;
mod unmeasured;

pub use extents::FRAME;
pub use interface::{Launch, Ledger, Range, Reader, Settings, Swap, Timed, Told, Whereabouts, Why};
pub use links::{FarLink, Links, Where};
pub use tiers::Tiers;
