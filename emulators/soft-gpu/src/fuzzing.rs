//! Loads arbitrary bytes as an image, for the fuzz harness.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use soft_gpu_ptx::Launch;

use crate::context::Context;
use crate::device;
use crate::handle::fresh;
use crate::link::Image;
use crate::module::{self, MODULES};
use crate::space::{Running, View};

/// Loads an image and runs one block of each kernel with all-zero parameters.
pub fn images(data: &[u8]) {
    let Ok(image) = Image::of_bytes("fuzz", data) else { return };
    assert_eq!(Image::of_bytes("again", &image.to_bytes()).as_ref(), Ok(&image));
    let Ok(program) = image.link() else { return };
    if program.globals().iter().any(|global| global.size > 1 << 20) {
        return;
    }
    static CONTEXT: OnceLock<Arc<Context>> = OnceLock::new();
    let context = CONTEXT.get_or_init(|| {
        assert_eq!(device::cuInit(0), crate::code::Code::SUCCESS);
        Context::create(0, 0, fresh(), false)
    });
    let Ok(handle) = module::load(context, program, false) else { return };
    let Some(loaded) = MODULES.get(handle) else { return };
    for function in &loaded.functions {
        let kernel = &function.kernel;
        let size = kernel.parameters.iter().map(|parameter| parameter.offset + parameter.size).max().unwrap_or(0);
        if size > 1 << 16 {
            continue;
        }
        let mut launch = Launch::new([1; 3], kernel.required_block.unwrap_or([1; 3]), vec![0; size as usize]);
        launch.watchdog = Some(Duration::from_millis(20));
        let _running = Running::begin();
        // A kernel of arbitrary bytes may end in any way short of a panic or crash.
        let _ = soft_gpu_ptx::run(&loaded.loaded, kernel, &launch, &View { device: 0 }, &AtomicBool::new(false));
    }
    module::forget(context.handle);
}
