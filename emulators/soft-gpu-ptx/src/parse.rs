//! Parses directives, declarations and the structure of functions.

mod allocate;
mod body;
pub mod context;
mod expression;
pub mod parser;
mod variable;

use crate::code::Symbol;
use crate::error::{Error, Kind};
use crate::module::{Function, Linkage, Module, Place, Slot, Variable};
use crate::token::Token;
use context::Context;
use parser::Parser;

/// The most blocks per cluster.
const MAX_CLUSTER: u64 = 16;

impl Module {
    /// Parses `text`. `name` is for error messages.
    ///
    /// # Errors
    ///
    /// The first error in the text, with its line. Forms that the interpreter doesn't support are errors.
    pub fn parse(name: &str, text: &str) -> Result<Self, Error> {
        let mut parser = Parser::new(name, text)?;
        parser.header()?;
        while parser.at < parser.tokens.len() {
            parser.item()?;
        }
        Ok(parser.module)
    }
}

impl<'a> Parser<'a> {
    /// Parses `.version`, `.target` and `.address_size`.
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
                "the interpreter supports PTX 6.0 to 9.x; compile for one of these versions",
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
            let name = target.strip_prefix("sm_");
            let number = name.map(|name| name.strip_suffix(['a', 'f']).unwrap_or(name));
            match number.and_then(|number| number.parse().ok()) {
                Some(number @ 30..=129) => {
                    self.module.target = number;
                    self.module.only_for = target.chars().last().filter(char::is_ascii_alphabetic);
                }
                _ if target == "debug" => {}
                _ => {
                    return Err(self.error(
                        Kind::Target,
                        line,
                        &format!(".target {target}"),
                        "the interpreter supports the targets sm_30 to sm_129; compile for one of these",
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

    /// Parses one declaration or definition.
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
                ".file" => return self.file(line),
                ".loc" => return self.skip_line(line),
                ".section" => return self.skip_section(),
                ".pragma" => {
                    self.next()?;
                    return self.expect(';');
                }
                // rustc's end of a section, which a later one names.
                label if label.starts_with("$L__sec_end") => return self.expect(':'),
                _ => return Err(self.error(Kind::Form, line, word, "the interpreter does not support this directive")),
            }
        }
    }

    /// Skips debug information.
    fn skip_section(&mut self) -> Result<(), Error> {
        while self.peek() != Some(Token::Sign('{')) {
            self.next()?;
        }
        while self.next()? != Token::Sign('}') {}
        Ok(())
    }

    /// Adds a variable to the module's names.
    fn declare(&mut self, variable: Variable) -> Result<usize, Error> {
        let Some(&symbol) = self.module.symbols.get(&variable.name) else {
            let index = self.module.variables.len();
            self.module.symbols.insert(variable.name.clone(), Symbol::Variable(index));
            self.module.variables.push(variable);
            return Ok(index);
        };
        let Symbol::Variable(index) = symbol else {
            return Err(self.error(Kind::Duplicate, variable.line, &variable.name, "a function has the same name"));
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
                    format!("line {} also defines the variable", old.line),
                ));
            }
        }
        Ok(index)
    }

    /// Parses a list such as `(.param .b64 a, .param .b32 b)`, if there is one.
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
            required_cluster: None,
        };
        // Results come after the parameters.
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
                Token::Word(word @ ".reqnctapercluster") => {
                    let mut size = [1; 3];
                    for (axis, size) in size.iter_mut().enumerate() {
                        if axis > 0 && !self.take(',') {
                            break;
                        }
                        *size = self.small("a cluster's size", MAX_CLUSTER)? as u32;
                    }
                    if !(1..=MAX_CLUSTER).contains(&u64::from(size.iter().product::<u32>())) {
                        return Err(self.error(Kind::Limit, line, word, "a cluster has 1 to 16 blocks"));
                    }
                    function.required_cluster = Some(size);
                }
                Token::Word(".explicitcluster") => {}
                Token::Word(".minnctapersm" | ".maxnreg" | ".maxnctapersm" | ".maxclusterrank") => {
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
                        "the interpreter does not support this directive of a function",
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

    /// Adds a function to the module's names.
    fn define(&mut self, function: Function) -> Result<usize, Error> {
        let Some(&symbol) = self.module.symbols.get(&function.name) else {
            let index = self.module.functions.len();
            self.module.symbols.insert(function.name.clone(), Symbol::Function(index));
            self.module.functions.push(function);
            return Ok(index);
        };
        let Symbol::Function(index) = symbol else {
            return Err(self.error(Kind::Duplicate, function.line, &function.name, "a variable has the same name"));
        };
        let old = &self.module.functions[index];
        if old.body.is_some() && self.peek().is_some() && self.tokens[self.at - 1].0 == Token::Sign('{') {
            return Err(self.error(
                Kind::Duplicate,
                function.line,
                &function.name,
                format!("line {} also defines the function", old.line),
            ));
        }
        if let Some(cause) = old.unlike(&function) {
            return Err(self.error(
                Kind::Signature,
                function.line,
                &function.name,
                format!("{cause}, but not in line {}", old.line),
            ));
        }
        if old.body.is_none() {
            self.module.functions[index] = function;
        }
        Ok(index)
    }
}
