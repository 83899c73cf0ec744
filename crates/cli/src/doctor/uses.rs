//! What the host uses a device for: the commands must not take away the disk that it runs from.

use super::tree::Tree;

/// For each thing in use, its place in the tree of devices, and what it is.
pub(super) struct Users(Vec<(String, String)>);

impl Users {
    pub(super) fn read(tree: &Tree) -> Users {
        let mut users = Vec::new();
        let name = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
        let class = |disk: &str| tree.link(&format!("sys/class/block/{disk}"));
        for line in tree.text("proc/self/mountinfo").unwrap_or_default().lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let (Some(number), Some(place)) = (words.get(2), words.get(4)) else { continue };
            // Some file systems have device numbers of their own, and show their disk by name only.
            let source =
                words.iter().position(|word| *word == "-").and_then(|at| words.get(at + 2));
            let disk = source.and_then(|source| source.strip_prefix("/dev/"));
            let link = tree.link(&format!("sys/dev/block/{number}"));
            if let Some(link) = link.or_else(|| class(disk?)) {
                users.push((link.clone(), format!("{} is mounted on {place}", name(&link))));
            }
        }
        for line in tree.text("proc/swaps").unwrap_or_default().lines() {
            let disk = line.split_whitespace().next().and_then(|word| word.strip_prefix("/dev/"));
            if let Some((link, disk)) = disk.and_then(|disk| Some((class(disk)?, disk))) {
                users.push((link, format!("{disk} is swapped to")));
            }
        }
        for disk in tree.names("sys/class/block") {
            let holders = tree.names(&format!("sys/class/block/{disk}/holders"));
            if let (Some(link), Some(holder)) = (class(&disk), holders.first()) {
                users.push((link, format!("{disk} is part of {holder}")));
            }
        }
        for interface in tree.names("sys/class/net") {
            let folder = format!("sys/class/net/{interface}");
            if tree.word(&format!("{folder}/operstate")).as_deref() == Some("up")
                && let Some(link) = tree.link(&folder)
            {
                users.push((link, format!("{interface} is up")));
            }
        }
        Users(users)
    }

    /// What a device is used for.
    pub(super) fn of(&self, address: &str) -> Vec<String> {
        let its = |link: &str| link.split('/').any(|part| part == address);
        let mut found: Vec<String> =
            self.0.iter().filter(|(link, _)| its(link)).map(|(_, what)| what.clone()).collect();
        found.dedup();
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tree::MadeUp;

    #[test]
    fn mounts_swap_volumes_and_interfaces_are_uses() {
        let disk = "../../devices/pci0000:00/0000:00:03.0/ata1/host0/block/sda";
        let made = MadeUp::new(&[
            (
                "proc/self/mountinfo",
                "1 0 0:30 /@ /home rw - btrfs /dev/sda3 rw\n2 0 0:5 / /proc rw - proc proc rw\nx\n\n",
            ),
            ("proc/swaps", "Filename Type\n/dev/sda2 partition 1 2\n/swapfile file 1 2\n"),
            ("sys/devices/pci0000:00/0000:00:03.0/ata1/host0/block/sda/sda1/holders/dm-0", ""),
            ("sys/devices/pci0000:00/0000:00:04.0/net/eth0/operstate", "up\n"),
            ("sys/devices/pci0000:00/0000:00:05.0/net/eth1/operstate", "down\n"),
        ]);
        for partition in ["sda1", "sda2", "sda3"] {
            made.link(&format!("sys/class/block/{partition}"), &format!("{disk}/{partition}"));
        }
        for (net, device) in [("eth0", "0000:00:04.0"), ("eth1", "0000:00:05.0")] {
            let target = format!("../../devices/pci0000:00/{device}/net/{net}");
            made.link(&format!("sys/class/net/{net}"), &target);
        }
        let users = Users::read(&made.tree());
        assert_eq!(
            users.of("0000:00:03.0"),
            ["sda3 is mounted on /home", "sda2 is swapped to", "sda1 is part of dm-0"]
        );
        assert_eq!(users.of("0000:00:04.0"), ["eth0 is up"]);
        assert_eq!(users.of("0000:00:05.0"), Vec::<String>::new());
        assert_eq!(users.of("0000:00:0"), Vec::<String>::new());
    }
}
