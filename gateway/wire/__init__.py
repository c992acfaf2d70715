"""Header lines as they cross the gateway, both ways, and the answers it makes itself. Pure: bytes in, bytes out.

`requests` decides which lines go to the upstream, `replies` which go to the client and which are kept for a replay,
and frames what is sent; `problems` is the closed table of the gateway's own answers. Sockets, clocks and logging are
elsewhere; what a key or a scope means is `identity`.
"""

from gateway.wire.problems import RULES, Effect, Next, Problem, Rule, problem
from gateway.wire.replies import (
    LAST_CHUNK,
    NOT_KEPT,
    OWN,
    ReplyLines,
    StreamHead,
    answer,
    chunk,
    has_request_id,
    http_date,
    location_of,
    marks,
    no_body,
    reply_heads,
    stream_head,
    timestamp,
)
from gateway.wire.requests import (
    HOP_BY_HOP,
    Peer,
    RequestFault,
    fault,
    fields,
    forward_head,
    forward_lines,
    guarded,
    nominated,
    origin_form,
    request_id,
)

__all__ = [
    "HOP_BY_HOP",
    "LAST_CHUNK",
    "NOT_KEPT",
    "OWN",
    "RULES",
    "Effect",
    "Next",
    "Peer",
    "Problem",
    "ReplyLines",
    "RequestFault",
    "Rule",
    "StreamHead",
    "answer",
    "chunk",
    "fault",
    "fields",
    "forward_head",
    "forward_lines",
    "guarded",
    "has_request_id",
    "http_date",
    "location_of",
    "marks",
    "no_body",
    "nominated",
    "origin_form",
    "problem",
    "reply_heads",
    "request_id",
    "stream_head",
    "timestamp",
]
