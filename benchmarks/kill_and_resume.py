"""Ten kills: every script, in one and in two processes, is killed (SIGKILL) at a random moment of a
12-step run and resumed; the end must be that of a run that was left alone, bit for bit.

    python benchmarks/kill_and_resume.py            # runs what is missing, then prints the table
    python benchmarks/kill_and_resume.py --table    # prints the table, runs nothing

The moment is drawn (--seed) between the line of step 0 in metrics.jsonl (sft.py: of step 1) and the
end of the process; every third resumed run is killed again, at any moment from its start on. Sizes
are small, a checkpoint is written every 2 steps. Appends one line per kill to
benchmarks/kill_and_resume.jsonl, and skips what has one there.
"""

import argparse
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "kill_and_resume.jsonl"
CASES = [
    (s, n) for n in (1, 2) for s in ("sft.py", "dapo.py", "fipo.py", "ppo_critic.py", "rfpo.py")
]
EVERY = "--num-steps 12 --save-every 2 --eval-problems 8 --rollout-engine hf"
RL = f"{EVERY} --eval-every 4 --prompts-per-step 4 --group-size 4 --minibatch-size 8"
FLAGS = {
    "sft.py": f"{EVERY} --max-rows 96 --batch-size 16",
    "dapo.py": f"{RL} --gen-prompts 6",
    "fipo.py": f"{RL} --gen-prompts 6",
    "ppo_critic.py": f"{RL} --save-actor-at-step 6 --save-critic-at-step 12",
    "rfpo.py": f"{RL} --allow-weak-critic --calibration-rollouts 32",
}
CLOCKS = ("seconds", "time/", "memory/")  # metrics that no two runs share


def start(folder: Path, script: str, processes: int, *flags: str) -> subprocess.Popen:
    """The script with its small sizes as runs/run in the folder; output is added to a log there."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(processes)]
    command = [*launcher, str(ROOT / script), "tiny", *FLAGS[script].split(), *flags]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log", "a") as log:
        return subprocess.Popen(
            [*command, "--run-name", "run"],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def kill(process: subprocess.Popen) -> int:
    """SIGKILL to the process and all that it started, for torchrun's ranks have groups of their
    own; returns its exit code."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.suspend()  # none of them can act on another's end
    for member in family:
        member.kill()
    psutil.wait_procs(family[:-1])
    return process.wait()


def wait_for_line(process: subprocess.Popen, folder: Path) -> None:
    """Wait for the first line of metrics.jsonl."""
    path = folder / "runs" / "run" / "metrics.jsonl"
    while not (path.exists() and path.stat().st_size) and process.poll() is None:
        time.sleep(0.01)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def left_alone(folder: Path, script: str, processes: int, *flags: str) -> tuple[float, float]:
    """An uninterrupted run; returns its seconds up to the first line, and from there to its end."""
    begin = time.monotonic()
    process = start(folder, script, processes, *flags)
    wait_for_line(process, folder)
    middle = time.monotonic()
    if process.wait() != 0:
        raise SystemExit((folder / "log").read_text())
    return middle - begin, time.monotonic() - middle


