"""Trains the model in four stages on one CPU core; the stages are the table STAGES.

Every stage runs for a given time rather than a number of steps, its learning rates fall along a cosine over that time,
and it starts from the weights (not the optimiser state) that the stage before it left. So the weights depend on the
speed of the machine and cannot be had again bit for bit.

    WORK/{train,val_bible,val_austen,val_chat}.bin    in: token arrays, from tokenizer.py
    WORK/stage1.pt ... WORK/stage4.pt                 out: {shape, weights, steps, tokens}
"""

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import heldout
import model as training_model
import numpy as np
import tokenizer
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

BATCH = 16  # windows of heldout.WINDOW tokens per step
SEED = 1
Z_WEIGHT = 1e-4
ROUTER_RATE = 0.2  # a slower router: at full rate it collapses onto a few experts early on
FINAL_RATE = 0.02  # of the peak, at the end of a stage
BALANCE_RAMP = 0.5  # the balance weight moves from its first to its second value over this part of a stage
GRADIENT_NORM = 1.0
UNTIMED_STEPS = 2  # compilation happens here
LOG_EVERY_STEPS = 10
SAVE_EVERY_SECONDS = 240


@dataclass(frozen=True)
class Stage:
    """One row of the schedule."""

    adam_rate: float  # peak learning rate of AdamW
    muon_rate: float | None  # peak learning rate of Muon for the layers' matrices; None: AdamW trains those too
    balance: tuple[float, float]  # weight of the router's balance loss: at the start, from BALANCE_RAMP on
    warmup_steps: int
    minutes: float


# The first run's minutes were not kept, only its sum: 9.4 M tokens. These sum to that at about 1,100 tokens/s.
STAGES = (
    Stage(adam_rate=2.5e-3, muon_rate=None, balance=(0.02, 0.005), warmup_steps=60, minutes=35),
    Stage(adam_rate=2.5e-3, muon_rate=0.02, balance=(0.01, 0.004), warmup_steps=30, minutes=35),
    Stage(adam_rate=1.2e-3, muon_rate=0.01, balance=(0.004, 0.004), warmup_steps=30, minutes=35),
    Stage(adam_rate=2.0e-3, muon_rate=0.016, balance=(0.003, 0.001), warmup_steps=30, minutes=35),
)

ROUTER = "mlp.gate.weight"
# Matrices within the layers that AdamW keeps: the router, and those with only a few rows.
NOT_FOR_MUON = (ROUTER, "conv1d.weight", "in_proj_a.weight", "in_proj_b.weight", "shared_expert_gate.weight")


