"""The log: one line of JSON for each thing, gathered, and nobody's fault if the reader is gone."""

import io
import json
import time

import msgspec
import pytest

from gateway.log import Log, RequestLine

LINE = RequestLine(
    ts="2026-11-30T03:12:31.204Z",
    level="info",
    event="request",
    service="ledger-core",
    route="create-transfer",
    record="29808f52e400",
    request_id="01JDX3M0S2K7",
    outcome="executed",
    reason="",
    code="",
    status=201,
    attempt=2,
    took_over="expired",
    upstream="ledger",
    upstream_ms=212.0,
    overhead_ms=1.9,
    wait_ms=0.0,
    sent=True,
    bytes_in=311,
    bytes_out=188,
    client="10.4.2.7",
    user_agent="okhttp/4.12",
)


class Pipe(io.BytesIO):
    """An output that counts its writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, data) -> int:
        self.writes += 1
        return super().write(data)


class Broken(io.BytesIO):
    def write(self, data) -> int:
        raise BrokenPipeError


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


def lines(pipe: io.BytesIO) -> list[dict]:
    return [json.loads(line) for line in pipe.getvalue().splitlines()]


def test_a_requests_line_is_one_json_object_with_the_documented_members(pipe):
    log = Log("ledger-core", "info", pipe)
    log.request(LINE)
    log.flush()
    assert lines(pipe) == [msgspec.to_builtins(LINE)]
    assert list(lines(pipe)[0])[:6] == ["ts", "level", "event", "service", "route", "record"]


def test_a_requests_line_has_no_place_for_a_key_a_scope_or_a_body():
    assert not {"key", "scope", "tenant", "token", "body", "path", "host"} & set(RequestLine.__struct_fields__)


def test_lines_are_gathered_and_written_together(pipe):
    log = Log("s", "info", pipe)
    for _ in range(10):
        log.request(LINE)
    assert pipe.writes == 0
    log.flush()
    assert (pipe.writes, len(lines(pipe))) == (1, 10)
    log.flush()
    assert pipe.writes == 1


def test_many_lines_are_written_without_waiting(pipe):
    log = Log("s", "info", pipe)
    for _ in range(64):
        log.request(LINE)
    assert len(lines(pipe)) == 64


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_events_below_the_level_are_left_out_and_requests_never(pipe, threshold, kept):
    log = Log("s", threshold, pipe)
    for level in ("debug", "info", "warning", "error"):
        log.event("happened", level)
    log.request(LINE)
    log.flush()
    assert [line["level"] for line in lines(pipe)] == [*kept, "info"]
    assert lines(pipe)[-1]["event"] == "request"


def test_an_event_carries_its_facts_and_when(pipe):
    log = Log("ledger", "info", pipe)
    before = time.time()
    log.event("ran_again", "warning", record="29808f52e400", attempt=2, cause=None)
    log.flush()
    (line,) = lines(pipe)
    assert {name: line[name] for name in ("level", "event", "service", "record", "attempt", "cause")} == {
        "level": "warning",
        "event": "ran_again",
        "service": "ledger",
        "record": "29808f52e400",
        "attempt": 2,
        "cause": None,
    }
    assert log.timestamp(before) <= line["ts"] <= log.timestamp(time.time())


@pytest.mark.parametrize(
    ("unix", "text"),
    [
        (0.0, "1970-01-01T00:00:00.000Z"),
        (0.999, "1970-01-01T00:00:00.999Z"),
        (1796008351.2044, "2026-11-30T03:12:31.204Z"),
        (1796008351.9999, "2026-11-30T03:12:31.999Z"),
        (1796008352.0, "2026-11-30T03:12:32.000Z"),
    ],
)
def test_timestamps_are_rfc_3339_in_utc_with_milliseconds(unix, text):
    assert Log("s", out=io.BytesIO()).timestamp(unix) == text


def test_a_timestamp_does_not_depend_on_the_one_before():
    log = Log("s", out=io.BytesIO())
    assert [log.timestamp(unix) for unix in (10.5, 9.25, 10.5)] == [
        "1970-01-01T00:00:10.500Z",
        "1970-01-01T00:00:09.250Z",
        "1970-01-01T00:00:10.500Z",
    ]


def test_no_text_breaks_a_line(pipe):
    log = Log("s", "info", pipe)
    log.event("fault", "error", text='two\nlines\r\n"quoted" \u2028 \x00 end')
    log.request(msgspec.structs.replace(LINE, user_agent='agent\n{"event":"forged"}'))
    log.flush()
    assert pipe.getvalue().count(b"\n") == 2
    assert [line["event"] for line in lines(pipe)] == ["fault", "request"]


def test_a_text_that_is_no_unicode_does_not_stop_what_is_told(pipe):
    log = Log("s", "info", pipe)
    log.event("fault", "error", text="from the wire: \udce9")
    log.flush()
    assert lines(pipe)[0]["event"] == "fault"


def test_a_reader_that_went_away_stops_nothing():
    log = Log("s", "info", Broken())
    log.request(LINE)
    log.flush()
    closed = io.BytesIO()
    closed.close()
    log = Log("s", "info", closed)
    log.event("happened")
    log.flush()
    log.flush()
