"""What compare.py and critic_runs.py share: running an arm, a script with flags, and its lines."""

import json
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_to_the_end(command, name, runs_dir):
    """Run a script as runs_dir/name, unless it has ended there before; its folder. What an
    interrupted run left is deleted: beside it the new one would be called name-2."""
    folder = runs_dir / name
    if not (folder / "model").exists():
        shutil.rmtree(folder, ignore_errors=True)
        names = ["--run-name", name, "--runs-dir", str(runs_dir)]
        subprocess.run([*command, *names], check=True, cwd=ROOT)
    return folder


def kept(line, keys):
    """What is kept of a line of metrics.jsonl."""
    return {key: round(line[key], 5) for key in keys if key in line}
