//! `mlx5_wqe.json`: the send queue writes the same work requests, indices, fences and doorbells as rdma-core.

use crate::common::*;
use ferrogin_test_support::mlx5_memory::{Memory, POISON};
use mlx5::device::Handle;
use mlx5::mmio::BlueFlame;
use mlx5::sq::{Flags, PostError, RequestKind, SendParts, SendQueue};
use mlx5::wire::{AddressVector, Fence, FmCeSe, MkeyAccess};
use mlx5::wqe::{
    AhAttr, AtomicResult, Bind, BindError, BuildError, Data, Destination, Grh, Limits, LinkLayer, Op, Remote, Sge,
    Transport, Umr, UmrKind, WindowType, With, emit, parse,
};
use serde_json::Value;
use zerocopy::{FromBytes, IntoBytes};

const BLOCK: usize = 64;
/// What the doorbell register holds before a call; it differs from the poison of an unwritten ring.
const UNTOUCHED: u8 = !POISON;

/// A case's queue pair and its memory.
struct Bench<'v> {
    queue: SendQueue<u64>,
    limits: Limits,
    transport: Transport,
    signal_all: bool,
    ring: Memory,
    record: Memory,
    register: Memory,
    /// Outstanding posts.
    outstanding: Vec<&'v Value>,
}

fn transport(qp: &Value) -> Transport {
    match text(qp, "transport") {
        "RC" => Transport::Rc,
        "UD" => Transport::Ud,
        other => panic!("unknown transport {other}"),
    }
}

fn bench<'v>(qp: &Value) -> Bench<'v> {
    only_fields(
        qp,
        &[
            "transport",
            "qpn",
            "sq_wqebb_cnt",
            "sq_sig_all",
            "start_index",
            "max_inline_data",
            "max_send_sge",
            "sq_max_post",
            "blueflame",
        ],
    );
    let flame = &qp["blueflame"];
    only_fields(flame, &["enabled", "prefer", "buf_size"]);
    let buf_size = u32_of(flame, "buf_size");
    let blueflame = match (bool_of(flame, "enabled"), bool_of(flame, "prefer")) {
        (false, _) => BlueFlame::Never,
        (true, false) => BlueFlame::Inline,
        (true, true) => BlueFlame::Single,
    };
    let ring = Memory::new(u32_of(qp, "sq_wqebb_cnt") as usize * BLOCK);
    let record = Memory::new(8);
    let register = Memory::new(2 * buf_size as usize);
    let limits = Limits { max_inline: u32_of(qp, "max_inline_data"), max_sge: u32_of(qp, "max_send_sge") };
    let parts = SendParts {
        ring: ring.ring(BLOCK.trailing_zeros()),
        record: record.record(1),
        register: register.register(buf_size, blueflame),
        qpn: u32_of(qp, "qpn"),
        transport: transport(qp),
        limits,
        max_posts: u32_of(qp, "sq_max_post"),
        signal_all: bool_of(qp, "sq_sig_all"),
        start_index: u32_of(qp, "start_index"),
        keep_alive: Handle::new(()),
    };
    let (transport, signal_all) = (parts.transport, parts.signal_all);
    let queue = SendQueue::new(parts).expect("legal sizes");
    Bench { queue, limits, transport, signal_all, ring, record, register, outstanding: Vec::new() }
}

/// A post from the vectors, with owned lists.
struct Asked {
    sges: Vec<Sge>,
    inline: Option<Vec<Vec<u8>>>,
    post: Value,
}

/// The fields of a post that hold the expected result.
const OUTCOME: &[&str] = &[
    "errno",
    "wqe_hex",
    "wqebb_start",
    "wqebb_count",
    "ds",
    "fm_ce_se",
    "unwritten",
    "wc_opcode",
    "doorbell_record_hex",
    "doorbell_register_hex",
    "doorbell_register_offset",
    "doorbell_write_bytes",
    "next_index",
    "next_fence",
];
const COMMON: &[&str] = &["call", "api", "opcode", "signaled", "solicited", "fence", "wr_id", "setter"];
const DATA: &[&str] = &["sges", "inline_data"];
const DATAGRAM: &[&str] = &["remote_qpn", "remote_qkey", "ah"];
const BIND: &[&str] = &["mw_type", "mw_rkey", "new_rkey", "mr_lkey", "bind_addr", "bind_length", "access"];

