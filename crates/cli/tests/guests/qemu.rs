//! The machines that QEMU runs.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    machine::{Guest, initramfs},
    place::{Guard, Place, part},
};

/// The IOMMU of a machine, and how its Linux uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Iommu {
    None,
    IntelStrict,
    IntelLazy,
    VirtioStrict,
    VirtioLazy,
    /// `ringfence guard`'s: QEMU's own IOMMU is not used by the guest.
    GuardStrict,
    GuardLazy,
    /// The same, where Linux wants devices to bypass it.
    GuardPassthrough,
    /// The same, where Linux has no driver for it and no table that describes it.
    GuardUnknown,
}

impl Iommu {
    /// Whether it is `ringfence guard`'s.
    fn is_guards(self) -> bool {
        use Iommu::*;
        matches!(self, GuardStrict | GuardLazy | GuardPassthrough | GuardUnknown)
    }

    /// Linux's name for the domain of a device behind it.
    pub(crate) fn domain(self) -> &'static str {
        match self {
            Iommu::None | Iommu::GuardUnknown => "none",
            Iommu::GuardPassthrough => "identity",
            Iommu::IntelStrict | Iommu::VirtioStrict | Iommu::GuardStrict => "DMA",
            Iommu::IntelLazy | Iommu::VirtioLazy | Iommu::GuardLazy => "DMA-FQ",
        }
    }

    fn device(self) -> &'static [&'static str] {
        match self {
            _ if self.is_guards() => &[],
            Iommu::None => &[],
            Iommu::IntelStrict | Iommu::IntelLazy => {
                &["-device", "intel-iommu,intremap=on,device-iotlb=on"]
            }
            _ => &["-device", "virtio-iommu-pci"],
        }
    }

    fn kernel_line(self) -> &'static str {
        match self {
            Iommu::None | Iommu::GuardUnknown => "intel_iommu=off",
            Iommu::GuardPassthrough => "intel_iommu=off iommu.passthrough=1",
            Iommu::IntelStrict => "intel_iommu=on iommu.strict=1",
            Iommu::IntelLazy => "intel_iommu=on iommu.strict=0",
            Iommu::VirtioStrict | Iommu::GuardStrict => "intel_iommu=off iommu.strict=1",
            Iommu::VirtioLazy | Iommu::GuardLazy => "intel_iommu=off iommu.strict=0",
        }
    }
}

impl fmt::Display for Iommu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// The beginning of every script: the IOMMU is there before the drivers, and the script says which
/// domain devices are in.
const BEGIN: &str = r#"
for cpu in /sys/devices/system/cpu/cpu[1-9]*; do
    [ ! -e $cpu/online ] || echo 1 > $cpu/online
