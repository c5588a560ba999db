//! Kernel launches.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use soft_gpu_ptx::{Kernel, Launch, Time, TrapKind};

use crate::alloc;
use crate::check;
use crate::code::{Code, Outcome};
use crate::copy;
use crate::device::{self, MAX_BLOCK, MAX_GRID};
use crate::function;
use crate::guard::{In, log};
use crate::module::MODULES;
use crate::space::{Kind, Running, View};
use crate::stream;
use crate::vmm;

/// The keys in a launch's `extra` list: its end, and the buffer with all parameters and its size.
const END: usize = 0;
const BUFFER: usize = 1;
const SIZE: usize = 2;

/// A launch's parameters: an address for each, or one buffer.
struct Arguments {
    each: In<usize>,
    extra: In<usize>,
}

impl Arguments {
    /// Returns the bytes of all parameters.
    fn bytes(&self, kernel: &Kernel) -> Outcome<Vec<u8>> {
        let size =
            kernel.parameters.iter().map(|parameter| parameter.offset + parameter.size).max().unwrap_or(0) as usize;
        let mut bytes = vec![0; size];
        if !self.extra.is_null() {
            if !self.each.is_null() {
                return Err(Code::INVALID_VALUE);
            }
            let (mut buffer, mut given) = (In::<u8>::at_address(0), 0);
            for index in (0..).step_by(2).take(8) {
                match self.extra.at(index)? {
                    END => break,
                    BUFFER => buffer = In::at_address(self.extra.at(index + 1)?),
                    SIZE => given = In::<usize>::at_address(self.extra.at(index + 1)?).get()?,
                    _ => return Err(Code::INVALID_VALUE),
                }
            }
            if given < size {
                return Err(Code::INVALID_VALUE);
            }
            if size > 0 {
                bytes = buffer.list(size)?;
            }
            return Ok(bytes);
        }
        for (index, parameter) in kernel.parameters.iter().enumerate() {
            let value = In::<u8>::at_address(self.each.at(index)?).list(parameter.size as usize)?;
            bytes[parameter.offset as usize..][..value.len()].copy_from_slice(&value);
        }
        Ok(bytes)
    }
}

/// The alignment of the words of a cooperative grid.
const WORKSPACE: u64 = 8;

/// The most blocks per cluster that a kernel gets without asking for more.
const MAX_CLUSTER: u32 = 8;

/// The shape of a launch.
struct Shape {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    cluster: Option<[u32; 3]>,
    cooperative: bool,
}

impl Shape {
    fn check(&self, kernel: &Kernel, dynamic: u32) -> Outcome {
        let within =
            |sizes: [u32; 3], most: [u32; 3]| sizes.iter().zip(most).all(|(size, most)| (1..=most).contains(size));
        let threads = self.block.iter().map(|size| u64::from(*size)).product::<u64>();
        let fits =
            within(self.grid, MAX_GRID) && within(self.block, MAX_BLOCK) && threads <= u64::from(kernel.max_threads);
        let wanted = kernel.required_block.is_none_or(|required| required == self.block);
        if !fits || !wanted || self.shared > dynamic {
            return Err(Code::INVALID_VALUE);
        }
        let cluster = self.cluster.or(kernel.required_cluster).unwrap_or([1; 3]);
        let contradicts = kernel.required_cluster.is_some_and(|required| required != cluster);
        let whole =
            within(cluster, [MAX_CLUSTER; 3]) && (0..3).all(|axis| self.grid[axis].is_multiple_of(cluster[axis]));
        let size = cluster.iter().product::<u32>();
        if !whole || contradicts || size > MAX_CLUSTER {
            return Err(Code::INVALID_CLUSTER_SIZE);
        }
        if size > 1 && device::started()?.settings.capability.0 < 9 {
            return Err(Code::NOT_SUPPORTED);
        }
        let blocks = self.grid.iter().map(|size| u64::from(*size)).product::<u64>();
        let resident = device::resident_blocks(threads as u32, kernel.shared + self.shared);
        if self.cooperative && blocks > u64::from(resident) {
            return Err(Code::COOPERATIVE_LAUNCH_TOO_LARGE);
        }
        Ok(())
    }
}

fn code_of(kind: TrapKind) -> Code {
    match kind {
        TrapKind::Address => Code::ILLEGAL_ADDRESS,
        TrapKind::Misaligned => Code::MISALIGNED_ADDRESS,
        TrapKind::AddressSpace => Code::INVALID_ADDRESS_SPACE,
        TrapKind::Resources => Code::LAUNCH_OUT_OF_RESOURCES,
        TrapKind::Watchdog => Code::LAUNCH_TIMEOUT,
        _ => Code::LAUNCH_FAILED,
    }
}

