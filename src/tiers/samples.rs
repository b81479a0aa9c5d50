//! Times that were measured, and what more far memory costs by them.

/// What launches took with so much far memory.
#[derive(Clone, Copy, Debug)]
pub struct Level {
    /// The pass over the far bytes, nanoseconds.
    pub pass_ns: f32,
    /// The launch's time, nanoseconds, and by how much single ones differ from it.
    pub ns: f32,
    pub off: f32,
    pub count: u32,
}

impl Level {
    pub fn new(pass_ns: f32, ns: f32) -> Self {
        Self { pass_ns, ns, off: 0.0, count: 1 }
    }

    pub fn is(&self, pass_ns: f32) -> bool {
        (pass_ns - self.pass_ns).abs() <= 0.02 * pass_ns.max(self.pass_ns)
    }

    pub fn add(&mut self, ns: f32) {
        let weight = (1.0 / (self.count + 1) as f32).max(0.2);
        self.off += ((ns - self.ns).abs() - self.off) * weight;
        self.ns += (ns - self.ns) * weight;
        self.count = self.count.saturating_add(1);
    }
}

/// Two measured times of something, one with more far memory than the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Samples {
    pub most: Option<Level>,
    pub least: Option<Level>,
}

impl Samples {
    /// Adds a measurement. Answers whether it contradicts the earlier ones: the same launch does something else now, and nothing
    /// that was measured holds.
    pub fn add(&mut self, pass_ns: f32, ns: f32) -> bool {
        let differs = |level: &Level| level.is(pass_ns) && (ns - level.ns).abs() > 0.5 * level.ns.max(ns);
        let differs = self.most.as_ref().is_some_and(differs) || self.least.as_ref().is_some_and(differs);
        if differs {
            *self = Self::default();
        }
        for (level, is_beyond) in
            [(&mut self.most, f32::gt as fn(&f32, &f32) -> bool), (&mut self.least, f32::lt as fn(&f32, &f32) -> bool)]
        {
            match level {
                Some(known) if known.is(pass_ns) => known.add(ns),
                Some(known) if !is_beyond(&pass_ns, &known.pass_ns) => {}
                _ => *level = Some(Level::new(pass_ns, ns)),
            }
        }
        differs
    }

    /// Nanoseconds that each nanosecond of far pass costs, if two measurements are far enough apart to tell. Where launches of one
    /// kind take now long and now short, as with a length among the parameters, that counts against it.
    pub fn slope(&self) -> Option<f32> {
        let (most, least) = (self.most?, self.least?);
        let (gain, off) = (most.ns - least.ns, most.off + least.off);
        let is_clear = most.pass_ns - least.pass_ns > 0.2 * most.pass_ns && off <= 0.5 * gain.abs().max(0.1 * most.ns);
        is_clear.then(|| ((gain - off) / (most.pass_ns - least.pass_ns)).max(0.0))
    }
}

/// A plane through measurements of launches of different sizes: nanoseconds a byte named against those of far pass a byte, and against
/// how much of a launch's fixed time falls to a byte. Without the latter, small launches that are near would pass for slow near memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Line {
    count: f32,
    x: f32,
    y: f32,
    z: f32,
    xx: f32,
    xy: f32,
    yy: f32,
    xz: f32,
    yz: f32,
    zz: f32,
}

impl Line {
    pub fn add(&mut self, pass_ns: f32, ns: f32, bytes: u64) {
        let bytes = bytes.max(1) as f32;
        let (x, y, z) = (pass_ns / bytes, ns / bytes, 1e3 / bytes);
        // About the last fifty count.
        let keep = 0.98;
        self.count = self.count * keep + 1.0;
        for (sum, value) in [
            (&mut self.x, x),
            (&mut self.y, y),
            (&mut self.z, z),
            (&mut self.xx, x * x),
            (&mut self.xy, x * y),
            (&mut self.yy, y * y),
            (&mut self.xz, x * z),
            (&mut self.yz, y * z),
            (&mut self.zz, z * z),
        ] {
            *sum = *sum * keep + value;
        }
    }

    /// What a nanosecond of far pass costs, if the points lie apart and near the plane, and sizes do not go along with what is far.
    pub fn slope(&self) -> Option<f32> {
        if self.count < 3.5 {
            return None;
        }
        let mean = |sum: f32| sum / self.count;
        let (x, y, z) = (mean(self.x), mean(self.y), mean(self.z));
        let (xx, xy, yy) = (mean(self.xx) - x * x, mean(self.xy) - x * y, mean(self.yy) - y * y);
        let (xz, yz, zz) = (mean(self.xz) - x * z, mean(self.yz) - y * z, mean(self.zz) - z * z);
        let is_one_size = zz <= 1e-4 * z * z;
        let (slope, rest) = if is_one_size {
            let slope = xy / xx;
            (slope, yy - slope * xy)
        } else {
            let apart = xx * zz - xz * xz;
            if apart <= 0.1 * xx * zz {
                return None;
            }
            let (slope, fixed) = ((xy * zz - yz * xz) / apart, (yz * xx - xy * xz) / apart);
            (slope, yy - slope * xy - fixed * yz)
        };
        (xx > 0.01 * x * x && rest.max(0.0) < 0.02 * y * y).then_some(slope.max(0.0))
    }
}
