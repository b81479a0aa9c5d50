//! What one thread knows: its random numbers, its memory, and what must be in it.

use crate::driver::{Driver, Location};
use crate::intended::{Service, Side};
use crate::kernels::Kernels;
use std::fmt::{Arguments, Write as _};

/// A generator of numbers that are the same on every machine (splitmix64).
#[derive(Clone, Copy, Debug)]
pub struct Random(u64);

impl Random {
    /// One that depends on all of `parts`.
    pub fn new(parts: &[u64]) -> Self {
        let mut random = Random(0);
        for part in parts {
            random.0 ^= part.wrapping_mul(0xff51_afd7_ed55_8ccd);
            random.0 = random.next();
        }
        random
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `end`, which is above 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    /// As many sizes between 1 and 2 as between half of `most` and `most`.
    pub fn size(&mut self, most: usize) -> usize {
        let top = 1usize << self.below(most.ilog2() as usize + 1);
        (top + self.below(top)).min(most)
    }
}

/// A handle of `cuMemCreate`, or one that came back from a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    pub value: u64,
    pub bytes: usize,
    pub imported: bool,
}

/// How memory was had, and so how it is given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    Plain,
    /// `cuMemHostAlloc` with these flags.
    Pinned(u32),
    /// The program's own, registered.
    Registered(*mut u8, usize),
    Managed,
    /// `cuMemAllocAsync`; the stream is freed on the same.
    Ordered,
    /// A reservation with one mapped handle after the other.
    Mapped(Vec<Handle>),
}

// SAFETY: the pointer is owned by the object, and goes from thread to thread with it.
unsafe impl Send for Kind {}

/// A live allocation, and what is in it.
#[derive(Debug)]
pub struct Object {
    /// For the transcript: addresses differ between two runs.
    pub name: String,
    pub kind: Kind,
    pub address: u64,
    /// The GPU that was current when it was made.
    pub device: i32,
    /// Every byte as the last call left it, and so its size.
    pub shadow: Vec<u8>,
    /// The stream that has work on it, if any.
    pub busy: Option<usize>,
}

impl Object {
    pub fn bytes(&self) -> usize {
        self.shadow.len()
    }

    /// Whether kernels and copies of device memory may name it.
    pub fn is_device(&self) -> bool {
        !matches!(self.kind, Kind::Pinned(_) | Kind::Registered(..))
    }
}

/// One thread of one process.
pub struct World<'a> {
    pub driver: &'a Driver,
    pub kernels: &'a Kernels,
    pub side: Side,
    pub service: Service,
    pub number: usize,
    /// Of this round.
    pub random: Random,
    pub context: usize,
    pub device: i32,
    pub streams: Vec<usize>,
    pub objects: Vec<Object>,
    /// Bytes that this thread may still take.
    pub room: usize,
    /// Whether other threads are waiting: only then may a call be made whose answer depends on what they do.
    pub alone: bool,
    made: u64,
    transcript: String,
}

impl<'a> World<'a> {
    pub fn new(
        driver: &'a Driver,
        kernels: &'a Kernels,
        number: usize,
        context: usize,
        device: i32,
        room: usize,
        service: Service,
    ) -> Self {
        let mut world = Self {
            driver,
            kernels,
            side: Side::here(),
            service,
            number,
            random: Random::new(&[]),
            context,
            device,
            streams: Vec::new(),
            objects: Vec::new(),
            room,
            alone: false,
            made: 0,
            transcript: String::new(),
        };
        world.expect("cuCtxSetCurrent", driver.cuCtxSetCurrent(context));
        for flags in [0, 1] {
            let mut stream = 0;
            let result = driver.cuStreamCreate(&mut stream, flags);
            world.expect("cuStreamCreate", result);
            world.streams.push(stream);
        }
        world
    }

    /// One line of the transcript, which must be the same in both runs.
    pub fn say(&mut self, line: Arguments<'_>) {
        // Writing into a String cannot fail.
        let _ = writeln!(self.transcript, "  t{}: {line}", self.number);
    }

