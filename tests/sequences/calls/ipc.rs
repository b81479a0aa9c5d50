//! Memory shared with the other process: one side exports a block, the other opens it, reads it and writes into it.

use crate::driver::IpcHandle;
use crate::intended;
use crate::peer::Channel;
use crate::world::{Kind, Object, Random, World};

/// What the two do with the block; both draw the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plot {
    /// The importer writes, the exporter reads.
    Write,
    /// The importer opens it twice and closes it three times.
    Twice,
    /// The exporter frees it while it is open.
    FreeWhileOpen,
}

fn plot(mut random: Random) -> Plot {
    [Plot::Write, Plot::Twice, Plot::FreeWhileOpen][random.below(3)]
}

/// FNV-1a: the other process's bytes are compared by this.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

fn hex(bytes: &[u8; 64]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn handle_of(text: &str) -> IpcHandle {
    let mut bytes = [0; 64];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = text.get(2 * index..2 * index + 2).and_then(|two| u8::from_str_radix(two, 16).ok()).unwrap_or(0);
    }
    IpcHandle(bytes)
}

impl World<'_> {
    /// Exports one of this thread's blocks to the process at the other end.
    pub fn export(&mut self, channel: &mut Channel, round: Random) {
        let driver = self.driver;
        // Smaller ones share 2 MiB, and bare a handle is that of all of it.
        let can = |object: &Object| object.kind == Kind::Plain && object.bytes() >= 2 << 20;
        let Some(index) = self.any(|object| can(object)).filter(|_| intended::passes_for_plain(self.service)) else {
            self.say(format_args!("nothing to export"));
            return channel.send("none");
        };
        self.settle(index);
        let (name, address, bytes) =
            (self.objects[index].name.clone(), self.objects[index].address, self.objects[index].bytes());
        let mut handle = IpcHandle([0; 64]);
        // An inner address gives the handle of the whole block.
        let at = address + if self.random.one_in(2) { self.random.below(bytes) as u64 } else { 0 };
        let result = driver.cuIpcGetMemHandle(&mut handle, at);
        self.told(format_args!("cuIpcGetMemHandle {name}"), result);
        let mut again = 0;
        let own = driver.cuIpcOpenMemHandle_v2(&mut again, handle, 1);
        self.told(format_args!("opened in its own process"), own);
        channel.send(&format!("{} {bytes} {}", hex(&handle.0), hash(&self.objects[index].shadow)));
        channel.receive();
        let plot = plot(round);
        if plot == Plot::FreeWhileOpen {
            self.release(index);
        }
        channel.send("go on");
        let written: u8 = channel.receive().parse().unwrap_or(0);
        if plot != Plot::FreeWhileOpen {
            if written > 0 {
                self.objects[index].shadow.fill(written);
            }
            self.check(index);
        }
    }

    /// Opens what the other process exports.
    pub fn import(&mut self, channel: &mut Channel, round: Random) {
        let driver = self.driver;
        let offer = channel.receive();
        let mut words = offer.split(' ');
        let (Some(handle), Some(bytes), Some(sum)) = (words.next(), words.next(), words.next()) else { return };
        let (handle, bytes) = (handle_of(handle), bytes.parse().unwrap_or(0));
        let read = |address: u64| {
            let mut found = vec![0u8; bytes];
            let result = driver.cuMemcpyDtoH_v2(found.as_mut_ptr(), address, bytes);
            (result, hash(&found).to_string() == sum)
        };
        let plot = plot(round);
        let mut address = 0;
        let opened = driver.cuIpcOpenMemHandle_v2(&mut address, handle, 1);
        self.told(format_args!("cuIpcOpenMemHandle {bytes} {plot:?}"), opened);
        let before = read(address);
        channel.send("opened");
        channel.receive();
        let after = read(address);
        self.say(format_args!("read {before:?}, then {after:?}"));
        let mut written = 0;
        match plot {
            Plot::Write if opened == 0 => {
                written = 1 + self.random.below(255) as u8;
                let set = driver.cuMemsetD8_v2(address, written, bytes);
                // The copy waits for the memset.
                let mut last = [0];
                let copied = driver.cuMemcpyDtoH_v2(last.as_mut_ptr(), address + bytes as u64 - 1, 1);
                self.say(format_args!("wrote {set} {copied} {}", last[0] == written));
            }
            Plot::Twice => {
                let mut second = 0;
                let result = driver.cuIpcOpenMemHandle_v2(&mut second, handle, 1);
                self.told(format_args!("opened again, same address: {}", second == address), result);
                let closed = driver.cuIpcCloseMemHandle(second);
                self.say(format_args!("closed once {closed}, read {:?}", read(address)));
            }
            _ => {}
        }
        let inner = driver.cuIpcCloseMemHandle(address + 1);
        let freed = driver.cuMemFree_v2(address);
        let closed = driver.cuIpcCloseMemHandle(address);
        let again = driver.cuIpcCloseMemHandle(address);
        self.say(format_args!("inner close {inner}, free {freed}, close {closed}, again {again}"));
        channel.send(&written.to_string());
    }
}
