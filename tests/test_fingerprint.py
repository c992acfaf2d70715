"""Fingerprints: a retry looks the same, another request never does, and nothing raises."""

import itertools
import json
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import fingerprint
from gateway.config.policy import BodyForm, FingerprintSettings
from gateway.fingerprint import Content, canonical_json, recipe
from gateway.model import Fingerprint
from gateway.wire import fields

AUTO = recipe(FingerprintSettings(BodyForm.AUTO, query=True, headers=()))
JSON = (b"Content-Type", b"application/json")


def content(body=b"", *headers, by=AUTO, method=b"POST", target=b"/orders", host=b"shop.example"):
    return Content(by, method, target, host=host, seen=fields(list(headers or [JSON])), body=body)


def digest(*arguments, **more):
    return content(*arguments, **more).fingerprint().digest


def by(body=BodyForm.AUTO, query=True, headers=()):
    return recipe(FingerprintSettings(body, query, headers))


# ---- C12: JSON --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        b'{"b":{"y":2,"x":1},"a":1}',
        b' {\t"a" : 1 ,\r\n "b" : { "x":1, "y":2 } }\n',
        b'{"\\u0061":1,"b":{"x":1,"\\u0079":2}}',
    ],
)
def test_c12_member_order_white_space_and_escapes_do_not_count(other):
    assert digest(b'{"a":1,"b":{"x":1,"y":2}}') == digest(other)


DIFFERENT = [
    b"", b"{}", b"[]", b"null", b'""', b"0", b"-0", b"-0.0", b"0.0", b"0e0", b"1", b"1.0", b"1.00", b"1e0", b"1E0",
    b'"1"', b"true", b"false", b'"true"', b"100", b"1e2", b"[1]", b"[[1]]", b'{"a":1}', b'{"a":1.0}', b'{"A":1}',
    b'{"a":"1"}', b'{"a":null}', b'{"a":[1]}', b'{"a":1,"a":2}', b'{"a":2,"a":1}', b'{"a":2}', b'{"a":1,"a":1}',
    b'{"a":[1,2]}', b'{"a":[2,1]}', b'{"a":[1,2,2]}', b'{"a":["repeated",1,2]}', b'{"a":1,"b":1}', b'{"a":1,"b":2}',
    b'{"a":{"b":1}}', b'{"a":{"b":1},"a":{"b":2}}', b'{"a":{"b":1,"b":2}}', b'{"a":1,"a":2,"c:":0}',
    b'{"a":2,"c\\u003a":0}',  b"9007199254740992",
    b"9007199254740993", b"18446744073709551615", b"18446744073709551616", b"1e400", b"1e401", b"-1e400", b"0.1",
    b"0.10", b"0.1000000000000000055511151231257827", b"9" * 400, b"9" * 5000, b"9" * 4999, b"1" * 400 + b".5",
    b'"\\ud800"', b'"\\ud801"', b'"\\udc00"', b'"\\ud83d\\ude00"', b'"\\ud83d"', b'"?"', b'"\\u0000"', b'"\\\\u0000"',
    b'"\\""', b'"a\nb"', b'"a\\nb"', '"\u00e9"'.encode(), '"e\u0301"'.encode(), b'"\xe9"', b'"\xff"',
    b'"\xed\xa0\x80"', b'"\xef\xbf\xbd"', b"NaN", b"Infinity", b"-Infinity", b"nan", b"[NaN]", b"\xef\xbb\xbf{}",
    b"{} x", b"{}{}", b"{},", b'{"a":1,}', b"[1,]", b"[1,2]", b"[2,1]", b"01", b"1.", b".5", b"+1", b"{'a':1}",
    b"{a:1}", b"\x00", b"{}\x00", b"// c\n{}", b"{", b"}", b'"', b"tru", b"-", b"1e", b"\xfe\xff\x00{\x00}",
    "{}".encode("utf-16"), "{}".encode("utf-32"), b"[" * 300 + b"]" * 300, b"[" * 301 + b"]" * 301,
    b"[" * 256 + b"]" * 256, b"[" * 257 + b"]" * 257, b"[" * 10_000 + b"]" * 10_000, b"[" * 10_000,
    b'{"a":' * 10_000 + b"1" + b"}" * 10_000, b"repeated", b'{"a":[repeated,1,2]}', b"1 2", b"\x0b{}",
]  # fmt: skip


def test_c12_bodies_that_say_something_else_are_all_told_apart():
    digests = {digest(body): body for body in DIFFERENT}
    assert len(digests) == len(DIFFERENT)


