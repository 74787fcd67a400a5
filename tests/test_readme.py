"""Every command of README.md, run as written and in its order in a fresh copy of the repository.

Those for a node of GPUs run with --dry-run behind them. `pytest` itself is not run again: CI calls
it. What the first commands leave must stand above the bars of benchmarks/tiny_runs.py, and of the
pipeline a critic that judges and a policy that learned from it alone."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import tiny_runs

pytestmark = pytest.mark.slow
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMANDS = [
    re.sub(r"\s+# .*$", "", line).strip()  # without the comment
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
]
OWN_TESTS = "pip install -r requirements.txt && pytest"
CRITIC_AND_POLICY = "python ppo_critic.py && python rfpo.py"
SECONDS = {}  # of the commands that have run
# What "PATH" stands for is the reader's; here one small step on real problems.
ONE_STEP = (
    " --num-steps 1 --eval-problems 2 --prompts-per-step 2 --gen-prompts 2 --group-size 4"
    " --minibatch-size 4 --no-dynamic-sampling"
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository without what its use has left there."""
    folder = tmp_path_factory.mktemp("clone") / "cleanreason"
    left = shutil.ignore_patterns(".git", ".cache", "runs", "*venv*", "__pycache__", ".*_cache")
    return shutil.copytree(ROOT, folder, ignore=left)


def test_the_commands_are_found():
    assert COMMANDS[0] == "pip install -r requirements.txt && python fipo.py"
    assert {OWN_TESTS, CRITIC_AND_POLICY} < {*COMMANDS} and len(COMMANDS) >= 12
    assert all(re.match(r"(pip|python|torchrun|diff) ", command) for command in COMMANDS)
    assert "\npytest\n" in (ROOT / ".ci" / "run").read_text()  # what is not run below


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != OWN_TESTS])
def test_command_runs_as_written(command, clone, request):
    code = 0
    if command.startswith("torchrun"):
        command += " --dry-run"
    if command.startswith("diff"):
        code = 1  # of diff, where files differ
    if "PATH/" in command:
        shared, model = request.getfixturevalue("shared"), clone / "model"
        shutil.copytree(next((clone / ".cache").glob("base-*/config.json")).parent, model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
        command = command.replace("PATH/gsm8k", f"{shared}/data/gsm8k")
        command = command.replace("PATH/model", "model") + ONE_STEP
    begin = time.perf_counter()
    bin_folder = str(Path(sys.executable).parent)  # pip, python and torchrun of this environment
    done = subprocess.run(
        command,
        shell=True,
        executable="/bin/bash",
        cwd=clone,
        env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert done.returncode == code, done.stdout[-5000:]
    assert "Traceback" not in done.stdout
    SECONDS[command] = time.perf_counter() - begin


def test_what_the_commands_left(clone):
    for script in ("dapo", "fipo"):
        line = tiny_runs.collect(clone / "runs" / f"{script}-tiny-seed1")
        assert not tiny_runs.missed_bars(line), line
    for script in ("dapo", "fipo", "ppo_critic", "rfpo"):
        folder = clone / "runs" / f"{script}-tiny-seed1"
        for name in ("curves.png", "tokens.html", "samples.jsonl", "model/model.safetensors"):
            assert (folder / name).stat().st_size > 1000, f"{folder}/{name}"
    assert (clone / "both.png").stat().st_size > 10_000


def test_a_critic_was_made_and_a_policy_learned_from_it_alone(clone):
    ppo, rfpo = (
        tiny_runs.read_lines(clone / "runs" / f"{script}-tiny-seed1" / "metrics.jsonl")
        for script in ("ppo_critic", "rfpo")
    )
    accuracy = [line["eval/avg_at_k"] for line in ppo if "eval/avg_at_k" in line]
    assert accuracy[0] < 0.5 and accuracy[-1] > 0.85
    # The critic: no better than the mean at first, a judge at its checkpoint (step 50).
    explained = {line["step"]: line.get("value/explained_variance") for line in ppo}
    assert explained[1] <= 0
    assert statistics.mean(explained[step] for step in range(46, 51)) >= 0.4
    # RFPO without a label: from 50 to 75 %, at least two thirds of what labels gain from there.
    first, *_, before_last, last = [x["eval/avg_at_k"] for x in rfpo if "eval/avg_at_k" in x]
    assert 0.5 <= first <= 0.75
    assert (before_last + last) / 2 >= first + 0.08
    assert SECONDS[CRITIC_AND_POLICY] < 600
