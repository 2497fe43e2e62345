"""Taking nested values apart and putting them together again."""

from __future__ import annotations

import threading
import timeit
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bcg.trees import Tree, flatten, flatten_arguments, map_tensors
from bcg.values import UnkeyableError, plain_form


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Pair:
    first: Any
    second: Any = field(default=None)


@dataclass(frozen=True)
class FrozenPair:
    first: Any
    second: Any = None


@dataclass(slots=True)
class SlottedPair:
    first: Any
    second: Any = None


class Cache:
    """Plain data, as GLM-Image's KV cache."""

    def __init__(self, *layers: Any) -> None:
        self.layers = list(layers)
        self.mode = "read"


class Slotted:
    __slots__ = ("__private", "unset", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.__private = 1

    def private(self) -> int:
        return self.__private


class NamedList(list[Any]):
    name = "class"


class Closing:
    def __init__(self) -> None:
        self.handle = 3

    def __del__(self) -> None:
        self.handle = 0


class OwnNew:
    def __new__(cls) -> OwnNew:
        return super().__new__(cls)


def rebuild(value: Any) -> Any:
    tree = flatten(value)
    return tree.structure.unflatten(tree.leaves)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.floats(allow_nan=False), st.sampled_from([...])
)
keys = st.one_of(st.text(max_size=3), st.integers(), st.booleans())
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(FrozenPair, inner, inner),
        st.builds(SlottedPair, inner, inner),
    ),
    max_leaves=20,
)


@given(values)
def test_a_value_put_together_again_equals_itself_in_types_and_order(value: Any) -> None:
    again = rebuild(value)
    assert repr(again) == repr(value)
    assert again == value


@given(values)
def test_structures_of_one_value_are_equal_and_hash_alike(value: Any) -> None:
    one, other = flatten(value).structure, flatten(rebuild(value)).structure
    assert one == other
    assert hash(one) == hash(other)


@given(values)
def test_every_leaf_has_one_path_and_paths_differ(value: Any) -> None:
    tree = flatten(value)
    assert len(tree.structure.paths) == len(tree.leaves) == len(set(tree.structure.paths))


@given(values, values)
def test_equal_structure_and_leaf_forms_mean_the_same_value(one: Any, other: Any) -> None:
    first, second = flatten(one), flatten(other)
    same = first.structure == second.structure and forms(first) == forms(second)
    assert same == (repr(one) == repr(other))


def forms(tree: Tree) -> list[object]:
    return [plain_form(leaf) for leaf in tree.leaves]


def test_paths_read_like_the_python_that_reaches_the_leaf() -> None:
    call = {"x": [1, 2], "kwargs": {"mask": 3, 4: 5}, "cache": Cache(Point(6, 7)), "n": 8}
    assert flatten_arguments(call).structure.paths == (
        "x[0]",
        "x[1]",
        "kwargs['mask']",
        "kwargs[4]",
        "cache.layers[0].x",
        "cache.layers[0].y",
        "cache.mode",
        "n",
    )


def test_dict_order_is_part_of_the_structure() -> None:
    assert flatten({"a": 1, "b": 2}).structure != flatten({"b": 1, "a": 2}).structure


def test_the_order_of_an_ordered_dict_is_its_own() -> None:
    value = OrderedDict(a=1, b=2)
    value.move_to_end("a")
    assert list(rebuild(value).items()) == [("b", 2), ("a", 1)]


@pytest.mark.parametrize("key", [1, True, 1.0])
def test_dict_keys_that_compare_equal_are_told_apart_by_type(key: object) -> None:
    others = [flatten({other: 0}).structure for other in (1, True, 1.0) if type(other) is not type(key)]
    assert flatten({key: 0}).structure not in others
    assert type(next(iter(rebuild({key: 0})))) is type(key)


def test_a_dict_whose_key_has_no_value_is_refused() -> None:
    assert "has a key that is an object of type" in flatten({Cache(): 1}).refused[0]


def test_types_with_equal_content_have_other_structures() -> None:
    made = [flatten(value).structure for value in ([1, 2], (1, 2), Point(1, 2), Pair(1, 2), FrozenPair(1, 2))]
    assert len(set(made)) == len(made)


def test_a_tensor_given_twice_is_one_leaf_at_two_places() -> None:
    tensor, other = torch.ones(1), torch.ones(1)
    shared, apart = flatten([tensor, (tensor,)]), flatten([tensor, (other,)])
    assert shared.structure != apart.structure
    assert len(shared.leaves) == 1
    first, (second,) = shared.structure.unflatten([other])
    assert first is second is other


def test_an_object_given_twice_is_one_object_again() -> None:
    cache = Cache(torch.ones(1))
    first, second = rebuild((cache, [cache]))
    assert first is second[0]
    assert first is not cache
    assert flatten((cache, cache)).structure != flatten((Cache(1), Cache(1))).structure


def test_defaultdict_keeps_its_factory() -> None:
    value: defaultdict[str, list[int]] = defaultdict(list, a=[1])
    again = rebuild(value)
    assert again == value
    assert again["new"] == []


def test_user_dict_is_opened() -> None:
    value = UserDict({"a": torch.ones(1)})
    tree = flatten(value)
    assert tree.leaves == [value["a"]]
    assert isinstance(rebuild(value), UserDict)
    assert rebuild(value)["a"] is value["a"]


