//! The little of HTTP that a scrape needs. `tiny_http`, which is as small as such crates get, has no time limits: whoever opens
//! connections and says nothing would take a thread of it with each, for ever.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::failure;

/// What a request may have in front of its empty line.
const MOST: usize = 16 << 10;
/// How long somebody may take to ask, and then to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections at once.
const CONNECTIONS: usize = 16;
/// What the answer is, in the words of the format's own specification.
const FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Answers whoever asks for `/metrics` by `text`, until the process ends.
pub fn serve<T>(listener: &TcpListener, text: T) -> !
where
    T: FnMut() -> String + Send + 'static,
{
    let text = Arc::new(Mutex::new(text));
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if is_the_callers(&error) => continue,
            Err(error) => {
                // Mostly no descriptor is left; there may be one again.
                failure::complain(&format!("export: no connection: {error}"));
                std::thread::sleep(Duration::from_secs(1));
                continue;
            }
        };
        if open.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS {
            open.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (text, counted) = (Arc::clone(&text), Arc::clone(&open));
        let started = std::thread::Builder::new().spawn(move || {
            // Who asked has gone, or is too slow: nobody is left to tell.
            let _ = answer(&stream, || {
                let mut text = text.lock().unwrap_or_else(PoisonError::into_inner);
                text()
            });
            counted.fetch_sub(1, Ordering::Relaxed);
        });
        if started.is_err() {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Whether a connection ended before it was taken, or a signal came.
fn is_the_callers(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    )
}

fn answer(mut stream: &TcpStream, text: impl FnOnce() -> String) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let request = request(stream)?;
    let (status, kind, body) = match asked(&request) {
        Asked::Metrics => ("200 OK", FORMAT, text()),
        Asked::Start => ("200 OK", PLAIN, "gpupool export: see /metrics\n".to_owned()),
        Asked::Elsewhere => ("404 Not Found", PLAIN, "there is only /metrics\n".to_owned()),
        Asked::Otherwise => ("405 Method Not Allowed\r\nAllow: GET, HEAD", PLAIN, "only GET and HEAD\n".to_owned()),
        Asked::Nothing => ("400 Bad Request", PLAIN, "this is no request\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    if !request.starts_with(b"HEAD ") {
        stream.write_all(body.as_bytes())?;
    }
    stream.flush()
}

const PLAIN: &str = "text/plain; charset=utf-8";

/// What a request begins with, up to its empty line.
fn request(mut stream: &TcpStream) -> io::Result<Vec<u8>> {
    let until = Instant::now() + PATIENCE;
    let mut request = Vec::new();
    let mut some = [0; 4096];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < MOST {
        // One byte now and then must not keep it open.
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut some)? {
            0 => break,
            read => request.extend_from_slice(&some[..read]),
        }
    }
    Ok(request)
}

#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Metrics,
    Start,
    Elsewhere,
    Otherwise,
    Nothing,
}

/// What the first line asks for.
fn asked(request: &[u8]) -> Asked {
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let [method, target, version] = words[..] else { return Asked::Nothing };
    let path = target.split(|byte| *byte == b'?').next().unwrap_or_default();
    match (method, path) {
        _ if !version.starts_with(b"HTTP/1.") || !request.windows(4).any(|end| end == b"\r\n\r\n") => Asked::Nothing,
        (b"GET" | b"HEAD", b"/metrics") => Asked::Metrics,
        (b"GET" | b"HEAD", b"/") => Asked::Start,
        (b"GET" | b"HEAD", _) => Asked::Elsewhere,
        _ => Asked::Otherwise,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_requests_for_the_page_get_it() {
        assert_eq!(asked(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), Asked::Metrics);
        assert_eq!(asked(b"HEAD /metrics?a=b HTTP/1.0\r\n\r\n"), Asked::Metrics);
        assert_eq!(asked(b"GET / HTTP/1.1\r\n\r\n"), Asked::Start);
        assert_eq!(asked(b"GET /metrics/x HTTP/1.1\r\n\r\n"), Asked::Elsewhere);
        assert_eq!(asked(b"POST /metrics HTTP/1.1\r\n\r\n"), Asked::Otherwise);
        for request in [&b""[..], b"GET /metrics HTTP/1.1\r\n", b"GET /metrics\r\n\r\n", b"\x16\x03\x01\r\n\r\n"] {
            assert_eq!(asked(request), Asked::Nothing, "{request:?}");
        }
    }
}
