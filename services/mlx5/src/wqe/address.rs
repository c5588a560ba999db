//! Builds a datagram's address vector from address attributes.

use crate::wire::AddressVector;

/// The link layer of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinkLayer {
    /// InfiniBand.
    Infiniband {
        /// Destination LID.
        dlid: u16,
        /// Path bits of the source, seven bits.
        src_path_bits: u8,
    },
    /// RoCE version 1: a global header directly on Ethernet.
    RoceV1 {
        /// Destination MAC address.
        dmac: [u8; 6],
    },
    /// RoCE version 2: over UDP, with a source port derived from the flow label.
    RoceV2 {
        /// Destination MAC address.
        dmac: [u8; 6],
    },
}

/// A global route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Grh {
    /// Destination GID.
    pub dgid: [u8; 16],
    /// Flow label of 20 bits. RoCE v2 derives the source port from it and needs a value other than zero.
    pub flow_label: u32,
    /// Index of the source GID.
    pub sgid_index: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
}

/// The address attributes of a datagram, as in `ibv_ah_attr`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AhAttr {
    /// The link layer.
    pub link: LinkLayer,
    /// Service level: four bits on InfiniBand, three on Ethernet.
    pub sl: u8,
    /// `enum ibv_rate`, 0 for no limit.
    pub static_rate: u8,
    /// Global route; required on Ethernet.
    pub grh: Option<Grh>,
}

/// `MLX5_STAT_RATE_OFFSET`: the card's number of a rate is `enum ibv_rate` plus this offset.
const RATE_OFFSET: u8 = 5;
const FLOW_LABEL_BITS: u32 = 20;
const FLOW_LABEL: u32 = (1 << FLOW_LABEL_BITS) - 1;
const GID_INDEX_SHIFT: u32 = 20;

/// Returns the UDP source port of a RoCE v2 flow: the flow label folded to 14 bits, in the port range from 0xc000 on
/// (`ibv_flow_label_to_udp_sport`).
fn udp_source_port(flow_label: u32) -> u16 {
    let label = flow_label & FLOW_LABEL;
    0xc000 | ((label & 0x3fff) ^ (label >> 14)) as u16
}

impl AhAttr {
    /// Returns the address vector, with queue key and queue pair number zero. `None` if the link is Ethernet and there
    /// is no global route.
    pub fn address_vector(&self) -> Option<AddressVector> {
        let rate = if self.static_rate == 0 { 0 } else { self.static_rate.wrapping_add(RATE_OFFSET) };
        let mut av = AddressVector::default();
        let mut route_bits = 0;
        match self.link {
            LinkLayer::Infiniband { dlid, src_path_bits } => {
                av.stat_rate_sl = rate << 4 | self.sl & 0xf;
                av.fl_mlid = src_path_bits & 0x7f;
                av.rlid = dlid.into();
                route_bits = AddressVector::GRH;
            }
            LinkLayer::RoceV1 { dmac } | LinkLayer::RoceV2 { dmac } => {
                let grh = self.grh.as_ref()?;
                av.stat_rate_sl = rate << 4 | (self.sl & 7) << 1;
                av.rmac = dmac;
                if matches!(self.link, LinkLayer::RoceV2 { .. }) {
                    av.rlid = udp_source_port(grh.flow_label).into();
                }
            }
        }
        if let Some(grh) = &self.grh {
            av.tclass = grh.traffic_class;
            av.hop_limit = grh.hop_limit;
            av.rgid = grh.dgid;
            av.grh_gid_fl =
                (route_bits | (grh.sgid_index as u32) << GID_INDEX_SHIFT | grh.flow_label & FLOW_LABEL).into();
        }
        Some(av)
    }
}
