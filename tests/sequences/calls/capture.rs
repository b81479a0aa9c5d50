//! Scenes around a stream that is being captured. One thread plays them while the others wait, since a capture in mode
//! global forbids calls to all.

use crate::kernels::launch;
use crate::world::{Object, World};

impl World<'_> {
    /// Captures a kernel on a live object, takes and frees memory meanwhile where the side allows it, and replays.
    pub fn capture(&mut self) {
        const BYTES: usize = 4 << 20;
        let Some(index) = self.any(|object| object.is_device() && object.bytes() >= 4) else { return };
        if self.room < 2 * BYTES {
            return;
        }
        let driver = self.driver;
        let mode = self.random.below(3) as i32;
        let stream = self.streams[1];
        for index in 0..self.objects.len() {
            self.settle(index);
        }
        let allocates = self.side.may_allocate_in_capture(self.service, mode);
        let (mut before, mut inside) = (0, 0);
        let result = driver.cuMemAlloc_v2(&mut before, BYTES);
        self.expect("cuMemAlloc", result);
        let begun = driver.cuStreamBeginCapture_v2(stream, mode);
        let start = self.random.next() as u32;
        let (address, count) = (self.objects[index].address, self.objects[index].bytes() / 4);
        let launched = launch(driver, self.kernels.iota, stream, &[address, count as u64, u64::from(start)]);
        if allocates {
            let taken = driver.cuMemAlloc_v2(&mut inside, BYTES);
            self.expect("cuMemAlloc in a capture", taken);
            let freed = driver.cuMemFree_v2(before);
            self.expect("cuMemFree in a capture", freed);
            let launched = launch(driver, self.kernels.copy, stream, &[inside, address, (count.min(BYTES / 4)) as u64]);
            self.expect("a kernel in a capture", launched);
        }
        let (mut status, mut graph) = (0, 0);
        let asked = driver.cuStreamIsCapturing(stream, &mut status);
        let ended = driver.cuStreamEndCapture(stream, &mut graph);
        self.say(format_args!("capture {mode}: {begun} {launched}, status {asked} {status}, ended {ended}"));
        if !allocates {
            let results = [driver.cuMemFree_v2(before), driver.cuMemAlloc_v2(&mut inside, BYTES)];
            results.into_iter().for_each(|result| self.expect("outside the capture", result));
        }
        self.replay(index, graph, start, allocates.then_some(inside));
        let result = driver.cuMemFree_v2(inside);
        self.expect("cuMemFree", result);
    }

    /// Runs the graph twice; what it writes must be there, also in the block that was taken inside.
    fn replay(&mut self, index: usize, graph: usize, start: u32, inside: Option<u64>) {
        let driver = self.driver;
        let mut exec = 0;
        let mut results = vec![driver.cuGraphInstantiateWithFlags(&mut exec, graph, 0)];
        for _ in 0..2 {
            results.push(driver.cuGraphLaunch(exec, self.streams[1]));
            // Other memory comes and goes between two replays.
            let mut other = 0;
            results.push(driver.cuMemAlloc_v2(&mut other, 3 << 20));
            results.push(driver.cuMemsetD8_v2(other, 0xee, 3 << 20));
            results.push(driver.cuMemFree_v2(other));
        }
        results.push(driver.cuStreamSynchronize(self.streams[1]));
        results.extend([driver.cuGraphExecDestroy(exec), driver.cuGraphDestroy(graph)]);
        self.say(format_args!("replay {results:?}"));
        let words = self.objects[index].bytes() / 4;
        let pattern: Vec<u8> = (0..words as u32).flat_map(|at| start.wrapping_add(at).to_le_bytes()).collect();
        self.objects[index].shadow[..words * 4].copy_from_slice(&pattern);
        self.check(index);
        if let Some(inside) = inside {
            let mut found = vec![0; pattern.len().min(4 << 20)];
            let result = driver.cuMemcpyDtoH_v2(found.as_mut_ptr(), inside, found.len());
            self.expect("cuMemcpyDtoH", result);
            if found[..] != pattern[..found.len()] {
                self.say(format_args!("the block of the capture is WRONG"));
            }
        }
    }

    /// A capture of nothing but stream-ordered work, and one that is broken by a call that no side allows.
    pub fn capture_nothing(&mut self) {
        let driver = self.driver;
        let stream = self.streams[1];
        for index in 0..self.objects.len() {
            self.settle(index);
        }
        let (mut graph, mut status) = (0, 0);
        let begun = driver.cuStreamBeginCapture_v2(stream, 0);
        let synchronized = driver.cuStreamSynchronize(stream);
        let asked = driver.cuStreamIsCapturing(stream, &mut status);
        let ended = driver.cuStreamEndCapture(stream, &mut graph);
        self.say(format_args!(
            "broken capture: {begun} {synchronized}, status {asked} {status}, ended {ended} {graph}"
        ));
        // The objects were not touched, and the stream works again.
        if let Some(index) = self.any(Object::is_device) {
            let bytes = self.objects[index].bytes();
            self.write(index, 0, bytes);
            self.check(index);
        }
    }
}
