"""pictures: the curves of one run or several, and the closing table; every script ends with it.

python pictures.py runs/fipo-tiny-seed1                      draws runs/fipo-tiny-seed1/curves.png
python pictures.py runs/dapo-* runs/fipo-* --out both.png    overlays runs
python pictures.py --by-seed runs/dapo-* runs/fipo-* --out both.png
                                                             one line for the seeds of a script
"""

import argparse
import json
import math
import re
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# (title, y-axis label, keys); a panel is drawn when some run has logged one of its keys.
PANELS = [
    ("Accuracy", "share right", ["eval/avg_at_k", "reward/accuracy"]),
    ("Reward", "mean shaped reward", ["reward/mean"]),
    (
        "Response length",
        "tokens",
        [
            "rollout/response_tokens_mean",
            "rollout/response_tokens_q25",
            "rollout/response_tokens_median",
            "rollout/response_tokens_q75",
        ],
    ),
    ("Length-weighted advantage", "mean over tokens", ["advantage/length_weighted_mean"]),
    ("Sampling rounds", "rounds per step", ["rollout/gen_batches"]),
    ("Entropy", "nats per token", ["policy/entropy"]),
    ("Policy KL", "nats per token", ["policy/kl"]),
    ("Gradient norm", "L2 norm", ["optim/grad_norm"]),
    (
        "Clipped tokens",
        "share",
        ["policy/clip_high_frac", "policy/clip_low_frac", "policy/dual_clip_frac"],
    ),
    (
        "Influence weight f",
        "weight",
        ["fipo/influence_mean", "fipo/influence_min", "fipo/influence_max"],
    ),
    (
        "Influence weight at a bound",
        "share",
        ["fipo/clip_low_frac", "fipo/clip_high_frac"],
    ),
    ("Explained variance", "1 - Var(R - V) / Var(R)", ["value/explained_variance"]),
    ("Terminal value against outcome", "AUC", ["value/auc", "value/within_auc"]),
    ("Value", "value", ["value/mean", "value/min", "value/max"]),
    ("Critic loss", "half squared error", ["value/loss"]),
    ("Critic gradient norm", "L2 norm", ["optim/critic_grad_norm"]),
    ("Reward minus solve rate", "share", ["rfpo/reward_gap", "rfpo/score_gap"]),
    ("Agreement with the verifier", "share", ["rfpo/agreement"]),
    ("Best cut of the raw score", "score", ["rfpo/best_cut"]),
    ("Length against step 1", "relative change", ["rfpo/length_drift"]),
    ("Cut off at the limit", "share", ["rollout/truncated_frac", "eval/truncated_frac"]),
    ("Statements of the answer", "per response", ["text/restatements", "text/boxed_answers"]),
    ("Engine against trainer", "mean |log-prob difference|", ["rollout/logprob_gap_mean"]),
    ("Loss", "nats per token", ["sft/loss"]),
]

ACCURACY = re.compile(r"eval/(.+/)?(avg|maj|pass)_at_k")
KEYS = {"eval/response_tokens_mean", "eval/avg_at_k"}
WINDOW = 300  # steps of the comparison window [RFPO Table 4]


