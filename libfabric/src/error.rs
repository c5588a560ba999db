//! Errors from libfabric, and from finding it.

use std::path::PathBuf;

use crate::{Version, bindings};

/// A failure of libfabric, or to find it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The shared library, or one that it needs, wasn't found.
    #[error(
        "libfabric cannot be loaded ({reason}); install it (Debian: apt-get install libfabric1) or point \
         FERROGIN_LIBFABRIC to libfabric.so.1"
    )]
    LibraryMissing {
        /// The argument of the dynamic linker.
        path: PathBuf,
        /// The dynamic linker's answer.
        reason: String,
    },
    /// The shared library exists but doesn't load: it isn't a shared library, or the process is short of memory or
    /// descriptors.
    #[error(
        "libfabric cannot be loaded ({reason}); check FERROGIN_LIBFABRIC, and the limits of memory and of open files (`ulimit -v`, \
         `ulimit -n`)"
    )]
    LibraryRefused {
        /// The argument of the dynamic linker.
        path: PathBuf,
        /// The dynamic linker's answer.
        reason: String,
    },
    /// The shared library was loaded, but isn't a libfabric.
    #[error("{} has no symbol {symbol}: it is not a libfabric; check FERROGIN_LIBFABRIC", path.display())]
    SymbolMissing {
        /// The loaded library.
        path: PathBuf,
        /// The first missing symbol.
        symbol: &'static str,
    },
    /// The loaded libfabric, or the provider in it, lacks something that newer releases have.
    #[error(
        "{feature} needs libfabric {needed} or newer, but {found} is loaded; install a newer one and name it in FERROGIN_LIBFABRIC"
    )]
    TooOld {
        /// What is missing.
        feature: &'static str,
        /// The first release that has it.
        needed: Version,
        /// The loaded release.
        found: Version,
    },
    /// The caller named a provider directory after libfabric had read FI_PROVIDER_PATH.
    #[error(
        "libfabric was initialised before the provider directory {dir} was named; start the program with \
         FI_PROVIDER_PATH={dir}",
        dir = dir.display()
    )]
    TooLateForProviderDir {
        /// The directory.
        dir: PathBuf,
    },
    /// This process's libfabric has no such provider, although the caller named its directory.
    #[error(
        "libfabric knows no provider {provider} although FI_PROVIDER_PATH was set to find it in {dir}; either no \
         lib*-fi.so that provides it is there, or something in this process initialised libfabric first; in that \
         case, start the program with FI_PROVIDER_PATH={dir} (FI_LOG_LEVEL=info shows what libfabric loads)",
        dir = dir.display()
    )]
    ProviderNotLoaded {
        /// The provider in the hints.
        provider: String,
        /// The directory given to [`crate::Libfabric::use_provider_dir`].
        dir: PathBuf,
    },
    /// No provider has an info that matches the hints.
    #[error("libfabric {version} offers nothing that matches the hints ({hints}); providers it knows: {known}")]
    NoMatch {
        /// The loaded libfabric.
        version: Version,
        /// The hints, in words.
        hints: String,
        /// The names of all registered providers.
        known: String,
    },
    /// An argument can't be passed to libfabric.
    #[error("{what}")]
    Argument {
        /// The invalid argument, and why it's invalid.
        what: String,
    },
    /// A call into libfabric or a provider failed.
    #[error("{call} failed: {text} (error {code}){}", fix(*code))]
    Call {
        /// The name of the libfabric function.
        call: &'static str,
        /// The positive libfabric error code (errno values, or FI_EOTHER and above).
        code: i32,
        /// libfabric's text for the code.
        text: String,
    },
}

impl Error {
    /// Returns the error of a system call.
    pub fn system(call: &'static str, error: &std::io::Error) -> Self {
        let code = error.raw_os_error().unwrap_or(bindings::FI_EOTHER);
        // The message has the code already.
        let text = error.to_string();
        Self::Call { call, code, text: text.strip_suffix(&format!(" (os error {code})")).unwrap_or(&text).to_owned() }
    }

    /// Returns the positive libfabric error code, if a call failed.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Call { code, .. } => Some(*code),
            _ => None,
        }
    }
}

/// Returns the fix for a code that has one.
fn fix(code: i32) -> &'static str {
    match code {
        bindings::FI_EMFILE => "; this process has too many open files: raise `ulimit -n`",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_a_system_call_has_its_code_once() {
        let refused = std::io::Error::from_raw_os_error(111);
        assert_eq!(Error::system("connect", &refused).to_string(), "connect failed: Connection refused (error 111)");
    }
}
