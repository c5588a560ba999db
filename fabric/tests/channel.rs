//! Channels over real providers: every byte, in order, once.

mod common;

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use common::libraries;
use ferrogin_fabric::Libfabric;
use ferrogin_fabric::channel::{Channel, Config, Reactor};

const LIMIT: Duration = Duration::from_secs(60);

fn pair(lib: &Arc<Libfabric>, config: &Config) -> (Reactor, Reactor, Channel, Channel) {
    let (here, there) = (Reactor::open(lib, config).unwrap(), Reactor::open(lib, config).unwrap());
    let listener = here.listen().unwrap();
    let (a, b) = (there.connect(listener.address()), listener.accept());
    let (a, b) = (a.wait_for(LIMIT).unwrap(), b.wait_for(LIMIT).unwrap());
    (here, there, b, a)
}

#[test]
fn messages_arrive_whole_and_in_order() {
    for lib in libraries("messages_arrive_whole_and_in_order") {
        for provider in ["tcp", "tcp;ofi_rxm", "shm"] {
            let config = Config {
                provider: provider.to_owned(),
                source: if provider == "shm" { None } else { Config::default().source },
                ..Config::default()
            };
            if provider == "shm" && lib.version().major < 2 {
                continue;
            }
            let (_x, _y, a, b) = pair(&lib, &config);
            println!("{} peer {} {}", _x.provider(), a.peer(), b.peer());
            let start = Instant::now();
            for round in 0..2000usize {
                let sent = a.send(vec![round as u8; round * 7]);
                let got = b.receive().wait_for(LIMIT).unwrap();
                assert_eq!(got, vec![round as u8; round * 7]);
                sent.wait_for(LIMIT).unwrap();
            }
            println!("{:?}", start.elapsed());
            let (tx, rx) = mpsc::channel();
            for i in 0..1000usize {
                let tx = tx.clone();
                b.read(move |m| tx.send(m).unwrap());
                a.write(vec![i as u8; i % 50 * 100], |r| {
                    r.unwrap();
                });
            }
            for i in 0..1000usize {
                assert_eq!(rx.recv_timeout(LIMIT).unwrap().unwrap(), vec![i as u8; i % 50 * 100]);
            }
            a.close(LIMIT).wait().unwrap();
            println!("{:?} closed: {}", start.elapsed(), b.receive().wait().unwrap_err());
        }
    }
}
