//! UMRs that a driver builds wrongly: what the card does for each flag, mask bit and size.
//! emulators/soft-mlx5/README.md compares the results with public reports.

use super::*;
use mlx5::device::RawWindow;
use mlx5::wire::{MkeyMask, UmrFlags};

/// The bound range: bytes 1024 to 1536 of the owner's memory.
const FROM: u64 = 1024;
const LENGTH: u64 = 512;

/// Two queue pairs in one domain, `owner` and `other`, each with a peer, and a window in that domain.
struct Scene {
    // Fields are dropped in this order: queue pairs, window, card.
    owner: End,
    other: End,
    peer: End,
    peer_of_other: End,
    window: RawWindow,
    _card: Arc<dyn Device>,
}

/// The result of a peer's write through the window.
#[derive(Debug, PartialEq, Eq)]
enum Written {
    /// The bytes arrived.
    Bytes,
    /// The write completed without an error, but no bytes moved.
    Nothing,
    Failed(Syndrome),
}

const DENIED: Written = Written::Failed(Syndrome::RemoteAccess);

fn write_by(peer: &mut End, at: u64, rkey: u32, owner: &End) -> Written {
    let place = FROM as usize..FROM as usize + 8;
    let before = owner.memory[place.clone()].to_vec();
    let bytes = before.iter().map(|byte| !byte).collect::<Vec<_>>();
    peer.memory[..8].copy_from_slice(&bytes);
    let sge = [peer.sge(0, 8)];
    peer.send.post(&write(&sge, at, rkey), SIGNAL);
    match peer.next() {
        Err(syndrome) => {
            assert_eq!(owner.memory[place], before);
            Written::Failed(syndrome)
        }
        Ok(_) if owner.memory[place.clone()] == bytes => Written::Bytes,
        Ok(_) => {
            assert_eq!(owner.memory[place], before);
            Written::Nothing
        }
    }
}

impl Scene {
    fn new() -> Self {
        let card = card(9);
        let pd = card.alloc_pd().unwrap();
        let [owner, other] = [(), ()].map(|()| End::of_domain(&*card, pd.clone(), Transport::Rc, 4096, false));
        let [peer, peer_of_other] = [(), ()].map(|()| End::new(&*card, Transport::Rc, 4096, false));
        connect(&*card, &owner, &*card, &peer);
        connect(&*card, &other, &*card, &peer_of_other);
        let window = card.alloc_window(&pd, WindowType::Type2).unwrap();
        Self { owner, other, peer, peer_of_other, window, _card: card }
    }

    /// Returns the new key and a legal bind, with the owner's memory addresses.
    fn bind(&self) -> (u32, Umr) {
        let bind = Bind {
            window: WindowType::Type2,
            rkey: self.window.rkey,
            tag: self.window.rkey as u8 ^ 0x55,
            lkey: self.owner.mr.lkey,
            addr: self.owner.addr() + FROM,
            length: LENGTH,
            access: MkeyAccess::REMOTE_READ.with(MkeyAccess::REMOTE_WRITE),
            zero_based: false,
        };
        (self.window.rkey ^ 0x55, Umr::bind(&bind, self.owner.send.parts.qpn).unwrap())
    }

    /// Binds legally and returns the key.
    fn bound(&mut self) -> u32 {
        let (rkey, umr) = self.bind();
        assert_eq!(post(&mut self.owner, umr), Ok(()));
        rkey
    }

    /// Writes to the first bytes of the window from the owner's peer.
    fn write(&mut self, rkey: u32) -> Written {
        write_by(&mut self.peer, self.owner.addr() + FROM, rkey, &self.owner)
    }

    /// Writes likewise from the other queue pair's peer.
    fn write_of_other(&mut self, rkey: u32) -> Written {
        write_by(&mut self.peer_of_other, self.owner.addr() + FROM, rkey, &self.owner)
    }
}

fn post(end: &mut End, umr: Umr) -> Result<(), Syndrome> {
    end.send.post(&Op::Umr { umr, kind: UmrKind::Bind }, SIGNAL);
    end.next().map(drop)
}

