//! Modules: loaded images, with their variables and kernels.

use std::ffi::{CString, c_int};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use soft_gpu_ptx::{Kernel, Loaded, Program};

use crate::code::{Code, Outcome};
use crate::context::{self, Context};
use crate::device::{self, MAX_SHARED, SHARED};
use crate::guard::{In, Out, Text};
use crate::handle::{Table, fresh};
use crate::link::{self, Image, Logs};
use crate::space::Kind;
use crate::{alloc, copy};

pub(crate) struct Module {
    pub(crate) handle: usize,
    /// The module belongs to a library and is unloaded with it.
    of_library: bool,
    /// The handle of the context.
    pub(crate) context: usize,
    pub(crate) loaded: Loaded,
    /// The functions, sorted by name.
    pub(crate) functions: Vec<Arc<Function>>,
    /// The addresses of the variables.
    variables: Vec<u64>,
}

/// A module's kernel.
pub(crate) struct Function {
    pub(crate) handle: usize,
    /// The handle of the module.
    pub(crate) module: usize,
    pub(crate) kernel: Kernel,
    pub(crate) name: CString,
    /// The limit of dynamic shared memory: `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
    pub(crate) dynamic: AtomicU32,
}

pub(crate) static MODULES: Table<Module> = Table::new();
pub(crate) static FUNCTIONS: Table<Function> = Table::new();

pub(crate) fn by_handle(handle: usize) -> Outcome<Arc<Module>> {
    MODULES.get(handle).ok_or(Code::INVALID_HANDLE)
}

/// Returns the kernels, sorted by name.
pub(crate) fn kernels_of(program: &Program) -> Vec<Kernel> {
    let mut kernels: Vec<Kernel> = program.kernels().filter_map(|name| program.kernel(name).cloned()).collect();
    kernels.sort_by(|one, other| one.name.cmp(&other.name));
    kernels
}

/// Makes a module from a program, with memory for its variables.
pub(crate) fn load(context: &Context, program: Program, of_library: bool) -> Outcome<usize> {
    let mut variables = Vec::new();
    let globals = program.globals().to_vec();
    for global in &globals {
        let placed = alloc::allocate(context, global.size.max(1), global.align, Kind::Variable(global.constant));
        variables.push(placed.inspect_err(|_| release(&variables))?);
    }
    for index in 0..globals.len() {
        copy::fill(variables[index], &program.initial(index, &variables));
    }
    let handle = fresh();
    let functions = kernels_of(&program).into_iter().map(|kernel| {
        let (dynamic, name) = (usual_dynamic(&kernel).into(), CString::new(kernel.name.clone()).unwrap_or_default());
        Arc::new(Function { handle: fresh(), module: handle, kernel, name, dynamic })
    });
    let functions: Vec<_> = functions.collect();
    functions.iter().for_each(|function| FUNCTIONS.insert(function.handle, function.clone()));
    let loaded = Arc::new(program).load(&variables);
    MODULES
        .insert(handle, Arc::new(Module { handle, of_library, context: context.handle, loaded, functions, variables }));
    Ok(handle)
}

fn release(variables: &[u64]) {
    for variable in variables {
        // Destroying the context may already have released it.
        let _ = alloc::release(*variable, |entry| matches!(entry.kind, Kind::Variable(_)));
    }
}

fn load_image(context: &Context, image: &Image, logs: &Logs) -> Outcome<usize> {
    load(context, image.program(logs)?, false)
}

/// Unloads a context's modules.
pub(crate) fn forget(context: usize) {
    MODULES.remove_if(|module| module.context == context).iter().for_each(|module| end(module));
}

/// Unloads a module, if it exists.
pub(crate) fn unload(handle: usize) {
    if let Some(module) = MODULES.remove(handle) {
        end(&module);
    }
}

fn end(module: &Module) {
    for function in &module.functions {
        FUNCTIONS.remove(function.handle);
    }
    release(&module.variables);
}

