//! Images and the linker: one or more PTX texts, and what the linker makes of them.
//!
//! cuLinkComplete returns an image in this library's own format: a header and the texts that were added. No other
//! driver accepts it.

use std::ffi::{c_char, c_int};
use std::sync::{Arc, Mutex};

use soft_gpu_ptx::{Error, Kind, Module, Program};

use crate::code::{Code, Outcome};
use crate::context;
use crate::device;
use crate::guard::{In, Out, Text, lock, log, write_text};
use crate::handle::{Table, fresh};

/// `CU_JIT_INPUT_PTX`.
const PTX: c_int = 1;
/// The highest numbers of `CUjitInputType` and `CUjit_option`.
const LAST_INPUT: c_int = 5;
const LAST_OPTION: c_int = 35;

/// The start of an image made by the linker.
const MAGIC: [u8; 8] = *b"\x7fSoftGPU";
/// The longest image. A large library's PTX is a few megabytes.
const MAX_LEN: usize = 1 << 30;

/// PTX texts with their names.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Image {
    texts: Vec<(String, String)>,
}

/// Takes a number from the front of `bytes`.
fn number(bytes: &mut &[u8]) -> Option<usize> {
    let (number, rest) = bytes.split_first_chunk::<8>()?;
    *bytes = rest;
    usize::try_from(u64::from_le_bytes(*number)).ok().filter(|number| *number <= MAX_LEN)
}

/// Takes a length-prefixed text.
fn text(bytes: &mut &[u8]) -> Option<String> {
    let len = number(bytes)?;
    let (text, rest) = bytes.split_at_checked(len)?;
    *bytes = rest;
    String::from_utf8(text.to_vec()).ok()
}

impl Image {
    /// Reads the image at an address from the program; the image tells its own length.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for null, and those of [`Image::of_bytes`].
    pub(crate) fn of_memory(image: In<u8>) -> Outcome<Self> {
        let mut head = Vec::new();
        // A shorter text is NUL-terminated.
        for index in 0..16 {
            head.push(image.at(index)?);
            if head.first() != Some(&MAGIC[0]) && head.last() == Some(&0) {
                break;
            }
        }
        if head.starts_with(&MAGIC) {
            let len = number(&mut &head[8..]).ok_or(Code::INVALID_IMAGE)?;
            return Self::of_bytes("image", &image.list(16 + len)?);
        }
        if let Some(code) = binary(&head) {
            return Err(code);
        }
        Self::of_bytes("PTX", image.text().bytes()?)
    }

    /// Reads an image that comes from a file or the linker.
    ///
    /// # Errors
    /// `CUDA_ERROR_NO_BINARY_FOR_GPU` for machine code, `CUDA_ERROR_INVALID_IMAGE` or `CUDA_ERROR_INVALID_PTX` if it
    /// isn't an image.
    pub(crate) fn of_bytes(name: &str, bytes: &[u8]) -> Outcome<Self> {
        if let Some(mut rest) = bytes.strip_prefix(&MAGIC) {
            let mut read = || {
                if number(&mut rest)? != rest.len() {
                    return None;
                }
                let mut texts = Vec::new();
                while !rest.is_empty() {
                    texts.push((text(&mut rest)?, text(&mut rest)?));
                }
                Some(Self { texts })
            };
            return read().ok_or(Code::INVALID_IMAGE);
        }
        if let Some(code) = binary(bytes) {
            return Err(code);
        }
        // A text may be NUL-terminated.
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        if end == 0 {
            return Err(Code::INVALID_IMAGE);
        }
        let text = String::from_utf8(bytes[..end].to_vec()).map_err(|_| {
            log(format_args!("{name}: the image is not PTX: it is not UTF-8"));
            Code::INVALID_PTX
        })?;
        Ok(Self { texts: vec![(name.to_owned(), text)] })
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut rest = Vec::new();
        for part in self.texts.iter().flat_map(|(name, text)| [name, text]) {
            rest.extend((part.len() as u64).to_le_bytes());
            rest.extend(part.as_bytes());
        }
        [&MAGIC[..], &(rest.len() as u64).to_le_bytes(), &rest].concat()
    }

    /// Links the texts into a program.
    pub(crate) fn link(&self) -> Result<Program, Error> {
        let modules = self.texts.iter().map(|(name, text)| parse(name, text));
        Program::link(modules.collect::<Result<_, _>>()?)
    }

    /// Links like `link`, and writes the compiler's messages to `logs`.
    pub(crate) fn program(&self, logs: &Logs) -> Outcome<Program> {
        self.link().map_err(|error| logs.defect(&error))
    }
}

/// The newest PTX version of the driver's release.
const NEWEST: (u32, u32) = (8, 7);

