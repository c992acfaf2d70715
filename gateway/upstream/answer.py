"""Reads one answer after another from the bytes of a connection (RFC 9112), with llhttp. No socket, no clock.

llhttp is told to accept what every common client accepts and an old service may well send: folded header lines
(RFC 9112, section 5.2: a proxy unfolds them), a bare LF as line end in heads (section 2.2), spaces after a chunk's
size. An answer that cannot be read after the request took effect leaves a record in doubt, so strictness is not free.
Everything about framing stays strict: two lengths, or a length beside chunks, are an error.

Interim answers (1xx) are skipped. Trailers are dropped: they come after the head has been judged and relayed, and a
stored reply has no place for them. Bodies are never inflated.
"""

import sys

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.model import Headers, ReplyHead

PROTOCOL_ERROR = "http_protocol_error"
HEAD_TOO_LARGE = "http_response_header_section_size"
INCOMPLETE = "http_response_incomplete"
TERMINATED = "connection_terminated"
UPGRADED = "http_upgrade_failed"

ENDLESS = sys.maxsize
"""The size of a body whose content type is a stream: more than any limit."""

_NO_CONTENT = 204
_END_WITH_HEAD = (_NO_CONTENT, 304)


class AnswerReader:
    """The answer being read: `begin`, then `feed` bytes and look at the attributes; `end` when no more will come.

    `head`: the final head, once it is complete. `parts`: body bytes read and not taken. `size`: how many bytes the
    body has at least, as declared, else as read so far; `ENDLESS` if its type says so, -1 as long as there is no head.
    `complete`: the whole answer was read.

    Three speak about the connection too, and nothing takes them back, `begin` neither. `surplus`: bytes came after the
    answer. `reusable`, once it is complete: the connection may carry another request. `cause`: why this is not and will
    not become an answer, as a proxy error type of RFC 9209, section 2.3.
    """

    __slots__ = (
        "_begun",
        "_counting",
        "_head_limit_bytes",
        "_head_only",
        "_headers",
        "_interim",
        "_nul",
        "_parser",
        "_reason",
        "_unclaimed",
        "cause",
        "complete",
        "head",
        "parts",
        "reusable",
        "size",
        "surplus",
    )

    def __init__(self, head_limit_bytes: int) -> None:
        self._head_limit_bytes = head_limit_bytes
        self._parser = self._new_parser()
        self._head_only = self._interim = False
        self._nul = False  # one was fed since the last head was judged
        self._counting = False  # the body has no declared length
        self.cause: str | None = None
        self.reusable = True
        self.surplus = False
        self.begin(head_only=False)

    def _new_parser(self) -> HttpResponseParser:
        parser = HttpResponseParser(self)
        parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        return parser

    def begin(self, *, head_only: bool) -> None:
        """Expect the answer to a new request; `head_only` if that is a HEAD. Only where the last left it `reusable`."""
        if self._head_only:
            self._parser = self._new_parser()  # httptools cannot be told of HEAD: the old one still waits for a body
        self._head_only = head_only
        self._begun = False
        self._headers: Headers = []
        self._reason = b""
        self._unclaimed = 0  # bytes since the last interim head, head or piece of a body: bounds heads and trailers
        self.complete = False
        self.head: ReplyHead | None = None
        self.parts: list[bytes] = []
        self.size = -1

    def feed(self, data: bytes) -> None:
        """Read on. After `cause` or `complete` is set, what comes counts as surplus or not at all."""
        self._unclaimed += len(data)
        if self.head is None and 0 in data:
            self._nul = True
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            if self.complete:
                self._note_surplus()
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
        return self.head is not None and self.head.status in _END_WITH_HEAD

    def take(self) -> list[bytes]:
        """Hand over the body read so far."""
        parts, self.parts = self.parts, []
        return parts

    # ---- what llhttp calls ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._begun = True
        if self.complete:
            self._note_surplus()

    def on_status(self, reason: bytes) -> None:
        self._reason += reason  # in pieces when it crosses the border of two reads

    def on_header(self, *line: *tuple[bytes, bytes]) -> None:
        self._headers.append(line)  # name and value

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
        declared: int | None = None
        endless = False
        for name, value in headers:
            size = len(name)
            if size == 14 and name.lower() == b"content-length":
                declared = int(value)
            elif size == 12 and name.lower() == b"content-type":
                endless = value.lower().startswith((b"text/event-stream", b"multipart/x-mixed-replace"))
        if self._nul:
            self._nul = False
            if any(0 in value for _, value in headers):
                self.cause = PROTOCOL_ERROR  # RFC 9110, section 5.5: refuse NUL, or replace it
        self.head = ReplyHead(status, self._reason, headers)
        self._headers = []  # whatever comes now is a trailer
        self._counting = declared is None
        self.size = ENDLESS if endless else declared or 0
        if self._head_only:
            self.complete = True
            self.reusable = self._parser.should_keep_alive()
        elif status in _END_WITH_HEAD:
            self._distrust_if_body_follows(self.head, declared or 0)

    def on_body(self, data: bytes) -> None:
        if self.complete:
            self._note_surplus()
            return
        self._unclaimed = 0
        self.parts.append(data)
        if self._counting:
            self.size += len(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = self._begun = False
            self._headers = []
            self._reason = b""
        elif not self.complete:
            self.complete = True
            if not self._parser.should_keep_alive():
                self.reusable = False

    def _note_surplus(self) -> None:
        self.surplus = True
        self.reusable = False

    def _distrust_if_body_follows(self, head: ReplyHead, declared: int) -> None:
        """Some services send a body with a 204 all the same; it would be read as the next answer."""
        chunked = any(name.lower() == b"transfer-encoding" for name, _ in head.headers)
        if chunked or (declared > 0 and head.status == _NO_CONTENT):
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
