"""CPU time of importing mirrorc, beside torch alone; the first round is cold if nothing has been read before."""

import argparse
import resource
import subprocess
import sys

CONTENDERS = {
    "import torch": ["-c", "import torch"],
    "import mirrorc": ["-c", "import mirrorc"],
    "mirrorc --help": ["-m", "mirrorc", "--help"],
}


def cpu_seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, arguments in CONTENDERS.items():
            times[name].append(cpu_seconds(arguments))
    for name, seconds in times.items():
        print(f"{name:16} first {seconds[0]:.2f} s, least of {rounds} {min(seconds):.2f} s of CPU time")


if __name__ == "__main__":
    main()