/// Parses a text. Like the driver, refuses one for a newer release than the driver's, or for a newer GPU than the
/// devices.
fn parse(name: &str, text: &str) -> Result<Module, Error> {
    let module = Module::parse(name, text)?;
    let error = |kind, directive: &str, value: String, cause| {
        let line = text.lines().position(|line| line.trim_start().starts_with(directive));
        let (line, form) = (line.map_or(0, |line| line as u32 + 1), format!("{directive} {value}"));
        Err(Error { kind, module: name.to_owned(), line, form, cause })
    };
    let (major, minor) = module.version();
    if module.version() > NEWEST {
        let cause = "this driver of CUDA 12.8 knows PTX up to 8.7; compile for that version".to_owned();
        return error(Kind::Version, ".version", format!("{major}.{minor}"), cause);
    }
    // Without cuInit there is no device.
    let capability = device::started().map_or((12, 9), |driver| driver.settings.capability);
    if !module.runs_on((10 * capability.0 + capability.1) as u32) {
        let cause = format!(
            "the device has compute capability {}.{}; compile for that, or set SOFTGPU_CAPABILITY",
            capability.0, capability.1
        );
        return error(Kind::Target, ".target", format!("sm_{}", module.target()), cause);
    }
    Ok(module)
}

/// Returns the code for an error that the interpreter found in the PTX.
fn code_of(error: &Error) -> Code {
    match error.kind {
        Kind::Version => Code::UNSUPPORTED_PTX_VERSION,
        Kind::Limit => Code::OUT_OF_MEMORY,
        Kind::Symbol if error.line == 0 => Code::NOT_FOUND,
        _ => Code::INVALID_PTX,
    }
}

/// Returns an error code if the image is machine code, which a software GPU can't execute.
fn binary(bytes: &[u8]) -> Option<Code> {
    const ELF: &[u8] = b"\x7fELF";
    const FAT: [&[u8]; 2] = [&[0x50, 0xed, 0x55, 0xba], &[0xb1, 0x43, 0x62, 0x46]];
    if bytes.starts_with(ELF) || FAT.iter().any(|magic| bytes.starts_with(magic)) {
        log(format_args!(
            "the image is machine code (a cubin or a fat binary); this GPU executes PTX: pass the PTX text that the \
             compiler wrote"
        ));
        return Some(Code::NO_BINARY_FOR_GPU);
    }
    None
}

/// # Errors
/// `CUDA_ERROR_FILE_NOT_FOUND`.
pub(crate) fn read_file(path: &str) -> Outcome<Vec<u8>> {
    std::fs::read(path).map_err(|error| {
        log(format_args!("{path}: {error}"));
        Code::FILE_NOT_FOUND
    })
}

/// The program's buffers for the compiler's messages (information and errors) and their sizes. On return, the driver
/// replaces each size with the length of the text.
#[derive(Clone, Copy, Default)]
pub(crate) struct Logs {
    info: Option<Buffer>,
    error: Option<Buffer>,
}

#[derive(Clone, Copy)]
struct Buffer {
    text: Out<c_char>,
    room: usize,
    /// The option value that holds the size.
    size: Out<usize>,
}

// SAFETY: the program keeps the buffers until it destroys the linker, and the linker's lock lets one call at a time
// write.
unsafe impl Send for Buffer {}

impl Buffer {
    fn write(self, text: &str) {
        if write_text(self.text, self.room, text).is_ok() {
            self.size.set_at(0, text.len().min(self.room - 1));
        }
    }
}

impl Logs {
    /// Reads a call's options; those that mean nothing to an interpreter are accepted.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub(crate) fn read(count: u32, options: In<c_int>, values: Out<usize>) -> Outcome<Self> {
        let mut found = [(0usize, Out::<usize>::null()); 4];
        for (index, option) in options.list(count as usize)?.into_iter().enumerate() {
            if !(0..=LAST_OPTION).contains(&option) {
                return Err(Code::INVALID_VALUE);
            }
            if (3..=6).contains(&option) {
                let value = values.present()?.element(index);
                found[option as usize - 3] = (value.current(), value);
            }
        }
        let buffer = |text: usize| {
            let (address, (room, size)) = (found[text].0, found[text + 1]);
            (address != 0 && room > 0).then(|| Buffer { text: Out::at_address(address), room, size })
        };
        let logs = Self { info: buffer(0), error: buffer(2) };
        [logs.info, logs.error].into_iter().flatten().for_each(|buffer| buffer.write(""));
        Ok(logs)
    }

    pub(crate) fn error(&self, text: &str) {
        if let Some(buffer) = self.error {
            buffer.write(text);
        }
    }

    /// Logs what is wrong with the PTX, for the program and the user, and returns the code.
    fn defect(&self, error: &Error) -> Code {
        log(format_args!("{error}"));
        self.error(&error.to_string());
        code_of(error)
    }
}

