"""Ten kills: every script, in one and in two processes, is killed (SIGKILL) at a random moment of a
12-step run and resumed; the end must be that of a run that was left alone, bit for bit.

    python benchmarks/kill_and_resume.py            # runs what is missing, then prints the table
    python benchmarks/kill_and_resume.py --table    # prints the table, runs nothing

The moment is drawn (--seed): so many lines of metrics.jsonl, 1 to 13, and so much of the time
between two lines. Every third run is killed again while it loads and resumes. Sizes are small, a
checkpoint is written every 2 steps. Appends one line per case to benchmarks/kill_and_resume.jsonl,
and skips what has one there.
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
SCRIPTS = ("fipo.py", "ppo_critic.py", "sft.py", "rfpo.py", "dapo.py")
CASES = [(script, processes) for script in SCRIPTS for processes in (2, 1)]
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


def wait_for_lines(process: subprocess.Popen, folder: Path, count: int) -> None:
    """Wait for so many lines of metrics.jsonl, or for the end."""
    path = folder / "runs" / "run" / "metrics.jsonl"
    while process.poll() is None and not (path.exists() and path.read_text().count("\n") >= count):
        time.sleep(0.01)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def left_alone(folder: Path, script: str, processes: int, *flags: str) -> tuple[float, float]:
    """An uninterrupted run; returns its seconds up to the first line, and from one to the next."""
    begin = time.monotonic()
    process = start(folder, script, processes, *flags)
    wait_for_lines(process, folder, 1)
    middle = time.monotonic()
    wait_for_lines(process, folder, 12)
    end = time.monotonic()
    if process.wait() != 0:
        raise SystemExit((folder / "log").read_text())
    return middle - begin, (end - middle) / 11


def killed(
    folder: Path,
    script: str,
    processes: int,
    whole: Path,
    seconds: tuple[float, float],
    moment: float,
    again: float | None,
    *flags: str,
) -> dict | None:
    """A run that is killed after so many lines (the fraction: of the time between two), resumed,
    perhaps killed again (after a share of the time to the first line), resumed again and left
    alone. Returns what came of it beside the run in `whole`; None where a kill came too late."""
    run, kills = folder / "runs" / "run", []
    for resumed in (False,) if again is None else (False, True):
        process = start(folder, script, processes, *(["--resume"] if resumed else []), *flags)
        if resumed:
            time.sleep(again * seconds[0])
        else:
            wait_for_lines(process, folder, int(moment))
            time.sleep((moment - int(moment)) * seconds[1])
        if process.poll() is not None or kill(process) != -signal.SIGKILL:
            return None
        steps = [line["step"] for line in read_lines_of_a_killed_run(run / "metrics.jsonl")]
        found = {path.name for path in run.glob("checkpoints/*")}
        complete = {mark.parent.name for mark in run.glob("checkpoints/*/complete")}
        newest = max((int(name[5:]) for name in complete if name.startswith("step-")), default=None)
        during_save = any(name.startswith("partial-") for name in found)
        kills.append({"last_line": max(steps, default=None), "newest": newest})
        kills[-1]["during_save"] = during_save
    process = start(folder, script, processes, "--resume", *flags)
    code, log = process.wait(), (folder / "log").read_text()
    if code != 0:
        raise SystemExit(log)
    theirs = {path.relative_to(whole / "runs" / "run"): path for path in weight_files(whole)}
    ours = {path.relative_to(run): path for path in weight_files(folder)}
    a, b = (read_lines(f / "runs" / "run" / "metrics.jsonl") for f in (whole, folder))
    return {
        "moment": moment,
        "again": again,
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
                moment, again = rng.uniform(1, 13), rng.random() if number % 3 == 2 else None
                tries += 1
                print(f"{script}, {processes}: kill at {moment:.2f}, again {again}", flush=True)
                folder, whole = case / f"killed-{tries}", case / "whole"
                result = killed(folder, script, processes, whole, seconds, moment, again, *flags)
            line = {"script": script, "processes": processes, "seed": options.seed, **result}
            line["seconds"] = round(time.monotonic() - begin)
            line["date"] = datetime.date.today().isoformat()
            with open(options.out, "a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    print(table(read_lines(options.out)))


if __name__ == "__main__":
    main()
