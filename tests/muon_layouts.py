"""Layouts for runs of Muon, drawn by a seed, and how far they are from one rank."""

import random
from pathlib import Path

import golden_worker
from compare import relative_difference
from ranks import results_of

from base.errors import UserError
from config import schema, validation

MODES = ("joint", "split", "head")
MODEL = {"optimizer": "muon", "layers": 2, "hidden": 16, "heads": 4, "seq_length": 8}
# The model of the one-step test: enough tokens that no matrix' gradient has a low rank.
ONE_STEP = {"optimizer": "muon", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "steps": 1}
ONE_STEP |= {"activation": "swiglu", "ffn_hidden": 64, "seq_length": 64, "global_batch_size": 16}
KINDS = {
    "grouped": {"kv_heads": 2, "activation": "swiglu", "ffn_hidden": 24, "bias": False},
    "gelu": {"bias": True},
    "latent": {
        "positions": "rotary",
        "kv_lora_rank": 12,
        "q_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "norm": "rmsnorm",
        "bias": False,
    },
    "experts": {"experts": 4, "activation": "swiglu", "shared_ffn_hidden": 16, "ffn_hidden": 24},
}


def drawn_layout(ranks: int, chance: random.Random, model: dict) -> dict:
    """A layout that `validation.check` accepts."""
    while True:
        axes = {axis: chance.choice([1, 2, 4]) for axis in ("tp", "pp", "cp")}
        layout = axes | {"zero": chance.choice([0, 1, 1, 2, 2])}
        layout["micro_batch_size"] = chance.choice([1, 2])
        layout["sequence_parallel"] = chance.choice([False, True])
        layout["overlap_param_gather"] = chance.choice([False, True])
        layout["recompute"] = chance.choice(["none", "full"])
        if axes["pp"] > 1:
            layout["schedule"] = chance.choice(["1f1b", "gpipe", "zb-h1"])
        if model.get("experts"):
            layout["ep"] = chance.choice([1, 2, 4])
        try:
            validation.check(golden_worker.options(model | layout), ranks)
        except UserError:
            continue
        return layout


def largest_differences(jobs: list[tuple[int, dict]], folder: Path) -> list[float]:
    """The largest relative difference of losses and of weights from one rank's, over the jobs.

    jobs: pairs (ranks, case). Weights: sums over a tensor, relative to the largest of all sums.
    """
    ones, largest = {}, [0.0, 0.0]
    layouts = {*schema.Layout.__dataclass_fields__}
    for ranks in sorted({ranks for ranks, _ in jobs}):
        cases = [case for count, case in jobs if count == ranks]
        for case, found in zip(
            cases, results_of("tests/golden_worker.py", ranks, cases, folder, 1500)
        ):
            plain = {name: value for name, value in case.items() if name not in layouts}
            key = str(sorted(plain.items()))
            if key not in ones:
                ones[key] = golden_worker.run(validation.check(golden_worker.options(plain), 1))
            one = ones[key]
            for a, b in zip(found["losses"] + found["norms"], one["losses"] + one["norms"]):
                largest[0] = max(largest[0], relative_difference(a, b))
            scale = max(map(abs, one["weights"].values()))
            for name, value in one["weights"].items():
                largest[1] = max(
                    largest[1], relative_difference(found["weights"][name], value, scale)
                )
            assert not found["unequal"]
    return largest


def drawn_jobs(
    count: int, precision: str, seed: int, ranks: tuple[int, ...] = (2, 4), steps: int = 10
) -> list[tuple[int, dict]]:
    """Return pairs (ranks, case) of so many steps each: every kind of model with every mode."""
    chance = random.Random(seed)
    jobs = []
    for number in range(count):
        mode, kind = MODES[number % 3], list(KINDS)[number // 3 % len(KINDS)]
        world = chance.choice(ranks)
        model = MODEL | KINDS[kind] | {"precision": precision, "muon_qkv": mode, "steps": steps}
        jobs.append((world, model | drawn_layout(world, chance, model)))
    return jobs
