//! Traffic over a channel, with checks of every message and of their order.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use ferrogin_channel::{Channel, ChannelError};
use ferrogin_test_support::Random;

/// Returns what the length and the bytes of message `number` from sender `seed` are made of.
fn random(seed: u64, number: u64) -> Random {
    Random::new(seed.wrapping_mul(0x1234_5678_9abc_def1) ^ number)
}

/// Returns the length of message `number` from sender `seed`: every magnitude up to 8 MiB, larger ones more rarely,
/// including 0 and the largest.
pub fn size_of(seed: u64, number: u64) -> usize {
    let mut random = random(seed, number);
    let magnitude = random.next_u64().trailing_zeros().min(11);
    match (number % 64, number % 4096) {
        (_, 77) => 8 << 20,
        (0, _) => 0,
        _ => (random.next_u64() % (16u64 << (2 * magnitude))).min(8 << 20) as usize,
    }
}

/// Returns the bytes of message `number` from sender `seed`, in the memory of `room`.
fn fill(mut room: Vec<u8>, seed: u64, number: u64) -> Vec<u8> {
    let len = size_of(seed, number);
    let mut random = random(seed, number);
    room.clear();
    room.reserve(len + 8);
    while room.len() < len {
        room.extend_from_slice(&random.next_u64().to_le_bytes());
    }
    room.truncate(len);
    room
}

fn is_right(bytes: &[u8], seed: u64, number: u64) -> bool {
    let mut random = random(seed, number);
    bytes.len() == size_of(seed, number)
        && bytes.chunks(8).all(|chunk| *chunk == random.next_u64().to_le_bytes()[..chunk.len()])
}

/// The outcome of one direction.
#[derive(Debug)]
pub struct Outcome {
    /// Callbacks with a message or a buffer.
    pub good: u64,
    /// Callbacks with an error.
    pub bad: u64,
    /// The first error.
    pub error: Option<ChannelError>,
}

struct Direction {
    seed: u64,
    count: u64,
    begun: AtomicU64,
    /// Locked from choosing a number until its request, so that numbers are in the order of requests.
    order: Mutex<()>,
    outcome: Mutex<Option<Outcome>>,
    over: mpsc::Sender<Outcome>,
}

impl Direction {
    fn new(seed: u64, count: u64) -> (Arc<Self>, mpsc::Receiver<Outcome>) {
        let (over, receiver) = mpsc::channel();
        let outcome = Mutex::new(Some(Outcome { good: 0, bad: 0, error: None }));
        (Arc::new(Self { seed, count, begun: AtomicU64::new(0), order: Mutex::new(()), outcome, over }), receiver)
    }

    /// Returns the number of the next message, if there is one and nothing failed.
    fn begin(&self) -> Option<u64> {
        let number = self.begun.load(Ordering::Relaxed);
        if number == self.count || self.outcome.lock().unwrap().as_ref().is_none_or(|outcome| outcome.bad > 0) {
            return None;
        }
        self.begun.store(number + 1, Ordering::Relaxed);
        Some(number)
    }

    /// Records callback `number`, which must be the next one.
    fn called(&self, number: u64, error: Option<&ChannelError>) {
        let mut slot = self.outcome.lock().unwrap();
        let outcome = slot.as_mut().expect("no callback comes after the last");
        assert_eq!(number, outcome.good + outcome.bad, "callbacks are called in order, once each");
        match error {
            None => {
                assert_eq!(outcome.bad, 0, "nothing succeeds after a failure");
                outcome.good += 1;
            }
            Some(error) => {
                outcome.bad += 1;
                outcome.error.get_or_insert_with(|| error.clone());
            }
        }
        let done = outcome.good + outcome.bad;
        let all = if outcome.bad > 0 { self.begun.load(Ordering::Relaxed) } else { self.count };
        if done == all
            && let Some(outcome) = slot.take()
        {
            let _ = self.over.send(outcome);
        }
    }
}

/// A running exchange.
pub struct Exchange {
    pub writes: mpsc::Receiver<Outcome>,
    pub reads: mpsc::Receiver<Outcome>,
}

/// Writes `count` messages as `local` and reads `count` from `remote`, `depth` at a time each way.
pub fn exchange(channel: &Channel, local: u64, remote: u64, count: u64, depth: u64) -> Exchange {
    let (out, writes) = Direction::new(local, count);
    let (inc, reads) = Direction::new(remote, count);
    for _ in 0..depth.min(count) {
        read(channel.clone(), Arc::clone(&inc), Vec::new());
        write(channel.clone(), Arc::clone(&out), Vec::new());
    }
    Exchange { writes, reads }
}

fn write(channel: Channel, direction: Arc<Direction>, room: Vec<u8>) {
    let of_order = Arc::clone(&direction);
    let _order = of_order.order.lock().unwrap();
    let Some(number) = direction.begin() else { return };
    let bytes = fill(room, direction.seed, number);
    channel.clone().write(bytes, move |result| {
        direction.called(number, result.as_ref().err());
        if let Ok(body) = result {
            // The buffer came back, so the peer must not see later changes to it.
            let mut bytes = body.into_vec();
            bytes.fill(0xa5);
            write(channel, direction, bytes);
        }
    });
}

fn read(channel: Channel, direction: Arc<Direction>, room: Vec<u8>) {
    let of_order = Arc::clone(&direction);
    let _order = of_order.order.lock().unwrap();
    let Some(number) = direction.begin() else { return };
    channel.clone().read_into(room, move |result| {
        if let Ok(bytes) = &result {
            // The channel catches the panic: the message must not count, so that the outcome never comes.
            assert!(is_right(bytes, direction.seed, number), "message {number}: {} bytes", bytes.len());
        }
        direction.called(number, result.as_ref().err());
        if let Ok(bytes) = result {
            read(channel, direction, bytes);
        }
    });
}
