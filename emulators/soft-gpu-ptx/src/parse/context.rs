//! The function whose body is being parsed: its names and slots.

use super::parser::Parser;
use crate::code::{Body, Relocation, Symbol};
use crate::error::{Error, Kind};
use crate::module::Slot;
use std::collections::HashMap;

/// What a name in a function refers to.
#[derive(Clone, Copy, Debug)]
pub enum Local {
    Register {
        slot: u16,
        width: u8,
    },
    /// An offset from the frame's parameters.
    Param(Slot),
    /// An offset from the frame's local memory.
    Stack(u32),
    Variable(usize),
}

/// What an indirect call passes and gets back.
#[derive(Clone, Default)]
pub struct Prototype {
    pub parameters: Vec<Slot>,
    pub results: Vec<Slot>,
}

/// The names in one block of a function's body.
#[derive(Default)]
pub struct Names<'a> {
    pub names: HashMap<&'a str, Local>,
    /// `%r<9>`: prefix, first slot, count, width.
    pub ranges: Vec<(&'a str, u16, u32, u8)>,
    pub labels: HashMap<&'a str, u32>,
    pub tables: HashMap<&'a str, usize>,
    pub prototypes: HashMap<&'a str, Prototype>,
    pub parent: usize,
}

/// The function whose body is being parsed.
pub struct Context<'a> {
    pub body: Body,
    pub scopes: Vec<Names<'a>>,
    pub scope: usize,
    constants: HashMap<u64, u16>,
    addresses: HashMap<(Symbol, i64, u8), u16>,
    /// The file number and line of the last `.loc`; line 0 if there was none.
    pub source: (u32, u32),
    /// Where the last `.loc` is inlined: an index among the module's texts, or 0.
    pub inlined: u32,
    /// Each branch's instruction, scope and label.
    pub branches: Vec<(usize, usize, &'a str)>,
    /// Each branch table entry's table, index, scope, label and line.
    pub entries: Vec<(usize, usize, usize, &'a str, u32)>,
    /// For each use of a branch table: instruction, scope and the table's name.
    pub uses: Vec<(usize, usize, &'a str)>,
}

impl<'a> Context<'a> {
    /// Makes the context of a body whose parameters and results, `named`, take `params` bytes.
    pub fn new(params: u32, named: impl Iterator<Item = (&'a str, Slot)>) -> Self {
        let names = named.map(|(name, slot)| (name, Local::Param(slot))).collect();
        Self {
            body: Body { params, ..Body::default() },
            scopes: vec![Names { names, ..Names::default() }],
            scope: 0,
            constants: HashMap::new(),
            addresses: HashMap::new(),
            source: (0, 0),
            inlined: 0,
            branches: Vec::new(),
            entries: Vec::new(),
            uses: Vec::new(),
        }
    }

    /// Looks up a name in the current scope.
    pub fn find(&self, name: &str) -> Option<Local> {
        let digits = name.len() - name.bytes().rev().take_while(u8::is_ascii_digit).count();
        let number = name[digits..].parse::<u32>().ok();
        let mut scope = self.scope;
        loop {
            let names = &self.scopes[scope];
            if let Some(&found) = names.names.get(name) {
                return Some(found);
            }
            if let Some(number) = number {
                let range = names.ranges.iter().find(|range| range.0 == &name[..digits] && number < range.2);
                if let Some(&(_, first, _, width)) = range {
                    return Some(Local::Register { slot: first + (number * slots_of(width)) as u16, width });
                }
            }
            if scope == 0 {
                return None;
            }
            scope = names.parent;
        }
    }

    pub fn label(&self, mut scope: usize, label: &str) -> Option<u32> {
        loop {
            if let Some(&target) = self.scopes[scope].labels.get(label) {
                return Some(target);
            }
            if scope == 0 {
                return None;
            }
            scope = self.scopes[scope].parent;
        }
    }

    pub fn prototype(&self, name: &str) -> Option<&Prototype> {
        let mut scope = self.scope;
        loop {
            let names = &self.scopes[scope];
            if let Some(found) = names.prototypes.get(name) {
                return Some(found);
            }
            if scope == 0 {
                return None;
            }
            scope = names.parent;
        }
    }

    /// Records that the next instruction branches to `label`.
    pub fn branch(&mut self, label: &'a str) {
        self.branches.push((self.body.code.len(), self.scope, label));
    }

    /// Records that the next instruction branches through the table `name`.
    pub fn branch_table(&mut self, name: &'a str) {
        self.uses.push((self.body.code.len(), self.scope, name));
    }
}

/// Returns how many slots a register of this width has.
fn slots_of(width: u8) -> u32 {
    u32::from(width.div_ceil(64))
}

impl<'a> Parser<'a> {
    pub fn slots(&self, context: &mut Context<'a>, count: u32, width: u8, line: u32) -> Result<u16, Error> {
        let first = context.body.slots.len();
        let count = count * slots_of(width);
        // `ALWAYS`, which means that there is no guard, must not be a slot's number.
        if first + count as usize > usize::from(u16::MAX) - 1 {
            return Err(self.error(Kind::Limit, line, ".reg", "a function has at most 65534 registers and constants"));
        }
        // An uninitialized register holds a value that no program expects.
        let poison = 0xa5a5_a5a5_a5a5_a5a5 & (u64::MAX >> (64 - u32::from(width.min(64))));
        context.body.slots.resize(first + count as usize, poison);
        Ok(first as u16)
    }

    pub fn temporary(&self, context: &mut Context<'a>, line: u32) -> Result<u16, Error> {
        self.slots(context, 1, 64, line)
    }

    /// Returns the slot of a constant.
    pub fn constant(&self, context: &mut Context<'a>, value: u64, line: u32) -> Result<u16, Error> {
        if let Some(&slot) = context.constants.get(&value) {
            return Ok(slot);
        }
        let slot = self.slots(context, 1, 64, line)?;
        context.body.slots[usize::from(slot)] = value;
        context.constants.insert(value, slot);
        Ok(slot)
    }

    /// Returns the slot of a variable's or a function's address.
    pub fn address(
        &self,
        context: &mut Context<'a>,
        target: Symbol,
        addend: i64,
        width: u8,
        line: u32,
    ) -> Result<u16, Error> {
        if let Some(&slot) = context.addresses.get(&(target, addend, width)) {
            return Ok(slot);
        }
        let slot = self.slots(context, 1, 64, line)?;
        context.body.relocations.push(Relocation { slot, target, addend, width });
        context.addresses.insert((target, addend, width), slot);
        Ok(slot)
    }
}
