//! Memory that graphs allocate: addresses from when the node is made, memory behind them from a launch to the free.
//!
//! An executable graph takes its memory when it is first launched and keeps it for later launches, until it is destroyed
//! or `cuDeviceGraphMemTrim` finds it unused.

use crate::context::wait_for_device;
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{AccessDesc, In, Location, Out, PoolProps};
use crate::graph::Node;
use crate::physical::{GRANULE, Physical, Use};
use crate::reserve::Levels;
use crate::space::{Kind, Origin};
use crate::stream::{Action, Work};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// What one allocation node gives.
pub struct Allocation {
    pub address: u64,
    pub bytes: u64,
    pub device: usize,
    /// Devices besides its own that may use it.
    pub access: Vec<AccessDesc>,
    /// There is memory behind it once what was launched and freed so far has run.
    live: AtomicBool,
    /// Some graph has a node that frees it; a second one is refused.
    has_free: AtomicBool,
    held: Mutex<Option<Arc<Held>>>,
}

/// Memory taken from the device for graphs.
struct Held {
    device: usize,
    physical: Arc<Physical>,
}

/// The memory that an executable graph has for one allocation.
pub struct Room {
    allocation: Arc<Allocation>,
    held: Mutex<Option<Arc<Held>>>,
}

/// Allocations by address. Live ones are also kept here, as they may outlive the graph that made them.
static ALLOCATIONS: Mutex<BTreeMap<u64, Weak<Allocation>>> = Mutex::new(BTreeMap::new());
static LIVE: Mutex<BTreeMap<u64, Arc<Allocation>>> = Mutex::new(BTreeMap::new());
static ROOMS: Mutex<Vec<Weak<Room>>> = Mutex::new(Vec::new());
static LEVELS: Mutex<[Option<Levels>; 32]> = Mutex::new([None; 32]);

fn change_levels<T>(device: usize, change: impl FnOnce(&mut Levels) -> T) -> T {
    change(LEVELS.lock()[device].get_or_insert_default())
}

impl Drop for Held {
    fn drop(&mut self) {
        change_levels(self.device, |levels| levels.reserved.sub(self.physical.bytes));
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        ALLOCATIONS.lock().remove(&self.address);
        let space = &driver().space;
        // It was entered when this was made, and nobody else takes it out.
        let _ = space.remove(self.address, |_| true);
        space.give_addresses(self.address, self.bytes);
    }
}

impl Allocation {
    pub fn new(device: usize, bytes: u64, access: Vec<AccessDesc>) -> Outcome<Arc<Self>> {
        let driver = driver();
        let address = driver.space.take_addresses(bytes)?;
        let mask =
            access.iter().filter(|desc| desc.flags == 3).fold(1 << device, |mask, desc| mask | 1 << desc.location.id);
        let physical = driver.gpus[device].store.vacant(bytes);
        let kind = Kind::Plain { context: 0, device, physical, offset: 0, origin: Origin::Graph(mask) };
        driver.space.insert(address, bytes, kind);
        let allocation = Arc::new(Self {
            address,
            bytes,
            device,
            access,
            live: AtomicBool::new(false),
            has_free: AtomicBool::new(false),
            held: Mutex::new(None),
        });
        ALLOCATIONS.lock().insert(address, Arc::downgrade(&allocation));
        Ok(allocation)
    }

    fn find(address: u64) -> Outcome<Arc<Self>> {
        ALLOCATIONS.lock().get(&address).and_then(Weak::upgrade).ok_or(Code::INVALID_VALUE)
    }

    /// Puts memory behind the addresses.
    fn furnish(self: &Arc<Self>, held: Arc<Held>) {
        driver().space.back(self.address, held.physical.clone());
        let before = self.held.lock().replace(held);
        if before.is_none() {
            change_levels(self.device, |levels| levels.used.add(self.bytes));
        }
        LIVE.lock().insert(self.address, self.clone());
    }

    /// Takes it away again.
    fn vacate(&self) {
        driver().space.back(self.address, driver().gpus[self.device].store.vacant(self.bytes));
        if self.held.lock().take().is_some() {
            change_levels(self.device, |levels| levels.used.sub(self.bytes));
        }
        let kept = LIVE.lock().remove(&self.address);
        drop(kept);
    }
}

/// The work of an allocation node, whose memory its executable graph adds.
pub fn alloc_work(allocation: Arc<Allocation>) -> Work {
    Work { action: Arc::new(|_| Ok(())), touches: Vec::new(), node: Node::MemAlloc(allocation) }
}

/// The work of a node that frees; INVALID_VALUE for memory that no graph allocated or that another node frees.
pub fn free_work(address: u64) -> Outcome<Work> {
    let allocation = Allocation::find(address)?;
    if allocation.has_free.swap(true, Ordering::AcqRel) {
        return Err(Code::INVALID_VALUE);
    }
    Ok(Work { action: vacating(allocation.clone()), touches: Vec::new(), node: Node::MemFree(allocation) })
}

fn vacating(allocation: Arc<Allocation>) -> Action {
    Arc::new(move |_| {
        allocation.vacate();
        Ok(())
    })
}

/// A free outside of graphs, in the order of a stream: its work, once.
pub fn free_later(address: u64) -> Outcome<Work> {
    let allocation = Allocation::find(address)?;
    if !allocation.live.swap(false, Ordering::AcqRel) {
        return Err(Code::INVALID_VALUE);
    }
    Ok(Work { action: vacating(allocation), touches: Vec::new(), node: Node::Empty })
}

