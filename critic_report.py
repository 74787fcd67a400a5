"""critic_report: what a frozen critic knows. A tool; it trains nothing.

Paper: RFPO (arXiv 2609.37119), section 3.1, appendices E and F. Samples fresh rollouts, lets the
verifier judge them, reads a critic's values of all their states in one forward, prints tables, and
writes <out>/report.json and <out>/report.png.

The newest tiny pair:    python critic_report.py
A fitted calibration:    python critic_report.py --calibration runs/rfpo-tiny-seed1/calibration.json
Measurement plane:       python critic_report.py --critics A B C --policies P Q    [RFPO Table 10]
Real caps, truncation:   python critic_report.py --caps 8 12 24                    [RFPO Table 12]

Measures are pure functions: values [N, T + 1] are of all states; scores v, their last, and the rest
are [N]. Only the first policy with the first critic is reported in full.
"""

import json
import math
import re
from collections import namedtuple
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from matplotlib.figure import Figure

import common
import rfpo
import tiny
from calibration import critic_faults, fit_calibration, load_calibration
from common import auc, explained_variance, require, within_problem_auc
from models import Policy


@dataclass
class Args:
    policies: tuple[str, ...] = ("tiny-pi_0",)  # whose rollouts: hub ids, folders, as in rfpo.py
    critics: tuple[str, ...] = ("tiny-critic",)  # folders, as in rfpo.py; the first is deployed
    out: str = "runs/critic_report"  # folder of report.json and report.png; old ones are replaced
    seed: int = 101  # of prompt order and sampling; another one than that of the run
    num_problems: int = 64  # prompts
    samples_per_problem: int = 8  # responses per prompt
    prefixes: tuple[int, ...] = ()  # of the prefix scan, tokens; default: 13 up to the longest
    caps: tuple[int, ...] = ()  # limits to sample under, against truncation to them; none: skip
    calibration: str | None = None  # calibration.json to judge on these rollouts; default: fit one
    num_bins: int = 10  # length bins of the offsets b
    scale: float | Literal["auto"] = 1.0  # factor s on b; auto: no length trend in either class
    dataset: str = "tiny"  # tiny, a known name, a jsonl/parquet file, a hub id
    prompt_column: str | None = None  # column of the prompt; dotted names reach into structs
    answer_column: str | None = None  # column of the gold answer; dotted names reach into structs
    prompt_template: str | None = None  # text around a plain prompt, with {problem} in it
    chat_template: bool = True  # put prompts into the chat template of the tokenizer, if any
    max_prompt_tokens: int = 16  # longer prompts are dropped when the data is loaded, with a count
    max_response_tokens: int = 24  # the cap that the pair is deployed at
    reward: str = "tiny.py:reward"  # verifier, or path.py:function(prompts, responses, golds)
    temperature: float = 1.0  # of sampling
    rollout_engine: Literal["auto", "hf", "vllm"] = "auto"  # auto: vllm where it and a GPU are
    tensor_parallel: int = 1  # ranks that share one vLLM engine
    engine_memory: float = 4.0  # vLLM's share of GPU memory (0 to 1); on a CPU, GB of KV cache
    max_context: int | None = None  # positions of the model, tokens; default: as published
    tokens_per_microbatch: int = 4096  # padded tokens per forward

    activation_checkpointing, cpu_offload, track, runs_dir = False, False, "", "runs"  # for common
    model = property(lambda self: self.policies[0])
    critic = property(lambda self: self.critics[0])
    eval_max_tokens = property(lambda self: max(self.max_response_tokens, *self.caps, 0))


SHARED = {field.name for field in fields(Args)} - {"seed"}
PRESETS = {  # those of rfpo.py, at as many rollouts as it calibrates on
    name: Args((run.policy,), (run.critic,), **{k: v for k, v in vars(run).items() if k in SHARED})
    for name, run in rfpo.PRESETS.items()
}


