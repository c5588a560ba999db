//! Linked modules: one table of functions, one of variables.

use crate::code::{Body, Call, Float, Op, Special, Symbol};
use crate::error::{Error, Kind};
use crate::module::{Function, Linkage, Module, Place, Slot, Variable};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The nesting limit of calls.
pub const MAX_DEPTH: usize = 128;

/// The address of function 0. Functions' addresses are outside all of a process's memory, like the windows of shared
/// memory and the like.
const FUNCTIONS: u64 = 4 << 60;
/// The distance between two functions' addresses.
const FUNCTION_SIZE: u64 = 16;

fn function_address(function: usize) -> u64 {
    FUNCTIONS + function as u64 * FUNCTION_SIZE
}

/// A kernel's parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The offset in the launch's parameter bytes.
    pub offset: u32,
    /// The size in bytes.
    pub size: u32,
    /// The alignment in bytes.
    pub align: u32,
}

/// A kernel: a function that can be launched.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The name.
    pub name: String,
    /// The parameters, in order.
    pub parameters: Vec<Parameter>,
    /// Bytes of static shared memory per block.
    pub shared: u32,
    /// Bytes of local memory per thread, for the deepest chain of calls.
    pub local: u32,
    /// Bytes of constants in the program.
    pub constant: u32,
    /// Virtual registers of the kernel's own function, capped at 255.
    pub registers: u32,
    /// The most threads per block.
    pub max_threads: u32,
    /// The block size, if the kernel requires one (`.reqntid`).
    pub required_block: Option<[u32; 3]>,
    /// The blocks per cluster, if the kernel requires a size (`.reqnctapercluster`).
    pub required_cluster: Option<[u32; 3]>,
    /// The kernel may read the address of [`Launch::workspace`](crate::Launch::workspace).
    pub workspace: bool,
    /// The kernel may execute bulk copies.
    pub(crate) bulk: bool,
    pub(crate) function: usize,
    /// The kernel's own function, and all that it may call.
    pub(crate) reachable: Vec<usize>,
    /// The offset of each shared variable. Dynamic shared memory starts at `shared`.
    pub(crate) layout: HashMap<usize, u32>,
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
    /// The variable is read-only for kernels (`.const`).
    pub constant: bool,
    /// The name is visible to other modules and `cuModuleGetGlobal`.
    pub visible: bool,
}

/// A linked function.
#[derive(Debug)]
pub struct Linked {
    pub name: String,
    pub module: Arc<str>,
    /// The module's source files, by number.
    pub files: Arc<[(u32, String)]>,
    pub inlined: Arc<[String]>,
    pub parameters: Vec<Slot>,
    pub results: Vec<Slot>,
    pub body: Body,
    /// A variable or an instruction has its address, so an indirect call may reach it.
    pub addressed: bool,
    /// Set for a function that the driver provides, which has no code here.
    pub built_in: Option<BuiltIn>,
}

/// A function that the driver provides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuiltIn {
    /// `vprintf(format, arguments)`.
    Print,
    /// `__assertfail(message, file, line, function, character size)`.
    AssertFail,
    /// A function of NVIDIA's libdevice that is one instruction, on operands of this width.
    Instruction(Op, u8),
    /// The number of the lowest bit that is set, counting from 1, or 0.
    FindFirst,
}

/// Functions of libdevice, which NVIDIA's headers call: what they compute, the operands' width, and the bytes of the
/// result.
const LIBDEVICE: &[(&str, Op, u8, u32)] = &[
    ("mulhi", Op::MulHi { signed: true }, 32, 4),
    ("umulhi", Op::MulHi { signed: false }, 32, 4),
    ("mul64hi", Op::MulHi { signed: true }, 64, 8),
    ("umul64hi", Op::MulHi { signed: false }, 64, 8),
    ("popc", Op::Popc, 32, 4),
    ("popcll", Op::Popc, 64, 4),
    ("clz", Op::Clz, 32, 4),
    ("clzll", Op::Clz, 64, 4),
    ("brev", Op::Brev, 32, 4),
    ("brevll", Op::Brev, 64, 8),
    ("min", Op::Min { signed: true }, 32, 4),
    ("max", Op::Max { signed: true }, 32, 4),
    ("umin", Op::Min { signed: false }, 32, 4),
    ("umax", Op::Max { signed: false }, 32, 4),
    ("llmin", Op::Min { signed: true }, 64, 8),
    ("llmax", Op::Max { signed: true }, 64, 8),
    ("ullmin", Op::Min { signed: false }, 64, 8),
    ("ullmax", Op::Max { signed: false }, 64, 8),
    ("byte_perm", Op::Prmt, 32, 4),
    ("fminf", Op::Float(Float::Min), 32, 4),
    ("fmaxf", Op::Float(Float::Max), 32, 4),
];

