//! The compact form in which the interpreter executes a function.
//!
//! A register, a constant and an address are all slots of a frame: a call copies the function's slots, with the constants filled in,
//! to the top of the thread's stack. Slots hold the value's bits, zero above its width.

/// No guard.
pub const ALWAYS: u16 = u16::MAX;

/// A comparison. Unsigned and signed ones differ by the instruction's flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    /// Floats only: the ordered comparison or not a number.
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

/// The operation that combines a comparison with a predicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    None,
    And,
    Or,
    Xor,
}

/// The type of the operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Unsigned,
    Signed,
    Float,
}

/// The state space of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Generic,
    Global,
    Constant,
    Shared,
    /// An offset in the thread's local memory.
    Local,
    /// An offset from the local memory of the frame.
    LocalFrame,
    /// An offset in the thread's parameters.
    Param,
    /// An offset from the parameters of the frame.
    ParamFrame,
}

/// The order of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    Weak,
    Relaxed,
    Volatile,
    Mmio,
    Acquire,
    Release,
    AcquireRelease,
    Sequential,
}

impl Order {
    pub fn acquires(self) -> bool {
        matches!(self, Self::Acquire | Self::AcquireRelease | Self::Sequential)
    }

    pub fn releases(self) -> bool {
        matches!(self, Self::Release | Self::AcquireRelease | Self::Sequential)
    }
}

/// The scope of an access or a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    Block,
    Gpu,
    System,
}

/// The operation of an atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    Add,
    Exchange,
    CompareExchange,
    Min,
    Max,
    And,
    Or,
    Xor,
    Increment,
    Decrement,
}

/// The operation of a vote or of a reduction over a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
    Count,
}

/// The lane from which a shuffle takes its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shuffle {
    Index,
    Up,
    Down,
    Butterfly,
}

/// An arithmetic operation on floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float {
    Add,
    Sub,
    Mul,
    Div,
    Fma,
    Neg,
    Abs,
    Min,
    Max,
    Sqrt,
}

/// A special register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    Lane,
    Warp,
    Warps,
    Sm,
    Sms,
    Grid,
    MaskEq,
    MaskLe,
    MaskLt,
    MaskGe,
    MaskGt,
    Clock,
    Timer,
    TimerHigh,
    DynamicShared,
    TotalShared,
}

/// What an instruction does. `d` is the result's slot; `a`, `b` and `c` are the operands' slots; `width` is the type's width in bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Mov,
    Add,
    /// With the carry in and out.
    AddCarry {
        take: bool,
        give: bool,
    },
    Sub,
    SubBorrow {
        take: bool,
        give: bool,
    },
    MulLo,
    MulHi {
        signed: bool,
    },
    MulWide {
        signed: bool,
    },
    MadLo,
    MadHi {
        signed: bool,
    },
    MadWide {
        signed: bool,
    },
    Div {
        signed: bool,
    },
    Rem {
        signed: bool,
    },
    Min {
        signed: bool,
    },
    Max {
        signed: bool,
    },
    Abs,
    Neg,
    And,
    Or,
    Xor,
    Not,
    /// `d` is 1 if `a` is 0, or else 0.
    LogicalNot,
    /// The table of the function of three bits is `imm`.
    Lop3,
    Shl,
    Shr {
        signed: bool,
    },
    Funnel {
        left: bool,
        clamp: bool,
    },
    Popc,
    Clz,
    Brev,
    Bfind {
        signed: bool,
        shift: bool,
    },
    Bfe {
        signed: bool,
    },
    /// The length is in `x`.
    Bfi,
    Prmt,
    Selp,
    /// `d` and `x` are the comparison and its negation; `c` is the combined predicate, negated if `imm` is 1.
    Setp {
        compare: Compare,
        class: Class,
        combine: Combine,
    },
    /// All ones or zero in 32 bits.
    Set {
        compare: Compare,
        class: Class,
    },
    /// Truncates `imm` bits; a signed result fills `extra` bits.
    Convert {
        from_signed: bool,
        to_signed: bool,
    },
    /// The conversions are from `imm` bits to `width` bits.
    FloatConvert,
    FloatFromInteger {
        signed: bool,
    },
    /// Towards zero.
    FloatToInteger {
        signed: bool,
    },
    Float(Float),
    /// `width` bits to `d` and `x`.
    Unpack,
    /// `width` bits of `a` and `b`.
    Pack,
    /// The address of a variable in the frame's local memory, or of a parameter.
    LocalAddress,
    ParamAddress,
    /// Adds the start of the window of the space.
    ToGeneric(Space),
    FromGeneric(Space),
    IsSpace(Space),
    Special(Special),
    /// `count` registers `d`, `b`, `c`, `x` from `[a + imm]`.
    Load {
        space: Space,
        order: Order,
        scope: Scope,
        signed: bool,
        count: u8,
    },
    /// `count` registers `d`, `b`, `c`, `x` to `[a + imm]`.
    Store {
        space: Space,
        order: Order,
        scope: Scope,
        count: u8,
    },
    /// `[a + imm]` with `b`, and `c` for an exchange that compares.
    Atomic {
        op: Atomic,
        space: Space,
        order: Order,
        scope: Scope,
        signed: bool,
    },
    Fence {
        order: Order,
        scope: Scope,
    },
    Branch,
    /// The index in `a`, the table in `imm`.
    BranchTable,
    /// The call site in `imm`.
    Call,
    Return,
    Exit,
    Trap,
    Nanosleep,
    /// The barrier's number in `a`, the count of threads in `b` or `ALWAYS`, the predicate in `c`.
    Barrier {
        arrive: bool,
        reduce: Option<Vote>,
    },
    /// The mask is in `b`.
    WarpBarrier,
    /// The value `a`, the lane `b`, the clamp `c`, the mask `x`; the predicate in `imm`, or -1.
    Shuffle(Shuffle),
    /// The predicate `a`, negated if `imm` is 1; the mask `b`.
    Vote(Vote),
    /// The value `a`, the mask `b`. `all`: the predicate in `x`.
    Match {
        all: bool,
    },
    /// The value `a`, the mask `b`.
    Reduce {
        op: Atomic,
        signed: bool,
    },
    ActiveMask,
}