def killed(
    folder: Path,
    script: str,
    processes: int,
    whole: Path,
    seconds: tuple[float, float],
    moments: list[float],
    *flags: str,
) -> dict | None:
    """A run that is killed at the first moment (a share of the seconds after the first line), each
    resumed run at the next (a share of all seconds), and the last one left alone. Returns what came
    of it beside the run in the folder `whole`; None where a kill came too late."""
    run, kills = folder / "runs" / "run", []
    for number, moment in enumerate(moments):
        process = start(folder, script, processes, *(["--resume"] if number else []), *flags)
        if number == 0:
            wait_for_line(process, folder)
        time.sleep(moment * (sum(seconds) if number else seconds[1]))
        if process.poll() is not None or kill(process) != -signal.SIGKILL:
            return None
        steps = [line["step"] for line in read_lines_of_a_killed_run(run / "metrics.jsonl")]
        found = {path.name for path in run.glob("checkpoints/*")}
        complete = {mark.parent.name for mark in run.glob("checkpoints/*/complete")}
        newest = max((int(name[5:]) for name in complete if name.startswith("step-")), default=None)
        during_save = any(name.startswith("partial-") for name in found)
        kills.append({"moment": moment, "last_line": max(steps, default=None), "newest": newest})
        kills[-1]["during_save"] = during_save
    process = start(folder, script, processes, "--resume", *flags)
    code, log = process.wait(), (folder / "log").read_text()
    if code != 0:
        raise SystemExit(log)
    theirs = {path.relative_to(whole / "runs" / "run"): path for path in weight_files(whole)}
    ours = {path.relative_to(run): path for path in weight_files(folder)}
    a, b = (read_lines(f / "runs" / "run" / "metrics.jsonl") for f in (whole, folder))
    return {
        "kills": kills,
        "resumed_from": [int(step) for step in re.findall(r"resuming from \S+step-(\d+)", log)],
        "same_weights": theirs.keys() == ours.keys()
        and all(same_tensors(theirs[name], ours[name]) for name in theirs),
        "steps_once": [line["step"] for line in a] == [line["step"] for line in b],
        "same_metrics": [without_clocks(line) for line in a] == [without_clocks(x) for x in b],
    }


def read_lines_of_a_killed_run(path: Path) -> list[dict]:
    """The lines of a log whose last one a kill may have cut."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def weight_files(folder: Path) -> list[Path]:
    """Every exported model of the run: model/, and what the script leaves besides."""
    return sorted((folder / "runs" / "run").glob("*/*.safetensors"))


def same_tensors(path: Path, other: Path) -> bool:
    a, b = load_file(path), load_file(other)
    return a.keys() == b.keys() and all(bool((a[name] == b[name]).all()) for name in a)


def without_clocks(line: dict) -> dict:
    return {name: value for name, value in line.items() if not name.startswith(CLOCKS)}


def table(lines: list[dict]) -> str:
    """Markdown: one row per case."""
    rows = [
        "| script | processes | killed after the line of step | in a save | resumed from | weights "
        "| steps 0 to 12 once | metrics |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for x in lines:
        after = ", ".join(str(k["last_line"]) for k in x["kills"])
        saving = ", ".join("yes" if k["during_save"] else "no" for k in x["kills"])
        begin = ", ".join(map(str, x["resumed_from"])) or "the start"
        same = ["equal" if x[k] else "DIFFER" for k in ("same_weights", "same_metrics")]
        once = "yes" if x["steps_once"] else "NO"
        rows.append(
            f"| `{x['script']}` | {x['processes']} | {after} | {saving} | {begin} | {same[0]} "
            f"| {once} | {same[1]} |"
        )
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    options = parser.parse_args()
    if options.table:
        return print(table(read_lines(options.out)))
    done = {(x["script"], x["processes"], x["seed"]) for x in read_lines(options.out)}
    with tempfile.TemporaryDirectory() as temporary:
        work, pair = Path(temporary), []
        for number, (script, processes) in enumerate(CASES):
            rng = random.Random(f"{options.seed} {script} {processes}")
            if (script, processes, options.seed) in done:
                continue
            begin, case = time.monotonic(), work / f"{script}-{processes}"
            if script == "rfpo.py" and not pair:  # what rfpo.py starts from
                left_alone(work / "pair", "ppo_critic.py", 1)
                made = work / "pair" / "runs" / "run"
                pair = ["--policy", str(made / "pi_0"), "--critic", str(made / "critic")]
            flags = pair if script == "rfpo.py" else []
            seconds, result, tries = left_alone(case / "whole", script, processes, *flags), None, 0
            while result is None:
                moments = [rng.uniform(0, 1) for _ in range(2 if number % 3 == 2 else 1)]
                tries += 1
                print(f"{script}, {processes} processes: kill at {moments}", flush=True)
                folder = case / f"killed-{tries}"
                ways = case / "whole", seconds, moments
                result = killed(folder, script, processes, *ways, *flags)
            line = {"script": script, "processes": processes, "seed": options.seed, **result}
            line["seconds"] = round(time.monotonic() - begin)
            line["date"] = datetime.date.today().isoformat()
            with open(options.out, "a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    print(table(read_lines(options.out)))


if __name__ == "__main__":
    main()