def ranking(scores, lengths, correct, problem_ids, cap, threshold):
    """A row of [RFPO Table 10], and more: AUCs over all, truncated (within 1 % of the cap) and
    other responses, within problems too; that of "shorter is correct"; tau* is best_cut."""
    v, length, ids = map(np.asarray, (scores, lengths, problem_ids))
    y, cut, row = np.asarray(correct, dtype=bool), length >= 0.99 * cap, {}
    for name, kept in (("", cut | ~cut), ("_truncated", cut), ("_finished", ~cut)):
        row[f"auc{name}"] = auc(v[kept], y[kept])
        row[f"within_auc{name}"] = within_problem_auc(v[kept], y[kept], ids[kept])
    row |= {"shorter_within_auc": within_problem_auc(-length, y, ids)}
    row |= worth(v, y, threshold) | {"best_cut": common.best_cut(v, y)}
    row |= {"outside_frac": mean((v < 0) | (v > 1)), "score_gap": mean(v) - mean(y)}
    return row | {"right_frac": mean(y), "truncated_frac": mean(cut)}


def worth(scores, correct, threshold):
    """Explained variance of outcomes, and precision: share right where v > threshold (App. E)."""
    v, y = np.asarray(scores), np.asarray(correct, dtype=bool)
    tensors = (torch.as_tensor(x.astype(np.float64)) for x in (v, y, np.ones(len(v))))
    return {"explained_variance": explained_variance(*tensors), "precision": mean(y[v > threshold])}


def histograms(scores, correct, low=-0.5, high=1.5, num_bins=40):
    """Percent of the right and of the wrong responses by v [RFPO Fig. 3a-c]; end bins are open."""
    v, y = np.clip(np.asarray(scores, dtype=np.float64), low, high), np.asarray(correct, dtype=bool)
    edges = np.linspace(low, high, num_bins + 1)
    right, wrong = (100 * np.histogram(v[k], edges)[0] / max(k.sum(), 1) for k in (y, ~y))
    return {"edges": edges.tolist(), "right": right.tolist(), "wrong": wrong.tolist()}


def bin_table(scores, lengths, correct, calibration):
    """The length bins of a calibration [RFPO Table 7], and what these responses do in them."""
    v, y, top = np.asarray(scores), np.asarray(correct, dtype=bool), len(calibration.edges) - 1
    bins, rows = np.searchsorted(calibration.edges, np.asarray(lengths)).clip(max=top), []
    for i, (edge, b) in enumerate(zip(calibration.edges, calibration.offsets, strict=True)):
        row = {"upper_edge": edge, "b": b, "responses": int((bins == i).sum())}
        row |= {"right_frac": mean(y[bins == i]), "score_right": mean(v[(bins == i) & y])}
        rows.append(row | {"score_wrong": mean(v[(bins == i) & ~y])})
    return rows


def rule(scores, lengths, correct, problem_ids, calibration):
    """What 1[v - s b > tau] does [RFPO Eq. 2]: agreement with the verifier, balanced over classes
    too, and how score and length correlate in each, before and after debiasing [RFPO App. F]."""
    v, length, y = np.asarray(scores), np.asarray(lengths), np.asarray(correct, dtype=bool)
    rewarded = rfpo.critic_rewards(v, length, calibration).numpy() > 0.5
    debiased = rfpo.critic_rewards(v, length, calibration, "continuous").numpy()
    same, found = rewarded == y, {"threshold": calibration.threshold, "scale": calibration.scale}
    found |= {"agreement": mean(same), "balanced_agreement": (mean(same[y]) + mean(same[~y])) / 2}
    found |= {"reward_gap": mean(rewarded) - mean(y), "auc_debiased": auc(debiased, y)}
    found["debiasing_strength"] = debiasing_strength(v, length, y, problem_ids, calibration)
    for name, x in (("length", v), ("length_debiased", debiased)):
        found[f"{name}_right"] = correlation(x[y], length[y])
        found[f"{name}_wrong"] = correlation(x[~y], length[~y])
    return found | {"faults": "; ".join(critic_faults(v, rewarded, y, problem_ids)) or "none"}