fn without(mask: MkeyMask, bits: MkeyMask) -> MkeyMask {
    MkeyMask::new(mask.bits() & !bits.bits())
}

/// A bind whose mask lacks a field completes, but the window keeps its old value for that field: a new window is free,
/// with no length and no rights.
#[test]
fn bind_changes_only_fields_of_mask() {
    let legal = Scene::new().bind().1.ctrl.mkey_mask;
    let cases = [
        ("nothing", MkeyMask::NONE, Written::Bytes),
        ("the free state", MkeyMask::FREE, DENIED),
        ("the tag", MkeyMask::MKEY, DENIED),
        ("the length", MkeyMask::LEN, DENIED),
        ("the start address", MkeyMask::START_ADDR, DENIED),
        ("the right to write", MkeyMask::ACCESS_REMOTE_WRITE, DENIED),
        ("the right to read", MkeyMask::ACCESS_REMOTE_READ, Written::Bytes),
        ("every field", legal, DENIED),
    ];
    for (name, lacking, written) in cases {
        let mut scene = Scene::new();
        let (rkey, mut umr) = scene.bind();
        umr.ctrl.mkey_mask = without(legal, lacking);
        assert_eq!(post(&mut scene.owner, umr), Ok(()), "{name}");
        assert_eq!(scene.write(rkey), written, "a bind without {name}");
    }
}

#[test]
fn bind_without_tag_in_mask_keeps_old_key() {
    let mut scene = Scene::new();
    let (_, mut umr) = scene.bind();
    umr.ctrl.mkey_mask = without(umr.ctrl.mkey_mask, MkeyMask::MKEY);
    assert_eq!(post(&mut scene.owner, umr), Ok(()));
    assert_eq!(scene.write(scene.window.rkey), Written::Bytes);
}

#[test]
fn bind_with_empty_mask_leaves_window_free() {
    let mut scene = Scene::new();
    let (rkey, legal) = scene.bind();
    let mut umr = legal;
    umr.ctrl.mkey_mask = MkeyMask::NONE;
    assert_eq!(post(&mut scene.owner, umr), Ok(()));
    // The legal bind checks that the window is free.
    assert_eq!(post(&mut scene.owner, legal), Ok(()));
    assert_eq!(scene.write(rkey), Written::Bytes);
}

/// If the mask lacks the queue pair, the window belongs to none: every queue pair in the domain may use it, but none
/// may invalidate it.
#[test]
fn bind_without_queue_pair_in_mask_makes_window_of_no_owner() {
    let bind = |scene: &mut Scene| {
        let (rkey, mut umr) = scene.bind();
        umr.ctrl.mkey_mask = without(umr.ctrl.mkey_mask, MkeyMask::QPN);
        assert_eq!(post(&mut scene.owner, umr), Ok(()));
        rkey
    };
    let mut scene = Scene::new();
    let rkey = bind(&mut scene);
    assert_eq!(scene.write(rkey), Written::Bytes);
    assert_eq!(scene.write_of_other(rkey), Written::Bytes);
    assert_eq!(post(&mut scene.owner, Umr::local_inv(rkey)), Err(Syndrome::MwBind));

    let mut scene = Scene::new();
    let rkey = bind(&mut scene);
    scene.owner.receive(0, 16);
    let message: WorkRequest<'_> = Op::Send { data: Data::Inline(&[&b"bye"[..]]), with: With::Invalidate(rkey) };
    scene.peer.send.post(&message, SIGNAL);
    assert_eq!(scene.owner.next(), Err(Syndrome::RemoteInvalReq));
    assert_eq!(scene.peer.next(), Err(Syndrome::RemoteOp));

    let mut scene = Scene::new();
    let rkey = scene.bound();
    assert_eq!(scene.write_of_other(rkey), DENIED, "a window with an owner");
    assert_eq!(scene.write(rkey), Written::Bytes);
}

