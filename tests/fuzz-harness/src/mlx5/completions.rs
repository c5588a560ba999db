//! Arbitrary bytes in a completion queue.

use mlx5::cq::{CompletionQueue, CqParts, Layout};
use mlx5::device::Handle;
use mlx5::wire::Cqe;
use zerocopy::transmute_ref;

use soft_mlx5::fuzzing::{ARM, ARM_REGISTER, CONSUMER, RING, Shared};

/// A card writes arbitrary bytes into a completion queue at arbitrary times: every poll returns, with no more
/// completions than requested, and a corrupt queue stays corrupt.
///
/// # Panics
/// If one of these rules is broken.
pub fn completions(data: &[u8]) {
    let Some((&[mode, lap], mut rest)) = data.split_first_chunk::<2>() else { return };
    let log = u32::from(mode >> 1) % 6;
    let memory = Shared::new(RING + (size_of::<Cqe>() << log)).expect("memory");
    let start_index = u32::from(lap) << 24 | u32::from(lap);
    let mut queue = CompletionQueue::new(CqParts {
        slots: memory.slots(RING, log),
        record: memory.driver_record(CONSUMER),
        arm_record: memory.driver_record(ARM),
        arm: memory.arm_register(ARM_REGISTER),
        cqn: 1,
        layout: [Layout::Plain, Layout::Enhanced, Layout::Basic][usize::from(mode & 1) << usize::from(mode >> 7)],
        start_index,
        keep_alive: Handle::new(()),
    });
    let mut card = memory.completions(RING, log, CONSUMER);
    // Each step polls, or writes a slot's bytes, with or without a valid lap mark in byte 62.
    while let Some((&[step, slot], after)) = rest.split_first_chunk::<2>() {
        rest = after;
        if step & 3 != 0 {
            let Some((bytes, after)) = rest.split_first_chunk::<64>() else { break };
            rest = after;
            let mut bytes = *bytes;
            if step & 4 != 0 {
                bytes[62] = (queue.consumer().wrapping_add(u32::from(step >> 5)) >> log) as u8;
            }
            card.write(u32::from(slot), transmute_ref!(&bytes));
            continue;
        }
        let (most, before) = (u32::from(slot), queue.consumer());
        let mut seen = 0;
        match queue.drain(most, |one| {
            seen += 1;
            match one {
                Ok(entry) => drop((entry.opcode(), entry.qpn(), entry.to_cqe())),
                Err(failure) => drop(failure.to_string()),
            }
        }) {
            Ok(taken) => assert!(taken == seen && taken <= most && queue.consumer().wrapping_sub(before) == taken),
            Err(corrupt) => {
                assert_eq!(seen, 0);
                assert!(matches!(queue.poll(), Err(again) if again == corrupt));
            }
        }
    }
}