def debiasing_strength(scores, lengths, correct, problem_ids, calibration) -> float:
    """How strongly a calibration acts [RFPO App. F]: the spread of s b(l) within a problem, mean
    over the problems with both outcomes (NaN without any), over mean v of right minus mean v of
    wrong responses. The paper does not define its spread, nor over which responses it takes the
    gap: here the population standard deviation, and all of them."""
    v, y = np.asarray(scores, dtype=np.float64), np.asarray(correct) > 0.5
    ids, b = np.asarray(problem_ids), calibration.scale * calibration.offset(lengths).numpy()
    spreads = [b[k].std() for k in (ids == p for p in np.unique(ids)) if 0 < y[k].mean() < 1]
    return float(np.mean(spreads) / (v[y].mean() - v[~y].mean())) if spreads else math.nan


def between_problem_share(scores, problem_ids) -> float:
    """Share of the variance of scores that the problem explains [RFPO Table 11]; NaN without it."""
    v = np.asarray(scores, dtype=np.float64)
    _, problem, sizes = np.unique(problem_ids, return_inverse=True, return_counts=True)
    means = (np.bincount(problem, v) / sizes)[problem]
    return float(means.var() / v.var()) if v.var() > 0 else math.nan


def prefix_scan(values, lengths, finished, correct, problem_ids, prefixes):
    """A row of [RFPO Table 11] per prefix length: values against the outcome of the whole response.
    One that ended earlier keeps its terminal value. Still running ("no answer yet"): longer than
    the prefix, or cut off there; with the number of problems that this AUC averages."""
    y, ids, rows = np.asarray(correct, dtype=bool), np.asarray(problem_ids), []
    for prefix in prefixes:
        # Equal prefixes tie: their values differ by float noise alone, which must not rank them.
        v = np.round(prefix_values(values, lengths, prefix), 5)
        on = ~(np.asarray(finished, dtype=bool) & (np.asarray(lengths) <= prefix))
        groups = [y[on & (ids == p)] for p in np.unique(ids[on])]
        row = {"prefix": prefix, "auc": auc(v, y), "within_auc": within_problem_auc(v, y, ids)}
        row["within_auc_running"] = within_problem_auc(v[on], y[on], ids[on])
        row["running_problems"] = sum(len(g) >= 3 and bool(0 < g.mean() < 1) for g in groups)
        row["between_share"] = between_problem_share(v, ids)
        rows.append(row | {"finished_frac": 1 - mean(on)})
    return rows


def prefix_values(values, lengths, prefix):
    """[N]: the value after `prefix` tokens or at the end, whichever is first."""
    return np.asarray(values)[np.arange(len(values)), np.minimum(lengths, prefix)]


def truncation_proxy(values, lengths, finished, correct, cap, threshold):
    """Instead of sampling under a cap: cut to it, keep the verdict on all of it [RFPO Table 12]."""
    done = np.asarray(finished, dtype=bool) & (np.asarray(lengths) <= cap)
    scores = prefix_values(values, lengths, cap)
    return {"finished_frac": mean(done)} | worth(scores, correct, threshold)


def plane_rows(cells):
    """Each critic's cells of the measurement plane, averaged over policies [RFPO Table 10] (NaN
    left out), and r of explained variance and within-problem AUC across critics."""
    keys, rows = [key for key in cells[0] if key not in ("critic", "policy")], []
    for critic in dict.fromkeys(cell["critic"] for cell in cells):
        own = [cell for cell in cells if cell["critic"] == critic]
        means = {key: mean([x[key] for x in own if not math.isnan(x[key])]) for key in keys}
        rows.append({"critic": critic} | means)
    columns = ([row[key] for row in rows] for key in ("explained_variance", "within_auc"))
    return rows, correlation(*columns)


