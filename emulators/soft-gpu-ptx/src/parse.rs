//! Directives, declarations and the structure of functions.

mod body;

use crate::decode::Type;
use crate::error::{Error, Kind};
use crate::module::{Function, Linkage, Module, Place, Slot, Symbol, Variable};
use crate::token::{Token, tokens};

pub use body::{Context, Local};

/// The largest size of a variable, and of all parameters of a function.
const MOST_BYTES: u64 = 1 << 32;
const MOST_PARAMETERS: u32 = 1 << 16;

/// The parser of one module.
pub struct Parser<'a> {
    tokens: Vec<(Token<'a>, u32)>,
    at: usize,
    pub module: Module,
}

/// Parses the text.
pub fn parse(name: &str, text: &str) -> Result<Module, Error> {
    let mut parser =
        Parser { tokens: tokens(name, text)?, at: 0, module: Module { name: name.into(), ..Module::default() } };
    parser.header()?;
    while parser.at < parser.tokens.len() {
        parser.item()?;
    }
    Ok(parser.module)
}

impl<'a> Parser<'a> {
    pub fn line(&self) -> u32 {
        let last = self.tokens.len().saturating_sub(1);
        self.tokens.get(self.at.min(last)).map_or(1, |token| token.1)
    }

    pub fn error(&self, kind: Kind, line: u32, form: &str, cause: impl Into<String>) -> Error {
        Error { kind, module: self.module.name.clone(), line, form: form.into(), cause: cause.into() }
    }

    fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).map(|token| token.0)
    }

    fn next(&mut self) -> Result<Token<'a>, Error> {
        let token = self.peek().ok_or_else(|| {
            self.error(Kind::Syntax, self.line(), "end of the text", "the text ends within a statement")
        })?;
        self.at += 1;
        Ok(token)
    }

    fn take(&mut self, sign: char) -> bool {
        let found = self.peek() == Some(Token::Sign(sign));
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, sign: char) -> Result<(), Error> {
        if self.take(sign) { Ok(()) } else { Err(self.unexpected(&format!("`{sign}`"))) }
    }

    fn unexpected(&self, wanted: &str) -> Error {
        let found = match self.peek() {
            None => "the end of the text".into(),
            Some(Token::Word(word)) => word.to_owned(),
            Some(Token::Integer(value)) => value.to_string(),
            Some(Token::Float(bits)) => format!("0f{bits:08X}"),
            Some(Token::Double(bits)) => format!("0d{bits:016X}"),
            Some(Token::Text(text)) => format!("\"{text}\""),
            Some(Token::Sign(sign)) => sign.to_string(),
        };
        self.error(Kind::Syntax, self.line(), &found, format!("{wanted} is expected here"))
    }

    fn word(&mut self, what: &str) -> Result<&'a str, Error> {
        if let Some(Token::Word(word)) = self.peek() {
            self.at += 1;
            return Ok(word);
        }
        Err(self.unexpected(what))
    }

    fn name(&mut self) -> Result<&'a str, Error> {
        match self.peek() {
            Some(Token::Word(word)) if !word.starts_with('.') => self.word("a name"),
            _ => Err(self.unexpected("a name")),
        }
    }

    fn integer(&mut self) -> Result<u64, Error> {
        let negative = self.take('-');
        if let Some(Token::Integer(value)) = self.peek() {
            self.at += 1;
            return Ok(if negative { value.wrapping_neg() } else { value });
        }
        Err(self.unexpected("an integer"))
    }

    /// `+8` or `-8`, if there is one.
    fn addend(&mut self) -> Result<i64, Error> {
        if self.take('+') || self.peek() == Some(Token::Sign('-')) { Ok(self.integer()? as i64) } else { Ok(0) }
    }

    fn small(&mut self, what: &str, most: u64) -> Result<u64, Error> {
        let line = self.line();
        let value = self.integer()?;
        if value > most {
            return Err(self.error(Kind::Limit, line, &value.to_string(), format!("{what} is at most {most}")));
        }
        Ok(value)
    }

    /// `.version`, `.target`, `.address_size`.
    fn header(&mut self) -> Result<(), Error> {
        let line = self.line();
        let missing = "a PTX text begins with .version, .target and .address_size 64";
        if self.peek() != Some(Token::Word(".version")) {
            return Err(self.error(Kind::Syntax, line, ".version", missing));
        }
        self.at += 1;
        let major = self.integer()?;
        let minor = match self.next()? {
            // The lexer reads `8.2` as `8` and the word `.2`.
            Token::Word(word) => word.strip_prefix('.').and_then(|minor| minor.parse().ok()),
            _ => None,
        };
        let Some(minor) = minor else {
            return Err(self.error(Kind::Syntax, line, ".version", "a version is two numbers, like 8.2"));
        };
        if !(6..=9).contains(&major) {
            return Err(self.error(
                Kind::Version,
                line,
                &format!(".version {major}.{minor}"),
                "the interpreter knows PTX 6.0 to 9.x; compile for one of these versions",
            ));
        }
        self.module.version = (major as u32, minor);
        let line = self.line();
        if self.peek() != Some(Token::Word(".target")) {
            return Err(self.error(Kind::Syntax, line, ".target", missing));
        }
        self.at += 1;
        loop {
            let target = self.name()?;
            let number = target.strip_prefix("sm_").map(|number| number.trim_end_matches(['a', 'f']));
            match number.and_then(|number| number.parse().ok()) {
                Some(number @ 30..=129) => self.module.target = number,
                _ if target == "debug" => {}
                _ => {
                    return Err(self.error(
                        Kind::Target,
                        line,
                        &format!(".target {target}"),
                        "the interpreter knows the targets sm_30 to sm_129; compile for one of these",
                    ));
                }
            }
            if !self.take(',') {
                break;
            }
        }
        let line = self.line();
        if self.peek() != Some(Token::Word(".address_size")) {
            return Err(self.error(Kind::Syntax, line, ".address_size", missing));
        }
        self.at += 1;
        let size = self.integer()?;
        if size != 64 {
            return Err(self.error(
                Kind::Target,
                line,
                &format!(".address_size {size}"),
                "addresses have 64 bits; compile for nvptx64",
            ));
        }
        Ok(())
    }

    /// One declaration or definition of the module.
    fn item(&mut self) -> Result<(), Error> {
        let mut linkage = Linkage::Local;
        loop {
            let line = self.line();
            let word = self.word("a directive")?;
            match word {
                ".visible" => linkage = Linkage::Visible,
                ".weak" => linkage = Linkage::Weak,
                ".common" => linkage = Linkage::Common,
                ".extern" => linkage = Linkage::Extern,
                ".func" => return self.function(linkage, false, line),
                ".entry" => return self.function(linkage, true, line),
                ".global" | ".const" | ".shared" => {
                    let place = match word {
                        ".global" => Place::Global,
                        ".const" => Place::Constant,
                        _ => Place::Shared,
                    };
                    loop {
                        let variable = self.variable(place, linkage, line)?;
                        self.declare(variable)?;
                        if !self.take(',') {
                            return self.expect(';');
                        }
                    }
                }
                ".file" | ".loc" => return self.skip_line(line),
                ".section" => return self.skip_section(),
                ".pragma" => {
                    self.next()?;
                    return self.expect(';');
                }
                _ => return Err(self.error(Kind::Form, line, word, "the interpreter knows no such directive")),
            }
        }
    }

    /// `.file` and `.loc` end with their line.
    fn skip_line(&mut self, line: u32) -> Result<(), Error> {
        while self.tokens.get(self.at).is_some_and(|token| token.1 == line) {
            self.at += 1;
        }
        Ok(())
    }

    /// Debug information.
    fn skip_section(&mut self) -> Result<(), Error> {
        while self.peek() != Some(Token::Sign('{')) {
            self.next()?;
        }
        while self.next()? != Token::Sign('}') {}
        Ok(())
    }

    /// `.align 8 .b8 name[16]`, after the state space.
    fn typed(&mut self) -> Result<(&'a str, u64, u64, bool, Type), Error> {
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
                // A parameter that is a pointer: its space and the alignment of its target.
                ".ptr" => {
                    while let Some(Token::Word(".global" | ".shared" | ".local" | ".const" | ".align")) = self.peek() {
                        if self.word("")? == ".align" {
                            self.integer()?;
                        }
                    }
                }
                _ => {
                    let ty =
                        Type::parse(word.trim_start_matches('.')).filter(|ty| ty.bits > 1 && word.starts_with('.'));
                    let Some(ty) = ty else {
                        return Err(self.error(
                            Kind::Form,
                            line,
                            word,
                            "the interpreter knows no such type of a variable",
                        ));
                    };
                    if self.peek() == Some(Token::Word(".ptr")) {
                        self.at += 1;
                        while let Some(Token::Word(".global" | ".shared" | ".local" | ".const" | ".align")) =
                            self.peek()
                        {
                            if self.word("")? == ".align" {
                                self.integer()?;
                            }
                        }
                    }
                    let name = self.name()?;
                    let element = u64::from(ty.bits / 8);
                    let (mut size, mut open) = (element, false);
                    while self.take('[') {
                        if self.take(']') {
                            open = true;
                            continue;
                        }
                        let count = self.small("a length", MOST_BYTES)?;
                        size = size.saturating_mul(count);
                        self.expect(']')?;
                    }
                    if size > MOST_BYTES {
                        return Err(self.error(
                            Kind::Limit,
                            line,
                            name,
                            format!("a variable has at most {MOST_BYTES} bytes"),
                        ));
                    }
                    return Ok((name, size, align.max(element), open, ty));
                }
            }
        }
    }

    fn variable(&mut self, place: Place, linkage: Linkage, line: u32) -> Result<Variable, Error> {
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
                return Err(self.error(Kind::Syntax, line, name, "shared memory has no first contents"));
            }
            self.contents(&mut variable, ty)?;
            if open {
                size = variable.bytes.len() as u64;
            }
            if variable.bytes.len() as u64 > size {
                return Err(self.error(Kind::Syntax, line, name, "the first contents are larger than the variable"));
            }
        } else if open && linkage != Linkage::Extern {
            return Err(self.error(Kind::Syntax, line, name, "the array has no length"));
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
                let target = match self.module.symbols.get(name) {
                    Some(&Symbol::Variable(target)) if self.module.variables[target].place != Place::Shared => target,
                    Some(_) => {
                        return Err(self.error(
                            Kind::Form,
                            line,
                            name,
                            "contents are numbers and addresses of global variables; calls are direct only",
                        ));
                    }
                    None => return Err(self.unknown(line, name)),
                };
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
            _ => self.integer()?,
        };
        if variable.bytes.len() as u64 + bytes as u64 > MOST_BYTES {
            return Err(self.error(Kind::Limit, line, &variable.name, "the first contents are too large"));
        }
        let mut wide = [0; 16];
        wide[..8].copy_from_slice(&value.to_le_bytes());
        variable.bytes.extend_from_slice(&wide[..bytes]);
        Ok(())
    }

    fn unknown(&self, line: u32, name: &str) -> Error {
        self.error(
            Kind::Symbol,
            line,
            name,
            "the name has no declaration before this line; declare it, `.extern` if it is in another module",
        )
    }

    /// Enters a variable among the module's names.
    fn declare(&mut self, variable: Variable) -> Result<usize, Error> {
        let Some(&symbol) = self.module.symbols.get(&variable.name) else {
            let index = self.module.variables.len();
            self.module.symbols.insert(variable.name.clone(), Symbol::Variable(index));
            self.module.variables.push(variable);
            return Ok(index);
        };
        let Symbol::Variable(index) = symbol else {
            return Err(self.error(Kind::Duplicate, variable.line, &variable.name, "the name is a function's, too"));
        };
        let old = &self.module.variables[index];
        if old.place != variable.place {
            return Err(self.error(
                Kind::Signature,
                variable.line,
                &variable.name,
                format!("line {} declares the variable in another state space", old.line),
            ));
        }
        match (old.linkage, variable.linkage) {
            (_, Linkage::Extern) => {}
            (Linkage::Extern, _) => self.module.variables[index] = variable,
            _ => {
                return Err(self.error(
                    Kind::Duplicate,
                    variable.line,
                    &variable.name,
                    format!("line {} defines the variable, too", old.line),
                ));
            }
        }
        Ok(index)
    }

    /// `(.param .b64 a, .param .b32 b)`, if there is one.
    fn parameters(&mut self, offset: &mut u32) -> Result<Vec<(&'a str, Slot)>, Error> {
        let mut found = Vec::new();
        if !self.take('(') {
            return Ok(found);
        }
        while !self.take(')') {
            let line = self.line();
            let space = self.word("`.param`")?;
            if space != ".param" {
                return Err(self.error(Kind::Form, line, space, "parameters and results are in .param"));
            }
            let (name, size, align, open, _) = self.typed()?;
            if open {
                return Err(self.error(Kind::Form, line, name, "parameters have a fixed size"));
            }
            found.push((name, self.place(offset, size, align as u32, line, name)?));
            if self.peek() != Some(Token::Sign(')')) {
                self.expect(',')?;
            }
        }
        Ok(found)
    }

    fn place(&self, offset: &mut u32, size: u64, align: u32, line: u32, name: &str) -> Result<Slot, Error> {
        let start = offset.next_multiple_of(align.max(1));
        let most = MOST_PARAMETERS;
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

    fn function(&mut self, linkage: Linkage, kernel: bool, line: u32) -> Result<(), Error> {
        let mut offset = 0;
        let mut later = 0;
        let results = if kernel { Vec::new() } else { self.parameters(&mut later)? };
        let name = self.name()?;
        let parameters = self.parameters(&mut offset)?;
        let mut function = Function {
            name: name.into(),
            line,
            linkage,
            kernel,
            parameters: parameters.iter().map(|parameter| parameter.1).collect(),
            results: Vec::new(),
            body: None,
            max_threads: 1024,
            required_block: None,
        };
        // Results are after the parameters.
        let mut placed = Vec::new();
        for (name, slot) in results {
            let slot = self.place(&mut offset, u64::from(slot.size), slot.align, line, name)?;
            function.results.push(slot);
            placed.push((name, slot));
        }
        loop {
            let line = self.line();
            match self.next()? {
                Token::Word(word @ (".maxntid" | ".reqntid")) => {
                    let mut size = [1; 3];
                    for (axis, size) in size.iter_mut().enumerate() {
                        if axis > 0 && !self.take(',') {
                            break;
                        }
                        *size = self.small("a block's size", 1024)? as u32;
                    }
                    let threads: u32 = size.iter().product();
                    if threads == 0 || size.iter().map(|&size| u64::from(size)).product::<u64>() > 1024 {
                        return Err(self.error(Kind::Limit, line, word, "a block has 1 to 1024 threads"));
                    }
                    function.max_threads = threads;
                    if word == ".reqntid" {
                        function.required_block = Some(size);
                    }
                }
                Token::Word(".minnctapersm" | ".maxnreg" | ".maxnctapersm") => {
                    self.integer()?;
                }
                Token::Word(".noreturn") => {}
                Token::Word(".pragma") => {
                    self.next()?;
                    self.expect(';')?;
                }
                Token::Word(word) => {
                    return Err(self.error(
                        Kind::Form,
                        line,
                        word,
                        "the interpreter knows no such directive of a function",
                    ));
                }
                Token::Sign(';') => return self.define(function).map(|_| ()),
                Token::Sign('{') => {
                    if linkage == Linkage::Extern {
                        return Err(self.error(Kind::Syntax, line, name, "an .extern function has no body"));
                    }
                    let mut context = Context::new(offset, parameters.iter().chain(&placed).copied());
                    let index = self.define(function)?;
                    self.body(&mut context, kernel)?;
                    self.module.instructions += context.body.code.len();
                    self.module.functions[index].body = Some(context.body);
                    return Ok(());
                }
                _ => {
                    self.at -= 1;
                    return Err(self.unexpected("`{` or `;`"));
                }
            }
        }
    }

    /// Enters a function among the module's names.
    fn define(&mut self, function: Function) -> Result<usize, Error> {
        let Some(&symbol) = self.module.symbols.get(&function.name) else {
            let index = self.module.functions.len();
            self.module.symbols.insert(function.name.clone(), Symbol::Function(index));
            self.module.functions.push(function);
            return Ok(index);
        };
        let Symbol::Function(index) = symbol else {
            return Err(self.error(Kind::Duplicate, function.line, &function.name, "the name is a variable's, too"));
        };
        let old = &self.module.functions[index];
        if old.body.is_some() && self.peek().is_some() && self.tokens[self.at - 1].0 == Token::Sign('{') {
            return Err(self.error(
                Kind::Duplicate,
                function.line,
                &function.name,
                format!("line {} defines the function, too", old.line),
            ));
        }
        if let Some(cause) = unlike(old, &function) {
            return Err(self.error(
                Kind::Signature,
                function.line,
                &function.name,
                format!("{cause}, unlike in line {}", old.line),
            ));
        }
        if old.body.is_none() {
            self.module.functions[index] = function;
        }
        Ok(index)
    }
}

/// How two declarations of a function differ.
pub fn unlike(one: &Function, other: &Function) -> Option<&'static str> {
    let same = |one: &[Slot], other: &[Slot]| one.iter().map(|slot| slot.size).eq(other.iter().map(|slot| slot.size));
    if one.kernel != other.kernel {
        Some("one is a kernel, the other a function")
    } else if !same(&one.parameters, &other.parameters) {
        Some("the parameters differ")
    } else if !same(&one.results, &other.results) {
        Some("the results differ")
    } else {
        None
    }
}
