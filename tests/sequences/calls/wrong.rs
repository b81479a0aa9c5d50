//! Calls that are wrong, and must be refused in the same way.

use crate::world::{Kind, World};

impl World<'_> {
    pub fn wrong_calls(&mut self) {
        let driver = self.driver;
        let mut address = 0;
        match self.random.below(8) {
            0 => {
                let result = driver.cuMemAlloc_v2(&mut address, 0);
                self.told(format_args!("cuMemAlloc 0"), result);
            }
            1 => {
                // More than all the memory of any machine.
                let result = driver.cuMemAlloc_v2(&mut address, 1 << 47);
                self.told(format_args!("cuMemAlloc 2^47, address {address}"), result);
            }
            2 => {
                let result = driver.cuMemFree_v2(0);
                self.told(format_args!("cuMemFree 0"), result);
            }
            3 => {
                let result = driver.cuMemFree_v2((&raw const address) as u64);
                self.told(format_args!("cuMemFree stack"), result);
            }
            4 => {
                if let Some(index) = self.any(|object| object.kind == Kind::Plain && object.bytes() > 1) {
                    let offset = 1 + self.random.below(self.objects[index].bytes() - 1);
                    let name = self.objects[index].name.clone();
                    let result = driver.cuMemFree_v2(self.objects[index].address + offset as u64);
                    self.told(format_args!("cuMemFree {name}+{offset}"), result);
                }
            }
            5 => {
                if let Some(index) = self.any(|object| object.kind == Kind::Plain) {
                    let name = self.objects[index].name.clone();
                    let result = driver.cuMemFreeHost(self.objects[index].address);
                    self.told(format_args!("cuMemFreeHost {name}"), result);
                }
            }
            6 => {
                if let Some(index) = self.any(|object| !object.is_device()) {
                    let name = self.objects[index].name.clone();
                    let result = driver.cuMemFree_v2(self.objects[index].address);
                    self.told(format_args!("cuMemFree {name}"), result);
                }
            }
            _ => {
                let mut pitch = 0;
                let result = driver.cuMemAllocPitch_v2(&mut address, &mut pitch, 0, 4, 4);
                self.told(format_args!("cuMemAllocPitch 0x4"), result);
            }
        }
    }

    /// A second free: another thread may have been given the address otherwise.
    pub fn free_wrongly(&mut self) {
        let plain = |kind: &Kind| matches!(kind, Kind::Plain | Kind::Managed | Kind::Pinned(_));
        let Some(index) = self.any(|object| plain(&object.kind)) else { return };
        let (address, is_host) = (self.objects[index].address, !self.objects[index].is_device());
        self.settle(index);
        self.release(index);
        let again = if is_host { self.driver.cuMemFreeHost(address) } else { self.driver.cuMemFree_v2(address) };
        self.told(format_args!("free again"), again);
        let mut value = [0; 2];
        let result = self.driver.cuPointerGetAttribute(&mut value, 2, address);
        self.told(format_args!("memory type of freed memory {}", value[0]), result);
        let (mut base, mut bytes) = (1, 1);
        let result = self.driver.cuMemGetAddressRange_v2(&mut base, &mut bytes, address);
        self.told(format_args!("range of freed memory {bytes}"), result);
    }
}
