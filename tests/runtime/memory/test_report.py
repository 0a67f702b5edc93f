"""The report's sums and its text."""

from dataclasses import replace

from mirrorc.runtime.memory.report import DeviceMemory, HeldMemory, LiveValue, MemoryPeak, MemoryReport

PEAK = MemoryPeak(
    2**20, "bwd_0", "d_fc_mm", "model.py:3  x = self.fc(x)", (LiveValue("fc_relu", "f32[512]", 2048),), num_smaller=7
)
SUMMING = MemoryPeak(3 * 2**20, "scale", "", "", (LiveValue("b0_sum", "f32[786432]", 3 * 2**20),))
OWN = HeldMemory(("cpu:0",), parameters=0, gradients=2**21, optimizer_state=0, buffers=0, activations=2**20)
SHARED = HeldMemory(("cpu:0", "cpu:1"), 2**22, 0, 2**23, 1024, 0)
REPORT = MemoryReport(
    (
        DeviceMemory("cpu:0", OWN, PEAK, PEAK),
        DeviceMemory("cpu:1", replace(OWN, devices=("cpu:1",), gradients=0), PEAK, PEAK),
    ),
    (SHARED,),
    (),
)


def test_sums_count_what_is_shared_once() -> None:
    assert (REPORT.parameters, REPORT.gradients, REPORT.optimizer_state) == (2**22, 2**21, 2**23)
    assert (REPORT.buffers, REPORT.activations) == (1024, 2**21)
    assert REPORT.total == 2**22 + 2**21 + 2**23 + 1024 + 2**21 == sum(row.total for row in REPORT.rows)


def test_text() -> None:
    assert str(REPORT).split("\n") == [
        "device                      parameters       gradients optimizer state         buffers     activations           total",
        "shared by cpu:0, cpu:1         4.0 MiB               -         8.0 MiB         1.0 KiB               -        12.0 MiB",
        "cpu:0                                -         2.0 MiB               -               -         1.0 MiB         3.0 MiB",
        "cpu:1                                -               -               -               -         1.0 MiB         1.0 MiB",
        "all                            4.0 MiB         2.0 MiB         8.0 MiB         1.0 KiB         2.0 MiB        16.0 MiB",
        "",
        "activations on cpu:0, cpu:1 are at their peak, 1.0 MiB, in bwd_0, at d_fc_mm",
        "  # model.py:3  x = self.fc(x)",
        "     2.0 KiB  fc_relu: f32[512]",
        "  1022.0 KiB  7 smaller values",
    ]


def test_gradients_are_told_by_part_and_those_of_a_moment_are_no_activations() -> None:
    parts = {"buckets": 2**20, "kept": 2**19}
    own = replace(OWN, gradients=sum(parts.values()), gradient_parts=parts, passing_sums=2**21)
    report = replace(REPORT, devices=(DeviceMemory("cpu:0", own, SUMMING, PEAK),))
    assert (own.activations, own.within_step, report.within_step) == (2**20, 3 * 2**20, 3 * 2**20)
    table, gradients, peaks = str(report).split("\n\n")
    assert [line.split()[-4:-2] for line in table.split("\n") if line.startswith("cpu:0")] == [["2.0", "MiB"]]
    assert gradients.split("\n")[0] == (
        "gradients on cpu:0: 1.0 MiB in buckets, 512.0 KiB in sums outside of buckets, kept until the next step"
    )
    assert gradients.split("\n")[1].startswith("passing sums: by how much")
    assert "activations on cpu:0 are at their peak, 1.0 MiB, in bwd_0" in peaks
    assert peaks.endswith(
        "activations and passing sums on cpu:0 are at their peak, 3.0 MiB, in scale\n     3.0 MiB  b0_sum: f32[786432]"
    )


def test_a_peak_of_activations_beside_gradients_is_told_once() -> None:
    both = replace(PEAK, num_bytes=2**21)
    report = replace(REPORT, devices=(DeviceMemory("cpu:0", OWN, both, PEAK),))
    assert str(report).count(
        "at their peak"
    ) == 1 and "passing sums on cpu:0 are at their peak, 2.0 MiB, in bwd_0" in str(report)


def test_one_device_needs_no_sum_and_other_peaks_are_said_apart() -> None:
    alone = MemoryReport(REPORT.devices[:1], (), ("something is not known",))
    assert "\nall " not in str(alone) and str(alone).endswith("remark: something is not known")
    none = MemoryPeak(0, "", "", "", ())
    other = MemoryReport(
        (REPORT.devices[0], replace(REPORT.devices[1], peak=none, activation_peak=none)), (SHARED,), ()
    )
    assert "activations on cpu:0 are" in str(other) and str(other).endswith("activations on cpu:1: none")


def test_what_is_not_known_is_not_counted_and_said() -> None:
    unknown = replace(REPORT, shared=(replace(SHARED, optimizer_state=None),))
    assert unknown.optimizer_state is None and unknown.total == REPORT.total - 2**23
    assert ["not known" in line for line in str(unknown).split("\n")[:5]] == [False, True, False, False, True]
