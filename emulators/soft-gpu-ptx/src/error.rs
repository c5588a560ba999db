//! Errors in PTX texts, and traps, which end kernels early.

use std::fmt;

/// The kind of a parse or link error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The text isn't PTX (`CUDA_ERROR_INVALID_PTX`).
    Syntax,
    /// `.version` names a PTX version that the interpreter doesn't support (`CUDA_ERROR_UNSUPPORTED_PTX_VERSION`).
    Version,
    /// `.target` or `.address_size` names an architecture that the interpreter doesn't support
    /// (`CUDA_ERROR_INVALID_PTX`).
    Target,
    /// The interpreter doesn't support an instruction or directive (`CUDA_ERROR_INVALID_PTX`).
    Form,
    /// The type or number of operands doesn't fit the instruction (`CUDA_ERROR_INVALID_PTX`).
    Operand,
    /// A name isn't defined (`CUDA_ERROR_INVALID_PTX` within a module, `CUDA_ERROR_NOT_FOUND` between modules).
    Symbol,
    /// A name is defined twice (`CUDA_ERROR_INVALID_PTX`).
    Duplicate,
    /// A declaration doesn't match the definition (`CUDA_ERROR_INVALID_PTX`).
    Signature,
    /// The module exceeds one of the interpreter's limits (`CUDA_ERROR_OUT_OF_MEMORY`).
    Limit,
}

/// A parse or link error: `module:line: form: cause; fix`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Error {
    /// The kind, from which callers choose a status code.
    pub kind: Kind,
    /// The name that the caller gave the module.
    pub module: String,
    /// The line in the module's text, counting from 1; 0 if the error has no line.
    pub line: u32,
    /// The instruction or directive with all its modifiers, or the name.
    pub form: String,
    /// What is wrong, and what to do.
    pub cause: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: `{}`: {}", self.module, self.line, self.form, self.cause)
    }
}

/// The kind of event that ends a kernel early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TrapKind {
    /// The launch itself is impossible: sizes, parameters (`CUDA_ERROR_INVALID_VALUE`).
    Launch,
    /// The kernel needs more shared or local memory than there is (`CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES`).
    Resources,
    /// The kernel accessed memory that it may not touch (`CUDA_ERROR_ILLEGAL_ADDRESS`).
    Address,
    /// The kernel accessed an address that isn't a multiple of the access's size (`CUDA_ERROR_MISALIGNED_ADDRESS`).
    Misaligned,
    /// An instruction got an address in the wrong address space (`CUDA_ERROR_INVALID_ADDRESS_SPACE`).
    AddressSpace,
    /// `trap`, `brkpt`, a failed assertion, or an index outside a branch table (`CUDA_ERROR_LAUNCH_FAILED`).
    Trap,
    /// A wrong member mask, an exited lane in a mask, or a barrier that not all threads reach
    /// (`CUDA_ERROR_LAUNCH_FAILED`).
    Convergence,
    /// An mbarrier or a bulk copy is used wrongly (`CUDA_ERROR_LAUNCH_FAILED`).
    Mbarrier,
    /// Calls are nested deeper than the stack allows (`CUDA_ERROR_LAUNCH_FAILED`).
    Recursion,
    /// The watchdog expired (`CUDA_ERROR_LAUNCH_TIMEOUT`).
    Watchdog,
    /// The caller stopped the kernel.
    Stopped,
}

/// The event that ended a kernel early: kernel, block, thread, line, cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Trap {
    /// The kind, from which callers choose a status code.
    pub kind: TrapKind,
    /// The kernel's name.
    pub kernel: String,
    /// The block's index in the grid.
    pub block: [u32; 3],
    /// The thread's index in its block.
    pub thread: [u32; 3],
    /// The name of the instruction's module.
    pub module: String,
    /// The instruction's function.
    pub function: String,
    /// The instruction's line in the module's text, counting from 1; 0 if the trap has no line.
    pub line: u32,
    /// The instruction's source file and line, if the text has them (`.loc`).
    pub origin: Option<(String, u32)>,
    /// What happened, and what to do.
    pub cause: String,
}

impl fmt::Display for Trap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([bx, by, bz], [tx, ty, tz]) = (self.block, self.thread);
        write!(f, "kernel {}, block ({bx}, {by}, {bz}), thread ({tx}, {ty}, {tz})", self.kernel)?;
        if self.line > 0 {
            write!(f, ", {}:{} in {}", self.module, self.line, self.function)?;
        }
        if let Some((file, line)) = &self.origin {
            write!(f, ", source {file}:{line}")?;
        }
        write!(f, ": {}", self.cause)
    }
}
