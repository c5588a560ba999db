//! Who accessed each byte of memory last, in cells of 16, 4 or 1 bytes, as the accesses are.

use crate::clock::Key;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::RangeInclusive;

/// A write.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mark {
    /// Who wrote, or 0.
    pub key: Key,
    /// When.
    pub stamp: u32,
    /// The instruction.
    pub site: u32,
    /// 0 for a weak access; otherwise the reach of a strong one, from 1.
    pub strong: u8,
}

/// Reads of a warp's lanes, or of bulk copies, since the last write.
#[derive(Clone, Copy, Debug, Default)]
pub struct Read {
    /// The warp, or the copies; 0 if there is none.
    pub key: Key,
    /// Which lanes.
    pub lanes: u32,
    /// When.
    pub stamp: u32,
    /// The instruction.
    pub site: u32,
    /// As for a write.
    pub strong: u8,
}

/// A cell.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    /// The last weak write, and the last strong one after it. Who has seen the strong one may not have seen the weak one.
    writes: [Mark; 2],
    first: Read,
    more: Vec<Read>,
}

impl Cell {
    /// Returns the last weak write, and the last strong one after it.
    pub fn writes(&self) -> impl Iterator<Item = &Mark> {
        self.writes.iter().filter(|write| write.key != 0)
    }

    /// Returns the reads since the last write.
    pub fn reads(&self) -> impl Iterator<Item = &Read> {
        std::iter::once(&self.first).filter(|read| read.key != 0).chain(&self.more)
    }

    /// Whether lane `lane` of a warp has read since the last write, with one of these strengths and not before `stamp`.
    pub fn has_read(&self, warp: Key, lane: u32, strengths: RangeInclusive<u8>, stamp: u32) -> bool {
        self.reads().any(|read| {
            let own = read.key == warp && read.lanes >> lane & 1 == 1;
            own && strengths.contains(&read.strong) && read.stamp >= stamp
        })
    }

    /// Adds a read, which replaces earlier ones of the same lanes and strength.
    pub fn read(&mut self, new: Read) {
        if self.first.key == 0 && self.more.is_empty() {
            self.first = new;
            return;
        }
        let mut found = false;
        let mut add = |read: &mut Read| {
            if read.key == new.key && read.strong == new.strong {
                if read.stamp == new.stamp && read.site == new.site {
                    read.lanes |= new.lanes;
                    found = true;
                } else {
                    read.lanes &= !new.lanes;
                }
            }
            read.lanes != 0
        };
        if !add(&mut self.first) {
            self.first = Read::default();
        }
        self.more.retain_mut(add);
        if !found && self.first.key == 0 {
            self.first = new;
        } else if !found {
            self.more.push(new);
        }
    }

    /// Drops reads for which `keep` is false.
    pub fn prune(&mut self, keep: impl Fn(&Read) -> bool) {
        self.more.retain(keep);
    }

    /// Returns how many entries the reads have.
    pub fn len(&self) -> usize {
        self.more.len()
    }

    /// Replaces all with a write, a strong one all but the last weak write.
    pub fn wrote(&mut self, mark: Mark) {
        match mark.strong {
            0 => self.writes = [mark, Mark::default()],
            _ => self.writes[1] = mark,
        }
        self.first.key = 0;
        if !self.more.is_empty() {
            self.more = Vec::new();
        }
    }
}

/// 16 bytes.
#[derive(Clone, Debug)]
enum Line {
    Whole(Cell),
    Words(Box<[Cell; 4]>),
    Bytes(Box<[Cell; 16]>),
}

impl Line {
    /// Returns the cells of some of the bytes, which are as small as these bytes need.
    fn cells(&mut self, from: usize, bytes: usize) -> &mut [Cell] {
        if bytes < 16
            && let Self::Whole(cell) = self
        {
            *self = Self::Words(Box::new(std::array::from_fn(|_| cell.clone())));
        }
        if !(from | bytes).is_multiple_of(4)
            && let Self::Words(cells) = self
        {
            *self = Self::Bytes(Box::new(std::array::from_fn(|at| cells[at / 4].clone())));
        }
        match self {
            Self::Whole(cell) => std::slice::from_mut(cell),
            Self::Words(cells) => &mut cells[from / 4..(from + bytes) / 4],
            Self::Bytes(cells) => &mut cells[from..from + bytes],
        }
    }
}

/// A hash for addresses.
#[derive(Default)]
pub struct Multiply(u64);

impl Hasher for Multiply {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

/// A map with that hash.
pub type Map<K, V> = HashMap<K, V, BuildHasherDefault<Multiply>>;

const LINES: usize = 64;

/// The cells of a memory.
#[derive(Default)]
pub struct Shadow {
    pages: Map<u64, usize>,
    all: Vec<Box<[Line; LINES]>>,
    last: (u64, usize),
}

impl Shadow {
    /// Calls `change` for the cells of `bytes` bytes, and with `resets` makes the cells as large as they can be
    /// afterwards, if all of them are the same.
    pub fn touch(&mut self, mut address: u64, mut bytes: u64, resets: bool, mut change: impl FnMut(&mut Cell, u64)) {
        while bytes > 0 {
            let from = address % 16;
            let part = bytes.min(16 - from);
            let line = self.line(address / 16);
            let cells = line.cells(from as usize, part as usize);
            let size = part / cells.len() as u64;
            cells.iter_mut().enumerate().for_each(|(at, cell)| change(cell, address + at as u64 * size));
            if resets && part == 16 && !matches!(line, Line::Whole(_)) {
                *line = Line::Whole(line.cells(0, 16)[0].clone());
            }
            (address, bytes) = (address + part, bytes - part);
        }
    }

    fn line(&mut self, line: u64) -> &mut Line {
        let page = line / LINES as u64;
        if self.last.0 != page || self.all.is_empty() {
            let all = &mut self.all;
            let at = *self.pages.entry(page).or_insert_with(|| {
                all.push(Box::new(std::array::from_fn(|_| Line::Whole(Cell::default()))));
                all.len() - 1
            });
            self.last = (page, at);
        }
        &mut self.all[self.last.1][(line % LINES as u64) as usize]
    }
}
