"""The configuration as a file writes it: one frozen model per section, YAML names as aliases, units in attributes.

Fields of a policy are all optional here, because each layer says only what differs; `layers` puts them together.
What a section's `later` names belongs to the dialect and is refused as not built yet.
"""

from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from gateway.config import policy, scalars
from gateway.config.match import Pattern, Prefix
from gateway.config.scalars import Count, Duration, Flag, Size, Text, Word, refuse, words
from gateway.config.secret import Secret
from gateway.config.source import shown
from gateway.config.units import duration_ms, size_bytes
from gateway.errors import GatewayError
from gateway.model import OnInDoubt


def _duration(alias: str, text: str) -> Any:
    return Field(default=duration_ms(text), alias=alias, json_schema_extra={"default": text})


def _size(alias: str, text: str) -> Any:
    return Field(default=size_bytes(text), alias=alias, json_schema_extra={"default": text})


def _open(alias: str | None = None) -> Any:
    """A field that a layer may leave out; `model_fields_set` says whether it did."""
    return Field(default=None, alias=alias)


class Section(BaseModel):
    """A map of the file. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    later: ClassVar[tuple[str, ...]] = ()


class Listen(Section):
    """Where requests are taken: an address, or a list of one."""

    later: ClassVar[tuple[str, ...]] = ("tls", "ping_path")
    address: Annotated[str, scalars.Address] = "0.0.0.0:8080"

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, list):
            if len(value) != 1:
                raise refuse(f"a list of other than one address {scalars.NOT_BUILT}; write one")
            value = value[0]
        if isinstance(value, int):
            raise refuse(f"must be host:port, as in 0.0.0.0:{value}")
        return {"address": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        own = handler(core)
        return {"anyOf": [{"type": "string"}, own, {"type": "array", "items": own, "minItems": 1, "maxItems": 1}]}


class Monitor(Section):
    """Where health and metrics are served."""

    listen: Annotated[str, scalars.Address] = "0.0.0.0:9090"


class Shutdown(Section):
    """`delay_ms`: not ready, still serving. `timeout_ms`: what runs may finish."""

    delay_ms: Annotated[int, Duration("0s", "10m")] = _duration("delay", "5s")
    timeout_ms: Annotated[int, Duration("1s", "24h")] = _duration("timeout", "35s")


class Log(Section):
    """What is logged."""

    later: ClassVar[tuple[str, ...]] = ("format", "key")
    level: Annotated[str, Word({name: name for name in ("debug", "info", "warning", "error")})] = "info"
    requests: Annotated[str, Word({"all": "all"}, ("problems",))] = "all"


class Limits(Section):
    """Bounds of one process."""

    later: ClassVar[tuple[str, ...]] = ("connections", "waiters", "waiters_per_key", "head_timeout")
    in_flight: Annotated[int, Count(1, 100_000)] = 256
    buffer_memory_bytes: Annotated[int, Size("1MiB", "64GiB")] = _size("buffer_memory", "128MiB")
    head_size_bytes: Annotated[int, Size("1KiB", "1MiB")] = _size("head_size", "32KiB")
    body_timeout_ms: Annotated[int, Duration("100ms", "1h")] = _duration("body_timeout", "60s")
    replay_cache_bytes: Annotated[int, Size("0B", "64GiB")] = _size("replay_cache", "32MiB")


class Problems(Section):
    """Where problem types point."""

    later: ClassVar[tuple[str, ...]] = ("format",)
    type_base: Annotated[str, Text(r"[!#-;=?-\[\]_a-z~]{1,500}", "a URI or its beginning")] = (
        "/.well-known/idempotency#"
    )


class Janitor(Section):
    """Background upkeep of the tables."""

    enabled: Annotated[bool, Flag()] = True
    interval_ms: Annotated[int, Duration("1s", "1h")] = _duration("interval", "60s")
    batch: Annotated[int, Count(1, 100_000)] = 1000


class Store(Section):
    """PostgreSQL."""

    later: ClassVar[tuple[str, ...]] = ("encryption", "events_retention")
    dsn: Annotated[Secret, scalars.Dsn]
    schema_name: Annotated[
        str, Text(r"(?!pg_)[a-z_][a-z0-9_]{0,62}", "a PostgreSQL schema name in lower case, not beginning with pg_")
    ] = Field(default="idempotency", alias="schema")
    pool_mode: Annotated[str, Word({"session": "session", "transaction": "transaction"})] = "session"
    pool_size: Annotated[int, Count(1, 100)] = 4
    timeout_ms: Annotated[int, Duration("10ms", "60s")] = _duration("timeout", "2s")
    janitor: Janitor = Janitor()

    def read_dsn(self) -> str:
        """The DSN now: a file is read again each time. Raises GatewayError, also for what is no DSN."""
        text = self.dsn.read()
        if not scalars.is_dsn(text):
            raise GatewayError(
                f"What stands in {self.dsn.place} is no DSN; put one there, such as postgresql://user@host/name."
            )
        return text

    @property
    def embedded(self) -> bool:
        """Whether the process runs a PostgreSQL of its own."""
        return self.dsn.kind == "embedded"


class Upstream(Section):
    """One service behind. `serves` is empty in a file with a single upstream that leaves it out."""

    later: ClassVar[tuple[str, ...]] = ("urls", "tls", "store")
    url: Annotated[str, scalars.Url]
    serves: tuple[Annotated[Prefix, scalars.Serves], ...] = ()
    connect_timeout_ms: Annotated[int, Duration("10ms", "60s")] = _duration("connect_timeout", "2s")
    max_connections: Annotated[int, Count(1, 100_000)] = 256
    keep_alive: Annotated[bool, Flag()] = True
    idle_timeout_ms: Annotated[int, Duration("10ms", "1h")] = _duration("idle_timeout", "4s")
    host: Annotated[str, Word({"keep": "keep", "upstream": "upstream"})] = "keep"

    @property
    def tls(self) -> bool:
        """Whether it is spoken to by https."""
        return self.url.startswith("https:")

    @property
    def authority(self) -> str:
        """Host and, if written, port, as a Host header says them."""
        return urlsplit(self.url).netloc

    @property
    def host_name(self) -> str:
        """The host to connect to, without brackets."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """The port to connect to."""
        return urlsplit(self.url).port or (443 if self.tls else 80)


# ---- the fields of a policy -------------------------------------------------------------------------------------


class OrWord:
    """An annotation: this word may stand for that value of the annotated type."""

    def __init__(self, word: str, value: Any, *, later: tuple[str, ...] = ()) -> None:
        self.word, self.value, self.later = word, value, later

    def _read(self, value: Any) -> Any:
        if isinstance(value, str):
            if value == self.word:
                return self.value
            raise refuse(f"must be `{self.word}` or a map, not {shown(value)}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"const": self.word}, handler(core)]}


class ScopePart(Section):
    """A header, or the digest of the credentials in `Authorization`."""

    later: ClassVar[tuple[str, ...]] = ("jwt", "claim", "client_cert", "forwarded_client_cert")
    header: Annotated[str, scalars.HeaderName] = _open()
    set_by: Annotated[str, Word({"trusted_proxies": "trusted_proxies"})] = _open()
    authorization: Annotated[str, Word({"digest": "digest"})] = _open()

    @model_validator(mode="after")
    def _one_source(self) -> "ScopePart":
        header, digest = "header" in self.model_fields_set, "authorization" in self.model_fields_set
        if header == digest:
            raise refuse("must have one source: {header: NAME} or {authorization: digest}")
        if digest and "set_by" in self.model_fields_set:
            raise refuse("has `set_by` beside authorization; it belongs to a header")
        if header and self.header.lower() in {"authorization", "proxy-authorization", "cookie", "set-cookie"}:
            raise refuse(
                f"the header {self.header} is a credential and would be stored readable; "
                "write {authorization: digest}, or a header that names the caller"
            )
        return self


class Key(Section):
    """Where the key stands."""

    later: ClassVar[tuple[str, ...]] = ("syntax",)
    header: Annotated[str, scalars.HeaderName] = _open()
    max_length: Annotated[int, Count(1, 1024)] = _open()

    @model_validator(mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise refuse(f"a list of sources {scalars.NOT_BUILT}; write {{header: NAME}}")
        return value


class OnMismatch(Section):
    """How another request under a used key is answered."""

    later: ClassVar[tuple[str, ...]] = ("explain",)
    status: Annotated[int, Count(400, 499)] = _open()

    @model_validator(mode="before")
    @classmethod
    def _map(cls, value: Any) -> Any:
        if value == "replay":
            raise refuse(f"`replay` {scalars.NOT_BUILT}; write {{status: 422}}")
        return value


class Fingerprint(Section):
    """What tells one request from another."""

    later: ClassVar[tuple[str, ...]] = ("exclude",)
    body: Annotated[policy.BodyForm, Word(words(policy.BodyForm), ("form", "multipart", "text"))] = _open()
    query: Annotated[bool, Flag()] = _open()
    headers: tuple[Annotated[str, scalars.HeaderName], ...] = _open()


Statuses = tuple[Annotated[int | str, scalars.Status], ...]


class Outcomes(Section):
    """Differences in how a status settles a record."""

    later: ClassVar[tuple[str, ...]] = ("when", "from_header")
    store: Statuses = ()
    release: Statuses = ()
    hold: Statuses = ()


class PolicyFields(Section):
    """One layer of a policy: any of its fields."""

    later: ClassVar[tuple[str, ...]] = ("replay", "max_attempts")
    extends: Annotated[str, scalars.PolicyName] = _open()
    mode: Annotated[policy.Mode, Word(words(policy.Mode), ("observe",))] = _open()
    scope: Annotated[dict[str, ScopePart], OrWord("none", {})] = _open()
    key: Key = _open()
    on_missing_key: Annotated[policy.OnMissingKey, Word(words(policy.OnMissingKey))] = _open()
    on_outstanding: Annotated[policy.OnOutstanding, Word(words(policy.OnOutstanding), ("wait",))] = _open()
    on_mismatch: OnMismatch = _open()
    on_in_doubt: Annotated[OnInDoubt, Word(words(OnInDoubt, but=frozenset({OnInDoubt.PROBE})), ("probe",))] = _open()
    on_store_failure: Annotated[policy.OnStoreFailure, Word(words(policy.OnStoreFailure))] = _open()
    fingerprint: Fingerprint = _open()
    outcomes: Outcomes = _open()
    retention_ms: Annotated[int, Duration("1s", "366d")] = _open("retention")
    longest_retry_ms: Annotated[int, Duration("1ms", "366d")] = _open("longest_retry")
    lease_ttl_ms: Annotated[int, Duration("1s", "24h")] = _open("lease_ttl")
    upstream_timeout_ms: Annotated[int, Duration("10ms", "24h")] = _open("upstream_timeout")
    respond_within_ms: Annotated[int, Duration("10ms", "24h")] = _open("respond_within")
    effect_deadline_ms: Annotated[int, Duration("10ms", "20d")] = _open("effect_deadline")
    max_request_body_bytes: Annotated[int, Size("0B", "1GiB")] = _open("max_request_body")
    max_response_body_bytes: Annotated[int, Size("0B", "256MiB")] = _open("max_response_body")
    forward_key: Annotated[policy.ForwardKey, Word(words(policy.ForwardKey), ("derive",))] = _open()


class PolicyOrName(PolicyFields):
    """A name alone means: extends that policy."""

    @model_validator(mode="before")
    @classmethod
    def _name(cls, value: Any) -> Any:
        return {"extends": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(core)]}


class _ListOfOne:
    """An annotation: an item alone means a list of it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: value if isinstance(value, list) else [value], handler(source)
        )

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        many = handler(core)
        return {"anyOf": [many["items"], many]}


