//! Warp instructions: a lane waits until all lanes in its mask have arrived.

use crate::alu::changed;
use crate::block::Block;
use crate::code::{Instruction, Op, Scope, Shuffle, Vote, low};
use crate::core::{Core, Fault};
use crate::error::TrapKind;
use crate::thread::State;

/// Returns the slot of an instruction's mask.
fn mask_slot(i: &Instruction) -> u16 {
    if matches!(i.op, Op::Shuffle(_)) { i.x } else { i.b }
}

/// Handles thread `index` at a warp instruction.
pub fn meet(block: &mut Block, index: usize, core: &mut Core<'_>, woken: &mut Vec<u32>) -> Result<(), Fault> {
    let wrong = |cause: String| Err(Fault::new(TrapKind::Convergence, cause));
    let first = index / 32 * 32;
    let lanes = block.threads.len().min(first + 32) - first;
    let lane = index - first;
    let i = block.threads[index].instruction(core.program);
    let given = block.threads[index].slot(mask_slot(&i)) as u32;
    // A partial last warp has no lanes beyond the block's last thread.
    let mask = given & (u32::MAX >> (32 - lanes));
    if mask >> lane & 1 == 0 {
        return wrong(format!("lane {lane} is not in its own mask {given:#010x}"));
    }
    let ended = block.ended[first / 32] & mask;
    if ended != 0 {
        return wrong(format!(
            "the mask {given:#010x} has the lanes {ended:#010x}, which have exited; the mask may name only lanes that arrive"
        ));
    }
    block.threads[index].state = State::Warp(mask);
    if matches!(i.op, Op::WarpBarrier) && core.weak.is_some() {
        block.threads[index].buffer().release(core, Scope::Block)?;
    }
    let arrived = |other: &usize| block.threads[first + other].state == State::Warp(mask);
    if !(0..lanes).filter(|other| mask >> other & 1 == 1).all(|other| arrived(&other)) {
        return block.warp_stuck(index as u32 / 32, core);
    }
    let mut all = [0; 32];
    let mut count = 0;
    for other in (0..lanes).filter(|other| mask >> other & 1 == 1) {
        all[count] = other;
        count += 1;
    }
    let members = &all[..count];
    let at = block.threads[index].position();
    for &other in members {
        let thread = &block.threads[first + other];
        let same = thread.position() == at
            || matches!(i.op, Op::WarpBarrier) && matches!(thread.instruction(core.program).op, Op::WarpBarrier);
        if !same {
            let line = core.program.line(thread.position());
            return wrong(format!(
                "lane {other} of the mask {given:#010x} waits at another instruction, in line {line}; all lanes of a mask execute the same one"
            ));
        }
    }
    execute(block, &i, first, members, mask);
    if let Some(observer) = &mut core.observer {
        let site = core.sites[at.0 as usize] + at.1;
        observer.warp(block.place.number(), index as u32 / 32, mask, matches!(i.op, Op::WarpBarrier), site);
    }
    if core.places.is_some() {
        let arrivals = members.iter().filter_map(|lane| block.threads[first + lane].depths.as_ref());
        let depth = arrivals.map(|depths| depths.arrival).max().unwrap_or(0);
        members.iter().for_each(|lane| block.threads[first + lane].meet(depth, &i));
    }
    for &other in members {
        let thread = &mut block.threads[first + other];
        if matches!(i.op, Op::WarpBarrier)
            && let Some(buffer) = &mut thread.buffer
        {
            buffer.acquire(Scope::Block);
        }
        thread.proceed();
        woken.push(thread.index);
    }
    Ok(())
}

fn execute(block: &mut Block, i: &Instruction, first: usize, members: &[usize], mask: u32) {
    let read = |block: &Block, slot: u16| {
        let mut values = [0; 32];
        for (value, &lane) in values.iter_mut().zip(members) {
            *value = block.threads[first + lane].slot(slot);
        }
        values
    };
    let values = read(block, i.a);
    let values = &values[..members.len()];
    match i.op {
        Op::Shuffle(kind) => {
            let (lanes, clamps) = (read(block, i.b), read(block, i.c));
            for (member, &lane) in members.iter().enumerate() {
                let (source, valid) = source(kind, lane as i32, lanes[member] as u32, clamps[member] as u32);
                // The value of a lane outside the mask is undefined.
                let before = (mask & ((1 << source) - 1)).count_ones() as usize;
                let value = if mask >> source & 1 == 1 { values[before] } else { 0xa5a5_a5a5 };
                let thread = &mut block.threads[first + lane];
                thread.set_slot(i.d, value);
                if let Ok(predicate) = u16::try_from(i.imm) {
                    thread.set_slot(predicate, u64::from(valid));
                }
            }
        }
        Op::Vote(vote) => {
            let ballot = members
                .iter()
                .zip(values)
                .filter(|(_, value)| (**value != 0) != (i.imm != 0))
                .fold(0u32, |ballot, (lane, _)| ballot | 1 << lane);
            let result = match vote {
                Vote::All => u32::from(ballot == mask),
                Vote::Any => u32::from(ballot != 0),
                Vote::Uniform => u32::from(ballot == mask || ballot == 0),
                Vote::Ballot => ballot,
                Vote::Count => ballot.count_ones(),
            };
            for &lane in members {
                block.threads[first + lane].set_slot(i.d, u64::from(result));
            }
        }
        Op::Match { all } => {
            let same = values.windows(2).all(|pair| pair[0] == pair[1]);
            for (member, &lane) in members.iter().enumerate() {
                let equal = members
                    .iter()
                    .zip(values)
                    .filter(|(_, value)| **value == values[member])
                    .fold(0u32, |equal, (lane, _)| equal | 1 << lane);
                let thread = &mut block.threads[first + lane];
                let result = if !all {
                    equal
                } else if same {
                    mask
                } else {
                    0
                };
                thread.set_slot(i.d, u64::from(result));
                if all {
                    thread.set_slot(i.x, u64::from(same));
                }
            }
        }
        Op::Elect => {
            for &lane in members {
                let thread = &mut block.threads[first + lane];
                thread.set_slot(i.d, members[0] as u64);
                thread.set_slot(i.x, u64::from(lane == members[0]));
            }
        }
        Op::Reduce { op, signed } => {
            let result =
                values.iter().skip(1).fold(values[0], |all, &value| low(changed(op, all, value, 0, 32, signed), 32));
            for &lane in members {
                block.threads[first + lane].set_slot(i.d, result);
            }
        }
        _ => {}
    }
}

/// Returns the lane that a shuffle takes its value from, and whether it is in range.
fn source(kind: Shuffle, lane: i32, given: u32, clamp: u32) -> (i32, bool) {
    let (step, segment) = ((given & 31) as i32, (clamp >> 8 & 31) as i32);
    let clamp = (clamp & 31) as i32;
    let (least, most) = (lane & segment, lane & segment | clamp & !segment);
    let (source, valid) = match kind {
        Shuffle::Up => (lane - step, lane - step >= most),
        Shuffle::Down => (lane + step, lane + step <= most),
        Shuffle::Butterfly => (lane ^ step, lane ^ step <= most),
        Shuffle::Index => {
            let source = least | step & !segment & 31;
            (source, source <= most)
        }
    };
    (if valid { source } else { lane }, valid)
}
