//! The calls that sequences are made of, by subject.

mod capture;
mod content;
mod contexts;
pub mod ipc;
mod managed;
mod mapped;
mod ordered;
mod pinned;
mod plain;
mod queries;
mod wrong;

use crate::world::{Kind, World};

/// A call and how often it is made, of so many in all.
type Choice = (usize, fn(&mut World<'_>));

/// What a thread does while the others do so, too.
const TOGETHER: &[Choice] = &[
    (16, |w| w.allocate()),
    (3, |w| w.allocate_pitched()),
    (12, |w| w.free()),
    (12, |w| w.write_some()),
    (14, |w| w.copy_some()),
    (4, |w| w.copy_rows()),
    (4, |w| w.add_some()),
    (12, |w| w.check_some()),
    (8, |w| w.ask_attributes()),
    (4, |w| w.ask_range()),
    (2, |w| w.ask_memory()),
    (4, |w| w.wrong_calls()),
    (5, |w| w.pin()),
    (2, |w| w.register()),
    (4, |w| w.ask_pinned()),
    (3, |w| w.allocate_managed()),
    (3, |w| w.advise()),
    (6, |w| w.allocate_ordered()),
    (2, |w| w.ask_mempool()),
    (4, |w| w.map()),
    (3, |w| w.ask_mapped()),
    (1, |w| w.private_context()),
];

/// What one thread does while the others wait: its answers would depend on what they do, or theirs on it.
const ALONE: &[Choice] = &[(3, |w| w.capture()), (1, |w| w.capture_nothing()), (2, |w| w.free_wrongly())];

fn one_of(world: &mut World<'_>, choices: &[Choice]) {
    let mut left = world.random.below(choices.iter().map(|(weight, _)| weight).sum());
    for (weight, call) in choices {
        match left.checked_sub(*weight) {
            Some(rest) => left = rest,
            None => return call(world),
        }
    }
}

impl World<'_> {
    pub fn play_together(&mut self) {
        one_of(self, TOGETHER);
    }

    pub fn play_alone(&mut self) {
        self.alone = true;
        one_of(self, ALONE);
        self.alone = false;
    }

    /// Checks and frees everything.
    pub fn finish(&mut self) {
        while !self.objects.is_empty() {
            self.check(0);
            self.release(0);
        }
        for stream in std::mem::take(&mut self.streams) {
            let result = self.driver.cuStreamDestroy_v2(stream);
            self.expect("cuStreamDestroy", result);
        }
    }

    /// Gives an object back as its kind demands, work on it or not.
    pub fn release(&mut self, index: usize) {
        // A free waits for the GPU of the memory, not for the work of another one on it.
        if self.objects[index].device != self.device {
            self.settle(index);
        }
        let object = self.objects.remove(index);
        self.room += object.bytes();
        let driver = self.driver;
        let result = match &object.kind {
            Kind::Plain | Kind::Managed => driver.cuMemFree_v2(object.address),
            Kind::Ordered => self.release_ordered(&object),
            Kind::Mapped(handles) => self.unmap(&object, handles),
            Kind::Pinned(_) => driver.cuMemFreeHost(object.address),
            Kind::Registered(start, bytes) => {
                let result = driver.cuMemHostUnregister(object.address);
                pinned::drop_pages(*start, *bytes);
                result
            }
        };
        self.told(format_args!("free {}", object.name), result);
    }
}
