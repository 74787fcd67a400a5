"""What may go wrong on a node, on the real path in child processes: kills, ranks that fail, full
disks, trackers that raise, gradients that are not finite. Each must end as docs/scale.md says, in
bounded time. The rest of it (a damaged checkpoint, Ctrl-C) stands in test_loop.py."""

import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, SMALL
from safetensors.torch import load_file

sys.path.insert(0, str(ROOT / "benchmarks"))
import kill_and_resume

PATIENCE_S = 300  # of a run on busy cores; what must be quick is held against tighter limits
# Runs a script with NaN in the log-probabilities of some updates (counted from 1) of one rank.
POISON = f"""
import os, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
import models, torch
rank, updates = sys.argv[1], sys.argv[2].split(",")
forward, count = models.Policy.forward, 0

def poisoned(self, *inputs):
    global count
    logprobs, entropy = forward(self, *inputs)
    count += torch.is_grad_enabled()
    bad = torch.is_grad_enabled() and str(count) in updates and os.environ.get("RANK", "0") == rank
    return logprobs * (float("nan") if bad else 1.0), entropy

models.Policy.forward = poisoned
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(command: list[str], cwd: Path, processes: int = 1, **options) -> subprocess.Popen:
    """A script with its preset tiny and small sizes; command is its path, then flags, perhaps after
    a driver that runs it."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(processes)]
    scripts = [f"{name}.py" for name in SCRIPTS]
    at = next(i for i, word in enumerate(command) if word in scripts) + 1
    script = [str(ROOT / word) if word in scripts else word for word in command[:at]]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    sizes = kill_and_resume.FLAGS["sft.py"].split() if "sft.py" in command else SMALL
    words = [*launcher, *script, "tiny", *sizes, *command[at:]]
    return subprocess.Popen(words, cwd=cwd, env=env, **pipes, **options)


def finish(process: subprocess.Popen, code: int = 0) -> str:
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, output
    return output


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wait_until(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)


def equal_weights(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- Kills. benchmarks/kill_and_resume.py has ten of them.


@pytest.mark.slow
@pytest.mark.parametrize(("script", "processes"), [("dapo.py", 1), ("fipo.py", 2)])
def test_a_killed_run_ends_as_one_left_alone(script, processes, tmp_path, base_policy):
    whole = tmp_path / "whole"
    seconds = kill_and_resume.left_alone(whole, script, processes)
    result = None
    for attempt in range(5):  # a kill comes too late where the cores are less busy than before
        folder = tmp_path / f"killed-{attempt}"
        result = kill_and_resume.killed(folder, script, processes, whole, seconds, 7.3, None)
        if result:
            break
    assert result, "the run ended before every kill"
    assert result["kills"][0]["newest"] is None or result["resumed_from"]
    assert result["same_weights"] and result["same_metrics"] and result["steps_once"], result


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_a_killed_run_with_vllm_goes_on_and_learns(tmp_path, base_policy):
    sizes = "--num-steps 30 --save-every 2 --eval-every 30 --eval-problems 128 --gen-prompts 32"
    sizes += " --prompts-per-step 16 --group-size 8 --minibatch-size 32 --rollout-engine vllm"
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    process = start(["dapo.py", *sizes.split()], tmp_path, env=env)
    run = tmp_path / "runs" / "dapo-tiny-seed1"
    wait_until((run / "checkpoints" / "step-000006" / "complete").exists, process)
    kill_and_resume.kill(process)
    before = kill_and_resume.read_lines_of_a_killed_run(run / "metrics.jsonl")
    output = finish(start(["dapo.py", *sizes.split(), "--resume"], tmp_path, env=env))
    assert "engine vllm" in output and "resuming from" in output
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(31))
    assert [line["tokens"] for line in lines[:6]] == [line["tokens"] for line in before[:6]]
    assert max(line.get("rollout/logprob_gap_max", 0) for line in lines) < 1e-3  # weights are there
    assert lines[-1]["eval/avg_at_k"] > lines[0]["eval/avg_at_k"] + 0.1


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_within_a_step_and_a_folder_in_use_is_refused(
    tmp_path, base_policy
):
    flags = ["fipo.py", "--num-steps", "500", "--save-every", "500"]
    process = start(flags, tmp_path, processes=2)
    folder = tmp_path / "runs" / "fipo-tiny-seed1"
    log = folder / "metrics.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count("\n") >= 2, process)
    second = finish(start([*flags, "--resume"], tmp_path), code=2)
    assert "fipo-tiny-seed1 is in use by another process" in second
    assert process.poll() is None
    logged = len(metrics(folder))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert (
        "stopping after this step" in output
        and "Traceback" not in output.split("torch/distributed/elastic")[0]
    )
    lines = metrics(folder)
    assert len(lines) <= logged + 2  # the step under way, and one that the reading above missed
    saved = [mark.parent.name for mark in folder.glob("checkpoints/*/complete")]
    assert saved == [f"step-{lines[-1]['step']:06d}"]
    assert (folder / "model" / "model.safetensors").exists()  # both ranks came to the end


