//! The first driver is the firmware's, while the guest's IOMMU is still off: its addresses are
//! translated to themselves. The next is Linux's, behind the IOMMU.

use crate::{
    blk::{no_errors, service},
    place::Place,
    proxy::{ADD_MEM_REG, Direction, Message, Recording, SET_FEATURES, UPDATE},
    qemu::{Iommu, Qemu},
};

const ACCESS_PLATFORM: u64 = 1 << 33;
/// How many bytes the firmware copies, from the beginning of the disk to right behind them.
pub(crate) const COPIED: usize = 32 << 10;

/// An option ROM that makes the firmware copy 64 sectors of the first disk, from 0 to 64. Without a
/// header for Plug and Play it is called once the disks before it in the boot order are there, and
/// before anything is booted.
pub(crate) fn copies() -> Vec<u8> {
    // The disk address packets: 64 sectors, to and from 1000:0000.
    let packet = |sector: u8| [16, 0, 64, 0, 0, 0, 0, 0x10, sector, 0, 0, 0, 0, 0, 0, 0];
    let code = [
        0x55, 0xaa, 1, // It has 512 bytes.
        0x60, 0x1e, 0x06, 0x0e, 0x1f, // pusha; push ds; push es; push cs; pop ds
        0xbe, 0x30, 0x00, 0xb2, 0x80, 0xb4, 0x42, 0xcd,
        0x13, // read: si=30h dl=80h ah=42h; int 13h
        0x72, 0x0a, // jc out
        0xbe, 0x40, 0x00, 0xb2, 0x80, 0xb8, 0x00, 0x43, 0xcd, 0x13, // write: si=40h ax=4300h
        0x07, 0x1f, 0x61, 0xcb, // out: pop es; pop ds; popa; retf
    ];
    let mut rom = vec![0; 512];
    rom[..code.len()].copy_from_slice(&code);
    rom[0x30..0x40].copy_from_slice(&packet(0));
    rom[0x40..0x50].copy_from_slice(&packet(64));
    // All bytes of a ROM add up to 0.
    rom[511] = rom.iter().fold(0, |sum: u8, byte| sum.wrapping_sub(*byte));
    rom
}

/// The guest-physical address of a user address, by the regions that the front end added.
fn guest_physical(before: &[Message], user: u64) -> u64 {
    let added =
        before.iter().filter(|m| m.direction == Direction::ToBack && m.request == ADD_MEM_REG);
    let word = |m: &Message, at: usize| {
        u64::from_ne_bytes(m.payload[8 * at..8 * (at + 1)].try_into().unwrap())
    };
    // After a word of padding.
    let mut regions = added.map(|m| [word(m, 1), word(m, 2), word(m, 3)]);
    let region = regions.find(|[_, size, from]| (*from..from + size).contains(&user));
    let [first, _, from] = region.expect("an update of what is in no region");
    first + (user - from)
}

fn reads_and_writes_before(iommu: Iommu) {
    let place = Place::new();
    let image = place.image("image", 32);
    let pattern: Vec<u8> = (0..COPIED).map(|at| (at * 31 + at / 512) as u8).collect();
    std::fs::write(&image, [&pattern[..], &vec![0; (32 << 20) - COPIED]].concat()).unwrap();
    let back = service(&place, &image, 1);
    let between = place.path("between.sock");
    let wire = Recording::between(between.clone(), &back.socket);
    let script = r#"
load virtio_blk
say domain $(domain $(virtio_pci 2 0))
say original $(dd if=/dev/vda bs=32k count=1 | md5sum)
say copy $(dd if=/dev/vda bs=32k skip=1 count=1 | md5sum)
run_fio mixed --rw=randrw --bs=4k --iodepth=16 --offset=1m --size=4m --verify=crc32c
"#;
    let machine = Qemu::new(iommu).blk(&between, 1, ",bootindex=1").option_rom(&place, &copies());
    let output = machine.start(&place, script).end();
    no_errors(&output.json("mixed"));
    assert_eq!(output.word("domain"), iommu.domain());
    assert_eq!(output.word("copy"), output.word("original"));
    let disk = std::fs::read(&image).unwrap();
    assert!(disk[..COPIED] == pattern && disk[COPIED..2 * COPIED] == pattern);

    // The firmware's part: all messages before the driver that negotiates next.
    let messages = wire.messages();
    let negotiated: Vec<usize> = (0..messages.len())
        .filter(|&at| {
            messages[at].direction == Direction::ToBack && messages[at].request == SET_FEATURES
        })
        .collect();
    let features = |at: usize| messages[at].number();
    assert!(features(negotiated[0]) & ACCESS_PLATFORM != 0, "{:x}", features(negotiated[0]));
    let linux = negotiated.iter().find(|&&at| features(at) != features(negotiated[0]));
    let linux = *linux.expect("two drivers that negotiate otherwise");
    assert!(features(linux) & ACCESS_PLATFORM != 0, "{:x}", features(linux));
    let mut pages = 0;
    for at in 0..linux {
        if let Some(update) = messages[at].iotlb().filter(|m| m.kind == UPDATE) {
            let place = guest_physical(&messages[..at], update.user_addr);
            assert_eq!(place, update.iova, "translated before the IOMMU is on");
            pages += 1;
        }
    }
    // Its buffer alone has eight.
    assert!(pages >= COPIED / 4096, "{pages} pages");
    back.terminate();
}

#[test]
#[ignore = "guests: cargo xtask test --all --only more"]
fn firmware_reads_and_writes_before_intels_iommu_is_on() {
    reads_and_writes_before(Iommu::IntelStrict);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn firmware_reads_and_writes_before_a_virtio_iommu_is_on() {
    reads_and_writes_before(Iommu::VirtioStrict);
}
