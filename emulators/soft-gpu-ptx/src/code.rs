//! The compact form of a function that the interpreter executes.
//!
//! Registers, constants and addresses are all slots of a frame: a call copies the function's slots, with the constants
//! filled in, to the top of the thread's stack. A slot holds the value's bits, and zeros above its width.

/// The `guard` of an instruction that has none.
pub const ALWAYS: u16 = u16::MAX;

/// A comparison. The operands' `Class` says whether it is unsigned, signed or on floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    /// Floats only, from here on: `Equ` to `Geu` are also true if an operand is NaN.
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

/// How a comparison is combined with a predicate.
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
    /// An offset into the thread's local memory.
    Local,
    /// An offset from the start of the frame's local memory.
    LocalFrame,
    /// An offset into the thread's parameters.
    Param,
    /// An offset from the start of the frame's parameters.
    ParamFrame,
}

/// The memory order of an access.
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

/// The operation of a vote or a barrier reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
    Count,
}

/// How a shuffle chooses its source lane.
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

/// A function of one 32-bit float.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unary {
    Reciprocal,
    Log2,
    Exp2,
}

/// A float format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    F64,
    F32,
    F16,
    Bf16,
    E4m3,
    E5m2,
}

/// How a conversion from a float rounds to an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

/// An operation on an mbarrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mbarrier {
    /// The number of arrivals is in `b`.
    Init,
    Invalidate,
    /// The number of arrivals is in `b`, or with `expects` the number of bytes, for one arrival.
    Arrive {
        expects: bool,
    },
    /// The number of bytes is in `b`.
    Expect,
    /// The phase's state is in `b`, or its parity. With `tries`, a thread that has to wait ends its turn.
    Wait {
        parity: bool,
        tries: bool,
    },
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
    /// The block's place in its cluster, and the cluster's size.
    ClusterCtaid(u8),
    ClusterNctaid(u8),
    /// The cluster's place in the grid, and the number of clusters.
    Clusterid(u8),
    Nclusterid(u8),
    ClusterRank,
    ClusterSize,
    IsExplicitCluster,
    Environment(u8),
}

/// What an instruction does. `d` is the result's slot; `a`, `b` and `c` are the operands' slots; `width` is the type's
/// width in bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Mov,
    Add,
    /// `take`: with carry-in; `give`: with carry-out.
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
    /// `d` is 1 if `a` is 0, and 0 otherwise.
    LogicalNot,
    /// `imm` is the truth table of the three-input function.
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
    /// The result is all ones or zero, in 32 bits.
    Set {
        compare: Compare,
        class: Class,
    },
    /// Converts from `imm` to `width` bits; a signed result is extended to `extra` bits.
    Convert {
        from_signed: bool,
        to_signed: bool,
    },
    /// The float conversions are from `imm` to `width` bits.
    FloatConvert,
    FloatFromInteger {
        signed: bool,
    },
    FloatToInteger {
        signed: bool,
        rounding: Rounding,
    },
    /// Rounds to an integer of the same float type.
    FloatToIntegral(Rounding),
    Float(Float),
    /// With `flush`, subnormal operands and results are zero.
    Unary {
        op: Unary,
        flush: bool,
    },
    /// On one or two values of 16 bits, according to `width`.
    Half {
        op: Float,
        format: Format,
    },
    /// Converts a float, or with `pair` two: from the halves of `a`, or from `a` and `b` in 32 bits each, of which `a`
    /// goes to the upper half.
    Recode {
        from: Format,
        to: Format,
        saturate: bool,
        pair: bool,
    },
    /// Splits `a` into `d` and `x`, of `width` bits each.
    Unpack,
    /// Joins `a` and `b`, of `width` bits each.
    Pack,
    /// Copies `a` to `d` and `b` to `x`: the halves of 128 bits.
    MovPair,
    /// The address of a variable in the frame's local memory, or (`ParamAddress`) of a parameter.
    LocalAddress,
    ParamAddress,
    /// Adds the start of the space's window.
    ToGeneric(Space),
    FromGeneric(Space),
    IsSpace(Space),
    Special(Special),
    /// Loads `count` of the registers `d`, `b`, `c`, `x` from `[a + imm]`.
    Load {
        space: Space,
        order: Order,
        scope: Scope,
        signed: bool,
        count: u8,
    },
    /// Stores `count` of the registers `d`, `b`, `c`, `x` to `[a + imm]`.
    Store {
        space: Space,
        order: Order,
        scope: Scope,
        count: u8,
    },
    /// Updates `[a + imm]` with `b`, and `c` for a compare-exchange.
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
    /// Makes the thread's accesses visible to bulk copies.
    ProxyFence {
        shared: bool,
        global: bool,
    },
    /// Makes initialized mbarriers visible to bulk copies.
    MbarrierFence,
    /// The mbarrier is at `[a + imm]`.
    Mbarrier {
        op: Mbarrier,
        space: Space,
        order: Order,
        scope: Scope,
    },
    /// Copies `c` bytes from `[b]` to `[a]`: to shared memory and the mbarrier `[x]`, or to global memory.
    Bulk {
        to_shared: bool,
    },
    BulkCommit,
    /// `imm` groups may be under way.
    BulkWait {
        read: bool,
    },
    /// `setmaxnreg` and `griddepcontrol`, which don't affect results.
    Nothing,
    Branch,
    /// The index is in `a`, the table in `imm`.
    BranchTable,
    /// The call site is in `imm`, the address for an indirect call in `a`.
    Call,
    Return,
    Exit,
    Trap,
    Nanosleep,
    /// The barrier's number is in `a`, the thread count in `b` (`ALWAYS`: the whole block), the predicate in `c`.
    Barrier {
        arrive: bool,
        reduce: Option<Vote>,
    },
    /// The mask is in `b`.
    WarpBarrier,
    /// The value is in `a`, the lane in `b`, the clamp in `c`, the mask in `x`; the predicate's slot is `imm`, or -1
    /// for none.
    Shuffle(Shuffle),
    /// The predicate is in `a`, negated if `imm` is 1; the mask in `b`.
    Vote(Vote),
    /// The value is in `a`, the mask in `b`; with `all`, the predicate goes to `x`.
    Match {
        all: bool,
    },
    /// The value is in `a`, the mask in `b`.
    Reduce {
        op: Atomic,
        signed: bool,
    },
    /// The mask is in `b`; the lane goes to `d`, the predicate to `x`.
    Elect,
    ActiveMask,
}

