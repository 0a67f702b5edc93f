"""Kernels that compile side by side, and what is known of the processor before."""

import errno
import functools
import secrets
import threading
from pathlib import Path

import pytest
import torch
from traced_graphs import sine_of

from mirrorc import torch_internals as internals
from mirrorc.torch_internals.inductor import cpp_compiler


@pytest.mark.slow
@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_kernels_compiled_together_are_there_at_the_end() -> None:
    given = torch.randn(7, 3)
    with internals.kernels_compiled_together():
        functions = [internals.compile_with_inductor(*sine_of(rows), num_threads=1) for rows in (7, 8)]
    torch.testing.assert_close(functions[0]([given])[0], given.sin())
    torch.testing.assert_close(functions[1]([torch.ones(8, 3)])[0], torch.ones(8, 3).sin())


def test_kernels_compiled_together_are_waited_for_at_the_end_alone() -> None:
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import LambdaFuture

    waited: list[str] = []
    scopes = [{"kernel": LambdaFuture(functools.partial(waited.append, name))} for name in ("first", "second")]
    with internals.kernels_compiled_together():
        for scope in scopes:
            AsyncCompile().wait(scope)
        assert waited == []
    assert waited == ["first", "second"] and scopes[0] == {"kernel": None}
    AsyncCompile().wait({"kernel": LambdaFuture(lambda: waited.append("as before"))})
    assert waited[-1] == "as before"
    with pytest.raises(KeyError), internals.kernels_compiled_together():
        AsyncCompile().wait({"kernel": LambdaFuture(lambda: waited.append("in vain"))})
        raise KeyError
    assert waited[-1] == "as before"


@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_prepare_cpp_compiler_tries_once_what_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpu_vec_isa

    internals.prepare_cpp_compiler()
    known = cpu_vec_isa.valid_vec_isa_list()  # Inductor keeps the list
    tried: list[tuple[str, bool]] = []
    main_is_held = threading.Event()

    class Instructions(str):
        def __bool__(self) -> bool:
            main_is_held.wait(60)
            tried.append((str(self), threading.current_thread() is threading.main_thread()))
            if self == "avx512":
                raise OSError("no compiler")
            return True

    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [*map(Instructions, ("avx512", "avx2", "asimd"))])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512"])
    cpp_compiler._prepared.clear()
    try:
        internals.prepare_cpp_compiler()
        internals.prepare_cpp_compiler()
        threading.Timer(0.05, main_is_held.set).start()
        assert cpu_vec_isa.valid_vec_isa_list() is known  # once all are tried
        assert sorted(tried) == [("avx2", False), ("avx512", False)]
    finally:
        cpp_compiler._prepared.clear()


@pytest.mark.slow
@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_after_a_failure_kernels_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels whose compiler could not be started, for lack of memory, must not fail forever."""
    from torch._inductor.cpp_builder import CppBuilder

    rows = 1000 + secrets.randbelow(10**6)  # a kernel that is in no cache

    def build(builder: CppBuilder) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(CppBuilder, "build", build)
        with pytest.raises(OSError, match="Cannot allocate memory"), internals.kernels_compiled_together():
            internals.compile_with_inductor(*sine_of(rows), num_threads=1)
    with internals.kernels_compiled_together():
        function = internals.compile_with_inductor(*sine_of(rows), num_threads=1)
    given = torch.randn(rows, 3)
    torch.testing.assert_close(function([given])[0], given.sin())


@pytest.mark.slow
@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_instructions_are_tried_again_after_a_lack_of_memory() -> None:
    from torch._inductor import cpu_vec_isa

    known = cpu_vec_isa.valid_vec_isa_list()
    for instructions in cpu_vec_isa.supported_vec_isa_list:
        assert bool(instructions) in (False, True)
    with pytest.raises(MemoryError), internals.kernels_compiled_together():
        raise MemoryError
    found = cpu_vec_isa.valid_vec_isa_list()
    assert found is not known and found == known


@pytest.mark.slow
@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_fresh_files_take_the_place_of_overwritten_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert internals.kernel_folder() == tmp_path
    cpp_compiler.forget_loaded_kernels()
    try:
        internals.compile_with_inductor(*sine_of(13), num_threads=1)
        contents = {path: path.read_bytes() for path in tmp_path.rglob("*.py")}
        assert contents
        for path in contents:
            path.write_text("this is (no kernel")
        with internals.fresh_kernel_files():
            function = internals.compile_with_inductor(*sine_of(13), num_threads=1)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.py")} == contents
        torch.testing.assert_close(function([torch.ones(13, 3)])[0], torch.ones(13, 3).sin())
    finally:
        cpp_compiler.forget_loaded_kernels()
