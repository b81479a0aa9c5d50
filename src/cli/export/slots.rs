//! Which of several processes of one name and rank a series is of. The number of a process would make a new series of each start, which
//! nobody can keep; the sum of all would fall when one of them ends, and then look like a counter that began anew.

use std::collections::BTreeMap;

use crate::pages::{Key, Listed};
use crate::terminal::clean;

/// What the labels of a process say. The name is the program's to choose, and shown by terminals, too.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Labels {
    /// The file that it runs.
    pub process: String,
    /// Its number in its job; empty where it has none.
    pub rank: String,
    /// The lowest number that no other process of this name and rank had when it was first seen.
    pub slot: u32,
}

/// The labels of the processes that live.
#[derive(Default)]
pub struct Slots {
    taken: BTreeMap<Key, Labels>,
}

impl Slots {
    /// The labels of each row. A process keeps its own as long as it lives.
    pub fn of(&mut self, rows: &[Listed]) -> Vec<Labels> {
        let mut new: Vec<&Listed> = Vec::new();
        let mut kept = BTreeMap::new();
        for row in rows {
            let key = row.key();
            match self.taken.remove(&key) {
                Some(labels) => drop(kept.insert(key, labels)),
                None => new.push(row),
            }
        }
        self.taken = kept;
        // The older ones first: an exporter that has just begun gives the same numbers as the one before it, mostly.
        new.sort_by_key(|row| (row.told.process.created, row.told.process.identity.pid));
        for row in new {
            let process = &row.told.process;
            let (name, rank) = (clean(&process.name), process.rank.map_or(String::new(), |rank| rank.to_string()));
            let mut labels = Labels { process: name, rank, slot: 0 };
            let of_name: Vec<u32> =
                self.taken.values().filter(|other| is_alike(other, &labels)).map(|l| l.slot).collect();
            while of_name.contains(&labels.slot) {
                labels.slot += 1;
            }
            self.taken.insert(row.key(), labels);
        }
        let labels = rows.iter().filter_map(|row| self.taken.get(&row.key()).cloned());
        labels.collect()
    }
}

fn is_alike(one: &Labels, other: &Labels) -> bool {
    (&one.process, &one.rank) == (&other.process, &other.rank)
}