fn launch(handle: usize, shape: &Shape, stream: usize, arguments: &Arguments) -> Outcome {
    let (context, stream) = stream::for_work(stream)?;
    let function = function::function(handle)?;
    let module = MODULES.get(function.module).filter(|module| module.context == context.handle);
    let module = module.ok_or(Code::INVALID_HANDLE)?;
    shape.check(&function.kernel, function.dynamic.load(Ordering::Relaxed))?;
    let settings = &device::started()?.settings;
    // Each launch gets its own seed, from its number within the process.
    static LAUNCHES: AtomicU64 = AtomicU64::new(0);
    let number = LAUNCHES.fetch_add(1, Ordering::Relaxed);
    // A cooperative grid's barrier has two words in device memory, for as long as the kernel runs.
    let wants = shape.cooperative && function.kernel.workspace;
    let workspace = if wants { alloc::allocate(&context, 8, WORKSPACE, Kind::Heap)? } else { 0 };
    if wants {
        copy::fill(workspace, &[0; 8]);
    }
    let launch = Launch {
        grid: shape.grid,
        block: shape.block,
        cluster: shape.cluster,
        workspace,
        shared: shape.shared,
        parameters: arguments.bytes(&function.kernel)?,
        seed: settings.seed.wrapping_add(number),
        time: Time::System,
        watchdog: settings.watchdog,
        weak: settings.weak,
        checks_posts: settings.checks_posts,
    };
    let view = View { device: context.device };
    stream.give(move |fault| {
        static NEVER: AtomicBool = AtomicBool::new(false);
        let _running = Running::begin();
        let (loaded, kernel) = (&module.loaded, &function.kernel);
        let ended = if check::enabled() && !launch.weak {
            check::run(loaded, kernel, &launch, &view, &NEVER, (number, module.handle), &vmm::mappings())
        } else {
            soft_gpu_ptx::run(loaded, kernel, &launch, &view, &NEVER)
        };
        if let Err(trap) = ended {
            let code = code_of(trap.kind);
            let fix = if trap.kind == TrapKind::Watchdog { "; SOFTGPU_WATCHDOG has the seconds" } else { "" };
            log(format_args!("{trap} ({code}; launch {number}, seed {}){fix}", launch.seed));
            fault.set(code);
        }
        if wants {
            // Destroying the context may already have released it.
            let _ = alloc::release(workspace, |entry| matches!(entry.kind, Kind::Heap));
        }
    });
    Ok(())
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: usize,
    attributes: In<Attribute>,
    count: u32,
}

/// `CUlaunchAttribute`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Attribute {
    number: u32,
    pad: u32,
    value: [u32; 16],
}

const _: () = assert!(size_of::<Config>() == 56 && size_of::<Attribute>() == 72);

/// Numbers of launch attributes, such as `CU_LAUNCH_ATTRIBUTE_COOPERATIVE`.
const COOPERATIVE: u32 = 2;
const CLUSTER: u32 = 4;
const EVENTS: [u32; 2] = [7, 12];
const LAST: u32 = 18;

api! {
    cuLaunchKernel(
        function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, shared: u32, stream: usize,
        each: In<usize>, extra: In<usize>,
    ) {
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], shared, cluster: None, cooperative: false };
        launch(function, &shape, stream, &Arguments { each, extra })
    }

    cuLaunchCooperativeKernel(
        function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, shared: u32, stream: usize,
        each: In<usize>,
    ) {
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], shared, cluster: None, cooperative: true };
        launch(function, &shape, stream, &Arguments { each, extra: In::at_address(0) })
    }

    /// Attributes that tell hardware how to schedule, programmatic serialization among them, have no effect; kernel
    /// events are not supported.
    cuLaunchKernelEx(config: In<Config>, function: usize, each: In<usize>, extra: In<usize>) {
        let config = config.get()?;
        let (mut cooperative, mut cluster) = (false, None);
        for attribute in config.attributes.list(config.count as usize)? {
            match attribute.number {
                COOPERATIVE => cooperative = attribute.value[0] != 0,
                CLUSTER => cluster = Some([attribute.value[0], attribute.value[1], attribute.value[2]]),
                number if EVENTS.contains(&number) => return Err(Code::NOT_SUPPORTED),
                number if number > LAST => return Err(Code::INVALID_VALUE),
                _ => {}
            }
        }
        let shape = Shape { grid: config.grid, block: config.block, shared: config.shared, cluster, cooperative };
        launch(function, &shape, config.stream, &Arguments { each, extra })
    }
}
