"""What becomes of files that Inductor keeps, when something has overwritten them."""

from pathlib import Path

import pytest
import torch
from traced_graphs import sine_of

from mirrorc import torch_internals as internals
from mirrorc.torch_internals.inductor import cpp_compiler


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
