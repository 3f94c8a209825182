"""The work of a token by the 6N rule, N the parameters that it uses.

Of a mixture's experts these are the ones that it is sent to.  What is not known is None.
"""

import re
from collections import defaultdict

from transformers import PreTrainedModel

from megatrain.models.blocks import BlockKind, BlockModel
from megatrain.models.build import text_config

EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
"""What configs call the number of experts that a token is sent to."""
EXPERT = re.compile(r"(.*\.experts)\.(?:(\d+)\.)?.*")
"""A routed expert's parameter: fused, (experts, ...), or of one expert by its number."""


def flops_per_token(model: BlockModel) -> float | None:
    """6N: forward and backward of one token, attention and recompute left out.

    None where the rule does not hold because parameters are frozen, or N is not known.
    """
    active = active_params(model)
    streamed = (block for block in model.blocks if block.kind is not BlockKind.UNUSED)
    frozen = any(not part.trainable for block in streamed for part in block.layout.segments)
    return None if frozen or active is None else 6.0 * active


def active_params(model: BlockModel) -> int | None:
    """Parameters that one token is multiplied with, as 6N means it; tied ones counted once.

    None if the model has experts and its config does not say how many a token is sent to.
    """
    dense, of_experts, counts = _counted(model)
    if not of_experts:
        return dense
    chosen = _chosen_experts(model)
    if chosen is None:
        return None
    return dense + sum(
        numel * min(chosen, counts[group]) // counts[group] for group, numel in of_experts.items()
    )


def params_without_embeddings(hf_model: PreTrainedModel) -> int:
    """N of scaling laws: all parameters but the embedding and output matrices."""
    matrices = (hf_model.get_input_embeddings(), hf_model.get_output_embeddings())
    left_out = {id(matrix.weight) for matrix in matrices if matrix is not None}
    return sum(param.numel() for param in hf_model.parameters() if id(param) not in left_out)


def share_of_experts(model: BlockModel) -> float | None:
    """Share of a layer's experts that a token is sent to; None if that is not known."""
    _, _, counts = _counted(model)
    chosen = _chosen_experts(model)
    if chosen is None or not counts:
        return None
    most = max(counts.values())
    return min(chosen, most) / most


def _counted(model: BlockModel) -> tuple[int, dict[str, int], dict[str, int]]:
    """Parameters outside of experts; those of each group of experts, and their number."""
    dense, of_experts = 0, defaultdict[str, int](int)
    counts = defaultdict[str, int](int)
    for block in model.whole.blocks:
        for param in () if block.kind is BlockKind.UNUSED else block.layout.params:
            found = EXPERT.fullmatch(param.name)
            if found is None:
                dense += param.numel
                continue
            group, number = found.groups()
            of_experts[group] += param.numel
            fused = param.shape[0] if number is None else int(number) + 1
            counts[group] = max(counts[group], fused)
    return dense, of_experts, counts


def _chosen_experts(model: BlockModel) -> int | None:
    """How many a token is sent to."""
    config = text_config(model.config)
    named = (getattr(config, name, None) for name in EXPERTS_PER_TOKEN)
    return next((value for value in named if isinstance(value, int)), None)
