"""The entry cache: least recently used goes first, both bounds hold, rejections are remembered and bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bcg.cache import EntriesView, EntryCache, VariantKey


class FakeEntry(SimpleNamespace):
    """As much of an entry as the cache looks at."""

    def __init__(self, key: str, size_bytes: int = 1) -> None:
        super().__init__(key=key, own_bytes=size_bytes, is_reset=False)

    def reset(self) -> None:
        self.is_reset = True

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def make(max_entries: int = 3, max_bytes: int | None = None, max_rejections: int = 3) -> tuple[Any, list[Any]]:
    evicted: list[Any] = []

    def on_evict(entry: Any) -> None:
        assert not entry.is_reset, "memory is given back only after the callback has waited"
        evicted.append(entry.key)

    return EntryCache(max_entries, max_bytes, max_rejections, on_evict), evicted


def keys(cache: Any) -> list[str]:
    return [entry.key for entry in cache.entries()]


def test_entries_beyond_the_count_go_the_oldest_first() -> None:
    cache, evicted = make(max_entries=2)
    entries = [FakeEntry(key) for key in "abcd"]
    for entry in entries:
        cache.add(entry)
    assert keys(cache) == ["c", "d"]
    assert evicted == ["a", "b"]
    assert [entry.is_reset for entry in entries] == [True, True, False, False]
    assert len(cache) == 2


def test_a_find_refreshes_and_a_peek_does_not() -> None:
    cache, evicted = make(max_entries=2)
    a, b = FakeEntry("a"), FakeEntry("b")
    cache.add(a)
    cache.add(b)
    assert cache.peek("a") == [a]
    assert keys(cache) == ["a", "b"]
    assert cache.find("a") == [a]
    assert keys(cache) == ["b", "a"]
    cache.add(FakeEntry("c"))
    assert evicted == ["b"]


def test_an_unknown_key_finds_nothing() -> None:
    cache, _ = make()
    assert cache.find("a") == []
    assert cache.peek("a") == []
    assert len(cache) == 0


def test_bytes_bound_all_entries_together_but_the_newest_stays() -> None:
    cache, evicted = make(max_bytes=10)
    for key, size in (("a", 4), ("b", 4), ("c", 4)):
        cache.add(FakeEntry(key, size))
    assert keys(cache) == ["b", "c"]
    cache.add(FakeEntry("huge", 100))
    assert keys(cache) == ["huge"]
    assert evicted == ["a", "b", "c"]
    assert cache.bytes() == 100


def test_variants_of_a_signature_count_as_one_and_go_together() -> None:
    cache, evicted = make(max_entries=1)
    one, two = FakeEntry("a"), FakeEntry("a")
    cache.add(one)
    cache.add(two)
    assert cache.find("a") == [two, one]
    assert len(cache) == 1
    cache.add(FakeEntry("b"))
    assert evicted == ["a", "a"]
    assert one.is_reset
    assert two.is_reset


def test_the_variant_that_served_is_tried_first() -> None:
    cache, _ = make()
    one, two, three = FakeEntry("a"), FakeEntry("a"), FakeEntry("a")
    for entry in (one, two, three):
        cache.add(entry)
    cache.prefer(one)
    assert cache.find("a") == [one, three, two]
    cache.prefer(one)
    assert cache.find("a") == [one, three, two]


def test_rejections_are_remembered_with_their_reason_up_to_a_bound() -> None:
    cache, _ = make(max_rejections=2)
    for key in "abc":
        cache.reject(key, f"reason of {key}")
    assert cache.rejection("a") is None
    assert cache.rejection("b") == "reason of b"
    cache.reject("b", "another reason")
    cache.reject("d", "reason of d")
    assert cache.rejection("c") is None
    assert cache.rejection("b") == "another reason"


def test_a_capture_ends_a_rejection() -> None:
    cache, _ = make()
    cache.reject("a", "reason")
    cache.add(FakeEntry("a"))
    assert cache.rejection("a") is None


def test_drop_all_empties_everything() -> None:
    cache, evicted = make()
    entries = [FakeEntry("a"), FakeEntry("a"), FakeEntry("b")]
    for entry in entries:
        cache.add(entry)
    cache.reject("c", "reason")
    cache.drop_all()
    assert (len(cache), cache.bytes(), cache.rejection("c")) == (0, 0, None)
    assert all(entry.is_reset for entry in entries)
    assert evicted == []  # nothing made room for another


def test_dropping_an_unknown_key_changes_nothing() -> None:
    cache, evicted = make()
    cache.add(FakeEntry("a"))
    cache.drop("b")
    assert keys(cache) == ["a"]
    assert evicted == []


def test_ten_thousand_signatures_stay_within_the_bounds() -> None:
    cache, evicted = make(max_entries=4, max_bytes=20, max_rejections=5)
    for number in range(10_000):
        cache.add(FakeEntry(str(number), number % 9))
        cache.reject(f"r{number}", "reason")
    assert len(cache) <= 4
    assert cache.bytes() <= 20
    assert len(evicted) == 10_000 - len(cache)
    assert sum(cache.rejection(f"r{number}") is not None for number in range(10_000)) == 5


def test_the_view_is_read_only_numbers_variants_and_keeps_the_order() -> None:
    entries: list[Any] = [FakeEntry("a"), FakeEntry("b"), FakeEntry("b")]
    view = EntriesView(entries)
    assert list(view) == [VariantKey("a", 0), VariantKey("b", 0), VariantKey("b", 1)]  # type: ignore[arg-type]
    assert list(view.values()) == entries
    assert view[VariantKey("b", 1)] is entries[2]  # type: ignore[arg-type]
    assert len(view) == 3
    assert "EntriesView" in repr(view)
    with pytest.raises(TypeError):
        view["a"] = 1  # type: ignore[index]
