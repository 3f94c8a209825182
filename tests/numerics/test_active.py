"""What 6N counts: every parameter, of experts those that a token is sent to."""

import pytest

from megatrain.models import BlockModel, build_on_meta, split_model
from megatrain.models.active import active_params, flops_per_token
from megatrain.models.selection import Selection
from tests.models.tiny import tiny_configs


def model_of(name: str, selection: Selection | None = None) -> BlockModel:
    config = next(iter(tiny_configs(name)))
    built = build_on_meta(config, compute_dtype="float32")
    return split_model(built, compute_dtype="float32", selection=selection)


def test_a_dense_model_uses_all_of_its_parameters() -> None:
    model = model_of("llama")
    assert active_params(model) == model.num_params == model.hf_model.num_parameters()
    assert flops_per_token(model) == 6 * model.num_params


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "ernie4_5_moe", "glm4_moe"])
def test_a_mixture_uses_the_experts_that_a_token_is_sent_to(name: str) -> None:
    model = model_of(name)
    experts = 0
    for module in model.hf_model.modules():
        if type(module).__name__.endswith("Experts"):
            experts += sum(param.numel() for param in module.parameters())
    config = model.config
    chosen = config.moe_k if name == "ernie4_5_moe" else config.num_experts_per_tok
    total = next(
        getattr(config, key)
        for key in ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
        if getattr(config, key, None)
    )
    assert experts and chosen < total
    assert active_params(model) == model.num_params - experts + experts * chosen // total


def test_what_is_not_known_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mixtral")
    monkeypatch.setattr("megatrain.models.active.EXPERTS_PER_TOKEN", ("no_such_key",))
    assert active_params(model) is None and flops_per_token(model) is None
    assert flops_per_token(model_of("llama", Selection(frozen=["embed"]))) is None