api! {
    cuModuleLoadData(out: Out<usize>, image: In<u8>) {
        let context = context::current()?;
        out.present()?;
        out.set(load_image(&context, &Image::of_memory(image)?, &Logs::default())?)
    }

    cuModuleLoadDataEx(out: Out<usize>, image: In<u8>, count: u32, options: In<c_int>, values: Out<usize>) {
        let context = context::current()?;
        out.present()?;
        let logs = Logs::read(count, options, values)?;
        let loaded = Image::of_memory(image).inspect_err(|_| logs.error("the image is not PTX"));
        out.set(load_image(&context, &loaded?, &logs)?)
    }

    cuModuleLoadFatBinary(out: Out<usize>, image: In<u8>) {
        let context = context::current()?;
        out.present()?;
        out.set(load_image(&context, &Image::of_memory(image)?, &Logs::default())?)
    }

    cuModuleLoad(out: Out<usize>, path: Text) {
        let context = context::current()?;
        out.present()?;
        let bytes = link::read_file(&path.string()?)?;
        out.set(load_image(&context, &Image::of_bytes(&path.string()?, &bytes)?, &Logs::default())?)
    }

    cuModuleUnload(handle: usize) {
        let context = context::current()?;
        if by_handle(handle)?.of_library {
            return Err(Code::NOT_PERMITTED);
        }
        context.wait();
        unload(handle);
        context.check()
    }

    cuModuleGetFunction(out: Out<usize>, handle: usize, name: Text) {
        context::current()?;
        out.present()?;
        let (module, name) = (by_handle(handle)?, name.string()?);
        let found = module.functions.iter().find(|function| function.kernel.name == name);
        out.set(found.ok_or(Code::NOT_FOUND)?.handle)
    }

    cuModuleGetFunctionCount(out: Out<u32>, handle: usize) {
        context::current()?;
        out.set(by_handle(handle)?.functions.len() as u32)
    }

    cuModuleEnumerateFunctions(out: Out<usize>, count: u32, handle: usize) {
        context::current()?;
        out.present()?;
        let module = by_handle(handle)?;
        module.functions.iter().take(count as usize).enumerate().for_each(|(index, function)| out.set_at(index, function.handle));
        Ok(())
    }

    cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, handle: usize, name: Text) {
        context::current()?;
        by_handle(handle)?.give_global(&name.string()?, address, bytes)
    }

    /// Always eager.
    cuModuleGetLoadingMode(out: Out<c_int>) {
        device::started()?;
        out.set(1)
    }
}

/// Returns a kernel's default limit of dynamic shared memory, until cuFuncSetAttribute changes it.
pub(crate) fn usual_dynamic(kernel: &Kernel) -> u32 {
    SHARED.saturating_sub(kernel.shared)
}

/// Returns an attribute's value; `dynamic` is the current limit of dynamic shared memory.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE`.
pub(crate) fn attribute(kernel: &Kernel, dynamic: u32, number: c_int) -> Outcome<c_int> {
    let (major, minor) = device::started()?.settings.capability;
    Ok(match number {
        0 => kernel.max_threads as c_int,
        1 => kernel.shared as c_int,
        2 => kernel.constant as c_int,
        3 => kernel.local as c_int,
        4 => kernel.registers as c_int,
        // PTX and binary version, cache mode.
        5 | 6 => major * 10 + minor,
        7 => 0,
        8 => dynamic as c_int,
        9 => -1,
        // The cluster size that the function requires.
        11..=13 => kernel.required_cluster.unwrap_or_default()[number as usize - 11] as c_int,
        10 | 14..=16 => 0,
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// Checks an attribute's new value. Returns it if the attribute is the limit of dynamic shared memory.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE`.
pub(crate) fn check_attribute(kernel: &Kernel, number: c_int, value: c_int) -> Outcome<Option<u32>> {
    let most = MAX_SHARED.saturating_sub(kernel.shared);
    match (number, u32::try_from(value)) {
        (8, Ok(value)) if value <= most => Ok(Some(value)),
        // How much of the cache should be shared memory: a preference.
        (9, _) if (-1..=100).contains(&value) => Ok(None),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Writes a parameter's offset and size.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE`.
pub(crate) fn give_parameter(kernel: &Kernel, index: usize, offset: Out<usize>, size: Out<usize>) -> Outcome {
    offset.present()?;
    let parameter = kernel.parameters.get(index).ok_or(Code::INVALID_VALUE)?;
    size.set_at(0, parameter.size as usize);
    offset.set(parameter.offset as usize)
}

impl Module {
    /// Writes a variable's address and size.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_FOUND`.
    pub(crate) fn give_global(&self, name: &str, address: Out<u64>, bytes: Out<usize>) -> Outcome {
        let (at, len) = self.loaded.global(name).ok_or(Code::NOT_FOUND)?;
        address.set_at(0, at);
        bytes.set_at(0, len as usize);
        Ok(())
    }
}
