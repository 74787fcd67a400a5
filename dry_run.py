"""dry_run: sizes, shards and memory of a preset, counted from shapes: what --dry-run prints.

No network, no weights, no GPU, no run folder: models are built on the meta device. Nothing here was
measured on a GPU. docs/scale.md has the table of all presets, and what could differ.

Units: bytes, in print GB = 1e9 bytes. Upper bounds, at the longest sequences."""

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch
import transformers
from transformers import PretrainedConfig, Qwen2Config, Qwen3Config

import tiny
from runtime import UsageError, num_processes, require

GPU = 80e9  # a GPU of 80 GB reports 85e9 bytes; the rest is left to CUDA, NCCL and gaps
ENGINE_RESERVE = 4e9  # of vLLM's share, for its activations and CUDA graphs: a guess
ENGINE_ASLEEP = 2e9  # what vLLM keeps while it sleeps, mostly CUDA graphs: a guess
CHUNK = 2**26  # logits of a chunk on a GPU, as in models.token_logprobs


def shape(kind, hidden, layers, heads, kv_heads, mlp, vocabulary, positions, tied=False, **more):
    """A configuration from a model's published numbers."""
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads"
    names += " intermediate_size vocab_size max_position_embeddings"
    values = hidden, layers, heads, kv_heads, mlp, vocabulary, positions
    more |= dict(zip(names.split(), values, strict=True))
    return kind(tie_word_embeddings=tied, **more)


SHAPES = {  # found by their name in a hub id or in the path of a folder
    "qwen2.5-math-7b": shape(Qwen2Config, 3584, 28, 28, 4, 18_944, 152_064, 4096),
    "qwen2.5-7b": shape(Qwen2Config, 3584, 28, 28, 4, 18_944, 152_064, 131_072),
    "qwen2.5-32b": shape(Qwen2Config, 5120, 64, 40, 8, 27_648, 152_064, 131_072),
    "qwen3-4b": shape(Qwen3Config, 2560, 36, 32, 8, 9728, 151_936, 32_768, tied=True, head_dim=128),
}


def find_config(name: str) -> PretrainedConfig:
    """A model's configuration: of its folder, of the tiny world, or one that stands above.
    UsageError where there is none."""
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return transformers.AutoConfig.from_pretrained(folder)
    if name in ("tiny", "tiny-untrained", "tiny-pi_0", "tiny-critic"):
        return tiny.make_config()
    known = [config for part, config in SHAPES.items() if part in name.lower()]
    require(
        len(known) > 0,
        f"--dry-run does not know the shape of {name!r}: no folder with a config.json, and its "
        f"name contains none of {', '.join(SHAPES)}",
    )
    return known[0]


@dataclass(frozen=True)
class Size:
    """What is counted of one module; bytes are those of bf16 computation."""

    params: int  # a tied embedding counts once
    layer: int  # of these, in one layer; FSDP gathers layer by layer
    num_layers: int
    root: int  # outside the layers; FSDP gathers them once per micro-batch
    head: int  # in the head over the vocabulary; a critic has none
    hidden: int
    saved: int  # bytes per token that one layer keeps for its backward pass
    kv: int  # bytes per token in the engine's cache, all layers


def size_of(config: PretrainedConfig, critic: bool = False) -> Size:
    """Build a policy or a critic on the meta device, and count."""
    task = "AutoModelForTokenClassification" if critic else "AutoModelForCausalLM"
    config = copy.deepcopy(config)
    config.num_labels = 1
    with torch.device("meta"):
        lm = vars(transformers)[task].from_config(config)
    try:
        layers, hidden = lm.base_model.layers, config.hidden_size
        attention, mlp = layers[0].self_attn, layers[0].mlp
        q, k, gate = (x.out_features for x in (attention.q_proj, attention.k_proj, mlp.gate_proj))
    except AttributeError:
        raise UsageError(f"--dry-run cannot count a {type(lm).__name__}") from None
    # Two norms: their input in fp32, normed, and their output. Rotated queries and keys, values,
    # the attention's output. The gate before and after its activation, up, and their product.
    saved = 2 * (4 + 2 + 2) * hidden + 2 * (q + k + k + q) + 2 * 4 * gate
    saved += (4 + 2) * (q + k) if hasattr(attention, "q_norm") else 0
    total, layer = lm.num_parameters(), sum(p.numel() for p in layers[0].parameters())
    head = 0 if critic else lm.get_output_embeddings().weight.numel()
    root, kv = total - layer * len(layers), 2 * 2 * k * len(layers)
    return Size(total, layer, len(layers), root, head, hidden, saved, kv)


