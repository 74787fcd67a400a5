"""The closing table, what the evaluations come to, and its trend lines."""

import json
import math

import numpy as np
import pytest

import pictures


def test_trend_is_the_least_squares_slope_per_100_steps_and_its_t():
    # y = 0, 1, 1, 2 at x = 0..3: slope 0.6, residual sum of squares 0.2, standard error sqrt(0.02)
    slope, t = pictures.trend([0, 1, 2, 3], [0, 1, 1, 2])
    assert slope == pytest.approx(60)
    assert t == pytest.approx(0.6 / 0.02**0.5)
    assert pictures.trend([1, 2, 3], [0.5, 0.5, 0.5]) == (0.0, 0.0)
    with_gap = pictures.trend([0, 1, 2, 9, 3], [0, 1, 1, float("nan"), 2])
    assert with_gap == pytest.approx((slope, t))


def test_summary_prints_the_trends_of_a_frozen_critic(tmp_path):
    lines = [
        {"step": s, "rfpo/agreement": 0.9, "value/auc": 0.9 + 0.001 * s, "rfpo/best_cut": 0.5}
        for s in range(1, 6)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert "value/auc: slope +0.1 per 100 steps" in pictures.summary(tmp_path)
    for line in lines:  # a critic that is trained goes stale in no such sense
        del line["rfpo/agreement"]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert "per 100 steps" not in pictures.summary(tmp_path)


def written(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return pictures.summary(folder)


def cells(text, key):
    """The columns of a row of the table of evaluations."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"{key} ") and "(" in line]
    return row.replace(" (", "(").split()[1:]


def test_expected_maximum_of_normal_draws():
    # 0; 1 / sqrt(pi); 3 / (2 sqrt(pi)); for 4, 5 and 10 the tables of normal order statistics
    for m, want in [
        (1, 0.0),
        (2, 1 / math.sqrt(math.pi)),
        (3, 1.5 / math.sqrt(math.pi)),
        (4, 1.02938),
        (5, 1.16296),
        (10, 1.53875),
    ]:
        assert pictures.expected_maximum(m) == pytest.approx(want, abs=1e-3)


def test_app_c_selection_corrected_peak_by_hand():
    # Differences 0.3, -0.1, 0.1: mean 0.1, squares about it 0.04 + 0.04 + 0 over 2: std 0.2. So
    # sigma = 0.2 / sqrt(2), and of four draws the maximum is expected at 1.02938 sigma.
    want = 0.5 - 0.2 / math.sqrt(2) * 1.02938
    assert pictures.selection_corrected_peak([0.2, 0.5, 0.4, 0.5]) == pytest.approx(want, abs=2e-4)
    assert pictures.selection_corrected_peak([0.1, 0.2, 0.3]) == pytest.approx(0.3)  # no noise
    assert math.isnan(pictures.selection_corrected_peak([0.1, 0.3]))
    # On a flat curve with noise the corrected peak is its level: the correction is no more, no less
    rng = np.random.default_rng(0)
    peaks = [
        pictures.selection_corrected_peak(0.3 + 0.02 * rng.normal(size=31)) for _ in range(400)
    ]
    assert np.mean(peaks) == pytest.approx(0.3, abs=0.002)


def test_tables_3_4_8_peak_final_last_ten_and_window(tmp_path):
    # Steps 0, 10, ..., 320. The starting policy is the best and does not count; the peak is at 310.
    values = {0: 0.9, **{step: step / 1000 for step in range(10, 310, 10)}, 310: 0.5, 320: 0.25}
    text = written(tmp_path, [{"step": s, "eval/avg_at_k": v} for s, v in values.items()])
    peak, final, last_ten, window, corrected = cells(text, "eval/avg_at_k")
    assert peak == "0.5(310)" and final == "0.25"
    # steps 230 to 320: 230 + ... + 300 = 2120, and 500 + 250
    assert float(last_ten) == pytest.approx((2.12 + 0.75) / 10)
    assert float(window) == pytest.approx(0.155)  # mean of 10, 20, ..., 300
    assert "mean to step 300" in text
    everything = [v for s, v in values.items() if s > 0]
    assert float(corrected) == pytest.approx(
        pictures.selection_corrected_peak(everything), abs=1e-4
    )


def test_the_first_of_equal_peaks_and_every_suite_have_their_row(tmp_path):
    def line(step, x):
        return {"step": step, "eval/avg_at_k": x, "eval/aime26/pass_at_k": x / 2}

    text = written(tmp_path, [line(0, 0.1), line(5, 0.4), line(10, 0.4)])
    assert cells(text, "eval/avg_at_k") == ["0.4(5)", "0.4", "0.4", "0.4"]  # no noise to be seen
    assert cells(text, "eval/aime26/pass_at_k")[0] == "0.2(5)"
    assert "mean to step 10" in text


def test_fig3f_accuracy_against_length_by_hand(tmp_path):
    # y = 0, 0.1, 0.1, 0.2 at 0, 1, 2, 3 thousand tokens: slope 0.06 a thousand; residuals 0.002 of
    # 0.02, so R2 = 0.9
    points = [(0, 0.0), (1000, 0.1), (2000, 0.1), (3000, 0.2)]
    lines = [
        {"step": i, "eval/response_tokens_mean": x, "eval/avg_at_k": y}
        for i, (x, y) in enumerate(points)
    ]
    text = written(tmp_path, lines)
    assert "accuracy against length, 4 evaluations: slope +6 per 100,000 tokens, R2 0.90" in text
    assert pictures.slope_and_r2([1, 2, 3], [0.5, 0.5, 0.5]) == (0.0, 0.0)
    assert pictures.slope_and_r2([1, 2, 3], [3, 2, 1]) == pytest.approx((-1.0, 1.0))
    for line in lines:
        line["eval/response_tokens_mean"] = 7.0  # no line goes through one length
    assert "against length" not in written(tmp_path, lines)


def test_a_run_without_evaluations_has_no_rows_of_them(tmp_path):
    text = written(tmp_path, [{"step": s, "reward/mean": 0.5} for s in (1, 2, 3)])
    assert "peak" not in text and "against length" not in text and "reward/mean" in text
    one = [{"step": 0, "eval/avg_at_k": 0.1}, {"step": 9, "eval/avg_at_k": 0.2}]
    assert "peak" not in written(tmp_path, one)


def write_run(folder, lines):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def drawn(monkeypatch, folders, **settings):
    """The figure that curves draws."""
    figures = []
    with monkeypatch.context() as patch:
        patch.setattr(pictures.plt, "close", figures.append)
        pictures.curves(folders, folders[0] / "x.png", **settings)
    assert (folders[0] / "x.png").stat().st_size > 0
    return {axis.get_title(): axis for axis in figures[0].axes}


def test_by_seed_is_the_mean_in_a_band_from_least_to_largest(tmp_path, monkeypatch):
    def of(*values):
        return [{"step": i + 1, "reward/mean": value} for i, value in enumerate(values)]

    folders = [
        write_run(tmp_path / "a-seed1", of(0.5, 0.0, 7.0)),  # step 3 is of one seed only
        write_run(tmp_path / "a-seed12", of(0.0, 1.0)),
        write_run(tmp_path / "b-seed1", of(0.25, 0.75)),
    ]
    axis = drawn(monkeypatch, folders, by_seed=True)["Reward"]
    a, b = axis.lines
    assert (a.get_label(), b.get_label()) == ("a (2 seeds)", "b")
    assert [[*a.get_xdata()], [*a.get_ydata()]] == [[1, 2], [0.25, 0.5]]
    assert [*b.get_ydata()] == [0.25, 0.75]
    (band,) = axis.collections
    assert {(1, 0.0), (1, 0.5), (2, 0.0), (2, 1.0)} == {
        (x, y) for x, y in band.get_paths()[0].vertices
    }
    plain = drawn(monkeypatch, folders)["Reward"]
    assert [x.get_label() for x in plain.lines] == ["a-seed1", "a-seed12", "b-seed1"]
    assert not plain.collections


def test_runs_of_one_name_in_two_places_are_both_drawn(tmp_path, monkeypatch):
    lines = [{"step": 1, "reward/mean": 0.5}]
    folders = [write_run(tmp_path / place / "run", lines) for place in ("here", "there")]
    axis = drawn(monkeypatch, folders)["Reward"]
    assert [x.get_label() for x in axis.lines] == [str(folder) for folder in folders]


def test_accuracy_against_length_has_a_point_per_evaluation_and_a_line(tmp_path, monkeypatch):
    # x = 0, 1, 2, 3 and y = 0, 1, 1, 2: slope 0.6, intercept 0.1
    lines = [
        {"step": x, "eval/response_tokens_mean": x, "eval/avg_at_k": y}
        for x, y in enumerate([0, 1, 1, 2])
    ]
    axis = drawn(monkeypatch, [write_run(tmp_path / "run", lines)])["Accuracy against length"]
    points, fit = axis.lines
    assert [[*points.get_xdata()], [*points.get_ydata()]] == [[0, 1, 2, 3], [0, 1, 1, 2]]
    assert [*fit.get_xdata()] == [0, 3] and [*fit.get_ydata()] == pytest.approx([0.1, 1.9])