def read_metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def curves(folders: list[Path], path: Path, by_seed: bool = False) -> Path:
    """Draw the panels that the runs have numbers for: of one run every key, of several runs the
    first key of each panel, a colour for each run. by_seed: runs whose names differ in -seedN only
    are one line, their mean, in a band from the least to the largest of them."""
    names = [Path(folder).resolve().name for folder in folders]
    if len({*names}) < len(names):  # in different places
        names = [str(folder) for folder in folders]
    runs: dict[str, list] = {}  # the metrics of each run that a label stands for
    for name, folder in zip(names, folders, strict=True):
        label = re.sub(r"-seed\d+", "", name) if by_seed else name
        runs.setdefault(label, []).append(read_metrics(folder))
    logged = {key for group in runs.values() for lines in group for x in lines for key in x}
    panels = [(title, label, [k for k in keys if k in logged]) for title, label, keys in PANELS]
    panels = [
        (title, label, keys[: None if len(runs) == 1 else 1]) for title, label, keys in panels
    ]
    panels = [panel for panel in panels if panel[2]]
    columns, scatter = 4, logged >= KEYS
    rows = -(-(len(panels) + scatter) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3 * rows), squeeze=False)
    for axis, (title, label, keys) in zip(axes.flat, panels, strict=False):
        lines = [(name, key) for name in runs for key in keys]
        for i, (name, key) in enumerate(lines):
            steps, mean, low, high = series(runs[name], key)
            text = name if len(runs) > 1 else key
            text += f" ({len(runs[name])} seeds)" if len(runs[name]) > 1 else ""
            marker, colour = "o" if len(steps) < 12 else None, f"C{i % 10}"
            axis.plot(steps, mean, color=colour, marker=marker, markersize=3, label=text)
            if len(runs[name]) > 1:
                axis.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.set_ylabel(label if len(runs) == 1 else keys[0], fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        if len(lines) > 1 and (len(runs) == 1 or axis is axes.flat[0]):
            axis.legend(fontsize=7, framealpha=0.6)
    for axis in axes.flat[len(panels) + scatter :]:
        axis.axis("off")
    if scatter:
        accuracy_against_length(axes.flat[len(panels)], runs)
    figure.suptitle(", ".join(runs), fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return Path(path)


def series(group: list[list[dict]], key: str) -> tuple:
    """Steps at which every run of a group has logged a key; mean, least and largest value there."""
    tables = [{line["step"]: line[key] for line in lines if key in line} for lines in group]
    steps = sorted(set.intersection(*map(set, tables)))
    values = np.array([[table[step] for step in steps] for table in tables])  # [runs, steps]
    return steps, values.mean(0), values.min(0), values.max(0)


def evaluations(lines: list[dict]) -> list[tuple[float, float]]:
    """(mean length, accuracy) of every evaluation of a run."""
    return [(x["eval/response_tokens_mean"], x["eval/avg_at_k"]) for x in lines if {*x} >= KEYS]


def accuracy_against_length(axis, runs: dict[str, list]) -> None:
    """Every evaluation as a point, with the least-squares line of each label (FIPO Fig. 3f)."""
    for i, group in enumerate(runs.values()):
        points = np.array([point for lines in group for point in evaluations(lines)])
        lengths, accuracies = points.reshape(-1, 2).T
        axis.plot(lengths, accuracies, "o", color=f"C{i % 10}", markersize=3)
        if len({*lengths}) > 1:
            slope, _ = slope_and_r2(lengths, accuracies)
            ends = np.array([min(lengths), max(lengths)])
            line = accuracies.mean() + slope * (ends - lengths.mean())
            axis.plot(ends, line, color=f"C{i % 10}", alpha=0.6)
    axis.set_title("Accuracy against length", fontsize=10)
    axis.set_xlabel("response tokens in the evaluation", fontsize=8)
    axis.set_ylabel("share right", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.3)


def summary(folder: Path) -> str:
    """The closing table: first and last value of the main numbers, and means of ten steps; then
    what the evaluations come to, and how a frozen critic and the length moved."""
    lines = read_metrics(folder)
    rows = [("", "first", "last", "mean of first 10", "mean of last 10")]
    for key in (
        "eval/avg_at_k",
        "eval/pass_at_k",
        "eval/response_tokens_mean",
        "reward/mean",
        "reward/accuracy",
        "rollout/response_tokens_mean",
        "policy/entropy",
        "value/explained_variance",
        "value/auc",
        "rfpo/agreement",
        "sft/loss",
        "time/step_s",
    ):
        values = [line[key] for line in lines if key in line]
        if values:
            means = [sum(v) / len(v) for v in (values[:10], values[-10:])]
            shown = [values[0], values[-1]] + (means if not key.startswith("eval") else [])
            rows.append((key, *(f"{value:.4g}" for value in shown), *[""] * (4 - len(shown))))
    table = ["{:30}{:>10}{:>10}{:>18}{:>18}".format(*row) for row in rows]
    table += evaluation_lines(lines)
    points = evaluations(lines)
    if len(points) > 2 and len({length for length, _ in points}) > 1:
        slope, r2 = slope_and_r2(*zip(*points, strict=True))
        where = f"slope {1e5 * slope:+.3g} per 100,000 tokens, R2 {r2:.2f}"  # [FIPO Fig. 3f]
        table.append(f"accuracy against length, {len(points)} evaluations: {where}")
    for key in ("value/auc", "rfpo/best_cut"):  # does a frozen critic go stale? [RFPO App. E.4]
        points = [(line["step"], line[key]) for line in lines if "rfpo/agreement" in line]
        if len(points) > 2:
            slope, t = trend(*zip(*points, strict=True))
            table.append(f"{key}: slope {slope:+.3g} per 100 steps, t = {t:+.2f}")
    return "\n".join(table)


def evaluation_lines(lines: list[dict]) -> list[str]:
    """Of every evaluated accuracy: peak (step) and final value [RFPO Table 3], mean of the last ten
    [RFPO Table 8], mean of the first WINDOW steps [RFPO Table 4], and the peak less what selecting
    it gains. The evaluation at step 0 is of the starting policy and does not count."""
    trained = [line for line in lines if line["step"] > 0]
    keys = [k for k in dict.fromkeys(k for x in trained for k in x) if ACCURACY.fullmatch(k)]
    rows = []
    for key in keys:
        steps, values = zip(*[(x["step"], x[key]) for x in trained if key in x], strict=True)
        if len(values) > 1:
            best = int(np.argmax(values))
            window = [v for step, v in zip(steps, values, strict=True) if step <= WINDOW]
            peak = f"{values[best]:.4g} ({steps[best]})"
            numbers = values[-1], np.mean(values[-10:]), np.mean(window) if window else math.nan
            numbers += (selection_corrected_peak(values),)
            rows.append((key, peak, *("" if math.isnan(x) else f"{x:.4g}" for x in numbers)))
    if not rows:
        return []
    window = f"mean to step {min(WINDOW, trained[-1]['step'])}"
    head = ("", "peak (step)", "final", "mean of last 10", window, "corrected peak")
    return ["", *("{:30}{:>16}{:>10}{:>18}{:>18}{:>16}".format(*row) for row in [head, *rows])]


def selection_corrected_peak(values: list[float]) -> float:
    """The highest of m evaluations, less the expected maximum of m draws from a flat curve with the
    same noise: sigma E[max z_i], z_i ~ N(0, 1), sigma the standard deviation of the successive
    differences over sqrt(2) [RFPO App. C]. NaN below three evaluations: they show no noise."""
    if len(values) < 3:
        return math.nan
    sigma = float(np.diff(values).std(ddof=1)) / math.sqrt(2)
    return max(values) - sigma * expected_maximum(len(values))


def expected_maximum(m: int) -> float:
    """E[max of m draws from N(0, 1)], to about 1e-3."""
    z = np.linspace(-9, 9, 36_001)
    cdf = np.cumsum(np.exp(-(z**2) / 2))
    return float(z @ np.diff((cdf / cdf[-1]) ** m, prepend=0.0))


def slope_and_r2(x: list[float], y: list[float]) -> tuple[float, float]:
    """Least-squares slope of y on x, and the share of y's variance that the line explains; 0 and 0
    where all y are equal. x must not all be equal."""
    x, y = np.array(x, float) - np.mean(x), np.array(y, float) - np.mean(y)
    slope = (x @ y) / (x @ x)
    return float(slope), float(slope * (x @ y) / (y @ y)) if (y @ y) > 0 else 0.0


def trend(steps: list[int], values: list[float]) -> tuple[float, float]:
    """Least-squares slope per 100 steps and its t statistic; both 0 where the values are equal.
    Values that are not numbers (an AUC of one class) are left out."""
    x, y = np.array([p for p in zip(steps, values, strict=True) if np.isfinite(p[1])], float).T
    if len(x) < 3 or y.max() == y.min():
        return 0.0, 0.0
    x = x - x.mean()
    slope = (x @ y) / (x @ x)
    residual = y - y.mean() - slope * x
    error = np.sqrt((residual @ residual) / (len(x) - 2) / (x @ x))
    return float(100 * slope), float(slope / error) if error > 0 else math.inf


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument(
        "--out", type=Path, help="picture to write (default: curves.png of the first run)"
    )
    parser.add_argument(
        "--by-seed", action="store_true", help="mean and range of the runs that differ in seed only"
    )
    arguments = parser.parse_args()
    for run in arguments.runs:
        if not (run / "metrics.jsonl").is_file():
            parser.error(f"{run} is not the folder of a run: it has no metrics.jsonl")
    out = arguments.out or arguments.runs[0] / "curves.png"
    print(curves(arguments.runs, out, arguments.by_seed))
