//! Which endpoints may send to this one. A transport that learns of endpoints by their messages asks before it takes the first message: it must
//! be a control message with the secret of the listener or of the connecting channel that it is for.

use crate::proto::channel_state::{ChannelState, Phase};
use crate::proto::wire::{Control, Kind};

/// True if the sender of `message` knows the secret. `secrets` has those of all listeners, `name` is the sender's endpoint name.
pub(super) fn is_proven(secrets: &[u64], channels: &[Option<Box<ChannelState>>], name: &[u8], message: &[u8]) -> bool {
    let Some((control, own_name)) = Control::parse(message) else { return false };
    if control.kind == Kind::Hello {
        return own_name == name && secrets.get(control.to as usize) == Some(&control.secret);
    }
    let channel = channels.get(control.to as usize).and_then(Option::as_deref);
    channel.is_some_and(|channel| {
        matches!(channel.phase, Phase::Connecting { .. }) && channel.secret == control.secret && *channel.name == *name
    })
}
