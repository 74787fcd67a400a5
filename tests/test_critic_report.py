"""What a frozen critic knows: each measure by hand-checkable numbers, and one whole report."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT

import common
import critic_report as report
from calibration import Calibration

# Lengths up to 10 have b = 0.1, those up to 20 have b = -0.1; twice that is subtracted.
TWO_BINS = Calibration([10.0, 20.0], [0.1, -0.1], 2.0, 0.5, 8)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_table10_row_by_hand():
    # Problem 0: right .9 and .2, wrong .4 and .1; problem 1: right 1.2, wrong .6 and .3.
    scores = [0.9, 0.2, 0.4, 0.1, 1.2, 0.6, 0.3]
    correct, ids = [1, 1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1]
    lengths = [10, 100, 100, 99, 10, 20, 98]  # of a cap of 100: three are cut off
    row = report.ranking(scores, lengths, correct, ids, 100, 0.5)
    close(row["auc"], (4 + 4 + 1) / 12)  # .9 and 1.2 beat all four wrong ones, .2 beats .1
    close(row["within_auc"], (3 / 4 + 1) / 2)
    close(row["auc_truncated"], 1 / 2)  # right .2 against wrong .4 and .1
    close(row["within_auc_truncated"], 1 / 2)
    close(row["auc_finished"], 1.0)
    close(row["within_auc_finished"], 1.0)  # problem 0 has one finished response: left out
    # Shorter is correct: in problem 0, 10 beats both, 100 ties with 100 and loses to 99.
    close(row["shorter_within_auc"], ((2 + 0.5) / 4 + 1) / 2)
    close(row["precision"], 2 / 3)  # .9, 1.2 and .6 lie above .5
    close(row["best_cut"], 0.75)  # all wrong ones below, two of three right ones above
    close(row["outside_frac"], 1 / 7)
    close(row["score_gap"], (3.7 - 3) / 7)
    close(row["right_frac"], 3 / 7)
    close(row["truncated_frac"], 3 / 7)


def test_explained_variance_and_precision_of_a_score():
    got = report.worth([0.5, 0.5, 1.0, 0.0], [0, 1, 1, 0], 0.5)
    close(got["explained_variance"], 1 - 0.125 / 0.25)  # errors -.5, .5, 0, 0
    assert got["precision"] == 1.0  # strictly above: the two at .5 do not count
    assert np.isnan(report.worth([0.1], [1], 0.5)["precision"])


def test_fig3_histogram_is_percent_of_a_class():
    got = report.histograms([-9.0, 0.1, 0.6, 0.7, 9.0], [0, 0, 1, 0, 1], 0.0, 1.0, 2)
    assert got["edges"] == [0.0, 0.5, 1.0]
    close(got["wrong"], [200 / 3, 100 / 3])  # -9 counts in the first bin
    close(got["right"], [0, 100])  # 9 in the last


def test_table7_bins_are_inclusive_at_their_upper_edge():
    rows = report.bin_table([0.8, 0.2, 0.6, 0.4], [10, 11, 20, 99], [1, 0, 1, 0], TWO_BINS)
    assert [row["upper_edge"] for row in rows] == [10.0, 20.0]
    assert [row["b"] for row in rows] == [0.1, -0.1]
    assert [row["responses"] for row in rows] == [1, 3]  # 99 goes with the last bin
    close([row["right_frac"] for row in rows], [1, 1 / 3])
    close([row["score_right"] for row in rows], [0.8, 0.6])
    close(rows[1]["score_wrong"], 0.3)
    assert np.isnan(rows[0]["score_wrong"])


def test_eq2_agreement_and_what_debiasing_does_to_length():
    # v - 2 b: .6, .9, .5, .3; rewarded above .5: the first two. Right are the first and the third.
    found = report.rule([0.8, 0.7, 0.3, 0.1], [5, 15, 15, 15], [1, 0, 1, 0], [0, 0, 1, 1], TWO_BINS)
    assert (found["threshold"], found["scale"]) == (0.5, 2.0)
    close(found["agreement"], 0.5)
    close(found["balanced_agreement"], 0.5)
    close(found["reward_gap"], 0.0)
    close(found["auc_debiased"], 0.5)  # .6 beats .3, .5 beats .3, neither beats .9
    assert "explained variance" in found["faults"]
    # Three right ones and one wrong, all rewarded: balanced agreement is not agreement.
    found = report.rule([0.9, 0.9, 0.9, 0.8], [5] * 4, [1, 1, 1, 0], [0] * 4, TWO_BINS)
    close([found["agreement"], found["balanced_agreement"], found["reward_gap"]], [0.75, 0.5, 0.25])


def test_length_correlation_is_within_a_class():
    lengths = [5, 10, 15, 5, 10, 15]
    found = report.rule(
        [0.9, 0.8, 0.7, 0.1, 0.2, 0.3], lengths, [1, 1, 1, 0, 0, 0], [0] * 6, TWO_BINS
    )
    close([found["length_right"], found["length_wrong"]], [-1, 1])
    # Debiased: .7 .6 .9 and -.1 0 .5; r of (5, 10, 15) with them.
    close(found["length_debiased_right"], np.corrcoef([5, 10, 15], [0.7, 0.6, 0.9])[0, 1])
    close(found["length_debiased_wrong"], np.corrcoef([5, 10, 15], [-0.1, 0.0, 0.5])[0, 1])


def test_debiasing_strength_by_hand():
    # Problems 0 and 1 have both outcomes. s b is .2 and -.2 in problem 0: population spread .2; in
    # problem 1 lengths are equal: 0. Problem 2 is all wrong, so it does not count for the spread,
    # but for the gap: right .9, .7, wrong .5, .1, .3, .3.
    scores, lengths = [0.9, 0.5, 0.7, 0.1, 0.3, 0.3], [5, 15, 5, 5, 5, 15]
    correct, ids = [1, 0, 1, 0, 0, 0], [0, 0, 1, 1, 2, 2]
    got = report.debiasing_strength(scores, lengths, correct, ids, TWO_BINS)
    close(got, 0.1 / (0.8 - 0.3))
    tensors = (torch.tensor(x) for x in (scores, lengths, correct, ids))
    close(report.debiasing_strength(*tensors, TWO_BINS), got)
    assert np.isnan(report.debiasing_strength(scores, lengths, [1] * 6, ids, TWO_BINS))


def test_between_problem_share_by_hand():
    assert report.between_problem_share([1, 1, 3, 3], [7, 7, 9, 9]) == 1.0
    assert report.between_problem_share([1, 3, 1, 3], [7, 7, 9, 9]) == 0.0
    # Means 1, 1, 4 about 2: variance 2; deviations -1, 1, 0 within: 2/3.
    close(report.between_problem_share([0, 2, 4], [0, 0, 1]), 2 / (2 + 2 / 3))
    assert np.isnan(report.between_problem_share([2, 2], [0, 1]))


# Values of the states after 0, 1, 2, 3 tokens; 0 beyond a response. Two problems of three.
VALUES = np.array(
    [
        [0.5, 0.6, 0.9, 0.0],  # ends after 2, right
        [0.5, 0.7, 0.2, 0.0],  # ends after 2, wrong
        [0.5, 0.1, 0.3, 0.4],  # ends after 3, wrong
        [0.4, 0.2, 0.8, 0.7],  # 3, right
        [0.4, 0.3, 0.1, 0.9],  # 3, wrong
        [0.4, 0.4, 0.6, 0.1],  # cut off at 3, right
    ]
)
LENGTHS, FINISHED = [2, 2, 3, 3, 3, 3], [True] * 5 + [False]
CORRECT, IDS = [1, 0, 0, 1, 0, 1], [0, 0, 0, 1, 1, 1]


def test_prefix_values_stop_at_the_end_of_a_response():
    close(report.prefix_values(VALUES, LENGTHS, 1), [0.6, 0.7, 0.1, 0.2, 0.3, 0.4])
    close(report.prefix_values(VALUES, LENGTHS, 3), [0.9, 0.2, 0.4, 0.7, 0.9, 0.1])
    close(report.prefix_values(VALUES, LENGTHS, 99), [0.9, 0.2, 0.4, 0.7, 0.9, 0.1])


def test_table11_prefix_scan_by_hand():
    noise = VALUES + np.array([[0, 1e-8, 2e-8, 0, 1e-8, 2e-8]]).T  # equal prefixes still tie
    none, one, two, three = report.prefix_scan(noise, LENGTHS, FINISHED, CORRECT, IDS, [0, 1, 2, 3])
    assert [row["prefix"] for row in (none, one, two, three)] == [0, 1, 2, 3]
    close([none["within_auc"], none["between_share"], none["finished_frac"]], [0.5, 1, 0])
    # One token. Problem 0: .6 beats .1, not .7. Problem 1: right .2 and .4 against .3.
    close([one["within_auc"], one["within_auc_running"]], [0.5, 0.5])
    close(one["auc"], 5 / 9)  # .6 and .4 beat .1 and .3; .2 beats .1
    assert [row["running_problems"] for row in (none, one, two, three)] == [2, 2, 1, 0]
    # Two: every right one above every wrong one; two have ended, so problem 0 has one left.
    close([two["auc"], two["within_auc"], two["within_auc_running"]], 1)
    close(two["finished_frac"], 2 / 6)
    # Three: right .9 .7 .1, wrong .2 .4 .9; the last one was cut off and still runs.
    close([three["auc"], three["within_auc"], three["finished_frac"]], [4.5 / 9, 0.5, 5 / 6])
    assert np.isnan(three["within_auc_running"])
    close(three["between_share"], (1 / 30) ** 2 / (0.61333333 / 6))


def test_table11_counts_the_problems_that_its_auc_averages():
    # Still running: two responses of problem 0, three right ones of 1, three of both kinds of 2.
    correct, ids = [1, 0, 1, 1, 1, 0, 0, 1], [0, 0, 1, 1, 1, 2, 2, 2]
    values = np.array([[0, 1], [0, 2], [0, 3], [0, 4], [0, 5], [0, 6], [0, 8], [0, 7]])
    (row,) = report.prefix_scan(values, [1] * 8, [False] * 8, correct, ids, [1])
    assert row["running_problems"] == 1
    close(row["within_auc_running"], 0.5)


def test_table12_proxy_cuts_but_keeps_the_verdict():
    got = report.truncation_proxy(VALUES, LENGTHS, FINISHED, CORRECT, 2, 0.55)
    close([got["finished_frac"], got["precision"]], [2 / 6, 1])  # .9 .8 .6 are all right
    close(got["explained_variance"], 1 - (0.35 / 6 - (0.1 / 6) ** 2) / 0.25)
    got = report.truncation_proxy(VALUES, LENGTHS, FINISHED, CORRECT, 3, 0.55)
    close([got["finished_frac"], got["precision"]], [5 / 6, 2 / 3])  # cut off at 3: not finished


def test_table12_a_real_cap_is_judged_by_what_stands_there():
    whole = report.Rollouts([], *map(np.array, (LENGTHS, FINISHED, CORRECT, IDS)))
    ended = [True, True, False, False, False, False]  # of the six under a cap of 2
    short = report.Rollouts([], *map(np.array, ([2] * 6, ended, [1, 0, 0, 0, 0, 0], IDS)))
    args = report.Args(dataset="mine.jsonl", max_response_tokens=3, caps=(3, 2))
    values = {3: VALUES, 2: VALUES[:, :3]}
    found = report.pair_report(args, TWO_BINS, {3: whole, 2: short}, values, None)
    cut, full = found["caps"]
    assert (cut["cap"], full["cap"]) == (2, 3) and "tiny_flaws" not in found
    close([cut["finished_frac"], cut["precision"]], [2 / 6, 1 / 3])  # .9 .8 .6; one is right
    close([cut["proxy_finished_frac"], cut["proxy_precision"]], [2 / 6, 1])
    # Mean .483 and .167; errors .1 -.2 -.3 -.8 -.1 -.6.
    close(cut["explained_variance"], 1 - (1.15 / 6 - (1.9 / 6) ** 2) / (5 / 36))
    close(full["precision"], full["proxy_precision"])


def cell(critic, policy, variance, within):
    return {
        "critic": critic,
        "policy": policy,
        "explained_variance": variance,
        "within_auc": within,
    }


def test_table10_averages_over_policies_and_correlates_critics():
    cells = [cell("a", "p", 0.0, 0.5), cell("b", "p", 0.2, 0.6), cell("c", "p", 0.4, 0.9)]
    cells += [cell("a", "q", 0.2, 0.7), cell("b", "q", 0.4, np.nan), cell("c", "q", 0.6, 0.9)]
    rows, r = report.plane_rows(cells)
    assert [row["critic"] for row in rows] == ["a", "b", "c"]
    close([row["explained_variance"] for row in rows], [0.1, 0.3, 0.5])
    close([row["within_auc"] for row in rows], [0.6, 0.6, 0.9])  # NaN is left out
    close(r, np.sqrt(3) / 2)
    assert np.isnan(report.plane_rows(cells[:2])[1])  # two points always lie on a line
    close(report.correlation([1, 2, 3], [3, 2, 1]), -1)
    assert np.isnan(report.correlation([1, 1, 1], [1, 2, 3]))


@pytest.mark.parametrize(
    ("text", "found", "odd"),
    [
        ("<think> 3+4=2 2+2=4 </think> 4", [(1, "true"), (2, "true")], False),
        ("3+4=1 1+2=3", [(0, "false"), (1, "true")], False),  # the chain carries on from it
        ("3+4=2 2+1=3", [(0, "true"), (1, "misread")], False),  # not the next digit
        ("3+4=2 1+2=3", [(0, "true"), (1, "misread")], False),  # not the last result
        ("4+4=3 3+2=0", [(0, "misread"), (1, "true")], False),  # not the first digit
        ("3+4=2 2+1=0", [(0, "true"), (1, "false")], False),
        ("3+4=2", [(0, "true")], True),
        ("3+4=2 2+2=4 4+0=4", [(0, "true"), (1, "true"), (2, "misread")], True),
        ("4", [], True),
    ],
)
def test_a_tiny_chain_is_read(text, found, odd):
    assert report.read_chain("3 4 2 ?", text.split()) == (found, odd)


def test_what_the_tiny_critic_ranks_by():
    texts = ["3+4=2 2+2=4 4", "3+4=1 1+2=3 3", "3+4=2 2+1=3 3", "0", "4"]
    values = [
        [0.5, 0.5, 0.6, 0.9],  # clean
        [0.5, 0.1, 0.8, 0.2],  # false at once: what follows does not count
        [0.5, 0.5, 0.7, 0.95],  # misreads the 2
        [0.5, 0.3, 0.0, 0.0],  # a wrong guess
        [0.5, 0.2, 0.0, 0.0],  # a right one
    ]
    words = [text.split() for text in texts]
    outcome = [3, 3, 3, 1, 1], [1, 0, 0, 0, 1], [0] * 5
    found = report.tiny_knowledge(["3 4 2 ?"] * 5, words, values, *outcome)
    flaws = found["tiny_flaws"]
    close([row["auc"] for row in flaws], [1, 0, 0.5, 0, 4.5 / 6])
    assert [(row["flawed"], row["of"]) for row in flaws] == [(1, 3), (1, 2), (2, 3), (1, 2), (2, 5)]
    close([row["flawed_score"] for row in flaws], [0.2, 0.95, 0.575, 0.3, 0.25])
    close([row["clean_score"] for row in flaws], [0.925, 0.9, 0.9, 0.2, 2.05 / 3])
    close([row["flawed_right"] for row in flaws], [0, 0, 0, 0, 0.5])
    close([row["within_auc"] for row in flaws][0::2], [1, 0.5, 0.75])
    drops = {row["equation"]: (row["num"], row["drop_of_v"]) for row in found["tiny_drops"]}
    close([drops["true"], drops["false"], drops["misread"]], [(3, -0.1 / 3), (1, 0.4), (1, -0.2)])


def test_a_tiny_chain_that_leaves_a_digit_out_is_flawed():
    words, values = [["3+4=2", "2+2=4", "4"], ["3+4=2", "2"]], [[0.5, 0.5, 0.6, 0.9], [0.5] * 4]
    found = report.tiny_knowledge(["3 4 2 ?"] * 2, words, values, [3, 2], [1, 0], [0, 0])
    row = found["tiny_flaws"][1]
    assert (row["auc"], row["flawed"], row["of"]) == (1.0, 1, 2)


# --------------------------------------------------------------------------------------------------
# Whole reports, of the base policy and critics that nobody trained
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def critics(base_policy, tmp_path_factory):
    """Two folders of critics: the base policy with a new head each."""
    folder, tokenizer = tmp_path_factory.mktemp("critics"), common.load_tokenizer(base_policy)
    args = SimpleNamespace(model=base_policy, critic=None, max_context=None)
    alone = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        common.export(common.load_critic(args, tokenizer), tokenizer, folder / name, alone)
    return [str(folder / "one"), str(folder / "two")]


def strict(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_a_whole_report(critics, base_policy, tmp_path, monkeypatch, capsys):
    small = ("--num-problems", "8", "--samples-per-problem", "4", "--rollout-engine", "hf")
    pair = ("--policies", base_policy, "--critics", *critics)

    def report_of(name, *flags):
        out = tmp_path / name
        argv = ["critic_report.py", *small, *pair, "--out", str(out), *flags]
        monkeypatch.setattr(sys, "argv", argv)
        common.launch(report.main, report.Args, report.PRESETS, report.__doc__)
        assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
        return strict(out / "report.json")

    first = report_of("first", "--caps", "24", "8")
    printed = capsys.readouterr().out
    assert all(f"\n{name}\n" in printed for name in ("pair", "bins", "plane", "tiny_flaws"))
    assert first["calibration"]["cap"] == 24 and first["calibration"]["num_rollouts"] == 32
    assert first["calibration"]["critic"] == common.fingerprint(critics[0])
    # The fitted threshold rewards as many as are right, but for ties at it.
    assert abs(first["pair"]["reward_gap"]) <= 2 / 32
    assert [row["critic"] for row in first["plane"]] == critics and len(first["cells"]) == 2
    assert first["cells"][0]["right_frac"] == first["cells"][1]["right_frac"]
    assert first["cells"][0]["auc"] != first["cells"][1]["auc"]
    assert sum(row["responses"] for row in first["bins"]) == 32
    scan = first["prefix_scan"]
    assert scan[0]["prefix"] == 0 and scan[0]["within_auc"] == 0.5
    assert scan[-1]["auc"] == pytest.approx(first["cells"][0]["auc"], abs=0.02)  # rounded values
    short, long = first["caps"]
    assert (short["cap"], long["cap"]) == (8, 24)
    assert short["finished_frac"] < 1 and short["proxy_finished_frac"] < 1
    # At the longest cap the proxy is the thing itself.
    names = ("finished_frac", "explained_variance", "precision")
    assert [long[name] for name in names] == [long[f"proxy_{name}"] for name in names]
    chains, direct = first["tiny_flaws"][0]["of"], first["tiny_flaws"][3]["of"]
    assert chains + direct == 32 and chains > 0

    # Its calibration on the same rollouts is what was fitted; on fresh ones it is kept, not fitted.
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(first["calibration"]))
    again = report_of("again", "--calibration", str(path))
    assert again["pair"] == first["pair"] and again["caps"] == []
    fresh = report_of("fresh", "--calibration", str(path), "--seed", "5")
    assert fresh["calibration"] == first["calibration"]
    assert fresh["cells"][0]["score_gap"] != first["cells"][0]["score_gap"]


def test_values_of_all_states_are_those_of_the_critic(critics, base_policy):
    args = report.Args(policies=(base_policy,), critics=tuple(critics), tokens_per_microbatch=40)
    tokenizer = common.load_tokenizer(base_policy)
    accelerator, critic = common.make_accelerator(args), common.load_critic(args, tokenizer)
    ids = [[5, 20, 21, 1], [6, 1], [7, 30, 31]]
    responses = [common.Response(np.array(x), np.zeros(len(x), np.float32), True) for x in ids]
    groups = [common.Group(0, common.Problem(0, "", [8, 9, 2], ""), responses, [1.0] * 3)]
    rollouts = report.Rollouts(groups, np.array([4, 2, 3]), None, None, None)
    got = report.state_values(critic, rollouts, args, tokenizer, accelerator)
    assert got.shape == (3, 5)
    for row, response in zip(got, ids, strict=True):
        sizes = torch.tensor([3]), torch.tensor([len(response)])
        want = critic(torch.tensor([[8, 9, 2, *response]]), *sizes, len(response))
        np.testing.assert_allclose(row[: len(response) + 1], want[0].detach(), rtol=0, atol=1e-5)
        assert not row[len(response) + 1 :].any()


def refused(capsys, monkeypatch, *argv):
    """The one line on stderr of a call that is refused."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / "critic_report.py"), *argv])
    with pytest.raises(SystemExit) as stopped:
        common.launch(report.main, report.Args, report.PRESETS, report.__doc__)
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and "engine" not in captured.out  # nothing was sampled
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("critic_report.py: error: ")
    return line


