//! The machine that is planned for, and how memory would lie on it. Pure.

use gpupool_tiers::FarLink;

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
    /// Whose it is: a process has contexts on the homes of its demands.
    pub process: u32,
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
    /// What the pool may hold on a GPU, with these contexts on it: of a process that works there, or of one that only borrows from it (`context`: what a
    /// context takes, where that is known).
    fn room(&self, size: u64, contexts: u64, works: bool, context: Option<u64>) -> u64 {
        let reserve = gpupool_config::Settings::default().reserve_of(size);
        let kept = if works { reserve } else { reserve.max(gpupool_lending::kept_for_context(size, context)) };
        size.saturating_sub(kept).saturating_sub(contexts).min(self.limit.unwrap_or(u64::MAX))
    }

    /// Where these demands would lie together: each on its own GPU as far as there is room, then on the others that lend to it, then on the
    /// host. `contexts` is what contexts take of each GPU, `context` what one takes, where that is known.
    pub fn place(&self, demands: &[Demand], contexts: &[u64], context: Option<u64>) -> Vec<Lies> {
        let gpus = self.gpus.len().max(1);
        let room =
            |gpu: usize, works| self.room(self.gpus[gpu], contexts.get(gpu).copied().unwrap_or(0), works, context);
        let mut used = vec![0u64; self.gpus.len()];
        let mut host = self.host;
        let mut left: Vec<u64> = demands.iter().map(|demand| demand.bytes).collect();
        let mut lies = vec![Lies::default(); demands.len()];
        for ((demand, left), lies) in demands.iter().zip(&mut left).zip(&mut lies) {
            let home = demand.home as usize % gpus;
            lies.near = used.get_mut(home).map_or(0, |used| fill(used, room(home, true), left));
        }
        for ((demand, left), lies) in demands.iter().zip(&mut left).zip(&mut lies) {
            if demand.borrows && self.peer.is_some() {
                let works = |gpu: usize| {
                    demands.iter().any(|other| other.process == demand.process && other.home as usize % gpus == gpu)
                };
                let peers = used.iter_mut().enumerate();
                lies.on_peers = peers.map(|(gpu, used)| fill(used, room(gpu, works(gpu)), left)).sum();
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

/// As much as there is room for beside what is used, of what is left.
fn fill(used: &mut u64, room: u64, left: &mut u64) -> u64 {
    let taken = take(&mut room.saturating_sub(*used), left);
    *used += taken;
    taken
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
        Demand { home, process: home, borrows: true, bytes: gib * GIB }
    }

    fn gib(lies: Lies) -> [u64; 4] {
        [lies.near, lies.on_peers, lies.on_host, lies.missing].map(|bytes| bytes / GIB)
    }

    #[test]
    fn memory_goes_near_then_to_peers_then_to_the_host() {
        let one = |machine: Machine, gib_asked| gib(machine.place(&[demand(0, gib_asked)], &[GIB], None)[0]);
        assert_eq!(one(machine(1), 30), [30, 0, 0, 0]);
        assert_eq!(one(machine(2), 50), [30, 20, 0, 0]);
        assert_eq!(one(machine(2), 70), [30, 31, 8, 1]);
        assert_eq!(one(Machine { peer: None, ..machine(2) }, 50), [30, 0, 8, 12]);
        assert_eq!(one(Machine { limit: Some(10 * GIB), ..machine(2) }, 25), [10, 10, 5, 0]);
    }

    #[test]
    fn nobody_borrows_what_its_owner_uses() {
        let machine = machine(2);
        let both = machine.place(&[demand(0, 40), demand(1, 25)], &[0, 0], None);
        assert_eq!((gib(both[0]), gib(both[1])), ([31, 6, 3, 0], [25, 0, 0, 0]));
        let rank = Demand { borrows: false, ..demand(0, 40) };
        assert_eq!(gib(machine.place(&[rank], &[], None)[0]), [31, 0, 8, 1]);
    }

    /// A GPU that a process only borrows from keeps as much free as somebody's context takes, which on a small one is more than the reserve.
    #[test]
    fn a_borrowed_gpu_keeps_room_for_a_context() {
        let small = |limit| Machine { gpus: vec![4 * GIB, 4 * GIB], limit, host: GIB, peer: Some(FarLink::PEER) };
        let mib = |lies: Lies| [lies.near, lies.on_peers, lies.on_host].map(|bytes| bytes >> 20);
        let one = demand(0, 8);
        let of = |limit, demands: &[Demand], context| mib(small(limit).place(demands, &[0, 0], context)[0]);
        // 256 MiB are the reserve, and 512 an eighth of the GPU.
        assert_eq!(of(None, &[one], None), [3840, 3584, 768]);
        assert_eq!(of(None, &[one], Some(300 << 20)), [3840, 3792, 560]);
        assert_eq!(of(Some(3 * GIB), &[one], None), [3072, 3072, 1024], "the limit is less than that leaves");
        // Where it works itself, as where another one works, nobody's context is awaited, or the other's is there and one more may come.
        let own = Demand { bytes: 0, ..demand(1, 0) };
        assert_eq!(of(None, &[one, Demand { process: 0, ..own }], None), [3840, 3840, 512]);
        assert_eq!(of(None, &[one, own], None), [3840, 3584, 768]);
    }
}