done
if grep -q viommu=1 /proc/cmdline; then modprobe virtio-iommu; fi
# The PCI address of the nth virtio device of that kind (block 2, net 1), from 0.
virtio_pci() {
    for device in /sys/bus/pci/devices/*; do
        [ $(cat $device/vendor) = 0x1af4 ] || continue
        [ $(($(cat $device/device))) = $((0x1040 + $1)) ] || continue
        [ $2 = 0 ] && { basename $device; return; }
        set -- $1 $(($2 - 1))
    done
    false
}
# A driver, virtio_blk or virtio_net, whose devices can be used when this returns. Those behind a
# virtio-iommu that is a module are found after it, by a kernel thread that nothing waits for.
load() { modprobe $1; await ready $1; }
# Waits until a command succeeds, not for ever.
await() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 30000 ]
        usleep 10000
    done
}
# Waits until the disk has completed a number of reads more: the load is then running.
under_load() {
    completed=$(awk '{ print $1 }' /sys/block/vda/stat)
    await more_reads
}
more_reads() { [ $(awk '{ print $1 }' /sys/block/vda/stat) -ge $((completed + 100)) ]; }
ready() {
    nth=0
    while [ $1 = virtio_blk ] && virtio_pci 2 $nth > /dev/null; do
        # The name is there before the disk is.
        dd if=/dev/vd$(echo $nth | tr 0-9 a-j) of=/dev/null count=1 2> /dev/null || return 1
        nth=$((nth + 1))
    done
    while [ $1 = virtio_net ] && virtio_pci 1 $nth > /dev/null; do
        [ -e /sys/class/net/eth$nth ] || return 1
        nth=$((nth + 1))
    done
}
# Takes a PCI device from its driver and hands it to VFIO, with type 1; $group is its group then.
to_vfio() {
    modprobe vfio-pci
    # A virtio-iommu does not remap interrupts, and VFIO wants to hear that this is known.
    if grep -q viommu=1 /proc/cmdline; then
        modprobe vfio_iommu_type1 allow_unsafe_interrupts=1
    else
        modprobe vfio_iommu_type1
    fi
    [ ! -e /sys/module/vfio/parameters/enable_unsafe_noiommu_mode ] ||
        [ $(cat /sys/module/vfio/parameters/enable_unsafe_noiommu_mode) = N ]
    [ ! -e /sys/bus/pci/devices/$1/driver ] || echo $1 > /sys/bus/pci/devices/$1/driver/unbind
    echo vfio-pci > /sys/bus/pci/devices/$1/driver_override
    echo $1 > /sys/bus/pci/drivers_probe
    group=$(basename $(readlink /sys/bus/pci/devices/$1/iommu_group))
}
# In which domain a PCI device is.
domain() { cat /sys/bus/pci/devices/$1/iommu_group/type 2>/dev/null || echo none; }
# fio on the disk: what it is given are its options; the result has the job's name.
run_fio() {
    fio --filename=/dev/vda --direct=1 --ioengine=io_uring --output-format=json --eta=never \
        --output=/tmp/fio.$1 --name=$*
    give $1 < /tmp/fio.$1
}
"#;

/// Tests of the kernel's cryptography, certificates, what BPF's programs may call.
const LEFT_OUT: &str = "cryptomgr.notests=1 initcall_blacklist=jent_mod_init,\
                        load_system_certificate_list,bpf_tcp_ca_kfunc_init,bpf_dummy_struct_ops_init";

/// A machine to be started.
pub(crate) struct Qemu {
    iommu: Iommu,
    cpus: u32,
    parallel: bool,
    memory_mib: u32,
    devices: u32,
    reboots: bool,
    console: &'static str,
    kernel: &'static str,
    newer: bool,
    line: &'static str,
    arguments: Vec<String>,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl Qemu {
    pub(crate) fn new(iommu: Iommu) -> Qemu {
        let arguments = iommu.device().iter().map(|&word| word.to_owned()).collect();
        Qemu {
            iommu,
            cpus: 1,
            parallel: false,
            memory_mib: 256,
            devices: 0,
            reboots: false,
            console: "console",
            kernel: "",
            newer: false,
            line: "",
            arguments,
            files: Vec::new(),
        }
    }

    /// A machine with the IOMMU and devices of `ringfence guard`, by the arguments that it has
    /// printed.
    pub(crate) fn guarded(iommu: Iommu, guard: &Guard) -> Qemu {
        assert!(iommu.is_guards(), "{iommu}");
        let mut machine = Qemu::new(iommu).newer();
        let taken = |words: &&[String]| iommu != Iommu::GuardUnknown || words[0] != "-acpitable";
        let words = guard.arguments.chunks(2).filter(taken).flatten();
        machine.arguments.extend(words.cloned());
        machine
    }

    /// With files of its own where several machines run in one place.
    pub(crate) fn called(mut self, name: &'static str) -> Qemu {
        self.console = name;
        self
    }

    /// On a QEMU whose IOMMU another process can serve.
    pub(crate) fn newer(mut self) -> Qemu {
        self.newer = true;
        self
    }

    pub(crate) fn cpus(mut self, cpus: u32) -> Qemu {
        self.cpus = cpus;
        self
    }

    /// With a thread for each of its processors, for figures: such a machine may crash while Linux
    /// patches its own code.
    pub(crate) fn parallel(mut self) -> Qemu {
        self.parallel = true;
        self
    }

    /// A reboot of the guest reboots the machine instead of ending it.
    pub(crate) fn reboots(mut self) -> Qemu {
        self.reboots = true;
        self
    }

    /// With the kernel that has iommufd.
    pub(crate) fn iommufd(mut self) -> Qemu {
        self.kernel = "-iommufd";
        self
    }

    /// With ext4 and stress-ng.
    pub(crate) fn iomix(mut self) -> Qemu {
        self.kernel = "-iomix";
        self
    }

    /// With QEMU's monitor on a socket.
    pub(crate) fn monitor(mut self, socket: &Path) -> Qemu {
        self.add("-qmp", format!("unix:{},server=on,wait=off", socket.display()));
        self
    }

    /// Waits for an incoming machine, on the command of its monitor, and boots none.
    pub(crate) fn incoming(mut self) -> Qemu {
        self.console = "console.after";
        self.add("-incoming", "defer".to_owned());
        self
    }

    /// One more of QEMU's options.
    pub(crate) fn with(mut self, option: &str, value: &str) -> Qemu {
        self.add(option, value.to_owned());
        self
    }

    /// More of the kernel's options.
    pub(crate) fn kernel_parameters(mut self, line: &'static str) -> Qemu {
        self.line = line;
        self
    }

    /// A file in the guest.
    pub(crate) fn file(mut self, name: &'static str, content: Vec<u8>) -> Qemu {
        self.files.push((name, content));
        self
    }

    /// A disk, with its back end listening on a socket, and with more of QEMU's options for it.
    pub(crate) fn blk(mut self, socket: &Path, queues: u32, more: &str) -> Qemu {
        let n = self.port();
        self.chardev(n, socket);
        let own = self.own();
        self.add(
            "-device",
            format!("vhost-user-blk-pci,chardev=c{n},num-queues={queues},{own}{more}"),
        );
        self
    }

    /// The chardev of a back end's connection, which reconnects after a crash of the back end.
    fn chardev(&mut self, n: u32, socket: &Path) {
        let again = if self.newer { "reconnect-ms=1000" } else { "reconnect=1" };
        self.add("-chardev", format!("socket,id=c{n},path={},{again}", socket.display()));
    }

    /// A source of random bytes, with its back end listening on a socket.
    pub(crate) fn rng(self, socket: &Path) -> Qemu {
        self.modern(socket, "vhost-user-rng-pci")
    }

    /// A device of any kind, by its number among virtio's, with its back end listening on a socket.
    pub(crate) fn other(self, socket: &Path, kind: u32, queues: u32, config: u32) -> Qemu {
        let shape = format!("virtio-id={kind},num_vqs={queues},config_size={config}");
        self.modern(socket, &format!("vhost-user-test-device-pci,{shape}"))
    }

    /// A file system with the tag `host`, with its back end listening on a socket.
    pub(crate) fn fs(self, socket: &Path) -> Qemu {
        self.modern(socket, "vhost-user-fs-pci,tag=host")
    }

    /// A device that has never been one of virtio 0.9. It needs a connection at once, and does not
    /// connect again.
    fn modern(mut self, socket: &Path, device: &str) -> Qemu {
        let n = self.port();
        self.add("-chardev", format!("socket,id=c{n},path={}", socket.display()));
        let own = self.own().replace(",disable-legacy=on", "");
        self.add("-device", format!("{device},chardev=c{n},{own}"));
        self
    }

    /// A thread of QEMU's for one disk.
    pub(crate) fn thread(mut self, name: &str) -> Qemu {
        self.add("-object", format!("iothread,id={name}"));
        self
    }

    /// A disk of QEMU's own, with more of QEMU's options for it.
    pub(crate) fn own_blk(mut self, image: &Path, queues: u32, more: &str) -> Qemu {
        let n = self.port();
        self.add("-drive", format!("if=none,id=d{n},file={},format=raw", image.display()));
        let own = self.own();
        self.add("-device", format!("virtio-blk-pci,drive=d{n},num-queues={queues},{own}{more}"));
        self
    }

    /// An NVMe disk of QEMU's own.
    pub(crate) fn nvme(mut self, image: &Path) -> Qemu {
        let n = self.port();
        self.add("-drive", format!("if=none,id=d{n},file={},format=raw", image.display()));
        self.add("-device", format!("nvme,drive=d{n},serial=nvme{n},bus=rp{n}"));
        self
    }

    /// A network device, with its back end listening on a socket, and with more of QEMU's options
    /// for it.
    pub(crate) fn net(mut self, socket: &Path, queues: u32, more: &str) -> Qemu {
        let n = self.port();
        self.chardev(n, socket);
        self.add("-netdev", format!("type=vhost-user,id=n{n},chardev=c{n},queues={queues}"));
        let mq = if queues > 1 { "mq=on," } else { "" };
        let own = self.own();
        // The interrupts of QEMU 7.2's vhost-user-net do not survive emulation with MSI-X.
        self.add(
            "-device",
            format!("virtio-net-pci,netdev=n{n},mac=52:54:00:00:00:0{n},{mq}romfile=,vectors=0,{own}{more}"),
        );
        self
    }

    /// A network device of QEMU's own; all of a machine are in one network.
    pub(crate) fn own_net(mut self) -> Qemu {
        let n = self.port();
        self.add("-netdev", format!("hubport,id=n{n},hubid=0"));
        let own = self.own();
        self.add(
            "-device",
            format!("virtio-net-pci,netdev=n{n},mac=52:54:00:00:00:0{n},romfile=,{own}"),
        );
        self
    }

    /// Code for the firmware, which calls it once the disks with a lower `bootindex` are there.
    pub(crate) fn option_rom(mut self, place: &Place, content: &[u8]) -> Qemu {
        let path = place.path("option.rom");
        std::fs::write(&path, content).unwrap();
        self.add("-option-rom", format!("romfile={},bootindex=100", path.display()));
        self
    }

    fn add(&mut self, option: &str, value: String) {
        self.arguments.extend([option.to_owned(), value]);
    }

    /// A port of its own for the next device: address translation services only exist behind one.
    fn port(&mut self) -> u32 {
        self.devices += 1;
        let n = self.devices;
        self.add("-device", format!("pcie-root-port,id=rp{n},slot={n}"));
        n
    }

    fn own(&self) -> String {
        let translated = match self.iommu {
            Iommu::None => "",
            _ => ",iommu_platform=on,ats=on",
        };
        format!("bus=rp{},disable-legacy=on{translated}", self.devices)
    }

    /// Starts it; its Linux runs `script`.
    pub(crate) fn start(self, place: &Place, script: &str) -> Guest {
        let initrd = place.path(&format!("{}.initramfs", self.console));
        let console = place.path(self.console);
        let script = format!("{BEGIN}\n{script}");
        let base = format!("initramfs{}", self.kernel);
        std::fs::write(&initrd, initramfs(&base, &script, &self.files)).unwrap();
        let mut command = Command::new(qemu_program(self.newer));
        // Names its threads, to distinguish them.
        command.args(["-name", "guest,debug-threads=on"]);
        command.args(["-machine", "q35,kernel-irqchip=split"]);
        // Linux patches its own code while it runs (a static key that TCP turns at its first packet).
        // Of QEMU's threads, one for each processor, one may then still run what another has just
        // overwritten: `Oops: int3`. With QEMU 7.2 that took under a hundred patches, with 11 under
        // a thousand; one thread for all processors did 3000 without it. Two processors then never
        // run at once; what drivers do at once is tested without an emulator.
        let threads = if self.parallel { "multi" } else { "single" };
        command.args(["-accel", &format!("tcg,thread={threads}")]);
        // Without what makes emulation slow: a fifth level of page tables, mitigations (below).
        command.args(["-cpu", "max,la57=off", "-nodefaults", "-display", "none"]);
        command.args(["-smp", &self.cpus.to_string()]);
        // With guard, the printed arguments define memory and devices.
        if !self.iommu.is_guards() {
            let size = self.memory_mib.to_string();
            let memory = format!("memory-backend-memfd,id=mem,size={size}M,share=on");
            command.args(["-machine", "memory-backend=mem", "-m", &size, "-object", &memory]);
        }
        if !self.reboots {
            command.arg("-no-reboot");
        }
        command.args(&self.arguments);
        let kernel = part(&format!("vmlinuz{}", self.kernel));
        command.arg("-kernel").arg(kernel).arg("-initrd").arg(&initrd);
        let viommu = match self.iommu {
            Iommu::VirtioStrict | Iommu::VirtioLazy => true,
            iommu => iommu.is_guards() && iommu != Iommu::GuardUnknown,
        };
        // On a busy machine, Linux would wait for too few ticks of its timer, and give up. While it
        // boots, when it patches itself most, it has one processor; the script has all of them. What
        // no test is about and takes a third of a boot is left out.
        let line = format!(
            "console=ttyS0 loglevel=5 panic=-1 no_timer_check maxcpus=1 mitigations=off {LEFT_OUT} viommu={} {} {}",
            u8::from(viommu),
            self.iommu.kernel_line(),
            self.line
        );
        command.args(["-append", &line]);
        command.arg("-serial").arg(format!("file:{}", console.display()));
        command.args(["-serial", "stdio"]);
        Guest::start(&mut command, Some(console))
    }
}

/// The QEMU for machines, the newer one of two if requested. Another can be tried in place of the
/// older.
pub(crate) fn qemu_program(newer: bool) -> PathBuf {
    let own = part(if newer { "qemu11/qemu-system-x86_64" } else { "qemu-system-x86_64" });
    let other = std::env::var_os("RINGFENCE_QEMU").filter(|_| !newer);
    other.map_or(own, PathBuf::from)
}
