import math
from typing import Any

import pytest
import torch

from mirrorc import torch_internals as internals
from mirrorc.torch_internals import recorded_by_autograd, replaced_operators

aten = torch.ops.aten


def test_operators_below_autograd_are_replaced() -> None:
    seen: list[Any] = []

    def replace(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(operator)
        return torch.sin(args[0]) if operator is aten.cos.default else NotImplemented

    x = torch.ones(3, requires_grad=True)
    with replaced_operators(replace):
        y = (torch.cos(x) * 2).sum()
    assert seen == [aten.cos.default, aten.mul.Tensor, aten.sum.default], "what it runs itself is not replaced"
    assert torch.equal(y, 2 * torch.sin(x).sum())
    y.backward()
    assert x.grad is not None and torch.allclose(x.grad, -2 * torch.sin(x)), "autograd knows nothing of it"


def test_each_source_is_copied_into_its_target() -> None:
    """Whatever the shapes, the strides and the dtypes; and none at all."""
    targets = [torch.zeros(3), torch.zeros(2, 4).t(), torch.zeros((), dtype=torch.float64), torch.zeros(0)]
    sources = [torch.arange(3.0), torch.rand(4, 2), torch.tensor(2.5), torch.zeros(0)]
    internals.copy_each(targets, sources)
    assert all(torch.equal(one, other.to(one.dtype)) for one, other in zip(targets, sources, strict=True))
    internals.copy_each([], [])


def test_norms_of_each_are_those_of_all_elements_whatever_the_strides() -> None:
    tensors = [torch.randn(3, 4).t(), torch.randn(5), torch.randn(6, 7)[1:3], torch.full((2,), torch.nan)]
    for one, tensor in zip(internals.norms_of_each(tensors), tensors, strict=True):
        torch.testing.assert_close(one, tensor.flatten().norm(), equal_nan=True)
    assert internals.norms_of_each([]) == []
    for norm_type in (1.0, 3.0, math.inf):
        for one, tensor in zip(internals.norms_of_each(tensors, norm_type, torch.float64), tensors, strict=True):
            torch.testing.assert_close(one, tensor.double().flatten().norm(norm_type), equal_nan=True)


def test_numbers_are_subtracted_from_whole_tensors() -> None:
    """Exactly, also from large ones of integers."""
    tensors = [torch.tensor([2**60 + 1, 5]), torch.zeros(0, dtype=torch.int64)]
    assert [one.tolist() for one in internals.subtract_each(tensors, [2**60, 3])] == [[1, 5 - 2**60], []]
    assert internals.subtract_each([], []) == []


def test_scale_each_writes_in_place_whatever_the_dtypes() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.complex64):
        targets = [torch.ones(3, dtype=dtype), torch.ones(2, 2, dtype=dtype)]
        internals.scale_each(targets, torch.tensor(0.5))
        assert all(target.dtype == dtype and bool((target == 0.5).all()) for target in targets)
    internals.scale_each([], torch.tensor(0.5))


def test_operators_without_kernels_of_their_own_are_composite() -> None:
    composite = (aten.linear.default, aten.dropout.default, aten.reshape.default, aten.matmul.default)
    others = (
        aten.mm.default,
        aten.clone.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.native_dropout.default,
    )
    assert all(map(internals.is_composite, composite)) and not any(map(internals.is_composite, others))
    assert not internals.is_composite(torch.ops.mirrorc.mm_into.default)


def test_what_an_operator_is_and_declares() -> None:
    assert internals.is_operator(aten.add_.Tensor)
    assert not any(map(internals.is_operator, (aten.add_, torch.add, "aten.add_.Tensor", None)))
    assert internals.with_overload(aten.relu) is aten.relu.default
    assert (
        internals.with_overload(aten.add.Tensor) is aten.add.Tensor and internals.with_overload(torch.add) is torch.add
    )
    schema = internals.schema_of(aten.add_.Tensor)
    assert (schema.name, schema.overload_name) == ("aten::add_", "Tensor")
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"] and len(schema.returns) == 1
    assert schema.arguments[0].alias_info.is_write and schema.arguments[1].alias_info is None
    assert internals.writes_argument(aten.add_.Tensor) and not internals.writes_argument(aten.add.Tensor)
    assert internals.bare_name(aten.add_.Tensor) == internals.bare_name(aten.add.Scalar) == "add"


def test_a_lazily_negative_tensor_shares_memory() -> None:
    tensor = torch.ones(3)
    negative = internals.lazily_negative(tensor)
    assert negative.is_neg() and negative.tolist() == [-1.0] * 3
    tensor.mul_(2)
    assert negative.tolist() == [-2.0] * 3


def test_fake_tensors_have_a_mode_and_a_device_and_no_memory() -> None:
    mode = internals.FakeTensorMode()
    made = internals.FakeTensor(mode, torch.empty_strided((2, 3), (1, 2), device="meta"), torch.device("cpu"))
    assert made.fake_mode is mode and made.device.type == "cpu" and made.stride() == (1, 2)
    with mode:
        assert isinstance(torch.empty(2), internals.FakeTensor)


def test_a_kernel_is_recorded_only_within_the_block() -> None:
    leaf = torch.ones(3, requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd():  # as in a kernel
        assert not (leaf * 2).requires_grad
        with recorded_by_autograd():
            doubled = leaf * 2
        assert not (leaf * 2).requires_grad
    (gradient,) = torch.autograd.grad(doubled.sum(), leaf)
    assert gradient.tolist() == [2.0, 2.0, 2.0]


def test_a_false_tensor_raises_and_a_trace_keeps_the_assert() -> None:
    internals.assert_true(torch.tensor(True), "it is false")
    with pytest.raises(RuntimeError, match="it is false"):
        internals.assert_true(torch.tensor([False]), "it is false")

    def asserts(x: torch.Tensor) -> torch.Tensor:
        internals.assert_true(x > 0, "it is false")
        return x * 2

    traced = torch.compile(asserts, backend="eager", fullgraph=True)
    assert traced(torch.tensor(1.0)) == 2
    with pytest.raises(RuntimeError, match="it is false"):
        traced(torch.tensor(-1.0))


def test_checks_of_tensors_are_asserts_in_a_trace() -> None:
    def checks(x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x > 0, lambda: "not positive")
        torch._check_tensor_all_with(ValueError, x < 9)
        return x * 2

    torch._dynamo.reset()
    with internals.traced_instead(internals.CHECKS_OF_TENSORS):
        traced = torch.compile(checks, backend="eager", fullgraph=True)
        assert traced(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
        for bad in (-1.0, 9.0):
            with pytest.raises(RuntimeError, match="not all elements are true"):
                traced(torch.tensor([1.0, bad, 1.0]))
