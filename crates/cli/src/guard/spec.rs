//! The devices of a command line: `SOCKET=WHAT,OPTION,...`.

use std::{path::PathBuf, str::FromStr};

use ringfence_devices::disk::DiskBuffers;

use super::address::Address;

/// What every device has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeviceSpec {
    pub(super) socket: PathBuf,
    /// `None`: the next free one.
    pub(super) address: Option<Address>,
    /// Never bypasses the IOMMU.
    pub(super) untrusted: bool,
    pub(super) queues: u16,
}

/// A disk: `SOCKET=IMAGE[,OPTION]...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BlkSpec {
    pub(super) common: DeviceSpec,
    pub(super) image: PathBuf,
    pub(super) read_only: bool,
    pub(super) direct: bool,
    pub(super) buffers: DiskBuffers,
}

/// Where a network device sends its packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NetWay {
    Loopback,
    Tap(String),
    /// To a second device, at this socket.
    Peer(PathBuf),
}

/// A network device: `SOCKET=WAY[,OPTION]...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NetSpec {
    pub(super) common: DeviceSpec,
    pub(super) way: NetWay,
}

/// Splits a specification: the socket, what it serves, and the options. A doubled comma is part of
/// a name, as in QEMU.
fn split(text: &str) -> Result<(PathBuf, String, Vec<String>), String> {
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
    let head = parts.remove(0);
    match head.split_once('=') {
        Some((socket, what)) if !socket.is_empty() && !what.is_empty() => {
            Ok((socket.into(), what.into(), parts))
        }
        _ => Err(format!("{text:?} does not begin with SOCKET=WHAT")),
    }
}

impl DeviceSpec {
    fn new(socket: PathBuf) -> DeviceSpec {
        DeviceSpec { socket, address: None, untrusted: false, queues: 1 }
    }

    /// Parses an option that every device has; `None` if it is another.
    fn take(&mut self, option: &str, most_queues: u16) -> Option<Result<(), String>> {
        Some(match option.split_once('=') {
            None if option == "untrusted" => {
                self.untrusted = true;
                Ok(())
            }
            Some(("addr", at)) => at.parse().map(|at| self.address = Some(at)),
            Some(("queues", queues)) => match queues.parse() {
                Ok(queues) if (1..=most_queues).contains(&queues) => {
                    self.queues = queues;
                    Ok(())
                }
                Ok(2..) if most_queues == 1 => Err(format!(
                    "queues={queues}: 1 pair at most, since a driver enables others through the control \
                     queue, which QEMU serves itself and cannot translate for"
                )),
                _ => Err(format!("queues={queues}: 1 to {most_queues}")),
            },
            _ => return None,
        })
    }
}

fn unknown(option: &str, known: &str) -> String {
    format!("unknown option {option:?}; there are {known}")
}

impl FromStr for BlkSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<BlkSpec, String> {
        let (socket, image, options) = split(text)?;
        let mut spec = BlkSpec {
            common: DeviceSpec::new(socket),
            image: image.into(),
            read_only: false,
            direct: false,
            buffers: DiskBuffers::Auto,
        };
        for option in options {
            match (option.as_str(), option.split_once('=')) {
                ("read-only", _) => spec.read_only = true,
                ("direct", _) => spec.direct = true,
                (_, Some(("disk-buffers", place))) => spec.buffers = place.parse()?,
                (other, _) => spec.common.take(other, 256).unwrap_or_else(|| {
                    let known = "addr=, queues=, untrusted, read-only, direct, disk-buffers=";
                    Err(unknown(other, known))
                })?,
            }
        }
        Ok(spec)
    }
}

impl FromStr for NetSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<NetSpec, String> {
        let (socket, way, options) = split(text)?;
        let way = match way.split_once(':') {
            None if way == "loopback" => NetWay::Loopback,
            Some(("tap", name)) if !name.is_empty() => NetWay::Tap(name.into()),
            Some(("peer", path)) if !path.is_empty() => NetWay::Peer(path.into()),
            _ => {
                return Err(format!(
                    "{way:?} is not a network: give loopback, tap:NAME or peer:SOCKET"
                ));
            }
        };
        let mut spec = NetSpec { common: DeviceSpec::new(socket), way };
        for option in options {
            let taken = spec.common.take(&option, 1);
            taken.unwrap_or_else(|| Err(unknown(&option, "addr=, untrusted")))?;
        }
        if matches!((&spec.way, spec.common.address), (NetWay::Peer(_), Some(_))) {
            return Err("addr= is the address of one device: a pair has the next two".into());
        }
        Ok(spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_options_and_commas_in_its_name_are_doubled() {
        let spec: BlkSpec = "a.sock=disk,,1=x.img,queues=4,untrusted,addr=7.1".parse().unwrap();
        assert_eq!(spec.image, PathBuf::from("disk,1=x.img"));
        assert_eq!(
            spec.common,
            DeviceSpec {
                socket: "a.sock".into(),
                address: Some("07.1".parse().unwrap()),
                untrusted: true,
                queues: 4,
            }
        );
        assert!(!spec.read_only);
        for wrong in ["", "a.sock", "=x", "a=", "a=b,queues=0", "a=b,addr=0", "a=b,trusted", "a=b,"]
        {
            assert!(wrong.parse::<BlkSpec>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_network_device_has_a_way() {
        let way = |text: &str| text.parse::<NetSpec>().map(|spec| spec.way);
        assert_eq!(way("n=loopback"), Ok(NetWay::Loopback));
        assert_eq!(way("n=tap:vm0,queues=1"), Ok(NetWay::Tap("vm0".into())));
        assert!(way("n=tap:vm0,queues=2").unwrap_err().contains("control queue"));
        assert_eq!(way("n=peer:m"), Ok(NetWay::Peer("m".into())));
        for wrong in ["n=tap:", "n=peer", "n=x", "n=loopback,read-only", "n=peer:m,addr=6"] {
            assert!(way(wrong).is_err(), "{wrong}");
        }
    }
}
