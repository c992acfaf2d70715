"""Whose key it is: syntax of the key, parts of the scope, ids that never meet."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.policy import KeySource, ScopePart
from gateway.identity import Identifier, Refusal, read_key
from gateway.model import Identity
from gateway.wire import fields

KEY = KeySource(b"idempotency-key", "Idempotency-Key", 255)
CUSTOMER = ScopePart("customer", "header", b"x-customer-id", False)
TENANT = ScopePart("tenant", "header", b"x-tenant", False)
ACCOUNT = ScopePart("account", "header", b"x-account", True)
CALLER = ScopePart("caller", "authorization", b"authorization", False)


def identity(*lines, scope=(CUSTOMER,), trusted=False, key=KEY, service="ledger", operation="create"):
    headers = [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in lines]
    identifier = Identifier(scope, key, service=service, operation=operation)
    return identifier.identify(fields(headers), peer_trusted=trusted)


def record_id(service, operation, parts, key):
    scope = [ScopePart(name, "header", b"x", False) for name, _ in parts]
    identifier = Identifier(scope, KEY, service=service, operation=operation)
    return identifier.record_id([value for _, value in sorted(parts)], key)


def keyed(*values, name="Idempotency-Key"):
    return identity(*[(name, value) for value in values], ("X-Customer-Id", "C-1"))


# ---- the key ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (["a", "a"], "repeated"),
        (["a", "b"], "repeated"),
        (["a", ""], "repeated"),
        (["a, b"], "repeated"),
        (["a,b"], "repeated"),
        (['"a", "b"'], "repeated"),
        (['"a" , "a"'], "repeated"),
        ([""], "empty"),
        (["  \t "], "empty"),
        (['""'], "empty"),
        (["x" * 256], "too_long"),
        (["x" * 6000], "too_long"),
        (["x" * 8000], "too_long"),
        (['"' + "x" * 256 + '"'], "too_long"),
        ([b"k\xe9y"], "not_printable"),
        (["ké"], "not_printable"),
        ([b"k\xed\xb3\xa9y"], "not_printable"),
        (["a\tb"], "not_printable"),
        (["a\x00b"], "not_printable"),
        (["a\x7fb"], "not_printable"),
        (['"a\tb"'], "not_printable"),
        (['"'], "not_a_string"),
        (['"abc'], "not_a_string"),
        (['"abc"x'], "not_a_string"),
        (['"abc";v=1'], "not_a_string"),
        (['"abc" x'], "not_a_string"),
        (['"a\\bc"'], "not_a_string"),
        (['"abc\\"'], "not_a_string"),
        (['"abc\\'], "not_a_string"),
        (['"a"b"'], "not_a_string"),
        (['"a\\"b"c"'], "not_a_string"),
    ],
)
def test_c18_an_unusable_key_is_refused_with_its_reason(values, reason):
    assert keyed(*values) == Refusal("key-invalid", {"reason": reason})


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("abc", "abc"),
        ('"abc"', "abc"),
        ("  abc\t", "abc"),
        ('  "abc" ', "abc"),
        ("a b  c", "a b  c"),
        ('" a "', " a "),
        ('"a, b"', "a, b"),
        ('"a\\"b\\\\c"', 'a"b\\c'),
        ('a"b', 'a"b'),
        ("a\\b", "a\\b"),
        ("abc;v=1", "abc;v=1"),
        (":YWJj:", ":YWJj:"),
        ("x" * 255, "x" * 255),
        ('"' + '\\"' * 255 + '"', '"' * 255),
    ],
)
def test_c18_a_key_is_a_quoted_string_or_stands_bare(value, key):
    found = keyed(value)
    assert isinstance(found, Identity)
    assert found.key == key


def test_c18_the_quoted_and_the_bare_form_are_the_same_record():
    assert keyed('"abc"') == keyed("abc") == keyed("abc", name="IDEMPOTENCY-key")


def test_c18_a_missing_key_is_told_apart_and_found_before_the_scope_is_looked_at():
    assert identity() == Refusal("key-missing", {"header": "Idempotency-Key"})
    assert keyed("k") != identity(("Idempotency-Key", "k"))


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=60))
def test_any_printable_key_survives_quoting(key):
    quoted = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert read_key(quoted.encode(), 255) == (key, None)


@given(st.binary(max_size=300))
def test_no_value_raises_and_every_accepted_key_is_printable_and_short(value):
    key, fault = read_key(value, 255)
    if fault is None:
        assert key.isascii()
        assert key.isprintable()
        assert 0 < len(key) <= 255
    else:
        assert key == ""


# ---- the scope --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[], ["a", "a"], ["a", "b"], [""], [" "], ["é"], ["a\tb"], ["a\x00"], ["x" * 1025]])
def test_c09f_a_part_that_is_absent_repeated_or_not_plain_text_is_refused(values):
    found = identity(("Idempotency-Key", "k"), *[("X-Customer-Id", value) for value in values])
    assert found == Refusal("scope-missing", {"part": "customer", "header": "X-Customer-Id"})


def test_c09a_two_bearer_tokens_are_two_scopes_and_neither_is_shown():
    one = identity(("Idempotency-Key", "k"), ("Authorization", "Bearer one-secret"), scope=[CALLER])
    two = identity(("Idempotency-Key", "k"), ("Authorization", "Bearer two-secret"), scope=[CALLER])
    assert one.record_id != two.record_id
    assert one.scope != two.scope
    assert "secret" not in repr(one) + repr(two)


@pytest.mark.parametrize(
    "lines", [[], [""], ["Bearer"], ["Bearer  "], ["Bearer a", "Bearer a"], ["Bearer a", "Basic b"]]
)
def test_c09c_no_usable_credentials_are_no_scope_of_their_own(lines):
    found = identity(("Idempotency-Key", "k"), *[("Authorization", line) for line in lines], scope=[CALLER])
    assert found == Refusal("scope-missing", {"part": "caller", "header": "Authorization"})


def test_the_scheme_of_credentials_counts_in_any_case_and_the_rest_exactly():
    def with_(value):
        return identity(("Idempotency-Key", "k"), ("Authorization", value), scope=[CALLER])

    assert with_("Bearer a") == with_("bearer a") == with_("BEARER   a ")
    assert with_("Bearer a") != with_("Bearer A")
    assert with_("Bearer a") != with_("Basic a")


def test_c09d_a_new_token_changes_nothing_where_the_scope_is_an_account_header():
    lines = [("Idempotency-Key", "k"), ("X-Customer-Id", "C-1")]
    assert identity(*lines, ("Authorization", "Bearer 1")) == identity(*lines, ("Authorization", "Bearer 2"))


def test_c09e_a_part_that_a_proxy_should_set_is_believed_from_trusted_peers_only():
    lines = [("Idempotency-Key", "k"), ("X-Account", "7")]
    assert isinstance(identity(*lines, scope=[ACCOUNT], trusted=True), Identity)
    forged = Refusal("scope-forged", {"part": "account"})
    assert identity(*lines, scope=[ACCOUNT]) == forged
    assert identity(*lines, ("X-Account", "7"), scope=[ACCOUNT]) == forged
    assert identity(("Idempotency-Key", "k"), ("X-Account", ""), scope=[ACCOUNT]) == forged
    assert identity(lines[0], scope=[ACCOUNT]) == Refusal("scope-missing", {"part": "account", "header": "X-Account"})


def test_a_scope_of_none_needs_nothing_but_the_key():
    found = identity(("Idempotency-Key", "k"), scope=[])
    assert found.scope == ""
    assert found.key == "k"


def test_a_readable_scope_is_sorted_by_name_and_its_separator_is_escaped():
    lines = [("Idempotency-Key", "k"), ("X-Tenant", "x"), ("X-Customer-Id", "C-4711")]
    found = identity(*lines, scope=[TENANT, CUSTOMER])
    assert found.scope == "customer=C-4711,tenant=x"
    assert found == identity(*lines, scope=[CUSTOMER, TENANT])
    odd = identity(("Idempotency-Key", "k"), ("X-Tenant", "1%2C"), ("X-Customer-Id", "x,b=y"), scope=[TENANT, CUSTOMER])
    assert odd.scope == "customer=x%2Cb=y,tenant=1%252C"


# ---- ids that never meet ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [":", "|", "/", "%3A", "=", ",", "\x1f", "\x00"])
def test_c09b_no_separator_makes_two_identities_meet(separator):
    ids = {
        record_id("s", "o", [("t", f"a{separator}b")], "c"),
        record_id("s", "o", [("t", "a")], f"b{separator}c"),
        record_id("s", f"o{separator}a", [], "c"),
        record_id(f"s{separator}o", "a", [], "c"),
        record_id("s", "o", [("t", "a"), ("b", "c")], "c"),
        record_id("s", "o", [("t", f"a{separator}b{separator}c")], "c"),
    }
    assert len(ids) == 6


@given(
    st.lists(
        st.tuples(st.text(max_size=3), st.text(max_size=3), st.text(max_size=3)), min_size=2, max_size=5, unique=True
    )
)
def test_different_identities_have_different_ids(identities):
    ids = {record_id(operation, "o", [("p", scope)], key) for operation, scope, key in identities}
    assert len(ids) == len(identities)


def test_service_operation_scope_and_key_each_count():
    base = {"service": "s", "operation": "o", "customer": "c", "key": "k"}
    found = set()
    for name in (None, *base):
        values = {**base, **({name: "other"} if name else {})}
        lines = [("Idempotency-Key", values["key"]), ("X-Customer-Id", values["customer"])]
        found.add(identity(*lines, service=values["service"], operation=values["operation"]).record_id)
    assert len(found) == 5


def test_c15_a_record_id_never_changes_between_releases():
    assert record_id("ledger", "create-transfer", [("customer", "C-4711")], "abc").hex() == (
        "7e157a11e62794e2c23f6f0effeb2e32b84029eba9f9d142cd9dfc8d79d6f809"
    )


def test_parts_of_equal_values_under_other_names_differ():
    names = ["a", "b", "ab", ""]
    ids = {record_id("s", "o", [(one, "v"), (two, "v")], "k") for one, two in itertools.combinations(names, 2)}
    assert len(ids) == 6
