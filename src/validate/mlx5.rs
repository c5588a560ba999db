//! `ferrogin validate --mlx5`: compares a ConnectX card with the software one, using the crate `mlx5` between two of
//! the card's queue pairs.
//!
//! Besides the crate's operations, it tries the variants on which public sources disagree
//! (emulators/soft-mlx5/README.md). Each gets its own queue pairs, because a failure ends a queue pair.
#![allow(unsafe_code)]

use super::expected::Expected;
use super::expected::Kind::{May, Must};
use mlx5::cq::{CompletionQueue, Polled};
use mlx5::device::{Access, CqAttr, Device, Mr, Pd, QpAttr, RawCq};
use mlx5::qp::QueuePair;
use mlx5::sq::Flags;
use mlx5::verbs::{CompressedFormat, Hardware};
use mlx5::wire::{Cqe, CqeFormat, CqeOpcode, MkeyAccess, MkeyMask};
use mlx5::wqe::{Bind, Data, Limits, Op, Remote, Sge, Transport, Umr, UmrKind, WindowType, With, WorkRequest};
use serde_json::json;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Size of an end's memory, and where its window is.
const BYTES: usize = 8192;
const FROM: u64 = 1024;
const LENGTH: u64 = 512;
/// The longest wait for a completion. A card answers within microseconds, and gives up its retries after a few seconds.
const WAIT: Duration = Duration::from_secs(20);
/// Slots of the completion queue whose marks are checked, and how many laps it makes.
const SLOTS: u32 = 64;
const LAPS: u32 = 3;
const LIMITS: Limits = Limits { max_inline: 64, max_sge: 1 };
const RIGHTS: MkeyAccess = MkeyAccess::REMOTE_READ.with(MkeyAccess::REMOTE_WRITE);
/// The local read right and its mask bit, as in the kernel's driver; the crate's binds have neither.
const LOCAL_READ: MkeyAccess = MkeyAccess::new(0x04);
const LOCAL_READ_IN_MASK: MkeyMask = MkeyMask::new(1 << 17);

/// What the software card shows.
pub const SOFTWARE_CARD: &Expected = &[
    ("send and receive", Must, "bytes arrive"),
    ("write", Must, "bytes arrive"),
    ("read", Must, "bytes arrive"),
    ("window", Must, "bytes arrive"),
    ("region's key, after a bind", Must, "bytes arrive"),
    ("window, after its invalidation", Must, "access: RemoteAccess"),
    ("bind, translations_octword_size 0", May, "bytes arrive"),
    ("bind, translations_octword_size 4", May, "bytes arrive"),
    ("bind, klm_octowords 2", May, "completes, and no byte moves"),
    ("bind, LOCAL_READ not given", May, "bytes arrive"),
    ("bind, LOCAL_READ given", May, "bytes arrive"),
    ("bind, LOCAL_READ given and in the mask", May, "bind: MwBind"),
    ("bind, log_page_size 0", May, "bytes arrive"),
    ("bind, log_page_size 12", May, "bytes arrive"),
    ("plain queue: owner bit is the lap's parity", Must, "yes"),
    ("plain queue: byte 62 is the lap", May, "no"),
    ("compressed queue", May, "bytes arrive"),
    ("compressed queue: owner bit is the lap's parity", May, "yes"),
    ("compressed queue: byte 62 is the lap", May, "yes"),
    ("compressed queue: after a burst", Must, "all completions, in order"),
];

type Outcome<T> = Result<T, String>;

struct End {
    pd: Pd,
    qp: QueuePair<u32>,
    cq: CompletionQueue,
    mr: Mr,
    memory: NonNull<u8>,
}

impl End {
    fn new(device: &Arc<dyn Device>, cq: RawCq) -> Outcome<End> {
        let pd = device.alloc_pd().map_err(text)?;
        let attr = QpAttr {
            transport: Transport::Rc,
            send_cq: cq.handle.clone(),
            recv_cq: cq.handle.clone(),
            srq: None,
            max_send: 64,
            max_recv: 16,
            limits: LIMITS,
            max_recv_sge: 1,
            signal_all: false,
        };
        let qp = QueuePair::create(device, &pd, &attr).map_err(text)?;
        // The card may write to it until the process ends.
        let memory = NonNull::from(Box::leak(Box::new([0_u8; BYTES]))).cast();
        let access = Access(Access::LOCAL_WRITE.0 | Access::REMOTE_WRITE.0 | Access::REMOTE_READ.0 | Access::MW_BIND.0);
        // SAFETY: the memory is leaked, and this module accesses it only through pointers.
        let mr = unsafe { device.register(&pd, memory, BYTES, access) }.map_err(text)?;
        Ok(End { pd, qp, cq: CompletionQueue::new(cq.parts), mr, memory })
    }

