"""benchmarks/compare.py: its arithmetic by hand, and its numbers in the docs against its lines."""

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


def test_rfpo_has_paid_for_its_critic_and_its_calibration():
    (first, *_) = compare.read_lines(compare.file_of("peers", "RFPO", 1))
    assert first["step"] == 0 and first["sampled"] == 50 * 64 * 8 + 512


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
    ends = [row.split("|")[4].strip() for row in rows]
    named = re.findall(r"[\d.]+ ± \d+\.\d", section)
    assert len(named) == len(ends) - 1  # "every group" stands there in words
    assert not [number for number in named if number not in ends]
