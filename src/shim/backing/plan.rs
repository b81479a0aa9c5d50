//! What the pool of this process will be made of: which GPUs, how much of each, the host, and the mode that works here.
//! Needs `cuInit` but no context; nothing is taken yet.

use super::host;
use super::terms;
use super::topology::{self, Topology, Unanswered};
use crate::watch::context;
use crate::{log, process};
use gpupool_config::{Budget, Devices, Mode, Problem, Settings, format_size};
use gpupool_cuda::{CuResult, Device, Driver};
use gpupool_events::PoolFallback;
use gpupool_lending::kept_for_context;
use gpupool_pool::{Accounts, Links, Place, PlaceSpec};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What the pool of this process will be made of; nothing is taken yet.
#[derive(Debug)]
pub struct Plan {
    /// The mode that works on this machine; differs from the setting where GPUs cannot reach each other.
    pub mode: Mode,
    pub topology: Topology,
    /// The pool's GPUs, with the bytes to leave free on each.
    pub members: BTreeMap<u32, u64>,
    pub places: Vec<PlaceSpec>,
    /// Who has how much of each of these places.
    pub accounts: Arc<Accounts>,
    pub links: Links,
    /// `min(memory, limit set by the user)` of each pool GPU: what a program is told the GPU has.
    totals: BTreeMap<u32, u64>,
    /// The most that others let this process use of a GPU, where they say so.
    budgets: BTreeMap<u32, u64>,
}

/// Says who limits what this process uses of a GPU, where that is less than it might use otherwise.
fn report_budget(gpu: u32, budget: &Budget, otherwise: u64) {
    let Budget { bytes, source } = budget;
    if *bytes < otherwise {
        let size = format_size(*bytes);
        tracing::info!(
            target: "gpupool::memory", about = "budget", device = gpu, bytes, source = source.as_str(),
            "{source} lets this process use {size} of GPU {gpu}, which is less than GPUPOOL_LIMIT and the reserve would"
        );
    }
}

/// Why there is no plan.
#[derive(Debug)]
pub enum NoPlan {
    /// The driver is not ready (no `cuInit` yet, or the process ends); ask again later.
    NotYet,
    /// The driver did not answer, which may pass.
    Unanswered(Unanswered),
    /// The settings name what is not there.
    Settings(Vec<Problem>),
    /// This machine cannot have a pool.
    Never(String),
}

impl Plan {
    /// Works the plan out.
    pub fn read(driver: &Driver, settings: &Settings) -> Result<Self, NoPlan> {
        let topology = Topology::read(driver).map_err(|unanswered| match unanswered.result {
            CuResult::NOT_INITIALIZED | CuResult::DEINITIALIZED => NoPlan::NotYet,
            _ => NoPlan::Unanswered(unanswered),
        })?;
        let totals: Vec<u64> = topology.gpus.iter().map(|gpu| gpu.total).collect();
        let problems = settings.check_gpus(&totals);
        if !problems.is_empty() {
            return Err(NoPlan::Settings(problems));
        }
        let listed = |ordinal: u32| match &settings.devices {
            Devices::Auto => true,
            Devices::List(list) => list.contains(&ordinal),
        };
        let managed = settings.mode == Mode::Managed && managed_works(&topology, listed);
        let gpus: Vec<_> = topology.gpus.iter().filter(|gpu| (gpu.vmm || managed) && listed(gpu.ordinal)).collect();
        if gpus.is_empty() {
            return Err(NoPlan::Never("no GPU here has virtual memory management".to_owned()));
        }
        let mut places = Vec::new();
        let mut members = BTreeMap::new();
        let (mut shown, mut budgets) = (BTreeMap::new(), BTreeMap::new());
        for gpu in &gpus {
            let reserve = settings.reserve_of(gpu.total);
            let said = settings.limit.of(gpu.ordinal).unwrap_or(u64::MAX);
            let budget = host::budget_of(gpu.ordinal, &driver.pci_address(Device::of(gpu.ordinal)), &gpu.uuid);
            let limit = budget.as_ref().map_or(said, |budget| budget.bytes.min(said));
            if let Some(budget) = budget {
                report_budget(gpu.ordinal, &budget, said.min(gpu.total.saturating_sub(reserve)));
                budgets.insert(gpu.ordinal, budget.bytes);
            }
            members.insert(gpu.ordinal, reserve);
            shown.insert(gpu.ordinal, gpu.total.min(limit));
            let limit = gpu.total.saturating_sub(reserve).min(limit);
            places.push(PlaceSpec { place: Place::Gpu(gpu.ordinal), limit });
        }
        let host_limit = host::limit();
        let nodes: BTreeSet<u32> = gpus.iter().map(|gpu| gpu.host_node).collect();
        let host_nodes: Vec<u32> = if host_limit == 0 { Vec::new() } else { nodes.into_iter().collect() };
        for &node in &host_nodes {
            places.push(PlaceSpec { place: Place::Host(node), limit: host_limit / host_nodes.len() as u64 });
        }
        let stored = [Place::Disk, Place::Pageable].map(|place| PlaceSpec { place, limit: u64::MAX });
        let ordinals: Vec<u32> = members.keys().copied().collect();
        let links = topology.links(&ordinals, &host_nodes);
        let mode = if managed { Mode::Managed } else { working_mode(settings.mode, &topology, &ordinals) };
        let plan = Self {
            mode,
            links: if managed { topology::coherent(links) } else { links },
            topology,
            members,
            // Nothing is ever allocated from the last two.
            accounts: Arc::new(Accounts::new(&places.iter().copied().chain(stored).collect::<Vec<_>>())),
            places,
            totals: shown,
            budgets,
        };
        terms::begin(&plan);
        Ok(plan)
    }