/// Only `CHECK_QPN` keeps other queue pairs in the domain from invalidating the window.
#[test]
fn invalidation_checks_queue_pair_by_its_flag_only() {
    let at_offset = UmrFlags::INLINE.with(UmrFlags::TRANSLATION_OFFSET);
    let cases = [
        ("CHECK_QPN", at_offset.with(UmrFlags::CHECK_QPN), Err(Syndrome::MwBind)),
        // The bit of TRANSLATION_OFFSET, mistaken for CHECK_QPN's, checks nothing.
        ("bit 4", at_offset, Ok(())),
        ("no flag", UmrFlags::NONE, Ok(())),
        ("CHECK_FREE", at_offset.with(UmrFlags::CHECK_FREE), Err(Syndrome::MwBind)),
        ("bit 6", at_offset.with(UmrFlags::CHECK_BOUND), Ok(())),
        ("bits 5 and 6", at_offset.with(UmrFlags::new(0x60)), Err(Syndrome::MwBind)),
        ("bit 0", at_offset.with(UmrFlags::new(0x01)), Err(Syndrome::MwBind)),
        ("bit 1", at_offset.with(UmrFlags::new(0x02)), Err(Syndrome::MwBind)),
        ("bit 2", at_offset.with(UmrFlags::new(0x04)), Err(Syndrome::MwBind)),
    ];
    for (name, flags, result) in cases {
        let mut scene = Scene::new();
        let rkey = scene.bound();
        let mut umr = Umr::local_inv(rkey);
        umr.ctrl.flags = flags;
        assert_eq!(post(&mut scene.other, umr), result, "{name}");
        // A refused invalidation changes nothing.
        let after = if result.is_ok() { DENIED } else { Written::Bytes };
        assert_eq!(scene.write(rkey), after, "{name}");
    }
}

/// The owner's invalidation with `CHECK_FREE` fails, because the window isn't free; bit 6 is the opposite check.
#[test]
fn checks_of_free_state_refuse_wrong_state() {
    let invalidate = |scene: &mut Scene, rkey: u32, flags: UmrFlags| {
        let mut umr = Umr::local_inv(rkey);
        umr.ctrl.flags = UmrFlags::INLINE.with(flags);
        post(&mut scene.owner, umr)
    };
    let mut scene = Scene::new();
    let rkey = scene.bound();
    assert_eq!(invalidate(&mut scene, rkey, UmrFlags::CHECK_FREE), Err(Syndrome::MwBind));
    assert_eq!(scene.owner.send_after_error(), Err(Syndrome::WrFlush), "the queue pair is in error");

    let mut scene = Scene::new();
    let rkey = scene.window.rkey;
    assert_eq!(invalidate(&mut scene, rkey, UmrFlags::CHECK_FREE), Ok(()));
    assert_eq!(invalidate(&mut scene, rkey, UmrFlags::CHECK_BOUND), Err(Syndrome::MwBind));

    // Binding a type-2 window requires the check that the window is free, and an inline entry.
    for flags in [UmrFlags::INLINE.with(UmrFlags::CHECK_BOUND), UmrFlags::INLINE, UmrFlags::CHECK_FREE] {
        let mut scene = Scene::new();
        let (_, mut umr) = scene.bind();
        umr.ctrl.flags = flags;
        assert_eq!(post(&mut scene.owner, umr), Err(Syndrome::MwBind), "{flags:?}");
    }
}

impl End {
    fn send_after_error(&mut self) -> Result<(), Syndrome> {
        self.send.post(&Op::Nop, SIGNAL);
        self.next().map(drop)
    }
}

#[test]
fn invalidation_checks_owner_and_tag() {
    let mut scene = Scene::new();
    let rkey = scene.bound();
    assert_eq!(post(&mut scene.owner, Umr::local_inv(rkey ^ 1)), Err(Syndrome::MwBind));
    assert_eq!(scene.write_of_other(rkey), DENIED);
    let mut scene = Scene::new();
    let rkey = scene.bound();
    assert_eq!(post(&mut scene.owner, Umr::local_inv(rkey)), Ok(()));
    assert_eq!(post(&mut scene.owner, Umr::local_inv(rkey & !0xff)), Err(Syndrome::MwBind), "invalidated before");
}

