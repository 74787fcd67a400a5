"""The closing table and its trend lines."""

import json

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