fn check_fields(post: &Value, transport: Transport) {
    let with = |own: &[&'static str]| [COMMON, OUTCOME, own].concat();
    let send = |own: &[&'static str]| match transport {
        Transport::Rc => with(&[DATA, own].concat()),
        Transport::Ud => with(&[DATA, DATAGRAM, own].concat()),
    };
    let known = match text(post, "opcode") {
        "SEND" => send(&[]),
        "SEND_WITH_IMM" => send(&["imm_data"]),
        "SEND_WITH_INV" => send(&["invalidate_rkey"]),
        "RDMA_WRITE" => with(&[DATA, &["remote_addr", "rkey"]].concat()),
        "RDMA_WRITE_WITH_IMM" => with(&[DATA, &["remote_addr", "rkey", "imm_data"]].concat()),
        "RDMA_READ" => with(&["sges", "remote_addr", "rkey"]),
        "ATOMIC_CMP_AND_SWP" => with(&["sges", "remote_addr", "rkey", "compare", "swap"]),
        "ATOMIC_FETCH_AND_ADD" => with(&["sges", "remote_addr", "rkey", "add"]),
        "LOCAL_INV" => with(&["invalidate_rkey"]),
        "BIND_MW" => with(BIND),
        other => panic!("unknown opcode {other}"),
    };
    only_fields(post, &known);
    // The extended API's call that set the buffers; this crate has only one.
    let setter = post.get("setter").map_or("list", |_| text(post, "setter"));
    assert!(["list", "single"].contains(&setter), "unknown setter {setter}");
}

impl Asked {
    fn new(post: &Value, transport: Transport) -> Self {
        check_fields(post, transport);
        let sges = post.get("sges").map_or(Vec::new(), |_| {
            list(post, "sges")
                .iter()
                .map(|sge| {
                    only_fields(sge, &["addr", "length", "lkey"]);
                    Sge { addr: u64_of(sge, "addr"), length: u32_of(sge, "length"), lkey: u32_of(sge, "lkey") }
                })
                .collect()
        });
        let inline = post.get("inline_data").map(|_| {
            list(post, "inline_data").iter().map(|piece| unhex(piece.as_str().expect("a hex string"))).collect()
        });
        assert!(sges.is_empty() || inline.is_none(), "both buffers and inline data");
        Self { sges, inline, post: post.clone() }
    }

    fn flags(&self) -> Flags {
        let bit = |key, flag| if bool_of(&self.post, key) { flag } else { Flags::NONE };
        bit("signaled", Flags::SIGNALED).with(bit("solicited", Flags::SOLICITED)).with(bit("fence", Flags::FENCE))
    }

    fn remote(&self) -> Remote {
        Remote { addr: u64_of(&self.post, "remote_addr"), rkey: u32_of(&self.post, "rkey") }
    }

    /// Returns the buffer for the old value of an atomic: always 8 bytes, whatever length the vectors give.
    fn word(&self) -> AtomicResult {
        match self.sges[..] {
            [Sge { addr, length, lkey }] if length != 0 => AtomicResult { addr, lkey },
            _ => panic!("an atomic with other than one buffer"),
        }
    }

    fn umr(&self, qpn: u32) -> Result<Op<&[Sge], &[&[u8]]>, BindError> {
        let post = &self.post;
        let rkey = u32_of(post, "mw_rkey");
        let window = match u64_of(post, "mw_type") {
            1 => WindowType::Type1,
            2 => WindowType::Type2,
            other => panic!("unknown window type {other}"),
        };
        let tag = optional(post, "new_rkey", as_u64).map_or(rkey.wrapping_add(1) as u8, |key| key as u8);
        let mut zero_based = false;
        let access = list(post, "access").iter().fold(MkeyAccess::NONE, |access, name| {
            access.with(match name.as_str().expect("a name") {
                "LOCAL_WRITE" => MkeyAccess::LOCAL_WRITE,
                "REMOTE_READ" => MkeyAccess::REMOTE_READ,
                "REMOTE_WRITE" => MkeyAccess::REMOTE_WRITE,
                "REMOTE_ATOMIC" => MkeyAccess::ATOMIC,
                "ZERO_BASED" => {
                    zero_based = true;
                    MkeyAccess::NONE
                }
                other => panic!("unknown access {other}"),
            })
        });
        let lkey = optional(post, "mr_lkey", |v| as_u64(v) as u32);
        let (addr, length) = (u64_of(post, "bind_addr"), u64_of(post, "bind_length"));
        let umr = match length {
            0 => Umr::unbind(window, rkey, tag),
            _ => {
                let lkey = lkey.expect("a bind has a region");
                Umr::bind(&Bind { window, rkey, tag, lkey, addr, length, access, zero_based }, qpn)?
            }
        };
        Ok(Op::Umr { umr, kind: UmrKind::Bind })
    }

    fn op<'a>(
        &'a self,
        pieces: &'a [&'a [u8]],
        transport: Transport,
        qpn: u32,
    ) -> Result<Op<&'a [Sge], &'a [&'a [u8]]>, BindError> {
        let post = &self.post;
        let data = match self.inline {
            Some(_) => Data::Inline(pieces),
            None => Data::Sges(&self.sges[..]),
        };
        let send = |with| match transport {
            Transport::Rc => Op::Send { data, with },
            Transport::Ud => {
                let imm = match with {
                    With::Imm(imm) => Some(imm),
                    With::Nothing => None,
                    With::Invalidate(_) => panic!("a datagram that invalidates"),
                };
                let to = Destination {
                    av: address_vector(&post["ah"]),
                    qpn: u32_of(post, "remote_qpn"),
                    qkey: u32_of(post, "remote_qkey"),
                };
                Op::Datagram { to, data, imm }
            }
        };
        Ok(match text(post, "opcode") {
            "SEND" => send(With::Nothing),
            "SEND_WITH_IMM" => send(With::Imm(u32_of(post, "imm_data"))),
            "SEND_WITH_INV" => send(With::Invalidate(u32_of(post, "invalidate_rkey"))),
            "RDMA_WRITE" => Op::Write { remote: self.remote(), data, imm: None },
            "RDMA_WRITE_WITH_IMM" => Op::Write { remote: self.remote(), data, imm: Some(u32_of(post, "imm_data")) },
            "RDMA_READ" => Op::Read { remote: self.remote(), into: &self.sges },
            "ATOMIC_CMP_AND_SWP" => Op::CompareSwap {
                remote: self.remote(),
                compare: u64_of(post, "compare"),
                swap: u64_of(post, "swap"),
                into: self.word(),
            },
            "ATOMIC_FETCH_AND_ADD" => {
                Op::FetchAdd { remote: self.remote(), add: u64_of(post, "add"), into: self.word() }
            }
            "LOCAL_INV" => Op::Umr { umr: Umr::local_inv(u32_of(post, "invalidate_rkey")), kind: UmrKind::LocalInv },
            "BIND_MW" => return self.umr(qpn),
            other => panic!("unknown opcode {other}"),
        })
    }
}

