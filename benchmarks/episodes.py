"""An actor-critic on cart-pole: episodes of different lengths, in a step and in plain PyTorch, one after the other.

    python benchmarks/episodes.py

Both train a model of their own on the same episodes: plain PyTorch plays them, with its weights, and updates after each; the step
takes their states, actions and returns. Compared are the sums of the times of updates after the step's last compilation, and the
same with the time to play. Parameters are compared in the end.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import mirrorc

Episode = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ActorCritic(nn.Module):
    """The loss of an episode: states ``[T, 4]``, actions ``[T]``, returns ``[T]``."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.action, self.value = nn.Linear(4, 128), nn.Linear(128, 2), nn.Linear(128, 1)

    def policy(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.relu(self.hidden(states))
        return F.log_softmax(self.action(hidden), dim=-1), self.value(hidden)

    def forward(self, states: torch.Tensor, actions: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        log_probabilities, values = self.policy(states)
        advantage = returns - values.squeeze(1).detach()
        actor = -(log_probabilities.gather(1, actions[:, None]).squeeze(1) * advantage).mean()
        return actor + F.smooth_l1_loss(values, returns[:, None])


def play(model: ActorCritic, longest: int) -> Episode:
    """Balances a pole on a cart (Barto, Sutton and Anderson, 1983) until it falls."""
    x, speed, angle, turn = (random.uniform(-0.05, 0.05) for _ in range(4))
    states: list[tuple[float, ...]] = []
    actions: list[int] = []
    while len(states) < longest and abs(x) < 2.4 and abs(angle) < 0.21:
        states.append((x, speed, angle, turn))
        with torch.no_grad():
            probability = model.policy(torch.tensor(states[-1]))[0][1].exp().item()
        actions.append(int(random.random() < probability))
        force, cos, sin = 20.0 * actions[-1] - 10.0, math.cos(angle), math.sin(angle)
        push = (force + 0.05 * turn**2 * sin) / 1.1
        turning = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        x, speed = x + 0.02 * speed, speed + 0.02 * (push - 0.05 * turning * cos / 1.1)
        angle, turn = angle + 0.02 * turn, turn + 0.02 * turning
    total, returns = 0.0, []
    for _ in states:
        total = 1.0 + 0.99 * total
        returns.append(total / 10)
    return torch.tensor(states), torch.tensor(actions), torch.tensor(returns[::-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--longest", type=int, default=500)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    random.seed(0)
    plain = ActorCritic()
    model = copy.deepcopy(plain)
    own, other = (torch.optim.Adam(m.parameters(), lr=3e-3) for m in (plain, model))
    devices = [f"cpu:{i}" for i in range(args.devices)]
    compiler, debug = mirrorc.Compiler(backend=args.backend), mirrorc.Debug(progress=False)

    def update(*episode: torch.Tensor) -> None:
        own.zero_grad()
        plain(*episode).backward()
        own.step()

    played, lengths, times = [], [], {"plain": [], "mirrorc": []}  # type: ignore[var-annotated]
    last_compilation, num_programs = 0, 0
    with mirrorc.compile(model, devices, optimizer=other, compiler=compiler, debug=debug) as step:
        for number in range(args.episodes):
            start = time.perf_counter()
            episode = play(plain, args.longest)
            played.append(time.perf_counter() - start)
            lengths.append(len(episode[1]))
            trained: dict[str, Callable[..., object]] = {"plain": update, "mirrorc": step}
            for name in trained if number % 2 else reversed(trained):
                start = time.perf_counter()
                trained[name](*episode)
                times[name].append(time.perf_counter() - start)
            if len(step.programs) > num_programs:
                last_compilation, num_programs = number + 1, len(step.programs)
    differ = max((a - b).abs().max().item() for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    print(f"{len(set(lengths))} lengths, {min(lengths)} to {max(lengths)}")
    print(f"{num_programs} programs, the last in call {last_compilation}")
    playing = sum(played[last_compilation:])
    of_plain, of_step = (times[name][last_compilation:] for name in times)
    print(
        f"updates: plain {sum(of_plain) * 1e3:.0f} ms, mirrorc {sum(of_step) * 1e3:.0f}; ratio {sum(of_step) / sum(of_plain):.2f}"
    )
    print(f"with {playing * 1e3:.0f} ms of playing: ratio {(sum(of_step) + playing) / (sum(of_plain) + playing):.2f}")
    print(
        f"longest / median step of mirrorc: {max(of_step) / statistics.median(of_step):.2f}; parameters differ by {differ:.1e}"
    )


if __name__ == "__main__":
    main()