# --- Other numbers of ranks


@pytest.mark.slow
def test_resume_on_more_and_on_fewer_ranks(tmp_path, base_policy):
    flags = ["fipo.py", "--num-steps", "4", "--save-every", "2", "--eval-every", "4"]
    for name, processes in (("one", 1), ("two", 2)):
        finish(start([*flags, "--run-name", name], tmp_path, processes))
    runs = tmp_path / "runs"
    want = metrics(runs / "one")
    for name, new, processes in (("one", "one-two", 2), ("two", "two-one", 1)):
        shutil.copytree(runs / name, runs / new)
        shutil.rmtree(runs / new / "checkpoints" / "step-000004")
        output = finish(start([*flags, "--run-name", new, "--resume"], tmp_path, processes))
        assert "step-000002" in output
        for a, b in zip(want[3:], metrics(runs / new)[3:], strict=True):
            assert a["reward/accuracy"] == b["reward/accuracy"]  # the same responses
            for key in ("policy/loss", "optim/grad_norm", "policy/kl", "fipo/influence_mean"):
                assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5)
    # One rank's file is damaged: both ranks must go back, and end where they had ended.
    shutil.copytree(runs / "two", runs / "damaged")
    (runs / "damaged" / "checkpoints" / "step-000004" / "rng-1.pt").write_bytes(b"")
    output = finish(start([*flags, "--run-name", "damaged", "--resume"], tmp_path, processes=2))
    assert "step-000004 does not load (EOFError)" in output and "step-000002" in output
    assert equal_weights(runs / "two" / "model", runs / "damaged" / "model")


# --- Ranks that fail, or have nothing to do


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise ValueError('the reward of rank 1 broke')", "ValueError: the reward of rank 1"),
        ("return None", "dapo.py (rank 1): error: --reward must return a list of numbers"),
        ("os.kill(os.getpid(), 9)", "Signal 9 (SIGKILL) received"),
    ],
)
def test_a_rank_that_fails_takes_the_others_down(fault, words, tmp_path, base_policy):
    (tmp_path / "mine.py").write_text(
        "import os, pathlib\ncalls = []\ndef f(prompts, responses, golds):\n    calls.append(1)\n"
        "    if os.environ['RANK'] == '1' and len(calls) == 3:\n"
        f"        pathlib.Path('failed').touch()\n        {fault}\n"
        "    return [float(len(r) % 2) for r in responses]\n"
    )
    process = start(["dapo.py", "--reward", "mine.py:f"], tmp_path, processes=2)
    wait_until((tmp_path / "failed").exists, process)
    since = time.monotonic()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - since < 60
    assert process.returncode == 1
    assert words in output
    others = [output.find(text) for text in ("Connection closed by peer", "Connection reset")]
    assert "SIGKILL" in words or all(output.find(words) < at for at in others if at >= 0), output
    assert not list(tmp_path.glob("runs/*/checkpoints/partial-*"))


@pytest.mark.slow
def test_a_rank_without_a_response_steps_with_the_others(tmp_path, base_policy):
    # Minibatches of one response: in two processes one rank has none, in every update.
    flags = ["dapo.py", "--prompts-per-step", "1", "--group-size", "2", "--minibatch-size", "1"]
    for name, processes in (("one", 1), ("two", 2)):
        finish(start([*flags, "--run-name", name], tmp_path, processes))
    one, two = (metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    for a, b in zip(one[1:], two[1:], strict=True):
        assert b["train/updates_per_batch"] == 2 and b["optim/grad_norm"] > 0
        for key in ("policy/loss", "optim/grad_norm", "policy/entropy", "reward/mean"):
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6)


# --- Gradients that are not finite


@pytest.mark.slow
def test_a_nan_on_one_rank_skips_the_update_on_all(tmp_path, base_policy):
    (tmp_path / "poison.py").write_text(POISON)
    flags = ["poison.py", "1", "1,2", "fipo.py", "--num-steps", "1"]  # both updates of the step
    finish(start(flags, tmp_path, processes=2))
    folder = tmp_path / "runs" / "fipo-tiny-seed1"
    line = metrics(folder)[1]
    assert line["optim/bad_steps"] == 2 and line["optim/grad_norm"] != line["optim/grad_norm"]
    assert equal_weights(folder / "model", Path(base_policy))


