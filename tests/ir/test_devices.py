import pytest
import torch

from mirrorc.ir.devices import parse_devices


def names(devices: object) -> list[str]:
    return [device.name for device in parse_devices(devices)]  # type: ignore[arg-type]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["cpu:0", "cpu:1"], ["cpu:0", "cpu:1"]),
        (["cpu"], ["cpu:0"]),
        (("cpu:3", torch.device("cpu")), ["cpu:3", "cpu:0"]),
        ([torch.device("cpu", 1)], ["cpu:1"]),
        (3, ["cpu:0", "cpu:1", "cpu:2"]),
        (None, ["cpu:0"]),
    ],
)
def test_names_of_cpus(given: object, expected: list[str]) -> None:
    assert names(given) == expected
    assert {device.torch_device for device in parse_devices(given)} == {torch.device("cpu")}  # type: ignore[arg-type]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["cuda:0", "cuda:1"]),
        (2, ["cuda:0", "cuda:1"]),
        (1, ["cuda:0"]),
        (["cuda:1", "cuda"], ["cuda:1", "cuda:0"]),
        (["cuda:0", "cuda:0/1"], ["cuda:0", "cuda:0/1"]),
        (["cuda:1/0"], ["cuda:1"]),
    ],
)
def test_names_of_gpus(given: object, expected: list[str]) -> None:
    assert names(given) == expected


@pytest.mark.usefixtures("two_gpus")
def test_logical_devices_on_one_gpu_share_its_memory() -> None:
    one, other = parse_devices(["cuda:1", "cuda:1/1"])
    assert one.torch_device == other.torch_device == torch.device("cuda", 1)
    assert str(other) == "cuda:1/1"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "(?s)devices is empty: .*name devices like"),
        (0, "devices is empty"),
        (["cpu:0", "cpu"], "'cpu:0' is named twice"),
        (["cuda:0", "cuda:0/0"], "'cuda:0' is named twice"),
        (["cpu:0", "cuda:0"], r"mix CPUs and GPUs \(cpu:0, cuda:0\)"),
        (["tpu:0"], "unknown device 'tpu:0'\n  fix:  name devices like"),
        (["cuda:-1"], "unknown device 'cuda:-1'"),
        (["cpu:0/1"], "'cpu:0/1'\n  why:  CPU devices are logical already\n  fix:  use 'cpu:0'"),
        (
            3,
            r"devices is 3, but torch sees 2 GPUs\n  fix:  devices=\['cpu:0', 'cpu:1'\], logical CPUs\n  or:   .*logical devices",
        ),
        (["cuda:2"], r"'cuda:2' is absent: torch sees 2 GPU\(s\)"),
    ],
)
def test_bad_names_are_refused(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_devices(given)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_gpu")
def test_an_absent_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'cuda:0' is absent: torch sees no GPU on this machine"):
        parse_devices(["cuda:0"])


@pytest.mark.parametrize("given", ["cpu:0", True, 2.0, object()])
def test_what_is_no_list_of_names_is_refused(given: object) -> None:
    with pytest.raises(TypeError, match=r"give a list of names, a number, or None"):
        parse_devices(given)  # type: ignore[arg-type]


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"device 0 is a int, not a name"):
        parse_devices([0])  # type: ignore[list-item]


@pytest.mark.parametrize("given", [-1, -3])
def test_a_negative_number_of_devices_is_refused(given: int) -> None:
    with pytest.raises(ValueError, match=r"devices"):
        parse_devices(given)
