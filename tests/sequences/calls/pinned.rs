//! Pinned host memory.

use crate::intended;
use crate::world::{Kind, World};

const PAGE: usize = 4096;

fn layout(bytes: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(bytes, PAGE).unwrap_or_else(|_| unreachable!("sizes here are small"))
}

/// Memory of the program's own, in whole pages: memory that is registered must not share one with anything else.
fn pages(bytes: usize) -> *mut u8 {
    // SAFETY: the size is above 0.
    unsafe { std::alloc::alloc_zeroed(layout(bytes)) }
}

/// Gives [`pages`] back.
pub fn drop_pages(start: *mut u8, bytes: usize) {
    // SAFETY: `pages` made it with this layout, and its object is gone.
    unsafe { std::alloc::dealloc(start, layout(bytes)) }
}

impl World<'_> {
    pub fn pin(&mut self) {
        let bytes = self.size();
        if bytes > self.room {
            return;
        }
        let mut address = 0;
        let flags = self.random.below(9) as u32;
        let name = self.name("h");
        let made = if flags == 8 {
            let result = self.driver.cuMemAllocHost_v2(&mut address, bytes);
            self.told(format_args!("{name} = cuMemAllocHost {bytes}"), result)
        } else {
            let result = self.driver.cuMemHostAlloc(&mut address, bytes, flags);
            self.told(format_args!("{name} = cuMemHostAlloc {bytes} {flags}"), result)
        };
        if made {
            self.add(name, Kind::Pinned(flags % 8), address, bytes, None);
        }
    }

    pub fn register(&mut self) {
        let bytes = self.size().next_multiple_of(PAGE);
        if bytes > self.room {
            return;
        }
        let start = pages(bytes);
        let flags = self.random.below(4) as u32;
        let result = self.driver.cuMemHostRegister_v2(start as u64, bytes, flags);
        let name = self.name("r");
        if self.told(format_args!("{name} = cuMemHostRegister {bytes} {flags}"), result) {
            self.add(name, Kind::Registered(start, bytes), start as u64, bytes, None);
        } else {
            drop_pages(start, bytes);
        }
    }

    pub fn ask_pinned(&mut self) {
        let driver = self.driver;
        // Of any memory: that device memory has no such flags is an answer, too. Memory with a mapping of the program's own is
        // the driver's business alone.
        let Some(index) = self.any(|object| !matches!(object.kind, Kind::Mapped(_))) else { return };
        let (offset, bytes) = self.part(index);
        let object = &self.objects[index];
        let (name, base) = (object.name.clone(), object.address);
        let at = base + offset as u64;
        match self.random.below(4) {
            0 => {
                let mut flags = 77;
                let result = driver.cuMemHostGetFlags(&mut flags, at);
                let flags = intended::flags_told(flags);
                self.told(format_args!("flags of {name}+{offset} {flags}"), result);
            }
            1 => {
                let mut address = 1;
                let result = driver.cuMemHostGetDevicePointer_v2(&mut address, at, 0);
                let distance = if address < 2 { address as i64 } else { address.wrapping_sub(at) as i64 };
                self.told(format_args!("device pointer of {name}+{offset} {distance:+}"), result);
            }
            2 if !object.is_device() => {
                let result = driver.cuMemHostRegister_v2(at, bytes, 0);
                self.told(format_args!("register {name}+{offset} {bytes}"), result);
            }
            _ if !object.is_device() && offset > 0 => {
                let result = driver.cuMemFreeHost(at);
                self.told(format_args!("cuMemFreeHost {name}+{offset}"), result);
                let result = driver.cuMemHostUnregister(at);
                self.told(format_args!("cuMemHostUnregister {name}+{offset}"), result);
            }
            _ => {}
        }
    }
}
