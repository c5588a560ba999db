//! NCCL's own device code, compiled for this processor: the baseline.
//!
//! The headers come from NCCL's PyPI package, which the bench fetches when it runs. The shim in `tests/foreign`
//! replaces what nvcc defines.

use crate::card::{Card, PEER, RANKS};
use ferrogin_device::Window;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW, Symbol};
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The NCCL release that serves as the baseline.
pub const RELEASE: &str = "2.32.3";

/// One post's arguments, as laid out by the caller.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Post {
    /// The peer's rank.
    pub peer: u32,
    /// Signal id.
    pub signal: u32,
    /// The window that is written, or that a get reads.
    pub dst: Window,
    /// The offset in it.
    pub dst_off: u64,
    /// The window with the local bytes.
    pub src: Window,
    /// The offset in it.
    pub src_off: u64,
    /// Bytes of a put or get.
    pub bytes: u64,
    /// The value of a putValue.
    pub value: u64,
}

/// Number of different posts, which the loops repeat; a power of two.
pub const POSTS: usize = 64;

/// Posts with different offsets, sizes and values.
pub fn posts(card: &Card) -> [Post; POSTS] {
    std::array::from_fn(|i| {
        let at = i as u64 * 4096;
        let window = card.window();
        Post {
            peer: PEER,
            signal: i as u32 % 2,
            dst: window,
            dst_off: at,
            src: window,
            src_off: at + 8,
            bytes: 64 + at,
            value: !at,
        }
    })
}

/// Why there is no baseline.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program that the build runs failed.
    #[error("{program}: {why}")]
    Make {
        /// The program.
        program: String,
        /// Its output.
        why: String,
    },
    /// The library cannot be loaded.
    #[error("cannot load NCCL's device code: {0}")]
    Load(#[from] libloading::Error),
    /// The opened context is null.
    #[error("NCCL's device code cannot open the context")]
    Open,
}

/// How the code is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Build {
    /// Nothing is added to NCCL's code.
    Bare,
    /// Waits yield, and doorbells are counted.
    Threads,
}

/// Runs a program to completion.
fn run(command: &mut Command) -> Result<(), Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| Error::Make { program: program.clone(), why: error.to_string() })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let last = said.lines().rev().take(3).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join(" / ");
    Err(Error::Make { program, why: if last.is_empty() { output.status.to_string() } else { last } })
}

/// Fetches the headers, compiles the code into `dir`, and returns the library's path.
///
/// # Errors
/// PyPI, Python or a compiler is missing.
pub fn make(root: &Path, dir: &Path, build: Build) -> Result<PathBuf, Error> {
    let foreign = root.join("tests/foreign");
    let cache = root.join(".cache");
    run(Command::new("bash").arg(foreign.join("fetch-headers.sh")).arg(RELEASE).arg(&cache))?;
    let patched = dir.join("nccl-include");
    let headers = cache.join(format!("nccl-{RELEASE}/include"));
    run(Command::new("python3").arg(foreign.join("patch-headers.py")).arg(headers).arg(&patched))?;
    let (name, flags): (_, &[&str]) = match build {
        Build::Bare => ("libnccl-posts-bare.so", &["-DSHIM_BARE", "-DNDEBUG"]),
        Build::Threads => ("libnccl-posts-threads.so", &["-DNDEBUG"]),
    };
    let library = dir.join(name);
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "g++".into());
    run(Command::new(compiler)
        .args(["-O3", "-std=gnu++17", "-w", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"])
        .args(flags)
        .arg("-I")
        .arg(&foreign)
        .arg("-I")
        .arg(foreign.join("shim"))
        .arg("-isystem")
        .arg(&patched)
        .arg(root.join("benches/nccl/posts.cpp"))
        .arg("-o")
        .arg(&library))?;
    Ok(library)
}

type Opaque = *mut c_void;
/// Context, peer, window, offset, window, offset, bytes, and flags or a signal's id.
pub type Put = unsafe extern "C" fn(Opaque, u32, Window, u64, Window, u64, u64, u32);
/// Context, peer, window, offset, value, flags.
pub type PutValue = unsafe extern "C" fn(Opaque, u32, Window, u64, u64, u32);
/// Context.
pub type Flush = unsafe extern "C" fn(Opaque);
/// Context, posts, the number of posts less one, how many to post.
pub type Loop = unsafe extern "C" fn(Opaque, *const Post, u32, u32);

/// NCCL's code on one context.
pub struct Nccl<'card> {
    library: Library,
    handle: Opaque,
    _card: &'card Card,
}

// SAFETY: the handle is only read, and any thread of a rank may call NCCL's code.
unsafe impl Sync for Nccl<'_> {}

impl<'card> Nccl<'card> {
    /// Loads the library that [`make`] built, and opens the card's context.
    ///
    /// # Errors
    /// The library cannot be loaded, or it cannot open the context.
    pub fn open(library: &Path, card: &'card Card) -> Result<Self, Error> {
        // SAFETY: our own library, whose initialisers do nothing.
        let library = unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL) }?;
        type Open = unsafe extern "C" fn(Opaque, i32, i32) -> Opaque;
        // SAFETY: posts.cpp defines the function with this type.
        let open: Symbol<Open> = unsafe { library.get(b"nccl_open\0") }?;
        // SAFETY: the handle is that of a context that lives for 'card.
        let handle = unsafe { open(card.handle(), 0, RANKS as i32) };
        if handle.is_null() { Err(Error::Open) } else { Ok(Nccl { library, handle, _card: card }) }
    }

    /// Looks up a function of posts.cpp.
    ///
    /// # Safety
    /// `F` is its type there: [`Put`], [`PutValue`], [`Flush`] or [`Loop`].
    ///
    /// # Errors
    /// There is no function with this name.
    pub unsafe fn function<F: Copy>(&self, name: &str) -> Result<F, Error> {
        // SAFETY: the caller vouches for the type.
        let symbol: Symbol<F> = unsafe { self.library.get(name.as_bytes()) }?;
        Ok(*symbol)
    }

    /// The first argument of the library's functions.
    pub fn handle(&self) -> *mut c_void {
        self.handle
    }
}
