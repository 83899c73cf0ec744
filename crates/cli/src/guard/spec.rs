//! The devices of a command line: `SOCKET=WHAT,OPTION,...`.

use std::path::PathBuf;

use ringfence_devices::disk::DiskBuffers;

use super::address::Address;

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Spec {
    pub(super) socket: PathBuf,
    /// `None`: the next free one.
    pub(super) address: Option<Address>,
    /// Never bypasses the IOMMU.
    pub(super) untrusted: bool,
    pub(super) queues: u16,
    pub(super) what: What,
}

/// A disk, or where a network device sends its packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    Blk {
        image: PathBuf,
        read_only: bool,
        direct: bool,
        buffers: DiskBuffers,
    },
    Loopback,
    Tap(String),
    /// To a second device, at this socket.
    Peer(PathBuf),
}

impl Spec {
    /// Parses a disk: `SOCKET=IMAGE[,OPTION]...`.
    pub(super) fn blk(text: &str) -> Result<Spec, String> {
        parse(text, |image| {
            let (image, buffers) = (image.into(), DiskBuffers::Auto);
            Ok(What::Blk { image, read_only: false, direct: false, buffers })
        })
    }

    /// Parses a network device: `SOCKET=WAY[,OPTION]...`.
    pub(super) fn net(text: &str) -> Result<Spec, String> {
        let spec = parse(text, |way| match way.split_once(':') {
            None if way == "loopback" => Ok(What::Loopback),
            Some(("tap", name)) if !name.is_empty() => Ok(What::Tap(name.into())),
            Some(("peer", path)) if !path.is_empty() => Ok(What::Peer(path.into())),
            _ => Err(format!("{way:?} is not a network: give loopback, tap:NAME or peer:SOCKET")),
        })?;
        if matches!((&spec.what, spec.address), (What::Peer(_), Some(_))) {
            return Err("addr= is the address of one device: a pair has the next two".into());
        }
        Ok(spec)
    }

    pub(super) fn is_disk(&self) -> bool {
        matches!(self.what, What::Blk { .. })
    }
}

/// Parses a specification: the socket, `what` it serves, and the options. A doubled comma is part
/// of a name, as in QEMU.
fn parse(text: &str, what: impl FnOnce(&str) -> Result<What, String>) -> Result<Spec, String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match (character, parts.last_mut()) {
            (',', Some(last)) if characters.next_if_eq(&',').is_some() => last.push(','),
            (',', _) => parts.push(String::new()),
            (other, Some(last)) => last.push(other),
            (_, None) => {}
        }
    }
    let (socket, named) = parts[0]
        .split_once('=')
        .filter(|(socket, named)| !socket.is_empty() && !named.is_empty())
        .ok_or_else(|| format!("{text:?} does not begin with SOCKET=WHAT"))?;
    let (socket, what) = (socket.into(), what(named)?);
    let mut spec = Spec { socket, address: None, untrusted: false, queues: 1, what };
    let (most_queues, known) = match spec.is_disk() {
        true => (256, "addr=, queues=, untrusted, read-only, direct, disk-buffers="),
        false => (1, "addr=, untrusted"),
    };
    for option in &parts[1..] {
        match (&mut spec.what, option.as_str(), option.split_once('=')) {
            (What::Blk { read_only, .. }, "read-only", _) => *read_only = true,
            (What::Blk { direct, .. }, "direct", _) => *direct = true,
            (What::Blk { buffers, .. }, _, Some(("disk-buffers", place))) => {
                *buffers = place.parse()?;
            }
            (_, "untrusted", _) => spec.untrusted = true,
            (_, _, Some(("addr", at))) => spec.address = Some(at.parse()?),
            (_, _, Some(("queues", queues))) => match queues.parse() {
                Ok(queues) if (1..=most_queues).contains(&queues) => spec.queues = queues,
                Ok(2..) if most_queues == 1 => {
                    return Err(format!(
                        "queues={queues}: 1 pair at most, since a driver enables others through the \
                         control queue, which QEMU serves itself and cannot translate for"
                    ));
                }
                _ => return Err(format!("queues={queues}: 1 to {most_queues}")),
            },
            _ => return Err(format!("unknown option {option:?}; there are {known}")),
        }
    }
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_options_and_commas_in_its_name_are_doubled() {
        let spec = Spec::blk("a.sock=disk,,1=x.img,queues=4,untrusted,addr=7.1,direct").unwrap();
        assert_eq!(
            spec,
            Spec {
                socket: "a.sock".into(),
                address: Some("07.1".parse().unwrap()),
                untrusted: true,
                queues: 4,
                what: What::Blk {
                    image: "disk,1=x.img".into(),
                    read_only: false,
                    direct: true,
                    buffers: DiskBuffers::Auto,
                },
            }
        );
        for wrong in ["", "a.sock", "=x", "a=", "a=b,queues=0", "a=b,addr=0", "a=b,trusted", "a=b,"]
        {
            assert!(Spec::blk(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_network_device_has_a_way() {
        let way = |text: &str| Spec::net(text).map(|spec| spec.what);
        assert_eq!(way("n=loopback"), Ok(What::Loopback));
        assert_eq!(way("n=tap:vm0,queues=1"), Ok(What::Tap("vm0".into())));
        assert!(way("n=tap:vm0,queues=2").unwrap_err().contains("control queue"));
        assert_eq!(way("n=peer:m"), Ok(What::Peer("m".into())));
        for wrong in ["n=tap:", "n=peer", "n=x", "n=loopback,read-only", "n=peer:m,addr=6"] {
            assert!(way(wrong).is_err(), "{wrong}");
        }
    }
}
