//! Programs for a device, drawn from bytes: what makes the bytes, a property test or a fuzzer,
//! makes legal requests, nearly legal ones and garbage, in any order, to any kind of device.

use std::fmt;

use super::{
    model::Space,
    twin::{Met, Shape, Twin, shape},
};

/// Bytes to draw from; zeroes once they are used up.
struct Draw<'a> {
    rest: &'a [u8],
}

impl Draw<'_> {
    fn byte(&mut self) -> u8 {
        match self.rest {
            [byte, rest @ ..] => {
                self.rest = rest;
                *byte
            }
            [] => 0,
        }
    }

    /// One time of `n`.
    fn once_in(&mut self, n: u8) -> bool {
        self.byte() % n == n - 1
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.byte()) % choices.len()]
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.byte()).collect()
    }
}

/// What is drawn for a device with this granule.
pub(crate) struct Author<'a> {
    draw: Draw<'a>,
    granule: u64,
}

/// Runs the program in `bytes` on a device and its model; what it came to.
pub(crate) fn run(bytes: &[u8]) -> Met {
    let mut draw = Draw { rest: bytes };
    let shape = draw_shape(&mut draw);
    let granule = shape.options.page_sizes.granule();
    let mut twin = Twin::new(shape);
    twin.compare();
    let mut author = Author { draw, granule };
    author.begin(&mut twin);
    while !author.is_done() {
        author.step(&mut twin);
        twin.compare();
        twin.compare_access(author.address());
    }
    twin.compare_accesses();
    twin.reset(false);
    twin.compare();
    assert_eq!(twin.device.domains(), 0);
    twin.met
}

fn draw_shape(draw: &mut Draw<'_>) -> Shape {
    // 4 KiB twice: the table's own unit; less and more of it; the largest that there is.
    let pages = [0x4020_1000, !0xfff, 1 << 16, 1, 0x4020_1000, 1 << 9, 1 << 21, 1 << 63];
    let inputs = [
        (0, u64::MAX),
        (0, u64::MAX),
        (0, 0xffff_ffff),
        (0x8000, 0x7fff_ffff_ffff),
        (5, 0xffff_ffff_ffff_f123),
    ];
    // All but the old BYPASS; then without one of them.
    let offered = [0x77, 0x77, 0x77, 0x37, 0x77, 0x67, 0x77, 0x57, 0x77, 0x77, 0x73, 0];
    let mut shape = shape(draw.of(&pages), draw.of(&inputs), draw.of(&offered));
    let flags = draw.byte();
    let options = &mut shape.options;
    options.bypass = flags & 1 != 0;
    options.domain_range = match flags >> 5 {
        0 => (2, 2),
        1 => (1, 3),
        _ => (0, u32::MAX),
    };
    options.max_domains = draw.of(&[1 << 16, 1 << 16, 2, 1]);
    options.probe_size = draw.of(&[512, 48, 51]);
    shape.limits.mappings = draw.of(&[u64::MAX, u64::MAX, u64::MAX, 3]);
    // A node has 512 slots of 8 bytes.
    shape.limits.table_bytes = draw.of(&[u64::MAX, u64::MAX, u64::MAX, 3 << 12, 7 << 12, 100]);
    shape
}

impl<'a> Author<'a> {
    /// Draws from `bytes` for a device with this granule.
    pub(crate) fn new(bytes: &'a [u8], granule: u64) -> Author<'a> {
        Author { draw: Draw { rest: bytes }, granule }
    }
}

impl Author<'_> {
    /// Whether everything is drawn.
    pub(crate) fn is_done(&self) -> bool {
        self.draw.rest.is_empty()
    }

    /// Something to decide by.
    pub(crate) fn byte(&mut self) -> u8 {
        self.draw.byte()
    }

    /// Attaches some endpoints: else most programs would be about domains that are not there.
    pub(crate) fn begin(&mut self, twin: &mut Twin) {
        for endpoint in self.draw.of(&[&[][..], &[1, 2, 3], &[1, 8], &[1, 2, 8]]) {
            let request = [1, self.domain(), *endpoint, 0, 0].map(u32::to_le_bytes).concat();
            twin.request(0, &request, 4, true);
        }
    }

    fn step(&mut self, twin: &mut Twin) {
        match self.draw.byte() {
            0..=239 => {
                let (request, room) = self.request(twin);
                let flags = self.draw.byte();
                twin.request(usize::from(flags & 1), &request, room, flags & 6 != 0);
            }
            240..=247 => {
                let offset = self.draw.of(&[36, 36, 36, 37, 0, 32, 40, usize::MAX]);
                let len = self.draw.of(&[1, 1, 4, 40, 0]);
                let mut data = self.draw.bytes(len);
                data.iter_mut().for_each(|byte| *byte %= 3);
                twin.write_config(offset, &data);
                twin.compare_config(offset, len);
            }
            248..=251 => {
                let bits = self.draw.of(&[u64::MAX, u64::MAX, u64::MAX, 1 << 2, 0x44, 0x77, 0]);
                twin.negotiate(bits);
            }
            252..=253 => {
                twin.reset(self.draw.byte() % 2 == 1);
                twin.negotiate(u64::MAX);
            }
            _ => twin.compare_accesses(),
        }
    }