def test_wrong_use_is_named(critics, base_policy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "calibration.json"
    of_two = Calibration([9.0], [0.0], 1.0, 0.5, 9, 24, common.fingerprint(critics[1]))
    path.write_text(of_two.to_json())
    policy, critic = ("--policies", base_policy), ("--critics", critics[0])
    for argv, words in (
        ((), ("no policy and critic", "python ppo_critic.py")),
        ((*policy, "--critics", "./nowhere"), ("--critics './nowhere'", "no such folder")),
        (("--policies", "./nowhere", *critic), ("--policies './nowhere'", "no such folder")),
        ((*policy, "--critics", base_policy), ("has no value head",)),
        ((*policy, "--critics", critics[0], base_policy), ("has no value head",)),
        ((*policy, *critic, "--calibration", str(path)), ("another critic",)),
        ((*policy, *critic, "--calibration", "none.json"), ("none.json", "no such file")),
        ((*policy, "--critics"), ("--critics",)),
        ((*policy, *critic, "--caps", "0"), ("--caps", "at least 1")),
        ((*policy, *critic, "--num-problems", "0"), ("--num-problems 0", "at least 1")),
        ((*policy, *critic, "--temperature", "0"), ("--temperature 0",)),
        ((*policy, *critic, "--max-response-tokens", "999"), ("1015", "256")),
        (("qwen-99b",), ("'qwen-99b'", "tiny", "qwen3-4b")),
        (("--critic", "x"), ("--critic", "--critics")),
    ):
        line = refused(capsys, monkeypatch, *argv)
        assert all(word in line for word in words), line
