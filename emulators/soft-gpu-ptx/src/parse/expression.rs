//! Constant expressions: C's operators on integers of 64 bits, which are signed unless a literal is too large for that
//! or ends in `U`.

use super::parser::Parser;
use crate::error::{Error, Kind};
use crate::token::Token;

/// The nesting limit of operators and parentheses.
const MAX_DEPTH: usize = 64;

#[derive(Clone, Copy)]
struct Value {
    bits: u64,
    signed: bool,
}

/// The binary operators, by the signs they are written with, and how tightly they bind.
const OPERATORS: [(&str, u8); 18] = [
    ("<<", 8),
    (">>", 8),
    ("<=", 7),
    (">=", 7),
    ("==", 6),
    ("!=", 6),
    ("&&", 2),
    ("||", 1),
    ("*", 10),
    ("/", 10),
    ("%", 10),
    ("+", 9),
    ("-", 9),
    ("<", 7),
    (">", 7),
    ("&", 5),
    ("^", 4),
    ("|", 3),
];

/// Computes `a operator b`; `None` for a division by zero. A result is signed if both operands are. The rules are those
/// of ptxas: `%` is always unsigned, and so is `~`.
fn compute(operator: &str, a: Value, b: Value) -> Option<Value> {
    let signed = a.signed && b.signed;
    let (x, y) = (a.bits as i64, b.bits as i64);
    let number = |bits| Some(Value { bits, signed });
    let truth = |is: bool| Some(Value { bits: is.into(), signed: true });
    let order = if signed { x.cmp(&y) } else { a.bits.cmp(&b.bits) };
    match operator {
        "*" => number(a.bits.wrapping_mul(b.bits)),
        "+" => number(a.bits.wrapping_add(b.bits)),
        "-" => number(a.bits.wrapping_sub(b.bits)),
        "/" | "%" if b.bits == 0 => None,
        "/" => number(if signed { x.wrapping_div(y) as u64 } else { a.bits / b.bits }),
        "%" => Some(Value { bits: a.bits % b.bits, signed: false }),
        "<<" => Some(Value { bits: a.bits.wrapping_shl(b.bits as u32), ..a }),
        ">>" if a.signed => Some(Value { bits: x.wrapping_shr(b.bits as u32) as u64, ..a }),
        ">>" => Some(Value { bits: a.bits.wrapping_shr(b.bits as u32), ..a }),
        "<" => truth(order.is_lt()),
        "<=" => truth(order.is_le()),
        ">" => truth(order.is_gt()),
        ">=" => truth(order.is_ge()),
        "==" => truth(order.is_eq()),
        "!=" => truth(order.is_ne()),
        "&" => number(a.bits & b.bits),
        "^" => number(a.bits ^ b.bits),
        "|" => number(a.bits | b.bits),
        "&&" => truth(a.bits != 0 && b.bits != 0),
        _ => truth(a.bits != 0 || b.bits != 0),
    }
}

impl<'a> Parser<'a> {
    /// Parses an expression, which may be a single number.
    pub fn expression(&mut self) -> Result<u64, Error> {
        Ok(self.conditional(0)?.bits)
    }

    fn conditional(&mut self, depth: usize) -> Result<Value, Error> {
        let value = self.binary(1, depth)?;
        if !self.take('?') {
            return Ok(value);
        }
        let yes = self.conditional(depth + 1)?;
        self.expect(':')?;
        let no = self.conditional(depth + 1)?;
        Ok(if value.bits != 0 { yes } else { no })
    }

    /// Parses operators that bind at least as tightly as `least`.
    fn binary(&mut self, least: u8, depth: usize) -> Result<Value, Error> {
        let mut value = self.unary(depth)?;
        while let Some((operator, tightness)) = self.operator().filter(|(_, tightness)| *tightness >= least) {
            let line = self.line();
            self.at += operator.len();
            let right = self.binary(tightness + 1, depth + 1)?;
            value = compute(operator, value, right)
                .ok_or_else(|| self.error(Kind::Syntax, line, operator, "the expression divides by zero"))?;
        }
        Ok(value)
    }

    /// Returns the binary operator at this place.
    fn operator(&self) -> Option<(&'static str, u8)> {
        let sign = |ahead: usize| match self.tokens.get(self.at + ahead).map(|token| token.0) {
            Some(Token::Sign(sign)) => Some(sign),
            // A percent sign begins a name.
            Some(Token::Word("%")) => Some('%'),
            _ => None,
        };
        let here = |text: &str| text.chars().enumerate().all(|(ahead, wanted)| sign(ahead) == Some(wanted));
        OPERATORS.into_iter().find(|(text, _)| here(text))
    }

    fn unary(&mut self, depth: usize) -> Result<Value, Error> {
        if depth > MAX_DEPTH {
            let most = format!("expressions are at most {MAX_DEPTH} deep");
            return Err(self.error(Kind::Limit, self.line(), "(", most));
        }
        match self.peek() {
            Some(Token::Integer(bits)) => {
                self.at += 1;
                Ok(Value { bits, signed: bits <= i64::MAX as u64 })
            }
            Some(Token::Unsigned(bits)) => {
                self.at += 1;
                Ok(Value { bits, signed: false })
            }
            Some(Token::Sign(sign @ ('-' | '+' | '~' | '!'))) => {
                self.at += 1;
                let value = self.unary(depth + 1)?;
                Ok(match sign {
                    '-' => Value { bits: value.bits.wrapping_neg(), ..value },
                    '~' => Value { bits: !value.bits, signed: false },
                    '!' => Value { bits: u64::from(value.bits == 0), signed: true },
                    _ => value,
                })
            }
            Some(Token::Sign('(')) => {
                self.at += 1;
                if let Some(Token::Word(cast @ (".s64" | ".u64"))) = self.peek() {
                    self.at += 1;
                    self.expect(')')?;
                    return Ok(Value { signed: cast == ".s64", ..self.unary(depth + 1)? });
                }
                let value = self.conditional(depth + 1)?;
                self.expect(')')?;
                Ok(value)
            }
            _ => Err(self.unexpected("an integer")),
        }
    }
}
