//! The metrics endpoint: as much HTTP as it takes to be scraped.

use std::{
    fmt,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream, ToSocketAddrs},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    str::FromStr,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, poll};

use super::socket;

/// How long a request and its answer may take together: there is one at a time.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest request that is read.
const LONGEST: usize = 8 << 10;

/// Where figures are served: `HOST:PORT`, or `unix:PATH`.
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

/// Answers requests for the figures.
pub(crate) enum Endpoint {
    Tcp(TcpListener),
    Unix(UnixListener, socket::Placed),
}

impl Endpoint {
    /// Listens at `address`.
    ///
    /// # Errors
    /// It is taken, or makes no sense.
    pub(crate) fn open(address: &Address) -> io::Result<Endpoint> {
        match address {
            Address::Tcp(address) => {
                let places: Vec<_> = address.to_socket_addrs()?.collect();
                let listener = TcpListener::bind(&*places)?;
                listener.set_nonblocking(true)?;
                Ok(Endpoint::Tcp(listener))
            }
            Address::Unix(path) => {
                let (listener, placed) = socket::bind(path, 0o600)?;
                Ok(Endpoint::Unix(listener, placed))
            }
        }
    }

    /// Where it listens: with port 0 the kernel chose.
    pub(crate) fn address(&self) -> Address {
        match self {
            Endpoint::Tcp(listener) => Address::Tcp(
                listener.local_addr().map_or_else(|_| String::new(), |at| at.to_string()),
            ),
            Endpoint::Unix(_, placed) => Address::Unix(placed.path().to_owned()),
        }
    }

    /// Answers with what `page` says, one request at a time, until `stop` is hung up.
    pub(crate) fn serve(&self, stop: BorrowedFd<'_>, page: impl Fn() -> String) {
        loop {
            let listener = match self {
                Endpoint::Tcp(listener) => listener.as_fd(),
                Endpoint::Unix(listener, _) => listener.as_fd(),
            };
            let mut fds = [
                PollFd::from_borrowed_fd(listener, PollFlags::IN),
                PollFd::from_borrowed_fd(stop, PollFlags::IN),
            ];
            let _ = poll(&mut fds, None);
            if !fds[1].revents().is_empty() {
                return;
            }
            let stream = match self {
                Endpoint::Tcp(listener) => listener.accept().map(|(s, _)| Stream::Tcp(s)),
                Endpoint::Unix(listener, _) => listener.accept().map(|(s, _)| Stream::Unix(s)),
            };
            // Who hung up, or is too slow, asks again later.
            match stream {
                Ok(stream) => drop(stream.answer(&page)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // No descriptor is left, say: not at full speed.
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn set_patience(&self, left: Duration) -> io::Result<()> {
        // None would mean for ever, and 0 is not allowed.
        let left = Some(left.max(Duration::from_millis(1)));
        match self {
            Stream::Tcp(s) => s.set_read_timeout(left).and_then(|()| s.set_write_timeout(left)),
            Stream::Unix(s) => s.set_read_timeout(left).and_then(|()| s.set_write_timeout(left)),
        }
    }

    fn answer(mut self, page: impl Fn() -> String) -> io::Result<()> {
        match &self {
            Stream::Tcp(stream) => stream.set_nonblocking(false)?,
            Stream::Unix(stream) => stream.set_nonblocking(false)?,
        }
        let deadline = Instant::now() + PATIENCE;
        let left =
            || deadline.checked_duration_since(Instant::now()).ok_or(io::ErrorKind::TimedOut);
        let mut request = Vec::new();
        while !request.windows(4).any(|four| four == b"\r\n\r\n") {
            let mut part = [0; 1024];
            self.set_patience(left()?)?;
            match self.read(&mut part)? {
                0 => return Ok(()),
                n => request.extend_from_slice(&part[..n]),
            }
            if request.len() > LONGEST {
                return self
                    .write_all(response("431 Request Header Fields Too Large", "").as_bytes());
            }
        }
        self.set_patience(left()?)?;
        self.write_all(respond(&request, page).as_bytes())
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(into),
            Stream::Unix(stream) => stream.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn respond(request: &[u8], page: impl Fn() -> String) -> String {
    let line = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&byte| byte == b' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split(|&byte| byte == b'?').next().unwrap_or_default();
    match (method, path) {
        (b"GET", b"/metrics") => response("200 OK", &page()),
        (b"GET", _) => response("404 Not Found", "the figures are at /metrics\n"),
        _ => response("405 Method Not Allowed", ""),
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
    fn only_the_figures_are_there_to_be_had() {
        let page = || "x 1\n".to_owned();
        let got = |request: &str| respond(request.as_bytes(), page);
        assert!(got("GET /metrics HTTP/1.1\r\n\r\n").ends_with("\r\n\r\nx 1\n"));
        assert!(got("GET /metrics?a=b HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
        assert!(got("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(got("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(got("\r\n\r\n").starts_with("HTTP/1.1 405 "));
    }

    #[test]
    fn who_sends_nothing_or_too_much_holds_up_nobody_for_long() {
        let address: Address = "127.0.0.1:0".parse().unwrap();
        let endpoint = Endpoint::open(&address).unwrap();
        let Address::Tcp(at) = endpoint.address() else { unreachable!() };
        let (stop, held) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| endpoint.serve(stop.as_fd(), || "x 1\n".to_owned()));
            let silent = TcpStream::connect(&at).unwrap();
            let mut long = TcpStream::connect(&at).unwrap();
            let _ = long.write_all(&[b'a'; LONGEST + 2]);
            let mut good = TcpStream::connect(&at).unwrap();
            good.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
            let mut text = String::new();
            good.read_to_string(&mut text).unwrap();
            assert!(text.ends_with("x 1\n"), "{text}");
            drop((silent, held));
        });
    }
}
