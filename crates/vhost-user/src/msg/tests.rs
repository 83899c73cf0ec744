use super::*;
use crate::IotlbWire;
use proptest::prelude::*;
use ringfence_mem::Region;

fn any_region() -> impl Strategy<Value = Region> {
    any::<[u64; 4]>().prop_map(|[gpa, size, user_addr, mmap_offset]| Region {
        gpa,
        size,
        user_addr,
        mmap_offset,
    })
}

fn any_inflight() -> impl Strategy<Value = Inflight> {
    any::<(u64, u64, u16, u16)>().prop_map(|(len, offset, queues, size)| Inflight {
        len,
        offset,
        queues,
        size,
    })
}

fn any_request() -> impl Strategy<Value = Request> {
    let simple = prop::sample::select(vec![
        Request::GetFeatures,
        Request::SetOwner,
        Request::ResetOwner,
        Request::GetProtocolFeatures,
        Request::GetQueueNum,
        Request::SetBackendReqFd,
        Request::ResetDevice,
        Request::GetMaxMemSlots,
        Request::SetLogFd,
        Request::GetStatus,
    ]);
    let config = (any::<bool>(), 0..1u32 << 31, prop::collection::vec(any::<u8>(), 1..=256));
    prop_oneof![
        simple,
        any::<u64>().prop_map(Request::SetFeatures),
        any::<u8>().prop_map(Request::SetStatus),
        any::<u16>().prop_map(Request::NetSetMtu),
        any::<[u8; 6]>().prop_map(Request::SendRarp),
        any::<(u64, u64)>().prop_map(|(len, offset)| Request::SetLogBase { len, offset }),
        any_inflight().prop_map(Request::GetInflight),
        any_inflight().prop_map(Request::SetInflight),
        any::<u64>().prop_map(|bits| Request::SetProtocolFeatures(
            ProtocolFeatures::from_bits_retain(bits)
        )),
        prop::collection::vec(any_region(), 1..=8).prop_map(Request::SetMemTable),
        any_region().prop_map(Request::AddMemReg),
        any_region().prop_map(Request::RemMemReg),
        any::<(u32, u32)>().prop_map(|(ring, num)| Request::SetVringNum { ring, num }),
        any::<(u32, u32)>().prop_map(|(ring, base)| Request::SetVringBase { ring, base }),
        any::<u32>().prop_map(|ring| Request::GetVringBase { ring }),
        any::<(u32, bool)>().prop_map(|(ring, enabled)| Request::SetVringEnable { ring, enabled }),
        any::<(u8, bool)>().prop_map(|(ring, fd)| Request::SetVringKick { ring, fd }),
        any::<(u8, bool)>().prop_map(|(ring, fd)| Request::SetVringCall { ring, fd }),
        any::<(u8, bool)>().prop_map(|(ring, fd)| Request::SetVringErr { ring, fd }),
        any::<(u32, [u64; 3], Option<u64>)>().prop_map(|(ring, [desc, avail, used], log)| {
            Request::SetVringAddr { ring, addresses: RingAddresses { desc, avail, used, log } }
        }),
        any::<[u8; 32]>().prop_map(|raw| Request::Iotlb(IotlbWire::read_from_bytes(&raw).unwrap())),
        (0..1u32 << 31, 1..=256u32).prop_map(|(offset, size)| Request::GetConfig { offset, size }),
        config.prop_map(|(driver, offset, data)| {
            let why = if driver { ConfigWrite::Driver } else { ConfigWrite::Migration };
            Request::SetConfig { offset, why, data }
        }),
    ]
}

proptest! {
    #[test]
    fn what_is_written_is_read_the_same(request in any_request()) {
        let payload = request.payload();
        prop_assert!(payload.len() <= MAX_PAYLOAD);
        prop_assert_eq!(Request::parse(request.code(), &payload).unwrap(), request);
    }

    #[test]
    fn any_bytes_are_read_or_refused(
        code in 0..45u32,
        payload in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        if let Ok(request) = Request::parse(code, &payload) {
            prop_assert_eq!(request.code(), code);
            // The rest of the payload means nothing, so compare only what a request holds.
            prop_assert_eq!(Request::parse(code, &request.payload()).unwrap(), request);
        }
    }

    #[test]
    fn a_payload_of_another_size_is_refused(request in any_request(), cut in 1..8usize) {
        let mut payload = request.payload();
        payload.resize(payload.len() + cut, 0);
        prop_assert!(Request::parse(request.code(), &payload).is_err());
        payload.truncate(payload.len() - cut);
        if payload.len() >= cut {
            payload.truncate(payload.len() - cut);
            prop_assert!(Request::parse(request.code(), &payload).is_err());
        }
    }
}

#[test]
fn headers_of_another_version_or_with_unknown_flags_are_refused() {
    let header = |flags| Header { request: 1, flags, size: 0 };
    assert!(header(1).check(false).is_ok());
    assert!(header(9).check(false).is_ok());
    assert!(header(5).check(true).is_ok());
    for version in [0, 2, 3] {
        assert!(matches!(header(version).check(false), Err(WireError::Version { .. })));
    }
    for flags in [5, 17, 1 | 1 << 31] {
        assert!(matches!(header(flags).check(false), Err(WireError::Flags { .. })));
    }
    for flags in [1, 13] {
        assert!(matches!(header(flags).check(true), Err(WireError::Flags { .. })));
    }
    let long = Header { request: 1, flags: 1, size: MAX_PAYLOAD as u32 + 1 };
    assert!(matches!(long.check(false), Err(WireError::Size { .. })));
}

#[test]
fn a_header_takes_twelve_bytes_and_an_address_message_forty() {
    assert_eq!(size_of::<Header>(), Header::LEN);
    let addresses = RingAddresses::default();
    assert_eq!(Request::SetVringAddr { ring: 0, addresses }.payload().len(), 40);
    let region = Region { gpa: 0, size: 0, user_addr: 0, mmap_offset: 0 };
    assert_eq!(Request::SetMemTable(vec![region; 8]).payload().len(), 8 + 8 * 32);
}

#[test]
fn a_table_may_have_places_that_are_not_filled() {
    // As User-Mode Linux sends it: a table of two of which it fills one.
    let region = Region { gpa: 0, size: 0x1000, user_addr: 0x7000_0000, mmap_offset: 0 };
    let one = Request::SetMemTable(vec![region]);
    let mut payload = one.payload();
    payload.extend([0; 32]);
    assert_eq!(Request::parse(code::SET_MEM_TABLE, &payload).unwrap(), one);
    // Not more places than a table can have, and no half ones.
    payload.push(0);
    assert!(Request::parse(code::SET_MEM_TABLE, &payload).is_err());
    payload.resize(8 + 9 * 32, 0);
    assert!(Request::parse(code::SET_MEM_TABLE, &payload).is_err());
}