def correlation(x, y) -> float:
    """Pearson's r; NaN for fewer than three points (two always lie on a line) or a constant."""
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and np.ptp(x) * np.ptp(y) else math.nan


def mean(x) -> float:
    return float(np.mean(x)) if len(x) else math.nan


def read_chain(prompt, words):
    """The equations of a tiny response as (position, kind) pairs: false, misread (true, but not of
    the last result and the next digit), or true; and whether it has too few or too many."""
    (total, *digits), found = prompt.split()[:-1], []
    for place, word in enumerate(words):
        if match := re.fullmatch(r"(\d)\+(\d)=(\d)", word):
            first, second, result = match.groups()
            ours = [first, second] == [total, *digits[len(found) :][:1]]
            false = (int(first) + int(second) - int(result)) % tiny.MODULUS
            found.append((place, "false" if false else "true" if ours else "misread"))
            total = result
    return found, len(found) != len(digits)


def tiny_knowledge(prompts, words, values, lengths, correct, problem_ids):
    """What a critic ranks by in the tiny world: how often it scores a clean response above a flawed
    one (AUC; 0.5 is blind), and how far V drops over an equation, up to the first flaw."""
    v, ids = prefix_values(values, lengths, np.max(lengths)), np.asarray(problem_ids)
    y, read = np.asarray(correct, dtype=bool), list(map(read_chain, prompts, words))
    chain = np.array([bool(found) for found, _ in read])
    false = np.array(["false" in dict(found).values() for found, _ in read])
    slip = np.array([odd or "misread" in dict(found).values() for found, odd in read])
    flaws, drops = [], {"true": [], "false": [], "misread": []}
    for flaw, flawed, kept in (
        ("false equation, among chains", false, chain),
        ("misread or left out, among true chains", slip, chain & ~false),
        ("wrong answer, among chains", ~y, chain),
        ("wrong answer, among direct ones", ~y, ~chain),
        ("direct answer, among all", ~chain, chain | ~chain),
    ):
        x, bad = (v[kept], ~flawed[kept]), flawed & kept
        row = {"flaw": flaw, "auc": auc(*x), "within_auc": within_problem_auc(*x, ids[kept])}
        row |= {"of": int(kept.sum()), "flawed": int(bad.sum()), "flawed_right": mean(y[bad])}
        flaws.append(row | {"flawed_score": mean(v[bad]), "clean_score": mean(v[kept & ~flawed])})
    for (found, _), row in zip(read, np.asarray(values), strict=True):
        for place, kind in found:
            drops[kind].append(row[place] - row[place + 1])
            if kind != "true":
                break
    falls = [{"equation": k, "num": len(x), "drop_of_v": mean(x)} for k, x in drops.items()]
    return {"tiny_flaws": flaws, "tiny_drops": falls}


Rollouts = namedtuple("Rollouts", "groups lengths finished correct problem_ids")  # arrays are [N]


def check(args: Args) -> None:
    """Refuse wrong settings before anything is sampled."""
    limits = {"seed": 0, "num_problems": 1, "samples_per_problem": 1, "max_response_tokens": 1}
    limits |= {"num_bins": 1, "caps": 1, "prefixes": 0, "temperature": 0.01}
    for name, least in limits.items():
        flag, value = f"--{name.replace('_', '-')}", vars(args)[name]
        require(np.min(value, initial=1000) >= least, f"{flag} {value} must be at least {least}")
    require(args.policies and args.critics, "--policies and --critics need one each, or more")
    for folder in args.policies + args.critics:
        common.resolve_model(folder, "--policies" if folder in args.policies else "--critics")


