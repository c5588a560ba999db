//! What a server's shutdown promises: every call whose method ran has its answer, although the server's endpoint goes
//! right afterwards.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, mpsc};

use crate::calls::{ECHO, LIMIT};
use crate::common::{patient_config, pipe};
use crate::queue_pairs::pair;
use ferrogin_channel::{Config, Reactor};
use ferrogin_test_support::wait::receive;
use ferrogin_test_support::{child, dist, libraries, repetitions};
use host_rpc::{Client, RpcError, Server, ServerHandle, Settings, Status, Transport};

const CALLS: usize = 30;

/// Connects a client to a server, and returns what keeps the server's endpoint open.
type Connect<'c> = &'c dyn Fn(&ServerHandle) -> (Client, Box<dyn std::any::Any>);

fn shutdown_answers_what_ran(name: &str, connect: Connect<'_>, rounds: u64) {
    for round in 0..rounds {
        let ran: Arc<Mutex<HashSet<usize>>> = Arc::default();
        let of_method = Arc::clone(&ran);
        let (started, has_started) = mpsc::channel();
        let running = Server::new(Settings { workers: round as usize % 3, credits: 10, ..Settings::default() })
            .method(ECHO, move |_, body| {
                of_method.lock().unwrap().insert(body.len());
                let _ = started.send(());
                Ok(body.into_vec().into())
            })
            .start();
        let (client, endpoint) = connect(&running);
        // The lengths tell the calls apart; some bodies have messages of their own.
        let len = |number: usize| if number % 7 == 3 { 20_000 + number } else { number };
        let calls: Vec<_> = (0..CALLS).map(|number| client.call(ECHO, vec![7; len(number)], LIMIT)).collect();
        (0..round as usize % CALLS + 1).for_each(|_| receive("a method", &has_started));
        assert!(running.shutdown(LIMIT), "{name}, round {round}");
        drop(endpoint);
        for (number, call) in calls.into_iter().enumerate() {
            let ran = ran.lock().unwrap().contains(&len(number));
            match call.wait() {
                Ok(body) => assert_eq!(body.len(), len(number)),
                Err(RpcError::Disconnected { .. } | RpcError::Status { status: Status::ShuttingDown, .. }) if !ran => {}
                Err(error) => {
                    panic!("{name}, round {round}: call {number} ran: {ran}, and its answer is lost: {error}")
                }
            }
        }
    }
}

fn rounds(usual: u64) -> u64 {
    repetitions("FERROGIN_RPC_CLOSES", usual, 1000)
}

fn over_channels(config: &Config) -> impl Fn(&ServerHandle) -> (Client, Box<dyn std::any::Any>) {
    move |running| {
        let (there, here) = (Reactor::open(config).unwrap(), Box::new(Reactor::open(config).unwrap()));
        let address = running.listen(there.listen().unwrap());
        let client = Client::new(here.connect(&address).wait().unwrap(), Settings::default());
        // The client's reactor lives as long as the process.
        Box::leak(here);
        (client, Box::new(there))
    }
}

fn attached(
    running: &ServerHandle,
    (here, there): (impl Transport, impl Transport),
) -> (Client, Box<dyn std::any::Any>) {
    running.attach(there);
    (Client::new(here, Settings::default()), Box::new(()))
}

#[test]
fn shutdown_loses_no_answer() {
    shutdown_answers_what_ran("pipe", &|running| attached(running, pipe()), rounds(30));
    shutdown_answers_what_ran("tcp", &over_channels(&patient_config()), rounds(30));
    let mlx5 = |running: &ServerHandle| attached(running, pair(50, &host_rpc::mlx5::Config::default()));
    shutdown_answers_what_ran("mlx5", &mlx5, rounds(30));
}

/// The card drops what an endpoint has posted and the peer hasn't taken when the endpoint closes, as libfabric's `efa`
/// does.
#[test]
fn shutdown_loses_no_answer_on_a_card_that_drops_the_rest() {
    let test = "shutdown_loses_no_answer_on_a_card_that_drops_the_rest";
    let Some(dist) = dist(test, &["libsoftefa-fi.so"]) else { return };
    let environment =
        [("FI_PROVIDER_PATH", dist.to_str().unwrap()), ("SOFTEFA_FAULTS", "close_drops,delay_us=50..100,reorder=64")];
    child::run(test, &environment, || {
        for lib in libraries(test) {
            let config =
                Config { provider: "softefa".to_owned(), source: None, libfabric: Some(lib), ..patient_config() };
            shutdown_answers_what_ran("softefa", &over_channels(&config), rounds(20));
        }
    });
}
