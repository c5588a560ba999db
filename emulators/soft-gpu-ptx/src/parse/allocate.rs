//! Gives registers that are never needed at the same time one slot, so that a thread's frame stays in the cache.

use crate::code::{ALWAYS, Body, Instruction, Mbarrier, Op, Space};

/// What an instruction does with a slot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Reads,
    Writes,
}

/// Calls `visit` for each slot of an instruction. Slots that it doesn't have are 0.
fn each(i: &mut Instruction, mut visit: impl FnMut(&mut u16, Use)) {
    use Use::{Reads, Writes};
    if i.guard != ALWAYS {
        visit(&mut i.guard, Reads);
    }
    // What the instruction does with `d`, `a`, `b`, `c` and `x`.
    let (d, a, b, c, x) = match i.op {
        Op::Setp { .. } | Op::Unpack | Op::MovPair | Op::Match { .. } | Op::Elect => {
            (Writes, Reads, Reads, Reads, Writes)
        }
        Op::Load { .. } => (Writes, Reads, Writes, Writes, Writes),
        Op::Store { .. }
        | Op::Bulk { .. }
        | Op::BulkCommit
        | Op::BulkWait { .. }
        | Op::Mbarrier { op: Mbarrier::Init | Mbarrier::Invalidate | Mbarrier::Expect, .. }
        | Op::MbarrierFence
        | Op::ProxyFence { .. }
        | Op::Fence { .. }
        | Op::Barrier { reduce: None, .. }
        | Op::WarpBarrier
        | Op::Branch
        | Op::BranchTable
        | Op::Call
        | Op::Return
        | Op::Exit
        | Op::Trap
        | Op::Nanosleep
        | Op::Nothing => (Reads, Reads, Reads, Reads, Reads),
        _ => (Writes, Reads, Reads, Reads, Reads),
    };
    visit(&mut i.a, a);
    if i.b != ALWAYS {
        visit(&mut i.b, b);
    }
    visit(&mut i.c, c);
    visit(&mut i.x, x);
    visit(&mut i.d, d);
    if let (Op::Shuffle(_), Ok(mut predicate)) = (i.op, u16::try_from(i.imm)) {
        visit(&mut predicate, Writes);
        i.imm = i32::from(predicate);
    }
}

/// A set of slots.
#[derive(Clone, PartialEq)]
struct Set(Vec<u64>);

impl Set {
    fn new(slots: usize) -> Self {
        Self(vec![0; slots.div_ceil(64)])
    }

    fn add(&mut self, slot: u16) {
        self.0[usize::from(slot) / 64] |= 1 << (slot % 64);
    }

    fn remove(&mut self, slot: u16) {
        self.0[usize::from(slot) / 64] &= !(1 << (slot % 64));
    }

    fn has(&self, slot: u16) -> bool {
        self.0[usize::from(slot) / 64] >> (slot % 64) & 1 == 1
    }

    fn iter(&self) -> impl Iterator<Item = usize> {
        let bits = |(at, word): (usize, &u64)| {
            let word = *word;
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| 64 * at + bit)
        };
        self.0.iter().enumerate().filter(|(_, word)| **word != 0).flat_map(bits)
    }
}

/// Instructions that run one after the other.
struct Block {
    first: usize,
    end: usize,
    next: Vec<usize>,
    /// The slots whose values at the beginning are needed.
    needed: Set,
}

/// Splits the code into blocks.
fn blocks(body: &Body) -> Vec<Block> {
    let code = &body.code;
    let targets = |i: &Instruction| match i.op {
        Op::Branch => vec![i.imm as usize],
        Op::BranchTable => body.tables[i.imm as usize].iter().map(|&target| target as usize).collect(),
        _ => Vec::new(),
    };
    let ends = |i: &Instruction| matches!(i.op, Op::Branch | Op::BranchTable | Op::Return | Op::Exit | Op::Trap);
    let mut begins = vec![false; code.len() + 1];
    begins[0] = true;
    for (at, i) in code.iter().enumerate().filter(|(_, i)| ends(i)) {
        begins[at + 1] = true;
        targets(i).into_iter().for_each(|target| begins[target] = true);
    }
    let firsts: Vec<usize> = (0..code.len()).filter(|&at| begins[at]).collect();
    let number = |at: usize| firsts.partition_point(|&first| first < at);
    let block = |at: usize| {
        let (first, end) = (firsts[at], firsts.get(at + 1).copied().unwrap_or(code.len()));
        let last = &code[end - 1];
        let mut next: Vec<usize> = targets(last).into_iter().map(number).collect();
        if end < code.len() && (!ends(last) || last.guard != ALWAYS) {
            next.push(at + 1);
        }
        Block { first, end, next, needed: Set::new(body.slots.len()) }
    };
    (0..firsts.len()).map(block).collect()
}

