import operator
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mirrorc.capture.rewrites.seed_random_ops import is_random, seed_random_ops
from mirrorc.custom_ops.random import lock_of, mix, seeded

aten = torch.ops.aten


def test_mix_spreads_over_seeds_and_streams() -> None:
    found = [mix(seed, stream) for seed in range(100) for stream in range(100)]
    assert len(set(found)) == len(found)
    ones = sum(bin(value).count("1") for value in found) / len(found)
    assert abs(ones - 31.5) < 0.5
    flipped = sum(bin(mix(1 << bit, 3) ^ mix(0, 3)).count("1") for bit in range(63)) / 63
    assert 28 < flipped < 35


@given(st.integers(0, 2**64), st.integers(0, 2**20))
def test_mix_gives_63_bits(seed: int, stream: int) -> None:
    assert 0 <= mix(seed, stream) < 2**63


def random_graph(training: bool = True) -> tuple[fx.Graph, fx.Node]:
    graph, fake_mode = fx.Graph(), FakeTensorMode()
    with fake_mode:
        value = torch.empty(64, 8)
        x, seed = graph.placeholder("x"), graph.placeholder("seed")
        x.meta["val"], seed.meta["val"] = value, torch.empty((), dtype=torch.int64)
        dropped = graph.call_function(aten.native_dropout.default, (x, 0.25, training))
        dropped.meta["val"] = (value, torch.empty(64, 8, dtype=torch.bool))
        first = graph.call_function(operator.getitem, (dropped, 0))
        mask = graph.call_function(operator.getitem, (dropped, 1))
        noise = graph.call_function(aten.rand_like.default, (x,))
        plain = graph.call_function(aten.add.Tensor, (first, noise))
        for node in (first, noise, plain):
            node.meta["val"] = value
        mask.meta["val"] = dropped.meta["val"][1]
        graph.output((first, mask, noise, plain))
    return graph, seed


def run(graph: fx.Graph, seed: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return fx.GraphModule({}, graph)(x, torch.tensor(seed))


def seeded_graph(training: bool = True) -> fx.Graph:
    graph, seed = random_graph(training)
    assert seed_random_ops(graph, seed) == 2
    graph.lint()
    return graph


def test_no_random_operation_is_left() -> None:
    graph, seed = random_graph()
    assert sum(map(is_random, graph.nodes)) == 2
    assert seed_random_ops(graph, seed) == 2
    assert not any(map(is_random, graph.nodes))
    assert seed_random_ops(graph, seed) == 0


def test_the_same_seed_draws_the_same_numbers_and_another_seed_others() -> None:
    graph, x = seeded_graph(), torch.ones(64, 8)
    one, again, other = run(graph, 7, x), run(graph, 7, x), run(graph, 8, x)
    assert all(map(torch.equal, one, again))
    assert not any(map(torch.equal, one, other))


def test_two_operations_of_one_graph_draw_from_streams_of_their_own() -> None:
    graph, fake_mode = fx.Graph(), FakeTensorMode()
    x, seed = graph.placeholder("x"), graph.placeholder("seed")
    nodes = tuple(graph.call_function(aten.rand_like.default, (x,)) for _ in range(2))
    with fake_mode:
        for node in (x, *nodes):
            node.meta["val"] = torch.empty(8)
        seed.meta["val"] = torch.empty((), dtype=torch.int64)
    graph.output(nodes)
    assert seed_random_ops(graph, seed) == 2
    one, other = run(graph, 1, torch.ones(8))
    assert not torch.equal(one, other)


def test_dropout_keeps_its_part_and_scales_it() -> None:
    x = torch.ones(64, 8)
    dropped, mask, *_ = run(seeded_graph(), 3, x)
    assert mask.dtype is torch.bool and 0.65 < mask.float().mean() < 0.85
    torch.testing.assert_close(dropped, mask / 0.75)


def test_dropout_in_eval_mode_keeps_everything() -> None:
    x = torch.randn(64, 8)
    dropped, mask, *_ = run(seeded_graph(training=False), 3, x)
    assert torch.equal(dropped, x) and bool(mask.all())


def test_the_global_generator_is_left_as_it_was() -> None:
    graph, x = seeded_graph(), torch.ones(64, 8)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run(graph, 1, x)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_generator_is_left_as_it_was_after_a_failure() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        seeded(aten.bernoulli.p)(torch.tensor(1), 0, torch.ones(4), 7.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_operators_of_one_device_need_not_wait_for_those_of_another() -> None:
    drawn: list[torch.Tensor] = []

    def draw() -> None:
        drawn.append(seeded(torch.ops.aten.rand_like.default)(torch.tensor(1), 0, torch.ones(3)))

    with lock_of(torch.device("cuda", 1)):
        thread = threading.Thread(target=draw, daemon=True)
        thread.start()
        thread.join(timeout=60)
    assert len(drawn) == 1 and lock_of(torch.device("cpu")) is lock_of(torch.default_generator.device)


def test_threads_draw_the_same_numbers_as_one() -> None:
    graph, x, num_threads = seeded_graph(), torch.ones(64, 8), 4
    module = fx.GraphModule({}, graph)
    expected = [module(x, torch.tensor(seed)) for seed in range(num_threads)]
    barrier, equal = threading.Barrier(num_threads), [False] * num_threads

    def draw(seed: int) -> None:
        barrier.wait(timeout=60)
        rounds = [module(x, torch.tensor(seed)) for _ in range(10)]
        equal[seed] = all(all(map(torch.equal, found, expected[seed])) for found in rounds)

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert equal == [True] * num_threads


def test_attention_without_dropout_is_not_random() -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    still = graph.call_function(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q, 0.0))
    drops = graph.call_function(aten._scaled_dot_product_flash_attention.default, (q, q, q, 0.5))
    assert not is_random(still) and is_random(drops)


def test_an_operator_is_defined_once() -> None:
    assert seeded(aten.rand_like.default) is seeded(aten.rand_like.default)
