"""Reads one answer after another from the bytes of a connection (RFC 9112), with llhttp. No socket, no clock.

llhttp is told to accept what every common client accepts and an old service may well send: folded header lines
(RFC 9112, section 5.2: a proxy unfolds them), a bare LF as line end in heads (section 2.2), spaces after a chunk's
size. An answer that cannot be read after the request took effect leaves a record in doubt, so strictness is not free.
Everything about framing stays strict: two lengths, or a length beside chunks, are an error.

Interim answers (1xx) are skipped. Trailers are dropped: they come after the head has been judged and relayed, and a
stored reply has no place for them. Bodies are never inflated.
"""

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.model import Headers, ReplyHead

PROTOCOL_ERROR = "http_protocol_error"
HEAD_TOO_LARGE = "http_response_header_section_size"
INCOMPLETE = "http_response_incomplete"
TERMINATED = "connection_terminated"
UPGRADED = "http_upgrade_failed"

_NO_CONTENT, _NOT_MODIFIED = 204, 304


class AnswerReader:
    """The answer being read: `begin`, then `feed` bytes and look at the attributes; `end` when no more will come.

    `head`: the final head, once it is complete. `parts`, `size`: body bytes read and not taken. `declared`: the
    Content-Length, -1 without one. `endless`: a content type that is a stream. `complete`: the whole answer was read.
    `surplus`: bytes came after it. `reusable`: the connection may carry another request. `cause`: why this is not and
    will not become an answer, as a proxy error type of RFC 9209, section 2.3.
    """

    __slots__ = (
        "_begun",
        "_head_limit_bytes",
        "_head_only",
        "_headers",
        "_interim",
        "_parser",
        "_reason",
        "_unclaimed",
        "cause",
        "complete",
        "declared",
        "endless",
        "head",
        "parts",
        "reusable",
        "size",
        "surplus",
    )

    def __init__(self, head_limit_bytes: int) -> None:
        self._head_limit_bytes = head_limit_bytes
        self._parser = self._new_parser()
        self._head_only = False
        self.begin(head_only=False)

    def _new_parser(self) -> HttpResponseParser:
        parser = HttpResponseParser(self)
        parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        return parser

    def begin(self, *, head_only: bool) -> None:
        """Expect the answer to a new request; `head_only` if that is a HEAD."""
        if self._head_only:
            self._parser = self._new_parser()  # httptools cannot be told of HEAD: the old one still waits for a body
        self._head_only = head_only
        self._begun = self._interim = False
        self._headers: Headers = []
        self._reason = b""
        self._unclaimed = 0  # bytes since the last interim head, head or piece of a body: bounds heads and trailers
        self.cause: str | None = None
        self.complete = False
        self.declared = -1
        self.endless = False
        self.head: ReplyHead | None = None
        self.parts: list[bytes] = []
        self.reusable = False
        self.size = 0
        self.surplus = False

    def feed(self, data: bytes) -> None:
        """Read on. After `cause` or `complete` is set, what comes counts as surplus or not at all."""
        self._unclaimed += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            if self.complete:
                self.surplus = True
            elif self.cause is None:
                self.cause = PROTOCOL_ERROR
        else:
            if self._unclaimed > self._head_limit_bytes and not self.complete and self.cause is None:
                self.cause = HEAD_TOO_LARGE

    def end(self) -> None:
        """Take note of an orderly end of the connection, which completes an answer that has no length."""
        self.reusable = False
        if self.complete or self.cause is not None:
            return
        if self.head is None:
            self.cause = INCOMPLETE if self._begun else TERMINATED
        elif _has_length(self.head.headers):
            self.cause = INCOMPLETE
        else:
            self.complete = True

    @property
    def ends_with_head(self) -> bool:
        """Whether there is no doubt where the answer ends, whatever follows it (RFC 9112, section 6.3)."""
        return self.head is not None and self.head.status in (_NO_CONTENT, _NOT_MODIFIED)

    def take(self) -> list[bytes]:
        """Hand over the body read so far; what comes later is counted anew."""
        parts, self.parts, self.size = self.parts, [], 0
        return parts

    # ---- what llhttp calls ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._begun = True
        if self.complete:
            self.surplus = True

    def on_status(self, reason: bytes) -> None:
        self._reason += reason  # in pieces when it crosses the border of two reads

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.head is not None:
            return
        status = self._parser.get_status_code()
        headers = self._headers
        if self._unclaimed > self._head_limit_bytes and _size(headers) > self._head_limit_bytes:
            self.cause = HEAD_TOO_LARGE
            return
        self._unclaimed = 0
        if status < 200:
            self._interim = True
            if status <= 101:
                self.cause = {100: None, 101: UPGRADED}.get(status, PROTOCOL_ERROR)
            return
        self.reusable = True
        for name, value in headers:
            size = len(name)
            if size == 14 and name.lower() == b"content-length":
                self.declared = int(value)
            elif size == 12 and name.lower() == b"content-type":
                self.endless = value.lower().startswith((b"text/event-stream", b"multipart/x-mixed-replace"))
            if 0 in value:
                self.cause = PROTOCOL_ERROR  # RFC 9110, section 5.5: refuse NUL, or replace it
        self.head = ReplyHead(status, self._reason, headers)
        self._headers = []  # whatever comes now is a trailer
        if self._head_only:
            self.complete = True
            self.reusable = self._parser.should_keep_alive()
        elif status in (_NO_CONTENT, _NOT_MODIFIED):
            self._distrust_if_body_follows(status)

    def on_body(self, data: bytes) -> None:
        if self.complete:
            self.surplus = True
            return
        self._unclaimed = 0
        self.parts.append(data)
        self.size += len(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = self._begun = False
            self._headers = []
            self._reason = b""
        elif not self.complete:
            self.complete = True
            self.reusable = self.reusable and self._parser.should_keep_alive()

    def _distrust_if_body_follows(self, status: int) -> None:
        """Some services send a body with a 204 all the same; it would be read as the next answer."""
        chunked = self.head is not None and any(n.lower() == b"transfer-encoding" for n, _ in self.head.headers)
        if chunked or (self.declared > 0 and status == _NO_CONTENT):
            self.reusable = False


def _size(headers: Headers) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _has_length(headers: Headers) -> bool:
    """Whether the end of the body is told by something else than the connection's end (RFC 9112, section 6.3)."""
    chunked = False
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"content-length":
            return True
        if lowered == b"transfer-encoding":
            chunked = value.rpartition(b",")[2].strip().lower() == b"chunked"
    return chunked