impl Op {
    /// Whether the lanes of a warp, or the threads of a block, execute the instruction together.
    pub fn meets(self) -> bool {
        matches!(
            self,
            Op::Barrier { .. }
                | Op::WarpBarrier
                | Op::Shuffle(_)
                | Op::Vote(_)
                | Op::Match { .. }
                | Op::Reduce { .. }
                | Op::Elect
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
    /// The guard is negated.
    pub negate: bool,
    pub guard: u16,
    pub d: u16,
    pub a: u16,
    pub b: u16,
    pub c: u16,
    pub x: u16,
    pub imm: i32,
}

/// Returns an instruction without operands.
pub fn blank(op: Op, width: u8) -> Instruction {
    Instruction { op, width, extra: width, negate: false, guard: ALWAYS, d: 0, a: 0, b: 0, c: 0, x: 0, imm: 0 }
}

/// What a name in a module refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Symbol {
    Function(usize),
    Variable(usize),
}

/// A call site: the callee, and the offsets of the caller's variables.
#[derive(Clone, Debug)]
pub struct Call {
    /// The index among the module's functions; after linking, among the program's. An indirect call has none.
    pub target: Option<usize>,
    pub line: u32,
    /// Offset and size of each argument and each result among the caller's parameters.
    pub arguments: Vec<(u32, u32)>,
    pub results: Vec<(u32, u32)>,
}

/// A slot that holds the address of a variable or a function.
#[derive(Clone, Copy, Debug)]
pub struct Relocation {
    pub slot: u16,
    /// The index among the module's; after linking, among the program's.
    pub target: Symbol,
    pub addend: i64,
    pub width: u8,
}

/// A function's code.
#[derive(Clone, Debug, Default)]
pub struct Body {
    pub code: Vec<Instruction>,
    pub lines: Vec<u32>,
    /// Each instruction's source file number and line; line 0 where the text doesn't give it.
    pub sources: Vec<(u32, u32)>,
    /// Where each instruction is inlined: an index among the module's texts, of which the first is empty.
    pub inlined: Vec<u32>,
    /// The initial contents of a frame's slots.
    pub slots: Vec<u64>,
    pub relocations: Vec<Relocation>,
    pub calls: Vec<Call>,
    pub tables: Vec<Vec<u32>>,
    /// Bytes of parameters per frame: the function's own, and those for its calls.
    pub params: u32,
    pub local: u32,
    pub registers: u32,
}

/// Returns the value's low `width` bits.
#[inline(always)]
pub fn low(value: u64, width: u8) -> u64 {
    value & (u64::MAX >> (64 - u32::from(width)))
}

/// Sign-extends a value of `width` bits.
#[inline(always)]
pub fn signed(value: u64, width: u8) -> i64 {
    let shift = 64 - u32::from(width);
    ((value << shift) as i64) >> shift
}
