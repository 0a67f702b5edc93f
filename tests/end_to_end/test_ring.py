"""Several sends of one bucket, known by chunk and round: a ring, verified and run end to end."""

import copy
import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from references import assert_trains_alike, train_mirrored, train_on_one_device
from selections import exhaustive, slow_but, thinned
from small_modules import module_of
from tiny_programs import MUON, SMALL_BUCKETS, TwoLayers, Weight, handmade, run_up_to, targets
from torch import fx, nn
from torch.nn import functional as F
from twins import compiled_step, trained_two_layers

import mirrorc
from mirrorc.all_reduce_algorithms import ALGORITHMS, ReduceToOne, Ring
from mirrorc.errors import VerifyError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import insert
from mirrorc.ir.program import Program
from mirrorc.ir.routes import route_of
from mirrorc.passes import LowerDevices
from mirrorc.verifier.rules.collective_launches import nothing_is_written_in_flight
from mirrorc.verifier.verifier import verify

aten = torch.ops.aten


def check_rows(step: mirrorc.Step) -> None:
    found, program = step.explain(), step.program
    sends = [bucket for bucket in found.buckets if bucket.kind == "send"]
    labels = [bucket.label for bucket in sends]
    assert len({*labels}) == len(labels) and all(f"\n  {label} " in str(found) for label in labels)
    assert ("r and c are the round" in " ".join(str(found).split())) == bool(sends)
    for bucket in program.buckets if sends else ():
        first_round = [sent.num_bytes for sent in sends if sent.index == bucket.index and sent.round == 0]
        assert len(first_round) == program.num_replicas and sum(first_round) == bucket.num_bytes


def trained(num_devices: int, link: str, add: Sequence[mirrorc.Placed] = ()) -> tuple[Program, torch.Tensor]:
    options = {"link": link, "disable": ["share-parameters"], **SMALL_BUCKETS}
    step, found = trained_two_layers(num_devices, add=add, **options)
    with step:
        check_rows(step)
        assert step.memory().total > 0 and f"over {link}, ms" in str(step.explain())
        return step.program, found


@pytest.mark.fast
@pytest.mark.parametrize("link", slow_but(["copy"], ["shared-memory", "copy"]))
@pytest.mark.parametrize("num_devices", slow_but([3], [2, 3]))
def test_a_ring_sums_like_an_all_reduce(num_devices: int, link: str) -> None:
    program, found = trained(num_devices, link, [mirrorc.after("lower-collectives", Ring())])
    sends = [node for module in program.device_graphs.values() for node in targets(module.graph, ops.send)]
    routes = {route_of(program, node) for node in sends}
    assert len(routes) == len(sends) == len(program.buckets) * num_devices * 2 * (num_devices - 1)
    assert not any(targets(module.graph, *ops.REDUCTIONS) for module in program.device_graphs.values())
    _, expected = trained(num_devices, link)
    if num_devices == 2:  # the sum of two does not depend on their order
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def ring_of(num_devices: int) -> Program:
    program = Ring().run(run_up_to("lower-collectives", handmade(num_devices, [Weight("w", (6,))]), link="copy"))
    verify(program)
    return program


@pytest.mark.fast
def test_what_is_sent_is_printed_with_chunk_and_round() -> None:
    text = LowerDevices().run(ring_of(3)).to_text(fold=False)
    assert "send(bucket=0, b0_c2_own, destination=1, chunk=2, round=0, link=copy)" in text
    assert "= recv(bucket=0, source=2, chunk=1, round=0, link=copy)" in text
    assert "b0_c1_received: f32[5]           = wait(bucket=0, b0_c1_incoming)" in text


def first(graph: fx.Graph, target: Any) -> fx.Node:
    return targets(graph, target)[0]


def add_the_same_twice(graph: fx.Graph) -> None:
    one = first(graph, aten.add.Tensor)
    one.args = (one.args[0], one.args[0])


def leave_a_sum_out(graph: fx.Graph) -> None:
    one = first(graph, aten.add.Tensor)
    one.replace_all_uses_with(one.args[0])  # type: ignore[arg-type]


