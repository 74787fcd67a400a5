"""The algorithms side by side in the tiny world, at equal sampled responses, and FIPO's ablations.

    python benchmarks/compare.py peers                       # what docs/compare.md shows: six seeds
    python benchmarks/compare.py peers --figure docs/compare.png        # draw, run nothing
    python benchmarks/compare.py ablations --seeds 1 2        # FIPO's switches, one at a time
    python benchmarks/compare.py collapse --seeds 1 2         # its protections, at a rate too high
    python benchmarks/compare.py peers --table                # print the table, run nothing

An arm is one script with flags, from the same base policy; the seed decides the order of problems
and all sampling. A finished arm leaves one jsonl in benchmarks/compare/, a line per step with the
responses sampled so far, and is skipped from then on; delete it to run it again. Two commands with
other seeds can run at the same time. Learning rates are constant in `peers`, so that every point of
a curve is what a run of that budget would have given; the rest is each script's tiny preset.

Responses are counted when they are sampled: those that dynamic sampling drops count, and RFPO
starts where the PPO run that made its policy and critic has ended, after its calibration.
Intervals are 95 % of Student's t over seeds.
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

import numpy as np
from arms import ROOT, kept, read_lines, run_to_the_end

OUT = ROOT / "benchmarks" / "compare"
BUDGET = 51_200  # responses; a run goes on to the first step behind it
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
# What is kept of a line of metrics.jsonl.
NAMES = """
    step eval/avg_at_k eval/response_tokens_mean reward/accuracy rollout/gen_batches
    rollout/response_tokens_mean rollout/truncated_frac policy/entropy policy/kl policy/loss
    policy/clip_high_frac policy/clip_low_frac policy/dual_clip_frac optim/grad_norm
    advantage/length_weighted_mean fipo/influence_mean fipo/influence_min fipo/influence_max
    fipo/unclipped_max fipo/clip_low_frac fipo/clip_high_frac fipo/filtered_frac
    train/updates_per_batch
    value/explained_variance rfpo/agreement rfpo/reward_gap time/step_s