/// A linker.
struct Linker {
    logs: Logs,
    image: Image,
    /// The finished image, which lives until the linker is destroyed.
    done: Option<Vec<u8>>,
}

static LINKERS: Table<Mutex<Linker>> = Table::new();

fn linker(handle: usize) -> Outcome<Arc<Mutex<Linker>>> {
    context::current()?;
    LINKERS.get(handle).ok_or(Code::INVALID_HANDLE)
}

/// Adds an input after checking that it is PTX.
fn add(handle: usize, kind: c_int, name: String, bytes: &[u8]) -> Outcome {
    let linker = linker(handle)?;
    let mut linker = lock(&linker);
    match kind {
        PTX => {}
        0..=LAST_INPUT => {
            linker.logs.error("this linker only takes PTX");
            log(format_args!(
                "{name}: the linker only takes PTX (CU_JIT_INPUT_PTX): pass the PTX text that the compiler wrote"
            ));
            return Err(Code::NO_BINARY_FOR_GPU);
        }
        _ => return Err(Code::INVALID_VALUE),
    }
    if linker.done.is_some() {
        return Err(Code::INVALID_VALUE);
    }
    let image = Image::of_bytes(&name, bytes)?;
    for (name, text) in image.texts {
        parse(&name, &text).map_err(|error| linker.logs.defect(&error))?;
        linker.image.texts.push((name, text));
    }
    Ok(())
}

api! {
    cuLinkCreate_v2(count: u32, options: In<c_int>, values: Out<usize>, out: Out<usize>) {
        context::current()?;
        out.present()?;
        let logs = Logs::read(count, options, values)?;
        let handle = fresh();
        LINKERS.insert(handle, Arc::new(Mutex::new(Linker { logs, image: Image { texts: Vec::new() }, done: None })));
        out.set(handle)
    }

    /// Options for a single input have no effect.
    cuLinkAddData_v2(
        handle: usize, kind: c_int, data: In<u8>, bytes: usize, name: Text, count: u32, options: In<c_int>, values: Out<usize>,
    ) {
        linker(handle)?;
        Logs::read(count, options, values)?;
        if data.is_null() || bytes == 0 || bytes > MAX_LEN {
            return Err(Code::INVALID_VALUE);
        }
        // The name is optional.
        let name = name.string().unwrap_or_else(|_| "PTX".to_owned());
        add(handle, kind, name, &data.list(bytes)?)
    }

    cuLinkAddFile_v2(handle: usize, kind: c_int, path: Text, count: u32, options: In<c_int>, values: Out<usize>) {
        linker(handle)?;
        Logs::read(count, options, values)?;
        let path = path.string()?;
        let bytes = read_file(&path)?;
        add(handle, kind, path, &bytes)
    }

    cuLinkComplete(handle: usize, out: Out<usize>, size: Out<usize>) {
        let linker = linker(handle)?;
        out.present()?;
        let mut linker = lock(&linker);
        if linker.image.texts.is_empty() {
            return Err(Code::INVALID_VALUE);
        }
        if linker.done.is_none() {
            linker.image.program(&linker.logs)?;
            linker.done = Some(linker.image.to_bytes());
        }
        let done = linker.done.as_ref().ok_or(Code::UNKNOWN)?;
        size.set_at(0, done.len());
        out.set(done.as_ptr() as usize)
    }

    cuLinkDestroy(handle: usize) {
        context::current()?;
        LINKERS.remove(handle).map(drop).ok_or(Code::INVALID_HANDLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_of_linker_is_read_again() {
        let texts = vec![("a.ptx".to_owned(), ".version 8.0".to_owned()), ("b".to_owned(), String::new())];
        let image = Image { texts };
        let bytes = image.to_bytes();
        assert_eq!(Image::of_bytes("image", &bytes), Ok(image));
        for len in 8..bytes.len() {
            assert_eq!(Image::of_bytes("image", &bytes[..len]), Err(Code::INVALID_IMAGE), "{len} bytes");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(Image::of_bytes("image", &longer), Err(Code::INVALID_IMAGE));
    }

    #[test]
    fn machine_code_is_refused() {
        assert_eq!(Image::of_bytes("x", b"\x7fELF\x02"), Err(Code::NO_BINARY_FOR_GPU));
        assert_eq!(Image::of_bytes("x", &[0x50, 0xed, 0x55, 0xba, 1]), Err(Code::NO_BINARY_FOR_GPU));
        assert_eq!(Image::of_bytes("x", b""), Err(Code::INVALID_IMAGE));
        assert_eq!(Image::of_bytes("x", b"\0.version"), Err(Code::INVALID_IMAGE));
        assert_eq!(Image::of_bytes("x", b"\xff\xff"), Err(Code::INVALID_PTX));
        assert_eq!(Image::of_bytes("x", b".version\0rest").unwrap().texts[0].1, ".version");
    }
}
