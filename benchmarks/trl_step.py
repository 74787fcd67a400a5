"""One whole DAPO step here and with TRL's GRPOTrainer: the same policy, problems, reward and sizes.

    pip install trl && python benchmarks/trl_step.py

A step is 512 responses (32 prompts x 16, at most 24 tokens), their rewards and group advantages,
and 4 updates of 128. Both run as they come: dapo.main with its preset tiny, and GRPOTrainer with
loss_type "dapo" (token mean, clip-higher, no KL), generation by transformers, and everything off
that costs it time here and has no counterpart (gradient checkpointing, reports, checkpoints). TRL
takes a minibatch in one forward, which is its faster way (--trl-batch-sizes 128 32 shows it).
Dynamic sampling is off: TRL has none.

Both start from the base policy at a learning rate of 1e-4, so responses grow alike; the table has
their length. Repeats alternate in one process, each of a few steps whose first is not counted.
Appends one line to benchmarks/trl_step.jsonl; exits with 1 where TRL's step is below 1.2 of ours.
The aim was twice: docs/scale.md has the shares of both steps, and why it is out of reach here.
"""

import argparse
import datetime
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait do not spin

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402

import common  # noqa: E402
import dapo  # noqa: E402
import tiny  # noqa: E402

BAR = 1.2
OUT = ROOT / "benchmarks" / "trl_step.jsonl"
RESPONSES, MINIBATCH = 512, 128
UPDATES = RESPONSES // MINIBATCH
PARTS = {  # of a step, and their names in metrics.jsonl
    "generate_s": "rollout_s",
    "reward_s": "reward_s",
    "old_logprobs_s": "old_logprobs_s",
    "update_s": "policy_update_s",
}


def ours(steps, folder, seed):
    """Seconds and tokens per response of every step of dapo.main after the first."""
    args = replace(
        dapo.Args(),
        seed=seed,
        num_steps=steps,
        runs_dir=folder,
        save_every=10**6,
        eval_every=10**6,
        warmup_steps=0,
        decay_steps=0,
        minibatch_size=MINIBATCH,
        dynamic_sampling=False,
        gen_prompts=32,
        overlong_buffer=0,
        rollout_engine="hf",
    )
    # What has no counterpart: evaluation, checkpoints, pictures, the exported model.
    dapo.Run, dapo.export, dapo.evaluate = Bare, lambda *_: None, lambda *_: {}
    sys.argv = [dapo.__file__]  # the script that a run's folder keeps
    dapo.main(args, "tiny")
    (path,) = Path(folder).glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {
            "step_s": line["time/step_s"],
            "tokens": line["rollout/response_tokens_mean"],
            **{part: line[f"time/{logged}"] for part, logged in PARTS.items()},
        }
        for line in lines
        if line["step"] > 1
    ]


class Bare(common.Run):
    """A run that logs, and neither saves nor draws."""

    def save(self, *_, **__):
        pass

    def finish(self):
        pass


def reward(prompts, completions, answer, **_):
    """tiny.reward in TRL's form; its prompts hold the same text."""
    return tiny.reward(prompts, completions, answer)