/// Builds the address vector of the attributes and compares it with rdma-core's.
fn address_vector(ah: &Value) -> AddressVector {
    only_fields(ah, &["link_layer", "gid_type", "dmac", "dlid", "sl", "src_path_bits", "static_rate", "grh", "av_hex"]);
    let grh = optional(ah, "grh", |grh| {
        only_fields(grh, &["dgid", "flow_label", "sgid_index", "hop_limit", "traffic_class"]);
        Grh {
            dgid: array_of(grh, "dgid"),
            flow_label: u32_of(grh, "flow_label"),
            sgid_index: u8_of(grh, "sgid_index"),
            hop_limit: u8_of(grh, "hop_limit"),
            traffic_class: u8_of(grh, "traffic_class"),
        }
    });
    let link = match text(ah, "link_layer") {
        "infiniband" => {
            assert!(ah.get("gid_type").is_none() && ah.get("dmac").is_none());
            LinkLayer::Infiniband { dlid: u16_of(ah, "dlid"), src_path_bits: u8_of(ah, "src_path_bits") }
        }
        "ethernet" => {
            assert!(ah.get("dlid").is_none() && ah.get("src_path_bits").is_none());
            let dmac = array_of(ah, "dmac");
            match text(ah, "gid_type") {
                "rocev1" => LinkLayer::RoceV1 { dmac },
                "rocev2" => LinkLayer::RoceV2 { dmac },
                other => panic!("unknown GID type {other}"),
            }
        }
        other => panic!("unknown link layer {other}"),
    };
    let attr = AhAttr { link, sl: u8_of(ah, "sl"), static_rate: u8_of(ah, "static_rate"), grh };
    let made = attr.address_vector().expect("Ethernet has a global route");
    let want: [u8; 48] = array_of(ah, "av_hex");
    assert_eq!(hex(made.as_bytes()), hex(&want), "address vector");
    made
}

