"""Calls torch functions directly in Inductor's code."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def call_directly(operator: Any, call: str) -> None:
    """Makes Inductor call an operator's Python function directly, without the dispatcher.

    Args:
        operator: takes only tensors, writes the first, and returns nothing.
        call: code of the call, with ``{0}`` for the first argument. It can use names such as ``extern_kernels``.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    class DirectCall(ir.ExternKernel):
        def __init__(self, arguments: list[Any]) -> None:
            inputs = self.unwrap_storage([self.realize_input(argument) for argument in arguments])
            super().__init__(None, ir.NoneLayout(device=arguments[0].get_device()), inputs, op_overload=operator)
            V.graph.mark_buffer_mutated(self.input_name(0))
            self.name = V.graph.register_buffer(self)
            V.graph.register_operation(self)

        def codegen(self, wrapper: Any) -> None:
            inputs: Any = self.inputs
            wrapper.writeline(call.format(*(argument.codegen_reference() for argument in inputs)))

        def should_allocate(self) -> bool:
            return False

        def has_side_effects(self) -> bool:
            return True

        def get_mutation_names(self) -> list[str]:
            return [self.input_name(0)]

    plain = lowering.fallback_handler(operator, add_to_fallback_set=False)

    def lowered(*arguments: Any) -> Any:
        if V.graph.cpp_wrapper:
            return plain(*arguments)
        DirectCall(list(arguments))
        return None

    lowering.register_lowering(operator, type_promotion_kind=None)(lowered)
