//! Tells a launch's observer what a thread does.

use crate::block::Block;
use crate::bulk::Shared;
use crate::code::{Atomic, Instruction, Mbarrier, Op, Order, Scope, Space, low};
use crate::core::Core;
use crate::observer::{Access, BulkStart, Does, MbarrierUse, Ordering, Origin, Reach, SourceLine, Who};
use crate::program::Program;
use crate::thread::{Place, Thread, peek};

impl Program {
    /// Returns the number of the first site of each function.
    pub(crate) fn first_sites(&self) -> Vec<u32> {
        let mut next = 0;
        let firsts = self.functions.iter().map(|function| {
            let first = next;
            next += function.body.code.len() as u32;
            first
        });
        firsts.collect()
    }

    /// Returns the functions' names and their modules'.
    pub fn functions(&self) -> impl Iterator<Item = (&str, &str)> {
        self.functions.iter().map(|function| (function.name.as_str(), &*function.module))
    }

    /// Returns where each instruction of the program comes from, by site.
    pub fn origins(&self) -> impl Iterator<Item = Origin> {
        self.functions.iter().enumerate().flat_map(move |(number, function)| {
            (0..function.body.code.len()).map(move |pc| Origin {
                function: number as u32,
                line: function.body.lines.get(pc).copied().unwrap_or(0),
                posts: matches!(
                    function.body.code[pc],
                    Instruction { op: Op::Store { order: Order::Mmio, .. }, width: 64, .. }
                ),
                lines: self.lines_of(number, pc),
            })
        })
    }

    fn lines_of(&self, function: usize, pc: usize) -> Vec<SourceLine> {
        let linked = &self.functions[function];
        let own = self.source((function as u32, pc as u32)).map(|(file, line)| SourceLine { file, line });
        let inlined = linked.body.inlined.get(pc).copied().unwrap_or(0) as usize;
        // The compiler's comment: `file:line:column @[ file:line:column @[ ... ] ]`.
        let outer = linked.inlined.get(inlined).map_or("", |text| text.as_str());
        let outer = outer.split(" @[ ").skip(1).filter_map(|part| {
            let mut fields = part.trim_end_matches([' ', ']']).rsplitn(3, ':').skip(1);
            let line = fields.next()?.parse().ok()?;
            Some(SourceLine { file: linked.file_called(fields.next()?), line })
        });
        own.into_iter().chain(outer).collect()
    }
}

impl From<Scope> for Reach {
    fn from(scope: Scope) -> Self {
        match scope {
            Scope::Block => Self::Block,
            Scope::Gpu => Self::Gpu,
            Scope::System => Self::System,
        }
    }
}

fn ordering(order: Order, scope: Scope) -> Option<Ordering> {
    // A volatile access is a relaxed one of all of the system, and so is one to a card.
    let reach = if matches!(order, Order::Volatile | Order::Mmio) { Reach::System } else { scope.into() };
    (order != Order::Weak).then(|| Ordering { acquires: order.acquires(), releases: order.releases(), reach })
}

impl Place {
    /// Returns the block's number in the grid.
    pub fn number(&self) -> u32 {
        let ([x, y, z], [columns, rows, _]) = (self.ctaid, self.grid);
        (z * rows + y) * columns + x
    }
}

impl Block {
    /// Returns a thread's name for observers.
    pub fn who(&self, index: u32) -> Who {
        Who { block: self.place.number(), thread: index }
    }
}

/// What is known before an instruction is executed, and reported after it.
pub(crate) struct Watched {
    shared: bool,
    address: u64,
    phase: u32,
}

