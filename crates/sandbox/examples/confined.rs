//! A process that opens what it needs, gives up the rest, and continues with threads of every role.

use std::{error::Error, fs::File, io::Read as _, sync::Arc, thread};

use ringfence_sandbox::{Role, Sandbox, confine, refusals};

/// Reads, allocates and frees, and starts a thread of its own, as a thread of a service may.
fn work(role: Role, mut image: &File) -> usize {
    confine(role);
    let many: Vec<Vec<u8>> = (0..64).map(|at| vec![1; at << 14]).collect();
    let mut header = [0; 4];
    if matches!(role, Role::Front | Role::Worker) {
        image.read_exact(&mut header).expect("the image is open");
    }
    let inner = thread::spawn(move || many.iter().map(Vec::len).sum::<usize>());
    inner.join().expect("it only adds") + usize::from(header[0])
}

fn main() -> Result<(), Box<dyn Error>> {
    let image = Arc::new(File::open("/dev/zero")?);
    for unsupported in Sandbox::default().enter()? {
        println!("not on this machine: {unsupported}");
    }
    for role in [Role::Front, Role::Figures, Role::Worker, Role::Disk, Role::Log] {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let image = Arc::clone(&image);
                thread::spawn(move || work(role, &image))
            })
            .collect();
        for thread in threads {
            let sum = thread.join().expect("no thread is refused anything");
            assert_eq!(sum, (0..64).map(|at: usize| at << 14).sum());
        }
    }
    assert_eq!(refusals(), 0, "a thread called what is on no list");
    println!("nothing that they called was refused");
    Ok(())
}
