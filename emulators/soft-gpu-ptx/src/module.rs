//! A parsed PTX text.

use crate::code::{Body, Symbol};
use std::collections::HashMap;

/// A PTX text, parsed and decoded.
#[derive(Clone, Debug, Default)]
pub struct Module {
    pub(crate) name: String,
    pub(crate) functions: Vec<Function>,
    pub(crate) variables: Vec<Variable>,
    pub(crate) symbols: HashMap<String, Symbol>,
    /// The major and minor `.version`.
    pub(crate) version: (u32, u32),
    /// The number after `sm_`, and the letter after it (`a`, `f`), if there is one.
    pub(crate) target: u32,
    pub(crate) only_for: Option<char>,
    pub(crate) instructions: usize,
    /// The `.file` names, by number.
    pub(crate) files: Vec<(u32, String)>,
    /// Where instructions are inlined, as compilers' comments have it.
    pub(crate) inlined: Vec<String>,
}

/// A name's visibility to other modules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linkage {
    Local,
    Visible,
    Weak,
    Common,
    Extern,
}

/// A parameter or a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    pub offset: u32,
    pub size: u32,
    pub align: u32,
}

/// A function or a kernel.
#[derive(Clone, Debug)]
pub struct Function {
    pub name: String,
    pub line: u32,
    pub linkage: Linkage,
    pub kernel: bool,
    pub parameters: Vec<Slot>,
    pub results: Vec<Slot>,
    pub body: Option<Body>,
    pub max_threads: u32,
    pub required_block: Option<[u32; 3]>,
    pub required_cluster: Option<[u32; 3]>,
}

impl Function {
    /// Returns how two declarations of a function differ.
    pub fn unlike(&self, other: &Self) -> Option<&'static str> {
        let same =
            |one: &[Slot], other: &[Slot]| one.iter().map(|slot| slot.size).eq(other.iter().map(|slot| slot.size));
        if self.kernel != other.kernel {
            Some("one is a kernel, the other a function")
        } else if !same(&self.parameters, &other.parameters) {
            Some("the parameters differ")
        } else if !same(&self.results, &other.results) {
            Some("the results differ")
        } else {
            None
        }
    }
}

/// A variable's state space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Global,
    Constant,
    Shared,
}

/// A module's variable, or one declared in a function.
#[derive(Clone, Debug)]
pub struct Variable {
    pub name: String,
    pub line: u32,
    pub linkage: Linkage,
    pub place: Place,
    pub size: u64,
    pub align: u64,
    /// The first bytes of the initial value; the rest are zero.
    pub bytes: Vec<u8>,
    /// Addresses in the initial value: offset, whose, and addend.
    pub addresses: Vec<(usize, Symbol, i64)>,
    /// `.extern .shared name[]`, whose size the launch sets.
    pub dynamic: bool,
}

impl Module {
    /// Returns the PTX version (`.version`), major and minor.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Returns the architecture (`.target`): 70 for `sm_70`.
    pub fn target(&self) -> u32 {
        self.target
    }

    /// Whether a GPU of this compute capability (90 for 9.0) runs the text: code for `sm_90a` runs only on 9.0, and
    /// code for `sm_100f` on 10.0 and later ones of the family 10.
    pub fn runs_on(&self, capability: u32) -> bool {
        match self.only_for {
            Some('a') => self.target == capability,
            Some(_) => self.target <= capability && self.target / 10 == capability / 10,
            None => self.target <= capability,
        }
    }

    /// Returns the number of instructions in the text.
    pub fn instructions(&self) -> usize {
        self.instructions
    }
}
