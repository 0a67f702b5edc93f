from tiny_programs import captured_model, every_stage, targets
from torch import fx, nn

from mirrorc.analysis.gradients.factored_gradients import Maker, left_to_shares, maker_of
from mirrorc.ir import ops
from mirrorc.ir.gradient_forms import form_of
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes


def first_factored(graph: fx.Graph) -> fx.Node:
    return targets(graph, *ops.FACTORED)[0]


def test_who_makes_a_gradient_is_known_when_a_link_is_chosen() -> None:
    model = nn.Linear(40, 30, bias=False)
    stages = every_stage(captured_model(model, 2, 8, columns=40), min_factored_elements=0)
    made = {name: targets(program.graphs()[0], *ops.FACTORED) for name, program in stages.items()}
    after = {name: maker_of(gradients[0]) for name, gradients in made.items() if gradients}
    assert after["factor-gradients"] is after["pack-gradients"] is after["insert-all-reduce"] is None
    assert after["lower-collectives"] is after["lower-devices"] is Maker.SHARES
    assert Maker.SHARES.value == "by shares at the wait"


def test_pack_or_another_user_makes_what_is_not_left_to_shares() -> None:
    passes = [one for one in default_pipeline(min_factored_elements=0) if one.name != "share-parameters"]
    program = run_passes(captured_model(nn.Linear(40, 30, bias=False), 2, 8, columns=40), passes)
    graph = next(iter(program.device_graphs.values())).graph
    gradient, pack = first_factored(graph), targets(graph, ops.pack)[0]
    assert maker_of(gradient) is Maker.PACK and left_to_shares(pack) == []
    with graph.inserting_before(pack):
        graph.call_function(ops.store, (gradient,))
    assert maker_of(gradient) is Maker.AT_ONCE


def test_a_form_says_its_expression() -> None:
    program = run_passes(
        captured_model(nn.Linear(40, 30, bias=False), 2, 8, columns=40), default_pipeline(min_factored_elements=0)
    )
    gradient = first_factored(next(iter(program.device_graphs.values())).graph)
    assert form_of(gradient).expression("f32[30, 4]", "f32[4, 40]") == "f32[30, 4] @ f32[4, 40]"
