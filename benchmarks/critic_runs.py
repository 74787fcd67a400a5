"""The critic's pipeline in the tiny world, arm by arm: where the numbers of docs/rfpo.md and
docs/ppo_critic.md come from.

    python benchmarks/critic_runs.py main --seeds 1 2 3       # PPO against RFPO from one pi_0
    python benchmarks/critic_runs.py ladder --seeds 1         # binary, continuous, threshold, raw
    python benchmarks/critic_runs.py updates --seeds 1        # updates per batch, two batch sizes
    python benchmarks/critic_runs.py main --table             # print the table, run nothing
    python benchmarks/critic_runs.py ladder --figure          # draw docs/rfpo_ladder.png

An arm is one script with flags. The first arm of `main` and `ladder`, "factory", is ppo_critic.py:
it leaves the pi_0 and the critic from which the others start. A finished arm leaves one jsonl in
benchmarks/critic_runs/, a line per step, and is skipped from then on; delete it to run it again.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from arms import ROOT, kept, read_lines, run_to_the_end

OUT = ROOT / "benchmarks" / "critic_runs"
# What is kept of a line of metrics.jsonl.
NAMES = """
    step eval/avg_at_k eval/response_tokens_mean reward/mean reward/accuracy policy/entropy
    policy/kl policy/loss rollout/response_tokens_mean rollout/truncated_frac optim/grad_norm
    value/explained_variance value/auc value/within_auc value/mean rfpo/reward_gap rfpo/score_gap
    rfpo/agreement rfpo/best_cut rfpo/length_drift text/restatements text/repetition
    time/rollout_s time/reward_s time/values_s time/old_logprobs_s time/critic_update_s
    time/policy_update_s time/sync_s time/step_s
