//! Which places in the program made the pool grow, as every log of level info tells: of memory that is used again it says nothing.

use std::collections::HashMap;

use gpupool_events::Site;

/// Places that are kept apart.
const SITES: usize = 2048;

/// What each place made the pool take.
#[derive(Default)]
pub struct Grown {
    sites: HashMap<u64, Site>,
    sums: HashMap<u64, Sum>,
    /// Growth that no place is told for, which older versions do not.
    pub elsewhere: Sum,
}

/// Growth of one place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    pub times: u64,
    pub bytes: u64,
    /// Bytes of it that did not lie on the GPU that asked.
    pub far: u64,
}

impl Sum {
    fn add(&mut self, bytes: u64, far: u64) {
        self.times += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        self.far = self.far.saturating_add(far);
    }
}

impl Grown {
    /// What the number of a place means.
    pub fn name_site(&mut self, id: u64, site: &Site) {
        if self.sites.len() < SITES {
            self.sites.insert(id, site.clone());
        }
    }

    /// The pool grew.
    pub fn add(&mut self, site: Option<u64>, bytes: u64, far: u64) {
        let known = site.filter(|site| self.sums.len() < SITES || self.sums.contains_key(site));
        let sum = match known {
            Some(site) => self.sums.entry(site).or_default(),
            None => &mut self.elsewhere,
        };
        sum.add(bytes, far);
    }

    /// Each place with what it made the pool take, the most first.
    pub fn sites(&self) -> Vec<(&Site, Sum)> {
        let sums = self.sums.iter().filter_map(|(id, sum)| Some((*id, self.sites.get(id)?, *sum)));
        let mut sums: Vec<(u64, &Site, Sum)> = sums.collect();
        sums.sort_by_key(|(id, _, sum)| (std::cmp::Reverse(sum.bytes), *id));
        sums.into_iter().map(|(_, site, sum)| (site, sum)).collect()
    }
}
