//! Faults that the card simulates, from `SOFTEFA_FAULTS`: a comma-separated list of `key=value` and of flags without a
//! value.

use efa_dp_direct::wqe::RequestIds;

use crate::config_error::ConfigError;

const VARIABLE: &str = "SOFTEFA_FAULTS";
const KEYS: &str = "seed, reorder, delay_us, reread, error_every, error_status, error_id, cntr_start, max_batch, sq_size, \
                    rq_size, wqe_size, die_after, cntr_budget, qp_caps, sub_cqs, device";
const FLAGS: &str = "narrow_only, no_counters, no_hmem, refuse_tclass, ignore_tclass, no_wait_fd, close_drops, old_qpns, \
                     no_rx_cq_data";

/// The faults of one process's cards. The default has none.
#[derive(Debug, Clone, PartialEq)]
pub struct Faults {
    /// Seed of every random choice.
    pub seed: u64,
    /// Requests are delivered and completed in random order within this many outstanding requests; 0 and 1 keep the
    /// order.
    pub reorder: u32,
    /// Delay of each delivery and of each completion, in microseconds, from..=to.
    pub delay_us: (u64, u64),
    /// Probability that the card reads a request's source again later, and delivers the later contents.
    pub reread: f64,
    /// Every Nth request completes in error and is not delivered; 0 means never.
    pub error_every: u64,
    /// The status of the requests that `error_every` fails.
    pub error_status: u8,
    /// If given, `error_every` spares requests with another id (of 16 bits), which may name the peer.
    pub error_id: Option<u16>,
    /// Initial value of counters and of send queues' producer index.
    pub cntr_start: u32,
    /// How many requests may be written but not yet rung.
    pub max_batch: u32,
    /// Maximum number of entries in a send queue.
    pub sq_size: u32,
    /// Maximum number of entries in a receive queue of `efa-direct`.
    pub rq_size: u32,
    /// Size of the widest work request in bytes: 64 or 128.
    pub wqe_size: u32,
    /// The card stops responding after this many requests; 0 means never.
    pub die_after: u64,
    /// How many completion counters the card has.
    pub cntr_budget: u32,
    /// Capability bits that send queues report. Without bit 0 request ids have 16 bits.
    pub qp_caps: u16,
    /// How many rings a completion queue has, of which programs that drive queues themselves see the first.
    pub sub_cqs: u32,
    /// The card's device id, which verbs programs read.
    pub device: u16,
    /// `cntr_open_ext` is refused, as by libfabric's `efa` provider with `FI_EFA_USE_HW_CNTR=0`, the default in 2.6.0.
    pub no_counters: bool,
    /// `FI_HMEM` is refused, as by a libfabric built without CUDA.
    pub no_hmem: bool,
    /// Unknown traffic classes are refused; libfabric's `efa` provider ignores them.
    pub refuse_tclass: bool,
    /// Traffic classes in hints are all ignored, as by libfabric 2.6.0.
    pub ignore_tclass: bool,
    /// Completion queues have no descriptor to wait on (`FI_WAIT_FD`), as with libfabric's `efa` provider while its
    /// shared memory is on.
    pub no_wait_fd: bool,
    /// A closed endpoint drops the requests that the card has not delivered yet, as with libfabric's `efa` provider.
    pub close_drops: bool,
    /// Queue pair numbers that have been free the longest are used first.
    pub old_qpns: bool,
    /// `FI_RX_CQ_DATA` in hints is ignored: writes with immediate data take no receive.
    pub no_rx_cq_data: bool,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            seed: 0,
            reorder: 0,
            delay_us: (0, 0),
            reread: 0.0,
            error_every: 0,
            error_status: 8,
            error_id: None,
            cntr_start: 0,
            max_batch: 16,
            sq_size: MAX_SQ_SIZE,
            rq_size: MAX_RQ_SIZE,
            wqe_size: 128,
            die_after: 0,
            cntr_budget: 8192,
            qp_caps: CAPS_64_BIT_REQUEST_IDS,
            sub_cqs: 1,
            device: 0xefa3,
            no_counters: false,
            no_hmem: false,
            refuse_tclass: false,
            ignore_tclass: false,
            no_wait_fd: false,
            close_drops: false,
            old_qpns: false,
            no_rx_cq_data: false,
        }
    }
}

/// Bit of [`Faults::qp_caps`]: request ids have 64 bits.
pub const CAPS_64_BIT_REQUEST_IDS: u16 = 1;

