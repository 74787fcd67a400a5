"""Evaluation: pass@k, votes and intervals by hand; --eval-only of every script, on two ranks."""

import importlib
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS

import common
import dapo
import data
import eval_only
from common import Group, Letter, Problem, Response
from metrics import bootstrap_means

SMALL = {"eval_problems": 5, "eval_samples": 4}


class Texts:
    """A stand-in tokenizer: token i is the i-th text."""

    def __init__(self, *texts):
        self.texts = texts

    def batch_decode(self, rows, skip_special_tokens):
        return [self.texts[row[0]] for row in rows]


def group(gold, answers, correct, length=1, finished=True):
    responses = [
        Response(np.array([i] * length), np.zeros(length, np.float32), finished) for i in answers
    ]
    return Group(0, Problem(0, "", [1], gold), responses, correct)


# --------------------------------------------------------------------------------------------------
# Numbers
# --------------------------------------------------------------------------------------------------


def test_scores_by_hand():
    tokenizer = Texts("\\boxed{7}", "\\boxed{7.0}", "\\boxed{5}", "no answer")
    groups = [
        group("5", [0, 2, 1, 3], [0.0, 1.0, 0.0, 0.0], length=2),  # 7 and 7.0 are one class: wrong
        group("7", [0, 2, 1, 0], [1.0, 0.0, 1.0, 1.0], length=6, finished=False),
    ]
    scores = eval_only.scores_at_every_k(groups, tokenizer)
    assert list(scores) == [
        *("avg@4", "maj@4", "pass@1", "pass@2", "pass@4", "plug-in pass@2", "plug-in pass@4"),
        *("response tokens", "truncated share"),
    ]
    assert scores["avg@4"] == scores["pass@1"] == [0.25, 0.75]
    assert scores["maj@4"] == [0.0, 1.0]
    # 1 - C(3, 2) / C(4, 2) and 1 - C(1, 2) / C(4, 2)
    assert scores["pass@2"] == pytest.approx([0.5, 1.0])
    assert scores["pass@4"] == [1.0, 1.0]
    assert scores["plug-in pass@2"] == pytest.approx([1 - 0.75**2, 1 - 0.25**2])
    assert scores["plug-in pass@4"] == pytest.approx([1 - 0.75**4, 1 - 0.25**4])
    assert scores["response tokens"] == [2.0, 6.0]
    assert scores["truncated share"] == [0.0, 1.0]


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_k_doubles_up_to_the_number_of_samples(n, ks):
    scores = eval_only.scores_at_every_k([group("1", [0] * n, [1.0] * n)], Texts("\\boxed{1}"))
    assert [int(key[5:]) for key in scores if key.startswith("pass@")] == ks


def test_votes_of_a_multiple_choice_problem_join_by_letter():
    tokenizer = Texts("\\boxed{c}", "\\boxed{(C)}", "\\boxed{D}")
    answers, correct = [2, 2, 0, 1, 1], [0.0, 0.0, 1.0, 1.0, 1.0]
    assert common.problem_scores([group(Letter("C"), answers, correct)], tokenizer)["maj_at_k"] == [
        1.0
    ]
    # Elsewhere c and (C) are two answers, and D has as many votes as (C) and came first.
    assert common.problem_scores([group("C", answers, correct)], tokenizer)["maj_at_k"] == [0.0]


def binomial_quantile(q, n, p):
    """The smallest c with P(at most c of n) >= q."""
    total = 0.0
    for c in range(n + 1):
        total += math.comb(n, c) * p**c * (1 - p) ** (n - c)
        if total >= q:
            return c
    raise AssertionError


@pytest.mark.parametrize(("n", "right"), [(2, 1), (10, 5), (30, 6)])
def test_interval_of_a_share_is_the_binomials(n, right):
    # Of n problems drawn with replacement, how many are right is binomial. n = 2: P(0) = 1/4.
    scores = [1.0] * right + [0.0] * (n - right)
    (cell,) = eval_only.with_intervals({"a": {"x": scores}}, seed=1)["a"].values()
    assert cell["mean"] == pytest.approx(right / n)
    low, high = (binomial_quantile(q, n, right / n) / n for q in (0.025, 0.975))
    assert (cell["low"], cell["high"]) == (pytest.approx(low), pytest.approx(high))