"""
KEEP = NAMES.split()

CONSTANT = "--decay-steps 0"
PAIR = "--save-actor-at-step 30 --save-critic-at-step 50"
FAST = f"{CONSTANT} --learning-rate 1e-3 --minibatch-size 32 --eval-every 10"
VANILLA = "--future-kl-half-life None --no-filter-extremes --influence-high None"
STUDIES = {
    "peers": {  # num_steps is an upper limit, chosen so that every seed passes the budget
        "GRPO": (
            "dapo",
            f"{CONSTANT} --num-steps 100 --eval-every 10 --no-dynamic-sampling --gen-prompts 32 "
            "--clip-eps-high 0.2 --dual-clip None --overlong-buffer 0 --kl-coef 0.001",
        ),
        "DAPO": ("dapo", f"{CONSTANT} --num-steps 66 --eval-every 5"),
        "DAPO, every group": (  # no dynamic sampling: nothing that was sampled is dropped
            "dapo",
            f"{CONSTANT} --num-steps 100 --eval-every 10 --no-dynamic-sampling --gen-prompts 32",
        ),
        "DAPO, G doubled": (
            "dapo",
            f"{CONSTANT} --num-steps 36 --eval-every 3 --group-size 32 --minibatch-size 128",
        ),
        "FIPO": ("fipo", f"{CONSTANT} --num-steps 66 --eval-every 5"),
        "length heuristic": (
            "fipo",
            f"{CONSTANT} --num-steps 66 --eval-every 5 --length-heuristic 0.2",
        ),
        "PPO": ("ppo_critic", f"--num-steps 100 --eval-every 10 {PAIR}"),
        "RFPO": (
            "rfpo",
            "--policy PPO/pi_0 --critic PPO/critic --num-steps 49 --eval-every 7",
        ),
    },
    "ablations": {
        "DAPO": ("dapo", ""),
        "FIPO": ("fipo", ""),
        "no filtering": ("fipo", "--no-filter-extremes"),
        "f in [1, 1.2]": ("fipo", "--influence-low 1.0"),
        "f not clipped": ("fipo", "--influence-high None"),
        "half-life 2": ("fipo", "--future-kl-half-life 2"),
        "half-life 8": ("fipo", "--future-kl-half-life 8"),
        "no decay": ("fipo", "--future-kl-half-life None"),
        "vanilla": ("fipo", VANILLA),
        "minibatch 32": ("fipo", "--minibatch-size 32"),
        "minibatch 128": ("fipo", "--minibatch-size 128"),
        "clip-high 0.2": ("fipo", "--clip-eps-high 0.2"),
        "clip-high 0.4": ("fipo", "--clip-eps-high 0.4"),
        "clip-high 1.4": ("fipo", "--clip-eps-high 1.4"),
    },
    "collapse": {
        "DAPO": ("dapo", FAST),
        "FIPO": ("fipo", FAST),
        "no filtering": ("fipo", f"{FAST} --no-filter-extremes"),
        "f not clipped": ("fipo", f"{FAST} --influence-high None"),
        "vanilla": ("fipo", f"{FAST} {VANILLA}"),
    },
}


def file_of(study, arm, seed):
    words = "-".join(re.findall(r"[\w.-]+", arm))
    return OUT / f"{study}-{words}-seed{seed}.jsonl"


def run(study, arm, seed, runs_dir):
    """Run one arm to its end; the lines it leaves, with the responses sampled so far."""
    script, flags = STUDIES[study][arm]
    name = file_of(study, arm, seed).stem
    flags = flags.replace("PPO/", f"{runs_dir}/{file_of(study, 'PPO', seed).stem}/")
    command = [sys.executable, f"{script}.py", "tiny", "--seed", str(seed), "--save-every", "1000"]
    print("==", study, arm, "seed", seed, flush=True)
    folder = run_to_the_end([*command, *flags.split()], name, runs_dir)
    args = json.loads((folder / "args.json").read_text())
    paid = 0
    if script == "rfpo":  # what its policy, its critic and its calibration have cost
        end = int(PAIR.split()[-1])  # --save-critic-at-step
        ppo = read_lines(file_of(study, "PPO", seed))
        paid = max(x["sampled"] for x in ppo if x["step"] <= end) + args["calibration_rollouts"]
    return count(read_lines(folder / "metrics.jsonl"), args, paid)


def count(lines, args, paid=0):
    """What is kept of each line, with the responses sampled up to its step; paid: those before."""
    counted = []
    for line in lines:
        if line["step"] > 0:
            rounds = line.get("rollout/gen_batches", 1)
            # A step without a mixed group logs neither: it took all the rounds that it may.
            if "train/skipped_steps" in line:
                rounds = args["max_gen_batches"]
            prompts = args["gen_prompts"] if "gen_prompts" in args else args["prompts_per_step"]
            paid += rounds * prompts * args["group_size"]
        counted.append({"sampled": paid, **kept(line, KEEP)})
    return counted


def at(lines, key, sampled):
    """A metric at a number of sampled responses, between its neighbours on a straight line; NaN
    outside of what was logged."""
    x, y = np.array([(line["sampled"], line[key]) for line in lines if key in line], float).T
    return np.interp(sampled, x, y, left=np.nan, right=np.nan)


def accuracies(found, sampled):
    """Held-out accuracy of every seed at a number of sampled responses."""
    return {seed: float(at(lines, "eval/avg_at_k", sampled)) for seed, lines in found.items()}


def interval(values):
    """Mean and half of the 95 % interval over seeds; of one seed there is none, NaN."""
    if len(values) < 2:
        return values[0], float("nan")
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), half


def shown(values):
    return "{:.1f} ± {:.1f}".format(*interval([100 * v for v in values]))


def mean_of_last(lines, key, last):
    values = [line[key] for line in lines if key in line][-last:]
    return statistics.mean(values) if values else None


def peers_table(runs):
    """Markdown: accuracy at the whole, half and a quarter of the budget, per arm."""
    rows = [
        "| arm | at 12,800 responses | at 25,600 | at 51,200 | minus DAPO's, same seed | tokens "
        "| policy updates |",
        "|---|---|---|---|---|---|---|",
    ]
    base = accuracies(runs.get("DAPO", {}), BUDGET)
    for arm, found in runs.items():
        parts = [accuracies(found, part) for part in (BUDGET // 4, BUDGET // 2, BUDGET)]
        cells = ["" if np.isnan([*x.values()]).any() else shown([*x.values()]) for x in parts]
        differences = [right - base[seed] for seed, right in parts[-1].items() if seed in base]
        cells.append(shown(differences) if differences and arm != "DAPO" else "")
        within = [[x for x in lines if x["sampled"] <= BUDGET] for lines in found.values()]
        lengths = [mean_of_last(x, "rollout/response_tokens_mean", 5) for x in within]
        cells += [f"{statistics.mean(lengths):.1f}"]
        updates = [sum(x.get("train/updates_per_batch", 0) for x in lines) for lines in within]
        cells += [f"{statistics.mean(updates):.0f}"]
        rows.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def ablations_table(runs):
    """Markdown: per arm the accuracy after training of every seed, and what f and the clips did."""
    rows = [
        "| arm | accuracy, last two evaluations | tokens | entropy | dual-clipped, most of a step "
        "| f, least and most | exp(FKL), most | filtered, most of a step | gradient norm, most |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, found in runs.items():

        def most(key, pick=max, form=".3g", found=found):
            values = [x[key] for lines in found.values() for x in lines if key in x]
            return format(pick(values), form) if values else ""

        def last(key, count, form, found=found):
            values = [mean_of_last(lines, key, count) for lines in found.values()]
            return ", ".join(format(v, form) for v in values if v is not None)

        influence = [most("fipo/influence_min", min), most("fipo/influence_max")]
        cells = [
            last("eval/avg_at_k", 2, ".1%"),
            last("rollout/response_tokens_mean", 10, ".1f"),
            last("policy/entropy", 10, ".3f"),
            most("policy/dual_clip_frac"),
            " to ".join(influence) if influence[0] else "",
            most("fipo/unclipped_max"),
            most("fipo/filtered_frac"),
            most("optim/grad_norm"),
        ]
        rows.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def figure(runs, path):
    """Held-out accuracy and response length against sampled responses: mean and interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    grid = np.linspace(0, BUDGET, 41)
    plot, axes = plt.subplots(1, 3, figsize=(14, 4.4), width_ratios=(1.3, 1, 1))
    panels = (
        ("held-out accuracy", "eval/avg_at_k"),
        ("response length, tokens", "rollout/response_tokens_mean"),
    )
    for axis, (title, key) in zip(axes, panels, strict=False):
        for i, (arm, found) in enumerate(runs.items()):
            values = np.array([at(lines, key, grid) for lines in found.values()])  # [seeds, grid]
            known = ~np.isnan(values).any(0)
            mean, half = np.array([interval(column) for column in values[:, known].T.tolist()]).T
            style = ("-", "--", ":")[i % 3]  # several arms lie on one another
            axis.plot(grid[known], mean, style, color=f"C{i}", label=arm, linewidth=1.8)
            axis.fill_between(
                grid[known], mean - half, mean + half, color=f"C{i}", alpha=0.15, linewidth=0
            )
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("responses sampled", fontsize=9)
    axes[0].legend(fontsize=9, loc="lower right")
    for i, found in enumerate(runs.values()):
        values = [100 * value for value in accuracies(found, BUDGET).values()]
        mean, half = interval(values)
        axes[2].errorbar(mean, -i, xerr=half, fmt="o", color=f"C{i}", capsize=4)
        axes[2].plot(values, [-i - 0.22] * len(values), "|", color=f"C{i}", alpha=0.7)
    axes[2].set_yticks([-i for i in range(len(runs))], list(runs))
    axes[2].set_title(f"accuracy at {BUDGET:,} responses, %", fontsize=11)
    for axis in axes:
        axis.tick_params(labelsize=9)
        axis.grid(alpha=0.3)
    plot.tight_layout()
    plot.savefig(path, dpi=110)
    print(path)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--arms", nargs="+", help="only these; default: all of the study")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "compare")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    parser.add_argument("--figure", type=Path, help="run nothing, draw the peers into this file")
    arguments = parser.parse_args()
    study, seeds = arguments.study, arguments.seeds
    if arguments.figure and study != "peers":
        parser.error("--figure draws the peers")
    arms = arguments.arms or list(STUDIES[study])
    OUT.mkdir(exist_ok=True)
    if not (arguments.table or arguments.figure):
        for seed in seeds:
            for arm in arms:
                path = file_of(study, arm, seed)
                if not path.exists():
                    lines = run(study, arm, seed, arguments.runs_dir.resolve())
                    if study == "peers" and lines[-1]["sampled"] < BUDGET:
                        sys.exit(f"{path.stem} ended at {lines[-1]['sampled']}, below {BUDGET}")
                    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = {}
    for arm in arms:
        paths = {seed: file_of(study, arm, seed) for seed in seeds}
        found = {seed: read_lines(path) for seed, path in paths.items() if path.exists()}
        if found:
            runs[arm] = found
    if arguments.figure:
        figure(runs, arguments.figure)
    print((peers_table if study == "peers" else ablations_table)(runs))


if __name__ == "__main__":
    main()
