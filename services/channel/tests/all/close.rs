//! What an orderly close promises: the peer gets every message that was written before, whatever happens to the
//! writer's endpoint afterwards.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{LIMIT, Way, libraries, pair, ways};
use ferrogin_channel::ChannelError;
use ferrogin_libfabric::Libfabric;
use ferrogin_test_support::{child, dist, repetitions};

/// How the writer ends.
const ENDS: [End; 4] = [End::Close, End::Drop, End::DropBoth, End::Shutdown];

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// The channel is closed, and then the reactor dropped.
    Close,
    /// The last handle is dropped, and then the reactor shut down.
    Drop,
    /// The last handle is dropped, and then the reactor.
    DropBoth,
    /// The reactor is shut down.
    Shutdown,
}

fn message(round: usize, number: usize) -> Vec<u8> {
    let len = [8, 0, 100, 1, 3000, 20_000][(round + number) % 6];
    (0..len).map(|at| (at * 7 + number) as u8).collect()
}

/// The reader waits for the messages, or reads them once the writer is gone: then there are few, and short ones.
fn close_loses_nothing(way: &Way, rounds: usize) {
    let lost = AtomicUsize::new(0);
    for round in 0..rounds {
        let (end, reads_late) = (ENDS[round % 4], round % 8 >= 4);
        let (here, there, a, b) = pair(&way.config());
        let count = if reads_late { 5 } else { 1 + round * 7 % 60 };
        let reads: Vec<_> = (0..if reads_late { 0 } else { count }).map(|_| b.receive()).collect();
        let len = |number| if reads_late { number * 8 } else { usize::MAX };
        let expected = |number| -> Vec<u8> { message(round, number).into_iter().take(len(number)).collect() };
        for number in 0..count {
            // A write that isn't waited for continues.
            drop(a.send(expected(number)));
        }
        match end {
            End::Close => a.close(LIMIT).wait_for(LIMIT).unwrap(),
            End::Drop | End::DropBoth => drop(a),
            End::Shutdown => {}
        }
        match end {
            End::Close | End::DropBoth => drop(here),
            End::Drop | End::Shutdown => assert!(here.shutdown(LIMIT), "round {round}, {end:?}"),
        }
        let mut reads = reads.into_iter();
        for number in 0..count {
            let read = reads.next().unwrap_or_else(|| b.receive());
            match read.wait_for(LIMIT) {
                Ok(bytes) => assert!(bytes == expected(number), "message {number} of round {round}"),
                Err(error) => {
                    eprintln!("{way}, round {round}, {end:?}: message {number} of {count} is lost: {error}");
                    lost.fetch_add(1, Ordering::Relaxed);
                    break;
                }
            }
        }
        let error = b.receive().wait_for(LIMIT).unwrap_err();
        assert!(matches!(error, ChannelError::Closed { .. }), "{error}");
        drop(there);
    }
    assert_eq!(lost.into_inner(), 0, "rounds with a lost message, over {way}");
}

fn rounds(usual: u64) -> usize {
    repetitions("FERROGIN_CHANNEL_CLOSES", usual, 1000) as usize
}

/// Without libfabric's shm, which crashes if one of two endpoints in a process is closed while messages from it are
/// unread.
#[test]
fn close_loses_no_message() {
    for way in ways("close_loses_no_message").iter().filter(|way| way.provider != "shm") {
        close_loses_nothing(way, rounds(24));
    }
}

/// The card drops what an endpoint has posted and the peer hasn't taken when the endpoint closes, as libfabric's `efa`
/// does.
#[test]
fn close_loses_no_message_on_a_card_that_drops_the_rest() {
    let test = "close_loses_no_message_on_a_card_that_drops_the_rest";
    let Some(dist) = dist(test, &["libsoftefa-fi.so"]) else { return };
    for faults in ["close_drops,delay_us=50..100", "close_drops,delay_us=0..3000,reorder=64"] {
        child::run(test, &[("FI_PROVIDER_PATH", dist.to_str().unwrap()), ("SOFTEFA_FAULTS", faults)], || {
            for lib in libraries(test) {
                close_loses_nothing(&Way::over(&lib, "softefa"), rounds(24));
            }
        });
    }
}

/// The same over libfabric's own provider, on the card's verbs.
#[test]
#[ignore = "make check"]
fn close_loses_no_message_over_efa() {
    let test = "close_loses_no_message_over_efa";
    let (Some(card), Ok(lib)) = (ferrogin_test_support::verbs(test), Libfabric::load(None)) else { return };
    let faults = [("FI_EFA_ENABLE_SHM_TRANSFER", "0"), ("SOFTEFA_FAULTS", "close_drops,delay_us=0..3000,reorder=64")];
    let card: Vec<(&str, &str)> = card.iter().map(|(name, value)| (*name, value.as_str())).chain(faults).collect();
    child::run(test, &card, || close_loses_nothing(&Way::over(&lib, "efa"), rounds(16)));
}
