//! What is written, copied and read, on every way there is.

use crate::driver::Copy2d;
use crate::kernels::launch;
use crate::world::{Kind, Object, World};

/// `start`, `start + 1`, … as bytes, cut where `bytes` end.
fn iota(start: u32, bytes: usize) -> Vec<u8> {
    (0..bytes.div_ceil(4) as u32).flat_map(|index| start.wrapping_add(index).to_le_bytes()).take(bytes).collect()
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
}

impl World<'_> {
    pub fn write_some(&mut self) {
        if let Some(index) = self.any(|_| true) {
            let (offset, bytes) = self.part(index);
            self.write(index, offset, bytes);
            let name = self.objects[index].name.clone();
            self.say(format_args!("write {name}+{offset} {bytes}"));
        }
    }

    pub fn check_some(&mut self) {
        if let Some(index) = self.any(|_| true) {
            self.check(index);
        }
    }

    /// Writes a new pattern by the processor, a copy, a memset or a kernel.
    pub fn write(&mut self, index: usize, offset: usize, bytes: usize) {
        let value = self.random.next() as u32;
        let (device, on_processor) = {
            let object = &self.objects[index];
            (object.is_device(), !object.is_device() || object.kind == Kind::Managed)
        };
        let aligned = offset.is_multiple_of(4) && bytes >= 4;
        let stream = if self.random.one_in(3) { 0 } else { self.stream() };
        let address = self.objects[index].address + offset as u64;
        let (result, pattern) = match self.random.below(5) {
            0 | 1 if on_processor => {
                self.settle(index);
                let pattern = iota(value, bytes);
                // SAFETY: the object has `bytes` bytes from `address` on, which the processor may touch, and no work does.
                unsafe { std::ptr::copy_nonoverlapping(pattern.as_ptr(), address as *mut u8, bytes) };
                (0, pattern)
            }
            1 if device => {
                self.order(index, stream);
                (self.driver.cuMemsetD8Async(address, value as u8, bytes, stream), vec![value as u8; bytes])
            }
            2 if device && aligned => {
                self.order(index, stream);
                let pattern: Vec<u8> = value.to_le_bytes().into_iter().cycle().take(bytes / 4 * 4).collect();
                (self.driver.cuMemsetD32Async(address, value, bytes / 4, stream), pattern)
            }
            3 if device && aligned => {
                self.order(index, stream);
                let parameters = [address, bytes as u64 / 4, u64::from(value)];
                (launch(self.driver, self.kernels.iota, stream, &parameters), iota(value, bytes / 4 * 4))
            }
            4 if device => {
                self.order(index, 0);
                (self.driver.cuMemsetD8_v2(address, value as u8, bytes), vec![value as u8; bytes])
            }
            _ => {
                self.settle(index);
                let pattern = iota(value, bytes);
                let result = match device {
                    true => self.driver.cuMemcpyHtoD_v2(address, pattern.as_ptr(), bytes),
                    false => self.driver.cuMemcpy(address, pattern.as_ptr() as u64, bytes),
                };
                (result, pattern)
            }
        };
        self.expect("a write", result);
        self.objects[index].shadow[offset..offset + pattern.len()].copy_from_slice(&pattern);
        // A word-wise way leaves the bytes of an unfinished word; a new object must be known to its end.
        let rest = bytes - pattern.len();
        if rest > 0 {
            let at = offset + pattern.len();
            self.settle(index);
            let tail = vec![value as u8; rest];
            let to = self.objects[index].address + at as u64;
            let result = self.driver.cuMemcpy(to, tail.as_ptr() as u64, rest);
            self.expect("a write", result);
            self.objects[index].shadow[at..].iter_mut().zip(&tail).for_each(|(byte, new)| *byte = *new);
        }
    }

    /// Two different objects, and a length that fits both.
    fn pair(&mut self, pick: impl Fn(&Object) -> bool) -> Option<(usize, usize)> {
        let to = self.any(&pick)?;
        let from = self.any(&pick)?;
        (to != from).then_some((to, from))
    }

    pub fn copy_some(&mut self) {
        let Some((to, from)) = self.pair(|_| true) else { return };
        let most = self.objects[to].bytes().min(self.objects[from].bytes());
        let bytes = 1 + self.random.below(most);
        let mut to_at = self.random.below(self.objects[to].bytes() - bytes + 1);
        let mut from_at = self.random.below(self.objects[from].bytes() - bytes + 1);
        let both = self.objects[to].is_device() && self.objects[from].is_device();
        let stream = self.stream();
        let way = self.random.below(5);
        let by_kernel = way == 0 && both && bytes >= 4;
        if by_kernel {
            (to_at, from_at) = (to_at / 4 * 4, from_at / 4 * 4);
        }
        let (target, source) = (self.objects[to].address + to_at as u64, self.objects[from].address + from_at as u64);
        let bytes = if by_kernel { bytes / 4 * 4 } else { bytes };
        let driver = self.driver;
        let is_async = by_kernel || matches!(way, 1 | 2);
        for index in [to, from] {
            if is_async { self.order(index, stream) } else { self.settle(index) }
        }
        let result = match way {
            0 if by_kernel => launch(driver, self.kernels.copy, stream, &[target, source, bytes as u64 / 4]),
            1 if both => driver.cuMemcpyDtoDAsync_v2(target, source, bytes, stream),
            1 | 2 => driver.cuMemcpyAsync(target, source, bytes, stream),
            3 if both => {
                self.order(to, 0);
                self.order(from, 0);
                driver.cuMemcpyDtoD_v2(target, source, bytes)
            }
            _ => {
                self.order(to, 0);
                self.order(from, 0);
                driver.cuMemcpy(target, source, bytes)
            }
        };
        let part = self.objects[from].shadow[from_at..from_at + bytes].to_vec();
        self.objects[to].shadow[to_at..to_at + bytes].copy_from_slice(&part);
        let (to, from) = (&self.objects[to].name.clone(), &self.objects[from].name.clone());
        self.told(format_args!("copy {to}+{to_at} {from}+{from_at} {bytes}"), result);
    }

    /// Rows of one object into rows of another.
    pub fn copy_rows(&mut self) {
        let Some((to, from)) = self.pair(Object::is_device) else { return };
        let most = self.objects[to].bytes().min(self.objects[from].bytes());
        let width = 1 + self.random.below(most.min(3000));
        let (to_pitch, from_pitch) = (width + self.random.below(200), width + self.random.below(200));
        let height = most / to_pitch.max(from_pitch);
        if height == 0 {
            return;
        }
        self.order(to, 0);
        self.order(from, 0);
        let copy = Copy2d {
            from_kind: 2,
            from_device: self.objects[from].address,
            from_pitch,
            to_kind: 2,
            to_device: self.objects[to].address,
            to_pitch,
            width,
            height,
            ..Copy2d::default()
        };
        let result = self.driver.cuMemcpy2D_v2(&copy);
        for row in 0..height {
            let line = self.objects[from].shadow[row * from_pitch..row * from_pitch + width].to_vec();
            self.objects[to].shadow[row * to_pitch..row * to_pitch + width].copy_from_slice(&line);
        }
        let (to, from) = (&self.objects[to].name.clone(), &self.objects[from].name.clone());
        self.told(format_args!("rows {to}/{to_pitch} {from}/{from_pitch} {width}x{height}"), result);
    }

    /// The sum of two objects' words into the first of them.
    pub fn add_some(&mut self) {
        let Some((to, other)) = self.pair(Object::is_device) else { return };
        let count = self.objects[to].bytes().min(self.objects[other].bytes()) / 4;
        if count == 0 {
            return;
        }
        let stream = self.stream();
        self.order(to, stream);
        self.order(other, stream);
        let (one, two) = (self.objects[to].address, self.objects[other].address);
        let result = launch(self.driver, self.kernels.add, stream, &[one, one, two, count as u64]);
        let sums: Vec<u8> = words(&self.objects[to].shadow[..count * 4])
            .zip(words(&self.objects[other].shadow))
            .flat_map(|(one, two)| one.wrapping_add(two).to_le_bytes())
            .collect();
        self.objects[to].shadow[..count * 4].copy_from_slice(&sums);
        let (to, other) = (&self.objects[to].name.clone(), &self.objects[other].name.clone());
        self.told(format_args!("add {to} {other} {count}"), result);
    }
}