/// An invalidation whose mask lacks the free state completes, but the peer keeps its access.
#[test]
fn invalidation_with_empty_mask_leaves_window_bound() {
    for mask in [MkeyMask::NONE, MkeyMask::QPN] {
        let mut scene = Scene::new();
        let rkey = scene.bound();
        let mut umr = Umr::local_inv(rkey);
        umr.ctrl.mkey_mask = mask;
        assert_eq!(post(&mut scene.owner, umr), Ok(()));
        assert_eq!(scene.write(rkey), Written::Bytes);
        // The mask decides whether the window still has an owner.
        let owned = mask == MkeyMask::NONE;
        assert_eq!(scene.write_of_other(rkey), if owned { DENIED } else { Written::Bytes });
    }
}

/// A bind with too small a size completes, and so does every operation through the window, but no bytes move. A bind
/// with more entries than the table has fails.
#[test]
fn size_of_translation_decides_whether_bytes_move() {
    // klm_octowords, translations_octword_size, translation_offset.
    let cases = [
        ((4, 0, 0), Ok(Written::Bytes)),
        ((4, 4, 0), Ok(Written::Bytes)),
        ((2, 2, 0), Ok(Written::Nothing)),
        ((2, 0, 0), Ok(Written::Nothing)),
        ((1, 1, 0), Ok(Written::Nothing)),
        ((0, 0, 0), Ok(Written::Nothing)),
        ((4, 2, 0), Ok(Written::Nothing)),
        ((4, 1, 0), Ok(Written::Nothing)),
        ((8, 8, 0), Err(Syndrome::MwBind)),
        ((5, 4, 0), Err(Syndrome::MwBind)),
        ((4, 4, 1), Err(Syndrome::MwBind)),
    ];
    for ((octowords, in_context, offset), result) in cases {
        let mut scene = Scene::new();
        let (rkey, mut umr) = scene.bind();
        umr.ctrl.klm_octowords = octowords.into();
        umr.ctrl.translation_offset = offset.into();
        umr.mkey.translations_octword_size = in_context.into();
        let bound = post(&mut scene.owner, umr);
        let got = bound.map(|()| scene.write(rkey));
        assert_eq!(got, result, "octowords {octowords}, in the context {in_context}, offset {offset}");
        if got == Ok(Written::Nothing) {
            scene.peer.memory[..8].copy_from_slice(b"contents");
            let into = [scene.peer.sge(0, 8)];
            let remote = Remote { addr: scene.owner.addr() + FROM, rkey };
            scene.peer.send.post(&Op::Read { remote, into: &into }, SIGNAL);
            scene.peer.next().unwrap();
            assert_eq!(&scene.peer.memory[..8], b"contents", "a read through the window moves nothing");
            let (addr, rkey) = (scene.owner.addr() + FROM, scene.owner.mr.rkey);
            assert_eq!(write_by(&mut scene.peer, addr, rkey, &scene.owner), Written::Bytes, "the region's own key");
        }
    }
}

#[test]
fn unknown_field_of_mask_fails() {
    for bit in [1, 7, 17, 23, 30, 63] {
        let mut scene = Scene::new();
        let (_, mut umr) = scene.bind();
        umr.ctrl.mkey_mask = umr.ctrl.mkey_mask.with(MkeyMask::new(1 << bit));
        assert_eq!(post(&mut scene.owner, umr), Err(Syndrome::MwBind), "bit {bit}");
    }
}

/// A refused UMR leaves the window as it was.
#[test]
fn refused_bind_changes_nothing() {
    let mut scene = Scene::new();
    let rkey = scene.bound();
    let (_, mut umr) = scene.bind();
    umr.mkey.qpn_mkey = (umr.mkey.qpn_mkey.get() ^ 0x7).into();
    assert_eq!(post(&mut scene.other, umr), Err(Syndrome::MwBind), "already bound");
    assert_eq!(scene.write(rkey), Written::Bytes);
}
