//! The slow path: the `locked` policy, transfers of no bytes or of more than one work request, signals raised by more
//! than one, and emulated signals.

use super::emulated::Word;
use super::operation::Operation;
use super::tables::{Name, Named, Tables};
use super::{Context, DATA};
use crate::action::{Flags, Sharing};
use crate::endpoint::{Endpoint, Wqe};
use crate::lanes::Lanes;
use crate::status::Status;
use ferrogin_ffi::ext::POLICY_COMBINING;

impl Context<'_> {
    /// Carries out a whole operation that [is not invalid](super::operation::Resolved::is_invalid): peer and counter
    /// exist.
    #[cold]
    #[inline(never)]
    pub(super) fn carry_out(self, operation: Operation) -> Result<(), Status> {
        let Operation { named, flags, .. } = operation;
        let tables = self.tables();
        let operation = operation.normalized(tables);
        match (named.signal_id(), self.emulated()) {
            (Some(id), Ok(emulated)) => self.raise(emulated, tables, operation, Word::Indexed(id), named.amount.into()),
            (Some(_), Err(unsupported)) if flags.has(Flags::STRONG) => Err(unsupported),
            _ => self.post_counted(tables, operation),
        }
    }

    /// Posts an operation whose signal the card counts. The counter ticks once per write, so a signal raised by `n`
    /// takes `n - 1` extra empty writes. They share a doorbell, and the write's endpoint unless that endpoint is a
    /// counter's.
    pub(super) fn post_counted(self, tables: Tables<'_>, operation: Operation) -> Result<(), Status> {
        let Operation { kind, peer, named, flags, .. } = operation;
        let route = tables.route(peer, named, kind.plain_endpoint())?;
        let template = tables.target(route.target).existing()?;
        let operation = self.post_first_parts(tables, operation)?;

        let mut more = route.raised_by.saturating_sub(1);
        let extra = if named.counter.exists {
            tables.route(peer, Named { counter: Name::NONE, ..named }, DATA)?.poster
        } else {
            route.poster
        };
        let is_last = more == 0 || extra != route.poster;
        let poster = tables.endpoint(route);
        self.post(poster, flags, flags.is_aggregate() || !is_last, operation.wqe_for(poster, template)?)?;
        let (remote, local) = tables.nothing(peer, true);
        while more != 0 {
            more -= 1;
            let empty = Wqe::new(template.write(remote, local));
            self.post(self.endpoint(extra), flags, flags.is_aggregate() || more != 0, empty)?;
        }
        Ok(())
    }

    /// Posts what doesn't fit in one work request on the data endpoint, without the action, and returns the last part,
    /// which carries the action once the first parts have completed.
    fn post_first_parts(self, tables: Tables<'_>, mut operation: Operation) -> Result<Operation, Status> {
        let largest = self.ext.max_rdma_size.into();
        if operation.bytes <= largest {
            return Ok(operation);
        }
        let data = tables.route(operation.peer, Named::NONE, DATA)?;
        let (poster, template) = (tables.endpoint(data), tables.target(data.target).existing()?);
        while operation.bytes > largest {
            let (first, rest) = operation.split(largest);
            // Rung by the last part, or by the flush.
            self.post(poster, operation.flags, true, first.wqe_for(poster, template)?)?;
            operation = rest;
        }
        if !operation.named.is_none() {
            self.settle_endpoint(DATA)?;
            tables.target(data.target).existing()?;
        }
        Ok(operation)
    }

    /// Posts a request, together with those of the other lanes of the warp that are here at the same time.
    pub(super) fn post(self, poster: Endpoint<'_>, flags: Flags, aggregate: bool, wqe: Wqe) -> Result<(), Status> {
        let may_join = self.ext.policy == POLICY_COMBINING && flags.mode() != Sharing::Thread;
        if may_join && Lanes::active().count() > 1 {
            return super::warp::join(poster, aggregate, wqe);
        }
        poster.post(self.ext.policy, flags, self, aggregate, wqe)
    }
}
