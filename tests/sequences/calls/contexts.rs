//! A context of the thread's own, which takes its memory with it.

use crate::world::World;

impl World<'_> {
    pub fn private_context(&mut self) {
        const BYTES: usize = 3 << 20;
        if self.room < 4 * BYTES {
            return;
        }
        let driver = self.driver;
        let mut context = 0;
        let result = driver.cuCtxCreate_v2(&mut context, 0, self.device);
        self.told(format_args!("cuCtxCreate"), result);
        let (mut kept, mut freed, mut pinned) = (0, 0, 0);
        let made = [
            driver.cuMemAlloc_v2(&mut kept, BYTES),
            driver.cuMemAlloc_v2(&mut freed, BYTES / 7),
            driver.cuMemHostAlloc(&mut pinned, BYTES, 1),
        ];
        let value = self.random.next() as u8;
        let used = [
            driver.cuMemsetD8_v2(kept, value, BYTES),
            driver.cuMemFree_v2(freed),
            driver.cuMemcpyDtoH_v2(pinned as *mut u8, kept, BYTES),
        ];
        // SAFETY: pinned memory of this many bytes, written by the copy above, which has ended.
        let found = unsafe { std::slice::from_raw_parts(pinned as *const u8, BYTES) };
        let right = found.iter().all(|byte| *byte == value);
        let destroyed = driver.cuCtxDestroy_v2(context);
        let back = driver.cuCtxSetCurrent(self.context);
        self.say(format_args!("in it {made:?} {used:?} right {right}, destroyed {destroyed}, back {back}"));
    }
}
