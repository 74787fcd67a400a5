"""The tiny runs: every script at every seed, from nothing, and what came of it.

    python benchmarks/tiny_runs.py                      # dapo and fipo, seeds 1 2 3
    python benchmarks/tiny_runs.py --check              # and exit 1 where a bar is missed
    python benchmarks/tiny_runs.py --scripts fipo --seeds 4 --future-kl-half-life 8
    python benchmarks/tiny_runs.py --table              # print the table, run nothing

Flags that this script does not know go to the scripts. Each run starts in a fresh copy of the
scripts, so its wall seconds include the warm start that a first `python fipo.py` makes; --warm
uses the base policy in .cache instead. Appends one line per finished run to
benchmarks/tiny_runs.jsonl, and skips what has one there: script, seed and flags decide, not the
commit, so delete the lines of old code before measuring new code.

Bars (--check): base accuracy below 0.5, final accuracy at least 0.85, response length of the last
ten steps at least 1.15 times that of the first ten.
"""

import argparse
import datetime
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "tiny_runs.jsonl"


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def git(*words):
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def collect(folder):
    """The numbers of a finished run, from its args.json and metrics.jsonl."""
    args = json.loads((folder / "args.json").read_text())
    lines = read_lines(folder / "metrics.jsonl")
    if not lines or lines[-1]["step"] != args["num_steps"]:
        raise SystemExit(f"{folder} did not reach step {args['num_steps']}")
    accuracy = {line["step"]: line["eval/avg_at_k"] for line in lines if "eval/avg_at_k" in line}
    key = "rollout/response_tokens_mean"
    lengths = [line[key] for line in lines if key in line]
    first, last = statistics.mean(lengths[:10]), statistics.mean(lengths[-10:])
    return {
        "base_accuracy": round(accuracy[0], 4),
        "final_accuracy": round(accuracy[args["num_steps"]], 4),
        "first_tokens": round(first, 2),
        "last_tokens": round(last, 2),
        "length_ratio": round(last / first, 3),
        "train_s": round(lines[-1]["seconds"], 1),
        "steps": args["num_steps"],
        "eval_problems": args["eval_problems"],
        "eval_samples": args["eval_samples"],
    }


def run(script, seed, flags, runs_dir, warm):
    """Run one script to its end; the record of it. Raises SystemExit where it fails."""
    name = f"{script}-tiny-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    print(f"== python {script}.py tiny --seed {seed} {' '.join(flags)}", flush=True)
    with tempfile.TemporaryDirectory() as copy:
        home = ROOT if warm else Path(copy)
        if not warm:
            for path in (*ROOT.glob("*.py"), ROOT / "token_page.html"):
                shutil.copy(path, home)
        command = [sys.executable, str(home / f"{script}.py"), "tiny", "--seed", str(seed)]
        command += ["--runs-dir", str(runs_dir.resolve()), "--run-name", name, *flags]
        start = time.perf_counter()
        code = subprocess.run(command, check=False, cwd=home).returncode
        wall = time.perf_counter() - start
    if code:
        raise SystemExit(f"{script}.py ended with exit code {code}")
    changed = bool(git("status", "--porcelain", "--untracked-files=no", "--", ":(glob)*.py"))
    return {
        "script": script,
        "seed": seed,
        "flags": flags,
        **collect(runs_dir / name),
        "wall_s": round(wall, 1),
        "warm_start_included": not warm,
        "commit": git("rev-parse", "HEAD") + ("+changes" if changed else ""),
        "machine": "2 CPU cores",
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", f"{script}.py", "tiny", "--seed", str(seed), *flags]),
    }


def missed_bars(line):
    bars = {
        "base accuracy below 0.5": line["base_accuracy"] < 0.5,
        "final accuracy at least 0.85": line["final_accuracy"] >= 0.85,
        "length ratio at least 1.15": line["length_ratio"] >= 1.15,
    }
    return [bar for bar, held in bars.items() if not held]


def table(lines):
    """Markdown: one row per run, sorted by script, flags and seed."""
    rows = [
        "| run | base | final | tokens, first 10 steps | last 10 | ratio | training | command |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in sorted(lines, key=lambda x: (x["script"], x["flags"], x["seed"])):
        rows.append(
            f"| `{line['command']}` | {line['base_accuracy']:.1%} | {line['final_accuracy']:.1%} "
            f"| {line['first_tokens']:.1f} | {line['last_tokens']:.1f} "
            f"| {line['length_ratio']:.2f} | {line['train_s']:.0f} s | {line['wall_s']:.0f} s |"
        )
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,  # --eval-... belongs to the scripts
    )
    parser.add_argument("--scripts", nargs="+", default=["dapo", "fipo"], help="without .py")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs", help="where runs go")
    parser.add_argument("--out", type=Path, default=OUT, help="jsonl to append to")
    parser.add_argument("--warm", action="store_true", help="use the base policy in .cache")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    arguments, flags = parser.parse_known_args()
    wanted = [(script, seed) for script in arguments.scripts for seed in arguments.seeds]
    for script, seed in [] if arguments.table else wanted:
        done = [(x["script"], x["seed"], x["flags"]) for x in read_lines(arguments.out)]
        if (script, seed, flags) in done:
            print(f"== {script} seed {seed}: in {arguments.out.name} already", flush=True)
            continue
        line = run(script, seed, flags, arguments.runs_dir, arguments.warm)
        with open(arguments.out, "a") as file:
            file.write(json.dumps(line) + "\n")
    lines = [
        line
        for line in read_lines(arguments.out)
        if (line["script"], line["seed"]) in wanted and line["flags"] == flags
    ]
    print(table(lines))
    if arguments.check:
        problems = [
            f"{line['script']} seed {line['seed']} misses: {', '.join(missed_bars(line))}"
            for line in lines
            if missed_bars(line)
        ]
        found = {(line["script"], line["seed"]) for line in lines}
        problems += [
            f"{script} seed {seed} has no run"
            for script, seed in wanted
            if (script, seed) not in found
        ]
        if problems:
            raise SystemExit("\n".join(problems))
        print("every run is above the bars")


if __name__ == "__main__":
    main()
