"""Wrong use ends at start with one clear line on stderr, exit code 2 and no traceback."""

import json
import math
import runpy
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS


def call(capsys, monkeypatch, script: str, *argv: str) -> str:
    """Run a script in this process up to its error; returns the line on stderr."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / script), *argv])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    line = text.strip()
    assert line.startswith(f"{script}: error: ") and "\n" not in line
    return line


CASES = {
    "unknown preset": (["qwen-99b"], ["'qwen-99b'", "tiny", "qwen2.5-7b-math", "qwen2.5-32b"]),
    "unknown flag": (
        ["--learning-rat", "1"],
        ["--learning-rat", "--learning-rate", "--group-size"],
    ),
    "sizes that do not divide": (["--minibatch-size", "100"], ["100", "512"]),
    "group of one": (
        ["--group-size", "1", "--minibatch-size", "16"],
        ["--group-size 1", "--no-dynamic-sampling"],
    ),
    "temperature 0": (["--temperature", "0"], ["--temperature 0", "above 0"]),
    "one update per batch": (["--minibatch-size", "512"], ["512", "f = 1", "smaller divisor"]),
    "limit over the model": (
        ["--max-response-tokens", "300"],
        ["300", "16", "316", "256", "--max-context"],
    ),
    "microbatch too small": (["--tokens-per-microbatch", "8"], ["8", "40"]),
    "no steps": (["--num-steps", "0"], ["--num-steps 0"]),
    "missing file": (["--dataset", "nowhere.jsonl"], ["nowhere.jsonl", "not found"]),
    "unknown engine": (["--rollout-engine", "sglang"], ["'sglang'", "hf", "vllm"]),
    "no such model": (["--model", "./nowhere"], ["./nowhere", "no such folder"]),
    "tensor parallel alone": (["--tensor-parallel", "2"], ["2", "1 processes"]),
    "overlong buffer": (["--overlong-buffer", "99"], ["99", "24"]),
    "influence interval": (["--influence-low", "1.5"], ["1.5", "1.2"]),
    "reward without a function": (["--reward", "tiny.py"], ["tiny.py", "names no function"]),
    "prompt limit": (["--max-prompt-tokens", "0"], ["--max-prompt-tokens 0", "at least 1"]),
    "no such reward": (["--reward", "mine.py:f"], ["mine.py:f", "no such file"]),
    "template": (["--prompt-template", "solve it"], ["solve it", "{problem}"]),
    "all prompts too long": (
        ["--max-prompt-tokens", "2"],
        ["--max-prompt-tokens is 2", "longest has 9"],
    ),
    "top-p": (["--eval-top-p", "0"], ["--eval-top-p 0"]),
    "wrong type": (["--group-size", "many"], ["--group-size", "many", "INT"]),
    "half-life 0": (["--future-kl-half-life", "0"], ["--future-kl-half-life 0", "None"]),
    "dual clip 0": (["--dual-clip", "0"], ["--dual-clip 0", "None"]),
    "negative temperature": (["--eval-temperature", "-1"], ["--eval-temperature -1"]),
    "learning rate": (["--learning-rate", "nan"], ["--learning-rate nan"]),
    "seed": (["--seed", "-1"], ["--seed -1"]),
    "tracker": (["--track", "nosuch"], ["'nosuch'"]),
    "no model in the folder": (["--model", "."], ["config.json"]),
    "resume of nothing": (["--resume"], ["--resume", "fipo-tiny-seed1"]),
    "runs folder": (["--runs-dir", "/proc/nope"], ["--runs-dir /proc/nope"]),
    "gradient norm": (["--max-grad-norm", "0"], ["--max-grad-norm 0", "above 0"]),
    "KL": (["--kl-coef", "-1"], ["--kl-coef -1", "negative"]),
    "lower clip": (["--clip-eps-low", "2"], ["--clip-eps-low 2", "[0, 1]"]),
    "FSDP alone": (["--cpu-offload"], ["--cpu-offload", "torchrun"]),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_use_is_named(name, capsys, monkeypatch, base_policy, tmp_path):
    monkeypatch.chdir(tmp_path)
    argv, words = CASES[name]
    line = call(capsys, monkeypatch, "fipo.py", *argv)
    for word in words:
        assert word in line, line
    assert not (tmp_path / "runs").exists()  # nothing was started


def test_a_missing_column_lists_those_present(capsys, monkeypatch, base_policy, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem_text": "1 2 ?", "result": "3"}) + "\n")
    line = call(capsys, monkeypatch, "dapo.py", "--dataset", str(path))
    assert "problem_text, result" in line and "--prompt-column" in line
    flags = ["--dataset", str(path), "--prompt-column", "problem_text", "--answer-column", "gold"]
    line = call(capsys, monkeypatch, "dapo.py", *flags)
    assert "'gold'" in line and "problem_text, result" in line


def test_rows_without_a_prompt_or_a_gold(capsys, monkeypatch, base_policy, tmp_path):
    path = tmp_path / "rows.jsonl"
    for row, word in (
        ({"problem": None, "answer": "1"}, "None is neither text nor messages"),
        ({"problem": [], "answer": "1"}, "[] is neither"),
        ({"problem": ["hi"], "answer": "1"}, "['hi'] is neither"),
        ({"problem": [{"text": "hi"}], "answer": "1"}, "with role and content"),
        ({"problem": "1 2 ?", "answer": ""}, "no row"),
        ({"problem": "1 2 ?", "answer": {"a": 1}}, "struct"),
    ):
        path.write_text(json.dumps(row) + "\n")
        assert word in call(capsys, monkeypatch, "dapo.py", "--dataset", str(path))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_setting_that_is_no_number_is_named(name):
    import common

    script = runpy.run_path(str(ROOT / f"{name}.py"))
    args = script["Args"]()
    script["check"](args)  # the tiny preset itself passes
    floats = [f.name for f in fields(args) if "float" in str(f.type)]
    assert len(floats) > 5
    for field in floats:
        with pytest.raises(common.UsageError, match=f"--{field.replace('_', '-')} nan is not"):
            script["check"](replace(args, **{field: math.nan}))


def test_every_limit_refuses_what_is_below_it_and_names_a_flag():
    import common
    import runtime

    scripts = [runpy.run_path(str(ROOT / f"{name}.py"))["Args"] for name in SCRIPTS]
    flags = {name for args in scripts for name in vars(args())}
    for limit, (holds, names) in runtime.LIMITS.items():
        assert flags.issuperset(names.split()), limit
        assert not holds(-1) and holds(1), limit
    for name in ("learning_rate", "seed", "batch_size", "save_every"):  # sft.py, not by hand
        args = replace(scripts[SCRIPTS.index("sft")](), **{name: -1})
        with pytest.raises(common.UsageError, match=f"--{name.replace('_', '-')} -1"):
            common.check_limits(args)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("f = 3", "has no function 'f'"),
        ("g = 3", "has no function 'f'"),
        ("import nosuchmodule", "fails at import.*nosuchmodule"),
        ("def f(:", "fails at import.*SyntaxError"),
        ("def f(prompts, responses): return []", "gets prompts, responses, golds"),
    ],
)
def test_a_reward_that_cannot_be_called_is_named_at_start(source, words, tmp_path):
    import common

    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(common.UsageError, match=words):
        common.load_reward(f"{tmp_path}/mine.py:f")


@pytest.mark.parametrize(
    "answer", ["[float('nan')] * n", "[2.0] * n", "[None] * n", "[0.0]", "None", "0.5"]
)
def test_a_reward_that_is_no_list_of_numbers_between_0_and_1(answer, base_policy, tmp_path):
    import common

    path = tmp_path / "mine.py"
    path.write_text(f"def f(prompts, responses, golds):\n    n = len(golds)\n    return {answer}\n")
    reward = common.load_reward(f"{path}:f")
    tokenizer = common.load_tokenizer(base_policy)
    problem = common.Problem(0, "", [5], "1")
    responses = [common.Response(np.array([5]), np.zeros(1), True) for _ in range(2)]
    with pytest.raises(common.UsageError, match="--reward"):
        common.judge([common.Group(0, problem, responses, [])], reward, tokenizer)


def test_an_empty_data_set(capsys, monkeypatch, base_policy, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    assert "is empty" in call(capsys, monkeypatch, "dapo.py", "--dataset", str(path))


def test_a_file_that_is_no_data(capsys, monkeypatch, base_policy, tmp_path):
    line = call(capsys, monkeypatch, "dapo.py", "--dataset", str(tmp_path))
    assert str(tmp_path) in line and "is a folder" in line
    path = tmp_path / "broken.jsonl"
    path.write_text("this is not json\n")
    line = call(capsys, monkeypatch, "dapo.py", "--dataset", str(path))
    assert str(path) in line and "did not load" in line
    path.write_bytes('{"problem": "\u00e9 1 2 ?", "answer": "3"}\n'.encode("latin-1"))
    line = call(capsys, monkeypatch, "dapo.py", "--dataset", str(path))
    assert str(path) in line and "not UTF-8" in line and "0xe9" in line
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    line = call(capsys, monkeypatch, "dapo.py", "--dataset", str(path))
    assert ".jsonl" in line and ".parquet" in line


def test_help_explains_every_flag(capsys, monkeypatch):
    for script in ("sft.py", "dapo.py", "fipo.py"):
        monkeypatch.setattr(sys, "argv", [str(ROOT / script), "--help"])
        with pytest.raises(SystemExit) as stopped:
            scope = runpy.run_path(str(ROOT / script), run_name="__main__")
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        scope = runpy.run_path(str(ROOT / script))
        assert all(preset in text for preset in scope["PRESETS"])
        source = (ROOT / script).read_text()
        for field in fields(scope["Args"]):
            assert f"--{field.name.replace('_', '-')}" in text
            line = next(x for x in source.splitlines() if x.startswith(f"    {field.name}: "))
            assert "  # " in line, f"{script}: {field.name} has no help text"
