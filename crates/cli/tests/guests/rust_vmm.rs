//! Devices of rust-vmm's behind `ringfence proxy`, in front of a stock guest.

use std::{
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
};

use crate::{
    isolated::proxy,
    place::{LIMIT, Place},
    qemu::{Iommu, Qemu},
    rng,
    strangers::Stranger,
};

#[test]
#[ignore = "long: cargo xtask test --all --only rust-vmm"]
fn random_bytes() {
    for iommu in [Iommu::None, Iommu::IntelStrict] {
        let place = Place::new();
        let socket = place.path("rng0");
        let _back = Stranger::of_rust_vmm("vhost-device-rng", &[], &socket);
        let front = proxy(&place, "rng.p", &socket);
        let output = Qemu::new(iommu).newer().rng(&front.socket).start(&place, rng::SCRIPT).end();
        rng::is_random(&output, iommu);
        assert!(front.figure("ringfence_requests_total") > 0.0);
        front.terminate();
    }
}

#[test]
#[ignore = "long: cargo xtask test --all --only rust-vmm"]
fn a_console() {
    let place = Place::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (number, socket) = (port.to_string(), place.path("console0"));
    let arguments = ["--backend", "network", "--tcp-port", &number];
    let _back = Stranger::of_rust_vmm("vhost-device-console", &arguments, &socket);
    let front = proxy(&place, "console.p", &socket);
    let script = r#"
await [ -e /dev/hvc0 ]
exec 4<>/dev/hvc0
stty raw -echo <&4
say opened
hear go
for number in $(seq 200); do echo "line $number of the guest's"; done >&4
# One byte at a time: version 0.1.0 gives a buffer back once for each byte in it, after which no
# driver goes on.
for turn in 1 2 3; do
    say next
    say byte$turn $(dd bs=1 count=1 <&4)
done
"#;
    let machine = Qemu::new(Iommu::None).newer().other(&front.socket, 3, 4, 12);
    let mut guest = machine.start(&place, script);
    guest.hear("opened");
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut terminal = BufReader::new(stream);
    guest.say("go");
    for number in 1..=200 {
        let mut line = String::new();
        terminal.read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), format!("line {number} of the guest's"));
    }
    for byte in ["x", "y", "z"] {
        guest.hear("next");
        terminal.get_mut().write_all(byte.as_bytes()).unwrap();
    }
    let output = guest.end();
    assert_eq!(["byte1", "byte2", "byte3"].map(|name| output.word(name)), ["x", "y", "z"]);
    front.terminate();
}