def test_c12_a_repeated_member_is_not_lost_behind_an_escaped_colon():
    plain, small, large = (digest(b'{"a":1,"a":2,"c%b":0}' % colon) for colon in (b":", b"\\u003a", b"\\u003A"))
    assert plain == small == large != digest(b'{"a":2,"c:":0}')


def test_c12_a_charset_does_not_count_and_another_media_type_does():
    body = b'{"a":1}'
    plain = digest(body)
    assert plain == digest(body, (b"Content-Type", b"Application/JSON; charset=utf-8"))
    others = {digest(body, (b"Content-Type", kind)) for kind in (b"application/vnd.x+json", b"text/plain", b"")}
    assert len(others | {plain, digest(body, (b"X", b"1"))}) == 4  # an absent and an empty type are the same


def test_c12_a_json_suffix_is_read_as_json():
    kind = (b"Content-Type", b"application/vnd.shop.v2+json")
    assert digest(b'{"a":1,"b":2}', kind) == digest(b'{ "b":2, "a":1 }', kind)


def test_c12_no_body_and_an_empty_one_are_the_same_and_an_empty_object_is_not():
    assert digest(b"", JSON) == digest(b"", (b"X", b"1")) == digest(b"", (b"Content-Type", b"text/plain"))
    assert digest(b"", JSON) != digest(b"{}", JSON)


def test_c12_what_is_not_json_counts_by_its_bytes():
    plain = (b"Content-Type", b"text/plain")
    assert digest(b'{"a":1}', plain) != digest(b'{ "a":1}', plain)
    assert digest(b"{,}") == digest(b"{,}")
    assert digest(b"{,}") != digest(b"{, }")


def test_invalid_json_cannot_pass_for_a_canonical_form():
    spaced = b'{ "a":1}'
    assert canonical_json(spaced) == b'{"a":1}'
    raw = content(b'{"a":1}', by=by(BodyForm.RAW))
    assert raw.fingerprint().digest != digest(spaced)


def test_the_forms_json_and_none_read_any_media_type():
    text = (b"Content-Type", b"text/plain")
    assert digest(b'{"a":1,"b":2}', text, by=by(BodyForm.JSON)) == digest(b'{"b":2,"a":1}', text, by=by(BodyForm.JSON))
    assert digest(b"a", text, by=by(BodyForm.NONE)) == digest(b"b", JSON, by=by(BodyForm.NONE))
    assert digest(b"a", by=by(BodyForm.RAW)) != digest(b"a ", by=by(BodyForm.RAW))


# ---- properties -------------------------------------------------------------------------------------------------

TEXTS = st.text(st.one_of(st.characters(), st.sampled_from(':"\\{}[]-0a\u003a\ud800\udfff')), max_size=6)
LITERALS = st.sampled_from(
    [
        "0",
        "-0",
        "1",
        "-1",
        "1.0",
        "-0.0",
        "1e2",
        "1E+2",
        "100",
        "123456789012345678901234567890",
        "1e999",
        "0.1",
        "true",
        "false",
        "null",
    ]
)


class Literal(str):
    """A number or word as it is written."""

    __slots__ = ()


class Members(tuple):
    """An object's members in order; names may repeat."""

    __slots__ = ()


DOCUMENTS = st.recursive(
    st.one_of(LITERALS.map(Literal), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.lists(st.tuples(TEXTS, inner), max_size=4).map(Members)),
    max_leaves=20,
)


def normal(value):
    """The content of a document, as a value to compare: members sorted, repeated ones in their order."""
    if isinstance(value, Members):
        return ("object", sorted(((name, normal(inner)) for name, inner in value), key=lambda member: member[0]))
    if isinstance(value, list):
        return ("array", [normal(inner) for inner in value])
    return (type(value).__name__, str(value))


def write(value, rng):
    """One of the many texts of a document."""
    space = rng.choice(["", " ", "\n\t", "\r "])
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, str):
        return spell(value, rng)
    if isinstance(value, list):
        return "[" + space + f"{space},".join(write(inner, rng) for inner in value) + "]"
    members = list(value)
    names = [name for name, _ in members]
    if len(set(names)) == len(names):
        rng.shuffle(members)
    texts = [f"{spell(name, rng)}{space}:{space}{write(inner, rng)}" for name, inner in members]
    return "{" + f",{space}".join(texts) + space + "}"


def spell(text, rng):
    if rng.random() < 0.5:
        return json.dumps(text)
    return '"' + "".join(spell_character(character, rng) for character in text) + '"'


def spell_character(character, rng):
    if character in "a:" and rng.random() < 0.5:
        return f"\\u{ord(character):04{rng.choice('xX')}}"
    lone = "\ud800" <= character <= "\udfff"
    return json.dumps(character, ensure_ascii=lone)[1:-1]


