//! A client that asks and does not take the answers, played by hand on a transport that does only what it is told.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use host_rpc::frame::{Header, Kind};
use host_rpc::{Bytes, ReceiveDone, SendDone, Server, Settings, Transport};

const LIMIT: Duration = Duration::from_secs(120);
/// Reads that a server has with its transport, at most.
const READS: usize = 16;

#[derive(Default)]
struct State {
    sent: VecDeque<(Bytes, SendDone)>,
    reads: VecDeque<ReceiveDone>,
}

/// Keeps everything until somebody takes it. A close does nothing.
#[derive(Clone, Default)]
struct Stubborn(Arc<Mutex<State>>);

impl Stubborn {
    /// Gives the server a message; false when it reads none.
    fn say(&self, message: &[u8]) -> bool {
        let read = self.0.lock().unwrap().reads.pop_front();
        read.map(|done| done(Ok(message.to_vec()))).is_some()
    }

    /// Takes the next message of the server.
    fn hear(&self) -> Option<Vec<u8>> {
        let (bytes, done) = self.0.lock().unwrap().sent.pop_front()?;
        let bytes = bytes.as_slice().to_vec();
        done(Ok(()));
        Some(bytes)
    }
}

impl Transport for Stubborn {
    fn peer(&self) -> &str {
        "the greedy one"
    }

    fn max_message(&self) -> usize {
        1 << 20
    }

    fn send(&self, bytes: Bytes, done: SendDone) {
        self.0.lock().unwrap().sent.push_back((bytes, done));
    }

    fn receive(&self, done: ReceiveDone) {
        self.0.lock().unwrap().reads.push_back(done);
    }

    fn close(&self, _limit: Duration) {}
}

fn request(call: u64) -> Vec<u8> {
    Header { code: 1, call, ..Header::new(Kind::Request) }.emit().to_vec()
}

/// Answers that nobody takes pile up to a bound; when they are taken, all others come too.
#[test]
fn a_client_that_does_not_take_answers_fills_no_memory() {
    // Answers in the message of their header, behind it, and in pieces.
    for len in [10, 20_000, 100_000] {
        let settings = Settings { credits: 4, workers: 0, piece: 50_000, ..Settings::default() };
        let server = Server::new(settings).method(1, move |_, _| Ok(vec![7; len].into())).start();
        let wire = Stubborn::default();
        server.attach(wire.clone());
        let mut asked = 0;
        while wire.say(&request(asked)) {
            asked += 1;
            assert!(asked <= 2 * 4 + READS as u64, "the server goes on reading");
        }
        assert!(asked > 4, "{asked}");
        let mut answers = Vec::new();
        while let Some(message) = wire.hear() {
            if let Ok(Header { kind: Kind::Answer, .. }) = Header::parse(&message) {
                // Several may stand in one message.
                let frames = if len == 10 { message.len() / (host_rpc::frame::HEADER + len) } else { 1 };
                answers.push(frames);
            }
            if asked < 200 && wire.say(&request(asked)) {
                asked += 1;
            }
        }
        assert_eq!((asked, answers.iter().sum::<usize>()), (200, 200), "of {len} bytes");
        assert_eq!(wire.0.lock().unwrap().reads.len(), READS);
    }
}

/// A server that is dropped tells its methods, even where the transport does not get its connections closed.
#[test]
fn a_server_that_is_dropped_tells_its_methods() {
    let (begun, has_begun) = mpsc::channel();
    let server = Server::new(Settings { workers: 1, ..Settings::default() })
        .method(1, move |context, _| {
            begun.send(()).unwrap();
            let since = Instant::now();
            while !context.is_cancelled() {
                assert!(since.elapsed() < LIMIT, "nobody told");
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok("".into())
        })
        .start();
    let wire = Stubborn::default();
    server.attach(wire.clone());
    assert!(wire.say(&request(1)) && wire.say(&request(2)));
    has_begun.recv_timeout(LIMIT).unwrap();
    drop(server);
    // The second never began.
    assert!(has_begun.try_recv().is_err());
}
