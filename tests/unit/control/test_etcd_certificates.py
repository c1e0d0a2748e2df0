"""Control calls to etcd over TLS: the member's certificate is checked, and the client shows its own."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from nemo_dcr.control import open_control
from nemo_dcr.errors import ControlPlaneUnavailable
from nemo_dcr.testing.control_calls import bootstrap, check_chain
from nemo_dcr.testing.etcd_server import EtcdServer
from nemo_dcr.testing.http_faults import FaultyProxy

pytestmark = pytest.mark.slow


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Files of a certificate for 127.0.0.1 that is its own authority, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    files = directory / f"{name}.pem", directory / f"{name}-key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return files


@pytest.fixture
def member(etcd: EtcdServer, tmp_path: Path) -> Iterator[str]:
    """HOST:PORT of an etcd that speaks TLS and wants the client's certificate; a proxy in front does so for it."""
    served, client = certificate(tmp_path, "member"), certificate(tmp_path, "client")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*served)
    context.load_verify_locations(client[0])
    context.verify_mode = ssl.CERT_REQUIRED
    with FaultyProxy(f"http://{etcd.address}", tls=context) as proxy:
        yield proxy.endpoint.removeprefix("http://")


def test_both_sides_show_a_certificate(member: str, tmp_path: Path) -> None:
    files = f"ca={tmp_path / 'member.pem'}&cert={tmp_path / 'client.pem'}&key={tmp_path / 'client-key.pem'}"
    control = open_control(f"etcd://{member}/certified?{files}")
    _, record = bootstrap(control)
    assert check_chain(control) == (record,)


@pytest.mark.parametrize(
    "files",
    [
        "",
        "ca={0}/member.pem",
        "ca={0}/client.pem&cert={0}/client.pem&key={0}/client-key.pem",
        "ca={0}/member.pem&cert={0}/member.pem&key={0}/member-key.pem",
    ],
)
def test_nothing_gets_through_without_the_right_certificates(member: str, tmp_path: Path, files: str) -> None:
    control = open_control(f"etcd://{member}/certified?timeout_s=0.3&{files.format(tmp_path)}")
    with pytest.raises(ControlPlaneUnavailable, match="gives no answer"):
        control.acquire_epoch()
