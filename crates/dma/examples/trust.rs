//! Which policies a device may have, and why: for the sysfs paths on the command line, or for every
//! PCI device of this machine.

use std::{env, fs, path::PathBuf};

use ringfence_dma::{Distrust, Policy, Trust};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut devices: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    if devices.is_empty() {
        // A machine without PCI has none.
        let listed = fs::read_dir("/sys/bus/pci/devices").into_iter().flatten();
        devices = listed.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
        devices.sort();
    }
    for device in devices {
        let trust = match Trust::from_sysfs(&device) {
            Ok(finding) => {
                println!("\n{}: {finding}", device.display());
                finding.trust
            }
            Err(error) => {
                // A device whose trust cannot be determined is not trusted.
                println!("\n{}: {error}", device.display());
                Trust::Untrusted { why: Distrust::Unknown }
            }
        };
        let allowed = Policy::ALL.into_iter().filter(|policy| trust.allows(*policy));
        println!("  {}", allowed.map(Policy::name).collect::<Vec<_>>().join(", "));
    }
    Ok(())
}