/// Linked modules.
#[derive(Debug)]
pub struct Program {
    kernels: Vec<Kernel>,
    globals: Vec<Global>,
    pub(crate) functions: Vec<Linked>,
    pub(crate) variables: Vec<Variable>,
    /// The index among the globals of each variable that has one.
    pub(crate) placed: HashMap<usize, usize>,
    /// Each global's variable.
    sources: Vec<usize>,
}

/// The state of a link.
struct Linker {
    modules: Vec<Module>,
    functions: HashMap<String, (usize, usize)>,
    variables: HashMap<String, (usize, usize)>,
}

impl Linker {
    fn error(&self, kind: Kind, module: usize, line: u32, name: &str, cause: String) -> Error {
        Error { kind, module: self.modules[module].name.clone(), line, form: name.into(), cause }
    }

    /// Collects the names that are visible to other modules.
    fn names(&mut self) -> Result<(), Error> {
        let rank = |linkage| match linkage {
            Linkage::Visible => 3,
            Linkage::Weak => 2,
            Linkage::Common => 1,
            Linkage::Local | Linkage::Extern => 0,
        };
        let twice = |own: &Self, at: usize, line: u32, name: &str, other: usize, other_line: u32| {
            let other = &own.modules[other].name;
            own.error(
                Kind::Duplicate,
                at,
                line,
                name,
                format!("{other}:{other_line} also defines the name; make one of them .weak"),
            )
        };
        for at in 0..self.modules.len() {
            for index in 0..self.modules[at].functions.len() {
                let function = &self.modules[at].functions[index];
                // A kernel's name is visible whatever its linkage.
                let own = if function.kernel { rank(function.linkage).max(2) } else { rank(function.linkage) };
                if function.body.is_none() || own == 0 {
                    continue;
                }
                if let Some(&(other, old)) = self.functions.get(&function.name) {
                    let before = &self.modules[other].functions[old];
                    if rank(before.linkage) == 3 && own == 3 || before.kernel || function.kernel {
                        return Err(twice(self, at, function.line, &function.name, other, before.line));
                    }
                    if rank(before.linkage) >= own {
                        continue;
                    }
                }
                self.functions.insert(function.name.clone(), (at, index));
            }
            for index in 0..self.modules[at].variables.len() {
                let variable = &self.modules[at].variables[index];
                let own = rank(variable.linkage);
                if own == 0 {
                    continue;
                }
                if let Some(&(other, old)) = self.variables.get(&variable.name) {
                    let before = &self.modules[other].variables[old];
                    if rank(before.linkage) == 3 && own == 3 {
                        return Err(twice(self, at, variable.line, &variable.name, other, before.line));
                    }
                    if rank(before.linkage) > own || rank(before.linkage) == own && before.size >= variable.size {
                        continue;
                    }
                }
                self.variables.insert(variable.name.clone(), (at, index));
            }
        }
        Ok(())
    }

