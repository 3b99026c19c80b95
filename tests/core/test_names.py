"""Names: equal across processes, input types and media; different wherever anything that matters differs.

Must not know the tree: what names nominate is compared elsewhere.
"""

import json
import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.index import names
from kvkeep.index.media import MediaItem, Placed, cut_before_split_item, media_before, place_media
from kvkeep.index.names import (
    Fingerprint,
    as_token_ids,
    chain_names,
    frame,
    make_identity,
)
from tests.core.naive import narrow_hash

FINGERPRINT = Fingerprint("a/model", "r1", "float32", "eager", "theta 10000", 4, "page-major")
IDS = [0, 1, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 2, 2**31 - 1]
PAGE_NBYTES = 16
MEDIA = (MediaItem(1, 2, b"0123456789abcdef"), MediaItem(6, 3, b"fedcba9876543210" * 2, causal=False))


def golden() -> dict[str, Any]:
    """Every kind of name."""
    raw = np.array(IDS, dtype=np.int32).data.cast("B")
    plain = make_identity(FINGERPRINT.encode())
    full = make_identity(FINGERPRINT.encode(), salt=b"salt", adapter=b"adapter v1", label=b"label")
    by_page = place_media(MEDIA, 4, len(IDS)).by_page
    return {
        "plain": plain.name,
        "full": full.name,
        "pages": chain_names(plain.name, raw, PAGE_NBYTES),
        "pages of full": chain_names(full.name, raw, PAGE_NBYTES),
        "pages with media": chain_names(plain.name, raw, PAGE_NBYTES, 0, by_page),
    }


# Written down once; names that are stored or sent must never change without a new version of them.
GOLDEN = {
    "plain": 9055357515060576390,
    "full": 16642716380534050767,
    "pages": [3479386442154506338, 14340516005554724461, 16525077689755572470],
    "pages of full": [2934564358353965850, 8585026561878448307, 10524078337357297002],
    "pages with media": [750013022894343284, 11569395275559053777, 18122259673096871968],
}


def test_names_are_those_of_every_other_machine() -> None:
    """The names of fixed inputs are constants, whatever the machine."""
    assert GOLDEN == golden()


def test_a_name_is_xxh3_of_the_page_under_the_name_before_it() -> None:
    """Anybody who has the ids can compute the names."""
    parent = xxhash.xxh3_64_intdigest(make_identity(FINGERPRINT.encode()).record, 0)
    assert parent == GOLDEN["plain"]
    for at, name in zip(range(0, len(IDS), 4), golden()["pages"], strict=True):
        parent = xxhash.xxh3_64_intdigest(struct.pack("<4i", *IDS[at : at + 4]), parent)
        assert parent == name


@pytest.mark.parametrize("seed", ["1", "2"])
def test_names_do_not_depend_on_the_process(seed: str) -> None:
    """Two processes with different hash seeds of their own give the same names."""
    code = "import json, tests.core.test_names as t; print(json.dumps(t.golden()))"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True)
    assert golden() == json.loads(output.stdout)


