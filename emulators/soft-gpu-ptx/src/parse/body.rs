//! Parses function bodies: names, labels, and operands of instructions.

use super::allocate::allocate;
use super::context::{Context, Local, Names, Prototype};
use super::parser::Parser;
use crate::error::{Error, Kind};
use crate::module::{Linkage, Place, Slot};
use crate::operand::{Operand, Type};
use crate::token::Token;

/// The nesting limit of blocks.
const MAX_DEPTH: usize = 64;
/// The limit of a function's local memory, in bytes.
const MAX_LOCAL: u32 = 512 << 10;

impl<'a> Parser<'a> {
    /// Parses a function's statements, up to its closing brace.
    pub(super) fn body(&mut self, context: &mut Context<'a>, kernel: bool) -> Result<(), Error> {
        let mut stack = Vec::new();
        loop {
            let line = self.line();
            match self.next()? {
                Token::Sign('{') => {
                    if stack.len() == MAX_DEPTH {
                        return Err(self.error(Kind::Limit, line, "{", format!("blocks are at most {MAX_DEPTH} deep")));
                    }
                    stack.push(context.scope);
                    context.scopes.push(Names { parent: context.scope, ..Names::default() });
                    context.scope = context.scopes.len() - 1;
                }
                Token::Sign('}') => match stack.pop() {
                    Some(outer) => context.scope = outer,
                    None => break,
                },
                Token::Sign(';') => {}
                Token::Sign('@') => {
                    let negate = self.take('!');
                    let name = self.name()?;
                    let Some(Local::Register { slot, width: 1 }) = context.find(name) else {
                        return Err(self.error(Kind::Operand, line, name, "a guard is a predicate register"));
                    };
                    let opcode = self.name()?;
                    self.instruction(context, opcode, line, Some((slot, negate)))?;
                }
                Token::Word(word) if word.starts_with('.') => self.local_directive(context, word, line)?,
                Token::Word(word) => {
                    if self.take(':') {
                        self.label(context, word, line)?;
                    } else {
                        self.instruction(context, word, line, None)?;
                    }
                }
                _ => {
                    self.at -= 1;
                    return Err(self.unexpected("a statement"));
                }
            }
        }
        self.end(context, kernel)
    }

    fn label(&mut self, context: &mut Context<'a>, word: &'a str, line: u32) -> Result<(), Error> {
        if let Some(Token::Word(directive @ (".branchtargets" | ".calltargets" | ".callprototype"))) = self.peek() {
            self.at += 1;
            if directive == ".callprototype" {
                return self.prototype(context, word);
            }
            if directive != ".branchtargets" {
                return Err(self.error(Kind::Form, line, directive, "an indirect call takes a .callprototype"));
            }
            let table = context.body.tables.len();
            let mut labels = Vec::new();
            loop {
                labels.push(0);
                let label = self.name()?;
                context.entries.push((table, labels.len() - 1, context.scope, label, line));
                if !self.take(',') {
                    break;
                }
            }
            self.expect(';')?;
            context.body.tables.push(labels);
            context.scopes[context.scope].tables.insert(word, table);
            return Ok(());
        }
        let here = context.body.code.len() as u32;
        if context.scopes[context.scope].labels.insert(word, here).is_some() {
            return Err(self.error(Kind::Duplicate, line, word, "the label is defined twice"));
        }
        Ok(())
    }

    /// Parses what follows `.callprototype`: `(.param .b32 _) _ (.param .b64 _);`.
    fn prototype(&mut self, context: &mut Context<'a>, label: &'a str) -> Result<(), Error> {
        let slots = |found: Vec<(&str, Slot)>| found.into_iter().map(|(_, slot)| slot).collect();
        let results = slots(self.parameters(&mut 0)?);
        self.name()?;
        let parameters = slots(self.parameters(&mut 0)?);
        while self.peek() == Some(Token::Word(".noreturn")) {
            self.at += 1;
        }
        context.scopes[context.scope].prototypes.insert(label, Prototype { parameters, results });
        self.expect(';')
    }

