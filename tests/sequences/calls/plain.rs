//! `cuMemAlloc` and its kin.

use crate::world::{Kind, World};

impl World<'_> {
    pub fn allocate(&mut self) {
        let bytes = self.size();
        if bytes > self.room {
            return self.free();
        }
        let mut address = 0;
        let result = self.driver.cuMemAlloc_v2(&mut address, bytes);
        let name = self.name("a");
        if self.told(format_args!("{name} = cuMemAlloc {bytes}"), result) {
            if address % 256 != 0 {
                self.say(format_args!("{name} is not aligned"));
            }
            self.add(name, Kind::Plain, address, bytes, None);
        }
    }

    pub fn allocate_pitched(&mut self) {
        let (width, height) = (1 + self.random.below(5000), 1 + self.random.below(600));
        let element = [4, 8, 16, 5][self.random.below(4)];
        if (width + 512) * height > self.room {
            return;
        }
        let (mut address, mut pitch) = (0, 0);
        let result = self.driver.cuMemAllocPitch_v2(&mut address, &mut pitch, width, height, element);
        let name = self.name("p");
        let call = format!("{name} = cuMemAllocPitch {width} {height} {element}");
        if self.told(format_args!("{call}, pitch {pitch}"), result) {
            self.add(name, Kind::Plain, address, pitch * height, None);
        }
    }

    pub fn free(&mut self) {
        if let Some(index) = self.any(|_| true) {
            // Often without a check: what is freed while work runs on it is a case of its own.
            if self.random.one_in(2) {
                self.check(index);
            }
            self.release(index);
        }
    }
}
