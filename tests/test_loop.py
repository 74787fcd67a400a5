"""The training loops as a user runs them: small sizes, the real path."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL

import common
import dapo
import fipo
from engines import Response


def start(script: str, *flags: str, cwd: Path, processes: int = 1) -> subprocess.Popen:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
        launcher += ["--master_port", str(29500 + os.getpid() % 2000)]
    command = [*launcher, str(ROOT / script), "tiny", *SMALL, *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(script: str, *flags: str, cwd: Path, processes: int = 1) -> str:
    process = start(script, *flags, cwd=cwd, processes=processes)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, base_policy) -> Path:
    """A folder in which dapo.py and fipo.py have run for two steps."""
    folder = tmp_path_factory.mktemp("runs")
    for script in ("dapo.py", "fipo.py"):
        run(script, cwd=folder)
    return folder / "runs"


def test_a_run_leaves_its_files(runs):
    for name in ("dapo-tiny-seed1", "fipo-tiny-seed1"):
        folder = runs / name
        for file in ("args.json", "metrics.jsonl", "samples.jsonl", "curves.png"):
            assert (folder / file).stat().st_size > 0
        assert (folder / f"{name[:4]}.py").read_text() == (ROOT / f"{name[:4]}.py").read_text()
        args = json.loads((folder / "args.json").read_text())
        assert args["seed"] == 1
        assert args["versions"]["torch"] == torch.__version__
        samples = [json.loads(x) for x in (folder / "samples.jsonl").read_text().splitlines()]
        assert {s["step"] for s in samples} == {1, 2}
        assert all(s["correct"] in (0.0, 1.0) for s in samples)


def test_metrics_of_a_run_are_finite_and_consistent(runs):
    for name in ("dapo-tiny-seed1", "fipo-tiny-seed1"):
        lines = metrics(runs / name)
        assert [line["step"] for line in lines] == [0, 1, 2]
        for line in lines:
            assert all(np.isfinite(v) for v in line.values()), line
        for line in lines[1:]:
            assert line["train/updates_per_batch"] == 2
            assert 0 < line["reward/accuracy"] < 1
            assert line["optim/grad_norm"] > 0
            assert line["rollout/logprob_gap_max"] < 1e-4
            names = ("rollout", "reward", "old_logprobs", "policy_update", "sync")
            assert sum(line[f"time/{name}_s"] for name in names) <= line["time/step_s"]
        assert "eval/avg_at_k" in lines[0] and "eval/avg_at_k" in lines[2]


def test_fipo_is_dapo_on_the_first_update_and_differs_after(runs):
    # The same seed samples the same first batch. After its first update f leaves 1.
    one, other = metrics(runs / "dapo-tiny-seed1")[1], metrics(runs / "fipo-tiny-seed1")[1]
    assert one["reward/mean"] == other["reward/mean"]
    assert one["policy/entropy"] == pytest.approx(other["policy/entropy"], abs=1e-4)
    assert other["fipo/influence_min"] < 1 < other["fipo/influence_max"]


def test_one_update_of_fipo_has_weight_one_exactly(tmp_path, base_policy):
    # Four groups of four in minibatches of eight, but a short batch of two groups: one update.
    flags = ["--num-steps", "1", "--max-gen-batches", "1", "--gen-prompts", "2"]
    run("fipo.py", *flags, "--no-dynamic-sampling", "--prompts-per-step", "4", cwd=tmp_path)
    line = metrics(tmp_path / "runs" / "fipo-tiny-seed1")[1]
    assert line["train/updates_per_batch"] == 1
    assert line["fipo/influence_min"] == line["fipo/influence_max"] == 1.0
    assert line["fipo/unclipped_min"] == line["fipo/unclipped_max"] == 1.0
    assert line["policy/kl"] == 0.0 and line["policy/clip_high_frac"] == 0.0


def test_the_model_folder_loads_in_transformers(runs):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = runs / "fipo-tiny-seed1" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"


def test_resume_equals_an_uninterrupted_run(tmp_path, base_policy):
    flags = ["--num-steps", "4", "--decay-steps", "0", "--eval-every", "4"]
    run("fipo.py", *flags, "--run-name", "whole", cwd=tmp_path)
    process = start("fipo.py", *flags, "--run-name", "broken", cwd=tmp_path)
    folder = tmp_path / "runs" / "broken"
    deadline = time.time() + 120
    while not list(folder.glob("checkpoints/step-000002/complete")) and time.time() < deadline:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    (folder / "checkpoints" / "partial-000003").mkdir(exist_ok=True)  # as a kill may leave it
    output = run("fipo.py", *flags, "--run-name", "broken", "--resume", cwd=tmp_path)
    assert "resuming from" in output
    whole, resumed = weights(tmp_path / "runs" / "whole"), weights(folder)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    a, b = metrics(tmp_path / "runs" / "whole"), metrics(folder)
    assert [line["step"] for line in b] == [0, 1, 2, 3, 4]
    for key in ("reward/mean", "policy/loss", "tokens", "optim/learning_rate"):
        assert [x.get(key) for x in a] == [x.get(key) for x in b]


def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path, base_policy):
    process = start("dapo.py", "--num-steps", "500", "--save-every", "500", cwd=tmp_path)
    folder = tmp_path / "runs" / "dapo-tiny-seed1"
    deadline = time.time() + 120
    while time.time() < deadline:
        if (folder / "metrics.jsonl").exists() and len(metrics(folder)) >= 2:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output  # so that `a.py && b.py` does not go on with b
    assert "dapo.py: error: stopped by a signal" in output and "Traceback" not in output
    assert (folder / "model" / "config.json").exists() and (folder / "curves.png").exists()
    saved = list(folder.glob("checkpoints/step-*/complete"))
    assert len(saved) == 1
    last = metrics(folder)[-1]["step"]
    assert saved[0].parent.name == f"step-{last:06d}"


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(tmp_path, base_policy):
    run("dapo.py", "--keep-last", "2", cwd=tmp_path)
    folder = tmp_path / "runs" / "dapo-tiny-seed1" / "checkpoints"
    data = next((folder / "step-000002" / "weights").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:1000])
    output = run("dapo.py", "--resume", "--num-steps", "3", cwd=tmp_path)
    assert "step-000002 does not load" in output and "resuming from" in output
    assert "other settings" not in output  # --num-steps may change
    assert [line["step"] for line in metrics(folder.parent)] == [0, 1, 2, 3]
    for state in folder.glob("*/state.json"):
        state.write_text("{")
    flags = ["--resume", "--num-steps", "4", "--learning-rate", "0.5"]
    process = start("dapo.py", *flags, cwd=tmp_path)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "error: no checkpoint of" in output
    assert "goes on with other settings than before: --learning-rate 0.0001 -> 0.5\n" in output


def test_an_interrupted_sft_exports_nothing(tmp_path):
    command = [sys.executable, str(ROOT / "sft.py"), "tiny", "--export", str(tmp_path / "model")]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    log = tmp_path / "runs" / "sft-tiny-seed1" / "metrics.jsonl"
    deadline = time.time() + 120
    while not log.exists() and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 1
    assert not (tmp_path / "model").exists()


@pytest.mark.slow  # test_ranks.py compares gradients of one batch, here are whole runs
def test_two_processes_shard_and_agree_with_one(tmp_path, base_policy):
    for name, processes in (("one", 1), ("two", 2)):
        run("fipo.py", "--run-name", name, cwd=tmp_path, processes=processes)
    one, two = metrics(tmp_path / "runs" / "one"), metrics(tmp_path / "runs" / "two")
    for a, b in zip(one[1:], two[1:], strict=True):
        assert a["reward/accuracy"] == b["reward/accuracy"]  # the same responses, by their seeds
        for key in ("policy/loss", "optim/grad_norm", "policy/entropy", "fipo/influence_mean"):
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6)
        assert b["rollout/logprob_gap_max"] < 1e-4


def test_a_reward_of_ones_own_and_no_mixed_group(tmp_path, base_policy):
    (tmp_path / "mine.py").write_text(
        "def none(prompts, responses, golds):\n    return [0.0] * len(prompts)\n"
    )
    output = run("dapo.py", "--reward", "mine.py:none", "--max-gen-batches", "2", cwd=tmp_path)
    assert "0 of 4 groups after 2 sampling rounds; 0% of the sampled responses are right" in output
    lines = metrics(tmp_path / "runs" / "dapo-tiny-seed1")
    assert [line.get("train/skipped_steps") for line in lines[1:]] == [1, 1]


def test_the_kl_penalty_pulls_and_is_logged(tmp_path, base_policy):
    run("dapo.py", "--kl-coef", "0.1", cwd=tmp_path)
    lines = metrics(tmp_path / "runs" / "dapo-tiny-seed1")
    assert 0 <= lines[1]["policy/ref_kl"] < lines[2]["policy/ref_kl"]


# --- The gradient of a minibatch does not depend on how it is cut (must hold to 1e-5).


@pytest.mark.parametrize("script", [dapo, fipo])
def test_gradient_is_the_same_for_every_microbatch_size_and_row_order(script, base_policy):
    args = script.Args(model=base_policy)
    accelerator = common.make_accelerator(args)
    policy, _ = common.load_policy(args, accelerator)
    rng = np.random.default_rng(0)
    groups = []
    for number in range(6):
        lengths = rng.integers(1, 24, size=4)
        responses = [
            Response(rng.integers(2, 130, size=n).astype(np.int32), np.zeros(n, np.float32), True)
            for n in lengths
        ]
        problem = common.Problem(number, "", rng.integers(2, 130, size=3 + number).tolist(), "")
        groups.append(common.Group(number, problem, responses, [1.0, 0.0, 1.0, 0.0]))
    rewards = torch.tensor([c for g in groups for c in g.correct])
    settings = [0.2, 0.28, 10.0]
    if script is fipo:
        settings += [32.0, 0.8, 1.2, None]

    def gradient(groups, rewards, tokens):
        batch = common.make_batch(groups, 24, 0, accelerator)
        advantages = script.group_advantages(rewards, 4)[batch.rows]
        with torch.no_grad():
            everything = torch.arange(24)
            old = policy(*batch.inputs(everything), 1.0)[0] + 0.3 * torch.sin(
                batch.ids[:, :1] + torch.arange(batch.mask.shape[1])
            )
        policy.zero_grad()
        pieces = common.microbatches(
            batch, batch.minibatches[0], replace(args, tokens_per_microbatch=tokens), accelerator
        )
        for rows, weight in pieces:
            logprobs, _ = policy(*batch.inputs(rows), 1.0)
            mask = batch.mask[rows] & (weight > 0)
            loss, _ = script.policy_loss(
                logprobs, old[rows], advantages[rows], mask, batch.mask.sum(), *settings
            )
            loss.backward()
        grads = [p.grad.flatten().double() for p in policy.parameters() if p.grad is not None]
        return torch.cat(grads), len(pieces)

    whole, count = gradient(groups, rewards, 10_000)
    assert count == 1
    for tokens in (1, 64, 200):  # 1: one row a micro-batch
        parts, count = gradient(groups, rewards, tokens)
        assert count > 1
        assert (parts - whole).norm() <= 1e-5 * whole.norm()
    order = [3, 0, 5, 1, 4, 2]
    shuffled = [groups[i] for i in order]
    parts, _ = gradient(shuffled, rewards.view(6, 4)[order].flatten(), 64)
    assert (parts - whole).norm() <= 1e-5 * whole.norm()