def exchange_chunks(graph: fx.Graph) -> None:
    cat = first(graph, aten.cat.default)
    cat.args = (cat.args[0][::-1],)  # type: ignore[index]


def send_another_chunk(graph: fx.Graph) -> None:
    send = first(graph, ops.send)
    slices = [node for node in targets(graph, aten.slice.Tensor) if node.args[0] is send.args[0].args[0]]  # type: ignore[union-attr]
    other = next(node for node in slices if node is not send.args[0])
    send.args = (other,)
    other.append(send)


def name_another_round(graph: fx.Graph) -> None:
    send = first(graph, ops.send)
    send.kwargs = {**send.kwargs, "round": 1}


def name_another_chunk(graph: fx.Graph) -> None:
    receipt = first(graph, ops.recv)
    receipt.kwargs = {**receipt.kwargs, "chunk": 1 - receipt.kwargs["chunk"]}  # type: ignore[operator]


def send_a_value_of_no_bucket(graph: fx.Graph) -> None:
    send = first(graph, ops.send)
    with graph.inserting_before(send):
        read = graph.call_function(ops.read, (), {"variable": "w", "replica": 0})
    read.meta["val"] = first(graph, ops.read).meta["val"]
    send.args = (read,)


def reduce_what_is_sent(graph: fx.Graph) -> None:
    """A reduction, which may add up in the buckets that it is given, of a bucket whose chunks are offered."""
    after = targets(graph, aten.cat.default)[-1]
    packs = tuple(targets(graph, ops.pack))
    with graph.inserting_after(after):
        launch = graph.call_function(ops.all_reduce, packs, {"bucket": 0, "op": "sum", "link": "copy"})
    launch.meta["val"] = ops.Pending(packs[0].meta["val"])
    for replica in (1, 0):
        with graph.inserting_after(launch):
            wait = graph.call_function(ops.wait, (launch,), {"bucket": 0, "replica": replica})
        wait.meta["val"] = packs[0].meta["val"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (add_the_same_twice, "collectives_match_their_tags"),
        (leave_a_sum_out, "every_bucket_is_updated_once"),
        (exchange_chunks, "every_bucket_is_updated_once"),
        (send_another_chunk, "collectives_match_their_tags"),
        (name_another_round, "every_send_is_received"),
        (name_another_chunk, "every_send_is_received"),
        (send_a_value_of_no_bucket, "collectives_match_their_tags"),
        (reduce_what_is_sent, "buckets_in_flight_are_not_used"),
    ],
)
def test_a_ring_that_is_no_sum_is_refused(change: Callable[[fx.Graph], None], rule: str) -> None:
    program = ring_of(2)
    change(program.mirrored_graph)
    with pytest.raises(VerifyError, match=f"breaks the rule {rule} "):
        verify(program)


def as_it_is(program: Program, added: fx.Node, sent: fx.Node) -> None:
    """Sends a sum itself."""


def by_a_part(program: Program, added: fx.Node, sent: fx.Node) -> None:
    split = insert(program, sent, aten.split.Tensor, (added, len(added.meta["val"])))
    sent.args = (insert(program, sent, operator.getitem, (split, 0)),)


def by_an_undeclared_view(program: Program, added: fx.Node, sent: fx.Node) -> None:
    sent.args = (insert(program, sent, aten._unsafe_view.default, (added, [len(added.meta["val"])])),)


def add_in_place(
    program: Program, *, after_the_send: bool, show: Callable[[Program, fx.Node, fx.Node], None] = as_it_is
) -> tuple[fx.Node, fx.Node]:
    added = first(program.mirrored_graph, aten.add.Tensor)
    sent = next(user for user in added.users if user.target is ops.send)
    show(program, added, sent)
    insert(program, sent.next if after_the_send else sent, aten.add_.Tensor, (added, 1.0))
    return added, sent


@pytest.mark.fast
def test_what_is_sent_is_not_written_in_place_afterwards() -> None:
    for show in (by_a_part, by_an_undeclared_view, as_it_is):
        program = ring_of(3)
        added, sent = add_in_place(program, after_the_send=True, show=show)
        (violation,) = nothing_is_written_in_flight(program)
        assert str(violation).endswith(f" writes {added.name}, which {sent.name} still offers")
    with pytest.raises(
        VerifyError, match="breaks the rule regions_write_only_their_memory "
    ):  # no operator may, anywhere
        verify(program)
    program = ring_of(3)
    add_in_place(program, after_the_send=False)
    assert not list(nothing_is_written_in_flight(program))


