//! Tests of a signal's two forms, and of routes, refusals and receives.

use ferrogin_ffi::signals::*;
use proptest::prelude::*;

fn generation(n: u16) -> Generation {
    Generation::new(n.into())
}

fn signals() -> impl Strategy<Value = Signal> {
    let target = prop_oneof![
        (0..2 * Immediate::MAX_SIGNALS).prop_map(Target::Indexed),
        (any::<u32>(), any::<u64>()).prop_map(|(rkey, address)| Target::Va { rkey, address }),
    ];
    let add = prop_oneof![1..=2 * Immediate::MAX_ADD, any::<u64>()];
    (target, add).prop_map(|(target, add)| Signal { target, add })
}

proptest! {
    #[test]
    fn every_immediate_is_one_signal(bits: u32, n: u16) {
        let word = Immediate::from_bits(bits);
        let again = Immediate::new(word.signal(), Generation::new((bits >> 28).into()));
        prop_assert_eq!(again, Some(word));
        prop_assert_eq!(word.is_of(generation(n)), bits >> 28 == u32::from(n % 16));
    }

    #[test]
    fn immediate_holds_what_fits_and_nothing_else(signal in signals(), n: u16) {
        let fits = matches!(signal.target, Target::Indexed(index) if index < Immediate::MAX_SIGNALS) && (1..=Immediate::MAX_ADD).contains(&signal.add);
        let word = Immediate::new(signal, generation(n));
        prop_assert_eq!(word.is_some(), fits);
        prop_assert_eq!(word.map_or(signal, Immediate::signal), signal);
    }

    #[test]
    fn message_survives_its_bytes(signal in signals(), n: u16, rank: u32) {
        let message = Message { signal, generation: generation(n), rank };
        prop_assert_eq!(Message::from_bytes(&message.to_bytes()), Ok(message));
    }

    #[test]
    fn bytes_that_are_a_message_are_its_bytes(mut bytes in proptest::collection::vec(any::<u8>(), 30..34), kind in 0..4u8, clear: bool) {
        bytes[..2].copy_from_slice(&[kind, 1]);
        if clear {
            bytes[28..].fill(0);
        }
        if let Ok(message) = Message::from_bytes(&bytes) {
            prop_assert_eq!(&message.to_bytes()[..], &bytes[..]);
        }
    }

    #[test]
    fn receiver_applies_what_a_sender_may_send(signal in signals(), n_signals in 0..2 * Immediate::MAX_SIGNALS, strong: bool, has_put: bool, n: u16, start: u64, bytes: u64) {
        let (generation, rank) = (generation(n), 2);
        let receiver = Receiver { generation, n_signals, nranks: 4 };
        let strength = if strong { Strength::Strong } else { Strength::Weak };
        let window = Region { start, bytes };
        let received = match (Sender { generation, n_signals, rank }).route(signal, strength, has_put) {
            Ok(Some(Route::WithPut(word) | Route::Alone(Vehicle::Write(word)) | Route::AfterCompletion(Vehicle::Write(word)))) => {
                receiver.immediate(word.bits())
            }
            Ok(Some(Route::Alone(Vehicle::Send(message)) | Route::AfterCompletion(Vehicle::Send(message)))) => {
                receiver.message(&message.to_bytes(), |_| Some(window))
            }
            Ok(None) => return Ok(()),
            Err(refusal) => Err(refusal),
        };
        let expected = match signal.target {
            Target::Indexed(signal) if signal >= n_signals => Err(Refusal::Signal { signal, n_signals }),
            Target::Va { address, .. } if address % 8 != 0 => Err(Refusal::Misaligned { address }),
            Target::Va { address, .. }
                if address < start || u128::from(address) + 8 > u128::from(start) + u128::from(bytes) =>
            {
                Err(Refusal::Outside { address, window })
            }
            _ => Ok(signal),
        };
        prop_assert_eq!(received, expected);
    }

    #[test]
    fn receives_are_never_exhausted_by_the_proxy(depth in 1..300u32, batch in 0..400u32, takes in proptest::collection::vec((any::<u8>(), any::<bool>()), 1..100)) {
        let mut receives = Receives::new(depth, batch);
        prop_assert_eq!(receives.refill(false), depth);
        for (n, idle) in takes {
            for _ in 0..n {
                let posted = receives.posted();
                prop_assert_eq!(receives.take(), posted > 0);
            }
            let before = receives.posted();
            let refilled = receives.refill(idle);
            prop_assert_eq!(receives.posted(), before + refilled);
            prop_assert!(receives.posted() <= depth && receives.posted() >= depth.div_ceil(2));
            prop_assert!(!idle || receives.posted() == depth);
        }
    }
}

