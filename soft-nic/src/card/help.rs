//! Cards that threads of the application may let work while they wait.
//!
//! Who waits for memory does not say whose card writes it, so cards have turns.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use super::engine::Shared;
use super::seat;

/// Cards with a running engine.
static CARDS: RwLock<Vec<Arc<Shared>>> = RwLock::new(Vec::new());

/// From now on the card may work in other threads than its engine's.
pub(super) fn offer(shared: &Arc<Shared>) {
    CARDS.write().unwrap_or_else(PoisonError::into_inner).push(shared.clone());
}

/// The card works in no other thread any more when this returns.
pub(super) fn withdraw(shared: &Arc<Shared>) {
    CARDS.write().unwrap_or_else(PoisonError::into_inner).retain(|card| !Arc::ptr_eq(card, shared));
}

/// Lets the card whose turn it is work for one look, unless it just does. False when there is none, and where each engine
/// finds a core and would only be disturbed.
pub fn help() -> bool {
    static CROWDED: OnceLock<bool> = OnceLock::new();
    *CROWDED.get_or_init(seat::is_crowded) && look_at_one()
}

fn look_at_one() -> bool {
    static TURN: AtomicUsize = AtomicUsize::new(0);
    // Cards come or go: another time.
    let Ok(cards) = CARDS.try_read() else { return false };
    let turn = if cards.len() > 1 { TURN.fetch_add(1, Ordering::Relaxed) % cards.len() } else { 0 };
    let Some(card) = cards.get(turn) else { return false };
    card.look();
    true
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::{Core, Wires};
    use super::*;
    use crate::address::Gid;
    use crate::config::Config;

    fn card() -> Arc<Shared> {
        let gid = Gid { host: 1, ip: std::net::Ipv4Addr::LOCALHOST, port: 0, nonce: 1 };
        Shared::new(Core::new(0, gid, Config::default(), Wires { listener: None, datagrams: None }).unwrap())
    }

    #[test]
    fn every_card_is_helped_until_it_is_withdrawn() {
        let cards = [card(), card()];
        for card in &cards {
            offer(card);
        }
        // Cards of other tests have their turns too, and nobody has one while they come and go.
        let until = |seen: &dyn Fn() -> bool| {
            let start = Instant::now();
            while !seen() {
                assert!(start.elapsed() < Duration::from_secs(120), "no turn");
                look_at_one();
            }
        };
        until(&|| cards.iter().all(|card| card.looks() > 0));
        withdraw(&cards[0]);
        let seen = cards[0].looks();
        for _ in 0..100 {
            let before = cards[1].looks();
            until(&|| cards[1].looks() > before);
        }
        assert_eq!(cards[0].looks(), seen, "withdrawn");
        withdraw(&cards[1]);
    }

    #[test]
    fn set_up_calls_go_before_helpers() {
        let card = card();
        card.look();
        assert_eq!(card.looks(), 1);
        let lock = card.lock();
        card.look();
        drop(lock);
        assert_eq!(card.looks(), 1, "somebody has the card");
        card.set_waiting(1);
        card.look();
        assert_eq!(card.looks(), 1, "somebody is about to have it");
        card.set_waiting(0);
        card.look();
        assert_eq!(card.looks(), 2);
    }
}
