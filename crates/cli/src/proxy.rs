//! `ringfence proxy`: isolation of any vhost-user back end.

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use anyhow::{Context, Result};
use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use ringfence_devices::proxy::{Connector, CopyBack, Proxy, ProxyOptions};
use ringfence_run::{PeerFd, worker::Worker};
use ringfence_vhost_user::Server;

use crate::{
    device::blk_figures,
    serve::{self, Connection, Page, Service},
};

/// For example:
///
///   qemu-storage-daemon --blockdev file,filename=disk.img,node-name=d
///     --export vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=back.sock,writable=on
///   ringfence proxy --socket front.sock --backend back.sock
///
/// and the VMM uses front.sock as it would have used back.sock.
#[derive(Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Arguments {
    #[command(flatten)]
    service: serve::Options,

    /// The socket of the back end, to which the proxy connects when a front end has sent its first
    /// message
    #[arg(long, value_name = "PATH")]
    backend: PathBuf,

    /// The most rings to offer, if the back end has so many: a network has two for a pair of queues
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: u16,

    /// How much memory each queue has for copies of requests in flight, in MiB. It is taken when
    /// requests need it, or at once by a back end that locks its memory. A larger request stops its
    /// queue
    #[arg(long, value_name = "MIB", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pool_size: u16,

    /// What is copied to the guest when the back end has completed a request: as many bytes as it
    /// reports (used), or all that it could have written (all), for back ends that report too few
    #[arg(long, value_name = "WHAT", default_value = "used", value_parser = copied())]
    copy_back: CopyBack,

    #[command(flatten)]
    iotlb: serve::Iotlb<64, 600_000>,
}

fn copied() -> impl TypedValueParser<Value = CopyBack> {
    let named = PossibleValuesParser::new(["used", "all"]);
    named.map(|name| if name == "all" { CopyBack::All } else { CopyBack::Used })
}

struct Serving {
    options: ProxyOptions,
    connector: Arc<Connector>,
    workers: Arc<[Worker]>,
}

/// Serves until a signal.
pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let Arguments { service, backend, queues, pool_size, copy_back, iotlb } = arguments;
    let mut begun = serve::begin(&service.common, "proxy", &[service.socket.as_deref()])?;
    begun.connects = true;
    // Where it is now: the process may not look for it later.
    let backend = std::path::absolute(&backend).context("the back end's socket")?;
    // Each ring signals its driver, and the back end.
    let ready = serve::open(begun, 2 * usize::from(queues), || Ok(()))?;
    let workers = ready.workers("proxy", queues)?;
    let options = ProxyOptions {
        pool_size: u64::from(pool_size) << 20,
        copy_back,
        iotlb: (!iotlb.no_iommu).then(|| iotlb.config()),
        ..ProxyOptions::new("proxy", queues)
    };
    let connector = Connector::spawn(backend, Arc::clone(&options.name));
    let connector = Arc::new(connector.context("starting the thread that connects")?);
    serve::run(ready, Serving { options, connector, workers })
}

impl Service for Serving {
    fn name(&self) -> &'static str {
        "proxy"
    }

    fn connect(&self, _: usize, stream: PeerFd) -> Result<Box<dyn Connection>> {
        let workers = Arc::clone(&self.workers);
        let proxy = Proxy::connect(self.options.clone(), &self.connector, workers);
        let proxy = proxy.map_err(|why| anyhow::Error::from_boxed(why.into_inner()));
        let proxy = proxy.context("connecting to the back end")?;
        Ok(Box::new(Server::new(stream, proxy)))
    }

    fn figures(&self, page: &mut Page) {
        blk_figures(page, &[("", &*self.options.figures)]);
        serve::iotlb_figures(page, &self.options.figures.iotlb.totals());
        let (now, most) = self.connector.pool_bytes();
        page.one("proxy_pool_bytes", "Bytes of memory that the back end has.", now);
        page.one("proxy_pool_limit_bytes", "The most that it can have.", most);
    }
}
