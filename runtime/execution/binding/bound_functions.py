"""Functions of a program's graphs, bound to memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import fx

from mirrorc.ir.nodes import is_region_call
from mirrorc.ir.program import Program
from mirrorc.runtime.codegen.graph_function import GraphFunction, generate
from mirrorc.runtime.execution.binding.binder import Binder
from mirrorc.runtime.execution.binding.eager_backward import driven, waits_between
from mirrorc.runtime.execution.binding.interleaving import pauses_at
from mirrorc.runtime.profiling.recorder import Recorder


class BoundFunctions:
    """One function per replica, bound again for each memory layout. Functions in ``pausing`` yield at `pauses_at`."""

    def __init__(self, program: Program, binder: Binder, recorder: Recorder | None) -> None:
        self._program, self._binder, self._recorder = program, binder, recorder
        self._layout = -1
        self.whole: list[GraphFunction] = []
        self.pausing: list[GraphFunction] = []

    def bind(self) -> None:
        if self._layout == self._binder.state.layout:
            return
        self._binder.pieces.clear()
        self._binder.summed_pieces.clear()
        self._binder.all_deferred.clear()
        self.whole, self.pausing = self._generate(), []
        if self._recorder is not None:
            self._recorder.nodes = [function.marked for function in self.whole]
        self._layout = self._binder.state.layout

    def bind_pausing(self) -> None:
        if not self.pausing:
            self.pausing = self._generate(pauses_at)

    def _generate(self, pauses: Callable[[fx.Node], bool] = lambda _: False) -> list[GraphFunction]:
        clocks = self._recorder.clocks if self._recorder is not None else [None] * self._program.num_replicas
        bind = self._binder.bind
        functions = [
            generate(
                name,
                module.graph,
                functools.partial(bind, r),
                boxed=is_region_call,
                clock=clocks[r],
                pauses=pauses,
                waits=waits_between(self._program, module.graph).__contains__,
            )
            for r, (name, module) in enumerate(self._program.device_graphs.items())
        ]
        for function in functions:
            if function.asks:
                function.call = driven(function)
        return functions