    /// A request and the room for its reply.
    pub(crate) fn request(&mut self, twin: &Twin) -> (Vec<u8>, usize) {
        if self.draw.once_in(24) {
            let len = usize::from(self.draw.byte()) % 90;
            let mut bytes = self.draw.bytes(len);
            if let Some(first) = bytes.first_mut() {
                *first %= 8;
            }
            return (bytes, usize::from(self.draw.byte()));
        }
        let kind = self.draw.of(&[3, 3, 3, 3, 4, 4, 4, 1, 1, 2, 5]);
        let mut bytes = vec![kind, 0, 0, 0];
        let mut room = 4;
        match kind {
            1 => {
                bytes.extend(self.domain().to_le_bytes());
                bytes.extend(self.draw.of(&[1u32, 2, 3, 8, 8, 9]).to_le_bytes());
                let flags = self.draw.of(&[0u32, 0, 0, 0, 0, 0, 1, 1, 2, 3]);
                bytes.extend(flags.to_le_bytes());
                bytes.extend(self.reserved(4));
            }
            2 => {
                let endpoint = self.draw.of(&[1u32, 2, 3, 8, 8, 9]);
                let held = twin.model.attached.get(&endpoint).copied();
                let domain = if self.draw.once_in(4) { None } else { held };
                bytes.extend(domain.unwrap_or_else(|| self.domain()).to_le_bytes());
                bytes.extend(endpoint.to_le_bytes());
                bytes.extend(self.reserved(8));
            }
            3 => {
                let (first, last) = self.range();
                bytes.extend(self.domain_of(twin).to_le_bytes());
                bytes.extend(first.to_le_bytes());
                bytes.extend(last.to_le_bytes());
                bytes.extend(self.target().to_le_bytes());
                let flags = [3u32, 3, 1, 2, 3, 3, 1, 2, 7, 5, 6, 0, 4, 8, 0x8000_0003];
                bytes.extend(self.draw.of(&flags).to_le_bytes());
            }
            4 => {
                let domain = self.domain_of(twin);
                let (first, last) = self.range_of(twin, domain);
                bytes.extend(domain.to_le_bytes());
                bytes.extend(first.to_le_bytes());
                bytes.extend(last.to_le_bytes());
                bytes.extend(self.reserved(4));
            }
            _ => {
                let endpoint = self.draw.of(&[1u32, 8, 100, 101, 9]);
                bytes.extend(endpoint.to_le_bytes());
                bytes.extend(self.reserved(64));
                room = self.draw.of(&[516, 52, 55, 51, 600, 4]);
            }
        }
        match self.draw.byte() {
            // Usually a legal frame.
            0..=199 => {}
            200..=219 => bytes[1..4].copy_from_slice(&self.draw.bytes(3)),
            220..=229 => bytes.truncate(usize::from(self.draw.byte()) % bytes.len()),
            230..=239 => bytes.extend(self.draw.bytes(40)),
            240..=247 => room = usize::from(self.draw.byte()) % 8,
            _ => room += usize::from(self.draw.byte()),
        }
        (bytes, room)
    }

    fn domain(&mut self) -> u32 {
        self.draw.of(&[1, 2, 1, 2, 1, 1, 2, 1, 2, 1, 2, 3, 0, u32::MAX])
    }

    /// Usually one that exists.
    fn domain_of(&mut self, twin: &Twin) -> u32 {
        let at = usize::from(self.draw.byte());
        let known: Vec<u32> = twin.model.domains.keys().copied().collect();
        if at < 224 && !known.is_empty() { known[at % known.len()] } else { self.domain() }
    }

    /// Mostly the bounds of mappings that exist, of one or of neighbours.
    fn range_of(&mut self, twin: &Twin, domain: u32) -> (u64, u64) {
        let (at, more) = (self.draw.byte(), self.draw.byte());
        match twin.model.domains.get(&domain) {
            Some(Space::Mappings(mappings)) if at < 160 && !mappings.is_empty() => {
                let all: Vec<_> = mappings.values().collect();
                let at = usize::from(at) % all.len();
                let to = (at + usize::from(more % 4)).min(all.len() - 1);
                (all[at].first, all[to].last)
            }
            _ => self.range(),
        }
    }

    fn reserved(&mut self, len: usize) -> Vec<u8> {
        if self.draw.once_in(12) { self.draw.bytes(len) } else { vec![0; len] }
    }

    /// Mostly a multiple of the granule, near others that are drawn.
    fn address(&mut self) -> u64 {
        let n = self.draw.byte();
        let page = u64::from(n % 16).wrapping_mul(self.granule);
        let mask = self.granule - 1;
        match n >> 4 {
            0..=4 => page,
            5..=9 => {
                let further = u64::from(self.draw.byte() % 4) * 16;
                page.wrapping_add(further.wrapping_mul(self.granule))
            }
            10 => 0xfee0_0000u64.wrapping_add(page) & !mask,
            11 => 0xfef0_0000u64.wrapping_add(page) & !mask,
            12 => 0x1_0000u64.wrapping_add(page) & !mask,
            13 => 0u64.wrapping_sub(page),
            14 => page.wrapping_add(u64::from(self.draw.byte())),
            _ => self.draw.word(),
        }
    }

    fn target(&mut self) -> u64 {
        match self.draw.byte() {
            n @ 0..=223 => u64::from(n).wrapping_mul(self.granule),
            _ => self.address(),
        }
    }

    fn range(&mut self) -> (u64, u64) {
        let first = self.address();
        let last = match self.draw.byte() {
            n @ 0..=219 => {
                let len = self.granule.wrapping_mul(u64::from(n % 4) + 1);
                first.wrapping_add(len.wrapping_sub(1))
            }
            220..=235 => self.address().wrapping_sub(1),
            236..=239 => return (0, u64::MAX),
            240..=245 => u64::MAX,
            246..=249 => first,
            _ => self.address(),
        };
        (first, last)
    }
}

/// The bytes of a program; printed as one number, since their meaning is only known by running
/// them.
#[derive(Clone)]
pub(crate) struct Program(pub(crate) Vec<u8>);

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The same bytes for the same seed, which is not 0.
pub(crate) fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    std::iter::repeat_with(byte).take(len).collect()
}