    /// Returns the definition that a module's function refers to.
    fn function(&self, at: usize, index: usize, line: u32) -> Result<(usize, usize), Error> {
        let function = &self.modules[at].functions[index];
        if function.linkage == Linkage::Local || function.linkage == Linkage::Visible && function.body.is_some() {
            if function.body.is_none() {
                return Err(self.error(
                    Kind::Symbol,
                    at,
                    line,
                    &function.name,
                    "the function has a declaration, but no body; define it, or declare it .extern".into(),
                ));
            }
            return Ok((at, index));
        }
        let Some(&(other, found)) = self.functions.get(&function.name) else {
            if built_in(function).is_some() {
                return Ok((at, index));
            }
            return Err(self.error(
                Kind::Symbol,
                at,
                line,
                &function.name,
                "no module defines the function; link the module that has it".into(),
            ));
        };
        let definition = &self.modules[other].functions[found];
        if let Some(cause) = definition.unlike(function) {
            let module = &self.modules[other].name;
            return Err(self.error(
                Kind::Signature,
                at,
                function.line,
                &function.name,
                format!("{cause}, but not in {module}:{}", definition.line),
            ));
        }
        Ok((other, found))
    }

    fn variable(&self, at: usize, index: usize, line: u32) -> Result<(usize, usize), Error> {
        let variable = &self.modules[at].variables[index];
        if matches!(variable.linkage, Linkage::Local | Linkage::Visible) || variable.dynamic {
            return Ok((at, index));
        }
        let Some(&(other, found)) = self.variables.get(&variable.name) else {
            return Err(self.error(
                Kind::Symbol,
                at,
                line,
                &variable.name,
                "no module defines the variable; link the module that has it".into(),
            ));
        };
        let definition = &self.modules[other].variables[found];
        if definition.place != variable.place {
            let module = &self.modules[other].name;
            return Err(self.error(
                Kind::Signature,
                at,
                variable.line,
                &variable.name,
                format!("{module}:{} has the variable in another state space", definition.line),
            ));
        }
        Ok((other, found))
    }
}

fn built_in(function: &Function) -> Option<BuiltIn> {
    let sizes = |slots: &[crate::module::Slot]| slots.iter().map(|slot| slot.size).collect::<Vec<_>>();
    match function.name.as_str() {
        "vprintf" if sizes(&function.parameters) == [8, 8] && sizes(&function.results) == [4] => Some(BuiltIn::Print),
        "__assertfail" if sizes(&function.parameters) == [8, 8, 4, 8, 8] => Some(BuiltIn::AssertFail),
        "__nv_ffs" if sizes(&function.parameters) == [4] => Some(BuiltIn::FindFirst),
        "__nv_ffsll" if sizes(&function.parameters) == [8] => Some(BuiltIn::FindFirst),
        name => {
            let name = name.strip_prefix("__nv_")?;
            let &(_, op, width, result) = LIBDEVICE.iter().find(|entry| entry.0 == name)?;
            let operands = match op {
                Op::Popc | Op::Clz | Op::Brev => 1,
                Op::Prmt => 3,
                _ => 2,
            };
            let fits = sizes(&function.parameters) == vec![u32::from(width) / 8; operands]
                && sizes(&function.results) == [result];
            fits.then_some(BuiltIn::Instruction(op, width))
        }
    }
}