/// Steps back over an instruction: from the slots needed after it to those needed before it.
fn before(i: &Instruction, needed: &mut Set) {
    let mut copy = *i;
    // A guarded instruction may leave the old value.
    if i.guard == ALWAYS {
        each(&mut copy, |slot, what| {
            if what == Use::Writes {
                needed.remove(*slot);
            }
        });
    }
    each(&mut copy, |slot, what| {
        if what == Use::Reads {
            needed.add(*slot);
        }
    });
}

/// Whether the result may arrive late under weak memory. Another use of its slot would hasten it.
fn may_be_late(op: Op) -> bool {
    let space = match op {
        Op::Load { space, count: 1, .. } | Op::Atomic { space, .. } => space,
        _ => return false,
    };
    matches!(space, Space::Generic | Space::Global | Space::Constant)
}

/// Numbers the slots of a body anew.
pub fn allocate(body: &mut Body) {
    let slots = body.slots.len();
    if body.code.is_empty() || slots == 0 {
        return;
    }
    let mut blocks = blocks(body);
    let after = |blocks: &[Block], at: usize| {
        let mut needed = Set::new(slots);
        for &next in &blocks[at].next {
            needed.0.iter_mut().zip(&blocks[next].needed.0).for_each(|(all, more)| *all |= more);
        }
        needed
    };
    let mut changed = true;
    while changed {
        changed = false;
        for at in (0..blocks.len()).rev() {
            let mut needed = after(&blocks, at);
            for i in body.code[blocks[at].first..blocks[at].end].iter().rev() {
                before(i, &mut needed);
            }
            changed |= needed != blocks[at].needed;
            blocks[at].needed = needed;
        }
    }
    // The first and last instruction at which each slot's value matters.
    let mut spans = vec![(usize::MAX, 0); slots];
    let mut cover = |slot: usize, at: usize| spans[slot] = (spans[slot].0.min(at), spans[slot].1.max(at));
    let (mut written, mut late) = (Set::new(slots), Set::new(slots));
    for (number, block) in blocks.iter().enumerate() {
        block.needed.iter().for_each(|slot| cover(slot, block.first));
        after(&blocks, number).iter().for_each(|slot| cover(slot, block.end - 1));
        for at in block.first..block.end {
            let mut copy = body.code[at];
            each(&mut copy, |slot, what| {
                cover(usize::from(*slot), at);
                if what == Use::Writes {
                    written.add(*slot);
                    if may_be_late(body.code[at].op) {
                        late.add(*slot);
                    }
                }
            });
        }
    }
    // Slot 0 stands for operands that an instruction doesn't have; constants and uninitialized registers keep their
    // initial values.
    let fixed = |slot: usize| {
        let number = slot as u16;
        slot == 0 || !written.has(number) || blocks[0].needed.has(number) || late.has(number)
    };
    let mut new = vec![0u16; slots];
    let mut initial = vec![body.slots[0]];
    let mut order: Vec<usize> = (0..slots).filter(|&slot| !fixed(slot)).collect();
    order.sort_by_key(|&slot| spans[slot]);
    let mut running: Vec<(usize, u16)> = Vec::new();
    let mut free = Vec::new();
    for slot in order {
        let (first, last) = spans[slot];
        running.retain(|&(end, number)| {
            if end < first {
                free.push(number);
            }
            end >= first
        });
        new[slot] = free.pop().unwrap_or_else(|| {
            initial.push(body.slots[slot]);
            (initial.len() - 1) as u16
        });
        running.push((last, new[slot]));
    }
    for slot in (1..slots).filter(|&slot| fixed(slot)) {
        new[slot] = initial.len() as u16;
        initial.push(body.slots[slot]);
    }
    for i in &mut body.code {
        each(i, |slot, _| *slot = new[usize::from(*slot)]);
    }
    for relocation in &mut body.relocations {
        relocation.slot = new[usize::from(relocation.slot)];
    }
    body.slots = initial;
}

#[cfg(test)]
mod tests {
    use crate::module::Module;

    #[test]
    fn registers_that_are_needed_one_after_the_other_share_slots() {
        let mut text = String::from(
            ".version 8.2\n.target sm_70\n.address_size 64\n.func f() {\n.reg .b32 %r<64>;\nmov.u32 %r0, 1;\n",
        );
        for number in 1..64 {
            text += &format!("add.u32 %r{number}, %r{}, 1;\n", number - 1);
        }
        let module = Module::parse("test", &(text + "ret; }\n")).unwrap_or_else(|error| panic!("{error}"));
        // %r0 and the constant have slots of their own, and the others take turns.
        let slots = module.functions[0].body.as_ref().map(|body| body.slots.len());
        assert_eq!(slots, Some(4));
    }
}
