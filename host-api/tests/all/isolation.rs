//! Isolated peers: a rank of several is killed, stopped or closes at a random moment, and the others finish with right
//! data, know its name, and post to it no more.
#![allow(unsafe_code)]

use crate::common::{alone, dist, is_child, job, on_software_card, ranks, text, this_test};
use ferrogin::device::{Action, Context as Gin, Flags, Status};
use ferrogin::{Comm, Context, ContextOptions, Memory, Options, PeerFailure, Window};
use ferrogin_ffi::ext::RANK_ID;
use ferrogin_test_support::{Random, repetitions, wait::wait_until};
use nix::sys::signal::{Signal, raise};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The lost ranks, how they are lost, and the seed, for the ranks' processes.
const VICTIMS: &str = "FERROGIN_TEST_VICTIMS";
const HOW: &str = "FERROGIN_TEST_HOW";
const SEED: &str = "FERROGIN_TEST_SEED";
/// How often the ranks exchange with all others.
const ROUNDS: u64 = 60;
/// Bytes of a put.
const BYTES: usize = 64;

/// The time on all ranks' clock.
fn now_ms() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970").as_millis()
}

/// A rank that may lose others.
struct Rank<'a> {
    rank: usize,
    ranks: usize,
    context: &'a Context,
    gin: Gin<'a>,
    window: &'a Window,
    /// The lost ranks, and when this rank learned of them, in milliseconds.
    lost: RefCell<BTreeMap<usize, u128>>,
    /// Posts until this rank is lost.
    posts_left: RefCell<Option<(u64, String)>>,
    /// Whether this rank closes its communicator now.
    closes: Cell<bool>,
}

