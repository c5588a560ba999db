//! Echo over each transport, alternating in one run: cargo bench -p host-rpc --bench transports [TRANSPORT...]
//!
//! Transports: `mlx5`, queue pairs of the software card; `channel/PROVIDER`, the message channel over a libfabric
//! provider. The default is mlx5, channel/tcp and channel/softefa. The server is a separate process. Every answer is
//! compared with its request. Prints calls per second and median latency, for 64 bytes with 1 and with 32 calls at a
//! time and for 1 MiB with 1 and with 4, each as the median over the rounds. Loads FERROGIN_LIBFABRIC and finds softefa
//! in FERROGIN_DIST. FERROGIN_ROUNDS sets the number of rounds.
#![allow(unsafe_code)]

use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use ferrogin_channel::{Address, Config, Reactor};
use ferrogin_libfabric::Libfabric;
use host_rpc::mlx5::{Connection, Connector};
use host_rpc::{Client, Server, ServerHandle, Settings};
use soft_mlx5::Card;

const LIMIT: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;
/// The loads: bytes, calls at a time, calls per round.
const LOADS: [(usize, usize, usize); 4] = [(64, 1, 4000), (64, 32, 20_000), (MIB, 1, 150), (MIB, 4, 300)];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    if let Some(dist) = dist() {
        let lib = Libfabric::load(None).unwrap();
        // SAFETY: no other thread runs yet.
        unsafe { lib.use_provider_dir(&dist) }.unwrap();
    }
    match &arguments[..] {
        [role, transport] if role == "server" => serve(transport),
        [] => compare(&["mlx5", "channel/tcp", "channel/softefa"].map(String::from)),
        transports => compare(transports),
    }
}

fn dist() -> Option<PathBuf> {
    std::env::var_os("FERROGIN_DIST").map(PathBuf::from).filter(|dist| dist.join("libsoftefa-fi.so").exists())
}

/// Calls per second and the median latency in microseconds.
type Figures = (f64, f64);

fn compare(transports: &[String]) {
    let rounds = std::env::var("FERROGIN_ROUNDS").map_or(5, |n| n.parse().expect("FERROGIN_ROUNDS is a number"));
    let benches: Vec<(&String, Bench)> =
        transports.iter().filter_map(|transport| Some((transport, Bench::start(transport)?))).collect();
    for (bytes, at_a_time, calls) in LOADS {
        let mut seen = vec![Vec::new(); benches.len()];
        for _ in 0..rounds {
            for ((_, bench), seen) in benches.iter().zip(&mut seen) {
                seen.push(bench.round(bytes, at_a_time, calls));
            }
        }
        for ((transport, _), seen) in benches.iter().zip(seen) {
            let (rate, latency) = (median(&seen, |figures| figures.0), median(&seen, |figures| figures.1));
            let both_ways = 2.0 * rate * bytes as f64 / 1e9;
            println!(
                "{bytes:>8} bytes, {at_a_time:>2} at a time  {transport:16} {rate:>9.0} calls/s  \
                 median {latency:>8.1} us  {both_ways:.3} GB/s both ways"
            );
        }
    }
}

fn median<T>(of: &[T], pick: impl Fn(&T) -> f64) -> f64 {
    let mut values: Vec<f64> = of.iter().map(pick).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn reactor(provider: &str) -> Reactor {
    let source = provider.contains("tcp").then(|| "127.0.0.1".to_owned());
    let config = Config { provider: provider.to_owned(), source, ..Config::default() };
    Reactor::open(&config).unwrap()
}

fn connection(stream: TcpStream) -> Connection {
    let card: Arc<dyn mlx5::device::Device> = Arc::new(Card::open(soft_mlx5::Settings::default()).unwrap());
    let peer = stream.peer_addr().unwrap().to_string();
    Connector::new(&card, &host_rpc::mlx5::Config::default()).unwrap().connect_over(stream, &peer).unwrap()
}

fn server() -> ServerHandle {
    let settings = Settings { workers: 0, ..Settings::default() };
    Server::new(settings).method(1, |_, body| Ok(body.into_vec().into())).start()
}

/// The server process: prints its address and runs until it is killed.
fn serve(transport: &str) {
    let running = server();
    let _reactor;
    match transport.strip_prefix("channel/") {
        Some(provider) => {
            let reactor = reactor(provider);
            let address = running.listen(reactor.listen().unwrap());
            _reactor = reactor;
            println!("{}", address.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        }
        None => {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            println!("{}", listener.local_addr().unwrap());
            running.attach(connection(listener.accept().unwrap().0));
        }
    }
    loop {
        std::thread::park();
    }
}

struct Bench {
    client: Client,
    _reactor: Option<Reactor>,
    _server: Process,
}

impl Bench {
    /// Starts a server and connects; prints a SKIP line and returns `None` if the transport is not available.
    fn start(transport: &str) -> Option<Self> {
        if transport == "channel/softefa" && dist().is_none() {
            println!("SKIP {transport}: FERROGIN_DIST names no directory with libsoftefa-fi.so");
            return None;
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        let mut server = Process(command.args(["server", transport]).stdout(Stdio::piped()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (text, settings) = (line.trim(), Settings::default());
        let Some(provider) = transport.strip_prefix("channel/") else {
            assert_eq!(transport, "mlx5", "a transport is mlx5 or channel/PROVIDER");
            let client = Client::new(connection(TcpStream::connect(text).unwrap()), settings);
            return Some(Self { client, _reactor: None, _server: server });
        };
        let bytes = (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16));
        let address = Address::parse(&bytes.collect::<Result<Vec<u8>, _>>().unwrap()).unwrap();
        let reactor = reactor(provider);
        let client = Client::new(reactor.connect(&address).wait().unwrap(), settings);
        Some(Self { client, _reactor: Some(reactor), _server: server })
    }

    fn round(&self, bytes: usize, at_a_time: usize, calls: usize) -> Figures {
        let (done, finished) = mpsc::channel();
        let request = Arc::new((0..bytes).map(|at| (at * 31 + at_a_time) as u8).collect::<Vec<u8>>());
        let round = Round { left: calls, latencies: Vec::with_capacity(calls), calls, request, done };
        let round = Arc::new(Mutex::new(round));
        let start = Instant::now();
        for _ in 0..at_a_time {
            start_call(&self.client, &round);
        }
        finished.recv().unwrap();
        let took = start.elapsed().as_secs_f64();
        let latencies = std::mem::take(&mut round.lock().unwrap().latencies);
        (calls as f64 / took, median(&latencies, |latency| *latency))
    }
}

/// The calls of one round.
struct Round {
    left: usize,
    calls: usize,
    latencies: Vec<f64>,
    request: Arc<Vec<u8>>,
    done: mpsc::Sender<()>,
}

/// Makes one call, and the next one when the answer arrives.
fn start_call(client: &Client, round: &Arc<Mutex<Round>>) {
    let request = {
        let mut round = round.lock().unwrap();
        if round.left == 0 {
            return;
        }
        round.left -= 1;
        Arc::clone(&round.request)
    };
    let (next, round, expected, start) = (client.clone(), Arc::clone(round), Arc::clone(&request), Instant::now());
    client.call_with(1, request, LIMIT, move |answer| {
        assert!(*answer.unwrap().bytes() == **expected, "an answer differs from its request");
        {
            let mut round = round.lock().unwrap();
            round.latencies.push(start.elapsed().as_secs_f64() * 1e6);
            if round.latencies.len() == round.calls {
                round.done.send(()).unwrap();
            }
        }
        start_call(&next, &round);
    });
}