def test_too_many_updates_that_are_not_finite_end_the_run_with_the_cause(tmp_path, base_policy):
    (tmp_path / "poison.py").write_text(POISON)
    flags = ["poison.py", "0", "2,3", "fipo.py", "--max-bad-steps", "2"]
    output = finish(start(flags, tmp_path), code=1)
    line = "fipo.py: error: 2 updates in a row were not finite (--max-bad-steps), the last with a"
    assert line in output and "Traceback" not in output
    lines = metrics(tmp_path / "runs" / "fipo-tiny-seed1")
    assert [line.get("optim/bad_steps") for line in lines] == [None, 1]  # the second step ended it


@pytest.mark.slow
def test_bad_updates_are_counted_across_a_resume(tmp_path):
    (tmp_path / "poison.py").write_text(POISON)
    finish(start(["poison.py", "0", "12", "sft.py"], tmp_path))  # the last of 12
    more = ["poison.py", "0", "1", "sft.py", "--num-steps", "13", "--max-bad-steps", "2"]
    output = finish(start([*more, "--resume"], tmp_path), code=1)
    assert "sft.py: error: 2 updates in a row were not finite" in output


# --- The file system


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # bytes; a model has more


EXPORT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import common, dapo, runtime
args = dapo.Args(model=sys.argv[1])
accelerator = runtime.make_accelerator(args)
policy, _ = common.load_policy(args, accelerator)
tokenizer = common.load_tokenizer(args.model)
try:
    common.export(policy, tokenizer, "model", accelerator)
except common.RunError as error:
    print(error)
"""


def test_a_full_disk_leaves_no_part_of_a_model(tmp_path, base_policy):
    command = [sys.executable, "-c", EXPORT, base_policy]
    pipes = {"capture_output": True, "text": True, "check": True}
    done = subprocess.run(command, cwd=tmp_path, preexec_fn=limit_file_size, **pipes)
    assert done.stdout.startswith("model was not written (") and "--resume" in done.stdout
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, base_policy):
    processes = 2
    flags = ["dapo.py", "--decay-steps", "0", "--eval-every", "4", "--run-name"]
    finish(start([*flags, "whole", "--num-steps", "3"], tmp_path, processes))
    finish(start([*flags, "full", "--num-steps", "2"], tmp_path, processes))
    folder = tmp_path / "runs" / "full"
    more = [*flags, "full", "--resume", "--num-steps", "3"]
    since = time.monotonic()
    output = finish(start(more, tmp_path, processes, preexec_fn=limit_file_size), code=1)
    assert time.monotonic() - since < PATIENCE_S
    assert "step-000003 was not written" in output and "then starts from step-000002" in output
    assert "Traceback" not in output.split("torch/distributed/elastic")[0]
    assert [path.parent.name for path in sorted(folder.glob("checkpoints/*/complete"))] == [
        "step-000001",
        "step-000002",
    ]
    assert (folder / "checkpoints" / "partial-000003" / "weights").exists()  # and is not loaded
    output = finish(start(more, tmp_path, processes))
    assert "checkpoints/step-000002" in output
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2, 3]
    assert equal_weights(folder / "model", tmp_path / "runs" / "whole" / "model")
    assert not list(folder.glob("checkpoints/partial-*"))


# --- Trackers


WRITER = """
class SummaryWriter:
    def __init__(self, folder): pass
    def add_hparams(self, values, metric_dict): pass
    def add_scalar(self, name, value, global_step):
        if FAULTS: raise OSError("the tracker does not answer")
    def flush(self): pass
    def close(self): print("the tracker was closed", flush=True)
"""


@pytest.mark.parametrize(
    ("faults", "processes"),
    [
        ("log", 1),
        pytest.param("log", 2, marks=pytest.mark.slow),
        pytest.param("", 2, marks=pytest.mark.slow),  # one that works
    ],
)
def test_a_tracker_that_raises_never_stops_training(faults, processes, tmp_path, base_policy):
    # In the place of tensorboard, which may or may not be installed.
    for name, text in (
        ("tensorboard", "raise ModuleNotFoundError"),
        ("tensorboardX", f"FAULTS = {faults!r}\n{WRITER}"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    env = {"PYTHONPATH": str(tmp_path)}
    process = start(["dapo.py", "--track", "tensorboard"], tmp_path, processes, env=env)
    output = finish(process)
    off = "warning: the tracker is off: OSError: the tracker does not answer"
    assert output.count(off) == (1 if faults else 0)
    assert output.count("the tracker was closed") == (0 if faults else 1)
    folder = tmp_path / "runs" / "dapo-tiny-seed1"
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2]
    assert (folder / "model" / "model.safetensors").exists()
