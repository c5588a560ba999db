//! What a PTX module needs beside the functions of [`capi`](crate::capi).

use core::arch::asm;
use core::panic::PanicInfo;

/// Ends the kernel; the host's next CUDA call says so. Nothing on the device's paths is meant to come here.
#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    // SAFETY: nothing runs after it.
    unsafe { asm!("trap;", options(noreturn, nostack)) }
}