    fn byte(&self, at: usize) -> NonNull<u8> {
        assert!(at < BYTES);
        NonNull::new(self.memory.as_ptr().wrapping_add(at)).unwrap_or(self.memory)
    }

    fn read(&self, at: usize) -> u8 {
        // SAFETY: `byte` returns a byte of the leaked memory.
        unsafe { self.byte(at).read_volatile() }
    }

    fn write(&self, at: usize, value: u8) {
        // SAFETY: `byte` returns a byte of the leaked memory.
        unsafe { self.byte(at).write_volatile(value) };
    }

    fn sge(&self, at: u64, length: u32) -> Sge {
        Sge { addr: self.mr.addr + at, length, lkey: self.mr.lkey }
    }

    fn post(&mut self, flags: Flags, request: &WorkRequest<'_>) -> Outcome<()> {
        self.qp.send().post(0, flags, request).map_err(|rejected| rejected.error.to_string())
    }

    /// Returns the next completion, or the error of a failed request.
    fn next(&mut self) -> Outcome<Cqe> {
        let until = Instant::now() + WAIT;
        let seen = loop {
            match self.cq.poll().map_err(text)? {
                Polled::Done(done) => break Ok(done.to_cqe()),
                Polled::Failed(error) => {
                    // The report has the whole error; cards differ in their vendor codes.
                    eprintln!("{error}, vendor code {:#04x}", error.vendor);
                    break Err(format!("{:?}", error.syndrome));
                }
                Polled::Empty if Instant::now() > until => return Err("no completion came".into()),
                Polled::Empty => std::hint::spin_loop(),
            }
        };
        self.cq.release();
        let cqe = seen?;
        if cqe.op_own.opcode() == CqeOpcode::Req {
            self.qp.send().complete(cqe.wqe_counter.get()).map_err(text)?.for_each(drop);
        }
        Ok(cqe)
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn connect(a: &End, b: &End) -> Outcome<()> {
    let (of_a, of_b) = (a.qp.endpoint().map_err(text)?, b.qp.endpoint().map_err(text)?);
    a.qp.connect(&of_b).map_err(text)?;
    b.qp.connect(&of_a).map_err(text)
}

/// Makes two connected queue pairs on the card: the memory's owner and its peer.
fn pair(device: &Arc<dyn Device>) -> Outcome<(End, End)> {
    let end = || End::new(device, device.create_cq(&CqAttr { entries: SLOTS, compression: false }).map_err(text)?);
    let (owner, peer) = (end()?, end()?);
    connect(&owner, &peer)?;
    Ok((owner, peer))
}

/// Writes a byte of the owner's memory as its peer.
fn write(owner: &End, peer: &mut End, to: u64, rkey: u32, at: usize) -> Outcome<String> {
    let value = !owner.read(at);
    let data = [value];
    let bytes: [&[u8]; 1] = [&data];
    let request: WorkRequest<'_> =
        Op::Write { remote: Remote { addr: to, rkey }, data: Data::Inline(&bytes), imm: None };
    peer.post(Flags::SIGNALED, &request)?;
    if let Err(error) = peer.next() {
        return Ok(format!("access: {error}"));
    }
    // The peer's completion says that the bytes are on their way to memory; a card on the same host has written them by
    // then.
    Ok(if owner.read(at) == value { "bytes arrive" } else { "completes, and no byte moves" }.to_owned())
}

fn send(device: &Arc<dyn Device>) -> Outcome<String> {
    let (mut owner, mut peer) = pair(device)?;
    let sge = owner.sge(0, 64);
    let recv = owner.qp.recv().ok_or("no receive queue")?;
    recv.post(0, &[sge]).map_err(|rejected| rejected.error.to_string())?;
    recv.ring();
    let bytes: [&[u8]; 1] = [b"hello"];
    peer.post(Flags::SIGNALED, &Op::Send { data: Data::Inline(&bytes), with: With::Nothing })?;
    peer.next()?;
    let received = owner.next()?.byte_cnt.get();
    let same = received == 5 && b"hello".iter().enumerate().all(|(at, byte)| owner.read(at) == *byte);
    Ok(if same { "bytes arrive" } else { "other bytes arrive" }.into())
}

fn plain_write(device: &Arc<dyn Device>) -> Outcome<String> {
    let (owner, mut peer) = pair(device)?;
    write(&owner, &mut peer, owner.mr.addr + 9, owner.mr.rkey, 9)
}

fn plain_read(device: &Arc<dyn Device>) -> Outcome<String> {
    let (owner, mut peer) = pair(device)?;
    owner.write(7, 0x5a);
    let into = [peer.sge(100, 1)];
    peer.post(
        Flags::SIGNALED,
        &Op::Read { remote: Remote { addr: owner.mr.addr + 7, rkey: owner.mr.rkey }, into: &into },
    )?;
    peer.next()?;
    Ok(if peer.read(100) == 0x5a { "bytes arrive" } else { "completes, and no byte moves" }.into())
}

/// What the peer does after a bind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// Writes through the window.
    Use,
    /// Writes with the region's key.
    UseRegion,
    /// Writes through the window, and again after its invalidation.
    UseInvalidated,
}

/// Binds a window with a UMR modified by `change`, and says what the peer's last write did.
fn window(device: &Arc<dyn Device>, then: Then, change: impl Fn(&mut Umr)) -> Outcome<String> {
    let (mut owner, mut peer) = pair(device)?;
    let raw = device.alloc_window(&owner.pd, WindowType::Type2).map_err(text)?;
    let tag = raw.rkey as u8 ^ 0x55;
    let rkey = raw.rkey & !0xff | u32::from(tag);
    let bind = Bind {
        window: WindowType::Type2,
        rkey: raw.rkey,
        tag,
        lkey: owner.mr.lkey,
        addr: owner.mr.addr + FROM,
        length: LENGTH,
        access: RIGHTS,
        zero_based: false,
    };
    let mut umr = Umr::bind(&bind, owner.qp.qpn()).map_err(text)?;
    change(&mut umr);
    owner.post(Flags::SIGNALED, &Op::Umr { umr, kind: UmrKind::Bind })?;
    if let Err(error) = owner.next() {
        return Ok(format!("bind: {error}"));
    }
    let at = FROM as usize + 1;
    let to = owner.mr.addr + FROM + 1;
    if then == Then::UseRegion {
        return write(&owner, &mut peer, to, owner.mr.rkey, at);
    }
    let first = write(&owner, &mut peer, to, rkey, at)?;
    if then == Then::Use || first != "bytes arrive" {
        return Ok(first);
    }
    owner.post(Flags::SIGNALED, &Op::Umr { umr: Umr::local_inv(rkey), kind: UmrKind::LocalInv })?;
    if let Err(error) = owner.next() {
        return Ok(format!("invalidation: {error}"));
    }
    write(&owner, &mut peer, to, rkey, at)
}

/// Writes enough for several laps of the peer's completion queue, created with or without compression. Returns whether
/// every completion's owner bit, and whether its byte 62, match its lap.
fn marks(device: &Arc<dyn Device>, compression: bool) -> Outcome<(bool, bool)> {
    let owner = End::new(device, device.create_cq(&CqAttr { entries: SLOTS, compression: false }).map_err(text)?)?;
    let mut peer = End::new(device, device.create_cq(&CqAttr { entries: SLOTS, compression }).map_err(text)?)?;
    connect(&owner, &peer)?;
    let (mut owner_bit, mut lap_byte) = (true, true);
    for index in 0..LAPS * peer.cq.capacity() {
        let bytes: [&[u8]; 1] = [&[index as u8]];
        let remote = Remote { addr: owner.mr.addr, rkey: owner.mr.rkey };
        peer.post(Flags::SIGNALED, &Op::Write { remote, data: Data::Inline(&bytes), imm: None })?;
        let lap = index / peer.cq.capacity();
        peer.next()?;
        // The slot as the card wrote it: completions come one at a time, so a block has one.
        let cqe = peer.cq.peek(index);
        // A block's owner bit means nothing.
        owner_bit &= cqe.op_own.format() == CqeFormat::Compressed || u32::from(cqe.op_own.0 & 1) == lap & 1;
        lap_byte &= u32::from(cqe.signature) == lap & 0xff;
    }
    Ok((owner_bit, lap_byte))
}

fn yes(is_so: bool) -> String {
    if is_so { "yes" } else { "no" }.into()
}

/// Returns a compressed queue's bytes after a burst of writes, for readers of the report, and what the driver reads
/// there.
fn burst(device: &Arc<dyn Device>, cq: RawCq) -> Outcome<(String, String)> {
    let owner = End::new(device, device.create_cq(&CqAttr { entries: SLOTS, compression: false }).map_err(text)?)?;
    let mut peer = End::new(device, cq)?;
    connect(&owner, &peer)?;
    let count = 32_u8;
    let last = usize::from(count) - 1;
    for index in 0..count {
        let bytes: [&[u8]; 1] = [&[index + 1]];
        let remote = Remote { addr: owner.mr.addr + u64::from(index), rkey: owner.mr.rkey };
        peer.post(Flags::SIGNALED, &Op::Write { remote, data: Data::Inline(&bytes), imm: None })?;
    }
    let until = Instant::now() + WAIT;
    while owner.read(last) != count {
        if Instant::now() > until {
            return Err("the writes did not arrive".into());
        }
        std::hint::spin_loop();
    }
    // The completions follow the data within microseconds.
    std::thread::sleep(Duration::from_millis(100));
    let mut all = String::new();
    for index in 0..u32::from(count) {
        let cqe = peer.cq.peek(index);
        all += &format!("  slot {index:2}");
        for (at, byte) in cqe.as_bytes().iter().enumerate() {
            all += &format!("{}{byte:02x}", if at.is_multiple_of(8) { " " } else { "" });
        }
        all.push('\n');
    }
    let first = peer.next()?.wqe_counter.get();
    let mut in_order = true;
    for index in 1..u16::from(count) {
        // A one-byte write takes one block of the send queue.
        in_order &= peer.next()?.wqe_counter.get() == first.wrapping_add(index);
    }
    let read = if in_order { "all completions, in order" } else { "completions of other requests" };
    Ok((all, read.into()))
}

/// Runs all checks and prints what each observed; the last line is JSON for the validation.
pub fn part() -> Outcome<()> {
    let name = std::env::var("FERROGIN_MLX5").ok().filter(|name| !name.is_empty());
    let hardware = name.map(|name| Hardware::named(&name).map(Arc::new)).transpose().map_err(text)?;
    let device: Arc<dyn Device> = match &hardware {
        Some(hardware) => hardware.clone(),
        None => soft_mlx5::open(soft_mlx5::Settings::default()).map_err(text)?,
    };
    // The parent reads it, and if the parent is gone, nobody needs it.
    let print = |line: String| drop(crate::stdout::print(format_args!("{line}\n")));
    print(format!("card: {:?}", device.caps()));
    let set = |change: fn(&mut Umr)| window(&device, Then::Use, change);
    let mut seen: Vec<(&str, Outcome<String>)> = vec![
        ("send and receive", send(&device)),
        ("write", plain_write(&device)),
        ("read", plain_read(&device)),
        ("window", set(|_| ())),
        ("region's key, after a bind", window(&device, Then::UseRegion, |_| ())),
        ("window, after its invalidation", window(&device, Then::UseInvalidated, |_| ())),
        ("bind, translations_octword_size 0", set(|umr| umr.mkey.translations_octword_size = 0.into())),
        ("bind, translations_octword_size 4", set(|umr| umr.mkey.translations_octword_size = 4.into())),
        ("bind, klm_octowords 2", set(|umr| umr.ctrl.klm_octowords = 2.into())),
        ("bind, LOCAL_READ not given", set(|umr| umr.mkey.access_flags = RIGHTS)),
        ("bind, LOCAL_READ given", set(|umr| umr.mkey.access_flags = umr.mkey.access_flags.with(LOCAL_READ))),
        (
            "bind, LOCAL_READ given and in the mask",
            set(|umr| {
                umr.mkey.access_flags = umr.mkey.access_flags.with(LOCAL_READ);
                umr.ctrl.mkey_mask = umr.ctrl.mkey_mask.with(LOCAL_READ_IN_MASK);
            }),
        ),
        ("bind, log_page_size 0", set(|umr| umr.mkey.log_page_size = 0)),
        ("bind, log_page_size 12", set(|umr| umr.mkey.log_page_size = 12)),
    ];
    let plain = marks(&device, false);
    seen.push(("plain queue: owner bit is the lap's parity", plain.clone().map(|(owner, _)| yes(owner))));
    seen.push(("plain queue: byte 62 is the lap", plain.map(|(_, lap)| yes(lap))));
    if device.caps().compression {
        let compressed = marks(&device, true);
        seen.push(("compressed queue", compressed.clone().map(|_| "bytes arrive".into())));
        seen.push(("compressed queue: owner bit is the lap's parity", compressed.clone().map(|(owner, _)| yes(owner))));
        seen.push(("compressed queue: byte 62 is the lap", compressed.map(|(_, lap)| yes(lap))));
        let cq = device.create_cq(&CqAttr { entries: SLOTS, compression: true }).map_err(text);
        seen.push(("compressed queue: after a burst", cq.and_then(|cq| Ok(burst(&device, cq)?.1))));
    }
    if let Some(hardware) = &hardware {
        print(match hardware.firmware_compression() {
            Ok(answer) => format!("compressed queues by the firmware: {answer:?}"),
            Err(error) => format!("compressed queues by the firmware: {error}"),
        });
        for format in CompressedFormat::ALL {
            let cq = hardware.create_compressed_cq(SLOTS, format).map_err(text);
            match cq.and_then(|cq| burst(&device, cq)) {
                Ok((slots, read)) => print(format!("compressed queue of rdma-core, {format:?}: {read}\n{slots}")),
                Err(why) => print(format!("compressed queue of rdma-core, {format:?}: {why}")),
            }
        }
    }
    let pairs: Vec<_> =
        seen.into_iter().map(|(key, seen)| json!([key, seen.unwrap_or_else(|why| format!("error: {why}"))])).collect();
    print(json!({ "observed": pairs }).to_string());
    Ok(())
}
