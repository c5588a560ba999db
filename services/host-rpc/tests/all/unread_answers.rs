//! A client that sends requests but doesn't receive the answers, over a transport that the test drives by hand.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use ferrogin_test_support::wait::{receive, wait_until};
use host_rpc::frame::{Header, Kind};
use host_rpc::{Payload, ReceiveDone, SendDone, Server, Settings, Transport};

/// The most receives that a server posts to its transport.
const RECEIVES: usize = 16;

#[derive(Default)]
struct State {
    sent: VecDeque<(Payload, SendDone)>,
    receives: VecDeque<ReceiveDone>,
}

/// Keeps every message and receive until the test takes it. Closing it does nothing.
#[derive(Clone, Default)]
struct ManualTransport(Arc<Mutex<State>>);

impl ManualTransport {
    /// Delivers a message to the server; false if the server has no receive posted.
    fn deliver(&self, message: &[u8]) -> bool {
        let read = self.0.lock().unwrap().receives.pop_front();
        read.map(|done| done(Ok(message.to_vec()))).is_some()
    }

    /// Takes the next message that the server sent.
    fn take_sent(&self) -> Option<Vec<u8>> {
        let (bytes, done) = self.0.lock().unwrap().sent.pop_front()?;
        let bytes = bytes.as_slice().to_vec();
        done(Ok(()));
        Some(bytes)
    }
}

impl Transport for ManualTransport {
    fn peer(&self) -> &str {
        "the test"
    }

    fn max_message(&self) -> usize {
        1 << 20
    }

    fn send(&self, message: Payload, done: SendDone) {
        self.0.lock().unwrap().sent.push_back((message, done));
    }

    fn receive(&self, done: ReceiveDone) {
        self.0.lock().unwrap().receives.push_back(done);
    }

    fn close(&self, _limit: Duration) {}
}

fn request(call: u64) -> Vec<u8> {
    Header { code: 1, call, ..Header::new(Kind::Request) }.emit().to_vec()
}

/// Unread answers are bounded; once they are read, all others follow.
#[test]
fn unread_answers_are_bounded() {
    // Inline answers, answers in one message of their own, and answers in pieces.
    for len in [10, 20_000, 100_000] {
        let settings = Settings { credits: 4, workers: 0, piece: 50_000, ..Settings::default() };
        let server = Server::new(settings).method(1, move |_, _| Ok(vec![7; len].into())).start();
        let transport = ManualTransport::default();
        server.attach(transport.clone());
        let mut requests = 0;
        while transport.deliver(&request(requests)) {
            requests += 1;
            assert!(requests <= 2 * 4 + RECEIVES as u64, "the server keeps receiving");
        }
        assert!(requests > 4, "{requests}");
        let mut answers = Vec::new();
        while let Some(message) = transport.take_sent() {
            if let Ok(Header { kind: Kind::Answer, .. }) = Header::parse(&message) {
                // One message may hold several frames.
                let frames = if len == 10 { message.len() / (host_rpc::frame::HEADER + len) } else { 1 };
                answers.push(frames);
            }
            if requests < 200 && transport.deliver(&request(requests)) {
                requests += 1;
            }
        }
        assert_eq!((requests, answers.iter().sum::<usize>()), (200, 200), "of {len} bytes");
        assert_eq!(transport.0.lock().unwrap().receives.len(), RECEIVES);
    }
}

/// Dropping a server cancels its methods, even if the transport does not close its connections.
#[test]
fn dropping_server_cancels_its_methods() {
    let (started, has_started) = mpsc::channel();
    let server = Server::new(Settings { workers: 1, ..Settings::default() })
        .method(1, move |context, _| {
            started.send(()).unwrap();
            wait_until("cancellation", || context.is_cancelled());
            Ok("".into())
        })
        .start();
    let transport = ManualTransport::default();
    server.attach(transport.clone());
    assert!(transport.deliver(&request(1)) && transport.deliver(&request(2)));
    receive("a call", &has_started);
    drop(server);
    // The second call never started.
    assert!(has_started.try_recv().is_err());
}
