"""The reader of answers alone: how the bytes were cut into reads never matters."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.answer import AnswerReader

LINES = [b"X-Empty:", b"X-A: b", b"X-A:  c ", b"x-OBS: \xff\xe9", b"Set-Cookie: a=b; c"]
FRAMINGS = [
    (b"Content-Length: 11", b"hello world"),
    (b"Transfer-Encoding: chunked", b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n"),
    (b"Transfer-Encoding: chunked", b"b\r\nhello world\r\n0\r\nX-Trailer: t\r\n\r\n"),
    (b"Connection: x", b"hello world"),
]
INTERIM = [b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nLink: l\r\n\r\n"]


@given(
    interim=st.lists(st.sampled_from(INTERIM), max_size=2),
    lines=st.lists(st.sampled_from(LINES), max_size=4),
    framing=st.sampled_from(FRAMINGS),
    cuts=st.lists(st.integers(0, 260), max_size=12),
    cut_off=st.integers(0, 40),
)
def test_an_answer_is_read_the_same_however_it_is_cut(interim, lines, framing, cuts, cut_off) -> None:
    raw = b"".join(interim) + b"\r\n".join([b"HTTP/1.1 201 Made it", *lines, framing[0]]) + b"\r\n\r\n" + framing[1]
    raw = raw[: len(raw) - cut_off]
    whole, pieces = AnswerReader(1000), AnswerReader(1000)
    for _ in range(2):  # the second time on the same connection, if the first answer was complete
        for reader in (whole, pieces):
            reader.begin(head_only=False)
        whole.feed(raw)
        edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
        for start, end in itertools.pairwise(edges):
            pieces.feed(raw[start:end])
        for reader in (whole, pieces):
            if not reader.complete:
                reader.end()
        assert result(whole) == result(pieces)
        if not whole.reusable:
            break
    if not cut_off:
        assert whole.complete
        assert whole.head is not None
        assert b"".join(whole.parts) == b"hello world"
        assert [name for name, _ in whole.head.headers[:-1]] == [line.split(b":")[0] for line in lines]


def result(reader: AnswerReader) -> tuple[object, ...]:
    return reader.head, b"".join(reader.parts), reader.complete, reader.cause, reader.reusable, reader.declared
