//! Stream-ordered memory.

use crate::world::{Kind, Object, World};

impl World<'_> {
    pub fn allocate_ordered(&mut self) {
        let bytes = self.size();
        if bytes > self.room {
            return;
        }
        let stream = self.stream();
        let mut address = 0;
        let result = if self.random.one_in(2) {
            self.driver.cuMemAllocAsync(&mut address, bytes, stream)
        } else {
            let mut pool = 0;
            let result = self.driver.cuDeviceGetDefaultMemPool(&mut pool, self.device);
            self.expect("cuDeviceGetDefaultMemPool", result);
            self.driver.cuMemAllocFromPoolAsync(&mut address, bytes, pool, stream)
        };
        let name = self.name("o");
        if self.told(format_args!("{name} = cuMemAllocAsync {bytes}"), result) {
            self.add(name, Kind::Ordered, address, bytes, Some(stream));
        }
    }

    /// In the order of its stream mostly, and as plain memory, which is legal, too. That free waits for nobody (measured), so
    /// the work on the memory must be over.
    pub fn release_ordered(&mut self, object: &Object) -> i32 {
        if self.random.one_in(4) {
            if let Some(stream) = object.busy {
                let result = self.driver.cuStreamSynchronize(stream);
                self.expect("cuStreamSynchronize", result);
            }
            return self.driver.cuMemFree_v2(object.address);
        }
        let stream = object.busy.unwrap_or(self.streams[0]);
        self.driver.cuMemFreeAsync(object.address, stream)
    }

    pub fn ask_mempool(&mut self) {
        let (mut pool, mut threshold) = (0, 1);
        let result = self.driver.cuDeviceGetDefaultMemPool(&mut pool, self.device);
        self.expect("cuDeviceGetDefaultMemPool", result);
        // What is used and reserved depends on other threads.
        let result = self.driver.cuMemPoolGetAttribute(pool, 4, &mut threshold);
        self.told(format_args!("release threshold {threshold}"), result);
        let result = self.driver.cuMemPoolTrimTo(pool, 0);
        self.told(format_args!("cuMemPoolTrimTo 0"), result);
        let result = self.driver.cuMemFreeAsync(0, self.streams[0]);
        self.told(format_args!("cuMemFreeAsync 0"), result);
        if let Some(index) = self.any(|object| object.kind == Kind::Plain && object.bytes() > 1) {
            let name = self.objects[index].name.clone();
            let result = self.driver.cuMemFreeAsync(self.objects[index].address + 1, self.streams[0]);
            self.told(format_args!("cuMemFreeAsync {name}+1"), result);
        }
    }
}