    /// A line that says what a call answered; whether it was success.
    pub fn told(&mut self, call: Arguments<'_>, result: i32) -> bool {
        self.say(format_args!("{call} = {result}"));
        result == 0
    }

    /// A call that fails on no side; a line only where it does.
    pub fn expect(&mut self, call: &str, result: i32) {
        if result != 0 {
            self.say(format_args!("{call} = {result}, expected 0"));
        }
    }

    /// The transcript since the last time.
    pub fn take_transcript(&mut self) -> String {
        std::mem::take(&mut self.transcript)
    }

    /// A name for something new.
    pub fn name(&mut self, what: &str) -> String {
        self.made += 1;
        format!("{what}{}.{}", self.number, self.made)
    }

    /// A size for something new, 0 where there is no room for more.
    pub fn size(&mut self) -> usize {
        const LARGEST: usize = 12 << 20;
        self.random.size(LARGEST.min(self.room.max(1)))
    }

    pub fn stream(&mut self) -> usize {
        self.streams[self.random.below(self.streams.len())]
    }

    /// Any live object that `pick` takes, by its index.
    pub fn any(&mut self, pick: impl Fn(&Object) -> bool) -> Option<usize> {
        let fitting: Vec<usize> = (0..self.objects.len()).filter(|&index| pick(&self.objects[index])).collect();
        (!fitting.is_empty()).then(|| fitting[self.random.below(fitting.len())])
    }

    /// Adds an object and fills all of it, so that its content is known from the start.
    pub fn add(&mut self, name: String, kind: Kind, address: u64, bytes: usize, busy: Option<usize>) {
        self.room -= bytes.min(self.room);
        self.objects.push(Object { name, kind, address, device: self.device, shadow: vec![0; bytes], busy });
        let last = self.objects.len() - 1;
        self.write(last, 0, bytes);
    }

    /// A part of an object: offset and length, the whole of it every third time.
    pub fn part(&mut self, index: usize) -> (usize, usize) {
        let bytes = self.objects[index].bytes();
        if self.random.one_in(3) {
            return (0, bytes);
        }
        let offset = self.random.below(bytes);
        (offset, 1 + self.random.below(bytes - offset))
    }

    /// Waits for the work on an object, before another stream or the processor touches it.
    pub fn settle(&mut self, index: usize) {
        if let Some(stream) = self.objects[index].busy.take() {
            let result = self.driver.cuStreamSynchronize(stream);
            self.expect("cuStreamSynchronize", result);
        }
    }

    /// Before work on `stream` touches an object.
    pub fn order(&mut self, index: usize, stream: usize) {
        if self.objects[index].busy.is_some_and(|busy| busy != stream) {
            self.settle(index);
        }
        self.objects[index].busy = Some(stream);
    }

    /// Compares every byte with what must be there.
    pub fn check(&mut self, index: usize) {
        self.settle(index);
        let object = &self.objects[index];
        let mut found = vec![0u8; object.bytes()];
        let result = match object.kind {
            Kind::Pinned(_) | Kind::Registered(..) => {
                // SAFETY: host memory of this many bytes, which nothing writes to at the moment.
                unsafe {
                    std::ptr::copy_nonoverlapping(object.address as *const u8, found.as_mut_ptr(), found.len());
                }
                0
            }
            _ => self.driver.cuMemcpyDtoH_v2(found.as_mut_ptr(), object.address, found.len()),
        };
        let wrong = found.iter().zip(&object.shadow).position(|(one, other)| one != other);
        let name = object.name.clone();
        match wrong {
            None => self.say(format_args!("check {name} = {result}, right")),
            Some(at) => self.say(format_args!("check {name} = {result}, WRONG at {at} of {}", found.len())),
        }
    }

    /// A GPU of the process, as a place.
    pub fn own_place(&self) -> Location {
        Location { kind: 1, id: self.device }
    }
}
