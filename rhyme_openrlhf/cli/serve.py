"""`rhyme serve`: the control plane. Starts Ray on this machine or uses a cluster, and serves until Ctrl-C.

Invariants: one service a data directory; a sign-in link is printed once, and opens one session; Ray that was
started here is stopped at the end, unless runs are under way: those go on, and the next `rhyme serve` watches them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import gc
import os
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rhyme_openrlhf.cli.console import refuse
from rhyme_openrlhf.settings.options import Parser, SettingsError, add_options, from_mapping

if TYPE_CHECKING:
    from rhyme_openrlhf.api.access.service import Background
    from rhyme_openrlhf.api.launch.actions import LaunchSettings
    from rhyme_openrlhf.api.launch.local_cluster import LocalCluster
    from rhyme_openrlhf.api.launch.ray_jobs import RayLauncher
    from rhyme_openrlhf.api.settings import OpenIdSettings, ServeSettings

_refuse = partial(refuse, "rhyme serve")
DESCRIPTION = """\
Start, see and stop runs: the control plane, for a browser and for `rhyme runs`. Without options it starts Ray on this
machine (for this machine only) and keeps everything in the data directory."""
# Live streams are open until their clients go; at the end they are not waited for longer.
GOODBYE_SECONDS = 5
# After which a thread that computes a page lets the event loop run. By Python's own 5 ms, every small answer waited for
# that long for each page under way (docs/results.md).
SWITCH_SECONDS = 0.001
# A demonstration has its own; what is given would not be seen.
NOT_IN_A_DEMO = ("local", "ray_address", "serve.data_dir", "serve.database", "serve.roots")
# What `pip install -e '.[server]'` brings.
SERVER_PACKAGES = frozenset(
    {"alembic", "authlib", "fastapi", "httpx2", "jinja2", "joserfc", "plotly", "prometheus_client", "psycopg",
     "pyarrow", "pydantic", "ray", "sqlalchemy", "sse_starlette", "starlette", "uvicorn"}
)  # fmt: skip


class ServeError(Exception):
    """The service cannot be started; the message is one sentence for the user."""


@dataclass(frozen=True)
class Options:
    """Parsed options. `local`: start Ray here; `ray_address`: a cluster's dashboard, or "" for none.

    `demo`: show recorded runs and start nothing. `new_link`: print a sign-in link and start nothing.
    """

    serve: ServeSettings
    launch: LaunchSettings
    openid: OpenIdSettings
    local: bool
    ray_address: str
    ray_token_file: str
    demo: bool = False
    new_link: bool = False


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C or SIGTERM. Returns the exit code: 2 when it cannot start."""
    try:
        options = read_options(argv)
        if options.new_link:
            _print_new_link(options.serve)
        elif options.demo:
            _serve_demo(options)
        else:
            _serve(options)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in SERVER_PACKAGES:
            raise
        return _refuse(f"the package '{package}' is not installed here: pip install -e '.[server]' in a clone")
    except (ServeError, SettingsError) as error:
        return _refuse(str(error))
    return 0


def read_options(argv: Sequence[str]) -> Options:
    """Raises SettingsError and ServeError; exits as argparse does."""
    from rhyme_openrlhf.api.launch.actions import LaunchSettings
    from rhyme_openrlhf.api.settings import OpenIdSettings, ServeSettings

    parser = Parser(
        prog="rhyme serve",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--local",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Start Ray on this machine (the default); without a GPU, with pretended ones. --no-local without "
        "--ray-address shows runs, but starts none.",
    )
    parser.add_argument(
        "--ray-address",
        default="",
        metavar="URL",
        help="Dashboard of a Ray cluster to start runs on, as http://HOST:8265; nothing is started or pretended there. "
        "Needs --launch.control_url and --launch.dir.",
    )
    parser.add_argument(
        "--ray-token-file", default="", metavar="FILE", help="File with the token of that cluster, if it wants one."
    )
    parser.add_argument(
        "--demo",
        action="store_true",
        help="Show recorded runs, one of them played live, and a synthetic one: nothing is started, no Ray is needed, "
        "and nothing is left behind.",
    )
    parser.add_argument(
        "--new-link",
        action="store_true",
        help="Print a new sign-in link for the service of the data directory (or of --serve.database), which may be "
        "running, and end.",
    )
    add_options(parser, (ServeSettings, LaunchSettings, OpenIdSettings))
    given = vars(parser.parse_args(argv))
    if given["local"] and given["ray_address"]:
        raise ServeError("--local starts Ray here, --ray-address uses another: give one of them")
    if given["ray_address"] and not given["ray_address"].startswith(("http://", "https://")):
        raise ServeError("--ray-address must be the cluster's dashboard, as http://HOST:8265")

    if given["new_link"] and given["demo"]:
        raise ServeError("--demo prints its own link, and --new-link starts nothing: give one of them")
    if given["demo"] and any(given[name] for name in NOT_IN_A_DEMO):
        raise ServeError(
            "--demo shows recordings from a folder of its own: give it without --local, --ray-address, "
            "--serve.data_dir, --serve.database and --serve.roots"
        )

    def of(group: str) -> dict[str, object]:
        return {name.removeprefix(f"{group}."): value for name, value in given.items() if name.startswith(f"{group}.")}

    launch = from_mapping(LaunchSettings, of("launch"))
    if given["ray_address"]:
        _check_cluster(given["ray_address"], launch)
    openid = from_mapping(OpenIdSettings, of("openid"))
    if openid.issuer:
        # Before Ray is started: a secret that cannot be read is bad input.
        openid.client_secret()
    return Options(
        serve=from_mapping(ServeSettings, of("serve")),
        launch=launch,
        openid=openid,
        local=given["local"] is True or (given["local"] is None and not given["ray_address"] and not given["demo"]),
        ray_address=given["ray_address"],
        ray_token_file=given["ray_token_file"],
        demo=given["demo"],
        new_link=given["new_link"],
    )


