//! A set of numbers in order, for changes that come one by one and near each other. Mostly it has some hundred members, and these are one
//! row: a search in it and a shift of half of it take half as long as the same in a `BTreeSet`, whose nodes have eleven.

/// Members of a row at most.
const MOST: usize = 256;

/// Rows in order, none of them empty.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ordered {
    rows: Vec<Vec<u64>>,
}

/// Where a member is, until the set changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    row: usize,
    at: usize,
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

    /// Where a member is, or would be.
    fn position(&self, number: u64) -> Option<Position> {
        if self.rows.is_empty() {
            return None;
        }
        let row = self.row_of(number);
        Some(Position { row, at: self.rows[row].partition_point(|member| *member < number) })
    }

    /// Puts `after`, which is none, in the place of a member. One search and one shift do for both as long as they belong to one row.
    pub fn replace(&mut self, before: u64, after: u64) {
        if let Some(position) = self.position(before) {
            self.replace_at(position, before, after);
        }
    }

    /// The same where it is known where that is.
    pub fn replace_at(&mut self, Position { row: index, at }: Position, before: u64, after: u64) {
        let row = &mut self.rows[index][..];
        let belongs = |row: &[u64]| matches!(row, [first, .., last] if *first <= after && after <= *last);
        if row.get(at) != Some(&before) || !belongs(row) {
            self.remove(before);
            return self.insert(after);
        }
        let to = if after < before {
            let to = row[..at].partition_point(|member| *member < after);
            row.copy_within(to..at, to + 1);
            to
        } else {
            let to = at + row[at + 1..].partition_point(|member| *member < after);
            row.copy_within(at + 1..=to, at);
            to
        };
        row[to] = after;
    }

    /// The first member from `number` on that is wanted, and where it is.
    pub fn find(&self, number: u64, mut is_wanted: impl FnMut(u64) -> bool) -> Option<(Position, u64)> {
        let Position { row: first, mut at } = self.position(number)?;
        for (row, members) in self.rows.iter().enumerate().skip(first) {
            while let Some(&member) = members.get(at) {
                if is_wanted(member) {
                    return Some((Position { row, at }, member));
                }
                at += 1;
            }
            at = 0;
        }
        None
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
        fn it_answers_as_an_ordered_set_does(changes in proptest::collection::vec((0..10u32, 0..2000u64, 0..2000u64), 1..3000)) {
            let (mut ordered, mut set) = (Ordered::default(), BTreeSet::new());
            for (change, number, other) in changes {
                match (change, set.range(other..).next().copied()) {
                    (0..5, _) => {
                        ordered.insert(number);
                        set.insert(number);
                    }
                    (5..8, Some(before)) if !set.contains(&number) => {
                        ordered.replace(before, number);
                        set.remove(&before);
                        set.insert(number);
                    }
                    _ => {
                        ordered.remove(number);
                        set.remove(&number);
                    }
                }
                proptest::prop_assert!(ordered.rows.iter().all(|row| (1..=MOST).contains(&row.len())));
                let is_wanted = |member: u64| member.is_multiple_of(3);
                proptest::prop_assert_eq!(ordered.find(number, is_wanted).map(|found| found.1), set.range(number..).copied().find(|it| is_wanted(*it)));
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