class Muon:
    """Momentum whose update is made orthogonal, matrix by matrix; a fused tensor is a stack of matrices."""

    WEIGHT_DECAY = 0.01
    MOMENTUM = (0.85, 0.95)  # first and last value
    MOMENTUM_STEPS = 100

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.momenta = [torch.zeros_like(parameter) for parameter in parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One Nesterov step; a tall matrix moves further, by the root of its aspect ratio."""
        first, last = self.MOMENTUM
        momentum = first + (last - first) * min(1, self.steps / self.MOMENTUM_STEPS)
        for parameter, average in zip(self.parameters, self.momenta, strict=True):
            average.lerp_(parameter.grad, 1 - momentum)
            update = orthogonalise(parameter.grad.lerp(average, momentum)).float()
            rows, columns = parameter.shape[-2:]
            parameter.mul_(1 - rate * self.WEIGHT_DECAY)
            parameter.add_(update, alpha=-rate * max(1, rows / columns) ** 0.5)
        self.steps += 1


def orthogonalise(gradient: Tensor) -> Tensor:
    """[..., out, in] -> [..., out, in] bfloat16 with singular values near 1: five quintic Newton-Schulz iterations."""
    x = gradient.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).bfloat16() + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x.transpose(-1, -2) if tall else x


class Optimiser:
    """Muon and AdamW over one model, both driven by one factor of their peak rates."""

    def __init__(self, model: nn.Module, stage: Stage) -> None:
        named = list(model.named_parameters())
        for_muon = [name for name, parameter in named if stage.muon_rate and is_for_muon(name, parameter)]
        routers = [parameter for name, parameter in named if name.endswith(ROUTER)]
        vectors = [parameter for _, parameter in named if parameter.dim() < 2]
        matrices = [
            parameter
            for name, parameter in named
            if parameter.dim() >= 2 and name not in for_muon and not name.endswith(ROUTER)
        ]
        self.stage = stage
        self.muon = Muon([parameter for name, parameter in named if name in for_muon])
        self.adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.1, "share": 1.0},
                {"params": vectors, "weight_decay": 0.0, "share": 1.0},
                {"params": routers, "weight_decay": 0.01, "share": ROUTER_RATE},
            ],
            lr=stage.adam_rate,
            betas=(0.9, 0.95),
            eps=1e-8,
            fused=True,
        )

    def step(self, factor: float) -> None:
        """Updates every parameter at `factor` times its peak rate."""
        for group in self.adam.param_groups:
            group["lr"] = self.stage.adam_rate * factor * group["share"]
        self.muon.step((self.stage.muon_rate or 0.0) * factor)
        self.adam.step()


def is_for_muon(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon trains this parameter in a stage that has Muon."""
    return ".layers." in name and parameter.dim() >= 2 and not name.endswith(NOT_FOR_MUON)


def read_tokens(path: Path) -> NDArray[np.int64]:
    """Returns [tokens]."""
    return np.fromfile(path, dtype=tokenizer.TOKEN_DTYPE).astype(np.int64)


def training_batches(tokens: NDArray[np.int64], rng: np.random.Generator) -> Iterator[Tensor]:
    """Yields [BATCH, WINDOW + 1] for ever; each pass cuts the text at another offset and shuffles the windows."""
    window = heldout.WINDOW
    while True:
        starts = np.arange(rng.integers(0, window), len(tokens) - window - 1, window)
        rng.shuffle(starts)
        for first in range(0, len(starts) - BATCH + 1, BATCH):
            rows = [tokens[start : start + window + 1] for start in starts[first : first + BATCH]]
            yield torch.from_numpy(np.stack(rows))


@torch.no_grad()
def held_out_losses(
    model: training_model.LanguageModel, texts: dict[str, NDArray[np.int64]], batches: int
) -> dict[str, float]:
    """Mean nats per token over the first batches of each text: a gauge while training, not a result (evaluate.py)."""
    losses = {}
    for name, tokens in texts.items():
        each = []
        for windows in itertools.islice(heldout.windows(tokens, BATCH), batches):
            ids = torch.from_numpy(windows)
            each.append(training_model.cross_entropy(model(ids[:, :-1])[0], ids[:, 1:]).item())
        losses[name] = round(sum(each) / len(each), 4)
    return losses


def save(path: Path, model: training_model.LanguageModel, steps: int) -> None:
    """Writes a checkpoint; the old one stays whole until the new one is."""
    state = {
        "shape": asdict(model.shape),
        "weights": model.state_dict(),
        "steps": steps,
        "tokens": steps * BATCH * heldout.WINDOW,
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def run_stage(work: Path, number: int, stage: Stage) -> None:
    """Trains stage `number` from the checkpoint of the stage before it and writes its own."""
    torch.manual_seed(SEED)
    model = training_model.LanguageModel(training_model.Shape())
    steps_before = 0
    if number > 1:
        state = torch.load(work / f"stage{number - 1}.pt", weights_only=True)
        model.load_state_dict(state["weights"])
        steps_before = state["steps"]
    print(f"stage {number}: {stage}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", flush=True)

    batches = training_batches(read_tokens(work / "train.bin"), np.random.default_rng(steps_before or SEED))
    texts = {name: read_tokens(work / f"val_{name}.bin") for name in heldout.NAMES}
    optimiser = Optimiser(model, stage)
    smoothed = started = saved = None
    for step in itertools.count():
        if step == UNTIMED_STEPS:
            started = saved = time.monotonic()
        elapsed = time.monotonic() - started if started else 0.0
        done = elapsed / (stage.minutes * 60)
        if done >= 1:
            break
        factor = min(1, (step + 1) / stage.warmup_steps) * cosine(done)
        first, last = stage.balance
        balance_weight = first + (last - first) * min(1, done / BALANCE_RAMP)

        ids = next(batches)
        logits, routings = model(ids[:, :-1])
        loss = training_model.cross_entropy(logits, ids[:, 1:])
        balance = sum(routing.balance_loss for routing in routings)
        router_z = sum(routing.z_loss for routing in routings)
        (loss + balance_weight * balance + Z_WEIGHT * router_z).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimiser.step(factor)
        model.zero_grad(set_to_none=True)

        smoothed = loss.item() if smoothed is None else 0.97 * smoothed + 0.03 * loss.item()
        if (step + 1) % LOG_EVERY_STEPS == 0:
            load = torch.stack([routing.load / routing.load.float().mean() for routing in routings])
            rate = (step - UNTIMED_STEPS) * BATCH * heldout.WINDOW / elapsed
            print(
                f"step {steps_before + step + 1} {elapsed:.0f}s loss {loss.item():.4f} smoothed {smoothed:.4f} "
                f"balance {balance.item() / len(routings):.4f} load {load.min():.2f}..{load.max():.2f} "
                f"gradient {norm.item():.3f} rate {stage.adam_rate * factor:.2e} {rate:.0f} tok/s",
                flush=True,
            )
        if saved and time.monotonic() - saved > SAVE_EVERY_SECONDS:
            save(work / f"stage{number}.pt", model, steps_before + step + 1)
            print("held out", held_out_losses(model, texts, batches=2), flush=True)
            saved = time.monotonic()
    save(work / f"stage{number}.pt", model, steps_before + step)
    print("held out", held_out_losses(model, texts, batches=3), flush=True)


def cosine(done: float) -> float:
    """Factor of the peak rate when `done` of the stage's time has passed: 1 at 0, FINAL_RATE at 1."""
    return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def main() -> None:
    """Runs the stages that were asked for, in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder that tokenizer.py wrote to")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(1, 5), default=[1, 2, 3, 4])
    parser.add_argument("--minutes", type=float, help="for every stage, instead of the table's")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for number in sorted(arguments.stages):
        stage = STAGES[number - 1]
        if arguments.minutes:
            stage = replace(stage, minutes=arguments.minutes)
        run_stage(arguments.work, number, stage)


if __name__ == "__main__":
    main()
