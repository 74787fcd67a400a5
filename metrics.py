"""metrics: what is measured on values, scores and texts. Pure functions; nothing trains on them.

Scripts import them from common."""

import math
import re

import numpy as np
from torch import Tensor

import verifier


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the entries where mask is nonzero; 0 if
    Var(returns) = 0. At most 1; 0 for a constant prediction, negative for a worse one."""
    keep = mask.bool()
    values, returns = values[keep].double(), returns[keep].double()
    if returns.numel() == 0 or returns.max() == returns.min():
        return 0.0
    return float(1 - (returns - values).var(unbiased=False) / returns.var(unbiased=False))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right): 1 - C(n-c, k) / C(n, k) (Chen et
    al. 2021). Raises ValueError when k exceeds num_samples, where no such estimate exists."""
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"pass_at_k needs 1 <= k <= num_samples, got {k=}, {num_samples=}, {num_correct=}"
        )
    # A product of ratios, for factorials overflow; a factor is 0 where every k-subset is right.
    return 1.0 - math.prod((num_samples - num_correct - i) / (num_samples - i) for i in range(k))


def pass_at_k_plugin(num_samples: int, num_correct: int, k: int) -> float:
    """The plug-in estimate 1 - (1 - c/n)^k; defined for every k, and biased downward."""
    return 1.0 - (1.0 - num_correct / num_samples) ** k


def majority_vote(answers: list[str | None], multiple_choice: bool = False) -> str | None:
    """The most frequent answer. An answer joins the first class whose first member it equals (by
    the verifier, of options by their letter); None (no answer) never wins; ties go to the class
    seen first."""
    classes: list[tuple[str, int]] = []
    for answer in answers:
        if answer is None:
            continue
        for i, (first, count) in enumerate(classes):
            if answer == first or verifier.verify(f"\\boxed{{{answer}}}", first, multiple_choice):
                classes[i] = (first, count + 1)
                break
        else:
            classes.append((answer, 1))
    return max(classes, key=lambda c: c[1])[0] if classes else None


def bootstrap_means(scores, seed, num_resamples=10_000) -> np.ndarray:
    """Means over problems drawn with replacement, [num_resamples, M], of scores [P, M]: M numbers
    per problem, resampled together. seed: an int or a list of them; the same gives the same."""
    scores, rng = np.asarray(scores, dtype=np.float64), np.random.default_rng(seed)
    size = len(scores)
    return np.stack([scores[rng.integers(size, size=size)].mean(0) for _ in range(num_resamples)])


def auc(scores, correct) -> float:
    """Area under the ROC curve: P(a right one scores above a wrong one), ties count half (the
    Mann-Whitney statistic). scores, correct [N]. NaN when one class is empty."""
    scores, correct = np.asarray(scores, dtype=np.float64), np.asarray(correct).astype(bool)
    num_right, num_wrong = int(correct.sum()), int((~correct).sum())
    if num_right == 0 or num_wrong == 0:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # tied scores share their mean rank
    return float((ranks[correct].sum() - num_right * (num_right + 1) / 2) / (num_right * num_wrong))


def within_problem_auc(scores, correct, problem_ids) -> float:
    """Mean AUC over the problems with both outcomes and at least 3 rollouts; NaN where none is.
    It asks whether scores rank answers, not whether they rank problems."""
    scores, correct, problem_ids = map(np.asarray, (scores, correct, problem_ids))
    members = [problem_ids == p for p in np.unique(problem_ids)]
    aucs = [auc(scores[m], correct[m]) for m in members if m.sum() >= 3]
    aucs = [a for a in aucs if not math.isnan(a)]
    return float(np.mean(aucs)) if aucs else float("nan")


def best_cut(scores, correct) -> float:
    """The cut at which `score > cut` has the highest balanced accuracy: halfway between two
    neighbouring scores, the lowest where several are equally good. NaN when one class is empty."""
    scores, correct = np.asarray(scores, dtype=np.float64), np.asarray(correct).astype(bool)
    if correct.all() or not correct.any():
        return float("nan")
    levels, inverse = np.unique(scores, return_inverse=True)
    right = np.bincount(inverse, correct) / correct.sum()  # share of its class at each level
    wrong = np.bincount(inverse, ~correct) / (~correct).sum()
    gain = np.cumsum(wrong) - np.cumsum(right)  # of cutting just above a level
    best = int(np.argmax(gain[:-1])) if len(levels) > 1 else 0
    return float((levels[best] + levels[min(best + 1, len(levels) - 1)]) / 2)


def restatements(text):
    """How often a response states its final answer: in a box, after "answer is", or after an = that
    ends a sentence; places do not overlap [RFPO App. F.3]. 0 where it has no answer."""
    answer = verifier.extract_answer(text)
    if answer is None:
        return 0
    exact = re.escape(answer) + r"(?!\w|[.,/]\d)"  # not the 4 of 42, 4.5, 4,000 or 4/3
    boxed = rf"\\boxed\s*\{{\s*{re.escape(answer)}\s*\}}"
    stated = rf"answer\s*(?:is\s*:?|:)(?:\s|\$|\*|\\\(|\\\[)*(?:{boxed}|{exact})"
    closing = rf"=\s*\$*{exact}\$*\s*(?=[.!?]|\n|$)"
    return len(re.findall(f"{stated}|{boxed}|{closing}", text, re.IGNORECASE))


def repetition(text, size=60):
    """Share of a text's character shingles of this size that stood in it before [RFPO Table 14]."""
    shingles = [text[i : i + size] for i in range(len(text) - size + 1)]
    return 1 - len(set(shingles)) / len(shingles) if shingles else 0.0


def final_box(text) -> str:
    """A text from its last box on; empty where it has none."""
    return text[text.rindex("\\boxed") :] if "\\boxed" in text else ""


def statement_stats(texts) -> dict[str, float]:
    """Sums over texts of how often each states its answer and boxes one, whether it never closes
    its reasoning block, and how much of it repeats itself [RFPO Table 14]."""
    return {
        "text/restatements": sum(map(restatements, texts)),
        "text/boxed_answers": sum(text.count("\\boxed") for text in texts),
        "text/unclosed_frac": sum("</think>" not in text for text in texts),
        "text/repetition": sum(map(repetition, texts)),
    }


def left_band(history, num_early=20, width=4.0) -> bool:
    """Whether the last of the numbers, one per step, lies above the mean of the first num_early by
    more than width of their standard deviations, and by half of that mean: a slow drift with little
    noise is no alarm. False until there are more than num_early."""
    early = np.array(history[:num_early])
    return len(history) > num_early and (
        history[-1] > early.mean() + max(width * early.std(), early.mean() / 2)
    )


def rebounded(history, factor=1.1, first=21) -> bool:
    """Whether the last of the numbers, one per step, stands above the lowest so far by more than
    this factor; False before step `first`."""
    return len(history) >= first and history[-1] > factor * min(history)
