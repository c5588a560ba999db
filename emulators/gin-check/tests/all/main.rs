//! Races of small random programs, compared with an oracle; and what the join makes of records.

mod join;
mod race;
mod record;