impl Program {
    /// Links `modules`: resolves each `.extern` to its definition; a strong definition replaces weak ones.
    ///
    /// # Errors
    ///
    /// A name is undefined or defined twice, or a definition doesn't match its declaration.
    pub fn link(modules: Vec<Module>) -> Result<Self, Error> {
        let mut linker = Linker { modules, functions: HashMap::new(), variables: HashMap::new() };
        linker.names()?;
        let mut program = Self {
            kernels: Vec::new(),
            globals: Vec::new(),
            functions: Vec::new(),
            variables: Vec::new(),
            placed: HashMap::new(),
            sources: Vec::new(),
        };
        // Number the definitions first, and then make references use those numbers.
        let mut functions = HashMap::new();
        let mut variables = HashMap::new();
        for (at, module) in linker.modules.iter().enumerate() {
            let name: Arc<str> = module.name.as_str().into();
            let files: Arc<[(u32, String)]> = module.files.as_slice().into();
            let inlined: Arc<[String]> = module.inlined.as_slice().into();
            for (index, function) in module.functions.iter().enumerate() {
                let built_in = if function.body.is_none() { built_in(function) } else { None };
                if function.body.is_none() && built_in.is_none() {
                    continue;
                }
                functions.insert((at, index), program.functions.len());
                let body = function.body.clone().unwrap_or_else(|| Body {
                    params: function
                        .parameters
                        .iter()
                        .chain(&function.results)
                        .map(|slot| slot.offset + slot.size)
                        .max()
                        .unwrap_or(0),
                    ..Body::default()
                });
                program.functions.push(Linked {
                    name: function.name.clone(),
                    module: name.clone(),
                    files: files.clone(),
                    inlined: inlined.clone(),
                    parameters: function.parameters.clone(),
                    results: function.results.clone(),
                    body,
                    addressed: false,
                    built_in,
                });
            }
            for (index, variable) in module.variables.iter().enumerate() {
                if variable.linkage == Linkage::Extern && !variable.dynamic || !linker.chosen(at, index) {
                    continue;
                }
                let number = program.variables.len();
                variables.insert((at, index), number);
                if variable.place != Place::Shared {
                    program.placed.insert(number, program.globals.len());
                    program.sources.push(number);
                    program.globals.push(Global {
                        name: variable.name.clone(),
                        size: variable.size,
                        align: variable.align,
                        constant: variable.place == Place::Constant,
                        visible: variable.linkage != Linkage::Local,
                    });
                }
                program.variables.push(variable.clone());
            }
        }
        program.refer(&linker, &functions, &variables)?;
        for (at, module) in linker.modules.iter().enumerate() {
            for (index, function) in module.functions.iter().enumerate() {
                if function.kernel && function.body.is_some() {
                    let kernel = program.kernel_of(function, functions[&(at, index)]);
                    program.kernels.push(kernel);
                }
            }
        }
        Ok(program)
    }

    /// Replaces each reference with the number of its definition, as listed in `functions` and `variables`.
    fn refer(
        &mut self,
        linker: &Linker,
        functions: &HashMap<(usize, usize), usize>,
        variables: &HashMap<(usize, usize), usize>,
    ) -> Result<(), Error> {
        let mut addressed = Vec::new();
        let mut resolve = |at: usize, target: Symbol, line: u32| -> Result<Symbol, Error> {
            Ok(match target {
                Symbol::Variable(target) => Symbol::Variable(variables[&linker.variable(at, target, line)?]),
                Symbol::Function(target) => {
                    let number = functions[&linker.function(at, target, line)?];
                    addressed.push(number);
                    Symbol::Function(number)
                }
            })
        };
        for (&(at, _), &number) in variables {
            let variable = &mut self.variables[number];
            for entry in &mut variable.addresses {
                entry.1 = resolve(at, entry.1, variable.line)?;
            }
        }
        for (at, module) in linker.modules.iter().enumerate() {
            for (index, function) in module.functions.iter().enumerate() {
                let Some(body) = &function.body else { continue };
                let number = functions[&(at, index)];
                for (entry, relocation) in body.relocations.iter().enumerate() {
                    self.functions[number].body.relocations[entry].target =
                        resolve(at, relocation.target, function.line)?;
                }
                for (entry, call) in body.calls.iter().enumerate() {
                    if let Some(target) = call.target {
                        let target = functions[&linker.function(at, target, call.line)?];
                        self.functions[number].body.calls[entry].target = Some(target);
                    }
                }
            }
        }
        for number in addressed {
            self.functions[number].addressed = true;
        }
        Ok(())
    }

