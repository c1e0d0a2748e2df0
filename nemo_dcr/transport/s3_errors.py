"""What an answer of an S3 server means, and what to do about it, in one line for the operator.

Error codes come from the body of an answer; HEAD answers have only a status. Network failures and credentials have
exceptions of their own in botocore. Every one of them ends as `TransportFailed` with the bucket, the operation and the
remedy; no message holds a key or a token.
Not handled: retries (see s3_client, s3_bucket); answers that are no failure, such as an absent key.

Paper: Section 7 (object storage)   Spec: Channel
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from botocore import exceptions
from botocore.exceptions import BotoCoreError, ClientError

from nemo_dcr.errors import TransportFailed

ABSENT = frozenset({"NoSuchKey", "NotFound", "404"})
CONDITION_FAILED = frozenset({"PreconditionFailed", "412"})
CONDITION_RACED = frozenset({"ConditionalRequestConflict", "OperationAborted", "409"})
NOT_IMPLEMENTED = frozenset({"NotImplemented", "MethodNotAllowed", "501", "405"})

_EXPIRED = "the credentials have expired; renew the session token, or name a role or profile that renews itself"
_UNKNOWN_KEY = "the server does not know the access key; set AWS_ACCESS_KEY_ID or AWS_PROFILE to one that it knows"
_UNFIT_KEY = "the secret key does not fit the access key; set AWS_SECRET_ACCESS_KEY, or the profile, anew"
_DENIED = "access is denied; grant this operation to these credentials (docs/object-storage.md lists all of them)"
_REGION = "the bucket is in another region; name it in the URL: region=..."
_BUSY = "the server asks for fewer requests or is not available, also after retries; look at its load and limits"
_REMEDIES = {
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"), _EXPIRED),
    **dict.fromkeys(("InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken"), _UNKNOWN_KEY),
    "SignatureDoesNotMatch": _UNFIT_KEY,
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden", "403"), _DENIED),
    "NoSuchBucket": "the bucket does not exist there; create it, or correct the bucket or the endpoint in the URL",
    "InvalidBucketName": "the server does not accept the bucket's name; correct the URL",
    **dict.fromkeys(
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"), _REGION
    ),
    **dict.fromkeys(("301", "307"), _REGION),
    "RequestTimeTooSkewed": "the clock of this host is wrong; set it",
    **dict.fromkeys(("SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "Throttling", "503", "429"), _BUSY),
    **dict.fromkeys(("InternalError", "500", "502", "504"), "the server failed, also after retries; look at its log"),
    "BadDigest": "the bytes were damaged on their way to the server; look at the network and this host's memory",
    "EntityTooLarge": "the server takes no object of this size; lower part_bytes in the URL or the bucket target",
    "QuotaExceeded": "the bucket is full; clean up or raise its quota",
}
_CREDENTIALS = (
    exceptions.NoCredentialsError,
    exceptions.PartialCredentialsError,
    exceptions.CredentialRetrievalError,
    exceptions.ProfileNotFound,
    exceptions.ConfigNotFound,
)
_EXPIRED_LOCALLY = (
    exceptions.TokenRetrievalError,
    exceptions.SSOTokenLoadError,
    exceptions.UnauthorizedSSOTokenError,
    exceptions.RefreshWithMFAUnsupportedError,
)
_UNREACHABLE = (
    exceptions.EndpointConnectionError,
    exceptions.ConnectTimeoutError,
    exceptions.ProxyConnectionError,
    exceptions.SSLError,
)


def code_of(error: ClientError) -> str:
    """The error code of an answer; its HTTP status where there is no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: ClientError) -> int:
    """The HTTP status of an answer; 0 where there is none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextlib.contextmanager
def failing_as(bucket: str, what: str) -> Iterator[None]:
    """Turn failures of a request into the transport's typed error. Raises: TransportFailed."""
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise TransportFailed(bucket, f"cannot {what}: {explanation(error)}") from error


def explanation(error: ClientError | BotoCoreError) -> str:
    """What happened and what to do."""
    if isinstance(error, ClientError):
        code, details = code_of(error), error.response.get("Error", {})
        remedy = _REMEDIES.get(code) or _REMEDIES.get(str(status_of(error))) or _said(details)
        return f"{remedy} ({code or status_of(error)})"
    if isinstance(error, _CREDENTIALS):
        return f"there are no usable credentials ({error}); set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret"
    if isinstance(error, _EXPIRED_LOCALLY):
        return f"{_EXPIRED} ({error})"
    if isinstance(error, _UNREACHABLE):
        return f"the server cannot be reached ({error}); correct the endpoint in the URL, or look at the network"
    return f"{error}; look at the network and at the server"


def _said(details: dict[str, Any]) -> str:
    return f"the server says {details.get('Message', 'nothing')!r}"
