//! What a program asks about memory. Addresses are told as distances from the object's own.

use crate::intended;
use crate::world::{Kind, Object, World};

/// Numbers of `CUpointer_attribute` whose value is an address.
const ADDRESSES: [i32; 3] = [3, 4, 11];
const CONTEXT: i32 = 1;
const HOST_POINTER: i32 = 4;

impl World<'_> {
    pub fn ask_attributes(&mut self) {
        let known =
            |object: &Object| !matches!(&object.kind, Kind::Mapped(handles) if handles.iter().any(|it| it.imported));
        let Some(index) = self.any(known) else { return };
        let (offset, _) = self.part(index);
        let object = &self.objects[index];
        let (name, base) = (object.name.clone(), object.address);
        let attribute = intended::ATTRIBUTES[self.random.below(intended::ATTRIBUTES.len())];
        if attribute == HOST_POINTER && object.kind == Kind::Plain && !intended::passes_for_plain(self.service) {
            return;
        }
        // The size of the output depends on the attribute, so what the call leaves must be the same on both sides as well.
        let mut value = [0u64; 2];
        let result = if self.random.one_in(3) {
            let output = value.as_mut_ptr();
            self.driver.cuPointerGetAttributes(1, &attribute, &output, base + offset as u64)
        } else {
            self.driver.cuPointerGetAttribute(&mut value, attribute, base + offset as u64)
        };
        let told = match value[0] {
            0 => "0".to_owned(),
            value if ADDRESSES.contains(&attribute) => format!("{:+}", value.wrapping_sub(base) as i64),
            value if attribute == CONTEXT => if value == self.context as u64 { "own" } else { "other" }.to_owned(),
            value => value.to_string(),
        };
        self.told(format_args!("attribute {attribute} of {name}+{offset} {told}"), result);
    }

    pub fn ask_range(&mut self) {
        let Some(index) = self.any(|_| true) else { return };
        let (offset, _) = self.part(index);
        let (name, start) = (self.objects[index].name.clone(), self.objects[index].address);
        let (mut base, mut bytes) = (0, 0);
        let result = self.driver.cuMemGetAddressRange_v2(&mut base, &mut bytes, start + offset as u64);
        let at = base.wrapping_sub(start) as i64;
        self.told(format_args!("range of {name}+{offset} {at:+} {bytes}"), result);
    }

    pub fn ask_memory(&mut self) {
        let (mut free, mut total) = (0, 0);
        let result = self.driver.cuMemGetInfo_v2(&mut free, &mut total);
        // More free than there is would be wrong on either side.
        self.told(format_args!("cuMemGetInfo, in order: {}", free <= total), result);
        let result = self.driver.cuDeviceTotalMem_v2(&mut total, self.device);
        self.told(format_args!("cuDeviceTotalMem, some: {}", total > 0), result);
    }
}
