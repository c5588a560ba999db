//! The call of host_rpc.rs with tonic: a server and a client of echo.proto, which build.rs compiles.

use std::time::Duration;
use tonic::transport::{Server, server::TcpIncoming};
use tonic::{Request, Response, Status};

tonic::include_proto!("echo");

struct Service;

#[tonic::async_trait]
impl echo_server::Echo for Service {
    async fn echo(&self, request: Request<Message>) -> Result<Response<Message>, Status> {
        Ok(Response::new(request.into_inner()))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}", listener.local_addr()?);
    let server = Server::builder().add_service(echo_server::EchoServer::new(Service));
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));

    let mut client = echo_client::EchoClient::connect(address).await?;
    let mut request = Request::new(Message { body: b"hello".to_vec() });
    request.set_timeout(Duration::from_secs(1));
    let answer = client.echo(request).await?;
    assert_eq!(answer.into_inner().body, b"hello");
    Ok(())
}
