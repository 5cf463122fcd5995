//! The provider over real HTTP/1.1 on loopback.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::time::Duration;

use http::{Method, Request, Uri};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tower_service::Service as _;

use super::batch::{Call, Routed};
use super::service::Sim;
use super::truth::Truth;
use super::wire::Failure;
use crate::org::Dialect;

/// Connections that wait to be accepted; a client may open many at once.
const BACKLOG: u32 = 4096;

/// How long open calls may go on after the server was told to stop.
const GRACE: Duration = Duration::from_secs(1);

impl Sim {
    /// Serves the provider on a free port of 127.0.0.1, in tasks of the current tokio runtime. All that it knows is in memory: to test what a
    /// later process finds, serve from a process of its own.
    ///
    /// Only `POST` to `/v1/messages` (Anthropic), `/v1/chat/completions` and `/v1/embeddings` (OpenAI) is answered, and the calls that
    /// manage [batches](crate::sim#batches); other paths get a 404, other methods a 405.
    ///
    /// # Errors
    ///
    /// Where no socket can be had.
    pub async fn serve(&self) -> io::Result<Server> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let listener = socket.listen(BACKLOG)?;
        let addr = listener.local_addr()?;
        let (stop, stopped) = watch::channel(());
        tokio::spawn(accept(listener, self.clone(), stopped));
        Ok(Server { sim: self.clone(), addr, stop })
    }
}

/// A running server. Dropped, it takes no more connections; calls in flight get a second to end.
#[derive(Debug)]
pub struct Server {
    sim: Sim,
    addr: SocketAddr,
    stop: watch::Sender<()>,
}

impl Server {
    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://127.0.0.1:<port>`, as an org's base URL.
    pub fn base_url(&self) -> Uri {
        Uri::try_from(format!("http://{}", self.addr)).expect("an address is an authority")
    }

    /// What has happened up to now.
    pub fn truth(&self) -> Truth {
        self.sim.truth()
    }

    /// The provider that is served.
    pub fn sim(&self) -> &Sim {
        &self.sim
    }

    /// Stops, and waits until the last connection is closed: at most a second after.
    pub async fn shutdown(self) {
        self.stop.send_replace(());
        self.stop.closed().await;
    }
}

async fn accept(listener: TcpListener, sim: Sim, mut stopped: watch::Receiver<()>) {
    loop {
        tokio::select! {
            // Told to stop, or dropped.
            _ = stopped.changed() => return,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    tokio::spawn(connection(stream, sim.clone(), stopped.clone()));
                }
                // Out of file descriptors: others may close.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
        }
    }
}

async fn connection(stream: TcpStream, sim: Sim, mut stopped: watch::Receiver<()>) {
    // Without it small answers wait for acknowledgements; a failure only costs time.
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request: Request<Incoming>| {
        let (path, dialect) = (request.uri().path(), sim.config().dialect);
        let is_known = match dialect {
            Dialect::Anthropic => path == "/v1/messages",
            Dialect::OpenAi => path == "/v1/chat/completions" || path == "/v1/embeddings",
        };
        let failure = match Call::route(dialect, request.method(), request.uri()) {
            Routed::Batch(_) => None,
            Routed::Elsewhere if !is_known => Some(Failure::not_found()),
            Routed::Elsewhere if request.method() == Method::POST => None,
            Routed::Elsewhere | Routed::WrongMethod => Some(Failure::wrong_method()),
        };
        let answer = match failure {
            Some(failure) => Err(sim.misdirected(request.headers(), failure)),
            None => Ok(sim.service().call(request)),
        };
        async move {
            match answer {
                Ok(call) => call.await,
                Err(misdirected) => Ok(misdirected),
            }
        }
    });
    let mut connection = pin!(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    // An error is either the client's going away or a fault on purpose; the truth has counted both.
    tokio::select! {
        _ = connection.as_mut() => {}
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(GRACE, connection).await;
        }
    }
}