def well_formed(value):
    """Whether a document has no lone surrogate: one that has counts by its bytes."""
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    return (
        all(well_formed(name) and well_formed(inner) for name, inner in value)
        if isinstance(value, Members)
        else all(map(well_formed, value))
    )


@given(DOCUMENTS.filter(well_formed), st.randoms(use_true_random=False))
def test_two_texts_of_one_document_are_equal(document, rng):
    one, two = write(document, rng).encode(), write(document, rng).encode()
    assert canonical_json(one) is not None
    assert digest(one) == digest(two)


@given(DOCUMENTS, DOCUMENTS, st.randoms(use_true_random=False))
def test_two_documents_are_never_equal(one, two, rng):
    if normal(one) != normal(two):
        assert digest(write(one, rng).encode()) != digest(write(two, rng).encode())


@given(DOCUMENTS.filter(well_formed), st.data())
def test_one_changed_literal_makes_another_request(document, data):
    text = write(document, random.Random(0))
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.sampled_from('01-.eE":,{}[]\\ a')) + text[at + 1 :]
    try:
        same = normal(parsed(changed)) == normal(parsed(text))
    except (ValueError, RecursionError):
        same = changed == text
    assert (digest(text.encode()) == digest(changed.encode())) == same


def parsed(text):
    def other(value):
        return Literal(value) if not isinstance(value, str) else value

    def refuse(value):
        raise ValueError(value)

    def words(value):
        if isinstance(value, Members):
            return Members((name, words(inner)) for name, inner in value)
        if isinstance(value, list):
            return [words(inner) for inner in value]
        return value if isinstance(value, str) else Literal(json.dumps(value))

    return words(
        json.loads(text, object_pairs_hook=Members, parse_int=Literal, parse_float=Literal, parse_constant=refuse)
    )


@given(
    st.one_of(st.binary(max_size=200), DOCUMENTS.map(lambda document: write(document, random.Random(1)).encode())),
    st.data(),
)
def test_no_body_raises_and_both_paths_agree(body, data):
    cut = data.draw(st.integers(0, len(body)))
    for some in (body, body[:cut], body[cut:] + body[:cut], b"[" + body + b"]"):
        text = canonical_json(some)
        if text is not None:
            assert text == fingerprint._literal_json(some)
            assert canonical_json(some) == canonical_json(b" " + some + b"\n")
            if b"repeated" not in text:
                assert canonical_json(text) == text


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_bytes_are_told_apart_where_they_are_not_json(one, two):
    if one != two and canonical_json(one) is None:
        assert digest(one) != digest(two)


# ---- what else counts -------------------------------------------------------------------------------------------


def test_c10_method_path_query_and_host_each_count():
    requests = [
        {},
        {"method": b"PATCH"},
        {"method": b"DELETE"},
        {"target": b"/orders/7/cancel"},
        {"target": b"/orders/7"},
        {"target": b"/Orders"},
        {"target": b"/orders/"},
        {"target": b"/orders?"},
        {"target": b"/orders?a=1&b=2"},
        {"target": b"/orders?b=2&a=1"},
        {"target": b"/order?s"},
        {"host": b"other.example"},
    ]
    assert len({digest(b"{}", **request) for request in requests}) == len(requests)
    assert digest(b"{}", host=b"SHOP.example") == digest(b"{}")


def test_a_query_that_is_left_out_does_not_count():
    quiet = by(query=False)
    assert digest(b"{}", target=b"/orders?a=1", by=quiet) == digest(b"{}", target=b"/orders", by=quiet)
    assert digest(b"{}", target=b"/orders?a=1", by=quiet) != digest(b"{}", target=b"/order?a=1", by=quiet)


def test_chosen_headers_count_with_their_number_and_order():
    chosen = by(headers=(b"x-a", b"x-b"))
    variants = [
        [],
        [(b"X-A", b"")],
        [(b"X-A", b"1")],
        [(b"X-B", b"1")],
        [(b"X-A", b"1"), (b"X-A", b"2")],
        [(b"X-A", b"2"), (b"X-A", b"1")],
        [(b"X-A", b"1"), (b"X-B", b"2")],
        [(b"X-A", b"12")],
        [(b"X-A", b"1, 2")],
    ]
    assert len({digest(b"{}", JSON, *lines, by=chosen) for lines in variants}) == len(variants)
    assert digest(b"{}", JSON, (b"X-C", b"1"), by=chosen) == digest(b"{}", JSON, by=chosen)


@given(st.lists(st.tuples(*[st.binary(max_size=4)] * 4), min_size=2, max_size=4, unique=True))
def test_no_content_of_one_part_passes_for_another(parts):
    text = (b"Content-Type", b"text/plain")
    digests = {digest(body, text, method=m, target=t, host=h.lower()) for m, t, h, body in parts}
    assert len(digests) == len({(m, t, h.lower(), body) for m, t, h, body in parts})


