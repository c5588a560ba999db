//! Parsers and the poller accept arbitrary bytes. The bytes come from a seed; `FERROGIN_ARBITRARY=N` sets the number of
//! rounds.

use ferrogin_test_support::Random;
use ferrogin_test_support::mlx5_memory::Memory;
use mlx5::cq::{CompletionQueue, CqParts, Layout};
use mlx5::device::{Endpoint, Handle};
use mlx5::wire::{FmCeSe, MAX_DS};
use mlx5::wqe::{Data, Limits, Op, Parsed, Transport, WorkRequest, emit, parse};

fn rounds() -> u32 {
    std::env::var("FERROGIN_ARBITRARY").map_or(200_000, |n| n.parse().expect("FERROGIN_ARBITRARY is a number"))
}

fn fill(random: &mut Random, bytes: &mut [u8]) {
    bytes.iter_mut().for_each(|byte| *byte = random.next_u32() as u8);
}

/// Turns the parsed operation into a work request, to emit it.
fn to_work_request<'a>(parsed: &'a Parsed, pieces: &'a mut Vec<&'a [u8]>) -> WorkRequest<'a> {
    let mut data = |data: &'a Data<Vec<_>, Vec<u8>>| match data {
        Data::Sges(sges) => Data::Sges(&sges[..]),
        Data::Inline(bytes) => {
            pieces.push(bytes);
            Data::Inline(())
        }
    };
    macro_rules! with {
        ($d:expr, $make:expr) => {
            match data($d) {
                Data::Sges(sges) => $make(Data::Sges(sges)),
                Data::Inline(()) => $make(Data::Inline(&pieces[..])),
            }
        };
    }
    match *parsed {
        Op::Nop => Op::Nop,
        Op::Send { data: ref d, with } => with!(d, |data| Op::Send { data, with }),
        Op::Datagram { to, data: ref d, imm } => with!(d, |data| Op::Datagram { to, data, imm }),
        Op::Write { remote, data: ref d, imm } => with!(d, |data| Op::Write { remote, data, imm }),
        Op::Read { remote, ref into } => Op::Read { remote, into },
        Op::CompareSwap { remote, compare, swap, into } => Op::CompareSwap { remote, compare, swap, into },
        Op::FetchAdd { remote, add, into } => Op::FetchAdd { remote, add, into },
        Op::Umr { umr, kind } => Op::Umr { umr, kind },
    }
}

/// Every byte string parses as a work request or an error, and a parsed work request round-trips.
#[test]
fn arbitrary_bytes_parse_or_fail() {
    let mut random = Random::new(1);
    let opcodes = [0x00, 0x01, 0x08, 0x09, 0x0a, 0x0b, 0x10, 0x11, 0x12, 0x25];
    let limits = Limits { max_inline: 900, max_sge: MAX_DS as u32 };
    let mut good = 0_u32;
    for round in 0..rounds() {
        let mut bytes = vec![0; random.below(1100) as usize];
        fill(&mut random, &mut bytes);
        if bytes.len() >= 16 && round % 8 != 0 {
            // Mostly plausible bytes: a known operation, a size that fits, lengths with or without the inline bit.
            bytes[0] = 0;
            bytes[3] = opcodes[random.below(opcodes.len() as u32) as usize];
            let most = (bytes.len() / 16).min(MAX_DS) as u32;
            bytes[7] = match random.below(3) {
                0 => [8, 12, 4][random.below(3) as usize],
                _ => 1 + random.below(most) as u8,
            };
            let (mask, inline) = (random.below(2) == 0, random.below(3) == 0);
            for at in [16, 32, 48, 64] {
                if let Some(length) = bytes.get_mut(at..at + 4).filter(|_| mask) {
                    let bits = if inline { random.below(900) | 1 << 31 } else { random.next_u32() >> 1 };
                    length.copy_from_slice(&bits.to_be_bytes());
                }
            }
        }
        for transport in [Transport::Rc, Transport::Ud] {
            let Ok(wqe) = parse(&bytes, transport) else { continue };
            good += 1;
            let mut pieces = Vec::new();
            let post = to_work_request(&wqe.op, &mut pieces);
            let mut out = [0; 16 * MAX_DS];
            let flags = FmCeSe::new(bytes[11]);
            // The parsed work request may exceed a queue's limits; this test only requires that nothing panics.
            let Ok(Some(emitted)) = emit(&post, &limits, wqe.index, wqe.qpn, flags, &mut out) else { continue };
            assert_eq!(parse(emitted, transport), Ok(mlx5::wqe::Wqe { ds: emitted[7], ..wqe.clone() }));
        }
    }
    println!("{good} work requests in {} byte strings", rounds());
    assert!(good > rounds() / 20, "only {good} work requests parsed");
}

/// A card writes arbitrary bytes at arbitrary times: every poll ends and returns at most the requested number of
/// completions.
#[test]
fn polls_of_arbitrary_bytes_end() {
    let mut random = Random::new(2);
    for round in 0..rounds() / 200 {
        let log = random.below(6);
        let (slots, record, arm) = (Memory::new(64 << log), Memory::new(8), Memory::new(8));
        let layout = [Layout::Enhanced, Layout::Plain, Layout::Basic][(round % 3) as usize];
        let start_index = random.next_u32();
        let mut queue = CompletionQueue::new(CqParts {
            slots: slots.slots(),
            record: record.record(0),
            arm_record: record.record(1),
            arm: arm.arm_register(),
            cqn: 1,
            layout,
            start_index,
            keep_alive: Handle::new(()),
        });
        for _ in 0..60 {
            for _ in 0..random.below(1 << log) + 1 {
                let mut bytes = [0; 64];
                fill(&mut random, &mut bytes);
                let slot = random.below(1 << log);
                if random.below(4) != 0 {
                    // Mostly valid in the current lap, and half of the time a block of a legal size.
                    let lap = (queue.consumer().wrapping_add(slot) >> log) as u8;
                    bytes[62] = lap;
                    if random.below(2) == 0 {
                        bytes[63] = (random.below(7) << 4) as u8 | 0x0c | lap & 1;
                        bytes[44..48].copy_from_slice(&random.below(40).to_be_bytes());
                    }
                }
                slots.write(slot as usize * 64, &bytes);
            }
            let (most, before) = (random.below(40), queue.consumer());
            let mut seen = 0;
            let drained = queue.drain(most, |one| {
                seen += 1;
                match one {
                    Ok(entry) => drop((entry.opcode(), entry.to_cqe(), entry.qpn())),
                    Err(failure) => assert!(!failure.to_string().is_empty()),
                }
            });
            match drained {
                Ok(taken) => assert_eq!((taken, queue.consumer().wrapping_sub(before)), (seen, seen)),
                // A corrupt queue returns the same error from every later poll.
                Err(corrupt) => {
                    assert_eq!(seen, 0);
                    assert_eq!(queue.drain(1, |_| panic!("{corrupt}")), Err(corrupt));
                }
            }
            assert!(seen <= most);
        }
    }
}

#[test]
fn endpoints_round_trip() {
    let mut random = Random::new(3);
    for _ in 0..10_000 {
        let mut bytes = [0; Endpoint::SIZE];
        fill(&mut random, &mut bytes);
        if random.below(2) == 0 {
            (bytes[0], bytes[4]) = (0, 0);
        }
        match Endpoint::from_bytes(&bytes) {
            Some(endpoint) => assert_eq!(endpoint.to_bytes(), bytes),
            None => assert!(bytes[0] != 0 || bytes[4] != 0, "a number of more than 24 bits"),
        }
    }
}
