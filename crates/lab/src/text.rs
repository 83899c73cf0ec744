//! Figures and tables as text for a terminal.

pub(crate) use comfy_table::CellAlignment;
use comfy_table::{ContentArrangement, Table, presets::NOTHING};

/// Widest line.
pub(crate) const WIDTH: usize = 120;

/// A column of a table: the lines of its heading, and its cell in a row.
pub(crate) type Column<'c, R, const HEAD: usize> = ([&'c str; HEAD], &'c dyn Fn(&R) -> String);

/// A table of these columns, aligned to the right, so many blanks apart.
pub(crate) fn table<'r, R: 'r, const HEAD: usize>(
    blanks: u16,
    of: &[Column<'_, R, HEAD>],
    rows: impl IntoIterator<Item = &'r R>,
) -> String {
    let heads = (0..HEAD).map(|line| of.iter().map(|(head, _)| head[line].to_owned()).collect());
    let cells = rows.into_iter().map(|row| of.iter().map(|(_, cell)| cell(row)).collect());
    columns(heads.chain(cells), [(0, CellAlignment::Right), (blanks, CellAlignment::Right)])
}

/// Rows of cells under each other. For the first column, and for the others: how many blanks
/// precede it, and how its cells are aligned.
pub(crate) fn columns(
    rows: impl IntoIterator<Item = Vec<String>>,
    [first, others]: [(u16, CellAlignment); 2],
) -> String {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.add_rows(rows);
    for (index, column) in table.column_iter_mut().enumerate() {
        let (blanks, alignment) = if index == 0 { first } else { others };
        column.set_padding((blanks, 0)).set_cell_alignment(alignment);
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// At most five characters, three of them significant digits: `0`, `.012`, `1.23`, `45.6`, `7890`,
/// `12.3k`; and a sign, if it is negative.
pub(crate) fn number(n: f64) -> String {
    match n {
        n if !n.is_finite() => dash(),
        n if n <= -0.0005 => format!("-{}", number(-n)),
        n if n < 0.0005 => "0".to_owned(),
        n if n < 0.9995 => format!("{n:.3}").trim_start_matches('0').to_owned(),
        n if n < 9.995 => format!("{n:.2}"),
        n if n < 99.95 => format!("{n:.1}"),
        n if n < 9999.5 => format!("{n:.0}"),
        n if n < 99.95e3 => format!("{:.1}k", n / 1e3),
        n if n < 999.5e3 => format!("{:.0}k", n / 1e3),
        n if n < 999.5e6 => format!("{:.0}M", n / 1e6),
        n if n < 999.5e9 => format!("{:.0}G", n / 1e9),
        n => format!("{n:.0e}"),
    }
}

/// Names come from job files: nothing in them may move a terminal's cursor.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Lines that begin with `word`, as many clauses in each as fit.
pub(crate) fn clauses(word: &str, clauses: impl Iterator<Item = String>) -> Vec<String> {
    let columns = |text: &str| text.chars().count();
    let mut lines: Vec<String> = Vec::new();
    for clause in clauses {
        match lines.last_mut() {
            Some(line) if columns(line) + columns(&clause) + 2 <= WIDTH => {
                line.extend(["; ", &clause]);
            }
            // Each begins with a word of its own: none looks like a row of the table.
            _ => lines.push(format!("{word}: {clause}")),
        }
    }
    lines
}

/// Breaks at blanks; text without blanks is broken where the line ends.
pub(crate) fn wrap(text: &str) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for word in text.split(' ') {
        let mut word: Vec<char> = word.chars().collect();
        if column > 0 && column + 1 + word.len() <= WIDTH {
            out.push(' ');
            column += 1;
        } else if column > 0 {
            out.push_str("\n  ");
            column = 2;
        }
        while column + word.len() > WIDTH {
            let rest = word.split_off(WIDTH - column);
            out.extend(word);
            out.push_str("\n  ");
            (word, column) = (rest, 2);
        }
        column += word.len();
        out.extend(word);
    }
    out.push('\n');
    out
}

/// A figure, or `-`.
pub(crate) fn optional(n: Option<f64>) -> String {
    n.map_or(dash(), number)
}

/// In place of a figure that is missing.
pub(crate) fn dash() -> String {
    "-".to_owned()
}

/// Microseconds.
pub(crate) fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// `12.3%`, `<0.1%`.
pub(crate) fn percent(part: f64) -> String {
    match part * 100.0 {
        // A little is not nothing.
        p if p > 0.0 && p < 0.05 => "<0.1%".to_owned(),
        p => format!("{p:.1}%"),
    }
}

/// `1 round`, `2 rounds`.
pub(crate) fn count(n: impl Into<u64>, what: &str) -> String {
    match n.into() {
        1 => format!("1 {what}"),
        n => format!("{n} {what}s"),
    }
}

/// `64 KiB`, `1 GiB`, `1.5 GiB`: a size for people.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match UNITS.iter().find(|(_, shift)| n >> shift != 0) {
        Some((unit, shift)) if n.is_multiple_of(1 << shift) => format!("{} {unit}", n >> shift),
        Some((unit, shift)) => format!("{:.1} {unit}", n as f64 / (1u64 << shift) as f64),
        None => format!("{n} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_end_with_their_last_cell() {
        let columns: [Column<'_, [u32; 3], 1>; 3] = [
            (["a"], &|row| row[0].to_string()),
            (["1"], &|row| row[1].to_string()),
            ([""], &|row| row[2].to_string()),
        ];
        assert_eq!(table(1, &columns, &[[11, 22, 3]]), " a  1\n11 22 3\n");
    }

    #[test]
    fn numbers_keep_three_digits_and_five_characters() {
        for (n, text) in [
            (0.0, "0"),
            (0.0123, ".012"),
            (0.9999, "1.00"),
            (1.234, "1.23"),
            (9.999, "10.0"),
            (45.67, "45.7"),
            (1234.4, "1234"),
            (12_345.0, "12.3k"),
            (123_456.0, "123k"),
            (f64::NAN, "-"),
        ] {
            assert_eq!(number(n), text);
        }
    }

    #[test]
    fn sizes_read_well() {
        for (n, text) in [(0, "0 B"), (512, "512 B"), (65536, "64 KiB"), (3 << 29, "1.5 GiB")] {
            assert_eq!(bytes(n), text);
        }
    }

    #[test]
    fn a_little_is_not_nothing() {
        for (part, text) in [(0.0, "0.0%"), (0.0001, "<0.1%"), (0.163, "16.3%"), (1.0, "100.0%")] {
            assert_eq!(percent(part), text);
        }
    }
}