impl Rank<'_> {
    /// Returns the first byte of a part of the window: two buffers for each peer's puts, a buffer for each get, one
    /// with constant data.
    fn at(&self, part: usize) -> u64 {
        (part * BYTES) as u64
    }

    fn put_part(&self, from: usize, round: u64) -> usize {
        2 * from + (round % 2) as usize
    }

    fn get_part(&self, peer: usize) -> usize {
        2 * self.ranks + peer
    }

    fn constant_part(&self) -> usize {
        3 * self.ranks
    }

    fn source_part(&self, round: u64) -> usize {
        3 * self.ranks + 1 + (round % 2) as usize
    }

    fn word(&self, part: usize, i: usize) -> *mut u64 {
        let base = self.window.host_address().expect("host memory");
        base.cast::<u8>().wrapping_add(part * BYTES + 8 * i).cast()
    }

    fn read(&self, part: usize) -> [u64; BYTES / 8] {
        // SAFETY: a word of the window, which no peer writes now unless a check is about to fail.
        std::array::from_fn(|i| unsafe { self.word(part, i).read_volatile() })
    }

    fn fill(&self, part: usize, value: u64) {
        for i in 0..BYTES / 8 {
            // SAFETY: a word of the window, which the card doesn't read now.
            unsafe { self.word(part, i).write_volatile(value) };
        }
    }

    /// Returns the peers that aren't lost.
    fn peers(&self) -> Vec<usize> {
        (0..self.ranks).filter(|peer| *peer != self.rank && !self.is_lost(*peer)).collect()
    }

    fn is_lost(&self, rank: usize) -> bool {
        self.lost.borrow().contains_key(&rank)
    }

    /// Handles a loss: learns the names and acknowledges them.
    fn acknowledge(&self) {
        let lost = self.context.lost_ranks();
        assert!(!lost.is_empty(), "the name is known first");
        self.context.acknowledge_lost(&lost).expect("an acknowledgement");
        lost.into_iter().for_each(|rank| _ = self.lost.borrow_mut().entry(rank).or_insert_with(now_ms));
    }

    /// Posts, unless the peer is lost.
    fn post(&self, peer: usize, post: impl Fn(&Gin<'_>, u32) -> Result<(), Status>) {
        let mut left = self.posts_left.borrow_mut();
        if let Some((left, how)) = &mut *left {
            *left = left.saturating_sub(1);
            match (*left, how.as_str()) {
                (0, "killed") => raise(Signal::SIGKILL).expect("a signal"),
                (0, "stopped") => raise(Signal::SIGSTOP).expect("a signal"),
                (0, _) => return self.closes.set(true),
                _ => {}
            }
        }
        drop(left);
        match post(&self.gin, peer as u32) {
            Ok(()) => {}
            Err(Status::PeerLost) => {
                assert!(self.context.lost_ranks().contains(&peer), "the post to {peer} was refused");
                self.acknowledge();
            }
            Err(status) => panic!("rank {}: a post to {peer}: {status}", self.rank),
        }
    }

    /// Waits, and waits again after each loss, until `is_over`.
    fn wait(&self, what: &str, is_over: impl Fn() -> bool, wait: impl Fn() -> Result<(), Status>) {
        while !is_over() && !self.closes.get() {
            match wait() {
                Ok(()) => return,
                Err(Status::PeerLost) => self.acknowledge(),
                Err(status) => panic!("rank {}: {what}: {status}", self.rank),
            }
        }
    }

    /// Exchanges with all others.
    fn round(&self, round: u64, pause: u64) {
        let source = self.source_part(round);
        self.fill(source, round << 8 | self.rank as u64);
        let window = self.window.handle();
        for peer in self.peers() {
            let to = window.at(self.at(self.put_part(self.rank, round)));
            let from = window.at(self.at(source));
            let half = BYTES as u64 / 2;
            self.post(peer, |gin, peer| gin.put(peer, to, from, half, Action::NONE, Flags::AGGREGATE));
            // A signal covers its own bytes.
            self.post(peer, |gin, peer| {
                let at = |part: usize| window.at(self.at(part) + half);
                let (to, from) = (at(self.put_part(self.rank, round)), at(source));
                gin.put(peer, to, from, half - 8, Action::signal_inc(self.rank as u16), Flags::NONE)
            });
            let last = window.at(self.at(self.put_part(self.rank, round)) + BYTES as u64 - 8);
            let (value, action) = (round << 8 | self.rank as u64, Action::signal_inc(self.rank as u16));
            self.post(peer, |gin, peer| gin.put_value(peer, last, value, 8, action, Flags::NONE));
            let (remote, local) = (window.at(self.at(self.constant_part())), window.at(self.at(self.get_part(peer))));
            self.post(peer, |gin, peer| gin.get(peer, remote, local, BYTES as u64, Flags::NONE));
        }
        self.wait("flush", || false, || self.gin.flush());
        if self.closes.get() {
            return;
        }
        for peer in self.peers() {
            assert_eq!(self.read(self.get_part(peer)), [peer as u64 + 1; BYTES / 8], "a get from rank {peer}");
        }
        // Covers the put without a signal.
        for peer in self.peers() {
            let action = Action::signal_inc(self.rank as u16);
            self.post(peer, |gin, peer| gin.signal(peer, action, Flags::NONE));
        }
        for peer in self.peers() {
            let is_lost = || self.is_lost(peer);
            self.wait("a signal", is_lost, || self.gin.wait_signal(peer as u32, 3 * round));
            if !is_lost() && !self.closes.get() {
                let expected = [round << 8 | peer as u64; BYTES / 8];
                assert_eq!(self.read(self.put_part(peer, round)), expected, "from rank {peer} in round {round}");
            }
        }
        std::thread::sleep(std::time::Duration::from_micros(pause));
    }
}

