"""The README's `python ppo_critic.py && python rfpo.py`, whole, with the bars of what must come of
it, and `python critic_report.py` on fresh responses. Slow: minutes."""

import json
import statistics
import subprocess
import sys
import time

import pytest
from conftest import ROOT


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def mean(lines, key, first, last):
    return statistics.mean(line[key] for line in lines if first <= line["step"] <= last)


@pytest.mark.slow
def test_a_critic_is_made_and_a_policy_learns_from_it_alone(base_policy, tmp_path):
    def start(script, *flags):
        command = [sys.executable, str(ROOT / script), *flags]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    begin = time.perf_counter()
    start("ppo_critic.py")
    start("rfpo.py")
    seconds = time.perf_counter() - begin
    ppo = lines_of(tmp_path / "runs/ppo_critic-tiny-seed1/metrics.jsonl")
    rfpo = lines_of(tmp_path / "runs/rfpo-tiny-seed1/metrics.jsonl")
    accuracy = [line["eval/avg_at_k"] for line in ppo if "eval/avg_at_k" in line]
    assert accuracy[0] < 0.5 and accuracy[-1] > 0.85
    # The critic: no better than the mean at first, a judge at its checkpoint (step 50).
    assert ppo[1]["value/explained_variance"] <= 0
    assert mean(ppo, "value/explained_variance", 46, 50) >= 0.4
    # RFPO without a label: from 50 to 75 %, at least two thirds of what labels gain from there.
    first, *_, before_last, last = [x["eval/avg_at_k"] for x in rfpo if "eval/avg_at_k" in x]
    assert 0.5 <= first <= 0.75
    assert (before_last + last) / 2 >= first + 0.08
    start(
        "critic_report.py", "--seed", "2", "--calibration", "runs/rfpo-tiny-seed1/calibration.json"
    )
    print(f"{seconds:.0f} s, base {accuracy[0]}, ppo {accuracy[-1]}, pi_0 {first}, rfpo {last}")
    assert seconds < 600
