//! Sends one message between two queue pairs of a ConnectX card, in software by default: `cargo run -p soft-mlx5
//! --example mlx5_send`.
//!
//! With `FERROGIN_MLX5=mlx5_0` the same code runs on that card.
#![allow(unsafe_code)]

use mlx5::cq::{CompletionQueue, Polled};
use mlx5::device::{Access, CqAttr, QpAttr};
use mlx5::qp::QueuePair;
use mlx5::sq::Flags;
use mlx5::wire::Cqe;
use mlx5::wqe::{Data, Limits, Op, Sge, Transport, With, WorkRequest};
use soft_mlx5::Settings;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

type Error = Box<dyn std::error::Error>;

/// Waits for the queue's next completion.
fn next(queue: &mut CompletionQueue) -> Result<Cqe, Error> {
    let deadline = Instant::now() + Duration::from_secs(30);
    while Instant::now() < deadline {
        let completion = match queue.poll()? {
            Polled::Done(completion) => completion.to_cqe(),
            Polled::Failed(error) => return Err(error.into()),
            Polled::Empty => continue,
        };
        // From here on, the card may reuse the slot.
        queue.release();
        return Ok(completion);
    }
    Err("no completion came within 30 s".into())
}

fn main() -> Result<(), Error> {
    // Memory for the card to write to. It outlives the card, which is dropped first.
    let mut memory = [0u8; 64];
    let card = soft_mlx5::open(Settings::default())?;
    let pd = card.alloc_pd()?;
    let cq = card.create_cq(&CqAttr { entries: 16, compression: false })?;
    let attr = QpAttr {
        transport: Transport::Rc,
        send_cq: cq.handle.clone(),
        recv_cq: cq.handle.clone(),
        srq: None,
        max_send: 4,
        max_recv: 4,
        limits: Limits { max_inline: 32, max_sge: 1 },
        max_recv_sge: 1,
        signal_all: false,
    };
    let mut completions = CompletionQueue::new(cq.parts);
    let mut sender: QueuePair<&str> = QueuePair::create(&card, &pd, &attr)?;
    let mut receiver: QueuePair<&str> = QueuePair::create(&card, &pd, &attr)?;
    sender.connect(&receiver.endpoint()?)?;
    receiver.connect(&sender.endpoint()?)?;

    // A receive names registered memory by address and local key.
    let base = NonNull::from(&mut memory).cast();
    // SAFETY: the array lives until `main` returns, and this program doesn't read it until the receive has completed.
    let region = unsafe { card.register(&pd, base, 64, Access::LOCAL_WRITE) }?;
    let receives = receiver.recv().ok_or("the queue pair has a receive queue of its own")?;
    receives.post("the receive", &[Sge { addr: region.addr, length: 64, lkey: region.lkey }]).map_err(|r| r.error)?;
    receives.ring();

    // The message travels inside the work request. `SIGNALED` asks for a completion.
    let message: WorkRequest<'_> = Op::Send { data: Data::Inline(&[b"hello"]), with: With::Nothing };
    sender.send().post("the send", Flags::SIGNALED, &message).map_err(|rejected| rejected.error)?;

    // Each side gets one completion, in any order.
    for _ in 0..2 {
        let completion = next(&mut completions)?;
        let (bytes, index) = (completion.byte_cnt.get(), completion.wqe_counter.get());
        println!("completed: {:?}, {bytes} bytes, work request {index}", completion.op_own.opcode());
    }
    // SAFETY: the array is valid for reads, and the card has completed the only write to it.
    let received = unsafe { base.cast::<[u8; 5]>().read_volatile() };
    println!("received {:?}", String::from_utf8_lossy(&received));
    Ok(())
}
