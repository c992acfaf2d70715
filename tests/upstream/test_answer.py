"""The reader of answers alone: how the bytes were cut into reads never matters."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.answer import ENDLESS, PROTOCOL_ERROR, AnswerReader

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


@given(cut=st.integers(0, 80), where=st.sampled_from([b"A: b\0c", b"A: bc\0", b"A: bc"]))
def test_a_nul_is_refused_in_a_head_and_welcome_in_a_body(cut: int, where: bytes) -> None:
    raw = b"HTTP/1.1 200 OK\r\n" + where + b"\r\nContent-Length: 3\r\n\r\n\0\0\0"
    reader = AnswerReader(1000)
    for _ in range(2 if b"\0" not in where else 1):
        reader.begin(head_only=False)
        for piece in (raw[:cut], raw[cut:]):
            reader.feed(piece)
        assert (reader.cause == PROTOCOL_ERROR) is (b"\0" in where)
        assert b"".join(reader.parts) == b"\0\0\0"


@pytest.mark.parametrize(
    ("lines", "at_head", "at_end"),
    [
        (b"Content-Length: 5", 5, 5),
        (b"X: y", 0, 5),
        (b"Content-Type: text/event-stream\r\nContent-Length: 5", ENDLESS, ENDLESS),
        (b"Content-Length: 5\r\nContent-Type: text/event-stream", ENDLESS, ENDLESS),
    ],
)
def test_the_size_is_what_is_known_of_a_body(lines: bytes, at_head: int, at_end: int) -> None:
    reader = AnswerReader(1000)
    reader.feed(b"HTTP/1.1 200 OK\r\n" + lines)
    assert reader.size == -1
    reader.feed(b"\r\n\r\n")
    assert reader.size == at_head
    reader.feed(b"hel")
    reader.feed(b"lo")
    assert (reader.size, b"".join(reader.take())) == (at_end, b"hello")


def result(reader: AnswerReader) -> tuple[object, ...]:
    return reader.head, b"".join(reader.parts), reader.complete, reader.cause, reader.reusable, reader.size
