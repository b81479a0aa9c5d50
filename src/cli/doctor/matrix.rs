//! Which GPU reaches which, and how, as a table.

use super::probe::Link;

/// Columns that fit a line of the report, behind the row's own number.
const COLUMNS: usize = 10;

/// One line a GPU under a line of numbers; machines with more GPUs than fit are shown in parts.
pub fn lines(links: &[Vec<Link>]) -> Vec<String> {
    let mut lines = Vec::new();
    let numbers: Vec<usize> = (0..links.len()).collect();
    for part in numbers.chunks(COLUMNS) {
        let heading: String = part.iter().map(|to| format!("{to:>6}")).collect();
        lines.push(format!("    {heading}"));
        for (from, row) in links.iter().enumerate() {
            let cells: String =
                part.iter().filter_map(|to| row.get(*to)).map(|link| format!("{:>6}", word(*link))).collect();
            lines.push(format!("{from:>4}{cells}"));
        }
    }
    lines
}

fn word(link: Link) -> String {
    match link {
        Link::Itself => "-".to_owned(),
        Link::Nvlink(0) => "NV".to_owned(),
        Link::Nvlink(count) => format!("NV{count}"),
        Link::Pcie => "PCIe".to_owned(),
        Link::None => "none".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_has_a_word() {
        let links = vec![
            vec![Link::Itself, Link::Nvlink(18), Link::None],
            vec![Link::Nvlink(0), Link::Itself, Link::Pcie],
            vec![Link::None, Link::Pcie, Link::Itself],
        ];
        let expected =
            ["         0     1     2", "   0     -  NV18  none", "   1    NV     -  PCIe", "   2  none  PCIe     -"];
        assert_eq!(lines(&links), expected);
    }

    #[test]
    fn large_machines_are_shown_in_parts_that_fit() {
        let links = vec![vec![Link::Pcie; 16]; 16];
        let lines = lines(&links);
        assert_eq!(lines.len(), 2 * 17);
        assert!(lines.iter().all(|line| line.len() <= 71));
    }
}