def test_macro_average_draws_problems_within_each_suite():
    # Each suite's mean is 0, 1/2 or 1 with probability 1/4, 1/2, 1/4. Their average is 0 or 1 with
    # probability 1/16 each, so its interval reaches both; of four suites with 1/256 it does not.
    suites = {name: {"x": [0.0, 1.0]} for name in "abcd"}
    two = eval_only.with_intervals({k: suites[k] for k in "ab"}, seed=1)["macro average"]["x"]
    assert two == {"mean": 0.5, "low": 0.0, "high": 1.0}
    four = eval_only.with_intervals(suites, seed=1)["macro average"]["x"]
    assert four == {"mean": 0.5, "low": 0.125, "high": 0.875}
    # a suite counts as one, whatever its size
    unequal = {"a": {"x": [1.0]}, "b": {"x": [0.0] * 9}}
    assert eval_only.with_intervals(unequal, seed=1)["macro average"]["x"]["mean"] == 0.5
    assert "macro average" not in eval_only.with_intervals({"a": {"x": [1.0]}}, seed=1)


def test_bootstrap_is_a_function_of_its_seed():
    scores = np.random.default_rng(0).random((9, 2))
    one, two = bootstrap_means(scores, 1, 50), bootstrap_means(scores, 1, 50)
    assert one.shape == (50, 2) and (one == two).all()
    assert (one != bootstrap_means(scores, 2, 50)).any()
    together = bootstrap_means(scores[:, [0, 0]], 1, 50)  # the same problems for every number
    assert (together[:, 0] == together[:, 1]).all()


# --------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------


def call(name, monkeypatch, tmp_path, policy, **changes):
    """Run a script's main with --eval-only in this process; its eval.json."""
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [str(ROOT / f"{name}.py"), "tiny", "--eval-only"])
    changes = {"policy" if name == "rfpo" else "model": policy, **SMALL, **changes}
    folders = {*tmp_path.glob("runs/*")}
    args = replace(script.Args(), eval_only=True, runs_dir=str(tmp_path / "runs"), **changes)
    script.main(args, "tiny")
    (folder,) = {*tmp_path.glob("runs/*")} - folders
    assert folder.name.startswith(changes.get("run_name", f"{name}-tiny-eval-seed"))
    assert {path.name for path in folder.iterdir()} == {"args.json", "eval.json"}
    return json.loads((folder / "eval.json").read_text())


@pytest.fixture
def nothing_is_trained(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("--eval-only made an optimizer or a critic")

    monkeypatch.setattr(torch.optim.AdamW, "__init__", refuse)
    monkeypatch.setattr(common.Critic, "__init__", refuse)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_evaluates_and_trains_nothing(
    name, monkeypatch, tmp_path, base_policy, nothing_is_trained, capsys
):
    report = call(name, monkeypatch, tmp_path, base_policy)
    assert report["counts"]["tiny"]["responses"] == 20
    out = capsys.readouterr().out
    settings = "4 samples a problem, at most 24 tokens each, temperature 1, top-p 1, seed 1"
    assert settings in report["settings"] and out.count(settings) == 2
    for key, cell in report["numbers"]["tiny"].items():
        assert cell["low"] <= cell["mean"] <= cell["high"]
        assert f"\n{key:<22}" in out
    assert "tiny: 5 problems, 20 responses" in out and "rows 20000" not in out  # nor training data


def in_training(base_policy):
    """A policy as dapo.py sets it up, and what its loop gives to evaluate."""
    args = replace(dapo.Args(), model=base_policy, **SMALL)
    accelerator = common.make_accelerator(args)
    tokenizer = common.load_tokenizer(base_policy)
    policy, _ = common.load_policy(args, accelerator)
    engine = common.make_engine(args, policy, tokenizer, accelerator)
    suites, reward = common.load_suites(args, tokenizer), common.load_reward(args.reward)
    return policy, (args, engine, suites, reward, tokenizer)


def test_the_same_checkpoint_twice_gives_the_same_numbers(monkeypatch, tmp_path, base_policy):
    one = call("dapo", monkeypatch, tmp_path, base_policy)
    random.random(), np.random.random(), torch.rand(3)  # what a training run would have drawn
    two = call("dapo", monkeypatch, tmp_path, base_policy)
    assert one == two
    other = call("dapo", monkeypatch, tmp_path, base_policy, seed=2, run_name="other")
    assert other["numbers"] != one["numbers"]
    # and they are those that a training run logs at step 0
    _, evaluation = in_training(base_policy)
    logged = common.evaluate(*evaluation)
    numbers = {key: cell["mean"] for key, cell in one["numbers"]["tiny"].items()}
    assert logged == {
        "eval/avg_at_k": numbers["avg@4"],
        "eval/maj_at_k": numbers["maj@4"],
        "eval/pass_at_k": numbers["pass@4"],
        "eval/response_tokens_mean": numbers["response tokens"],
        "eval/truncated_frac": numbers["truncated share"],
    }


def test_an_evaluation_leaves_the_state_of_training_as_it_was(base_policy):
    policy, evaluation = in_training(base_policy)
    policy.train()
    modes = [module.training for module in policy.modules()]
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    weights = {name: x.clone() for name, x in policy.state_dict().items()}
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    first = common.evaluate(*evaluation)
    assert random.getstate() == states[0]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[1], strict=True))
    assert torch.equal(torch.get_rng_state(), states[2])
    assert [module.training for module in policy.modules()] == modes
    assert all(torch.equal(x, weights[name]) for name, x in policy.state_dict().items())
    assert all((p.grad == 1).all() and p.requires_grad for p in policy.parameters())
    assert common.evaluate(*evaluation) == first
    assert torch.is_grad_enabled()


