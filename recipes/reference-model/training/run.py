"""One training run: the model, its optimisers, and the place in the curriculum."""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from accuracy import FILLER_SEED, measure
from kvtool.errors import KvtoolError
from kvtool.models.reference.filler import Filler
from training.model import first_model
from training.muon import Muon
from training.rows import Mixture, draw_batch
from training.sinks import place_sinks
from training.stages import CURRICULA, Stage
from training.tokenizer import save_tokenizer

_TRAIN_FILLER_SEED = 1
_STATE = "training_state.pt"
_WARM_UP_STEPS = 100
_FITTED_TO = 16, 256  # rows and tokens that sinks are fitted to
_SINKS_EVERY = 20  # steps


class Run:
    """One training run: model, optimisers, random numbers and the place in the curriculum."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.curriculum = CURRICULA[options.curriculum]
        stages = len(self.curriculum.stages)
        if not 0 <= options.stage < stages:
            raise KvtoolError(f"no stage {options.stage}: the curriculum has 0 to {stages - 1}")
        self.rank, self.ranks = _ranks()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        model = first_model(options)
        model.config.max_position_embeddings = self.curriculum.positions
        self.model = model.to(self.device)
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        self.others = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
        self.optimisers = {
            "muon": Muon(matrices, lr=options.lr),
            "adam": torch.optim.AdamW(
                self.others, lr=options.adam_lr, betas=(0.9, 0.95), weight_decay=0.0
            ),
        }
        self.rng = np.random.default_rng([options.seed, self.rank])
        self.filler = Filler(_TRAIN_FILLER_SEED)
        self.test_filler = Filler(FILLER_SEED, 5_000)
        self.fitted_to = self._texts()
        self.progress: dict[str, Any] = {
            "stage": 0,
            "step": 0,
            "tokens": 0,
            "stage_tokens": 0,
            "cooling": False,
        }
        self.recent: dict[str, list[float]] = {"loss": [], "first": [], "answer": []}
        self._resume()
        if self.progress["step"] == 0:
            self.progress["stage"] = options.stage
        if options.cool_down_now and not self.progress["cooling"]:
            self.progress |= {"cooling": True, "stage_tokens": 0}

    @property
    def stage(self) -> Stage:
        """The stage the run is in."""
        if self.progress["cooling"]:
            return self.curriculum.cool_down
        return self.curriculum.stages[self.progress["stage"]]

    def _texts(self) -> Tensor:
        """Draw the texts that sinks are fitted to, the same ones on every process."""
        rng = np.random.default_rng(self.options.seed)
        ids = draw_batch(rng, *_FITTED_TO, Filler(_TRAIN_FILLER_SEED, 500), Mixture())[0]
        return torch.from_numpy(ids).to(self.device)

    def place_sinks(self) -> None:
        """Fit the sinks anew to what the layers read now."""
        if self.options.sinks:
            place_sinks(self.model, self.options.sinks, self.fitted_to)

    def say(self, text: str) -> None:
        """Write one line of the log, on the first process only."""
        if self.rank == 0:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def _resume(self) -> None:
        saved = self.options.out / _STATE
        if not saved.exists():
            return
        state = torch.load(saved, map_location=self.device, weights_only=True)
        if len(state["rng"]) != self.ranks:
            raise KvtoolError(
                f"{saved} was written by {len(state['rng'])} processes; start as many, not "
                f"{self.ranks}"
            )
        self.model.load_state_dict(state["model"])
        for name, optimiser in self.optimisers.items():
            optimiser.load_state_dict(state[name])
        self.rng.bit_generator.state = state["rng"][self.rank]
        self.progress = state["progress"]
        self.say(f"resumed at step {self.progress['step']}, stage {self.stage.name}")

    def save(self) -> None:
        """Write the state to resume from, all at once or not at all."""
        random_states: list[Any] = [self.rng.bit_generator.state]
        if self.ranks > 1:
            random_states = [None] * self.ranks
            dist.all_gather_object(random_states, self.rng.bit_generator.state)
        if self.rank:
            return
        state = {"model": self.model.state_dict(), "progress": self.progress}
        state |= {name: optimiser.state_dict() for name, optimiser in self.optimisers.items()}
        partial = self.options.out / f"{_STATE}.partial"
        torch.save(state | {"rng": random_states}, partial)
        os.replace(partial, self.options.out / _STATE)

    def export(self) -> None:
        """Write model and tokenizer the way `from_pretrained` loads them, in float16."""
        if self.rank == 0:
            half = copy.deepcopy(self.model).half()
            half.save_pretrained(self.options.out)
            save_tokenizer(self.options.out)

    def learning_rate(self) -> float:
        """Return the factor on the peak rate: warm-up, constant, then straight down to zero."""
        factor = min(1.0, (self.progress["step"] + 1) / _WARM_UP_STEPS)
        if self.progress["cooling"]:
            left = 1 - self.progress["stage_tokens"] / (self.options.cool_down * 1e6)
            factor *= max(0.02, left)
        return factor

    def step(self) -> None:
        """Draw a batch, take one step and count its tokens."""
        lengths = self.stage.lengths
        # every process draws the same length: the slowest sets the pace
        length = lengths[np.random.default_rng(self.progress["step"]).integers(len(lengths))]
        rows = max(1, self.stage.batch // (length * self.ranks))
        batch = draw_batch(self.rng, rows, length, self.filler, self.stage.mixture)
        ids, targets, weights = (torch.from_numpy(array).to(self.device) for array in batch)
        self._backward(ids, targets, weights)
        factor = self.learning_rate()
        peaks = {"muon": self.options.lr, "adam": self.options.adam_lr}
        nn.utils.clip_grad_norm_(self.others, 1.0)
        for name, optimiser in self.optimisers.items():
            for group in optimiser.param_groups:
                group["lr"] = peaks[name] * factor
            optimiser.step()
            optimiser.zero_grad()
        self.progress["step"] += 1
        for count in ("tokens", "stage_tokens"):
            self.progress[count] += rows * length * self.ranks

    def _backward(self, ids: Tensor, targets: Tensor, weights: Tensor) -> None:
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = self.model.model(ids, use_cache=False).last_hidden_state
            counted = weights > 0
            logits = self.model.lm_head(hidden[counted])
        losses = functional.cross_entropy(logits.float(), targets[counted], reduction="none")
        share = weights[counted]
        ((losses * share).sum() / share.sum()).backward()
        if self.ranks > 1:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.ranks
        full = weights >= 1
        right = torch.zeros_like(full)
        right[counted] = logits.argmax(-1) == targets[counted]
        first = full & ~functional.pad(full, (1, -1))
        self.recent["loss"].append(losses[share >= 1].mean().item())
        self.recent["answer"].append(right[full].float().mean().item())
        self.recent["first"].append(right[first].float().mean().item())

    def gate_passed(self) -> bool:
        """Measure the stage's tasks and say whether all are good enough."""
        stage = self.stage
        self.model.eval()
        results = {}
        for task in stage.tasks:
            with torch.autocast(self.device.type, torch.bfloat16):
                results[task] = measure(
                    self.model,
                    task,
                    stage.gate_tokens,
                    samples=self.options.samples,
                    filler=self.test_filler,
                )
        self.model.train()
        cells = (f"{task} {r['first']:.2f}/{r['exact']:.2f}" for task, r in results.items())
        self.say(f"  {stage.name} @{stage.gate_tokens} first/exact: " + ", ".join(cells))
        return all(result["exact"] >= stage.accuracy for result in results.values())

    def advance(self) -> None:
        """Go to the next stage, or begin to cool down after the last."""
        self.progress["stage_tokens"] = 0
        if self.progress["stage"] + 1 < len(self.curriculum.stages):
            self.progress["stage"] += 1
        else:
            self.progress["cooling"] = True
        self.say(f"stage: {self.stage.name}")

    def finished(self) -> bool:
        """Say whether the cool-down is over."""
        cooled = self.progress["stage_tokens"] >= self.options.cool_down * 1e6
        return self.progress["cooling"] and cooled

    def log(self) -> None:
        """Write the means since the last line."""
        means = {name: float(np.mean(values)) for name, values in self.recent.items()}
        self.recent = {name: [] for name in self.recent}
        p = self.progress
        self.say(
            f"step {p['step']} {self.stage.name} {p['tokens'] / 1e6:.2f}M tokens, "
            f"answer loss {means['loss']:.3f}, tokens right {means['answer']:.3f}, "
            f"first tokens right {means['first']:.3f}"
        )

    def train(self) -> None:
        """Run the curriculum from wherever it is, until its end or the end of the time."""
        minutes = self.options.minutes
        deadline = None if minutes is None else time.monotonic() + 60 * minutes
        while not self.finished() and not self._agreed(
            deadline is not None and time.monotonic() >= deadline
        ):
            if self.progress["step"] % _SINKS_EVERY == 0:
                self.place_sinks()
            self.step()
            if self.progress["step"] % self.options.log_every == 0:
                self.log()
            if self.progress["step"] % self.options.check_every == 0:
                self._check()
        self.place_sinks()
        self.save()
        self.export()

    def _agreed(self, passed: bool) -> bool:
        """Return the first process's word on every process."""
        word = [passed]
        if self.ranks > 1:
            dist.broadcast_object_list(word)
        return word[0]

    def _check(self) -> None:
        passed = self._agreed(self.gate_passed() if self.rank == 0 else False)
        impatient = self.progress["stage_tokens"] >= self.stage.patience * 1e6
        if not self.progress["cooling"] and (passed or impatient):
            self.say("gate passed" if passed else "out of patience: gate missed")
            self.advance()
        self.save()
        self.export()


def _ranks() -> tuple[int, int]:
    if "RANK" not in os.environ:
        return 0, 1
    dist.init_process_group()
    return dist.get_rank(), dist.get_world_size()
