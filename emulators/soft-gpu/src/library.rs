//! Libraries: images that belong to no context. A context gets its own module of a library when it first uses one of
//! the kernels.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use soft_gpu_ptx::Kernel;

use crate::code::{Code, Outcome};
use crate::context::{self, CONTEXTS, Context};
use crate::device;
use crate::guard::{In, Out, Text, lock};
use crate::handle::{Table, fresh};
use crate::link::{self, Image, Logs};
use crate::module::{self, Function, MODULES, Module};

struct Library {
    image: Image,
    /// The kernels, sorted by name.
    kernels: Vec<Arc<LibraryKernel>>,
    /// The handle of each context's module. Those of destroyed contexts are stale.
    modules: Mutex<HashMap<usize, usize>>,
}

/// A library's kernel.
struct LibraryKernel {
    handle: usize,
    /// The handle of the library.
    library: usize,
    kernel: Kernel,
    name: CString,
    /// The limit of dynamic shared memory in bytes, by device ordinal, where cuKernelSetAttribute has set it.
    dynamic: Mutex<HashMap<usize, u32>>,
}

static LIBRARIES: Table<Library> = Table::new();
static KERNELS: Table<LibraryKernel> = Table::new();

/// `CU_LIBRARY_BINARY_IS_PRESERVED`: the program keeps the image. We copy it anyway.
const PRESERVED: c_int = 1;

/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE`.
fn library(handle: usize) -> Outcome<Arc<Library>> {
    device::started()?;
    LIBRARIES.get(handle).ok_or(Code::INVALID_HANDLE)
}

/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE`.
fn kernel(handle: usize) -> Outcome<Arc<LibraryKernel>> {
    device::started()?;
    KERNELS.get(handle).ok_or(Code::INVALID_HANDLE)
}

fn load(image: Image, logs: &Logs) -> Outcome<usize> {
    let program = image.program(logs)?;
    let handle = fresh();
    let kernels = module::kernels_of(&program).into_iter().map(|kernel| {
        let name = CString::new(kernel.name.clone()).unwrap_or_default();
        Arc::new(LibraryKernel { handle: fresh(), library: handle, kernel, name, dynamic: Mutex::default() })
    });
    let kernels: Vec<_> = kernels.collect();
    kernels.iter().for_each(|kernel| KERNELS.insert(kernel.handle, kernel.clone()));
    LIBRARIES.insert(handle, Arc::new(Library { image, kernels, modules: Mutex::default() }));
    Ok(handle)
}

/// Checks a library's options, which have no effect. `of_data` is false for a library loaded from a file.
fn check(options: In<c_int>, count: u32, of_data: bool) -> Outcome {
    for option in options.list(count as usize)? {
        match option {
            PRESERVED if of_data => {}
            // Functions and data shared by host and device.
            0 => return Err(Code::NOT_SUPPORTED),
            _ => return Err(Code::INVALID_VALUE),
        }
    }
    Ok(())
}

impl Library {
    /// Returns a context's module, loading it on first use.
    fn module(&self, context: &Context) -> Outcome<Arc<Module>> {
        let mut modules = lock(&self.modules);
        if let Some(module) = modules.get(&context.handle).and_then(|handle| MODULES.get(*handle)) {
            return Ok(module);
        }
        let handle = module::load(context, self.image.program(&Logs::default())?, true)?;
        modules.insert(context.handle, handle);
        let module = MODULES.get(handle).ok_or(Code::UNKNOWN)?;
        for (function, kernel) in module.functions.iter().zip(&self.kernels) {
            if let Some(bytes) = lock(&kernel.dynamic).get(&context.device) {
                function.dynamic.store(*bytes, Ordering::Relaxed);
            }
        }
        Ok(module)
    }
}

/// Returns a kernel's function in the current context.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE`, and those of loading the module.
pub(crate) fn function(handle: usize) -> Outcome<Arc<Function>> {
    let kernel = kernel(handle)?;
    let context = context::current()?;
    let module = library(kernel.library)?.module(&context)?;
    module.functions.iter().find(|function| function.kernel.name == kernel.kernel.name).cloned().ok_or(Code::NOT_FOUND)
}

