"""Memory and step time at 4B, 7B and 32B, counted from shapes. Where docs/scale.md has its tables.

    python benchmarks/memory.py            # the memory table, and step times beside RFPO's Table 15
    python benchmarks/memory.py --check    # the count of activations against torch's MemTracker

No network and no GPU; nothing here was measured on one, but for the numbers quoted from the paper.
"""

import argparse
import copy
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

import dapo
import fipo
import ppo_critic
import rfpo
import sft
from dry_run import (
    SHAPES,
    Plan,
    Size,
    longest_sequence,
    make_plan,
    responses_per_step,
    size_of,
    update_memory,
)
from models import token_logprobs

A100 = 312e12  # bf16 FLOP/s at its best
GPUS = 8
# RFPO, appendix G, Table 15: median seconds on 8 A100-80GB, at 3.87 M and 3.79 M tokens a step.
TOKENS = {"PPO": 3.87e6, "RFPO": 3.79e6}
TABLE_15 = {
    "generation": {"PPO": 181, "RFPO": 176},
    "old log-probabilities": {"PPO": 43, "RFPO": 42},
    "values": {"PPO": 38, "RFPO": 37},
    "advantages, weight sync": {"PPO": 6, "RFPO": 6},
    "actor update": {"PPO": 160, "RFPO": 156},
    "critic update": {"PPO": 151, "RFPO": 0},
}
STEP = {"PPO": 582, "RFPO": 421}


def plan_of(script, args, gpus: int = GPUS) -> Plan:
    """The plan of a preset, made as the script makes it."""
    os.environ["WORLD_SIZE"] = str(gpus)
    if script is ppo_critic:
        return make_plan(args, trained_critic=args.critic or args.model)
    if script is rfpo:
        return make_plan(args, frozen_critic=args.critic)
    return make_plan(args, reference=vars(args).get("kl_coef", 0) > 0)


def presets():
    """(name, script, args) of every preset for GPUs."""
    for script in (sft, ppo_critic, rfpo, dapo, fipo):
        for preset, args in script.PRESETS.items():
            if preset != "tiny":
                yield f"`{script.__name__}.py {preset}`", script, args


def memory_row(name: str, script, args, gpus: int = GPUS) -> None:
    plan = plan_of(script, args, gpus)
    peaks, host = plan.peaks(), [*plan.host.values(), 0]
    numbers = [
        peaks["rollout"],
        peaks.get("critic update", 0),
        peaks["policy update"],
        plan.phases["policy update"].get("activations", 0),
        *host[:2],
        12 * sum(size.params for size, trained in plan.modules.values() if trained),
    ]
    cells = " | ".join(f"{x / 1e9:,.0f}" if x else "" for x in numbers)
    print(f"| {name} | {cells} | {plan.verdict(args).split(':')[0]} |")


