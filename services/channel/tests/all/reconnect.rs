//! One client after another, every second one killed. Each connects, and gets no message meant for an earlier one.

use std::io::Write;

use crate::common::{LIMIT, Way, libraries, way_of_child, with_card};
use ferrogin_channel::{Address, Channel, Reactor};
use ferrogin_test_support::Random;
use ferrogin_test_support::peer::{Peer as Process, hex, unhex};

/// How many clients there are.
const LIVES: u64 = 4;
/// Messages written each way, not all of them read, when a client dies.
const UNREAD: u64 = 100;

fn body(life: u64, from_client: bool, number: u64) -> Vec<u8> {
    let mut random = Random::new(life * 1_000_003 + number * 2 + u64::from(from_client));
    let len = match random.next_u64() % 16 {
        0 => 0,
        1 => 200_000,
        _ => random.index(3000),
    };
    [[life, u64::from(from_client), number].map(u64::to_le_bytes).concat(), random.bytes(len)].concat()
}

fn write(channel: &Channel, life: u64, from_client: bool, count: u64) {
    for number in 0..count {
        channel.write(body(life, from_client, number), |_| ());
    }
}

fn read(channel: &Channel, life: u64, from_client: bool, count: u64) {
    for number in 0..count {
        let message = channel.receive().wait_for(LIMIT).unwrap();
        assert!(message == body(life, from_client, number), "message {number} of life {life}");
    }
}

/// Returns whether the client ends with a close; otherwise it's killed amid traffic.
fn ends_cleanly(life: u64) -> bool {
    life % 2 == 1
}

/// Not a test: what the clients run.
#[test]
fn child() {
    let var = |name: &str| std::env::var(name).ok();
    let Some(address) = var("FERROGIN_TEST_ADDRESS") else { return };
    let life: u64 = var("FERROGIN_TEST_LIFE").and_then(|text| text.parse().ok()).unwrap();
    let reactor = Reactor::open(&way_of_child().config()).unwrap();
    let channel = reactor.connect(&Address::parse(&unhex(&address)).unwrap()).wait().unwrap();
    channel.send(life.to_le_bytes().to_vec()).wait_for(LIMIT).unwrap();
    read(&channel, life, false, UNREAD / 2);
    write(&channel, life, true, UNREAD);
    // The server has read some messages.
    read(&channel, life, false, UNREAD);
    println!("MIDDLE");
    std::io::stdout().flush().unwrap();
    let mut go_on = String::new();
    std::io::stdin().read_line(&mut go_on).unwrap();
    channel.close(LIMIT).wait().unwrap();
    assert!(reactor.shutdown(LIMIT));
}

/// Clients over one provider, one after another. `notices_death`: their connections end when they do; otherwise no
/// death is noticed, because the server is patient.
fn lives(way: &Way, notices_death: bool) {
    let reactor = Reactor::open(&way.config()).unwrap();
    let listener = reactor.listen().unwrap();
    let mut before: Option<(Channel, u64)> = None;
    for life in 0..LIVES {
        let of_one =
            [("FERROGIN_TEST_ADDRESS", hex(&listener.address().to_bytes())), ("FERROGIN_TEST_LIFE", life.to_string())];
        let mut client = Process::start("reconnect::child", &[&way.environment()[..], &of_one].concat());
        let channel = listener.accept().wait_for(LIMIT).unwrap();
        if let Some((before, life)) = before.take() {
            assert_ne!(before.peer(), channel.peer());
            if notices_death && !ends_cleanly(life) {
                let error = before.receive().wait_for(LIMIT).unwrap_err();
                assert!(error.to_string().contains(before.peer()), "{error}");
            }
        }
        let hello = channel.receive().wait_for(LIMIT).unwrap();
        assert_eq!(hello, life.to_le_bytes());
        write(&channel, life, false, UNREAD / 2);
        read(&channel, life, true, UNREAD / 2);
        write(&channel, life, false, UNREAD);
        client.wait_for("MIDDLE");
        if ends_cleanly(life) {
            client.write_line("");
            for number in UNREAD / 2..UNREAD {
                assert!(channel.receive().wait_for(LIMIT).unwrap() == body(life, true, number));
            }
            assert!(client.succeeds());
        } else {
            // This message is never read.
            write(&channel, life, false, UNREAD);
            client.signal(libc::SIGKILL);
            assert!(!client.succeeds());
        }
        before = Some((channel, life));
    }
    println!("{way}: {LIVES} clients");
}

#[test]
fn next_client_connects() {
    lives(&Way::tcp(), true);
}

#[test]
fn next_client_over_the_software_card_connects() {
    let test = "next_client_over_the_software_card_connects";
    with_card(test, || libraries(test).iter().for_each(|lib| lives(&Way::over(lib, "softefa"), false)));
}