    /// Whether this GPU is a place of the pool.
    pub fn is_member(&self, device: Device) -> bool {
        self.members.contains_key(&device.ordinal())
    }

    /// Whether memory asked for on this GPU is the pool's business. Where the user left the GPU out that the
    /// program works on, nothing is pooled there, which is easily taken for an effect of the pool: it is said once.
    pub fn serves(&self, device: Device) -> bool {
        let serves = self.is_member(device);
        if !serves {
            self.report_left_out(device);
        }
        serves
    }

    #[cold]
    fn report_left_out(&self, device: Device) {
        let Devices::List(list) = &process::settings().devices else { return };
        let home = device.ordinal();
        if list.contains(&home) {
            return;
        }
        let written = |list: &mut dyn Iterator<Item = &u32>| list.map(u32::to_string).collect::<Vec<_>>().join(",");
        log::warn_once(
            "devices",
            format_args!(
                "GPUPOOL_DEVICES={} does not name GPU {home}, on which this program allocates: memory for that GPU is left \
                 to the driver, and no other GPU lends to it (write GPUPOOL_DEVICES={}, or leave it unset for every GPU)",
                written(&mut list.iter()),
                written(&mut [home].iter().chain(list)),
            ),
        );
    }

    /// The GPUs that memory of the pool at this place is granted to: all that the process sees and that can reach it, whether
    /// they lend memory or not. A copy from a context without access kills that context (driver facts, VMM). Each GPU more
    /// makes mapping about twice as dear as the first, which is paid where the user left GPUs out that the program works on.
    pub fn readers(&self, place: Place) -> impl Iterator<Item = u32> {
        let reaches = move |reader: &u32| match place {
            Place::Gpu(ordinal) => self.topology.reach(*reader, ordinal),
            Place::Host(_) => true,
            Place::Disk | Place::Pageable => false,
        };
        let is_ours = self.places.iter().any(|spec| spec.place == place);
        let gpus = self.topology.gpus.iter().filter(move |gpu| is_ours && gpu.vmm);
        gpus.map(|gpu| gpu.ordinal).filter(reaches)
    }

    /// The places for physical memory asked for on this GPU, best first; the first is the GPU itself. Not those that do not lend to it now.
    pub fn order(&self, home: u32) -> Vec<Place> {
        let reached = |place: &Place| match place {
            Place::Gpu(ordinal) => self.topology.reach(home, *ordinal),
            Place::Host(_) => true,
            Place::Disk | Place::Pageable => false,
        };
        let places: Vec<Place> = self.places.iter().map(|spec| spec.place).filter(reached).collect();
        let mut order = gpupool_pool::order(home, &places, &self.links);
        order.retain(|place| self.accounts.takes(*place, home));
        order
    }

    /// Bytes that stay free on a GPU: the reserve, or what is kept for somebody's context if that is more.
    pub fn kept_free(&self, ordinal: u32) -> u64 {
        self.members.get(&ordinal).copied().unwrap_or(0).max(self.kept_for_context(ordinal))
    }

    /// Bytes that stay free for somebody's context on a GPU where this process only borrows and leaves for whoever comes, or would if the GPU lent to it; 0 elsewhere.
    pub fn kept_for_context(&self, ordinal: u32) -> u64 {
        if process::settings().recall_wait.is_none() || context::is_on(Device::of(ordinal)) {
            return 0;
        }
        let total = self.topology.gpus.get(ordinal as usize).map_or(0, |gpu| gpu.total);
        kept_for_context(total, context::usual_cost())
    }

    /// Bytes that a place could still give, less what must be left free there; `None` where nobody can tell.
    pub fn free_at(&self, driver: &Driver, place: Place) -> Option<u64> {
        match place {
            Place::Host(_) => host::available(),
            // Whoever stores something sees whether there is room.
            Place::Disk | Place::Pageable => None,
            Place::Gpu(ordinal) => {
                let gpu = self.topology.gpus.get(ordinal as usize)?;
                let free = super::free_on(driver, ordinal, &gpu.uuid)?;
                Some(free.saturating_sub(terms::kept_free_now(ordinal, self.kept_free(ordinal))))
            }
        }
    }

