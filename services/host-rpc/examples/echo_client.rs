//! Calls an echo_server: echo_client ADDRESS TEXT [PROVIDER]. Prints the answer.

use ferrogin_channel::{Address, Config, Reactor};
use host_rpc::{Client, Settings};
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, hex, text, more @ ..] = &arguments[..] else { return Err("ADDRESS TEXT [PROVIDER]".into()) };
    let bytes = (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16));
    let address = Address::parse(&bytes.collect::<Result<Vec<u8>, _>>()?)?;
    let provider = more.first().cloned().unwrap_or("tcp".to_owned());
    let reactor = Reactor::open(&Config { provider, ..Config::default() })?;
    let client = Client::new(reactor.connect(&address).wait()?, Settings::default());
    let answer = client.call(1, text.as_bytes(), Duration::from_secs(60)).wait()?;
    println!("{}", String::from_utf8_lossy(&answer.bytes()));
    Ok(())
}