def _check_cluster(ray_address: str, launch: LaunchSettings) -> None:
    """Raise ServeError unless runs on another machine can reach this service and a directory of both."""
    from rhyme_openrlhf.api.settings import is_loopback

    if not (launch.control_url and launch.dir):
        raise ServeError(
            "--ray-address starts runs on other machines: give --launch.control_url, the address at which they reach "
            "this service, and --launch.dir, a directory that they and this service share"
        )
    if is_loopback(urlsplit(launch.control_url).hostname or "") and not is_loopback(
        urlsplit(ray_address).hostname or ""
    ):
        raise ServeError(
            f"--launch.control_url {launch.control_url} is each machine's own address, and the runs are on "
            f"{ray_address}: give the address at which they reach this service"
        )


def _print_new_link(settings: ServeSettings) -> None:
    """Print a sign-in link, also while a service is running on the same database. Raises ServeError."""
    from rhyme_openrlhf.api.access.local_link import kept_address_for_people, new_code
    from rhyme_openrlhf.api.store import credentials
    from rhyme_openrlhf.api.store.database import DatabaseError

    try:
        code = new_code(settings)
    except DatabaseError as error:
        raise ServeError(str(error)) from error
    print(_link_line(credentials.sign_in_link(kept_address_for_people(settings), code)), flush=True)


def _link_line(link: str) -> str:
    return f"Sign in (this link works once): {link}"


def _serve_demo(options: Options) -> None:
    """Serve recordings from a temporary folder, which is removed at the end."""
    from rhyme_openrlhf.api.demo.demonstration import demonstration
    from rhyme_openrlhf.api.demo.recording import RecordingError

    with _interrupted_by_sigterm(), tempfile.TemporaryDirectory(prefix="rhyme-demo-") as folder:
        runs = Path(folder) / "runs"
        runs.mkdir()
        serve = dataclasses.replace(options.serve, data_dir=str(Path(folder) / "data"), roots=str(runs))
        print("rhyme serve: a demonstration: recorded runs and synthetic events, nothing runs", flush=True)
        try:
            _serve(dataclasses.replace(options, serve=serve), (demonstration(runs),))
        except (OSError, RecordingError) as error:
            raise ServeError(f"the demonstration cannot be shown: {error}") from error


def _serve(options: Options, further: Sequence[Background] = ()) -> None:
    """Serve until the end; `further` runs beside the requests."""
    import uvicorn

    from rhyme_openrlhf.api.access import local_link
    from rhyme_openrlhf.api.access.launching import dispatching
    from rhyme_openrlhf.api.access.service import worker_intake
    from rhyme_openrlhf.api.app import BACKGROUND, create_app
    from rhyme_openrlhf.api.http.server import Server
    from rhyme_openrlhf.api.launch.actions import Launching
    from rhyme_openrlhf.api.store import credentials
    from rhyme_openrlhf.api.store.database import DatabaseError
    from rhyme_openrlhf.webui.install import install as install_dashboard

    settings = options.serve
    data = settings.data_path()
    under_way: int | None = None

    def ended(active: int) -> None:
        nonlocal under_way
        under_way = active

    with contextlib.ExitStack() as stack:
        stack.enter_context(_interrupted_by_sigterm())
        stack.enter_context(_alone_in(data))
        bound = stack.enter_context(_listen(settings))
        port = bound.getsockname()[1]
        # Before Ray is started.
        _check_certificate(settings)
        _open_store(settings)
        launcher, cluster = _cluster(options, data)
        if cluster is not None:
            stack.callback(lambda: _leave(cluster, under_way))
        control_url, name = _control_url(options, port), _cluster_name(options, data)
        launching = Launching(options.launch, data, settings.root_paths(), control_url, launcher, name, options.demo)
        # A demonstration's one run is played in a thread of the service: nobody sends batches.
        intakes = () if options.demo else (worker_intake,)
        background = (*BACKGROUND, *intakes, dispatching(launching, ended, _say), *further)

        def show_link(code: str) -> None:
            here = settings.base_url(port)
            # Behind a proxy, people and runs reach the service at one address.
            for_people = options.launch.control_url.rstrip("/") if settings.trusted_proxies else ""
            local_link.keep_address(data, here, for_people or here)
            print(_link_line(credentials.sign_in_link(for_people or here, code)), flush=True)

        try:
            app = create_app(settings, background=background, show_link=show_link, openid_settings=options.openid)
        except DatabaseError as error:
            raise ServeError(str(error)) from error
        app.state.launching = launching
        install_dashboard(app)
        server = Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                lifespan="on",
                timeout_graceful_shutdown=GOODBYE_SECONDS,
                ssl_certfile=settings.tls_cert or None,
                ssl_keyfile=settings.tls_key or None,
            )
        )
        # Who follows the link before everything is up waits, and is not refused.
        bound.listen()
        print(f"rhyme serve: {settings.base_url(port)} (data: {data}); Ctrl-C ends it", flush=True)
        # A curve is ten thousands of new objects, and each time the collector would look through all that is loaded.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_SECONDS)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[bound])
        if not server.started:
            raise ServeError("the service did not start: see above")


