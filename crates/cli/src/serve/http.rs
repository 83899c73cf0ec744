//! The metrics endpoint: just enough HTTP for scrapers.

use std::{
    fmt, fs, io,
    net::{IpAddr, TcpListener, ToSocketAddrs},
    os::fd::{BorrowedFd, OwnedFd},
    path::PathBuf,
    str::FromStr,
    time::{Duration, Instant},
};

use httparse::{EMPTY_HEADER, Request, Status};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::Uid,
    io::Errno,
    net::{RecvFlags, SendFlags, SocketFlags, accept_with, recv, send},
};

use super::socket::{self, Access, SocketFile};

/// How long a scraper may take from its connection until it has the whole response.
const TIME_OUT: Duration = Duration::from_secs(2);
/// The longest request that is read, in bytes, and the most headers that it may have.
const MAX_REQUEST: usize = 8 << 10;
const MAX_HEADERS: usize = 64;
/// How many scrapers are served at a time. One more replaces a scraper that has sent nothing, or
/// else the oldest, which will try again.
const MAX_SCRAPERS: usize = 16;

/// Where metrics are served: `HOST:PORT`, or `unix:PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Tcp(String),
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        match (text.strip_prefix("unix:"), text.rsplit_once(':')) {
            (Some(""), _) => Err("unix: must be followed by a path".into()),
            (Some(path), _) => Ok(Address::Unix(path.into())),
            (None, Some((host, port))) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Address::Tcp(text.into()))
            }
            _ => Err("expected HOST:PORT or unix:PATH".into()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => write!(f, "http://{address}/metrics"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Serves the metrics.
pub(crate) struct Endpoint {
    // Before the socket, as in `Listener`.
    file: Option<SocketFile>,
    listener: OwnedFd,
    /// Its address, with the port that the kernel has chosen if 0 was given.
    pub(super) address: Address,
    /// The host names that requests may have; `None` for any, on a Unix socket: no browser can
    /// reach it.
    names: Option<Vec<String>>,
    time_out: Duration,
}

impl Endpoint {
    /// Listens at `address`. Requests must name its IP address, its host, or one of `more_names`.
    ///
    /// # Errors
    /// The address is taken or invalid.
    pub(crate) fn open(
        address: &Address,
        more_names: &[String],
        owner: Option<Uid>,
    ) -> io::Result<Endpoint> {
        let (listener, address, file, names) = match address {
            Address::Tcp(address) => {
                let places: Vec<_> = address.to_socket_addrs()?.collect();
                let listener = TcpListener::bind(&*places)?;
                listener.set_nonblocking(true)?;
                let names = ["localhost", without_port(address)].map(str::to_owned);
                let names = names.into_iter().chain(node()).chain(more_names.iter().cloned());
                let address = Address::Tcp(listener.local_addr()?.to_string());
                (listener.into(), address, None, Some(names.collect()))
            }
            Address::Unix(path) => {
                let (listener, file) = socket::bind(path, Access { owner, ..Access::OWN })?;
                (listener.into(), address.clone(), Some(file), None)
            }
        };
        Ok(Endpoint { listener, address, file, names, time_out: TIME_OUT })
    }

    /// The folder of its socket, if it is a Unix socket.
    pub(crate) fn folder(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(SocketFile::folder)
    }

    /// Serves the text that `page` returns, until `stop` is hung up.
    pub(crate) fn serve(&self, stop: BorrowedFd<'_>, page: impl Fn() -> String) {
        let mut scrapers: Vec<Scraper> = Vec::new();
        loop {
            let own = [
                PollFd::new(&self.listener, PollFlags::IN),
                PollFd::from_borrowed_fd(stop, PollFlags::IN),
            ];
            let mut fds: Vec<PollFd<'_>> =
                own.into_iter().chain(scrapers.iter().map(Scraper::waits_for)).collect();
            let now = Instant::now();
            let first = scrapers.iter().map(|scraper| scraper.deadline).min();
            let left = first.map(|deadline| deadline.saturating_duration_since(now));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let _ = poll(&mut fds, left.as_ref());
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[1] {
                return;
            }
            let mut scrapers_ready = ready[2..].iter();
            let now = Instant::now();
            scrapers.retain_mut(|scraper| {
                let ready = scrapers_ready.next() == Some(&true);
                now < scraper.deadline && (!ready || scraper.advance(self.names.as_deref(), &page))
            });
            if !ready[0] {
                continue;
            }
            match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(stream) => {
                    if scrapers.len() == MAX_SCRAPERS {
                        let silent = |scraper: &Scraper| scraper.request.is_empty();
                        scrapers.remove(scrapers.iter().position(silent).unwrap_or(0));
                    }
                    scrapers.push(Scraper::new(stream, self.time_out));
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                // Out of descriptors, for example: slow down.
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }
}

/// A connection for one request.
struct Scraper {
    stream: OwnedFd,
    deadline: Instant,
    request: Vec<u8>,
    /// The rest of the response, once the request is complete.
    response: Option<Vec<u8>>,
}

impl Scraper {
    fn new(stream: OwnedFd, time_out: Duration) -> Scraper {
        let deadline = Instant::now() + time_out;
        Scraper { stream, deadline, request: Vec::new(), response: None }
    }

    fn waits_for(&self) -> PollFd<'_> {
        let events = if self.response.is_some() { PollFlags::OUT } else { PollFlags::IN };
        PollFd::new(&self.stream, events)
    }

    /// Reads or writes once, without blocking. False once the connection is done.
    fn advance(&mut self, names: Option<&[String]>, page: impl Fn() -> String) -> bool {
        match self.step(names, page) {
            Ok(done) => !done,
            Err(error) => matches!(error, Errno::AGAIN | Errno::INTR),
        }
    }

    /// True once the response is written, or the scraper has hung up.
    fn step(&mut self, names: Option<&[String]>, page: impl Fn() -> String) -> Result<bool, Errno> {
        if self.response.is_none() {
            let mut part = [0; 1024];
            match recv(&self.stream, &mut part, RecvFlags::empty())? {
                (_, 0) => return Ok(true),
                (_, n) => self.request.extend_from_slice(&part[..n]),
            }
            self.response = respond(&self.request, names, page).map(String::into_bytes);
        }
        let Some(rest) = &mut self.response else { return Ok(false) };
        let written = send(&self.stream, rest, SendFlags::NOSIGNAL)?;
        rest.drain(..written);
        Ok(rest.is_empty())
    }
}

/// The response to a request; `None` as long as the request is incomplete.
fn respond(request: &[u8], names: Option<&[String]>, page: impl Fn() -> String) -> Option<String> {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let mut parsed = Request::new(&mut headers);
    let too_large = || response("431 Request Header Fields Too Large", "");
    match parsed.parse(request) {
        Ok(Status::Partial) => return (request.len() >= MAX_REQUEST).then(too_large),
        Ok(Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => return Some(too_large()),
        Err(_) => return Some(response("400 Bad Request", "")),
    }
    let mut hosts = parsed.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("host"));
    if names.is_some_and(|names| hosts.any(|host| !is_ours(host.value, names))) {
        let why = "use the IP address, localhost, or a name that is given to --metrics-host\n";
        return Some(response("421 Misdirected Request", why));
    }
    let path = parsed.path.unwrap_or_default();
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    Some(match (parsed.method, path) {
        (Some("GET"), "/metrics") => response("200 OK", &page()),
        (Some("GET"), _) => response("404 Not Found", "the metrics are at /metrics\n"),
        _ => response("405 Method Not Allowed", ""),
    })
}

/// Whether `host`, of a request, is an IP address or one of `names`. This keeps web pages out (DNS
/// rebinding): a page can have its own host name resolve to this endpoint, but its requests carry
/// that name.
fn is_ours(host: &[u8], names: &[String]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else { return false };
    let host = without_port(host);
    let literal = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    literal.parse::<IpAddr>().is_ok() || names.iter().any(|name| host.eq_ignore_ascii_case(name))
}

/// This machine's name, as `uname -n` prints it; `None` if procfs does not have it.
fn node() -> Option<String> {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim_end().to_owned())
}

/// The host of `HOST:PORT`, or of a lone host.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => host,
    }
}

