//! Moves under way: what they hold, have set aside or need for a moment is memory that others have once they are over.
//!
//! A move counts from before it holds its first block until it has let go of the last: in between, the frames of a block that ends
//! serve nobody.

use crate::pool::Pool;
use crate::state::State;
use crate::{Backend, Place, sync};

/// A move under way, until it is dropped.
pub(crate) struct UnderWay<'a, B: Backend> {
    pool: &'a Pool<B>,
    number: u64,
}

impl<B: Backend> Drop for UnderWay<'_, B> {
    fn drop(&mut self) {
        self.pool.lock().moves.end(self.number);
    }
}

impl<B: Backend> Pool<B> {
    /// A move begins.
    pub(crate) fn begin_move(&self) -> UnderWay<'_, B> {
        self.begin_move_in(&mut self.lock())
    }

    pub(crate) fn begin_move_in(&self, state: &mut State<B::Handle>) -> UnderWay<'_, B> {
        UnderWay { pool: self, number: state.moves.begin() }
    }

    /// Waits for the moves that are under way now; whether there were any. Not for a thread that moves something itself.
    pub(crate) fn wait_for_moves(&self) -> bool {
        let last = self.lock().moves.last();
        let mut any = false;
        while self.lock().moves.are_any_until(last) {
            any = true;
            sync::yield_now();
        }
        any
    }

    /// Waits until nothing is on its way back at `place`, or anywhere, in other threads, and for moves under way; whether there was
    /// anything. They are inside the driver or wait for a GPU, which they do not do for long.
    pub fn settle(&self, place: Option<Place>) -> bool {
        let moved = self.wait_for_moves();
        self.settle_leaving(place) || moved
    }
}
