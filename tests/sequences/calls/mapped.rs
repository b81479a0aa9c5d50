//! Memory that the program maps itself.

use crate::driver::{Access, Location, Properties};
use crate::intended;
use crate::world::{Handle, Kind, Object, World};

const GRANULE: usize = 2 << 20;
const DESCRIPTOR: i32 = 1;
const READ_WRITE: i32 = 3;

impl World<'_> {
    fn properties(&self, exportable: bool) -> Properties {
        let handle_types = if exportable { DESCRIPTOR } else { 0 };
        Properties { kind: 1, handle_types, location: self.own_place(), ..Properties::default() }
    }

    /// A reservation, one or more handles behind it, and access for every GPU.
    pub fn map(&mut self) {
        let chunks: Vec<usize> = (0..1 + self.random.below(3)).map(|_| GRANULE * (1 + self.random.below(2))).collect();
        let bytes: usize = chunks.iter().sum();
        if bytes > self.room {
            return;
        }
        let driver = self.driver;
        let (mut base, mut handles, mut results) = (0, Vec::new(), Vec::new());
        results.push(driver.cuMemAddressReserve(&mut base, bytes, 0, 0, 0));
        let mut at = base;
        for chunk in chunks {
            let (handle, imported) = self.create(chunk);
            results.push(driver.cuMemMap(at, chunk, 0, handle, 0));
            handles.push(Handle { value: handle, bytes: chunk, imported });
            at += chunk as u64;
        }
        let access = [0, 1].map(|id| Access { location: Location { kind: 1, id }, flags: READ_WRITE });
        results.push(driver.cuMemSetAccess(base, bytes, access.as_ptr(), 2));
        let name = self.name("v");
        self.say(format_args!(
            "{name} = map {handles:?} {results:?}",
            handles = handles.iter().map(|it| it.bytes).collect::<Vec<_>>()
        ));
        if results.iter().all(|result| *result == 0) {
            self.add(name, Kind::Mapped(handles), base, bytes, None);
        }
    }

    /// A handle, sometimes one that went out as a descriptor and came back.
    fn create(&mut self, bytes: usize) -> (u64, bool) {
        let driver = self.driver;
        let shared = self.random.one_in(3);
        let mut handle = 0;
        let result = driver.cuMemCreate(&mut handle, bytes, &self.properties(shared), 0);
        self.expect("cuMemCreate", result);
        if !shared {
            return (handle, false);
        }
        let (mut descriptor, mut imported) = (-1, 0);
        let result = driver.cuMemExportToShareableHandle(&mut descriptor, handle, DESCRIPTOR, 0);
        self.expect("cuMemExportToShareableHandle", result);
        let result = driver.cuMemImportFromShareableHandle(&mut imported, descriptor as usize, DESCRIPTOR);
        self.told(format_args!("import of an export"), result);
        // SAFETY: the descriptor is the one just made, and this closes it once.
        unsafe { libc::close(descriptor) };
        let result = driver.cuMemRelease(handle);
        self.expect("cuMemRelease", result);
        (imported, true)
    }

    pub fn unmap(&mut self, object: &Object, handles: &[Handle]) -> i32 {
        let driver = self.driver;
        // Unmapping does not wait for work, so the program has to.
        if let Some(stream) = object.busy {
            let result = driver.cuStreamSynchronize(stream);
            self.expect("cuStreamSynchronize", result);
        }
        // A handle may go before its mapping does.
        let early = self.random.one_in(2);
        let release = |handle: u64| driver.cuMemRelease(handle);
        let before: Vec<i32> = handles.iter().filter(|_| early).map(|handle| release(handle.value)).collect();
        let while_mapped = driver.cuMemAddressFree(object.address, object.bytes());
        let unmapped = driver.cuMemUnmap(object.address, object.bytes());
        let after: Vec<i32> = handles.iter().filter(|_| !early).map(|handle| release(handle.value)).collect();
        self.say(format_args!("unmap {}: {before:?} {while_mapped} {unmapped} {after:?}", object.name));
        driver.cuMemAddressFree(object.address, object.bytes())
    }

    pub fn ask_mapped(&mut self) {
        let driver = self.driver;
        let Some(index) = self.any(|object| matches!(object.kind, Kind::Mapped(_) | Kind::Ordered)) else { return };
        let (offset, _) = self.part(index);
        let object = &self.objects[index];
        let (name, at) = (object.name.clone(), object.address + offset as u64);
        let mut flags = 9;
        let result = driver.cuMemGetAccess(&mut flags, &self.own_place(), at);
        self.told(format_args!("access to {name}+{offset} {flags}"), result);
        let Kind::Mapped(handles) = &self.objects[index].kind else { return };
        let (first, known) = (handles[0], handles.clone());
        let mut found = Properties::default();
        let result = driver.cuMemGetAllocationPropertiesFromHandle(&mut found, first.value);
        let place = intended::place_told(first.imported, found.location, self.own_place());
        self.told(format_args!("properties of {name} {place:?} {}", found.handle_types), result);
        let mut retained = 0;
        let result = driver.cuMemRetainAllocationHandle(&mut retained, at);
        let is_known = known.iter().any(|handle| handle.value == retained);
        if self.told(format_args!("retain {name}+{offset}, known {is_known}"), result) {
            let result = driver.cuMemRelease(retained);
            self.expect("cuMemRelease", result);
        }
        let address = self.objects[index].address;
        let again = driver.cuMemMap(address, first.bytes, 0, first.value, 0);
        let part = driver.cuMemUnmap(address, first.bytes / 2);
        let free = driver.cuMemFree_v2(address);
        self.say(format_args!("{name}: map again {again}, unmap half {part}, free {free}"));
    }
}
