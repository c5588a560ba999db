//! A server and a client, with one call. tonic.rs does the same with tonic.

use ferrogin_channel::{Config, Reactor};
use host_rpc::{Client, Server, Settings};
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let there = Reactor::open(&Config::default())?;
    let server = Server::new(Settings::default())
        .method_async("echo", |_, body| async move { Ok(body.into_vec().into()) })
        .start();
    let address = server.listen(there.listen()?);

    let here = Reactor::open(&Config::default())?;
    let client = Client::new(here.connect(&address).wait()?, Settings::default());
    let answer = client.call("echo", "hello", Duration::from_secs(1)).wait()?;
    assert_eq!(answer.into_vec(), b"hello");
    server.shutdown(Duration::from_secs(5));
    Ok(())
}