"""
KEEP = NAMES.split()
FROM_PAIR = "--eval-every 10 --save-every 1000 --learning-rate 1e-4"
LONG = "--num-steps 120 --eval-every 10 --save-every 1000"
STUDIES = {
    "main": {
        "factory": ("ppo_critic", ""),
        "ppo": (
            "ppo_critic",
            f"--model PI_0 --critic CRITIC --num-steps 40 --critic-warmup-steps 0 {FROM_PAIR} "
            "--save-actor-at-step None --save-critic-at-step None",
        ),
        "rfpo-0": ("rfpo", f"--policy PI_0 --critic CRITIC --num-steps 40 {FROM_PAIR}"),
        "rfpo-50": (
            "rfpo",
            f"--policy PI_0 --critic CRITIC --num-steps 40 {FROM_PAIR} --label-fraction 0.5",
        ),
        "permuted": ("permuted", f"--policy PI_0 --critic CRITIC --num-steps 40 {FROM_PAIR}"),
    },
    "ladder": {
        "factory": ("ppo_critic", ""),
        "binary": ("rfpo", f"--policy PI_0 --critic CRITIC {LONG}"),
        "continuous": ("rfpo", f"--policy PI_0 --critic CRITIC {LONG} --reward-mode continuous"),
        "threshold": ("rfpo", f"--policy PI_0 --critic CRITIC {LONG} --reward-mode threshold"),
        "raw": ("rfpo", f"--policy PI_0 --critic CRITIC {LONG} --reward-mode raw"),
    },
    "updates": {
        f"{updates}x{batch}": (
            "ppo_critic",
            f"--num-steps 60 --eval-every 20 --save-every 1000 --prompts-per-step {batch // 8} "
            f"--minibatch-size {batch // updates} --save-actor-at-step None "
            "--save-critic-at-step None",
        )
        for batch in (128, 512)
        for updates in (1, 2, 4, 8)
    },
}


def permuted(argv):
    """rfpo.py with the rewards of a batch dealt out at random: a control that can learn nothing
    about which response is right."""
    sys.path.insert(0, str(ROOT))
    import torch

    import rfpo

    original, generator = rfpo.critic_rewards, torch.Generator().manual_seed(0)

    def shuffled(scores, lengths, calibration, *mode):
        rewards = original(scores, lengths, calibration, *mode)
        # The calibration calls it without a mode, and must pass its checks.
        return rewards[torch.randperm(len(rewards), generator=generator)] if mode else rewards

    rfpo.critic_rewards = shuffled
    sys.argv = [str(ROOT / "rfpo.py"), *argv]
    rfpo.launch(rfpo.main, rfpo.Args, rfpo.PRESETS, rfpo.__doc__)


def run(study, arm, seed, runs_dir):
    """Run one arm to its end; the lines it leaves."""
    script, flags = STUDIES[study][arm]
    factory = runs_dir / f"factory-seed{seed}"
    name = f"factory-seed{seed}" if arm == "factory" else f"{study}-{arm}-seed{seed}"
    words = ["tiny", "--seed", str(seed)]
    words += flags.replace("PI_0", f"{factory}/pi_0").replace("CRITIC", f"{factory}/critic").split()
    start = [f"{ROOT}/{script}.py"] if script != "permuted" else [__file__, "permuted"]
    print("==", study, arm, "seed", seed, flush=True)
    folder = run_to_the_end([sys.executable, *start, *words], name, runs_dir)  # factory: shared
    return [kept(line, KEEP) for line in read_lines(folder / "metrics.jsonl")]


def last_two(lines):
    """Mean of the last two evaluations."""
    return statistics.mean([x["eval/avg_at_k"] for x in lines if "eval/avg_at_k" in x][-2:])


def mean_of(lines, key, first, last):
    """Mean of a metric over the steps first to last; None where it was not logged."""
    values = [x[key] for x in lines if first <= x["step"] <= last and key in x]
    return statistics.mean(values) if values else None


def shown(value, form):
    return "" if value is None else format(value, form)


def table(study, seeds):
    """Markdown: one row per arm and seed."""
    rows = [
        "| arm | seed | first evaluation | last two | tokens, first 10 steps | last 10 "
        "| entropy, last 10 | reward - solve rate, last 10 | agreement, last 10 | EV, last 10 "
        "| step, median s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in STUDIES[study]:
        for seed in seeds:
            path = OUT / f"{study}-{arm}-seed{seed}.jsonl"
            if not path.exists():
                continue
            lines = read_lines(path)
            end, first = lines[-1]["step"], lines[0].get("eval/avg_at_k")
            last = {k: mean_of(lines, k, end - 9, end) for k in KEEP}
            steps = [x["time/step_s"] for x in lines if x["step"] > 0 and "eval/avg_at_k" not in x]
            rows.append(
                f"| {arm} | {seed} | {shown(first, '.1%')} | {last_two(lines):.1%} "
                f"| {mean_of(lines, 'rollout/response_tokens_mean', 1, 10):.2f} "
                f"| {last['rollout/response_tokens_mean']:.2f} "
                f"| {shown(last['policy/entropy'], '.3f')} "
                f"| {shown(last['rfpo/reward_gap'], '+.3f')} "
                f"| {shown(last['rfpo/agreement'], '.1%')} "
                f"| {shown(last['value/explained_variance'], '.2f')} "
                f"| {statistics.median(steps):.2f} |"
            )
    return "\n".join(rows)


def figure(study, seeds, path):
    """Held-out accuracy, length, reward minus solve rate and entropy of the arms, mean over seeds
    with the range as a band."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    panels = (
        ("held-out accuracy", "eval/avg_at_k"),
        ("response length, tokens", "rollout/response_tokens_mean"),
        ("reward minus solve rate", "rfpo/reward_gap"),
        ("agreement with the verifier", "rfpo/agreement"),
        ("entropy, nats per token", "policy/entropy"),
        ("explained variance", "value/explained_variance"),
    )
    plot, axes = plt.subplots(2, 3, figsize=(13, 6.4))
    for axis, (title, key) in zip(axes.flat, panels, strict=True):
        for i, arm in enumerate(a for a in STUDIES[study] if a != "factory"):
            found = [OUT / f"{study}-{arm}-seed{seed}.jsonl" for seed in seeds]
            runs = [{x["step"]: x[key] for x in read_lines(p) if key in x} for p in found]
            steps = sorted(set.intersection(*map(set, runs))) if runs else []
            if steps:
                values = np.array([[run[s] for s in steps] for run in runs])
                axis.plot(steps, values.mean(0), color=f"C{i}", label=arm)
                if len(runs) > 1:
                    axis.fill_between(
                        steps, values.min(0), values.max(0), color=f"C{i}", alpha=0.15, lw=0
                    )
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8)
    plot.tight_layout()
    plot.savefig(path, dpi=110)
    print(path)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", help="only these; default: all of the study")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "critic")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    parser.add_argument("--figure", type=Path, help="run nothing, draw the arms into this file")
    arguments = parser.parse_args()
    study, seeds = arguments.study, arguments.seeds
    OUT.mkdir(exist_ok=True)
    if not (arguments.table or arguments.figure):
        for seed in seeds:
            for arm in arguments.arms or STUDIES[study]:
                path = OUT / f"{study}-{arm}-seed{seed}.jsonl"
                if not path.exists():
                    lines = run(study, arm, seed, arguments.runs_dir.resolve())
                    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if arguments.figure:
        figure(study, seeds, arguments.figure)
    print(table(study, seeds))


if __name__ == "__main__":
    if sys.argv[1:2] == ["permuted"]:
        permuted(sys.argv[2:])
    else:
        main()
