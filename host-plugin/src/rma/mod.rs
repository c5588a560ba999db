//! NCCL's RMA plugin: `ncclRmaPlugin_v13` to `_v16`, through which an NCCL host thread puts, gets and signals.
//!
//! | call | creates | from |
//! |---|---|---|
//! | `init` | a `plugin` | settings, libfabric and its `cards` |
//! | `listen`, `connect` | a communicator | its `ranks`: their ring ([`ferrogin_rendezvous::ring`]), and a `rail` per card |
//! | `regMrSym` | a `memory` | a region on each rail |
//! | `createContext` | a `context` | a `lane` on each rail |
//!
//! `calls` checks the arguments of the data calls. The context's `engine` turns the calls into posts, and `inbound`
//! turns the peers' messages into additions to words. `stream` keeps signals in order, `record` is their message, and
//! `requests` are what NCCL tests. `waits` limits the time that a peer may take, and `departure` is the end of a
//! context. NCCL's thread moves all data; no other thread does.
//!
//! # The protocol
//!
//! SRD doesn't keep packets in order, so each pair of ranks has a stream per context, and a stream's signals are
//! numbered (`stream`).
//!
//! | operation | on the wire | the receiver's CPU |
//! |---|---|---|
//! | put | a write | nothing |
//! | signal | a 44-byte message | adds |
//! | put with signal, one write, to a word that the receiver knows | a write whose immediate data is the rank, the context, the word's entry in the stream's table and the low bits of the signal's number | adds |
//! | put with signal, one write, to another word | such a write without an entry and, at the same time, the message | adds once both have arrived |
//! | put with signal, several writes | writes and, once all have completed, the message | adds |
//! | put with signal, if the provider keeps order | writes, and the message right behind them | adds |
//!
//! So a put without a signal costs one bare write, and signals carry the order:
//!
//! * **Words.** The table (`words`) has room for 15 words to which signals add 1, fewer with more than 2^19 ranks
//!   times contexts. When it's full, a new word replaces the least recently used one, if all signals that named it are
//!   acknowledged.
//! * **Strong signals.** The message leaves only once earlier puts without signals have completed, one round trip
//!   later; after puts with signals, or on its own, it doesn't wait. The receiver holds it back until it has applied
//!   all lower numbers.
//! * **Weak signals without a put** wait in the same way, because NCCL's proxy turns a kernel's put with a signal in
//!   memory into a put and such a signal; so does the signal of a put above 1 GiB, which NCCL's proxy splits.
//! * **Where the card writes the words**, a stream has one word in flight at a time: the next word follows once the
//!   write has completed, and signals to the same word in the meantime share one write.
//! * **Acknowledgements.** The receiver acknowledges every 64 signals. A sender has at most 256 unacknowledged signals
//!   per stream, and the rest wait in the plugin.
//!
//! All this relies on two promises from the provider: a write's completion means that its bytes have landed, as EFA's
//! acknowledgement and, elsewhere, `FI_DELIVERY_COMPLETE` say; and immediate data arrives after its write's bytes. Some
//! providers promise instead that messages and writes take effect after earlier writes (`FI_ORDER_SAW`,
//! `FI_ORDER_WAW`: `tcp`, `verbs;ofi_rxm`). There, with one card, no signal waits at its sender, and a put is done once
//! the provider has taken its bytes. No write has immediate data there: the message says as much, and libfabric's `tcp`
//! doesn't always survive it (docs/found-elsewhere.md).
//!
//! With GPU memory on the fabric `efa`, the plugin sets `FI_OPT_CUDA_API_PERMITTED` to false: otherwise libfabric asks
//! the driver for synchronous operations on the memory of the first transfer, which drivers refuse for memory from
//! `cuMemCreate`, such as NCCL's windows.
//!
//! A context ends with messages too (`departure`). The endpoints of a destroyed context stay until all ranks have
//! destroyed it, or until `closeColl`: what peers send late is received and ignored.
pub mod abi;
mod calls;
mod cards;
mod context;
mod departure;
mod engine;
mod inbound;
mod lane;
mod memory;
mod plugin;
mod rail;
mod ranks;
mod record;
mod requests;
mod stream;
mod waits;
mod words;