fn response(status: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpStream,
        os::{fd::AsFd, unix::net::UnixStream},
    };

    use super::*;

    #[test]
    fn addresses_are_of_two_kinds() {
        assert_eq!("unix:/run/x".parse(), Ok(Address::Unix("/run/x".into())));
        assert_eq!("127.0.0.1:9100".parse(), Ok(Address::Tcp("127.0.0.1:9100".into())));
        assert_eq!("[::1]:0".parse(), Ok(Address::Tcp("[::1]:0".into())));
        for wrong in ["", "unix:", "9100", ":9100", "host:", "host:x", "host:65536"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_the_metrics_are_served() {
        let page = || "x 1\n".to_owned();
        let got = |request: &str| respond(request.as_bytes(), None, page).unwrap();
        assert!(got("GET /metrics HTTP/1.1\r\n\r\n").ends_with("\r\n\r\nx 1\n"));
        assert!(got("GET /metrics?a=b HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
        assert!(got("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(got("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(got("\u{1}\r\n\r\n").starts_with("HTTP/1.1 400 "));
        let many = "a: b\r\n".repeat(MAX_HEADERS + 1);
        let many = format!("GET /metrics HTTP/1.1\r\n{many}\r\n");
        assert!(got(&many).starts_with("HTTP/1.1 431 "));
        assert_eq!(respond(b"GET /metrics HTTP/1.1\r\nHost: x\r\n", None, page), None);
        assert!(got(&format!("GET /{}", "a".repeat(MAX_REQUEST))).starts_with("HTTP/1.1 431 "));
    }

    #[test]
    fn a_request_names_the_host_that_it_means() {
        let served = |host: &str| {
            let request = format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n");
            let endpoint =
                Endpoint::open(&"127.0.0.1:0".parse().unwrap(), &["vm.example".into()], None);
            let names = endpoint.unwrap().names;
            respond(request.as_bytes(), names.as_deref(), String::new).unwrap().contains(" 200 OK")
        };
        let node = node().unwrap();
        for own in
            ["127.0.0.1", "10.0.0.1:9100", "[::1]:80", "localhost:9100", "VM.example:1", &node]
        {
            assert!(served(own), "{own}");
        }
        for other in
            ["evil.example", "evil.example:9100", "localhost.evil.example", "::x", "", "\u{e4}"]
        {
            assert!(!served(other), "{other}");
        }
        let two = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nhost: evil\r\n\r\n";
        assert!(respond(two, Some(&["localhost".into()]), String::new).unwrap().contains(" 421 "));
        // A browser always sends a host.
        let none = b"GET /metrics HTTP/1.0\r\n\r\n";
        assert!(respond(none, Some(&[]), String::new).unwrap().contains(" 200 "));
    }

    #[test]
    fn silent_or_excessive_clients_delay_no_other() {
        let address: Address = "127.0.0.1:0".parse().unwrap();
        // The time-out must not be what ends these connections.
        let time_out = Duration::from_secs(3600);
        let endpoint = Endpoint { time_out, ..Endpoint::open(&address, &[], None).unwrap() };
        let Address::Tcp(at) = &endpoint.address else { unreachable!() };
        let (stop, held) = UnixStream::pair().unwrap();
        // More than the sockets' buffers hold.
        let figures = "x 1\n".repeat(1 << 20);
        std::thread::scope(|scope| {
            scope.spawn(|| endpoint.serve(stop.as_fd(), || figures.clone()));
            let silent = [(); 3 * MAX_SCRAPERS].map(|()| TcpStream::connect(at).unwrap());
            let mut long = TcpStream::connect(at).unwrap();
            let _ = long.write_all(&[b'a'; MAX_REQUEST + 2]);
            let mut unread = TcpStream::connect(at).unwrap();
            unread.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
            let mut good = TcpStream::connect(at).unwrap();
            good.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
            good.write_all(b"\r\n").unwrap();
            let mut text = String::new();
            good.read_to_string(&mut text).unwrap();
            assert!(text.ends_with(&figures), "{} bytes", text.len());
            drop((silent, unread, held));
        });
    }

    #[test]
    fn a_silent_scraper_is_disconnected_after_the_time_out() {
        let time_out = Duration::from_millis(10);
        let endpoint = Endpoint {
            time_out,
            ..Endpoint::open(&"127.0.0.1:0".parse().unwrap(), &[], None).unwrap()
        };
        let Address::Tcp(at) = &endpoint.address else { unreachable!() };
        let (stop, held) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| endpoint.serve(stop.as_fd(), String::new));
            let mut silent = TcpStream::connect(at).unwrap();
            assert_eq!(silent.read(&mut [0]).unwrap(), 0);
            drop(held);
        });
    }
}
