//! Words that kernels read in each round of a wait, and that the host writes while they run.
//!
//! A read of host memory takes a GPU about a microsecond, so the words are in the kernels' memory, and the host's write
//! crosses PCIe instead. It's a store where the CPU can address that memory, also through GDRCopy. Otherwise it's a
//! copy by the driver, in a thread of its own: a driver call may have to wait for another thread's call, which waits
//! for a kernel that waits for this word's writer, and must hold up nobody else. A context has one such thread,
//! so its words are written in order: once the driver has a word to write, it writes all later ones.
#![allow(unsafe_code)]

use crate::device::{Device, DeviceBuffer, DeviceError, WordMapping, bytes_of};
use ferrogin_ffi::ext::{STOP_ABORT, STOP_LOST};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::mpsc::{Sender, channel};

/// Words in a buffer that kernels can read.
pub struct KernelWords {
    buffer: Arc<dyn DeviceBuffer>,
    mapping: Option<WordMapping>,
    /// Writes by the driver, if there is no other way. Ends with the words of the context.
    writer: Arc<Mutex<Option<Sender<Write>>>>,
}

/// A word's buffer, offset and value.
type Write = (Arc<dyn DeviceBuffer>, usize, u32);

impl KernelWords {
    /// Makes words of `buffer` writable. The host writes `len` bytes from `offset` on.
    pub fn new(device: &dyn Device, buffer: Arc<dyn DeviceBuffer>, offset: usize, len: usize) -> Self {
        let address = buffer.device_address() + offset as u64;
        let mapping = if buffer.host_address().is_none() { device.map_words(address as *mut _, len) } else { None };
        Self { buffer, mapping, writer: Arc::default() }
    }

    /// Writes the word at `offset`, which is a multiple of 4, and returns at once. Kernels see it soon, unless the
    /// driver is stuck.
    pub fn store(&self, offset: usize, value: u32) {
        let mut writer = self.writer.lock();
        // Not past words that the driver still has to write.
        if writer.is_none() {
            if let Some(base) = self.buffer.host_address() {
                // SAFETY: the caller names an aligned word of the buffer, which kernels access atomically too.
                let word = unsafe { AtomicU32::from_ptr(base.wrapping_add(offset).cast()) };
                return word.store(value, Ordering::Release);
            }
            if let Some(WordMapping { distance, .. }) = self.mapping {
                let word = (self.buffer.device_address() + offset as u64).wrapping_add(distance) as *mut u32;
                // SAFETY: the caller names an aligned word of the bytes that `new` mapped. No Rust reference covers it.
                unsafe { word.write_volatile(value) };
                // The mapping combines writes; the fence makes this one leave the CPU.
                return fence(Ordering::SeqCst);
            }
        }
        // Fails only if the thread didn't start.
        let _ = writer.get_or_insert_with(start_writer).send((self.buffer.clone(), offset, value));
    }
}

/// Starts a thread that writes words by the driver, in order, and keeps the memory until the driver has returned.
fn start_writer() -> Sender<Write> {
    let (sender, words) = channel::<Write>();
    let write = move || {
        for (buffer, offset, value) in words {
            let written: Result<(), DeviceError> = buffer.write(offset, bytes_of(&[value]));
            if let Err(error) = written {
                crate::warn!(
                    "a kernel's waits cannot be ended: {error}; they end by their time limit. Look for the first CUDA error"
                );
            }
        }
    };
    // The library stays loaded (build.rs), so the thread's code does too.
    if let Err(error) = std::thread::Builder::new().name("ferrogin-word".to_owned()).spawn(write) {
        crate::warn!("a kernel's waits cannot be ended: starting a thread: {error}; they end by their time limit");
    }
    sender
}

/// The word that ends the waits of a context's kernels.
pub struct StopWord {
    words: Arc<KernelWords>,
    offset: usize,
    /// Held while it's written, so that writes are in order.
    value: Mutex<u32>,
}

impl StopWord {
    /// Takes the word at `offset`, which is 0.
    pub fn new(words: Arc<KernelWords>, offset: usize) -> Self {
        Self { words, offset, value: Mutex::new(0) }
    }

    /// Makes the words of another buffer writable. Kernels see what is written there before what this word says later.
    pub fn words_before(&self, device: &dyn Device, buffer: Arc<dyn DeviceBuffer>) -> KernelWords {
        let len = buffer.len();
        KernelWords { writer: self.words.writer.clone(), ..KernelWords::new(device, buffer, 0, len) }
    }

    /// Ends the waits for good.
    pub fn raise(&self) {
        self.replace(STOP_ABORT);
    }

    /// Ends the waits because of a lost rank, or lets them go on, unless they have been ended for good.
    pub fn set_lost(&self, is_lost: bool) {
        self.replace(if is_lost { STOP_LOST } else { 0 });
    }

    fn replace(&self, new: u32) {
        let mut value = self.value.lock();
        if *value != STOP_ABORT {
            *value = new;
            self.words.store(self.offset, new);
        }
    }

