//! What it costs to read far memory, and to move it.

/// Where a piece of memory lies, as seen from the home GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Where {
    /// On the home GPU.
    Near,
    /// At the place with this index in [`Links::far`].
    Far(u8),
}

/// The link to one place that is not the home GPU. All in bytes a nanosecond, which is GB/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FarLink {
    /// What a kernel on the home GPU reads in place.
    pub kernel: f64,
    /// A copy to the home GPU, with nothing else on the link.
    pub copy_in: f64,
    /// A copy from the home GPU, with nothing else on the link.
    pub copy_out: f64,
    /// Each way, while as much goes the other way.
    pub both: f64,
    /// Making new memory there, which a move needs where none is left of earlier ones.
    pub make: f64,
    /// Unmapping, mapping and granting memory there, as far as that takes longer for more of it than [`Links::remap_ns_per_byte`] says.
    pub map: f64,
}

/// The home GPU's memory and its links. The figures are parameters, since each machine has its own; the constructors have those
/// that were measured on two H200 (driver 580).
#[derive(Clone, Debug, PartialEq)]
pub struct Links {
    /// What a kernel reads of the home GPU's own memory, bytes a nanosecond.
    pub near: f64,
    /// The places that the home GPU's memory can go to; [`Where::Far`] is an index into it.
    pub far: Vec<FarLink>,
    /// What a move costs besides its copies, once: the device runs empty and is filled again, nanoseconds.
    pub drain_ns: f64,
    /// What mapping anew costs for each range, in or out, nanoseconds. Measured: 36 µs for 2 MiB, 41 for 32 and 128 MiB, 55 for
    /// 512 MiB, each with its second mapping. It is the number of ranges that counts, and hardly their size.
    pub remap_ns: f64,
    /// What mapping anew costs besides, nanoseconds a byte.
    pub remap_ns_per_byte: f64,
}

impl FarLink {
    /// Another GPU over NVLink, by its copy engines.
    pub const PEER: Self =
        Self { kernel: 374.0, copy_in: 350.0, copy_out: 397.0, both: 187.0, make: 270.0, map: f64::INFINITY };
    /// The host over PCIe. Its link takes 51 each way at once, which moves do not use: what comes needs the room of what leaves.
    pub const HOST: Self = Self { kernel: 51.0, copy_in: 55.0, copy_out: 55.0, both: 27.5, make: 3.4, map: 64.0 };
}

impl Links {
    /// An H200 with these places besides it.
    #[must_use]
    pub fn measured(far: Vec<FarLink>) -> Self {
        let remap_ns_per_byte = 30_000.0 / (1u64 << 30) as f64;
        Self { near: 4480.0, far, drain_ns: 30_000.0, remap_ns: 40_000.0, remap_ns_per_byte }
    }

    /// The same where moves take so many times as long, and reading far memory as long as before.
    #[must_use]
    pub(crate) fn slowed(&self, times: f64) -> Self {
        let slowed = |link: &FarLink| FarLink {
            copy_in: link.copy_in / times,
            copy_out: link.copy_out / times,
            both: link.both / times,
            map: link.map / times,
            ..*link
        };
        Self {
            far: self.far.iter().map(slowed).collect(),
            drain_ns: self.drain_ns * times,
            remap_ns: self.remap_ns * times,
            remap_ns_per_byte: self.remap_ns_per_byte * times,
            ..*self
        }
    }

    /// The link to a place. One that nobody told of counts as the slowest of all.
    #[must_use]
    pub fn link(&self, place: u8) -> FarLink {
        self.far.get(usize::from(place)).copied().unwrap_or(FarLink::HOST)
    }

    /// Nanoseconds that a kernel waits for `bytes` at a place if it reads each of them once; 0 for near memory, whose reading is
    /// part of what a kernel takes anyway.
    #[must_use]
    pub fn pass_ns(&self, place: Where, bytes: u64) -> f64 {
        match place {
            Where::Near => 0.0,
            Where::Far(place) => bytes as f64 / self.link(place).kernel,
        }
    }

    /// Which part of a pass over far memory is saved by having it near, if it is read once.
    #[must_use]
    pub fn once(&self, place: u8) -> f64 {
        (1.0 - self.link(place).kernel / self.near).max(0.0)
    }

    /// Nanoseconds of copying `bytes_in` from a place and `bytes_out` to it, as much as possible of it at once.
    #[must_use]
    pub fn copy_ns(&self, place: u8, bytes_in: u64, bytes_out: u64) -> f64 {
        let link = self.link(place);
        let both = bytes_in.min(bytes_out);
        // Where taking turns is faster than both at once, as on a link that is shared badly, the mover takes turns.
        let at_once = (both as f64 / link.both).min(both as f64 / link.copy_in + both as f64 / link.copy_out);
        at_once + (bytes_in - both) as f64 / link.copy_in + (bytes_out - both) as f64 / link.copy_out
    }

    /// Nanoseconds of mapping so many ranges anew.
    #[must_use]
    pub fn map_ns(&self, ranges: usize, bytes: u64) -> f64 {
        ranges as f64 * self.remap_ns + bytes as f64 * self.remap_ns_per_byte
    }

    /// Nanoseconds of mapping `bytes_out` at a place besides.
    #[must_use]
    pub fn far_map_ns(&self, place: u8, bytes_out: u64) -> f64 {
        bytes_out as f64 / self.link(place).map
    }

    /// Nanoseconds of a swap with a place, so many ranges in all, in or out.
    pub(crate) fn swap_ns(&self, place: u8, ranges: usize, bytes_in: u64, bytes_out: u64) -> f64 {
        self.drain_ns
            + self.copy_ns(place, bytes_in, bytes_out)
            + self.map_ns(ranges, bytes_in + bytes_out)
            + self.far_map_ns(place, bytes_out)
    }

    /// Nanoseconds of bringing back what was near, in place of what came for it: more ranges than it usually needs.
    pub(crate) fn back_ns(&self, place: u8, bytes: u64) -> f64 {
        self.drain_ns + 4.0 * self.remap_ns + bytes as f64 * self.swap_ns_per_byte(place)
    }

    /// Nanoseconds that a byte costs which comes in while another goes out.
    pub(crate) fn swap_ns_per_byte(&self, place: u8) -> f64 {
        self.copy_ns(place, 1 << 30, 1 << 30) / (1u64 << 30) as f64
            + 2.0 * self.remap_ns_per_byte
            + 1.0 / self.link(place).map
    }
}