@pytest.mark.fast
def test_parameters_that_are_sent_are_not_stored_to_afterwards() -> None:
    program = run_up_to("lower-collectives", handmade(2, [Weight("a", rule=MUON)]), **SMALL_BUCKETS)
    send = first(program.mirrored_graph, ops.send)
    with program.mirrored_graph.inserting_after(send):
        program.mirrored_graph.call_function(ops.store, send.args, {"bucket": 0, "replica": 0})
    said = "(?s)nothing_is_written_in_flight .* store writes the parameters of bucket 0, which send_b0_to_r1_r0 still offers"
    with pytest.raises(VerifyError, match=said):
        verify(program)


@pytest.mark.fast
def test_a_ring_in_which_everyone_waits_before_sending_is_refused() -> None:
    program = LowerDevices().run(ring_of(2))
    for module in program.device_graphs.values():
        send, wait = first(module.graph, ops.send), first(module.graph, ops.wait)
        wait.append(send)
    with pytest.raises(
        VerifyError, match=r"(?s)breaks the rule no_device_waits_forever .* devices would wait for each other"
    ):
        verify(program)


# Training with every algorithm of all-reduce means what training on one device means.


ADAMW = partial(torch.optim.AdamW, lr=0.1)
ALGORITHM_NAMES = [*ALGORITHMS]
HOW = ["shared", "mirrored", "copy"]


def batches(num_examples: int = 12) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    target = torch.arange(num_examples) % 3
    return [
        {"x": torch.randn(num_examples, 4, dtype=torch.float64, generator=draw), "target": target} for _ in range(3)
    ]


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def net() -> TwoLayers:
    torch.manual_seed(0)
    return TwoLayers().double()


def trained_by_messages(num_devices: int, **options: Any) -> torch.Tensor:
    options = {**SMALL_BUCKETS, **options}
    return parameters(train_mirrored(net(), ADAMW, batches(), num_devices, F.cross_entropy, **options).model)


SOME = [(name, 3, how) for name, how in zip(ALGORITHM_NAMES, HOW * 3, strict=False)]
SOME += [("ring", 4, "shared"), ("tree", 1, "shared")]
ALL = [*product(ALGORITHM_NAMES, [1, 2, 3, 4, 8], HOW)]
THINNED = [case.values for case in thinned(ALGORITHM_NAMES, [1, 2, 3, 4, 8], HOW) if not case.marks]


@pytest.mark.parametrize(
    ("algorithm", "num_devices", "how"),
    [
        *SOME,
        *(case for case in THINNED if case not in SOME),
        *exhaustive(*(case for case in ALL if case not in SOME and case not in THINNED)),
    ],
)
def test_training_agrees_with_one_device(algorithm: str, num_devices: int, how: str) -> None:
    options: dict[str, Any] = {
        "shared": {},
        "mirrored": {"disable": ["share-parameters"]},
        "copy": {"disable": ["share-parameters"], "link": "copy"},
    }[how]
    options |= {**SMALL_BUCKETS, "algorithm": algorithm}
    assert_trains_alike(net(), ADAMW, batches(), num_devices, F.cross_entropy, **options)


def test_sums_in_the_order_of_replicas_have_the_bits_of_native_ones() -> None:
    expected = trained_by_messages(3)
    for algorithm in ("reduce-to-one{device=2}", "round-robin"):
        assert torch.equal(trained_by_messages(3, algorithm=algorithm, exact_order=True), expected), algorithm
    assert torch.equal(
        trained_by_messages(2, algorithm="ring"), trained_by_messages(2)
    )  # the sum of two does not depend on their order