fn exchange() {
    let comm = Comm::from_env(&Options::default()).expect("a communicator");
    let (rank, ranks) = (comm.rank(), comm.ranks());
    let window = comm.allocate(BYTES * (3 * ranks + 4), Memory::Host).expect("a window");
    let options = ContextOptions {
        signals: ranks as u32,
        depth: 64,
        on_peer_failure: Some(PeerFailure::Isolate),
        ..ContextOptions::default()
    };
    let context = comm.context(&options).expect("a context");
    let text = |name: &str| std::env::var(name).expect("a setting of the test");
    let victims: Vec<usize> = text(VICTIMS).split(',').filter_map(|rank| rank.parse().ok()).collect();
    let mut random = Random::new(text(SEED).parse::<u64>().expect("a number") * 64 + rank as u64);
    let posts = 1 + random.index(5 * (ranks - 1) * ROUNDS as usize / 2) as u64;
    let state = Rank {
        rank,
        ranks,
        context: &context,
        gin: context.device(0).expect("CPU threads"),
        window: &window,
        lost: RefCell::default(),
        posts_left: RefCell::new(victims.contains(&rank).then(|| (posts, text(HOW)))),
        closes: Cell::new(false),
    };
    state.fill(state.constant_part(), rank as u64 + 1);
    comm.barrier().expect("a barrier");
    for round in 1..=ROUNDS {
        state.round(round, random.index(200) as u64);
        if state.closes.get() {
            return;
        }
    }
    // All have heard of the losses.
    wait_until("news of all losses", || context.lost_ranks().len() == victims.len());
    for lost in context.lost_ranks() {
        let refused = state.gin.signal(lost as u32, Action::signal_inc(0), Flags::NONE);
        assert_eq!(refused, Err(Status::PeerLost));
    }
    state.wait("the last flush", || false, || state.gin.flush());
    context.check().expect("no failure");
    println!("rank {rank} goes on without {:?}", context.lost_ranks());
    state.lost.borrow().iter().for_each(|(lost, at)| println!("rank {lost} lost at {at}"));
    // No rank closes while another one may still wait for it.
    for peer in state.peers() {
        state.post(peer, |gin, peer| gin.signal(peer, Action::signal_inc(rank as u16), Flags::NONE));
    }
    for peer in state.peers() {
        state.gin.wait_signal(peer as u32, 3 * ROUNDS + 1).expect("the last signal");
    }
}