def longest_sequence(args) -> int:
    return args.max_prompt_tokens + args.max_response_tokens


def responses_per_step(args) -> int:
    return vars(args).get("batch_size") or args.prompts_per_step * args.group_size


def policy_name(args) -> str:
    return vars(args).get("policy") or args.model  # the folder need not exist yet


def update_memory(size: Size, args, world: int) -> dict[str, float]:
    """Bytes per GPU that come and go in the update of one module, at its worst moment.

    Weights are gathered in bf16. Their bf16 gradients are turned to fp32 to be reduced over the
    ranks, and stay as fp32 shards."""
    recompute, tokens = args.activation_checkpointing, args.tokens_per_microbatch
    entry, inside = 2 * size.hidden * tokens, size.saved * tokens  # of a layer
    kept = size.num_layers * (entry if recompute else inside)
    moments = [
        {  # at the head: final norm, hidden states; logits of a chunk twice in fp32, once in bf16
            "activations": kept + 7 * entry,
            "gathered weights, gradients": 2 * size.root + (4 + 2) * size.head,
            "logits of a chunk": (4 + 4 + 2) * CHUNK if size.head else 0,
        },
        {  # in a layer: what it recomputes, and gradients of half that size
            "activations": kept + (1.5 if recompute else 0.5) * inside,
            "gathered weights, gradients": 2 * (size.root + size.head) + 12 * size.layer,
        },
        {"gathered weights, gradients": (4 + 2) * size.root},  # reducing what is outside the layers
    ]
    shards = {"gradients, fp32": 0 if args.cpu_offload else 4 * size.params / world}
    return shards | max(moments, key=lambda rows: sum(rows.values()))


@dataclass(frozen=True)
class Plan:
    """What a preset needs on `world` ranks, in bytes."""

    world: int
    modules: dict[str, tuple[Size, bool]]  # and whether it is trained
    phases: dict[str, dict[str, float]]  # phase of a step -> row -> bytes per GPU
    cache: float  # tokens that the cache of one engine holds
    host: dict[str, float]  # bytes of CPU memory per node

    def peaks(self) -> dict[str, float]:
        return {phase: sum(rows.values()) for phase, rows in self.phases.items()}

    def verdict(self, args) -> str:
        peaks, enough = self.peaks(), self.cache >= longest_sequence(args)
        fits = "fits" if enough and max(peaks.values()) <= GPU else "does not fit"
        parts = [f"{phase} {x / 1e9:.0f} GB" for phase, x in peaks.items()]
        return f"{fits}: {', '.join(parts)}{'' if enough else '; no sequence fits the engine'}"


def make_plan(args, trained_critic=None, frozen_critic=None, reference=False) -> Plan:
    """Count what a script needs. Critics are names of models; a reference is a second policy."""
    world, tp, name = num_processes(args), args.tensor_parallel, trained_critic or frozen_critic
    policy = size_of(find_config(policy_name(args)))
    modules = {"policy": (policy, True)}
    if name:
        modules["critic"] = size_of(find_config(name), critic=True), bool(trained_critic)
    if reference:
        modules["reference"] = policy, False
    learned = sum(size.params for size, trained in modules.values() if trained)
    fixed = sum(size.params for size, trained in modules.values() if not trained)
    state = {"weights, fp32": 4 * learned, "moments of AdamW, fp32": 8 * learned}
    state["frozen weights, bf16"] = 2 * fixed
    held = (sum(state.values()) + 4 * learned) / world  # with gradients
    state = {row: 0 if args.cpu_offload else x / world for row, x in state.items()}
    state["reference, gathered"] = 2 * policy.root * reference  # no backward lets go of its root
    share = args.engine_memory * GPU
    sampled = vars(args).get("gen_prompts", 0) * vars(args).get("group_size", 1)
    sampled = sampled or responses_per_step(args)  # before the ranks exchange them
    sent = 0 if args.cpu_offload else 8 * sampled * args.max_response_tokens
    phases = {"rollout": state | {"vLLM": share, "responses to all ranks": sent}}
    batch = 24 * responses_per_step(args) / world * longest_sequence(args)  # ids, log-probs, values
    for who, (size, trained) in reversed(modules.items()):
        if trained:
            rows = state | {"vLLM, asleep": ENGINE_ASLEEP, "batch": batch}
            phases[f"{who} update"] = rows | update_memory(size, args, world)
    ranks = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", 8)))  # of a node
    copies = 1 + (ranks / world if args.cpu_offload else 0)  # rank 0's, and the shards beside it
    host = {"loading, a whole fp32 model in rank 0": 4 * policy.params * copies}
    if args.cpu_offload:
        host["weights, moments, gradients"] = held * ranks
    cache = (share - 2 * policy.params / tp - ENGINE_RESERVE) / (policy.kv / tp)
    return Plan(world, modules, phases, cache, host)


