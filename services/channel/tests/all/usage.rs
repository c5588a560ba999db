//! Unusual uses of the interface, and the errors they give.

use std::sync::mpsc;
use std::time::Duration;

use crate::common::{LIMIT, pair, patient};
use ferrogin_channel::{ChannelError, Config, Reactor};
use ferrogin_test_support::wait::receive;

/// A limit for what never happens.
const SHORT: Duration = Duration::from_millis(50);

#[test]
fn endless_limits_and_zero_depth_work() {
    let endless = Duration::MAX;
    let config = Config { depth: 0, connect_within: endless, lost_after: endless, ..Config::default() };
    let (_here, there, a, b) = pair(&config);
    a.send(b"one").wait_for(LIMIT).unwrap();
    assert_eq!(b.receive().wait_for(endless).unwrap(), b"one");
    b.send(b"two").wait_for(endless).unwrap();
    assert_eq!(a.receive().wait_for(LIMIT).unwrap(), b"two");
    assert!(!a.is_closed());
    a.close(endless).wait_for(LIMIT).unwrap();
    assert!(a.is_closed());
    assert!(there.shutdown(endless));
}

/// A timeout names the peer and the operation.
#[test]
fn timeout_names_the_operation() {
    let (here, there, a, b) = pair(&patient());
    let in_vain = |error: ChannelError, text: &str| {
        assert!(matches!(error, ChannelError::Timeout { limit: SHORT, .. }), "{error}");
        assert!(error.to_string().contains(text), "{error}");
    };
    in_vain(b.receive().wait_for(SHORT).unwrap_err(), &format!("{} did not send a message", b.peer()));
    let writes: Vec<_> = (0..256).map(|_| a.send(b"unread")).collect();
    in_vain(a.send(b"too far ahead").wait_for(SHORT).unwrap_err(), &format!("{} did not take a message", a.peer()));
    let beyond = a.send(b"too far ahead");
    in_vain(a.close(SHORT).wait_for(LIMIT).unwrap_err(), &format!("{} did not take all messages", a.peer()));
    drop((writes, beyond));
    let listener = here.listen().unwrap();
    in_vain(listener.accept().wait_for(SHORT).unwrap_err(), "a peer did not connect");
    drop(there);
    let dead = Reactor::open(&Config::default()).unwrap().listen().unwrap().address().clone();
    let error = here.connect(&dead).wait_for(SHORT).unwrap_err();
    assert!(error.to_string().contains(&*dead.endpoint()), "{error}");
}

/// Waiting in a callback fails at once, even while the reactor is ending.
#[test]
fn wait_in_callback_is_refused() {
    let (here, there, a, b) = pair(&patient());
    let (sender, receiver) = mpsc::channel();
    let (clone, of_end) = (a.clone(), sender.clone());
    a.write(b"first", move |sent| {
        sent.unwrap();
        drop(sender.send(clone.send(b"second").wait().map(drop)));
    });
    let error = receive("the end of a wait", &receiver).unwrap_err();
    assert!(matches!(error, ChannelError::OwnThread { .. }) && error.to_string().contains(a.peer()), "{error}");
    // The write continues.
    assert_eq!(b.receive().wait_for(LIMIT).unwrap(), b"first");
    assert_eq!(b.receive().wait_for(LIMIT).unwrap(), b"second");
    let clone = a.clone();
    a.read(move |ended| {
        assert!(ended.is_err());
        drop(of_end.send(clone.receive().wait().map(drop)));
    });
    drop(there);
    assert!(receive("the end of a wait", &receiver).is_err());
    drop(here);
}

/// Both ends have the secret, so the address may be public; a reactor with another secret gets no channel.
#[test]
fn peers_with_the_secret_connect_by_host_and_port() {
    let config = |secret: &str| Config { secret: Some(secret.to_owned()), ..patient() };
    let server = Reactor::open(&config("a text of both sides")).unwrap();
    let listener = server.listen().unwrap();
    assert!(matches!(server.listen(), Err(ChannelError::CannotListen(_))));
    let text = listener.address().to_string();
    assert!(text.starts_with("127.0.0.1:") && !text.contains('#'), "{text}");
    let address = text.replace("127.0.0.1", "localhost").parse().unwrap();
    let client = Reactor::open(&config("a text of both sides")).unwrap();
    let (a, b) = (client.connect(&address), listener.accept());
    let (a, b) = (a.wait_for(LIMIT).unwrap(), b.wait_for(LIMIT).unwrap());
    a.send(b"hello").wait_for(LIMIT).unwrap();
    assert_eq!(b.receive().wait_for(LIMIT).unwrap(), b"hello");

    // It can't prove the secret, and gets no answer.
    let impatient = Config { connect_within: SHORT, ..config("another text") };
    let other = Reactor::open(&impatient).unwrap();
    assert!(other.connect(&address).wait_for(LIMIT).is_err());
    let none = Reactor::open(&patient()).unwrap();
    assert!(matches!(none.connect(&address).wait_for(LIMIT), Err(ChannelError::BadAddress { .. })));
    // The next listener has the secret too.
    drop(listener);
    let listener = server.listen().unwrap();
    let (a, b) = (client.connect(listener.address()), listener.accept());
    assert!(a.wait_for(LIMIT).is_ok() && b.wait_for(LIMIT).is_ok());
}

/// The text of an address is enough to connect.
#[test]
fn text_of_an_address_reaches_its_listener() {
    let (here, there) = (Reactor::open(&patient()).unwrap(), Reactor::open(&patient()).unwrap());
    let _other = here.listen().unwrap();
    let listener = here.listen().unwrap();
    let (a, b) = (there.connect(&listener.address().to_string().parse().unwrap()), listener.accept());
    assert!(a.wait_for(LIMIT).is_ok() && b.wait_for(LIMIT).is_ok());
}
