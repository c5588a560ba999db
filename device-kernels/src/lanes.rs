//! Lanes of a warp that make a call together, each with its own arguments. A CPU thread is a warp of one lane.
//!
//! The instructions are LLVM intrinsics rather than inline assembly, because LLVM neither copies intrinsics nor moves
//! them into branches that only some lanes take.

#[cfg(not(target_arch = "nvptx64"))]
use one_lane::*;

/// A set of lanes of one warp, including this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lanes(pub u32);

#[cfg(target_arch = "nvptx64")]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.match.any.sync.i64"]
    safe fn match_any(mask: u32, value: u64) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    safe fn shuffle(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.activemask"]
    safe fn activemask() -> u32;
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    safe fn barrier(mask: u32);
    #[link_name = "llvm.nvvm.read.ptx.sreg.lanemask.lt"]
    safe fn lanes_before() -> u32;
}

/// What the instructions amount to in a warp of one lane.
#[cfg(not(target_arch = "nvptx64"))]
mod one_lane {
    pub fn match_any(_mask: u32, _value: u64) -> u32 {
        activemask()
    }
    pub fn shuffle(_mask: u32, value: u32, _lane: u32, _clamp: u32) -> u32 {
        value
    }
    pub fn activemask() -> u32 {
        1
    }
    pub fn barrier(_mask: u32) {}
    pub fn lanes_before() -> u32 {
        0
    }
}

impl Lanes {
    /// Returns the lanes that make this call at the same time.
    #[inline(always)]
    pub fn active() -> Lanes {
        Lanes(activemask())
    }

    /// Returns the number of lanes.
    #[inline(always)]
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Returns the number of lanes before this one.
    #[inline(always)]
    pub fn rank(self) -> u32 {
        (self.0 & lanes_before()).count_ones()
    }

    /// Returns once all lanes have called it. What each wrote before the call is visible to all after it.
    #[inline(always)]
    pub fn sync(self) {
        barrier(self.0);
    }

    /// Returns the lanes that passed the same key. All lanes make this call.
    #[inline(always)]
    pub fn with_key(self, key: u64) -> Lanes {
        Lanes(match_any(self.0, key))
    }

    /// Returns the word that the first lane passed. All lanes make this call.
    #[inline(always)]
    pub fn broadcast_from_first(self, word: u32) -> u32 {
        shuffle(self.0, word, self.0.trailing_zeros(), 31)
    }
}
