"""The gateway's own answers: problems (RFC 9457) by a closed table of codes. docs/problems.md explains each to clients.

A code never changes its meaning. What is not in `RULES` is not answered; what a problem says about the service, its
hosts, routes, keys or bodies is nothing.
"""

import enum
from functools import lru_cache
from typing import Final

import msgspec

from gateway.model import Outcome
from gateway.wire.replies import marks


class Next(enum.StrEnum):
    """What a client should do."""

    RETRY_SAME_KEY = "retry_same_key"
    NEW_KEY = "new_key"
    FIX_REQUEST = "fix_request"
    CHECK_OUTCOME = "check_outcome"
    DO_NOT_RETRY = "do_not_retry"


class Effect(enum.StrEnum):
    """What is known of the effect of the request that the answer is about."""

    NONE = "none"
    PENDING = "pending"
    HAPPENED = "happened"
    UNKNOWN = "unknown"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One code. `detail` may hold `{wait}` (a phrase made of `Retry-After`) and `{reason}`.

    `blocked_detail` is for policies that never run again by themselves: the client checks the outcome, and no
    `Retry-After` is given. `retry_after` is the default, in seconds. `closes`: the connection cannot be used again,
    because the request was not read to its end or the process is stopping. `transport`: `Proxy-Status` names `cause`.
    """

    status: int
    title: str
    outcome: Outcome
    next: Next
    effect: Effect
    detail: str
    blocked_detail: str | None = None
    retry_after: int | None = None
    members: frozenset[str] = frozenset()
    closes: bool = False
    transport: bool = False


class Problem(msgspec.Struct, frozen=True, gc=False):
    """A problem ready for `wire.answer`: `head` holds all lines but framing. `closes`: do not keep the connection."""

    code: str
    status: int
    outcome: Outcome
    head: bytes
    body: bytes
    closes: bool


_NOT_SENT: Final = "Nothing was sent to the service."
_NOT_WHOLE: Final = "It was not sent to the service as a whole."  # what streams through may have begun
_REASONS: Final = {
    "repeated": "It was given more than once; give it once, and quote a key that contains a comma.",
    "empty": "It is empty.",
    "too_long": "It is longer than this service allows; a UUID is long enough.",
    "not_printable": "It contains something other than printable ASCII characters.",
    "not_a_string": 'It starts with a quotation mark but is not one well-formed quoted string, such as "abc".',
    "malformed": "It could not be parsed.",
    "target": "Its target is not a path or an http URL.",
    "host": "It must have exactly one valid Host line.",
    "control_character": "One of its header lines contains a control character.",
    "framing": "Its length must be told once: by one Content-Length in decimal digits, or by chunked coding.",
    "expectation": "Its Expect line asks for something other than 100-continue.",
    "connection": "Its Connection line names a header that must reach the service.",
}

RULES: Final[dict[str, Rule]] = {
    "key-missing": Rule(
        status=400,
        title="Idempotency-Key is missing",
        outcome=Outcome.REFUSED,
        next=Next.FIX_REQUEST,
        effect=Effect.NONE,
        detail=f"This request needs an idempotency key in the header that `header` names. {_NOT_SENT} Send it with a "
        "key that is unique to this operation, and use the same key when you repeat it.",
        members=frozenset({"header"}),
    ),
    "key-invalid": Rule(
        status=400,
        title="Idempotency-Key is not valid",
        outcome=Outcome.REFUSED,
        next=Next.FIX_REQUEST,
        effect=Effect.NONE,
        detail=f"The idempotency key cannot be used. {{reason}} {_NOT_SENT} Correct it and send the request again.",
        members=frozenset({"reason"}),
    ),
    "scope-missing": Rule(
        status=400,
        title="The caller cannot be told",
        outcome=Outcome.REFUSED,
        next=Next.FIX_REQUEST,
        effect=Effect.NONE,
        detail="What says whose key this is, in the header that `header` names, must be there exactly once, as plain "
        f"printable text of at most 1024 characters. {_NOT_SENT} Correct it and send the request again.",
        members=frozenset({"part", "header"}),
    ),
    "scope-forged": Rule(
        status=403,
        title="The caller may not say this",
        outcome=Outcome.REFUSED,
        next=Next.FIX_REQUEST,
        effect=Effect.NONE,
        detail="The header behind `part` is set by a trusted proxy and not accepted from this connection. "
        f"{_NOT_SENT} Send the request without it, by the intended way.",
        members=frozenset({"part"}),
    ),
    "request-invalid": Rule(
        status=400,
        title="The request is not valid HTTP",
        outcome=Outcome.REFUSED,
        next=Next.FIX_REQUEST,
        effect=Effect.NONE,
        detail=f"The request is not valid. {{reason}} {_NOT_WHOLE} Correct it and send it again on a new connection.",
        members=frozenset({"reason"}),
        closes=True,
    ),
    "request-too-large": Rule(
        status=413,
        title="The request is too large",
        outcome=Outcome.REFUSED,
        next=Next.FIX_REQUEST,
        effect=Effect.NONE,
        detail=f"The body is larger than `limit_bytes`. {_NOT_SENT} Send less in one request.",
        members=frozenset({"limit_bytes"}),
        closes=True,
    ),
    "head-too-large": Rule(
        status=431,
        title="The request's head is too large",
        outcome=Outcome.REFUSED,
        next=Next.FIX_REQUEST,
        effect=Effect.NONE,
        detail=f"Request line and headers are larger than `limit_bytes`. {_NOT_SENT} Send fewer or shorter headers.",
        members=frozenset({"limit_bytes"}),
        closes=True,
    ),
    "request-timeout": Rule(
        status=408,
        title="The request did not arrive in time",
        outcome=Outcome.REFUSED,
        next=Next.RETRY_SAME_KEY,
        effect=Effect.NONE,
        detail=f"The request stopped arriving before it was complete. {_NOT_WHOLE} Repeat it with the same key.",
        closes=True,
    ),
    "path-ambiguous": Rule(
        status=400,
        title="The path can be read in two ways",
        outcome=Outcome.REFUSED,
        next=Next.FIX_REQUEST,
        effect=Effect.NONE,
        detail="The path contains dot segments, doubled or encoded slashes, or a backslash, which services read "
        f"differently. {_NOT_SENT} Write the path plainly and send the request again.",
    ),
    "no-route": Rule(
        status=404,
        title="There is nothing here",
        outcome=Outcome.REFUSED,
        next=Next.FIX_REQUEST,
        effect=Effect.NONE,
        detail=f"This method and path are not served here. {_NOT_SENT} Check both and send the request again.",
    ),
    "key-reused": Rule(
        status=422,
        title="Idempotency-Key is already used",
        outcome=Outcome.MISMATCH,
        next=Next.NEW_KEY,
        effect=Effect.NONE,
        detail="This key came with a different request before. This request was not sent to the service. If it is a "
        "new operation, send it with a new key; if it is a retry, send it exactly as the first time.",
        members=frozenset({"first_seen", "original_status"}),
    ),
    "outstanding": Rule(
        status=409,
        title="A request is outstanding for this Idempotency-Key",
        outcome=Outcome.OUTSTANDING,
        next=Next.RETRY_SAME_KEY,
        effect=Effect.PENDING,
        detail="An earlier request with this key is still being carried out; this one was not sent to the service. "
        "Repeat it with the same key {wait} to get the answer.",
        retry_after=1,
        members=frozenset({"first_seen"}),
    ),
    "still-running": Rule(
        status=504,
        title="The service is still working on the request",
        outcome=Outcome.OUTSTANDING,
        next=Next.RETRY_SAME_KEY,
        effect=Effect.PENDING,
        detail="The request was sent and is still being carried out; its answer will be kept. Do not send it with "
        "another key. Repeat it with the same key {wait} to get the answer.",
        retry_after=0,
    ),
    "outcome-unknown": Rule(
        status=502,
        title="The service did not answer completely",
        outcome=Outcome.IN_DOUBT,
        next=Next.RETRY_SAME_KEY,
        effect=Effect.UNKNOWN,
        detail="The request was sent and may have taken effect. Do not send it again with another key. Repeat it with "
        "the same key {wait}, or look the outcome up.",
        blocked_detail="The request was sent and may have taken effect. It will not be carried out again by itself. Do "
        "not send it with another key; look the outcome up, or ask with the record's number.",
        members=frozenset({"cause"}),
        transport=True,
    ),
    "in-doubt": Rule(
        status=409,
        title="The outcome of the earlier request is unknown",
        outcome=Outcome.IN_DOUBT,
        next=Next.RETRY_SAME_KEY,
        effect=Effect.UNKNOWN,
        detail="An earlier request with this key was sent and may have taken effect; this one was not sent to the "
        "service. Do not use another key. Repeat it with the same key {wait}, or look the outcome up.",
        blocked_detail="An earlier request with this key was sent and may have taken effect; this one was not sent to "
        "the service, and none will be by itself. Do not use another key; look the outcome up, or ask with the "
        "record's number.",
        members=frozenset({"first_seen"}),
    ),
    "reply-not-stored": Rule(
        status=409,
        title="The answer was not kept",
        outcome=Outcome.REPLAYED,
        next=Next.DO_NOT_RETRY,
        effect=Effect.HAPPENED,
        detail="An earlier request with this key was carried out and answered with `original_status`, but its answer "
        "could not be kept. This one was not sent to the service. Do not repeat it; fetch the result from the service.",
        members=frozenset({"original_status", "location", "first_seen"}),
    ),
    "upstream-unreachable": Rule(
        status=503,
        title="The service could not be reached",
        outcome=Outcome.RELEASED,
        next=Next.RETRY_SAME_KEY,
        effect=Effect.NONE,
        detail=f"No connection to the service could be had. {_NOT_SENT} Repeat it with the same key {{wait}}.",
        retry_after=1,
        members=frozenset({"cause"}),
        transport=True,
    ),
    "store-unavailable": Rule(
        status=503,
        title="Protection is not available",
        outcome=Outcome.REFUSED,
        next=Next.RETRY_SAME_KEY,
        effect=Effect.NONE,
        detail=f"Whether this key was used before cannot be told at the moment. {_NOT_SENT} Repeat the request with "
        "the same key {wait}.",
        retry_after=5,
    ),
    "over-capacity": Rule(
        status=503,
        title="Too many requests at once",
        outcome=Outcome.REFUSED,
        next=Next.RETRY_SAME_KEY,
        effect=Effect.NONE,
        detail=f"No more requests can be taken at the moment. {_NOT_SENT} Repeat it with the same key {{wait}}.",
        retry_after=1,
    ),
    "draining": Rule(
        status=503,
        title="This process is stopping",
        outcome=Outcome.REFUSED,
        next=Next.RETRY_SAME_KEY,
        effect=Effect.NONE,
        detail=f"The process that took this request is stopping. {_NOT_SENT} Repeat the request with the same key "
        "{wait}, on a new connection.",
        retry_after=1,
        closes=True,
    ),
}
"""Every code, in the order in which a request meets them."""

_PHRASES: Final = {
    200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 408: "Request Timeout", 409: "Conflict",
    413: "Content Too Large", 417: "Expectation Failed", 422: "Unprocessable Content", 425: "Too Early",
    428: "Precondition Required", 429: "Too Many Requests", 431: "Request Header Fields Too Large",
    502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip
_encode = msgspec.json.Encoder().encode


def problem(
    code: str,
    *,
    type_base: str,
    request_id: str,
    record: str | None = None,
    status: int | None = None,
    retry_after: int | None = None,
    blocked: bool = False,
    **members: object,
) -> Problem:
    """Return one of the gateway's own answers.

    `record`: the 12 hex digits, None before there is one. `status` replaces the table's (a policy's choice for
    `key-reused`); by itself `outcome-unknown` is 504 for a cause that is a timeout, and `request-invalid` 417 for the
    reason `expectation`. `retry_after`: whole seconds.
    `blocked`: the policy never runs this again by itself. `members`: of the rule; None means absent. `reason` is a word
    of `identity.KeyFault` or `RequestFault`. Raises `KeyError` for a code, and `ValueError` for a member, that the
    table does not have.
    """
    rule = RULES[code]
    if not rule.members.issuperset(members):
        raise ValueError(f"Problem {code} has no member {', '.join(sorted(members.keys() - rule.members))}.")
    cause = members.get("cause")
    if status is None:
        timed_out = code == "outcome-unknown" and isinstance(cause, str) and cause.endswith("_timeout")
        status = 504 if timed_out else 417 if members.get("reason") == "expectation" else rule.status
    blocked = blocked and rule.blocked_detail is not None
    wait = None if blocked else rule.retry_after if retry_after is None else retry_after
    reason = str(members.get("reason", ""))
    first_lines, last_lines, begun = _common(code, type_base, status, wait, reason, blocked=blocked)
    content = {name: value for name, value in members.items() if value is not None}
    if record is not None:
        content["record"] = record
    content["request_id"] = request_id
    head = first_lines + marks(rule.outcome, record=record, request_id=request_id) + last_lines
    if rule.transport and cause:
        head += f"Proxy-Status: idempotency-gateway; error={cause}\r\n".encode("ascii")
    return Problem(code, status, rule.outcome, head, begun + _encode(content)[1:], rule.closes)


@lru_cache(maxsize=256)  # many waits, few of all else
def _common(
    code: str, type_base: str, status: int, wait: int | None, reason: str, *, blocked: bool
) -> tuple[bytes, bytes, bytes]:
    """What does not depend on the request: the lines before our marks and behind them, and the first members."""
    rule = RULES[code]
    following = Next.CHECK_OUTCOME if blocked else rule.next
    detail = rule.blocked_detail if blocked and rule.blocked_detail is not None else rule.detail
    content: dict[str, object] = {
        "type": type_base + code,
        "title": rule.title,
        "status": status,
        "code": code,
        "detail": detail.format(wait=_when(wait), reason=_REASONS.get(reason, reason)),
        "next": following,
        "effect": rule.effect,
    }
    if wait is not None:
        content["retry_after"] = wait
    first_lines = (
        f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n"
        "Content-Type: application/problem+json\r\nCache-Control: no-store\r\n"
    )
    last_lines = "" if wait is None else f"Retry-After: {wait}\r\n"
    last_lines += f"X-Should-Retry: {'true' if following is Next.RETRY_SAME_KEY else 'false'}\r\n"
    return first_lines.encode("ascii"), last_lines.encode("ascii"), _encode(content)[:-1] + b","


def _when(seconds: int | None) -> str:
    if seconds is None:
        return "later"
    return f"after {seconds} s" if seconds else "now"


__all__ = ["RULES", "Effect", "Next", "Problem", "Rule", "problem"]