impl Op {
    /// The lanes of a warp, or the threads of a block, execute the instruction together.
    pub fn meets(self) -> bool {
        matches!(
            self,
            Op::Barrier { .. }
                | Op::WarpBarrier
                | Op::Shuffle(_)
                | Op::Vote(_)
                | Op::Match { .. }
                | Op::Reduce { .. }
                | Op::ActiveMask
        )
    }
}

/// One instruction.
#[derive(Clone, Copy, Debug)]
pub struct Instruction {
    pub op: Op,
    pub width: u8,
    pub extra: u8,
    /// The guard is false when it should be true.
    pub negate: bool,
    pub guard: u16,
    pub d: u16,
    pub a: u16,
    pub b: u16,
    pub c: u16,
    pub x: u16,
    pub imm: i32,
}

/// Bytes to copy between the parameters of two frames.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    pub from: u32,
    pub to: u32,
    pub size: u32,
}

/// A call: the callee, and the offsets of the caller's variables.
#[derive(Clone, Debug)]
pub struct Call {
    /// In a module: the index in its functions. In a program: the index in the program's functions.
    pub target: usize,
    pub line: u32,
    /// Offset and size of each argument and each result among the caller's parameters.
    pub arguments: Vec<(u32, u32)>,
    pub results: Vec<(u32, u32)>,
    /// What a call and a return copy; the linker fills it in.
    pub copies_in: Vec<Transfer>,
    pub copies_out: Vec<Transfer>,
}

/// A slot that holds the address of a variable.
#[derive(Clone, Copy, Debug)]
pub struct Relocation {
    pub slot: u16,
    /// In a module: the index in its variables. In a program: the index in the program's variables.
    pub variable: usize,
    pub addend: i64,
    pub width: u8,
}

/// The code of a function.
#[derive(Clone, Debug, Default)]
pub struct Body {
    pub code: Vec<Instruction>,
    pub lines: Vec<u32>,
    /// The file's number and the line of the source of each instruction; line 0 where the text does not say it.
    pub sources: Vec<(u32, u32)>,
    /// The first contents of a frame's slots.
    pub slots: Vec<u64>,
    pub relocations: Vec<Relocation>,
    pub calls: Vec<Call>,
    pub tables: Vec<Vec<u32>>,
    /// Bytes of a frame's parameters: those of the function, and those of its calls.
    pub params: u32,
    pub local: u32,
    pub registers: u32,
}

/// The value's lower `width` bits.
#[inline(always)]
pub fn low(value: u64, width: u8) -> u64 {
    value & (u64::MAX >> (64 - u32::from(width)))
}

/// The value of `width` bits, with its sign.
#[inline(always)]
pub fn signed(value: u64, width: u8) -> i64 {
    let shift = 64 - u32::from(width);
    ((value << shift) as i64) >> shift
}
