"""What a step costs beside its bare parts: dapo.py's own loop against what it cannot do without.

    python benchmarks/step_cost.py                                        # the tiny preset
    python benchmarks/step_cost.py --model smollm2 --dataset PATH/gsm8k_test.jsonl  # SmolLM2-135M

Runs dapo.main as it is, in this process. Around two of its calls stand the bare parts, on the same
weights and tokens: beside every `sample` the same engine call once more; behind `make_batch` the
forward for old log-probabilities, and forward and backward of every micro-batch, with a loss that
is a plain sum. Their time is taken out of the step's. The rest of a step is judging, gathering,
batching, the loss, metrics, clipping, AdamW, the weight sync and the log; evaluation and saving are
switched off. Medians over steps after the first. Appends to benchmarks/step_cost.jsonl, and exits
with 1 where a step costs more than 1.2 times its parts.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait do not spin

import torch  # noqa: E402

import common  # noqa: E402
import dapo  # noqa: E402

BAR = 1.2
OUT = ROOT / "benchmarks" / "step_cost.jsonl"
REAL = {  # rows of about 200 tokens with responses of up to 64; accuracy does not matter here
    "reward": "verifier",
    "prompt_column": "question",
    "answer_column": "answer",
    "max_prompt_tokens": 320,
    "max_response_tokens": 64,
    "overlong_buffer": 16,
    "temperature": 0.7,
    "prompts_per_step": 1,
    "gen_prompts": 1,
    "group_size": 8,
    "minibatch_size": 4,
    "tokens_per_microbatch": 2048,
    "learning_rate": 1e-6,
    "dynamic_sampling": False,
}


class BareParts:
    """Seconds of the bare parts of the current step, and what they added to it."""

    def __init__(self):
        self.policy, self.seconds, self.steps = None, {}, []

    def time(self, name, call):
        start = time.perf_counter()
        result = call()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return result

    def load_policy(self, args, accelerator):
        self.policy, optimizer = common.load_policy(args, accelerator)
        return self.policy, optimizer

    def sample(self, engine, drawn, n, sampling, *seeds):
        prompts = [problem.prompt_ids for _, problem in drawn]
        rows = [[common.row_seed(*seeds, number, g) for g in range(n)] for number, _ in drawn]
        calls = {
            "whole": lambda: common.sample(engine, drawn, n, sampling, *seeds),
            "bare": lambda: self.time(
                "generate", lambda: engine.generate(prompts, n, sampling, rows)
            ),
        }
        # The second of two equal calls is the faster one: each is the second every other step.
        order = ("whole", "bare") if len(self.steps) % 2 else ("bare", "whole")
        results = {name: calls[name]() for name in order}
        groups, again = results["whole"], results["bare"]
        same = [a.token_ids.tolist() for group in again for a in group]
        assert same == [r.token_ids.tolist() for g in groups for r in g.responses]
        return groups

    def make_batch(self, groups, minibatch_size, pad_id, accelerator):
        batch = common.make_batch(groups, minibatch_size, pad_id, accelerator)
        pieces = [common.microbatches(batch, m, self.args, accelerator) for m in batch.minibatches]

        @torch.no_grad()
        def old_logprobs():
            for minibatch in pieces[1:]:
                for rows, _ in minibatch:
                    self.policy(*batch.inputs(rows), self.args.temperature)

        def forward_backward():
            for minibatch in pieces:
                for rows, _ in minibatch:
                    self.policy(*batch.inputs(rows), self.args.temperature)[0].sum().backward()

        self.time("old_logprobs", old_logprobs)
        self.time("forward_backward", forward_backward)
        self.policy.zero_grad()
        return batch

    def log(self, step, metrics):
        bare = sum(self.seconds.values())
        if step > 0:
            whole = time.perf_counter() - self.start - bare
            self.steps.append({"step_s": whole, "parts_s": bare, **self.seconds})
        self.seconds, self.start = {}, time.perf_counter()


def measure(args):
    """One dictionary per step: seconds of the step and of each of its bare parts."""
    parts = BareParts()
    parts.args = args
    for name in ("load_policy", "sample", "make_batch"):
        setattr(dapo, name, getattr(parts, name))
    dapo.evaluate = lambda *_: {}

    class Run(common.Run):
        def log(self, step, metrics, groups, tokenizer):
            super().log(step, metrics, groups, tokenizer)
            parts.log(step, metrics)

        def save(self, *_, **__):
            parts.start = time.perf_counter()

        def finish(self):
            pass

    dapo.Run, dapo.export = Run, lambda *_: None
    sys.argv[0] = dapo.__file__  # the script that a run's folder keeps
    dapo.main(args, "tiny")
    return parts.steps[1:]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="tiny, or the folder of a language model")
    parser.add_argument("--dataset", help="problems for it, with question and answer")
    parser.add_argument("--steps", type=int, default=13, help="the first one is not counted")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        args = replace(
            dapo.Args(),
            num_steps=arguments.steps,
            save_every=10**6,
            eval_every=10**6,
            runs_dir=folder,
            model=arguments.model,
            rollout_engine="hf",
        )
        if arguments.model != "tiny":
            data = {"dataset": arguments.dataset, "eval_dataset": arguments.dataset}
            args = replace(args, **REAL, **data)
        steps = measure(args)
    median = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    result = {
        "model": Path(arguments.model).name,
        **{name: round(value, 3) for name, value in median.items()},
        "ratio": round(statistics.median(s["step_s"] / s["parts_s"] for s in steps), 3),
        "ratios": [round(s["step_s"] / s["parts_s"], 2) for s in steps],
        "machine": "2 CPU cores",
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/step_cost.py --model " + Path(arguments.model).name,
    }
    print(json.dumps(result))
    with open(OUT, "a") as file:
        file.write(json.dumps(result) + "\n")
    if result["ratio"] > BAR:
        raise SystemExit(f"a step costs {result['ratio']} of its parts; the bar is {BAR}")


if __name__ == "__main__":
    main()
