"""Configuration: a YAML file to a complete, frozen, checked tree, or to every fault at once. No network, no clock.

`load` is the way in. `source` reads YAML, `tree` says the shape, `layers` puts policies together, `checks` finds what
is at odds, `policy` is what the request path reads, `promise` and `sizing` say in words and numbers what it means.
"""

from gateway.config.load import Config, RouteConfig, load
from gateway.config.match import Pattern, Prefix, Wild
from gateway.config.policy import (
    BodyForm,
    FingerprintSettings,
    ForwardKey,
    KeySource,
    Mode,
    OnMismatch,
    OnMissingKey,
    OnOutstanding,
    OnStoreFailure,
    Outcomes,
    Policy,
    ScopePart,
)
from gateway.config.secret import Secret
from gateway.config.tree import Janitor, Limits, Log, Problems, Shutdown, Store, Upstream
from gateway.errors import ConfigError

__all__ = [
    "BodyForm", "Config", "ConfigError", "FingerprintSettings", "ForwardKey", "Janitor", "KeySource", "Limits", "Log",
    "Mode", "OnMismatch", "OnMissingKey", "OnOutstanding", "OnStoreFailure", "Outcomes", "Pattern", "Policy", "Prefix",
    "Problems", "RouteConfig", "ScopePart", "Secret", "Shutdown", "Store", "Upstream", "Wild", "load",
]  # fmt: skip
