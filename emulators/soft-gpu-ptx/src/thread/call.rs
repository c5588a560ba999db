//! Calls and returns: a thread's frames.

use super::access::poke;
use super::{Frame, Thread};
use crate::alu::compute;
use crate::bulk::Shared;
use crate::code::{Instruction, blank};
use crate::core::{Core, Fault};
use crate::error::TrapKind;
use crate::program::{BuiltIn, MAX_DEPTH, Program};

/// The most local memory per thread in bytes, as on a GPU.
const MAX_LOCAL: usize = 512 << 10;

impl Thread {
    pub(super) fn enter(&mut self, core: &mut Core<'_>, shared: &Shared, i: &Instruction) -> Result<(), Fault> {
        let program = core.program;
        let caller = &program.functions[self.at.function as usize].body;
        let call = &caller.calls[i.imm as usize];
        let target = match call.target {
            Some(target) => target,
            None => program.called(call, self.slot(i.a)).map_err(|cause| Fault::new(TrapKind::Address, cause))?,
        };
        let callee = &program.functions[target];
        if let Some(built_in) = callee.built_in {
            let arguments: Vec<u64> = call.arguments.iter().map(|&place| self.argument(place)).collect();
            let result = self.built_in(core, shared, built_in, &arguments)?;
            if let Some(&(at, size)) = call.results.first() {
                poke(&mut self.params, u64::from(self.at.params + at), (size * 8) as u8, result);
            }
            self.at.pc += 1;
            return Ok(());
        }
        if self.frames.len() == MAX_DEPTH {
            return Err(Fault::new(
                TrapKind::Recursion,
                format!("the call of {} is {MAX_DEPTH} calls deep: an endless recursion, or one too deep", callee.name),
            ));
        }
        let old = self.at;
        if self.frames.is_empty()
            && let Some(depths) = &mut self.depths
        {
            depths.begin();
        }
        self.frames.push(old);
        let params = self.params.len().next_multiple_of(16);
        self.params.resize(params + callee.body.params as usize, 0xa5);
        for (&(from, size), slot) in call.arguments.iter().zip(&callee.parameters) {
            let (from, to, size) = ((old.params + from) as usize, params + slot.offset as usize, size as usize);
            self.params.copy_within(from..from + size, to);
            if let Some(depths) = &mut self.depths {
                depths.copy(from, to, size);
            }
        }
        let local = self.local.len().next_multiple_of(16);
        if local + callee.body.local as usize > MAX_LOCAL {
            return Err(Fault::new(
                TrapKind::Resources,
                format!("the call of {} needs more local memory than the {MAX_LOCAL} bytes of a thread", callee.name),
            ));
        }
        self.local.resize(local + callee.body.local as usize, 0xa5);
        self.at = Frame {
            function: target as u32,
            pc: 0,
            base: self.slots.len() as u32,
            params: params as u32,
            local: local as u32,
        };
        self.slots.extend_from_slice(&core.templates[target]);
        Ok(())
    }

    /// Returns to the calling function, or gives false if there is none.
    pub(super) fn leave(&mut self, program: &Program) -> bool {
        let Some(caller) = self.frames.pop() else {
            return false;
        };
        let old = std::mem::replace(&mut self.at, caller);
        let body = &program.functions[caller.function as usize].body;
        let call = &body.calls[body.code[caller.pc as usize].imm as usize];
        let mut result = 0;
        for (&(to, size), slot) in call.results.iter().zip(&program.functions[old.function as usize].results) {
            let (from, to, size) = ((old.params + slot.offset) as usize, (caller.params + to) as usize, size as usize);
            self.params.copy_within(from..from + size, to);
            if let Some(depths) = &mut self.depths {
                result = result.max(depths.copy(from, to, size));
            }
        }
        if let Some(depths) = &mut self.depths {
            if self.frames.is_empty() {
                depths.end(result);
            }
            depths.leave(old.base as usize, old.params as usize, old.local as usize);
        }
        self.slots.truncate(old.base as usize);
        self.params.truncate(old.params as usize);
        self.local.truncate(old.local as usize);
        self.at.pc += 1;
        true
    }

    fn built_in(
        &mut self,
        core: &mut Core<'_>,
        shared: &Shared,
        which: BuiltIn,
        arguments: &[u64],
    ) -> Result<u64, Fault> {
        match which {
            BuiltIn::Print => self.print(core, shared, arguments[0], arguments[1]).map(u64::from),
            BuiltIn::FindFirst if arguments[0] == 0 => Ok(0),
            BuiltIn::FindFirst => Ok(u64::from(arguments[0].trailing_zeros()) + 1),
            BuiltIn::Instruction(op, width) => {
                let instruction = Instruction { b: 1, c: 2, ..blank(op, width) };
                Ok(compute(&instruction, |slot| arguments.get(usize::from(slot)).copied().unwrap_or(0)))
            }
            BuiltIn::AssertFail => {
                // A text that can't be read is left out.
                let [text, file, function] =
                    [0, 1, 3].map(|at| self.string(core, shared, arguments[at]).unwrap_or_default());
                let line = arguments[2];
                Err(Fault::new(TrapKind::Trap, format!("the assertion `{text}` failed in {file}:{line}, {function}")))
            }
        }
    }
}
