//! The panic handler of the PTX module.

use core::arch::asm;
use core::panic::PanicInfo;

/// Ends the kernel with a trap, which the host's next CUDA call reports. No path of the device code panics.
#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    // SAFETY: the trap ends the kernel and does not return.
    unsafe { asm!("trap;", options(noreturn, nostack)) }
}
