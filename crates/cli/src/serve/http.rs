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

use super::socket::{self, Access, Placed};

/// How long a scraper may take from its connection until it has the whole response.
const TIME_OUT: Duration = Duration::from_secs(2);
/// The longest request that is read, in bytes, and the most headers that it may have.
const LONGEST: usize = 8 << 10;
const HEADERS: usize = 64;
/// How many scrapers are served at a time. A further one replaces a silent one, or else the first,
/// which will ask again.
const SCRAPERS: usize = 16;

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
    listener: OwnedFd,
    /// Its address; the kernel has chosen the port if it was given as 0.
    pub(super) address: Address,
    placed: Option<Placed>,
    /// The host names that requests may use; `None`: any, where a browser cannot reach the
    /// endpoint.
    names: Option<Vec<String>>,
    time_out: Duration,
}

impl Endpoint {
    /// Listens at `address`, and serves requests for one of its names or of `more`.
    ///
    /// # Errors
    /// The address is taken or invalid.
    pub(crate) fn open(
        address: &Address,
        more: &[String],
        owner: Option<Uid>,
    ) -> io::Result<Endpoint> {
        let (listener, address, placed, names) = match address {
            Address::Tcp(address) => {
                let places: Vec<_> = address.to_socket_addrs()?.collect();
                let listener = TcpListener::bind(&*places)?;
                listener.set_nonblocking(true)?;
                let names = ["localhost", without_port(address)].map(str::to_owned);
                let names = names.into_iter().chain(node()).chain(more.iter().cloned());
                let address = Address::Tcp(listener.local_addr()?.to_string());
                (listener.into(), address, None, Some(names.collect()))
            }
            Address::Unix(path) => {
                let (listener, placed) = socket::bind(path, Access { owner, ..Access::OWN })?;
                (listener.into(), address.clone(), Some(placed), None)
            }
        };
        Ok(Endpoint { listener, address, placed, names, time_out: TIME_OUT })
    }

    /// The folder of its socket, if that is in the file system.
    pub(crate) fn folder(&self) -> Option<BorrowedFd<'_>> {
        self.placed.as_ref().map(Placed::folder)
    }

    /// Serves what `page` returns until `stop` is hung up.
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
            let first = scrapers.iter().map(|scraper| scraper.until).min();
            let left = first.map(|until| until.saturating_duration_since(now));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let _ = poll(&mut fds, left.as_ref());
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[1] {
                return;
            }
            let mut theirs = ready[2..].iter();
            let now = Instant::now();
            scrapers.retain_mut(|scraper| {
                let ready = theirs.next() == Some(&true);
                now < scraper.until && (!ready || scraper.goes_on(self.names.as_deref(), &page))
            });
            if !ready[0] {
                continue;
            }
            match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(stream) => {
                    if scrapers.len() == SCRAPERS {
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
    until: Instant,
    request: Vec<u8>,
    /// The rest of the response to be written, once there is one.
    response: Option<Vec<u8>>,
}

impl Scraper {
    fn new(stream: OwnedFd, time_out: Duration) -> Scraper {
        let until = Instant::now() + time_out;
        Scraper { stream, until, request: Vec::new(), response: None }
    }

    fn waits_for(&self) -> PollFd<'_> {
        let what = if self.response.is_some() { PollFlags::OUT } else { PollFlags::IN };
        PollFd::new(&self.stream, what)
    }

    /// Reads or writes what is possible without blocking. False once it is over.
    fn goes_on(&mut self, names: Option<&[String]>, page: impl Fn() -> String) -> bool {
        match self.step(names, page) {
            Ok(over) => !over,
            Err(error) => matches!(error, Errno::AGAIN | Errno::INTR),
        }
    }

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

/// The response to a request, once the request is complete.
fn respond(request: &[u8], names: Option<&[String]>, page: impl Fn() -> String) -> Option<String> {
    let mut headers = [EMPTY_HEADER; HEADERS];
    let mut parsed = Request::new(&mut headers);
    let too_large = || response("431 Request Header Fields Too Large", "");
    match parsed.parse(request) {
        Ok(Status::Partial) => return (request.len() >= LONGEST).then(too_large),
        Ok(Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => return Some(too_large()),
        Err(_) => return Some(response("400 Bad Request", "")),
    }
    let mut hosts = parsed.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("host"));
    if names.is_some_and(|names| hosts.any(|host| !is_meant(host.value, names))) {
        let why = "use the address, localhost, or a name that is given to --metrics-host\n";
        return Some(response("421 Misdirected Request", why));
    }
    let path = parsed.path.unwrap_or_default();
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    Some(match (parsed.method, path) {
        (Some("GET"), "/metrics") => response("200 OK", &page()),
        (Some("GET"), _) => response("404 Not Found", "the figures are at /metrics\n"),
        _ => response("405 Method Not Allowed", ""),
    })
}

/// Whether a request for that host is meant for the endpoint of these names. A web page can send
/// requests to whatever its own name is made to resolve to (DNS rebinding), but not to our address,
/// nor to our names.
fn is_meant(host: &[u8], names: &[String]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else { return false };
    let host = without_port(host);
    let literal = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    literal.parse::<IpAddr>().is_ok() || names.iter().any(|name| host.eq_ignore_ascii_case(name))
}

/// This machine's own name, as `uname -n` prints it; `None` where the kernel has no file with it.
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
    fn only_the_figures_are_served() {
        let page = || "x 1\n".to_owned();
        let got = |request: &str| respond(request.as_bytes(), None, page).unwrap();
        assert!(got("GET /metrics HTTP/1.1\r\n\r\n").ends_with("\r\n\r\nx 1\n"));
        assert!(got("GET /metrics?a=b HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
        assert!(got("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(got("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(got("\u{1}\r\n\r\n").starts_with("HTTP/1.1 400 "));
        let many = "a: b\r\n".repeat(HEADERS + 1);
        let many = format!("GET /metrics HTTP/1.1\r\n{many}\r\n");
        assert!(got(&many).starts_with("HTTP/1.1 431 "));
        assert_eq!(respond(b"GET /metrics HTTP/1.1\r\nHost: x\r\n", None, page), None);
        assert!(got(&format!("GET /{}", "a".repeat(LONGEST))).starts_with("HTTP/1.1 431 "));
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
        // The time-out is not what ends it.
        let time_out = Duration::from_secs(3600);
        let endpoint = Endpoint { time_out, ..Endpoint::open(&address, &[], None).unwrap() };
        let Address::Tcp(at) = &endpoint.address else { unreachable!() };
        let (stop, held) = UnixStream::pair().unwrap();
        // More than the sockets' buffers hold.
        let figures = "x 1\n".repeat(1 << 20);
        std::thread::scope(|scope| {
            scope.spawn(|| endpoint.serve(stop.as_fd(), || figures.clone()));
            let silent = [(); 3 * SCRAPERS].map(|()| TcpStream::connect(at).unwrap());
            let mut long = TcpStream::connect(at).unwrap();
            let _ = long.write_all(&[b'a'; LONGEST + 2]);
            let mut deaf = TcpStream::connect(at).unwrap();
            deaf.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
            let mut good = TcpStream::connect(at).unwrap();
            good.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
            good.write_all(b"\r\n").unwrap();
            let mut text = String::new();
            good.read_to_string(&mut text).unwrap();
            assert!(text.ends_with(&figures), "{} bytes", text.len());
            drop((silent, deaf, held));
        });
    }

    #[test]
    fn a_scraper_has_so_long_and_no_longer() {
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
