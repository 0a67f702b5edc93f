"""Finds which gradients regions can give as factors, and for which of them the factors are smaller."""

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
    """The gradients of a program that all of its regions can give as factors which are smaller than the gradients.

    Args:
        program: an OUTLINED program.
        graphs: its graphs.
        bodies: the bodies of its regions, by name.
        names: the gradients that may be factored, with their variables.
        whole: gets the reason why a variable's gradient stays whole, for all others that regions give.
        due: the variables whose gradients are wanted as factors, whatever their sizes.
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
        self._found = {
            name: dict(_recognized(program, bodies[name], calls, names, whole)) for name, calls in self._calls.items()
        }
        of_graph: dict[str, dict[fx.Graph, tuple[fx.Node, FactoredGradient]]] = {}
        for name, own in self._found.items():
            results: Any = bodies[name].output_node().args[0]
            for place, gradient in own.items():
                for part in self._parts(name, place):
                    of_graph.setdefault(names[part], {})[part.graph] = results[place], gradient
        self._chosen = {
            variable
            for variable, own in of_graph.items()
            if _are_smaller(program, graphs, variable, own, whole, is_due=variable in due)
        }

    def chosen(self, region: str) -> dict[int, FactoredGradient]:
        """The factors of each gradient that a region is to give as factors, by the index of the result that is the gradient."""
        return {
            place: gradient
            for place, gradient in self._found[region].items()
            if all(self._names[part] in self._chosen for part in self._parts(region, place))
        }

    def _parts(self, region: str, place: int) -> list[fx.Node]:
        """The nodes that take one result of a region, over all its calls."""
        return [part for call in self._calls[region] for part in call.users if part.args[1] == place]


def arguments_of(body: fx.Graph, calls: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each placeholder of a region's body, the arguments that the calls pass for it."""
    placeholders = [node for node in body.nodes if node.op == "placeholder"]
    return {p: [node.args[i] for node in calls] for i, p in enumerate(placeholders)}  # type: ignore[misc]


def _recognized(
    program: Program, body: fx.Graph, calls: list[fx.Node], names: Mapping[fx.Node, str], whole: dict[str, str]
) -> dict[int, FactoredGradient]:
    """The factors of each gradient that has some, by the index of the region's result that is the gradient."""
    results: Sequence[fx.Node] = body.output_node().args[0]  # type: ignore[assignment]
    given, viewed_variables = arguments_of(body, calls), ViewedVariables(program)
    places = [gradient_places(node, names)[0] for node in calls]
    found = {}
    for place in places[0]:
        if not all(place in own for own in places):
            continue
        gradient = recognize(results[place])
        variables = [own[place] for own in places]
        if gradient is None or results.count(results[place]) > 1:
            whole.update(dict.fromkeys(variables, _of_no_form()))
            continue
        shown = set().union(*map(origins, gradient.factors))
        sources = [source for origin in shown for source in given.get(origin, ())]
        if any(map(viewed_variables.of, sources)):
            whole.update(dict.fromkeys(variables, "with a parameter as a factor, which an update writes"))
        else:
            found[place] = gradient
    return found


def _are_smaller(
    program: Program,
    graphs: Sequence[fx.Graph],
    variable: str,
    own: Mapping[fx.Graph, tuple[fx.Node, FactoredGradient]],
    whole: dict[str, str],
    *,
    is_due: bool,
) -> bool:
    """Whether a variable's gradient has factors on all replicas, whatever the sizes of their shards, and these are smaller.

    The factors of all microbatches of a replica count together. One device has no shares to make: it is given factors of those
    gradients alone of which it need not write every element. Which factors workers send to each other is decided before, alike on
    all of them, and which ones an optimizer takes (``is_due``).
    """
    if len(own) < len(graphs):
        return False
    shards = set(program.shard_of_microbatch) or {(shard,) for shard in range(len(graphs))}
    for shard in shards - {()}:
        found = [own[graphs[number]] for number in shard]
        result, (first, *_) = found[0][0], [gradient for _, gradient in found]
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
        factors = [factor.meta["val"] for _, gradient in found for factor in gradient.factors]
        is_worth_it = first.form.is_worth_it(result.meta["val"], factors)
        _keep_to_such_sizes(factors, result.meta["val"], are_chosen=is_worth_it)
        if not is_worth_it:
            whole[variable] = "no larger than their factors"
            return False
    return True


_MUCH = 4  # with symbols: how many times larger or smaller factors may become than their gradient, and the choice stays


def _keep_to_such_sizes(factors: Sequence[torch.Tensor], gradient: torch.Tensor, *, are_chosen: bool) -> None:
    """Has a graph with symbolic sizes be right for those alone with which the choice would be much the same."""
    whole = num_elements_now(gradient)
    if are_chosen:
        assume_num_elements(factors, most=whole * _MUCH)
    else:
        assume_num_elements(factors, least=whole / _MUCH)


def _of_no_form() -> str:
    *first, last = (form.description for form in FORMS.values())
    return f"neither {', '.join(first)} nor {last}"
