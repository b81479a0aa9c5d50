//! `gpupool export`: what the processes under gpupool hold, as Prometheus reads it. It reads their metrics pages and nothing else, each
//! time that it is asked.

mod families;
mod http;
mod slots;
#[cfg(test)]
mod tests;

use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::failure::{self, Failure};
use crate::pages::{Pages, interval};
use crate::stdout;
use families::Families;
use slots::Slots;

/// Tell Prometheus what the processes under gpupool hold
///
/// Serves http://127.0.0.1:9402/metrics until it is ended. For root: the processes of all users.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool export                                             for a Prometheus on this machine
  gpupool export --listen 10.0.0.7:9402                      for one elsewhere
  gpupool export --textfile /var/lib/prometheus/node-exporter
  gpupool export --once | promtool check metrics")]
pub struct Args {
    /// Where to listen
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9402")]
    listen: String,
    /// Writes gpupool.prom into this folder again and again, for node_exporter's textfile collector, and listens nowhere
    #[arg(long, value_name = "FOLDER", conflicts_with = "listen")]
    textfile: Option<PathBuf>,
    /// How long to wait between two writes of the file
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = interval, requires = "textfile")]
    interval: Duration,
    /// Only once: on stdout, or with --textfile into the file, which then stays
    #[arg(long, conflicts_with = "listen")]
    once: bool,
}

/// Exports until it is ended, or once.
///
/// # Errors
/// There is no such address or folder, or somebody else has the port.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let mut exporter = Exporter::new();
    match &args.textfile {
        None if args.once => stdout::print(&exporter.text())?,
        None => serve(exporter, &args.listen)?,
        Some(folder) if args.once => write(folder, &exporter.text())?,
        Some(folder) => write_until_ended(exporter, folder, args.interval)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Who reads the pages, and what has to be known from one time to the next.
struct Exporter {
    host: String,
    pages: Pages,
    slots: Slots,
}

impl Exporter {
    fn new() -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self { host, pages: Pages::new(), slots: Slots::default() }
    }

    /// What there is to say now.
    fn text(&mut self) -> String {
        let look = self.pages.look().without_doubtful();
        self.pages.complain(&look);
        let slots = self.slots.of(&look.rows);
        Families::of(&self.host, &look, &slots).text()
    }
}

fn serve(mut exporter: Exporter, listen: &str) -> Result<(), Failure> {
    let addresses: Vec<SocketAddr> = match listen.to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        Err(error) => {
            let expected = "expected an address and a port, as in 127.0.0.1:9402 or [::1]:9402";
            return Err(Failure::usage(format!("export: --listen {listen}: {error}; {expected}")));
        }
    };
    let listener = TcpListener::bind(&addresses[..]).map_err(|error| {
        let why = match error.kind() {
            ErrorKind::AddrInUse => {
                "somebody listens there already, another gpupool export perhaps: one for each machine is \
                                     enough; or choose another port with --listen"
                    .to_owned()
            }
            _ => error.to_string(),
        };
        Failure::broken(format!("export: cannot listen on {listen}: {why}"))
    })?;
    let address = listener.local_addr().map_err(|error| Failure::broken(format!("export: {error}")))?;
    failure::complain(&format!("metrics at http://{address}/metrics"));
    http::serve(&listener, move || exporter.text())
}

/// The file's name; node_exporter reads those that end so.
const FILE: &str = "gpupool.prom";

/// Writes the file as a whole: a reader sees the old one or the new one.
fn write(folder: &Path, text: &str) -> Result<(), Failure> {
    let broken = |error: std::io::Error| {
        Failure::broken(format!("export: {} in {} cannot be written: {error}", FILE, folder.display()))
    };
    // Its name ends otherwise: nobody reads it before it is whole.
    let mut file = tempfile::Builder::new().prefix(".gpupool.").suffix(".new").tempfile_in(folder).map_err(broken)?;
    file.write_all(text.as_bytes()).map_err(broken)?;
    // The collector is another user.
    file.as_file().set_permissions(PermissionsExt::from_mode(0o644)).map_err(broken)?;
    file.persist(folder.join(FILE)).map_err(|error| broken(error.error))?;
    Ok(())
}

fn write_until_ended(mut exporter: Exporter, folder: &Path, interval: Duration) -> Result<(), Failure> {
    let end = end_asked_for().map_err(|error| Failure::broken(format!("export: no signals: {error}")))?;
    loop {
        let text = exporter.text();
        let written = write(folder, &text);
        if let Err(error) = written {
            // What it says of processes would stand there for ever.
            let _ = std::fs::remove_file(folder.join(FILE));
            return Err(error);
        }
        if end.recv_timeout(interval).is_ok() {
            let _ = std::fs::remove_file(folder.join(FILE));
            return Ok(());
        }
    }
}

/// Hears when this process is asked to end.
fn end_asked_for() -> std::io::Result<Receiver<()>> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let (send, receive) = channel();
    std::thread::Builder::new().spawn(move || {
        for _ in signals.forever() {
            // Nobody listens any more: it ends already.
            let _ = send.send(());
        }
    })?;
    Ok(receive)
}