def roll(args, policy, drawn, reward_function, tokenizer, accelerator):
    """Judged rollouts of a policy, {cap: Rollouts}; of the first one under all. A collective."""
    caps = args.max_response_tokens, *(args.caps if policy == args.model else ())
    args = replace(args, policies=(policy,))
    module = Policy(common.load_lm(args)).requires_grad_(False).to(accelerator.device)
    engine, found = common.make_engine(args, module, tokenizer, accelerator), {}
    for cap in dict.fromkeys(caps):
        sampling, seeds = common.Sampling(cap, args.temperature), (args.seed, 4, cap)
        groups = common.sample(engine, drawn, args.samples_per_problem, sampling, *seeds)
        groups = common.gather_groups(common.judge(groups, reward_function, tokenizer), engine)
        pairs = [(g, *x) for g in groups for x in zip(g.responses, g.correct, strict=True)]
        rows = [(len(r.token_ids), r.finished, c > 0.5, g.number) for g, r, c in pairs]
        found[cap] = Rollouts(groups, *map(np.array, zip(*rows, strict=True)))
    engine.sleep()  # vLLM's memory goes to the next policy
    return found


def state_values(critic, rollouts, args, tokenizer, accelerator):
    """Values of all states [N, T + 1], 0 beyond each response. A collective."""
    size, longest = len(rollouts.lengths), int(rollouts.lengths.max())
    batch = common.make_batch(rollouts.groups, size, tokenizer.pad_token_id, accelerator)
    values, _ = common.read_values(critic, batch, args, accelerator)  # [b, T + 1], of my rows
    values = F.pad(values, (0, longest + 1 - values.shape[1])).cpu().numpy()
    whole = dict(gather_object(list(zip(batch.rows.tolist(), values, strict=True))))
    return np.stack([whole[row] for row in range(size)])


def pair_report(args, fitted, under, values, tokenizer):
    """What is reported of one pair alone, from {cap: Rollouts} and {cap: values}."""
    cap, x = args.max_response_tokens, under[args.max_response_tokens]
    scores, outcome = prefix_values(values[cap], x.lengths, cap), (x.lengths, *x[3:])
    if fitted is None:
        fitted = fit_calibration(scores, x.lengths, x.correct, args.num_bins, args.scale)
        fitted = replace(fitted, cap=cap, critic=common.fingerprint(args.critic))
    report = {"pair": rule(scores, *outcome, fitted), "calibration": asdict(fitted), "caps": []}
    report["bins"] = bin_table(scores, x.lengths, x.correct, fitted)
    prefixes = args.prefixes or np.linspace(0, x.lengths.max(), 13).astype(int).tolist()
    report["prefix_scan"] = prefix_scan(values[cap], *x[1:], sorted(set(prefixes)))
    for limit in sorted(set(args.caps)):  # a policy does not know its cap; the verdicts differ
        y, (_, *whole, _) = under[limit], under[max(args.caps)]
        real = worth(prefix_values(values[limit], y.lengths, limit), y.correct, fitted.threshold)
        proxy = truncation_proxy(values[max(args.caps)], *whole, limit, fitted.threshold)
        row = {"cap": limit, "finished_frac": mean(y.finished)} | real
        report["caps"].append(row | {f"proxy_{key}": number for key, number in proxy.items()})
    if args.dataset == "tiny":
        rows = [(group.problem.prompt, r.token_ids) for group in x.groups for r in group.responses]
        words = [tokenizer.convert_ids_to_tokens(ids.tolist()) for _, ids in rows]
        report |= tiny_knowledge([prompt for prompt, _ in rows], words, values[cap], *outcome)
    return report


