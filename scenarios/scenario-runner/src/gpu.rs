//! Runs the programs as kernels on a GPU, through the CUDA driver, which is loaded at run time.
//!
//! The driver links three PTX modules: the programs, their calls to `gin.cuh`, and the device code that ships. Another
//! build can replace the second one, and an image of machine code can replace all three.
#![allow(unsafe_code)]

use crate::RunError;
use crate::driver::{check, cuda};
use crate::machine::Machine;
use crate::plan::{Api, Plan, Report, Threads};
use crate::runner::{CpuThreads, Runner};
use crate::segments::{Mapped, WindowMemory};
use crate::step::CTA;
use cudarc::driver::sys as cu;
use mini_nccl::bootstrap::Identity;
use mini_nccl::{DeviceMemory, GpuMemory};
use nccl_gin_ferrogin::config::Config;
use nccl_gin_ferrogin::device::{self, Device, DeviceBuffer, DeviceError, DeviceKind, Use, bytes_of};
use std::ffi::{CStr, CString, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::Arc;

const MODULES: [(&CStr, &str); 3] = [
    (c"ferrogin_device.ptx", include_str!("../../../device-kernels/ptx/ferrogin_device.ptx")),
    (c"scenarios.ptx", include_str!("../../scenario-kernels/ptx/scenarios.ptx")),
    (c"gin.ptx", include_str!("../../scenario-kernels/ptx/gin.ptx")),
];

/// Threads per block, if a block runs a program together.
const BLOCK: u32 = 64;

/// How a GPU runs the programs.
#[derive(Debug, Clone, Default)]
pub struct Launch {
    /// The threads that run a program together.
    pub threads: Threads,
    /// The form of the device API.
    pub api: Api,
    /// Runs all of a rank's programs in one block, as sharing mode CTA always does.
    pub packed: bool,
    /// PTX of `gin.cu`'s functions, replacing the built-in one.
    pub gin: Option<PathBuf>,
    /// A linked image of all kernels for this GPU, replacing the PTX.
    pub image: Option<PathBuf>,
    /// The memory of windows.
    pub memory: WindowMemory,
}

impl Launch {
    /// Returns the group, and the grid's blocks and threads per block, for `lanes` programs in the sharing mode of
    /// `plan`.
    fn grid(&self, plan: &Plan, lanes: u32) -> (Threads, u32, u32) {
        let is_cta = plan.sharing & CTA != 0;
        let in_one = lanes > 1 && (self.packed || is_cta);
        // In a single block, several programs cannot each have a block.
        let threads = if in_one && self.threads == Threads::Block { Threads::Warp } else { self.threads };
        let size = match threads {
            Threads::One => 1,
            Threads::Tile => 8,
            Threads::Warp => 32,
            Threads::Block => BLOCK,
        };
        if in_one { (threads, 1, lanes * size) } else { (threads, lanes, size) }
    }
}

/// Returns the runner for the device that the plugin chooses with FERROGIN_DEVICE: kernels on a GPU, or threads of this
/// process.
///
/// # Errors
/// There is no such device, or the driver refuses the kernels.
pub fn runner_from_env(launch: Launch) -> Result<Box<dyn Runner>, RunError> {
    // The plugin refuses invalid settings, and says so in its log.
    let Ok(config) = Config::from_env() else { return Ok(Box::new(CpuThreads)) };
    let device = open_local(&config).map_err(|error| RunError::Gpu(error.to_string()))?;
    Ok(match device.kind() {
        DeviceKind::Cpu => Box::new(CpuThreads),
        DeviceKind::Cuda => Box::new(Gpu::open(device, launch)?),
    })
}

/// Opens the device that the settings choose; with several GPUs, the one for this rank's local rank. Its context
/// becomes current on this thread, because the plugin takes the GPU of the current context, which NCCL sets.
///
/// # Errors
/// There is no such device.
pub fn open_local(config: &Config) -> Result<Arc<dyn Device>, DeviceError> {
    let device = device::open(config.device, config.provider)?;
    if device.kind() == DeviceKind::Cpu {
        return Ok(device);
    }
    let first = device.gpu().map_or(0, |(ordinal, _)| ordinal);
    let failed = |reason| DeviceError::NoGpu { reason };
    let mut count = 0;
    cuda!(cuDeviceGetCount(&mut count)).map_err(failed)?;
    let local = Identity::local_rank_from_env().unwrap_or(0) % usize::try_from(count).unwrap_or(1).max(1);
    if local == first {
        return Ok(device);
    }
    let mut context = null_mut();
    // The process keeps the context.
    cuda!(cuDevicePrimaryCtxRetain(&mut context, local as cu::CUdevice)).map_err(failed)?;
    cuda!(cuCtxSetCurrent(context)).map_err(failed)?;
    drop(device);
    device::open(config.device, config.provider)
}

/// Runs programs on a GPU.
pub struct Gpu {
    device: Arc<dyn Device>,
    launch: Launch,
    machine: Machine,
    ordinal: cu::CUdevice,
    stream: cu::CUstream,
    module: cu::CUmodule,
    kernel: cu::CUfunction,
    /// A kernel in some builds of `gin.cu` that runs before the programs, or null.
    setup: cu::CUfunction,
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Returns a kernel's parameters, as the address of each.
fn addresses<const N: usize>(parameters: [&mut u64; N]) -> [*mut c_void; N] {
    parameters.map(|parameter| (&raw mut *parameter).cast())
}

impl Gpu {
    /// Makes the context of `device`, the plugin's GPU, current on this thread, and links the kernels.
    ///
    /// # Errors
    /// The driver fails, or refuses the PTX.
    pub fn open(device: Arc<dyn Device>, launch: Launch) -> Result<Gpu, RunError> {
        let ordinal = device.gpu().map_or(0, |(ordinal, _)| ordinal as cu::CUdevice);
        Gpu::try_open(device, ordinal, launch).map_err(RunError::Gpu)
    }

    fn try_open(device: Arc<dyn Device>, ordinal: cu::CUdevice, launch: Launch) -> Result<Gpu, String> {
        let machine = Machine::of(ordinal)?;
        let mut context = null_mut();
        cuda!(cuDevicePrimaryCtxRetain(&mut context, ordinal))?;
        // From here on, dropping `gpu` releases what has been created.
        let mut gpu = Gpu {
            device,
            launch,
            machine,
            ordinal,
            stream: null_mut(),
            module: null_mut(),
            kernel: null_mut(),
            setup: null_mut(),
        };
        cuda!(cuCtxSetCurrent(context))?;
        cuda!(cuStreamCreate(&mut gpu.stream, cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
        match gpu.launch.image.clone() {
            Some(path) => gpu.load(&path)?,
            None => gpu.link()?,
        }
        cuda!(cuModuleGetFunction(&mut gpu.kernel, gpu.module, c"scenario".as_ptr()))?;
        if cuda!(cuModuleGetFunction(&mut gpu.setup, gpu.module, c"gin_setup".as_ptr())).is_err() {
            gpu.setup = null_mut();
        }
        Ok(gpu)
    }

    /// Loads an image of all kernels.
    fn load(&mut self, path: &Path) -> Result<(), String> {
        let image = read(path)?;
        let loaded = cuda!(cuModuleLoadData(&mut self.module, image.as_ptr().cast()));
        loaded.map_err(|why| {
            let path = path.display();
            format!(
                "{path} does not load on {}: {why}; it must be machine code for this GPU, by a CUDA release that the driver knows",
                self.machine
            )
        })
    }

    /// Links the PTX of all kernels.
    fn link(&mut self) -> Result<(), String> {
        let mut texts = MODULES.map(|(name, text)| (name, text.as_bytes().to_vec()));
        if let Some(path) = &self.launch.gin {
            texts[2].1 = read(path)?;
        }
        for (_, text) in &texts {
            self.machine.takes(&String::from_utf8_lossy(text))?;
        }
        let (mut link, mut log) = (null_mut(), vec![0u8; 4096]);
        let mut options =
            [cu::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, cu::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
        cuda!(cuLinkCreate_v2(2, options.as_mut_ptr(), values.as_mut_ptr(), &mut link))?;
        let linked = texts.into_iter().try_for_each(|(name, text)| {
            let text = CString::new(text).map_err(|error| error.to_string())?;
            let bytes = text.as_bytes_with_nul();
            let (data, kind) = (bytes.as_ptr().cast_mut().cast(), cu::CUjitInputType::CU_JIT_INPUT_PTX);
            cuda!(cuLinkAddData_v2(link, kind, data, bytes.len(), name.as_ptr(), 0, null_mut(), null_mut()))
        });
        let (mut image, mut size) = (null_mut(), 0);
        let linked = linked.and_then(|()| cuda!(cuLinkComplete(link, &mut image, &mut size)));
        let loaded = linked.and_then(|()| cuda!(cuModuleLoadData(&mut self.module, image)));
        cuda!(cuLinkDestroy(link))?;
        loaded.map_err(|why| {
            let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
            let log = String::from_utf8_lossy(&log[..end]).trim().to_owned();
            format!("the kernels do not load on {}: {why}: {log}", self.machine)
        })
    }

    /// Allocates memory that the host and the kernel share.
    fn shared(&self, bytes: usize) -> Result<Box<dyn DeviceBuffer>, String> {
        self.device.allocate(bytes.max(1), Use::Shared).map_err(|error| error.to_string())
    }

    fn try_run(&self, plans: &[Plan]) -> Result<Vec<Report>, String> {
        let (Some(first), failed) = (plans.first(), |error: nccl_gin_ferrogin::device::DeviceError| error.to_string())
        else {
            return Ok(Vec::new());
        };
        let lanes = plans.len() as u32;
        let (threads, blocks, per_block) = self.launch.grid(first, lanes);
        let mut plans: Vec<Plan> = plans.iter().map(|&plan| Plan { threads, api: self.launch.api, ..plan }).collect();
        let mut samples = Vec::new();
        for plan in plans.iter_mut().filter(|plan| !plan.samples.is_null()) {
            let bytes = (plan.reps - plan.warmup) as usize * size_of::<u64>();
            let buffer = self.shared(bytes)?;
            // SAFETY: the caller's array has an element for each repetition after the warm-up, and no other thread uses
            // it.
            let target = unsafe { std::slice::from_raw_parts_mut(plan.samples.cast::<u8>(), bytes) };
            plan.samples = buffer.device_address() as *mut u64;
            samples.push((buffer, target));
        }
        let arguments = self.shared(size_of_val(&*plans))?;
        arguments.write(0, bytes_of(&plans)).map_err(failed)?;
        let reports = self.shared(size_of::<Report>() * plans.len())?;
        let orders = self.shared(size_of::<u64>() * plans.len())?;
        if !self.setup.is_null() {
            // The last two are ints, in the low halves of their words.
            let mut values = [first.handle as u64, first.window.0 as u64, first.rank.into(), first.nranks.into()];
            let mut parameters = addresses(values.each_mut());
            let parameters = parameters.as_mut_ptr();
            cuda!(cuLaunchKernel(self.setup, 1, 1, 1, 1, 1, 1, 0, self.stream, parameters, null_mut()))?;
        }
        let [mut a, mut r, mut o] = [&arguments, &reports, &orders].map(|buffer| buffer.device_address());
        // A u32 in the kernel, in the low half of its word.
        let mut count = u64::from(lanes);
        let mut parameters = addresses([&mut a, &mut r, &mut o, &mut count]);
        let parameters = parameters.as_mut_ptr();
        cuda!(cuLaunchKernel(self.kernel, blocks, 1, 1, per_block, 1, 1, 0, self.stream, parameters, null_mut()))?;
        cuda!(cuStreamSynchronize(self.stream))?;
        for (buffer, target) in samples {
            buffer.read(0, target).map_err(failed)?;
        }
        let mut results = vec![Report::PASSED; plans.len()];
        // SAFETY: the pointer and the size are those of `results`. The kernel wrote a valid report for each plan.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(results.as_mut_ptr().cast::<u8>(), size_of_val(&*results)) };
        reports.read(0, bytes).map_err(failed)?;
        Ok(results)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if !self.module.is_null() {
            let _ = cuda!(cuModuleUnload(self.module));
        }
        if !self.stream.is_null() {
            let _ = cuda!(cuStreamDestroy_v2(self.stream));
        }
        let _ = cuda!(cuDevicePrimaryCtxRelease_v2(self.ordinal));
    }
}

impl Runner for Gpu {
    fn name(&self) -> String {
        let Launch { threads, api, packed, gin, image, .. } = &self.launch;
        let packed = if *packed { ", in one block" } else { "" };
        let file = |path: &PathBuf| format!(", of {}", path.display());
        let code = image.as_ref().or(gin.as_ref()).map(file).unwrap_or_default();
        let form = if image.is_some() { "machine code" } else { "PTX" };
        format!("kernels as {form} on {}: {api:?} API, groups of {threads:?}{packed}{code}", self.machine.name)
    }

    fn gpu(&self) -> Option<&Machine> {
        Some(&self.machine)
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceMemory, RunError> {
        if self.launch.memory != WindowMemory::Whole {
            let mapped = Mapped::new(self.ordinal, bytes, self.launch.memory).map_err(RunError::Gpu)?;
            return Ok(DeviceMemory::of_gpu(Box::new(mapped)));
        }
        let buffer = self.device.allocate(bytes, Use::Window).map_err(|error| RunError::Gpu(error.to_string()))?;
        Ok(DeviceMemory::of_gpu(Box::new(Window(buffer))))
    }

    fn run(&self, plans: &[Plan]) -> Result<Vec<Report>, String> {
        self.try_run(plans)
    }
}

/// GPU memory for windows.
struct Window(Box<dyn DeviceBuffer>);

impl GpuMemory for Window {
    fn address(&self) -> u64 {
        self.0.device_address()
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), String> {
        self.0.write(offset, bytes_of(bytes)).map_err(|error| error.to_string())
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), String> {
        self.0.read(offset, bytes).map_err(|error| error.to_string())
    }
}
