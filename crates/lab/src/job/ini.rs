//! The lines of a job file.
//!
//! A reader of its own, because none of the ini crates keeps what fio's dialect needs: `rust-ini`
//! drops line numbers (an error must name its line), `configparser` folds repeated sections into
//! one map (fio's `[global]` may come again, and two jobs may share a name) and loses their order.

use super::JobError;

/// Largest job file, bytes. fio's own examples are under 4 KiB.
pub const MAX_FILE: usize = 1 << 20;

/// Longest line, bytes; fio's own limit for an option is 8 KiB too.
pub const MAX_LINE: usize = 8 << 10;

/// What a line says; blank lines and comments say nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line<'a> {
    Section(&'a str),
    Option { key: &'a str, value: Option<&'a str> },
}

/// The lines of `text` that say something, with their numbers (from 1).
pub(super) fn lines<'a>(
    text: &'a [u8],
    file: &'a str,
) -> impl Iterator<Item = Result<(usize, Line<'a>), JobError>> {
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    text.split(|&byte| byte == b'\n').enumerate().filter_map(move |(index, line)| {
        let number = index + 1;
        parse(line)
            .map_err(|what| JobError::new(file, number, what))
            .map(|line| line.map(|line| (number, line)))
            .transpose()
    })
}

fn parse(line: &[u8]) -> Result<Option<Line<'_>>, String> {
    if line.len() > MAX_LINE {
        return Err(format!("a line of {} bytes; at most {MAX_LINE} are allowed", line.len()));
    }
    let line = line.trim_ascii();
    if line.is_empty() || is_comment(line) {
        return Ok(None);
    }
    let section = line[0] == b'[';
    // The name of a section may hold # and ;, elsewhere they start a comment, as in fio.
    let (content, rest) = if section {
        let end = line.iter().position(|&byte| byte == b']');
        let end = end.ok_or("a section without its closing ]")?;
        (&line[1..end], &line[end + 1..])
    } else {
        let end = line.iter().position(|byte| b";#".contains(byte)).unwrap_or(line.len());
        line.split_at(end)
    };
    let rest = rest.trim_ascii();
    if !rest.is_empty() && !is_comment(rest) {
        return Err("something follows the ] of a section; put it on a line of its own".to_owned());
    }
    let content = std::str::from_utf8(content).map_err(|_| "this is not UTF-8 text")?.trim();
    if let Some(control) = content.chars().find(|c| c.is_control() && *c != '\t') {
        return Err(format!("a control character ({}) in a job file", control.escape_default()));
    }
    if section {
        return match content {
            "" => Err("a section without a name; write [NAME]".to_owned()),
            name => Ok(Some(Line::Section(name))),
        };
    }
    let (key, value) = match content.split_once('=') {
        Some((key, value)) => (key.trim_end(), Some(value.trim_start())),
        None => (content, None),
    };
    if key.is_empty() {
        return Err("a value without a key; write KEY=VALUE".to_owned());
    }
    Ok(Some(Line::Option { key, value }))
}

fn is_comment(line: &[u8]) -> bool {
    matches!(line.first(), Some(b';' | b'#'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<(usize, Line<'_>)> {
        lines(text.as_bytes(), "f").map(|line| line.unwrap()).collect()
    }

    fn error(text: &[u8]) -> JobError {
        lines(text, "f").find_map(Result::err).expect("an error")
    }

    #[test]
    fn comments_blank_lines_and_crlf_say_nothing() {
        let text =
            "\u{feff}# one\r\n; two\r\n\r\n [a;b#c] ; three\r\n  bs = 4k # four\r\ndirect\r\n";
        assert_eq!(
            all(text),
            [
                (4, Line::Section("a;b#c")),
                (5, Line::Option { key: "bs", value: Some("4k") }),
                (6, Line::Option { key: "direct", value: None }),
            ]
        );
    }

    #[test]
    fn what_is_not_a_job_file_is_refused_with_its_line() {
        for (text, line, word) in [
            (&b"[a]\nbs=\0"[..], 2, "control"),
            (b"\n\n[a", 3, "closing"),
            (b"[]", 1, "name"),
            (b"[a]\n=4k", 2, "key"),
            (b"[a] rw=read", 1, "own"),
            (b"[\xff]", 1, "UTF-8"),
        ] {
            let error = error(text);
            assert_eq!(error.line, line, "{error}");
            assert!(error.to_string().contains(word), "{error}");
        }
        assert!(error(&vec![b'x'; MAX_LINE + 1]).to_string().contains("8192"));
    }

    #[test]
    fn a_comment_may_hold_any_bytes() {
        assert_eq!(lines(b"# \xff\0\nbs=4k ; \xfe", "f").filter(Result::is_ok).count(), 1);
    }
}
