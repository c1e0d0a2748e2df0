"""Two regions and an object store on one machine: network namespaces with a slow, far boundary between them.

Every host is a namespace. Hosts of a region share a fast LAN (a bridge); what leaves a region goes over the host's own
link to the region's router, limited to the given rate in both directions, and over the delay line. The object store
stands behind the boundary for both regions. Nothing is made outside the namespaces; their names carry the process that
made them and its start, so that what a killed run left is recognised and removed by the next.
Not handled: loss; machines without root or without /dev/net/tun (a typed error says so).

Paper: Section 8.1 (testbed: two regions, one cross-cluster flow a node, object storage between them)
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from nemo_dcr.errors import InvalidConfig, OperatorNeeded
from nemo_dcr.testing.delay_line import (
    INTERFACE,
    NAMESPACES,
    Crossing,
    Line,
    LineEnd,
    enter_namespace,
    remove_namespaces,
)

TRAINING, ROLLOUT, STORE = "training", "rollout", "store"
_PREFIX = "ndcr"
_NETS = {TRAINING: (198, 18, 1), ROLLOUT: (198, 18, 2), STORE: (198, 18, 3)}
"""Addresses of the block that is set aside for network benchmarks."""
_LAN_MTU = 9000
_QUEUE_MS = 400
"""What a link may hold back: long enough that a sender that probes for more loses nothing."""
_BURST_MS = 10
_MADE = itertools.count()
_TUN_DEVICE = Path("/dev/net/tun")


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What lies between the regions."""

    rate_mbit: float
    """Of every host's link to the other region, each direction, in 10^6 bit/s."""
    rtt_ms: float
    """Added to every round trip between regions."""
    ports: tuple[int, ...] = ()
    """Service ports whose bytes are counted apart."""
    http_ports: tuple[int, ...] = ()
    """Those of them on which objects are told from listings and errors."""
    mtu: int = 1500

    def __post_init__(self) -> None:
        for field, value in (("rate_mbit", self.rate_mbit), ("rtt_ms", self.rtt_ms)):
            if not value > 0:
                raise InvalidConfig(f"boundary.{field}", f"must be positive, got {value}")
        if not 576 <= self.mtu <= _LAN_MTU:
            raise InvalidConfig("boundary.mtu", f"must be 576 to {_LAN_MTU}, got {self.mtu}")


@dataclass(frozen=True, slots=True)
class Host:
    """One host of a region."""

    name: str
    region: str
    namespace: str
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on this host; it becomes that process, with the same pid."""
        return ["nsenter", f"--net={NAMESPACES / self.namespace}", "--", *arguments]

    def enter(self) -> None:
        """Move the calling thread, and what it starts from now on, onto this host. Raises: OSError."""
        enter_namespace(NAMESPACES / self.namespace)


@dataclass(frozen=True, slots=True)
class Connection:
    """One TCP socket of a host's table, without those that only listen."""

    local: str
    local_port: int
    remote: str
    remote_port: int
    state: str


