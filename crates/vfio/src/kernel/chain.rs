//! Replies with a chain of capabilities in them (`struct vfio_info_cap_header`).

/// A reply of the kernel: a structure and a chain of capabilities behind it, each with the offset
/// of the next. Iterating reads nothing outside of the reply, and always ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain<'a> {
    info: &'a [u8],
    next: usize,
}

/// A capability: its id, and its bytes from its header to the end of the reply.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capability<'a> {
    pub(super) id: u32,
    pub(super) bytes: &'a [u8],
}

impl<'a> Chain<'a> {
    /// The chain that begins at `first`; 0: an empty one.
    pub(super) fn new(info: &'a [u8], first: u32) -> Chain<'a> {
        Chain { info, next: first as usize }
    }
}

impl<'a> Iterator for Chain<'a> {
    type Item = Capability<'a>;

    fn next(&mut self) -> Option<Capability<'a>> {
        let at = std::mem::take(&mut self.next);
        if at == 0 {
            return None;
        }
        let bytes = self.info.get(at..)?;
        let id = u16::from_ne_bytes(*bytes.first_chunk()?).into();
        // A kernel appends capabilities: a chain that leads backwards would not end.
        let next = u32_at(bytes, 4)? as usize;
        self.next = if next > at { next } else { 0 };
        Some(Capability { id, bytes })
    }
}

impl Capability<'_> {
    /// The pairs of an array of `count` at `at` bytes from the header, as far as the reply has
    /// them.
    pub(super) fn pairs(&self, at: usize, count: u32) -> impl Iterator<Item = (u64, u64)> {
        let pair = move |n: usize| {
            let at = at.checked_add(n.checked_mul(16)?)?;
            Some((u64_at(self.bytes, at)?, u64_at(self.bytes, at.checked_add(8)?)?))
        };
        (0..count as usize).map_while(pair)
    }
}

/// The number at `at` of a reply or of a capability.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The same of 64 bits.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A header and what follows it.
    fn capability(id: u16, next: u32, body: &[u64]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(id.to_ne_bytes());
        bytes.extend(1_u16.to_ne_bytes());
        bytes.extend(next.to_ne_bytes());
        body.iter().for_each(|number| bytes.extend(number.to_ne_bytes()));
        bytes
    }

    #[test]
    fn a_chain_is_followed_to_its_end() {
        let mut info = vec![0; 16];
        info.extend(capability(3, 40, &[7, 8]));
        info.extend(capability(5, 0, &[9]));
        let found: Vec<_> = Chain::new(&info, 16).map(|it| (it.id, u64_at(it.bytes, 8))).collect();
        assert_eq!(found, [(3, Some(7)), (5, Some(9))]);
        assert_eq!(Chain::new(&info, 0).count(), 0);
        let first = Chain::new(&info, 16).next().unwrap();
        assert_eq!(first.pairs(8, 1).collect::<Vec<_>>(), [(7, 8)]);
        // The array ends where the reply does, however large its count is.
        assert_eq!(Chain::new(&info, 40).next().unwrap().pairs(0, u32::MAX).count(), 1);
    }

    #[test]
    fn a_chain_that_leads_back_ends() {
        let mut info = vec![0; 16];
        info.extend(capability(3, 32, &[0]));
        info.extend(capability(4, 16, &[0]));
        assert_eq!(Chain::new(&info, 16).count(), 2);
        let own = [vec![0; 16], capability(3, 16, &[])].concat();
        assert_eq!(Chain::new(&own, 16).count(), 1);
    }

    proptest! {
        #[test]
        fn no_chain_leads_outside_of_its_bytes_or_has_no_end(
            info in prop::collection::vec(any::<u8>(), 0..200),
            first in prop_oneof![0..220_u32, any::<u32>()],
            at in prop_oneof![0..220_usize, any::<usize>()],
            small in any::<bool>(),
        ) {
            // Small numbers are more often valid offsets.
            let info: Vec<u8> = info.iter().enumerate()
                .map(|(n, &byte)| if small && n % 4 != 0 { 0 } else { byte }).collect();
            let mut steps = 0;
            for capability in Chain::new(&info, first) {
                steps += 1;
                let _ = (u32_at(capability.bytes, at), u64_at(capability.bytes, at));
                prop_assert!(capability.pairs(at, u32::MAX).count() <= 200 / 16);
            }
            prop_assert!(steps <= 200);
        }
    }
}
