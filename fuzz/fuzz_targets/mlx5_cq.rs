//! A card writes arbitrary bytes into a completion queue at arbitrary times: every poll ends and returns at most the requested number
//! of completions, and a corrupt queue stays corrupt.
#![no_main]

use mlx5::cq::{CompletionQueue, CqParts, Slots};
use mlx5::device::Handle;
use mlx5::mmio::{ArmRegister, DoorbellRecord};
use mlx5::wire::Cqe;
use std::ptr::NonNull;

/// Slots, record and arm register, aligned as a device aligns them.
#[repr(C, align(64))]
struct Memory {
    slots: [[u8; 64]; 32],
    record: [u32; 2],
    arm: u64,
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Some((&[mode, lap], mut rest)) = data.split_first_chunk::<2>() else { return };
    let log = u32::from(mode >> 1) % 6;
    let memory = Box::into_raw(Box::new(Memory { slots: [[0; 64]; 32], record: [0; 2], arm: 0 }));
    let start_index = u32::from(lap) << 24 | u32::from(lap);
    // SAFETY: fields of a box that is freed below, after the queue.
    let (slots, first, second, arm) = unsafe {
        (&raw mut (*memory).slots, &raw mut (*memory).record[0], &raw mut (*memory).record[1], &raw mut (*memory).arm)
    };
    fn field<T>(at: *mut T) -> NonNull<T> {
        NonNull::new(at).expect("a field has an address")
    }
    // SAFETY: aligned, mapped, and used by this queue alone.
    let (slots_part, record, arm_record, arm) = unsafe {
        (
            Slots::new(field(slots).cast::<Cqe>(), log),
            DoorbellRecord::new(field(first)),
            DoorbellRecord::new(field(second)),
            ArmRegister::new(field(arm)),
        )
    };
    let mut queue = CompletionQueue::new(CqParts {
        slots: slots_part,
        record,
        arm_record,
        arm,
        cqn: 1,
        compression: mode & 1 != 0,
        start_index,
        keep_alive: Handle::new(()),
    });
    // Each step writes the bytes of a slot, with or without a valid lap mark in byte 62, or polls.
    while let Some((&[step, slot], after)) = rest.split_first_chunk::<2>() {
        rest = after;
        if step & 3 != 0 {
            let Some((bytes, after)) = rest.split_first_chunk::<64>() else { break };
            rest = after;
            let mut bytes = *bytes;
            let slot = u32::from(slot) % (1 << log);
            if step & 4 != 0 {
                bytes[62] = (queue.consumer().wrapping_add(u32::from(step >> 5)) >> log) as u8;
            }
            // SAFETY: inside the box; the queue reads through pointers too.
            unsafe { (&raw mut (*slots)[slot as usize]).write_volatile(bytes) };
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
    drop(queue);
    // SAFETY: from the box above; nothing uses it any more.
    drop(unsafe { Box::from_raw(memory) });
});
