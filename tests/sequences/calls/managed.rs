//! Managed memory that the program takes itself.

use crate::driver::Location;
use crate::intended;
use crate::world::{Kind, World};

impl World<'_> {
    pub fn allocate_managed(&mut self) {
        let bytes = self.size();
        if bytes > self.room {
            return;
        }
        let flags = [1, 1, 1, 2, 0][self.random.below(5)];
        let mut address = 0;
        let result = self.driver.cuMemAllocManaged(&mut address, bytes, flags);
        let name = self.name("m");
        if self.told(format_args!("{name} = cuMemAllocManaged {bytes} {flags}"), result) {
            self.add(name, Kind::Managed, address, bytes, None);
        }
    }

    /// Advice and moves, of memory that is managed and of memory that is not.
    pub fn advise(&mut self) {
        let managed = self.random.below(4) > 0;
        let Some(index) = self.any(|object| (object.kind == Kind::Managed) == managed) else { return };
        if self.objects[index].kind == Kind::Plain && !intended::passes_for_plain(self.service) {
            return;
        }
        let (offset, bytes) = self.part(index);
        let (name, at) = (self.objects[index].name.clone(), self.objects[index].address + offset as u64);
        let place = [Location { kind: 1, id: 0 }, Location { kind: 1, id: 1 }, Location { kind: 2, id: 0 }]
            [self.random.below(3)];
        let what = format!("{name}+{offset} {bytes} to {}.{}", place.kind, place.id);
        if self.random.one_in(2) {
            let advice = 1 + self.random.below(6) as i32;
            let result = self.driver.cuMemAdvise_v2(at, bytes, advice, place);
            self.told(format_args!("advise {advice} {what}"), result);
        } else {
            let stream = self.stream();
            self.order(index, stream);
            let result = self.driver.cuMemPrefetchAsync_v2(at, bytes, place, 0, stream);
            self.told(format_args!("prefetch {what}"), result);
        }
    }
}
