"""What a caller cannot be expected to handle, as few exceptions.

Expected results (a lease that is held, an upstream that refused) are values in `model`, never exceptions.
"""

from gateway.model import NeverSent, NoReply


class GatewayError(Exception):
    """Root of the gateway's own exceptions. Its text is one sentence that says what to do."""


class ConfigError(GatewayError):
    """The configuration has faults. `faults` lists all of them, each `file:line: path: sentence`."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class StoreError(GatewayError):
    """PostgreSQL cannot be used as asked: unreachable at start-up work, wrong schema, refused role.

    On the request path the store never raises; it reports `model.Unavailable`.
    """


class SchemaError(StoreError):
    """The schema is missing, older than this code needs, or not compatible with it. Says which command mends it."""


class UpstreamFailed(GatewayError):  # noqa: N818 -- a failure, in the words of model.UpstreamFailure
    """A streamed request has no answer: `failure` says whether a byte was sent, and why."""

    def __init__(self, failure: NeverSent | NoReply) -> None:
        super().__init__(f"The upstream gave no answer: {failure.cause}.")
        self.failure = failure