def memory_table() -> None:
    """GB = 1e9 bytes: per GPU, per node, on disk."""
    print("| | rollout | critic update | policy update | of it activations | CPU, loading ", end="")
    print("| CPU, offloaded | checkpoint | 80 GB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in presets():
        memory_row(*row)
    seven, large = dapo.PRESETS["dapo-7b-math"], dapo.PRESETS["dapo-32b"]
    stored = replace(seven, activation_checkpointing=False)
    on_gpu = replace(large, cpu_offload=False)
    short = replace(on_gpu, tokens_per_microbatch=longest_sequence(on_gpu))
    memory_row("`dapo-7b-math --no-activation-checkpointing`", dapo, stored)
    for gpus in (8, 16, 32):
        memory_row(f"`dapo-32b --no-cpu-offload`, {gpus} GPUs", dapo, on_gpu, gpus)
    flags = f"--no-cpu-offload --tokens-per-microbatch {longest_sequence(short)}"
    memory_row(f"`dapo-32b {flags}`, 16 GPUs", dapo, short, 16)


def multiplied(size: Size) -> int:
    """Parameters that every token is multiplied with: the layers and the head."""
    return size.layer * size.num_layers + size.head


def passes(critic: str | None, old_pass: float, recompute: bool) -> dict[str, float]:
    """Work of a step apart from generation, in units of P T: 2 a forward, 6 with a backward, 8 with
    recomputed activations. old_pass: the share of the batch with a forward for old log-probs."""
    update = 8 if recompute else 6
    return {
        "old log-probabilities": 2 * old_pass,
        "values": 2 if critic else 0,
        "actor update": update,
        "critic update": update if critic == "trained" else 0,
    }


def time_tables() -> None:
    """Predictions from one measured number: the seconds of the forward for old log-probs."""
    config = SHAPES["qwen3-4b"]
    policy, critic = multiplied(size_of(config)), multiplied(size_of(config, critic=True))
    rate = 2 * policy * TOKENS["PPO"] / TABLE_15["old log-probabilities"]["PPO"]  # FLOP/s
    counts = {arm: passes(kind, 1, True) for arm, kind in (("PPO", "trained"), ("RFPO", "frozen"))}
    print("| component | counted | PPO, s | predicted | MFU | RFPO, s | predicted |")
    print("|---|---|---|---|---|---|---|")
    sums = dict.fromkeys(counts, 0.0)
    for name, seconds in TABLE_15.items():
        size = critic if name in ("values", "critic update") else policy
        work = {arm: count.get(name, 0) * size * TOKENS[arm] for arm, count in counts.items()}
        for arm in sums:
            sums[arm] += work[arm] / rate if work["PPO"] else seconds[arm]
        cells = [f"{x / rate:.0f}" if x else "" for x in work.values()]
        used = f"{work['PPO'] / seconds['PPO'] / GPUS / A100:.0%}" if work["PPO"] else ""
        units = f"{counts['PPO'][name]:g} P T" if work["PPO"] else ""
        ppo = f"{seconds['PPO']} | {cells[0]} | {used}"
        print(f"| {name} | {units} | {ppo} | {seconds['RFPO'] or ''} | {cells[1]} |")
    print(f"| step | | {STEP['PPO']} | {sums['PPO']:.0f} | | {STEP['RFPO']} | {sums['RFPO']:.0f} |")

    print("\n| work of a step, without generation | PPO | RFPO | counted | by Table 15 |")
    print("|---|---|---|---|---|")
    for name, old_pass, recompute in (
        ("the paper's passes", 1, False),
        ("the paper's passes, activations recomputed", 1, True),
        ("ours: no pass for old log-probabilities", 0, False),
        ("ours, activations recomputed (the presets)", 0, True),
    ):
        ppo, ours = (passes(kind, old_pass, recompute) for kind in ("trained", "frozen"))
        seconds = {
            arm: sum(TABLE_15[n][arm] for n, units in ppo.items() if units) / TOKENS[arm]
            for arm in TOKENS
        }
        change = f"{sum(ours.values()) / sum(ppo.values()) - 1:.1%}"
        measured = f"{seconds['RFPO'] / seconds['PPO'] - 1:.0%}" if recompute else ""
        units = f"{sum(ppo.values()):g} P T | {sum(ours.values()):g} P T"
        print(f"| {name} | {units} | {change} | {measured} |")

    print("\n| preset, 8 GPUs | counted | hours a step, without generation |")
    print("|---|---|---|")
    for name, script, args in presets():
        batch = responses_per_step(args)
        old_pass = (
            1 - vars(args).get("minibatch_size", batch) / batch
        )  # all but the first minibatch
        kind = {ppo_critic: "trained", rfpo: "frozen"}.get(script)
        units = sum(passes(kind, old_pass, args.activation_checkpointing).values())
        units += 2 if vars(args).get("kl_coef") else 0  # the reference
        size, _ = plan_of(script, args).modules["policy"]
        hours = units * multiplied(size) * batch * longest_sequence(args) / rate / 3600
        print(f"| {name} | {units:.4g} P T | {hours:.2g} |")


def tracked(name: str, num_layers: int, tokens: int, vocabulary: int, recompute: bool) -> None:
    """Print the peak of one micro-batch, without weights and finished gradients, by torch's
    MemTracker on tensors that hold no data, beside the one that dry_run counts."""
    config = copy.deepcopy(SHAPES[name])
    config.num_hidden_layers, config.vocab_size = num_layers, vocabulary
    config.layer_types = config.layer_types[:num_layers]
    size = size_of(config)
    with FakeTensorMode():
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        body = lm.base_model
        if recompute:
            for i, layer in enumerate(body.layers):
                body.layers[i] = checkpoint_wrapper(layer, preserve_rng_state=False)
        tracker = MemTracker()
        tracker.track_external(lm)
        with tracker:
            ids = torch.zeros(1, tokens, dtype=torch.long)
            hidden = body(input_ids=ids, use_cache=False).last_hidden_state[0]
            weight = lm.get_output_embeddings().weight
            token_logprobs(hidden[ids[0]], weight, None, ids[0], 1.0)[0].sum().backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    peak = peak["Total"] - peak[_MemRefType.PARAM] - peak[_MemRefType.GRAD]
    args = replace(dapo.PRESETS["dapo-7b-math"], activation_checkpointing=recompute)
    rows = update_memory(size, replace(args, tokens_per_microbatch=tokens, cpu_offload=True), 1)
    at_head = "logits of a chunk" in rows  # chunks on a CPU are half as large
    logits = rows["logits of a chunk"] / 2 + 6 * size.head if at_head else 0
    counted = rows["activations"] + logits
    kind = "recomputed" if recompute else "kept"
    label = f"{name}, {num_layers} layers, {tokens:,} tokens, vocabulary {vocabulary:,}, {kind}"
    print(f"{label}: tracked {peak / 1e9:.1f} GB, counted {counted / 1e9:.1f} GB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only track activations; a minute")
    if parser.parse_args().check:
        tracked("qwen3-4b", 4, 4096, 151_936, False)
        tracked("qwen3-4b", 4, 16_384, 1000, True)
        tracked("qwen2.5-32b", 3, 16_384, 1000, True)
    else:
        memory_table()
        print()
        time_tables()
