"""All probes, part by part: importing this file adds them to the table, in the order in which they run."""

from __future__ import annotations

from gpu_probes import correctness, nets, processes, speed, suites

correctness.add()
nets.add()
suites.add_tests()
speed.add()
processes.add()
suites.add_example()