def test_self_test_stops_a_machine_with_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache does not start where names come out differently."""
    names.self_test()
    monkeypatch.setattr(names, "GOLDEN_SELF_TEST", [1, 2])
    with pytest.raises(InvariantViolation, match="names differ on this machine"):
        names.self_test()


# ---------------------------------------------------------------------- token ids


def ids32() -> Any:
    return np.array(IDS, dtype=np.int32)


def read_only() -> Any:
    ids = ids32()
    ids.flags.writeable = False
    return ids


ACCEPTED: dict[str, Callable[[], Any]] = {
    "list": lambda: list(IDS),
    "tuple": lambda: tuple(IDS),
    "list of numpy ints": lambda: [np.int64(i) for i in IDS],
    "int32": ids32,
    "int32, read-only": read_only,
    "int32, every second": lambda: np.repeat(ids32(), 2)[::2],
    "int32, reversed twice": lambda: ids32()[::-1].copy()[::-1],
    "int32, big-endian": lambda: ids32().astype(">i4"),
    "int64": lambda: np.array(IDS, dtype=np.int64),
    "uint32": lambda: np.array(IDS, dtype=np.uint32),
    "uint64": lambda: np.array(IDS, dtype=np.uint64),
    "array of int": lambda: array("i", IDS),
    "array of long long": lambda: array("q", IDS),
    "bytes": lambda: ids32().tobytes(),
    "bytearray": lambda: bytearray(ids32().tobytes()),
    "view of bytes": lambda: memoryview(ids32().tobytes()),
    "view of int32": lambda: ids32().data,
    "view of int64": lambda: np.array(IDS, dtype=np.int64).data,
    "view of every second int32": lambda: np.repeat(ids32(), 2).data[::2],
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_every_kind_of_input_gives_the_same_ids(kind: str) -> None:
    """Arrays, buffers and lists of the same ids are the same tokens: int32, contiguous, one dimension."""
    ids = as_token_ids(ACCEPTED[kind]())
    assert ("int32", 1, True) == (ids.dtype.name, ids.ndim, ids.flags.c_contiguous)
    assert IDS == ids.tolist()


def test_int32_is_taken_without_a_copy() -> None:
    """A contiguous int32 array is used as it stands."""
    ids = ids32()
    assert as_token_ids(ids) is ids


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16])
def test_narrow_integers_are_ids_too(kind: Any) -> None:
    """A numpy array of narrow integers holds ids, one an element."""
    assert [1, 2, 100] == as_token_ids(np.array([1, 2, 100], dtype=kind)).tolist()


@pytest.mark.parametrize("empty", [[], (), b"", np.empty(0, dtype=np.int32), array("i")])
def test_no_ids_are_fine(empty: Any) -> None:
    """Nothing is a legal list of ids: an extension by none."""
    assert [] == as_token_ids(empty).tolist()


TOO_LARGE = "token id 2147483648 at position 1: ids must be 0 to 2147483647"
NEGATIVE = "token id -1 at position 1: ids must be 0 to 2147483647"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([0, 2**31], TOO_LARGE),
        (np.array([0, 2**31], dtype=np.int64), TOO_LARGE),
        (np.array([0, 2**31], dtype=np.uint32), TOO_LARGE),
        (array("q", [0, 2**31]), TOO_LARGE),
        ([0, 2**70], f"token id {2**70} at position 1"),
        (np.array([0, 2**64 - 1], dtype=np.uint64), f"token id {2**64 - 1} at position 1"),
        ([0, -1], NEGATIVE),
        ((0, -1), NEGATIVE),
        ([0, -(2**40)], f"token id {-(2**40)} at position 1"),
        (np.array([0, -1], dtype=np.int8), NEGATIVE),
        (np.array([0, -1], dtype=np.int32), NEGATIVE),
        (np.array([0, -1], dtype=np.int64), NEGATIVE),
        (array("i", [0, -1]), NEGATIVE),
        (struct.pack("<2i", 0, -1), NEGATIVE),
        ([0, 1.0], r"token id 1.0 at position 1 is float: ids must be integers"),
        ([0, "1"], r"token id '1' at position 1 is str: ids must be integers"),
        ([0, None], r"token id None at position 1 is NoneType"),
        ([[0, 1], [2]], r"token id \[0, 1\] at position 0 is list"),
        ([0, np.float32(1)], r"at position 1 is float32: ids must be integers"),
        ([0, np.array([1, 2])], r"at position 1 is ndarray: ids must be integers"),
        (np.array([0.0, 1.0]), "token ids of dtype float64: ids must be integers"),
        (np.array([False, True]), "token ids of dtype bool: ids must be integers"),
        (np.array([0, None]), "token ids of dtype object: ids must be integers"),
        (array("d", [0.0]), "token ids of dtype float64: ids must be integers"),
        (np.zeros((2, 2), dtype=np.int32), r"token ids of shape \(2, 2\): they must have one dimension"),
        (np.zeros((2, 2), dtype=np.int64), r"token ids of shape \(2, 2\): they must have one dimension"),
        (np.int32(3), r"token ids of shape \(\): they must have one dimension"),
        (7, r"token ids of shape \(\): they must have one dimension"),
        (None, r"token ids of shape \(\): they must have one dimension"),
        ("text", r"token ids of shape \(\): they must have one dimension"),
        ({1, 2}, r"token ids of shape \(\): they must have one dimension"),
        (b"12345", "token buffer of 5 bytes: int32 ids take a multiple of 4"),
        (bytearray(7), "token buffer of 7 bytes: int32 ids take a multiple of 4"),
        (memoryview(bytes(6)), "token buffer of 6 bytes: int32 ids take a multiple of 4"),
        (memoryview(bytes(16))[::2], r"token buffer of shape \(8,\), strides \(2,\): it must be one piece"),
        (np.zeros((4, 4), dtype=np.uint8).data, r"token buffer of shape \(4, 4\)"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(bad: Any, says: str) -> None:
    """Ids that are negative, too large or no integers, and shapes that are no list, are named in one line."""
    with pytest.raises(BadInput, match=says) as caught:
        as_token_ids(bad)
    assert 1 == len(str(caught.value).splitlines())


# ---------------------------------------------------------------------- identities


def unframe(record: bytes) -> list[tuple[str, bytes]]:
    """The fields that `frame` made a record of: that they can be read back shows that no two lists share a record."""
    fields = []
    at = 0
    while at < len(record):
        (size,) = struct.unpack_from("<I", record, at)
        tag = record[at + 4 : at + 4 + size].decode()
        at += 4 + size
        (size,) = struct.unpack_from("<Q", record, at)
        fields.append((tag, record[at + 8 : at + 8 + size]))
        at += 8 + size
    return fields


@given(st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=9))))
def test_framed_fields_can_be_read_back(fields: list[tuple[str, bytes]]) -> None:
    """A record tells its fields apart, so two lists of fields never give one record."""
    assert fields == unframe(frame(fields))


@given(st.lists(st.binary(max_size=3), min_size=8, max_size=8))
def test_identities_differ_where_a_field_does(fields: list[bytes]) -> None:
    """Fingerprint, salt, adapter and label are kept apart: the root record is equal only where all four are."""
    one = make_identity(fields[0], fields[1], fields[2], fields[3])
    other = make_identity(fields[4], fields[5], fields[6], fields[7])
    assert (fields[:4] == fields[4:]) == (one.record == other.record)


def test_a_value_is_not_another_value_with_something_appended() -> None:
    """What is appended to one field, or moved to the next, gives another record and another name."""
    x, parameter = b"image bytes", b"max_long_side=1024"
    identities = [
        make_identity(b"fp", salt=x, adapter=parameter),
        make_identity(b"fp", salt=x + parameter),
        make_identity(b"fp", adapter=x + parameter),
        make_identity(b"fp", salt=x, label=parameter),
        make_identity(b"fp" + x, adapter=parameter),
        make_identity(make_identity(b"fp", salt=x).record, adapter=parameter),
    ]
    assert len(identities) == len({i.record for i in identities}) == len({i.name for i in identities})


def test_every_field_of_a_fingerprint_counts() -> None:
    """Two fingerprints that differ in any field, or only in where one field ends, encode differently."""
    fields = {f: str(getattr(FINGERPRINT, f)) for f in Fingerprint.__dataclass_fields__}
    others = [Fingerprint(**{**fields, f: "8"}) for f in fields]  # type: ignore[arg-type]
    moved = Fingerprint(**{**fields, "weights": "a/modelr", "revision": "1"})  # type: ignore[arg-type]
    assert len(fields) + 2 == len({fp.encode() for fp in (FINGERPRINT, moved, *others)})


# ---------------------------------------------------------------------- media


def page_name(*items: MediaItem) -> int:
    return names.page_name(7, bytes(16), items)


def test_a_page_is_named_by_all_of_its_media() -> None:
    """Offset, length, digest, whether it looks ahead, and how many items there are, all change the name."""
    a, b = b"a" * 16, b"b" * 16
    pages = [
        page_name(),
        page_name(MediaItem(0, 4, a)),
        page_name(MediaItem(0, 4, b)),
        page_name(MediaItem(1, 4, a)),
        page_name(MediaItem(0, 5, a)),
        page_name(MediaItem(0, 4, a, causal=False)),
        page_name(MediaItem(0, 4, a + b)),
        page_name(MediaItem(0, 2, a), MediaItem(2, 2, b)),
        page_name(MediaItem(0, 2, b), MediaItem(2, 2, a)),
        page_name(MediaItem(0, 2, a)),
    ]
    assert len(pages) == len(set(pages))


def test_media_goes_to_every_page_that_it_touches() -> None:
    """An item is listed on each page that holds one of its positions, and on no other."""
    first, second = MediaItem(3, 6, b"a" * 16), MediaItem(9, 1, b"b" * 16)
    by_page, nameable, _ = place_media([first, second], 4, 16)
    assert ({0: (first,), 1: (first,), 2: (first, second)}, None) == (by_page, nameable)
    assert Placed(None, None, ()) == place_media([], 4, 16)


def test_an_item_without_a_digest_ends_what_can_be_named() -> None:
    """Pages from the one where it begins on have no name, whatever media follow."""
    items = [MediaItem(1, 2, b"a" * 16), MediaItem(9, 2, None), MediaItem(11, 1, b"b" * 16)]
    by_page, nameable, _ = place_media(items, 4, 16)
    assert ({0: (items[0],)}, 2) == (by_page, nameable)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MediaItem(-1, 2, None), "media item at -1 of length 2: offset must be an integer of 0 or more"),
        (lambda: MediaItem(0, 1.5, None), "media item at 0 of length 1.5: .*length one of 1 or more"),  # type: ignore[arg-type]
        (lambda: place_media(["x"], 4, 4), "media has str: it must be a sequence of `MediaItem`"),  # type: ignore[list-item]
        (lambda: MediaItem(0, 0, None), "media item at 0 of length 0: .*length one of 1 or more"),
        (lambda: MediaItem(0, 1, b"a" * 15), "media digest of 15 bytes: it must be 16 bytes or more"),
        (lambda: MediaItem(0, 1, b""), "media digest of 0 bytes"),
        (lambda: MediaItem(0, 1, "0123456789abcdef"), "media digest is str: it must be bytes"),  # type: ignore[arg-type]
        (lambda: place_media([MediaItem(3, 2, None)], 4, 4), "media item at 3 of length 2.*within the 4 tokens"),
        (lambda: place_media([MediaItem(2, 1, None), MediaItem(0, 1, None)], 4, 4), "media item at 0.*in order"),
        (lambda: place_media([MediaItem(0, 2, None), MediaItem(1, 1, None)], 4, 4), "media item at 1.*apart"),
    ],
)
def test_media_that_cannot_be_is_refused(make: Callable[[], Any], says: str) -> None:
    """Digests too short to trust and spans out of place are named in one line."""
    with pytest.raises(BadInput, match=says):
        make()


spans = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=5)


def laid_out(gaps: list[tuple[int, int, bool]]) -> list[MediaItem]:
    items: list[MediaItem] = []
    end = 0
    for gap, length, causal in gaps:
        items.append(MediaItem(end + gap, length, bytes([len(items)]) * 16, causal))
        end += gap + length
    return items


@given(spans, st.integers(0, 20), st.integers(1, 5))
def test_a_match_never_ends_inside_an_item_that_looks_ahead(
    gaps: list[tuple[int, int, bool]], pages: int, page_size: int
) -> None:
    """Cut back by as few pages as it takes, and not at all where no such item is split."""
    items = laid_out(gaps)
    by_page = place_media(items, page_size, 99).by_page

    def splits(count: int) -> bool:
        end = count * page_size
        return any(not m.causal and m.offset < end < m.offset + m.length for m in items)

    expected = max(count for count in range(pages + 1) if not splits(count))
    assert expected == cut_before_split_item(pages, page_size, by_page)


@given(spans, st.integers(0, 50), st.integers(1, 5))
def test_media_of_a_sequence_that_was_cut(gaps: list[tuple[int, int, bool]], length: int, page_size: int) -> None:
    """What begins before the cut stays on the pages it touches; an item that the cut goes through is told."""
    items = laid_out(gaps)
    left = media_before(place_media(items, page_size, 99), length, page_size)
    kept = place_media([m for m in items if m.offset < length], page_size, 99)
    split = [m.offset // page_size for m in items if m.offset < length < m.offset + m.length]
    units = tuple(unit for unit in kept.units if unit[1] <= length)
    assert Placed(kept.by_page, split[0] if split else None, units) == left


# ---------------------------------------------------------------------- chains


@given(st.lists(st.integers(0, 3), max_size=24), st.integers(0, 6), st.sampled_from([names.hash64, narrow_hash]))
def test_a_chain_goes_on_from_any_page(tokens: list[int], at: int, hash_fn: names.Hash64) -> None:
    """Names are incremental: those of new pages follow from the last name before them."""
    raw = np.array(tokens[: len(tokens) // 4 * 4], dtype=np.int32).tobytes()
    by_page = place_media(MEDIA, 4, 99).by_page
    for media in (None, by_page):
        whole = chain_names(7, memoryview(raw), PAGE_NBYTES, 0, media, hash_fn)
        at = min(at, len(whole))
        parent = whole[at - 1] if at else 7
        rest = chain_names(parent, memoryview(raw)[at * PAGE_NBYTES :], PAGE_NBYTES, at, media, hash_fn)
        assert whole[at:] == rest


def test_a_name_carries_everything_before_its_page() -> None:
    """The same page behind another page has another name."""
    one, other = np.array([[1, 1, 1, 1, 5, 5, 5, 5], [1, 1, 1, 2, 5, 5, 5, 5]], dtype=np.int32)
    assert chain_names(7, one.data.cast("B"), 16)[1] != chain_names(7, other.data.cast("B"), 16)[1]