impl Thread {
    /// Tells the observer what the instruction is about to do; what only its result tells comes with
    /// [`Self::observe_after`].
    #[cold]
    pub(crate) fn observe(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        place: &Place,
        i: &Instruction,
    ) -> Option<Watched> {
        let observer = core.observer.take()?;
        let who = Who { block: place.number(), thread: self.index };
        let (function, pc) = self.position();
        let site = core.sites[function as usize] + pc;
        let address = self.slot(i.a).wrapping_add_signed(i64::from(i.imm));
        let mut watched = None;
        match i.op {
            Op::Load { space, .. } => {
                let (space, address) = self.locate(space, address);
                let shared = space == Space::Shared;
                watched = (shared || space == Space::Global).then_some(Watched { shared, address, phase: 0 });
            }
            Op::Store { space, order, scope, count } => {
                let (space, address) = self.locate(space, address);
                if matches!(space, Space::Shared | Space::Global) {
                    let bytes = u32::from(i.width / 8);
                    let mut changes = false;
                    for (number, slot) in [i.d, i.b, i.c, i.x].into_iter().enumerate().take(usize::from(count)) {
                        let at = address.wrapping_add(number as u64 * u64::from(bytes));
                        changes |= self.old(core, shared, space, at, i.width) != Some(low(self.slot(slot), i.width));
                    }
                    observer.access(
                        who,
                        &Access {
                            site,
                            shared: space == Space::Shared,
                            address,
                            bytes: bytes * u32::from(count),
                            does: Does::Store,
                            ordering: ordering(order, scope),
                            mmio: order == Order::Mmio,
                            value: low(self.slot(i.d), i.width),
                            changes,
                        },
                    );
                }
            }
            Op::Atomic { op, space, order, scope, signed } => {
                let (space, address) = self.locate(space, address);
                if matches!(space, Space::Shared | Space::Global) {
                    let old = self.old(core, shared, space, address, i.width).unwrap_or(0);
                    let new =
                        low(crate::alu::changed(op, old, self.slot(i.b), self.slot(i.c), i.width, signed), i.width);
                    // A compare-exchange that fails writes nothing.
                    let fails = op == Atomic::CompareExchange && old != low(self.slot(i.b), i.width);
                    observer.access(
                        who,
                        &Access {
                            site,
                            shared: space == Space::Shared,
                            address,
                            bytes: u32::from(i.width / 8),
                            does: if fails { Does::Load } else { Does::Update },
                            ordering: ordering(order.max(Order::Relaxed), scope),
                            mmio: false,
                            value: old,
                            changes: new != old,
                        },
                    );
                }
            }
            Op::Fence { order, scope } => {
                if let Some(ordering) = ordering(order, scope) {
                    observer.fence(who, site, ordering);
                }
            }
            Op::ProxyFence { shared: true, .. } => observer.proxy_fence(who),
            Op::Mbarrier { space, .. } => {
                let (_, address) = self.locate(space, address);
                watched = Some(Watched { shared: true, address, phase: 0 });
            }
            Op::Bulk { to_shared: true } => {
                let (_, address) = self.locate(Space::Shared, self.slot(i.x));
                let phase = shared.mbarriers.phase(address as u32);
                watched = Some(Watched { shared: true, address, phase });
            }
            Op::Bulk { .. } | Op::BulkWait { .. } => watched = Some(Watched { shared: true, address: 0, phase: 0 }),
            Op::Call => {
                let call = &core.program.functions[function as usize].body.calls[i.imm as usize];
                let arguments: Vec<u64> = call.arguments.iter().map(|&place| self.argument(place)).collect();
                // A call to what is no function's address is a fault.
                let target = call.target.or_else(|| core.program.called(call, self.slot(i.a)).ok());
                if let Some(target) = target {
                    observer.call(who, site, target as u32, &arguments);
                }
            }
            Op::Return => observer.leave(who, function),
            _ => {}
        }
        core.observer = Some(observer);
        watched
    }

    /// Returns what an aligned word has now.
    fn old(&self, core: &mut Core<'_>, shared: &Shared, space: Space, address: u64, width: u8) -> Option<u64> {
        match space {
            Space::Shared => peek(&shared.bytes, address, width),
            _ => core.view.load(address, width).ok(),
        }
    }

    /// Tells the observer what an instruction has done.
    #[cold]
    pub(crate) fn observe_after(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        place: &Place,
        i: &Instruction,
        watched: &Watched,
    ) {
        let Some(observer) = core.observer.take() else { return };
        let who = Who { block: place.number(), thread: self.index };
        let (function, pc) = self.position();
        let site = core.sites[function as usize] + pc;
        let at = watched.address as u32;
        match i.op {
            Op::Load { order, scope, count, .. } => observer.access(
                who,
                &Access {
                    site,
                    shared: watched.shared,
                    address: watched.address,
                    bytes: u32::from(i.width / 8) * u32::from(count),
                    does: Does::Load,
                    ordering: ordering(order, scope),
                    mmio: order == Order::Mmio,
                    value: self.slot(i.d),
                    changes: false,
                },
            ),
            Op::Mbarrier { op, order, .. } => {
                let phase = shared.mbarriers.phase(at);
                let usage = match op {
                    Mbarrier::Init | Mbarrier::Invalidate => Some(MbarrierUse::Reset),
                    Mbarrier::Expect => Some(MbarrierUse::Arrived { releases: false }),
                    Mbarrier::Arrive { .. } => Some(MbarrierUse::Arrived { releases: order.releases() }),
                    Mbarrier::Wait { .. } => {
                        (self.slot(i.d) != 0).then_some(MbarrierUse::Passed { acquires: order.acquires() })
                    }
                };
                if let Some(usage) = usage {
                    observer.mbarrier(who, site, at, phase, usage);
                }
            }
            Op::Bulk { to_shared } => {
                let (inside, global) = if to_shared { (i.a, i.b) } else { (i.b, i.a) };
                let start = BulkStart {
                    site,
                    to_shared,
                    shared: self.locate(Space::Shared, self.slot(inside)).1 as u32,
                    global: self.slot(global),
                    bytes: self.slot(i.c) as u32,
                    mbarrier: at,
                    sees_mbarrier: shared.mbarriers.get(at, &shared.bytes).is_ok_and(|one| one.fenced),
                    group: self.group(),
                };
                observer.bulk(who, &start, (watched.phase, shared.mbarriers.phase(at)));
            }
            Op::BulkWait { read } => observer.bulk_wait(who, self.group().saturating_sub(i.imm as u32), read),
            _ => {}
        }
        core.observer = Some(observer);
    }
}