/// Runs the exchange between `ranks` processes, some of which are lost.
fn lose(
    test: &str,
    dist: &std::path::Path,
    ranks: usize,
    victims: &[usize],
    how: &str,
    seed: u64,
    settings: &[(&str, &str)],
) {
    let start = |rank: usize| -> Child {
        let mut command: Command = this_test(test, dist);
        on_software_card(&mut command).envs(settings.iter().copied()).env("FERROGIN_PROVIDER", "softefa");
        command.env("FERROGIN_HOST_TEST", test).env("FI_PROVIDER_PATH", dist);
        command.env("FERROGIN_RANK", rank.to_string()).env("FERROGIN_NRANKS", ranks.to_string());
        command.env("FERROGIN_BOOTSTRAP", format!("ferrogin-{test}-{}-{seed}", std::process::id()));
        let list: Vec<_> = victims.iter().map(ToString::to_string).collect();
        command.env(VICTIMS, list.join(",")).env(HOW, how).env(SEED, seed.to_string());
        command.env("SOFTEFA_FAULTS", format!("seed={seed},reorder=32,reread=0.1"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a process")
    };
    let mut all: Vec<_> = (0..ranks).map(|rank| (rank, start(rank))).collect();
    let victim = |(rank, _): &(usize, Child)| victims.contains(rank);
    let (ended, survivors): (Vec<_>, Vec<_>) = all.drain(..).partition(victim);
    let mut news = BTreeMap::<String, Vec<u128>>::new();
    for (rank, child) in survivors {
        let output = child.wait_with_output().expect("an output");
        let text = text(&output);
        let line = format!("rank {rank} goes on without {victims:?}\n");
        assert!(output.status.success() && text.contains(&line), "{how} {victims:?}, seed {seed}, rank {rank}: {text}");
        for (lost, at) in text.lines().filter_map(|line| line.split_once(" lost at ")) {
            news.entry(lost.to_owned()).or_default().push(at.parse().expect("a time"));
        }
    }
    for (lost, times) in news {
        let spread = times.iter().max().zip(times.iter().min()).map_or(0, |(last, first)| last - first);
        println!("{how}, seed {seed}: the other {} knew that {lost} was lost within {spread} ms", times.len());
    }
    for (_, mut child) in ended {
        let _ = child.kill();
        child.wait().expect("its end");
    }
}

/// How many exchanges run at once.
const LANES: u64 = 4;

/// Runs `count` exchanges with losses that depend on the seed.
fn lose_many(test: &str, count: u64) {
    if is_child(test) {
        return exchange();
    }
    let Some(dist) = dist(test) else { return };
    let first = std::env::var("FERROGIN_TEST_FIRST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let run = &|seed: u64| {
        let mut random = Random::new(seed);
        let ranks = if random.index(3) == 0 { 8 } else { 4 };
        let mut victims: Vec<_> = (0..1 + random.index(2)).map(|_| random.index(ranks)).collect();
        victims.sort_unstable();
        victims.dedup();
        let how = ["killed", "killed", "closed", "stopped"][random.index(4)];
        let signals = ["card", "card", "emulated"][random.index(3)];
        // A stopped rank is given up after FERROGIN_TIMEOUT, if no card has before.
        let settings = [("FERROGIN_SIGNALS", signals), ("FERROGIN_WAIT_TIMEOUT", "0"), ("FERROGIN_TIMEOUT", "60")];
        lose(test, &dist, ranks, &victims, how, seed, &settings);
    };
    // Several at once, because some only wait for that timeout.
    std::thread::scope(|scope| {
        for lane in 0..LANES {
            scope.spawn(move || (first + lane..first + count).step_by(LANES as usize).for_each(run));
        }
    });
}

#[test]
fn others_go_on_without_lost_ranks() {
    lose_many("others_go_on_without_lost_ranks", 6);
}

#[test]
#[ignore = "make check"]
fn others_go_on_without_lost_ranks_in_many_runs() {
    lose_many("others_go_on_without_lost_ranks_in_many_runs", repetitions("FERROGIN_LOSSES", 16, 200));
}

#[test]
fn ranks_with_different_policies_are_refused() {
    alone("ranks_with_different_policies_are_refused", &[], || {
        let errors = ranks(2, |comm| {
            let on_peer_failure = Some([PeerFailure::Isolate, PeerFailure::Abort][comm.rank()]);
            let context = comm.context(&ContextOptions { on_peer_failure, ..ContextOptions::default() });
            context.err().expect("an error").to_string()
        });
        let expected = [
            "rank 1 does not isolate lost ranks in this context, and rank 0 isolates them",
            "rank 0 isolates lost ranks in this context, and rank 1 does not isolate them",
        ];
        for (error, expected) in errors.iter().zip(expected) {
            assert!(error.contains(expected), "{error}");
        }
    });
}

/// The rank whose requests fail, the one that they are for, and one that has nothing to do with it.
const POSTER: usize = 0;
const PEER: usize = 1;
const OTHER: usize = 2;

/// A rank of three: all requests of the first to the second fail. `ends` says whether the second ends, too.
fn rank_with_failing_requests(is_loss: bool, ends: bool) {
    let comm = Comm::from_env(&Options::default()).expect("a communicator");
    let window = comm.allocate(64, Memory::Host).expect("a window");
    let on_peer_failure = Some(PeerFailure::Isolate);
    let options = ContextOptions { signals: 2, on_peer_failure, ..ContextOptions::default() };
    let context = comm.context(&options).expect("a context");
    let gin = context.device(0).expect("CPU threads");
    let put = |peer: usize| {
        let (to, action) = (window.handle().at(0), Action::signal_inc(0));
        gin.put(peer as u32, to, window.handle().at(8), 8, action, Flags::NONE)
    };
    let acknowledge = || {
        assert_eq!(context.lost_ranks(), [PEER]);
        context.acknowledge_lost(&[PEER]).expect("an acknowledgement");
    };
    comm.barrier().expect("a barrier");
    match comm.rank() {
        POSTER => {
            let posted = Instant::now();
            put(PEER).expect("a post before the failure");
            if is_loss {
                assert_eq!(gin.flush(), Err(Status::PeerLost));
                println!("the flush ended {} ms after the post", posted.elapsed().as_millis());
                acknowledge();
                assert_eq!((put(PEER), put(OTHER), gin.flush()), (Err(Status::PeerLost), Ok(()), Ok(())));
                context.check().expect("no failure");
                window.check_unused().expect("no outstanding request");
                gin.wait_signal(0, 1).expect("the other rank's signal");
                put(OTHER).expect("a post before the context is destroyed");
            } else {
                assert_eq!(gin.flush(), Err(Status::Aborted));
                assert!(put(OTHER).and_then(|()| gin.flush()).is_err(), "the context has ended");
                assert_eq!(context.lost_ranks(), [0; 0]);
                context.check().expect_err("a failure");
            }
        }
        PEER if ends => raise(Signal::SIGKILL).expect("a signal"),
        // The others go on without this one.
        PEER if is_loss => {
            assert_eq!(gin.wait_signal(0, 1), Err(Status::Aborted));
            context.check().expect_err("a failure");
        }
        _ if is_loss => {
            wait_until("news of the loss", || context.lost_ranks() == [PEER]);
            // The first one's signal may have come by now.
            acknowledge();
            gin.wait_signal(0, 1).expect("the first rank's signal");
            put(POSTER).and_then(|()| gin.flush()).expect("a put to the first rank");
            gin.wait_signal(0, 2).expect("the signal of the post before the end");
        }
        // Both hear that the first one has closed its communicator.
        _ => assert_eq!(gin.wait_signal(0, 1), Err(Status::PeerLost)),
    }
    println!("done");
}

/// Requests to a peer fail with `status`, which means that it is lost, or else ends the context.
fn status_means(test: &str, status: u8, is_loss: bool, ends: bool, signals: &str) {
    let Some(dist) = dist(test) else { return };
    let id = RANK_ID | PEER as u16;
    let outputs = job(test, 3, |rank| {
        let mut command = this_test(test, &dist);
        command.env("FERROGIN_SIGNALS", signals).env(HOW, format!("{is_loss} {ends}"));
        if rank == POSTER {
            let slow = "close_drops,delay_us=20000..30000";
            command.env("SOFTEFA_FAULTS", format!("seed=1,error_every=1,error_status={status},error_id={id},{slow}"));
        }
        command
    });
    for (rank, output) in outputs.iter().enumerate() {
        let text = text(output);
        let (is_killed, is_done) = (ends && rank == PEER, output.status.success() && text.contains("done\n"));
        assert!(is_killed || is_done, "status {status}, rank {rank}: {text}");
    }
    let text = text(&outputs[POSTER]);
    let (loss, failure) = ("rank 0: rank 1 is lost: ", "to rank 1 on endpoint ");
    let of_kernel = "the first failure of a kernel in this context: ";
    let lines = text.lines().filter(|line| line.contains("WARN") && !line.contains(of_kernel)).collect::<Vec<_>>();
    assert!(lines.len() == 1 && lines[0].contains(loss) == is_loss, "status {status}: {text}");
    let ended = text.find("the flush ended").and_then(|at| text[at..].lines().next());
    ended.into_iter().for_each(|line| println!("status {status}: {line}"));
    // The rank that notices an end first gives the reason.
    assert!(ends || lines[0].contains(failure) && lines[0].contains(&format!("(status {status})")), "{text}");
}

/// The table of docs/semantics.md.
#[test]
fn status_says_whether_the_peer_is_lost() {
    let test = "status_says_whether_the_peer_is_lost";
    if is_child(test) {
        let how = std::env::var(HOW).expect("a setting of the test");
        return rank_with_failing_requests(how.starts_with("true"), how.ends_with("true"));
    }
    for status in [8, 9, 13, 14, 15] {
        status_means(test, status, true, false, if status == 8 { "emulated" } else { "card" });
    }
    // Sends only.
    status_means(test, 10, true, false, "emulated");
    for status in [5, 12] {
        status_means(test, status, false, false, "card");
    }
    // A bad address, unless the peer has ended.
    status_means(test, 7, false, false, "card");
    status_means(test, 7, true, true, "card");
}