#[test]
fn routes_wait_for_what_the_signal_covers() {
    let sender = Sender { generation: generation(9), n_signals: 8, rank: 1 };
    let small = Signal { target: Target::Indexed(7), add: Immediate::MAX_ADD };
    let large = Signal { add: Immediate::MAX_ADD + 1, ..small };
    let va = Signal { target: Target::Va { rkey: 3, address: 40 }, add: 1 };
    let word = Immediate::new(small, sender.generation).unwrap();
    let send = |signal| Vehicle::Send(Message { signal, generation: sender.generation, rank: 1 });
    for has_put in [true, false] {
        assert_eq!(sender.route(small, Strength::Weak, has_put), Ok(Some(Route::WithPut(word))));
        let strong = Route::AfterCompletion(Vehicle::Write(word));
        assert_eq!(sender.route(small, Strength::Strong, has_put), Ok(Some(strong)));
        for signal in [large, va] {
            assert_eq!(sender.route(signal, Strength::Strong, has_put), Ok(Some(Route::AfterCompletion(send(signal)))));
            let weak = if has_put { Route::AfterCompletion(send(signal)) } else { Route::Alone(send(signal)) };
            assert_eq!(sender.route(signal, Strength::Weak, has_put), Ok(Some(weak)));
        }
        assert_eq!(sender.route(Signal { add: 0, ..va }, Strength::Strong, has_put), Ok(None));
    }
}

#[test]
fn messages_of_others_are_refused() {
    let receiver = Receiver { generation: generation(9), n_signals: 8, nranks: 4 };
    let signal = Signal { target: Target::Va { rkey: 3, address: 0x1008 }, add: 1 };
    let message = Message { signal, generation: generation(9), rank: 3 };
    let window = Region { start: 0x1000, bytes: 16 };
    let windows = |rkey| (rkey == 3).then_some(window);
    let read = |message: Message| receiver.message(&message.to_bytes(), windows);
    assert_eq!(read(message), Ok(signal));
    assert_eq!(read(Message { generation: generation(10), ..message }), Err(Refusal::Stale));
    assert_eq!(read(Message { rank: 4, ..message }), Err(Refusal::Rank { rank: 4 }));
    let to =
        |rkey, address| read(Message { signal: Signal { target: Target::Va { rkey, address }, add: 1 }, ..message });
    assert_eq!(to(2, 0x1008), Err(Refusal::Window { rkey: 2 }));
    for address in [0, 0xff8, 0x1010, u64::MAX - 7] {
        assert_eq!(to(3, address), Err(Refusal::Outside { address, window }));
    }
    assert_eq!(to(3, 0x1004), Err(Refusal::Misaligned { address: 0x1004 }));
    for (at, value) in [(0, 3), (1, 2), (28, 1)] {
        let mut bytes = message.to_bytes();
        bytes[at] = value;
        assert_eq!(receiver.message(&bytes, windows), Err(Refusal::Malformed), "byte {at}");
    }
    assert_eq!(receiver.message(&[0; 31], windows), Err(Refusal::Malformed));
    let stale = Immediate::new(Signal { target: Target::Indexed(1), add: 1 }, generation(8)).unwrap();
    assert_eq!(receiver.immediate(stale.bits()), Err(Refusal::Stale));
}