def step_lines(args, plan: Plan) -> Iterator[tuple[str, str]]:
    """(name, text) of what one step is made of."""
    settings, batch, longest = vars(args), responses_per_step(args), longest_sequence(args)
    minibatch, tokens = settings.get("minibatch_size", batch), args.tokens_per_microbatch
    epochs, rows = 1 if "batch_size" in settings else args.num_epochs, ceil(minibatch / plan.world)
    pieces = ceil(rows / max(1, tokens // longest))
    positions = args.max_context or find_config(policy_name(args)).max_position_embeddings
    limits = f"{args.max_prompt_tokens:,} + {args.max_response_tokens:,} = {longest:,} tokens"
    yield "limits", f"{limits} of prompt and response, of {positions:,} positions"
    yield "a step", f"{batch:,} responses, up to {batch * args.max_response_tokens:,} tokens"
    yield "updates", f"{batch // minibatch * epochs} a batch, of {minibatch:,} responses"
    yield "a rank", f"{rows} of them, in up to {pieces} micro-batches of {tokens:,} tokens"
    if "critic_updates_per_batch" in settings:
        yield "critic", f"{args.critic_updates_per_batch * epochs} updates a batch"
    if settings.get("dynamic_sampling"):
        yield "sampling", f"up to {args.max_gen_batches} rounds of {args.gen_prompts:,} prompts"
    if longest > positions:
        yield "warning", "the limits are over the model's positions; see --max-context"


def dry_run(args, trained_critic=None, frozen_critic=None, reference=False) -> None:
    """Print the plan of a preset and whether it fits, on rank 0."""
    critics, cpu = (trained_critic, frozen_critic, reference), args.engine_memory > 1
    plan = make_plan(args, *critics)
    if int(os.environ.get("RANK", 0)) > 0:
        return
    lines, tp, room = [], args.tensor_parallel, max(0, plan.cache)
    for who, (size, trained) in plan.modules.items():
        share = f"{'trained' if trained else 'frozen'}; {size.params // plan.world:,} a rank"
        lines += [(who, f"{size.params:,} parameters, {share}")]
    frozen = 4 if cpu else 2
    state = sum(s.params * (16 if trained else frozen) for s, trained in plan.modules.values())
    saved = sum(s.params * 12 for s, trained in plan.modules.values() if trained)
    held = f"{state / 1e9:,.3g} GB, 16 bytes a trained parameter, {frozen} a frozen one"
    lines += [*step_lines(args, plan), ("state", f"{held}; a checkpoint {saved / 1e9:,.3g} GB")]
    if not cpu:
        held = f"{room:,.0f} tokens, or {room // longest_sequence(args):,.0f} longest sequences"
        lines += [("engines", f"{plan.world // tp}, each on {tp} GPUs with room for {held}")]
    assumed = "" if "WORLD_SIZE" in os.environ else ", as in the README"
    where = "a CPU (--engine-memory is in GB)" if cpu else f"{plan.world} GPUs of 80 GB{assumed}"
    print(f"dry run of {policy_name(args)} on {where}")
    print("\n".join(f"{name:<12}{text}" for name, text in lines))
    if cpu:
        return
    rows = dict.fromkeys(row for phase in plan.phases.values() for row, x in phase.items() if x)
    print(f"\n{'GB per GPU':<30}" + "".join(f"{phase:>16}" for phase in plan.phases))
    table = {row: [phase.get(row, 0) for phase in plan.phases.values()] for row in rows}
    for row, cells in (table | {"total": plan.peaks().values()}).items():
        print(f"  {row:<28}" + "".join(f"{x / 1e9:16.1f}" if x else f"{'-':>16}" for x in cells))
    print("\nGB of CPU memory per node")
    print("\n".join(f"  {row:<44}{x / 1e9:8,.0f}" for row, x in plan.host.items()))
    print(f"\n{plan.verdict(args)}")
    changes = {"cpu_offload": True, "activation_checkpointing": True, "engine_memory": 0.3}
    changes |= {"tokens_per_microbatch": longest_sequence(args), "tensor_parallel": 2 * tp}
    for name, value in changes.items():
        other = replace(args, **{name: value})
        if other != args and not plan.verdict(args).startswith("fits"):
            flag = f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
            print(f"with {flag} it {make_plan(other, *critics).verdict(other)}")