def main(args: Args, preset: str) -> None:
    check(args)
    accelerator = common.make_accelerator(args)
    tokenizer, cap = common.load_tokenizer(args.model), args.max_response_tokens
    for name in args.critics:  # a wrong one is refused before anything is sampled
        common.critic_config(replace(args, critics=(name,)), tokenizer)
    fitted = load_calibration(args) if args.calibration else None
    problems = common.load_dataset(args.dataset, "train", args, tokenizer)
    drawn = common.draw_problems(problems, 0, args.num_problems, args.seed)
    tools = common.load_reward(args.reward), tokenizer, accelerator
    samples = {policy: roll(args, policy, drawn, *tools) for policy in args.policies}
    report, cells, shapes = {}, [], []
    for name in args.critics:
        critic = common.load_critic(replace(args, critics=(name,)), tokenizer)
        critic = common.freeze(critic, accelerator)
        for policy, under in samples.items():
            caps = [cap] if report else under
            values = {c: state_values(critic, under[c], args, *tools[1:]) for c in caps}
            report = report or pair_report(args, fitted, under, values, tokenizer)
            who, x = {"critic": name, "policy": policy}, under[cap]
            scores = prefix_values(values[cap], x.lengths, cap)
            row = scores, x.lengths, x.correct, x.problem_ids, cap, report["pair"]["threshold"]
            cells.append(who | ranking(*row))
            shapes.append(who | histograms(scores, x.correct))
    report |= {"cells": cells, "histograms": shapes, "args": asdict(args)}
    report["plane"], report["pair"]["plane_correlation"] = plane_rows(cells)
    if accelerator.is_main_process:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        strict = json.loads(json.dumps(report), parse_constant=lambda _: None)  # null for NaN
        (folder / "report.json").write_text(json.dumps(strict, indent=1))
        show(report)
        draw(report, folder / "report.png")
        print(f"\n{folder / 'report.json'}, {folder / 'report.png'}")


def short(x):
    return "/".join(Path(x).parts[-2:]) if isinstance(x, str) else f"{x:.4g}"


def show(report):
    """Print the tables of a report (lists of rows with the same keys), on their side where wide."""
    for name, rows in (report | {"pair": [report["pair"]], "histograms": []}).items():
        if isinstance(rows, list) and rows and (name != "plane" or len(report["cells"]) > 1):
            cells = [list(rows[0]), *(list(map(short, row.values())) for row in rows)]
            cells = list(zip(*cells, strict=True)) if len(cells[0]) > 8 else cells
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            print("", name, *("  ".join(map(str.rjust, x, widths)) for x in cells), sep="\n")


CURVES = {  # tables in the picture: the column of the x-axis, and those of the lines
    "bins": "upper_edge score_right score_wrong right_frac b",
    "prefix_scan": "prefix auc within_auc within_auc_running finished_frac",
    "plane": "critic auc within_auc explained_variance",
    "caps": "cap explained_variance proxy_explained_variance precision proxy_precision",
    "tiny_flaws": "flaw auc within_auc",
}


def draw(report, path):
    """report.png: histograms of up to three cells, and a panel for each table of CURVES."""
    panels = [("histogram", cell) for cell in report["histograms"][:3]]
    panels += [(name, report[name]) for name in CURVES if len(report.get(name, [])) > 1]
    height = -(-len(panels) // 3)
    figure = Figure(figsize=(17, 4.2 * height), layout="constrained")
    for i, (name, rows) in enumerate(panels):
        axis = figure.add_subplot(height, 3, i + 1)
        if name == "histogram":
            for kind in ("right", "wrong"):
                axis.stairs(rows[kind], rows["edges"], fill=True, alpha=0.5, label=kind)
            axis.axvline(report["calibration"]["threshold"], color="k", ls="--", label="tau")
            axis.set_title(f"{short(rows['critic'])} on\n{short(rows['policy'])}", fontsize=10)
            axis.set(xlabel="terminal value", ylabel="% of class")
        else:
            x, *columns = CURVES[name].split()
            for column in columns:
                style = "x--" if "proxy" in column else "o" if isinstance(rows[0][x], str) else "o-"
                axis.plot([row[column] for row in rows], style, label=column)
            ticks = [short(row[x]).replace(" ", "\n") for row in rows]
            axis.set_xticks(range(len(rows)), ticks, fontsize=8)
            axis.set(title=name, xlabel=x, ylim=(max(axis.get_ylim()[0], -1.1), None))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, framealpha=0.6)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    common.launch(main, Args, PRESETS, __doc__)