def test_a_list_subclass_keeps_items_and_attributes() -> None:
    value = NamedList([1, [2]])
    value.name = "own"
    again = rebuild(value)
    assert (type(again), list(again), again.name) == (NamedList, [1, [2]], "own")


def test_private_and_unset_slots_are_kept() -> None:
    again = rebuild(Slotted([1]))
    assert again.value == [1]
    assert again.private() == 1
    assert not hasattr(again, "unset")


def test_torch_return_types_are_opened() -> None:
    result = torch.max(torch.ones(2, 2), dim=0)
    again = map_tensors(result, torch.clone)
    assert type(again) is type(result)
    assert again.values is not result.values


def test_a_diffusers_output_keeps_items_and_attributes_the_same() -> None:
    outputs = pytest.importorskip("diffusers.models.modeling_outputs")
    value = outputs.Transformer2DModelOutput(sample=torch.ones(1))
    assert flatten(value).leaves == [value.sample]
    again = map_tensors(value, torch.zeros_like)
    assert type(again) is type(value)
    assert again.sample is again["sample"] is again[0]
    assert again.sample.item() == 0


def test_a_diffusers_frozen_dict_stays_frozen() -> None:
    utils = pytest.importorskip("diffusers.configuration_utils")
    again = rebuild(utils.FrozenDict(a=1, b=[2]))
    assert again == {"a": 1, "b": [2]}
    assert again.b is again["b"]
    with pytest.raises(Exception, match="cannot use"):
        again.pop("a")


def test_the_kv_cache_of_glm_image_is_opened() -> None:
    module = pytest.importorskip("diffusers.models.transformers.transformer_glm_image")
    cache = module.GlmImageKVCache(2)
    cache.caches[1].store(torch.ones(1), torch.zeros(1))
    tree = flatten_arguments({"kv_caches": cache})
    assert "kv_caches.caches[1].k_caches[0]" in tree.structure.paths
    again = tree.structure.unflatten(tree.leaves)["kv_caches"]
    assert again.caches[1] is not cache.caches[1]
    assert again.caches[1].k_caches[0] is cache.caches[1].k_caches[0]


@pytest.mark.parametrize(
    "value",
    [
        (number for number in range(2)),
        threading.Lock(),
        torch.nn.Linear(1, 1),
        torch.Generator(),
        lambda: None,
        iter([1]),
        Closing(),
        OwnNew(),
        object(),
        {1, 2},
        torch.Size([1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_state_that_python_cannot_see_is_a_leaf(value: object) -> None:
    tree = flatten([value])
    assert tree.leaves == [value]
    assert rebuild([value])[0] is value


def cyclic_list() -> list[Any]:
    value: list[Any] = [1]
    value.append([value])
    return value


def cyclic_object() -> Cache:
    value = Cache()
    value.layers.append({"parent": value})
    return value


@pytest.mark.parametrize("value", [cyclic_list(), cyclic_object()], ids=["list", "object"])
def test_an_argument_that_contains_itself_is_one_leaf_and_the_others_stay_open(value: object) -> None:
    tensor = torch.ones(1)
    tree = flatten_arguments({"a": [tensor], "b": [tensor, value], "c": (tensor, [2])})
    assert tree.structure.paths == ("a[0]", "b", "c[1][0]")
    assert tree.refused == {1: "contains itself"}
    again = tree.structure.unflatten(tree.leaves)
    assert again["b"][1] is value
    assert again["c"] == (tensor, [2])


def test_an_argument_nested_too_deep_is_refused() -> None:
    value: tuple[Any, ...] = ()
    for _ in range(5000):
        value = (value, 1)
    assert "deeper" in flatten(value).refused[0]


def test_the_bound_counts_all_arguments_together_and_empty_containers() -> None:
    tree = flatten_arguments({"a": [1] * 6, "b": [[], [], []], "c": [[]] * 3, "d": [1]}, max_leaves=10)
    assert list(tree.refused) == [6]
    assert tree.structure.paths[6] == "c"


def test_an_argument_of_72000_elements_is_refused_at_the_bound() -> None:
    value = [[0] * 1000 for _ in range(72)]
    assert "2048" in flatten_arguments({"x": value}).refused[0]
    best = min(timeit.repeat(lambda: flatten_arguments({"x": value}), number=10, repeat=10)) / 10
    assert best < 1e-3  # 0.05 ms where measured; a full walk takes 5


def test_map_tensors_calls_once_for_each_tensor_and_keeps_other_leaves() -> None:
    tensor, other, seen = torch.ones(1), object(), []
    result = map_tensors({"a": tensor, "b": [tensor, other]}, lambda t: seen.append(t) or t + 1)  # type: ignore[func-returns-value]
    assert len(seen) == 1
    assert result["a"] is result["b"][0]
    assert result["b"][1] is other


def test_map_tensors_has_no_bound_on_size() -> None:
    assert len(map_tensors([torch.ones(1)] + [0] * 5000, torch.clone)) == 5001


def test_map_tensors_does_not_pass_over_tensors_that_it_cannot_reach() -> None:
    with pytest.raises(UnkeyableError, match="contains itself"):
        map_tensors(cyclic_list(), torch.clone)


@pytest.mark.parametrize("given_leaves", [[], [1], [1, 2, 3]])
def test_another_number_of_leaves_is_an_error(given_leaves: list[int]) -> None:
    with pytest.raises(ValueError, match="needed"):
        flatten([0, 0]).structure.unflatten(given_leaves)