fn fence(bits: u8) -> Fence {
    match bits {
        0 => Fence::None,
        0x20 => Fence::Small,
        0x80 => Fence::Full,
        other => panic!("unknown fence mode {other:#x}"),
    }
}

/// Returns rdma-core's errno for a post that this crate refuses.
fn errno(refused: &Refused) -> &'static str {
    match refused {
        Refused::Bind(BindError::TooLong { .. }) => "EOPNOTSUPP",
        Refused::Bind(BindError::ZeroBasedType1 | BindError::ZeroLength) => "EINVAL",
        Refused::WorkRequest(PostError::Full { .. }) => "ENOMEM",
        Refused::WorkRequest(PostError::Build(BuildError::TooManySges { .. } | BuildError::InlineTooLong { .. })) => {
            "ENOMEM"
        }
        Refused::WorkRequest(PostError::Build(BuildError::Transport | BuildError::SgeTooLong { .. })) => "EINVAL",
        Refused::NoSuchCall => "EINVAL",
    }
}

#[derive(Debug)]
enum Refused {
    Bind(BindError),
    WorkRequest(PostError),
    /// `ibv_bind_mw` is for type-1 windows; in this crate a bind names its type, so this error cannot occur.
    NoSuchCall,
}

impl<'v> Bench<'v> {
    /// Makes one call of the vectors, with its posts in one batch.
    fn call(&mut self, posts: &[&'v Value]) {
        let [first, ..] = posts else { panic!("a call without posts") };
        self.make_room(posts);
        let api = text(first, "api");
        assert!(["post_send", "wr_api", "bind_mw"].contains(&api), "unknown api {api}");
        let (fence, index) = (self.queue.pending_fence(), self.queue.producer());
        self.record.fill(POISON);
        self.register.fill(UNTOUCHED);
        let before = self.ring.read(0, self.ring.size());
        let (qpn, transport) = (self.queue.qpn(), self.transport);
        let mut refused = None;
        let mut batch = self.queue.batch();
        for post in posts {
            assert_eq!(text(post, "api"), api);
            let asked = Asked::new(post, transport);
            let pieces: Vec<&[u8]> = asked.inline.iter().flatten().map(|piece| &piece[..]).collect();
            let outcome = if api == "bind_mw" && u64_of(post, "mw_type") != 1 {
                Err(Refused::NoSuchCall)
            } else {
                asked.op(&pieces, transport, qpn).map_err(Refused::Bind).and_then(|op| {
                    let wr_id = u64_of(post, "wr_id");
                    batch.post(wr_id, asked.flags(), &op).map_err(|rejected| {
                        assert_eq!(rejected.token, wr_id, "the token comes back");
                        Refused::WorkRequest(rejected.error)
                    })
                })
            };
            match (optional(post, "errno", |e| e.as_str().expect("a name").to_string()), outcome) {
                (None, outcome) => outcome.unwrap_or_else(|e| panic!("refused: {e:?}")),
                (Some(want), Ok(())) => panic!("accepted, but rdma-core says {want}"),
                (Some(want), Err(why)) => {
                    assert_eq!(errno(&why), want, "{why:?}");
                    refused = Some(post);
                    break;
                }
            }
        }
        // A list posts the work requests before the bad one; a batch of the extended API posts all or none.
        match (refused, api) {
            (Some(_), "wr_api") => drop(batch),
            _ => batch.ring(),
        }
        // The expected bytes of a work request that wasn't posted, or of a doorbell that wasn't rung, would stay
        // unchecked.
        let unrung = OUTCOME.iter().filter(|field| field.starts_with("doorbell") || field.starts_with("next"));
        for post in &posts[..posts.len() - 1] {
            assert!(post["errno"].is_string() || unrung.clone().all(|field| post[*field].is_null()), "{post}");
        }
        if let Some(post) = refused {
            let known = |field: &str| ["errno", "next_index"].contains(&field);
            assert!(OUTCOME.iter().all(|field| known(field) || post[*field].is_null()), "outcome of a refusal: {post}");
            assert_eq!(u16_of(post, "next_index"), self.queue.producer() as u16, "next index");
            let good = posts.iter().take_while(|other| !std::ptr::eq(**other, *post)).count();
            if good == 0 || api == "wr_api" {
                assert_eq!((self.queue.pending_fence(), self.queue.producer()), (fence, index), "nothing changed");
                assert_eq!(self.ring.read(0, self.ring.size()), before, "the ring is untouched");
                assert_eq!(self.record.read(0, 8), [POISON; 8], "the record is untouched");
                assert_eq!(self.register.read(0, self.register.size()), vec![UNTOUCHED; self.register.size()]);
                return;
            }
            // The doorbell of the earlier work requests has no expected bytes, but its doorbell record does.
            self.check_ring(&posts[..good], before);
            assert_eq!(self.record.read(4, 4), (self.queue.producer() & 0xffff).to_be_bytes(), "doorbell record");
            return;
        }
        self.check_ring(posts, before);
        self.check_doorbell(posts[posts.len() - 1]);
    }

    /// Completes work requests only when later ones need the room: the vectors do not depend on when they complete.
    fn make_room(&mut self, posts: &[&Value]) {
        let good = || posts.iter().take_while(|post| post["errno"].is_null());
        let blocks: u64 = good().map(|post| u64_of(post, "wqebb_count")).sum();
        if u64::from(self.queue.free_blocks()) < blocks || (self.queue.free_posts() as usize) < good().count() {
            self.complete();
        }
    }

    /// Checks that the ring holds a call's work requests and is otherwise unchanged. They are outstanding from then on.
    fn check_ring(&mut self, posts: &[&'v Value], before: Vec<u8>) {
        let mut expected = before;
        for post in posts {
            self.check_bytes(post, &mut expected);
        }
        assert_eq!(hex(&self.ring.read(0, self.ring.size())), hex(&expected), "the ring outside the requests");
        self.outstanding.extend(posts);
    }

    /// Checks the bytes of one work request in the ring, and writes them into `expected`.
    fn check_bytes(&self, post: &Value, expected: &mut [u8]) {
        let mut want = bytes_of(post, "wqe_hex");
        assert_eq!(want.len(), u64_of(post, "ds") as usize * 16, "ds");
        let start = u16_of(post, "wqebb_start") as usize * BLOCK % self.ring.size();
        let mut got = self.ring.read_wrapped(start, want.len());
        for (at, byte) in got.iter().enumerate() {
            expected[(start + at) % self.ring.size()] = *byte;
        }
        for range in list(post, "unwritten") {
            let [at, length] = &range.as_array().expect("a range")[..] else { panic!("a range has two numbers") };
            let (at, length) = (as_u64(at) as usize, as_u64(length) as usize);
            got[at..at + length].fill(0);
            want[at..at + length].fill(0);
        }
        assert_eq!(hex(&got), hex(&want), "request {}", post["wr_id"]);
        assert_eq!(u64_of(post, "wqebb_count") as usize, want.len().div_ceil(BLOCK));
        assert_eq!(want[11], u8_of(post, "fm_ce_se"));
        self.check_formats(post, &want);
    }

    /// Checks the same work request emitted into a slice, and parsed.
    fn check_formats(&self, post: &Value, want: &[u8]) {
        let asked = Asked::new(post, self.transport);
        let pieces: Vec<&[u8]> = asked.inline.iter().flatten().map(|piece| &piece[..]).collect();
        let op = asked.op(&pieces, self.transport, self.queue.qpn()).expect("legal");
        let mut out = vec![POISON; want.len() + 1];
        let flags = FmCeSe::new(u8_of(post, "fm_ce_se"));
        let emitted = emit(&op, &self.limits, u16_of(post, "wqebb_start"), self.queue.qpn(), flags, &mut out)
            .expect("legal")
            .expect("room");
        for range in list(post, "unwritten") {
            let at = as_u64(&range[0]) as usize;
            emitted[at..at + as_u64(&range[1]) as usize].fill(0);
        }
        assert_eq!(hex(emitted), hex(want), "emitted");
        assert_eq!(out[want.len()], POISON, "nothing beyond");

        let parsed = parse(want, self.transport).expect("a request");
        let mut meant = op.to_parsed();
        if let (Op::Umr { kind: meant, .. }, Op::Umr { kind: parsed, .. }) = (&mut meant, &parsed.op) {
            // A freeing bind and an invalidation have the same bytes here.
            *meant = *parsed;
        }
        if let (Op::Datagram { to, .. }, Op::Datagram { to: read, .. }) = (&meant, &parsed.op) {
            assert_eq!(to, read);
        }
        assert_eq!(parsed.op, meant, "parsed");
        assert_eq!(parsed.signaled, bool_of(post, "signaled") || self.signal_all);
        assert_eq!(parsed.solicited, bool_of(post, "solicited"));
        assert_eq!(parsed.qpn, self.queue.qpn());
        assert_eq!(parsed.index, u16_of(post, "wqebb_start"));
        assert_eq!(parsed.fence, fence(u8_of(post, "fm_ce_se") & 0xe0));
    }

    fn check_doorbell(&self, last: &Value) {
        assert_eq!(hex(&self.record.read(4, 4)), text(last, "doorbell_record_hex"), "doorbell record");
        assert_eq!(self.record.read(0, 4), [POISON; 4], "the receive queue's record is not ours");
        let offset = u64_of(last, "doorbell_register_offset") as usize;
        let bytes = u64_of(last, "doorbell_write_bytes") as usize;
        let mut want = vec![UNTOUCHED; self.register.size()];
        let start = u16_of(last, "wqebb_start") as usize * BLOCK % self.ring.size();
        want[offset..offset + bytes].copy_from_slice(&self.ring.read_wrapped(start, bytes));
        assert_eq!(hex(&want[offset..offset + 8]), text(last, "doorbell_register_hex"), "doorbell value");
        assert_eq!(hex(&self.register.read(0, self.register.size())), hex(&want), "doorbell register");
        assert_eq!(u16_of(last, "next_index"), self.queue.producer() as u16, "next index");
        assert_eq!(fence(u8_of(last, "next_fence")), self.queue.pending_fence(), "next fence");
    }

    /// Completes all outstanding work requests through the last one.
    fn complete(&mut self) {
        let posts = std::mem::take(&mut self.outstanding);
        let Some(last) = posts.last() else { return };
        let all: Vec<_> = self.queue.complete(u16_of(last, "wqebb_start")).expect("outstanding").collect();
        assert_eq!(all.len(), posts.len(), "all that was posted completes");
        for (done, post) in all.iter().zip(posts) {
            assert_eq!(done.token, u64_of(post, "wr_id"));
            let kind = match optional(post, "wc_opcode", |v| v.as_str().expect("a name").to_string()).as_deref() {
                None => RequestKind::Plain,
                Some("BIND_MW") => RequestKind::Bind,
                Some("LOCAL_INV") => RequestKind::LocalInv,
                Some(other) => panic!("unknown wc_opcode {other}"),
            };
            assert_eq!(done.kind, kind);
        }
        assert_eq!(self.queue.free_blocks() as usize, self.ring.size() / BLOCK, "all is free again");
    }
}

fn check_case(case: &Value) {
    only_fields(case, &["name", "category", "qp", "posts"]);
    let mut bench = bench(&case["qp"]);
    let posts = list(case, "posts");
    assert!(!posts.is_empty(), "a case without posts");
    let mut calls: Vec<Vec<&Value>> = Vec::new();
    for post in posts {
        match calls.last_mut() {
            Some(call) if u64_of(call[0], "call") == u64_of(post, "call") => call.push(post),
            _ => calls.push(vec![post]),
        }
    }
    for call in calls {
        bench.call(&call);
    }
    bench.complete();
}

#[test]
fn work_requests_match_vectors() {
    each_case("mlx5_wqe.json", check_case);
}

#[test]
fn every_file_of_vectors_has_test() {
    only_known_files();
}

/// A parsed address vector equals the emitted one; the vectors do not cover this.
#[test]
fn address_vector_round_trip() {
    let bytes: [u8; 48] = std::array::from_fn(|at| at as u8);
    let av = AddressVector::read_from_bytes(&bytes).expect("48 bytes");
    assert_eq!(av.as_bytes(), bytes);
    assert_eq!((av.tclass, av.hop_limit, av.rlid.get()), (26, 27, 0x0e0f));
}