/// `cuMemFree` of memory that a graph left allocated.
pub fn free_now(address: u64) -> Outcome {
    let allocation = Allocation::find(address)?;
    if !allocation.live.swap(false, Ordering::AcqRel) {
        return Err(Code::INVALID_VALUE);
    }
    wait_for_device(allocation.device);
    allocation.vacate();
    Ok(())
}

/// The rooms for the allocations of a list of work, and the list with the actions that use them.
pub fn equip(list: Vec<Work>) -> (Vec<Work>, Vec<Arc<Room>>) {
    let mut rooms = Vec::new();
    let list = list
        .into_iter()
        .map(|mut work| {
            if let Node::MemAlloc(allocation) = &work.node {
                let room = Arc::new(Room { allocation: allocation.clone(), held: Mutex::new(None) });
                rooms.push(room.clone());
                work.action = Arc::new(move |_| {
                    let held = room.held.lock().clone();
                    room.allocation.furnish(held.ok_or(Code::ILLEGAL_ADDRESS)?);
                    Ok(())
                });
            }
            work
        })
        .collect();
    ROOMS.lock().extend(rooms.iter().map(Arc::downgrade));
    (list, rooms)
}

/// Prepares a launch: INVALID_VALUE where memory of an earlier one is still allocated (unless `auto_free`), OUT_OF_MEMORY
/// where there is none.
pub fn prepare(list: &[Work], rooms: &[Arc<Room>], auto_free: bool) -> Outcome {
    static PLANNING: Mutex<()> = Mutex::new(());
    let _planning = PLANNING.lock();
    if !auto_free && rooms.iter().any(|room| room.allocation.live.load(Ordering::Acquire)) {
        return Err(Code::INVALID_VALUE);
    }
    for room in rooms {
        room.fill()?;
    }
    for work in list {
        match &work.node {
            Node::MemAlloc(allocation) => allocation.live.store(true, Ordering::Release),
            Node::MemFree(allocation) => allocation.live.store(false, Ordering::Release),
            _ => {}
        }
    }
    Ok(())
}

impl Room {
    pub fn fill(&self) -> Outcome {
        let mut held = self.held.lock();
        if held.is_none() {
            let device = self.allocation.device;
            let bytes = self.allocation.bytes.checked_next_multiple_of(GRANULE).ok_or(Code::OUT_OF_MEMORY)?;
            let physical = driver().gpus[device].store.allocate(bytes, Use::Plain)?;
            change_levels(device, |levels| levels.reserved.add(bytes));
            *held = Some(Arc::new(Held { device, physical }));
        }
        Ok(())
    }
}

/// `cuDeviceGraphMemTrim`: what no allocation uses goes back to the device.
pub fn trim(device: c_int) -> Outcome {
    driver().gpu(device)?;
    ROOMS.lock().retain(|room| room.strong_count() > 0);
    let rooms: Vec<_> = ROOMS.lock().iter().filter_map(Weak::upgrade).collect();
    for room in rooms.iter().filter(|room| room.allocation.device == device as usize) {
        let idle = !room.allocation.live.load(Ordering::Acquire) && room.allocation.held.lock().is_none();
        if idle {
            let held = room.held.lock().take();
            drop(held);
        }
    }
    Ok(())
}

/// `cuDeviceGetGraphMemAttribute`.
pub fn attribute(device: c_int, attribute: c_int, out: Out<c_void>) -> Outcome {
    out.required()?;
    driver().gpu(device)?;
    let levels = change_levels(device as usize, |levels| *levels);
    out.put(match attribute {
        0 => levels.used.current,
        1 => levels.used.high,
        2 => levels.reserved.current,
        3 => levels.reserved.high,
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// `cuDeviceSetGraphMemAttribute`: the high-water marks can be reset.
pub fn set_attribute(device: c_int, attribute: c_int, value: In<c_void>) -> Outcome {
    driver().gpu(device)?;
    if value.cast::<u64>().get()? != 0 {
        return Err(Code::INVALID_VALUE);
    }
    change_levels(device as usize, |levels| {
        match attribute {
            1 => levels.used.reset(),
            3 => levels.reserved.reset(),
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    })
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AllocNode {
    props: PoolProps,
    access: usize,
    access_count: usize,
    bytes: usize,
    address: u64,
}

const _: () = assert!(size_of::<AllocNode>() == size_of::<cudarc::driver::sys::CUDA_MEM_ALLOC_NODE_PARAMS>());

impl AllocNode {
    /// The allocation it asks for. Graph memory cannot be shared between processes.
    pub fn allocate(&self) -> Outcome<Arc<Allocation>> {
        let props = self.props;
        if props.kind != 1 || props.handle_types != 0 || props.location.kind != Location::DEVICE || self.bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let driver = driver();
        driver.gpu(props.location.id)?;
        let access = In::<AccessDesc>::from_address(self.access).list(self.access_count)?;
        for desc in &access {
            driver.gpu(desc.location.id)?;
        }
        Allocation::new(props.location.id as usize, self.bytes as u64, access)
    }

    pub fn with_address(self, address: u64) -> Self {
        Self { address, ..self }
    }

    /// What a node of this allocation was made from. The list is the allocation's own, which lives as long as the node.
    pub fn of(allocation: &Allocation) -> Self {
        let location = Location { kind: Location::DEVICE, id: allocation.device as c_int };
        let props = PoolProps { kind: 1, handle_types: 0, location, win32: 0, max_size: 0, reserved: [0; 56] };
        let (access, access_count) = (allocation.access.as_ptr() as usize, allocation.access.len());
        let access = if access_count == 0 { 0 } else { access };
        Self { props, access, access_count, bytes: allocation.bytes as usize, address: allocation.address }
    }
}