api! {
    cuLibraryLoadData(
        out: Out<usize>, image: In<u8>, jit_options: In<c_int>, jit_values: Out<usize>, jit_count: u32, options: In<c_int>,
        _values: Out<usize>, count: u32,
    ) {
        device::started()?;
        out.present()?;
        let logs = Logs::read(jit_count, jit_options, jit_values)?;
        check(options, count, true)?;
        out.set(load(Image::of_memory(image)?, &logs)?)
    }

    cuLibraryLoadFromFile(
        out: Out<usize>, path: Text, jit_options: In<c_int>, jit_values: Out<usize>, jit_count: u32, options: In<c_int>,
        _values: Out<usize>, count: u32,
    ) {
        device::started()?;
        out.present()?;
        let path = path.string()?;
        let logs = Logs::read(jit_count, jit_options, jit_values)?;
        check(options, count, false)?;
        out.set(load(Image::of_bytes(&path, &link::read_file(&path)?)?, &logs)?)
    }

    /// Also unloads every context's module.
    cuLibraryUnload(handle: usize) {
        device::started()?;
        let library = LIBRARIES.remove(handle).ok_or(Code::INVALID_VALUE)?;
        for kernel in &library.kernels {
            KERNELS.remove(kernel.handle);
        }
        for (context, module) in lock(&library.modules).drain() {
            if let Some(context) = CONTEXTS.get(context) {
                context.wait();
            }
            module::unload(module);
        }
        Ok(())
    }

    cuLibraryGetKernel(out: Out<usize>, handle: usize, name: Text) {
        let library = library(handle)?;
        out.present()?;
        let name = name.string()?;
        let found = library.kernels.iter().find(|kernel| kernel.kernel.name == name);
        out.set(found.ok_or(Code::NOT_FOUND)?.handle)
    }

    cuLibraryGetKernelCount(out: Out<u32>, handle: usize) {
        out.set(library(handle)?.kernels.len() as u32)
    }

    cuLibraryEnumerateKernels(out: Out<usize>, count: u32, handle: usize) {
        let library = library(handle)?;
        out.present()?;
        library.kernels.iter().take(count as usize).enumerate().for_each(|(index, kernel)| out.set_at(index, kernel.handle));
        Ok(())
    }

    cuLibraryGetModule(out: Out<usize>, handle: usize) {
        let library = library(handle)?;
        let context = context::current()?;
        out.present()?;
        out.set(library.module(&context)?.handle)
    }

    cuLibraryGetGlobal(address: Out<u64>, bytes: Out<usize>, handle: usize, name: Text) {
        let library = library(handle)?;
        let context = context::current()?;
        library.module(&context)?.give_global(&name.string()?, address, bytes)
    }

    /// Images here have no managed memory.
    cuLibraryGetManaged(_address: Out<u64>, _bytes: Out<usize>, handle: usize, name: Text) {
        library(handle)?;
        name.bytes()?;
        Err(Code::NOT_FOUND)
    }

    /// Devices here have no functions shared with the host.
    cuLibraryGetUnifiedFunction(_out: Out<usize>, handle: usize, name: Text) {
        library(handle)?;
        name.bytes()?;
        Err(Code::NOT_FOUND)
    }

    cuKernelGetFunction(out: Out<usize>, handle: usize) {
        out.present()?;
        out.set(function(handle)?.handle)
    }

    cuKernelGetLibrary(out: Out<usize>, handle: usize) {
        out.present()?;
        out.set(kernel(handle)?.library)
    }

    cuKernelGetName(out: Out<*const c_char>, handle: usize) {
        out.present()?;
        // The reference specifies this code for null.
        let kernel = if handle == 0 { Err(Code::INVALID_VALUE) } else { kernel(handle) };
        out.set(kernel?.name.as_ptr())
    }

    cuKernelGetParamInfo(handle: usize, index: usize, offset: Out<usize>, size: Out<usize>) {
        module::give_parameter(&kernel(handle)?.kernel, index, offset, size)
    }

    cuKernelGetParamCount(handle: usize, out: Out<usize>) {
        out.set(kernel(handle)?.kernel.parameters.len())
    }

    cuKernelGetAttribute(out: Out<c_int>, number: c_int, handle: usize, device: c_int) {
        let kernel = kernel(handle)?;
        out.present()?;
        let ordinal = device::by_number(device)?.ordinal;
        let set = lock(&kernel.dynamic).get(&ordinal).copied();
        let dynamic = set.unwrap_or_else(|| module::usual_dynamic(&kernel.kernel));
        out.set(module::attribute(&kernel.kernel, dynamic, number)?)
    }

    /// Applies to all contexts of the device, including future ones.
    cuKernelSetAttribute(number: c_int, value: c_int, handle: usize, device: c_int) {
        let kernel = kernel(handle)?;
        let ordinal = device::by_number(device)?.ordinal;
        let Some(bytes) = module::check_attribute(&kernel.kernel, number, value)? else { return Ok(()) };
        lock(&kernel.dynamic).insert(ordinal, bytes);
        for (context, module) in lock(&library(kernel.library)?.modules).iter() {
            if CONTEXTS.get(*context).is_some_and(|context| context.device == ordinal)
                && let Some(module) = MODULES.get(*module)
            {
                let functions = module.functions.iter().filter(|function| function.kernel.name == kernel.kernel.name);
                functions.for_each(|function| function.dynamic.store(bytes, Ordering::Relaxed));
            }
        }
        Ok(())
    }

    /// The preference has no effect here.
    cuKernelSetCacheConfig(handle: usize, preference: c_int, device: c_int) {
        kernel(handle)?;
        device::by_number(device)?;
        if (0..=3).contains(&preference) { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }
}
