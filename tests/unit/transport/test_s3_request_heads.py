"""What the head of an upload says, seen where it would go out: nothing is sent in these tests."""

from __future__ import annotations

from io import BytesIO
from secrets import token_hex
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from urllib3 import HTTPResponse

from nemo_dcr.transport.s3_client import ASKS_FIRST_BYTES, S3Config, S3Credentials, open_client

KEY = "0123456789abcdef/attempt-00000000000000000001/owner-00000/payload-00000000"


def head_of_upload(nbytes: int) -> dict[str, str]:
    """The header fields of a PUT of so many bytes."""
    config = S3Config(bucket="bucket", run="run", endpoint="http://127.0.0.1:9")
    client = open_client(config, S3Credentials(access_key="key", secret_key=token_hex(8)))
    seen: list[dict[str, str]] = []

    def take(request: Any, **_: object) -> AWSResponse:
        seen.append({name.lower(): _text(value) for name, value in request.headers.items()})
        return AWSResponse(request.url, 200, {}, HTTPResponse(BytesIO(), preload_content=False))

    client.meta.events.register_first("before-send.s3.PutObject", take)
    client.put_object(Bucket="bucket", Key=KEY, Body=bytes(nbytes), IfNoneMatch="*")
    client.close()
    (head,) = seen
    return head


def _text(value: str | bytes) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value


def test_a_small_body_is_sent_at_once_and_a_large_one_after_a_question() -> None:
    assert "expect" not in head_of_upload(ASKS_FIRST_BYTES - 1)
    assert head_of_upload(ASKS_FIRST_BYTES)["expect"] == "100-continue"


@pytest.mark.parametrize("nbytes", [0, 20_000])
def test_the_head_of_an_upload_is_short_and_still_has_checksum_digest_and_condition(nbytes: int) -> None:
    head = head_of_upload(nbytes)
    assert head["user-agent"].startswith("nemo-dcr ")
    assert len(head["user-agent"]) < 40
    assert len(head["x-amz-checksum-crc32"]) == 8
    assert len(head["x-amz-content-sha256"]) == 64
    assert head["if-none-match"] == "*"
    assert sum(len(name) + len(value) + 4 for name, value in head.items()) < 800
