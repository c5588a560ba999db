//! Steps through the tokens of a module.

use crate::error::{Error, Kind};
use crate::module::Module;
use crate::token::{Token, tokens};

/// A module's parser.
pub struct Parser<'a> {
    pub tokens: Vec<(Token<'a>, u32)>,
    pub at: usize,
    pub module: Module,
}

impl<'a> Parser<'a> {
    /// Makes a parser at the beginning of a text.
    pub fn new(name: &str, text: &'a str) -> Result<Self, Error> {
        Ok(Self { tokens: tokens(name, text)?, at: 0, module: Module { name: name.into(), ..Module::default() } })
    }

    pub fn line(&self) -> u32 {
        let last = self.tokens.len().saturating_sub(1);
        self.tokens.get(self.at.min(last)).map_or(1, |token| token.1)
    }

    pub fn error(&self, kind: Kind, line: u32, form: &str, cause: impl Into<String>) -> Error {
        Error { kind, module: self.module.name.clone(), line, form: form.into(), cause: cause.into() }
    }

    pub fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).map(|token| token.0)
    }

    pub fn next(&mut self) -> Result<Token<'a>, Error> {
        let token = self.peek().ok_or_else(|| {
            self.error(Kind::Syntax, self.line(), "end of the text", "the text ends within a statement")
        })?;
        self.at += 1;
        Ok(token)
    }

    pub fn take(&mut self, sign: char) -> bool {
        let found = self.peek() == Some(Token::Sign(sign));
        self.at += usize::from(found);
        found
    }

    pub fn expect(&mut self, sign: char) -> Result<(), Error> {
        if self.take(sign) { Ok(()) } else { Err(self.unexpected(&format!("`{sign}`"))) }
    }

    pub fn unexpected(&self, wanted: &str) -> Error {
        let found = match self.peek() {
            None => "the end of the text".into(),
            Some(Token::Word(word)) => word.to_owned(),
            Some(Token::Integer(value) | Token::Unsigned(value)) => value.to_string(),
            Some(Token::Float(bits)) => format!("0f{bits:08X}"),
            Some(Token::Double(bits)) => format!("0d{bits:016X}"),
            Some(Token::Text(text)) => format!("\"{text}\""),
            Some(Token::Sign(sign)) => sign.to_string(),
        };
        self.error(Kind::Syntax, self.line(), &found, format!("{wanted} is expected here"))
    }

    pub fn word(&mut self, what: &str) -> Result<&'a str, Error> {
        if let Some(Token::Word(word)) = self.peek() {
            self.at += 1;
            return Ok(word);
        }
        Err(self.unexpected(what))
    }

    pub fn name(&mut self) -> Result<&'a str, Error> {
        match self.peek() {
            Some(Token::Word(word)) if !word.starts_with('.') => self.word("a name"),
            _ => Err(self.unexpected("a name")),
        }
    }

    pub fn integer(&mut self) -> Result<u64, Error> {
        let negative = self.take('-');
        if let Some(Token::Integer(value) | Token::Unsigned(value)) = self.peek() {
            self.at += 1;
            return Ok(if negative { value.wrapping_neg() } else { value });
        }
        Err(self.unexpected("an integer"))
    }

    /// Parses an addend such as `+8` or `-2*4`, if there is one.
    pub fn addend(&mut self) -> Result<i64, Error> {
        if self.take('+') || self.peek() == Some(Token::Sign('-')) { Ok(self.expression()? as i64) } else { Ok(0) }
    }

    pub fn small(&mut self, what: &str, most: u64) -> Result<u64, Error> {
        let line = self.line();
        let value = self.integer()?;
        if value > most {
            return Err(self.error(Kind::Limit, line, &value.to_string(), format!("{what} is at most {most}")));
        }
        Ok(value)
    }

    /// Skips the rest of the line, which is where `.file` and `.loc` end.
    pub fn skip_line(&mut self, line: u32) -> Result<(), Error> {
        while self.tokens.get(self.at).is_some_and(|token| token.1 == line) {
            self.at += 1;
        }
        Ok(())
    }

    /// Returns the number of the text that says where the `.loc` at this line is inlined, or 0 if it has none.
    pub fn inlined(&mut self, line: u32) -> u32 {
        let own = self.tokens[self.at..].iter().take_while(|token| token.1 == line);
        let Some((Token::Text(text), _)) = own.last().filter(|(token, _)| matches!(token, Token::Text(_))) else {
            return 0;
        };
        let texts = &mut self.module.inlined;
        if texts.is_empty() {
            texts.push(String::new());
        }
        // The same text comes again and again, mostly soon.
        if let Some(found) = texts.iter().rposition(|known| known == text) {
            return found as u32;
        }
        texts.push((*text).to_owned());
        texts.len() as u32 - 1
    }

    /// Parses `.file 1 "name.cu"`, which names the file that `.loc` refers to by number.
    pub fn file(&mut self, line: u32) -> Result<(), Error> {
        if let [(Token::Integer(number), _), (Token::Text(name), _), ..] = self.tokens[self.at..] {
            self.module.files.push((number as u32, name.into()));
        }
        self.skip_line(line)
    }

    pub fn unknown(&self, line: u32, name: &str) -> Error {
        self.error(
            Kind::Symbol,
            line,
            name,
            "the name has no declaration before this line; declare it, `.extern` if it is in another module",
        )
    }
}
