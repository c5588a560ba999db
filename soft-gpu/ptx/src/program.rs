//! Modules linked: one table of functions, one of global variables.

use crate::error::{Error, Kind};
use crate::module::Module;
use std::sync::Arc;

/// One parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The offset in the launch's parameter bytes.
    pub offset: u32,
    /// The size in bytes.
    pub size: u32,
    /// The alignment in bytes.
    pub align: u32,
}

/// A kernel: a function that a launch can start.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The name.
    pub name: String,
    /// The parameters in their order.
    pub parameters: Vec<Parameter>,
    /// Bytes of static shared memory of a block.
    pub shared: u32,
    /// Bytes of local memory of a thread, for its deepest chain of calls.
    pub local: u32,
    /// Bytes of constants that the program has.
    pub constant: u32,
    /// Virtual registers of the kernel's own function, at most 255.
    pub registers: u32,
    /// The most threads of a block.
    pub max_threads: u32,
    /// The block's size, if the kernel demands one (`.reqntid`).
    pub required_block: Option<[u32; 3]>,
}

/// A variable in global or constant memory, which the caller places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Global {
    /// The name.
    pub name: String,
    /// The size in bytes.
    pub size: u64,
    /// The alignment in bytes.
    pub align: u64,
    /// Kernels only read the variable (`.const`).
    pub constant: bool,
    /// Other modules, and `cuModuleGetGlobal`, see the name.
    pub visible: bool,
}

/// Linked modules.
#[derive(Debug)]
pub struct Program {
    kernels: Vec<Kernel>,
    globals: Vec<Global>,
}

impl Program {
    /// Links `modules`: each `.extern` gets its definition; a strong definition replaces weak ones.
    ///
    /// # Errors
    ///
    /// A name without a definition or with two, or a definition unlike its declaration.
    pub fn link(modules: Vec<Module>) -> Result<Self, Error> {
        let name = modules.into_iter().next().map_or(String::new(), |module| module.name);
        Err(Error {
            kind: Kind::Symbol,
            module: name,
            line: 0,
            form: String::new(),
            cause: "the interpreter links nothing yet".into(),
        })
    }

    /// The kernels' names.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(|kernel| kernel.name.as_str())
    }

    /// The kernel of this name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }

    /// The variables that the caller places, in the order of [`Program::load`]'s addresses.
    pub fn globals(&self) -> &[Global] {
        &self.globals
    }

    /// The first contents of the global `index`, with the addresses of the globals filled in. One address for each of
    /// [`Program::globals`].
    ///
    /// # Panics
    ///
    /// If `index` or the number of addresses is not that of [`Program::globals`].
    pub fn initial(&self, index: usize, addresses: &[u64]) -> Vec<u8> {
        assert_eq!(addresses.len(), self.globals.len());
        vec![0; self.globals[index].size as usize]
    }

    /// The program with its globals at `addresses`, in the order of [`Program::globals`].
    ///
    /// # Panics
    ///
    /// If the number of addresses is not that of [`Program::globals`].
    pub fn load(self: Arc<Self>, addresses: &[u64]) -> Loaded {
        assert_eq!(addresses.len(), self.globals.len());
        Loaded { program: self, addresses: addresses.to_vec() }
    }
}

/// A program whose globals have addresses.
#[derive(Debug)]
pub struct Loaded {
    program: Arc<Program>,
    addresses: Vec<u64>,
}

impl Loaded {
    /// The program.
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    /// The address and the size of the visible global `name`.
    pub fn global(&self, name: &str) -> Option<(u64, u64)> {
        let index = self.program.globals.iter().position(|global| global.visible && global.name == name)?;
        Some((self.addresses[index], self.program.globals[index].size))
    }
}
