//! Loads libraries to ask for their versions: libfabric and NCCL.
#![allow(unsafe_code)]

use super::outcome::{Outcome, emit};
use ferrogin_libfabric::{Hints, Libfabric, bindings};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use serde_json::json;
use std::ffi::c_int;
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Emits libfabric's version and path, and its providers.
pub fn libfabric() -> Outcome {
    emit("step", json!("loading libfabric"));
    let library = Libfabric::load(None).map_err(|error| error.to_string())?;
    emit("version", json!(library.version().to_string()));
    let path = library.path().to_string_lossy().into_owned();
    emit("path", json!(mapped(&path).unwrap_or(path)));
    emit("step", json!("listing its providers"));
    let mut names: Vec<String> =
        library.providers().into_iter().map(|(name, version)| format!("{name} {version}")).collect();
    // Hooks wrap other providers and reach no network themselves.
    names.retain(|name| !name.starts_with("ofi_hook"));
    names.sort();
    names.dedup();
    emit("providers", json!(names));
    emit("step", json!("looking for reliable datagrams"));
    emit("channels", json!(with_datagrams(&library, bindings::FI_MSG, 0)));
    // A put with a signal is a write with 32 bits of immediate data.
    emit("rma", json!(with_datagrams(&library, bindings::FI_MSG | bindings::FI_RMA, 4)));
    Ok(())
}

/// Returns the providers on this machine that have reliable datagrams with these capabilities and at least `immediate`
/// bytes of immediate data.
fn with_datagrams(library: &Arc<Libfabric>, caps: u64, immediate: usize) -> Vec<String> {
    let hints = Hints::any().caps(caps).mode(bindings::FI_CONTEXT | bindings::FI_CONTEXT2);
    let found = library.getinfo(&hints.mr_mode(ferrogin_libfabric::MR_MODE_ALL)).unwrap_or_default();
    let mut names: Vec<String> = Vec::new();
    for info in &found {
        let domain = info.raw().domain_attr;
        // SAFETY: libfabric allocates a domain's attributes with the info that it returns, which `info` keeps alive.
        let bytes = unsafe { domain.as_ref() }.map_or(0, |domain| domain.cq_data_size);
        if bytes >= immediate && !names.contains(&info.provider()) {
            names.push(info.provider());
        }
    }
    names
}

/// Emits NCCL's version number, its file, and the symbols that it looks up in GIN plugins. CUDA is not initialised.
pub fn nccl(name: &str) -> Outcome {
    emit("step", json!("loading NCCL"));
    // SAFETY: NCCL's initialisers only set up its own state and the CUDA runtime's; the program that uses the plugin
    // runs them too.
    let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
    let library = library
        .map_err(|error| std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string))?;
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: `GetVersion` is the type that nccl.h declares for this name.
    let symbol = unsafe { library.get::<GetVersion>(b"ncclGetVersion\0") };
    let get_version = symbol.map_err(|_| format!("{name} has no ncclGetVersion: it is not NCCL"))?;
    let mut version = 0;
    // SAFETY: NCCL writes one int to a local variable.
    let code = unsafe { get_version(&mut version) };
    if code != 0 {
        return Err(format!("ncclGetVersion failed with error {code}"));
    }
    emit("version", json!(version));
    let file = mapped(name).unwrap_or_else(|| name.to_owned());
    emit("path", json!(file));
    emit("step", json!("reading NCCL's file"));
    emit("symbols", json!(symbols(&file)));
    Ok(())
}

/// Returns the file of a library that is mapped into this process, found by the last part of its name.
pub fn mapped(name: &str) -> Option<String> {
    let name = name.rsplit('/').next()?;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let own =
        |path: &&str| path.rsplit('/').next().is_some_and(|file| file == name || file.starts_with(&format!("{name}.")));
    paths.into_iter().find(own).map(str::to_owned)
}

/// Returns the plugin symbols among a file's bytes; `None` if the file could not be read, or not in time.
fn symbols(path: &str) -> Option<Vec<&'static str>> {
    const SYMBOLS: [&str; 2] = ["ncclGinPlugin_v14", "ncclGinPlugin_v13"];
    const BLOCK: usize = 1 << 20;
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut file = File::open(path).ok()?;
    let mut found = [false; SYMBOLS.len()];
    let mut block = Vec::with_capacity(2 * BLOCK);
    while found.contains(&false) {
        if Instant::now() > deadline {
            return None;
        }
        // A symbol may straddle two blocks.
        let old = block.len().saturating_sub(32);
        block.drain(..old);
        if file.by_ref().take(BLOCK as u64).read_to_end(&mut block).ok()? == 0 {
            break;
        }
        for (found, symbol) in found.iter_mut().zip(SYMBOLS) {
            *found |= contains(&block, symbol.as_bytes());
        }
    }
    Some(SYMBOLS.into_iter().zip(found).filter_map(|(symbol, found)| found.then_some(symbol)).collect())
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    // Every symbol starts with this prefix, which is checked first.
    let prefix = b"ncclGinPlugin_v1";
    let mut rest = haystack;
    while let Some(at) = rest.iter().position(|&byte| byte == b'n') {
        rest = &rest[at..];
        if rest.starts_with(prefix) && rest.starts_with(needle) {
            return true;
        }
        rest = &rest[1..];
    }
    false
}
