//! The machine that is planned for, and how memory would lie on it. Pure.

use gpupool_tiers::FarLink;

/// What a context takes where the log does not tell, bytes: measured on H200.
pub const CONTEXT: u64 = 523 << 20;

/// GPUs and a host.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Bytes of each GPU's memory; there is one at least.
    pub gpus: Vec<u64>,
    /// The most that the pool may take of each.
    pub limit: Option<u64>,
    /// The most that all processes together may take of the host.
    pub host: u64,
    /// How a kernel reads another GPU's memory; none where the GPUs do not reach each other.
    pub peer: Option<FarLink>,
}

/// Memory that is asked for on one GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    /// The GPU; beyond the last one it is counted from the first again.
    pub home: u32,
    /// Whether other GPUs may lend to it.
    pub borrows: bool,
    /// Bytes in use.
    pub bytes: u64,
}

/// Where the bytes of one demand lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lies {
    pub near: u64,
    pub on_peers: u64,
    pub on_host: u64,
    /// For which there is no room.
    pub missing: u64,
}

impl Lies {
    pub fn far(&self) -> u64 {
        self.on_peers.saturating_add(self.on_host)
    }
}

impl Machine {
    /// What the pool may hold on a GPU, with these contexts on it.
    pub fn room(&self, size: u64, contexts: u64) -> u64 {
        let reserve = gpupool_config::Settings::default().reserve_of(size);
        size.saturating_sub(reserve).saturating_sub(contexts).min(self.limit.unwrap_or(u64::MAX))
    }

    /// Where these demands would lie together: each on its own GPU as far as there is room, then on the others that lend to it, then on the
    /// host. `contexts` is what contexts take of each GPU.
    pub fn place(&self, demands: &[Demand], contexts: &[u64]) -> Vec<Lies> {
        let of = |gpu: usize| contexts.get(gpu).copied().unwrap_or(0);
        let mut rooms: Vec<u64> = self.gpus.iter().enumerate().map(|(gpu, size)| self.room(*size, of(gpu))).collect();
        let mut host = self.host;
        let mut left: Vec<u64> = demands.iter().map(|demand| demand.bytes).collect();
        let mut lies = vec![Lies::default(); demands.len()];
        for ((demand, left), lies) in demands.iter().zip(&mut left).zip(&mut lies) {
            let home = demand.home as usize % rooms.len().max(1);
            lies.near = rooms.get_mut(home).map_or(0, |room| take(room, left));
        }
        for ((demand, left), lies) in demands.iter().zip(&mut left).zip(&mut lies) {
            if demand.borrows && self.peer.is_some() {
                lies.on_peers = rooms.iter_mut().map(|room| take(room, left)).sum();
            }
            lies.on_host = take(&mut host, left);
            lies.missing = *left;
        }
        lies
    }

    /// Nanoseconds in which a kernel reads this far memory once, beyond what it would take near.
    pub fn pass_ns(&self, on_peers: f64, on_host: f64) -> f64 {
        let peer = self.peer.map_or(0.0, |link| on_peers / link.kernel);
        peer + on_host / FarLink::HOST.kernel
    }
}

/// As much as there is room for, of what is left.
fn take(room: &mut u64, left: &mut u64) -> u64 {
    let taken = (*room).min(*left);
    *room -= taken;
    *left -= taken;
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn machine(gpus: usize) -> Machine {
        Machine { gpus: vec![32 * GIB; gpus], limit: None, host: 8 * GIB, peer: Some(FarLink::PEER) }
    }

    fn demand(home: u32, gib: u64) -> Demand {
        Demand { home, borrows: true, bytes: gib * GIB }
    }

    fn gib(lies: Lies) -> [u64; 4] {
        [lies.near, lies.on_peers, lies.on_host, lies.missing].map(|bytes| bytes / GIB)
    }

    #[test]
    fn memory_goes_near_then_to_peers_then_to_the_host() {
        let one = |machine: Machine, gib_asked| gib(machine.place(&[demand(0, gib_asked)], &[GIB])[0]);
        assert_eq!(one(machine(1), 30), [30, 0, 0, 0]);
        assert_eq!(one(machine(2), 50), [30, 20, 0, 0]);
        assert_eq!(one(machine(2), 70), [30, 31, 8, 1]);
        assert_eq!(one(Machine { peer: None, ..machine(2) }, 50), [30, 0, 8, 12]);
        assert_eq!(one(Machine { limit: Some(10 * GIB), ..machine(2) }, 25), [10, 10, 5, 0]);
    }

    #[test]
    fn nobody_borrows_what_its_owner_uses() {
        let machine = machine(2);
        let both = machine.place(&[demand(0, 40), demand(1, 25)], &[0, 0]);
        assert_eq!((gib(both[0]), gib(both[1])), ([31, 6, 3, 0], [25, 0, 0, 0]));
        let rank = Demand { borrows: false, ..demand(0, 40) };
        assert_eq!(gib(machine.place(&[rank], &[])[0]), [31, 0, 8, 1]);
    }
}
