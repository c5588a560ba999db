//! Splits PTX text into tokens.

use crate::error::{Error, Kind};

/// A token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Token<'a> {
    /// A name, an opcode with its modifiers, a directive with its dot, or a register.
    Word(&'a str),
    /// An integer.
    Integer(u64),
    /// An integer that ends in `U`.
    Unsigned(u64),
    /// `0f...`: the bits of a 32-bit float.
    Float(u32),
    /// `0d...`: the bits of a 64-bit float.
    Double(u64),
    /// The contents of a string.
    Text(&'a str),
    /// Any other single character.
    Sign(char),
}

/// Returns the tokens of `text`, each with its line.
pub fn tokens<'a>(module: &str, text: &'a str) -> Result<Vec<(Token<'a>, u32)>, Error> {
    let bytes = text.as_bytes();
    let mut found = Vec::with_capacity(text.len() / 6);
    let (mut at, mut line) = (0, 1u32);
    let wrong = |line: u32, form: &str, cause: String| Error {
        kind: Kind::Syntax,
        module: module.into(),
        line,
        form: form.chars().take(60).collect(),
        cause,
    };
    while at < bytes.len() {
        let start = at;
        match bytes[at] {
            b'\n' => {
                line += 1;
                at += 1;
            }
            b' ' | b'\t' | b'\r' => at += 1,
            // cuModuleLoadData takes a NUL-terminated string.
            0 => break,
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                while at < bytes.len() && bytes[at] != b'\n' {
                    at += 1;
                }
                // Where clang says what a `.loc` is inlined at.
                let is_loc = found.iter().rev().take(4).any(|token| *token == (Token::Word(".loc"), line));
                if is_loc && text[start..at].contains(" @[ ") {
                    found.push((Token::Text(&text[start..at]), line));
                }
            }
            b'/' if bytes.get(at + 1) == Some(&b'*') => {
                let Some(length) = text[at + 2..].find("*/") else {
                    return Err(wrong(line, "/*", "the comment is not closed".into()));
                };
                line += text[at..at + 2 + length].matches('\n').count() as u32;
                at += length + 4;
            }
            b'"' => {
                let Some(length) = text[at + 1..].find(['"', '\n']).filter(|&end| bytes[at + 1 + end] == b'"') else {
                    return Err(wrong(line, "\"", "the string does not end on its line".into()));
                };
                found.push((Token::Text(&text[at + 1..at + 1 + length]), line));
                at += length + 2;
            }
            b'0'..=b'9' => {
                while at < bytes.len() && bytes[at].is_ascii_alphanumeric() {
                    at += 1;
                }
                let word = &text[start..at];
                let token = number(word)
                    .ok_or_else(|| wrong(line, word, "is not a number that the interpreter knows: write integers in full, floats as 0f or 0d with their bits".into()))?;
                found.push((token, line));
            }
            byte if starts_word(byte) => {
                at += 1;
                while at < bytes.len() {
                    if in_word(bytes[at]) {
                        at += 1;
                    } else if bytes[at..].starts_with(b"::") && bytes.get(at + 2).is_some_and(|&next| in_word(next)) {
                        at += 2;
                    } else {
                        break;
                    }
                }
                found.push((Token::Word(&text[start..at]), line));
            }
            byte if b",;[]{}():+-@!<>=|*/&^?~".contains(&byte) => {
                found.push((Token::Sign(byte as char), line));
                at += 1;
            }
            _ => {
                let character = text[at..].chars().next().unwrap_or_default();
                return Err(wrong(line, &character.to_string(), "is not a character of PTX".into()));
            }
        }
    }
    Ok(found)
}

fn starts_word(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || b"_$%.".contains(&byte)
}

fn in_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_$%.".contains(&byte)
}

fn number(word: &str) -> Option<Token<'static>> {
    let lower = word.to_ascii_lowercase();
    if let Some(bits) = lower.strip_prefix("0f") {
        return (bits.len() == 8).then(|| u32::from_str_radix(bits, 16).ok().map(Token::Float))?;
    }
    if let Some(bits) = lower.strip_prefix("0d") {
        return (bits.len() == 16).then(|| u64::from_str_radix(bits, 16).ok().map(Token::Double))?;
    }
    let digits = lower.strip_suffix('u').unwrap_or(&lower);
    let (digits, radix) = match digits.as_bytes() {
        [b'0', b'x', ..] => (&digits[2..], 16),
        [b'0', b'b', ..] => (&digits[2..], 2),
        [b'0', _, ..] => (&digits[1..], 8),
        _ => (digits, 10),
    };
    let token = if digits.len() < lower.len() && lower.ends_with('u') { Token::Unsigned } else { Token::Integer };
    u64::from_str_radix(digits, radix).ok().map(token)
}
