//! A device without a card: queues in plain memory and sequential keys. It executes no work request.
#![allow(unsafe_code)]

use ferrogin_test_support::mlx5_memory::Memory;
use mlx5::cq::{CqParts, Layout};
use mlx5::device::*;
use mlx5::mmio::BlueFlame;
use mlx5::rq::RecvParts;
use mlx5::sq::SendParts;
use mlx5::srq::SrqParts;
use mlx5::wqe::{Limits, WindowType};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

pub struct Fake {
    caps: Caps,
    next: AtomicU32,
    /// Rings of the queue pairs, oldest first.
    pub rings: Mutex<Vec<&'static Memory>>,
}

impl Fake {
    pub fn new() -> Self {
        let caps = Caps {
            name: "fake0".into(),
            compression: true,
            type1_windows: true,
            type2_windows: true,
            atomics: true,
            blueflame: false,
            max_posts: 64,
            max_cqes: 64,
            limits: Limits { max_inline: 124, max_sge: 4 },
        };
        Self { caps, next: AtomicU32::new(0x100), rings: Mutex::default() }
    }

    fn number(&self) -> u32 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns memory that is never freed, because queues point into it.
    fn memory(&self, bytes: usize) -> &'static Memory {
        Box::leak(Box::new(Memory::new(bytes)))
    }
}

impl Device for Fake {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc_pd(&self) -> Result<Pd, DeviceError> {
        Ok(Pd { handle: Handle::new(()) })
    }

    unsafe fn register(&self, pd: &Pd, addr: NonNull<u8>, length: usize, access: Access) -> Result<Mr, DeviceError> {
        let key = self.number() << 8;
        let (handle, pd) = (Handle::new(()), pd.clone());
        Ok(Mr { handle, pd, addr: addr.as_ptr() as u64, length: length as u64, access, lkey: key, rkey: key })
    }

    fn alloc_window(&self, pd: &Pd, window: WindowType) -> Result<RawWindow, DeviceError> {
        // The tag starts at 0xfe, so that it wraps after two binds.
        Ok(RawWindow { handle: Handle::new(()), pd: pd.clone(), window, rkey: self.number() << 8 | 0xfe })
    }

    fn create_cq(&self, attr: &CqAttr) -> Result<RawCq, DeviceError> {
        let (slots, record) = (self.memory(attr.entries.next_power_of_two() as usize * 64), self.memory(8));
        let handle = Handle::new(());
        let mut ring = slots.slots();
        ring.initialise();
        let parts = CqParts {
            slots: ring,
            record: record.record(0),
            arm_record: record.record(1),
            arm: self.memory(8).arm_register(),
            cqn: self.number(),
            layout: if attr.compression { Layout::Enhanced } else { Layout::Plain },
            start_index: 0,
            keep_alive: handle.clone(),
        };
        Ok(RawCq { handle, parts })
    }

    fn create_srq(&self, _pd: &Pd, attr: &SrqAttr) -> Result<SrqParts, DeviceError> {
        let ring = self.memory(attr.entries.next_power_of_two() as usize * 64).ring(6);
        let keep_alive = Handle::new(());
        Ok(SrqParts { ring, record: self.memory(8).record(0), srqn: self.number(), keep_alive })
    }

    fn create_qp(&self, pd: &Pd, attr: &QpAttr) -> Result<RawQp, DeviceError> {
        let (ring, record) = (self.memory(attr.max_send.next_power_of_two() as usize * 64), self.memory(8));
        self.rings.lock().expect("not poisoned").push(ring);
        let handle = Handle::new(());
        let send = SendParts {
            ring: ring.ring(6),
            record: record.record(1),
            register: self.memory(512).register(256, BlueFlame::Never),
            qpn: self.number(),
            transport: attr.transport,
            limits: attr.limits,
            max_posts: attr.max_send,
            signal_all: attr.signal_all,
            start_index: 0,
            keep_alive: handle.clone(),
        };
        let recv = self.memory(attr.max_recv.next_power_of_two() as usize * 32);
        let recv = RecvParts { ring: recv.ring(5), record: record.record(0), keep_alive: handle.clone() };
        Ok(RawQp { handle, pd: pd.clone(), send, recv: attr.srq.is_none().then_some(recv) })
    }

    fn endpoint(&self, _qp: &Handle) -> Result<Endpoint, DeviceError> {
        Err(DeviceError::Unsupported { what: "connections" })
    }

    fn connect(&self, _qp: &Handle, _peer: &Endpoint) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported { what: "connections" })
    }

    fn open_datagrams(&self, _qp: &Handle, _qkey: u32) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported { what: "datagrams" })
    }
}

/// Attributes of a queue pair with 16 blocks.
pub fn attr(device: &dyn Device) -> QpAttr {
    let cq = device.create_cq(&CqAttr { entries: 64, compression: false }).expect("a queue").handle;
    QpAttr {
        transport: mlx5::wqe::Transport::Rc,
        send_cq: cq.clone(),
        recv_cq: cq,
        srq: None,
        max_send: 16,
        max_recv: 16,
        limits: Limits { max_inline: 124, max_sge: 4 },
        max_recv_sge: 2,
        signal_all: false,
    }
}
