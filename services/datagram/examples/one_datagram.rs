//! Sends one datagram between two endpoints of this process: `cargo run -p ferrogin-datagram --example one_datagram [PROVIDER]`.

use ferrogin_datagram::{Config, Event, MessageEndpoint};
use ferrogin_libfabric::Libfabric;
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let provider = std::env::args().nth(1).unwrap_or("tcp".to_owned());
    let config = Config { provider, ..Config::default() };
    let libfabric = Libfabric::load(None)?;
    let mut sender = MessageEndpoint::open(&libfabric, &config)?;
    let mut receiver = MessageEndpoint::open(&libfabric, &config)?;

    // A message is a short header and a payload. The peer's address travels by other means.
    let address = receiver.outbox().address().to_vec();
    println!("over {}, to an address of {} bytes", receiver.provider(), address.len());
    let peer = sender.outbox().add_peer(&address)?;
    sender.outbox().send(peer, b"greeting", b"hello")?;

    // Each endpoint moves only when its owner polls it.
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut received = false;
    while !received {
        sender.poll(|_, _| {})?;
        receiver.poll(|_, event| {
            if let Event::Message { header, payload, .. } = event {
                println!("received {:?}: {:?}", String::from_utf8_lossy(header), String::from_utf8_lossy(payload));
                received = true;
            }
        })?;
        if Instant::now() > deadline {
            return Err("no message came within 30 s".into());
        }
    }
    Ok(())
}
