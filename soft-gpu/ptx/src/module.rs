//! One PTX text, parsed.

use crate::error::{Error, Kind};

/// One PTX text, parsed and decoded.
#[derive(Clone, Debug)]
pub struct Module {
    pub(crate) name: String,
}

impl Module {
    /// Parses `text`. `name` is for messages.
    ///
    /// # Errors
    ///
    /// The first defect of the text, with its line. A form that the interpreter does not know is a defect.
    pub fn parse(name: &str, text: &str) -> Result<Self, Error> {
        let _ = text;
        Err(Error {
            kind: Kind::Form,
            module: name.into(),
            line: 1,
            form: ".version".into(),
            cause: "the interpreter parses no PTX yet".into(),
        })
    }
}
