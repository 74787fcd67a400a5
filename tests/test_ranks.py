"""Two processes as on a node of GPUs: real FSDP2, an engine in each, or one for both.

Each test runs rank_probe.py under torchrun, which runs a script on its real path and watches."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import RL_SCRIPTS, ROOT, SCRIPTS

import common
import dapo
import runtime

PROBE = ROOT / "tests" / "rank_probe.py"
NO_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
)
SLOW = pytest.mark.slow


def probe(*words: str, cwd: Path, processes: int = 2) -> str:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
        launcher += ["--master_port", str(33500 + os.getpid() % 2000)]
    done = subprocess.run(
        [*launcher, str(PROBE), *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def watched(folder: Path, ranks: int) -> list[dict]:
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="module")
def pair(base_policy, tmp_path_factory) -> Path:
    """A folder with pi_0 and critic, left by two steps of ppo_critic.py."""
    folder = tmp_path_factory.mktemp("pair")
    flags = ["--save-actor-at-step", "1", "--save-critic-at-step", "2", "--run-name", "pair"]
    command = [sys.executable, str(ROOT / "ppo_critic.py"), "tiny", *SIZES["ppo_critic.py"]]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *flags, "--rollout-engine", "hf"], cwd=folder, env=env, check=True)
    return folder / "runs" / "pair"


# Uneven shares: 15 responses in minibatches of 5 (3 on one rank, 2 on the other), several
# micro-batches of them, and not as many on each rank. critic: 3 updates of 5.
RL = [
    *("--num-steps", "2", "--eval-every", "2", "--save-every", "2", "--eval-problems", "4"),
    *("--prompts-per-step", "5", "--group-size", "3", "--minibatch-size", "5"),
    *("--tokens-per-microbatch", "64", "--warmup-steps", "0"),
]
ROUNDS = ["--gen-prompts", "12", "--decay-steps", "0"]
SIZES = {f"{name}.py": [*RL, *ROUNDS] for name in SCRIPTS}  # and what differs from that:
SIZES |= {
    "fipo.py": [*RL, *ROUNDS, "--future-kl-half-life", "4"],
    "ppo_critic.py": [*RL, "--critic-updates-per-batch", "3", "--critic-warmup-steps", "0"],
    "rfpo.py": [*RL, "--calibration-rollouts", "60", "--num-bins", "4", "--allow-weak-critic"],
    "sft.py": [
        *("--num-steps", "2", "--batch-size", "15", "--tokens-per-microbatch", "64"),
        *("--eval-dataset", "", "--model", "tiny"),
    ],
}


def models_of(script: str, request) -> list[str]:
    if script != "rfpo.py":
        return []
    folder = request.getfixturevalue("pair")
    return ["--policy", str(folder / "pi_0"), "--critic", str(folder / "critic")]


@pytest.mark.parametrize(
    "script",
    ["fipo.py", *(pytest.param(name, marks=SLOW) for name in SIZES if name != "fipo.py")],
)
def test_loss_and_gradient_of_a_saved_batch_on_two_ranks_are_those_of_one(
    script, request, tmp_path, base_policy
):
    flags = ["tiny", *SIZES[script], *models_of(script, request)]
    flags += ["--rollout-engine", "hf", "--run-name"]
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    replay = str(tmp_path / "one" / "rank-0.pt")
    probe("script", script, str(tmp_path / "one"), "", *flags, "a", cwd=tmp_path, processes=1)
    probe("script", script, str(tmp_path / "two"), replay, *flags, "b", cwd=tmp_path)
    (one,), two = watched(tmp_path / "one", 1), watched(tmp_path / "two", 2)
    counts = {"ppo_critic.py": 12, "sft.py": 2}  # 3 of the policy and 3 of the critic, a step
    assert len(one["updates"]) == len(two[0]["updates"]) == counts.get(script, 6)
    updates = zip(one["updates"], *(rank["updates"] for rank in two), strict=True)
    for number, (alone, first, second) in enumerate(updates):
        assert torch.equal(first["gradient"], second["gradient"])
        error = (first["gradient"] - alone["gradient"]).norm() / alone["gradient"].norm()
        assert error <= 1e-5, number
        assert first["loss"] + second["loss"] == pytest.approx(alone["loss"], rel=1e-5, abs=1e-7)


KINDS = {
    "hf": (["--rollout-engine", "hf"], SLOW),
    "vllm": (["--rollout-engine", "vllm", "--engine-memory", "0.25"], NO_VLLM),
    "vllm-tp2": (
        ["--rollout-engine", "vllm", "--engine-memory", "0.25", "--tensor-parallel", "2"],
        NO_VLLM,
    ),
}


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        pytest.param(script, kind, marks=(SLOW, KINDS[kind][1]))
        for script in (f"{name}.py" for name in RL_SCRIPTS)
        for kind in KINDS
    ],
)
def test_a_whole_run_on_two_ranks(script, kind, request, tmp_path, base_policy):
    from transformers import AutoModelForCausalLM

    flags = ["tiny", *SIZES[script], *models_of(script, request), *KINDS[kind][0]]
    probe("script", script, str(tmp_path), "", *flags, "--run-name", "two", cwd=tmp_path)
    first, second = watched(tmp_path, 2)
    assert first["metrics"] == second["metrics"]  # bit for bit
    assert [line["step"] for line in first["metrics"]] == [0, 1, 2]
    for line in first["metrics"][1:]:
        assert 0 <= line["rollout/logprob_gap_max"] < 1e-4
        assert line["optim/grad_norm"] > 0
    mine, other = (
        {
            key: [response.token_ids.tolist() for response in group.responses]
            for key, group in rank["groups"].items()
        }
        for rank in (first, second)
    )
    if kind == "vllm-tp2":
        assert mine == other
    else:
        assert mine and other and not mine.keys() & other.keys()
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "two" / "model")


@pytest.fixture(scope="module")
def models(base_policy, tmp_path_factory) -> dict[str, str]:
    """A tied model folder, and an untied one whose head is not its embedding."""
    folder = str(tmp_path_factory.mktemp("untied"))
    from test_engines import untie

    untie(base_policy, folder)
    return {"tied": base_policy, "untied": folder}


@pytest.mark.parametrize(
    ("kind", "tensor_parallel", "tie"),
    [
        ("hf", "1", "tied"),
        pytest.param("hf", "1", "untied", marks=SLOW),
        *(
            pytest.param("vllm", ranks, tie, marks=(SLOW, NO_VLLM))
            for ranks in ("1", "2")
            for tie in ("tied", "untied")
        ),
    ],
)
def test_an_engine_follows_every_sync_of_a_sharded_policy(
    kind, tensor_parallel, tie, models, tmp_path
):
    output = probe("engine", models[tie], kind, tensor_parallel, cwd=tmp_path)
    assert output.count(f"checked {kind} {tensor_parallel}") == 2


def test_on_a_gpu_gradients_are_reduced_in_fp32(monkeypatch):
    # mixed_precision="bf16" alone would reduce them in bf16.
    made = {}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime, "Accelerator", lambda **kw: made.update(kw) or SimpleNamespace())
    common.make_accelerator(dapo.Args())
    policy = made["fsdp_plugin"].mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert policy.output_dtype is None and made["mixed_precision"] == "bf16"