def test_two_ranks_count_five_prompts_times_four_as_twenty(monkeypatch, tmp_path, base_policy):
    flags = ["--eval-only", "--eval-problems", "5", "--eval-samples", "4", "--model", base_policy]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launcher += ["--master_port", str(29500 + os.getpid() % 2000)]
    done = subprocess.run(
        [*launcher, str(ROOT / "dapo.py"), "tiny", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("runs/*/eval.json")
    two = json.loads(path.read_text())
    assert path.parent.name == "dapo-tiny-eval-seed1"
    assert two["counts"]["tiny"]["problems"] == len(two["counts"]["tiny"]["right"]) == 5
    assert two["counts"]["tiny"]["responses"] == 20
    assert done.stdout.count("avg@4") == 1  # rank 0 alone prints
    one = call("dapo", monkeypatch, tmp_path, base_policy, run_name="one")
    assert one["numbers"] == two["numbers"] and one["counts"] == two["counts"]


def test_several_suites_and_their_macro_average(monkeypatch, tmp_path, base_policy, capsys):
    rows = [{"problem": f"{a} {b} ?", "answer": str((a + b) % 5)} for a in (1, 2) for b in (3, 4)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = call("fipo", monkeypatch, tmp_path, base_policy, eval_dataset=f"tiny, {path}")
    assert list(report["numbers"]) == ["tiny", "sums", "macro average"]
    assert report["counts"]["sums"]["responses"] == 16
    means = [report["numbers"][name]["avg@4"]["mean"] for name in report["numbers"]]
    assert means[2] == pytest.approx((means[0] + means[1]) / 2)
    assert "macro average" in capsys.readouterr().out
    text = json.dumps(report)
    assert "1 3 ?" not in text and "<think>" not in text  # counts, not rows: GPQA's must not leak


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resume": True}, "--resume"),
        ({"eval_dataset": ""}, "--eval-dataset"),
        ({"eval_samples": 0}, "--eval-samples 0"),
        ({"eval_dataset": "tiny,tiny"}, "two sets are called 'tiny'"),
    ],
)
@pytest.mark.parametrize("name", ["sft", "dapo"])
def test_wrong_use(name, changes, words, monkeypatch, tmp_path, base_policy):
    with pytest.raises(common.UsageError, match=words):
        call(name, monkeypatch, tmp_path, base_policy, **changes)
    assert not (tmp_path / "runs").exists()


def test_without_the_chat_template_a_base_model_sees_the_plain_text(base_policy):
    class Chat:
        chat_template = "x"

        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            return f"<user>{messages[0]['content']}<assistant>"

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [0] * add_special_tokens + [1, 2]}

    args = replace(dapo.Args(), chat_template=False)
    problem = common.load_dataset("tiny", "test", args, Chat())[0]
    assert "<user>" not in problem.prompt and problem.prompt_ids == [0, 1, 2]  # its BOS, once
    problem = common.load_dataset("tiny", "test", dapo.Args(), Chat())[0]
    assert problem.prompt.startswith("<user>") and problem.prompt_ids == [1, 2]
    text, _ = data.render_prompt("2+2?", "Q: {problem}\nA:", Chat(), False)
    assert text == "Q: 2+2?\nA:"