def _open_store(settings: ServeSettings) -> None:
    """Create or upgrade the database. Raises ServeError."""
    from rhyme_openrlhf.api.store.database import Database, DatabaseError

    try:
        database = Database(settings.database_url())
        try:
            database.open()
        finally:
            database.dispose()
    except DatabaseError as error:
        raise ServeError(str(error)) from error


def _check_certificate(settings: ServeSettings) -> None:
    """Raise ServeError if HTTPS is asked for with files that are no certificate and its key."""
    if not settings.tls:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        raise ServeError(
            f"--serve.tls_cert {settings.tls_cert} and --serve.tls_key {settings.tls_key} cannot be used: "
            f"{error.strerror or error}"
        ) from error


def _cluster(options: Options, data: Path) -> tuple[RayLauncher | None, LocalCluster | None]:
    """Return the launcher of runs, and the cluster that this service has to stop."""
    from rhyme_openrlhf.api.launch.local_cluster import LocalClusterError, start_local_cluster
    from rhyme_openrlhf.api.launch.ray_jobs import ClusterUnreachable, RayLauncher

    if options.local:
        print("rhyme serve: starting Ray on this machine ...", flush=True)
        try:
            cluster = start_local_cluster(data)
        except LocalClusterError as error:
            raise ServeError(str(error)) from error
        if cluster.adopted:
            print("rhyme serve: Ray was still running, with its runs: taken over", flush=True)
        return cluster.launcher(), cluster
    if not options.ray_address:
        return None, None
    # Ray's client would follow them instead of --ray-address.
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        os.environ.pop(name, None)
    try:
        token = Path(options.ray_token_file).read_text().strip() if options.ray_token_file else ""
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is no text"
        raise ServeError(f"--ray-token-file {options.ray_token_file} cannot be read: {cause}") from error
    launcher = RayLauncher(options.ray_address, token)
    try:
        print(f"rhyme serve: Ray at {launcher.address} has {launcher.gpus()} GPUs", flush=True)
    except ClusterUnreachable as error:
        # It may come later; runs wait in the queue until then.
        print(f"rhyme serve: warning: {error}", file=sys.stderr, flush=True)
    return launcher, None


def _say(sentence: str) -> None:
    print(f"rhyme serve: {sentence}", flush=True)


def _cluster_name(options: Options, data: Path) -> str:
    """Return a name that tells the cluster from those of other services on the same database."""
    from rhyme_openrlhf.api.settings import is_loopback

    if options.local:
        return f"Ray of {data} on {socket.gethostname()}"
    address = urlsplit(options.ray_address)
    # A loopback address means another machine on each machine.
    here = f" on {socket.gethostname()}" if is_loopback(address.hostname or "") else ""
    return f"{address.geturl().rstrip('/')}{here}"


def _leave(cluster: LocalCluster, under_way: int | None) -> None:
    """Stop Ray, unless runs are under way or may be (None: the service has not come up)."""
    if under_way or (under_way is None and cluster.adopted):
        print("rhyme serve: runs go on; `rhyme serve` with the same data directory watches them again")
        return
    cluster.stop()


def _control_url(options: Options, port: int) -> str:
    """Return the address that the runs report to: without the option, runs are on this machine alone."""
    if options.launch.control_url:
        return options.launch.control_url
    nearest = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.serve.host, options.serve.host)
    return dataclasses.replace(options.serve, host=nearest).base_url(port)


@contextlib.contextmanager
def _alone_in(data: Path) -> Iterator[None]:
    """Hold the data directory: two services would start every run twice. Raises ServeError."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (data / "serve.lock").open("w")
    except OSError as error:
        raise ServeError(f"the data directory {data} cannot be used: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServeError(f"another `rhyme serve` uses {data}: end it, or give another --serve.data_dir") from None
        yield


@contextlib.contextmanager
def _listen(settings: ServeSettings) -> Iterator[socket.socket]:
    """Yield the bound socket, taken before anything is started. Raises ServeError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((settings.host, settings.port))
        # UnicodeError, ValueError: a host that no name server can be asked for.
        except (OSError, UnicodeError, ValueError) as error:
            cause = getattr(error, "strerror", None) or error
            raise ServeError(f"cannot listen on {settings.host}:{settings.port}: {cause}") from error
        yield bound


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the service as Ctrl-C does, so that what was started is stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
