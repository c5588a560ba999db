//! What is wrong with a PTX text, and what ends a kernel early.

use std::fmt;

/// The kind of a defect of a PTX text or of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The text is not PTX (`CUDA_ERROR_INVALID_PTX`).
    Syntax,
    /// `.version` names a PTX version that the interpreter does not know (`CUDA_ERROR_UNSUPPORTED_PTX_VERSION`).
    Version,
    /// `.target` or `.address_size` names an architecture that the interpreter does not know (`CUDA_ERROR_INVALID_PTX`).
    Target,
    /// An instruction or a directive is PTX, but none that the interpreter knows (`CUDA_ERROR_INVALID_PTX`).
    Form,
    /// The type or the number of the operands does not fit the instruction (`CUDA_ERROR_INVALID_PTX`).
    Operand,
    /// A name has no definition (`CUDA_ERROR_INVALID_PTX` in one module, `CUDA_ERROR_NOT_FOUND` between modules).
    Symbol,
    /// A name has two definitions (`CUDA_ERROR_INVALID_PTX`).
    Duplicate,
    /// A declaration and the definition differ (`CUDA_ERROR_INVALID_PTX`).
    Signature,
    /// The module is larger than the interpreter's limits (`CUDA_ERROR_OUT_OF_MEMORY`).
    Limit,
}

/// A defect of a PTX text or of a link: `module:line: form: cause; fix`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Error {
    /// The kind, for a status code.
    pub kind: Kind,
    /// The name that the caller gave the module.
    pub module: String,
    /// The line in the module's text, from 1; 0 if the error has no line.
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
    /// An access to memory that the kernel may not touch (`CUDA_ERROR_ILLEGAL_ADDRESS`).
    Address,
    /// An access to an address that is not a multiple of its size (`CUDA_ERROR_MISALIGNED_ADDRESS`).
    Misaligned,
    /// An instruction of an address space got an address outside it (`CUDA_ERROR_INVALID_ADDRESS_SPACE`).
    AddressSpace,
    /// `trap`, `brkpt`, or a call that the interpreter does not make (`CUDA_ERROR_LAUNCH_FAILED`).
    Trap,
    /// A wrong member mask, an exited lane in a mask, a barrier that not all threads reach (`CUDA_ERROR_LAUNCH_FAILED`).
    Convergence,
    /// More calls deep than the stack has room for (`CUDA_ERROR_LAUNCH_FAILED`).
    Recursion,
    /// The watchdog's time is over (`CUDA_ERROR_LAUNCH_TIMEOUT`).
    Watchdog,
    /// The caller stopped the kernel.
    Stopped,
}

/// The event that ended a kernel early: kernel, block, thread, line, cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Trap {
    /// The kind, for a status code.
    pub kind: TrapKind,
    /// The kernel's name.
    pub kernel: String,
    /// The block's index in the grid.
    pub block: [u32; 3],
    /// The thread's index in its block.
    pub thread: [u32; 3],
    /// The name of the module of the instruction.
    pub module: String,
    /// The function of the instruction.
    pub function: String,
    /// The line of the instruction in the module's text, from 1; 0 if the trap has no line.
    pub line: u32,
    /// File and line of the source of the instruction, if the text has them (`.loc`).
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