    fn local_directive(&mut self, context: &mut Context<'a>, word: &'a str, line: u32) -> Result<(), Error> {
        match word {
            ".reg" => {
                let space = self.word("a type")?;
                let Some(ty) = space.strip_prefix('.').and_then(Type::parse) else {
                    return Err(self.error(
                        Kind::Form,
                        line,
                        &format!(".reg {space}"),
                        "the interpreter does not support registers of this type",
                    ));
                };
                loop {
                    let name = self.name()?;
                    let count = if self.take('<') {
                        let count = self.small("the number of registers", 1 << 16)? as u32;
                        self.expect('>')?;
                        Some(count)
                    } else {
                        None
                    };
                    let first = self.slots(context, count.unwrap_or(1), ty.bits, line)?;
                    context.body.registers += count.unwrap_or(1);
                    let scope = &mut context.scopes[context.scope];
                    match count {
                        Some(count) => scope.ranges.push((name, first, count, ty.bits)),
                        None => {
                            scope.names.insert(name, Local::Register { slot: first, width: ty.bits });
                        }
                    }
                    if !self.take(',') {
                        return self.expect(';');
                    }
                }
            }
            ".local" => {
                let (name, size, align, open, _) = self.typed()?;
                let start = u64::from(context.body.local).next_multiple_of(align);
                if open || start + size > u64::from(MAX_LOCAL) {
                    return Err(self.error(
                        Kind::Limit,
                        line,
                        name,
                        format!("the local memory of a thread has at most {MAX_LOCAL} bytes"),
                    ));
                }
                context.body.local = (start + size) as u32;
                context.scopes[context.scope].names.insert(name, Local::Stack(start as u32));
                self.expect(';')
            }
            ".param" => {
                let (name, size, align, _, _) = self.typed()?;
                let mut offset = context.body.params;
                let slot = self.place(&mut offset, size, align as u32, line, name)?;
                context.body.params = offset;
                context.scopes[context.scope].names.insert(name, Local::Param(slot));
                self.expect(';')
            }
            ".shared" | ".global" | ".const" => {
                let place = match word {
                    ".shared" => Place::Shared,
                    ".global" => Place::Global,
                    _ => Place::Constant,
                };
                let variable = self.variable(place, Linkage::Local, line)?;
                let index = self.module.variables.len();
                let short = self.tokens[..self.at].iter().rev().find_map(|token| match token.0 {
                    Token::Word(word) if word == variable.name => Some(word),
                    _ => None,
                });
                self.module.variables.push(variable);
                if let Some(name) = short {
                    context.scopes[context.scope].names.insert(name, Local::Variable(index));
                }
                self.expect(';')
            }
            ".loc" => {
                if let [(Token::Integer(file), _), (Token::Integer(source), _), ..] = self.tokens[self.at..] {
                    context.source = (file as u32, source as u32);
                    context.inlined = self.inlined(line);
                }
                self.skip_line(line)
            }
            ".file" => self.file(line),
            ".pragma" => {
                self.next()?;
                self.expect(';')
            }
            _ => Err(self.error(
                Kind::Form,
                line,
                word,
                "the interpreter does not support this directive in a function's body",
            )),
        }
    }

    /// Parses an instruction's operands and semicolon, and decodes the instruction.
    fn instruction(
        &mut self,
        context: &mut Context<'a>,
        opcode: &'a str,
        line: u32,
        guard: Option<(u16, bool)>,
    ) -> Result<(), Error> {
        let mut operands = Vec::new();
        if !self.take(';') {
            loop {
                operands.push(self.operand(0, opcode.starts_with("call"))?);
                if self.take(';') {
                    break;
                }
                self.expect(',')?;
            }
        }
        self.decode(context, opcode, line, guard, &operands)
    }

    /// Parses an operand. Only a call has lists in parentheses; elsewhere they belong to an expression.
    fn operand(&mut self, depth: usize, call: bool) -> Result<Operand<'a>, Error> {
        match self.peek() {
            Some(Token::Sign('[')) => {
                self.at += 1;
                let base = match self.peek() {
                    Some(Token::Word(_)) => Operand::Name(self.name()?),
                    _ => Operand::Integer(self.expression()?),
                };
                let offset = self.addend()?;
                self.expect(']')?;
                Ok(Operand::Address(Box::new(base), offset))
            }
            Some(Token::Sign(open @ ('{' | '('))) if depth == 0 && (call || open == '{') => {
                self.at += 1;
                let close = if open == '{' { '}' } else { ')' };
                let mut list = Vec::new();
                while !self.take(close) {
                    list.push(self.operand(1, call)?);
                    if self.peek() != Some(Token::Sign(close)) {
                        self.expect(',')?;
                    }
                }
                Ok(if open == '{' { Operand::Vector(list) } else { Operand::List(list) })
            }
            Some(Token::Sign('!')) if matches!(self.tokens.get(self.at + 1), Some((Token::Word(_), _))) => {
                self.at += 1;
                Ok(Operand::Not(self.name()?))
            }
            Some(Token::Word(_)) => {
                let name = self.name()?;
                if self.take('|') {
                    return Ok(Operand::Pair(name, self.name()?));
                }
                if self.take('+') {
                    return Ok(Operand::Sum(name, self.expression()? as i64));
                }
                Ok(Operand::Name(name))
            }
            Some(Token::Float(bits)) => {
                self.at += 1;
                Ok(Operand::Float(bits))
            }
            Some(Token::Double(bits)) => {
                self.at += 1;
                Ok(Operand::Double(bits))
            }
            Some(Token::Integer(_) | Token::Unsigned(_) | Token::Sign('-' | '+' | '~' | '!' | '(')) => {
                Ok(Operand::Integer(self.expression()?))
            }
            _ => Err(self.unexpected("an operand")),
        }
    }

    /// Finishes a body: resolves the targets of branches.
    fn end(&mut self, context: &mut Context<'a>, kernel: bool) -> Result<(), Error> {
        let line = self.line();
        // Reaching the end of a body returns.
        self.finish(context, kernel, line)?;
        for (at, scope, label) in std::mem::take(&mut context.branches) {
            let line = context.body.lines[at];
            let target = context.label(scope, label).ok_or_else(|| self.no_label(line, label))?;
            context.body.code[at].imm = target as i32;
        }
        for (table, entry, scope, label, line) in std::mem::take(&mut context.entries) {
            let target = context.label(scope, label).ok_or_else(|| self.no_label(line, label))?;
            context.body.tables[table][entry] = target;
        }
        for (at, mut scope, name) in std::mem::take(&mut context.uses) {
            let table = loop {
                if let Some(&table) = context.scopes[scope].tables.get(name) {
                    break table;
                }
                if scope == 0 {
                    return Err(self.no_label(context.body.lines[at], name));
                }
                scope = context.scopes[scope].parent;
            };
            context.body.code[at].imm = table as i32;
        }
        allocate(&mut context.body);
        Ok(())
    }

    fn no_label(&self, line: u32, label: &str) -> Error {
        self.error(Kind::Symbol, line, label, "the function has no such label")
    }
}