    fn kernel_of(&self, function: &Function, number: usize) -> Kernel {
        let mut reachable = vec![number];
        let mut known = HashSet::from([number]);
        let mut at = 0;
        while let Some(&next) = reachable.get(at) {
            at += 1;
            for call in &self.functions[next].body.calls {
                reachable.extend(self.targets(call).filter(|&target| known.insert(target)));
            }
        }
        let mut layout = HashMap::new();
        let (mut shared, mut dynamic) = (0u32, Vec::new());
        for &function in &reachable {
            for relocation in &self.functions[function].body.relocations {
                let Symbol::Variable(number) = relocation.target else { continue };
                let variable = &self.variables[number];
                if variable.place != Place::Shared || layout.contains_key(&number) {
                    continue;
                }
                if variable.dynamic {
                    dynamic.push(number);
                    continue;
                }
                let start = u64::from(shared).next_multiple_of(variable.align);
                layout.insert(number, start as u32);
                // That is more than a block can have, so the launch reports it.
                shared = u32::try_from(start + variable.size).unwrap_or(u32::MAX - 4096);
            }
        }
        if !dynamic.is_empty() {
            shared = shared.next_multiple_of(16);
        }
        layout.extend(dynamic.into_iter().map(|variable| (variable, shared)));
        let constant = self.globals.iter().filter(|global| global.constant).map(|global| global.size).sum::<u64>();
        Kernel {
            name: function.name.clone(),
            parameters: function
                .parameters
                .iter()
                .map(|slot| Parameter { offset: slot.offset, size: slot.size, align: slot.align })
                .collect(),
            shared,
            local: self.deepest(number, 0, &mut HashMap::new()),
            constant: u32::try_from(constant).unwrap_or(u32::MAX),
            registers: self.functions[number].body.registers.min(255),
            max_threads: function.max_threads,
            required_block: function.required_block,
            required_cluster: function.required_cluster,
            workspace: self.has(&reachable, |op| matches!(op, Op::Special(Special::Environment(1 | 2)))),
            bulk: self.has(&reachable, |op| matches!(op, Op::Bulk { .. })),
            function: number,
            reachable,
            layout,
        }
    }

    /// Returns the functions that a call may reach.
    fn targets(&self, call: &Call) -> impl Iterator<Item = usize> {
        let direct = call.target;
        let addressed =
            self.functions.iter().enumerate().filter(move |(_, function)| direct.is_none() && function.addressed);
        direct.into_iter().chain(addressed.map(|(number, _)| number))
    }

    /// Returns the function at an address that an indirect call uses.
    pub(crate) fn called(&self, call: &Call, address: u64) -> Result<usize, String> {
        let number = address.wrapping_sub(FUNCTIONS) / FUNCTION_SIZE;
        let found =
            usize::try_from(number).ok().and_then(|number| self.functions.get(number).map(|found| (number, found)));
        let Some((number, function)) =
            found.filter(|&(number, function)| function_address(number) == address && function.addressed)
        else {
            return Err(format!("an indirect call of {address:#x}, which is no function's address in this module"));
        };
        let fits = |given: &[(u32, u32)], wanted: &[Slot]| {
            given.iter().map(|part| part.1).eq(wanted.iter().map(|slot| slot.size))
        };
        if !fits(&call.arguments, &function.parameters) || !fits(&call.results, &function.results) {
            return Err(format!(
                "an indirect call of {}, whose parameters or results differ from the call's",
                function.name
            ));
        }
        Ok(number)
    }

    /// Whether the functions have an instruction.
    fn has(&self, functions: &[usize], wanted: impl Fn(Op) -> bool) -> bool {
        functions.iter().flat_map(|&function| &self.functions[function].body.code).any(|i| wanted(i.op))
    }

    /// Returns the bytes of local memory that the deepest chain of calls needs; a recursive function counts once.
    fn deepest(&self, function: usize, calls: usize, known: &mut HashMap<usize, u32>) -> u32 {
        if let Some(&local) = known.get(&function) {
            return local;
        }
        if calls > MAX_DEPTH {
            return 0;
        }
        known.insert(function, 0);
        let body = &self.functions[function].body;
        let targets = body.calls.iter().flat_map(|call| self.targets(call));
        let below = targets.map(|target| self.deepest(target, calls + 1, known)).max().unwrap_or(0);
        let local = body.local.next_multiple_of(16).saturating_add(below);
        known.insert(function, local);
        local
    }

