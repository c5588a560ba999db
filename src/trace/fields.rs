//! A decoded work request's or completion's fields.

use std::fmt::{self, Write};

use serde_json::json;

/// A field's value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// A count or a number.
    Number(u64),
    /// A key, an address, or other bits.
    Hex(u64),
    /// One bit.
    Flag(bool),
    /// Bytes in memory order.
    Bytes(Vec<u8>),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Hex(bits) => write!(f, "{bits:#x}"),
            Self::Flag(flag) => write!(f, "{}", u8::from(*flag)),
            Self::Bytes(bytes) => f.write_str(&hex(bytes)),
        }
    }
}

impl Value {
    fn json(&self) -> serde_json::Value {
        match self {
            Self::Number(number) | Self::Hex(number) => json!(number),
            Self::Flag(flag) => json!(flag),
            Self::Bytes(bytes) => json!(hex(bytes)),
        }
    }
}

/// Formats bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// One field.
#[derive(Debug, Clone)]
pub struct Field {
    /// Its first byte.
    pub at: usize,
    pub name: String,
    pub value: Value,
    pub meaning: String,
}

/// A decoded entry.
#[derive(Debug, Default)]
pub struct Decoded {
    pub fields: Vec<Field>,
    /// What the entry is, in one line.
    pub summary: String,
    /// Why a card would refuse the entry, or why it cannot be one.
    pub problems: Vec<String>,
}

impl Decoded {
    pub fn add(&mut self, at: usize, name: impl Into<String>, value: Value, meaning: impl Into<String>) {
        self.fields.push(Field { at, name: name.into(), value, meaning: meaning.into() });
    }

    pub fn number(&mut self, at: usize, name: impl Into<String>, value: impl Into<u64>, meaning: impl Into<String>) {
        self.add(at, name, Value::Number(value.into()), meaning);
    }

    pub fn hex(&mut self, at: usize, name: impl Into<String>, value: impl Into<u64>, meaning: impl Into<String>) {
        self.add(at, name, Value::Hex(value.into()), meaning);
    }

    pub fn flag(&mut self, at: usize, name: &str, value: bool, meaning: &str) {
        self.add(at, name, Value::Flag(value), meaning);
    }

    pub fn bytes(&mut self, at: usize, name: impl Into<String>, value: &[u8], meaning: impl Into<String>) {
        self.add(at, name, Value::Bytes(value.to_vec()), meaning);
    }

    /// Adds bits or bytes that must be zero: only if they aren't, as a field and a problem.
    pub fn zero(&mut self, at: usize, name: &str, value: &[u8]) {
        if value.iter().any(|byte| *byte != 0) {
            self.bytes(at, name, value, "must be zero");
            self.problems.push(format!("{name} must be zero"));
        }
    }

    /// Returns the fields as lines, without the summary.
    pub fn lines(&self, indent: &str) -> String {
        let width = |of: &dyn Fn(&Field) -> usize, most: usize| self.fields.iter().map(of).max().unwrap_or(0).min(most);
        let names = width(&|field| field.name.len(), 40);
        let values = width(&|field| field.value.to_string().len(), 20);
        let mut text = String::new();
        for Field { at, name, value, meaning } in &self.fields {
            let line = format!("{indent}{at:>4}  {name:<names$}  {:<values$}  {meaning}", value.to_string());
            let _ = writeln!(text, "{}", line.trim_end());
        }
        for problem in &self.problems {
            let _ = writeln!(text, "{indent}error: {problem}");
        }
        text
    }

    pub fn json(&self) -> serde_json::Value {
        let fields = self.fields.iter().map(|field| {
            json!({"byte": field.at, "name": field.name, "value": field.value.json(), "meaning": field.meaning})
        });
        json!({"summary": self.summary, "fields": fields.collect::<Vec<_>>(), "errors": self.problems})
    }
}

/// Converts a name like `LocalBadLength` to the form used in documents: `LOCAL_BAD_LENGTH`.
pub fn screaming(name: &str) -> String {
    let mut text = String::new();
    for (n, letter) in name.chars().enumerate() {
        if n > 0 && letter.is_ascii_uppercase() {
            text.push('_');
        }
        text.push(letter.to_ascii_uppercase());
    }
    text
}
