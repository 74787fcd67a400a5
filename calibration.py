"""calibration: what turns the score of a frozen critic into a reward, fitted once.

The offsets, scale and threshold of RFPO (arXiv 2609.37119, sections 3.2 and E.5, Table 7), for
rfpo.py, which rewards with them (its critic_rewards is Eq. 2), and critic_report.py.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from common import UsageError, explained_variance, fingerprint, require, within_problem_auc


@dataclass(frozen=True)
class Calibration:
    """What turns a score into a reward: fitted once, on rollouts of the first policy."""

    edges: list[float]  # upper ends of the length bins, inclusive, in tokens
    offsets: list[float]  # b of each bin
    scale: float  # s
    threshold: float  # tau
    num_rollouts: int  # N
    cap: int = 0  # limit of a response when it was fitted, in tokens
    critic: str = ""  # fingerprint of the critic whose scores were fitted

    def offset(self, lengths):
        """b(l) of lengths [N], fp64 [N]; beyond the fitted range that of the nearest bin."""
        edges = torch.tensor(self.edges, dtype=torch.float64)
        bins = torch.searchsorted(edges, torch.as_tensor(lengths, dtype=torch.float64))
        return torch.tensor(self.offsets, dtype=torch.float64)[bins.clamp(max=len(edges) - 1)]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "Calibration":
        return Calibration(**json.loads(text))


def fit_calibration(scores, lengths, correct, num_bins=10, scale=1.0):
    """Offsets b, scale s and threshold tau [RFPO §3.2, Table 7, Algorithm 1].

    scores v, lengths (tokens), correct (0 or 1), each [N]. Bins end at the upper quantiles of the
    lengths; ties, as at the limit of a response, merge bins. scale "auto" finds the s at which
    short and long responses of a class score alike [RFPO App. E.5]. UsageError where one class is
    missing, where rollouts are fewer than bins, and where auto finds no s in [0, 4]."""
    v, length, y = (torch.as_tensor(x).double() for x in (scores, lengths, correct))
    y = y > 0.5
    require(len(v) >= num_bins, f"{len(v)} calibration rollouts are fewer than {num_bins} bins")
    require(
        0 < y.double().mean() < 1,
        f"all {len(v)} calibration rollouts are {'right' if y[0] else 'wrong'} (verdict cut at 0.5)"
        "; a threshold needs both: calibrate on easier or harder problems, or on more of them",
    )
    edges = torch.quantile(length, torch.arange(1, num_bins + 1, dtype=torch.float64) / num_bins)
    edges = edges.unique()
    bins = torch.searchsorted(edges, length)
    offsets = []
    for i in range(len(edges)):
        inside = bins == i
        deviations = [
            (v[inside & kind].mean() - v[kind].mean()).item()
            for kind in (y, ~y)
            if (inside & kind).any()
        ]  # a class that is missing here leaves the offset to the other
        # Between two tied lengths a bin can be empty: it goes with the one below.
        offsets.append(float(np.mean(deviations)) if deviations else offsets[-1])
    fitted = Calibration(edges.tolist(), offsets, 1.0, 0.0, len(v))
    b = fitted.offset(length)
    if scale == "auto":
        trend, rest = length_trend(v, length, y), length_trend(v - b, length, y)
        require(
            abs(trend - rest) >= 1e-6,
            f"--scale auto: the offsets do not change the length trend {trend:.3g}; use --scale 1",
        )
        scale = trend / (trend - rest)  # the trend is linear in s, and 0 here
        require(0 <= scale <= 4, f"--scale auto found {scale:.3g}, outside [0, 4]; use --scale 1")
    threshold = torch.quantile(v - scale * b, 1 - y.double().mean())
    return replace(fitted, scale=float(scale), threshold=float(threshold))


def length_trend(scores, lengths, correct):
    """D: how much higher short responses score than long ones (from their class's median length
    on), mean over the classes in which both exist [RFPO App. E.5]. All [N]; 0 where none has."""
    gaps = []
    for kind in (correct, ~correct):
        short = lengths < torch.quantile(lengths[kind], 0.5)
        if (kind & short).any() and (kind & ~short).any():
            gaps.append((scores[kind & short].mean() - scores[kind & ~short].mean()).item())
    return float(np.mean(gaps)) if gaps else 0.0


def critic_faults(scores, rewarded, correct, problem_ids) -> list[str]:
    """What disqualifies a critic as a reward, in words; empty for a usable one [RFPO App. E].

    Terminal scores, whether the response is rewarded, whether it is right, its problem: all [N], of
    calibration rollouts. The limits are ours; scores of prefixes are no substitute (Table 12)."""
    scores, correct = np.asarray(scores, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    tensors = map(torch.from_numpy, (scores, correct, np.ones(len(correct))))
    variance = explained_variance(*tensors)
    within, rate = within_problem_auc(scores, correct, problem_ids), correct.mean()
    precision = correct[np.asarray(rewarded)].mean() if any(rewarded) else 0.0
    measures = (
        (variance > 0, f"explained variance {variance:.3f} is not above 0"),
        (within >= 0.6, f"within-problem AUC {within:.3f} is not at least 0.6"),
        (
            precision >= rate + 0.05,
            f"precision {precision:.3f} is not 0.05 above the share of right answers, {rate:.3f}",
        ),
    )
    return [fault for passed, fault in measures if not passed]


def assess(scores, rewarded, correct, problem_ids, finished) -> tuple[list[str], str]:
    """The faults of a critic, and one line on the calibration rollouts; all [N]."""
    faults = critic_faults(scores, rewarded, correct, problem_ids)
    right, problem_ids = np.asarray(correct) > 0.5, np.asarray(problem_ids)
    shares = [right[problem_ids == p].mean() for p in np.unique(problem_ids)]
    mixed = sum(0 < share < 1 for share in shares)
    few = " (fewer than 10: a thin sample)" if mixed < 10 else ""
    return faults, (
        f"{len(right)} rollouts, {right.mean():.1%} right, {np.mean(finished):.1%} finished, "
        f"{mixed} problems with both outcomes{few}; agreement "
        f"{(np.asarray(rewarded) == right).mean():.1%}"
    )


def load_calibration(args, saved: str | None = None) -> Calibration:
    """The calibration in the file args.calibration, or in a checkpoint's JSON text. UsageError
    unless it was made for the critic args.critic and the limit args.max_response_tokens."""
    where = "--resume: the calibration" if saved else f"--calibration {args.calibration!r}"
    require(saved or Path(args.calibration).is_file(), f"{where}: no such file")
    try:
        calibration = Calibration.from_json(saved or Path(args.calibration).read_text())
    except (ValueError, TypeError) as error:
        raise UsageError(f"{where} is no calibration: {error}") from error
    b, edges = calibration.offsets, calibration.edges
    numbers = [*b, *edges, calibration.scale, calibration.threshold]
    whole = len(b) == len(edges) > 0 and all(isinstance(x, int | float) for x in numbers)
    require(
        whole and np.isfinite(numbers).all() and edges == sorted(edges),
        f"{where} is damaged: rising edges, an offset for each, scale and threshold, all numbers",
    )
    require(
        calibration.critic == fingerprint(args.critic),
        f"{where} belongs to another critic than {args.critic}; name its own, or calibrate anew",
    )
    require(
        calibration.cap == args.max_response_tokens,
        f"{where} was fitted at {calibration.cap} response tokens, and --max-response-tokens is "
        f"{args.max_response_tokens}; drop it to calibrate anew",
    )
    return calibration