/// How many 64-byte entries fit into a send queue's memory; half as many of 128 bytes do.
pub const MAX_SQ_SIZE: u32 = 4096;
/// Maximum number of entries in a receive queue.
const MAX_RQ_SIZE: u32 = 8192;
/// The largest value of a counter, which then wraps.
pub const COUNTER_MASK: u64 = 0x7fff_ffff;

impl Faults {
    /// Whether requests wait in the reorder buffer before the wire.
    pub fn hold(&self) -> bool {
        self.reorder > 1 || self.delay_us.1 > 0 || self.reread > 0.0
    }

    /// Returns how many bits of request ids queues support.
    pub fn request_ids(&self) -> RequestIds {
        if self.qp_caps & CAPS_64_BIT_REQUEST_IDS != 0 { RequestIds::Bits64 } else { RequestIds::Bits16 }
    }

    /// Parses the value of `SOFTEFA_FAULTS`.
    ///
    /// # Errors
    /// An unknown key or an invalid value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        Self::parse_items(text).map_err(|problem| ConfigError::new(VARIABLE, text, problem))
    }

    fn parse_items(text: &str) -> Result<Self, String> {
        let mut faults = Self::default();
        let mut seen: Vec<&str> = Vec::new();
        for item in text.split(',') {
            let item = item.trim();
            let key = item.split('=').next().unwrap_or(item);
            if seen.contains(&key) {
                return Err(format!("{key} is given twice"));
            }
            seen.push(key);
            match item.split_once('=') {
                Some((key, value)) => faults.set(key, value)?,
                None => faults.set_flag(item)?,
            }
        }
        let unused = ["error_status", "error_id"].into_iter().find(|key| seen.contains(key) && faults.error_every == 0);
        if let Some(key) = unused {
            return Err(format!("{key} does nothing without error_every"));
        }
        if !seen.contains(&"max_batch") {
            faults.max_batch = faults.max_batch.min(faults.sq_size);
        }
        if seen.contains(&"narrow_only") && seen.contains(&"wqe_size") {
            return Err("narrow_only and wqe_size are the same fault: give one of them".into());
        }
        if faults.max_batch > faults.sq_size {
            return Err("max_batch is greater than sq_size".into());
        }
        Ok(faults)
    }

    fn set_flag(&mut self, flag: &str) -> Result<(), String> {
        match flag {
            "narrow_only" => self.wqe_size = 64,
            "no_counters" => self.no_counters = true,
            "no_hmem" => self.no_hmem = true,
            "no_wait_fd" => self.no_wait_fd = true,
            "close_drops" => self.close_drops = true,
            "old_qpns" => self.old_qpns = true,
            "no_rx_cq_data" => self.no_rx_cq_data = true,
            "refuse_tclass" => self.refuse_tclass = true,
            "ignore_tclass" => self.ignore_tclass = true,
            _ => return Err(format!("{flag:?} is neither key=value nor a flag; keys are {KEYS}; flags are {FLAGS}")),
        }
        Ok(())
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let number = |low: u64, high: u64| match value.parse::<u64>() {
            Ok(n) if (low..=high).contains(&n) => Ok(n),
            _ => Err(format!("{key} must be a whole number from {low} to {high}, not {value:?}")),
        };
        let size = |high: u32| match number(2, u64::from(high))? as u32 {
            size if size.is_power_of_two() => Ok(size),
            size => Err(format!("{key} must be a power of two, not {size}")),
        };
        match key {
            "seed" => self.seed = number(0, u64::MAX)?,
            "reorder" => self.reorder = number(0, 65536)? as u32,
            "delay_us" => {
                let parts = value.split_once("..").and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
                self.delay_us = parts
                    .filter(|(a, b)| a <= b && *b <= 10_000_000)
                    .ok_or_else(|| format!("delay_us must be A..B with A ≤ B ≤ 10000000, not {value:?}"))?;
            }
            "reread" => {
                let probability = value.parse().ok().filter(|p| (0.0..=1.0).contains(p));
                self.reread =
                    probability.ok_or_else(|| format!("reread must be a probability from 0 to 1, not {value:?}"))?;
            }
            "error_every" => self.error_every = number(0, u64::MAX)?,
            "error_status" => self.error_status = number(1, 255)? as u8,
            "error_id" => self.error_id = Some(number(0, u64::from(u16::MAX))? as u16),
            "cntr_start" => self.cntr_start = number(0, COUNTER_MASK)? as u32,
            "max_batch" => self.max_batch = number(1, 1024)? as u32,
            "sq_size" => self.sq_size = size(MAX_SQ_SIZE)?,
            "rq_size" => self.rq_size = size(MAX_RQ_SIZE)?,
            "wqe_size" => {
                self.wqe_size = match value {
                    "64" => 64,
                    "128" => 128,
                    _ => return Err(format!("wqe_size must be 64 or 128, not {value:?}")),
                }
            }
            "die_after" => self.die_after = number(0, u64::MAX)?,
            "cntr_budget" => self.cntr_budget = number(0, 1 << 20)? as u32,
            "qp_caps" => self.qp_caps = number(0, u64::from(CAPS_64_BIT_REQUEST_IDS))? as u16,
            "sub_cqs" => self.sub_cqs = number(1, 64)? as u32,
            "device" => {
                self.device = match value {
                    "efa0" => 0xefa0,
                    "efa1" => 0xefa1,
                    "efa2" => 0xefa2,
                    "efa3" => 0xefa3,
                    "efa4" => 0xefa4,
                    _ => return Err(format!("device must be one of efa0 to efa4, not {value:?}")),
                }
            }
            _ => return Err(format!("unknown key {key:?}; keys are {KEYS}; flags are {FLAGS}")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_parsed() {
        let faults = Faults::parse(
            "seed=5,reorder=32,delay_us=1..20,reread=0.25,error_every=100,error_status=7,error_id=3,cntr_start=2147483640,\
             max_batch=4,sq_size=64,rq_size=32,wqe_size=64,die_after=9,cntr_budget=12,qp_caps=0,sub_cqs=4,device=efa1,no_counters,no_hmem,\
             refuse_tclass,ignore_tclass,no_wait_fd,close_drops,old_qpns,no_rx_cq_data",
        )
        .unwrap();
        let expected = Faults {
            seed: 5,
            reorder: 32,
            delay_us: (1, 20),
            reread: 0.25,
            error_every: 100,
            error_status: 7,
            error_id: Some(3),
            cntr_start: 2_147_483_640,
            max_batch: 4,
            sq_size: 64,
            rq_size: 32,
            wqe_size: 64,
            die_after: 9,
            cntr_budget: 12,
            qp_caps: 0,
            sub_cqs: 4,
            device: 0xefa1,
            no_counters: true,
            no_hmem: true,
            refuse_tclass: true,
            ignore_tclass: true,
            no_wait_fd: true,
            close_drops: true,
            old_qpns: true,
            no_rx_cq_data: true,
        };
        assert_eq!(faults, expected);
        assert_eq!(Faults::parse("narrow_only"), Faults::parse("wqe_size=64"));
    }

    #[test]
    fn small_queue_limits_batch() {
        let faults = Faults::parse("sq_size=4").unwrap();
        assert_eq!((faults.sq_size, faults.max_batch), (4, 4));
    }

    #[test]
    fn invalid_faults_are_refused_by_name() {
        for (text, named) in [
            ("sed=1", "unknown key \"sed\""),
            ("seed", "neither key=value nor a flag"),
            ("no_counter", "flags are narrow_only, no_counters"),
            ("no_counters,no_counters", "twice"),
            ("no_counters=1", "unknown key \"no_counters\""),
            ("narrow_only,wqe_size=128", "give one of them"),
            ("qp_caps=2", "qp_caps"),
            ("sub_cqs=0", "sub_cqs"),
            ("device=efa9", "efa0 to efa4"),
            ("seed=x", "seed must be"),
            ("seed=1,seed=2", "twice"),
            ("reread=1.5", "reread"),
            ("reread=nan", "reread"),
            ("delay_us=5..1", "delay_us"),
            ("delay_us=5", "delay_us"),
            ("sq_size=100", "power of two"),
            ("sq_size=8192", "sq_size"),
            ("rq_size=16384", "rq_size"),
            ("wqe_size=96", "wqe_size"),
            ("max_batch=0", "max_batch"),
            ("max_batch=16,sq_size=8", "greater"),
            ("cntr_start=2147483648", "cntr_start"),
            ("error_status=3", "error_every"),
            ("error_id=3", "error_id does nothing without error_every"),
            ("error_every=1,error_id=65536", "error_id"),
            ("error_every=1,error_status=0", "error_status"),
            ("seed=1,", "neither key=value"),
        ] {
            let error = Faults::parse(text).unwrap_err();
            assert!(error.to_string().contains(named), "{text}: {error}");
        }
    }
}
