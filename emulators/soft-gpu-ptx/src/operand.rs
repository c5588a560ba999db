//! Types and operands as written in PTX.

/// The type of an instruction, a register or a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Type {
    /// `b`, `u`, `s`, `f`, or `p` for a predicate.
    pub kind: char,
    pub bits: u8,
}

impl Type {
    /// Parses a type such as `u32`, `b64` or `pred`.
    pub fn parse(name: &str) -> Option<Self> {
        if name == "pred" {
            return Some(Self { kind: 'p', bits: 1 });
        }
        let kind = name.chars().next().filter(|kind| "busf".contains(*kind))?;
        let bits = match &name[1..] {
            "8" if kind != 'f' => 8,
            "16" => 16,
            "32" => 32,
            "64" => 64,
            "128" if kind == 'b' => 128,
            _ => return None,
        };
        Some(Self { kind, bits })
    }

    pub fn signed(self) -> bool {
        self.kind == 's'
    }

    pub fn float(self) -> bool {
        self.kind == 'f'
    }

    pub fn integer(self) -> bool {
        !self.float() && self.bits > 1
    }
}

/// An operand as written.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand<'a> {
    Name(&'a str),
    Not(&'a str),
    Pair(&'a str, &'a str),
    Sum(&'a str, i64),
    Integer(u64),
    Float(u32),
    Double(u64),
    Address(Box<Operand<'a>>, i64),
    Vector(Vec<Operand<'a>>),
    List(Vec<Operand<'a>>),
}
