//! Functions: the kernels of modules, and library kernels in the current context.

use std::ffi::{c_char, c_int};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::code::{Code, Outcome};
use crate::context;
use crate::device::{self, MAX_SHARED};
use crate::guard::Out;
use crate::library;
use crate::module::{self, FUNCTIONS, Function};

/// Returns a function by handle, or a library kernel's function in the current context.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE`.
pub(crate) fn function(handle: usize) -> Outcome<Arc<Function>> {
    device::started()?;
    FUNCTIONS.get(handle).map_or_else(|| library::function(handle), Ok)
}

fn occupancy(handle: usize, threads: c_int, shared: usize) -> Outcome<c_int> {
    let function = function(handle)?;
    let threads = u32::try_from(threads).ok().filter(|threads| *threads > 0).ok_or(Code::INVALID_VALUE)?;
    let shared = u32::try_from(shared).unwrap_or(u32::MAX).saturating_add(function.kernel.shared);
    let fits = threads <= function.kernel.max_threads && shared <= MAX_SHARED;
    Ok(if fits { device::blocks_of_processor(threads, shared) as c_int } else { 0 })
}

api! {
    cuFuncGetModule(out: Out<usize>, handle: usize) {
        out.present()?;
        out.set(module::by_handle(function(handle)?.module)?.handle)
    }

    cuFuncGetAttribute(out: Out<c_int>, number: c_int, handle: usize) {
        let function = function(handle)?;
        out.present()?;
        out.set(module::attribute(&function.kernel, function.dynamic.load(Ordering::Relaxed), number)?)
    }

    cuFuncGetName(out: Out<*const c_char>, handle: usize) {
        out.present()?;
        // The reference specifies this code for null.
        let function = if handle == 0 { Err(Code::INVALID_VALUE) } else { function(handle) };
        out.set(function?.name.as_ptr())
    }

    cuFuncSetAttribute(handle: usize, number: c_int, value: c_int) {
        context::current()?;
        let function = function(handle)?;
        if let Some(bytes) = module::check_attribute(&function.kernel, number, value)? {
            function.dynamic.store(bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    cuFuncSetCacheConfig(handle: usize, preference: c_int) {
        context::current()?;
        function(handle)?;
        if (0..=3).contains(&preference) { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    cuFuncGetParamInfo(handle: usize, index: usize, offset: Out<usize>, size: Out<usize>) {
        module::give_parameter(&function(handle)?.kernel, index, offset, size)
    }

    cuFuncGetParamCount(handle: usize, out: Out<usize>) {
        out.set(function(handle)?.kernel.parameters.len())
    }

    /// Functions are loaded with their modules.
    cuFuncLoad(handle: usize) {
        function(handle).map(drop)
    }

    cuFuncIsLoaded(out: Out<c_int>, handle: usize) {
        function(handle)?;
        out.set(1)
    }

    cuOccupancyMaxActiveBlocksPerMultiprocessor(out: Out<c_int>, handle: usize, threads: c_int, shared: usize) {
        out.set(occupancy(handle, threads, shared)?)
    }

    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out: Out<c_int>, handle: usize, threads: c_int, shared: usize, flags: u32) {
        if flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        out.set(occupancy(handle, threads, shared)?)
    }

    /// Returns the most dynamic shared memory per block that still lets `blocks` blocks share a processor.
    cuOccupancyAvailableDynamicSMemPerBlock(out: Out<usize>, handle: usize, blocks: c_int, threads: c_int) {
        let function = function(handle)?;
        out.present()?;
        let (blocks, threads) = (u32::try_from(blocks), u32::try_from(threads));
        let (Ok(blocks @ 1..), Ok(threads @ 1..)) = (blocks, threads) else { return Err(Code::INVALID_VALUE) };
        let fits = |bytes: &u32| device::blocks_of_processor(threads, function.kernel.shared + bytes) >= blocks;
        let most = MAX_SHARED.saturating_sub(function.kernel.shared);
        let sizes = (0..=most).rev().step_by(1024).chain([0]);
        out.set(sizes.into_iter().find(fits).unwrap_or(0) as usize)
    }

    /// Suggests the largest block that the function allows.
    cuOccupancyMaxPotentialBlockSize(
        grid: Out<c_int>,
        block: Out<c_int>,
        handle: usize,
        shared_of: Option<extern "C" fn(c_int) -> usize>,
        shared: usize,
        limit: c_int,
    ) {
        let function = function(handle)?;
        grid.present()?;
        block.present()?;
        let most = function.kernel.max_threads as c_int;
        let threads = if limit > 0 { most.min(limit) } else { most };
        let shared = shared_of.map_or(shared, |shared_of| shared_of(threads));
        block.set(threads)?;
        grid.set(occupancy(handle, threads, shared)? * device::PROCESSORS as c_int)
    }
}
