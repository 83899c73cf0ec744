//! A first mapping: `cargo run -p ringfence --example map`
use ringfence::{Device, Direction, soft};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::builder(soft::domain()).build()?; // strict+map, in the domain's own limits
    let mapping = device.map(vec![0u8; 64 << 10], Direction::FromDevice)?; // takes the buffer
    for segment in mapping.segments() {
        println!("{segment}"); // goes into a descriptor
    }
    let buffer = mapping.unmap()?; // from here on the device cannot reach it
    println!("{} bytes are back", buffer.len());
    Ok(())
}
