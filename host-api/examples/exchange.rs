//! Each rank writes a value into the window of the next rank, and waits for the value of the rank before.

use ferrogin::device::{Action, Flags};
use ferrogin::{Comm, ContextOptions, Memory, Options};

/// One rank.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let comm = Comm::from_env(&Options::default())?;
    let (rank, ranks) = (comm.rank(), comm.ranks());
    let window = comm.allocate(4096, Memory::Host)?;
    let context = comm.context(&ContextOptions { signals: 1, ..Default::default() })?;

    // A kernel makes these calls with the same two handles; here a CPU thread does.
    let gin = context.device(0)?;
    let (next, value) = ((rank + 1) % ranks, 100 + rank as u64);
    gin.put_value(next as u32, window.handle().at(0), value, 8, Action::signal_inc(0), Flags::NONE)?;
    gin.wait_signal(0, 1)?;
    gin.flush()?;

    let mut bytes = [0; 8];
    window.read(0, &mut bytes)?;
    println!("rank {rank} of {ranks} received {}", u64::from_le_bytes(bytes));
    comm.barrier()?;
    assert_eq!(u64::from_le_bytes(bytes), 100 + ((rank + ranks - 1) % ranks) as u64);
    Ok(())
}
