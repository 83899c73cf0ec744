//! PRP lists: how a command describes its data (NVMe 1.4, section 4.3).
//!
//! The first entry may begin anywhere in a page; it ends with the page. Every other entry is a
//! page, of which the last need not be full. The command holds two entries; if there are more, a
//! list holds all but the first.

use ringfence_dma::Segment;

use super::{NotSubmitted, pages::PAGE};

/// The two entries of a command for data in `segments`. `list` gets each entry after the first,
/// with its index, of which there may be `room`; the list's address for the device is `list_at`.
///
/// # Errors
/// The segments are no whole pages where they must be, or too many.
pub(super) fn entries(
    segments: impl Iterator<Item = Segment>,
    list_at: u64,
    room: usize,
    mut list: impl FnMut(usize, u64),
) -> Result<[u64; 2], NotSubmitted> {
    let (mut first, mut rest, mut second) = (None, 0, 0);
    let mut put = |page| {
        if rest == room {
            return Err(NotSubmitted::Shape);
        }
        if rest == 0 {
            second = page;
        }
        list(rest, page);
        rest += 1;
        Ok(())
    };
    // Where the last segment ended in its page.
    let mut end = 0;
    for Segment { addr, len } in segments {
        // Mapped by the DMA API: no segment is empty, and none wraps.
        let last = len.checked_sub(1).and_then(|extent| addr.checked_add(extent));
        let last = last.ok_or(NotSubmitted::Shape)?;
        let mut page = addr & !(PAGE - 1);
        if first.is_none() {
            if addr % 4 != 0 {
                return Err(NotSubmitted::Shape);
            }
            first = Some(addr);
        } else {
            if addr != page || end != 0 {
                return Err(NotSubmitted::Shape);
            }
            put(page)?;
        }
        while last - page >= PAGE {
            page += PAGE;
            put(page)?;
        }
        end = (last % PAGE + 1) % PAGE;
    }
    let first = first.ok_or(NotSubmitted::Data)?;
    Ok([first, if rest > 1 { list_at } else { second }])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIST: u64 = 0xdead_b000;

    /// The addresses of all bytes that a device finds through two entries and a list.
    fn walk([first, second]: [u64; 2], list: &[u64], len: u64) -> Vec<u64> {
        let mut pages = vec![first];
        let in_first = PAGE - first % PAGE;
        let more = len.saturating_sub(in_first).div_ceil(PAGE) as usize;
        match more {
            0 => {}
            1 => pages.push(second),
            _ => {
                assert_eq!(second, LIST);
                pages.extend(&list[..more]);
            }
        }
        let bytes = pages.into_iter().flat_map(|at| at..at - at % PAGE + PAGE);
        bytes.take(len as usize).collect()
    }

    proptest! {
        #[test]
        fn a_device_finds_each_byte_in_its_place(
            offset in (0..1024_u64).prop_map(|n| n * 4),
            pieces in prop::collection::vec((1..4_u64, 1..1000_u64), 1..5),
            tail in 1..=PAGE,
        ) {
            // All whole pages, except for the beginning of the first and the end of the last.
            let mut segments: Vec<Segment> = pieces
                .iter()
                .zip(0_u64..)
                .map(|(&(pages, at), n)| Segment { addr: (n << 40) + at * PAGE, len: pages * PAGE })
                .collect();
            segments[0].addr += offset;
            segments[0].len -= offset;
            let last = segments.last_mut().unwrap();
            let cut = (PAGE - tail).min(last.len - 1);
            last.len -= cut;
            let len = segments.iter().map(|s| s.len).sum();
            let mut list = Vec::new();
            let made = entries(segments.iter().copied(), LIST, 64, |at, page| {
                assert_eq!(at, list.len());
                list.push(page);
            }).unwrap();
            let naive: Vec<u64> = segments.iter().flat_map(|s| s.addr..s.addr + s.len).collect();
            prop_assert_eq!(walk(made, &list, len), naive);
        }
    }

    fn refused(segments: &[Segment], room: usize) -> NotSubmitted {
        entries(segments.iter().copied(), LIST, room, |_, _| {}).unwrap_err()
    }

    #[test]
    fn what_no_list_describes_is_refused() {
        let whole = Segment { addr: 0x1000, len: 0x1000 };
        assert_eq!(refused(&[], 1), NotSubmitted::Data);
        assert_eq!(refused(&[Segment { addr: 0x1002, len: 8 }], 1), NotSubmitted::Shape);
        assert_eq!(refused(&[whole, Segment { addr: 0x5004, len: 8 }], 1), NotSubmitted::Shape);
        assert_eq!(refused(&[Segment { addr: 0x1000, len: 8 }, whole], 1), NotSubmitted::Shape);
        assert_eq!(refused(&[whole, whole, whole], 1), NotSubmitted::Shape, "no room");
        assert_eq!(refused(&[Segment { addr: u64::MAX - 3, len: 8 }], 1), NotSubmitted::Shape);
        // The last page of the address space is a page like any other.
        let top = Segment { addr: u64::MAX - 0x1fff, len: 0x2000 };
        let made = entries([top].into_iter(), LIST, 1, |_, _| {});
        assert_eq!(made, Ok([u64::MAX - 0x1fff, u64::MAX - 0xfff]));
    }
}