    /// Returns the kernels' names.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(|kernel| kernel.name.as_str())
    }

    /// Finds a kernel by name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }

    /// Returns the variables that the caller places, in the order of [`Program::load`]'s addresses.
    pub fn globals(&self) -> &[Global] {
        &self.globals
    }

    /// Returns the initial value of global `index`, with the globals' addresses filled in. `addresses` has one address
    /// for each of [`Program::globals`].
    ///
    /// # Panics
    ///
    /// If `index` is out of range, or there isn't one address for each of [`Program::globals`].
    pub fn initial(&self, index: usize, addresses: &[u64]) -> Vec<u8> {
        assert_eq!(addresses.len(), self.globals.len());
        let variable = &self.variables[self.sources[index]];
        let mut bytes = variable.bytes.clone();
        bytes.resize(self.globals[index].size as usize, 0);
        for &(offset, target, addend) in &variable.addresses {
            let start = match target {
                Symbol::Variable(variable) => self.placed.get(&variable).map_or(0, |&global| addresses[global]),
                Symbol::Function(function) => function_address(function),
            };
            let address = start.wrapping_add_signed(addend);
            bytes[offset..offset + 8].copy_from_slice(&address.to_le_bytes());
        }
        bytes
    }

    /// Places the program's globals at `addresses`, in the order of [`Program::globals`].
    ///
    /// # Panics
    ///
    /// If there isn't one address for each of [`Program::globals`].
    pub fn load(self: Arc<Self>, addresses: &[u64]) -> Loaded {
        assert_eq!(addresses.len(), self.globals.len());
        Loaded { program: self, addresses: addresses.to_vec() }
    }
}

impl Linker {
    /// Whether this definition of a variable is the one that its name refers to.
    fn chosen(&self, at: usize, index: usize) -> bool {
        let variable = &self.modules[at].variables[index];
        !matches!(variable.linkage, Linkage::Weak | Linkage::Common)
            || self.variables.get(&variable.name) == Some(&(at, index))
    }
}

/// A program whose globals have been placed.
#[derive(Debug)]
pub struct Loaded {
    program: Arc<Program>,
    addresses: Vec<u64>,
}

impl Loaded {
    /// Returns the program.
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    /// Returns the address and size of the visible global `name`.
    pub fn global(&self, name: &str) -> Option<(u64, u64)> {
        let index = self.program.globals.iter().position(|global| global.visible && global.name == name)?;
        Some((self.addresses[index], self.program.globals[index].size))
    }

    /// Returns the initial frames of `kernel`'s functions: constants and addresses, and poisoned registers.
    pub(crate) fn templates(&self, kernel: &Kernel) -> Vec<Vec<u64>> {
        let program = &self.program;
        let mut templates = vec![Vec::new(); program.functions.len()];
        for &function in &kernel.reachable {
            let body = &program.functions[function].body;
            let mut slots = body.slots.clone();
            // Operands that an instruction doesn't have name the first slot.
            slots.resize(slots.len().max(1), 0);
            for relocation in &body.relocations {
                let start = match relocation.target {
                    Symbol::Function(function) => function_address(function),
                    Symbol::Variable(variable) => match program.placed.get(&variable) {
                        Some(&global) => self.addresses[global],
                        None => u64::from(kernel.layout[&variable]),
                    },
                };
                slots[usize::from(relocation.slot)] =
                    crate::code::low(start.wrapping_add_signed(relocation.addend), relocation.width);
            }
            templates[function] = slots;
        }
        templates
    }
}

impl Linked {
    /// Returns the source file that a comment in the text means by `name`, which may lack a directory.
    pub fn file_called(&self, name: &str) -> String {
        let mut files = self.files.iter().filter(|(_, file)| {
            file.strip_suffix(name).is_some_and(|directory| directory.is_empty() || directory.ends_with('/'))
        });
        match (files.next(), files.next()) {
            (Some((_, file)), None) => file.clone(),
            _ => name.to_owned(),
        }
    }
}

impl Program {
    /// Returns an instruction's line, given its function and index.
    pub(crate) fn line(&self, (function, pc): (u32, u32)) -> u32 {
        self.functions[function as usize].body.lines.get(pc as usize).copied().unwrap_or(0)
    }

    /// Returns an instruction's source file and line, if the text gives them.
    pub(crate) fn source(&self, (function, pc): (u32, u32)) -> Option<(String, u32)> {
        let function = &self.functions[function as usize];
        let &(file, line) = function.body.sources.get(pc as usize).filter(|source| source.1 != 0)?;
        let (_, name) = function.files.iter().find(|(number, _)| *number == file)?;
        Some((name.clone(), line))
    }
}