class Regions:
    """Use it as a context manager: everything is there inside the block and gone after it."""

    def __init__(self, boundary: Boundary, *, training_hosts: int = 2, rollout_hosts: int = 4) -> None:
        """Plan the hosts; nothing is made yet."""
        self.boundary = boundary
        self._run = f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}-{next(_MADE)}"
        self.training = tuple(self._host(TRAINING, f"t{number + 1}", number) for number in range(training_hosts))
        self.rollout = tuple(self._host(ROLLOUT, f"r{number + 1}", number) for number in range(rollout_hosts))
        self.store = self._host(STORE, "store", 0)
        self._line: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Regions:
        """Make everything.

        Raises: OperatorNeeded when this machine or this user cannot have namespaces, or one of the tools failed.
        """
        require_namespaces()
        sweep()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove everything."""
        self.close()

    def close(self) -> None:
        """Remove everything. Idempotent; end the processes of the hosts first."""
        if self._line is not None:
            self._line.communicate()  # its standard input ends, and it removes the namespaces
            self._line = None
        remove_namespaces(self._names())

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All hosts, the store's too."""
        return (*self.training, *self.rollout, self.store)

    def crossings(self) -> list[Crossing]:
        """What crossed the boundary since the start, by direction and port.

        Raises: OperatorNeeded when the delay line has ended.
        """
        line = self._line
        try:
            if line is None or line.stdin is None or line.stdout is None:
                raise OperatorNeeded("the regions are not up", "use them inside their `with` block")
            line.stdin.write(b"read\n")
            line.stdin.flush()
            return msgspec.json.decode(line.stdout.readline(), type=list[Crossing])
        except (OSError, msgspec.DecodeError) as problem:
            raise OperatorNeeded(f"the delay line has ended: {problem}", "run it again") from problem

    def connections(self, host: Host) -> list[Connection]:
        """The TCP sockets of a host that have a peer, as `ss` tells them. Raises: OperatorNeeded when it cannot."""
        listed = _tool(host.command(["ss", "--tcp", "--all", "--numeric", "--no-header"]))
        found = []
        for line in listed.splitlines():
            state, _, _, local, remote = line.split()[:5]
            if state != "LISTEN":
                (here, port), (there, other) = local.rsplit(":", 1), remote.rsplit(":", 1)
                found.append(Connection(here, int(port), there, int(other), state))
        return found

    def region_of(self, address: str) -> str | None:
        """The region that an address belongs to; None for a foreign one."""
        return next((host.region for host in self.hosts if host.address == address), None)

    def _names(self) -> tuple[str, ...]:
        return (*(host.namespace for host in self.hosts), self._router(TRAINING), self._router(ROLLOUT))

    def _router(self, region: str) -> str:
        return f"{self._run}-{region}-router"

    def _host(self, region: str, name: str, number: int) -> Host:
        return Host(name, region, f"{self._run}-{name}", ".".join(map(str, (*_NETS[region], 10 + number))))

    def _make(self) -> None:
        for name in self._names():
            _tool(["ip", "netns", "add", name])
            # No IPv6: its neighbour discovery would be the only traffic that nobody asked for.
            _in(name, "for f in /proc/sys/net/ipv6/conf/*/disable_ipv6; do [ ! -e $f ] || echo 1 > $f; done")
            _in(name, "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done")
            _ip(name, ["link set lo up"])
        for region, hosts in ((TRAINING, self.training), (ROLLOUT, self.rollout)):
            self._make_region(region, hosts)
        self._start_line()
        ends = ((self._router(TRAINING), None), (self._router(ROLLOUT), None), (self.store.namespace, self.store))
        for namespace, host in ends:
            own = [f"addr add {host.address}/32 dev {INTERFACE}"] if host is not None else []
            up = f"link set {INTERFACE} mtu {self.boundary.mtu} txqueuelen 10000 up"
            source = f" src {host.address}" if host is not None else ""
            _ip(namespace, [*own, up, f"route add default dev {INTERFACE}{source}"])

    def _make_region(self, region: str, hosts: Iterable[Host]) -> None:
        router, mtu = self._router(region), self.boundary.mtu
        gateway = ".".join(map(str, (*_NETS[region], 1)))
        _in(router, "echo 1 > /proc/sys/net/ipv4/ip_forward")
        _ip(router, ["link add lan type bridge", f"link set lan mtu {_LAN_MTU} up"])
        for host in hosts:
            lan, wan = f"lan-{host.name}", f"wan-{host.name}"
            peer = f"netns {host.namespace}"
            _ip(
                router,
                [
                    f"link add {lan} mtu {_LAN_MTU} type veth peer name eth0 mtu {_LAN_MTU} {peer}",
                    f"link set {lan} master lan up",
                    f"link add {wan} mtu {mtu} type veth peer name {INTERFACE} mtu {mtu} {peer}",
                    f"addr add {gateway}/32 dev {wan}",
                    f"link set {wan} up",
                    f"route add {host.address}/32 dev {wan}",
                ],
            )
            _ip(
                host.namespace,
                [
                    f"addr add {host.address}/24 dev eth0",
                    "link set eth0 up",
                    f"link set {INTERFACE} up",
                    f"route add default via {gateway} dev {INTERFACE} onlink src {host.address}",
                ],
            )
            self._limit(host.namespace, INTERFACE)
            self._limit(router, wan)

    def _limit(self, namespace: str, interface: str) -> None:
        rate = round(self.boundary.rate_mbit * 1e6)
        burst = max(4 * self.boundary.mtu, rate * _BURST_MS // 8000)
        bucket = f"rate {rate}bit burst {burst} latency {_QUEUE_MS}ms"
        _tool(["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *bucket.split()])

    def _start_line(self) -> None:
        routers = {TRAINING: self._router(TRAINING), ROLLOUT: self._router(ROLLOUT), STORE: self.store.namespace}
        line = Line(
            ends=tuple(LineEnd(region=r, namespace=n, prefix=_NETS[r]) for r, n in routers.items()),
            delay_s=self.boundary.rtt_ms / 2000,
            ports=self.boundary.ports,
            http_ports=self.boundary.http_ports,
            namespaces=self._names(),
        )
        with tempfile.NamedTemporaryFile(prefix="nemo-dcr-line-", suffix=".json") as file:
            file.write(msgspec.json.encode(line))
            file.flush()
            # A session of its own: what kills this process group leaves the line alive to clean up.
            self._line = subprocess.Popen(
                [sys.executable, "-m", "nemo_dcr.testing.delay_line", file.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            if self._line.stdout is None or self._line.stdout.readline() != b"up\n":
                raise OperatorNeeded("the delay line did not start", "read what it printed to standard error")


def require_namespaces() -> None:
    """Raises OperatorNeeded when this user or this machine cannot have namespaces with TUN interfaces."""
    if os.geteuid() != 0:
        raise OperatorNeeded("network namespaces need root", "run it as root, or leave the emulated WAN out")
    if not _TUN_DEVICE.exists():
        raise OperatorNeeded(f"{_TUN_DEVICE} is missing", "load the tun module, or start the container with the device")
    for tool in ("ip", "tc", "ss", "nsenter"):
        if not any((Path(folder) / tool).exists() for folder in ("/usr/sbin", "/usr/bin", "/sbin", "/bin")):
            raise OperatorNeeded(f"the program {tool} is missing", "on Debian: apt-get install iproute2 util-linux")


def sweep() -> list[str]:
    """Remove the namespaces of runs whose process is gone; returns their names."""
    left = []
    for entry in sorted(NAMESPACES.glob(f"{_PREFIX}-*")):
        _, pid, started, _ = entry.name.split("-", 3)
        if _started(int(pid)) != started:
            left.append(entry.name)
    remove_namespaces(left)
    return left


def _started(pid: int) -> str:
    """Start of a process in clock ticks since boot: with the pid it names one process. Empty when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return stat.rsplit(")", 1)[1].split()[19]


def _ip(namespace: str, lines: Sequence[str]) -> None:
    _tool(["ip", "-n", namespace, "-batch", "-"], "\n".join(lines) + "\n")


def _in(namespace: str, script: str) -> None:
    _tool(["nsenter", f"--net={NAMESPACES / namespace}", "--", "sh", "-c", script])


def _tool(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        told = done.stderr.strip() or done.stdout.strip()
        raise OperatorNeeded(f"{' '.join(command)} failed: {told}", "mend what it names; namespaces need root")
    return done.stdout