class RouteFields(PolicyFields):
    """A route: what it matches, and a layer of its own."""

    match: Annotated[tuple[Annotated[Pattern, scalars.Match], ...], Field(min_length=1), _ListOfOne()]
    operation: Annotated[str, Text(r"[!-~]{1,128}", "a text of printable ASCII without spaces, at most 128")] = _open()
    policy: PolicyOrName = _open()


class File(Section):
    """The whole file."""

    later: ClassVar[tuple[str, ...]] = (
        "include", "admin", "workers", "tracing", "well_known", "cors", "lookup", "stores", "jwt", "probes",
    )  # fmt: skip
    service: Annotated[str, scalars.Name]
    listen: Listen = Listen()
    monitor: Monitor = Monitor()
    shutdown: Shutdown = Shutdown()
    log: Log = Log()
    trusted_proxies: tuple[Annotated[scalars.IPNetwork, scalars.Network], ...] = ()
    limits: Limits = Limits()
    problems: Problems = Problems()
    store: Store
    upstreams: Annotated[dict[str, Upstream], Field(min_length=1)]
    unmatched: Annotated[str, Word({"forward": "forward", "reject": "reject"})] = "forward"
    policies: dict[str, PolicyFields] = Field(default_factory=dict)
    defaults: PolicyOrName = _open()
    routes: Annotated[dict[str, RouteFields], Field(min_length=1)]


def fields_by_alias(section: type[Section]) -> dict[str, FieldInfo]:
    """The fields of a section by the names that a file uses."""
    return {info.alias or name: info for name, info in section.model_fields.items()}
