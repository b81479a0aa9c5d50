//! A backend that keeps every rule of the driver and panics at the first one broken.

use gpupool_pinned::{Backend, Config, Fault, Key, PAGE, Pool, Refusal, Request};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// First address that the mock gives: high, so that no address fits 32 bits by luck.
const BASE: u64 = 0x7000_0000_0000;

/// What the mock's calls fail with: the number of the call that failed.
pub type CallNumber = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    OutOfMemory,
    NotReady,
    Failed,
}

#[derive(Default)]
pub struct Inner {
    /// What is pinned: bytes and key by address.
    pub segments: BTreeMap<u64, (u64, Key)>,
    /// The most that can be pinned, 0 for no end.
    pub capacity: u64,
    /// Whether the device cannot be waited for, by a free neither.
    pub capturing: bool,
    /// Whether a kernel runs, for which a free would wait.
    pub running: bool,
    pub calls: u64,
    /// Fails this many calls from this one on.
    pub fault: Option<(CallNumber, u64, FaultKind)>,
    /// Every call by name.
    pub log: Vec<(&'static str, u64)>,
}

#[derive(Default)]
pub struct Mock {
    inner: Mutex<Inner>,
    /// Runs at the start of every call, outside the mock's own lock.
    probe: Mutex<Option<Box<dyn Fn() + Send>>>,
}

impl Mock {
    pub fn set_probe(&self, probe: impl Fn() + Send + 'static) {
        *self.probe.lock().unwrap() = Some(Box::new(probe));
    }

    /// A broken rule panics in the thread that broke it; the others go on to their own checks.
    pub fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self, name: &'static str, bytes: u64) -> Result<MutexGuard<'_, Inner>, Fault<CallNumber>> {
        if let Some(probe) = self.probe.lock().unwrap().as_ref() {
            probe();
        }
        let mut inner = self.inner();
        inner.calls += 1;
        inner.log.push((name, bytes));
        let number = inner.calls;
        if let Some((first, count, kind)) = inner.fault
            && (first..first + count).contains(&number)
        {
            return Err(match kind {
                FaultKind::OutOfMemory => Fault::OutOfMemory(number),
                FaultKind::NotReady => Fault::NotReady(number),
                FaultKind::Failed => Fault::Failed(number),
            });
        }
        Ok(inner)
    }
}

impl Inner {
    pub fn pinned(&self) -> u64 {
        self.segments.values().map(|&(bytes, _)| bytes).sum()
    }

    /// The segment around `address`: where it begins, its bytes and key.
    pub fn segment(&self, address: u64) -> Option<(u64, u64, Key)> {
        let (&start, &(bytes, key)) = self.segments.range(..=address).next_back()?;
        (address < start + bytes).then_some((start, bytes, key))
    }

    /// The context is destroyed, and with it its memory.
    pub fn end_context(&mut self, context: u64) {
        self.segments.retain(|_, (_, key)| key.context != context);
    }

    /// The first gap that is big enough, so that segments lie side by side and addresses come back.
    fn gap(&self, bytes: u64) -> u64 {
        let mut address = BASE;
        for (&start, &(size, _)) in &self.segments {
            if start - address >= bytes {
                break;
            }
            address = start + size;
        }
        address
    }
}

impl Backend for Mock {
    type Error = CallNumber;

    fn pin(&self, key: Key, bytes: u64) -> Result<u64, Fault<CallNumber>> {
        assert!(bytes > 0 && bytes.is_multiple_of(PAGE), "{bytes} bytes are no pages");
        let mut inner = self.call("pin", bytes)?;
        if inner.capacity > 0 && inner.pinned() + bytes > inner.capacity {
            return Err(Fault::OutOfMemory(inner.calls));
        }
        let address = inner.gap(bytes);
        inner.segments.insert(address, (bytes, key));
        Ok(address)
    }

    fn unpin(&self, key: Key, address: u64, bytes: u64, may_wait: bool) -> Result<(), CallNumber> {
        let error = |fault| match fault {
            Fault::OutOfMemory(call) | Fault::Unavailable(call) | Fault::NotReady(call) | Fault::Failed(call) => call,
        };
        let mut inner = self.call("unpin", bytes).map_err(error)?;
        if inner.capturing || (inner.running && !may_wait) {
            return Err(inner.calls);
        }
        assert_eq!(inner.segments.remove(&address), Some((bytes, key)), "unpinned as it was pinned");
        Ok(())
    }

    fn quiesce(&self, context: u64) -> Result<(), Fault<CallNumber>> {
        let inner = self.call("quiesce", context)?;
        if inner.capturing { Err(Fault::NotReady(inner.calls)) } else { Ok(()) }
    }
}

pub const KEY: Key = Key { context: 1, flags: 0 };
pub const IDLE: Duration = Duration::from_secs(30);

pub fn pool(limit: u64) -> Pool<Mock> {
    Pool::new(Config { limit, idle: IDLE }, Mock::default())
}

/// Allocates in [`KEY`]; returns the address and what was pinned for it.
pub fn allocate(pool: &Pool<Mock>, bytes: u64) -> (u64, u64) {
    let allocation = try_allocate(pool, bytes).unwrap();
    (allocation.block.address, allocation.pinned)
}

pub fn try_allocate(pool: &Pool<Mock>, bytes: u64) -> Result<gpupool_pinned::Allocation, Refusal<CallNumber>> {
    pool.allocate(&Request { bytes, key: KEY })
}
