//! Parses declarations of variables and parameters.

use super::parser::Parser;
use crate::code::Symbol;
use crate::error::{Error, Kind};
use crate::module::{Linkage, Place, Slot, Variable};
use crate::operand::Type;
use crate::token::Token;

/// The largest size of a variable, and of all of a function's parameters.
const MAX_BYTES: u64 = 1 << 32;
const MAX_PARAMETERS: u32 = 1 << 16;

impl<'a> Parser<'a> {
    /// Skips what `.ptr` says about a pointer parameter: its space and the target's alignment.
    fn skip_pointer(&mut self) -> Result<(), Error> {
        while let Some(Token::Word(".global" | ".shared" | ".local" | ".const" | ".align")) = self.peek() {
            if self.word("")? == ".align" {
                self.integer()?;
            }
        }
        Ok(())
    }

    /// Parses a declaration such as `.align 8 .b8 name[16]`, after the state space.
    pub fn typed(&mut self) -> Result<(&'a str, u64, u64, bool, Type), Error> {
        let mut align = 0;
        loop {
            let line = self.line();
            let word = self.word("a type")?;
            match word {
                ".align" => {
                    align = self.small("an alignment", 1 << 20)?;
                    if !align.is_power_of_two() {
                        return Err(self.error(Kind::Syntax, line, ".align", "an alignment is a power of two"));
                    }
                }
                ".ptr" => self.skip_pointer()?,
                _ => {
                    let ty =
                        Type::parse(word.trim_start_matches('.')).filter(|ty| ty.bits > 1 && word.starts_with('.'));
                    let Some(ty) = ty else {
                        return Err(self.error(
                            Kind::Form,
                            line,
                            word,
                            "the interpreter does not support variables of this type",
                        ));
                    };
                    if self.peek() == Some(Token::Word(".ptr")) {
                        self.at += 1;
                        self.skip_pointer()?;
                    }
                    let name = self.name()?;
                    let element = u64::from(ty.bits / 8);
                    let (mut size, mut open) = (element, false);
                    while self.take('[') {
                        if self.take(']') {
                            open = true;
                            continue;
                        }
                        let count = self.small("a length", MAX_BYTES)?;
                        size = size.saturating_mul(count);
                        self.expect(']')?;
                    }
                    if size > MAX_BYTES {
                        return Err(self.error(
                            Kind::Limit,
                            line,
                            name,
                            format!("a variable has at most {MAX_BYTES} bytes"),
                        ));
                    }
                    return Ok((name, size, align.max(element), open, ty));
                }
            }
        }
    }

    pub fn variable(&mut self, place: Place, linkage: Linkage, line: u32) -> Result<Variable, Error> {
        let (name, mut size, align, open, ty) = self.typed()?;
        let mut variable = Variable {
            name: name.into(),
            line,
            linkage,
            place,
            size: 0,
            align,
            bytes: Vec::new(),
            addresses: Vec::new(),
            dynamic: open && place == Place::Shared && linkage == Linkage::Extern,
        };
        if self.take('=') {
            if place == Place::Shared {
                return Err(self.error(Kind::Syntax, line, name, "shared memory cannot be initialised"));
            }
            self.contents(&mut variable, ty)?;
            if open {
                size = variable.bytes.len() as u64;
            }
            if variable.bytes.len() as u64 > size {
                return Err(self.error(Kind::Syntax, line, name, "the initial value is larger than the variable"));
            }
        } else if open && linkage != Linkage::Extern {
            return Err(self.error(Kind::Syntax, line, name, "the array needs a length"));
        }
        variable.size = if open && linkage == Linkage::Extern { 0 } else { size };
        Ok(variable)
    }

    fn contents(&mut self, variable: &mut Variable, ty: Type) -> Result<(), Error> {
        let mut depth = 0;
        loop {
            if self.take('{') {
                depth += 1;
                continue;
            }
            if !(depth > 0 && self.peek() == Some(Token::Sign('}'))) {
                self.element(variable, ty)?;
            }
            while depth > 0 && self.take('}') {
                depth -= 1;
            }
            if depth == 0 {
                return Ok(());
            }
            self.expect(',')?;
        }
    }

    fn element(&mut self, variable: &mut Variable, ty: Type) -> Result<(), Error> {
        let line = self.line();
        let bytes = usize::from(ty.bits / 8);
        let value = match self.peek() {
            Some(Token::Word(word)) => {
                self.at += 1;
                let generic = word == "generic";
                if generic {
                    self.expect('(')?;
                }
                let name = if generic { self.name()? } else { word };
                if generic {
                    self.expect(')')?;
                }
                let addend = self.addend()?;
                let target = *self.module.symbols.get(name).ok_or_else(|| self.unknown(line, name))?;
                let fits = match target {
                    Symbol::Variable(target) => self.module.variables[target].place != Place::Shared,
                    Symbol::Function(target) => !self.module.functions[target].kernel && !generic && addend == 0,
                };
                if !fits {
                    let cause = "contents are numbers and addresses of global variables and of functions";
                    return Err(self.error(Kind::Form, line, name, cause));
                }
                if bytes != 8 {
                    return Err(self.error(Kind::Operand, line, name, "an address needs an element of 64 bits"));
                }
                variable.addresses.push((variable.bytes.len(), target, addend));
                0
            }
            Some(Token::Float(bits)) => {
                self.at += 1;
                u64::from(bits)
            }
            Some(Token::Double(bits)) => {
                self.at += 1;
                bits
            }
            _ => self.expression()?,
        };
        if variable.bytes.len() as u64 + bytes as u64 > MAX_BYTES {
            return Err(self.error(Kind::Limit, line, &variable.name, "the initial value is too large"));
        }
        let mut wide = [0; 16];
        wide[..8].copy_from_slice(&value.to_le_bytes());
        variable.bytes.extend_from_slice(&wide[..bytes]);
        Ok(())
    }

    pub fn place(&self, offset: &mut u32, size: u64, align: u32, line: u32, name: &str) -> Result<Slot, Error> {
        let start = offset.next_multiple_of(align.max(1));
        let most = MAX_PARAMETERS;
        if u64::from(start) + size > u64::from(most) {
            return Err(self.error(
                Kind::Limit,
                line,
                name,
                format!("the parameters of a function have at most {most} bytes"),
            ));
        }
        *offset = start + size as u32;
        Ok(Slot { offset: start, size: size as u32, align })
    }
}
