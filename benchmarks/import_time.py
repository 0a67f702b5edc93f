"""CPU time of imports and commands, beside torch alone; the first round is cold if nothing has been read before."""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

SAVE = """
import sys, torch, mirrorc
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
batch = {"input": torch.randn(4, 4), "target": torch.randn(4, 2)}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = {"optimizer": optimizer, "loss_fn": torch.nn.functional.mse_loss, "compiler": mirrorc.Compiler(backend="eager")}
mirrorc.plan(model, batch, 2, **options).save(sys.argv[1])
"""


def contenders(program: str) -> dict[str, list[str]]:
    return {
        "import torch": ["-c", "import torch"],
        "import mirrorc": ["-c", "import mirrorc"],
        "mirrorc.compile": ["-c", "import mirrorc; mirrorc.compile"],
        "mirrorc --help": ["-m", "mirrorc", "--help"],
        "mirrorc show": ["-m", "mirrorc", "show", program],
        "mirrorc diff": ["-m", "mirrorc", "diff", program, program],
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
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "program.mirror.gz")
        subprocess.run([sys.executable, "-c", SAVE, program], check=True)
        commands = contenders(program)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, arguments in commands.items():
                times[name].append(cpu_seconds(arguments))
    for name, seconds in times.items():
        print(f"{name:16} first {seconds[0]:.2f} s, least of {rounds} {min(seconds):.2f} s of CPU time")


if __name__ == "__main__":
    main()