def test_two_replicas_with_gradients_of_ones_take_a_quarter_twice() -> None:
    """A weight of ones, gradients of ones on each replica, and a learning rate of 0.25: half of it is left."""
    for algorithm in ALGORITHM_NAMES:
        model = nn.Linear(10, 1, bias=False)
        nn.init.ones_(model.weight)
        loss_fn = lambda output, target: (output - target).sum()  # noqa: E731
        options = {"optimizer": partial(torch.optim.SGD, lr=0.25), "loss_reduction": "sum"}
        with compiled_step(model, loss_fn, algorithm=algorithm, **options) as step:
            step(torch.ones(2, 10), target=torch.zeros(2, 1))
        assert torch.equal(model.weight, torch.full((1, 10), 0.5)), algorithm


def test_pack_sizes_do_not_change_the_result() -> None:
    found = [trained_by_messages(2, algorithm="ring", buckets=buckets) for buckets in ("auto", 1 / 2**20, 4 / 2**20)]
    assert all(torch.equal(one, found[0]) for one in found)


def test_gradients_that_would_be_factors_are_sent_whole() -> None:
    torch.manual_seed(0)
    model = module_of(
        lambda self, x: self.head(torch.tanh(self.wide(self.table(x)))),
        table=nn.Embedding(600, 256),
        wide=nn.Linear(256, 520),
        head=nn.Linear(520, 3),
    ).double()
    batch = [{"x": torch.arange(6), "target": torch.arange(6) % 3}]
    expected = parameters(train_on_one_device(model, ADAMW, batch, F.cross_entropy).model)
    for named in ((), ("factor-gradients",)):
        found = copy.deepcopy(model)
        with compiled_step(found, F.cross_entropy, optimizer=ADAMW, algorithm="ring", disable=named) as step:
            step(**batch[0])
            said = "no gradient stays factors: ring sends whole gradients between devices"
            assert (said in [str(remark.text) for remark in step.program.remarks]) is not bool(named)
        torch.testing.assert_close(parameters(found), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["ring", "reduce-to-one"])
def test_clipping_checks_and_microbatches_work_with_sums_of_messages(algorithm: str) -> None:
    for shares in (True, False):
        options: dict[str, Any] = {} if shares else {"disable": ["share-parameters"]}
        options |= {"clip_grad_norm": 0.1, "clip_grad_value": 0.05, "check_finite": True, "microbatches": 2}
        expected = trained_by_messages(2, **options)  # it measures norms of parts
        torch.testing.assert_close(
            trained_by_messages(2, algorithm=algorithm, **options), expected, rtol=1e-12, atol=1e-12
        )


def test_gradients_that_were_accumulated_are_in_the_sum() -> None:
    found = []
    for algorithm in ("native", "ring"):
        model = net()
        with compiled_step(model, F.cross_entropy, optimizer=ADAMW, algorithm=algorithm) as step:
            for batch in batches():
                step.accumulate(**batch)
                step(**batch)
                step.evaluate(**batch)
        found.append(parameters(model))
    assert torch.equal(*found)


@pytest.mark.fast
def test_an_optimizer_that_runs_by_itself_gets_the_whole_sum() -> None:
    def muon(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([model.fc1.weight, model.fc2.weight], lr=0.1)

    results = []
    for options in ({}, {"algorithm": "ring"}, {"algorithm": "tree", "disable": ["share-parameters"]}):
        model = net()
        model.fc1.bias.requires_grad_(False)
        model.fc2.bias.requires_grad_(False)
        with compiled_step(model, F.cross_entropy, optimizer=muon(model), **options) as step:
            for batch in batches():
                step(**batch)
        results.append(parameters(model))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.fast
def test_a_program_shows_its_messages_and_what_they_cost() -> None:
    model = net()
    options = {"algorithm": ReduceToOne(device=1), "disable": ["share-parameters"]}
    with compiled_step(model, F.cross_entropy, 3, optimizer=ADAMW, **options) as step:
        step(**batches()[0])
        text = str(step.program)
        assert "send(bucket=0, b0, destination=1, chunk=0, round=0, link=shared-memory)" in text
        assert "reduce-to-one for bucket 0" in text and "in a step a device sends at most" in text
        assert not any(targets(module.graph, *ops.REDUCTIONS) for module in step.program.device_graphs.values())
        assert step.memory().total > 0 and "send" in str(step.explain())