    /// Bytes by which less of a GPU is free than is to stay free there: as where contexts were made since. 0 where nobody can tell.
    pub fn lacks_at(&self, driver: &Driver, ordinal: u32) -> u64 {
        let Some(gpu) = self.topology.gpus.get(ordinal as usize) else { return 0 };
        super::free_on(driver, ordinal, &gpu.uuid).map_or(0, |free| self.kept_free(ordinal).saturating_sub(free))
    }

    /// Whether so much of a GPU is free and kept so by a reserve that is a large part of it (an eighth): what is on the host could be there.
    pub fn reserve_keeps(&self, driver: &Driver, ordinal: u32, bytes: u64) -> bool {
        let Some(gpu) = self.topology.gpus.get(ordinal as usize) else { return false };
        let reserve = self.members.get(&ordinal).copied().unwrap_or(0);
        reserve > gpu.total / 8 && super::free_on(driver, ordinal, &gpu.uuid).is_some_and(|free| free >= bytes)
    }

    /// The most that may be taken of a place, in bytes.
    pub fn limit(&self, place: Place) -> u64 {
        self.accounts.limit(place)
    }

    /// Whether a GPU lends to programs on others.
    pub fn lends(&self, ordinal: u32) -> bool {
        self.accounts.lends(Place::Gpu(ordinal))
    }

    /// Whether others set a limit to what this process may use of any GPU.
    pub fn has_budgets(&self) -> bool {
        !self.budgets.is_empty()
    }

    /// The most that others let this process use of a GPU (control groups, MPS, HAMi), if they say so.
    pub fn budget_of(&self, ordinal: u32) -> Option<u64> {
        self.budgets.get(&ordinal).copied()
    }

    /// Bytes of memory of a GPU.
    pub fn memory_of(&self, ordinal: u32) -> u64 {
        self.topology.gpus.get(ordinal as usize).map_or(0, |gpu| gpu.total)
    }

    /// The bytes that a program on this GPU is told it has: its own and those of the GPUs that lend to it and that `counts`
    /// agrees to.
    pub fn total(&self, home: u32, counts: impl Fn(u32) -> bool) -> u64 {
        let lends = |ordinal: u32| {
            ordinal == home
                || (self.lends(ordinal)
                    && counts(ordinal)
                    && self.links.ranks.contains_key(&(home, Place::Gpu(ordinal))))
        };
        self.totals.iter().filter(|(ordinal, _)| lends(**ordinal)).map(|(_, total)| total).sum()
    }
}

/// Whether every GPU that was asked for can keep managed memory where it is placed. One that cannot stops all GPUs while
/// the processor touches such memory, and takes no advice.
fn managed_works(topology: &Topology, listed: impl Fn(u32) -> bool) -> bool {
    let unfit = topology.gpus.iter().find(|gpu| listed(gpu.ordinal) && !gpu.concurrent_managed);
    if let Some(gpu) = unfit {
        log::warn_once(
            "managed",
            format_args!(
                "GPU {} has no concurrent managed access, so managed memory cannot be placed; mode pool is used (set \
                 GPUPOOL_MODE=pool to silence this)",
                gpu.ordinal
            ),
        );
    }
    unfit.is_none()
}

/// Where not every GPU that the process sees reaches every member, not all memory can be pooled: a copy from a GPU that does
/// not reach pooled memory fails or ends its context, where bare the driver stages it. There the driver serves what fits on
/// a GPU, and the pool only what does not and would be refused bare.
fn working_mode(asked: Mode, topology: &Topology, members: &[u32]) -> Mode {
    let seen: Vec<u32> = topology.gpus.iter().map(|gpu| gpu.ordinal).collect();
    let others = |a: u32| seen.iter().filter(move |b| **b != a);
    let all = members.iter().all(|a| others(*a).all(|b| topology.reach(*b, *a)));
    let any = members.iter().any(|a| others(*a).any(|b| topology.reach(*a, *b)));
    let asked = if asked == Mode::Managed { Mode::Pool } else { asked };
    if asked == Mode::Pool && !all {
        let (who, then) = match any {
            true => ("some of the", "then GPUs with peer access, then the host"),
            false => ("the", "then the host"),
        };
        log::emit(|| {
            let text = format!(
                "{who} {} GPUs have no peer access to each other; mode spill is used: the driver first, {then} (set \
                 GPUPOOL_MODE=spill to silence this)",
                seen.len()
            );
            (PoolFallback { home: members[0], bytes: 0, why: "no peer access".to_owned() }, text)
        });
        return Mode::Spill;
    }
    asked
}
