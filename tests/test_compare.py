"""benchmarks/compare.py: its arithmetic by hand, and its numbers in the docs against its lines."""

import json
import math
import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import compare


def runs(study, seeds):
    """The committed lines of every arm of a study."""
    return {
        arm: {seed: compare.read_lines(compare.file_of(study, arm, seed)) for seed in seeds}
        for arm in compare.STUDIES[study]
    }


def test_a_metric_between_two_evaluations_and_outside_of_them():
    lines = [{"sampled": s, "a": a} for s, a in ((0, 0.2), (1000, 0.4))] + [{"sampled": 2000}]
    assert compare.at(lines, "a", 250) == pytest.approx(0.25)
    assert math.isnan(compare.at(lines, "a", 1500))


def test_interval_by_hand():
    # mean 3, standard deviation sqrt(2.5), 2.776 of it over sqrt(5)
    mean, half = compare.interval([1, 2, 3, 4, 5])
    assert mean == 3 and half == pytest.approx(2.776 * math.sqrt(2.5 / 5), abs=1e-9)

    assert compare.interval([3])[0] == 3 and math.isnan(compare.interval([3])[1])


def test_responses_are_counted_when_they_are_sampled():
    # 6 prompts x 4 a round: one round, two rounds, and a step that took all three in vain
    args = {"group_size": 4, "prompts_per_step": 2, "gen_prompts": 6, "max_gen_batches": 3}
    lines = [{"step": 0}, *({"step": i, "rollout/gen_batches": i} for i in (1, 2))]
    lines.append({"step": 3, "train/skipped_steps": 1})
    assert [x["sampled"] for x in compare.count(lines, args)] == [0, 24, 72, 144]
    # a script without sampling rounds, behind what made its critic
    del args["gen_prompts"]
    lines = [{"step": 0}, {"step": 1}]
    assert [x["sampled"] for x in compare.count(lines, args, 100)] == [100, 108]


def test_rfpo_has_paid_for_its_critic_and_its_calibration(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "OUT", tmp_path)
    ppo = [{"step": step, "sampled": 512 * step} for step in (0, 49, 50, 51)]
    path = compare.file_of("peers", "PPO", 1)
    path.write_text("\n".join(map(json.dumps, ppo)))
    folder = tmp_path / compare.file_of("peers", "RFPO", 1).stem
    (folder / "model").mkdir(parents=True)  # a run that has ended
    args = {"group_size": 8, "prompts_per_step": 64, "calibration_rollouts": 512}
    (folder / "args.json").write_text(json.dumps(args))
    (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    lines = compare.run("peers", "RFPO", 1, tmp_path)
    assert [x["sampled"] for x in lines] == [50 * 512 + 512, 51 * 512 + 512]


def test_a_row_of_the_peers_by_hand():
    def line(sampled, accuracy, tokens):
        keys = "sampled", "eval/avg_at_k", "rollout/response_tokens_mean"
        kept = dict(zip(keys, (sampled, accuracy, tokens), strict=True))
        return {**kept, "train/updates_per_batch": 8 if sampled else 0}

    runs = {
        "DAPO": {
            1: [line(0, 0.4, 8), line(51_200, 0.8, 10)],
            2: [line(0, 0.4, 8), line(51_200, 0.8, 10)],
        },
        "FIPO": {
            1: [line(0, 0.4, 8), line(51_200, 0.9, 12)],
            2: [line(0, 0.4, 8), line(51_200, 0.9, 12)],
        },
    }
    dapo, fipo = compare.peers_table(runs).splitlines()[2:]
    assert dapo == "| DAPO | 50.0 ± 0.0 | 60.0 ± 0.0 | 80.0 ± 0.0 |  | 9.0 | 8 |"
    assert fipo == "| FIPO | 52.5 ± 0.0 | 65.0 ± 0.0 | 90.0 ± 0.0 | 10.0 ± 0.0 | 10.0 | 8 |"


@pytest.mark.parametrize("arm", list(compare.STUDIES["peers"]))
def test_every_peer_has_five_seeds_or_more_that_pass_the_budget(arm):
    paths = list(compare.OUT.glob(compare.file_of("peers", arm, "*").name))
    assert len(paths) >= 5
    for path in paths:
        assert compare.read_lines(path)[-1]["sampled"] >= compare.BUDGET


def test_the_tables_of_the_page_are_those_of_the_lines():
    text = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    marks = re.findall(r"<!-- compare: (\w+) ([\d ]+) -->\n\n((?:\|.*\n)+)", text)
    assert [study for study, _, _ in marks] == list(compare.STUDIES)
    for study, seeds, table in marks:
        make = compare.peers_table if study == "peers" else compare.ablations_table
        assert table.strip() == make(runs(study, [int(seed) for seed in seeds.split()]))


def test_the_numbers_of_the_readme_are_those_of_the_lines():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("\n## Results\n")[1].split("\n## ")[0]
    rows = compare.peers_table(runs("peers", range(1, 7))).splitlines()[2:]
    ends = {row.split("|")[1].strip(): row.split("|")[4].strip() for row in rows}
    order = ["GRPO", "DAPO, every group", "DAPO", "FIPO", "length heuristic", "PPO"]
    order += ["DAPO, G doubled", "RFPO"]
    assert {*order} == {*compare.STUDIES["peers"]}
    assert re.findall(r"[\d.]+ ± \d+\.\d", section) == [ends[arm] for arm in order]