    /// Returns whether the waits have been ended for good.
    pub fn is_raised(&self) -> bool {
        *self.value.lock() == STOP_ABORT
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::device::DmaBuf;
    use crate::device::Use;
    use crate::device::cpu::CpuDevice;
    use ferrogin_test_support::wait::wait_until;
    use std::mem::MaybeUninit;
    use std::sync::Mutex as StdMutex;

    impl StopWord {
        /// Returns whether a lost rank ends the waits.
        pub fn is_lost(&self) -> bool {
            *self.value.lock() == STOP_LOST
        }

        /// Returns a word in a CPU's memory.
        pub fn on_cpu() -> Arc<Self> {
            let device = CpuDevice::new(false);
            let buffer: Arc<dyn DeviceBuffer> = device.allocate(64, Use::Card).unwrap().into();
            Arc::new(Self::new(Arc::new(KernelWords::new(&device, buffer, 8, 4)), 8))
        }
    }

    fn word(buffer: &dyn DeviceBuffer, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        buffer.read(offset, &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn stop_word_is_raised_once() {
        let stop = StopWord::on_cpu();
        assert_eq!((stop.is_raised(), word(&*stop.words.buffer, 8)), (false, 0));
        stop.raise();
        assert_eq!((stop.is_raised(), word(&*stop.words.buffer, 8), word(&*stop.words.buffer, 12)), (true, 1, 0));
        stop.words.store(8, 0);
        stop.raise();
        stop.set_lost(true);
        assert_eq!(word(&*stop.words.buffer, 8), 0);
        let lost = StopWord::on_cpu();
        let words = [true, true, false, true].map(|is_lost| {
            lost.set_lost(is_lost);
            (lost.is_raised(), word(&*lost.words.buffer, 8))
        });
        assert_eq!(words, [(false, STOP_LOST), (false, STOP_LOST), (false, 0), (false, STOP_LOST)]);
        lost.raise();
        assert_eq!((lost.is_raised(), word(&*lost.words.buffer, 8)), (true, 1));
    }

    /// Memory of a GPU whose driver is stuck while `driver` is locked.
    pub struct Gpu {
        memory: Box<dyn DeviceBuffer>,
        driver: Arc<StdMutex<()>>,
        /// Offset and value of each word that the driver has written.
        pub written: Mutex<Vec<(usize, u32)>>,
    }

    impl Gpu {
        pub fn new(device: &CpuDevice, driver: Arc<StdMutex<()>>) -> Arc<Self> {
            let memory = device.allocate(4096, Use::Card).unwrap();
            Arc::new(Self { memory, driver, written: Mutex::default() })
        }
    }

    impl DeviceBuffer for Gpu {
        fn device_address(&self) -> u64 {
            self.memory.device_address()
        }

        fn host_address(&self) -> Option<*mut u8> {
            None
        }

        fn len(&self) -> usize {
            self.memory.len()
        }

        fn dma_buf(&self) -> Option<DmaBuf<'_>> {
            None
        }

        fn write(&self, offset: usize, bytes: &[MaybeUninit<u8>]) -> Result<(), DeviceError> {
            let _stuck = self.driver.lock().unwrap();
            self.memory.write(offset, bytes)?;
            self.written.lock().push((offset, word(&*self.memory, offset)));
            Ok(())
        }

        fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
            let _stuck = self.driver.lock().unwrap();
            self.memory.read(offset, bytes)
        }
    }

    /// The stop word is written by the driver, or mapped although the other words aren't.
    #[test]
    fn words_before_the_stop_word_are_written_first() {
        for is_mapped in [false, true] {
            let (device, driver) = (CpuDevice::new(false), Arc::new(StdMutex::new(())));
            let [own, tables] = [Arc::default(), driver.clone()].map(|driver| Gpu::new(&device, driver));
            let words = KernelWords::new(&device, own.clone(), 0, 4);
            // A CPU's memory is at its device address.
            let mapping = is_mapped.then(|| WordMapping { distance: 0, _mapped: Box::new(()) });
            let stop = StopWord::new(Arc::new(KernelWords { mapping, ..words }), 0);
            let words = stop.words_before(&device, tables.clone());
            let stuck = driver.lock().unwrap();
            words.store(4, 7);
            stop.set_lost(true);
            for _ in 0..1000 {
                std::thread::yield_now();
                assert_eq!(word(&*own, 0), 0, "the driver has not written the other word");
            }
            drop(stuck);
            wait_until("write", || word(&*own, 0) == STOP_LOST);
            assert_eq!(word(&*tables, 4), 7);
        }
    }

    #[test]
    fn stuck_driver_holds_up_neither_writer_nor_owner() {
        let (device, driver) = (CpuDevice::new(false), Arc::new(StdMutex::new(())));
        let buffer = Gpu::new(&device, driver.clone());
        let still_there = Arc::downgrade(&buffer);
        let stuck = driver.lock().unwrap();
        let stop = StopWord::new(Arc::new(KernelWords::new(&device, buffer, 0, 4)), 0);
        stop.raise();
        assert!(stop.is_raised());
        // A context that is destroyed meanwhile leaves the memory to the writer.
        drop(stop);
        let buffer = still_there.upgrade().expect("the writer keeps the memory");
        drop(stuck);
        wait_until("write", || word(&*buffer, 0) == 1);
        drop(buffer);
        wait_until("end of the writer", || still_there.strong_count() == 0);
    }
}