@given(
    st.sampled_from([b'{"a":1}', b'{ "a":1}', b"x", b""]),
    st.sampled_from([b'{"a":1}', b'{ "a":1}', b"x", b""]),
    st.sampled_from(BodyForm),
)
def test_equal_raw_digests_mean_equal_fingerprints(one, two, form):
    first, second = content(one, by=by(form)), content(two, by=by(form))
    if first.raw_digest == second.raw_digest:
        assert first.fingerprint() == second.fingerprint()
    if one == two:
        assert first.raw_digest == second.raw_digest


# ---- C15: recipes -----------------------------------------------------------------------------------------------


def test_c15_a_recipe_is_a_signed_integer_of_32_bits_and_each_setting_counts():
    settings_ = itertools.product(BodyForm, (True, False), [(), (b"x-a",), (b"x-a", b"x-b")])
    numbers = [by(*one).number for one in settings_]
    assert len(set(numbers)) == len(numbers)
    assert all(-(2**31) <= number < 2**31 for number in numbers)


def test_c15_recipes_and_digests_do_not_change_between_releases():
    found = content(b'{"b":1.0,"a":[true,"\\u00e9"]}', target=b"/orders?x=1").fingerprint()
    assert (found.recipe, found.digest.hex()) == (
        -794678144,
        "1d08d1258d0a5471944648a8534e05352e0750dff463dbc204b349ec511081dd",
    )


def test_c15_after_an_edit_of_the_policy_a_retry_is_still_told_from_another_request():
    old, new = by(BodyForm.RAW, query=False), by(BodyForm.AUTO, query=True, headers=(b"x-a",))
    stored = content(b'{"a":1}', by=old).fingerprint()
    assert content(b'{"a":1}', by=new).fingerprint_like(stored) == stored
    assert content(b'{"a":2}', by=new).fingerprint_like(stored) != stored
    assert content(b'{"a":2}', by=new).fingerprint_like(stored).recipe == stored.recipe


def test_c15_a_recipe_that_is_not_known_counts_as_equal():
    for stored in (Fingerprint(7, b"x" * 32), content(b"1", by=by(headers=(b"x-gone",))).fingerprint()):
        assert content(b"2").fingerprint_like(stored) == stored


def test_c15_the_own_recipe_is_simply_computed():
    one = content(b"1")
    assert one.fingerprint_like(Fingerprint(AUTO.number, b"")) is one.fingerprint()


# ---- bounds and cost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "is_read"), [(256, True), (257, False)])
def test_the_bound_of_depth_does_not_depend_on_the_length(depth, is_read):
    assert (canonical_json(b"[" * depth + b"]" * depth) is not None) == is_read
    assert (canonical_json(b"[" * depth + b'"' + b"x" * 999 + b'"' + b"]" * depth) is not None) == is_read


def test_a_body_beyond_the_bounds_counts_by_its_bytes():
    long = b'["' + b"x" * fingerprint.LONGEST + b'"]'
    literal = b"[-0," + b"1," * (fingerprint.LONGEST_LITERAL // 2) + b"1]"
    assert canonical_json(long) is None
    assert canonical_json(literal) is None
    assert canonical_json(literal.replace(b"-0", b"0")) is not None
    assert digest(long) == digest(long) != digest(b" " + long)


def sample(size):
    rng = random.Random(1)
    item = lambda: {  # noqa: E731
        "id": rng.randrange(10**9), "amount": round(rng.random() * 1000, 2), "name": "Müller & Söhne",
        "due": "2026-11-05T10:00:00-03:00", "ok": True, "tags": ["a", "b"], "note": None,
    }  # fmt: skip
    return json.dumps({"items": [item() for _ in range(size // 165)]}, indent=1).encode()


@pytest.mark.parametrize(("size", "budget_seconds"), [(1024, 40e-6), (100 * 1024, 4e-3)])
def test_the_canonical_form_costs_little(size, budget_seconds):
    body = sample(size)
    best = min(timed(body) for _ in range(30))
    assert best < budget_seconds * 2.5  # a loaded machine; alone it takes about a quarter of the budget


def timed(body):
    start = time.perf_counter()
    canonical_json(body)
    return time.perf_counter() - start


@pytest.mark.parametrize(
    "body", [b"[" * 500_000, b'{"a":1,"a":' * 20_000, b"[" + b"[]," * 100_000 + b"[]]", b"9" * 500_000]
)
def test_hostile_bodies_are_bounded(body):
    assert timed(body) < 1.0