class TimedTrainer(trl.GRPOTrainer):
    """GRPOTrainer that adds up the seconds of what comes before the updates."""

    seconds: ClassVar = dict.fromkeys(("generate", "reward", "old_logprobs"), 0.0)

    def timed(self, name, call, *args, **kwargs):
        start = time.perf_counter()
        result = call(*args, **kwargs)
        TimedTrainer.seconds[name] += time.perf_counter() - start
        return result

    def _generate_single_turn(self, *args, **kwargs):
        return self.timed("generate", super()._generate_single_turn, *args, **kwargs)

    def _calculate_rewards(self, *args, **kwargs):
        return self.timed("reward", super()._calculate_rewards, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        call = super()._get_per_token_logps_and_entropies
        if torch.is_grad_enabled():  # the forward of an update
            return call(*args, **kwargs)
        return self.timed("old_logprobs", call, *args, **kwargs)


class Clock(transformers.TrainerCallback):
    """When every update begins and ends."""

    def __init__(self):
        self.begins, self.ends = [], []

    def on_step_begin(self, *_, **__):
        self.begins.append(time.perf_counter())

    def on_step_end(self, *_, **__):
        self.ends.append(time.perf_counter())
        if len(self.ends) == UPDATES:  # the first step does not count
            TimedTrainer.seconds = dict.fromkeys(TimedTrainer.seconds, 0.0)


def theirs(steps, folder, seed, batch_size):
    """The same of GRPOTrainer: a step is UPDATES of its own steps, generation and reward within."""
    rows = tiny.problems("train", 2000, seed=seed)
    accumulate = MINIBATCH // batch_size
    config = trl.GRPOConfig(
        output_dir=folder,
        seed=seed,
        max_steps=steps * UPDATES,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=UPDATES * accumulate,
        num_generations=16,
        max_completion_length=24,
        temperature=1.0,
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_steps=UPDATES,
        report_to=[],
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = TimedTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(
            tiny.base_policy(), dtype=torch.float32
        ),
        processing_class=transformers.AutoTokenizer.from_pretrained(
            tiny.base_policy(), padding_side="left"
        ),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{k: r[k] for k in ("prompt", "answer")} for r in rows]),
        callbacks=[clock],
    )
    trainer.train()
    logs = [x for x in trainer.state.log_history if "completions/mean_length" in x]
    # A step lasts from the end of the last update before it, for the generation comes before
    # the callback of its first update.
    marks = [clock.begins[0], *clock.ends[UPDATES - 1 :: UPDATES]]
    seconds = [b - a for a, b in itertools.pairwise(marks)]
    parts = {f"{part}_s": total / (steps - 1) for part, total in TimedTrainer.seconds.items()}
    return [
        {"step_s": s, "tokens": log["completions/mean_length"], **parts}
        for s, log in list(zip(seconds, logs, strict=True))[1:]
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of a repeat; the first not counted")
    parser.add_argument("--trl-batch-sizes", nargs="+", type=int, default=[128])
    arguments = parser.parse_args()
    command = " ".join(["python benchmarks/trl_step.py", *sys.argv[1:]])
    torch.set_num_threads(1)  # two on shared cores wait for one another: ratios of 0.6 to 2.3
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            for size in arguments.trl_batch_sizes:
                made = theirs(arguments.steps, f"{folder}/trl-{repeat}-{size}", repeat + 1, size)
                found.setdefault(f"TRL, {size} rows a forward", []).append(made)
            made = ours(arguments.steps, f"{folder}/ours-{repeat}", repeat + 1)
            found.setdefault("dapo.py", []).append(made)
    medians = {
        name: [statistics.median(step["step_s"] for step in steps) for steps in repeats]
        for name, repeats in found.items()
    }
    tokens = {
        name: statistics.mean(step["tokens"] for steps in repeats for step in steps)
        for name, repeats in found.items()
    }
    best = min((n for n in found if n != "dapo.py"), key=lambda n: statistics.median(medians[n]))
    ratios = [a / b for a, b in zip(medians[best], medians["dapo.py"], strict=True)]
    shares = {}  # of a step: the parts that both have, and the rest, which sums to the step
    for name, repeats in found.items():
        steps = [step for repeat in repeats for step in repeat]
        whole = statistics.mean(step["step_s"] for step in steps)
        mean = {k: statistics.mean(s[k] for s in steps) / whole for k in steps[0] if k in PARTS}
        shares[name] = {k: round(v, 3) for k, v in {**mean, "rest": 1 - sum(mean.values())}.items()}
    result = {
        "step_s": {name: round(statistics.median(values), 3) for name, values in medians.items()},
        "tokens": {name: round(value, 2) for name, value in tokens.items()},
        "shares": shares,
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "machine": "2 CPU cores",
        "date": datetime.date.today().isoformat(),
        "command": command,
    }
    print(json.dumps(result, indent=1))
    with open(OUT, "a") as file:
        file.write(json.dumps(result) + "\n")
    if result["ratio"] < BAR:
        raise SystemExit(f"TRL's step costs {result['ratio']} of ours; the bar is {BAR}")


if __name__ == "__main__":
    main()
