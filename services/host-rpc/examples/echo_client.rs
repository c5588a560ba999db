//! Calls an echo_server: echo_client ADDRESS TEXT [PROVIDER]. Prints the answer.

use ferrogin_channel::{Config, Reactor};
use host_rpc::{Client, Settings};
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, address, text, more @ ..] = &arguments[..] else { return Err("ADDRESS TEXT [PROVIDER]".into()) };
    let address = address.parse()?;
    let provider = more.first().cloned().unwrap_or("tcp".to_owned());
    let reactor = Reactor::open(&Config { provider, ..Config::default() })?;
    let client = Client::new(reactor.connect(&address).wait()?, Settings::default());
    let answer = client.call("echo", text.as_bytes(), Duration::from_secs(60)).wait()?;
    println!("{}", String::from_utf8_lossy(&answer.bytes()));
    Ok(())
}
