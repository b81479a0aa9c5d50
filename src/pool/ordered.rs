//! A set of numbers in order, for changes that come one by one and near each other. Mostly it has some hundred members, and these are one
//! row: a search in it and a shift of half of it take half as long as the same in a `BTreeSet`, whose nodes have eleven.

/// Members of a row at most.
const MOST: usize = 256;

/// Rows in order, none of them empty.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ordered {
    rows: Vec<Vec<u64>>,
}

impl Ordered {
    /// The row that `number` is in, or would be; there is one.
    fn row_of(&self, number: u64) -> usize {
        match self.rows.len() {
            1 => 0,
            all => self.rows.partition_point(|row| row.last().is_some_and(|last| *last < number)).min(all - 1),
        }
    }

    pub fn insert(&mut self, number: u64) {
        if self.rows.is_empty() {
            self.rows.push(Vec::with_capacity(MOST));
        }
        let index = self.row_of(number);
        let row = &mut self.rows[index];
        let Err(at) = row.binary_search(&number) else { return };
        if row.len() < MOST {
            return row.insert(at, number);
        }
        let mut upper = Vec::with_capacity(MOST);
        upper.extend(row.drain(MOST / 2..));
        if at <= MOST / 2 {
            row.insert(at, number);
        } else {
            upper.insert(at - MOST / 2, number);
        }
        self.rows.insert(index + 1, upper);
    }

    pub fn remove(&mut self, number: u64) {
        if self.rows.is_empty() {
            return;
        }
        let index = self.row_of(number);
        let row = &mut self.rows[index];
        if let Ok(at) = row.binary_search(&number) {
            row.remove(at);
            if row.is_empty() {
                self.rows.remove(index);
            }
        }
    }

    /// The members from `number` on.
    pub fn from(&self, number: u64) -> impl Iterator<Item = u64> {
        let index = if self.rows.is_empty() { 0 } else { self.row_of(number) };
        let (first, rest) = match &self.rows[index..] {
            [first, rest @ ..] => (&first[first.partition_point(|member| *member < number)..], rest),
            [] => (&[][..], &[][..]),
        };
        first.iter().chain(rest.iter().flatten()).copied()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    proptest::proptest! {
        #[test]
        fn it_answers_as_an_ordered_set_does(changes in proptest::collection::vec((proptest::bool::weighted(0.6), 0..2000u64), 1..3000)) {
            let (mut ordered, mut set) = (Ordered::default(), BTreeSet::new());
            for (comes, number) in changes {
                if comes {
                    ordered.insert(number);
                    set.insert(number);
                } else {
                    ordered.remove(number);
                    set.remove(&number);
                }
                proptest::prop_assert!(ordered.rows.iter().all(|row| (1..=MOST).contains(&row.len())));
                proptest::prop_assert!(ordered.from(number).take(3).eq(set.range(number..).copied().take(3)));
            }
            proptest::prop_assert!(ordered.from(0).eq(set.iter().copied()));
            for number in set {
                ordered.remove(number);
            }
            proptest::prop_assert!(ordered.rows.is_empty() && ordered.from(0).next().is_none());
        }
    }
}
