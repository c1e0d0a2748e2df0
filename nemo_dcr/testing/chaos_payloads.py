"""How payloads travel in a chaos system: through a directory, or through relay nodes that die and come back.

With relays each engine instance has a node of its own at which its ranks read; the first one is the root, which owners
stream to. A node that was started again knows nothing: the attempt that was under way fails, and the next one runs over
the same tree.
Not handled: leaving a lost node out of the tree; a deployment does that for nodes that stay away.

Paper: Section 7 (relay tree)   Spec: Channel
"""

from __future__ import annotations

import signal
import threading

from nemo_dcr.testing.chaos_source import SystemPlan
from nemo_dcr.testing.server_process import LOOPBACK_HOST, free_ports
from nemo_dcr.transport.base import Transport
from nemo_dcr.transport.object_store import FileObjectStore
from nemo_dcr.transport.relay.node import RelayNode
from nemo_dcr.transport.relay.settings import RelayConfig
from nemo_dcr.transport.relay.transport import RelayTransport
from nemo_dcr.transport.relay.tree import RelayTree, TreeNode, balanced_tree

PORT = 7000
RUN = "chaos"
CONFIG = RelayConfig(
    heartbeat_ms=100, heartbeat_timeout_ms=400, handshake_ms=1000, patience_s=0.4, connect_s=1.0, call_s=0.4
)
"""Short waits, as those of the control calls."""


def relay_of(instance: str) -> str:
    """Name of the node at which an instance reads."""
    return f"relay-{instance}"


def relay_addresses(instances: dict[str, int], hosts: dict[str, str]) -> dict[str, str]:
    """Where each node listens: in its namespace, or on free ports of loopback."""
    names = [relay_of(instance) for instance in instances]
    if hosts:
        return {name: f"tcp://{hosts[name]}:{PORT}" for name in names}
    return {name: f"tcp://{LOOPBACK_HOST}:{port}" for name, port in zip(names, free_ports(len(names)), strict=True)}


def open_payloads(plan: SystemPlan, instance: str = "") -> Transport:
    """The transport of one process; receivers name their instance."""
    if not plan.relays:
        return FileObjectStore(plan.payloads, run=plan.run)
    tree = _tree(plan)
    local = tree.node(relay_of(instance)) if instance else None
    return RelayTransport(tree, local=local, run=RUN, security=plan.security, config=CONFIG)


def close_payloads(transport: Transport) -> None:
    """Close its connections."""
    if isinstance(transport, RelayTransport):
        transport.close()


def run_relay(plan: SystemPlan, name: str) -> None:
    """One node, until SIGTERM or a fault of its own, which is raised."""
    stopping, faults = threading.Event(), list[BaseException]()

    def fail(fault: BaseException) -> None:
        faults.append(fault)
        stopping.set()

    tree = _tree(plan)
    node = RelayNode(name, plan.relays[name], run=RUN, known=tree, security=plan.security, config=CONFIG, on_fault=fail)
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    while not stopping.wait(0.1):
        pass
    node.close()
    if faults:
        raise faults[0]


def _tree(plan: SystemPlan) -> RelayTree:
    return balanced_tree([TreeNode(name, address) for name, address in plan.relays.items()])
