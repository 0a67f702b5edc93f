"""Gradients in regions that are larger than their factors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.gradients.region_gradients import calls_by_region, gradient_places
from mirrorc.analysis.gradients.whole_gradients import why_whole_in_microbatches
from mirrorc.analysis.graph.aliases import ViewedVariables, origins
from mirrorc.ir.gradient_forms import FORMS, FactoredGradient, recognize
from mirrorc.ir.program import Program
from mirrorc.torch_internals import assume_num_elements, num_elements_now


class FactorsOfRegions:
    """Chooses which gradients of an OUTLINED program's regions become factors.

    Args:
        whole: receives the reason, by variable whose gradient stays whole.
        due: variables whose gradients must become factors.
    """

    def __init__(
        self,
        program: Program,
        graphs: Sequence[fx.Graph],
        bodies: Mapping[str, fx.Graph],
        names: Mapping[fx.Node, str],
        whole: dict[str, str],
        due: Collection[str],
    ) -> None:
        self._names, self._calls = names, calls_by_region(graphs)
        self._recognized_in = {
            name: dict(_recognized(program, bodies[name], calls, names, whole)) for name, calls in self._calls.items()
        }
        of_graph: dict[str, dict[fx.Graph, tuple[fx.Node, FactoredGradient]]] = {}
        for name, factored in self._recognized_in.items():
            results: Any = bodies[name].output_node().args[0]
            for place, gradient in factored.items():
                for part in self._parts(name, place):
                    of_graph.setdefault(names[part], {})[part.graph] = results[place], gradient
        self._chosen = {
            variable
            for variable, factored in of_graph.items()
            if _choose(program, graphs, variable, factored, whole, is_due=variable in due)
        }

    def chosen(self, region: str) -> dict[int, FactoredGradient]:
        return {
            place: gradient
            for place, gradient in self._recognized_in[region].items()
            if all(self._names[part] in self._chosen for part in self._parts(region, place))
        }

    def _parts(self, region: str, place: int) -> list[fx.Node]:
        return [part for call in self._calls[region] for part in call.users if part.args[1] == place]


def arguments_of(body: fx.Graph, calls: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    placeholders = [node for node in body.nodes if node.op == "placeholder"]
    return {p: [node.args[i] for node in calls] for i, p in enumerate(placeholders)}  # type: ignore[misc]


def _recognized(
    program: Program, body: fx.Graph, calls: list[fx.Node], names: Mapping[fx.Node, str], whole: dict[str, str]
) -> dict[int, FactoredGradient]:
    results: Sequence[fx.Node] = body.output_node().args[0]  # type: ignore[assignment]
    arguments, viewed_variables = arguments_of(body, calls), ViewedVariables(program)
    places = [gradient_places(node, names)[0] for node in calls]
    factored = {}
    for place in places[0]:
        if not all(place in by_place for by_place in places):
            continue
        gradient = recognize(results[place])
        variables = [by_place[place] for by_place in places]
        if gradient is None or results.count(results[place]) > 1:
            whole.update(dict.fromkeys(variables, _of_no_form()))
            continue
        shown = set().union(*map(origins, gradient.factors))
        sources = [source for origin in shown for source in arguments.get(origin, ())]
        if any(map(viewed_variables.of, sources)):
            whole.update(dict.fromkeys(variables, "with a parameter as a factor, which an update writes"))
        else:
            factored[place] = gradient
    return factored


def _choose(
    program: Program,
    graphs: Sequence[fx.Graph],
    variable: str,
    of_graph: Mapping[fx.Graph, tuple[fx.Node, FactoredGradient]],
    whole: dict[str, str],
    *,
    is_due: bool,
) -> bool:
    """True if a gradient becomes factors in all graphs; else ``whole`` may get the reason.

    The size of factors is that of all microbatches of a replica. Gradients that are due were chosen by all workers.
    """
    if len(of_graph) < len(graphs):
        return False
    shards = set(program.shard_of_microbatch) or {(shard,) for shard in range(len(graphs))}
    for shard in shards - {()}:
        gradients = [of_graph[graphs[number]] for number in shard]
        result, (first, *_) = gradients[0][0], [gradient for _, gradient in gradients]
        if program.num_replicas == 1 and first.form.writes_all and not is_due:
            whole[variable] = "of which one device writes every element in any case"
            return False
        if program.workers.are_several and not first.form.writes_all and not is_due:
            whole[variable] = "of tables, in which other workers have looked up other rows"
            return False
        if len(shard) > 1 and (why := why_whole_in_microbatches(first.form)):
            whole[variable] = why
            return False
        if is_due:
            continue
        factors = [factor.meta["val"] for _, gradient in gradients for factor in gradient.factors]
        is_worth_it = first.form.is_worth_it(result.meta["val"], factors)
        _guard_sizes(factors, result.meta["val"], are_chosen=is_worth_it)
        if not is_worth_it:
            whole[variable] = "no larger than their factors"
            return False
    return True


_MUCH = 4  # with symbols, factors may become this many times larger or smaller before the choice changes


def _guard_sizes(factors: Sequence[torch.Tensor], gradient: torch.Tensor, *, are_chosen: bool) -> None:
    """Guards symbolic sizes, so that the graph only runs for sizes with nearly the same choice."""
    whole = num_elements_now(gradient)
    if are_chosen:
        assume_num_elements(factors, most=whole * _MUCH)
    else:
        assume_num_elements(factors, least=whole / _MUCH)


def _of_no_form() -> str:
    *first, last = (form.description for form in FORMS.values())
    return f"neither {', '.join(first)} nor {last}"
